"""Image backbones of stride 8, and positional encodings of the cells."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from torchcpl.encoders.norm import BatchNorm, normalised
from torchcpl.encoders.resnet import ResNet18, load_resnet18
from torchcpl.tasks.paths.sampling import CELL

BACKBONES = ("resnet18", "patches")


class Patches(nn.Module):
    """A linear patch embedding, then residual convolutions over the cells with doubling dilation.

    At 48 channels 1/14 of the work of ResNet-18's first two stages: for small data and CPUs.
    """

    precise = True  # as ResNet18

    def __init__(self, channels: int, blocks: int = 4) -> None:
        super().__init__()
        self.channels = channels
        self.embed = nn.Conv2d(3, channels, CELL, stride=CELL)
        self.norms = nn.ModuleList(BatchNorm(channels) for _ in range(blocks))
        self.convs = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=2**i, dilation=2**i) for i in range(blocks))

    def forward(self, images: Tensor) -> Tensor:
        """images (B, 3, H, W), normalised -> (B, channels, H/8, W/8)."""
        x: Tensor = self.embed(images)
        for norm, conv in zip(self.norms, self.convs, strict=True):
            x = x + conv(normalised(norm, x, relu=True))
        return x


def build_backbone(name: str, dim: int, weights: str = "") -> ResNet18 | Patches:
    """The network of that name: ResNet-18's first two stages, or patches of ``dim`` channels."""
    if name == "patches":
        if weights:
            raise ValueError(f"weights = {weights!r}: expected none with backbone = 'patches'")
        return Patches(dim)
    return load_resnet18(weights, cut=2) if weights else ResNet18(cut=2)


def position_code(size: int, dim: int) -> Tensor:
    """Sinusoids of row and column, (size², dim): half of the channels each, wavelengths from 2π to 10,000·2π cells."""
    if dim % 4:
        raise ValueError(f"dim: expected a multiple of 4 for the position code, got {dim}")
    rates = torch.exp(torch.arange(dim // 4) * (-math.log(10_000.0) / (dim // 4)))
    angles = torch.arange(size).unsqueeze(-1) * rates  # (size, dim/4)
    code = torch.cat([angles.sin(), angles.cos()], -1)  # (size, dim/2)
    return torch.cat([code.repeat_interleave(size, 0), code.repeat(size, 1)], -1)  # of the row, of the column

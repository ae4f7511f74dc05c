"""ResNet-18 (He et al. 2016) with torchvision's parameter names, cut after any of its four stages.

Weights are read from a ``.safetensors``, ``.pth`` or ``.pt`` file; nothing is downloaded.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchcpl.checks import describe
from torchcpl.encoders.norm import BatchNorm, normalised
from torchcpl.files import extra

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
SIDE = 224  # of the images it is trained on


def prepare(images: Tensor) -> Tensor:
    """Images (B, H, W, 3), uint8 RGB, as a ResNet takes them: (B, 3, 224, 224) float32, channels last in memory.

    They are normalised with the ImageNet mean and std, (x / 255 − mean) / std, and resized bilinearly.
    """
    if images.ndim != 4 or images.shape[-1] != 3 or images.dtype != torch.uint8:
        raise ValueError(f"images: expected a uint8 tensor of shape (B, H, W, 3), got {describe(images)}")
    mean = torch.tensor(IMAGENET_MEAN, device=images.device)
    std = torch.tensor(IMAGENET_STD, device=images.device)
    x = ((images.float() / 255 - mean) / std).permute(0, 3, 1, 2)  # (B, 3, H, W), channels last
    return F.interpolate(x, size=(SIDE, SIDE), mode="bilinear", align_corners=False)


class BasicBlock(nn.Module):
    """relu(x' + bn(conv(relu(bn(conv(x)))))), where x' = x, or a 1×1 projection of it if the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn1 = BatchNorm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = BatchNorm(outputs)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), BatchNorm(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = normalised(self.bn1, self.conv1(x), relu=True)
        shortcut = x if self.downsample is None else self.downsample(x)
        return normalised(self.bn2, self.conv2(y), shortcut, relu=True)


class ResNet18(nn.Module):
    """ResNet-18 up to and including stage ``cut``: stride 2^(cut+1), 32·2^cut channels; convolutions channels last.

    Attributes:
        cut: the last stage, 1 to 4.
        channels: channels of the output.
        stride: input pixels per output cell.

    >>> net = ResNet18(cut=2)
    >>> net.channels, net.stride
    (128, 8)
    >>> net(torch.zeros(1, 3, 64, 64)).shape
    torch.Size([1, 128, 8, 8])
    """

    precise = True  # kept in float32 at inference: rounding the image layers changes predictions most

    def __init__(self, cut: int = 4) -> None:
        super().__init__()
        if cut not in (1, 2, 3, 4):
            raise ValueError(f"cut: expected a stage from 1 to 4, got {cut!r}")
        self.cut, self.channels, self.stride = cut, 32 * 2**cut, 2 ** (cut + 1)
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = BatchNorm(64)
        inputs = 64
        for stage in range(1, cut + 1):
            outputs = 32 * 2**stage
            blocks = BasicBlock(inputs, outputs, 1 if stage == 1 else 2), BasicBlock(outputs, outputs, 1)
            self.add_module(f"layer{stage}", nn.Sequential(*blocks))
            inputs = outputs
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, images: Tensor) -> Tensor:
        """images (B, 3, H, W), normalised -> (B, channels, ⌈H/stride⌉, ⌈W/stride⌉)."""
        x = normalised(self.bn1, self.conv1(images), relu=True, pool=True)
        for stage in range(1, self.cut + 1):
            x = self.get_submodule(f"layer{stage}")(x)
        return x

    def features(self, images: Tensor) -> Tensor:
        """images (B, 3, H, W), normalised -> (B, channels), the mean over all cells."""
        return self(images).mean((2, 3))


def load_resnet18(path: str | os.PathLike[str], cut: int = 4) -> ResNet18:
    """ResNet-18 up to stage ``cut`` in float32 and evaluation mode, with the weights of a file.

    The file holds a state dict with torchvision's names. A classifier (``fc.*``) and stages after ``cut`` are ignored;
    any other unknown name, a missing one or a wrong shape raises.
    """
    net = ResNet18(cut)
    ignored = ("fc.", *(f"layer{stage}." for stage in range(cut + 1, 5)))
    state = {name: value.float() for name, value in _read_state(Path(path)).items() if not name.startswith(ignored)}
    # Some files lack the counters, which are not needed at inference.
    counters = {name: value for name, value in net.state_dict().items() if name.endswith("num_batches_tracked")}
    try:
        net.load_state_dict(counters | state)
    except RuntimeError as error:  # which lists missing and unexpected names and wrong shapes
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"{path}: not a ResNet-18 up to stage {cut}: {reason}") from None
    return net.eval()


def _read_state(path: Path) -> dict[str, Tensor]:
    if path.suffix not in (".safetensors", ".pth", ".pt"):
        raise ValueError(f"{path}: expected a .safetensors, .pth or .pt file")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such weights file")
    state: Any
    try:
        if path.suffix == ".safetensors":
            with extra():
                from safetensors.torch import load_file
            state = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except (ImportError, OSError):
        raise
    except Exception as error:  # each reader raises its own types
        raise ValueError(f"{path}: not a readable weights file: {error}") from error
    if not isinstance(state, dict) or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in state.items()):
        raise ValueError(f"{path}: expected a state dict (name -> tensor), got {type(state).__name__}")
    return state

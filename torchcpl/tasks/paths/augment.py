"""Training scenes changed at random, image and path alike: mirrored, turned about the ego, lines left out."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchcpl.tasks.paths.sampling import CELL, GRID, LANE_DIVIDER, PALETTE, ROAD, ROAD_DIVIDER, STEP

LINES = (ROAD_DIVIDER, LANE_DIVIDER)


class Augmentation(NamedTuple):
    """How far scenes may be changed; each is drawn for every scene alone, uniformly up to these bounds."""

    flip: bool = False  # half of the scenes
    rotate: float = 0.0  # degrees to either side, about the ego
    zoom: float = 0.0  # largest enlargement; as much smaller: a factor in [1 / (1 + zoom), 1 + zoom]
    shift: float = 0.0  # px along each axis
    drop_lines: float = 0.0  # probability of each kind of line to be left out of a scene

    def __call__(self, images: Tensor, path: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Images (B, H, W) and one path of each (B, T, 2), changed."""
        coins = torch.rand(5 + len(LINES), len(images), generator=generator, device=images.device)
        if self.flip:
            images, path = flip(images, path, coins[0] < 0.5)
        if self.rotate or self.zoom or self.shift:
            spread = 2 * coins[1:5] - 1  # (4, B) in [−1, 1)
            scale = torch.exp(spread[1] * math.log1p(self.zoom))
            images, path = turn(images, path, spread[0] * math.radians(self.rotate), scale, self.shift * spread[2:].T)
        if self.drop_lines:
            images = drop_lines(images, coins[5:] < self.drop_lines)
        return images, path


def flip(images: Tensor, paths: Tensor, which: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Mirror left and right of the ego, which heads right: image rows (B, H, W) and the y of paths (B, ..., 2).

    ``which`` (B,) bool picks the scenes to mirror; all by default. Padding (−1) stays.
    """
    y = torch.where(paths[..., 1] < 0, paths[..., 1], images.shape[-2] - paths[..., 1])
    mirrored = images.flip(-2), torch.stack([paths[..., 0], y], dim=-1)
    if which is None:
        return mirrored
    chosen = [which.view(-1, *[1] * (t.dim() - 1)) for t in (images, paths)]
    return torch.where(chosen[0], mirrored[0], images), torch.where(chosen[1], mirrored[1], paths)


def turn(images: Tensor, path: Tensor, angle: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """Turn scenes about the ego by ``angle`` (B,) radians, enlarge by ``scale`` (B,), move by ``shift`` (B, 2) px.

    A point p goes to q = ego + shift + scale·R(angle)·(p − ego), the ego being the path's first point. Every pixel
    takes the colour of the nearest one of the image (B, H, W), background from beyond it. The path (B, T, 2) is cut
    where it leaves the image and sampled again, a point every STEP px and only the first in each cell.
    """
    ego, (height, width) = path[:, 0], images.shape[1:]
    cos, sin = angle.cos() * scale, angle.sin() * scale
    ahead = torch.stack([cos, -sin, sin, cos], -1).view(-1, 2, 2)  # (B, 2, 2): scale·R
    back = ahead.transpose(1, 2) / scale.square()[:, None, None]  # its inverse
    # The source of pixel (r, c) is linear in c and r: two small sums in place of a product a pixel.
    origin = ego - (back @ (ego + shift).unsqueeze(-1)).squeeze(-1)  # (B, 2)
    steps = [torch.arange(size, device=images.device) + 0.5 for size in (width, height)]
    x, y = (
        (back[:, axis, 0, None] * steps[0] + origin[:, axis, None]).unsqueeze(1)
        + (back[:, axis, 1, None] * steps[1]).unsqueeze(2)
        for axis in (0, 1)
    )  # (B, H, W) each
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    pixel = torch.where(inside, y, 0).int() * width + torch.where(inside, x, 0).int()
    turned = images.flatten(1).gather(1, pixel.flatten(1).long()).view_as(images) * inside
    real = path[..., :1] >= 0
    points = ego[:, None] + shift[:, None] + (path - ego[:, None]) @ ahead.transpose(1, 2)
    return turned, one_a_cell(points.where(real, -1), real.squeeze(-1), (width, height))


def one_a_cell(path: Tensor, real: Tensor, size: tuple[int, int]) -> Tensor:
    """Points (B, T, 2) every STEP px along a path, up to where it leaves the image, the first in each cell; −1 after.

    ``real`` (B, T) says which of the given points are the path's, the first ones. What bends is a little longer than
    the line through its points, so the last may lie up to half a step short.
    """
    steps = torch.arange(path.shape[1], device=path.device)
    last = real.sum(-1, keepdim=True) - 1  # (B, 1)
    arc = torch.nn.functional.pad(((path[:, 1:] - path[:, :-1]).norm(dim=-1) * real[:, 1:]).cumsum(-1), (1, 0))
    wanted = (steps * STEP).expand(len(path), -1).contiguous()
    right = torch.minimum(torch.searchsorted(arc, wanted, right=True), last)
    left = (right - 1).clamp(min=0)
    share = (wanted - arc.gather(1, left)) / (arc.gather(1, right) - arc.gather(1, left)).clamp(min=1e-6)
    a, b = (path.gather(1, at.unsqueeze(-1).expand(-1, -1, 2)) for at in (left, right))
    points = torch.lerp(a, b, share.clamp(0, 1).unsqueeze(-1))
    inside = (points >= 0).all(-1) & (points[..., 0] < size[0]) & (points[..., 1] < size[1])
    within = inside & (wanted < arc[:, -1:] + STEP / 2)
    within = within.byte().cummin(-1).values.bool()  # up to the first that is not
    cell = (points / CELL).floor().long()
    number = torch.where(within, cell[..., 1] * GRID + cell[..., 0], -1)
    again = (number.unsqueeze(1) == number.unsqueeze(2)).tril(-1).any(-1)
    kept = within & ~again
    order = (~kept).byte().argsort(dim=-1, stable=True)
    points = points.masked_fill(~kept.unsqueeze(-1), -1)
    return points.gather(1, order.unsqueeze(-1).expand(-1, -1, 2))


def drop_lines(images: Tensor, which: Tensor) -> Tensor:
    """Paint lines over with road: of each kind in LINES those of the scenes in ``which`` (kinds, B)."""
    colours = torch.arange(len(PALETTE), dtype=images.dtype, device=images.device).repeat(len(images), 1)  # (B, 7)
    for kind, gone in zip(LINES, which, strict=True):
        colours[:, kind] = torch.where(gone, ROAD, kind).to(images.dtype)
    return colours.gather(1, images.flatten(1).long()).view_as(images)

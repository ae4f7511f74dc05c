# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Batch normalisation in evaluation, fused with the residual sum, ReLU and max-pool: ``norm.normalised`` in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import PropagateNan

BLOCK = 1024
NAN_STAYS = tl.constexpr(PropagateNan.ALL)


def batch_norm(
    x: Tensor, moments: tuple[Tensor, ...], eps: float, add: Tensor | None, relu: bool, pool: bool
) -> Tensor:
    """``x`` (B, C, H, W), channels last, normalised by ``moments``: weight, bias, mean and variance, (C,) each.

    ``pool`` needs ``relu`` and no ``add``.
    """
    batch, channels, height, width = x.shape
    shape = (batch, channels, (height + 1) // 2, (width + 1) // 2) if pool else x.shape
    out = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    grid = (-(-out.numel() // BLOCK),)
    options = {"C": channels, "RELU": relu, "POOL": pool, "BLOCK": BLOCK}
    with torch.cuda.device_of(x):
        _batch_norm[grid](x, *moments, add, out, eps, height, width, *shape[2:], out.numel(), **options)
    return out


# fmt: off
@triton.jit
def _batch_norm(
    x, weight, bias, mean, variance, add, out, eps, height, width, rows, columns, count,
    C: tl.constexpr, RELU: tl.constexpr, POOL: tl.constexpr, BLOCK: tl.constexpr,
):
    # fmt: on
    """One block of the elements of ``out``.

    x (B, C, height, width): channels last.
    weight, bias, mean, variance (C,): per channel.
    add (B, C, height, width): channels last, added before the ReLU; None for no residual.
    out (B, C, rows, columns): channels last, written.
    count: number of elements of out.
    RELU, POOL: whether a ReLU follows, and a 3×3 max-pool of stride 2.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = at < count
    c = (at % C).to(tl.int32)
    w = tl.load(weight + c).to(tl.float32)
    shift = tl.load(bias + c).to(tl.float32)
    centre = tl.load(mean + c).to(tl.float32)
    spread = tl.rsqrt(tl.load(variance + c).to(tl.float32) + eps)
    if POOL:  # zero padding: after a ReLU nothing is less
        pixel = at // C
        row, column = (pixel // columns) % rows * 2 - 1, pixel % columns * 2 - 1
        image = pixel // (columns * rows) * height
        y = tl.zeros((BLOCK,), tl.float32)
        for i in tl.static_range(3):
            for j in tl.static_range(3):
                there = real & (row + i >= 0) & (row + i < height) & (column + j >= 0) & (column + j < width)
                near = tl.load(x + ((image + row + i) * width + column + j) * C + c, there, 0.0).to(tl.float32)
                near = tl.where(there, w * (near - centre) * spread + shift, 0.0)
                y = tl.maximum(y, near, propagate_nan=NAN_STAYS)
    else:
        y = w * (tl.load(x + at, real, 0.0).to(tl.float32) - centre) * spread + shift
        if add is not None:
            y += tl.load(add + at, real, 0.0).to(tl.float32)
        if RELU:
            y = tl.where(y < 0, 0.0, y)  # NaN stays
    tl.store(out + at, y, real)

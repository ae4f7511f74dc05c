# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Numbers as pairs of bfloat16: ``pairs.plain_pairs`` as one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def pairs(x: Tensor) -> Tensor:
    """(M, K) to (M, 3K) bfloat16: high, low and again high parts."""
    rows, width = x.shape
    out = x.new_empty(rows, 3 * width, dtype=torch.bfloat16)
    with torch.cuda.device_of(x):
        _pairs[(-(-x.numel() // BLOCK),)](x, *x.stride(), out, width, x.numel(), BLOCK=BLOCK)
    return out


@triton.jit
def _pairs(x_ptr, x_row, x_column, out_ptr, width, count, BLOCK: tl.constexpr):
    """One block of the elements of x.

    x_ptr (M, K): with its strides.
    out_ptr (M, 3K): written, bfloat16.
    width, count: K and M·K.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = at < count
    row, column = at // width, at % width
    x = tl.load(x_ptr + row * x_row + column * x_column, real, 0).to(tl.float32)
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    low = tl.where(tl.abs(rest) < float("inf"), rest, 0.0).to(tl.bfloat16)  # inf − inf is NaN
    out_ptr += row * 3 * width + column
    tl.store(out_ptr, high, real)
    tl.store(out_ptr + width, low, real)
    tl.store(out_ptr + 2 * width, high, real)

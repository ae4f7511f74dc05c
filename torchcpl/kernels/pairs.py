"""Numbers as pairs of bfloat16, for linear layers that need more precision than one."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torchcpl.checks import tracing
from torchcpl.kernels import dispatch


def pairs(x: Tensor) -> Tensor:
    """(M, K) to (M, 3K) bfloat16, every number as two: high, low and again high parts.

    >>> pairs(torch.tensor([[1 + 2**-8]])).tolist()  # of which bfloat16 holds 1
    [[1.0, 0.00390625, 1.0]]
    """

    def obstacle() -> str | None:
        return "tracing or tangents" if tracing() or forward_ad._current_level >= 0 else dispatch.device_obstacle(x)

    def fast() -> Tensor:
        from torchcpl.kernels import pairs_triton

        return pairs_triton.pairs(x)

    return dispatch.either(obstacle, fast, lambda: plain_pairs(x), x)


def plain_pairs(x: Tensor) -> Tensor:
    """``pairs`` in plain torch."""
    x = x.float()
    high = x.bfloat16()
    rest = x - high.float()
    return torch.cat([high, rest.where(rest.isfinite(), 0).bfloat16(), high], -1)  # inf − inf is NaN

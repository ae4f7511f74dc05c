"""Independent computations in parallel on CUDA streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchcpl.checks import capturing


def side_by_side(*works: Callable[[], Any]) -> list[Any]:
    """The results. While a CUDA graph is captured they are branches of it, which the device may run at once.

    The first is started first and should be the longest. Sequential where gradients are needed, whose backward pass
    would have to synchronise the branches too.
    """
    if not capturing() or torch.is_grad_enabled():
        return [work() for work in works]
    main = torch.cuda.current_stream()
    sides = [torch.cuda.Stream() for _ in works[1:]]
    for side in sides:
        side.wait_stream(main)
    results = [works[0]()]
    for side, work in zip(sides, works[1:], strict=True):
        with torch.cuda.stream(side):
            results.append(work())
        main.wait_stream(side)
    return results

"""Pieces of work that do not depend on each other, at the same time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchcpl.checks import capturing


def side_by_side(*works: Callable[[], Any]) -> list[Any]:
    """The results. While a CUDA graph is captured they are branches of it, which the device may run at once.

    One after the other where gradients are wanted, whose pass backwards would have to wait for the branches too.
    """
    if not capturing() or torch.is_grad_enabled():
        return [work() for work in works]
    main = torch.cuda.current_stream()
    results, sides = [], []
    for work in works[1:]:
        side = torch.cuda.Stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            results.append(work())
        sides.append(side)
    results.insert(0, works[0]())
    for side in sides:
        main.wait_stream(side)
    return results

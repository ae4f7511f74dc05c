"""Shared by the figures of the tasks: a selection step by step, and as a page to explore."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from torchcpl.constraints import Rules
from torchcpl.explore import Explorer, explore
from torchcpl.functional import prefix_logits
from torchcpl.potentials import Potentials
from torchcpl.selectors import Method, Stepwise


class Steps(NamedTuple):
    """The picks of a stepwise method from one row, with its probabilities after 0, 1, …, T picks."""

    picks: list[int]  # (T,)
    probabilities: NDArray[Any]  # (T+1, N+1) of the next choice, the stop last
    added: NDArray[Any]  # (T+1, N) what the picks added to the logits
    potentials: Potentials


def _stepwise(method: Method) -> Stepwise:
    if not isinstance(method, Stepwise):
        raise ValueError(f"model: expected one that selects step by step, got {type(method).__name__}")
    return method


@torch.inference_mode()
def steps_of(method: Method, encoded: Any, mask: Tensor, max_len: int, knob: float | None = None) -> Steps:
    """The selection from encoded candidates (1, N, d), step by step; ValueError if the method is not stepwise."""
    method = _stepwise(method)
    pot = method.potentials(encoded, mask)
    selection = method.pick(pot, max_len, knob)
    picks = selection.tolist()[0]
    order = selection.indices[:, : len(picks)]
    rules = Rules(pot, max_len, method.min_len, method.greedy_options(knob).get("stop_bias", 0.0))
    logits = prefix_logits(pot, order[:, None], rules)[0, 0]
    added, _ = pot.interaction.prefix_logits(order)
    return Steps(picks, array(logits.softmax(-1)), array(added[0]), pot)


def explorer(method: Method, encoded: Any, mask: Tensor, max_len: int, knob: float | None, **page: Any) -> Explorer:
    """The selection from encoded candidates (1, N, d) as a page that decodes like the method; see `explore`."""
    method = _stepwise(method)
    return explore(method.potentials(encoded, mask), max_len=max_len, **method.greedy_options(knob), **page)


def array(values: Tensor) -> NDArray[Any]:
    return values.float().cpu().numpy() if values.is_floating_point() else values.cpu().numpy()

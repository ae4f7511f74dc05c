"""Greedy decoding: the likeliest choice at every step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchcpl.constraints import Constraint, Rules
from torchcpl.decoding.rollout import first_of, rollout, samples_first
from torchcpl.kernels import greedy_numpy
from torchcpl.potentials import Potentials, Selection


@torch.no_grad()
def greedy(
    pot: Potentials,
    max_len: int | None = None,
    *,
    min_len: int = 0,
    stop_bias: float | Tensor = 0.0,
    constraints: Sequence[Constraint] = (),
) -> Selection:
    """Pick the likeliest choice until the stop wins; of equals, the lowest index.

    Returns ``indices`` (B, T) with T = min(max_len, N), ``lengths`` (B,) and ``log_prob`` (B,).
    """
    rules = Rules(pot, max_len, min_len, stop_bias, constraints)
    if greedy_numpy.applies(pot, rules):
        return greedy_numpy.greedy(pot, rules)
    return first_of(samples_first(rollout(pot, rules, 1, lambda log_probs: log_probs.argmax(-1))))

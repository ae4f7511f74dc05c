"""Greedy decoding: the likeliest choice at every step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torchcpl.checks import check_number
from torchcpl.constraints import Constraint, Rules
from torchcpl.decoding.rollout import refuse_tracing, rollout
from torchcpl.kernels import dispatch
from torchcpl.potentials import Potentials, Selection


@torch.no_grad()
def greedy(
    pot: Potentials,
    max_len: int | None = None,
    *,
    min_len: int = 0,
    stop_bias: float | Tensor = 0.0,
    stop_threshold: float | None = None,
    constraints: Sequence[Constraint] = (),
) -> Selection:
    """Pick the likeliest choice until that is the stop; ties go to the lowest index.

    Among many equally good candidates each is unlikely, and a stop of modest probability beats every one of them. With
    ``stop_threshold`` the stop is chosen once its probability reaches the threshold, and else the likeliest candidate.

    Returns ``indices`` (B, T) with T = min(max_len, N), ``lengths`` (B,) and ``log_prob`` (B,).
    """
    refuse_tracing()
    rules = Rules(pot, max_len, min_len, stop_bias, constraints)
    check_number("stop_threshold", stop_threshold, "a probability in (0, 1]", lambda p: 0 < p <= 1, optional=True)

    def choose(log_probs: Tensor) -> Tensor:
        if stop_threshold is None:
            return log_probs.argmax(-1)
        best, pick = log_probs[..., :-1].max(-1)
        goes_on = (log_probs[..., -1] < math.log(stop_threshold)) & (best > -torch.inf)
        return pick.where(goes_on, pot.num_candidates)

    def plain() -> Selection:
        return rollout(pot, rules, 1, choose).map(lambda part: part[:, 0])

    return dispatch.greedy(pot, rules, stop_threshold, plain)

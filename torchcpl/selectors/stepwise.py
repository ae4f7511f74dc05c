"""Selection step by step: CPL and the autoregressive pointer, whose heads both give potentials."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from torchcpl.checks import check_choice
from torchcpl.constraints import Rules
from torchcpl.decoding import greedy
from torchcpl.functional import prefix_logits
from torchcpl.losses import ordered_nll, subset_nll
from torchcpl.potentials import Potentials, Selection
from torchcpl.selectors.base import Method

STOP_RULES = {"argmax": "stop_bias", "threshold": "stop_threshold"}  # each with the option of `greedy` it tunes


def stop_log_odds(logits: Tensor) -> Tensor:
    """log P(stop) − log P(going on) of ``logits`` (..., N+1), the stop last; +inf where nothing is left to pick."""
    return logits[..., -1] - logits[..., :-1].logsumexp(-1)


def endless(pot: Potentials, max_len: int) -> tuple[Tensor, Tensor]:
    """Greedy picks (B, T) that never stop, and the logits (B, T+1, N+1) before each of them and after the last.

    Greedy picks do not depend on where one stops: the answer at any stop is a prefix of these.
    """
    picks = greedy(replace(pot, stop=torch.full_like(pot.stop, -1e4)), max_len).indices
    return picks, prefix_logits(pot, picks.unsqueeze(1), Rules(pot)).squeeze(1)


def fit_stop(log_odds: Tensor, done: Tensor) -> tuple[float, float]:
    """Temperature τ and bias b for which P(stop) = σ(log_odds/τ + b) is likeliest, given where the stop was right.

    Logistic regression on ``log_odds`` (M,) and ``done`` (M,) by Newton's method, with a prior of τ = 1, b = 0.
    """
    kept = log_odds.isfinite()
    x = torch.stack([log_odds[kept], torch.ones_like(log_odds[kept])], -1).double().cpu()  # (M, 2)
    y, start = done[kept].double().cpu(), torch.tensor([1.0, 0.0], dtype=torch.float64)
    weights = start.clone()
    for _ in range(50):
        p = (x @ weights).sigmoid()
        gradient = x.T @ (y - p) - (weights - start)
        hessian = (x * (p * (1 - p)).unsqueeze(-1)).T @ x + torch.eye(2, dtype=torch.float64)
        step = torch.linalg.solve(hessian, gradient)
        weights = weights + step / step.norm().clamp(min=1)
    slope = max(float(weights[0]), 0.05)
    return 1 / slope, float(weights[1])


class Stepwise(Method):
    """A head that gives potentials (`CPLHead`, `PointerHead`), trained by their likelihood and decoded greedily.

    The knob is the ``stop_bias`` of `greedy` or, with ``stop_rule="threshold"``, its ``stop_threshold``. At least
    ``min_len`` are picked.
    """

    def __init__(
        self, head: nn.Module, *, ordered: bool, permutations: int = 10, early_stop_weight: float = 5.0,
        stop_weight: float = 1.0, stop_rule: str = "argmax", min_len: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        check_choice("stop_rule", stop_rule, tuple(STOP_RULES))
        self.stop_rule = stop_rule
        if stop_rule == "argmax":
            self.knob, self.knobs = 0.0, tuple(round(-3.0 + 0.25 * i, 2) for i in range(21))
        else:
            self.knob, self.knobs = 0.5, tuple(round(0.05 * i, 2) for i in range(1, 20))
        self.head = head
        self.ordered = ordered
        self.permutations = permutations
        self.early_stop_weight = early_stop_weight
        self.stop_weight = stop_weight
        self.min_len = min_len

    def potentials(self, features: Tensor | tuple[Tensor, ...], mask: Tensor) -> Potentials:
        """``features`` (B, N, d), or these and what the head is told of pairs (B, N, N)."""
        features, *pairs = features if isinstance(features, tuple) else (features,)
        return self.head(features, mask, *pairs)

    def loss(self, features: Tensor | tuple[Tensor, ...], mask: Tensor, target: Tensor) -> Tensor:
        pot = self.potentials(features, mask)
        if self.ordered:
            return ordered_nll(pot, target, per_step=True)
        return subset_nll(pot, target, self.permutations, self.early_stop_weight, self.stop_weight)

    def greedy_options(self, knob: float | None = None) -> dict[str, Any]:
        """What `greedy` is given for the method's picks."""
        return {"min_len": self.min_len, STOP_RULES[self.stop_rule]: self.knob if knob is None else knob}

    def pick(self, potentials: Potentials, max_len: int, knob: float | None = None) -> Selection:
        return greedy(potentials, max_len, **self.greedy_options(knob))

    def sweep(self, potentials: Potentials, max_len: int, knobs: Sequence[float]) -> list[Tensor]:
        """For every knob the picks (B, T), −1 after the end."""
        picks, logits = endless(potentials, max_len)
        if self.stop_rule == "argmax":
            ready = logits[..., :-1].amax(-1) - logits[..., -1]  # the bias above which the stop is the likeliest
        else:
            ready = -logits.log_softmax(-1)[..., -1].exp()
        steps = torch.arange(picks.shape[1], device=picks.device)
        ready = ready[:, :-1].masked_fill(steps < self.min_len, torch.inf)
        found = []
        for knob in knobs:
            stops = ready < knob if self.stop_rule == "argmax" else ready <= -knob
            found.append(picks.masked_fill(stops.cummax(1).values, -1))
        return found

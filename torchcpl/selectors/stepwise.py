"""Selection step by step: CPL and the autoregressive pointer, whose heads both give potentials."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from torchcpl.checks import check_choice
from torchcpl.constraints import Rules
from torchcpl.decoding import greedy
from torchcpl.functional import prefix_logits
from torchcpl.losses import ordered_nll, subset_nll
from torchcpl.potentials import Potentials, Selection
from torchcpl.selectors.base import Method

STOP_RULES = ("argmax", "threshold")


class Stepwise(Method):
    """A head that gives potentials (`CPLHead`, `PointerHead`), trained by their likelihood and decoded greedily.

    The knob is what `greedy` takes as ``stop_bias`` or, with ``stop_rule="threshold"``, as ``stop_threshold``. At least
    ``min_len`` are picked.
    """

    def __init__(
        self,
        head: nn.Module,
        *,
        ordered: bool,
        permutations: int = 10,
        early_stop_weight: float = 5.0,
        stop_weight: float = 1.0,
        stop_rule: str = "argmax",
        min_len: int = 0,
    ) -> None:
        super().__init__()
        check_choice("stop_rule", stop_rule, STOP_RULES)
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
        pot: Potentials = self.head(features, mask, *pairs)
        return pot

    def loss(self, features: Tensor | tuple[Tensor, ...], mask: Tensor, target: Tensor) -> Tensor:
        pot = self.potentials(features, mask)
        if self.ordered:
            return ordered_nll(pot, target, per_step=True)
        return subset_nll(pot, target, self.permutations, self.early_stop_weight, self.stop_weight)

    def pick(self, potentials: Potentials, max_len: int, knob: float | None = None) -> Selection:
        knob = self.knob if knob is None else knob
        if self.stop_rule == "argmax":
            return greedy(potentials, max_len, min_len=self.min_len, stop_bias=knob)
        return greedy(potentials, max_len, min_len=self.min_len, stop_threshold=knob)

    def sweep(self, potentials: Potentials, max_len: int, knobs: Sequence[float]) -> list[Tensor]:
        """For every knob the picks (B, T), −1 after the end: greedy picks do not depend on where one stops."""
        never = replace(potentials, stop=torch.full_like(potentials.stop, -1e4))
        picks = greedy(never, max_len).indices
        logits = prefix_logits(potentials, picks.unsqueeze(1), Rules(potentials)).squeeze(1)  # (B, T+1, N+1)
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

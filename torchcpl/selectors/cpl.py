"""CPL: parallel potentials, sequential selection."""

from __future__ import annotations

from torch import Tensor, nn

from torchcpl.decoding import greedy
from torchcpl.losses import ordered_nll, subset_nll
from torchcpl.potentials import Potentials, Selection
from torchcpl.selectors.base import Method


class CPL(Method):
    """Any head that gives potentials, trained on ordered or unordered targets and decoded greedily.

    The knob is a bias on the stop's logit.
    """

    knob = 0.0
    knobs = tuple(round(-2.0 + 0.25 * i, 2) for i in range(17))

    def __init__(
        self,
        head: nn.Module,
        *,
        ordered: bool,
        permutations: int = 10,
        early_stop_weight: float = 5.0,
        stop_weight: float = 1.0,
    ) -> None:
        super().__init__()
        self.head = head
        self.ordered = ordered
        self.permutations = permutations
        self.early_stop_weight = early_stop_weight
        self.stop_weight = stop_weight

    def potentials(self, features: Tensor, mask: Tensor) -> Potentials:
        pot: Potentials = self.head(features, mask)
        return pot

    def loss(self, features: Tensor, mask: Tensor, target: Tensor, points: Tensor, goals: Tensor) -> Tensor:
        pot = self.potentials(features, mask)
        if self.ordered:
            return ordered_nll(pot, target, per_step=True)
        return subset_nll(pot, target, self.permutations, self.early_stop_weight, self.stop_weight)

    def select(self, features: Tensor, mask: Tensor, max_len: int, knob: float | None = None) -> Selection:
        pot = self.potentials(features, mask)
        return greedy(pot, max_len, stop_bias=self.knob if knob is None else knob)

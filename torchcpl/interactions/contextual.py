"""The context passes through a small network: interactions of any order between picks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from torchcpl.checks import describe
from torchcpl.interactions.base import Additive, State, addends
from torchcpl.interactions.lowrank import check_factors, key_logits
from torchcpl.potentials import register_pytree


@register_pytree
@dataclass(frozen=True, eq=False, repr=False)
class Contextual(Additive):
    """``LowRank`` whose context passes through a network: ℓ_j = θ_j + keys[j]·f(s, |S|)/√h.

    ``network(s, count)`` takes the sum of the picked values (B, K, h) and the number of picks (B, K) and returns the
    context (B, K, h). The logits remain a function of the *set* of picks, of any order of interaction; a decoding step
    costs one forward pass of the network.
    """

    keys: Tensor  # (B, N, h)
    values: Tensor  # (B, N, h)
    network: Callable[[Tensor, Tensor], Tensor] = field(metadata={"static": True})
    stop_key: Tensor | None = None  # (B, h)

    def __post_init__(self) -> None:
        check_factors(self.keys, self.values, self.stop_key)
        if not callable(self.network):
            raise ValueError(f"network: expected a callable (s, count) -> context, got {describe(self.network)}")

    # The state is the sum of the picked values (B, K, h) and their number (B, K, 1).

    def steps(self, picks: Tensor) -> State:
        values = addends(self.values, picks)
        return values, (picks >= 0).unsqueeze(-1).to(values.dtype)

    def logits(self, state: State) -> tuple[Tensor, Tensor | None]:
        total, count = state
        return key_logits(self.keys, self.stop_key, self.network(total, count.squeeze(-1)))

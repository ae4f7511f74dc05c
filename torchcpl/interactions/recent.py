"""For sequences: the sum over all picks, and a term for the latest pick."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from torchcpl.checks import check_tensor
from torchcpl.interactions.base import Interaction, State, addends, gather_rows, running_sum
from torchcpl.interactions.lowrank import check_factors, key_logits
from torchcpl.potentials import latest, register_pytree


@register_pytree
@dataclass(frozen=True, eq=False, repr=False)
class Recent(Interaction):
    """``LowRank``, and a term for the latest pick i: ℓ_j = θ_j + keys[j]·s/√h + last_keys[j]·last_values[i]/√h.

    The sum s does not depend on the order of the picks, which matters where the next one follows the last, as along a
    path. W is never built: a step is two matrix–vector products.
    """

    keys: Tensor  # (B, N, h)
    values: Tensor  # (B, N, h)
    last_keys: Tensor  # (B, N, h)
    last_values: Tensor  # (B, N, h)
    stop_key: Tensor | None = None  # (B, h)
    last_stop_key: Tensor | None = None  # (B, h)

    depends_on: ClassVar[str] = "last"

    def __post_init__(self) -> None:
        check_factors(self.keys, self.values, self.stop_key)
        check_tensor("last_keys", self.last_keys, (*self.keys.shape[:2], "h"), "float", like=self.keys)
        check_factors(self.last_keys, self.last_values, self.last_stop_key, "last_")
        if (self.stop_key is None) != (self.last_stop_key is None):
            raise ValueError("stop_key, last_stop_key: expected both or neither, got one")

    # The state is the sum of the picked values (B, K, h) and the latest pick (B, K).

    def advance(self, state: State, picks: Tensor) -> State:
        return state[0] + addends(self.values, picks), picks.where(picks >= 0, state[1])

    def prefixes(self, order: Tensor) -> State:
        return running_sum(addends(self.values, order)).flatten(1, 2), latest(order).flatten(1, 2)

    def after(self, picks: Tensor) -> State:
        return addends(self.values, picks).sum(2), latest(picks)[..., -1]

    def logits(self, state: State) -> tuple[Tensor, Tensor | None]:
        candidates, stop = key_logits(self.keys, self.stop_key, state[0])
        last = gather_rows(self.last_values, state[1])  # (B, K, h)
        more, more_stop = key_logits(self.last_keys, self.last_stop_key, last)
        return candidates + more, None if stop is None or more_stop is None else stop + more_stop

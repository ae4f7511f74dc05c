"""For sequences: the sum over all picks, and a term for the latest pick."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchcpl.checks import check_tensor
from torchcpl.interactions.base import Interaction, State, accumulator, gather_rows
from torchcpl.interactions.lowrank import check_factors, key_logits
from torchcpl.potentials import register_pytree


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

    # The state is the sum of the picked values and the value of the latest, (B, K, h) each.

    def start(self, width: int = 1) -> State:
        return self._steps(torch.full((self.shape[0], width), -1, dtype=torch.long, device=self._device))

    def advance(self, state: State, picks: Tensor) -> State:
        step, last = self._steps(picks)
        return state[0] + step, last

    def prefixes(self, order: Tensor) -> State:
        steps, lasts = (pad(part, (0, 0, 1, 0)) for part in self._steps(order))  # (B, P, T+1, h)
        return steps.cumsum(2).flatten(1, 2), lasts.flatten(1, 2)

    def after(self, picks: Tensor) -> State:
        steps, lasts = (pad(part, (0, 0, 1, 0)) for part in self._steps(picks))  # (B, K, T+1, h)
        number = torch.arange(1, picks.shape[2] + 1, device=picks.device) * (picks >= 0)
        place = pad(number, (1, 0)).amax(-1)[..., None, None].expand(-1, -1, 1, lasts.shape[-1])
        return steps.sum(2), lasts.gather(2, place).squeeze(2)

    def logits(self, state: State) -> tuple[Tensor, Tensor | None]:
        candidates, stop = key_logits(self.keys, self.stop_key, state[0])
        more, more_stop = key_logits(self.last_keys, self.last_stop_key, state[1])
        return candidates + more, None if stop is None or more_stop is None else stop + more_stop

    def _steps(self, picks: Tensor) -> tuple[Tensor, Tensor]:
        dtype = accumulator(self.values.dtype)
        return gather_rows(self.values, picks).to(dtype), gather_rows(self.last_values, picks).to(dtype)

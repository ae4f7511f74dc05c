"""A soft *or* over the picks: a candidate that one pick makes redundant stays redundant."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchcpl.checks import check_tensor
from torchcpl.interactions.base import Additive, State, accumulator, addends, gather_rows
from torchcpl.interactions.lowrank import check_factors, key_logits
from torchcpl.potentials import register_pytree

# Bound on c: exp of much more would overflow. No float: torch.compile would make that an input of its graph.
LARGEST = 30


@register_pytree
@dataclass(frozen=True, eq=False, repr=False)
class Coverage(Additive):
    """``LowRank`` and a soft *or* over the picks: ℓ_j = θ_j + keys[j]·s/√h − log(1 + Σ_{i∈S} exp c_ji).

    ``c_ji = cover_keys[j]·cover_values[i]/√h + cover_offset``, at most 30, says how redundant pick i makes j. In a
    plain sum the small effects of many unrelated picks add up to as much as the one that matters; here they vanish, and
    a second pick that covers j changes little. W is never built: a step is two matrix–vector products.
    """

    keys: Tensor  # (B, N, h)
    values: Tensor  # (B, N, h)
    cover_keys: Tensor  # (B, N, h)
    cover_values: Tensor  # (B, N, h)
    cover_offset: Tensor  # (B,)
    stop_key: Tensor | None = None  # (B, h)

    def __post_init__(self) -> None:
        check_factors(self.keys, self.values, self.stop_key)
        shape = (*self.keys.shape[:2], "h")
        check_tensor("cover_keys", self.cover_keys, shape, "float", like=self.keys)
        check_tensor("cover_values", self.cover_values, tuple(self.cover_keys.shape), "float", like=self.keys)
        check_tensor("cover_offset", self.cover_offset, (self.keys.shape[0],), "float", like=self.keys)

    # The state is the context (B, K, h) and Σ exp c of every candidate (B, K, N).

    def steps(self, picks: Tensor) -> State:
        flat = picks.flatten(1)  # (B, M)
        product, _ = key_logits(self.cover_keys, None, gather_rows(self.cover_values, flat))  # (B, M, N)
        dtype = accumulator(self.values.dtype)
        covered = covering(product.to(dtype) + self.cover_offset.to(dtype)[:, None, None], flat)
        return addends(self.values, picks), covered.view(*picks.shape, self.shape[1])

    def logits(self, state: State) -> tuple[Tensor, Tensor | None]:
        context, covered = state
        candidates, stop = key_logits(self.keys, self.stop_key, context)
        return candidates - torch.log1p(covered), stop


def covering(strength: Tensor, picks: Tensor) -> Tensor:
    """exp c (..., N) of how far each of ``picks`` (...) covers the candidates, c = ``strength``; zero at −1."""
    return strength.clamp(max=LARGEST).exp().masked_fill((picks < 0).unsqueeze(-1), 0)

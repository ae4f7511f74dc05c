"""A soft *or* over the picks, with the strength of every pair given as a matrix."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchcpl.interactions.base import Additive, State
from torchcpl.interactions.coverage import covering
from torchcpl.interactions.dense import check_pairs, gather_columns, with_stop
from torchcpl.potentials import register_pytree


@register_pytree
@dataclass(frozen=True, eq=False, repr=False)
class DenseCoverage(Additive):
    """ℓ_j = θ_j − log(1 + Σ_{i∈S} exp c_ji), where ``cover[b, j, i]`` = c_ji says how redundant pick i makes j.

    ``Coverage`` with a full matrix c in place of keys·values. ``stop_row[b, i]`` is what pick i adds to the stop's
    logit.
    """

    cover: Tensor  # (B, N, N)
    stop_row: Tensor | None = None  # (B, N)

    def __post_init__(self) -> None:
        check_pairs("cover", self.cover, self.stop_row)

    # The state is Σ exp c of every candidate (B, K, N) and, with a stop_row, what the picks add to the stop (B, K, 1).

    def steps(self, picks: Tensor) -> State:
        return with_stop(covering(gather_columns(self.cover, picks), picks), self.stop_row, picks)

    def logits(self, state: State) -> tuple[Tensor, Tensor | None]:
        return -torch.log1p(state[0]), state[1].squeeze(-1) if len(state) > 1 else None

"""A soft *or* over the picks, with the strength of every pair given as a matrix."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchcpl.interactions.base import Additive, State, accumulator, gather_rows
from torchcpl.interactions.coverage import LARGEST
from torchcpl.interactions.dense import check_pairs, gather_columns
from torchcpl.potentials import register_pytree


@register_pytree
@dataclass(frozen=True, eq=False)
class DenseCoverage(Additive):
    """ℓ_j = θ_j − log(1 + Σ_{i∈S} exp c_ji), where ``cover[b, j, i]`` = c_ji says how redundant pick i makes j.

    ``Coverage`` with a full matrix c in place of keys·values. ``stop_row[b, i]`` is what pick i adds to the stop's
    logit.
    """

    cover: Tensor  # (B, N, N)
    stop_row: Tensor | None = None  # (B, N)
    W: Tensor | None = None  # (B, N, N)

    def __post_init__(self) -> None:
        check_pairs("cover", self.cover, self.stop_row)

    # The state is Σ exp c of every candidate (B, K, N) and, with a stop_row, what the picks add to the stop (B, K, 1).

    def steps(self, picks: Tensor) -> State:
        dtype = accumulator(self.cover.dtype)
        covered = gather_columns(self.cover, picks).to(dtype).clamp(max=LARGEST).exp()  # (B, ..., N)
        covered = covered.masked_fill((picks < 0).unsqueeze(-1), 0)
        stop = None if self.stop_row is None else gather_rows(self.stop_row.unsqueeze(-1), picks).to(dtype)
        added = None if self.W is None else gather_columns(self.W, picks).to(dtype)
        return covered, *(part for part in (stop, added) if part is not None)

    def logits(self, state: State) -> tuple[Tensor, Tensor | None]:
        added = 0 if self.W is None else state[-1]
        return added - torch.log1p(state[0]), None if self.stop_row is None else state[1].squeeze(-1)

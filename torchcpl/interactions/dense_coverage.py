"""A soft *or* over the picks whose strengths are given as a matrix."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchcpl.checks import check_tensor
from torchcpl.interactions.base import Additive, State, accumulator, gather_rows
from torchcpl.interactions.coverage import LARGEST
from torchcpl.interactions.dense import gather_columns
from torchcpl.potentials import register_pytree


@register_pytree
@dataclass(frozen=True, eq=False)
class DenseCoverage(Additive):
    """ℓ_j = θ_j − log(1 + Σ_{i∈S} exp c_ji): pick i makes j redundant as far as ``cover[b, j, i]`` = c_ji says.

    ``Coverage`` whose c is no product of keys and values: where groups have no features of their own, "the same group"
    can only be read off the pair. ``stop_row[b, i]`` is what pick i adds to the stop's logit.
    """

    cover: Tensor  # (B, N, N)
    stop_row: Tensor | None = None  # (B, N)

    def __post_init__(self) -> None:
        check_tensor("cover", self.cover, ("B", "N", "N"), "float")
        batch, rows, columns = self.cover.shape
        if rows != columns:
            raise ValueError(f"cover: expected a square matrix (B, N, N), got shape {tuple(self.cover.shape)}")
        if self.stop_row is not None:
            check_tensor("stop_row", self.stop_row, (batch, columns), "float", like=self.cover)

    @property
    def shape(self) -> tuple[int, int]:
        return self.cover.shape[0], self.cover.shape[2]

    # The state is how far each candidate is covered (B, K, N) and, with a live stop, what that has gained (B, K, 1).

    def steps(self, picks: Tensor) -> State:
        dtype = accumulator(self.cover.dtype)
        covered = gather_columns(self.cover, picks).to(dtype).clamp(max=LARGEST).exp()  # (B, ..., N)
        covered = covered.masked_fill((picks < 0).unsqueeze(-1), 0)
        if self.stop_row is None:
            return (covered,)
        return covered, gather_rows(self.stop_row.unsqueeze(-1), picks).to(dtype)

    def logits(self, state: State) -> tuple[Tensor, Tensor | None]:
        return -torch.log1p(state[0]), state[1].squeeze(-1) if len(state) > 1 else None

"""Matching-based set prediction: scores trained on the candidates of an optimal assignment."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from torchcpl.files import extra
from torchcpl.selectors.threshold import Threshold


class Hungarian(Threshold):
    """Targets are assigned to candidates at the least total ``score_weight·(−log σ) + distance_weight·distance``.

    Binary cross-entropy then trains the assigned candidates as positives. The distance is squared L2 or L2 between
    their positions. With ``exclude_self`` a target's own candidate is not assigned to it when another exists.
    """

    def __init__(
        self, dim: int, hidden: int, *, dropout: float = 0.0, pos_weight: float | None = None,
        score_weight: float = 10.0, distance_weight: float = 0.01, squared: bool = True, exclude_self: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(dim, hidden, dropout=dropout, pos_weight=pos_weight)
        self.score_weight = score_weight
        self.distance_weight = distance_weight
        self.squared = squared
        self.exclude_self = exclude_self

    @torch.no_grad()
    def assign(self, features: Tensor, mask: Tensor, target: Tensor, points: Tensor, goals: Tensor) -> Tensor:
        """(B, T) the candidate matched to each target, −1 where there is none."""
        logits = self.logits(features, mask)
        distance = torch.cdist(goals.float(), points.float())  # (B, T, N)
        if self.squared:
            distance = distance.square()
        cost = -self.score_weight * F.logsigmoid(logits.float()).unsqueeze(1) + self.distance_weight * distance
        barred = ~mask.unsqueeze(1).expand_as(cost)
        if self.exclude_self:
            own = F.one_hot(target.clamp(min=0), cost.shape[2]).bool() & (mask.sum(-1) > 1)[:, None, None]
            barred = barred | own
        return assignment(cost.masked_fill(barred, 1e6), target >= 0)


def assignment(cost: Tensor, real: Tensor) -> Tensor:
    """The candidate (B, T) that the cheapest assignment at ``cost`` (B, T, N) gives each real target, −1 elsewhere."""
    with extra():
        from scipy.optimize import linear_sum_assignment

    counts = real.sum(-1).tolist()  # real targets come first
    most = max(counts, default=0)
    cost = cost[:, :most]
    # On a GPU, copying and solving the whole problem would take longer than the rest of a training step.
    columns = _shortlist(cost, real[:, :most])  # (B, M)
    costs = cost.gather(2, columns.unsqueeze(1).expand(-1, most, -1)).cpu().numpy()
    places = columns.cpu().numpy()
    matched = torch.full(real.shape, -1, dtype=torch.long)
    into = matched.numpy()

    def solve(row: int) -> None:
        targets, candidates = linear_sum_assignment(costs[row, : counts[row]])
        into[row, targets] = places[row, candidates]

    # The solver releases the GIL, so threads run in parallel.
    list(_pool().map(solve, range(len(counts))))
    return matched.to(cost.device)


def _shortlist(cost: Tensor, real: Tensor) -> Tensor:
    """Candidates (B, M) that contain an optimal assignment.

    With T targets each needs only its T cheapest candidates. Neighbours share them: M is a few dozen.
    """
    steps = min(cost.shape[1:])
    if steps == 0:
        return torch.zeros(len(cost), 0, dtype=torch.long, device=cost.device)
    limit = cost.topk(steps, -1, largest=False).values[..., -1:]
    useful = (~(cost > limit) & real.unsqueeze(-1)).any(1)  # (B, N); NaN is not above either, and the solver refuses it
    return useful.byte().argsort(dim=-1, descending=True, stable=True)[:, : int(useful.sum(-1).max())]


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor()

"""Large piles: a few hundred micro-clusters for the model, or, for more picks than it knows, a graph of neighbours.

Every row is read a constant number of times, in blocks, and no matrix has more than block × centres (or block × sample)
entries: memory is bounded and time grows as N.

The graph's k first eigenvectors V (n, k) tell k groups apart: rows of V are alike within a group and orthogonal between
groups. Picks are its pivots, each the row of most length outside the span of those before it: with probabilities in
proportion to the squared length this is the determinantal point process of the projector VVᵀ, item by item.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from torchcpl.encoders.distances import SAME
from torchcpl.interactions.base import without_autocast

BLOCK = 16384  # rows read at a time
SAMPLE = 24  # rows a centre is fitted on
ITERATIONS = 8
NEAR = 0.8  # neighbours of a row in the graph, for every row there is to a pick
POWERS, ROUNDS, SPARE = 4, 3, 20  # of the subspace iteration: steps between orthogonalisations, of these, more columns


@dataclass(frozen=True)
class Micro:
    """M micro-clusters: their means, and of each the row of most weight and nearest to it."""

    centres: Tensor  # (M, D)
    member: Tensor  # (M,) −1 where no row may be picked


class Rows:
    """Blocks of an array, a tensor or a file mapped from disk, in float32: from an origin, or of length one for cosine.

    The origin is amid the rows, of which distances far from zero would leave nothing in float32.
    """

    def __init__(self, x: Any, metric: str, device: torch.device) -> None:
        self.x, self.cosine, self.device = x, metric == "cosine", device
        some = self._raw(slice(None, None, -(-len(x) // 1024)))
        self.origin = some.sort(0).values[len(some) // 2]  # the median, by what is deterministic on CUDA, too

    def __len__(self) -> int:
        return len(self.x)

    def take(self, rows: Any) -> Tensor:
        """The rows of a slice, or of an ascending index."""
        found = self._raw(rows)
        if self.cosine:
            return torch.nn.functional.normalize(found.float(), dim=-1)
        return found.sub_(self.origin).float()

    def _raw(self, rows: Any) -> Tensor:
        """A copy of the rows, in float32, or float64 where that has too few digits."""
        found = self.x[rows if isinstance(rows, slice) or isinstance(self.x, Tensor) else rows.numpy()]
        if isinstance(found, Tensor):
            return found.detach().to(self.device, precise(found.dtype), copy=True)
        return torch.from_numpy(np.array(found, dtype=np.promote_types(found.dtype, np.float32))).to(self.device)

    def one_of_equal(self, wanted: Tensor, required: Tensor, bonus: Tensor) -> Tensor:
        """(N,) True for one of ``wanted`` among rows that are equal, False for all equal to a required one.

        It is the one of most ``bonus`` (N,), the first of them. For cosine, rows of one direction are equal.
        """
        # Rows are equal if their random projections are. Rounding parts those of one direction by less than SAME, and
        # another row may lie between them, but hardly ever in every projection's order.
        count, apart = (4, SAME) if self.cosine else (1, 0.0)
        generator = torch.Generator().manual_seed(0)
        weights = torch.randn(count, self.x.shape[1], generator=generator, dtype=torch.float64).to(self.device)
        blocks = (self.take(slice(i, i + BLOCK)) for i in range(0, len(self), BLOCK))
        codes = torch.cat([torch.stack([(rows * weight).sum(-1) for weight in weights]) for rows in blocks], 1)
        index = wanted.nonzero().flatten()  # required rows, which are among them, first
        index = index[bonus[index].argsort(descending=True, stable=True)]
        index = index[required[index].argsort(descending=True, stable=True)]
        for code in codes:
            order = code[index].argsort(stable=True)
            group = pad((codes[:, index[order]].diff().abs() > apart).any(0), (1, 0)).cumsum(0)
            first = torch.full_like(order, len(order)).scatter_reduce(0, group, order, "amin")
            index = index[first[: int(group[-1]) + 1].sort().values]
        found = torch.zeros_like(wanted)
        found[index] = True
        return found & ~required


def precise(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 for what has more digits."""
    return torch.float64 if dtype in (torch.float64, torch.int32, torch.int64) else torch.float32


def nearest(rows: Tensor, centres: Tensor) -> tuple[Tensor, Tensor]:
    """For rows (n, D) the nearest of the centres (k, D): squared distance less |row|², and which."""
    with without_autocast(rows):
        score = torch.addmm(centres.square().sum(-1), rows, centres.T, alpha=-2)
    least, which = score.min(-1)
    return least, which


def means(rows: Tensor, labels: Tensor, centres: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of every cluster, its old centre where it has no rows, and the sizes."""
    count = torch.bincount(labels, minlength=len(centres))
    total = torch.zeros_like(centres).index_add_(0, labels, rows)
    return torch.where((count > 0).unsqueeze(-1), total / count.clamp(min=1).unsqueeze(-1), centres), count


def kmeans(rows: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """Centres (k, D) by Lloyd's algorithm from random rows; an empty cluster moves to the row worst served."""
    start = torch.randperm(len(rows), generator=generator)[:k].to(rows.device)
    centres = rows[start]
    for _ in range(ITERATIONS):
        score, labels = nearest(rows, centres)
        centres, count = means(rows, labels, centres)
        empty = (count == 0).nonzero().flatten()
        if len(empty):
            worst = (score + rows.square().sum(-1)).topk(len(empty)).indices
            centres[empty] = rows[worst]
    return centres


def reduce(rows: Rows, count: int, seed: int, allowed: Tensor, bonus: Tensor) -> Micro:
    """At most ``count`` micro-clusters; members are rows where ``allowed`` (N,), of most ``bonus`` (N,), central ones.

    Fitted on a sample, then one pass for means, one for members.
    """
    generator, n = torch.Generator().manual_seed(seed), len(rows)
    blocks = torch.arange(n).split(BLOCK)
    centres = kmeans(rows.take(sample(torch.arange(n), count * SAMPLE, generator)), count, generator)
    total, sizes = torch.zeros_like(centres), torch.zeros(count, dtype=torch.long, device=centres.device)
    for block in blocks:
        values = rows.take(block)
        labels = nearest(values, centres)[1]
        total.index_add_(0, labels, values)
        sizes += torch.bincount(labels, minlength=count)
    centres = torch.where((sizes > 0).unsqueeze(-1), total / sizes.clamp(min=1).unsqueeze(-1), centres)
    spread = centres.var(0).sum().clamp(min=1e-30)  # beside it, distances inside a micro-cluster are small
    best = torch.full((count,), torch.inf, device=centres.device)
    member = torch.full((count,), -1, dtype=torch.long, device=centres.device)
    for block in blocks:
        values = rows.take(block)
        score, labels = nearest(values, centres)
        score = (score + values.square().sum(-1)) / spread - bonus[block].to(score.device)
        score = score.masked_fill(~allowed[block].to(score.device), torch.inf)
        best = _improve(best, member, labels, score, block)
    return Micro(centres[sizes > 0], member[sizes > 0])


def sample(index: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """At most ``size`` of the rows ``index`` (n,), ascending."""
    if len(index) <= size:
        return index
    return index[torch.randperm(len(index), generator=generator)[:size].sort().values]


def _improve(best: Tensor, member: Tensor, labels: Tensor, score: Tensor, rows: Tensor) -> Tensor:
    """The least score of every cluster, with those of ``rows`` (n,) too; writes into ``member`` which row has it."""
    least = best.scatter_reduce(0, labels, score, "amin")
    chosen = ((score == least[labels]) & (score < best[labels])).nonzero().flatten()
    member[labels[chosen]] = rows.to(member.device)[chosen]
    return least


def neighbours(x: Tensor, count: int) -> Tensor:
    """(n, count) the nearest other rows of each of ``x`` (n, D)."""
    square, found = x.square().sum(-1), []
    for i in range(0, len(x), 2048):
        score = torch.addmm(square, x[i : i + 2048], x.T, alpha=-2)
        score.diagonal(i).fill_(torch.inf)
        found.append(score.topk(count, 1, largest=False, sorted=False).indices)
    return torch.cat(found)


def spectral(x: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """(n, k) the first eigenvectors of the graph of near neighbours of the rows ``x`` (n, D), times their eigenvalues.

    The matrix is D^−½ A D^−½ with A the number of ends (0, 1 or 2) that count the other as near; by subspace iteration.
    """
    n = len(x)
    near = neighbours(x, min(n - 1, max(2, round(NEAR * n / k))))
    ends = torch.arange(n, device=x.device).repeat_interleave(near.shape[1])
    here, there = torch.cat([ends, near.flatten()]), torch.cat([near.flatten(), ends])
    degree = here.bincount(minlength=n)
    there, start = there[here.argsort(stable=True)], degree.cumsum(0) - degree
    root = degree.to(x.dtype).clamp(min=1).rsqrt().unsqueeze(-1)  # a single row has no neighbours
    v = torch.randn(n, min(n, k + SPARE), generator=generator).to(x.device)
    for _ in range(ROUNDS):
        for _ in range(POWERS):
            v = torch.nn.functional.embedding_bag(there, v * root, start, mode="sum") * root
        v = torch.linalg.qr(v)[0]
    after = torch.nn.functional.embedding_bag(there, v * root, start, mode="sum") * root
    return after @ torch.linalg.eigh(v.T @ after)[1].flip(1)[:, :k]


def pivots(v: Tensor, count: int, bonus: Tensor, allowed: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """``count`` rows of ``v`` (n, k) far outside the span of each other, and their log-probabilities.

    The logit of a row is the log of its squared length outside the span of the picks, plus its ``bonus`` (n,). Rows
    where ``first`` (n,) come first, then those where ``allowed`` (n,).
    """
    left, open_ = v.clone(), allowed | first
    picks, chances = [], []
    for _ in range(count):
        turn = open_ & first if bool((open_ & first).any()) else open_
        logits = (left.square().sum(-1).clamp(min=1e-30).log() + bonus).masked_fill(~turn, -torch.inf)
        chances.append(logits.log_softmax(0).amax())
        picks.append(pick := int(logits.argmax()))
        open_[pick] = False
        along = torch.nn.functional.normalize(left[pick], dim=0)
        left = left.addr_(left @ along, along, alpha=-1)
    return torch.tensor(picks, device=v.device), torch.stack(chances)

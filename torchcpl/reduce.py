"""Large piles: rows are reduced to micro-clusters, of which the model gets a few hundred at once.

k-means with several times as many centres as picks, in two levels: parts of the pile, fitted on a sample of it, and
within each part its centres, fitted on a sample of the part. Every row is read a constant number of times, in blocks,
and no matrix has more than block × centres entries: memory is bounded and time grows as N.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcpl.files import track

BLOCK = 16384  # rows read at a time
SAMPLE = 24  # rows a centre is fitted on
ITERATIONS = 8
SETTLING = 4  # steps of Lloyd's algorithm from picks


@dataclass(frozen=True)
class Micro:
    """M micro-clusters: their means, of each the row nearest to it, how many rows it has, and its part."""

    centres: Tensor  # (M, D)
    member: Tensor  # (M,) −1 where no row may be picked
    count: Tensor  # (M,)
    part: Tensor  # (M,)

    def with_rows(self, rows: Rows, fixed: Tensor) -> Micro:
        """With a micro-cluster more for each of the rows ``fixed`` (R,), in the part of its nearest neighbour."""
        values = rows.take(fixed.cpu())
        part = self.part[nearest(values, self.centres)[1]]
        ones = torch.ones_like(part)
        added = (values, fixed.to(part.device), ones, part)
        return Micro(*(torch.cat(both) for both in zip(vars(self).values(), added, strict=True)))


class Rows:
    """Blocks of an array, a tensor or a file mapped from disk, in float32, of length one for cosine."""

    def __init__(self, x: Any, metric: str, device: torch.device) -> None:
        self.x, self.cosine, self.device = x, metric == "cosine", device

    def __len__(self) -> int:
        return len(self.x)

    def take(self, rows: Any) -> Tensor:
        """The rows of a slice, or of an ascending index."""
        found = (
            self.x[rows] if isinstance(rows, slice) else self.x[rows if isinstance(self.x, Tensor) else rows.numpy()]
        )
        if not isinstance(found, Tensor):
            found = torch.from_numpy(np.array(found, dtype=np.float32))
        found = found.to(self.device, torch.float32)
        return torch.nn.functional.normalize(found, dim=-1) if self.cosine else found

    def first_of_equal(self, wanted: Tensor, required: Tensor) -> Tensor:
        """(N,) True for the first of ``wanted`` among rows that are equal, False for all equal to a required one."""
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(self.x.shape[1], generator=generator, dtype=torch.float64).to(self.device)
        parts = [(self.take(slice(i, i + BLOCK)) * weight).sum(-1) for i in range(0, len(self), BLOCK)]
        code = torch.cat(parts)  # equal rows have equal codes, others hardly ever
        index = wanted.nonzero().flatten()
        ordered, order = code[index].sort(stable=True)
        fresh = torch.ones_like(order, dtype=torch.bool)
        fresh[1:] = ordered[1:] != ordered[:-1]
        found = torch.zeros_like(wanted)
        found[index[order[fresh]]] = True
        return found & ~torch.isin(code, code[required])


def nearest(rows: Tensor, centres: Tensor) -> tuple[Tensor, Tensor]:
    """For rows (n, D) the nearest of the centres (k, D): squared distance less |row|², and which."""
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


def reduce(rows: Rows, count: int, most: int, seed: int, allowed: Tensor, shown: bool = False) -> Micro:
    """About ``count`` micro-clusters in parts of at most about ``most``; members are rows where ``allowed`` (N,)."""
    generator = torch.Generator().manual_seed(seed)
    n, parts = len(rows), -(-count // most)
    of = torch.zeros(n, dtype=torch.int32)
    if parts > 1:
        coarse = kmeans(rows.take(_sample(n, 64 * parts * SAMPLE, generator)), parts, generator)
        for i in track(range(0, n, BLOCK), "parts", shown):
            of[i : i + BLOCK] = nearest(rows.take(slice(i, i + BLOCK)), coarse)[1].cpu().int()
    found = []
    for part in track(range(parts), "micro-clusters", shown):
        mine = (of == part).nonzero().flatten()
        if len(mine):
            found.append(_part(rows, mine, max(1, round(count * len(mine) / n)), part, allowed, generator))
    return Micro(*(torch.cat(column) for column in zip(*found, strict=True)))


def _sample(n: int, size: int, generator: torch.Generator) -> Tensor:
    """At most ``size`` of n rows, ascending."""
    if n <= size:
        return torch.arange(n)
    found: Tensor = torch.randint(n, (size,), generator=generator).unique()
    return found


def _part(
    rows: Rows, mine: Tensor, count: int, part: int, allowed: Tensor, generator: torch.Generator
) -> tuple[Tensor, ...]:
    """The micro-clusters of the rows ``mine``: fitted on a sample, then one pass for means, one for members."""
    count = min(count, len(mine))
    sample = mine[_sample(len(mine), count * SAMPLE, generator)]
    centres = kmeans(rows.take(sample), count, generator)
    total, sizes = torch.zeros_like(centres), torch.zeros(count, dtype=torch.long, device=centres.device)
    for block in mine.split(BLOCK):
        values = rows.take(block)
        labels = nearest(values, centres)[1]
        total.index_add_(0, labels, values)
        sizes += torch.bincount(labels, minlength=count)
    centres = torch.where((sizes > 0).unsqueeze(-1), total / sizes.clamp(min=1).unsqueeze(-1), centres)
    best = torch.full((count,), torch.inf, device=centres.device)
    member = torch.full((count,), -1, dtype=torch.long, device=centres.device)
    for block in mine.split(BLOCK):
        values = rows.take(block)
        score, labels = nearest(values, centres)
        score = (score + values.square().sum(-1)).masked_fill(~allowed[block].to(score.device), torch.inf)
        best = _improve(best, member, labels, score, block)
    kept = sizes > 0
    return centres[kept], member[kept], sizes[kept], torch.full_like(sizes[kept], part)


def _improve(best: Tensor, member: Tensor, labels: Tensor, score: Tensor, rows: Tensor) -> Tensor:
    """The least score of every cluster, with those of ``rows`` (n,) too; writes into ``member`` which row has it."""
    least = best.scatter_reduce(0, labels, score, "amin")
    chosen = ((score == least[labels]) & (score < best[labels])).nonzero().flatten()
    member[labels[chosen]] = rows.to(member.device)[chosen]
    return least


def settle(rows: Rows, picks: Tensor, allowed: Tensor) -> Tensor:
    """(T,) in place of each pick the row that speaks most clearly for its group: Lloyd's algorithm from the picks, then
    of every cluster the row where ``allowed`` whose squared distance to the mean falls furthest below that to the next.
    """
    centres, blocks = rows.take(picks.cpu()), torch.arange(len(rows)).split(BLOCK)
    for _ in range(SETTLING):
        total, sizes = torch.zeros_like(centres), torch.zeros(len(centres), dtype=torch.long, device=centres.device)
        for block in blocks:
            values = rows.take(slice(int(block[0]), int(block[-1]) + 1))
            labels = nearest(values, centres)[1]
            total.index_add_(0, labels, values)
            sizes += torch.bincount(labels, minlength=len(centres))
        centres = torch.where((sizes > 0).unsqueeze(-1), total / sizes.clamp(min=1).unsqueeze(-1), centres)
    best, member = torch.full((len(centres),), torch.inf, device=centres.device), picks.to(centres.device, copy=True)
    for block in blocks:
        values = rows.take(slice(int(block[0]), int(block[-1]) + 1))
        score = torch.addmm(centres.square().sum(-1), values, centres.T, alpha=-2)
        least, labels = score.min(-1)
        gap = least - score.scatter_(1, labels.unsqueeze(-1), torch.inf).amin(-1)
        gap = gap.masked_fill(~allowed[block].to(gap.device), torch.inf)
        best = _improve(best, member, labels, gap, block)
    return member

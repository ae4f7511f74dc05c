"""Bags of labelled features, drawn on any device in a fixed number of tensor operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from torchcpl.config import option
from torchcpl.tasks.base import Examples


@dataclass(frozen=True)
class BagProtocol:
    """How a bag is drawn; the defaults are the paper's.

    k ~ U{min_classes … max_classes} classes without replacement, n_c ~ U{min_per_class … max_per_class}
    members of each without replacement (all of them where a class has fewer), and of these at most
    ``max_items``, a random subset.
    """

    min_classes: int = option(3, "fewest classes in a bag", low=1)
    max_classes: int = option(10, "most classes in a bag", low=1)
    min_per_class: int = option(12, "fewest members of a class", low=1)
    max_per_class: int = option(40, "most members of a class", low=1)
    max_items: int = option(160, "a bag is cut to this size", low=1)

    def __post_init__(self) -> None:
        for low, high in (("min_classes", "max_classes"), ("min_per_class", "max_per_class")):
            if getattr(self, low) > getattr(self, high):
                raise ValueError(f"{low}: expected at most {high} = {getattr(self, high)}, got {getattr(self, low)}")


@dataclass(frozen=True, eq=False)
class Bags(Examples):
    """A batch of bags. Elements come in random order, padding last; N = max_items, K = max_classes."""

    features: Tensor  # (B, N, d), zero in padding
    mask: Tensor  # (B, N) bool, True for an element
    labels: Tensor  # (B, N) long, the class of each element, −1 in padding
    target: Tensor  # (B, K) long, one random element of each class present, −1 after the last
    rows: Tensor  # (B, N) long, the element's row in the sampler's features, −1 in padding


def unlabelled(items: Sequence[Tensor], device: str | torch.device) -> Bags:
    """Bags of given items, (N, d) each, padded to the largest, without labels and targets."""
    rows = pad_sequence([torch.arange(len(bag)) for bag in items], batch_first=True, padding_value=-1).to(device)
    features = pad_sequence([bag.float() for bag in items], batch_first=True).to(device)
    return Bags(features, rows >= 0, torch.full_like(rows, -1), rows[:, :0], rows)


class BagSampler:
    """Draws bags from ``features`` (M, d) with ``labels`` (M,), any long values of at least 0.

    With fewer classes than ``max_classes``, k is at most their number. Sampling needs memory for
    B · max_classes · (size of the largest class) random numbers.
    """

    def __init__(self, features: Tensor, labels: Tensor, protocol: BagProtocol) -> None:
        self.protocol = protocol
        counts = torch.unique(labels, return_counts=True)[1]
        if len(counts) < protocol.min_classes:
            raise ValueError(
                f"labels: expected at least min_classes = {protocol.min_classes} classes, got {len(counts)}"
            )
        self.features, self.labels = features, labels
        self._by_class = labels.argsort(stable=True)  # rows, class after class
        self._counts, self._starts = counts, counts.cumsum(0) - counts
        self._largest = int(counts.max())

    def sample(self, batch_size: int, generator: torch.Generator) -> Bags:
        """Fresh bags: a pure function of the state of the generator, on whose device they are drawn."""
        rows, target = (drawn.to(self.features.device) for drawn in self._draw(batch_size, generator))
        mask = rows >= 0
        at = rows.clamp(min=0)
        features = self.features[at].masked_fill_(~mask[..., None], 0)  # (B, N, d)
        return Bags(features, mask, self.labels[at].masked_fill_(~mask, -1), target, rows)

    def _draw(self, B: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Rows (B, N) and target (B, max_classes), both −1 padded, on the generator's device.

        Sampling without replacement by sorting random keys; a key of −1 excludes an item.
        """
        p, device = self.protocol, generator.device
        by_class, counts, starts = (table.to(device) for table in (self._by_class, self._counts, self._starts))
        K = min(p.max_classes, len(counts))
        L = min(p.max_per_class, self._largest)

        def keys(*shape: int) -> Tensor:
            return torch.rand(shape, generator=generator, device=device)

        def whole(low: int, high: int, *shape: int) -> Tensor:
            return torch.randint(low, high + 1, shape, generator=generator, device=device)

        classes = keys(B, len(counts)).topk(K).indices  # (B, K)
        sizes = torch.minimum(whole(p.min_per_class, p.max_per_class, B, K), counts[classes])
        sizes = sizes * (torch.arange(K, device=device) < whole(p.min_classes, K, B, 1))  # unused slots: 0

        outside = torch.arange(self._largest, device=device) >= counts[classes][..., None]
        offsets = keys(B, K, self._largest).masked_fill_(outside, -1).topk(L).indices  # (B, K, L)
        unused = (torch.arange(L, device=device) >= sizes[..., None]).flatten(1)  # (B, K·L)

        # The shuffle that truncates the bag also removes the order by class.
        N = min(p.max_items, K * L)
        kept = keys(B, K * L).masked_fill_(unused, -1).topk(N)
        padding = kept.values < 0  # (B, N), a tail: keys come in descending order
        slot = (kept.indices // L).masked_fill_(padding, -1)
        places = (starts[classes][..., None] + offsets).flatten(1).gather(1, kept.indices)
        rows = by_class[places.masked_fill_(padding, 0)].masked_fill_(padding, -1)

        # Fresh keys, so that the position in the bag does not reveal the target.
        same = slot[:, None, :] == torch.arange(K, device=device)[:, None]  # (B, K, N)
        best = keys(B, 1, N).expand(B, K, N).masked_fill(~same, -1).max(2)
        target = best.indices.masked_fill_(best.values < 0, -1)  # (B, K), truncation may have emptied a class
        first = (target < 0).long().argsort(dim=1, stable=True)
        return (
            F.pad(rows, (0, p.max_items - N), value=-1),
            F.pad(target.gather(1, first), (0, p.max_classes - K), value=-1),
        )


def fixed_bags(sampler: BagSampler, count: int, seed: int) -> Bags:
    """``count`` bags that depend only on ``seed``: sampled on the CPU, equal on every device."""
    return sampler.sample(count, torch.Generator().manual_seed(seed))

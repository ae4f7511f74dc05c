"""Training bags of the piles task: sampled from real labelled datasets, augmented, and from synthetic mixtures.

All of a bag but its composition is drawn on the device, in groups that share a source, without reading a value back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from torchcpl.encoders.distances import distances
from torchcpl.files import read_npz
from torchcpl.tasks.base import Examples

MOST, MOST_GROUPS = 40, 100  # most classes in a bag of up to 160 items, and in a larger one
PRIMES = (10007, 10037, 10061, 10079, 10093, 10111, 10133, 10151, 10169, 10181, 10211, 10243)
OVERLAP = 2.5  # standard deviations between the centres of two components on a plane that count as one
FEWEST = 12  # members of a class in a bag, before it is cut
SPLIT_FROM = 20  # sets with at least this many classes keep 30 % of them for tests


@dataclass(frozen=True)
class Rows:
    """Labelled vectors grouped by class: class c has ``count[c]`` rows from ``start[c]`` on."""

    values: Tensor  # (M, D), value = stored · scale + shift
    scale: Tensor  # (D,) or ()
    shift: Tensor
    start: Tensor  # (C,)
    count: Tensor  # (C,)

    def to(self, device: torch.device) -> Rows:
        return Rows(*(part.to(device) for part in vars(self).values()))

    def classes(self, chosen: NDArray[Any]) -> Rows:
        index = torch.as_tensor(chosen, device=self.start.device)
        return Rows(self.values, self.scale, self.shift, self.start[index], self.count[index])

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True)
class LabelledSet:
    """One data set: rows to train on and rows to test on, and of its classes those training may see.

    ``whole`` is what unseen classes are tested on: the test rows, and all where those are fewer than 12 of a class.
    """

    name: str
    train: Rows
    test: Rows
    whole: Rows
    seen: NDArray[Any]
    unseen: NDArray[Any]  # all classes where there are too few to set some aside


def rows_of(values: NDArray[Any], labels: NDArray[Any], classes: int, scale: Tensor, shift: Tensor) -> Rows:
    # Shuffled within a class: neighbours in the file may be alike.
    order = np.lexsort((np.random.RandomState(0).rand(len(labels)), labels))
    count = np.bincount(labels, minlength=classes)
    start = np.concatenate([[0], count.cumsum()[:-1]])
    return Rows(
        torch.from_numpy(np.ascontiguousarray(values[order])),
        scale,
        shift,
        torch.from_numpy(start),
        torch.from_numpy(count),
    )


def load_sets(folder: str | Path) -> dict[str, LabelledSet]:
    """Every ``.npz`` below ``folder`` with ``train``, ``train_labels``, ``test`` and ``test_labels``, by name."""
    found = {}
    for path in sorted(Path(folder).rglob("*.npz")):
        file = read_npz(path)
        if not {"train", "train_labels", "test", "test_labels"} <= file.keys():
            continue
        for part in ("train", "test"):
            x, y = file[part], file[f"{part}_labels"]
            matrix = x.ndim == 2 and x.size and x.dtype.kind in "fiu" and x.shape[1] == file["train"].shape[-1]
            if not (matrix and y.shape == x.shape[:1] and y.dtype.kind in "iu" and y.min() >= 0):
                got = f"{x.shape} {x.dtype} and {y.shape} {y.dtype}"
                raise ValueError(f"{path}: {part}: expected numbers (M, D) and their classes (M,) from 0 on, got {got}")
        name = path.parent.name.split("-")[0] if path.stem == "features" else path.stem
        scale, shift = (
            torch.from_numpy(np.asarray(file.get(key, default), np.float32))
            for key, default in (("scale", 1.0), ("shift", 0.0))
        )
        labels = {part: file[f"{part}_labels"].astype(np.int64) for part in ("train", "test")}
        classes = 1 + int(max(part.max() for part in labels.values()))
        order = np.random.RandomState(0).permutation(classes)
        cut = round(0.7 * classes) if classes >= SPLIT_FROM else classes
        train, test = (rows_of(file[part], labels[part], classes, scale, shift) for part in ("train", "test"))
        whole = test
        if float(test.count.float().median()) < FEWEST and cut < classes:
            both = (np.concatenate([file[part] for part in labels]), np.concatenate([*labels.values()]))
            whole = rows_of(*both, classes, scale, shift)
        found[name] = LabelledSet(name, train, test, whole, order[:cut], order[cut:] if cut < classes else order)
    if not found:
        raise ValueError(f"source: expected a folder with .npz files of labelled vectors, got {str(folder)!r}")
    return found


def digits() -> Rows:
    """scikit-learn's 8 × 8 digits: for tests only."""
    from sklearn.datasets import load_digits

    values, labels = load_digits(return_X_y=True)
    return rows_of(values.astype(np.float32), labels, 10, torch.tensor(1.0), torch.tensor(0.0))


@dataclass(frozen=True)
class Bags(Examples):
    """Distances (B, N, N) and classes (B, N), −1 where there is no item; (B, S) which sets a bag was drawn from."""

    d: Tensor
    labels: Tensor
    drawn: Tensor | None = None

    @property
    def mask(self) -> Tensor:
        return self.labels >= 0


class Dice:
    """Random numbers for a group of bags: tensors on the device, and single numbers on the host, without waiting."""

    def __init__(self, generator: torch.Generator, rng: np.random.Generator) -> None:
        self.generator, self.rng = generator, rng

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.generator.device)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, device=self.generator.device)

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def between(self, low: float, high: float) -> float:
        return self.rng.uniform(low, high)

    def log_between(self, low: float, high: float) -> float:
        """Log-uniform."""
        return float(np.exp(self.rng.uniform(np.log(low), np.log(high))))


# ---------------------------------------------------------------------------------------------- composition


def most_classes(items: int) -> int:
    """The most classes in a bag of at most ``items``."""
    return MOST if items <= 160 else MOST_GROUPS


def protocol_labels(batch: int, items: int, classes: int, generator: torch.Generator) -> Tensor:
    """Labels (B, items) of the benchmark's protocol: 3–10 classes of 12–40 members, cut at random to ``items``.

    With n times 160 items up to 10·n classes. −1 where there is no item.
    """
    device = generator.device
    most = min(10 * max(1, items // 160), classes)
    slots = 40 * most
    k = torch.randint(min(3, most), most + 1, (batch, 1), generator=generator, device=device)
    sizes = torch.randint(FEWEST, 41, (batch, most), generator=generator, device=device)
    sizes = sizes.where(torch.arange(most, device=device) < k, 0)
    places = torch.arange(slots, device=device).expand(batch, -1).contiguous()
    labels = torch.searchsorted(sizes.cumsum(1), places, right=True)  # `most` after the last
    labels = labels.where(labels < most, -1)
    keys = torch.rand(batch, slots, generator=generator, device=device) + (labels < 0)
    chosen = labels.gather(1, keys.argsort(1)[:, :items])
    return F.pad(chosen, (0, items - chosen.shape[1]), value=-1)


def wide_labels(batch: int, items: int, classes: int, generator: torch.Generator) -> Tensor:
    """Labels (B, items) of any composition: 1–40 classes (100 in a large bag), of equal or very unequal sizes."""
    device = generator.device

    def uniform(*shape: int) -> Tensor:
        return torch.rand(batch, *shape, generator=generator, device=device)

    most = min(most_classes(items), classes)
    many, kind = uniform(1), uniform(1)
    k = (many * math.log(most + 0.999)).exp()
    k = torch.where(kind < 0.3, 1 + many * (min(most, 8) - 0.001), k)  # few, however large the bag
    k = torch.where(kind > 0.8, 1 + many * (most - 0.001), k).floor()
    skew = 2 * uniform(1).square()
    shares = (skew * torch.randn(batch, most, generator=generator, device=device)).exp()
    shares = shares.masked_fill(torch.arange(most, device=device) >= k, 0)
    labels = torch.multinomial(shares, items, replacement=True, generator=generator)
    full = k + (items - k).clamp(min=0) * uniform(1).sqrt()
    few = k * (items / k).clamp(min=1).pow(uniform(1))  # as often two members as twenty
    size = torch.where(uniform(1) < 0.5, full, few).floor()
    return labels.masked_fill(torch.arange(items, device=device) >= size, -1)


def draw_rows(rows: Rows, labels: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Vectors (B, N, D) of random members of a random class for each label, none twice.

    And the labels, −1 where a class has fewer members than items ask for.
    """
    batch = len(labels)
    device = labels.device
    chosen = torch.rand(batch, len(rows), generator=generator, device=device).argsort(1)  # (B, C)
    actual = chosen.gather(1, labels.clamp(min=0))  # (B, N)
    count, start = rows.count[actual], rows.start[actual]
    before = (labels.unsqueeze(2) == labels.unsqueeze(1)).tril(-1).sum(-1)  # how many of its class come first
    # A prime step is coprime to any smaller count, so that the members are visited once each.
    step = torch.tensor(PRIMES, device=device)
    step = step[torch.randint(len(PRIMES), labels.shape, generator=generator, device=device)]
    offset = torch.randint(2**40, labels.shape, generator=generator, device=device)
    step, offset = (part.gather(1, labels.clamp(min=0)) for part in (step, offset))  # one for each class
    index = start + (offset + before * step) % count.clamp(min=1)
    labels = labels.masked_fill((before >= count) & (labels >= 0), -1)
    values = rows.values[index.clamp(max=len(rows.values) - 1)].float() * rows.scale + rows.shift
    return values, labels


# ---------------------------------------------------------------------------------------------- alterations


@dataclass(frozen=True)
class Source:
    """A set to draw from, with the axes (D, D) of its rows' covariance, its eigenvalues (D,) and the mean (D,)."""

    rows: Rows
    axes: Tensor
    power: Tensor
    mean: Tensor


def source_of(rows: Rows) -> Source:
    """With the axes of a sample of at most about 20,000 rows."""
    values = rows.values[:: 1 + len(rows.values) // 20000].float() * rows.scale + rows.shift
    mean = values.mean(0)
    power, axes = torch.linalg.eigh((values - mean).T @ (values - mean) / len(values))
    return Source(rows, axes, power.clamp(min=0), mean)


def contrast(x: Tensor, labels: Tensor, most: int, dice: Dice) -> Tensor:
    """Vectors (B, N, D) nearer to the mean of their class in the bag, or farther, by a factor of each bag's own."""
    own = (labels.unsqueeze(-1) == torch.arange(most, device=x.device)).float()  # (B, N, C)
    means = own.transpose(1, 2) @ x / own.sum(1).clamp(min=1).unsqueeze(-1)  # (B, C, D)
    factor = 0.5 + 0.8 * dice.uniform(len(x), 1, 1)
    centre = means.gather(1, labels.clamp(min=0).unsqueeze(-1).expand_as(x))
    return centre + factor * (x - centre)


def recoloured(x: Tensor, source: Source, dice: Dice) -> Tensor:
    """Vectors (B, N, D) on the axes of their set, its spectrum from white to steep; sometimes the first axes only."""
    power = source.power.flip(0) / source.power.max().clamp(min=1e-30)
    scale = (power + 1e-3).pow((dice.between(0, 1.4) - 1) / 2)
    if dice.chance(0.5) and len(scale) > 6:
        scale = scale * (torch.arange(len(scale), device=x.device) < dice.log_between(6, len(scale)))
    return (x - source.mean) @ source.axes.flip(1) * scale


def altered(x: Tensor, mask: Tensor, dice: Dice) -> Tensor:
    """Real vectors (B, N, D) augmented as if from another feature extractor, alike for the whole group."""
    width, normal = x.shape[-1], dice.normal
    real = mask.unsqueeze(-1)
    total = real.sum((0, 1)).clamp(min=1)
    mean = (x * real).sum((0, 1)) / total
    spread = (((x - mean) * real).square().sum((0, 1)) / total).sqrt()
    level = spread.square().mean().sqrt()
    if dice.chance(0.25):  # standardise
        x = (x - mean) / (spread + 0.05 * level)
        spread, level = torch.ones_like(spread), torch.ones_like(level)
    if dice.chance(0.4) and width > 8:  # some of the columns, others in each bag
        keep = dice.between(0.4, 1)
        x = x * (dice.uniform(len(x), 1, width) < keep)
    if dice.chance(0.2):  # columns of unequal weight
        x = x * (dice.between(0, 1) * normal(len(x), 1, width)).exp()
    if dice.chance(0.15):  # fewer columns, each a mixture of all
        x = x @ normal(width, int(dice.log_between(4, 64)))
        level = x.std()
    elif dice.chance(0.15):  # a random layer
        x = (x - mean) / level.clamp(min=1e-12)
        x = F.relu(x @ (normal(width, 256) * width**-0.5) + dice.between(0, 1) * normal(256))
        level = x.std()
    if dice.chance(0.3):  # noise
        x = x + dice.between(0, 0.4) * level * normal(*x.shape)
    if dice.chance(0.1):
        x = x.sign() * (x.abs() / level.clamp(min=1e-12)).pow(dice.between(0.5, 1.5))
    return x


def cloud(x: Tensor, labels: Tensor, dice: Dice) -> tuple[Tensor, Tensor]:
    """One normal cloud (B, N, D) with the mean and covariance of each bag's vectors, and labels that say so.

    It has no groups, but the spectrum of a bag that does: what is left to tell them apart by is who is near to whom.
    """
    real = (labels >= 0).unsqueeze(-1)
    count = real.sum(1, keepdim=True).clamp(min=1)
    mean = (x * real).sum(1, keepdim=True) / count
    mixing = dice.normal(len(x), x.shape[1], x.shape[1]) / count.sqrt()
    return mean + mixing @ ((x - mean) * real), labels.clamp(max=0)


def clouds(labels: Tensor, dice: Dice, clear: bool) -> tuple[Tensor, Tensor]:
    """Vectors (B, N, D) of clouds centred at random in a cube, one for each label; those that overlap get one label.

    Where ``clear`` few of them touch.
    """
    batch, n = labels.shape
    most = most_classes(n)
    width = int(dice.log_between(2, 33) if dice.chance(0.75) else dice.log_between(33, 400))
    # Half a side of the cube in standard deviations: so much on a plane, less in more dimensions.
    half = (dice.log_between(10, 60) if clear else dice.log_between(3, 20)) * (2 / width) ** 0.5
    centres = (2 * dice.uniform(batch, most, width) - 1) * half
    size = (dice.between(0, 0.4) * dice.normal(batch, most, 1)).exp()
    noise = 3.4 * dice.uniform(batch, n, width) - 1.7 if dice.chance(0.2) else dice.normal(batch, n, width)
    of = labels.clamp(min=0).unsqueeze(-1)
    x = centres.gather(1, of.expand_as(noise)) + size.gather(1, of) * noise
    if dice.chance(0.4):  # all stretched alike
        x = x * (dice.between(0, 0.8) * dice.normal(batch, 1, width)).exp()
    return x, merged(labels, centres, size)


def merged(labels: Tensor, centres: Tensor, size: Tensor) -> Tensor:
    """Labels (B, N), one for components that overlap or that a chain of such connects: nobody could tell them apart.

    Components have ``centres`` (B, C, D) and standard deviations ``size`` (B, C, 1).
    """
    apart = OVERLAP * (centres.shape[-1] / 2) ** 0.125  # harder to see in many dimensions
    near = torch.cdist(centres, centres) < apart * (size + size.mT) / 2  # (B, C, C)
    there = (labels.unsqueeze(1) == torch.arange(near.shape[1], device=labels.device).unsqueeze(-1)).any(-1)  # (B, C)
    reach = (near & there.unsqueeze(1) & there.unsqueeze(2)).float()
    for _ in range((near.shape[1] - 1).bit_length()):
        reach = (reach @ reach).clamp(max=1)
    first = (reach > 0).to(torch.uint8).argmax(-1)  # (B, C)
    return first.gather(1, labels.clamp(min=0)).where(labels >= 0, -1)


def invented(labels: Tensor, dice: Dice, clear: bool) -> tuple[Tensor, Tensor]:
    """Vectors (B, N, D) of a synthetic mixture with one component per label; the labels, some merged.

    Where ``clear`` most components are well apart.
    """
    if dice.chance(0.5):
        return clouds(labels, dice, clear)
    batch, n = labels.shape
    normal, uniform = dice.normal, dice.uniform
    most, latent = most_classes(n), int(dice.log_between(2, 48))
    where = labels.clamp(min=0).unsqueeze(-1).expand(-1, -1, latent)
    # Distance of two centres in standard deviations of a component along the line between them.
    apart = (uniform(batch, 1, 1) * math.log(4) + math.log(3)).exp()
    if clear or dice.chance(0.35):
        apart = apart * dice.between(2 if clear else 1, 10)
    centres = normal(batch, most, latent) * apart / math.sqrt(2 * latent)
    if dice.chance(0.25):  # groups of groups
        above = torch.randint(4, (batch, most, 1), generator=dice.generator, device=labels.device)
        shared = normal(batch, 4, latent).gather(1, above.expand(-1, -1, latent))
        centres = centres + dice.between(0.5, 3) * apart * shared / latent**0.5
    size = (dice.between(0, 0.6) * normal(batch, most, 1) + dice.between(0, 0.7) * normal(batch, most, latent)).exp()
    noise = normal(batch, n, latent)
    kind = dice.rng.random()
    if kind < 0.2:  # heavy tails
        noise = noise / uniform(batch, n, 1).clamp(min=0.02).pow(dice.between(0.15, 0.5))
    elif kind < 0.35:
        noise = 3.4 * uniform(batch, n, latent) - 1.7
    x = centres.gather(1, where) + noise * size.gather(1, where)
    if dice.chance(0.3):  # curved, or rings
        angle = dice.between(1, 2 * math.pi) * (uniform(batch, n, 1) - 0.5)
        u, v = (F.normalize(normal(batch, most, latent), dim=-1).gather(1, where) for _ in range(2))
        radius: Any = dice.log_between(1, 12)
        if dice.chance(0.3):  # around one centre
            radius = radius * (1 + 3 * uniform(batch, most, 1).gather(1, labels.clamp(min=0).unsqueeze(-1)))
            x = noise * size.gather(1, where)
        x = x + radius * (angle.sin() * u + angle.cos() * v)
    else:
        labels = merged(labels, centres, size.mean(-1, keepdim=True))
    return observed(x, labels, dice), labels


def observed(x: Tensor, labels: Tensor, dice: Dice) -> Tensor:
    """Latent vectors (B, N, L) as other features (B, N, D), with noise, some of them almost equal."""
    batch, n, latent = x.shape
    normal, device = dice.normal, x.device
    width = int(dice.log_between(2, 256))
    if dice.chance(0.5):  # through a random network
        hidden = 64
        first = normal(batch, latent, hidden) * dice.between(0.3, 1.5) / x.std().clamp(min=1e-6) / latent**0.5
        x = torch.tanh(x @ first + 0.5 * normal(batch, 1, hidden)) @ normal(batch, hidden, max(width, 8))
    elif dice.chance(0.7):
        x = x @ normal(batch, latent, max(width, latent))
    decay = torch.arange(1, x.shape[-1] + 1, device=device).pow(-dice.between(0, 1.0))
    if dice.chance(0.5):
        x = x + dice.between(0, 0.6) * x.std() * normal(*x.shape) * decay
    if dice.chance(0.1):  # near-duplicates
        twin = torch.arange(n, device=device) // 2 * 2
        same = (labels == labels[:, twin]).unsqueeze(-1)
        x = torch.where(same, x[:, twin] + 0.01 * x.std() * normal(*x.shape), x)
    return x


# ---------------------------------------------------------------------------------------------- bags


class Mixture:
    """Training bags of real and synthetic datasets; batch ``step`` is a function of ``(seed, step)`` alone."""

    def __init__(
        self, sets: list[Rows], seed: int, device: torch.device, group: int, synthetic: float, varied: float = 1.0,
        ungrouped: float = 0.0,
    ) -> None:  # fmt: skip
        self.sets, self.seed, self.device = [source_of(rows.to(device)) for rows in sets], seed, device
        self.group, self.synthetic, self.varied = group, synthetic if sets else 1.0, varied
        self.ungrouped = ungrouped
        self.generator = torch.Generator(device)

    @torch.no_grad()
    def bags(self, step: int, batch: int, items: int, wide: tuple[float, float]) -> Bags:
        """``batch`` bags of at most ``items``; ``wide``: the shares of real and of made-up groups by `wide_labels`."""
        self.generator.manual_seed(self.seed * 1_000_003 + step)
        dice = Dice(self.generator, np.random.default_rng([self.seed, step]))
        parts = [self._group(min(self.group, batch - i), items, wide, dice) for i in range(0, batch, self.group)]
        return Bags(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def _group(self, batch: int, items: int, wide: tuple[float, float], dice: Dice) -> tuple[Tensor, Tensor, Tensor]:
        drawn = torch.zeros(batch, len(self.sets), dtype=torch.bool, device=self.device)
        made_up = dice.chance(self.synthetic)
        compose = wide_labels if dice.chance(wide[made_up]) else protocol_labels
        if made_up:
            labels = compose(batch, items, most_classes(items), self.generator)
            # Where groups are not clear only the prior can tell their number: let that be the benchmark's.
            x, labels = invented(labels, dice, clear=compose is wide_labels)
        else:
            chosen = dice.rng.permutation(len(self.sets))[: 2 if dice.chance(0.2 * self.varied) else 1].tolist()
            x, labels = self._real([self.sets[i] for i in chosen], batch, items, compose, dice)
            for i in chosen:
                drawn[:, i] = True
        if dice.chance(self.ungrouped):
            x, labels = cloud(x, labels, dice)
        elif dice.chance(0.4 * self.varied):
            x = contrast(x, labels, most_classes(items), dice)
        d = distances(x, "cosine" if dice.chance(0.35) else "euclidean")
        if dice.chance(0.12):  # another metric
            d = d.pow(dice.between(0.6, 1.6))
        return d, labels, drawn

    def _real(self, sources: list[Source], batch: int, items: int, compose: Any, dice: Dice) -> tuple[Tensor, Tensor]:
        """Vectors of one set, or of two side by side: every class a pair of classes, every item a pair of items."""
        labels = compose(batch, items, min(len(source.rows) for source in sources), self.generator)
        parts = []
        for source in sources:
            x, labels = draw_rows(source.rows, labels, self.generator)
            if dice.chance(0.35 * self.varied):
                x = recoloured(x, source, dice)
            if dice.chance(0.5):
                x = altered(x, labels >= 0, dice)
            parts.append(x)
        if len(parts) == 1:
            return parts[0], labels
        level = [part.std((0, 1)).square().sum().sqrt().clamp(min=1e-12) for part in parts]
        return torch.cat([parts[0] / level[0], parts[1] / level[1] * dice.between(0.3, 1)], -1), labels


@torch.no_grad()
def fixed_vectors(rows: Rows, count: int, items: int = 160, seed: int = 1) -> tuple[Tensor, Tensor]:
    """``count`` bags of the benchmark's protocol: vectors (B, N, D) and labels (B, N), by a fixed seed on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    labels = protocol_labels(count, items, len(rows), generator)
    return draw_rows(rows, labels, generator)


@torch.no_grad()
def wide_vectors(rows: Rows, count: int, items: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """The same of any composition (`wide_labels`), at most 40 classes."""
    generator = torch.Generator().manual_seed(seed)
    labels = wide_labels(count, items, min(MOST, len(rows)), generator)
    return draw_rows(rows, labels, generator)


def fixed_bags(rows: Rows, count: int, items: int = 160, seed: int = 1) -> Bags:
    """The bags of `fixed_vectors`, as distances."""
    x, labels = fixed_vectors(rows, count, items, seed)
    return Bags(distances(x), labels)

"""Piles: a model of distances, trained on many datasets, tested on unseen classes and datasets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchcpl.config import TrainConfig, option
from torchcpl.constraints import Rules
from torchcpl.decoding.refine import refine
from torchcpl.encoders.distances import DistanceModel, distance_features
from torchcpl.functional import logsumexp, prefix_logits
from torchcpl.metrics import cluster_scores
from torchcpl.potentials import Potentials, Selection
from torchcpl.select import greedy_to_median, median_length
from torchcpl.selectors.stepwise import endless, stop_log_odds
from torchcpl.tasks.base import SelectionModel, first_batches
from torchcpl.tasks.piles.data import (
    FEWEST,
    MOST_GROUPS,
    Bags,
    Mixture,
    Rows,
    digits,
    fixed_bags,
    load_sets,
    most_classes,
)
from torchcpl.train import device_of

METHODS = {"cpl": "CPL"}
COLUMNS = ("clu_rec", "clu_prec", "clu_f1", "card_err")
OWN_STEPS = 30  # picks of the model itself that the loss follows
LARGE_EVERY = 2  # steps, of which one has large bags
MOST_PICKS = 30  # in validation, of bags of at most ten classes
SHIFTS = tuple(round(-1.5 + 0.1 * i, 1) for i in range(31))  # of the stop's logit, to choose from


@dataclass(frozen=True, kw_only=True)
class PilesConfig(TrainConfig):
    """The training of a selector for vectors of any kind."""

    method: str = option("cpl", "how subsets are selected", choices=METHODS)
    kind: str = option("coverage", "interaction", choices=("coverage",))
    source: str = option("", "folder of labelled .npz files; empty for made-up mixtures only")
    leave_out: tuple[str, ...] = option((), "sets of the folder that training must not see")
    dim: int = option(128, "width of the nodes", low=1)
    layers: int = option(4, "attention layers, two for every update of the pairs", low=2)
    heads: int = option(4, "attention heads", low=1)
    edge: int = option(32, "width of the pairs", low=1)
    steps: int = option(200, "steps of an epoch", low=1)
    items: int = option(160, "most items of a bag", low=2)
    large: int = option(512, "most items of a bag in every second step, with fewer bags", low=2)
    synthetic: float = option(0.3, "share of made-up bags", low=0.0, high=1.0)
    varied: float = option(1.0, "how often real sets are recoloured, paired and their classes pulled apart", low=0.0)
    wide: float = option(0.0, "share of real bags whose composition is not the benchmark's", low=0.0, high=1.0)
    wide_made_up: float = option(0.1, "the same of made-up bags", low=0.0, high=1.0)
    ungrouped: float = option(0.1, "share of bags made one cloud of the same covariance", low=0.0, high=1.0)
    group: int = option(16, "bags of a batch that share a source", low=1)
    permutations: int = option(2, "random orders of each target", low=1)
    pair_weight: float = option(1.0, "weight of telling whether two items are of one class", low=0.0)
    count_weight: float = option(1.0, "weight of guessing the number of classes", low=0.0)
    validation_bags: int = option(40, "bags of each set", low=1)


def cover_nll(pot: Potentials, labels: Tensor, orders: Tensor) -> Tensor:
    """−log P(the next pick is of a class not yet covered), or of the stop after as many picks as classes; (B,).

    The marginal over which member represents a class: every member is a right answer. ``orders`` (B, P, T) are picks
    that lead through the contexts, right or wrong; −1 after the end. With k classes the sum is over the prefixes of
    up to k picks, over their mean number: P(stop) after t picks is the share of bags with t classes among those with t
    or more, and the number of picks is distributed as the model believes the number of classes to be.
    """
    steps = orders.shape[2]
    logits = prefix_logits(pot, orders, Rules(pot))  # (B, P, T+1, N+1)
    picked = labels.unsqueeze(1).expand(-1, orders.shape[1], -1).gather(2, orders.clamp(min=0))
    hit = picked.masked_fill(orders < 0, -2).unsqueeze(-1) == labels[:, None, None]  # (B, P, T, N)
    place = torch.arange(steps + 1, device=labels.device)
    when = torch.where(hit, place[:-1, None], steps + 1).amin(2)  # (B, P, N) the pick that covers the item's class
    left = (when.unsqueeze(2) >= place[:, None]) & (labels >= 0)[:, None, None]  # (B, P, T+1, N)
    norm = logits.logsumexp(-1)
    going_on = norm - logsumexp(logits[..., :-1].masked_fill(~left, -torch.inf))
    k = count_classes(labels).view(-1, 1, 1)
    counted = place <= k  # (B, 1, T+1)
    terms = torch.where(place < k, going_on, norm - logits[..., -1]).masked_fill(~counted, 0)
    return terms.sum(-1).mean(1) / counted.sum(-1).float().mean()


@torch.no_grad()
def own_orders(pot: Potentials, steps: int, noise: Sequence[float]) -> Tensor:
    """(B, P, T) picks of the model itself without a stop, with Gumbel noise of these scales on the logits.

    Contexts as decoding meets them, mistakes included.
    """
    cover = pot.interaction.cover.transpose(1, 2)  # type: ignore[attr-defined]  # (B, N picks, N)
    batch, n = pot.unary.shape
    scale = torch.cat([cover.new_full((1, 1, 1), one) for one in noise], 1)  # a graph cannot copy from the host
    covered = cover.new_zeros(batch, len(noise), n)
    taken = ~pot.mask.unsqueeze(1).expand(covered.shape)
    picks = []
    for _ in range(min(steps, n)):
        drawn = -torch.empty_like(covered).exponential_().clamp(min=1e-20).log()
        scores = pot.unary.unsqueeze(1) - covered.log1p() + scale * drawn
        best, pick = scores.masked_fill(taken, -torch.inf).max(-1)
        picks.append(pick.masked_fill(best == -torch.inf, -1))
        taken = taken.scatter(2, pick.unsqueeze(-1), True)
        covered = covered + cover.gather(1, pick.unsqueeze(-1).expand(-1, -1, n)).clamp(max=30).exp()
    return torch.stack(picks, -1)


def random_orders(labels: Tensor, permutations: int) -> Tensor:
    """(B, P, T) one random member of every class in random order, −1 after the end."""
    batch, n = labels.shape
    keys = torch.rand(batch, permutations, n, device=labels.device)
    own = labels.view(batch, 1, 1, n) == torch.arange(most_classes(n), device=labels.device).view(
        1, 1, -1, 1
    )  # (B, 1, T, N)
    best, member = keys.unsqueeze(2).masked_fill(~own, -1).max(-1)  # (B, P, T)
    order = (torch.rand(member.shape, device=labels.device) + 2 * (best < 0)).argsort(-1)
    return member.masked_fill(best < 0, -1).gather(2, order)


def pair_loss(same: Tensor, labels: Tensor) -> Tensor:
    """(B,) cross-entropy of logits (B, P) against "of one class", both answers weighted alike."""
    n = labels.shape[1]
    first, second = torch.triu_indices(n, n, 1, device=labels.device)
    a, b = labels[:, first], labels[:, second]
    real = ((a >= 0) & (b >= 0)).float()
    target = (a == b).float()
    loss = F.binary_cross_entropy_with_logits(same, target, reduction="none")
    yes, no = real * target, real * (1 - target)
    parts = [(loss * part).sum(1) / part.sum(1).clamp(min=1) for part in (yes, no)]
    return (parts[0] + parts[1]) / 2


class PilesModel(SelectionModel):
    """``model(batch)`` returns the loss; ``model.net`` is the selector, whose potentials are the encoding."""

    def __init__(self, config: PilesConfig) -> None:
        super().__init__()
        self.net = DistanceModel(config.dim, config.layers, config.heads, config.edge)
        self.permutations = config.permutations
        self.pair_weight, self.count_weight = config.pair_weight, config.count_weight

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Mean losses over the bags, those where ``batch["seen"]`` (B,) is True if it is there."""
        labels = batch["labels"]
        mask, k = labels >= 0, count_classes(labels).clamp(min=1)
        pot, same, log_k = self.net.judge(batch["nodes"], batch["edges"], mask)
        by_bag = {
            "taught": cover_nll(pot, labels, random_orders(labels, self.permutations)),
            "own": cover_nll(pot, labels, own_orders(pot, OWN_STEPS, (0.0, 0.5))),
            "pairs": torch.stack([pair_loss(logits, labels) for logits in same]).mean(0),
            "count": F.smooth_l1_loss(log_k, k.log(), beta=0.3, reduction="none"),
        }
        seen = batch.get("seen", mask.any(-1))
        found = {name: (one * seen).sum() / seen.sum().clamp(min=1) for name, one in by_bag.items()}
        pick = (found["taught"] + found["own"]) / 2
        loss = pick + self.pair_weight * found["pairs"] + self.count_weight * found["count"]
        return {"loss": loss, **found}

    def encode(self, inputs: Bags) -> Potentials:
        return self.net(inputs.d, inputs.mask)

    def decode(self, features: Potentials, inputs: Bags, knob: float | None = None) -> Selection:
        pot = replace(features, stop=features.stop + (knob or 0.0))
        return greedy_to_median(pot, least=1)


class Ahead:
    """Batches by number on CUDA, each drawn by a thread and on a stream of its own while the one before is in use."""

    QUIET = 32  # first calls without a thread: nothing else may allocate while the loop captures its graph

    def __init__(self, draw: Callable[[int], dict[str, Tensor]]) -> None:
        self.draw = draw
        self.pool = ThreadPoolExecutor(1)
        self.waiting: dict[int, Future[tuple[dict[str, Tensor], torch.cuda.Event]]] = {}
        self.calls, self.last = 0, 0
        self.stream: torch.cuda.Stream | None = None

    def _drawn(self, step: int) -> tuple[dict[str, Tensor], torch.cuda.Event]:
        if self.stream is None:
            self.stream = torch.cuda.Stream()
        with torch.cuda.stream(self.stream):
            batch, event = self.draw(step), torch.cuda.Event()
            event.record()
        return batch, event

    def __call__(self, step: int) -> dict[str, Tensor]:
        stride, self.last, self.calls = step - self.last, step, self.calls + 1
        if self.calls <= self.QUIET:
            return self.draw(step)
        future = self.waiting.pop(step, None) or self.pool.submit(self._drawn, step)
        self.waiting = {step + stride: self.pool.submit(self._drawn, step + stride)}
        batch, event = future.result()
        current = torch.cuda.current_stream()
        current.wait_event(event)
        for tensor in batch.values():
            tensor.record_stream(current)
        return batch


class PilesTask:
    """The task: a model, batches by step number, and validation."""

    ordered = False
    metric = "clu_f1"
    higher_is_better = True
    capturable = True

    def __init__(self, config: PilesConfig) -> None:
        self.config = config
        self.device = device_of(config)
        sets = load_sets(config.source) if config.source else {}
        unknown = set(config.leave_out) - set(sets)
        if unknown:
            raise ValueError(f"leave_out: expected some of {', '.join(sets)}, got {sorted(unknown)[0]!r}")
        self.sets = sets
        trained = {name: one for name, one in sets.items() if name not in config.leave_out}
        self.mixture = Mixture(
            [one.train.classes(one.seen) for one in trained.values()],
            config.seed, self.device, config.group, config.synthetic, config.varied, config.ungrouped,
        )  # fmt: skip
        self.ahead = Ahead(self.draw)
        count = config.validation_bags
        # Choices are made on new rows of the classes that training sees; without any, on made-up bags.
        new = {name: one.test.classes(one.seen) for name, one in trained.items()}
        self.chosen_on = {
            name: fixed_bags(rows, count, seed=2)
            for name, rows in new.items()
            if float(rows.count.float().median()) >= FEWEST
        }
        if not self.chosen_on:
            fresh = Mixture([], config.seed + 1, torch.device("cpu"), config.group, 1.0)
            self.chosen_on["synthetic"] = fresh.bags(2**30, count, config.items, (0.0, 0.0))
        self.reported = {name: fixed_bags(rows, count) for name, rows in self.reported_rows().items()}

    def reported_rows(self) -> dict[str, Rows]:
        """Rows never trained on: of unseen classes, of all classes where the set is left out; and digits."""
        out = self.config.leave_out
        found = {name: one.whole if name in out else one.whole.classes(one.unseen) for name, one in self.sets.items()}
        return {**found, "digits": digits()}

    @property
    def steps_per_epoch(self) -> int:
        return self.config.steps

    def build(self) -> PilesModel:
        return PilesModel(self.config)

    def batch(self, step: int) -> dict[str, Tensor]:
        return self.ahead(step) if self.device.type == "cuda" else self.draw(step)

    @torch.no_grad()
    def draw(self, step: int) -> dict[str, Tensor]:
        config = self.config
        items, count, wide = config.items, config.batch_size, (config.wide, config.wide_made_up)
        if step % LARGE_EVERY == LARGE_EVERY - 1 and config.large > items:
            items, count = config.large, max(1, round(count * (items / config.large) ** 2))
            wide = 1.0, 1.0  # or the size of a large bag would tell how many classes it has
        bags = self.mixture.bags(step, count, items, wide)
        nodes, edges = distance_features(bags.d, bags.mask)
        assert bags.drawn is not None
        return {"nodes": nodes, "edges": edges, "labels": bags.labels, "drawn": bags.drawn}

    def validate(self, model: nn.Module) -> dict[str, float]:
        """Mean CluF1 on the bags choices are made on, at the best shift of the stop; at that, each reported set's."""
        scores = self.evaluate(model, self.chosen_on, SHIFTS, sweeps=0)  # as good for the choice, and faster
        knob = max(SHIFTS, key=lambda value: mean(scores[value])["clu_f1"])
        both = self.evaluate(model, self.reported, (knob, None))
        found = {**mean(scores[knob]), "knob": knob}
        found.update({f"reported_{key}": value for key, value in mean(both[knob]).items()})
        found["told_clu_f1"] = mean(both[None])["clu_f1"]
        for name, row in both[knob].items():
            told = both[None][name]["clu_f1"]
            found.update({f"{name}_clu_f1": row["clu_f1"], f"{name}_card_err": row["card_err"], f"{name}_told": told})
        return found

    def report(self, model: nn.Module, knob: float | None) -> dict[str, float]:
        """Mean scores over the reported sets."""
        knob = knob or 0.0
        return mean(self.evaluate(model, self.reported, (knob,))[knob])

    def examples(self, batch: int, limit: int) -> list[Bags]:
        """The first bags of the first reported set, ``batch`` at a time, up to ``limit`` times."""
        first = next(iter(self.reported.values()))
        return [bags.to(self.device) for bags in first_batches(first, batch, limit, "the run's validation_bags")]

    @torch.no_grad()
    def evaluate(
        self, model: Any, sets: dict[str, Bags], knobs: tuple[Any, ...], sweeps: int = 1
    ) -> dict[Any, dict[str, Any]]:
        """For every shift of the stop, or None for the true number of picks, every set's mean scores."""
        net = model.net
        found: dict[Any, dict[str, Any]] = {knob: {} for knob in knobs}
        for name, bags in sets.items():
            rows: dict[Any, list[dict[str, Tensor]]] = {knob: [] for knob in knobs}
            for part in bags.split(20):
                part = part.to(self.device)
                pot = net(part.d, part.mask)
                picks, hazard = greedy_hazard(pot, MOST_PICKS)
                for knob in knobs:
                    length = count_classes(part.labels) if knob is None else shifted_length(hazard, knob)
                    rows[knob].append(cluster_scores(first_picks(pot, picks, length, sweeps), part.labels))
            for knob in knobs:
                found[knob][name] = {
                    key: float(torch.cat([r[key] for r in rows[knob]]).mean()) for key in rows[knob][0]
                }
        return found


@torch.no_grad()
def greedy_hazard(pot: Potentials, most: int) -> tuple[Tensor, Tensor]:
    """Up to ``most`` greedy picks (B, T) that never stop, and the logit of P(stop) after each (B, T)."""
    picks, logits = endless(pot, most)
    return picks, stop_log_odds(logits[:, 1:].double()).clamp(-50, 50)


def shifted_length(hazard: Tensor, shift: float) -> Tensor:
    """(B,) the median number of picks, at least one, with the logits of P(stop) after each (B, T) shifted."""
    return median_length(F.pad((hazard + shift).sigmoid(), (1, 0)))


def first_picks(pot: Potentials, picks: Tensor, length: Tensor, sweeps: int = 1) -> Tensor:
    """(B, T) the first ``length`` (B,) of greedy ``picks`` (B, T), refined in so many sweeps; −1 after them."""
    ended = torch.arange(picks.shape[1], device=picks.device) >= length.unsqueeze(-1)
    found = Selection(picks.masked_fill(ended, -1), length, pot.stop.new_zeros(len(pot)), pot.num_candidates)
    return refine(pot, found, sweeps).indices if sweeps else found.indices


def count_classes(labels: Tensor) -> Tensor:
    """(B,) how many classes the bags (B, N) hold."""
    return (labels.unsqueeze(-1) == torch.arange(MOST_GROUPS, device=labels.device)).any(1).sum(-1)


def mean(scores: dict[str, dict[str, float]]) -> dict[str, float]:
    """The mean over the sets."""
    return {key: sum(row[key] for row in scores.values()) / len(scores) for key in COLUMNS}

"""Representative subsets: one member of every class in a bag, trained from one random choice of members."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn

from torchcpl.checks import check_tensor
from torchcpl.config import TrainConfig, option
from torchcpl.constraints import Rules
from torchcpl.decoding import sample
from torchcpl.encoders.distances import DistanceBias, distances
from torchcpl.encoders.transformer import Encoder
from torchcpl.functional import prefix_logits
from torchcpl.head import KINDS, CPLHead
from torchcpl.interactions.base import gather_rows
from torchcpl.metrics import cluster_scores
from torchcpl.potentials import Selection
from torchcpl.selectors import Hungarian, Method, PointerHead, Stepwise, Threshold, kmeans
from torchcpl.selectors.stepwise import STOP_RULES, fit_stop, stop_log_odds
from torchcpl.tasks.base import SelectionModel, first_batches
from torchcpl.tasks.subsets.bags import BagProtocol, Bags, BagSampler, fixed_bags
from torchcpl.tasks.subsets.data import Features, split_classes, split_rows
from torchcpl.train import device_of

METHODS = {"threshold": "BCE", "hungarian": "Hungarian", "pointer": "Pointer (AR)", "cpl": "CPL"}  # in tables' order
REFERENCE = "k-Means (oracle k)"
COLUMNS = ("clu_rec", "clu_prec", "clu_f1", "card_err")
REPORTED_CLASSES = 0.3  # share of the classes that training never sees

Encoded: TypeAlias = Tensor | tuple[Tensor, Tensor]  # features (B, N, d), and the input (B, N, N) of CPL's coverage


@dataclass(frozen=True, kw_only=True)
class SubsetsConfig(BagProtocol, TrainConfig):
    """The paper's recipe."""

    method: str = option("cpl", "how subsets are selected", choices=METHODS)
    source: str = option("digits", "digits, cifar10, cifar100, or a .npz file with features and labels")
    root: str = option("", "folder of the CIFAR files (cifar10, cifar100)")
    weights: str = option("", "ResNet-18 weights, .safetensors or .pth (cifar10, cifar100)")

    bags: int = option(5000, "bags drawn an epoch", low=1)
    validation_bags: int = option(1000, "bags to validate on, and as many to report on", low=1)
    split: str = option(
        "items", "what is reported on: new items of the same classes, or 30% of the classes, never seen",
        choices=("items", "classes"),
    )  # fmt: skip
    split_seed: int = option(0, "which classes these are", low=0, high=2**32 - 1)
    held_out: float = option(
        0.0, "part of the training items, or classes, set aside to choose checkpoint and knob on", low=0.0, high=0.9
    )  # fmt: skip

    dim: int = option(512, "width of the encoder", low=1)
    layers: int = option(3, "encoder layers", low=0)
    heads: int = option(4, "attention heads", low=1)
    ffn: int = option(1024, "width of the feed-forward blocks", low=1)
    distances: str = option(
        "none", "cosine distances between the items as input to attention and CPL's coverage: none; also, beside "
        "the features; only, instead of them", choices=("none", "also", "only"),
    )  # fmt: skip
    projection: bool = option(True, "a linear layer before the encoder; without it only where widths differ")
    dropout: float = option(0.1, "dropout in encoder, decoder and heads", low=0.0, high=0.9)
    input_dropout: float = option(0.0, "dropout on the features", low=0.0, high=0.9)
    input_mix: float = option(
        0.0, "in training, every feature is moved up to this far towards that of another item", low=0.0, high=1.0
    )
    standardise: bool = option(False, "scale every feature to mean 0 and variance 1 over the training items")
    hidden: int = option(256, "width of the MLP heads", low=1)
    kind: str = option("lowrank", "interaction of the CPL head", choices=KINDS)
    live_stop: bool = option(False, "let the stop of the CPL head depend on the picks")
    decoder_layers: int = option(2, "layers of the pointer's decoder", low=1)
    projection_layers: int = option(1, "layers of the pointer's projections; its authors have 2", low=1, high=2)
    pointer_cache: bool = option(True, "keep the pointer's keys and values from step to step")

    permutations: int = option(10, "random orders of each target (cpl, pointer)", low=1)
    early_stop_weight: float = option(5.0, "weight of P(stop) before the end (cpl, pointer)", low=0.0)
    stop_weight: float = option(1.0, "weight of −log P(stop) at the end (cpl, pointer)", low=0.0)
    max_len: int = option(20, "most picks (cpl, pointer)", low=1)
    stop_rule: str = option(
        "argmax",
        "stop when that is the likeliest choice, or when its probability passes a threshold",
        choices=STOP_RULES,
    )
    calibrate: str = option(
        "none", "what the stop of cpl and pointer is fitted for, on the bags the checkpoint is chosen on: the best "
        "F1, the best count, or the likelihood of stopping at the target's end",
        choices=("none", "f1", "count", "likelihood"),
    )  # fmt: skip

    def __post_init__(self) -> None:
        TrainConfig.__post_init__(self)
        BagProtocol.__post_init__(self)
        if self.calibrate == "likelihood" and self.stop_rule != "threshold":
            raise ValueError('calibrate = "likelihood": expected stop_rule = "threshold", got "argmax"')


class SubsetsModel(SelectionModel):
    """Encoder and method. ``model(bags)`` returns the loss, ``model.select(bags)`` the selection."""

    paired = True  # items of a class have almost equal scores: which one is picked depends on rounding

    def __init__(self, config: SubsetsConfig, train: Tensor) -> None:
        super().__init__()
        width = train.shape[1]
        shift, scale = torch.zeros(width), torch.ones(width)
        if config.standardise or config.distances != "none":
            shift, deviation = train.mean(0), train.std(0)
            scale = deviation.where(deviation > 1e-6, 1.0)  # a constant feature is not scaled
        self.shift, self.scale = nn.Buffer(shift), nn.Buffer(scale)
        bridge = config.projection or width != config.dim
        project = nn.Linear(width, config.dim) if bridge else nn.Identity()
        only = config.distances == "only"
        self.input = None if only else nn.Sequential(nn.Dropout(config.input_dropout), project)
        self.encoder = Encoder(config.dim, config.layers, config.heads, config.ffn, config.dropout)
        self.method = build_method(config)
        self.biased = config.layers * config.heads
        covers = config.method == "cpl" and config.kind == "coverage"
        told = config.distances != "none"
        self.distances = DistanceBias(config.dim, self.biased + covers) if told else None
        self.config, self.max_len = config, config.max_len

    def encode(self, inputs: Bags) -> Encoded:
        """Features (B, N, d) and, for a coverage that knows the distances, its input for each pair (B, N, N)."""
        check_tensor("features", inputs.features, ("B", "N", len(self.shift)), "float")
        features = inputs.features
        if self.training and self.config.input_mix > 0:
            share = self.config.input_mix * torch.rand(features.shape[:2], device=features.device).unsqueeze(-1)
            features = features.lerp(features.roll(1, 1), share)  # the order within a bag is random already
        scaled = (features - self.shift) / self.scale
        entered = scaled if self.config.standardise else features
        items: Tensor | None = None if self.input is None else self.input(entered)
        if self.distances is None:
            return self.encoder(items, inputs.mask)
        nodes, pairs = self.distances(distances(scaled, "cosine"), inputs.mask)
        encoded = self.encoder(nodes if items is None else items + nodes, inputs.mask, pairs[:, : self.biased])
        return (encoded, pairs[:, self.biased]) if pairs.shape[1] > self.biased else encoded

    def forward(self, bags: Bags) -> dict[str, Tensor]:
        goals, features = gather_rows(bags.features, bags.target), self.encode(bags)
        assigned = self.method.assign(features, bags.mask, bags.target, bags.features, goals)
        return {"loss": self.method.loss(features, bags.mask, assigned)}

    def decode(self, features: Encoded, inputs: Bags, knob: float | None = None) -> Selection:
        """The selection of the method from encoded bags."""
        return self.method.select(features, inputs.mask, self.max_len, knob)

    def answers(self, features: Encoded, inputs: Bags, knobs: tuple[float, ...]) -> list[Tensor]:
        """The picks (B, T) for every knob; a method that selects step by step decodes once for all of them."""
        if isinstance(self.method, Stepwise) and len(knobs) > 1:
            return self.method.sweep(self.method.potentials(features, inputs.mask), self.max_len, knobs)
        return [self.decode(features, inputs, knob).indices for knob in knobs]


def build_method(config: SubsetsConfig) -> Method:
    """The selection method on top of the encoder, with the paper's settings."""
    stepwise = partial(
        Stepwise, ordered=False, permutations=config.permutations, early_stop_weight=config.early_stop_weight,
        stop_weight=config.stop_weight, stop_rule=config.stop_rule,
    )  # fmt: skip
    if config.method == "cpl":
        head = CPLHead(config.dim, config.hidden, kind=config.kind, live_stop=config.live_stop, dropout=config.dropout)
        return stepwise(head)
    if config.method == "pointer":
        decoder = PointerHead(
            config.dim, layers=config.decoder_layers, heads=config.heads, ffn=config.ffn, dropout=config.dropout,
            max_len=config.max_len, cache=config.pointer_cache, projection_layers=config.projection_layers,
        )  # fmt: skip
        return stepwise(decoder)
    parallel = Threshold if config.method == "threshold" else Hungarian
    return parallel(config.dim, config.hidden, dropout=config.dropout)


class SubsetsTask:
    """The task: a model, batches by step number, and validation."""

    ordered = False  # whether the order of the picks matters
    metric = "clu_f1"
    higher_is_better = True

    def __init__(self, config: SubsetsConfig, features: Features) -> None:
        self.config = config
        self.device = device_of(config)
        if config.split == "classes":
            features = split_classes(features, REPORTED_CLASSES, config.split_seed, config.min_classes)
        self.features = features
        # Training, selection and reported data.
        seen = features
        if config.held_out > 0 and config.split == "classes":
            rows, labels = features.train, features.train_labels
            whole = Features(rows, labels, rows, labels, features.class_names)
            seen = split_classes(whole, config.held_out, config.split_seed, config.min_classes)
        elif config.held_out > 0:
            seen = split_rows(features.train, features.train_labels, features.class_names, config.held_out)
        self.sampler = BagSampler(seen.train.to(self.device), seen.train_labels.to(self.device), config)
        self.reported = self._fixed(features, seed=1)
        self.chosen_on = self._fixed(seen, seed=2) if config.held_out > 0 else self.reported
        self.generator = torch.Generator(device=self.device)

    def _fixed(self, features: Features, seed: int) -> Bags:
        sampler = BagSampler(features.test, features.test_labels, self.config)
        return fixed_bags(sampler, self.config.validation_bags, seed).to(self.device)

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.config.bags // self.config.batch_size)

    @property
    def capturable(self) -> bool:
        return self.config.method != "hungarian"  # its assignment is solved on the host

    def build(self) -> SubsetsModel:
        sizes = self.sampler.labels.unique(return_counts=True)[1]
        for name, most, what in (
            ("max_classes", len(sizes), "the number of classes"),
            ("max_per_class", int(sizes.max()), "the size of the largest class"),
        ):
            asked = getattr(self.config, name)
            if asked > most:
                raise ValueError(f"{name}: expected at most {most}, {what} to train on, got {asked}")
        return SubsetsModel(self.config, self.sampler.features.cpu())

    def batch(self, step: int) -> Bags:
        # A fresh random stream for every step, so that resuming needs only the step number.
        self.generator.manual_seed(self.config.seed * 1_000_003 + step)
        return self.sampler.sample(self.config.batch_size, self.generator)

    def validate(self, model: SubsetsModel) -> dict[str, float]:
        """The metrics at the best knob on the selection bags, and at that knob on the reported bags.

        With ``held_out`` the latter are ``reported_…``; ``best_…`` are at the knob that is best on the reported bags.
        """
        calibrate, fitted = self.config.calibrate != "none", dict[str, float]()
        if self.config.calibrate == "likelihood" and isinstance(model.method, Stepwise):
            knob, fitted = self.fit_stop(model)
            scores = self.evaluate(model, self.chosen_on, (knob,))
        else:
            scores = self.evaluate(model, self.chosen_on, self.knobs(model))
            by_count = self.config.calibrate == "count"
            knob = max(scores, key=lambda value: -scores[value]["card_err"] if by_count else scores[value]["clu_f1"])
        found = {**scores[knob], "knob": knob, **fitted}
        if self.chosen_on is not self.reported:
            # Also the paper's protocol, selection on the reported bags, unless the recipe tunes more.
            knobs = (knob,) if calibrate else self.knobs(model)
            scores = self.evaluate(model, self.reported, knobs)
            found.update({f"reported_{name}": value for name, value in scores[knob].items()})
            if not calibrate:
                best = max(scores, key=lambda value: scores[value]["clu_f1"])
                found.update({f"best_{name}": value for name, value in {**scores[best], "knob": best}.items()})
        return found

    def knobs(self, model: SubsetsModel) -> tuple[float, ...]:
        method = model.method
        swept = self.config.calibrate != "none" or isinstance(method, Threshold)
        return method.knobs if swept else (method.knob,)

    @torch.no_grad()
    def fit_stop(self, model: SubsetsModel) -> tuple[float, dict[str, float]]:
        """The threshold on P(stop) at which, once calibrated by temperature and bias, it is ½; and these two.

        Fitted on every prefix of the targets of the bags that choices are made on: the stop is right after the last.
        """
        odds, done = [], []
        for part in self.chosen_on.split(256):
            pot = model.method.potentials(model.encode(part), part.mask)
            found = stop_log_odds(prefix_logits(pot, part.target.unsqueeze(1), Rules(pot)).squeeze(1))  # (B, T+1)
            left = (part.target >= 0).sum(-1, keepdim=True) - torch.arange(found.shape[1], device=found.device)
            odds.append(found[left >= 0])
            done.append(left[left >= 0] == 0)
        temperature, bias = fit_stop(torch.cat(odds), torch.cat(done))
        return 1 / (1 + math.exp(bias * temperature)), {"temperature": temperature, "stop_bias": bias}

    @torch.no_grad()
    def evaluate(self, model: SubsetsModel, bags: Bags, knobs: tuple[float, ...]) -> dict[float, dict[str, float]]:
        """Mean scores over ``bags`` for each knob. The bags are encoded once."""
        knobs = tuple(dict.fromkeys(knobs))
        totals = torch.zeros(len(knobs), len(COLUMNS), dtype=torch.float64, device=bags.mask.device)
        for part in bags.split(1024):
            encoded = model.encode(part)
            for row, picks in enumerate(model.answers(encoded, part, knobs)):
                scores = cluster_scores(picks, part.labels)
                totals[row] += torch.stack([scores[name].sum() for name in COLUMNS])
        means = (totals / len(bags)).tolist()  # read back once, as each read synchronises
        return {knob: dict(zip(COLUMNS, row, strict=True)) for knob, row in zip(knobs, means, strict=True)}

    def report(self, model: SubsetsModel, knob: float | None = None) -> dict[str, float]:
        """Mean scores over the reported bags; of a method that gives probabilities, that of covering all classes."""
        knob = model.method.knob if knob is None else knob
        scores = self.evaluate(model, self.reported, (knob,))[knob]
        return scores | ({"covering": self.covering(model)} if isinstance(model.method, Stepwise) else {})

    @torch.no_grad()
    def covering(self, model: SubsetsModel, samples: int = 8) -> float:
        """The probability of a set that covers all classes of a reported bag, by ``samples`` of each."""
        generator, hits = torch.Generator(self.device).manual_seed(0), 0.0
        for part in self.reported.split(256):
            pot = model.method.potentials(model.encode(part), part.mask)
            for picks in sample(pot, samples, max_len=model.max_len, generator=generator).indices:
                hits += float((cluster_scores(picks, part.labels)["clu_rec"] == 1).sum())
        return hits / samples / len(self.reported)

    def examples(self, batch: int, limit: int) -> list[Bags]:
        """The first reported bags, ``batch`` at a time, up to ``limit`` times."""
        return first_batches(self.reported, batch, limit, "the run's validation_bags")

    def evaluate_kmeans(self, bags: Bags, seed: int = 0) -> dict[str, float]:
        """The reference: k-Means on the frozen features, given the number of classes of each bag."""
        generator = torch.Generator(device=bags.features.device).manual_seed(seed)
        k = (bags.target >= 0).sum(-1)
        picks = kmeans(bags.features, bags.mask, k, generator=generator).indices
        return {name: float(value.mean()) for name, value in cluster_scores(picks, bags.labels).items()}

"""Path prediction: one valid path through a bird's-eye scene, trained on one of its paths at a time."""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from torchcpl.config import TrainConfig, option, override
from torchcpl.decoding import stochastic_beam
from torchcpl.encoders.resnet import IMAGENET_MEAN, IMAGENET_STD
from torchcpl.encoders.transformer import Encoder
from torchcpl.head import KINDS, CPLHead, mlp
from torchcpl.hypotheses import cover
from torchcpl.kernels.streams import side_by_side
from torchcpl.metrics import IMAGE_DIAGONAL, answer_scores, calibration_error, off_road, path_distances, path_scores
from torchcpl.potentials import Potentials, Selection
from torchcpl.selectors import Hungarian, Method, MultiHypothesis, PointerHead, Stepwise, Threshold
from torchcpl.tasks.base import Examples, SelectionModel, first_batches
from torchcpl.tasks.paths.backbones import BACKBONES, build_backbone, position_code
from torchcpl.tasks.paths.maps import load_maps
from torchcpl.tasks.paths.procedural import procedural_map
from torchcpl.tasks.paths.sampling import BACKGROUND, CELL, GRID, MAX_POINTS, PALETTE, SIZE, Ints
from torchcpl.tasks.paths.scenes import (
    MAP,
    Scenes,
    Split,
    apart,
    cells_of,
    flip,
    generate,
    joined,
    load_scenes,
    map_left_out,
    split_scenes,
)
from torchcpl.train import device_of

METHODS = {
    "threshold": "Grid threshold",
    "hungarian": "Hungarian",
    "multi_hypothesis": "Multi-hypothesis",
    "pointer": "Pointer (AR)",
    "cpl": "CPL",
}  # names in the tables, in order
NEAR = 4.0  # px: an answer so near a path stands for it
DRAWN = 64  # paths, to merge into answers
PAIRS = 2**26  # of points, whose distances are held in memory at a time
TEMPERATURES = tuple(round(0.5 + 0.1 * i, 1) for i in range(26))  # of the answers' probabilities, to choose from
COLUMNS = ("min_ade", "min_hd", "off_road", "min_ade_n1", "min_ade_n2", "min_ade_n3", "min_ade_n4plus")
SPLITS = ("index", "geography")


@dataclass(frozen=True, kw_only=True)
class PathsConfig(TrainConfig):
    """The paper's recipe."""

    optimizer: str = option("adamw", "optimiser", choices=("adam", "adamw"))
    lr: float = option(3e-4, "learning rate, at its peak where there is a schedule", low=0.0)
    weight_decay: float = option(1e-4, "weight decay: L2 in adam, decoupled in adamw", low=0.0)

    method: str = option("cpl", "how paths are selected", choices=METHODS)
    source: str = option(
        "procedural", "procedural, a lane map or a folder of them, or a .npz file that `torchcpl scenes` wrote"
    )
    scenes: int = option(6000, "scenes to draw from the maps (a .npz file has its own)", low=2)
    scenes_seed: int = option(0, "seed of the scenes", low=0)
    split: str = option(
        "index", f"which scenes are reported on: index, the last; geography, other areas; {MAP}NAME, a map left out"
    )
    val: float = option(0.2, "part of the scenes that is reported on (index, geography)", low=0.01, high=0.9)
    held_out: float = option(
        0.0, "part of the scenes set aside to choose the checkpoint on (0 = the reported ones)", low=0.0, high=0.5
    )
    extra: str = option(
        "", "further scenes to train on, sources like the other with commas between, drawn as `torchcpl scenes "
        "--varied` does; those that overlap scenes held out or reported on are left out",
    )  # fmt: skip
    flip: bool = option(True, "mirror half of the training scenes")

    weights: str = option("", "ResNet-18 weights to start from, .safetensors or .pth")
    backbone: str = option("resnet18", "network from pixels to cells; patches is a small one", choices=BACKBONES)
    dim: int = option(128, "width of the encoder", low=4)
    layers: int = option(4, "encoder layers", low=0)
    heads: int = option(8, "attention heads", low=1)
    ffn: int = option(512, "width of the feed-forward blocks", low=1)
    dropout: float = option(0.1, "dropout in encoder, decoder and CPL head", low=0.0, high=0.9)
    attention_dropout: float = option(
        0.1, "dropout of the encoder's attention weights; 0 saves a sixth of a training step", low=0.0, high=0.9
    )
    hidden: int = option(128, "width of the CPL head's MLPs", low=1)
    score_hidden: int = option(64, "width of the offset MLP and of the parallel methods' score MLPs", low=1)
    kind: str = option("lowrank", "interaction of the CPL head", choices=KINDS)
    live_stop: bool = option(True, "let the stop of the CPL head depend on the picks")
    decoder_layers: int = option(2, "layers of the pointer's decoder", low=1)
    projection_layers: int = option(1, "layers of the pointer's projections; its authors have 2", low=1, high=2)
    hypotheses: int = option(6, "hypotheses of multi_hypothesis", low=1)
    selection_weight: float = option(10.0, "weight of the selection loss", low=0.0)
    offset_weight: float = option(
        5.0, "weight of the offset loss, L1 in cells (hungarian: 0.1 of squared pixels)", low=0.0
    )
    max_len: int = option(100, "most picks (cpl, pointer)", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.split not in SPLITS and map_left_out(self.split) is None:
            raise ValueError(f"split = {self.split!r}: expected {', '.join(SPLITS)} or {MAP}NAME")
        if self.extra and not all(map(str.strip, self.extra.split(","))):
            raise ValueError(f"extra = {self.extra!r}: expected sources with commas between")


class PathBatch(NamedTuple):
    """Scenes with one path each, the training target."""

    images: Tensor  # (B, 256, 256) uint8 palette indices
    path: Tensor  # (B, T, 2) px, −1 after the end


class Prediction(NamedTuple):
    """Selected cells and the points in them."""

    selection: Selection
    points: Tensor  # (B, T, 2) px; those from ``lengths`` on are padding

    @property
    def lengths(self) -> Tensor:
        """Number of points of each path, (B,)."""
        return self.selection.lengths


class Answers(NamedTuple):
    """Several paths of each scene."""

    points: Tensor  # (B, A, T, 2) px; those from ``lengths`` on are padding
    lengths: Tensor  # (B, A), 0 where there is no answer
    probability: Tensor  # (B, A)


class PathsModel(SelectionModel):
    """Encoder, offsets and method. ``model(batch)`` returns the losses, ``model.select(images)`` the path."""

    def __init__(self, config: PathsConfig) -> None:
        super().__init__()
        colors = torch.from_numpy(PALETTE).float() / 255
        self.colors = nn.Buffer((colors - torch.tensor(IMAGENET_MEAN)) / torch.tensor(IMAGENET_STD))
        self.backbone = build_backbone(config.backbone, config.dim, config.weights)
        channels = self.backbone.channels
        self.project = nn.Identity() if channels == config.dim else nn.Linear(channels, config.dim)
        self.places = nn.Buffer(position_code(GRID, config.dim), persistent=False)
        self.encoder = Encoder(
            config.dim, config.layers, config.heads, config.ffn, config.dropout, norm_first=False,
            attention_dropout=config.attention_dropout,
        )  # fmt: skip
        for layer in self.encoder.layers:
            # Kept in float32 by predictions in bfloat16: 2% slower, but 2 of 1,200 paths change instead of 12.
            layer.ffn.precise = True  # type: ignore[union-attr]
        self.offset = mlp(config.dim, config.score_hidden, 2, "gelu", 0.0)
        cells = torch.arange(GRID * GRID)
        corners = torch.stack([cells % GRID, cells // GRID], -1).float() * CELL
        self.corners = nn.Buffer(corners, persistent=False)  # (N, 2) px
        self.every = nn.Buffer(torch.ones(GRID * GRID, dtype=torch.bool), persistent=False)
        self.method = build_method(config)
        self.matched = config.method == "hungarian"
        self.selection_weight = config.selection_weight
        self.offset_weight = 0.1 if self.matched else config.offset_weight
        self.max_len = config.max_len

    def encode(self, inputs: Tensor) -> Tensor:
        """Palette images (B, 256, 256) to features of the cells (B, N, d)."""
        rgb = nn.functional.embedding(inputs.int(), self.colors).permute(0, 3, 1, 2)  # channels last in memory
        cells = self.backbone(rgb).flatten(2).transpose(1, 2)
        return self.encoder(self.project(cells) + self.places)

    def points(self, features: Tensor) -> Tensor:
        """The point (B, N, 2) in each cell, px."""
        offset = self.offset(features).float()
        # A matched candidate may be in another cell than its target.
        return torch.add(self.corners, offset + 0.5 if self.matched else offset.sigmoid(), alpha=CELL)

    def forward(self, batch: PathBatch) -> dict[str, Tensor]:
        target, features = cells_of(batch.path), self.encode(batch.images)
        mask, points = self.every_cell(features), self.points(features)
        assigned = self.method.assign(features, mask, target, points.detach(), batch.path)
        selection = self.method.loss(features, mask, assigned)
        gap = _gather(points, assigned) - batch.path  # (B, T, 2)
        size = gap.square() if self.matched else gap.abs() / CELL
        real = (assigned >= 0).unsqueeze(-1)
        offset = size.masked_fill(~real, 0).sum() / (2 * real.sum()).clamp(min=1)
        loss = self.selection_weight * selection + self.offset_weight * offset
        return {"loss": loss, "selection": selection, "offset": offset}

    def decode(self, features: Tensor, inputs: Tensor, knob: float | None = None) -> Prediction:
        """The method's path from the encoded cells of the images."""
        potentials = self.method.potentials(features, self.every_cell(features))
        selection, points = side_by_side(
            lambda: self.method.pick(potentials, self.max_len, knob),
            lambda: self.points(features),  # now, when a GPU has little else to do
        )
        return Prediction(selection, _gather(points, selection.indices))

    def answers(self, inputs: Tensor, count: int) -> Answers:
        """Up to ``count`` paths, more than NEAR px apart, each with the probability of what is so near it.

        Half of the DRAWN paths are from the images (B, 256, 256), half from their mirror images.
        """
        half = len(inputs)
        points, lengths, weight = self._drawn(torch.cat([inputs, inputs.flip(-2)]), DRAWN // 2)  # of 2·B images
        points[half:, ..., 1] = SIZE - points[half:, ..., 1]
        points, lengths, weight = (torch.cat(x.chunk(2), 1) for x in (points, lengths, weight))  # (B, K, ...)
        few = max(PAIRS // points[0, ..., 0].numel() ** 2, 1)  # scenes at a time
        pairs = zip(points.split(few), lengths.split(few), strict=True)
        near = torch.cat([path_distances(p, n, p, n) <= NEAR for p, n in pairs])
        near |= torch.eye(near.shape[1], dtype=torch.bool, device=near.device)  # an empty path is near none
        chosen, probability = cover(near, weight / 2, min(count, weight.shape[1]))
        points = points.take_along_dim(chosen[..., None, None], 1)
        lengths = lengths.gather(1, chosen).masked_fill(probability == 0, 0)
        return Answers(points, lengths, probability)

    def _drawn(self, inputs: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Paths with their weights, which add up to 1: points (B, K, T, 2), lengths and weights (B, K)."""
        features = self.encode(inputs)
        mask, points = self.every_cell(features), self.points(features)
        potentials = self.method.potentials(features, mask)
        if isinstance(potentials, Potentials):
            generator = torch.Generator(features.device).manual_seed(0)
            longest = min(self.max_len, MAX_POINTS)
            drawn = stochastic_beam(potentials, count, max_len=longest, min_len=1, generator=generator)
            assert drawn.weight is not None
            indices, weight = drawn.indices.transpose(0, 1), drawn.weight.transpose(0, 1)
        else:
            indices, weight = self.method.answers(features, mask, self.max_len)
        lengths = (indices >= 0).sum(-1)
        indices = indices[..., : max(int(lengths.max()), 1)]
        at = _gather(points, indices.flatten(1)).view(*indices.shape, 2)
        return at, lengths, (weight / weight.sum(-1, keepdim=True).clamp(min=1e-12)).to(at.dtype)

    def every_cell(self, features: Tensor) -> Tensor:
        """The mask (B, N) of the candidates: no cell is padding."""
        return self.every.expand(len(features), -1)


def _gather(table: Tensor, cells: Tensor) -> Tensor:
    """(B, T, d) the rows of ``table`` (B, N, d) at ``cells`` (B, T); those of the first cell where padded."""
    return table.take_along_dim(cells.clamp(min=0).unsqueeze(-1), 1)


def tempered(probability: Tensor, temperature: float) -> Tensor:
    """Probabilities (B, A) raised to 1 / ``temperature``, with the same sum over the answers."""
    raised = probability ** (1 / temperature)
    return raised * (probability.sum(1, keepdim=True) / raised.sum(1, keepdim=True).clamp(min=1e-12))


def build_method(config: PathsConfig) -> Method:
    """The selection method on top of the encoder, with the paper's settings."""
    if config.method == "cpl":
        head = CPLHead(
            config.dim, config.hidden, kind=config.kind, live_stop=config.live_stop, activation="relu",
            dropout=config.dropout,
        )  # fmt: skip
        return Stepwise(head, ordered=True, min_len=1)  # a path begins at the ego
    if config.method == "pointer":
        decoder = PointerHead(
            config.dim, layers=config.decoder_layers, heads=config.heads, ffn=config.ffn, dropout=config.dropout,
            max_len=config.max_len, projection_layers=config.projection_layers,
        )  # fmt: skip
        return Stepwise(decoder, ordered=True, min_len=1)
    parallel: dict[str, Any] = {"dim": config.dim, "hidden": config.score_hidden, "pos_weight": 1.0}
    if config.method == "hungarian":
        return Hungarian(**parallel, distance_weight=0.1, squared=False, exclude_self=False)
    if config.method == "multi_hypothesis":
        # The weight of the selection loss is meant for the hypotheses' cross-entropy; the selector's stays 1.
        selector_weight = 1 / config.selection_weight if config.selection_weight else 0.0
        return MultiHypothesis(**parallel, hypotheses=config.hypotheses, selector_weight=selector_weight)
    return Threshold(**parallel)


def load_source(config: PathsConfig, *, varied: bool = False) -> Scenes:
    """The scenes a configuration names: read from a file, or drawn from maps.

    ``varied`` scenes are of more places, to train on: roads that the ego cannot reach may be cut off in the image,
    every map is driven the other way, too, and the ground of most scenes is warped.
    """
    if config.source.endswith(".npz"):
        return load_scenes(config.source)
    made_up = config.source == "procedural"
    if not made_up and not Path(config.source).exists():
        raise ValueError(
            f"source = {config.source!r}: expected procedural, a lane map, a folder of them, or a .npz of scenes"
        )
    maps = [procedural_map(seed=config.scenes_seed)] if made_up else load_maps(config.source)
    if varied:
        maps = [*maps, *(graph.reversed() for graph in maps)]
    shown = multiprocessing.parent_process() is None  # one process shows its progress
    return generate(maps, config.scenes, config.scenes_seed, progress=shown, varied=varied)


@dataclass(frozen=True, eq=False)
class SceneSet(Examples):
    """Scenes as tensors, in one of the parts of a split."""

    images: Tensor  # (S, 256, 256)
    paths: Tensor  # (S, K, T, 2)
    lengths: Tensor  # (S, K)
    counts: Tensor  # (S,) number of valid paths

    @classmethod
    def of(cls, scenes: Scenes, device: torch.device) -> SceneSet:
        paths = scenes.paths[:, :, : int(scenes.lengths.max(initial=0))]
        return cls(*map(torch.from_numpy, (scenes.images, paths, scenes.lengths, scenes.counts))).to(device)


class PathsTask:
    """The task: a model, batches by step number, and validation."""

    ordered = True  # whether the order of the picks matters
    metric = "min_ade"
    higher_is_better = False

    def __init__(self, config: PathsConfig, scenes: Scenes) -> None:
        self.config = config
        self.device = device_of(config)
        self.scenes = scenes
        self.parts = split_scenes(scenes, config.split, config.val, config.held_out)
        self.reported = SceneSet.of(self.scenes.select(self.parts.val), self.device)
        aside = len(self.parts.held_out) > 0
        self.chosen_on = SceneSet.of(self.scenes.select(self.parts.held_out), self.device) if aside else self.reported
        self.generator = torch.Generator(device=self.device)

    @cached_property
    def train(self) -> SceneSet:
        """The scenes trained on; a task that only reports never reads them."""
        seen = self.scenes.select(self.parts.train)
        if self.config.extra:
            sources = map(str.strip, self.config.extra.split(","))
            more = joined([load_source(override(self.config, source=each), varied=True) for each in sources])
            seen = joined([seen, more.select(unseen(more, self.scenes, self.parts, self.config.split))])
        return SceneSet.of(seen, self.device)

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.train) // self.config.batch_size)

    @property
    def capturable(self) -> bool:
        return self.config.method != "hungarian"  # its assignment is solved on the host

    def build(self) -> PathsModel:
        return PathsModel(self.config)

    def batch(self, step: int) -> PathBatch:
        """The scenes of an epoch in random order, the last batch completed from its beginning."""
        epoch, place = divmod(step, self.steps_per_epoch)
        size, base = self.config.batch_size, self.config.seed * 1_000_003
        self.generator.manual_seed(2 * (base + epoch) + 1)
        order = torch.randperm(len(self.train), generator=self.generator, device=self.device)
        rows = order[torch.arange(place * size, (place + 1) * size, device=self.device) % len(self.train)]
        self.generator.manual_seed(2 * (base + step))
        coins = torch.rand(2, size, generator=self.generator, device=self.device)
        which = (coins[0] * self.train.counts[rows]).long()
        images, path = self.train.images[rows], self.train.paths[rows, which]
        return PathBatch(*flip(images, path, coins[1] < 0.5) if self.config.flip else (images, path))

    def validate(self, model: PathsModel) -> dict[str, float]:
        """The metrics on the selection scenes and, if these are others, on the reported ones."""
        found = self.evaluate(model, self.chosen_on)
        if self.chosen_on is not self.reported:
            reported = self.evaluate(model, self.reported)
            found |= {f"reported_{name}": value for name, value in reported.items()}
        return found

    def report(self, model: PathsModel, knob: float | None = None) -> dict[str, float]:
        """The metrics on the reported scenes."""
        return self.evaluate(model, self.reported)

    def examples(self, batch: int, limit: int) -> list[Tensor]:
        """Images of the first reported scenes, ``batch`` at a time, up to ``limit`` times."""
        return [part.images for part in first_batches(self.reported, batch, limit, "the scenes reported on")]

    def report_answers(self, model: PathsModel, count: int) -> dict[str, float]:
        """What `answer_scores` says of up to ``count`` answers on the reported scenes, and the calibration error.

        Over all scenes, and, named ``…_n2plus``, over those with two or more valid paths. With held-out scenes the
        temperature is the one with the least Brier score there.
        """
        temperature = 1.0
        if self.chosen_on is not self.reported:
            gaps, stated = self._answered(model, self.chosen_on, count)
            counts = self.chosen_on.counts
            brier = [answer_scores(gaps, tempered(stated, t), counts, NEAR)["brier"].mean() for t in TEMPERATURES]
            temperature = TEMPERATURES[int(torch.stack(brier).argmin())]
        gaps, probability = self._answered(model, self.reported, count)
        probability = tempered(probability, temperature)
        each = answer_scores(gaps, probability, self.reported.counts, NEAR)
        each["min_ade"] = each["min_ade"].clamp(max=IMAGE_DIAGONAL)  # no answer at all
        frequency, columns = each.pop("frequency"), {"temperature": temperature}
        for name, rows in {"": self.reported.counts > 0, "_n2plus": self.reported.counts > 1}.items():
            columns |= {f"{key}{name}": float(value[rows].mean()) for key, value in each.items()}
            given = (probability > 0) & rows.unsqueeze(1)
            columns[f"ece{name}"] = float(calibration_error(probability[given], frequency[given]))
        return columns

    @torch.no_grad()
    def _answered(self, model: PathsModel, scenes: SceneSet, count: int) -> tuple[Tensor, Tensor]:
        """Of up to ``count`` answers a scene the distances to its paths (S, A, K), and the probabilities (S, A)."""
        parts = []
        for part in scenes.split(32):
            found = model.answers(part.images, count)
            parts.append((path_distances(found.points, found.lengths, part.paths, part.lengths), found.probability))
        gaps, probability = (torch.cat(each) for each in zip(*parts, strict=True))
        return gaps, probability

    def evaluate(self, model: PathsModel, scenes: SceneSet, size: int = 256) -> dict[str, float]:
        """Means over the scenes; ``min_ade_n…`` over those with that many valid paths, NaN where there are none."""
        each = errors(model, scenes, size)
        strata = scenes.counts.clamp(max=4) == torch.arange(1, 5, device=self.device).unsqueeze(-1)  # (4, S)
        by_count = (strata * each[0]).sum(-1) / strata.sum(-1)
        return dict(zip(COLUMNS, torch.cat([each.mean(-1), by_count]).tolist(), strict=True))


@torch.no_grad()
def errors(model: PathsModel, scenes: SceneSet, size: int = 256) -> Tensor:
    """(3, S) of the selected path of every scene: min-ADE and min-HD in px, and the percentage of it off the road."""
    parts = []
    for part in scenes.split(size):
        selected = model.select(part.images)
        found = selected.points, selected.lengths
        scores = path_scores(*found, part.paths, part.lengths, part.counts)
        off = off_road(*found, part.images != BACKGROUND)
        parts.append(torch.stack([scores["min_ade"], scores["min_hd"], 100 * off]))
    return torch.cat(parts, 1)


def unseen(more: Scenes, scenes: Scenes, parts: Split, split: str) -> Ints:
    """Numbers of the scenes in ``more`` that show nothing held out or reported on; none of a map that is left out."""
    kept = apart(more, scenes.select(np.concatenate([parts.val, parts.held_out])))
    kept = np.compress(np.array(more.maps)[more.map_index[kept]] != (map_left_out(split) or ""), kept)
    if not len(kept):
        raise ValueError(f"extra: each of its {len(more)} scenes overlaps one that is held out or reported on")
    return kept

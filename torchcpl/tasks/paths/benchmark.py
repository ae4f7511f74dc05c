"""The benchmark of the paths task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from torchcpl.checks import check_count, describe
from torchcpl.config import override
from torchcpl.explore import Explorer
from torchcpl.files import stamp, write_atomic
from torchcpl.report import Panel
from torchcpl.tables import Column, Row, Table, summarise
from torchcpl.tasks.benchmark import Benchmark, against_pointer
from torchcpl.tasks.paths import figures
from torchcpl.tasks.paths.maps import load_maps
from torchcpl.tasks.paths.sampling import PALETTE, SIZE, Ints
from torchcpl.tasks.paths.scenes import Scenes, generate, load_scenes, map_left_out, save_scenes, split_scenes
from torchcpl.tasks.paths.task import (
    COLUMNS,
    METHODS,
    NEAR,
    PathsConfig,
    PathsModel,
    PathsTask,
    Prediction,
    load_source,
)
from torchcpl.tasks.runs import Run, common

NUSCENES = {"boston-seaport", "singapore-hollandvillage", "singapore-onenorth", "singapore-queenstown"}
# The paper's tables 1 and 3: nuScenes, one A100, batch 1.
PUBLISHED = [
    dict(zip(("method", *COLUMNS, "ms", "ms_std"), row, strict=True))
    for row in (
        ("Grid threshold", 5.84, 35.76, 0.52, 4.86, 6.48, 9.11, 12.54, 2.80, 0.07),
        ("Hungarian", 8.20, 29.14, 10.91, 5.38, 13.78, 11.63, 13.95, 2.79, None),
        ("Multi-hypothesis", 6.83, 38.63, 0.42, 6.13, 6.96, 9.05, 13.61, 3.15, 0.09),
        ("Pointer (AR)", 2.68, 10.03, 0.80, 2.58, 2.50, 3.90, 3.70, 32.91, 0.14),
        ("CPL", 2.35, 9.92, 0.83, 2.08, 2.25, 4.12, 4.52, 6.07, 0.14),
    )
]


class PathsBenchmark(Benchmark[PathsConfig]):
    summary = "path prediction: one valid path through a road scene from above"
    subject = "Path prediction"
    config = PathsConfig
    names = METHODS
    columns = (
        Column("method", "Method"),
        Column("min_ade", "min-ADE", 2, "min"),
        Column("min_hd", "min-HD", 2, "min"),
        Column("off_road", "Off-road %", 2, "min"),
        Column("ms", "ms", 2, "min"),
        Column("min_ade_n1", "n=1", 2, "min"),
        Column("min_ade_n2", "n=2", 2, "min"),
        Column("min_ade_n3", "n=3", 2, "min"),
        Column("min_ade_n4plus", "n≥4", 2, "min"),
    )
    answer_columns = (
        Column("method", "Method"),
        Column("min_ade", "min-ADE", 2, "min"),
        Column("miss", "Missed", 3, "min", share=True),
        Column("coverage_n2plus", "Coverage, n≥2", 3, "max", share=True),
        Column("stray_n2plus", "Stray, n≥2", 3, "min", share=True),
        Column("brier_n2plus", "Brier, n≥2", 3, "min", share=True),
        Column("ece_n2plus", "ECE, n≥2", 3, "min", share=True),
        Column("coverage", "Coverage", 3, "max", share=True),
        Column("stray", "Stray", 3, "min", share=True),
        Column("brier", "Brier", 3, "min", share=True),
        Column("ece", "ECE", 3, "min", share=True),
    )
    variants: ClassVar = {
        "lowrank": {"kind": "lowrank"},
        "contextual": {"kind": "contextual"},
        "procedural roads too": {"extra": "procedural"},
        "authors' loss weights": {"selection_weight": 1.0, "offset_weight": 40.0},
        "pointer": {"method": "pointer"},
    }
    reported = "reported scenes"
    held_out = "held-out training scenes"
    alike = ("source", "scenes", "scenes_seed", "extra", "split", "val", "held_out", "epochs", "backbone", "weights")
    lead = (
        "Each input is a road scene from above, cut into 32 × 32 cells. The model picks cells, and a point in each, "
        "that make one path from the ego on; any path that the lanes allow is right. Training showed it one valid path "
        "of a scene at a time, never all of them together."
    )
    demo_data = "procedural roads"
    column = "images"

    def make_task(self, config: PathsConfig) -> PathsTask:
        return PathsTask(config, scenes_of(config))

    def table(self, paths: Sequence[str | Path], rules: Sequence[str] = ()) -> Table:
        """For runs that each leave out a map: one section per map."""
        return self._sections(paths, lambda some: super(PathsBenchmark, self).table(some, rules))

    def answers_table(self, paths: Sequence[str | Path], count: int) -> Table:
        """Several answers of each run at its best checkpoint: mean ± std over seeds."""
        check_count("answers", count, 1)
        return self._sections(paths, lambda some: self._answers(list(map(self.read, some)), count))

    def _answers(self, runs: Sequence[Run[PathsConfig]], count: int) -> Table:
        rows = []
        for label, group in self._groups(runs).items():
            found = [restored.task.report_answers(restored.model, count) for restored in map(self.restore, group)]
            seeds = [run.config.seed for run in group]
            rows.append({"method": label, "rule": self.chosen_on(group[0]), **summarise(found), "seeds": seeds})
        config = runs[0].config
        notes = (
            *self.notes(config),
            f"Up to {count} answers a scene, more than {NEAR:g} px apart, each with the probability of what lies "
            f"so near it; min-ADE: the best of them. Missed: scenes where none is within {NEAR:g} px of a valid "
            "path. Coverage: share of the valid paths with an answer so near. Stray: share of the probability on "
            "answers near none. Brier and ECE: the probabilities against a valid path drawn at random.",
            "Of the 64 paths that are merged, half come from the mirror image. Temperature of the probabilities: the "
            "one with the least Brier score on held-out scenes.",
        )
        title = f"Several answers, {self.source(config)}"
        return Table(title, self.answer_columns, rows, (), notes, self._info(runs))

    def _sections(self, paths: Sequence[str | Path], make: Callable[[Sequence[str | Path]], Table]) -> Table:
        """One table of the runs or, where they leave out different maps, one with a section a map."""
        maps: dict[str | None, list[str | Path]] = {}
        for path in paths:
            maps.setdefault(map_left_out(self.read(path).config.split), []).append(path)
        if len(maps) < 2 or None in maps:
            return make(paths)
        tables = {name: make(some) for name, some in maps.items()}
        rows = [{**row, "section": f"{name} left out"} for name, table in tables.items() for row in table.rows]
        first = next(iter(tables.values()))
        notes = [f"{name} left out: {table.notes[0]} {table.notes[1]}" for name, table in tables.items()]
        info = {**first.info, "config": common([self.read(path).config for path in paths])}
        title = first.title.rsplit(", ", 1)[0] + ", one map left out"
        return Table(title, first.columns, rows, (), (*notes, *first.notes[2:]), info)

    def build(self, config: PathsConfig, weights: Mapping[str, Tensor]) -> PathsModel:
        return PathsModel(override(config, weights=""))

    def read_examples(self, model: PathsModel, path: Path, column: str, limit: int | None) -> list[Tensor]:
        """Images of the scenes in a ``.npz``, or of 100 drawn from a lane map or a folder of them."""
        scenes = load_scenes(path) if path.suffix == ".npz" else generate(load_maps(path), limit or 100)
        return list(torch.from_numpy(scenes.images))[:limit]

    def collate(self, model: PathsModel, examples: Sequence[Tensor]) -> Tensor:
        for row, image in enumerate(examples):
            drawn = image.shape == (SIZE, SIZE) and not image.is_floating_point()
            if not drawn or image.min() < 0 or image.max() >= len(PALETTE):
                raise ValueError(f"image {row}: expected ({SIZE}, {SIZE}) palette indices, got {describe(image)}")
        return torch.stack(list(examples)).to(model.colors.device)

    def page(self, model: PathsModel, inputs: Tensor, knob: float | None) -> Explorer:
        return figures.scene_page(model, inputs, knob, "A road scene")

    def answers(self, prediction: Prediction) -> dict[str, Tensor]:
        ended = prediction.selection.indices < 0
        return super().answers(prediction.selection) | {"points": prediction.points.masked_fill(ended[..., None], -1)}

    def source(self, config: PathsConfig) -> str:
        name = config.source if config.source == "procedural" else Path(config.source).name
        left_out = map_left_out(config.split)
        return f"{name}, split by {config.split}" if left_out is None else f"{name}, {left_out} left out"

    def elsewhere(self, config: PathsConfig, source: str) -> PathsConfig:
        """Other maps: those of a split by map need not be among them."""
        other = super().elsewhere(config, source)
        left_out = map_left_out(config.split)
        return other if left_out is None or left_out in scenes_of(other).maps else override(other, split="index")

    def published(self, config: PathsConfig) -> Sequence[Row]:
        """Where the roads are nuScenes' and the scenes split by index, as the paper's are."""
        return PUBLISHED if config.split == "index" and NUSCENES.issuperset(scenes_of(config).maps) else []

    def notes(self, config: PathsConfig) -> list[str]:
        parts = split_scenes(scenes_of(config), config.split, config.val, config.held_out)
        strata = _strata(scenes_of(config).counts[parts.val])
        start = f"{config.backbone}{', pretrained' if config.weights else ''}"
        names = " and ".join(Path(each.strip()).name for each in config.extra.split(","))
        more = f" and of the further ones in {names} that overlap none held out or reported on"
        return [
            f"Pixels of 0.5 m, to the nearest valid path; {len(parts.val)} scenes ({strata} valid paths).",
            f"Trained on one valid path of {len(parts.train)} scenes{more if config.extra else ''} at a time, "
            f"{config.epochs} epochs; backbone: {start}.",
        ]

    def panels(self, runs: Sequence[Run[PathsConfig]], table: Table) -> list[Panel]:
        models = {}
        for method, run in self.first_runs(runs).items():
            task, models[method], _ = self.restore(run)  # a task holds all its scenes: one at a time
        reported = task.scenes.select(task.parts.val)
        shown = reported.select(figures.example_scenes(reported))
        found = [figures.scenes_panel(models, shown)]
        if "cpl" in models:
            found += figures.decoding_panels(models["cpl"], shown) + figures.failures_panels(models["cpl"], reported)
        return [*found, figures.strata_panel(last_rule(table))]

    def explorer(self, run: Run[PathsConfig]) -> Explorer:
        task, model, knob = self.restore(run)
        return figures.scene_explorer(model, task.scenes.select(task.parts.val), knob)

    def findings(self, table: Table) -> list[str]:
        rows = {row["method"]: row for row in last_rule(table)}
        if METHODS["cpl"] not in rows or len(rows) < 2:
            return []
        cpl, columns = rows[METHODS["cpl"]], {column.name: column for column in table.columns}
        score, said = columns["min_ade"], []
        parallel = [rows[name] for method, name in METHODS.items() if method not in figures.ORDERED and name in rows]
        if parallel:
            others = ", ".join(f"{row['method']} {score.cell(row)}" for row in parallel)
            said.append(f"CPL's paths lie {score.cell(cpl)} px from the nearest valid one (min-ADE); {others}.")
            if cpl["min_ade_n2"] is not None:
                two, best = columns["min_ade_n2"], min(parallel, key=lambda row: float(row["min_ade_n2"]))
                said.append(
                    f"Where two paths are valid, CPL is at {two.cell(cpl)} px and the best parallel method, "
                    f"{best['method']}, at {two.cell(best)} px."
                )
        pointer = rows.get(METHODS["pointer"])
        if pointer:
            said.append(against_pointer(pointer, cpl, score))
        said.append(f"{cpl['off_road']:.2f} % of the points that CPL picks lie off the road.")
        return said


@cache
def _scenes(source: PathsConfig, files: object) -> Scenes:
    return load_source(source)


def scenes_of(config: PathsConfig) -> Scenes:
    """The scenes of a configuration, read or drawn once for the same files."""
    source = PathsConfig(source=config.source, scenes=config.scenes, scenes_seed=config.scenes_seed)
    return _scenes(source, stamp(config.source))


def last_rule(table: Table) -> list[Row]:
    """The rows of the last of the table's rules."""
    return [row for row in table.rows if row["rule"] == table.rows[-1]["rule"]]


def make_scenes(
    config: PathsConfig, out: Path | None, show: Path | None, splits: tuple[str, ...], say: Callable[[str], None],
    *, varied: bool = False,
) -> Scenes:  # fmt: skip
    """The scenes of a configuration: counted, split, written to ``out`` and drawn in ``show`` where these are given."""
    for path, suffix in ((out, ".npz"), (show, ".png")):
        if path and path.suffix != suffix:
            raise ValueError(f"{path}: expected a name that ends in {suffix}")
    wanted = [override(config, split=split) for split in splits]  # refused before anything is drawn
    scenes = load_source(config, varied=varied)
    say(f"{len(scenes)} scenes of {', '.join(scenes.maps)}; valid paths: {_strata(scenes.counts)}")
    for each in wanted:
        say(f"Split by {each.split}: {split_scenes(scenes, each.split, each.val, each.held_out)}")
    if out:
        save_scenes(scenes, out)
        say(f"Written to {out}, {out.stat().st_size / 1e6:.1f} MB")
    if show:
        write_atomic(show, figures.sheet(scenes))
        say(f"Contact sheet: {show}")
    if out:
        say(f"Next: torchcpl train paths --{'extra' if varied else 'source'} {out}")
    return scenes


def _strata(counts: Ints) -> str:
    """The numbers of scenes with 1, 2, 3 and more valid paths, as text."""
    shares = np.bincount(np.minimum(counts, 4), minlength=5)[1:].tolist()
    return ", ".join(f"{count} with {n}" for n, count in zip(figures.STRATA.values(), shares, strict=True))

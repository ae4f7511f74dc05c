"""Results of the paths task."""

from __future__ import annotations

import multiprocessing
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from torchcpl.tables import Column
from torchcpl.tasks.benchmark import Benchmark
from torchcpl.tasks.paths.scenes import Scenes
from torchcpl.tasks.paths.task import COLUMNS, PathsConfig, PathsTask, load_source, split_scenes

NAMES = {
    "grid": "Grid threshold",
    "hungarian": "Hungarian",
    "multi_hypothesis": "Multi-hypothesis",
    "pointer": "Pointer (AR)",
    "cpl": "CPL",
}  # in the tables' order
SCORES = (
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


@cache
def _scenes(source: PathsConfig) -> Scenes:
    return load_source(source, progress=multiprocessing.parent_process() is None)  # one process shows it


def make_task(config: PathsConfig) -> PathsTask:
    """The task of a configuration; runs on the same source share its scenes."""
    return PathsTask(config, scenes_of(config))


def scenes_of(config: PathsConfig) -> Scenes:
    """The scenes of a configuration, read or drawn once."""
    return _scenes(PathsConfig(source=config.source, scenes=config.scenes, scenes_seed=config.scenes_seed))


def published(config: PathsConfig) -> list[dict[str, Any]]:
    """The paper's rows where the roads are nuScenes' and the scenes split by index, as the paper's are."""
    theirs = config.split == "index" and NUSCENES.issuperset(scenes_of(config).maps)
    return PUBLISHED if theirs else []


def source_name(config: PathsConfig) -> str:
    name = config.source if config.source == "procedural" else Path(config.source).name
    return f"{name}, split by {config.split}"


def notes(config: PathsConfig) -> list[str]:
    parts = split_scenes(config, scenes_of(config))
    counts = np.bincount(np.minimum(scenes_of(config).counts[parts.val], 4), minlength=5)[1:].tolist()
    strata = ", ".join(f"{count} with {n}" for n, count in zip(("1", "2", "3", "≥ 4"), counts, strict=True))
    start = f"{config.backbone}{', pretrained' if config.weights else ''}"
    return [
        f"Pixels of 0.5 m, to the nearest valid path; {len(parts.val)} scenes ({strata} valid paths).",
        f"Trained on one valid path of {len(parts.train)} scenes at a time, {config.epochs} epochs; backbone: {start}.",
    ]


BENCHMARK = Benchmark(
    subject="Path prediction",
    config=PathsConfig,
    make_task=make_task,
    names=NAMES,
    columns=SCORES,
    metrics=COLUMNS,
    source=source_name,
    reported="reported scenes",
    held_out="held-out training scenes",
    published=published,
    alike=("source", "scenes", "scenes_seed", "split", "val", "dev", "epochs", "backbone", "weights"),
    reference=lambda runs: [],
    notes=notes,
)

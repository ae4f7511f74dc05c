"""Results of the subsets task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from functools import cache, partial
from pathlib import Path
from typing import Any

from torchcpl.selectors import kmeans
from torchcpl.tables import Column, summarise
from torchcpl.tasks.benchmark import TIMED, Benchmark, clock, here
from torchcpl.tasks.runs import Run
from torchcpl.tasks.subsets.data import BagProtocol, Features, load_source
from torchcpl.tasks.subsets.task import COLUMNS, SubsetsConfig, SubsetsTask
from torchcpl.train import device_of

REFERENCE = "k-Means (oracle k)"
NAMES = {"bce": "BCE", "hungarian": "Hungarian", "pointer": "Pointer (AR)", "cpl": "CPL"}  # in the tables' order
SCORES = (
    Column("method", "Method"),
    Column("clu_rec", "CluRec", 3, "max", share=True),
    Column("clu_prec", "CluPrec", 3, "max", share=True),
    Column("clu_f1", "CluF1", 3, "max", share=True),
    Column("card_err", "CardErr", 2, "min"),
    Column("ms", "ms", 2, "min"),
)
PROTOCOL = tuple(f.name for f in fields(BagProtocol))
# The paper's table 2: CIFAR-100, one A100, batch 1.
PUBLISHED = [
    dict(zip(("method", *COLUMNS, "ms", "ms_std"), row, strict=True))
    for row in (
        (REFERENCE, 0.778, 0.778, 0.778, 0.00, None, None),
        ("BCE", 0.992, 0.099, 0.176, 65.69, 1.50, 0.11),
        ("Hungarian", 0.665, 0.592, 0.617, 1.32, 1.30, 0.08),
        ("Pointer (AR)", 0.850, 0.910, 0.875, 0.66, 15.46, 0.22),
        ("CPL", 0.839, 0.879, 0.853, 0.80, 1.71, 0.07),
    )
]


@cache
def _features(source: str, root: str, weights: str, device: str) -> Features:
    return load_source(source, root=root or None, weights=weights or None, device=device)


def make_task(config: SubsetsConfig) -> SubsetsTask:
    """The task of a configuration; runs on the same source share its features."""
    return SubsetsTask(config, _features(config.source, config.root, config.weights, str(device_of(config))))


def published(config: SubsetsConfig) -> list[dict[str, Any]]:
    """The paper's rows where the images are the paper's."""
    return PUBLISHED if "aquarium_fish" in make_task(here(config)).features.class_names else []


def reference(runs: Sequence[Run[SubsetsConfig]]) -> list[dict[str, Any]]:
    """k-Means on the reported bags, which it has in common with every run."""
    task = make_task(here(runs[0].config))
    seeds = sorted({run.config.seed for run in runs})
    columns = summarise([task.evaluate_kmeans(task.reported, seed) for seed in seeds])
    calls = [partial(kmeans, bags.features, bags.mask, (bags.target >= 0).sum(-1)) for bags in task.examples(1, TIMED)]
    mean, deviation = clock(calls)
    return [{"method": REFERENCE, "rule": None, "reference": True, **columns, "ms": mean, "ms_std": deviation}]


def source_name(config: SubsetsConfig) -> str:
    path = Path(config.source)
    return path.parent.name + "/" + path.name if path.suffix == ".npz" else config.source


def notes(config: SubsetsConfig) -> list[str]:
    bags = config.validation_bags
    said = [f"{bags} bags of test images. Trained on one random member of each class, never on the classes."]
    if config.holdout:
        said.append(f"{config.holdout:.0%} of the training images set aside.")
    return said


BENCHMARK = Benchmark(
    subject="Representative subsets",
    config=SubsetsConfig,
    make_task=make_task,
    names=NAMES,
    columns=SCORES,
    metrics=COLUMNS,
    source=source_name,
    reported="reported bags",
    held_out="held-out training bags",
    published=published,
    alike=("source", "holdout", "validation_bags", *PROTOCOL),
    reference=reference,
    notes=notes,
)

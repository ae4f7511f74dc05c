"""The benchmark of the subsets task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchcpl.checks import describe
from torchcpl.config import override
from torchcpl.explore import Explorer
from torchcpl.files import stamp
from torchcpl.report import Panel
from torchcpl.selectors import kmeans
from torchcpl.tables import Column, Row, Table, summarise
from torchcpl.tasks import timing
from torchcpl.tasks.benchmark import Benchmark, against_pointer
from torchcpl.tasks.figures import explorer
from torchcpl.tasks.runs import Run, here
from torchcpl.tasks.subsets import figures
from torchcpl.tasks.subsets.bags import BagProtocol, Bags, unlabelled
from torchcpl.tasks.subsets.data import Features, load_source, read_bags
from torchcpl.tasks.subsets.task import COLUMNS, METHODS, REFERENCE, SubsetsConfig, SubsetsModel, SubsetsTask
from torchcpl.train import device_of

CLUSTER_COLUMNS = (
    Column("method", "Method"),
    Column("clu_rec", "CluRec", 3, "max", share=True),
    Column("clu_prec", "CluPrec", 3, "max", share=True),
    Column("clu_f1", "CluF1", 3, "max", share=True),
    Column("card_err", "CardErr", 2, "min"),
    Column("ms", "ms", 2, "min"),
)
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
def _features(source: str, root: str, weights: str, device: str, files: object) -> Features:
    return load_source(source, root=root, weights=weights, device=device)


class SubsetsBenchmark(Benchmark[SubsetsConfig]):
    summary = "representative subsets: one member of every class in a bag"
    subject = "Representative subsets"
    config = SubsetsConfig
    names = METHODS
    columns = CLUSTER_COLUMNS
    reported = "reported bags"
    held_out = "held-out training bags"
    alike = ("source", "split", "split_seed", "held_out", "validation_bags", *(f.name for f in fields(BagProtocol)))
    lead = (
        "Each input is a bag of items of several classes. The model sees the items alone and picks a subset; it is "
        "right when every class is picked exactly once. It was trained on one random member of each class, never on "
        "the classes."
    )
    demo_data = "scikit-learn's digits"
    demo_seeds = (0, 1, 2)
    variants: ClassVar = {
        "lowrank": {"kind": "lowrank"},
        "contextual": {"kind": "contextual"},
        "coverage": {"kind": "coverage"},
        "recent": {"kind": "recent"},
        "stop knows the picks": {"live_stop": True},
        "distances too": {"kind": "coverage", "distances": "also"},
        "distances only": {"kind": "coverage", "distances": "only"},
        "stop by threshold": {"early_stop_weight": 0.0, "stop_rule": "threshold", "calibrate": "f1"},
        "pointer": {"method": "pointer"},
        "pointer, distances too": {"method": "pointer", "distances": "also"},
    }

    def features(self, config: SubsetsConfig) -> Features:
        """The features of a configuration, read once for the same files."""
        images = Path(config.source).parent / "test_images.npz"
        files = stamp(config.source, images, *filter(None, [config.weights]))
        return _features(config.source, config.root, config.weights, str(device_of(config)), files)

    def make_task(self, config: SubsetsConfig) -> SubsetsTask:
        return SubsetsTask(config, self.features(config))

    def build(self, config: SubsetsConfig, weights: Mapping[str, Tensor]) -> SubsetsModel:
        return SubsetsModel(config, torch.zeros(2, weights["shift"].numel() if "shift" in weights else 1))

    def read_examples(self, model: Any, path: Path, column: str, limit: int | None) -> list[Tensor]:
        return read_bags(path, column)[:limit]

    def collate(self, model: SubsetsModel, examples: Sequence[Tensor]) -> Bags:
        for row, items in enumerate(examples):
            if items.dim() != 2 or items.shape[1] != len(model.shift) or not len(items):
                raise ValueError(
                    f"bag {row}: expected at least one item of width {len(model.shift)}, got {describe(items)}"
                )
            if not items.isfinite().all():
                raise ValueError(f"bag {row}: expected finite features, got NaN or infinity")
        return unlabelled(examples, model.shift.device)

    def page(self, model: SubsetsModel, inputs: Bags, knob: float | None) -> Explorer:
        title = f"A bag of {int(inputs.mask.sum())} items"
        return explorer(model.method, model.encode(inputs), inputs.mask, model.max_len, knob, title=title)

    def source(self, config: SubsetsConfig) -> str:
        path = Path(config.source)
        return str(Path(*path.parts[-2:])) if path.suffix == ".npz" else config.source

    def published(self, config: SubsetsConfig) -> Sequence[Row]:
        cifar = "aquarium_fish" in self.features(here(config)).class_names
        return PUBLISHED if cifar and config.split == "items" else []

    def suffix(self, config: SubsetsConfig) -> str:
        return {"none": "", "also": " + distances", "only": ", distances only"}[config.distances]

    def elsewhere(self, config: SubsetsConfig, source: str) -> SubsetsConfig:
        return override(super().elsewhere(config, source), split="items")  # all classes there are new to the model

    def reference(self, runs: Sequence[Run[SubsetsConfig]]) -> list[dict[str, Any]]:
        """k-Means on the reported bags, which it has in common with every run."""
        task = self.make_task(here(runs[0].config))
        seeds = sorted({run.config.seed for run in runs})
        columns = summarise([task.evaluate_kmeans(task.reported, seed) for seed in seeds])
        bags = task.examples(1, timing.TIMED)
        times = timing.clock([partial(kmeans, b.features, b.mask, (b.target >= 0).sum(-1)) for b in bags])
        return [{"method": REFERENCE, "rule": None, "reference": True, **columns, **times}]

    def notes(self, config: SubsetsConfig) -> list[str]:
        bags = config.validation_bags
        said = [f"{bags} bags of test items. Trained on one random member of each class, never on the classes."]
        if config.split == "classes":
            task = self.make_task(here(config))
            seen, unseen = (len(labels.unique()) for labels in (task.sampler.labels, task.features.test_labels))
            said.append(f"Reported on {unseen} classes that training never sees; {seen} are trained on.")
        if config.held_out:
            said.append(f"{config.held_out:.0%} of the training {config.split} set aside.")
        return said

    def remarks(self, scores: Row) -> list[str]:
        if "covering" not in scores:
            return []
        return [f"Probability of a set that covers all classes: {scores['covering']:.3f}."]

    def panels(self, runs: Sequence[Run[SubsetsConfig]], table: Table) -> list[Panel]:
        restored = {method: self.restore(run) for method, run in self.first_runs(runs).items()}
        found = figures.bag_panels(*restored["cpl"]) if "cpl" in restored else []
        stepwise = {METHODS[method]: restored[method] for method in ("pointer", "cpl") if method in restored}
        if stepwise:
            found.append(figures.reliability_panel(stepwise))
        reference = next((row for row in table.rows if row["method"] == REFERENCE), None)
        return [*found, figures.trade_panel(restored, reference)]

    def explorer(self, run: Run[SubsetsConfig]) -> Explorer:
        return figures.bag_explorer(*self.restore(run))

    def findings(self, table: Table) -> list[str]:
        rows = {row["method"]: row for row in table.rows}  # of several rules, the last
        if METHODS["cpl"] not in rows or len(rows) < 2:
            return []
        cpl, score = rows[METHODS["cpl"]], self.score("clu_f1")
        parallel = [rows[name] for name in (REFERENCE, METHODS["threshold"], METHODS["hungarian"]) if name in rows]
        others = ", ".join(f"{row['method']} {score.cell(row)}" for row in parallel)
        said = [f"CPL reaches a CluF1 of {score.cell(cpl)}; {others}."]
        if METHODS["pointer"] in rows:
            said.append(against_pointer(rows[METHODS["pointer"]], cpl, score))
        count = f"{cpl['card_err']:.2f}"
        said.append(f"CPL's number of picks is off by {count} on average; it is not told how many classes there are.")
        return said

"""The benchmark of the piles task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from torchcpl.checks import describe
from torchcpl.encoders.distances import distances
from torchcpl.tasks.benchmark import Benchmark
from torchcpl.tasks.piles.data import Bags
from torchcpl.tasks.piles.task import METHODS, PilesConfig, PilesModel, PilesTask
from torchcpl.tasks.subsets.benchmark import CLUSTER_COLUMNS
from torchcpl.tasks.subsets.data import read_bags


class PilesBenchmark(Benchmark[PilesConfig]):
    summary = "piles: a selector for vectors of kinds and classes it never saw"
    subject = "Representatives of unseen piles"
    config = PilesConfig
    names = METHODS
    columns = CLUSTER_COLUMNS
    reported = "unseen classes and sets"
    held_out = "new items of the classes trained on"
    alike = ("source", "leave_out", "validation_bags")
    lead = (
        "Each input is the matrix of distances between the items of a bag. The model picks a subset; it is right when "
        "every class is picked exactly once. Classes and sets in the tables were not trained on."
    )
    demo_data = "made-up mixtures, tested on scikit-learn's digits"

    def make_task(self, config: PilesConfig) -> PilesTask:
        return PilesTask(config)

    def build(self, config: PilesConfig, weights: Mapping[str, Tensor]) -> PilesModel:
        return PilesModel(config)

    def read_examples(self, model: PilesModel, path: Path, column: str, limit: int | None) -> list[Tensor]:
        return read_bags(path, column)[:limit]

    def collate(self, model: PilesModel, examples: Sequence[Tensor]) -> Bags:
        """Bags (N, D) of vectors, each of any width."""
        for row, items in enumerate(examples):
            if items.dim() != 2 or 0 in items.shape or not items.isfinite().all():
                raise ValueError(f"bag {row}: expected (N, D) finite numbers, got {describe(items)}")
        labels = pad_sequence([items.new_zeros(len(items)).long() for items in examples], True, -1)
        d = distances(examples[0].new_zeros(*labels.shape, 1))
        for row, items in zip(d, examples, strict=True):
            row[: len(items), : len(items)] = distances(items)
        return Bags(d, labels).to(next(model.parameters()).device)

    def source(self, config: PilesConfig) -> str:
        return Path(config.source).name or "made-up mixtures"

    def notes(self, config: PilesConfig) -> list[str]:
        left = f" Left out of training: {', '.join(config.leave_out)}." if config.leave_out else ""
        return [f"{config.validation_bags} bags a set, scores averaged over the sets.{left}"]

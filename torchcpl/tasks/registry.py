"""The tasks, by name; the command line offers those listed here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torchcpl.checkpoints import read_state
from torchcpl.tasks.baskets.benchmark import BasketsBenchmark
from torchcpl.tasks.benchmark import Benchmark
from torchcpl.tasks.paths.benchmark import PathsBenchmark
from torchcpl.tasks.piles.benchmark import PilesBenchmark
from torchcpl.tasks.subsets.benchmark import SubsetsBenchmark

TASKS: dict[str, Benchmark[Any]] = {
    "subsets": SubsetsBenchmark(),
    "paths": PathsBenchmark(),
    "baskets": BasketsBenchmark(),
    "piles": PilesBenchmark(),
}


def benchmark_of(run: str | Path) -> Benchmark[Any]:
    """The benchmark of a run's task."""
    kind = read_state(run)[1]["config"]
    for benchmark in TASKS.values():
        if benchmark.config.__name__ == kind:
            return benchmark
    raise ValueError(f"{run} was trained with {kind}: expected a run of {', '.join(TASKS)}")

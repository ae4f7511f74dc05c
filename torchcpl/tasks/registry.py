"""The tasks there are. A new one is added here, and the command line has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torchcpl.checkpoints import read_state
from torchcpl.tasks.baskets.benchmark import BasketsBenchmark
from torchcpl.tasks.benchmark import Benchmark
from torchcpl.tasks.paths.benchmark import PathsBenchmark
from torchcpl.tasks.subsets.benchmark import SubsetsBenchmark

TASKS: dict[str, Benchmark[Any]] = {
    "subsets": SubsetsBenchmark(),
    "paths": PathsBenchmark(),
    "baskets": BasketsBenchmark(),
}


def benchmark_of(run: str | Path) -> Benchmark[Any]:
    """The benchmark of the task that a run was trained on."""
    kind = read_state(run)[1]["config"]
    for benchmark in TASKS.values():
        if benchmark.config.__name__ == kind:
            return benchmark
    raise ValueError(f"{run} was trained with {kind}: expected a run of {', '.join(TASKS)}")

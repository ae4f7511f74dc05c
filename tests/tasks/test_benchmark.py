"""A task of its own in fifty lines: what `Benchmark` asks for is all that the tables, times and report need."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchcpl as cpl
from torchcpl.config import TrainConfig, option, override
from torchcpl.selectors import Stepwise, Threshold
from torchcpl.tables import Column
from torchcpl.tasks.base import BenchmarkTask, SelectionModel
from torchcpl.tasks.benchmark import Benchmark
from torchcpl.tasks.registry import TASKS
from torchcpl.train import device_of, fit

METHODS = {"threshold": "Threshold", "cpl": "CPL"}


@dataclass(frozen=True, kw_only=True)
class LargestConfig(TrainConfig):
    method: str = option("cpl", "how items are selected", choices=METHODS)
    kind: str = option("lowrank", "interaction of the CPL head")
    items: int = option(6, "items in a row", low=2)


class LargestModel(SelectionModel):
    """Picks the items of a row that are largest; the features are the items."""

    def __init__(self, config: LargestConfig) -> None:
        super().__init__()
        head = cpl.CPLHead(4, 8, kind=config.kind)
        self.method = Stepwise(head, ordered=False) if config.method == "cpl" else Threshold(4, 8)

    def encode(self, inputs: Tensor) -> Tensor:
        return torch.cat([inputs, inputs.square(), inputs.relu(), torch.ones_like(inputs)], -1)

    def decode(self, features: Tensor, inputs: Tensor, knob: float | None = None) -> cpl.Selection:
        return self.method.select(features, torch.ones(inputs.shape[:2], dtype=torch.bool), 3, knob)

    def forward(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        x, target = batch
        return {"loss": self.method.loss(self.encode(x), torch.ones(x.shape[:2], dtype=torch.bool), target)}


class LargestTask:
    ordered, metric, higher_is_better, steps_per_epoch, capturable = False, "share", True, 2, False

    def __init__(self, config: LargestConfig) -> None:
        self.config, self.device = config, device_of(config)
        self.reported = self.batch(-1)[0]

    def build(self) -> LargestModel:
        return LargestModel(self.config)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.config.seed * 1000 + step + 1)
        x = torch.randn(8, self.config.items, 1, generator=generator)
        return x, x.squeeze(-1).topk(2).indices

    def report(self, model: Any, knob: float | None = None) -> dict[str, float]:
        picked = model.select(self.reported, knob).mask()
        wanted = torch.zeros_like(picked).scatter(1, self.batch(-1)[1], True)
        return {"share": float((picked == wanted).float().mean())}

    def validate(self, model: nn.Module) -> dict[str, float]:
        return self.report(model)

    def examples(self, batch: int, limit: int) -> list[Tensor]:
        return list(self.reported.split(batch))[:limit]


class LargestBenchmark(Benchmark[LargestConfig]):
    summary = subject = "Largest items"
    config = LargestConfig
    names = METHODS
    columns = (Column("method", "Method"), Column("share", "Share", 3, "max"), Column("ms", "ms", 2, "min"))
    reported, held_out, alike, lead, demo_data = "reported rows", "held-out rows", ("items",), "Rows.", "noise"

    def make_task(self, config: LargestConfig) -> BenchmarkTask:
        return LargestTask(config)

    def source(self, config: LargestConfig) -> str:
        return f"{config.items} items"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder, base = tmp_path_factory.mktemp("runs"), LargestConfig(epochs=2, batch_size=8, device="cpu")
    paths = []
    for method in METHODS:
        paths.append(folder / method)
        fit(LargestTask(override(base, method=method)), paths[-1], progress=False)
    return paths


@pytest.mark.parametrize("name", TASKS)
def test_runs_of_every_task_can_be_evaluated_on_other_data(name: str) -> None:
    benchmark = TASKS[name]
    assert benchmark.elsewhere(benchmark.config(), "elsewhere").source == "elsewhere"


def test_a_task_of_its_own_has_a_table_times_and_a_report(runs: list[Path], tmp_path: Path) -> None:
    benchmark = LargestBenchmark()
    table = benchmark.table(runs)
    assert [row["method"] for row in table.rows] == ["Threshold", "CPL"]
    assert table.title == "Largest items, 6 items"
    assert benchmark.metrics == ("share",)
    evaluated = benchmark.evaluate(runs[1])
    assert evaluated.rows[0]["share"] == pytest.approx(table.rows[1]["share"])
    timed = benchmark.bench(runs, batches=(1, 4), repeats=1, examples=2)
    assert [(row["method"], row["batch"]) for row in timed.rows] == [
        ("Threshold", 1), ("CPL", 1), ("Threshold", 4), ("CPL", 4)
    ]  # fmt: skip
    page = benchmark.report(runs, tmp_path, table).read_text(encoding="utf-8")
    assert 'id="convergence"' in page
    assert benchmark.package == Path(__file__).parent

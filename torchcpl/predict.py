"""Apply a trained run to new data, in this process or distributed by Ray or Spark."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from torchcpl.checkpoints import read_state
from torchcpl.checks import check_choice, check_count, describe
from torchcpl.config import TrainConfig, from_toml, override
from torchcpl.explore import Explorer
from torchcpl.files import csv_text, extra, read_parquet, track, write_atomic, write_json
from torchcpl.provenance import run_info
from torchcpl.tasks.benchmark import Benchmark
from torchcpl.tasks.registry import benchmark_of

ENGINES = ("local", "ray")
PARQUET = ".parquet"


class Loaded(NamedTuple):
    """A run's best checkpoint, loaded."""

    benchmark: Benchmark[Any]
    config: TrainConfig
    model: Any  # a `SelectionModel`
    knob: float | None


class Predictor:
    """A trained run as a function.

    ``select(x)`` is for one process. ``predictor(batch)`` maps a dict of arrays to a dict of arrays, one row per
    example, as Ray Data's ``map_batches(Predictor, fn_constructor_kwargs={"run": …})`` and Spark's
    ``predict_batch_udf(lambda: Predictor(…), …)`` expect. Only the name of the run's folder is pickled; the model is
    loaded on first use, on CUDA if available.

    Args:
        run: folder of the run.
        column: name of the examples in a batch (default: the task's, ``features`` or ``images``).
        group: the rows of a batch are items, which agree in this column and together are one example.
        device: ``auto``, ``cpu`` or ``cuda``.
    """

    def __init__(self, run: str | Path, *, column: str = "", group: str = "", device: str = "auto") -> None:
        for name, value in (("column", column), ("group", group)):
            if not isinstance(value, str):
                raise ValueError(f"{name}: expected a name, got {describe(value)}")
        if not isinstance(run, str | Path):
            raise ValueError(f"run: expected the folder of a run, got {describe(run)}")
        check_choice("device", device, ("auto", "cpu", "cuda"))
        self.run, self.column, self.group, self.device = str(run), column, group, device

    def __getstate__(self) -> dict[str, str]:
        return {name: getattr(self, name) for name in ("run", "column", "group", "device")}

    def __repr__(self) -> str:
        return f"Predictor({self.run!r})"

    @cached_property
    def loaded(self) -> Loaded:
        """The task, configuration and network of the run, loaded on first use."""
        benchmark = benchmark_of(self.run)
        path, _ = read_state(self.run)
        config = override(from_toml(benchmark.config, path), device=self.device)
        return Loaded(benchmark, config, *benchmark.load(Path(self.run), config))

    @property
    def model(self) -> Any:
        """The network, with ``encode``, ``decode`` and ``select`` for the task's own inputs."""
        return self.loaded.model

    @torch.no_grad()
    def select(self, x: Any) -> Any:
        """Select from one example, a batch, or a sequence of examples of different sizes.

        An example of the subsets task is the (N, d) features of a bag, of the paths task a palette image (256, 256).
        Returns a `Selection` with one row per example, or the task's own type that contains one.
        """
        benchmark, _, model, knob = self.loaded
        return model.select(benchmark.collate(model, examples_of(x, benchmark.rank)), knob)

    def __call__(self, batch: Mapping[str, NDArray[Any]] | Sequence[Any] | NDArray[Any]) -> dict[str, NDArray[Any]]:
        """``indices`` (B, T), −1 after the end, ``lengths``, ``log_prob``, …, and the batch's other columns."""
        benchmark, config, *_ = self.loaded
        column = self.column or benchmark.column
        columns = batch if isinstance(batch, Mapping) else {column: batch}
        for name in filter(None, (column, self.group)):
            if name not in columns:
                raise ValueError(f"batch: expected a column {name}, got {', '.join(columns)}")
        cells, kept = columns[column], {name: np.asarray(value) for name, value in columns.items() if name != column}
        first = np.asarray(cells[0]) if len(cells) else np.empty(0, object)
        if self.group:
            cells, kept = [np.stack(list(cells))], {self.group: kept[self.group][:1]}
        elif first.ndim < benchmark.rank and first.dtype != object:  # object: nested lists
            raise ValueError(f"column {column}: expected one example per row, got an item; group them by --group")
        answers = benchmark.answers(self.select(list(cells)))
        width = getattr(config, "max_len", 0)  # padded alike in every batch
        return kept | {name: _padded(value, width) for name, value in answers.items()}


def load(run: str | Path, *, device: str = "auto") -> Predictor:
    """A trained run: ``load("runs/subsets-cpl-s0").select(x)``. Its training data is not needed."""
    predictor = Predictor(run, device=device)
    _ = predictor.loaded
    return predictor


def examples_of(x: Any, rank: int) -> list[Tensor]:
    """A single example of ``rank`` dimensions, a batch, or a sequence of examples, as a list of tensors."""
    if isinstance(x, Tensor | np.ndarray) and x.dtype != object:
        if x.ndim not in (rank, rank + 1):
            raise ValueError(f"x: expected {rank} dimensions, or {rank + 1} for a batch, got shape {tuple(x.shape)}")
        x = [x] if x.ndim == rank else x
    if not isinstance(x, Tensor | np.ndarray | list | tuple):
        raise ValueError(f"x: expected an array, a tensor or a sequence of them, got {describe(x)}")
    found = [_tensor(example, row) for row, example in enumerate(x)]
    if not found:
        raise ValueError("x: expected at least one example, got none")
    return found


def _tensor(example: Any, row: int) -> Tensor:
    """An example as a float32 or integer tensor; Arrow's nested lists come as arrays of arrays."""
    if not isinstance(example, Tensor):
        try:
            array = np.asarray(example)
            array = np.stack(list(array)) if array.dtype == object and array.ndim else array
            example = torch.from_numpy(array.copy())  # Arrow's memory is read-only
        except (TypeError, ValueError):
            raise ValueError(f"example {row}: expected numbers, in rows of equal length") from None
    if example.is_complex() or example.dtype == torch.bool:
        raise ValueError(f"example {row}: expected numbers, got {describe(example)}")
    return example.detach().float() if example.is_floating_point() else example.detach()


def _padded(values: Tensor, width: int) -> NDArray[Any]:
    """As an array; picks (B, T, ...) are padded to ``width``."""
    if values.dim() > 1 and values.shape[1] < width:
        fill = 0.0 if values.dim() == 2 and values.is_floating_point() else -1  # step_log_prob is 0 after the end
        values = pad(values, [0, 0] * (values.dim() - 2) + [0, width - values.shape[1]], value=fill)
    return values.cpu().numpy()


# ------------------------------------------------------------------------------------------------------------- files


def predict_file(
    predictor: Predictor, path: Path, out: Path | None, *, batch_size: int = 64, limit: int | None = None,
    engine: str = "local", workers: int = 2,
) -> list[dict[str, Any]]:  # fmt: skip
    """The selections of a run from every example of a file, as records; written to ``out``, ``.json`` or ``.csv``.

    Parquet, a file or a folder, has one example per row in the predictor's column; ``engine="ray"`` reads and predicts
    it with ``workers`` actors.
    """
    check_count("batch_size", batch_size, 1)
    check_count("workers", workers, 1)
    check_count("limit", limit, 1, optional=True)
    if out and out.suffix not in (".json", ".csv"):
        raise ValueError(f"{out}: expected a name that ends in .json or .csv")
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file")
    stored = path.suffix == PARQUET or (path.is_dir() and any(path.glob(f"*{PARQUET}")))
    if not stored and (engine == "ray" or predictor.group):
        raise ValueError(f"{path}: expected Parquet for {'the engine ray' if engine == 'ray' else '--group'}")
    if engine == "ray":
        batches = _ray(predictor, path, batch_size, workers)
    else:
        _ = predictor.loaded  # whose errors name the run, those that follow the file
        batches = _arrow(predictor, path, batch_size) if stored else _read(predictor, path, batch_size, limit)
    try:
        records = [record for batch in batches for record in _records(batch)]
    except ValueError as error:
        named = str(error).startswith((f"{path}:", f"{path}{os.sep}"))
        raise ValueError(str(error) if named else f"{path}: {error}") from error
    if not records:
        raise ValueError(f"{path}: expected at least one example, got none")
    records = [{"row": row, **record} for row, record in enumerate(records[:limit])]
    if out and out.suffix == ".json":
        write_json(out, {"run": predictor.run, "file": str(path), **run_info(), "picks": records})
    elif out:
        write_atomic(out, _csv(records).encode())
    return records


@torch.no_grad()
def explore_file(predictor: Predictor, path: Path) -> Explorer:
    """A page to explore the first example of a file."""
    benchmark, _, model, knob = predictor.loaded
    examples = benchmark.read_examples(model, path, predictor.column or benchmark.column, 1)
    found = benchmark.page(model, benchmark.collate(model, examples_of(examples, benchmark.rank)), knob)
    if found is None:
        raise ValueError(f"explore: {benchmark.subject.lower()} has no page to explore")
    return found


def _read(predictor: Predictor, path: Path, size: int, limit: int | None) -> Iterator[dict[str, NDArray[Any]]]:
    benchmark, _, model, _ = predictor.loaded
    examples = benchmark.read_examples(model, path, predictor.column or benchmark.column, limit)
    for start in track(range(0, len(examples), size), "predicting"):
        yield predictor(examples[start : start + size])


def _arrow(predictor: Predictor, path: Path, size: int) -> Iterator[dict[str, NDArray[Any]]]:
    table = read_parquet(path)
    columns = {name: table[name].to_numpy() for name in table.column_names}
    if predictor.group:
        if predictor.group not in columns:
            raise ValueError(f"{path}: expected a column {predictor.group}, got {', '.join(columns)}")
        if nulls := table[predictor.group].null_count:
            raise ValueError(f"{path}: {predictor.group}: expected a value in every row, got {nulls} nulls")
        groups = columns[predictor.group]
        parts: Iterable[Any] = (np.flatnonzero(groups == value) for value in np.unique(groups))
    else:
        parts = (slice(start, start + size) for start in range(0, table.num_rows, size))
    for part in parts:
        yield predictor({name: values[part] for name, values in columns.items()})


def _ray(predictor: Predictor, path: Path, size: int, workers: int) -> Iterator[dict[str, NDArray[Any]]]:
    with extra("ray"):
        import ray
        import ray.data
    if not ray.is_initialized():
        ray.init(log_to_driver=False, include_dashboard=False, logging_level="ERROR")
        logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order, context.enable_progress_bars = True, False
    pool = ray.data.ActorPoolStrategy(size=workers)
    settings: dict[str, Any] = {"fn_constructor_kwargs": predictor.__getstate__(), "compute": pool}
    # Leave a CPU for reading the file: workers on all of them would deadlock.
    settings["num_cpus"] = min(1.0, max(ray.cluster_resources()["CPU"] - 1, 0.5) / workers)
    data = ray.data.read_parquet(str(path.absolute()))
    kind = type(predictor)
    if predictor.group:
        data = data.groupby(predictor.group).map_groups(kind, batch_format="numpy", **settings)
    else:
        data = data.repartition(target_num_rows_per_block=size)  # work for every worker
        data = data.map_batches(kind, batch_size=size, **settings)
    yield from data.iter_batches(batch_size=size, batch_format="numpy")


def _records(batch: Mapping[str, NDArray[Any]]) -> Iterator[dict[str, Any]]:
    """The rows of a batch, without padding."""
    for row, length in enumerate(batch["lengths"].tolist()):
        cells = {name: values[row] for name, values in batch.items() if name not in ("indices", "lengths")}
        record = {name: cell.tolist() if hasattr(cell, "tolist") else cell for name, cell in cells.items()}
        for name in {"step_log_prob", "points"} & record.keys():
            record[name] = record[name][:length]
        yield {"picks": batch["indices"][row, :length].tolist(), **record}


def _csv(records: Sequence[Mapping[str, Any]]) -> str:
    """A line for every pick: the example, the step, the index, its log-probability, its point."""
    steps, points = ("step_log_prob" in records[0], "points" in records[0])
    rows = [
        [record["row"], step, index]
        + ([record["step_log_prob"][step]] if steps else [])
        + (record["points"][step] if points else [])
        for record in records
        for step, index in enumerate(record["picks"])
    ]
    return csv_text(["row", "step", "index"] + ["log_prob"] * steps + ["x", "y"] * points, rows)

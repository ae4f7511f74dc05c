"""Runs of a task: recipes, planning the runs of a comparison, training the missing ones, reading them back."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from torchcpl.checkpoints import CheckpointError, open_run, read_history, read_state
from torchcpl.checks import check_count
from torchcpl.config import TrainConfig, from_toml, override
from torchcpl.files import extra
from torchcpl.train import Task, fit

C = TypeVar("C", bound=TrainConfig)


def recipes(package: Path) -> dict[str, Path]:
    """The TOML files a task ships, by name."""
    return {path.stem: path for path in sorted(package.glob("recipes/*.toml"))}


def read_recipe(cls: type[C], package: Path, name: str) -> C:
    """The configuration that a shipped recipe names."""
    found = recipes(package)
    if name not in found:
        raise ValueError(f"recipe = {name!r}: expected one of {', '.join(found)}")
    return from_toml(cls, found[name])


@dataclass(frozen=True)
class Run(Generic[C]):
    """A run as read from its folder: configuration, a record of every validation, state of the best checkpoint."""

    path: Path
    config: C
    history: list[dict[str, Any]]
    state: dict[str, Any]

    @property
    def method(self) -> str:
        return self.config.method  # type: ignore[attr-defined]

    @property
    def kind(self) -> str:
        return self.config.kind  # type: ignore[attr-defined]


def read_run(cls: type[C], path: str | Path, metrics: Sequence[str] = ()) -> Run[C]:
    """A run of the task with configuration class ``cls``; CheckpointError unless every record has ``metrics``."""
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such run")
    config, state = read_state(path)
    if state["config"] != cls.__name__:
        raise CheckpointError(f"{path} is a run with {state['config']}: expected {cls.__name__}")
    history = read_history(path)
    if not history:
        raise CheckpointError(f"{path / 'history.jsonl'}: expected a record of every validation, got none")
    if not state["best"]:
        raise CheckpointError(f"{path / 'best' / 'state.json'}: best: expected that of a validation, got null")
    names = {state["metric"], *metrics, *history[0]["metrics"]}
    for where, records in (("best/state.json", [state["best"]]), ("history.jsonl", history)):
        lacking = sorted(name for record in records for name in names if name not in record["metrics"])
        if lacking or (metrics and state["metric"] not in metrics):
            raise CheckpointError(f"{path / where}: expected the metric {(lacking or metrics)[0]} in every record")
    return Run(path, from_toml(cls, config), history, state)


def here(config: C) -> C:
    """The configuration of a run for this machine, which may have no CUDA."""
    return override(config, device="auto") if config.device == "cuda" else config


def plan(base: C, methods: Iterable[str], seeds: Iterable[int], folder: str | Path) -> dict[Path, C]:
    """The folder and configuration of the run of every method and seed."""
    pairs = [(method, seed) for method in methods for seed in seeds]
    return {Path(folder) / f"{method}-s{seed}": override(base, method=method, seed=seed) for method, seed in pairs}


def complete(planned: dict[Path, C], make: Callable[[C], Task], *, train: bool, jobs: int = 1) -> None:
    """Train the planned runs that are missing, and resume those that were interrupted.

    Without ``train`` a missing run is an error; a run with another configuration always is. With ``jobs`` > 1 that many
    processes train in parallel, with one thread each, as small models gain nothing from more.
    """
    check_count("jobs", jobs, 1)
    states = {path: open_run(path, config, resume=True) for path, config in planned.items()}
    unfinished = {path: planned[path] for path, state in states.items() if not (state and state["finished"])}
    if unfinished and not train:
        listed = ", ".join(map(str, list(unfinished)[:4])) + (" …" if len(unfinished) > 4 else "")
        raise ValueError(f"{len(unfinished)} of {len(planned)} runs are missing or unfinished ({listed}): add --train")
    if jobs > 1 and len(unfinished) > 1:
        _side_by_side(unfinished, make, jobs)
        return
    for path, config in unfinished.items():
        fit(make(config), path, resume=True)


def _side_by_side(planned: dict[Path, C], make: Callable[[C], Task], jobs: int) -> None:
    with extra():
        from rich.console import Console
        from rich.progress import Progress
    validations = {path: -(-config.epochs // config.validate_every) for path, config in planned.items()}
    # Spawned, not forked: a fork of a process that has run torch can hang.
    pool = ProcessPoolExecutor(
        min(jobs, len(planned)), multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)
    )
    console = Console(stderr=True)
    with pool, Progress(console=console, disable=not console.is_interactive) as shown:
        overall = shown.add_task(f"{len(planned)} runs", total=sum(validations.values()))
        pending = {pool.submit(_fit_quietly, make, config, path): path for path, config in planned.items()}
        try:
            while pending:
                done, _ = wait(pending, timeout=0.5, return_when=FIRST_COMPLETED)
                shown.update(overall, completed=sum(len(read_history(path)) for path in planned))
                for future in done:
                    path, best = pending.pop(future), future.result()["best"]
                    value = "–" if best["value"] is None else f"{best['value']:.3f}"
                    shown.console.print(f"  {path.name:14} best {value} at epoch {best['epoch']}", highlight=False)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():
                child.terminate()  # on SIGTERM a run saves and ends
            raise


def _fit_quietly(make: Callable[[C], Task], config: C, path: Path) -> dict[str, Any]:
    return fit(make(config), path, resume=True, progress=False)


def common(configs: Sequence[TrainConfig]) -> dict[str, Any]:
    """The fields in which all the configurations agree."""
    first, *others = map(vars, configs)
    return {name: value for name, value in first.items() if all(other[name] == value for other in others)}

"""Runs of a task: recipes, which runs a comparison needs, training the missing ones, reading them back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

from torchcpl.config import TrainConfig, from_toml, override
from torchcpl.results import CheckpointError, load_checkpoint, open_run, read_history
from torchcpl.train import Task, fit

C = TypeVar("C", bound=TrainConfig)
RECIPES = "recipes"  # the folder beside a task's files


def recipes(package: str | Path) -> dict[str, Path]:
    """The TOML files a task ships, by name."""
    return {path.stem: path for path in sorted((Path(package) / RECIPES).glob("*.toml"))}


def read_recipe(cls: type[C], package: str | Path, name: str) -> C:
    """The configuration that a shipped recipe names."""
    found = recipes(package)
    if name not in found:
        raise ValueError(f"recipe = {name!r}: expected one of {', '.join(found)}")
    return from_toml(cls, found[name])


@dataclass(frozen=True)
class Run(Generic[C]):
    """A run as read from its folder: what ran, a record a validation, and the state of its best checkpoint."""

    path: Path
    config: C
    history: list[dict[str, Any]]
    state: dict[str, Any]


def read_run(cls: type[C], path: str | Path) -> Run[C]:
    """Read back a run of the task whose configuration is ``cls``; CheckpointError where it is none."""
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such run")
    checkpoint = load_checkpoint(path, "best")
    if checkpoint.state["config"] != cls.__name__:
        raise CheckpointError(f"{path} is a run with {checkpoint.state['config']}: expected {cls.__name__}")
    return Run(path, from_toml(cls, checkpoint.config), read_history(path), checkpoint.state)


def plan(base: C, methods: Iterable[str], seeds: Iterable[int], folder: str | Path) -> dict[Path, C]:
    """Where the run of every method and seed lies, and its configuration."""
    pairs = [(method, seed) for method in methods for seed in seeds]
    return {Path(folder) / f"{method}-s{seed}": override(base, method=method, seed=seed) for method, seed in pairs}


def complete(planned: dict[Path, C], make: Callable[[C], Task], *, train: bool, progress: bool = True) -> None:
    """Train what is missing of the planned runs, and go on with what was interrupted.

    Without ``train`` nothing is trained and a missing run is an error. A run with another configuration always is.
    """
    states = {path: open_run(path, config, resume=True) for path, config in planned.items()}
    unfinished = [path for path, state in states.items() if not (state and state["finished"])]
    if unfinished and not train:
        listed = ", ".join(map(str, unfinished[:4])) + (" …" if len(unfinished) > 4 else "")
        raise ValueError(f"{len(unfinished)} of {len(planned)} runs are missing or unfinished ({listed}): add --train")
    for path in unfinished:
        fit(make(planned[path]), path, resume=True, progress=progress)


def common(configs: Sequence[TrainConfig]) -> dict[str, Any]:
    """The fields in which all the configurations agree."""
    first = configs[0]
    names = [f.name for f in fields(first)]
    return {n: getattr(first, n) for n in names if all(getattr(c, n) == getattr(first, n) for c in configs)}

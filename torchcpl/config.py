"""Configurations: flat frozen dataclasses, read from TOML and from the command line, written as TOML.

A field is a ``bool``, ``int``, ``float``, ``str`` or ``tuple[T, ...]`` of one of these, made by `option`. The command
line overrides a TOML file, which overrides the defaults.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib
import json
import math
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from torchcpl.checks import short
from torchcpl.files import about, read_text

C = TypeVar("C", bound="TrainConfig")
LARGEST = 2**63 - 1  # of a tensor's size or a seed


def option(
    default: Any, help: str, *, choices: Iterable[Any] = (), low: float | None = None, high: float | None = None
) -> Any:
    """A dataclass field with its help text and, if given, its allowed values or inclusive bounds."""
    metadata = {"help": help, "choices": tuple(choices), "low": low, "high": high}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The options of the training loop; a task's configuration inherits them and adds its own."""

    seed: int = option(0, "seed of the weights, the data and the dropout", low=0, high=2**32 - 1)
    epochs: int = option(300, "number of epochs", low=1)
    batch_size: int = option(256, "examples in a step, on each device", low=1)
    optimizer: str = option("adam", "optimiser", choices=("adam", "adamw"))
    lr: float = option(5e-4, "peak learning rate", low=0.0)
    weight_decay: float = option(0.0, "weight decay: L2 in adam, decoupled in adamw", low=0.0)
    schedule: str = option("constant", "learning rate after the warmup", choices=("constant", "cosine"))
    warmup: float = option(0.0, "fraction of all steps with a linear learning-rate warmup", low=0.0, high=1.0)
    clip: float = option(0.0, "gradient norm to clip to (0 = no clipping)", low=0.0)
    ema: float = option(0.0, "decay of the weight EMA that is validated and saved (0 = off)", low=0.0, high=0.99999)
    precision: str = option("auto", "of training; auto = bf16-mixed on CUDA", choices=("auto", "32-true", "bf16-mixed"))
    compile: bool = option(False, "torch.compile the model's forward pass")
    capture: bool = option(True, "replay training steps as one CUDA graph, where the method can be captured")
    deterministic: bool = option(True, "deterministic algorithms on CUDA, where torch has them")
    validate_every: int = option(1, "epochs between validations", low=1)
    checkpoint_seconds: float = option(30.0, "least seconds between checkpoints (0 = at every validation)", low=0.0)
    device: str = option("auto", "where to compute; auto = CUDA if available", choices=("auto", "cpu", "cuda"))
    devices: int = option(1, "number of processes (DDP)", low=1)

    def __post_init__(self) -> None:
        """Check types, choices and bounds; convert int to float and list to tuple where the type says so."""
        types = get_type_hints(type(self))
        for f in dataclasses.fields(self):
            value, kind = getattr(self, f.name), types[f.name]
            label = f"{type(self).__name__}.{f.name} = {short(value)}"
            if get_origin(kind) is not tuple:
                value = _checked(value, kind, label, f.metadata)
            elif isinstance(value, list | tuple):
                value = tuple(_checked(item, get_args(kind)[0], label, f.metadata) for item in value)
            else:
                raise ValueError(f"{label}: expected {kind}")
            object.__setattr__(self, f.name, value)


def _checked(value: Any, kind: Any, label: str, metadata: Mapping[str, Any]) -> Any:
    if type(value) is int and abs(value) > LARGEST:
        raise ValueError(f"{label}: expected a number of at most {LARGEST}")
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise ValueError(f"{label}: expected {kind.__name__}")
    if kind is float and not math.isfinite(value):
        raise ValueError(f"{label}: expected a finite number")
    if metadata["choices"] and value not in metadata["choices"]:
        raise ValueError(f"{label}: expected one of {words(metadata['choices'])}")
    low, high = metadata["low"], metadata["high"]
    if low is not None and value < low:
        raise ValueError(f"{label}: expected at least {low}")
    if high is not None and value > high:
        raise ValueError(f"{label}: expected at most {high}")
    return value


def to_toml(config: TrainConfig) -> str:
    """The configuration as TOML, one line per field; `from_toml` reads it back."""
    # A JSON value is a TOML value, except that TOML wants DEL escaped.
    values = {name: json.dumps(value, ensure_ascii=False) for name, value in vars(config).items()}
    return "".join(f"{name} = {value}\n" for name, value in values.items()).replace("\x7f", "\\u007f")


def read_toml(path: str | Path) -> dict[str, Any]:
    """The values in a TOML file; ValueErrors name the file."""
    tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    text = read_text(path)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # not TOML, a number of 5,000 digits, deeply nested arrays
        raise ValueError(f"{path}: not TOML: {error}") from None


def from_toml(cls: type[C], path: str | Path) -> C:
    """A configuration of class ``cls`` from a TOML file; fields that are not in the file have their defaults."""
    values = read_toml(path)
    with about(path):
        return _build(cls, values)


def override(config: C, **changes: Any) -> C:
    """A copy of ``config`` with some fields changed."""
    return _build(type(config), vars(config) | changes)


def add_arguments(parser: argparse._ActionsContainer, cls: type[TrainConfig], only: Collection[str] = ()) -> None:
    """Add one ``--kebab-name`` option per field of ``cls``, or per field named in ``only``."""
    types = get_type_hints(cls)
    for f in dataclasses.fields(cls):
        if only and f.name not in only:
            continue
        kind, choices = types[f.name], f.metadata["choices"] or None
        default = f" (default: {words(f.default)})" if f.default not in ("", ()) else ""
        help = (f.metadata["help"] + default).replace("%", "%%")
        # Absent from the namespace unless given, so that it overrides a TOML file only then.
        shared: dict[str, Any] = {"dest": f.name, "default": argparse.SUPPRESS, "help": help}
        name = "--" + f.name.replace("_", "-")
        if kind is bool:
            parser.add_argument(name, action=argparse.BooleanOptionalAction, **shared)
        elif get_origin(kind) is tuple:
            parser.add_argument(name, type=get_args(kind)[0], nargs="*", choices=choices, **shared)
        else:
            parser.add_argument(name, type=kind, choices=choices, **shared)


def given_options(cls: type[TrainConfig], namespace: argparse.Namespace) -> dict[str, Any]:
    """The parsed options that are fields of ``cls``."""
    return {f.name: getattr(namespace, f.name) for f in dataclasses.fields(cls) if hasattr(namespace, f.name)}


def from_args(cls: type[C], namespace: argparse.Namespace, base: C | None = None) -> C:
    """A configuration from parsed options; the others are as in ``base``, or have their defaults."""
    return override(base or cls(), **given_options(cls, namespace))


def _build(cls: type[C], values: Mapping[str, Any]) -> C:
    names = [f.name for f in dataclasses.fields(cls)]
    for name in values:
        if name not in names:
            close = difflib.get_close_matches(name, names)
            hint = f"did you mean {' or '.join(close)}?" if close else f"expected one of {', '.join(names)}"
            raise ValueError(f"{cls.__name__} has no option {name!r}: {hint}")
    return cls(**values)


def words(value: Any) -> str:
    """A value, or the items of a tuple, for a message."""
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)

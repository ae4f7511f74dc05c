"""Configurations: flat frozen dataclasses, read from TOML and from the command line, written as TOML.

A field is a ``bool``, ``int``, ``float``, ``str`` or a tuple of one of these. Its metadata may hold ``help``,
``choices`` and the inclusive bounds ``low`` and ``high``; `option` writes them. The command line overrides a
TOML file, which overrides the defaults.
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
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints

from torchcpl.checks import short

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

C = TypeVar("C", bound="DataclassInstance")
_SCALARS = (bool, int, float, str)
LARGEST = 2**63 - 1  # what a tensor's size or seed can hold


def option(
    default: Any,
    help: str,
    *,
    choices: Iterable[Any] = (),
    low: float | None = None,
    high: float | None = None,
) -> Any:
    """A dataclass field with its help text and, where given, its allowed values or inclusive bounds."""
    metadata = {"help": help, "choices": tuple(choices), "low": low, "high": high}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What the training loop needs to know; a task's configuration inherits it and adds its own fields."""

    seed: int = option(0, "seed of the weights, the data and the dropout", low=0, high=2**32 - 1)
    epochs: int = option(300, "passes of steps_per_epoch steps", low=1)
    batch_size: int = option(256, "examples in a step, on each device", low=1)
    optimizer: str = option("adam", "optimiser", choices=("adam", "adamw"))
    lr: float = option(5e-4, "learning rate, at its peak where there is a schedule", low=0.0)
    weight_decay: float = option(0.0, "weight decay: L2 in adam, decoupled in adamw", low=0.0)
    schedule: str = option("constant", "learning rate after the warmup", choices=("constant", "cosine"))
    warmup: float = option(0.0, "fraction of all steps over which the learning rate rises", low=0.0, high=1.0)
    clip: float = option(0.0, "largest norm of the gradient (0 = no limit)", low=0.0)
    ema: float = option(0.0, "decay of the weight average that is validated and saved (0 = off)", low=0.0, high=0.99999)
    precision: str = option("auto", "of training; auto = bf16-mixed on CUDA", choices=("auto", "32-true", "bf16-mixed"))
    compile: bool = option(False, "compile the model's forward pass")
    capture: bool = option(True, "replay the steps as one CUDA graph, where the method can be captured")
    deterministic: bool = option(True, "repeatable arithmetic on CUDA as well, where torch has it")
    validate_every: int = option(1, "epochs between validations", low=1)
    checkpoint_seconds: float = option(
        30.0, "least time between checkpoints, each at a validation (0 = at every one)", low=0.0
    )
    device: str = option("auto", "where to train; auto = CUDA if there is one", choices=("auto", "cpu", "cuda"))
    devices: int = option(1, "processes that share the work (DDP)", low=1)

    def __post_init__(self) -> None:
        _normalise(self)


def to_toml(config: DataclassInstance) -> str:
    """The configuration as TOML, one line per field; `from_toml` gives it back."""
    return "".join(f"{f.name} = {_toml(getattr(config, f.name))}\n" for f in dataclasses.fields(config))


def parse_toml(text: str, source: str) -> dict[str, Any]:
    """The values in a TOML text; ``source`` names it in errors."""
    tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        values: dict[str, Any] = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # the decoder's own, a number of 5,000 digits, arrays in arrays in …
        raise ValueError(f"{source}: not TOML: {error}") from None
    return values


def read_toml(path: str | Path) -> dict[str, Any]:
    """The values in a TOML file; a ValueError that names the file where there are none."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
    return parse_toml(text, str(path))


def from_toml(cls: type[C], path: str | Path) -> C:
    """A configuration of class ``cls`` from a TOML file; what the file leaves out has its default."""
    values = read_toml(path)
    try:
        return _build(cls, values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def override(config: C, **changes: Any) -> C:
    """A copy of ``config`` with some fields changed."""
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return _build(type(config), values | changes)


def add_arguments(parser: argparse._ActionsContainer, cls: type[DataclassInstance], only: Collection[str] = ()) -> None:
    """Give the parser one ``--kebab-name`` option per field of ``cls``, or of those named in ``only``."""
    types = get_type_hints(cls)
    for f in dataclasses.fields(cls):
        if only and f.name not in only:
            continue
        kind, choices = types[f.name], f.metadata.get("choices") or None
        default = "required" if f.default is dataclasses.MISSING else f"default: {_words(f.default)}"
        help = f"{f.metadata.get('help', '')} ({default})".lstrip().replace("%", "%%")
        # Absent unless given, so that a TOML file's value can stand below it.
        shared: dict[str, Any] = {"dest": f.name, "default": argparse.SUPPRESS, "help": help}
        name = "--" + f.name.replace("_", "-")
        if kind is bool:
            parser.add_argument(name, action=argparse.BooleanOptionalAction, **shared)
        elif get_origin(kind) is tuple:
            inner = get_args(kind)
            nargs = "*" if inner[-1] is Ellipsis else len(inner)
            parser.add_argument(name, type=inner[0], nargs=nargs, choices=choices, **shared)
        else:
            metavar = None if choices else kind.__name__.upper()
            parser.add_argument(name, type=kind, choices=choices, metavar=metavar, **shared)


def from_args(cls: type[C], namespace: argparse.Namespace, base: C | None = None) -> C:
    """A configuration from parsed options; those not given are as in ``base``, or else their defaults."""
    given = {f.name: getattr(namespace, f.name) for f in dataclasses.fields(cls) if hasattr(namespace, f.name)}
    return _build(cls, given) if base is None else override(base, **given)


def _build(cls: type[C], values: Mapping[str, Any]) -> C:
    names = [f.name for f in dataclasses.fields(cls)]
    for name in values:
        if name not in names:
            close = difflib.get_close_matches(name, names)
            hint = f"did you mean {' or '.join(close)}?" if close else f"expected one of {', '.join(names)}"
            raise ValueError(f"{cls.__name__} has no option {name!r}: {hint}")
    required = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]
    missing = [name for name in required if name not in values]
    if missing:
        raise ValueError(f"{cls.__name__} needs a value for {', '.join(missing)}")
    config = cls(**values)
    _normalise(config)
    return config


def _normalise(config: DataclassInstance) -> None:
    """Check every field's type, choices and bounds; make an int given for a float one, a list a tuple."""
    types = get_type_hints(type(config))
    for f in dataclasses.fields(config):
        value, kind = getattr(config, f.name), types[f.name]
        label = f"{type(config).__name__}.{f.name} = {short(value)}"
        if get_origin(kind) is tuple:
            inner = get_args(kind)
            inner = inner[:1] * len(value) if inner[-1] is Ellipsis and isinstance(value, list | tuple) else inner
            if not isinstance(value, list | tuple) or len(value) != len(inner):
                raise ValueError(f"{label}: expected {kind}")
            value = tuple(_scalar(v, k, label, f.metadata) for v, k in zip(value, inner, strict=True))
        else:
            value = _scalar(value, kind, label, f.metadata)
        object.__setattr__(config, f.name, value)


def _scalar(value: Any, kind: Any, label: str, metadata: Mapping[str, Any]) -> Any:
    if kind not in _SCALARS:
        raise TypeError(f"{label}: a field must be bool, int, float, str or a tuple of one of them, not {kind}")
    if type(value) is int and abs(value) > LARGEST:
        raise ValueError(f"{label}: expected a number of at most {LARGEST}")
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise ValueError(f"{label}: expected {kind.__name__}")
    if kind is float and not math.isfinite(value):
        raise ValueError(f"{label}: expected a finite number")
    if metadata.get("choices") and value not in metadata["choices"]:
        raise ValueError(f"{label}: expected one of {_words(metadata['choices'])}")
    low, high = metadata.get("low"), metadata.get("high")
    if low is not None and value < low:
        raise ValueError(f"{label}: expected at least {low}")
    if high is not None and value > high:
        raise ValueError(f"{label}: expected at most {high}")
    return value


def _words(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # JSON's strings are TOML's, save that TOML wants DEL escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)

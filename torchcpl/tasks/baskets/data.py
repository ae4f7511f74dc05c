"""Baskets from text files: one a line, item numbers or names; parts by file, or drawn by a seed."""

from __future__ import annotations

import csv
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from torchcpl.files import read_text
from torchcpl.vectors import read_vectors

if TYPE_CHECKING:
    from torchcpl.tasks.baskets.task import BasketsConfig

PARTS = ("train", "valid", "test")
MEALS = "meals"  # the source that needs no file

Lines = list[list[str]]  # the fields of every line
Parts = dict[str, list[list[int]]]  # the baskets of each part, as lists of item numbers


@dataclass(frozen=True)
class Baskets:
    """Three parts of baskets of ``names``' items, each (M, T) long, −1 padded; features (N, d) or None."""

    name: str
    names: list[str]
    train: Tensor
    valid: Tensor
    test: Tensor
    features: Tensor | None = None

    @property
    def num_items(self) -> int:
        return len(self.names)


def load_baskets(config: BasketsConfig) -> Baskets:
    """Read a source: a folder and a name, ``shop/toys`` for ``shop/toys.train.txt`` and so on, one file, or "meals".

    The names of the items are in ``NAME.items.txt``, one a line, or else are those (for numbers, up to the largest) of
    the training part. One file alone, and with ``split="random"`` all parts together, are divided by ``split_seed``
    into validation, test and training baskets: as many as the configuration says, or 10 %, 20 % and the rest.
    """
    names, parts = meals() if config.source == MEALS else _read_source(config)
    if len(parts) == 1 or config.split == "random":
        parts = divide([basket for part in parts.values() for basket in part], config)
    else:
        _tell_unseen(parts, names, files_of(config.source))
    tensors = {part: padded(baskets) for part, baskets in parts.items()}
    features = _read_features(config.features, len(names)) if config.features else None
    return Baskets(Path(config.source).name.removesuffix(".txt"), names, features=features, **tensors)


def files_of(source: str) -> dict[str, Path]:
    """The files of a source: its parts, or ``train`` alone, and ``items``, which need not be there."""
    path = Path(source)
    if path.is_file():
        stem = str(path.with_suffix("")).removesuffix(".train")
        return {"train": path, "items": Path(f"{stem}.items.txt")}
    return {part: Path(f"{source}.{part}.txt") for part in (*PARTS, "items")}


def _read_source(config: BasketsConfig) -> tuple[list[str], Parts]:
    """The names of the items, and the baskets of every part."""
    files = files_of(config.source)
    names = _read_names(files.pop("items"))
    missing = [file for file in files.values() if not file.is_file()]
    if missing:
        raise ValueError(f"source = {config.source!r}: expected a file, or FOLDER/NAME with {missing[0]} and so on")
    lines = {part: read_lines(file) for part, file in files.items()}
    names = vocabulary(lines["train"]) if names is None else names
    return names, {part: read_sets(rows, names, config.max_items, files[part]) for part, rows in lines.items()}


def meals() -> tuple[list[str], Parts]:
    """Invented breakfasts and dinners: nobody takes both coffee and tea, or both kinds of pasta."""
    rng = np.random.default_rng(0)
    breakfast, dinner = ("bread", "butter", "jam", "eggs"), ("basil", "parmesan", "wine")
    kinds = ((("coffee", "tea"), breakfast), (("spaghetti", "penne"), dinner))
    names = sorted(name for kind in kinds for part in kind for name in part)

    def basket() -> list[int]:
        one, some = kinds[rng.integers(2)]
        return [names.index(name) for name in (one[rng.integers(2)], *(i for i in some if rng.random() < 0.6))]

    sizes = {"train": 2000, "valid": 300, "test": 600}
    return names, {part: [basket() for _ in range(size)] for part, size in sizes.items()}


def read_lines(path: Path) -> Lines:
    """The fields of every line. Numbers stand apart by blanks or commas; names by tabs, or else commas as in CSV."""
    text = read_text(path)
    rows = text.splitlines()
    if not any(row.strip() for row in rows):
        raise ValueError(f"{path}: expected a basket a line, got an empty file")
    if all(part.isdigit() for part in next(row for row in rows if row.strip()).replace(",", " ").split()):
        found = [row.replace(",", " ").split() for row in rows]
    else:
        parsed = csv.reader(rows, delimiter="\t" if "\t" in text else ",", skipinitialspace=True)
        found = [[field.strip() for field in row if field.strip()] for row in parsed]
    for number, row in enumerate(found, 1):
        if not row:
            raise ValueError(f"{path}:{number}: expected a basket, got an empty line")
    return found


def vocabulary(lines: Lines) -> list[str]:
    """The items of a part: numbers up to the largest, or its names in alphabetical order."""
    items = {item for row in lines for item in row}
    if all(item.isdigit() for item in items):
        return [str(i) for i in range(max(map(int, items)) + 1)]
    return sorted(items)


def read_sets(lines: Lines, names: list[str], most: int, path: Path | str) -> list[list[int]]:
    """The baskets as lists of item numbers; ValueError names the line that is wrong."""
    number_of = {name: i for i, name in enumerate(names)}
    by_number = all(item.isdigit() for item in lines[0])
    baskets = []
    for line, row in enumerate(lines, 1):
        basket: list[int] = []
        for item in row:
            index = int(item) if by_number and item.isdigit() else number_of.get(item, -1)
            if not 0 <= index < len(names):
                known = f"a number below {len(names)}" if by_number else f"one of the {len(names)} items"
                raise ValueError(f"{path}:{line}: expected {known}, got {item!r}")
            if index in basket:
                raise ValueError(f"{path}:{line}: expected every item once, got {item!r} again")
            basket.append(index)
        if len(basket) > most:
            raise ValueError(f"{path}:{line}: expected at most {most} items (max_items), got {len(basket)}")
        baskets.append(basket)
    return baskets


def padded(baskets: Sequence[Sequence[int]]) -> Tensor:
    """Lists of items as (M, T) long, −1 padded."""
    width = max(map(len, baskets), default=0)
    rows = [[*basket, *[-1] * (width - len(basket))] for basket in baskets]
    return torch.tensor(rows, dtype=torch.long).view(len(baskets), width)


def divide(baskets: list[list[int]], config: BasketsConfig) -> Parts:
    """Validation, test and training baskets by a random permutation."""
    valid = config.valid_baskets or max(1, len(baskets) // 10)
    test = config.test_baskets or max(1, len(baskets) // 5)
    if valid + test >= len(baskets):
        raise ValueError(
            f"{config.source}: expected more baskets than {valid} + {test} to hold out, got {len(baskets)}"
        )
    order = np.random.default_rng(config.split_seed).permutation(len(baskets))
    shuffled = [baskets[i] for i in order]
    return {"valid": shuffled[:valid], "test": shuffled[valid : valid + test], "train": shuffled[valid + test :]}


def _tell_unseen(parts: Parts, names: list[str], files: dict[str, Path]) -> None:
    """Warn of the first basket with an item that no training basket has: its probability is small, but not zero."""
    seen = {item for basket in parts["train"] for item in basket}
    for part in ("valid", "test"):
        for line, basket in enumerate(parts[part], 1):
            for item in basket:
                if item not in seen:
                    warnings.warn(f"{files[part]}:{line}: {names[item]!r} is in no training basket", stacklevel=4)
                    return


def read_parts(path: Path, source: str, count: int) -> list[Tensor]:
    """Incomplete baskets in a file, each (m,), for a model of ``count`` items trained on ``source``.

    They are given by number, or by the names in NAME.items.txt beside NAME.….txt, or else by those of ``source``.
    """
    lines = read_lines(path)
    file = path.with_name(path.name.split(".")[0] + ".items.txt")
    names = _read_names(file)
    if names is None:
        names = vocabulary(lines)
        if unknown := [name for name in names if not name.isdigit()]:  # which number each has, other files tell
            names = item_names(source)
            if len(names) != count:
                said = f"{file} or in the run's {source} ({count} items, found {len(names)})"
                raise ValueError(f"{path}: expected numbers of items, or their names in {said}, got {unknown[0]!r}")
    return [torch.tensor(row) for row in read_sets(lines, names, len(names), path)]


def item_names(source: str) -> list[str]:
    """The names of a source's items in the order of their numbers, none where its files are gone."""
    if source == MEALS:
        return meals()[0]
    files = files_of(source)
    names = _read_names(files["items"])
    if names is None and files["train"].is_file():
        names = vocabulary(read_lines(files["train"]))
    return names or []


def _read_names(path: Path) -> list[str] | None:
    if not path.is_file():
        return None
    names = [line.strip() for line in read_text(path).splitlines()]
    for number, name in enumerate(names, 1):
        if not name:
            raise ValueError(f"{path}:{number}: expected the name of an item, got an empty line")
        if names.index(name) < number - 1:
            names[number - 1] = f"{name} ({number - 1})"  # shops have several items of one name
    return names


def _read_features(path: str, count: int) -> Tensor:
    with np.errstate(over="ignore"):  # refused below
        features = torch.from_numpy(read_vectors(path).values.astype(np.float32))
    if len(features) != count or not features.isfinite().all():
        raise ValueError(f"{path}: expected finite numbers ({count}, d), a row an item, got {tuple(features.shape)}")
    return features

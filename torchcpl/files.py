"""Atomic writes, reading with errors that name the file, optional packages, progress bars."""

from __future__ import annotations

import base64
import contextlib
import csv
import io
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from torchcpl.checks import short

T = TypeVar("T")
NUMBER = (int, float)
_WORDS = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
_WORDS |= {int: "an integer of at least 0", float: "a number"}


@contextlib.contextmanager
def extra(name: str = "tasks") -> Iterator[None]:
    """Around imports of packages of the extra ``name``: the ImportError says how to install them."""
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{error.name} is missing: pip install 'torchcpl[{name}]'", name=error.name) from error


def targets_of(read: Sequence[Path], *files: Path | None, folder: Path | None = None) -> list[Path]:
    """The paths to write to, which must differ from each other and from what is read, and be possible."""
    found = [path for path in (*files, folder) if path]
    for i, path in enumerate(found):
        if path.resolve() in [other.resolve() for other in (*read, *found[:i])]:
            raise ValueError(f"{path}: expected another path to write to, this one is read or written already")
        if (path.is_dir() and path is not folder) or any(parent.is_file() for parent in path.parents):
            raise ValueError(
                f"{path}: expected a file in a folder, got {'a folder' if path.is_dir() else 'one in a file'}"
            )
    return found


def write_atomic(path: str | Path, data: bytes) -> None:
    """Write a file atomically: whatever happens, ``path`` has its old contents or the new, never a part."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        write_synced(temporary, data, name=path)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_synced(path: Path, data: bytes, mode: str = "wb", name: Path | None = None) -> None:
    """Write a file, or append to it with mode ``ab``, and fsync; an OSError says ``name``, by default the path."""
    with named(name or path), open(path, mode) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """Around writes: put the path into an OSError that lacks it, such as ENOSPC."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


@contextlib.contextmanager
def about(what: object) -> Iterator[None]:
    """Put a file, or whatever else an error is about, before the message of a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error


def sync_folder(path: Path) -> None:
    """Fsync a folder, whose entries were made, moved or removed."""
    if os.name == "nt":  # Windows cannot open folders
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: str | Path, obj: Any) -> None:
    """Write ``obj`` as indented JSON, atomically. NaN and infinities, which JSON lacks, are refused."""
    try:
        text = json.dumps(obj, indent=2, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: cannot be written as JSON: {error}") from None
    write_atomic(path, (text + "\n").encode())


def read_text(path: str | Path) -> str:
    """The contents of a UTF-8 file; ValueErrors name the file."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{path}: cannot be read: {reason}") from None


def read_json(path: str | Path, kind: Any = None) -> Any:
    """The contents of a JSON file that matches the schema ``kind``, if given; ValueErrors name the file."""
    return parse_json(read_text(path), str(path), kind)


def parse_json(text: str, where: str, kind: Any = None) -> Any:
    """A JSON text that matches the schema ``kind``, if given; ValueErrors begin with ``where``."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON: {error}") from None
    if kind is not None:
        check_json(value, kind, where)
    return value


def check_json(value: Any, kind: Any, where: str) -> None:
    """Raise unless parsed JSON matches the schema ``kind``, with integers at least 0 and no number of 2⁶³ or more.

    A schema is a type; a tuple of alternatives; ``[kind]``, a list; ``{name: kind}``, an object, with ``?`` after the
    name of an optional member; ``{str: kind}``, an object with any names.
    """
    kinds = {one if isinstance(one, type) else type(one): one for one in (kind if isinstance(kind, tuple) else [kind])}
    found = type(value)
    if found not in kinds:
        raise ValueError(f"{where}: expected {' or '.join(_WORDS[one] for one in kinds)}, got {short(value)}")
    kind = kinds[found]
    if isinstance(kind, list):
        for i, item in enumerate(value):
            check_json(item, kind[0], f"{where}: {i}")
    elif isinstance(kind, dict):
        for name, inner in [(name, kind[str]) for name in value] if str in kind else kind.items():
            key = name if str in kind else name.removesuffix("?")
            if key in value:
                check_json(value[key], inner, f"{where}: {key}")
            elif key == name:
                raise ValueError(f"{where}: {key} is missing")
    elif (kind is int and value < 0) or (kind in NUMBER and not abs(value) < 2**63):
        raise ValueError(f"{where}: expected {_WORDS[kind]} below 2**63, got {short(value)}")


def read_npz(path: str | Path) -> dict[str, NDArray[Any]]:
    """The arrays of an ``.npz``, or that of an ``.npy``, mapped from disk, as ``array``; ValueErrors name the file."""
    try:
        archive = np.load(path, mmap_mode="r", allow_pickle=False)
        if isinstance(archive, np.ndarray):
            return {"array": archive}
        with archive:
            return dict(archive.items())
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file") from None
    except Exception as error:  # numpy and zipfile raise many types for a damaged file
        reason = str(error) or type(error).__name__
        raise ValueError(f"{path}: not a readable {Path(path).suffix} of plain arrays: {reason}") from error


def read_parquet(path: str | Path) -> Any:
    """A ``pyarrow.Table``: a Parquet file, or all those in a folder; ValueErrors name the file."""
    with extra("ray"):
        import pyarrow
        from pyarrow import dataset
    try:
        return dataset.dataset(path, format="parquet").to_table()
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not readable as Parquet: {str(error).splitlines()[0]}") from None


def data_url(mime: str, data: bytes) -> str:
    """A file inside a page."""
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def csv_text(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    return text.getvalue()


def stamp(*paths: str | Path) -> tuple[tuple[str, int, int, int], ...]:
    """A cache key of files: inode, size and modification time of each, and of the files in each folder."""
    files = [file for path in map(Path, paths) for file in (sorted(path.glob("*")) if path.is_dir() else [path])]
    found = [(file, file.stat()) for file in files if file.is_file()]
    return tuple((str(file), status.st_ino, status.st_size, status.st_mtime_ns) for file, status in found)


def track(items: Sequence[T], title: str, shown: bool = True) -> Iterable[T]:
    """The items, with a progress bar if ``shown``."""
    if not shown:
        return items
    with extra():
        from rich.console import Console
        from rich.progress import track
    console = Console(stderr=True)
    return track(items, title, console=console, disable=not console.is_interactive)

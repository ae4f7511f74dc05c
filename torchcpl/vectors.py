"""Reading vectors (NumPy, CSV, Parquet, JSON lines, a folder of images), writing picks."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchcpl.checks import short
from torchcpl.files import csv_text, extra, parse_json, read_npz, read_parquet, read_text, write_atomic, write_json

IMAGES = (".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
READ = (".npy", ".npz", ".csv", ".parquet", ".jsonl")
INDEX = ("", "__index_level_0__")  # how pandas names an index that has no name in CSV and Parquet
WRITTEN = (".csv", ".json", ".parquet", ".npy")


@dataclass(frozen=True, eq=False)
class Vectors:
    """The rows of a file, ``values`` (N, D), perhaps mapped from disk, or the features of the images ``files``."""

    values: NDArray[Any]
    ids: list[str] | None = None  # names of the rows, all different
    weights: NDArray[Any] | None = None  # (N,)
    files: Sequence[Path] | None = None
    skipped: int = 0  # images that could not be read

    def __len__(self) -> int:
        return len(self.values)

    def name(self, row: int) -> str:
        """The name of a row, by default its number."""
        return str(row) if self.ids is None else self.ids[row]

    def row(self, name: str) -> int:
        """The row called ``name``."""
        if self.ids is None and name.isdecimal() and int(name) < len(self):
            return int(name)
        if self.ids is None or name not in self.ids:
            raise ValueError(f"id: expected one of the file's {len(self)} rows, got {name!r}")
        return self.ids.index(name)


def read_vectors(
    path: str | Path,
    *,
    column: str | None = None,
    weights: str | None = None,
    resnet: str | Path | None = None,
    strict: bool = False,
) -> Vectors:
    """The rows of a file or the images of a folder.

    ``.npy``: (N, D), mapped from disk. ``.npz``: its only 2-D array, or the one named ``column``, times ``scale`` and
    plus ``shift`` where these are in it; names from ``ids``. ``.csv``: all columns are numbers but ``id``,
    between commas, semicolons or tabs.
    ``.parquet``, ``.jsonl``: ``column`` holds the vectors, by default the only one of lists; names from ``id``, or the
    index of pandas. ``weights``, a number a row: a column of one of these three, or a file ``.npy`` of (N,) or (N, 1).
    A folder of images goes through the ResNet-18 whose weights are in ``resnet``; broken ones are skipped and counted,
    or with ``strict`` refused.
    """
    path = Path(path)
    if path.is_file() and (resnet or strict):
        raise ValueError(f"--{'resnet' if resnet else 'strict'}: expected a folder of images, got {path}")
    if path.is_dir() and column:
        raise ValueError(f"--column: expected a file, got the folder {path}")
    found = _images(path, resnet, strict) if path.is_dir() else _rows(path, column, weights)
    if weights is None or found.weights is not None:
        return found
    if not weights.endswith(".npy"):
        raise ValueError(f"--weights: expected a column of {path} or a file .npy, got {weights!r}")
    given, _ = _numpy(Path(weights), None)
    return replace(found, weights=given[:, 0] if given.ndim == 2 and given.shape[1] == 1 else given)


def _rows(path: Path, column: str | None, weights: str | None) -> Vectors:
    """The rows of a file, with their weights if those are one of its columns."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file or folder")
    kind, bonus = path.suffix.lower(), None
    if kind not in READ:
        raise ValueError(f"{path}: expected a folder of images or one of {', '.join(READ)}")
    if kind in (".npy", ".npz"):
        values, ids = _numpy(path, column)
    else:
        table = {".csv": _csv, ".jsonl": _jsonl, ".parquet": _parquet}[kind](path)
        index = [table.pop(name) for name in INDEX if name in table]
        ids = table.pop("id", index[0] if index else None)
        bonus = _numbers(path, weights, table.pop(weights)) if weights in table else None
        values = _matrix(path, table, column)
    if values.dtype.kind not in "fiu":
        raise ValueError(f"{path}: expected numbers, got an array of dtype {values.dtype}")
    if values.ndim != 2 or 0 in values.shape:
        raise ValueError(f"{path}: expected (N, D) with at least one row and column, got shape {values.shape}")
    if ids is None:
        return Vectors(values, weights=bonus)
    names = [str(name) for name in ids]
    if len(names) != len(values):
        raise ValueError(f"{path}: expected {len(values)} ids, one a row, got {len(names)}")
    ((name, times),) = Counter(names).most_common(1)
    if times > 1:
        raise ValueError(f"{path}: expected different ids, got {name!r} twice")
    return Vectors(values, names, bonus)


def _numpy(path: Path, column: str | None) -> tuple[NDArray[Any], Any]:
    """The vectors and, if there are any, the ids."""
    arrays = read_npz(path)
    if list(arrays) == ["array"] and column is None:  # an .npy
        return arrays["array"], None
    beside: dict[str, NDArray[Any]] = {n: arrays.pop(n) for n in ("ids", "scale", "shift") if n in arrays}
    if "ids" in beside and beside["ids"].ndim != 1:
        raise ValueError(f"{path}: ids: expected (N,), got shape {beside['ids'].shape}")
    found = [name for name, array in arrays.items() if array.ndim == 2] if column is None else [column]
    if len(found) != 1 or found[0] not in arrays:
        raise ValueError(f"{path}: expected --column, one of {', '.join(arrays) or 'no arrays'}, got {column!r}")
    values = arrays[found[0]]
    if beside.keys() - {"ids"}:
        values = scaled(f"{path}: {found[0]}", values, beside, {2: "(N, D)"})
    return values, beside.get("ids")


def scaled(
    where: str, array: NDArray[Any], beside: Mapping[str, NDArray[Any]], shapes: Mapping[int, str]
) -> NDArray[np.float32]:
    """``array`` of one of the ranks in ``shapes``, times the ``scale`` and plus the ``shift`` that are ``beside`` it.

    ValueErrors begin with ``where``.
    """
    if array.ndim not in shapes or array.dtype.kind not in "iuf":
        raise ValueError(f"{where}: expected {' or '.join(shapes.values())} numbers, got {array.shape} {array.dtype}")
    with np.errstate(over="ignore", invalid="ignore"):  # infinities are refused later, and said to be so
        found = np.array(array, dtype=np.float32)
        for name, apply in (("scale", np.multiply), ("shift", np.add)):
            by = beside.get(name)
            if by is None:
                continue
            if by.shape not in ((), array.shape[-1:]) or by.dtype.kind not in "iuf":
                expected = f"() or {array.shape[-1:]} numbers"
                raise ValueError(f"{where}: {name}: expected {expected}, got {by.shape} {by.dtype}")
            apply(found, by.astype(np.float32), out=found)
    return found


def _csv(path: Path) -> dict[str, list[Any]]:
    text = read_text(path)
    start = re.sub('"[^"]*"', "", text.lstrip("\n").split("\n", 1)[0])
    comma = next((mark for mark in "\t;" if mark in start), ",")  # last, for it may also be in names and numbers
    try:
        rows = [row for row in csv.reader(io.StringIO(text, newline=""), delimiter=comma) if row]
    except csv.Error as error:
        raise ValueError(f"{path}: not CSV: {error}") from None
    if not rows:
        raise ValueError(f"{path}: expected rows, got an empty file")
    header = [str(i) for i in range(len(rows[0]))]
    numbered = rows[0] == header  # the columns of a table of pandas that have no names, or in a narrow one a row
    if numbered and len(header) < 3 and len(rows) > 1 and all("." in cell for row in rows[1:] for cell in row):
        raise ValueError(f"{path}: expected names of columns, or a first row with points too, got {','.join(header)}")
    if (numbered and len(header) > 2) or not all(_is_number(cell) for cell in rows[0]):
        header, rows = rows[0], rows[1:]
    if "" in header[1:]:  # the first is the index
        raise ValueError(f"{path}: expected a name for every column, got {', '.join(map(repr, header[:8]))}")
    if len(set(header)) < len(header):
        raise ValueError(f"{path}: expected columns of different names, got {', '.join(header[:8])}")
    for number, row in enumerate(rows):
        if len(row) != len(header):
            raise ValueError(f"{path}: expected {len(header)} cells in every row, got {len(row)} in row {number}")
    return {name: [row[i] for row in rows] for i, name in enumerate(header)}


def _is_number(cell: Any) -> bool:
    try:
        float(cell)
    except (ValueError, TypeError, OverflowError):  # an integer of hundreds of digits
        return False
    return True


def _jsonl(path: Path) -> dict[str, list[Any]]:
    records: list[dict[str, Any]] = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        record = parse_json(line, f"{path}: line {number}")
        record = {"vector": record} if isinstance(record, list) else record
        if not isinstance(record, dict) or (records and record.keys() != records[0].keys()):
            raise ValueError(f"{path}: expected objects with the same keys in every line, line {number} differs")
        records.append(record)
    if not records:
        raise ValueError(f"{path}: expected rows, got an empty file")
    return {name: [record[name] for record in records] for name in records[0]}


def _parquet(path: Path) -> dict[str, list[Any]]:
    table = read_parquet(path)
    index = (table.schema.pandas_metadata or {}).get("index_columns", ())
    return {"" if name in index else name: cells for name, cells in table.to_pydict().items()}


def _matrix(path: Path, table: Mapping[str, list[Any]], column: str | None) -> NDArray[Any]:
    """The column of vectors, or all numeric columns concatenated."""
    lists = [name for name, cells in table.items() if cells and isinstance(cells[0], list)]
    if column is None and not lists:
        if not table:
            raise ValueError(f"{path}: expected columns of numbers beside id, got none")
        return np.stack([_numbers(path, name, cells) for name, cells in table.items()], 1)
    found = lists if column is None else [column]
    if len(found) != 1 or found[0] not in table:
        raise ValueError(f"{path}: expected --column, one of {', '.join(table)}, got {column!r}")
    try:
        return np.array(table[found[0]], dtype=np.float64)
    except (ValueError, TypeError, OverflowError):
        raise ValueError(f"{path}: {found[0]}: expected vectors of numbers of one length") from None


def _numbers(path: Path, name: str | None, cells: list[Any]) -> NDArray[Any]:
    for row, cell in enumerate(cells):
        if not _is_number(cell):
            raise ValueError(f"{path}: expected numbers in column {name!r}, got {short(cell)} in row {row}")
    return np.array(cells, dtype=np.float64)


def _images(folder: Path, resnet: str | Path | None, strict: bool) -> Vectors:
    """ResNet-18 features of the images below a folder, each cut to a square."""
    import torch

    from torchcpl.encoders.resnet import load_resnet18, prepare

    found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGES)
    if not found:
        raise ValueError(f"{folder}: expected images ({', '.join(IMAGES)}), found none")
    if resnet is None:
        raise ValueError(f"{folder}: images need --resnet, a file with the weights of a ResNet-18")
    net = load_resnet18(resnet)
    files, rows = [], []
    for start in range(0, len(found), 64):
        batch = found[start : start + 64]
        pictures = {path: picture for path in batch if (picture := read_image(path, 224)) is not None}
        broken = next((path for path in batch if path not in pictures), None)
        if strict and broken:
            raise ValueError(f"{broken}: not a readable image")
        if pictures:
            files += list(pictures)
            with torch.inference_mode():
                rows.append(net.features(prepare(torch.from_numpy(np.stack(list(pictures.values()))))).numpy())
    if not files:
        raise ValueError(f"{folder}: expected readable images, all {len(found)} are broken")
    ids = [path.relative_to(folder).as_posix() for path in files]
    return Vectors(np.concatenate(rows), ids, None, files, len(found) - len(files))


def read_image(path: Path, side: int) -> NDArray[np.uint8] | None:
    """The middle square of an image, (side, side, 3) RGB; None if it cannot be read."""
    with extra():
        import cv2
    try:
        picture = cv2.imdecode(np.fromfile(path, np.uint8), cv2.IMREAD_COLOR)
    except (OSError, cv2.error):  # a dangling link, an empty file, more pixels than OpenCV takes
        return None
    if picture is None:
        return None
    height, width = picture.shape[:2]
    edge = min(height, width)
    top, left = (height - edge) // 2, (width - edge) // 2
    square = picture[top : top + edge, left : left + edge, ::-1]
    return np.ascontiguousarray(cv2.resize(square, (side, side), interpolation=cv2.INTER_AREA))


def write_picks(path: Path, picks: Sequence[Mapping[str, Any]]) -> None:
    """One record a pick as ``.csv``, ``.json`` or ``.parquet``, or their rows alone as ``.npy``."""
    raw = io.BytesIO()
    if path.suffix == ".json":
        write_json(path, list(picks))
        return
    if path.suffix == ".csv":
        raw.write(csv_text(list(picks[0]), [list(pick.values()) for pick in picks]).encode())
    elif path.suffix == ".npy":
        np.save(raw, np.array([pick["row"] for pick in picks]))
    else:
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(list(picks)), raw)
    write_atomic(path, raw.getvalue())


def check_out(path: Path, answers: int = 1) -> None:
    """Raise early if the picks of so many answers cannot be written to such a file."""
    kinds = WRITTEN if answers == 1 else WRITTEN[:-1]  # rows alone do not say of which answer they are
    if path.suffix not in kinds:
        raise ValueError(f"{path}: expected one of {', '.join(kinds)}")
    if path.suffix == ".parquet":
        with extra("ray"):
            import pyarrow  # noqa: F401

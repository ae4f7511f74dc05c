"""CIFAR's pickles, read by an unpickler that builds only numbers, strings, lists, dicts and uint8 arrays."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class _Dtype:
    """In place of numpy.dtype: CIFAR has uint8 arrays only."""

    def __init__(self, name: Any, *_: Any) -> None:
        if name not in ("u1", b"u1"):
            raise pickle.UnpicklingError(f"array of {name!r}, expected u1")

    def __setstate__(self, state: Any) -> None:
        """Byte order and alignment do not matter for single bytes."""


class _Array:
    """In place of numpy's array factory; the array is built from bytes."""

    value: NDArray[np.uint8]

    def __init__(self, *_: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, raw = state
        if not isinstance(dtype, _Dtype):
            raise pickle.UnpicklingError("array without a dtype")
        raw = raw.encode("latin1") if isinstance(raw, str) else raw  # Python 2 wrote its bytes as str
        self.value = np.frombuffer(raw, np.uint8).reshape(shape, order="F" if fortran else "C")


def _latin1(text: str, encoding: str) -> bytes:
    """In place of _codecs.encode, by which protocol 2 stores bytes."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"text in {encoding!r}, expected latin1")
    return text.encode("latin1")


class _Unpickler(pickle.Unpickler):
    """Builds numbers, strings, lists, dicts and uint8 arrays; whatever else a pickle names is refused."""

    ALLOWED: dict[tuple[str, str], Any] = {  # noqa: RUF012
        ("numpy.core.multiarray", "_reconstruct"): _Array,
        ("numpy._core.multiarray", "_reconstruct"): _Array,
        ("numpy", "ndarray"): None,  # only ever an argument of _reconstruct
        ("numpy", "dtype"): _Dtype,
        ("_codecs", "encode"): _latin1,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no CIFAR file needs")
        return self.ALLOWED[module, name]


def _read_pickle(path: Path, keys: tuple[str, ...]) -> list[Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file (expected torchvision's layout of the python version)")
    try:
        with path.open("rb") as file:
            content = _Unpickler(file, encoding="latin1").load()
    except Exception as error:  # a hostile or damaged pickle can raise anything
        raise ValueError(f"{path}: not a CIFAR file: {error}") from error
    if not isinstance(content, dict) or any(key not in content for key in keys):
        raise ValueError(f"{path}: not a CIFAR file: expected a dict with {', '.join(keys)}")
    return [content[key] for key in keys]


@dataclass(frozen=True)
class Layout:
    """The paths and keys of a CIFAR dataset in torchvision's layout."""

    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    meta: str
    labels: str
    names: str


LAYOUTS = {
    "cifar100": Layout("cifar-100-python", ("train",), ("test",), "meta", "fine_labels", "fine_label_names"),
    "cifar10": Layout(
        "cifar-10-batches-py",
        tuple(f"data_batch_{i}" for i in range(1, 6)),
        ("test_batch",),
        "batches.meta",
        "labels",
        "label_names",
    ),
}


def _read_images(path: Path, label_key: str) -> tuple[Tensor, Tensor]:
    """One data file: images (n, 32, 32, 3) uint8 and labels (n,)."""
    data, labels = _read_pickle(path, ("data", label_key))
    if not isinstance(data, _Array) or data.value.ndim != 2 or data.value.shape[1] != 3 * 32 * 32:
        raise ValueError(f"{path}: data: expected an (n, 3072) uint8 array")
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise ValueError(f"{path}: {label_key}: expected a list of whole numbers")
    if len(labels) != len(data.value):
        raise ValueError(f"{path}: {label_key}: expected {len(data.value)} labels, got {len(labels)}")
    images = torch.from_numpy(data.value.copy()).view(-1, 3, 32, 32).permute(0, 2, 3, 1).contiguous()
    return images, torch.tensor(labels, dtype=torch.long)


def read_cifar(folder: Path, layout: Layout) -> tuple[tuple[str, ...], dict[str, tuple[Tensor, Tensor]]]:
    """The names of the classes, and the images and labels of the splits ``train`` and ``test``."""
    (names,) = _read_pickle(folder / layout.meta, (layout.names,))
    if not isinstance(names, list) or not all(isinstance(text, str) for text in names):
        raise ValueError(f"{folder / layout.meta}: {layout.names}: expected a list of strings")
    splits = {}
    for split, files in (("train", layout.train), ("test", layout.test)):
        parts = [_read_images(folder / file, layout.labels) for file in files]
        splits[split] = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    return tuple(names), splits

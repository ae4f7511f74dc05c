"""CIFAR's pickles, read by an unpickler that builds only numbers, strings, lists, dicts and arrays."""

from __future__ import annotations

import codecs
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from torchcpl.files import check_json


class _Unpickler(pickle.Unpickler):
    """Builds numbers, strings, lists, dicts and arrays; whatever else a pickle names is refused."""

    ALLOWED: ClassVar[dict[str, Any]] = {
        "numpy.core.multiarray._reconstruct": np.empty(0).__reduce__()[0],
        "numpy._core.multiarray._reconstruct": np.empty(0).__reduce__()[0],
        "numpy.ndarray": np.ndarray,
        "numpy.dtype": np.dtype,
        "_codecs.encode": codecs.encode,  # by which protocol 2 stores bytes
    }

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in self.ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no CIFAR file needs")
        return self.ALLOWED[f"{module}.{name}"]


def _read_pickle(path: Path, schema: dict[str, Any]) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file (expected torchvision's layout of the python version)")
    try:
        with path.open("rb") as file:
            content: dict[str, Any] = _Unpickler(file, encoding="latin1").load()
    except Exception as error:  # a hostile or damaged pickle can raise anything
        raise ValueError(f"{path}: not a CIFAR file: {error}") from error
    check_json(content, schema, f"{path}: not a CIFAR file")
    return content


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
    content = _read_pickle(path, {label_key: [int]})
    data, labels = content.get("data"), content[label_key]
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.shape[1:] != (3 * 32 * 32,):
        got = f"{data.dtype} {data.shape}" if isinstance(data, np.ndarray) else type(data).__name__
        raise ValueError(f"{path}: data: expected an (n, 3072) uint8 array, got {got}")
    if len(labels) != len(data):
        raise ValueError(f"{path}: {label_key}: expected {len(data)} labels, got {len(labels)}")
    images = torch.from_numpy(data.reshape(-1, 3, 32, 32)).permute(0, 2, 3, 1).contiguous()
    return images, torch.tensor(labels, dtype=torch.long)


def read_cifar(folder: Path, layout: Layout) -> tuple[tuple[str, ...], dict[str, tuple[Tensor, Tensor]]]:
    """The names of the classes, and the images and labels of the splits ``train`` and ``test``."""
    names = _read_pickle(folder / layout.meta, {layout.names: [str]})[layout.names]
    splits = {}
    for split, files in (("train", layout.train), ("test", layout.test)):
        parts = [_read_images(folder / file, layout.labels) for file in files]
        splits[split] = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    return tuple(names), splits

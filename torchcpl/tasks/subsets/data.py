"""Labelled features: embedded digits, CIFAR through a frozen ResNet-18, or any ``.npz``."""

from __future__ import annotations

import hashlib
import io
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchcpl.checks import check_tensor, describe
from torchcpl.encoders.resnet import ResNet18, load_resnet18, prepare
from torchcpl.files import about, extra, read_npz, track, write_atomic
from torchcpl.tasks.subsets.cifar import LAYOUTS, read_cifar
from torchcpl.vectors import scaled

EMBEDDING = "resnet18 224 bilinear float32"  # part of the cache key: the preprocessing
IMAGES_AT_ONCE = 256  # through the ResNet-18


@dataclass(frozen=True, eq=False)
class Features:
    """Labelled feature vectors in two splits that share no row."""

    train: Tensor  # (M, d) float32
    train_labels: Tensor  # (M,) long, index into ``class_names``
    test: Tensor  # (M', d)
    test_labels: Tensor  # (M',)
    class_names: tuple[str, ...]
    images: Tensor | None = None  # (n, H, W) or (n, H, W, 3) uint8, of some test rows, for figures
    image_rows: Tensor | None = None  # (n,) long, the row in ``test`` of each image

    def __post_init__(self) -> None:
        check_tensor("train", self.train, ("M", "d"), "float")
        if self.train.shape[1] == 0:
            raise ValueError("train: expected at least one feature, got none")
        check_tensor("test", self.test, ("M", self.train.shape[1]), "float")
        for split in ("train", "test"):
            features, labels = getattr(self, split), getattr(self, f"{split}_labels")
            check_tensor(f"{split}_labels", labels, (features.shape[0],), "long")
            if len(labels) == 0:
                raise ValueError(f"{split}: expected at least one row, got none")
            if not features.isfinite().all():
                raise ValueError(f"{split}: expected finite features, got NaN or infinity")
            if labels.min() < 0 or labels.max() >= len(self.class_names):
                raise ValueError(
                    f"{split}_labels: expected 0 to {len(self.class_names) - 1} "
                    f"({len(self.class_names)} class names), got {int(labels.min())} to {int(labels.max())}"
                )
        if (self.images is None) != (self.image_rows is None):
            raise ValueError("images, image_rows: expected both or neither")
        if self.images is not None and self.image_rows is not None:
            shape = tuple(self.images.shape)
            if self.images.dtype != torch.uint8 or not (len(shape) == 3 or shape[3:] == (3,)) or 0 in shape[1:]:
                raise ValueError(f"images: expected uint8 (n, H, W) or (n, H, W, 3), got {describe(self.images)}")
            check_tensor("image_rows", self.image_rows, (shape[0],), "long")
            if ((self.image_rows < 0) | (self.image_rows >= len(self.test))).any():
                raise ValueError(f"image_rows: expected rows of test, 0 to {len(self.test) - 1}")


def load_source(
    source: str | Path, *, root: str | Path = "", weights: str | Path = "", device: str = "cpu"
) -> Features:
    """The labelled features that ``source`` names, on the CPU.

    - ``"digits"``: scikit-learn's 1,797 embedded images of handwritten digits, 64 pixel values in [0, 1].
      A fifth of the images of each class is the test split.
    - ``"cifar100"``, ``"cifar10"``: the pictures under ``root`` in torchvision's layout
      (``cifar-100-python/train`` …, ``cifar-10-batches-py/data_batch_1`` …) through the ResNet-18 whose
      ``weights`` (``.safetensors``, ``.pth`` or ``.pt``) are given, at 224 px, on ``device``. The features are
      kept in ``torchcpl`` in the user's cache folder, under a hash of the data and weights files' content.
    - a path to an ``.npz`` with ``train, train_labels, test, test_labels``, or with ``features, labels``
      (split like digits). Optional: ``scale``, which multiplies the features, and ``class_names``, which the
      labels then index; other arrays are ignored. Images for pictures are taken from ``test_images.npz``
      beside it (``images``, and their ``rows`` in ``test``) where there is one.
    """
    if source == "digits":
        return _digits()
    if source in LAYOUTS:
        if not root or not weights:
            raise ValueError(f"{source}: needs root (the folder of the data) and weights (a ResNet-18 file)")
        return _cifar(str(source), Path(root), Path(weights), device)
    path = Path(source)
    if path.suffix != ".npz":
        known = ", ".join(("digits", *LAYOUTS))
        raise ValueError(f"source: expected one of {known} or a path to an .npz, got {str(source)!r}")
    return _npz(path)


def split_classes(features: Features, share: float, seed: int = 0, least: int = 1) -> Features:
    """Classes apart: ``train`` has those seen, ``test`` round(share · C) others, at least ``least``.

    Those seen come first in ``np.random.RandomState(seed).permutation`` of the C classes there are.
    """
    classes = features.train_labels.unique().cpu().numpy()
    order = classes[np.random.RandomState(seed).permutation(len(classes))]
    count = max(round(share * len(classes)), least)
    if len(classes) < count + least:
        raise ValueError(
            f"split: expected at least {count + least} classes, {least} to train on and {count} apart from these, "
            f"got {len(classes)}"
        )
    apart = torch.from_numpy(order[len(order) - count :])
    train = ~torch.isin(features.train_labels, apart.to(features.train_labels.device))
    test = torch.isin(features.test_labels, apart.to(features.test_labels.device))
    images, rows = features.images, features.image_rows
    if images is not None and rows is not None:
        shown = test[rows]
        images, rows = images[shown], (test.cumsum(0) - 1)[rows[shown]]
    return Features(
        features.train[train], features.train_labels[train], features.test[test], features.test_labels[test],
        features.class_names, images, rows,
    )  # fmt: skip


def split_rows(
    x: Tensor, labels: Tensor, class_names: tuple[str, ...], fraction: float = 0.2, images: Tensor | None = None
) -> Features:
    """Of each class round(fraction · size) random rows, at least one and not all, are ``test``, the rest ``train``."""
    generator = torch.Generator().manual_seed(0)
    held = torch.zeros(len(labels), dtype=torch.bool)
    for label, count in enumerate(labels.bincount().tolist()):
        if count == 1:
            raise ValueError(f"class {class_names[label]}: a split needs at least 2 rows, got 1")
        some = torch.randperm(count, generator=generator)[: min(max(round(fraction * count), 1), count - 1)]
        held[(labels.cpu() == label).nonzero()[some, 0]] = True
    held = held.to(labels.device)
    test_images = () if images is None else (images[held], torch.arange(int(held.sum())))
    return Features(x[~held], labels[~held], x[held], labels[held], class_names, *test_images)


# ---------------------------------------------------------------------------------------------- sources


def _digits() -> Features:
    with extra():
        from sklearn.datasets import load_digits
    data = load_digits()
    return split_rows(
        torch.from_numpy(data.data / 16).float(),
        torch.from_numpy(data.target).long(),
        tuple(str(name) for name in data.target_names),
        images=torch.from_numpy(data.images * (255 / 16)).round().to(torch.uint8),
    )


def _npz(path: Path) -> Features:
    arrays = read_npz(path)
    pair, quad = {"features", "labels"}, {"train", "train_labels", "test", "test_labels"}
    if pair <= arrays.keys() and not quad & arrays.keys():
        parts = {"features": arrays["labels"]}
    elif quad <= arrays.keys() and not pair & arrays.keys():
        parts = {"train": arrays["train_labels"], "test": arrays["test_labels"]}
    else:
        raise ValueError(
            f"{path}: expected the arrays train, train_labels, test, test_labels, or features, labels; "
            f"got {', '.join(sorted(arrays)) or 'none'}"
        )
    matrices = {}
    for name, given in parts.items():
        matrices[name] = torch.from_numpy(scaled(f"{path}: {name}", arrays[name], arrays, {2: "(M, d)"}))
        if given.shape != (len(matrices[name]),):
            raise ValueError(f"{path}: labels of {name}: expected {(len(matrices[name]),)}, got {given.shape}")
    labels, class_names = _encode_labels(path, parts, arrays.get("class_names"))
    with about(path):
        if "features" in parts:
            return split_rows(matrices["features"], labels["features"], class_names)
        found = Features(matrices["train"], labels["train"], matrices["test"], labels["test"], class_names)
    return _with_images(found, path.with_name("test_images.npz"))


def read_bags(path: Path, column: str) -> list[Tensor]:
    """Unlabelled bags, each (N, d): the array ``column`` of a file, or ``features`` by any name if it is the only one.

    It is (N, d) or (B, N, d). ``scale`` multiplies it, ``shift`` is added, and a ``mask`` (B, N) tells which items of a
    bag are real.
    """
    if path.suffix not in (".npy", ".npz"):
        raise ValueError(f"{path}: expected features in a .npy or .npz file")
    arrays = read_npz(path)
    beside: dict[str, NDArray[Any]] = {n: arrays.pop(n) for n in ("scale", "shift", "mask") if n in arrays}
    alone = len(arrays) == 1 and column in ("", "features")
    array = next(iter(arrays.values())) if alone else arrays.get(column)
    if array is None:
        raise ValueError(f"{path}: expected an array {column}, got {', '.join(arrays) or 'none'}")
    values = torch.from_numpy(scaled(str(path), array, beside, {2: "(N, d)", 3: "(B, N, d)"}))
    bags = values if values.dim() == 3 else values[None]
    mask = beside.get("mask", np.ones(bags.shape[:2], bool))
    if mask.shape != bags.shape[:2] or mask.dtype != bool:
        raise ValueError(f"{path}: mask: expected {tuple(bags.shape[:2])} of bool, got {mask.shape} {mask.dtype}")
    return [bag[real] for bag, real in zip(bags, torch.from_numpy(mask), strict=True)]


def _encode_labels(
    path: Path, given: dict[str, NDArray[Any]], names: NDArray[Any] | None
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Labels as indices into ``names``, or into the sorted distinct labels."""
    whole = all(part.dtype.kind in "iu" for part in given.values())
    if names is not None:
        if names.ndim != 1 or names.dtype.kind not in "US" or not whole:
            raise ValueError(f"{path}: expected class_names (C,) of strings and labels of whole numbers")
        if any(part.size and not 0 <= part.min() <= part.max() < len(names) for part in given.values()):
            raise ValueError(f"{path}: labels: expected 0 to {len(names) - 1}, as there are class_names")
        texts = [name.decode(errors="replace") if isinstance(name, bytes) else str(name) for name in names]
        return {key: torch.from_numpy(part.astype(np.int64)) for key, part in given.items()}, tuple(texts)
    if not whole and not all(part.dtype.kind == "U" for part in given.values()):
        kinds = ", ".join(str(part.dtype) for part in given.values())
        raise ValueError(f"{path}: labels: expected whole numbers or strings, got {kinds}")
    distinct = np.unique(np.concatenate(list(given.values())))
    codes = {key: torch.from_numpy(np.searchsorted(distinct, part)).long() for key, part in given.items()}
    return codes, tuple(str(value) for value in distinct)


def _with_images(features: Features, path: Path) -> Features:
    if not path.is_file():
        return features
    arrays = read_npz(path)
    if not {"images", "rows"} <= arrays.keys():
        raise ValueError(f"{path}: expected the arrays images and rows; got {', '.join(arrays)}")
    if arrays["images"].dtype != np.uint8 or arrays["rows"].dtype.kind not in "iu":
        kinds = f"{arrays['images'].dtype} and {arrays['rows'].dtype}"
        raise ValueError(f"{path}: expected images of uint8 and rows of whole numbers; got {kinds}")
    images, rows = torch.from_numpy(arrays["images"]), torch.from_numpy(arrays["rows"].astype(np.int64))
    with about(path):
        return replace(features, images=images, image_rows=rows)


def _cifar(name: str, root: Path, weights: Path, device: str) -> Features:
    layout = LAYOUTS[name]
    folder = root / layout.folder
    class_names, splits = read_cifar(folder, layout)
    net = load_resnet18(weights)
    key = hashlib.sha256(EMBEDDING.encode())
    for path in (*(folder / file for file in (*layout.train, *layout.test)), weights):
        key.update(hashlib.sha256(path.read_bytes()).digest())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchcpl"
    kept = cache / f"{name}-{key.hexdigest()[:32]}.npz"
    if kept.is_file():
        arrays = read_npz(kept)
    else:
        net = net.to(device)
        arrays = {split: _embed(images, net, f"{name} {split}").numpy() for split, (images, _) in splits.items()}
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)  # type: ignore[arg-type]
        write_atomic(kept, buffer.getvalue())
    for split, (images, _) in splits.items():
        array = arrays.get(split)
        if array is None or array.shape != (len(images), net.channels) or array.dtype != np.float32:
            raise ValueError(f"{kept}: not the features of {name}; delete this file to compute them again")
    train, test = torch.from_numpy(arrays["train"]), torch.from_numpy(arrays["test"])
    images, labels = splits["test"]
    with about(folder):
        return Features(train, splits["train"][1], test, labels, class_names, images, torch.arange(len(images)))


@torch.inference_mode()
def _embed(images: Tensor, net: ResNet18, title: str) -> Tensor:
    """Pooled features (n, channels) of images (n, H, W, 3) uint8."""
    batches = images.split(IMAGES_AT_ONCE)
    return torch.cat([net.features(prepare(b.to(net.conv1.weight.device))).cpu() for b in track(batches, title)])

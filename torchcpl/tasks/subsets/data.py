"""Data of the representative-subsets task: labelled features, and bags drawn from them on any device.

A source (embedded digits, CIFAR through a frozen ResNet-18, or any ``.npz``) becomes :class:`Features`; a
:class:`BagSampler` draws :class:`Bags` from one of its two splits.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from torchcpl.checks import check_count, check_tensor, describe
from torchcpl.encoders.resnet import ResNet18, load_resnet18, prepare
from torchcpl.results import read_npz

SOURCES = ("digits", "cifar100", "cifar10")
TEST_FRACTION, SPLIT_SEED = 0.2, 0  # for sources that come without a test split
EMBEDDING = "resnet18 224 bilinear float32"  # part of the cache key: what is done to an image


@dataclass(frozen=True, eq=False)
class Features:
    """Labelled feature vectors in two splits that share no image.

    Attributes:
        train, test: (M, d) float32.
        train_labels, test_labels: (M,) long, index into ``class_names``.
        class_names: the name of each class.
        images: (n, H, W) or (n, H, W, 3) uint8 images of some test rows, for pictures.
        image_rows: (n,) long, the row in ``test`` of each image.
    """

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor
    class_names: tuple[str, ...]
    images: Tensor | None = None
    image_rows: Tensor | None = None

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
    source: str | os.PathLike[str],
    *,
    root: str | os.PathLike[str] | None = None,
    weights: str | os.PathLike[str] | None = None,
    cache: str | os.PathLike[str] | None = None,
    device: str | torch.device = "cpu",
    batch_size: int = 256,
    progress: bool = True,
) -> Features:
    """The labelled features that ``source`` names, on the CPU.

    - ``"digits"``: scikit-learn's 1,797 embedded images of handwritten digits, 64 pixel values in [0, 1].
      A fifth of the images of each class is the test split.
    - ``"cifar100"``, ``"cifar10"``: the pictures under ``root`` in torchvision's layout
      (``cifar-100-python/train`` …, ``cifar-10-batches-py/data_batch_1`` …) through the ResNet-18 whose
      ``weights`` file is given, at 224 px. The features are kept in the folder ``cache`` under a hash of the
      data and weights files' content.
    - a path to an ``.npz`` with ``train, train_labels, test, test_labels``, or with ``features, labels``
      (split like digits). Optional: ``scale``, which multiplies the features, and ``class_names``, which the
      labels then index; other arrays are ignored. Images for pictures are taken from ``test_images.npz``
      beside it (``images``, and their ``rows`` in ``test``) where there is one.

    Args:
        source: one of the names above, or a path.
        root: folder of the CIFAR data.
        weights: ResNet-18 weights, ``.safetensors`` or ``.pth``/``.pt``.
        cache: folder for computed features, by default ``torchcpl`` in the user's cache folder.
        device: where the ResNet-18 runs.
        batch_size: images per pass of the ResNet-18.
        progress: show a progress bar while it runs.
    """
    if source == "digits":
        return _digits()
    if source in ("cifar100", "cifar10"):
        if root is None or weights is None:
            raise ValueError(f"{source}: needs root (the folder of the data) and weights (a ResNet-18 file)")
        check_count("batch_size", batch_size, 1)
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(cache) if cache is not None else Path(home) / "torchcpl"
        return _cifar(str(source), Path(root), Path(weights), folder, device, batch_size, progress)
    path = Path(source)
    if path.suffix != ".npz":
        raise ValueError(f"source: expected one of {', '.join(SOURCES)} or a path to an .npz, got {str(source)!r}")
    return _npz(path)


def split_held_out(features: Features, fraction: float = 0.2, seed: int = 0) -> Features:
    """Set aside part of the *training* images of each class: a development split.

    The result's ``test`` is the held-out part of ``features.train``; the reported test images are not in it.
    """
    return _divide(features.train, features.train_labels, features.class_names, fraction, seed)


def _divide(
    x: Tensor,
    labels: Tensor,
    class_names: tuple[str, ...],
    fraction: float = TEST_FRACTION,
    seed: int = SPLIT_SEED,
    images: Tensor | None = None,
) -> Features:
    """Two splits: round(fraction · size) images of each class, never all or none, are the test."""
    if not 0 < fraction < 1:
        raise ValueError(f"fraction: expected a number between 0 and 1, got {fraction!r}")
    generator = torch.Generator().manual_seed(seed)
    held = torch.zeros(len(labels), dtype=torch.bool)
    for label, count in enumerate(labels.bincount().tolist()):
        if count == 1:
            raise ValueError(f"class {class_names[label]}: a split needs at least 2 images, got 1")
        some = torch.randperm(count, generator=generator)[: min(max(round(fraction * count), 1), count - 1)]
        held[(labels.cpu() == label).nonzero()[some, 0]] = True
    held = held.to(labels.device)
    test_images = () if images is None else (images[held], torch.arange(int(held.sum())))
    return Features(x[~held], labels[~held], x[held], labels[held], class_names, *test_images)


# ---------------------------------------------------------------------------------------------- sources


def _digits() -> Features:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("the digits source needs: pip install 'torchcpl[tasks]'") from error
    data = load_digits()
    return _divide(
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
    scale = arrays.get("scale", np.ones((), np.float32))
    matrices = {}
    for name, given in parts.items():
        matrix = arrays[name]
        if matrix.ndim != 2 or matrix.dtype.kind not in "iuf":
            raise ValueError(f"{path}: {name}: expected (M, d) numbers, got {matrix.shape} {matrix.dtype}")
        if given.shape != matrix.shape[:1]:
            raise ValueError(f"{path}: labels of {name}: expected {matrix.shape[:1]}, got {given.shape}")
        if scale.shape not in ((), matrix.shape[1:]) or scale.dtype.kind not in "iuf":
            raise ValueError(f"{path}: scale: expected () or {matrix.shape[1:]} numbers, got {scale.shape}")
        with np.errstate(over="ignore"):  # Features refuses infinities, and says so
            matrices[name] = torch.from_numpy(matrix.astype(np.float32) * scale.astype(np.float32))
    labels, class_names = _encode_labels(path, parts, arrays.get("class_names"))
    try:
        if "features" in parts:
            return _divide(matrices["features"], labels["features"], class_names)
        found = Features(matrices["train"], labels["train"], matrices["test"], labels["test"], class_names)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return _with_images(found, path.with_name("test_images.npz"))


def _encode_labels(
    path: Path, given: dict[str, NDArray[Any]], names: NDArray[Any] | None
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Labels as indices into the class names: into ``names``, or into the distinct labels themselves."""
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
    try:
        return replace(features, images=images, image_rows=rows)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


# ------------------------------------------------------------------------------------------------ CIFAR


class _Dtype:
    """Stands for numpy.dtype: CIFAR holds uint8 arrays and no others."""

    def __init__(self, name: Any, *_: Any) -> None:
        if name not in ("u1", b"u1"):
            raise pickle.UnpicklingError(f"array of {name!r}, expected u1")

    def __setstate__(self, state: Any) -> None:
        """Byte order and alignment mean nothing for single bytes."""


class _Array:
    """Stands for numpy's array factory; the array itself is built from plain bytes."""

    value: NDArray[np.uint8]

    def __init__(self, *_: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, raw = state
        if not isinstance(dtype, _Dtype):
            raise pickle.UnpicklingError("array without a dtype")
        raw = raw.encode("latin1") if isinstance(raw, str) else raw  # Python 2 wrote its bytes as str
        self.value = np.frombuffer(raw, np.uint8).reshape(shape, order="F" if fortran else "C")


def _latin1(text: str, encoding: str) -> bytes:
    """Stands for _codecs.encode, by which protocol 2 spells bytes in Python 3."""
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
class _Layout:
    """Where torchvision puts a CIFAR dataset, and what the files call things."""

    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    meta: str
    labels: str
    names: str


LAYOUTS = {
    "cifar100": _Layout("cifar-100-python", ("train",), ("test",), "meta", "fine_labels", "fine_label_names"),
    "cifar10": _Layout(
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


def _cifar(
    name: str,
    root: Path,
    weights: Path,
    cache: Path,
    device: str | torch.device,
    batch_size: int,
    progress: bool,
) -> Features:
    layout = LAYOUTS[name]
    folder = root / layout.folder
    (class_names,) = _read_pickle(folder / layout.meta, (layout.names,))
    if not isinstance(class_names, list) or not all(isinstance(text, str) for text in class_names):
        raise ValueError(f"{folder / layout.meta}: {layout.names}: expected a list of strings")
    splits: dict[str, tuple[Tensor, Tensor]] = {}
    for split, files in (("train", layout.train), ("test", layout.test)):
        parts = [_read_images(folder / file, layout.labels) for file in files]
        splits[split] = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])

    net = load_resnet18(weights)
    read = [*(folder / file for file in (*layout.train, *layout.test)), weights]
    kept = cache / f"{name}-{_content_key(read)}.npz"
    if kept.is_file():
        arrays = read_npz(kept)
    else:
        net = net.to(device)
        arrays = {
            split: _embed(images, net, batch_size, f"{name} {split}" if progress else None).numpy()
            for split, (images, _) in splits.items()
        }
        _write_atomically(kept, lambda file: np.savez(file, **arrays))  # type: ignore[arg-type]
    for split, (images, _) in splits.items():
        array = arrays.get(split)
        if array is None or array.shape != (len(images), net.channels) or array.dtype != np.float32:
            raise ValueError(f"{kept}: not the features of {name}; delete this file to compute them again")
    train, test = torch.from_numpy(arrays["train"]), torch.from_numpy(arrays["test"])
    (_, train_labels), (pictures, test_labels) = splits["train"], splits["test"]
    rows = torch.arange(len(pictures))
    try:
        return Features(train, train_labels, test, test_labels, tuple(class_names), pictures, rows)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


@torch.inference_mode()
def _embed(images: Tensor, net: ResNet18, batch_size: int, title: str | None) -> Tensor:
    """Pooled features (n, channels) of images (n, H, W, 3) uint8."""
    device = net.conv1.weight.device
    out = torch.empty(len(images), net.channels)
    starts: Any = range(0, len(images), batch_size)
    if title is not None:
        try:
            from rich.progress import track
        except ImportError as error:
            raise ImportError("the progress bar needs: pip install 'torchcpl[tasks]'") from error
        starts = track(starts, description=title)
    for start in starts:
        batch = prepare(images[start : start + batch_size].to(device))
        out[start : start + batch_size] = net.features(batch).cpu()
    return out


def _content_key(files: list[Path]) -> str:
    """A hash of what is in the files, in this order, and of what is done to them."""
    key = hashlib.sha256(EMBEDDING.encode())
    for path in files:
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        key.update(digest.digest())
    return key.hexdigest()[:32]


def _write_atomically(path: Path, write: Callable[[Any], None]) -> None:
    """All of the file or none of it: written beside its place, then moved there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


# ------------------------------------------------------------------------------------------------- bags


@dataclass(frozen=True)
class BagProtocol:
    """How a bag is drawn; the defaults are the paper's.

    k ~ U{min_classes … max_classes} classes without replacement, n_c ~ U{min_per_class … max_per_class}
    members of each without replacement (all of them where a class has fewer), and of these at most
    ``max_items``, a random subset.
    """

    min_classes: int = 3
    max_classes: int = 10
    min_per_class: int = 12
    max_per_class: int = 40
    max_items: int = 160

    def __post_init__(self) -> None:
        for field in fields(self):
            check_count(field.name, getattr(self, field.name), 1)
        for low, high in (("min_classes", "max_classes"), ("min_per_class", "max_per_class")):
            if getattr(self, low) > getattr(self, high):
                raise ValueError(f"{low}: expected at most {high} = {getattr(self, high)}, got {getattr(self, low)}")


@dataclass(frozen=True, eq=False)
class Bags:
    """A batch of bags. Elements come in random order, padding last; N = max_items, K = max_classes.

    Attributes:
        features: (B, N, d), zero in padding.
        mask: (B, N) bool, True for an element.
        labels: (B, N) long, the class of each element, −1 in padding.
        target: (B, K) long, one random element of each class present, −1 after the last.
        rows: (B, N) long, the element's row in the sampler's features, −1 in padding.
    """

    features: Tensor
    mask: Tensor
    labels: Tensor
    target: Tensor
    rows: Tensor

    def __len__(self) -> int:
        return self.mask.shape[0]

    def to(self, device: str | torch.device) -> Bags:
        return Bags(*(getattr(self, field.name).to(device) for field in fields(self)))

    def split(self, size: int) -> Iterator[Bags]:
        """Consecutive batches of at most ``size`` bags."""
        check_count("size", size, 1)
        for start in range(0, len(self), size):
            yield Bags(*(getattr(self, field.name)[start : start + size] for field in fields(self)))


class BagSampler:
    """Draws bags from a labelled feature matrix, on its device, in a fixed number of tensor operations.

    A draw takes memory for B · max_classes · (size of the largest class) random numbers beside the bags.

    Args:
        features: (M, d) float.
        labels: (M,) long, at least 0; any values, not necessarily consecutive.
        protocol: how to draw. With fewer classes than ``max_classes``, k is at most their number.
    """

    def __init__(self, features: Tensor, labels: Tensor, protocol: BagProtocol | None = None) -> None:
        self.protocol = protocol = BagProtocol() if protocol is None else protocol
        check_tensor("features", features, ("M", "d"), "float")
        check_tensor("labels", labels, (features.shape[0],), "long", like=features)
        if len(labels) and labels.min() < 0:
            raise ValueError(f"labels: expected values of at least 0, got {int(labels.min())}")
        counts = torch.unique(labels, return_counts=True)[1]
        if len(counts) < protocol.min_classes:
            raise ValueError(
                f"labels: expected at least min_classes = {protocol.min_classes} classes, got {len(counts)}"
            )
        self.features, self.labels = features, labels
        self._by_class = labels.argsort(stable=True)  # rows, class after class
        self._counts, self._starts = counts, counts.cumsum(0) - counts
        self._largest = int(counts.max())

    def sample(self, batch_size: int, generator: torch.Generator) -> Bags:
        """Fresh bags: a pure function of the state of the generator, which lives on the features' device."""
        check_count("batch_size", batch_size, 1)
        if generator.device.type != self.features.device.type:
            raise ValueError(f"generator: expected one on {self.features.device}, got one on {generator.device}")
        tables = self._by_class, self._counts, self._starts
        return self._gather(*self._draw(batch_size, generator, *tables))

    def _gather(self, rows: Tensor, target: Tensor) -> Bags:
        mask = rows >= 0
        at = rows.clamp(min=0)
        features = self.features[at].masked_fill_(~mask[..., None], 0)  # (B, N, d)
        return Bags(features, mask, self.labels[at].masked_fill_(~mask, -1), target, rows)

    def _draw(
        self, B: int, generator: torch.Generator, by_class: Tensor, counts: Tensor, starts: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Rows (B, N) and target (B, max_classes), both −1 padded, on the device of the tables.

        Sorting random keys is drawing without replacement; a key of −1 keeps what is no candidate out.
        """
        p, device = self.protocol, by_class.device
        K = min(p.max_classes, len(counts))
        L = min(p.max_per_class, self._largest)

        def keys(*shape: int) -> Tensor:
            return torch.rand(shape, generator=generator, device=device)

        def whole(low: int, high: int, *shape: int) -> Tensor:
            return torch.randint(low, high + 1, shape, generator=generator, device=device)

        classes = keys(B, len(counts)).topk(K).indices  # (B, K)
        sizes = torch.minimum(whole(p.min_per_class, p.max_per_class, B, K), counts[classes])
        sizes = sizes * (torch.arange(K, device=device) < whole(p.min_classes, K, B, 1))  # unused slots: 0

        outside = torch.arange(self._largest, device=device) >= counts[classes][..., None]
        offsets = keys(B, K, self._largest).masked_fill_(outside, -1).topk(L).indices  # (B, K, L)
        unused = (torch.arange(L, device=device) >= sizes[..., None]).flatten(1)  # (B, K·L)

        # The shuffle that cuts the bag to size also hides which class an element was drawn for.
        N = min(p.max_items, K * L)
        kept = keys(B, K * L).masked_fill_(unused, -1).topk(N)
        padding = kept.values < 0  # (B, N), a tail: keys come in descending order
        slot = (kept.indices // L).masked_fill_(padding, -1)
        places = (starts[classes][..., None] + offsets).flatten(1).gather(1, kept.indices)
        rows = by_class[places.masked_fill_(padding, 0)].masked_fill_(padding, -1)

        # Fresh keys, so that a target's position in the bag says nothing about its being the target.
        same = slot[:, None, :] == torch.arange(K, device=device)[:, None]  # (B, K, N)
        best = keys(B, 1, N).expand(B, K, N).masked_fill(~same, -1).max(2)
        target = best.indices.masked_fill_(best.values < 0, -1)  # (B, K), a cut may have emptied a class
        first = (target < 0).long().argsort(dim=1, stable=True)
        return (
            F.pad(rows, (0, p.max_items - N), value=-1),
            F.pad(target.gather(1, first), (0, p.max_classes - K), value=-1),
        )


def fixed_bags(sampler: BagSampler, count: int, seed: int) -> Bags:
    """``count`` bags that depend on ``seed`` alone: drawn on the CPU, so alike on every device."""
    check_count("count", count, 1)
    generator = torch.Generator().manual_seed(seed)
    tables = (sampler._by_class.cpu(), sampler._counts.cpu(), sampler._starts.cpu())
    rows, target = sampler._draw(count, generator, *tables)
    device = sampler.features.device
    return sampler._gather(rows.to(device), target.to(device))

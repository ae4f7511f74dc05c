"""`Selector`: ``select`` as a scikit-learn estimator, which can be fine-tuned on bags."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from torchcpl.checks import check_choice, check_count, check_number, describe, short
from torchcpl.encoders.distances import DistanceModel, distances
from torchcpl.files import extra, write_atomic
from torchcpl.losses import subset_nll
from torchcpl.select import as_array, as_vectors, assign, load_model, select_by, shipped

with extra():
    from safetensors.torch import save
    from sklearn.base import BaseEstimator, ClusterMixin
    from sklearn.utils.validation import check_is_fitted, validate_data


class Selector(ClusterMixin, BaseEstimator):  # type: ignore[misc]
    """One representative of every group: ``Selector().fit(X)`` needs no labels and no training.

    With ``fit(bags, picks)``, a list of bags (N, D) and for each the rows one would pick, the pretrained model
    is fine-tuned first; a few hundred bags are enough. ``predict`` then picks from new bags.

    Args:
        size: how many to pick; by default as many as needed, between ``min_size`` and ``max_size``.
        metric: ``euclidean | cosine``.
        epochs, lr: of the fine-tuning.
        random_state: random seed; None is 0.

    Attributes:
        representatives_: (T,) rows of X, in order of picking.
        labels_: (N,) which of them each row belongs to.
        model_: the model, after ``fit(bags, picks)`` fine-tuned.
    """

    def __init__(
        self,
        size: int | None = None,
        *,
        metric: str = "euclidean",
        min_size: int = 1,
        max_size: int | None = None,
        epochs: int = 5,
        lr: float = 1e-4,
        random_state: int | None = 0,
    ) -> None:
        self.size = size
        self.metric = metric
        self.min_size = min_size
        self.max_size = max_size
        self.epochs = epochs
        self.lr = lr
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None) -> Selector:
        """Pick from the rows of X (N, D), or fine-tune on bags X with picks y."""
        check_choice("metric", self.metric, ("euclidean", "cosine"))  # new rows have no distances
        if _is_bags(X):
            return self._tune(X, y)
        X = validate_data(self, _detached(X), dtype=[np.float64, np.float32])
        self.model_ = copy.deepcopy(shipped("cpu"))
        self.representatives_ = self._picks(X)
        self.representative_vectors_ = X[self.representatives_]
        self.labels_ = assign(X, self.representatives_, self.metric).numpy()
        return self

    def predict(self, X: Any) -> Any:
        """For rows X (N, D) the representative each belongs to; for bags the rows picked of each."""
        check_is_fitted(self, "model_")
        if _is_bags(X):
            return [self._picks(_array(bag)) for bag in X]
        X = validate_data(self, _detached(X), dtype=[np.float64, np.float32], reset=False)
        check_is_fitted(self, "representatives_")
        rows = as_vectors(np.concatenate([X, self.representative_vectors_]), self.metric)
        return assign(rows, np.arange(len(X), len(rows)), self.metric).numpy()[: len(X)]

    def score(self, X: Any, y: Any = None) -> float:
        """For rows minus the mean distance to their representative, for bags the mean F1 of the picks against y.

        Every row belongs to the nearest pick of y; a pick is right if it is the first of its group.
        """
        if _is_bags(X):
            _check_picks(X, y)
            found: list[float] = []
            for bag, picks, wanted in zip(map(_array, X), self.predict(X), y, strict=True):
                labels = assign(bag, _rows(wanted, len(bag), len(found)), self.metric)
                found.append(2 * len(labels[picks].unique()) / (len(picks) + len(wanted)))
            return float(np.mean(found))
        labels = self.predict(X)
        X = _array(X)
        centres = self.representative_vectors_
        if self.metric == "cosine":
            X, centres = (a / np.linalg.norm(a, axis=1, keepdims=True).clip(1e-30) for a in (X, centres))
        return -float(np.linalg.norm(X - centres[labels], axis=1).mean())

    def save(self, path: str | Path) -> None:
        """The model, in float32, and the parameters as one safetensors file; no pickle."""
        check_is_fitted(self, "model_")
        said = json.dumps(self.get_params(), default=lambda value: value.item())
        save_model(path, self.model_, torch.float32, selector=said)

    @classmethod
    def load(cls, path: str | Path) -> Selector:
        """What ``save`` wrote, ready to ``predict`` from bags."""
        model, said = load_model(path)
        found = cls(**json.loads(said.get("selector", "{}")))
        found.model_ = model
        return found

    def _picks(self, X: NDArray[Any]) -> NDArray[np.int64]:
        between = (self.min_size, self.max_size)
        found = select_by(self.model_, X, self.size, self.metric, between, seed=self._seed())
        return found.indices[found.indices >= 0].numpy()

    def _seed(self) -> int:
        seed = 0 if self.random_state is None else self.random_state
        check_count("random_state", seed, 0)
        return int(seed)

    def _tune(self, bags: Sequence[Any], picks: Sequence[Any]) -> Selector:
        """Stochastic gradient steps of ``subset_nll``, eight bags each."""
        check_count("epochs", self.epochs, 1)
        check_number("lr", self.lr, "a number above 0", lambda value: 0 < value < float("inf"))
        _check_picks(bags, picks)
        d = [distances(as_vectors(_array(bag), self.metric), self.metric) for bag in bags]
        wanted = [_rows(pick, len(one), i) for i, (pick, one) in enumerate(zip(picks, d, strict=True))]
        model = copy.deepcopy(shipped("cpu"))
        model.train().requires_grad_(True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.lr)
        generator = torch.Generator().manual_seed(self._seed())
        for _ in range(self.epochs):
            for chosen in torch.randperm(len(d), generator=generator).split(8):
                batch, mask, target = _padded([d[i] for i in chosen], [wanted[i] for i in chosen])
                loss = subset_nll(model(batch, mask), target, 4, early_stop_weight=0.0, generator=generator)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        self.model_ = model.eval().requires_grad_(False)
        for name in ("representatives_", "representative_vectors_", "labels_"):  # of rows fitted before
            self.__dict__.pop(name, None)
        self.n_features_in_ = _array(bags[0]).shape[1]
        return self


def save_model(path: str | Path, model: DistanceModel, dtype: torch.dtype = torch.float16, /, **said: str) -> None:
    """Write a safetensors file for ``load_model``, the weights in ``dtype``, with ``said`` as metadata."""
    weights = {name: value.to("cpu", dtype) for name, value in model.state_dict().items()}
    write_atomic(path, save(weights, {**said, "model": json.dumps(model.widths)}))


def _is_bags(X: Any) -> bool:
    """Whether X is several bags: a list of matrices, or (B, N, D)."""
    first = X[0] if isinstance(X, list | tuple) and len(X) else None
    return getattr(X, "ndim", 0) == 3 or getattr(first, "ndim", 0) == 2


def _detached(X: Any) -> Any:
    return as_array("X", X).cpu().numpy() if isinstance(X, Tensor) else X


def _array(X: Any) -> NDArray[Any]:
    return np.asarray(_detached(X))


def _check_picks(bags: Any, y: Any) -> None:
    if not hasattr(y, "__len__") or len(y) != len(bags):
        raise ValueError(f"y: expected the picks of each of {len(bags)} bags, got {describe(y)}")


def _rows(picks: Any, n: int, bag: int) -> Tensor:
    rows = as_array("y", picks)
    indices = rows.dim() == 1 and len(rows) and not rows.is_floating_point() and rows.dtype != torch.bool
    if not indices or bool(((rows < 0) | (rows >= n)).any()) or len(rows.unique()) < len(rows):
        said = f"different rows from 0 to {n - 1} for bag {bag}"
        raise ValueError(f"y: expected {said}, got {short(rows.tolist())}")
    return rows.long()


def _padded(d: Sequence[Tensor], picks: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Distances (B, N, N), mask (B, N) and picks (B, T), −1 padded."""
    n = max(map(len, d))
    batch = torch.stack([pad(one, (0, n - len(one), 0, n - len(one))) for one in d])
    mask = torch.arange(n) < torch.tensor([[len(one)] for one in d])
    return batch, mask, pad_sequence(list(picks), batch_first=True, padding_value=-1)

"""Selector: scikit-learn's own checks, fine-tuning, files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torchcpl as cpl

checks = pytest.importorskip("sklearn.utils.estimator_checks")


@checks.parametrize_with_checks([cpl.Selector()])
def test_sklearn(estimator: Any, check: Any) -> None:
    check(estimator)


def bag(rng: np.random.Generator, groups: int) -> np.ndarray:
    return np.concatenate([rng.normal(size=(8, 3)) + 9 * rng.normal(size=3) for _ in range(groups)])


def test_rows_belong_to_the_nearest_representative() -> None:
    x = bag(np.random.default_rng(0), 4)
    found = cpl.Selector(size=4).fit(x)
    assert found.labels_[found.representatives_].tolist() == [0, 1, 2, 3]
    d = np.linalg.norm(x[:, None] - x[found.representatives_], axis=-1)
    assert found.labels_.tolist() == d.argmin(1).tolist() == found.predict(x).tolist()
    assert found.score(x) == pytest.approx(-d.min(1).mean())


def test_fine_tuning_learns_how_many_and_is_saved_without_pickle(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    bags = [bag(rng, 4) for _ in range(16)]
    picks = [[0, 8] for _ in bags]  # the groups of the first two rows only: fewer than there are
    found = cpl.Selector(epochs=6, lr=3e-3).fit(bags, picks)
    before = np.mean([len(cpl.select(x).tolist()) for x in bags])
    after = np.mean([len(rows) for rows in found.predict(bags)])
    assert after < before
    found.save(tmp_path / "s.safetensors")
    again = cpl.Selector.load(tmp_path / "s.safetensors")
    assert again.get_params() == found.get_params()
    saved = again.model_.state_dict()
    assert all(torch.equal(saved[name], value) for name, value in found.model_.state_dict().items())
    assert again.score(bags, picks) == found.score(bags, picks)


def test_bags_replace_what_was_fitted_before() -> None:
    x = bag(np.random.default_rng(0), 4)
    found = cpl.Selector(epochs=1).fit(x).fit([x], [[0]])
    assert not hasattr(found, "labels_")
    with pytest.raises(ValueError, match="not fitted"):
        found.predict(x)


def test_random_state_as_in_scikit_learn() -> None:
    x = bag(np.random.default_rng(0), 4)
    assert cpl.Selector(random_state=None).fit_predict(x).tolist() == cpl.Selector().fit_predict(x).tolist()
    with pytest.raises(ValueError, match="random_state: expected"):
        cpl.Selector(random_state=np.random.RandomState(0)).fit(x)


def test_bad_picks_are_named() -> None:
    x = [np.zeros((3, 2))]
    with pytest.raises(ValueError, match="bag 0"):
        cpl.Selector().fit(x, [[5]])
    for y in ([], None, 3):
        with pytest.raises(ValueError, match="each of 1 bags"):
            cpl.Selector().fit(x, y)
    fitted = cpl.Selector(epochs=1).fit(x, [[0]])
    for picks in ([], [0, 0], [True, False, False], ["a"], None):
        for use in (fitted.fit, fitted.score):
            with pytest.raises(ValueError, match="y: expected"):
                use(x, [picks])
    with pytest.raises(ValueError, match="lr: expected a number above 0, got str 'a'"):
        cpl.Selector(lr="a").fit(x, [[0]])


def test_new_rows_are_checked() -> None:
    x = bag(np.random.default_rng(0), 4)
    with pytest.raises(ValueError, match=r"got up to .*e\+3"):
        cpl.Selector().fit(x).predict(x * 1e30)
    with pytest.raises(ValueError, match="got zeros in rows 0, 1"):
        cpl.Selector(metric="cosine").fit(x).predict(0 * x[:2])


def test_tensors_may_have_gradients() -> None:
    x = bag(np.random.default_rng(0), 4)
    found = cpl.Selector().fit(torch.tensor(x, requires_grad=True))
    assert found.predict(torch.tensor(x, requires_grad=True)).tolist() == cpl.Selector().fit_predict(x).tolist()


def test_tensors_without_numbers_are_refused() -> None:
    x = bag(np.random.default_rng(0), 4)
    meta = torch.tensor(x, device="meta")
    fitted = cpl.Selector().fit(x)
    for call in (fitted.fit, fitted.predict, lambda x: fitted.fit([x], [[0]])):
        with pytest.raises(ValueError, match=r"X: expected a dense tensor of numbers, got .* on meta"):
            call(meta)


def test_a_search_over_sizes_of_numpy(tmp_path: Path) -> None:
    from sklearn.model_selection import GridSearchCV

    x = np.random.default_rng(1).permutation(bag(np.random.default_rng(0), 4))  # every fold has all groups
    search = GridSearchCV(cpl.Selector(), {"size": np.arange(2, 4)}, cv=2, error_score="raise").fit(x)
    assert search.best_params_ == {"size": 3}
    search.best_estimator_.save(tmp_path / "s.safetensors")
    assert cpl.Selector.load(tmp_path / "s.safetensors").size == 3


@pytest.mark.parametrize("y", [None, [[0, 8]]])
def test_distances_are_refused(y: Any) -> None:
    x = bag(np.random.default_rng(0), 4)
    d = np.linalg.norm(x[:, None] - x, axis=-1)
    with pytest.raises(ValueError, match="metric: expected one of 'euclidean', 'cosine', got 'precomputed'"):
        cpl.Selector(metric="precomputed").fit(d if y is None else [d], y)

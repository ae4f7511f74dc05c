"""What a user can get wrong: each mistake is one line that names the culprit, and leaves nothing behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from torchcpl.cli import main

TINY = {
    "epochs": 1, "bags": 8, "batch-size": 4, "validation-bags": 4, "dim": 16, "layers": 1, "heads": 2, "ffn": 16,
    "hidden": 8, "permutations": 2, "max-items": 24, "min-per-class": 2, "max-per-class": 6, "max-classes": 5,
    "device": "cpu",
}  # fmt: skip
X = np.random.default_rng(0).normal(size=(200, 8))
Y = np.repeat(np.arange(10), 20)
NAN = X.copy()
NAN[3, 2] = np.nan
FILES: dict[str, dict[str, Any]] = {
    "good": {"features": X, "labels": Y},
    "unlabelled": {"features": X},
    "nan": {"features": NAN, "labels": Y},
    "overflow": {"features": X * 1e200, "labels": Y},
    "widthless": {"features": X[:, :0], "labels": Y},
    "empty": {"features": X[:0], "labels": Y[:0]},
    "two-classes": {"features": X, "labels": Y % 2},
    "loners": {"features": X, "labels": np.arange(200)},
    "fractional": {"features": X, "labels": Y / 2},
    "short": {"features": X, "labels": Y[:-1]},
    "complex": {"features": X * 1j, "labels": Y},
    "objects": {"features": np.array([None] * 3), "labels": np.arange(3)},
    "uneven": {"train": X, "train_labels": Y, "test": X[:, :4], "test_labels": Y},
    "thin-test": {"train": X, "train_labels": Y, "test": X[:20], "test_labels": Y[:20]},
}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    np.savez("good.npz", **FILES["good"])
    return tmp_path


def train(*options: str) -> int:
    tiny = [part for name, value in TINY.items() for part in (f"--{name}", str(value))]
    return main(["train", "subsets", "--source", "good.npz", "--run", "run", *tiny, *options])


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("unlabelled", "expected the arrays train, train_labels, test, test_labels, or features, labels; got features"),
        ("nan", "expected finite features"),
        ("overflow", "expected finite features"),
        ("widthless", "expected at least one feature"),
        ("empty", "expected at least one row"),
        ("two-classes", "at least min_classes = 3 classes, got 2"),
        ("loners", "class 0: a split needs at least 2 rows"),
        ("fractional", "labels: expected whole numbers or strings"),
        ("short", "labels of features"),
        ("complex", "expected (M, d) numbers"),
        ("objects", "not a readable .npz of plain arrays"),
        ("uneven", "test: expected a float tensor of shape (M, 8)"),
        ("thin-test", "at least min_classes = 3 classes, got 1"),
    ],
)
def test_files_that_are_no_labelled_features(name: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(f"{name}.npz", **FILES[name])
    assert train("--source", f"{name}.npz") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--heads", "3"], "heads: expected a divisor of dim = 16, got 3"),
        (["--min-classes", "7"], "min_classes: expected at most max_classes = 5"),
        (["--min-classes", "11", "--max-classes", "50"], "at least min_classes = 11 classes, got 10"),
        (["--held-out", "nan"], "held_out"),
        (["--seed", "4294967296"], "seed = 4294967296: expected at most 4294967295"),
        (["--devices", "100000"], "devices = 100000: expected at most"),
        (["--lr", "inf"], "lr = inf: expected a finite number"),
        (["--lr", "1e30"], "epoch 1, step 1 (from 0): "),
        (["--early-stop-weight", "inf"], "early_stop_weight = inf: expected a finite number"),
        (["--source", "good.txt"], "a path to an .npz, got 'good.txt'"),
        (["--run", "good.npz"], "good.npz is a file"),
    ],
)
def test_settings_that_cannot_be(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(*options) == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_a_run_is_resumed_as_it_was_begun(capsys: pytest.CaptureFixture[str]) -> None:
    assert train() == 0
    for options, said in (
        (["--lr", "1"], "lr: 0.0005 -> 1.0"),
        (["--method", "threshold"], "method: 'cpl' -> 'threshold'"),
    ):
        assert train("--resume", *options) == 2
        assert said in capsys.readouterr().err
    Path("run/config.toml").write_text("batch_size = 4\n")  # another task's
    assert train("--resume") == 2
    assert "another configuration" in capsys.readouterr().err
    Path("run/config.toml").write_text("what is this")
    assert train("--resume") == 2
    assert "config.toml: not TOML" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--max-items", "1"], ["--max-classes", "10"], ["--min-per-class", "6"]])
@pytest.mark.parametrize("method", ["cpl", "threshold", "hungarian", "pointer"])
def test_odd_bags_are_bags(method: str, options: list[str]) -> None:
    assert train("--method", method, "--max-len", "60", *options) == 0

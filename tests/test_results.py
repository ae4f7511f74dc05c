"""JSON files, what stands beside a number, and checkpoints that were copied, damaged or swapped."""

from __future__ import annotations

import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_train import Toy, ToyConfig, assert_same_run, interrupt

import torchcpl.results
from torchcpl.results import (
    CheckpointError,
    extra,
    load_checkpoint,
    load_weights,
    read_json,
    run_info,
    write_atomic,
    write_json,
)
from torchcpl.train import fit


def test_json_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "table.json"
    value = {"rows": [{"method": "cpl", "clu_f1": 0.1 + 0.2, "ms": None}], "name": "ℓ₁"}
    write_json(path, value)
    assert read_json(path) == value
    assert json.loads(path.read_text(encoding="utf-8")) == value
    assert [p.name for p in path.parent.iterdir()] == ["table.json"]


@pytest.mark.parametrize("value", [float("nan"), {"x": [float("inf")]}, {"x": torch.zeros(1)}, {1, 2}])
def test_json_refuses_what_it_cannot_hold(tmp_path: Path, value: object) -> None:
    path = tmp_path / "x.json"
    write_json(path, "old")
    with pytest.raises(ValueError, match=r"x\.json: cannot be written as JSON"):
        write_json(path, value)
    assert read_json(path) == "old"


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    write_json(path, "old")

    def full(_: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        write_atomic(path, b"new")
    assert read_json(path) == "old"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    (tmp_path / ".x.json.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device.*x\.json"):
        write_json(tmp_path / "x.json", "new")
    assert not list(tmp_path.iterdir())


def test_unreadable_json(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent\.json: cannot be read: No such file"):
        read_json(tmp_path / "absent.json")
    path = tmp_path / "x.json"
    write_json(path, {"rows": [1, 2, 3]})
    whole = path.read_bytes()
    for data in (b"", whole[:9], b"\xff\xfe\x00\x01"):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"x\.json: not JSON"):
            read_json(path)


def test_run_info_names_what_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__spec__", None)
    monkeypatch.setattr(sys, "argv", ["/some/where/torchcpl", "train", "subsets", "--note", "two words"])
    info = run_info(seeds=[1, 2], device="cpu")
    assert info["command"] == "torchcpl train subsets --note 'two words'"
    assert info["seeds"] == [1, 2]
    assert info["versions"]["torch"] == torch.__version__
    assert info["versions"]["python"] == platform.python_version()
    assert "numpy" in info["versions"]
    assert info["device"].endswith(("thread", "threads"))
    assert json.loads(json.dumps(info)) == info
    monkeypatch.setattr(sys, "argv", ["/some/where/torchcpl/__main__.py", "demo"])
    for module in ("torchcpl.__main__", "torchcpl"):
        monkeypatch.setattr(main, "__spec__", ModuleSpec(module, None))
        assert run_info()["command"] == "python -m torchcpl demo"


def test_run_info_names_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "repository" / "package"
    package.mkdir(parents=True)
    (package / "results.py").write_text("x = 1\n")
    monkeypatch.setattr(torchcpl.results, "__file__", str(package / "results.py"))

    def git(*words: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        command = ["git", "-C", str(package), *identity, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def found() -> tuple[object, object]:
        info = run_info()
        return info["commit"], info["dirty"]

    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    assert found() == (None, None)  # no repository
    git("init", "..")
    (package.parent / "other.txt").write_text("y\n")
    git("add", "../other.txt")
    git("commit", "-m", "other")
    assert found() == (None, None)  # a repository that does not have the package
    git("add", "results.py")
    git("commit", "-m", "package")
    commit = git("rev-parse", "HEAD")
    assert found() == (commit, False)
    (package.parent / "table.json").write_text("{}\n")
    assert found() == (commit, False)  # a result is no change of the package
    (package / "results.py").write_text("x = 2\n")
    assert found() == (commit, True)


def test_load_weights_must_fit() -> None:
    model = torch.nn.Linear(3, 2)
    weights = {"weight": torch.ones(2, 3), "bias": torch.ones(2)}
    load_weights(model, weights, "here")
    assert bool((model.weight == 1).all())
    cases = [
        (
            {**weights, "weight": torch.ones(3, 2)},
            r"here does not fit the model: weight is \(3, 2\), expected \(2, 3\)",
        ),
        ({"weight": torch.ones(2, 3)}, r"bias is missing, expected \(2,\)"),
        ({**weights, "extra": torch.ones(1)}, r"extra is \(1,\), expected none"),
        ({f"layer{i}": torch.ones(1) for i in range(9)}, r"and 8 more"),
    ]
    for wrong, message in cases:
        with pytest.raises(CheckpointError, match=message):
            load_weights(model, wrong, "here")


def test_a_missing_package_is_named() -> None:
    with pytest.raises(ImportError, match=r"no_such_package is missing: pip install 'torchcpl\[tasks\]'"), extra():
        importlib.import_module("no_such_package")


def test_a_copy_of_a_run(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        fit(Toy(ToyConfig(), {6: interrupt}), tmp_path / "run", progress=False)
    fit(Toy(ToyConfig()), tmp_path / "whole", progress=False)
    shutil.copytree(tmp_path / "run", tmp_path / "linked", symlinks=True)
    shutil.copytree(tmp_path / "run", tmp_path / "flat")
    fit(Toy(ToyConfig()), tmp_path / "linked", resume=True, progress=False)
    assert_same_run(tmp_path / "linked", tmp_path / "whole")
    assert load_checkpoint(tmp_path / "flat", "last").state["step"] == 7
    with pytest.raises(CheckpointError, match="last is no link"):
        fit(Toy(ToyConfig()), tmp_path / "flat", resume=True, progress=False)


def test_damaged_and_foreign_checkpoints(tmp_path: Path) -> None:
    source, run = tmp_path / "source", tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        fit(Toy(ToyConfig(), {9: interrupt}), source, progress=False)
    shutil.copytree(source, run, symlinks=True)

    def refused(name: str, spoil: Callable[[Path], object], message: str) -> None:
        path = run / "last" / name
        whole = path.read_bytes()
        spoil(path)
        with pytest.raises(CheckpointError, match=message) as error:
            fit(Toy(ToyConfig()), run, resume=True, progress=False)
        assert str(path) in str(error.value)
        path.write_bytes(whole)

    def cut(path: Path) -> None:
        path.write_bytes(path.read_bytes()[:-5])

    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(bytes(data))

    for name in ("model.safetensors", "optimizer.pt", "config.toml"):
        refused(name, cut, "truncated or foreign")
        refused(name, flip, "damaged or foreign")
        refused(name, lambda path: path.write_bytes(b""), "truncated or foreign, 0 bytes")
        refused(name, lambda path: path.write_bytes(os.urandom(3000)), "truncated or foreign")
        refused(name, Path.unlink, "missing")
    other = {name: torch.zeros(7) for name in load_file(run / "last" / "model.safetensors")}
    refused("model.safetensors", lambda path: save_file(other, path), "truncated or foreign")
    refused("state.json", cut, "not JSON")
    refused("state.json", lambda path: path.write_text("[1]"), "expected an object")
    refused("state.json", lambda path: path.write_text('{"files": {}}'), "finished is missing")
    refused("state.json", Path.unlink, "cannot be read")
    # With all files back, and all of it unharmed, the run goes on.
    fit(Toy(ToyConfig()), run, resume=True, progress=False)

    with pytest.raises(CheckpointError, match="nowhere is no run"):
        load_checkpoint(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="which = 'first': expected 'best' or 'last'"):
        load_checkpoint(run, "first")
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(CheckpointError, match="its link leads nowhere"):
        load_checkpoint(run)

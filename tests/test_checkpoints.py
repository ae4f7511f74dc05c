"""Checkpoints that were copied, damaged or swapped."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_train import Toy, ToyConfig, assert_same_run, interrupt

from torchcpl.checkpoints import CheckpointError, load_checkpoint, load_weights
from torchcpl.train import fit


def test_load_weights_must_fit() -> None:
    model = torch.nn.Linear(3, 2)
    weights = {"weight": torch.ones(2, 3), "bias": torch.ones(2)}
    load_weights(model, weights, "here")
    assert bool((model.weight == 1).all())
    cases = [
        (
            {**weights, "weight": torch.ones(3, 2)},
            r"here does not fit the model: .*size mismatch for weight",
        ),
        ({"weight": torch.ones(2, 3)}, r"Missing key.*bias"),
        ({**weights, "extra": torch.ones(1)}, r"Unexpected key.*extra"),
    ]
    for wrong, message in cases:
        with pytest.raises(CheckpointError, match=message):
            load_weights(model, wrong, "here")


def test_a_copy_of_a_run(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        fit(Toy(ToyConfig(), {6: interrupt}), tmp_path / "run", progress=False)
    fit(Toy(ToyConfig()), tmp_path / "whole", progress=False)
    shutil.copytree(tmp_path / "run", tmp_path / "linked", symlinks=True)
    shutil.copytree(tmp_path / "run", tmp_path / "flat")
    fit(Toy(ToyConfig()), tmp_path / "linked", resume=True, progress=False)
    assert_same_run(tmp_path / "linked", tmp_path / "whole")
    assert load_checkpoint(tmp_path / "flat", "last").state["step"] == 7
    with pytest.raises(CheckpointError, match="last is not a link"):
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
        with pytest.raises(ValueError, match=message) as error:
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
        refused(name, cut, "truncated or replaced")
        refused(name, flip, "damaged or replaced")
        refused(name, lambda path: path.write_bytes(b""), "truncated or replaced, expected [0-9]+ bytes, got 0")
        refused(name, lambda path: path.write_bytes(os.urandom(3000)), "truncated or replaced")
        refused(name, Path.unlink, "missing")
    other = {name: torch.zeros(7) for name in load_file(run / "last" / "model.safetensors")}
    refused("model.safetensors", lambda path: save_file(other, path), "truncated or replaced")
    refused("state.json", cut, "not JSON")
    refused("state.json", lambda path: path.write_text("[1]"), "expected an object")
    refused("state.json", lambda path: path.write_text('{"files": {}}'), "epoch is missing")
    refused("state.json", Path.unlink, "cannot be read")
    # With all files back, and all of it unharmed, the run goes on.
    fit(Toy(ToyConfig()), run, resume=True, progress=False)

    with pytest.raises(CheckpointError, match="nowhere is not a run"):
        load_checkpoint(tmp_path / "nowhere")
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(CheckpointError, match="a broken link"):
        load_checkpoint(run)

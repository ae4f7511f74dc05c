"""Files: written whole or not at all, and errors that name them."""

from __future__ import annotations

import importlib
import json
import os
import re
from pathlib import Path

import pytest
import torch

from torchcpl.files import check_json, extra, read_json, write_atomic, write_json


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
    with pytest.raises(OSError, match=r"No space left on device.*/x\.json"):
        write_json(tmp_path / "x.json", "new")
    assert not list(tmp_path.iterdir())


def test_an_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "features.npz"
    path.write_bytes(b"before")

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomic(path, b"after")
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_unreadable_json(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent\.json: cannot be read: No such file"):
        read_json(tmp_path / "absent.json")
    path = tmp_path / "x.json"
    write_json(path, {"rows": [1, 2, 3]})
    whole = path.read_bytes()
    for data in (b"", whole[:9], b"\xff\xfe\x00\x01"):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"x\.json: (not JSON|cannot be read)"):
            read_json(path)


def test_a_missing_package_is_named() -> None:
    with pytest.raises(ImportError, match=r"no_such_package is missing: pip install 'torchcpl\[tasks\]'"), extra():
        importlib.import_module("no_such_package")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"n": 1, "x": [1.5, None], "any": {"a": "b"}}, ""),
        ({"n": 1, "x": [], "any": {}, "more": 3}, ""),
        ({"x": [], "any": {}}, ""),
        ([], "here: expected an object"),
        ({"n": 1, "any": {}}, "here: x is missing"),
        ({"n": -1, "x": [], "any": {}}, "here: n: expected an integer of at least 0 below 2**63, got -1"),
        ({"n": True, "x": [], "any": {}}, "here: n: expected an integer of at least 0, got True"),
        ({"x": [1, "2"], "any": {}}, "here: x: 1: expected a number or null or an integer of at least 0, got '2'"),
        ({"x": [1e300], "any": {}}, "here: x: 0: expected a number below 2**63"),
        ({"x": [], "any": {"a": 1}}, "here: any: a: expected text, got 1"),
    ],
)
def test_json_is_as_it_was_said_to_be(value: object, said: str) -> None:
    kind = {"n?": int, "x": [(float, type(None), int)], "any": {str: str}}
    if not said:
        check_json(value, kind, "here")
        return
    with pytest.raises(ValueError, match=re.escape(said)):
        check_json(value, kind, "here")

"""What stands beside a number."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch

import torchcpl.provenance
from torchcpl.provenance import run_info


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
    (package / "provenance.py").write_text("x = 1\n")
    monkeypatch.setattr(torchcpl.provenance, "__file__", str(package / "provenance.py"))

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
    git("add", "provenance.py")
    git("commit", "-m", "package")
    commit = git("rev-parse", "HEAD")
    assert found() == (commit, False)
    (package.parent / "table.json").write_text("{}\n")
    assert found() == (commit, False)  # a result is no change of the package
    (package / "provenance.py").write_text("x = 2\n")
    assert found() == (commit, True)

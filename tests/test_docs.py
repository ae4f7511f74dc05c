"""What the documents show is so: every Python block runs, in order, and every command is one that there is."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import torchcpl
from torchcpl.cli import _parser

ROOT = Path(__file__).parents[1]
DOCUMENTS = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if path.is_file()]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(path: Path, *languages: str) -> list[tuple[int, str]]:
    """The code blocks in one of the languages, with the line each begins on."""
    text = path.read_text(encoding="utf-8")
    found = [match for match in BLOCK.finditer(text) if match[1] in languages]
    return [(text[: match.start(2)].count("\n"), match[2]) for match in found]


def named(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


WITH_PYTHON = [path for path in DOCUMENTS if blocks(path, "python")]
WITH_COMMANDS = [path for path in DOCUMENTS if blocks(path, "sh", "bash", "console")]


@pytest.mark.parametrize("path", WITH_PYTHON, ids=named(WITH_PYTHON))
def test_python_blocks_run_one_after_the_other(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "document"}
    for line, code in blocks(path, "python"):
        try:
            exec(compile("\n" * line + code, str(path), "exec"), namespace)
        except ModuleNotFoundError as error:
            pytest.skip(f"line {line}: {error.name} is not installed")


@pytest.mark.parametrize("path", WITH_COMMANDS, ids=named(WITH_COMMANDS))
def test_commands_are_understood(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        line for _, code in blocks(path, "sh", "bash", "console") for line in code.replace("\\\n", " ").splitlines()
    ]
    for line in lines:
        words = shlex.split(line.removeprefix("$ "), comments=True)
        if words[:1] == ["torchcpl"]:
            try:
                _parser().parse_args(words[1:])
            except SystemExit:
                raise AssertionError(f"{line}: {capsys.readouterr().err}") from None


def test_nothing_is_said_to_be_where_it_is_not() -> None:
    for path in DOCUMENTS:
        assert "pip install torchcpl" not in path.read_text(encoding="utf-8"), path


def test_the_reference_has_every_public_name() -> None:
    listed = re.findall(r"^::: torchcpl\.(\w+)$", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(torchcpl.__all__) <= set(listed)

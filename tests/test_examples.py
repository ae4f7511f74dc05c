"""Every example runs, at a small size, and shows what it says; none is longer than a page."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SMALL = {
    "baskets.py": (["--steps", "150"], "complete: bread, coffee"),
    "own_encoder.py": (["--steps", "30"], "each group exactly once in"),
    "passages.py": (["--words", "45", "--require", "3"], "Honey is made from nectar"),
    "sentences.py": (["--size", "4"], "play"),
    "serve_onnx.py": ([], "picks: (5, 16) of (5, 200, 32)"),
    "tour.py": (["--page", "tour.html"], "the greatest sight is on each: True"),
    "video_frames.py": (["--scenes", "4", "--page", "frames.html"], "of 12 seconds"),
}


def test_all_are_run() -> None:
    assert {path.name for path in ROOT.glob("examples/*.py")} == set(SMALL)


@pytest.mark.parametrize("name", SMALL)
def test_example(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = ROOT / "examples" / name
    assert len(script.read_text(encoding="utf-8").splitlines()) < 60
    arguments, says = SMALL[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    runpy.run_path(str(script), run_name="__main__")  # not in a process of its own: torch takes seconds to import
    assert says in capsys.readouterr().out
    for page in (value for value in arguments if value.endswith(".html")):
        assert (tmp_path / page).stat().st_size < 1_500_000


@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/*.ipynb")), ids=lambda path: path.name)
def test_notebook(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was executed, shows pictures, and its cells run one after the other."""
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.chdir(tmp_path)
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    shown = [kind for cell in cells for output in cell["outputs"] for kind in output.get("data", {})]
    assert all(cell["execution_count"] for cell in cells)
    assert shown.count("image/png") >= 3
    namespace: dict[str, object] = {}
    for cell in cells:
        code = "".join(cell["source"]).replace("steps = 250", "steps = 20")
        exec(compile(code, str(path), "exec"), namespace)

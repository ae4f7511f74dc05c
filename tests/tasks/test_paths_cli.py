"""The paths task on the command line: scenes, a map never seen, and what is said when something is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lane_maps import save_map
from PIL import Image
from test_cli import refused

from torchcpl.cli import main
from torchcpl.tasks.paths.procedural import procedural_map
from torchcpl.tasks.paths.scenes import load_scenes

TINY = [
    "--epochs", "1", "--batch-size", "8", "--backbone", "patches", "--dim", "8", "--layers", "0", "--heads", "2",
    "--ffn", "8", "--hidden", "8", "--score-hidden", "8", "--max-len", "12", "--device", "cpu",
]  # fmt: skip


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("maps") / "town.json"
    save_map(procedural_map(junctions=12, shares=(1, 1, 1), seed=5), path)
    return path


def test_scenes_are_made_counted_split_stored_and_shown(
    town: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "scenes.npz"
    arguments = ["scenes", "--source", str(town), "--scenes", "20", "--seed", "2", "--out", str(out)]
    assert main([*arguments, "--show", "--split", "index", "geography"]) == 0
    said = capsys.readouterr().out
    scenes = load_scenes(out)
    counts = [int((scenes.counts == n).sum()) for n in (1, 2, 3)]
    assert f"20 scenes of procedural-5; valid paths: {counts[0]} with 1, {counts[1]} with 2, {counts[2]} with 3" in said
    assert "Split by index: 16 train, 0 held out, 4 val, 0 dropped" in said
    assert "Split by geography: " in said
    assert f"{out.stat().st_size / 1e6:.1f} MB" in said
    with Image.open(out.with_suffix(".png")) as sheet:
        assert sheet.width > 1000

    picture = tmp_path / "look.png"
    assert main(["scenes", "--source", str(out), "--show", str(picture)]) == 0  # from the file, which stays as it is
    assert picture.read_bytes() == out.with_suffix(".png").read_bytes()
    assert "Written" not in capsys.readouterr().out

    run = tmp_path / "run"
    assert main(["train", "paths", "--method", "threshold", "--source", str(out), "--run", str(run), *TINY]) == 0


def test_a_map_never_seen_trains_evaluates_and_compares(
    town: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runs"
    arguments = ["table", "paths", "--train", "--methods", "hungarian", "cpl", "--runs", str(folder), *TINY]
    assert main([*arguments, "--source", str(town.parent), "--scenes", "16", "--val", "0.5"]) == 0
    rows = json.loads((folder / "table.json").read_text())["rows"]
    assert [row["method"] for row in rows] == ["Hungarian", "CPL"]
    columns = {"min_ade", "min_hd", "off_road", "ms", "min_ade_n1", "min_ade_n2", "min_ade_n3", "min_ade_n4plus"}
    assert columns <= rows[0].keys()
    assert rows[0]["min_ade"] > 0
    assert rows[0]["min_ade_n4plus"] is None  # the map has no such junction
    capsys.readouterr()
    assert main(["evaluate", str(folder / "cpl-s0")]) == 0
    assert f"{rows[1]['min_ade']:.2f}" in capsys.readouterr().out
    out = tmp_path / "bench.json"
    timing = ["--batches", "1", "4", "--repeats", "1", "--examples", "2", "--out", str(out)]
    assert main(["bench", "paths", str(folder / "cpl-s0"), *timing]) == 0
    assert all(row["encoder_ms"] > 0 < row["decode_ms"] for row in json.loads(out.read_text())["rows"])


def test_maps_left_out_make_one_table_and_one_of_several_answers(
    town: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_map(procedural_map(junctions=12, shares=(0, 1, 1), seed=6), tmp_path / "a.json")
    save_map(procedural_map(junctions=12, shares=(1, 1, 1), seed=7), tmp_path / "b.json")
    scenes = tmp_path / "scenes.npz"
    assert main(["scenes", "--source", str(tmp_path), "--scenes", "12", "--out", str(scenes)]) == 0
    runs = []
    for name, method in (("procedural-6", "cpl"), ("procedural-7", "cpl"), ("procedural-7", "multi_hypothesis")):
        runs.append(str(tmp_path / f"{name}-{method}"))
        options = ["--split", f"map:{name}", "--held-out", "0.2", "--hypotheses", "2", "--run", runs[-1], *TINY]
        data = ["--source", str(scenes), "--scenes", "12"]
        assert main(["train", "paths", "--method", method, *data, *options]) == 0
    out = tmp_path / "table.json"
    assert main(["table", "paths", *runs, "--rule", "held-out", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["section"] for row in rows] == ["procedural-6 left out", *["procedural-7 left out"] * 2]
    assert main(["table", "paths", *runs, "--answers", "3", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["method"] for row in rows] == ["CPL", "Multi-hypothesis", "CPL"]
    assert all(0 <= row[name] <= 1 for row in rows for name in ("coverage", "stray", "miss", "ece", "ece_n2plus"))
    capsys.readouterr()
    assert main(["table", "paths", str(out), "--answers", "3", "--markdown"]) == 0
    assert "*procedural-7 left out*" in capsys.readouterr().out
    assert main(["evaluate", runs[0], "--source", str(town), "--json"]) == 0  # a map that no run knows


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "paths", "--source", "nowhere"], "source = 'nowhere'"),
        (["train", "paths", "--source", "nowhere.npz"], "nowhere.npz: no such file"),
        (["table", "paths", "run", "--no-flip"], "--flip: expected no settings together with RUN"),
        (["table", "paths", "run", "--jobs", "0"], "--jobs: expected no settings together with RUN"),
        (["table", "paths", "run", "--seeds", "1"], "--seeds: expected no settings together with RUN"),
        (["table", "paths", "run", "--train"], "--train: expected no settings together with RUN"),
        (["table", "paths", "run", "--answers", "0"], "answers: expected an integer of at least 1"),
        (["bench", "paths", "run", "--source", "procedural"], "--source: expected no settings together with RUN"),
        (["scenes", "--source", "nowhere.json"], "nowhere.json"),
        (["scenes", "--source", "broken.json"], "lane 'a': kind"),
        (["scenes", "--source", "foreign.npz", "--show"], "foreign.npz: not a readable .npz"),
        (["scenes", "--source", "some.npz", "--scenes", "5"], "--scenes: some.npz already has its scenes"),
        (["scenes", "--source", "some.npz", "--seed", "5"], "--seed: some.npz already has its scenes"),
        (["scenes", "--scenes", "4", "--out", "scenes.zip"], "scenes.zip: expected a name that ends in .npz"),
        (["scenes", "--scenes", "4", "--show", "scenes.jpg"], "scenes.jpg: expected a name that ends in .png"),
        (["scenes", "--scenes", "1"], "scenes = 1"),
        (["scenes", "--split", "random"], "split = 'random': expected index, geography or map:NAME"),
        (["train", "paths", "--scenes", "2", "--split", "map:x"], "'map:x': expected one of the maps procedural-0"),
    ],
)
def test_errors_are_one_line_and_name_the_culprit(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "foreign.npz").write_bytes(b"PK\x03\x04 cut")
    lane = {"kind": "tram", "centerline": [[0, 0], [1, 0]], "polygon": None, "successors": []}
    (tmp_path / "broken.json").write_text(json.dumps({"format": "lane-graph/1", "lanes": {"a": lane}, "lines": []}))
    assert said in refused(arguments, capsys)
    assert not (tmp_path / "runs").exists()


def test_help_tells_the_tasks_apart(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["train", "paths", "--help"], ["scenes", "--help"], ["demo", "--help"]):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 0
    out = capsys.readouterr().out
    for word in ("--hypotheses", "path prediction", "--show", "runs/demo-paths"):
        assert word in out

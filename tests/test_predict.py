"""A trained run on new data: in Python, from the command line, and as a function that others carry away."""

from __future__ import annotations

import csv
import hashlib
import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from lane_maps import save_map

import torchcpl as cpl
from torchcpl.cli import main
from torchcpl.predict import Predictor, predict_file
from torchcpl.tasks.paths.procedural import procedural_map
from torchcpl.tasks.paths.scenes import generate, save_scenes
from torchcpl.tasks.subsets.bags import unlabelled

SUBSETS = {
    "epochs": 1, "bags": 64, "batch_size": 16, "validation_bags": 8, "dim": 16, "layers": 1, "heads": 2, "ffn": 16,
    "hidden": 8, "permutations": 2, "max_items": 24, "min_per_class": 2, "max_per_class": 6, "max_classes": 5,
    "max_len": 8, "standardise": True, "device": "cpu",
}  # fmt: skip
PATHS = {
    "epochs": 1, "batch_size": 8, "backbone": "patches", "dim": 8, "layers": 0, "heads": 2, "ffn": 8, "hidden": 8,
    "max_len": 12, "device": "cpu",
}  # fmt: skip


def options(settings: dict[str, object]) -> list[str]:
    words = []
    for name, value in settings.items():
        flag = "--" + name.replace("_", "-")
        words += [flag] if value is True else [flag, str(value)]
    return words


def train_subsets(run: Path) -> Path:
    assert main(["train", "subsets", "--run", str(run), *options(SUBSETS)]) == 0
    return run


@pytest.fixture(scope="module")
def subsets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_subsets(tmp_path_factory.mktemp("runs") / "subsets")


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scenes") / "scenes.npz"
    save_scenes(generate([procedural_map(6)], 24, workers=1), path)
    return path


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory, scenes: Path) -> Path:
    run = tmp_path_factory.mktemp("runs") / "paths"
    assert main(["train", "paths", "--run", str(run), "--source", str(scenes), *options(PATHS)]) == 0
    return run


def bags(count: int = 3, items: int = 12) -> np.ndarray:
    return np.random.default_rng(0).random((count, items, 64)).astype(np.float32)


def test_a_run_selects_from_new_data(subsets: Path) -> None:
    model, x = cpl.load(subsets, device="cpu"), bags()
    chosen = model.select(x)
    assert isinstance(chosen, cpl.Selection)
    wanted = model.model.select(unlabelled([torch.from_numpy(bag) for bag in x], "cpu"), model.loaded.knob)
    assert torch.equal(chosen.indices, wanted.indices)
    # One at a time, as tensors, and padded beside a longer one.
    picks = chosen.tolist()
    assert [model.select(torch.from_numpy(bag)).tolist()[0] for bag in x] == picks
    assert model.select([x[0], bags(1, 20)[0], x[2]]).tolist()[::2] == picks[::2]


def test_a_copied_run_needs_neither_its_data_nor_its_device(subsets: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "own.npz", features=rng.normal(size=(200, 5)), labels=np.arange(200) % 5)
    own = ["--run", str(tmp_path / "run"), "--source", str(tmp_path / "own.npz")]
    assert main(["train", "subsets", *own, *options(SUBSETS)]) == 0
    x = rng.normal(size=(2, 9, 5))
    before = cpl.load(tmp_path / "run").select(x)
    shutil.copytree(tmp_path / "run", tmp_path / "elsewhere", symlinks=True)
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "own.npz").unlink()
    config = tmp_path / "elsewhere" / "best" / "config.toml"
    text = config.read_text().replace('device = "cpu"', 'device = "cuda"')
    state = json.loads((config.parent / "state.json").read_text())
    config.write_text(text)
    state["files"]["config.toml"] = {"bytes": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    (config.parent / "state.json").write_text(json.dumps(state))
    after = cpl.load(tmp_path / "elsewhere").select(x)
    assert torch.equal(after.indices.cpu(), before.indices.cpu())


def test_a_predictor_travels_and_maps_arrays_to_arrays(subsets: Path) -> None:
    predictor, x = Predictor(subsets), bags()
    wanted = cpl.load(subsets).select(x)
    _ = predictor.loaded
    carried = pickle.loads(pickle.dumps(predictor))
    assert "loaded" not in vars(carried)
    answer = carried({"features": x, "id": np.arange(3)})
    assert answer["id"].tolist() == [0, 1, 2]
    assert answer["indices"].shape == (3, 8)  # max_len, whatever the batch
    assert answer["indices"].tolist() == wanted.indices.tolist()
    assert carried(x)["lengths"].tolist() == wanted.lengths.tolist()  # as Spark calls it
    with pytest.raises(ValueError, match="expected a column features, got id"):
        carried({"id": np.arange(3)})


def test_items_of_no_group_are_refused(subsets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table({"features": bags()[0].tolist(), "bag": ["a", "b", None] * 4})
    parquet.write_table(table, tmp_path / "items.parquet")
    assert main(["predict", str(subsets), str(tmp_path / "items.parquet"), "--group", "bag"]) == 2
    assert "items.parquet: bag: expected a value in every row, got 4 nulls" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["npy", "npz"])
def test_predict_writes_picks(subsets: Path, form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x, file = bags(), tmp_path / f"new.{form}"
    picks = cpl.load(subsets).select(x).tolist()
    if form == "npy":
        np.save(file, x)
    else:
        np.savez(file, features=x, labels=np.zeros(3))
    assert main(["predict", str(subsets), str(file), "--out", str(tmp_path / "picks.json"), "--batch-size", "2"]) == 0
    written = json.loads((tmp_path / "picks.json").read_text())
    assert [record["picks"] for record in written["picks"]] == picks
    assert written["commit"] is None or len(written["commit"]) == 40
    assert main(["predict", str(subsets), str(file), "--out", str(tmp_path / "picks.csv")]) == 0
    with open(tmp_path / "picks.csv") as lines:
        rows = [(int(row["row"]), int(row["index"])) for row in csv.DictReader(lines)]
    assert rows == [(row, index) for row, chosen in enumerate(picks) for index in chosen]
    assert main(["predict", str(subsets), str(file), "--group", "bag"]) == 2
    assert "expected Parquet for --group" in capsys.readouterr().err
    assert main(["predict", str(subsets), str(file), "--limit", "1"]) == 0
    assert [record["picks"] for record in json.loads(capsys.readouterr().out)] == picks[:1]
    assert main(["predict", str(subsets), str(file), "--explore", str(tmp_path / "page.html")]) == 0
    assert [record["picks"] for record in json.loads(capsys.readouterr().out)] == picks  # JSON and nothing else
    assert main(["predict", str(subsets), str(file), "--limit", "-1"]) == 2
    assert "limit: expected an integer of at least 1" in capsys.readouterr().err


def test_errors_name_the_file_whatever_the_run_is_called(
    subsets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(subsets, "e", symlinks=True)
    np.save("narrow.npy", bags()[..., :5])
    with pytest.raises(ValueError, match=r"narrow\.npy: bag 0: expected at least one item of width 64"):
        predict_file(Predictor("e"), Path("narrow.npy"), None)
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    Path("b").mkdir()
    parquet.write_table(pyarrow.table({"features": [bags()[0, :, :5].tolist()]}), "b/part.parquet")
    with pytest.raises(ValueError, match=r"^b: bag 0: expected at least one item of width 64"):
        predict_file(Predictor("e"), Path("b"), None)


def test_predict_paths_of_scenes_and_of_a_map(paths: Path, scenes: Path, tmp_path: Path) -> None:
    save_map(procedural_map(5, seed=3), tmp_path / "other.json")
    for file, count in ((scenes, 24), (tmp_path / "other.json", 4)):
        out = tmp_path / "picks.json"
        assert main(["predict", str(paths), str(file), "--limit", str(count), "--out", str(out)]) == 0
        records = json.loads(out.read_text())["picks"]
        assert len(records) == count
        for record in records:
            assert len(record["points"]) == len(record["picks"]) > 0
            cells = [int(y // 8) * 32 + int(x // 8) for x, y in record["points"]]
            assert cells == record["picks"]


def test_evaluate_elsewhere(subsets: Path, paths: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "other.npz", features=rng.random((60, 64)), labels=np.repeat(["x", "y", "z"], 20))
    before = sorted(path.name for path in subsets.iterdir())
    capsys.readouterr()
    assert main(["evaluate", str(subsets), "--source", str(tmp_path / "other.npz"), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert 0 <= row["clu_f1"] <= 1
    assert sorted(path.name for path in subsets.iterdir()) == before
    save_scenes(generate([procedural_map(5, seed=3)], 10, seed=1, workers=1), tmp_path / "other-scenes.npz")
    assert main(["evaluate", str(paths), "--source", str(tmp_path / "other-scenes.npz"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["min_ade"] > 0


def test_what_does_not_fit_is_one_line_and_nothing_is_written(
    subsets: Path, paths: Path, scenes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, out = bags(), tmp_path / "picks.json"
    wrong = {
        "narrow": (good[..., :5], "width 64"), "nan": (np.where(good > 0.5, np.nan, good), "finite"),
        "empty": (good[:0], "at least one example"), "itemless": (good[:, :0], "at least one item"), 
        "text": (good.astype(str), "numbers"),
        "flat": (good[0, 0], "numbers"),
    }  # fmt: skip
    commands = []
    for name, (array, said) in wrong.items():
        np.save(tmp_path / f"{name}.npy", array)
        commands.append((["predict", str(subsets), str(tmp_path / f"{name}.npy"), "--out", str(out)], said))
    np.savez(tmp_path / "narrow.npz", features=good[0, :, :5], labels=np.arange(12) // 4)
    commands += [
        (["predict", str(subsets), str(scenes), "--out", str(out)], "expected an array features"),
        (["predict", str(paths), str(tmp_path / "narrow.npy"), "--out", str(out)], "narrow.npy"),
        (["predict", str(paths), str(tmp_path / "narrow.npz"), "--out", str(out)], "not a file of scenes"),
        (["predict", str(tmp_path), str(scenes), "--out", str(out)], "is not a run"),
        (["predict", str(subsets), str(tmp_path / "absent.npy"), "--out", str(out)], "no such file"),
        (["predict", str(subsets), str(tmp_path / "narrow.npy"), "--out", str(tmp_path / "picks.txt")], "picks.txt"),
        (["evaluate", str(subsets), "--source", str(tmp_path / "narrow.npz"), "--out", str(out)], "narrow.npz"),
        (["evaluate", str(paths), "--source", str(tmp_path / "narrow.npz"), "--out", str(out)], "narrow.npz"),
        (["evaluate", str(subsets), "--source", str(scenes), "--out", str(out)], "scenes.npz"),
    ]
    for command, said in commands:
        assert main(command) == 2, command
        err = capsys.readouterr().err
        assert said in err, (command, err)
        assert err.count("\n") == 1, err
    assert not out.exists()


def test_nothing_is_predicted_where_a_page_cannot_be(subsets: Path, tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"features": bags(1).tolist()}), tmp_path / "items.parquet")
    out, page = tmp_path / "picks.json", tmp_path / "page.html"
    command = ["predict", str(subsets), str(tmp_path / "items.parquet"), "--out", str(out)]
    assert main([*command, "--explore", str(page)]) == 2
    assert main([*command, "--explore", str(out)]) == 2
    assert not out.exists()
    assert main(command) == 0


def test_predict_writes_a_page_to_explore(subsets: Path, paths: Path, scenes: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "bag.npy", bags(1)[0])
    for run, file, says in ((subsets, tmp_path / "bag.npy", "A bag of 12 items"), (paths, scenes, "A road scene")):
        page = tmp_path / "page.html"
        assert main(["predict", str(run), str(file), "--explore", str(page), "--out", str(tmp_path / "p.json")]) == 0
        assert f"<title>{says}</title>" in page.read_text(encoding="utf-8")
        picks = json.loads((tmp_path / "p.json").read_text())["picks"]
        assert picks


WRONG = [None, True, 3, 1.5, "x", b"x", {}, object(), [], (), [None], ["a"], [[1, 2], [3]], np.zeros(3), np.array("x"),
         np.zeros((2, 5)), np.zeros((1, 2, 64), complex), np.array([None, 1]), torch.zeros(2, 64, dtype=torch.bool),
         torch.full((2, 64), torch.nan), np.zeros((0, 5, 64)), [np.zeros((2, 64)), np.zeros((2, 63))]]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_wrong_arguments_are_refused_by_name(subsets: Path, wrong: object) -> None:
    for name, call in (
        ("x|example|bag", lambda: cpl.load(subsets).select(wrong)),
        ("run|no such|is not a run", lambda: cpl.load(wrong)),  # type: ignore[arg-type]
        ("device", lambda: cpl.Predictor(subsets, device=wrong)),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match=name) as error:
            call()
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("wrong", [-1, 7, 0.5])
def test_images_of_other_colours_are_refused(paths: Path, wrong: float) -> None:
    image = np.zeros((256, 256), np.float32 if isinstance(wrong, float) else np.int64)
    predictor = cpl.load(paths)
    assert len(predictor.select(image.astype(np.uint8)).lengths) == 1
    image[3, 4] = wrong
    with pytest.raises(ValueError, match=r"image 0: expected \(256, 256\) palette indices"):
        predictor.select(image)


def test_a_real_map_that_no_training_saw(paths: Path, shared_data: Path, tmp_path: Path) -> None:
    out = tmp_path / "picks.json"
    file = shared_data / "lane-graphs" / "singapore-queenstown.json"
    assert main(["predict", str(paths), str(file), "--limit", "3", "--out", str(out)]) == 0
    assert [len(record["points"]) > 0 for record in json.loads(out.read_text())["picks"]] == [True] * 3

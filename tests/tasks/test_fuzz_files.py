"""Every file that is read, damaged in every way we could think of: it is read, or refused in one line that names it.

``TORCHCPL_FUZZ=10 pytest tests/tasks/test_fuzz_files.py`` damages ten times as many (by default 84).
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lane_maps import save_map
from test_paths_maps import argoverse_file, nuscenes_file

from torchcpl.cli import main
from torchcpl.config import from_toml, to_toml
from torchcpl.tables import Table
from torchcpl.tasks.paths.maps import load_map
from torchcpl.tasks.paths.procedural import procedural_map
from torchcpl.tasks.paths.sampling import Roads
from torchcpl.tasks.paths.scenes import generate, load_scenes, save_scenes, split_scenes
from torchcpl.tasks.paths.task import PathsConfig
from torchcpl.tasks.registry import TASKS
from torchcpl.tasks.subsets.bags import BagProtocol, BagSampler, fixed_bags
from torchcpl.tasks.subsets.data import load_source

COLUMNS = TASKS["subsets"].columns
FUZZ = int(os.environ.get("TORCHCPL_FUZZ", "1"))
RUNS = 3 * FUZZ  # damaged files of a kind: of those a command reads, and of those a function reads
FILES = 6 * FUZZ

HUGE = "9" * 400
HOSTILE: list[Any] = [
    None, True, False, 0, -1, 1, 2**63, 10**400, 1e9, -1e300, float("nan"), float("inf"), "", "x", "9" * 400, "é\x00",
    [], {}, [[]], [None], [[1e9, 1e9]] * 3, {"x": 1}, ["a", 1], 0.5,
]  # fmt: skip


# -------------------------------------------------------------------------------------------- what is done to a file


def damage_bytes(data: bytes, rng: random.Random) -> bytes:
    """Cut, flip, repeat, insert, or replace some of it."""
    at, end = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    kind = rng.randrange(6)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + data[end:]
    if kind == 2:
        return data[:end] + data[at:]
    if kind == 3:
        return data[:at] + rng.randbytes(rng.randrange(1, 40)) + data[at:]
    flipped = bytearray(data)
    for _ in range(rng.choice([1, 3, 30])):
        flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(flipped)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of parsed JSON."""
    found = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += [(value, key), *places(inner)]
    return found


def damage_json(value: Any, rng: random.Random) -> str:
    """Put something else in one place, or leave it out; at times a thousand brackets."""
    value = copy.deepcopy(value)
    container, key = rng.choice(places(value))
    deep = ""
    if rng.random() < 0.15:
        del container[key]
    elif rng.random() < 0.15:
        container[key], deep = "DEEP", rng.choice(["[", '{"a":']) * 200_000
    else:
        container[key] = copy.deepcopy(rng.choice(HOSTILE))
    return json.dumps(value).replace('"DEEP"', deep + ("1" if rng.random() < 0.5 else ""))


def damage_arrays(arrays: dict[str, np.ndarray], rng: random.Random) -> bytes:
    """One array gone, or of another type or shape, or with a value that makes no sense."""
    arrays = dict(arrays)
    name = rng.choice(sorted(arrays))
    array, kind = arrays.pop(name), rng.randrange(4)
    with np.errstate(all="ignore"):
        if kind == 1:
            other = rng.choice(["f2", "f4", ">f8", "c8", "i1", "u8", ">i4", "?", "U3", "S2", "M8[s]"])
            try:
                arrays[name] = array.astype(other)
            except ValueError:  # of text that is no number
                arrays[name] = np.zeros(array.shape, other)
        elif kind == 2:
            shapes = [
                array.reshape(-1),
                array[None],
                array[:0] if array.ndim else array,
                np.array(rng.choice([0, 1.5])),
            ]
            arrays[name] = rng.choice([*shapes, array[..., :1] if array.ndim else array, array.reshape(1, -1)])
        elif kind == 3 and array.size:
            spoilt = array.astype("f8") if array.dtype.kind == "f" else array.copy()
            extremes = {"f": [np.nan, np.inf, -1.0, 1e30], "i": [-1, 2**31 - 1], "u": [255, 200], "U": ["", "\udc80"]}
            spoilt.reshape(-1)[rng.randrange(array.size)] = rng.choice(extremes.get(array.dtype.kind, [0]))
            arrays[name] = spoilt
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def refused_by_name(read: Callable[[Path], object], path: Path, said: object) -> None:
    """What the function makes of the file: something, or one line that begins with its name."""
    error = ""
    try:
        read(path)
    except (ValueError, OSError) as refusal:
        error = str(refusal)
    assert not error or str(path) in error, (said, error)
    assert "\n" not in error, (said, error)


def mutations(data: bytes, parsed: Any, rng: random.Random, count: int) -> list[bytes]:
    """Damaged copies: two thirds still parse, where there is something to parse."""
    found = []
    for number in range(count):
        if parsed is None or number % 3 == 0:
            found.append(damage_bytes(data, rng))
        elif isinstance(parsed, dict) and all(isinstance(value, np.ndarray) for value in parsed.values()):
            found.append(damage_arrays(parsed, rng))
        else:
            found.append(damage_json(parsed, rng).encode("utf-8", "surrogatepass"))
    return found


# ----------------------------------------------------------------------------------------------------------- readers


def read_map(path: Path) -> None:
    graph = load_map(path)
    with contextlib.suppress(ValueError):  # no lane to start from, none that leads anywhere
        generate([graph], 1, workers=1)


def read_roads(path: Path) -> None:
    graph = load_map(path)
    if any(lane.kind == "lane" for lane in graph.lanes.values()):
        Roads(graph)


def read_scenes(path: Path) -> None:
    scenes = load_scenes(path)
    try:
        split_scenes(scenes, "geography", 0.3)
    except ValueError as error:
        assert "a part is empty" in str(error)  # noqa: PT017
    save_scenes(scenes, path.with_name("again.npz"))
    assert (load_scenes(path.with_name("again.npz")).images == scenes.images).all()


def read_features(path: Path) -> None:
    features = load_source(path)
    assert features.train.isfinite().all()
    if len(features.train_labels.unique()) > 1:
        protocol = BagProtocol(min_classes=1, max_classes=2, min_per_class=1, max_per_class=3, max_items=6)
        fixed_bags(BagSampler(features.train, features.train_labels, protocol), 3, seed=0)


def read_images(path: Path) -> None:
    load_source(path.with_name("features.npz"))


def write_npz(path: Path, **arrays: np.ndarray) -> Path:
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return path


def valid_files(folder: Path) -> dict[str, tuple[Path, Callable[[Path], object]]]:
    """A good file of every kind, and what reads it."""
    rng = np.random.default_rng(0)
    roads = procedural_map(6)
    save_map(roads, folder / "roads.json")
    (folder / "nuscenes.json").write_text(json.dumps(nuscenes_file()))
    (folder / "argoverse.json").write_text(json.dumps(argoverse_file()))
    save_scenes(generate([roads], 6, workers=1), folder / "scenes.npz")
    features = {
        "train": rng.normal(size=(30, 4)).astype(np.float32), "train_labels": np.arange(30) % 3,
        "test": rng.normal(size=(12, 4)).astype(np.float32), "test_labels": np.arange(12) % 3,
        "scale": np.ones(4, np.float32), "class_names": np.array(["a", "b", "c"]),
    }  # fmt: skip
    write_npz(folder / "features.npz", **features)
    write_npz(folder / "test_images.npz", images=np.zeros((2, 3, 3), np.uint8), rows=np.array([0, 5]))
    (folder / "whole").mkdir()
    write_npz(folder / "whole" / "one.npz", features=features["train"], labels=np.array(["x", "y"] * 15))
    (folder / "config.toml").write_text(to_toml(PathsConfig()))
    row = {column.name: 1.0 for column in COLUMNS} | {"method": "CPL", "rule": None}
    table = {"title": "t", "rows": [row], "notes": ["n"], "published": [row]}
    (folder / "table.json").write_text(json.dumps(table))

    def show(path: Path) -> None:
        found = Table.read(path, COLUMNS)
        assert found.markdown()
        assert found.rich()

    return {
        "lane graph": (folder / "roads.json", read_map),
        "nuScenes": (folder / "nuscenes.json", read_roads),
        "Argoverse": (folder / "argoverse.json", read_roads),
        "scenes": (folder / "scenes.npz", read_scenes),
        "features": (folder / "features.npz", read_features),
        "one matrix": (folder / "whole" / "one.npz", read_features),
        "images": (folder / "test_images.npz", read_images),
        "config": (folder / "config.toml", lambda path: from_toml(PathsConfig, path)),
        "table": (folder / "table.json", show),
    }


def parsed_of(path: Path) -> Any:
    if path.suffix == ".json":
        return json.loads(path.read_text())
    if path.suffix == ".npz":
        with np.load(path) as archive:
            return dict(archive.items())
    return None


KINDS = ["lane graph", "nuScenes", "Argoverse", "scenes", "features", "one matrix", "images", "config", "table"]


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Callable[[Path], object]]]:
    return valid_files(tmp_path_factory.mktemp("valid"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_a_damaged_file_is_read_or_refused_by_name(
    kind: str, valid: dict[str, tuple[Path, Callable[[Path], object]]], tmp_path: Path
) -> None:
    source, read = valid[kind]
    path = Path(shutil.copytree(source.parent, tmp_path / "copy")) / source.name
    read(path)
    data, rng = path.read_bytes(), random.Random(kind)
    for number, spoilt in enumerate(mutations(data, parsed_of(path), rng, FILES)):
        path.write_bytes(spoilt)
        refused_by_name(read, path, (kind, number))


TOML = [
    "epochs = " + "[" * 100_000, "epochs = " + "9" * 5000, "epochs = 1" + "0" * 400, "lr = 1" + "0" * 400, "lr = inf",
    "lr = nan", "seed = -1", "dim = 1979-05-27", "source = 'x", "[a.b.c]", "dim = 0x" + "f" * 300, "\x00",
    "method = ['cpl']", "epochs = 3\nepochs = 4", "a = {" * 50_000, "dim = 9223372036854775808",
]  # fmt: skip


@pytest.mark.parametrize("text", TOML, ids=[text[:14] for text in TOML])
def test_hostile_settings(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"config\.toml: ") as error:
        from_toml(PathsConfig, path)
    assert len(str(error.value)) < 2000


# ------------------------------------------------------------------------------------------------------ files of a run

SMALL = {
    "epochs": 2, "bags": 8, "batch_size": 8, "validation_bags": 4, "dim": 8, "layers": 0, "heads": 2, "ffn": 8,
    "hidden": 4, "permutations": 2, "max_items": 12, "min_per_class": 2, "max_per_class": 4,
    "max_classes": 3, "device": "cpu",
}  # fmt: skip
TINY = [word for name, value in SMALL.items() for word in ("--" + name.replace("_", "-"), str(value))]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz") / "run"
    assert main(["train", "subsets", "--run", str(folder), *TINY]) == 0
    return folder


def said_in_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str], about: object) -> str:
    """The command's exit status is 0, or 2 with one line."""
    status = main(arguments)
    err = capsys.readouterr().err
    assert status in (0, 2), about
    if status == 2:
        assert err.startswith("torchcpl: error: "), (about, err)
        assert err.count("\n") == 1, (about, err)
    return err if status else ""


def resign(folder: Path, name: str) -> None:
    """Note the file as it is now, as who damages it on purpose would."""
    data, path = (folder / name).read_bytes(), folder / "state.json"
    state = json.loads(path.read_text())
    state["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    path.write_text(json.dumps(state))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["state.json", "history.jsonl", "config.toml", "model.safetensors", "info.json"])
def test_a_damaged_run_is_read_or_refused_in_one_line(
    name: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(name)
    for number in range(RUNS):
        copied = tmp_path / str(number)
        shutil.copytree(run, copied, symlinks=True)
        path = copied / name if (copied / name).is_file() and name != "config.toml" else copied / "best" / name
        data, by_byte = path.read_bytes(), number % 3 == 0
        if name == "history.jsonl" and not by_byte:
            records = [json.loads(line) for line in data.splitlines()]
            lines = [damage_json(record, rng) if i == 0 else json.dumps(record) for i, record in enumerate(records)]
            path.write_text("\n".join(lines) + "\n")
        elif name in ("state.json", "info.json") and not by_byte:
            path.write_text(damage_json(json.loads(data), rng))
        else:
            path.write_bytes(damage_bytes(data, rng))
            if name in ("model.safetensors", "config.toml"):
                resign(copied / "best", name)
        for command in (["evaluate", str(copied)], ["table", "subsets", str(copied), "--out", str(copied / "t.json")]):
            err = said_in_one_line(command, capsys, (name, number, command))
            assert not err or str(copied) in err, (name, number, err)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["state.json", "history.jsonl", "config.toml", "model.safetensors", "optimizer.pt"])
def test_a_damaged_run_is_resumed_or_refused_in_one_line(
    name: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(f"resume {name}")
    for number in range(RUNS):
        copied = tmp_path / str(number)
        shutil.copytree(run, copied, symlinks=True)
        state = json.loads((copied / "last" / "state.json").read_text()) | {"finished": False, "step": 1, "epoch": 1}
        (copied / "last" / "state.json").write_text(json.dumps(state))
        path = copied / name if name in ("history.jsonl", "config.toml") else copied / "last" / name
        if name == "state.json" and number % 3:
            path.write_text(damage_json(state, rng))
        else:
            path.write_bytes(damage_bytes(path.read_bytes(), rng))
        if name in ("model.safetensors", "optimizer.pt"):
            resign(copied / "last", name)
        said_in_one_line(["train", "subsets", "--run", str(copied), "--resume", *TINY], capsys, (name, number))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", [".npy", ".npz", ".parquet"])
def test_damaged_examples_are_predicted_or_refused_in_one_line(
    form: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out, x = tmp_path / f"new{form}", tmp_path / "picks.json", np.random.default_rng(0).random((3, 5, 64))
    if form == ".parquet":
        arrow = pytest.importorskip("pyarrow")
        table = arrow.table({"id": [0, 1, 2], "features": x.tolist()})
        pytest.importorskip("pyarrow.parquet").write_table(table, path)
    elif form == ".npz":
        write_npz(path, features=x, mask=np.ones((3, 5), bool), scale=np.ones(64))
    else:
        np.save(path, x)
    data, rng = path.read_bytes(), random.Random(form)
    for number, spoilt in enumerate(mutations(data, parsed_of(path), rng, RUNS)):
        path.write_bytes(spoilt)
        out.unlink(missing_ok=True)
        err = said_in_one_line(["predict", str(run), str(path), "--out", str(out)], capsys, (form, number))
        assert out.exists() == (not err)


# ------------------------------------------------------------------------------------------- what must not be let in


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("images", np.zeros((6, 256, 128), np.float32)),
        ("images", np.full((6, 256, 128), 255, np.uint8)),
        ("maps", np.array("roads")),
        ("maps", np.array([1, 2])),
        ("lengths", np.full((6, 6), np.nan)),
        ("lengths", np.full((6, 6), -1)),
        ("lengths", np.zeros((6, 6), np.int64)),
        ("map_index", np.full(6, 1)),
        ("map_index", np.full(6, -1)),
        ("poses", np.full((6, 3), np.nan)),
        ("paths", np.full((6, 6, 64, 2), np.nan, np.float32)),
        ("format", np.array("path-scenes/9")),
    ],
)
def test_scenes_that_make_no_sense(
    name: str, value: np.ndarray, valid: dict[str, tuple[Path, Callable[[Path], object]]], tmp_path: Path
) -> None:
    arrays = parsed_of(valid["scenes"][0]) | {name: value}
    with pytest.raises(ValueError, match=r"odd\.npz: "):
        load_scenes(write_npz(tmp_path / "odd.npz", **arrays))


@pytest.mark.parametrize("number", ["9" * 400, "1e9", "-1e8", "1e999"])
def test_coordinates_that_make_no_sense(
    number: str, valid: dict[str, tuple[Path, Callable[[Path], object]]], tmp_path: Path
) -> None:
    data = parsed_of(valid["lane graph"][0])
    next(iter(data["lanes"].values()))["centerline"][0][0] = 123.25
    path = tmp_path / "far.json"
    path.write_text(json.dumps(data).replace("123.25", number))
    with pytest.raises(ValueError, match=r"far\.json: lane '.*': centerline: "):
        load_map(path)


def test_images_of_strings(valid: dict[str, tuple[Path, Callable[[Path], object]]], tmp_path: Path) -> None:
    shutil.copy(valid["features"][0], tmp_path / "features.npz")
    write_npz(tmp_path / "test_images.npz", images=np.array(["a", "b"]), rows=np.array([0, 1]))
    with pytest.raises(ValueError, match=r"test_images\.npz: expected images of uint8"):
        load_source(tmp_path / "features.npz")

"""cpl.select and torchcpl select: invariances, rules, bad input, files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torchcpl as cpl
from torchcpl.cli import main
from torchcpl.estimator import save_model
from torchcpl.interactions import DenseCoverage
from torchcpl.reduce import Rows, neighbours, pivots, reduce, spectral
from torchcpl.select import apportion, assign, greedy_to_median, load_model, shipped
from torchcpl.vectors import read_vectors


def blobs(groups: int = 5, size: int = 12, width: int = 6, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.concatenate([rng.normal(size=(size, width)) + 12 * rng.normal(size=width) for _ in range(groups)])


X = blobs()


def picks(x: Any, *arguments: Any, **options: Any) -> list[int]:
    return [i for i in cpl.select(x, *arguments, **options).indices.tolist() if i >= 0]


def test_finds_every_group_and_no_more() -> None:
    for groups in (3, 6):
        found = picks(blobs(groups, 20, seed=groups))
        assert sorted(i // 20 for i in found) == list(range(groups))


def test_is_the_same_for_permuted_rotated_shifted_scaled_rows_and_doubled_columns() -> None:
    rng = np.random.default_rng(1)
    expected = picks(X, 7)
    order = rng.permutation(len(X))
    assert [int(order[i]) for i in picks(X[order], 7)] == expected
    rotation = np.linalg.qr(rng.normal(size=(6, 6)))[0]
    for x in (X @ rotation, 1000 * X, 1e-3 * X + 5, np.concatenate([X, X], 1), X.astype(np.float32), torch.tensor(X)):
        assert picks(x, 7) == expected
    d = np.linalg.norm(X[:, None] - X[None], axis=-1)
    assert picks(d, 7, metric="precomputed") == expected


def test_rounding_in_distances_is_no_distance() -> None:
    unit = X / np.linalg.norm(X, axis=1, keepdims=True)
    d = 1 - unit @ unit.T  # below and above 0 on the diagonal
    assert d.min() < 0 < np.diag(d).max()
    exact = np.where(np.eye(len(d)), 0, d)
    assert picks(d, metric="precomputed") == picks(exact, metric="precomputed")
    assert len(picks(exact + 1e-9 * np.eye(len(d)), metric="precomputed")) == len(picks(exact, metric="precomputed"))


def test_cosine_ignores_the_length_of_rows() -> None:
    lengths = np.random.default_rng(2).uniform(0.5, 2, (len(X), 1))
    assert picks(X * lengths, 5, metric="cosine") == picks(X, 5, metric="cosine")


def test_piles_in_a_batch_are_as_alone() -> None:
    other = blobs(3, 20, seed=4)
    together = cpl.select(np.stack([X, other]))
    assert together.tolist() == [picks(X), picks(other)]
    assert together.step_log_prob is not None
    assert together.step_log_prob.shape == together.indices.shape


def test_equal_rows_are_picked_once_unless_size_forces_it() -> None:
    x = np.repeat(X[::12], 4, 0)  # five different rows, each four times
    for size in (None, 3, 5):
        found = picks(x, size)
        assert len({i // 4 for i in found}) == len(found)
    forced = picks(x, 8)
    assert len(set(forced)) == 8
    assert len({i // 4 for i in forced}) == 5
    assert picks(x, 5, require=[2], forbid=[4])[0] == 2
    assert 4 not in picks(x, 5, forbid=[4])


def test_rows_of_one_direction_are_equal_for_cosine() -> None:
    rng = np.random.default_rng(0)
    x = np.outer(rng.uniform(0.5, 3, 30), rng.normal(size=8))
    assert len(picks(x, metric="cosine")) == len(picks(x.astype(np.float32), metric="cosine")) == 1
    x = (rng.uniform(0.5, 3, (6, 1, 1)) * rng.normal(size=(5, 8))).reshape(-1, 8)  # five directions
    assert sorted(i % 5 for i in picks(x, 5, metric="cosine")) == list(range(5))


def test_sizes_required_forbidden_and_weights() -> None:
    assert len(picks(X, 9)) == 9
    assert 2 <= len(picks(X, min_size=2, max_size=3)) <= 3
    found = picks(X, 5, require=[3, 14], forbid=np.arange(len(X)) >= 48)
    assert set(found[:2]) == {3, 14}
    assert max(found) < 48
    weights = np.zeros(len(X))
    weights[[7, 31]] = 50
    assert set(picks(X, 5, weights=weights)[:2]) == {7, 31}
    assert picks(X[:1]) == [0]


def test_the_probability_of_every_pick_is_told() -> None:
    found = cpl.select(X, 5)
    assert found.step_log_prob is not None
    assert found.step_log_prob.shape == (5,)
    torch.testing.assert_close(found.step_log_prob.sum(), found.log_prob)


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (np.zeros((0, 3)), {}, "at least one row"),
        (np.zeros(3), {}, r"got shape \(3,\)"),
        ([[1.0, 2.0], [3.0]], {}, "one length"),
        (np.array([[None, 1]]), {}, "object"),
        (np.array([["a"]]), {}, "numbers"),
        (np.ones((2, 2), complex), {}, "complex"),
        (np.array([[1.0], [np.nan], [np.inf]]), {}, "rows 1, 2"),
        (X, {"metric": "manhattan"}, "manhattan"),
        (X, {"size": 2, "require": [0, 1, 2]}, "at least 3"),
        (X, {"size": 0}, "at least 1"),
        (X, {"size": 61}, "at most 60"),
        (X, {"min_size": 4, "max_size": 3}, "at most max_size = 3"),
        (X, {"size": 4, "max_size": 3}, "size: expected at most max_size = 3, got 4"),
        (X, {"size": 4, "min_size": 5}, "size: expected at least min_size = 5, got 4"),
        (X, {"min_size": 61}, "min_size: expected at most 60, the rows that may be picked, got 61"),
        (X, {"require": [60]}, "0 to 59"),
        (X, {"require": [1], "forbid": [1]}, "none of the required"),
        (X, {"forbid": range(60)}, "some rows left"),
        (X, {"weights": np.full(60, np.nan)}, "finite"),
        (X, {"metric": "precomputed"}, "square"),
        (np.array([[0, 1.0], [2, 0]]), {"metric": "precomputed"}, "symmetric"),
        (np.array([[0, -1.0], [-1, 0]]), {"metric": "precomputed"}, "at least 0"),
        (np.zeros((2, 2)), {"metric": "cosine"}, "direction"),
        (np.stack([X, 1e-20 * X]), {}, "1e-15 to 1e\\+15 in size, got up to .*e-1"),
        ([torch.ones(2, requires_grad=True)], {}, "numbers in rows"),
    ],
)
def test_bad_input_is_refused(x: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cpl.select(x, **options)


def test_the_number_of_picks_is_its_median() -> None:
    nothing = DenseCoverage(torch.full((1, 4, 4), -30.0), torch.zeros(1, 4))
    pot = cpl.Potentials(torch.tensor([[3.0, 2.0, 1.0, 0.0]]), torch.tensor([1.0]), nothing)
    found = greedy_to_median(pot, 4, 1)
    weight, stopped, going_on = [math.exp(v) for v in (3, 2, 1, 0)], 0.0, 1.0
    for k in range(1, 5):  # the stop weighs e against those that are left
        stop = math.e / (math.e + sum(weight[k:]))
        stopped, going_on = stopped + going_on * stop, going_on * (1 - stop)
        if stopped >= 0.5:
            break
    assert found.tolist() == [list(range(k))]
    torch.testing.assert_close(found.log_prob, cpl.log_prob(pot, found.indices, min_len=1))
    assert greedy_to_median(pot, 4, 4).tolist() == [[0, 1, 2, 3]]
    assert greedy_to_median(pot, 1).tolist() == [[0]]


def test_weights_of_the_model_go_through_a_file(tmp_path: Path) -> None:
    model = shipped("cpu")
    save_model(tmp_path / "m.safetensors", model, note="x")
    again, said = load_model(tmp_path / "m.safetensors")
    assert said["note"] == "x"
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    (tmp_path / "m.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="safetensors"):
        load_model(tmp_path / "m.safetensors")
    save_model(tmp_path / "m.safetensors", model)
    data = (tmp_path / "m.safetensors").read_bytes()
    for name in ("model", next(iter(model.state_dict()))):
        (tmp_path / "m.safetensors").write_bytes(data.replace(f'"{name}"'.encode(), f'"{name[:-1]}_"'.encode()))
        with pytest.raises(ValueError, match="expected a model of distances, got other weights"):
            load_model(tmp_path / "m.safetensors")


def test_assign_is_the_nearest_pick() -> None:
    chosen = np.array([0, 12, 24])
    d = np.linalg.norm(X[:, None] - X[None, chosen], axis=-1)
    assert assign(X, chosen, chunk=7).tolist() == d.argmin(1).tolist()
    assert assign(X + 1e7, chosen).tolist() == d.argmin(1).tolist()
    assert assign(np.zeros((3, 3)), [2, 0], "precomputed").tolist() == [1, 0, 0]  # a pick stands for itself
    for dtype in ("u2", "u8", ">f8"):
        assert assign(np.array([[0, 2], [2, 0]], dtype), [1, 0], "precomputed").tolist() == [1, 0]


# ---------------------------------------------------------------------------------------------- files


def write(folder: Path, kind: str) -> Path:
    path = folder / f"x.{kind}"
    ids = [f"row{i}" for i in range(len(X))]
    if kind == "npy":
        np.save(path, X)
    elif kind == "npz":
        np.savez(path, X=X, ids=np.array(ids))
    elif kind == "csv":
        rows = [",".join(["id", *"abcdef"])] + [
            ",".join([i, *map(repr, row)]) for i, row in zip(ids, X.tolist(), strict=True)
        ]
        path.write_text("\n".join(rows))
    elif kind == "jsonl":
        path.write_text("\n".join(json.dumps({"id": i, "v": row}) for i, row in zip(ids, X.tolist(), strict=True)))
    else:
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.table({"id": ids, "v": X.tolist()}), path)
    return path


@pytest.mark.parametrize("kind", ["npy", "npz", "csv", "jsonl", "parquet"])
def test_every_format_gives_the_same_picks(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = write(tmp_path, kind), tmp_path / "picks.json"
    assert main(["select", str(path), "--size", "5", "--out", str(out), "--sheet", str(tmp_path / "s.html")]) == 0
    found = json.loads(out.read_text())
    assert [pick["row"] for pick in found] == picks(X, 5)
    assert found[0]["id"] == (str(found[0]["row"]) if kind == "npy" else f"row{found[0]['row']}")
    assert sum(pick["stands_for"] for pick in found) == len(X)
    assert (tmp_path / "s.html").read_text().count("<section>") == 5
    assert "5 of 60" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["csv", "npy"])
def test_picks_are_written(tmp_path: Path, kind: str) -> None:
    out = tmp_path / f"picks.{kind}"
    assert main(["select", str(write(tmp_path, "csv")), "--require", "row7", "--size", "3", "--out", str(out)]) == 0
    if kind == "npy":
        assert np.load(out)[0] == 7
    else:
        assert out.read_text().splitlines()[1].startswith("1,7,row7,")


def test_a_folder_of_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cv2 = pytest.importorskip("cv2")
    safetensors = pytest.importorskip("safetensors.torch")
    from torchcpl.encoders.resnet import ResNet18

    weights = {name: value.contiguous() for name, value in ResNet18().state_dict().items()}
    safetensors.save_file(weights, tmp_path / "net.safetensors")
    folder = tmp_path / "pictures"
    (folder / "sub").mkdir(parents=True)
    for i in range(4):
        image = np.full((20, 30, 3), 60 * i, np.uint8)
        cv2.imwrite(str(folder / f"{i}.png"), image)
    (folder / "sub" / "broken.jpg").write_bytes(b"no image")
    command = ["select", str(folder), "--resnet", str(tmp_path / "net.safetensors"), "--size", "2"]
    assert main([*command, "--copy", str(tmp_path / "picked"), "--sheet", str(tmp_path / "s.html")]) == 0
    assert "1 broken" in capsys.readouterr().out
    assert len(list((tmp_path / "picked").iterdir())) == 2
    assert "data:image/jpeg" in (tmp_path / "s.html").read_text()
    assert main([*command, "--strict"]) == 2
    assert "broken.jpg" in capsys.readouterr().err
    assert main(["select", str(folder)]) == 2


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", [], "empty"),
        ("id,a\nx,1\nx,2\n", [], "'x' twice"),
        ("a,b\n1,2\n3\n", [], "2 cells"),
        ("a,b\n1,2\n3,z\n", [], "'z' in row 1"),
        ("a,b\n1,2\n3,nan\n", [], "row 1"),
        ("a,b\n1,2\n3,4\n", ["--size", "1", "--require", "0", "1"], "at least 2"),
        ("a,b\n1,2\n3,4\n", ["--require", "9"], "'9'"),
        ("a,b\n1,2\n3,4\n", ["--out", "picks.xyz"], "picks.xyz"),
        ("a,b\n1,2\n3,4\n", ["--metric", "precomputed"], "0 on the diagonal|symmetric"),
    ],
)
def test_bad_files_are_one_line_and_exit_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, options: list[str], message: str
) -> None:
    path = tmp_path / "x.csv"
    path.write_text(text)
    out = [] if "--out" in options else ["--out", str(tmp_path / "picks.csv")]
    assert main(["select", str(path), *options, *out]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert pytest.importorskip("re").search(message, said)
    assert [p.name for p in tmp_path.iterdir()] == ["x.csv"]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("x.csv", b"a,b\n1,\xff\n", "x.csv: cannot be read"),
        ("x.csv", b"a\n" + b"1" * 200_000 + b"\n", "x.csv: not CSV: field larger"),
        ("x.jsonl", b"\xff\n", "x.jsonl: cannot be read"),
        ("x.jsonl", b"[1]\n" + b"[" * 100_000 + b"\n", "x.jsonl: line 2: not JSON"),
        ("x.jsonl", b'{"a": [1]}\n{"b": [1]}\n', "line 2 differs"),
        ("x.jsonl", b'{"a": [1]}\n\n{"b": [1]}\n', "line 3 differs"),
        ("x.jsonl", b"[1]\n\n[1\n", "x.jsonl: line 3: not JSON"),
        ("x.parquet", b"PAR1", "x.parquet: not readable as Parquet"),
        ("x.npz", b"PK", "x.npz: not a readable"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=message):
        read_vectors(tmp_path / name)


def test_a_page_to_explore(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    path, out = write(tmp_path, "csv"), tmp_path / "p.json"
    assert main(["select", str(path), "--forbid", "row7", "--explore", str(page), "--out", str(out)]) == 0
    data = json.loads(page.read_text(encoding="utf-8").split('id="data">')[1].split("</script>")[0])
    assert data["kind"] == "densecoverage"
    assert [data["items"]["values"][row] for row in data["forbidden"]] == ["row7"]
    assert data["max_len"] == len(json.loads(out.read_text()))  # as many as select picks
    assert data["first"]  # what select requires comes first there too


def test_objects_are_never_unpickled(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([[1, None]]), allow_pickle=True)
    with pytest.raises(ValueError, match=r"x\.npy: not a readable \.npy of plain arrays"):
        read_vectors(tmp_path / "x.npy")


# ---------------------------------------------------------------------------------------------- large piles


def pile(groups: int = 6, size: int = 150) -> np.ndarray:
    return blobs(groups, size).astype(np.float32)


def test_a_large_pile_is_picked_from_without_its_matrix_of_distances(tmp_path: Path) -> None:
    x = pile()
    assert sorted(i // 150 for i in picks(x, 6)) == list(range(6))
    np.save(tmp_path / "x.npy", x)
    assert picks(np.load(tmp_path / "x.npy", mmap_mode="r"), 6) == picks(x, 6) == picks(torch.tensor(x), 6)
    assert len(set(picks(x, 450))) == 450  # more than are seen at once


def test_rules_hold_in_large_piles() -> None:
    x = pile()
    found = picks(x, 6, require=[3, 4], forbid=np.arange(900) >= 750)
    assert found[:2] in ([3, 4], [4, 3])
    assert max(found) < 750
    weights = np.zeros(900)
    with pytest.raises(ValueError, match="row 700"):
        cpl.select(np.where(np.arange(900)[:, None] == 700, np.nan, x))
    with pytest.raises(ValueError, match="finite"):
        cpl.select(x, weights=weights + np.inf)


def test_equal_rows_of_a_large_pile_are_picked_once() -> None:
    x = np.repeat(pile(2, 5), 80, 0)  # ten different rows
    found = picks(x, 10)
    assert sorted(i // 80 for i in found) == list(range(10))
    assert len(set(picks(x, 13))) == 13
    assert 80 not in picks(x, 10, forbid=[80])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rows_of_one_direction_in_a_large_pile_are_picked_once(dtype: type) -> None:
    rng = np.random.default_rng(0)
    lengths = 10 ** rng.uniform(-2, 2, (2000, 1))
    directions = rng.normal(size=(100, 3))
    one, many = ((lengths * directions[np.arange(2000) % count]).astype(dtype) for count in (1, 100))
    assert len(picks(one, metric="cosine")) == 1
    assert sorted(i % 100 for i in picks(many, 100, metric="cosine")) == list(range(100))
    assert len(set(picks(many, 103, metric="cosine"))) == 103  # forced
    rules = {"require": [7, 107], "forbid": np.arange(2000) % 100 == 8, "weights": np.arange(2000) / 2000}
    found = picks(many, 99, metric="cosine", **rules)
    assert sorted(found[:2]) == [7, 107]
    assert len({i % 100 for i in found[1:]} - {7, 8}) == 97  # another of a required row's direction is not picked
    assert min(found[2:]) >= 1900  # of each direction the row of most weight


def test_equal_rows_are_found_amid_many_others() -> None:
    x = torch.randn(200_000, 3, generator=torch.Generator().manual_seed(0))
    x = torch.cat([x, 1.7 * x[:1000]])
    everything, nothing = torch.ones(len(x), dtype=torch.bool), torch.zeros(len(x), dtype=torch.bool)
    for bonus, kept in ((0.0, slice(0, 200_000)), (1.0, slice(1000, 201_000))):
        weights = torch.zeros(len(x)).index_fill(0, torch.arange(200_000, 201_000), bonus)
        found = Rows(x, "cosine", torch.device("cpu")).one_of_equal(everything, nothing, weights)
        expected = nothing.clone()
        expected[kept] = True
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("x", "options"),
    [(X, {}), (X, {"num_hypotheses": 3}), (pile(), {}), (pile(), {"size": 60}), (pile(), {"metric": "cosine"})],
)
def test_autocast_changes_nothing(x: np.ndarray, options: dict[str, Any], dtype: torch.dtype) -> None:
    expected = cpl.select(x, **options)
    of = assign(x, expected.indices.flatten().unique())
    with torch.autocast("cpu", dtype):
        found = cpl.select(x, **options)
        assert torch.equal(assign(x, expected.indices.flatten().unique()), of)
    assert torch.equal(found.indices, expected.indices)
    assert torch.equal(found.log_prob, expected.log_prob)


def test_parts_share_the_picks() -> None:
    found = apportion(torch.tensor([10, 3, 7]), 9, torch.tensor([0, 3, 0]))
    assert found.tolist() == [4, 3, 2] or found.tolist() == [3, 3, 3]
    assert int(apportion(torch.tensor([2, 2]), 4, torch.tensor([0, 0])).sum()) == 4


def test_micro_clusters_are_means_and_nearest_rows() -> None:
    rows = Rows(pile(), "euclidean", torch.device("cpu"))
    x = rows.take(slice(None))
    micro = reduce(rows, 60, 0, torch.ones(900, dtype=torch.bool), torch.zeros(900))
    gap = (x[micro.member] - micro.centres).norm(dim=-1)
    assert float((gap - torch.cdist(micro.centres, x).amin(1)).median()) < 1e-3


def test_eigenvectors_of_the_graph_of_neighbours() -> None:
    x = torch.tensor(pile(4, 40), dtype=torch.float32)
    near = neighbours(x, 32)
    d = torch.cdist(x, x).fill_diagonal_(torch.inf)
    assert torch.equal(near.sort().values, d.argsort(-1)[:, :32].sort().values)
    graph = torch.zeros(160, 160).scatter_(1, near, 1.0)
    graph = graph + graph.T
    root = graph.sum(-1).rsqrt()
    values, vectors = torch.linalg.eigh(graph * root * root.unsqueeze(-1))
    v = spectral(x, 4, torch.Generator().manual_seed(0))
    expected = vectors[:, -4:] * values[-4:]  # the groups are not connected: all four are 1
    torch.testing.assert_close(v @ v.T, expected @ expected.T, atol=1e-4, rtol=0)


def test_pivots_are_those_of_the_determinant() -> None:
    v = torch.randn(30, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    everything, nothing = torch.ones(30, dtype=torch.bool), torch.zeros(30, dtype=torch.bool)
    found, chance = pivots(v, 5, torch.zeros(30), everything, nothing)
    kernel = v @ v.T
    for t in range(5):
        sets = [[*found[:t].tolist(), j] for j in range(30)]
        volume = torch.stack([torch.linalg.det(kernel[one][:, one]) for one in sets]).clamp(min=0)
        assert int(volume.argmax()) == int(found[t])
        torch.testing.assert_close(chance[t].exp(), volume.max() / volume.sum(), atol=1e-6, rtol=1e-6)
    first = everything.clone().logical_and(torch.arange(30) == 7)
    bonus = torch.where(torch.arange(30) == 3, 50.0, 0.0)
    assert pivots(v, 2, bonus, everything & ~first, first)[0].tolist() == [7, 3]


def test_many_picks_are_one_of_every_group() -> None:
    x = blobs(160, 30, 8).astype(np.float32)
    found = cpl.select(x, 160)
    groups = {i // 30 for i in found.tolist()}
    assert len(groups) > 150  # two parts share them
    assert found.step_log_prob is not None
    assert bool((found.step_log_prob <= 0).all())
    assert found.tolist() == cpl.select(x, 160).tolist()
    weights = np.where(np.arange(len(x)) == 77, 50.0, 0.0)
    ruled = picks(x, 60, require=[5, 9], forbid=np.arange(len(x)) >= 2400, weights=weights)
    assert set(ruled[:2]) == {5, 9}
    assert 77 in ruled
    assert len(set(ruled)) == 60
    assert max(ruled) < 2400
    assert len(set(picks(x, 50, forbid=np.arange(len(x)) >= 600))) == 50


def test_hypotheses_are_different_answers_likeliest_first(tmp_path: Path) -> None:
    x = blobs(4, 10)
    found = cpl.select(x, num_hypotheses=3)
    assert found.indices.shape[0] == 3
    assert sorted(found.log_prob.tolist(), reverse=True) == found.log_prob.tolist()
    groups = [sorted({i // 10 for i in row}) for row in found.tolist()]
    assert groups[0] == [0, 1, 2, 3]
    assert groups[1] != groups[0]
    np.save(tmp_path / "x.npy", x)
    out = tmp_path / "picks.json"
    assert main(["select", str(tmp_path / "x.npy"), "--hypotheses", "2", "--out", str(out)]) == 0
    assert {pick["answer"] for pick in json.loads(out.read_text())} == {1, 2}
    with pytest.raises(ValueError, match="more than 512"):
        cpl.select(pile(), num_hypotheses=2)


def test_weights_count_in_large_piles() -> None:
    x = pile()
    for row in range(0, 900, 90):
        assert row in picks(x, 6, weights=np.where(np.arange(900) == row, 50.0, 0.0))


def test_a_large_pile_is_the_same_as_a_list_or_in_a_batch() -> None:
    x = pile()
    assert picks(x.tolist(), 6) == picks(x, 6)
    found = cpl.select(np.stack([x, x[::-1]]))
    assert found.tolist() == [picks(x), picks(x[::-1])]
    assert found.step_log_prob is not None
    assert found.step_log_prob.shape == found.indices.shape


@pytest.mark.parametrize("scale", [1e200, 1e30, 1e-30, 1e-200])
@pytest.mark.parametrize("x", [X, pile()])
def test_numbers_that_float32_cannot_square_are_refused(x: np.ndarray, scale: float) -> None:
    with pytest.raises(ValueError, match="x: expected numbers of 1e-15 to"):
        cpl.select(x.astype(np.float64) * scale)


@pytest.mark.parametrize("scale", [1e13, 1e-15])
@pytest.mark.parametrize("x", [X, pile()])
def test_numbers_may_be_large_or_small(x: np.ndarray, scale: float) -> None:
    assert len(picks(x * scale)) == len(picks(x))


@pytest.mark.parametrize("device", ["cuda:99", "mps:99", "xpu:99"])
def test_a_device_that_is_not_there(device: str) -> None:
    with pytest.raises(ValueError, match=f"device: expected one of this machine, got str '{device}'"):
        cpl.select(X, device=device)


@pytest.mark.parametrize("x", [X, pile()])
def test_a_device_without_numbers(x: np.ndarray) -> None:
    with pytest.raises(ValueError, match="device: expected one that holds numbers, got meta"):
        cpl.select(x, device="meta")
    with pytest.raises(ValueError, match=r"x: expected a dense tensor of numbers, got a float\d\d tensor .* on meta"):
        cpl.select(torch.tensor(x, device="meta"))


def test_more_answers_than_a_search_is_wide() -> None:
    assert cpl.select(X, num_hypotheses=130).indices.shape[0] == 130


def test_several_answers_of_too_many_picks() -> None:
    x = np.random.default_rng(0).normal(size=(100, 3))
    with pytest.raises(ValueError, match="size: expected at most 80 with several hypotheses, got 90"):
        cpl.select(x, 90, num_hypotheses=2)


@pytest.mark.parametrize("options", [["--require", "1"], ["--size", "15"]])
def test_a_page_of_equal_rows(tmp_path: Path, options: list[str]) -> None:
    np.save(tmp_path / "x.npy", np.repeat(X[:10], 2, 0))
    assert main(["select", str(tmp_path / "x.npy"), *options, "--explore", str(tmp_path / "page.html")]) == 0


@pytest.mark.parametrize("size", [None, 6, 60])
def test_a_large_pile_may_be_far_from_zero(size: int | None) -> None:
    x = pile()
    assert picks(x + 2.0**24, size) == picks((x + 2.0**24) - 2.0**24, size)
    ticks = np.round(1e4 * x).astype(np.int64)
    assert picks(ticks + 2**40, size) == picks(torch.tensor(ticks + 2**40), size) == picks(ticks, size)


def test_a_row_that_is_alone_in_its_part() -> None:
    x = pile()
    x[77] = 1e6
    found = cpl.select(x, 200, require=[77])
    assert found.step_log_prob is not None
    assert bool(found.step_log_prob.isfinite().all())


def test_rows_of_a_large_pile_are_checked_as_one() -> None:
    x = np.full((40_000, 2), 1e-20)
    x[39_000:] = 1
    assert picks(x, 2) == [0, 39_000]
    x[39_123, 1] = np.nan
    with pytest.raises(ValueError, match=r"got NaN or infinity in row 39123$"):
        cpl.select(x)
    with pytest.raises(ValueError, match="x: expected a dense tensor"):
        cpl.select(torch.zeros(600, 2).to_sparse())


def test_of_equal_rows_in_a_large_pile_the_one_of_most_weight() -> None:
    x = np.concatenate([pile(), pile()])
    weights = np.where(np.arange(1800) < 900, 0.0, 0.5)
    assert min(picks(x, 6, weights=weights)) >= 900


@pytest.mark.parametrize("n", [20, 600])
def test_masked_arrays_are_refused(n: int) -> None:
    x = np.ma.masked_greater(np.random.default_rng(0).normal(size=(n, 3)), 1)
    with pytest.raises(ValueError, match="x: expected an array without a mask"):
        cpl.select(x)
    with pytest.raises(ValueError, match="weights: expected an array without a mask"):
        cpl.select(x.data, weights=x[:, 0])

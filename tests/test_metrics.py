"""Metrics against sets and plain double loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchcpl.metrics import (
    IMAGE_DIAGONAL,
    answer_scores,
    calibration_error,
    cluster_scores,
    off_road,
    path_distances,
    path_scores,
)

PROFILE = settings(deadline=None, max_examples=150)


def brute_cluster(picks: list[int], labels: list[int]) -> dict[str, float]:
    chosen = {i for i in picks if i >= 0}
    clusters: dict[int, set[int]] = {}
    for i, label in enumerate(labels):
        if label >= 0:
            clusters.setdefault(label, set()).add(i)
    hits = sum(1 for members in clusters.values() if members & chosen)
    recall = hits / len(clusters) if clusters else 0.0
    precision = hits / len(chosen) if chosen else 0.0
    f1 = 2 * precision * recall / (precision + recall) if hits else 0.0
    return {
        "clu_rec": recall,
        "clu_prec": precision,
        "clu_f1": f1,
        "card_err": float(abs(len(chosen) - len(clusters))),
    }


@st.composite
def bags(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]]]:
    B, N, T = draw(st.integers(1, 4)), draw(st.integers(1, 9)), draw(st.integers(0, 6))
    pick, label = st.integers(-1, N - 1), st.integers(-1, 5)
    picks = [draw(st.lists(pick, min_size=T, max_size=T)) for _ in range(B)]
    labels = [draw(st.lists(label, min_size=N, max_size=N)) for _ in range(B)]
    return picks, labels


@PROFILE
@given(bags())
def test_cluster_scores_equal_sets(case: tuple[list[list[int]], list[list[int]]]) -> None:
    picks, labels = case
    B = len(picks)
    scores = cluster_scores(torch.tensor(picks, dtype=torch.long).view(B, -1), torch.tensor(labels))
    for b in range(B):
        for name, value in brute_cluster(picks[b], labels[b]).items():
            assert scores[name][b].item() == pytest.approx(value, abs=1e-6), name


def test_cluster_scores_of_chosen_bags() -> None:
    labels = torch.tensor([[4, 4, 9, 9, 2]]).expand(4, 5)
    picks = torch.tensor([[0, 2, 4], [0, 1, -1], [-1, -1, -1], [4, -1, 0]])
    scores = cluster_scores(picks, labels)
    assert scores["clu_prec"].tolist() == [1.0, 0.5, 0.0, 1.0]
    torch.testing.assert_close(scores["clu_rec"], torch.tensor([3.0, 1.0, 0.0, 2.0]) / 3)
    torch.testing.assert_close(scores["clu_f1"], torch.tensor([1.0, 0.4, 0.0, 0.8]))
    assert scores["card_err"].tolist() == [0.0, 1.0, 3.0, 1.0]


def test_cluster_scores_do_not_depend_on_padding_or_order() -> None:
    g = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 6, (8, 20), generator=g)
    picks = torch.stack([torch.randperm(20, generator=g)[:7] for _ in range(8)])
    plain = cluster_scores(picks, labels)
    shuffled = torch.cat([picks.flip(1), torch.full((8, 3), -1)], 1)
    padded = cluster_scores(shuffled, torch.cat([labels, torch.full((8, 5), -1)], 1))
    for name in plain:
        assert torch.equal(plain[name], padded[name])


@pytest.mark.parametrize(
    ("picks", "labels", "message"),
    [
        (torch.zeros(2, 3), torch.zeros(2, 4, dtype=torch.long), "picks: expected a long"),
        (torch.zeros(3, 3, dtype=torch.long), torch.zeros(2, 4, dtype=torch.long), "picks: expected"),
        (torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, dtype=torch.long), "labels: expected"),
        (torch.full((2, 3), 4), torch.zeros(2, 4, dtype=torch.long), "below 4, got 4"),
    ],
)
def test_cluster_scores_reject(picks: torch.Tensor, labels: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cluster_scores(picks, labels)


Point = tuple[float, float]


def brute_path(points: list[Point], paths: list[list[Point]], empty: float) -> tuple[float, float]:
    ades, hds = [], []
    for path in paths:
        if not path or not points:
            continue
        forth = [min(math.dist(p, q) for q in path) for p in points]
        back = [min(math.dist(p, q) for p in points) for q in path]
        ades.append(0.5 * sum(forth) / len(forth) + 0.5 * sum(back) / len(back))
        hds.append(max(forth + back))
    return (min(ades), min(hds)) if ades else (empty, empty)


coordinate = st.integers(-40, 300).map(lambda v: v / 2)
point = st.tuples(coordinate, coordinate)


@st.composite
def scenes(draw: st.DrawFn) -> list[tuple[list[Point], list[list[Point]]]]:
    scene = st.tuples(
        st.lists(point, max_size=5),
        st.lists(st.lists(point, min_size=1, max_size=4), max_size=3),
    )
    return draw(st.lists(scene, min_size=1, max_size=3))


@PROFILE
@given(scenes(), st.sampled_from([math.nan, 0.0, 1e6]), st.integers(0, 1))
def test_path_scores_equal_double_loops(
    case: list[tuple[list[Point], list[list[Point]]]], junk: float, extra: int
) -> None:
    """Whatever lies in the padding, and however much of it there is."""
    B = len(case)
    T = max(len(points) for points, _ in case) + extra
    K = max(len(paths) for _, paths in case) + extra
    M = max((len(path) for _, paths in case for path in paths), default=0) + extra
    points = torch.full((B, T, 2), junk, dtype=torch.float64)
    paths = torch.full((B, K, M, 2), junk, dtype=torch.float64)
    lengths = torch.zeros(B, dtype=torch.long)
    path_lengths, num_paths = torch.zeros(B, K, dtype=torch.long), torch.zeros(B, dtype=torch.long)
    for b, (predicted, valid) in enumerate(case):
        lengths[b], num_paths[b] = len(predicted), len(valid)
        for t, p in enumerate(predicted):
            points[b, t] = torch.tensor(p, dtype=torch.float64)
        for k, path in enumerate(valid):
            path_lengths[b, k] = len(path)
            for m, q in enumerate(path):
                paths[b, k, m] = torch.tensor(q, dtype=torch.float64)
    scores = path_scores(points, lengths, paths, path_lengths, num_paths, empty=77.0)
    for b, (predicted, valid) in enumerate(case):
        ade, hd = brute_path(predicted, valid, 77.0)
        assert scores["min_ade"][b].item() == pytest.approx(ade, abs=1e-9)
        assert scores["min_hd"][b].item() == pytest.approx(hd, abs=1e-9)


def test_path_scores_of_an_empty_prediction_is_the_diagonal() -> None:
    paths = torch.zeros(2, 1, 3, 2)
    one = torch.ones(2, dtype=torch.long)
    lengths = torch.tensor([0, 1])
    scores = path_scores(torch.zeros(2, 4, 2), lengths, paths, torch.full((2, 1), 3), one)
    assert scores["min_ade"].tolist() == pytest.approx([256 * math.sqrt(2), 0.0])
    assert scores["min_hd"].tolist() == pytest.approx([IMAGE_DIAGONAL, 0.0])


def test_path_scores_are_exact_far_from_the_origin() -> None:
    """A distance by matrix products would lose these digits in float32."""
    points = torch.tensor([[[251.37, 203.11]]]).repeat(1, 80, 1)
    paths = torch.tensor([[[[251.37, 203.13]]]]).repeat(1, 1, 40, 1)
    one = torch.ones(1, dtype=torch.long)
    scores = path_scores(points, 80 * one, paths, torch.tensor([[40]]), one)
    assert scores["min_ade"].item() == pytest.approx(0.02, abs=1e-4)
    assert scores["min_hd"].item() == pytest.approx(0.02, abs=1e-4)


def test_path_scores_reject() -> None:
    one = torch.ones(1, dtype=torch.long)
    with pytest.raises(ValueError, match="points: expected"):
        path_scores(torch.zeros(1, 2, 3), one, torch.zeros(1, 1, 1, 2), one[:, None], one)
    with pytest.raises(ValueError, match="path_lengths: expected"):
        path_scores(torch.zeros(1, 2, 2), one, torch.zeros(1, 1, 1, 2), one, one)


@PROFILE
@given(
    st.lists(st.tuples(st.floats(-3, 8), st.floats(-3, 8)), max_size=6),
    st.lists(st.booleans(), min_size=20, max_size=20),
)
def test_off_road_equals_a_loop(points: list[Point], mask: list[bool]) -> None:
    H, W = 4, 5
    off = 0
    for x, y in points:
        column, row = math.floor(x), math.floor(y)
        off += not (0 <= row < H and 0 <= column < W and mask[row * W + column])
    expected = off / len(points) if points else 1.0
    padded = torch.full((1, len(points) + 2, 2), math.nan, dtype=torch.float64)
    for t, p in enumerate(points):
        padded[0, t] = torch.tensor(p, dtype=torch.float64)
    share = off_road(padded, torch.tensor([len(points)]), torch.tensor(mask).view(1, H, W))
    assert share.item() == pytest.approx(expected, abs=1e-6)


def test_off_road_rejects() -> None:
    with pytest.raises(ValueError, match="drivable: expected a bool"):
        off_road(torch.zeros(1, 2, 2), torch.ones(1, dtype=torch.long), torch.ones(1, 4, 4))


# Several answers.


def test_scores_of_answers_agree_with_loops() -> None:
    generator = torch.Generator().manual_seed(0)
    distances = 8 * torch.rand(40, 3, 4, generator=generator)
    distances[0, 1] = math.inf  # an answer that is not there
    probability = torch.rand(40, 3, generator=generator)
    probability = 0.9 * probability / probability.sum(1, keepdim=True)
    probability[0, 1] = 0
    counts = 1 + torch.arange(40) % 4
    scores = answer_scores(distances, probability, counts, near=4.0)
    for row in range(40):
        paths, p = range(int(counts[row])), probability[row].tolist()
        d = distances[row].tolist()
        nearest = [min(range(3), key=lambda a, k=k: d[a][k]) for k in paths]
        by = [a if d[a][k] <= 4 else None for k, a in enumerate(nearest)]
        brier = [sum((p[a] - (a == hit)) ** 2 for a in range(3)) + (hit is None) for hit in by]
        stray = sum(p[a] for a in range(3) if min(d[a][k] for k in paths) > 4) / sum(p)
        wanted = {
            "min_ade": min(d[a][k] for a in range(3) for k in paths),
            "miss": float(all(hit is None for hit in by)),
            "coverage": sum(hit is not None for hit in by) / len(by),
            "stray": stray,
            "brier": sum(brier) / len(brier),
        }
        assert {name: float(scores[name][row]) for name in wanted} == pytest.approx(wanted, abs=1e-5)
        assert scores["frequency"][row].tolist() == pytest.approx([by.count(a) / len(by) for a in range(3)])


def test_distances_of_answers_are_those_of_one_prediction() -> None:
    generator = torch.Generator().manual_seed(0)
    points, paths = 50 * torch.rand(5, 3, 7, 2, generator=generator), 50 * torch.rand(5, 2, 6, 2, generator=generator)
    lengths, path_lengths = torch.randint(0, 8, (5, 3), generator=generator), torch.randint(1, 7, (5, 2))
    found = path_distances(points, lengths, paths, path_lengths)
    for a in range(3):
        one = path_scores(points[:, a], lengths[:, a], paths, path_lengths, torch.full((5,), 2), empty=math.inf)
        torch.testing.assert_close(found[:, a].amin(-1), one["min_ade"])


def test_calibration_error_is_none_where_what_is_stated_comes_true() -> None:
    p = torch.linspace(0.05, 0.95, 10)
    assert float(calibration_error(p, p)) == 0
    assert float(calibration_error(p, p + 0.03)) == pytest.approx(0.03, abs=1e-6)
    assert float(calibration_error(torch.tensor([0.52, 0.58]), torch.tensor([0.0, 1.0]))) == pytest.approx(0.05)

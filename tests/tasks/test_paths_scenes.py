"""Scenes: enumeration against brute force, invariants of every stored path, drawing, storage, splits."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lane_maps import save_map

from torchcpl.tasks.paths import sampling
from torchcpl.tasks.paths.lanes import Lane, LaneGraph, Line
from torchcpl.tasks.paths.maps import load_map, load_maps
from torchcpl.tasks.paths.procedural import procedural_map
from torchcpl.tasks.paths.sampling import PALETTE, STEP, Roads, distinct, enumerate_paths, sample_scene
from torchcpl.tasks.paths.scenes import (
    Scenes,
    apart,
    cells_of,
    flip,
    generate,
    image_outlines,
    images_overlap,
    load_scenes,
    save_scenes,
    split_scenes,
)

# Enumeration.


def brute_force(
    start: int, edges: set[tuple[int, int]], lengths: list[float], leaves: list[bool], horizon: float, size: int
) -> set[tuple[tuple[int, ...], str]]:
    """Every sequence of different lanes that follows edges and stops where it must and not before."""
    found = set()
    others = [v for v in range(size) if v != start]
    for count in range(size):
        for rest in itertools.permutations(others, count):
            way = (start, *rest)
            if not all(pair in edges for pair in itertools.pairwise(way)):
                continue
            ends = list(itertools.accumulate(lengths[v] for v in way))
            if any(leaves[v] or end >= horizon for v, end in zip(way[:-1], ends[:-1], strict=True)):
                continue
            onward = {b for a, b in edges if a == way[-1]}
            if leaves[way[-1]]:
                found.add((way, "edge"))
            elif ends[-1] >= horizon:
                found.add((way, "horizon"))
            elif not onward:
                found.add((way, "leaf"))
            elif onward <= set(way):
                found.add((way, "loop"))
    return found


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(1, 6), st.booleans())
def test_enumeration_equals_brute_force(data: st.DataObject, size: int, acyclic: bool) -> None:
    pairs = [(a, b) for a in range(size) for b in range(size) if not acyclic or a < b]  # self-loops too
    edges = set(data.draw(st.lists(st.sampled_from(pairs), max_size=14, unique=True))) if pairs else set()
    lengths = data.draw(st.lists(st.floats(1.0, 40.0), min_size=size, max_size=size))
    leaves = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    horizon = data.draw(st.sampled_from([1.0, 30.0, 90.0, math.inf]))
    start = data.draw(st.integers(0, size - 1))
    successors = [[b for a, b in sorted(edges) if a == v] for v in range(size)]
    found = enumerate_paths(start, successors, lengths, leaves, horizon)
    assert len(found) == len(set(found))
    assert set(found) == brute_force(start, edges, lengths, leaves, horizon, size)


def test_enumeration_gives_up_rather_than_hang() -> None:
    complete = [[b for b in range(30) if b != a] for a in range(30)]
    assert enumerate_paths(0, complete, [1.0] * 30, [False] * 30, horizon=math.inf) == []


def test_distinct_drops_what_never_parts() -> None:
    s = np.linspace(0, 200, 101)
    straight = np.stack([s, 0 * s], axis=1)
    beside = straight + np.array([0, 15.9])  # px; paths part at 16
    apart = straight + np.array([0, 16.1])
    fork = np.stack([s, np.maximum(s - 100, 0)], axis=1)
    assert len(distinct([straight, beside])) == 1
    assert len(distinct([straight, apart])) == 2
    kept = distinct([straight, fork, beside, apart])
    assert [any(line is other for line in kept) for other in (straight, fork, beside, apart)] == [
        True,
        True,
        False,
        True,
    ]


# Small maps by hand.


def line(*corners: tuple[float, float]) -> np.ndarray:
    pieces = [np.linspace(a, b, 200)[:-1] for a, b in itertools.pairwise(corners)]
    return np.concatenate([*pieces, [corners[-1]]])


def graph(
    lanes: Mapping[str, tuple[str, np.ndarray, tuple[str, ...]]], name: str = "hand", turn: float = 0.0
) -> LaneGraph:
    c, s = math.cos(turn), math.sin(turn)
    rotation = np.array([[c, s], [-s, c]])
    return LaneGraph(name, {k: Lane(kind, at @ rotation, None, onward) for k, (kind, at, onward) in lanes.items()})


def straight_road(turn: float = 0.0) -> LaneGraph:
    lanes = {
        "a": ("lane", line((-20, 0), (20, 0)), ("b",)),
        "b": ("connector", line((20, 0), (400, 0)), ()),
        "before": ("connector", line((-400, 0), (-20, 0)), ("a",)),
    }
    return graph(lanes, turn=turn)


def crossing() -> LaneGraph:
    """A lane east into a crossing at (60, 0) with ways north (left), east and south (right)."""
    return graph(
        {
            "in": ("lane", line((-60, 0), (50, 0)), ("left", "ahead", "right")),
            "left": ("connector", line((50, 0), (58, 3), (60, 10)), ("north",)),
            "ahead": ("connector", line((50, 0), (70, 0)), ("east",)),
            "right": ("connector", line((50, 0), (58, -3), (60, -10)), ("south",)),
            "north": ("connector", line((60, 10), (60, 300)), ()),
            "east": ("connector", line((70, 0), (400, 0)), ()),
            "south": ("connector", line((60, -10), (60, -300)), ()),
        }
    )


def test_a_straight_road_is_a_straight_path() -> None:
    for turn in (0.0, 0.7, math.pi, -2.1):
        for index in range(5):
            scene = sample_scene([Roads(straight_road(turn))], 0, index)
            (path,) = scene.paths
            row = path[0, 1]
            assert abs(row - 128) <= 10
            expected = [(80 + STEP * k, row) for k in range(int(176 / STEP) + 1)]
            np.testing.assert_allclose(path, expected, atol=0.01)
            assert abs(math.remainder(scene.pose[2] - turn, 2 * math.pi)) < 1e-6
            # 3.5 m of road is 7 px, and the ego is on it.
            assert np.isin((scene.image != 0).sum(axis=0), [7, 8]).all()
            assert scene.image[int(row), 80] == sampling.EGO
            assert set(np.unique(scene.image)) <= set(range(len(PALETTE)))


def test_left_is_up_and_the_crossing_has_three_ways() -> None:
    road = Roads(crossing())
    seen = 0
    for index in range(20):
        scene = sample_scene([road], 1, index)
        assert abs(scene.pose[1]) < 1e-9
        gap = 60 - scene.pose[0]  # m to the crossing
        if gap > 75:
            continue
        seen += 1
        assert len(scene.paths) == 3
        row = scene.paths[0][0, 1]
        left, ahead, right = sorted(scene.paths, key=lambda path: path[-1, 1])
        column = 80 + 2 * gap
        assert left[-1, 1] < STEP
        assert abs(left[-1, 0] - column) < 0.1
        assert right[-1, 1] > 256 - STEP
        assert abs(right[-1, 0] - column) < 0.1
        assert ahead[-1, 0] > 256 - STEP
        np.testing.assert_allclose(ahead[:, 1], row, atol=0.01)
    assert seen > 5


def test_chevrons_point_ahead_and_only_on_lanes() -> None:
    scene = sample_scene([Roads(straight_road())], 0, 0)
    x = scene.pose[0]
    columns = np.flatnonzero((scene.image == sampling.DIRECTION).any(axis=0))
    world = x + (columns + 0.5 - 80) / 2
    assert len(columns)
    assert (np.abs(world) < 21).all()
    chevrons = sampling._chevrons(line((0, 0), (40, 0)))  # tails, tip: the tip is ahead
    np.testing.assert_allclose(chevrons[:, 1, 0] - chevrons[:, 0, 0], 1.6)
    np.testing.assert_allclose(np.diff(chevrons[:, 1, 0]), 6.0)
    np.testing.assert_allclose(chevrons[:, 0, 1], -chevrons[:, 2, 1])


def test_drawing_layers_and_holes() -> None:
    square = np.array([[-300.0, -60], [300, -60], [300, 60], [-300, 60]])
    hole = np.array([[10.0, 20], [30, 20], [30, 40], [10, 40]])
    base = straight_road()
    lines = (Line("road_divider", line((-300, 5), (300, 5))), Line("lane_divider", line((-300, -5), (300, -5))))
    view = sampling._View(0.0, 0.0, 0.0, 128.0)
    image = sampling.render(Roads(LaneGraph("area", base.lanes, lines, ((square, hole),))), view)

    def at(x: float, y: float) -> int:
        return int(image[int(128 - 2 * y), int(80 + 2 * x)])

    assert at(20.1, 30.1) == sampling.BACKGROUND
    assert at(50.1, 30.1) == sampling.ROAD
    assert at(50.1, 59.6) == sampling.OUTLINE
    assert at(50.1, 61.6) == sampling.BACKGROUND
    assert (image[117:119, 200] == sampling.ROAD_DIVIDER).any()
    assert (image[137:139, 200] == sampling.LANE_DIVIDER).any()
    off_road = Roads(LaneGraph("bare", base.lanes, lines))
    assert not np.isin(sampling.render(off_road, view), [sampling.ROAD_DIVIDER, sampling.LANE_DIVIDER]).any()


def test_a_map_that_only_ends_is_refused_by_name() -> None:
    short = graph({"a": ("lane", line((0, 0), (30, 0)), ())}, name="cul-de-sac")
    with pytest.raises(ValueError, match=r"'cul-de-sac'.*leads nowhere"):
        generate([short], 2, workers=1)
    with pytest.raises(ValueError, match=r"'bare'.*kind 'lane'"):
        generate([graph({"a": ("connector", line((0, 0), (30, 0)), ())}, name="bare")], 1)
    with pytest.raises(ValueError, match="maps"):
        generate([], 1)
    with pytest.raises(ValueError, match="count"):
        generate([straight_road()], 0)


def test_roads_may_be_cut_off_only_where_the_ego_cannot_go() -> None:
    lanes = {
        "a": ("lane", line((-200, 0), (0, 0)), ("b",)),
        "b": ("lane", line((0, 0), (200, 0)), ()),
        "stub": ("lane", line((0, 20), (0, 30)), ()),  # beside the road, seen from most of it
        "fork": ("lane", line((300, 300), (330, 300)), ("onward", "end")),
        "onward": ("connector", line((330, 300), (700, 300)), ()),
        "end": ("connector", line((330, 300), (345, 320)), ()),
    }
    cut = Roads(graph(lanes, name="cut"))
    at = {"a": np.array([150.0]), "fork": np.array([5.0])}
    whole = {
        key: sampling._look_ahead(cut, list(lanes).index(key), where, sampling._View(0, 0, 0, 128.0), False)
        for key, where in at.items()
    }
    part = {
        key: sampling._look_ahead(cut, list(lanes).index(key), where, sampling._View(0, 0, 0, 128.0), True)
        for key, where in at.items()
    }
    assert whole["a"] is whole["fork"] is part["fork"] is None  # the fork has a way that ends in the image
    assert part["a"] is not None
    assert len(part["a"][1]) == 1
    check_invariants(generate([graph(lanes, name="cut")], 4, workers=1, varied=True))


def test_varied_ground_is_drawn_where_its_paths_are_and_shown_within_its_reach() -> None:
    """The ego stays where it is and heads right; nothing in the image comes from beyond the outline."""
    for seed in range(30):
        vary = sampling.Variation.draw(np.random.default_rng(seed))
        view = sampling._View(10.0, -20.0, 0.7, 120.0, vary)
        ahead = np.array([[10.0, -20.0], [10.0 + 0.01 * np.cos(0.7), -20.0 + 0.01 * np.sin(0.7)]])
        pixels = view.pixels(ahead)
        np.testing.assert_allclose(pixels[0], [80, 120])
        assert abs(pixels[1, 1] - 120) < 1e-5 < pixels[1, 0] - 80
        half, heading = 64 * view.reach, view.heading
        turn = np.array([[np.cos(heading), np.sin(heading)], [-np.sin(heading), np.cos(heading)]])
        centre = np.array([10.0, -20.0]) + np.array([24.0, -4.0]) @ turn  # 24 m ahead and, in row 120, 4 m to the right
        spots = np.random.default_rng(seed).uniform(-3, 3, (20_000, 2)) * 64  # about the centre, m
        shown = sampling._inside(view.pixels(centre + spots @ turn))
        assert shown.any()
        assert (np.abs(spots[shown]) <= half + 1e-6).all()
    check_invariants(made := generate([procedural_map(20, seed=5)], 12, seed=3, workers=1, varied=True))
    assert (made.reach != 1).any()
    assert (made.reach == 1).any()


def test_ground_folded_within_the_image_is_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few variations do, so one is given here; the next one drawn is used."""
    folds = sampling.Variation(0.78, 0.79, -0.25, -0.0012, -0.0008)
    draws = [folds, sampling.AS_IT_IS]
    monkeypatch.setattr(sampling.Variation, "draw", lambda rng: draws.pop(0) if draws else sampling.AS_IT_IS)
    monkeypatch.setattr(sampling, "VARIED", 1.0)
    assert all(sampling._View(0, 0, 0, row, folds).reach == np.inf for row in range(110, 146))
    made = generate([procedural_map(20, seed=5)], 4, seed=3, workers=1, varied=True)
    assert not draws
    np.testing.assert_array_equal(made.reach, 1.0)


def test_scenes_stored_without_their_reach_show_what_they_always_did(made: Scenes, tmp_path: Path) -> None:
    save_scenes(made, tmp_path / "new.npz")
    stored = dict(np.load(tmp_path / "new.npz"))
    np.savez(tmp_path / "old.npz", **{name: value for name, value in stored.items() if name != "reach"})
    np.testing.assert_array_equal(load_scenes(tmp_path / "old.npz").reach, 1.0)
    np.savez(tmp_path / "bad.npz", **{**stored, "reach": stored["reach"] * np.nan})
    with pytest.raises(ValueError, match=r"bad\.npz: field 'reach': expected finite numbers above 0"):
        load_scenes(tmp_path / "bad.npz")


def test_points_that_round_onto_the_edge_are_refused(made: Scenes, tmp_path: Path) -> None:
    """As float64 they lie in the image, as float32 in a cell that does not exist."""
    save_scenes(made, tmp_path / "new.npz")
    stored = dict(np.load(tmp_path / "new.npz"))
    stored["paths"] = stored["paths"].astype(np.float64)
    np.savez(tmp_path / "wide.npz", **stored)
    equal(load_scenes(tmp_path / "wide.npz"), made)
    stored["paths"][0, 0, 1, 0] = 256 - 1e-9
    np.savez(tmp_path / "wide.npz", **stored)
    with pytest.raises(ValueError, match=r"wide\.npz: expected 1 to 6 paths a scene.* in the image"):
        load_scenes(tmp_path / "wide.npz")


def test_a_map_driven_the_other_way() -> None:
    graph = procedural_map(6, seed=4)
    back = graph.reversed()
    edges = {(key, s) for key, lane in graph.lanes.items() for s in lane.successors}
    assert {(s, key) for key, lane in back.lanes.items() for s in lane.successors} == edges
    again = back.reversed()
    for key, lane in graph.lanes.items():
        np.testing.assert_array_equal(back.lanes[key].centerline[::-1], lane.centerline)
        np.testing.assert_array_equal(again.lanes[key].centerline, lane.centerline)
        assert set(again.lanes[key].successors) == set(lane.successors)
    check_invariants(generate([back], 4, workers=1, varied=True))


def test_apart_equals_a_look_at_every_pair(made: Scenes) -> None:
    first, second = made.select(range(40)), made.select(range(40, 80))
    meets = images_overlap(image_outlines(first), image_outlines(second))
    meets &= first.map_index[:, None] == second.map_index
    found = apart(first, second)
    np.testing.assert_array_equal(found, np.flatnonzero(~meets.any(axis=1)))
    assert 0 < len(found) < 40
    other = dataclasses.replace(second, maps=("x", "y"))  # of other maps: nothing overlaps
    assert len(apart(first, other)) == 40


def test_rings_do_not_hang() -> None:
    angle = np.linspace(0, 2 * math.pi, 41)
    circle = 15 * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    half = circle[:21], circle[20:]
    closed = {"a": ("lane", half[0], ("b",)), "b": ("lane", half[1], ("a",))}
    with pytest.raises(ValueError, match="ring"):
        generate([graph(closed, name="ring")], 1, workers=1)
    exits = {
        "a": ("lane", half[0], ("b", "out")),
        "b": ("connector", half[1], ("a",)),
        "out": ("connector", line((-15, 0), (-15, -300)), ()),
    }
    scene = sample_scene([Roads(graph(exits, name="exit"))], 0, 0)
    assert len(scene.paths) == 1


# What is stored.


@pytest.fixture(scope="module")
def made() -> Scenes:
    return generate([procedural_map(24, (1, 1, 1, 1, 1, 1), seed=1), procedural_map(12, seed=2)], 80, workers=1)


def check_invariants(scenes: Scenes) -> None:
    mask = scenes.images != sampling.BACKGROUND
    for i in range(len(scenes)):
        count = scenes.counts[i]
        assert 1 <= count <= 6
        ego = scenes.paths[i, 0, 0]
        assert ego[0] == 80
        assert abs(ego[1] - 128) <= 10
        assert (scenes.images[i] == sampling.EGO).any()
        for j in range(6):
            n = scenes.lengths[i, j]
            assert (n > 0) == (j < count)
            assert (scenes.paths[i, j, n:] == -1).all()
            if not n:
                continue
            path = scenes.paths[i, j, :n]
            assert 2 <= n <= 64
            np.testing.assert_array_equal(path[0], ego)
            seen = set()
            for x, y in path.tolist():
                assert 0 <= x < 256
                assert 0 <= y < 256
                assert mask[i, int(y), int(x)]
                seen.add((int(x // 8), int(y // 8)))
            assert len(seen) == n
            gaps = np.hypot(*np.diff(path, axis=0).T)
            # A dropped point leaves a gap; an arc is no shorter than its chord.
            assert np.median(gaps) <= STEP + 1e-3
            assert gaps[0] <= STEP + 1e-3
        for a, b in itertools.combinations(range(count), 2):
            p, q = scenes.paths[i, a, : scenes.lengths[i, a]], scenes.paths[i, b, : scenes.lengths[i, b]]
            gap = np.hypot(*(p[:, None] - q[None]).transpose(2, 0, 1))
            # Paths part by 16 px somewhere; stored points may miss the spot by half a step.
            assert max(gap.min(axis=0).max(), gap.min(axis=1).max()) > 16 - STEP


def test_procedural_scenes_keep_every_promise(made: Scenes) -> None:
    check_invariants(made)
    assert set(made.counts) == {1, 2, 3, 4, 5, 6}
    assert made.maps == ("procedural-1", "procedural-2")
    assert set(made.map_index) == {0, 1}


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6])
def test_procedural_shares_set_the_number_of_paths(n: int) -> None:
    shares = [0.0] * 6
    shares[n - 1] = 1.0
    counts = generate([procedural_map(8, shares, seed=5)], 20, workers=1).counts
    assert (counts == n).mean() >= 0.9


def test_real_scenes_keep_every_promise(shared_data: Path) -> None:
    maps = load_maps(shared_data / "lane-graphs")
    scenes = generate(maps, 120, seed=7, workers=1)
    check_invariants(scenes)
    assert (scenes.counts == 1).mean() > 0.4
    for one in maps:  # a map alone, as a held-out one would be
        alone = generate([one], 4, seed=8, workers=1)
        check_invariants(alone)
        assert alone.maps == (one.name,)


def test_a_map_never_seen_loads_and_generates(tmp_path: Path) -> None:
    save_map(procedural_map(6, seed=99), tmp_path / "held-out.json")
    check_invariants(generate([load_map(tmp_path / "held-out.json")], 6, workers=1))


def equal(a: Scenes, b: Scenes) -> None:
    for name in ("images", "paths", "lengths", "map_index", "poses"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
    assert a.maps == b.maps


def test_the_same_scenes_whatever_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    maps = [procedural_map(6, seed=1), procedural_map(4, seed=2)]
    one = generate(maps, 40, seed=3, workers=1)
    with monkeypatch.context() as patch:
        patch.delattr(os, "fork", raising=False)  # a worker forked off a process with threads can hang
        equal(one, generate(maps, 40, seed=3, workers=2, progress=True))
    equal(one.select(range(10)), generate(maps, 10, seed=3, workers=1))
    assert (one.images != generate(maps, 40, seed=4, workers=1).images).any()


def test_save_and_load(made: Scenes, tmp_path: Path) -> None:
    save_scenes(made, tmp_path / "scenes.npz")
    equal(made, load_scenes(tmp_path / "scenes.npz"))
    assert (tmp_path / "scenes.npz").stat().st_size / len(made) < 64e6 / 6000 / 2
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    with pytest.raises(ValueError, match=r"other\.npz"):
        load_scenes(tmp_path / "other.npz")


# Splits.


def test_split_by_index(made: Scenes) -> None:
    split = split_scenes(made, "index")
    assert (len(split.train), len(split.val), len(split.held_out), len(split.dropped)) == (64, 16, 0, 0)
    assert [*split.train, *split.val] == list(range(80))
    with pytest.raises(ValueError, match="val"):
        split_scenes(made, "index", 1.0)


def rotated(
    centre: np.ndarray, heading: float, side: float = 128.0
) -> tuple[tuple[float, float], tuple[float, float], float]:
    return (float(centre[0]), float(centre[1])), (side, side), math.degrees(heading)


@settings(max_examples=200, deadline=None)
@given(
    st.tuples(st.floats(-200, 200), st.floats(-200, 200)),
    st.floats(-10, 10),
    st.floats(-10, 10),
    st.floats(0.5, 2.0),
)
def test_overlap_of_images_agrees_with_opencv(offset: tuple[float, float], a: float, b: float, reach: float) -> None:
    import cv2

    zero, other = np.zeros(2), np.array(offset)
    ours = bool(images_overlap(np.array([[0.0, 0.0, a, 64.0]]), np.array([[*offset, b, 64.0 * reach]]))[0, 0])
    shrunk, grown = (
        cv2.rotatedRectangleIntersection(rotated(zero, a, side), rotated(other, b, side * reach))[0]
        for side in (127.8, 128.2)
    )
    assert ours or shrunk == cv2.INTERSECT_NONE
    assert not ours or grown != cv2.INTERSECT_NONE


def test_image_centres_are_the_pixel_in_the_middle(made: Scenes) -> None:
    for i, centre in enumerate(image_outlines(made)[:, :2]):
        x, y, heading = made.poses[i].tolist()
        view = sampling._View(x, y, heading, float(made.paths[i, 0, 0, 1]))
        np.testing.assert_allclose(view.pixels(centre[None]), [[128, 128]], atol=1e-4)


def check_apart(scenes: Scenes, one: np.ndarray, two: np.ndarray) -> None:
    import cv2

    centres = image_outlines(scenes)[:, :2]
    for i in one:
        for j in two:
            if scenes.map_index[i] == scenes.map_index[j] and np.hypot(*(centres[i] - centres[j])) < 182:
                a, b = (rotated(centres[k], scenes.poses[k, 2], 127.9) for k in (i, j))
                assert cv2.rotatedRectangleIntersection(a, b)[0] == cv2.INTERSECT_NONE


def check_parts(scenes: Scenes, held_out: float) -> None:
    split = split_scenes(scenes, "geography", 0.2, held_out)
    parts = [split.train, split.val, split.held_out, split.dropped]
    assert sorted(itertools.chain(*parts)) == list(range(len(scenes)))
    assert abs(len(split.val) - 0.2 * len(scenes)) <= 2
    assert abs(len(split.held_out) - held_out * len(scenes)) <= 2
    assert len(split.train) > len(scenes) / 3
    for one, two in itertools.combinations(parts[:3], 2):
        check_apart(scenes, one, two)
    assert f"{len(split.dropped)} dropped" in str(split)


@pytest.mark.parametrize("held_out", [0.0, 0.1])
def test_geography_split_parts_are_apart(made: Scenes, held_out: float) -> None:
    check_parts(made, held_out)


@pytest.mark.parametrize("held_out", [0.0, 0.1])
def test_geography_split_parts_are_apart_on_real_maps(shared_data: Path, held_out: float) -> None:
    check_parts(generate(load_maps(shared_data / "lane-graphs"), 240, seed=1, workers=1), held_out)


def test_a_map_is_left_out_whole_and_choices_are_made_on_areas_of_the_others(made: Scenes) -> None:
    other = dataclasses.replace(made, maps=("here", "there"), map_index=np.arange(len(made)) % 2)
    split = split_scenes(other, "map:there", held_out=0.2)
    assert split.val.tolist() == np.flatnonzero(other.map_index == 1).tolist()
    assert sorted(itertools.chain(split.train, split.held_out, split.dropped)) == np.arange(0, len(made), 2).tolist()
    assert len(split.held_out) == round(0.2 * len(made) / 2)
    check_apart(other, split.train, split.held_out)
    with pytest.raises(ValueError, match="split = 'map:nowhere': expected one of the maps here, there"):
        split_scenes(other, "map:nowhere")
    with pytest.raises(ValueError, match="split = 'there': expected one of the maps here, there"):
        split_scenes(other, "there")


# On the device.


def test_flip_mirrors_images_and_paths_alike(made: Scenes) -> None:
    images, paths = torch.from_numpy(made.images), torch.from_numpy(made.paths)
    kept = images.clone(), paths.clone()
    which = torch.arange(len(made)) % 2 == 0
    flipped_images, flipped_paths = flip(images, paths, which)
    assert torch.equal(images, kept[0])
    assert torch.equal(paths, kept[1])
    for i in range(len(made)):
        if i % 2:
            assert torch.equal(flipped_images[i], images[i])
            assert torch.equal(flipped_paths[i], paths[i])
            continue
        np.testing.assert_array_equal(flipped_images[i].numpy(), made.images[i, ::-1])
        for j in range(6):
            for t in range(64):
                x, y = made.paths[i, j, t].tolist()
                expected = [x, y] if t >= made.lengths[i, j] else [x, 256 - y]
                assert flipped_paths[i, j, t].tolist() == pytest.approx(expected)
    everything = flip(images, paths, which | True)
    back = flip(*everything, which | True)
    assert torch.equal(back[0], images)
    torch.testing.assert_close(back[1], paths, atol=1e-4, rtol=0)
    mirrored = dataclasses.replace(made, images=everything[0].numpy(), paths=everything[1].numpy())
    check_invariants(mirrored)


def test_cells_of(made: Scenes) -> None:
    cells = cells_of(torch.from_numpy(made.paths))
    assert cells.dtype == torch.long
    for i in range(10):
        for j in range(6):
            for t in range(64):
                if t >= made.lengths[i, j]:
                    assert cells[i, j, t] == -1
                    continue
                x, y = made.paths[i, j, t].tolist()
                assert cells[i, j, t] == int(y // 8) * 32 + int(x // 8)

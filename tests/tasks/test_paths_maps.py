"""Lane maps: readers against independent geometry, errors that name file, lane and field."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lane_maps import save_map

from torchcpl.tasks.paths.lanes import Lane, LaneGraph, Line
from torchcpl.tasks.paths.maps import load_map, load_maps
from torchcpl.tasks.paths.nuscenes import discretize
from torchcpl.tasks.paths.procedural import procedural_map

LANE_GRAPH: dict[str, Any] = {
    "format": "lane-graph/1",
    "map": "two",
    "units": "metres",
    "source": "",
    "lanes": {
        "a": {
            "kind": "lane",
            "centerline": [[0.0, 0.0], [10.0, 0.0]],
            "polygon": [[0.0, 2.0], [10.0, 2.0], [10.0, -2.0], [0.0, -2.0]],
            "successors": ["b"],
        },
        "b": {"kind": "connector", "centerline": [[10.0, 0.0], [12.5, 1.0]], "polygon": None, "successors": []},
    },
    "lines": [{"kind": "lane_divider_solid", "points": [[0.0, 2.0], [10.0, 2.0]]}],
}


def write(path: Path, data: object) -> Path:
    path.write_text(json.dumps(data))
    return path


def same(a: LaneGraph, b: LaneGraph) -> None:
    assert a.name == b.name
    assert list(a.lanes) == list(b.lanes)
    for x, y in zip(a.lanes.values(), b.lanes.values(), strict=True):
        assert (x.kind, x.successors) == (y.kind, y.successors)
        np.testing.assert_array_equal(x.centerline, y.centerline)
        assert (x.polygon is None) == (y.polygon is None)
        if x.polygon is not None and y.polygon is not None:
            np.testing.assert_array_equal(x.polygon, y.polygon)
    assert [line.kind for line in a.lines] == [line.kind for line in b.lines]
    for p, q in zip(a.lines, b.lines, strict=True):
        np.testing.assert_array_equal(p.points, q.points)
    assert [len(rings) for rings in a.areas] == [len(rings) for rings in b.areas]
    for rings, others in zip(a.areas, b.areas, strict=True):
        for ring, other in zip(rings, others, strict=True):
            np.testing.assert_array_equal(ring, other)


def test_lane_graph_reads_what_is_written(tmp_path: Path) -> None:
    graph = load_map(write(tmp_path / "two.json", LANE_GRAPH))
    assert graph.name == "two"
    assert graph.lanes["a"].successors == ("b",)
    assert graph.lanes["b"].polygon is None
    np.testing.assert_array_equal(graph.lanes["b"].centerline, [[10.0, 0.0], [12.5, 1.0]])
    assert [line.kind for line in graph.lines] == ["lane_divider_solid"]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 6), st.booleans())
def test_lane_graph_round_trip(tmp_path_factory: pytest.TempPathFactory, seed: int, lanes: int, areas: bool) -> None:
    rng = np.random.default_rng(seed)
    keys = [f"lane {i}" for i in range(lanes)]
    graph = LaneGraph(
        "random",
        {
            key: Lane(
                kind=str(rng.choice(["lane", "connector"])),
                centerline=rng.normal(size=(int(rng.integers(2, 6)), 2)) * 1e3,
                polygon=rng.normal(size=(4, 2)) if rng.random() < 0.5 else None,
                successors=tuple(k for k in keys if rng.random() < 0.4),
            )
            for key in keys
        },
        (Line("road_divider", rng.normal(size=(3, 2))),),
        ((rng.normal(size=(5, 2)), rng.normal(size=(3, 2))), (rng.normal(size=(3, 2)),)) if areas else (),
    )
    path = tmp_path_factory.mktemp("maps") / "random.json"
    save_map(graph, path)
    same(load_map(path), graph)


@pytest.mark.parametrize(
    ("where", "value", "words"),
    [
        (("lanes", "a", "centerline"), [[0, 0]], ["lane 'a'", "centerline", "at least 2"]),
        (("lanes", "a", "centerline"), [[0, 0], [0, math.nan]], ["lane 'a'", "centerline", "not finite"]),
        (("lanes", "a", "centerline"), [[0, 0], [math.inf, 0]], ["lane 'a'", "centerline", "not finite"]),
        (("lanes", "a", "centerline"), [[0, 0], [1]], ["lane 'a'", "centerline"]),
        (("lanes", "a", "centerline"), [[0, 0, 0], [1, 1, 1]], ["lane 'a'", "centerline"]),
        (("lanes", "a", "centerline"), [[3, 4], [3, 4]], ["lane 'a'", "centerline", "the same"]),
        (("lanes", "a", "centerline"), "line", ["lanes: a", "centerline", "'line'"]),
        (("lanes", "a", "centerline"), None, ["lanes: a", "centerline"]),
        (("lanes", "b", "kind"), "road", ["lane 'b'", "kind", "'road'"]),
        (("lanes", "b", "kind"), ["lane"], ["lanes: b", "kind"]),
        (("lanes", "a", "polygon"), [[0, 0], [1, 1]], ["lane 'a'", "polygon", "at least 3"]),
        (("lanes", "a", "successors"), ["c"], ["lane 'a'", "successors", "'c'"]),
        (("lanes", "a", "successors"), "b", ["lanes: a", "successors"]),
        (("lanes", "a", "successors"), [1], ["lanes: a", "successors"]),
        (("lanes", "a"), 5, ["lanes: a", "5"]),
        (("lanes",), [], ["lanes"]),
        (("lines", 0, "kind"), "kerb", ["line 0", "kind", "'kerb'"]),
        (("lines", 0, "points"), [[0, 0]], ["line 0", "points"]),
        (("units",), "feet", ["units", "'feet'"]),
        (("format",), "lane-graph/2", ["format", "'lane-graph/2'"]),
        (("areas",), [[]], ["area 0"]),
        (("areas",), [[[[0, 0], [1, 0]]]], ["area 0", "ring 0"]),
    ],
)
def test_malformed_lane_graph_names_file_lane_and_field(
    tmp_path: Path, where: tuple[Any, ...], value: object, words: list[str]
) -> None:
    data = copy.deepcopy(LANE_GRAPH)
    record = data
    for key in where[:-1]:
        record = record[key]
    record[where[-1]] = value
    path = write(tmp_path / "broken.json", data)
    with pytest.raises(ValueError, match=r"broken\.json") as error:
        load_map(path)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("name", ["kind", "centerline", "polygon", "successors"])
def test_missing_field_is_named(tmp_path: Path, name: str) -> None:
    data = copy.deepcopy(LANE_GRAPH)
    del data["lanes"]["a"][name]
    with pytest.raises(ValueError, match=rf"broken\.json: lanes: a: {name} is missing"):
        load_map(write(tmp_path / "broken.json", data))


def test_unknown_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"other\.json: not a known map"):
        load_map(write(tmp_path / "other.json", {"type": "FeatureCollection"}))
    with pytest.raises(ValueError, match=r"list\.json: not a known map"):
        load_map(write(tmp_path / "list.json", [1, 2]))
    (tmp_path / "text.json").write_text("not json")
    with pytest.raises(ValueError, match=r"text\.json"):
        load_map(tmp_path / "text.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty: no \*\.json map"):
        load_maps(tmp_path / "empty")


# nuScenes.


def integrate(record: dict[str, Any], steps: int = 20_000) -> np.ndarray:
    """Reference: the pose pushed along in tiny steps (midpoint rule), one segment after the other."""
    x, y, yaw = record["start_pose"]
    dots = [[x, y]]
    for letter, length in zip(record["shape"], record["segment_length"], strict=True):
        curvature = {"L": 1, "R": -1, "S": 0}[letter] / record["radius"]
        ds = length / steps
        for _ in range(steps if length else 0):
            middle = yaw + curvature * ds / 2
            x, y, yaw = x + ds * math.cos(middle), y + ds * math.sin(middle), yaw + curvature * ds
            dots.append([x, y])
    return np.array(dots)


def distance_to(line: np.ndarray, dots: np.ndarray) -> np.ndarray:
    """From each dot to the nearest point of a finely sampled line."""
    return np.array([np.hypot(*(line - dot).T).min() for dot in dots])


def arc(start: tuple[float, float, float], shape: str, radius: float, lengths: list[float]) -> dict[str, Any]:
    record = {"start_pose": list(start), "shape": shape, "radius": radius, "segment_length": lengths}
    end = integrate(record, steps=2000)[-1].tolist()
    turned = sum({"L": 1, "R": -1, "S": 0}[s] * d / radius for s, d in zip(shape, lengths, strict=True))
    return record | {"end_pose": [*end, start[2] + turned]}


def nuscenes_file() -> dict[str, Any]:
    """A small map in the schema of the official expansion, version 1.3."""
    first = arc((0.0, 0.0, 0.3), "LSR", 12.0, [7.5, 10.25, 9.0])
    second = arc(tuple(first["end_pose"]), "RLR", 25.0, [3.0, 20.0, 4.0])
    turn = arc(tuple(second["end_pose"]), "RSL", 6.5, [9.0, 0.0, 2.0])
    nodes = {"n0": (0, 2), "n1": (40, 2), "n2": (40, -2), "n3": (0, -2), "h0": (5, 0), "h1": (6, 0), "h2": (6, 1)}
    empty = ("road_segment", "road_block", "ped_crossing", "walkway", "stop_line", "carpark_area", "traffic_light")
    return {
        "version": "1.3",
        "canvas_edge": [2000.0, 2000.0],
        "node": [{"token": k, "x": float(x), "y": float(y)} for k, (x, y) in nodes.items()],
        "polygon": [
            {"token": "p0", "exterior_node_tokens": ["n0", "n1", "n2", "n3"], "holes": []},
            {
                "token": "p1",
                "exterior_node_tokens": ["n0", "n1", "n2", "n3"],
                "holes": [{"node_tokens": ["h0", "h1", "h2"]}],
            },
        ],
        "line": [{"token": "l0", "node_tokens": ["n0", "n1"]}, {"token": "l1", "node_tokens": ["n3", "n2"]}],
        "lane": [
            {
                "token": "lane",
                "polygon_token": "p0",
                "lane_type": "CAR",
                "from_edge_line_token": "l0",
                "to_edge_line_token": "l1",
                "left_lane_divider_segments": [{"node_token": "n0", "segment_type": "DOUBLE_DASHED_WHITE"}],
                "right_lane_divider_segments": [],
            }
        ],
        "lane_connector": [{"token": "turn", "polygon_token": "p1"}],
        "arcline_path_3": {"lane": [first, second], "turn": [turn]},
        "connectivity": {
            "lane": {"incoming": [], "outgoing": ["turn", "absent"]},
            "turn": {"incoming": ["lane"], "outgoing": []},
        },
        "drivable_area": [{"token": "d0", "polygon_tokens": ["p1"]}],
        "road_divider": [{"token": "r0", "line_token": "l1", "road_segment_token": None}],
        "lane_divider": [
            {
                "token": "v0",
                "line_token": "l0",
                "lane_divider_segments": [
                    {"node_token": "n0", "segment_type": "SINGLE_SOLID_WHITE"},
                    {"node_token": "n1", "segment_type": "NIL"},
                ],
            }
        ],
        **{layer: [] for layer in empty},
    }


def test_nuscenes_centrelines_are_within_a_centimetre_of_fine_integration(tmp_path: Path) -> None:
    data = nuscenes_file()
    graph = load_map(write(tmp_path / "city.json", data))
    for key, records in data["arcline_path_3"].items():
        line = graph.lanes[key].centerline
        reference = np.concatenate([integrate(record) for record in records])
        assert distance_to(reference, line).max() < 0.01
        # The other way round against segments between points: 1 m chords of a 6.5 m radius sag by 2 cm.
        dense = np.stack([np.interp(np.linspace(0, 1, 4000), np.linspace(0, 1, len(line)), c) for c in line.T], 1)
        assert distance_to(dense, reference[::500]).max() < 0.03
        np.testing.assert_allclose(line[0], records[0]["start_pose"][:2], atol=1e-9)
        np.testing.assert_allclose(line[-1], records[-1]["end_pose"][:2], atol=1e-3)
        steps = np.hypot(*np.diff(line, axis=0).T)
        assert steps.min() > 0
        assert steps.max() <= 1.0 + 1e-9


@settings(max_examples=30, deadline=None)
@given(
    st.tuples(st.floats(-500, 500), st.floats(-500, 500), st.floats(-3.2, 3.2)),
    st.sampled_from(["LSL", "LSR", "RSL", "RSR", "LRL", "RLR"]),
    st.floats(3.0, 1000.0),
    st.lists(st.floats(0.0, 15.0), min_size=3, max_size=3),
)
def test_arcs_of_every_shape_match_integration(
    start: tuple[float, float, float], shape: str, radius: float, lengths: list[float]
) -> None:
    record = {"start_pose": list(start), "shape": shape, "radius": radius, "segment_length": lengths}
    line = discretize(record)
    reference = integrate(record, steps=300)
    assert np.hypot(*(line[-1] - reference[-1])) < 1e-4
    gaps = np.hypot(*np.diff(reference, axis=0).T).max(initial=0)
    assert distance_to(reference, line).max() < gaps / 2 + 1e-4


def test_nuscenes_layers(tmp_path: Path) -> None:
    graph = load_map(write(tmp_path / "city.json", nuscenes_file()))
    assert graph.name == "city"
    assert {key: lane.kind for key, lane in graph.lanes.items()} == {"lane": "lane", "turn": "connector"}
    assert graph.lanes["lane"].successors == ("turn",)  # "absent" is no lane of the file
    np.testing.assert_array_equal(graph.lanes["lane"].polygon, [[0, 2], [40, 2], [40, -2], [0, -2]])
    assert graph.lanes["turn"].polygon is None
    assert [line.kind for line in graph.lines] == ["road_divider", "lane_divider"]
    np.testing.assert_array_equal(graph.lines[0].points, [[0, -2], [40, -2]])
    ((outline, hole),) = graph.areas
    assert outline.shape == (4, 2)
    np.testing.assert_array_equal(hole, [[5, 0], [6, 0], [6, 1]])
    data = nuscenes_file()
    data["road_divider"][0]["lane_divider_segments"] = [{"node_token": "n3", "segment_type": "SINGLE_SOLID_WHITE"}]
    assert load_map(write(tmp_path / "city.json", data)).lines[0].kind == "road_divider"


@pytest.mark.parametrize(
    ("where", "value", "words"),
    [
        (("arcline_path_3", "lane", 1, "shape"), "LXR", ["lane 'lane'", "arcline_path_3[1]", "shape", "LXR"]),
        (("arcline_path_3", "lane", 0, "segment_length"), [1.0, 2.0], ["lane 'lane'", "shape"]),
        (("arcline_path_3", "lane", 0, "segment_length"), [1.0, -2.0, 0.0], ["lane 'lane'", "segment_length"]),
        (("arcline_path_3", "lane", 0, "radius"), 0.0, ["lane 'lane'", "radius"]),
        (("arcline_path_3", "lane", 0, "radius"), None, ["arcline_path_3: lane: 0: radius"]),
        (("arcline_path_3", "turn", 0, "start_pose"), [0.0, math.nan, 0.0], ["lane 'turn'", "start_pose"]),
        (("arcline_path_3", "turn"), [], ["lane 'turn'", "arcline_path_3"]),
        (("arcline_path_3",), {"lane": []}, ["lane 'lane'", "arcline_path_3"]),
        (("connectivity",), {}, ["lane 'lane'", "connectivity"]),
        (("lane", 0, "polygon_token"), "p9", ["lane 'lane'", "polygon", "'p9'"]),
        (("polygon", 0, "exterior_node_tokens"), ["n0", "n9", "n1"], ["lane 'lane'", "'n9'"]),
        (("polygon", 0, "exterior_node_tokens"), ["n0", "n1"], ["lane 'lane'", "at least 3"]),
        (("road_divider", 0, "line_token"), "l9", ["road_divider 'r0'", "'l9'"]),
        (("node", 0, "x"), math.nan, ["lane 'lane'", "not finite"]),
        (("lane",), None, ["lane: expected a list"]),
    ],
)
def test_malformed_nuscenes(tmp_path: Path, where: tuple[Any, ...], value: object, words: list[str]) -> None:
    data: Any = nuscenes_file()
    record = data
    for key in where[:-1]:
        record = record[key]
    record[where[-1]] = value
    with pytest.raises(ValueError, match=r"broken\.json") as error:
        load_map(write(tmp_path / "broken.json", data))
    for word in words:
        assert word in str(error.value)


# Argoverse 2.


def xyz(*dots: tuple[float, float]) -> list[dict[str, float]]:
    return [{"x": float(x), "y": float(y), "z": -19.5} for x, y in dots]


def argoverse_file() -> dict[str, Any]:
    """A small map in the schema of ``log_map_archive_*.json``: a straight lane, a quarter turn, a bike lane."""

    def lane(number: int, left: Any, right: Any, **other: Any) -> dict[str, Any]:
        return {
            "id": number,
            "is_intersection": False,
            "lane_type": "VEHICLE",
            "left_lane_boundary": left,
            "left_lane_mark_type": "SOLID_YELLOW",
            "left_neighbor_id": None,
            "right_lane_boundary": right,
            "right_lane_mark_type": "DASHED_WHITE",
            "right_neighbor_id": None,
            "predecessors": [],
            "successors": [],
        } | other

    quarter = np.linspace(0, math.pi / 2, 46)
    around = [
        [(20 + r * math.sin(a), 10 - r * math.cos(a)) for a in quarter] for r in (8.0, 12.0)
    ]  # inner (left) and outer (right) boundary of a left turn about (20, 10)
    none = {"left_lane_mark_type": "NONE", "right_lane_mark_type": "UNKNOWN"}
    return {
        "pedestrian_crossings": {},
        "lane_segments": {
            "11": lane(11, xyz((0, 2), (7, 2), (20, 2)), xyz((0, -2), (20, -2)), successors=[12, 13, 99]),
            "12": lane(12, xyz(*around[0]), xyz(*around[1]), is_intersection=True, **none),
            "13": lane(13, xyz((20, 2), (30, 2)), xyz((20, -2), (30, -2)), lane_type="BIKE"),
        },
        "drivable_areas": {"7": {"id": 7, "area_boundary": xyz((0, -3), (33, -3), (33, 12), (0, 12))}},
    }


def test_argoverse(tmp_path: Path) -> None:
    graph = load_map(write(tmp_path / "log_map_archive_x.json", argoverse_file()))
    assert graph.name == "log_map_archive_x"
    assert {key: lane.kind for key, lane in graph.lanes.items()} == {"11": "lane", "12": "connector"}
    assert graph.lanes["11"].successors == ("12",)  # 99 is outside the file, 13 is for bikes
    straight, turn = graph.lanes["11"].centerline, graph.lanes["12"].centerline
    np.testing.assert_allclose(straight[:, 1], 0, atol=1e-9)
    np.testing.assert_allclose(straight[[0, -1]], [[0, 0], [20, 0]])
    assert np.hypot(*np.diff(straight, axis=0).T).max() <= 1 + 1e-9
    np.testing.assert_allclose(np.hypot(*(turn - [20, 10]).T), 10, atol=0.01)
    np.testing.assert_allclose(turn[-1], [30, 10], atol=1e-9)
    assert [line.kind for line in graph.lines] == ["road_divider", "lane_divider"]
    polygon = graph.lanes["11"].polygon
    assert polygon is not None
    assert polygon.tolist() == [[0, 2], [7, 2], [20, 2], [20, -2], [0, -2]]
    assert graph.areas[0][0].shape == (4, 2)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("left_lane_boundary", xyz((0, 0))),
        ("right_lane_boundary", [{"x": 0.0, "y": math.nan}, {"x": 1.0, "y": 0.0}]),
        ("right_lane_boundary", [{"x": 0.0}, {"x": 1.0, "y": 0.0}]),
        ("left_lane_mark_type", "SOLID_PINK"),
        ("lane_type", "TRAM"),
        ("is_intersection", "no"),
        ("successors", ["12"]),
    ],
)
def test_malformed_argoverse(tmp_path: Path, name: str, value: object) -> None:
    data = argoverse_file()
    data["lane_segments"]["11"][name] = value
    with pytest.raises(ValueError, match=rf"broken\.json: (lane '11'|lane_segments: 11): {name}: "):
        load_map(write(tmp_path / "broken.json", data))
    del data["lane_segments"]["11"][name]
    with pytest.raises(ValueError, match=rf"broken\.json: lane_segments: 11: {name} is missing"):
        load_map(write(tmp_path / "broken.json", data))


# The generator, and real maps.


def test_procedural_map_is_a_function_of_its_seed(tmp_path: Path) -> None:
    same(procedural_map(20, seed=3), procedural_map(20, seed=3))
    assert procedural_map(20, seed=3).name != procedural_map(20, seed=4).name
    graph = procedural_map(20, seed=3)
    save_map(graph, tmp_path / "made.json")
    same(load_map(tmp_path / "made.json"), graph)
    for lane in graph.lanes.values():  # one lane starts where the one before ends
        for successor in lane.successors:
            assert np.hypot(*(lane.centerline[-1] - graph.lanes[successor].centerline[0])) < 1e-6


@pytest.mark.parametrize("shares", [(), (0, 0), (-1, 2), (1,) * 7, (math.nan, 1)])
def test_procedural_map_refuses_shares(shares: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="shares"):
        procedural_map(2, shares)


def test_real_maps_load(shared_data: Path) -> None:
    maps = load_maps(shared_data / "lane-graphs")
    kilometres = {
        m.name: sum(np.hypot(*np.diff(lane.centerline, axis=0).T).sum() for lane in m.lanes.values()) / 1000
        for m in maps
    }
    expected = {"boston-seaport": 65, "singapore-hollandvillage": 28, "singapore-queenstown": 20}
    assert {name: round(value) for name, value in kilometres.items()} == expected

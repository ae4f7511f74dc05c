"""Lane maps: one small graph of lanes, whatever file it came from.

``load_map`` reads three formats and tells them apart by content: ``lane-graph/1`` (here), the nuScenes map
expansion (``nuscenes.py``) and Argoverse 2 (``argoverse.py``). Coordinates are metres, x east, y north.

``lane-graph/1`` is one JSON object::

    {"format": "lane-graph/1", "map": "...", "units": "metres", "source": "...",
     "lanes": {"<id>": {"kind": "lane" | "connector", "centerline": [[x, y], ...],
                        "polygon": [[x, y], ...] | null, "successors": ["<id>", ...]}},
     "lines": [{"kind": "road_divider" | "lane_divider" | "lane_divider_solid", "points": [[x, y], ...]}],
     "areas": [[[[x, y], ...], ...], ...]}

``areas`` is optional: extra drivable polygons, each a list of rings, the outline first and then its holes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from torchcpl.checks import short
from torchcpl.files import read_json

Array: TypeAlias = npt.NDArray[np.float64]

LANE_KINDS = ("lane", "connector")
LINE_KINDS = ("road_divider", "lane_divider", "lane_divider_solid")
FARTHEST = 1e7  # metres from the origin: coordinates of whole countries (UTM) stay below
LONGEST = 1e5  # metres of one lane


@dataclass(frozen=True, eq=False)
class Lane:
    """One directed lane; a ``connector`` is a lane across a junction."""

    kind: str
    centerline: Array  # (P, 2), in driving direction
    polygon: Array | None  # (Q, 2), not closed
    successors: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Line:
    """A painted or physical divider."""

    kind: str
    points: Array  # (P, 2)


@dataclass(frozen=True, eq=False)
class LaneGraph:
    """Lanes by id, divider lines, and optional drivable areas, each its rings: the outline, then its holes."""

    name: str
    lanes: Mapping[str, Lane]
    lines: tuple[Line, ...] = ()
    areas: tuple[tuple[Array, ...], ...] = ()

    def __post_init__(self) -> None:
        for key, lane in self.lanes.items():
            choice(lane.kind, LANE_KINDS, f"lane {key!r}: field 'kind'")
            line = points(lane.centerline, f"lane {key!r}: field 'centerline'")
            if len(without_repeats(line)) < 2:
                raise ValueError(f"lane {key!r}: field 'centerline': all {len(line)} points are the same")
            if arc_length(line)[-1] > LONGEST:
                raise ValueError(f"lane {key!r}: field 'centerline': expected at most {LONGEST:.0f} m")
            for successor in lane.successors:
                if successor not in self.lanes:
                    raise ValueError(f"lane {key!r}: field 'successors': no lane {successor!r} in the map")


def load_map(path: str | Path) -> LaneGraph:
    """Read a map; the format (lane-graph/1, nuScenes expansion, Argoverse 2) is told by its content."""
    from torchcpl.tasks.paths.argoverse import read_argoverse
    from torchcpl.tasks.paths.nuscenes import read_nuscenes

    path = Path(path)
    data = read_json(path)
    try:
        if isinstance(data, dict):
            if "format" in data:
                return read_lane_graph(data, path.stem)
            if "arcline_path_3" in data:
                return read_nuscenes(data, path.stem)
            if "lane_segments" in data:
                return read_argoverse(data, path.stem)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    raise ValueError(
        f"{path}: not a known map: expected a JSON object with 'format': 'lane-graph/1', 'arcline_path_3' "
        "(nuScenes map expansion) or 'lane_segments' (Argoverse 2)"
    )


def load_maps(path: str | Path) -> list[LaneGraph]:
    """Read one map file, or every ``*.json`` of a folder in the order of their names."""
    path = Path(path)
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"{path}: no *.json map in this folder")
    return [load_map(file) for file in files]


def read_lane_graph(data: Mapping[str, Any], name: str = "") -> LaneGraph:
    """``lane-graph/1`` from parsed JSON; ``name`` is the map's where the file gives none."""
    choice(data.get("format"), ("lane-graph/1",), "field 'format'")
    choice(data.get("units", "metres"), ("metres",), "field 'units'")
    lanes = {}
    for key, record in table(data, "lanes", dict).items():
        where = f"lane {key!r}"
        polygon = field(record, "polygon", where)
        lanes[key] = Lane(
            kind=choice(field(record, "kind", where), LANE_KINDS, f"{where}: field 'kind'"),
            centerline=points(field(record, "centerline", where), f"{where}: field 'centerline'"),
            polygon=None if polygon is None else points(polygon, f"{where}: field 'polygon'", 3),
            successors=names(field(record, "successors", where), f"{where}: field 'successors'"),
        )
    lines = []
    for i, record in enumerate(table(data, "lines", list)):
        kind = choice(field(record, "kind", f"line {i}"), LINE_KINDS, f"line {i}: field 'kind'")
        lines.append(Line(kind, points(field(record, "points", f"line {i}"), f"line {i}: field 'points'")))
    areas = []
    for i, rings in enumerate(table(data, "areas", list) if "areas" in data else []):
        if not isinstance(rings, list) or not rings:
            raise ValueError(f"area {i}: expected a list of rings, got {short(rings)}")
        areas.append(tuple(points(ring, f"area {i}: ring {j}", 3) for j, ring in enumerate(rings)))
    return LaneGraph(str(data.get("map", name)), lanes, tuple(lines), tuple(areas))


def save_map(graph: LaneGraph, path: str | Path, source: str = "") -> None:
    """Write ``lane-graph/1``; reading it back gives the same graph exactly."""
    data: dict[str, Any] = {
        "format": "lane-graph/1",
        "map": graph.name,
        "units": "metres",
        "source": source,
        "lanes": {
            key: {
                "kind": lane.kind,
                "centerline": lane.centerline.tolist(),
                "polygon": None if lane.polygon is None else lane.polygon.tolist(),
                "successors": list(lane.successors),
            }
            for key, lane in graph.lanes.items()
        },
        "lines": [{"kind": line.kind, "points": line.points.tolist()} for line in graph.lines],
    }
    if graph.areas:
        data["areas"] = [[ring.tolist() for ring in rings] for rings in graph.areas]
    Path(path).write_text(json.dumps(data, separators=(",", ":")), encoding="utf-8")


# What every reader checks with. `where` names lane and field; `load_map` puts the file before it.


def field(record: object, key: str, where: str) -> Any:
    """``record[key]``, or an error that names both."""
    if not isinstance(record, dict):
        raise ValueError(f"{where}: expected an object with field {key!r}, got {short(record)}")
    if key not in record:
        raise ValueError(f"{where}: field {key!r} is missing")
    return record[key]


def table(data: Mapping[str, Any], key: str, kind: type) -> Any:
    """A top-level table of the file, a JSON list or object as ``kind`` says."""
    value = data.get(key)
    if not isinstance(value, kind):
        expected = "a list" if kind is list else "an object"
        raise ValueError(f"field {key!r}: expected {expected}, got {short(value)}")
    return value


def choice(value: object, options: Sequence[str], where: str) -> str:
    """``value`` if it is one of ``options``."""
    if not isinstance(value, str) or value not in options:
        raise ValueError(f"{where}: expected one of {tuple(options)}, got {short(value)}")
    return value


def names(value: object, where: str) -> tuple[str, ...]:
    """A list of ids, as strings."""
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise ValueError(f"{where}: expected a list of ids (strings), got {short(value)}")
    return tuple(value)


def name_of(value: object, where: str) -> str:
    """An id."""
    if not isinstance(value, str):
        raise ValueError(f"{where}: expected an id (a string), got {short(value)}")
    return value


def objects(value: object, where: str) -> list[dict[str, Any]]:
    """A list of JSON objects."""
    if not isinstance(value, list) or not all(isinstance(v, dict) for v in value):
        raise ValueError(f"{where}: expected a list of objects, got {short(value)}")
    return value


def points(value: object, where: str, minimum: int = 2) -> Array:
    """Finite ``[x, y]`` points, at least ``minimum`` of them, as (P, 2) float64."""
    try:
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"{where}: expected a list of [x, y] numbers, got {short(value)}") from error
    if array.ndim != 2 or array.shape[1] != 2:
        raise ValueError(f"{where}: expected a list of [x, y] numbers, got {short(value)}")
    if len(array) < minimum:
        raise ValueError(f"{where}: expected at least {minimum} points, got {len(array)}")
    near = (np.abs(array) <= FARTHEST).all(axis=1)
    if not near.all():
        bad = int(np.flatnonzero(~near)[0])
        what = "not finite" if not np.isfinite(array[bad]).all() else f"beyond ±{FARTHEST:.0e} m"
        raise ValueError(f"{where}: point {bad} is {what}: {array[bad].tolist()}")
    return array


# Polylines, shared by the readers, the generator and the scenes.


def arc_length(line: Array) -> Array:
    """Distance along a polyline at each of its points, (P,), from 0."""
    steps = np.hypot(*np.diff(line, axis=0).T)
    return np.concatenate([[0.0], np.cumsum(steps)])


def without_repeats(line: Array) -> Array:
    """A polyline without points that repeat the one before."""
    fresh = np.append(True, np.hypot(*np.diff(line, axis=0).T) > 1e-9)
    kept: Array = line[fresh]
    return kept


def along(line: Array, at: Array) -> Array:
    """The points of a polyline at arc lengths ``at``, (len(at), 2)."""
    s = arc_length(line)
    return np.stack([np.interp(at, s, line[:, 0]), np.interp(at, s, line[:, 1])], axis=1)


def every(length: float, spacing: float) -> Array:
    """Arc lengths 0 … ``length`` in equal steps no longer than ``spacing``, both ends included."""
    if length > LONGEST:
        raise ValueError(f"a line of {length:.3g} m: expected at most {LONGEST:.0f} m")
    return np.linspace(0.0, length, max(int(np.ceil(length / spacing)), 1) + 1, dtype=np.float64)

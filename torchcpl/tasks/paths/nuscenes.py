"""The nuScenes map expansion, JSON version 1.3, without the devkit.

A lane's centreline is a list of ``arcline_path_3`` records: a start pose (x, y, yaw), a radius, and three
segments, each an arc to the left (L), to the right (R) or straight (S) as ``shape`` says, of the lengths in
``segment_length``. With signed curvature κ ∈ {1/r, −1/r, 0}, a length s of a segment moves the pose exactly to

    (x, y) + s·sinc(κs/2)·(cos(yaw + κs/2), sin(yaw + κs/2)),   yaw + κs,   sinc(u) = sin(u)/u,

so ``end_pose`` is redundant and not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from torchcpl.checks import short
from torchcpl.tasks.paths.lanes import Array, Lane, LaneGraph, Line, every, get, points, without_repeats

TABLES = ("lane", "lane_connector", "road_divider", "lane_divider", "drivable_area", "polygon", "line", "node")
TURN = {"L": 1.0, "S": 0.0, "R": -1.0}


def read_nuscenes(data: Mapping[str, Any], name: str, spacing: float = 1.0) -> LaneGraph:
    """The lane graph of a nuScenes expansion map, centrelines sampled at most ``spacing`` metres apart.

    Lane connectors get no polygon: theirs is a box around the turn, not the turn. Connectivity that points at
    lanes the file does not hold is left out: the official singapore-onenorth has eight such targets. A drawn
    layer the file lacks (dividers, drivable areas) draws nothing.
    """
    get(data, "lane", "", list)
    read = _Tables(data)
    arclines, connectivity = get(data, "arcline_path_3", "", dict), get(data, "connectivity", "", dict)
    kinds = {"lane": read.rows["lane"], "connector": read.rows["lane_connector"]}
    tokens = {token for rows in kinds.values() for token in rows}
    lanes: dict[str, Lane] = {}
    for kind, rows in kinds.items():
        for token, record in rows.items():
            where = f"lane {token!r}"
            onward = get(get(connectivity, token, f"{where}: connectivity"), "outgoing", where, [str])
            lanes[token] = Lane(
                kind=kind,
                centerline=_centerline(get(arclines, token, f"{where}: arcline_path_3"), where, spacing),
                polygon=read.polygon(get(record, "polygon_token", where, str), where)[0] if kind == "lane" else None,
                successors=tuple(t for t in onward if t in tokens),
            )
    lines = []
    for layer in ("road_divider", "lane_divider"):
        for token, record in read.rows[layer].items():
            where = f"{layer} {token!r}"
            line = read.row("line", get(record, "line_token", where, str), where)
            if len(get(line, "node_tokens", where, [str])) >= 2:  # a single node is not drawn
                kind = layer if layer == "road_divider" else _divider_kind(record, where)
                lines.append(Line(kind, read.nodes(line, "node_tokens", where, 2)))
    areas = [
        read.polygon(key, f"drivable_area {token!r}")
        for token, record in read.rows["drivable_area"].items()
        for key in get(record, "polygon_tokens", f"drivable_area {token!r}", [str])
    ]
    return LaneGraph(name, lanes, tuple(lines), tuple(areas))


def discretize(record: object, where: str, spacing: float = 1.0) -> Array:
    """Points of one ``arcline_path_3`` record, exactly on its arcs, (P, 2); segment ends are among them."""
    shape = get(record, "shape", where, str)
    lengths = _numbers(get(record, "segment_length", where), f"{where}: field 'segment_length'", None)
    x, y, yaw = _numbers(get(record, "start_pose", where), f"{where}: field 'start_pose'", 3)
    (radius,) = _numbers([get(record, "radius", where)], f"{where}: field 'radius'", 1)
    if len(shape) != len(lengths) or set(shape) - set(TURN):
        raise ValueError(
            f"{where}: field 'shape': expected one letter of L, S, R for each of the {len(lengths)} segment "
            f"lengths, got {short(shape)}"
        )
    if radius <= 0:
        raise ValueError(f"{where}: field 'radius': expected a positive number, got {radius}")
    if min(lengths) < 0:
        raise ValueError(f"{where}: field 'segment_length': expected lengths of 0 or more, got {lengths}")
    pieces = [np.array([[x, y]])]
    for turn, length in zip(shape, lengths, strict=True):
        s = every(length, spacing)[1:]
        half = TURN[turn] / radius * s / 2  # κs/2
        chord = s * np.sinc(half / np.pi)
        pieces.append(np.stack([x + chord * np.cos(yaw + half), y + chord * np.sin(yaw + half)], axis=1))
        x, y = pieces[-1][-1]
        yaw += 2 * half[-1]
    return np.concatenate(pieces)


def _centerline(records: object, where: str, spacing: float) -> Array:
    where = f"{where}: arcline_path_3"
    if not isinstance(records, list) or not records:
        raise ValueError(f"{where}: expected a list of arcs, got {short(records)}")
    # Where one arc ends the next begins.
    return without_repeats(np.concatenate([discretize(r, f"{where}[{i}]", spacing) for i, r in enumerate(records)]))


def _divider_kind(record: Mapping[str, Any], where: str) -> str:
    """Solid when more of the divider's typed segments are solid than dashed."""
    segments = get({"lane_divider_segments": [], **record}, "lane_divider_segments", where, [dict])
    types = [str(segment.get("segment_type")) for segment in segments]
    solid = sum("SOLID" in t for t in types) > sum("DASHED" in t for t in types)
    return "lane_divider_solid" if solid else "lane_divider"


def _numbers(value: object, where: str, count: int | None) -> list[float]:
    try:
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError, OverflowError, RecursionError):
        array = np.empty(0)
    if array.ndim != 1 or array.size != (count or max(array.size, 1)) or not np.isfinite(array).all():
        raise ValueError(f"{where}: expected {count or 'some'} finite number(s), got {short(value)}")
    return [float(v) for v in array]


class _Tables:
    """The file's tables by token, and geometry resolved from their nodes."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        for key in TABLES:
            given = get({key: [], **data}, key, "", list)
            self.rows[key] = {get(record, "token", f"{key} {i}", str): record for i, record in enumerate(given)}

    def row(self, key: str, token: str, where: str) -> Any:
        if token not in self.rows[key]:
            raise ValueError(f"{where}: no {key} {token!r} in the map")
        return self.rows[key][token]

    def nodes(self, record: object, key: str, where: str, minimum: int) -> Array:
        at = f"{where}: field {key!r}"
        rows = [(token, self.row("node", token, at)) for token in get(record, key, where, [str])]
        return points([[get(node, axis, f"node {token!r}") for axis in "xy"] for token, node in rows], at, minimum)

    def polygon(self, token: str, where: str) -> tuple[Array, ...]:
        where = f"{where}: polygon {token!r}"
        record = self.row("polygon", token, where)
        holes = [self.nodes(hole, "node_tokens", f"{where}: hole", 3) for hole in get(record, "holes", where, [dict])]
        return (self.nodes(record, "exterior_node_tokens", where, 3), *holes)

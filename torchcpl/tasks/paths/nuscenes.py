"""The nuScenes map expansion, JSON version 1.3, without the devkit.

A lane's centreline is a list of ``arcline_path_3`` records: a start pose (x, y, yaw), a radius, and three
segments, each an arc to the left (L), to the right (R) or straight (S) as ``shape`` says, of the lengths in
``segment_length``. With signed curvature κ ∈ {1/r, −1/r, 0}, a length s of a segment moves the pose exactly to

    (x, y) + s·sinc(κs/2)·(cos(yaw + κs/2), sin(yaw + κs/2)),   yaw + κs,   sinc(u) = sin(u)/u,

so ``end_pose`` is redundant and not read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from torchcpl.checks import short
from torchcpl.files import NUMBER, about
from torchcpl.tasks.paths.lanes import SPACING, Array, Lane, LaneGraph, Line, every, points, without_repeats

Tables = dict[str, dict[str, Any]]  # rows of the file's layers by token
TURN = {"L": 1.0, "S": 0.0, "R": -1.0}
_ROW = {"token": str}
_DIVIDER = _ROW | {"line_token": str}
SCHEMA = {
    "lane": [_ROW | {"polygon_token": str}],
    "lane_connector?": [_ROW],
    "arcline_path_3": {str: [{"start_pose": list, "radius": NUMBER, "shape": str, "segment_length": [NUMBER]}]},
    "connectivity": {str: {"outgoing": [str]}},
    "road_divider?": [_DIVIDER],
    "lane_divider?": [_DIVIDER],
    "drivable_area?": [_ROW | {"polygon_tokens": [str]}],
    "polygon?": [_ROW | {"exterior_node_tokens": [str], "holes": [{"node_tokens": [str]}]}],
    "line?": [_ROW | {"node_tokens": [str]}],
    "node?": [_ROW],
}


def read_nuscenes(data: Mapping[str, Any], name: str) -> LaneGraph:
    """The lane graph of a nuScenes expansion map.

    Lane connectors get no polygon: theirs is a box around the turn, not the turn. Connectivity that points at
    lanes the file does not hold is left out: the official singapore-onenorth has eight such targets. A drawn
    layer the file lacks (dividers, drivable areas) draws nothing.
    """
    layers = [key.removesuffix("?") for key, kind in SCHEMA.items() if isinstance(kind, list)]
    tables = {layer: {row["token"]: row for row in data.get(layer, [])} for layer in layers}
    arclines = {token: arcs for token, arcs in data["arcline_path_3"].items() if arcs}
    kinds = {"lane": tables["lane"], "connector": tables["lane_connector"]}
    tokens = {token for rows in kinds.values() for token in rows}
    lanes: dict[str, Lane] = {}
    for kind, rows in kinds.items():
        for token, record in rows.items():
            with about(f"lane {token!r}"):
                onward = _find(data["connectivity"], token, "connectivity")["outgoing"]
                lanes[token] = Lane(
                    kind=kind,
                    centerline=_centerline(_find(arclines, token, "arcline_path_3")),
                    polygon=_polygon(tables, record["polygon_token"])[0] if kind == "lane" else None,
                    successors=tuple(t for t in onward if t in tokens),
                )
    lines: list[Line] = []
    for layer in ("road_divider", "lane_divider"):
        for token, record in tables[layer].items():
            with about(f"{layer} {token!r}"):
                line = _find(tables["line"], record["line_token"], "line")["node_tokens"]
                if len(line) >= 2:  # a single node is not drawn
                    lines.append(Line(layer, _nodes(tables, line, 2)))
    areas = []
    for token, record in tables["drivable_area"].items():
        with about(f"drivable_area {token!r}"):
            areas += [_polygon(tables, key) for key in record["polygon_tokens"]]
    return LaneGraph(name, lanes, tuple(lines), tuple(areas))


def discretize(record: Mapping[str, Any]) -> Array:
    """Points of one ``arcline_path_3`` record, exactly on its arcs, (P, 2); segment ends are among them."""
    shape, lengths, radius = record["shape"], record["segment_length"], record["radius"]
    ((x, y, yaw),) = points([record["start_pose"]], "start_pose", 1, width=3)
    if not shape or len(shape) != len(lengths) or set(shape) - set(TURN):
        raise ValueError(
            f"shape: expected one letter of L, S, R for each of the {len(lengths)} segment lengths, got {short(shape)}"
        )
    if radius <= 0:
        raise ValueError(f"radius: expected a positive number, got {radius}")
    if min(lengths) < 0:
        raise ValueError(f"segment_length: expected lengths of 0 or more, got {lengths}")
    pieces = [np.array([[x, y]])]
    for turn, length in zip(shape, lengths, strict=True):
        s = every(length, SPACING)[1:]
        half = TURN[turn] / radius * s / 2  # κs/2
        chord = s * np.sinc(half / np.pi)
        pieces.append(np.stack([x + chord * np.cos(yaw + half), y + chord * np.sin(yaw + half)], axis=1))
        x, y = pieces[-1][-1]
        yaw += 2 * half[-1]
    return np.concatenate(pieces)


def _centerline(arcs: list[Mapping[str, Any]]) -> Array:
    pieces = []
    for i, arc in enumerate(arcs):
        with about(f"arcline_path_3[{i}]"):
            pieces.append(discretize(arc))
    return without_repeats(np.concatenate(pieces))  # where one arc ends the next begins


def _find(table: Mapping[str, Any], token: str, name: str) -> Any:
    if token not in table:
        raise ValueError(f"no {name} {token!r} in the map")
    return table[token]


def _nodes(tables: Tables, tokens: Iterable[str], minimum: int) -> Array:
    found = [_find(tables["node"], token, "node") for token in tokens]
    return points([[node.get("x"), node.get("y")] for node in found], "nodes", minimum)


def _polygon(tables: Tables, token: str) -> tuple[Array, ...]:
    """The outline of a polygon, then its holes."""
    record = _find(tables["polygon"], token, "polygon")
    with about(f"polygon {token!r}"):
        rings = [record["exterior_node_tokens"], *(hole["node_tokens"] for hole in record["holes"])]
        return tuple(_nodes(tables, ring, 3) for ring in rings)

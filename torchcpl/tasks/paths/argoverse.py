"""Argoverse 2 maps, ``log_map_archive_*.json``: lanes given by their left and right boundaries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from torchcpl.checks import check_choice
from torchcpl.files import about
from torchcpl.tasks.paths.lanes import SPACING, Array, Lane, LaneGraph, Line, along, arc_length, every, points

LANE_TYPES = ("VEHICLE", "BUS", "BIKE")
# Yellow separates opposite directions, white separates lanes; unpainted boundaries are not drawn.
MARKS: dict[str, str | None] = {"NONE": None, "UNKNOWN": None, "SOLID_BLUE": "lane_divider"}
for _paint in ("SOLID", "DOUBLE_SOLID", "DASH_SOLID", "SOLID_DASH", "DASHED", "DOUBLE_DASH"):
    MARKS |= {f"{_paint}_WHITE": "lane_divider", f"{_paint}_YELLOW": "road_divider"}

_LANE = {
    "lane_type": str, "is_intersection": bool, "successors": [int], "left_lane_boundary": [dict],
    "right_lane_boundary": [dict], "left_lane_mark_type": str, "right_lane_mark_type": str,
}  # fmt: skip
SCHEMA = {"lane_segments": {str: _LANE}, "drivable_areas": {str: {"area_boundary": [dict]}}}


def read_argoverse(data: Mapping[str, Any], name: str) -> LaneGraph:
    """The lane graph of an Argoverse 2 map; the centreline is the midline of a lane's two boundaries.

    Lanes inside an intersection become connectors. Bike lanes are left out, and so are successors the file
    does not hold: each file is the surroundings of one drive, cut out of a city.
    """
    driven = {key: record for key, record in data["lane_segments"].items() if record["lane_type"] != "BIKE"}
    lanes: dict[str, Lane] = {}
    lines: list[Line] = []
    for key, record in driven.items():
        with about(f"lane {key!r}"):
            check_choice("lane_type", record["lane_type"], LANE_TYPES)
            left, right = (_xy(record, f"{side}_lane_boundary") for side in ("left", "right"))
            for side, boundary in (("left", left), ("right", right)):
                mark = record[f"{side}_lane_mark_type"]
                check_choice(f"{side}_lane_mark_type", mark, tuple(MARKS))
                if kind := MARKS[mark]:
                    lines.append(Line(kind, boundary))
            lanes[key] = Lane(
                kind="connector" if record["is_intersection"] else "lane",
                centerline=midline(left, right),
                polygon=np.concatenate([left, right[::-1]]),
                successors=tuple(str(s) for s in record["successors"] if str(s) in driven),
            )
    areas = []
    for key, record in data["drivable_areas"].items():
        with about(f"drivable area {key!r}"):
            areas.append((_xy(record, "area_boundary", 3),))
    return LaneGraph(name, lanes, tuple(lines), tuple(areas))


def midline(left: Array, right: Array) -> Array:
    """Midpoints of two boundaries at equal shares of their lengths, at most SPACING apart, (P, 2)."""
    ends = arc_length(left)[-1], arc_length(right)[-1]
    share = every(max(ends), SPACING) / max(*ends, np.finfo(np.float64).tiny)
    return (along(left, share * ends[0]) + along(right, share * ends[1])) / 2


def _xy(record: Mapping[str, Any], key: str, minimum: int = 2) -> Array:
    """A list of ``{"x", "y", "z"}`` as (P, 2)."""
    return points([[dot.get("x"), dot.get("y")] for dot in record[key]], key, minimum)

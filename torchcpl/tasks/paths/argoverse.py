"""Argoverse 2 maps, ``log_map_archive_*.json``: lanes given by their left and right boundaries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from torchcpl.tasks.paths.lanes import Array, Lane, LaneGraph, Line, along, arc_length, every, get, points

LANE_TYPES = ("VEHICLE", "BUS", "BIKE")
# Yellow separates opposite directions, white separates lanes; unpainted boundaries are not drawn.
MARKS: dict[str, str | None] = {"NONE": None, "UNKNOWN": None, "SOLID_BLUE": "lane_divider_solid"}
MARKS |= dict.fromkeys(("DASHED_WHITE", "DOUBLE_DASH_WHITE"), "lane_divider")
for _paint in ("SOLID", "DOUBLE_SOLID", "DASH_SOLID", "SOLID_DASH"):
    MARKS |= {f"{_paint}_WHITE": "lane_divider_solid", f"{_paint}_YELLOW": "road_divider"}
MARKS |= dict.fromkeys(("DASHED_YELLOW", "DOUBLE_DASH_YELLOW"), "road_divider")


def read_argoverse(data: Mapping[str, Any], name: str, spacing: float = 1.0) -> LaneGraph:
    """The lane graph of an Argoverse 2 map; the centreline is the midline of a lane's two boundaries.

    Lanes inside an intersection become connectors. Bike lanes are left out, and so are successors the file
    does not hold: each file is the surroundings of one drive, cut out of a city.
    """
    lanes: dict[str, Lane] = {}
    lines: list[Line] = []
    for key, record in get(data, "lane_segments", "", dict).items():
        where = f"lane {key!r}"
        if get(record, "lane_type", where, LANE_TYPES) == "BIKE":
            continue
        left, right = (_xy(record, f"{side}_lane_boundary", where) for side in ("left", "right"))
        for side, boundary in (("left", left), ("right", right)):
            kind = MARKS[get(record, f"{side}_lane_mark_type", where, tuple(MARKS))]
            if kind is not None:
                lines.append(Line(kind, boundary))
        lanes[key] = Lane(
            kind="connector" if get(record, "is_intersection", where, bool) else "lane",
            centerline=midline(left, right, spacing),
            polygon=np.concatenate([left, right[::-1]]),
            successors=tuple(str(s) for s in get(record, "successors", where, [int])),
        )
    known = {
        key: replace(lane, successors=tuple(s for s in lane.successors if s in lanes)) for key, lane in lanes.items()
    }
    areas = [
        (_xy(record, "area_boundary", f"drivable area {key!r}", 3),)
        for key, record in get(data, "drivable_areas", "", dict).items()
    ]
    return LaneGraph(name, known, tuple(lines), tuple(areas))


def midline(left: Array, right: Array, spacing: float) -> Array:
    """Midpoints of two boundaries at equal shares of their lengths, at most ``spacing`` apart, (P, 2)."""
    ends = arc_length(left)[-1], arc_length(right)[-1]
    share = every(max(ends), spacing) / max(*ends, np.finfo(np.float64).tiny)
    middle: Array = (along(left, share * ends[0]) + along(right, share * ends[1])) / 2
    return middle


def _xy(record: object, key: str, where: str, minimum: int = 2) -> Array:
    """A list of ``{"x", "y", "z"}`` as (P, 2)."""
    dots, where = get(record, key, where, list), f"{where}: field {key!r}"
    return points([[get(dot, axis, where) for axis in "xy"] for dot in dots], where, minimum)

"""Argoverse 2 maps, ``log_map_archive_*.json``: lanes given by their left and right boundaries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from torchcpl.checks import short
from torchcpl.tasks.paths.maps import (
    Array,
    Lane,
    LaneGraph,
    Line,
    along,
    arc_length,
    choice,
    every,
    field,
    points,
    table,
)

LANE_TYPES = ("VEHICLE", "BUS", "BIKE")
# Yellow parts opposite directions, white parts lanes; unpainted boundaries draw nothing.
MARKS: dict[str, str | None] = {
    "NONE": None,
    "UNKNOWN": None,
    "DASHED_WHITE": "lane_divider",
    "DOUBLE_DASH_WHITE": "lane_divider",
    "SOLID_WHITE": "lane_divider_solid",
    "DOUBLE_SOLID_WHITE": "lane_divider_solid",
    "DASH_SOLID_WHITE": "lane_divider_solid",
    "SOLID_DASH_WHITE": "lane_divider_solid",
    "SOLID_BLUE": "lane_divider_solid",
    "DASHED_YELLOW": "road_divider",
    "DOUBLE_DASH_YELLOW": "road_divider",
    "SOLID_YELLOW": "road_divider",
    "DOUBLE_SOLID_YELLOW": "road_divider",
    "DASH_SOLID_YELLOW": "road_divider",
    "SOLID_DASH_YELLOW": "road_divider",
}


def read_argoverse(data: Mapping[str, Any], name: str, spacing: float = 1.0) -> LaneGraph:
    """The lane graph of an Argoverse 2 map; the centreline is the midline of a lane's two boundaries.

    Lanes inside an intersection become connectors. Bike lanes are left out, and so are successors the file
    does not hold: each file is the surroundings of one drive, cut out of a city.
    """
    segments = table(data, "lane_segments", dict)
    lanes: dict[str, Lane] = {}
    lines: list[Line] = []
    for key, record in segments.items():
        where = f"lane {key!r}"
        if choice(field(record, "lane_type", where), LANE_TYPES, f"{where}: field 'lane_type'") == "BIKE":
            continue
        left, right = (_xy(record, f"{side}_lane_boundary", where) for side in ("left", "right"))
        for side, boundary in (("left", left), ("right", right)):
            mark = f"{side}_lane_mark_type"
            kind = MARKS[choice(field(record, mark, where), tuple(MARKS), f"{where}: field {mark!r}")]
            if kind is not None:
                lines.append(Line(kind, boundary))
        junction = field(record, "is_intersection", where)
        if not isinstance(junction, bool):
            raise ValueError(f"{where}: field 'is_intersection': expected true or false, got {short(junction)}")
        successors = field(record, "successors", where)
        if not isinstance(successors, list) or not all(isinstance(s, int) for s in successors):
            raise ValueError(f"{where}: field 'successors': expected a list of ids (integers), got {short(successors)}")
        lanes[key] = Lane(
            kind="connector" if junction else "lane",
            centerline=midline(left, right, spacing),
            polygon=np.concatenate([left, right[::-1]]),
            successors=tuple(str(s) for s in successors),
        )
    lanes = {
        key: Lane(lane.kind, lane.centerline, lane.polygon, tuple(s for s in lane.successors if s in lanes))
        for key, lane in lanes.items()
    }
    areas = [
        (_xy(record, "area_boundary", f"drivable area {key!r}", 3),)
        for key, record in table(data, "drivable_areas", dict).items()
    ]
    return LaneGraph(name, lanes, tuple(lines), tuple(areas))


def midline(left: Array, right: Array, spacing: float) -> Array:
    """Midpoints of two boundaries at equal shares of their lengths, at most ``spacing`` apart, (P, 2)."""
    ends = arc_length(left)[-1], arc_length(right)[-1]
    share = every(max(ends), spacing) / max(*ends, np.finfo(np.float64).tiny)
    middle: Array = (along(left, share * ends[0]) + along(right, share * ends[1])) / 2
    return middle


def _xy(record: object, key: str, where: str, minimum: int = 2) -> Array:
    """A list of ``{"x", "y", "z"}`` as (P, 2)."""
    where = f"{where}: field {key!r}"
    values = field(record, key, where)
    if not isinstance(values, list):
        raise ValueError(f"{where}: expected a list of points, got {short(values)}")
    return points([[field(p, axis, where) for axis in "xy"] for p in values], where, minimum)

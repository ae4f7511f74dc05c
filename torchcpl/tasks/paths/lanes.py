"""Lane graphs, the checks that their readers share, and polylines.

Coordinates are metres, x east, y north.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from torchcpl.checks import short
from torchcpl.files import check_json

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
            if lane.kind not in LANE_KINDS:
                raise ValueError(f"lane {key!r}: field 'kind': expected one of {LANE_KINDS}, got {short(lane.kind)}")
            line = points(lane.centerline, f"lane {key!r}: field 'centerline'")
            if len(without_repeats(line)) < 2:
                raise ValueError(f"lane {key!r}: field 'centerline': all {len(line)} points are the same")
            if arc_length(line)[-1] > LONGEST:
                raise ValueError(f"lane {key!r}: field 'centerline': expected at most {LONGEST:.0f} m")
            for successor in lane.successors:
                if successor not in self.lanes:
                    raise ValueError(f"lane {key!r}: field 'successors': no lane {successor!r} in the map")

    def reversed(self) -> LaneGraph:
        """The same place with every lane driven the other way: forks become merges, traffic changes sides."""
        before: dict[str, list[str]] = {key: [] for key in self.lanes}
        for key, lane in self.lanes.items():
            for successor in lane.successors:
                before[successor].append(key)
        lanes = {
            key: Lane(lane.kind, lane.centerline[::-1], lane.polygon, tuple(before[key]))
            for key, lane in self.lanes.items()
        }
        return LaneGraph(self.name, lanes, self.lines, self.areas)


# What the readers check with. ``where`` names the lane; `torchcpl.tasks.paths.maps` puts the file before it.


def get(record: object, key: str, where: str, kind: Any = None) -> Any:
    """``record[key]``, of the ``kind`` that `check_json` takes, or one of a tuple of choices."""
    at = f"{where}: field {key!r}" if where else f"field {key!r}"
    if not isinstance(record, dict):
        raise ValueError(f"{where}: expected an object with field {key!r}, got {short(record)}")
    if key not in record:
        raise ValueError(f"{at} is missing")
    value = record[key]
    if isinstance(kind, tuple):
        if not isinstance(value, str) or value not in kind:
            raise ValueError(f"{at}: expected one of {kind}, got {short(value)}")
    elif kind is not None:
        check_json(value, kind, at)
    return value


def get_points(record: object, key: str, where: str, minimum: int = 2) -> Array:
    """``record[key]`` as `points`."""
    return points(get(record, key, where), f"{where}: field {key!r}", minimum)


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

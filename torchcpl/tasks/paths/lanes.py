"""Lane graphs and polylines.

Coordinates are metres, x east, y north.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from torchcpl.checks import check_choice, short
from torchcpl.files import about

Array: TypeAlias = npt.NDArray[np.float64]

LANE_KINDS = ("lane", "connector")
LINE_KINDS = ("road_divider", "lane_divider", "lane_divider_solid")  # the last two are drawn alike
FARTHEST = 1e7  # metres from the origin: coordinates of whole countries (UTM) stay below
LONGEST = 1e5  # metres of one lane
SPACING = 1.0  # metres between the points of a centreline that is computed, at most


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
            with about(f"lane {key!r}"):
                check_choice("kind", lane.kind, LANE_KINDS)
                if len(without_repeats(lane.centerline)) < 2:
                    raise ValueError(f"centerline: all {len(lane.centerline)} points are the same")
                if arc_length(lane.centerline)[-1] > LONGEST:
                    raise ValueError(f"centerline: expected at most {LONGEST:.0f} m")
                for successor in lane.successors:
                    if successor not in self.lanes:
                        raise ValueError(f"successors: no lane {successor!r} in the map")

    def reversed(self) -> LaneGraph:
        """The same place with every lane driven the other way: forks become merges, traffic changes sides."""
        before: dict[str, list[str]] = {key: [] for key in self.lanes}
        for key, lane in self.lanes.items():
            for successor in lane.successors:
                before[successor].append(key)
        lanes = {
            key: replace(lane, centerline=lane.centerline[::-1], successors=tuple(before[key]))
            for key, lane in self.lanes.items()
        }
        return replace(self, lanes=lanes)


def points(value: object, name: str, minimum: int = 2, width: int = 2) -> Array:
    """Finite points, at least ``minimum`` of them, as (P, width) float64; ValueErrors begin with ``name``."""
    try:
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError, OverflowError, RecursionError):
        array = np.empty(0)  # refused below
    if array.ndim != 2 or array.shape[1] != width:
        raise ValueError(f"{name}: expected a list of points, {width} numbers each, got {short(value)}")
    if len(array) < minimum:
        raise ValueError(f"{name}: expected at least {minimum} points, got {len(array)}")
    far = ~(np.abs(array) <= FARTHEST).all(axis=1)
    if far.any():
        bad = int(far.argmax())
        what = f"beyond ±{FARTHEST:.0e} m" if np.isfinite(array[bad]).all() else "not finite"
        raise ValueError(f"{name}: point {bad} is {what}: {array[bad].tolist()}")
    return array


def arc_length(line: Array) -> Array:
    """Distance along a polyline at each of its points, (P,), from 0."""
    steps = np.hypot(*np.diff(line, axis=0).T)
    return np.concatenate([[0.0], np.cumsum(steps)])


def without_repeats(line: Array) -> Array:
    """A polyline without points that repeat the one before."""
    fresh = np.append(True, np.hypot(*np.diff(line, axis=0).T) > 1e-9)
    return line[fresh]


def along(line: Array, at: Array) -> Array:
    """The points of a polyline at arc lengths ``at``, (len(at), 2)."""
    s = arc_length(line)
    return np.stack([np.interp(at, s, line[:, 0]), np.interp(at, s, line[:, 1])], axis=1)


def every(length: float, spacing: float) -> Array:
    """Arc lengths 0 … ``length`` in equal steps no longer than ``spacing``, both ends included."""
    if length > LONGEST:
        raise ValueError(f"a line of {length:.3g} m: expected at most {LONGEST:.0f} m")
    return np.linspace(0.0, length, max(int(np.ceil(length / spacing)), 1) + 1, dtype=np.float64)

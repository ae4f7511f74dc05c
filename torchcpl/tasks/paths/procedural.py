"""Road networks made up on the spot: bends, merges, forks, crossings and roundabouts.

A network is a grid of separate junctions, far enough apart that no scene shows two. Every lane into a junction
leads to the same number of exits, so a scene on it has that many valid paths; the exits end before a scene
could start on them. Which junctions are built follows the wanted shares of scenes with 1 … 6 valid paths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from torchcpl.checks import check_count
from torchcpl.tasks.paths.lanes import Array, Lane, LaneGraph, Line, every

WIDTH = 3.5  # m, of a lane
ARM = 87.0  # m of road to and from a junction; less than the 88 m a scene looks ahead
PITCH = 360.0  # m between junctions
SHARES = (0.5, 0.3, 0.12, 0.04, 0.02, 0.02)  # of scenes with 1 … 6 valid paths


def procedural_map(junctions: int = 300, shares: Sequence[float] = SHARES, seed: int = 0) -> LaneGraph:
    """A network of ``junctions`` junctions whose scenes have 1, 2, … 6 valid paths in proportions ``shares``."""
    check_count("junctions", junctions, 1)
    weights = np.asarray(shares, dtype=np.float64)
    if weights.ndim != 1 or not 1 <= len(weights) <= 6 or not (weights >= 0).all() or not weights.sum() > 0:
        raise ValueError(f"shares: expected 1 to 6 non-negative numbers, not all 0, got {tuple(shares)}")
    rng = np.random.default_rng(seed)
    lanes: dict[str, Lane] = {}
    lines: list[Line] = []
    entries = np.zeros(len(weights))  # lanes to start on, by number of paths
    side = math.ceil(math.sqrt(junctions))
    for i in range(junctions):
        # Next: the number of paths that is furthest behind its share.
        built = np.divide(entries, weights, out=np.full(len(weights), np.inf), where=weights > 0)
        n = int(built.argmin()) + 1
        builder = _Builder(f"{i}", rng)
        options = _BY_PATHS[n]
        options[int(rng.integers(len(options)))](builder, n)
        # The lanes that lead on are those into the junction; scenes do not start on its exits.
        entries[n - 1] += sum(lane.kind == "lane" and lane.successors != () for lane in builder.lanes.values())
        at = np.array([i % side, i // side]) * PITCH
        turn = rng.uniform(0, 2 * math.pi)
        for key, lane in builder.lanes.items():
            polygon = None if lane.polygon is None else _placed(lane.polygon, turn, at)
            lanes[key] = replace(lane, centerline=_placed(lane.centerline, turn, at), polygon=polygon)
        lines += [Line(line.kind, _placed(line.points, turn, at)) for line in builder.lines]
    return LaneGraph(f"procedural-{seed}", lanes, tuple(lines))


class _Builder:
    """The lanes and lines of one junction around the origin."""

    def __init__(self, name: str, rng: np.random.Generator) -> None:
        self.name, self.rng = name, rng
        self.lanes: dict[str, Lane] = {}
        self.lines: list[Line] = []

    def add(self, kind: str, line: Array, successors: Sequence[str] = (), key: str = "") -> str:
        key = f"{self.name}.{key or len(self.lanes)}"
        polygon = np.concatenate([_beside(line, WIDTH / 2), _beside(line, -WIDTH / 2)[::-1]])
        self.lanes[key] = Lane(kind, line, polygon if kind == "lane" else None, tuple(successors))
        return key

    def arm(self, angle: float, radius: float, bend: float) -> Array:
        """The middle of a road outwards from distance ``radius`` in direction ``angle``, turning by up to ``bend``."""
        s = every(ARM, 2.0)
        turn = self.rng.uniform(-bend, bend)
        # Straight at first: turns in a junction assume it.
        heading = angle + turn * np.clip((s - 10) / (ARM - 10), 0, 1)
        steps = np.stack([np.cos(heading), np.sin(heading)], axis=1) * (s[1] - s[0])
        start = radius * np.array([math.cos(angle), math.sin(angle)])
        return start + np.concatenate([[[0.0, 0.0]], np.cumsum(steps[:-1], axis=0)])

    def both_ways(self, middle: Array, width: int) -> tuple[list[Array], list[Array]]:
        """Lane centrelines in and out of a two-way road with ``width`` lanes each way, innermost first."""
        self.lines.append(Line("road_divider", middle))
        offsets = [WIDTH * (k + 0.5) for k in range(width)]
        for k in range(1, width):
            self.lines += [Line("lane_divider", _beside(middle, side * WIDTH * k)) for side in (1, -1)]
        # Driving on the right: outwards right of the middle, inwards left of it.
        return [_beside(middle, o)[::-1] for o in offsets], [_beside(middle, -o) for o in offsets]


def _star(b: _Builder, n: int) -> None:
    """A crossing of n + 1 two-way roads, every way open but back: a bend (1), a T (2), a crossing (3), stars."""
    angles = _spread(b.rng, n + 1)
    width = int(b.rng.integers(1, 3)) if n <= 3 else 1
    radius = 8 + 3.5 * width + 2.5 * n
    roads = [b.both_ways(b.arm(a, radius, 0.9 if n == 1 else 0.3), width) for a in angles]
    exits = [[b.add("lane", line) for line in out] for _, out in roads]
    for i, (ways_in, _) in enumerate(roads):
        for k, line in enumerate(ways_in):
            others = [(roads[j][1][k], exits[j][k]) for j in range(n + 1) if j != i]
            turns = [b.add("connector", _turn(line, out), [key]) for out, key in others]
            b.add("lane", line, turns)


def _roundabout(b: _Builder, n: int) -> None:
    """A roundabout of n two-way roads, each an exit, the way back too."""
    angles = _spread(b.rng, n)
    ring = 11.0 + 1.5 * n
    # Anticlockwise, traffic leaves to a road just before joining from it.
    leave, join = angles - 3.5 / ring, angles + 3.5 / ring
    for i, (angle, after) in enumerate(zip(angles, np.roll(leave, -1), strict=True)):
        (way_in,), (way_out,) = b.both_ways(b.arm(angle, ring + 10.0, 0.25), 1)
        out = b.add("lane", way_out)
        b.add("connector", _turn(_arc(ring, leave[i] - 0.1, leave[i]), way_out), [out], key=f"off{i}")
        b.add("connector", _arc(ring, leave[i], join[i]), [f"{b.name}.ring{i}"], key=f"past{i}")
        onward = [f"{b.name}.{way}{(i + 1) % n}" for way in ("past", "off")]
        ring_end = join[i] + (after - join[i]) % (2 * math.pi)
        around = b.add("connector", _arc(ring, join[i], ring_end), onward, key=f"ring{i}")
        joining = b.add("connector", _turn(way_in, _arc(ring, join[i], join[i] + 0.1)), [around])
        b.add("lane", way_in, [joining])


def _fork(b: _Builder, n: int) -> None:
    """A one-way road that splits into n."""
    fan = min(0.5 * (n - 1), 1.7)
    angles = np.linspace(-fan / 2, fan / 2, n) + b.rng.uniform(-0.08, 0.08, n)
    width = int(b.rng.integers(1, 3))
    trunk = b.arm(math.pi, 5.0, 0.4)[::-1]
    outs = [b.arm(a, 22.0, 0.15) for a in angles]
    for k in range(width):
        offset = WIDTH * (k - (width - 1) / 2)
        line = _beside(trunk, offset)
        branches = [_beside(out, offset) for out in outs]
        turns = [b.add("connector", _turn(line, out), [b.add("lane", out)]) for out in branches]
        b.add("lane", line, turns)
    if width == 2:
        b.lines += [Line("lane_divider", line) for line in (trunk, *outs)]


def _merge(b: _Builder, n: int) -> None:
    """Two or three one-way roads that merge into one."""
    count = int(b.rng.integers(2, 4))
    out = b.arm(0.0, 15.0, 0.4)
    key = b.add("lane", out)
    for angle in math.pi + np.linspace(-0.3, 0.3, count) * (count - 1) + b.rng.uniform(-0.08, 0.08, count):
        line = b.arm(angle, 15.0, 0.15)[::-1]
        b.add("lane", line, [b.add("connector", _turn(line, out), [key])])


_Maker = Callable[[_Builder, int], None]
_BY_PATHS: dict[int, tuple[_Maker, ...]] = {
    1: (_star, _star, _merge),
    2: (_star, _fork),
    3: (_star, _star, _fork, _roundabout),
    4: (_star, _fork, _roundabout),
    5: (_star, _roundabout),
    6: (_star, _roundabout),
}


def _spread(rng: np.random.Generator, count: int) -> Array:
    """Increasing directions of roads around a junction: about evenly apart, or three as a T."""
    angles = np.arange(count) * 2 * math.pi / count
    if count == 3 and rng.random() < 0.5:
        angles = np.array([0.0, 0.5, 1.0]) * math.pi
    slack = {2: 0.7, 3: 0.25, 4: 0.25}.get(count, 0.06)
    return angles + rng.uniform(-slack, slack, count)


def _beside(line: Array, offset: float) -> Array:
    """A polyline moved to its left by ``offset`` metres."""
    ahead = np.gradient(line, axis=0)
    ahead /= np.hypot(*ahead.T)[:, None]
    return line + offset * np.stack([-ahead[:, 1], ahead[:, 0]], axis=1)


def _turn(line: Array, out: Array) -> Array:
    """A cubic Bézier from the end of one lane to the start of another, tangent to both."""
    p0, p3 = line[-1], out[0]
    t0, t3 = line[-1] - line[-2], out[1] - out[0]
    reach = 0.4 * math.hypot(*(p3 - p0))
    p1, p2 = p0 + reach * t0 / math.hypot(*t0), p3 - reach * t3 / math.hypot(*t3)
    u = np.linspace(0, 1, 17)[:, None]
    return (1 - u) ** 3 * p0 + 3 * (1 - u) ** 2 * u * p1 + 3 * (1 - u) * u**2 * p2 + u**3 * p3


def _arc(radius: float, start: float, end: float) -> Array:
    """Anticlockwise on a circle around the origin."""
    angle = start + every(end - start, 1.0 / radius)
    return radius * np.stack([np.cos(angle), np.sin(angle)], axis=1)


def _placed(points: Array, turn: float, at: Array) -> Array:
    """Points turned about the origin, then moved to ``at``."""
    c, s = math.cos(turn), math.sin(turn)
    return points @ np.array([[c, s], [-s, c]]) + at

"""One scene: a lane, an ego on it, the paths ahead, and the bird's-eye image.

A scene is a 256×256 px image at 0.5 m a pixel, the ego heading right with 40 m behind it and 88 m ahead, its
row up to 5 m off the middle. Pixel coordinates (x, y) are continuous, x right and y down; pixel (r, c) covers
[c, c+1) × [r, r+1). The image holds palette indices and nothing is drawn off the road, so the drivable mask is
``image != 0``.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import ModuleType
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from torchcpl.files import extra
from torchcpl.tasks.paths.lanes import Array, LaneGraph, along, arc_length, without_repeats

Ints: TypeAlias = npt.NDArray[np.int64]
Image: TypeAlias = npt.NDArray[np.uint8]
Points: TypeAlias = npt.NDArray[np.float32]
Bools: TypeAlias = npt.NDArray[np.bool_]
Fixed: TypeAlias = npt.NDArray[np.int32]

SIZE = 256  # px
METRES = 0.5  # a pixel
CELL = 8  # px
GRID = SIZE // CELL
STEP = CELL * math.sqrt(2.0)  # px between the points of a path: no straight stretch puts two in one cell
BEHIND = 40.0  # m of road behind the ego
JITTER = 5.0  # m, lateral
HORIZON = 217.0  # m of look-ahead, the image's diagonal and a fifth
PART = 8.0  # m that two paths must part by
OFFSETS = 6  # ego positions tried on a lane
MAX_PATHS = 6
MAX_POINTS = 64
LANE_WIDTH = 3.5  # m, of lanes without a polygon
CHEVRON = 6.0  # m between chevrons
DRAWS = 2000  # lanes tried for one scene before giving up
VARIED = 0.75  # part of the varied scenes whose ground is warped
EXPANSIONS = 4096  # lanes entered by one enumeration before giving up
EDGE = 1 / 64  # px kept clear of the image's edge, so that a mirrored float32 point is still inside

PALETTE: Image = np.array(
    [
        [255, 255, 255],  # 0 background
        [214, 230, 245],  # 1 drivable area
        [70, 80, 95],  # 2 its outline
        [240, 160, 40],  # 3 road divider
        [150, 130, 200],  # 4 lane divider
        [60, 140, 90],  # 5 chevron
        [220, 30, 30],  # 6 ego
    ],
    dtype=np.uint8,
)
BACKGROUND, ROAD, OUTLINE, ROAD_DIVIDER, LANE_DIVIDER, DIRECTION, EGO = range(len(PALETTE))


def enumerate_paths(
    start: int,
    successors: Sequence[Sequence[int]],
    lengths: Sequence[float],
    leaves_image: Sequence[bool],
    horizon: float,
) -> list[tuple[tuple[int, ...], str]]:
    """Every way ahead from lane ``start`` by depth-first search, no lane entered twice on one path.

    Returns (lanes, why it ended): ``"edge"`` in a lane that leaves the image, ``"horizon"`` after ``horizon``
    metres, ``"leaf"`` at a lane without successors, ``"loop"`` where every successor is already on the path.
    ``lengths[start]`` counts from the ego. Nothing when more than EXPANSIONS lanes would be entered.
    """
    found: list[tuple[tuple[int, ...], str]] = []
    stack: list[tuple[tuple[int, ...], float]] = [((start,), 0.0)]
    for _ in range(EXPANSIONS + 1):
        if not stack:
            return found
        path, before = stack.pop()
        lane = path[-1]
        after = before + lengths[lane]
        if leaves_image[lane]:
            found.append((path, "edge"))
        elif after >= horizon:
            found.append((path, "horizon"))
        elif not successors[lane]:
            found.append((path, "leaf"))
        else:
            onward = [(*path, s) for s in successors[lane] if s not in path]
            if not onward:
                found.append((path, "loop"))
            stack.extend((p, after) for p in reversed(onward))
    return []


@dataclass(frozen=True)
class _Ahead:
    """A lane, number 0, and the lanes ahead of it, with their points in one array."""

    successors: list[list[int]]
    lengths: list[float]
    points: Array  # (P, 2)
    starts: Ints  # (n + 1,) first point of each lane, then P


class Roads:
    """A lane graph prepared for sampling and drawing: integer ids, flat arrays, bounding boxes."""

    def __init__(self, graph: LaneGraph) -> None:
        ids = {key: i for i, key in enumerate(graph.lanes)}
        lanes = list(graph.lanes.values())
        self.name = graph.name
        self.lines = [without_repeats(lane.centerline) for lane in lanes]
        self.arcs = [arc_length(line) for line in self.lines]
        self.successors = [[ids[s] for s in lane.successors] for lane in lanes]
        self.starts = [i for i, lane in enumerate(lanes) if lane.kind == "lane"]
        if not self.starts:
            raise ValueError(f"map {graph.name!r}: no lane of kind 'lane' to start from")
        ends = [line[-1] for line, onward in zip(self.lines, self.successors, strict=True) if not onward]
        self.loose = np.array(ends).reshape(-1, 2)  # where lanes end without a successor
        self._ahead: dict[int, _Ahead] = {}

        pairs = list(zip(lanes, self.lines, strict=True))
        self.polygons = _Shapes([lane.polygon for lane in lanes if lane.polygon is not None])
        self.rings = graph.areas
        self.areas = _Shapes([np.concatenate(rings) for rings in graph.areas])
        # A lane with a polygon is stroked too, thinly: a polygon may miss the ends of its own centreline.
        self.wide = _Shapes([_simplified(line) for lane, line in pairs if lane.polygon is None])
        self.thin = _Shapes([_simplified(line) for lane, line in pairs if lane.polygon is not None])
        self.road_dividers = _Shapes([line.points for line in graph.lines if line.kind == "road_divider"])
        self.lane_dividers = _Shapes([line.points for line in graph.lines if line.kind != "road_divider"])
        self.chevrons = _Shapes([one for lane, line in pairs if lane.kind == "lane" for one in _chevrons(line)])

    def ahead(self, lane: int) -> _Ahead:
        """Lanes within the horizon of the end of ``lane``, itself number 0; computed once."""
        if lane not in self._ahead:
            order = {lane: 0}
            queue = [(0.0, s) for s in self.successors[lane]]
            heapq.heapify(queue)
            while queue:
                distance, at = heapq.heappop(queue)
                if at not in order and distance < HORIZON:
                    order[at] = len(order)
                    for s in self.successors[at]:
                        heapq.heappush(queue, (distance + float(self.arcs[at][-1]), s))
            lines = [self.lines[i] for i in order]
            self._ahead[lane] = _Ahead(
                successors=[[order[s] for s in self.successors[i] if s in order] for i in order],
                lengths=[float(self.arcs[i][-1]) for i in order],
                points=np.concatenate(lines),
                starts=np.cumsum([0] + [len(line) for line in lines]),
            )
        return self._ahead[lane]


@dataclass(frozen=True)
class Variation:
    """A warp of the ground and another way of drawing: how a scene to train on differs from its map.

    With u px ahead of the ego and v px to its right, a point goes to (ahead·u + shear·v + bow·v², side·v + bend·u²).
    At the ego this keeps the direction ahead.
    """

    ahead: float = 1.0
    side: float = 1.0
    shear: float = 0.0
    bend: float = 0.0  # a px
    bow: float = 0.0  # a px
    width: float = LANE_WIDTH  # m, of lanes without a polygon
    hidden: frozenset[int] = frozenset()  # colours of dividers that are left out

    @classmethod
    def draw(cls, rng: np.random.Generator) -> Variation:
        """Scales of 0.78 to 1.28, shear up to 0.25, roads that bend up to 17° at the image's edge; few lines hidden."""
        ahead, side = np.exp(rng.uniform(-0.25, 0.25, 2)).tolist()
        shear, bend, bow = (rng.uniform(-1, 1, 3) * (0.25, 0.15 / (SIZE - BEHIND / METRES), 0.2 / SIZE)).tolist()
        dividers = zip((ROAD_DIVIDER, LANE_DIVIDER), rng.random(2), strict=True)
        hidden = frozenset(kind for kind, coin in dividers if coin < 0.1)
        return cls(ahead, side, shear, bend, bow, LANE_WIDTH * rng.uniform(0.85, 1.3), hidden)

    def __call__(self, u: Array, v: Array) -> tuple[Array, Array]:
        return self.ahead * u + self.shear * v + self.bow * v * v, self.side * v + self.bend * u * u


AS_IT_IS = Variation()


@dataclass(frozen=True)
class _View:
    """The image's pose in the world: pixel = vary(turn · (point − ego) / METRES) + (BEHIND / METRES, row)."""

    x: float
    y: float
    heading: float
    row: float  # the ego's, px
    vary: Variation = AS_IT_IS

    def pixels(self, points: Array) -> Array:
        """World points (P, 2) in pixels, (P, 2)."""
        c, s = math.cos(self.heading) / METRES, math.sin(self.heading) / METRES
        dx, dy = points[:, 0] - self.x, points[:, 1] - self.y
        u, v = self.vary(c * dx + s * dy, s * dx - c * dy)
        return np.stack([u + BEHIND / METRES, v + self.row], axis=1)

    @cached_property
    def reach(self) -> float:
        """The side of the square of ground about the image's centre that holds all it shows, in sides of the image.

        Infinite where no square of three sides does: some variations fold the ground, and the fold is in the image.
        """
        if self.vary == AS_IT_IS:
            return 1.0
        # But for folds, where the rim of a square lies outside the image, so does all beyond it.
        along_side, one = np.linspace(-1, 1, 65), np.ones(65)
        sides = [(along_side, one), (along_side, -one), (one, along_side), (-one, along_side)]
        rim = SIZE / 2 * np.concatenate([np.stack(pair, axis=1) for pair in sides])
        ego = np.array([BEHIND / METRES, self.row])
        for reach in np.arange(0.7, 3.0, 0.05):
            u, v = (reach * rim + SIZE / 2 - ego).T
            if not _inside(np.stack(self.vary(u, v), axis=1) + ego).any():
                return float(reach)
        return math.inf

    @cached_property
    def box(self) -> tuple[Array, Array]:
        """World bounding box of what the image shows: its least and its greatest x and y, (2,) each."""
        pose = np.array([[self.x, self.y, self.heading]])
        ((x, y, heading, half),) = ground(pose, np.array([self.row]), np.array([self.reach]))
        reach = half * (abs(math.cos(heading)) + abs(math.sin(heading)))
        return np.array([x, y]) - reach, np.array([x, y]) + reach


def ground(poses: Array, rows: Array | Points, reach: Array) -> Array:
    """The square of ground that holds what each image shows: centre x and y, heading and half a side, (S, 4).

    ``poses`` (S, 3) and ``rows`` (S,), px, are of the egos, ``reach`` (S,) is the squares' side in sides of the image.
    """
    x, y, heading = poses.T
    ahead = SIZE * METRES / 2 - BEHIND
    left = rows * METRES - SIZE * METRES / 2
    cos, sin = np.cos(heading), np.sin(heading)
    half = SIZE * METRES / 2 * reach
    return np.stack([x + ahead * cos - left * sin, y + ahead * sin + left * cos, heading, half], axis=1)


@dataclass(frozen=True, eq=False)
class Scene:
    """One scene: its map, ego pose (x, y, heading), palette image (256, 256), and 1 to 6 paths (n, 2) px.

    ``reach`` says how much ground the image shows: the side of a square that holds it, 1 where nothing is varied.
    """

    map_index: int
    pose: tuple[float, float, float]
    reach: float
    image: Image
    paths: list[Points]


def sample_scene(roads: Sequence[Roads], seed: int, index: int, varied: bool = False) -> Scene:
    """Scene number ``index``.

    A lane is drawn uniformly, and of 6 random positions on it the one with the most distinct paths is kept. A position
    does not count if its image shows a lane that ends and leads nowhere (if ``varied``: one that the ego can reach).
    Where none counts, or a path leaves the road, another lane is drawn. Of ``varied`` scenes VARIED have a `Variation`.
    """
    rng = np.random.default_rng((seed, index))
    row = SIZE / 2 + rng.uniform(-JITTER, JITTER) / METRES
    starts = [(which, lane) for which, road in enumerate(roads) for lane in road.starts]
    for _ in range(DRAWS):
        which, lane = starts[rng.integers(len(starts))]
        road = roads[which]
        offsets = rng.random(OFFSETS) * road.arcs[lane][-1]
        vary = Variation.draw(rng) if varied and rng.random() < VARIED else AS_IT_IS
        seen = _View(0.0, 0.0, 0.0, row, vary)
        found = _look_ahead(road, lane, offsets, seen, varied) if seen.reach < math.inf else None
        if found is None:
            continue
        view, lines = found
        paths = [_one_a_cell(line) for line in lines[:MAX_PATHS]]
        image = render(road, view)
        if min(map(len, paths)) >= 2 and all(_on_road(path, image) for path in paths):
            return Scene(which, (view.x, view.y, view.heading), view.reach, image, paths)
    names = ", ".join(repr(r.name) for r in roads)
    raise ValueError(
        f"maps {names}: none of {DRAWS} lanes drawn gave a scene (seed {seed}, index {index}): every image tried "
        "shows a lane that ends and leads nowhere; the maps are too small or too cut up"
    )


def _look_ahead(road: Roads, lane: int, offsets: Array, seen: _View, cut: bool) -> tuple[_View, list[Array]] | None:
    """The view from the ``offsets`` along a lane that has the most distinct paths, and these as pixel polylines.

    Views are ``seen`` with other poses. One that shows a lane that ends and leads nowhere does not count; with ``cut``
    only such lanes matter as the ego can reach. None when no view counts.
    """
    line, arc = road.lines[lane], road.arcs[lane]
    at = along(line, offsets)  # (6, 2)
    chord = along(line, np.minimum(offsets + 1.0, arc[-1])) - along(line, np.maximum(offsets - 1.0, 0.0))
    best: tuple[_View, list[Array]] = seen, []
    for k, offset in enumerate(offsets.tolist()):
        x, y, heading = float(at[k, 0]), float(at[k, 1]), math.atan2(chord[k, 1], chord[k, 0])
        view = replace(seen, x=x, y=y, heading=heading)
        if not cut and _inside(view.pixels(road.loose)).any():
            continue
        ahead = road.ahead(lane)
        pixels = view.pixels(ahead.points)  # (P, 2)
        behind = int(np.searchsorted(arc, offset, side="right"))  # points of the lane behind the ego
        outside = ~_inside(pixels)
        outside[:behind] = False
        leaves = np.logical_or.reduceat(outside, ahead.starts[:-1]).tolist()
        lengths = [ahead.lengths[0] - offset, *ahead.lengths[1:]]
        found = enumerate_paths(0, ahead.successors, lengths, leaves, HORIZON * max(seen.reach, 1.0))
        ways = [lanes for lanes, end in found if end != "loop"]
        if any(end == "leaf" for _, end in found) or len(ways) <= len(best[1]):
            continue
        lines = []
        for way in ways:
            pieces = [pixels[ahead.starts[i] : ahead.starts[i + 1]] for i in way]
            pieces[0] = np.concatenate([[[BEHIND / METRES, view.row]], pieces[0][behind:]])
            lines.append(_clipped(np.concatenate(pieces)))
        lines = distinct(lines)
        if len(lines) > len(best[1]):
            best = view, lines
    return best if best[1] else None


def _inside(pixels: Array) -> Bools:
    """Whether each pixel point is in the image, (P,)."""
    return np.all((pixels >= EDGE) & (pixels <= SIZE - EDGE), axis=1)


def _clipped(line: Array) -> Array:
    """A pixel polyline up to where it first leaves the image, or to the horizon."""
    low, high = EDGE, SIZE - EDGE
    outside = ~_inside(line)
    if outside.any():
        end = int(outside.argmax())
        a, b = line[end - 1], line[end]
        with np.errstate(divide="ignore", invalid="ignore"):
            shares = np.where(b > high, (high - a) / (b - a), np.where(b < low, (low - a) / (b - a), 1.0))
        line = np.concatenate([line[:end], [np.clip(a + shares.min() * (b - a), low, high)]])
    arc = arc_length(line)
    if arc[-1] > HORIZON / METRES:
        end = int(np.searchsorted(arc, HORIZON / METRES))
        line = np.concatenate([line[:end], along(line, np.array([HORIZON / METRES]))])
    return line


def distinct(lines: Sequence[Array]) -> list[Array]:
    """The pixel polylines, less each one within Hausdorff distance PART of one kept before it."""
    kept: list[tuple[Array, Array]] = []
    for line in lines:
        length = arc_length(line)[-1]
        dots = along(line, np.append(np.arange(0.0, length, 2.0 / METRES), length))  # (P, 2), every 2 m
        for _, other in kept:
            gap = (dots[:, None, 0] - other[:, 0]) ** 2 + (dots[:, None, 1] - other[:, 1]) ** 2  # (P, Q)
            if max(gap.min(axis=1).max(), gap.min(axis=0).max()) <= (PART / METRES) ** 2:
                break
        else:
            kept.append((line, dots))
    return [line for line, _ in kept]


def _one_a_cell(line: Array) -> Points:
    """Points every STEP px of arc length from the ego on, only the first in each cell, (n, 2) float32."""
    dots = along(line, np.arange(0.0, arc_length(line)[-1], STEP)).astype(np.float32)
    cells = (dots // CELL).astype(np.int64)
    _, first = np.unique(cells[:, 1] * GRID + cells[:, 0], return_index=True)
    return dots[np.sort(first)[:MAX_POINTS]]


def _on_road(path: Points, image: Image) -> bool:
    column, row = path.astype(np.int64).T
    return bool((image[row, column] != BACKGROUND).all())


# Drawing, in fixed-point coordinates and 8-connected lines: the same pixels on every machine.

_SHIFT = 4


def opencv() -> ModuleType:
    """OpenCV, imported when something is drawn: stored scenes need none."""
    with extra():
        import cv2
    return cv2


class _Shapes:
    """Polylines or polygons in the world with their bounding boxes."""

    def __init__(self, shapes: Sequence[Array]) -> None:
        self.shapes = shapes
        self.low = np.array([shape.min(axis=0) for shape in shapes]).reshape(-1, 2)
        self.high = np.array([shape.max(axis=0) for shape in shapes]).reshape(-1, 2)

    def near(self, view: _View) -> Ints:
        """Numbers of the shapes that may be seen: their bounding boxes meet that of the view."""
        low, high = view.box
        return np.flatnonzero(((self.low <= high) & (self.high >= low)).all(axis=1))

    def pixels(self, view: _View) -> list[Fixed]:
        """The shapes that may be seen, in OpenCV's fixed point."""
        shapes = [self.shapes[i] for i in self.near(view)]
        if not shapes:
            return []
        ends = np.cumsum([len(shape) for shape in shapes])[:-1]
        return np.split(_fixed(view.pixels(np.concatenate(shapes))), ends)


def _fixed(pixels: Array) -> Fixed:
    """Pixel points (P, 2) in OpenCV's fixed point, whose pixel centres are whole numbers."""
    return np.rint((pixels - 0.5) * (1 << _SHIFT)).astype(np.int32)


def render(road: Roads, view: _View) -> Image:
    """The scene's palette image, (256, 256)."""
    cv2 = opencv()

    def stroke(image: Image, kind: _Shapes, color: int, width: float = 1) -> None:
        # OpenCV draws a thick line one pixel wider: it fills every pixel that its edge touches.
        thickness = max(round(width) - 1, 1)
        cv2.polylines(image, kind.pixels(view), False, color, thickness, cv2.LINE_8, _SHIFT)

    image: Image = np.zeros((SIZE, SIZE), np.uint8)
    for area in road.areas.near(view):
        rings = [_fixed(view.pixels(ring)) for ring in road.rings[area]]  # together, so that holes stay open
        cv2.fillPoly(image, rings, ROAD, cv2.LINE_8, _SHIFT)
    for polygon in road.polygons.pixels(view):
        cv2.fillPoly(image, [polygon], ROAD, cv2.LINE_8, _SHIFT)
    stroke(image, road.wide, ROAD, view.vary.width / METRES)
    stroke(image, road.thin, ROAD, 3.0)
    square = np.ones((3, 3), np.uint8)
    cv2.morphologyEx(image, cv2.MORPH_CLOSE, square, image)  # adjacent lanes leave pinholes
    paint: Image = image.copy()
    for kind, color in ((road.lane_dividers, LANE_DIVIDER), (road.road_dividers, ROAD_DIVIDER)):
        if color not in view.vary.hidden:
            stroke(paint, kind, color)
    paint[image > cv2.erode(image, square)] = OUTLINE
    stroke(paint, road.chevrons, DIRECTION)
    ego = np.array([[2.5, 0.0], [-2.0, 1.25], [-2.0, -1.25]]) / METRES + [BEHIND / METRES, view.row]
    cv2.fillPoly(paint, [_fixed(ego)], EGO, cv2.LINE_8, _SHIFT)
    paint[image == BACKGROUND] = BACKGROUND  # so that the drivable mask follows from the image
    return paint


def _simplified(line: Array) -> Array:
    """A polyline simplified to 5 cm, enough for thick strokes."""
    near = (line - line[0]).astype(np.float32)
    return opencv().approxPolyDP(near[:, None], 0.05, False)[:, 0] + line[0]


def _chevrons(line: Array) -> Array:
    """Chevrons pointing along a lane, (C, 3, 2): tail, tip, tail."""
    at = np.arange(CHEVRON / 2, arc_length(line)[-1], CHEVRON)
    tip, back = along(line, at + 0.8), along(line, at - 0.8)
    ahead = (tip - back) / np.maximum(np.hypot(*(tip - back).T), 1e-9)[:, None]
    side = np.stack([-ahead[:, 1], ahead[:, 0]], axis=1)
    return np.stack([back + 1.1 * side, tip, back - 1.1 * side], axis=1)

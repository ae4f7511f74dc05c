"""Lane maps in three formats, recognised by their content: ``lane-graph/1`` (here), nuScenes and Argoverse 2.

``lane-graph/1`` is one JSON object::

    {"format": "lane-graph/1", "map": "...", "units": "metres", "source": "...",
     "lanes": {"<id>": {"kind": "lane" | "connector", "centerline": [[x, y], ...],
                        "polygon": [[x, y], ...] | null, "successors": ["<id>", ...]}},
     "lines": [{"kind": "road_divider" | "lane_divider" | "lane_divider_solid", "points": [[x, y], ...]}],
     "areas": [[[[x, y], ...], ...], ...]}

``areas`` is optional: extra drivable polygons, each a list of rings, the outline first and then its holes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchcpl.checks import short
from torchcpl.files import read_json
from torchcpl.tasks.paths.argoverse import read_argoverse
from torchcpl.tasks.paths.lanes import LANE_KINDS, LINE_KINDS, Lane, LaneGraph, Line, get, get_points, points
from torchcpl.tasks.paths.nuscenes import read_nuscenes


def load_map(path: str | Path) -> LaneGraph:
    """Read a map; the format (lane-graph/1, nuScenes expansion, Argoverse 2) is recognised by its content."""
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
    """Read one map file, or every ``*.json`` of a folder in alphabetical order."""
    path = Path(path)
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"{path}: no *.json map in this folder")
    return [load_map(file) for file in files]


def read_lane_graph(data: Mapping[str, Any], name: str = "") -> LaneGraph:
    """``lane-graph/1`` from parsed JSON; ``name`` is the map's where the file gives none."""
    get(data, "format", "", ("lane-graph/1",))
    get({"units": "metres", **data}, "units", "", ("metres",))
    lanes = {}
    for key, record in get(data, "lanes", "", dict).items():
        where = f"lane {key!r}"
        lanes[key] = Lane(
            kind=get(record, "kind", where, LANE_KINDS),
            centerline=get_points(record, "centerline", where),
            polygon=None if get(record, "polygon", where) is None else get_points(record, "polygon", where, 3),
            successors=tuple(get(record, "successors", where, [str])),
        )
    lines = [
        Line(get(record, "kind", f"line {i}", LINE_KINDS), get_points(record, "points", f"line {i}"))
        for i, record in enumerate(get(data, "lines", "", list))
    ]
    areas = []
    for i, rings in enumerate(get({"areas": [], **data}, "areas", "", list)):
        if not isinstance(rings, list) or not rings:
            raise ValueError(f"area {i}: expected a list of rings, got {short(rings)}")
        areas.append(tuple(points(ring, f"area {i}: ring {j}", 3) for j, ring in enumerate(rings)))
    return LaneGraph(str(data.get("map", name)), lanes, tuple(lines), tuple(areas))

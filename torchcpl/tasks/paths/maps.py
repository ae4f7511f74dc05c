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

from torchcpl.checks import check_choice
from torchcpl.files import about, check_json, read_json
from torchcpl.tasks.paths import argoverse, nuscenes
from torchcpl.tasks.paths.lanes import LINE_KINDS, Lane, LaneGraph, Line, points

SCHEMA = {
    "lanes": {str: {"kind": str, "centerline": list, "polygon": (list, type(None)), "successors": [str]}},
    "lines": [{"kind": str, "points": list}],
    "areas?": [[list]],
}


def load_map(path: str | Path) -> LaneGraph:
    """Read a map; the format (lane-graph/1, nuScenes expansion, Argoverse 2) is recognised by its content."""
    path = Path(path)
    data = read_json(path)
    for key, (schema, read) in FORMATS.items():
        if isinstance(data, dict) and key in data:
            check_json(data, schema, str(path))
            with about(path):
                return read(data, path.stem)
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


def read_lane_graph(data: Mapping[str, Any], name: str) -> LaneGraph:
    """``lane-graph/1``; ``name`` is the map's where the file gives none."""
    check_choice("format", data["format"], ("lane-graph/1",))
    check_choice("units", data.get("units", "metres"), ("metres",))
    lanes, lines, areas = {}, [], []
    for key, record in data["lanes"].items():
        with about(f"lane {key!r}"):
            centerline, polygon = points(record["centerline"], "centerline"), record["polygon"]
            polygon = None if polygon is None else points(polygon, "polygon", 3)
            lanes[key] = Lane(record["kind"], centerline, polygon, tuple(record["successors"]))
    for i, record in enumerate(data["lines"]):
        with about(f"line {i}"):
            check_choice("kind", record["kind"], LINE_KINDS)
            lines.append(Line(record["kind"], points(record["points"], "points")))
    for i, rings in enumerate(data.get("areas", [])):
        if not rings:
            raise ValueError(f"area {i}: expected at least one ring, got none")
        areas.append(tuple(points(ring, f"area {i}: ring {j}", 3) for j, ring in enumerate(rings)))
    return LaneGraph(str(data.get("map", name)), lanes, tuple(lines), tuple(areas))


# By the name of a member that only files of the format have.
FORMATS = {
    "format": (SCHEMA, read_lane_graph),
    "arcline_path_3": (nuscenes.SCHEMA, nuscenes.read_nuscenes),
    "lane_segments": (argoverse.SCHEMA, argoverse.read_argoverse),
}

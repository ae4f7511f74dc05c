"""Lane maps written to files, for the tests that read some."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torchcpl.tasks.paths.lanes import LaneGraph


def save_map(graph: LaneGraph, path: Path) -> None:
    """Write ``lane-graph/1``; reading it back gives the same graph exactly."""
    data: dict[str, Any] = {
        "format": "lane-graph/1",
        "map": graph.name,
        "units": "metres",
        "lanes": {
            key: {
                "kind": lane.kind,
                "centerline": lane.centerline.tolist(),
                "polygon": None if lane.polygon is None else lane.polygon.tolist(),
                "successors": list(lane.successors),
            }
            for key, lane in graph.lanes.items()
        },
        "lines": [{"kind": line.kind, "points": line.points.tolist()} for line in graph.lines],
    }
    if graph.areas:
        data["areas"] = [[ring.tolist() for ring in rings] for rings in graph.areas]
    path.write_text(json.dumps(data))

"""Figures and report of the paths task, all from finished runs; and the demo that makes everything from nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchcpl import plots
from torchcpl.metrics import path_scores
from torchcpl.report import Panel
from torchcpl.results import write_atomic
from torchcpl.tables import Table
from torchcpl.tasks import pages
from torchcpl.tasks.pages import (
    against_pointer,
    array,
    convergence_curves,
    demonstrate,
    first_runs,
    runs_of_a_page,
    steps_of,
    write_page,
)
from torchcpl.tasks.paths.results import BENCHMARK, NAMES
from torchcpl.tasks.paths.sampling import BACKGROUND, CELL, GRID, PALETTE, Image
from torchcpl.tasks.paths.scenes import Scenes
from torchcpl.tasks.paths.task import PathsConfig, PathsModel
from torchcpl.tasks.runs import Run

COLOURS = {name: pages.COLOURS[method] for method, name in NAMES.items()}
VALID = (plots.PALETTE[0], plots.PALETTE[6], plots.PALETTE[4], "#2a7f4f", plots.PALETTE[5], plots.PALETTE[8])
ORDERED = ("pointer", "cpl")
MIX = (2, 2, 3, 3, 4)  # valid paths of the scenes that are shown, the last at least as many
STRATA = {"min_ade_n1": "1", "min_ade_n2": "2", "min_ade_n3": "3", "min_ade_n4plus": "≥ 4"}
LEAD = (
    "Each input is a road scene from above, cut into 32 × 32 cells. The model picks cells, and a point in each, that "
    "make one path from the ego on; any path that the lanes allow is right. Training showed it one valid path of a "
    "scene at a time, never all of them together."
)


def example_scenes(scenes: Scenes, mix: Sequence[int] = MIX) -> list[int]:
    """The first scenes with as many valid paths as ``mix`` asks for; where there are none, those with the next most."""
    counts = np.minimum(scenes.counts, max(mix))
    found: list[int] = []
    for wanted in mix:
        left = [i for i in range(len(scenes)) if i not in found]
        found += sorted(left, key=lambda i: (abs(int(counts[i]) - wanted), i))[:1]
    return sorted(found, key=lambda i: (counts[i], i))


def faint(image: Image, strength: float = 0.45) -> Image:
    """A scene's picture, mixed with white."""
    palette: Image = (255 - strength * (255.0 - PALETTE)).round().astype(np.uint8)
    return palette[image]


def scene_rows(models: Mapping[str, PathsModel], scenes: Scenes) -> dict[str, list[plots.Scene]]:
    """All valid paths of the scenes, and below them what each model selects, with its distance to the nearest."""
    rows = {
        "All valid paths": [
            plots.Scene(faint(scenes.images[i], 0.7), [plots.Route(path, VALID[j]) for j, path in enumerate(paths)])
            for i, paths in enumerate(map(valid_paths, scenes.paths, scenes.lengths))
        ]
    }
    for method, model in models.items():
        device = model.corners.device
        with torch.inference_mode():
            prediction = model.select(torch.from_numpy(scenes.images).to(device))
        paths, lengths = torch.from_numpy(scenes.paths).to(device), torch.from_numpy(scenes.lengths).to(device)
        scores = path_scores(prediction.points, prediction.lengths, paths, lengths, (lengths > 0).sum(-1))
        rows[NAMES[method]] = [
            plots.Scene(
                faint(scenes.images[i]),
                [plots.Route(array(prediction.points[i, :length]), COLOURS[NAMES[method]], method in ORDERED)],
                f"{scores['min_ade'][i]:.1f} px",
            )
            for i, length in enumerate(prediction.lengths.tolist())
        ]
    return rows


def valid_paths(paths: Any, lengths: Any) -> list[Any]:
    """The points of each path of a scene, without padding."""
    return [path[:length] for path, length in zip(paths, lengths, strict=True) if length]


def decoding(model: PathsModel, image: Image) -> plots.Decoding:
    """What a model that selects step by step picks from an image, and what it thought of the road after every pick."""
    batch = torch.from_numpy(image).unsqueeze(0).to(model.corners.device)
    with torch.inference_mode():
        encoded = model.encode(batch)
        mask = torch.ones(encoded.shape[:2], dtype=torch.bool, device=encoded.device)
        steps = steps_of(model.method, encoded, mask, model.max_len)
        points = array(model.points(encoded)[0, steps.picks])
    grids = [values[:, : GRID * GRID].reshape(-1, GRID, GRID) for values in (steps.probabilities, steps.added)]
    road = (image.reshape(GRID, CELL, GRID, CELL) != BACKGROUND).any((1, 3))
    return plots.Decoding(faint(image), points, grids[0], np.where(road, grids[1], np.nan))


def fork(points: Any, paths: Sequence[Any]) -> int:
    """How many of the points come before the first that lies off some valid path, by a cell and a half."""
    for i, point in enumerate(points):
        if any(np.hypot(*(path - point).T).min() > 1.5 * CELL for path in paths):
            return i
    return len(points) // 2


def key_steps(count: int, parting: int) -> list[int]:
    """Six numbers of picks worth a look: the beginning, around the parting of the ways, the end."""
    wanted = (0, parting - 2, parting, parting + 2, (parting + 2 + count) // 2, count)
    return sorted({min(max(step, 0), count) for step in wanted})


def animate(model: PathsModel, image: Image, path: str | Path) -> None:
    """Write the decoding of a scene as a GIF."""
    write_atomic(path, plots.animation(decoding(model, image)))


def strata_bars(rows: Sequence[Mapping[str, Any]]) -> Any:
    """min-ADE by number of valid paths, of all methods of a table."""
    heights = {row["method"]: [row[name] for name in STRATA] for row in rows}
    spread = {row["method"]: [row.get(f"{name}_std") for name in STRATA] for row in rows}
    return plots.grouped_bars(heights, tuple(STRATA.values()), "min-ADE, px", "valid paths", COLOURS, spread)


def panels(runs: Sequence[Run[PathsConfig]], results: Table) -> list[Panel]:
    """Every figure that the runs and their table allow."""
    models: dict[str, PathsModel] = {}
    for method, run in first_runs(runs, NAMES).items():
        task, models[method] = BENCHMARK.restore(run)  # a task holds all its scenes: one at a time
    reported = task.scenes.select(task.parts.val)
    shown = reported.select(example_scenes(reported))
    caption = (
        "The first reported scenes with two, three and more valid paths. Methods that select in order are drawn as a "
        "line, the others as points. In the corner: min-ADE, the distance to the nearest valid path."
    )
    figure = plots.scene_rows(scene_rows(models, shown))
    found = [Panel("scenes", "Scenes", caption, figure, wide=True, dense=True)]
    if "cpl" in models:
        found += _decoding_panels(models["cpl"], shown)
    found.append(
        Panel(
            "min-ade-by-paths",
            "By number of valid paths",
            "Distance to the nearest valid path, by how many there are: the more, the harder it is not to mix them.",
            strata_bars(last_rule(results)),
        )
    )
    curves = convergence_curves(runs, "min_ade", NAMES)
    if curves:
        said = "mean over seeds, ± one standard deviation, " if len(next(iter(curves.values())).values) > 1 else ""
        caption = f"min-ADE on the reported scenes as training goes on: {said}star at the best."
        found.append(
            Panel("convergence", "Convergence", caption, plots.convergence(curves, "min-ADE, px", COLOURS, "min"))
        )
    return found


def _decoding_panels(model: PathsModel, shown: Scenes) -> list[Panel]:
    """How CPL selects a path in the first scene with three valid paths, or near it."""
    i = int(np.abs(shown.counts - 3).argmin())
    seen = decoding(model, shown.images[i])
    steps = key_steps(len(seen.points), fork(seen.points, valid_paths(shown.paths[i], shown.lengths[i])))
    still = Panel(
        "decoding",
        "Decoding, step by step",
        f"A scene with {shown.counts[i]} valid paths. Above: how likely each cell is to be picked next (circle: the "
        "one that is). Below: what the picks so far have added to the logits that the encoder gave: blue cells are "
        "suppressed, red ones raised.",
        plots.decoding_steps(seen, steps),
        wide=True,
        dense=True,
    )
    caption = "The same scene, a frame a pick: one addition to the logits, no network."
    return [still, Panel("decode", "Decoding", caption, plots.animation(seen), wide=True)]


def last_rule(results: Table) -> list[Mapping[str, Any]]:
    """The rows of the last of the table's rules."""
    return [row for row in results.rows if row["rule"] == results.rows[-1]["rule"]]


def findings(results: Table) -> list[str]:
    """What the table says, in sentences."""
    rows = {row["method"]: row for row in last_rule(results)}
    if NAMES["cpl"] not in rows or len(rows) < 2:
        return []
    cpl, columns = rows[NAMES["cpl"]], {column.name: column for column in results.columns}
    score, said = columns["min_ade"], []
    parallel = [rows[name] for method, name in NAMES.items() if method not in ORDERED and name in rows]
    if parallel:
        others = ", ".join(f"{row['method']} {score.cell(row)}" for row in parallel)
        said.append(f"CPL's paths lie {score.cell(cpl)} px from the nearest valid one (min-ADE); {others}.")
        two = columns["min_ade_n2"]
        if cpl["min_ade_n2"] is not None:
            best = min(parallel, key=lambda row: row["min_ade_n2"])
            said.append(
                f"Where two paths are valid, CPL is at {two.cell(cpl)} px and the best parallel method, "
                f"{best['method']}, at {two.cell(best)} px."
            )
    pointer = rows.get(NAMES["pointer"])
    if pointer:
        said.append(against_pointer(pointer, cpl, score))
    said.append(f"{cpl['off_road']:.2f} % of the points that CPL picks lie off the road.")
    return said


def report(paths: Sequence[str | Path], out: str | Path, results: Table | None = None) -> Path:
    """Write ``report.html`` and the figures into the folder ``out``; the path of the page."""
    runs = runs_of_a_page(BENCHMARK, paths)
    results = results or BENCHMARK.table(paths)
    return write_page(out, runs, results, LEAD, findings(results), panels(runs, results))


def demo(out: str | Path, say: Callable[[str], None]) -> tuple[Table, Path]:
    """Train all methods on made-up roads, compare them, write ``table.json`` and the report into ``out``."""
    return demonstrate(BENCHMARK, Path(__file__).parent, [0], "procedural roads", out, say, report, ["held-out"])

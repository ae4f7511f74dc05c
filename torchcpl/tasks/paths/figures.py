"""Figures of the paths task: scenes with their paths, and the decoding steps of CPL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from torchcpl import plots
from torchcpl.explore import Explorer
from torchcpl.report import Panel
from torchcpl.tables import Row
from torchcpl.tasks.figures import array, explorer, steps_of
from torchcpl.tasks.paths.sampling import BACKGROUND, CELL, GRID, PALETTE, Image
from torchcpl.tasks.paths.scenes import Scenes
from torchcpl.tasks.paths.task import METHODS, PathsModel, SceneSet, errors

COLOURS = {name: plots.METHODS[method] for method, name in METHODS.items()}
VALID = (plots.PALETTE[0], plots.PALETTE[6], plots.PALETTE[4], "#2a7f4f", plots.PALETTE[5], plots.PALETTE[8])
ORDERED = ("pointer", "cpl")
MIX = (2, 2, 3, 3, 4)  # valid paths of the scenes that are shown, the last at least as many
# The columns by number of valid paths, and these numbers.
STRATA = {"min_ade_n1": "1", "min_ade_n2": "2", "min_ade_n3": "3", "min_ade_n4plus": "≥ 4"}


def example_scenes(scenes: Scenes) -> list[int]:
    """The first scenes with the numbers of valid paths in MIX, or the nearest numbers."""
    counts = np.minimum(scenes.counts, max(MIX))
    found: list[int] = []
    for wanted in MIX:
        left = [i for i in range(len(scenes)) if i not in found]
        found += sorted(left, key=lambda i: (abs(int(counts[i]) - wanted), i))[:1]
    return sorted(found, key=lambda i: (counts[i], i))


def faint(image: Image, strength: float = 0.45) -> Image:
    """A scene's image, blended with white."""
    return (255 - strength * (255.0 - PALETTE)).round().astype(np.uint8)[image]


def all_paths(scenes: Scenes) -> list[plots.Scene]:
    """The scenes with all their valid paths."""
    return [
        plots.Scene(faint(image, 0.7), [plots.Route(path, VALID[j]) for j, path in enumerate(valid_paths(*paths))])
        for image, *paths in zip(scenes.images, scenes.paths, scenes.lengths, strict=True)
    ]


@torch.inference_mode()
def scene_rows(models: Mapping[str, PathsModel], scenes: Scenes) -> dict[str, list[plots.Scene]]:
    """All valid paths of the scenes, and below them each model's selection with its distance to the nearest."""
    rows = {"All valid paths": all_paths(scenes)}
    for method, model in models.items():
        seen = SceneSet.of(scenes, model.corners.device)
        prediction, min_ade = model.select(seen.images), errors(model, seen)[0].tolist()
        rows[METHODS[method]] = [
            plots.Scene(
                faint(scenes.images[i]),
                [plots.Route(array(prediction.points[i, :length]), COLOURS[METHODS[method]], method in ORDERED)],
                f"{min_ade[i]:.1f} px",
            )
            for i, length in enumerate(prediction.lengths.tolist())
        ]
    return rows


def valid_paths(paths: Any, lengths: Any) -> list[Any]:
    """The points of each path of a scene, without padding."""
    return [path[:length] for path, length in zip(paths, lengths, strict=True) if length]


@torch.inference_mode()
def decoding(model: PathsModel, image: Image) -> plots.Decoding:
    """The picks of a stepwise model from an image, with its probabilities after every pick."""
    encoded = model.encode(torch.from_numpy(image)[None].to(model.corners.device))
    steps = steps_of(model.method, encoded, model.every_cell(encoded), model.max_len)
    points = array(model.points(encoded)[0, steps.picks])
    grids = [values[:, : GRID * GRID].reshape(-1, GRID, GRID) for values in (steps.probabilities, steps.added)]
    road = (image.reshape(GRID, CELL, GRID, CELL) != BACKGROUND).any((1, 3))
    return plots.Decoding(faint(image), points, grids[0], np.where(road, grids[1], np.nan))


@torch.inference_mode()
def scene_explorer(model: PathsModel, scenes: Scenes, knob: float | None) -> Explorer:
    """The first scene with three valid paths, or near it; each cell as the point that the model puts in it."""
    i = int(np.abs(scenes.counts - 3).argmin())
    image = torch.from_numpy(scenes.images[i])[None].to(model.corners.device)
    return scene_page(model, image, knob, f"A road scene with {scenes.counts[i]} valid paths")


def scene_page(model: PathsModel, image: torch.Tensor, knob: float | None, title: str) -> Explorer:
    """A palette image (1, 256, 256), and on it the path that the model selects."""
    encoded = model.encode(image)
    return explorer(
        model.method, encoded, model.every_cell(encoded), model.max_len, knob, items=model.points(encoded)[0],
        background=faint(array(image[0]), 0.6), connect=True, title=title,
    )  # fmt: skip


def fork(points: Any, paths: Sequence[Any]) -> int:
    """The number of points before the first that is more than 1.5 cells off some valid path."""
    for i, point in enumerate(points):
        if any(np.hypot(*(path - point).T).min() > 1.5 * CELL for path in paths):
            return i
    return len(points) // 2


def key_steps(count: int, parting: int) -> list[int]:
    """Six numbers of picks to show: at the beginning, around the fork, at the end."""
    wanted = (0, parting - 2, parting, parting + 2, (parting + 2 + count) // 2, count)
    return sorted({min(max(step, 0), count) for step in wanted})


def scenes_panel(models: Mapping[str, PathsModel], scenes: Scenes) -> Panel:
    """The scenes with their valid paths, and what each model selects."""
    caption = (
        "The first reported scenes with two, three and more valid paths. Methods that select in order are drawn as a "
        "line, the others as points. In the corner: min-ADE, the distance to the nearest valid path."
    )
    return Panel("scenes", "Scenes", caption, plots.scene_rows(scene_rows(models, scenes)), wide=True, dense=True)


def worst_scenes(model: PathsModel, scenes: Scenes, count: int = 5, among: int = 400) -> list[int]:
    """Of the first ``among`` scenes with one valid path those that the model's path is farthest from, worst first."""
    single = np.flatnonzero(scenes.counts == 1)[:among]
    min_ade = errors(model, SceneSet.of(scenes.select(single), model.corners.device), 64)[0].tolist()
    return [int(i) for i in single[np.argsort(min_ade)[::-1][:count]]]


def failures_panels(model: PathsModel, scenes: Scenes) -> list[Panel]:
    """The scenes with one valid path where CPL does worst, and its paths; nothing where no scene has one path."""
    if not (scenes.counts == 1).any():
        return []
    caption = (
        "Of the first 400 reported scenes with one valid path, those with the largest min-ADE. Connectors across a "
        "junction are not drawn: which way a lane may go has to be guessed from where it lies."
    )
    figure = plots.scene_rows(scene_rows({"cpl": model}, scenes.select(worst_scenes(model, scenes))))
    return [Panel("failures", "Where it fails", caption, figure, wide=True, dense=True)]


def strata_panel(rows: Sequence[Row]) -> Panel:
    """min-ADE by number of valid paths, of all methods of a table."""
    figure = plots.grouped_bars(rows, STRATA, "min-ADE, px", "valid paths", COLOURS)
    caption = "Distance to the nearest valid path, by how many there are: the more, the harder it is not to mix them."
    return Panel("min-ade-by-paths", "By number of valid paths", caption, figure)


def decoding_panels(model: PathsModel, shown: Scenes) -> list[Panel]:
    """How CPL selects a path in the first scene with three valid paths, or near it."""
    i = int(np.abs(shown.counts - 3).argmin())
    seen = decoding(model, shown.images[i])
    steps = key_steps(len(seen.points), fork(seen.points, valid_paths(shown.paths[i], shown.lengths[i])))
    caption = (
        f"A scene with {shown.counts[i]} valid paths. Above: how likely each cell is to be picked next (circle: the "
        "one that is). Below: what the picks so far have added to the logits that the encoder gave: blue cells are "
        "suppressed, red ones raised."
    )
    figure = plots.decoding_steps(seen, steps)
    still = Panel("decoding", "Decoding, step by step", caption, figure, wide=True, dense=True)
    caption = "The same scene, a frame a pick: one addition to the logits, no network."
    return [still, Panel("decode", "Decoding", caption, plots.animation(seen), wide=True)]


def sheet(scenes: Scenes) -> bytes:
    """The first four scenes with 1, 2, 3 and more valid paths, a row each, with all their paths, as PNG."""
    rows = {}
    for number, name in enumerate(STRATA.values(), 1):
        some = np.flatnonzero(np.minimum(scenes.counts, 4) == number)[:4]
        if len(some):
            rows[f"{name} valid path{'s' if number > 1 else ''}"] = all_paths(scenes.select(some))
    return plots.render(plots.scene_rows(rows), "png")

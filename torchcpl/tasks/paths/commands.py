"""The paths task as the command line knows it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from torchcpl.config import override
from torchcpl.results import write_atomic
from torchcpl.tasks.paths.figures import demo, report
from torchcpl.tasks.paths.results import BENCHMARK
from torchcpl.tasks.paths.sampling import opencv
from torchcpl.tasks.paths.scenes import Scenes, contact_sheet, save_scenes
from torchcpl.tasks.paths.task import PathsConfig, load_source, split_scenes

PACKAGE = Path(__file__).parent
SUMMARY = "path prediction: one valid path through a road scene from above"
SHEET = 16  # scenes on a contact sheet

__all__ = ["BENCHMARK", "PACKAGE", "SUMMARY", "demo", "make_scenes", "report"]


def make_scenes(
    config: PathsConfig, out: Path | None, show: Path | None, splits: tuple[str, ...], say: Callable[[str], None]
) -> Scenes:
    """The scenes of a configuration: counted, split, written to ``out`` and drawn in ``show`` where these are given."""
    for path, suffix in ((out, ".npz"), (show, ".png")):
        if path and path.suffix != suffix:
            raise ValueError(f"{path}: expected a name that ends in {suffix}")
    scenes = load_source(config)
    shares = np.bincount(np.minimum(scenes.counts, 4), minlength=5)[1:]
    said = ", ".join(f"{n} with {k}" for k, n in zip(("1", "2", "3", "4 or more"), shares.tolist(), strict=True))
    say(f"{len(scenes)} scenes of {', '.join(scenes.maps)}; valid paths: {said}")
    for split in splits:
        say(f"Split by {split}: {split_scenes(override(config, split=split), scenes)}")
    if out:
        save_scenes(scenes, out)
        say(f"Written to {out}, {out.stat().st_size / 1e6:.1f} MB")
    if show:
        write_atomic(show, _png(contact_sheet(scenes, few(scenes))))
        say(f"Contact sheet: {show}")
    if out:
        say(f"Next: torchcpl train paths --source {out}")
    return scenes


def few(scenes: Scenes) -> list[int]:
    """Scenes to look at, as many with 1, 2, 3 and more valid paths as there are, in this order."""
    strata = np.minimum(scenes.counts, 4)
    place = np.zeros(len(scenes), np.int64)  # of a scene among those with as many paths
    for n in range(1, 5):
        place[strata == n] = np.arange((strata == n).sum())
    chosen = np.lexsort((strata, place))[:SHEET]
    return [int(i) for i in chosen[np.argsort(strata[chosen], kind="stable")]]


def _png(picture: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> bytes:
    _, data = opencv().imencode(".png", picture[..., ::-1])
    return bytes(data)

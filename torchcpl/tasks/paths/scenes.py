"""Bird's-eye scenes with several valid paths: making many, storing them, splitting them.

Scene number ``index`` is a pure function of (maps, seed, index): any number of workers makes the same scenes.
"""

from __future__ import annotations

import io
import math
import multiprocessing
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchcpl.checks import check_count
from torchcpl.files import read_npz, track, write_atomic
from torchcpl.tasks.paths.lanes import FARTHEST, Array, LaneGraph
from torchcpl.tasks.paths.sampling import (
    CELL,
    GRID,
    MAX_PATHS,
    MAX_POINTS,
    METRES,
    PALETTE,
    SIZE,
    Bools,
    Image,
    Ints,
    Points,
    Roads,
    Scene,
    ground,
    sample_scene,
)

FORMAT = "path-scenes/1"
MANY = 2000  # scenes: with fewer, it takes longer to start processes than they save
FIELDS: dict[str, tuple[tuple[int, ...], Any, Any]] = {  # of each: its shape in a scene, its dtype, its dtype in files
    "images": ((SIZE, SIZE), np.uint8, np.uint8),
    "paths": ((MAX_PATHS, MAX_POINTS, 2), np.float32, np.float32),
    "lengths": ((MAX_PATHS,), np.int64, np.uint8),
    "map_index": ((), np.int64, np.int32),
    "poses": ((3,), np.float64, np.float64),
    "reach": ((), np.float64, np.float64),
}


@dataclass(frozen=True, eq=False)
class Scenes:
    """S scenes. ``paths`` are pixel points from the ego on, −1 after a path's end and where there is no path."""

    images: Image  # (S, 256, 256) palette indices
    paths: Points  # (S, 6, 64, 2) px
    lengths: Ints  # (S, 6) points of each path, 0 = no path
    map_index: Ints  # (S,) into `maps`
    poses: Array  # (S, 3) ego x, y in metres and heading in radians
    reach: Array  # (S,) side of the square of ground that holds what is shown, 1 where nothing is varied
    maps: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.images)

    @property
    def counts(self) -> Ints:
        """Number of valid paths of each scene, (S,)."""
        return (self.lengths > 0).sum(axis=1)

    def select(self, indices: npt.ArrayLike) -> Scenes:
        """The scenes at ``indices``, in that order."""
        i = np.asarray(indices, dtype=np.int64)
        return replace(self, **{name: getattr(self, name)[i] for name in FIELDS})


def joined(parts: Sequence[Scenes]) -> Scenes:
    """The scenes of all parts, one part after the other."""
    first = np.cumsum([0] + [len(part.maps) for part in parts])
    rows: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in FIELDS}
    rows["map_index"] = np.concatenate([part.map_index + at for part, at in zip(parts, first, strict=False)])
    return Scenes(**rows, maps=tuple(name for part in parts for name in part.maps))


def generate(
    maps: Sequence[LaneGraph],
    count: int,
    seed: int = 0,
    workers: int | None = None,
    progress: bool = False,
    varied: bool = False,
) -> Scenes:
    """``count`` scenes of the maps, the same for any number of ``workers``, processes.

    By default many scenes are drawn by a worker a core, fewer than MANY by this process.
    If ``varied``, roads that the ego cannot reach may be cut off in the image, and most of the ground is warped.
    """
    if not maps:
        raise ValueError("maps: expected at least one LaneGraph, got none")
    check_count("count", count, 1)
    workers = (os.cpu_count() or 1 if count >= MANY else 1) if workers is None else workers
    check_count("workers", workers, 1)
    sample = partial(sample_scene, [Roads(graph) for graph in maps], seed, varied=varied)
    empty: dict[str, Any] = {name: np.zeros((count, *shape), dtype) for name, (shape, dtype, _) in FIELDS.items()}
    scenes = Scenes(**empty, maps=tuple(graph.name for graph in maps))
    scenes.paths[:] = -1
    with closing(_made(sample, count, workers)) as made:
        for i, scene in zip(track(range(count), "scenes", progress), made, strict=True):
            scenes.images[i], scenes.map_index[i] = scene.image, scene.map_index
            scenes.poses[i], scenes.reach[i] = scene.pose, scene.reach
            for j, path in enumerate(scene.paths):
                scenes.paths[i, j, : len(path)], scenes.lengths[i, j] = path, len(path)
    return scenes


def _made(sample: Callable[[int], Scene], count: int, workers: int) -> Generator[Scene, None, None]:
    """Scenes 0 … count−1 in order, from a pool of processes when ``workers`` > 1."""
    if workers == 1:
        yield from map(sample, range(count))
        return
    # Spawned, not forked: a fork of a process with threads can hang.
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_worker, (sample,))
    try:
        yield from pool.map(_work, range(count), chunksize=16)
    finally:
        pool.shutdown(cancel_futures=True)


_sample: Callable[[int], Scene]  # of a worker process, with the maps: they are sent to it once


def _start_worker(sample: Callable[[int], Scene]) -> None:
    global _sample
    _sample = sample


def _work(index: int) -> Scene:
    return _sample(index)


def save_scenes(scenes: Scenes, path: str | Path) -> None:
    """Write ``.npz``: two pixels a byte, compressed."""
    stored = {name: getattr(scenes, name).astype(kept, copy=False) for name, (_, _, kept) in FIELDS.items()}
    stored["images"] = scenes.images[:, :, ::2] << 4 | scenes.images[:, :, 1::2]
    buffer = io.BytesIO()
    np.savez_compressed(buffer, format=np.array(FORMAT), maps=np.array(scenes.maps), **stored)
    write_atomic(path, buffer.getvalue())


def load_scenes(path: str | Path) -> Scenes:
    """Read a file of ``save_scenes``; ValueErrors name the file."""
    field = read_npz(path)
    if str(field.get("format")) != FORMAT:
        raise ValueError(f"{path}: not a file of scenes: expected 'format' to be {FORMAT!r}")
    S, M = (len(np.atleast_1d(field.get(name, []))) for name in ("images", "maps"))
    field.setdefault("reach", np.ones(S))  # which files of scenes as they are may lack
    wanted = {
        name: ((S, *shape), "f" if np.issubdtype(dtype, np.floating) else "iu")
        for name, (shape, dtype, _) in FIELDS.items()
    }
    for name, (shape, kinds) in {**wanted, "maps": ((M,), "U"), "images": ((S, SIZE, SIZE // 2), "u")}.items():
        array = field.get(name)
        if array is None or array.shape != shape or array.dtype.kind not in kinds:
            got = "none" if array is None else f"{array.shape} {array.dtype}"
            raise ValueError(f"{path}: field {name!r}: expected {shape} of kind {' or '.join(kinds)}, got {got}")
    pairs, images = field["images"], np.empty((S, SIZE, SIZE), field["images"].dtype)
    images[:, :, ::2], images[:, :, 1::2] = pairs >> 4, pairs & 15
    field["images"] = images
    if not S or images.max() >= len(PALETTE):
        raise ValueError(f"{path}: expected at least one scene, in the colours of the palette")
    found: dict[str, Any] = {name: field[name].astype(dtype, copy=False) for name, (_, dtype, _) in FIELDS.items()}
    scenes = Scenes(**found, maps=tuple(map(str, field["maps"])))
    if not ((scenes.map_index >= 0) & (scenes.map_index < M)).all() or not (np.abs(scenes.poses) <= FARTHEST).all():
        raise ValueError(f"{path}: expected every map_index below {M}, the number of maps, and finite poses")
    if not ((scenes.reach > 0) & (scenes.reach <= FARTHEST)).all():
        raise ValueError(f"{path}: field 'reach': expected finite numbers above 0")
    real = np.arange(MAX_POINTS) < scenes.lengths[..., None]  # (S, 6, 64)
    inside: Bools = np.all((scenes.paths >= 0) & (scenes.paths < SIZE), axis=-1)
    first = (scenes.lengths > 0) == (np.arange(MAX_PATHS) < scenes.counts[:, None])  # (S, 6)
    allowed = (scenes.lengths >= 0) & (scenes.lengths <= MAX_POINTS)
    if not scenes.counts.all() or not first.all() or not allowed.all() or not inside[real].all():
        raise ValueError(
            f"{path}: expected 1 to {MAX_PATHS} paths a scene, the first ones, of at most {MAX_POINTS} points in the "
            "image"
        )
    scenes.paths[~real] = -1
    return scenes


# Splits.

MAP = "map:"  # a split's name begins with it where one map is left out


@dataclass(frozen=True, eq=False)
class Split:
    """Scene numbers: training, selection (``held_out``), reported (``val``), and dropped."""

    train: Ints
    val: Ints
    held_out: Ints
    dropped: Ints

    def __str__(self) -> str:
        return (
            f"{len(self.train)} train, {len(self.held_out)} held out, {len(self.val)} val, {len(self.dropped)} dropped"
        )


def map_left_out(split: str) -> str | None:
    """The NAME of a split ``map:NAME``, None of another."""
    return split.removeprefix(MAP) if split.startswith(MAP) else None


def split_scenes(scenes: Scenes, split: str, val: float = 0.2, held_out: float = 0.0) -> Split:
    """The parts of the scenes; ValueError where one that is asked for is empty.

    - ``index``: the last ``val`` of the scenes to report on, ``held_out`` of them before; all lie on the same roads.
    - ``geography``: disjoint areas, no image of one part overlaps an image of another. Each map is cut by a straight
      line with the share ``val`` of its scenes beyond it; scenes before the line whose image overlaps one beyond are
      dropped. Of 24 directions the line takes the one that drops few scenes and leaves about the share ``val`` of the
      scenes with 1, 2, 3 and more paths beyond it, over all maps. ``held_out`` is then cut off the rest likewise.
    - ``map:NAME``: the scenes of that map to report on; of the others, areas with the share ``held_out``.
    """
    everything: Ints = np.arange(len(scenes))
    lost: Ints = np.empty(0, np.int64)
    asked = f"split = {split!r}, val = {val}, held_out = {held_out}"
    name = map_left_out(split)
    if not (val >= 0 and held_out >= 0 and held_out + (val if name is None else 0) < 1):
        raise ValueError(f"{asked}: expected shares that leave some to train on")
    if split == "index":
        cut = len(scenes) - round(len(scenes) * val)
        first = cut - round(len(scenes) * held_out)
        parts = Split(everything[:first], everything[cut:], everything[first:cut], lost)
    else:
        if split == "geography":
            seen, beyond, lost = _part(everything, val, scenes)
            held_out = min(held_out * len(scenes) / max(len(seen), 1), 1.0)  # fewer may be left than are to be held out
        elif name in scenes.maps:
            left_out = scenes.map_index == scenes.maps.index(name)
            seen, beyond = everything[~left_out], everything[left_out]
        else:
            raise ValueError(f"split = {split!r}: expected one of the maps {', '.join(scenes.maps)}")
        train, aside, lost_too = _part(seen, held_out, scenes)
        parts = Split(train, beyond, aside, np.sort(np.concatenate([lost, lost_too])))
    if not len(parts.train) or not len(parts.val) or (held_out and not len(parts.held_out)):
        raise ValueError(f"{asked}: a part is empty ({parts})")
    return parts


def _part(numbers: Ints, share: float, scenes: Scenes) -> tuple[Ints, Ints, Ints]:
    """Scenes cut by one line per map: kept, beyond, and dropped between."""
    strata = np.minimum(scenes.counts, 4) - 1
    of_map = [numbers[scenes.map_index[numbers] == m] for m in range(len(scenes.maps))]
    wanted = np.zeros(4)
    chosen: list[tuple[Ints, Ints, Ints]] = []
    for mine in sorted(of_map, key=len, reverse=True):
        wanted += share * np.bincount(strata[mine], minlength=4)

        def cost(cut: tuple[Ints, Ints, Ints], wanted: Array = wanted) -> float:
            _, beyond, lost = map(np.concatenate, zip(*chosen, cut, strict=True))
            worst = np.abs(np.bincount(strata[beyond], minlength=4) - wanted) / np.maximum(wanted, 1)
            return len(lost) / max(len(numbers), 1) + share * float(worst.max())

        chosen.append(min(_cuts(mine, round(share * len(mine)), scenes), key=cost))
    kept, beyond, lost = (np.sort(np.concatenate(part)) for part in zip(*chosen, strict=True))
    return kept, beyond, lost


def _cuts(numbers: Ints, take: int, scenes: Scenes) -> Iterator[tuple[Ints, Ints, Ints]]:
    """One map's scenes cut by a line in each direction, ``take`` of them beyond it: kept, beyond, dropped."""
    if not take:
        yield numbers, numbers[:0], numbers[:0]
        return
    outlines = image_outlines(scenes)
    diagonal = SIZE * METRES * math.sqrt(2.0) * float(scenes.reach[numbers].max())
    for angle in np.arange(24) * np.pi / 12:
        far = outlines[numbers, :2] @ np.array([math.cos(angle), math.sin(angle)])
        order = np.argsort(far, kind="stable")
        before, beyond = numbers[order[:-take]], numbers[order[-take:]]
        # Only images less than a diagonal apart can overlap.
        line = far[order[-take]]
        near, facing = before[far[order[:-take]] > line - diagonal], beyond[far[order[-take:]] < line + diagonal]
        meets = images_overlap(outlines[near], outlines[facing])
        lost = near[meets.any(axis=1)]
        yield np.setdiff1d(before, lost), beyond, lost


def image_outlines(scenes: Scenes) -> Array:
    """The squares of `ground`, (S, 4)."""
    return ground(scenes.poses, scenes.paths[:, 0, 0, 1], scenes.reach)  # every path starts at the ego


def images_overlap(outlines: Array, others: Array) -> Bools:
    """Which of n outlines overlap which of m, (n, m): squares overlap when no side of either parts them."""
    x, y, heading = (others[None, :, i] - outlines[:, None, i] for i in range(3))  # (n, m) each
    own, other = outlines[:, None, 3], others[None, :, 3]
    turn = heading % (np.pi / 2)
    spread = np.cos(turn) + np.sin(turn)
    overlap = np.ones(turn.shape, bool)
    for angle, reach in ((outlines[:, None, 2], own + other * spread), (others[None, :, 2], other + own * spread)):
        for axis in (angle, angle + np.pi / 2):
            overlap &= np.abs(x * np.cos(axis) + y * np.sin(axis)) < reach
    return overlap


def apart(scenes: Scenes, others: Scenes) -> Ints:
    """Numbers of the scenes whose image shows nothing that one of the ``others`` shows, on a map of the same name."""
    outlines, theirs = image_outlines(scenes), image_outlines(others)
    names, other_names = np.array(scenes.maps)[scenes.map_index], np.array(others.maps)[others.map_index]
    free = np.ones(len(scenes), bool)
    for name in np.unique(other_names):
        for mine in np.array_split(np.flatnonzero(names == name), -(-len(scenes) // 256)):  # some pairs at a time
            free[mine] = ~images_overlap(outlines[mine], theirs[other_names == name]).any(axis=1)
    return np.flatnonzero(free)


# On the device.


def cells_of(paths: Tensor) -> Tensor:
    """Cell number row·32 + column of every point (..., 2), (...,) long, −1 where padded.

    >>> cells_of(torch.tensor([[9.5, 16.0], [-1.0, -1.0]]))
    tensor([65, -1])
    """
    column, row = (paths // CELL).long().unbind(-1)
    return torch.where(paths[..., 0] >= 0, row * GRID + column, -1)


def flip(images: Tensor, paths: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
    """Mirror left and right of the ego, which heads right: image rows (B, H, W) and the y of paths (B, ..., 2).

    ``which`` (B,) bool picks the scenes to mirror. Padding (−1) stays.
    """
    y = torch.where(paths[..., 1] < 0, paths[..., 1], images.shape[-2] - paths[..., 1])
    mirrored = torch.stack([paths[..., 0], y], dim=-1)
    chosen = which.view(-1, *[1] * (paths.dim() - 1))
    return torch.where(which[:, None, None], images.flip(-2), images), torch.where(chosen, mirrored, paths)

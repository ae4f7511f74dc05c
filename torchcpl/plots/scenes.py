"""Bird's-eye scenes: routes over an image, and a selection on a grid of cells, step by step."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from torchcpl.plots.style import FAINT, INK, WIDTH, Array, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = 64  # palette of an animation


class Route(NamedTuple):
    """Points (T, 2) in pixels, x right and y down; connected by a line if ``ordered``."""

    points: Array
    colour: str
    ordered: bool = True


class Scene(NamedTuple):
    """An image (H, W, 3) uint8 with routes over it, and a label in its corner."""

    picture: Array
    routes: Sequence[Route]
    words: str = ""


class Decoding(NamedTuple):
    """A selection on a grid of cells over an image, after 0, 1, …, T picks."""

    picture: Array  # (H, W, 3) uint8
    points: Array  # (T, 2) positions of the picks, in pixels
    probabilities: Array  # (T+1, R, C) of each cell to be picked next
    added: Array  # (T+1, R, C) what the picks added to the logits, NaN in cells that are not shown


@styled
def scene_rows(rows: Mapping[str, Sequence[Scene]]) -> Figure:
    """A row of images for every name, each with its routes; rows may differ in length."""
    columns = max(map(len, rows.values()))
    height = (WIDTH - 0.2) / columns * len(rows)
    figure, grid = new_figure(WIDTH, height, len(rows), columns, packed=True, squeeze=False)
    for line, (name, scenes) in zip(grid, rows.items(), strict=True):
        for axes in line[len(scenes) :]:
            axes.set_axis_off()
        for axes, scene in zip(line, scenes, strict=False):
            _picture(axes, scene.picture)
            for route in scene.routes:
                _line(axes, route)
            if scene.words:
                box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "alpha": 0.85, "edgecolor": "none"}
                axes.text(0.97, 0.04, scene.words, transform=axes.transAxes, ha="right", fontsize=6, bbox=box)
        line[0].set_ylabel(name, labelpad=3)
    return figure


@styled
def decoding_steps(decoding: Decoding, steps: Sequence[int]) -> Figure:
    """After each of ``steps`` picks: the probability of every cell to be next, and what was added to its logit."""
    height = 2 * (WIDTH - 0.9) / len(steps) + 0.3
    figure, grid = new_figure(WIDTH, height, 2, len(steps), packed=True, squeeze=False)
    for line, kind in zip(grid, ("probabilities", "added"), strict=True):
        views = [_View(axes, decoding, kind) for axes in line]
        for view, step in zip(views, steps, strict=True):
            view.show(step)
        views[0].scale(figure, list(line))
    for axes, step in zip(grid[0], steps, strict=True):
        axes.set_title(_picks(step), pad=3)
    return figure


@styled
def animation(decoding: Decoding, seconds: float = 0.22, pause: float = 2.5) -> bytes:
    """The decoding as a GIF: one frame per pick, ``seconds`` each, the last one ``pause``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image  # which matplotlib needs too

    figure, (left, right) = new_figure(6.4, 2.8, 1, 2)
    canvas = FigureCanvasAgg(figure)
    views = [_View(left, decoding, "probabilities"), _View(right, decoding, "added")]
    for view in views:
        view.scale(figure, [view.axes])
    title = left.set_title(_picks(0), loc="left", pad=4)
    frames = []
    for step in range(len(decoding.points) + 1):
        for view in views:
            view.show(step)
        title.set_text(_picks(step))
        canvas.draw()
        figure.set_layout_engine("none")  # laid out once, for the first frame
        frames.append(np.asarray(canvas.buffer_rgba())[..., :3].copy())
    # One palette for all frames and no dithering, so that unchanged pixels compress.
    strip = Image.fromarray(np.concatenate(frames)).quantize(COLOURS, dither=Image.Dither.NONE)
    height, width = frames[0].shape[:2]
    stills = [strip.crop((0, i * height, width, (i + 1) * height)) for i in range(len(frames))]
    durations = [round(1000 * seconds)] * (len(frames) - 1) + [round(1000 * pause)]
    buffer = io.BytesIO()
    stills[0].save(
        buffer, "GIF", save_all=True, append_images=stills[1:], duration=durations, loop=0, optimize=True, disposal=1
    )
    return buffer.getvalue()


class _View:
    """One panel of a decoding, ``probabilities`` or ``added``, over its image."""

    def __init__(self, axes: Any, decoding: Decoding, kind: str) -> None:
        from matplotlib import colormaps
        from matplotlib.colors import LogNorm, Normalize
        from matplotlib.patheffects import withStroke

        self.axes, self.points = axes, decoding.points
        self.values = getattr(decoding, kind)
        self.likely = kind == "probabilities"
        # The largest increase sets the scale, or the 90th percentile where all decrease: decreases are unbounded.
        limit = max(float(np.nanmax(decoding.added)), -float(np.nanquantile(decoding.added, 0.9)), 1.0)
        self.norm = LogNorm(1e-4, 1, clip=True) if self.likely else Normalize(-limit, limit, clip=True)
        self.colours = colormaps["YlOrRd" if self.likely else "RdBu_r"]
        H, W = decoding.picture.shape[:2]
        _picture(axes, decoding.picture)
        blank = np.zeros((*self.values.shape[1:], 4))
        self.cells = axes.imshow(blank, extent=(0, W, H, 0), interpolation="nearest", zorder=2)
        halo = [withStroke(linewidth=2.4, foreground="white")]  # visible on dark cells
        (self.line,) = axes.plot([], [], "-o", color=INK, linewidth=0.9, markersize=1.7, zorder=3, path_effects=halo)
        (self.next,) = axes.plot([], [], "o", color=INK, markerfacecolor="none", markersize=4.5, zorder=4)

    def show(self, step: int) -> None:
        """The state after ``step`` picks."""
        neutral = 0.0 if self.likely else 0.5
        level = np.nan_to_num(np.asarray(self.norm(self.values[step])), nan=neutral)
        shade = self.colours(level)
        shade[..., 3] = 0.9 * np.clip(3 * np.abs(level - neutral), 0, 1)  # neutral cells are transparent
        self.cells.set_data(shade)
        self.line.set_data(*self.points[:step].T)
        self.next.set_data(*(self.points[step : step + 1].T if self.likely else ([], [])))

    def scale(self, figure: Figure, beside: list[Any]) -> None:
        from matplotlib.cm import ScalarMappable

        shades = ScalarMappable(self.norm, self.colours)
        bar = figure.colorbar(
            shades, ax=beside, fraction=0.046, pad=0.015, aspect=18, extend="neither" if self.likely else "min"
        )
        bar.minorticks_off()
        bar.set_label("P(next pick)" if self.likely else "added to the logit")


def _picture(axes: Any, picture: Array) -> None:
    H, W = picture.shape[:2]
    axes.imshow(picture, extent=(0, W, H, 0), interpolation="antialiased")
    axes.set(xlim=(0, W), ylim=(H, 0), xticks=[], yticks=[])
    axes.spines[:].set(visible=True, edgecolor=FAINT)


def _line(axes: Any, route: Route) -> None:
    x, y = route.points.T
    if route.ordered:
        axes.plot(x, y, "-", color="white", linewidth=2.2)
        axes.plot(x, y, "-o", color=route.colour, linewidth=1.1, markersize=2.2, markeredgewidth=0)
    else:
        axes.plot(x, y, "o", color=route.colour, markersize=3.0, markeredgecolor="white", markeredgewidth=0.4)


def _picks(count: int) -> str:
    return f"{count} pick{'' if count == 1 else 's'}"

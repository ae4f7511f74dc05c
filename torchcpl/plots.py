"""Results in, figures out: arrays to matplotlib figures in one style, without global state.

Colours are M. Petroff's ten, made to be told apart with any colour vision; names and numbers say the same again.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec

import numpy as np
from numpy.typing import NDArray

from torchcpl.results import extra, write_atomic
from torchcpl.tables import Column

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    Array = NDArray[Any]

P = ParamSpec("P")

PALETTE = (
    "#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6", "#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd",
)  # fmt: skip
# A method has one colour in the figures of all tasks.
METHODS = {
    "cpl": PALETTE[2],
    "pointer": PALETTE[0],
    "hungarian": PALETTE[1],
    "bce": PALETTE[4],
    "grid": PALETTE[4],
    "multi_hypothesis": PALETTE[5],
}
INK, FAINT = "#22262b", "#c9ced6"
WIDTH = 6.9  # inches, the text width of a paper
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "grid.color": "#e6e9ee",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "svg.fonttype": "path",
    "svg.hashsalt": "torchcpl",  # the same figure is the same file
}


class Curve(NamedTuple):
    """A metric over the epochs (E,): ``values`` (S, E), a row a seed, and where the star is: epoch and value."""

    at: Array
    values: Array
    best: tuple[float, float]


class Trade(NamedTuple):
    """A method's recall and precision as its knob varies, and at the knob that was chosen."""

    recall: Array
    precision: Array
    chosen: tuple[float, float]


def _styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Draw in the library's style and leave matplotlib's own settings alone."""

    @wraps(draw)
    def styled(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with extra():
            import matplotlib
        with matplotlib.rc_context(STYLE):
            return draw(*args, **kwargs)

    return styled


def render(figure: Figure, kind: str) -> bytes:
    """The figure as ``png`` or ``svg``."""
    if kind not in ("png", "svg"):
        raise ValueError(f"kind: expected 'png' or 'svg', got {kind!r}")
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        metadata = {"Date": None} if kind == "svg" else {"Software": None}
        figure.savefig(buffer, format=kind, dpi=200, bbox_inches="tight", pad_inches=0.04, metadata=metadata)
    return buffer.getvalue()


def save(figure: Figure, stem: str | Path) -> None:
    """Write ``stem.png`` and ``stem.svg``."""
    for kind in ("png", "svg"):
        write_atomic(f"{stem}.{kind}", render(figure, kind))


@_styled
def selection_steps(probabilities: Array, picks: Sequence[int], labels: Array, names: Sequence[str]) -> Figure:
    """A panel a choice: the probability of every candidate and of the stop after the picks so far.

    ``probabilities`` (T+1, N+1), the stop last, after 0, 1, …, T picks; ``picks`` (T,) in order; ``labels`` (N,) the
    cluster of each candidate, an index into ``names``.
    """
    T, N = len(picks), len(labels)
    if probabilities.shape != (T + 1, N + 1):
        raise ValueError(f"probabilities: expected shape {(T + 1, N + 1)}, got {probabilities.shape}")
    order, places, groups = _grouped(labels)
    columns = 2 if T + 1 > 3 else 1
    rows = -(-(T + 1) // columns)
    figure = _figure(WIDTH, 0.92 * rows + 0.55)
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    stop_at = places.max() + 9
    # The last stop towers over the candidates: it is cut off, and its value written instead.
    height = float(probabilities[:, :N].max()) * 1.45
    colours = [_colour(groups, label) for label in labels[order]]
    for t, panel in enumerate(axes.T.flat):
        if t > T:
            panel.set_axis_off()
            continue
        panel.bar(places, probabilities[t, order], width=1.0, color=colours, linewidth=0)
        stop = float(probabilities[t, N])
        panel.bar(stop_at, min(stop, height), width=3.0, color=INK, linewidth=0)
        if stop > height:
            for y in (0.56, 0.64):
                panel.plot(
                    [stop_at - 2.4, stop_at + 2.4], [(y - 0.04) * height, (y + 0.04) * height], "-w", linewidth=1.5
                )
        position = {int(candidate): places[i] for i, candidate in enumerate(order)}
        for pick in picks[:t]:  # what can no longer be picked
            colour = _colour(groups, labels[pick])
            panel.plot(position[pick], -0.055 * height, "^", color=colour, markersize=3.2, clip_on=False)
        x, value = (position[picks[t]], probabilities[t, picks[t]]) if t < T else (stop_at, min(stop, height))
        panel.annotate(
            str(t + 1) if t < T else f"stop {stop:.2f}", (x, value), (0, 3), textcoords="offset points",
            ha="center" if t < T else "right", fontsize=7, fontweight="bold", color="white", annotation_clip=False,
            bbox={"boxstyle": "round,pad=0.22", "facecolor": INK, "edgecolor": "none"},
        )  # fmt: skip
        if t < T:
            panel.annotate(
                f"{stop:.2f}", (stop_at, min(stop, height)), (0, 1.5), textcoords="offset points", ha="center",
                fontsize=6, color="#5b6470", annotation_clip=False,
            )  # fmt: skip
        said = "nothing picked yet" if t == 0 else f"after {t} pick{'s' if t > 1 else ''}"
        panel.set_title(said, loc="left", pad=2, fontsize=7, color="#5b6470")
        panel.set_ylim(0, height)
        panel.set_xlim(places.min() - 2, stop_at + 3)
        panel.tick_params(bottom=False, labelbottom=True)
        panel.yaxis.set_major_locator(_few_ticks(3))
        panel.yaxis.grid(True)
        centres = [places[labels[order] == group].mean() for group in groups]
        panel.set_xticks([*centres, stop_at], [*(names[group] for group in groups), "stop"])
        _fit_labels(panel, names, groups)
    figure.supylabel("probability of being picked next", fontsize=8)
    return figure


@_styled
def embedding(points: Array, labels: Array, picks: Sequence[int], names: Sequence[str]) -> Figure:
    """Candidates (N, 2) in the plane, coloured by cluster, the picks numbered in order."""
    groups = _groups(labels)
    figure = _figure(WIDTH / 2, WIDTH / 2)
    axes = figure.subplots()
    for group in groups:
        inside = points[labels == group]
        axes.scatter(inside[:, 0], inside[:, 1], s=16, color=_colour(groups, group), alpha=0.75, linewidths=0)
    spread = np.ptp(points, axis=0).max()
    for group in groups:
        inside = points[labels == group]
        # The name stands beside the cluster, away from the middle of the picture.
        middle = np.median(inside, axis=0)
        away = middle - points.mean(0)
        away = away / max(np.linalg.norm(away), 1e-9)
        reach = np.sort((inside - middle) @ away)[int(0.85 * (len(inside) - 1))]
        x, y = middle + away * (reach + 0.075 * spread)
        box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "alpha": 0.8, "edgecolor": "none"}
        axes.text(
            x, y, names[group], ha="center", va="center", fontweight="bold", color=_dark(_colour(groups, group)),
            bbox=box,
        )  # fmt: skip
    for number, pick in enumerate(picks, 1):
        x, y = points[pick]
        axes.scatter(x, y, s=105, color="white", edgecolors=INK, linewidths=1.3, zorder=4)
        axes.text(x, y, str(number), ha="center", va="center_baseline", fontsize=7, fontweight="bold", zorder=5)
    axes.set_aspect("equal", adjustable="datalim")
    axes.margins(0.08)
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)
    return figure


@_styled
def interaction(W: Array, labels: Array, names: Sequence[str]) -> Figure:
    """W (N, N) sorted by cluster: row j, column i is the effect on j of having picked i."""
    order, _, groups = _grouped(labels)
    sorted_labels = labels[order]
    limit = float(np.quantile(np.abs(W), 0.99)) or 1.0
    figure = _figure(WIDTH * 0.62, WIDTH * 0.52)
    axes = figure.subplots()
    image = axes.imshow(W[np.ix_(order, order)], cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest")
    edges = np.flatnonzero(np.diff(sorted_labels)) + 0.5
    for edge in edges:
        axes.axhline(edge, color=INK, linewidth=0.5)
        axes.axvline(edge, color=INK, linewidth=0.5)
    centres = [np.flatnonzero(sorted_labels == group).mean() for group in groups]
    titles = [names[group] for group in groups]
    axes.set_xticks(centres, titles)
    axes.set_yticks(centres, titles)
    axes.tick_params(length=0)
    _fit_labels(axes, names, groups)
    axes.set_xlabel("picked candidate $i$, by cluster")
    axes.set_ylabel("affected candidate $j$, by cluster")
    for spine in axes.spines.values():
        spine.set_visible(True)
    bar = figure.colorbar(image, ax=axes, fraction=0.046, pad=0.03, extend="both")
    bar.set_label("added to the logit of $j$:  $W_{ji}$")
    outline: Any = bar.outline  # whose type some versions of matplotlib get wrong
    outline.set_linewidth(0.6)
    return figure


@_styled
def convergence(curves: Mapping[str, Curve], column: Column, colours: Mapping[str, str]) -> Figure:
    """A line a method: the mean over seeds, ± one deviation, with a star at its best, written as in the table."""
    high = column.best == "max"
    figure = _figure(WIDTH * 0.58, WIDTH * 0.38)
    axes = figure.subplots()
    winner = (max if high else min)(curves, key=lambda name: curves[name].best[1], default=None)
    for name, (at, values, best) in curves.items():
        mean = values.mean(0)
        deviation = values.std(0, ddof=1) if len(values) > 1 else np.zeros(values.shape[1])
        axes.fill_between(at, mean - deviation, mean + deviation, color=colours[name], alpha=0.18, linewidth=0)
        axes.plot(at, mean, color=colours[name], linewidth=1.4, label=name)
        axes.plot(
            *best, "*", color=colours[name], markersize=11, markeredgecolor="white", markeredgewidth=0.8, zorder=5,
            clip_on=False,
        )  # fmt: skip
        above = high == (name == winner)  # the best value stands beyond its star, others between: they may be near
        axes.annotate(
            column.cell({column.name: best[1]}), best, (0, 7 if above else -13), textcoords="offset points",
            ha="center", fontsize=7, color=_dark(colours[name]),
        )  # fmt: skip
    axes.set_xlabel("epoch")
    axes.set_ylabel(column.title)
    axes.grid(True)
    axes.margins(x=0.02, y=0.12)
    axes.legend(loc="lower right" if high else "upper right")
    return figure


@_styled
def precision_recall(trades: Mapping[str, Trade], colours: Mapping[str, str]) -> Figure:
    """A line a method as its threshold or stop bias varies, a dot at the chosen one, over lines of equal F1."""
    figure = _figure(WIDTH * 0.55, WIDTH * 0.5)
    axes = figure.subplots()
    axes.set_xlim(0, 1.03)
    axes.set_ylim(0, 1.03)
    recall = np.linspace(0.01, 1.0, 400)
    for f1 in (0.2, 0.4, 0.6, 0.8, 0.9):
        precision = f1 * recall / np.maximum(2 * recall - f1, 1e-9)
        seen = (2 * recall > f1) & (precision <= 1.0)
        axes.plot(recall[seen], precision[seen], color=FAINT, linewidth=0.6, zorder=1)
        said = f"{f1:g}" if f1 > 0.2 else f"F1 = {f1:g}"
        axes.text(f1 / (2 - f1), 1.005, said, ha="center", va="bottom", fontsize=6, color="#8a93a0")
    for name, trade in trades.items():
        if len(trade.recall) > 1:
            axes.plot(trade.recall, trade.precision, "-", color=colours[name], linewidth=1.3, zorder=2)
            axes.plot(trade.recall, trade.precision, ".", color=colours[name], markersize=3.5, zorder=2)
        axes.plot(
            *trade.chosen, "o" if len(trade.recall) > 1 else "D", color=colours[name], markersize=6.5,
            markeredgecolor="white", markeredgewidth=0.9, zorder=3, label=name, clip_on=False,
        )  # fmt: skip
    axes.set_xlabel("CluRec")
    axes.set_ylabel("CluPrec")
    axes.legend(loc="lower left", bbox_to_anchor=(0.02, 0.04), frameon=True, framealpha=0.9, edgecolor="none")
    return figure


@_styled
def picked_images(images: Array, labels: Array, picks: Sequence[int], names: Sequence[str]) -> Figure:
    """The images (N, H, W) or (N, H, W, 3) uint8 of a bag, a row a cluster, the picks framed and numbered."""
    groups = _groups(labels)
    widest = max(int((labels == group).sum()) for group in groups)
    per_row = min(widest, 40)
    H, W = images.shape[1:3]
    scale = max(1, -(-24 // H))  # small images are enlarged, so that their pixels stay crisp
    cell = WIDTH * 0.9 / per_row
    figure = _figure(WIDTH, len(groups) * cell * H / W * 1.34 + 0.1)
    axes = figure.subplots()
    gap, number = 0.34, {int(pick): i for i, pick in enumerate(picks, 1)}
    for line, group in enumerate(groups):
        members = np.flatnonzero(labels == group)
        # Picks first, in order: the rest of a long row may be cut.
        members = np.array(sorted(members, key=lambda i: (number.get(int(i), len(labels)), i)))[:per_row]
        y = -line * (1 + gap)
        axes.text(-0.35, y + 0.5, names[group], ha="right", va="center", fontsize=8, fontweight="bold")
        for x, member in enumerate(members):
            picture = images[member].repeat(scale, 0).repeat(scale, 1)
            picked = int(member) in number
            axes.imshow(
                picture, cmap="gray_r", vmin=0, vmax=255, extent=(x + 0.04, x + 0.96, y + 0.04, y + 0.96),
                alpha=1.0 if picked else 0.6, interpolation="nearest", aspect="auto",
            )  # fmt: skip
            if picked:
                axes.add_patch(_frame(x, y, PALETTE[2]))
                axes.text(
                    x + 0.06, y + 1.0, str(number[int(member)]), ha="center", va="center", fontsize=6,
                    fontweight="bold", color="white", zorder=6,
                    bbox={"boxstyle": "circle,pad=0.16", "fc": PALETTE[2], "ec": "white", "linewidth": 0.6},
                )  # fmt: skip
    axes.set_xlim(-0.5, per_row)
    axes.set_ylim(-(len(groups) - 1) * (1 + gap) - 0.1, 1.25)
    axes.set_aspect(H / W)
    axes.set_axis_off()
    return figure


def _figure(width: float, height: float, packed: bool = False) -> Figure:
    """A figure in inches, its axes close together where they are ``packed``."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    close = ConstrainedLayoutEngine(w_pad=0.02, h_pad=0.02, wspace=0.0, hspace=0.0)
    return Figure(figsize=(width, height), layout=close if packed else "constrained")


def _groups(labels: Array) -> list[int]:
    return [int(label) for label in np.unique(labels)]


def _colour(groups: Sequence[int], label: int) -> str:
    return PALETTE[groups.index(int(label)) % len(PALETTE)]


def _dark(colour: str) -> str:
    """A colour dark enough for letters on white."""
    parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(part * 0.68):02x}" for part in parts)


def _grouped(labels: Array) -> tuple[Array, Array, list[int]]:
    """The candidates cluster by cluster, where each stands on an axis with a gap between clusters, the clusters."""
    order = np.argsort(labels, kind="stable")
    breaks = np.concatenate([[0], (np.diff(labels[order]) != 0).cumsum()])
    return order, np.arange(len(order)) + 3.0 * breaks, _groups(labels)


def _few_ticks(count: int) -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(count)


def _fit_labels(axes: Any, names: Sequence[str], groups: Sequence[int]) -> None:
    """Slant the names on the x axis where they would run into each other."""
    if sum(len(names[group]) for group in groups) > 28:
        axes.tick_params(axis="x", labelrotation=30)
        for text in axes.get_xticklabels():
            text.set_ha("right")
            text.set_rotation_mode("anchor")


def _frame(x: float, y: float, colour: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x + 0.02, y + 0.02), 0.96, 0.96, fill=False, edgecolor=colour, linewidth=1.6, zorder=5)


# ------------------------------------------------------------------------------------- scenes from above


class Route(NamedTuple):
    """Points (T, 2) on a picture, x right and y down in its pixels; a line through them where they have an order."""

    points: Array
    colour: str
    ordered: bool = True


class Scene(NamedTuple):
    """A picture (H, W, 3) uint8 with routes over it, and a few words in its corner."""

    picture: Array
    routes: Sequence[Route]
    words: str = ""


class Decoding(NamedTuple):
    """A selection on a grid of cells over a picture, after 0, 1, …, T picks."""

    picture: Array  # (H, W, 3) uint8
    points: Array  # (T, 2) where the picks lie, in pixels
    probabilities: Array  # (T+1, R, C) of each cell to be picked next
    added: Array  # (T+1, R, C) what the picks added to the cells' logits, NaN where that is not to be seen


@_styled
def scene_rows(rows: Mapping[str, Sequence[Scene]]) -> Figure:
    """A row of pictures a name, each with its routes."""
    columns = max(map(len, rows.values()))
    figure = _figure(WIDTH, (WIDTH - 0.2) / columns * len(rows), packed=True)
    grid = figure.subplots(len(rows), columns, squeeze=False)
    for line, (name, scenes) in zip(grid, rows.items(), strict=True):
        for axes, scene in zip(line, scenes, strict=True):
            _picture(axes, scene.picture)
            for route in scene.routes:
                _line(axes, route)
            if scene.words:
                box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "alpha": 0.85, "edgecolor": "none"}
                axes.text(0.97, 0.04, scene.words, transform=axes.transAxes, ha="right", fontsize=6, bbox=box)
        line[0].set_ylabel(name, labelpad=3)
    return figure


@_styled
def decoding_steps(decoding: Decoding, steps: Sequence[int]) -> Figure:
    """After each of ``steps`` picks: how likely every cell is to be next, and what the picks added to its logit."""
    figure = _figure(WIDTH, 2 * (WIDTH - 0.9) / len(steps) + 0.3, packed=True)
    grid = figure.subplots(2, len(steps), squeeze=False)
    for line, kind in zip(grid, ("probabilities", "added"), strict=True):
        views = [_View(axes, decoding, kind) for axes in line]
        for view, step in zip(views, steps, strict=True):
            view.show(step)
        views[0].scale(figure, list(line))
    for axes, step in zip(grid[0], steps, strict=True):
        axes.set_title(_picks(step), pad=3)
    return figure


COLOURS = 64  # of an animation


def animation(decoding: Decoding, seconds: float = 0.22, pause: float = 2.5) -> bytes:
    """The decoding as a GIF: a frame a pick, ``seconds`` each, the last one for ``pause``."""
    with extra():
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from PIL import Image

    with matplotlib.rc_context(STYLE):
        figure = _figure(6.4, 2.8)
        canvas = FigureCanvasAgg(figure)
        views = [
            _View(axes, decoding, kind)
            for axes, kind in zip(figure.subplots(1, 2), ("probabilities", "added"), strict=True)
        ]
        for view in views:
            view.scale(figure, [view.axes])
        title = views[0].axes.set_title(_picks(0), loc="left", pad=4)
        frames = []
        for step in range(len(decoding.points) + 1):
            for view in views:
                view.show(step)
            title.set_text(_picks(step))
            canvas.draw()
            figure.set_layout_engine("none")  # what is laid out once stays where it is
            frames.append(np.asarray(canvas.buffer_rgba())[..., :3].copy())
    # One palette for all frames and no dithering: pixels that do not change cost nothing.
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
    """One half of a decoding, ``probabilities`` or ``added``, over its faint picture."""

    def __init__(self, axes: Any, decoding: Decoding, kind: str) -> None:
        from matplotlib import colormaps
        from matplotlib.colors import LogNorm, Normalize
        from matplotlib.patheffects import withStroke

        self.axes, self.points = axes, decoding.points
        self.values = getattr(decoding, kind)
        self.likely = kind == "probabilities"
        # What was raised sets the scale, or where all fell, what fell least: what lies behind may fall without end.
        limit = max(float(np.nanmax(decoding.added)), -float(np.nanquantile(decoding.added, 0.9)), 1.0)
        self.norm = LogNorm(1e-4, 1, clip=True) if self.likely else Normalize(-limit, limit, clip=True)
        self.colours = colormaps["YlOrRd" if self.likely else "RdBu_r"]
        H, W = decoding.picture.shape[:2]
        _picture(axes, decoding.picture)
        blank = np.zeros((*self.values.shape[1:], 4))
        self.cells = axes.imshow(blank, extent=(0, W, H, 0), interpolation="nearest", zorder=2)
        halo = [withStroke(linewidth=2.4, foreground="white")]  # to be seen on dark cells too
        (self.line,) = axes.plot([], [], "-o", color=INK, linewidth=0.9, markersize=1.7, zorder=3, path_effects=halo)
        (self.next,) = axes.plot([], [], "o", color=INK, markerfacecolor="none", markersize=4.5, zorder=4)

    def show(self, step: int) -> None:
        """The state after ``step`` picks."""
        neutral = 0.0 if self.likely else 0.5
        level = np.nan_to_num(np.asarray(self.norm(self.values[step])), nan=neutral)
        shade = self.colours(level)
        shade[..., 3] = 0.9 * np.clip(3 * np.abs(level - neutral), 0, 1)  # what says nothing leaves the picture visible
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
        outline: Any = bar.outline
        outline.set_linewidth(0.6)


def _picture(axes: Any, picture: Array) -> None:
    H, W = picture.shape[:2]
    axes.imshow(picture, extent=(0, W, H, 0), interpolation="antialiased")
    axes.set_xlim(0, W)
    axes.set_ylim(H, 0)
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set(visible=True, edgecolor=FAINT)


def _line(axes: Any, route: Route) -> None:
    x, y = route.points.T
    if route.ordered:
        axes.plot(x, y, "-", color="white", linewidth=2.2)
        axes.plot(x, y, "-o", color=route.colour, linewidth=1.1, markersize=2.2, markeredgewidth=0)
    else:
        axes.plot(x, y, "o", color=route.colour, markersize=3.0, markeredgecolor="white", markeredgewidth=0.4)


def _picks(count: int) -> str:
    return f"{count} pick{'' if count == 1 else 's'}"


# ------------------------------------------------------------------------------------------------ groups


@_styled
def grouped_bars(
    heights: Mapping[str, Sequence[float | None]], groups: Sequence[str], label: str, xlabel: str,
    colours: Mapping[str, str], deviations: Mapping[str, Sequence[float | None]] | None = None,
) -> Figure:  # fmt: skip
    """For each group a bar a method, as high as its value, none where that is None; its deviation as a whisker."""
    figure = _figure(WIDTH * 0.58, WIDTH * 0.38)
    axes = figure.subplots()
    width = 0.84 / len(heights)
    for i, (name, values) in enumerate(heights.items()):
        at = np.arange(len(groups)) + (i - (len(heights) - 1) / 2) * width
        there = np.array([value is not None for value in values])
        tall = np.array([value or 0.0 for value in values])
        axes.bar(at[there], tall[there], 0.92 * width, color=colours[name], linewidth=0, label=name)
        spread = np.array([value or 0.0 for value in (deviations or {}).get(name, [None] * len(groups))])
        if spread.any():
            axes.errorbar(at[there], tall[there], spread[there], fmt="none", ecolor=INK, elinewidth=0.6, capsize=1.2)
    axes.set_xticks(range(len(groups)), groups)
    axes.tick_params(axis="x", length=0)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(label)
    axes.grid(True, axis="y")
    figure.legend(loc="outside upper center", ncols=3)
    return figure

"""A bag of candidates in clusters, and the picks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from torchcpl.plots.style import INK, PALETTE, WIDTH, Array, dark, heatmap, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@styled
def selection_steps(probabilities: Array, picks: Sequence[int], labels: Array, names: Sequence[str]) -> Figure:
    """One panel per choice: the probability of every candidate and of the stop after the picks so far.

    ``probabilities`` (T+1, N+1), the stop last, after 0, 1, …, T picks; ``picks`` (T,) in order; ``labels`` (N,) the
    cluster of each candidate, an index into ``names``.
    """
    T, N = len(picks), len(labels)
    groups, number = np.unique(labels, return_inverse=True)
    order, colours = np.argsort(labels, kind="stable"), _colours(labels)
    titles = [names[group] for group in groups]
    places = np.empty(N)  # on the x axis, with gaps between clusters
    places[order] = np.arange(N) + 3.0 * number[order]
    columns = 2 if T + 1 > 3 else 1
    rows = -(-(T + 1) // columns)
    figure, axes = new_figure(WIDTH, 0.92 * rows + 0.55, rows, columns, sharex=True, sharey=True, squeeze=False)
    stop_at = places.max() + 9
    # The final stop is much likelier than any candidate: its bar is broken, with its value next to it.
    height = float(probabilities[:, :N].max()) * 1.45
    for panel in axes.T.flat[T + 1 :]:
        panel.set_axis_off()
    for t, panel in enumerate(axes.T.flat[: T + 1]):
        panel.bar(places[order], probabilities[t, order], width=1.0, color=colours[order], linewidth=0)
        stop = float(probabilities[t, N])
        panel.bar(stop_at, min(stop, height), width=3.0, color=INK, linewidth=0)
        if stop > height:
            for y in (0.56, 0.64):
                panel.plot(
                    [stop_at - 2.4, stop_at + 2.4], [(y - 0.04) * height, (y + 0.04) * height], "-w", linewidth=1.5
                )
        for pick in picks[:t]:  # marks the earlier picks
            panel.plot(places[pick], -0.055 * height, "^", color=colours[pick], markersize=3.2, clip_on=False)
        x, value = (places[picks[t]], probabilities[t, picks[t]]) if t < T else (stop_at, min(stop, height))
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
        panel.set(xlim=(places.min() - 2, stop_at + 3), ylim=(0, height))
        panel.tick_params(bottom=False, labelbottom=True)
        panel.locator_params(axis="y", nbins=3)
        panel.yaxis.grid(True)
        centres = [places[labels == group].mean() for group in groups]
        panel.set_xticks([*centres, stop_at], [*titles, "stop"], **_fitting(titles))
    figure.supylabel("probability of being picked next", fontsize=8)
    return figure


@styled
def embedding(points: Array, labels: Array, picks: Sequence[int], names: Sequence[str]) -> Figure:
    """Candidates (N, 2) as a scatter plot, coloured by cluster, the picks numbered in order."""
    figure, axes = new_figure(WIDTH / 2, WIDTH / 2)
    colours, spread = _colours(labels), np.ptp(points, axis=0).max()
    for group in np.unique(labels):
        inside, colour = points[labels == group], colours[labels == group][0]
        axes.scatter(*inside.T, s=16, color=colour, alpha=0.75, linewidths=0)
        # The name is placed next to the cluster, away from the centre.
        middle = np.median(inside, axis=0)
        away = middle - points.mean(0)
        away = away / max(np.linalg.norm(away), 1e-9)
        reach = np.sort((inside - middle) @ away)[int(0.85 * (len(inside) - 1))]
        x, y = middle + away * (reach + 0.075 * spread)
        box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "alpha": 0.8, "edgecolor": "none"}
        axes.text(x, y, names[group], ha="center", va="center", fontweight="bold", color=dark(colour), bbox=box)
    for number, pick in enumerate(picks, 1):
        x, y = points[pick]
        axes.scatter(x, y, s=105, color="white", edgecolors=INK, linewidths=1.3, zorder=4)
        axes.text(x, y, str(number), ha="center", va="center_baseline", fontsize=7, fontweight="bold", zorder=5)
    axes.set_aspect("equal", adjustable="datalim")
    axes.margins(0.08)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    return figure


@styled
def interaction(W: Array, labels: Array, names: Sequence[str]) -> Figure:
    """W (N, N) sorted by cluster: row j, column i is the effect on j of having picked i."""
    order, groups = np.argsort(labels, kind="stable"), np.unique(labels)
    figure, axes = new_figure(WIDTH * 0.62, WIDTH * 0.52)
    heatmap(figure, axes, W[np.ix_(order, order)], 0.99, "added to the logit of $j$:  $W_{ji}$")
    for edge in np.flatnonzero(np.diff(labels[order])) + 0.5:
        axes.axhline(edge, color=INK, linewidth=0.5)
        axes.axvline(edge, color=INK, linewidth=0.5)
    centres = [np.flatnonzero(labels[order] == group).mean() for group in groups]
    titles = [names[group] for group in groups]
    axes.set_xticks(centres, titles, **_fitting(titles))
    axes.set_yticks(centres, titles)
    axes.set(xlabel="picked candidate $i$, by cluster", ylabel="affected candidate $j$, by cluster")
    return figure


@styled
def picked_images(images: Array, labels: Array, picks: Sequence[int], names: Sequence[str]) -> Figure:
    """The images (N, H, W) or (N, H, W, 3) uint8 of a bag, one row per cluster, the picks framed and numbered."""
    from matplotlib.patches import Rectangle

    groups, sizes = np.unique(labels, return_counts=True)
    per_row = min(int(sizes.max()), 40)
    H, W = images.shape[1:3]
    scale = max(1, -(-24 // H))  # upsample small images by repetition, without blurring
    cell = WIDTH * 0.9 / per_row
    figure, axes = new_figure(WIDTH, len(groups) * cell * H / W * 1.34 + 0.1)
    gap, number = 0.34, {int(pick): i for i, pick in enumerate(picks, 1)}
    for line, group in enumerate(groups):
        members = np.flatnonzero(labels == group)
        # Picks first, in order: a long row is truncated.
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
                corner, red = (x + 0.02, y + 0.02), PALETTE[2]
                axes.add_patch(Rectangle(corner, 0.96, 0.96, fill=False, edgecolor=red, linewidth=1.6, zorder=5))
                axes.text(
                    x + 0.06, y + 1.0, str(number[int(member)]), ha="center", va="center", fontsize=6,
                    fontweight="bold", color="white", zorder=6,
                    bbox={"boxstyle": "circle,pad=0.16", "fc": red, "ec": "white", "linewidth": 0.6},
                )  # fmt: skip
    axes.set_xlim(-0.5, per_row)
    axes.set_ylim(-(len(groups) - 1) * (1 + gap) - 0.1, 1.25)
    axes.set_aspect(H / W)
    axes.set_axis_off()
    return figure


def _fitting(titles: Sequence[str]) -> dict[str, Any]:
    """Properties of labels on the x axis: rotated where they would overlap."""
    overlap = sum(map(len, titles)) > 28
    return {"rotation": 30, "ha": "right", "rotation_mode": "anchor"} if overlap else {}


def _colours(labels: Array) -> Array:
    """(N,) the colour of every candidate, that of its cluster."""
    return np.take(PALETTE, np.unique(labels, return_inverse=True)[1], mode="wrap")

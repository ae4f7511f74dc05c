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
    order, places, groups = _grouped(labels)
    columns = 2 if T + 1 > 3 else 1
    rows = -(-(T + 1) // columns)
    figure, axes = new_figure(WIDTH, 0.92 * rows + 0.55, rows, columns, sharex=True, sharey=True, squeeze=False)
    stop_at = places.max() + 9
    # The final stop is much likelier than any candidate: its bar is broken, with its value next to it.
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
        for pick in picks[:t]:  # marks the earlier picks
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
        panel.set(xlim=(places.min() - 2, stop_at + 3), ylim=(0, height))
        panel.tick_params(bottom=False, labelbottom=True)
        panel.locator_params(axis="y", nbins=3)
        panel.yaxis.grid(True)
        centres = [places[labels[order] == group].mean() for group in groups]
        panel.set_xticks([*centres, stop_at], [*(names[group] for group in groups), "stop"])
        _fit_labels(panel, names, groups)
    figure.supylabel("probability of being picked next", fontsize=8)
    return figure


@styled
def embedding(points: Array, labels: Array, picks: Sequence[int], names: Sequence[str]) -> Figure:
    """Candidates (N, 2) as a scatter plot, coloured by cluster, the picks numbered in order."""
    groups = np.unique(labels).tolist()
    figure, axes = new_figure(WIDTH / 2, WIDTH / 2)
    for group in groups:
        inside = points[labels == group]
        axes.scatter(inside[:, 0], inside[:, 1], s=16, color=_colour(groups, group), alpha=0.75, linewidths=0)
    spread = np.ptp(points, axis=0).max()
    for group in groups:
        inside = points[labels == group]
        # The name is placed next to the cluster, away from the centre.
        middle = np.median(inside, axis=0)
        away = middle - points.mean(0)
        away = away / max(np.linalg.norm(away), 1e-9)
        reach = np.sort((inside - middle) @ away)[int(0.85 * (len(inside) - 1))]
        x, y = middle + away * (reach + 0.075 * spread)
        box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "alpha": 0.8, "edgecolor": "none"}
        axes.text(
            x, y, names[group], ha="center", va="center", fontweight="bold", color=dark(_colour(groups, group)),
            bbox=box,
        )  # fmt: skip
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
    order, _, groups = _grouped(labels)
    sorted_labels = labels[order]
    figure, axes = new_figure(WIDTH * 0.62, WIDTH * 0.52)
    heatmap(figure, axes, W[np.ix_(order, order)], 0.99, "added to the logit of $j$:  $W_{ji}$")
    for edge in np.flatnonzero(np.diff(sorted_labels)) + 0.5:
        axes.axhline(edge, color=INK, linewidth=0.5)
        axes.axvline(edge, color=INK, linewidth=0.5)
    centres = [np.flatnonzero(sorted_labels == group).mean() for group in groups]
    titles = [names[group] for group in groups]
    axes.set_xticks(centres, titles)
    axes.set_yticks(centres, titles)
    _fit_labels(axes, names, groups)
    axes.set(xlabel="picked candidate $i$, by cluster", ylabel="affected candidate $j$, by cluster")
    return figure


@styled
def picked_images(images: Array, labels: Array, picks: Sequence[int], names: Sequence[str]) -> Figure:
    """The images (N, H, W) or (N, H, W, 3) uint8 of a bag, one row per cluster, the picks framed and numbered."""
    from matplotlib.patches import Rectangle

    groups = np.unique(labels).tolist()
    widest = max(int((labels == group).sum()) for group in groups)
    per_row = min(widest, 40)
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


def _fit_labels(axes: Any, names: Sequence[str], groups: Sequence[int]) -> None:
    """Rotate the names on the x axis if they would overlap."""
    if sum(len(names[group]) for group in groups) > 28:
        axes.tick_params(axis="x", labelrotation=30)
        for text in axes.get_xticklabels():
            text.set_ha("right")
            text.set_rotation_mode("anchor")


def _colour(groups: Sequence[int], label: int) -> str:
    return PALETTE[groups.index(int(label)) % len(PALETTE)]


def _grouped(labels: Array) -> tuple[Array, Array, list[int]]:
    """The candidates sorted by cluster, their positions on an axis with gaps between clusters, and the clusters."""
    order = np.argsort(labels, kind="stable")
    breaks = np.concatenate([[0], (np.diff(labels[order]) != 0).cumsum()])
    return order, np.arange(len(order)) + 3.0 * breaks, np.unique(labels).tolist()

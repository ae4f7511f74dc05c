"""Figures of baskets: pairs of items, a basket growing, likelihood by size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from torchcpl.plots.style import FAINT, INK, PALETTE, WIDTH, Array, heatmap, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@styled
def pair_matrix(W: Array, names: Sequence[str]) -> Figure:
    """W (N, N) with the items' names: red for complements, blue for substitutes; similar items are adjacent."""
    order = np.argsort(np.linalg.eigh(W + W.T)[1][:, -1])  # sorted by the leading eigenvector
    values = W[np.ix_(order, order)].copy()
    np.fill_diagonal(values, np.nan)
    figure, axes = new_figure(WIDTH, WIDTH * 0.82)
    heatmap(figure, axes, values, 0.98, "added to the logit, less the averages")
    said = [names[i] for i in order]
    axes.set_xticks(range(len(said)), said, rotation=90, fontsize=5.5)
    axes.set_yticks(range(len(said)), said, fontsize=5.5)
    axes.set(xlabel="picked", ylabel="then likelier or less likely")
    return figure


@styled
def growing_basket(added: Sequence[str], choices: Sequence[Sequence[tuple[str, float]]]) -> Figure:
    """The likeliest choices after each item, the one that is added next highlighted."""
    figure, grid = new_figure(WIDTH, 0.95 * len(choices), len(choices), sharex=True, squeeze=False)
    for step, (axes, best) in enumerate(zip(grid[:, 0], choices, strict=True)):
        following = added[step + 1] if step + 1 < len(added) else "(stop)"
        labels, values = [name for name, _ in best], [p for _, p in best]
        colours = [PALETTE[2] if name == following else FAINT for name in labels]
        axes.barh(range(len(best)), values, color=colours, height=0.72)
        axes.set_yticks(range(len(best)), labels, fontsize=6)
        axes.invert_yaxis()
        axes.tick_params(length=0)
        axes.set_title(("+ " if step else "") + added[step], loc="left", color=INK, fontweight="bold", fontsize=7)
    grid[-1, 0].set_xlabel("probability of the next choice")
    return figure


@styled
def by_size(sizes: Sequence[int], curves: Mapping[str, Sequence[float]], colours: Mapping[str, str]) -> Figure:
    """Mean log-likelihood by size, relative to the first curve."""
    figure, axes = new_figure(WIDTH * 0.62, WIDTH * 0.42)
    base = np.array(next(iter(curves.values())))
    for name, values in curves.items():
        axes.plot(sizes, np.array(values) - base, "o-", markersize=3, linewidth=1.2, color=colours[name], label=name)
    axes.set_xticks(sizes)
    axes.set(xlabel="items in the basket", ylabel=f"log P, less that of {next(iter(curves))}")
    axes.grid(axis="y")
    axes.legend()
    return figure

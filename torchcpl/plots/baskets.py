"""Figures of baskets: pairs of items, a basket growing, likelihood by size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from torchcpl.plots.style import FAINT, INK, WIDTH, Array, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@styled
def pair_matrix(W: Array, names: Sequence[str]) -> Figure:
    """W (N, N) with the items' names: red for complements, blue for substitutes; similar items are adjacent."""
    order = np.argsort(np.linalg.eigh(W + W.T)[1][:, -1])  # sorted by the leading eigenvector
    values = W[np.ix_(order, order)].copy()
    np.fill_diagonal(values, np.nan)
    limit = float(np.nanquantile(np.abs(values), 0.98)) or 1.0
    figure = new_figure(WIDTH, WIDTH * 0.82)
    axes = figure.subplots()
    image = axes.imshow(values, cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest")
    said = [names[i] for i in order]
    axes.set_xticks(range(len(said)), said, rotation=90, fontsize=5.5)
    axes.set_yticks(range(len(said)), said, fontsize=5.5)
    axes.tick_params(length=0)
    axes.set_xlabel("picked")
    axes.set_ylabel("then likelier or less likely")
    bar = figure.colorbar(image, ax=axes, fraction=0.04, pad=0.02, extend="both")
    bar.set_label("added to the logit, less the averages")
    outline: Any = bar.outline
    outline.set_linewidth(0.6)
    return figure


@styled
def growing_basket(added: Sequence[str], choices: Sequence[Sequence[tuple[str, float]]]) -> Figure:
    """The likeliest choices after each item, the one that is added next highlighted."""
    figure = new_figure(WIDTH, 0.95 * len(choices))
    rows: Any = figure.subplots(len(choices), 1, sharex=True, squeeze=False)[:, 0]
    for step, (axes, best) in enumerate(zip(rows, choices, strict=True)):
        following = added[step + 1] if step + 1 < len(added) else "(stop)"
        labels, values = [name for name, _ in best], [p for _, p in best]
        colours = ["#bd1f01" if name == following else FAINT for name in labels]
        axes.barh(range(len(best)), values, color=colours, height=0.72)
        axes.set_yticks(range(len(best)), labels, fontsize=6)
        axes.invert_yaxis()
        axes.tick_params(length=0)
        axes.set_title(("+ " if step else "") + added[step], loc="left", color=INK, fontweight="bold", fontsize=7)
    rows[-1].set_xlabel("probability of the next choice")
    return figure


@styled
def by_size(sizes: Sequence[int], curves: Mapping[str, Sequence[float]], colours: Mapping[str, str]) -> Figure:
    """Mean log-likelihood by size, relative to the first curve."""
    figure = new_figure(WIDTH * 0.62, WIDTH * 0.42)
    axes = figure.subplots()
    base = np.array(next(iter(curves.values())))
    for name, values in curves.items():
        axes.plot(sizes, np.array(values) - base, "o-", markersize=3, linewidth=1.2, color=colours[name], label=name)
    axes.set_xticks(sizes)
    axes.set_xlabel("items in the basket")
    axes.set_ylabel(f"log P, less that of {next(iter(curves))}")
    axes.grid(axis="y")
    axes.legend()
    return figure

"""Convergence curves, precision–recall curves, grouped bars, variants of an ablation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from torchcpl.plots.style import FAINT, INK, PALETTE, WIDTH, Array, dark, new_figure, styled
from torchcpl.tables import Column, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Curve(NamedTuple):
    """A metric over the epochs ``at`` (E,): ``values`` (S, E), one row per seed, and the ``best`` epoch and value."""

    at: Array
    values: Array
    best: tuple[float, float]


class Trade(NamedTuple):
    """A method's recall and precision as its knob varies, and at the chosen knob."""

    recall: Array
    precision: Array
    chosen: tuple[float, float]


@styled
def convergence(curves: Mapping[str, Curve], column: Column, colours: Mapping[str, str]) -> Figure:
    """One line per method: mean ± std over seeds, with a star and the value at its best."""
    high = column.best == "max"
    figure, axes = new_figure(WIDTH * 0.58, WIDTH * 0.38)
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
        above = high == (name == winner)  # the best method's value outside the curves, the others' inside
        axes.annotate(
            column.cell({column.name: best[1]}), best, (0, 7 if above else -13), textcoords="offset points",
            ha="center", fontsize=7, color=dark(colours[name]),
        )  # fmt: skip
    axes.set(xlabel="epoch", ylabel=column.title)
    axes.locator_params(axis="x", integer=True)
    axes.grid(True)
    axes.margins(x=0.02, y=0.12)
    axes.legend(loc="lower right" if high else "upper right")
    return figure


@styled
def precision_recall(trades: Mapping[str, Trade], colours: Mapping[str, str]) -> Figure:
    """One line per method as its threshold or stop bias varies, a dot at the chosen one, over isolines of F1."""
    figure, axes = new_figure(WIDTH * 0.55, WIDTH * 0.5)
    axes.set(xlim=(0, 1.03), ylim=(0, 1.03), xlabel="CluRec", ylabel="CluPrec")
    recall = np.linspace(0.01, 1.0, 400)
    for f1 in (0.2, 0.4, 0.6, 0.8, 0.9):
        precision = f1 * recall / np.maximum(2 * recall - f1, 1e-9)
        seen = (2 * recall > f1) & (precision <= 1.0)
        axes.plot(recall[seen], precision[seen], color=FAINT, linewidth=0.6, zorder=1)
        said = f"{f1:g}" if f1 > 0.2 else f"F1 = {f1:g}"
        axes.text(f1 / (2 - f1), 1.005, said, ha="center", va="bottom", fontsize=6, color="#8a93a0")
    for name, trade in trades.items():
        several = len(trade.recall) > 1
        if several:
            axes.plot(trade.recall, trade.precision, ".-", color=colours[name], linewidth=1.3, markersize=3.5, zorder=2)
        axes.plot(
            *trade.chosen, "o" if several else "D", color=colours[name], markersize=6.5,
            markeredgecolor="white", markeredgewidth=0.9, zorder=3, label=name, clip_on=False,
        )  # fmt: skip
    axes.legend(loc="lower left", bbox_to_anchor=(0.02, 0.04), frameon=True, framealpha=0.9, edgecolor="none")
    return figure


@styled
def grouped_bars(
    rows: Sequence[Row], groups: Mapping[str, str], label: str, xlabel: str, colours: Mapping[str, str]
) -> Figure:
    """For each of a table's columns in ``groups``, by name, a bar of every row that has a value, with error bars."""
    figure, axes = new_figure(WIDTH * 0.58, WIDTH * 0.38)
    width = 0.84 / len(rows)
    for i, row in enumerate(rows):
        there = [name for name in groups if row[name] is not None]
        at = [list(groups).index(name) + (i - (len(rows) - 1) / 2) * width for name in there]
        tall, spread = [row[name] for name in there], [row.get(f"{name}_std") or 0.0 for name in there]
        axes.bar(at, tall, 0.92 * width, color=colours[row["method"]], linewidth=0, label=row["method"])
        if any(spread):
            axes.errorbar(at, tall, spread, fmt="none", ecolor=INK, elinewidth=0.6, capsize=1.2)
    axes.set_xticks(range(len(groups)), groups.values())
    axes.tick_params(axis="x", length=0)
    axes.set(xlabel=xlabel, ylabel=label)
    axes.grid(True, axis="y")
    figure.legend(loc="outside upper center", ncols=3)
    return figure


@styled
def variants(rows: Sequence[Row], score: Column, cost: Column) -> Figure:
    """A line a variant, the base first: its score as a dot with ± one deviation, beside it its cost as a bar."""
    figure, (left, right) = new_figure(WIDTH, 0.9 + 0.22 * len(rows), 1, 2, width_ratios=(3, 1), sharey=True)
    at = np.arange(len(rows))
    means = np.array([row[score.name] for row in rows], float)
    spread = np.array([row.get(f"{score.name}_std") or 0.0 for row in rows])
    left.axvline(means[0], color=FAINT, linewidth=1.0, zorder=1)
    left.errorbar(means, at, xerr=spread, fmt="o", color=PALETTE[2], markersize=4, elinewidth=1.0, capsize=2)
    for mean, place, row in zip(means, at, rows, strict=True):
        left.annotate(
            score.cell(row), (mean, place), (0, 4), textcoords="offset points", ha="center", va="bottom", fontsize=6
        )
    left.set_yticks(at, [row["method"] for row in rows])
    left.set(xlabel=score.heading())
    left.invert_yaxis()
    left.margins(x=0.12, y=0.04)
    right.barh(at, [row[cost.name] for row in rows], 0.6, color=PALETTE[3], linewidth=0)
    right.set(xlabel=cost.heading())
    for axes in (left, right):
        axes.grid(True, axis="x")
        axes.tick_params(axis="y", length=0)
    return figure


@styled
def reliability(panels: Mapping[str, Mapping[str, tuple[Array, Array]]], colours: Mapping[str, str]) -> Figure:
    """One panel each, one line per method: observed frequency against stated probability, in tenths."""
    figure, grid = new_figure(WIDTH * 0.8, WIDTH * 0.4, 1, len(panels), squeeze=False)
    for axes, (title, curves) in zip(grid[0], panels.items(), strict=True):
        axes.plot([0, 1], [0, 1], color=FAINT, linewidth=0.8)
        for name, (probability, came_true) in curves.items():
            tenth = (10 * probability).astype(int).clip(0, 9)
            parts = [tenth == place for place in np.unique(tenth)]
            at = [(probability[part].mean(), came_true[part].mean()) for part in parts]
            axes.plot(*np.array(at).T, "o-", color=colours[name], markersize=3, clip_on=False, label=name)
        axes.set(xlim=(0, 1), ylim=(0, 1), xlabel=f"probability of {title}", ylabel="frequency", aspect="equal")
        axes.grid(True)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure

"""Figures draw what the data say: the artists are asked, not the pixels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.container import BarContainer
from matplotlib.patches import Rectangle

from torchcpl import plots
from torchcpl.tables import Column

F1 = Column("f1", "F1", 3, "max", share=True)
NAMES = ("ant", "bee", "cat", "dog")
LABELS = np.array([2, 0, 2, 3, 0, 3, 3])  # no bee
ORDER = [1, 4, 0, 2, 3, 5, 6]  # class after class


def texts(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts]


def steps() -> tuple[np.ndarray[Any, Any], list[int]]:
    """Probabilities (T+1, N+1) after the picks 3, 0, 1; the last choice is the stop, and far above the rest."""
    picks = [3, 0, 1]
    p = np.random.default_rng(0).uniform(0.05, 0.15, (4, 8))
    for t, pick in enumerate(picks):
        p[t + 1 :, pick] = 0
    p[3, 7] = 0.9
    return p / p.sum(1, keepdims=True), picks


def test_selection_steps() -> None:
    probabilities, picks = steps()
    figure = plots.selection_steps(probabilities, picks, LABELS, NAMES)
    panels = [axes for axes in figure.axes if axes.get_title(loc="left")]
    titles = {axes.get_title(loc="left"): axes for axes in panels}
    assert list(titles) == ["nothing picked yet", "after 2 picks", "after 1 pick", "after 3 picks"]  # column by column
    groups = [plots.PALETTE[0]] * 2 + [plots.PALETTE[1]] * 2 + [plots.PALETTE[2]] * 3
    height = probabilities[:, :7].max() * 1.45
    for t, said in enumerate(("nothing picked yet", "after 1 pick", "after 2 picks", "after 3 picks")):
        axes = titles[said]
        bars, stop = (part for part in axes.containers if isinstance(part, BarContainer))
        assert [bar.get_height() for bar in bars] == pytest.approx(probabilities[t, ORDER])
        assert [to_hex(bar.get_facecolor()) for bar in bars] == groups
        assert stop[0].get_height() == pytest.approx(min(probabilities[t, 7], height))
        assert axes.get_ylim() == pytest.approx((0, height))
        middles = [bar.get_x() + bar.get_width() / 2 for bar in bars]
        # The label stands over what is picked next, the triangles under what was picked before.
        label = next(note for note in axes.texts if note.get_bbox_patch())
        if t < 3:
            assert label.get_text() == str(t + 1)
            assert label.xy == pytest.approx((middles[ORDER.index(picks[t])], probabilities[t, picks[t]]))
            assert f"{probabilities[t, 7]:.2f}" in texts(axes)
        else:
            assert label.get_text() == f"stop {probabilities[3, 7]:.2f}"
        marks = [line for line in axes.lines if line.get_marker() == "^"]
        assert [float(mark.get_xdata()[0]) for mark in marks] == pytest.approx(
            [middles[ORDER.index(pick)] for pick in picks[:t]]
        )
        assert [tick.get_text() for tick in axes.get_xticklabels()] == ["ant", "cat", "dog", "stop"]


def test_nothing_picked_is_one_panel() -> None:
    figure = plots.selection_steps(np.full((1, 8), 1 / 8), [], LABELS, NAMES)
    assert "stop 0.12" in texts(figure.axes[0])


def test_embedding() -> None:
    points = np.random.default_rng(1).normal(size=(7, 2))
    axes = plots.embedding(points, LABELS, [5, 1], NAMES).axes[0]
    *clusters, first, second = axes.collections
    for group, cluster in zip((0, 2, 3), clusters, strict=True):
        assert np.array_equal(cluster.get_offsets(), points[group == LABELS])
    assert len({to_hex(cluster.get_facecolor()[0]) for cluster in clusters}) == 3
    assert np.array_equal(first.get_offsets(), points[[5]])
    assert np.array_equal(second.get_offsets(), points[[1]])
    where = {text.get_text(): text.get_position() for text in axes.texts}
    assert set(where) == {"ant", "cat", "dog", "1", "2"}
    assert where["1"] == pytest.approx(tuple(points[5]))
    assert where["2"] == pytest.approx(tuple(points[1]))


def test_interaction_is_sorted_by_cluster() -> None:
    W = np.random.default_rng(2).normal(size=(7, 7))
    axes, bar = plots.interaction(W, LABELS, NAMES).axes
    (image,) = axes.images
    assert np.array_equal(image.get_array(), W[np.ix_(ORDER, ORDER)])
    low, high = image.get_clim()
    assert low == -high  # white is no effect
    assert high == pytest.approx(np.quantile(np.abs(W), 0.99))
    assert sorted({float(line.get_ydata()[0]) for line in axes.lines if line.get_xdata()[0] == 0}) == [1.5, 3.5]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["ant", "cat", "dog"]
    assert [float(tick) for tick in axes.get_yticks()] == [0.5, 2.5, 5.0]
    assert "W_{ji}" in bar.get_ylabel()


def test_interaction_of_nothing_but_zeros() -> None:
    assert plots.interaction(np.zeros((7, 7)), LABELS, NAMES).axes[0].images[0].get_clim() == (-1.0, 1.0)


def test_convergence() -> None:
    values = np.array([[0.1, 0.6, 0.5], [0.3, 0.8, 0.5]])
    curves = {
        "A": plots.Curve(np.array([1, 2, 5]), values, (3.5, 0.65)),  # what the table says, not the curve's maximum
        "B": plots.Curve(np.array([1, 2]), np.array([[0.2, 0.1]]), (1.0, 0.2)),
    }
    axes = plots.convergence(curves, F1, {"A": "#112233", "B": "#445566"}).axes[0]
    line, star, other, other_star = axes.lines
    assert np.array_equal(line.get_xdata(), [1, 2, 5])
    assert line.get_ydata() == pytest.approx([0.2, 0.7, 0.5])
    assert (float(star.get_xdata()[0]), float(star.get_ydata()[0])) == pytest.approx((3.5, 0.65))
    assert (float(other_star.get_xdata()[0]), float(other_star.get_ydata()[0])) == pytest.approx((1, 0.2))
    assert line.get_color() == star.get_color() == "#112233"
    assert other.get_ydata() == pytest.approx([0.2, 0.1])
    assert texts(axes) == [".650", ".200"]
    band = axes.collections[0].get_paths()[0].vertices
    at_two = band[band[:, 0] == 2][:, 1]
    deviation = np.std([0.6, 0.8], ddof=1)
    assert (at_two.min(), at_two.max()) == pytest.approx((0.7 - deviation, 0.7 + deviation))
    single = axes.collections[1].get_paths()[0].vertices  # one seed has no deviation
    assert set(np.round(single[single[:, 0] == 1][:, 1], 6)) == {0.2}
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["A", "B"]
    assert axes.get_ylabel() == "F1"


def test_precision_recall() -> None:
    trades = {
        "k-Means": plots.Trade(np.array([0.7]), np.array([0.72]), (0.7, 0.72)),
        "CPL": plots.Trade(np.array([0.9, 0.8, 0.5]), np.array([0.4, 0.7, 0.95]), (0.8, 0.7)),
    }
    axes = plots.precision_recall(trades, {"k-Means": "#000001", "CPL": "#000002"}).axes[0]
    drawn = {name: [line for line in axes.lines if line.get_color() == c] for name, c in
             (("k-Means", "#000001"), ("CPL", "#000002"))}  # fmt: skip
    (alone,) = drawn["k-Means"]
    assert (float(alone.get_xdata()[0]), float(alone.get_ydata()[0])) == (0.7, 0.72)
    line, chosen = drawn["CPL"]
    assert np.array_equal(line.get_xdata(), [0.9, 0.8, 0.5])
    assert np.array_equal(line.get_ydata(), [0.4, 0.7, 0.95])
    assert (float(chosen.get_xdata()[0]), float(chosen.get_ydata()[0])) == (0.8, 0.7)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["k-Means", "CPL"]
    equal = [line for line in axes.lines if line.get_color() == plots.style.FAINT]
    for f1, curve in zip((0.2, 0.4, 0.6, 0.8, 0.9), equal, strict=True):
        recall, precision = np.array(curve.get_xdata()), np.array(curve.get_ydata())
        assert 2 * recall * precision / (recall + precision) == pytest.approx(f1)


@pytest.mark.parametrize("colour", [False, True])
def test_picked_images(colour: bool) -> None:
    shape = (7, 8, 8, 3) if colour else (7, 8, 8)
    images = np.random.default_rng(3).integers(0, 255, shape, np.uint8)
    axes = plots.picked_images(images, LABELS, [6, 0], NAMES).axes[0]
    # A row a class, the picked one first; pixels are repeated, not blended.
    expected = [(0, [1, 4]), (1, [0, 2]), (2, [6, 3, 5])]
    shown = {}
    for image in axes.images:
        left, _, bottom, _ = image.get_extent()
        shown[round(-bottom / 1.34), round(left)] = image
    assert len(shown) == 7
    for row, members in expected:
        for place, member in enumerate(members):
            pixels = np.asarray(shown[row, place].get_array())[::3, ::3]
            assert np.array_equal(pixels, images[member])
            assert shown[row, place].get_alpha() == (1.0 if member in (6, 0) else 0.6)
    assert len([patch for patch in axes.patches if isinstance(patch, Rectangle)]) == 2
    numbers = {text.get_text(): text.get_position() for text in axes.texts}
    assert set(numbers) == {"ant", "cat", "dog", "1", "2"}
    assert numbers["1"][1] < numbers["2"][1]  # 6 is a dog, in the row below


def test_style_is_not_left_behind(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    curve = {"A": plots.Curve(np.array([1, 2]), np.array([[0.5, 0.6]]), (2, 0.6))}
    figure = plots.convergence(curve, F1, {"A": "#112233"})
    plots.save(figure, tmp_path / "figures" / "f")
    assert dict(matplotlib.rcParams) == before
    png, svg = ((tmp_path / "figures" / f"f.{kind}").read_bytes() for kind in ("png", "svg"))
    assert png.startswith(b"\x89PNG")
    assert b"<svg" in svg
    plots.save(plots.convergence(curve, F1, {"A": "#112233"}), tmp_path / "again")
    assert (tmp_path / "again.svg").read_bytes() == svg  # the same figure is the same file
    assert (tmp_path / "again.png").read_bytes() == png

"""Figures of the paths task: each draws what its data say."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from torchcpl import plots
from torchcpl.selectors import Stepwise
from torchcpl.tables import Table
from torchcpl.tasks.paths import figures
from torchcpl.tasks.paths.benchmark import PathsBenchmark
from torchcpl.tasks.paths.procedural import procedural_map
from torchcpl.tasks.paths.scenes import Scenes, cells_of, generate, save_scenes
from torchcpl.tasks.paths.task import PathsConfig, PathsModel, PathsTask
from torchcpl.train import fit

BENCHMARK = PathsBenchmark()
SMALL: dict[str, Any] = {
    "epochs": 2, "batch_size": 6, "val": 0.5, "backbone": "patches", "dim": 16, "layers": 0, "heads": 2, "ffn": 16,
    "hidden": 8, "score_hidden": 8, "dropout": 0.0, "decoder_layers": 1, "max_len": 9, "device": "cpu",
}  # fmt: skip


@pytest.fixture(scope="module")
def scenes() -> Scenes:
    return generate([procedural_map(junctions=40, shares=(1, 1, 1, 1, 1), seed=3)], 16, seed=1, workers=1)


def model(scenes: Scenes, method: str, seed: int = 0) -> PathsModel:
    torch.manual_seed(seed)
    return PathsTask(PathsConfig(**SMALL, method=method), scenes).build().eval()


@pytest.fixture(scope="module")
def runs(scenes: Scenes, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A run of the grid threshold and one of CPL, on a file of scenes."""
    folder = tmp_path_factory.mktemp("runs")
    save_scenes(scenes, folder / "scenes.npz")
    paths = [folder / method for method in ("threshold", "cpl")]
    for path in paths:
        config = PathsConfig(**SMALL, method=path.name, source=str(folder / "scenes.npz"))
        fit(PathsTask(config, scenes), path, progress=False)
    return paths


def test_example_scenes_are_the_first_of_each_kind(scenes: Scenes) -> None:
    shown = figures.example_scenes(scenes)
    assert np.minimum(scenes.counts[shown], 4).tolist() == [2, 2, 3, 3, 4]
    twos = np.flatnonzero(scenes.counts == 2)
    assert shown[:2] == twos[:2].tolist()
    assert shown[-1] == np.flatnonzero(scenes.counts >= 4)[0]
    plain = scenes.select(np.flatnonzero(scenes.counts <= 2)[:3])  # too few, and of the wrong kind
    assert sorted(figures.example_scenes(plain)) == [0, 1, 2]


def test_scene_rows_hold_valid_paths_predictions_and_their_scores(scenes: Scenes) -> None:
    chosen = scenes.select([0, 1, 2])
    models = {method: model(scenes, method) for method in ("threshold", "cpl")}
    rows = figures.scene_rows(models, chosen)
    assert list(rows) == ["All valid paths", "Grid threshold", "CPL"]
    for i, scene in enumerate(rows["All valid paths"]):
        assert len(scene.routes) == chosen.counts[i]
        for j, route in enumerate(scene.routes):
            np.testing.assert_array_equal(route.points, chosen.paths[i, j, : chosen.lengths[i, j]])
    images = torch.from_numpy(chosen.images)
    for method, drawn in models.items():
        with torch.no_grad():
            prediction = drawn.select(images)
        for i, scene in enumerate(rows[BENCHMARK.names[method]]):
            (route,) = scene.routes
            length = int(prediction.lengths[i])
            np.testing.assert_allclose(route.points, prediction.points[i, :length], rtol=1e-6)
            assert route.ordered == (method == "cpl")
            one = PathsTask(PathsConfig(**SMALL), chosen.select([i, i]))
            assert scene.words == f"{one.report(drawn)['min_ade']:.1f} px"


def test_the_worst_scenes_are_those_with_the_largest_distance(scenes: Scenes) -> None:
    cpl = model(scenes, "cpl")
    single = np.flatnonzero(scenes.counts == 1)
    one_at_a_time = [
        PathsTask(PathsConfig(**SMALL), scenes.select([i, i])).report(cpl)["min_ade"] for i in single.tolist()
    ]
    wanted = single[np.argsort(one_at_a_time)[::-1][:2]].tolist()
    assert figures.worst_scenes(cpl, scenes, 2) == wanted
    (panel,) = figures.failures_panels(cpl, scenes)
    assert panel.name == "failures"
    assert figures.failures_panels(cpl, scenes.select(np.flatnonzero(scenes.counts > 1))) == []


def test_the_scenes_figure_has_a_row_a_method_and_draws_the_points(scenes: Scenes) -> None:
    picture = figures.faint(scenes.images[0])
    a, b = np.array([[10.0, 20.0], [30.0, 40.0]]), np.array([[50.0, 60.0]])
    rows = {
        "first": [plots.Scene(picture, [plots.Route(a, "#ff0000"), plots.Route(b, "#00ff00", False)])] * 2,
        "second": [plots.Scene(picture, [], "1.5 px")] * 2,
    }
    figure = plots.scene_rows(rows)
    axes = figure.axes
    assert [ax.get_ylabel() for ax in axes] == ["first", "", "second", ""]
    drawn = [line for line in axes[0].lines if line.get_color() != "white"]
    np.testing.assert_array_equal(drawn[0].get_xydata(), a)
    np.testing.assert_array_equal(drawn[1].get_xydata(), b)
    assert [line.get_linestyle() for line in drawn] == ["-", "None"]
    assert axes[0].get_ylim() == (256, 0)  # y down, as in the image
    assert [text.get_text() for text in axes[3].texts] == ["1.5 px"]
    assert (axes[0].images[0].get_array() == picture).all()


def test_a_sheet_has_a_row_a_number_of_paths(scenes: Scenes, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[dict[str, list[plots.Scene]]] = []
    real = plots.scene_rows
    monkeypatch.setattr(plots, "scene_rows", lambda rows: drawn.append(rows) or real(rows))
    assert figures.sheet(scenes).startswith(b"\x89PNG")
    names = {"1 valid path": 1, "2 valid paths": 2, "3 valid paths": 3, "≥ 4 valid paths": 4}
    assert list(drawn[0]) == list(names)
    for name, row in drawn[0].items():
        assert len(row) == min(4, int((np.minimum(scenes.counts, 4) == names[name]).sum()))
        assert {min(len(scene.routes), 4) for scene in row} == {names[name]}


def test_faint_keeps_white_white(scenes: Scenes) -> None:
    picture = figures.faint(scenes.images[0])
    assert (picture[scenes.images[0] == 0] == 255).all()
    assert (picture[scenes.images[0] != 0] < 255).any(-1).all()


def test_a_decoding_is_what_the_model_does(scenes: Scenes) -> None:
    cpl = model(scenes, "cpl")
    seen = figures.decoding(cpl, scenes.images[2])
    images = torch.from_numpy(scenes.images[2:3])
    with torch.no_grad():
        prediction = cpl.select(images)
        features = cpl.encode(images)
        assert isinstance(cpl.method, Stepwise)
        pot = cpl.method.potentials(features, torch.ones(1, 1024).bool())
        W = pot.interaction.dense()[0]
    (picks,) = prediction.selection.tolist()
    assert len(picks) > 2
    road = np.array([[(image != 0).any() for image in np.split(row, 32, 1)] for row in np.split(scenes.images[2], 32)])
    np.testing.assert_allclose(seen.points, prediction.points[0, : len(picks)], rtol=1e-5)
    assert cells_of(torch.from_numpy(seen.points)).tolist() == picks
    assert seen.probabilities.shape == seen.added.shape == (len(picks) + 1, 32, 32)
    for t, pick in enumerate(picks):
        assert seen.probabilities[t].argmax() == pick
        assert (seen.probabilities[t + 1 :].reshape(-1, 1024)[:, pick] == 0).all()  # nothing is picked twice
        added = np.where(road, W[:, picks[:t]].sum(1).view(32, 32), np.nan)
        np.testing.assert_allclose(seen.added[t], added, atol=1e-5)
    assert (seen.probabilities.sum((1, 2)) <= 1 + 1e-5).all()
    with pytest.raises(ValueError, match="step by step, got Threshold"):
        figures.decoding(model(scenes, "threshold"), scenes.images[0])


def test_the_fork_is_where_a_valid_path_is_left_behind() -> None:
    x = np.arange(0.0, 100.0, 10.0)
    straight = np.stack([x, np.full(10, 50.0)], 1)
    turning = np.stack([x, 50.0 + np.maximum(x - 40.0, 0)], 1)
    assert figures.fork(straight, [straight, turning]) == 6  # at x = 60 the other is over 14 px away
    assert figures.fork(straight, [straight]) == 5  # it never is: the middle
    assert figures.key_steps(20, 6) == [0, 4, 6, 8, 14, 20]
    assert figures.key_steps(3, 1) == [0, 1, 3]


def fake_decoding(steps: int = 3) -> plots.Decoding:
    probabilities, added = np.full((steps + 1, 4, 4), 1e-9), np.zeros((steps + 1, 4, 4))
    for t in range(steps):
        probabilities[t, 0, t] = 0.9
        added[t + 1 :, 1, t] = -5.0
        added[t + 1 :, 2, t] = 5.0
    added[:, 3, 3] = np.nan  # not to be seen
    points = np.array([[8.0 * t + 4, 4.0] for t in range(steps)])
    return plots.Decoding(np.full((32, 32, 3), 255, np.uint8), points, probabilities, added)


def test_decoding_steps_colour_what_is_likely_and_what_is_suppressed() -> None:
    seen = fake_decoding()
    figure = plots.decoding_steps(seen, [0, 2])
    top, bottom = figure.axes[:2], figure.axes[2:4]
    assert [axes.get_title() for axes in top] == ["0 picks", "2 picks"]
    for axes, step in zip(top, (0, 2), strict=True):
        alpha = axes.images[1].get_array()[..., 3]
        assert np.argwhere(alpha > 0.1).tolist() == [[0, step]]
        picked, following = axes.lines
        np.testing.assert_array_equal(np.column_stack(picked.get_data()), seen.points[:step])
        np.testing.assert_array_equal(np.column_stack(following.get_data()), seen.points[step : step + 1])
    assert (bottom[0].images[1].get_array()[..., 3] == 0).all()
    red, _, blue, alpha = np.moveaxis(bottom[1].images[1].get_array(), -1, 0)
    assert (blue[1, :2] > red[1, :2]).all()  # suppressed
    assert (red[2, :2] > blue[2, :2]).all()  # raised
    assert (alpha[1:3, :2] > 0.5).all()
    assert (alpha[:, 2:] == 0).all()
    assert {axes.get_ylabel() for axes in figure.axes[4:]} == {"P(next pick)", "added to the logit"}


def test_an_animation_has_a_frame_a_pick_and_stays_small(scenes: Scenes) -> None:
    data = plots.animation(fake_decoding(4), seconds=0.1, pause=1.0)
    with Image.open(io.BytesIO(data)) as gif:
        durations = []
        for frame in range(gif.n_frames):
            gif.seek(frame)
            durations.append(gif.info["duration"])
    assert durations == [100] * 4 + [1000]
    assert len(plots.animation(figures.decoding(model(scenes, "cpl"), scenes.images[0]))) < 400_000


def table(**changes: Any) -> Table:
    base = {"rule": "reported scenes", "min_hd": 9.0, "off_road": 0.5, "min_ade_n3": None, "min_ade_n4plus": 7.0}
    rows = [
        {**base, "method": "Grid threshold", "min_ade": 6.0, "ms": 1.0, "min_ade_n1": 4.0, "min_ade_n2": 8.0},
        {**base, "method": "Hungarian", "min_ade": 7.0, "ms": 1.0, "min_ade_n1": 5.0, "min_ade_n2": 7.5},
        {**base, "method": "Pointer (AR)", "min_ade": 3.0, "ms": 9.0, "min_ade_n1": 2.5, "min_ade_n2": 3.5},
        {**base, "method": "CPL", "min_ade": 2.0, "ms": 2.0, "min_ade_n1": 1.5, "min_ade_n2": 2.5, **changes},
    ]
    return Table("Path prediction", BENCHMARK.columns, rows)


def test_findings_say_what_the_table_says() -> None:
    assert BENCHMARK.findings(table()) == [
        "CPL's paths lie 2.00 px from the nearest valid one (min-ADE); Grid threshold 6.00, Hungarian 7.00.",
        "Where two paths are valid, CPL is at 2.50 px and the best parallel method, Hungarian, at 7.50 px.",
        "The autoregressive pointer reaches 3.00 and takes 4.5× as long to predict.",
        "0.50 % of the points that CPL picks lie off the road.",
    ]
    bare = BENCHMARK.findings(table(ms=None, min_ade_n2=None))  # no weights to time, no such scenes
    assert len(bare) == 3
    assert bare[1] == "The autoregressive pointer reaches 3.00."
    only = Table("Path prediction", BENCHMARK.columns, table().rows[-1:])
    assert BENCHMARK.findings(only) == []


def test_bars_are_as_high_as_the_table_says() -> None:
    results = table(min_ade_n2_std=0.25)
    figure = figures.strata_panel(results.rows).figure
    assert not isinstance(figure, bytes)
    axes = figure.axes[0]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["1", "2", "3", "≥ 4"]
    bars = [[bar.get_height() for bar in group] for group in axes.containers if hasattr(group, "patches")]
    assert bars == [[row["min_ade_n1"], row["min_ade_n2"], row["min_ade_n4plus"]] for row in results.rows]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [row["method"] for row in results.rows]


def test_the_report_holds_every_figure_of_the_runs(runs: list[Path], tmp_path: Path) -> None:
    results = BENCHMARK.table(runs)
    text = BENCHMARK.report(runs, tmp_path, results).read_text()
    names = {"scenes", "decoding", "min-ade-by-paths", "convergence"}
    written = {path.name for path in (tmp_path / "figures").iterdir()}
    assert written == {f"{name}.{kind}" for name in names for kind in ("png", "svg")} | {"decode.gif"}
    assert all(f'id="{name}"' in text for name in (*names, "decode"))
    assert "data:image/gif;base64," in text
    cpl = next(row for row in results.rows if row["method"] == "CPL")
    assert f"CPL&#x27;s paths lie {cpl['min_ade']:.2f} px" in text
    assert not math.isnan(cpl["min_ade"])


def test_a_page_to_explore(runs: list[Path], tmp_path: Path) -> None:
    BENCHMARK.explore(runs, tmp_path / "explore.html")
    text = (tmp_path / "explore.html").read_text(encoding="utf-8")
    assert '"type": "point"' in text
    assert '"connect": true' in text
    assert '"size": [256, 256]' in text


def test_a_report_without_cpl_shows_what_there_is(runs: list[Path], tmp_path: Path) -> None:
    page = BENCHMARK.report(runs[:1], tmp_path)
    assert 'id="scenes"' in page.read_text()
    assert 'id="decode"' not in page.read_text()

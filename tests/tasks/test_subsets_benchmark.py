"""Results and report of the subsets task, from tiny runs: what is read from a history, what may be compared."""

from __future__ import annotations

import base64
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from torchcpl.checkpoints import CheckpointError, read_history
from torchcpl.cli import main
from torchcpl.config import override
from torchcpl.head import CPLHead
from torchcpl.selectors import Stepwise
from torchcpl.tables import Table
from torchcpl.tasks.figures import steps_of
from torchcpl.tasks.runs import Run
from torchcpl.tasks.subsets import figures
from torchcpl.tasks.subsets.benchmark import PUBLISHED, SubsetsBenchmark
from torchcpl.tasks.subsets.data import Features
from torchcpl.tasks.subsets.task import SubsetsConfig, SubsetsModel, SubsetsTask
from torchcpl.train import fit

BENCHMARK = SubsetsBenchmark()
TINY = SubsetsConfig(
    epochs=2, bags=16, batch_size=8, validation_bags=12, dim=16, layers=1, heads=2, ffn=16, hidden=8, permutations=2,
    max_items=24, min_per_class=2, max_per_class=6, max_classes=5, max_len=8, held_out=0.2, device="cpu",
)  # fmt: skip
REPORTED, HELD_OUT = BENCHMARK.rules.values()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds of CPL, one of each other method."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("runs")
    for method, seed in (("cpl", 0), ("cpl", 1), ("pointer", 0), ("threshold", 0), ("hungarian", 0)):
        config = override(TINY, method=method, seed=seed)
        fit(BENCHMARK.make_task(config), folder / f"{method}-s{seed}", progress=False)
    return folder


@pytest.fixture
def changed(folder: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of a run with something done to its files."""

    def change(name: str, change: Callable[[Path], object]) -> Path:
        shutil.copytree(folder / name, tmp_path / name, symlinks=True)
        change(tmp_path / name)
        return tmp_path / name

    return change


# ---------------------------------------------------------------------------------------------- by rule


def record(epoch: int, **scores: float) -> dict[str, Any]:
    """A validation whose columns tell by their value which bags, knob and epoch they are from."""
    base = {"clu_rec": 0.0, "clu_prec": 0.0, "card_err": 0.0}
    metrics: dict[str, float] = {}
    for prefix in sorted({name.removesuffix("clu_f1") for name in scores}):
        metrics |= {f"{prefix}{name}": value + epoch for name, value in base.items()}
        metrics[f"{prefix}clu_f1"] = scores[f"{prefix}clu_f1"]
    metrics["knob"] = 0.1 * epoch
    if "best_clu_f1" in scores:
        metrics["best_knob"] = 0.1 * epoch + 0.05
    return {"epoch": epoch, "step": epoch, "seconds": float(epoch), "metrics": metrics}


def made(history: list[dict[str, Any]], config: SubsetsConfig = TINY) -> Run[SubsetsConfig]:
    state = {"metric": "clu_f1", "best": {"metrics": {}}, "peak_mib": None}
    return Run(Path("nowhere"), config, history, state)


def test_each_rule_chooses_where_it_says_and_shows_the_reported_bags() -> None:
    history = [
        record(1, clu_f1=0.5, reported_clu_f1=0.30, best_clu_f1=0.31),
        record(2, clu_f1=0.9, reported_clu_f1=0.20, best_clu_f1=0.21),
        record(3, clu_f1=0.7, reported_clu_f1=0.40, best_clu_f1=0.41),
        record(4, clu_f1=0.9, reported_clu_f1=0.99, best_clu_f1=0.35),  # no better than the second, so not chosen
    ]
    found = BENCHMARK.by_rule(made(history))
    assert set(found) == {REPORTED, HELD_OUT}
    assert found[HELD_OUT]["epoch"] == 2
    assert found[HELD_OUT]["clu_f1"] == 0.20
    assert found[HELD_OUT]["knob"] == pytest.approx(0.2)
    assert found[REPORTED]["epoch"] == 3
    assert found[REPORTED]["clu_f1"] == 0.41
    assert found[REPORTED]["knob"] == pytest.approx(0.35)
    assert found[REPORTED]["clu_rec"] == 3.0


def test_without_held_out_there_is_the_papers_rule_alone() -> None:
    history = [record(1, clu_f1=0.5), record(2, clu_f1=0.4)]
    found = BENCHMARK.by_rule(made(history, override(TINY, held_out=0.0)))
    assert list(found) == [REPORTED]
    assert (found[REPORTED]["epoch"], found[REPORTED]["clu_f1"]) == (1, 0.5)


def test_with_a_tuned_knob_nothing_is_said_of_the_best_on_the_reported_bags() -> None:
    history = [record(1, clu_f1=0.5, reported_clu_f1=0.3), record(2, clu_f1=0.4, reported_clu_f1=0.9)]
    found = BENCHMARK.by_rule(made(history, override(TINY, calibrate="f1")))
    assert {rule: row["clu_f1"] for rule, row in found.items()} == {HELD_OUT: 0.3}


# ------------------------------------------------------------------------------------------------ table


@pytest.fixture(scope="module")
def table(folder: Path) -> Table:
    return BENCHMARK.table(sorted(folder.iterdir()))


def test_rows_by_method_and_rule(table: Table, folder: Path) -> None:
    keys = [(row["method"], row["rule"]) for row in table.rows]
    methods = ["BCE", "Hungarian", "Pointer (AR)", "CPL"]
    ours = [(method, rule) for rule in (REPORTED, HELD_OUT) for method in methods]
    assert keys == [("k-Means (oracle k)", None), *ours]
    histories = [[r["metrics"] for r in read_history(folder / f"cpl-s{seed}")] for seed in (0, 1)]
    chosen = [max(history, key=lambda metrics: metrics["clu_f1"]) for history in histories]
    best = [max(history, key=lambda metrics: metrics["best_clu_f1"]) for history in histories]
    rows = {(row["method"], row["rule"]): row for row in table.rows}
    for name in ("clu_rec", "clu_prec", "clu_f1", "card_err"):
        held_out = [metrics[f"reported_{name}"] for metrics in chosen]
        assert rows["CPL", HELD_OUT][name] == pytest.approx(np.mean(held_out))
        assert rows["CPL", HELD_OUT][f"{name}_std"] == pytest.approx(np.std(held_out, ddof=1))
        assert rows["CPL", REPORTED][name] == pytest.approx(np.mean([metrics[f"best_{name}"] for metrics in best]))
    assert rows["CPL", HELD_OUT]["seeds"] == [0, 1]
    assert "clu_f1_std" not in rows["BCE", HELD_OUT]
    assert all(row["ms"] > 0 for row in table.rows)
    assert rows["k-Means (oracle k)", None]["reference"]
    assert table.published == []  # the images are not the paper's
    assert "20% of the training items" in " ".join(table.notes)
    assert table.info["seeds"] == [0, 1]
    assert table.info["config"]["held_out"] == 0.2
    assert "method" not in table.info["config"]


def test_one_rule_may_be_asked_for(folder: Path) -> None:
    rows = BENCHMARK.table([folder / "cpl-s0"], ["held-out"]).rows
    assert [row["rule"] for row in rows] == [None, HELD_OUT]


def test_evaluation_is_what_the_history_says(folder: Path) -> None:
    (row,) = BENCHMARK.evaluate(folder / "threshold-s0").rows
    chosen = max((r["metrics"] for r in read_history(folder / "threshold-s0")), key=lambda metrics: metrics["clu_f1"])
    for name in ("clu_rec", "clu_prec", "clu_f1", "card_err"):
        assert row[name] == pytest.approx(chosen[f"reported_{name}"], abs=1e-6)
    assert row["knob"] == [chosen["knob"]]


@pytest.mark.parametrize("path", ["a.npz", "b/a.npz", "c/b/a.npz"])
def test_a_file_is_named_with_its_folder(path: str) -> None:
    assert SubsetsBenchmark().source(SubsetsConfig(source=path)) == path.removeprefix("c/")


def test_an_archived_run_has_scores_and_no_time(changed: Callable[..., Path]) -> None:
    run = changed("cpl-s0", lambda run: [path.unlink() for path in run.rglob("model.safetensors")])
    *_, row = BENCHMARK.table([run]).rows
    assert row["ms"] is None
    assert 0 <= row["clu_f1"] <= 1
    with pytest.raises(CheckpointError, match=r"model\.safetensors: missing"):
        BENCHMARK.evaluate(run)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seed": 1, "max_classes": 4}, "expected the same max_classes in all"),
        ({"seed": 1, "held_out": 0.3}, "expected the same held_out in all"),
        ({"seed": 1, "validation_bags": 10}, "expected the same validation_bags in all"),
        ({"seed": 1, "lr": 0.1}, "runs of CPL: expected them to differ in their seeds and nothing else"),
        ({"batch_size": 4}, "runs of CPL: expected them to differ in their seeds and nothing else"),
    ],
)
def test_runs_that_differ_are_not_averaged(folder: Path, tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    fit(BENCHMARK.make_task(override(TINY, epochs=1, **changes)), tmp_path / "other", progress=False)
    with pytest.raises(ValueError, match=said):
        BENCHMARK.table([folder / "cpl-s0", tmp_path / "other"])


def test_every_kind_of_interaction_has_a_row(folder: Path, tmp_path: Path) -> None:
    for kind in ("recent", "coverage"):
        fit(BENCHMARK.make_task(override(TINY, epochs=1, kind=kind)), tmp_path / kind, progress=False)

    def names(*paths: Path) -> list[str]:
        rows = BENCHMARK.table([folder / "threshold-s0", *paths], ["held-out"]).rows
        return [row["method"] for row in rows if not row.get("reference")]

    assert names(folder / "cpl-s0", tmp_path / "recent") == ["BCE", "CPL (lowrank)", "CPL"]
    assert names(tmp_path / "recent") == ["BCE", "CPL"]
    assert names(tmp_path / "recent", tmp_path / "coverage") == ["BCE", "CPL (coverage)", "CPL (recent)"]
    with pytest.raises(ValueError, match="expected one kind of CPL in a report, got coverage, recent"):
        BENCHMARK.report([tmp_path / "recent", tmp_path / "coverage"], tmp_path / "page")


def test_the_same_run_twice_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="runs of CPL"):
        BENCHMARK.table([folder / "cpl-s0"] * 2)
    with pytest.raises(ValueError, match="at least one"):
        BENCHMARK.table([])


def test_an_unfinished_run_is_not_compared(changed: Callable[..., Path]) -> None:
    def cut(run: Path) -> None:
        lines = (run / "history.jsonl").read_text().splitlines(keepends=True)
        (run / "history.jsonl").write_text(lines[0])

    with pytest.raises(ValueError, match="cpl-s0 is unfinished, at epoch 1 of 2"):
        BENCHMARK.table([changed("cpl-s0", cut)])


@pytest.mark.parametrize("content", ["", "{oops}\n"])
def test_a_damaged_history_is_named(changed: Callable[..., Path], content: str) -> None:
    run = changed("cpl-s0", lambda run: (run / "history.jsonl").write_text(content))
    with pytest.raises(ValueError, match=r"cpl-s0/history\.jsonl: "):
        BENCHMARK.table([run])


def test_published_rows_stand_beside_the_papers_images_alone(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for name, known in (("cifar", True), ("other", False)):
        names = np.array([f"class {i}" for i in range(5)] + ["aquarium_fish" if known else "goldfish"])
        features, labels = generator.normal(size=(60, 4)), np.repeat(np.arange(6), 10)
        np.savez(tmp_path / f"{name}.npz", features=features, labels=labels, class_names=names)
        found = BENCHMARK.published(override(TINY, source=str(tmp_path / f"{name}.npz")))
        assert found == (PUBLISHED if known else [])
    assert {row["method"]: row["clu_f1"] for row in PUBLISHED} == {
        "k-Means (oracle k)": 0.778, "BCE": 0.176, "Hungarian": 0.617, "Pointer (AR)": 0.875, "CPL": 0.853
    }  # fmt: skip


@pytest.mark.parametrize("option", [{"batches": (0,)}, {"repeats": 0}, {"examples": 0}])
def test_bench_counts_from_one(folder: Path, option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(option))}: expected an integer of at least 1"):
        BENCHMARK.bench([folder / "cpl-s0"], **option)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-mixed", torch.bfloat16), ("16-mixed", torch.float16)])
@pytest.mark.parametrize("run", ["cpl-s0", "pointer-s0"])
def test_bench_says_how_many_selections_are_those_of_float32(
    folder: Path, run: str, precision: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SubsetsModel, "paired", False)  # all as autocast has it, so that some do change
    monkeypatch.setattr(CPLHead, "precise", False)
    small: dict[str, Any] = {"batches": (1,), "repeats": 1, "examples": 2}
    task, model, _ = BENCHMARK.restore(BENCHMARK.read(folder / run))
    (bags,) = task.examples(len(task.reported), 1)
    with torch.inference_mode():
        expected = model.select(bags).tolist()
        with torch.autocast(task.device.type, dtype):
            rounded = model.select(bags).tolist()
    share = sum(set(one) == set(other) for one, other in zip(rounded, expected, strict=True)) / len(expected)
    found = BENCHMARK.bench([folder / run], precision=precision, **small)
    assert [row["same"] for row in found.rows] == [pytest.approx(share), None][: len(found.rows)]
    assert "same" not in BENCHMARK.bench([folder / run], **small).rows[0]


# ---------------------------------------------------------------------------------------------- figures


def test_the_report_has_every_panel(folder: Path, tmp_path: Path, table: Table) -> None:
    page = BENCHMARK.report(sorted(folder.iterdir()), tmp_path / "report", table)
    text = page.read_text(encoding="utf-8")
    names = {
        "selection-steps-failed", "picked-images", "embedding", "interaction", "convergence", "precision-recall",
        "reliability",
    }  # fmt: skip
    names |= {"selection-steps"} & set(re.findall(r'id="([^"]*)"', text))  # a model of two epochs may solve none
    assert set(re.findall(r'<figure class="[^"]*" id="([^"]*)"', text)) == names
    files = {path.name for path in (page.parent / "figures").iterdir()}
    assert files == {f"{name}.{kind}" for name in names for kind in ("png", "svg")}
    sources = re.findall(r'(?:src|href)="([^"]{0,40})', text)
    assert len(sources) == len(names)
    assert all(source.startswith("data:image/") for source in sources)
    for data in re.findall(r'src="data:image/png;base64,([^"]*)"', text):
        assert base64.b64decode(data).startswith(b"\x89PNG")
    for said in ("CPL reaches a CluF1 of", "The autoregressive pointer", "permutations = 2", "chosen on held-out"):
        assert said in text


def test_reliability_is_of_the_steps_taken(folder: Path) -> None:
    task, model, knob = BENCHMARK.restore(BENCHMARK.read(folder / "cpl-s0"))
    bags = list(task.reported.split(1))
    going, stops = [], []
    for bag in bags:
        picks, probabilities, *_ = steps_of(model.method, model.encode(bag), bag.mask, model.max_len, knob)
        labels, seen = bag.labels[0].tolist(), set[int]()
        classes = {label for label in labels if label >= 0}
        for pick, choice in zip([*picks, None], probabilities, strict=True):
            if pick is not None or len(picks) < model.max_len:
                stops.append((float(choice[-1]), seen == classes))
            if pick is not None:
                going.append((1 - float(choice[-1]), labels[pick] not in seen))
                seen.add(labels[pick])
    found = figures.reliability(task, model, knob)
    for (probability, came_true), expected in zip(found, (going, stops), strict=True):
        np.testing.assert_allclose(probability, [p for p, _ in expected], atol=1e-5)
        assert came_true.tolist() == [float(hit) for _, hit in expected]


def test_a_page_to_explore(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "explore.html"
    BENCHMARK.explore(sorted(folder.iterdir()), page)
    found = re.search(r'id="data">(.*?)</script>', page.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    data = json.loads(found[1])
    task, model, knob = BENCHMARK.restore(BENCHMARK.read(folder / "cpl-s0"))
    bag = figures.example_bags(task, model, knob)[0][0]
    assert data["n"] == bag.mask.shape[1]
    assert [label for label in data["labels"] if label] == [
        task.features.class_names[label] for label in bag.labels[0].tolist() if label >= 0
    ]
    assert sum(map(bool, data["items"]["values"])) == int(bag.mask.sum())
    with pytest.raises(ValueError, match="runs: expected one of CPL"):
        BENCHMARK.explore([folder / "threshold-s0"], page)


def test_a_report_of_one_parallel_method(folder: Path, tmp_path: Path) -> None:
    page = BENCHMARK.report([folder / "threshold-s0"], tmp_path / "report")
    assert re.findall(r'<figure class="[^"]*" id="([^"]*)"', page.read_text(encoding="utf-8")) == ["precision-recall"]


def test_a_trace_is_what_the_model_does(folder: Path) -> None:
    task, model, _ = BENCHMARK.restore(BENCHMARK.read(folder / "cpl-s0"))
    bag = figures.example_bags(task, model, 0.0)[0][0]
    images = task.features.images
    trace = figures.Trace(model, bag, 0.0)
    with torch.no_grad():
        selection = model.select(bag, 0.0)
    assert trace.picks == selection.tolist()[0]
    assert trace.probabilities.shape == (len(trace.picks) + 1, trace.size + 1)
    assert trace.probabilities.sum(1) == pytest.approx(1, abs=1e-5)
    for t, pick in enumerate(trace.picks):
        assert trace.probabilities[t].argmax() == pick
        assert not trace.probabilities[t + 1 :, pick].any()
    assert trace.probabilities[-1].argmax() == trace.size or len(trace.picks) == TINY.max_len
    log_prob = np.log([trace.probabilities[t, pick] for t, pick in enumerate(trace.picks)]).sum()
    if len(trace.picks) < TINY.max_len:
        log_prob += np.log(trace.probabilities[-1, -1])
    assert log_prob == pytest.approx(float(selection.log_prob[0]), abs=1e-4)
    assert trace.W.shape == (trace.size, trace.size)
    assert images is not None
    # The images are those of the features, which are their pixels.
    assert torch.allclose(images[trace.rows].flatten(1) / 255, bag.features[0, : trace.size], atol=0.003)


def test_a_trace_needs_steps(folder: Path) -> None:
    task, model, _ = BENCHMARK.restore(BENCHMARK.read(folder / "threshold-s0"))
    with pytest.raises(ValueError, match="step by step"):
        figures.Trace(model, figures.example_bags(task, model, 0.5)[0][0], 0.5)


def test_steps_of_a_method_that_must_pick_do_not_begin_with_the_stop() -> None:
    method = Stepwise(CPLHead(4, 8), ordered=True, min_len=1).eval()
    mask = torch.ones(1, 5, dtype=torch.bool)
    steps = steps_of(method, torch.randn(1, 5, 4), mask, 3, knob=50.0)  # added to the stop's logit
    assert len(steps.picks) == 1
    assert steps.probabilities[:, -1].tolist() == [0, pytest.approx(1)]


def test_the_bags_shown_are_one_that_is_solved_and_one_that_is_not(folder: Path) -> None:
    task, model, _ = BENCHMARK.restore(BENCHMARK.read(folder / "cpl-s0"))

    class Chooses(torch.nn.Module):
        """Right in bags with an odd number of items."""

        def select(self, bags: Any, knob: float | None) -> Any:
            odd = (bags.mask.sum(-1, keepdim=True) % 2).bool()
            return SimpleNamespace(indices=bags.target.where(odd, -1))

    (solved, failed), share = figures.example_bags(task, Chooses(), None)  # type: ignore[arg-type]
    assert solved.mask.sum() % 2 == 1
    assert failed.mask.sum() % 2 == 0
    assert 0 < share < 1
    assert {int((bag.target >= 0).sum()) for bag in (solved, failed)} == {figures.CLUSTERS}
    (panel,) = (panel for panel in figures.bag_panels(task, model, None) if "-failed" in panel.name)
    assert panel.title.endswith("a bag that is not solved")  # by a model trained for two epochs


@pytest.mark.parametrize(("width", "items"), [(1, 24), (4, 1)])
def test_one_feature_or_one_item_is_not_embedded_in_a_plane(width: int, items: int) -> None:
    labels = torch.arange(60) % 5
    features = Features(torch.randn(60, width), labels, torch.randn(60, width), labels, tuple("abcde"))
    task = SubsetsTask(override(TINY, held_out=0.0, max_items=items), features)
    panels = figures.bag_panels(task, task.build().eval(), None)
    assert "embedding" not in [panel.name for panel in panels]
    assert panels[-1].name == "interaction"


def test_the_star_is_the_tables_value(folder: Path, table: Table) -> None:
    (panel,) = BENCHMARK._convergence([BENCHMARK.read(path) for path in sorted(folder.iterdir())], table)
    assert not isinstance(panel.figure, bytes)
    rows = {row["method"]: row for row in table.rows}  # of the last rule
    axes = panel.figure.axes[0]
    stars = [line for line in axes.lines if line.get_marker() == "*"]
    assert [float(star.get_ydata()[0]) for star in stars] == [
        pytest.approx(rows[name]["clu_f1"]) for name in ("Pointer (AR)", "CPL")
    ]
    assert [text.get_text() for text in axes.texts] == [f"{rows[n]['clu_f1']:.3f}"[1:] for n in ("Pointer (AR)", "CPL")]


def test_an_evaluation_reads_the_weights_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, loaded = safetensors.torch.load, []
    monkeypatch.setattr(safetensors.torch, "load", lambda data: loaded.append(len(data)) or read(data))
    assert main(["evaluate", str(folder / "cpl-s0")]) == 0
    assert len(loaded) == 1


def test_a_report_of_other_data_does_not_speak_of_images(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    labels = np.repeat(np.arange(6), 10)
    features = generator.normal(size=(60, 4)) + 3 * labels[:, None]
    np.savez(tmp_path / "rows.npz", features=features, labels=labels)
    config = override(TINY, source=str(tmp_path / "rows.npz"), epochs=1)
    fit(BENCHMARK.make_task(config), tmp_path / "run", progress=False)
    page = BENCHMARK.report([tmp_path / "run"], tmp_path / "page").read_text(encoding="utf-8")
    words = re.sub(r'src="[^"]*"|<style>.*?</style>', "", page, flags=re.DOTALL)
    assert "image" not in words


def test_trades_are_scores_on_the_first_reported_bags(folder: Path) -> None:
    task, model, _ = BENCHMARK.restore(BENCHMARK.read(folder / "threshold-s0"))
    trade = figures.trade(task, model, 0.3)
    scores = task.evaluate(model, task.reported, (*model.method.knobs, 0.3))  # 0.3 is one of them
    assert trade.chosen == pytest.approx((scores[0.3]["clu_rec"], scores[0.3]["clu_prec"]))
    found = [scores[knob] for knob in sorted(scores) if scores[knob]["clu_rec"] > 0]
    assert list(trade.recall) == pytest.approx([score["clu_rec"] for score in found])
    assert list(trade.precision) == pytest.approx([score["clu_prec"] for score in found])


def test_findings_follow_the_table(table: Table) -> None:
    said = " ".join(BENCHMARK.findings(table))
    rows = {row["method"]: row for row in table.rows}  # the last rule's
    score = table.columns[3]
    for method in ("CPL", "BCE", "Hungarian", "k-Means (oracle k)", "Pointer (AR)"):
        assert score.cell(rows[method]) in said
    assert f"{rows['CPL']['card_err']:.2f}" in said


def test_findings_without_times(table: Table) -> None:
    rows = [{**row, "ms": None} for row in table.rows]
    said = BENCHMARK.findings(Table(table.title, table.columns, json.loads(json.dumps(rows))))
    assert any("pointer" in sentence for sentence in said)
    assert "None" not in " ".join(said)


def test_a_file_that_changed_under_its_name_is_read_again(tmp_path: Path) -> None:
    rng, labels = np.random.default_rng(0), np.arange(90) % 3
    config = SubsetsConfig(
        source=str(tmp_path / "x.npz"), max_classes=3, min_per_class=1, max_per_class=4, max_items=8, validation_bags=4
    )
    for scale in (1.0, 1000.0):
        np.savez(tmp_path / "x.npz", features=scale * rng.normal(size=(90, 4)), labels=labels)
        assert (BENCHMARK.make_task(config).features.train.abs().max() > 100) == (scale > 1)


def test_features_are_read_once_whatever_else_the_folder_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = BENCHMARK.make_task(TINY).features
    (tmp_path / "log.txt").write_text("training goes on")
    assert BENCHMARK.make_task(TINY).features is first

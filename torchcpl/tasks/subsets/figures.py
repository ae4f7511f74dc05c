"""Figures and report of the subsets task, all from finished runs; and the demo that makes everything from nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcpl import plots
from torchcpl.config import to_toml
from torchcpl.constraints import Rules
from torchcpl.functional import prefix_logits
from torchcpl.report import Panel, write_report
from torchcpl.results import extra
from torchcpl.selectors import CPL
from torchcpl.tables import Table
from torchcpl.tasks.runs import Run, complete, plan, read_recipe
from torchcpl.tasks.subsets.data import Bags, BagSampler, fixed_bags
from torchcpl.tasks.subsets.results import BENCHMARK, NAMES, REFERENCE, make_task
from torchcpl.tasks.subsets.task import SubsetsConfig, SubsetsModel, SubsetsTask

COLOURS = {
    NAMES["cpl"]: plots.PALETTE[2],
    NAMES["pointer"]: plots.PALETTE[0],
    NAMES["hungarian"]: plots.PALETTE[1],
    NAMES["bce"]: plots.PALETTE[4],
    REFERENCE: plots.PALETTE[8],
}
SWEEP_BAGS = 200  # bags behind the precision–recall curves
CLUSTERS = 5  # of the bag that is shown, as far as there is one
DEMO_SEEDS = (0, 1, 2)
LEAD = (
    "Each input is a bag of images of several classes. The model sees the images alone and picks a subset; it is right "
    "when every class is picked exactly once. It was trained on one random member of each class, never on the classes."
)


class Trace:
    """One bag, what a model with potentials picks from it, and what it thought at every step."""

    def __init__(self, model: SubsetsModel, bag: Bags, knob: float) -> None:
        if not isinstance(model.method, CPL):
            raise ValueError(f"model: expected one that selects step by step, got {type(model.method).__name__}")
        self.size = int(bag.mask.sum())  # padding comes last
        with torch.inference_mode():
            encoded = model.encode(bag)
            pot = model.method.potentials(encoded, bag.mask)
            selection = model.method.select(encoded, bag.mask, model.max_len, knob)
            self.picks: list[int] = selection.tolist()[0]
            order = selection.indices[:, None, : len(self.picks)]
            bias = knob if model.method.stop_rule == "argmax" else 0.0
            steps = prefix_logits(pot, order, Rules(pot, model.max_len, 0, bias, ()))[0, 0].softmax(-1)
            real = [*range(self.size), pot.num_candidates]
            self.probabilities = _array(steps[:, real])  # (T+1, n+1)
            self.W = _array(pot.interaction.dense()[0, : self.size, : self.size])
        self.features = _array(bag.features[0, : self.size])
        self.labels = _array(bag.labels[0, : self.size])
        self.rows = bag.rows[0, : self.size].cpu()


def example_bag(task: SubsetsTask) -> tuple[Bags, Tensor | None]:
    """A bag of test images to look at, and its images where there are any: the first with five classes or near it."""
    features = task.features
    rows = features.image_rows if features.image_rows is not None else torch.arange(len(features.test))
    sampler = BagSampler(features.test[rows], features.test_labels[rows], task.protocol)
    bags = fixed_bags(sampler, 32, seed=3)
    nearest = ((bags.target >= 0).sum(-1) - CLUSTERS).abs().argmin()
    bag = Bags(
        *(getattr(bags, name)[nearest : nearest + 1] for name in ("features", "mask", "labels", "target", "rows"))
    )
    images = features.images[bag.rows[0, bag.mask[0]]] if features.images is not None else None
    return bag.to(task.device), images


def project(features: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Features (N, d) in the plane, by t-SNE."""
    with extra():
        from sklearn.manifold import TSNE

    perplexity = min(30.0, (len(features) - 1) / 3)
    found: np.ndarray[Any, Any] = TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(features)
    return found


def trade(task: SubsetsTask, model: SubsetsModel, knob: float) -> plots.Trade:
    """Recall and precision on some of the reported bags as the knob varies."""
    bags = next(iter(task.reported.split(SWEEP_BAGS)))
    knobs = sorted({*model.method.knobs[:: 2 if isinstance(model.method, CPL) else 1], knob})
    scores = task.evaluate(model, bags, tuple(knobs))
    pairs = np.array([[scores[value]["clu_rec"], scores[value]["clu_prec"]] for value in knobs])
    pairs = pairs[pairs[:, 0] > 0]  # where nothing is picked there is no precision to show
    return plots.Trade(pairs[:, 0], pairs[:, 1], (scores[knob]["clu_rec"], scores[knob]["clu_prec"]))


def convergence_curves(runs: Sequence[Run[SubsetsConfig]]) -> dict[str, plots.Curve]:
    """CluF1 on the reported bags over the epochs, of CPL and the pointer."""
    curves = {}
    for method in ("pointer", "cpl"):
        group = [run.history for run in runs if run.config.method == method]
        if not group:
            continue
        key = "reported_clu_f1" if "reported_clu_f1" in group[0][0]["metrics"] else "clu_f1"
        epochs = sorted(set.intersection(*({record["epoch"] for record in history} for history in group)))
        values = [[r["metrics"][key] for r in history if r["epoch"] in epochs] for history in group]
        curves[NAMES[method]] = plots.Curve(np.array(epochs), np.array(values))
    return curves


def panels(runs: Sequence[Run[SubsetsConfig]], reference: dict[str, Any] | None = None) -> list[Panel]:
    """Every figure that the runs allow; ``reference`` is the table's row of k-Means."""
    first = {method: next((run for run in runs if run.config.method == method), None) for method in NAMES}
    restored = {method: BENCHMARK.restore(run) for method, run in first.items() if run}
    knobs = {method: run.state["best"]["metrics"]["knob"] for method, run in first.items() if run}
    found: list[Panel] = []
    if "cpl" in restored:
        found += _bag_panels(*restored["cpl"], knobs["cpl"])
    curves = convergence_curves(runs)
    if curves:
        caption = (
            "CluF1 on the reported bags after every epoch: mean over seeds, ± one standard deviation, star at the best."
        )
        figure = plots.convergence(curves, "CluF1", COLOURS)
        found.append(Panel("convergence", "Convergence", caption, figure))
    trades = {NAMES[method]: trade(*restored[method], knobs[method]) for method in restored}
    if reference:
        point = np.array([reference["clu_rec"]]), np.array([reference["clu_prec"]])
        trades = {REFERENCE: plots.Trade(*point, (reference["clu_rec"], reference["clu_prec"])), **trades}
    caption = (
        "Each line is one method as its threshold (BCE, Hungarian) or its stop (CPL, pointer) varies; the large mark "
        "is the value that was chosen. Grey: equal F1."
    )
    found.append(Panel("precision-recall", "Precision and recall", caption, plots.precision_recall(trades, COLOURS)))
    return found


def _bag_panels(task: SubsetsTask, model: SubsetsModel, knob: float) -> list[Panel]:
    """What CPL does with one bag."""
    bag, images = example_bag(task)
    trace, names = Trace(model, bag, knob), task.features.class_names
    hit = len(set(trace.labels[trace.picks].tolist()))
    classes = len(set(trace.labels.tolist()))
    said = f"{len(trace.picks)} picks from {trace.size} images of {classes} classes, {hit} of them hit"
    steps = Panel(
        "selection-steps",
        "Selection, step by step",
        f"{said}. After each pick the candidates of its class lose their probability, until the stop wins. The label "
        "marks what is picked next, triangles what was picked before.",
        plots.selection_steps(trace.probabilities, trace.picks, trace.labels, names),
        wide=True,
    )
    shown = [steps]
    if images is not None:
        caption = "All images of the same bag, a row a class. Framed: what CPL picked, numbered in order."
        figure = plots.picked_images(images.numpy(), trace.labels, trace.picks, names)
        shown.append(Panel("picked-images", "Picked images", caption, figure, wide=True, dense=True))
    caption = "The bag's features by t-SNE, coloured by class, which the model does not see; the picks in their order."
    figure = plots.embedding(project(trace.features), trace.labels, trace.picks, names)
    shown.append(Panel("embedding", "Embedding", caption, figure))
    caption = (
        "What having picked i adds to the logit of j, sorted by class: blue blocks on the diagonal suppress the rest "
        "of a class once one of it is picked."
    )
    if model.method.head.kind != "lowrank":  # type: ignore[union-attr]
        caption += " Shown is the effect of a first pick; later ones depend on the picks before."
    figure = plots.interaction(trace.W, trace.labels, names)
    shown.append(Panel("interaction", "Interaction W", caption, figure, dense=True))
    return shown


def findings(results: Table) -> list[str]:
    """What the table says, in sentences."""
    rows = {row["method"]: row for row in results.rows}  # of several rules, the last
    if NAMES["cpl"] not in rows or len(rows) < 2:
        return []
    cpl, said = rows.pop(NAMES["cpl"]), []
    score = results.columns[3]
    parallel = [rows[name] for name in (REFERENCE, NAMES["bce"], NAMES["hungarian"]) if name in rows]
    others = ", ".join(f"{row['method']} {score.cell(row)}" for row in parallel)
    said.append(f"CPL reaches a CluF1 of {score.cell(cpl)}; {others}.")
    pointer = rows.get(NAMES["pointer"])
    if pointer:
        ratio = pointer["ms"] / cpl["ms"]
        said.append(
            f"The autoregressive pointer reaches {score.cell(pointer)} and takes {ratio:.1f}× as long to predict."
        )
    said.append(
        f"CPL's number of picks is off by {cpl['card_err']:.2f} on average; it is not told how many classes there are."
    )
    return said


def report(paths: Sequence[str | Path], out: str | Path, results: Table | None = None) -> Path:
    """Write ``report.html`` and the figures as PNG and SVG into the folder ``out``; the path of the page."""
    out = Path(out)
    runs = list(map(BENCHMARK.read, paths))
    results = results or BENCHMARK.table(paths)
    reference = next((dict(row) for row in results.rows if row["method"] == REFERENCE), None)
    shown = panels(runs, reference)
    for panel in shown:
        plots.save(panel.figure, out / "figures" / panel.name)
    configs = {str(run.path): to_toml(run.config) for run in runs if run.config.seed == runs[0].config.seed}
    page = out / "report.html"
    commands = [results.info["command"], f"torchcpl evaluate {runs[-1].path}"]
    write_report(page, results.title, LEAD, findings(results), results, shown, configs, commands)
    return page


def demo(out: str | Path, say: Callable[[str], None]) -> tuple[Table, Path]:
    """Train all methods on digits over three seeds, compare them, write ``table.json`` and the report into ``out``."""
    out = Path(out)
    base = read_recipe(SubsetsConfig, Path(__file__).parent, "demo")
    planned = plan(base, reversed(NAMES), DEMO_SEEDS, out)  # the longest first, so that none is left over at the end
    say(f"Training {len(NAMES)} methods × {len(DEMO_SEEDS)} seeds on scikit-learn's digits, in {out}")
    complete(planned, make_task, train=True, jobs=min(os.cpu_count() or 1, 6))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a bag at a time is too little work to share
    try:
        say("Comparing them on bags of images that none has seen …")
        results = BENCHMARK.table(list(planned), ["held-out"])
        results.write(out / "table.json")
        say("Drawing the figures …")
        return results, report(list(planned), out, results)
    finally:
        torch.set_num_threads(threads)


def _array(values: Tensor) -> np.ndarray[Any, Any]:
    return values.float().cpu().numpy() if values.is_floating_point() else values.cpu().numpy()

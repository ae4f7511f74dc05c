"""Figures and report of the subsets task, all from finished runs; and the demo that makes everything from nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from torchcpl import plots
from torchcpl.report import Panel
from torchcpl.results import extra
from torchcpl.selectors import CPL
from torchcpl.tables import Table
from torchcpl.tasks import pages
from torchcpl.tasks.pages import (
    against_pointer,
    array,
    convergence_curves,
    demonstrate,
    first_runs,
    runs_of_a_page,
    steps_of,
    write_page,
)
from torchcpl.tasks.runs import Run
from torchcpl.tasks.subsets.data import Bags, BagSampler, fixed_bags
from torchcpl.tasks.subsets.results import BENCHMARK, NAMES, REFERENCE
from torchcpl.tasks.subsets.task import SubsetsConfig, SubsetsModel, SubsetsTask

COLOURS = {name: pages.COLOURS[method] for method, name in NAMES.items()} | {REFERENCE: plots.PALETTE[8]}
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
        self.size = int(bag.mask.sum())  # padding comes last
        with torch.inference_mode():
            encoded = model.encode(bag)
            steps = steps_of(model.method, encoded, bag.mask, model.max_len, knob)
            pot = cast(CPL, model.method).potentials(encoded, bag.mask)
            self.W = array(pot.interaction.dense()[0, : self.size, : self.size])
        self.picks = steps.picks
        self.probabilities = steps.probabilities[:, [*range(self.size), pot.num_candidates]]  # (T+1, n+1)
        self.features = array(bag.features[0, : self.size])
        self.labels = array(bag.labels[0, : self.size])
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


def panels(runs: Sequence[Run[SubsetsConfig]], reference: dict[str, Any] | None = None) -> list[Panel]:
    """Every figure that the runs allow; ``reference`` is the table's row of k-Means."""
    first = first_runs(runs, NAMES)
    restored = {method: BENCHMARK.restore(run) for method, run in first.items()}
    knobs = {method: run.state["best"]["metrics"]["knob"] for method, run in first.items()}
    found: list[Panel] = []
    if "cpl" in restored:
        found += _bag_panels(*restored["cpl"], knobs["cpl"])
    curves = convergence_curves(runs, "clu_f1", NAMES)
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
        said.append(against_pointer(pointer, cpl, score))
    said.append(
        f"CPL's number of picks is off by {cpl['card_err']:.2f} on average; it is not told how many classes there are."
    )
    return said


def report(paths: Sequence[str | Path], out: str | Path, results: Table | None = None) -> Path:
    """Write ``report.html`` and the figures into the folder ``out``; the path of the page."""
    runs = runs_of_a_page(BENCHMARK, paths)
    results = results or BENCHMARK.table(paths)
    reference = next((dict(row) for row in results.rows if row["method"] == REFERENCE), None)
    return write_page(out, runs, results, LEAD, findings(results), panels(runs, reference))


def demo(out: str | Path, say: Callable[[str], None]) -> tuple[Table, Path]:
    """Train all methods on digits over three seeds, compare them, write ``table.json`` and the report into ``out``."""
    package, data = Path(__file__).parent, "scikit-learn's digits"
    return demonstrate(BENCHMARK, package, DEMO_SEEDS, data, out, say, report, ["held-out"])

"""Figures of the subsets task: the steps of CPL on a bag, and precision–recall curves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from torch.nn import functional as F

from torchcpl import plots
from torchcpl.constraints import Rules
from torchcpl.explore import Explorer
from torchcpl.files import extra
from torchcpl.functional import prefix_logits
from torchcpl.metrics import cluster_scores
from torchcpl.report import Panel
from torchcpl.selectors import Stepwise
from torchcpl.tables import Row
from torchcpl.tasks.figures import array, explorer, steps_of
from torchcpl.tasks.subsets.bags import Bags, BagSampler, fixed_bags
from torchcpl.tasks.subsets.task import METHODS, REFERENCE, SubsetsModel, SubsetsTask

COLOURS = {name: plots.METHODS[method] for method, name in METHODS.items()} | {REFERENCE: plots.PALETTE[8]}
SWEEP_BAGS = 200  # bags of the precision–recall curves
LOOKED_AT = 64  # bags to choose the shown ones from
CLUSTERS = 5  # classes of a shown bag, or the nearest number


class Trace:
    """One bag, the picks of a model with potentials, and its probabilities at every step."""

    def __init__(self, model: SubsetsModel, bag: Bags, knob: float | None) -> None:
        self.size = int(bag.mask.sum())  # padding comes last
        with torch.inference_mode():
            self.picks, probabilities, _, pot = steps_of(model.method, model.encode(bag), bag.mask, model.max_len, knob)
            self.W = array(pot.interaction.dense()[0, : self.size, : self.size])
        self.probabilities = probabilities[:, [*range(self.size), pot.num_candidates]]  # (T+1, n+1)
        self.features = array(bag.features[0, : self.size])
        self.labels = array(bag.labels[0, : self.size])
        self.rows = bag.rows[0, : self.size].cpu()
        self.classes = len(set(self.labels.tolist()))
        self.hit = len(set(self.labels[self.picks].tolist()))


@torch.inference_mode()
def example_bags(task: SubsetsTask, model: SubsetsModel, knob: float | None) -> tuple[list[Bags], float]:
    """The first test bag that is solved and the first that is not, where there is one; the share that is solved.

    They have `CLUSTERS` classes, or the nearest number, and are drawn from the rows with images if there are any.
    """
    features = task.features
    rows = features.image_rows if features.image_rows is not None else torch.arange(len(features.test))
    sampler = BagSampler(features.test[rows], features.test_labels[rows], task.config)
    bags = fixed_bags(sampler, LOOKED_AT, seed=3).to(task.device)
    right = cluster_scores(model.select(bags, knob).indices, bags.labels)["clu_f1"] == 1
    far = ((bags.target >= 0).sum(-1) - CLUSTERS).abs()
    kinds = [far.masked_fill(~kind, far.max() + 1) for kind in (right, ~right) if kind.any()]
    return [list(bags.split(1))[int(distance.argmin())] for distance in kinds], float(right.float().mean())


def bag_panels(task: SubsetsTask, model: SubsetsModel, knob: float | None) -> list[Panel]:
    """Figures of a bag that CPL solves and, step by step, of one that it does not."""
    with extra():
        from sklearn.manifold import TSNE
    (bags, share), names = example_bags(task, model, knob), task.features.class_names
    traces = [Trace(model, bag, knob) for bag in bags]
    shown = [_steps(trace, names, share) for trace in traces]
    trace = traces[0]
    if task.features.images is not None:
        caption = "All images of the first bag, a row a class. Framed: what CPL picked, numbered in order."
        figure = plots.picked_images(task.features.images[trace.rows].numpy(), trace.labels, trace.picks, names)
        shown.append(Panel("picked-images", "Picked images", caption, figure, wide=True, dense=True))
    if min(trace.features.shape) > 1:  # a plane needs two items and two features
        caption = "The first bag's features by t-SNE, coloured by class, which the model does not see; picks in order."
        tsne = TSNE(perplexity=min(30.0, (trace.size - 1) / 3), init="pca", random_state=0)
        figure = plots.embedding(tsne.fit_transform(trace.features), trace.labels, trace.picks, names)
        shown.append(Panel("embedding", "Embedding", caption, figure))
    caption = (
        "What having picked i adds to the logit of j, sorted by class: blue blocks on the diagonal suppress the rest "
        "of a class once one of it is picked."
    )
    if model.method.head.kind != "lowrank":  # type: ignore[union-attr]
        caption += " Shown is the effect of a first pick; later ones depend on the picks before."
    shown.append(
        Panel("interaction", "Interaction W", caption, plots.interaction(trace.W, trace.labels, names), dense=True)
    )
    return shown


@torch.inference_mode()
def bag_explorer(task: SubsetsTask, model: SubsetsModel, knob: float | None) -> Explorer:
    """The bag that the report shows as solved, its items as images where there are any, named by their class."""
    bag, features = example_bags(task, model, knob)[0][0], task.features
    labels = [features.class_names[label] if label >= 0 else "" for label in bag.labels[0].tolist()]
    images = None if features.images is None else features.images[bag.rows[0].cpu()].numpy()
    title = f"A bag of {int(bag.mask.sum())} items of {int((bag.target >= 0).sum())} classes"
    return explorer(
        model.method, model.encode(bag), bag.mask, model.max_len, knob, items=images, labels=labels, title=title
    )


def _steps(trace: Trace, names: tuple[str, ...], share: float) -> Panel:
    solved = trace.hit == trace.classes == len(trace.picks)
    caption = (
        f"{len(trace.picks)} picks from {trace.size} items of {trace.classes} classes, {trace.hit} of them hit; "
        f"{share:.0%} of {LOOKED_AT} such test bags are solved, every class picked exactly once. After each pick the "
        "candidates of its class lose their probability, until the stop wins. The label marks what is picked next, "
        "triangles what was picked before."
    )
    title = f"Step by step: a bag that is {'' if solved else 'not '}solved"
    figure = plots.selection_steps(trace.probabilities, trace.picks, trace.labels, names)
    return Panel("selection-steps" if solved else "selection-steps-failed", title, caption, figure, wide=True)


@torch.inference_mode()
def reliability(task: SubsetsTask, model: SubsetsModel, knob: float | None) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """The probability of going on and whether the pick is of a new class; that of the stop and whether none is left.

    At every step of the selections from some of the reported bags, those at which the model stops included.
    """
    bags = next(iter(task.reported.split(SWEEP_BAGS)))
    pot = model.method.potentials(model.encode(bags), bags.mask)
    picks = cast(Stepwise, model.method).pick(pot, model.max_len, knob).indices
    stop = prefix_logits(pot, picks.unsqueeze(1), Rules(pot)).squeeze(1).softmax(-1)[..., -1]  # (B, T+1)
    picked = picks >= 0
    label = bags.labels.gather(1, picks.clamp(min=0)).masked_fill(~picked, -1)  # (B, T)
    new = torch.stack([~(label[:, :t] == label[:, t : t + 1]).any(1) for t in range(label.shape[1])], 1) & picked
    covered = F.pad(new.cumsum(1), (1, 0)) == (bags.target >= 0).sum(-1, keepdim=True)  # (B, T+1)
    asked = F.pad(picked, (1, 0), value=True)
    asked[:, model.max_len :] = False  # there is no other choice
    going_on = array(1 - stop[:, :-1][picked]), array(new[picked].float())
    return going_on, (array(stop[asked]), array(covered[asked].float()))


def reliability_panel(restored: Mapping[str, Any]) -> Panel:
    """How far the probabilities of going on and of stopping are to be trusted."""
    found = {name: reliability(*run) for name, run in restored.items()}
    curves = {
        "going on": {n: pair for n, (pair, _) in found.items()},
        "stop": {n: pair for n, (_, pair) in found.items()},
    }
    caption = (
        f"At every step of the selections from {SWEEP_BAGS} of the reported bags, in tenths. Left: the probability "
        "of going on, and how often the next pick is of a new class. Right: the probability of the stop, and how often "
        "all classes are covered. On the diagonal a probability means what it says."
    )
    return Panel("reliability", "Reliability of steps and stop", caption, plots.reliability(curves, COLOURS), wide=True)


def trade(task: SubsetsTask, model: SubsetsModel, knob: float) -> plots.Trade:
    """Recall and precision on some of the reported bags as the knob varies."""
    bags = next(iter(task.reported.split(SWEEP_BAGS)))
    knobs = sorted({*model.method.knobs[:: 2 if isinstance(model.method, Stepwise) else 1], knob})
    scores = task.evaluate(model, bags, tuple(knobs))
    pairs = np.array([[scores[value]["clu_rec"], scores[value]["clu_prec"]] for value in knobs])
    pairs = pairs[pairs[:, 0] > 0]  # without picks precision is undefined
    return plots.Trade(pairs[:, 0], pairs[:, 1], (scores[knob]["clu_rec"], scores[knob]["clu_prec"]))


def trade_panel(restored: Mapping[str, Any], reference: Row | None) -> Panel:
    """Precision and recall of restored runs, one a method; ``reference`` is the table's row of k-Means."""
    trades = {METHODS[method]: trade(task, model, knob) for method, (task, model, knob) in restored.items()}
    if reference:
        point = np.array([reference["clu_rec"]]), np.array([reference["clu_prec"]])
        trades = {REFERENCE: plots.Trade(*point, (reference["clu_rec"], reference["clu_prec"])), **trades}
    tasks = [task for task, _, _ in restored.values()]
    seeds = ", ".join(map(str, sorted({task.config.seed for task in tasks})))
    bags = min(SWEEP_BAGS, len(tasks[0].reported))
    caption = (
        f"One run of each method, seed {seeds}, on {bags} of the reported bags, so that the marks need not be "
        "the means of the table. Each line is a method as its threshold (BCE, Hungarian) or its stop (CPL, pointer) "
        "varies; the large mark is the value that was chosen. Grey: equal F1."
    )
    return Panel("precision-recall", "Precision and recall", caption, plots.precision_recall(trades, COLOURS))

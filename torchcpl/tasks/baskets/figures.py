"""Figures of the baskets task: pairwise effects, a growing basket, likelihood by size."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from torchcpl.plots import METHODS as COLOURS
from torchcpl.plots import baskets as draw
from torchcpl.report import Panel
from torchcpl.sets import complete, next_probs
from torchcpl.tasks.baskets.methods import CPLSets, SetModel
from torchcpl.tasks.baskets.task import METHODS, BasketsTask, log_likelihoods
from torchcpl.tasks.figures import array

ITEMS = 24  # in the figure of pairs: the most frequent ones
GROWN, CHOICES = 5, 5  # items of the basket that grows, and choices shown at every step


def short(name: str, length: int = 34) -> str:
    """The beginning of an item's name, without its department."""
    name = name.split(" : ")[0].split(": ")[0]
    return name if len(name) <= length else name[: length - 1].rstrip(" ,") + "…"


@torch.no_grad()
def pair_effects(model: CPLSets) -> Tensor:
    """(N, N) how having picked i, alone, changes the logit of j, beyond what i does to all and all do to j."""
    W = model.potentials().interaction.dense()[0]
    return W - W.mean(0, keepdim=True) - W.mean(1, keepdim=True) + W.mean()


def item_panels(model: CPLSets, task: BasketsTask) -> list[Panel]:
    """The learned W between the most frequent items, and a basket growing."""
    names = [short(name) for name in task.baskets.names]
    most = task.frequency.argsort(descending=True)[:ITEMS]
    W = pair_effects(model)[most][:, most]
    caption = (
        "Having picked the item of a column, how much likelier (red) or less likely (blue) is that of a row, beyond "
        "what either does on average; the most frequent items, those that go together side by side."
    )
    figure = draw.pair_matrix(array(W), [names[i] for i in most.tolist()])
    pairs = Panel("pairs", "Complements and substitutes", caption, figure, wide=True)
    caption = (
        "The likeliest next choices, given what is in the basket so far in no particular order; the likeliest item is "
        "then added."
    )
    figure = draw.growing_basket(*growth(model, task, names))
    return [pairs, Panel("growing", "A basket grows", caption, figure, wide=True)]


@torch.no_grad()
def growth(model: CPLSets, task: BasketsTask, names: list[str]) -> tuple[list[str], list[list[tuple[str, float]]]]:
    """The most frequent item and what is added to it, step by step, and the likeliest choices at each step."""
    pot = model.potentials()
    start, size = task.frequency.argmax().view(1, 1), min(GROWN, pot.num_candidates)
    whole = complete(pot, start, size, min_len=size).indices  # (1, T)
    choices = []
    for count in range(1, whole.shape[1] + 1):
        probabilities = next_probs(pot, whole[:, :count])[0]  # (N+1,), the stop last
        best = probabilities.topk(min(CHOICES, len(probabilities)))
        said = [names[i] if i < len(names) else "(stop)" for i in best.indices.tolist()]
        choices.append(list(zip(said, best.values.tolist(), strict=True)))
    return [names[i] for i in whole[0].tolist()], choices


def size_panel(models: Mapping[str, SetModel], task: BasketsTask) -> Panel:
    """Mean log-likelihood of the test baskets of each size."""
    size = (task.reported >= 0).sum(-1)
    sizes = [k for k in size.unique().tolist() if int((size == k).sum()) >= 10]
    curves = {}
    for name, model in models.items():
        values, _ = log_likelihoods(model, task.reported)
        curves[name] = [float(values[size == k].mean()) for k in sizes]
    caption = "Mean log P of the test baskets of each size with at least ten of them, less that of the first method."
    figure = draw.by_size(sizes, curves, {METHODS[method]: COLOURS[method] for method in METHODS})
    return Panel("sizes", "Likelihood by size", caption, figure)

"""The paper's toy example: two valid answers, {a} and {b, c}, and two hybrid items, d and e, that are in neither.

A matching loss prefers the hybrid {d, e}, close to both answers and equal to none; CPL commits to one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import permutations

import torch

from torchcpl.decoding import greedy
from torchcpl.distribution import ContextualPlackettLuce
from torchcpl.interactions import Dense
from torchcpl.losses import subset_nll
from torchcpl.potentials import Potentials
from torchcpl.provenance import run_info
from torchcpl.tables import Column, Table

ITEMS = "abcde"
ANSWERS = ("a", "bc")  # each with probability one half
CANDIDATES = ("a", "bc", "de")  # the predictions that the paper compares

_COSTS = {"ad": Fraction(1, 4), "ae": Fraction(1, 4), "bd": Fraction(1, 3), "ce": Fraction(1, 3)}


def item_cost(x: str, y: str) -> Fraction:
    """Δ(x, y): 0 for the same item, ¼ and ⅓ for the partial matches, 1 for all others."""
    return Fraction(0) if x == y else _COSTS.get("".join(sorted(x + y)), Fraction(1))


def matching_cost(prediction: str, answer: str) -> Fraction:
    """The least cost of matching two sets; an unmatched item costs 1.

    >>> matching_cost("de", "bc")
    Fraction(2, 3)
    """
    few, many = sorted((prediction, answer), key=len)
    matched = min(sum(map(item_cost, few, order), Fraction(0)) for order in permutations(many, len(few)))
    return matched + len(many) - len(few)


def expected_cost(prediction: str) -> Fraction:
    """The mean over the two answers.

    >>> [str(expected_cost(p)) for p in ("a", "bc", "de")]
    ['1', '1', '23/24']
    """
    return sum((matching_cost(prediction, answer) for answer in ANSWERS), Fraction(0)) / len(ANSWERS)


def paper_potentials(first: str = "a") -> Potentials:
    """The paper's θ and W, in which a and b tie for the first pick; ``first`` breaks the tie."""
    unary = torch.tensor([0.5, 0.5, 0.0, 0.0, 0.0])
    unary[ITEMS.index(first)] += 1e-3
    W = torch.zeros(5, 5)  # W[j, i]: the effect on j of having picked i
    a, b, c = 0, 1, 2
    W[1:, a] = -1
    W[c, b] = 1
    W[a, b] = W[a, c] = -1
    return Potentials(unary[None], torch.tensor([0.1]), Dense(W[None]))


def names(indices: Sequence[int]) -> str:
    """Picks as a set: [2, 1] → "bc"."""
    return "".join(sorted(ITEMS[i] for i in indices if i >= 0))


def train_cpl(steps: int = 500, batch: int = 256, seed: int = 0) -> Potentials:
    """θ, W and stop of a CPL trained on samples of the ambiguous target."""
    generator = torch.Generator().manual_seed(seed)
    answers = torch.tensor([[0, -1], [1, 2]])
    unary, stop, W = (torch.zeros(shape, requires_grad=True) for shape in ((1, 5), (1,), (1, 5, 5)))
    optimizer = torch.optim.Adam([unary, stop, W], lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)  # averages out the sampling noise
    for _ in range(steps):
        pot = Potentials(unary.expand(batch, -1), stop.expand(batch), Dense(W.expand(batch, -1, -1)))
        target = answers[torch.randint(2, (batch,), generator=generator)]  # (B, 2), one of the two each
        loss = subset_nll(pot, target, 2, per_step=False, generator=generator)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return Potentials(unary.detach(), stop.detach(), Dense(W.detach()))


def train_matching(steps: int = 2000, batch: int = 64, seed: int = 0) -> dict[str, float]:
    """The probability of each candidate prediction after training on the matching cost of single samples."""
    generator = torch.Generator().manual_seed(seed)
    cost = torch.tensor([[float(matching_cost(p, answer)) for answer in ANSWERS] for p in CANDIDATES])  # (3, 2)
    logits = torch.zeros(len(CANDIDATES), requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.1)
    for _ in range(steps):
        shown = torch.randint(2, (batch,), generator=generator)
        loss = (logits.softmax(0) @ cost[:, shown]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return dict(zip(CANDIDATES, logits.softmax(0).tolist(), strict=True))


def set_probability(pot: Potentials, items: str) -> float:
    """P(set) of exactly these items, in any order."""
    picks = torch.tensor([[ITEMS.index(item) for item in items]])
    return float(ContextualPlackettLuce(pot).set_log_prob(picks).exp())


def toy_table() -> Table:
    """A row for each candidate prediction: its matching cost, and its probability under three predictors."""
    decoded = {names(greedy(paper_potentials(first)).tolist()[0]) for first in "ab"}
    learned, matching = train_cpl(), train_matching()
    rows = [
        {
            "prediction": "{" + ", ".join(candidate) + "}",
            "valid": "yes" if candidate in ANSWERS else "no",
            "expected_cost": str(expected_cost(candidate)),
            "matching": round(matching[candidate], 4),
            "decoded": "yes" if candidate in decoded else "never",
            "cpl": round(set_probability(learned, candidate), 4),
        }
        for candidate in CANDIDATES
    ]
    columns = (
        Column("prediction", "Prediction"),
        Column("valid", "Valid"),
        Column("expected_cost", "E[matching cost]"),
        Column("matching", "P, trained on matching", 4),
        Column("decoded", "Decoded by the paper's θ and W"),
        Column("cpl", "P, CPL trained", 4),
    )
    notes = (
        "Each training example shows one of the two valid answers.",
        "Matching prefers the hybrid {d, e}, which is never right.",
    )
    return Table("Two valid answers, one hybrid", columns, rows, (), notes, run_info(seeds=[0], device="cpu"))

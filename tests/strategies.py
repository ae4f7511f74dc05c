"""Hypothesis strategies: small batches of potentials of every kind, each with its rows for the oracle."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray
from oracle import (
    Limits,
    Row,
    complete,
    context_effect,
    coverage_effect,
    everything,
    feasible,
    latest_effect,
    matrix_effect,
)
from torch import Tensor

import torchcpl as cpl

SET_KINDS = ("dense", "densecoverage", "lowrank", "contextual", "coverage")
SETS = tuple(kind + stop for kind in SET_KINDS for stop in ("", "+stop"))
KINDS = (*SETS, "recent", "recent+stop")  # of the latter two the order of the picks matters
PARTS_OF = (
    *("W", "cover", "stop_row", "keys", "values", "stop_key"),
    *("cover_keys", "cover_values", "cover_offset", "last_keys", "last_values", "last_stop_key"),
)  # the tensors an interaction may have
PAIRS = ("W", "cover")  # those of them that are (B, N, N)
Array = NDArray[np.float64]

MIX = np.array([[0.7, -0.4, 0.2], [0.1, 0.5, -0.9], [-0.3, 0.8, 0.6]])
HIDDEN = len(MIX)


def torch_network(total: Tensor, count: Tensor) -> Tensor:
    """A fixed network that mixes, bends and counts: no sum of effects of single picks gives the same."""
    mix = torch.as_tensor(MIX, dtype=total.dtype, device=total.device)
    return torch.tanh(total @ mix) + 0.25 * total + 0.5 * count.unsqueeze(-1)


def unchanged(total: list[float], count: int) -> list[float]:
    """The network that does nothing."""
    return total


def plain_network(total: list[float], count: int) -> list[float]:
    """The same in plain Python."""
    mixed = [sum(total[r] * MIX[r][c] for r in range(HIDDEN)) for c in range(HIDDEN)]
    return [math.tanh(m) + 0.25 * t + 0.5 * count for m, t in zip(mixed, total, strict=True)]


@dataclass
class Case:
    """A batch of potentials and what the oracle knows of its rows."""

    pot: cpl.Potentials
    rows: list[Row]
    kind: str

    def __repr__(self) -> str:
        parts = [f"unary={self.pot.unary.tolist()}", f"stop={self.pot.stop.tolist()}", f"mask={self.pot.mask.tolist()}"]
        return f"Case({self.kind}, {', '.join(parts)}, {vars(self.pot.interaction)})"

    @property
    def size(self) -> int:
        return self.pot.num_candidates


def build(
    kind: str, unary: Array, stop: Array, mask: NDArray[np.bool_], fill: Callable[[tuple[int, ...]], Array]
) -> Case:
    """Potentials of ``kind`` with parameters from ``fill(shape)``, for the library and for the oracle."""
    batch, n = unary.shape
    live = kind.endswith("+stop")
    interaction: cpl.Interaction
    effects = []
    if kind.startswith("dense"):
        W = fill((batch, n, n))
        stop_row = fill((batch, n)) if live else None
        covers = kind.startswith("densecoverage")
        made = cpl.DenseCoverage if covers else cpl.Dense
        interaction = made(torch.tensor(W), None if stop_row is None else torch.tensor(stop_row))
        for b in range(batch):
            row = None if stop_row is None else stop_row[b].tolist()
            base = matrix_effect((0 * W if covers else W)[b].tolist(), row)
            effects.append(coverage_effect(base, W[b].tolist()) if covers else base)
    else:
        keys, values = fill((batch, n, HIDDEN)), fill((batch, n, HIDDEN))
        stop_key = fill((batch, HIDDEN)) if live else None
        torch_stop = None if stop_key is None else torch.tensor(stop_key)
        plain: Callable[[list[float], int], list[float]] = unchanged
        cover_keys, cover_values, offset = keys, values, unary[:, :0].sum(1)  # or those of the latest pick
        last_stop: Array | None = None
        if kind.startswith("lowrank"):
            interaction = cpl.LowRank(torch.tensor(keys), torch.tensor(values), torch_stop)
        elif kind.startswith("coverage"):
            cover_keys, cover_values, offset = fill((batch, n, 2)), fill((batch, n, 2)), fill((batch,))
            cover = (torch.tensor(part) for part in (cover_keys, cover_values, offset))
            interaction = cpl.Coverage(torch.tensor(keys), torch.tensor(values), *cover, torch_stop)
        elif kind.startswith("recent"):
            cover_keys, cover_values = fill((batch, n, 2)), fill((batch, n, 2))
            last = [torch.tensor(part) for part in (cover_keys, cover_values)]
            last_stop = fill((batch, 2)) if live else None
            latter = None if last_stop is None else torch.tensor(last_stop)
            interaction = cpl.Recent(torch.tensor(keys), torch.tensor(values), *last, torch_stop, latter)
        else:
            interaction = cpl.Contextual(torch.tensor(keys), torch.tensor(values), torch_network, torch_stop)
            plain = plain_network
        for b in range(batch):
            key = None if stop_key is None else stop_key[b].tolist()
            effect = context_effect(keys[b].tolist(), values[b].tolist(), plain, key)
            if kind.startswith("coverage"):
                products = cover_keys[b] @ cover_values[b].T / math.sqrt(cover_keys.shape[2])
                effect = coverage_effect(effect, (products + offset[b]).tolist())
            if kind.startswith("recent"):
                key = None if last_stop is None else last_stop[b].tolist()
                latest = context_effect(cover_keys[b].tolist(), cover_values[b].tolist(), unchanged, key)
                effect = latest_effect(effect, latest)
            effects.append(effect)
    pot = cpl.Potentials(torch.tensor(unary), torch.tensor(stop), interaction, torch.tensor(mask))
    rows = [Row(unary[b].tolist(), float(stop[b]), effects[b], mask[b].tolist()) for b in range(batch)]
    return Case(pot, rows, kind)


def fixed_case(kind: str, seed: int, batch: int, n: int, scale: float = 1.0, padded: bool = False) -> Case:
    """One case without hypothesis, for tests of samplers."""
    rng = np.random.default_rng(seed)
    mask = np.ones((batch, n), dtype=bool)
    if padded:
        mask = rng.random((batch, n)) < 0.7

    def fill(shape: tuple[int, ...]) -> Array:
        return scale * rng.standard_normal(shape)

    return build(kind, fill((batch, n)), fill((batch,)), mask, fill)


MANNERS: dict[str, Callable[[Array], Array]] = {
    "ordinary": lambda values: values,
    "ties": lambda values: values.round().clip(-1, 1),
    "large": lambda values: 8 * values,
}


@st.composite
def cases(
    draw: Any, max_n: int = 5, max_b: int = 3, manners: tuple[str, ...] = tuple(MANNERS), kinds: tuple[str, ...] = KINDS
) -> Case:
    """Every kind, 1 … ``max_n`` candidates, random masks (all-padded rows too), three manners of values.

    They are ordinary, or few and equal (ties), or large (one choice is all but certain).
    """
    kind = draw(st.sampled_from(kinds))
    n = draw(st.integers(1, max_n))
    batch = draw(st.integers(1, max_b))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    manner = MANNERS[draw(st.sampled_from(manners))]

    def fill(shape: tuple[int, ...]) -> Array:
        return manner(rng.standard_normal(shape))

    if draw(st.booleans()):
        mask = np.ones((batch, n), dtype=bool)
    else:
        mask = np.array(draw(st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=batch, max_size=batch)))
    return build(kind, fill((batch, n)), fill((batch,)), mask, fill)


@st.composite
def orders(draw: Any, case: Case, extra: int = 2) -> Tensor:
    """(B, T) sequences of real candidates of every length, the rest −1; T may exceed what is needed, or be 0."""
    rows = []
    for row in case.rows:
        real = [i for i in range(row.size) if row.mask[i]]
        picks = draw(st.permutations(real)) if real else []
        rows.append(list(picks[: draw(st.integers(0, len(real)))]))
    width = max(len(picks) for picks in rows) + draw(st.integers(0, extra))
    return torch.tensor([picks + [-1] * (width - len(picks)) for picks in rows], dtype=torch.long).view(
        len(rows), width
    )


def unpad(order: Tensor) -> list[list[int]]:
    """(B, T) to lists without the padding."""
    return [[i for i in row if i >= 0] for row in order.tolist()]


@dataclass
class Asked:
    """Options of a decoder, as the library takes them and as the oracle does."""

    options: dict[str, Any] = field(default_factory=dict)
    limits: list[Limits] = field(default_factory=list)


def odd_neighbours(history: cpl.History) -> Tensor:
    """A rule of one's own, on order and count: no pick right after its successor, and no stop after one pick."""
    n = history.selected.shape[-1]
    item = torch.arange(n)
    allowed = (item + 1) != history.last.unsqueeze(-1)
    stop = history.count != 1
    return torch.cat([allowed, stop.unsqueeze(-1)], -1)


def plain_odd_neighbours(size: int) -> Callable[[tuple[int, ...]], tuple[list[bool], bool]]:
    return lambda picks: ([not picks or i + 1 != picks[-1] for i in range(size)], len(picks) != 1)


def lowest_first(history: cpl.History) -> Tensor:
    """A rule without a say on the stop: only indices above the last."""
    return torch.arange(history.selected.shape[-1]) > history.last.unsqueeze(-1)


def plain_lowest_first(size: int) -> Callable[[tuple[int, ...]], tuple[list[bool], bool]]:
    return lambda picks: ([not picks or i > picks[-1] for i in range(size)], True)


PARTS = ("max_len", "min_len", "stop_bias", "forbid", "require", "adjacent", "budget", "callable")


@st.composite
def demands(draw: Any, case: Case, parts: tuple[str, ...] = PARTS, possible: bool = True) -> Asked:
    """Any few of ``parts`` together; masks and costs for all rows alike or each its own.

    ``possible``: drop what makes a row impossible to satisfy, the last named first.
    """
    n, batch = case.size, len(case.rows)
    chosen = draw(st.lists(st.sampled_from(parts), max_size=4, unique=True))
    drawn = {part: draw(PART_VALUES[part](n, batch)) for part in chosen}
    while possible:
        asked = assemble(case, drawn)
        if all(satisfiable(row, limit) for row, limit in zip(case.rows, asked.limits, strict=True)):
            break
        del drawn[next(part for part in ("require", "budget", "min_len") if part in drawn)]
    return assemble(case, drawn)


def satisfiable(row: Row, limit: Limits) -> bool:
    """Whether the row has a selection that meets all demands; ``min_len`` may be cut short by neighbours or a veto."""
    if not feasible(row, limit):
        return False
    if limit.require and limit.adjacent is not None:
        return any(complete(row, limit, order) for order in everything(row, limit))
    return True


def _per_candidate(elements: Any) -> Callable[[int, int], Any]:
    """One list for all rows, or a list of lists."""

    def values(n: int, batch: int) -> Any:
        one = st.lists(elements, min_size=n, max_size=n)
        return one | st.lists(one, min_size=batch, max_size=batch)

    return values


def _per_row(elements: Any) -> Callable[[int, int], Any]:
    """One number, or a list of one a row."""
    return lambda n, batch: elements | st.lists(elements, min_size=batch, max_size=batch)


def _matrix(n: int, batch: int) -> Any:
    shapes = st.sampled_from([(n, n), (batch, n, n)])
    return st.builds(
        lambda seed, shape: np.less(np.random.default_rng(seed).random(shape), 0.6).tolist(),
        st.integers(0, 2**16),
        shapes,
    )


def _priced(n: int, batch: int) -> Any:
    cost = _per_candidate(st.sampled_from([0, 10, 10, 20, 30, 70]))(n, batch)
    return st.tuples(cost, _per_row(st.sampled_from([0, 10, 30, 30, 60, 100]))(n, batch))


PART_VALUES: dict[str, Callable[[int, int], Any]] = {
    "max_len": lambda n, batch: st.integers(0, n + 1),
    "min_len": lambda n, batch: st.integers(0, n),
    "stop_bias": _per_row(st.floats(-3, 3)),
    "forbid": _per_candidate(st.sampled_from([False, False, True])),
    "require": lambda n, batch: st.tuples(
        _per_candidate(st.sampled_from([False, False, True]))(n, batch), st.booleans()
    ),
    "adjacent": _matrix,
    "budget": _priced,
    "callable": lambda n, batch: st.sampled_from(
        [(odd_neighbours, plain_odd_neighbours), (lowest_first, plain_lowest_first)]
    ),
}


def assemble(case: Case, drawn: dict[str, Any]) -> Asked:
    """The options as the library takes them, in the order drawn, and the same for the oracle."""
    n, batch = case.size, len(case.rows)
    limits = [Limits() for _ in range(batch)]
    options: dict[str, Any] = {}
    constraints: list[Any] = []

    def each(value: Any, depth: int) -> list[Any]:
        """Per row what is given per row (lists ``depth`` deep) or once for all."""
        own = value
        for _ in range(depth):
            own = own[0] if isinstance(own, list) and own else None
        return list(value) if own is not None else [value] * batch

    for part, value in drawn.items():
        if part in ("max_len", "min_len"):
            options[part] = value
        elif part == "stop_bias":
            options[part] = torch.tensor(value, dtype=torch.float64) if isinstance(value, list) else value
            for limit, bias in zip(limits, each(value, 1), strict=True):
                limit.stop_bias = bias
        elif part == "forbid":
            constraints.append(cpl.Forbid(torch.tensor(value)))
            for limit, marks in zip(limits, each(value, 2), strict=True):
                limit.forbid = {i for i in range(n) if marks[i]}
        elif part == "require":
            value, first = value
            constraints.append(cpl.Require(torch.tensor(value), first))
            for limit, marks in zip(limits, each(value, 2), strict=True):
                limit.require, limit.first = {i for i in range(n) if marks[i]}, first
        elif part == "adjacent":
            constraints.append(cpl.Adjacent(torch.tensor(value)))
            for limit, matrix in zip(limits, each(value, 3), strict=True):
                limit.adjacent = matrix
        elif part == "budget":
            # Pennies for the oracle, pounds for the library: 0.1 + 0.2 must fit into 0.3.
            cost, total = value
            pounds = torch.tensor(cost, dtype=torch.float64) / 100
            most = torch.tensor(total, dtype=torch.float64) / 100 if isinstance(total, list) else total / 100
            constraints.append(cpl.Budget(pounds, most))
            for limit, prices, most_pennies in zip(limits, each(cost, 2), each(total, 1), strict=True):
                limit.budgets = [(prices, most_pennies)]
        else:
            rule, plain = value
            constraints.append(rule)
            for limit in limits:
                limit.veto = plain(n)
    for limit in limits:
        limit.max_len = drawn.get("max_len")
        limit.min_len = drawn.get("min_len", 0)
    if constraints:
        options["constraints"] = constraints
    return Asked(options, limits)

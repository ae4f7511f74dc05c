"""Constraints: each alone and all together, the impossible refused before anything is decoded."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import Case, cases, demands, fixed_case, satisfiable

import torchcpl as cpl

DECODERS: dict[str, Any] = {
    "greedy": lambda pot, **options: cpl.greedy(pot, **options),
    "sample": lambda pot, **options: cpl.sample(pot, 8, generator=torch.Generator().manual_seed(0), **options),
    "beam": lambda pot, **options: cpl.beam(pot, 8, 8, **options),
    "stochastic_beam": lambda pot, **options: cpl.stochastic_beam(
        pot, 8, generator=torch.Generator().manual_seed(0), **options
    ),
}


def selections(name: str, case: Case, **options: Any) -> list[list[tuple[int, ...]]]:
    """What a decoder selects, as sequences for each row; dead beams left out."""
    found = DECODERS[name](case.pot, **options)
    indices, log_prob = found.indices, found.log_prob
    if name == "greedy":
        indices, log_prob = indices.unsqueeze(0), log_prob.unsqueeze(0)
    if name == "beam":
        indices, log_prob = indices.transpose(0, 1), log_prob.transpose(0, 1)
    return [
        [tuple(i for i in indices[s, b].tolist() if i >= 0) for s in range(len(indices)) if log_prob[s, b] > -math.inf]
        for b in range(len(case.rows))
    ]


@settings(max_examples=150)
@given(st.data())
def test_impossible_is_refused_and_possible_is_not(data: Any) -> None:
    """An error if and only if no set meets all demands, and it names the first such row."""
    case = data.draw(cases())
    asked = data.draw(
        demands(case, parts=("max_len", "min_len", "forbid", "require", "budget", "stop_bias"), possible=False)
    )
    bad = [
        b for b, (row, limits) in enumerate(zip(case.rows, asked.limits, strict=True)) if not satisfiable(row, limits)
    ]
    if not bad:
        cpl.greedy(case.pot, **asked.options)
        return
    limits = asked.limits[0]
    with pytest.raises(ValueError, match=r"cannot be satisfied|min_len") as error:
        cpl.greedy(case.pot, **asked.options)
    if limits.min_len > limits.longest(case.rows[0]):
        assert "min_len: expected at most min(max_len, N)" in str(error.value)
    else:
        assert any(f"row {b} cannot be satisfied" in str(error.value) for b in bad), str(error.value)


@settings(max_examples=80)
@given(st.data())
def test_what_neighbours_make_impossible_is_refused_only_if_it_is(data: Any) -> None:
    """Required candidates that no walk connects; whoever is refused has no complete selection."""
    case = data.draw(cases())
    asked = data.draw(demands(case, parts=("adjacent", "require", "forbid", "max_len"), possible=False))
    rows = list(zip(case.rows, asked.limits, strict=True))
    if not all(oracle.feasible(row, limits) for row, limits in rows):
        return
    walkable = [any(oracle.complete(row, limits, s) for s in oracle.everything(row, limits)) for row, limits in rows]
    refused = ""
    try:
        cpl.greedy(case.pot, **asked.options)
    except ValueError as error:
        refused = str(error)
    named = [b for b in range(len(rows)) if f"row {b} cannot be satisfied" in refused]
    assert bool(refused) == bool(named), refused
    assert not any(walkable[b] for b in named), refused


@pytest.mark.parametrize("decoder", DECODERS)
@settings(max_examples=25)
@given(data=st.data())
def test_every_decoder_keeps_to_every_demand(decoder: str, data: Any) -> None:
    case = data.draw(cases(max_n=4))
    asked = data.draw(demands(case))
    for row, limits, found in zip(case.rows, asked.limits, selections(decoder, case, **asked.options), strict=True):
        support = oracle.everything(row, limits)
        assert found
        assert all(sequence in support for sequence in found)


@pytest.mark.parametrize("decoder", DECODERS)
@settings(max_examples=25)
@given(data=st.data())
def test_required_and_affordable_and_long_enough_always(decoder: str, data: Any) -> None:
    """Without neighbours and rules of one's own there is no dead end: every selection is complete."""
    case = data.draw(cases(max_n=4))
    asked = data.draw(demands(case, parts=("max_len", "min_len", "forbid", "require", "budget")))
    for row, limits, found in zip(case.rows, asked.limits, selections(decoder, case, **asked.options), strict=True):
        assert all(oracle.complete(row, limits, sequence) for sequence in found)


# ------------------------------------------------------------------------------------- each in its forms

SMALL = fixed_case("dense", 0, 2, 4)
ROUND_TRIP = [[1, 2], [2], [], [0, 1, 2]]
ROUND_TRIP_MATRIX = [[False, True, True, False], [False, False, True, False], [False] * 4, [True, True, True, False]]


@pytest.mark.parametrize(
    "neighbours",
    [
        torch.tensor(ROUND_TRIP_MATRIX),
        np.array(ROUND_TRIP_MATRIX),
        ROUND_TRIP_MATRIX,
        torch.tensor(ROUND_TRIP_MATRIX).expand(2, 4, 4),
        torch.tensor([[1, 2, -1], [-1, 2, -1], [-1, -1, -1], [0, 1, 2]]),
        torch.tensor([[[1, 2, -1], [-1, 2, -1], [-1, -1, -1], [0, 1, 2]]] * 2),
        ROUND_TRIP,
        tuple(map(tuple, ROUND_TRIP)),
    ],
    ids=["matrix", "numpy", "bool lists", "batched matrix", "lists", "batched lists", "list of lists", "tuples"],
)
def test_adjacent_in_all_its_forms(neighbours: Any) -> None:
    d = cpl.ContextualPlackettLuce(SMALL.pot, constraints=[cpl.Adjacent(neighbours)])
    limits = oracle.Limits(adjacent=ROUND_TRIP_MATRIX)
    values = d.enumerate_support()
    for b, row in enumerate(SMALL.rows):
        support = oracle.everything(row, limits)
        for value, log_prob in zip(values[:, b].tolist(), d.log_prob(values)[:, b].tolist(), strict=True):
            sequence = tuple(i for i in value if i >= 0)
            assert log_prob == pytest.approx(support.get(sequence, -math.inf), abs=1e-10)


def test_adjacent_of_nobody_takes_one() -> None:
    forms: list[Any] = [[[], [], [], []], torch.zeros(4, 0, dtype=torch.long), torch.zeros(4, 4, dtype=torch.bool)]
    for neighbours in forms:
        selection = cpl.greedy(SMALL.pot, stop_bias=-50.0, constraints=[cpl.Adjacent(neighbours)])
        assert selection.lengths.tolist() == [1, 1]


def test_two_of_a_kind_add_up() -> None:
    """Both matrices must agree; forbidden and required accumulate; both budgets hold."""
    one = torch.ones(4, 4, dtype=torch.bool).triu()
    two = torch.ones(4, 4, dtype=torch.bool).tril(1)
    chain = cpl.greedy(SMALL.pot, stop_bias=-50.0, constraints=[cpl.Adjacent(one), cpl.Adjacent(two)])
    for picks in chain.tolist():
        assert all(b == a + 1 for a, b in pairwise(picks))
    marks = torch.eye(4, dtype=torch.bool)
    both = cpl.greedy(SMALL.pot, stop_bias=50.0, constraints=[cpl.Require(marks[0]), cpl.Require(marks[2])])
    assert both.mask()[:, [0, 2]].all()
    none = cpl.greedy(SMALL.pot, stop_bias=-50.0, constraints=[cpl.Forbid(marks[0]), cpl.Forbid(marks[2])])
    assert none.mask().tolist() == [[False, True, False, True]] * 2
    budgets = [cpl.Budget([1, 0, 1, 0], 1), cpl.Budget([0, 1, 0, 1], 0)]
    spent = cpl.greedy(SMALL.pot, stop_bias=-50.0, constraints=budgets)
    assert all(len(picks) == 1 and picks[0] in (0, 2) for picks in spent.tolist())


def test_several_budgets_are_all_kept() -> None:
    """Also where few pairs fit into both: short of ``min_len`` perhaps, over a budget never, and with mass one."""
    costs = torch.tensor([[3, 1, 2, 2], [1, 3, 2, 1]])
    options: dict[str, Any] = {"min_len": 2, "constraints": [cpl.Budget(costs[0], 4), cpl.Budget(costs[1], 4)]}
    d = cpl.ContextualPlackettLuce(SMALL.pot, **options)
    values = d.enumerate_support()
    log_probs = d.log_prob(values)
    assert log_probs.exp().sum(0).tolist() == pytest.approx([1, 1])
    for value, possible in zip(values[:, 0].tolist(), (log_probs[:, 0] > -math.inf).tolist(), strict=True):
        spent = costs[:, [i for i in value if i >= 0]].sum(1)
        assert not possible or (spent <= 4).all()


def test_a_rule_of_ones_own_and_the_stop_column() -> None:
    def pairs(history: cpl.History) -> torch.Tensor:
        """Even counts only: the stop is last."""
        everyone = torch.ones_like(history.selected)
        return torch.cat([everyone, (history.count % 2 == 0).unsqueeze(-1)], -1)

    limits = oracle.Limits(veto=lambda picks: ([True] * 4, len(picks) % 2 == 0))
    d = cpl.ContextualPlackettLuce(SMALL.pot, constraints=[pairs])
    values = d.enumerate_support()
    assert d.log_prob(values).exp().sum(0).tolist() == pytest.approx([1, 1])
    assert d.entropy().tolist() == pytest.approx([oracle.entropy(row, limits) for row in SMALL.rows])
    assert (cpl.sample(SMALL.pot, 100, constraints=[pairs]).lengths % 2 == 0).all()
    # With an odd number of candidates allowed in all, the last resort stops after them.
    odd = cpl.greedy(SMALL.pot, stop_bias=-50.0, max_len=3, constraints=[pairs])
    assert odd.lengths.tolist() == [3, 3]


def test_a_rule_sees_the_history() -> None:
    seen: list[cpl.History] = []

    def watch(history: cpl.History) -> torch.Tensor:
        seen.append(cpl.History(history.selected.clone(), history.last, history.count))
        return torch.ones_like(history.selected)

    selection = cpl.greedy(SMALL.pot, max_len=3, min_len=3, constraints=[watch])
    assert [h.count.tolist() for h in seen] == [[[t], [t]] for t in range(3)]
    assert seen[0].last.tolist() == [[-1], [-1]]
    assert seen[2].last.squeeze(1).equal(selection.indices[:, 1])
    for t, history in enumerate(seen):
        assert history.selected.sum(-1).squeeze(1).tolist() == [t, t]


def test_require_says_whether_it_was_met() -> None:
    """A dead end: the required one is out of reach once the walk has gone elsewhere."""
    require = cpl.Require(torch.tensor([False, False, True, False]))
    picked = torch.tensor([[True, False, True, False], [True, False, False, False]])
    assert require.met(picked).tolist() == [True, False]
    pot = cpl.Potentials(torch.tensor([[9.0, 0.0, 0.0]]), torch.zeros(1), cpl.Dense(torch.zeros(1, 3, 3)))
    wanted = cpl.Require(torch.tensor([False, True, False]))
    lost = cpl.greedy(pot, constraints=[wanted, cpl.Adjacent([[2], [0], []])])
    assert lost.tolist() == [[0, 2]]
    assert not wanted.met(lost.mask()).any()
    again = cpl.log_prob(pot, lost.indices, constraints=[wanted, cpl.Adjacent([[2], [0], []])])
    torch.testing.assert_close(again, lost.log_prob)


def test_require_met_names_what_it_cannot_compare() -> None:
    picked = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"Require\.mask: expected a bool per candidate of picked, \(2, 3\), got list"):
        cpl.Require([0, 1, 0]).met(picked)  # ~1 is no False
    with pytest.raises(ValueError, match=r"Require\.mask: expected a bool per candidate of picked, \(2, 3\), got list"):
        cpl.Require([True, False]).met(picked)
    with pytest.raises(ValueError, match=r"picked: expected a bool tensor \(\.\.\., N\)"):
        cpl.Require([True, False, True]).met(torch.tensor([[0, 1, -1]]))
    assert cpl.Require([[True, False, True], [False] * 3]).met(picked).tolist() == [True, True]


# ------------------------------------------------------------------------------- budgets, to the penny


@pytest.mark.parametrize(
    ("cost", "limit"),
    [
        ([0.1, 0.2, 9, 9], 0.3),
        (torch.tensor([0.1, 0.2, 9, 9]), 0.3),
        (torch.tensor([0.1, 0.2, 9, 9], dtype=torch.float64), 0.3),
        (np.array([0.1, 0.2, 9, 9]), 0.3),
        (np.array([0.1, 0.2, 9, 9], dtype=np.float32), np.float32(0.3)),
        (torch.tensor([[0.1, 0.2, 9, 9]] * 2), torch.tensor([0.3, 0.3])),
        ([0.7, 0.0, 9, 9], torch.tensor(0.7)),
        ([1, 2, 9, 9], 3),
        (torch.tensor([1, 2, 9, 9]), torch.tensor([3, 3])),
        ([0, 0, 1, 1], 0),
        ([0.1, 0.2, math.inf, math.inf], 0.3),
        ([1e9, 2e9, 3e9 + 2, 9e9], 3e9),
    ],
)
def test_a_budget_can_be_spent_to_the_last_penny(cost: Any, limit: Any) -> None:
    budget = cpl.Budget(cost, limit)
    first_two = [[True, True, False, False]] * 2
    require = cpl.Require(torch.tensor(first_two[0]))
    for options in ({"stop_bias": -50.0}, {"min_len": 2}, {"stop_bias": -50.0, "constraints": [require]}):
        given_options: dict[str, Any] = dict(options)
        constraints = [*given_options.pop("constraints", []), budget]
        assert cpl.greedy(SMALL.pot, constraints=constraints, **given_options).mask().tolist() == first_two


@pytest.mark.parametrize(
    ("cost", "limit"),
    [([0.1, 0.21, 9, 9], 0.3), ([1, 2, 9, 9], 2.99), ([1e9, 2e9 + 1, 4e9, 9e9], 3e9), ([3, 4, 5, 6], 6)],
)
def test_a_penny_too_much_is_too_much(cost: Any, limit: Any) -> None:
    budget = cpl.Budget(torch.tensor(cost, dtype=torch.float64), limit)
    assert (cpl.greedy(SMALL.pot, stop_bias=-50.0, constraints=[budget]).lengths == 1).all()
    with pytest.raises(ValueError, match="row 0 cannot be satisfied: the required picks and min_len cost at least"):
        cpl.greedy(SMALL.pot, min_len=2, constraints=[budget])


def test_hundreds_of_pennies() -> None:
    """Rounding of a long sum must not cost the last pick, nor give one away."""
    n = 300
    pot = cpl.Potentials(torch.zeros(1, n), torch.zeros(1), cpl.LowRank(torch.zeros(1, n, 1), torch.zeros(1, n, 1)))
    for cost in ([0.1] * n, torch.full((n,), 0.1)):
        selection = cpl.greedy(pot, stop_bias=-1e3, constraints=[cpl.Budget(cost, 25.0)])
        assert selection.lengths.item() == 250


def test_padded_candidates_cost_nothing_and_may_hold_anything() -> None:
    mask = torch.tensor([[True, True, False, False], [True, True, True, False]])
    pot = cpl.Potentials(SMALL.pot.unary, SMALL.pot.stop, SMALL.pot.interaction, mask)
    cost = torch.tensor([[1.0, 1.0, math.nan, -5.0], [1.0, 1.0, 1.0, math.inf]])
    selection = cpl.greedy(pot, stop_bias=-50.0, constraints=[cpl.Budget(cost, 2)])
    assert selection.lengths.tolist() == [2, 2]


def test_an_unlimited_budget_affords_anything() -> None:
    pot = fixed_case("dense", 0, 1, 3).pot
    for options in ({}, {"min_len": 3}):
        free = cpl.greedy(cpl.Potentials(pot.unary, pot.stop - 9, pot.interaction), **options)
        priced = cpl.greedy(
            cpl.Potentials(pot.unary, pot.stop - 9, pot.interaction),
            constraints=[cpl.Budget([math.inf, 0, 0], math.inf)],
            **options,
        )
        assert free.tolist() == priced.tolist()
        assert len(free.tolist()[0]) == 3

"""Refinement: each pick is the likeliest after all the others, by the rules of the oracle."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import Case, cases, demands, lowest_first

import torchcpl as cpl

DEMANDED = ("max_len", "min_len", "stop_bias", "forbid", "require", "budget")


def plain(row: oracle.Row, limits: oracle.Limits, picks: list[int], sweeps: int) -> tuple[list[int], float]:
    """The refined picks by the definition, and the least difference that decided between two candidates."""
    closest = math.inf
    for turn in range(sweeps * len(picks)):
        t = turn % len(picks)
        if picks[t] in limits.require:
            continue
        rest = [i for at, i in enumerate(picks) if at != t]
        logits = oracle.step_logits(row, limits, tuple(rest))[:-1]
        ranked = sorted((x for x in logits if x > -math.inf), reverse=True)
        closest = min([closest, *(a - b for a, b in pairwise(ranked))])
        best = max(range(row.size), key=lambda j: logits[j])
        picks = [*picks[:t], best, *picks[t + 1 :]]
    return picks, closest


@given(data=st.data())
def test_refinement_is_what_it_says(data: Any) -> None:
    case: Case = data.draw(cases())
    asked = data.draw(demands(case, parts=DEMANDED))
    sweeps = data.draw(st.integers(0, 2))
    before = cpl.greedy(case.pot, **asked.options)
    found = cpl.refine(case.pot, before, sweeps, **asked.options)
    assert found.indices.shape == before.indices.shape
    assert torch.equal(found.lengths, before.lengths)
    for row, limits, start, picks in zip(case.rows, asked.limits, before.tolist(), found.tolist(), strict=True):
        wanted, closest = plain(row, limits, start, sweeps)
        assert picks == wanted or closest < 1e-9  # equals by rounding
    exact = cpl.log_prob(case.pot, found.indices, **asked.options)
    torch.testing.assert_close(found.log_prob, exact, equal_nan=True)
    assert found.step_log_prob is not None
    assert torch.equal(found.step_log_prob == 0, found.step_log_prob.masked_fill(found.indices < 0, 0) == 0)


def test_a_pick_that_covers_two_groups_is_made_again() -> None:
    """Candidate 0 is the best alone, but once 1 and 2 stand for the two groups it adds less than 3."""
    W = torch.zeros(1, 4, 4)
    W[0, 0, 1] = W[0, 0, 2] = -2.0
    pot = cpl.Potentials(torch.tensor([[3.0, 2.0, 1.5, 1.0]]), torch.zeros(1), cpl.Dense(W))
    first = cpl.greedy(pot, 3)
    assert first.tolist() == [[0, 1, 2]]
    assert cpl.refine(pot, first, max_len=3).tolist() == [[3, 1, 2]]
    assert cpl.refine(pot, first, 0, max_len=3).log_prob.item() == pytest.approx(first.log_prob.item())
    must = cpl.Require(torch.tensor([True, False, False, False]))
    assert cpl.refine(pot, first, max_len=3, constraints=[must]).tolist() == [[0, 1, 2]]


def test_several_answers_at_once() -> None:
    torch.manual_seed(0)
    pot = cpl.CPLHead(8, kind="coverage")(torch.randn(3, 12, 8))
    beams = cpl.beam(pot, 4, max_len=5, min_len=3, num_return=4)
    found = cpl.refine(pot, beams, max_len=5, min_len=3)
    for r in range(4):
        one = cpl.refine(pot, beams.map(lambda part, r=r: part[:, r]), max_len=5, min_len=3)
        assert torch.equal(one.indices, found.indices[:, r])
        torch.testing.assert_close(one.log_prob, found.log_prob[:, r])


def test_nothing_to_refine() -> None:
    none = cpl.Potentials(torch.zeros(2, 0), torch.zeros(2), cpl.Dense(torch.zeros(2, 0, 0)))
    assert cpl.refine(none, cpl.greedy(none)).tolist() == [[], []]
    no_rows = cpl.Potentials(torch.zeros(0, 3), torch.zeros(0), cpl.Dense(torch.zeros(0, 3, 3)))
    assert cpl.refine(no_rows, cpl.greedy(no_rows)).tolist() == []
    stops = cpl.Potentials(torch.zeros(1, 3), torch.full((1,), 9.0), cpl.Dense(torch.zeros(1, 3, 3)))
    assert cpl.refine(stops, cpl.greedy(stops)).tolist() == [[]]


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        ((None,), {}, "selection: expected a Selection, got NoneType None"),
        ((-1,), {}, "sweeps: expected an integer of at least 0, got int -1"),
        ((1,), {"constraints": [cpl.Adjacent([[1], [0], []])]}, "constraints: expected Forbid, Require or Budget"),
        ((1,), {"constraints": [lowest_first]}, "constraints: expected Forbid, Require or Budget"),
    ],
)
def test_wrong_arguments(arguments: tuple[Any, ...], options: dict[str, Any], said: str) -> None:
    pot = cpl.Potentials(torch.zeros(1, 3), torch.zeros(1), cpl.Dense(torch.zeros(1, 3, 3)))
    given = (cpl.greedy(pot), *arguments) if arguments != (None,) else (None,)
    with pytest.raises(ValueError, match=said):
        cpl.refine(pot, *given, **options)


def test_picks_of_other_potentials_are_refused() -> None:
    pot = cpl.Potentials(torch.zeros(1, 3), torch.zeros(1), cpl.Dense(torch.zeros(1, 3, 3)))
    far = cpl.Selection(torch.tensor([[7]]), torch.tensor([1]), torch.zeros(1))
    with pytest.raises(ValueError, match=r"selection\.indices: expected indices in \[0, 3\)"):
        cpl.refine(pot, far)
    with pytest.raises(ValueError, match=r"selection\.indices: expected a long tensor of shape \(1, R, T\)"):
        cpl.refine(pot, cpl.Selection(torch.zeros(2, 1, dtype=torch.long), torch.ones(2), torch.zeros(2)))

"""Several answers with the probability of their modes, against enumeration."""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import permutations
from typing import Any

import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import KINDS, PARTS, cases, demands, fixed_case
from torch import Tensor

import torchcpl as cpl

TIGHT = 1e-9
EVERY = 80  # more than the sequences of four candidates


def sets_of(row: oracle.Row, limits: oracle.Limits) -> dict[frozenset[int], float]:
    """The probability of every set."""
    found: dict[frozenset[int], float] = defaultdict(float)
    for order, log_prob in oracle.everything(row, limits).items():
        found[frozenset(order)] += math.exp(log_prob)
    return dict(found)


def same_set(answers: Tensor) -> Tensor:
    ranked = answers.sort(-1).values
    return (ranked.unsqueeze(1) == ranked.unsqueeze(2)).all(-1)


@given(st.data())
def test_sets_are_the_likeliest_and_have_their_whole_probability(data: Any) -> None:
    case = data.draw(cases(max_n=4))
    asked = data.draw(demands(case, PARTS))
    count = data.draw(st.integers(1, 9))
    for same in ("set", same_set):  # merged in the search, and by the user's own rule
        sel = cpl.hypotheses(case.pot, count, same=same, num_beams=EVERY, **asked.options)
        assert sel.indices.shape[:2] == sel.log_prob.shape == (len(case.rows), count)
        for b, (row, limits) in enumerate(zip(case.rows, asked.limits, strict=True)):
            law = sets_of(row, limits)
            want = sorted((p for p in law.values() if p > 0), reverse=True)[:count]
            want += [0.0] * (count - len(want))
            torch.testing.assert_close(
                sel.log_prob[b].exp(), torch.tensor(want, dtype=torch.double), atol=TIGHT, rtol=TIGHT
            )
            picked = [frozenset(answer) for answer, p in zip(sel.tolist()[b], want, strict=True) if p > 0]
            assert len(set(picked)) == len(picked)
            for answer, p in zip(picked, want, strict=False):
                assert law[answer] == pytest.approx(p, abs=TIGHT)


@given(st.data())
def test_sequences_are_those_of_beam_search(data: Any) -> None:
    case = data.draw(cases(max_n=4, max_b=2))
    sel = cpl.hypotheses(case.pot, 5, same="sequence", num_beams=EVERY)
    for b, row in enumerate(case.rows):
        want = [log_prob for _, log_prob in oracle.top(row)][:5]
        want += [-math.inf] * (5 - len(want))
        torch.testing.assert_close(sel.log_prob[b], torch.tensor(want, dtype=torch.double), atol=TIGHT, rtol=TIGHT)


@pytest.mark.parametrize("kind", KINDS)
def test_a_distance_of_the_users(kind: str) -> None:
    """Answers within a radius are one: chosen by the mass around them that is left, as by hand."""
    case = fixed_case(kind, 3, 2, 4)
    position = torch.tensor([0.0, 1.0, 5.0, 6.0])

    def apart(answers: Tensor) -> Tensor:
        """Between the first picks; 100 to the empty answer."""
        first = position[answers[..., 0].clamp(min=0)].where(answers[..., 0] >= 0, 100.0)
        return (first.unsqueeze(1) - first.unsqueeze(2)).abs()

    sel = cpl.hypotheses(case.pot, 4, same=apart, radius=1.5, num_beams=EVERY)
    for b, row in enumerate(case.rows):
        mode = defaultdict(float)
        for order, log_prob in oracle.everything(row).items():
            mode[{(): 2, 0: 0, 1: 0, 2: 1, 3: 1}[order[0] if order else ()]] += math.exp(log_prob)
        want = [*sorted(mode.values(), reverse=True), 0.0]
        torch.testing.assert_close(
            sel.log_prob[b].exp(), torch.tensor(want, dtype=torch.double), atol=TIGHT, rtol=TIGHT
        )
        assert sel.lengths[b, 3] == 0
        assert sel.indices[b, 3].eq(-1).all()


def test_many_candidates_are_as_good_as_all() -> None:
    """The search keeps 128 of more than 20,000 sets: its answers are the likeliest, their probabilities exact."""
    pot = fixed_case("dense+stop", 0, 2, 9, scale=1.5).pot
    sel = cpl.hypotheses(pot, 6, max_len=3)
    every = cpl.hypotheses(pot, 6, max_len=3, num_beams=5000)
    torch.testing.assert_close(sel.log_prob, every.log_prob, atol=1e-9, rtol=0)
    for r in range(6):
        said = cpl.set_log_prob(pot, sel.indices[:, r].contiguous(), max_len=3)[0]
        torch.testing.assert_close(sel.log_prob[:, r], said, atol=1e-9, rtol=0)


def test_large_sets_are_bounded_from_below() -> None:
    """Above ten items the probability is that of the orders the search went through."""
    n = 12
    pot = cpl.Potentials(torch.full((1, n), 4.0), torch.zeros(1), cpl.Dense(torch.zeros(1, n, n)))
    sel = cpl.hypotheses(pot, 2, min_len=11)
    whole = cpl.set_log_prob(pot, sel.indices[:, 0], min_len=11)[0]
    assert sel.lengths[0, 0] > 10
    assert -math.inf < sel.log_prob[0, 0] <= whole[0] + 1e-4


def test_small_sets_are_exact_beside_large_ones() -> None:
    """Answers of more than ten items in one row leave those of another row as they are alone."""
    pot = fixed_case("dense", 0, 2, 14).pot
    W = pot.interaction.dense() - torch.tensor([0.8, 0.0]).view(2, 1, 1)
    pot = cpl.Potentials(pot.unary + 2, torch.tensor([0.0, -30.0]).double(), cpl.Dense(W))
    both, alone = cpl.hypotheses(pot, 4, num_beams=4), cpl.hypotheses(pot[:1], 4, num_beams=4)
    assert both.lengths[0].max() <= 10 < both.lengths[1].max()
    torch.testing.assert_close(both.log_prob[0], alone.log_prob[0], atol=1e-9, rtol=0)
    for answer, log_prob in zip(both.indices[0], both.log_prob[0], strict=True):
        said = cpl.set_log_prob(pot[:1], answer.unsqueeze(0))[0]
        torch.testing.assert_close(log_prob.view(1), said, atol=1e-9, rtol=0)


def test_estimates_of_modes_are_right_on_average() -> None:
    """More sequences than beams: the stated probabilities are close to the enumerated ones, and vary by generator."""
    pot = fixed_case("recent+stop", 1, 1, 6).pot
    d = cpl.ContextualPlackettLuce(pot, 4)
    support = d.enumerate_support()
    p = d.log_prob(support).exp().squeeze(1)

    def by_first(answers: Tensor) -> Tensor:
        first = answers[..., :1]
        return first == first.transpose(1, 2)

    exact = torch.stack([p[support[:, 0, 0] == i].sum() for i in range(-1, 6)]).sort(descending=True).values[:3]
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        sel = cpl.hypotheses(pot, 3, same=by_first, num_beams=64, max_len=4, generator=generator)
        torch.testing.assert_close(sel.log_prob[0].exp(), exact, atol=0.08, rtol=0)
    first, again = (cpl.hypotheses(pot, 3, same=by_first, num_beams=64, max_len=4) for _ in range(2))
    assert first.log_prob.equal(again.log_prob)  # the same draw at every call


def test_steps_rows_and_shapes() -> None:
    case = fixed_case("lowrank+stop", 2, 3, 5, padded=True)
    sel = cpl.hypotheses(case.pot, 4)
    assert sel.step_log_prob is not None
    for b, row in enumerate(case.rows):
        for answer, steps in zip(sel.tolist()[b], sel.step_log_prob[b].tolist(), strict=True):
            for t, pick in enumerate(answer):
                assert steps[t] == pytest.approx(oracle.step_log_probs(row, oracle.FREE, tuple(answer[:t]))[pick])
            assert steps[len(answer) :] == [0.0] * (5 - len(answer))
    alone = torch.cat([cpl.hypotheses(case.pot[b : b + 1], 4).log_prob for b in range(3)])
    torch.testing.assert_close(sel.log_prob, alone)
    for pot in (case.pot[:0], fixed_case("dense", 0, 2, 0).pot):
        empty = cpl.hypotheses(pot, 2, same=same_set)
        assert empty.indices.shape == cpl.hypotheses(pot, 2).indices.shape == (len(pot), 2, pot.num_candidates)
        assert (empty.log_prob[:, 0] == 0).all()


def test_an_interaction_that_depends_on_the_whole_order() -> None:
    """Sets cannot be merged on the way; they are where all is drawn."""
    from torchcpl.selectors.pointer import PointerHead

    torch.manual_seed(0)
    pot = PointerHead(8, heads=2).eval()(torch.randn(1, 4, 8), torch.ones(1, 4, dtype=torch.bool))
    sel = cpl.hypotheses(pot, 3, num_beams=EVERY)
    for r, answer in enumerate(sel.tolist()[0]):
        orders = torch.tensor(list(permutations(answer))).long().view(math.factorial(len(answer)), len(answer))
        whole = cpl.ContextualPlackettLuce(pot).log_prob(orders.unsqueeze(1)).logsumexp(0)
        torch.testing.assert_close(sel.log_prob[:, r], whole, atol=1e-4, rtol=0)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "too few beams": ({"num_beams": 3}, "num_beams: expected an integer of at least 6, got int 3"),
    "same": ({"same": "path"}, "same: expected 'set', 'sequence' or a callable, got str 'path'"),
    "shape": ({"same": lambda answers: answers[..., 0] > 0}, r"same: expected booleans or distances of shape \(2, 128"),
    "no radius": ({"same": lambda a: same_set(a).float()}, "radius: expected a number with distances"),
    "radius": ({"same": same_set, "radius": 1.0}, "radius: expected a number with distances"),
    "radius of sets": ({"radius": 1.0}, "radius: expected None with same='set', which knows no distances, got 1.0"),
    "negative radius": ({"same": same_set, "radius": -1.0}, "radius: expected a distance of at least 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_options_are_named(name: str) -> None:
    options, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        cpl.hypotheses(fixed_case("dense", 0, 2, 4).pot, **options)

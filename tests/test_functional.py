"""Log-probabilities of steps, sequences and sets against the oracle."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import KINDS, Case, cases, demands, fixed_case, orders, unpad

import torchcpl as cpl

TIGHT = 1e-10
SETS_ONLY = ("max_len", "min_len", "stop_bias", "forbid", "require", "budget")


def close(got: float, want: float, tolerance: float = TIGHT) -> bool:
    return got == want or abs(got - want) <= tolerance


@given(st.data())
def test_log_prob_of_any_sequence(data: Any) -> None:
    case = data.draw(cases())
    order = data.draw(orders(case))
    got = cpl.log_prob(case.pot, order)
    for b, picks in enumerate(unpad(order)):
        assert close(float(got[b]), oracle.log_prob(case.rows[b], picks)), (b, picks)


@given(st.data())
def test_log_prob_under_demands(data: Any) -> None:
    case = data.draw(cases())
    asked = data.draw(demands(case))
    order = data.draw(orders(case))
    got = cpl.log_prob(case.pot, order, **asked.options)
    for b, picks in enumerate(unpad(order)):
        assert close(float(got[b]), oracle.log_prob(case.rows[b], picks, asked.limits[b])), (b, picks)


@given(st.data())
def test_set_log_prob_sums_over_the_orders(data: Any) -> None:
    case = data.draw(cases())
    asked = data.draw(demands(case, parts=SETS_ONLY))
    subset = data.draw(orders(case))
    got, error = cpl.set_log_prob(case.pot, subset, **asked.options)
    assert error.eq(0).all()
    for b, picks in enumerate(unpad(subset)):
        assert close(float(got[b]), oracle.set_log_prob(case.rows[b], picks, asked.limits[b])), (b, picks)


@given(st.data())
def test_set_log_prob_where_the_order_matters(data: Any) -> None:
    """Neighbours and rules of one's own depend on the last pick: small sets are exact all the same."""
    case = data.draw(cases())
    asked = data.draw(demands(case))
    subset = data.draw(orders(case))
    got, error = cpl.set_log_prob(case.pot, subset, **asked.options)
    assert error.eq(0).all()
    for b, picks in enumerate(unpad(subset)):
        assert close(float(got[b]), oracle.set_log_prob(case.rows[b], picks, asked.limits[b])), (b, picks)


def test_a_padded_or_forbidden_pick_is_impossible() -> None:
    case = fixed_case("dense", 0, 2, 4)
    mask = torch.tensor([[True, True, False, True]] * 2)
    pot = cpl.Potentials(case.pot.unary, case.pot.stop, case.pot.interaction, mask)
    order = torch.tensor([[0, 2, -1], [1, 0, -1]])
    got = cpl.log_prob(pot, order)
    assert got[0] == -math.inf
    assert got[1].isfinite()
    forbidden = cpl.log_prob(case.pot, order, constraints=[cpl.Forbid(torch.tensor([False, False, True, False]))])
    assert forbidden[0] == -math.inf
    assert forbidden[1].isfinite()
    assert cpl.set_log_prob(pot, order)[0][0] == -math.inf


def test_longer_than_max_len_is_impossible_and_at_max_len_the_stop_is_certain() -> None:
    case = fixed_case("lowrank+stop", 1, 1, 4)
    row = case.rows[0]
    assert cpl.log_prob(case.pot, torch.tensor([[0, 1, 2]]), max_len=2).item() == -math.inf
    first = oracle.step_log_probs(row, oracle.FREE, ())[3]
    assert cpl.log_prob(case.pot, torch.tensor([[3]]), max_len=1).item() == pytest.approx(first, abs=TIGHT)
    assert cpl.log_prob(case.pot, torch.tensor([[-1]]), max_len=0).item() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_that_is_ruled_out_comes_when_nothing_is_left(kind: str) -> None:
    case = fixed_case(kind, 2, 3, 4, padded=True)
    limits = oracle.Limits(stop_bias=-math.inf)
    for b, row in enumerate(case.rows):
        real = [i for i in range(4) if row.mask[i]]
        pot = case.pot[b : b + 1]
        support = oracle.everything(row, limits)
        assert math.fsum(map(math.exp, support.values())) == pytest.approx(1)
        assert all(len(picks) == len(real) for picks in support)
        got = cpl.log_prob(pot, torch.tensor([real], dtype=torch.long), stop_bias=-math.inf)
        assert float(got) == pytest.approx(support[tuple(real)], abs=TIGHT)
        if real:
            short = torch.tensor([real[:-1]], dtype=torch.long)
            assert cpl.log_prob(pot, short, stop_bias=-math.inf).item() == -math.inf


def _by_layers(unary: np.ndarray, stop: float, W: np.ndarray, items: list[int]) -> float:
    """Probability of ending with ``items``, by passing probability from every subset to the next larger ones."""
    mass = {frozenset[int](): 1.0}
    everyone = range(len(unary))
    for _ in items:
        grown: dict[frozenset[int], float] = {}
        for chosen, p in mass.items():
            logits = unary + W[:, sorted(chosen)].sum(1)
            rest = np.array([i not in chosen for i in everyone])
            norm = np.exp(logits[rest]).sum() + math.exp(stop)
            for i in items:
                if i not in chosen:
                    more = chosen | {i}
                    grown[more] = grown.get(more, 0.0) + p * math.exp(logits[i]) / norm
        mass = grown
    logits = unary + W[:, items].sum(1)
    rest = np.array([i not in items for i in everyone])
    return float(mass[frozenset(items)] * math.exp(stop) / (np.exp(logits[rest]).sum() + math.exp(stop)))


def test_set_log_prob_of_ten_items() -> None:
    """Far more orders (3.6 million) than could be summed."""
    rng = np.random.default_rng(3)
    n, items = 14, [13, 2, 0, 7, 5, 11, 1, 4, 9, 8]
    unary, W = rng.standard_normal(n), 0.5 * rng.standard_normal((n, n))
    pot = cpl.Potentials(torch.tensor(unary)[None], torch.tensor([0.3]).double(), cpl.Dense(torch.tensor(W)[None]))
    got, error = cpl.set_log_prob(pot, torch.tensor([items]))
    assert error.item() == 0
    assert got.item() == pytest.approx(math.log(_by_layers(unary, pot.stop.item(), W, items)), abs=TIGHT)


@pytest.mark.parametrize("kind", ["dense+stop", "contextual"])
def test_the_sampled_estimate_agrees_within_its_standard_error(kind: str) -> None:
    case = fixed_case(kind, 4, 3, 5)
    subset = torch.tensor([[0, 3, 1, 4], [2, 1, -1, -1], [-1, -1, -1, -1]])
    options: dict[str, Any] = {"max_len": 4, "stop_bias": 0.5}
    exact, _ = cpl.set_log_prob(case.pot, subset, **options)
    generator = torch.Generator().manual_seed(0)
    far = []
    for _ in range(40):
        got, error = cpl.set_log_prob(case.pot, subset, num_samples=400, generator=generator, **options)
        assert got[2].item() == pytest.approx(exact[2].item(), abs=TIGHT)  # nothing to choose, nothing to estimate
        assert error[2].item() == pytest.approx(0, abs=1e-9)
        far.append(((got - exact) / error)[:2])
    scores = torch.stack(far)
    assert (scores.abs() < 4.5).all()
    # The stated error is the true one: standardised deviations have mean 0 and variance 1.
    assert (scores.mean(0).abs() < 4 / 40**0.5).all()
    assert ((scores.std(0) > 0.5) & (scores.std(0) < 1.6)).all()


def test_the_estimate_takes_over_above_fifteen_items() -> None:
    torch.manual_seed(0)
    n = 18
    pot = cpl.Potentials(torch.zeros(1, n), torch.zeros(1), cpl.Dense(torch.zeros(1, n, n)))
    subset = torch.arange(16).unsqueeze(0)
    got, error = cpl.set_log_prob(pot.__class__(pot.unary.double(), pot.stop.double(), pot.interaction), subset)
    # All choices equal: 16! orders of Π 1/(19 − t) each, then the stop among the 3 choices left.
    want = math.lgamma(17) - sum(math.log(19 - t) for t in range(17))
    assert got.item() == pytest.approx(want, abs=1e-6)  # every order weighs the same, so the estimate is exact
    assert error.item() == pytest.approx(0, abs=1e-6)


def test_an_impossible_set_under_sampling() -> None:
    case = fixed_case("dense", 5, 1, 4)
    options: dict[str, Any] = {"constraints": [cpl.Forbid(torch.tensor([False, True, False, False]))]}
    got, error = cpl.set_log_prob(case.pot, torch.tensor([[0, 1, 2]]), num_samples=16, **options)
    assert got.item() == -math.inf
    assert error.item() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_set_log_prob_has_the_right_gradient(kind: str) -> None:
    case = fixed_case(kind, 6, 2, 3)
    subset = torch.tensor([[0, 2], [1, -1]])
    pot = case.pot

    def value(unary: torch.Tensor, stop: torch.Tensor) -> torch.Tensor:
        return cpl.set_log_prob(cpl.Potentials(unary, stop, pot.interaction, pot.mask), subset)[0]

    assert torch.autograd.gradcheck(value, (pot.unary.requires_grad_(), pot.stop.requires_grad_()))


@given(cases(max_b=2))
def test_the_support_has_mass_one(case: Case) -> None:
    """The oracle's own support, scored by the library."""
    for b, row in enumerate(case.rows):
        sequences = list(oracle.everything(row))
        width = max(map(len, sequences))
        padded = torch.tensor([[*s, *[-1] * (width - len(s))] for s in sequences], dtype=torch.long)
        padded = padded.view(len(sequences), width)
        pot = case.pot[[b] * len(sequences)]
        assert cpl.log_prob(pot, padded).exp().sum().item() == pytest.approx(1, abs=TIGHT)


def test_the_latest_pick_stays_the_latest_after_the_end() -> None:
    """What a rule of one's own is told of the prefixes: of those after the end what it was told at the end."""
    told = []

    def rule(history: cpl.History) -> torch.Tensor:
        told.append(history)
        return ~history.selected

    cpl.log_prob(fixed_case("dense", 0, 2, 3).pot, torch.tensor([[2, 0, -1, -1], [-1, -1, -1, -1]]), constraints=[rule])
    assert told[0].last.tolist() == [[-1, 2, 0, 0, 0], [-1] * 5]
    assert told[0].count.tolist() == [[0, 1, 2, 2, 2], [0] * 5]

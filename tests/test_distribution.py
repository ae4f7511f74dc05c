"""The distribution's contract: shapes, mass one, exact values against the oracle, arguments checked."""

from __future__ import annotations

import math
from typing import Any

import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import KINDS, cases, demands, fixed_case, orders, unpad
from torch import Tensor

import torchcpl as cpl

TIGHT = 1e-10
SETS_ONLY = ("max_len", "min_len", "stop_bias", "forbid", "require", "budget")


def rows_of(values: Tensor, b: int) -> list[tuple[int, ...]]:
    """The sequences (S, B, T) of one row, unpadded."""
    return [tuple(i for i in row if i >= 0) for row in values[:, b].tolist()]


@given(st.data())
def test_mass_log_prob_entropy_and_inclusion_are_exact(data: Any) -> None:
    case = data.draw(cases())
    asked = data.draw(demands(case))
    d = cpl.ContextualPlackettLuce(case.pot, **asked.options)
    values = d.enumerate_support()
    log_probs = d.log_prob(values)
    assert not log_probs.isnan().any()
    mass = log_probs.exp().sum(0)
    torch.testing.assert_close(mass, torch.ones_like(mass), atol=TIGHT, rtol=0)
    inclusion, entropy = d.inclusion_probs(), d.entropy()
    for b, (row, limits) in enumerate(zip(case.rows, asked.limits, strict=True)):
        want = oracle.everything(row, limits)
        got = dict(zip(rows_of(values, b), log_probs[:, b].tolist(), strict=True))
        assert len(got) == len(values)  # no sequence twice
        for sequence, value in got.items():
            expected = want.pop(sequence, -math.inf)
            # What has probability e^-800 is lost in exp but not in the logarithm.
            assert value == expected or abs(value - expected) <= TIGHT * max(1, abs(expected)), sequence
        assert not want  # every possible sequence was enumerated
        torch.testing.assert_close(
            inclusion[b], torch.tensor(oracle.inclusion_probs(row, limits), dtype=torch.float64), atol=TIGHT, rtol=0
        )
        assert entropy[b].item() == pytest.approx(oracle.entropy(row, limits), abs=TIGHT)


@given(st.data())
def test_set_probabilities_add_up_over_all_sets(data: Any) -> None:
    case = data.draw(cases(max_n=4))
    asked = data.draw(demands(case, parts=SETS_ONLY))
    d = cpl.ContextualPlackettLuce(case.pot, **asked.options)
    total = torch.zeros(len(case.rows), dtype=torch.float64)
    for chosen in oracle.subsets(range(case.size)):
        value = d.set_log_prob(torch.tensor(chosen, dtype=torch.long))
        for b, (row, limits) in enumerate(zip(case.rows, asked.limits, strict=True)):
            want = oracle.set_log_prob(row, chosen, limits)
            assert value[b].item() == want or abs(value[b].item() - want) <= TIGHT * max(1, abs(want))
        total += value.exp()
    torch.testing.assert_close(total, torch.ones_like(total), atol=TIGHT, rtol=0)


def test_shapes_follow_torch_distributions() -> None:
    pot = fixed_case("lowrank", 0, 3, 5).pot
    d = cpl.ContextualPlackettLuce(pot, max_len=4)
    assert d.batch_shape == (3,)
    assert d.event_shape == (4,)
    assert d.sample().shape == (3, 4)
    assert d.sample((7, 2)).shape == (7, 2, 3, 4)
    assert d.log_prob(d.sample((7, 2))).shape == (7, 2, 3)
    assert d.entropy().shape == (3,)
    assert d.inclusion_probs().shape == (3, 5)
    assert d.set_log_prob(d.sample()).shape == (3,)
    drawn = d.draw((6,))
    assert drawn.log_prob.shape == drawn.lengths.shape == (6, 3)
    torch.testing.assert_close(drawn.log_prob, d.log_prob(drawn.indices))
    assert d.support.check(d.sample((50,))).all()
    assert "candidates=5" in repr(d)


def test_values_of_any_width_and_shape_broadcast() -> None:
    case = fixed_case("dense", 1, 3, 4)
    d = cpl.ContextualPlackettLuce(case.pot)
    picks = torch.tensor([2, 0])
    want = [oracle.log_prob(row, [2, 0]) for row in case.rows]
    for value in (picks, picks.view(1, 2), torch.tensor([[2, 0, -1, -1, -1, -1]]), picks.expand(5, 3, 2)):
        got = d.log_prob(value)
        assert got.shape == torch.broadcast_shapes(value.shape[:-1], (3,))
        torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64).expand(got.shape), atol=TIGHT, rtol=0)


def test_expand_repeats_rows_in_the_right_places() -> None:
    case = fixed_case("contextual+stop", 2, 3, 4, padded=True)
    bias = torch.tensor([0.0, 1.0, -1.0]).double()
    cost = torch.tensor([[1, 2, 0, 1], [2, 2, 2, 2], [0, 1, 1, 1]])
    limit = torch.tensor([3, 2, 1])
    d = cpl.ContextualPlackettLuce(case.pot, max_len=3, stop_bias=bias, constraints=[cpl.Budget(cost, limit)])
    e = d.expand((2, 3))
    assert e.batch_shape == (2, 3)
    assert e.event_shape == d.event_shape
    values = d.enumerate_support()
    base = d.log_prob(values)
    torch.testing.assert_close(e.log_prob(values.unsqueeze(1)), base.unsqueeze(1).expand(-1, 2, -1))
    torch.testing.assert_close(e.entropy(), d.entropy().expand(2, 3))
    torch.testing.assert_close(e.inclusion_probs(), d.inclusion_probs().expand(2, 3, -1))
    subset = torch.tensor([1, 3])
    torch.testing.assert_close(e.set_log_prob(subset), d.set_log_prob(subset).expand(2, 3))
    assert e.sample((5,)).shape == (5, 2, 3, 3)
    assert e.expand((4, 2, 3)).batch_shape == (4, 2, 3)


def test_every_row_meets_every_value() -> None:
    """Batches and values that broadcast in different dimensions."""
    case = fixed_case("dense", 3, 3, 4)
    values = torch.tensor([[0, 1], [1, -1], [3, 2], [-1, -1]])
    table = torch.tensor(
        [[oracle.log_prob(row, p) for p in unpad(values)] for row in case.rows], dtype=torch.float64
    )  # (3, 4)
    d = cpl.ContextualPlackettLuce(case.pot)
    columns = values.view(4, 1, 1, 2)
    torch.testing.assert_close(
        d.expand((2, 3)).log_prob(columns), table.T.unsqueeze(1).expand(4, 2, 3), atol=TIGHT, rtol=0
    )
    torch.testing.assert_close(
        d.expand((2, 1, 3)).log_prob(values.view(4, 1, 2)), table.T.expand(2, 4, 3), atol=TIGHT, rtol=0
    )
    single = cpl.ContextualPlackettLuce(case.pot[:1])
    torch.testing.assert_close(single.log_prob(values), table[0], atol=TIGHT, rtol=0)
    torch.testing.assert_close(single.expand((2, 1)).log_prob(values), table[:1].expand(2, 4), atol=TIGHT, rtol=0)


def test_enumerate_support_without_expand() -> None:
    pot = fixed_case("dense", 4, 2, 3).pot
    d = cpl.ContextualPlackettLuce(pot, max_len=2).expand((5, 2))
    assert d.has_enumerate_support
    assert d.enumerate_support(expand=False).shape == (1 + 3 + 6, 1, 1, 2)
    assert d.enumerate_support().shape == (10, 5, 2, 2)
    with pytest.raises(ValueError, match="enumerate_support: expected at most"):
        cpl.ContextualPlackettLuce(fixed_case("dense", 0, 1, 12).pot).enumerate_support()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_len", [0, None])
def test_nothing_to_pick(kind: str, max_len: int | None) -> None:
    """No candidates, or no room: the empty sequence is certain."""
    pot = fixed_case(kind, 5, 2, 0 if max_len is None else 3).pot
    d = cpl.ContextualPlackettLuce(pot, max_len)
    assert d.event_shape == (0,)
    assert d.enumerate_support().shape == (1, 2, 0)
    assert d.log_prob(d.sample((3,))).eq(0).all()
    assert d.entropy().eq(0).all()
    assert d.inclusion_probs().eq(0).all()
    assert d.inclusion_probs().shape == (2, pot.num_candidates)
    assert d.set_log_prob(torch.zeros(2, 0, dtype=torch.long)).eq(0).all()
    assert cpl.ContextualPlackettLuce(pot, max_len).expand((4, 2)).log_prob(d.sample((4,))).shape == (4, 2)


def test_support_knows_a_sequence() -> None:
    support = cpl.ContextualPlackettLuce(fixed_case("dense", 0, 1, 4).pot).support
    good = torch.tensor([[0, 1, 2], [3, -1, -1], [-1, -1, -1]])
    bad = torch.tensor([[0, 0, 1], [-1, 2, -1], [4, -1, -1], [-2, -1, -1], [1, -1, 1]])
    assert support.check(good).all()
    assert not support.check(bad).any()
    assert support.is_discrete
    assert support.event_dim == 1
    assert support.check(torch.zeros(2, 0, dtype=torch.long)).all()


def test_large_supports_are_estimated() -> None:
    """Above the limit of enumeration, against independent candidates whose answers are known."""
    n = 12
    pot = cpl.Potentials(torch.zeros(2, n).double(), torch.zeros(2).double(), cpl.Dense(torch.zeros(2, n, n).double()))
    d = cpl.ContextualPlackettLuce(pot)
    generator = torch.Generator().manual_seed(0)
    samples = 20_000
    inclusion = d.inclusion_probs(num_samples=samples, generator=generator)
    # All choices equal: the number of picks is uniform on 0 … N, so each candidate is in half of the time.
    assert ((inclusion - 0.5).abs() < 4.5 * (0.25 / samples) ** 0.5).all()
    want = math.fsum((math.lgamma(n + 1) - math.lgamma(n + 1 - k) + math.log(n + 1)) / (n + 1) for k in range(n + 1))
    assert d.entropy(generator=generator).tolist() == pytest.approx([want] * 2, rel=0.05)


def test_monte_carlo_agrees_with_enumeration() -> None:
    pot = fixed_case("lowrank", 6, 2, 4).pot
    d = cpl.ContextualPlackettLuce(pot, max_len=3)
    generator = torch.Generator().manual_seed(1)
    exact = d.inclusion_probs()
    error = (exact * (1 - exact) / 20_000).sqrt()
    assert ((d.inclusion_probs(20_000, generator) - exact).abs() < 4.5 * error).all()
    spread = -d.log_prob(d.sample((4000,)))
    assert ((d.entropy(20_000, generator) - d.entropy()).abs() < 4.5 * spread.std(0) / 20_000**0.5).all()


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_exact_answers(kind: str) -> None:
    pot = fixed_case(kind, 7, 1, 3).pot

    def answers(unary: Tensor, stop: Tensor) -> tuple[Tensor, ...]:
        d = cpl.ContextualPlackettLuce(cpl.Potentials(unary, stop, pot.interaction, pot.mask), max_len=2)
        return d.entropy(), d.inclusion_probs()

    assert torch.autograd.gradcheck(answers, (pot.unary.requires_grad_(), pot.stop.requires_grad_()))


def test_arguments_are_validated() -> None:
    pot = fixed_case("dense", 8, 2, 3).pot
    d = cpl.ContextualPlackettLuce(pot)
    wrong: list[tuple[Any, str]] = [
        (torch.tensor([[0, 0], [1, -1]]), "value: expected no repeated index"),
        (torch.tensor([[0, 3], [1, -1]]), r"value: expected indices in \[0, 3\)"),
        (torch.tensor([[-1, 1], [1, -1]]), "value: expected no index after"),
        (torch.tensor([[0.0, 1.0]]), "value: expected a long tensor"),
        (torch.zeros(5, 2, dtype=torch.long), "value: expected"),
        ([0, 1], "value: expected a long tensor"),
    ]
    for value, message in wrong:
        with pytest.raises(ValueError, match=message):
            d.log_prob(value)
    with pytest.raises(ValueError, match="pot: expected Potentials"):
        cpl.ContextualPlackettLuce(pot.unary)  # type: ignore[arg-type]
    broken = cpl.Potentials(pot.unary, torch.tensor([0.0, math.nan]).double(), pot.interaction)
    with pytest.raises(ValueError, match=r"stop: expected no NaN.*\(1,\)"):
        cpl.ContextualPlackettLuce(broken)
    unchecked = cpl.ContextualPlackettLuce(broken, validate_args=False)
    assert unchecked.log_prob(torch.tensor([[0], [0]])).isnan().tolist() == [False, True]


@given(st.data())
def test_draw_returns_what_log_prob_says(data: Any) -> None:
    case = data.draw(cases())
    asked = data.draw(demands(case))
    d = cpl.ContextualPlackettLuce(case.pot, **asked.options)
    drawn = d.draw((4,), torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    torch.testing.assert_close(d.log_prob(drawn.indices), drawn.log_prob, atol=1e-9, rtol=1e-9)
    for b, (row, limits) in enumerate(zip(case.rows, asked.limits, strict=True)):
        support = oracle.everything(row, limits)
        assert all(sequence in support for sequence in rows_of(drawn.indices, b))


@given(st.data())
def test_set_log_prob_of_drawn_sets_is_at_least_the_sequence(data: Any) -> None:
    case = data.draw(cases())
    order = data.draw(orders(case))
    d = cpl.ContextualPlackettLuce(case.pot)
    assert (d.set_log_prob(order) >= d.log_prob(order) - TIGHT).all()

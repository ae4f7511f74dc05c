"""Probabilities of sets and of what follows a part, against enumeration."""

from __future__ import annotations

import math
from itertools import permutations
from typing import Any

import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import FREE, Limits, Row
from strategies import KINDS, cases, demands, fixed_case, orders, unpad
from torch import Tensor

import torchcpl as cpl
from torchcpl.selectors import PointerHead

TIGHT = 1e-10


def padded(sets: list[tuple[int, ...]]) -> Tensor:
    width = max(map(len, sets), default=0)
    return torch.tensor([[*s, *[-1] * (width - len(s))] for s in sets], dtype=torch.long).view(len(sets), width)


def given_part(row: Row, part: set[int], limits: Limits = FREE) -> dict[tuple[int, ...], float]:
    """What comes after the part: every continuation, in order, with its probability given that the part came first."""
    size = len(part)
    found: dict[tuple[int, ...], float] = {}
    for order, log_prob in oracle.everything(row, limits).items():
        if set(order[:size]) == part and len(order) >= size:
            found[order[size:]] = found.get(order[size:], 0.0) + math.exp(log_prob)
    total = math.fsum(found.values())
    return {rest: p / total for rest, p in found.items()} if total else {}


@given(st.data())
def test_set_nll_sums_over_the_orders(data: Any) -> None:
    case = data.draw(cases())
    target = data.draw(orders(case))
    got = cpl.set_nll(case.pot, target, exact=True, reduction="none")
    for b, picks in enumerate(unpad(target)):
        want = -oracle.set_log_prob(case.rows[b], picks)
        assert float(got[b]) == pytest.approx(want, abs=TIGHT), (b, picks)
    assert float(cpl.set_nll(case.pot, target, reduction="sum")) == pytest.approx(float(got.sum()), abs=TIGHT)
    assert float(cpl.set_nll(case.pot, target)) == pytest.approx(float(got.mean()), abs=TIGHT)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [0, 1, 5])
def test_mass_one_over_all_sets(kind: str, n: int) -> None:
    case = fixed_case(kind, 1, 1, n)
    sets = list(oracle.subsets(range(n)))
    nll = cpl.set_nll(case.pot, padded(sets), reduction="none")  # one row for all sets
    assert nll.exp().reciprocal().sum().item() == pytest.approx(1, abs=TIGHT)


@pytest.mark.parametrize("kind", KINDS)
def test_one_table_for_all_rows(kind: str) -> None:
    """A row that is expanded over the batch, and one row alone, give what copies of it give; so do the gradients."""
    case = fixed_case(kind, 2, 1, 6)
    target = padded([(0, 3, 5), (), (2,), (1, 4), (5, 3, 0, 1)])
    unary = case.pot.unary.clone().requires_grad_()
    fields = {k: v for k, v in vars(case.pot.interaction).items() if isinstance(v, Tensor)}

    def nll(form: str) -> Tensor:
        pot = cpl.Potentials(unary, case.pot.stop, case.pot.interaction)
        if form == "copies":
            pot = pot[[0] * 5]
        if form == "views":
            others = {k: v for k, v in vars(case.pot.interaction).items() if k not in fields}
            wide = {k: v.expand(5, *v.shape[1:]) for k, v in fields.items()}
            interaction = type(case.pot.interaction)(**wide, **others)
            pot = cpl.Potentials(unary.expand(5, -1), case.pot.stop.expand(5), interaction)
        return cpl.set_nll(pot, target, reduction="none")

    (want,) = torch.autograd.grad(nll("copies").sum(), unary)
    for form in ("views", "alone"):
        torch.testing.assert_close(nll(form), nll("copies"), atol=TIGHT, rtol=0)
        (got,) = torch.autograd.grad(nll(form).sum(), unary)
        torch.testing.assert_close(got, want, atol=TIGHT, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_set_nll_has_the_right_gradient(kind: str) -> None:
    case = fixed_case(kind, 3, 2, 4)
    interaction = case.pot.interaction
    parts = {k: v.requires_grad_() for k, v in vars(interaction).items() if isinstance(v, Tensor)}
    others = {k: v for k, v in vars(interaction).items() if k not in parts}
    target = torch.tensor([[0, 3, 1], [2, -1, -1]])

    def value(unary: Tensor, stop: Tensor, *values: Tensor) -> Tensor:
        rebuilt = type(interaction)(**dict(zip(parts, values, strict=True)), **others)
        return cpl.set_nll(cpl.Potentials(unary, stop, rebuilt, case.pot.mask), target, reduction="none")

    assert torch.autograd.gradcheck(
        value, (case.pot.unary.requires_grad_(), case.pot.stop.requires_grad_(), *parts.values())
    )


@pytest.mark.parametrize("proposal", ["process", "uniform"])
@pytest.mark.parametrize("kind", ["lowrank+stop", "recent"])
def test_the_estimate_is_unbiased_in_the_probability(proposal: str, kind: str) -> None:
    """So is its gradient, whose expectation a proposal that depends on the parameters could spoil."""
    case = fixed_case(kind, 4, 1, 6)
    target = torch.tensor([[0, 2, 3, 5]])
    unary = case.pot.unary.clone().requires_grad_()
    pot = cpl.Potentials(unary, case.pot.stop, case.pot.interaction)
    exact = cpl.set_nll(pot, target).neg().exp()
    (want,) = torch.autograd.grad(exact, unary)
    generator = torch.Generator().manual_seed(0)
    draws = target.expand(4000, -1)
    options: dict[str, Any] = {"exact": False, "num_samples": 1, "proposal": proposal, "generator": generator}
    drawn = cpl.set_nll(pot, draws, reduction="none", **options).neg().exp()
    error = float(drawn.detach().std()) / len(drawn) ** 0.5
    assert abs(float((drawn.mean() - exact).detach())) < 4 * error + 1e-12
    (got,) = torch.autograd.grad(drawn.mean(), unary)
    torch.testing.assert_close(got, want, atol=0.05 * float(want.abs().max()), rtol=0)
    many = cpl.set_nll(pot, target, **{**options, "num_samples": 2000})  # type: ignore[arg-type]
    assert float(many.detach()) == pytest.approx(-math.log(float(exact.detach())), abs=0.1)


def test_the_process_is_the_better_proposal() -> None:
    case = fixed_case("dense+stop", 5, 1, 8, scale=1.5)
    target = torch.tensor([[0, 1, 2, 3, 5, 7]]).expand(500, -1)
    spread = {}
    for proposal in ("process", "uniform"):
        options: dict[str, Any] = {"proposal": proposal, "generator": torch.Generator().manual_seed(0)}
        drawn = cpl.set_nll(case.pot, target, exact=False, num_samples=4, reduction="none", **options)
        spread[proposal] = float(drawn.std())
    assert spread["process"] < 0.7 * spread["uniform"]


def test_sets_too_large_to_be_exact() -> None:
    n = 18
    zeros = torch.zeros(1, n, dtype=torch.float64)
    pot = cpl.Potentials(zeros, zeros[:, 0], cpl.LowRank(zeros.unsqueeze(-1), zeros.unsqueeze(-1)))
    target = torch.arange(16).unsqueeze(0)
    with pytest.raises(ValueError, match="exact: expected None or False for sets of more than 15 items"):
        cpl.set_nll(pot, target, exact=True)
    want = math.lgamma(17) - sum(math.log(19 - t) for t in range(17))
    assert -float(cpl.set_nll(pot, target)) == pytest.approx(want, abs=1e-9)  # all orders weigh the same


def test_bad_sets_are_refused() -> None:
    pot = fixed_case("dense", 6, 2, 3).pot
    with pytest.raises(ValueError, match="target: expected no repeated index in a row, got 1"):
        cpl.set_nll(pot, torch.tensor([[1, 1], [0, -1]]))
    with pytest.raises(ValueError, match=r"target: expected a long tensor of shape \(2, T\)"):
        cpl.set_nll(pot, torch.tensor([[1, 0]]))
    with pytest.raises(ValueError, match="proposal: expected one of"):
        cpl.set_nll(pot, torch.tensor([[1], [0]]), proposal="best")
    with pytest.raises(ValueError, match="max_len: expected at least 2, the number of given items, got 1"):
        cpl.complete(pot, torch.tensor([[1, 0], [0, -1]]), max_len=1)
    with pytest.raises(ValueError, match="num_beams: expected None together with num_samples"):
        cpl.complete(pot, torch.tensor([[1], [0]]), num_samples=2, num_beams=2)
    with pytest.raises(ValueError, match="num_return: expected at most num_beams = 1, got 2"):
        cpl.complete(pot, torch.tensor([[1], [0]]), num_return=2)


@pytest.mark.parametrize("kind", KINDS)
def test_empty_batches(kind: str) -> None:
    pot = fixed_case(kind, 7, 2, 4).pot[:0]
    nothing = torch.zeros(0, 3, dtype=torch.long)
    assert cpl.set_nll(pot, nothing, reduction="none").shape == (0,)
    assert cpl.next_probs(pot, nothing).shape == (0, 5)
    assert cpl.inclusion_probs(pot, nothing).shape == (0, 4)
    assert cpl.complete(pot, nothing, num_samples=2).indices.shape == (2, 0, 4)
    assert cpl.complete(pot, nothing, max_len=2).indices.shape == (0, 2)


@settings(max_examples=25)
@given(st.data())
def test_next_probs_given_a_part(data: Any) -> None:
    case = data.draw(cases(max_b=2, manners=("ordinary", "ties")))
    asked = data.draw(demands(case, parts=("max_len", "min_len", "stop_bias", "forbid", "adjacent", "callable")))
    picked = data.draw(orders(case))
    got = cpl.next_probs(case.pot, picked, **asked.options)
    assert got.sum(-1).tolist() == pytest.approx([1] * len(got), abs=TIGHT)
    for b, part in enumerate(unpad(picked)):
        row, limits = case.rows[b], asked.limits[b]
        weights = [math.exp(sum(_steps(row, limits, order))) for order in permutations(part)]
        if sum(weights) == 0:
            continue  # the part cannot come first
        after = [oracle.step_log_probs(row, limits, order) for order in permutations(part)]
        want = [
            sum(w * math.exp(step[j]) for w, step in zip(weights, after, strict=True)) / sum(weights)
            for j in range(row.size + 1)
        ]
        assert got[b].tolist() == pytest.approx(want, abs=1e-9), (b, part)


def _steps(row: Row, limits: Limits, order: tuple[int, ...]) -> list[float]:
    return [oracle.step_log_probs(row, limits, order[:t])[pick] for t, pick in enumerate(order)]


@settings(max_examples=25)
@given(st.data())
def test_inclusion_given_a_part(data: Any) -> None:
    case = data.draw(cases(max_b=2, manners=("ordinary",), kinds=tuple(k for k in KINDS if "recent" not in k)))
    asked = data.draw(demands(case, parts=("max_len", "min_len", "stop_bias", "forbid")))
    picked = data.draw(orders(case))
    got = cpl.inclusion_probs(case.pot, picked, **asked.options)
    for b, part in enumerate(unpad(picked)):
        law = given_part(case.rows[b], set(part), asked.limits[b])
        for j in range(case.size):
            if law:
                want = 1.0 if j in part else math.fsum(p for rest, p in law.items() if j in rest)
                assert float(got[b, j]) == pytest.approx(want, abs=1e-9), (b, j)


@pytest.mark.parametrize("kind", KINDS)
def test_completions_follow_their_law(kind: str) -> None:
    case = fixed_case(kind, 8, 2, 4)
    picked = torch.tensor([[2, 0], [3, -1]])
    count = 6000
    drawn = cpl.complete(case.pot, picked, num_samples=count, generator=torch.Generator().manual_seed(0))
    assert drawn.indices.shape == (count, 2, 4)
    for b, part in enumerate(unpad(picked)):
        law = given_part(case.rows[b], set(part))
        assert math.fsum(law.values()) == pytest.approx(1, abs=TIGHT)
        seen: dict[tuple[int, ...], int] = {}
        for row in drawn.indices[:, b].tolist():
            assert set(row[: len(part)]) == set(part)
            rest = tuple(i for i in row[len(part) :] if i >= 0)
            seen[rest] = seen.get(rest, 0) + 1
        assert set(seen) <= set(law)
        steps = drawn.step_log_prob[:, b]  # type: ignore[index]
        assert steps[:, : len(part)].eq(0).all()
        assert (steps.sum(-1) >= drawn.log_prob[:, b] - 1e-9).all()  # the stop is the rest
        for rest, p in law.items():
            assert abs(seen.get(rest, 0) / count - p) < 4.5 * (p * (1 - p) / count) ** 0.5 + 1e-4, rest
        if "recent" not in kind:  # the order of the part does not matter: log_prob is that of the continuation
            for row, log_prob in zip(drawn.indices[:50, b].tolist(), drawn.log_prob[:50, b].tolist(), strict=True):
                rest = tuple(i for i in row[len(part) :] if i >= 0)
                assert log_prob == pytest.approx(math.log(law[rest]), abs=1e-9)


@settings(max_examples=25)
@given(st.data())
def test_wide_beams_find_the_likeliest_completions(data: Any) -> None:
    case = data.draw(cases(max_n=4, max_b=2, manners=("ordinary",), kinds=("dense+stop", "contextual")))
    asked = data.draw(demands(case, parts=("min_len", "stop_bias", "forbid")))
    picked = data.draw(orders(case))
    beams = cpl.complete(case.pot, picked, num_beams=70, num_return=2, **asked.options)
    greedy = cpl.complete(case.pot, picked, **asked.options)
    for b, part in enumerate(unpad(picked)):
        law = given_part(case.rows[b], set(part), asked.limits[b])
        if not law:
            continue
        best = sorted(law.values(), reverse=True)[:2]
        got = beams.log_prob[b].exp().tolist()
        assert got[: len(best)] == pytest.approx(best, abs=1e-9)
        first = [i for i in beams.indices[b, 0].tolist() if i >= 0]
        assert first[: len(part)] == part
        chosen: tuple[int, ...] = ()
        while True:  # greedy: the likeliest choice, step by step
            step = oracle.step_log_probs(case.rows[b], asked.limits[b], (*part, *chosen))
            choice = max(range(len(step)), key=lambda j: step[j])
            if choice == case.size:
                break
            chosen = (*chosen, choice)
        assert unpad(greedy.indices)[b] == [*part, *chosen]


@pytest.mark.parametrize("option", [{"temperature": 0.5}, {"top_k": 1}, {"top_p": 0.9}])
def test_what_only_samples_have_is_refused_without_them(option: dict[str, Any]) -> None:
    pot, picked = fixed_case("dense", 9, 1, 5).pot, torch.tensor([[3]])
    for beams in ({}, {"num_beams": 2}):
        with pytest.raises(ValueError, match=f"{next(iter(option))}: expected (1|None) without num_samples, got"):
            cpl.complete(pot, picked, **option, **beams)
    assert cpl.complete(pot, picked, num_samples=2, **option).indices.shape == (2, 1, 5)


def test_limits_count_what_was_given() -> None:
    case = fixed_case("dense", 9, 1, 5)
    picked = torch.tensor([[3, 1]])
    assert cpl.complete(case.pot, picked, 2).tolist() == [[3, 1]]
    assert len(cpl.complete(case.pot, picked, min_len=4).tolist()[0]) >= 4
    needed = cpl.Require(torch.tensor([True, True, False, False, False]))
    assert 0 in cpl.complete(case.pot, picked, constraints=[needed]).tolist()[0]
    one = cpl.complete(case.pot, padded([(3, 1), (), (0,)]), 3)  # a row for all
    assert [len(row) >= size for row, size in zip(one.tolist(), (2, 0, 1), strict=True)] == [True] * 3


def test_a_pointer_sums_over_orders() -> None:
    """All of the order matters to it: five items are enumerated, more are sampled; two ways to one answer."""
    torch.manual_seed(0)
    head = PointerHead(8, layers=1, heads=2, ffn=16, max_len=8).double().eval()
    with torch.no_grad():
        pot = head(torch.randn(1, 7, 8, dtype=torch.float64) * 3)
        picked = torch.tensor([[5, 2, 6]])
        paths = torch.tensor([list(order) for order in permutations([5, 2, 6])])
        prefix = pot.interaction.prefixes(paths.unsqueeze(0))[0].view(6, 4, -1)
        log_probs = []
        for path, states in zip(paths.tolist(), prefix, strict=True):
            added, stop = pot.interaction.logits((states.unsqueeze(0),))
            logits = torch.cat([added, stop.unsqueeze(-1)], -1)[0]  # type: ignore[union-attr]
            for t, pick in enumerate(path):
                logits[t + 1 :, pick] = -torch.inf
            log_probs.append(logits.log_softmax(-1))
        scored = zip(log_probs, paths.tolist(), strict=True)
        weight = torch.stack([p[range(len(path)), path].sum() for p, path in scored])
        want = (weight.softmax(0).unsqueeze(-1) * torch.stack([p[3].exp() for p in log_probs])).sum(0)
        torch.testing.assert_close(cpl.next_probs(pot, picked)[0], want, atol=TIGHT, rtol=0)
        total = weight.exp() * torch.stack([p[3, -1].exp() for p in log_probs])
        generator = torch.Generator().manual_seed(0)
        sampled = cpl.set_nll(pot, picked, num_samples=4000, generator=generator)
        assert float(sampled) == pytest.approx(-math.log(float(total.sum())), abs=0.05)
        assert cpl.complete(pot, picked, num_samples=3, max_len=6).indices.shape == (3, 1, 6)


def test_inclusion_probs_name_what_is_nan() -> None:
    pot = cpl.Potentials(torch.zeros(1, 2), torch.zeros(1), cpl.Dense(torch.full((1, 2, 2), torch.nan)))
    with pytest.raises(ValueError, match=r"interaction\.W: expected no NaN"):
        cpl.inclusion_probs(pot, torch.zeros(1, 0, dtype=torch.long))


def test_a_given_part_that_leaves_no_room_for_what_is_required() -> None:
    pot = cpl.Potentials(torch.zeros(2, 3), torch.zeros(2), cpl.Dense(torch.zeros(2, 3, 3)))
    picked, first = torch.tensor([[0], [2]]), torch.arange(3) == 0
    constraints = [cpl.Require(first), cpl.Budget(torch.ones(3), 1.0)]
    with pytest.raises(
        ValueError, match=r"constraints: row 1 cannot be satisfied: .* cost at least 2, the budget is 1"
    ):
        cpl.complete(pot, picked, constraints=constraints)
    with pytest.raises(ValueError, match="constraints: row 1 cannot be satisfied: 2 candidates are required"):
        cpl.complete(pot, picked, max_len=1, constraints=[cpl.Require(first)])
    assert cpl.complete(pot, picked, max_len=2, constraints=[cpl.Forbid(first)]).tolist()[0][0] == 0

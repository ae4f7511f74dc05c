"""Both losses against the oracle, their gradients, and the sampled forms by their expectation."""

from __future__ import annotations

import math
from collections import Counter
from itertools import permutations
from typing import Any

import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from strategies import KINDS, PARTS_OF, SETS, Case, cases, fixed_case, orders, unpad
from torch import Tensor

import torchcpl as cpl
from torchcpl.losses import shuffled

TIGHT = 1e-10


def agree(got: Tensor, want: list[float]) -> None:
    torch.testing.assert_close(got, torch.tensor(want, dtype=got.dtype), atol=TIGHT, rtol=TIGHT)


def use_orders(monkeypatch: pytest.MonkeyPatch, given_orders: Tensor) -> None:
    """Let subset_nll use these (B, P, T) instead of random ones."""
    monkeypatch.setattr("torchcpl.losses.shuffled", lambda target, count, generator=None: given_orders)


@given(st.data())
def test_ordered_nll(data: Any) -> None:
    case = data.draw(cases())
    order = data.draw(orders(case))
    want = [oracle.ordered_loss(row, picks) for row, picks in zip(case.rows, unpad(order), strict=True)]
    got = cpl.ordered_nll(case.pot, order, reduction="none")
    agree(got, want)
    agree(got, (-cpl.log_prob(case.pot, order)).tolist())
    agree(cpl.ordered_nll(case.pot, order), math.fsum(want) / len(want))  # type: ignore[arg-type]
    agree(cpl.ordered_nll(case.pot, order, reduction="sum"), math.fsum(want))  # type: ignore[arg-type]
    per_step = [loss / (len(picks) + 1) for loss, picks in zip(want, unpad(order), strict=True)]
    agree(cpl.ordered_nll(case.pot, order, per_step=True, reduction="none"), per_step)


WEIGHTS = st.sampled_from([0.0, 1.0, 5.0, 0.3])


@given(st.data())
def test_subset_nll_over_given_permutations(data: Any) -> None:
    case = data.draw(cases())
    target = data.draw(orders(case))
    early, stop = data.draw(WEIGHTS), data.draw(WEIGHTS)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    chosen = shuffled(target, 4, generator)
    for b, picks in enumerate(unpad(target)):
        assert all(sorted(order) == sorted(picks) for order in unpad(chosen[b]))
    with pytest.MonkeyPatch.context() as patch:
        use_orders(patch, chosen)
        got = cpl.subset_nll(case.pot, target, 4, early, stop, reduction="none")
    agree(got, [oracle.permutation_loss(row, unpad(chosen[b]), early, stop) for b, row in enumerate(case.rows)])


@given(st.data())
def test_subset_nll_exact_is_the_mean_over_all_subsets(data: Any) -> None:
    case = data.draw(cases(kinds=SETS))
    target = data.draw(orders(case))
    early, stop = data.draw(WEIGHTS), data.draw(WEIGHTS)
    pairs = list(zip(case.rows, unpad(target), strict=True))
    got = cpl.subset_nll(case.pot, target, early_stop_weight=early, stop_weight=stop, exact=True, reduction="none")
    agree(got, [oracle.uniform_subset_loss(row, picks, early, stop) for row, picks in pairs])
    plain = cpl.subset_nll(case.pot, target, exact=True, reduction="none")
    agree(plain, [oracle.uniform_subset_loss(row, picks) for row, picks in pairs])
    agree(cpl.subset_nll(case.pot, target, exact=True, reduction="sum"), plain.sum().tolist())
    agree(cpl.subset_nll(case.pot, target, exact=True), plain.mean().tolist())


@pytest.mark.parametrize("kind", KINDS)
def test_the_permutation_form_averages_to_all_permutations(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = fixed_case(kind, 0, 2, 5)
    target = torch.tensor([[0, 2, 4], [1, 3, 4]])
    want = [oracle.permutation_loss(row, permutations(unpad(target)[b])) for b, row in enumerate(case.rows)]
    every = torch.tensor([list(permutations(row)) for row in unpad(target)])
    generator = torch.Generator().manual_seed(0)
    draws = torch.stack(
        [cpl.subset_nll(case.pot, target, permutations=50, reduction="none", generator=generator) for _ in range(60)]
    )
    error = draws.std(0) / len(draws) ** 0.5
    assert ((draws.mean(0) - torch.tensor(want, dtype=torch.float64)).abs() < 4.5 * error).all()
    use_orders(monkeypatch, every)
    agree(cpl.subset_nll(case.pot, target, permutations=6, reduction="none"), want)


@given(st.data())
def test_summed_prefixes_are_the_expected_likelihood_of_random_orders(data: Any) -> None:
    case = data.draw(cases(max_n=4))
    target = data.draw(orders(case, extra=0))
    sizes = [len(picks) for picks in unpad(target)]
    if len(set(sizes)) > 1:  # all orders of every row, as many for each
        target, sizes = target[:1], sizes[:1]
    rows = case.rows[: len(target)]
    every = torch.tensor([list(permutations(picks)) for picks in unpad(target)]).long()
    padding = target[:, sizes[0] :].unsqueeze(1).expand(-1, every.shape[1], -1)
    with pytest.MonkeyPatch.context() as patch:
        use_orders(patch, torch.cat([every, padding], 2))
        pot = case.pot[: len(rows)]
        got = cpl.subset_nll(pot, target, early_stop_weight=0, per_step=False, reduction="none")
    likelihoods = [[oracle.ordered_loss(row, order) for order in every[b].tolist()] for b, row in enumerate(rows)]
    agree(got, [math.fsum(one) / len(one) for one in likelihoods])


@pytest.mark.parametrize("kind", SETS)
def test_random_subsets_converge_to_the_exact_form(kind: str) -> None:
    case = fixed_case(kind, 1, 3, 5)
    target = torch.tensor([[0, 2, 4, 1], [3, 1, -1, -1], [-1, -1, -1, -1]])
    generator = torch.Generator().manual_seed(0)
    for early in (0.0, 5.0):
        exact = cpl.subset_nll(case.pot, target, early_stop_weight=early, exact=True, reduction="none")
        draws = torch.stack(
            [
                cpl.subset_nll(
                    case.pot, target, early_stop_weight=early, subsets=40, reduction="none", generator=generator
                )
                for _ in range(60)
            ]
        )
        error = draws.std(0) / len(draws) ** 0.5
        assert ((draws.mean(0) - exact).abs() < 4.5 * error + TIGHT).all()
        assert error[2] == 0  # an empty target has one context


def test_orders_are_drawn_uniformly_and_independently() -> None:
    target = torch.tensor([[5, 6, 7, -1], [1, 2, -1, -1]])
    drawn = shuffled(target, 3000, torch.Generator().manual_seed(0))
    assert drawn.shape == (2, 3000, 4)
    for b, size in ((0, 6), (1, 2)):
        counts = Counter(tuple(order) for order in unpad(drawn[b]))
        assert len(counts) == size
        assert stats.chisquare(list(counts.values())).pvalue > 1e-4
    assert (drawn[0, :, 3] == -1).all()


def leaves(case: Case) -> tuple[list[str], list[Tensor]]:
    """The tensors of the potentials that take a gradient."""
    interaction = case.pot.interaction
    names = [n for n in PARTS_OF if getattr(interaction, n, None) is not None]
    tensors = [case.pot.unary, case.pot.stop, *(getattr(interaction, n) for n in names)]
    return names, [t.detach().clone().requires_grad_() for t in tensors]


def rebuilt(case: Case, names: list[str], tensors: tuple[Tensor, ...]) -> cpl.Potentials:
    """The same potentials from other tensors."""
    parts: dict[str, Any] = dict(zip(names, tensors[2:], strict=True))
    if isinstance(case.pot.interaction, cpl.Contextual):
        parts["network"] = case.pot.interaction.network
    return cpl.Potentials(tensors[0], tensors[1], type(case.pot.interaction)(**parts), case.pot.mask)


LOSSES: dict[str, Any] = {
    "ordered": lambda pot, target: cpl.ordered_nll(pot, target, reduction="none"),
    "per_step": lambda pot, target: cpl.ordered_nll(pot, target, per_step=True),
    "permutations": lambda pot, target: cpl.subset_nll(
        pot, target, 3, reduction="none", generator=torch.Generator().manual_seed(0)
    ),
    "subsets": lambda pot, target: cpl.subset_nll(
        pot, target, subsets=5, early_stop_weight=2.0, generator=torch.Generator().manual_seed(0)
    ),
    "exact": lambda pot, target: cpl.subset_nll(pot, target, exact=True, stop_weight=0.5, reduction="sum"),
}


@pytest.mark.parametrize("kind", sorted(set(KINDS) - set(SETS)))
def test_sets_of_picks_say_nothing_of_their_order(kind: str) -> None:
    pot, target = fixed_case(kind, 0, 2, 5).pot, torch.tensor([[0, 2], [1, 3]])
    for options in ({"exact": True}, {"subsets": 3}):
        with pytest.raises(ValueError, match=r"subsets, exact: expected .* got Recent, which depends on their order"):
            cpl.subset_nll(pot, target, **options)  # type: ignore[arg-type]


GRADIENTS = [(kind, loss) for kind in KINDS for loss in LOSSES if kind in SETS or loss not in ("subsets", "exact")]


@pytest.mark.parametrize(("kind", "loss"), GRADIENTS)
def test_gradients(kind: str, loss: str) -> None:
    case = fixed_case(kind, 2, 3, 4)
    mask = torch.tensor([[True] * 4, [True, True, True, False], [False] * 4])
    case = Case(cpl.Potentials(case.pot.unary, case.pot.stop, case.pot.interaction, mask), case.rows, kind)
    target = torch.tensor([[3, 0, 2], [1, 2, -1], [-1, -1, -1]])
    names, tensors = leaves(case)

    def value(*parts: Tensor) -> Tensor:
        result: Tensor = LOSSES[loss](rebuilt(case, names, parts), target)
        return result

    assert torch.autograd.gradcheck(value, tuple(tensors))


@pytest.mark.parametrize("loss", LOSSES)
def test_an_empty_target_is_the_loss_of_stopping_at_once(loss: str) -> None:
    case = fixed_case("lowrank", 3, 2, 4)
    stop = torch.tensor([-oracle.step_log_probs(row, oracle.FREE, ())[-1] for row in case.rows], dtype=torch.float64)
    if loss == "exact":
        stop = 0.5 * stop
    for width in (0, 3):
        got = LOSSES[loss](case.pot, torch.full((2, width), -1))
        want = {"per_step": stop.mean(), "subsets": stop.mean(), "exact": stop.sum()}.get(loss, stop)
        torch.testing.assert_close(got, want, atol=TIGHT, rtol=0)


def test_taking_everyone_leaves_only_the_stop() -> None:
    """With all candidates picked the stop is certain: its term is zero."""
    case = fixed_case("dense", 4, 1, 3)
    order = torch.tensor([[2, 0, 1]])
    want = -sum(oracle.step_log_probs(case.rows[0], oracle.FREE, (2, 0, 1)[:t])[c] for t, c in enumerate((2, 0, 1)))
    agree(cpl.ordered_nll(case.pot, order, reduction="none"), [want])


@pytest.mark.parametrize("options", [{}, {"subsets": 3}, {"exact": True}])
def test_a_weight_of_zero_leaves_out_even_a_stop_that_is_ruled_out(options: dict[str, Any]) -> None:
    pot = fixed_case("dense", 5, 2, 4).pot
    never = cpl.Potentials(pot.unary, torch.full_like(pot.stop, -torch.inf), pot.interaction, pot.mask)
    target = torch.tensor([[1, 0, 2], [3, -1, -1]])

    def value(pot: cpl.Potentials, **weights: float) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return cpl.subset_nll(pot, target, reduction="none", generator=generator, **weights, **options)

    assert value(never, early_stop_weight=0.0).eq(torch.inf).any()
    got = value(never, early_stop_weight=0.0, stop_weight=0.0)
    assert got.isfinite().all()
    low = cpl.Potentials(pot.unary, torch.full_like(pot.stop, -1e3), pot.interaction, pot.mask)
    torch.testing.assert_close(got, value(low, early_stop_weight=0.0, stop_weight=0.0))


def test_exact_has_a_limit_and_refuses_subsets() -> None:
    case = fixed_case("dense", 5, 1, 14)
    with pytest.raises(ValueError, match="target: expected at most 12 items with exact=True, got 13"):
        cpl.subset_nll(case.pot, torch.arange(13).unsqueeze(0), exact=True)
    with pytest.raises(ValueError, match="subsets: expected None with exact=True"):
        cpl.subset_nll(case.pot, torch.arange(3).unsqueeze(0), exact=True, subsets=4)


def test_the_generator_decides_and_nothing_else() -> None:
    case = fixed_case("dense", 6, 2, 5)
    target = torch.tensor([[0, 1, 2, 3], [4, 1, 0, -1]])

    def value(seed: int, **options: Any) -> Tensor:
        return cpl.subset_nll(case.pot, target, 2, generator=torch.Generator().manual_seed(seed), **options)

    assert value(0) == value(0)
    assert value(0) != value(1)
    assert value(0, subsets=3) == value(0, subsets=3)
    assert value(0, subsets=3) != value(1, subsets=3)


def test_learning_finds_the_target() -> None:
    """A few steps of each loss on fixed potentials make the target the likeliest."""
    for loss in ("ordered", "permutations"):
        torch.manual_seed(0)
        unary, stop = torch.zeros(1, 5, requires_grad=True), torch.zeros(1, requires_grad=True)
        keys, values = torch.randn(1, 5, 4, requires_grad=True), torch.randn(1, 5, 4, requires_grad=True)
        stop_key = torch.randn(1, 4, requires_grad=True)
        optimizer = torch.optim.Adam([unary, stop, keys, values, stop_key], 0.05)
        target = torch.tensor([[3, 1]])
        for _ in range(150):
            optimizer.zero_grad()
            pot = cpl.Potentials(unary, stop, cpl.LowRank(keys, values, stop_key))
            LOSSES[loss](pot, target).sum().backward()
            optimizer.step()
        assert cpl.greedy(pot).mask().tolist() == [[False, True, False, True, False]]
        if loss == "ordered":
            assert cpl.greedy(pot).tolist() == [[3, 1]]


def test_exact_does_not_count_padding() -> None:
    """Columns that are padding in every row are no items: neither a limit nor 2^T contexts."""
    case = fixed_case("dense", 5, 2, 4)
    target = torch.tensor([[0, 2], [1, -1]])
    padded = torch.nn.functional.pad(target, (0, 30), value=-1)
    short, long = (cpl.subset_nll(case.pot, t, exact=True, reduction="none") for t in (target, padded))
    torch.testing.assert_close(short, long)

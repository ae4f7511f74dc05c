"""Every kind of interaction behind one protocol: all ways to the same state agree, with each other and the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import KINDS, Case, cases, fixed_case, orders, unpad
from torch.utils._python_dispatch import TorchDispatchMode

import torchcpl as cpl
from torchcpl.interactions.base import State, reorder

TIGHT = 1e-12


def same(a: torch.Tensor | None, b: torch.Tensor | None) -> None:
    assert (a is None) == (b is None)
    if a is not None:
        torch.testing.assert_close(a, b, atol=TIGHT, rtol=TIGHT)


def read(case: Case, state: State, k: int = 0) -> list[tuple[list[float], float]]:
    """What a state adds, for hypothesis k of every row."""
    added, stop = case.pot.interaction.logits(state)
    return [(added[b, k].tolist(), 0.0 if stop is None else float(stop[b, k])) for b in range(len(case.rows))]


@given(st.data())
def test_every_way_to_a_state_agrees_with_the_oracle(data: Any) -> None:
    case = data.draw(cases())
    order = data.draw(orders(case))
    interaction = case.pot.interaction
    width = order.shape[1]
    stepped = interaction.start(2)
    prefixes = interaction.prefixes(order.unsqueeze(1))
    added, added_stop = interaction.prefix_logits(order)
    assert added.shape == (len(case.rows), width + 1, case.size)
    assert (added_stop is not None) == case.kind.endswith("+stop")
    for t in range(width + 1):
        if t:
            stepped = interaction.advance(stepped, order[:, t - 1 : t].expand(-1, 2))
        want = [row.effect(tuple(picks[:t])) for row, picks in zip(case.rows, unpad(order), strict=True)]
        at_once = interaction.after(order[:, :t].unsqueeze(1))
        for got in (read(case, stepped), read(case, stepped, 1), read(case, at_once), read(case, prefixes, t)):
            for (mine, stop), (theirs, their_stop) in zip(got, want, strict=True):
                assert mine == pytest.approx(theirs, abs=1e-10)
                assert stop == pytest.approx(their_stop, abs=1e-10)
        for b, (mine, stop) in enumerate(want):
            assert added[b, t].tolist() == pytest.approx(mine, abs=1e-10)
            if added_stop is not None:
                assert added_stop[b, t].item() == pytest.approx(stop, abs=1e-10)


@given(st.data())
def test_padding_anywhere_changes_nothing(data: Any) -> None:
    case = data.draw(cases())
    order = data.draw(orders(case, extra=0))
    other = order.flip(1) if case.pot.interaction.depends_on == "set" else order
    holes = torch.cat([torch.full_like(order[:, :1], -1), other, torch.full_like(order[:, :1], -1)], 1)
    for a, b in zip(
        case.pot.interaction.after(order.unsqueeze(1)), case.pot.interaction.after(holes.unsqueeze(1)), strict=True
    ):
        same(a, b)


@given(cases())
def test_dense_is_the_effect_of_one_pick(case: Case) -> None:
    W, stop = case.pot.interaction.dense(), case.pot.interaction.dense_stop()
    assert W.shape == (len(case.rows), case.size, case.size)
    assert (stop is not None) == case.kind.endswith("+stop")
    for b, row in enumerate(case.rows):
        base, base_stop = row.effect(())
        for i in range(case.size):
            added, added_stop = row.effect((i,))
            assert W[b, :, i].tolist() == pytest.approx([a - z for a, z in zip(added, base, strict=True)], abs=1e-10)
            if stop is not None:
                assert stop[b, i].item() == pytest.approx(added_stop - base_stop, abs=1e-10)


def test_a_lowrank_equals_its_dense_form_everywhere() -> None:
    pot = fixed_case("lowrank+stop", 0, 3, 6).pot
    twin = cpl.Potentials(
        pot.unary, pot.stop, cpl.Dense(pot.interaction.dense(), pot.interaction.dense_stop()), pot.mask
    )
    order = torch.tensor([[4, 0, 2], [1, -1, -1], [5, 3, -1]])
    same(cpl.ordered_nll(pot, order), cpl.ordered_nll(twin, order))
    same(cpl.subset_nll(pot, order, exact=True), cpl.subset_nll(twin, order, exact=True))
    same(cpl.beam(pot, 16, 16).log_prob, cpl.beam(twin, 16, 16).log_prob)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_reorder(kind: str) -> None:
    case = fixed_case(kind, 1, 3, 4)
    interaction = case.pot.interaction
    some = interaction.rows([2, 0, 2])
    assert some.shape == (3, 4)
    same(some.dense(), interaction.dense()[[2, 0, 2]])
    assert type(some) is type(interaction)
    order = torch.tensor([[0, 1, 3], [3, 2, 1], [1, 0, 2]])
    states = interaction.prefixes(order.unsqueeze(1))  # hypotheses of 0 … 3 picks
    parents = torch.tensor([[3, 0, 1, 1], [2, 2, 2, 0], [0, 1, 2, 3]])
    for part, moved in zip(states, reorder(states, parents), strict=True):
        for b in range(3):
            for k in range(4):
                same(part[b, parents[b, k]], moved[b, k])


class Shapes(TorchDispatchMode):
    """Notes the largest tensor that any operation makes."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in torch.utils._pytree.tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.largest = max(self.largest, leaf.numel())
        return out


@pytest.mark.parametrize("live", [False, True])
def test_lowrank_never_builds_the_matrix(live: bool) -> None:
    """Nor a tensor of its size, forward, backward or decoding."""
    n, h, batch = 400, 4, 2
    torch.manual_seed(0)
    stop_key = torch.randn(batch, h, requires_grad=True) if live else None
    keys, values = torch.randn(batch, n, h, requires_grad=True), torch.randn(batch, n, h, requires_grad=True)
    unary = torch.randn(batch, n, requires_grad=True)
    pot = cpl.Potentials(unary, torch.zeros(batch), cpl.LowRank(keys, values, stop_key))
    target = torch.tensor([[3, 7, 399], [5, -1, -1]])
    with Shapes() as seen:
        (cpl.ordered_nll(pot, target) + cpl.subset_nll(pot, target, permutations=3)).backward()
        cpl.greedy(pot, max_len=3)
        cpl.sample(pot, 4, max_len=3)
        cpl.beam(pot, 4, max_len=3)
        cpl.stochastic_beam(pot, 3, max_len=3)
        cpl.set_log_prob(pot, target)
    assert 0 < seen.largest < batch * n * n / 4
    assert keys.grad is not None


def test_bfloat16_contexts_are_summed_in_float32() -> None:
    """Thousands of small values would be lost in bfloat16."""
    n = 2000
    values = torch.full((1, n, 1), 0.01, dtype=torch.bfloat16)
    interaction = cpl.LowRank(torch.ones(1, n, 1, dtype=torch.bfloat16), values)
    state = interaction.after(torch.arange(n).view(1, 1, n))
    assert state[0].dtype == torch.float32
    assert state[0].item() == pytest.approx(n * values[0, 0, 0].item(), rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_no_candidates_at_all(kind: str) -> None:
    case = fixed_case(kind, 2, 2, 0)
    added, _ = case.pot.interaction.prefix_logits(torch.full((2, 1), -1))
    assert added.shape == (2, 2, 0)
    assert case.pot.interaction.dense().shape == (2, 0, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_an_interaction_is_a_pytree(kind: str) -> None:
    pot = fixed_case(kind, 3, 2, 3).pot
    moved = torch.utils._pytree.tree_map(
        lambda x: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x, pot
    )
    assert isinstance(moved, cpl.Potentials)
    assert type(moved.interaction) is type(pot.interaction)
    same(moved.interaction.dense(), pot.interaction.dense())

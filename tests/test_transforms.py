"""``torch.func``: ``vmap``, ``grad``, ``jacrev`` and ``jvp`` of losses and log-probabilities, against loops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from strategies import KINDS, fixed_case
from torch import Tensor
from torch.utils import _pytree as pytree

import torchcpl as cpl

ORDER = torch.tensor([[3, 0, 2], [1, 2, -1]])
FORBID = torch.tensor([False, True, False, False, True])

VALUES: dict[str, Callable[[cpl.Potentials, Tensor], Tensor]] = {
    "log_prob": lambda pot, order: cpl.log_prob(pot, order),
    "log_prob under rules": lambda pot, order: cpl.log_prob(
        pot,
        order,
        max_len=4,
        min_len=1,
        stop_bias=0.3,
        constraints=[
            cpl.Forbid(FORBID & False),
            cpl.Require(FORBID & False),
            cpl.Adjacent(~torch.eye(5, dtype=torch.bool)),
            cpl.Budget(torch.ones(5), 4),
        ],
    ),
    "set_log_prob": lambda pot, order: cpl.set_log_prob(pot, order)[0],
    "ordered_nll": lambda pot, order: cpl.ordered_nll(pot, order, reduction="none"),
    "ordered_nll per step": lambda pot, order: cpl.ordered_nll(pot, order, per_step=True),
    "subset_nll": lambda pot, order: cpl.subset_nll(pot, order, 2, generator=torch.Generator().manual_seed(0)),
    "subset_nll exact": lambda pot, order: cpl.subset_nll(pot, order, exact=True, early_stop_weight=1.0),
    "distribution": lambda pot, order: cpl.ContextualPlackettLuce(pot).log_prob(order),
}
CASES = [(kind, name) for kind in KINDS for name in VALUES if not (kind.startswith("recent") and "exact" in name)]


def potentials(kind: str, seed: int) -> cpl.Potentials:
    pot = fixed_case(kind, seed, 2, 5).pot
    return cpl.Potentials(pot.unary, pot.stop, pot.interaction, torch.tensor([[True] * 5, [True] * 4 + [False]]))


def stacked(pots: list[cpl.Potentials]) -> cpl.Potentials:
    """Potentials whose tensors all have one more dimension in front, for ``vmap`` to take away."""
    flat = [pytree.tree_flatten(pot) for pot in pots]
    leaves = [
        torch.stack(parts) if isinstance(parts[0], Tensor) else parts[0]
        for parts in zip(*(f[0] for f in flat), strict=True)
    ]
    return pytree.tree_unflatten(leaves, flat[0][1])  # type: ignore[no-any-return]


def with_unary(pot: cpl.Potentials, unary: Tensor) -> cpl.Potentials:
    return replace(pot, unary=unary)


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_vmap_equals_a_loop(kind: str, name: str) -> None:
    value = VALUES[name]
    pots = [potentials(kind, seed) for seed in range(3)]
    orders = torch.stack([ORDER, ORDER.flip(0), torch.tensor([[0, -1, -1], [3, 2, 1]])])
    options: dict[str, Any] = {"randomness": "same"}  # the same permutations for each
    both = torch.vmap(value, **options)(stacked(pots), orders)
    torch.testing.assert_close(both, torch.stack([value(p, o) for p, o in zip(pots, orders, strict=True)]))
    shared = torch.vmap(value, in_dims=(0, None), **options)(stacked(pots), ORDER)
    torch.testing.assert_close(shared, torch.stack([value(pot, ORDER) for pot in pots]))
    if name != "subset_nll":  # its permutations are drawn before anything is batched
        sequences = torch.vmap(value, in_dims=(None, 0), **options)(pots[0], orders)
        torch.testing.assert_close(sequences, torch.stack([value(pots[0], order) for order in orders]))


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_grad_and_jacobians_equal_backward(kind: str, name: str) -> None:
    pot, value = potentials(kind, 0), VALUES[name]

    def f(unary: Tensor) -> Tensor:
        return value(with_unary(pot, unary), ORDER)

    want = torch.autograd.functional.jacobian(f, pot.unary)
    torch.testing.assert_close(torch.func.jacrev(f)(pot.unary), want)
    torch.testing.assert_close(torch.func.jacfwd(f, randomness="same")(pot.unary), want)
    torch.testing.assert_close(
        torch.func.grad(lambda u: f(u).sum())(pot.unary), want.reshape(-1, *pot.unary.shape).sum(0)
    )


def test_gradients_of_every_row_at_once() -> None:
    """Per-sample gradients, vmap of grad, of the whole head."""
    torch.manual_seed(0)
    head = cpl.CPLHead(4, 8, kind="contextual", live_stop=True).double()
    features = torch.randn(3, 5, 4, dtype=torch.double)
    order = torch.tensor([[0, 2], [1, -1], [4, 3]])

    class Loss(torch.nn.Module):
        """The network of a contextual head runs in the loss: both belong into one ``functional_call``."""

        def __init__(self) -> None:
            super().__init__()
            self.head = head

        def forward(self, x: Tensor, picks: Tensor) -> Tensor:
            return cpl.ordered_nll(self.head(x[None]), picks[None])

    whole = Loss()

    def loss(parameters: dict[str, Tensor], x: Tensor, picks: Tensor) -> Tensor:
        value: Tensor = torch.func.functional_call(whole, parameters, (x, picks))
        return value

    parameters = dict(whole.named_parameters())
    got = torch.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, features, order)
    for row in range(3):
        head.zero_grad()
        cpl.ordered_nll(head(features[row : row + 1]), order[row : row + 1]).backward()
        for name, parameter in head.named_parameters():
            torch.testing.assert_close(got[f"head.{name}"][row], parameter.grad)


def test_values_are_checked_again_afterwards() -> None:
    pot = potentials("dense", 0)
    torch.func.grad(lambda u: cpl.log_prob(with_unary(pot, u), ORDER).sum())(pot.unary)
    with pytest.raises(ValueError, match="order: expected indices"):
        cpl.log_prob(pot, ORDER + 9)


PART = torch.tensor([[3, 0, -1], [-1, -1, -1]])
PARTS: dict[str, Callable[[cpl.Potentials], Any]] = {
    "next_probs": lambda pot: cpl.next_probs(pot, PART),
    "inclusion_probs": lambda pot: cpl.inclusion_probs(pot, PART),
}


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_several_sizes(kind: str, name: str) -> None:
    """Padding of a part is no pick, also where the sizes may not be read."""
    if kind.startswith("recent") and name == "inclusion_probs":
        pytest.skip("estimated by sampling, which vmap does not allow")
    pots = [potentials(kind, seed) for seed in range(2)]
    want = torch.stack([PARTS[name](pot) for pot in pots])
    torch.testing.assert_close(torch.vmap(PARTS[name])(stacked(pots)), want)

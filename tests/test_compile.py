"""``torch.compile`` gives what eager does, whichever kind it meets first, and few graphs for many sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from strategies import fixed_case
from torch._dynamo.testing import CompileCounter
from torch.utils import _pytree as pytree

import torchcpl as cpl
from torchcpl.selectors import PointerHead

ORDER = torch.tensor([[0, 3, -1], [2, 1, 4], [-1, -1, -1]])
CALLS: dict[str, Callable[[cpl.Potentials], Any]] = {
    "greedy": cpl.greedy,
    "greedy with limits": lambda pot: cpl.greedy(pot, 4, min_len=2, stop_bias=0.5),
    "greedy by threshold": lambda pot: cpl.greedy(pot, stop_threshold=0.3),
    "greedy without one": lambda pot: cpl.greedy(pot, constraints=[cpl.Forbid(torch.arange(5) == 2)]),
    "beam": lambda pot: cpl.beam(pot, 3, 2),
    "log_prob": lambda pot: cpl.log_prob(pot, ORDER),
    "ordered_nll": lambda pot: cpl.ordered_nll(pot, ORDER),
    "set_log_prob": lambda pot: cpl.set_log_prob(pot, ORDER)[0],
}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Every test compiles for itself: dynamo counts recompilations across them."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def potentials(kind: str, seed: int = 0) -> cpl.Potentials:
    return fixed_case(kind, seed, batch=3, n=5).pot


def same(have: Any, want: Any) -> None:
    for a, b in zip(pytree.tree_leaves(have), pytree.tree_leaves(want), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_greedy_of_one_kind_after_another() -> None:
    """What a compiled function falls back to is not traced through NumPy, which would lose writes to views."""
    compiled = torch.compile(lambda pot: cpl.greedy(pot), backend="eager")
    compiled(potentials("contextual"))
    for seed in range(6):
        pot = potentials("recent+stop", seed)
        same(compiled(pot), cpl.greedy(pot))


@pytest.mark.parametrize("name", CALLS)
def test_every_kind_in_turn_and_after_the_compiler_has_given_up(name: str) -> None:
    call = CALLS[name]
    compiled = torch.compile(lambda pot: call(pot), backend="eager")
    with torch._dynamo.config.patch(recompile_limit=2):
        for kind in ("contextual", "recent+stop", "dense+stop", "coverage", "lowrank"):
            pot = potentials(kind)
            same(compiled(pot), call(pot))


@pytest.mark.parametrize("kind", ["lowrank", "recent+stop"])
def test_completions_of_parts_of_several_sizes(kind: str) -> None:
    """Padding of a part is no pick, also where the sizes may not be read."""
    part, pot = torch.tensor([[4, 0, 2], [1, -1, -1], [-1, -1, -1]]), potentials(kind)
    for options in ({"num_beams": 3, "num_return": 2}, {}):
        compiled = torch.compile(lambda pot, options=options: cpl.complete(pot, part, 4, **options), backend="eager")
        same(compiled(pot), cpl.complete(pot, part, 4, **options))


@pytest.mark.parametrize("cache", [True, False])
def test_the_pointer_whose_state_grows(cache: bool) -> None:
    torch.manual_seed(0)
    head = PointerHead(8, heads=2, ffn=16, max_len=5, cache=cache).double().eval().requires_grad_(False)
    pot = head(torch.randn(3, 5, 8, dtype=torch.float64))
    part = torch.tensor([[4, 0, 2], [1, -1, -1], [-1, -1, -1]])  # caches of several lengths
    calls: list[Callable[[cpl.Potentials], Any]] = [
        lambda pot: cpl.greedy(pot, 4),
        lambda pot: cpl.next_probs(pot, part),
        lambda pot: cpl.complete(pot, part, 4),
        lambda pot: cpl.complete(pot, part, 4, num_beams=3, num_return=2),
    ]
    for call in calls:
        torch._dynamo.reset()
        same(torch.compile(call, backend="eager")(pot), call(pot))


class Whole(torch.nn.Module):
    """Features to a loss, or to a selection."""

    def __init__(self, kind: str, what: str) -> None:
        super().__init__()
        self.head, self.what = cpl.CPLHead(6, 8, kind=kind, live_stop=True), what

    def forward(self, features: torch.Tensor, mask: torch.Tensor, target: torch.Tensor) -> Any:
        pot = self.head(features, mask)
        if self.what == "greedy":
            return cpl.greedy(pot)
        return cpl.ordered_nll(pot, target) if self.what == "ordered_nll" else cpl.subset_nll(pot, target, 3)


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("lowrank", "greedy"),
        ("recent", "greedy"),
        ("coverage", "greedy"),
        ("lowrank", "subset_nll"),
        ("contextual", "ordered_nll"),
    ],
)
def test_few_graphs_for_many_sizes(kind: str, what: str) -> None:
    counter = CompileCounter()
    torch.manual_seed(0)
    model = Whole(kind, what).eval()
    compiled = torch.compile(model, dynamic=True, fullgraph=True, backend=counter)
    for batch, n, steps in ((3, 7, 4), (4, 9, 2), (2, 12, 5), (5, 6, 6), (7, 30, 3), (4, 4, 4), (6, 11, 8)):
        target = torch.stack([torch.randperm(n)[:steps] for _ in range(batch)])
        given = (torch.randn(batch, n, 6), torch.ones(batch, n, dtype=torch.bool), target)
        torch.manual_seed(1)  # the orders of subset_nll
        have = compiled(*given)
        torch.manual_seed(1)
        for a, b in zip(pytree.tree_leaves(have), pytree.tree_leaves(model(*given)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert counter.frame_count <= 2


def test_beams_in_one_graph() -> None:
    compiled = torch.compile(lambda pot: cpl.beam(pot, 3, 2), fullgraph=True, backend="eager")
    for seed in range(4):
        pot = potentials("lowrank", seed)
        same(compiled(pot), cpl.beam(pot, 3, 2))

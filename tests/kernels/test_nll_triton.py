"""The loss kernels, forward and backward, against loops in float64, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import astuple, replace
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor

import torchcpl as cpl
from torchcpl import functional
from torchcpl.constraints import Rules
from torchcpl.kernels import dispatch, nll_triton, use
from torchcpl.kernels.nll_triton import Tiles, tiles

Leaves = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # unary, stop, keys, values, stop_key

GRADIENTS = ("∂unary", "∂stop", "∂keys", "∂values", "∂stop_key")


def draw(batch: int, n: int, hidden: int, dtype: torch.dtype, device: torch.device) -> Leaves:
    shapes = ((batch, n), (batch,), (batch, n, hidden), (batch, n, hidden), (batch, hidden))
    unary, stop, keys, values, stop_key = (torch.randn(*shape).to(device, dtype) for shape in shapes)
    return unary, stop, keys, values, stop_key


def sequences(mask: Tensor, count: int, steps: int) -> Tensor:
    """(B, P, T) random picks among what is there, the first row's two short of the last."""
    keys = torch.rand(mask.shape[0], count, mask.shape[1]).masked_fill(~mask.cpu().unsqueeze(1), 2)
    order = keys.argsort(-1)[..., :steps]
    order = order.masked_fill(keys.gather(-1, order) == 2, -1)
    if steps > 2:
        order[0, :, steps - 2 :] = -1
    return order.to(mask.device)


def reference(leaves: Leaves, mask: Tensor, order: Tensor, remaining: bool, live: bool = True) -> Any:
    """One sequence and one prefix at a time, over the dense W."""
    unary, stop, keys, values, stop_key = leaves
    root = math.sqrt(keys.shape[2])
    batch, count, steps = order.shape
    picks, stops, whole = [], [], []
    for b in range(batch):
        W = keys[b] @ values[b].T / root
        row = values[b] @ stop_key[b] / root
        for p in range(count):
            items = [i for i in order[b, p].tolist() if i >= 0]
            for t in range(steps + 1):
                before, after = items[:t], items[t:]
                gone = ~mask[b]
                gone = gone.index_fill(0, torch.tensor(before, device=gone.device).long(), True)
                logits = (unary[b] + W[:, before].sum(1)).masked_fill(gone, -math.inf)
                last = stop[b : b + 1] + (row[before].sum() if live else 0)
                if bool((torch.cat([logits, last]) == -math.inf).all()):
                    last = torch.zeros_like(last)
                log_probs = torch.cat([logits, last]).log_softmax(0)
                wanted = after if remaining else after[:1]
                picks.append(log_probs[wanted].sum() if wanted else unary.new_zeros(()))
                stops.append(log_probs[-1])
            whole.append(sum(picks[-steps - 1 :]) + stops[len(items) - steps - 1])
    if not remaining:
        return torch.stack(whole).view(batch, count)
    shape = (batch, count, steps + 1)
    return torch.stack(picks).view(shape), torch.stack(stops).view(shape)


def plain(leaves: Leaves, mask: Tensor, order: Tensor, remaining: bool, live: bool = True) -> Any:
    pot, rules = process(leaves, mask, live)
    if remaining:
        return functional.prefix_log_probs(pot, order, rules, remaining)
    return functional.sequence_log_probs(pot, order, rules)


def fused(leaves: Leaves, mask: Tensor, order: Tensor, remaining: bool, live: bool = True) -> Any:
    twin: Any = nll_triton.remaining_log_probs if remaining else nll_triton.sequence_log_probs
    pot, rules = process(leaves, mask, live)
    return twin(pot, order, rules)


def process(leaves: Leaves, mask: Tensor, live: bool) -> tuple[cpl.Potentials, Rules]:
    unary, stop, keys, values, stop_key = leaves
    pot = cpl.Potentials(unary, stop, cpl.LowRank(keys, values, stop_key if live else None), mask)
    return pot, Rules(pot)


def results(way: Any, leaves: Leaves, mask: Tensor, order: Tensor, remaining: bool, live: bool = True) -> list[Tensor]:
    """The outputs and the gradients of a sum of them with uneven weights, over what lies before the end."""
    leaves = tuple(leaf.detach().requires_grad_() for leaf in leaves)  # type: ignore[assignment]
    found = way(leaves, mask, order, remaining, live)
    if remaining:
        ended = torch.arange(order.shape[2] + 1, device=order.device) > (order >= 0).sum(-1, keepdim=True)
        found = torch.stack([part.masked_fill(ended, 0) for part in found])
    weight = torch.linspace(0.5, 1.5, found.numel(), device=found.device, dtype=torch.float64).view(found.shape)
    grads = torch.autograd.grad((found * weight).sum(), leaves, allow_unused=True)
    kept = [torch.zeros_like(leaf) if grad is None else grad for grad, leaf in zip(grads, leaves, strict=True)]
    return [*(found.detach() if remaining else [found.detach()]), *kept]


def named(found: list[Tensor]) -> list[str]:
    return [*(("picks", "stop") if len(found) > 6 else ("sequences",)), *GRADIENTS]


def check(leaves: Leaves, mask: Tensor, order: Tensor, remaining: bool = False, live: bool = True) -> None:
    """At most a few times the error of plain torch in the same precision, which in turn is at least a rounding's."""
    single = leaves[2].dtype == torch.float32
    rounding = torch.finfo(torch.float32).eps if single else torch.finfo(torch.bfloat16).eps / 8
    # In float32 tensor cores cut the sums of their products off, where plain torch rounds them. The interpreter cuts
    # bfloat16 off where hardware rounds it.
    times = (4 if single else 2) if leaves[2].is_cuda else (2 if single else 8)
    exact = results(reference, tuple(x.double() for x in leaves), mask, order, remaining, live)  # type: ignore[arg-type]
    ours = results(fused, leaves, mask, order, remaining, live)
    theirs = results(plain, leaves, mask, order, remaining, live)
    for name, want, have, other in zip(named(exact), exact, ours, theirs, strict=True):
        scale = float(want.norm()) + 1e-30
        error, allowed = float((have - want).norm()) / scale, float((other - want).norm()) / scale
        # One number for each of a few rows: plain torch may happen to be exact. The bias of tensor cores, which this is
        # to find, is on a GPU only.
        least = 2 * rounding if name == "∂stop" and not leaves[2].is_cuda else rounding
        assert error <= times * max(allowed, least), f"{name}: {error:.1e}, plain torch {allowed:.1e}"


@pytest.fixture
def force(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Tiles]]:
    """Change the tiles the kernels choose; returns the list of those that were used."""

    def with_changes(**changes: Any) -> list[Tiles]:
        used: list[Tiles] = []

        def forced(batch: int, count: int, steps: int, *rest: Any) -> Tiles:
            chosen = replace(tiles(batch, count, steps, *rest), **changes)
            number = batch * count * max(1, -(-steps // chosen.steps))
            chosen = replace(chosen, count=number, both=chosen.both and number == batch)
            used.append(chosen)
            return chosen

        monkeypatch.setattr(nll_triton, "tiles", forced)
        return used

    return with_changes


# Each branch by the tiles that lead to it; P, T and N to go with them.
BRANCHES = [
    pytest.param({}, 1, 5, 37, id="one-tile"),
    pytest.param({"split": 3, "candidates": 16}, 1, 5, 70, id="split"),
    pytest.param({"split": 2, "candidates": 16}, 2, 3, 40, id="sequences-split"),
    pytest.param({"split": 5, "candidates": 16}, 1, 3, 17, id="more-shares-than-tiles"),
    pytest.param({"steps": 16}, 1, 35, 40, id="several-tiles-of-contexts"),
    pytest.param({}, 3, 4, 20, id="several-sequences"),
    pytest.param({"chunk": 32, "hidden": 128}, 1, 4, 20, id="hidden-in-chunks"),
]


@pytest.mark.parametrize(("changes", "count", "steps", "n"), BRANCHES)
@pytest.mark.parametrize(
    ("remaining", "dtype"),
    [(False, torch.float32), (True, torch.float32), (False, torch.bfloat16), (True, torch.bfloat16)],
    ids=["whole-float32", "remaining-float32", "whole-bfloat16", "remaining-bfloat16"],
)
def test_every_branch_is_as_exact_as_plain_torch(
    changes: dict[str, Any],
    count: int,
    steps: int,
    n: int,
    remaining: bool,
    dtype: torch.dtype,
    force: Callable[..., list[Tiles]],
    device: torch.device,
) -> None:
    used = force(**changes)
    mask = (torch.rand(2, n) > 0.1).to(device)
    check(draw(2, n, 20, dtype, device), mask, sequences(mask, count, steps), remaining)
    assert len(used) == 2  # forward and backward
    for name, value in changes.items():
        assert all(getattr(tile, name) == value for tile in used)


SIZES = [(1, 1, 1, 1, 1), (2, 1, 3, 2, 0), (1, 64, 16, 1, 16), (2, 65, 33, 1, 17), (1, 5, 4, 2, 5), (3, 9, 130, 1, 2)]
# With tiles that the small ones do not have: those of the benchmarks.
LARGE = [(2, 150, 64, 1, 32), (2, 150, 128, 1, 32), (2, 150, 128, 2, 10), (2, 150, 128, 1, 64), (2, 150, 256, 3, 10)]


@pytest.mark.parametrize("live", [False, True], ids=["", "live"])
@pytest.mark.parametrize(
    ("batch", "n", "hidden", "count", "steps", "dtype"),
    [(*size, torch.float32) for size in SIZES + LARGE] + [(*size, torch.bfloat16) for size in LARGE],
)
def test_sizes(
    batch: int, n: int, hidden: int, count: int, steps: int, dtype: torch.dtype, live: bool, device: torch.device
) -> None:
    mask = torch.ones(batch, n, dtype=torch.bool, device=device)
    check(draw(batch, n, hidden, dtype, device), mask, sequences(mask, count, steps), True, live)


def test_rows_without_candidates_and_without_picks(device: torch.device) -> None:
    """A row that is all padding, one whose target is empty, and junk where the mask says nothing is."""
    mask = torch.rand(3, 20, device=device) > 0.3
    mask[1] = False
    order = sequences(mask, 2, 4)
    order[2] = -1
    unary, stop, keys, values, stop_key = draw(3, 20, 6, torch.float32, device)
    check((unary, stop, keys, values, stop_key), mask, order)
    check((unary.masked_fill(~mask, 1e30), stop, keys, values, stop_key), mask, order, True)
    junk = unary.masked_fill(~mask, math.nan)
    for have, want in zip(
        results(fused, (junk, stop, keys, values, stop_key), mask, order, False),
        results(fused, (unary, stop, keys, values, stop_key), mask, order, False),
        strict=True,
    ):
        assert have.equal(want)


def test_logits_of_minus_infinity(device: torch.device) -> None:
    """Candidates that are ruled out, and a stop that is certain although its own logit is −inf: nothing else is."""
    unary, stop, keys, values, stop_key = draw(2, 6, 4, torch.float32, device)
    mask = torch.ones(2, 6, dtype=torch.bool, device=device)
    order = torch.tensor([[[4, 1, 0, 5, 3, 2]], [[0, 5, 3, 2, -1, -1]]], device=device)
    unary[1, [1, 4]] = -math.inf
    stop = torch.full_like(stop, -math.inf)
    leaves = tuple(x.requires_grad_() for x in (unary, stop, keys, values, stop_key))
    for remaining in (False, True):
        found = fused(leaves, mask, order, remaining, False)  # type: ignore[arg-type]
        expected = reference(tuple(x.double() for x in leaves), mask, order, remaining, False)  # type: ignore[arg-type]
        for have, want in zip(found, expected, strict=True):
            torch.testing.assert_close(have.double(), want, rtol=1e-5, atol=1e-5)
        total = found[0].sum() + found[1][0, 0, 6] + found[1][1, 0, 4] if remaining else found.sum()
        grads = torch.autograd.grad(total, leaves[:4])
        assert all(bool(grad.isfinite().all()) for grad in grads[2:])


@pytest.mark.parametrize("size", [1e4, 1e7])
@pytest.mark.parametrize("changes", [{}, {"split": 3, "candidates": 16}], ids=["", "split"])
@pytest.mark.parametrize("remaining", [False, True])
def test_large_logits_keep_their_digits(
    remaining: bool, changes: dict[str, Any], size: float, force: Callable[..., list[Tiles]], device: torch.device
) -> None:
    """θ up to 10⁷, where float32 has no digit after the point: exact but for the rounding of the logits themselves."""
    force(**changes)
    mask = torch.ones(2, 50, dtype=torch.bool, device=device)
    unary, stop, keys, values, stop_key = draw(2, 50, 6, torch.float32, device)
    unary = size + (8 * unary).round()
    unary[:, ::7] = -size
    stop = size + (8 * stop).round()
    leaves = (unary, stop, 0 * keys, values, 0 * stop_key)
    order = sequences(mask, 2, 6)
    exact = results(reference, tuple(x.double() for x in leaves), mask, order, remaining)  # type: ignore[arg-type]
    for have, want in zip(results(fused, leaves, mask, order, remaining), exact, strict=True):
        torch.testing.assert_close(have.double(), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("count", [1, 2], ids=["one sequence", "two"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_strides_and_offsets(dtype: torch.dtype, count: int, device: torch.device) -> None:
    batch, n, hidden, steps = 2, 37, 20, 4

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape).to(device, dtype)

    unary = some(n, 2 * batch + 1).T[1::2]
    stop = some(3 * batch)[1::3]
    keys = some(batch, hidden + 2, n)[:, 2:].transpose(1, 2)
    values = some(n, batch, 2 * hidden).transpose(0, 1)[..., ::2]
    stop_key = some(hidden, batch).T
    mask = (torch.rand(n, device=device) > 0.2).expand(batch, n)
    order = sequences(mask, count, 2 * steps)[..., ::2]
    assert not any(x.is_contiguous() for x in (unary, stop, keys, values, stop_key, mask, order))
    check((unary, stop, keys, values, stop_key), mask, order)


def test_runs_are_the_same_to_the_bit(force: Callable[..., list[Tiles]], device: torch.device) -> None:
    force(split=3, candidates=16)
    mask = torch.ones(2, 50, dtype=torch.bool, device=device)
    leaves, order = draw(2, 50, 8, torch.float32, device), sequences(mask, 3, 4)
    first, second = (results(fused, leaves, mask, order, True) for _ in range(2))
    assert all(one.equal(other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_many_candidates(dtype: torch.dtype, force: Callable[..., list[Tiles]], device: torch.device) -> None:
    """65,536 of them; on a GPU as the tiles are chosen, in the interpreter, which is slow, in a few large ones."""
    n = 65_536
    steps = 64 if device.type == "cuda" else 2
    if device.type == "cpu":
        force(candidates=8192, split=2)
    mask = torch.rand(1, n, device=device) > 0.1
    leaves, order = draw(1, n, 4, dtype, device), sequences(mask, 1, steps)
    exact = results(plain, tuple(x.double() for x in leaves), mask, order, False)  # type: ignore[arg-type]
    ours, theirs = results(fused, leaves, mask, order, False), results(plain, leaves, mask, order, False)
    rounding = torch.finfo(dtype).eps
    for name, want, have, other in zip(named(exact), exact, ours, theirs, strict=True):
        scale = float(want.norm()) + 1e-30
        error, allowed = float((have - want).norm()) / scale, float((other - want).norm()) / scale
        assert error <= 2 * max(allowed, rounding), f"{name}: {error:.1e}, plain torch {allowed:.1e}"


def test_factors_beyond_32_bits(device: torch.device) -> None:
    """The third row lies 2³¹ numbers from the first; what lies between is never touched, and costs no memory."""
    leaves = draw(3, 20, 6, torch.bfloat16, device)
    mask = torch.ones(3, 20, dtype=torch.bool, device=device)
    order = sequences(mask, 1, 4)

    def apart(x: Tensor) -> Tensor:
        far = 2**30 + 7
        room = torch.empty(2 * far + x[0].numel(), dtype=x.dtype, device=device)
        return room.as_strided(x.shape, (far, *x.stride()[1:])).copy_(x)

    unary, stop, keys, values, stop_key = leaves
    found = results(fused, (unary, stop, apart(keys), apart(values), stop_key), mask, order, False)
    for have, want in zip(found, results(fused, leaves, mask, order, False), strict=True):
        assert have.equal(want)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA: 17 GB, hours if interpreted")
def test_gradients_beyond_32_bits() -> None:
    """The last rows of a batch whose factors have more than 2³¹ numbers are as those of a batch of their own."""
    batch, n, hidden, steps = 260, 65_536, 128, 4
    device = torch.device("cuda")
    unary, stop, keys, values, _ = draw(2, n, hidden, torch.bfloat16, device)
    mask = torch.ones(2, n, dtype=torch.bool, device=device)
    order = sequences(mask, 1, steps)[:, 0]

    def loss(repeats: int) -> tuple[Tensor, Tensor]:
        own = keys.repeat(repeats, 1, 1).requires_grad_()
        pot = cpl.Potentials(
            unary.repeat(repeats, 1), stop.repeat(repeats), cpl.LowRank(own, values.repeat(repeats, 1, 1))
        )
        value = cpl.ordered_nll(pot, order.repeat(repeats, 1), reduction="none")
        (slope,) = torch.autograd.grad(value.sum(), own)
        return value.detach()[-2:], slope[-2:].clone()

    with use("triton"):
        for have, want in zip(loss(batch // 2), loss(1), strict=True):
            torch.testing.assert_close(have, want, rtol=1e-2, atol=1e-3)


# Through the public functions


LOSSES: dict[str, Callable[[cpl.Potentials, Tensor], Tensor]] = {
    "ordered": lambda pot, target: cpl.ordered_nll(pot, target, reduction="none"),
    "ordered mean": lambda pot, target: cpl.ordered_nll(pot, target),
    "ordered sum": lambda pot, target: cpl.ordered_nll(pot, target, reduction="sum"),
    "ordered per step": lambda pot, target: cpl.ordered_nll(pot, target, per_step=True),
    "subset": lambda pot, target: cpl.subset_nll(
        pot, target, 3, generator=torch.Generator(target.device).manual_seed(0)
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_losses_use_the_kernels(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    mask = torch.rand(3, 20, device=device) > 0.2
    target = sequences(mask, 1, 4)[:, 0]
    leaves = draw(3, 20, 6, torch.float32, device)
    calls = []
    run = nll_triton.nll
    monkeypatch.setattr(nll_triton, "nll", lambda *given: calls.append(1) or run(*given))

    def loss(mode: str) -> tuple[Tensor, ...]:
        own = [leaf.detach().requires_grad_() for leaf in leaves]
        unary, stop, keys, values, stop_key = own
        with use(mode):
            value = LOSSES[name](cpl.Potentials(unary, stop, cpl.LowRank(keys, values, stop_key), mask), target)
        return value.detach(), *torch.autograd.grad(value.sum(), own)

    expected = loss("plain")
    assert not calls
    for have, want in zip(loss("triton"), expected, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-6)
    assert len(calls) == 1
    loss("auto")
    assert len(calls) == (2 if device.type == "cuda" else 1)  # by themselves they run on CUDA only


def test_what_the_kernels_cannot_do_is_refused_when_they_are_forced(device: torch.device) -> None:
    unary, stop, keys, values, _ = draw(2, 8, 4, torch.float32, device)
    order = torch.tensor([[1, 2], [3, -1]], device=device)

    def loss(keys: Tensor = keys, values: Tensor = values, unary: Tensor = unary) -> Tensor:
        return cpl.ordered_nll(cpl.Potentials(unary, stop.to(unary), cpl.LowRank(keys, values)), order)

    with use("triton"):
        loss()
        with pytest.raises(ValueError, match="Dense"):
            cpl.ordered_nll(cpl.Potentials(unary, stop, cpl.Dense(keys @ values.transpose(1, 2))), order)
        with pytest.raises(ValueError, match="float64"):
            loss(keys.double(), values.double())
        with pytest.raises(ValueError, match="float16"):
            loss(keys.half(), values.half())
        with pytest.raises(ValueError, match="a hidden size of 300"):
            loss(keys.repeat(1, 1, 75), values.repeat(1, 1, 75))
        with pytest.raises(ValueError, match="shape"):
            cpl.ordered_nll(cpl.Potentials(unary[:0], stop[:0], cpl.LowRank(keys[:0], values[:0])), order[:0])
    assert loss(keys.double(), values.double(), unary.double()).dtype == torch.float64


def test_autocast_changes_nothing(device: torch.device) -> None:
    leaves, mask = draw(2, 20, 6, torch.float32, device), torch.ones(2, 20, dtype=torch.bool, device=device)
    order = sequences(mask, 2, 4)
    expected = results(fused, leaves, mask, order, False)
    with torch.autocast(device.type, torch.bfloat16):
        found = results(fused, leaves, mask, order, False)
    for have, want in zip(found, expected, strict=True):
        assert have.equal(want)


def test_a_second_derivative_is_refused(device: torch.device) -> None:
    unary, stop, keys, values, _ = (leaf.requires_grad_() for leaf in draw(1, 8, 4, torch.float32, device))
    pot = cpl.Potentials(unary, stop, cpl.LowRank(keys, values))
    with use("triton"):
        loss = cpl.ordered_nll(pot, torch.tensor([[1, 2]], device=device))
    (slope,) = torch.autograd.grad(loss, keys, create_graph=True)
    with pytest.raises(RuntimeError):
        slope.sum().backward()


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("what", ["ordered_nll", "remaining_log_probs"])
def test_the_compiler_sees_one_operation(what: str, dynamic: bool, device: torch.device) -> None:
    """``torch.compile`` takes the kernels as operations of their own, without a break in the graph."""
    mask = torch.rand(2, 20, device=device) > 0.2
    order = sequences(mask, 1, 4)[:, 0]
    leaves = draw(2, 20, 6, torch.float32, device)

    def loss(unary: Tensor, stop: Tensor, keys: Tensor, values: Tensor, stop_key: Tensor) -> Tensor:
        pot = cpl.Potentials(unary, stop, cpl.LowRank(keys, values, stop_key), mask)
        if what == "ordered_nll":
            return cpl.ordered_nll(pot, order)
        picks, ends = dispatch.remaining_log_probs(pot, order.unsqueeze(1), Rules(pot))
        return picks.sum() + 2 * ends.sum()

    def run(function: Callable[..., Tensor]) -> list[Tensor]:
        own = [leaf.detach().requires_grad_() for leaf in leaves]
        value = function(*own)
        return [value.detach(), *torch.autograd.grad(value, own)]

    with use("triton"):
        eager = run(loss)
        compiled = run(torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=dynamic))
    for have, want in zip(compiled, eager, strict=True):
        torch.testing.assert_close(have, want)


@pytest.mark.parametrize(
    ("batch", "count", "steps", "n", "hidden", "dtype", "expected"),
    [
        (256, 1, 32, 1024, 128, torch.float32, (32, 64, 128, 32, 256, 1, False, 4, 3)),
        (256, 10, 10, 160, 256, torch.bfloat16, (16, 64, 256, 256, 2560, 1, False, 8, 2)),
        (256, 1, 32, 1024, 128, torch.bfloat16, (32, 64, 128, 128, 256, 1, True, 4, 3)),
        (8, 1, 64, 65_536, 128, torch.bfloat16, (64, 64, 128, 128, 8, 33, True, 8, 2)),
        (8, 1, 64, 65_536, 128, torch.float32, (32, 64, 128, 32, 16, 16, False, 4, 3)),
        (1, 1, 0, 1, 1, torch.float32, (16, 64, 16, 16, 1, 1, False, 4, 3)),
    ],
)
def test_the_tiles_for_a_size(
    batch: int, count: int, steps: int, n: int, hidden: int, dtype: torch.dtype, expected: tuple[Any, ...]
) -> None:
    tile = tiles(batch, count, steps, n, hidden, dtype)
    assert astuple(tile) == expected

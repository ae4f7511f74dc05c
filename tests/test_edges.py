"""The edges: no rows, no candidates, logits as large as the dtype holds, infinities."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from strategies import KINDS, PAIRS, Case, build, fixed_case
from torch import Tensor

import torchcpl as cpl

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def everything_asked(pot: cpl.Potentials, order: Tensor, **options: Any) -> dict[str, Any]:
    """Every public function of potentials, under the same options."""
    d = cpl.ContextualPlackettLuce(pot, **options)
    return {
        "log_prob": cpl.log_prob(pot, order, **options),
        "set_log_prob": cpl.set_log_prob(pot, order, **options)[0],
        "set_log_prob sampled": cpl.set_log_prob(pot, order, num_samples=4, **options)[0],
        "greedy": cpl.greedy(pot, **options),
        "greedy threshold": cpl.greedy(pot, stop_threshold=0.5, **options),
        "sample": cpl.sample(pot, 3, **options),
        "sample cut": cpl.sample(pot, temperature=0.5, top_k=2, top_p=0.9, **options),
        "beam": cpl.beam(pot, 3, 2, **options),
        "stochastic_beam": cpl.stochastic_beam(pot, 3, **options),
        "distribution sample": d.sample((2,)),
        "distribution no samples": d.sample((0,)),
        "distribution log_prob": d.log_prob(order),
        "distribution set_log_prob": d.set_log_prob(order),
        "entropy": d.entropy(),
        "inclusion_probs": d.inclusion_probs(),
        "expand": d.expand((3, len(pot))).sample(),
    }


def losses_of(pot: cpl.Potentials, order: Tensor, reduction: str = "none") -> dict[str, Tensor]:
    found = {
        "ordered": cpl.ordered_nll(pot, order, reduction=reduction),
        "per_step": cpl.ordered_nll(pot, order, per_step=True, reduction=reduction),
        "permutations": cpl.subset_nll(pot, order, 2, reduction=reduction),
    }
    if pot.interaction.depends_on == "set":
        found["subsets"] = cpl.subset_nll(pot, order, subsets=2, reduction=reduction)
        found["exact"] = cpl.subset_nll(pot, order, exact=True, reduction=reduction)
    return found


def demands(batch: int, n: int) -> list[dict[str, Any]]:
    """Options with one entry a row or one for all."""
    nothing = torch.zeros(n, dtype=torch.bool)
    pairs = torch.ones(n, n, dtype=torch.bool)
    return [
        {},
        {"max_len": 2, "stop_bias": torch.zeros(batch)},
        {"min_len": min(n, 1), "constraints": [cpl.Adjacent([[] for _ in range(n)])]},
        {"constraints": [cpl.Forbid(nothing), cpl.Require(~nothing), cpl.Adjacent(pairs), cpl.Budget([1.0] * n, 9)]},
        {
            "min_len": min(n, 1),
            "constraints": [
                cpl.Require(~nothing.expand(batch, n)),
                cpl.Adjacent(pairs.expand(batch, n, n)),
                cpl.Budget(torch.ones(batch, n), torch.full((batch,), 9.0)),
            ],
        },
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [0, 2])
def test_no_rows_or_no_candidates(kind: str, rows: int) -> None:
    """No rows give results of no rows; no candidates make the stop certain, even one of −inf."""
    n = 0 if rows else 4
    pot = fixed_case(kind, 0, 2, 4).pot[:0] if not rows else without_candidates(fixed_case(kind, 0, 2, 4).pot)
    order = torch.full((rows, 3 if n else 0), -1)
    for options in demands(rows, n):
        for name, found in everything_asked(pot, order, **options).items():
            numbers = found.log_prob if isinstance(found, cpl.Selection) else found
            shape = numbers.shape
            assert rows in shape or name == "inclusion_probs", name
            assert not numbers.isnan().any(), name
            if isinstance(found, cpl.Selection):
                assert found.indices.shape[:-1] == found.lengths.shape == shape, name
                assert found.lengths.sum() == 0
                assert rows == 0 or (found.log_prob.amax((0, 1) if found.log_prob.dim() > 1 else 0) == 0)
    for loss in losses_of(pot, order).values():
        assert loss.shape == (rows,)
        assert (loss == 0).all()
    for reduction in ("mean", "sum"):
        assert all(loss == 0 for loss in losses_of(pot, order, reduction).values())


def without_candidates(pot: cpl.Potentials) -> cpl.Potentials:
    """The same rows with N = 0 and a stop of −inf."""
    parts: dict[str, Any] = {}
    for f in fields(pot.interaction):  # type: ignore[arg-type]
        value = getattr(pot.interaction, f.name)
        if isinstance(value, Tensor) and f.name not in ("stop_key", "last_stop_key", "cover_offset"):
            value = value[:, :0, :0] if f.name in PAIRS else value[:, :0]
        parts[f.name] = value
    return cpl.Potentials(pot.unary[:, :0], torch.full_like(pot.stop, -torch.inf), type(pot.interaction)(**parts))


@pytest.mark.parametrize("kind", ["lowrank", "contextual", "coverage", "recent"])
@pytest.mark.parametrize("live_stop", [False, True])
def test_a_head_without_rows_or_candidates(kind: str, live_stop: bool) -> None:
    head = cpl.CPLHead(4, 8, kind=kind, live_stop=live_stop)
    for shape in ((0, 3, 4), (2, 0, 4), (0, 0, 4)):
        pot = head(torch.zeros(shape))
        assert pot.unary.shape == shape[:2]
        assert cpl.greedy(pot).indices.shape == shape[:2]
        head.zero_grad()
        cpl.ordered_nll(pot, torch.full((shape[0], 2), -1)).backward()
        assert all(p.grad is None or (p.grad == 0).all() for p in head.parameters())


def test_the_example_of_two_large_logits() -> None:
    pot = cpl.Potentials(torch.full((1, 2), 1e7), torch.zeros(1), cpl.Dense(torch.zeros(1, 2, 2)))
    assert cpl.log_prob(pot, torch.tensor([[0, 1]])).item() == pytest.approx(-math.log(2))
    d = cpl.ContextualPlackettLuce(pot)
    assert d.log_prob(d.enumerate_support()).exp().sum().item() == pytest.approx(1)
    assert d.entropy().item() == pytest.approx(math.log(2))
    assert cpl.ordered_nll(pot, torch.tensor([[0, 1]])).item() == pytest.approx(math.log(2))


def large_case(kind: str, dtype: torch.dtype, seed: int) -> Case:
    """Logits of 10⁴ to 10³⁷, in steps that the dtype holds; picks add small integers, or nothing where that is lost."""
    rng = np.random.default_rng(seed)
    scale = float(10.0 ** rng.integers(1, 4 if dtype == torch.float16 else 37))
    unary = torch.tensor(rng.integers(-2, 3, (2, 4)) * scale).to(dtype)
    if rng.random() < 0.5:
        unary = unary.abs().amax() + 0 * unary  # all alike
    effect = 0.0 if scale > 256 else 1.0

    def fill(shape: tuple[int, ...]) -> Any:
        return effect * rng.integers(-1, 2, shape).astype(np.float64)

    stop = np.array([0.0, float(unary[1, 0].double())])
    return build(kind, unary.double().numpy(), stop, np.ones((2, 4), dtype=bool), fill)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["dense+stop", "lowrank", "lowrank+stop", "recent+stop"])
def test_large_logits(kind: str, dtype: torch.dtype) -> None:
    """Log-probabilities, losses and their gradients as the oracle has them, and as the decoders say."""
    for seed in range(12):
        case = large_case(kind, dtype, seed)
        pot = cast(case.pot, dtype)
        rounding = 1e-9 if dtype == torch.float64 else 2e-3 if dtype == torch.float32 else 0.1
        for sel in (cpl.greedy(pot), cpl.sample(pot), cpl.greedy(pot, stop_threshold=0.5)):
            torch.testing.assert_close(cpl.log_prob(pot, sel.indices), sel.log_prob, atol=1e-4, rtol=1e-5)
        best = cpl.beam(pot, 4, 2)
        for r in range(2):
            torch.testing.assert_close(cpl.log_prob(pot, best.indices[:, r]), best.log_prob[:, r], atol=1e-4, rtol=1e-5)
        picks = cpl.sample(pot).indices
        want = [
            oracle.log_prob(row, [i for i in p if i >= 0]) for row, p in zip(case.rows, picks.tolist(), strict=True)
        ]
        got = cpl.log_prob(pot, picks).double()
        torch.testing.assert_close(got, torch.tensor(want, dtype=torch.double), atol=rounding, rtol=rounding)
        torch.testing.assert_close(-cpl.ordered_nll(pot, picks, reduction="none").double(), got)
        every = cpl.ContextualPlackettLuce(pot)
        mass = every.log_prob(every.enumerate_support()).double().exp().sum(0)
        torch.testing.assert_close(mass, torch.ones_like(mass), atol=1e-4, rtol=0)


def cast(pot: cpl.Potentials, dtype: torch.dtype) -> cpl.Potentials:
    parts = {
        f.name: value.to(dtype) if isinstance(value := getattr(pot.interaction, f.name), Tensor) else value
        for f in fields(pot.interaction)  # type: ignore[arg-type]
    }
    return cpl.Potentials(pot.unary.to(dtype), pot.stop.to(dtype), type(pot.interaction)(**parts), pot.mask)


def test_gradients_at_large_logits() -> None:
    """What is common to all choices cancels: the gradient is that of the same logits near zero."""
    small = fixed_case("dense+stop", 3, 2, 4).pot
    order = torch.tensor([[2, 0], [1, -1]])
    gradients = []
    for shift in (0.0, 2.0**20):
        unary, stop = ((x.float().mul(8).round() / 8 + shift).requires_grad_() for x in (small.unary, small.stop))
        W, row = (getattr(small.interaction, name).float().mul(8).round() / 8 for name in ("W", "stop_row"))
        pot = cpl.Potentials(unary, stop, cpl.Dense(W, row))
        value = cpl.ordered_nll(pot, order) + cpl.subset_nll(pot, order, exact=True)
        value = value + cpl.subset_nll(pot, order, 3, generator=torch.Generator().manual_seed(0))
        gradients.append((value.detach(), *torch.autograd.grad(value, (unary, stop))))
    for near, far in zip(*gradients, strict=True):
        torch.testing.assert_close(near, far)


PICKS = torch.tensor([[0, 2], [2, 3]])
READERS: dict[str, Callable[..., Any]] = {
    "log_prob": lambda pot: cpl.log_prob(pot, PICKS),
    "ordered_nll": lambda pot: cpl.ordered_nll(pot, PICKS),
    "subset_nll": lambda pot: cpl.subset_nll(pot, PICKS),
    "subset_nll exact": lambda pot: cpl.subset_nll(pot, PICKS, exact=True),
    "subset_nll subsets": lambda pot: cpl.subset_nll(pot, PICKS, subsets=2),
    "set_log_prob": lambda pot: cpl.set_log_prob(pot, PICKS),
    "set_log_prob sampled": lambda pot: cpl.set_log_prob(pot, PICKS, num_samples=2),
    "greedy": lambda pot: cpl.greedy(pot),
    "greedy threshold": lambda pot: cpl.greedy(pot, stop_threshold=0.5),
    "sample": lambda pot: cpl.sample(pot, 2),
    "beam": lambda pot: cpl.beam(pot, 2),
    "stochastic_beam": lambda pot: cpl.stochastic_beam(pot, 2),
    "distribution": lambda pot: cpl.ContextualPlackettLuce(pot),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("part", ["unary", "stop"])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_infinite_scores_are_refused_by_all(reader: str, part: str, value: float) -> None:
    pot = fixed_case("dense", 0, 2, 4).pot
    scores = {"unary": pot.unary.clone(), "stop": pot.stop.clone()}
    scores[part][(1,) * scores[part].dim()] = value
    wrong = cpl.Potentials(scores["unary"], scores["stop"], pot.interaction)
    with pytest.raises(ValueError, match=rf"{part}: expected no (\+inf|NaN), got 1 of them, the first at \(1,( 1)?"):
        READERS[reader](wrong)
    if part == "unary":  # a padded candidate may hold anything
        mask = torch.tensor([[True] * 4, [True, False, True, True]])
        READERS[reader](cpl.Potentials(scores["unary"], scores["stop"], pot.interaction, mask))


@pytest.mark.parametrize("reader", [r for r in READERS if r != "distribution"])
def test_an_interaction_that_overflows_is_refused(reader: str) -> None:
    """Each number is finite, their sum is not: an error, not a NaN."""
    pot = cpl.Potentials(torch.full((2, 4), 3e38), torch.full((2,), -3e38), cpl.Dense(torch.full((2, 4, 4), 3e38)))
    with pytest.raises(ValueError, match=r"pot: expected logits in the range of torch.float32, got NaN"):
        READERS[reader](pot)


def test_a_stop_that_a_pick_makes_infinite_is_refused() -> None:
    pot = fixed_case("dense", 0, 1, 4).pot
    live = cpl.Dense(torch.zeros(1, 4, 4, dtype=torch.double), torch.full((1, 4), math.inf, dtype=torch.double))
    for options in ({}, {"stop_threshold": 0.5}):
        with pytest.raises(ValueError, match=r"interaction.stop_row: expected no \+inf"):
            cpl.greedy(cpl.Potentials(pot.unary + 9, pot.stop, live), **options)  # type: ignore[arg-type]

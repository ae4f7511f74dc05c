"""Decoding in NumPy against the rollout, in float64: every kind, both ways to stop, all limits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import torchcpl as cpl
from torchcpl.kernels import greedy_numpy, use

KINDS = ("dense", "lowrank", "coverage", "dense coverage", "recent")


def potentials(
    kind: str, live: bool, batch: int = 4, n: int = 15, dtype: torch.dtype = torch.float64
) -> cpl.Potentials:
    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype)

    interaction: cpl.Interaction
    if kind == "dense":
        interaction = cpl.Dense(draw(batch, n, n), draw(batch, n) if live else None)
    elif kind == "dense coverage":
        interaction = cpl.DenseCoverage(12 * draw(batch, n, n), draw(batch, n) if live else None)
    else:
        factors = [draw(batch, n, 3) for _ in range(4)]
        stop_key = draw(batch, 3) if live else None
        if kind == "lowrank":
            interaction = cpl.LowRank(factors[0], factors[1], stop_key)
        elif kind == "recent":
            interaction = cpl.Recent(*factors, stop_key, draw(batch, 3) if live else None)
        else:  # some pairs beyond the largest effect, which is cut off
            interaction = cpl.Coverage(factors[0], factors[1], 6 * factors[2], 6 * factors[3], draw(batch), stop_key)
    mask = torch.rand(batch, n) > 0.2
    mask[0] = False  # a row without candidates
    return cpl.Potentials(draw(batch, n) * 2, draw(batch), interaction, mask)


ASKED: list[dict[str, Any]] = [
    {},
    {"max_len": 4},
    {"max_len": 4, "stop_bias": -3.0},
    {"max_len": 0},
    {"stop_bias": -math.inf, "max_len": 20},
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("threshold", [None, 0.05, 0.3, 1.0])
def test_the_same_as_the_rollout(
    kind: str, live: bool, threshold: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pot = potentials(kind, live)
    runs = []
    run = greedy_numpy.greedy
    monkeypatch.setattr(greedy_numpy, "greedy", lambda *given: runs.append(1) or run(*given))
    for asked in [*ASKED, {"min_len": 2, "constraints": [cpl.Forbid(torch.arange(15) == 3)]}]:
        rows = pot[1:] if asked.get("min_len") else pot
        with use("plain"):
            expected = cpl.greedy(rows, stop_threshold=threshold, **asked)
        assert not runs
        found = cpl.greedy(rows, stop_threshold=threshold, **asked)
        assert runs.pop()
        assert found.indices.equal(expected.indices), asked
        assert found.lengths.equal(expected.lengths)
        torch.testing.assert_close(found.log_prob, expected.log_prob, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_written_to_and_nan_is_blamed(kind: str) -> None:
    pot = potentials(kind, True)
    before = [value.clone() for value in (pot.unary, pot.stop, *vars(pot.interaction).values())]
    cpl.greedy(pot, 5, stop_threshold=0.1)
    after = [pot.unary, pot.stop, *vars(pot.interaction).values()]
    assert all(one.equal(other) for one, other in zip(before, after, strict=True))
    pot.unary[1] = math.nan
    with pytest.raises(ValueError, match="unary: expected no NaN"):
        cpl.greedy(pot, 5, stop_threshold=0.1)


def test_what_it_leaves_to_the_rollout() -> None:
    pot = potentials("coverage", False)
    rules = cpl.constraints.Rules(pot)
    assert greedy_numpy.applies(pot, rules)
    assert not greedy_numpy.applies(pot, cpl.constraints.Rules(pot, constraints=[cpl.Require(pot.mask & False)]))
    half = potentials("lowrank", False, dtype=torch.bfloat16)
    assert not greedy_numpy.applies(half, cpl.constraints.Rules(half))

"""Which twin runs: the switch, and the plan for a size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import torchcpl as cpl
from torchcpl.constraints import Rules
from torchcpl.kernels import dispatch, set_kernels, use
from torchcpl.kernels.greedy_plan import Plan, plan


def test_the_switch() -> None:
    with pytest.raises(ValueError, match="mode: expected one of 'auto', 'plain', 'triton', got"):
        set_kernels("cuda")
    with use("plain"):
        assert dispatch._mode == "plain"
    assert dispatch._mode == "auto"
    set_kernels("plain")
    assert dispatch._mode == "plain"
    set_kernels("auto")


@pytest.mark.parametrize(
    ("batch", "n", "kind", "dtype", "expected"),
    [
        (1024, 1024, "dense", torch.float32, Plan("block", 1024, 4)),
        (1, 8192, "dense", torch.float32, Plan("block", 8192, 16)),
        (1, 65_536, "dense", torch.bfloat16, Plan("tiles", 4096)),
        (1, 1, "dense", torch.float32, Plan("block", 16, 1)),
        (1, 1024, "lowrank", torch.float32, Plan("block", 1024, 4)),
        (64, 1024, "lowrank", torch.bfloat16, Plan("block", 1024, 4)),
        (1024, 1024, "lowrank", torch.float32, Plan("factored", 256, 8)),
        (256, 65_536, "lowrank", torch.float32, Plan("factored", 256, 8)),
        (1, 1024, "recent", torch.float32, Plan("block", 1024, 8)),  # two columns a step
        (1, 160, "recent", torch.float32, Plan("block", 256, 8)),
        (1, 5, "recent", torch.float32, Plan("block", 16, 1)),
        (1, 8192, "recent", torch.float32, Plan("block", 8192, 16)),
        (8, 65_536, "lowrank", torch.float32, Plan("factored", 16, 2, programs=132)),
        (1, 10_000_000, "lowrank", torch.bfloat16, Plan("factored", 16, 2, programs=1056, stages=3)),
    ],
)
def test_the_plan_for_a_size(batch: int, n: int, kind: str, dtype: torch.dtype, expected: Plan) -> None:
    def shape(*sizes: int) -> Tensor:
        return torch.empty(*sizes, dtype=dtype, device="meta")

    hidden = 128
    interaction: cpl.Interaction
    if kind == "dense":
        interaction = cpl.Dense(shape(batch, n, n))
    elif kind == "recent":
        interaction = cpl.Recent(*(shape(batch, n, hidden) for _ in range(4)))
    else:
        interaction = cpl.LowRank(shape(batch, n, hidden), shape(batch, n, hidden))
    pot = cpl.Potentials(shape(batch, n), shape(batch), interaction)
    assert plan(pot, Rules(pot, 30)) == expected

"""Potentials and ways to decode them, for the tests of the decoding kernels."""

from __future__ import annotations

import torch
from torch import Tensor

import torchcpl as cpl
from torchcpl.kernels.greedy_plan import Plan

# Every branch: W in registers or in tiles, given, built or factored; one tile and several; one program and several.
WAYS = [
    Plan("block", 64),
    Plan("tiles", 64),
    Plan("tiles", 16),
    Plan("factored", 64),
    Plan("factored", 16),
    Plan("factored", 16, programs=2),
    Plan("factored", 16, programs=5),  # more than there are tiles
]
WAY_IDS = [f"{way.kernel}-{way.size}-{way.programs}" for way in WAYS]
KINDS = ["dense", "lowrank"]


def potentials(
    device: torch.device,
    kind: str = "lowrank",
    batch: int = 2,
    n: int = 37,
    hidden: int = 5,
    dtype: torch.dtype = torch.float32,
    live: bool = True,
    masked: bool = True,
) -> cpl.Potentials:
    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape).to(device, dtype)

    mask = torch.rand(batch, n) > 0.2 if masked else torch.ones(batch, n, dtype=torch.bool)
    interaction: cpl.Interaction
    if kind == "dense":
        interaction = cpl.Dense(draw(batch, n, n), draw(batch, n) if live else None)
    else:
        interaction = cpl.LowRank(draw(batch, n, hidden), draw(batch, n, hidden), draw(batch, hidden) if live else None)
    return cpl.Potentials(draw(batch, n) * 2, draw(batch), interaction, mask.to(device))


def double(pot: cpl.Potentials) -> cpl.Potentials:
    parts = {name: None if part is None else part.double() for name, part in vars(pot.interaction).items()}
    return cpl.Potentials(pot.unary.double(), pot.stop.double(), type(pot.interaction)(**parts), pot.mask)


SECOND = {"coverage": "cover_keys", "recent": "last_keys", "dense coverage": "cover"}


def two_matrices(kind: str, device: torch.device, live: bool = True) -> cpl.Potentials:
    batch, n, hidden = 2, 37, 5

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape).to(device)

    keys, values, more_keys, more_values = (draw(batch, n, hidden) for _ in range(4))
    stop_key = draw(batch, hidden) if live else None
    interaction: cpl.Interaction
    if kind == "coverage":  # some pairs are far beyond the largest effect, which is cut off
        interaction = cpl.Coverage(keys, values, 6 * more_keys, 6 * more_values, draw(batch), stop_key)
    elif kind == "dense coverage":
        interaction = cpl.DenseCoverage(12 * draw(batch, n, n), draw(batch, n) if live else None)
    else:
        last_stop_key = draw(batch, hidden) if live else None
        interaction = cpl.Recent(keys, values, 2 * more_keys, 2 * more_values, stop_key, last_stop_key)
    mask = (torch.rand(batch, n) > 0.2).to(device)
    return cpl.Potentials(draw(batch, n) * 2, draw(batch), interaction, mask)

"""Device times of the Triton kernels by how they are launched, CUDA only; nothing is kept.

python -m bench.tune
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import torchcpl as cpl
from bench.speed import decode_inputs, loss_inputs
from bench.timing import CUDA, DEVICE, NAMES, graphed
from torchcpl.constraints import Rules
from torchcpl.kernels import greedy_triton, nll_triton
from torchcpl.kernels.contexts_triton import prefixes
from torchcpl.kernels.dispatch import Plan

# Candidates of a tile, hidden dimensions of a product, warps, stages.
LAUNCHES = {
    torch.float32: ((64, 32, 8, 1), (64, 32, 8, 2), (64, 16, 8, 2), (64, 64, 8, 1), (32, 64, 8, 1), (16, 32, 4, 1),
                    (128, 32, 8, 1), (64, 32, 4, 1)),
    torch.bfloat16: ((64, 128, 8, 1), (64, 128, 8, 2), (64, 64, 8, 2), (64, 128, 4, 2), (64, 128, 4, 3),
                     (128, 128, 8, 1), (128, 128, 8, 2), (32, 128, 4, 2), (32, 128, 4, 3)),
}  # fmt: skip


def tried(name: str, work: Callable[[], float]) -> None:
    try:
        print(f"{name:<90}{work():9.4f} ms", flush=True)
    except Exception as error:  # a launch that does not fit is an answer too
        print(f"{name:<90}{type(error).__name__}: {str(error).splitlines()[0][:60]}", flush=True)


def forced(pot: cpl.Potentials, steps: int, way: Plan) -> cpl.Selection:
    return greedy_triton.decode(pot, Rules(pot, steps), way)


def tune_decode(n: int, steps: int, hidden: int) -> None:
    for batch in (1, 1024):
        pots = decode_inputs(batch, n, hidden, torch.float32, dense=True)
        for warps in (1, 2, 4, 8, 16):
            way = Plan("dense", "block", 1024, warps)
            tried(f"decode B={batch} {way}", partial(graphed, [partial(forced, pot, steps, way) for pot in pots]))
        del pots
    for dtype, batch in [(d, b) for d in (torch.float32, torch.bfloat16) for b in (1, 64, 1024)]:
        pots = decode_inputs(batch, n, hidden, dtype, dense=False)[:4]
        for size, warps in ((64, 4), (128, 4), (128, 8), (256, 8), (512, 8), (512, 16)):
            way = Plan("factored", "tiles", size, warps)
            calls = [partial(forced, pot, steps, way) for pot in pots]
            tried(f"decode B={batch} {NAMES[dtype]} {way}", partial(graphed, calls))


def tune_loss(batch: int, n: int, steps: int, hidden: int, dtype: torch.dtype, *launch: int) -> None:
    leaves, order = loss_inputs(batch, n, steps, hidden, dtype, 1)[0]
    unary, stop, keys, values = (leaf.detach() for leaf in leaves)
    query, rank = prefixes(values, order.unsqueeze(1), dtype)
    real = torch.ones(batch, n, dtype=torch.bool, device=DEVICE)
    given = (query, keys, unary, real, rank, stop.float().unsqueeze(-1).expand(batch, steps + 1), 1)
    found = nll_triton.scores(*given)
    grads = torch.randn(2, *query.shape[:2], device=DEVICE)
    chosen = nll_triton.tiles
    names = ("candidates", "part", "warps", "stages", "split", "both")
    for split, both in ((1, True), (2, True), (1, False)):
        changes: dict[str, Any] = dict(zip(names, (*launch, split, both), strict=True))
        setattr(nll_triton, "tiles", lambda *sizes, changes=changes: replace(chosen(*sizes), **changes))  # noqa: B010
        name = f"{NAMES[dtype]} {' '.join(f'{key}={value}' for key, value in changes.items())}"
        if both:
            tried(f"forward  {name}", partial(graphed, [partial(nll_triton.scores, *given)], 0.03))
        tried(f"backward {name}", partial(graphed, [partial(nll_triton.scores_backward, grads, found, *given)], 0.03))
    setattr(nll_triton, "tiles", chosen)  # noqa: B010


def main() -> None:
    if not CUDA:
        raise SystemExit("bench.tune: needs a CUDA device")
    torch.manual_seed(0)
    tune_decode(1024, 30, 128)
    for dtype, launches in LAUNCHES.items():
        for launch in launches:
            tune_loss(256, 1024, 32, 128, dtype, *launch)


if __name__ == "__main__":
    main()

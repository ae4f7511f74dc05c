"""Device times of the Triton kernels by how they are launched, CUDA only; nothing is kept.

python -m bench.tune [--only decode|loss] [--loss B N T h]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

import torchcpl as cpl
from bench.speed import decode_inputs, gradients, loss_inputs, loss_of, same_gradients
from bench.timing import CUDA, DEVICE, NAMES, graphed
from torchcpl.constraints import Rules
from torchcpl.kernels import greedy_triton, nll_triton, use
from torchcpl.kernels.greedy_plan import Plan

# Candidates of a tile, hidden dimensions of a product, warps, stages: what is chosen for some size, and others that
# come near it.
LAUNCHES = {
    torch.float32: ((64, 32, 4, 3), (64, 32, 4, 4), (64, 32, 4, 2), (32, 32, 4, 3), (64, 32, 8, 2), (128, 32, 8, 3)),
    torch.bfloat16: ((64, 256, 8, 2), (64, 256, 8, 1), (64, 256, 8, 3), (64, 256, 4, 2), (64, 256, 4, 3),
                     (128, 256, 8, 2)),
}  # fmt: skip


def tried(name: str, work: Callable[[], float], check: Callable[[], None] = lambda: None) -> None:
    try:
        check()
        print(f"{name:<110}{work():9.4f} ms", flush=True)
    except Exception as error:  # a launch that does not fit, or is wrong, is an answer too
        print(f"{name:<110}{type(error).__name__}: {str(error).splitlines()[0][:60]}", flush=True)


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


def tune_loss(sizes: Sequence[int], dtype: torch.dtype) -> None:
    batch, n, steps, hidden = sizes
    leaves, order = loss_inputs(batch, n, steps, hidden, dtype, 1)[0]
    unary, stop, keys, values = (leaf.detach() for leaf in leaves)
    real = torch.ones(batch, n, dtype=torch.bool, device=DEVICE)
    given = (unary, stop, keys, values, None, real, order, 1, 1 / batch)
    found = nll_triton.scores(*given)
    back = (torch.ones((), device=DEVICE), None, *found, unary, keys, None, real, order, dtype, dtype, 1)
    with use("plain"):
        expected = gradients(loss_of, "ordered", False, leaves, order)
    choose = nll_triton.tiles
    chosen = choose(batch, 1, steps, n, hidden, dtype)
    shown = f"B={batch} N={n} T={steps} h={hidden} {NAMES[dtype]}"
    for candidates, part, warps, stages in LAUNCHES[dtype]:
        way = replace(chosen, candidates=candidates, part=min(part, chosen.hidden), warps=warps, stages=stages)
        for both in (True, False) if chosen.count == batch else (False,):
            forced = replace(way, both=both, alone=both and chosen.alone)
            setattr(nll_triton, "tiles", lambda *_, forced=forced: forced)  # noqa: B010
            name = f"{shown} {candidates=} part={way.part} {warps=} {stages=}"
            walks = "one walk" if both else "two walks"
            work = partial(nll_triton.scores_backward, *back)
            tried(f"forward  {name} {walks}", partial(graphed, [partial(nll_triton.scores, *given)], 0.03))
            tried(
                f"backward {name} {walks}",
                partial(graphed, [work], 0.03),
                lambda work=work: same_gradients(work()[:4], expected),  # type: ignore[misc]
            )
    setattr(nll_triton, "tiles", choose)  # noqa: B010


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("decode", "loss"))
    parser.add_argument("--loss", type=int, nargs=4, metavar=("B", "N", "T", "h"), default=(256, 1024, 32, 128))
    options = parser.parse_args()
    if not CUDA:
        raise SystemExit("bench.tune: needs a CUDA device")
    torch.manual_seed(0)
    if options.only != "loss":
        tune_decode(1024, 30, 128)
    if options.only != "decode":
        for dtype in LAUNCHES:
            tune_loss(options.loss, dtype)


if __name__ == "__main__":
    main()

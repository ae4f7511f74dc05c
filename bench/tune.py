"""Device times of the Triton kernels by how they are launched; CUDA only, and only printed.

python -m bench.tune [--only decode|many|loss] [--loss B N T h]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

import torchcpl as cpl
from bench.speed import decode_inputs, gradients, loss_inputs, loss_of, same_gradients
from bench.timing import CUDA, NAMES, changed, graphed
from torchcpl.constraints import Rules
from torchcpl.kernels import greedy_triton, nll_triton, use
from torchcpl.kernels.greedy_plan import PROGRAMS, Plan, plan

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
            way = Plan("block", 1024, warps)
            tried(f"decode B={batch} {way}", partial(graphed, [partial(forced, pot, steps, way) for pot in pots]))
        del pots


def tune_many(batch: int, n: int, steps: int, hidden: int, dtype: torch.dtype) -> None:
    """Factored: what ``plan`` chooses, and others, with one program a hypothesis and with several."""
    pots = decode_inputs(batch, n, hidden, dtype, dense=False)[:2]
    chosen = plan(pots[0], Rules(pots[0], steps))
    ways = [chosen]
    if chosen.programs == 1:
        ways += [Plan("factored", *way) for way in ((32, 4), (64, 8), (64, 16), (128, 8), (256, 16))]
    else:
        most = PROGRAMS // batch
        shapes = ((16, 2), (16, 4), (32, 2), (32, 8), (64, 4), (64, 8), (128, 8))
        ways += [Plan("factored", size, warps, most) for size, warps in shapes]
        ways += [replace(chosen, programs=max(1, chosen.programs * share // 4)) for share in (1, 2, 6, 8)]
    floor = graphed([lambda: pots[0].interaction.keys.amax()] if batch * n * hidden < 2**31 else [], 0.05)  # type: ignore[attr-defined]
    name = f"B={batch} N={n} T={steps} h={hidden} {NAMES[dtype]}"
    print(f"{name}: a pass over the keys by amax {floor:.4f} ms, {floor * steps:.4f} for all steps", flush=True)
    for way in ways:
        tried(f"{name} {way}", partial(graphed, [partial(forced, pot, steps, way) for pot in pots], 0.05))


def tune_loss(sizes: Sequence[int], dtype: torch.dtype) -> None:
    batch, n, steps, hidden = sizes
    leaves, order = loss_inputs(batch, n, steps, hidden, dtype, 1)[0]
    with use("plain"):
        expected = gradients(loss_of, "ordered", False, leaves, order)
    chosen = nll_triton.tiles(batch, 1, steps, n, hidden, dtype)
    shown = f"B={batch} N={n} T={steps} h={hidden} {NAMES[dtype]}"

    def work() -> tuple[torch.Tensor, ...]:
        with use("triton"):
            return gradients(loss_of, "ordered", False, leaves, order)

    for candidates, chunk, warps, stages in LAUNCHES[dtype]:
        way = replace(chosen, candidates=candidates, chunk=min(chunk, chosen.hidden), warps=warps, stages=stages)
        name = f"loss {shown} {candidates=} chunk={way.chunk} {warps=} {stages=}"
        with changed((nll_triton, "tiles", lambda *_, way=way: way)):
            tried(name, partial(graphed, [work], 0.03), lambda: same_gradients(work(), expected))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("decode", "many", "loss"))
    parser.add_argument("--loss", type=int, nargs=4, metavar=("B", "N", "T", "h"), default=(256, 1024, 32, 128))
    options = parser.parse_args()
    if not CUDA:
        raise SystemExit("bench.tune: needs a CUDA device")
    torch.manual_seed(0)
    if options.only in (None, "decode"):
        tune_decode(1024, 30, 128)
    if options.only in (None, "many"):
        for dtype in (torch.float32, torch.bfloat16):
            tune_many(8, 65_536, 64, 128, dtype)
            tune_many(64, 1024, 30, 128, dtype)
        tune_many(64, 4096, 30, 64, torch.float32)
        tune_many(1, 10_000_000, 8, 128, torch.float32)
    if options.only in (None, "loss"):
        for dtype in LAUNCHES:
            tune_loss(options.loss, dtype)


if __name__ == "__main__":
    main()

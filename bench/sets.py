"""``set_nll`` beside a plain loop over subsets, in one run (results/sets-cpu.json): ``python -m bench.sets``."""

from __future__ import annotations

import argparse
import timeit
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import torch
from torch import Tensor

import torchcpl as cpl
from torchcpl.files import write_json
from torchcpl.provenance import run_info


def loop(pot: cpl.Potentials, sets: Tensor) -> Tensor:
    """−log P (M,) of ``sets`` (M, k): for each subset one softmax, and the sum over the ways there.

    With a row at a time this is the plain loop; with all of them it is the same, batched.
    """
    (rows, size), n = sets.shape, pot.num_candidates
    W, theta = pot.interaction.dense()[0], pot.unary[0]
    reach: dict[tuple[int, ...], Tensor] = {(): theta.new_zeros(rows)}
    for count in range(size + 1):
        for chosen in combinations(range(size), count):
            picked = sets[:, chosen]  # (M, count)
            logits = theta + W.T[picked].sum(1)  # (M, N)
            logits = logits.scatter(1, picked, -torch.inf)
            log_probs = torch.cat([logits, pot.stop.expand(rows, 1)], 1).log_softmax(-1)
            here = reach.pop(chosen)
            if count == size:
                return -(here + log_probs[:, n])
            for i in set(range(size)) - set(chosen):
                way, more = here + log_probs.gather(1, sets[:, i : i + 1]).squeeze(1), tuple(sorted({*chosen, i}))
                reach[more] = torch.logaddexp(reach[more], way) if more in reach else way
    raise AssertionError


def clock(run: Callable[[], object], repeats: int) -> float:
    """The shortest of several calls, in seconds."""
    return min(timeit.repeat(run, number=1, repeat=repeats))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/sets-cpu.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    batch, n, size, rank = 256, 100, 8, 16
    shapes = ((1, n), (1,), (1, n, rank), (1, n, rank))
    leaves = [torch.randn(shape, requires_grad=True) for shape in shapes]
    target = torch.rand(batch, n).argsort(-1)[:, :size]

    def pot() -> cpl.Potentials:
        return cpl.Potentials(leaves[0], leaves[1], cpl.LowRank(leaves[2], leaves[3]))

    def ours() -> Tensor:
        return cpl.set_nll(pot(), target, exact=True)

    with torch.no_grad():
        fast = clock(ours, 5)
        slow = clock(lambda: [loop(pot(), row) for row in target.split(1)], 1)
        batched = clock(lambda: loop(pot(), target), 3)
        fast = min(fast, clock(ours, 5))
        apart = abs(float(loop(pot(), target).mean() - ours()))
    both = clock(lambda: ours().backward(), 5)
    print(f"{batch} sets of {size} out of {n}, one thread; apart by {apart:.1e}")
    print(f"set_nll {fast:.4f} s, with its gradient {both:.4f} s")
    print(f"a loop over the subsets of each set {slow:.2f} s, {slow / fast:.0f} times as long")
    print(f"that loop batched over the sets {batched:.4f} s, {batched / fast:.1f} times as long")
    sizes = {"batch": batch, "size": size, "items": n, "rank": rank}
    taken = {"seconds": fast, "gradient_seconds": both, "loop_seconds": slow, "batched_seconds": batched}
    write_json(options.out, {**run_info(seeds=[0], device="cpu"), **sizes, **taken, "apart": apart})


if __name__ == "__main__":
    main()

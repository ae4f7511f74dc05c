"""``set_nll`` against a plain loop over subsets, in one run: ``python -m bench.sets [--cuda]``."""

from __future__ import annotations

import argparse
import math
import time
from itertools import combinations

import torch
from torch import Tensor

import torchcpl as cpl


def loop(pot: cpl.Potentials, items: list[int]) -> Tensor:
    """−log P of one set: for each subset, its items' probabilities by one softmax, and the sum over the ways there."""
    W, theta, stop = pot.interaction.dense()[0], pot.unary[0], pot.stop[0]
    reach: dict[frozenset[int], Tensor] = {frozenset(): torch.zeros((), device=theta.device)}
    for size in range(len(items) + 1):
        for chosen in map(frozenset, combinations(items, size)):
            logits = theta + W[:, list(chosen)].sum(1) if chosen else theta
            logits = logits.index_fill(0, torch.tensor(list(chosen), dtype=torch.long, device=theta.device), -torch.inf)
            log_probs = torch.cat([logits, stop[None]]).log_softmax(0)
            for i in items:
                if i not in chosen:
                    way, more = reach[chosen] + log_probs[i], chosen | {i}
                    reach[more] = torch.logaddexp(reach[more], way) if more in reach else way
            if size == len(items):
                return -(reach[chosen] + log_probs[-1])
    raise AssertionError


def clock(run: object, repeats: int, device: torch.device) -> float:
    best = math.inf
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()  # type: ignore[operator]
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuda", action="store_true")
    options = parser.parse_args()
    device = torch.device("cuda" if options.cuda else "cpu")
    torch.manual_seed(0)
    batch, n, size, rank = 256, 100, 8, 16
    shapes = ((1, n), (1,), (1, n, rank), (1, n, rank))
    leaves = [torch.randn(shape, device=device, requires_grad=True) for shape in shapes]
    target = torch.rand(batch, n, device=device).argsort(-1)[:, :size]

    def pot() -> cpl.Potentials:
        return cpl.Potentials(leaves[0], leaves[1], cpl.LowRank(leaves[2], leaves[3]))

    def ours() -> Tensor:
        return cpl.set_nll(pot(), target, exact=True)

    with torch.no_grad():
        rows = target[:4].tolist()
        one = clock(lambda: [loop(pot(), row) for row in rows], 1, device) / len(rows) * batch
        fast = clock(ours, 5, device)
        apart = abs(float(torch.stack([loop(pot(), row) for row in rows]).mean() - cpl.set_nll(pot(), target[:4])))
    both = clock(lambda: ours().backward(), 5, device)
    print(f"{batch} sets of {size} out of {n}, {device.type}, {torch.get_num_threads()} threads")
    print(f"a loop over the subsets of each set: {one:.2f} s ({len(rows)} sets, times {batch // len(rows)})")
    print(f"set_nll: {fast:.4f} s, {one / fast:.0f} times as fast; with its gradient {both:.4f} s; apart {apart:.1e}")


if __name__ == "__main__":
    main()

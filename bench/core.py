"""Core speed on the CPU, as ratios in one run against a plain per-row loop over a dense W.

python -m bench.core --out results/core-cpu.json
"""

from __future__ import annotations

import argparse
import math
import timeit
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

import torchcpl as cpl
from bench.timing import resident_peak
from torchcpl.files import write_json
from torchcpl.provenance import run_info

PERMUTATIONS, EARLY_STOP_WEIGHT = 10, 5.0  # of subset_nll


def dense_from_factors(keys: Tensor, values: Tensor) -> Tensor:
    return keys @ values.transpose(1, 2) / math.sqrt(keys.shape[-1])


# The loops: one row, one permutation, one step at a time, as one would write them first.


def loop_steps(unary: Tensor, stop: Tensor, W: Tensor, order: Tensor) -> Iterator[Tensor]:
    """Log-probabilities (N+1,) of the next choice, the stop last, before each pick of ``order`` and after the last."""
    columns = torch.nn.functional.pad(W.t()[order], (0, 1))  # once an order: a column a step is far slower
    logits = torch.cat([unary, stop])
    selected = torch.zeros(len(logits), dtype=torch.bool)
    for t in range(len(order)):
        yield logits.masked_fill(selected, -math.inf).log_softmax(-1)
        logits = logits + columns[t]
        selected = selected.clone()
        selected[order[t]] = True
    yield logits.masked_fill(selected, -math.inf).log_softmax(-1)


def loop_subset_nll(unary: Tensor, stop: Tensor, W: list[Tensor], target: Tensor) -> Tensor:
    rows = []
    for b in range(len(unary)):
        items = target[b][target[b] >= 0]
        total = unary.new_zeros(())
        for _ in range(PERMUTATIONS):
            order = items[torch.randperm(len(items))]
            *before, last = loop_steps(unary[b], stop[b : b + 1], W[b], order)
            for t, log_probs in enumerate(before):
                total = total - log_probs[order[t:]].mean() + EARLY_STOP_WEIGHT * log_probs[-1].exp()
            total = total - last[-1]
        rows.append(total / PERMUTATIONS / (len(items) + 1))
    return torch.stack(rows).mean()


def loop_ordered_nll(unary: Tensor, stop: Tensor, W: list[Tensor], order: Tensor) -> Tensor:
    rows = []
    for b in range(len(unary)):
        items = order[b][order[b] >= 0]
        total = unary.new_zeros(())
        picks = [*items.tolist(), unary.shape[1]]  # the stop last
        for pick, log_probs in zip(picks, loop_steps(unary[b], stop[b : b + 1], W[b], items), strict=True):
            total = total - log_probs[pick]
        rows.append(total)
    return torch.stack(rows).mean()


@torch.no_grad()
def loop_greedy(unary: Tensor, stop: Tensor, W: Tensor, max_len: int) -> tuple[list[list[int]], list[float]]:
    every, scores = [], []
    for b in range(len(unary)):
        logits = torch.cat([unary[b], stop[b : b + 1]])
        selected = torch.zeros(len(logits), dtype=torch.bool)
        picks: list[int] = []
        score = 0.0
        while len(picks) < max_len:
            log_probs = logits.masked_fill(selected, -math.inf).log_softmax(-1)
            pick = int(log_probs.argmax())
            score += float(log_probs[pick])
            if pick == len(logits) - 1:
                break
            picks.append(pick)
            selected[pick] = True
            logits[:-1] += W[b, :, pick]
        every.append(picks)
        scores.append(score)
    return every, scores


def loop_greedy_from_factors(unary: Tensor, stop: Tensor, keys: Tensor, values: Tensor, max_len: int) -> None:
    loop_greedy(unary, stop, dense_from_factors(keys, values), max_len)


def timed(work: Callable[[], Any], repeats: int) -> float:
    """Median milliseconds of ``repeats`` runs after a warm one."""
    work()
    return median(timeit.repeat(work, number=1, repeat=repeats)) * 1e3


def potentials(batch: int, n: int, hidden: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((batch, n), (batch, n, hidden), (batch, n, hidden))
    unary, keys, values = (torch.randn(shape, generator=generator) for shape in shapes)
    return unary, torch.full((batch,), -100.0), keys, values  # a stop so unlikely that every step is taken


def distinct(batch: int, n: int, steps: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(batch, n, generator=generator).argsort(-1)[:, :steps]


def ours(kind: str, leaves: list[Tensor], target: Tensor) -> None:
    unary, stop, keys, values = leaves
    pot = cpl.Potentials(unary, stop, cpl.LowRank(keys, values))
    subset = kind == "subset_nll"
    loss = cpl.subset_nll(pot, target, PERMUTATIONS, EARLY_STOP_WEIGHT) if subset else cpl.ordered_nll(pot, target)
    torch.autograd.grad(loss, leaves)


def loop(kind: str, leaves: list[Tensor], target: Tensor) -> None:
    unary, stop, keys, values = leaves
    W = [dense_from_factors(k[None], v[None])[0] for k, v in zip(keys, values, strict=True)]
    nll = loop_subset_nll if kind == "subset_nll" else loop_ordered_nll
    torch.autograd.grad(nll(unary, stop, W, target), leaves)


def bench_losses(repeats: int) -> list[dict[str, Any]]:
    rows = []
    for kind, (batch, n, steps, hidden) in {"subset_nll": (64, 160, 10, 64), "ordered_nll": (64, 1024, 32, 64)}.items():
        given = kind, [x.requires_grad_() for x in potentials(batch, n, hidden)], distinct(batch, n, steps)
        slow, fast = timed(partial(loop, *given), 1), timed(partial(ours, *given), repeats)
        rows.append(ratio(f"{kind} forward+backward", slow, fast, B=batch, N=n, T=steps))
    return rows


def bench_greedy(repeats: int) -> list[dict[str, Any]]:
    n, steps, hidden = 1024, 64, 64
    rows = []
    for batch in (64, 1):
        unary, stop, keys, values = potentials(batch, n, hidden)
        W = dense_from_factors(keys, values)
        dense = cpl.Potentials(unary, stop, cpl.Dense(W))
        factored = cpl.Potentials(unary, stop, cpl.LowRank(keys, values))
        expected, scores = loop_greedy(unary, stop, W, steps)
        found = cpl.greedy(dense, steps)
        assert found.tolist() == expected, "the decoders disagree"
        assert torch.allclose(found.log_prob, torch.tensor(scores), rtol=1e-4)
        works: dict[str, tuple[Callable[[], Any], cpl.Potentials]] = {
            "W given": (partial(loop_greedy, unary, stop, W, steps), dense),
            "factors given": (partial(loop_greedy_from_factors, unary, stop, keys, values, steps), factored),
        }
        for given, (loop, pot) in works.items():
            slow, fast = timed(loop, 3 if batch > 1 else repeats), timed(partial(cpl.greedy, pot, steps), repeats)
            rows.append(ratio(f"greedy, {given}", slow, fast, B=batch, N=n, T=steps))
    return rows


def ratio(work: str, loop_ms: float, ms: float, **sizes: int) -> dict[str, Any]:
    return {"work": work, **sizes, "loop_ms": round(loop_ms, 3), "ms": round(ms, 3), "ratio": round(loop_ms / ms, 2)}


def bench_memory() -> dict[str, Any]:
    """Train one step and decode with 20,000 candidates: the peak above what was held before."""
    batch, n, steps, hidden = 8, 20_000, 32, 64

    def work() -> None:
        head, features, target = cpl.CPLHead(32, hidden), torch.randn(batch, n, 32), distinct(batch, n, steps)
        pot = head(features)
        (cpl.ordered_nll(pot, target) + cpl.subset_nll(pot, target, permutations=2)).backward()
        with torch.no_grad():
            cpl.greedy(head(features), steps)
            cpl.beam(head(features), 4, 2, max_len=steps)

    sizes = {"B": batch, "N": n, "T": steps, "h": hidden}
    mib = {"peak_mib": round(resident_peak(work)), "dense_W_mib": round(batch * n**2 * 4 / 2**20)}
    return {"work": "train and decode, LowRank", **sizes, **mib}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="write the results as JSON")
    parser.add_argument("--repeats", type=int, default=10, help="timed runs of the fast side (default: 10)")
    options = parser.parse_args()
    rows = bench_losses(options.repeats) + bench_greedy(options.repeats)
    print(f"{'work':<32}{'B':>4}{'N':>7}{'T':>4}{'loop ms':>11}{'ms':>10}{'ratio':>8}")
    for row in rows:
        sizes = f"{row['B']:>4}{row['N']:>7}{row['T']:>4}"
        print(f"{row['work']:<32}{sizes}{row['loop_ms']:>11}{row['ms']:>10}{row['ratio']:>8}")
    memory = bench_memory()
    peak, dense = memory["peak_mib"], memory["dense_W_mib"]
    print(f"peak memory with {memory['N']:,} candidates: {peak} MiB; W alone would be {dense} MiB")
    if options.out:
        write_json(options.out, {**run_info(device="cpu"), "threads": torch.get_num_threads(), "rows": [*rows, memory]})


if __name__ == "__main__":
    main()

"""Core speed on the CPU, as ratios in one run against a plain per-row loop over a dense W.

python -m bench.core --out results/core-cpu.json
"""

from __future__ import annotations

import argparse
import math
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import torchcpl as cpl


def dense_from_factors(keys: Tensor, values: Tensor) -> Tensor:
    return keys @ values.transpose(1, 2) / math.sqrt(keys.shape[-1])


# The loops: one row, one permutation, one step at a time, as one would write them first.


def loop_subset_nll(
    unary: Tensor, stop: Tensor, W: list[Tensor], target: Tensor, permutations: int, early: float = 5.0
) -> Tensor:
    rows = []
    for b in range(len(unary)):
        items = target[b][target[b] >= 0]
        total = unary.new_zeros(())
        for _ in range(permutations):
            order = items[torch.randperm(len(items))]
            columns = torch.nn.functional.pad(W[b].t()[order], (0, 1))  # once an order: a column a step is far slower
            logits = torch.cat([unary[b], stop[b : b + 1]])
            selected = torch.zeros(len(logits), dtype=torch.bool)
            for t in range(len(order) + 1):
                log_probs = logits.masked_fill(selected, -math.inf).log_softmax(-1)
                if t == len(order):
                    total = total - log_probs[-1]
                    break
                total = total - log_probs[order[t:]].mean() + early * log_probs[-1].exp()
                logits = logits + columns[t]
                selected = selected.clone()
                selected[order[t]] = True
        rows.append(total / permutations / (len(items) + 1))
    return torch.stack(rows).mean()


def loop_ordered_nll(unary: Tensor, stop: Tensor, W: list[Tensor], order: Tensor) -> Tensor:
    rows = []
    for b in range(len(unary)):
        logits = torch.cat([unary[b], stop[b : b + 1]])
        selected = torch.zeros(len(logits), dtype=torch.bool)
        total = unary.new_zeros(())
        items = order[b][order[b] >= 0]
        columns = torch.nn.functional.pad(W[b].t()[items], (0, 1))
        for t, pick in enumerate([*items.tolist(), len(logits) - 1]):
            total = total - logits.masked_fill(selected, -math.inf).log_softmax(-1)[pick]
            if pick == len(logits) - 1:
                break
            logits = logits + columns[t]
            selected = selected.clone()
            selected[pick] = True
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


def timed(work: Callable[[], Any], repeats: int) -> float:
    """Median milliseconds of ``repeats`` runs after a warm one."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2] * 1e3


def potentials(batch: int, n: int, hidden: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    unary, keys, values = (
        torch.randn(*shape, generator=generator) for shape in ((batch, n), (batch, n, hidden), (batch, n, hidden))
    )
    return unary, torch.full((batch,), -100.0), keys, values  # a stop so unlikely that every step is taken


def distinct(batch: int, n: int, steps: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(batch, n, generator=generator).argsort(-1)[:, :steps]


def backward(loss: Tensor, leaves: list[Tensor]) -> None:
    torch.autograd.grad(loss, leaves)


def bench_losses(repeats: int) -> list[dict[str, Any]]:
    rows = []
    for work, (batch, n, steps, hidden, count) in {
        "subset_nll forward+backward": (64, 160, 10, 64, 10),
        "ordered_nll forward+backward": (64, 1024, 32, 64, 1),
    }.items():
        unary, stop, keys, values = potentials(batch, n, hidden)
        leaves = [x.requires_grad_() for x in (unary, stop, keys, values)]
        target = distinct(batch, n, steps)

        def ours(work: str = work, leaves: list[Tensor] = leaves, target: Tensor = target, count: int = count) -> None:
            unary, stop, keys, values = leaves
            pot = cpl.Potentials(unary, stop, cpl.LowRank(keys, values))
            loss = cpl.subset_nll(pot, target, count) if work.startswith("subset") else cpl.ordered_nll(pot, target)
            backward(loss, leaves)

        def loop(work: str = work, leaves: list[Tensor] = leaves, target: Tensor = target, count: int = count) -> None:
            unary, stop, keys, values = leaves
            W = [dense_from_factors(k[None], v[None])[0] for k, v in zip(keys, values, strict=True)]
            if work.startswith("subset"):
                backward(loop_subset_nll(unary, stop, W, target, count), leaves)
            else:
                backward(loop_ordered_nll(unary, stop, W, target), leaves)

        rows.append(ratio(work, timed(loop, 1), timed(ours, repeats), B=batch, N=n, T=steps))
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
        given = timed(lambda u=unary, s=stop, W=W: loop_greedy(u, s, W, steps), 3 if batch > 1 else repeats)  # type: ignore[misc]
        rows.append(
            ratio("greedy, W given", given, timed(lambda p=dense: cpl.greedy(p, steps), repeats), B=batch, N=n, T=steps)  # type: ignore[misc]
        )
        built = timed(
            lambda u=unary, s=stop, k=keys, v=values: loop_greedy(u, s, dense_from_factors(k, v), steps),  # type: ignore[misc]
            3 if batch > 1 else repeats,
        )
        ours = timed(partial(cpl.greedy, factored, steps), repeats)
        rows.append(ratio("greedy, factors given", built, ours, B=batch, N=n, T=steps))
    return rows


def ratio(work: str, loop_ms: float, ms: float, **sizes: int) -> dict[str, Any]:
    return {"work": work, **sizes, "loop_ms": round(loop_ms, 3), "ms": round(ms, 3), "ratio": round(loop_ms / ms, 2)}


def large() -> None:
    """Train one step and decode with 20,000 candidates; run alone, so that the peak memory is this work's."""
    batch, n, steps, hidden = 8, 20_000, 32, 64
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    head = cpl.CPLHead(32, hidden)
    features = torch.randn(batch, n, 32)
    target = distinct(batch, n, steps)
    start = time.perf_counter()
    pot = head(features)
    (cpl.ordered_nll(pot, target) + cpl.subset_nll(pot, target, permutations=2)).backward()
    trained = time.perf_counter() - start
    with torch.no_grad():
        cpl.greedy(head(features), steps)
        cpl.beam(head(features), 4, 2, max_len=steps)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{peak:.0f} {before:.0f} {trained * 1e3:.0f}")


def bench_memory() -> list[dict[str, Any]]:
    answer = subprocess.run(
        [sys.executable, "-m", "bench.core", "--large"], check=True, capture_output=True, text=True
    ).stdout.split()
    peak, before, ms = map(float, answer)
    return [
        {
            "work": "train and decode, LowRank",
            "B": 8,
            "N": 20_000,
            "T": 32,
            "h": 64,
            "ms": ms,
            "peak_mib": peak,
            "peak_mib_before": before,
            "dense_W_mib": round(8 * 20_000**2 * 4 / 2**20),
        }
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="write the results as JSON")
    parser.add_argument("--repeats", type=int, default=10, help="timed runs of the fast side (default: 10)")
    parser.add_argument("--large", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.large:
        large()
        return
    rows = bench_losses(options.repeats) + bench_greedy(options.repeats) + bench_memory()
    print(f"{'work':<32}{'B':>4}{'N':>7}{'T':>4}{'loop ms':>11}{'ms':>10}{'ratio':>8}")
    for row in rows:
        loop, gain = row.get("loop_ms", ""), row.get("ratio", "")
        print(f"{row['work']:<32}{row['B']:>4}{row['N']:>7}{row['T']:>4}{loop:>11}{row['ms']:>10}{gain:>8}")
    memory = rows[-1]
    peak, dense = memory["peak_mib"], memory["dense_W_mib"]
    print(f"peak memory with {memory['N']:,} candidates: {peak:.0f} MiB; W alone would be {dense} MiB")
    if options.out:
        from torchcpl.files import write_json
        from torchcpl.provenance import run_info

        write_json(options.out, {**run_info(), "threads": torch.get_num_threads(), "rows": rows})


if __name__ == "__main__":
    main()

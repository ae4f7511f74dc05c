"""The GPU kernels against their plain twins, CUDA only: times, peak memory, and a sweep over how to launch them.

    python -m bench.kernels --out results/kernels-h200.json
    python -m bench.kernels --only tune

Times are medians over many runs, warm, the inputs rotating so that none stays in the cache from run to run. ``ms`` is
what a caller sees; rows whose variant ends in ``graph`` are replays of a captured CUDA graph, the device's time alone.
``peak_mib`` is the memory above the inputs; ``work_mib`` leaves out the gradients that are returned as well.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

import torchcpl as cpl
from torchcpl.constraints import Rules
from torchcpl.kernels import dispatch, greedy_triton, nll_triton, use
from torchcpl.kernels.contexts_triton import prefixes
from torchcpl.kernels.dispatch import Plan

Work = Callable[[], Any]
Rows = list[dict[str, Any]]
DEVICE = torch.device("cuda")
CACHE = 2**27  # bytes of inputs after which a set of them has left the cache
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


# Timing


def median(times: Sequence[float]) -> float:
    return sorted(times)[len(times) // 2]


def timed(calls: Sequence[Work], budget: float = 0.3) -> float:
    """Median milliseconds of a call, as often as fits into ``budget`` seconds, 5 to 200 times."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    calls[0]()
    end.record()
    end.synchronize()
    repeats = int(min(max(budget * 1e3 / max(start.elapsed_time(end), 1e-3), 5), 200))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for i in range(repeats):
        calls[i % len(calls)]()
        marks[i + 1].record()
    torch.cuda.synchronize()
    return median([a.elapsed_time(b) for a, b in pairwise(marks)])


def graphed(calls: Sequence[Work], budget: float = 0.2) -> float:
    """Median milliseconds of a call inside a captured graph of all of them."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return timed([graph.replay], budget) / len(calls)


def peak(call: Work) -> float:
    """MiB above what is allocated before."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def row(work: str, variant: str, ms: float, peak_mib: float, dtype: torch.dtype, **more: Any) -> dict[str, Any]:
    found = {"work": work, "variant": variant, **more, "dtype": NAMES[dtype], "ms": ms, "peak_mib": round(peak_mib, 1)}
    sizes = " ".join(f"{key}={value}" for key, value in more.items())
    print(f"{work:<16}{variant:<34}{NAMES[dtype]:<10}{sizes:<44}{ms:10.4f} ms{peak_mib:10.1f} MiB", flush=True)
    return found


# Decoding


def sets_of(size: int, most: int = 16) -> int:
    return max(2, min(most, math.ceil(CACHE / max(size, 1))))


def decode_inputs(batch: int, n: int, hidden: int, dtype: torch.dtype, dense: bool) -> list[cpl.Potentials]:
    """Potentials whose stop is so unlikely that every step is taken."""
    per_set = batch * n * (n if dense else 2 * hidden) * dtype.itemsize
    found = []
    for _ in range(sets_of(per_set)):
        unary = torch.randn(batch, n, device=DEVICE, dtype=dtype)
        stop = torch.full((batch,), -1e4, device=DEVICE, dtype=dtype)
        interaction: cpl.Interaction
        if dense:  # each pick's effects beside each other, as they are when W is built for decoding
            interaction = cpl.Dense(torch.randn(batch, n, n, device=DEVICE, dtype=dtype).transpose(1, 2))
        else:
            keys, values = (torch.randn(batch, n, hidden, device=DEVICE, dtype=dtype) for _ in range(2))
            interaction = cpl.LowRank(keys, values)
        found.append(cpl.Potentials(unary, stop, interaction))
    return found


@torch.no_grad()
def row_loop(pot: cpl.Potentials, max_len: int) -> list[list[int]]:
    """One row after the other, the pick read back by the host at every step."""
    assert isinstance(pot.interaction, cpl.Dense)
    found = []
    for b in range(len(pot)):
        logits = torch.cat([pot.unary[b], pot.stop[b : b + 1]]).float()
        selected = torch.zeros(len(logits), dtype=torch.bool, device=DEVICE)
        picks: list[int] = []
        while len(picks) < max_len:
            pick = int(logits.masked_fill(selected, -math.inf).log_softmax(-1).argmax())
            if pick == len(logits) - 1:
                break
            picks.append(pick)
            selected[pick] = True
            logits[:-1] += pot.interaction.W[b, :, pick]
        found.append(picks)
    return found


def greedy(pot: cpl.Potentials, steps: int, mode: str) -> cpl.Selection:
    with use(mode):
        return cpl.greedy(pot, steps)


def forced(pot: cpl.Potentials, steps: int, way: Plan) -> cpl.Selection:
    return greedy_triton.decode(pot, Rules(pot, steps), way)


def bench_decode() -> Rows:
    return [
        found
        for dtype in (torch.float32, torch.bfloat16)
        for batch in (1, 64, 1024)
        for bench in (decode_dense, decode_factored)
        for found in bench(batch, 1024, 30, 128, dtype)
    ]


def decode_rows(variant: str, calls: list[Work], graph: bool, dtype: torch.dtype, **sizes: int) -> Rows:
    memory = peak(calls[0])
    rows = [row("greedy", variant, timed(calls), memory, dtype, **sizes)]
    if graph:
        rows.append(row("greedy", f"{variant}, graph", graphed(calls), memory, dtype, **sizes))
    return rows


def decode_dense(batch: int, n: int, steps: int, hidden: int, dtype: torch.dtype) -> Rows:
    sizes = {"B": batch, "N": n, "T": steps}
    pots = decode_inputs(batch, n, hidden, dtype, dense=True)
    if batch == 64 and dtype == torch.float32:
        expected = greedy(pots[0], steps, "plain").tolist()
        assert row_loop(pots[0], steps) == expected, "the per-row loop and the rollout disagree"
        assert greedy(pots[0], steps, "triton").tolist() == expected, "the kernel and the rollout disagree"
    rows = decode_rows("triton, W given", [partial(greedy, pot, steps, "triton") for pot in pots], True, dtype, **sizes)
    rows += decode_rows(
        "plain, W given", [partial(greedy, pot, steps, "plain") for pot in pots[:2]], False, dtype, **sizes
    )
    if batch <= 64:
        rows += decode_rows(
            "per-row loop, W given", [partial(row_loop, p, steps) for p in pots[:2]], False, dtype, **sizes
        )
        drawn: list[Work] = [partial(cpl.sample, pot, 16, max_len=steps) for pot in pots]
        rows.append(row("sample 16", "triton, W given", timed(drawn), peak(drawn[0]), dtype, **sizes))
    across = [replace(p, interaction=cpl.Dense(p.interaction.dense().contiguous())) for p in pots[:2]]
    del pots
    calls: list[Work] = [partial(greedy, pot, steps, "triton") for pot in across]
    return rows + decode_rows("triton, W given row by row", calls, True, dtype, **sizes)


def decode_factored(batch: int, n: int, steps: int, hidden: int, dtype: torch.dtype) -> Rows:
    sizes = {"B": batch, "N": n, "T": steps, "h": hidden}
    pots = decode_inputs(batch, n, hidden, dtype, dense=False)
    chosen = dispatch.plan(pots[0], Rules(pots[0], steps))
    print(f"chosen for {sizes}: {chosen}")
    rows: Rows = []
    for variant, calls in {
        "triton, factors given": [partial(greedy, pot, steps, "auto") for pot in pots],
        "triton, W built": [partial(forced, pot, steps, Plan("dense", "block", 1024, 4)) for pot in pots],
        "triton, factored": [partial(forced, pot, steps, Plan("factored", "tiles", 256)) for pot in pots],
    }.items():
        rows += decode_rows(variant, list(calls), chosen is not None, dtype, **sizes)
    calls = [partial(greedy, pot, steps, "plain") for pot in pots[:2]]
    return rows + decode_rows("plain, factors given", list(calls), False, dtype, **sizes)


# The loss


def loss_inputs(batch: int, n: int, steps: int, hidden: int, dtype: torch.dtype, sets: int) -> list[Any]:
    found = []
    for _ in range(sets):
        shapes = ((batch, n), (batch,), (batch, n, hidden), (batch, n, hidden))
        leaves = [torch.randn(*shape, device=DEVICE, dtype=dtype).requires_grad_() for shape in shapes]
        order = torch.rand(batch, n, device=DEVICE).argsort(-1)[:, :steps].contiguous()
        found.append((leaves, order))
    return found


def loss_of(kind: str, leaves: list[Tensor], order: Tensor) -> Tensor:
    unary, stop, keys, values = leaves
    pot = cpl.Potentials(unary, stop, cpl.LowRank(keys, values))
    return cpl.ordered_nll(pot, order) if kind == "ordered" else cpl.subset_nll(pot, order, permutations=10)


def gradients(function: Callable[..., Tensor], kind: str, leaves: list[Tensor], order: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(function(kind, leaves, order), leaves)


VARIANTS = {
    "fused": ("triton", False),
    "fused, compiled": ("triton", True),
    "plain": ("plain", False),
    "plain, compiled": ("plain", True),
}


def bench_loss() -> Rows:
    rows: Rows = []
    n, steps, hidden, batch = 1024, 32, 128, 256
    for kind, dtype in [(k, d) for k in ("ordered", "subset") for d in (torch.float32, torch.bfloat16)]:
        inputs = loss_inputs(batch, n, steps, hidden, dtype, 2)
        returned = sum(leaf.numel() * leaf.element_size() for leaf in inputs[0][0]) / 2**20
        sizes = {"B": batch, "N": n, "T": steps, "h": hidden, "P": 1 if kind == "ordered" else 10}
        for variant, (mode, compiled) in VARIANTS.items():
            torch._dynamo.reset()
            function = torch.compile(loss_of) if compiled else loss_of
            calls: list[Work] = [partial(gradients, function, kind, *given) for given in inputs]
            with use(mode):
                memory = peak(calls[0])
                ms = timed(calls, 0.5)
                torch.manual_seed(0)
                value = float(function(kind, *inputs[0]).detach())
            more = {"work_mib": round(memory - returned, 1), "loss": value}
            rows.append(row(f"{kind} nll", variant, ms, memory, dtype, **sizes, **more))
        del inputs, calls
        torch.cuda.empty_cache()
    return rows


def bench_large() -> Rows:
    rows: Rows = []
    n, steps, hidden, batch = 65_536, 64, 128, 8
    sizes = {"B": batch, "N": n, "T": steps, "h": hidden}
    for dtype in (torch.float32, torch.bfloat16):
        leaves, order = loss_inputs(batch, n, steps, hidden, dtype, 1)[0]
        for variant, mode in (("fused", "triton"), ("plain", "plain")):
            with use(mode):
                call = partial(gradients, loss_of, "ordered", leaves, order)
                rows.append(row("ordered nll", variant, timed([call]), peak(call), dtype, **sizes))
        unary, stop, keys, values = (leaf.detach() for leaf in leaves)
        pot = cpl.Potentials(unary, stop - 100, cpl.LowRank(keys, values))
        for mode in ("auto", "triton", "plain"):
            calls: list[Work] = [partial(greedy, pot, steps, mode)]
            rows += decode_rows(f"{mode}, factors given", calls, False, dtype, **sizes)
    return rows


def bench_copy() -> Rows:
    source = torch.randn(2**29, device=DEVICE)
    target = torch.empty_like(source)
    ms = timed([lambda: target.copy_(source)])
    rate = 2 * source.numel() * 4 / ms / 1e9
    print(f"copy: {rate:.2f} TB/s, bytes read and written")
    return [row("copy 2 GiB", "torch", ms, 0.0, torch.float32, tb_s=round(rate, 3))]


# The sweep


def tried(name: str, work: Callable[[], float]) -> None:
    try:
        print(f"{name:<90}{work():9.4f} ms", flush=True)
    except Exception as error:  # a launch that does not fit is an answer too
        print(f"{name:<90}{type(error).__name__}: {str(error).splitlines()[0][:60]}", flush=True)


# Candidates of a tile, hidden dimensions of a product, warps, stages.
LAUNCHES = {
    torch.float32: ((64, 32, 8, 1), (64, 32, 8, 2), (64, 16, 8, 2), (64, 64, 8, 1), (32, 32, 8, 1), (32, 32, 8, 2),
                    (128, 32, 8, 1), (64, 32, 4, 1)),
    torch.bfloat16: ((64, 128, 8, 1), (64, 128, 8, 2), (64, 64, 8, 2), (64, 128, 4, 2), (64, 128, 4, 3),
                     (128, 128, 8, 1), (128, 128, 8, 2), (32, 128, 4, 2), (32, 128, 4, 3)),
}  # fmt: skip


def tune() -> Rows:
    """Device times of the kernels by how they are launched; nothing is kept."""
    tune_decode(1024, 30, 128)
    for dtype, launches in LAUNCHES.items():
        for launch in launches:
            tune_loss(256, 1024, 32, 128, dtype, *launch)
    return []


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


PARTS: dict[str, Callable[[], Rows]] = {
    "copy": bench_copy,
    "decode": bench_decode,
    "loss": bench_loss,
    "large": bench_large,
}
EVERY = [*PARTS, "tune"]  # the sweep takes minutes: by name only


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="write the results as JSON")
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of {', '.join(EVERY)}, with commas between")
    options = parser.parse_args()
    names = options.only.split(",")
    if not set(names) <= set(EVERY):
        parser.error(f"--only: expected some of {', '.join(EVERY)}, got {options.only}")
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    torch.manual_seed(0)
    rows: Rows = []
    for name in names:
        rows += tune() if name == "tune" else PARTS[name]()
        torch.cuda.empty_cache()
    if options.out:
        from torchcpl.results import run_info, write_json

        write_json(options.out, {**run_info(), "rows": rows})


if __name__ == "__main__":
    main()

"""One prediction, a head and greedy decoding, in eager, torch.export, ONNX Runtime and torch.compile.

    python -m bench.export --parity          # results/export-parity.json: 500 inputs of 22 sizes, the same picks?
    python -m bench.export                   # results/export-cpu.json: latency on one CPU thread

Latency: batch 1, N = 200 and 2,000, for every kind; the calls of the ways are interleaved, so that what else the
machine does falls on all alike.

Parity: random inputs, and the edges: one candidate, candidates that occur twice, a stop that comes first or never, all
padded. Products are rounded differently by each way, and of candidates that are equal, or nearly, each may then prefer
another: picks other than eager's count as the same where eager's own logits, in float64, are within ``TIE`` of the
best at every step; how many such inputs there were, and by how much they missed the best, is in the result.
"""

from __future__ import annotations

import argparse
import logging
import math
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import torchcpl as cpl
from torchcpl.files import write_json
from torchcpl.head import KINDS
from torchcpl.provenance import run_info

DIM, HIDDEN, MAX_LEN = 64, 64, 32
SIZES = (200, 2000)
OPTIONS: dict[str, dict[str, Any]] = {  # what each kind is decoded with for the parity
    "dense": {},
    "lowrank": {"max_len": 8},
    "contextual": {"stop_threshold": 0.2},
    "coverage": {"max_len": 6, "min_len": 1},
    "recent": {},
}
TIE = 1e-5  # of the largest logit of a step, or of 1


class Model(nn.Module):
    """Features in, selection out."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.head = cpl.CPLHead(DIM, HIDDEN, kind="lowrank" if kind == "dense" else kind, live_stop=True)
        self.dense, self.options = kind == "dense", options

    def potentials(self, features: Tensor, mask: Tensor) -> cpl.Potentials:
        pot: cpl.Potentials = self.head(features, mask)
        if not self.dense:
            return pot
        W = cpl.Dense(pot.interaction.dense(), pot.interaction.dense_stop())
        return cpl.Potentials(pot.unary, pot.stop, W, mask)

    def forward(self, features: Tensor, mask: Tensor, stop_bias: Tensor) -> cpl.Selection:
        pot = self.potentials(features, mask)
        return cpl.greedy(pot, stop_bias=stop_bias, constraints=[cpl.Forbid(~mask)], **self.options)


Input = tuple[Tensor, Tensor, Tensor]  # features (B, N, d), mask (B, N), what is added to the stop's logit (B,)
Call = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # to indices and log-probabilities


def of(call: Callable[..., cpl.Selection]) -> Call:
    """A way from a function to selections."""

    def run(*given: Tensor) -> tuple[Tensor, Tensor]:
        found = call(*given)
        return found.indices, found.log_prob

    return run


def ways(model: Model, folder: Path) -> dict[str, Call]:
    """Each way as a function."""
    import onnxruntime

    example = (torch.randn(2, 50, DIM), torch.ones(2, 50, dtype=torch.bool), torch.zeros(2))
    batch, n = torch.export.Dim("batch"), torch.export.Dim("n")
    shapes = {"features": {0: batch, 1: n}, "mask": {0: batch, 1: n}, "stop_bias": {0: batch}}
    with torch.inference_mode():
        exported = torch.export.export(model, example, dynamic_shapes=shapes).module()
        program = torch.onnx.export(model, example, dynamo=True, dynamic_shapes=shapes, verbose=False)
    assert program is not None
    path = folder / "model.onnx"
    program.save(path)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = onnxruntime.InferenceSession(path, options)
    names = [output.name for output in session.get_outputs()]

    def served(*given: Tensor) -> tuple[Tensor, Tensor]:
        found = session.run(names[:3], {name: part.numpy() for name, part in zip(shapes, given, strict=True)})
        return torch.from_numpy(found[0]), torch.from_numpy(found[2])

    return {"eager": of(model), "torch.export": of(exported), "ONNX Runtime": served}


def inputs(number: int, min_len: int) -> Input:
    """Of 22 sizes: small and large values, and the edges."""
    generator = torch.Generator().manual_seed(number)
    sizes = ((1, 2), (1, 3), (2, 4), (3, 5), (1, 7), (5, 12), (2, 20), (4, 33), (1, 64), (8, 100), (3, 1))
    batch, n = sizes[number % 11]
    n += 3 * (number // 11 % 2) * (n > 1)
    batch = 1 if n == 1 and number % 2 else batch
    features = torch.randn(batch, n, DIM, generator=generator) * (0.1, 1.0, 3.0)[number % 3]
    if number % 5 == 0:  # every candidate twice
        features[:, n - n // 2 :] = features[:, : n // 2]
    mask = torch.rand(batch, n, generator=generator) < (0.0 if number % 13 == 0 else 0.8)
    if min_len:
        mask[:, 0] = True  # so that it can be met
    stop_bias = torch.zeros(batch) + {3: 30.0, 4: -30.0}.get(number % 7, 0.0)  # first, never
    return features, mask, stop_bias


def short_of_best(model: Model, given: Input, picks: Tensor) -> float:
    """By how much the picks (B, T) miss the best choice of their step at most, by eager's potentials in float64, in
    units of the largest logit or 1: 0 for picks that are greedy."""
    features, mask, bias = given
    pot = model.potentials(features, mask).to(torch.float64)
    if isinstance(pot.interaction, cpl.Contextual):
        network: Any = deepcopy(pot.interaction.network)
        object.__setattr__(pot.interaction, "network", network.double())
    threshold, worst = model.options.get("stop_threshold"), 0.0
    live = torch.ones(len(picks), dtype=torch.bool)
    left = mask.clone()
    for t in range(picks.shape[1]):
        added, added_stop = pot.interaction.logits(pot.interaction.after(picks[:, None, :t]))
        scores = (pot.unary + added[:, 0]).masked_fill(~left, -torch.inf)  # (B, N)
        stop = pot.stop + bias + (0 if added_stop is None else added_stop[:, 0])  # (B,)
        stop = stop.masked_fill(torch.tensor(t < model.options.get("min_len", 0)), -torch.inf)
        logits = torch.cat([scores, stop.unsqueeze(-1)], -1)
        choice = picks[:, t].where(picks[:, t] >= 0, scores.shape[1])
        chosen, size = logits.gather(1, choice.unsqueeze(-1))[:, 0], logits.abs().nan_to_num(posinf=0).amax(-1)
        missed = logits.amax(-1) - chosen
        if threshold is not None:
            over = logits.log_softmax(-1)[:, -1] - math.log(threshold)
            over = over.masked_fill(~left.any(-1), torch.inf)  # nothing left: it must stop
            stopped = choice == scores.shape[1]
            missed = torch.maximum(over, scores.amax(-1) - chosen).where(~stopped, -over)
        worst = max(worst, float((missed / size.clamp(min=1)).where(live & (missed > 0), 0).amax()))
        live &= picks[:, t] >= 0
        left.scatter_(1, choice.clamp(max=left.shape[1] - 1).unsqueeze(-1), False)
    return worst


def parity(kind: str, count: int) -> list[dict[str, Any]]:
    """On how many inputs each way makes the picks of eager, how far apart log-probabilities are; how many graphs."""
    torch.manual_seed(0)
    model = Model(kind, **OPTIONS[kind]).eval()
    for weight in model.parameters():
        weight.data.mul_(2)
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(model, dynamic=True, fullgraph=True, backend=counter)
    # Otherwise torch compiles a batch of one and a single candidate apart from all other sizes: four graphs.
    sizes_of_one = torch.fx.experimental._config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
    with TemporaryDirectory() as folder, torch.inference_mode(), sizes_of_one:
        calls = ways(model, Path(folder))
        calls["torch.compile"] = of(compiled)
        rows = {way: {"same": 0, "ties": 0, "missed": 0.0, "apart": 0.0, "relative": 0.0} for way in calls}
        edges = {"stop first": 0, "never": 0, "all padded": 0, "N = 1": 0, "twins": 0}
        for number in range(count):
            given = inputs(number, OPTIONS[kind].get("min_len", 0))
            indices, log_prob = calls["eager"](*given)
            length, room = (indices >= 0).sum(-1), given[1].sum(-1).clamp(max=indices.shape[1])
            edges["stop first"] += bool((length == 0).any() and given[1].any())
            edges["never"] += bool(((length == room) & (room > 0)).any())
            edges["all padded"] += not given[1].any()
            edges["N = 1"] += indices.shape[1] == 1
            edges["twins"] += number % 5 == 0
            for way, call in calls.items():
                found, row = call(*given), rows[way]
                missed = 0.0 if torch.equal(found[0], indices) else short_of_best(model, given, found[0])
                row["ties"] += not torch.equal(found[0], indices)
                row["same"] += missed <= TIE
                row["missed"] = max(row["missed"], missed)
                apart = (found[1] - log_prob).abs()
                row["apart"] = max(row["apart"], float(apart.max()))
                row["relative"] = max(row["relative"], float((apart / log_prob.abs().clamp(min=1)).max()))
    print(kind, edges, flush=True)
    for way, row in rows.items():
        print(f"{kind:12} {way:14} {row}, {counter.frame_count} graphs compiled", flush=True)
    graphs = {"torch.compile": {"graphs": counter.frame_count}}
    return [{"kind": kind, "way": way, "inputs": count, **row, **graphs.get(way, {})} for way, row in rows.items()]


def measure(kind: str, n: int, calls: dict[str, Call], rounds: int) -> list[dict[str, Any]]:
    given = torch.randn(1, n, DIM), torch.ones(1, n, dtype=torch.bool), torch.tensor([-100.0])  # every step is taken
    taken: dict[str, list[float]] = {name: [] for name in calls}
    with torch.inference_mode():
        want, _ = calls["eager"](*given)
        for name, call in calls.items():
            if not torch.equal(call(*given)[0], want):
                raise RuntimeError(f"{name}: other picks than eager, {kind}, N = {n}")
        for _ in range(rounds):
            for name, call in calls.items():
                start = time.perf_counter()
                call(*given)
                taken[name].append(1e3 * (time.perf_counter() - start))
    found = []
    for name, ms in taken.items():
        p50, p99 = np.percentile(ms, (50, 99))
        print(f"{kind:12} N = {n:5} {name:14} p50 {p50:8.3f} ms  p99 {p99:8.3f} ms", flush=True)
        found.append({"kind": kind, "N": n, "way": name, "p50_ms": float(p50), "p99_ms": float(p99)})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--parity", action="store_true", help="compare the picks instead of the time")
    parser.add_argument("--inputs", type=int, default=500, help="of each kind, for the parity")
    parser.add_argument("--rounds", type=int, default=200, help="calls of each way that are timed")
    parser.add_argument("--kinds", nargs="+", default=["dense", *KINDS])
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    rows = []
    for kind in args.kinds:
        if args.parity:
            rows += parity(kind, args.inputs)
            continue
        torch.manual_seed(0)
        model = Model(kind, max_len=MAX_LEN).eval()
        with TemporaryDirectory() as folder:
            calls = ways(model, Path(folder))
            for n in SIZES:
                rows += measure(kind, n, calls, args.rounds)
    out = args.out or Path("results") / ("export-parity.json" if args.parity else "export-cpu.json")
    write_json(
        out, {**run_info(seeds=[0], device="cpu"), "max_len": MAX_LEN, "dim": DIM, "hidden": HIDDEN, "rows": rows}
    )


if __name__ == "__main__":
    main()

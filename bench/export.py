"""One prediction, a head and greedy decoding, in eager, torch.export, ONNX Runtime and torch.compile.

    python -m bench.export --parity          # results/export-parity.json: 500 inputs of 20 sizes, the same picks?
    python -m bench.export                   # results/export-cpu.json: latency on one CPU thread

Latency: batch 1, N = 200 and 2,000, for every kind; the calls of the ways are interleaved, so that what else the
machine does falls on all alike.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable
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
    "lowrank": {"max_len": 8, "stop_bias": -0.5},
    "contextual": {"stop_threshold": 0.2},
    "coverage": {"max_len": 6, "min_len": 1},
    "recent": {},
}
STEPS = {"max_len": MAX_LEN, "stop_bias": -100.0}  # every step is taken


class Model(nn.Module):
    """Features in, selection out."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.head = cpl.CPLHead(DIM, HIDDEN, kind="lowrank" if kind == "dense" else kind, live_stop=True)
        self.dense, self.options = kind == "dense", options

    def forward(self, features: Tensor, mask: Tensor) -> cpl.Selection:
        pot = self.head(features, mask)
        if self.dense:
            dense = cpl.Dense(pot.interaction.dense(), pot.interaction.dense_stop())
            pot = cpl.Potentials(pot.unary, pot.stop, dense, mask)
        return cpl.greedy(pot, constraints=[cpl.Forbid(~mask)], **self.options)


Call = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # features and mask to indices and log-probabilities


def ways(model: Model, folder: Path) -> dict[str, Call]:
    """Each way as a function."""
    import onnxruntime

    example = (torch.randn(2, 50, DIM), torch.ones(2, 50, dtype=torch.bool))
    batch, n = torch.export.Dim("batch"), torch.export.Dim("n")
    shapes = {"features": {0: batch, 1: n}, "mask": {0: batch, 1: n}}
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

    def served(features: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        found = session.run(names[:3], {"features": features.numpy(), "mask": mask.numpy()})
        return torch.from_numpy(found[0]), torch.from_numpy(found[2])

    def of(call: Callable[..., cpl.Selection]) -> Call:
        def run(features: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
            found = call(features, mask)
            return found.indices, found.log_prob

        return run

    return {"eager": of(model), "torch.export": of(exported), "ONNX Runtime": served}


def inputs(number: int) -> tuple[Tensor, Tensor]:
    """Random ones of 20 sizes: small and large values, some of the candidates padded or all of them."""
    generator = torch.Generator().manual_seed(number)
    batch, n = ((1, 2), (1, 3), (2, 4), (3, 5), (1, 7), (5, 12), (2, 20), (4, 33), (1, 64), (8, 100))[number % 10]
    n += 3 * (number // 10 % 2)
    features = torch.randn(batch, n, DIM, generator=generator) * (0.1, 1.0, 3.0)[number % 3]
    mask = torch.rand(batch, n, generator=generator) < (0.0 if number % 13 == 0 else 0.8)
    mask[:, 0] |= number % 13 != 0  # min_len can be met
    return features, mask


def parity(kind: str, count: int) -> list[dict[str, Any]]:
    """On how many inputs each way makes the picks of eager, how far apart log-probabilities are; how many graphs."""
    torch.manual_seed(0)
    model = Model(kind, **OPTIONS[kind]).eval()
    for weight in model.parameters():
        weight.data.mul_(2)
    torch._dynamo.reset()
    counter = CompileCounter()
    with TemporaryDirectory() as folder, torch.inference_mode():
        calls = ways(model, Path(folder))
        compiled = torch.compile(model, dynamic=True, fullgraph=True, backend=counter)

        def run(features: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
            found = compiled(features, mask)
            return found.indices, found.log_prob

        calls["torch.compile"] = run
        same, apart = dict.fromkeys(calls, 0), dict.fromkeys(calls, 0.0)
        for number in range(count):
            given = inputs(number)
            if OPTIONS[kind].get("min_len") and not given[1].any():
                given = (given[0], torch.ones_like(given[1]))
            indices, log_prob = calls["eager"](*given)
            for way, call in calls.items():
                found = call(*given)
                same[way] += torch.equal(found[0], indices)
                apart[way] = max(apart[way], float((found[1] - log_prob).abs().max()))
    rows = []
    for way in calls:
        graphs = {"graphs": counter.frame_count} if way == "torch.compile" else {}
        rows.append({"kind": kind, "way": way, "inputs": count, "same": same[way], "apart": apart[way], **graphs})
        said = f", {counter.frame_count} graphs" if graphs else ""
        print(
            f"{kind:12} {way:14} the picks of eager on {same[way]} of {count}, apart {apart[way]:.1e}{said}", flush=True
        )
    return rows


def measure(kind: str, n: int, calls: dict[str, Call], rounds: int) -> list[dict[str, Any]]:
    features, mask = torch.randn(1, n, DIM), torch.ones(1, n, dtype=torch.bool)
    taken: dict[str, list[float]] = {name: [] for name in calls}
    with torch.inference_mode():
        want, _ = calls["eager"](features, mask)
        for name, call in calls.items():
            if not torch.equal(call(features, mask)[0], want):
                raise RuntimeError(f"{name}: other picks than eager, {kind}, N = {n}")
        for _ in range(rounds):
            for name, call in calls.items():
                start = time.perf_counter()
                call(features, mask)
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
        model = Model(kind, **STEPS).eval()
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

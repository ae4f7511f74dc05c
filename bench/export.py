"""Latency of one prediction, a head and greedy decoding, on one CPU thread: eager, torch.export, ONNX Runtime.

    python -m bench.export                   # results/export-cpu.json

Batch 1, N = 200 and 2,000, for every kind; the calls of the ways are interleaved, so that what else the machine does
falls on all alike. All ways make the same picks, which is checked.
"""

from __future__ import annotations

import argparse
import logging
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import torchcpl as cpl
from torchcpl.files import write_json
from torchcpl.head import KINDS
from torchcpl.provenance import run_info

DIM, HIDDEN, MAX_LEN = 64, 64, 32
SIZES = (200, 2000)


class Model(nn.Module):
    """Features in, selection out."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.head = cpl.CPLHead(DIM, HIDDEN, kind="lowrank" if kind == "dense" else kind)
        self.dense = kind == "dense"

    def forward(self, features: Tensor, mask: Tensor) -> cpl.Selection:
        pot = self.head(features, mask)
        if self.dense:
            pot = cpl.Potentials(pot.unary, pot.stop, cpl.Dense(pot.interaction.dense()), mask)
        return cpl.greedy(pot, MAX_LEN, stop_bias=-100.0)  # every step is taken


def ways(model: Model, folder: Path) -> dict[str, Any]:
    """Each way as a function of features and mask."""
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

    def served(features: Tensor, mask: Tensor) -> Tensor:
        found = session.run(None, {"features": features.numpy(), "mask": mask.numpy()})
        return torch.from_numpy(found[0])

    return {
        "eager": lambda features, mask: model(features, mask).indices,
        "torch.export": lambda features, mask: exported(features, mask).indices,
        "ONNX Runtime": served,
    }


def measure(kind: str, n: int, calls: dict[str, Any], rounds: int) -> list[dict[str, Any]]:
    features, mask = torch.randn(1, n, DIM), torch.ones(1, n, dtype=torch.bool)
    taken: dict[str, list[float]] = {name: [] for name in calls}
    with torch.inference_mode():
        want = calls["eager"](features, mask)
        for name, call in calls.items():
            if not torch.equal(call(features, mask), want):
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
    parser.add_argument("--out", type=Path, default=Path("results/export-cpu.json"))
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--kinds", nargs="+", default=["dense", *KINDS])
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    rows = []
    for kind in args.kinds:
        torch.manual_seed(0)
        model = Model(kind).eval()
        with TemporaryDirectory() as folder:
            calls = ways(model, Path(folder))
            for n in SIZES:
                rows += measure(kind, n, calls, args.rounds)
    write_json(args.out, {"run": run_info(), "max_len": MAX_LEN, "dim": DIM, "hidden": HIDDEN, "rows": rows})


if __name__ == "__main__":
    main()

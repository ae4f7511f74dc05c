"""Latency of predictions: encoder, decoding and both, on CUDA as one captured graph."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchcpl.inference import compile_for_inference
from torchcpl.provenance import device_name
from torchcpl.selectors import PointerHead
from torchcpl.tables import Column
from torchcpl.tasks.base import BenchmarkTask, SelectionModel

COLUMNS = (
    Column("method", "Method"),
    Column("batch", "Batch", 0),
    Column("encoder_ms", "Encoder ms", 3),
    Column("decode_ms", "Decode ms", 3, "min"),
    Column("ms", "Whole ms", 3, "min"),
    Column("picks", "Picks", 1),
)
SAME = Column("same", "Same picks", 3, share=True)
PRECISIONS = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
TIMED = 20  # examples a round in the tables' ms column


def where(device: torch.device) -> str:
    """The device of the timings, for notes."""
    return device_name(device) + (", as one CUDA graph" if device.type == "cuda" else "")


def ready(work: Callable[[Any], Any], inputs: Sequence[Any], precision: str = "32-true") -> list[Callable[[], Any]]:
    """Calls of ``work`` on each input; on CUDA they replay one captured graph."""
    run = compile_for_inference(work, inputs[0], dtype=PRECISIONS[precision])
    return [partial(run, one) for one in inputs]


def clock(calls: Sequence[Callable[[], Any]], repeats: int = 10, share: int = 1) -> tuple[float, float]:
    """Milliseconds per call, divided by ``share``: mean and std over ``repeats`` rounds, after a warm-up round.

    The device is synchronised after every call: this is latency, not throughput.
    """

    def wait() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    rounds = []
    for _ in range(repeats + 1):
        wait()
        start = time.perf_counter()
        for call in calls:
            call()
            wait()
        rounds.append((time.perf_counter() - start) * 1e3 / len(calls) / share)
    return statistics.fmean(rounds[1:]), statistics.stdev(rounds[1:]) if repeats > 1 else 0.0


def quick(task: BenchmarkTask, model: SelectionModel, knob: float | None) -> dict[str, float]:
    """The ``ms`` column of the tables: whole predictions at batch size 1."""
    mean, deviation = clock(ready(partial(model.select, knob=knob), task.examples(1, TIMED)))
    return {"ms": mean, "ms_std": deviation}


class _Decoding(nn.Module):
    """Decoding as a module, of the pair of encoded candidates and inputs."""

    def __init__(self, model: SelectionModel, knob: float | None) -> None:
        super().__init__()
        self.model, self.knob = model, knob

    def forward(self, pair: tuple[Tensor, Any]) -> Any:
        return self.model.decode(*pair, self.knob)


def rows(
    model: SelectionModel, inputs: Sequence[Any], knob: float | None, repeats: int, precision: str
) -> list[tuple[str, dict[str, Any]]]:
    """Rows of times and the suffix of each one's name: the pointer is timed with and without its key–value cache."""
    batch, found = len(inputs[0]), []
    pointers = [part for part in model.modules() if isinstance(part, PointerHead)]
    for form, cached in {"": True, ", recomputing": False}.items() if pointers else [("", True)]:
        for pointer in pointers:
            pointer.cache = cached
        encode = ready(model.encode, inputs, precision)
        pairs = [(call(), one) for call, one in zip(encode, inputs, strict=True)]
        decode = ready(_Decoding(model, knob).eval(), pairs, precision)
        whole = ready(partial(model.select, knob=knob), inputs, precision)
        row: dict[str, Any] = {"batch": batch}
        row["picks"] = statistics.fmean(float(call().lengths.float().mean()) for call in decode)
        for name, calls in {"encoder_ms": encode, "decode_ms": decode, "ms": whole}.items():
            row[name], row[f"{name}_std"] = clock(calls, repeats, batch)
        found.append((form, row))
    return found


def same_picks(task: BenchmarkTask, model: SelectionModel, knob: float | None, precision: str) -> float:
    """The share of the reported examples whose selection is the same as in float32."""
    count = len(task.reported)
    size = max(divisor for divisor in range(1, min(count, 100) + 1) if count % divisor == 0)  # batches of equal size
    selections = []
    for each in ("32-true", precision):
        calls = ready(partial(model.select, knob=knob), task.examples(size, count), each)
        answers = [call() for call in calls]
        picks = [picks for answer in answers for picks in getattr(answer, "selection", answer).tolist()]
        selections.append(picks if task.ordered else list(map(set, picks)))
    return statistics.fmean(one == other for one, other in zip(*selections, strict=True))

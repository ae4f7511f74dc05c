"""Latency of predictions: encoder, decoding and both, on CUDA as one captured graph."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

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


def ready(work: Callable[..., Any], *columns: Sequence[Any], precision: str = "32-true") -> list[Callable[[], Any]]:
    """Calls of ``work``, each with one element of every column; on CUDA they replay one captured graph."""
    rows = list(zip(*columns, strict=True))
    run = compile_for_inference(work, *rows[0], dtype=PRECISIONS[precision])
    return [partial(run, *row) for row in rows]


def clock(
    calls: Sequence[Callable[[], Any]], name: str = "ms", *, repeats: int = 10, share: int = 1
) -> dict[str, float]:
    """``name``: milliseconds per call, divided by ``share``; ``<name>_std``: their deviation over ``repeats`` rounds.

    Another round, before these, warms up. The device is synchronised after every call: this is latency, not throughput.
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
    deviation = statistics.stdev(rounds[1:]) if repeats > 1 else 0.0
    return {name: statistics.fmean(rounds[1:]), f"{name}_std": deviation}


def rows(
    model: SelectionModel, inputs: Sequence[Any], knob: float | None, repeats: int, precision: str = "32-true"
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Pairs of a suffix for the model's name and its times: the pointer is timed with and without its cache."""
    batch = len(inputs[0])
    pointers = [part for part in model.modules() if isinstance(part, PointerHead)]
    for form, cached in {"": True, ", recomputing": False}.items() if pointers else [("", True)]:
        for pointer in pointers:
            pointer.cache = cached
        encode = ready(model.encode, inputs, precision=precision)
        features = [call() for call in encode]
        decode = ready(partial(model.decode, knob=knob), features, inputs, precision=precision)
        whole = ready(partial(model.select, knob=knob), inputs, precision=precision)
        row: dict[str, Any] = {"batch": batch}
        row["picks"] = statistics.fmean(float(call().lengths.float().mean()) for call in decode)
        for name, calls in {"encoder_ms": encode, "decode_ms": decode, "ms": whole}.items():
            row |= clock(calls, name, repeats=repeats, share=batch)
        yield form, row


def same_picks(task: BenchmarkTask, model: SelectionModel, knob: float | None, precision: str) -> float:
    """The share of the reported examples whose selection is the same as in float32."""
    count = len(task.reported)
    size = max(divisor for divisor in range(1, min(count, 100) + 1) if count % divisor == 0)  # batches of equal size
    selections = []
    for each in ("32-true", precision):
        calls = ready(partial(model.select, knob=knob), task.examples(size, count), precision=each)
        answers = [call() for call in calls]
        picks = [picks for answer in answers for picks in getattr(answer, "selection", answer).tolist()]
        selections.append(picks if task.ordered else list(map(set, picks)))
    return statistics.fmean(one == other for one, other in zip(*selections, strict=True))

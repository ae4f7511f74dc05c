"""Times, memory and rows: what the speed measurements share.

A time is a median over many calls, warm, the inputs rotating so that none stays in the cache from call to call. Memory
is the peak of a call above what was held before it: allocated on CUDA, resident on the CPU.
"""

from __future__ import annotations

import ctypes
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import cycle, pairwise
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

Work = Callable[[], Any]
Row = dict[str, Any]
Change = tuple[Any, str, Any]  # object, name of its attribute, what to put there
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
MACHINE = torch.cuda.get_device_name().split()[-1].lower() if CUDA else "cpu"  # in the names of results
SEED = 0
NEVER = -1e4  # a stop so unlikely that every step is taken
CACHE = 2**27 if CUDA else 2**26  # bytes of inputs after which a set of them has left the cache
BUDGET = 0.2  # seconds of work that is timed
WARM = 0.03  # seconds of work before it is timed: a host that has waited is slow at first
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


@contextmanager
def changed(*changes: Change) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, name, value in changes:
            stack.enter_context(patch.object(owner, name, value))
        yield


def sets_of(size: int, most: int = 16) -> int:
    """How many sets of inputs of ``size`` bytes to rotate."""
    return max(2, min(most, math.ceil(CACHE / max(size, 1))))


def timed(calls: Sequence[Work], budget: float | None = None) -> float:
    """Median milliseconds of a call, as often as fits into ``budget`` seconds, 3 to 200 times."""
    budget = BUDGET if budget is None else budget
    for call in calls[:2]:
        call()
    end = time.perf_counter() + WARM
    for call in cycle(calls):
        call()
        if CUDA:
            torch.cuda.synchronize()
        if time.perf_counter() > end:
            break
    first = _spans(calls, 1)[0]
    repeats = int(min(max(budget * 1e3 / max(first, 1e-3), 3), 200))
    return median(_spans(calls, repeats))


def _spans(calls: Sequence[Work], repeats: int) -> list[float]:
    if not CUDA:
        times = [time.perf_counter()]
        for i in range(repeats):
            calls[i % len(calls)]()
            times.append(time.perf_counter())
        return [(b - a) * 1e3 for a, b in pairwise(times)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    torch.cuda.synchronize()
    marks[0].record()
    for i in range(repeats):
        calls[i % len(calls)]()
        marks[i + 1].record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(marks)]


def graphed(calls: Sequence[Work], budget: float | None = None) -> float:
    """Median milliseconds of a call inside a captured graph of all of them: the device's time alone."""
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
    """MiB at the height of a call above what was held before."""
    if CUDA:
        call()
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - held) / 2**20
    return resident_peak(call)


def resident_peak(call: Work) -> float:
    """MiB of the process at the height of a call above what it held before."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before = _resident("VmRSS")
    call()
    return max(_resident("VmHWM") - before, 0.0)


def _resident(name: str) -> float:
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith(name)).split()[1]) / 1024


def row(work: str, variant: str, dtype: torch.dtype, ms: float, peak_mib: float, **sizes: Any) -> Row:
    """One measurement, printed as it is made."""
    found = {"work": work, "variant": variant, **sizes, "dtype": NAMES[dtype], "ms": ms, "peak_mib": round(peak_mib, 1)}
    shown = " ".join(f"{key}={value}" for key, value in sizes.items())
    print(f"{work:<22} {variant:<28} {NAMES[dtype]:<9} {shown:<44} {ms:10.4f} ms {peak_mib:9.1f} MiB", flush=True)
    return found


def run_parts(
    parts: Mapping[str, Callable[[], Iterable[Row]]], write: Callable[[list[Row], dict[str, str]], None]
) -> int:
    """Measure all parts; the exit status. ``write`` takes the rows so far and, by part, why it failed.

    It is called after every row, so that a part that fails does not take the others along.
    """
    rows: list[Row] = []
    failed: dict[str, str] = {}
    for name, part in parts.items():
        torch.manual_seed(SEED)
        start = time.perf_counter()
        try:
            for found in part():
                rows.append(found)
                write(rows, failed)
        except Exception as error:
            traceback.print_exc()
            failed[name] = f"{type(error).__name__}: {error}"[:300]
            write(rows, failed)
        if CUDA:
            torch.cuda.empty_cache()
        print(f"-- {name}: {time.perf_counter() - start:.0f} s", flush=True)
    for name, why in failed.items():
        print(f"failed         {name}: {why}", file=sys.stderr)
    return 1 if failed else 0

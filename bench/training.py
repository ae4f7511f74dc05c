"""Where the time of a training run goes: steps, validations, checkpoints; and the operations of one step.

    python -m bench.training subsets --recipe paper --source features.npz --epochs 20 --no-deterministic
    python -m bench.training paths --source scenes.npz --epochs 5 --compile --out training.json

takes the options of ``torchcpl train``.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bench.timing import changed
from torchcpl.config import add_arguments, from_args
from torchcpl.files import write_json
from torchcpl.provenance import run_info
from torchcpl.tasks.registry import TASKS
from torchcpl.tasks.runs import read_recipe, recipes
from torchcpl.train import _Loop, fit

PARTS = {"_step": "steps", "_check": "checks", "_validate": "validations", "_save": "checkpoints"}
PROFILED = 10  # steps of which the operations are counted


def main() -> None:
    parser = argparse.ArgumentParser(description="Where the time of a training run goes.")
    tasks = parser.add_subparsers(metavar="TASK", required=True)
    for name, benchmark in TASKS.items():
        sub = tasks.add_parser(name, help=benchmark.summary)
        sub.add_argument("--recipe", choices=tuple(recipes(benchmark.package)))
        sub.add_argument("--out", type=Path)
        add_arguments(sub, benchmark.config)
        sub.set_defaults(benchmark=benchmark)
    options = parser.parse_args()
    kind = options.benchmark.config
    base = read_recipe(kind, options.benchmark.package, options.recipe) if options.recipe else None
    task = options.benchmark.make_task(from_args(kind, options, base))
    found = {**run_info(seeds=[task.config.seed], device=task.device), **spent(task), "step": operations(task)}
    for name, value in found["seconds"].items():
        print(f"{name:12} {value:9.2f} s")
    step = found["step"]
    print(f"peak {found['peak_mib']} MiB; a step: {step['launches']:.0f} launches, {step['us'] / 1e3:.2f} ms of work")
    for row in step["longest"]:
        print(f"  {row['name'][:70]:70} {row['count']:6.1f} × {row['us'] / max(row['count'], 1):9.1f} µs")
    if options.out:
        write_json(options.out, found)


def spent(task: Any) -> dict[str, Any]:
    """Seconds in the parts of a run. The host's, but what a step leaves to the device is waited for in a check."""
    seconds = dict.fromkeys(PARTS.values(), 0.0)

    def timed(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            start = time.perf_counter()
            result = work(*arguments)
            seconds[PARTS[name]] += time.perf_counter() - start
            return result

        return run

    watched = [(_Loop, name, timed(name, getattr(_Loop, name))) for name in PARTS]
    with changed(*watched), tempfile.TemporaryDirectory() as folder:
        state = fit(task, Path(folder) / "run")
    rest = state["seconds"] - sum(seconds.values())
    return {"seconds": {**seconds, "rest": rest, "whole": state["seconds"]}, "peak_mib": state["peak_mib"]}


def operations(task: Any) -> dict[str, Any]:
    """What the device, or without one the host, does in a step: sampling, forward, backward."""
    model = task.build().to(task.device).train()
    if task.config.compile:
        model.compile()
    cuda = task.device.type == "cuda"
    mixed = task.config.precision == "bf16-mixed" or (cuda and task.config.precision == "auto")

    def step(number: int) -> None:
        batch = task.batch(number)
        with torch.autocast(task.device.type, torch.bfloat16, enabled=mixed):
            loss = model(batch)["loss"]
        loss.backward()

    step(0)
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as seen:
        for number in range(PROFILED):
            step(number)
    spent = "self_device_time_total" if cuda else "self_cpu_time_total"
    rows = [
        {"name": event.key, "count": event.count / PROFILED, "us": getattr(event, spent) / PROFILED}
        for event in seen.key_averages()
        if (str(event.device_type) == "DeviceType.CUDA") == cuda
    ]
    longest = sorted(rows, key=lambda row: -row["us"])[:25]
    return {"launches": sum(row["count"] for row in rows), "us": sum(row["us"] for row in rows), "longest": longest}


if __name__ == "__main__":
    main()

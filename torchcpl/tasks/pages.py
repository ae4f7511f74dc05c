"""What the reports and demos of the tasks have in common."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchcpl.config import to_toml
from torchcpl.constraints import Rules
from torchcpl.functional import prefix_logits
from torchcpl.plots import PALETTE, Curve
from torchcpl.report import Panel, save_panels, write_report
from torchcpl.selectors import CPL, Method
from torchcpl.tables import Column, Row, Table
from torchcpl.tasks.benchmark import Benchmark
from torchcpl.tasks.runs import Run, complete, plan, read_recipe

# A method has one colour in the figures of all tasks.
COLOURS = {
    "cpl": PALETTE[2],
    "pointer": PALETTE[0],
    "hungarian": PALETTE[1],
    "bce": PALETTE[4],
    "grid": PALETTE[4],
    "multi_hypothesis": PALETTE[5],
}


class Steps(NamedTuple):
    """What a model that selects step by step picked from one row, and what it thought after 0, 1, …, T picks."""

    picks: list[int]  # (T,)
    probabilities: NDArray[Any]  # (T+1, N+1) of the next choice, the stop last
    added: NDArray[Any]  # (T+1, N) what the picks added to the logits


@torch.inference_mode()
def steps_of(method: Method, encoded: Tensor, mask: Tensor, max_len: int, knob: float | None = None) -> Steps:
    """The selection from encoded candidates (1, N, d), step by step; ValueError for a method that has no steps."""
    if not isinstance(method, CPL):
        raise ValueError(f"model: expected one that selects step by step, got {type(method).__name__}")
    knob = method.knob if knob is None else knob
    pot = method.potentials(encoded, mask)
    selection = method.pick(pot, max_len, knob)
    picks = selection.tolist()[0]
    order = selection.indices[:, : len(picks)]
    bias = knob if method.stop_rule == "argmax" else 0.0
    logits = prefix_logits(pot, order[:, None], Rules(pot, max_len, 0, bias, ()))[0, 0]
    added, _ = pot.interaction.prefix_logits(order)
    return Steps(picks, array(logits.softmax(-1)), array(added[0]))


def array(values: Tensor) -> NDArray[Any]:
    return values.float().cpu().numpy() if values.is_floating_point() else values.cpu().numpy()


def first_runs(runs: Sequence[Run[Any]], names: Mapping[str, str]) -> dict[str, Run[Any]]:
    """The first run of every method that has one, in the order of the tables."""
    found = {method: next((run for run in runs if run.config.method == method), None) for method in names}
    return {method: run for method, run in found.items() if run}


def convergence_curves(runs: Sequence[Run[Any]], metric: str, names: Mapping[str, str]) -> dict[str, Curve]:
    """A metric on what is reported over the epochs, of the pointer and CPL."""
    curves = {}
    for method in ("pointer", "cpl"):
        group = [run.history for run in runs if run.config.method == method]
        if not group:
            continue
        key = f"reported_{metric}" if f"reported_{metric}" in group[0][0]["metrics"] else metric
        epochs = sorted(set.intersection(*({record["epoch"] for record in history} for history in group)))
        values = [[r["metrics"][key] for r in history if r["epoch"] in epochs] for history in group]
        curves[names[method]] = Curve(np.array(epochs), np.array(values))
    return curves


def against_pointer(pointer: Row, cpl: Row, score: Column) -> str:
    """How the pointer compares, in a sentence."""
    said = f"The autoregressive pointer reaches {score.cell(pointer)}"
    if pointer.get("ms") and cpl.get("ms"):  # runs without their weights have no times
        said += f" and takes {pointer['ms'] / cpl['ms']:.1f}× as long to predict"
    return said + "."


def runs_of_a_page(benchmark: Benchmark[Any], paths: Sequence[str | Path]) -> list[Run[Any]]:
    """The runs, of every method no more than one kind: the figures know methods."""
    runs = list(map(benchmark.read, paths))
    kinds = sorted({run.config.kind for run in runs if run.config.method == "cpl"})
    if len(kinds) > 1:
        raise ValueError(f"runs: expected one kind of CPL in a report, got {', '.join(kinds)}")
    return runs


def write_page(
    out: str | Path, runs: Sequence[Run[Any]], results: Table, lead: str, findings: Sequence[str], panels: list[Panel]
) -> Path:
    """Write ``report.html`` and the figures into the folder ``out``; the path of the page."""
    page = Path(out) / "report.html"
    save_panels(panels, page.parent / "figures")
    configs = {str(run.path): to_toml(run.config) for run in runs if run.config.seed == runs[0].config.seed}
    commands = [results.info["command"], f"torchcpl evaluate {runs[-1].path}"]
    write_report(page, results.title, lead, findings, results, panels, configs, commands)
    return page


def demonstrate(
    benchmark: Benchmark[Any],
    package: Path,
    seeds: Sequence[int],
    data: str,
    out: str | Path,
    say: Callable[[str], None],
    report: Callable[[Sequence[Path], Path, Table], Path],
    rules: Sequence[str] = (),
) -> tuple[Table, Path]:
    """Train all methods by the recipe ``demo``, compare them, write ``table.json`` and the report into ``out``."""
    out = Path(out)
    base = read_recipe(benchmark.config, package, "demo")
    # The longest first, so that none is left over at the end.
    planned = plan(base, reversed(benchmark.names), seeds, out)
    times = f" × {len(seeds)} seeds" if len(seeds) > 1 else ""
    say(f"Training {len(benchmark.names)} methods{times} on {data}, in {out}")
    complete(planned, benchmark.make_task, train=True, jobs=min(os.cpu_count() or 1, 6))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # one example at a time is too little work to share
    try:
        say(f"Comparing them on {benchmark.reported} …")
        results = benchmark.table(list(planned), rules)
        results.write(out / "table.json")
        say("Drawing the figures …")
        return results, report(list(planned), out, results)
    finally:
        torch.set_num_threads(threads)

"""Variants of one recipe under one budget: what each reaches, and what a step of it costs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchcpl import plots
from torchcpl.config import TrainConfig, override, read_toml
from torchcpl.files import about, track
from torchcpl.provenance import run_info
from torchcpl.tables import Column, Table, summarise
from torchcpl.tasks import timing
from torchcpl.tasks.benchmark import Benchmark
from torchcpl.tasks.runs import Run, common, complete
from torchcpl.train import device_of

BASE = "base"
CHOSEN = "chosen"  # the key of the score that checkpoints are chosen by
COSTS = (
    Column("decode_ms", "Decode ms", 2, "min"),
    Column("ms", "Whole ms", 2, "min"),
    Column("step_ms", "Training step ms", 1, "min"),
)
Variants = Mapping[str, Mapping[str, Any]]


def read_variants(path: str | Path) -> Variants:
    """Variants from a TOML file: for each a table, under its name, of the options it changes."""
    found = read_toml(path)
    loose = [name for name, value in found.items() if not isinstance(value, dict)]
    if loose or not found:
        got = f"the option {loose[0]} outside of one" if loose else "none"
        raise ValueError(f"{path}: expected a [table] a variant, got {got}")
    return found


def chosen_variants(benchmark: Benchmark[Any], path: Path | None, only: Sequence[str] | None) -> Variants:
    """The variants in a file, or else the task's own; ``only`` those, if given."""
    variants = benchmark.variants if path is None else read_variants(path)
    unknown = [name for name in only or () if name not in variants]
    if unknown:
        raise ValueError(f"only: expected some of {', '.join(variants)}, got {unknown[0]!r}")
    return {name: variants[name] for name in only or variants}


def plan_variants(base: TrainConfig, variants: Variants, seeds: Sequence[int], folder: Path) -> dict[Path, TrainConfig]:
    """The folder and configuration of the run of every variant and seed; ValueErrors name the variant."""
    planned: dict[Path, TrainConfig] = {}
    for name, changes in {BASE: {}, **variants}.items():
        for seed in seeds:
            path = folder / f"{_slug(name)}-s{seed}"
            with about(f"variant {name}"):
                if path in planned:
                    raise ValueError(f"expected a run in a folder of its own, got another in {path.name}")
                planned[path] = override(base, **{**changes, "seed": seed})
    return planned


def ablate(
    benchmark: Benchmark[Any], base: TrainConfig, variants: Variants, seeds: Sequence[int], folder: Path, jobs: int = 1
) -> Table:
    """Train what is missing in ``folder`` and compare the variants with ``base``; the figure is written there too."""
    planned = plan_variants(base, variants, seeds, folder)
    complete(planned, benchmark.make_task, train=True, jobs=jobs)
    runs = {path: benchmark.read(path) for path in planned}
    rows = []
    for name in track([BASE, *(name for name in variants if name != BASE)], "comparing"):
        group = [runs[folder / f"{_slug(name)}-s{seed}"] for seed in seeds]
        changed = ", ".join(f"{key} = {value}" for key, value in variants.get(name, {}).items())
        rows.append({**_row(benchmark, name, group), "changed": changed or "–"})
    metric = benchmark.score(next(iter(runs.values())).state["metric"])
    rule = rows[0]["rule"]
    held_out = replace(metric, name=CHOSEN, title=f"{metric.title}, held out")
    scores = [*([held_out] if rule == benchmark.held_out else []), *map(benchmark.score, benchmark.metrics)]
    columns = (Column("method", "Variant"), *scores, *COSTS)
    device = device_of(base)
    notes = (
        f"Every variant changes the base in what its name says, in nothing else; {base.epochs} epochs.",
        f"Checkpoint chosen on {rule}."
        + (f" Mean ± std over seeds {', '.join(map(str, seeds))}." if seeds[1:] else ""),
        f"ms: one example at a time, {timing.where(device)}; of a training step of {base.batch_size} examples, "
        "validations included.",
    )
    info = run_info(seeds=list(seeds), device=device) | {"config": common([run.config for run in runs.values()])}
    table = Table(f"What counts: {benchmark.subject.lower()}", columns, rows, (), notes, info)
    plots.save(plots.variants(rows, metric, COSTS[0]), folder / "ablation")
    return table


def _row(benchmark: Benchmark[Any], name: str, group: Sequence[Run[Any]]) -> dict[str, Any]:
    """What the runs of a variant reached, by the last rule they allow, and the costs of the first.

    Beside it what the checkpoints were chosen by: variants are to be compared by that before the reported scores.
    """
    rules, found = zip(*(list(benchmark.by_rule(run).items())[-1] for run in group), strict=True)
    task, model, knob = benchmark.restore(group[0])
    steps = group[0].config.epochs * task.steps_per_epoch
    inputs = task.examples(1, timing.TIMED)
    _, cost = next(timing.rows(model, inputs, knob, repeats=3))
    spent = summarise([{"step_ms": run.history[-1]["seconds"] * 1e3 / steps} for run in group])
    costs = {name: cost[name] for name in ("decode_ms", "decode_ms_std", "ms", "ms_std")}
    chosen = summarise([{CHOSEN: run.state["best"]["value"]} for run in group])
    return {**benchmark.row(name, rules[0], found, group), **chosen, **costs, **spent}


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "variant"

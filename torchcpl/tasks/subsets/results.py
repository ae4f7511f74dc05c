"""Results of the subsets task: what a run reached, the table of all methods, and how long a prediction takes."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from torchcpl.config import override
from torchcpl.results import device_name, load_checkpoint, load_weights, read_json, run_info
from torchcpl.selectors import kmeans
from torchcpl.selectors.pointer import PointerHead
from torchcpl.tables import Column, Table, summarise
from torchcpl.tasks.runs import Run, common, read_run
from torchcpl.tasks.subsets.data import Bags, Features, load_source
from torchcpl.tasks.subsets.task import COLUMNS, METHODS, SubsetsConfig, SubsetsModel, SubsetsTask
from torchcpl.train import device_of

REFERENCE = "k-Means (oracle k)"
NAMES = {"bce": "BCE", "hungarian": "Hungarian", "pointer": "Pointer (AR)", "cpl": "CPL"}  # in the tables' order
REPORTED, HELD_OUT = "reported bags", "held-out training bags"
RULES = {"reported": REPORTED, "held-out": HELD_OUT}

SCORES = (
    Column("method", "Method"),
    Column("clu_rec", "CluRec", 3, "max", share=True),
    Column("clu_prec", "CluPrec", 3, "max", share=True),
    Column("clu_f1", "CluF1", 3, "max", share=True),
    Column("card_err", "CardErr", 2, "min"),
    Column("ms", "ms", 2, "min"),
)
SPEED = (
    Column("method", "Method"),
    Column("batch", "Batch", 0),
    Column("encoder_ms", "Encoder ms", 3),
    Column("decode_ms", "Decode ms", 3, "min"),
    Column("ms", "Whole ms", 3, "min"),
    Column("picks", "Picks", 1),
)
# The paper's table 2: CIFAR-100, one A100, batch 1.
PUBLISHED = [
    dict(zip(("method", *COLUMNS, "ms", "ms_std"), row, strict=True))
    for row in (
        (REFERENCE, 0.778, 0.778, 0.778, 0.00, None, None),
        ("BCE", 0.992, 0.099, 0.176, 65.69, 1.50, 0.11),
        ("Hungarian", 0.665, 0.592, 0.617, 1.32, 1.30, 0.08),
        ("Pointer (AR)", 0.850, 0.910, 0.875, 0.66, 15.46, 0.22),
        ("CPL", 0.839, 0.879, 0.853, 0.80, 1.71, 0.07),
    )
]
TIMED_BAGS = 20  # bags a repeat in the tables' ms column


@cache
def _features(source: str, root: str, weights: str, device: str) -> Features:
    return load_source(source, root=root or None, weights=weights or None, device=device)


def make_task(config: SubsetsConfig) -> SubsetsTask:
    """The task of a configuration; runs on the same source share its features."""
    return SubsetsTask(config, _features(config.source, config.root, config.weights, str(device_of(config))))


def restore(run: Run[SubsetsConfig]) -> tuple[SubsetsTask, SubsetsModel]:
    """A run's task and its best model, on the device there is, ready to select."""
    task = make_task(here(run.config))
    model = task.build()
    load_weights(model, load_checkpoint(run.path).weights, str(run.path / "best"))
    return task, model.to(task.device).eval()


def here(config: SubsetsConfig) -> SubsetsConfig:
    """The configuration of a run that may have been trained on another machine."""
    return override(config, device="auto") if config.device == "cuda" else config


def published(config: SubsetsConfig) -> list[dict[str, Any]]:
    """The paper's rows where the images are the paper's."""
    return PUBLISHED if "aquarium_fish" in make_task(here(config)).features.class_names else []


# ------------------------------------------------------------------------------------------------ scores


def by_rule(run: Run[SubsetsConfig]) -> dict[str, dict[str, Any]]:
    """Columns, epoch and knob on the reported bags, under every rule the run's history allows.

    Without ``holdout`` the checkpoint and the knob were chosen on the reported bags themselves, as in the paper. With
    it they were chosen on bags of held-out training images, and the best on the reported bags is known as well unless
    the run tuned its knob.
    """
    records = [{**record["metrics"], "epoch": record["epoch"]} for record in run.history]
    if not run.config.holdout:
        return {REPORTED: _best_epoch(records, "", "")}
    rules = {}
    if "best_clu_f1" in records[0]:
        rules[REPORTED] = _best_epoch(records, "best_", "best_")
    rules[HELD_OUT] = _best_epoch(records, "", "reported_")
    return rules


def _best_epoch(records: Sequence[dict[str, Any]], chosen: str, shown: str) -> dict[str, Any]:
    """The columns with the prefix ``shown`` at the epoch with the largest CluF1 of the prefix ``chosen``."""
    best = max(records, key=lambda record: record[f"{chosen}clu_f1"])
    return {name: best[f"{shown}{name}"] for name in COLUMNS} | {"epoch": best["epoch"], "knob": best[f"{chosen}knob"]}


def table(paths: Sequence[str | Path], rules: Sequence[str] = tuple(RULES)) -> Table:
    """All methods among the runs, and k-Means: mean ± std over seeds, a section a rule, the published rows beside."""
    runs = [read_run(SubsetsConfig, path) for path in paths]
    if not runs:
        raise ValueError("runs: expected at least one, got none")
    unknown = [rule for rule in rules if rule not in RULES]
    if unknown:
        raise ValueError(f"rules: expected some of {', '.join(RULES)}, got {unknown[0]!r}")
    shared = common([run.config for run in runs])
    missing = {"source", "validation_bags", "max_items"} - shared.keys()
    if missing:
        raise ValueError(f"runs: expected the same {', '.join(sorted(missing))} in all, they differ")
    groups = {method: [run for run in runs if run.config.method == method] for method in NAMES}
    for method, group in groups.items():
        seeds = [run.config.seed for run in group]
        rest = common([run.config for run in group]).keys() if group else set()
        if len(set(seeds)) < len(seeds) or (group and len(rest) < len(runs[0].config.__dict__) - 1):
            raise ValueError(f"runs of {method}: expected them to differ in their seeds and nothing else")
    timing = {method: _quick_ms(group[0]) for method, group in groups.items() if group}
    rows = [_reference_row(runs, sorted({run.config.seed for run in runs}))]
    for rule in (RULES[name] for name in rules):
        for method, group in groups.items():
            found = [scores[rule] for scores in map(by_rule, group) if rule in scores]
            if found:
                rows.append(_row(NAMES[method], rule, found, group) | timing[method])
    if len(rows) == 1:
        raise ValueError(f"rules: the runs allow {', '.join(by_rule(runs[0]))}, got {', '.join(rules)}")
    return Table(
        f"Representative subsets, {_source_name(runs[0].config)}",
        SCORES,
        rows,
        published(runs[0].config),
        _notes(runs, rows),
        _info(runs) | {"config": shared},
    )


def evaluate(path: str | Path) -> Table:
    """One run at its best checkpoint and the knob chosen with it, on the reported bags."""
    run = read_run(SubsetsConfig, path)
    task, model = restore(run)
    knob = run.state["best"]["metrics"]["knob"]
    scores = task.evaluate(model, task.reported, (knob,))[knob]
    epoch = run.state["best"]["epoch"]
    rule = HELD_OUT if run.config.holdout else REPORTED
    row = _row(NAMES[run.config.method], rule, [scores | {"epoch": epoch, "knob": knob}], [run]) | _quick_ms(run)
    theirs = [line for line in published(run.config) if line["method"] == row["method"]]
    notes = (f"epoch {epoch} and knob {knob:g}, chosen on {rule}; {len(task.reported)} reported bags",)
    return Table(f"{run.path}, {_source_name(run.config)}", SCORES, [row], theirs, notes, _info([run]))


def _row(name: str, rule: str, found: Sequence[dict[str, Any]], runs: Sequence[Run[SubsetsConfig]]) -> dict[str, Any]:
    columns = summarise([{name: record[name] for name in COLUMNS} for record in found])
    peaks = [run.state["peak_mib"] for run in runs if run.state["peak_mib"]]
    return {
        "method": name,
        "rule": rule,
        **columns,
        "knob": [record["knob"] for record in found],
        "epoch": [record["epoch"] for record in found],
        "epochs": runs[0].config.epochs,
        "seconds": statistics.fmean(run.history[-1]["seconds"] for run in runs),
        "peak_mib": max(peaks, default=None),
        "seeds": [run.config.seed for run in runs],
    }


def _reference_row(runs: Sequence[Run[SubsetsConfig]], seeds: Sequence[int]) -> dict[str, Any]:
    """k-Means on the reported bags, which it has in common with every run."""
    task = make_task(here(runs[0].config))
    columns = summarise([task.evaluate_kmeans(task.reported, seed) for seed in seeds])
    bags = list(itertools.islice(task.reported.split(1), TIMED_BAGS))
    mean, deviation = clock([lambda bag=bag: _cluster(bag) for bag in bags])  # type: ignore[misc]
    return {"method": REFERENCE, "rule": None, "reference": True, **columns, "ms": mean, "ms_std": deviation}


def _cluster(bags: Bags) -> Any:
    return kmeans(bags.features, bags.mask, (bags.target >= 0).sum(-1))


def _info(runs: Sequence[Run[SubsetsConfig]]) -> dict[str, Any]:
    trained_on = ", ".join(sorted({read_json(run.path / "info.json")["device"] for run in runs}))
    info = run_info(seeds=sorted({run.config.seed for run in runs}), device=device_of(here(runs[0].config)))
    return info | {"trained_on": trained_on}


def _source_name(config: SubsetsConfig) -> str:
    path = Path(config.source)
    return path.parent.name + "/" + path.name if path.suffix == ".npz" else config.source


def _notes(runs: Sequence[Run[SubsetsConfig]], rows: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    seeds = sorted({run.config.seed for run in runs})
    rules = list(dict.fromkeys(row["rule"] for row in rows if row["rule"]))
    bags = runs[0].config.validation_bags
    notes = [f"{bags} bags of test images. Trained on one random member of each class, never on the classes."]
    if len(seeds) > 1:
        notes.append(f"Mean ± std over seeds {', '.join(map(str, seeds))}.")
    if len(rules) == 1:
        notes.append(f"Checkpoint and threshold chosen on {rules[0]}.")
    notes.append(f"ms: one bag at a time, {device_name(device_of(here(runs[0].config)))}.")
    return tuple(notes)


# ------------------------------------------------------------------------------------------------- speed


def clock(calls: Sequence[Callable[[], Any]], repeats: int = 10, share: int = 1) -> tuple[float, float]:
    """Milliseconds of a call divided by ``share``, after a warm round: mean and deviation over ``repeats`` rounds.

    Every call is waited for, as someone would who needs its answer.
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
    timed = rounds[1:]
    return statistics.fmean(timed), statistics.stdev(timed) if repeats > 1 else 0.0


@torch.inference_mode()
def _quick_ms(run: Run[SubsetsConfig]) -> dict[str, float | None]:
    """The tables' column: whole predictions, a bag at a time; None for an archived run without its weights."""
    if not (run.path / "best" / "model.safetensors").is_file():
        return {"ms": None}
    task, model = restore(run)
    knob = run.state["best"]["metrics"]["knob"]
    bags = list(itertools.islice(task.reported.split(1), TIMED_BAGS))
    mean, deviation = clock([lambda bag=bag: model.select(bag, knob) for bag in bags])  # type: ignore[misc]
    return {"ms": mean, "ms_std": deviation}


def bench(
    paths: Sequence[str | Path] = (),
    configs: Sequence[SubsetsConfig] = (),
    *,
    batches: Sequence[int] = (1, 256),
    repeats: int = 10,
    examples: int = 100,
    precision: str = "32-true",
) -> Table:
    """Milliseconds an example of encoder, decoding and the whole, for runs and for untrained models of ``configs``.

    A round predicts ``examples`` bags one at a time, or one larger batch. The pointer is timed with its cache and, as
    in the paper, recomputing everything at each step.
    """
    models = []
    for run in (read_run(SubsetsConfig, path) for path in paths):
        models.append((*restore(run), run.state["best"]["metrics"]["knob"]))
    for config in configs:
        torch.manual_seed(config.seed)
        task = make_task(config)
        models.append((task, task.build().to(task.device).eval(), None))
    if not models:
        raise ValueError("expected runs, or methods to time untrained, got neither")
    rows: list[dict[str, Any]] = []
    for batch in batches:
        rows += [
            row
            for task, model, knob in models
            for row in _bench(task, model, knob, batch, repeats, examples, precision)
        ]
    device, config = models[0][0].device, models[0][0].config
    notes = (
        f"ms an example: mean ± std of {repeats}; {config.max_items} candidates; {precision}, {device_name(device)}.",
        "Picks: mean number, which is the number of decoding steps." + ("" if paths else " Untrained weights."),
    )
    info = run_info(seeds=sorted({task.config.seed for task, _, _ in models}), device=device)
    return Table(
        "Speed of a prediction, representative subsets", SPEED, rows, (), notes, info | {"precision": precision}
    )


@torch.inference_mode()
def _bench(
    task: SubsetsTask, model: SubsetsModel, knob: float | None, batch: int, repeats: int, examples: int, precision: str
) -> list[dict[str, Any]]:
    enough = examples if batch == 1 else batch
    if enough > len(task.reported):
        raise ValueError(f"expected at most {len(task.reported)} bags, the run's validation_bags, got {enough}")
    parts = list(itertools.islice(task.reported.split(batch), examples if batch == 1 else 1))
    method, rows = model.method, []
    head = getattr(method, "head", None)
    forms = {"": True, ", recomputing": False} if isinstance(head, PointerHead) else {"": None}
    mixed = precision == "bf16-mixed"
    with torch.autocast(task.device.type, torch.bfloat16, enabled=mixed):
        encoded = [model.encode(part) for part in parts]
        for suffix, cached in forms.items():
            if isinstance(head, PointerHead) and cached is not None:
                head.cache = cached

            def encode(i: int) -> Any:
                return model.encode(parts[i])

            def decode(i: int) -> Any:
                return method.select(encoded[i], parts[i].mask, model.max_len, knob)

            def whole(i: int) -> Any:
                return model.select(parts[i], knob)

            picks = statistics.fmean(float(decode(i).lengths.float().mean()) for i in range(len(parts)))
            row = {"method": NAMES[task.config.method] + suffix, "batch": batch, "picks": picks}
            for name, work in (("encoder_ms", encode), ("decode_ms", decode), ("ms", whole)):
                calls = [lambda i=i, work=work: work(i) for i in range(len(parts))]
                row[name], row[f"{name}_std"] = clock(calls, repeats, batch)
            rows.append(row)
    return rows


__all__ = [
    "METHODS", "NAMES", "PUBLISHED", "RULES", "SCORES", "SPEED", "bench", "by_rule", "clock", "evaluate", "make_task",
    "published", "restore", "table",
]  # fmt: skip

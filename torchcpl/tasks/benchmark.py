"""The results of a task: what a run reached, the table of all methods, and how long a prediction takes.

A task describes itself by a `Benchmark`. Its model has ``encode(inputs)``, ``decode(encoded, inputs, knob)`` and
``select(inputs, knob)``, whose answers have ``lengths``; its task has ``examples(batch, limit)``, a list of inputs, and
``report(model, knob)``, the metrics on what is reported.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from torchcpl.checks import check_choice, check_count
from torchcpl.config import TrainConfig, override
from torchcpl.inference import compile_for_inference
from torchcpl.results import device_name, load_checkpoint, load_weights, read_json, run_info
from torchcpl.selectors import PointerHead
from torchcpl.tables import Column, Row, Table, summarise
from torchcpl.tasks.runs import Run, common, read_run
from torchcpl.train import device_of

C = TypeVar("C", bound=TrainConfig)
SPEED = (
    Column("method", "Method"),
    Column("batch", "Batch", 0),
    Column("encoder_ms", "Encoder ms", 3),
    Column("decode_ms", "Decode ms", 3, "min"),
    Column("ms", "Whole ms", 3, "min"),
    Column("picks", "Picks", 1),
)
ARITHMETIC = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
SAME = Column("same", "Same picks", 3, share=True)
TIMED = 20  # examples a repeat in the tables' ms column


def here(config: C) -> C:
    """The configuration of a run that may have been trained on another machine."""
    return override(config, device="auto") if config.device == "cuda" else config


@dataclass(frozen=True)
class Benchmark(Generic[C]):
    """A task's results.

    Attributes:
        subject: what is predicted, the beginning of every title.
        config: the class of its configurations, each with a ``method``.
        make_task: the task of a configuration.
        names: what the tables call the methods, in their order.
        columns: of the table; those that are metrics are read from the runs.
        source: the data of a configuration, in words.
        reported: what is reported on, in words; ``held_out``: what is set aside to choose on.
        published: the paper's rows where the data are comparable.
        alike: options in which all runs of a table must agree.
        reference: further rows, of what is not trained.
        notes: said below the table.
    """

    subject: str
    config: type[C]
    make_task: Callable[[C], Any]
    names: dict[str, str]
    columns: tuple[Column, ...]
    metrics: tuple[str, ...]
    source: Callable[[C], str]
    reported: str
    held_out: str
    published: Callable[[C], list[dict[str, Any]]]
    alike: tuple[str, ...]
    reference: Callable[[Sequence[Run[C]]], list[dict[str, Any]]]
    notes: Callable[[C], list[str]]

    @property
    def rules(self) -> dict[str, str]:
        """On what a checkpoint may be chosen."""
        return {"reported": self.reported, "held-out": self.held_out}

    def read(self, path: str | Path) -> Run[C]:
        return read_run(self.config, path)

    def restore(self, run: Run[C]) -> tuple[Any, Any]:
        """A run's task and its best model, on the device there is, ready to select."""
        task = self.make_task(here(run.config))
        model = task.build(pretrained=False)  # the file it started from may be gone
        load_weights(model, load_checkpoint(run.path).weights, str(run.path / "best"))
        return task, model.to(task.device).eval()

    # -------------------------------------------------------------------------------------------- scores

    def by_rule(self, run: Run[C]) -> dict[str, dict[str, Any]]:
        """Columns, epoch and knob on what is reported, under every rule the run's history allows.

        Of a run that chose on what it reports, as in the paper, there is one. With something set aside both are known,
        unless the run tuned its knob: then its best knob on what is reported is not.
        """
        records = [{"knob": None, **record["metrics"], "epoch": record["epoch"]} for record in run.history]
        metric = run.state["metric"]
        if f"reported_{metric}" not in records[0]:
            return {self.reported: self._best(records, metric, "", "")}
        rules = {}
        if f"best_{metric}" in records[0]:
            rules[self.reported] = self._best(records, metric, "best_", "best_")
        elif records[0]["knob"] is None:
            rules[self.reported] = self._best(records, metric, "reported_", "reported_")
        rules[self.held_out] = self._best(records, metric, "", "reported_")
        return rules

    def _best(self, records: Sequence[Row], metric: str, chosen: str, shown: str) -> dict[str, Any]:
        """The metrics with the prefix ``shown`` at the epoch that is best by those with the prefix ``chosen``."""
        column = next(column for column in self.columns if column.name == metric)
        sign = 1 if column.best == "max" else -1
        best = max(records, key=lambda record: sign * record[chosen + metric])
        found = {name: best[shown + name] for name in self.metrics}
        return found | {"epoch": best["epoch"], "knob": best.get(f"{chosen}knob", best["knob"])}

    def table(self, paths: Sequence[str | Path], rules: Sequence[str] = ()) -> Table:
        """All methods among the runs: mean ± std over seeds, a section a rule, the published rows beside."""
        runs = [self.read(path) for path in paths]
        if not runs:
            raise ValueError("runs: expected at least one, got none")
        unknown = [rule for rule in rules if rule not in self.rules]
        if unknown:
            raise ValueError(f"rules: expected some of {', '.join(self.rules)}, got {unknown[0]!r}")
        shared = common([run.config for run in runs])
        missing = [name for name in self.alike if name not in shared]
        if missing:
            raise ValueError(f"runs: expected the same {', '.join(missing)} in all, they differ")
        unfinished = [run for run in runs if run.history[-1]["epoch"] < run.config.epochs]
        if unfinished:
            path, at, of = unfinished[0].path, unfinished[0].history[-1]["epoch"], unfinished[0].config.epochs
            raise ValueError(f"{path} is unfinished, at epoch {at} of {of}: expected runs to compare to be complete")
        groups = {
            label: [run for run in runs if _method(run) == method and _kind(run) in kinds]
            for method in self.names
            for label, kinds in self._kinds(method, runs).items()
        }
        for label, group in groups.items():
            seeds = [run.config.seed for run in group]
            rest = common([run.config for run in group])
            if len(set(seeds)) < len(seeds) or len(rest) < len(fields(self.config)) - 1:
                raise ValueError(f"runs of {label}: expected them to differ in their seeds and nothing else")
        timing = {label: self._quick_ms(group[0]) for label, group in groups.items()}
        rows = self.reference(runs)
        count = len(rows)
        for rule in (self.rules[name] for name in rules or self.rules):
            for label, group in groups.items():
                found = [scores[rule] for scores in map(self.by_rule, group) if rule in scores]
                if found:
                    rows.append(self._row(label, rule, found, group) | timing[label])
        if len(rows) == count:
            known = [name for name, rule in self.rules.items() if rule in self.by_rule(runs[0])]
            raise ValueError(f"rules: the runs allow {', '.join(known)}, got {', '.join(rules)}")
        config = runs[0].config
        notes = self._notes(runs, rows)
        info = self._info(runs) | {"config": shared}
        title = f"{self.subject}, {self.source(config)}"
        return Table(title, self.columns, rows, self.published(config), notes, info)

    def _kinds(self, method: str, runs: Sequence[Run[C]]) -> dict[str, tuple[str, ...]]:
        """The rows of a method and the kinds of interaction in each; where there are several, every one has its own.

        The paper's is then named as such, and one other has the method's name for itself.
        """
        name, kinds = self.names[method], sorted({_kind(run) for run in runs if _method(run) == method})
        if len(kinds) < 2 or method != "cpl":
            return {name: tuple(kinds)} if kinds else {}
        alone = len(kinds) == 2 and "lowrank" in kinds
        return {name if alone and kind != "lowrank" else f"{name} ({kind})": (kind,) for kind in kinds}

    def evaluate(self, path: str | Path) -> Table:
        """One run at its best checkpoint, and the knob chosen with it."""
        run = self.read(path)
        task, model = self.restore(run)
        best = run.state["best"]
        knob, epoch = best["metrics"].get("knob"), best["epoch"]
        rule = self.held_out if task.chosen_on is not task.reported else self.reported
        scores = task.report(model, knob).items()
        found = {name: value if math.isfinite(value) else None for name, value in scores}  # as the history has it
        found |= {"epoch": epoch, "knob": knob}
        row = self._row(self.names[_method(run)], rule, [found], [run]) | self._quick_ms(run)
        theirs = [line for line in self.published(run.config) if line["method"] == row["method"]]
        chosen = f"epoch {epoch}" + ("" if knob is None else f" and knob {knob:g}")
        notes = (f"{chosen}, chosen on {rule}; {len(task.reported)} {self.reported}",)
        title = f"{run.path}, {self.source(run.config)}"
        return Table(title, self.columns, [row], theirs, notes, self._info([run]))

    def _row(self, label: str, rule: str, found: Sequence[Row], runs: Sequence[Run[C]]) -> dict[str, Any]:
        peaks = [run.state["peak_mib"] for run in runs if run.state["peak_mib"]]
        return {
            "method": label,
            "rule": rule,
            **summarise([{name: record[name] for name in self.metrics} for record in found]),
            "knob": [record["knob"] for record in found],
            "epoch": [record["epoch"] for record in found],
            "epochs": runs[0].config.epochs,
            "seconds": statistics.fmean(run.history[-1]["seconds"] for run in runs),
            "peak_mib": max(peaks, default=None),
            "seeds": [run.config.seed for run in runs],
        }

    def _info(self, runs: Sequence[Run[C]]) -> dict[str, Any]:
        trained_on = ", ".join(sorted({read_json(run.path / "info.json")["device"] for run in runs}))
        info = run_info(seeds=sorted({run.config.seed for run in runs}), device=device_of(here(runs[0].config)))
        return info | {"trained_on": trained_on}

    def _notes(self, runs: Sequence[Run[C]], rows: Sequence[Row]) -> tuple[str, ...]:
        seeds = sorted({run.config.seed for run in runs})
        rules = list(dict.fromkeys(row["rule"] for row in rows if row["rule"]))
        notes = self.notes(runs[0].config)
        if len(seeds) > 1:
            notes.append(f"Mean ± std over seeds {', '.join(map(str, seeds))}.")
        if len(rules) == 1:
            notes.append(
                f"Checkpoint{' and threshold' if rows[-1]['knob'][0] is not None else ''} chosen on {rules[0]}."
            )
        notes.append(f"ms: one example at a time, {_where(device_of(here(runs[0].config)))}.")
        return tuple(notes)

    # --------------------------------------------------------------------------------------------- speed

    def _quick_ms(self, run: Run[C]) -> dict[str, float | None]:
        """The tables' column: whole predictions, one at a time; None for an archived run without its weights."""
        if not (run.path / "best" / "model.safetensors").is_file():
            return {"ms": None}
        task, model = self.restore(run)
        knob = run.state["best"]["metrics"].get("knob")
        mean, deviation = clock(ready(partial(model.select, knob=knob), task.examples(1, TIMED)))
        return {"ms": mean, "ms_std": deviation}

    def bench(
        self,
        paths: Sequence[str | Path] = (),
        configs: Sequence[C] = (),
        *,
        batches: Sequence[int] = (1, 256),
        repeats: int = 10,
        examples: int = 100,
        precision: str = "32-true",
    ) -> Table:
        """Milliseconds an example of encoder, decoding and the whole, for runs and for untrained models of ``configs``.

        A round predicts ``examples`` inputs one at a time, or one larger batch. The pointer is timed with its cache
        and, as in the paper, recomputing everything at each step. With a ``precision`` below float32, the share of what
        is reported on whose selection is the same as in float32.
        """
        check_choice("precision", precision, tuple(ARITHMETIC))
        for name, count in (*(("batches", batch) for batch in batches), ("repeats", repeats), ("examples", examples)):
            check_count(name, count, 1)
        models = []
        for run in map(self.read, paths):
            models.append((*self.restore(run), run.state["best"]["metrics"].get("knob")))
        for config in configs:
            torch.manual_seed(config.seed)
            task = self.make_task(config)
            models.append((task, task.build().to(task.device).eval(), None))
        if not models:
            raise ValueError("expected runs, or methods to time untrained, got neither")
        rows: list[dict[str, Any]] = []
        for batch in batches:  # refused before anything is timed
            models[0][0].examples(batch, 1)
        rounded = precision != "32-true"
        shares = [_same(*model, precision) if rounded else None for model in models]
        for batch in batches:
            for (task, model, knob), share in zip(models, shares, strict=True):
                inputs = task.examples(batch, examples if batch == 1 else 1)
                name = self.names[task.config.method]
                for form, row in _timed(model, inputs, knob, repeats, precision):
                    same = {"same": None if form else share} if rounded else {}  # measured in the first form
                    rows.append({"method": name + form, **row, **same})
        device = models[0][0].device
        order = "" if models[0][0].ordered else ", in any order"
        notes = (
            f"ms an example: mean ± std of {repeats}; {precision}, {_where(device)}.",
            "Picks: mean number; of CPL and the pointer, the decoding steps."
            + ("" if paths else " Untrained weights."),
            *([f"Same picks: the share of selections that are those of float32{order}."] if rounded else []),
        )
        columns = (*SPEED, SAME) if rounded else SPEED
        info = run_info(seeds=sorted({task.config.seed for task, _, _ in models}), device=device)
        return Table(
            f"Speed of a prediction, {self.subject}", columns, rows, (), notes, info | {"precision": precision}
        )


def _where(device: torch.device) -> str:
    """Where times were taken."""
    return device_name(device) + (", as one CUDA graph" if device.type == "cuda" else "")


def _method(run: Run[Any]) -> str:
    return str(run.config.method)


def _kind(run: Run[Any]) -> str:
    return str(run.config.kind)


class _Decoding(nn.Module):
    """What comes after the encoder: encoded items and input, as a pair, to the prediction."""

    def __init__(self, model: Any, knob: float | None) -> None:
        super().__init__()
        self.model, self.knob = model, knob

    def forward(self, pair: tuple[Tensor, Any]) -> Any:
        return self.model.decode(*pair, self.knob)


def _timed(
    model: Any, inputs: Sequence[Any], knob: float | None, repeats: int, precision: str
) -> list[tuple[str, dict[str, Any]]]:
    """Times of a model on the inputs, a row for each of its forms."""
    batch, rows = len(inputs[0]), []
    pointers = [part for part in model.modules() if isinstance(part, PointerHead)]
    for form, cached in {"": True, ", recomputing": False}.items() if pointers else [("", True)]:
        for pointer in pointers:
            pointer.cache = cached
        encode, pairs = ready(model.encode, inputs, precision), []
        for call, one in zip(encode, inputs, strict=True):
            pairs.append((call(), one))
        decode = ready(_Decoding(model, knob).eval(), pairs, precision)
        whole = ready(partial(model.select, knob=knob), inputs, precision)
        row: dict[str, Any] = {"batch": batch}
        row["picks"] = statistics.fmean(float(call().lengths.float().mean()) for call in decode)
        for name, calls in {"encoder_ms": encode, "decode_ms": decode, "ms": whole}.items():
            row[name], row[f"{name}_std"] = clock(calls, repeats, batch)
        rows.append((form, row))
    return rows


def _same(task: Any, model: Any, knob: float | None, precision: str) -> float:
    """The share of what is reported on whose selection is the same as in float32."""
    count = len(task.reported)
    size = max(divisor for divisor in range(1, min(count, 100) + 1) if count % divisor == 0)  # so that none is left out
    selections = []
    for arithmetic in ("32-true", precision):
        calls = ready(partial(model.select, knob=knob), task.examples(size, count), arithmetic)
        answers = [call() for call in calls]
        picks = [picks for answer in answers for picks in getattr(answer, "selection", answer).tolist()]
        selections.append(picks if task.ordered else list(map(set, picks)))
    return statistics.fmean(one == other for one, other in zip(*selections, strict=True))


def ready(work: Callable[[Any], Any], inputs: Sequence[Any], precision: str = "32-true") -> list[Callable[[], Any]]:
    """Calls of ``work`` on each input; on CUDA they replay one captured graph."""
    run = compile_for_inference(work, inputs[0], dtype=ARITHMETIC[precision])
    return [partial(run, one) for one in inputs]


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

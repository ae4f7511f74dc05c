"""The entry point of a task: evaluation of runs, tables, timings, reports and the demo.

A task is a subclass of `Benchmark`, listed in `torchcpl.tasks.registry`.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from torchcpl import plots
from torchcpl.checkpoints import load_checkpoint, load_weights, read_info
from torchcpl.checks import check_count
from torchcpl.config import TrainConfig, override, to_toml
from torchcpl.explore import Explorer
from torchcpl.provenance import run_info
from torchcpl.report import Panel, save_panels, write_report
from torchcpl.tables import Column, Row, Table, summarise
from torchcpl.tasks import timing
from torchcpl.tasks.base import BenchmarkTask
from torchcpl.tasks.runs import Run, common, complete, here, plan, read_recipe, read_run
from torchcpl.train import device_of

C = TypeVar("C", bound=TrainConfig)


class Restored(NamedTuple):
    """A run's task and its best model, on the available device, with the chosen knob."""

    task: Any  # a `BenchmarkTask`
    model: Any  # its `SelectionModel`
    knob: float | None


class Benchmark(ABC, Generic[C]):
    """The properties of a task, and everything done with its runs."""

    summary: ClassVar[str]  # the task in a line, for help texts
    subject: ClassVar[str]  # what is predicted, used in titles
    config: type[C]  # the class of its configurations, each with a ``method`` and a ``kind``
    names: ClassVar[Mapping[str, str]]  # the methods' names in tables, in order
    columns: ClassVar[tuple[Column, ...]]  # of the table: ``method``, the metrics, ``ms``
    reported: ClassVar[str]  # description of the reported examples
    held_out: ClassVar[str]  # description of those that the checkpoint is chosen on
    alike: ClassVar[tuple[str, ...]]  # options that must be equal in all runs of a table
    lead: ClassVar[str]  # the first paragraph of the report
    answer_columns: ClassVar[tuple[Column, ...]] = ()  # of the table of several answers, where the task has one
    demo_data: ClassVar[str]  # description of the data of the recipe ``demo``
    demo_seeds: ClassVar[tuple[int, ...]] = (0,)
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # what an ablation compares: the options that differ

    # ----------------------------------------------------------------------------- what a task must say

    @abstractmethod
    def make_task(self, config: C) -> BenchmarkTask:
        """The task of a configuration; configurations on the same source share its data."""

    @abstractmethod
    def source(self, config: C) -> str:
        """Description of a configuration's data."""

    def suffix(self, config: C) -> str:
        """What follows the method and its kind in the name of a row."""
        return ""

    def published(self, config: C) -> Sequence[Row]:
        """The paper's rows where the data are comparable."""
        return []

    def reference(self, runs: Sequence[Run[C]]) -> list[dict[str, Any]]:
        """Further rows of the table: methods without training."""
        return []

    def notes(self, config: C) -> list[str]:
        """The notes below the table."""
        return []

    def remarks(self, scores: Row) -> list[str]:
        """Sentences below the row of a single run, on scores that have no column."""
        return []

    def panels(self, runs: Sequence[Run[C]], table: Table) -> list[Panel]:
        """The task's figures of the report, in addition to convergence."""
        return []

    def explorer(self, run: Run[C]) -> Explorer | None:
        """One reported example of a CPL run as a page to explore, where the task has such a page."""
        return None

    def findings(self, table: Table) -> list[str]:
        """The findings of the table, as sentences."""
        return []

    # ----------------------------------------------------------------------------------------- new data

    column: ClassVar[str] = "features"  # key of the examples in a file of several arrays
    rank: ClassVar[int] = 2  # dimensions of an example

    def build(self, config: C, weights: Mapping[str, Tensor]) -> Any:
        """An untrained `SelectionModel` for the weights; by default built with the task's data."""
        return self.make_task(config).build()

    def read_examples(self, model: Any, path: Path, column: str, limit: int | None) -> list[Tensor]:
        """The examples in a file for ``model``, without labels: ``limit`` at most, of the array ``column``."""
        raise ValueError(f"{path}: expected a run whose task reads new examples, got one of {self.subject.lower()}")

    def collate(self, model: Any, examples: Sequence[Tensor]) -> Any:
        """Examples as the inputs of ``model.select``, on its device; ValueError names one that does not fit."""
        raise ValueError(f"x: expected a run whose task takes new examples, got one of {self.subject.lower()}")

    def page(self, model: Any, inputs: Any, knob: float | None) -> Explorer | None:
        """One example, collated, as a page to explore, where the task has such a page."""
        return None

    def answers(self, prediction: Any) -> dict[str, Tensor]:
        """The outputs of a prediction, one row per example."""
        names = ("indices", "lengths", "log_prob", "step_log_prob")
        return {name: value for name in names if (value := getattr(prediction, name)) is not None}

    def elsewhere(self, config: C, source: str) -> C:
        """The configuration of a run with other data to report on, of which nothing is held out."""
        held_out = {"held_out": 0.0} if hasattr(config, "held_out") else {}
        return override(config, source=source, **held_out)

    # --------------------------------------------------------------------------------------------- runs

    @property
    def package(self) -> Path:
        """The task's folder, with its recipes."""
        return Path(str(sys.modules[type(self).__module__].__file__)).parent

    @property
    def metrics(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns if column.name not in ("method", "ms"))

    @property
    def rules(self) -> dict[str, str]:
        """The data that a checkpoint may be chosen on."""
        return {"reported": self.reported, "held-out": self.held_out}

    def read(self, path: str | Path) -> Run[C]:
        return read_run(self.config, path, self.metrics)

    def load(self, path: Path, config: C) -> tuple[Any, float | None]:
        """The best model of the run at ``path``, with the chosen knob; ``config`` is its own, for this machine."""
        _, weights, state = load_checkpoint(path)
        model = self.build(config, weights)  # without the pretrained file it started from, which may be gone
        load_weights(model, weights, str(path / "best"))
        knob = state["best"]["metrics"].get("knob") if state["best"] else None
        return model.to(device_of(config)).eval(), knob

    def restore(self, run: Run[C]) -> Restored:
        config = here(run.config)
        return Restored(self.make_task(config), *self.load(run.path, config))

    def first_runs(self, runs: Sequence[Run[C]]) -> dict[str, Run[C]]:
        """The first run of every method that has one, in the order of the tables."""
        first = {run.method: run for run in reversed(runs)}
        return {method: first[method] for method in self.names if method in first}

    # ------------------------------------------------------------------------------------------- scores

    def by_rule(self, run: Run[C]) -> dict[str, dict[str, Any]]:
        """Metrics, epoch and knob on the reported examples, for every selection rule the history allows.

        A run whose checkpoint was chosen on the reported examples, as in the paper, has one rule. With held-out
        examples there are both, unless the run tuned its knob, whose best value on the reported ones is unknown.
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
        """The metrics prefixed ``shown`` at the best epoch by those prefixed ``chosen``."""
        sign = 1 if self.score(metric).best == "max" else -1
        finite = [record for record in records if record[chosen + metric] is not None] or records[:1]
        best = max(finite, key=lambda record: sign * (record[chosen + metric] or 0.0))
        found = {name: best[shown + name] for name in self.metrics}
        return found | {"epoch": best["epoch"], "knob": best.get(f"{chosen}knob", best["knob"])}

    def score(self, name: str) -> Column:
        """The column of a metric."""
        return next(column for column in self.columns if column.name == name)

    def table(self, paths: Sequence[str | Path], rules: Sequence[str] = ()) -> Table:
        """All methods among the runs: mean ± std over seeds, one section per rule, with the published rows."""
        runs = [self.read(path) for path in paths]
        groups = self._groups(runs)
        times = {label: self._ms(group[0]) for label, group in groups.items()}
        scores = {label: list(map(self.by_rule, group)) for label, group in groups.items()}
        rows: list[dict[str, Any]] = []
        for rule in (self.rules[name] for name in rules or self.rules):
            for label, group in groups.items():
                found = [each[rule] for each in scores[label] if rule in each]
                if found:
                    rows.append(self.row(label, rule, found, group) | times[label])
        if not rows:
            known = [name for name, rule in self.rules.items() if rule in next(iter(scores.values()))[0]]
            raise ValueError(f"rules: the runs allow {', '.join(known)}, got {', '.join(rules)}")
        config = runs[0].config
        rows = self.reference(runs) + rows
        title = f"{self.subject}, {self.source(config)}"
        return Table(title, self.columns, rows, self.published(config), self._notes(runs, rows), self._info(runs))

    def answers_table(self, paths: Sequence[str | Path], count: int) -> Table:
        """Several answers with probabilities: how well up to ``count`` of each run stand for all that is right."""
        raise ValueError(f"answers: expected a task with several answers, got {self.subject.lower()}")

    def _groups(self, runs: Sequence[Run[C]]) -> dict[str, list[Run[C]]]:
        """The runs behind each row of the table; ValueError where they cannot be compared."""
        if not runs:
            raise ValueError("runs: expected at least one, got none")
        shared = common([run.config for run in runs])
        missing = [name for name in self.alike if name not in shared]
        if missing:
            raise ValueError(f"runs: expected the same {', '.join(missing)} in all, they differ")
        for run in runs:
            at, of = run.history[-1]["epoch"], run.config.epochs
            if at < of:
                raise ValueError(f"{run.path} is unfinished, at epoch {at} of {of}: expected finished runs to compare")
        kinds = {run.kind for run in runs if run.method == "cpl"}
        methods, groups = list(self.names), dict[str, list[Run[C]]]()
        for run in sorted(runs, key=lambda run: (methods.index(run.method), run.kind)):
            groups.setdefault(self._label(run, kinds), []).append(run)
        for label, group in groups.items():
            seeds = [run.config.seed for run in group]
            rest = common([run.config for run in group])
            if len(set(seeds)) < len(seeds) or len(rest) < len(fields(self.config)) - 1:
                raise ValueError(f"runs of {label}: expected them to differ in their seeds and nothing else")
        return groups

    def _label(self, run: Run[C], kinds: Set[str]) -> str:
        """The name of a run's row in a table that has a row for CPL of each of these ``kinds``.

        If these are ``lowrank``, the paper's, and one other, the other keeps the method's plain name.
        """
        beside_the_papers = kinds == {run.kind, "lowrank"} and run.kind != "lowrank"
        plain = run.method != "cpl" or len(kinds) < 2 or beside_the_papers
        return self.names[run.method] + ("" if plain else f" ({run.kind})") + self.suffix(run.config)

    def chosen_on(self, run: Run[C]) -> str:
        """Description of the data that the best checkpoint was chosen on."""
        held_out = f"reported_{run.state['metric']}" in run.state["best"]["metrics"]
        return self.held_out if held_out else self.reported

    def evaluate(self, path: str | Path, source: str | None = None) -> Table:
        """One run at its best checkpoint, with the knob chosen for it; ``source`` names other data to report on."""
        run = self.read(path)
        rule = self.chosen_on(run)
        if source is not None:
            run = replace(run, config=self.elsewhere(run.config, source))
        try:
            task, model, knob = restored = self.restore(run)
            scores = task.report(model, knob).items()
        except ValueError as error:
            if source is None or source in str(error):
                raise
            raise ValueError(f"{source}: {error}") from error
        found = {name: value if math.isfinite(value) else None for name, value in scores}  # as the history has it
        found |= {"epoch": run.state["best"]["epoch"], "knob": knob}
        row = self.row(self._label(run, {run.kind}), rule, [found], [run]) | self.time(restored)
        theirs = [line for line in self.published(run.config) if line["method"] == row["method"]]
        chosen = f"epoch {found['epoch']}" + ("" if knob is None else f" and knob {knob:g}")
        row |= {name: value for name, value in found.items() if name not in row}
        notes = (f"{chosen}, chosen on {rule}; {len(task.reported)} {self.reported}", *self.remarks(found))
        title = f"{run.path}, {self.source(run.config)}"
        return Table(title, self.columns, [row], theirs, notes, self._info([run]))

    def _ms(self, run: Run[C]) -> dict[str, Any]:
        """The column ``ms``: None for an archived run without its weights."""
        there = (run.path / "best" / "model.safetensors").is_file()
        return self.time(self.restore(run)) if there else {"ms": None}

    def time(self, restored: Restored) -> dict[str, float]:
        """Milliseconds of a prediction of one example."""
        task, model, knob = restored
        return timing.clock(timing.ready(partial(model.select, knob=knob), task.examples(1, timing.TIMED)))

    def row(self, label: str, rule: str, found: Sequence[Row], runs: Sequence[Run[C]]) -> dict[str, Any]:
        """A row of the table: the means of what was ``found`` of ``runs``, and how they were trained."""
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
        trained_on = ", ".join(sorted({read_info(run.path)["device"] for run in runs}))
        info = run_info(seeds=sorted({run.config.seed for run in runs}), device=device_of(here(runs[0].config)))
        return info | {"trained_on": trained_on, "config": common([run.config for run in runs])}

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
        notes.append(f"ms: one example at a time, {timing.where(device_of(here(runs[0].config)))}.")
        return tuple(notes)

    # -------------------------------------------------------------------------------------------- speed

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
        """Milliseconds per example of encoder, decoding and both, for runs and for untrained models of ``configs``.

        A round predicts ``examples`` inputs one at a time, or one larger batch. The pointer is timed with its cache
        and, as in the paper, recomputing everything at each step. With a ``precision`` below float32, also the
        share of reported examples whose selection is the same as in float32.
        """
        for name, count in (*(("batches", batch) for batch in batches), ("repeats", repeats), ("examples", examples)):
            check_count(name, count, 1)
        models = [*map(self.restore, map(self.read, paths)), *map(self._untrained, configs)]
        if not models:
            raise ValueError("expected runs, or methods to time untrained, got neither")
        first = models[0].task
        for batch in batches:  # refused before anything is timed
            first.examples(batch, 1)
        rounded = precision != "32-true"
        shares = [timing.same_picks(*model, precision) if rounded else None for model in models]
        rows: list[dict[str, Any]] = []
        for batch in batches:
            for (task, model, knob), share in zip(models, shares, strict=True):
                inputs = task.examples(batch, examples if batch == 1 else 1)
                for form, row in timing.rows(model, inputs, knob, repeats, precision):
                    same = {"same": None if form else share} if rounded else {}  # measured in the first form
                    rows.append({"method": self.names[task.config.method] + form, **row, **same})
        order = "" if first.ordered else ", in any order"
        notes = (
            f"ms an example: mean ± std of {repeats}; {precision}, {timing.where(first.device)}.",
            "Picks: mean number; of CPL and the pointer, the decoding steps."
            + ("" if paths else " Untrained weights."),
            *([f"Same picks: the share of selections that are those of float32{order}."] if rounded else []),
        )
        columns = (*timing.COLUMNS, timing.SAME) if rounded else timing.COLUMNS
        info = run_info(seeds=sorted({task.config.seed for task, _, _ in models}), device=first.device)
        title = f"Speed of a prediction, {self.subject}"
        return Table(title, columns, rows, (), notes, info | {"precision": precision})

    def _untrained(self, config: C) -> Restored:
        torch.manual_seed(config.seed)
        task = self.make_task(config)
        return Restored(task, task.build().to(task.device).eval(), None)

    # ------------------------------------------------------------------------------------------- report

    def report(self, paths: Sequence[str | Path], out: str | Path, table: Table | None = None) -> Path:
        """Write ``report.html`` and the figures into the folder ``out``; the path of the page."""
        runs = list(map(self.read, paths))
        kinds = sorted({run.kind for run in runs if run.method == "cpl"})
        if len(kinds) > 1:  # the figures know methods
            raise ValueError(f"runs: expected one kind of CPL in a report, got {', '.join(kinds)}")
        table = table or self.table(paths)
        panels = [*self.panels(runs, table), *self._convergence(runs, table)]
        page = Path(out) / "report.html"
        save_panels(panels, page.parent / "figures")
        configs = {str(run.path): to_toml(run.config) for run in runs if run.config.seed == runs[0].config.seed}
        commands = [f"torchcpl evaluate {[*self.first_runs(runs).values()][-1].path}"]
        write_report(page, self.lead, self.findings(table), table, panels, configs, commands)
        return page

    def explore(self, paths: Sequence[str | Path], out: str | Path) -> None:
        """Write a page to explore an example of the first CPL run."""
        runs = self.first_runs(list(map(self.read, paths)))
        page = self.explorer(runs["cpl"]) if "cpl" in runs else None
        if page is None:
            raise ValueError(f"runs: expected one of CPL on a task with a page to explore, got {', '.join(runs)}")
        page.save(out)

    def _convergence(self, runs: Sequence[Run[C]], table: Table) -> list[Panel]:
        """The selection metric over the epochs, of the stepwise methods."""
        metric, measured = runs[0].state["metric"], runs[0].history[0]["metrics"]
        rows = {row["method"]: row for row in table.rows if row.get("epoch")}  # of several rules, the last
        shown = f"reported_{metric}" in measured or table.rows[-1]["rule"] == self.reported
        key = f"reported_{metric}" if f"reported_{metric}" in measured else metric
        curves, colours = {}, {}
        for name, group in self._groups(runs).items():
            if group[0].method in ("pointer", "cpl"):
                curves[name] = _curve(group, key, rows[name]["epoch"], rows[name][metric] if shown else None)
                colours[name] = plots.METHODS[group[0].method]
        if not curves:
            return []
        column = self.score(metric)
        several = any(len(curve.values) > 1 for curve in curves.values())
        caption = (
            f"{column.title} on the {self.reported if shown else self.held_out} as training goes on"
            + (": mean over seeds, ± one standard deviation. " if several else ". ")
            + ("The star is the table's value" if shown else "The star is the checkpoint of the table")
            + (": the mean over the seeds, each at its own epoch, drawn at the mean of these." if several else ".")
        )
        return [Panel("convergence", "Convergence", caption, plots.convergence(curves, column, colours))]

    def demo(self, out: str | Path, say: Callable[[str], None]) -> tuple[Table, Path]:
        """Train all methods by the recipe ``demo``, compare them, write ``table.json`` and the report into ``out``."""
        out = Path(out)
        base = read_recipe(self.config, self.package, "demo")
        # The longest first, for a balanced load.
        planned = plan(base, reversed(list(self.names)), self.demo_seeds, out)
        times = f" × {len(self.demo_seeds)} seeds" if len(self.demo_seeds) > 1 else ""
        say(f"Training {len(self.names)} methods{times} on {self.demo_data}, in {out}")
        complete(planned, self.make_task, train=True, jobs=min(os.cpu_count() or 1, 6))
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # at batch size 1 more threads do not help
        try:
            say(f"Comparing them on {self.reported} …")
            table = self.table(list(planned), ["held-out"])
            table.write(out / "table.json")
            say("Drawing the figures …")
            return table, self.report(list(planned), out, table)
        finally:
            torch.set_num_threads(threads)


def against_pointer(pointer: Row, cpl: Row, score: Column) -> str:
    """A sentence comparing the pointer with CPL."""
    said = f"The autoregressive pointer reaches {score.cell(pointer)}"
    if pointer.get("ms") and cpl.get("ms"):  # runs without their weights have no times
        said += f" and takes {pointer['ms'] / cpl['ms']:.1f}× as long to predict"
    return said + "."


def _curve(runs: Sequence[Run[Any]], key: str, chosen: Sequence[int], value: float | None) -> plots.Curve:
    """A metric over the epochs common to all runs, and the mean of the ``chosen`` epochs with ``value``."""
    series = [{record["epoch"]: record["metrics"][key] for record in run.history} for run in runs]
    epochs = sorted(set.intersection(*map(set, series)))
    if value is None:
        value = statistics.fmean(one[epoch] for one, epoch in zip(series, chosen, strict=True))
    values = np.array([[one[epoch] for epoch in epochs] for one in series])
    return plots.Curve(np.array(epochs), values, (statistics.fmean(chosen), value))

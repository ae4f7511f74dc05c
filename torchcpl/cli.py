"""The command line: parses verbs and options, calls the task's `Benchmark`, prints errors on one line."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TextIO

import torch

from torchcpl import __version__
from torchcpl.completion import script
from torchcpl.config import TrainConfig, add_arguments, from_args, from_toml, given_options, words
from torchcpl.files import extra, targets_of
from torchcpl.predict import ENGINES, Predictor, explore_file, predict_file
from torchcpl.provenance import device_name
from torchcpl.select import DIRECT, METRICS
from torchcpl.select import select as select_rows
from torchcpl.sheet import copy_picks, describe_picks, write_explorer, write_sheet
from torchcpl.tables import Column, Table
from torchcpl.tasks.ablation import ablate as compare
from torchcpl.tasks.ablation import chosen_variants
from torchcpl.tasks.benchmark import Benchmark
from torchcpl.tasks.paths.benchmark import make_scenes
from torchcpl.tasks.paths.task import PathsConfig
from torchcpl.tasks.registry import TASKS, benchmark_of
from torchcpl.tasks.runs import complete, plan, read_recipe, recipes
from torchcpl.tasks.timing import PRECISIONS
from torchcpl.tasks.toy import toy_table
from torchcpl.train import NonFiniteLoss, device_of, fit, on_signals
from torchcpl.vectors import check_out, read_vectors, write_picks

EXPECTED = (ValueError, NonFiniteLoss, ImportError, OSError)  # errors of the user; anything else is a bug
LARGE = ("validation_bags", "scenes", "max_items", "dim", "ffn", "hidden")  # options that cost memory
DEMO = "subsets"  # the task of `torchcpl demo`
SMALL = "demo"  # the recipe that trains in minutes on a CPU
PAPER = "paper"
Verb = Callable[[argparse.Namespace], None]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit status is 0, 2 after an error, 130 after Ctrl-C or SIGTERM."""
    options = _parser().parse_args(argv)
    try:
        with on_signals(signal.default_int_handler, signal.SIGTERM):  # sent by clusters to stop a job
            options.verb(options)
        return 0
    except KeyboardInterrupt as stop:
        said, status = f"stopped: {stop}" if str(stop) else "stopped", 130
    except BrokenPipeError:  # the reader of the output, such as head, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        reason = str(error) if isinstance(error, EXPECTED) else _out_of_memory(error, options)
        if reason is None:
            raise
        if options.debug:
            traceback.print_exc()
        said, status = f"error: {reason}", 2
    print(f"torchcpl: {' '.join(said.split())}", file=sys.stderr)
    return status


def _out_of_memory(error: Exception, options: argparse.Namespace) -> str | None:
    """The message for an out-of-memory error, None for any other; on the CPU torch has no type for it."""
    if isinstance(error, BrokenProcessPool):
        return "a training process was killed, probably out of memory: lower --jobs"
    said = str(error).replace("\n", " ")
    signs = ("can't allocate memory", "Storage size calculation overflowed", "numel: integer multiplication overflow")
    if not isinstance(error, MemoryError | torch.OutOfMemoryError) and not any(sign in said for sign in signs):
        return None
    lower = "--batches" if hasattr(options, "batches") else "--batch-size"
    names = {f.name for f in fields(TASKS[options.task].config)} if hasattr(options, "task") else set()
    more = [f"--{name.replace('_', '-')}" for name in LARGE if name in names]
    return f"out of memory: lower {', '.join([lower, *more])} ({said[:160]})"


def train(options: argparse.Namespace) -> None:
    benchmark = TASKS[options.task]
    config = _config(benchmark, options, options.run if options.resume else None)
    run = options.run or Path("runs") / f"{options.task}-{config.method}-s{config.seed}"  # type: ignore[attr-defined]
    state = fit(benchmark.make_task(config), run, resume=options.resume)
    best = state["best"]
    value = "–" if best["value"] is None else f"{best['value']:.4f}"
    _say(
        f"{run}: {state['metric']} {value} at epoch {best['epoch']} of {config.epochs}, "
        f"{state['seconds']:.0f} s\nNext: torchcpl evaluate {run}"
    )


def evaluate(options: argparse.Namespace) -> None:
    results = benchmark_of(options.run).evaluate(options.run, options.source)
    _show(results, options.out or (None if options.source else options.run / "evaluation.json"), options)


def predict(options: argparse.Namespace) -> None:
    targets_of([options.file], options.out, options.explore)
    predictor = Predictor(options.run, column=options.column, group=options.group, device=options.device)
    page = explore_file(predictor, options.file) if options.explore else None  # first, for it may refuse
    records = predict_file(
        predictor, options.file, options.out, batch_size=options.batch_size, limit=options.limit,
        engine=options.engine, workers=options.workers,
    )  # fmt: skip
    if page is not None:
        page.save(options.explore)
        _say(f"Explorer: {options.explore}  (open it in a browser)", None if options.out else sys.stderr)
    if not options.out:
        print(json.dumps(records))
        return
    mean = sum(len(record["picks"]) for record in records) / len(records)
    _say(f"{len(records)} examples, {mean:.1f} picks on average\nWritten to {options.out}")


def table(options: argparse.Namespace) -> None:
    benchmark = TASKS[options.task]
    runs: list[Path] = options.runs
    if runs:
        _refuse_settings(benchmark, options)
    answers = getattr(options, "answers", None)
    if len(runs) == 1 and runs[0].suffix == ".json":
        _show(Table.read(runs[0], benchmark.columns if answers is None else benchmark.answer_columns), None, options)
        return
    out = Path("runs") / f"{options.task}-table.json"
    if not runs:
        folder = options.folder or Path("runs") / f"{options.task}-{options.recipe or 'table'}"
        runs, out = _planned(benchmark, options, folder), folder / "table.json"
    found = benchmark.table(runs, options.rule) if answers is None else benchmark.answers_table(runs, answers)
    _show(found, options.out or out, options)


def bench(options: argparse.Namespace) -> None:
    benchmark = TASKS[options.task]
    configs = []
    if options.runs:
        _refuse_settings(benchmark, options)
    else:
        base = _config(benchmark, options)
        configs = list(plan(base, options.methods or tuple(benchmark.names), [base.seed], ".").values())
    results = benchmark.bench(
        options.runs, configs, batches=options.batches, repeats=options.repeats, examples=options.examples,
        precision=options.rounded,
    )  # fmt: skip
    _show(results, options.out or Path("runs") / f"{options.task}-bench.json", options)


def report(options: argparse.Namespace) -> None:
    targets_of([], options.explore, folder=options.out)
    page = TASKS[options.task].report(options.runs, options.out)
    _say(f"Report: {page}, figures in {page.parent / 'figures'}")
    if options.explore:
        TASKS[options.task].explore(options.runs, options.explore)
        _say(f"Explorer: {options.explore}  (open it in a browser)")


def ablate(options: argparse.Namespace) -> None:
    benchmark = TASKS[options.task]
    folder = options.folder or Path("runs") / f"ablate-{options.task}"
    variants = chosen_variants(benchmark, options.variants, options.only)
    results = compare(benchmark, _config(benchmark, options), variants, options.seeds, folder, options.jobs)
    _show(results, options.out or folder / "table.json", options)


def demo(options: argparse.Namespace) -> None:
    out = options.out or Path("runs") / ("demo" if options.task == DEMO else f"demo-{options.task}")
    say = partial(_say, file=sys.stderr) if options.json else _say
    results, page = TASKS[options.task].demo(out, say)
    _show(results, None, options)
    say(f"Table: {out / 'table.json'}\nReport: {page}  (open it in a browser)")


def toy(options: argparse.Namespace) -> None:
    _show(toy_table(), None, options)


def select(options: argparse.Namespace) -> None:
    if options.out:
        check_out(options.out, options.hypotheses)
    if options.copy and options.copy.is_file():
        raise ValueError(f"--copy: expected a folder, got the file {options.copy}")
    read = [Path(name) for name in (options.weights, options.resnet) if name and Path(name).is_file()]
    targets = targets_of([options.file, *read], options.out, options.sheet, options.explore, folder=options.copy)
    vectors = read_vectors(
        options.file, column=options.column, weights=options.weights, resnet=options.resnet, strict=options.strict
    )
    if options.copy and vectors.files is None:
        raise ValueError(f"--copy: expected a folder of images, got {options.file}")
    if options.explore and len(vectors) > DIRECT:
        raise ValueError(f"--explore: expected at most {DIRECT} rows, got {len(vectors)}")
    required, forbidden = ([vectors.row(name) for name in names] for names in (options.require, options.forbid))
    found = select_rows(
        vectors.values, options.size, metric=options.metric, min_size=options.min_size, max_size=options.max_size,
        require=required, forbid=forbidden, weights=vectors.weights, num_hypotheses=options.hypotheses,
        seed=options.seed, device=options.device,
    )  # fmt: skip
    answers = describe_picks(vectors, found, options.metric)
    if not answers:
        raise ValueError(f"{options.file}: nothing was picked: raise --min-size or the weights")
    records = [pick for picks, _ in answers for pick in picks]
    first, groups = answers[0]
    if options.explore:  # first, for it may refuse
        between = options.size or options.min_size, len(first)  # the median of their number, which the page cannot know
        write_explorer(options.explore, vectors, options.metric, between, required, forbidden)
    if options.out:
        write_picks(options.out, records)
    if options.sheet:
        write_sheet(options.sheet, vectors, first, groups)
    if options.copy and vectors.files:
        copy_picks(options.copy, vectors.files, first)
    columns = tuple(Column(name, name.replace("_", " "), 3 if name == "probability" else None) for name in records[0])
    notes = (f"{vectors.skipped} broken images were skipped.",) if vectors.skipped else ()
    _show(Table(f"{len(first)} of {len(vectors):,} in {options.file}", columns, records, (), notes), None, options)
    if targets and not options.json:
        _say(f"Written to {', '.join(map(str, targets))}")


def scenes(options: argparse.Namespace) -> None:
    stored = options.source.endswith(".npz")
    given = [name for name in ("scenes", "scenes_seed") if hasattr(options, name)] + ["varied"] * options.varied
    if stored and given:
        raise ValueError(f"--{given[0].replace('scenes_', '')}: {options.source} already has its scenes")
    out = options.out or (None if stored else Path("runs/scenes.npz"))
    beside = (out or Path(options.source)).with_suffix(".png")
    show = beside if options.show == Path() else options.show  # --show without a file
    make_scenes(from_args(PathsConfig, options), out, show, tuple(options.splits), _say, varied=options.varied)


def completion(_: argparse.Namespace) -> None:
    print(script(_parser()))


# ---------------------------------------------------------------------------------------------- options


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="torchcpl",
        description="Contextual Plackett–Luce: train, evaluate and compare selection models.",
        epilog="examples:\n"
        "  torchcpl toy                                   the paper's example of five items, in seconds\n"
        "  torchcpl demo                                  train and compare all methods, minutes on a CPU\n"
        "  torchcpl demo paths                            the same for paths through road scenes\n"
        "  torchcpl select embeddings.npy                 one representative of every group, without training\n"
        "  torchcpl train subsets --method cpl            train one model\n"
        "  torchcpl evaluate runs/subsets-cpl-s0          its metrics\n"
        "  torchcpl table subsets --train --seeds 0 1 2   all methods; trains the missing runs\n\n"
        "See also: torchcpl VERB --help, torchcpl VERB TASK --help.\n\n"
        "exit status: 0 success; 2 an error, one line on stderr; 130 stopped by Ctrl-C or SIGTERM (training saves a\n"
        "checkpoint first).",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the versions and the device, and exit")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for add in (
        _add_train, _add_evaluate, _add_predict, _add_select, _add_table, _add_ablate, _add_bench, _add_report,
        _add_demo, _add_scenes,
    ):  # fmt: skip
        add(verbs)
    said = 'Print a completion script: eval "$(torchcpl completion)" in bash.'
    _add(verbs, completion, "shell completion for bash and zsh", said)
    return parser


def _add_train(verbs: Any) -> None:
    for name, benchmark, sub in _per_task(verbs, train, "train a model"):
        sub.epilog = (
            f"examples:\n  torchcpl train {name} --method {tuple(benchmark.names)[-1]} --epochs 20 --lr 1e-3\n"
            f"  torchcpl train {name} --recipe {next(iter(recipes(benchmark.package)))} --run runs/mine\n"
            f"  torchcpl train {name} --run runs/mine --resume    continue after Ctrl-C or a crash"
        )
        sub.add_argument("--run", type=Path, metavar="RUN", help=f"folder (default: runs/{name}-METHOD-sSEED)")
        sub.add_argument("--resume", action="store_true", help="continue the run if it exists")
        _add_config(sub, benchmark)


def _add_evaluate(verbs: Any) -> None:
    said = "Evaluate a run's best checkpoint on its test data, or on other labelled data of the same task."
    sub = _add(verbs, evaluate, "metrics of a run", said)
    sub.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    sub.add_argument("--source", help="other data: other classes, other maps (default: the run's)")
    _add_output(sub, "JSON file to write (default: RUN/evaluation.json; none with --source)")


def _add_predict(verbs: Any) -> None:
    sub = _add(
        verbs, predict, "apply a run to new data", "Select from new, unlabelled data with a run's best checkpoint.",
        "examples:\n  torchcpl predict runs/subsets-cpl-s0 features.npy --out picks.csv   (N, d) or (B, N, d)\n"
        "  torchcpl predict runs/paths-cpl-s0 map.json --limit 20 --out picks.json\n"
        "  torchcpl predict runs/subsets-cpl-s0 bags.parquet --column bag --engine ray --workers 8 --out picks.json",
    )  # fmt: skip
    sub.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    said = "features in .npy or .npz; scenes in .npz, a lane map; baskets in .txt; Parquet, a file or a folder"
    sub.add_argument("file", type=Path, metavar="FILE", help=said)
    sub.add_argument("--out", type=Path, help="picks.json or picks.csv (default: JSON to the terminal)")
    said = "also write an interactive page of the first example (not for Parquet)"
    sub.add_argument("--explore", type=Path, metavar="PAGE", help=said)
    sub.add_argument("--column", default="", help="array or column of the examples (default: features, or images)")
    sub.add_argument("--group", default="", metavar="COLUMN", help="Parquet of items: equal values are one example")
    said = "only the first N examples (default: all), or N scenes of a map (default: 100)"
    sub.add_argument("--limit", type=int, help=said)
    sub.add_argument("--batch-size", type=int, default=64, help="examples at a time")
    sub.add_argument("--engine", choices=ENGINES, default="local", help="where to predict: in this process or by Ray")
    sub.add_argument("--workers", type=int, default=2, help="number of Ray actors")
    said = "where to compute; auto = CUDA if available"
    sub.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help=said)


def _add_table(verbs: Any) -> None:
    for name, benchmark, sub in _per_task(verbs, table, "compare all methods"):
        sub.epilog = (
            f"examples:\n  torchcpl table {name} runs/a runs/b runs/c --out results/table.json\n"
            f"  torchcpl table {name} --train --recipe {next(iter(recipes(benchmark.package)))} --seeds 0 1 2\n"
            f"  torchcpl table {name} results/table.json --markdown    print a stored table"
        )
        sub.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="finished runs, or the JSON file of a table")
        sub.add_argument("--train", action="store_true", default=None, help="without RUN: train missing runs")
        sub.add_argument("--jobs", type=int, help="without RUN: runs to train in parallel (default: 1)")
        _add_methods(sub, benchmark)
        sub.add_argument("--seeds", nargs="+", type=int, help="without RUN: a run of each (default: 0)")
        said = f"without RUN: folder of the runs (default: runs/{name}-RECIPE)"
        sub.add_argument("--runs", dest="folder", type=Path, metavar="DIR", help=said)
        said = "data that the checkpoint is chosen on (default: all that the runs allow)"
        sub.add_argument("--rule", nargs="+", choices=tuple(benchmark.rules), default=(), help=said)
        if benchmark.answer_columns:
            sub.add_argument("--answers", type=int, help="compare N answers a scene, not the one")
        _add_output(sub)
        _add_config(sub, benchmark)


def _add_ablate(verbs: Any) -> None:
    for name, benchmark, sub in _per_task(verbs, ablate, "compare variants of a recipe under one budget"):
        sub.epilog = (
            f"variants: {', '.join(benchmark.variants)}\n\nEach changes some options of the recipe. Finished runs are "
            'kept.\nIn a FILE, a table is a variant:  ["no dropout"]  dropout = 0.0\n\n'
            f"examples:\n  torchcpl ablate {name} --recipe {SMALL} --epochs 2 --seeds 0 1 --jobs 2\n"
            f"  torchcpl ablate {name} --recipe {SMALL} --variants mine.toml --out results/mine.json"
        )
        sub.add_argument("--variants", type=Path, help="TOML file of variants (default: those below)")
        sub.add_argument("--only", nargs="+", metavar="NAME", help="some of the variants, beside the base")
        sub.add_argument("--seeds", nargs="+", type=int, default=(0,), help="a run of each")
        sub.add_argument("--jobs", type=int, default=1, help="runs to train in parallel")
        said = f"folder of the runs, of table.json and of ablation.svg (default: runs/ablate-{name})"
        sub.add_argument("--runs", dest="folder", type=Path, metavar="DIR", help=said)
        _add_output(sub)
        _add_config(sub, benchmark, "the base")


def _add_bench(verbs: Any) -> None:
    for name, benchmark, sub in _per_task(verbs, bench, "time predictions"):
        sub.epilog = (
            f"examples:\n  torchcpl bench {name} runs/{name}-cpl-s0 --batches 1 64\n"
            f"  torchcpl bench {name} --methods {' '.join(tuple(benchmark.names)[-2:])}    untrained models"
        )
        sub.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="runs to time (default: untrained models)")
        _add_methods(sub, benchmark)
        sub.add_argument("--batches", nargs="+", type=int, default=(1, 256), help="batch sizes")
        sub.add_argument("--repeats", type=int, default=10, help="rounds to average over")
        sub.add_argument("--examples", type=int, default=100, help="predictions per round at batch 1")
        said = "precision of the predictions; below float32, also the share of equal picks"
        sub.add_argument("--precision", dest="rounded", choices=tuple(PRECISIONS), default="32-true", help=said)
        _add_output(sub)
        _add_config(sub, benchmark, "without RUN: the models", ("source", "device"))


def _add_report(verbs: Any) -> None:
    for name, _, sub in _per_task(verbs, report, "write an HTML report with figures of some runs"):
        sub.epilog = f"example:\n  torchcpl report {name} runs/{name}-cpl-s0 runs/{name}-pointer-s0 --out runs/report"
        sub.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="finished runs")
        sub.add_argument("--out", type=Path, default=Path("runs/report"), metavar="FOLDER", help="of the report")
        sub.add_argument("--explore", type=Path, metavar="PAGE", help="also write an interactive page of a CPL example")


def _add_demo(verbs: Any) -> None:
    said = "Train all methods on small built-in data, compare them, write a table and a report."
    sub = _add(verbs, demo, "train and compare all methods in a few minutes", said)
    sub.add_argument("task", nargs="?", choices=tuple(TASKS), default=DEMO, help="which one")
    folders = ", ".join(f"runs/demo-{task}" for task in TASKS if task != DEMO)
    sub.add_argument("--out", type=Path, metavar="FOLDER", help=f"default: runs/demo, {folders}")
    _add_output(sub, "")
    said = "Two answers, {a} and {b, c}, are valid: what a matching loss predicts, and what CPL predicts."
    _add_output(_add(verbs, toy, "the paper's example of five items", said), "")


def _add_select(verbs: Any) -> None:
    sub = _add(
        verbs, select, "representatives of a set of vectors",
        "Pick one representative of every group in a file of vectors or a folder of images, without training.",
        "examples:\n  torchcpl select embeddings.npy                      as many as there are groups\n"
        "  torchcpl select embeddings.npy --size 20 --out picks.csv\n"
        "  torchcpl select photos/ --resnet resnet18.safetensors --sheet picks.html --copy picked/",
    )  # fmt: skip
    said = ".npy, .npz, .csv, .parquet, .jsonl (a column id names the rows) or a folder of images"
    sub.add_argument("file", type=Path, metavar="FILE", help=said)
    sub.add_argument("--size", type=int, help="number of picks (default: chosen by the model)")
    sub.add_argument("--min-size", type=int, default=1, help="at least so many picks")
    sub.add_argument("--max-size", type=int, help="at most so many picks (default: no limit)")
    said = "distance between the vectors; precomputed: the file is the matrix of distances"
    sub.add_argument("--metric", choices=METRICS, default="euclidean", help=said)
    for name, said in (("require", "must be picked (row numbers where there are no ids)"), ("forbid", "must not be")):
        sub.add_argument(f"--{name}", nargs="+", default=(), metavar="ID", help=said)
    sub.add_argument("--weights", metavar="COLUMN|FILE.npy", help="a number per row, added to its logit")
    sub.add_argument("--hypotheses", type=int, default=1, help="distinct answers, likeliest first")
    sub.add_argument("--column", help="the vectors in a .npz, .parquet or .jsonl (default: the only ones)")
    sub.add_argument("--resnet", type=Path, help="weights of a ResNet-18, for images")
    sub.add_argument("--strict", action="store_true", help="refuse broken images instead of skipping them")
    _add_output(sub, "picks as .csv, .json, .parquet or .npy")
    sub.add_argument("--sheet", type=Path, metavar="FILE.html", help="contact sheet: every pick with its group")
    sub.add_argument("--explore", type=Path, metavar="PAGE", help="interactive page, for at most a few hundred rows")
    sub.add_argument("--copy", type=Path, metavar="FOLDER", help="copy the picked images there")
    sub.add_argument("--seed", type=int, default=0, help="random seed")
    sub.add_argument("--device", help="where to compute: cpu or cuda (default: cpu)")


def _add_scenes(verbs: Any) -> None:
    sub = _add(
        verbs, scenes, "generate and show the scenes of the paths task",
        "Generate road scenes with all their valid paths from lane maps, store and show them.",
        "examples:\n  torchcpl scenes --show                             procedural roads, with a picture of some\n"
        "  torchcpl scenes --source maps/ --split geography   from a folder of lane maps\n"
        "  torchcpl scenes --source runs/scenes.npz --show    show a stored file\n"
        "  torchcpl train paths --source runs/scenes.npz      train on it",
    )  # fmt: skip
    said = (
        "procedural; a lane map (lane-graph/1, nuScenes map expansion or Argoverse 2 JSON) or a folder of them; "
        "or a .npz that this command wrote"
    )
    sub.add_argument("--source", default="procedural", help=said)
    add_arguments(sub, PathsConfig, ("scenes",))
    said = f"seed of the scenes (default: {PathsConfig().scenes_seed})"
    sub.add_argument("--seed", dest="scenes_seed", type=int, default=argparse.SUPPRESS, help=said)
    said = (
        "scenes of more places, to train on (train paths --extra): roads may be cut off where the ego cannot go, every "
        "map is driven the other way, too, and most of the ground is warped"
    )
    sub.add_argument("--varied", action="store_true", help=said)
    sub.add_argument("--out", type=Path, metavar="FILE.npz", help="default: runs/scenes.npz; none for a .npz source")
    said = "draw some scenes with all their paths (default file: next to the scenes)"
    sub.add_argument("--show", nargs="?", type=Path, const=Path(), metavar="FILE.png", help=said)
    said = "print the number of scenes in each part of a split: index, geography, map:NAME"
    sub.add_argument("--split", dest="splits", nargs="+", default=(), metavar="SPLIT", help=said)


class _Help(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the epilog, shows defaults, and shows what an option takes by its type."""

    def _get_help_string(self, action: argparse.Action) -> str:
        shown = action.default not in (None, "", (), argparse.SUPPRESS) and action.nargs != 0  # 0: flags
        return f"{action.help} (default: {words(action.default)})" if shown else str(action.help)

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return {int: "N", float: "X", Path: "FILE"}.get(action.type, action.dest.upper())  # type: ignore[call-overload]


class _Parser(argparse.ArgumentParser):
    """Accepts no abbreviations, and points to --help on errors."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_Help, **settings)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"torchcpl: error: {message}\nSee: {self.prog} --help\n")


class _Version(argparse.Action):
    """Queries the device only when --version is given."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"torchcpl {__version__}, torch {torch.__version__}, {device_name()}")
        parser.exit()


def _add(verbs: Any, run: Verb, help: str, said: str, epilog: str = "", name: str = "") -> Any:
    """A sub-command that calls ``run``, by default with its name."""
    sub = verbs.add_parser(name or run.__name__, help=help, description=said, epilog=epilog)
    sub.add_argument("--debug", action="store_true", help="show the traceback of an error")
    sub.set_defaults(verb=run)
    return sub


def _per_task(verbs: Any, run: Verb, help: str) -> Iterator[Any]:
    """A verb with one sub-command per task: the task's name, benchmark and parser."""
    parser = verbs.add_parser(run.__name__, help=help, description=(title := help[0].upper() + help[1:] + "."))
    tasks = parser.add_subparsers(title="tasks", metavar="TASK", required=True, dest="task")
    for name, benchmark in TASKS.items():
        if run is not ablate or benchmark.variants:
            said = f"{title} Task: {benchmark.summary}."
            yield name, benchmark, _add(tasks, run, benchmark.summary, said, name=name)


def _add_output(parser: argparse.ArgumentParser, out: str = "JSON file to write (default: in runs/)") -> None:
    if out:
        parser.add_argument("--out", type=Path, help=out)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    form.add_argument("--json", action="store_true", help="print the table as JSON, and nothing else")


def _add_methods(parser: argparse.ArgumentParser, benchmark: Benchmark[Any]) -> None:
    said = f"without RUN: some of {', '.join(benchmark.names)} (default: all)"
    parser.add_argument("--methods", nargs="+", choices=tuple(benchmark.names), metavar="METHOD", help=said)


def _add_config(
    parser: argparse.ArgumentParser, benchmark: Benchmark[Any], title: str = "configuration", only: Sequence[str] = ()
) -> None:
    runs = "[RUN …] " if any(action.dest == "runs" for action in parser._actions) else ""
    parser.usage = f"{parser.prog} {runs}[--recipe NAME | --config FILE] [option …]"  # without dozens of options
    group = parser.add_argument_group(title, "options override --recipe or --config")
    base = group.add_mutually_exclusive_group()
    small = "" if only else f" (default without a GPU: {SMALL}, unless options of the model or its training are given)"
    shipped = tuple(recipes(benchmark.package))
    base.add_argument("--recipe", choices=shipped, help=f"settings shipped with torchcpl{small}")
    base.add_argument("--config", type=Path, help="settings in a TOML file")
    add_arguments(group, benchmark.config, only)


def _config(benchmark: Benchmark[Any], options: argparse.Namespace, begun: Path | None = None) -> TrainConfig:
    """The configuration of the options; the base is a recipe, a file, or that of the run ``begun`` to resume."""
    base = None
    if options.recipe:
        base = read_recipe(benchmark.config, benchmark.package, options.recipe)
    elif options.config:
        base = from_toml(benchmark.config, options.config)
    elif begun and (begun / "config.toml").exists():
        base = from_toml(benchmark.config, begun / "config.toml")
    elif _small(benchmark, options):
        base = read_recipe(benchmark.config, benchmark.package, SMALL)
        if PAPER in recipes(benchmark.package):
            said = f"using --recipe {SMALL}; the paper's settings (--recipe {PAPER}) take hours on a CPU"
            _say(f"torchcpl: no GPU: {said}", sys.stderr)
    return from_args(benchmark.config, options, base)


def _small(benchmark: Benchmark[Any], options: argparse.Namespace) -> bool:
    """Whether to train a small model: there is no GPU and no option of the model or its training is given."""
    given = given_options(benchmark.config, options).keys()
    device = device_of(benchmark.config(device=getattr(options, "device", "auto")))
    return device.type == "cpu" and given <= {"method", "source", "seed", "device"} and options.verb is not bench


def _refuse_settings(benchmark: Benchmark[Any], options: argparse.Namespace) -> None:
    """Raise if settings are given together with runs, which have their own."""
    without = ("recipe", "config", "methods", "seeds", "train", "jobs", "folder")
    given = [name for name in without if getattr(options, name, None) is not None]
    given += given_options(benchmark.config, options)
    if given:
        name = "runs" if given[0] == "folder" else given[0].replace("_", "-")
        raise ValueError(f"--{name}: expected no settings together with RUN, which has its own")


def _planned(benchmark: Benchmark[Any], options: argparse.Namespace, folder: Path) -> list[Path]:
    """The runs of all methods and seeds, trained if missing and asked for."""
    for one, many in (("method", "methods"), ("seed", "seeds")):
        if hasattr(options, one):
            raise ValueError(f"--{one}: expected --{many} for a table")
    planned = plan(_config(benchmark, options), options.methods or tuple(benchmark.names), options.seeds or [0], folder)
    jobs = 1 if options.jobs is None else options.jobs
    complete(planned, benchmark.make_task, train=bool(options.train), jobs=jobs)
    return list(planned)


# ----------------------------------------------------------------------------------------------- output


def _show(results: Table, path: Path | None, options: argparse.Namespace) -> None:
    if path:
        results.write(path)
    if options.json:
        print(results.json())
    elif options.markdown:
        print(results.markdown(), end="")
    else:
        with extra():
            from rich.console import Console
        console = Console()
        console.print(results.rich(console.width), crop=False)
        if path:
            _say(f"Written to {path}")


def _say(text: str, file: TextIO | None = None) -> None:
    """Print, in the process of rank 0 alone."""
    if os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0":
        print(text, file=file)


if __name__ == "__main__":
    raise SystemExit(main())

"""All shops, methods and seeds side by side, a process each on one thread: ``python -m bench.baskets FOLDER``.

``results/baskets.json`` is both result and record: what it has, measured with the same options, is not run again, and
it is written after every run that ends. So one can stop and go on, here or on another machine, with nothing but that
file; a run that was stopped goes on from its checkpoint where ``--runs`` has one. Rows have ``dataset``, ``method``,
the means of the metrics over ``seeds`` with their deviation, the ``options`` that are not the ``defaults``, and for
each seed its ``origin``, a place in the list ``origins`` of commit, device and versions. ``items`` has, for each shop,
what CPL expects in a basket and which items go together.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from torchcpl.files import read_json, write_json
from torchcpl.provenance import run_info
from torchcpl.sets import next_probs
from torchcpl.tasks.baskets import figures
from torchcpl.tasks.baskets.benchmark import BasketsBenchmark
from torchcpl.tasks.baskets.methods import CPLSets
from torchcpl.tasks.baskets.task import METHODS, BasketsConfig, BasketsTask, evaluate
from torchcpl.train import fit

BENCHMARK = BasketsBenchmark()
LOWRANK = "CPL (lowrank)"
NONSYMMETRIC: dict[str, Any] = {"split": "random", "valid_baskets": 300, "test_baskets": 2000}  # Gartrell et al. 2021
SECONDS = {METHODS["pointer"]: 3.6, METHODS["cpl"]: 2.5, LOWRANK: 1.4}  # per kB of training baskets, about


@dataclass(frozen=True)
class Job:
    """One run: a row of the results, and one of its seeds."""

    dataset: str
    config: BasketsConfig

    @property
    def method(self) -> str:
        return LOWRANK if self.config.kind == "lowrank" else METHODS[self.config.method]

    @property
    def folder(self) -> str:
        return f"{self.dataset}/{self.config.method}-{self.config.kind}-s{self.config.seed}"

    @property
    def seconds(self) -> float:
        return SECONDS.get(self.method, 0.2) * Path(f"{self.config.source}.train.txt").stat().st_size / 1000


def plan(folder: Path, seeds: int, only: list[str]) -> list[Job]:
    """All runs, the longest first."""
    shops = sorted(path.name.removesuffix(".train.txt") for path in folder.glob("*.train.txt"))
    methods: dict[str, dict[str, Any]] = {method: {"method": method} for method in METHODS}
    methods["pointer"] |= {"epochs": 20, "validate_every": 4}
    methods["lowrank"] = {"method": "cpl", "kind": "lowrank"}

    def jobs(shop: str) -> Iterator[Job]:
        source = str(folder / shop)
        for seed in range(seeds):
            for options in methods.values():
                yield Job(shop, BasketsConfig(source=source, seed=seed, **options))
        for seed in range(5 if shop == "apparel" else 0):
            for method in ("cpl", "ndpp", "dpp"):
                config = BasketsConfig(source=source, method=method, seed=seed, split_seed=seed, **NONSYMMETRIC)
                yield Job(f"{shop}-random", config)

    found = [job for shop in shops if not only or shop in only for job in jobs(shop)]
    return sorted(found, key=lambda job: -job.seconds)


def work(path: Path, config: BasketsConfig) -> dict[str, Any]:
    """Train and measure the test baskets: ``scores``, those of what needs no training, and what CPL says of items."""
    task = BENCHMARK.make_task(config)
    trained = fit(task, path, resume=True, progress=False)["seconds"]
    run = BENCHMARK.read(path)
    _, model, _ = BENCHMARK.restore(run)
    began = time.monotonic()
    scores: dict[str, Any] = evaluate(model, task.reported)
    scores |= {"valid_log_likelihood": run.state["best"]["value"], "epoch": run.state["best"]["epoch"]}
    taken = time.monotonic() - began
    scores |= {"train_seconds": trained, "evaluate_seconds": taken, "seconds": trained + taken}
    scores |= {"baskets": len(task.reported), "items": task.baskets.num_items}
    found: dict[str, Any] = {"scores": scores}
    if config.method == "dpp" and config.seed == 0:
        found["untrained"] = {name: evaluate(model, task.reported) for name, model in task.untrained().items()}
    if isinstance(model, CPLSets) and config.kind == "contextual" and config.seed == 0:
        found["items"] = about_items(model, task)
    return found


def about_items(model: CPLSets, task: BasketsTask) -> dict[str, Any]:
    """The test basket of two that is most often chosen and what is likely to follow; the pairs of frequent items that
    go together best and worst, by the learned W."""
    names = [*task.baskets.names, "(nothing more)"]
    two = task.reported[(task.reported >= 0).sum(-1) == 2, :2].sort(-1).values
    found, count = two.unique(dim=0, return_counts=True)
    given = found[count.argmax()]
    follows = next_probs(model.potentials(), given.unsqueeze(0))[0].topk(4)
    most = task.frequency.argsort(descending=True)[: figures.ITEMS]
    W = figures.pair_effects(model)[most][:, most]
    together = (W + W.T).triu(1)
    best, worst = (divmod(int(place), len(most)) for place in (together.argmax(), together.argmin()))
    return {
        "given": [names[i] for i in given.tolist()],
        "next": [[names[i], p] for i, p in zip(follows.indices.tolist(), follows.values.tolist(), strict=True)],
        "complements": [names[most[i]] for i in best],
        "substitutes": [names[most[i]] for i in worst],
    }


class Results:
    """The file: a row for every dataset and method, kept as mean and deviation, to which seeds are added."""

    def __init__(self, path: Path, jobs: list[Job]) -> None:
        self.path = path
        self.defaults = asdict(BasketsConfig())
        before = read_json(path) if path.is_file() else {"rows": [], "items": {}, "origins": []}
        self.items: dict[str, Any] = before["items"]
        self.origins: list[dict[str, Any]] = before["origins"]
        info = run_info(device="cpu")
        here = {name: info[name] for name in ("commit", "device", "versions")}
        if here not in self.origins:
            self.origins.append(here)
        self.origin = self.origins.index(here)
        self.rows: dict[tuple[str, str], dict[str, Any]] = {}
        for row in before["rows"]:
            if "options" in row:
                row["options"] = self.differing({**before["defaults"], **row["options"]})
            self.rows[row["dataset"], row["method"]] = row
        for job in jobs:
            row = self.rows.get((job.dataset, job.method), {})
            if row.get("options", self.options(job)) != self.options(job):
                del self.rows[job.dataset, job.method]

    def differing(self, options: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in options.items() if value != self.defaults.get(name, value)}

    def options(self, job: Job) -> dict[str, Any]:
        """Those of a row: not the seeds, nor where the baskets lie."""
        options = self.differing(asdict(job.config))
        return {name: value for name, value in options.items() if name not in ("seed", "split_seed", "source")}

    def has(self, job: Job) -> bool:
        return job.config.seed in self.rows.get((job.dataset, job.method), {"seeds": []})["seeds"]

    def add(self, job: Job, found: dict[str, Any]) -> None:
        self._add(job, job.method, found["scores"])
        for name, scores in found.get("untrained", {}).items():
            self.rows.pop((job.dataset, name), None)
            self._add(job, name, scores)
        if "items" in found:
            self.items[job.dataset] = found["items"]

    def _add(self, job: Job, method: str, scores: dict[str, Any]) -> None:
        old = self.rows.get((job.dataset, method), {"seeds": [], "origin": []})
        row = {"dataset": job.dataset, "method": method, **with_one_more(old, scores), "options": self.options(job)}
        row |= {"seeds": [*old["seeds"], job.config.seed], "origin": [*old["origin"], self.origin]}
        self.rows[job.dataset, method] = row

    def write(self) -> None:
        rows = [row for _, row in sorted(self.rows.items())]
        info = run_info(seeds=sorted({seed for row in rows for seed in row["seeds"]}), device="cpu")
        content = {"title": "Baskets, all shops", **info, "defaults": self.defaults, "origins": self.origins}
        write_json(self.path, {**content, "rows": rows, "items": self.items})


def with_one_more(row: dict[str, Any], scores: dict[str, Any]) -> dict[str, Any]:
    """The means and sample deviations of ``row``, of as many runs as it has seeds, with those of one more (Welford)."""
    count = len(row["seeds"])
    found: dict[str, Any] = {}
    for name, value in scores.items():
        if value is None or not count:
            found[name] = value
            continue
        apart = value - row[name]
        squares = (count - 1) * row.get(f"{name}_std", 0.0) ** 2 + apart**2 * count / (count + 1)
        found |= {name: row[name] + apart / (count + 1), f"{name}_std": (squares / count) ** 0.5}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with NAME.train.txt, .valid.txt, .test.txt and .items.txt")
    parser.add_argument("--runs", type=Path, default=Path("runs/baskets"))
    parser.add_argument("--out", type=Path, default=Path("results/baskets.json"), help="goes on from what it has")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1e9, help="end after that; the same command goes on")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="these shops alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    jobs = plan(options.folder, options.seeds, options.only)
    results = Results(options.out, jobs)
    left = [job for job in jobs if not results.has(job)]
    print(f"{len(jobs) - len(left)} of {len(jobs)} runs are there")
    start = time.monotonic()
    # Fresh interpreters: a copy of one that has run torch can hang.
    pool = ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,))
    running: dict[Future[dict[str, Any]], Job] = {}
    while (left or running) and time.monotonic() - start < options.seconds:
        while left and len(running) < options.jobs:
            job = left.pop(0)
            running[pool.submit(work, options.runs / job.folder, job.config)] = job
        for future in wait(running, options.seconds - (time.monotonic() - start), FIRST_COMPLETED).done:
            job = running.pop(future)
            said = repr(future.exception())
            if not future.exception():
                results.add(job, future.result())
                scores = future.result()["scores"]
                said = f"{scores['log_likelihood']:.3f}, {scores['seconds']:.0f} s"
            print(f"{time.monotonic() - start:5.0f} s  {job.folder}: {said}; {len(left)} left", flush=True)
        results.write()
    for child in multiprocessing.active_children() if running else ():
        child.terminate()  # what it was at goes on from its last checkpoint
    pool.shutdown()


if __name__ == "__main__":
    main()

"""All shops, methods and seeds side by side, a process each on one thread: ``python -m bench.baskets FOLDER``.

A run lies in ``--runs``; what is finished there is not done again. ``results/baskets.json`` is written after every run
that ends, so that one can stop and go on: rows with ``dataset``, ``method``, the metrics, their deviation over seeds;
and for each shop what CPL makes of its items.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from torchcpl.files import read_json, write_json
from torchcpl.provenance import run_info
from torchcpl.sets import next_probs
from torchcpl.tables import summarise
from torchcpl.tasks.baskets import figures
from torchcpl.tasks.baskets.benchmark import BasketsBenchmark
from torchcpl.tasks.baskets.methods import CPLSets
from torchcpl.tasks.baskets.task import METHODS, BasketsConfig, BasketsTask, evaluate
from torchcpl.train import fit

BENCHMARK = BasketsBenchmark()
NONSYMMETRIC = {"split": "random", "valid_baskets": 300, "test_baskets": 2000}  # Gartrell et al. 2021
SIZE = {
    "feeding": 3.0,
    "apparel": 2.0,
    "bedding": 1.6,
    "gear": 1.6,
    "bath": 1.4,
    "health": 1.2,
}  # longest first


def jobs(folder: Path, seeds: int, only: list[str]) -> Iterator[tuple[str, BasketsConfig]]:
    """Where each run lies and its configuration, the most wanted first and of those the longest."""
    shops = sorted(path.name.removesuffix(".train.txt") for path in folder.glob("*.train.txt"))
    shops = [shop for shop in shops if not only or shop in only]
    shops.sort(key=lambda shop: -SIZE.get(shop, 0.5))

    def job(shop: str, method: str, seed: int, name: str = "", **more: Any) -> tuple[str, BasketsConfig]:
        config = BasketsConfig(source=str(folder / shop), method=method, seed=seed, **more)
        return f"{shop}{name}/{method}-{config.kind}-s{seed}", config

    yield from (job(shop, "cpl", seed) for shop in shops for seed in range(seeds))
    others = [method for method in METHODS if method not in ("cpl", "pointer")]
    yield from (job(shop, method, seed) for seed in range(seeds) for shop in shops for method in others)
    for method in ("cpl", "ndpp", "dpp") if "apparel" in shops else ():
        for seed in range(5):
            yield job("apparel", method, seed, "-random", **NONSYMMETRIC, split_seed=seed)
    less: dict[str, Any] = {"epochs": 20, "validate_every": 4}
    for seed in range(seeds):
        yield from (job(shop, "pointer", seed, **less) for shop in shops)
        yield from (job(shop, "cpl", seed, kind="lowrank") for shop in shops)


def work(path: Path, config: BasketsConfig) -> None:
    """Train, measure the test baskets, and leave ``scores.json`` in the run's folder."""
    start = time.monotonic()
    task = BENCHMARK.make_task(config)
    state = fit(task, path, resume=True, progress=False)
    trained = state["seconds"]
    run = BENCHMARK.read(path)
    _, model, _ = BENCHMARK.restore(run)
    began = time.monotonic()
    scores: dict[str, Any] = evaluate(model, task.reported)
    scores |= {"valid_log_likelihood": run.state["best"]["value"], "epoch": run.state["best"]["epoch"]}
    scores |= {"train_seconds": trained, "evaluate_seconds": time.monotonic() - began, "baskets": len(task.reported)}
    scores["items"] = task.baskets.num_items
    for name, reference in task.untrained().items() if config.method == "dpp" and config.seed == 0 else ():
        write_json(path / f"{name}.json", evaluate(reference, task.reported))
    if isinstance(model, CPLSets) and "/cpl-contextual-s0" in path.as_posix():
        write_json(path / "items.json", about_items(model, task))
    write_json(path / "scores.json", scores | {"seconds": time.monotonic() - start})


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


def collect(planned: dict[Path, BasketsConfig], out: Path) -> None:
    """The rows of all finished runs."""
    groups: dict[tuple[str, str], list[tuple[int, dict[str, Any]]]] = {}
    for path, config in planned.items():
        dataset = path.parent.name
        if (path / "scores.json").is_file():
            plain = config.method == "cpl" and config.kind == "lowrank"
            name = METHODS[config.method] + (" (lowrank)" if plain else "")
            groups.setdefault((dataset, name), []).append((config.seed, read_json(path / "scores.json")))
            for more in path.glob("I*.json"):  # independent items, item to item: not trained
                groups[dataset, more.stem] = [(0, read_json(more))]
    rows = [
        {"dataset": dataset, "method": method, **summarise([scores for _, scores in found])}
        | {"seeds": [seed for seed, _ in found]}
        for (dataset, method), found in sorted(groups.items())
    ]
    items = {path.parent.name: read_json(path / "items.json") for path in planned if (path / "items.json").is_file()}
    info = run_info(seeds=sorted({config.seed for config in planned.values()}), device=torch.device("cpu"))
    write_json(out, {"title": "Baskets, all shops", **info, "rows": rows, "items": items})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with NAME.train.txt, .valid.txt, .test.txt and .items.txt")
    parser.add_argument("--runs", type=Path, default=Path("runs/baskets"))
    parser.add_argument("--out", type=Path, default=Path("results/baskets.json"))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1e9, help="end after that; the same command goes on")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="these shops alone")
    options = parser.parse_args()
    planned = {options.runs / name: config for name, config in jobs(options.folder, options.seeds, options.only)}
    left = [path for path in planned if not (path / "scores.json").is_file()]
    start = time.monotonic()
    # Fresh interpreters: a copy of one that has run torch can hang.
    pool = ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,))
    running: dict[Any, Path] = {}
    while (left or running) and time.monotonic() - start < options.seconds:
        while left and len(running) < options.jobs:
            path = left.pop(0)
            running[pool.submit(work, path, planned[path])] = path
        for future in wait(running, options.seconds - (time.monotonic() - start), FIRST_COMPLETED).done:
            path = running.pop(future)
            problem = future.exception()
            scores = {} if problem else read_json(path / "scores.json")
            said = repr(problem) if problem else f"{scores['log_likelihood']:.3f}, {scores['seconds']:.0f} s"
            print(f"{time.monotonic() - start:5.0f} s  {path}: {said}; {len(left)} left", flush=True)
        collect(planned, options.out)
    for child in multiprocessing.active_children():
        child.terminate()  # what it was at goes on from its last checkpoint


if __name__ == "__main__":
    main()

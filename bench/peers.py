"""What people use now to take representatives out of a pile of vectors, beside `torchcpl.select`.

    pip install apricot-select pyversity kmedoids dppy    # the peers; none of them is needed by torchcpl
    python -m bench.peers --data FOLDER              # results/select-peers.json
    python -m bench.peers --data FOLDER --parts any --out results/select-any.json

FOLDER holds labelled vectors, ``NAME.npz`` with ``train``, ``train_labels``, ``test`` and ``test_labels``. Four parts:
``bags`` of three to ten classes of each set, CluF1; ``whole``, a test set as one pile; ``scale``, time and memory; and
``any``, bags of one to forty classes of any size.
Every method is a function of the rows (N, D) and of the number of picks, which those that choose it themselves ignore.
"""

from __future__ import annotations

import argparse
import json
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchcpl.files import read_json, write_json
from torchcpl.metrics import cluster_scores
from torchcpl.provenance import run_info
from torchcpl.select import select
from torchcpl.tasks.piles.data import digits, fixed_vectors, load_sets, wide_vectors

Array = NDArray[Any]
Method = Callable[[Array, int], Array]
SEED = 0
SELECT = "torchcpl.select"
PARTS = ("bags", "whole", "scale", "any")


def unit(x: Array) -> Array:
    """Rows of length one, after which Euclidean distance orders as cosine does."""
    return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)


def nearest_members(x: Array, labels: Array) -> Array:
    """Of every cluster the member nearest to its mean; label −1 is noise."""
    picks = []
    for label in np.unique(labels[labels >= 0]):
        members = np.flatnonzero(labels == label)
        picks.append(members[np.square(x[members] - x[members].mean(0)).sum(1).argmin()])
    return np.array(picks, dtype=np.int64)


# -------------------------------------------------------------------------------- not told how many


def silhouette(x: Array, k: int) -> Array:
    """k-means for 2 to 14 clusters, the number by the best silhouette."""
    from sklearn.cluster import KMeans
    from sklearn.metrics import silhouette_score

    tried = [KMeans(c, n_init=3, random_state=SEED).fit_predict(x) for c in range(2, min(15, len(x)))]
    valid = [labels for labels in tried if 1 < len(np.unique(labels)) < len(x)]
    return nearest_members(x, max(valid, key=lambda labels: silhouette_score(x, labels))) if valid else np.zeros(1, int)


def hdbscan(x: Array, k: int) -> Array:
    from sklearn.cluster import HDBSCAN

    return nearest_members(x, HDBSCAN(min_cluster_size=5, copy=True).fit_predict(x))


def affinity(x: Array, k: int) -> Array:
    from sklearn.cluster import AffinityPropagation

    found = AffinityPropagation(damping=0.8, max_iter=500, random_state=SEED).fit(x)
    return np.asarray(found.cluster_centers_indices_, dtype=np.int64)


# ------------------------------------------------------------------------------------ told how many


def kmeans(x: Array, k: int) -> Array:
    from sklearn.cluster import KMeans

    return nearest_members(x, KMeans(k, n_init=3, random_state=SEED).fit_predict(x))


def kmedoids(x: Array, k: int) -> Array:
    from kmedoids import fasterpam
    from sklearn.metrics import pairwise_distances

    found = fasterpam(pairwise_distances(x).astype(np.float32), k, random_state=SEED, n_cpu=1)
    return np.asarray(found.medoids, dtype=np.int64)


def facility_location(x: Array, k: int, optimizer: str = "lazy") -> Array:
    from apricot import FacilityLocationSelection

    chosen = FacilityLocationSelection(k, metric="cosine", optimizer=optimizer, random_state=SEED).fit(x)
    return np.asarray(chosen.ranking[:k], dtype=np.int64)


def pyversity(strategy: str) -> Method:
    """Relevance is nearness to the mean row, as nothing else is known of the items."""

    def method(x: Array, k: int) -> Array:
        from pyversity import diversify

        rows = unit(x).astype(np.float32)
        found = diversify(rows, rows @ unit(rows.mean(0, keepdims=True))[0], k, strategy=strategy, diversity=0.7)
        return np.asarray(found.indices, dtype=np.int64)

    return method


def k_dpp(x: Array, k: int) -> Array:
    """A sample of the k-DPP of cosines between rows, plus a little on the diagonal for more picks than columns."""
    from dppy.finite_dpps import FiniteDPP

    rows = unit(x).astype(np.float64)
    law = FiniteDPP("likelihood", L=rows @ rows.T + 0.01 * np.eye(len(rows)))
    return np.asarray(law.sample_exact_k_dpp(k, random_state=SEED), dtype=np.int64)


def chance(x: Array, k: int) -> Array:
    return np.random.default_rng(SEED).permutation(len(x))[:k]


def farthest(x: Array, k: int) -> Array:
    picks = [int(np.square(x - x.mean(0)).sum(1).argmin())]
    gap = np.full(len(x), np.inf)
    while len(picks) < k:
        gap = np.minimum(gap, np.square(x - x[picks[-1]]).sum(1))
        picks.append(int(gap.argmax()))
    return np.array(picks)


NOT_TOLD: dict[str, Method] = {
    "k-means + silhouette": silhouette,
    "HDBSCAN": hdbscan,
    "affinity propagation": affinity,
}
TOLD: dict[str, Method] = {
    "k-means": kmeans,
    "k-means, rows of length one": lambda x, k: kmeans(unit(x), k),
    "k-medoids (FasterPAM)": kmedoids,
    "facility location (apricot)": facility_location,
    "MMR (pyversity)": pyversity("mmr"),
    "MSD (pyversity)": pyversity("msd"),
    "DPP (pyversity)": pyversity("dpp"),
    "k-DPP (dppy)": k_dpp,
    "farthest point": farthest,
}


# ------------------------------------------------------------------------------------------- measuring


def bags(folder: str, count: int, out: dict[str, Any], write: Callable[[], None]) -> None:
    """CluF1 and error of the count on ``count`` bags of every set, all of its classes, and of digits."""
    sets = {name: one.whole for name, one in load_sets(folder).items()} | {"digits": digits()}
    for name, rows in sets.items():
        x, labels = (part[:count] for part in fixed_vectors(rows, 100))
        table = out.setdefault("bags", {}).setdefault(name, {})
        for method, pick in {**NOT_TOLD, **TOLD}.items():
            if table.get(method, {}).get("bags") == count:
                continue
            table[method] = {**scored(pick, x, labels), "bags": count}
            write()


def scored(pick: Method, x: Tensor, labels: Tensor) -> dict[str, float]:
    """Mean CluF1 and error of the count on bags (B, N, D) with labels (B, N), −1 where there is no row."""
    scores = []
    for values, label in zip(x, labels, strict=True):
        real = label >= 0
        k = len(label[real].unique())
        picks = torch.from_numpy(np.asarray(pick(values[real].numpy(), k), dtype=np.int64))
        scores.append(cluster_scores(picks.unsqueeze(0), label[real].unsqueeze(0)))
    return {key: float(torch.cat([s[key] for s in scores]).mean()) for key in ("clu_f1", "card_err")}


def blobs(count: int, items: int) -> tuple[Tensor, Tensor]:
    """scikit-learn's ``make_blobs`` in two columns, 2 to 8 centres and up to ``items`` rows: (B, N, 2), (B, N)."""
    from sklearn.datasets import make_blobs

    sizes = np.random.default_rng(SEED).integers(items // 4, items + 1, count)
    x, labels = torch.zeros(count, items, 2), torch.full((count, items), -1)
    for i, n in enumerate(sizes):
        values, classes = make_blobs(int(n), centers=2 + i % 7, random_state=i)
        x[i, :n], labels[i, :n] = torch.from_numpy(values), torch.from_numpy(classes)
    return x, labels


def any_bags(folder: str, count: int, out: dict[str, Any], write: Callable[[], None]) -> None:
    """CluF1 and error of the count where the size of a bag does not tell how many classes it holds.

    Of ``select`` and of who else is not told, on bags of at least 20 rows.
    """
    sets = load_sets(folder)
    rows = {"digits": digits(), "cifar100, unseen": sets["cifar100"].whole.classes(sets["cifar100"].unseen)}
    out["any"] = {}
    for items in (160, 400):
        drawn = {name: wide_vectors(one, 3 * count, items) for name, one in rows.items()}
        for name, (x, labels) in [*drawn.items(), ("blobs", blobs(count, items))]:
            enough = ((labels >= 0).sum(1) >= 20).nonzero().flatten()[:count]
            x, labels = x[enough], labels[enough]
            table = out["any"].setdefault(f"{name}, up to {items} rows", {})
            for method, pick in {SELECT: lambda x, k: select(x).indices.numpy(), **NOT_TOLD}.items():
                table[method] = {**scored(pick, x, labels), "bags": count}
                write()


def whole(folder: str, out: dict[str, Any], write: Callable[[], None]) -> None:
    """CIFAR-100's test set as one pile, 100 picks, in several orders of the rows: classes found, mean distance to the
    nearest pick, CPU seconds.
    """
    rows = load_sets(folder)["cifar100"].test
    x = (rows.values.float() * rows.scale + rows.shift).numpy()
    labels = np.repeat(np.arange(len(rows)), rows.count.numpy())
    methods: dict[str, tuple[Method, int]] = {
        "torchcpl.select, cosine": (lambda x, k: select(x, k, metric="cosine").indices.numpy(), 10),
        "k-means, rows of length one": (TOLD["k-means, rows of length one"], 10),
        "facility location (apricot), lazy": (facility_location, 3),
        "facility location (apricot), stochastic": (lambda x, k: facility_location(x, k, "stochastic"), 3),
        "k-medoids (FasterPAM), rows of length one": (lambda x, k: kmedoids(unit(x), k), 1),
        "random": (chance, 10),
        "farthest point": (farthest, 3),
    }
    out["whole"] = {}
    for name, (pick, orders) in methods.items():
        pick(x[::50], 5)  # what is loaded and compiled at the first use
        found, near, cpu = [], [], []
        for seed in range(orders):
            order = np.random.default_rng(seed).permutation(len(x))
            before = time.process_time()
            picks = order[pick(x[order], 100)]
            cpu.append(time.process_time() - before)
            found.append(len(set(labels[picks])))
            near.append(float((1 - unit(x) @ unit(x)[picks].T).min(1).mean()))
        row = {"classes": float(np.mean(found)), "each": found, "fewest": min(found), "most": max(found)}
        row |= {"cosine_distance": float(np.mean(near)), "cpu_seconds": float(np.mean(cpu)), "orders": orders}
        out["whole"][name] = row
        write()


def rows_of_scale(n: int) -> Array:
    """N × 64 rows of a mixture of a thousand components."""
    x = np.random.default_rng(SEED).normal(size=(n, 64)).astype(np.float32)
    return x + 4 * np.random.default_rng(1).normal(size=(1000, 64)).astype(np.float32)[np.arange(n) % 1000]


def one_of_scale(method: str, n: int, device: str | None) -> dict[str, Any]:
    """Seconds, CPU seconds and peak memory of one method on N rows, N/1000 picks (10 to 1,000)."""

    def ours(x: Array, k: int) -> Array:
        return select(x, k, device=device).indices.cpu().numpy()

    pick = {**NOT_TOLD, **TOLD, SELECT: ours}[method]
    pick(rows_of_scale(60), 5)  # what is loaded and compiled at the first use
    x, size = rows_of_scale(n), min(1000, max(10, n // 1000))
    before, start = time.process_time(), time.perf_counter()
    found = pick(x, size)
    seconds, cpu = time.perf_counter() - start, time.process_time() - before
    groups = len(set((found % 1000).tolist()))
    # Of this process alone: ru_maxrss starts at what the parent had.
    peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 2**20
    gpu = {"peak_gpu_gib": torch.cuda.max_memory_allocated() / 2**30} if device else {}
    return {"picks": len(found), "groups": groups, "seconds": seconds, "cpu_seconds": cpu, "peak_gib": peak, **gpu}


def scale(out: dict[str, Any], write: Callable[[], None], options: argparse.Namespace) -> None:
    """Every method on ever more rows, each in a process of its own, until one takes longer than the limit."""
    for method in options.methods:
        rows = out.setdefault("scale", {}).setdefault(f"{method} on {options.device}" if options.device else method, {})
        before = 0
        for n in options.sizes:
            if "failed" in rows.get(str(before), {}):
                rows[str(n)] = rows[str(before)]  # no less for more rows
            elif str(n) not in rows or options.again:
                said = ["--device", options.device] if options.device else []
                command = [sys.executable, "-m", "bench.peers", "--one", method, str(n), *said]
                command += ["--limit", str(options.limit)]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    slow = done.returncode == -signal.SIGXCPU
                    if not slow and "memory" not in done.stderr.lower():
                        raise RuntimeError(done.stderr)
                    rows[str(n)] = {"failed": f"> {options.limit} s" if slow else "> 8 GiB"}
                else:
                    rows[str(n)] = json.loads(done.stdout.strip().splitlines()[-1])
            before = n
            write()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS[:3])
    parser.add_argument("--bags", type=int, default=40)
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 1000, 10_000, 100_000, 1_000_000])
    parser.add_argument("--methods", nargs="+", default=[SELECT, *NOT_TOLD, *TOLD], help="of the part scale")
    parser.add_argument("--limit", type=int, default=60, help="CPU seconds of a method in the part scale")
    parser.add_argument("--again", action="store_true", help="also what the part scale has measured before")
    parser.add_argument("--device", help="where select computes in the part scale")
    parser.add_argument("--one", nargs=2, metavar=("METHOD", "N"), help="one measurement of the part scale, printed")
    parser.add_argument("--out", type=Path, default=Path("results/select-peers.json"))
    options = parser.parse_args()
    if options.one:
        resource.setrlimit(resource.RLIMIT_CPU, (options.limit, options.limit + 5))
        if not options.device:
            resource.setrlimit(resource.RLIMIT_AS, (8 * 2**30, 8 * 2**30))
        print(json.dumps(one_of_scale(options.one[0], int(options.one[1]), options.device)))
        return
    out: dict[str, Any] = read_json(options.out) if options.out.exists() else {}
    out.update(run_info(seeds=[SEED]))

    def write() -> None:
        write_json(options.out, out)

    if "bags" in options.parts:
        bags(options.data, options.bags, out, write)
    if "any" in options.parts:
        any_bags(options.data, options.bags, out, write)
    if "whole" in options.parts:
        whole(options.data, out, write)
    if "scale" in options.parts:
        scale(out, write, options)


if __name__ == "__main__":
    main()

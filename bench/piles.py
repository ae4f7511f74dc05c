"""Train the selector that ships, and its twins that never saw one of the sets: `results/piles.json`.

    python -m bench.piles --source FOLDER --out OUT --steps 1400
    python -m bench.piles --out OUT --summary results/piles.json

One training leaves out each of the sets, so that every set is tested by a model that never saw it; the tenth is the
model of the package. They run side by side on one GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchcpl.config import from_toml, override
from torchcpl.files import write_json
from torchcpl.provenance import run_info
from torchcpl.select import save_model
from torchcpl.tasks.piles.data import fixed_bags
from torchcpl.tasks.piles.task import Ahead, PilesConfig, PilesTask, count_classes, path
from torchcpl.train import fit

SETS = ("cifar100", "clinc150", "hwu64", "letter", "mnist", "omniglot_small", "spoken_digits", "texture", "usps")
RECIPE = Path("torchcpl/tasks/piles/recipes/general.toml")
BAGS = 100  # of each set in the final numbers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", help="folder of labelled .npz files")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1400, help="of each training")
    parser.add_argument("--names", nargs="+", default=["general", *SETS], help="general, or sets to leave out: a+b")
    parser.add_argument("--init", type=Path, help="folder of NAME.safetensors to start from")
    parser.add_argument("--options", default="{}", help="JSON of options other than the recipe's")
    parser.add_argument("--summary", type=Path, metavar="FILE.json", help="only put together what OUT holds")
    parser.add_argument("--plain", action="store_true", help="no CUDA graph, no drawing ahead")
    parser.add_argument("--tiny", action="store_true", help="a model and bags for a CPU, to see that it runs")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.summary:
        write_json(options.summary, summary(options.out))
    elif len(options.names) == 1:
        train(options)
    else:
        running = {name: _start(name, options.out) for name in options.names}
        for name, process in running.items():
            if process.wait():  # tried again the plain way
                print(f"{name} failed:\n{(options.out / f'{name}.log').read_text()[-800:]}", flush=True)
                running[name] = _start(name, options.out, "--plain")
        for name, process in running.items():
            process.wait()
            print((options.out / f"{name}.log").read_text()[-1500:])


def _start(name: str, out: Path, *more: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "bench.piles", *sys.argv[1:], "--names", name, *more]
    return subprocess.Popen(command, stdout=(out / f"{name}.log").open("a"), stderr=subprocess.STDOUT)


def train(options: argparse.Namespace) -> None:
    start, name, out = time.monotonic(), options.names[0], options.out
    left_out = () if name == "general" else tuple(name.split("+"))
    config = override(from_toml(PilesConfig, RECIPE), source=options.source, leave_out=left_out)
    config = override(config, epochs=1, steps=options.steps)
    if options.init:
        config = override(config, init=str(options.init / f"{name}.safetensors"))
    config = override(config, **json.loads(options.options))
    if options.tiny:
        small = {"dim": 32, "edge": 8, "layers": 2, "heads": 4, "items": 160, "large": 161, "batch_size": 4}
        config = override(config, **small, group=1, validation_bags=6)
    if options.plain:
        config = override(config, capture=False)
        Ahead.QUIET = 2**62
    task = PilesTask(config)
    plain = task.validate

    def validate(model: Any) -> dict[str, float]:
        print(f"{time.monotonic() - start:.0f} s, validating", flush=True)
        found = plain(model)
        save_model(
            out / f"{name}.safetensors", model.net, found["knob"], recipe="general", leave_out=" ".join(left_out)
        )
        shown = {key: round(value, 3) for key, value in found.items() if "rec" not in key and "prec" not in key}
        print(f"{time.monotonic() - start:.0f} s", json.dumps(shown), flush=True)
        task.latest = model  # type: ignore[attr-defined]
        return found

    task.validate = validate  # type: ignore[method-assign]
    state = fit(task, out / f"{name}-run{len(list(out.glob(f'{name}-run*')))}", progress=False)
    measured = paths(task, task.latest)  # type: ignore[attr-defined]
    np.savez_compressed(out / f"{name}.npz", **measured)
    keep = {key: state[key] for key in ("metrics", "seconds", "peak_mib", "step")}
    keep |= {"config": {key: getattr(config, key) for key in config.__dataclass_fields__}, "info": run_info(seeds=[0])}
    (out / f"{name}.json").write_text(json.dumps(keep, indent=1))
    print(f"{name}: done after {time.monotonic() - start:.0f} s", flush=True)


def summary(out: Path) -> dict[str, Any]:
    """Every set by the model that never saw it, digits and unseen CIFAR-100 classes by the one that ships."""
    names = ("general", *SETS)
    runs = {name: (json.loads((out / f"{name}.json").read_text()), np.load(out / f"{name}.npz")) for name in names}
    asked = {name: name for name in SETS} | {"digits": "general"}
    rows = {one: _scores(*runs[name], one) | {"model": name} for one, name in sorted(asked.items())}
    shipped = {one: _scores(*runs["general"], one) for one in ("cifar100", "digits")}
    mean = {key: float(np.mean([row[key] for row in rows.values()])) for key in ("clu_f1", "told", "card_err")}
    stops = [(runs[name][1][f"{one}.stop"][:, 1:], runs[name][1][f"{one}.classes"]) for one, name in asked.items()]
    said = np.concatenate([stop.ravel() for stop, _ in stops])
    right = np.concatenate([(np.arange(1, stop.shape[1] + 1) >= k[:, None]).ravel() for stop, k in stops])
    bins = np.minimum((said * 10).astype(int), 9)
    reliability = [
        {"said": float(said[here].mean()), "right": float(right[here].mean()), "count": int(here.sum())}
        for here in (bins == i for i in range(10))
    ]
    first = runs["general"][0]
    training = {"config": first["config"], "steps": first["step"], "seconds": first["seconds"], "info": first["info"]}
    return {
        "bags": BAGS, "sets": rows, "mean": mean, "shipped": shipped, "reliability": reliability, "training": training,
    }  # fmt: skip


def _scores(run: dict[str, Any], measured: Any, one: str) -> dict[str, float]:
    """At the threshold the run chose, and with the number of classes told."""
    k, new, stop = (measured[f"{one}.{key}"] for key in ("classes", "new", "stop"))
    reached = stop[:, 1:] >= run["metrics"]["knob"]
    length = np.where(reached.any(1), reached.argmax(1) + 1, new.shape[1])
    hits = new.cumsum(1)
    every = np.arange(len(k))
    return {
        "clu_f1": float((2 * hits[every, length - 1] / (length + k)).mean()),
        "told": float((hits[every, k - 1] / k).mean()),
        "card_err": float(np.abs(length - k).mean()),
        "stop_threshold": run["metrics"]["knob"],
    }


def paths(task: PilesTask, model: Any) -> dict[str, Any]:
    """Of every reported set and bag: the classes in it, which greedy pick hits a new one, P(stop) after each number."""
    found: dict[str, Any] = {}
    for name, rows in task.reported_rows().items():
        bags, parts = fixed_bags(rows, BAGS), []
        for d, labels in zip(bags.d.split(20), bags.labels.split(20), strict=True):
            d, labels = d.to(task.device), labels.to(task.device)
            with torch.no_grad():
                picks, stop = path(model.net(d, labels >= 0))
            hit = labels.gather(1, picks.clamp(min=0)).masked_fill(picks < 0, -1)  # (B, T) classes picked
            new = (hit.unsqueeze(2) == hit.unsqueeze(1)).tril(-1).any(-1).logical_not() & (hit >= 0)
            parts.append((count_classes(labels), new, stop))
        for key, column in zip(("classes", "new", "stop"), zip(*parts, strict=True), strict=True):
            found[f"{name}.{key}"] = torch.cat(column).cpu().numpy()
    return found


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()

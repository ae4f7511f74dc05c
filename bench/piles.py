"""Train the selector that ships, and its twins that never saw some of the sets: `results/piles.json`.

    python -m bench.piles --source FOLDER --out OUT --seconds 500

Three trainings leave out three sets each, so that every set is tested by a model that never saw it; the fourth is the
model of the package. They run side by side on one GPU; a pilot of 200 steps says how many steps fit into the time.
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
from torchcpl.provenance import run_info
from torchcpl.select import save_model
from torchcpl.tasks.piles.data import fixed_bags
from torchcpl.tasks.piles.task import Ahead, PilesConfig, PilesTask, count_classes, path
from torchcpl.train import fit

LEFT_OUT = {
    "general": (),
    "without-a": ("clinc150", "mnist", "letter"),
    "without-b": ("hwu64", "usps", "omniglot_small"),
    "without-c": ("cifar100", "spoken_digits", "texture"),
}
RECIPE = Path("torchcpl/tasks/piles/recipes/general.toml")
BAGS = 100  # of each set in the final numbers
VALIDATIONS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", required=True, help="folder of labelled .npz files")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--only", choices=tuple(LEFT_OUT), help="one of the trainings, in this process")
    parser.add_argument("--plain", action="store_true", help="no CUDA graph, no drawing ahead")
    parser.add_argument("--tiny", action="store_true", help="a model and bags for a CPU, to see that it runs")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.only:
        train(options)
        return
    start = time.monotonic()
    running = {name: _start(name, options.out) for name in LEFT_OUT}
    while any(process.poll() is None for process in running.values()):
        time.sleep(1)
        for name, process in running.items():
            # A failure at the start is tried again the plain way, in what time is left.
            if process.poll() and time.monotonic() - start < 0.4 * options.seconds:
                print(f"{name} failed:\n{(options.out / f'{name}.log').read_text()[-800:]}", flush=True)
                left = options.seconds - (time.monotonic() - start)
                running[name] = _start(name, options.out, "--plain", "--seconds", str(left))
    for name in LEFT_OUT:
        print((options.out / f"{name}.log").read_text()[-1500:])


def _start(name: str, out: Path, *more: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "bench.piles", *sys.argv[1:], "--only", name, *more]
    return subprocess.Popen(command, stdout=(out / f"{name}.log").open("a"), stderr=subprocess.STDOUT)


def train(options: argparse.Namespace) -> None:
    start, name, out = time.monotonic(), options.only, options.out
    config = override(from_toml(PilesConfig, RECIPE), source=options.source, leave_out=LEFT_OUT[name])
    if options.tiny:
        small = {"dim": 32, "edge": 8, "layers": 2, "heads": 4, "items": 160, "large": 160, "batch_size": 4}
        config = override(config, **small, group=1, validation_bags=6)
    if options.plain:
        config = override(config, capture=False)
        Ahead.QUIET = 2**62
    number = len(list(out.glob(f"{name}-pilot*")))
    speed = pilot(config, out / f"{name}-pilot{number}", 8 if options.tiny else 200)
    left = options.seconds - (time.monotonic() - start) - (20 if options.tiny else 80)  # to load, validate and measure
    steps = max(8, int(speed * left) // VALIDATIONS)
    config = override(config, epochs=VALIDATIONS, steps=steps, validate_every=1)
    print(f"{name}: {speed:.1f} steps a second, {VALIDATIONS * steps} steps", flush=True)
    task = PilesTask(config)
    plain = task.validate

    def validate(model: Any) -> dict[str, float]:
        found = plain(model)
        save_model(out / f"{name}.safetensors", model.net, found["knob"], training=json.dumps(run_info(seeds=[0])))
        shown = {key: round(value, 3) for key, value in found.items() if "rec" not in key and "prec" not in key}
        print(f"{time.monotonic() - start:.0f} s", json.dumps(shown), flush=True)
        (out / f"{name}.json").write_text(json.dumps({"metrics": found, "steps": VALIDATIONS * steps}))
        task.latest = model  # type: ignore[attr-defined]
        return found

    task.validate = validate  # type: ignore[method-assign]
    state = fit(task, out / f"{name}-run{number}", progress=False)
    measured = paths(task, task.latest)  # type: ignore[attr-defined]
    np.savez_compressed(out / f"{name}.npz", **measured)
    keep = {key: state[key] for key in ("metrics", "seconds", "peak_mib", "step")}
    keep |= {"config": {key: getattr(config, key) for key in config.__dataclass_fields__}, "info": run_info(seeds=[0])}
    (out / f"{name}.json").write_text(json.dumps(keep, indent=1))
    print(f"{name}: done after {time.monotonic() - start:.0f} s", flush=True)


def pilot(config: PilesConfig, folder: Path, steps: int) -> float:
    """Steps a second, of the last three quarters of a short run."""
    task = PilesTask(override(config, epochs=1, steps=steps, validation_bags=2))
    plain, marks = task.batch, []

    def batch(step: int) -> Any:
        marks.append(time.monotonic())
        return plain(step)

    task.batch = batch  # type: ignore[method-assign]
    fit(task, folder, progress=False)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    first = steps // 4
    return (steps - 1 - first) / (marks[-1] - marks[first])


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

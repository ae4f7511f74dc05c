"""Train the selector that ships, and its twins that never saw one of the sets: `results/piles.json`.

    python -m bench.piles --source FOLDER --out OUT --steps 1400
    python -m bench.piles --source FOLDER --out OUT --summary results/piles.json --weights WEIGHTS.safetensors

One training leaves out each of the sets, so that every set is tested by a model that never saw it; the tenth is the
model of the package. They run side by side on one GPU. With ``--init`` they go on from weights in a folder, and what is
tested is the mean of those before and after.

A model is too sure of itself on a kind of data it never saw. How much to take off the stop's logit is chosen on the
sets left out, for each on the eight others, for the model of the package on all nine.
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
from torch import Tensor

from torchcpl.config import from_toml, override
from torchcpl.encoders.distances import DistanceModel
from torchcpl.files import write_json
from torchcpl.provenance import run_info
from torchcpl.select import load_model, save_model
from torchcpl.tasks.piles.data import Rows, digits, fixed_bags, load_sets
from torchcpl.tasks.piles.task import SHIFTS, Ahead, PilesConfig, PilesTask, count_classes, path, shifted_length
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
    parser.add_argument("--weights", type=Path, help="with --summary: where to write the model of the package")
    parser.add_argument("--plain", action="store_true", help="no CUDA graph, no drawing ahead")
    parser.add_argument("--tiny", action="store_true", help="a model and bags for a CPU, to see that it runs")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.summary:
        write_json(options.summary, summary(options))
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
        save_model(out / f"{name}.safetensors", model.net, recipe="general", leave_out=" ".join(left_out))
        shown = {key: round(value, 3) for key, value in found.items() if "rec" not in key and "prec" not in key}
        print(f"{time.monotonic() - start:.0f} s", json.dumps(shown), flush=True)
        return found

    task.validate = validate  # type: ignore[method-assign]
    state = fit(task, out / f"{name}-run{len(list(out.glob(f'{name}-run*')))}", progress=False)
    keep = {key: state[key] for key in ("metrics", "seconds", "peak_mib", "step")}
    keep |= {"config": {key: getattr(config, key) for key in config.__dataclass_fields__}, "info": run_info(seeds=[0])}
    (out / f"{name}.json").write_text(json.dumps(keep, indent=1))
    print(f"{name}: done after {time.monotonic() - start:.0f} s", flush=True)


def summary(options: argparse.Namespace) -> dict[str, Any]:
    """Every set by the model that never saw it, digits and unseen CIFAR-100 classes by the one that ships."""
    sets, out = load_sets(options.source), options.out
    unseen = sets["cifar100"].whole.classes(sets["cifar100"].unseen)
    asked = {name: {name: sets[name].whole} for name in SETS} | {"general": {"digits": digits(), "cifar100": unseen}}
    nets = {name: averaged(name, out, options.init) for name in asked}
    found = {(name, one): measured(nets[name], rows) for name, given in asked.items() for one, rows in given.items()}
    errors = {name: np.array([scores(found[name, name], shift)["card_err"] for shift in SHIFTS]) for name in SETS}

    def shift(without: str) -> float:
        return SHIFTS[int(np.mean([row for name, row in errors.items() if name != without], 0).argmin())]

    own = {name: (name, name) for name in SETS} | {"digits": ("general", "digits")}
    rows = {one: {**scores(found[key], shift(one)), "shift": shift(one)} for one, key in sorted(own.items())}
    mean = {key: float(np.mean([row[key] for row in rows.values()])) for key in ("clu_f1", "told", "card_err")}
    chosen = shift("")
    if options.weights:
        nets["general"].count[-1].bias.data[2] += chosen
        save_model(options.weights, nets["general"], recipe="general", stop_shift=str(chosen))
    first = json.loads((out / "general.json").read_text())
    training = {"config": first["config"], "steps": first["step"], "seconds": first["seconds"], "info": first["info"]}
    return {
        "bags": BAGS, "sets": rows, "mean": mean,
        "shipped": {one: {**scores(found["general", one], chosen), "shift": chosen} for one in ("cifar100", "digits")},
        "reliability": reliability([(found[key], rows[one]["shift"]) for one, key in own.items()]),
        "training": training, "info": run_info(seeds=[0]),
    }  # fmt: skip


def averaged(name: str, out: Path, init: Path | None) -> DistanceModel:
    """The model of a training, its weights averaged with those it began with."""
    model = load_model(out / f"{name}.safetensors")[0]
    if init:
        before = load_model(init / f"{name}.safetensors")[0].state_dict()
        model.load_state_dict({key: (value + before[key]) / 2 for key, value in model.state_dict().items()})
    return model


@torch.no_grad()
def measured(model: DistanceModel, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """Of every bag the number of classes (B,), which greedy pick hits a new one (B, T), P(stop) (B, T+1)."""
    bags, parts = fixed_bags(rows, BAGS), []
    for d, labels in zip(bags.d.split(10), bags.labels.split(10), strict=True):
        picks, stop = path(model(d, labels >= 0))
        hit = labels.gather(1, picks.clamp(min=0)).masked_fill(picks < 0, -1)  # (B, T) classes picked
        new = (hit.unsqueeze(2) == hit.unsqueeze(1)).tril(-1).any(-1).logical_not() & (hit >= 0)
        parts.append((count_classes(labels), new, stop))
    k, new, stop = (torch.cat(column) for column in zip(*parts, strict=True))
    return k, new, stop


def scores(found: tuple[Tensor, Tensor, Tensor], shift: float) -> dict[str, float]:
    """With the stop's logit shifted, and with the number of classes told."""
    k, new, stop = found
    length, hits = shifted_length(stop, shift), new.cumsum(1)
    right = hits.gather(1, length.unsqueeze(-1) - 1).squeeze(-1)
    told = hits.gather(1, k.unsqueeze(-1) - 1).squeeze(-1)
    return {
        "clu_f1": float((2 * right / (length + k)).mean()),
        "told": float((told / k).mean()),
        "card_err": float((length - k).abs().float().mean()),
    }


def reliability(found: list[tuple[tuple[Tensor, Tensor, Tensor], float]]) -> list[dict[str, float]]:
    """P(stop) said after up to k picks, in tenths, and how often those were as many as there are classes."""
    said, right = [], []
    for (k, _, stop), shift in found:
        place = torch.arange(1, stop.shape[1])
        alive = place <= k.unsqueeze(-1)
        said.append((stop[:, 1:].double().clamp(1e-12, 1 - 1e-12).logit() + shift).sigmoid()[alive])
        right.append((place == k.unsqueeze(-1))[alive].double())
    p, hit = torch.cat(said), torch.cat(right)
    tenth = (10 * p).long().clamp(max=9)
    return [
        {"said": float(p[here].mean()), "right": float(hit[here].mean()), "count": int(here.sum())}
        for here in (tenth == i for i in range(10))
    ]


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()

"""Train the selector that ships, and its twins that never saw some of the sets: `results/piles.json`.

    python -m bench.piles --source FOLDER --out OUT --seconds 420
    python -m bench.piles --source FOLDER --out NEXT --init OUT --seconds 290 --options '{"lr": 5e-4}'
    python -m bench.piles --source FOLDER --out OUT [MORE ...] --summary results/piles.json --weights FILE.safetensors
    python -m bench.piles --source FOLDER --out OUT [MORE ...] --keep OLD.json --summary NEW.json --weights …

Every set is tested by a model that never saw it: ``--names`` are the sets that each model leaves out, by default five
folds of one or two unlike ones and ``general``, that of the package (a summary without it takes the weights there are).
All are trained at once, on the same bags, each on those that it may see. With ``--init`` a model goes on from the one
that left out the fewest sets, its own among them: so one that leaves out many is a common beginning of several.
With ``--keep`` the model of the package is the mean of those in OUT and MORE, and the twins are those of OLD.

A model is too sure of itself on a kind of data it never saw. Its stop is calibrated on the sets left out: for each on
the eight others, for the model of the package on all nine; and as much on piles of well separated groups, whose number
must stay right.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from torchcpl.checkpoints import load_checkpoint
from torchcpl.config import from_toml, override
from torchcpl.encoders.distances import DistanceModel, distances
from torchcpl.estimator import save_model
from torchcpl.files import write_json
from torchcpl.interactions import DenseCoverage
from torchcpl.metrics import cluster_scores
from torchcpl.provenance import run_info
from torchcpl.select import SHIPPED, load_model, median_length
from torchcpl.tasks.piles.data import MOST_GROUPS, Bags, Rows, digits, fixed_bags, load_sets, wide_vectors
from torchcpl.tasks.piles.task import (
    Ahead,
    PilesConfig,
    PilesModel,
    PilesTask,
    count_classes,
    first_picks,
    greedy_hazard,
    shifted_length,
)
from torchcpl.train import fit

FOLDS = ("cifar100+letter", "clinc150+mnist", "hwu64+texture", "spoken_digits+usps", "omniglot_small")
SETS = tuple(sorted(name for fold in FOLDS for name in fold.split("+")))
RECIPE = Path("torchcpl/tasks/piles/recipes/general.toml")
BAGS = 100  # of each set in the final numbers
CLEAN = (  # groups, members
    (1, 12), (1, 100), (1, 500), (2, 50), (2, 250), (3, 4), (3, 20), (3, 160), (4, 10), (5, 12), (5, 80), (6, 20),
    (8, 3), (8, 12), (10, 4), (12, 8), (15, 2), (20, 8), (25, 4), (30, 5),
)  # fmt: skip
F1_WORTH = 10.0  # as much error of the count as one of CluF1
CALIBRATION = ("temperature", "bias")
CALIBRATIONS = [(temperature, round(0.1 * bias, 1)) for temperature in (1.0, 0.7) for bias in range(-12, 28)]
TIMED = (40, 80)  # steps of a first run whose time says how many can be afforded
RESERVE = 40.0  # seconds kept for the validations and the start of the second run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", help="folder of labelled .npz files")
    parser.add_argument("--out", type=Path, nargs="+", required=True, help="folder to write; of --summary, all to read")
    parser.add_argument("--steps", type=int, help="of the training; by default as many as the seconds allow")
    parser.add_argument("--seconds", type=float, default=420.0, help="wall-clock limit of the training, all told")
    parser.add_argument("--names", nargs="+", default=["general", *FOLDS], help="general, or sets to leave out: a+b")
    parser.add_argument("--init", type=Path, help="folder of an earlier training to go on from")
    parser.add_argument("--options", default="{}", help="JSON of options other than the recipe's")
    parser.add_argument("--summary", type=Path, metavar="FILE.json", help="only put together what OUT holds")
    parser.add_argument("--weights", type=Path, help="with --summary: where to write the model of the package")
    parser.add_argument("--keep", type=Path, metavar="FILE.json", help="with --summary: one before, its twins stay")
    parser.add_argument("--plain", action="store_true", help="no CUDA graph, no drawing ahead")
    parser.add_argument("--tiny", action="store_true", help="a model and bags for a CPU, to see that it runs")
    options = parser.parse_args()
    if options.summary:
        write_json(options.summary, renewed(options) if options.keep else summary(options))
        return
    options.out[0].mkdir(parents=True, exist_ok=True)
    options.deadline = time.time() + options.seconds
    for plain in (options.plain, True):  # what fails with a CUDA graph is tried again without
        process = multiprocessing.get_context("spawn").Process(target=train, args=(options, plain))
        process.start()
        process.join()
        if not process.exitcode:
            return
        if options.deadline - time.time() < options.seconds / 2:  # what there is was saved at the last validation
            break
    raise SystemExit(f"the training failed with exit status {process.exitcode}")


# ---------------------------------------------------------------------------------------------- training


class Folds(nn.Module):
    """Models trained side by side on the same bags, each on those that it may see."""

    def __init__(self, config: PilesConfig, names: list[str]) -> None:
        super().__init__()
        self.names, self.models = names, nn.ModuleList(PilesModel(config) for _ in names)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        seen = batch["seen"].unbind(1)  # (B,) each
        losses = [model({**batch, "seen": own}) for model, own in zip(self.models, seen, strict=True)]
        first = {f"first {term}": loss for term, loss in losses[0].items()}
        return {"loss": torch.stack([one["loss"] for one in losses]).sum(), **first}


class FoldsTask(PilesTask):
    """All sets in training, with the share of the bags that each of the models may see."""

    def __init__(self, config: PilesConfig, names: list[str], out: Path, init: Path | None) -> None:
        super().__init__(config)
        self.names, self.out, self.init, self.start = names, out, init, time.monotonic()
        self.steps, self.marks = 0, dict[int, float]()
        left_out = [left_out_of(name) for name in names]
        if unknown := sorted(set().union(*left_out) - set(self.sets)):
            raise ValueError(f"names: expected general or some of {', '.join(self.sets)}, got {unknown[0]!r}")
        hidden = [[float(name in one) for one in left_out] for name in self.sets]
        self.hidden = torch.tensor(hidden, device=self.device).view(len(self.sets), len(names))  # (S, F)

    def build(self) -> Any:
        folds = Folds(self.config, self.names)
        if self.init:
            for name, one in zip(self.names, folds.models, strict=True):
                before = load_model(begun(self.init, name))[0].state_dict()
                one.get_submodule("net").load_state_dict(before)
        return folds

    def batch(self, step: int) -> dict[str, Tensor]:
        self.steps = step + 1
        if step in TIMED:  # just after the loop has waited for the device
            self.marks[step] = time.monotonic()
        return super().batch(step)

    @torch.no_grad()
    def draw(self, step: int) -> dict[str, Tensor]:
        batch = super().draw(step)
        batch["seen"] = batch.pop("drawn").float() @ self.hidden == 0  # (B, F)
        return batch

    def save(self, model: Any) -> None:
        """NAME.safetensors for each, and training.json."""
        for name, one in zip(self.names, model.models, strict=True):
            said = {"recipe": "general", "leave_out": " ".join(left_out_of(name))}
            save_model(self.out / f"{name}.safetensors", one.net, **said)
        seconds = round(time.monotonic() - self.start, 1)
        keep = {"models": self.names, "step": self.steps, "seconds": seconds, "config": asdict(self.config)}
        (self.out / "training.json").write_text(json.dumps(keep | {"info": run_info(seeds=[0])}, indent=1))

    def validate(self, model: Any) -> dict[str, float]:
        """Saves all models; the scores of the first."""
        self.save(model)
        found = super().validate(model.models[0])
        shown = {key: round(value, 3) for key, value in found.items() if "rec" not in key and "prec" not in key}
        print(f"{time.monotonic() - self.start:.0f} s", json.dumps(shown), flush=True)
        return found


def left_out_of(name: str) -> list[str]:
    return [] if name == "general" else name.split("+")


def begun(folder: Path, name: str) -> Path:
    """The model in ``folder`` that has seen most of what ``name`` may see, and nothing else."""
    found = {path: set(left_out_of(path.stem)) for path in sorted(folder.glob("*.safetensors"))}
    fitting = [path for path, out in found.items() if out >= set(left_out_of(name))]
    if not fitting:
        raise SystemExit(f"--init: expected a model for {name} in {folder}, got none that never saw what it leaves out")
    return min(fitting, key=lambda path: len(found[path]))


def train(options: argparse.Namespace, plain: bool) -> None:
    """All models of ``options.names``, until ``options.deadline`` at the latest."""
    config = override(from_toml(PilesConfig, RECIPE), source=options.source, validation_bags=20)
    # Every model is clipped for itself, nearly: the norm is over all of them.
    config = override(config, epochs=4, validate_every=1, clip=config.clip * len(options.names) ** 0.5)
    config = override(config, **json.loads(options.options))
    if options.tiny:
        small = {"dim": 32, "edge": 8, "layers": 2, "heads": 4, "items": 160, "large": 161, "batch_size": 4}
        config = override(config, **small, group=1, validation_bags=6)
    if plain:
        config = override(config, capture=False)
        Ahead.QUIET = 2**62
    task = FoldsTask(config, options.names, options.out[0], options.init)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        steps = options.steps or affordable(task, options.deadline, Path(folder) / "timed")
        task.config = config = override(config, steps=max(1, steps // config.epochs))
        timer = threading.Timer(options.deadline - time.time() - 10, os.kill, (os.getpid(), signal.SIGTERM))
        timer.daemon = True
        timer.start()
        try:
            state = fit(task, run, progress=False)
        except KeyboardInterrupt:  # the loop has saved what there was at the limit
            _, weights, state = load_checkpoint(run, "last")
            model = task.build()
            model.load_state_dict(weights)
            task.save(model)
        timer.cancel()
        history = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    keep = json.loads((options.out[0] / "training.json").read_text())
    keep |= {"history": history, **{key: state[key] for key in ("metrics", "seconds", "peak_mib", "step")}}
    (options.out[0] / "training.json").write_text(json.dumps(keep, indent=1))
    print(f"done: {state['step']} of {config.epochs * config.steps} steps in {state['seconds']:.0f} s", flush=True)


def affordable(task: FoldsTask, deadline: float, run: Path) -> int:
    """How many steps fit into the time that is left, by the time of some."""
    config, validate, (first, last) = task.config, task.validate, TIMED
    task.config = override(config, epochs=1, steps=last + 1)
    task.validate = lambda model: {task.metric: 0.0}  # type: ignore[method-assign]
    fit(task, run, progress=False)
    task.config, task.validate, task.ahead = config, validate, Ahead(task.draw)  # type: ignore[method-assign]
    each = (task.marks[last] - task.marks[first]) / (last - first)
    steps = max(last, int((deadline - time.time() - RESERVE) / each))
    print(f"{1000 * each:.1f} ms a step: {steps} steps", flush=True)
    return steps


# ---------------------------------------------------------------------------------------------- results


def summary(options: argparse.Namespace) -> dict[str, Any]:
    """Every set by a model that never saw it; digits and the classes set aside by the one that ships.

    The calibration of the stop is chosen on the sets left out, for each of these on the others: as much on bags of any
    composition as on the benchmark's, and as much on piles of well separated groups.
    """
    sets = load_sets(options.source)
    training = [(folder, json.loads((folder / "training.json").read_text())) for folder in options.out]
    nets = {name: load_model(folder / f"{name}.safetensors")[0] for folder, one in training for name in one["models"]}
    nets.setdefault("general", load_model(SHIPPED)[0])
    for net in nets.values():
        net.calibration.copy_(torch.tensor((1.0, 0.0)))
    fold = {one: name for name in nets for one in left_out_of(name)}
    if len(fold) < 2:
        raise SystemExit("--out: expected folders with models that leave sets out, to choose the calibration by")
    left_out = {name: (nets[fold[name]], sets[name].whole) for name in sorted(fold)}
    tested = left_out | {name: (nets["general"], rows) for name, rows in never_seen(sets).items()}
    narrow = {name: fixed_bags(rows, BAGS) for name, (_, rows) in tested.items()}
    anyhow = {name: any_bags(rows) for name, (_, rows) in tested.items()}
    found = {name: measured(net, narrow[name]) for name, (net, _) in tested.items()}
    wide = {name: measured(net, anyhow[name]) for name, (net, _) in tested.items()}
    clean = {name: [measured(net, bags) for bags in clean_piles()] for name, net in nets.items()}
    separated = {name: np.mean([lost(one) for one in each], 0) for name, each in clean.items()}
    missed = {name: lost(found[name], counted=True) + lost(wide[name]) for name in left_out}

    def choice(name: str) -> Calibration:
        others = np.mean([missed[other] for other in left_out if other != name], 0)
        return CALIBRATIONS[int((others + separated[fold.get(name, "general")]).argmin())]

    chosen = {name: choice(name) for name in tested}
    shipped = chosen["digits"]
    if options.weights:
        nets["general"].calibration.copy_(torch.tensor(shipped))
        save_model(options.weights, nets["general"], recipe="general")
    return {
        "bags": BAGS, "folds": fold, "calibration": dict(zip(CALIBRATION, shipped, strict=True)),
        "sets": {name: reported(net, narrow[name], chosen[name]) for name, (net, _) in tested.items()},
        "any": {name: reported(net, anyhow[name], chosen[name]) for name, (net, _) in tested.items()},
        "clean": counted(nets["general"], shipped),
        "reliability": {
            said: reliability([(each[name], chosen[name]) for name in each])
            for said, each in (("the benchmark's bags", found), ("any composition", wide))
        },
        "training": [trained(one) for _, one in training],
        "info": run_info(seeds=[0]),
    }  # fmt: skip


def renewed(options: argparse.Namespace) -> dict[str, Any]:
    """An earlier summary with another model of the package: the mean of those in the folders, calibrated as the former.

    What the twins have stays: their sets, and how reliable P(stop) is.
    """
    kept = json.loads(options.keep.read_text())
    general = mean_model([folder / "general.safetensors" for folder in options.out])
    shipped = tuple(kept["calibration"][name] for name in CALIBRATION)
    rows = never_seen(load_sets(options.source))
    own = {
        "sets": {name: reported(general, fixed_bags(one, BAGS), shipped) for name, one in rows.items()},
        "any": {name: reported(general, any_bags(one), shipped) for name, one in rows.items()},
    }
    if options.weights:
        save_model(options.weights, general, recipe="general")
    merged = {key: kept[key] | found for key, found in own.items()}
    training = [trained(json.loads((folder / "training.json").read_text())) for folder in options.out]
    new = [one for one in training if one not in kept["training"]]
    return kept | merged | {
        "clean": counted(general, shipped), "training": kept["training"] + new, "info": run_info(seeds=[0]),
    }  # fmt: skip


def mean_model(paths: list[Path]) -> DistanceModel:
    """The mean of the weights of models that go on from the same one."""
    models = [load_model(path)[0] for path in paths]
    states = [model.state_dict() for model in models]
    models[0].load_state_dict({name: torch.stack([one[name] for one in states]).mean(0) for name in states[0]})
    return models[0]


def trained(training: dict[str, Any]) -> dict[str, Any]:
    return {key: training[key] for key in ("models", "config", "step", "seconds", "info")}


def never_seen(sets: dict[str, Any]) -> dict[str, Rows]:
    """What the model of the package never saw: digits, and the classes set aside of the larger sets."""
    parts = {name: one for name, one in sets.items() if set(one.unseen) - set(one.seen)}
    return {"digits": digits(), **{f"{name}, unseen": one.whole.classes(one.unseen) for name, one in parts.items()}}


def any_bags(rows: Rows) -> Bags:
    return bags_of(*wide_vectors(rows, BAGS, 160, seed=3))


def counted(model: DistanceModel, calibration: Calibration) -> dict[str, dict[str, float]]:
    """The scores on well separated groups, by their number and size."""
    piles = zip(CLEAN, clean_piles(), strict=True)
    return {f"{k} of {n}": reported(model, bags, calibration) for (k, n), bags in piles}


def bags_of(x: Tensor, labels: Tensor) -> Bags:
    return Bags(distances(x), labels)


@cache
def clean_piles() -> list[Bags]:
    """Four piles each of well separated groups, of 4 to 64 columns."""
    found = []
    for groups, members in CLEAN:
        rng, labels = np.random.default_rng([groups, members]), np.repeat(np.arange(groups), members)
        piles = [
            rng.normal(size=(len(labels), width)) + 12 * rng.normal(size=(groups, width))[labels]
            for width in (4, 8, 16, 64)
        ]
        x = torch.stack([F.pad(torch.from_numpy(one).float(), (0, 64 - one.shape[1])) for one in piles])
        found.append(bags_of(x, torch.from_numpy(labels).expand(len(piles), -1)))
    return found


Calibration = tuple[float, float]


@dataclass(frozen=True)
class Found:
    """Greedy picks in bags, and what the stop's logit is made of after each of them, before it is calibrated."""

    k: Tensor  # (B,) how many classes there are
    new: Tensor  # (B, T) whether a pick hits a new one
    stop: Tensor  # (B, T) the stop's logit
    others: Tensor  # (B, T) logsumexp of those of the items left

    def hazard(self, calibration: Calibration) -> Tensor:
        """The logit of P(stop) after each pick (B, T)."""
        temperature, bias = calibration
        return (self.stop / temperature + bias - self.others).clamp(-50, 50)


@torch.no_grad()
def measured(model: DistanceModel, bags: Bags) -> Found:
    """Of models that are not calibrated yet."""
    parts = []
    for d, labels in zip(bags.d.split(10), bags.labels.split(10), strict=True):
        pot = model(d, labels >= 0)
        picks, hazard = greedy_hazard(pot, MOST_GROUPS)
        assert isinstance(pot.interaction, DenseCoverage)
        assert pot.interaction.stop_row is not None
        stop = pot.stop.unsqueeze(-1) + pot.interaction.stop_row.gather(1, picks.clamp(min=0)).cumsum(-1)
        hit = labels.gather(1, picks.clamp(min=0)).masked_fill(picks < 0, -1)  # (B, T) classes picked
        new = (hit.unsqueeze(2) == hit.unsqueeze(1)).tril(-1).any(-1).logical_not() & (hit >= 0)
        parts.append((count_classes(labels), new, stop, stop - hazard))
    return Found(*(torch.cat(column) for column in zip(*parts, strict=True)))


@torch.no_grad()
def reported(model: DistanceModel, bags: Bags, calibration: Calibration) -> dict[str, float]:
    """Scores of picks as ``select`` makes them with a calibration of the stop, and with the number of classes told."""
    model.calibration.copy_(torch.tensor(calibration))
    rows = []
    for d, labels in zip(bags.d.split(10), bags.labels.split(10), strict=True):
        pot = model(d, labels >= 0)
        picks, hazard = greedy_hazard(pot, MOST_GROUPS)
        own = cluster_scores(first_picks(pot, picks, shifted_length(hazard, 0.0)), labels)
        told = cluster_scores(first_picks(pot, picks, count_classes(labels)), labels)
        rows.append(torch.stack([own["clu_f1"], told["clu_f1"], own["card_err"]], 1))
    scores = dict(zip(("clu_f1", "told", "card_err"), torch.cat(rows).mean(0).tolist(), strict=True))
    return scores | dict(zip(CALIBRATION, calibration, strict=True))


def lost(found: Found, counted: bool = False) -> NDArray[Any]:
    """(calibrations,) what is to be small in their choice: CluF1 that is missing, and the error of the count.

    Of greedy picks, not refined: as good for the choice, and faster.
    """
    k, hits, rows = found.k, found.new.cumsum(1), []
    for calibration in CALIBRATIONS:
        length = median_length(F.pad(found.hazard(calibration).sigmoid(), (1, 0)))
        right = hits.gather(1, length.unsqueeze(-1) - 1).squeeze(-1)
        error = (length - k).abs().float().mean() if counted else 0.0
        rows.append(float(F1_WORTH * (1 - (2 * right / (length + k)).mean()) + error))
    return np.array(rows)


def reliability(found: list[tuple[Found, Calibration]]) -> list[dict[str, float]]:
    """P(stop) said after up to k picks, in tenths, and how often those were as many as there are classes."""
    said, right = [], []
    for one, calibration in found:
        logits, k = one.hazard(calibration), one.k.unsqueeze(-1)
        place = torch.arange(1, logits.shape[1] + 1)
        said.append(logits.sigmoid()[place <= k])
        right.append((place == k)[place <= k].double())
    p, hit = torch.cat(said), torch.cat(right)
    tenth = (10 * p).long().clamp(max=9)
    return [
        {"said": float(p[here].mean()), "right": float(hit[here].mean()), "count": int(here.sum())}
        for here in (tenth == i for i in range(10))
        if here.any()
    ]


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()

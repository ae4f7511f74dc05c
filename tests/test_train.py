"""The training loop against a plain one, and against kill -9, Ctrl-C, NaN and damaged files.

The functions named `run_…` are what the tests run in processes of their own.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchcpl import train
from torchcpl.checkpoints import CheckpointError, load_checkpoint, read_history
from torchcpl.config import TrainConfig, from_toml, option, override
from torchcpl.files import read_json
from torchcpl.train import NonFiniteLoss, device_of, fit, learning_rate

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
ROOT = str(Path(__file__).parents[1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToyConfig(TrainConfig):
    epochs: int = option(3, "epochs")
    lr: float = option(0.01, "rate")
    batch_size: int = option(8, "batch")
    checkpoint_seconds: float = option(0.0, "every validation")
    device: str = option("cpu", "device", choices=("auto", "cpu", "cuda"))
    precision: str = option("32-true", "precision", choices=("auto", "32-true", "bf16-mixed"))
    width: int = option(6, "width")
    dropout: float = option(0.3, "dropout")


class ToyModel(nn.Module):
    """A small network with dropout (random state) and batch norm (buffers); ``fault`` spoils what it says."""

    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(config.width) if config.devices == 1 else nn.Identity()
        self.first = nn.Linear(4, config.width)
        self.rest = nn.Sequential(norm, nn.ReLU(), nn.Dropout(config.dropout), nn.Linear(config.width, 1))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, batch: tuple[Tensor, Tensor, str]) -> dict[str, Tensor]:
        x, y, fault = batch
        error = (self.rest(self.first(x)).squeeze(-1) - y).square().mean()
        small = self.first.bias.square().sum()
        if fault == "loss":
            small = small * torch.nan
        if fault == "gradient":  # sqrt has no derivative at 0
            small = small + (self.first.bias * 0).sum().sqrt()
        return {"loss": error + 0.1 * small, "error": error, "small": small}


class Toy:
    metric = "error"
    higher_is_better = False
    capturable = True
    steps_per_epoch = 4

    def __init__(self, config: ToyConfig, at: dict[int, Callable[[], Any]] | None = None) -> None:
        self.config = config
        self.at = at or {}  # what to do when a batch is asked for

    def build(self) -> ToyModel:
        return ToyModel(self.config)

    def draw(self, number: int, rows: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 * self.config.seed + number)
        x = torch.randn(rows, 4, generator=generator)
        y = x.prod(-1) + 0.1 * torch.randn(rows, generator=generator)
        device = device_of(self.config)
        return x.to(device), y.to(device)

    def batch(self, step: int) -> tuple[Tensor, Tensor, str]:
        fault = self.at[step]() if step in self.at else ""
        return *self.draw(step, self.config.batch_size), fault or ""

    def validate(self, model: nn.Module) -> dict[str, float]:
        assert not model.training
        assert not torch.is_grad_enabled()
        x, y = self.draw(-1, 32)
        found = {name: float(value) for name, value in model((x, y, "")).items()}
        return {"error": found["error"], "odd": float("inf")}


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def weights_of(run: Path, which: str) -> dict[str, Tensor]:
    return load_checkpoint(run, which).weights


def assert_same_run(run: Path, other: Path) -> None:
    """Bit for bit the same weights and optimiser; the same history but for the time taken."""
    for which in ("best", "last"):
        mine, theirs = weights_of(run, which), weights_of(other, which)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine), which
        assert load_checkpoint(run, which).state["step"] == load_checkpoint(other, which).state["step"]
    assert timeless(read_history(run)) == timeless(read_history(other))
    states = [torch.load(r / "last" / "optimizer.pt", weights_only=True)["optimizer"]["state"] for r in (run, other)]
    for mine, theirs in zip(*(s.values() for s in states), strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == sorted(
        os.path.basename(os.readlink(run / which)) for which in ("best", "last")
    )


def timeless(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in record.items() if name != "seconds"} for record in history]


def plain_loop(
    config: ToyConfig, steps: int, ranks: int = 1, toy: type[Toy] = Toy
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights, and their average, by the loop one would write without any of this."""
    task = toy(config)
    torch.manual_seed(config.seed)
    model = task.build()
    average = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(config.seed)
    kind = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=config.lr, weight_decay=config.weight_decay)
    warmup = int(config.warmup * steps)
    schedules: list[Any] = [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: (t + 1) / max(warmup, 1))]
    if config.schedule == "cosine":
        schedules += [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps - warmup)]
    else:
        schedules += [torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)]
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, schedules, [warmup]) if warmup else schedules[1]
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(ranks):
            (model(task.batch(step * ranks + rank))["loss"] / ranks).backward()
        if config.clip:
            nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        schedule.step()
        decay = min(config.ema, (1 + step) / (10 + step))
        for name, tensor in model.state_dict().items():
            mixed = tensor.is_floating_point()
            average[name] = decay * average[name] + (1 - decay) * tensor if mixed else tensor.clone()
    return model.state_dict(), average


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optimizer": "adamw", "weight_decay": 0.1, "schedule": "cosine"},
        {"weight_decay": 0.1, "clip": 0.05, "ema": 0.9},
        {"schedule": "cosine", "warmup": 0.25, "ema": 0.3, "validate_every": 2},
    ],
)
def test_equals_a_plain_loop(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = override(ToyConfig(), **changes)
    state = fit(Toy(config), tmp_path / "run", progress=False)
    weights, average = plain_loop(config, 12)
    wanted = average if config.ema else weights
    found = weights_of(tmp_path / "run", "last")
    assert found.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-5, atol=1e-6)
    assert (state["step"], state["epoch"], state["finished"]) == (12, 3, True)
    # What was validated and saved is the same thing.
    model = ToyModel(config)
    model.load_state_dict(found)
    with torch.no_grad():
        assert Toy(config).validate(model.eval())["error"] == state["metrics"]["error"]


class SharedModel(ToyModel):
    """A layer under two names, and a buffer that is replaced, not written into."""

    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config)
        self.again = self.first
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, batch: tuple[Tensor, Tensor, str]) -> dict[str, Tensor]:
        self.seen = self.seen + self.training
        return super().forward(batch)


class SharedToy(Toy):
    capturable = False

    def build(self) -> SharedModel:
        return SharedModel(self.config)


def test_shared_weights_are_averaged_once_and_replaced_buffers_too(tmp_path: Path) -> None:
    config = ToyConfig(ema=0.9)
    fit(SharedToy(config), tmp_path / "run", progress=False)
    _, wanted = plain_loop(config, 12, toy=SharedToy)
    found = weights_of(tmp_path / "run", "last")
    assert found.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA: captured steps")
@pytest.mark.parametrize("changes", [{}, {"clip": 0.05, "ema": 0.9, "schedule": "cosine"}])
def test_captured_steps_are_the_same_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    replayed: list[Any] = []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: (replayed.append(graph), replay(graph)))
    config = override(ToyConfig(device="cuda"), **changes)
    odd = {7: lambda: "odd"}  # a batch that is not like the one that was captured
    fit(Toy(config, odd), tmp_path / "captured", progress=False)
    assert len(replayed) == 12 - train.WARM_UPS - len(odd)
    fit(Toy(override(config, capture=False), odd), tmp_path / "eager", progress=False)
    assert len(replayed) == 12 - train.WARM_UPS - len(odd)
    for which in ("best", "last"):
        mine, theirs = (weights_of(tmp_path / name, which) for name in ("captured", "eager"))
        assert all(torch.equal(mine[name], theirs[name]) for name in mine), which


def test_learning_rate() -> None:
    config = TrainConfig(lr=2.0, schedule="cosine", warmup=0.2)
    rates = [learning_rate(config, step, 10) for step in range(10)]
    assert rates[:3] == [1.0, 2.0, 2.0]
    assert rates[6] == pytest.approx(1.0)
    assert rates[9] == pytest.approx(1 + torch.cos(torch.tensor(7 * torch.pi / 8)).item())
    assert all(a >= b for a, b in itertools.pairwise(rates[1:]))
    assert [learning_rate(TrainConfig(lr=0.5), step, 10) for step in range(10)] == [0.5] * 10
    assert learning_rate(TrainConfig(lr=1.0, warmup=1.0), 9, 10) == 1.0


def test_a_run_and_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "some-run"
    config = ToyConfig(epochs=5, validate_every=2)
    monkeypatch.setenv("TTY_INTERACTIVE", "1")
    state = fit(Toy(config), run)
    out, shown = capsys.readouterr()
    assert not out
    assert all(word in shown for word in ("some-run", "5/5", "loss", "error", "steps/s"))
    names = {"config.toml", "info.json", "history.jsonl", "tensorboard", "checkpoints", "best", "last"}
    assert {path.name for path in run.iterdir()} == names
    assert from_toml(ToyConfig, run / "config.toml") == config
    assert read_json(run / "info.json")["seeds"] == [0]
    assert {path.name for path in (run / "best").iterdir()} == {"model.safetensors", "config.toml", "state.json"}
    history = read_history(run)
    assert [(record["epoch"], record["step"]) for record in history] == [(2, 8), (4, 16), (5, 20)]
    assert state["metrics"] == history[-1]["metrics"]
    assert history[-1]["metrics"]["odd"] is None
    assert set(history[-1]["losses"]) == {"loss", "error", "small"}
    best = min(history, key=lambda record: record["metrics"]["error"])
    assert state["best"] == {
        "epoch": best["epoch"], "step": best["step"], "value": best["metrics"]["error"], "metrics": best["metrics"]
    }  # fmt: skip
    checkpoint = load_checkpoint(run)
    assert checkpoint.state["step"] == best["step"]
    assert from_toml(ToyConfig, checkpoint.config) == config
    assert 0 < checkpoint.state["seconds"] <= state["seconds"]


def test_best_goes_by_the_metric(tmp_path: Path) -> None:
    class Scripted(Toy):
        def __init__(self, values: list[float], higher: bool) -> None:
            super().__init__(ToyConfig(epochs=len(values)))
            self.values, self.higher_is_better = iter(values), higher

        def validate(self, model: nn.Module) -> dict[str, float]:
            return {"error": next(self.values)}

    nan = float("nan")
    cases: list[tuple[list[float], bool, int]] = [
        ([1, 3, 3, 2], True, 2),
        ([3, 1, 2, 1], False, 2),
        ([nan, nan, 5, 4], True, 3),
        ([nan, nan], False, 1),
    ]
    for number, (values, higher, epoch) in enumerate(cases):
        state = fit(Scripted(values, higher), tmp_path / str(number), progress=False)
        assert state["best"]["epoch"] == epoch
        assert load_checkpoint(tmp_path / str(number)).state["epoch"] == epoch


@pytest.mark.parametrize("device", DEVICES)
def test_seeds_make_runs_repeatable(tmp_path: Path, device: str) -> None:
    config = ToyConfig(device=device)
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        torch.manual_seed(time.time_ns() % 1000)
        fit(Toy(override(config, seed=seed)), tmp_path / name, progress=False)
    assert_same_run(tmp_path / "a", tmp_path / "b")
    assert not torch.equal(
        weights_of(tmp_path / "a", "last")["first.weight"], weights_of(tmp_path / "c", "last")["first.weight"]
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("step", [0, 5, 7, 11])
def test_ctrl_c_and_resume(tmp_path: Path, device: str, step: int) -> None:
    config = ToyConfig(device=device, ema=0.9, schedule="cosine", checkpoint_seconds=1000.0)
    fit(Toy(config), tmp_path / "whole", progress=False)
    run = tmp_path / "parts"
    before = signal.getsignal(signal.SIGINT)
    if step == 11:  # after the last step there is nothing left to stop
        fit(Toy(config, {step: interrupt}), run, progress=False)
    else:
        with pytest.raises(KeyboardInterrupt, match=f"after step {step + 1} of 12; --resume continues .*parts"):
            fit(Toy(config, {step: interrupt}), run, progress=False)
        assert load_checkpoint(run, "last").state["step"] == step + 1
        assert (run / "best").exists() == (step >= 3)
        torch.manual_seed(5)
    assert signal.getsignal(signal.SIGINT) is before
    fit(Toy(config), run, resume=True, progress=False)
    assert_same_run(run, tmp_path / "whole")


def test_sigterm_saves_as_ctrl_c_does(tmp_path: Path) -> None:
    config, run = ToyConfig(checkpoint_seconds=1000.0), tmp_path / "parts"
    fit(Toy(config), tmp_path / "whole", progress=False)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # or a loop that does not listen ends the tests
    try:
        with pytest.raises(KeyboardInterrupt, match="after step 6 of 12"):
            fit(Toy(config, {5: lambda: os.kill(os.getpid(), signal.SIGTERM)}), run, progress=False)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
    fit(Toy(config), run, resume=True, progress=False)
    assert_same_run(run, tmp_path / "whole")


def files_of(run: Path) -> dict[Path, bytes]:
    """All but TensorBoard's, which a thread of its own writes when it likes."""
    found = (path for path in run.rglob("*") if path.is_file() and path.parent.name != "tensorboard")
    return {path: path.read_bytes() for path in found}


def test_one_process_at_a_time(tmp_path: Path) -> None:
    config, run = ToyConfig(), tmp_path / "run"

    def another() -> None:
        before = files_of(run)
        for resume in (True, False):
            with pytest.raises(CheckpointError, match=f"run is in use by process {os.getpid()}"):
                fit(Toy(config), run, resume=resume, progress=False)
        assert files_of(run) == before

    fit(Toy(config, {0: another, 6: another}), run, progress=False)
    fit(Toy(config), tmp_path / "whole", progress=False)
    assert_same_run(run, tmp_path / "whole")
    assert not (run / "lock").exists()


def test_the_lock_of_a_dead_process_blocks_nobody(tmp_path: Path) -> None:
    config, run = ToyConfig(), tmp_path / "run"
    run.mkdir()
    (run / "lock").write_text("process 1")
    fit(Toy(config), run, progress=False)
    assert not (run / "lock").exists()


def test_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    def twice() -> None:
        interrupt()
        interrupt()

    config = ToyConfig()
    fit(Toy(config), tmp_path / "whole", progress=False)
    with pytest.raises(KeyboardInterrupt) as error:
        fit(Toy(config, {6: twice}), tmp_path / "run", progress=False)
    assert str(error.value) == ""
    assert load_checkpoint(tmp_path / "run", "last").state["step"] == 4
    fit(Toy(config), tmp_path / "run", resume=True, progress=False)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_best_without_checkpoint_yet(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        fit(Toy(ToyConfig(), {1: interrupt}), tmp_path / "run", progress=False)
    with pytest.raises(CheckpointError, match="best: no such checkpoint, training stopped before the first one"):
        load_checkpoint(tmp_path / "run")


def test_curves_have_no_doubles_after_resume(tmp_path: Path) -> None:
    events = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")

    def die() -> None:
        raise MemoryError("no more")

    config = ToyConfig(checkpoint_seconds=1000.0)
    with pytest.raises(MemoryError):
        fit(Toy(config, {9: die}), tmp_path / "run", progress=False)
    assert load_checkpoint(tmp_path / "run").state["step"] in (4, 8)  # saved on the way out
    fit(Toy(config), tmp_path / "run", resume=True, progress=False)
    curves = events.EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    history = read_history(tmp_path / "run")
    for tag, key in (("validation/error", "metrics"), ("train/error", "losses")):
        curve = curves.Scalars(tag)
        assert [point.step for point in curve] == [4, 8, 12]
        assert [point.value for point in curve] == pytest.approx([record[key]["error"] for record in history])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("loss", r"epoch 2, step 6 \(from 0\): loss loss, small; gradient of first\.bias \(1 of 7\)"),
        ("gradient", r"epoch 2, step 6 \(from 0\): gradient of first\.bias \(1 of 7\)"),
    ],
)
def test_not_finite_says_where(tmp_path: Path, device: str, fault: str, message: str) -> None:
    run = tmp_path / "run"
    with pytest.raises(NonFiniteLoss, match=message) as error:
        fit(Toy(ToyConfig(device=device), {6: lambda: fault}), run, progress=False)
    assert f"{run / 'last'} is finite" in str(error.value)
    checkpoint = load_checkpoint(run, "last")
    assert checkpoint.state["step"] == 4
    assert all(bool(tensor.isfinite().all()) for tensor in checkpoint.weights.values())
    # What went wrong goes wrong again, at the same place.
    with pytest.raises(NonFiniteLoss, match=message):
        fit(Toy(ToyConfig(device=device), {6: lambda: fault}), run, resume=True, progress=False)


@pytest.mark.parametrize("fault", ["loss", "gradient"])
def test_a_late_look_finds_the_first_bad_step(tmp_path: Path, fault: str) -> None:
    """On CUDA a look is taken once in many steps, when all that follows has gone bad as well."""
    fabric = importlib.import_module("lightning_fabric").Fabric(accelerator="cpu", devices=1)
    loop = train._Loop(fabric, Toy(ToyConfig(), {6: lambda: fault}), tmp_path, None)
    for step in range(9):
        loop._step(step)
        loop.done = step + 1
        if step == 3:
            loop._check()
    with pytest.raises(NonFiniteLoss) as error:
        loop._check()
    said = "loss loss, small; gradient" if fault == "loss" else "gradient"
    assert f"not finite in epoch 2, step 6 (from 0): {said} of first.bias (1 of 7);" in str(error.value)


def test_what_a_model_refuses_says_when(tmp_path: Path) -> None:
    def refuse() -> None:
        raise ValueError("unary: expected no NaN")

    task = Toy(ToyConfig())
    model = task.build()
    task.build = lambda: model  # type: ignore[method-assign]
    task.at = {5: lambda: model.register_forward_pre_hook(lambda *_: refuse()) and ""}
    with pytest.raises(ValueError, match=r"epoch 2, step 5 \(from 0\): unary: expected no NaN"):
        fit(task, tmp_path / "run", progress=False)


def test_no_more_processes_than_the_machine_has(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="devices = 100000: expected at most"):
        fit(Toy(ToyConfig(devices=100_000)), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_a_parameter_that_is_not_finite_is_not_saved(tmp_path: Path) -> None:
    task = Toy(ToyConfig())
    model = task.build()
    task.build = lambda: model  # type: ignore[method-assign]

    def spoil() -> None:  # a parameter that neither the loss nor its gradient shows
        model.unused.data[1] = torch.inf

    task.at = {7: spoil}
    with pytest.raises(NonFiniteLoss, match=r"epoch 2, step 7 \(from 0\): parameter unused \(1 of 7\) after step 7;"):
        fit(task, tmp_path / "run", progress=False)
    assert load_checkpoint(tmp_path / "run", "last").state["step"] == 4
    model.unused.data[1] = 0
    task.at = {0: spoil}
    with pytest.raises(NonFiniteLoss, match="there is no checkpoint yet"):
        fit(task, tmp_path / "other", progress=False)
    assert not (tmp_path / "other" / "last").exists()


def test_the_run_folder_must_fit(tmp_path: Path) -> None:
    run, config = tmp_path / "run", ToyConfig()
    finished = fit(Toy(config), run, resume=True, progress=False)  # nothing to resume: from the start
    with pytest.raises(CheckpointError, match=r"run is not empty \(it has best, checkpoints.*--resume"):
        fit(Toy(config), run, progress=False)
    with pytest.raises(CheckpointError, match=r"another configuration.*\(epochs: 3 -> 4, lr: 0\.01 -> 0\.02\)"):
        fit(Toy(override(config, epochs=4, lr=0.02)), run, resume=True, progress=False)

    class Untouched(Toy):
        def build(self) -> ToyModel:
            raise AssertionError("a finished run is not built again")

    files = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert fit(Untouched(config), run, resume=True, progress=False) == finished
    assert files == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("precious")
    with pytest.raises(CheckpointError, match=r"other is not a run: it has no config\.toml"):
        fit(Toy(config), tmp_path / "other", resume=True, progress=False)
    with pytest.raises(CheckpointError, match="is a file"):
        fit(Toy(config), tmp_path / "other" / "thesis.txt", progress=False)
    assert (tmp_path / "other" / "thesis.txt").read_text() == "precious"
    with pytest.raises(RuntimeError, match="negative dimension"):
        fit(Toy(override(config, width=-1)), tmp_path / "new", progress=False)
    assert not (tmp_path / "new").exists()  # or it would be in the way of the next attempt


def test_what_a_task_must_give(tmp_path: Path) -> None:
    class Nameless(Toy):
        metric = "accuracy"

    with pytest.raises(
        ValueError, match=r"validate gave the metrics \['error', 'odd'\]: expected one named 'accuracy'"
    ):
        fit(Nameless(ToyConfig()), tmp_path / "a", progress=False)

    class Lossless(nn.Linear):
        def forward(self, batch: Any) -> Any:
            return {"error": super().forward(batch[0]).sum()}

    task = Toy(ToyConfig())
    task.build = lambda: Lossless(4, 1)  # type: ignore[method-assign,assignment,return-value]
    with pytest.raises(ValueError, match=r"gave the losses \['error'\]: expected one named 'loss'"):
        fit(task, tmp_path / "b", progress=False)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="device = 'cuda': torch finds no CUDA device"):
            fit(Toy(ToyConfig(device="cuda")), tmp_path / "c", progress=False)


def test_compiled_model_keeps_its_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[nn.Module] = []
    original = nn.Module.compile

    def compile_with_eager(self: nn.Module) -> None:  # the default back end needs a C++ compiler and a minute
        compiled.append(self)
        original(self, backend="eager")

    monkeypatch.setattr(nn.Module, "compile", compile_with_eager)
    fit(Toy(ToyConfig(compile=True)), tmp_path / "run", progress=False)
    monkeypatch.undo()
    assert len(compiled) == 1
    wanted, _ = plain_loop(ToyConfig(), 12)
    for name, tensor in weights_of(tmp_path / "run", "last").items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-5, atol=1e-6)


def test_bf16_trains_close_to_fp32(tmp_path: Path) -> None:
    for precision in ("32-true", "bf16-mixed"):
        fit(Toy(ToyConfig(precision=precision, dropout=0.0)), tmp_path / precision, progress=False)
    full, mixed = (weights_of(tmp_path / name, "last")["first.weight"] for name in ("32-true", "bf16-mixed"))
    assert mixed.dtype == torch.float32
    assert not torch.equal(full, mixed)
    torch.testing.assert_close(full, mixed, atol=0.05, rtol=0)

"""One training loop for every task and method, on Lightning Fabric; `torchcpl.checkpoints` describes a run's folder.

Batches and learning rate are functions of the configuration and the step number, and the checkpoint holds the rest
(weights, EMA, optimiser, random state): a resumed run ends with the weights of an uninterrupted one.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor, nn

from torchcpl.checkpoints import (
    CheckpointError,
    load_checkpoint,
    load_weights,
    locked,
    open_run,
    prepare_run,
    read_training,
    sweep_checkpoints,
    write_checkpoint,
)
from torchcpl.config import TrainConfig
from torchcpl.files import about, extra, named, write_synced
from torchcpl.inference import WARM_UPS, Captured, leaves

if TYPE_CHECKING:
    from lightning_fabric import Fabric

_NEVER = torch.iinfo(torch.int64).max
GRAPHS = 2  # captured at most, of batches of different shapes
_READ_EVERY = 20  # steps between readings of the loss on CUDA, each of which waits for the device


class NonFiniteLoss(RuntimeError):
    """A loss, gradient or parameter became NaN or infinite; the message says which, and when."""


class Task(Protocol):
    """What the training loop needs of a task."""

    @property
    def config(self) -> TrainConfig: ...

    @property
    def metric(self) -> str:
        """The validation metric that selects the best checkpoint."""

    @property
    def higher_is_better(self) -> bool: ...

    @property
    def steps_per_epoch(self) -> int: ...

    @property
    def capturable(self) -> bool:
        """Whether a training step reads nothing back from the device, so that a CUDA graph can capture it."""

    def build(self) -> nn.Module:
        """The model: ``model(batch)`` returns a dict of scalar losses, of which ``"loss"`` is minimised."""

    def batch(self, step: int) -> Any:
        """Training batch number ``step`` on `device_of` the config: a function of ``(config.seed, step)`` alone."""

    def validate(self, model: Any) -> dict[str, float]:
        """Metrics on the fixed validation set; ``model`` is in eval mode, without gradients, in fp32."""


def device_of(config: TrainConfig) -> torch.device:
    """The device of a configuration; under DDP each process has its own."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device = 'cuda': torch finds no CUDA device, expected 'cpu' or 'auto'")
    if config.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))


def learning_rate(config: TrainConfig, step: int, steps: int) -> float:
    """The learning rate at a step: linear warmup over ``warmup * steps``, then constant or a cosine decay to zero."""
    warmup = round(config.warmup * steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.schedule == "constant":
        return config.lr
    return config.lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


def fit(task: Task, run: str | Path, *, resume: bool = False, progress: bool = True) -> dict[str, Any]:
    """Train a task's model in the folder ``run`` and return the final state: step, seconds, metrics, best, ...

    With ``resume`` an unfinished run continues from its last checkpoint, to the same weights as if it had never
    stopped; a finished one returns its state. Ctrl-C and SIGTERM end the current step, save, and raise
    KeyboardInterrupt; a second one stops at once. CheckpointError if another process trains in ``run``. With
    ``config.devices > 1`` Fabric starts the script once more for each further device, unless torchrun has; the
    process of rank r takes ``task.batch(step * processes + r)``.
    """
    with extra():
        from lightning_fabric import Fabric
    run, config, device = Path(run), task.config, device_of(task.config)
    there = torch.cuda.device_count() if device.type == "cuda" else os.cpu_count() or 1
    if config.devices > there:
        raise ValueError(f"devices = {config.devices}: expected at most {there}, the number of devices here")
    automatic = "bf16-mixed" if device.type == "cuda" else "32-true"
    precision: Any = automatic if config.precision == "auto" else config.precision
    # Under torchrun the processes are already running, on one host or several.
    hosts = int(os.environ["WORLD_SIZE"]) // config.devices if "TORCHELASTIC_RUN_ID" in os.environ else 1
    # A method may leave parameters without gradients, which plain "ddp" refuses.
    strategy = "ddp_find_unused_parameters_true" if config.devices * hosts > 1 else "auto"
    with _numerics(config, device), _interruptible() as interrupted, contextlib.ExitStack() as held:
        fabric = Fabric(
            accelerator=device.type, devices=config.devices, num_nodes=hosts, strategy=strategy, precision=precision
        )
        fabric.launch()
        refused = ""
        if fabric.is_global_zero:
            try:
                held.enter_context(locked(run))
            except CheckpointError as error:
                refused = str(error)
        if refused := fabric.broadcast(refused):  # every process raises, or the others would wait for the first
            raise CheckpointError(refused)
        state = open_run(run, config, resume)
        if state and not state["finished"] and state["device"] != device.type:
            raise CheckpointError(f"{run} was trained on {state['device']}: it cannot be resumed on {device.type}")
        fabric.barrier()  # every process has read the folder before the first one writes
        if not (state and state["finished"]):  # before writing: a model that cannot be built leaves no folder
            loop = _Loop(fabric, task, run, state)
        if fabric.is_global_zero:
            prepare_run(run, config, state, device)
        if state and state["finished"]:
            return state
        try:
            journal = _Journal(run, task, loop.done, fabric.is_global_zero, progress)
            with contextlib.closing(journal):
                return loop.train(journal, interrupted)
        except Exception:
            loop.save_best()
            raise


def _signature(parts: dict[str, Any]) -> str:
    """What a captured graph assumes of its inputs: shapes and dtypes of tensors, and the values of all else."""
    return repr({name: (*part.shape, part.dtype) if isinstance(part, Tensor) else part for name, part in parts.items()})


class _Losses(nn.Module):
    """The module Fabric wraps. The batch comes in a closure, or Fabric would copy and cast its tensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Callable[[], Any]) -> Any:
        return self.model(batch())


class _Loop:
    """The state of a training run, with its steps, validations and checkpoints."""

    def __init__(self, fabric: Fabric, task: Task, run: Path, state: dict[str, Any] | None) -> None:
        self.fabric, self.task, self.run, self.config = fabric, task, run, (config := task.config)
        self.steps = config.epochs * task.steps_per_epoch
        fabric.seed_everything(config.seed, verbose=False)
        self.model = task.build().to(fabric.device).train()
        self.average = copy.deepcopy(self.model).requires_grad_(False) if config.ema else self.model
        torch.manual_seed(config.seed + fabric.global_rank)  # the processes share weights, not dropout
        if config.compile:
            self.model.compile()
        self.parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        cuda = fabric.device.type == "cuda"
        self.rate = torch.zeros((), device=fabric.device) if cuda else None  # read by the captured step
        self.optimizer = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[config.optimizer](
            self.parameters.values(),
            lr=config.lr,
            weight_decay=config.weight_decay,
            fused=True if cuda else None,
            capturable=cuda,
        )
        self.module, self.stepper = fabric.setup(_Losses(self.model), self.optimizer)
        self.pairs = list(zip(self.average.parameters(), self.model.parameters(), strict=True))
        self.captured: dict[str, Captured] = {}  # by the signature of their batches
        self.runs = Counter[str]()  # eager steps by signature
        self.capture = config.capture and cuda and fabric.world_size == 1 and task.capturable
        self.zero = torch.zeros((), device=fabric.device)
        self.terms: list[str] = []  # the names of the losses, known after the first step
        self.totals = self.zero
        self.seen: list[Tensor] = []  # losses and gradient norms (K + P,) of each step since the last check
        self.done, self.count, self.seconds, self.peak = 0, 0, 0.0, 0.0
        self.metrics: dict[str, float | None] = {}
        self.best: dict[str, Any] | None = None
        self.unsaved_best: tuple[dict[str, Tensor], dict[str, Any]] | None = None
        if state:
            self._restore()
        self.start, self.clock, self.saved = self.done, time.monotonic(), time.monotonic()

    def train(self, journal: _Journal, interrupted: list[int]) -> dict[str, Any]:
        """The remaining steps, with their validations and checkpoints."""
        fabric, config, cuda = self.fabric, self.config, self.fabric.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats(fabric.device)
        for step in range(self.start, self.steps):
            self._step(step)
            self.done = step + 1
            finished = self.done == self.steps
            validating = finished or self.done % (config.validate_every * self.task.steps_per_epoch) == 0
            stop = bool(interrupted) and fabric.world_size == 1
            if validating or stop or not cuda or self.done % _READ_EVERY == 0:
                self._check()
                stop = bool(self._reduce(torch.tensor(float(bool(interrupted)), device=fabric.device), "max"))
                loss = float(self.totals[self.terms.index("loss")]) / self.count
                journal.progress_to(self.done, loss, (self.done - self.start) / (time.monotonic() - self.clock))
            if validating:
                journal.validation(*self._validate())
            stale = time.monotonic() - self.saved >= config.checkpoint_seconds
            if stop or (validating and fabric.broadcast(finished or stale)):
                state = self._save()
            if stop and not finished:
                raise KeyboardInterrupt(f"after step {self.done} of {self.steps}; --resume continues {self.run}")
        return state

    def _step(self, step: int) -> None:
        """One update; nothing in it waits for the device."""
        rate = learning_rate(self.config, step, self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate if self.rate is None else self.rate.fill_(rate)
        batch = self.task.batch(step * self.fabric.world_size + self.fabric.global_rank)
        with about(self._when(step)):  # the model's own checks may find NaN
            seen = self._replay(batch)  # (K + P,)
        if self.config.ema:
            self._average(step)
        self.totals += seen[: len(self.terms)]
        self.count += 1
        self.seen.append(seen)

    def _update(self, batch: Any) -> Tensor:
        """Forward, backward and optimiser step; the losses and gradient norms (K + P,)."""
        losses: dict[str, Tensor] = self.module(lambda: batch)
        if not self.terms:
            self._watch(list(losses))
        self.fabric.backward(losses["loss"])
        grads = [self.zero if p.grad is None else p.grad for p in self.parameters.values()]
        values = [losses[term].detach().float() for term in self.terms]
        norms = torch._foreach_norm(grads)
        if self.config.clip:
            torch.nn.utils.clip_grads_with_norm_(self.parameters.values(), self.config.clip, torch.stack(norms).norm())
        self.stepper.step()
        self.stepper.zero_grad()
        return torch.stack([*values, *norms])

    def _replay(self, batch: Any) -> Tensor:
        """``_update``, by the captured graph of such batches where there is one: one launch instead of hundreds."""
        if not self.capture:
            return self._update(batch)
        given = leaves(batch)
        kind = _signature(given)
        if kind not in self.captured:
            self.runs[kind] += 1
            if self.runs[kind] <= WARM_UPS or len(self.captured) == GRAPHS:
                return self._update(batch)
            self.captured[kind] = Captured(self._update, batch)
        return cast(Tensor, self.captured[kind](given)).clone()

    def _watch(self, terms: list[str]) -> None:
        if "loss" not in terms:
            raise ValueError(f"model(batch) gave the losses {terms}: expected one named 'loss'")
        self.terms = terms
        # The sum of each loss over `count` steps, those since the last validation.
        self.totals = torch.zeros(len(terms), dtype=torch.float64, device=self.fabric.device)  # (K,)

    @torch.no_grad()
    def _average(self, step: int) -> None:
        # A smaller decay at first, or for 1 / (1 - ema) steps the initial weights would dominate.
        decay = min(self.config.ema, (1 + step) / (10 + step))
        # The statistics of normalisation layers, too: those of the latest weights do not suit the average. Buffers are
        # listed anew: a module may replace them.
        pairs = [*self.pairs, *zip(self.average.buffers(), self.model.buffers(), strict=True)]
        mine, theirs = zip(*(pair for pair in pairs if pair[0].is_floating_point()), strict=True)
        torch._foreach_lerp_(mine, theirs, 1 - decay)
        for own, other in pairs:
            if not own.is_floating_point():
                own.copy_(other)

    def _reduce(self, tensor: Tensor, op: str) -> Tensor:
        """The sum, mean, min or max over the processes."""
        return cast(Tensor, self.fabric.all_reduce(tensor, reduce_op=op))

    def _gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all processes, stacked, on the CPU."""
        found = cast(Tensor, self.fabric.all_gather(tensor))
        return found.view(self.fabric.world_size, *tensor.shape).cpu()

    def _check(self) -> None:
        """Raise NonFiniteLoss if a loss, gradient or parameter has become NaN or infinite."""
        K, parameters = len(self.terms), tuple(self.parameters.values())
        finite = torch.stack(torch._foreach_norm(parameters, torch.inf)).isfinite().tolist()  # largest entries
        seen, self.seen = torch.stack(self.seen), []  # (S, K + P)
        numbers = torch.arange(self.done - len(seen), self.done, device=seen.device).unsqueeze(1)
        steps = self._reduce(torch.where(seen.isfinite(), _NEVER, numbers).amin(0), "min").tolist()
        if min(steps) == _NEVER and all(finite):
            return
        first = min(*steps, self.done - 1)
        terms = [name for name, at in zip(self.terms, steps[:K], strict=True) if at == first]
        grads = [name for name, at in zip(self.parameters, steps[K:], strict=True) if at == first]
        bad = [name for name, good in zip(self.parameters, finite, strict=True) if not good]
        found = [f"loss {', '.join(terms)}"] if terms else []
        found += [f"gradient of {grads[0]} ({len(grads)} of {len(finite)})"] if grads else []
        found += [f"parameter {bad[0]} ({len(bad)} of {len(finite)}) after step {self.done - 1}"] if bad else []
        kept = f"{self.run / 'last'} is finite" if (self.run / "last").exists() else "there is no checkpoint yet"
        raise NonFiniteLoss(f"not finite in {self._when(first)}: {'; '.join(found)}; {kept}")

    def _when(self, step: int) -> str:
        return f"epoch {step // self.task.steps_per_epoch + 1}, step {step} (from 0)"

    def _validate(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Metrics and mean losses, as a record of the history, and the best so far, which this updates."""
        self.average.eval()
        with torch.no_grad():
            metrics = {name: float(value) for name, value in self.task.validate(self.average).items()}
        self.model.train()
        if self.task.metric not in metrics:
            raise ValueError(f"validate gave the metrics {list(metrics)}: expected one named {self.task.metric!r}")
        # JSON has no NaN or infinity.
        self.metrics = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        means = self._reduce(self.totals / self.count, "mean").tolist()
        losses = dict(zip(self.terms, means, strict=True))
        self.totals.zero_()
        self.count = 0
        value, best = self.metrics[self.task.metric], self.best["value"] if self.best else None
        sign = 1 if self.task.higher_is_better else -1
        state = self._state()
        if self.best is None or (value is not None and (best is None or sign * value > sign * best)):
            self.best = {"epoch": state["epoch"], "step": self.done, "value": value, "metrics": self.metrics}
            weights = {name: tensor.clone() for name, tensor in self.average.state_dict().items()}
            self.unsaved_best = weights, state | {"best": self.best}
        lr = learning_rate(self.config, self.done - 1, self.steps)
        shared = {name: state[name] for name in ("epoch", "step", "seconds", "metrics")}
        return shared | {"lr": lr, "loss": losses["loss"], "losses": losses}, self.best

    def _state(self) -> dict[str, Any]:
        """The contents of state.json, which `fit` returns."""
        if self.fabric.device.type == "cuda":
            self.peak = max(self.peak, torch.cuda.max_memory_allocated(self.fabric.device) / 2**20)
        return {
            "finished": self.done == self.steps,
            "epoch": self.done // self.task.steps_per_epoch,
            "step": self.done,
            "seconds": round(self.seconds + time.monotonic() - self.clock, 3),
            "peak_mib": round(self.peak, 1) if self.peak else None,
            "metric": self.task.metric,
            "metrics": self.metrics,
            "best": self.best,
            "config": type(self.config).__name__,
            "device": self.fabric.device.type,
        }

    def _save(self) -> dict[str, Any]:
        state = self._state()
        random = torch.get_rng_state()
        if self.fabric.device.type == "cuda":
            random = torch.cat([random, torch.cuda.get_rng_state(self.fabric.device)])
        random, totals = self._gather(random), self._gather(self.totals)
        self.save_best()
        if self.fabric.is_global_zero:
            training = {
                "optimizer": self.optimizer.state_dict(),
                "weights": self.model.state_dict() if self.config.ema else {},
                "random": random,
                "terms": self.terms,
                "totals": totals,
                "count": self.count,
            }
            write_checkpoint(self.run, "last", self.config, self.average.state_dict(), state, training)
            sweep_checkpoints(self.run)
        self.fabric.barrier()
        self.saved = time.monotonic()
        return state

    def save_best(self) -> None:
        """Write the best weights so far, if they are not on disk yet."""
        unsaved, self.unsaved_best = self.unsaved_best, None
        if unsaved and self.fabric.is_global_zero:
            write_checkpoint(self.run, "best", self.config, *unsaved)

    def _restore(self) -> None:
        """Restore the state of the last checkpoint."""
        _, weights, state = load_checkpoint(self.run, "last")
        training = read_training(self.run)
        load_weights(self.average, weights, str(self.run / "last"))
        if self.config.ema:
            load_weights(self.model, training["weights"], str(self.run / "last"))
        self.done, self.seconds, self.peak = state["step"], state["seconds"], state["peak_mib"] or 0.0
        self.metrics, self.best = state["metrics"], state["best"]
        rank, cpu = self.fabric.global_rank, torch.get_rng_state().numel()
        try:
            self.optimizer.load_state_dict(training["optimizer"])
            self._watch(training["terms"])
            self.totals.copy_(training["totals"][rank])
            self.count = training["count"]
            random = training["random"][rank]
            torch.set_rng_state(random[:cpu].clone())  # torch ignores the storage offset of a view
            if self.fabric.device.type == "cuda":
                torch.cuda.set_rng_state(random[cpu:].clone(), self.fabric.device)
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            path = self.run / "last" / "optimizer.pt"
            raise CheckpointError(f"{path}: does not fit this model and optimiser: {error}") from error


class _Journal:
    """The progress bar, history and TensorBoard curves of a run; silent in every process but the first."""

    def __init__(self, run: Path, task: Task, done: int, main: bool, progress: bool) -> None:
        with extra():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TimeRemainingColumn
            from torch.utils.tensorboard import SummaryWriter
        self.run, self.task = run, task
        console = Console(stderr=True)  # stdout may carry JSON
        columns = "{task.description}", BarColumn(20), TimeRemainingColumn(), "{task.fields[said]} {task.fields[score]}"
        self.progress = Progress(*columns, console=console, disable=not (main and progress and console.is_interactive))
        steps = task.config.epochs * task.steps_per_epoch
        self.bar = self.progress.add_task(run.name, total=steps, completed=done, said="", score="")
        self.logs = SummaryWriter(str(run / "tensorboard"), purge_step=done + 1) if main else None
        self.progress.start()

    def close(self) -> None:
        self.progress.stop()
        if self.logs:
            with named(self.run / "tensorboard"):
                self.logs.close()

    def progress_to(self, done: int, loss: float, speed: float) -> None:
        """Move the bar to ``done`` steps; ``loss`` is the mean since the last validation."""
        self.speed = speed
        epoch = math.ceil(done / self.task.steps_per_epoch)
        said = f"{epoch}/{self.task.config.epochs} {speed:.3g} steps/s loss {loss:.4g}"
        self.progress.update(self.bar, completed=done, said=said)

    def validation(self, record: dict[str, Any], best: dict[str, Any]) -> None:
        """Record a validation."""
        values = record["metrics"][self.task.metric], best["value"]
        said = " best ".join("–" if value is None else f"{value:.4g}" for value in values)
        self.progress.update(self.bar, score=f"{self.task.metric} {said}")
        if not self.logs:
            return
        write_synced(self.run / "history.jsonl", (json.dumps(record, allow_nan=False) + "\n").encode(), "ab")
        curves = {"train/lr": record["lr"], "train/steps_per_second": self.speed}
        curves |= {f"train/{key}": x for key, x in record["losses"].items()}
        curves |= {f"validation/{key}": x for key, x in record["metrics"].items() if x is not None}
        with named(self.run / "tensorboard"):
            for key, x in curves.items():
                self.logs.add_scalar(key, x, record["step"])
            self.logs.flush()


@contextlib.contextmanager
def _numerics(config: TrainConfig, device: torch.device) -> Iterator[None]:
    """On CUDA: TF32 matrix products and, if configured, deterministic algorithms; restored afterwards."""
    if device.type != "cuda":
        yield
        return
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is not deterministic without it
    memory: Any = torch.utils.deterministic  # deterministic mode fills new memory, which is slow
    before = torch.get_float32_matmul_precision(), torch.get_deterministic_debug_mode()
    fill, memory.fill_uninitialized_memory = memory.fill_uninitialized_memory, False
    try:
        torch.set_float32_matmul_precision("high")
        torch.set_deterministic_debug_mode("warn" if config.deterministic else "default")
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.set_deterministic_debug_mode(before[1])
        memory.fill_uninitialized_memory = fill


@contextlib.contextmanager
def on_signals(handler: Callable[[int, Any], None], *numbers: int) -> Iterator[None]:
    """Handle signals inside the block; does nothing outside the main thread, where Python cannot."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, signal.SIG_DFL if old is None else old)


@contextlib.contextmanager
def _interruptible() -> Iterator[list[int]]:
    """Collect the first Ctrl-C or SIGTERM (sent by clusters) instead of raising; the next one raises."""
    caught: list[int] = []

    def note(number: int, _: object) -> None:
        caught.append(number)
        signal.signal(number, signal.default_int_handler)

    with on_signals(note, signal.SIGINT, signal.SIGTERM):
        yield caught

"""The folder of a training run, and the checkpoints in it.

A run is a folder::

    config.toml     what ran
    info.json       command, commit, device, versions, seed
    history.jsonl   a line per validation: epoch, step, seconds, metrics, lr, loss, losses
    tensorboard/    the same for TensorBoard
    lock            the process that is training, if any
    best, last      symbolic links to two checkpoints
    checkpoints/    best-00000040/, last-00000060/: model.safetensors, config.toml, state.json (last: optimizer.pt)

A checkpoint is written into a folder of its own, then its link is replaced by one rename: whenever the process is
killed, the run has the old checkpoint or the new one, complete. ``last`` is replaced last, and resuming rolls ``best``
and the history back to it.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor, nn

if sys.platform != "win32":
    import fcntl

from torchcpl.config import TrainConfig, read_toml, to_toml
from torchcpl.files import (
    NUMBER,
    extra,
    parse_json,
    read_json,
    read_text,
    sync_folder,
    write_atomic,
    write_json,
    write_synced,
)
from torchcpl.provenance import run_info

LOCK = "lock"


class CheckpointError(ValueError):
    """A run or checkpoint that cannot be used; the message names the file and the reason."""


class Checkpoint(NamedTuple):
    """A checkpoint as read: its TOML file, its weights, and the contents of state.json."""

    config: Path
    weights: dict[str, Tensor]
    state: dict[str, Any]


def read_info(run: str | Path) -> dict[str, Any]:
    """The `run_info` of a run, written when it began."""
    return read_json(Path(run) / "info.json", {"device": str})


_MAYBE = (int, float, type(None))
_RECORD = {"epoch": int, "step": int, "seconds": NUMBER, "metrics": {str: _MAYBE}}
HISTORY = _RECORD | {"lr": NUMBER, "loss": NUMBER, "losses": {str: NUMBER}}  # a line of history.jsonl
STATE = _RECORD | {
    "finished": bool,
    "peak_mib": _MAYBE,
    "metric": str,
    "best": ({"epoch": int, "step": int, "value": _MAYBE, "metrics": {str: _MAYBE}}, type(None)),
    "config": str,
    "device": str,
    "files": {str: {"bytes": int, "sha256": str}},
}  # state.json


def load_checkpoint(run: str | Path, which: str = "best") -> Checkpoint:
    """The ``best`` or the ``last`` checkpoint of a run, each file verified by its hash."""
    with extra():
        from safetensors.torch import load

    config, state = read_state(run, which)
    data = _contents(config.parent, state, "model.safetensors")
    try:
        return Checkpoint(config, load(data), state)
    except Exception as error:  # safetensors' own, or of a header with an unknown dtype
        raise CheckpointError(f"{config.with_name('model.safetensors')}: not safetensors: {error}") from None


def read_state(run: str | Path, which: str = "best") -> tuple[Path, dict[str, Any]]:
    """The TOML file and the state of a checkpoint without its weights, which an archived run may lack."""
    folder, state = _open(Path(run), which)
    _contents(folder, state, "config.toml")
    return folder / "config.toml", state


def read_training(run: Path) -> dict[str, Any]:
    """The state of the optimiser and the loop in the last checkpoint."""
    data, path = _contents(*_open(run, "last"), "optimizer.pt"), run / "last" / "optimizer.pt"
    try:
        training = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # pickle and zipfile raise many types
        raise CheckpointError(f"{path}: not readable by torch.load: {str(error).splitlines()[0]}") from None
    names = {"optimizer", "weights", "random", "terms", "totals", "count"}
    if not isinstance(training, dict) or training.keys() != names:
        raise CheckpointError(f"{path}: expected {', '.join(sorted(names))}")
    return training


def load_weights(model: nn.Module, weights: Mapping[str, Tensor], source: str) -> None:
    """Load weights whose names and shapes must match the model's; ``source`` names them in errors."""
    try:
        model.load_state_dict(dict(weights))
    except RuntimeError as error:  # which lists missing and unexpected names and wrong shapes
        raise CheckpointError(f"{source} does not fit the model: {' '.join(str(error).split())[:300]}") from None


def read_history(run: str | Path) -> list[dict[str, Any]]:
    """The validations of a run so far, one record each."""
    path = Path(run) / "history.jsonl"
    lines = read_text(path).split("\n")[:-1] if path.exists() else []  # without an unfinished line
    return [parse_json(line, f"{path}: line {number}", HISTORY) for number, line in enumerate(lines, 1)]


@contextlib.contextmanager
def locked(run: Path) -> Iterator[None]:
    """Hold the lock of the folder ``run``; CheckpointError where another process does.

    The operating system releases the lock when its holder ends, so a file left behind by a killed one blocks nobody.
    """
    made = [folder for folder in (run, *run.parents) if not folder.exists()]
    try:
        run.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise CheckpointError(f"{run} is a file: expected a folder for the run") from None
    path = run / LOCK
    file = _lock(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        file.close()
        with contextlib.suppress(OSError):  # remove the folders of a run that could not begin
            for folder in made:
                folder.rmdir()


def _lock(path: Path) -> IO[str]:
    while True:
        file = open(path, "a+", encoding="utf-8")  # noqa: SIM115 -- stays open while the lock is held
        if sys.platform == "win32":
            return file
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read()
            file.close()
            raise CheckpointError(f"{path.parent} is in use by {holder or 'another process'}") from None
        except OSError:  # a file system without locks
            return file
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            break
        file.close()  # its holder has just removed it
    file.truncate(0)
    file.write(f"process {os.getpid()} on {platform.node()}")
    file.flush()
    return file


def open_run(run: Path, config: TrainConfig, resume: bool) -> dict[str, Any] | None:
    """The state to resume from, None to start anew; CheckpointError where neither is possible. Writes nothing."""
    names = sorted(path.name for path in run.iterdir()) if run.exists() else []
    names = [name for name in names if name != LOCK and not name.endswith(".tmp")]
    if not names:
        return None
    if not resume:
        raise CheckpointError(
            f"{run} is not empty (it has {', '.join(names[:4])}): --resume continues it, --run names another"
        )
    if "config.toml" not in names:
        raise CheckpointError(f"{run} is not a run: it has no config.toml")
    old = read_toml(run / "config.toml")
    new = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(config).items()}
    differing = [name for name in new | old if name not in old or name not in new or old[name] != new[name]]
    if differing:
        changes = ", ".join(f"{name}: {old.get(name)!r} -> {new.get(name)!r}" for name in differing)
        raise CheckpointError(f"{run} was trained with another configuration, so it cannot be resumed ({changes})")
    if not os.path.lexists(run / "last"):
        return None  # stopped before its first checkpoint
    if not (run / "last").is_symlink():
        raise CheckpointError(f"{run / 'last'} is not a link: to resume a copied run, copy it with its links (cp -a)")
    state = _open(run, "last")[1]
    return {name: value for name, value in state.items() if name != "files"}


def prepare_run(run: Path, config: TrainConfig, state: dict[str, Any] | None, device: torch.device) -> None:
    """Make the run's folder, or roll it back to its last checkpoint."""
    if state is None:
        write_atomic(run / "config.toml", to_toml(config).encode())
        write_json(run / "info.json", run_info(seeds=[config.seed], device=device))
    if state and state["best"]:
        _point(run, f"best-{state['best']['step']:08d}")
    else:
        (run / "best").unlink(missing_ok=True)
    kept = [record for record in read_history(run) if state and record["step"] <= state["step"]]
    write_atomic(run / "history.jsonl", "".join(json.dumps(record) + "\n" for record in kept).encode())
    sweep_checkpoints(run)


def write_checkpoint(
    run: Path,
    which: str,
    config: TrainConfig,
    weights: Mapping[str, Tensor],
    state: dict[str, Any],
    training: dict[str, Any] | None = None,
) -> None:
    """Write a checkpoint, then link the run's ``best`` or ``last`` to it."""
    with extra():
        from safetensors.torch import save

    # Copies, as safetensors refuses tensors that share memory (tied weights).
    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in weights.items()}
    files = {"model.safetensors": save(copies), "config.toml": to_toml(config).encode()}
    if training is not None:
        buffer = io.BytesIO()
        torch.save(training, buffer)
        files["optimizer.pt"] = buffer.getvalue()
    noted = {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()}
    files["state.json"] = json.dumps(state | {"files": noted}, indent=2, allow_nan=False).encode()
    folder = run / "checkpoints" / f"{which}-{state['step']:08d}"
    folder.mkdir(parents=True)
    try:
        for name, data in files.items():
            write_synced(folder / name, data)
    except OSError:
        shutil.rmtree(folder)  # the disk may be full
        raise
    sync_folder(folder)
    sync_folder(folder.parent)
    _point(run, folder.name)


def sweep_checkpoints(run: Path) -> None:
    """Remove the checkpoints that neither ``best`` nor ``last`` links to."""
    kept = {os.readlink(run / which) for which in ("best", "last") if os.path.lexists(run / which)}
    for folder in (run / "checkpoints").glob("*"):
        if str(folder.relative_to(run)) not in kept:
            shutil.rmtree(folder)


def _point(run: Path, name: str) -> None:
    """Link ``best`` or ``last``, the first part of ``name``, to a checkpoint."""
    which = name.partition("-")[0]
    temporary = run / f".{which}.tmp"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(Path("checkpoints") / name, target_is_directory=True)
    os.replace(temporary, run / which)
    sync_folder(run)


def _open(run: Path, which: str) -> tuple[Path, dict[str, Any]]:
    """The folder and the state of a checkpoint."""
    folder = run / which
    if not (run / "config.toml").is_file():
        raise CheckpointError(f"{run} is not a run: it has no config.toml")
    if not folder.is_dir():
        lost = "a broken link" if os.path.lexists(folder) else "training stopped before the first one"
        raise CheckpointError(f"{folder}: no such checkpoint, {lost}")
    return folder, read_json(folder / "state.json", STATE)


def _contents(folder: Path, state: dict[str, Any], name: str) -> bytes:
    """A checkpoint's file, verified against the size and hash in its state."""
    path, noted = folder / name, state["files"].get(name)
    if noted is None or not path.is_file():
        raise CheckpointError(f"{path}: missing from the checkpoint")
    data = path.read_bytes()
    if len(data) != noted["bytes"]:
        raise CheckpointError(f"{path}: truncated or replaced, expected {noted['bytes']} bytes, got {len(data)}")
    if hashlib.sha256(data).hexdigest() != noted["sha256"]:
        raise CheckpointError(f"{path}: damaged or replaced, its sha256 does not match state.json")
    return data

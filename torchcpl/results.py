"""Results are files: JSON with what it takes to get the numbers again, and the folder a training run leaves.

A run is a folder::

    config.toml     what ran
    info.json       command, commit, device, versions, seed
    history.jsonl   a line per validation: epoch, step, seconds, metrics, lr, loss, losses
    tensorboard/    the same as curves
    best, last      links to the two checkpoints that count
    checkpoints/    best-00000040/, last-00000060/: model.safetensors, config.toml, state.json (last: optimizer.pt)

A checkpoint is written into a folder of its own and counts from the moment its link is replaced, by one rename:
killed at any instant, a run has the old checkpoint or the new one, whole. ``last`` is replaced after all else, and
resuming puts all else (best, history) back to where ``last`` was.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import io
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchcpl.config import TrainConfig, parse_toml, to_toml


class CheckpointError(ValueError):
    """A run or a checkpoint that cannot be used; the message names the file and the reason."""


class Checkpoint(NamedTuple):
    """A checkpoint as read: the TOML file it was trained with, the weights, and what state.json says."""

    config: Path
    weights: dict[str, Tensor]
    state: dict[str, Any]


@contextlib.contextmanager
def extra() -> Iterator[None]:
    """Around imports of packages that come with the extra: says how to get a missing one."""
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{error.name} is missing: pip install 'torchcpl[tasks]'", name=error.name) from error


def write_atomic(path: str | Path, data: bytes) -> None:
    """Write a file such that, whatever happens, ``path`` holds its old contents or the new, never a part."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    write_synced(temporary, data)
    os.replace(temporary, path)
    sync_folder(path.parent)


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and wait until it is on the disk."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Wait until a folder's entries (names made, moved or removed in it) are on the disk."""
    if os.name == "nt":  # Windows opens no folders
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: str | Path, obj: Any) -> None:
    """Write ``obj`` as indented JSON, atomically. NaN and infinities, which JSON has not, are refused."""
    try:
        text = json.dumps(obj, indent=2, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: cannot be written as JSON: {error}") from None
    write_atomic(path, (text + "\n").encode())


def read_json(path: str | Path) -> Any:
    """The contents of a JSON file; a ValueError that names the file where it is missing or is not JSON."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None


def run_info(*, seeds: Sequence[int] = (), device: torch.device | str | None = None) -> dict[str, Any]:
    """What a number needs beside it: ``command``, ``commit``, ``dirty``, ``device``, ``versions``, ``seeds``.

    ``commit`` is ``$TORCHCPL_COMMIT``, for a copy of the source without its history, or that of the checkout the
    package runs from (None outside one), ``dirty`` whether its files differ from that. ``device`` is the one named,
    else CUDA where there is one.
    """
    named = os.environ.get("TORCHCPL_COMMIT")
    ours = not named and _git("ls-files", "--error-unmatch", Path(__file__).name)
    return {
        "command": _command(),
        "commit": named or (_git("rev-parse", "HEAD") if ours else None),
        "dirty": bool(_git("status", "--porcelain", "--", ".")) if ours else None,
        "device": device_name(device),
        "versions": _versions(),
        "seeds": list(seeds),
    }


def load_checkpoint(run: str | Path, which: str = "best") -> Checkpoint:
    """The ``best`` or the ``last`` checkpoint of a run, each file checked against the hash noted on writing."""
    with extra():
        from safetensors.torch import load

    config, state = read_state(run, which)
    weights = load(_contents(config.parent, state, "model.safetensors"))
    return Checkpoint(config, weights, state)


def read_state(run: str | Path, which: str = "best") -> tuple[Path, dict[str, Any]]:
    """The TOML file and the state of a checkpoint, without its weights: an archived run may have lost them."""
    folder, state = _open(Path(run), which)
    _contents(folder, state, "config.toml")
    return folder / "config.toml", state


def read_training(run: Path) -> dict[str, Any]:
    """The optimiser's and the loop's own state in the last checkpoint."""
    data = _contents(*_open(run, "last"), "optimizer.pt")
    training: dict[str, Any] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    return training


def load_weights(model: nn.Module, weights: Mapping[str, Tensor], source: str) -> None:
    """Load weights that must fit the model name for name and shape for shape; ``source`` names them in errors."""
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    wrong = [
        f"{name} is {found.get(name, 'missing')}, expected {shapes.get(name, 'none')}"
        for name in [*shapes, *(name for name in found if name not in shapes)]
        if shapes.get(name) != found.get(name)
    ]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise CheckpointError(f"{source} does not fit the model: {'; '.join(wrong[:3])}{more}")
    model.load_state_dict(dict(weights))


def read_history(run: str | Path) -> list[dict[str, Any]]:
    """The validations of a run so far, one record each."""
    path = Path(run) / "history.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    try:
        return [json.loads(line) for line in lines if line.endswith("\n")]  # one without its end was cut short
    except ValueError as error:
        raise CheckpointError(f"{path}: not a record a line: {error}") from None


def open_run(run: Path, config: TrainConfig, resume: bool) -> dict[str, Any] | None:
    """The state to go on from, None to start at the beginning; CheckpointError where neither may be. Writes nothing."""
    if run.exists() and not run.is_dir():
        raise CheckpointError(f"{run} is a file: expected a folder for the run")
    names = sorted(path.name for path in run.iterdir() if not path.name.endswith(".tmp")) if run.exists() else []
    if not names:
        return None
    if not resume:
        raise CheckpointError(f"{run} is not empty (it has {', '.join(names[:4])}): resume it, or name a new folder")
    if "config.toml" not in names:
        raise CheckpointError(f"{run} has no config.toml: it is no run to resume")
    old = parse_toml((run / "config.toml").read_text(encoding="utf-8"), str(run / "config.toml"))
    new = parse_toml(to_toml(config), "config")
    differing = [name for name in new | old if name not in old or name not in new or old[name] != new[name]]
    if differing:
        changes = ", ".join(f"{name}: {old.get(name)!r} -> {new.get(name)!r}" for name in differing)
        raise CheckpointError(f"{run} was trained with another configuration, so it cannot be resumed ({changes})")
    if not os.path.lexists(run / "last"):
        return None  # stopped before its first checkpoint
    if not (run / "last").is_symlink():
        raise CheckpointError(f"{run / 'last'} is no link: to resume a copied run, copy it with its links (cp -a)")
    state = _open(run, "last")[1]
    return {name: value for name, value in state.items() if name != "files"}


def prepare_run(run: Path, config: TrainConfig, state: dict[str, Any] | None, device: torch.device) -> None:
    """Make the run's folder, or put it back to where its last checkpoint was."""
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
    """Write a checkpoint and then make it the run's ``best`` or ``last``."""
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
    for name, data in files.items():
        write_synced(folder / name, data)
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
    """Link ``best`` or ``last``, as the name begins, to a checkpoint."""
    which = name.partition("-")[0]
    temporary = run / f".{which}.tmp"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(Path("checkpoints") / name, target_is_directory=True)
    os.replace(temporary, run / which)
    sync_folder(run)


def _open(run: Path, which: str) -> tuple[Path, dict[str, Any]]:
    """The folder and the state of a checkpoint."""
    if which not in ("best", "last"):
        raise ValueError(f"which = {which!r}: expected 'best' or 'last'")
    folder = run / which
    if not (run / "config.toml").is_file():
        raise CheckpointError(f"{run} is no run: it has no config.toml")
    if not folder.is_dir():
        lost = "its link leads nowhere" if os.path.lexists(folder) else "training stopped before there was one"
        raise CheckpointError(f"{folder}: no such checkpoint, {lost}")
    try:
        state = read_json(folder / "state.json")
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    if not isinstance(state, dict) or not {"finished", "step", "best", "files"} <= state.keys():
        raise CheckpointError(f"{folder / 'state.json'}: not the state of a checkpoint")
    return folder, state


def _contents(folder: Path, state: dict[str, Any], name: str) -> bytes:
    """A checkpoint's file, which must be the one its state notes."""
    path, noted = folder / name, state["files"].get(name)
    if noted is None or not path.is_file():
        raise CheckpointError(f"{path}: missing from the checkpoint")
    data = path.read_bytes()
    if len(data) != noted["bytes"]:
        raise CheckpointError(f"{path}: truncated or foreign, {len(data)} bytes where {noted['bytes']} were written")
    if hashlib.sha256(data).hexdigest() != noted["sha256"]:
        raise CheckpointError(f"{path}: damaged or foreign, its sha256 is not that of the file that was written")
    return data


def device_name(device: torch.device | str | None = None) -> str:
    """The device in words, e.g. ``NVIDIA H200`` or a CPU's model and number of threads."""
    kind = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if kind.type == "cuda":
        return torch.cuda.get_device_name(kind)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    threads = torch.get_num_threads()
    return f"{model or platform.processor() or platform.machine()}, {threads} thread{'s' if threads > 1 else ''}"


def _command() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)  # of a module that was run by its name
    name = f"python -m {spec.name.removesuffix('.__main__')}" if spec else Path(sys.argv[0]).name
    return f"{name} {shlex.join(sys.argv[1:])}".strip()


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in ("torchcpl", "torch", "numpy", "triton"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    # The distribution's metadata leaves out the build (+cpu, +cu126).
    return versions | {"torch": str(torch.__version__)}


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *arguments], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None

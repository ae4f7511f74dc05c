"""The provenance of a result: command, commit, device and versions."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


def run_info(*, seeds: Sequence[int] = (), device: torch.device | str | None = None) -> dict[str, Any]:
    """The provenance of a result: ``command``, ``commit``, ``dirty``, ``device``, ``versions``, ``seeds``.

    ``commit`` is ``$TORCHCPL_COMMIT``, for a copy of the source without its history, or that of the checkout the
    package runs from (None outside one), ``dirty`` whether its files differ from it. ``device`` defaults to CUDA where
    available.
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


def device_name(device: torch.device | str | None = None) -> str:
    """The device's name, e.g. ``NVIDIA H200``, or a CPU's model and number of threads."""
    kind = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if kind.type == "cuda":
        return torch.cuda.get_device_name(kind)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    threads = torch.get_num_threads()
    return f"{model or platform.processor() or platform.machine()}, {threads} thread{'s' if threads > 1 else ''}"


def _command() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)  # set under python -m
    name = f"python -m {spec.name.removesuffix('.__main__')}" if spec else Path(sys.argv[0]).name
    return f"{name} {shlex.join(sys.argv[1:])}".strip()


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in ("torchcpl", "torch", "numpy", "triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    # The metadata lacks the build (+cpu, +cu126).
    return versions | {"torch": str(torch.__version__)}


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *arguments], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None

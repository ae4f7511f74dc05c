"""Which twin runs: the plain code, or the fast one that stands in for it.

:func:`set_kernels` and :func:`use` choose, and so does the environment variable ``TORCHCPL_KERNELS``:

    auto     the Triton kernels on CUDA and NumPy on the CPU where they apply, else plain torch
    plain    plain torch everywhere
    triton   the Triton kernels; for decoding and losses, or ``ValueError`` saying why one cannot run

Kernels have no second derivative and know nothing of ``torch.func``: use ``plain`` for those.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torchcpl import functional
from torchcpl.checks import check_choice, tracing
from torchcpl.constraints import Rules
from torchcpl.interactions import Coverage, Dense, LowRank, Recent
from torchcpl.kernels import greedy_numpy
from torchcpl.potentials import Potentials, Selection

MODES = ("auto", "plain", "triton")
SINGLES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 256  # hidden size that a tile of the loss kernels holds

TRITON = importlib.util.find_spec("triton") is not None

_mode = os.environ.get("TORCHCPL_KERNELS", "auto")
check_choice("TORCHCPL_KERNELS", _mode, MODES)


def set_kernels(mode: str) -> None:
    """Choose the twins for all that follows: ``auto``, ``plain`` or ``triton``."""
    global _mode
    check_choice("mode", mode, MODES)
    _mode = mode


@contextmanager
def use(mode: str) -> Iterator[None]:
    """``set_kernels`` for the length of a ``with`` block."""
    before = _mode
    set_kernels(mode)
    try:
        yield
    finally:
        set_kernels(before)


def greedy(pot: Potentials, rules: Rules, stop_threshold: float | None = None) -> Selection | None:
    """Selections (B, T) of the fast twin, None where the plain rollout is to run."""
    if _mode == "auto" and greedy_numpy.applies(pot, rules):
        return greedy_numpy.greedy(pot, rules, stop_threshold)
    return decode(pot, rules, stop_threshold=stop_threshold)


def decode(
    pot: Potentials,
    rules: Rules,
    width: int | None = None,
    temperature: float | None = None,
    generator: torch.Generator | None = None,
    stop_threshold: float | None = None,
    cut: bool = False,
) -> Selection | None:
    """One hypothesis a row, (B, T), or ``width`` of them, (B, K, T), greedy or drawn at ``temperature``.

    None where the rollout is to run. ``cut`` says that only some of the choices of a step may be drawn (top-k, top-p).
    """
    if not _runs("decode", pot, lambda: "sampling with top_k or top_p" if cut else decode_obstacle(pot, rules)):
        return None
    way = plan(pot, rules, width or 1)
    if way is None:
        return None
    from torchcpl.kernels import greedy_triton

    return greedy_triton.decode(pot, rules, way, width, temperature, generator, stop_threshold)


def prefix_log_probs(pot: Potentials, order: Tensor, rules: Rules, remaining: bool = False) -> tuple[Tensor, Tensor]:
    """``functional.prefix_log_probs``, which says what these are, by whichever twin applies."""
    if not _runs("loss", pot, lambda: loss_obstacle(pot, order, rules, whole=False)):
        return functional.prefix_log_probs(pot, order, rules, remaining)
    from torchcpl.kernels import nll_triton

    return nll_triton.prefix_log_probs(pot, order, rules, remaining)


def sequence_nll(pot: Potentials, order: Tensor, rules: Rules, reduction: str) -> Tensor:
    """−log P of the sequences ``order`` (B, T), ``functional.reduced``, by whichever twin applies."""
    if not _runs("loss", pot, lambda: loss_obstacle(pot, order, rules, whole=True)):
        return functional.reduced(-functional.sequence_log_probs(pot, order.unsqueeze(1), rules).squeeze(1), reduction)
    from torchcpl.kernels import nll_triton

    return nll_triton.sequence_nll(pot, order, rules, reduction)


def pairs(x: Tensor) -> Tensor:
    """``functional.pairs`` by whichever twin applies."""
    if not _applies(x):
        return functional.pairs(x)
    from torchcpl.kernels import pairs_triton

    return pairs_triton.pairs(x)


def batch_norm(
    x: Tensor, moments: tuple[Any, ...], eps: float, add: Tensor | None, relu: bool, pool: bool
) -> Tensor | None:
    """Of images ``x``, channels last, with what comes after it, in one pass; None where torch's own is to run."""
    if not _applies(x) or x.dim() != 4 or x.numel() == 0 or x.dtype not in SINGLES:
        return None
    if pool and (add is not None or not relu):
        return None
    if not all(isinstance(t, Tensor) and t.shape == x.shape[1:2] and t.is_contiguous() for t in moments):
        return None
    for image in (x,) if add is None else (x, add):
        alike = (image.shape, image.dtype) == (x.shape, x.dtype)
        if not alike or not image.is_contiguous(memory_format=torch.channels_last):
            return None
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *moments, add)):
        return None
    from torchcpl.kernels import norm_triton

    return norm_triton.batch_norm(x, moments, eps, add, relu, pool)


def _applies(x: Tensor) -> bool:
    """Whether a kernel for tensors such as this one is to run; none where it cannot, even if told to."""
    if tracing() or not isinstance(x, Tensor) or forward_ad._current_level >= 0:  # a kernel knows no tangents
        return False
    return (_mode == "triton" or (_mode == "auto" and x.is_cuda)) and not _no_device(x)


def _runs(kernel: str, pot: Potentials, obstacle: Callable[[], str | None]) -> bool:
    """Whether the Triton kernel is to run."""
    if _mode == "plain" or (_mode == "auto" and not pot.unary.is_cuda):
        return False
    why = obstacle()
    if why is not None and _mode == "triton":
        raise ValueError(f"kernels: expected a case for the Triton {kernel} kernel, got {why}")
    return why is None


def _no_device(tensor: Tensor) -> str | None:
    if not TRITON:
        return "no installation of triton"
    # Triton's interpreter runs kernels on CPU tensors, to test them where there is no GPU.
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return None if tensor.device.type == ("cpu" if interpreted else "cuda") else f"tensors on {tensor.device}"


def _wrong_dtype(pot: Potentials, *parts: Any) -> str | None:
    """What the kernels do not know of the types in ``pot``, its interaction's ``parts`` included."""
    tensors = [part for part in (pot.unary, pot.stop, *parts) if isinstance(part, Tensor)]
    odd = [str(tensor.dtype) for tensor in tensors if tensor.dtype not in SINGLES]
    return f"potentials in {odd[0].removeprefix('torch.')}" if odd else None


def decode_obstacle(pot: Potentials, rules: Rules) -> str | None:
    """Why the decoding kernel cannot run; None when it can."""
    interaction = pot.interaction
    if not isinstance(interaction, Dense | LowRank):
        kind = type(interaction).__name__
        if not isinstance(interaction, Coverage | Recent):
            return f"a {kind} interaction"
        batch, n, _ = interaction.keys.shape
        if n > LARGEST_BLOCK or 2 * batch * n * n * interaction.keys.element_size() > BUILD_LIMIT:
            return f"a {kind} interaction between {n} candidates in {batch} rows"  # whose matrices would be too large
    if torch.compiler.is_compiling():  # or exporting
        return "torch.compile or torch.export"
    if not rules.plain:
        return "constraints other than Forbid"
    if pot.unary.numel() == 0:
        return f"potentials of shape {tuple(pot.unary.shape)}"
    return _wrong_dtype(pot, *vars(interaction).values()) or _no_device(pot.unary)


def loss_obstacle(pot: Potentials, order: Tensor, rules: Rules, whole: bool) -> str | None:
    """Why the loss kernel cannot run, for ``whole`` sequences or their picks; None when it can."""
    interaction = pot.interaction
    if not isinstance(interaction, LowRank):
        return f"a {type(interaction).__name__} interaction"
    if not rules.plain or rules.min_len > 0 or rules.max_len < pot.num_candidates:
        return "length limits or constraints other than Forbid"
    if pot.unary.numel() == 0 or 0 in order.shape[:-1]:
        return f"potentials of shape {tuple(pot.unary.shape)} and sequences of shape {tuple(order.shape)}"
    if not 0 < interaction.keys.shape[2] <= WIDEST:
        return f"a hidden size of {interaction.keys.shape[2]}"
    if interaction.keys.stride(1) * pot.num_candidates >= 2**31:
        return "keys whose rows lie too far apart"  # for 32-bit offsets
    if torch.float16 in (interaction.keys.dtype, interaction.values.dtype):
        return "factors in float16"  # whose gradients, p·g, underflow
    # By name: torch.compile of torch 2.11 cannot list them.
    why = _wrong_dtype(pot, interaction.keys, interaction.values, interaction.stop_key) or _no_device(pot.unary)
    if why is None and pot.unary.is_cuda and not torch.compiler.is_compiling():
        from torchcpl.kernels import nll_check

        return nll_check.fault(pot, order, whole)
    return why


@dataclass(frozen=True)
class Plan:
    """How to decode: W dense (if need be built first) or factored, in one block or in tiles of so many candidates."""

    form: str  # dense | factored
    path: str  # block | tiles
    size: int
    warps: int = 8


LARGEST_BLOCK = 8192  # scores that fit into one program's registers
BUILD_LIMIT = 2**31  # bytes of W that are built for the sake of speed

# Rough rates of a data-centre GPU, only to weigh one way of decoding against another.
DEVICE_BYTES = 4e12  # memory traffic of the whole device, a second
PROGRAM_BYTES = 6e10  # what one program can read, a second
FLOPS = {torch.float32: 4e13, torch.float16: 5e14, torch.bfloat16: 5e14}
PLAIN_STEP = 2e-4  # seconds of launches in a step of the plain twin


@cache
def _dense(block: int, alone: bool) -> Plan:
    """With W dense, ``alone`` or beside another matrix, of which a step reads a column too: then more threads pay."""
    if block > LARGEST_BLOCK:
        return Plan("dense", "tiles", 4096)
    least = 1 if alone else min(max(block // 32, 1), 8)
    return Plan("dense", "block", block, warps=min(max(block // 256, least), 16))


def plan(pot: Potentials, rules: Rules, width: int = 1) -> Plan | None:
    """The cheapest way to decode ``width`` hypotheses a row; None where that is the plain twin."""
    batch, n = pot.unary.shape
    block = max(16, 1 << (n - 1).bit_length())
    if isinstance(pot.interaction, Dense):
        return _dense(block, alone=True)
    if not isinstance(pot.interaction, LowRank):
        return _dense(block, alone=False)
    keys = pot.interaction.keys
    hidden, size = keys.shape[2], keys.element_size()
    reads = rules.max_len * n * hidden * size  # bytes of keys that a hypothesis reads, all of them at every step
    number = 2 * hidden / FLOPS[keys.dtype] + 2 * size / DEVICE_BYTES  # seconds to compute one of W, write and read it
    ways: dict[Plan | None, float] = {
        Plan("factored", "tiles", min(block, 256)): reads * max(1 / PROGRAM_BYTES, batch * width / DEVICE_BYTES)
    }
    if batch * n * n * size <= BUILD_LIMIT:
        ways[_dense(block, alone=True)] = batch * n * n * number
    if _mode == "auto":
        ways[None] = rules.max_len * PLAIN_STEP + reads * batch / DEVICE_BYTES
    return min(ways, key=lambda way: ways[way])

"""Which twin runs: the plain code, or the fast one that stands in for it. Every function here returns the result.

An ``…_obstacle`` says in words why a fast twin cannot run, None when it can; it never raises.

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
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torchcpl import functional
from torchcpl.checks import check_choice, tracing
from torchcpl.constraints import Rules
from torchcpl.interactions import Coverage, Dense, LowRank, Recent
from torchcpl.kernels import greedy_numpy
from torchcpl.kernels.greedy_plan import BUILD_LIMIT, LARGEST_BLOCK, buildable, plan
from torchcpl.potentials import Potentials, Selection

MODES = ("auto", "plain", "triton")
SINGLES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 256  # hidden size that a tile of the loss kernels holds

R = TypeVar("R")

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


def greedy(pot: Potentials, rules: Rules, stop_threshold: float | None, plain: Callable[[], Selection]) -> Selection:
    """Selections (B, T): the most likely choice at every step."""
    if _mode == "auto" and greedy_numpy.obstacle(pot, rules) is None:
        return greedy_numpy.greedy(pot, rules, stop_threshold)

    def fast() -> Selection:
        from torchcpl.kernels import greedy_triton

        return greedy_triton.decode(pot, rules, plan(pot, rules), None, stop_threshold=stop_threshold)

    return _either("decoding", pot.unary, lambda: decode_obstacle(pot, rules), fast, plain)


def sample(
    pot: Potentials,
    rules: Rules,
    width: int,
    temperature: float,
    generator: torch.Generator | None,
    truncated: bool,
    plain: Callable[[], Selection],
) -> Selection:
    """``width`` hypotheses a row, (B, K, T), drawn; ``truncated`` where top_k or top_p leave only some choices."""

    def obstacle() -> str | None:
        if truncated:
            return "sampling with top_k or top_p"
        if isinstance(pot.interaction, LowRank) and pot.num_candidates > LARGEST_BLOCK and not buildable(pot):
            return (
                f"samples of {pot.num_candidates} candidates"  # each would read all keys: plain torch reads them once
            )
        return decode_obstacle(pot, rules)

    def fast() -> Selection:
        from torchcpl.kernels import greedy_triton

        return greedy_triton.decode(pot, rules, plan(pot, rules, width, draws=True), width, temperature, generator)

    return _either("decoding", pot.unary, obstacle, fast, plain)


def prefix_log_probs(pot: Potentials, order: Tensor, rules: Rules, remaining: bool = False) -> tuple[Tensor, Tensor]:
    """``functional.prefix_log_probs``, which says what these are."""

    def fast() -> tuple[Tensor, Tensor]:
        from torchcpl.kernels import nll_triton

        return nll_triton.prefix_log_probs(pot, order, rules, remaining)

    def plain() -> tuple[Tensor, Tensor]:
        return functional.prefix_log_probs(pot, order, rules, remaining)

    return _either("loss", pot.unary, lambda: loss_obstacle(pot, order, rules), fast, plain)


def _either(
    kernel: str, like: Tensor, obstacle: Callable[[], str | None], fast: Callable[[], R], plain: Callable[[], R]
) -> R:
    """What the Triton kernel gives where it is to run and nothing stands in its way, else what plain torch gives."""
    if _mode == "plain" or (_mode == "auto" and not like.is_cuda):
        return plain()
    why = obstacle()
    if why is None:
        return fast()
    if _mode == "triton":
        raise ValueError(f"kernels: expected a case for the Triton {kernel} kernel, got {why}")
    return plain()


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


def loss_obstacle(pot: Potentials, order: Tensor, rules: Rules) -> str | None:
    """Why the loss kernel cannot run; None when it can."""
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
    return _wrong_dtype(pot, interaction.keys, interaction.values, interaction.stop_key) or _no_device(pot.unary)

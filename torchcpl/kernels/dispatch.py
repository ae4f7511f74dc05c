"""Chooses between plain torch and the fast implementations. Every function here returns the result.

An ``…_obstacle`` returns why a Triton kernel does not apply, None when it does; it never raises.

:func:`set_kernels` and :func:`use` choose, and so does the environment variable ``TORCHCPL_KERNELS``:

    auto     the Triton kernels on CUDA and NumPy on the CPU where they apply, else plain torch
    plain    plain torch everywhere
    triton   the Triton kernels; for decoding and losses, or ``ValueError`` saying why one cannot run

Kernels have no second derivatives and do not support ``torch.func``: use ``plain`` for those.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchcpl import functional
from torchcpl.checks import check_choice
from torchcpl.constraints import Rules
from torchcpl.interactions import Coverage, Dense, DenseCoverage, LowRank, Recent
from torchcpl.kernels import greedy_graph, greedy_numpy
from torchcpl.kernels.greedy_plan import BUILD_LIMIT, LARGEST_BLOCK, buildable, plan
from torchcpl.potentials import Potentials, Selection

MODES = ("auto", "plain", "triton")
SINGLES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 256  # hidden size that a tile of the loss kernels holds

R = TypeVar("R")

TRITON = importlib.util.find_spec("triton") is not None
# Triton's interpreter runs kernels on CPU tensors, to test them where there is no GPU.
TRITON_DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"

_mode = os.environ.get("TORCHCPL_KERNELS", "auto")
check_choice("TORCHCPL_KERNELS", _mode, MODES)


def set_kernels(mode: str) -> None:
    """Choose the implementations from now on: ``auto``, ``plain`` or ``triton``."""
    global _mode
    check_choice("mode", mode, MODES)
    _mode = mode


@contextmanager
def use(mode: str) -> Iterator[None]:
    """``set_kernels`` inside a ``with`` block."""
    before = _mode
    set_kernels(mode)
    try:
        yield
    finally:
        set_kernels(before)


def greedy(pot: Potentials, rules: Rules, stop_threshold: float | None, plain: Callable[[], Selection]) -> Selection:
    """Selections (B, T): the most likely choice at every step."""
    if greedy_graph.applies(pot, rules):
        return greedy_graph.greedy(pot, rules, stop_threshold)
    if _mode == "auto" and greedy_numpy.applies(pot, rules):
        return greedy_numpy.greedy(pot, rules, stop_threshold)

    def fast() -> Selection:
        from torchcpl.kernels import greedy_triton

        return greedy_triton.decode(pot, rules, plan(pot, rules), None, stop_threshold=stop_threshold)

    return either(lambda: decode_obstacle(pot, rules), fast, plain, pot.unary, "decoding")


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
            return f"samples of {pot.num_candidates} candidates"  # each would read all keys; plain torch does once
        return decode_obstacle(pot, rules)

    def fast() -> Selection:
        from torchcpl.kernels import greedy_triton

        return greedy_triton.decode(pot, rules, plan(pot, rules, width, draws=True), width, temperature, generator)

    return either(obstacle, fast, plain, pot.unary, "decoding")


def sequence_log_probs(pot: Potentials, order: Tensor, rules: Rules) -> Tensor:
    """(B, P) log-probabilities of the sequences ``order`` (B, P, T)."""

    def fast() -> Tensor:
        from torchcpl.kernels import nll_triton

        return nll_triton.sequence_log_probs(pot, order, rules)

    plain = partial(functional.sequence_log_probs, pot, order, rules)
    return either(lambda: loss_obstacle(pot, order, rules), fast, plain, pot.unary, "loss")


def remaining_log_probs(pot: Potentials, order: Tensor, rules: Rules) -> tuple[Tensor, Tensor]:
    """After each prefix of ``order`` (B, P, T), log P of all picks that remain and of the stop, two (B, P, T+1)."""

    def fast() -> tuple[Tensor, Tensor]:
        from torchcpl.kernels import nll_triton

        return nll_triton.remaining_log_probs(pot, order, rules)

    plain = partial(functional.prefix_log_probs, pot, order, rules, remaining=True)
    return either(lambda: loss_obstacle(pot, order, rules), fast, plain, pot.unary, "loss")


def either(
    obstacle: Callable[[], str | None], fast: Callable[[], R], plain: Callable[[], R], like: Tensor, must: str = ""
) -> R:
    """The result of the Triton kernel where it is enabled and applies, else of plain torch.

    ``must`` names a kernel that must run in the mode ``triton``.
    """
    if _mode == "plain" or (_mode == "auto" and not like.is_cuda):
        return plain()
    why = obstacle()
    if why is None:
        return fast()
    if _mode == "triton" and must:
        raise ValueError(f"kernels: expected a case for the Triton {must} kernel, got {why}")
    return plain()


def device_obstacle(tensor: Tensor) -> str | None:
    """Why no Triton kernel can run on such a tensor; None when one can."""
    if not TRITON:
        return "no installation of triton"
    return None if tensor.device.type == TRITON_DEVICE else f"tensors on {tensor.device}"


def _wrong_dtype(pot: Potentials, *parts: Any) -> str | None:
    """A dtype in ``pot`` or its interaction's ``parts`` that the kernels do not support."""
    tensors = [part for part in (pot.unary, pot.stop, *parts) if isinstance(part, Tensor)]
    odd = [str(tensor.dtype) for tensor in tensors if tensor.dtype not in SINGLES]
    return f"potentials in {odd[0].removeprefix('torch.')}" if odd else None


def decode_obstacle(pot: Potentials, rules: Rules) -> str | None:
    """Why the decoding kernel cannot run; None when it can."""
    interaction = pot.interaction
    if not isinstance(interaction, Dense | LowRank):
        kind = type(interaction).__name__
        if not isinstance(interaction, Coverage | DenseCoverage | Recent):
            return f"a {kind} interaction"
        batch, n = interaction.shape
        if n > LARGEST_BLOCK or 2 * batch * n * n * pot.unary.element_size() > BUILD_LIMIT:
            return f"a {kind} interaction between {n} candidates in {batch} rows"  # whose matrices would be too large
    if torch.compiler.is_compiling():  # or exporting
        return "torch.compile or torch.export"
    if not rules.plain:
        return "constraints other than Forbid"
    if pot.unary.numel() == 0:
        return f"potentials of shape {tuple(pot.unary.shape)}"
    return _wrong_dtype(pot, *vars(interaction).values()) or device_obstacle(pot.unary)


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
    return _wrong_dtype(pot, interaction.keys, interaction.values, interaction.stop_key) or device_obstacle(pot.unary)

"""Teacher forcing for ``LowRank`` on the GPU: ``functional.sequence_log_probs`` and ``prefix_log_probs`` in Triton.

Values and sequences give contexts (``nll_contexts_triton``), contexts and keys give log-probabilities
(``nll_forward_triton``), and ``nll_backward_triton`` the gradients. Launches take longer than the kernels, so all of it
is one differentiable function of few launches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchcpl.constraints import Rules
from torchcpl.kernels.nll_backward_triton import nll_backward_contexts, nll_backward_keys
from torchcpl.kernels.nll_contexts_triton import nll_contexts, nll_contexts_backward
from torchcpl.kernels.nll_forward_triton import nll_combine, nll_forward
from torchcpl.potentials import Potentials

PROGRAMS = 264  # enough to fill a GPU: two for each of 132 multiprocessors
STEPS = 32  # of a sequence that are added up at a time
BOTH_STEPS = 64  # contexts, in half precision, for which there are registers enough to do both backward passes in one


def sequence_log_probs(pot: Potentials, order: Tensor, rules: Rules) -> Tensor:
    """(B, P) log-probabilities of the sequences ``order`` (B, P, T)."""
    return _scores(pot, order, rules, False)


def remaining_log_probs(pot: Potentials, order: Tensor, rules: Rules) -> tuple[Tensor, Tensor]:
    """After each prefix of ``order`` (B, P, T), log P of all picks that remain and of the stop, two (B, P, T+1)."""
    return _scores(pot, order, rules, True)


def _scores(pot: Potentials, order: Tensor, rules: Rules, remaining: bool) -> Any:
    interaction: Any = pot.interaction  # LowRank
    factors = (interaction.keys, interaction.values, interaction.stop_key)
    stop, order = rules.biased(pot.stop), order.contiguous()
    return Scores.apply(pot.unary, stop, *factors, rules.available, order, remaining)


class Scores(torch.autograd.Function):
    """unary, stop, keys, values, stop_key, real, order → log P of the sequences, or ``remaining`` picks and stop."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        unary, stop, keys, values, stop_key, real, order, remaining = given
        scores, query, rank, lengths = nll(*given)
        ctx.save_for_backward(scores, query, rank, lengths, unary, keys, stop_key, real, order)
        ctx.options = (values.dtype, stop.dtype)
        return (scores[0], scores[1]) if remaining else scores[0].sum(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_picks: Tensor, g_stop: Tensor | None = None) -> tuple[Tensor | None, ...]:
        g_stop = None if g_stop is None else g_stop.contiguous()
        given = nll_backward(g_picks.contiguous(), g_stop, *ctx.saved_tensors, *ctx.options)
        return *given, *[None] * (8 - len(given))


@dataclass(frozen=True)
class Tiles:
    """Contexts, candidates and hidden dimensions of a tile, and how it is worked on."""

    steps: int
    candidates: int
    hidden: int
    chunk: int  # hidden dimensions in one product: all, or in float32 32 (by 16, ptxas 12.8 makes invalid addresses)
    count: int  # tiles of contexts, a program each
    split: int  # programs that share the candidates of a tile
    both: bool  # one walk over a row's keys gives the gradients of both sides of the product: its contexts are one tile
    warps: int
    stages: int


@lru_cache
def tiles(batch: int, count: int, steps: int, candidates: int, hidden: int, dtype: torch.dtype) -> Tiles:
    """The tiles for B, P, T, N and h."""
    single = dtype == torch.float32  # three products for one: smaller tiles, so that registers suffice
    deep = max(16, triton.next_power_of_2(hidden))
    tall = min(max(16, triton.next_power_of_2(steps)), 32 if single or deep > 128 else 64)
    wide = 64  # as many candidates as Hopper's matrix instruction has rows
    number = batch * count * max(1, -(-steps // tall))
    split = 1 if number >= PROGRAMS // 2 else min(PROGRAMS // number, -(-candidates // (4 * wide)))
    group = single or (tall <= 32 and deep <= 128)  # the four warps of one matrix instruction
    return Tiles(
        *(tall, wide, deep),
        chunk=min(deep, 32) if single else deep,
        count=number,
        split=split,
        both=number == batch and not single and tall <= BOTH_STEPS,
        warps=4 if group else 8,
        stages=3 if group else 2,
    )


def _nll(
    unary: Tensor, stop: Tensor, keys: Tensor, values: Tensor, stop_key: Tensor | None, real: Tensor, order: Tensor,
    remaining: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """``scores`` (5, B, P, T+1) as ``nll_forward_triton`` says; contexts, ranks and lengths for the backward pass."""
    scores, query, rank, lengths = found = _nll_like(unary, stop, keys, values, stop_key, real, order)
    arguments, tile, options = _launch(query, keys, unary, real, rank, lengths, scores, remaining)
    ends = scores.new_empty(scores.shape[1:])
    sizes = (keys.shape[1], *order.shape[1:], keys.shape[2], keys.shape[2] ** -0.5)
    nll_contexts[(lengths.numel(),)](
        *(values, *values.stride(), stop, *stop.stride(), *_strided(stop_key)),
        *(order, query, ends, rank, lengths, *sizes),
        DEEP=tile.hidden,
        STEPS=STEPS,
        BLOCK=1024,
    )
    shares = None if tile.split == 1 else scores.new_empty(4, tile.split, ends.numel())
    nll_forward[(tile.count, tile.split)](*arguments, ends, shares, **options)
    if shares is not None:
        grid = (-(-ends.numel() // 128),)
        nll_combine[grid](
            *(scores, ends, lengths, shares, tile.split, ends.numel(), order.shape[2]), REMAINING=remaining, BLOCK=128
        )
    return found


def _nll_backward(g_picks: Tensor, g_stop: Tensor | None, *saved: Any) -> list[Tensor]:
    """The gradients of unary, stop, keys, values and the stop's key, if there is one."""
    scores, query, rank, lengths, unary, keys, stop_key, real, order, *_ = saved
    arguments, tile, options = _launch(query, keys, unary, real, rank, lengths, scores, g_stop is not None)
    batch, candidates, hidden = keys.shape
    d_unary, d_stop, d_keys, d_values, *d_stop_key = found = _nll_backward_like(g_picks, g_stop, *saved)
    d_query, d_ends = scores.new_empty(tile.split, *query.shape), scores.new_empty(scores.shape[1:])
    of_candidates = (d_keys, d_unary, d_values)
    both = of_candidates if tile.both else (None, None, None)
    nll_backward_contexts[(tile.count, tile.split)](*arguments, g_picks, g_stop, d_query, d_ends, *both, **options)
    if not tile.both:
        grid = (batch, -(-candidates // tile.candidates))
        nll_backward_keys[grid](*arguments, g_picks, g_stop, *of_candidates, **options)
    part = min(tile.hidden, 64)
    nll_contexts_backward[(batch, -(-hidden // part))](
        *(d_query, d_ends, query, *_strided(stop_key), order, d_values, d_stop, d_stop_key[0] if d_stop_key else None),
        *(candidates, *order.shape[1:], hidden, hidden**-0.5, d_ends.numel(), tile.split),
        DEEP=part,
        STEPS=STEPS,
    )
    return found


def _strided(stop_key: Tensor | None) -> tuple[Any, ...]:
    return (None, 0, 0) if stop_key is None else (stop_key, *stop_key.stride())


def _launch(
    query: Tensor, keys: Tensor, unary: Tensor, real: Tensor, rank: Tensor, lengths: Tensor, scores: Tensor,
    remaining: bool,
) -> tuple[tuple[Any, ...], Tiles, dict[str, Any]]:  # fmt: skip
    """The arguments of the kernels over contexts and keys: tensors with their strides, sizes, tiles, options."""
    batch, candidates, hidden = keys.shape
    count, steps = scores.shape[2], scores.shape[3] - 1
    tile = tiles(batch, count, steps, candidates, hidden, keys.dtype)
    options = {
        "REMAINING": remaining,
        "TALL": tile.steps,
        "WIDE": tile.candidates,
        "DEEP": tile.hidden,
        "CHUNK": tile.chunk,
        "INTERPRETED": not keys.is_cuda,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    tensors = (query, keys, *keys.stride(), unary, *unary.stride(), real, *real.stride(), rank, lengths, scores)
    return (*tensors, candidates, count, steps, hidden), tile, options


def opaque(schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, and under ``torch.compile`` one opaque operation."""
    operation = torch.library.custom_op(
        f"torchcpl::{function.__name__.lstrip('_')}", function, mutates_args=(), schema=schema
    )
    operation.register_fake(fake)

    def call(*arguments: Any) -> Any:
        if torch.compiler.is_compiling():
            return operation(*arguments)
        with torch.cuda.device_of(arguments[0]):
            return function(*arguments)

    return call


def _nll_like(
    unary: Tensor, stop: Any, keys: Tensor, values: Any, stop_key: Any, real: Any, order: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, count, steps = order.shape
    query = keys.new_empty(batch, count * (steps + 1), keys.shape[2])
    rank = order.new_empty(batch, count, keys.shape[1], dtype=torch.int32)
    scores = unary.new_empty(5, batch, count, steps + 1, dtype=torch.float32)
    return scores, query, rank, rank.new_empty(batch, count)


def _nll_backward_like(g_picks: Any, g_stop: Any, *saved: Any) -> list[Tensor]:
    unary, keys, stop_key, _, _, values_dtype, stop_dtype = saved[4:]
    d_stop, d_values = keys.new_empty(len(keys), dtype=stop_dtype), keys.new_empty(keys.shape, dtype=values_dtype)
    ending = [] if stop_key is None else [stop_key.new_empty(stop_key.shape)]
    return [unary.new_empty(unary.shape), d_stop, keys.new_empty(keys.shape), d_values, *ending]


nll = opaque(
    "(Tensor unary, Tensor stop, Tensor keys, Tensor values, Tensor? stop_key, Tensor real, Tensor order,"
    " bool remaining) -> (Tensor, Tensor, Tensor, Tensor)",
    _nll,
    _nll_like,
)
nll_backward = opaque(
    "(Tensor g_picks, Tensor? g_stop, Tensor scores, Tensor query, Tensor rank, Tensor lengths, Tensor unary,"
    " Tensor keys, Tensor? stop_key, Tensor real, Tensor order, ScalarType values_dtype, ScalarType stop_dtype)"
    " -> Tensor[]",
    _nll_backward,
    _nll_backward_like,
)

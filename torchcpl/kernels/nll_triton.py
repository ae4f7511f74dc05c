"""Teacher forcing for ``LowRank`` on the GPU: the twin of ``functional.prefix_log_probs``.

Contexts come from plain torch; from contexts and keys to the log-probabilities of what comes after them it is two
kernels, ``nll_forward_triton``, and two backwards, ``nll_backward_triton``.
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
from torchcpl.interactions import LowRank
from torchcpl.kernels.nll_backward_triton import nll_backward_contexts, nll_backward_keys
from torchcpl.kernels.nll_forward_triton import nll_combine, nll_forward
from torchcpl.potentials import Potentials

PROGRAMS = 264  # enough to fill a GPU: two for each of 132 multiprocessors


def prefix_log_probs(pot: Potentials, order: Tensor, rules: Rules, remaining: bool = False) -> tuple[Tensor, Tensor]:
    """After each prefix of ``order`` (B, P, T), log P of the next pick, or of all that remain, and of the stop."""
    interaction = pot.interaction
    assert isinstance(interaction, LowRank)
    keys, stop, steps = interaction.keys, rules.biased(pot.stop), order.shape[2]
    query = (interaction.prefixes(order)[0] * keys.shape[2] ** -0.5).to(keys.dtype)  # (B, M, h)
    if interaction.stop_key is not None:  # one stop for every context
        added = (query.float() * interaction.stop_key.float().unsqueeze(1)).sum(-1)
        stop = stop.float().unsqueeze(-1) + added
    rank = order.new_full((*order.shape[:2], pot.num_candidates + 1), steps, dtype=torch.int32)
    places = torch.arange(steps, device=order.device, dtype=torch.int32).expand(order.shape)
    rank.scatter_(2, order.where(order >= 0, pot.num_candidates), places)
    picks, ended = Scores.apply(pot.unary, stop, keys, query, rules.available, rank, steps if remaining else 1)
    shape = (*order.shape[:2], steps + 1)
    return picks.view(shape), ended.view(shape)


class Scores(torch.autograd.Function):
    """θ (B, N), stop (B,) or (B, M), keys (B, N, h), contexts (B, M, h) → log P of picks to come and stop, (B, M)."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        unary, stop, keys, query, real, rank, ahead = given
        scores = nll(*given)
        ctx.save_for_backward(scores, unary, keys, query, real, rank)
        ctx.options = (stop.dtype, stop.dim(), ahead)
        return scores[0], scores[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_picks: Tensor, g_stop: Tensor) -> tuple[Tensor | None, ...]:
        dtype, dims, ahead = ctx.options
        d_unary, d_stop, d_keys, d_query = nll_backward(
            g_picks.contiguous(), g_stop.contiguous(), *ctx.saved_tensors, ahead
        )
        d_stop = d_stop if dims == 2 else d_stop.sum(1)
        return d_unary, d_stop.to(dtype), d_keys, d_query, None, None, None


@dataclass(frozen=True)
class Tiles:
    """Contexts, candidates and hidden dimensions of a tile, and how it is worked on."""

    steps: int
    candidates: int
    hidden: int
    chunk: int  # hidden dimensions in one product: all, or in float32 32 (by 16, ptxas 12.8 makes invalid addresses)
    count: int  # tiles of contexts, a program each
    split: int  # programs that share the candidates of a tile
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
        warps=4 if group else 8,
        stages=3 if group else 2,
    )


def _nll(unary: Tensor, stop: Tensor, keys: Tensor, query: Tensor, real: Tensor, rank: Tensor, ahead: int) -> Tensor:
    """``scores`` (5, B, M) as ``nll_forward_triton`` says."""
    scores = _scores_like(unary, stop, keys, query)
    arguments, tile, options = _launch(unary, keys, query, real, rank, scores, ahead)
    shares = None if tile.split == 1 else scores.new_empty(4, tile.split, scores[0].numel())
    ends = (stop, *(*stop.stride(), 0)[:2], shares)
    nll_forward[(tile.count, tile.split)](*arguments, *ends, **options)
    if shares is not None:
        contexts = scores[0].numel()
        nll_combine[(-(-contexts // 128),)](scores, *ends, tile.split, contexts, query.shape[1], BLOCK=128)
    return scores


def _nll_backward(
    g_picks: Tensor, g_stop: Tensor, scores: Tensor, unary: Tensor, keys: Tensor, query: Tensor, real: Tensor,
    rank: Tensor, ahead: int,
) -> list[Tensor]:  # fmt: skip
    """The gradients of unary, stop (B, M), keys and query."""
    arguments, tile, options = _launch(unary, keys, query, real, rank, scores, ahead)
    d_unary, d_stop, d_keys, d_query = _nll_backward_like(g_picks, g_stop, scores, unary, keys, query)
    shares = d_query if tile.split == 1 else scores.new_empty(tile.split, *query.shape)
    grid = (tile.count, tile.split)
    nll_backward_contexts[grid](*arguments, g_picks, g_stop, shares, d_stop, **options)
    grid = (len(keys), -(-keys.shape[1] // tile.candidates))
    nll_backward_keys[grid](*arguments, g_picks, g_stop, d_keys, d_unary, **options)
    if tile.split > 1:
        d_query = shares.sum(0).to(query.dtype)
    return [d_unary, d_stop, d_keys, d_query]


def _launch(
    unary: Tensor, keys: Tensor, query: Tensor, real: Tensor, rank: Tensor, scores: Tensor, ahead: int
) -> tuple[tuple[Any, ...], Tiles, dict[str, Any]]:
    """What all kernels are given, first tensors with their strides, then sizes; tiles; options."""
    batch, candidates, hidden = keys.shape
    count = rank.shape[1]
    steps = query.shape[1] // count - 1
    tile = tiles(batch, count, steps, candidates, hidden, keys.dtype)
    options = {
        "TALL": tile.steps,
        "WIDE": tile.candidates,
        "DEEP": tile.hidden,
        "CHUNK": tile.chunk,
        "INTERPRETED": not keys.is_cuda,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    tensors = (query, keys, *keys.stride(), unary, *unary.stride(), real, *real.stride(), rank, scores)
    return (*tensors, candidates, count, steps, hidden, ahead), tile, options


def opaque(schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` as it is, and as one operation that it does not look into for ``torch.compile``."""
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


def _scores_like(unary: Tensor, stop: Any, keys: Any, query: Tensor, *_: Any) -> Tensor:
    return unary.new_empty(5, *query.shape[:2], dtype=torch.float32)


def _nll_backward_like(
    g_picks: Any, g_stop: Any, scores: Tensor, unary: Tensor, keys: Tensor, query: Tensor, *_: Any
) -> list[Tensor]:
    d_stop = scores.new_empty(query.shape[:2])
    return [unary.new_empty(unary.shape), d_stop, keys.new_empty(keys.shape), query.new_empty(query.shape)]


nll = opaque(
    "(Tensor unary, Tensor stop, Tensor keys, Tensor query, Tensor real, Tensor rank, int ahead) -> Tensor",
    _nll,
    _scores_like,
)
nll_backward = opaque(
    "(Tensor g_picks, Tensor g_stop, Tensor scores, Tensor unary, Tensor keys, Tensor query, Tensor real, Tensor rank,"
    " int ahead) -> Tensor[]",
    _nll_backward,
    _nll_backward_like,
)

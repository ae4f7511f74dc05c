"""Teacher forcing for ``LowRank`` on the GPU: the twin of ``functional.prefix_log_probs`` and of what is made of it.

From values and sequences to contexts (``contexts_triton``), from contexts and keys to the log-probabilities of what
comes after them (``scores_triton``). The kernels take less time than a host may need to launch them: all of it is one
differentiable function of as few operations as will do.
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
from torchcpl.interactions.base import without_autocast
from torchcpl.kernels.contexts_triton import contexts_of, prefixes, prefixes_backward, prefixes_like
from torchcpl.kernels.scores_backward_triton import backward_contexts, backward_keys
from torchcpl.kernels.scores_triton import combine, forward
from torchcpl.potentials import Potentials

PROGRAMS = 264  # enough to fill a GPU: two for each of 132 multiprocessors


def prefix_log_probs(pot: Potentials, order: Tensor, rules: Rules, remaining: bool = False) -> tuple[Tensor, Tensor]:
    """After each prefix of ``order`` (B, P, T), log P of the next pick, or of all that remain, and of the stop."""
    picks, stop = Scores.apply(*_given(pot, order, rules), order.shape[2] if remaining else 1, "picks")
    return picks, stop


def sequence_nll(pot: Potentials, order: Tensor, rules: Rules, reduction: str) -> Tensor:
    """−log P of the sequences ``order`` (B, T): their mean or sum, or with "none" each of them (B,)."""
    loss: Tensor = Scores.apply(*_given(pot, order, rules), 1, reduction)
    return loss


def _given(pot: Potentials, order: Tensor, rules: Rules) -> tuple[Tensor | None, ...]:
    interaction = pot.interaction
    assert isinstance(interaction, LowRank)
    factors = (interaction.keys, interaction.values, interaction.stop_key)
    return pot.unary, rules.biased(pot.stop), *factors, rules.available, order.contiguous()


@dataclass(frozen=True)
class Tiles:
    """Contexts, candidates and hidden dimensions of a tile, and what becomes of them."""

    steps: int
    candidates: int
    hidden: int
    part: int  # of the hidden dimensions in one product: all or 32 (by 16, ptxas 12.8 makes invalid addresses)
    count: int  # tiles of contexts, a program each
    split: int  # programs that share the candidates of a tile
    both: bool  # one walk over a row's keys gives the gradients of both sides of the product: its contexts are one tile
    alone: bool  # that and no split: one program does all there is to do for a row, contexts and values included
    warps: int
    stages: int


@lru_cache
def tiles(batch: int, count: int, steps: int, candidates: int, hidden: int, dtype: torch.dtype) -> Tiles:
    """The tiles for B, P, T, N and h."""
    single = dtype == torch.float32  # operands in three parts each: smaller tiles, so that registers suffice
    deep = max(16, triton.next_power_of_2(hidden))
    tall = min(max(16, triton.next_power_of_2(steps)), 32 if single or deep > 128 else 64)
    wide = 64  # as many candidates as Hopper's matrix instruction has rows
    number = batch * count * max(1, -(-steps // tall))
    split = 1 if number >= PROGRAMS // 2 else min(PROGRAMS // number, -(-candidates // (4 * wide)))
    # As few launches as can be, hosts being slow, unless registers spill too much: in float32 at h = 128 it is 0.7 KiB
    # a thread, which pays. What spills has given wrong gradients on an H200 although its PTX was right (``nll_check``).
    small = tall <= 32 and deep <= 128
    both = number == batch and (small or not single)
    group = small or single  # the four warps of one matrix instruction
    return Tiles(
        *(tall, wide, deep),
        part=min(deep, 32) if single else deep,
        count=number,
        split=split,
        both=both,
        alone=both and small and split == 1,
        warps=4 if group else 8,
        stages=3 if group else 2,
    )


class Scores(torch.autograd.Function):
    """Potentials and sequences → what ``asked`` names: ``picks``, those of ``prefix_log_probs``, or a reduction.

    ``ahead`` of the picks after a prefix count as those to come.
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        unary, stop, keys, values, stop_key, real, order, ahead, asked = given
        # What −log P of whole sequences is weighted with; none where that is not asked for.
        scale = {"picks": None, "mean": 1 / len(order)}.get(asked, 1.0)
        found, query, rank = scores(*given[:-1], scale)
        ctx.save_for_backward(found, query, rank, unary, keys, stop_key, real, order)
        ctx.options = (values.dtype, stop.dtype, ahead)
        if asked == "picks":
            return found[0], found[1]
        return found[0].sum(-1) if asked == "none" else found[0].sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_picks: Tensor, g_stop: Tensor | None = None) -> tuple[Tensor | None, ...]:
        g_stop = None if g_stop is None else g_stop.contiguous()
        d_unary, d_stop, d_keys, d_values, *d_stop_key = scores_backward(
            g_picks.contiguous(), g_stop, *ctx.saved_tensors, *ctx.options
        )
        d_key = d_stop_key[0] if d_stop_key else None
        return d_unary, d_stop, d_keys, d_values, d_key, None, None, None, None


def scores_of(
    unary: Tensor, stop: Tensor, keys: Tensor, values: Tensor, stop_key: Tensor | None, real: Tensor, order: Tensor,
    ahead: int, scale: float | None, tile: Tiles | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``found`` (5, B, [P,] T+1), for the backward pass too; and contexts and ranks, for it alone."""
    query, rank = prefixes_like(values, order, keys.dtype)
    found = _found_like(unary, order)
    arguments, sizes, tile, options = _launch(query, keys, unary, real, rank, found, ahead, tile)
    if tile.alone:
        own = (values, *values.stride(), *_with_strides(stop_key))
    else:
        prefixes(values, order, query, rank)
        own = (None,) * 7
        if stop_key is not None:  # one stop for every context then
            with without_autocast(keys):
                stop = stop.float().unsqueeze(-1) + torch.einsum(
                    "bmh,bh->bm", contexts_of(query, keys.shape[2]), stop_key.to(keys.dtype)
                )
    contexts = query.shape[0] * query.shape[1]
    parts = None if tile.split == 1 else found.new_empty(4, tile.split, contexts)
    rest = (stop, *(*stop.stride(), 0)[:2], order, scale, parts)
    forward[(tile.count, tile.split)](*arguments, *rest, *own, *sizes, **options)
    if parts is not None:
        _, count, steps, *_ = sizes
        combine[(-(-contexts // 128),)](found, *rest, tile.split, contexts, count, steps, BLOCK=128)
    return found, query, rank


def gradients_of(
    g_picks: Tensor, g_stop: Tensor | None, found: Tensor, query: Tensor, rank: Tensor, unary: Tensor, keys: Tensor,
    stop_key: Tensor | None, real: Tensor, order: Tensor, values_dtype: torch.dtype, stop_dtype: torch.dtype,
    ahead: int, tile: Tiles | None = None,
) -> list[Tensor]:  # fmt: skip
    """The gradients of unary, stop, keys, values and the stop's key, if there is one."""
    arguments, sizes, tile, options = _launch(query, keys, unary, real, rank, found, ahead, tile)
    arguments += (g_picks, min(g_picks.dim(), 1), g_stop)
    d_unary, d_keys = unary.new_empty(unary.shape), keys.new_empty(keys.shape)
    if tile.alone:
        d_stop, d_values = unary.new_empty(len(keys), dtype=stop_dtype), keys.new_empty(keys.shape, dtype=values_dtype)
        d_stop_key = None if stop_key is None else stop_key.new_empty(stop_key.shape)
        own = (d_values, order, *_with_strides(stop_key), d_stop_key)
        backward_contexts[(tile.count,)](*arguments, None, d_stop, d_keys, d_unary, *own, *sizes, **options)
        return [d_unary, d_stop, d_keys, d_values, *([] if d_stop_key is None else [d_stop_key])]
    d_stop = found.new_empty(query.shape[:2])
    split = tile.split > 1
    shape = (*query.shape[:2], keys.shape[2])
    d_query = found.new_empty(tile.split, *shape) if split else keys.new_empty(shape)
    both = (d_keys, d_unary) if tile.both else (None, None)
    own = (None,) * 6
    backward_contexts[(tile.count, tile.split)](*arguments, d_query, d_stop, *both, *own, *sizes, **options)
    if not tile.both:
        grid = (len(keys), -(-keys.shape[1] // tile.candidates))
        backward_keys[grid](*arguments, d_keys, d_unary, *sizes[:-1], **options)
    if split:
        d_query = d_query.sum(0).to(keys.dtype)
    ending = []
    if stop_key is not None:
        slope = d_stop.to(keys.dtype)
        with without_autocast(keys):
            d_query.baddbmm_(slope.unsqueeze(2), stop_key.to(keys.dtype).unsqueeze(1))
            ending = [torch.einsum("bm,bmh->bh", slope, contexts_of(query, keys.shape[2])).to(stop_key.dtype)]
    d_values = prefixes_backward(d_query, order, keys.shape[1], values_dtype)
    return [d_unary, d_stop.sum(1).to(stop_dtype), d_keys, d_values, *ending]


def _with_strides(stop_key: Tensor | None) -> tuple[Any, ...]:
    return (None, None, None) if stop_key is None else (stop_key, *stop_key.stride())


def _launch(
    query: Tensor,
    keys: Tensor,
    unary: Tensor,
    real: Tensor,
    rank: Tensor,
    found: Tensor,
    ahead: int,
    tile: Tiles | None,
) -> tuple[tuple[Any, ...], tuple[Any, ...], Tiles, dict[str, Any]]:
    """What all kernels are given: tensors with their strides, sizes (N, P, T, h, ahead, 1/√h), tiles, options."""
    batch, candidates, hidden = keys.shape
    count = rank.shape[1]
    steps = query.shape[1] // count - 1
    tile = tile or tiles(batch, count, steps, candidates, hidden, keys.dtype)
    options = {
        "TALL": tile.steps,
        "WIDE": tile.candidates,
        "DEEP": tile.hidden,
        "PART": tile.part,
        "PARTS": query.shape[2] // hidden,
        "INTERPRETED": not keys.is_cuda,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    tensors = (query, keys, *keys.stride(), unary, *unary.stride(), real, *real.stride(), rank, found)
    return tensors, (candidates, count, steps, hidden, ahead, hidden**-0.5), tile, options


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


def _found_like(unary: Tensor, order: Tensor) -> Tensor:
    *sequences, steps = order.shape
    return unary.new_empty(5, *sequences, steps + 1, dtype=torch.float32)


def _scores_like(
    unary: Tensor, stop: Any, keys: Tensor, values: Tensor, stop_key: Any, real: Any, order: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _found_like(unary, order), *prefixes_like(values, order, keys.dtype)


def _scores_backward_like(
    g_picks: Tensor, g_stop: Any, found: Any, query: Any, rank: Any, unary: Tensor, keys: Tensor,
    stop_key: Tensor | None, real: Any, order: Any, values_dtype: torch.dtype, stop_dtype: torch.dtype, *_: Any,
) -> list[Tensor]:  # fmt: skip
    d_stop, d_values = keys.new_empty(len(keys), dtype=stop_dtype), keys.new_empty(keys.shape, dtype=values_dtype)
    ending = [] if stop_key is None else [stop_key.new_empty(stop_key.shape)]
    return [unary.new_empty(unary.shape), d_stop, keys.new_empty(keys.shape), d_values, *ending]


scores = opaque(
    "(Tensor unary, Tensor stop, Tensor keys, Tensor values, Tensor? stop_key, Tensor real, Tensor order, int ahead,"
    " float? scale) -> (Tensor, Tensor, Tensor)",
    scores_of,
    _scores_like,
)
scores_backward = opaque(
    "(Tensor g_picks, Tensor? g_stop, Tensor found, Tensor query, Tensor rank, Tensor unary, Tensor keys,"
    " Tensor? stop_key, Tensor real, Tensor order, ScalarType values_dtype, ScalarType stop_dtype, int ahead)"
    " -> Tensor[]",
    gradients_of,
    _scores_backward_like,
)

"""Teacher forcing for ``LowRank`` on the GPU: the twin of ``functional.prefix_log_probs``.

Two differentiable steps: from values and sequences to contexts (``contexts_triton``), from contexts and keys to the
log-probabilities of what comes after them (``scores_triton``). Here is what launches the latter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchcpl.constraints import Rules
from torchcpl.interactions import LowRank
from torchcpl.kernels.contexts_triton import Prefixes, opaque
from torchcpl.kernels.scores_backward_triton import backward_contexts, backward_keys
from torchcpl.kernels.scores_triton import combine, forward
from torchcpl.potentials import Potentials

PROGRAMS = 264  # enough to fill a GPU: two for each of 132 multiprocessors


def prefix_log_probs(pot: Potentials, order: Tensor, rules: Rules, remaining: bool = False) -> tuple[Tensor, Tensor]:
    """After each prefix of ``order`` (B, P, T), log P of the next pick, or of all that remain, and of the stop."""
    interaction = pot.interaction
    assert isinstance(interaction, LowRank)
    batch, count, steps = order.shape
    keys, stop_key = interaction.keys, interaction.stop_key
    # (B, M, h) with M = P·(T+1), and (B, P, N)
    query, rank = Prefixes.apply(interaction.values, order, keys.dtype)
    stop = rules.biased(pot.stop).float().unsqueeze(-1).expand(batch, query.shape[1])
    if stop_key is not None:
        stop = stop + torch.einsum("bmh,bh->bm", query, stop_key.to(query.dtype))
    ahead = steps if remaining else 1
    picks, log_stop = Scores.apply(query, keys, pot.unary, rules.available, rank, stop, ahead)
    return picks.view(batch, count, steps + 1), log_stop.view(batch, count, steps + 1)


@dataclass(frozen=True)
class Tiles:
    """Contexts, candidates and hidden dimensions of a tile, and what becomes of them."""

    steps: int
    candidates: int
    hidden: int
    part: int  # of the hidden dimensions in one product
    count: int  # tiles of contexts, a program each
    split: int  # programs that share the candidates of a tile
    both: bool  # one walk over a row's keys gives the gradients of both sides of the product: its contexts are one tile
    warps: int
    stages: int


def tiles(batch: int, count: int, steps: int, candidates: int, hidden: int, dtype: torch.dtype) -> Tiles:
    """The tiles for B, P, T, N and h."""
    single = dtype == torch.float32  # three products of twice the size each: smaller tiles, so that registers suffice
    deep = max(16, triton.next_power_of_2(hidden))
    tall = min(max(16, triton.next_power_of_2(steps)), 32 if single or deep > 128 else 64)
    wide = 64 if deep <= 128 else 32
    number = batch * count * max(1, triton.cdiv(steps, tall))
    split = 1 if number >= PROGRAMS // 2 else min(triton.cdiv(PROGRAMS, number), triton.cdiv(candidates, 4 * wide))
    return Tiles(
        *(tall, wide, deep),
        part=min(deep, 32) if single else deep,
        count=number,
        split=split,
        both=number == batch,
        warps=4 if tall == 16 else 8,
        stages=1 if single else 2,
    )


class Scores(torch.autograd.Function):
    """Contexts (B, M, h), keys, unary, real (B, N), ranks, stop (B, M) → the two of ``prefix_log_probs``, (B, M) each.

    ``ahead`` of the picks after a prefix count as those to come.
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        found = scores(*given)
        *tensors, ctx.ahead = given
        ctx.save_for_backward(found, *tensors)
        return found[0], found[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_query, d_keys, d_unary, d_stop = scores_backward(torch.stack(grads), *ctx.saved_tensors, ctx.ahead)
        return d_query, d_keys, d_unary, None, None, d_stop, None


def _scores_like(query: Tensor, *_: Any) -> Tensor:
    """(5, B, M): picks, stop, and for the backward pass the normalisers in two parts and how many picks come."""
    return torch.empty(5, *query.shape[:2], dtype=torch.float32, device=query.device)


def _scores(query: Tensor, keys: Tensor, unary: Tensor, real: Tensor, rank: Tensor, stop: Tensor, ahead: int) -> Tensor:
    found = _scores_like(query)
    arguments, sizes, tile, options = _launch(query, keys, unary, real, rank, stop, ahead)
    contexts = found[0].numel()
    parts = None if tile.split == 1 else torch.empty(4, tile.split, contexts, device=query.device)
    forward[(tile.count, tile.split)](*arguments, found, parts, *sizes, **options)
    if parts is not None:
        grid = (triton.cdiv(contexts, 128),)
        combine[grid](parts, stop, *stop.stride(), found, tile.split, contexts, query.shape[1], BLOCK=128)
    return found


def _scores_backward_like(
    grads: Tensor, found: Tensor, query: Tensor, keys: Tensor, unary: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_keys = torch.empty(keys.shape, dtype=keys.dtype, device=keys.device)
    d_unary = torch.empty(unary.shape, dtype=unary.dtype, device=unary.device)
    return torch.empty_like(query), d_keys, d_unary, torch.empty_like(found[0])


def _scores_backward(
    grads: Tensor, found: Tensor, query: Tensor, keys: Tensor, unary: Tensor, real: Tensor, rank: Tensor, stop: Tensor,
    ahead: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    d_query, d_keys, d_unary, d_stop = _scores_backward_like(grads, found, query, keys, unary)
    arguments, sizes, tile, options = _launch(query, keys, unary, real, rank, stop, ahead)
    parts = d_query if tile.split == 1 else query.new_empty(tile.split, *query.shape, dtype=torch.float32)
    rest = (d_keys, d_unary) if tile.both else (None, None)
    grid = (tile.count, tile.split)
    backward_contexts[grid](*arguments, found, grads, parts, d_stop, *rest, *sizes, **options)
    if not tile.both:
        grid = (len(keys), triton.cdiv(keys.shape[1], tile.candidates))
        backward_keys[grid](*arguments, found, grads, d_keys, d_unary, *sizes, **options)
    if tile.split > 1:
        d_query = parts.sum(0).to(query.dtype)
    return d_query, d_keys, d_unary, d_stop


def _launch(query: Tensor, keys: Tensor, unary: Tensor, real: Tensor, rank: Tensor, stop: Tensor, ahead: int) -> Any:
    """What all kernels are given: tensors with their strides, sizes (N, P, T, h, ahead), tiles, options."""
    batch, contexts, hidden = query.shape
    _, count, candidates = rank.shape
    steps = contexts // count - 1
    tile = tiles(batch, count, steps, candidates, hidden, keys.dtype)
    seen = real.view(torch.uint8)
    strided = [part for tensor in (keys, unary, seen) for part in (tensor, *tensor.stride())]
    options = {
        "TALL": tile.steps,
        "WIDE": tile.candidates,
        "DEEP": tile.hidden,
        "PART": tile.part,
        "PRECISION": _precision(keys),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    tensors = [query.contiguous(), *strided, rank.contiguous(), stop, *stop.stride()]
    return tensors, (candidates, count, steps, hidden, ahead), tile, options


def _precision(keys: Tensor) -> str:
    if keys.dtype == torch.float32:
        return (
            "tf32x3"  # three products on the tensor cores keep float32's digits; a single one would lose half of them
        )
    return "ieee" if keys.is_cuda else "interpreted"


_TENSORS = "Tensor query, Tensor keys, Tensor unary, Tensor real, Tensor rank, Tensor stop, int ahead"
scores = opaque(f"({_TENSORS}) -> Tensor", _scores, _scores_like)
scores_backward = opaque(
    f"(Tensor grads, Tensor found, {_TENSORS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _scores_backward,
    _scores_backward_like,
)

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The contexts of all prefixes of given sequences, in one launch instead of the dozen that plain torch takes.

Or in none: where one program scores all contexts of a row, it makes them itself (``write_ranks``, ``write_contexts``).

The context after t picks is the running sum s_t = Σ_{u<t} values[order_u], here already divided by √h. With it comes
the rank of every candidate, the step at which it is picked (T if never): the whole of what the scores of a prefix
need to know about the sequence, since candidate n is gone after t picks iff rank[n] < t, and next iff rank[n] = t.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchcpl.kernels.pairs_triton import parts_of

STEPS = 32  # steps that a program sums up at a time
PART = 32  # hidden dimensions of a program
BLOCK = 1024  # ranks written at a time


def prefixes_like(values: Tensor, order: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Room for contexts (B, P·(T+1), h) in ``dtype``, float32 in three parts, and ranks (B, P, N), int32."""
    batch, candidates, hidden = values.shape
    count, steps = (1, *order.shape[1:])[-2:]
    width, kept = (3 * hidden, torch.bfloat16) if dtype == torch.float32 else (hidden, dtype)
    query = values.new_empty(batch, count * (steps + 1), width, dtype=kept)
    return query, values.new_empty(batch, count, candidates, dtype=torch.int32)


def prefixes(values: Tensor, order: Tensor, query: Tensor, rank: Tensor) -> None:
    """From values (B, N, h) and order (B, [P,] T), contexts and ranks into the room for them."""
    batch, candidates, hidden = values.shape
    count, steps = (1, *order.shape[1:])[-2:]
    grid = (batch * count, -(-hidden // PART))
    sizes = (candidates, count, steps, hidden, hidden**-0.5)
    options = {"PARTS": query.shape[2] // hidden, "STEPS": STEPS, "PART": PART, "BLOCK": BLOCK}
    _sum[grid](values, *values.stride(), order, query, rank, *sizes, **options)


def prefixes_backward(grad: Tensor, order: Tensor, candidates: int, dtype: torch.dtype) -> Tensor:
    """The gradient (B, N, h) of the values from that of the contexts."""
    batch, _, hidden = grad.shape
    count, steps = (1, *order.shape[1:])[-2:]
    result = grad.new_zeros(batch, candidates, hidden, dtype=dtype)
    sizes = (candidates, count, steps, hidden, hidden**-0.5)
    if steps:
        _sum_backward[(batch, -(-hidden // PART))](grad, order, result, *sizes, STEPS=STEPS, PART=PART)
    return result


def contexts_of(query: Tensor, hidden: int) -> Tensor:
    """(B, M, h) what ``query`` holds, whole."""
    return query if query.shape[2] == hidden else query.unflatten(2, (3, hidden)).float().sum(2)


@triton.jit
def store_context(query, sums, mask, H, PARTS: tl.constexpr):
    if PARTS == 1:
        tl.store(query, sums, mask=mask)
    else:
        high, mid, low = parts_of(sums)
        tl.store(query, high, mask=mask)
        tl.store(query + H, mid, mask=mask)
        tl.store(query + 2 * H, low, mask=mask)


@triton.jit
def write_ranks(order, rank, N, T, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """The ranks of one sequence."""
    for start in range(0, N, BLOCK):
        n = start + tl.arange(0, BLOCK)
        tl.store(rank + n, tl.full((BLOCK,), 0, tl.int32) + T, mask=n < N)
    tl.debug_barrier()  # other threads write the picks' ranks over these
    for start in range(0, T, STEPS):
        u = start + tl.arange(0, STEPS)
        pick = tl.load(order + u, mask=u < T, other=-1)
        tl.store(rank + pick, u, mask=pick >= 0)


@triton.jit
def write_contexts(values, values_n, values_h, order, query, h, T, H, scale, PARTS: tl.constexpr, STEPS: tl.constexpr):
    """The hidden dimensions ``h`` of the contexts of one sequence."""
    before = tl.zeros(h.shape, tl.float32)
    store_context(query + h, before, h < H, H, PARTS)
    for start in range(0, T, STEPS):
        u = start + tl.arange(0, STEPS)
        pick = tl.load(order + u, mask=u < T, other=-1)
        there = (pick >= 0)[:, None] & (h < H)[None, :]
        steps = tl.load(values + pick[:, None] * values_n + h[None, :] * values_h, mask=there, other=0.0).to(tl.float32)
        sums = (tl.cumsum(steps, 0) + before[None, :]) * scale
        there = (u < T)[:, None] & (h < H)[None, :]
        store_context(query + (u[:, None] + 1) * (PARTS * H) + h[None, :], sums, there, H, PARTS)
        before += tl.sum(steps, 0)


# fmt: off
@triton.jit
def _sum(
    values, values_b, values_n, values_h, order, query, rank, N, P, T, H, scale,
    PARTS: tl.constexpr, STEPS: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr,
):
    # fmt: on
    row = tl.program_id(0).to(tl.int64)  # sequence p of row b
    h = tl.program_id(1) * PART + tl.arange(0, PART)
    order += row * T
    if tl.program_id(1) == 0:
        write_ranks(order, rank + row * N, N, T, STEPS, BLOCK)
    values += (row // P) * values_b
    query += row * (T + 1) * (PARTS * H)
    write_contexts(values, values_n, values_h, order, query, h, T, H, scale, PARTS, STEPS)


# fmt: off
@triton.jit
def _sum_backward(
    grad, order, result, N, P, T, H, scale,
    STEPS: tl.constexpr, PART: tl.constexpr,
):
    # fmt: on
    """The pick at step u is in every later context: its gradient is the sum of theirs."""
    b = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * PART + tl.arange(0, PART)
    result += b * N * H
    for p in range(P):
        row = b * P + p
        after = tl.zeros((PART,), tl.float32)
        last = (T - 1) // STEPS
        for back in range(last + 1):
            u = (last - back) * STEPS + tl.arange(0, STEPS)
            there = (u < T)[:, None] & (h < H)[None, :]
            later = grad + (row * (T + 1) + 1 + u)[:, None] * H + h[None, :]
            steps = tl.load(later, mask=there, other=0.0).to(tl.float32)
            sums = (tl.cumsum(steps, 0, reverse=True) + after[None, :]) * scale
            after += tl.sum(steps, 0)
            pick = tl.load(order + row * T + u, mask=u < T, other=-1)
            spot = result + pick[:, None] * H + h[None, :]
            there = (pick >= 0)[:, None] & (h < H)[None, :]
            if P > 1:  # the same candidates in other orders: one sequence after the other, so nothing is atomic
                sums += tl.load(spot, mask=there, other=0.0).to(tl.float32)
            tl.store(spot, sums, mask=there)
        tl.debug_barrier()

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The contexts of all prefixes of given sequences, and their gradients: one launch each, instead of a dozen in torch.

The context after t picks is the running sum Σ_{u<t} values[order_u], divided by √h. A pick is in every later context:
its gradient is the sum of theirs. Arguments as in ``nll_forward_triton``, and

    values (B, N, h): of the candidates.
    stop (B,): logit of the stop.
    stop_key (B, h): what the contexts add to it, by a product; None for nothing.
    order (B, P, T): int64, the picks, −1 after the end.
    scale: 1/√h.
    STEPS: picks that are added up at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl


# fmt: off
@triton.jit(do_not_specialize=["P", "T"])
def nll_contexts(
    values, values_b, values_n, values_h,
    stop, stop_b,
    stop_key, stop_key_b, stop_key_h,
    order,
    query,
    ends,
    rank,
    lengths,
    N, P, T, H, scale,
    DEEP: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):
    # fmt: on
    """One sequence: ``query``, ``ends``, ``rank`` and ``lengths`` are written.

    DEEP: a power of two, at least h.
    BLOCK: ranks written at a time.
    """
    sequence = tl.program_id(0).to(tl.int64)
    b = sequence // P
    order += sequence * T
    query += sequence * (T + 1) * H
    ends += sequence * (T + 1)
    rank += sequence * N
    values += b * values_b
    for start in range(0, N, BLOCK):
        n = start + tl.arange(0, BLOCK)
        tl.store(rank + n, tl.full((BLOCK,), 0, tl.int32) + T, mask=n < N)
    tl.debug_barrier()  # other threads write the picks' ranks over these
    h = tl.arange(0, DEEP)
    final = tl.load(stop + b * stop_b).to(tl.float32)
    context = tl.zeros((DEEP,), tl.float32)
    tl.store(query + h, context, mask=h < H)
    tl.store(ends, final)
    length = 0
    for start in range(0, T, STEPS):
        t = start + tl.arange(0, STEPS)
        pick = tl.load(order + t, mask=t < T, other=-1)
        picked = (pick >= 0) & (pick < N)
        length += tl.sum(picked.to(tl.int32), 0)
        tl.store(rank + pick, t, mask=picked)
        where = pick[:, None] * values_n + h[None, :] * values_h
        steps = tl.load(values + where, mask=picked[:, None] & (h < H)[None, :], other=0.0).to(tl.float32)
        sums = ((tl.cumsum(steps, 0) + context[None, :]) * scale).to(query.dtype.element_ty)
        context += tl.sum(steps, 0)
        tl.store(query + (t[:, None] + 1) * H + h[None, :], sums, mask=(t < T)[:, None] & (h < H)[None, :])
        added = tl.zeros((STEPS,), tl.float32)
        if stop_key is not None:
            key = tl.load(stop_key + b * stop_key_b + h * stop_key_h, mask=h < H, other=0.0).to(tl.float32)
            added = tl.sum(sums.to(tl.float32) * key[None, :], 1)
        tl.store(ends + t + 1, final + added, mask=t < T)
    tl.store(lengths + sequence, length)


# fmt: off
@triton.jit(do_not_specialize=["P", "T", "contexts", "split"])
def nll_contexts_backward(
    d_query,
    d_ends,
    query,
    stop_key, stop_key_b, stop_key_h,
    order,
    d_values,
    d_stop,
    d_stop_key,
    N, P, T, H, scale, contexts, split,
    DEEP: tl.constexpr, STEPS: tl.constexpr,
):
    # fmt: on
    """Some hidden dimensions of a row. ``d_stop`` and ``d_stop_key``, unless None, are written, ``d_values`` added to.

    d_query (split, B·M, h): shares of the gradient of ``query``.
    d_ends (B·M): gradient of ``ends``.
    DEEP: how many hidden dimensions.
    """
    b = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * DEEP + tl.arange(0, DEEP)
    d_values += b * N * H
    d_final = 0.0
    d_key = tl.zeros((DEEP,), tl.float32)
    tiles = tl.cdiv(T, STEPS)
    for p in range(P):
        sequence = b * P + p
        base = sequence * (T + 1)
        d_final += tl.load(d_ends + base)
        later = tl.zeros((DEEP,), tl.float32)
        for back in range(tiles):
            t = (tiles - 1 - back) * STEPS + tl.arange(0, STEPS)
            there = (t < T)[:, None] & (h < H)[None, :]
            at = (base + 1 + t)[:, None] * H + h[None, :]
            slope = tl.load(d_ends + base + 1 + t, mask=t < T, other=0.0)
            d_final += tl.sum(slope, 0)
            steps = tl.zeros((STEPS, DEEP), tl.float32)
            for share in range(split):
                steps += tl.load(d_query + share * contexts * H + at, mask=there, other=0.0)
            if stop_key is not None:
                key = tl.load(stop_key + b * stop_key_b + h * stop_key_h, mask=h < H, other=0.0).to(tl.float32)
                steps += slope[:, None] * key[None, :]
                d_key += tl.sum(slope[:, None] * tl.load(query + at, mask=there, other=0.0).to(tl.float32), 0)
            sums = (tl.cumsum(steps, 0, reverse=True) + later[None, :]) * scale
            later += tl.sum(steps, 0)
            pick = tl.load(order + sequence * T + t, mask=t < T, other=-1)
            spot = d_values + pick[:, None] * H + h[None, :]
            there = ((pick >= 0) & (pick < N))[:, None] & (h < H)[None, :]
            tl.store(spot, tl.load(spot, mask=there, other=0.0).to(tl.float32) + sums, mask=there)
        tl.debug_barrier()  # the next sequence picks the same candidates in another order
    tl.store(d_stop + b, d_final, mask=tl.program_id(1) == 0)
    if d_stop_key is not None:
        tl.store(d_stop_key + b * H + h, d_key, mask=h < H)

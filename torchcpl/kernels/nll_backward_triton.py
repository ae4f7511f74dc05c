# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The gradient of ``nll_forward``, whose logits are recomputed tile by tile:

    p = exp(logits − norm),     ∂logits = [to come]·∂picks − p·(number·∂picks + ∂stop)

and from that ∂query = ∂logits·keys, ∂keys = ∂logitsᵀ·query and ∂unary = Σ ∂logits. Arguments as in
``nll_forward_triton``, and the gradients of what is asked for:

    g_picks, g_stop (B·M): of log P of the picks to come and of the stop, if REMAINING.
    g_picks (B·P): of log P of whole sequences, if not; g_stop is None.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torchcpl.kernels.nll_forward_triton import (
    VARYING,
    load_candidates,
    load_rows,
    logits_of,
    product,
    row_of,
    share_of,
    tile_of,
    to_come,
)


@triton.jit
def load_gradients(scores, g_picks, g_stop, sequence, contexts, at, there, ended):
    """Of contexts: the two parts of norm, ∂picks, ∂stop, and what p is weighted with, number·∂picks + ∂stop."""
    peak = tl.load(scores + 2 * contexts + at, mask=there, other=float("inf"))  # p is zero where nothing is there
    rest = tl.load(scores + 3 * contexts + at, mask=there, other=0.0)
    number = tl.load(scores + 4 * contexts + at, mask=there, other=0.0)
    if g_stop is None:
        d_picks = tl.where(there, tl.load(g_picks + sequence), 0.0)
        d_stop = tl.where(ended, d_picks, 0.0)
    else:
        d_picks = tl.load(g_picks + at, mask=there, other=0.0)
        d_stop = tl.load(g_stop + at, mask=there, other=0.0)
    return peak, rest, d_picks, d_stop, number * d_picks + d_stop


@triton.jit
def gradient(logits, coming, peak, rest, d_picks, weight):
    """∂logits."""
    return tl.where(coming, d_picks, 0.0) - tl.exp(logits - peak - rest) * weight


@triton.jit
def store_stop_gradient(d_stop, scores, contexts, at, there, slope, weight):
    last = tl.load(scores + contexts + at, mask=there, other=-float("inf"))
    tl.store(d_stop + at, tl.where(last > -float("inf"), slope - tl.exp(last) * weight, 0.0), mask=there)


@triton.jit
def store_rows(pointer, at, there, values, H, WIDTH: tl.constexpr):
    h = tl.arange(0, WIDTH)
    tl.store(pointer + at[:, None] * H + h[None, :], values, mask=there[:, None] & (h < H)[None, :])


# fmt: off
@triton.jit(do_not_specialize=VARYING)
def nll_backward_contexts(
    query,
    keys, keys_b, keys_n, keys_h,
    unary, unary_b, unary_n,
    real, real_b, real_n,
    rank,
    lengths,
    scores,
    N, P, T, H,
    g_picks, g_stop,
    d_query,
    d_ends,
    d_keys,
    d_unary,
    d_values,
    REMAINING: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr, CHUNK: tl.constexpr, INTERPRETED: tl.constexpr,
):
    # fmt: on
    """∂query of a tile of contexts over this program's share of the candidates, and the ∂ends of each.

    d_query (shares, B·M, h): written, float32.
    d_ends (B·M): written, float32.
    d_keys (B, N, h), d_unary (B, N), d_values (B, N, h): written, the last with zeros, if the tile is all contexts of
        its row; else None.
    """
    sequence, first_tile, t, base, contexts = tile_of(P, T, TALL)
    b = sequence // P
    keys, unary, real = row_of(b, keys, keys_b, unary, unary_b, real, real_b)
    query += base * H
    rank += sequence * N
    length = tl.load(lengths + sequence)
    peak, rest, d_picks, slope, weight = load_gradients(
        scores, g_picks, g_stop, sequence, contexts, base + t, t <= T, t == length
    )
    peak_0, rest_0, d_picks_0, slope_0, weight_0 = load_gradients(
        scores, g_picks, g_stop, sequence, contexts, base, first_tile, length == 0
    )
    if tl.program_id(1) == 0:
        store_stop_gradient(d_ends, scores, contexts, base + t, t <= T, slope, weight)
        store_stop_gradient(d_ends, scores, contexts, base, first_tile, slope_0, weight_0)

    d_q = tl.zeros((DEEP, TALL), tl.float32)
    first, last = share_of(N, WIDE)
    for start in range(first, last, WIDE):
        n = start + tl.arange(0, WIDE)
        theta, there, ranks = load_candidates(n, unary, unary_n, real, real_n, rank, N)
        logits, coming = logits_of(
            query, t, T, keys, keys_n, keys_h, n, theta, there, ranks, N, H,
            REMAINING, TALL, WIDE, DEEP, CHUNK, INTERPRETED,
        )  # fmt: skip
        d_logits = gradient(logits, coming, peak[None, :], rest[None, :], d_picks[None, :], weight[None, :])
        k = load_rows(keys, n, keys_n, keys_h, n < N, 0, H, DEEP)
        d_q = product(tl.trans(k), d_logits.to(k.dtype), d_q, INTERPRETED)
        if d_keys is not None:
            q = load_rows(query, t, H, 1, t <= T, 0, H, DEEP)
            d_k = product(d_logits.to(q.dtype), q, tl.zeros((WIDE, DEEP), tl.float32), INTERPRETED)
            store_rows(d_keys + b * N * H, n, n < N, d_k, H, DEEP)
            store_rows(d_values + b * N * H, n, n < N, tl.zeros((WIDE, DEEP), tl.float32), H, DEEP)
            logits_0 = tl.where(there, theta, -float("inf"))
            d_theta = gradient(logits_0, to_come(ranks, ranks, T, REMAINING), peak_0, rest_0, d_picks_0, weight_0)
            tl.store(d_unary + b * N + n, d_theta + tl.sum(d_logits, 1), mask=n < N)
    d_query += (tl.program_id(1).to(tl.int64) * contexts + base) * H
    store_rows(d_query, t, t <= T, tl.trans(d_q), H, DEEP)
    h = tl.arange(0, DEEP)
    tl.store(d_query + h, tl.zeros((DEEP,), tl.float32), mask=(h < H) & first_tile)


# fmt: off
@triton.jit(do_not_specialize=VARYING)
def nll_backward_keys(
    query,
    keys, keys_b, keys_n, keys_h,
    unary, unary_b, unary_n,
    real, real_b, real_n,
    rank,
    lengths,
    scores,
    N, P, T, H,
    g_picks, g_stop,
    d_keys,
    d_unary,
    d_values,
    REMAINING: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr, CHUNK: tl.constexpr, INTERPRETED: tl.constexpr,
):
    # fmt: on
    """∂keys and ∂unary of a tile of candidates, over all contexts of their row.

    d_keys (B, N, h), d_unary (B, N), d_values (B, N, h): written, the last with zeros.
    """
    b = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    contexts = tl.num_programs(0) * P * (T + 1)
    keys, unary, real = row_of(b, keys, keys_b, unary, unary_b, real, real_b)

    d_k = tl.zeros((WIDE, DEEP), tl.float32)
    d_theta = tl.zeros((WIDE,), tl.float32)
    tiles = tl.maximum(tl.cdiv(T, TALL), 1)
    for tile in range(P * tiles):
        sequence = b * P + tile // tiles
        base = sequence * (T + 1)
        here = query + base * H
        t = (tile % tiles) * TALL + 1 + tl.arange(0, TALL)
        length = tl.load(lengths + sequence)
        theta, there, ranks = load_candidates(n, unary, unary_n, real, real_n, rank + sequence * N, N)
        peak, rest, d_picks, _, weight = load_gradients(
            scores, g_picks, g_stop, sequence, contexts, base + t, t <= T, t == length
        )
        logits, coming = logits_of(
            here, t, T, keys, keys_n, keys_h, n, theta, there, ranks, N, H,
            REMAINING, TALL, WIDE, DEEP, CHUNK, INTERPRETED,
        )  # fmt: skip
        d_logits = gradient(logits, coming, peak[None, :], rest[None, :], d_picks[None, :], weight[None, :])
        q = load_rows(here, t, H, 1, t <= T, 0, H, DEEP)
        d_k = product(d_logits.to(q.dtype), q, d_k, INTERPRETED)
        d_theta += tl.sum(d_logits, 1)
        logits_0 = tl.where(there, theta, -float("inf"))
        peak, rest, d_picks, _, weight = load_gradients(
            scores, g_picks, g_stop, sequence, contexts, base, tile % tiles == 0, length == 0
        )
        d_theta += gradient(logits_0, to_come(ranks, ranks, T, REMAINING), peak, rest, d_picks, weight)
    store_rows(d_keys + b * N * H, n, n < N, d_k, H, DEEP)
    store_rows(d_values + b * N * H, n, n < N, tl.zeros((WIDE, DEEP), tl.float32), H, DEEP)
    tl.store(d_unary + b * N + n, d_theta, mask=n < N)

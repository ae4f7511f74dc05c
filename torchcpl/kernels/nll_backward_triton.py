# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The gradient of ``nll_forward``, whose logits are computed again, tile by tile:

    p = exp(logits − norm),     ∂logits = [to come]·∂picks − p·(number·∂picks + ∂stop)

and from that ∂query = ∂logits·keys, ∂keys = ∂logitsᵀ·query and ∂unary = Σ ∂logits. Arguments as in
``nll_forward_triton``, and the gradients of what it returns, g_picks and g_stop, (B·M) each.
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
    share_of,
    tile_of,
    to_come,
)


@triton.jit
def load_gradients(scores, g_picks, g_stop, contexts, at, there):
    """Of contexts: the two parts of norm, ∂picks, ∂stop, and what p is weighted with, number·∂picks + ∂stop."""
    peak = tl.load(scores + 2 * contexts + at, mask=there, other=float("inf"))  # p is zero where nothing is there
    rest = tl.load(scores + 3 * contexts + at, mask=there, other=0.0)
    number = tl.load(scores + 4 * contexts + at, mask=there, other=0.0)
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
    scores,
    N, P, T, H, ahead,
    g_picks, g_stop,
    d_query,
    d_stop,
    TALL: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr, CHUNK: tl.constexpr, INTERPRETED: tl.constexpr,
):
    # fmt: on
    """∂query of a tile of contexts over this program's share of the candidates, and the ∂stop of each.

    d_query (shares, B, M, h): written.
    d_stop (B, M): written.
    """
    sequence, b, first_tile, t, base, contexts = tile_of(P, T, TALL)
    query += base * H
    rank += sequence * (N + 1)
    keys += b * keys_b
    unary += b * unary_b
    real += b * real_b
    peak, rest, d_picks, slope, weight = load_gradients(scores, g_picks, g_stop, contexts, base + t, t <= T)
    _, _, _, slope_0, weight_0 = load_gradients(scores, g_picks, g_stop, contexts, base, first_tile)
    if tl.program_id(1) == 0:
        store_stop_gradient(d_stop, scores, contexts, base + t, t <= T, slope, weight)
        store_stop_gradient(d_stop, scores, contexts, base, first_tile, slope_0, weight_0)

    d_q = tl.zeros((DEEP, TALL), tl.float32)
    first, last = share_of(N, WIDE)
    for start in range(first, last, WIDE):
        n = start + tl.arange(0, WIDE)
        theta, there, ranks = load_candidates(n, unary, unary_n, real, real_n, rank, N)
        logits, coming = logits_of(
            query, t, T, keys, keys_n, keys_h, n, theta, there, ranks, N, H, ahead, TALL, WIDE, DEEP, CHUNK, INTERPRETED
        )
        d_logits = gradient(logits, coming, peak[None, :], rest[None, :], d_picks[None, :], weight[None, :])
        k = load_rows(keys, n, keys_n, keys_h, n < N, 0, H, DEEP)
        d_q = product(tl.trans(k), d_logits.to(k.dtype), d_q, INTERPRETED)
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
    scores,
    N, P, T, H, ahead,
    g_picks, g_stop,
    d_keys,
    d_unary,
    TALL: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr, CHUNK: tl.constexpr, INTERPRETED: tl.constexpr,
):
    # fmt: on
    """∂keys and ∂unary of a tile of candidates, over all contexts of their row.

    d_keys (B, N, h): written.
    d_unary (B, N): written.
    """
    b = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    contexts = tl.num_programs(0) * P * (T + 1)
    keys += b * keys_b
    unary += b * unary_b
    real += b * real_b

    d_k = tl.zeros((WIDE, DEEP), tl.float32)
    d_theta = tl.zeros((WIDE,), tl.float32)
    tiles = tl.maximum(tl.cdiv(T, TALL), 1)
    for tile in range(P * tiles):
        sequence = b * P + tile // tiles
        base = sequence * (T + 1)
        here = query + base * H
        t = (tile % tiles) * TALL + 1 + tl.arange(0, TALL)
        theta, there, ranks = load_candidates(n, unary, unary_n, real, real_n, rank + sequence * (N + 1), N)
        peak, rest, d_picks, _, weight = load_gradients(scores, g_picks, g_stop, contexts, base + t, t <= T)
        logits, coming = logits_of(
            here, t, T, keys, keys_n, keys_h, n, theta, there, ranks, N, H, ahead, TALL, WIDE, DEEP, CHUNK, INTERPRETED
        )
        d_logits = gradient(logits, coming, peak[None, :], rest[None, :], d_picks[None, :], weight[None, :])
        q = load_rows(here, t, H, 1, t <= T, 0, H, DEEP)
        d_k = product(d_logits.to(q.dtype), q, d_k, INTERPRETED)
        d_theta += tl.sum(d_logits, 1)
        logits_0 = tl.where(there, theta, -float("inf"))
        coming_0 = to_come(ranks, ranks, T, ahead)
        peak, rest, d_picks, _, weight = load_gradients(scores, g_picks, g_stop, contexts, base, tile % tiles == 0)
        d_theta += gradient(logits_0, coming_0, peak, rest, d_picks, weight)
    store_rows(d_keys + b * N * H, n, n < N, d_k, H, DEEP)
    tl.store(d_unary + b * N + n, d_theta, mask=n < N)

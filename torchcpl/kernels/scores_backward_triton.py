# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The gradient of ``scores_triton``, whose logits are computed again, tile by tile:

    p = exp(logits − norm),     ∂logits = [to come]·∂picks − p·(number·∂picks + ∂stop)

and from that ∂contexts = ∂logits·keys, ∂keys = ∂logitsᵀ·contexts and ∂unary = Σ ∂logits. What comes in is ∂picks and
∂stop, (B·M) each as ``g_picks`` and ``g_stop``; or, where the latter is None, the gradient of whole sequences,
(B·P) or with ``g_row`` 0 one for all.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torchcpl.kernels.pairs_triton import parts_of
from torchcpl.kernels.scores_triton import (
    VARYING,
    coming,
    exact_product,
    load_contexts,
    load_rows,
    load_unary,
    load_whole_contexts,
    product,
    score,
    share_of,
)


@triton.jit
def load_gradients(found, g_picks, g_row, g_stop, row, contexts, at, there):
    """Of contexts: the two parts of norm, ∂picks, ∂stop, and what p is weighted with, number·∂picks + ∂stop."""
    peak = tl.load(found + 2 * contexts + at, mask=there, other=float("inf"))  # p is zero where nothing is there
    rest = tl.load(found + 3 * contexts + at, mask=there, other=0.0)
    number = tl.load(found + 4 * contexts + at, mask=there, other=0.0)
    if g_stop is None:
        slope = -tl.load(g_picks + row * g_row)
        return peak, rest, tl.maximum(number, 0.0) * slope, tl.maximum(-number, 0.0) * slope, tl.abs(number) * slope
    else:
        d_picks = tl.load(g_picks + at, mask=there, other=0.0)
        d_stop = tl.load(g_stop + at, mask=there, other=0.0)
        return peak, rest, d_picks, d_stop, number * d_picks + d_stop


@triton.jit
def gradient(logits, soon, peak, rest, d_picks, weight):
    """∂logits."""
    return tl.where(soon, d_picks, 0.0) - tl.exp(logits - peak - rest) * weight


@triton.jit
def gradient_of_stop(found, contexts, at, there, d_stop, weight):
    last = tl.load(found + contexts + at, mask=there, other=-float("inf"))
    return tl.where(last > -float("inf"), d_stop - tl.exp(last) * weight, 0.0)


@triton.jit
def times_contexts(
    d_logits, query, t, T, start, H, PARTS: tl.constexpr, WIDTH: tl.constexpr, INTERPRETED: tl.constexpr
):
    """∂logits·contexts, of WIDTH hidden dimensions from ``start``."""
    q = load_contexts(query, t, T, start, H, 0, PARTS, WIDTH)
    if PARTS == 1:
        nothing = tl.zeros((d_logits.shape[0], WIDTH), tl.float32)
        return product(d_logits.to(q.dtype), q, nothing, INTERPRETED)
    else:
        mid = load_contexts(query, t, T, start, H, 1, PARTS, WIDTH)
        low = load_contexts(query, t, T, start, H, 2, PARTS, WIDTH)
        return exact_product(d_logits, q, mid, low, INTERPRETED)


@triton.jit
def store_rows(pointer, at, there, values, start, H, WIDTH: tl.constexpr):
    h = start + tl.arange(0, WIDTH)
    tl.store(pointer + at[:, None] * H + h[None, :], values, mask=there[:, None] & (h < H)[None, :])


# fmt: off
@triton.jit(do_not_specialize=[*VARYING, "g_row"])
def backward_contexts(
    query, keys, keys_b, keys_n, keys_h, unary, unary_b, unary_n, real, real_b, real_n, rank, found,
    g_picks, g_row, g_stop, d_query, d_stop, d_keys, d_unary,
    d_values, order, stop_key, stop_key_b, stop_key_h, d_stop_key, N, P, T, H, ahead, root,
    TALL: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    # fmt: on
    """∂contexts of a tile over this program's share of the candidates, and the ∂stop of each.

    Where the tile is all contexts of its row, ∂keys and ∂unary come out of the same walk if they are asked for. Where
    that row's candidates are all this program's too, ∂values may be asked for in place of ∂contexts: then ∂stop is the
    row's, and with a ``stop_key`` goes on to the values and to that key.
    """
    tiles = tl.maximum(tl.cdiv(T, TALL), 1)
    tile = tl.program_id(0) % tiles
    row = (tl.program_id(0) // tiles).to(tl.int64)
    contexts = tl.num_programs(0) // tiles * (T + 1)
    b = row // P
    t = tile * TALL + 1 + tl.arange(0, TALL)
    base = row * (T + 1)
    query += base * (PARTS * H)
    rank += row * N
    keys += b * keys_b
    unary += b * unary_b
    real += b * real_b
    peak, rest, d_picks, slope, weight = load_gradients(found, g_picks, g_row, g_stop, row, contexts, base + t, t <= T)
    peak_0, rest_0, d_picks_0, slope_0, weight_0 = load_gradients(
        found, g_picks, g_row, g_stop, row, contexts, base, True
    )
    ending = gradient_of_stop(found, contexts, base + t, t <= T, slope, weight)
    ending_0 = gradient_of_stop(found, contexts, base, tile == 0, slope_0, weight_0)
    if d_values is not None:
        tl.store(d_stop + b, tl.sum(ending, 0) + ending_0)
    elif tl.program_id(1) == 0:
        tl.store(d_stop + base + t, ending, mask=t <= T)
        tl.store(d_stop + base, ending_0, mask=tile == 0)

    d_q = tl.zeros((DEEP, TALL), tl.float32)
    first, last = share_of(N, WIDE)
    for start in range(first, last, WIDE):
        n = start + tl.arange(0, WIDE)
        theta, there = load_unary(n, unary, unary_n, real, real_n, N)
        ranks = tl.load(rank + n, mask=n < N, other=-1)
        logits, left = score(
            query, t, T, keys, keys_n, keys_h, n, theta, there, ranks, N, H, TALL, WIDE, DEEP, PART, PARTS, INTERPRETED
        )
        soon = coming(left, ranks[:, None], T, ahead)
        d_logits = gradient(logits, soon, peak[None, :], rest[None, :], d_picks[None, :], weight[None, :])
        k = load_rows(keys, n, keys_n, keys_h, n < N, 0, H, DEEP)
        if PARTS == 1:
            d_q = product(tl.trans(k), d_logits.to(k.dtype), d_q, INTERPRETED)
        else:
            high, mid, low = parts_of(d_logits)
            d_q += exact_product(tl.trans(k), high, mid, low, INTERPRETED)
        if d_keys is not None:
            for part in range(0, DEEP, PART):
                d_k = times_contexts(d_logits, query, t, T, part, H, PARTS, PART, INTERPRETED)
                store_rows(d_keys + b * N * H, n, n < N, d_k, part, H, PART)
                if d_values is not None:
                    nothing = tl.zeros((WIDE, PART), tl.float32)
                    store_rows(d_values + b * N * H, n, n < N, nothing, part, H, PART)
            logit_0 = tl.where(there, theta, -float("inf"))
            d_theta = gradient(logit_0, coming(ranks, ranks, T, ahead), peak_0, rest_0, d_picks_0, weight_0)
            tl.store(d_unary + b * N + n, d_theta + tl.sum(d_logits, 1), mask=n < N)
    h = tl.arange(0, DEEP)
    if d_values is None:
        d_query += tl.program_id(1).to(tl.int64) * contexts * H
        store_rows(d_query + base * H, t, t <= T, tl.trans(d_q), 0, H, DEEP)
        tl.store(d_query + base * H + h, tl.zeros((DEEP,), tl.float32), mask=h < tl.where(tile == 0, H, 0))
    else:
        if stop_key is not None:
            key = tl.load(stop_key + b * stop_key_b + h * stop_key_h, mask=h < H, other=0.0).to(tl.float32)
            d_q += key[:, None] * ending[None, :]
            q = load_whole_contexts(query, t, T, H, PARTS, DEEP)
            tl.store(d_stop_key + b * H + h, tl.sum(q * ending[:, None], 0), mask=h < H)
        # The pick that led to a context is in every later one: its gradient is the sum of theirs.
        pick = tl.load(order + row * T + t - 1, mask=t <= T, other=-1)
        sums = tl.cumsum(tl.where((t <= T)[None, :], d_q, 0.0), 1, reverse=True) * root
        tl.debug_barrier()  # other threads have written the zeros
        spot = d_values + b * N * H + pick[None, :] * H + h[:, None]
        tl.store(spot, sums, mask=(pick >= 0)[None, :] & (h < H)[:, None])


# fmt: off
@triton.jit(do_not_specialize=[*VARYING, "g_row"])
def backward_keys(
    query, keys, keys_b, keys_n, keys_h, unary, unary_b, unary_n, real, real_b, real_n, rank, found,
    g_picks, g_row, g_stop, d_keys, d_unary, N, P, T, H, ahead,
    TALL: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    # fmt: on
    """∂keys and ∂unary of a tile of candidates, over all contexts of their row."""
    b = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    contexts = tl.num_programs(0) * P * (T + 1)
    keys += b * keys_b
    unary += b * unary_b
    real += b * real_b
    theta, there = load_unary(n, unary, unary_n, real, real_n, N)
    logit_0 = tl.where(there, theta, -float("inf"))

    d_k = tl.zeros((WIDE, DEEP), tl.float32)
    d_theta = tl.zeros((WIDE,), tl.float32)
    tiles = tl.maximum(tl.cdiv(T, TALL), 1)
    for tile in range(P * tiles):
        row = b * P + tile // tiles
        base = row * (T + 1)
        t = (tile % tiles) * TALL + 1 + tl.arange(0, TALL)
        ranks = tl.load(rank + row * N + n, mask=n < N, other=-1)
        here = query + base * (PARTS * H)
        peak, rest, d_picks, _, weight = load_gradients(found, g_picks, g_row, g_stop, row, contexts, base + t, t <= T)
        logits, left = score(
            here, t, T, keys, keys_n, keys_h, n, theta, there, ranks, N, H, TALL, WIDE, DEEP, PART, PARTS, INTERPRETED
        )
        soon = coming(left, ranks[:, None], T, ahead)
        d_logits = gradient(logits, soon, peak[None, :], rest[None, :], d_picks[None, :], weight[None, :])
        d_k += times_contexts(d_logits, here, t, T, 0, H, PARTS, DEEP, INTERPRETED)
        d_theta += tl.sum(d_logits, 1)
        first = tile % tiles == 0
        peak, rest, d_picks, _, weight = load_gradients(found, g_picks, g_row, g_stop, row, contexts, base, first)
        d_theta += gradient(logit_0, coming(ranks, ranks, T, ahead), peak, rest, d_picks, weight)
    store_rows(d_keys + b * N * H, n, n < N, d_k, 0, H, DEEP)
    tl.store(d_unary + b * N + n, d_theta, mask=n < N)

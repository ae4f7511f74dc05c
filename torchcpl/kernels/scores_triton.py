# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Scores of contexts against keys whose (B, M, N) logits never reach memory.

A program holds a tile of contexts and walks the keys, a tile of candidates at a time. The tile's logits are one small
matrix product, and live only until they are added to the running normaliser. The backward pass computes them again:

    p = exp(logits − norm),     ∂logits = [to come]·∂picks − p·(number·∂picks + ∂stop)

and from that ∂contexts = ∂logits·keys, ∂keys = ∂logitsᵀ·contexts and ∂unary = Σ ∂logits. Programs that share a result
write a part of it each, to be added up later: no atomics, the same bits every time.

Contexts are numbered m = p·(T+1) + t in their row: after t picks of sequence p. A tile's contexts share a sequence.
The first of a sequence is zero and needs no product: the first tile's program takes it along as a row of its own, and
the tiles hold T contexts, which is a power of two more often than T+1.

``found`` (5, B·M) holds picks, stop, norm as peak + rest, of which the sum would lose digits, and number; ``grads``
(2, B·M) the gradients of the first two.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.0e38)  # stands in for −inf as a running maximum, whose differences must not be NaN
VARYING = ["P", "T", "ahead"]  # sizes that differ from batch to batch, and are not worth a compilation each


@triton.jit
def load_rows(pointer, rows, row_stride, column_stride, there, start, H, WIDTH: tl.constexpr):
    """(rows, WIDTH) of a table with H columns, from column ``start``; zero where nothing is there."""
    h = start + tl.arange(0, WIDTH)
    where = rows.to(tl.int64)[:, None] * row_stride + h[None, :] * column_stride
    return tl.load(pointer + where, mask=there[:, None] & (h < H)[None, :], other=0.0)


@triton.jit
def load_unary(n, unary, unary_n, real, real_n, N):
    """Unary scores, and whether the candidates are there; what padding holds is not read."""
    there = tl.load(real + n * real_n, mask=n < N, other=0) != 0
    return tl.load(unary + n * unary_n, mask=there, other=0.0).to(tl.float32), there


@triton.jit
def coming(left, rank, T, ahead):
    """Whether a candidate with so many steps ``left`` until it is picked is one of the picks to come."""
    return (left >= 0) & (left < ahead) & (rank < T)


# fmt: off
@triton.jit
def score(
    query, at, t, T, keys, keys_n, keys_h, n, theta, there, ranks, H,
    TALL: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr, PART: tl.constexpr, PRECISION: tl.constexpr,
):
    # fmt: on
    """A tile of logits (contexts, candidates), −inf where a candidate is gone, and the steps until it is picked.

    The product goes over the hidden dimensions in parts, so that its operands fit into registers.
    """
    logits = tl.zeros((TALL, WIDE), tl.float32)
    for start in tl.static_range(0, DEEP, PART):
        q = load_rows(query, at, H, 1, t <= T, start, H, PART)
        k = load_rows(keys, n, keys_n, keys_h, there, start, H, PART)
        logits = tl.dot(q, tl.trans(k), logits, input_precision=PRECISION)
    left = ranks[None, :] - t[:, None]
    return tl.where((left >= 0) & there[None, :], logits + theta[None, :], -float("inf")), left


@triton.jit
def share_of(N, WIDE: tl.constexpr):
    """The first and last candidate of this program, one of ``num_programs(1)``."""
    share = tl.cdiv(tl.cdiv(N, WIDE), tl.num_programs(1)) * WIDE
    first = tl.program_id(1) * share
    return first, tl.minimum(first + share, N)


@triton.jit
def settle(found, at, contexts, there, top, mass, wanted, number, stop):
    """Write down the scores of contexts whose candidates weigh ``mass``·exp(top)."""
    peak = tl.maximum(tl.maximum(top, stop), LOWEST)
    total = mass * tl.exp(top - peak) + tl.exp(stop - peak)
    # With nothing left to choose the stop is certain, even one whose logit is −inf.
    peak = tl.where(total > 0, peak, 0.0)
    rest = tl.where(total > 0, tl.log(total), 0.0)
    tl.store(found + at, wanted - number * peak - number * rest, mask=there)
    tl.store(found + contexts + at, tl.where(total > 0, stop - peak - rest, 0.0), mask=there)
    tl.store(found + 2 * contexts + at, peak, mask=there)
    tl.store(found + 3 * contexts + at, rest, mask=there)
    tl.store(found + 4 * contexts + at, number, mask=there)


@triton.jit
def hand_in(found, parts, stop, at, contexts, there, top, mass, wanted, number):
    """Settle, or leave it to ``combine`` when this is but a part."""
    if parts is None:
        settle(found, at, contexts, there, top, mass, wanted, number, tl.load(stop, mask=there, other=0.0))
    else:
        each = tl.num_programs(1) * contexts
        spot = parts + tl.program_id(1) * contexts + at
        tl.store(spot, top, mask=there)
        tl.store(spot + each, mass, mask=there)
        tl.store(spot + 2 * each, wanted, mask=there)
        tl.store(spot + 3 * each, number, mask=there)


# fmt: off
@triton.jit(do_not_specialize=VARYING)
def forward(
    query, keys, keys_b, keys_n, keys_h, unary, unary_b, unary_n, real, real_b, real_n, rank, stop, stop_b, stop_m,
    found, parts, N, P, T, H, ahead,
    TALL: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr, PART: tl.constexpr, PRECISION: tl.constexpr,
):
    # fmt: on
    """Scores of a tile of contexts over this program's share of the candidates."""
    tiles = tl.maximum(tl.cdiv(T, TALL), 1)
    tile = tl.program_id(0) % tiles
    row = (tl.program_id(0) // tiles).to(tl.int64)
    contexts = tl.num_programs(0) // tiles * (T + 1)
    b = row // P
    t = tile * TALL + 1 + tl.arange(0, TALL)
    base = row * (T + 1)
    stop += b * stop_b + row % P * (T + 1) * stop_m
    keys += b * keys_b
    unary += b * unary_b
    real += b * real_b

    top = tl.full((TALL,), LOWEST, tl.float32)
    mass = tl.zeros((TALL,), tl.float32)
    wanted = tl.zeros((TALL,), tl.float32)
    number = tl.zeros((TALL,), tl.float32)
    # Of the first context, lane by lane.
    top_0 = tl.full((WIDE,), LOWEST, tl.float32)
    mass_0 = tl.zeros((WIDE,), tl.float32)
    wanted_0 = tl.zeros((WIDE,), tl.float32)
    number_0 = tl.zeros((WIDE,), tl.float32)
    first, last = share_of(N, WIDE)
    for start in range(first, last, WIDE):
        n = start + tl.arange(0, WIDE)
        theta, there = load_unary(n, unary, unary_n, real, real_n, N)
        ranks = tl.load(rank + row * N + n, mask=n < N, other=-1)
        logits, left = score(
            query, base + t, t, T, keys, keys_n, keys_h, n, theta, there, ranks, H, TALL, WIDE, DEEP, PART, PRECISION
        )
        higher = tl.maximum(top, tl.max(logits, 1))
        mass = mass * tl.exp(top - higher) + tl.sum(tl.exp(logits - higher[:, None]), 1)
        top = higher
        soon = coming(left, ranks[None, :], T, ahead)
        wanted += tl.sum(tl.where(soon, logits, 0.0), 1)
        number += tl.sum(tl.where(soon, 1.0, 0.0), 1)

        logit_0 = tl.where(there, theta, -float("inf"))
        higher_0 = tl.maximum(top_0, logit_0)
        mass_0 = mass_0 * tl.exp(top_0 - higher_0) + tl.exp(logit_0 - higher_0)
        top_0 = higher_0
        soon_0 = coming(ranks, ranks, T, ahead)
        wanted_0 += tl.where(soon_0, logit_0, 0.0)
        number_0 += tl.where(soon_0, 1.0, 0.0)

    hand_in(found, parts, stop + t * stop_m, base + t, contexts, t <= T, top, mass, wanted, number)
    peak_0 = tl.max(top_0, 0)
    mass_0 = tl.sum(mass_0 * tl.exp(top_0 - peak_0), 0)
    wanted_0 = tl.sum(wanted_0, 0)
    number_0 = tl.sum(number_0, 0)
    hand_in(found, parts, stop, base, contexts, tile == 0, peak_0, mass_0, wanted_0, number_0)


@triton.jit(do_not_specialize=["split", "contexts", "M"])
def combine(parts, stop, stop_b, stop_m, found, split, contexts, M, BLOCK: tl.constexpr):
    """Scores from the parts (4, split, B·M) that programs have written."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < contexts
    each = split * contexts
    top = tl.full((BLOCK,), LOWEST, tl.float32)
    mass = tl.zeros((BLOCK,), tl.float32)
    wanted = tl.zeros((BLOCK,), tl.float32)
    number = tl.zeros((BLOCK,), tl.float32)
    for part in range(split):
        here = parts + part * contexts + at
        other = tl.load(here, mask=there, other=LOWEST)
        higher = tl.maximum(top, other)
        mass = mass * tl.exp(top - higher) + tl.load(here + each, mask=there, other=0.0) * tl.exp(other - higher)
        top = higher
        wanted += tl.load(here + 2 * each, mask=there, other=0.0)
        number += tl.load(here + 3 * each, mask=there, other=0.0)
    final = tl.load(stop + at // M * stop_b + at % M * stop_m, mask=there, other=0.0)
    settle(found, at, contexts, there, top, mass, wanted, number, final)


@triton.jit
def load_gradients(found, grads, contexts, at, there):
    """Of contexts: the two parts of norm, ∂picks, and what p is weighted with, number·∂picks + ∂stop."""
    peak = tl.load(found + 2 * contexts + at, mask=there, other=float("inf"))  # p is zero where nothing is there
    rest = tl.load(found + 3 * contexts + at, mask=there, other=0.0)
    number = tl.load(found + 4 * contexts + at, mask=there, other=0.0)
    d_picks = tl.load(grads + at, mask=there, other=0.0)
    return peak, rest, d_picks, number * d_picks + tl.load(grads + contexts + at, mask=there, other=0.0)


@triton.jit
def gradient(logits, soon, peak, rest, d_picks, weight):
    """∂logits."""
    return tl.where(soon, d_picks, 0.0) - tl.exp(logits - peak - rest) * weight


@triton.jit
def store_stop(d_stop, stop, grads, contexts, at, there, peak, rest, weight):
    final = tl.load(stop, mask=there, other=-float("inf"))
    slope = tl.load(grads + contexts + at, mask=there, other=0.0) - tl.exp(final - peak - rest) * weight
    tl.store(d_stop + at, tl.where(final > -float("inf"), slope, 0.0), mask=there)


@triton.jit
def store_rows(pointer, at, there, values, start, H, WIDTH: tl.constexpr):
    h = start + tl.arange(0, WIDTH)
    tl.store(pointer + at[:, None] * H + h[None, :], values, mask=there[:, None] & (h < H)[None, :])


# fmt: off
@triton.jit(do_not_specialize=VARYING)
def backward_contexts(
    query, keys, keys_b, keys_n, keys_h, unary, unary_b, unary_n, real, real_b, real_n, rank, stop, stop_b, stop_m,
    found, grads, d_query, d_stop, d_keys, d_unary, N, P, T, H, ahead,
    TALL: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr, PART: tl.constexpr, PRECISION: tl.constexpr,
):
    # fmt: on
    """∂contexts of a tile over this program's share of the candidates, and ∂stop.

    Where the tile is all contexts of its row, ∂keys and ∂unary come out of the same walk if they are asked for.
    """
    tiles = tl.maximum(tl.cdiv(T, TALL), 1)
    tile = tl.program_id(0) % tiles
    row = (tl.program_id(0) // tiles).to(tl.int64)
    contexts = tl.num_programs(0) // tiles * (T + 1)
    b = row // P
    t = tile * TALL + 1 + tl.arange(0, TALL)
    base = row * (T + 1)
    stop += b * stop_b + row % P * (T + 1) * stop_m
    keys += b * keys_b
    unary += b * unary_b
    real += b * real_b
    peak, rest, d_picks, weight = load_gradients(found, grads, contexts, base + t, t <= T)
    peak_0, rest_0, d_picks_0, weight_0 = load_gradients(found, grads, contexts, base, True)
    if tl.program_id(1) == 0:
        store_stop(d_stop, stop + t * stop_m, grads, contexts, base + t, t <= T, peak, rest, weight)
        store_stop(d_stop, stop, grads, contexts, base, tile == 0, peak_0, rest_0, weight_0)

    d_q = tl.zeros((TALL, DEEP), tl.float32)
    first, last = share_of(N, WIDE)
    for start in range(first, last, WIDE):
        n = start + tl.arange(0, WIDE)
        theta, there = load_unary(n, unary, unary_n, real, real_n, N)
        ranks = tl.load(rank + row * N + n, mask=n < N, other=-1)
        logits, left = score(
            query, base + t, t, T, keys, keys_n, keys_h, n, theta, there, ranks, H, TALL, WIDE, DEEP, PART, PRECISION
        )
        soon = coming(left, ranks[None, :], T, ahead)
        d_logits = gradient(logits, soon, peak[:, None], rest[:, None], d_picks[:, None], weight[:, None])
        k = load_rows(keys, n, keys_n, keys_h, there, 0, H, DEEP)
        d_q = tl.dot(d_logits.to(k.dtype), k, d_q, input_precision=PRECISION)
        if d_keys is not None:
            for part in tl.static_range(0, DEEP, PART):
                q = load_rows(query, base + t, H, 1, t <= T, part, H, PART)
                d_k = tl.dot(tl.trans(d_logits.to(q.dtype)), q, input_precision=PRECISION)
                store_rows(d_keys, b * N + n, n < N, d_k, part, H, PART)
            logit_0 = tl.where(there, theta, -float("inf"))
            d_theta = gradient(logit_0, coming(ranks, ranks, T, ahead), peak_0, rest_0, d_picks_0, weight_0)
            tl.store(d_unary + b * N + n, d_theta + tl.sum(d_logits, 0), mask=n < N)
    d_query += tl.program_id(1).to(tl.int64) * contexts * H
    store_rows(d_query, base + t, t <= T, d_q, 0, H, DEEP)
    h = tl.arange(0, DEEP)
    tl.store(d_query + base * H + h, tl.zeros((DEEP,), tl.float32), mask=h < tl.where(tile == 0, H, 0))


# fmt: off
@triton.jit(do_not_specialize=VARYING)
def backward_keys(
    query, keys, keys_b, keys_n, keys_h, unary, unary_b, unary_n, real, real_b, real_n, rank, stop, stop_b, stop_m,
    found, grads, d_keys, d_unary, N, P, T, H, ahead,
    TALL: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr, PART: tl.constexpr, PRECISION: tl.constexpr,
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
        t = (tile % tiles) * TALL + 1 + tl.arange(0, TALL)
        at = row * (T + 1) + t
        ranks = tl.load(rank + row * N + n, mask=n < N, other=-1)
        peak, rest, d_picks, weight = load_gradients(found, grads, contexts, at, t <= T)
        logits, left = score(
            query, at, t, T, keys, keys_n, keys_h, n, theta, there, ranks, H, TALL, WIDE, DEEP, PART, PRECISION
        )
        soon = coming(left, ranks[None, :], T, ahead)
        d_logits = gradient(logits, soon, peak[:, None], rest[:, None], d_picks[:, None], weight[:, None])
        q = load_rows(query, at, H, 1, t <= T, 0, H, DEEP)
        d_k = tl.dot(tl.trans(d_logits.to(q.dtype)), q, d_k, input_precision=PRECISION)
        d_theta += tl.sum(d_logits, 0)
        peak, rest, d_picks, weight = load_gradients(found, grads, contexts, row * (T + 1), tile % tiles == 0)
        d_theta += gradient(logit_0, coming(ranks, ranks, T, ahead), peak, rest, d_picks, weight)
    store_rows(d_keys, b * N + n, n < N, d_k, 0, H, DEEP)
    tl.store(d_unary + b * N + n, d_theta, mask=n < N)

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Scores of contexts against keys whose (B, M, N) logits never reach memory.

A program holds a tile of contexts and walks the keys, a tile of candidates at a time. The tile's logits are one small
matrix product, and live only until they are added to the running normaliser; the backward pass computes them again.
Programs that share a result write a part of it each, to be added up later: no atomics, the same bits every time.

All products have the many, candidates or hidden dimensions, in their rows and the few, contexts, in their columns:
Hopper's matrix instructions take 64 rows at a time, but columns by eights, and read what is shared by all rows from
shared memory, where other layouts keep a copy of it in the registers of every warp.

Contexts are numbered m = p·(T+1) + t in their row: after t picks of sequence p. A tile's contexts share a sequence.
The first of a sequence is zero and needs no product: the first tile's program takes it along as a row of its own, and
the tiles hold T contexts, which is a power of two more often than T+1.

``found`` (5, B·M) holds log P of the picks to come and of the stop, then the normaliser as peak + rest, whose sum would
lose digits, and the number of picks to come, zero where the stop is certain for want of anything else.

Where the kernels are given a ``scale``, what is asked for is −log P of each sequence ``order`` (B·P, T), times it: the
first of the five is then −log P of the choice that the sequence makes, its next pick or after the last one the stop
(zero beyond), and the number is ``scale`` for a pick and −``scale`` for that stop.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torchcpl.kernels.contexts_triton import write_contexts, write_ranks
from torchcpl.kernels.pairs_triton import parts_of

LOWEST = tl.constexpr(-3.0e38)  # stands in for −inf as a running maximum, whose differences must not be NaN
RANKS = tl.constexpr(1024)  # written at a time
VARYING = ["P", "T", "ahead"]  # sizes that differ from batch to batch, and are not worth a compilation each


@triton.jit
def load_rows(pointer, rows, row_stride, column_stride, there, start, H, WIDTH: tl.constexpr):
    """(rows, WIDTH) of a table with H columns, from column ``start``; zero where nothing is there."""
    h = start + tl.arange(0, WIDTH)
    where = rows[:, None] * row_stride + h[None, :] * column_stride
    return tl.load(pointer + where, mask=there[:, None] & (h < H)[None, :], other=0.0)


@triton.jit
def load_unary(n, unary, unary_n, real, real_n, N):
    """Unary scores, and whether the candidates are there; what padding holds is not read."""
    there = tl.load(real + n * real_n, mask=n < N, other=0)
    return tl.load(unary + n * unary_n, mask=there, other=0.0).to(tl.float32), there


@triton.jit
def product(a, b, sums, INTERPRETED: tl.constexpr):
    """sums + a·b. Triton's interpreter has no product of bfloat16; that of the same numbers in float32 stands in."""
    if INTERPRETED == 1:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), sums, input_precision="ieee")
    elif INTERPRETED == 2:  # bench.kernels: float32 by three products of TF32
        return tl.dot(a, b, sums, input_precision="tf32x3")
    else:
        return tl.dot(a, b, sums)


@triton.jit
def exact_product(a, high, mid, low, INTERPRETED: tl.constexpr):
    """a·b for float32 ``a`` and the three parts of b, to float32's digits, on tensor cores: the small terms first.

    These cut off their sums at every step. Six products of bfloat16 parts are as many instructions as three of tf32
    parts, but half as many steps: half the bias, to which the stop's gradient, a sum over all contexts, owes most of
    its error.
    """
    if INTERPRETED:
        return tl.dot(a, high.to(tl.float32) + mid.to(tl.float32) + low.to(tl.float32), input_precision="ieee")
    else:
        a_high, a_mid, a_low = parts_of(a)
        sums = tl.dot(a_low, high)
        sums = tl.dot(a_mid, mid, sums)
        sums = tl.dot(a_high, low, sums)
        sums = tl.dot(a_mid, high, sums)
        sums = tl.dot(a_high, mid, sums)
        return tl.dot(a_high, high, sums)


@triton.jit
def load_contexts(query, t, T, start, H, part, PARTS: tl.constexpr, WIDTH: tl.constexpr):
    """(TALL, WIDTH) hidden dimensions of contexts from ``start``, all there is of them or one of the parts."""
    return load_rows(query + part * H, t, PARTS * H, 1, t <= T, start, H, WIDTH)


@triton.jit
def load_whole_contexts(query, t, T, H, PARTS: tl.constexpr, DEEP: tl.constexpr):
    """(TALL, DEEP) contexts in float32, their parts added up."""
    q = load_contexts(query, t, T, 0, H, 0, PARTS, DEEP).to(tl.float32)
    if PARTS == 3:
        q += load_contexts(query, t, T, 0, H, 1, PARTS, DEEP).to(tl.float32)
        q += load_contexts(query, t, T, 0, H, 2, PARTS, DEEP).to(tl.float32)
    return q


@triton.jit
def coming(left, rank, T, ahead):
    """Whether a candidate with so many steps ``left`` until it is picked is one of the picks to come."""
    return (left >= 0) & (left < ahead) & (rank < T)


# fmt: off
@triton.jit
def score(
    query, t, T, keys, keys_n, keys_h, n, theta, there, ranks, N, H,
    TALL: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    # fmt: on
    """A tile of logits (candidates, contexts), −inf where a candidate is gone, and the steps until it is picked.

    The product goes over the hidden dimensions in parts, and in a loop: unrolled, the operands of all parts would be
    in registers at once.
    """
    logits = tl.zeros((WIDE, TALL), tl.float32)
    for start in range(0, DEEP, PART):
        k = load_rows(keys, n, keys_n, keys_h, n < N, start, H, PART)
        q = load_contexts(query, t, T, start, H, 0, PARTS, PART)
        if PARTS == 1:
            logits = product(k, tl.trans(q), logits, INTERPRETED)
        else:
            mid = load_contexts(query, t, T, start, H, 1, PARTS, PART)
            low = load_contexts(query, t, T, start, H, 2, PARTS, PART)
            logits += exact_product(k, tl.trans(q), tl.trans(mid), tl.trans(low), INTERPRETED)
    left = ranks[:, None] - t[None, :]
    return tl.where((left >= 0) & there[:, None], logits + theta[:, None], -float("inf")), left


@triton.jit
def take_in(logits, soon, top, mass, wanted, number):
    """Add logits to the running maximum, the mass relative to it, the sum of those to come and their number."""
    higher = tl.maximum(top, logits)
    mass = mass * tl.exp(top - higher) + tl.exp(logits - higher)
    return higher, mass, wanted + tl.where(soon, logits, 0.0), number + tl.where(soon, 1.0, 0.0)


@triton.jit
def share_of(N, WIDE: tl.constexpr):
    """The first and last candidate of this program, one of ``num_programs(1)``."""
    share = tl.cdiv(tl.cdiv(N, WIDE), tl.num_programs(1)) * WIDE
    first = tl.program_id(1) * share
    return first, tl.minimum(first + share, N)


@triton.jit
def settle(found, order, at, contexts, there, top, mass, wanted, number, stop, T, scale):
    """Write down the scores of contexts whose candidates weigh ``mass``·exp(top)."""
    peak = tl.maximum(tl.maximum(top, stop), LOWEST)
    total = mass * tl.exp(top - peak) + tl.exp(stop - peak)
    # With nothing left to choose the stop is certain, even one whose logit is −inf.
    peak = tl.where(total > 0, peak, 0.0)
    rest = tl.log(tl.where(total > 0, total, 1.0))
    picks = wanted - number * peak - number * rest
    last = tl.where(total > 0, stop - peak - rest, 0.0)
    if scale is not None:
        before = tl.load(order + at - at // (T + 1) - 1, mask=there & (at % (T + 1) > 0), other=0)  # the latest pick
        ended = (number == 0) & (before >= 0)
        picks = tl.where(ended, -last, -picks) * scale
        number = tl.where(ended, -scale, number * scale)
    tl.store(found + at, picks, mask=there)
    tl.store(found + contexts + at, last, mask=there)
    tl.store(found + 2 * contexts + at, peak, mask=there)
    tl.store(found + 3 * contexts + at, rest, mask=there)
    tl.store(found + 4 * contexts + at, tl.where(total > 0, number, 0.0), mask=there)


@triton.jit
def hand_in(found, parts, stop, more, order, at, contexts, there, top, mass, wanted, number, T, scale):
    """Settle, or leave it to ``combine`` when this is but a part. The stop's logit is ``more`` than what is stored."""
    if parts is None:
        final = tl.load(stop, mask=there, other=0.0).to(tl.float32) + more
        settle(found, order, at, contexts, there, top, mass, wanted, number, final, T, scale)
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
    query, keys, keys_b, keys_n, keys_h, unary, unary_b, unary_n, real, real_b, real_n, rank, found,
    stop, stop_b, stop_m, order, scale, parts, values, values_b, values_n, values_h, stop_key, stop_key_b, stop_key_h,
    N, P, T, H, ahead, root,
    TALL: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    # fmt: on
    """Scores of a tile of contexts over this program's share of the candidates.

    Given ``values``, the tile is all contexts of its row, and they and their ranks are written here, as is what the
    stop owes to them if it has a key.
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
    stop += b * stop_b + row % P * (T + 1) * stop_m
    keys += b * keys_b
    unary += b * unary_b
    real += b * real_b
    h = tl.arange(0, DEEP)
    if values is not None:
        write_ranks(order + row * T, rank, N, T, TALL, RANKS)
        write_contexts(values + b * values_b, values_n, values_h, order + row * T, query, h, T, H, root, PARTS, TALL)
        tl.debug_barrier()  # before other threads read them

    # Kept lane by lane: adding up over the lanes once, at the end, is cheaper than with every tile.
    top = tl.full((WIDE, TALL), LOWEST, tl.float32)
    mass = tl.zeros((WIDE, TALL), tl.float32)
    wanted = tl.zeros((WIDE, TALL), tl.float32)
    number = tl.zeros((WIDE, TALL), tl.float32)
    top_0 = tl.full((WIDE,), LOWEST, tl.float32)
    mass_0 = tl.zeros((WIDE,), tl.float32)
    wanted_0 = tl.zeros((WIDE,), tl.float32)
    number_0 = tl.zeros((WIDE,), tl.float32)
    first, last = share_of(N, WIDE)
    for start in range(first, last, WIDE):
        n = start + tl.arange(0, WIDE)
        theta, there = load_unary(n, unary, unary_n, real, real_n, N)
        ranks = tl.load(rank + n, mask=n < N, other=-1)
        logits, left = score(
            query, t, T, keys, keys_n, keys_h, n, theta, there, ranks, N, H, TALL, WIDE, DEEP, PART, PARTS, INTERPRETED
        )
        soon = coming(left, ranks[:, None], T, ahead)
        top, mass, wanted, number = take_in(logits, soon, top, mass, wanted, number)
        logits_0 = tl.where(there, theta, -float("inf"))
        soon_0 = coming(ranks, ranks, T, ahead)
        top_0, mass_0, wanted_0, number_0 = take_in(logits_0, soon_0, top_0, mass_0, wanted_0, number_0)

    peak = tl.max(top, 0)
    mass = tl.sum(mass * tl.exp(top - peak[None, :]), 0)
    wanted = tl.sum(wanted, 0)
    number = tl.sum(number, 0)
    more = tl.zeros((TALL,), tl.float32)
    if stop_key is not None:
        ending = tl.load(stop_key + b * stop_key_b + h * stop_key_h, mask=h < H, other=0.0).to(tl.float32)
        q = load_whole_contexts(query, t, T, H, PARTS, DEEP)
        more = tl.sum(q * ending[None, :], 1)
    stops = stop + t * stop_m
    hand_in(found, parts, stops, more, order, base + t, contexts, t <= T, peak, mass, wanted, number, T, scale)
    peak_0 = tl.max(top_0, 0)
    mass_0 = tl.sum(mass_0 * tl.exp(top_0 - peak_0), 0)
    wanted_0 = tl.sum(wanted_0, 0)
    number_0 = tl.sum(number_0, 0)
    hand_in(found, parts, stop, 0.0, order, base, contexts, tile == 0, peak_0, mass_0, wanted_0, number_0, T, scale)


@triton.jit(do_not_specialize=["split", "contexts", "P", "T"])
def combine(found, stop, stop_b, stop_m, order, scale, parts, split, contexts, P, T, BLOCK: tl.constexpr):
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
    M = P * (T + 1)
    final = tl.load(stop + at // M * stop_b + at % M * stop_m, mask=there, other=0.0).to(tl.float32)
    settle(found, order, at, contexts, there, top, mass, wanted, number, final, T, scale)

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Log-probabilities after given contexts, whose (B, M, N) logits never reach memory.

A program holds a tile of contexts and iterates over tiles of candidates. A tile's logits are one small matrix product,
added to the running normaliser and discarded; the backward pass recomputes them. Programs that split a reduction write
partial results, summed later: no atomics, deterministic.

All products have the many, candidates or hidden dimensions, in their rows and the few, contexts, in their columns:
Hopper's matrix instructions take 64 rows at a time, but columns by eights, and read what is shared by all rows from
shared memory, where other layouts keep a copy of it in the registers of every warp.

Contexts are numbered m = p·(T+1) + t in their row: after t picks of sequence p. A tile's contexts share a sequence.
The first of a sequence is zero and needs no product: the first tile's program takes it along (``…_0``), and the tiles
hold T contexts, which is a power of two more often than T+1.

Arguments of the kernels that several of them take, tensors with strides where these are named:

    query (B, M, h): the contexts, divided by √h.
    keys (B, N, h): of the candidates.
    unary (B, N): θ.
    real (B, N): bool, whether a candidate may be picked.
    ends (B·M): float32, the stop's logits.
    rank (B, P, N): int32, the step at which a candidate is picked, T if never. All that a context need know of its
        sequence: after t picks candidate n is gone iff rank[n] < t, and the next pick iff rank[n] = t.
    lengths (B·P): int32, the number of picks.
    scores (5, B·M): float32, log P of what is to come and of the stop, the normaliser as peak + rest, whose sum would
        lose digits, and the number of picks to come, 0 where the stop is certain for want of anything else.
    N, P, T, H: candidates, sequences a row, picks a sequence, hidden dimensions.
    REMAINING: whether all picks after a context are to come. Else it is the next choice: a pick, or the stop once.
    TALL, WIDE, DEEP: contexts, candidates and hidden dimensions of a tile.
    CHUNK: hidden dimensions of a product of keys and contexts.
    INTERPRETED: whether Triton's interpreter runs this.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.0e38)  # in place of −inf as a running maximum, whose differences must not be NaN
VARYING = ["P", "T"]  # sizes that differ between batches: not specialised


@triton.jit
def tile_of(P, T, TALL: tl.constexpr):
    """This program's tile of contexts: its sequence, whether it is the sequence's first, t, the place of t = 0.

    And the number of contexts there are in all.
    """
    tiles = tl.maximum(tl.cdiv(T, TALL), 1)
    tile = tl.program_id(0) % tiles
    sequence = (tl.program_id(0) // tiles).to(tl.int64)
    t = tile * TALL + 1 + tl.arange(0, TALL)
    contexts = tl.num_programs(0) // tiles * (T + 1)
    return sequence, tile == 0, t, sequence * (T + 1), contexts


@triton.jit
def row_of(b, keys, keys_b, unary, unary_b, real, real_b):
    """Where row b of keys, unary and real begins."""
    return keys + b * keys_b, unary + b * unary_b, real + b * real_b


@triton.jit
def share_of(N, WIDE: tl.constexpr):
    """The first and last candidate of this program, one of ``num_programs(1)``."""
    share = tl.cdiv(tl.cdiv(N, WIDE), tl.num_programs(1)) * WIDE
    first = tl.program_id(1) * share
    return first, tl.minimum(first + share, N)


@triton.jit
def load_rows(pointer, rows, row_stride, column_stride, there, start, H, WIDTH: tl.constexpr):
    """(rows, WIDTH) of a table with H columns, from column ``start``; zero where nothing is there."""
    h = start + tl.arange(0, WIDTH)
    where = rows[:, None] * row_stride + h[None, :] * column_stride
    return tl.load(pointer + where, mask=there[:, None] & (h < H)[None, :], other=0.0)


@triton.jit
def load_candidates(n, unary, unary_n, real, real_n, rank, N):
    """θ, whether the candidates are there, and their ranks; what padding holds is not read."""
    there = tl.load(real + n * real_n, mask=n < N, other=0)
    theta = tl.load(unary + n * unary_n, mask=there, other=0.0).to(tl.float32)
    return theta, there, tl.load(rank + n, mask=n < N, other=-1)


@triton.jit
def product(a, b, sums, INTERPRETED: tl.constexpr):
    """sums + a·b on tensor cores; full float32 precision by three TF32 products."""
    if INTERPRETED:  # NumPy has no bfloat16 product
        return tl.dot(a.to(tl.float32), b.to(tl.float32), sums, input_precision="ieee")
    else:
        return tl.dot(a, b, sums, input_precision="tf32x3")


@triton.jit
def to_come(left, rank, T, REMAINING: tl.constexpr):
    """Whether a candidate with so many steps ``left`` until it is picked is one of the picks to come."""
    if REMAINING:
        return (left >= 0) & (rank < T)
    else:
        return (left == 0) & (rank < T)


# fmt: off
@triton.jit
def logits_of(
    query, t, T, keys, keys_n, keys_h, n, theta, there, ranks, N, H, REMAINING: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr, CHUNK: tl.constexpr, INTERPRETED: tl.constexpr,
):
    # fmt: on
    """A tile of logits (candidates, contexts), −inf where a candidate is gone, and which are picks to come.

    The product goes over the hidden dimensions in chunks, and in a loop: unrolled, the operands of all chunks would be
    in registers at once.
    """
    logits = tl.zeros((WIDE, TALL), tl.float32)
    for start in range(0, DEEP, CHUNK):
        k = load_rows(keys, n, keys_n, keys_h, n < N, start, H, CHUNK)
        q = load_rows(query, t, H, 1, t <= T, start, H, CHUNK)
        logits = product(k, tl.trans(q), logits, INTERPRETED)
    left = ranks[:, None] - t[None, :]
    logits = tl.where((left >= 0) & there[:, None], logits + theta[:, None], -float("inf"))
    return logits, to_come(left, ranks[:, None], T, REMAINING)


@triton.jit
def accumulate(logits, coming, top, mass, wanted, number):
    """Online softmax: the running maximum, relative to it the mass, the sum of logits to come, and their number."""
    higher = tl.maximum(top, logits)
    mass = mass * tl.exp(top - higher) + tl.exp(logits - higher)
    wanted += number * (top - higher) + tl.where(coming, logits - higher, 0.0)
    return higher, mass, wanted, number + tl.where(coming, 1.0, 0.0)


@triton.jit
def merge_lanes(top, mass, wanted, number):
    """Merge what the lanes, the first dimension, have accumulated."""
    peak = tl.max(top, 0)
    behind = top - tl.expand_dims(peak, 0)
    return peak, tl.sum(mass * tl.exp(behind), 0), tl.sum(wanted + number * behind, 0), tl.sum(number, 0)


@triton.jit
def store_scores(scores, at, contexts, there, top, mass, wanted, number, stop, ended, REMAINING: tl.constexpr):
    """Write the scores of contexts whose candidates have the mass ``mass``·exp(top); ``ended``: the stop is next."""
    peak = tl.maximum(tl.maximum(top, stop), LOWEST)
    total = mass * tl.exp(top - peak) + tl.exp(stop - peak)
    possible = total > 0  # with nothing left to pick the stop is certain, even if its logit is −inf
    rest = tl.log(tl.where(possible, total, 1.0))
    ending = tl.where(possible, stop - peak - rest, 0.0)
    coming = wanted + number * (top - peak) - number * rest
    if not REMAINING:
        coming = tl.where(ended, ending, coming)
    tl.store(scores + at, coming, mask=there)
    tl.store(scores + contexts + at, ending, mask=there)
    tl.store(scores + 2 * contexts + at, tl.where(possible, peak, 0.0), mask=there)
    tl.store(scores + 3 * contexts + at, rest, mask=there)
    tl.store(scores + 4 * contexts + at, tl.where(possible, number, 0.0), mask=there)


@triton.jit
def store_result(
    scores, shares, ends, at, contexts, there, top, mass, wanted, number, ended, REMAINING: tl.constexpr
):
    """Write the scores, or this program's share for ``nll_combine``."""
    if shares is None:
        stop = tl.load(ends + at, mask=there, other=0.0)
        store_scores(scores, at, contexts, there, top, mass, wanted, number, stop, ended, REMAINING)
    else:
        each = tl.num_programs(1) * contexts
        spot = shares + tl.program_id(1) * contexts + at
        tl.store(spot, top, mask=there)
        tl.store(spot + each, mass, mask=there)
        tl.store(spot + 2 * each, wanted, mask=there)
        tl.store(spot + 3 * each, number, mask=there)


# fmt: off
@triton.jit(do_not_specialize=VARYING)
def nll_forward(
    query,
    keys, keys_b, keys_n, keys_h,
    unary, unary_b, unary_n,
    real, real_b, real_n,
    rank,
    lengths,
    scores,
    N, P, T, H,
    ends,
    shares,
    REMAINING: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr, CHUNK: tl.constexpr, INTERPRETED: tl.constexpr,
):
    # fmt: on
    """Scores of a tile of contexts over this program's share of the candidates. Beside the arguments above:

    scores: written, unless there are shares.
    shares (4, shares, B·M): written: what each program has taken in. None where there is but one.
    """
    sequence, first_tile, t, base, contexts = tile_of(P, T, TALL)
    keys, unary, real = row_of(sequence // P, keys, keys_b, unary, unary_b, real, real_b)
    query += base * H
    rank += sequence * N
    length = tl.load(lengths + sequence)

    # Kept per lane: reducing over the lanes once, at the end, is cheaper than for every tile.
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
        theta, there, ranks = load_candidates(n, unary, unary_n, real, real_n, rank, N)
        logits, coming = logits_of(
            query, t, T, keys, keys_n, keys_h, n, theta, there, ranks, N, H,
            REMAINING, TALL, WIDE, DEEP, CHUNK, INTERPRETED,
        )  # fmt: skip
        top, mass, wanted, number = accumulate(logits, coming, top, mass, wanted, number)
        logits_0 = tl.where(there, theta, -float("inf"))
        coming_0 = to_come(ranks, ranks, T, REMAINING)
        top_0, mass_0, wanted_0, number_0 = accumulate(logits_0, coming_0, top_0, mass_0, wanted_0, number_0)

    peak, mass, wanted, number = merge_lanes(top, mass, wanted, number)
    store_result(scores, shares, ends, base + t, contexts, t <= T, peak, mass, wanted, number, t == length, REMAINING)
    peak, mass, wanted, number = merge_lanes(top_0, mass_0, wanted_0, number_0)
    store_result(scores, shares, ends, base, contexts, first_tile, peak, mass, wanted, number, length == 0, REMAINING)


@triton.jit(do_not_specialize=["split", "contexts", "T"])
def nll_combine(
    scores, ends, lengths, shares, split, contexts, T, REMAINING: tl.constexpr, BLOCK: tl.constexpr
):
    """Scores of BLOCK contexts from the ``split`` shares (4, split, contexts) that programs have written."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < contexts
    each = split * contexts
    top = tl.full((BLOCK,), LOWEST, tl.float32)
    mass = tl.zeros((BLOCK,), tl.float32)
    wanted = tl.zeros((BLOCK,), tl.float32)
    number = tl.zeros((BLOCK,), tl.float32)
    for share in range(split):
        here = shares + share * contexts + at
        other = tl.load(here, mask=there, other=LOWEST)
        more = tl.load(here + 3 * each, mask=there, other=0.0)
        higher = tl.maximum(top, other)
        mass = mass * tl.exp(top - higher) + tl.load(here + each, mask=there, other=0.0) * tl.exp(other - higher)
        wanted += number * (top - higher) + tl.load(here + 2 * each, mask=there, other=0.0) + more * (other - higher)
        number += more
        top = higher
    stop = tl.load(ends + at, mask=there, other=0.0)
    ended = at % (T + 1) == tl.load(lengths + at // (T + 1), mask=there, other=-1)
    store_scores(scores, at, contexts, there, top, mass, wanted, number, stop, ended, REMAINING)

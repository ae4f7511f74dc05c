# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Greedy and sampling decoding on the GPU: one program runs a hypothesis from the first pick to the stop.

A step is a few reductions over N numbers, so launches and trips to the host would cost more than the work. Nothing
leaves the kernel until the hypothesis has stopped.

- ``block``: all N scores of a hypothesis stay in registers; a step reads one column of W.
- ``tiles``: for N that no register file holds, and for the factored form, whose step reads all keys. What the picks
  have added waits in a row of global memory (in cache, in practice) and is walked tile by tile.

A ``LowRank`` interaction is decoded factored, or as the dense W that one matrix product builds first, as
``dispatch.plan`` says. ``Coverage`` and ``Recent`` are decoded in a block, beside W a second matrix that says what
covers what, or what the latest pick adds. The plain twin of all is ``decoding.rollout``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchcpl.constraints import Rules
from torchcpl.functional import blame_nan
from torchcpl.interactions import Coverage, Dense, Recent
from torchcpl.interactions.base import without_autocast
from torchcpl.interactions.coverage import LARGEST
from torchcpl.kernels.dispatch import Plan
from torchcpl.kernels.streams import side_by_side
from torchcpl.potentials import Potentials, Selection

MOST_COVERED = tl.constexpr(LARGEST)
LOWEST = tl.constexpr(-3.0e38)  # stands in for −inf as a running maximum, whose differences must not be NaN


def decode(
    pot: Potentials,
    rules: Rules,
    way: Plan,
    width: int | None = 1,
    temperature: float | None = None,
    generator: torch.Generator | None = None,
    stop_threshold: float | None = None,
) -> Selection:
    """``width`` hypotheses a row, (B, K, T), or one where it is None, (B, T): greedy, or drawn at ``temperature``.

    ``log_prob`` is that at temperature 1.
    """
    unary = pot.unary
    batch, n = unary.shape
    shape = (batch,) if width is None else (batch, width)
    width, steps = width or 1, rules.max_len
    indices = unary.new_empty(*shape, steps, dtype=torch.long)
    lengths = unary.new_empty(shape, dtype=torch.long)
    log_prob = unary.new_empty(shape, dtype=torch.float32)
    # The seed stays on the device: the host need not wait for it.
    seed = None if temperature is None else torch.randint(2**62, (1,), device=unary.device, generator=generator)
    interaction = pot.interaction
    keys = values = stop_key = cover = last = last_stop = None
    if isinstance(interaction, Dense):
        W, stop_row, stop = interaction.W, interaction.stop_row, rules.biased(pot.stop)
    else:
        (W, stop_row, keys, values, stop_key), (last, last_stop), cover, stop = side_by_side(
            lambda: _forms(interaction, way),
            lambda: _lasts(interaction),
            lambda: _covers(interaction),
            lambda: rules.biased(pot.stop),
        )
    arguments = [
        *_strided(unary),
        *_strided(rules.available),
        *_strided(stop),
        seed,
        *(indices, lengths, log_prob),
        *(n, width, rules.min_len, steps, 1 / (temperature or 1.0), math.log(stop_threshold or 1.0)),
    ]
    options = {
        "BLOCK": way.size,
        "DRAW": seed is not None,
        "MASS": stop_threshold is not None,
        "LIVE": stop_row is not None or stop_key is not None,
    }
    dense = (*_strided(W, 3), *_strided(stop_row, 2))
    grid = (batch * width,)
    with torch.cuda.device_of(unary):
        if way.path == "block":
            _decode_block[grid](*arguments, *dense, cover, last, last_stop, **options, num_warps=way.warps)
        else:
            hidden = 0 if keys is None else keys.shape[2]
            factors = (*_strided(keys, 3), *_strided(values, 3), *_strided(stop_key, 2))
            scratch = unary.new_empty(*grid, n, dtype=torch.float32)
            options["FACTORED"] = keys is not None
            options["PART"] = 32 if keys is None else 128 // keys.element_size()  # of a key: whole cache lines
            sizes = (scratch, hidden, max(hidden, 1) ** -0.5)
            _decode_tiles[grid](*arguments, *dense, *factors, *sizes, **options, num_warps=way.warps)
    return Selection(indices, lengths, blame_nan(log_prob, pot), n)


def _forms(interaction: Any, way: Plan) -> tuple[Tensor | None, ...]:
    """W (B, N, N), stop_row (B, N), keys, values (B, N, h), stop_key (B, h): those that the kernel is to read."""
    keys, values, stop_key = interaction.keys, interaction.values, interaction.stop_key
    if way.form == "factored":
        return None, None, keys, values, stop_key
    return *_dense_of(keys, values, stop_key), None, None, None


def _lasts(interaction: Any) -> tuple[Tensor | None, Tensor | None]:
    """(B, N, N) and (B, N) what a pick adds to candidates and stop while it is the latest; None where that is no more.

    The stop's is None too where it does not listen.
    """
    if not isinstance(interaction, Recent):
        return None, None
    return _dense_of(interaction.last_keys, interaction.last_values, interaction.last_stop_key)


def _dense_of(keys: Tensor, values: Tensor, stop_key: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """What the factors make: W (B, N, N) and the stop's row of it (B, N)."""
    values = values.to(keys.dtype)
    if stop_key is None:
        return _product_of(keys, values), None
    row = stop_key.to(keys.dtype).unsqueeze(1)
    W, stop_row = side_by_side(lambda: _product_of(keys, values), lambda: _product_of(row, values).squeeze(1))
    return W, stop_row


def _covers(interaction: Any) -> Tensor | None:
    """(B, N, N) how far each pick makes each candidate redundant, as a logit; None where nothing is ever covered."""
    if not isinstance(interaction, Coverage):
        return None
    keys, offset = interaction.cover_keys, interaction.cover_offset
    return _product_of(keys, interaction.cover_values.to(keys.dtype), offset.to(keys.dtype).view(-1, 1, 1))


def _product_of(keys: Tensor, values: Tensor, offset: Tensor | None = None) -> Tensor:
    """keys·valuesᵀ/√h + offset (B, N, N), laid out such that what a pick does is contiguous."""
    scale = max(keys.shape[2], 1) ** -0.5
    start, beta = (keys.new_empty(()), 0) if offset is None else (offset, 1)
    with without_autocast(keys):
        return torch.baddbmm(start, values, keys.transpose(1, 2), beta=beta, alpha=scale).transpose(1, 2)


def _strided(tensor: Tensor | None, dims: int = 0) -> tuple[Any, ...]:
    """A tensor and its strides, as the kernels take them; None and zeros for one of ``dims`` that is not there."""
    return (None, *[0] * dims) if tensor is None else (tensor, *tensor.stride())


@triton.jit
def _gumbel(seed, row, step, at):
    """Standard Gumbel noise for the choices ``at`` of a step: the argmax of logits plus noise is a draw."""
    none = at * 0
    bits, _, _, _ = tl.philox(seed, at, none + step, none + row, none)
    u = tl.uint_to_uniform_float(bits) + 2.3283064e-10  # (0, 1): half a step up from zero
    # −log E with E = −log(1 − u), which for small u, the likely winners, would lose its digits.
    return -tl.log(tl.where(u < 0.000244140625, u * (1 + 0.5 * u), -tl.log(1 - u)))


@triton.jit
def _flip(bits):
    """The bits of a float as an integer of the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _keenest(keen, at, N):
    """The keenest candidate, of equals the first, N when there is none; and how keen it is."""
    ranks = _flip(keen.to(tl.int32, bitcast=True))  # integers: a warp finds the largest in one instruction
    highest = tl.max(ranks, 0)
    pick = tl.min(tl.where(ranks == highest, at, N), 0)
    best = _flip(highest).to(tl.float32, bitcast=True)
    return tl.where(best == -float("inf"), N, pick), best


@triton.jit
def _settle(pick, logit, best, keen, keen_stop, top, mass, stop, least, N, MASS: tl.constexpr):
    """Whether the candidate ``pick`` is chosen or the stop (then N), and log P of the choice.

    The candidates' logits are at most ``best`` and weigh Σ mass·exp(top). With ``MASS`` the stop is chosen when its
    log-probability is ``least`` or more, else when it is keener than the pick.
    """
    peak = tl.maximum(tl.maximum(best, stop), LOWEST)
    norm = tl.log(tl.sum(mass * tl.exp(top - peak), 0) + tl.exp(stop - peak))  # less the peak, which would cost digits
    if MASS:
        stops = stop - peak - norm >= least
    else:
        stops = keen_stop > keen
    pick = tl.where(stops, N, pick)
    # With nothing left to choose the stop is certain, even one whose logit is −inf.
    return pick, tl.where(peak == LOWEST, 0.0, tl.where(pick < N, logit, stop) - peak - norm)


@triton.jit
def _finish(indices, lengths, log_prob, row, count, total, max_len, BLOCK: tl.constexpr):
    tl.store(lengths + row, count.to(tl.int64))
    tl.store(log_prob + row, total)
    for start in range(0, max_len, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(indices + row * max_len + at, tl.full((BLOCK,), -1, tl.int64), mask=(at >= count) & (at < max_len))


# fmt: off
@triton.jit(do_not_specialize=["width", "min_len", "max_len"])
def _decode_block(
    unary, unary_b, unary_n, real, real_b, real_n, stop, stop_b, seed, indices, lengths, log_prob,
    N, width, min_len, max_len, sharpness, least,
    W, W_b, W_j, W_i, stop_row, stop_row_b, stop_row_n, cover, last, last_stop,
    BLOCK: tl.constexpr, DRAW: tl.constexpr, MASS: tl.constexpr, LIVE: tl.constexpr,
):
    # fmt: on
    """``cover``, ``last`` and ``last_stop`` lie as ``_product_of`` lays them out, pick after pick."""
    row = tl.program_id(0)
    b = (row // width).to(tl.int64)
    at = tl.arange(0, BLOCK)
    there = tl.load(real + b * real_b + at * real_n, mask=at < N, other=0)
    theta = tl.load(unary + b * unary_b + at * unary_n, mask=there, other=0.0).to(tl.float32)
    added = tl.where(there, 0.0, -float("inf"))  # what the picks have added; −inf: not to be picked
    final = tl.load(stop + b * stop_b).to(tl.float32)
    columns = W + b * W_b + at.to(tl.int64) * W_j
    covered = tl.zeros((BLOCK,), tl.float32)
    latest = tl.zeros((BLOCK,), tl.float32)  # what the latest pick adds, to the stop too
    latest_stop = 0.0
    total = 0.0
    count = 0
    end = max_len
    while count < end:
        score = theta + added
        if cover is not None:
            score = tl.where(added == -float("inf"), score, score - tl.log(1 + covered))  # padding may hold NaN
        if last is not None:
            score = tl.where(added == -float("inf"), score, score + latest)
        halt = tl.where(count >= min_len, final + latest_stop, -float("inf"))
        if DRAW:
            key = tl.load(seed)
            keen_stop = halt * sharpness + _gumbel(key, row, count, N)
            pick, keen = _keenest(score * sharpness + _gumbel(key, row, count, at), at, N)
            logit = tl.max(tl.where(at == pick, score, -float("inf")), 0)
            best = tl.max(score, 0)
        else:
            keen_stop = halt
            pick, keen = _keenest(score, at, N)
            logit = keen
            best = keen
        # Asked for at once, whether or not the stop will be chosen: on their way while the normaliser is summed up.
        some = pick < N
        asked = at < tl.where(some, N, 0)
        column = tl.load(columns + pick.to(tl.int64) * W_i, mask=asked, other=0.0)
        if cover is not None:
            more = tl.load(cover + (b * N + pick) * N + at, mask=asked, other=-float("inf")).to(tl.float32)
            covered += tl.exp(tl.minimum(more, MOST_COVERED))
        if last is not None:
            latest = tl.load(last + (b * N + pick) * N + at, mask=asked, other=0.0).to(tl.float32)
        if LIVE:
            final += tl.load(stop_row + b * stop_row_b + pick * stop_row_n, mask=some, other=0.0).to(tl.float32)
            if last is not None:
                latest_stop = tl.load(last_stop + b * N + pick, mask=some, other=0.0).to(tl.float32)
        pick, gain = _settle(pick, logit, best, keen, keen_stop, score, 1.0, halt, least, N, MASS)
        going = pick < N
        total += gain
        added = tl.where((at == pick) | (added == -float("inf")), -float("inf"), added + column.to(tl.float32))
        tl.store(indices + row.to(tl.int64) * max_len + count, pick.to(tl.int64), mask=going)
        end = tl.where(going, end, count)
        count += going.to(tl.int32)
    _finish(indices, lengths, log_prob, row.to(tl.int64), count, total, max_len, BLOCK=64)


@triton.jit
def _product(keys, key_n, key_h, values, value_h, at, N, H, BLOCK: tl.constexpr, PART: tl.constexpr):
    """keys[at]·value (BLOCK,), a part of the hidden dimension at a time."""
    sums = tl.zeros((BLOCK, PART), tl.float32)
    for start in range(0, H, PART):
        h = start + tl.arange(0, PART)
        value = tl.load(values + h * value_h, mask=h < H, other=0.0).to(tl.float32)
        there = (at < N)[:, None] & (h < H)[None, :]
        where = at.to(tl.int64)[:, None] * key_n + h[None, :] * key_h
        sums += tl.load(keys + where, mask=there, other=0.0).to(tl.float32) * value[None, :]
    return tl.sum(sums, 1)


# fmt: off
@triton.jit(do_not_specialize=["width", "min_len", "max_len"])
def _decode_tiles(
    unary, unary_b, unary_n, real, real_b, real_n, stop, stop_b, seed, indices, lengths, log_prob,
    N, width, min_len, max_len, sharpness, least,
    W, W_b, W_j, W_i, stop_row, stop_row_b, stop_row_n,
    keys, keys_b, keys_n, keys_h, values, values_b, values_n, values_h, stop_key, stop_key_b, stop_key_h,
    scratch, H, scale,
    BLOCK: tl.constexpr, PART: tl.constexpr, DRAW: tl.constexpr, MASS: tl.constexpr, LIVE: tl.constexpr,
    FACTORED: tl.constexpr,
):
    # fmt: on
    row = tl.program_id(0)
    b = (row // width).to(tl.int64)
    final = tl.load(stop + b * stop_b).to(tl.float32)
    scratch += row.to(tl.int64) * N  # (N,) what the picks have added; −inf: not to be picked
    total = 0.0
    count = 0
    end = max_len
    pick = N
    while count < end:
        halt = tl.where(count >= min_len, final, -float("inf"))
        # Of every lane, over the tiles: the keenest candidate, its place and logit; and the mass, exp(top) at a time.
        keenest = tl.full((BLOCK,), -float("inf"), tl.float32)
        place = tl.full((BLOCK,), 0, tl.int32) + N
        logits = keenest
        top = tl.full((BLOCK,), LOWEST, tl.float32)
        mass = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, N, BLOCK):
            at = start + tl.arange(0, BLOCK)
            if count == 0:
                there = tl.load(real + b * real_b + at * real_n, mask=at < N, other=0)
                added = tl.where(there, 0.0, -float("inf"))
            else:
                before = tl.load(scratch + at, mask=at < N, other=-float("inf"))
                if FACTORED:
                    value = values + b * values_b + pick.to(tl.int64) * values_n
                    effect = _product(keys + b * keys_b, keys_n, keys_h, value, values_h, at, N, H, BLOCK, PART) * scale
                else:
                    column = W + b * W_b + at.to(tl.int64) * W_j + pick.to(tl.int64) * W_i
                    effect = tl.load(column, mask=at < N, other=0.0).to(tl.float32)
                added = tl.where((at == pick) | (before == -float("inf")), -float("inf"), before + effect)
            tl.debug_barrier()  # where threads outnumber a tile, several hold a number: all read it before one writes
            tl.store(scratch + at, added, mask=at < N)
            theta = tl.load(unary + b * unary_b + at * unary_n, mask=added > -float("inf"), other=0.0).to(tl.float32)
            score = theta + added
            keen = score
            if DRAW:
                keen = score * sharpness + _gumbel(tl.load(seed), row, count, at)
            keener = keen > keenest
            keenest = tl.where(keener, keen, keenest)
            place = tl.where(keener, at, place)
            logits = tl.where(keener, score, logits)
            higher = tl.maximum(top, score)
            mass = mass * tl.exp(top - higher) + tl.exp(score - higher)
            top = higher
        tl.debug_barrier()  # the next step reads what other threads may have written
        keen_stop = halt
        if DRAW:
            keen_stop = halt * sharpness + _gumbel(tl.load(seed), row, count, N)
        pick, keen = _keenest(keenest, place, N)
        logit = tl.max(tl.where(place == pick, logits, -float("inf")), 0)
        pick, gain = _settle(pick, logit, tl.max(top, 0), keen, keen_stop, top, mass, halt, least, N, MASS)
        going = pick < N
        total += gain
        if LIVE:
            if FACTORED:
                one = tl.zeros((1,), tl.int32)
                key = stop_key + b * stop_key_b
                value = values + b * values_b + pick.to(tl.int64) * values_n
                effect = _product(key, 0, stop_key_h, value, values_h, one, 1, tl.where(going, H, 0), 1, PART)
                final += tl.sum(effect, 0) * scale
            else:
                final += tl.load(stop_row + b * stop_row_b + pick * stop_row_n, mask=going, other=0.0).to(tl.float32)
        tl.store(indices + row.to(tl.int64) * max_len + count, pick.to(tl.int64), mask=going)
        end = tl.where(going, end, count)
        count += going.to(tl.int32)
    _finish(indices, lengths, log_prob, row.to(tl.int64), count, total, max_len, BLOCK=64)

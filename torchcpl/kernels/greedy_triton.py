# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Greedy and sampling decoding on the GPU, as ``decoding.rollout`` in plain torch.

A step is a few reductions over N numbers, so launches and host synchronisation would dominate.

- ``_decode_block``: one program runs a hypothesis from the first pick to the stop, all N scores in registers; a step
  reads one column of W.
- ``_decode_tiles``: the scores tile by tile, for N that no register file holds; by W, where what the picks have added
  is in a row of global memory, cached in practice, or by keys and values, where a step reads all keys. Where these are
  many, several programs share a hypothesis and every step is one launch, of programs that first work out what the step
  before has chosen and then score their share.

A ``LowRank`` interaction is decoded by its factors, or by the dense W that one matrix product builds first, as
``greedy_plan`` says. ``Coverage`` and ``Recent`` are decoded in a block, beside W a second matrix that says what
covers what, or what the latest pick adds; ``DenseCoverage`` has that one alone.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchcpl.checks import capturing
from torchcpl.constraints import Rules
from torchcpl.functional import blame_nan
from torchcpl.interactions import Coverage, Dense, DenseCoverage, Recent
from torchcpl.interactions.base import without_autocast
from torchcpl.interactions.coverage import LARGEST
from torchcpl.kernels.greedy_plan import Plan
from torchcpl.kernels.streams import side_by_side
from torchcpl.potentials import Potentials, Selection

SYNC_EVERY = 32  # steps between tests of whether all hypotheses have stopped
MOST_COVERED = tl.constexpr(LARGEST)
LOWEST = tl.constexpr(-3.0e38)  # in place of −inf as a running maximum, whose differences must not be NaN


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
    found = Selection(
        unary.new_empty((*shape, steps), dtype=torch.long),
        unary.new_empty(shape, dtype=torch.long),
        unary.new_empty(shape, dtype=torch.float32),
        n,
        step_log_prob=unary.new_empty((*shape, steps), dtype=torch.float32),
    )
    # The seed stays on the device, without synchronisation.
    seed = None if temperature is None else torch.randint(2**62, (1,), device=unary.device, generator=generator)
    results = (found.indices, found.lengths, found.log_prob, found.step_log_prob)
    log_threshold = None if stop_threshold is None else math.log(stop_threshold)
    sizes = (n, width, rules.min_len, steps, 1 / (temperature or 1.0), log_threshold)
    interaction: Any = pot.interaction
    with torch.cuda.device_of(unary):
        if way.kernel == "factored":
            factors = (interaction.keys, interaction.values, interaction.stop_key)
            stop = rules.biased(pot.stop)
        else:
            (W, stop_row), (second, second_stop), stop = side_by_side(
                lambda: _matrix(interaction), lambda: _second_matrix(interaction), lambda: rules.biased(pot.stop)
            )
            factors = (W, None, stop_row)
        given = (*_strided(stop), seed, *results, *sizes)
        if way.kernel != "block":
            _launch_tiles(pot, rules, way, found, given, factors)
        else:
            cover, last = (None, second) if isinstance(interaction, Recent) else (second, None)
            _decode_block[(found.lengths.numel(),)](
                *(*_strided(unary), *_strided(rules.available), *given, *_strided(W, 3), *_strided(stop_row, 2)),
                *(cover, last, second_stop),
                BLOCK=way.size,
                num_warps=way.warps,
            )
    blame_nan(found.log_prob, pot)
    return found


def _launch_tiles(
    pot: Potentials, rules: Rules, way: Plan, found: Selection, given: tuple[Any, ...],
    factors: tuple[Tensor, Tensor | None, Tensor | None],
) -> None:  # fmt: skip
    """One launch, or where several programs share a hypothesis one for every step, and one for the last choice."""
    keys, values, stop_key = factors
    rows, hidden = found.lengths.numel(), keys.shape[2]
    left = torch.where(rules.available, pot.unary, -torch.inf).repeat_interleave(rows // len(pot), 0)
    kept = partial = None
    if values is None:
        kept = keys.new_empty(rows, hidden, dtype=torch.float32)
    elif way.programs > 1:
        assert found.step_log_prob is not None
        found.indices.fill_(-1)
        found.lengths.fill_(-1 if rules.max_len else 0)
        found.log_prob.zero_()
        found.step_log_prob.zero_()
        kept = keys.new_zeros(2, rows, hidden, dtype=torch.float32)
        partial = keys.new_zeros(2, 5, rows, way.programs, dtype=torch.float32)
    arguments = (
        *(left, *given, *_strided(keys), *_strided(values, 3), *_strided(stop_key, 2)),
        *(kept, partial, hidden, max(hidden, 1) ** -0.5),
    )
    options = {
        "BLOCK": way.size,
        "DEEP": 16 if values is None else max(16, triton.next_power_of_2(hidden)),
        "LANES": min(triton.next_power_of_2(way.programs), 256),
        "STAGES": way.stages,
        "num_warps": way.warps,
    }
    if way.programs == 1:
        _decode_tiles[(rows, 1)](*arguments, 0, rules.max_len + 1, **options)
        return
    for step in range(rules.max_len + 1):
        if step % SYNC_EVERY == SYNC_EVERY - 1 and not capturing() and bool((found.lengths >= 0).all()):
            break
        _decode_tiles[(rows, way.programs)](*arguments, step, step + 1, **options)


def _matrix(interaction: Any) -> tuple[Tensor | None, Tensor | None]:
    """W (B, N, N), None for nothing, and the stop's row of it (B, N), None where the stop does not listen."""
    if isinstance(interaction, Dense | DenseCoverage):
        return getattr(interaction, "W", None), interaction.stop_row
    return _dense_of(interaction.keys, interaction.values, interaction.stop_key)


def _second_matrix(interaction: Any) -> tuple[Tensor | None, Tensor | None]:
    """How far each pick covers each candidate, as a logit, or what it adds while it is the latest, to the stop too."""
    if isinstance(interaction, Recent):
        return _dense_of(interaction.last_keys, interaction.last_values, interaction.last_stop_key)
    if isinstance(interaction, DenseCoverage):
        return interaction.cover.transpose(1, 2).contiguous(), None
    if not isinstance(interaction, Coverage):
        return None, None
    keys, offset = interaction.cover_keys, interaction.cover_offset
    return _product_of(keys, interaction.cover_values.to(keys.dtype), offset.to(keys.dtype).view(-1, 1, 1)), None


def _dense_of(keys: Tensor, values: Tensor, stop_key: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """What the factors make: W (B, N, N) and the stop's row of it (B, N)."""
    values = values.to(keys.dtype)
    if stop_key is None:
        return _product_of(keys, values), None
    row = stop_key.to(keys.dtype).unsqueeze(1)
    W, stop_row = side_by_side(lambda: _product_of(keys, values), lambda: _product_of(row, values).squeeze(1))
    return W, stop_row


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
def _ordered_bits(bits):
    """The bits of a float as an integer of the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _argmax(scores, at, N):
    """The candidate ``at`` with the highest score, of equals the first, N when all are −inf; and that score."""
    ranks = _ordered_bits(scores.to(tl.int32, bitcast=True))  # integers: a warp finds the largest in one instruction
    highest = tl.max(ranks, 0)
    pick = tl.min(tl.where(ranks == highest, at, N), 0)
    best = _ordered_bits(highest).to(tl.float32, bitcast=True)
    return tl.where(best == -float("inf"), N, pick), best


@triton.jit
def _choose(pick, logit, score, stop, stop_score, best, mass, log_threshold, N):
    """Whether the candidate ``pick`` is chosen or the stop (then N), and log P of the choice.

    The candidates' logits are at most ``best`` and weigh mass·exp(best). With ``log_threshold`` the stop is chosen when
    its log-probability is that or more, else when its score is higher than the pick's; scores are logits, or in
    sampling logits over the temperature plus noise.
    """
    peak = tl.maximum(tl.maximum(best, stop), LOWEST)
    norm = tl.log(mass * tl.exp(best - peak) + tl.exp(stop - peak))  # relative to the peak, for precision
    if log_threshold is not None:
        stops = stop - peak - norm >= log_threshold
    else:
        stops = stop_score > score
    pick = tl.where(stops, N, pick)
    # With nothing left to pick the stop is certain, even if its logit is −inf.
    return pick, tl.where(peak == LOWEST, 0.0, tl.where(pick < N, logit, stop) - peak - norm)


@triton.jit
def _empty_lanes(N, LANES: tl.constexpr):
    """What lanes start with: a best score, whose place and logit, and a mass as mass·exp(top)."""
    none = tl.full((LANES,), -float("inf"), tl.float32)
    top = tl.full((LANES,), LOWEST, tl.float32)
    return none, tl.full((LANES,), 0, tl.int32) + N, none, top, tl.zeros((LANES,), tl.float32)


@triton.jit
def _accumulate(logits, scores, at, best, place, logit, top, mass):
    """Online softmax and argmax: add a tile to what every lane keeps."""
    better = scores > best
    best = tl.where(better, scores, best)
    place = tl.where(better, at, place)
    logit = tl.where(better, logits, logit)
    higher = tl.maximum(top, logits)
    mass = mass * tl.exp(top - higher) + tl.exp(logits - higher)
    return best, place, logit, higher, mass


@triton.jit
def _merge_lanes(best, place, logit, top, mass, N):
    """What all lanes keep: the best candidate, its score and logit, and the mass as peak and weight."""
    pick, score = _argmax(best, place, N)
    peak = tl.max(top, 0)
    pick_logit = tl.max(tl.where(place == pick, logit, -float("inf")), 0)
    return pick, score, pick_logit, peak, tl.sum(mass * tl.exp(top - peak), 0)


@triton.jit
def _finish(indices, step_log_prob, length, log_prob, count, total, max_len, BLOCK: tl.constexpr):
    """Write how a hypothesis ended, and the padding after its picks."""
    tl.store(length, count)
    tl.store(log_prob, total)
    for start in range(0, max_len, BLOCK):
        at = start + tl.arange(0, BLOCK)
        after = (at >= count) & (at < max_len)
        tl.store(indices + at, tl.full((BLOCK,), -1, tl.int64), mask=after)
        tl.store(step_log_prob + at, tl.zeros((BLOCK,), tl.float32), mask=after)


# fmt: off
@triton.jit(do_not_specialize=["width", "min_len", "max_len"])
def _decode_block(
    unary, unary_b, unary_n,
    real, real_b, real_n,
    stop, stop_b,
    seed, indices, lengths, log_prob, step_log_prob,
    N, width, min_len, max_len, sharpness, log_threshold,
    W, W_b, W_j, W_i,
    stop_row, stop_row_b, stop_row_n,
    cover, last, last_stop,
    BLOCK: tl.constexpr,
):
    # fmt: on
    """One program a hypothesis, from the first pick to the stop. Arguments, with K = ``width`` and T = ``max_len``:

    unary (B, N): θ, with its strides, as all tensors that come with names for them.
    real (B, N): bool, whether a candidate may be picked.
    stop (B,): logit of the stop, its bias included.
    seed (1,): of the noise of a draw; None for greedy.
    indices (B, K, T): written: the picks, −1 after the end.
    lengths (B, K): written.
    log_prob (B, K): written.
    step_log_prob (B, K, T): written: log P of each pick, 0 after the end.
    sharpness: one over the temperature.
    log_threshold: log-probability at which the stop is chosen; None where it must be the likeliest choice.
    W (B, N, N): W[j, i], what the pick i adds to candidate j; None for nothing.
    stop_row (B, N): what the pick i adds to the stop; None for nothing.
    cover (B, N, N): how far the pick i covers candidate j, as a logit, at [i, j]; None if nothing is ever covered.
    last (B, N, N): what the pick i adds to candidate j while it is the latest, at [i, j]; None for nothing.
    last_stop (B, N): and to the stop.
    BLOCK: a power of two, at least N.
    """
    row = tl.program_id(0)
    b = (row // width).to(tl.int64)
    out = row.to(tl.int64) * max_len
    at = tl.arange(0, BLOCK)
    there = tl.load(real + b * real_b + at * real_n, mask=at < N, other=0)
    theta = tl.load(unary + b * unary_b + at * unary_n, mask=there, other=0.0).to(tl.float32)
    added = tl.where(there, 0.0, -float("inf"))  # what the picks have added; −inf: not to be picked
    final = tl.load(stop + b * stop_b).to(tl.float32)
    covered = tl.zeros((BLOCK,), tl.float32)
    latest = tl.zeros((BLOCK,), tl.float32)  # what the latest pick adds, to the stop too
    latest_stop = 0.0
    total = 0.0
    count = 0
    end = max_len
    while count < end:
        logits = theta + added
        if cover is not None:
            logits = tl.where(added == -float("inf"), logits, logits - tl.log(1 + covered))  # padding may hold NaN
        if last is not None:
            logits = tl.where(added == -float("inf"), logits, logits + latest)
        halt = tl.where(count >= min_len, final + latest_stop, -float("inf"))
        if seed is not None:
            key = tl.load(seed)
            stop_score = halt * sharpness + _gumbel(key, row, count, N)
            pick, score = _argmax(logits * sharpness + _gumbel(key, row, count, at), at, N)
            logit = tl.max(tl.where(at == pick, logits, -float("inf")), 0)
            best = tl.max(logits, 0)
        else:
            stop_score = halt
            pick, score = _argmax(logits, at, N)
            logit = score
            best = score
        # Asked for at once, whether or not the stop will be chosen: on their way while the normaliser is summed up.
        some = pick < N
        asked = at < tl.where(some, N, 0)
        if W is not None:
            at_j = W + b * W_b + at.to(tl.int64) * W_j
            column = tl.load(at_j + pick.to(tl.int64) * W_i, mask=asked, other=0.0).to(tl.float32)
        else:
            column = tl.zeros((BLOCK,), tl.float32)
        if cover is not None:
            more = tl.load(cover + (b * N + pick) * N + at, mask=asked, other=-float("inf")).to(tl.float32)
            covered += tl.exp(tl.minimum(more, MOST_COVERED))
        if last is not None:
            latest = tl.load(last + (b * N + pick) * N + at, mask=asked, other=0.0).to(tl.float32)
        if stop_row is not None:
            final += tl.load(stop_row + b * stop_row_b + pick * stop_row_n, mask=some, other=0.0).to(tl.float32)
            if last is not None:
                latest_stop = tl.load(last_stop + b * N + pick, mask=some, other=0.0).to(tl.float32)
        mass = tl.sum(tl.exp(logits - tl.maximum(best, LOWEST)), 0)
        pick, gain = _choose(pick, logit, score, halt, stop_score, best, mass, log_threshold, N)
        going = pick < N
        total += gain
        added = tl.where((at == pick) | (added == -float("inf")), -float("inf"), added + column)
        tl.store(indices + out + count, pick.to(tl.int64), mask=going)
        tl.store(step_log_prob + out + count, gain, mask=going)
        end = tl.where(going, end, count)
        count += going.to(tl.int32)
    _finish(indices + out, step_log_prob + out, lengths + row, log_prob + row, count, total, max_len, 64)


# fmt: off
@triton.jit(do_not_specialize=["width", "min_len", "max_len", "first", "end"])
def _decode_tiles(
    left,
    stop, stop_b,
    seed, indices, lengths, log_prob, step_log_prob,
    N, width, min_len, max_len, sharpness, log_threshold,
    keys, keys_b, keys_n, keys_h,
    values, values_b, values_n, values_h,
    stop_key, stop_key_b, stop_key_h,
    kept, partial, H, scale, first, end,
    BLOCK: tl.constexpr, DEEP: tl.constexpr, LANES: tl.constexpr, STAGES: tl.constexpr,
):
    # fmt: on
    """The steps ``first`` to ``end`` of a hypothesis, by this program and the others of its row of the grid.

    Step t first works out what was chosen at step t − 1, every program for itself, and then scores the candidates that
    are left, every program its share. Step T scores nothing any more. Arguments as of ``_decode_block``, and

    left (B·K, N): θ of the candidates that may still be picked, −inf for others; picks are struck out.
    keys, values (B, N, h): the factors of W. Or W itself (B, N, N) and None.
    stop_key (B, h): the stop's. Or, with W, its row (B, N). None for nothing.
    H, scale: h and 1/√h.
    BLOCK: candidates of a tile.
    DEEP: a power of two, at least h.
    LANES: how many programs' findings are read at a time; 1 if the program is alone, and runs all steps.
    STAGES: tiles of keys that are on their way at a time.

    From step to step:

    kept (B·K, N): float32, written: what the picks have added, with W. None for one program with factors. For several
        (2, B·K, h): Σ values of the picks before step t at [t % 2], 0 at first.
    partial (2, 5, B·K, programs): what each program found in step t at [t % 2]: the best score, whose place (the bits
        of an int32) and logit, and the mass of its share as top and mass, mass·exp(top). None for one program.
    lengths (B, K): −1 while the hypothesis runs, for several programs.
    log_prob (B, K): what there is so far, 0 at first, for several programs.
    indices, step_log_prob (B, K, T): padding is there already, for several programs.
    """
    row = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0)
    b = row // width
    programs = tl.num_programs(1)
    mine = tl.program_id(1)
    h = tl.arange(0, DEEP)
    spread = rows.to(tl.int64) * programs  # between two of the five
    left += row * N
    keys += b * keys_b
    out = row * max_len
    ending = tl.zeros((DEEP,), tl.float32)
    if stop_key is not None and values is not None:
        ending = tl.load(stop_key + b * stop_key_b + h * stop_key_h, mask=h < H, other=0.0).to(tl.float32) * scale
    running = max_len > 0
    total = 0.0
    context = tl.zeros((DEEP,), tl.float32)
    if LANES > 1:
        running = tl.load(lengths + row) < 0
        total = tl.load(log_prob + row)
        context = tl.load(kept + ((first + 1) % 2 * rows + row) * H + h, mask=h < H, other=0.0)
        tl.debug_barrier()  # all threads have read them
    # What was found in the step before: the best candidate, its score and logit; the mass as weight·exp(peak).
    found = tl.full((), 0, tl.int32) + N
    score = tl.full((), -float("inf"), tl.float32)
    pick_logit = score
    peak = tl.full((), LOWEST, tl.float32)
    weight = tl.full((), 0.0, tl.float32)
    pick = found
    added_stop = 0.0
    count = 0
    step = first
    while step < end:
        if step > 0:
            if LANES > 1:
                best, place, logit, top, mass = _empty_lanes(N, LANES)
                for start in range(0, programs, LANES):
                    each = start + tl.arange(0, LANES)
                    here = partial + (step + 1) % 2 * 5 * spread + row * programs + each
                    scores = tl.load(here, mask=each < programs, other=-float("inf"))
                    places = tl.load(here + spread, mask=each < programs, other=0.0).to(tl.int32, bitcast=True)
                    better = (each < programs) & ((scores > best) | ((scores == best) & (places < place)))
                    best = tl.where(better, scores, best)
                    place = tl.where(better, places, place)
                    logit = tl.where(better, tl.load(here + 2 * spread, mask=each < programs, other=0.0), logit)
                    other = tl.load(here + 3 * spread, mask=each < programs, other=LOWEST)
                    more = tl.load(here + 4 * spread, mask=each < programs, other=0.0)
                    higher = tl.maximum(top, other)
                    mass = mass * tl.exp(top - higher) + more * tl.exp(other - higher)
                    top = higher
                found, score, pick_logit, peak, weight = _merge_lanes(best, place, logit, top, mass, N)
            if values is not None:
                added_stop = tl.sum(ending * context, 0)
            halt = tl.load(stop + b * stop_b).to(tl.float32) + added_stop
            halt = tl.where(step > min_len, halt, -float("inf"))
            stop_score = halt
            if seed is not None:
                stop_score = halt * sharpness + _gumbel(tl.load(seed), row.to(tl.int32), step - 1, N)
            pick, gain = _choose(found, pick_logit, score, halt, stop_score, peak, weight, log_threshold, N)
            going = running & (pick < N)  # of one that has stopped, what is read here means nothing
            if values is not None:
                value = values + b * values_b + pick.to(tl.int64) * values_n + h * values_h
                context += tl.load(value, mask=(h < H) & going, other=0.0).to(tl.float32)
            elif stop_key is not None:
                effect = tl.load(stop_key + b * stop_key_b + pick * stop_key_h, mask=going, other=0.0)
                added_stop += effect.to(tl.float32)
            tl.store(left + pick, -float("inf"), mask=going)
            total += gain
            count = tl.where(going, step, step - 1)
            if (mine == 0) & running:
                tl.store(indices + out + step - 1, pick.to(tl.int64), mask=going)
                tl.store(step_log_prob + out + step - 1, gain, mask=going)
                if LANES > 1:
                    tl.store(log_prob + row, total)
                    tl.store(lengths + row, count.to(tl.int64), mask=(count < step) | (step == max_len))
                    tl.store(kept + (step % 2 * rows + row) * H + h, context, mask=h < H)
            running = going
            tl.debug_barrier()  # all threads see that the pick is gone
        if running & (step < max_len):
            query = context * scale
            best, place, logit, top, mass = _empty_lanes(N, BLOCK)
            for start in tl.range(mine * BLOCK, N, programs * BLOCK, num_stages=STAGES):
                at = start + tl.arange(0, BLOCK)
                # Before the first pick there is nothing to read.
                if values is None:
                    there = (at < N) & (step > 0)
                    column = keys + at.to(tl.int64) * keys_n + pick.to(tl.int64) * keys_h
                    added = tl.load(kept + row * N + at, mask=there, other=0.0)
                    added += tl.load(column, mask=there, other=0.0).to(tl.float32)
                    tl.debug_barrier()  # several threads may hold a number: all read it before one writes
                    tl.store(kept + row * N + at, added, mask=at < N)
                else:
                    there = (at < N)[:, None] & (h < H)[None, :] & (step > 0)
                    k = tl.load(keys + at.to(tl.int64)[:, None] * keys_n + h[None, :] * keys_h, mask=there, other=0.0)
                    added = tl.sum(k.to(tl.float32) * query[None, :], 1)
                theta = tl.load(left + at, mask=at < N, other=-float("inf")).to(tl.float32)
                gone = (theta == -float("inf")) | (at == pick)  # where keys may hold NaN
                logits = tl.where(gone, -float("inf"), theta + added)
                scores = logits
                if seed is not None:
                    scores = logits * sharpness + _gumbel(tl.load(seed), row.to(tl.int32), step, at)
                best, place, logit, top, mass = _accumulate(logits, scores, at, best, place, logit, top, mass)
            found, score, pick_logit, peak, weight = _merge_lanes(best, place, logit, top, mass, N)
            if LANES > 1:
                here = partial + step % 2 * 5 * spread + row * programs + mine
                tl.store(here, score)
                tl.store(here + spread, found.to(tl.float32, bitcast=True))
                tl.store(here + 2 * spread, pick_logit)
                tl.store(here + 3 * spread, peak)
                tl.store(here + 4 * spread, weight)
            step += 1
        else:
            step = end
    if LANES == 1:
        _finish(indices + out, step_log_prob + out, lengths + row, log_prob + row, count, total, max_len, 64)

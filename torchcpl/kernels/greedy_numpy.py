"""Greedy decoding on the CPU, in NumPy.

A step works on N numbers, microseconds of arithmetic, so the overhead of the calls is what counts, and that the
parameters stay in cache from step to step. So the normalisers, which choosing does not need, are left until many
steps' scores can be summed up in one go; factors are decoded row by row, as one row's keys stay in cache; and a
batch of dense W, of which a step reads one column that no cache has seen, is shared out among threads that wait for
memory side by side and never for each other.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchcpl.constraints import Rules
from torchcpl.functional import blame_nan
from torchcpl.interactions import Coverage, Dense, DenseCoverage, Interaction, LowRank, Recent
from torchcpl.interactions.coverage import LARGEST
from torchcpl.potentials import Potentials, Selection

Array = NDArray[Any]
KEPT = 2**18  # scores kept for their normalisers at a time
GRAIN = 2**15  # numbers up to which torch works in one thread


def obstacle(pot: Potentials, rules: Rules) -> str | None:
    """Why this twin cannot run; None when it can: on the CPU, all in float32 or float64, masks and length limits."""
    interaction = pot.interaction
    if not isinstance(interaction, Dense | DenseCoverage | LowRank | Coverage | Recent):
        return f"a {type(interaction).__name__} interaction"
    if isinstance(interaction, DenseCoverage) and interaction.W is not None:
        return "trial"
    if torch.compiler.is_compiling():
        return "torch.compile or torch.export"
    if pot.unary.device.type != "cpu":
        return f"tensors on {pot.unary.device}"
    if not rules.plain:
        return "constraints other than Forbid"
    dtypes = {part.dtype for part in (pot.unary, *vars(interaction).values()) if part is not None}
    return None if dtypes <= {torch.float32} or dtypes <= {torch.float64} else f"potentials in {dtypes}"


def greedy(pot: Potentials, rules: Rules, stop_threshold: float | None = None) -> Selection:
    """The twin of ``rollout`` with argmax or, given a threshold, with the stop judged by its own probability."""
    # Where a compiled function falls back to Python, the compiler traces what that calls, and its NumPy does not write
    # through views. A program that has not imported the compiler need not.
    return (_untraced() if "torch._dynamo" in sys.modules else _greedy)(pot, rules, stop_threshold)


@cache
def _untraced() -> Callable[[Potentials, Rules, float | None], Selection]:
    return torch.compiler.disable(_greedy)  # type: ignore[no-any-return]


def _greedy(pot: Potentials, rules: Rules, stop_threshold: float | None) -> Selection:
    batch, n = pot.unary.shape
    interaction = pot.interaction
    # Candidates and the stop in one line, (B, N+1), so that one argmax settles a step.
    lines = np.empty((batch, n + 1), dtype=pot.unary.detach().numpy().dtype)
    lines[:, :n] = np.where(rules.available.numpy(), pot.unary.detach().numpy(), -np.inf)
    stop = rules.biased(pot.stop)
    lines[:, n] = stop.detach().to(pot.unary.dtype).numpy()
    indices = np.full((batch, rules.max_len), -1, dtype=np.int64)
    gains = np.zeros((batch, rules.max_len), dtype=lines.dtype)
    log_prob = np.zeros(batch, dtype=lines.dtype)

    log_threshold = None if stop_threshold is None else math.log(stop_threshold)
    together = interaction if isinstance(interaction, Dense) and log_threshold is None else None

    def decode(start: int, end: int) -> None:
        with np.errstate(invalid="ignore", over="ignore"):  # NaN and inf come out as NaN, as they do of torch
            if together is not None and end - start > 1:
                part = together.rows(slice(start, end))
                found = indices[start:end], gains[start:end]
                log_prob[start:end] = _decode_batch(part, lines[start:end], rules, *found)
            else:
                for row in range(start, end):
                    add = _row_update(interaction, row, lines[row])
                    log_prob[row] = _decode_row(lines[row], add, rules, indices[row], gains[row], log_threshold)

    if together is not None and batch > 1:
        # One chunk a thread, each small enough that torch does not split it again.
        workers = torch.get_num_threads()
        chunk = max(1, min(-(-batch // workers), GRAIN // max(1, n)))
        starts = range(0, batch, chunk)
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(decode, starts, (min(start + chunk, batch) for start in starts)))
    else:
        decode(0, batch)
    picks, lengths, steps, total = map(torch.from_numpy, (indices, (indices >= 0).sum(1), gains, log_prob))
    if np.isnan(log_prob).any():
        blame_nan(total, pot)
    return Selection(picks, lengths, total, n, step_log_prob=steps)


class Normalisers:
    """Scores of many steps, waiting to be summed up: −log P = log Σ_j exp(score_t[j] − chosen_t) of every row and step.

    Relative to what was chosen, the largest: nothing overflows, and at large scores no digit that counts is lost.
    """

    def __init__(self, like: Array, steps: int) -> None:
        count = max(1, min(steps, KEPT // max(1, like.size)))
        self.kept = np.empty((count, *like.shape), dtype=like.dtype)
        self.ones = np.ones(like.shape[-1], dtype=like.dtype)
        self.fill = 0
        self.done: list[Array] = []

    def keep(self, scores: Array, chosen: Any, stop_allowed: bool, live: Any = True) -> None:
        row = self.kept[self.fill]
        np.subtract(scores, chosen, out=row)
        if not stop_allowed:
            row[..., -1] = -np.inf
        if live is not True:  # rows that have stopped contribute log exp 0 = 0
            row[~live] = -np.inf
            row[~live, 0] = 0
        self.fill += 1
        if self.fill == len(self.kept):
            self.flush()

    def flush(self) -> None:
        kept = self.kept[: self.fill]
        np.exp(kept, out=kept)
        self.done.append(np.log(kept @ self.ones))  # faster than sum(-1)
        self.fill = 0

    def log_probs(self) -> Array:
        """(steps, ...) of what was chosen at each."""
        self.flush()
        return np.negative(self.done[0] if len(self.done) == 1 else np.concatenate(self.done))


def _decode_row(
    scores: Array,
    add: Callable[[int], None],
    rules: Rules,
    indices: Array,
    gains: Array,
    log_threshold: float | None = None,
) -> float:
    """Decode one row in place, ``scores`` (N+1,) with the stop last; returns its log-probability.

    Fills ``indices`` and ``gains``, the log-probabilities of the picks (T,). With ``log_threshold`` the stop is chosen
    once its log-probability reaches that.
    """
    n = len(scores) - 1
    candidates = scores[:n]
    normalisers = Normalisers(scores, rules.max_len)
    kept, room, min_len, fill = normalisers.kept, len(normalisers.kept), rules.min_len, 0
    subtract, never = np.subtract, -math.inf
    picks: list[int] = []
    for step in range(rules.max_len):
        choice = int((scores if step >= min_len and log_threshold is None else candidates).argmax())
        if log_threshold is not None and step >= min_len and _stops(scores, scores[choice], log_threshold):
            choice = n
        chosen = scores[choice]
        if chosen == never:  # nothing is left: the stop is certain
            break
        # What normalisers.keep does, without the call.
        subtract(scores, chosen, kept[fill])
        if step < min_len:
            kept[fill, n] = never
        fill += 1
        if fill == room:
            normalisers.fill, fill = fill, 0
            normalisers.flush()
        if choice == n:
            break
        picks.append(choice)
        add(choice)
        scores[choice] = never
    normalisers.fill = fill
    log_probs = normalisers.log_probs()
    indices[: len(picks)] = picks
    gains[: len(picks)] = log_probs[: len(picks)]
    return float(log_probs.sum(dtype=np.float64))


def _stops(scores: Array, best: Any, log_threshold: float) -> bool:
    """Whether the stop's log-probability reaches ``log_threshold``; without a candidate it is certain."""
    stop = scores[-1]
    peak = max(best, stop)
    if not -math.inf < stop < math.inf or best == -math.inf:
        return bool(stop == math.inf or best == -math.inf)
    return bool(stop - peak - np.log(np.exp(scores - peak).sum()) >= log_threshold)


def _decode_batch(interaction: Dense, scores: Array, rules: Rules, indices: Array, gains: Array) -> Array:
    """Decode rows side by side, ``scores`` (B, N+1) in place; returns their log-probabilities (B,).

    Fills ``indices`` and ``gains``, the log-probabilities of the picks (B, T).
    """
    add = _batch_update(interaction, torch.from_numpy(scores))
    n = scores.shape[1] - 1
    rows = np.arange(len(scores))
    live = np.ones(len(scores), dtype=bool)
    normalisers = Normalisers(scores, rules.max_len)
    for step in range(rules.max_len):
        may_stop = step >= rules.min_len
        choice = (scores if may_stop else scores[:, :n]).argmax(1)
        chosen = scores[rows, choice]
        live &= chosen != -np.inf  # where nothing is left the stop is certain
        everyone = bool(live.all())
        chosen = chosen if everyone else np.where(live, chosen, 0)
        normalisers.keep(scores, chosen[:, None], may_stop, True if everyone else live)
        live &= choice != n
        if not live.any():
            break
        indices[:, step] = np.where(live, choice, -1)
        choice[~live] = 0  # what a stopped row adds is never read
        add(choice)
        scores[rows, choice] = -np.inf
    log_probs = normalisers.log_probs()  # (steps, B)
    np.copyto(gains[:, : len(log_probs)], log_probs.T, where=indices[:, : len(log_probs)] >= 0)
    log_prob: Array = log_probs.sum(0, dtype=np.float64)
    return log_prob


def _row_update(interaction: Interaction, row: int, scores: Array) -> Callable[[int], None]:
    """Add what a pick adds to the scores (N+1,) of one row."""
    candidates, n = scores[:-1], len(scores) - 1
    if isinstance(interaction, Dense):
        columns = interaction.W[row].detach().numpy().T
        stop = None if interaction.stop_row is None else interaction.stop_row[row].detach().numpy()

        def add(pick: int, plus: Any = np.add) -> None:
            plus(candidates, columns[pick], candidates)
            if stop is not None:
                scores[n] += stop[pick]

        return add
    if isinstance(interaction, DenseCoverage):
        return _dense_cover(interaction, row, scores)
    assert isinstance(interaction, LowRank | Coverage | Recent)
    keys, values = interaction.keys[row].detach().numpy(), interaction.values[row].detach().numpy()
    stop_key = None if interaction.stop_key is None else interaction.stop_key[row].detach().numpy()
    scale = 1 / math.sqrt(max(keys.shape[1], 1))
    product = np.empty_like(candidates)
    # What Coverage takes off and the latest pick adds is computed anew at every step, so the sums are kept apart.
    sums = candidates if isinstance(interaction, LowRank) else candidates.copy()

    def add_product(pick: int) -> None:
        value = values[pick] * scale
        np.matmul(keys, value, out=product)
        np.add(sums, product, out=sums)
        if stop_key is not None:
            scores[n] += stop_key @ value

    if isinstance(interaction, LowRank):
        return add_product
    if isinstance(interaction, Recent):
        return _latest(interaction, row, scores, sums, add_product)
    cover_keys, cover_values = (x[row].detach().numpy() for x in (interaction.cover_keys, interaction.cover_values))
    offset = interaction.cover_offset[row].item()
    narrow = 1 / math.sqrt(max(cover_keys.shape[1], 1))
    covered = np.zeros_like(candidates)

    def add_cover(pick: int) -> None:
        add_product(pick)
        sums[pick] = -np.inf
        covered[:] += np.exp(np.minimum(cover_keys @ (cover_values[pick] * narrow) + offset, LARGEST))
        np.subtract(sums, np.log1p(covered), out=candidates)

    return add_cover


def _dense_cover(interaction: DenseCoverage, row: int, scores: Array) -> Callable[[int], None]:
    columns = interaction.cover[row].detach().numpy().T
    stop = None if interaction.stop_row is None else interaction.stop_row[row].detach().numpy()
    n, sums, covered = len(scores) - 1, scores[:-1].copy(), np.zeros_like(scores[:-1])

    def add(pick: int) -> None:
        sums[pick] = -np.inf
        covered[:] += np.exp(np.minimum(columns[pick], LARGEST))
        np.subtract(sums, np.log1p(covered), out=scores[:n])
        if stop is not None:
            scores[n] += stop[pick]

    return add


def _latest(
    interaction: Recent, row: int, scores: Array, sums: Array, add_product: Callable[[int], None]
) -> Callable[[int], None]:
    keys, values = interaction.last_keys[row].detach().numpy(), interaction.last_values[row].detach().numpy()
    stop_key = None if interaction.last_stop_key is None else interaction.last_stop_key[row].detach().numpy()
    scale = 1 / math.sqrt(max(keys.shape[1], 1))
    n, stop = len(scores) - 1, scores[-1]  # the stop's sum

    def add(pick: int) -> None:
        nonlocal stop
        scores[n] = stop
        add_product(pick)
        stop = scores[n]
        sums[pick] = -np.inf
        value = values[pick] * scale
        np.add(sums, keys @ value, out=scores[:n])
        if stop_key is not None:
            scores[n] += stop_key @ value

    return add


def _batch_update(interaction: Dense, part: Tensor) -> Callable[[Array], None]:
    """Add what the picks (B,) add to the scores ``part`` (B, N+1)."""
    batch, n = interaction.shape
    W, stop_row = interaction.W.detach(), interaction.stop_row
    candidates = part[:, :n]
    column = W.new_empty(batch, n, 1)

    def add(picks: Array) -> None:
        index = torch.from_numpy(picks).view(batch, 1, 1)
        torch.gather(W, 2, index.expand(batch, n, 1), out=column)
        candidates.add_(column.squeeze(-1))
        if stop_row is not None:
            part[:, n] += stop_row.detach().gather(1, index.view(batch, 1)).squeeze(1)

    return add

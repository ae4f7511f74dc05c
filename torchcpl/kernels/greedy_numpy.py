"""Greedy decoding on the CPU, in NumPy.

A step is microseconds of arithmetic on N numbers, so call overhead and cache locality dominate. So the normalisers,
which choosing does not need, are computed for many steps at once; factors are decoded row by row, as one row's keys
stay in cache; and a batch of dense W, of which a step reads one uncached column, is split among independent threads,
which wait for memory in parallel.
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
DEFERRED = 2**18  # scores kept for their normalisers at a time
GRAIN = 2**15  # numbers up to which torch works in one thread


def applies(pot: Potentials, rules: Rules) -> bool:
    """Whether this can decode: CPU tensors in float32 or float64, with only masks and length limits, and no graph."""
    interaction = pot.interaction
    known = isinstance(interaction, Dense | DenseCoverage | LowRank | Coverage | Recent)
    if not known or not rules.plain or pot.unary.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    dtypes = {part.dtype for part in (pot.unary, *vars(interaction).values()) if part is not None}
    return dtypes <= {torch.float32} or dtypes <= {torch.float64}


def greedy(pot: Potentials, rules: Rules, stop_threshold: float | None) -> Selection:
    """``rollout`` with argmax, or with ``stop_threshold``."""
    # Where a compiled function falls back to Python, the compiler traces what that calls, and its NumPy does not write
    # through views. A program that has not imported the compiler need not.
    return (_untraced() if "torch._dynamo" in sys.modules else _greedy)(pot, rules, stop_threshold)


@cache
def _untraced() -> Callable[[Potentials, Rules, float | None], Selection]:
    return torch.compiler.disable(_greedy)


def _greedy(pot: Potentials, rules: Rules, stop_threshold: float | None) -> Selection:
    batch, n = pot.unary.shape
    # Candidates and the stop in one line, (B, N+1), so that one argmax settles a step.
    lines = np.empty((batch, n + 1), dtype=_array(pot.unary).dtype)
    lines[:, :n] = np.where(rules.available.numpy(), _array(pot.unary), -np.inf)
    lines[:, n] = _array(rules.biased(pot.stop).to(pot.unary.dtype))
    indices = np.full((batch, rules.max_len), -1, dtype=np.int64)
    gains = np.zeros((batch, rules.max_len), dtype=lines.dtype)
    log_prob = np.zeros(batch, dtype=lines.dtype)
    log_threshold = None if stop_threshold is None else math.log(stop_threshold)

    def decode(start: int, end: int) -> None:
        with np.errstate(invalid="ignore", over="ignore"):  # NaN and inf come out as NaN, as they do of torch
            if together is not None and end - start > 1:
                part = slice(start, end)
                log_prob[part] = _decode_batch(together.rows(part), lines[part], rules, indices[part], gains[part])
            else:
                for row in range(start, end):
                    add = _row_update(pot.interaction, row, lines[row])
                    log_prob[row] = _decode_row(lines[row], add, rules, indices[row], gains[row], log_threshold)

    together = pot.interaction if isinstance(pot.interaction, Dense) and log_threshold is None else None
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


def _array(tensor: Tensor) -> Array:
    return tensor.detach().numpy()


class DeferredLogProbs:
    """Scores of many steps relative to the chosen ones, (steps, ..., N+1), whose normalisers are computed together.

    Relative to what was chosen, the largest: nothing overflows, and large scores lose no precision.
    """

    def __init__(self, like: Array, steps: int) -> None:
        count = max(1, min(steps, DEFERRED // max(1, like.size)))
        self.scores = np.empty((count, *like.shape), dtype=like.dtype)
        self.ones = np.ones(like.shape[-1], dtype=like.dtype)
        self.fill = 0
        self.done: list[Array] = []

    def next(self) -> Array:
        """Where to write the scores of the next step."""
        if self.fill == len(self.scores):
            self.flush()
        self.fill += 1
        return self.scores[self.fill - 1]

    def flush(self) -> None:
        kept = self.scores[: self.fill]
        np.exp(kept, out=kept)
        self.done.append(-np.log(kept @ self.ones))  # faster than sum(-1)
        self.fill = 0

    def log_probs(self) -> Array:
        """(steps, ...) −log Σ exp: log P of what was chosen, whose score is 0."""
        self.flush()
        return np.concatenate(self.done)


def _decode_row(
    scores: Array,
    add: Callable[[int], None],
    rules: Rules,
    indices: Array,
    gains: Array,
    log_threshold: float | None,
) -> float:
    """Decode one row in place, ``scores`` (N+1,) with the stop last; returns its log-probability.

    Fills ``indices`` and ``gains``, the log-probabilities of the picks (T,). With ``log_threshold`` the stop is chosen
    once its log-probability reaches that.
    """
    n, min_len = len(scores) - 1, rules.min_len
    candidates = scores[:n]
    deferred = DeferredLogProbs(scores, rules.max_len)
    next_scores, subtract, never = deferred.next, np.subtract, -math.inf  # looked up once, not at every step
    picks: list[int] = []
    for step in range(rules.max_len):
        choice = int((scores if step >= min_len and log_threshold is None else candidates).argmax())
        if log_threshold is not None and step >= min_len and _stops(scores, scores[choice], log_threshold):
            choice = n
        chosen = scores[choice]
        if chosen == never:  # nothing is left: the stop is certain
            break
        relative = subtract(scores, chosen, next_scores())
        if step < min_len:
            relative[n] = never
        if choice == n:
            break
        picks.append(choice)
        add(choice)
        scores[choice] = never
    log_probs = deferred.log_probs()
    indices[: len(picks)] = picks
    gains[: len(picks)] = log_probs[: len(picks)]
    return float(log_probs.sum(dtype=np.float64))


def _decode_batch(interaction: Dense, scores: Array, rules: Rules, indices: Array, gains: Array) -> Array:
    """Decode rows together, ``scores`` (B, N+1) in place; returns their log-probabilities (B,).

    Fills ``indices`` and ``gains``, the log-probabilities of the picks (B, T).
    """
    batch, n = interaction.shape
    rows, live = np.arange(batch), np.ones(batch, dtype=bool)
    deferred = DeferredLogProbs(scores, rules.max_len)
    W, candidates, stop = interaction.W.detach(), torch.from_numpy(scores[:, :n]), torch.from_numpy(scores[:, n])
    column = W.new_empty(batch, n, 1)
    for step in range(rules.max_len):
        may_stop = step >= rules.min_len
        choice = (scores if may_stop else scores[:, :n]).argmax(1)
        chosen = scores[rows, choice]
        live &= chosen != -np.inf  # where nothing is left the stop is certain
        relative = np.subtract(scores, np.where(live, chosen, 0)[:, None], deferred.next())
        if not may_stop:
            relative[:, n] = -np.inf
        if not live.all():  # rows that have stopped contribute log exp 0 = 0
            relative[~live] = -np.inf
            relative[~live, 0] = 0
        live &= choice != n
        if not live.any():
            break
        indices[:, step] = np.where(live, choice, -1)
        choice[~live] = 0  # the update of a stopped row is never read
        picks = torch.from_numpy(choice).view(batch, 1, 1)
        candidates.add_(torch.gather(W, 2, picks.expand(batch, n, 1), out=column).squeeze(-1))
        if interaction.stop_row is not None:
            stop.add_(interaction.stop_row.detach().gather(1, picks.view(batch, 1)).squeeze(1))
        scores[rows, choice] = -np.inf
    log_probs = deferred.log_probs()  # (steps, B)
    np.copyto(gains[:, : len(log_probs)], log_probs.T, where=indices[:, : len(log_probs)] >= 0)
    return log_probs.sum(0, dtype=np.float64)


def _stops(scores: Array, best: Any, log_threshold: float) -> bool:
    """Whether the stop's log-probability reaches ``log_threshold``; without a candidate it is certain."""
    stop = scores[-1]
    peak = max(best, stop)
    if not -math.inf < stop < math.inf or best == -math.inf:
        return bool(stop == math.inf or best == -math.inf)
    return bool(stop - peak - np.log(np.exp(scores - peak).sum()) >= log_threshold)


Effect = Callable[[int], tuple[Any, Any]]  # of a pick: what it adds to the candidates (N,) and to the stop, or None


def _row_update(interaction: Interaction, row: int, scores: Array) -> Callable[[int], None]:
    """Add a pick's effect to the scores (N+1,) of one row."""
    candidates, n, plus = scores[:-1], len(scores) - 1, np.add  # looked up once, not at every step
    effect, second = _effects(interaction, row)

    def add(pick: int) -> None:
        column, stop = effect(pick)
        plus(candidates, column, candidates)
        if stop is not None:
            scores[n] += stop

    if second is None:
        return add
    # What is covered and what the latest pick adds is computed anew at every step, so the sums are kept apart.
    total = scores.copy()
    sums, covered = total[:n], np.zeros_like(candidates)

    def add_anew(pick: int) -> None:
        column, stop = effect(pick)
        np.add(sums, column, sums)
        total[n] += stop or 0
        sums[pick] = -math.inf
        column, stop = second(pick)
        if isinstance(interaction, Recent):
            np.add(sums, column, candidates)
        else:
            np.add(covered, np.exp(np.minimum(column, LARGEST)), covered)
            np.subtract(sums, np.log1p(covered), candidates)
        scores[n] = total[n] + (stop or 0)

    return add_anew


def _effects(interaction: Any, row: int) -> tuple[Effect, Effect | None]:
    """What a pick adds for good; and how far it covers the others, as logits, or what it adds while the latest."""

    def of_row(table: Tensor | None) -> Any:
        return None if table is None else _array(table[row])

    def product(keys: Tensor, values: Tensor, stop_key: Tensor | None) -> Effect:
        """keys·values[pick]/√h."""
        left, right, last = of_row(keys), of_row(values), of_row(stop_key)
        scale, column = 1 / math.sqrt(max(left.shape[1], 1)), np.empty(len(left), dtype=left.dtype)

        def effect(pick: int) -> tuple[Array, Any]:
            value = right[pick] * scale
            return np.matmul(left, value, column), None if last is None else last @ value

        return effect

    if isinstance(interaction, Dense | DenseCoverage):
        columns = of_row(interaction.W if isinstance(interaction, Dense) else interaction.cover).T
        stops = of_row(interaction.stop_row)
        if isinstance(interaction, Dense):
            return lambda pick: (columns[pick], None if stops is None else stops[pick]), None
        return lambda pick: (0, None if stops is None else stops[pick]), lambda pick: (columns[pick], None)
    first = product(interaction.keys, interaction.values, interaction.stop_key)
    if isinstance(interaction, Coverage):
        cover = product(interaction.cover_keys, interaction.cover_values, None)
        offset = of_row(interaction.cover_offset)
        return first, lambda pick: (cover(pick)[0] + offset, None)
    if isinstance(interaction, Recent):
        return first, product(interaction.last_keys, interaction.last_values, interaction.last_stop_key)
    return first, None

"""Brute force by enumeration: the process written down once more, in plain Python, for one row of at most five or so.

Nothing here is shared with the library. A row is lists of floats; what the picks add is a function of the picks;
every probability is a product of choices, every expectation a sum over all that can happen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations, permutations

Picks = tuple[int, ...]
# What the picks add to every candidate's logit, and to the stop's.
Effect = Callable[[Picks], tuple[list[float], float]]
# A user's own rule: which candidates may come next, and whether the stop may.
Veto = Callable[[Picks], tuple[list[bool], bool]]


def no_effect(size: int) -> Effect:
    return lambda picks: ([0.0] * size, 0.0)


def matrix_effect(W: Sequence[Sequence[float]], stop_row: Sequence[float] | None = None) -> Effect:
    """``W[j][i]`` is what having picked i adds to j."""

    def effect(picks: Picks) -> tuple[list[float], float]:
        added = [math.fsum(W[j][i] for i in picks) for j in range(len(W))]
        return added, 0.0 if stop_row is None else math.fsum(stop_row[i] for i in picks)

    return effect


def context_effect(
    keys: Sequence[Sequence[float]],
    values: Sequence[Sequence[float]],
    network: Callable[[list[float], int], list[float]],
    stop_key: Sequence[float] | None = None,
) -> Effect:
    """``keys[j]·network(Σ values[i], count)/√h``."""

    def effect(picks: Picks) -> tuple[list[float], float]:
        width = len(keys[0]) if keys else 0
        total = [math.fsum(values[i][c] for i in picks) for c in range(width)]
        context = network(total, len(picks))

        def read(key: Sequence[float]) -> float:
            return math.fsum(k * c for k, c in zip(key, context, strict=True)) / math.sqrt(width)

        return [read(key) for key in keys], 0.0 if stop_key is None else read(stop_key)

    return effect


def coverage_effect(base: Effect, cover: Sequence[Sequence[float]]) -> Effect:
    """``base`` less ``log(1 + Σ_i exp cover[j][i])`` for every candidate j."""

    def effect(picks: Picks) -> tuple[list[float], float]:
        before, stop = base(picks)
        covered = [math.fsum(math.exp(min(row[i], 30.0)) for i in picks) for row in cover]
        return [x - math.log(1 + c) for x, c in zip(before, covered, strict=True)], stop

    return effect


def latest_effect(base: Effect, latest: Effect) -> Effect:
    """``base``, and what ``latest`` says of the last pick alone."""

    def effect(picks: Picks) -> tuple[list[float], float]:
        both = base(picks), latest(picks[-1:])
        return [a + b for a, b in zip(both[0][0], both[1][0], strict=True)], both[0][1] + both[1][1]

    return effect


@dataclass
class Row:
    """One row of a batch."""

    theta: list[float]
    stop: float
    effect: Effect
    mask: list[bool]

    @property
    def size(self) -> int:
        return len(self.theta)


@dataclass
class Limits:
    """What a decoder was asked for, for one row. Costs are integers, so that sums are exact."""

    max_len: int | None = None
    min_len: int = 0
    stop_bias: float = 0.0
    forbid: set[int] = field(default_factory=set)
    require: set[int] = field(default_factory=set)
    first: bool = False  # whether what is required is picked before all else
    adjacent: list[list[bool]] | None = None
    budgets: list[tuple[list[int], int]] = field(default_factory=list)
    veto: Veto | None = None

    def longest(self, row: Row) -> int:
        return row.size if self.max_len is None else min(self.max_len, row.size)


FREE = Limits()


def subsets(items: Iterable[int]) -> Iterable[Picks]:
    items = list(items)
    return chain.from_iterable(combinations(items, k) for k in range(len(items) + 1))


def complete(row: Row, limits: Limits, chosen: Iterable[int]) -> bool:
    """Whether this set, however it was ordered, meets every demand on sets."""
    chosen = set(chosen)
    return (
        all(row.mask[i] and i not in limits.forbid for i in chosen)
        and limits.require <= chosen
        and limits.min_len <= len(chosen) <= limits.longest(row)
        and all(sum(cost[i] for i in chosen) <= limit for cost, limit in limits.budgets)
    )


def feasible(row: Row, limits: Limits, chosen: Iterable[int] = ()) -> bool:
    """Whether some superset of the picks is complete."""
    chosen = set(chosen)
    rest = [i for i in range(row.size) if i not in chosen]
    return any(complete(row, limits, chosen | set(more)) for more in subsets(rest))


def candidates(row: Row, limits: Limits, picks: Picks) -> list[int]:
    """What may be picked next: whatever keeps a completion possible, neighbours the last and is not vetoed."""
    allowed = [i for i in range(row.size) if i not in picks and feasible(row, limits, {*picks, i})]
    if limits.first and (missing := limits.require - set(picks)):
        allowed = [i for i in allowed if i in missing]
    if limits.adjacent is not None and picks:
        allowed = [i for i in allowed if limits.adjacent[picks[-1]][i]]
    if limits.veto is not None:
        verdict = limits.veto(picks)[0]
        allowed = [i for i in allowed if verdict[i]]
    return allowed


def may_stop(row: Row, limits: Limits, picks: Picks) -> bool:
    if not candidates(row, limits, picks):
        return True
    enough = len(picks) >= limits.min_len and limits.require <= set(picks)
    return enough and (limits.veto is None or limits.veto(picks)[1])


def logsumexp(values: Iterable[float]) -> float:
    values = [v for v in values if v > -math.inf]
    if not values:
        return -math.inf
    top = max(values)
    return top + math.log(math.fsum(math.exp(v - top) for v in values))


def step_logits(row: Row, limits: Limits, picks: Picks) -> list[float]:
    """The N candidates and the stop; −inf where it may not be. When nothing else is left the stop is certain."""
    added, added_stop = row.effect(picks)
    allowed = set(candidates(row, limits, picks))
    logits = [row.theta[j] + added[j] if j in allowed else -math.inf for j in range(row.size)]
    stop = row.stop + limits.stop_bias + added_stop if may_stop(row, limits, picks) else -math.inf
    if all(x == -math.inf for x in [*logits, stop]):
        stop = 0.0
    return [*logits, stop]


def step_log_probs(row: Row, limits: Limits, picks: Picks) -> list[float]:
    logits = step_logits(row, limits, picks)
    top = max(logits)  # taken off first: 1e20 would swallow the logarithm
    norm = logsumexp(x - top for x in logits)
    return [x - top - norm for x in logits]


def log_prob(row: Row, order: Sequence[int], limits: Limits = FREE) -> float:
    """Of picking ``order`` and then stopping."""
    total = 0.0
    for t, choice in enumerate([*order, row.size]):
        step = step_log_probs(row, limits, tuple(order[:t]))[choice]
        if step == -math.inf:
            return -math.inf
        total += step
    return total


def everything(row: Row, limits: Limits = FREE) -> dict[Picks, float]:
    """Every sequence the process can produce, with its log-probability."""
    found: dict[Picks, float] = {}

    def grow(picks: Picks, so_far: float) -> None:
        log_probs = step_log_probs(row, limits, picks)
        for choice, step in enumerate(log_probs):
            if step == -math.inf:
                continue
            if choice == row.size:
                found[picks] = so_far + step
            else:
                grow((*picks, choice), so_far + step)

    grow((), 0.0)
    return found


def set_log_prob(row: Row, chosen: Iterable[int], limits: Limits = FREE) -> float:
    return logsumexp(log_prob(row, order, limits) for order in permutations(chosen))


def inclusion_probs(row: Row, limits: Limits = FREE) -> list[float]:
    support = everything(row, limits)
    return [math.fsum(math.exp(lp) for order, lp in support.items() if i in order) for i in range(row.size)]


def entropy(row: Row, limits: Limits = FREE) -> float:
    return math.fsum(-math.exp(lp) * lp for lp in everything(row, limits).values())


def top(row: Row, limits: Limits = FREE) -> list[tuple[Picks, float]]:
    """All sequences, likeliest first."""
    return sorted(everything(row, limits).items(), key=lambda item: -item[1])


def sharpened(probs: Sequence[float], temperature: float, top_k: int | None, top_p: float | None) -> list[float]:
    """A step's probabilities after temperature, then top-k, then top-p (ties go to the lower index)."""
    powered = [p ** (1 / temperature) if p > 0 else 0.0 for p in probs]
    probs = [p / sum(powered) for p in powered]
    ranking = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
    if top_k is not None:
        kept = set(ranking[:top_k])
        probs = [p if i in kept else 0.0 for i, p in enumerate(probs)]
        probs = [p / sum(probs) for p in probs]
    if top_p is not None:
        kept, held = set(), 0.0
        for i in ranking:
            if held >= top_p:
                break
            kept.add(i)
            held += probs[i]
        probs = [p if i in kept else 0.0 for i, p in enumerate(probs)]
        probs = [p / sum(probs) for p in probs]
    return list(probs)


def sharpened_law(
    row: Row, limits: Limits, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> dict[Picks, float]:
    """The probability of every sequence when each step is sharpened."""
    found: dict[Picks, float] = {}

    def grow(picks: Picks, so_far: float) -> None:
        probs = [math.exp(x) for x in step_log_probs(row, limits, picks)]
        for choice, p in enumerate(sharpened(probs, temperature, top_k, top_p)):
            if p > 0 and choice == row.size:
                found[picks] = so_far * p
            elif p > 0:
                grow((*picks, choice), so_far * p)

    grow((), 1.0)
    return found


def ordered_loss(row: Row, order: Sequence[int]) -> float:
    return -log_prob(row, order)


def context_loss(row: Row, target: set[int], context: Picks, early_stop_weight: float, stop_weight: float) -> float:
    """What one partial selection of the target contributes."""
    log_probs = step_log_probs(row, FREE, context)
    rest = target - set(context)
    if not rest:
        return -stop_weight * log_probs[-1]
    wanted = math.fsum(log_probs[j] for j in rest) / len(rest)
    return -wanted + early_stop_weight * math.exp(log_probs[-1])


def permutation_loss(
    row: Row, orders: Iterable[Sequence[int]], early_stop_weight: float = 5.0, stop_weight: float = 1.0
) -> float:
    """Every prefix of every one of ``orders``, averaged."""
    terms = [
        context_loss(row, set(order), tuple(order[:t]), early_stop_weight, stop_weight)
        for order in orders
        for t in range(len(order) + 1)
    ]
    return math.fsum(terms) / len(terms)


def uniform_subset_loss(
    row: Row, target: Iterable[int], early_stop_weight: float = 0.0, stop_weight: float = 1.0
) -> float:
    """All 2^T partial selections, averaged."""
    target = set(target)
    terms = [context_loss(row, target, context, early_stop_weight, stop_weight) for context in subsets(target)]
    return math.fsum(terms) / len(terms)


def drawn_without_replacement(probs: dict[Picks, float], count: int) -> dict[Picks, float]:
    """The probability that each sequence is among ``count`` successive draws, each from what is left."""
    included = dict.fromkeys(probs, 0.0)

    def draw(taken: tuple[Picks, ...], chance: float) -> None:
        if len(taken) == min(count, len(probs)):
            for sequence in taken:
                included[sequence] += chance
            return
        left = {s: p for s, p in probs.items() if s not in taken}
        mass = math.fsum(left.values())
        for sequence, p in left.items():
            draw((*taken, sequence), chance * p / mass)

    draw((), 1.0)
    return included

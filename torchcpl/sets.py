"""Sets: the probability of ending with one, in any order, and conditional probabilities given a part of it.

To condition on a part A means that the first |A| picks of the process were A, in some order. Where neither interaction
nor rules depend on the order of the picks, the state after A is the same for all orders; where they do, the orders of A
are marginalised, exactly while they are few, by sampling above.

Sets of the same size are computed together. A batch whose rows share their potentials (of one row, or expanded over the
batch) is computed as that many hypotheses of one row: nothing is copied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import permutations
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchcpl.checks import check_choice, check_count, check_generator, readable
from torchcpl.constraints import Budget, Constraint, History, Require, Rules
from torchcpl.decoding.beam import likeliest, search, selection
from torchcpl.decoding.sample import check_sharpening, draw
from torchcpl.functional import (
    blame_nan,
    check_sequences,
    logsumexp,
    longest,
    prefix_log_probs,
    reduced,
    sequence_log_probs,
    step_log_probs,
)
from torchcpl.interactions.base import Additive, State, accumulator
from torchcpl.losses import REDUCTIONS, shuffled, subsets_of
from torchcpl.potentials import Potentials, Selection, latest, picked_mask, picks_first

SUBSET_LIMIT = 15  # largest set whose probability is computed exactly by default: 2¹⁵ subsets
ORDER_LIMIT = 5  # largest part whose orders are enumerated, where the whole order matters
REST_LIMIT = 12  # most remaining candidates over whose subsets inclusion probabilities are summed exactly
POSTERIOR_SAMPLES = 1024  # orders of a given part that are sampled above these limits
CHUNK = 2**25  # most logits at a time
CACHED = 2**19  # the same for dynamic programming on the CPU, so that they fit into its cache


def set_nll(
    pot: Potentials,
    target: Tensor,
    *,
    exact: bool | int | None = None,
    num_samples: int = 64,
    proposal: str = "process",
    reduction: str = "mean",
    generator: torch.Generator | None = None,
) -> Tensor:
    """−log P(set) of the sets ``target`` (B, T), −1 padded: of ending with exactly these items, in any order.

    Exact up to 15 items, or as many as ``exact`` says, by dynamic programming over subsets: P(A) = Σ_{i∈A} P(A∖i)·P(i |
    A∖i), then the stop. Above, and everywhere with ``exact=False``, from ``num_samples`` orders σ of a proposal q:

        P̂ = mean_σ P(σ)/q(σ),     E P̂ = P,     E[−log P̂] ≥ −log P

    with q the ``process`` restricted to the set, or ``uniform``. The gradient is that of P̂ with the orders held fixed.
    ``exact=True`` raises where the value would be an estimate. A ``pot`` of one row is broadcast to all targets.
    ``reduction`` over the rows is ``mean | sum | none``.
    """
    check_choice("reduction", reduction, REDUCTIONS)
    check_choice("proposal", proposal, ("process", "uniform"))
    check_count("num_samples", num_samples, 1)
    check_sequences("target", target, pot, picks_real=True, broadcast=True)
    check_generator(generator, target.device)
    limit = _exact_limit(pot) if exact is not False else -1
    if exact is not None and not isinstance(exact, bool):
        check_count("exact", exact, 0)
        limit = min(exact, limit)
    size = longest(target)
    if exact is True and size > limit:
        raise ValueError(f"exact: expected None or False for sets of more than {limit} items, got True for {size}")
    value, _ = _log_probs(pot, target, Rules(pot), limit, num_samples, proposal, generator)
    return reduced(-value, reduction)


def set_log_prob(
    pot: Potentials,
    subset: Tensor,
    *,
    max_len: int | None = None,
    min_len: int = 0,
    stop_bias: float | Tensor = 0.0,
    constraints: Sequence[Constraint] = (),
    num_samples: int | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability (B,) of ending with exactly ``subset`` (B, T), in any order, and its standard error (B,).

    Exact up to 15 items as in :func:`set_nll`; the error is zero. Above that, for an interaction that depends on the
    whole order of the picks, or when ``num_samples`` is given, estimated from orders sampled by the process restricted
    to the subset (1,024 by default).
    """
    check_sequences("subset", subset, pot, broadcast=True)
    check_generator(generator, subset.device)
    rules = Rules(pot, max_len, min_len, stop_bias, constraints)
    return set_log_probs(pot, subset, rules, num_samples, generator)


def set_log_probs(
    pot: Potentials, subset: Tensor, rules: Rules, num_samples: int | None, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """``set_log_prob`` under ``rules``."""
    check_count("num_samples", num_samples, 2, optional=True)
    limit = _exact_limit(pot) if num_samples is None else -1
    return _log_probs(pot, subset, rules, limit, num_samples or 1024, "process", generator)


def _log_probs(
    pot: Potentials,
    sets: Tensor,
    rules: Rules,
    limit: int,
    num_samples: int,
    proposal: str,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor]:
    """(B,) log P of the sets, exact up to ``limit`` items, and the standard errors."""
    values, errors = [], []
    buckets = _buckets(pot, sets, rules, limit)
    for bucket in buckets:
        size = bucket.items.shape[1]
        if size <= limit:
            values.append(_exact(bucket))
            errors.append(torch.zeros_like(values[-1]))
            continue
        for piece in bucket.pieces(num_samples * (size + 1)):
            value, error = _sampled(piece, num_samples, proposal, generator)
            values.append(value)
            errors.append(error)
    return blame_nan(_in_order(values, buckets), pot), _in_order(errors, buckets)


def _exact_limit(pot: Potentials) -> int:
    """The largest set for dynamic programming over subsets, which needs states that do not depend on the order."""
    return 1 if pot.interaction.depends_on == "order" else SUBSET_LIMIT


def next_probs(
    pot: Potentials,
    picked: Tensor,
    *,
    max_len: int | None = None,
    min_len: int = 0,
    stop_bias: float | Tensor = 0.0,
    constraints: Sequence[Constraint] = (),
    num_samples: int = POSTERIOR_SAMPLES,
    generator: torch.Generator | None = None,
) -> Tensor:
    """(B, N+1) the distribution of the next choice, the stop last, given the part ``picked`` (B, m), −1 padded.

    Exact, unless interaction or rules depend on the order of the picks and the part is too large to sum over its
    orders: above 5 items where the whole order matters, 15 where only the latest does. Then ``num_samples`` orders are
    sampled.
    """
    check_count("num_samples", num_samples, 1)
    check_sequences("picked", picked, pot, broadcast=True)
    check_generator(generator, picked.device)
    rules = Rules(pot, max_len, min_len, stop_bias, constraints)
    values = []
    buckets = _buckets(pot, picked, rules)
    for bucket in buckets:
        orders, log_weight = _posterior(bucket, num_samples, generator)  # (M, P, m), (M, P)
        state = bucket.pot.interaction.after(bucket.flat(orders))
        log_probs = bucket.log_probs(state, orders, latest(orders)[..., -1])  # (M, P, N+1)
        values.append((log_weight.unsqueeze(-1) + log_probs).exp().sum(1))
    return blame_nan(_in_order(values, buckets), pot)


@torch.no_grad()
def complete(
    pot: Potentials,
    picked: Tensor,
    max_len: int | None = None,
    *,
    num_samples: int | None = None,
    num_beams: int | None = None,
    num_return: int = 1,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_len: int = 0,
    stop_bias: float | Tensor = 0.0,
    constraints: Sequence[Constraint] = (),
    generator: torch.Generator | None = None,
) -> Selection:
    """Continue from the set ``picked`` (B, m), −1 padded.

    Greedily, ``indices`` (B, T); with ``num_samples`` by sampling, (S, B, T); with ``num_beams`` by beam search,
    (B, R, T), best first. A row holds the given items first and then those added; ``max_len`` and ``min_len`` count
    both. ``log_prob`` is that of the added ones. Where the order of the picks matters, or which was the latest, every
    sample draws just that for the given items from its posterior; greedy and beam search go on from the likeliest.
    """
    _check_manner(num_samples, num_beams, num_return, temperature, top_k, top_p)
    width = num_beams or 1  # a beam of one is greedy
    check_sequences("picked", picked, pot, picks_real=True, broadcast=True)
    check_generator(generator, picked.device)
    if len(pot) != len(picked):
        pot = pot[torch.zeros(len(picked), dtype=torch.long, device=picked.device)]
    rules = Rules(pot, max_len, min_len, stop_bias, constraints)
    if readable() and (most := longest(picked)) > rules.max_len:
        raise ValueError(f"max_len: expected at least {most}, the number of given items, got {rules.max_len}")
    if room := [rule for rule in constraints if isinstance(rule, Budget | Require)]:  # raises if the part leaves none
        Rules(pot, max_len, min_len, constraints=[*room, Require(picked_mask(picked, pot.num_candidates))])
    buckets = _buckets(pot, picked, rules, fold=False)
    found = []
    for part in buckets:
        orders, log_weight = _posterior(part, POSTERIOR_SAMPLES, generator)
        weight = log_weight.exp()
        chosen = weight.multinomial(num_samples, True, generator=generator) if num_samples else weight.argmax(-1, True)
        given = orders.gather(1, chosen.unsqueeze(-1).expand(-1, -1, orders.shape[2]))  # (M, 1 or S, m)
        onward = part.rules.after(given)
        if num_samples:
            drawn = draw(part.pot, onward, num_samples, temperature, top_k, top_p, generator)
            added = drawn.map(lambda x: x.transpose(0, 1))  # (M, S, T)
        else:
            added = selection(search(part.pot, onward, width, likeliest(width)), num_return, part.pot)  # (M, R, T)
        assert added.step_log_prob is not None
        indices = torch.cat([given.expand(*added.lengths.shape, -1), added.indices], -1)
        gains = pad(added.step_log_prob, (given.shape[2], 0))
        place = picks_first(indices)[..., : rules.max_len]
        found.append((indices.gather(-1, place), gains.gather(-1, place), added.log_prob))
    each = [_in_order(list(parts), buckets) for parts in zip(*found, strict=True)]
    indices, gains, log_prob = (x.transpose(0, 1) if num_samples else x if num_beams else x[:, 0] for x in each)
    return Selection(indices, (indices >= 0).sum(-1), log_prob, pot.num_candidates, step_log_prob=gains)


def _check_manner(
    num_samples: int | None,
    num_beams: int | None,
    num_return: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
) -> None:
    """Check how ``complete`` is to go on: greedily, by samples or by beams, and what only samples have."""
    check_count("num_return", num_return, 1)
    check_count("num_samples", num_samples, 1, optional=True)
    check_count("num_beams", num_beams, 1, optional=True)
    if num_samples is not None and num_beams is not None:
        raise ValueError(f"num_beams: expected None together with num_samples, got {num_beams}")
    if num_return > (num_beams or 1):
        raise ValueError(f"num_return: expected at most num_beams = {num_beams or 1}, got {num_return}")
    check_sharpening(temperature, top_k, top_p)
    for name, given, unset in (("temperature", temperature, 1), ("top_k", top_k, None), ("top_p", top_p, None)):
        if num_samples is None and given != unset:
            raise ValueError(f"{name}: expected {unset} without num_samples, got {given}")


def inclusion_probs(
    pot: Potentials,
    picked: Tensor,
    *,
    max_len: int | None = None,
    min_len: int = 0,
    stop_bias: float | Tensor = 0.0,
    constraints: Sequence[Constraint] = (),
    num_samples: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """(B, N) the probability of each candidate to be in the final set, given the part ``picked`` (B, m), −1 padded.

    Exact, by summing over all sets, while at most 12 candidates are left and the order of the picks does not matter;
    else estimated from ``num_samples`` completions, 4,096 by default.
    """
    check_count("num_samples", num_samples, 1, optional=True)
    check_sequences("picked", picked, pot, broadcast=True)
    check_generator(generator, picked.device)
    rules = Rules(pot, max_len, min_len, stop_bias, constraints)
    left = pot.num_candidates - (int((picked >= 0).sum(-1).min()) if picked.numel() and readable() else 0)
    if num_samples is not None or left > REST_LIMIT or order_matters(pot, rules):
        options: dict[str, Any] = {"min_len": min_len, "stop_bias": stop_bias, "constraints": constraints}
        drawn = complete(pot, picked, max_len, num_samples=num_samples or 4096, generator=generator, **options)
        return drawn.mask().to(drawn.log_prob.dtype).mean(0)
    values = []
    buckets = _buckets(pot, picked, rules)
    for part in buckets:
        inside = picked_mask(part.items, pot.num_candidates)  # (M, N)
        # Where rows differ in how many are left, some of these are in the part: that one is picked again is impossible.
        most = inside.shape[1] - part.items.shape[1] if readable() else left
        rest = inside.to(torch.int8).argsort(dim=-1, stable=True)[:, :most]
        ended = inside.to(accumulator(pot.unary.dtype))
        for members, reach, stop in _forward(replace(part, items=rest, given=part.items)):
            mass = (reach + stop).exp().expand(-1, -1, members.shape[1])  # (M, A, size)
            where = rest[:, members].flatten(1)  # (M, A·size)
            ended = ended.scatter_add(1, where, mass.flatten(1).to(ended.dtype))
        values.append(ended)
    return blame_nan(_in_order(values, buckets), pot)


# ------------------------------------------------------------------------------------------- sets of one size


@dataclass(frozen=True)
class Bucket:
    """Rows of a batch of sets. ``pot`` and ``rules`` have these M rows, or one that is broadcast."""

    pot: Potentials
    rules: Rules
    rows: Tensor  # (M,)
    items: Tensor  # (M, k), of one size where they are summed over exactly and values may be read, else −1 padded
    given: Tensor  # (M, m), picked before

    def take(self, rows: Tensor) -> Bucket:
        """Some of the rows."""
        mine = (self.pot, self.rules) if len(self.pot) == 1 else (self.pot[rows], self.rules.rows(rows))
        return Bucket(*mine, self.rows[rows], self.items[rows], self.given[rows])

    def pieces(self, width: int, chunk: int = CHUNK) -> list[Bucket]:
        """Parts of at most ``chunk`` logits, with ``width`` hypotheses a set."""
        most = max(1, chunk // (width * (self.pot.num_candidates + 1)))
        if len(self.items) <= most or not readable():
            return [self]
        return [self.take(rows) for rows in torch.arange(len(self.items), device=self.items.device).split(most)]

    def flat(self, hypotheses: Tensor) -> Tensor:
        """(M, K, ·) → (B, K', ·) with the B of the potentials: (1, M·K, ·) where they are of one row."""
        rows, width, *rest = hypotheses.shape
        return hypotheses.reshape(1, rows * width, *rest) if len(self.pot) == 1 else hypotheses

    def log_probs(self, state: State, picks: Tensor, last: Tensor) -> Tensor:
        """(M, K, N+1) log-probabilities of the next choice after ``picks`` (M, K, t) and their ``state``."""
        flat = self.flat(picks)
        history = History(picked_mask(flat, self.pot.num_candidates), self.flat(last), (flat >= 0).sum(-1))
        return step_log_probs(self.pot, state, history, self.rules).view(*last.shape, self.pot.num_candidates + 1)

    def log_probs_of(self, choices: Tensor, state: State, picks: Tensor, last: Tensor) -> Tensor:
        """Those (M, K, C) of ``choices`` (M, 1 or K, C) alone, −inf where −1 or picked.

        Without special rules only the logits of the picks are masked, in place, and not those of all candidates.
        """
        pot, rules, n = self.pot, self.rules, self.pot.num_candidates
        free = rules.plain and not rules.min_len and (rules.max_len == n or picks.shape[2] < rules.max_len)
        if not free or not readable():
            found = self.log_probs(state, picks, last)
            return found.gather(2, choices.clamp(min=0).expand(*last.shape, -1)).masked_fill(choices < 0, -torch.inf)
        logits, added_stop = pot.interaction.logits(state)
        dtype = accumulator(torch.promote_types(logits.dtype, pot.unary.dtype))
        stop = rules.biased(pot.stop.to(dtype)).to(dtype).unsqueeze(-1).expand(logits.shape[:2])
        stop = (stop if added_stop is None else stop + added_stop.to(dtype)).unsqueeze(-1)
        unary = pot.unary.to(dtype).masked_fill(~rules.available, -torch.inf).unsqueeze(1)
        # One more column, −inf, for what is −1.
        logits = torch.cat([logits.to(dtype), stop, stop], -1)
        logits += pad(pad(unary, (0, 1)), (0, 1), value=-torch.inf)
        with torch.no_grad():  # no gradient reaches what is −inf
            logits.scatter_(2, self.flat(picks.where(picks >= 0, n + 1)), -torch.inf)
            if bool((stop == -torch.inf).any()):  # with nothing left to pick the stop is certain
                logits[..., n].masked_fill_(logits.amax(-1) == -torch.inf, 0)
        columns = choices.where(choices >= 0, n + 1).expand(*last.shape, -1)
        return logits.log_softmax(-1).view(*last.shape, n + 2).gather(2, columns)


def _buckets(pot: Potentials, sets: Tensor, rules: Rules, limit: int | None = None, fold: bool = True) -> list[Bucket]:
    """The sets (B, T) by size; those of more than ``limit`` items, padded, by the power of two below it.

    One empty bucket if there are no sets, one padded bucket where values may not be read.
    """
    every = torch.arange(len(sets), device=sets.device)
    if not readable():
        return [Bucket(pot, rules, every, sets, sets[:, :0])]
    if fold and len(pot) > 1 and _shared(pot, rules):
        pot, rules = pot[:1], rules.rows(every[:1])
    sizes = (sets >= 0).sum(-1)
    kinds = sizes if limit is None else sizes.where(sizes <= limit, -1 - sizes.clamp(min=1).log2().long())
    found = []
    for kind in kinds.unique().tolist() or [0]:
        rows = (kinds == kind).nonzero().squeeze(-1)
        width = kind if kind >= 0 else int(sizes[rows].max())
        whole = Bucket(pot, rules, every, sets[:, :width], sets[:, :0])
        found.append(whole if len(rows) == len(sets) else whole.take(rows))
    return found


def _shared(pot: Potentials, rules: Rules) -> bool:
    """Whether all rows are views of one row, and the rules are the same for all."""
    alike = rules.plain and not isinstance(rules.stop_bias, Tensor) and rules.available is pot.mask
    parts = [pot.unary, pot.stop, *pot.interaction.tensors.values()]
    alike = alike and all(part.stride(0) == 0 for part in parts)
    return alike and (pot.mask.stride(0) == 0 or bool(pot.mask.all()))


def _in_order(values: list[Tensor], buckets: list[Bucket]) -> Tensor:
    """The results of the buckets, in the order of the batch."""
    if len(values) == 1:
        return values[0]
    return torch.cat(values)[torch.cat([part.rows for part in buckets]).argsort()]


def order_matters(pot: Potentials, rules: Rules) -> bool:
    """Whether probabilities after some picks depend on their order, if only on the latest."""
    return rules.ordered or pot.interaction.depends_on != "set"


def _exact(part: Bucket) -> Tensor:
    """(M,) log P of each set, by dynamic programming."""
    return _whole(part, [logsumexp(reach[:, 0] + stop[:, 0]) for _, reach, stop in _forward(part)])


def _whole(part: Bucket, values: list[Tensor]) -> Tensor:
    """For each row (M, ...) that of the ``values`` of the first subset of every size which belongs to all its items."""
    # The first subset of a size consists of the first items, so that of a padded row is the one of its size.
    if readable():
        return values[-1]
    size = (part.items >= 0).sum(-1).view(1, -1, *[1] * (values[0].dim() - 1))
    return torch.stack(values).gather(0, size.expand(1, *values[0].shape)).squeeze(0)


def _forward(part: Bucket) -> list[tuple[Tensor, Tensor, Tensor]]:
    """The forward algorithm over subsets: those of each size (A, size), log P (M, A, L) of reaching and of stopping.

    Where rules or interaction depend on the latest pick it is part of the state, one of L = size; else L = 1.
    """
    rows, count = part.items.shape
    lattice = _lattice(count, order_matters(part.pot, part.rules), part.items.device)
    pieces = part.pieces(len(lattice.picks), CHUNK if part.items.is_cuda else CACHED)
    step = torch.cat([_item_log_probs(piece, lattice) for piece in pieces])  # (M, K, k+1)
    parts = step.flatten(1).index_select(1, lattice.steps).split(lattice.counts, 1)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    reach = step.new_zeros(rows, 1)
    for members, before, arrive, stop in zip(lattice.members, lattice.before, parts[::2], parts[1::2], strict=True):
        if members.shape[1]:
            ways = reach.index_select(1, before) + arrive
            reach = logsumexp(ways.view(rows, stop.shape[1], ways.shape[1] // stop.shape[1]))  # (M, A·L)
        shape = (rows, len(members), stop.shape[1] // len(members))
        found.append((members, reach.view(shape), stop.view(shape)))
    return found


def _item_log_probs(part: Bucket, lattice: Lattice) -> Tensor:
    """(M, K, k+1) log-probabilities of each of the items, and of the stop, after each of the K states."""
    items, (rows, count) = part.items, part.items.shape
    picks = pad(items, (0, 1), value=-1).index_select(1, lattice.picks.flatten()).view(rows, *lattice.picks.shape)
    last = picks[..., -1] if lattice.latest and count else items.new_full(picks.shape[:2], -1)
    picks = torch.cat([part.given.unsqueeze(1).expand(-1, picks.shape[1], -1), picks], -1)
    interaction = part.pot.interaction
    if lattice.latest or not isinstance(interaction, Additive):
        state = interaction.after(part.flat(picks))
    else:  # the sums over all subsets, by doubling: with every item i, those of A and of A ∪ i
        given, each = part.flat(part.given.unsqueeze(1)), part.flat(items.unsqueeze(1))
        sums = []
        for total, steps in zip(interaction.after(given), interaction.steps(each), strict=True):
            total = total.unsqueeze(2)  # (B, M', 1, ·)
            for i in range(count):
                total = torch.cat([total, total + steps[:, :, i : i + 1]], 2)
            sums.append(total.flatten(1, 2))
        state = tuple(sums)
    choices = pad(items, (0, 1), value=part.pot.num_candidates).unsqueeze(1)  # (M, 1, k+1), the stop last
    return part.log_probs_of(choices, state, picks, last)


@dataclass(frozen=True)
class Lattice:
    """The K states of a process that picks k items: subsets as bit masks, or subset and ``latest`` pick, by size.

    ``picks`` (K, k) holds the indices of their items, a latest one last, padded with k. For each size there are the
    subsets A, as ``members`` (A, size), and the positions ``before`` (A·size·L,) of A∖i among the states one smaller.
    ``steps`` are the entries of the log-probabilities (K, k+1) that lead to each size and that end there, ``counts``
    how many.
    """

    latest: bool
    picks: Tensor
    members: list[Tensor]
    before: list[Tensor]
    steps: Tensor
    counts: list[int]


@cache
def _lattice(items: int, latest: bool, device: torch.device) -> Lattice:
    inside = subsets_of(items)
    place = torch.zeros(len(inside), dtype=torch.long)
    picks = [torch.arange(items).where(inside, items)] if not latest else []
    subsets, before, steps = [], [], []
    states = torch.zeros(1, 0, dtype=torch.long)
    for size in range(items + 1):
        here = (inside.sum(-1) == size).nonzero().squeeze(-1)  # (A,)
        members = inside[here].nonzero()[:, 1].view(len(here), size)
        among = place[here.unsqueeze(-1) - (1 << members)]  # (A, size)
        position = torch.arange(states.numel()).view(states.shape)[among]  # (A, size, L)
        arrive = states[among] * (items + 1) + members.unsqueeze(-1)
        place[here] = torch.arange(len(here))
        states = here.unsqueeze(-1)  # (A, L)
        if latest:
            # A copy with each member last.
            turns = (torch.arange(size) + torch.arange(1, size + 1).unsqueeze(-1)) % max(size, 1)  # (size, size)
            ordered = members[:, turns].flatten(0, 1) if size else members
            states = (torch.arange(len(ordered)) + sum(map(len, picks))).view(len(here), -1)
            picks.append(pad(ordered, (items - size, 0), value=items))
        subsets.append(members.to(device))
        before.append(position.flatten().to(device))
        steps += [arrive.flatten(), states.flatten() * (items + 1) + items]
    every, ways = torch.cat(picks).to(device), torch.cat(steps).to(device)
    return Lattice(latest, every, subsets, before, ways, [len(s) for s in steps])


# ------------------------------------------------------------------------------------------- orders of a set


def _sampled(part: Bucket, samples: int, proposal: str, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """(M,) log P̂ from orders of each set, and its standard error."""
    orders, log_q = _draw_orders(part, samples, proposal, generator)
    log_weight = sequence_log_probs(part.pot, part.flat(orders), part.rules).view(log_q.shape) - log_q
    log_mean = logsumexp(log_weight) - math.log(samples)
    # The standard error of log P̂, from that of P̂ by the delta method.
    relative = (log_weight - log_mean.unsqueeze(-1)).exp().detach()
    error = ((relative - 1).square().sum(-1) / (samples * max(samples - 1, 1))).sqrt()
    return log_mean, error.nan_to_num(0.0)


@torch.no_grad()
def _draw_orders(part: Bucket, samples: int, proposal: str, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Orders (M, S, k) of the items and their log-probability (M, S) under the proposal."""
    items, (rows, count) = part.items, part.items.shape
    log_q = part.pot.stop.new_zeros(rows, samples, dtype=accumulator(part.pot.stop.dtype))
    slots = items.unsqueeze(1).expand(-1, samples, -1)  # (M, S, k)
    if proposal == "uniform":
        return shuffled(items, samples, generator), log_q - torch.lgamma((slots >= 0).sum(-1) + 1.0)
    state = part.pot.interaction.start(part.flat(log_q).shape[1])
    orders = torch.full_like(slots, -1)
    taken = slots < 0
    for t in range(count):
        last = orders[..., t - 1] if t else items.new_full(log_q.shape, -1)
        onward = part.log_probs_of(slots, state, orders, last).masked_fill(taken, -torch.inf)  # (M, S, k)
        dead = (onward == -torch.inf).all(-1, keepdim=True)  # impossible or complete: the order is arbitrary
        confined = torch.where(dead & (~taken | taken.all(-1, keepdim=True)), 0.0, onward).log_softmax(-1)
        noise = torch.empty_like(confined).exponential_(generator=generator)
        choice = (confined - noise.log()).argmax(-1, keepdim=True)
        log_q = log_q + confined.gather(2, choice).squeeze(-1).masked_fill(taken.all(-1), 0)
        orders[..., t] = slots.gather(2, choice).squeeze(-1).masked_fill(taken.all(-1), -1)
        taken = taken.scatter(2, choice, True)
        state = part.pot.interaction.advance(state, part.flat(orders[..., t]))
    return orders, log_q


def _posterior(part: Bucket, samples: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Orders (M, P, k) of the items and the log-probability (M, P) of each given the set.

    One order where it does not matter, one for each latest item where only that does.
    """
    items, count = part.items, part.items.shape[1]
    weight = part.pot.stop.new_zeros(len(items), 1, dtype=accumulator(part.pot.stop.dtype))
    if count < 2 or not order_matters(part.pot, part.rules):
        return items.unsqueeze(1), weight
    whole = part.pot.interaction.depends_on == "order"
    if not whole and count <= SUBSET_LIMIT:
        orders = items[:, _lattice(count, True, items.device).picks[-count:]]  # (M, k, k)
        reached = [reach[:, 0] for _, reach, _ in _forward(part)]  # (M, size), with each item the latest
        weight = _whole(part, [pad(reach, (0, count - reach.shape[1]), value=-torch.inf) for reach in reached])
    else:
        log_q: Tensor | float = 0.0
        if count <= ORDER_LIMIT:
            orders = items[:, torch.tensor(list(permutations(range(count))), device=items.device)]
            orders = orders.gather(-1, picks_first(orders))
        else:
            orders, log_q = _draw_orders(part, samples, "process", generator)
        picks, _ = prefix_log_probs(part.pot, part.flat(orders), part.rules)
        weight = picks.sum(-1).view(orders.shape[:2]) - log_q
    dead = (weight == -torch.inf).all(-1, keepdim=True)
    return orders, weight.masked_fill(dead, 0).log_softmax(-1)

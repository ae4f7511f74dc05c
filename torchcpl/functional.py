"""The specification in plain torch: log-probabilities of a step, of a sequence, of a set.

After the picks S the process chooses among what is left and the stop:

    ℓ_j(S) = θ_j + Σ_{i∈S} W[j, i],      P(j | S) = exp ℓ_j(S) / Σ_{k∉S} exp ℓ_k(S)

where k runs over the candidates not in S that the rules allow, and the stop. A sequence's probability is the
product of its choices, the stop included; once ``max_len`` is reached the stop is certain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torchcpl.checks import check_count, check_generator, check_order, check_tensor, readable, validating
from torchcpl.constraints import Constraint, History, Rules
from torchcpl.interactions.base import State, accumulator
from torchcpl.potentials import Potentials, check_potentials, picked_mask

SUBSET_LIMIT = 15  # largest set whose probability is computed exactly by default: 2¹⁵ subsets


def step_logits(pot: Potentials, state: State, history: History, rules: Rules) -> Tensor:
    """(B, K, N+1) logits of the next choice, the stop last, −inf where the rules forbid it."""
    added, added_stop = pot.interaction.logits(state)
    dtype = accumulator(torch.promote_types(added.dtype, pot.unary.dtype))
    allowed, stop_allowed = rules.allowed(history)
    candidates = (pot.unary.to(dtype).unsqueeze(1) + added).masked_fill(~allowed, -torch.inf)
    stop = rules.biased(pot.stop.to(dtype)).to(dtype).unsqueeze(-1).expand(candidates.shape[:2])
    if added_stop is not None:
        stop = stop + added_stop.to(dtype)
    if stop_allowed is not None:
        stop = stop.masked_fill(~stop_allowed, -torch.inf)
    # With nothing left to pick the stop is certain, even one whose own logit is −inf.
    stuck = stop.detach() == -torch.inf
    if candidates.shape[-1]:
        stuck = stuck & (candidates.detach().amax(-1) == -torch.inf)
    return torch.cat([candidates, stop.masked_fill(stuck, 0).unsqueeze(-1)], -1)


def step_log_probs(pot: Potentials, state: State, history: History, rules: Rules) -> Tensor:
    """(B, K, N+1) log-probabilities of the next choice, the stop last."""
    return step_logits(pot, state, history, rules).log_softmax(-1)


def prefix_history(order: Tensor, num_candidates: int) -> History:
    """The histories of all T+1 prefixes of ``order`` (B, P, T), as K = P·(T+1) hypotheses."""
    batch, width, steps = order.shape
    # rank[n]: the step at which n is picked, steps if never; n is in prefix t iff rank[n] < t.
    rank = order.new_full((batch, width, num_candidates + 1), steps)
    positions = torch.arange(steps, device=order.device).expand(order.shape)
    rank.scatter_(2, order.where(order >= 0, num_candidates), positions)
    prefix = torch.arange(steps + 1, device=order.device)
    selected = rank[..., :num_candidates].unsqueeze(2) < prefix.view(-1, 1)  # (B, P, T+1, N)
    last = torch.nn.functional.pad(order, (1, 0), value=-1)  # (B, P, T+1)
    count = torch.minimum(prefix, (order >= 0).sum(-1, keepdim=True))
    return History(selected.flatten(1, 2), last.flatten(1, 2), count.flatten(1, 2))


def prefix_logits(pot: Potentials, order: Tensor, rules: Rules) -> Tensor:
    """(B, P, T+1, N+1) logits after every prefix of ``order`` (B, P, T), all at once (teacher forcing)."""
    history = prefix_history(order, pot.num_candidates)
    logits = step_logits(pot, pot.interaction.prefixes(order), history, rules)
    return logits.view(pot.unary.shape[0], order.shape[1], order.shape[2] + 1, pot.num_candidates + 1)


def prefix_log_probs(pot: Potentials, order: Tensor, rules: Rules, remaining: bool = False) -> tuple[Tensor, Tensor]:
    """After each prefix of ``order`` (B, P, T), log P of the next pick and of the stop, two (B, P, T+1).

    With ``remaining`` it is not the next pick but the sum over all that are still to come. Zero where none is.
    """
    log_probs = prefix_logits(pot, order, rules).log_softmax(-1)  # (B, P, T+1, N+1)
    steps = order.shape[2]
    if remaining:
        place = torch.arange(steps, device=order.device)
        passed = place < torch.arange(steps + 1, device=order.device).unsqueeze(-1)  # (T+1, T)
        picks = order.unsqueeze(2).masked_fill(passed, -1)  # (B, P, T+1, T)
    else:
        picks = torch.nn.functional.pad(order, (0, 1), value=-1).unsqueeze(-1)  # (B, P, T+1, 1)
    # What was picked stands at −inf: masked before summing, so that no 0·inf reaches the gradient.
    return log_probs.gather(-1, picks.clamp(min=0)).masked_fill(picks < 0, 0).sum(-1), log_probs[..., -1]


def sequence_log_probs(pot: Potentials, order: Tensor, rules: Rules) -> Tensor:
    """(B, P) log-probabilities of the sequences ``order`` (B, P, T)."""
    picks, stop = prefix_log_probs(pot, order, rules)  # (B, P, T+1) each
    length = (order >= 0).sum(-1, keepdim=True)
    return picks.sum(-1) + stop.gather(-1, length).squeeze(-1)


def log_prob(
    pot: Potentials,
    order: Tensor,
    *,
    max_len: int | None = None,
    min_len: int = 0,
    stop_bias: float | Tensor = 0.0,
    constraints: Sequence[Constraint] = (),
) -> Tensor:
    """Exact log-probability (B,) of picking ``order`` (B, T), in that order, and then stopping.

    The options describe the process as a decoder's do, so ``log_prob(pot, sel.indices, **options)`` is the
    ``sel.log_prob`` of the decoder that was given the same options. Sequences the process cannot produce have −inf.
    """
    rules = Rules(pot, max_len, min_len, stop_bias, constraints)
    check_sequences("order", order, pot)
    return blame_nan(sequence_log_probs(pot, order.unsqueeze(1), rules).squeeze(1), pot)


def check_sequences(name: str, order: Tensor, pot: Potentials, picks_real: bool = False) -> None:
    """Check (B, T) sequences, their values too where that is on."""
    check_potentials(pot)
    check_tensor(name, order, (pot.unary.shape[0], "T"), "long", like=pot.unary)
    if validating(order):
        check_order(name, order, pot.num_candidates, pot.mask if picks_real else None)


def trimmed(order: Tensor) -> Tensor:
    """``order`` (B, T) without the columns that are padding in all rows, where values may be read."""
    if order.numel() == 0 or not readable():
        return order
    return order[:, : int((order >= 0).sum(-1).max())]


def reduced(loss: Tensor, reduction: str) -> Tensor:
    """The losses (B,) of the rows as they are (``none``), their ``sum`` or ``mean``, which is 0 for no rows."""
    if reduction == "none":
        return loss
    return loss.mean() if reduction == "mean" and len(loss) else loss.sum()


def blame_nan(result: Tensor, pot: Potentials) -> Tensor:
    """``result``; if it holds a NaN and values are checked, raise naming the potential that it comes from."""
    if validating(result) and bool(result.isnan().any()):
        pot.check()
        raise ValueError(f"pot: expected logits that {result.dtype} can hold, got NaN from sums that overflow")
    return result


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

    Exact up to 15 items, by dynamic programming over subsets: P(A) = Σ_{i∈A} P(A∖i)·P(i | A∖i), then the stop; the
    error is zero. Above that, for an interaction that depends on the whole order of the picks, or when ``num_samples``
    is given, importance sampling: draw an order of the subset by the process confined to it; the probability mass it
    is confined to at each step multiplies to an unbiased estimate of the probability.
    """
    check_sequences("subset", subset, pot)
    check_generator(generator, pot.unary.device)
    rules = Rules(pot, max_len, min_len, stop_bias, constraints)
    return set_log_probs(pot, subset, rules, num_samples, generator)


def set_log_probs(
    pot: Potentials, subset: Tensor, rules: Rules, num_samples: int | None, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """``set_log_prob`` under given rules."""
    subset = trimmed(subset)  # every column doubles the work
    most = subset.shape[1]
    if num_samples is None and (most > SUBSET_LIMIT or (most > 1 and pot.interaction.depends_on == "order")):
        num_samples = 1024
    if num_samples is None:
        exact = blame_nan(_set_log_prob_exact(pot, subset, rules), pot)
        return exact, torch.zeros_like(exact)
    check_count("num_samples", num_samples, 2)
    estimate, error = _set_log_prob_sampled(pot, subset, rules, num_samples, generator)
    return blame_nan(estimate, pot), error


def _set_log_prob_exact(pot: Potentials, subset: Tensor, rules: Rules) -> Tensor:
    """Size by size, the probability of passing through each sub-subset A.

    Where rules or interaction look at the latest pick it is part of the state, then (A, last) with L = |A| lasts.
    """
    items = subset.shape[1]
    ordered = rules.ordered or pot.interaction.depends_on == "last"
    codes = torch.arange(2**items, device=subset.device)
    inside = (codes.unsqueeze(-1) >> torch.arange(items, device=subset.device)) & 1 == 1  # (2^T, T)
    place = torch.zeros_like(codes)  # where a code stands among those of its size
    reach = step = subset.new_zeros(0)
    ended = []
    for size in range(items + 1):
        here = (inside.sum(-1) == size).nonzero().squeeze(-1)  # (A,)
        place[here] = torch.arange(len(here), device=subset.device)
        present = inside[here].nonzero()[:, 1].view(len(here), size)  # (A, size) the items of A
        lasts = subset[:, present] if ordered and size else subset.new_full((len(subset), len(here), 1), -1)
        if size:
            before = place[here.unsqueeze(-1) - (1 << present)]  # (A, size) A without each of them
            through = (reach.unsqueeze(-1) + step).transpose(2, 3)  # (B, ·, T+1, L)
            arrive = through[:, before, present]  # (B, A, size, L)
            reach = logsumexp(arrive if ordered else arrive.flatten(2).unsqueeze(2))  # (B, A, L)
        step = _item_log_probs(pot, subset, inside[here], lasts, rules)  # (B, A, L, T+1)
        reach = reach if size else torch.zeros_like(step[..., 0])
        # A row of this many items has picked them all in its first A, and stops.
        ended.append(logsumexp(reach[:, 0] + step[:, 0, :, -1]))
    return torch.stack(ended, -1).gather(1, (subset >= 0).sum(-1, keepdim=True)).squeeze(-1)


def _item_log_probs(pot: Potentials, subset: Tensor, inside: Tensor, lasts: Tensor, rules: Rules) -> Tensor:
    """(B, A, L, T+1) log-probability of every item of ``subset``, and of the stop, after every A and its ``lasts``."""
    width, n = lasts.shape[2], pot.num_candidates
    choices = torch.nn.functional.pad(subset.where(subset >= 0, n), (0, 1), value=n)  # (B, T+1)
    chunk = max(1, 2**24 // (max(len(pot), 1) * width * (n + 1)))  # N may be large
    parts = []
    for block, last in zip(inside.split(chunk), lasts.split(chunk, 1), strict=True):
        picks = subset.unsqueeze(1).masked_fill(~block, -1).repeat_interleave(width, 1)  # (B, A·L, T)
        latest = last.flatten(1)  # (B, A·L)
        history = History(picked_mask(picks, n), latest, (picks >= 0).sum(-1))
        if pot.interaction.depends_on == "last":  # which then comes last
            picks = torch.cat([picks.masked_fill(picks == latest.unsqueeze(-1), -1), latest.unsqueeze(-1)], -1)
        log_probs = step_log_probs(pot, pot.interaction.after(picks), history, rules)  # (B, A·L, N+1)
        parts.append(log_probs.gather(2, choices.unsqueeze(1).expand(-1, picks.shape[1], -1)))
    step = torch.cat(parts, 1).view(*lasts.shape, choices.shape[1])
    padding = torch.nn.functional.pad(subset < 0, (0, 1))
    return step.masked_fill(padding[:, None, None], -torch.inf)


def logsumexp(values: Tensor) -> Tensor:
    """Over the last dimension; where all is −inf the gradient is zero instead of NaN."""
    dead = (values == -torch.inf).all(-1, keepdim=True)
    return values.masked_fill(dead, 0).logsumexp(-1).masked_fill(dead.squeeze(-1), -torch.inf)


def _set_log_prob_sampled(
    pot: Potentials, subset: Tensor, rules: Rules, samples: int, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    batch, items = subset.shape
    n = pot.num_candidates
    size = (subset >= 0).sum(-1)
    state = pot.interaction.start(samples)
    slots = subset.where(subset >= 0, n).unsqueeze(1).expand(-1, samples, -1)  # (B, S, T)
    left = (subset >= 0).unsqueeze(1).expand(-1, samples, -1)
    last = subset.new_full((batch, samples), -1)
    selected = torch.zeros(batch, samples, n, dtype=torch.bool, device=subset.device)
    log_weight = pot.stop.new_zeros(batch, samples, dtype=accumulator(pot.stop.dtype))
    for t in range(items + 1):
        count = size.clamp(max=t).unsqueeze(-1).expand(-1, samples)
        log_probs = step_log_probs(pot, state, History(selected, last, count), rules)
        onward = log_probs.gather(2, slots).masked_fill(~left, -torch.inf)  # (B, S, T)
        more = left.any(-1)
        ending = log_probs[..., -1].masked_fill(count < t, 0)  # the stop counts once, right after the last pick
        log_weight = log_weight + torch.where(more, logsumexp(onward), ending)
        if t == items:
            break
        noise = torch.empty_like(onward).exponential_(generator=generator)
        confined = (onward - onward.amax(-1, keepdim=True).clamp(min=torch.finfo(onward.dtype).min)).exp()
        choice = (confined / noise).argmax(-1, keepdim=True)
        pick = slots.gather(2, choice).squeeze(-1).masked_fill(~more, -1)  # (B, S)
        left = left & ~(torch.nn.functional.one_hot(choice.squeeze(-1), items).bool() & more.unsqueeze(-1))
        state = pot.interaction.advance(state, pick)
        selected = selected | picked_mask(pick.unsqueeze(-1), n)
        last = pick.where(more, last)
    log_mean = log_weight.logsumexp(-1) - math.log(samples)
    # The standard error of log p̂, from that of p̂ by the delta method.
    relative = (log_weight - log_mean.unsqueeze(-1)).exp()
    error = ((relative - 1).square().sum(-1) / (samples * (samples - 1))).sqrt()
    return log_mean, error.nan_to_num(0.0)


def pairs(x: Tensor) -> Tensor:
    """(M, K) to (M, 3K) bfloat16, every number as two: high, low and again high parts.

    >>> pairs(torch.tensor([[1 + 2**-8]])).tolist()  # of which bfloat16 holds 1
    [[1.0, 0.00390625, 1.0]]
    """
    x = x.float()
    high = x.bfloat16()
    rest = x - high.float()
    return torch.cat([high, rest.where(rest.isfinite(), 0).bfloat16(), high], -1)  # infinity has no rest

"""Beam search, and stochastic beam search: Gumbel-top-k over whole sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchcpl.checks import check_count, check_generator
from torchcpl.constraints import Constraint, Rules
from torchcpl.decoding.rollout import Hypotheses, begin, may_test, refuse_tracing, samples_first
from torchcpl.functional import blame_nan, step_log_probs
from torchcpl.interactions.base import accumulator, reorder
from torchcpl.potentials import Potentials, Selection


@dataclass(frozen=True)
class Beams:
    """K hypotheses a row, best first. Where a row has fewer than K, the rest have log-probability −inf."""

    indices: Tensor  # (B, K, T)
    gains: Tensor  # (B, K, T) log-probability of each pick
    log_prob: Tensor  # (B, K)
    score: Tensor  # (B, K) the rank


# Which choices to keep, of their log-probabilities (B, K, N+1): scores, best first, and places among the K·(N+1).
Keep = Callable[[Tensor, Beams], tuple[Tensor, Tensor]]


@torch.no_grad()
def beam(
    pot: Potentials,
    num_beams: int = 8,
    num_return: int = 1,
    *,
    max_len: int | None = None,
    min_len: int = 0,
    stop_bias: float | Tensor = 0.0,
    constraints: Sequence[Constraint] = (),
) -> Selection:
    """The likeliest sequences found with ``num_beams`` hypotheses a row: ``indices`` (B, R, T), best first.

    With as many beams as there are sequences the search is exact. Where a row has fewer than ``num_return`` sequences
    the rest have log-probability −inf.
    """
    check_count("num_beams", num_beams, 1)
    check_count("num_return", num_return, 1)
    if num_return > num_beams:
        raise ValueError(f"num_return: expected at most num_beams = {num_beams}, got {num_return}")
    rules = Rules(pot, max_len, min_len, stop_bias, constraints)
    return selection(search(pot, rules, num_beams, likeliest(num_beams)), num_return, pot)


@torch.no_grad()
def stochastic_beam(
    pot: Potentials,
    num_samples: int = 8,
    *,
    max_len: int | None = None,
    min_len: int = 0,
    stop_bias: float | Tensor = 0.0,
    constraints: Sequence[Constraint] = (),
    generator: torch.Generator | None = None,
) -> Selection:
    """Distinct sequences drawn without replacement: ``indices`` (S, B, T), in order of drawing.

    Gumbel-top-k over the tree of sequences (Kool, van Hoof, Welling 2019): every sequence's log-probability is
    perturbed by Gumbel noise and the S largest are kept, found top-down because the maximum over a node's leaves is
    itself Gumbel with the node's log-probability as location. With κ the (S+1)-th largest, a sequence of probability p
    is included with probability q = 1 − exp(−exp(log p − κ)) given κ, and ``weight`` = p/q makes Σ weight·f(sequence)
    an unbiased estimate of E f. Where a row has fewer than S sequences, the missing ones have weight 0.
    """
    check_count("num_samples", num_samples, 1)
    rules = Rules(pot, max_len, min_len, stop_bias, constraints)
    check_generator(generator, pot.unary.device)
    return samples_first(draw_distinct(pot, rules, num_samples, generator))


def draw_distinct(pot: Potentials, rules: Rules, num_samples: int, generator: torch.Generator | None) -> Selection:
    """``stochastic_beam`` under ``rules``: (B, S, T)."""
    width = num_samples + 1

    def perturbed(log_probs: Tensor, beams: Beams) -> tuple[Tensor, Tensor]:
        log_prob = beams.log_prob.unsqueeze(-1) + log_probs  # (B, K, N+1)
        noise = log_prob.new_empty(len(pot), width, log_prob.shape[2]).exponential_(generator=generator)
        gumbels = log_prob - noise[:, : log_prob.shape[1]].log()
        return highest(_gumbel_with_maximum(gumbels, beams.score.unsqueeze(-1)), width)

    # The root is perturbed too: conditional on a fixed maximum the leaves would be dependent, and p/q biased.
    root = torch.empty(len(pot), 1, dtype=accumulator(pot.unary.dtype), device=pot.unary.device)
    root = -root.exponential_(generator=generator).log()
    found = search(pot, rules, width, perturbed, root)
    threshold = found.score[:, num_samples:]  # κ (B, 1)
    log_prob = found.log_prob[:, :num_samples]
    # log q = log(1 − exp(−exp(log p − κ))); κ = −inf, no further sequence, means certain inclusion.
    log_included = torch.log(-torch.expm1(-(log_prob - threshold).exp()))
    log_included = log_included.where(threshold > -torch.inf, 0.0)
    # For p ≪ exp κ, 1 − exp(−x) → x, also where exp underflows.
    log_included = torch.where(log_included == -torch.inf, log_prob - threshold, log_included)
    weight = (log_prob - log_included).exp().masked_fill(log_prob == -torch.inf, 0)
    return selection(found, num_samples, pot, weight)


def selection(found: Beams, count: int, pot: Potentials, weight: Tensor | None = None) -> Selection:
    """The first ``count`` hypotheses of every row, (B, R, T)."""
    indices, gains, log_prob = (part[:, :count] for part in (found.indices, found.gains, found.log_prob))
    return Selection(indices, (indices >= 0).sum(-1), log_prob, pot.num_candidates, weight, gains)


def _gumbel_with_maximum(perturbed: Tensor, maximum: Tensor) -> Tensor:
    """Independent Gumbels G (..., C) conditioned on their maximum being ``maximum`` (..., 1).

    ``−log(exp(−maximum) − exp(−Z) + exp(−G))`` with Z the largest G, in a form that neither overflows nor cancels.
    """
    largest = perturbed.amax(-1, keepdim=True)
    gap = (perturbed - largest).exp().clamp(max=1)  # exp(G − Z) in [0, 1]
    v = maximum - perturbed + torch.log1p(-gap)
    shifted = maximum - v.clamp(min=0) - torch.log1p((-v.abs()).exp())
    # The largest itself: v = −inf there, exactly the maximum. Impossible choices stay impossible.
    shifted = torch.where(perturbed == largest, maximum, shifted)
    return shifted.masked_fill((perturbed == -torch.inf) | (maximum == -torch.inf), -torch.inf)


def highest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` highest of the scores (B, K, N+1), best first, and their places among the K·(N+1)."""
    flat = scores.flatten(1)
    return flat.topk(min(count, flat.shape[1]), 1)


def likeliest(count: int) -> Keep:
    """Keep the ``count`` likeliest."""
    return lambda log_probs, beams: highest(beams.log_prob.unsqueeze(-1) + log_probs, count)


def search(pot: Potentials, rules: Rules, width: int, keep: Keep, root: float | Tensor = 0.0) -> Beams:
    """Extend all hypotheses of a row at every step, and ``keep`` up to ``width``; ``root`` scores the empty one."""
    refuse_tracing()
    n = pot.num_candidates
    now, indices, gains = begin(pot, rules, 1)
    beams = Beams(indices, gains, now.log_prob, now.log_prob + root)
    for t in range(rules.max_len):
        if may_test(t, indices.device) and bool((now.stopped | (now.log_prob == -torch.inf)).all()):
            break
        log_probs = step_log_probs(pot, now.state, now.history, rules)
        # A stopped hypothesis has one continuation, itself.
        log_probs = log_probs.masked_fill(now.stopped.unsqueeze(-1), -torch.inf)
        log_probs[..., n] = log_probs[..., n].masked_fill(now.stopped, 0)
        score, best = keep(log_probs, beams)
        parents, choice = best // (n + 1), best % (n + 1)
        gain = log_probs.flatten(1).gather(1, best)
        indices, gains, marks, last, length, log_prob, *state = reorder(
            (beams.indices, beams.gains, *now[:-1], *now.state), parents
        )
        now = Hypotheses(marks, last, length, log_prob, tuple(state))
        now, indices[..., t], gains[..., t] = now.after(choice, gain)
        log_prob = now.log_prob.masked_fill(score == -torch.inf, -torch.inf)
        now = now._replace(log_prob=log_prob, state=pot.interaction.advance(now.state, indices[..., t]))
        beams = Beams(indices, gains, now.log_prob, score)
    blame_nan(beams.log_prob, pot)
    short = width - beams.score.shape[1]
    log_prob, score = (pad(part, (0, short), value=-torch.inf) for part in (beams.log_prob, beams.score))
    dead = (log_prob == -torch.inf).unsqueeze(-1)
    indices, gains = (pad(part, (0, 0, 0, short)) for part in (beams.indices, beams.gains))
    return Beams(indices.masked_fill(dead, -1), gains.masked_fill(dead, 0), log_prob, score)

"""Several distinct answers, each with the probability of its mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from torchcpl.checks import check_count, check_generator, check_number, describe
from torchcpl.constraints import Constraint, Rules
from torchcpl.decoding.beam import Beams, draw_distinct, highest, likeliest, search, selection
from torchcpl.functional import prefix_log_probs
from torchcpl.potentials import Potentials, Selection, picked_mask
from torchcpl.sets import order_matters, set_log_probs

EXACT_ITEMS = 10  # largest set whose probability is computed exactly: 2¹⁰ subsets

Same = Callable[[Tensor], Tensor]


@torch.no_grad()
def hypotheses(
    pot: Potentials,
    num_hypotheses: int = 6,
    *,
    same: str | Same = "set",
    radius: float | None = None,
    num_beams: int = 128,
    max_len: int | None = None,
    min_len: int = 0,
    stop_bias: float | Tensor = 0.0,
    constraints: Sequence[Constraint] = (),
    generator: torch.Generator | None = None,
) -> Selection:
    """Distinct answers, likeliest first: ``indices`` (B, R, T), and in ``log_prob`` (B, R) that of its mode.

    Answers that are the ``same`` are one mode, and their probabilities add up:

    - ``set``: all orders of a set. A beam search in which hypotheses with the same set are merged; the probability is
      exact up to 10 items, and above that of the orders the search went through.
    - ``sequence``: every order is an answer of its own, as in :func:`torchcpl.beam`.
    - a callable that maps answers (B, K, T) to a boolean (B, K, K), or to distances (B, K, K), of which those up to
      ``radius`` are the same. ``num_beams`` sequences are drawn without replacement, and answers are chosen greedily by
      the mass around them not yet covered; the probabilities are estimates, with the same draw at every call
      unless a ``generator`` is given, and exact where there are no more than ``num_beams`` sequences.

    Rows with fewer answers are filled with −1 and log-probability −inf.
    """
    check_count("num_hypotheses", num_hypotheses, 1)
    check_count("num_beams", num_beams, num_hypotheses)
    if isinstance(same, type) or not (callable(same) or (isinstance(same, str) and same in ("set", "sequence"))):
        raise ValueError(f"same: expected 'set', 'sequence' or a callable, got {describe(same)}")
    check_number("radius", radius, "a distance of at least 0", lambda value: value >= 0, optional=True)
    if radius is not None and not callable(same):
        raise ValueError(f"radius: expected None with same={same!r}, which knows no distances, got {radius}")
    rules = Rules(pot, max_len, min_len, stop_bias, constraints)
    check_generator(generator, pot.unary.device)
    if same == "sequence":
        return selection(search(pot, rules, num_beams, likeliest(num_beams)), num_hypotheses, pot)
    if same == "set" and pot.interaction.depends_on != "order":
        indices, log_prob = _likeliest_sets(pot, rules, num_hypotheses, num_beams)
    else:
        if generator is None:
            generator = torch.Generator(pot.unary.device).manual_seed(0)
        drawn = draw_distinct(pot, rules, num_beams, generator)
        together = alike(same if callable(same) else partial(_same_set, pot), drawn.indices, radius)
        assert drawn.weight is not None
        chosen, mass = cover(together, drawn.weight / drawn.weight.sum(-1, keepdim=True), num_hypotheses)
        indices, log_prob = drawn.indices.gather(1, chosen.unsqueeze(-1).expand(-1, -1, rules.max_len)), mass.log()
    log_prob = log_prob.clamp(max=0)
    indices = indices.masked_fill((log_prob == -torch.inf).unsqueeze(-1), -1)
    steps = prefix_log_probs(pot, indices, rules)[0][..., :-1]  # (B, R, T)
    return Selection(indices, (indices >= 0).sum(-1), log_prob, pot.num_candidates, step_log_prob=steps)


def _likeliest_sets(pot: Potentials, rules: Rules, count: int, width: int) -> tuple[Tensor, Tensor]:
    """(B, R, T) and (B, R) by a beam search over sets."""
    indices, log_prob = (part[:, :count] for part in set_beam(pot, rules, width))
    small = ((indices >= 0).sum(-1) <= EXACT_ITEMS) & (log_prob > -torch.inf)  # (B, R)
    sets = indices[..., :EXACT_ITEMS].masked_fill(~small.unsqueeze(-1), -1)
    exact = torch.stack([set_log_probs(pot, answer, rules, None, None)[0] for answer in sets.unbind(1)], 1)
    log_prob, order = exact.where(small, log_prob).sort(dim=1, descending=True, stable=True)
    return indices.gather(1, order.unsqueeze(-1).expand_as(indices)), log_prob


def _same_set(pot: Potentials, indices: Tensor) -> Tensor:
    picked = picked_mask(indices, pot.num_candidates)
    return (picked.unsqueeze(1) == picked.unsqueeze(2)).all(-1)


def alike(same: Same, indices: Tensor, radius: float | None) -> Tensor:
    """(B, K, K) the boolean result of ``same``, checked; reflexive."""
    verdict = same(indices)
    shape = (*indices.shape[:2], indices.shape[1])
    if not isinstance(verdict, Tensor) or tuple(verdict.shape) != shape or verdict.is_complex():
        raise ValueError(f"same: expected booleans or distances of shape {shape}, got {describe(verdict)}")
    if (verdict.dtype == torch.bool) != (radius is None):
        raise ValueError(f"radius: expected a number with distances and None with booleans, got {describe(radius)}")
    if radius is not None:
        verdict = verdict <= radius
    return verdict | torch.eye(shape[1], dtype=torch.bool, device=verdict.device)


def cover(same: Tensor, weight: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` answers with the most mass around them, one after the other, and that mass: two (B, R).

    ``same`` (B, K, K) says which answers an answer covers, ``weight`` (B, K) is the probability of each. What a
    chosen answer covers is removed before the next is chosen.
    """
    left = weight.clone()
    chosen, masses = [], []
    for _ in range(count):
        mass = (same * left.unsqueeze(1)).sum(-1)  # (B, K)
        best = mass.masked_fill(left == 0, -1).argmax(-1, keepdim=True)
        chosen.append(best)
        masses.append(mass.gather(1, best) * (left.gather(1, best) > 0))
        taken = same.gather(1, best.unsqueeze(-1).expand(-1, -1, same.shape[2])).squeeze(1)
        left = left.masked_fill(taken, 0)
    return torch.cat(chosen, 1), torch.cat(masses, 1)


def set_beam(pot: Potentials, rules: Rules, width: int) -> tuple[Tensor, Tensor]:
    """Beam search over sets: hypotheses that have picked the same set are one, and their probabilities add up.

    Returns the likeliest order found of each set (B, K, T) and the log-probability of the merged hypotheses (B, K).
    Where interaction or rules depend on the latest pick, only hypotheses with the same latest pick are merged.
    """
    n = pot.num_candidates
    ordered = order_matters(pot, rules)
    # A set's key is the sum of 64-bit random codes of its members, of padding 0: collisions are negligible.
    codes, latest = torch.randint(2**62, (2, n + 2), generator=torch.Generator().manual_seed(0)).to(pot.unary.device)
    codes[-1] = latest[n] = 0

    def merge(log_probs: Tensor, beams: Beams) -> tuple[Tensor, Tensor]:
        """The score is that of the merged hypotheses, ``log_prob`` that of the likeliest order among them."""
        mass, best = highest(beams.score.unsqueeze(-1) + log_probs, 4 * width)
        own = (beams.log_prob.unsqueeze(-1) + log_probs).flatten(1).gather(1, best)
        parents, choice = best // (n + 1), best % (n + 1)
        key = codes[beams.indices].sum(-1).gather(1, parents) + codes[choice]
        mass, kept = merged(key + latest[choice] if ordered else key, mass, own, width)
        return mass, best.gather(1, kept)

    found = search(pot, rules, width, merge)
    indices, mass = found.indices, found.score
    if ordered:  # at max_len, sets may still be there once for each latest pick
        mass, kept = merged(codes[indices].sum(-1), mass, found.log_prob, width)
        indices = indices.gather(1, kept.unsqueeze(-1).expand_as(indices))
    return indices, mass


def merged(key: Tensor, score: Tensor, own: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Entries (B, M) of equal ``key`` as one: log Σ exp ``score``, and where the one with the largest ``own`` stands.

    The ``width`` largest of them, largest first.
    """
    place = own.argsort(dim=1, descending=True, stable=True)
    place = place.gather(1, key.gather(1, place).argsort(dim=1, stable=True))  # by key, then by own
    key, score = key.gather(1, place), score.gather(1, place)
    fresh = torch.ones_like(key, dtype=torch.bool)
    fresh[:, 1:] = key[:, 1:] != key[:, :-1]
    group = fresh.long().cumsum(1) - 1  # (B, M)
    peak = torch.full_like(score, -torch.inf).scatter_reduce(1, group, score, "amax")
    safe = peak.clamp(min=torch.finfo(score.dtype).min)
    total = torch.zeros_like(score).scatter_add(1, group, (score - safe.gather(1, group)).exp())
    mass = (safe + total.log()).masked_fill(peak == -torch.inf, -torch.inf)
    first = torch.zeros_like(key).scatter(1, group.masked_fill(~fresh, 0), place.where(fresh, place[:, :1]))
    mass, order = mass.sort(dim=1, descending=True, stable=True)
    return mass[:, :width], first.gather(1, order)[:, :width]

"""Refinement of selections: every pick made again, in the light of all the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchcpl.checks import check_count, check_order, check_tensor, describe, validating
from torchcpl.constraints import Constraint, History, Rules
from torchcpl.decoding.rollout import refuse_tracing
from torchcpl.functional import blame_nan, longest, prefix_log_probs, step_logits, whole_log_probs
from torchcpl.potentials import Potentials, Selection, latest, picked_mask


@torch.no_grad()
def refine(
    pot: Potentials,
    selection: Selection,
    sweeps: int = 1,
    *,
    max_len: int | None = None,
    min_len: int = 0,
    stop_bias: float | Tensor = 0.0,
    constraints: Sequence[Constraint] = (),
) -> Selection:
    """Make every pick of a set again: the likeliest candidate after all the other picks.

    A greedy pick knows those before it. Here each in turn is taken back and replaced by the mode of P(next | the
    others), unless it is that already: coordinate ascent (iterated conditional modes), for the cost of decoding once
    more. As many are picked as before, and what is required stays. It is for sets: where the order of the picks
    matters to the interaction, the others keep theirs.

    Args:
        pot: the potentials.
        selection: picks (B, T), or (B, R, T) as from `beam`.
        sweeps: how often every pick is made again.
        max_len, min_len, stop_bias, constraints: those the selection was decoded with; no constraint may depend on the
            order of the picks.

    Returns:
        The picks, each in the place of the one it replaces, with the log-probabilities of them in that order.
    """
    refuse_tracing()
    rules = Rules(pot, max_len, min_len, stop_bias, constraints)
    check_count("sweeps", sweeps, 0)
    if rules.ordered:
        raise ValueError("constraints: expected Forbid, Require or Budget, got one that depends on the order of picks")
    if not isinstance(selection, Selection):
        raise ValueError(f"selection: expected a Selection, got {describe(selection)}")
    given = selection.indices
    single = given.dim() == 2
    order = given.unsqueeze(1) if single else given  # (B, R, T)
    check_tensor("selection.indices", order, (len(pot), "R", "T"), "long", like=pot.unary)
    if validating(given):
        check_order("selection.indices", given, pot.num_candidates, pot.mask)
    order = order[..., : longest(order.flatten(0, 1))]
    for _ in range(sweeps):
        order = sweep(pot, order, rules)
    picks, stop = prefix_log_probs(pot, order, rules)  # (B, R, T+1) each
    log_prob = blame_nan(whole_log_probs(picks, stop, order), pot)
    rest = (0, given.shape[-1] - order.shape[-1])
    order, steps = pad(order, rest, value=-1), pad(picks[..., :-1], rest)
    found = Selection(order, (order >= 0).sum(-1), log_prob, pot.num_candidates, step_log_prob=steps)
    return found.map(lambda part: part[:, 0]) if single else found


def sweep(pot: Potentials, order: Tensor, rules: Rules) -> Tensor:
    """``order`` (B, K, T) with every pick in turn made again, given all the others."""
    order = order.clone()
    for t in range(order.shape[-1]):
        pick, rest = order[..., t].clone(), order.clone()
        rest[..., t] = -1
        history = History(picked_mask(rest, pot.num_candidates), latest(rest)[..., -1], (rest >= 0).sum(-1))
        logits = step_logits(pot, pot.interaction.after(rest), history, rules)[..., :-1]  # (B, K, N)
        best, again = logits.max(-1)
        at = pick.clamp(min=0).unsqueeze(-1)
        better = (pick >= 0) & (best > logits.gather(-1, at).squeeze(-1))
        if rules.required is not None:
            better &= ~rules.required.unsqueeze(1).expand_as(logits).gather(-1, at).squeeze(-1)
        order[..., t] = again.where(better, pick)
    return order

"""The sequential process itself: pick, update the state, pick again, until the stop wins.

Greedy and sampling differ only in how a step chooses. Nothing here waits for the device except, once in a while, to
see whether every hypothesis has stopped.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchcpl.checks import capturing
from torchcpl.constraints import History, Rules
from torchcpl.functional import blame_nan, step_log_probs
from torchcpl.interactions.base import accumulator
from torchcpl.potentials import Potentials, Selection

SYNC_EVERY = 32  # steps between two looks at whether all have stopped, where looking makes the host wait


def rollout(pot: Potentials, rules: Rules, width: int, choose: Callable[[Tensor], Tensor]) -> Selection:
    """Run ``width`` hypotheses a row; ``choose`` maps log-probabilities (B, K, N+1) to choices (B, K), N = stop."""
    batch, n = pot.unary.shape
    device = pot.unary.device
    # One column more than candidates: choosing the stop marks it, so a stopped hypothesis is a lookup.
    marks = torch.zeros(batch, width, n + 1, dtype=torch.bool, device=device)
    stopped = marks[..., n]  # a view
    indices = torch.full((batch, width, rules.max_len), -1, dtype=torch.long, device=device)
    last = torch.full((batch, width), -1, dtype=torch.long, device=device)
    count = torch.zeros_like(last)
    total = torch.zeros(batch, width, dtype=accumulator(pot.unary.dtype), device=device)
    state = pot.interaction.start(width)
    for t in range(rules.max_len):
        if looks(t, device) and bool(stopped.all()):
            break
        log_probs = step_log_probs(pot, state, History(marks[..., :n], last, count), rules)
        choice = choose(log_probs).masked_fill(stopped, n)
        gained = log_probs.gather(-1, choice.unsqueeze(-1)).squeeze(-1)
        total = total + gained.masked_fill(stopped, 0)
        marks.scatter_(-1, choice.unsqueeze(-1), True)
        pick = choice.masked_fill(stopped, -1)
        indices[..., t] = pick
        if t + 1 == rules.max_len:
            break
        if rules.ordered:  # no other rule looks at what a stopped hypothesis has picked
            last, count = last.where(stopped, pick), count + ~stopped
        else:
            count = count + 1
        state = pot.interaction.advance(state, pick)
    # Whoever reached max_len without stopping stops now, with certainty.
    return Selection(indices, (indices >= 0).sum(-1), blame_nan(total, pot), n)


def looks(step: int, device: torch.device) -> bool:
    """Whether to see, before this step, if all have stopped."""
    return not capturing() and (device.type == "cpu" or step % SYNC_EVERY == SYNC_EVERY - 1)


def _each(selection: Selection, change: Callable[[Tensor], Tensor]) -> Selection:
    weight = selection.weight
    return Selection(
        change(selection.indices),
        change(selection.lengths),
        change(selection.log_prob),
        selection.num_candidates,
        None if weight is None else change(weight),
    )


def samples_first(selection: Selection) -> Selection:
    """(B, S, T) → (S, B, T), as torch.distributions puts samples first."""
    return _each(selection, lambda part: part.transpose(0, 1))


def first_of(selection: Selection) -> Selection:
    """The only one of (1, B, T) → (B, T)."""
    return _each(selection, lambda part: part[0])

"""Greedy decoding inside a graph (``torch.compile``, ``torch.export``, ONNX): one ``while_loop`` of few operations.

A runtime spends about a microsecond on every operation of a step, more than on its numbers. So what does not change
from step to step is made before the loop, what choosing does not need after it, and stopped rows need no masks: they
choose the stop again, candidate N, which adds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import embedding
from torch.utils import _pytree as pytree

from torchcpl.constraints import Rules
from torchcpl.interactions import Contextual, Coverage, Dense, Interaction, LowRank, Recent
from torchcpl.interactions.base import State, accumulator
from torchcpl.potentials import Potentials, Selection


def obstacle(rules: Rules) -> str | None:
    """Why this twin cannot run; None when it can: while a graph is made, with nothing but masks and length limits."""
    if not torch.compiler.is_compiling():
        return "no torch.compile or torch.export"
    return None if rules.plain else "constraints other than Forbid"


def greedy(pot: Potentials, rules: Rules, stop_threshold: float | None = None) -> Selection:
    """The twin of ``rollout`` with argmax or, given a threshold, with the stop judged by its own probability."""
    from torch._higher_order_ops import while_loop

    begun = tuple(part.clone() for part in pot.interaction.start(1))
    # A while_loop takes no views of one another, as keys and the stop's key of one head are. Contiguous: strides that a
    # batch of one leaves undecided would be taken for sizes.
    pot = pytree.tree_map_only(Tensor, lambda t: t.detach().clone(memory_format=torch.contiguous_format), pot)
    interaction, n = pot.interaction, pot.num_candidates
    dtype = accumulator(pot.unary.dtype)
    lowest = torch.finfo(dtype).min  # a stop that is ruled out; not −inf, so that it is chosen when nothing is left
    theta = pot.unary.to(dtype).masked_fill(~rules.available, -torch.inf)  # (B, N)
    stop = rules.biased(pot.stop.to(dtype)).to(dtype).clamp(min=lowest).unsqueeze(-1)  # (B, 1)
    place = torch.arange(n, device=theta.device)
    steps = torch.arange(rules.max_len, device=theta.device)
    limit, end = (torch.full((), size, device=theta.device) for size in (rules.max_len, n))
    advance = _advance(interaction)
    forgets = interaction.depends_on != "set"  # stopping changes the logits
    least = None if stop_threshold is None else math.log(stop_threshold)

    def going(t: Tensor, choice: Tensor, picks: Tensor, gains: Tensor, theta: Tensor, state: State) -> Tensor:
        return (t < limit) & (choice.min() < end)

    def step(
        t: Tensor, latest: Tensor, picks: Tensor, gains: Tensor, theta: Tensor, state: State
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, State]:
        added, added_stop = interaction.logits(state)
        halt = stop if added_stop is None else (stop + added_stop.to(dtype)).clamp(min=lowest)
        if rules.min_len:
            halt = halt.masked_fill(t < rules.min_len, lowest)
        logits = torch.cat([theta + added.squeeze(1), halt], -1)  # (B, N+1)
        log_probs = logits.log_softmax(-1)
        if least is None:
            choice, gain = logits.argmax(-1, keepdim=True), log_probs.amax(-1, keepdim=True)
        else:
            left = logits[:, :-1].amax(-1, keepdim=True) > -torch.inf
            choice = logits[:, :-1].argmax(-1, keepdim=True).where(left & (log_probs[:, -1:] < least), end)
            gain = log_probs.gather(-1, choice)
        if forgets:
            choice = choice.where(latest < end, end)
        now = steps == t
        theta = theta.masked_fill(place == choice, -torch.inf)
        return t + 1, choice, choice.where(now, picks), gain.where(now, gains), theta, advance(state, choice)

    start = torch.zeros((), dtype=torch.long, device=theta.device)
    none = torch.full_like(theta[:, :1], 0, dtype=torch.long)  # (B, 1)
    picks = none.expand(-1, rules.max_len) + n  # (B, T)
    gains = torch.zeros_like(picks, dtype=dtype)
    _, _, picks, gains, _, _ = while_loop(going, step, (start, none, picks, gains, theta, begun))
    picked = picks < n
    lengths = picked.sum(-1)
    log_prob = gains.masked_fill(steps > lengths.unsqueeze(-1), 0).sum(-1)  # that of the stop counts once
    gains = gains.masked_fill(~picked, 0)
    return Selection(picks.masked_fill(~picked, -1), lengths, log_prob, n, step_log_prob=gains)


def _add_columns(dense: Dense, state: State, choice: Tensor) -> State:
    """``dense.advance`` by columns gathered from W as it lies: a runtime would write Wᵀ out at every step."""
    stopped = choice == dense.shape[1]
    at = choice.masked_fill(stopped, 0)  # (B, 1)
    steps = [dense.W.gather(2, at.unsqueeze(1).expand(-1, dense.shape[1], -1)).squeeze(-1).unsqueeze(1)]  # (B, 1, N)
    if dense.stop_row is not None:
        steps.append(dense.stop_row.gather(1, at).unsqueeze(-1))
    rows = zip(state, steps, strict=True)
    return tuple(part + step.to(part.dtype).masked_fill(stopped.unsqueeze(-1), 0) for part, step in rows)


def _advance(interaction: Interaction) -> Callable[[State, Tensor], State]:
    """``interaction.advance`` for choices (B, 1) of which N, the stop, adds nothing that brings back a candidate."""
    added: list[Tensor | None]
    if isinstance(interaction, LowRank | Contextual):
        contextual = isinstance(interaction, Contextual)
        added = [interaction.values, torch.ones_like(interaction.keys[..., :1]) if contextual else None]
    elif isinstance(interaction, Coverage):
        added = [interaction.values, interaction.cover_values]
    elif isinstance(interaction, Recent):
        added = [interaction.values, interaction.last_values]
    elif isinstance(interaction, Dense):
        return partial(_add_columns, interaction)
    else:  # a kind of the caller's own
        return lambda state, choice: interaction.advance(state, choice.masked_fill(choice == interaction.shape[1], -1))
    batch, n = interaction.shape
    tables = [
        torch.cat([table, table.new_zeros(batch, 1, table.shape[2])], 1).flatten(0, 1)  # (B·(N+1), ·)
        for table in added
        if table is not None
    ]
    offset = (torch.arange(batch, device=interaction.values.device) * (n + 1)).unsqueeze(-1)

    def advance(state: State, choice: Tensor) -> State:
        index = choice + offset
        steps = [embedding(index, table).to(part.dtype) for part, table in zip(state, tables, strict=True)]
        if isinstance(interaction, Coverage):
            steps[1] = interaction.covered(embedding(index, tables[1]))
        if isinstance(interaction, Recent):
            return state[0] + steps[0], steps[1]
        return tuple(part + step for part, step in zip(state, steps, strict=True))

    return advance

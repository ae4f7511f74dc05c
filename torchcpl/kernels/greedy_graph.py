"""Greedy decoding inside a graph (``torch.compile``, ``torch.export``, ONNX): one ``while_loop`` of few operations.

A runtime spends about a microsecond on every operation of a step, more than on its arithmetic. So the stop is candidate
N of all tables, what does not change is computed before the loop, and stopped rows need no masks: the stop's score is
then the largest number there is, and whatever else is added to them changes no choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import embedding

from torchcpl.constraints import Rules
from torchcpl.interactions import Contextual, Coverage, Dense, Interaction, LowRank, Recent
from torchcpl.interactions.base import State, accumulator, without_autocast
from torchcpl.interactions.coverage import LARGEST
from torchcpl.potentials import Potentials, Selection

Logits = Callable[[Tensor, State], Tensor]  # scores (B, 1, N+1) and state to logits (B, 1, N+1)
Advance = Callable[[Tensor, State, Tensor], tuple[Tensor, State]]  # scores and state after the choices (B, 1)


def applies(pot: Potentials, rules: Rules) -> bool:
    """Whether this can decode: in a graph, with only masks and length limits."""
    known = isinstance(pot.interaction, Dense | LowRank | Contextual | Coverage | Recent)
    return torch.compiler.is_compiling() and known and rules.plain


def greedy(pot: Potentials, rules: Rules, stop_threshold: float | None = None) -> Selection:
    """``rollout`` with argmax, or with ``stop_threshold``."""
    from torch._higher_order_ops import while_loop

    n, device = pot.num_candidates, pot.unary.device
    dtype = accumulator(pot.unary.dtype)
    lowest, highest = torch.finfo(dtype).min, torch.finfo(dtype).max  # no infinities: a stop can be chosen, or added to
    theta = pot.unary.detach().to(dtype).masked_fill(~rules.available, -torch.inf)  # (B, N)
    stop = rules.biased(pot.stop.detach().to(dtype)).to(dtype).clamp(min=lowest)  # (B,)
    scores = torch.cat([theta, stop.unsqueeze(-1)], -1).unsqueeze(1)  # (B, 1, N+1)
    place = torch.arange(n + 1, device=device)
    steps = torch.arange(rules.max_len, device=device)
    limit, end = (torch.full((), size, device=device) for size in (rules.max_len, n))
    # What the score of a choice becomes.
    after_choice = torch.full_like(place, -torch.inf, dtype=dtype).where(place < n, highest)
    state, add, advance = _process(pot.interaction, scores)
    least = None if stop_threshold is None else math.log(stop_threshold)

    def going(t: Tensor, choice: Tensor, picks: Tensor, gains: Tensor, scores: Tensor, state: State) -> Tensor:
        return (t < limit) & (choice.min() < end)

    def step(
        t: Tensor, choice: Tensor, picks: Tensor, gains: Tensor, scores: Tensor, state: State
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, State]:
        logits = add(scores, state)
        if rules.min_len:
            logits = logits.masked_fill((t < rules.min_len) & (place == end), lowest)
        log_probs = logits.log_softmax(-1)
        choice = logits.argmax(-1)  # (B, 1)
        if least is not None:
            left = logits[..., :-1].amax(-1) > -torch.inf
            choice = logits[..., :-1].argmax(-1).where(left & (log_probs[..., -1] < least), end)
        index = choice.unsqueeze(-1)
        gain = log_probs.gather(-1, index).squeeze(-1)
        now = steps == t
        scores, state = advance(scores, state, choice)
        scores = scores.scatter(-1, index, embedding(choice, after_choice.unsqueeze(-1)))
        return t + 1, choice, choice.where(now, picks), gain.where(now, gains), scores, state

    start = torch.zeros((), dtype=torch.long, device=device)
    none = torch.zeros_like(stop, dtype=torch.long).unsqueeze(-1)  # (B, 1)
    picks = none.expand(-1, rules.max_len) + n  # (B, T)
    gains = torch.zeros_like(picks, dtype=dtype)
    _, _, picks, gains, _, _ = while_loop(going, step, (start, none, picks, gains, scores, state))
    picked = picks < n
    lengths = picked.sum(-1)
    log_prob = gains.masked_fill(steps > lengths.unsqueeze(-1), 0).sum(-1)  # that of the stop counts once
    gains = gains.masked_fill(~picked, 0)
    return Selection(picks.masked_fill(~picked, -1), lengths, log_prob, n, step_log_prob=gains)


def _process(interaction: Interaction, scores: Tensor) -> tuple[State, Logits, Advance]:
    """The state at the start, the logits of scores and state, and both after a choice."""
    if isinstance(interaction, Dense):
        effect = _columns(interaction)
        return (), lambda scores, _: scores, lambda scores, _, choice: (scores + effect(choice), ())
    assert isinstance(interaction, LowRank | Contextual | Coverage | Recent)
    nothing, value = torch.zeros_like(scores), _rows(interaction.values, scores)
    product = _product(interaction.keys, interaction.stop_key, scores)
    if isinstance(interaction, Contextual):
        network = interaction.network
        begun = scores.new_zeros(interaction.values[:, :1].shape), scores.new_zeros(scores.shape[:2])

        def contextual(scores: Tensor, state: State) -> Tensor:
            return scores + product(network(*state))

        return begun, contextual, lambda scores, s, choice: (scores, (s[0] + value(choice), s[1] + 1))
    if isinstance(interaction, Coverage):
        cover_value, cover = _rows(interaction.cover_values, scores), _product(interaction.cover_keys, None, scores)
        offset = interaction.cover_offset.detach().to(scores.dtype)[:, None, None].expand(-1, 1, interaction.shape[1])
        offset = torch.nn.functional.pad(offset, (0, 1), value=-torch.inf)  # nothing covers the stop

        def covered(scores: Tensor, state: State, choice: Tensor) -> tuple[Tensor, State]:
            more = (cover(cover_value(choice)) + offset).clamp(max=LARGEST).exp()
            return scores + product(value(choice)), (state[0] + more,)

        return (nothing + 1,), lambda scores, s: scores - s[0].log(), covered
    if isinstance(interaction, Recent):
        last_value = _rows(interaction.last_values, scores)
        last_product = _product(interaction.last_keys, interaction.last_stop_key, scores)

        def latest(scores: Tensor, state: State, choice: Tensor) -> tuple[Tensor, State]:
            return scores + product(value(choice)), (last_product(last_value(choice)),)

        return (nothing,), lambda scores, s: scores + s[0], latest
    return (), lambda scores, _: scores, lambda scores, _, choice: (scores + product(value(choice)), ())


def _rows(values: Tensor, scores: Tensor) -> Callable[[Tensor], Tensor]:
    """Choices (B, 1) to their rows of ``values`` (B, N, h): (B, 1, h), zeros for the stop."""
    batch, n, width = values.shape
    table = torch.cat([values.detach(), values.new_zeros(batch, 1, width)], 1).to(scores.dtype).flatten(0, 1)
    offset = (torch.arange(batch, device=values.device) * (n + 1)).unsqueeze(-1)
    return lambda choice: embedding(choice + offset, table)


def _product(keys: Tensor, stop_key: Tensor | None, scores: Tensor) -> Callable[[Tensor], Tensor]:
    """Queries (B, 1, h) to keys·query/√h (B, 1, N+1), the stop's last, 0 without a key of its own."""
    last = keys.new_zeros(keys.shape[0], keys.shape[2]) if stop_key is None else stop_key.detach()
    columns = torch.cat([keys.detach(), last.unsqueeze(1)], 1).to(scores.dtype).transpose(1, 2)  # (B, h, N+1)
    columns = (columns * max(keys.shape[2], 1) ** -0.5).contiguous()

    def product(query: Tensor) -> Tensor:
        with without_autocast(columns):
            return query.to(columns.dtype) @ columns

    return product


def _columns(dense: Dense) -> Callable[[Tensor], Tensor]:
    """Choices (B, 1) to columns (B, 1, N+1), gathered from W as it lies: a runtime would write Wᵀ out at every step."""
    batch, n = dense.shape
    W = dense.W.detach().clone(memory_format=torch.contiguous_format)
    stop_row = W.new_zeros(batch, n) if dense.stop_row is None else dense.stop_row.detach().clone()

    def columns(choice: Tensor) -> Tensor:
        at = choice.clamp(max=n - 1)
        column = W.gather(2, at.unsqueeze(1).expand(-1, n, -1)).squeeze(-1)  # (B, N)
        return torch.cat([column, stop_row.gather(1, at)], -1).unsqueeze(1)

    return columns

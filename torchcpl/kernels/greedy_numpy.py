"""Greedy decoding on the CPU, in NumPy.

A step works on N numbers, microseconds of arithmetic, so the overhead of the calls is what counts, and that the
parameters stay in cache from step to step. Two things follow. The normalisers, which choosing does not need, are
left until many steps' scores can be summed up in one go. And a batch is decoded in chunks of rows whose keys fit
into the cache together, a single row without any batch dimension at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchcpl.constraints import Rules
from torchcpl.functional import blame_nan
from torchcpl.interactions import Dense, LowRank
from torchcpl.potentials import Potentials, Selection

Array = NDArray[Any]
KEPT = 2**20  # scores kept for their normalisers at a time
CACHE = 2**22  # numbers that stay in cache


def applies(pot: Potentials, rules: Rules) -> bool:
    """On the CPU, in float32 or float64, with nothing but masks and length limits."""
    interaction = pot.interaction
    return (
        pot.unary.device.type == "cpu"
        and pot.unary.dtype in (torch.float32, torch.float64)
        and rules.plain
        and isinstance(interaction, Dense | LowRank)
        and (interaction.W if isinstance(interaction, Dense) else interaction.keys).dtype == pot.unary.dtype
        and not torch.compiler.is_compiling()
    )


def greedy(pot: Potentials, rules: Rules) -> Selection:
    """The twin of ``rollout`` with argmax."""
    batch, n = pot.unary.shape
    interaction = pot.interaction
    assert isinstance(interaction, Dense | LowRank)
    # Candidates and the stop in one line, (B, N+1), so that one argmax settles a step.
    stop = (pot.stop + rules.stop_bias).to(pot.unary.dtype)
    scores = torch.cat([pot.unary.masked_fill(~rules.available, -torch.inf), stop.unsqueeze(-1)], 1).detach()
    indices = torch.full((batch, rules.max_len), -1, dtype=torch.long)
    log_prob = torch.zeros(batch, dtype=scores.dtype)
    chunk = max(1, batch)
    if isinstance(interaction, LowRank):
        chunk = max(1, CACHE // max(1, n * interaction.keys.shape[2]))
    for start in range(0, batch, chunk):
        rows = slice(start, start + chunk)
        part = scores[rows]
        decode = _decode_row if len(part) == 1 else _decode_batch
        decode(interaction.rows(rows), part, rules, indices[rows].numpy(), log_prob[rows].numpy())
    return Selection(indices, (indices >= 0).sum(-1), blame_nan(log_prob, pot), n)


class Normalisers:
    """Scores of many steps, waiting to be summed up: Σ_t log Σ_j exp(score_t[j] − chosen_t), −log P, for every row.

    Relative to what was chosen: at large scores a normaliser alone would have lost the digits that count.
    """

    def __init__(self, like: Array, steps: int) -> None:
        self.kept = np.empty((max(1, min(steps, KEPT // max(1, like.size))), *like.shape), dtype=like.dtype)
        self.fill = 0
        self.total: Any = 0.0

    def keep(self, scores: Array, chosen: Any, stop_allowed: bool, live: Any = True) -> None:
        row = self.kept[self.fill]
        np.subtract(scores, chosen, out=row)
        if not stop_allowed:
            row[..., -1] = -np.inf
        if live is not True:  # rows that have stopped contribute log exp 0 = 0
            row[~live] = -np.inf
            row[~live, 0] = 0
        self.fill += 1
        if self.fill == len(self.kept):
            self.flush()

    def flush(self) -> Any:
        kept = torch.from_numpy(self.kept[: self.fill])
        self.total = self.total + kept.logsumexp(-1).sum(0, dtype=torch.float64).numpy()
        self.fill = 0
        return self.total


def _decode_row(interaction: Dense | LowRank, part: Tensor, rules: Rules, indices: Array, log_prob: Array) -> None:
    add = _row_update(interaction, part)
    scores = part[0].numpy()
    n = len(scores) - 1
    normalisers = Normalisers(scores, rules.max_len)
    for step in range(rules.max_len):
        may_stop = step >= rules.min_len
        choice = int((scores if may_stop else scores[:n]).argmax())
        chosen = scores[choice]
        if chosen == -np.inf:  # nothing is left: the stop is certain
            break
        normalisers.keep(scores, chosen, may_stop)
        if choice == n:
            break
        indices[0, step] = choice
        add(choice)
        scores[choice] = -np.inf
    log_prob[0] = -normalisers.flush()


def _decode_batch(interaction: Dense | LowRank, part: Tensor, rules: Rules, indices: Array, log_prob: Array) -> None:
    add = _batch_update(interaction, part)
    scores = part.numpy()
    n = scores.shape[1] - 1
    rows = np.arange(len(scores))
    live = np.ones(len(scores), dtype=bool)
    normalisers = Normalisers(scores, rules.max_len)
    for step in range(rules.max_len):
        may_stop = step >= rules.min_len
        choice = (scores if may_stop else scores[:, :n]).argmax(1)
        chosen = scores[rows, choice]
        live &= chosen != -np.inf  # where nothing is left the stop is certain
        everyone = bool(live.all())
        chosen = chosen if everyone else np.where(live, chosen, 0)
        normalisers.keep(scores, chosen[:, None], may_stop, True if everyone else live)
        live &= choice != n
        if not live.any():
            break
        indices[:, step] = np.where(live, choice, -1)
        choice[~live] = 0  # what a stopped row adds is never read
        add(choice)
        scores[rows, choice] = -np.inf
    log_prob[:] = -normalisers.flush()


def _row_update(interaction: Dense | LowRank, part: Tensor) -> Callable[[int], None]:
    """Add what a pick of the one row in ``part`` (1, N+1) adds to its scores."""
    scores = part[0].numpy()
    candidates, n = scores[:-1], len(scores) - 1
    if isinstance(interaction, Dense):
        W = interaction.W[0].detach().numpy()
        stop = None if interaction.stop_row is None else interaction.stop_row[0].detach().numpy()

        def add(pick: int) -> None:
            np.add(candidates, W[:, pick], out=candidates)
            if stop is not None:
                scores[n] += stop[pick]

        return add
    keys, values = interaction.keys[0].detach().numpy(), interaction.values[0].detach().numpy()
    stop_key = None if interaction.stop_key is None else interaction.stop_key[0].detach().numpy()
    scale = 1 / math.sqrt(max(keys.shape[1], 1))
    product = np.empty_like(candidates)

    def add_product(pick: int) -> None:
        value = values[pick] * scale
        np.matmul(keys, value, out=product)
        np.add(candidates, product, out=candidates)
        if stop_key is not None:
            scores[n] += stop_key @ value

    return add_product


def _batch_update(interaction: Dense | LowRank, part: Tensor) -> Callable[[Array], None]:
    """Add what the picks (B,) add to the scores ``part`` (B, N+1), on all cores."""
    batch, n = interaction.shape
    candidates = part[:, :n]
    if isinstance(interaction, Dense):
        W, stop_row = interaction.W.detach(), interaction.stop_row
        column = W.new_empty(batch, n, 1)

        def add(picks: Array) -> None:
            index = torch.from_numpy(picks).view(batch, 1, 1)
            torch.gather(W, 2, index.expand(batch, n, 1), out=column)
            candidates.add_(column.squeeze(-1))
            if stop_row is not None:
                part[:, n] += stop_row.detach().gather(1, index.view(batch, 1)).squeeze(1)

        return add
    keys, values, stop_key = interaction.keys.detach(), interaction.values.detach(), interaction.stop_key
    scale = 1 / math.sqrt(max(keys.shape[2], 1))
    rows = torch.arange(batch)
    product = keys.new_empty(batch, n, 1)

    def add_product(picks: Array) -> None:
        value = values[rows, torch.from_numpy(picks)].unsqueeze(-1) * scale  # (B, h, 1)
        torch.bmm(keys, value, out=product)
        candidates.add_(product.squeeze(-1))
        if stop_key is not None:
            part[:, n] += torch.bmm(stop_key.detach().unsqueeze(1), value).view(batch)

    return add_product

"""ContextualPlackettLuce: the process as a ``torch.distributions`` distribution over sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import permutations
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints

from torchcpl.checks import check_choice, check_count, check_generator, check_order, describe, readable
from torchcpl.constraints import Constraint, Rules
from torchcpl.decoding.sample import draw
from torchcpl.functional import check_sequences, sequence_log_probs
from torchcpl.potentials import Potentials, Selection, picked_mask
from torchcpl.sets import set_log_probs

SUPPORT_LIMIT = 20_000  # sequences that are enumerated for exact answers; more are estimated by sampling


def _size(name: str, shape: Any) -> torch.Size:
    try:
        size = torch.Size(shape)
    except (TypeError, ValueError):
        size = torch.Size([-1])  # refused below
    if any(length < 0 for length in size):
        raise ValueError(f"{name}: expected lengths of at least 0, got {describe(shape)}")
    return size


class DistinctSequence(constraints.Constraint):
    """Distinct candidates 0 … N−1, then −1."""

    is_discrete = True
    event_dim = 1

    def __init__(self, num_candidates: int) -> None:
        self.num_candidates = num_candidates

    def check(self, value: Tensor) -> Tensor:
        """(...) whether each (..., T) is a sequence of distinct candidates followed by −1 padding."""
        in_range = ((value >= -1) & (value < self.num_candidates)).all(-1)
        picked = value >= 0
        compact = (picked[..., 1:] <= picked[..., :-1]).all(-1)
        ranked = value.sort(-1).values
        distinct = ((ranked[..., 1:] != ranked[..., :-1]) | (ranked[..., 1:] < 0)).all(-1)
        return in_range & compact & distinct


class ContextualPlackettLuce(Distribution):
    """Distribution over the sequences that the process can produce; ``batch_shape`` (B,), ``event_shape`` (T,).

    Values are long (..., B, T): the picks in order, then −1; T is arbitrary. ``max_len``, after which the process
    stops, ``min_len``, ``stop_bias`` and ``constraints`` are those of the decoders; the probabilities add up to one
    over what they allow.
    """

    arg_constraints: dict[str, constraints.Constraint] = {}  # noqa: RUF012 (the name torch looks for)
    has_enumerate_support = True

    def __init__(
        self,
        pot: Potentials,
        max_len: int | None = None,
        *,
        min_len: int = 0,
        stop_bias: float | Tensor = 0.0,
        constraints: Sequence[Constraint] = (),
        validate_args: bool | None = None,
    ) -> None:
        check_choice("validate_args", validate_args, (True, False, None))
        self.pot = pot  # its rows are the batch, flattened
        self._rules = Rules(pot, max_len, min_len, stop_bias, constraints, check_scores=False)
        super().__init__(torch.Size([len(pot)]), torch.Size([self._rules.max_len]), validate_args=validate_args)
        if self._validate_args and readable():
            pot.check()

    def __repr__(self) -> str:
        return (
            f"ContextualPlackettLuce(batch_shape={tuple(self.batch_shape)}, "
            f"candidates={self.pot.num_candidates}, max_len={self._rules.max_len})"
        )

    @property
    def support(self) -> DistinctSequence:
        return DistinctSequence(self.pot.num_candidates)

    def expand(self, batch_shape: Any, _instance: Any = None) -> ContextualPlackettLuce:
        """The same distribution, repeated over a larger batch."""
        new: ContextualPlackettLuce = self._get_checked_instance(ContextualPlackettLuce, _instance)
        shape = _size("batch_shape", batch_shape)
        rows = torch.arange(len(self.pot), device=self.pot.unary.device).view(self.batch_shape)
        try:
            rows = rows.expand(shape).reshape(-1)
        except RuntimeError:
            raise ValueError(
                f"batch_shape: expected one that {tuple(self.batch_shape)} expands to, got {tuple(shape)}"
            ) from None
        new.pot, new._rules = self.pot[rows], self._rules.rows(rows)
        Distribution.__init__(new, shape, self.event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    def log_prob(self, value: Tensor) -> Tensor:
        """Exact log-probability (...) of the sequences ``value`` (..., T), broadcast against the batch.

        Sequences that the process cannot produce have −inf.
        """
        if not isinstance(value, Tensor) or value.dtype != torch.int64 or value.dim() < 1:
            raise ValueError(f"value: expected a long tensor (..., T), got {describe(value)}")
        if self._validate_args and readable():
            check_order("value", value, self.pot.num_candidates)
        try:
            shape = torch.broadcast_shapes(value.shape[:-1], self.batch_shape)
        except RuntimeError:
            raise ValueError(
                f"value: expected a shape that broadcasts with batch_shape {tuple(self.batch_shape)}, "
                f"got {tuple(value.shape)}"
            ) from None
        rows = len(self.pot)
        flat = (shape.numel() // max(rows, 1), rows, value.shape[-1])
        orders = value.expand(*shape, -1).reshape(flat).transpose(0, 1)  # (B, P, T)
        scores = sequence_log_probs(self.pot, orders, self._rules)
        return scores.transpose(0, 1).reshape(shape)

    def sample(self, sample_shape: Any = torch.Size()) -> Tensor:  # noqa: B008 (torch's own signature)
        """Sequences (*sample_shape, *batch_shape, T)."""
        return self.draw(sample_shape).indices

    def draw(self, sample_shape: Any = (), generator: torch.Generator | None = None) -> Selection:
        """``sample``, with the log-probabilities of the samples."""
        shape = _size("sample_shape", sample_shape)
        check_generator(generator, self.pot.unary.device)
        drawn = draw(self.pot, self._rules, shape.numel(), generator=generator)  # (S, B, T)
        return drawn.map(lambda part: part.reshape(*shape, *self.batch_shape, *part.shape[2:]))

    def enumerate_support(self, expand: bool = True) -> Tensor:
        """All sequences (S, *batch_shape, T), for small N; (S, 1, …, T) without ``expand``.

        Those that a row cannot produce, by its mask or constraints, have log-probability −inf.
        """
        count, limit = self._support_size, self._rules.max_len
        if count > 50 * SUPPORT_LIMIT:
            raise ValueError(f"enumerate_support: expected at most {50 * SUPPORT_LIMIT} sequences, got {count}")
        n = self.pot.num_candidates
        orders = (order for length in range(limit + 1) for order in permutations(range(n), length))
        rows = [[*order, *[-1] * (limit - len(order))] for order in orders]
        values = torch.tensor(rows, dtype=torch.long, device=self.pot.unary.device)
        values = values.view(count, *[1] * len(self.batch_shape), limit)
        return values.expand(count, *self.batch_shape, limit) if expand else values

    @property
    def _support_size(self) -> int:
        return sum(math.perm(self.pot.num_candidates, length) for length in range(self._rules.max_len + 1))

    def set_log_prob(
        self,
        subset: Tensor,
        *,
        num_samples: int | None = None,
        return_error: bool = False,
        generator: torch.Generator | None = None,
    ) -> Any:
        """Log-probability (*batch_shape) of ending with exactly ``subset`` (*batch_shape, T), in any order.

        Exact by dynamic programming up to 15 items, an importance-sampling estimate above (1,024 samples unless
        ``num_samples`` says otherwise). With ``return_error``, a pair: the second is the estimate's standard
        error, zero where it is exact.
        """
        if not isinstance(subset, Tensor) or subset.dtype != torch.int64 or subset.dim() < 1:
            raise ValueError(f"subset: expected a long tensor (..., T), got {describe(subset)}")
        try:
            flat = subset.expand(*self.batch_shape, -1).reshape(len(self.pot), subset.shape[-1])
        except RuntimeError:
            raise ValueError(
                f"subset: expected a shape that expands to batch_shape {tuple(self.batch_shape)}, "
                f"got {tuple(subset.shape)}"
            ) from None
        check_sequences("subset", flat, self.pot)
        check_choice("return_error", return_error, (True, False))
        check_generator(generator, self.pot.unary.device)
        value, error = set_log_probs(self.pot, flat, self._rules, num_samples, generator)
        value, error = value.view(self.batch_shape), error.view(self.batch_shape)
        return (value, error) if return_error else value

    def entropy(self, num_samples: int | None = None, generator: torch.Generator | None = None) -> Tensor:
        """−E log P (*batch_shape): exact by enumeration when the support is small, else by Monte Carlo."""
        log_probs, weights = self._expectation(num_samples, generator)[1:]
        return -(weights * log_probs.where(weights > 0, 0.0)).sum(0)

    def inclusion_probs(self, num_samples: int | None = None, generator: torch.Generator | None = None) -> Tensor:
        """P(candidate is picked) (*batch_shape, N): exact when the support is small, else by Monte Carlo."""
        values, _, weights = self._expectation(num_samples, generator)
        picked = picked_mask(values, self.pot.num_candidates)
        return (weights.unsqueeze(-1) * picked).sum(0)

    def _expectation(self, num_samples: int | None, generator: torch.Generator | None) -> tuple[Tensor, Tensor, Tensor]:
        """Sequences (S, *batch, T), their log-probabilities and their weights in an expectation (S, *batch)."""
        if num_samples is None and self._support_size <= SUPPORT_LIMIT:
            values = self.enumerate_support()
            log_probs = self.log_prob(values)
            return values, log_probs, log_probs.exp()
        count = 4096 if num_samples is None else num_samples
        check_count("num_samples", count, 1)
        drawn = self.draw((count,), generator)
        return drawn.indices, drawn.log_prob, torch.full_like(drawn.log_prob, 1 / count)

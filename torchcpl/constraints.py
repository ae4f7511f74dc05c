"""Hard constraints and length limits, shared by every decoder, loss and distribution.

A constraint is a pure function of the picks so far, so it applies to a decoding step and to all prefixes of a
sequence alike. Choices that it rules out get probability zero and the rest are renormalised: the constrained
process is a distribution of its own, with mass one over what is allowed.

A hypothesis with no candidate left to pick always stops.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcpl.checks import (
    DTYPES,
    check_choice,
    check_count,
    check_finite,
    check_number,
    describe,
    readable,
    tracing,
    validating,
)
from torchcpl.potentials import Potentials, check_potentials, latest, picked_mask


@dataclass(frozen=True)
class History:
    """The picks so far of K hypotheses in each of B rows."""

    selected: Tensor  # (B, K, N) bool
    last: Tensor  # (B, K) the latest pick, −1 when nothing is picked yet
    count: Tensor  # (B, K) how many picks


def per_row(name: str, value: Any, pot: Potentials, dtype: torch.dtype) -> Tensor:
    """(N,) or (B, N) per candidate → (B or 1, N) on the potentials' device."""
    given = as_tensor(name, value, pot.unary.device)
    n = pot.num_candidates
    batch = pot.unary.shape[0]  # not len(pot), which would specialise a symbolic size
    shapes = ((batch, n), (n,), (1, n))
    if tuple(given.shape) not in shapes or not (given.dtype == torch.bool if dtype == torch.bool else is_real(given)):
        kind = "bool" if dtype == torch.bool else "number"
        raise ValueError(f"{name}: expected a {kind} per candidate, ({n},) or ({batch}, {n}), got {describe(given)}")
    return given.to(dtype).expand(batch, n)


def as_tensor(name: str, value: Any, device: torch.device) -> Tensor:
    """A tensor, array, list or number as a tensor on ``device``; Python floats keep their 64 bits."""
    try:
        if not isinstance(value, Tensor):
            value = np.asarray(value)
        found = torch.as_tensor(value, device=device)
        if found.layout == torch.strided:
            return found
    except (TypeError, ValueError, RuntimeError):
        pass
    raise ValueError(f"{name}: expected numbers or booleans, got {describe(value)}")


def is_real(value: Tensor) -> bool:
    """Whether its values are integers or floats."""
    return value.dtype in (*DTYPES["float"], torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True)
class Forbid:
    """Never pick candidates where ``mask`` (N,) or (B, N) is True."""

    mask: Any


@dataclass(frozen=True)
class Require:
    """Pick all candidates where ``mask`` (N,) or (B, N) is True before stopping, with ``first`` before any other.

    Always met together with ``Forbid``, ``Budget`` and length limits, which leave room for what is required. With
    ``Adjacent`` or a callable a hypothesis may reach a dead end and stop early; ``met`` tells.
    """

    mask: Any
    first: bool = False

    def __post_init__(self) -> None:
        check_choice("Require.first", self.first, (True, False))

    def met(self, picked: Tensor) -> Tensor:
        """Whether selections ``Selection.mask()`` (..., N) contain all required candidates."""
        if not isinstance(picked, Tensor) or picked.dtype != torch.bool or picked.dim() == 0:
            raise ValueError(f"picked: expected a bool tensor (..., N), as Selection.mask() is, got {describe(picked)}")
        required = as_tensor("Require.mask", self.mask, picked.device)
        shapes = (picked.shape[-1:], picked.shape[-2:], (1, picked.shape[-1]))
        if required.dtype != torch.bool or required.shape not in shapes:
            wanted = f"a bool per candidate of picked, {tuple(picked.shape)}"
            raise ValueError(f"Require.mask: expected {wanted}, got {describe(self.mask)}")
        return (picked | ~required).all(-1)


@dataclass(frozen=True)
class Adjacent:
    """The next pick must neighbour the last; the first is free.

    ``neighbours`` is a boolean matrix (N, N) or (B, N, N), ``[i, j]`` True when j may follow i; or neighbour lists: a
    long tensor (N, D) or (B, N, D) padded with −1, or a list of N lists.
    """

    neighbours: Any

    def matrix(self, pot: Potentials) -> Tensor:
        """(B or 1, N, N) boolean."""
        given = self.neighbours
        n = pot.num_candidates
        if isinstance(given, list | tuple):
            given = _filled(given)
        given = as_tensor("neighbours", given, pot.unary.device)
        if given.dim() == 2:
            given = given.unsqueeze(0)
        shaped = given.dim() == 3 and given.shape[0] in (1, pot.unary.shape[0]) and given.shape[1] == n
        if shaped and given.dtype == torch.bool and given.shape[2] == n:
            return given
        if not shaped or given.dtype != torch.int64:
            raise ValueError(
                f"neighbours: expected a bool matrix ({n}, {n}) or neighbour lists ({n}, D) of long with −1 padding, "
                f"optionally per row, got {describe(self.neighbours)}"
            )
        outside = (given >= n) | (given < -1)
        if readable() and outside.any():
            raise ValueError(f"neighbours: expected indices in [0, {n}) with −1 padding, got {int(given[outside][0])}")
        matrix = torch.zeros(*given.shape[:2], n + 1, dtype=torch.bool, device=given.device)
        return matrix.scatter_(2, given.where(given >= 0, n), True)[..., :n]


def _filled(lists: Sequence[Any]) -> Any:
    """Lists of indices padded with −1 to one length; anything else (a boolean matrix) unchanged."""
    if not all(isinstance(row, list | tuple) and all(type(item) is int for item in row) for row in lists):
        return lists
    width = max(map(len, lists), default=0)
    return np.array([[*row, *[-1] * (width - len(row))] for row in lists], dtype=np.int64).reshape(len(lists), width)


@dataclass(frozen=True)
class Budget:
    """The costs of the picks add up to at most ``limit``.

    ``cost`` (N,) or (B, N) of at least 0, ``limit`` a number or (B,). Room is left for required candidates and for
    ``min_len``; the latter by each of several budgets on its own, so that together they may stop short of it.
    """

    cost: Any
    limit: Any


Constraint = Forbid | Require | Adjacent | Budget | Callable[[History], Tensor]


class Rules:
    """Length limits, stop bias and constraints of one call, checked once; ``allowed`` applies them at every step."""

    def __init__(
        self,
        pot: Potentials,
        max_len: int | None = None,
        min_len: int = 0,
        stop_bias: float | Tensor = 0.0,
        constraints: Sequence[Constraint] = (),
        check_scores: bool = True,
    ) -> None:
        check_potentials(pot)
        if check_scores and validating(pot.unary):
            pot.check_scores()
        n = pot.num_candidates
        check_count("max_len", max_len, 0, optional=True)
        check_count("min_len", min_len, 0)
        self.max_len = n if max_len is None else torch.sym_min(max_len, n)  # n may be symbolic
        self.min_len = min_len
        _check_stop_bias(stop_bias, pot)
        self.stop_bias = stop_bias
        if not isinstance(constraints, Sequence) or isinstance(constraints, str):
            raise ValueError(f"constraints: expected a list of constraints, got {describe(constraints)}")

        self.given: Tensor | None = None  # (B, 1 or K, m)
        self.available = pot.mask  # (B, N)
        self.required: Tensor | None = None  # (B, N)
        self.first: Tensor | None = None  # (B, N) those required before any other
        self._adjacent: list[Tensor] = []  # (B or 1, N, N)
        self._budgets: list[tuple[Tensor, Tensor]] = []  # (B, N), (B,)
        self._callables: list[Callable[[History], Tensor]] = []
        for constraint in constraints:
            if isinstance(constraint, Forbid):
                self.available = self.available & ~per_row("Forbid.mask", constraint.mask, pot, torch.bool)
            elif isinstance(constraint, Require):
                required = per_row("Require.mask", constraint.mask, pot, torch.bool)
                self.required = required if self.required is None else self.required | required
                if constraint.first:
                    self.first = required if self.first is None else self.first | required
            elif isinstance(constraint, Adjacent):
                self._adjacent.append(constraint.matrix(pot))
            elif isinstance(constraint, Budget):
                self._budgets.append(_budget(constraint, pot))
            elif callable(constraint):
                self._callables.append(constraint)
            else:
                raise ValueError(
                    f"constraints: expected Forbid, Require, Adjacent, Budget or a callable, got {describe(constraint)}"
                )
        self._refuse_impossible()

    def after(self, given: Tensor) -> Rules:
        """The rules of a process that goes on after the picks ``given`` (B, 1 or K, m), any of which may be −1."""
        new = copy(self)
        new.given = given
        return new

    def rows(self, rows: Tensor) -> Rules:
        """The rules of some rows of the batch, for ``pot[rows]``."""
        new = copy(self)
        new.available = self.available[rows]
        new.required, new.first = (None if part is None else part[rows] for part in (self.required, self.first))
        new._adjacent = [m[rows] if m.shape[0] != 1 else m for m in self._adjacent]
        new._budgets = [(cost[rows], limit[rows]) for cost, limit in self._budgets]
        if isinstance(self.stop_bias, Tensor) and self.stop_bias.dim():
            new.stop_bias = self.stop_bias[rows]
        return new

    def biased(self, stop: Tensor) -> Tensor:
        """The stop's logits (B,) with the bias."""
        if isinstance(self.stop_bias, int | float) and self.stop_bias == 0:
            return stop
        return stop + self.stop_bias

    @property
    def ordered(self) -> bool:
        """Whether what is allowed depends on the order of the picks."""
        return bool(self._adjacent or self._callables)

    @property
    def plain(self) -> bool:
        """Whether there are only padding, forbidden candidates and length limits, which the fast decoders handle."""
        special = self._adjacent or self._budgets or self._callables
        return self.required is None and self.given is None and not special

    def allowed(self, history: History) -> tuple[Tensor, Tensor | None]:
        """Which candidates (B, K, N) may be picked next, and where the stop may be chosen (B, K), None: everywhere."""
        if self.given is not None:
            picked = history.selected | picked_mask(self.given, history.selected.shape[-1])
            last = history.last.where(history.last >= 0, latest(self.given)[..., -1])
            history = History(picked, last, history.count + (self.given >= 0).sum(-1))
        left = self.available.unsqueeze(1) > history.selected  # (B, K, N): available and not selected
        allowed = left & (history.count < self.max_len).unsqueeze(-1)
        if self.plain and self.min_len == 0:
            return allowed, None

        stop = history.count >= self.min_len
        missing = torch.zeros_like(left)  # (B, K, N) required and not yet picked
        if self.required is not None:
            missing = self.required.unsqueeze(1) & ~history.selected
            outstanding = missing.sum(-1)
            stop = stop & (outstanding == 0)
            # Once only as many picks are left as required ones are missing, only those are allowed.
            slots = self.max_len - history.count  # (B, K)
            allowed = allowed & (missing | (slots > outstanding).unsqueeze(-1))
        if self.first is not None:
            waited_for = self.first.unsqueeze(1) & ~history.selected  # (B, K, N)
            allowed = allowed & (waited_for | ~waited_for.any(-1, keepdim=True))
        owed = (self.min_len - history.count).clamp(min=0) if self.min_len else None  # (B, K) picks up to min_len
        for cost, limit in self._budgets:
            allowed = allowed & _affordable(cost, limit, history.selected, left, missing, owed)
        for matrix in self._adjacent:
            allowed = allowed & _next_to(matrix, history.last)
        for function in self._callables:
            verdict = _verdict(function, history)
            allowed = allowed & verdict[..., : allowed.shape[-1]]
            if verdict.shape[-1] > allowed.shape[-1]:
                stop = stop & verdict[..., -1]
        return allowed, stop | ~allowed.any(-1)

    def _refuse_impossible(self) -> None:
        """Raise, naming the first row whose constraints no selection satisfies, where values can be read."""
        if tracing():
            return
        if self.min_len > self.max_len:
            raise ValueError(f"min_len: expected at most min(max_len, N) = {self.max_len}, got {self.min_len}")
        if (self.required is None and self.min_len == 0 and not self._budgets) or not readable():
            return

        def refuse(bad: Tensor, why: str, *numbers: Tensor) -> None:
            """Raise for the first row that is ``bad`` (B,), whose ``numbers`` (B,) are formatted into ``why``."""
            if bad.any():
                row = int(bad.nonzero()[0])
                why = why.format(*(number[row].item() for number in numbers))
                raise ValueError(f"constraints: row {row} cannot be satisfied: {why}")

        room = self.available.sum(-1)
        refuse(room < self.min_len, f"min_len = {self.min_len}, but only {{}} candidates may be picked", room)
        required = self.required if self.required is not None else torch.zeros_like(self.available)
        lost = required & ~self.available
        if lost.any():
            refuse(lost.any(-1), "candidate {} is required, but padded or forbidden", lost.int().argmax(-1))
        wanted = required.sum(-1)
        refuse(wanted > self.max_len, f"{{}} candidates are required, but max_len = {self.max_len}", wanted)
        for cost, limit in self._budgets:
            cheapest = _cheapest(cost, self.available & ~required)
            need = (_total(cost, required) + cheapest(self.min_len - wanted)).squeeze(-1)
            refuse(need > limit, "the required picks and min_len cost at least {:g}, the budget is {:g}", need, limit)
        for matrix in self._adjacent:
            apart = self._unreachable(matrix, required)
            if apart.any():
                why = "no path connects required candidate {} to another required one, in either direction"
                refuse(apart.any(-1), why, apart.int().argmax(-1))

    def _unreachable(self, matrix: Tensor, required: Tensor) -> Tensor:
        """(B, N) required candidates that no path connects to some other required candidate, in either direction."""
        batch, n = required.shape
        most = int(required.sum(-1).max()) if required.numel() else 0
        if most < 2:
            return torch.zeros_like(required)
        # The r-th required candidate of each row, and the candidates reachable from it.
        source = required.to(torch.int8).sort(dim=-1, descending=True, stable=True).indices[:, :most]  # (B, R)
        real = required.gather(1, source)
        reached = torch.nn.functional.one_hot(source, n).bool()  # (B, R, N)
        step = (matrix & self.available.unsqueeze(1)).expand(batch, n, n).float()
        while True:
            wider = reached | (reached.float() @ step > 0)
            if bool((wider == reached).all()):
                break
            reached = wider
        reaches = reached.gather(2, source.unsqueeze(1).expand(-1, most, -1))  # (B, R, R) [r, s]: r reaches s
        apart = ~(reaches | reaches.transpose(1, 2)) & real.unsqueeze(1) & real.unsqueeze(2)
        return torch.zeros_like(required).scatter(1, source, apart.any(1))


def _check_stop_bias(stop_bias: Any, pot: Potentials) -> None:
    """Raise unless it is a number below inf, or a tensor of them, one for all rows or (B,)."""
    if not isinstance(stop_bias, Tensor):
        check_number("stop_bias", stop_bias, "a number below inf, or (B,)", lambda value: value < math.inf)
    elif tuple(stop_bias.shape) not in ((), (pot.unary.shape[0],)) or not is_real(stop_bias):
        expected = f"a number below inf, or ({pot.unary.shape[0]},)"
        raise ValueError(f"stop_bias: expected {expected}, got {describe(stop_bias)}")
    elif stop_bias.dim() and stop_bias.device != pot.unary.device:
        raise ValueError(f"stop_bias: expected a tensor on {pot.unary.device}, got one on {stop_bias.device}")
    elif validating(stop_bias):
        check_finite("stop_bias", stop_bias)


def _budget(constraint: Budget, pot: Potentials) -> tuple[Tensor, Tensor]:
    """Costs (B, N) and what may be spent (B,), in float64."""
    cost = as_tensor("Budget.cost", constraint.cost, pot.unary.device)
    limit = as_tensor("Budget.limit", constraint.limit, pot.unary.device)
    values = readable()
    batch = pot.unary.shape[0]
    shaped = tuple(limit.shape) in ((), (batch,)) and is_real(limit)
    if not shaped or (values and bool(limit.isnan().any())):
        raise ValueError(f"Budget.limit: expected a number or ({batch},), got {describe(constraint.limit)}")
    # A relative tolerance: rounding (of sums, of 0.1 in float32) must not make an exactly met budget unaffordable.
    rounding = max([1e-12] + [2 * torch.finfo(x.dtype).eps for x in (cost, limit) if x.dtype == torch.float32])
    cost = per_row("Budget.cost", cost, pot, torch.float64).masked_fill(~pot.mask, 0)
    if values and bool((~(cost >= 0)).any()):
        raise ValueError("Budget.cost: expected costs of at least 0, got a negative one or NaN")
    return cost, limit.double().expand(batch) * (1 + rounding)


def _affordable(
    cost: Tensor, limit: Tensor, selected: Tensor, available: Tensor, missing: Tensor, owed: Tensor | None
) -> Tensor:
    """(B, K, N) candidates that leave enough for the required ones and for the cheapest way to reach min_len.

    ``cost`` (B, N), ``limit`` (B,); ``selected``, ``available`` and, of the required ones, ``missing`` (B, K, N);
    ``owed`` (B, K) picks up to min_len.
    """
    cost = cost.unsqueeze(1)  # (B, 1, N)
    limit = limit.view(-1, 1, 1)
    left = torch.where(limit < torch.inf, limit - _total(cost, selected), torch.inf)  # (B, K, 1)
    reserved = _total(cost, missing)  # (B, K, 1)
    if owed is None:
        return torch.where(missing, reserved, cost + reserved) <= left
    # With f picks owed beyond the required ones, picking i costs max(c_i, c_(f)) and the f−1 cheapest others.
    cheapest, owed = _cheapest(cost, available & ~missing), owed - missing.sum(-1)
    others = cheapest(owed - 1) + torch.maximum(cost, cheapest(owed) - cheapest(owed - 1).nan_to_num(posinf=0.0))
    return torch.where(missing, cheapest(owed), others) + reserved <= left


def _cheapest(cost: Tensor, among: Tensor) -> Callable[[Tensor], Tensor]:
    """From a number (...), none if negative, to the cost (..., 1) of so many of the cheapest ``among`` (..., N)."""
    ranked = cost.expand(among.shape).masked_fill(~among, torch.inf).sort(-1).values
    total = torch.nn.functional.pad(ranked.cumsum(-1), (1, 0))  # (..., N+1)
    return lambda number: total.gather(-1, number.clamp(min=0, max=ranked.shape[-1]).unsqueeze(-1))


def _total(cost: Tensor, chosen: Tensor) -> Tensor:
    """(..., 1) the cost of ``chosen``. A masked sum, not a product: inf·0 would be NaN."""
    return cost.expand(chosen.shape).masked_fill(~chosen, 0).sum(-1, keepdim=True)


def _next_to(matrix: Tensor, last: Tensor) -> Tensor:
    """(B, K, N) the neighbours of the last pick; all candidates where nothing is picked yet."""
    rows = last.clamp(min=0).unsqueeze(-1).expand(-1, -1, matrix.shape[-1])
    return matrix.expand(last.shape[0], -1, -1).gather(1, rows) | (last < 0).unsqueeze(-1)


def _verdict(function: Callable[[History], Tensor], history: History) -> Tensor:
    verdict = function(history)
    b, k, n = history.selected.shape
    if (
        not isinstance(verdict, Tensor)
        or verdict.dtype != torch.bool
        or tuple(verdict.shape) not in ((b, k, n), (b, k, n + 1))
    ):
        raise ValueError(
            f"constraints: expected {getattr(function, '__name__', function)} to return a bool tensor of shape "
            f"({b}, {k}, {n}), or ({b}, {k}, {n + 1}) with the stop last, got {describe(verdict)}"
        )
    return verdict

"""The protocol: how picks change the logits of the remaining candidates.

Every loss and decoder drives an interaction through the same few calls. A *state* summarises the picks made so
far. It is a tuple of tensors that all start with (B, K): K hypotheses beside each other for every row of the
batch (beams, samples, prefixes), which share the row's parameters without copying them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from torchcpl.checks import tracing

State = tuple[Tensor, ...]
Self = TypeVar("Self", bound="Interaction")


class Interaction(ABC):
    """One kind of interaction: a frozen dataclass of tensors whose first dimension is B.

    ``depends_on`` says what the logits depend on: the set of the picks (``set``), the set and the latest pick
    (``last``), or their whole order (``order``).
    """

    depends_on: ClassVar[str] = "set"

    @property
    def shape(self) -> tuple[int, int]:
        """(B, N), the first two dimensions of the first field."""
        first: Tensor = getattr(self, fields(self)[0].name)  # type: ignore[arg-type]
        return first.shape[0], first.shape[1]

    def start(self, width: int = 1) -> State:
        """The state of K = ``width`` hypotheses with nothing picked."""
        # After one pick that is none, not after an empty order: ONNX cannot reshape to sizes of 0.
        return self.after(torch.full((self.shape[0], width, 1), -1, dtype=torch.long, device=self._device))

    @abstractmethod
    def advance(self, state: State, picks: Tensor) -> State:
        """The state after one more pick (B, K) each; that of hypotheses with −1, which have stopped, stays."""

    @abstractmethod
    def prefixes(self, order: Tensor) -> State:
        """The states after 0, 1, …, T picks of ``order`` (B, P, T), as K = P·(T+1) hypotheses."""

    @abstractmethod
    def after(self, picks: Tensor) -> State:
        """The states after all ``picks`` (B, K, T), of which any may be −1, no pick."""

    @abstractmethod
    def logits(self, state: State) -> tuple[Tensor, Tensor | None]:
        """What the picks add to the candidates' logits (B, K, N) and to the stop's (B, K), or None."""

    def prefix_logits(self, order: Tensor) -> tuple[Tensor, Tensor | None]:
        """What each prefix of ``order`` (B, T) adds: (B, T+1, N) and (B, T+1) or None."""
        return self.logits(self.prefixes(order.unsqueeze(1)))

    def dense(self) -> Tensor:
        """W (B, N, N): ``W[j, i]`` is the effect on j of having picked i. For plots and tests."""
        return self._pair_effects()[0]

    def dense_stop(self) -> Tensor | None:
        """(B, N) the effect on the stop of having picked i, None where the stop does not depend on the picks."""
        return self._pair_effects()[1]

    def _pair_effects(self) -> tuple[Tensor, Tensor | None]:
        # The effect of each pick alone: W itself where effects add up, else their first-order terms.
        batch, candidates = self.shape
        everyone = torch.arange(candidates, device=self._device).expand(batch, candidates)
        base, base_stop = self.logits(self.start(1))
        effect, stop = self.logits(self.after(everyone.unsqueeze(-1)))  # (B, K=N picks, N)
        if stop is not None and base_stop is not None:
            stop = stop - base_stop
        return (effect - base).transpose(1, 2), stop

    @property
    def _device(self) -> torch.device:
        return next(iter(self.tensors.values())).device

    def rows(self: Self, rows: slice | Tensor | list[int]) -> Self:
        """Some of the rows of the batch."""
        return self.map(lambda part: part[rows])

    def map(self: Self, change: Callable[[Tensor], Tensor]) -> Self:
        """The same interaction with every tensor changed."""
        return replace(self, **{name: change(part) for name, part in self.tensors.items()})  # type: ignore[type-var]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by name."""
        parts = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        return {name: part for name, part in parts.items() if isinstance(part, Tensor)}  # no :=, which dynamo refuses

    def __repr__(self) -> str:
        parts = ", ".join(f"{name} {tuple(part.shape)}" for name, part in self.tensors.items())
        return f"{type(self).__name__}({parts})"


class Additive(Interaction):
    """An interaction whose state is a sum over the picks: a kind defines ``steps``, what each adds, and ``logits``."""

    @abstractmethod
    def steps(self, picks: Tensor) -> State:
        """What each of ``picks`` (B, ...) adds to the state: tensors (B, ..., ·), zero where the pick is −1."""

    def advance(self, state: State, picks: Tensor) -> State:
        return tuple(part + step for part, step in zip(state, self.steps(picks), strict=True))

    def after(self, picks: Tensor) -> State:
        return tuple(step.sum(2) for step in self.steps(picks))

    def prefixes(self, order: Tensor) -> State:
        return tuple(running_sum(step).flatten(1, 2) for step in self.steps(order))


def reorder(state: State, parents: Tensor) -> State:
    """The states of the hypotheses ``parents`` (B, K) of the same row, as beam search reorders them."""
    return tuple(
        part.gather(1, parents.view(*parents.shape, *[1] * (part.dim() - 2)).expand(-1, -1, *part.shape[2:]))
        for part in state
    )


def running_sum(steps: Tensor) -> Tensor:
    """(B, P, T+1, ·) the sums of the first 0, 1, …, T of ``steps`` (B, P, T, ·)."""
    return torch.nn.functional.pad(steps, (0, 0, 1, 0)).cumsum(2)


def gather_rows(table: Tensor, index: Tensor) -> Tensor:
    """``table`` (B, N, h) at ``index`` (B, ...) → (B, ..., h), with zeros where the index is −1."""
    batch, count, width = table.shape
    if count == 0:  # every index is −1
        return table.new_zeros(*index.shape, width)
    # One flat index_select: its backward is one index_add, several times faster than scatter with (…, h) indices.
    flat = index.clamp(min=0)
    if not tracing() and table.stride(0) == 0 and batch:
        rows = table[0]  # expanded over the batch: not copied
    else:
        rows = table.reshape(batch * count, width)
        flat = flat + (torch.arange(batch, device=index.device) * count).view(batch, *[1] * (index.dim() - 1))
    found = rows.index_select(0, flat.flatten()).view(*index.shape, width)
    return found.masked_fill((index < 0).unsqueeze(-1), 0)


def addends(table: Tensor, picks: Tensor) -> Tensor:
    """``gather_rows`` in the dtype to sum in."""
    return gather_rows(table, picks).to(accumulator(table.dtype))


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype to sum in: float32 at least."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def autocasting(like: Tensor) -> bool:
    """Whether autocast is on for the device of ``like``."""
    kind = like.device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def without_autocast(like: Tensor) -> AbstractContextManager[None]:
    """A context with autocast off, in which products keep the dtype of their factors."""
    return torch.autocast(like.device.type, enabled=False) if autocasting(like) else nullcontext()

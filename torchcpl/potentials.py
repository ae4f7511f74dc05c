"""Potentials and Selection: the two things everything else passes around.

Shapes, stated once for the whole library:

=================  ===========  =====================================================================
``unary``          (B, N)       θ, the score of every candidate
``stop``           (B,)         the score of the learned stop
``interaction``                 how a pick changes the scores of what is left (see ``interactions/``)
``mask``           (B, N)       True for a real candidate, False for padding
``order, target``  (B, T)       picked candidates, long, −1 after the end
=================  ===========  =====================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchcpl.checks import DTYPES, check_choice, check_count, check_finite, check_tensor, describe, validating

if TYPE_CHECKING:
    from torchcpl.interactions.base import Interaction

T = TypeVar("T")
SHOWN = 8  # rows in a notebook


def register_pytree(cls: type[T]) -> type[T]:
    """Make a dataclass a pytree node, for ``torch.export``, ``torch.func`` and ``tree_map``.

    Unflattening skips ``__init__``, whose checks refuse leaves that are no tensors (``in_dims`` of ``vmap``, shapes of
    ``torch.export``). A field that is None, or ``static`` by its metadata (a network), is part of the tree's structure.
    """
    static = [f.name for f in fields(cls) if f.metadata.get("static")]  # type: ignore[arg-type]
    dynamic = [f.name for f in fields(cls) if not f.metadata.get("static")]  # type: ignore[arg-type]

    def flatten(value: Any) -> tuple[list[Any], Any]:
        present = [name for name in dynamic if getattr(value, name) is not None]
        return [getattr(value, name) for name in present], (present, [getattr(value, name) for name in static])

    def unflatten(leaves: Any, structure: Any) -> Any:
        present, fixed = structure
        parts = dict.fromkeys(dynamic) | dict(zip([*present, *static], [*leaves, *fixed], strict=True))
        value = object.__new__(cls)
        for name, part in parts.items():
            object.__setattr__(value, name, part)
        return value

    pytree.register_pytree_node(cls, flatten, unflatten, serialized_type_name=f"torchcpl.{cls.__name__}")
    return cls


@register_pytree
@dataclass(frozen=True, eq=False, repr=False)
class Potentials:
    """Everything the selection process needs, made in parallel by an encoder and a head.

    The logit of candidate j after the picks S is ``unary[j] + Σ_{i∈S} W[j, i]``; ``interaction`` holds W in one
    of its forms.
    """

    unary: Tensor  # (B, N)
    stop: Tensor  # (B,)
    interaction: Interaction
    mask: Tensor = None  # type: ignore[assignment]  # (B, N); all True when not given

    def __post_init__(self) -> None:
        check_tensor("unary", self.unary, ("B", "N"), "float")
        batch, candidates = self.unary.shape
        check_tensor("stop", self.stop, (batch,), "float", like=self.unary)
        if self.mask is None:
            everyone = torch.ones(batch, candidates, dtype=torch.bool, device=self.unary.device)
            object.__setattr__(self, "mask", everyone)
        check_tensor("mask", self.mask, (batch, candidates), "bool", like=self.unary)
        expected = "an Interaction such as Dense(W) or LowRank(keys, values)"
        if not hasattr(self.interaction, "prefixes") or isinstance(self.interaction, type):  # a tensor has a shape too
            raise ValueError(f"interaction: expected {expected}, got {describe(self.interaction)}")
        shape = tuple(self.interaction.shape)
        if shape != (batch, candidates):
            raise ValueError(f"interaction: expected (B, N) = ({batch}, {candidates}) as in unary, got {shape}")

    @property
    def num_candidates(self) -> int:
        return self.unary.shape[1]

    def __len__(self) -> int:
        return self.unary.shape[0]

    def __getitem__(self, rows: Any) -> Potentials:
        """Some of the rows, kept as a batch: ``pot[2:3]``, ``pot[[0, 0, 1]]``, ``pot[keep]``."""
        if not isinstance(rows, slice):
            rows = row_index(rows, len(self), self.unary.device)
        return Potentials(self.unary[rows], self.stop[rows], self.interaction.rows(rows), self.mask[rows])

    def __repr__(self) -> str:
        dtype = str(self.unary.dtype).removeprefix("torch.")
        return f"Potentials(B={len(self)}, N={self.num_candidates}, {self.interaction}, {dtype}, {self.unary.device})"

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Potentials:
        """As ``Tensor.to``: another device or dtype. Masks stay boolean, and a network where it is."""
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        device = self.unary.device if device is None else as_device(device)
        if dtype is not None:
            check_choice("dtype", dtype, DTYPES["float"])
        return self._map(lambda part: part.to(device, dtype if part.is_floating_point() else None))

    def cpu(self) -> Potentials:
        return self.to("cpu")

    def half(self) -> Potentials:
        return self.to(torch.float16)

    def float(self) -> Potentials:
        return self.to(torch.float32)

    def detach(self) -> Potentials:
        """The same tensors, detached from the autograd graph."""
        return self._map(Tensor.detach)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Potentials:
        return Potentials(change(self.unary), change(self.stop), self.interaction.map(change), change(self.mask))

    def check(self) -> None:
        """Raise ``ValueError`` naming the first tensor that holds NaN or +inf. −inf is legal: it rules a choice out."""
        self.check_scores()
        for name, part in self.interaction.tensors.items():
            check_finite(f"interaction.{name}", part)

    def check_scores(self) -> None:
        """``check`` for ``unary`` and ``stop`` alone, which is cheap."""
        if not bool((self.unary < torch.inf).all()):  # false for NaN too
            check_finite("unary", self.unary.masked_fill(~self.mask, 0))
        if not bool((self.stop < torch.inf).all()):
            check_finite("stop", self.stop)

    def _repr_html_(self) -> str:
        """For notebooks: the stop's score and the highest-scoring candidates of the first rows."""
        rows = []
        for unary, stop, mask in zip(self.unary[:SHOWN], self.stop, self.mask, strict=False):
            score, best = unary.detach().float().masked_fill(~mask, -torch.inf).topk(min(5, len(unary)))
            highest = ", ".join(f"{i} ({s:.2f})" for i, s in zip(best, score, strict=True) if s > -torch.inf)
            rows.append((int(mask.sum()), f"{stop:.2f}", highest))
        title = f"Potentials, {len(self)} × {self.num_candidates}, {type(self.interaction).__name__}"
        return html_table(title, ("candidates", "stop", "highest θ"), rows, len(self))


def html_table(title: str, heads: tuple[str, ...], rows: list[tuple[Any, ...]], count: int) -> str:
    """The first of ``count`` rows as an HTML table."""
    lines = ["".join(f"<td>{cell}</td>" for cell in (number, *row)) for number, row in enumerate(rows)]
    rest = f"<p>and {count - len(rows):,} more</p>" if count > len(rows) else ""
    head = "".join(f"<th>{name}</th>" for name in ("row", *heads))
    return f"<b>{title}</b><table><tr>{head}</tr><tr>{'</tr><tr>'.join(lines)}</tr></table>{rest}"


def check_potentials(pot: Any) -> None:
    if not isinstance(pot, Potentials):
        raise ValueError(f"pot: expected Potentials, got {describe(pot)}")


def as_device(device: Any) -> torch.device:
    try:
        found = torch.device(device)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"device: expected a device such as 'cpu' or 'cuda', got {describe(device)}") from None
    try:
        torch.empty(0, device=found)
    except (AssertionError, NotImplementedError, RuntimeError):  # torch has another for every kind
        raise ValueError(f"device: expected one of this machine, got {describe(device)}") from None
    return found


def row_index(rows: Any, count: int, device: torch.device) -> Tensor:
    """Indices or a boolean mask of the rows of a batch, as a tensor (R,) or (B,)."""
    try:
        index = torch.as_tensor(rows, device=device)
    except (TypeError, ValueError, RuntimeError):
        index = torch.empty((), device=device)  # refused below
    if index.shape == (0,) and not isinstance(rows, Tensor):  # an empty list is of floats
        index = index.long()
    whole = index.dtype in (torch.int64, torch.int32) or (index.dtype == torch.bool and index.shape == (count,))
    if index.dim() != 1 or not whole:
        raise ValueError(f"rows: expected a slice, or indices or a mask of {count} rows, got {describe(rows)}")
    if index.dtype != torch.bool and validating(index) and bool(((index < -count) | (index >= count)).any()):
        raise ValueError(f"rows: expected indices of {count} rows, got {describe(rows)}")
    return index


@register_pytree
@dataclass(frozen=True, eq=False, repr=False)
class Selection:
    """What a decoder picked.

    ``log_prob`` is the exact log-probability of the selection under the process that was decoded, the stop
    included (see :func:`torchcpl.log_prob`): the sum of ``step_log_prob``, and that of the stop. Leading dimensions
    are the decoder's: (B, T), (S, B, T) for samples, (B, R, T) for beams.
    """

    indices: Tensor  # (..., T) long, in order of picking, −1 after the end
    lengths: Tensor  # (...)
    log_prob: Tensor  # (...)
    num_candidates: int | None = None
    weight: Tensor | None = None  # (...) only from stochastic_beam: p/q, which makes Σ weight·f unbiased
    step_log_prob: Tensor | None = None  # (..., T) log-probability of each pick when it was made, 0 after the end

    def mask(self, num_candidates: int | None = None) -> Tensor:
        """(..., N) True where a candidate was picked."""
        check_count("num_candidates", num_candidates, 0, optional=True)
        count = self.num_candidates if num_candidates is None else num_candidates
        if count is None:
            raise ValueError("num_candidates: expected the number of candidates N, got None")
        if self.indices.numel() and validating(self.indices) and int(self.indices.max()) >= count:
            raise ValueError(f"num_candidates: expected more than {int(self.indices.max())}, a pick, got {count}")
        return picked_mask(self.indices, count)

    def tolist(self) -> Any:
        """The picks as nested lists without padding: ``[[3, 0], [], [5]]`` for a batch of three."""

        def unpad(rows: Any) -> Any:
            if rows and isinstance(rows[0], list):
                return [unpad(row) for row in rows]
            return [i for i in rows if i >= 0]

        return unpad(self.indices.tolist())

    def __repr__(self) -> str:
        shape, device = tuple(self.indices.shape), self.indices.device
        if device.type == "meta" or self.indices.numel() > 64:
            return f"Selection(indices {shape}, {device})"
        log_prob = [round(value, 4) for value in self.log_prob.flatten().tolist()]
        return f"Selection(indices {shape}, {device}, picks={self.tolist()}, log_prob={log_prob})"

    def to(self, device: torch.device | str) -> Selection:
        device = as_device(device)
        return self.map(lambda part: part.to(device))

    def map(self, change: Callable[[Tensor], Tensor]) -> Selection:
        """The same selection with every tensor changed."""
        parts = {f.name: getattr(self, f.name) for f in fields(self)}  # no :=, which dynamo refuses
        return Selection(**{name: change(part) if isinstance(part, Tensor) else part for name, part in parts.items()})  # type: ignore[arg-type]

    def cpu(self) -> Selection:
        return self.to("cpu")

    def _repr_html_(self) -> str:
        """For notebooks: the picks of the first rows, in order, and their log-probability."""
        count = self.log_prob.numel()
        picks = self.indices.reshape(count, self.indices.shape[-1])[:SHOWN].tolist()
        rows = [
            (", ".join(str(i) for i in row if i >= 0) or "nothing", f"{log_prob:.2f}")
            for row, log_prob in zip(picks, self.log_prob.flatten(), strict=False)
        ]
        return html_table(f"Selection, {tuple(self.lengths.shape)}", ("picks", "log P"), rows, count)


def picked_mask(indices: Tensor, num_candidates: int) -> Tensor:
    """(..., T) picks with −1 padding to a (..., N) boolean mask."""
    # −1 is scattered into an extra column that is then dropped: no branch, no host synchronisation.
    slots = indices.where(indices >= 0, num_candidates)
    picked = torch.zeros(*indices.shape[:-1], num_candidates + 1, dtype=torch.bool, device=indices.device)
    return picked.scatter(-1, slots, True)[..., :num_candidates]


def picks_first(indices: Tensor) -> Tensor:
    """(..., T) the order of the places of ``indices`` (..., T) that puts the picks first, as they are, and −1 last."""
    return (indices < 0).to(torch.int8).argsort(dim=-1, stable=True)


def latest(picks: Tensor) -> Tensor:
    """(..., T+1) the latest of the first 0, 1, …, T ``picks`` (..., T), any of which may be −1; −1 for none."""
    padded = torch.nn.functional.pad(picks, (1, 0), value=-1)
    place = torch.arange(padded.shape[-1], device=picks.device).where(padded >= 0, 0).cummax(-1).values
    return padded.gather(-1, place)

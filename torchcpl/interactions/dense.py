"""W given as a matrix."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from torchcpl.checks import check_tensor
from torchcpl.interactions.base import Additive, State, accumulator, addends
from torchcpl.potentials import register_pytree


@register_pytree
@dataclass(frozen=True, eq=False, repr=False)
class Dense(Additive):
    """``W[b, j, i]`` is the effect on candidate j of having picked i: column i is added after pick i.

    ``stop_row[b, i]`` is the effect on the stop. Without it the stop's logit does not depend on the picks.
    """

    W: Tensor  # (B, N, N)
    stop_row: Tensor | None = None  # (B, N)

    def __post_init__(self) -> None:
        check_pairs("W", self.W, self.stop_row)

    # The state is what the picks have added to the logits: (B, K, N) and, with a stop_row, (B, K, 1).

    def steps(self, picks: Tensor) -> State:
        return with_stop(gather_columns(self.W, picks), self.stop_row, picks)

    def logits(self, state: State) -> tuple[Tensor, Tensor | None]:
        return state[0], state[1].squeeze(-1) if len(state) > 1 else None


def check_pairs(name: str, matrix: Tensor, stop_row: Tensor | None) -> None:
    """Raise unless ``matrix`` is (B, N, N) and ``stop_row`` (B, N) or None."""
    check_tensor(name, matrix, ("B", "N", "N"), "float")
    check_tensor(name, matrix, ("B", matrix.shape[2], matrix.shape[2]), "float")
    if stop_row is not None:
        check_tensor("stop_row", stop_row, (matrix.shape[0], matrix.shape[2]), "float", like=matrix)


def gather_columns(W: Tensor, picks: Tensor) -> Tensor:
    """Columns of W (B, N, N) at ``picks`` (B, ...) → (B, ..., N), zeros at −1, in the dtype to sum in."""
    flat = picks.clamp(min=0).flatten(1)  # (B, M)
    columns = W.transpose(1, 2).gather(1, flat.unsqueeze(-1).expand(-1, -1, W.shape[1]))
    columns = columns.view(*picks.shape, W.shape[1]).masked_fill((picks < 0).unsqueeze(-1), 0)
    return columns.to(accumulator(W.dtype))


def with_stop(added: Tensor, stop_row: Tensor | None, picks: Tensor) -> State:
    """What ``picks`` (B, ...) ``added`` to the candidates (B, ..., N), and what they add to the stop, (B, ..., 1)."""
    return (added,) if stop_row is None else (added, addends(stop_row.unsqueeze(-1), picks))

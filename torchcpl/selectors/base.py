"""The interface of a method: one row of the tables."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn

from torchcpl.potentials import Selection


class Method(nn.Module, ABC):
    """From encoded candidates to a loss, and to a selection.

    ``knob`` is the one number of a method that is tuned after training: a threshold, or a bias of the stop's logit.
    ``knobs`` are the values to try.
    """

    knob: float
    knobs: tuple[float, ...]

    def assign(self, features: Any, mask: Tensor, target: Tensor, points: Tensor, goals: Tensor) -> Tensor:
        """The candidate (B, T) trained for each target (B, T): the target itself, or one that is matched to it.

        ``points`` (B, N, c) and ``goals`` (B, T, c) are the positions of candidates and targets.
        """
        return target

    @abstractmethod
    def loss(self, features: Any, mask: Tensor, target: Tensor) -> Tensor:
        """The scalar to minimise.

        ``features`` (B, N, d) encoded candidates, or more that the method reads, ``mask`` (B, N), ``target`` (B, T)
        with −1 padding, as assigned.
        """

    @abstractmethod
    def potentials(self, features: Any, mask: Tensor) -> Any:
        """The parallel part of a prediction: `Potentials`, or a score (B, N) for each candidate."""

    @abstractmethod
    def pick(self, potentials: Any, max_len: int, knob: float | None = None) -> Selection:
        """The sequential part: the picks (B, T); ``knob`` overrides the method's own."""

    def select(self, features: Any, mask: Tensor, max_len: int, knob: float | None = None) -> Selection:
        """The picks (B, T)."""
        return self.pick(self.potentials(features, mask), max_len, knob)

    def answers(self, features: Tensor, mask: Tensor, max_len: int) -> tuple[Tensor, Tensor]:
        """The several answers of a method without `Potentials`: picks (B, K, T) and probabilities (B, K)."""
        indices = self.select(features, mask, max_len).indices.unsqueeze(1)
        return indices, features.new_ones(len(indices), 1)

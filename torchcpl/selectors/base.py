"""The interface of a method: one row of the tables."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn

from torchcpl.potentials import Selection


class Method(nn.Module, ABC):
    """From encoded candidates to a loss, and to a selection.

    ``knob`` is the one number a method leaves to be chosen after training: a threshold, or what is added to the stop's
    logit. ``knobs`` are the values worth trying.
    """

    knob: float
    knobs: tuple[float, ...]

    def assign(self, features: Any, mask: Tensor, target: Tensor, points: Tensor, goals: Tensor) -> Tensor:
        """The candidate (B, T) trained for each target (B, T): the target itself, or one that is matched to it.

        ``points`` (B, N, c) and ``goals`` (B, T, c) say where candidates and targets lie.
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
        """The sequential part: what is picked, (B, T); ``knob`` in place of the method's own."""

    def select(self, features: Any, mask: Tensor, max_len: int, knob: float | None = None) -> Selection:
        """What is picked, (B, T)."""
        return self.pick(self.potentials(features, mask), max_len, knob)

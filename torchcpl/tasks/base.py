"""What a task must say for itself: its model, and what the tables, times and reports ask of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sized
from typing import Any, Protocol

import torch
from torch import nn

from torchcpl.train import Task


class SelectionModel(nn.Module, ABC):
    """Encoder and method: ``model(batch)`` is the losses, ``model.select(inputs)`` the selection.

    A prediction is encoded and then decoded, so that the two can be timed apart.
    """

    @abstractmethod
    def encode(self, inputs: Any) -> Any:
        """All of a prediction that is parallel and not the method's: features (B, N, d) of the candidates."""

    @abstractmethod
    def decode(self, features: Any, inputs: Any, knob: float | None = None) -> Any:
        """What is selected, with ``lengths`` (B,), given the encoded inputs; ``knob`` in place of the method's own."""

    def select(self, inputs: Any, knob: float | None = None) -> Any:
        return self.decode(self.encode(inputs), inputs, knob)


class BenchmarkTask(Task, Protocol):
    """What is asked of a task beyond training it."""

    @property
    def device(self) -> torch.device: ...

    @property
    def ordered(self) -> bool:
        """Whether the order of the picks matters."""

    @property
    def reported(self) -> Sized:
        """The examples that the tables report on."""

    @property
    def chosen_on(self) -> Sized:
        """The examples that the checkpoint is chosen on: the reported ones, or some that were held out."""

    def build(self, pretrained: bool = True) -> Any:
        """A `SelectionModel`, from pretrained weights where the configuration names some and ``pretrained`` is set."""

    def examples(self, batch: int, limit: int) -> list[Any]:
        """Inputs of the first reported examples, ``batch`` at a time, up to ``limit`` times."""

    def report(self, model: Any, knob: float | None) -> dict[str, float]:
        """The metrics of the table on the reported examples."""

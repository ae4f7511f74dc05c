"""The interfaces of a task: its examples, its model, and what tables, timings and reports need beyond training."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sized
from operator import itemgetter
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from torchcpl.inference import map_tensors
from torchcpl.train import Task

E = TypeVar("E", bound="Examples")


class Examples:
    """Base of dataclasses whose fields are tensors with one row per example, or None."""

    def __len__(self) -> int:
        return len(next(iter(vars(self).values())))

    def to(self: E, device: str | torch.device) -> E:
        return map_tensors(self, lambda part: part.to(device))

    def split(self: E, size: int) -> Iterator[E]:
        """Consecutive batches of at most ``size`` examples."""
        for start in range(0, len(self), size):
            yield map_tensors(self, itemgetter(slice(start, start + size)))


class SelectionModel(nn.Module, ABC):
    """Encoder and method: ``model(batch)`` returns the losses, ``model.select(inputs)`` the selection.

    A prediction is ``encode``, then ``decode``, so that the two can be timed separately.
    """

    @abstractmethod
    def encode(self, inputs: Any) -> Any:
        """The encoder: features (B, N, d) of the candidates."""

    @abstractmethod
    def decode(self, features: Any, inputs: Any, knob: float | None = None) -> Any:
        """The selection, with ``lengths`` (B,), from encoded inputs; ``knob`` overrides the method's own."""

    def select(self, inputs: Any, knob: float | None = None) -> Any:
        return self.decode(self.encode(inputs), inputs, knob)


class BenchmarkTask(Task, Protocol):
    """What the benchmarks need of a task beyond training it."""

    @property
    def device(self) -> torch.device: ...

    @property
    def ordered(self) -> bool:
        """Whether the order of the picks matters."""

    @property
    def reported(self) -> Sized:
        """The examples that the tables report on."""

    def build(self) -> Any:
        """An untrained `SelectionModel`, on the pretrained weights that the configuration names."""

    def examples(self, batch: int, limit: int) -> list[Any]:
        """Inputs of the first reported examples, ``batch`` at a time, up to ``limit`` times."""

    def report(self, model: Any, knob: float | None) -> dict[str, float]:
        """The metrics of the table on the reported examples."""


def first_batches(examples: Any, batch: int, limit: int, what: str) -> list[Any]:
    """The first full batches of ``examples``, `Examples` or a tensor, up to ``limit`` of them."""
    limit = min(limit, len(examples) // batch)
    if not limit:
        raise ValueError(f"batch: expected at most {len(examples)}, {what}, got {batch}")
    return list(itertools.islice(examples.split(batch), limit))

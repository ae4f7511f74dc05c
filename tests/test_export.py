"""Head and greedy decoding in one exported graph: the picks of eager at any batch size and number of candidates."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchcpl as cpl
from torchcpl.head import KINDS

DIM = 6
SIZES = [(3, 7), (1, 7), (2, 1), (1, 1), (4, 2), (5, 30), (2, 3), (3, 12), (1, 50), (6, 5)]
OPTIONS: dict[str, dict[str, Any]] = {
    "dense": {},
    "lowrank": {"max_len": 5, "stop_bias": -0.5},
    "contextual": {"stop_threshold": 0.2},
    "coverage": {"max_len": 4, "min_len": 1},
    "recent": {},
}


class Model(nn.Module):
    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = cpl.CPLHead(DIM, 8, kind="lowrank" if kind == "dense" else kind, live_stop=True)
        self.dense, self.options = kind == "dense", options
        for weight in self.parameters():
            weight.data.mul_(2)

    def forward(self, features: Tensor, mask: Tensor, forbidden: Tensor) -> cpl.Selection:
        pot = self.head(features, mask)
        if self.dense:
            interaction = cpl.Dense(pot.interaction.dense(), pot.interaction.dense_stop())
            pot = cpl.Potentials(pot.unary, pot.stop, interaction, mask)
        return cpl.greedy(pot, constraints=[cpl.Forbid(forbidden)], **self.options)


def inputs(batch: int, n: int, seed: int = 0, min_len: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Ordinary ones, and the edges: all padded, a stop that comes at once or never."""
    gen = torch.Generator().manual_seed(seed)
    features = torch.randn(batch, n, DIM, generator=gen) * (0.1, 1.0, 3.0)[seed % 3]
    mask = torch.rand(batch, n, generator=gen) < (0.8 if seed % 5 else 0.0)
    forbidden = torch.rand(batch, n, generator=gen) < 0.1
    if min_len:
        mask[:], forbidden[:] = True, False
    return features, mask, forbidden


@cache
@torch.inference_mode()
def exported(kind: str) -> tuple[Model, Any]:
    """A model and its exported program; exporting takes seconds, so both runtimes share it."""
    model, batch, n = Model(kind, **OPTIONS[kind]).eval(), torch.export.Dim("batch"), torch.export.Dim("n")
    return model, torch.export.export(model, inputs(3, 7, 2), dynamic_shapes=[{0: batch, 1: n}] * 3)


def parity(model: Model, run: Callable[..., list[Tensor]], rounds: int = 5) -> None:
    """The same picks as eager, log-probabilities within 1e-4, over all sizes."""
    seen = set()
    for i, (batch, n) in enumerate(SIZES * rounds):
        given = inputs(batch, n, i, model.options.get("min_len", 0))
        want = model(*given)
        indices, lengths, log_prob, steps = run(*given)
        assert torch.equal(indices, want.indices), (batch, n, i)
        assert torch.equal(lengths, want.lengths)
        torch.testing.assert_close(log_prob, want.log_prob, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(steps, want.step_log_prob, rtol=1e-4, atol=1e-4)
        seen.update(want.lengths.tolist())
    assert len(seen) > 3


@pytest.mark.parametrize("kind", OPTIONS)
@torch.inference_mode()
def test_the_exported_program_picks_as_eager_does(kind: str) -> None:
    model, graph = exported(kind)
    program = graph.module()

    def run(*given: Tensor) -> list[Tensor]:
        found = program(*given)
        assert found.num_candidates == given[0].shape[1]
        return [found.indices, found.lengths, found.log_prob, found.step_log_prob]

    parity(model, run)


def served(program: Any, folder: Path) -> Callable[..., list[Tensor]]:
    """An exported program in ONNX Runtime."""
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    onnx = torch.onnx.export(program, dynamo=True, verbose=False)
    assert onnx is not None
    onnx.save(folder / "model.onnx")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(folder / "model.onnx", options)
    names = [given.name for given in session.get_inputs()]

    def run(*given: Tensor) -> list[Tensor]:
        found = session.run(None, {name: part.numpy() for name, part in zip(names, given, strict=True)})
        return [torch.from_numpy(part) for part in found if part.ndim]

    return run


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.filterwarnings("ignore")
@torch.inference_mode()
def test_onnx_runtime_picks_as_eager_does(kind: str, tmp_path: Path) -> None:
    model, program = exported(kind)
    parity(model, served(program, tmp_path))


class Decoder(nn.Module):
    """Potentials in, selection out: with whole numbers in, scores are exact and equals are equal."""

    def forward(self, unary: Tensor, stop: Tensor, keys: Tensor, values: Tensor) -> cpl.Selection:
        return cpl.greedy(cpl.Potentials(unary, stop, cpl.LowRank(keys, values)))


@pytest.mark.filterwarnings("ignore")
def test_of_equals_the_lowest_index_wins(tmp_path: Path) -> None:
    def whole(batch: int, n: int, seed: int) -> tuple[Tensor, ...]:
        gen = torch.Generator().manual_seed(seed)
        shapes = ((batch, n), (batch,), (batch, n, 4), (batch, n, 4))
        return tuple(torch.randint(-1, 2, shape, generator=gen).float() for shape in shapes)

    batch, n = torch.export.Dim("batch"), torch.export.Dim("n")
    shapes = ({0: batch, 1: n}, {0: batch}, {0: batch, 1: n}, {0: batch, 1: n})
    program = torch.export.export(Decoder(), whole(3, 7, 0), dynamic_shapes=shapes)
    module, run = program.module(), served(program, tmp_path)
    for i, (batch_size, size) in enumerate(SIZES * 5):
        given = whole(batch_size, size, i)
        want = Decoder()(*given).indices
        assert torch.equal(module(*given).indices, want)
        assert torch.equal(run(*given)[0], want)


def test_a_traced_decoder_is_refused() -> None:
    """Tracing would freeze the picks of the example."""
    model = Model("lowrank").eval().requires_grad_(False)
    for decode in (cpl.greedy, cpl.sample, cpl.beam, cpl.stochastic_beam):
        with pytest.raises(ValueError, match=r"torch\.export, got torch\.jit\.trace"):
            torch.jit.trace(lambda x, decode=decode: decode(model.head(x)).indices, torch.randn(2, 5, DIM))


def test_every_kind_of_the_head_is_tried() -> None:
    assert set(OPTIONS) == {"dense", *KINDS}


class Sampler(nn.Module):
    def forward(self, unary: Tensor, stop: Tensor, W: Tensor) -> Tensor:
        return cpl.sample(cpl.Potentials(unary, stop, cpl.Dense(W)), num_samples=20_000).indices


def test_an_exported_sampler_follows_the_law() -> None:
    """Every answer as often as its probability says, five standard errors off at most, and the same for one seed."""
    torch.manual_seed(0)
    args = torch.randn(1, 3), torch.randn(1), torch.randn(1, 3, 3)
    program = torch.export.export(Sampler(), args).module()
    torch.manual_seed(1)
    found = program(*args)  # (S, 1, 3)
    answers, counts = found[:, 0].unique(dim=0, return_counts=True)
    p = cpl.log_prob(cpl.Potentials(*args[:2], cpl.Dense(args[2]))[torch.zeros(len(answers)).long()], answers).exp()
    assert p.sum() > 0.99
    assert ((counts / len(found) - p).abs() < 5 * (p * (1 - p) / len(found)).sqrt()).all()
    torch.manual_seed(1)
    assert torch.equal(program(*args), found)


def test_an_exported_sampler_refuses_a_generator() -> None:
    class Seeded(nn.Module):
        def forward(self, unary: Tensor, stop: Tensor, W: Tensor) -> Tensor:
            return cpl.sample(cpl.Potentials(unary, stop, cpl.Dense(W)), generator=torch.Generator()).indices

    with pytest.raises(Exception, match="generator: expected None"):
        torch.export.export(Seeded(), (torch.randn(1, 3), torch.randn(1), torch.randn(1, 3, 3)))

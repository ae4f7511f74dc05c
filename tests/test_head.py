"""The head: shapes and masks, and everywhere it must run: autocast, float64, compile, export, DDP, checkpoints."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

import torchcpl as cpl

HEADS: dict[str, dict[str, Any]] = {
    "lowrank": {"kind": "lowrank"},
    "lowrank+stop": {"kind": "lowrank", "live_stop": True},
    "contextual": {"kind": "contextual"},
    "contextual+stop": {"kind": "contextual", "live_stop": True},
    "coverage": {"kind": "coverage"},
    "coverage+stop": {"kind": "coverage", "live_stop": True},
    "recent": {"kind": "recent"},
    "recent+stop": {"kind": "recent", "live_stop": True},
}
TARGET = torch.tensor([[3, 1, 0], [2, -1, -1]])


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Every test compiles for itself: dynamo counts recompilations across them."""
    yield
    torch._dynamo.reset()


def make(name: str, seed: int = 0, **options: Any) -> cpl.CPLHead:
    torch.manual_seed(seed)
    head = cpl.CPLHead(8, 16, **HEADS[name], **options)
    if head.context is not None:  # away from its start, where the network is the identity
        for parameter in head.context.parameters():
            nn.init.normal_(parameter, std=0.3)
    return head


def inputs(seed: int = 1) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(2, 5, 8), torch.tensor([[True] * 5, [True, True, True, False, False]])


def losses(pot: cpl.Potentials, target: Tensor) -> Tensor:
    return cpl.ordered_nll(pot, target) + cpl.subset_nll(pot, target, permutations=2)


@pytest.mark.parametrize("name", HEADS)
def test_shapes_and_mask(name: str) -> None:
    features, mask = inputs()
    head = make(name)
    pot = head(features, mask)
    assert pot.unary.shape == (2, 5)
    assert pot.stop.shape == (2,)
    assert pot.interaction.shape == (2, 5)
    assert pot.mask is mask
    assert head(features).mask.all()
    assert (pot.interaction.dense_stop() is not None) == name.endswith("+stop")
    assert (cpl.greedy(pot).mask() <= mask).all()


@pytest.mark.parametrize("name", HEADS)
def test_candidates_do_not_see_each_other(name: str) -> None:
    """A head works on each candidate alone: permuting the features permutes the potentials."""
    features, _ = inputs()
    head = make(name)
    index = torch.tensor([3, 0, 4, 1, 2])
    pot, moved = head(features), head(features[:, index])
    torch.testing.assert_close(moved.unary, pot.unary[:, index])
    torch.testing.assert_close(moved.stop, pot.stop)
    torch.testing.assert_close(moved.interaction.dense(), pot.interaction.dense()[:, index][:, :, index])
    assert pot.stop[0] == pot.stop[1]


@pytest.mark.parametrize("name", HEADS)
def test_every_parameter_learns(name: str) -> None:
    features, mask = inputs()
    head = make(name)
    losses(head(features, mask), TARGET).backward()
    for parameter, value in head.named_parameters():
        assert value.grad is not None, parameter
        assert value.grad.isfinite().all(), parameter
        # The last bias of the unary scores moves all choices alike, the stop too: nothing depends on it.
        assert value.grad.abs().sum() > 0 or parameter == "unary.bias", parameter


@pytest.mark.parametrize("activation", ["gelu", "relu", "silu"])
def test_activations_and_dropout(activation: str) -> None:
    features, _ = inputs()
    head = make("lowrank", activation=activation, dropout=0.5)
    assert not head(features).unary.equal(head(features).unary)
    head.eval()
    assert head(features).unary.equal(head(features).unary)


@pytest.mark.parametrize("live_stop", [False, True])
def test_contextual_starts_as_lowrank(live_stop: bool) -> None:
    features, mask = inputs()
    torch.manual_seed(0)
    lowrank = cpl.CPLHead(8, 16, live_stop=live_stop)
    torch.manual_seed(1)
    contextual = cpl.CPLHead(8, 16, kind="contextual", live_stop=live_stop)
    missing, unexpected = contextual.load_state_dict(lowrank.state_dict(), strict=False)
    assert not unexpected
    assert all(name.startswith("context.") for name in missing)
    a, b = lowrank(features, mask), contextual(features, mask)
    torch.testing.assert_close(cpl.ordered_nll(a, TARGET), cpl.ordered_nll(b, TARGET))
    torch.testing.assert_close(cpl.beam(a, 8, 8).log_prob, cpl.beam(b, 8, 8).log_prob)


@pytest.mark.parametrize("name", HEADS)
def test_float64(name: str) -> None:
    features, mask = inputs()
    head = make(name)
    wide = copy.deepcopy(head).double()
    pot = wide(features.double(), mask)
    assert pot.unary.dtype == torch.float64
    loss = cpl.ordered_nll(pot, TARGET)
    assert loss.dtype == torch.float64
    torch.testing.assert_close(loss.float(), cpl.ordered_nll(head(features, mask), TARGET))
    assert cpl.greedy(pot).log_prob.dtype == torch.float64


@pytest.mark.parametrize("name", HEADS)
def test_autocast(name: str) -> None:
    features, mask = inputs()
    head = make(name)
    plain = losses_of_seed(head(features, mask))
    with torch.autocast("cpu", torch.bfloat16):
        pot = head(features, mask)
        loss = losses_of_seed(pot)
        chosen = cpl.greedy(pot)
    assert pot.unary.dtype == torch.bfloat16
    assert loss.dtype == torch.float32  # sums are kept in float32 at least
    assert loss.item() == pytest.approx(plain.item(), rel=0.05)
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in head.parameters())
    assert chosen.log_prob.isfinite().all()
    # Decoding outside of the region works on what came out of it.
    assert cpl.sample(pot, 3).log_prob.isfinite().all()
    assert cpl.beam(pot, 3).log_prob.isfinite().all()


def losses_of_seed(pot: cpl.Potentials) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return cpl.ordered_nll(pot, TARGET) + cpl.subset_nll(pot, TARGET, 2, generator=generator)


@pytest.mark.parametrize("name", HEADS)
def test_compile_of_the_head(name: str) -> None:
    features, mask = inputs()
    head = make(name)
    compiled = torch.compile(head, fullgraph=True, backend="eager")
    pot, want = compiled(features, mask), head(features, mask)
    torch.testing.assert_close(pot.unary, want.unary)
    torch.testing.assert_close(pot.interaction.dense(), want.interaction.dense())
    torch.testing.assert_close(cpl.greedy(pot).log_prob, cpl.greedy(want).log_prob)


class Loss(nn.Module):
    """A head and one of the losses, in one graph."""

    def __init__(self, head: cpl.CPLHead, form: str) -> None:
        super().__init__()
        self.head, self.form = head, form

    def forward(self, features: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        pot = self.head(features, mask)
        if self.form == "ordered":
            return cpl.ordered_nll(pot, target)
        if self.form == "exact":
            return cpl.subset_nll(pot, target, exact=True)
        # Any number of draws has the same expectation; only the exact form can be compared.
        options: dict[str, Any] = {self.form: 3}
        return cpl.subset_nll(pot, target, **options)


@pytest.mark.parametrize("form", ["ordered", "exact", "permutations", "subsets"])
@pytest.mark.parametrize("name", HEADS)
def test_compile_of_head_and_loss(name: str, form: str) -> None:
    if name.startswith("recent") and form in ("exact", "subsets"):
        return  # which are of sets
    features, mask = inputs()
    model = Loss(make(name), form)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    loss = compiled(features, mask, TARGET)
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    if form in ("ordered", "exact"):
        got = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        plain = model(features, mask, TARGET)
        plain.backward()
        torch.testing.assert_close(loss, plain)
        for a, p in zip(got, model.parameters(), strict=True):
            torch.testing.assert_close(a, p.grad)


def test_compile_does_not_recompile_for_other_values() -> None:
    features, mask = inputs()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(Loss(make("lowrank"), "ordered"), fullgraph=True, backend=counter)
    for target in (TARGET, TARGET.flip(0), torch.full_like(TARGET, -1)):
        compiled(features, mask, target)
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", HEADS)
def test_export_of_the_head(name: str) -> None:
    """With a dynamic batch and number of candidates; the potentials come out of the exported program."""
    features, mask = inputs()
    head = make(name).eval()
    batch, n = torch.export.Dim("batch", min=1), torch.export.Dim("n", min=2)
    program = torch.export.export(
        head, (features, mask), dynamic_shapes={"features": {0: batch, 1: n}, "mask": {0: batch, 1: n}}
    )
    more, more_mask = torch.randn(3, 7, 8), torch.rand(3, 7) < 0.8
    got, want = program.module()(more, more_mask), head(more, more_mask)
    assert isinstance(got, cpl.Potentials)
    torch.testing.assert_close(got.unary, want.unary)
    torch.testing.assert_close(got.stop, want.stop)
    torch.testing.assert_close(got.interaction.dense(), want.interaction.dense())
    assert cpl.greedy(got).indices.equal(cpl.greedy(want).indices)


def test_export_without_a_mask_and_to_a_file(tmp_path: Path) -> None:
    features, _ = inputs()
    head = make("lowrank").eval()
    program = torch.export.export(head, (features,))
    torch.export.save(program, tmp_path / "head.pt2")
    loaded = torch.export.load(tmp_path / "head.pt2").module()
    torch.testing.assert_close(loaded(features).unary, head(features).unary)
    assert loaded(features).mask.all()


@pytest.mark.parametrize("name", HEADS)
def test_state_dict_round_trip(name: str, tmp_path: Path) -> None:
    features, mask = inputs()
    head = make(name, seed=0)
    torch.save(head.state_dict(), tmp_path / "head.pt")
    other = make(name, seed=5)
    other.load_state_dict(torch.load(tmp_path / "head.pt", weights_only=True))
    torch.testing.assert_close(losses_of_seed(head(features, mask)), losses_of_seed(other(features, mask)))


def _worker(rank: int, name: str, rendezvous: str, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    try:
        features, mask = inputs()
        model = nn.parallel.DistributedDataParallel(make(name))
        half = slice(rank, rank + 1)
        cpl.ordered_nll(model(features[half], mask[half]), TARGET[half]).backward()
        if rank == 0:
            torch.save([p.grad for p in model.parameters()], out)
    finally:
        dist.destroy_process_group()
    os._exit(0)  # gloo's threads at times abort a process that ends by itself, its work long done


def test_data_parallel_gradients_equal_those_of_the_whole_batch(tmp_path: Path) -> None:
    name = "contextual+stop"
    out = tmp_path / "grads.pt"
    spawn(_worker, (name, str(tmp_path / "rendezvous"), str(out)), nprocs=2)
    features, mask = inputs()
    head = make(name)
    cpl.ordered_nll(head(features, mask), TARGET).backward()
    for got, parameter in zip(torch.load(out), head.parameters(), strict=True):
        torch.testing.assert_close(got, parameter.grad, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", ["lowrank", "contextual"])
def test_an_empty_target_still_reaches_every_parameter(kind: str) -> None:
    """DDP waits for gradients of all parameters; a batch without picks must not leave some out."""
    features, mask = inputs()
    head = cpl.CPLHead(8, 16, kind=kind, live_stop=True)
    losses(head(features, mask), torch.full((2, 2), -1)).backward()
    assert all(p.grad is not None for p in head.parameters())


def test_pairs_join_the_coverage_of_their_ends() -> None:
    head = make("coverage+stop").double().eval()
    features, mask = torch.randn(2, 5, 8, dtype=torch.float64), torch.ones(2, 5, dtype=torch.bool)
    pairs = torch.randn(2, 5, 5, dtype=torch.float64)
    without, found = head(features, mask), head(features, mask, pairs)
    assert isinstance(found.interaction, cpl.DenseCoverage)
    assert isinstance(without.interaction, cpl.Coverage)
    picks = torch.arange(5).expand(2, 5).unsqueeze(-1)
    ends = without.interaction.steps(picks.squeeze(-1))[1].log().transpose(1, 2)  # c_ji of the ends alone
    torch.testing.assert_close(found.interaction.cover, ends + pairs)
    torch.testing.assert_close(found.interaction.dense_stop(), without.interaction.dense_stop())
    with pytest.raises(ValueError, match='pairs: expected none with kind="lowrank"'):
        make("lowrank").double()(features, mask, pairs)
    with pytest.raises(ValueError, match="pairs: expected"):
        head(features, mask, pairs[:, :4])
    with pytest.raises(ValueError, match="pairs: expected a tensor on cpu, got one on meta"):
        head(features, mask, pairs.to("meta"))

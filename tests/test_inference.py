"""Predictions for fixed shapes: the same results, clear refusals, and nothing that waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchcpl as cpl
from torchcpl import checks
from torchcpl.decoding import rollout
from torchcpl.inference import copied, leaves
from torchcpl.kernels import use
from torchcpl.kernels.streams import side_by_side
from torchcpl.tasks.subsets.task import SubsetsConfig, SubsetsModel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
on_cuda = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs CUDA: captured graphs")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


class Pair(NamedTuple):
    features: Tensor
    mask: Tensor


@dataclass(frozen=True)
class Scene:
    pair: Pair
    scale: float


class Model(nn.Module):
    """Features and mask to a selection, by any head."""

    def __init__(self, **head: Any) -> None:
        super().__init__()
        self.encode = nn.Linear(8, 16)
        self.head = cpl.CPLHead(16, 8, **head)

    def forward(self, pair: Pair) -> cpl.Selection:
        return cpl.greedy(self.head(self.encode(pair.features), pair.mask), 5)


def pair(batch: int = 3, n: int = 12, dtype: torch.dtype = torch.float32) -> Pair:
    mask = torch.rand(batch, n, device=DEVICE) > 0.2
    return Pair(torch.randn(batch, n, 8, device=DEVICE).to(dtype), mask)


def model(**head: Any) -> Model:
    return Model(**head).eval().to(DEVICE)


def test_a_selection_comes_back_as_one_and_is_the_eager_one() -> None:
    net = model()
    run = cpl.compile_for_inference(net, pair())
    for _ in range(3):
        given = pair()
        with torch.no_grad():
            expected = net(given)
        found = run(given)
        assert isinstance(found, cpl.Selection)
        assert found.indices.equal(expected.indices)
        assert found.lengths.equal(expected.lengths)
        assert found.log_prob.equal(expected.log_prob)
        assert found.num_candidates == 12
        assert not found.log_prob.requires_grad


def test_nested_structures_go_in_and_out() -> None:
    @dataclass(frozen=True)
    class Answer:
        parts: list[Tensor]
        named: dict[str, Tensor | None]
        scale: float

    def work(scene: Scene) -> Answer:
        scaled = scene.pair.features * scene.scale
        return Answer([scaled, scaled + 1], {"mask": ~scene.pair.mask, "none": None}, scene.scale)

    run = cpl.compile_for_inference(work, Scene(pair(), 2.0))
    given = Scene(pair(), 2.0)
    found = run(given)
    assert isinstance(found, Answer)
    assert found.parts[1].equal(given.pair.features * 2 + 1)
    assert found.named["mask"].equal(~given.pair.mask)  # type: ignore[union-attr]
    assert found.named["none"] is None
    assert found.scale == 2.0


def test_potentials_come_back_as_potentials() -> None:
    net = model(kind="contextual")
    run = cpl.compile_for_inference(lambda given: net.head(net.encode(given.features), given.mask), pair())
    given = pair()
    found = run(given)
    assert isinstance(found, cpl.Potentials)
    assert isinstance(found.interaction, cpl.Contextual)
    with torch.no_grad():
        assert cpl.greedy(found, 5).indices.equal(net(given).indices)


def test_a_method_and_the_weights_at_the_time_of_the_call() -> None:
    net = model()
    run = cpl.compile_for_inference(net.forward, pair())
    given = pair()
    before = run(given)
    with torch.no_grad():
        for weight in net.parameters():
            weight.copy_(torch.randn_like(weight))
        expected = net(given)
    after = run(given)
    assert after.log_prob.equal(expected.log_prob)
    assert not after.log_prob.equal(before.log_prob)


def test_the_example_is_not_written_to_and_results_are_kept() -> None:
    net = model()
    example = pair()
    kept = example.features.clone()
    run = cpl.compile_for_inference(net, example)
    first = run(pair())
    copies = first.indices.clone(), first.log_prob.clone()
    run(pair())
    assert first.indices.equal(copies[0])
    assert first.log_prob.equal(copies[1])
    assert example.features.equal(kept)
    assert all(weight.grad is None for weight in net.parameters())


@on_cuda
def test_without_a_copy_the_next_call_writes_over_the_result() -> None:
    run = cpl.compile_for_inference(model(), pair(), copy=False)
    first = run(pair())
    assert run(pair()).log_prob.data_ptr() == first.log_prob.data_ptr()


def test_an_input_that_needs_gradients_is_only_read() -> None:
    features = torch.randn(3, 12, 8, device=DEVICE, requires_grad=True)
    run = cpl.compile_for_inference(model(), pair())
    mask = torch.ones(3, 12, dtype=torch.bool, device=DEVICE)
    for _ in range(2):
        assert not run(Pair(features, mask)).log_prob.requires_grad


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "shape": (lambda: pair(4),
              r"input\[0\]\[0\]: expected a float32 tensor of shape \(3, 12, 8\) .*, got .* \(4, 12, 8\)"),
    "dtype": (lambda: pair(dtype=torch.float64), r"input\[0\]\[0\]: expected a float32 .*, got a float64"),
    "type": (lambda: Pair(torch.zeros(3, 12, 8, device=DEVICE), None), r"input\[0\]\[1\]: expected a bool .* NoneType"),  # type: ignore[arg-type]
    "structure": (lambda: pair().features,
                  r"the example's structure \(input\[0\]\[0\], input\[0\]\[1\]\), got input\[0\]$"),
    "device": (lambda: Pair(pair().features.to("meta"), pair().mask), r"input\[0\]\[0\]: expected a tensor on .* meta"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_other_inputs_are_refused(name: str) -> None:
    run = cpl.compile_for_inference(model(), pair())
    given, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        run(given())


def test_other_constants_are_refused() -> None:
    run = cpl.compile_for_inference(lambda scene: scene.pair.features * scene.scale, Scene(pair(), 2.0))
    with pytest.raises(ValueError, match=r"input\[0\].scale: expected 2.0 as in the example, got float 3.0"):
        run(Scene(pair(), 3.0))


def test_what_cannot_be_compiled_is_refused() -> None:
    with pytest.raises(ValueError, match="evaluation mode"):
        cpl.compile_for_inference(Model().to(DEVICE), pair())
    with pytest.raises(ValueError, match="evaluation mode"):
        cpl.compile_for_inference(Model().to(DEVICE).forward, pair())
    with pytest.raises(ValueError, match=r"dtype: expected one of torch.float32, .*, got torch.float64"):
        cpl.compile_for_inference(model(), pair(), dtype=torch.float64)
    with pytest.raises(ValueError, match="tensors on one device, got no tensors"):
        cpl.compile_for_inference(lambda scale: scale, 2.0)
    with pytest.raises(ValueError, match="tensors on one device"):
        cpl.compile_for_inference(lambda both: both[0], (torch.zeros(1, device=DEVICE), torch.zeros(1, device="meta")))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_that_of_autocast(dtype: torch.dtype) -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)).eval().to(DEVICE)
    run = cpl.compile_for_inference(net, pair().features, dtype=dtype)
    given = pair().features
    with torch.no_grad(), torch.autocast(DEVICE.type, dtype):
        expected = net(given)
    found = run(given)
    assert found.dtype == dtype
    assert found.equal(expected)
    assert all(weight.dtype == torch.float32 for weight in net.parameters())


@pytest.mark.parametrize("call", ["module", "method", "partial"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["lowrank", "contextual", "coverage", "recent"])
def test_precise_parts_stay_in_float32(kind: str, dtype: torch.dtype, call: str) -> None:
    net = model(kind=kind)
    work = {"module": net, "method": net.forward, "partial": partial(net.forward)}[call]
    run = cpl.compile_for_inference(work, pair(), dtype=dtype)
    given = pair()
    with torch.no_grad():
        with torch.autocast(DEVICE.type, dtype):
            encoded = net.encode(given.features)
        expected = cpl.greedy(net.head(encoded.float(), given.mask), 5)
        everything = net(given)
    found = run(given)
    assert encoded.dtype == dtype
    # On CUDA in bfloat16 the head's products are of TF32.
    near = 1e-2 if DEVICE.type == "cuda" and dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found.log_prob, expected.log_prob, rtol=near, atol=near)
    assert found.log_prob.dtype == torch.float32
    assert not found.log_prob.equal(everything.log_prob)
    assert torch.get_float32_matmul_precision() == "highest"


def test_copies_of_a_result() -> None:
    """Of every type, empty and expanded ones too; other values are kept."""
    given = {
        "long": torch.arange(6).view(2, 3).T,
        "float": [torch.randn(4), torch.randn(()), torch.zeros(0, 2), torch.ones(1).expand(5)],
        "more": (torch.tensor([True]), "words", None, 3),
    }
    found = copied(given)
    assert found["more"][1:] == ("words", None, 3)
    before, after = (leaves(value).items() for value in (given, found))
    for (place, x), (same_place, y) in zip(before, after, strict=True):
        assert place == same_place
        if isinstance(x, Tensor):
            assert y.equal(x)
            assert y.dtype == x.dtype
            assert y.numel() == 0 or y.data_ptr() != x.data_ptr()


class Paired(nn.Sequential):
    paired = True


def test_paired_layers_have_sixteen_digits_and_only_in_bfloat16() -> None:
    net = Paired(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 32, bias=False)).eval().to(DEVICE)
    given = torch.randn(5, 7, 64, device=DEVICE)
    with torch.no_grad():
        exact = deepcopy(net).double()(given.double())

    def error(**options: Any) -> float:
        found = cpl.compile_for_inference(net, given, **options)(given)
        return float((found.double() - exact).abs().max())

    assert error(dtype=torch.bfloat16) < 2e-5
    assert error(dtype=torch.bfloat16, precise=False) > 1e-3
    assert error(dtype=torch.float16) > 1e-4
    for shape in ((5, 7), (5,), (), (0, 3)):
        given = torch.randn(*shape, 64, device=DEVICE)
        assert cpl.compile_for_inference(net, given, dtype=torch.bfloat16)(given).shape == (*shape, 32)
    assert all(isinstance(layer, nn.Linear | nn.Tanh) for layer in net)


class Tenfold(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 10 * super().forward(x)


class Code(nn.Module):
    """Takes nothing."""

    precise = True

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Linear(1, 16)

    def forward(self) -> Tensor:
        return self.places(torch.ones(12, 1, device=self.places.weight.device))


class Odd(nn.Module):
    """Layers that are called by other names, shared, hooked, or read by others."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.code = Code()
        self.tied = nn.Linear(8, 16)
        self.tied.weight = self.first.weight
        self.tied.precise = True  # type: ignore[assignment]
        hooked = nn.Linear(16, 16)
        hooked.register_forward_hook(lambda layer, given, out: 3 * out)
        self.inner = Paired(Tenfold(16, 16), hooked, nn.TransformerEncoderLayer(16, 2, 16, 0.0, batch_first=True))
        self.score = Code()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) + self.tied(x) + self.code()
        return self.inner(x).sum(-1, keepdim=True) + self.score.places(x[..., :1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_odd_models_are_halved_too(dtype: torch.dtype) -> None:
    net = Odd().eval().to(DEVICE)
    given = torch.randn(2, 12, 8, device=DEVICE)
    with torch.no_grad():
        expected = net(given)
    run = cpl.compile_for_inference(net, given, dtype=dtype)
    torch.testing.assert_close(run(given).float(), expected, rtol=0.02, atol=0.2)


def test_a_copy_of_a_compiled_model_is_another() -> None:
    net = Odd().eval()
    given = torch.randn(2, 12, 8)
    run = cpl.compile_for_inference(net, given, dtype=torch.bfloat16)
    expected, copy = run(given), deepcopy(run)
    with torch.no_grad():
        for weight in (*run.model.parameters(), *run.model.buffers()):  # type: ignore[attr-defined]
            weight.zero_()
    assert copy(given).equal(expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_without_precise_parts_everything_is_that_of_autocast(dtype: torch.dtype) -> None:
    net = model()
    run = cpl.compile_for_inference(net, pair(), dtype=dtype, precise=False)
    given = pair()
    with torch.no_grad(), torch.autocast(DEVICE.type, dtype):
        expected = net(given)
    found = run(given)
    assert found.indices.equal(expected.indices)
    assert found.log_prob.equal(expected.log_prob)


def test_what_was_changed_for_a_prediction_is_as_before_after_an_error() -> None:
    calls: list[int] = []

    def breaks(given: Pair) -> Tensor:
        calls.append(1)
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        cpl.compile_for_inference(breaks, pair(), dtype=torch.bfloat16)(pair())
    assert calls
    assert not torch.is_autocast_enabled(DEVICE.type)
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("kind", ["lowrank", "coverage", "recent"])
def test_autocast_rounds_no_product_of_potentials_in_float32(kind: str) -> None:
    net = model(kind=kind, live_stop=True)
    with torch.no_grad():
        pot = net.head(torch.randn(3, 12, 16, device=DEVICE))
        order = cpl.greedy(pot, 5).indices
        for mode in ("auto", "plain"):
            with use(mode):
                expected, found = cpl.greedy(pot, 5), cpl.ordered_nll(pot, order)
                with torch.autocast(DEVICE.type, torch.bfloat16):
                    assert cpl.greedy(pot, 5).log_prob.equal(expected.log_prob)
                    assert cpl.ordered_nll(pot, order).equal(found)


# The subsets task: each method and kind, as it is decoded


METHODS: dict[str, dict[str, Any]] = {
    "cpl": {},
    "live stop": {"live_stop": True},
    "stop threshold": {"stop_rule": "threshold"},
    "contextual": {"kind": "contextual"},
    "coverage, stop threshold": {"kind": "coverage", "stop_rule": "threshold"},
    "recent": {"kind": "recent", "live_stop": True},
    "pointer": {"method": "pointer"},
    "pointer, no cache": {"method": "pointer", "pointer_cache": False},
    "threshold": {"method": "threshold"},
}


def subsets(**options: Any) -> Callable[[Pair], cpl.Selection]:
    config = SubsetsConfig(dim=16, layers=1, heads=2, ffn=16, hidden=8, max_len=40, **options)
    net = SubsetsModel(config, torch.randn(20, 8)).eval().to(DEVICE)

    def select(given: Pair) -> cpl.Selection:
        encoded = net.encoder(net.input((given.features - net.shift) / net.scale), given.mask)
        return net.method.select(encoded, given.mask, net.max_len)

    return select


@pytest.mark.parametrize("name", METHODS)
def test_every_method_predicts_as_it_does_eagerly(name: str) -> None:
    select = subsets(**METHODS[name])
    run = cpl.compile_for_inference(select, pair(2, 50))
    given = pair(2, 50)
    with torch.no_grad():
        expected = select(given)
    found = run(given)
    assert found.indices.equal(expected.indices)
    torch.testing.assert_close(found.log_prob, expected.log_prob, rtol=1e-5, atol=1e-5)


class NoAnswers(TorchDispatchMode):
    """Refuses every operation whose outcome, or its shape, the host would have to wait for."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if name in self.WAITING:
            raise AssertionError(f"{name} waits for the device")
        found = func(*args, **(kwargs or {}))
        if name == "_to_copy" and found.device != args[0].device:
            raise AssertionError("a copy from another device waits for it")
        if name == "index" and any(index is not None and index.dtype == torch.bool for index in args[1]):
            raise AssertionError("a boolean index waits for the device")
        return found


@contextmanager
def pretended() -> Iterator[None]:
    """As if a graph were captured, where there may be no device to capture one."""
    with pytest.MonkeyPatch.context() as patched, NoAnswers(), use("plain"):
        for room in (checks, rollout):
            patched.setattr(room, "capturing", lambda: True)
        yield


@pytest.mark.parametrize("name", METHODS)
def test_a_prediction_asks_for_no_value_while_it_is_captured(name: str) -> None:
    select, given = subsets(**METHODS[name]), pair(2, 50)
    with torch.no_grad(), pretended():
        select(given)


def test_constraints_ask_for_no_value_while_they_are_captured() -> None:
    given = pair(2, 50)
    everyone = torch.ones(2, 50, dtype=torch.bool, device=DEVICE)
    pot = model().head(torch.randn(2, 50, 16, device=DEVICE), everyone)
    some = torch.zeros_like(everyone)
    some[:, :3] = True
    cost = given.features[..., 0].abs()
    limit = torch.full((2,), 30.0, device=DEVICE)
    lists = torch.arange(50, device=DEVICE).view(50, 1).expand(50, 2).add(1).clamp(max=49)
    for rules in (
        {"constraints": [cpl.Require(some), cpl.Forbid(some.roll(5, 1)), cpl.Budget(cost, limit)]},
        {"constraints": [cpl.Adjacent(lists), cpl.Require(some)]},
        {"min_len": 3, "stop_bias": torch.ones(2, device=DEVICE)},
    ):
        with pretended():
            found = cpl.greedy(pot, 40, **rules)  # type: ignore[arg-type]
            cpl.sample(pot, 2, max_len=5, **rules)  # type: ignore[arg-type]
        assert found.indices.shape == (2, 40)


@pytest.mark.parametrize("kind", ["lowrank", "contextual", "coverage"])
def test_losses_and_searches_copy_nothing_from_the_host_while_they_are_captured(kind: str) -> None:
    """On the meta device, which is never the host's."""
    with torch.device("meta"):
        pot = cpl.CPLHead(16, 8, kind=kind)(torch.randn(2, 6, 16))
    target = torch.zeros(2, 3, dtype=torch.long, device="meta")
    with pretended():
        for options in ({}, {"subsets": 2}, {"exact": True}):
            assert cpl.subset_nll(pot, target, **options).shape == ()  # type: ignore[arg-type]
        assert cpl.ordered_nll(pot, target).shape == ()
        assert cpl.set_nll(pot, target, exact=False).shape == ()
        assert cpl.beam(pot, 4, 2).indices.shape == (2, 2, 6)
        assert cpl.stochastic_beam(pot, 4).indices.shape == (4, 2, 6)


def test_the_same_calls_do_ask_when_nothing_is_captured() -> None:
    """So that the tests above can fail."""
    pot = model().head(torch.randn(2, 50, 16, device=DEVICE))
    with pytest.raises(AssertionError, match="waits"), NoAnswers(), use("plain"):
        cpl.greedy(pot, 40, min_len=3)


@on_cuda
@pytest.mark.parametrize("kind", ["lowrank", "contextual", "coverage", "recent"])
def test_decoding_does_not_make_the_host_wait(kind: str) -> None:
    """31 steps, before the first look at whether all have stopped; by the kernels and without them."""
    net, given = model(kind=kind), pair(2, 50)
    for mode in ("auto", "plain"):
        with use(mode), torch.no_grad():
            pot = net.head(net.encode(given.features), given.mask)
            cpl.greedy(pot, 31)
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                cpl.greedy(pot, 31)
                cpl.sample(pot, 4, max_len=31)
            finally:
                torch.cuda.set_sync_debug_mode("default")


def test_side_by_side_on_the_cpu_is_one_after_the_other() -> None:
    said: list[int] = []
    assert side_by_side(lambda: said.append(1), lambda: said.append(2)) == [None, None]
    assert said == [1, 2]


@on_cuda
def test_branches_of_a_graph_wait_for_what_they_read_and_are_waited_for() -> None:
    a, b = torch.randn(2, 512, 512, device="cuda")

    def both(x: Tensor) -> Tensor:
        y = x @ a
        one, other = side_by_side(lambda: y @ b, lambda: (y @ a) @ b)
        return one + other

    run = cpl.compile_for_inference(both, a)
    for _ in range(20):
        x = torch.randn(512, 512, device="cuda")
        torch.testing.assert_close(run(x), both(x))


@pytest.mark.parametrize(("dtype", "least"), [(torch.bfloat16, 0.9), (torch.float16, 0.98)])
def test_most_selections_are_the_same_in_half_precision(dtype: torch.dtype, least: float) -> None:
    net = model()
    given = pair(2000, 12)
    found = cpl.compile_for_inference(net, given, dtype=dtype)(given)
    with torch.no_grad():
        expected = net(given)
    # Untrained scores lie closer together than trained ones, so more of them tie.
    assert float((found.indices == expected.indices).all(-1).float().mean()) > least


def test_several_arguments() -> None:
    head = cpl.CPLHead(8, 16).eval().to(DEVICE)
    features, mask = torch.randn(2, 5, 8, device=DEVICE), torch.rand(2, 5, device=DEVICE) < 0.7
    run = cpl.compile_for_inference(head, features, mask)
    other = torch.randn(2, 5, 8, device=DEVICE)
    torch.testing.assert_close(run(other, mask).unary, head(other, mask).unary)
    with pytest.raises(
        ValueError, match=r"expected the example's structure \(input\[0\], input\[1\]\), got input\[0\]"
    ):
        run(other)


class Bags(Model):
    def forward(self, features: Tensor, mask: Tensor) -> cpl.Selection:  # type: ignore[override]
        return super().forward(Pair(features, mask))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["lowrank", "contextual", "coverage", "recent"])
def test_buckets_select_as_eager_does_at_any_size(kind: str, dtype: torch.dtype) -> None:
    net = Bags(kind=kind).eval().to(DEVICE)
    run = cpl.compile_for_inference(net, *pair(3, 12), dtype=dtype, buckets=(32, 4, 16))
    plain = cpl.compile_for_inference(net, *pair(3, 12), dtype=dtype)
    for pads in (True, run.pads):  # as on CUDA, and as on this device  # type: ignore[attr-defined]
        run.pads = pads  # type: ignore[attr-defined]
        for batch, n in ((3, 12), (1, 1), (2, 4), (3, 5), (3, 16), (1, 17), (2, 32), (3, 3), (1, 12)):
            given = pair(batch, n)
            found, expected = run(*given), plain.like(*given)(*given)  # type: ignore[attr-defined]
            assert found.indices.equal(expected.indices)
            assert found.lengths.equal(expected.lengths)
            assert found.num_candidates == n
            assert found.mask().equal(expected.mask())
            near = 1e-5 if dtype == torch.float32 else 1e-2
            torch.testing.assert_close(found.log_prob, expected.log_prob, rtol=near, atol=near)
            torch.testing.assert_close(found.step_log_prob, expected.step_log_prob, rtol=near, atol=near)
    assert sorted(run.graphs) == [4, 16, 32]  # type: ignore[attr-defined]


def test_what_does_not_fit_the_buckets_is_refused() -> None:
    net = Bags().eval().to(DEVICE)
    run = cpl.compile_for_inference(net, *pair(3, 12), buckets=[16])
    said = r"at most 3 rows, .* of 16 candidates, .*, got 4 of 2"
    with pytest.raises(ValueError, match=said):
        run(*pair(4, 2))
    with pytest.raises(ValueError, match="at most 3 rows"):
        run(*pair(1, 17))
    with pytest.raises(ValueError, match=r"expected the arguments features \(B, N, d\) and mask \(B, N\)"):
        run(pair().features)
    with pytest.raises(ValueError, match="which padding needs"):
        cpl.compile_for_inference(net, pair(), buckets=[16])
    with pytest.raises(ValueError, match="buckets: expected an integer of at least 1, got int 0"):
        cpl.compile_for_inference(net, *pair(), buckets=[0, 3])
    with pytest.raises(ValueError, match="buckets: expected numbers of candidates"):
        cpl.compile_for_inference(net, *pair(), buckets=())
    padded = cpl.compile_for_inference(net.head, torch.zeros(1, 3, 16, device=DEVICE), pair(1, 3).mask, buckets=[4])
    padded.pads = True  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="a model that returns a Selection, got Potentials"):
        padded(torch.zeros(1, 3, 16, device=DEVICE), pair(1, 3).mask)

"""The decoding kernels against a loop in float64, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from ways import KINDS, SECOND, WAY_IDS, WAYS, double, potentials, two_matrices

import torchcpl as cpl
from torchcpl.constraints import Rules
from torchcpl.kernels import dispatch, greedy_plan, greedy_triton, use
from torchcpl.kernels.greedy_plan import Plan


def ways_for(kind: str) -> list[Plan]:
    return WAYS if kind == "lowrank" else [way for way in WAYS if way.kernel != "factored"]


CASES = [
    pytest.param(kind, way, id=f"{kind}-{name}")
    for kind in KINDS
    for way, name in zip(WAYS, WAY_IDS, strict=True)
    if way in ways_for(kind)
]

# One of each kernel's branches, for what does not depend on the rest.
FEW = [case for case in CASES if case.id in ("dense-block-64-1", "dense-tiles-16-1", "lowrank-factored-16-2")]


def loop(
    pot: cpl.Potentials,
    max_len: int | None = None,
    min_len: int = 0,
    stop_bias: Any = 0.0,
    forbid: Tensor | None = None,
    stop_threshold: float | None = None,
) -> tuple[list[list[int]], list[float], list[list[float]]]:
    """One row and one pick at a time, in float64: the picks, their log-probability, and that of each."""
    everyone, scores, steps = [], [], []
    for b in range(len(pot)):
        W = pot.interaction.rows([b])
        if isinstance(W, cpl.Dense):
            effect, stop_effect = W.W[0].double(), W.stop_row
            stop_effect = None if stop_effect is None else stop_effect[0].double()
        else:
            assert isinstance(W, cpl.LowRank)
            root = math.sqrt(W.keys.shape[2])
            effect = W.keys[0].double() @ W.values[0].double().T / root
            stop_effect = None if W.stop_key is None else W.values[0].double() @ W.stop_key[0].double() / root
        logits = pot.unary[b].double().clone()
        bias = stop_bias[b] if isinstance(stop_bias, Tensor) and stop_bias.dim() else stop_bias
        stop = float(pot.stop[b].double() + bias)
        free = pot.mask[b].clone()
        if forbid is not None:
            free &= ~(forbid[b] if forbid.dim() > 1 else forbid)
        picks: list[int] = []
        gains: list[float] = []
        score = 0.0
        while len(picks) < (len(free) if max_len is None else min(max_len, len(free))):
            left = [i for i in range(len(free)) if free[i] and logits[i] > -math.inf]
            if not left:
                break
            best = max(left, key=lambda i: (float(logits[i]), -i))
            may_stop = len(picks) >= min_len
            terms = [float(logits[i]) for i in left] + ([stop] if may_stop else [])
            norm = max(terms) + math.log(math.fsum(math.exp(x - max(terms)) for x in terms))
            stops = stop - norm >= math.log(stop_threshold) if stop_threshold else stop > float(logits[best])
            if may_stop and stops:
                score += stop - norm
                break
            gains.append(float(logits[best]) - norm)
            score += gains[-1]
            picks.append(best)
            free[best] = False
            logits = logits + effect[:, best]
            if stop_effect is not None:
                stop += float(stop_effect[best])
        everyone.append(picks)
        scores.append(score)
        steps.append(gains)
    return everyone, scores, steps


def check(pot: cpl.Potentials, way: Plan, **asked: Any) -> None:
    """The kernel's picks and scores are the loop's; nothing of the output is left unwritten."""
    expected, scores, steps = loop(pot, **asked)
    options = dict(asked)
    threshold = options.pop("stop_threshold", None)
    forbid = options.pop("forbid", None)
    rules = Rules(pot, **options, constraints=[] if forbid is None else [cpl.Forbid(forbid)])
    found = greedy_triton.decode(pot, rules, way, stop_threshold=threshold)
    assert found.indices.shape == (len(pot), 1, rules.max_len)
    assert found.indices.dtype == found.lengths.dtype == torch.long
    assert [row[0] for row in found.tolist()] == expected
    assert found.lengths[:, 0].tolist() == [len(picks) for picks in expected]
    padding = torch.arange(rules.max_len, device=found.indices.device) >= found.lengths.unsqueeze(-1)
    assert bool((found.indices[padding] == -1).all())
    torch.testing.assert_close(found.log_prob[:, 0].double().cpu(), torch.tensor(scores).double(), rtol=2e-6, atol=2e-6)
    assert found.step_log_prob is not None
    for row, gains in zip(found.step_log_prob[:, 0].double().cpu(), steps, strict=True):
        wanted = torch.tensor([*gains, *[0.0] * (rules.max_len - len(gains))]).double()
        torch.testing.assert_close(row, wanted, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(("kind", "way"), CASES)
@pytest.mark.parametrize("live", [False, True])
def test_picks_and_scores_are_the_loops(kind: str, way: Plan, live: bool, device: torch.device) -> None:
    check(potentials(device, kind, live=live), way, max_len=6, stop_bias=-1.0)


@pytest.mark.parametrize(("kind", "way"), FEW)
@pytest.mark.parametrize(
    "asked",
    [
        {"max_len": 5, "min_len": 3, "stop_bias": 6.0},
        {"max_len": 4, "min_len": 4},
        {"max_len": 0},
        {"stop_bias": -math.inf, "max_len": 4},
        {"max_len": 6, "stop_threshold": 0.2},
        {"max_len": 6, "stop_threshold": 0.02, "min_len": 1},
    ],
    ids=str,
)
def test_limits(kind: str, way: Plan, asked: dict[str, Any], device: torch.device) -> None:
    check(potentials(device, kind, batch=1), way, **asked)


@pytest.mark.parametrize(("kind", "way"), CASES)
def test_bias_per_row_and_forbidden_candidates(kind: str, way: Plan, device: torch.device) -> None:
    pot = potentials(device, kind)
    bias = torch.tensor([-3.0, 2.0], device=device)
    forbid = torch.rand(2, 37, device=device) < 0.5
    check(pot, way, max_len=5, stop_bias=bias, forbid=forbid)
    check(pot, way, max_len=5, stop_bias=torch.tensor(-1.0, device=device), forbid=forbid[0])


@pytest.mark.parametrize("way", WAYS, ids=WAY_IDS)
@pytest.mark.parametrize("n", [1, 16, 17, 64])
def test_sizes_around_the_block(way: Plan, n: int, device: torch.device) -> None:
    """All candidates are picked where there are few: what is left to choose in the end is the stop, for certain."""
    check(potentials(device, n=n, batch=1, masked=n > 1), way, max_len=3, stop_bias=-20.0)


@pytest.mark.parametrize("way", WAYS, ids=WAY_IDS)
@pytest.mark.parametrize("hidden", [1, 32, 70])
def test_hidden_sizes(way: Plan, hidden: int, device: torch.device) -> None:
    check(potentials(device, hidden=hidden, batch=1), way, max_len=4, stop_bias=-2.0)


@pytest.mark.parametrize("way", WAYS, ids=WAY_IDS)
def test_padding_may_hold_anything(way: Plan, device: torch.device) -> None:
    """A row without a single candidate, NaN where nothing is read, and logits that rule a candidate out."""
    pot = potentials(device, batch=3)
    assert isinstance(pot.interaction, cpl.LowRank)
    mask = pot.mask.clone()
    mask[1] = False
    unary = pot.unary.clone()
    unary[2, mask[2]] = torch.where(torch.arange(int(mask[2].sum()), device=device) < 3, unary[2, mask[2]], -math.inf)
    clean = cpl.Potentials(unary, pot.stop - 9, pot.interaction, mask)
    check(clean, way, max_len=6)
    keys = pot.interaction.keys.masked_fill(~mask.unsqueeze(-1), math.nan)
    dirty = cpl.Potentials(
        unary.masked_fill(~mask, math.nan), pot.stop - 9, cpl.LowRank(keys, pot.interaction.values), mask
    )
    without = cpl.Potentials(unary, pot.stop - 9, cpl.LowRank(pot.interaction.keys, pot.interaction.values), mask)
    rules = Rules(clean, 6)
    assert greedy_triton.decode(dirty, rules, way).tolist() == greedy_triton.decode(without, rules, way).tolist()


@pytest.mark.parametrize(("kind", "way"), CASES)
def test_of_equals_the_first_wins_and_a_candidate_before_the_stop(kind: str, way: Plan, device: torch.device) -> None:
    n = 37
    zeros = torch.zeros(1, n, 4, device=device)
    W = cpl.Dense(torch.zeros(1, n, n, device=device)) if kind == "dense" else cpl.LowRank(zeros, zeros)
    unary = torch.zeros(1, n, device=device)
    unary[0, [5, 20, 33]] = 1.0
    unary[0, 7] = -0.0
    pot = cpl.Potentials(unary, torch.zeros(1, device=device), W)
    found = greedy_triton.decode(pot, Rules(pot, 7), way)
    assert found.tolist() == [[[5, 20, 33, 0, 1, 2, 3]]]


@pytest.mark.parametrize(("kind", "way"), CASES)
def test_strides_and_offsets(kind: str, way: Plan, device: torch.device) -> None:
    """Slices of larger tensors, transposed, expanded: read where they lie."""
    batch, n, hidden = 2, 37, 5
    unary = torch.randn(n, 2 * batch + 1, device=device).T[1::2]
    stop = torch.randn(3 * batch, device=device)[1::3]
    mask = (torch.rand(n, device=device) > 0.2).expand(batch, n)
    stop_row = torch.randn(batch, 3 * n + 1, device=device)[:, 1::3]
    assert not any(x.is_contiguous() for x in (unary, stop, mask, stop_row))
    interaction: cpl.Interaction
    if kind == "dense":
        for W in (
            torch.randn(batch, n, n, device=device).transpose(1, 2),
            torch.randn(n, n + 3, batch, device=device)[:, 3:].permute(2, 0, 1),
        ):
            check(cpl.Potentials(unary, stop, cpl.Dense(W, stop_row), mask), way, max_len=5, stop_bias=-3.0)
        return
    keys = torch.randn(batch, hidden + 2, n, device=device)[:, 2:].transpose(1, 2)
    values = torch.randn(n, batch, 2 * hidden, device=device).transpose(0, 1)[..., ::2]
    stop_key = torch.randn(hidden, batch, device=device).T
    interaction = cpl.LowRank(keys, values, stop_key)
    check(cpl.Potentials(unary, stop, interaction, mask), way, max_len=5, stop_bias=-3.0)


@pytest.mark.parametrize(
    ("kind", "way", "dtype"),
    [(*case.values, torch.bfloat16) for case in CASES] + [(*case.values, torch.float16) for case in FEW],
)
def test_half_precision(kind: str, way: Plan, dtype: torch.dtype, device: torch.device) -> None:
    """Sums are float32; only a W that is built is rounded once more, as half precision is in plain torch."""
    pot = potentials(device, kind, dtype=dtype)
    if way.kernel != "factored" and kind == "lowrank":
        found = greedy_triton.decode(pot, Rules(pot, 5), way)
        with use("plain"):
            plain = cpl.greedy(pot, 5)
        exact = double(pot)
        error = (found.log_prob[:, 0] - cpl.log_prob(exact, found.indices[:, 0], max_len=5)).abs().max()
        plain_error = (plain.log_prob - cpl.log_prob(exact, plain.indices, max_len=5)).abs().max()
        assert error <= 2 * max(float(plain_error), torch.finfo(dtype).eps)
    else:
        check(pot, way, max_len=5)


@pytest.mark.parametrize(("kind", "way"), CASES)
def test_a_long_decode_is_as_exact_as_plain_torch(kind: str, way: Plan, device: torch.device) -> None:
    pot = potentials(device, kind, batch=2, n=30, masked=False)
    found = greedy_triton.decode(pot, Rules(pot, 20, stop_bias=-50.0), way)
    with use("plain"):
        plain = cpl.greedy(pot, 20, stop_bias=-50.0)
    exact = double(pot)
    scores = cpl.log_prob(exact, found.indices[:, 0], max_len=20, stop_bias=-50.0)
    error = (found.log_prob[:, 0] - scores).norm() / scores.norm()
    plain_error = (
        plain.log_prob - cpl.log_prob(exact, plain.indices, max_len=20, stop_bias=-50.0)
    ).norm() / scores.norm()
    assert error <= 2 * max(float(plain_error), torch.finfo(torch.float32).eps)


# Coverage and Recent: in a block, with a second matrix


@pytest.mark.parametrize("kind", SECOND)
@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize(
    "asked",
    [
        {"max_len": 8, "stop_bias": -4.0},
        {"max_len": 5, "min_len": 3, "stop_bias": 6.0},
        {"max_len": 6, "stop_threshold": 0.2},
    ],
    ids=str,
)
def test_a_second_matrix_is_read_as_by_plain_torch(
    asked: dict[str, Any], live: bool, kind: str, device: torch.device
) -> None:
    pot = two_matrices(kind, device, live)
    with use("plain"):
        expected = cpl.greedy(double(pot), **asked)
    with use("triton"):
        found = cpl.greedy(pot, **asked)
    assert found.indices.equal(expected.indices)
    torch.testing.assert_close(found.log_prob.double(), expected.log_prob, rtol=1e-5, atol=1e-5)
    assert int(found.lengths.min()) > 1
    if "coverage" in kind:
        assert float(pot.interaction.dense().abs().max()) > 20  # something was covered for good


@pytest.mark.parametrize("kind", SECOND)
def test_padding_of_a_second_matrix_may_hold_anything(kind: str, device: torch.device) -> None:
    pot = two_matrices(kind, device)
    dirty = getattr(pot.interaction, SECOND[kind]).masked_fill(~pot.mask.unsqueeze(-1), math.nan)
    other = replace(pot, interaction=replace(pot.interaction, **{SECOND[kind]: dirty}))  # type: ignore[type-var]
    with use("triton"):
        assert cpl.greedy(other, 6).indices.equal(cpl.greedy(pot, 6).indices)


@pytest.mark.parametrize("kind", SECOND)
def test_two_matrices_of_too_many_candidates_are_left_to_plain_torch(kind: str) -> None:
    def shape(*sizes: int) -> Tensor:
        return torch.empty(*sizes, device="meta")

    for batch, n in ((1, 8193), (100, 2048)):
        parts = [shape(batch, n, 4) for _ in range(4)]
        interaction = cpl.Coverage(*parts, shape(batch)) if kind == "coverage" else cpl.Recent(*parts)
        if kind == "dense coverage":
            interaction = cpl.DenseCoverage(shape(batch, n, n))
        pot = cpl.Potentials(shape(batch, n), shape(batch), interaction)
        assert f"{n} candidates in {batch} rows" in str(dispatch.decode_obstacle(pot, Rules(pot, 3)))


# As many candidates as there may be


@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_number_of_candidates(kind: str, device: torch.device) -> None:
    """65,536 candidates in tiles; W, of more than 2³¹ numbers, is one row for all."""
    n, steps = 65_536, 3
    interaction: cpl.Interaction
    if kind == "dense":
        interaction = cpl.Dense(torch.randn(1, n, 1, device=device).expand(1, n, n))
    else:
        interaction = cpl.LowRank(torch.randn(1, n, 4, device=device), torch.randn(1, n, 4, device=device))
    pot = cpl.Potentials(torch.randn(1, n, device=device), torch.full((1,), -9.0, device=device), interaction)
    way = Plan("tiles", 4096) if kind == "dense" else Plan("factored", 4096, programs=3)
    found = greedy_triton.decode(pot, Rules(pot, steps), way)
    with use("plain"):
        plain = cpl.greedy(pot, steps)
    assert found.indices[:, 0].equal(plain.indices)
    torch.testing.assert_close(found.log_prob[:, 0], plain.log_prob, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("shared", [False, True])
def test_many_candidates_are_shared_by_several_programs(
    shared: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``greedy_plan`` would have it for millions, by smaller limits; ``shared``: one table for all rows."""
    monkeypatch.setattr(greedy_plan, "BUILD_LIMIT", 1)
    monkeypatch.setattr(greedy_plan, "PROGRAM_BYTES", 1e3)
    greedy_plan.factored.cache_clear()
    pot = potentials(device, batch=2, n=400, hidden=64)
    if shared:
        parts = {name: part[:1].expand(2, *part.shape[1:]) for name, part in vars(pot.interaction).items()}
        pot = replace(pot, interaction=cpl.LowRank(**parts))
    way = greedy_plan.plan(pot, Rules(pot, 6))
    assert way == Plan("factored", 32, warps=2, programs=4)
    with use("plain"):
        plain = cpl.greedy(pot, 6, stop_bias=-2.0)
    with use("triton"):
        found = cpl.greedy(pot, 6, stop_bias=-2.0)
    assert found.indices.equal(plain.indices)
    torch.testing.assert_close(found.log_prob, plain.log_prob, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.step_log_prob, plain.step_log_prob, rtol=1e-5, atol=1e-5)


def test_steps_end_when_all_have_stopped(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every step is a launch, none follow long after the last hypothesis has stopped."""
    pot = potentials(device, n=60)
    launched = []
    run = greedy_triton._decode_tiles

    class Counted:
        def __getitem__(self, grid: Any) -> Any:
            launched.append(grid)
            return run[grid]

    monkeypatch.setattr(greedy_triton, "_decode_tiles", Counted())
    monkeypatch.setattr(greedy_triton, "SYNC_EVERY", 4)
    found = greedy_triton.decode(pot, Rules(pot, 60, stop_bias=5.0), Plan("factored", 16, programs=3))
    most = int(found.lengths.max())
    assert most < len(launched) <= 4 * (most // 4 + 2) < 60
    assert found.indices[:, 0].equal(cpl.greedy(pot, 60, stop_bias=5.0).indices)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_candidates_are_captured(dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    pot = potentials(device, batch=2, n=300_000, hidden=64, dtype=dtype)
    assert greedy_plan.plan(pot, Rules(pot, 40)).programs > 100
    run = cpl.compile_for_inference(lambda pot: cpl.greedy(pot, 40, stop_bias=-9.0), pot)
    for _ in range(2):
        pot = replace(pot, unary=torch.randn_like(pot.unary))
        with use("plain"):
            plain = cpl.greedy(pot, 40, stop_bias=-9.0)
        found = run(pot)
        if dtype == torch.float32:
            assert found.indices.equal(plain.indices)
        # Plain torch rounds the logits to bfloat16, and picks another of those that are then equal.
        scores = cpl.log_prob(pot.float(), found.indices, max_len=40, stop_bias=-9.0)
        torch.testing.assert_close(found.log_prob, scores, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("path", ["block", "tiles"])
@pytest.mark.parametrize("dim", [1, 2], ids=["rows far apart", "columns far apart"])
def test_offsets_beyond_32_bits(path: str, dim: int, device: torch.device) -> None:
    """The last of them lies 2³¹ numbers from the first; what lies between is never touched, and costs no memory."""
    n = 6
    W = torch.randn(1, n, n).to(device, torch.bfloat16)
    far = 2**31 // (n - 1) + 7
    strides = (0, far, 1) if dim == 1 else (0, 1, far)
    apart = torch.empty(far * n, dtype=W.dtype, device=device).as_strided(W.shape, strides).copy_(W)
    unary, stop = torch.randn(1, n, device=device), torch.full((1,), -99.0, device=device)
    unary[0, -1] = 99.0  # the first pick
    have, want = (
        greedy_triton.decode(pot, Rules(pot, n), Plan(path, 16))
        for pot in (cpl.Potentials(unary, stop, cpl.Dense(matrix)) for matrix in (apart, W))
    )
    assert have.indices.equal(want.indices)
    assert have.log_prob.equal(want.log_prob)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA: Triton's interpreter has one thread")
@pytest.mark.parametrize("kernel", ["tiles", "factored"])
def test_threads_that_outnumber_a_tile_agree(kernel: str) -> None:
    """Several threads hold the same number, and only one of them writes it: many rows, again and again."""
    pot = potentials(torch.device("cuda"), batch=512, n=200)
    expected = greedy_triton.decode(pot, Rules(pot, 30, stop_bias=-50.0), Plan("tiles", 256))
    for _ in range(5):
        found = greedy_triton.decode(pot, Rules(pot, 30, stop_bias=-50.0), Plan(kernel, 16, warps=8))
        same = (found.indices == expected.indices).all(-1).float().mean()
        assert float(same) > 0.99  # the last bits of W differ between its forms


# Choosing


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """The plans that the kernels were run with."""
    plans: list[Plan] = []
    run = greedy_triton.decode

    def spy(pot: cpl.Potentials, rules: Rules, way: Plan, *rest: Any, **more: Any) -> cpl.Selection:
        plans.append(way)
        return run(pot, rules, way, *rest, **more)

    monkeypatch.setattr(greedy_triton, "decode", spy)
    return plans


@pytest.mark.parametrize("kind", KINDS)
def test_the_public_decoders_run_the_kernels(kind: str, seen: list[Plan], device: torch.device) -> None:
    pot = potentials(device, kind)
    with use("plain"):
        plain = cpl.greedy(pot, 5, min_len=1, stop_bias=-1.0)
        cautious = cpl.greedy(pot, 5, stop_threshold=0.1)
    assert seen == []
    with use("triton"):
        found = cpl.greedy(pot, 5, min_len=1, stop_bias=-1.0)
        assert cpl.greedy(pot, 5, stop_threshold=0.1).indices.equal(cautious.indices)
        sampled = cpl.sample(pot, 2, max_len=3, generator=torch.Generator(device).manual_seed(0))
    assert seen == [Plan("block", 64, warps=1)] * 3
    assert found.indices.equal(plain.indices)
    assert found.lengths.equal(plain.lengths)
    torch.testing.assert_close(found.log_prob, plain.log_prob)
    assert sampled.indices.shape == (2, 2, 3)
    cpl.greedy(pot, 5)
    assert len(seen) == (4 if device.type == "cuda" else 3)  # by themselves they run on CUDA only


def test_what_the_kernels_cannot_do_is_refused_when_they_are_forced(device: torch.device) -> None:
    pot = potentials(device)
    wide = cpl.Contextual(pot.interaction.keys, pot.interaction.values, lambda s, count: s)  # type: ignore[attr-defined]
    with use("triton"):
        with pytest.raises(ValueError, match="Contextual"):
            cpl.greedy(cpl.Potentials(pot.unary, pot.stop, wide, pot.mask), 3)
        with pytest.raises(ValueError, match="constraints other than Forbid"):
            cpl.greedy(pot, 3, constraints=[cpl.Require(pot.mask & False)])
        with pytest.raises(ValueError, match="float64"):
            cpl.greedy(double(pot), 3)
        with pytest.raises(ValueError, match="top_k"):
            cpl.sample(pot, top_k=2)
        with pytest.raises(ValueError, match="shape"):
            cpl.greedy(pot[[]])
    assert cpl.greedy(double(pot), 3).log_prob.dtype == torch.float64
    assert cpl.sample(pot, top_k=2, max_len=3).indices.shape == (2, 3)

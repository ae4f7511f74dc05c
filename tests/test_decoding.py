"""Decoders: greedy and beam against exact search, samplers by their law."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from itertools import permutations
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from strategies import (
    KINDS,
    Case,
    assemble,
    cases,
    demands,
    fixed_case,
    lowest_first,
    odd_neighbours,
    plain_lowest_first,
    plain_odd_neighbours,
)
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import torchcpl as cpl
from torchcpl.decoding.sample import categorical
from torchcpl.kernels import dispatch

TIGHT = 1e-10
Picks = tuple[int, ...]


def unpadded(indices: Tensor) -> list[Picks]:
    """(S, T) to tuples without the padding."""
    return [tuple(i for i in row if i >= 0) for row in indices.tolist()]


def well_formed(selection: cpl.Selection) -> None:
    """Distinct picks, padding last, lengths that fit."""
    for picks, length in zip(
        selection.indices.flatten(0, -2).tolist(), selection.lengths.flatten().tolist(), strict=True
    ):
        kept = picks[:length]
        assert all(i >= 0 for i in kept)
        assert all(i == -1 for i in picks[length:])
        assert len(set(kept)) == length


@pytest.fixture(params=["numpy", "rollout"])
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Both ways greedy can run: the fast one where it applies, and the plain one for everything."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "rollout":
            patch.setattr("torchcpl.kernels.greedy_numpy.applies", lambda pot, rules: False)
        yield request.param


# ------------------------------------------------------------------------------------- the score of a pick


@pytest.mark.parametrize("fast", [True, False])
@given(data=st.data())
def test_every_pick_comes_with_its_log_probability(fast: bool, data: Any) -> None:
    case = data.draw(cases(max_n=4))
    asked = data.draw(demands(case))
    with dispatch.use("auto" if fast else "plain"):
        found = [cpl.greedy(case.pot, **asked.options), cpl.beam(case.pot, 4, 3, **asked.options)]
        drawn = [cpl.sample(case.pot, 3, **asked.options), cpl.stochastic_beam(case.pot, 3, **asked.options)]
    rows_first = [(found[0], 1), (found[1], 3)]
    for selection, width in [*rows_first, *((s, 3) for s in drawn)]:
        steps = selection.step_log_prob
        assert steps is not None
        assert steps.shape == selection.indices.shape
        assert steps.dtype == selection.log_prob.dtype
        assert bool((steps[selection.indices < 0] == 0).all())
        flat = (selection.indices.flatten(0, -2), steps.flatten(0, -2), selection.log_prob.flatten())
        for i, (picks, scores, total) in enumerate(zip(*(part.tolist() for part in flat), strict=True)):
            b = i % len(case.rows) if selection in drawn else i // width
            made = [pick for pick in picks if pick >= 0]
            if total == -math.inf:  # a row with fewer sequences than asked for
                assert not made
                continue
            want = [oracle.step_log_probs(case.rows[b], asked.limits[b], tuple(made[:t])) for t in range(len(made) + 1)]
            scored = [log_probs[pick] for log_probs, pick in zip(want, made, strict=False)]
            assert scores[: len(made)] == pytest.approx(scored, abs=1e-9)
            assert total == pytest.approx(sum(scores) + want[-1][-1], abs=1e-9)


# ------------------------------------------------------------------------------------------------ greedy


def is_stepwise_argmax(case: Case, selection: cpl.Selection, limits: list[oracle.Limits]) -> None:
    well_formed(selection)
    for b, (row, limit) in enumerate(zip(case.rows, limits, strict=True)):
        picks = unpadded(selection.indices)[b]
        total = 0.0
        for t in range(len(picks) + 1):
            log_probs = oracle.step_log_probs(row, limit, picks[:t])
            choice = picks[t] if t < len(picks) else row.size
            assert log_probs[choice] >= max(log_probs) - 1e-9, (b, picks, t)
            total += log_probs[choice]
        assert selection.log_prob[b].item() == pytest.approx(total, abs=1e-9)


@pytest.mark.parametrize("fast", [True, False])
@given(data=st.data())
def test_greedy_takes_the_likeliest_step(fast: bool, data: Any) -> None:
    case = data.draw(cases())
    asked = data.draw(demands(case, parts=("max_len", "min_len", "stop_bias", "forbid")))
    with pytest.MonkeyPatch.context() as patch:
        if not fast:
            patch.setattr("torchcpl.kernels.greedy_numpy.applies", lambda pot, rules: False)
        selection = cpl.greedy(case.pot, **asked.options)
    is_stepwise_argmax(case, selection, asked.limits)


@given(st.data())
def test_greedy_under_every_demand(data: Any) -> None:
    case = data.draw(cases())
    asked = data.draw(demands(case))
    selection = cpl.greedy(case.pot, **asked.options)
    is_stepwise_argmax(case, selection, asked.limits)
    again = cpl.log_prob(case.pot, selection.indices, **asked.options)
    torch.testing.assert_close(again, selection.log_prob, atol=1e-9, rtol=1e-9)


def test_of_equals_the_lowest_index_wins(path: str) -> None:
    n = 37
    pot = cpl.Potentials(torch.zeros(3, n), torch.zeros(3), cpl.Dense(torch.zeros(3, n, n)))
    assert cpl.greedy(pot).tolist() == [list(range(n))] * 3
    assert cpl.greedy(pot[:1], max_len=5).tolist() == [[0, 1, 2, 3, 4]]


def test_a_stop_that_is_ruled_out_takes_everyone(path: str) -> None:
    """Rows of different lengths: each stops when its own candidates are used up, and takes none twice."""
    for kind in KINDS:
        case = fixed_case(kind, 0, 5, 6, padded=True)
        for rows in (slice(0, 5), slice(1, 2)):
            pot = case.pot[rows]
            selection = cpl.greedy(pot, stop_bias=-math.inf)
            assert selection.mask().equal(pot.mask)
            well_formed(selection)
            torch.testing.assert_close(
                selection.log_prob, cpl.log_prob(pot, selection.indices, stop_bias=-math.inf), atol=TIGHT, rtol=0
            )
            assert not selection.log_prob.isnan().any()
            assert (selection.log_prob <= 0).all()


def as_dtype(value: Any, dtype: torch.dtype) -> Any:
    """The same potentials in another precision."""
    return torch.utils._pytree.tree_map(
        lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, value
    )


@pytest.mark.parametrize("kind", ["dense", "dense+stop"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_float32_log_prob_is_as_good_as_its_numbers(kind: str, batch: int, offset: float, path: str) -> None:
    """A shift of all logits, however large, changes no probability: nor may it cost digits over many steps.

    All numbers are multiples of 1/64, so that their sums are exact in float32 at 1e4 too.
    """
    rough = fixed_case(kind, 1, batch, 60).pot
    pot = torch.utils._pytree.tree_map(
        lambda x: (x * 64).round() / 64 if isinstance(x, Tensor) and x.is_floating_point() else x, rough
    )
    pot = cpl.Potentials(pot.unary + offset, pot.stop + offset, pot.interaction, pot.mask)
    selection = cpl.greedy(as_dtype(pot, torch.float32), min_len=50)
    exact = cpl.log_prob(pot, selection.indices, min_len=50)
    assert selection.log_prob.dtype == torch.float32
    torch.testing.assert_close(selection.log_prob.double(), exact, atol=1e-4, rtol=0)


@pytest.mark.parametrize("odd", ["keys", "values", "stop_key", "unary", "stop"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_part_in_another_precision(odd: str, dtype: torch.dtype) -> None:
    pot = fixed_case("lowrank+stop", 15, 3, 5).pot
    interaction = pot.interaction
    assert isinstance(interaction, cpl.LowRank)
    assert interaction.stop_key is not None
    parts = {"unary": pot.unary, "stop": pot.stop, "keys": interaction.keys, "values": interaction.values}
    parts["stop_key"] = interaction.stop_key
    parts[odd] = parts[odd].to(dtype)
    mixed = cpl.Potentials(
        parts["unary"], parts["stop"], cpl.LowRank(parts["keys"], parts["values"], parts["stop_key"])
    )
    for rows in (slice(0, 3), slice(0, 1)):
        selection = cpl.greedy(mixed[rows], min_len=3)
        again = cpl.log_prob(mixed[rows], selection.indices, min_len=3)
        torch.testing.assert_close(selection.log_prob.double(), again.double(), atol=1e-4, rtol=0)
    for found in (cpl.sample(mixed, 3), cpl.beam(mixed, 3, 3), cpl.stochastic_beam(mixed, 3)):
        assert found.log_prob.isfinite().all()


def test_many_steps_of_many_rows(path: str) -> None:
    """Sizes beyond what the fast path keeps at a time, rows that stop at different steps."""
    for kind in ("dense", "lowrank+stop"):
        case = fixed_case(kind, 2, 40, 70, scale=0.5, padded=True)
        selection = cpl.greedy(case.pot)
        well_formed(selection)
        assert len(set(selection.lengths.tolist())) > 3
        torch.testing.assert_close(selection.log_prob, cpl.log_prob(case.pot, selection.indices), atol=1e-9, rtol=0)
        state_greedy = torch.stack([cpl.greedy(case.pot[b : b + 1]).indices[0] for b in range(40)])
        assert selection.indices.equal(state_greedy)


@pytest.mark.parametrize("kind", KINDS)
def test_both_paths_agree(kind: str) -> None:
    case = fixed_case(kind, 3, 4, 30, padded=True)
    options: dict[str, Any] = {"max_len": 20, "min_len": 3, "stop_bias": torch.tensor([0.0, 1.0, 3.0, -2.0]).double()}
    fast = cpl.greedy(case.pot, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchcpl.kernels.greedy_numpy.applies", lambda pot, rules: False)
        plain = cpl.greedy(case.pot, **options)
    assert fast.indices.equal(plain.indices)
    assert fast.lengths.equal(plain.lengths)
    torch.testing.assert_close(fast.log_prob, plain.log_prob, atol=TIGHT, rtol=0)


# -------------------------------------------------------------------------------------------------- beam


def count_sequences(n: int) -> int:
    return sum(math.perm(n, k) for k in range(n + 1))


@given(st.data())
def test_full_width_beam_is_exact_search(data: Any) -> None:
    case = data.draw(cases(max_n=4))
    asked = data.draw(demands(case))
    width = count_sequences(case.size)
    found = cpl.beam(case.pot, width, width, **asked.options)
    well_formed(found)
    for b, (row, limits) in enumerate(zip(case.rows, asked.limits, strict=True)):
        want = oracle.top(row, limits)
        exact = dict(want)
        got = unpadded(found.indices[b])[: len(want)]
        assert len(set(got)) == len(got)
        for rank, sequence in enumerate(got):
            value = found.log_prob[b, rank].item()
            assert value == pytest.approx(exact[sequence], abs=TIGHT, rel=TIGHT)
            assert value == pytest.approx(want[rank][1], abs=TIGHT, rel=TIGHT)
        assert (found.log_prob[b, len(want) :] == -math.inf).all()
        assert (found.indices[b, len(want) :] == -1).all()


def test_full_width_beam_of_five() -> None:
    for kind in KINDS:
        case = fixed_case(kind, 4, 1, 5)
        want = oracle.top(case.rows[0])
        found = cpl.beam(case.pot, len(want), 50)
        assert unpadded(found.indices[0]) == [sequence for sequence, _ in want[:50]]


@given(st.data())
def test_narrow_beams_tell_the_truth(data: Any) -> None:
    case = data.draw(cases())
    asked = data.draw(demands(case))
    width = data.draw(st.integers(1, 6))
    found = cpl.beam(case.pot, width, width, **asked.options)
    well_formed(found)
    assert (found.log_prob[:, 1:] <= found.log_prob[:, :-1]).all()
    for b, (row, limits) in enumerate(zip(case.rows, asked.limits, strict=True)):
        alive = int((found.log_prob[b] > -math.inf).sum())
        support = oracle.everything(row, limits)
        got = unpadded(found.indices[b])[:alive]
        assert alive >= 1
        assert len(set(got)) == alive
        for rank, sequence in enumerate(got):
            assert found.log_prob[b, rank].item() == pytest.approx(support[sequence], abs=1e-9, rel=TIGHT)


@given(st.data())
def test_one_beam_is_greedy(data: Any) -> None:
    case = data.draw(cases())
    asked = data.draw(demands(case))
    one = cpl.beam(case.pot, 1, **asked.options)
    assert one.indices.shape[1] == 1
    first = cpl.Selection(one.indices[:, 0], one.lengths[:, 0], one.log_prob[:, 0])
    is_stepwise_argmax(case, first, asked.limits)


def test_num_return_is_the_best_of_the_beams() -> None:
    case = fixed_case("lowrank", 5, 3, 6)
    many, few = cpl.beam(case.pot, 20, 20), cpl.beam(case.pot, 20, 3)
    assert few.indices.shape == (3, 3, 6)
    assert few.indices.equal(many.indices[:, :3])
    assert few.log_prob.equal(many.log_prob[:, :3])


# ------------------------------------------------------------------------------------------------ sample


def fits(counts: Counter[Any], law: dict[Any, float], level: float = 1e-4) -> bool:
    """Chi-square of counts against a law, rare outcomes together; nothing outside of the law."""
    assert set(counts) <= set(law), set(counts) - set(law)
    total = counts.total()
    common = [s for s in law if law[s] * total >= 8]
    expected = [law[s] * total for s in common]
    seen = [float(counts[s]) for s in common]
    rest = total - sum(expected)
    if rest > 8:
        expected.append(rest)
        seen.append(total - sum(seen))
    if len(expected) < 2:
        return True
    scaled = np.array(expected) * sum(seen) / sum(expected)
    return bool(stats.chisquare(seen, scaled).pvalue > level)


def probabilities(row: oracle.Row, limits: oracle.Limits) -> dict[Picks, float]:
    return {sequence: math.exp(lp) for sequence, lp in oracle.everything(row, limits).items()}


@pytest.mark.parametrize("kind", KINDS)
def test_samples_follow_the_exact_law(kind: str) -> None:
    case = fixed_case(kind, 6, 3, 4, padded=True)
    drawn = cpl.sample(case.pot, 8000, generator=torch.Generator().manual_seed(0))
    assert drawn.indices.shape == (8000, 3, 4)
    well_formed(drawn)
    for b, row in enumerate(case.rows):
        law = probabilities(row, oracle.FREE)
        assert fits(Counter(unpadded(drawn.indices[:, b])), law)
        got = dict(zip(unpadded(drawn.indices[:, b]), drawn.log_prob[:, b].tolist(), strict=True))
        assert all(lp == pytest.approx(math.log(law[s]), abs=TIGHT) for s, lp in got.items())


DEMANDS: dict[str, dict[str, Any]] = {
    "lengths": {"max_len": 3, "min_len": 2, "stop_bias": [0.5, -1.0]},
    "forbid+require": {
        "forbid": [True, False, False, False],
        "require": ([[False, True, False, False], [False] * 4], False),
    },
    "budget": {"budget": ([10, 20, 10, 30], [30, 40]), "min_len": 2},
    "adjacent": {
        "adjacent": [[False, True, True, False], [True, False, True, True], [True, True, False, True], [True] * 4],
        "max_len": 3,
    },
    "callable": {"callable": (odd_neighbours, plain_odd_neighbours)},
    "all": {
        "max_len": 3,
        "min_len": 1,
        "stop_bias": 0.3,
        "forbid": [False, False, False, True],
        "require": ([False, True, False, False], True),
        "budget": ([10, 10, 20, 0], 30),
        "adjacent": [[False, True, True, True], [True, False, True, True], [True, True, False, True], [True] * 4],
        "callable": (lowest_first, plain_lowest_first),
    },
}


@pytest.mark.parametrize("name", DEMANDS)
def test_samples_follow_the_law_under_demands(name: str) -> None:
    case = fixed_case("dense+stop", 7, 2, 4)
    asked = assemble(case, DEMANDS[name])
    drawn = cpl.sample(case.pot, 6000, generator=torch.Generator().manual_seed(1), **asked.options)
    for b, (row, limits) in enumerate(zip(case.rows, asked.limits, strict=True)):
        assert fits(Counter(unpadded(drawn.indices[:, b])), probabilities(row, limits))


SHARPENED = [
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"top_k": 2},
    {"top_p": 0.7},
    {"temperature": 1.5, "top_k": 3, "top_p": 0.8},
    {"top_k": 100, "top_p": 1.0},
]


@pytest.mark.parametrize("options", SHARPENED)
def test_sharpened_samples_follow_their_law(options: dict[str, Any]) -> None:
    case = fixed_case("lowrank+stop", 8, 2, 4)
    drawn = cpl.sample(case.pot, 6000, max_len=3, generator=torch.Generator().manual_seed(2), **options)
    limits = oracle.Limits(max_len=3)
    for b, row in enumerate(case.rows):
        law = oracle.sharpened_law(row, limits, **options)
        assert sum(law.values()) == pytest.approx(1)
        assert fits(Counter(unpadded(drawn.indices[:, b])), law)
    # The log-probability stays that of the process itself.
    exact = torch.stack([cpl.log_prob(case.pot, drawn.indices[s], max_len=3) for s in range(20)])
    torch.testing.assert_close(drawn.log_prob[:20], exact, atol=TIGHT, rtol=0)


def test_top_k_of_one_is_greedy() -> None:
    case = fixed_case("contextual", 9, 4, 6, padded=True)
    ties = cpl.Potentials(torch.zeros(1, 5), torch.zeros(1), cpl.Dense(torch.zeros(1, 5, 5)))
    for pot in (case.pot, ties):
        chosen = cpl.greedy(pot)
        drawn = cpl.sample(pot, 5, top_k=1)
        assert drawn.indices.equal(chosen.indices.expand(5, -1, -1))
        assert cpl.sample(pot, 5, top_p=1e-9).indices.equal(drawn.indices)
        cold = cpl.sample(case.pot, 5, temperature=1e-4)
        assert cold.indices.equal(cpl.greedy(case.pot).indices.expand(5, -1, -1))


def test_samples_are_independent_across_rows_and_draws() -> None:
    """Pairs of rows, and pairs of draws, of the same potentials follow the product law."""
    case = fixed_case("dense", 10, 1, 2)
    pot = case.pot[[0, 0]]
    law = probabilities(case.rows[0], oracle.FREE)
    product = {(a, b): p * q for a, p in law.items() for b, q in law.items()}
    drawn = cpl.sample(pot, 10_000, generator=torch.Generator().manual_seed(3)).indices
    left, right = unpadded(drawn[:, 0]), unpadded(drawn[:, 1])
    assert fits(Counter(zip(left, right, strict=True)), product)
    assert fits(Counter(zip(left[::2], left[1::2], strict=True)), product)


def test_the_generator_decides() -> None:
    pot = fixed_case("dense", 11, 2, 5).pot

    def draw(seed: int) -> Tensor:
        return cpl.sample(pot, 20, generator=torch.Generator().manual_seed(seed)).indices

    assert draw(0).equal(draw(0))
    assert not draw(0).equal(draw(1))
    one = cpl.sample(pot, generator=torch.Generator().manual_seed(0))
    assert one.indices.shape == (2, 5)
    assert one.log_prob.shape == one.lengths.shape == (2,)


# --------------------------------------------------------------------------------------- stochastic beam


def repeated(case: Case, times: int) -> cpl.Potentials:
    """The first row many times over: as many independent draws."""
    return case.pot[[0] * times]


@pytest.mark.parametrize("kind", ["dense", "lowrank+stop", "contextual"])
@pytest.mark.parametrize("num_samples", [1, 2, 3])
def test_inclusion_is_that_of_sampling_without_replacement(kind: str, num_samples: int) -> None:
    case = fixed_case(kind, 12, 1, 3)
    times = 4000
    drawn = cpl.stochastic_beam(
        repeated(case, times), num_samples, max_len=2, generator=torch.Generator().manual_seed(0)
    )
    assert drawn.indices.shape == (num_samples, times, 2)
    well_formed(drawn)
    law = probabilities(case.rows[0], oracle.Limits(max_len=2))
    included = oracle.drawn_without_replacement(law, num_samples)
    assert math.fsum(included.values()) == pytest.approx(num_samples)
    rows = [tuple(unpadded(drawn.indices[:, r])) for r in range(times)]
    assert all(len(set(row)) == num_samples for row in rows)
    counts = Counter(sequence for row in rows for sequence in row)
    for sequence, q in included.items():
        spread = math.sqrt(max(q * (1 - q), 1e-12) / times)
        assert abs(counts[sequence] / times - q) < 4.5 * spread + 1e-12, sequence
    # In the order of drawing: the first follows the law itself, the second what is left of it.
    assert fits(Counter(row[0] for row in rows), law)
    if num_samples > 1:
        pairs = {(a, b): law[a] * law[b] / (1 - law[a]) for a, b in permutations(law, 2)}
        assert fits(Counter(row[:2] for row in rows), pairs)


@pytest.mark.parametrize("kind", ["dense+stop", "lowrank", "contextual+stop"])
@pytest.mark.parametrize("num_samples", [1, 2, 4])
def test_weights_make_estimates_unbiased(kind: str, num_samples: int) -> None:
    """Σ weight·f over many seeds, for f the indicator of each sequence, so for every f."""
    case = fixed_case(kind, 13, 1, 3)
    times = 8000
    limits = oracle.Limits(max_len=2)
    drawn = cpl.stochastic_beam(
        repeated(case, times), num_samples, max_len=2, generator=torch.Generator().manual_seed(1)
    )
    assert drawn.weight is not None
    law = probabilities(case.rows[0], limits)
    estimates = {sequence: np.zeros(times) for sequence in law}
    for s in range(num_samples):
        for r, (sequence, weight) in enumerate(zip(unpadded(drawn.indices[s]), drawn.weight[s].tolist(), strict=True)):
            estimates[sequence][r] += weight
    rng = np.random.default_rng(0)
    f = {sequence: rng.standard_normal() for sequence in law}
    for sequence, values in estimates.items():
        error = values.std(ddof=1) / times**0.5
        assert abs(values.mean() - law[sequence]) < 4.5 * error + 1e-12, sequence
    total = np.sum([f[s] * estimates[s] for s in law], axis=0)
    error = total.std(ddof=1) / times**0.5
    assert abs(total.mean() - sum(f[s] * law[s] for s in law)) < 4 * error


def test_drawing_everything_weighs_by_probability() -> None:
    case = fixed_case("lowrank", 14, 2, 3, padded=True)
    drawn = cpl.stochastic_beam(case.pot, 30, generator=torch.Generator().manual_seed(2))
    assert drawn.weight is not None
    for b, row in enumerate(case.rows):
        law = oracle.everything(row)
        got = unpadded(drawn.indices[: len(law), b])
        assert set(got) == set(law)
        torch.testing.assert_close(drawn.weight[: len(law), b], drawn.log_prob[: len(law), b].exp())
        assert drawn.log_prob[: len(law), b].tolist() == pytest.approx([law[s] for s in got], abs=TIGHT)
        assert drawn.weight[: len(law), b].sum().item() == pytest.approx(1)
        assert (drawn.weight[len(law) :, b] == 0).all()
        assert (drawn.log_prob[len(law) :, b] == -math.inf).all()
        assert (drawn.indices[len(law) :, b] == -1).all()


@given(st.data())
def test_stochastic_beam_under_every_demand(data: Any) -> None:
    case = data.draw(cases(max_n=4))
    asked = data.draw(demands(case))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    drawn = cpl.stochastic_beam(case.pot, 5, generator=generator, **asked.options)
    well_formed(drawn)
    assert drawn.weight is not None
    assert not drawn.weight.isnan().any()
    for b, (row, limits) in enumerate(zip(case.rows, asked.limits, strict=True)):
        support = oracle.everything(row, limits)
        alive = int((drawn.log_prob[:, b] > -math.inf).sum())
        got = unpadded(drawn.indices[:, b])[:alive]
        assert len(set(got)) == alive
        # Sequences too unlikely for a double may never be reached; all others are.
        assert alive >= min(5, sum(lp > -300 for lp in support.values()))
        for s, sequence in enumerate(got):
            assert drawn.log_prob[s, b].item() == pytest.approx(support[sequence], abs=1e-9, rel=TIGHT)


def test_unlikely_sequences_weigh_what_they_are_worth() -> None:
    """Probabilities from 1 down to e^-80: the total weight still averages to one."""
    unary = torch.tensor([[10.0, -20.0, -40.0]]).double()
    pot = cpl.Potentials(unary, torch.zeros(1).double(), cpl.Dense(torch.zeros(1, 3, 3).double()))
    drawn = cpl.stochastic_beam(pot[[0] * 500], 4, generator=torch.Generator().manual_seed(3))
    assert drawn.weight is not None
    total = drawn.weight.sum(0)
    assert total.isfinite().all()
    assert abs(total.mean().item() - 1) < 4 * total.std().item() / 500**0.5 + 1e-6


# ------------------------------------------------------------------------------------------- many candidates


def test_one_of_many_weights_is_drawn_by_its_share() -> None:
    """Blocks, the last one short, and weights of nothing between them."""
    gen = torch.Generator().manual_seed(0)
    count, draws = 5000, 200_000
    weight = torch.rand(count, generator=gen).square()
    weight[torch.rand(count, generator=gen) < 0.5] = 0
    weight[1024:2048] = 0
    found = torch.cat([categorical(weight.expand(1000, -1), gen) for _ in range(draws // 1000)])
    counts = torch.bincount(found, minlength=count)
    assert bool((counts[weight == 0] == 0).all())
    order = weight[weight > 0].argsort()
    seen, share = (part[weight > 0][order] for part in (counts.double(), weight.double() / weight.sum()))
    cells = [(s.sum().item(), draws * p.sum().item()) for s, p in zip(seen.chunk(50), share.chunk(50), strict=True)]
    assert stats.chisquare(*zip(*cells, strict=True)).pvalue > 1e-3
    tail = counts[4096:].sum().item() / draws
    assert tail == pytest.approx(float(weight[4096:].sum() / weight.sum()), abs=5e-3)


def test_one_table_of_items_for_all_rows_is_not_copied() -> None:
    class Largest(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            for part in pytree.tree_leaves(found):
                if isinstance(part, Tensor):
                    self.most = max(self.most, part.untyped_storage().nbytes())
            return found

    batch, n, hidden = 16, 400, 64
    keys, values = torch.randn(2, n, hidden).unbind()
    interaction = cpl.LowRank(keys.expand(batch, n, hidden), values.expand(batch, n, hidden))
    pot = cpl.Potentials(torch.randn(batch, n), torch.randn(batch), interaction)
    with Largest() as largest:
        cpl.greedy(pot, 3)
        cpl.sample(pot, 2, max_len=3)
        cpl.beam(pot, 2, max_len=3)
    assert largest.most < 2 * 2 * n * hidden * 4  # both tables, once
    copied = cpl.Potentials(
        pot.unary, pot.stop, cpl.LowRank(*(part.contiguous() for part in (interaction.keys, interaction.values)))
    )
    assert torch.equal(cpl.greedy(pot, 3).indices, cpl.greedy(copied, 3).indices)


def test_numbers_of_numpy_are_numbers() -> None:
    pot = cpl.CPLHead(4, 8)(torch.randn(2, 5, 4))
    three, picked = np.int64(3), torch.tensor([[0], [1]])
    for decode in (
        lambda n: cpl.greedy(pot, max_len=n, min_len=n, constraints=[cpl.Require(torch.arange(5) == 4)]),
        lambda n: cpl.sample(pot, num_samples=n, max_len=n, top_k=n, generator=torch.Generator().manual_seed(0)),
        lambda n: cpl.beam(pot, num_beams=n, num_return=n, max_len=n, min_len=n),
        lambda n: cpl.stochastic_beam(pot, num_samples=n, max_len=n, generator=torch.Generator().manual_seed(0)),
        lambda n: cpl.hypotheses(pot, num_hypotheses=n, max_len=n),
        lambda n: cpl.complete(pot, picked, max_len=n, num_beams=n, num_return=n),
    ):
        assert decode(three).tolist() == decode(3).tolist()

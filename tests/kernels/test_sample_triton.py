"""Sampling by the decoding kernels: the noise, the law of what is drawn and its score."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from ways import SECOND, WAY_IDS, WAYS, double, potentials, two_matrices

import torchcpl as cpl
from torchcpl.constraints import Rules
from torchcpl.kernels import greedy_triton, use
from torchcpl.kernels.greedy_plan import Plan


@triton.jit
def write_noise(seed, row, step, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, greedy_triton._gumbel(tl.load(seed), row, step, at))


def noise(seed: Tensor, row: int, step: int, count: int) -> Tensor:
    """What the candidates 0 … count−1 get in a step of a hypothesis, in float64."""
    out = torch.empty(triton.next_power_of_2(count), device=seed.device)
    write_noise[(1,)](seed, row, step, out, BLOCK=len(out))
    return out[:count].double()


def test_noise_is_gumbel_and_independent(device: torch.device) -> None:
    """Kolmogorov–Smirnov against exp(−exp(−x)); seeds, hypotheses, steps and candidates differ."""
    count = 8192
    seeds = [torch.tensor([seed], device=device) for seed in (0, 2**61 + 5)]
    drawn = [noise(seeds[i], row, step, count) for i, row, step in [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)]]
    rank = (torch.arange(count, device=device) + 0.5) / count
    for x in drawn:
        assert bool(x.isfinite().all())
        uniform = (-(-x).exp()).exp().sort().values
        assert float((uniform - rank).abs().max()) < 1.63 / math.sqrt(
            count
        )  # one in a hundred would fail, were it luck
    correlation = torch.corrcoef(torch.stack([*drawn, drawn[0].roll(1)])).fill_diagonal_(0)
    assert float(correlation.abs().max()) < 4 / math.sqrt(count)


@pytest.mark.parametrize("way", WAYS, ids=WAY_IDS)
def test_a_sample_is_the_argmax_of_sharpened_logits_and_noise(way: Plan, device: torch.device) -> None:
    n, temperature = 20, 1.7
    pot = potentials(device, batch=2, n=n, live=False)
    found = greedy_triton.decode(pot, Rules(pot, 2), way, 2, temperature, torch.Generator(device).manual_seed(1))
    seed = torch.randint(2**62, (1,), device=device, generator=torch.Generator(device).manual_seed(1))
    effect = double(pot).interaction.dense()
    for row in range(4):
        b, k = divmod(row, 2)
        logits = pot.unary[b].double().masked_fill(~pot.mask[b], -math.inf)
        picks: list[int] = []
        for step in range(2):
            keen = torch.cat([logits, pot.stop[b : b + 1].double()]) / temperature + noise(seed, row, step, n + 1)
            choice = int(keen.argmax())
            if choice == n:
                break
            picks.append(choice)
            logits = logits + effect[b, :, choice]
            logits[choice] = -math.inf
        assert found.tolist()[b][k] == picks


def law(pot: cpl.Potentials, temperature: float) -> dict[tuple[int, ...], float]:
    """The probability of every sequence of at most two picks, by the definition."""
    weights = torch.cat([pot.unary[0], pot.stop]).double().cpu()
    effect = pot.interaction.dense()[0].double().cpu()
    n = pot.num_candidates
    first = (weights / temperature).softmax(0)
    chances = {(): float(first[n])}
    for i in range(n):
        after = weights.clone()
        after[:n] += effect[:, i]
        after[i] = -math.inf
        second = (after / temperature).softmax(0)
        chances[(i,)] = float(first[i] * second[n])
        chances |= {(i, j): float(first[i] * second[j]) for j in range(n) if j != i}
    return chances


@pytest.mark.parametrize(("way", "temperature"), [(WAYS[0], 1.0), (WAYS[4], 2.5)], ids=["block", "tiles"])
def test_samples_follow_their_law(way: Plan, temperature: float, device: torch.device) -> None:
    pot = potentials(device, batch=1, n=3, masked=False, live=False)
    draws = 50_000 if device.type == "cuda" else 60
    generator = torch.Generator(device).manual_seed(3)
    found = greedy_triton.decode(pot, Rules(pot, 2), way, draws, temperature, generator)
    seen = [tuple(picks) for picks in found.tolist()[0]]
    for sequence, chance in law(pot, temperature).items():
        deviation = math.sqrt(chance * (1 - chance) / draws)
        assert abs(seen.count(sequence) / draws - chance) < 4 * deviation + 1e-6, sequence


@pytest.mark.parametrize("way", WAYS, ids=WAY_IDS)
def test_samples_are_reproducible_and_exactly_scored(way: Plan, device: torch.device) -> None:
    pot = potentials(device, batch=2)
    rules = Rules(pot, 3, 1, -1.0)

    def draw(seed: int) -> cpl.Selection:
        return greedy_triton.decode(pot, rules, way, 2, 1.5, torch.Generator(device).manual_seed(seed))

    found = draw(0)
    assert found.indices.equal(draw(0).indices)
    assert not found.indices.equal(draw(1).indices)
    for k in range(2):
        scores = cpl.log_prob(double(pot), found.indices[:, k], max_len=3, min_len=1, stop_bias=-1.0)
        torch.testing.assert_close(found.log_prob[:, k].double(), scores, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", SECOND)
def test_samples_by_two_matrices_are_exactly_scored(kind: str, device: torch.device) -> None:
    pot = two_matrices(kind, device)
    with use("triton"):
        found = cpl.sample(pot, 3, max_len=4, generator=torch.Generator(device).manual_seed(0))
    for k in range(3):
        scores = cpl.log_prob(double(pot), found.indices[k], max_len=4)
        torch.testing.assert_close(found.log_prob[k].double(), scores, rtol=1e-5, atol=1e-5)

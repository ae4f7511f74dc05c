"""The methods: each against brute force or against another way to the same answer."""

from __future__ import annotations

import itertools
import math
from itertools import permutations

import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

import torchcpl as cpl
from torchcpl.selectors import Hungarian, MultiHypothesis, PointerHead, Stepwise, Threshold, kmeans
from torchcpl.selectors.hungarian import _shortlist, assignment
from torchcpl.selectors.stepwise import fit_stop


def pointer(cache: bool = True) -> PointerHead:
    torch.manual_seed(0)
    return PointerHead(8, layers=2, heads=2, ffn=16, max_len=6, cache=cache).double().eval()


def features(batch: int = 3, n: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    mask = torch.ones(batch, n, dtype=torch.bool)
    mask[-1, 2:] = False
    return torch.randn(batch, n, 8, generator=generator, dtype=torch.float64), mask


def test_the_pointer_is_a_distribution() -> None:
    x, mask = features(n=4)
    d = cpl.ContextualPlackettLuce(pointer()(x, mask))
    assert torch.allclose(d.log_prob(d.enumerate_support()).logsumexp(0), torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize("decode", [cpl.greedy, lambda pot, **k: cpl.beam(pot, 4, 2, **k)])
def test_the_pointers_cache_changes_nothing(decode: object) -> None:
    x, mask = features()
    with_cache, without = (decode(pointer(cache)(x, mask), max_len=5) for cache in (True, False))  # type: ignore[operator]
    assert torch.equal(with_cache.indices, without.indices)
    assert torch.allclose(with_cache.log_prob, without.log_prob)


def test_what_the_pointer_decodes_step_by_step_is_what_teacher_forcing_scores() -> None:
    x, mask = features()
    pot = pointer()(x, mask)
    drawn = cpl.sample(pot, 20, generator=torch.Generator().manual_seed(0))
    for indices, log_prob in zip(drawn.indices, drawn.log_prob, strict=True):
        assert torch.allclose(cpl.log_prob(pot, indices), log_prob)


def test_the_pointers_state_after_a_set_is_that_of_the_prefix() -> None:
    x, mask = features()
    interaction = pointer()(x, mask).interaction
    scattered = torch.tensor([[[3, -1, 1]], [[-1, -1, 2]], [[-1, -1, -1]]])
    compact = torch.tensor([[[3, 1, -1]], [[2, -1, -1]], [[-1, -1, -1]]])
    lengths = [2, 1, 0]
    state = interaction.after(scattered)[0]
    (prefixes,) = interaction.prefixes(compact)
    for row, length in enumerate(lengths):
        assert torch.allclose(state[row, 0], prefixes[row, length])


def test_the_pointer_refuses_more_picks_than_it_has_steps_for() -> None:
    x = torch.randn(1, 9, 8, dtype=torch.float64)
    with pytest.raises(ValueError, match="max_len: expected at most 6 picks"):
        cpl.log_prob(pointer()(x), torch.arange(7).unsqueeze(0))


def test_assignment_is_the_cheapest_of_all() -> None:
    generator = torch.Generator().manual_seed(0)
    cost = torch.rand(6, 3, 5, generator=generator)
    real = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 0, 0], [1, 1, 1], [1, 1, 0]]).bool()
    found = assignment(cost, real)
    for row in range(6):
        count = int(real[row].sum())
        best = min(sum(float(cost[row, t, c]) for t, c in enumerate(order)) for order in permutations(range(5), count))
        assert sum(float(cost[row, t, found[row, t]]) for t in range(count)) == pytest.approx(best)
        assert (found[row, count:] == -1).all()


def test_a_target_is_not_matched_to_itself_where_another_exists() -> None:
    torch.manual_seed(0)
    method = Hungarian(4, 8)
    points = torch.randn(2, 5, 4)
    mask = torch.tensor([[True] * 5, [True] + [False] * 4])
    target = torch.tensor([[0, 3], [0, -1]])
    goals = points.gather(1, target.clamp(min=0).unsqueeze(-1).expand(-1, -1, 4))
    matched = method.assign(torch.zeros(2, 5, 4), mask, target, points, goals)
    assert (matched[0] != target[0]).all()
    assert matched[1].tolist() == [0, -1]  # nothing else is there


def test_threshold_keeps_what_is_above_it_best_first() -> None:
    torch.manual_seed(0)
    method = Threshold(4, 8).eval()
    x, mask = torch.randn(3, 6, 4), torch.rand(3, 6) < 0.8
    scores = method.scores(x).squeeze(-1).sigmoid()
    for knob in (0.3, 0.5, 0.6):
        picked = method.select(x, mask, max_len=2, knob=knob)
        for row in range(3):
            expected = [
                i for i in scores[row].argsort(descending=True).tolist() if mask[row, i] and scores[row, i] > knob
            ]
            assert picked.tolist()[row] == expected


def test_binary_cross_entropy_weighs_positives_by_the_batch() -> None:
    torch.manual_seed(0)
    method = Threshold(4, 8).eval()
    x, mask = torch.randn(2, 4, 4), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]).bool()
    target = torch.tensor([[1, 2], [0, -1]])
    logits = method.scores(x).squeeze(-1)
    weight, total = 3 / 3, 0.0
    for row in range(2):
        for i in range(4):
            if mask[row, i]:
                p = float(logits[row, i].detach().sigmoid())
                positive = i in target[row].tolist()
                total -= weight * torch.tensor(p).log() if positive else torch.tensor(1 - p).log()
    assert float(method.loss(x, mask, target).detach()) == pytest.approx(float(total) / 6, rel=1e-5)


def test_kmeans_finds_separate_clusters() -> None:
    generator = torch.Generator().manual_seed(0)
    centres = torch.tensor([[0.0, 0.0], [50.0, 0.0], [0.0, 50.0]])
    labels = torch.arange(12) % 3
    points = (centres[labels] + torch.randn(12, 2, generator=generator)).unsqueeze(0)
    found = {
        frozenset(
            labels[kmeans(points, torch.ones(1, 12).bool(), torch.tensor([3]), generator=generator).indices[0]].tolist()
        )
        for _ in range(10)
    }
    assert frozenset({0, 1, 2}) in found  # from good starts; Lloyd's algorithm has bad ones
    picked = kmeans(points, torch.ones(1, 12).bool(), torch.tensor([3]), generator=generator).tolist()[0]
    assert len(set(picked)) == len(picked) <= 3


@pytest.mark.parametrize("rule", ["argmax", "threshold"])
def test_cpl_obeys_its_knob(rule: str) -> None:
    torch.manual_seed(0)
    method = Stepwise(cpl.CPLHead(8, 16), ordered=False, stop_rule=rule).eval()
    x = torch.randn(4, 10, 8)
    mask = torch.ones(4, 10, dtype=torch.bool)
    lengths = [method.select(x, mask, 8, knob).lengths.sum().item() for knob in method.knobs]
    assert len(set(lengths)) > 1
    eager = max(lengths) if rule == "threshold" else min(lengths)
    assert lengths[-1] == eager  # a high bias stops early, a high threshold late


def test_stop_threshold_weighs_the_stop_against_everything_together() -> None:
    # Ten equal candidates of probability 0.06 each, and a stop of 0.4: the likeliest single choice.
    unary = torch.full((1, 10), 0.06).log()
    pot = cpl.Potentials(unary, torch.tensor([0.4]).log(), cpl.Dense(torch.full((1, 10, 10), -20.0)))
    assert cpl.greedy(pot).tolist() == [[]]
    assert cpl.greedy(pot, stop_threshold=0.5).tolist() == [[0]]
    assert cpl.greedy(pot, stop_threshold=0.3).tolist() == [[]]
    with pytest.raises(ValueError, match="stop_threshold: expected a probability"):
        cpl.greedy(pot, stop_threshold=1.5)


def cross_entropy(probabilities: list[float], positive: list[int], mask: list[bool]) -> list[float]:
    """The binary cross-entropy of every real candidate."""
    return [
        -math.log(p if i in positive else 1 - p)
        for i, (p, real) in enumerate(zip(probabilities, mask, strict=True))
        if real
    ]


@pytest.mark.parametrize("squared", [False, True])
def test_hungarian_is_the_cheapest_matching_and_its_cross_entropy(squared: bool) -> None:
    torch.manual_seed(3)
    settings = {"pos_weight": 1.0, "score_weight": 10.0, "distance_weight": 3.0}
    method = Hungarian(4, 8, squared=squared, exclude_self=False, **settings).eval()  # type: ignore[arg-type]
    x, points, goals = torch.randn(2, 5, 4), torch.randn(2, 5, 2), torch.randn(2, 3, 2)
    mask = torch.tensor([[True] * 5, [True, True, False, True, False]])
    target = torch.tensor([[0, 3, 4], [1, 0, -1]])
    scores = method.scores(x).squeeze(-1).sigmoid().tolist()
    assigned = method.assign(x, mask, target, points, goals)
    losses: list[float] = []
    for row, count in enumerate((3, 2)):

        def cost(t: int, c: int, row: int = row) -> float:
            distance = math.dist(goals[row, t].tolist(), points[row, c].tolist())
            return -10 * math.log(scores[row][c]) + 3 * (distance**2 if squared else distance)

        real = [c for c in range(5) if mask[row, c]]
        best = min(permutations(real, count), key=lambda picks: sum(cost(t, c) for t, c in enumerate(picks)))
        assert assigned[row].tolist() == [*best, *[-1] * (3 - count)]
        losses += cross_entropy(scores[row], list(best), mask[row].tolist())
    found = method.loss(x, mask, assigned).item()
    assert found == pytest.approx(sum(losses) / len(losses), rel=1e-5)


@pytest.mark.parametrize("shape", [(5, 3, 40), (4, 6, 6), (3, 7, 5), (2, 1, 1), (3, 0, 4), (0, 2, 3)])
def test_a_shortlist_makes_no_assignment_dearer(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    batch, targets, candidates = shape
    # Neighbouring targets want much the same candidates, and some are barred to all.
    cost = torch.rand(batch, 1, candidates) + 0.1 * torch.rand(shape)
    cost[..., ::3] = 1e6
    real = torch.arange(targets) < torch.randint(targets + 1, (batch, 1))
    for row, matched in enumerate(assignment(cost, real)):
        some = cost[row, real[row]].double()
        pairs = [(t, c) for t, c in enumerate(matched.tolist()) if c >= 0]
        places = linear_sum_assignment(some.numpy())
        assert sum(some[t, c] for t, c in pairs) == pytest.approx(some.numpy()[places].sum())
        assert len({c for _, c in pairs}) == len(pairs) == len(places[0])
    if candidates > 30:  # so that something was left out
        assert _shortlist(cost, real).shape[1] < candidates


def test_costs_that_are_no_numbers_are_refused() -> None:
    cost = torch.rand(2, 3, 9)
    cost[1, 1, 4] = math.nan
    with pytest.raises(ValueError, match="invalid numeric entries"):
        assignment(cost, torch.ones(2, 3, dtype=torch.bool))


def test_of_several_hypotheses_the_best_learns_and_the_chosen_one_answers() -> None:
    torch.manual_seed(0)
    method = MultiHypothesis(4, 8, hypotheses=3, pos_weight=1.0, selector_weight=0.3).eval()
    x, mask = torch.randn(4, 6, 4), torch.ones(4, 6, dtype=torch.bool)
    mask[2, 4:] = False
    target = torch.tensor([[0, 2], [1, -1], [3, 0], [5, 4]])
    # Pair by pair, as the sum of what the candidate and the hypothesis give the hidden layer.
    first, activation, *rest = method.scores
    expected, winners, shown = 0.0, [], method.logits(x, mask)
    with torch.no_grad():
        for row in range(4):
            summary = x[row, mask[row]].mean(0)
            losses, choices, every = [], [], []
            for query in method.queries:
                fused = method.fuse(torch.cat([summary, query]))
                logits = [torch.nn.Sequential(activation, *rest)(first(c) + method.shift(fused)).item() for c in x[row]]
                odds = [1 / (1 + math.exp(-logit)) for logit in logits]
                each = cross_entropy(odds, target[row].tolist(), mask[row].tolist())
                losses.append(sum(each) / len(each))
                choices.append(method.selector(fused).item())
                every.append(logits)
            winner, total = losses.index(min(losses)), sum(map(math.exp, choices))
            winners.append(winner)
            expected += (min(losses) + 0.3 * (math.log(total) - choices[winner])) / 4
            assert shown[row].tolist() == pytest.approx(every[choices.index(max(choices))], abs=1e-5)
    assert len(set(winners)) > 1
    assert method.loss(x, mask, target).item() == pytest.approx(expected, rel=1e-5)


def test_the_pointers_sets_are_estimated_since_its_order_matters() -> None:
    torch.manual_seed(0)
    head = PointerHead(8, layers=1, heads=2, ffn=16, max_len=4).eval()
    with torch.no_grad():
        pot = head(2 * torch.randn(2, 5, 8))
        subset = torch.tensor([[0, 2, 4], [1, 3, -1]])
        estimate, error = cpl.set_log_prob(pot, subset, max_len=4, generator=torch.Generator().manual_seed(0))
        for b, items in enumerate(([0, 2, 4], [1, 3])):
            every = torch.tensor(list(itertools.permutations(items)))
            exact = cpl.log_prob(pot[[b] * len(every)], every, max_len=4).logsumexp(0)
            assert 0 < error[b] < 0.05
            assert abs(float(estimate[b] - exact)) < 4 * float(error[b])
    with pytest.raises(ValueError, match="got Pointer, which depends on their order"):
        cpl.subset_nll(pot, subset, exact=True)
    assert cpl.set_log_prob(pot[:0], subset[:0])[0].shape == (0,)
    assert cpl.next_probs(pot[:0], subset[:0]).shape == (0, 6)


def test_at_least_as_many_as_asked_are_picked() -> None:
    torch.manual_seed(0)
    features, mask = torch.randn(3, 6, 8), torch.ones(3, 6, dtype=torch.bool)
    for rule, knob in (("argmax", 50.0), ("threshold", 1e-9)):
        lengths = [
            Stepwise(cpl.CPLHead(8, 16), ordered=True, stop_rule=rule, min_len=least)
            .select(features, mask, 4, knob)
            .lengths
            for least in (0, 2)
        ]
        assert lengths[0].eq(0).all()
        assert lengths[1].eq(2).all()


def test_a_method_of_other_potentials_is_selected_by_them() -> None:
    class Shy(Stepwise):
        def potentials(self, features: Tensor, mask: Tensor) -> cpl.Potentials:
            pot = super().potentials(features, mask)
            return cpl.Potentials(pot.unary - 100, pot.stop, pot.interaction, pot.mask)

    torch.manual_seed(0)
    x, mask = torch.randn(3, 6, 8), torch.ones(3, 6, dtype=torch.bool)
    head = cpl.CPLHead(8, 16)
    assert Stepwise(head, ordered=True).select(x, mask, 4, -50.0).lengths.tolist() == [4, 4, 4]
    assert Shy(head, ordered=True).select(x, mask, 4, -50.0).lengths.tolist() == [0, 0, 0]


def test_the_stop_is_calibrated_by_its_temperature_and_bias() -> None:
    torch.manual_seed(0)
    odds = 4 * torch.randn(20_000)
    done = torch.rand(20_000) < (odds / 2.5 - 0.7).sigmoid()
    temperature, bias = fit_stop(torch.cat([odds, torch.tensor([torch.inf])]), torch.cat([done, torch.tensor([True])]))
    assert temperature == pytest.approx(2.5, rel=0.05)
    assert bias == pytest.approx(-0.7, abs=0.05)
    nothing = fit_stop(torch.tensor([3.0, 4.0]), torch.tensor([True, True]))
    assert all(math.isfinite(value) for value in nothing)

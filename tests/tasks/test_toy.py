"""The paper's last appendix."""

from __future__ import annotations

from fractions import Fraction

import pytest

from torchcpl.decoding import greedy
from torchcpl.tasks import toy


def test_expected_matching_costs_are_the_papers() -> None:
    assert [toy.expected_cost(p) for p in toy.CANDIDATES] == [1, 1, Fraction(23, 24)]


def test_cost_of_one_prediction_under_each_answer() -> None:
    assert toy.matching_cost("de", "a") == Fraction(5, 4)
    assert toy.matching_cost("de", "bc") == Fraction(2, 3)
    assert toy.matching_cost("a", "bc") == 2


@pytest.mark.parametrize(("first", "expected"), [("a", "a"), ("b", "bc")])
def test_the_papers_parameters_decode_to_valid_sets(first: str, expected: str) -> None:
    assert toy.names(greedy(toy.paper_potentials(first)).tolist()[0]) == expected


def test_learned_from_single_samples_cpl_commits_and_matching_does_not() -> None:
    pot = toy.train_cpl(seed=1)
    assert toy.set_probability(pot, "a") == pytest.approx(0.5, abs=0.03)
    assert toy.set_probability(pot, "bc") == pytest.approx(0.5, abs=0.03)
    assert toy.set_probability(pot, "de") < 1e-3
    belief = toy.train_matching(seed=1)
    assert max(belief, key=belief.__getitem__) == "de"
    assert belief["de"] > 0.9

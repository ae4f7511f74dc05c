"""Potentials and Selection: shapes, rows, masks, lists."""

from __future__ import annotations

import math

import pytest
import torch
from strategies import KINDS, fixed_case

import torchcpl as cpl
from torchcpl.potentials import picked_mask
from torchcpl.selectors import PointerHead


def test_mask_defaults_to_everyone() -> None:
    pot = cpl.Potentials(torch.zeros(2, 3), torch.zeros(2), cpl.Dense(torch.zeros(2, 3, 3)))
    assert pot.mask.dtype == torch.bool
    assert pot.mask.all()
    assert pot.mask.shape == (2, 3)
    assert pot.num_candidates == 3
    assert len(pot) == 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [slice(1, 3), [2, 0, 0], torch.tensor([1]), torch.tensor([True, False, True])])
def test_rows_of_every_part(kind: str, rows: slice | list[int] | torch.Tensor) -> None:
    pot = fixed_case(kind, 0, 3, 4, padded=True).pot
    some = pot[rows]
    torch.testing.assert_close(some.unary, pot.unary[rows])
    torch.testing.assert_close(some.stop, pot.stop[rows])
    assert some.mask.equal(pot.mask[rows])
    torch.testing.assert_close(some.interaction.dense(), pot.interaction.dense()[rows])


def test_a_single_row_number_would_drop_the_batch() -> None:
    with pytest.raises(ValueError, match=r"rows: expected a slice, or indices or a mask of 3 rows, got int 1"):
        fixed_case("dense", 0, 3, 4).pot[1]


def test_check_names_the_first_nan_and_forgives_padding() -> None:
    pot = fixed_case("dense", 0, 2, 3).pot
    unary = pot.unary.clone()
    unary[1, 2] = math.nan
    with pytest.raises(ValueError, match=r"unary: expected no NaN, got 1 of them, the first at \(1, 2\)"):
        cpl.Potentials(unary, pot.stop, pot.interaction).check()
    mask = torch.tensor([[True] * 3, [True, True, False]])
    cpl.Potentials(unary, pot.stop, pot.interaction, mask).check()


def test_picked_mask() -> None:
    picks = torch.tensor([[[2, 0, -1]], [[-1, -1, -1]]])
    assert picked_mask(picks, 4).tolist() == [[[True, False, True, False]], [[False] * 4]]
    assert picked_mask(torch.zeros(3, 0, dtype=torch.long), 2).tolist() == [[False, False]] * 3
    assert picked_mask(torch.full((2, 1), -1), 0).shape == (2, 0)


def test_selection_as_lists_and_mask() -> None:
    indices = torch.tensor([[[3, 0], [1, -1]], [[-1, -1], [2, 1]]])
    selection = cpl.Selection(indices, (indices >= 0).sum(-1), torch.zeros(2, 2), 4)
    assert selection.tolist() == [[[3, 0], [1]], [[], [2, 1]]]
    assert selection.mask().shape == (2, 2, 4)
    assert selection.mask(6).shape == (2, 2, 6)
    assert selection.mask()[0, 0].tolist() == [True, False, False, True]
    empty = cpl.Selection(torch.zeros(2, 0, dtype=torch.long), torch.zeros(2), torch.zeros(2))
    assert empty.tolist() == [[], []]
    with pytest.raises(ValueError, match="num_candidates: expected the number of candidates N, got None"):
        empty.mask()
    moved = selection.to("cpu")
    assert moved.indices.equal(indices)
    assert moved.num_candidates == 4


def test_validation_can_be_switched_off_and_on() -> None:
    pot = fixed_case("dense", 0, 1, 3).pot
    repeated = torch.tensor([[1, 1]])
    try:
        cpl.set_validation(False)
        assert cpl.log_prob(pot, repeated).shape == (1,)
        cpl.set_validation(True)
        with pytest.raises(ValueError, match="order: expected no repeated index"):
            cpl.log_prob(pot, repeated)
    finally:
        cpl.set_validation(None)
    with pytest.raises(ValueError, match="order: expected no repeated index"):
        cpl.log_prob(pot, repeated)


@pytest.mark.parametrize("fast", [True, False])
def test_without_validation_nan_comes_back_as_nan(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not fast:
        monkeypatch.setattr("torchcpl.kernels.greedy_numpy.applies", lambda pot, rules: False)
    pot = cpl.Potentials(torch.zeros(1, 3), torch.tensor([math.nan]), cpl.Dense(torch.zeros(1, 3, 3)))
    try:
        cpl.set_validation(False)
        assert cpl.greedy(pot).log_prob.isnan().all()
    finally:
        cpl.set_validation(None)
    with pytest.raises(ValueError, match="stop: expected no NaN"):
        cpl.greedy(pot)


@pytest.mark.parametrize("kind", KINDS)
def test_potentials_move_and_change_dtype(kind: str) -> None:
    pot = fixed_case(kind, 0, 2, 4).pot
    pot = cpl.Potentials(pot.unary.requires_grad_(), pot.stop, pot.interaction, torch.tensor([[True] * 4, [False] * 4]))
    low = pot.half()
    parts = [v for v in vars(low.interaction).values() if isinstance(v, torch.Tensor)]
    assert {part.dtype for part in (low.unary, low.stop, *parts)} == {torch.float16}
    assert low.mask.dtype == torch.bool
    assert low.mask.equal(pot.mask)
    assert low.float().unary.dtype == torch.float32
    assert pot.to(torch.float32).interaction.shape == (2, 4)
    assert pot.to("cpu", torch.bfloat16).stop.dtype == torch.bfloat16
    assert pot.to("meta").mask.device.type == pot.to("meta").unary.device.type == "meta"
    assert cpl.greedy(pot.cpu()).tolist() == cpl.greedy(pot).tolist()
    assert pot.unary.requires_grad
    assert not pot.detach().unary.requires_grad
    assert pot.detach().unary.data_ptr() == pot.unary.data_ptr()


def test_masks_inside_an_interaction_stay_boolean() -> None:
    pot = PointerHead(8, heads=2, ffn=16).eval()(torch.randn(2, 5, 8))
    assert cpl.greedy(pot.float()).tolist() == cpl.greedy(pot).tolist()
    assert pot.half().interaction.mask.dtype == torch.bool  # type: ignore[attr-defined]


def test_reprs_are_short() -> None:
    pot = fixed_case("lowrank+stop", 0, 2, 4).pot
    assert repr(pot) == (
        "Potentials(B=2, N=4, LowRank(keys (2, 4, 3), values (2, 4, 3), stop_key (2, 3)), float64, cpu)"
    )
    picks = torch.tensor([[3, 0], [1, -1]])
    sel = cpl.Selection(picks, (picks >= 0).sum(-1), torch.tensor([-1.25, 0.0]))
    assert repr(sel) == "Selection(indices (2, 2), cpu, picks=[[3, 0], [1]], log_prob=[-1.25, 0.0])"
    assert len(repr(cpl.sample(pot, 1000))) < 50


def test_tables_in_notebooks() -> None:
    """The first eight rows, and how many there are; padding, empty selections and single ones too."""
    unary = torch.arange(20.0).view(10, 2)
    mask = torch.tensor([[True, False]]).expand(10, 2)
    pot = cpl.Potentials(unary, torch.zeros(10), cpl.DenseCoverage(torch.zeros(10, 2, 2)), mask)
    page = pot._repr_html_()
    assert "Potentials, 10 × 2, DenseCoverage" in page
    assert "<tr><td>7</td><td>1</td><td>0.00</td><td>0 (14.00)</td></tr>" in page
    assert page.endswith("<p>and 2 more</p>")
    picks = cpl.Selection(torch.tensor([[3, 1], [-1, -1]]), torch.tensor([2, 0]), torch.tensor([-1.5, 0.0]))
    rows = "<tr><td>0</td><td>3, 1</td><td>-1.50</td></tr><tr><td>1</td><td>nothing</td><td>0.00</td></tr>"
    assert picks._repr_html_().endswith(f"{rows}</table>")
    assert cpl.greedy(pot, max_len=0)._repr_html_().count("nothing") == 8
    alone = cpl.Selection(torch.tensor([3, 1]), torch.tensor(2), torch.tensor(-1.5))
    assert "<td>3, 1</td>" in alone._repr_html_()
    ruled_out = cpl.Potentials(torch.tensor([[1.0, -math.inf]]), torch.zeros(1), cpl.Dense(torch.zeros(1, 2, 2)))
    assert "<td>2</td><td>0.00</td><td>0 (1.00)</td>" in ruled_out._repr_html_()


def test_interactions_show_their_shapes() -> None:
    assert repr(cpl.DenseCoverage(torch.zeros(1, 2, 2))) == "DenseCoverage(cover (1, 2, 2))"

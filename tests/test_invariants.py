"""What must not matter: padding, batching, the order of candidates, the size of numbers, who else is there."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import KINDS, PAIRS, PARTS_OF, Case, cases, demands, fixed_case, orders
from torch import Tensor

import torchcpl as cpl

CLOSE = 1e-12
DISTINCT = ("ordinary", "large")  # which of two equals a search takes may depend on rounding
PER_ROW = ("stop_key", "cover_offset", "last_stop_key")


def parts_of(pot: cpl.Potentials) -> dict[str, Tensor]:
    """The tensors of the interaction."""
    return {n: getattr(pot.interaction, n) for n in PARTS_OF if getattr(pot.interaction, n, None) is not None}


def with_parts(
    pot: cpl.Potentials, unary: Tensor, stop: Tensor, mask: Tensor, parts: dict[str, Tensor]
) -> cpl.Potentials:
    extra: dict[str, Any] = dict(parts)
    if isinstance(pot.interaction, cpl.Contextual):
        extra["network"] = pot.interaction.network
    return cpl.Potentials(unary, stop, type(pot.interaction)(**extra), mask)


def reindexed(pot: cpl.Potentials, index: Tensor) -> cpl.Potentials:
    """Candidate j of the result is candidate ``index[j]`` of the given."""
    parts = {
        name: part[:, index][:, :, index] if name in PAIRS else part if name in PER_ROW else part[:, index]
        for name, part in parts_of(pot).items()
    }
    return with_parts(pot, pot.unary[:, index], pot.stop, pot.mask[:, index], parts)


def padded(pot: cpl.Potentials, more: int, junk: float) -> cpl.Potentials:
    """``more`` candidates that are not there, full of junk."""

    def pad(part: Tensor, *dims: int) -> Tensor:
        for dim in dims:
            shape = list(part.shape)
            shape[dim] = more
            part = torch.cat([part, part.new_full(shape, junk)], dim)
        return part

    parts = {
        name: pad(part, 1, 2) if name in PAIRS else part if name in PER_ROW else pad(part, 1)
        for name, part in parts_of(pot).items()
    }
    mask = torch.cat([pot.mask, torch.zeros(len(pot), more, dtype=torch.bool)], 1)
    return with_parts(pot, pad(pot.unary, 1), pot.stop, mask, parts)


def answers(pot: cpl.Potentials, target: Tensor, **options: Any) -> dict[str, Tensor]:
    """Everything deterministic that the library says of potentials."""
    found = cpl.beam(pot, 65, 65, **options)  # all sequences of four candidates
    chosen = cpl.greedy(pot, **options)
    said = {}
    if pot.interaction.depends_on == "set":
        said["exact"] = cpl.subset_nll(pot, target, exact=True, early_stop_weight=2.0, reduction="none")
    return said | {
        "ordered": cpl.ordered_nll(pot, target, reduction="none"),
        "log_prob": cpl.log_prob(pot, target, **options),
        "set": cpl.set_log_prob(pot, target, **options)[0],
        "greedy": chosen.log_prob,
        "greedy picks": chosen.lengths,
        "beam": found.log_prob,
    }


def same(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float = CLOSE) -> None:
    for name in a:
        assert torch.allclose(a[name], b[name], atol=tolerance, rtol=tolerance), (name, a[name], b[name])


@given(st.data())
def test_padding_equals_truncation(data: Any) -> None:
    case = data.draw(cases(max_n=4, manners=DISTINCT))
    target = data.draw(orders(case))
    more = data.draw(st.integers(1, 3))
    junk = data.draw(st.sampled_from([0.0, 100.0, -100.0, 7.0]))
    wide = padded(case.pot, more, junk)
    same(answers(case.pot, target), answers(wide, target))
    d, e = cpl.ContextualPlackettLuce(case.pot), cpl.ContextualPlackettLuce(wide)
    torch.testing.assert_close(e.inclusion_probs()[:, : case.size], d.inclusion_probs(), atol=CLOSE, rtol=CLOSE)
    assert e.inclusion_probs()[:, case.size :].eq(0).all()
    torch.testing.assert_close(e.entropy(), d.entropy(), atol=1e-11, rtol=CLOSE)
    assert (cpl.sample(wide, 5).indices < case.size).all()
    assert (cpl.stochastic_beam(wide, 3).indices < case.size).all()


@given(st.data())
def test_padding_of_targets_equals_truncation(data: Any) -> None:
    case = data.draw(cases(max_n=4, manners=DISTINCT))
    target = data.draw(orders(case, extra=0))
    longer = torch.cat([target, torch.full((len(target), 3), -1)], 1)
    same(answers(case.pot, target), answers(case.pot, longer))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_padding_are_zero(kind: str) -> None:
    pot = padded(fixed_case(kind, 0, 2, 4).pot, 2, 3.0)
    leaves = {name: part.requires_grad_() for name, part in parts_of(pot).items()}
    unary = pot.unary.requires_grad_()
    target = torch.tensor([[3, 0], [1, -1]])
    (cpl.ordered_nll(pot, target) + cpl.subset_nll(pot, target)).backward()
    assert unary.grad is not None
    assert unary.grad[:, 4:].eq(0).all()
    assert unary.grad[:, :4].ne(0).all()
    for name, leaf in leaves.items():
        if name in ("keys", "values", "stop_row", *PAIRS):
            assert leaf.grad is not None
            assert leaf.grad[:, 4:].eq(0).all(), name
            if name in PAIRS:
                assert leaf.grad[:, :, 4:].eq(0).all()


@given(st.data())
def test_batched_equals_looped(data: Any) -> None:
    case = data.draw(cases(max_n=4, manners=DISTINCT))
    target = data.draw(orders(case))
    asked = data.draw(demands(case, parts=("max_len", "min_len")))
    together = answers(case.pot, target, **asked.options)
    alone = [answers(case.pot[b : b + 1], target[b : b + 1], **asked.options) for b in range(len(case.rows))]
    same(together, {name: torch.cat([one[name] for one in alone]) for name in together})
    picks = torch.cat([cpl.greedy(case.pot[b : b + 1], **asked.options).indices for b in range(len(case.rows))])
    scores = cpl.log_prob(case.pot, picks, **asked.options)
    torch.testing.assert_close(scores, together["greedy"], atol=1e-11, rtol=CLOSE)


@given(st.data())
def test_permuting_candidates_permutes_the_result(data: Any) -> None:
    case = data.draw(cases(max_n=4, manners=DISTINCT))
    index = torch.tensor(data.draw(st.permutations(range(case.size))))
    inverse = index.argsort()
    target = data.draw(orders(case))
    moved = reindexed(case.pot, index)
    renamed = torch.where(target >= 0, inverse[target.clamp(min=0)], -1)
    before, after = answers(case.pot, target), answers(moved, renamed)
    # Ties are broken by index, so only what does not depend on ties can be compared for searches.
    same({k: before[k] for k in ("ordered", "exact", "log_prob", "set") if k in before}, after)
    d, e = cpl.ContextualPlackettLuce(case.pot), cpl.ContextualPlackettLuce(moved)
    torch.testing.assert_close(e.inclusion_probs(), d.inclusion_probs()[:, index], atol=1e-11, rtol=CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_permuting_candidates_permutes_searches(kind: str) -> None:
    pot = fixed_case(kind, 1, 3, 7, padded=True).pot
    index = torch.tensor([4, 2, 6, 0, 1, 5, 3])
    moved = reindexed(pot, index)
    for decode in (cpl.greedy, lambda p: cpl.beam(p, 5, 5)):
        before, after = decode(pot), decode(moved)
        back = torch.where(after.indices >= 0, index[after.indices.clamp(min=0)], -1)
        assert back.equal(before.indices)
        torch.testing.assert_close(after.log_prob, before.log_prob, atol=CLOSE, rtol=CLOSE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_no_nan_in_low_precision_or_at_large_logits(kind: str, dtype: torch.dtype, scale: float) -> None:
    case = fixed_case(kind, 2, 4, 6, padded=True)
    parts = {
        name: part.to(dtype) * (scale if name in ("stop_row", *PAIRS) or "key" in name.split("_")[-1] else 1)
        for name, part in parts_of(case.pot).items()
    }
    unary, stop = (case.pot.unary * scale).to(dtype), (case.pot.stop * scale).to(dtype)
    leaves = [t.detach().requires_grad_() for t in (unary, stop, *parts.values())]
    pot = with_parts(case.pot, leaves[0], leaves[1], case.pot.mask, dict(zip(parts, leaves[2:], strict=True)))
    target = torch.full((4, 3), -1)
    for b in range(4):
        real = case.pot.mask[b].nonzero().squeeze(-1)[:3]
        target[b, : len(real)] = real
    losses = {
        "ordered": lambda: cpl.ordered_nll(pot, target),
        "permutations": lambda: cpl.subset_nll(pot, target),
    }
    if pot.interaction.depends_on == "set":
        losses["subsets"] = lambda: cpl.subset_nll(pot, target, subsets=4)
        losses["exact"] = lambda: cpl.subset_nll(pot, target, exact=True, early_stop_weight=5.0)
    for name, loss in losses.items():
        value = loss()
        assert value.isfinite(), name
        gradients = torch.autograd.grad(value, leaves, allow_unused=True)
        assert all(g is None or g.isfinite().all() for g in gradients), name
    selections = [cpl.greedy(pot), cpl.sample(pot, 5), cpl.beam(pot, 4, 4), cpl.stochastic_beam(pot, 4)]
    selections += [cpl.sample(pot, 5, temperature=0.1, top_k=3, top_p=0.9), cpl.greedy(pot, min_len=1)]
    for selection in selections:
        assert not selection.log_prob.isnan().any()
        assert (selection.log_prob <= 1e-3).all()
        if selection.weight is not None:
            assert selection.weight.isfinite().all()
    assert not cpl.set_log_prob(pot, target)[0].isnan().any()
    d = cpl.ContextualPlackettLuce(pot, max_len=3)
    assert d.entropy().isfinite().all()
    assert d.inclusion_probs().isfinite().all()


def test_minus_infinity_rules_a_candidate_out() -> None:
    """As if it were not there, also for what the others' gradients are."""
    case = fixed_case("dense+stop", 3, 2, 4)
    unary = case.pot.unary.clone()
    unary[:, 2] = -math.inf
    mask = torch.tensor([[True, True, False, True]] * 2)
    out = cpl.Potentials(unary.requires_grad_(), case.pot.stop, case.pot.interaction)
    gone = cpl.Potentials(case.pot.unary.clone().requires_grad_(), case.pot.stop, case.pot.interaction, mask)
    target = torch.tensor([[3, 0, -1], [1, -1, -1]])
    same(answers(out, target), answers(gone, target))
    (first,) = torch.autograd.grad(cpl.ordered_nll(out, target) + cpl.subset_nll(out, target, exact=True), out.unary)
    (second,) = torch.autograd.grad(
        cpl.ordered_nll(gone, target) + cpl.subset_nll(gone, target, exact=True), gone.unary
    )
    torch.testing.assert_close(first, second)
    # All ruled out, and the stop as well: nothing but stopping is left.
    nobody = cpl.Potentials(torch.full((1, 3), -math.inf), torch.full((1,), -math.inf), cpl.Dense(torch.zeros(1, 3, 3)))
    for selection in (cpl.greedy(nobody), cpl.sample(nobody), cpl.beam(nobody, 2)):
        assert (selection.lengths == 0).all()
        assert (selection.log_prob == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_smallest_inputs(kind: str) -> None:
    """One candidate; no target; a row of nothing but padding selects nothing, with log-probability 0."""
    case = fixed_case(kind, 4, 2, 1)
    pot = cpl.Potentials(case.pot.unary, case.pot.stop, case.pot.interaction, torch.tensor([[True], [False]]))
    limits: list[dict[str, Any]] = [{}, {"max_len": 0}, {"max_len": 1}]
    for options in limits:
        found = cpl.beam(pot, 2, 1, **options)
        best = cpl.Selection(found.indices[:, 0], found.lengths[:, 0], found.log_prob[:, 0])
        drawn, distinct = cpl.sample(pot, 3, **options), cpl.stochastic_beam(pot, 1, **options)
        for selection in (cpl.greedy(pot, **options), best, drawn, distinct):
            assert selection.lengths[..., 1].eq(0).all()
            assert selection.log_prob[..., 1].eq(0).all()
            assert selection.indices[..., 1, :].eq(-1).all()
    empty = torch.zeros(2, 0, dtype=torch.long)
    assert cpl.log_prob(pot, empty)[1] == 0
    assert cpl.ordered_nll(pot, empty, reduction="none")[1] == 0
    assert cpl.subset_nll(pot, empty, reduction="none")[1] == 0
    if pot.interaction.depends_on == "set":
        assert cpl.subset_nll(pot, empty, exact=True, reduction="none")[1] == 0
    assert cpl.set_log_prob(pot, empty)[0][1] == 0
    d = cpl.ContextualPlackettLuce(pot)
    assert d.entropy()[1] == 0
    assert d.inclusion_probs()[1].item() == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)])
def test_empty_batches_and_no_candidates(kind: str, shape: tuple[int, int]) -> None:
    batch, n = shape
    pot = fixed_case(kind, 5, batch, n).pot
    target = torch.full((batch, 2), -1)
    assert cpl.ordered_nll(pot, target, reduction="none").shape == (batch,)
    assert cpl.subset_nll(pot, target, reduction="none").shape == (batch,)
    if pot.interaction.depends_on == "set":
        assert cpl.subset_nll(pot, target, exact=True, reduction="none").shape == (batch,)
    assert cpl.log_prob(pot, target).shape == (batch,)
    assert cpl.set_log_prob(pot, target)[0].shape == (batch,)
    assert cpl.greedy(pot).indices.shape == (batch, n)
    assert cpl.sample(pot, 3).indices.shape == (3, batch, n)
    assert cpl.beam(pot, 3, 2).indices.shape == (batch, 2, n)
    assert cpl.stochastic_beam(pot, 2).indices.shape == (2, batch, n)
    d = cpl.ContextualPlackettLuce(pot)
    assert d.sample((2,)).shape == (2, batch, n)
    assert d.entropy().shape == (batch,)
    assert d.inclusion_probs().shape == (batch, n)


@given(st.data())
def test_inputs_are_never_written_to(data: Any) -> None:
    case: Case = data.draw(cases())
    target = data.draw(orders(case))
    asked = data.draw(demands(case))
    tensors = [case.pot.unary, case.pot.stop, case.pot.mask, target, *parts_of(case.pot).values()]
    for constraint in asked.options.get("constraints", []):
        if not callable(constraint):
            tensors += [v for v in vars(constraint).values() if isinstance(v, Tensor)]
    if isinstance(asked.options.get("stop_bias"), Tensor):
        tensors.append(asked.options["stop_bias"])
    kept = [t.clone() for t in tensors]
    versions = [t._version for t in tensors]
    answers(case.pot, target, **asked.options)
    cpl.subset_nll(case.pot, target)
    if case.pot.interaction.depends_on == "set":
        cpl.subset_nll(case.pot, target, subsets=2)
    cpl.sample(case.pot, 2, temperature=0.7, top_k=2, top_p=0.9, **asked.options)
    cpl.stochastic_beam(case.pot, 2, **asked.options)
    cpl.set_log_prob(case.pot, target, num_samples=4, **asked.options)
    d = cpl.ContextualPlackettLuce(case.pot, **asked.options)
    d.entropy()
    d.expand((2, len(case.rows))).sample()
    for tensor, copy, version in zip(tensors, kept, versions, strict=True):
        assert tensor.equal(copy)
        assert tensor._version == version


@pytest.mark.parametrize("kind", ["dense", "lowrank"])
def test_views_and_strides_do_not_matter(kind: str) -> None:
    """Expanded, transposed and sliced inputs give what contiguous ones do."""
    pot = fixed_case(kind, 6, 3, 5).pot
    odd = {name: part.transpose(-1, -2).contiguous().transpose(-1, -2) for name, part in parts_of(pot).items()}
    unary = torch.stack([pot.unary, pot.unary * 0], -1)[..., 0]
    stop = pot.stop[:1].expand(3)
    strange = with_parts(pot, unary, stop, pot.mask[:1].expand(3, 5), odd)
    plain = with_parts(pot, pot.unary, stop.clone(), pot.mask, parts_of(pot))
    target = torch.tensor([[0, 3, 1], [2, -1, -1], [4, 1, -1]]).t().contiguous().t()
    same(answers(plain, target.contiguous()), answers(strange, target))

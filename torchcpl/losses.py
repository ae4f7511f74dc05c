"""Losses for ordered and unordered targets: teacher forcing over all contexts at once."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchcpl.checks import check_choice, check_count, check_generator, check_number, describe
from torchcpl.constraints import History, Rules
from torchcpl.functional import blame_nan, check_sequences, reduced, step_log_probs, summed, trimmed, uniform
from torchcpl.kernels import dispatch
from torchcpl.potentials import Potentials, picked_mask

REDUCTIONS = ("mean", "sum", "none")
EXACT_LIMIT = 12  # largest target whose 2^T contexts exact=True will build


def ordered_nll(pot: Potentials, order: Tensor, *, per_step: bool = False, reduction: str = "mean") -> Tensor:
    """Negative log-likelihood of the sequences ``order`` (B, T), −1 after the end, the stop included.

    ``−Σ_t log P(order_t | order_{<t}) − log P(stop | order)``, all prefixes at once. ``per_step`` divides each row by
    its number of choices (picks + 1). For an empty target it is the loss of the stop. ``reduction`` over the rows is
    ``mean | sum | none``.
    """
    check_choice("reduction", reduction, REDUCTIONS)
    check_choice("per_step", per_step, (True, False))
    check_sequences("order", order, pot, picks_real=True)
    log_probs = dispatch.sequence_log_probs(pot, order.unsqueeze(1), Rules(pot))  # (B, 1)
    if per_step:
        log_probs = log_probs / ((order >= 0).sum(-1, keepdim=True) + 1)
    loss = -reduced(log_probs, reduction)
    return blame_nan(loss.squeeze(1) if reduction == "none" else loss, pot)


def subset_nll(
    pot: Potentials,
    target: Tensor,
    permutations: int = 10,
    early_stop_weight: float | None = None,
    stop_weight: float = 1.0,
    *,
    subsets: int | None = None,
    exact: bool = False,
    per_step: bool = True,
    reduction: str = "mean",
    generator: torch.Generator | None = None,
) -> Tensor:
    """Loss of the unordered targets ``target`` (B, T), −1 padded, in any order.

    A context S ⊆ target with R = target∖S left contributes

        S ≠ target:  −mean_{j∈R} log P(j | S) + early_stop_weight·P(stop | S)
        S = target:  −stop_weight·log P(stop | S)

    and a row's loss is the mean over its contexts, which are

    - by default, every prefix of ``permutations`` random orders (the paper's appendix; ``early_stop_weight`` 5);
    - with ``subsets=M``, M subsets drawn uniformly (the paper's main text; ``early_stop_weight`` 0);
    - with ``exact=True``, all 2^T subsets: the expectation of the former, for targets of at most 12.

    A given ``early_stop_weight`` holds in all three. The mean over prefixes, the paper's, gives the first pick of a
    short target more weight than that of a long one; ``per_step=False`` sums over the prefixes instead, and with
    ``early_stop_weight=0`` is then the expected −log P(order) over random orders, a likelihood. ``reduction`` over
    the rows is ``mean | sum | none``.
    """
    check_choice("exact", exact, (True, False))
    check_choice("per_step", per_step, (True, False))
    by_prefix = not exact and subsets is None
    weights = (early_stop_weight if early_stop_weight is not None else 5.0 if by_prefix else 0.0, stop_weight)
    check_choice("reduction", reduction, REDUCTIONS)
    check_count("permutations", permutations, 1)
    check_sequences("target", target, pot, picks_real=True)
    check_generator(generator, target.device)
    for name, weight in zip(("early_stop_weight", "stop_weight"), weights, strict=True):
        check_number(name, weight, "a number of at least 0", lambda value: 0 <= value < math.inf)
    _check_contexts(pot, subsets, exact, per_step)
    if by_prefix:
        loss = _permutation_loss(pot, target, shuffled(target, permutations, generator), weights)
        if not per_step:
            loss = loss * ((target >= 0).sum(-1) + 1)
    elif exact:
        target = trimmed(target)
        loss = _subset_loss(pot, target, _all_subsets(target), weights)
    else:
        shape = (target.shape[0], subsets, target.shape[1])
        coin = uniform(shape, target.device, generator)  # type: ignore[arg-type]
        loss = _subset_loss(pot, target, coin < 0.5, weights)
    return blame_nan(reduced(loss, reduction), pot)


def _check_contexts(pot: Potentials, subsets: int | None, exact: bool, per_step: bool) -> None:
    """Check the combination of ``subsets``, ``exact`` and ``per_step``, and that the interaction allows it."""
    if not exact and subsets is None:
        return
    if exact and subsets is not None:
        raise ValueError(f"subsets: expected None with exact=True, which uses all of them, got {describe(subsets)}")
    if not exact:
        check_count("subsets", subsets, 1)
    if not per_step:
        raise ValueError("per_step: expected True with subsets or exact=True, whose contexts are not steps, got False")
    if pot.interaction.depends_on != "set":
        raise ValueError(
            "subsets, exact: expected an interaction that depends on which picks were made, got "
            f"{type(pot.interaction).__name__}, which depends on their order too"
        )


def _all_subsets(target: Tensor) -> Tensor:
    """(B, 2^T, T) True where an item of ``target`` (B, T) is in the subset."""
    items = target.shape[1]
    if items > EXACT_LIMIT:
        raise ValueError(f"target: expected at most {EXACT_LIMIT} items with exact=True, got {items}")
    return subsets_of(items, target.device).expand(target.shape[0], -1, -1)


def subsets_of(items: int, device: torch.device | None = None) -> Tensor:
    """(2^k, k) all subsets of k items, in binary: True where an item is in the subset."""
    # Made on the device: while a CUDA graph is captured nothing may be copied to it.
    return (torch.arange(2**items, device=device).unsqueeze(-1) >> torch.arange(items, device=device)) & 1 == 1


def shuffled(target: Tensor, permutations: int, generator: torch.Generator | None = None) -> Tensor:
    """(B, P, T) random orders of ``target`` (B, T), its padding kept at the end."""
    shape = (target.shape[0], permutations, target.shape[1])
    keys = uniform(shape, target.device, generator)
    keys = keys + (target < 0).unsqueeze(1)  # padding sorts last
    return target.unsqueeze(1).expand(shape).gather(2, keys.argsort(-1))


def _permutation_loss(pot: Potentials, target: Tensor, orders: Tensor, weights: tuple[float, float]) -> Tensor:
    """(B,) the mean over the prefixes of ``orders`` (B, P, T)."""
    picks, stop = dispatch.remaining_log_probs(pot, orders, Rules(pot))  # (B, P, T+1)
    size = (target >= 0).sum(-1, keepdim=True)  # (B, 1)
    left = (size - torch.arange(picks.shape[2], device=target.device)).unsqueeze(1)  # (B, 1, T+1); < 0 after the end
    terms = _context_terms(picks, stop, left, weights)
    return terms.masked_fill(left < 0, 0).sum(-1).mean(1) / (size.squeeze(-1) + 1)


def _subset_loss(pot: Potentials, target: Tensor, picked: Tensor, weights: tuple[float, float]) -> Tensor:
    """(B,) the mean over the contexts ``picked`` (B, M, T), True where an item is in S."""
    picks = target.unsqueeze(1).masked_fill(~picked, -1)  # (B, M, T)
    count = (picks >= 0).sum(-1)  # (B, M)
    history = History(picked_mask(picks, pot.num_candidates), torch.full_like(count, -1), count)
    log_probs = step_log_probs(pot, pot.interaction.after(picks), history, Rules(pot))  # (B, M, N+1)
    remaining = target.unsqueeze(1).masked_fill(picked, -1)  # (B, M, T)
    left = (remaining >= 0).sum(-1)
    return _context_terms(summed(log_probs, remaining), log_probs[..., -1], left, weights).mean(1)


def _context_terms(picks: Tensor, stop: Tensor, left: Tensor, weights: tuple[float, float]) -> Tensor:
    """The loss of each context from Σ log P of the remaining items, log P of the stop, and the number remaining."""
    early_stop_weight, stop_weight = weights
    going_on = -picks / left.clamp(min=1)
    if early_stop_weight != 0:
        going_on = going_on + early_stop_weight * stop.exp()
    # A weight of 0 leaves the stop out, also where its log-probability is −inf.
    ended = -stop_weight * stop if stop_weight != 0 else torch.zeros_like(stop)
    return torch.where(left > 0, going_on, ended)

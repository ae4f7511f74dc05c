"""The specification in plain torch: log-probabilities of a step and of a sequence.

After the picks S the process chooses among what is left and the stop:

    ℓ_j(S) = θ_j + Σ_{i∈S} W[j, i],      P(j | S) = exp ℓ_j(S) / Σ_{k∉S} exp ℓ_k(S)

where k runs over the candidates not in S that the rules allow, and the stop. A sequence's probability is the
product of its choices, the stop included; once ``max_len`` is reached the stop is certain.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchcpl.checks import check_order, check_tensor, readable, validating
from torchcpl.constraints import Constraint, History, Rules
from torchcpl.interactions.base import State, accumulator
from torchcpl.potentials import Potentials, check_potentials, latest


def start_state(pot: Potentials, rules: Rules, width: int) -> State:
    """The interaction's state of K = ``width`` hypotheses before the first pick, or after ``rules.given``."""
    given = None if rules.given is None else rules.given.expand(-1, width, -1)
    if given is not None and not readable():  # some of it may be padding
        return pot.interaction.after(given)
    state = pot.interaction.start(width)
    for pick in () if given is None else given.unbind(-1):
        state = pot.interaction.advance(state, pick)
    return state


def step_logits(pot: Potentials, state: State, history: History, rules: Rules) -> Tensor:
    """(B, K, N+1) logits of the next choice, the stop last, −inf where the rules forbid it."""
    added, added_stop = pot.interaction.logits(state)
    dtype = accumulator(torch.promote_types(added.dtype, pot.unary.dtype))
    allowed, stop_allowed = rules.allowed(history)
    candidates = (pot.unary.to(dtype).unsqueeze(1) + added).masked_fill(~allowed, -torch.inf)
    stop = rules.biased(pot.stop.to(dtype)).to(dtype).unsqueeze(-1).expand(candidates.shape[:2])
    if added_stop is not None:
        stop = stop + added_stop.to(dtype)
    if stop_allowed is not None:
        stop = stop.masked_fill(~stop_allowed, -torch.inf)
    # With nothing left to pick the stop is certain, even if its own logit is −inf.
    stuck = stop.detach() == -torch.inf
    if candidates.shape[-1]:
        stuck = stuck & (candidates.detach().amax(-1) == -torch.inf)
    return torch.cat([candidates, stop.masked_fill(stuck, 0).unsqueeze(-1)], -1)


def step_log_probs(pot: Potentials, state: State, history: History, rules: Rules) -> Tensor:
    """(B, K, N+1) log-probabilities of the next choice, the stop last."""
    return step_logits(pot, state, history, rules).log_softmax(-1)


def prefix_history(order: Tensor, num_candidates: int) -> History:
    """The histories of all T+1 prefixes of ``order`` (B, P, T), as K = P·(T+1) hypotheses."""
    batch, width, steps = order.shape
    # rank[n]: the step at which n is picked, steps if never; n is in prefix t iff rank[n] < t.
    rank = order.new_full((batch, width, num_candidates + 1), steps)
    positions = torch.arange(steps, device=order.device).expand(order.shape)
    rank.scatter_(2, order.where(order >= 0, num_candidates), positions)
    prefix = torch.arange(steps + 1, device=order.device)
    selected = rank[..., :num_candidates].unsqueeze(2) < prefix.view(-1, 1)  # (B, P, T+1, N)
    count = torch.minimum(prefix, (order >= 0).sum(-1, keepdim=True))  # (B, P, T+1)
    return History(selected.flatten(1, 2), latest(order).flatten(1, 2), count.flatten(1, 2))


def prefix_logits(pot: Potentials, order: Tensor, rules: Rules) -> Tensor:
    """(B, P, T+1, N+1) logits after every prefix of ``order`` (B, P, T), all at once (teacher forcing)."""
    history = prefix_history(order, pot.num_candidates)
    logits = step_logits(pot, pot.interaction.prefixes(order), history, rules)
    return logits.view(pot.unary.shape[0], order.shape[1], order.shape[2] + 1, pot.num_candidates + 1)


def prefix_log_probs(pot: Potentials, order: Tensor, rules: Rules, remaining: bool = False) -> tuple[Tensor, Tensor]:
    """After each prefix of ``order`` (B, P, T), log P of the next pick and of the stop, two (B, P, T+1).

    With ``remaining`` not of the next pick alone but summed over all picks still to come; 0 where there are none.
    """
    log_probs = prefix_logits(pot, order, rules).log_softmax(-1)  # (B, P, T+1, N+1)
    steps = order.shape[2]
    if remaining:
        place = torch.arange(steps, device=order.device)
        passed = place < torch.arange(steps + 1, device=order.device).unsqueeze(-1)  # (T+1, T)
        picks = order.unsqueeze(2).masked_fill(passed, -1)  # (B, P, T+1, T)
    else:
        picks = torch.nn.functional.pad(order, (0, 1), value=-1).unsqueeze(-1)  # (B, P, T+1, 1)
    return summed(log_probs, picks), log_probs[..., -1]


def summed(log_probs: Tensor, picks: Tensor) -> Tensor:
    """Σ log P (...) of ``picks`` (..., C), −1 for none, from ``log_probs`` (..., N+1)."""
    # Earlier picks have log-probability −inf: masked before summing, so that no 0·inf reaches the gradient.
    return log_probs.gather(-1, picks.clamp(min=0)).masked_fill(picks < 0, 0).sum(-1)


def sequence_log_probs(pot: Potentials, order: Tensor, rules: Rules) -> Tensor:
    """(B, P) log-probabilities of the sequences ``order`` (B, P, T)."""
    return whole_log_probs(*prefix_log_probs(pot, order, rules), order)


def whole_log_probs(picks: Tensor, stop: Tensor, order: Tensor) -> Tensor:
    """(B, P) log-probabilities of ``order`` (B, P, T) from those of each pick and of each stop, two (B, P, T+1)."""
    length = (order >= 0).sum(-1, keepdim=True)
    return picks.sum(-1) + stop.gather(-1, length).squeeze(-1)


def log_prob(
    pot: Potentials,
    order: Tensor,
    *,
    max_len: int | None = None,
    min_len: int = 0,
    stop_bias: float | Tensor = 0.0,
    constraints: Sequence[Constraint] = (),
) -> Tensor:
    """Exact log-probability (B,) of picking ``order`` (B, T), in that order, and then stopping.

    The options describe the process as a decoder's do, so ``log_prob(pot, sel.indices, **options)`` is the
    ``sel.log_prob`` of the decoder that was given the same options. Sequences the process cannot produce have −inf.
    """
    rules = Rules(pot, max_len, min_len, stop_bias, constraints)
    check_sequences("order", order, pot)
    return blame_nan(sequence_log_probs(pot, order.unsqueeze(1), rules).squeeze(1), pot)


def check_sequences(
    name: str, order: Tensor, pot: Potentials, picks_real: bool = False, broadcast: bool = False
) -> None:
    """Check (B, T) sequences, and their values where values are checked; if ``broadcast``, one row takes any B."""
    check_potentials(pot)
    batch = pot.unary.shape[0]
    check_tensor(name, order, ("B" if broadcast and batch == 1 else batch, "T"), "long", like=pot.unary)
    if validating(order):
        check_order(name, order, pot.num_candidates, pot.mask.expand(len(order), -1) if picks_real else None)


def longest(order: Tensor) -> int:
    """The number of picks of the longest sequence of (B, T), or T where values may not be read."""
    if not readable():
        return order.shape[1]
    return int((order >= 0).sum(-1).max()) if order.numel() else 0


def trimmed(order: Tensor) -> Tensor:
    """``order`` (B, T) without the columns that are padding in all rows; unchanged where values may not be read."""
    return order[:, : longest(order)]


def uniform(
    shape: Sequence[int], device: torch.device, generator: torch.Generator | None, dtype: torch.dtype | None = None
) -> Tensor:
    """Random numbers in [0, 1). With symbolic sizes torch.rand accepts no generator, not even None."""
    if generator is None:
        return torch.rand(shape, dtype=dtype, device=device)
    return torch.rand(shape, dtype=dtype, device=device, generator=generator)


def reduced(loss: Tensor, reduction: str) -> Tensor:
    """The losses (B,) themselves (``none``), their ``sum`` or their ``mean``, which is 0 for no rows."""
    if reduction == "none":
        return loss
    return loss.mean() if reduction == "mean" and len(loss) else loss.sum()


def blame_nan(result: Tensor, pot: Potentials) -> Tensor:
    """``result``; if it contains NaN and values are checked, raise naming the potential that caused it."""
    if validating(result) and bool(result.isnan().any()):
        pot.check()
        raise ValueError(f"pot: expected logits in the range of {result.dtype}, got NaN from sums that overflow")
    return result


def logsumexp(values: Tensor) -> Tensor:
    """Over the last dimension; where all values are −inf the gradient is zero instead of NaN."""
    dead = (values == -torch.inf).all(-1, keepdim=True)
    return values.masked_fill(dead, 0).logsumexp(-1).masked_fill(dead.squeeze(-1), -torch.inf)

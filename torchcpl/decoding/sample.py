"""Sampling, with temperature, top-k and top-p."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torchcpl.checks import check_count, check_generator, check_number, tracing
from torchcpl.constraints import Constraint, Rules
from torchcpl.decoding.rollout import refuse_tracing, rollout, samples_first
from torchcpl.functional import uniform
from torchcpl.kernels import dispatch
from torchcpl.potentials import Potentials, Selection

BLOCK = 1024  # weights in a block


@torch.no_grad()
def sample(
    pot: Potentials,
    num_samples: int | None = None,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    max_len: int | None = None,
    min_len: int = 0,
    stop_bias: float | Tensor = 0.0,
    constraints: Sequence[Constraint] = (),
    generator: torch.Generator | None = None,
) -> Selection:
    """Draw selections: ``indices`` (S, B, T) for ``num_samples`` = S, (B, T) when it is not given.

    ``temperature`` divides the logits of a step, ``top_k`` keeps the k likeliest choices, ``top_p`` the fewest whose
    probabilities add up to at least p; the stop is one of the choices. ``log_prob`` is the exact log-probability under
    the process without these three.
    """
    refuse_tracing()
    rules = Rules(pot, max_len, min_len, stop_bias, constraints)
    check_generator(generator, pot.unary.device)
    check_count("num_samples", num_samples, 1, optional=True)
    drawn = draw(pot, rules, num_samples or 1, temperature, top_k, top_p, generator)
    return drawn if num_samples is not None else drawn.map(lambda part: part[0])


@torch.no_grad()
def draw(
    pot: Potentials,
    rules: Rules,
    num_samples: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Selection:
    """``sample`` under ``rules``: (S, B, T)."""
    if generator is not None and torch.compiler.is_compiling():
        raise ValueError("generator: expected None in torch.compile or torch.export (use torch.manual_seed), got one")
    check_sharpening(temperature, top_k, top_p)

    def choose(log_probs: Tensor) -> Tensor:
        return categorical(sharpen(log_probs, temperature, top_k, top_p).exp(), generator)

    def plain() -> Selection:
        return rollout(pot, rules, num_samples, choose)

    truncated = top_k is not None or top_p is not None
    return samples_first(dispatch.sample(pot, rules, num_samples, temperature, generator, truncated, plain))


def check_sharpening(temperature: float, top_k: int | None, top_p: float | None) -> None:
    check_number("temperature", temperature, "a positive number", lambda value: 0 < value < math.inf)
    check_count("top_k", top_k, 1, optional=True)
    check_number("top_p", top_p, "a number in (0, 1]", lambda value: 0 < value <= 1, optional=True)


def categorical(weight: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw an index (...) from unnormalised weights (..., C), by inverse CDF.

    With many weights first a block is drawn by its sum, then one of its members: no cumulative sum gets so long that it
    loses precision.
    """
    count = weight.shape[-1]
    if tracing() or count <= 2 * BLOCK:
        total = weight.cumsum(-1)
        share = uniform((*weight.shape[:-1], 1), weight.device, generator, weight.dtype) * total[..., -1:]
        return (total <= share).sum(-1).clamp(max=count - 1)
    whole = count - count % BLOCK
    sums = torch.cat([weight[..., :whole].unflatten(-1, (-1, BLOCK)).sum(-1), weight[..., whole:].sum(-1, True)], -1)
    place = categorical(sums, generator).unsqueeze(-1) * BLOCK + torch.arange(BLOCK, device=weight.device)
    inside = weight.gather(-1, place.clamp(max=count - 1)).masked_fill(place >= count, 0)
    return place.gather(-1, categorical(inside, generator).unsqueeze(-1)).squeeze(-1)


def sharpen(log_probs: Tensor, temperature: float, top_k: int | None, top_p: float | None) -> Tensor:
    """Log-probabilities (..., C) after temperature, top-k and top-p, in that order; unnormalised, −inf where cut."""
    if temperature != 1:
        log_probs = (log_probs / temperature).log_softmax(-1)
    if top_k is not None and top_k < log_probs.shape[-1]:
        # Exactly k are kept, of ties the lowest indices, so that top_k=1 is greedy.
        kept = log_probs.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]
        cut = torch.full_like(log_probs, -torch.inf)
        log_probs = cut.scatter(-1, kept, log_probs.gather(-1, kept)).log_softmax(-1)
    if top_p is not None and top_p < 1:
        ranked, order = log_probs.sort(dim=-1, descending=True, stable=True)
        probs = ranked.exp()
        # A choice is kept while the likelier ones add up to less than top_p; the first always is.
        ranked = ranked.masked_fill(probs.cumsum(-1) - probs >= top_p, -torch.inf)
        log_probs = torch.empty_like(ranked).scatter_(-1, order, ranked)
    return log_probs

"""Whether the loss kernels, as they are compiled here, are right.

They run on tensor cores and fill the registers, and ptxas has been seen to compile such kernels into wrong gradients
(12.8, which comes with Triton 3.6 and 3.7). So every kind of them is compared with its plain twin before it is first
used, on two rows of random numbers.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from torchcpl import functional
from torchcpl.checks import capturing
from torchcpl.constraints import Rules
from torchcpl.interactions import LowRank
from torchcpl.kernels import nll_triton
from torchcpl.kernels.nll_triton import Tiles
from torchcpl.potentials import Potentials

ROWS = 2
NAMES = ("loss", "∂unary", "∂stop", "∂keys", "∂values", "∂stop_key")

_faults: dict[tuple[Any, ...], str | None] = {}


def fault(pot: Potentials, order: Tensor, whole: bool) -> str | None:
    """What is wrong with the kernels for such inputs, ``whole`` sequences or their picks; None if nothing is known."""
    interaction = pot.interaction
    assert isinstance(interaction, LowRank)
    keys, values, stop_key = interaction.keys, interaction.values, interaction.stop_key
    batch, n, hidden = keys.shape
    count, steps = (1, *order.shape[1:])[-2:]
    tile = nll_triton.tiles(batch, count, steps, n, hidden, keys.dtype)
    # What makes another kernel: beside tiles and types, the sizes and strides that Triton treats apart.
    kind = (
        *(keys.device, whole, tile.steps, tile.hidden, tile.split > 1, tile.both, hidden, n == 1, n % 16 == 0),
        *(pot.unary.dtype, pot.stop.dtype, keys.dtype, values.dtype, None if stop_key is None else stop_key.dtype),
        *(keys.stride(2) == 1, values.stride(2) == 1, pot.unary.stride(1) == 1),
    )
    if kind not in _faults:
        if capturing():
            return None  # nothing may be read back now
        try:
            _faults[kind] = compare(pot, steps, tile, whole)
        except torch.OutOfMemoryError:
            return None
        if _faults[kind]:
            warnings.warn(f"torchcpl's loss kernels: {_faults[kind]}; plain torch stands in", RuntimeWarning, 2)
    return _faults[kind]


def compare(pot: Potentials, steps: int, tile: Tiles, whole: bool) -> str | None:
    """The first result or gradient, for numbers like those of ``pot``, that is far less exact than the plain twin's."""
    interaction = pot.interaction
    assert isinstance(interaction, LowRank)
    device, n = pot.unary.device, pot.num_candidates
    generator = torch.Generator(device).manual_seed(0)
    with _undisturbed(device):
        leaves = [
            None
            if leaf is None
            else torch.empty_like(leaf[:ROWS].expand(ROWS, *leaf.shape[1:])).normal_(generator=generator)
            for leaf in (pot.unary, pot.stop, interaction.keys, interaction.values, interaction.stop_key)
        ]
        order = torch.rand(ROWS, n, generator=generator, device=device).argsort(-1)[:, :steps]
        order = nn.functional.pad(order, (0, steps - order.shape[1]), value=-1).contiguous()
        tile = replace(tile, count=ROWS * max(1, -(-steps // tile.steps)))
        ours, theirs = fused(leaves, order, tile, whole), plain(leaves, order, whole)
        exact = plain(leaves, order, whole, torch.float64)
    rounding = torch.finfo(interaction.keys.dtype).eps
    for name, have, other, want in zip(NAMES, ours, theirs, exact, strict=False):  # not all have a stop_key
        off, usual, size = (float(x.double().norm()) for x in (have - want, other - want, want))
        if not off <= 10 * usual + (1e-3 + 4 * rounding) * size + 1e-5:
            return f"{name} as compiled here is off by {off:.1e}, its size {size:.1e}"
    return None


def fused(leaves: list[Any], order: Tensor, tile: Tiles, whole: bool) -> list[Tensor]:
    """−log P of whole sequences, or log P of picks and stops, and the gradients of their sum; with the given tiles."""
    unary, stop, keys, values, stop_key = leaves
    sequences = order if whole else order.unsqueeze(1)
    real = torch.ones_like(unary, dtype=torch.bool)
    with torch.no_grad(), torch.cuda.device_of(unary):
        scale = 1.0 if whole else None
        found, query, rank = nll_triton.scores_of(unary, stop, keys, values, stop_key, real, sequences, 1, scale, tile)
        g_picks, g_stop = (found.new_ones(ROWS), None) if whole else torch.ones_like(found[:2])
        saved = (found, query, rank, unary, keys, stop_key, real, sequences)
        gradients = nll_triton.gradients_of(g_picks, g_stop, *saved, values.dtype, stop.dtype, 1, tile)
    return [found[0].sum(-1) if whole else found[:2], *gradients]


def plain(leaves: list[Any], order: Tensor, whole: bool, dtype: torch.dtype | None = None) -> list[Tensor]:
    """The same by the plain twin."""
    unary, stop, *factors = own = [
        None if leaf is None else leaf.to(dtype or leaf.dtype).detach().requires_grad_() for leaf in leaves
    ]
    pot = Potentials(unary, stop, LowRank(*factors))  # type: ignore[arg-type]
    if whole:
        result = -functional.sequence_log_probs(pot, order.unsqueeze(1), Rules(pot)).squeeze(1)
    else:
        result = torch.stack(functional.prefix_log_probs(pot, order.unsqueeze(1), Rules(pot)))
    present = [leaf for leaf in own if leaf is not None]
    gradients = torch.autograd.grad(result.sum(), present, allow_unused=True)
    return [
        result.detach(),
        *(torch.zeros_like(p) if g is None else g for p, g in zip(present, gradients, strict=True)),
    ]


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Nothing of what the caller is in the middle of: no autocast, inference mode, checkpoint or determinism."""
    before = torch.get_deterministic_debug_mode()
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autocast(device.type, enabled=False))
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x))
        stack.callback(torch.set_deterministic_debug_mode, before)
        torch.set_deterministic_debug_mode("default")
        yield

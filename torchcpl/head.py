"""CPLHead: features of any encoder to Potentials."""

from __future__ import annotations

import importlib
import os
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchcpl.checks import check_choice, check_count, check_number, check_tensor
from torchcpl.interactions import Contextual, Coverage, DenseCoverage, Interaction, LowRank, Recent
from torchcpl.interactions.base import autocasting
from torchcpl.kernels.streams import side_by_side
from torchcpl.potentials import Potentials

ACTIVATIONS = {"gelu": nn.GELU, "relu": nn.ReLU, "silu": nn.SiLU}
KINDS = ("lowrank", "contextual", "coverage", "recent")


def mlp(dim: int, hidden: int, out: int, activation: str, dropout: float) -> nn.Sequential:
    """Two layers."""
    return nn.Sequential(nn.Linear(dim, hidden), ACTIVATIONS[activation](), nn.Dropout(dropout), nn.Linear(hidden, out))


class ContextNetwork(nn.Module):
    """``s + MLP(LayerNorm([s, |S|/10]))``: starts as the identity, so a contextual head starts as a low-rank one."""

    def __init__(self, width: int, activation: str = "gelu", dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width + 1)
        self.net = mlp(width + 1, width, width, activation, dropout)
        last = self.net[-1]
        assert isinstance(last, nn.Linear)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)

    def forward(self, total: Tensor, count: Tensor) -> Tensor:
        state = torch.cat([total, count.unsqueeze(-1).to(total.dtype) / 10], -1)
        return total + self.net(self.norm(state.to(self.norm.weight.dtype)))


def _hub() -> Any:
    """The module ``torchcpl.hub``, imported only when used: it needs the extra ``hub``."""
    return importlib.import_module("torchcpl.hub")


class CPLHead(nn.Module):
    """Unary scores, interaction and a learned stop from candidate features (B, N, dim).

    Three MLPs of width ``hidden`` give θ, keys and values, with fused first layers; the stop is a learned token scored
    like a candidate.

    Args:
        dim: width of the features.
        hidden: width of the MLPs, and of keys and values.
        kind: ``lowrank``, the paper's W = K Vᵀ/√h, or ``contextual``, with a small network over the running context,
            or ``coverage``, with a soft *or* over the picks, for redundancy, or ``recent``, with a term for the
            latest pick, for sequences.
        live_stop: give the stop a key, so that stopping can depend on what was picked.
        activation: ``gelu | relu | silu``.
        dropout: inside the MLPs.
    """

    precise = True  # stays in float32 in bfloat16 inference: rounding of scores changes picks

    def __init__(
        self,
        dim: int,
        hidden: int = 256,
        *,
        kind: str = "lowrank",
        live_stop: bool = False,
        activation: str = "gelu",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_count("dim", dim, 1)
        check_count("hidden", hidden, 1)
        check_choice("kind", kind, KINDS)
        check_choice("activation", activation, tuple(ACTIVATIONS))
        check_choice("live_stop", live_stop, (True, False))
        check_number("dropout", dropout, "a probability", lambda value: 0 <= value <= 1)
        self.arguments: dict[str, Any] = {
            "dim": dim, "hidden": hidden, "kind": kind, "live_stop": live_stop, "activation": activation,
            "dropout": dropout,
        }  # fmt: skip
        self.dim = dim
        self.width = hidden
        self.kind = kind
        self.live_stop = live_stop
        second = {"coverage": "cover", "recent": "last"}.get(kind)
        self.outputs = ("unary", "keys", "values", *((f"{second}_keys", f"{second}_values") if second else ()))
        self.hidden = nn.Sequential(
            nn.Linear(dim, len(self.outputs) * hidden), ACTIVATIONS[activation](), nn.Dropout(dropout)
        )
        for name in self.outputs:
            self.add_module(name, nn.Linear(hidden, 1 if name == "unary" else hidden))
        self.stop_token = nn.Parameter(torch.randn(dim) * dim**-0.5)
        self.context = ContextNetwork(hidden, activation, dropout) if kind == "contextual" else None
        if kind == "coverage":
            self.cover_offset = nn.Parameter(torch.tensor(-2.0))  # initially almost no coverage

    @classmethod
    def from_pretrained(cls, name: str | os.PathLike[str], **options: Any) -> CPLHead:
        """Load a head from a folder or a repository of the Hugging Face hub (extra ``hub``)."""
        return _hub().PretrainedHead.from_pretrained(name, **options)

    def save_pretrained(self, folder: str | os.PathLike[str], **options: Any) -> None:
        """Write ``config.json`` and ``model.safetensors`` into a folder (extra ``hub``)."""
        _hub().pretrained(self).save_pretrained(folder, **options)

    def push_to_hub(self, repository: str, **options: Any) -> Any:
        """Upload to a repository of the Hugging Face hub (extra ``hub``)."""
        return _hub().pretrained(self).push_to_hub(repository, **options)

    def forward(self, features: Tensor, mask: Tensor | None = None, pairs: Tensor | None = None) -> Potentials:
        """``features`` (B, N, dim), ``mask`` (B, N) True = real, to potentials.

        ``pairs`` (B, N, N), for ``kind="coverage"``, is added to c_ji, which says how far pick i covers j.
        """
        check_tensor("features", features, ("B", "N", self.dim), "float")
        if features.dtype != self.stop_token.dtype and not autocasting(features):
            raise ValueError(f"features: expected {self.stop_token.dtype} as the head has, got {features.dtype}")
        batch, n, _ = features.shape
        if pairs is not None:
            if self.kind != "coverage":
                raise ValueError(f'pairs: expected none with kind="{self.kind}", only "coverage" reads them')
            check_tensor("pairs", pairs, (batch, n, n), "float", like=features)
        token = self.stop_token.to(features.dtype).expand(batch, 1, -1)
        rows = torch.cat([features, token], 1).flatten(0, 1)  # (B·(N+1), dim): flat, so that chunks are views
        parts = zip(self.outputs, self.hidden(rows).chunk(len(self.outputs), -1), strict=True)
        found = side_by_side(*(partial(self.get_submodule(name), part) for name, part in parts))
        scores = {name: out.view(batch, n + 1, out.shape[-1]) for name, out in zip(self.outputs, found, strict=True)}
        unary, stop = scores["unary"][:, :n, 0], scores["unary"][:, -1, 0]  # (B, N), (B,)
        stop_key = scores["keys"][:, -1] if self.live_stop else None
        keys, values, *more = (scores[name][:, :n] for name in self.outputs[1:])  # (B, N, h) each
        interaction: Interaction
        if pairs is not None:
            # What a pick does is read off pairs anyway: the terms of the ends join them.
            cover, offset = more[0] @ more[1].transpose(1, 2) / self.width**0.5, self.cover_offset  # (B, N, N)
            stop_row = None if stop_key is None else (values @ stop_key.unsqueeze(-1)).squeeze(-1) / self.width**0.5
            interaction = DenseCoverage(cover + pairs + offset, stop_row)
        elif self.kind == "coverage":
            interaction = Coverage(
                keys, values, more[0], more[1], self.cover_offset.to(keys.dtype).expand(batch), stop_key
            )
        elif self.kind == "recent":
            last_stop_key = scores["last_keys"][:, -1] if self.live_stop else None
            interaction = Recent(keys, values, more[0], more[1], stop_key, last_stop_key)
        elif self.context is not None:
            interaction = Contextual(keys, values, self.context, stop_key)
        else:
            interaction = LowRank(keys, values, stop_key)
        return Potentials(unary, stop, interaction, mask)  # type: ignore[arg-type]

"""CPLHead: features of any encoder in, Potentials out."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchcpl.checks import check_choice, check_count, check_tensor
from torchcpl.interactions import Contextual, Coverage, Interaction, LowRank
from torchcpl.potentials import Potentials

ACTIVATIONS = {"gelu": nn.GELU, "relu": nn.ReLU, "silu": nn.SiLU}
KINDS = ("lowrank", "contextual", "coverage")


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
        correction: Tensor = self.net(self.norm(state.to(self.norm.weight.dtype)))
        return total + correction


class CPLHead(nn.Module):
    """Unary scores, interaction and a learned stop from candidate features (B, N, dim).

    Three MLPs of width ``hidden`` give θ, keys and values; the stop is a learned token scored by the same unary MLP.

    Args:
        dim: width of the features.
        hidden: width of the MLPs, and of keys and values.
        kind: ``lowrank``, the paper's W = K Vᵀ/√h, or ``contextual``, with a small network over the running context,
            or ``coverage``, with a soft *or* over the picks that says what they have made redundant.
        live_stop: give the stop a key, so that stopping can depend on what was picked.
        activation: ``gelu | relu | silu``.
        dropout: inside the MLPs.
    """

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
        self.dim = dim
        self.kind = kind
        self.unary = mlp(dim, hidden, 1, activation, dropout)
        self.keys = mlp(dim, hidden, hidden, activation, dropout)
        self.values = mlp(dim, hidden, hidden, activation, dropout)
        self.stop_token = nn.Parameter(torch.randn(dim) * dim**-0.5)
        self.live_stop = live_stop
        self.context = ContextNetwork(hidden, activation, dropout) if kind == "contextual" else None
        if kind == "coverage":
            self.cover_keys = mlp(dim, hidden, hidden, activation, dropout)
            self.cover_values = mlp(dim, hidden, hidden, activation, dropout)
            self.cover_offset = nn.Parameter(torch.tensor(-2.0))  # nothing is covered much at first

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Potentials:
        """``features`` (B, N, dim), ``mask`` (B, N) True = real, to potentials."""
        check_tensor("features", features, ("B", "N", self.dim), "float")
        batch = features.shape[0]
        token = self.stop_token.to(features.dtype)
        unary = self.unary(features).squeeze(-1)  # (B, N)
        stop = self.unary(token).expand(batch)  # (B,)
        keys, values = self.keys(features), self.values(features)  # (B, N, h)
        stop_key = self.keys(token).expand(batch, -1) if self.live_stop else None
        interaction: Interaction
        if self.kind == "coverage":
            cover = self.cover_keys(features), self.cover_values(features)
            interaction = Coverage(keys, values, *cover, self.cover_offset.to(keys.dtype).expand(batch), stop_key)
        elif self.context is not None:
            interaction = Contextual(keys, values, self.context, stop_key)
        else:
            interaction = LowRank(keys, values, stop_key)
        return Potentials(unary, stop, interaction, mask)  # type: ignore[arg-type]

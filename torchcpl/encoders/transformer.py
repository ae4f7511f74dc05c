"""A small Transformer: an encoder over candidates, and the pointer's decoder layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchcpl.head import mlp
from torchcpl.interactions.base import autocasting


class Attention(nn.Module):
    """Multi-head attention; queries and memory are projected separately, so that a memory is projected only once."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"heads: expected a divisor of dim = {dim}, got {heads}")
        self.heads = heads
        self.dropout = dropout
        self.query = nn.Linear(dim, dim)
        self.memory = nn.Linear(dim, 2 * dim)
        self.out = nn.Linear(dim, dim)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (B, H, N, d/H) of a memory (B, N, d)."""
        keys, values = self.memory(x).chunk(2, -1)
        return self._split(keys), self._split(values)

    def attend(
        self, x: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        """Queries from ``x`` (B, T, d); ``mask``, broadcast to (B, H, T, N), True = may be attended to, or a bias."""
        dropout = self.dropout if self.training else 0.0
        query = self._split(self.query(x))
        if mask is not None and mask.is_floating_point():
            mask = mask.to(query.dtype)
        mixed = F.scaled_dot_product_attention(query, keys, values, mask, dropout, causal)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, x.shape[2] // self.heads).transpose(1, 2)  # (B, H, N, d/H)


class EncoderLayer(nn.Module):
    """Self-attention of the candidates, then a feed-forward block; pre-norm or post-norm."""

    def __init__(
        self, dim: int, heads: int, ffn: int, dropout: float, attention_dropout: float, norm_first: bool
    ) -> None:
        super().__init__()
        self.attention = Attention(dim, heads, attention_dropout)
        self.ffn = mlp(dim, ffn, dim, "gelu", dropout)
        self.norms = nn.ModuleList([nn.LayerNorm(dim), nn.LayerNorm(dim)])
        self.dropout = nn.Dropout(dropout)
        self.norm_first = norm_first

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """``mask`` broadcast to (B, H, N, N): True = may be attended to, or what is added to the attention's logits."""
        before, after = self.norms
        if self.norm_first:
            x = x + self.dropout(self._mixed(before(x), mask))
            x = x + self.dropout(self.ffn(after(x)))
        else:
            x = before(x + self.dropout(self._mixed(x, mask)))
            x = after(x + self.dropout(self.ffn(x)))
        return x

    def _mixed(self, x: Tensor, mask: Tensor | None) -> Tensor:
        if not self.training and autocasting(x):
            x = x.to(torch.get_autocast_dtype(x.device.type))  # once, instead of for queries and memory each
        return self.attention.attend(x, *self.attention.project(x), mask)


class Encoder(nn.Module):
    """Self-attention of candidates (B, N, d), padding masked. Pre-norm with a final LayerNorm, or post-norm.

    ``bias`` (B, layers·H, N, N) is added to the logits of the layers' attention. ``attention_dropout``, of the weights
    of attention, is ``dropout`` unless given.
    """

    def __init__(
        self, dim: int, layers: int, heads: int, ffn: int, dropout: float = 0.0, *, norm_first: bool = True,
        attention_dropout: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        weights = dropout if attention_dropout is None else attention_dropout
        self.layers = nn.ModuleList(EncoderLayer(dim, heads, ffn, dropout, weights, norm_first) for _ in range(layers))
        self.norm = nn.LayerNorm(dim) if norm_first else nn.Identity()

    def forward(self, x: Tensor, mask: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        if mask is not None:
            # A row with only padding attends to itself: its output is never read, but must not be NaN.
            mask = (mask | ~mask.any(-1, keepdim=True))[:, None, None, :]
        if bias is not None and mask is not None:
            bias = bias.masked_fill(~mask, -torch.inf)
        each = [mask] * len(self.layers) if bias is None else bias.chunk(len(self.layers), 1)
        for layer, seen in zip(self.layers, each, strict=True):
            x = layer(x, seen)
        return self.norm(x)


class DecoderLayer(nn.Module):
    """Pre-norm decoder layer: self-attention of the picks, then cross-attention to the candidates."""

    def __init__(self, dim: int, heads: int, ffn: int, dropout: float) -> None:
        super().__init__()
        self.self_attention = Attention(dim, heads, dropout)
        self.cross_attention = Attention(dim, heads, dropout)
        self.ffn = mlp(dim, ffn, dim, "gelu", dropout)
        self.norms = nn.ModuleList([nn.LayerNorm(dim) for _ in range(3)])
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Tensor, memory: tuple[Tensor, Tensor], mask: Tensor, past: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """``x`` (B, K, T, d) tokens of K hypotheses; ``memory`` the candidates' keys and values (B, H, N, d/H).

        Without ``past`` the tokens are whole prefixes and attention is causal. With it, T = 1 and ``past`` holds the
        keys and values (B, K, H, t, d/H) of the tokens before. Returns the output and the keys and values so far.
        """
        batch, width = x.shape[:2]
        y = self.norms[0](x).flatten(0, 1)  # (B·K, T, d)
        keys, values = self.self_attention.project(y)
        if past is not None:
            keys = torch.cat([past[0].flatten(0, 1), keys], 2)
            values = torch.cat([past[1].flatten(0, 1), values], 2)
        looked = self.self_attention.attend(y, keys, values, causal=past is None)
        x = x + self.dropout(looked).view_as(x)
        # All tokens of all hypotheses attend to the same candidates: one attention with K·T queries.
        y = self.norms[1](x).flatten(1, 2)
        x = x + self.dropout(self.cross_attention.attend(y, *memory, mask)).view_as(x)
        x = x + self.dropout(self.ffn(self.norms[2](x)))
        so_far = (batch, width, *keys.shape[1:])
        return x, (keys.view(so_far), values.view(so_far))

"""The autoregressive pointer: a Transformer decoder reads the picks so far and points at the next one.

It is an interaction whose logits depend on the whole history through a network, so every loss and decoder of the
library works with it: ``greedy(PointerHead(...)(features, mask))``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from torchcpl.checks import check_tensor, readable
from torchcpl.encoders.transformer import DecoderLayer
from torchcpl.head import mlp
from torchcpl.interactions import Interaction
from torchcpl.interactions.base import State, gather_rows
from torchcpl.potentials import Potentials, picks_first


class PointerHead(nn.Module):
    """Features (B, N, dim) to potentials whose interaction is an autoregressive decoder.

    The input at step t is the feature of pick t−1 plus a learned embedding of the step, a learned start token at
    step 0; the logits are ``q(decoder)·k(features)/√dim`` for the candidates and ``s(decoder)`` for the stop.

    Args:
        max_len: largest number of picks, that of the step embeddings.
        cache: keep keys and values from step to step; False recomputes the whole history and the projections of the
            candidates at every step, as the paper's code does.
        projection_layers: 1 for linear projections q, k and s, 2 for MLPs, as in the paper's code.
    """

    def __init__(
        self, dim: int, *, layers: int = 2, heads: int = 4, ffn: int = 1024, dropout: float = 0.0, max_len: int = 64,
        cache: bool = True, projection_layers: int = 1,
    ) -> None:  # fmt: skip
        super().__init__()
        self.dim = dim
        self.max_len = max_len
        self.cache = cache
        self.layers = nn.ModuleList(DecoderLayer(dim, heads, ffn, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.query, self.key, self.stop = (
            nn.Linear(dim, out) if projection_layers == 1 else mlp(dim, dim, out, "relu", 0.0) for out in (dim, dim, 1)
        )
        self.start_token = nn.Parameter(torch.randn(dim) * dim**-0.5)
        self.step_embedding = nn.Parameter(torch.randn(max_len + 1, dim) * 0.02)

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Potentials:
        check_tensor("features", features, ("B", "N", self.dim), "float")
        batch, n, _ = features.shape
        if mask is None:
            mask = torch.ones(batch, n, dtype=torch.bool, device=features.device)
        zeros = features.new_zeros(batch, n)
        keys = self.key(features)
        memory = self.project(features)
        return Potentials(zeros, zeros.new_zeros(batch), Pointer(features, keys, mask, memory, self), mask)

    def project(self, features: Tensor) -> Tensor:
        """The candidates' keys and values for every layer's cross-attention: (B, 2·layers, H, N, d/H)."""
        parts = [part for layer in self.layers for part in layer.cross_attention.project(features)]  # type: ignore[union-attr, operator]
        return torch.stack(parts, 1)

    def decode(self, tokens: Tensor, memory: Tensor, mask: Tensor, past: State | None = None) -> tuple[Tensor, State]:
        """Hidden states (B, K, T, d) of ``tokens`` (B, K, T, d), and every layer's keys and values so far."""
        seen = (mask | ~mask.any(-1, keepdim=True))[:, None, None, :]
        caches: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            before = None if past is None else (past[2 * i], past[2 * i + 1])
            tokens, cache = layer(tokens, (memory[:, 2 * i], memory[:, 2 * i + 1]), seen, before)
            caches.extend(cache)
        return self.norm(tokens), tuple(caches)


@dataclass(frozen=True, eq=False, repr=False)
class Pointer(Interaction):
    """State: the decoder's output (B, K, d), then its caches (or, without cache, the tokens so far).

    After picks that may be padded, the picks instead: where rows have different numbers of them, no cache is aligned.
    """

    features: Tensor  # (B, N, d)
    keys: Tensor  # (B, N, d)
    mask: Tensor  # (B, N)
    memory: Tensor  # (B, 2·layers, H, N, d/H)
    head: PointerHead

    depends_on: ClassVar[str] = "order"

    @property
    def shape(self) -> tuple[int, int]:
        return self.features.shape[0], self.features.shape[1]

    def start(self, width: int = 1) -> State:
        token = self._first(width)
        hidden, caches = self.head.decode(token, self.memory, self.mask)
        return (hidden[:, :, -1], *(caches if self.head.cache else (token,)))

    def advance(self, state: State, picks: Tensor) -> State:
        past = state[1:]
        if not past[0].is_floating_point():
            return self.after(torch.cat([past[0], picks.unsqueeze(-1)], -1))
        done = past[0].shape[3] if self.head.cache else past[0].shape[2]  # tokens so far
        token = self._tokens(picks.unsqueeze(-1), done)
        if self.head.cache:
            hidden, caches = self.head.decode(token, self.memory, self.mask, past)
            return (hidden[:, :, -1], *caches)
        tokens = torch.cat([past[0], token], 2)
        hidden, _ = self.head.decode(tokens, self.head.project(self.features), self.mask)
        return hidden[:, :, -1], tokens

    def prefixes(self, order: Tensor) -> State:
        tokens = torch.cat([self._first(order.shape[1]), self._tokens(order, 1)], 2)
        hidden, _ = self.head.decode(tokens, self.memory, self.mask)  # (B, P, T+1, d)
        return (hidden.flatten(1, 2),)

    def after(self, picks: Tensor) -> State:
        # Move the picks to the front, in order: the state is that of the prefix they form.
        order = picks.gather(-1, picks_first(picks))
        if not readable():  # the last columns are padding
            order = order[..., : self.head.max_len]
        (hidden,) = self.prefixes(order)
        per_pick = hidden.view(*order.shape[:2], order.shape[2] + 1, hidden.shape[-1])
        length = (picks >= 0).sum(-1)[..., None, None].expand(-1, -1, 1, per_pick.shape[-1])
        return per_pick.gather(2, length).squeeze(2), picks

    def logits(self, state: State) -> tuple[Tensor, Tensor | None]:
        query = self.head.query(state[0]) / self.head.dim**0.5  # (B, K, d)
        return query @ self.keys.transpose(1, 2), self.head.stop(state[0]).squeeze(-1).to(query.dtype)

    def _first(self, width: int) -> Tensor:
        """The token (B, K, 1, d) of step 0."""
        token = self.head.start_token + self.head.step_embedding[0]
        return token.expand(self.shape[0], width, 1, -1).to(self.features.dtype)

    def _tokens(self, picks: Tensor, first: int) -> Tensor:
        """Tokens (B, K, T, d) of ``picks`` (B, K, T), the first of them at step ``first``."""
        steps = picks.shape[2]
        if first + steps > self.head.max_len + 1:
            raise ValueError(
                f"max_len: expected at most {self.head.max_len} picks, the pointer's, got {first + steps - 1}"
            )
        embedding = self.head.step_embedding[first : first + steps]
        return gather_rows(self.features, picks) + embedding.to(self.features.dtype)

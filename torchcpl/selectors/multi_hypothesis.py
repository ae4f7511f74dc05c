"""Several parallel answers, of which one is chosen."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchcpl.potentials import picked_mask
from torchcpl.selectors.threshold import Threshold


class MultiHypothesis(Threshold):
    """K hypotheses, each a score for every candidate; the one with the highest selector logit is thresholded.

    A learned query for each hypothesis is fused with the mean of the features, then with every candidate. Winner takes
    all: only the hypothesis with the least cross-entropy learns from a target, and the selector learns which it was,
    with the weight ``selector_weight``.
    """

    def __init__(
        self, dim: int, hidden: int, *, hypotheses: int = 6, pos_weight: float | None = None,
        selector_weight: float = 1.0,
    ) -> None:  # fmt: skip
        super().__init__(dim, hidden, pos_weight=pos_weight)
        self.selector_weight = selector_weight
        self.queries = nn.Parameter(torch.randn(hypotheses, dim))
        self.fuse = nn.Sequential(nn.Linear(2 * dim, dim), nn.GELU(), nn.Linear(dim, dim))
        self.shift = nn.Linear(dim, hidden, bias=False)
        self.selector = nn.Linear(dim, 1)

    def hypotheses(self, features: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Log-odds of the candidates under each hypothesis (B, K, N), and the selector's logits (B, K)."""
        weight = mask.unsqueeze(-1).to(features.dtype)
        summary = (features * weight).sum(1) / weight.sum(1).clamp(min=1)  # (B, d)
        queries = self.queries.to(summary.dtype).expand(len(features), -1, -1)  # (B, K, d)
        fused = self.fuse(torch.cat([summary.unsqueeze(1).expand_as(queries), queries], -1))
        # The first layer of an MLP over candidate and hypothesis together, without building the pairs.
        first, *rest = self.scores
        hidden = first(features).unsqueeze(1) + self.shift(fused).unsqueeze(2)  # (B, K, N, hidden)
        for layer in rest:
            hidden = layer(hidden)
        return hidden.squeeze(-1), self.selector(fused).squeeze(-1)

    def loss(self, features: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        logits, choice = self.hypotheses(features, mask)
        seen = mask.unsqueeze(1).expand_as(logits)
        positive = picked_mask(target, features.shape[1]).unsqueeze(1).expand_as(logits)
        losses = self.cross_entropy(logits, positive, seen).sum(-1) / seen.sum(-1).clamp(min=1)  # (B, K)
        best, winner = losses.min(-1)
        return best.mean() + self.selector_weight * F.cross_entropy(choice.float(), winner)

    def logits(self, features: Tensor, mask: Tensor) -> Tensor:
        logits, choice = self.hypotheses(features, mask)
        best = choice.argmax(-1)[:, None, None].expand(-1, 1, logits.shape[2])
        return logits.gather(1, best).squeeze(1)

    def answers(self, features: Tensor, mask: Tensor, max_len: int) -> tuple[Tensor, Tensor]:
        """Every hypothesis, thresholded, with the probability that the selector gives it."""
        logits, choice = self.hypotheses(features, mask)
        logits = logits.float().masked_fill(~mask.unsqueeze(1), -torch.inf)
        picked = self.pick(logits.flatten(0, 1), max_len).indices
        return picked.view(*logits.shape[:2], -1), choice.float().softmax(-1)

"""Independent scores: the candidates above a threshold are picked."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from torchcpl.head import mlp
from torchcpl.potentials import Selection, picked_mask
from torchcpl.selectors.base import Method


class Threshold(Method):
    """A score for each candidate, trained by binary cross-entropy; those above the threshold (the knob) are picked.

    Positives weigh ``pos_weight``, by default the batch's ratio of negatives to positives.
    """

    knob = 0.5
    knobs = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)

    def __init__(self, dim: int, hidden: int, *, dropout: float = 0.0, pos_weight: float | None = None) -> None:
        super().__init__()
        self.scores = mlp(dim, hidden, 1, "gelu", dropout)
        self.pos_weight = pos_weight

    def logits(self, features: Tensor, mask: Tensor) -> Tensor:
        """(B, N) log-odds of the candidates."""
        return self.scores(features).squeeze(-1)

    def loss(self, features: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        """Mean over the candidates of the batch."""
        each = self.cross_entropy(self.logits(features, mask), picked_mask(target, features.shape[1]), mask)
        return each.sum() / mask.sum().clamp(min=1)

    def cross_entropy(self, logits: Tensor, positive: Tensor, mask: Tensor) -> Tensor:
        """The binary cross-entropy of ``logits`` (..., N), 0 where there is no candidate."""
        if self.pos_weight is None:
            positives = (positive & mask).sum()
            weight = (mask.sum() - positives) / positives.clamp(min=1)
        else:
            weight = torch.full((), self.pos_weight, device=logits.device)  # a copy would synchronise
        each = F.binary_cross_entropy_with_logits(logits.float(), positive.float(), pos_weight=weight, reduction="none")
        return each.masked_fill(~mask, 0)

    def potentials(self, features: Tensor, mask: Tensor) -> Tensor:
        """(B, N) log-odds, −inf for padding."""
        return self.logits(features, mask).float().masked_fill(~mask, -torch.inf)

    def pick(self, potentials: Tensor, max_len: int, knob: float | None = None) -> Selection:
        """All candidates above the threshold, best first. ``max_len`` does not bound a parallel method."""
        ranked, order = potentials.sort(dim=-1, descending=True, stable=True)
        kept = ranked.sigmoid() > (self.knob if knob is None else knob)
        log_odds = torch.where(kept, F.logsigmoid(ranked), F.logsigmoid(-ranked))
        log_prob = log_odds.where(ranked > -torch.inf, 0.0).sum(-1)
        return Selection(order.masked_fill(~kept, -1), kept.sum(-1), log_prob, potentials.shape[1])

"""Distributions over sets of items with one interface: CPL and its competitors."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from torchcpl.head import mlp
from torchcpl.interactions import Contextual, Interaction, LowRank
from torchcpl.potentials import Potentials, Selection, picked_mask
from torchcpl.selectors import PointerHead
from torchcpl.sets import next_probs, set_log_prob, set_nll
from torchcpl.tasks.base import SelectionModel

if TYPE_CHECKING:
    from torchcpl.tasks.baskets.task import BasketsConfig

SHOWN = 10  # items in a completion
JITTER = 1e-4  # on a kernel's diagonal: no set is impossible


class SetModel(SelectionModel):
    """A distribution over the subsets of N items, one for all baskets."""

    def __init__(self, config: BasketsConfig, frequency: Tensor) -> None:
        super().__init__()
        self.config = config
        self.num_items = len(frequency)

    @abstractmethod
    def log_prob(self, sets: Tensor) -> tuple[Tensor, Tensor]:
        """log P (B,) of ``sets`` (B, T), −1 padded, and its standard error (B,)."""

    def scores(self, rest: Tensor) -> Tensor:
        """(B, N) how well each item goes with ``rest`` (B, T): log P(rest ∪ item)."""
        size, items = (rest >= 0).sum(-1), torch.arange(self.num_items, device=rest.device)
        wider = torch.nn.functional.pad(rest, (0, 1), value=-1).unsqueeze(1).repeat(1, self.num_items, 1)
        wider.scatter_(
            2, size.view(-1, 1, 1).expand(-1, self.num_items, 1), items.view(1, -1, 1).expand(len(rest), -1, 1)
        )
        inside = picked_mask(rest, self.num_items)
        value, _ = self.log_prob(wider[~inside])
        return value.new_full(inside.shape, -torch.inf).masked_scatter(~inside, value)

    def forward(self, baskets: Tensor) -> dict[str, Tensor]:
        return {"loss": -self.log_prob(baskets)[0].mean()}

    def encode(self, inputs: Tensor) -> Tensor:
        """The items' scores (B, N, 1): all the work of a completion."""
        return self.scores(inputs).unsqueeze(-1)

    def decode(self, features: Tensor, inputs: Tensor, knob: float | None = None) -> Selection:
        """The ten items that go best with each part, best first; ``log_prob`` is of the part and the first of them."""
        best = features.squeeze(-1).topk(min(SHOWN, self.num_items), -1)
        indices = best.indices.masked_fill(best.values == -torch.inf, -1)
        return Selection(indices, (indices >= 0).sum(-1), best.values[:, 0], self.num_items)


class CPLSets(SetModel):
    """θ, keys and values for every item, from its id, its features or both; a live stop.

    In the kind ``contextual`` the context passes through ``s + MLP(LayerNorm([s, |S|/10]))`` and the stop has a bias
    for every number of picks, which travels as one more channel of the context that only the stop's key reads.
    """

    def __init__(self, config: BasketsConfig, frequency: Tensor, features: Tensor | None = None) -> None:
        super().__init__(config, frequency)
        n, h = self.num_items, config.rank
        self.features = None if features is None else nn.Buffer(features)
        start = torch.randn(n, 1 + 2 * h) * 0.1 * h**0.25
        start[:, 0] = frequency.log() - frequency.log().mean()
        self.items = nn.Parameter(start)
        self.project = None if features is None else nn.Linear(features.shape[1], 1 + 2 * h)
        self.stop = nn.Parameter(torch.zeros(()))
        self.stop_key = nn.Parameter(torch.randn(h) * 0.1 * h**0.25)
        self.contextual = config.kind == "contextual"
        if self.contextual:
            self.norm = nn.LayerNorm(h + 1)
            self.net = mlp(h + 1, config.width, h, "gelu", config.dropout)
            self.stop_bias = nn.Parameter(torch.zeros(config.max_items + 1))

    def context(self, total: Tensor, count: Tensor) -> Tensor:
        """(B, K, h+1) of the sum of the picked values and the number of picks; the last channel is the stop's bias."""
        total = total[..., :-1]
        change = self.net(self.norm(torch.cat([total, count.unsqueeze(-1) / 10], -1)))
        bias = self.stop_bias[count.long().clamp(max=len(self.stop_bias) - 1)]
        return torch.cat([total + change, bias.unsqueeze(-1)], -1)

    def table(self, new: Tensor | None = None) -> Tensor:
        """(N, 1+2h) θ, keys and values; with ``new`` (M, d), features of items without an id, (N+M, 1+2h)."""
        known = self.items
        if self.project is None or self.features is None:
            if new is not None:
                raise ValueError("new: expected None for a model without features, got items known by theirs alone")
            return known
        known = known + self.project(self.features)
        return known if new is None else torch.cat([known, self.project(new)])

    def potentials(self, new: Tensor | None = None) -> Potentials:
        """One row, which all baskets share: the N items, then the ``new`` ones (M, d), known by their features."""
        table = self.table(new)
        h = self.config.rank
        unary, keys, values = table[:, 0].unsqueeze(0), table[None, :, 1 : 1 + h], table[None, :, 1 + h :]
        stop_key = self.stop_key.unsqueeze(0)
        interaction: Interaction = LowRank(keys, values, stop_key)
        if self.contextual:
            keys, values = (torch.nn.functional.pad(part, (0, 1)) for part in (keys, values))
            one = stop_key.new_full((1, 1), math.sqrt(h + 1))
            interaction = Contextual(keys, values, self.context, torch.cat([stop_key, one], 1))
        return Potentials(unary, self.stop.expand(1), interaction)

    def forward(self, baskets: Tensor) -> dict[str, Tensor]:
        exact, orders = self.config.exact_items, self.config.orders
        return {"loss": set_nll(self.potentials(), baskets, exact=exact, num_samples=orders)}

    def log_prob(self, sets: Tensor) -> tuple[Tensor, Tensor]:
        generator = torch.Generator(device=sets.device).manual_seed(0)
        return set_log_prob(self.potentials(), sets, generator=generator)

    def scores(self, rest: Tensor) -> Tensor:
        """Of a large part, log P(item is next): the sets would take too long."""
        large = (rest >= 0).sum(-1) >= self.config.exact_items
        if large.any() and not large.all():  # a row is scored as it is alone
            found = rest.new_empty(len(rest), self.num_items, dtype=self.items.dtype)
            found[large], found[~large] = self.scores(rest[large]), self.scores(rest[~large])
            return found
        return next_probs(self.potentials(), rest)[:, :-1].log() if large.any() else super().scores(rest)


class PointerSets(SetModel):
    """The autoregressive pointer over learned items: all of the order matters, so sets are estimated from orders."""

    def __init__(self, config: BasketsConfig, frequency: Tensor) -> None:
        super().__init__(config, frequency)
        width = config.width
        self.items = nn.Parameter(torch.randn(self.num_items, width))
        self.head = PointerHead(
            width, layers=1, heads=4, ffn=2 * width, dropout=config.dropout, max_len=config.max_items,
            projection_layers=2,
        )  # fmt: skip

    def potentials(self) -> Potentials:
        """One row, which all baskets share."""
        return self.head(self.items.unsqueeze(0))

    def forward(self, baskets: Tensor) -> dict[str, Tensor]:
        return {"loss": set_nll(self.potentials(), baskets, num_samples=self.config.pointer_orders)}

    def log_prob(self, sets: Tensor) -> tuple[Tensor, Tensor]:
        generator = torch.Generator(device=sets.device).manual_seed(0)
        return set_log_prob(self.potentials(), sets, num_samples=64, generator=generator)

    def scores(self, rest: Tensor) -> Tensor:
        return next_probs(self.potentials(), rest, num_samples=64)[:, :-1].log()


class Bernoullis(SetModel):
    """A mixture of C components, in each of which items are chosen independently; C = 1 is independence."""

    def __init__(self, config: BasketsConfig, frequency: Tensor) -> None:
        super().__init__(config, frequency)
        count = config.components
        self.base = nn.Buffer(frequency.logit())
        self.spread = nn.Parameter(
            0.1 * torch.randn(count, self.num_items) if count > 1 else torch.zeros(1, self.num_items)
        )
        self.weights = nn.Parameter(torch.zeros(count))

    def log_prob(self, sets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.base + 10 * self.spread  # (C, N); times ten: then the other methods' learning rate suits it
        inside = picked_mask(sets, self.num_items).to(logits.dtype)  # (B, N)
        absent = torch.nn.functional.logsigmoid(-logits).sum(-1)  # (C,)
        value = (inside @ logits.T + absent + self.weights.log_softmax(0)).logsumexp(-1)
        return value, torch.zeros_like(value)


class DPP(SetModel):
    """A determinantal point process: P(S) = det L_S / det(L + I), L = V Vᵀ + ε, of low rank.

    The nonsymmetric one (``ndpp``, Gartrell et al. 2021) adds B (D − Dᵀ) Bᵀ: items can attract each other too.
    """

    def __init__(self, config: BasketsConfig, frequency: Tensor) -> None:
        super().__init__(config, frequency)
        n, rank, symmetric = self.num_items, min(config.dpp_rank, self.num_items), config.method == "dpp"
        odds = (frequency / (1 - frequency)).sqrt().unsqueeze(-1)
        self.V = nn.Parameter(torch.nn.functional.normalize(torch.randn(n, rank), dim=-1) * odds)
        self.B = None if symmetric else nn.Parameter(torch.nn.functional.normalize(torch.randn(n, rank), dim=-1) * odds)
        self.D = None if symmetric else nn.Parameter(torch.randn(rank, rank) * 0.1)

    def kernel(self) -> Tensor:
        """(N, N)."""
        L = self.V @ self.V.T + JITTER * torch.eye(self.num_items, dtype=self.V.dtype, device=self.V.device)
        return L if self.B is None or self.D is None else L + self.B @ (self.D - self.D.T) @ self.B.T

    def log_prob(self, sets: Tensor) -> tuple[Tensor, Tensor]:
        L = self.kernel()
        eye = torch.eye(sets.shape[1], dtype=L.dtype, device=L.device)
        real = sets >= 0
        at = sets.clamp(min=0)
        block = L[at.unsqueeze(-1), at.unsqueeze(-2)]  # (B, T, T)
        block = torch.where(real.unsqueeze(-1) & real.unsqueeze(-2), block, eye)
        normaliser = torch.linalg.slogdet(L + torch.eye(len(L), dtype=L.dtype, device=L.device)).logabsdet
        value = torch.linalg.slogdet(block).logabsdet - normaliser
        return value, torch.zeros_like(value)


class ItemToItem(SetModel):
    """Conditional frequencies: the mean over the rest of P(item | one of the rest). No distribution over sets."""

    def __init__(self, config: BasketsConfig, frequency: Tensor, train: Tensor) -> None:
        super().__init__(config, frequency)
        inside = picked_mask(train, self.num_items).float()  # (M, N)
        together = inside.T @ inside
        count = together.diagonal().unsqueeze(-1)
        self.given = nn.Buffer((together + 5 * frequency) / (count + 5))  # (i, j): P(j | i), smoothed to P(j)
        self.frequency = nn.Buffer(frequency)

    def log_prob(self, sets: Tensor) -> tuple[Tensor, Tensor]:
        unknown = torch.full((len(sets),), torch.nan)
        return unknown, unknown

    def scores(self, rest: Tensor) -> Tensor:
        inside = picked_mask(rest, self.num_items)
        size = inside.sum(-1, keepdim=True)
        mean = (inside.float() @ self.given) / size.clamp(min=1)
        return torch.where(size > 0, mean, self.frequency).masked_fill(inside, -torch.inf)

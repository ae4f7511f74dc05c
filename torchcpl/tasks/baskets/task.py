"""Baskets: the probability of a set of items, and what goes with a part of it."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchcpl.config import TrainConfig, option, override
from torchcpl.potentials import picked_mask
from torchcpl.tasks.base import first_batches
from torchcpl.tasks.baskets.data import MEALS, Baskets
from torchcpl.tasks.baskets.methods import DPP, Bernoullis, CPLSets, ItemToItem, PointerSets, SetModel
from torchcpl.train import device_of

METHODS = {
    "mixture": "Mixture of Bernoullis",
    "dpp": "Symmetric DPP",
    "ndpp": "Nonsymmetric DPP",
    "pointer": "Pointer (AR)",
    "cpl": "CPL",
}
COLUMNS = ("log_likelihood", "mpr", "auc", "auc_pooled", "hit_1", "hit_5", "hit_10", "mrr")
NEGATIVES = 5  # random sets beside every basket
SEED = 0  # of these, and of the items held out


@dataclass(frozen=True, kw_only=True)
class BasketsConfig(TrainConfig):
    """One set of settings for all shops."""

    method: str = option("cpl", "the distribution over sets", choices=METHODS)
    kind: str = option("contextual", "interaction of CPL", choices=("lowrank", "contextual"))
    source: str = option(MEALS, "FOLDER/NAME for NAME.train.txt, .valid.txt, .test.txt, .items.txt; one file; or meals")
    features: str = option("", "features of the items (N, d), a .npy file")
    split: str = option("given", "the parts as the files give them, or all baskets divided at random",
                        choices=("given", "random"))  # fmt: skip
    split_seed: int = option(0, "seed of the random split", low=0)
    valid_baskets: int = option(0, "validation baskets of a random split (0 = 10 %)", low=0)
    test_baskets: int = option(0, "test baskets of a random split (0 = 20 %)", low=0)
    max_items: int = option(64, "most items in a basket", low=1)

    rank: int = option(16, "width of keys and values (cpl)", low=1)
    width: int = option(64, "width of the network over the context (cpl), of the items (pointer)", low=4)
    dropout: float = option(0.1, "dropout in the network (cpl, pointer)", low=0.0, high=0.9)
    exact_items: int = option(8, "largest set whose loss is exact, not estimated (cpl)", low=1, high=15)
    orders: int = option(16, "sampled orders that estimate the loss of a larger set (cpl)", low=1)
    pointer_orders: int = option(4, "sampled orders of every set (pointer)", low=1)
    components: int = option(20, "components (mixture)", low=1)
    dpp_rank: int = option(32, "rank of the kernels (dpp, ndpp)", low=1)

    epochs: int = option(40, "passes over the training baskets", low=1)
    optimizer: str = option("adamw", "optimiser", choices=("adam", "adamw"))
    lr: float = option(5e-3, "learning rate, at its peak where there is a schedule", low=0.0)
    weight_decay: float = option(0.05, "weight decay", low=0.0)
    schedule: str = option("cosine", "learning rate after the warmup", choices=("constant", "cosine"))
    precision: str = option("32-true", "arithmetic", choices=("32-true",))
    device: str = option("cpu", "where to train", choices=("auto", "cpu", "cuda"))


def build_model(config: BasketsConfig, frequency: Tensor, features: Tensor | None = None) -> SetModel:
    """The untrained model of a method, for items of these frequencies (N,)."""
    if config.method == "cpl":
        return CPLSets(config, frequency, features)
    if config.method == "pointer":
        return PointerSets(config, frequency)
    return Bernoullis(config, frequency) if config.method == "mixture" else DPP(config, frequency)


class BasketsTask:
    """The task: a model, batches, validation and the metrics."""

    ordered = False
    metric = "log_likelihood"
    higher_is_better = True
    capturable = False  # sets of a batch are sorted by size on the host

    def __init__(self, config: BasketsConfig, baskets: Baskets) -> None:
        self.config, self.baskets = config, baskets
        self.device = device_of(config)
        self.train = baskets.train.to(self.device)
        self.chosen_on, self.reported = baskets.valid.to(self.device), baskets.test.to(self.device)
        self.frequency = (picked_mask(self.train, baskets.num_items).sum(0) + 0.5) / (len(self.train) + 1)
        self.generator = torch.Generator()

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.train) // self.config.batch_size)

    def build(self) -> SetModel:
        return build_model(self.config, self.frequency.cpu(), self.baskets.features)

    def untrained(self) -> dict[str, SetModel]:
        """What needs no training."""
        independent = Bernoullis(override(self.config, components=1), self.frequency)
        item_to_item = ItemToItem(self.config, self.frequency, self.train)
        return {"Independent items": independent.to(self.device), "Item to item": item_to_item}

    def batch(self, step: int) -> Tensor:
        epoch, place = divmod(step, self.steps_per_epoch)
        self.generator.manual_seed(self.config.seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.train), generator=self.generator)  # every basket once an epoch
        rows = order[place * self.config.batch_size : (place + 1) * self.config.batch_size]
        return self.train[rows.to(self.device)]

    def validate(self, model: SetModel) -> dict[str, float]:
        """Mean log-likelihood of the validation baskets."""
        return {"log_likelihood": float(log_likelihoods(model, self.chosen_on)[0].mean())}

    def report(self, model: SetModel, knob: float | None = None) -> dict[str, Any]:
        """The metrics on the test baskets."""
        return evaluate(model, self.reported)

    def examples(self, batch: int, limit: int) -> list[Tensor]:
        """Test baskets without one of their items, ``batch`` at a time, up to ``limit`` times."""
        return first_batches(hold_out(self.reported)[0], batch, limit, "the test baskets of several items")


# --------------------------------------------------------------------------------------------------- metrics


@torch.no_grad()
def log_likelihoods(model: SetModel, sets: Tensor) -> tuple[Tensor, Tensor]:
    """log P (M,) of every basket, and its standard error, zero where it is exact."""
    parts = [model.log_prob(part) for part in sets.split(512)]
    return torch.cat([value for value, _ in parts]), torch.cat([error for _, error in parts])


def hold_out(sets: Tensor) -> tuple[Tensor, Tensor]:
    """Of the baskets of at least two items: all but one random item (M, T−1), and that one (M,)."""
    several = sets[(sets >= 0).sum(-1) > 1]
    size = (several >= 0).sum(-1, keepdim=True)
    chance = torch.rand(size.shape, generator=torch.Generator().manual_seed(SEED)).to(sets.device)
    at = (chance * size).long()
    held = several.gather(1, at).squeeze(1)
    rest = several.masked_fill(several == held.unsqueeze(-1), -1)
    return rest.sort(-1, descending=True).values[:, : max(several.shape[1] - 1, 0)], held


@torch.no_grad()
def ranks(model: SetModel, rest: Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
    """(M,) how many items outside ``rest`` score above the held-out one, ties counted half, and how many there are."""
    size = (rest >= 0).sum(-1)
    above = torch.zeros(len(rest))
    for count in size.unique().tolist():  # completions of one size have the same number of candidates
        rows = (size == count).nonzero().squeeze(-1)
        for part in rows.split(64):
            scores = model.scores(rest[part, :count])
            own = scores.gather(1, held[part].unsqueeze(-1))
            above[part] = ((scores > own).sum(-1) + 0.5 * ((scores == own).sum(-1) - 1)).float().cpu()
    return above, (model.num_items - size).cpu()


def evaluate(model: SetModel, sets: Tensor) -> dict[str, Any]:
    """Log-likelihood, ranks of a held-out item, AUC against random sets; None where a model has no value.

    ``log_likelihood_se``: the standard error of the ``estimated`` ones among the baskets.
    """
    found: dict[str, Any] = dict.fromkeys(COLUMNS)
    values, errors = log_likelihoods(model, sets)
    if not values.isnan().any():
        error = float(errors.square().sum().sqrt()) / len(sets)
        found |= {"log_likelihood": float(values.mean()), "estimated": int((errors > 0).sum())}
        found |= {"log_likelihood_se": error, **auc(model, sets, values)}
    above, among = ranks(model, *hold_out(sets))
    found["mpr"] = float((100 * (1 - above / (among - 1).clamp(min=1))).mean())
    found |= {f"hit_{k}": float((above < k).float().mean()) for k in (1, 5, 10)}
    return found | {"mrr": float((1 / (1 + above)).mean())}


def auc(model: SetModel, sets: Tensor, values: Tensor) -> dict[str, float]:
    """AUC of log P for baskets against random sets.

    ``auc``: of the basket's own size. ``auc_pooled``: of any basket's size, as one ROC curve over all baskets and as
    many random sets; as larger sets are less likely, real or not, this asks mostly for the smaller of the two, and
    what ranks by size first reaches at most ``auc_limit``, (1 + Σ p_k²)/2 with p_k the share of size k. ``auc_ratio``:
    pooled too, by log P less the log-probability p_k / C(N, k) of drawing the set at random.
    """
    generator = torch.Generator().manual_seed(SEED)
    random = torch.rand(NEGATIVES * len(sets), model.num_items, generator=generator).argsort(-1)[:, : sets.shape[1]]
    random = random.to(sets.device).masked_fill(sets.repeat(NEGATIVES, 1) < 0, -1)
    others = log_likelihoods(model, random)[0].view(NEGATIVES, -1)
    own = (values > others).float() + 0.5 * (values == others).float()
    size, n = (sets >= 0).sum(-1), torch.tensor(model.num_items + 1.0)
    share = size.bincount() / len(size)
    log_choices = n.lgamma() - (size + 1.0).lgamma() - (n - size).lgamma()
    ratio = log_choices - share[size].log()
    return {
        "auc": float(own.mean()),
        "auc_pooled": statistics.fmean(_roc(values, other) for other in others),
        "auc_limit": float(1 + share.square().sum()) / 2,
        "auc_ratio": statistics.fmean(_roc(values + ratio, other + ratio) for other in others),
    }


def _roc(positive: Tensor, negative: Tensor) -> float:
    """The area under the ROC curve: the chance that a positive scores above a negative."""
    ranked = negative.sort().values
    below = torch.searchsorted(ranked, positive) + torch.searchsorted(ranked, positive, right=True)
    return float(below.double().mean()) / (2 * len(negative))

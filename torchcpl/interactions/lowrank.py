"""W = K Vᵀ/√h, never built: the paper's form."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchcpl.checks import check_tensor
from torchcpl.interactions.base import Additive, State, addends, without_autocast
from torchcpl.potentials import register_pytree


@register_pytree
@dataclass(frozen=True, eq=False, repr=False)
class LowRank(Additive):
    """``W[j, i] = keys[j]·values[i]/√h``.

    The picks S are summarised by one vector, the context ``s = Σ_{i∈S} values[i]``, and candidate j's logit is
    ``θ_j + keys[j]·s/√h``: memory is O(N·h) and a decoding step one matrix–vector product.

    With ``stop_key`` the stop's logit gains ``stop_key·s/√h``.
    """

    keys: Tensor  # (B, N, h)
    values: Tensor  # (B, N, h)
    stop_key: Tensor | None = None  # (B, h)

    def __post_init__(self) -> None:
        check_factors(self.keys, self.values, self.stop_key)

    # The state is the context: (B, K, h).

    def steps(self, picks: Tensor) -> State:
        return (addends(self.values, picks),)

    def logits(self, state: State) -> tuple[Tensor, Tensor | None]:
        return key_logits(self.keys, self.stop_key, state[0])


def check_factors(keys: Tensor, values: Tensor, stop_key: Tensor | None, prefix: str = "") -> None:
    check_tensor(f"{prefix}keys", keys, ("B", "N", "h"), "float")
    check_tensor(f"{prefix}values", values, tuple(keys.shape), "float", like=keys)
    if stop_key is not None:
        check_tensor(f"{prefix}stop_key", stop_key, (keys.shape[0], keys.shape[2]), "float", like=keys)


def key_logits(keys: Tensor, stop_key: Tensor | None, context: Tensor) -> tuple[Tensor, Tensor | None]:
    """``keys·context/√h`` for the candidates (B, K, N) and the stop (B, K)."""
    # Scaling the context, not the product: h numbers instead of N.
    query = (context / max(keys.shape[-1], 1) ** 0.5).to(keys.dtype)  # (B, K, h)
    with without_autocast(keys):
        candidates = torch.bmm(query, keys.transpose(1, 2))  # not @, which compiles a graph for sizes of 1
        if stop_key is None:
            return candidates, None
        return candidates, torch.bmm(query, stop_key.to(query.dtype).unsqueeze(-1)).squeeze(-1)

"""k-Means with oracle k: the reference without training."""

from __future__ import annotations

import torch
from torch import Tensor

from torchcpl.potentials import Selection


@torch.no_grad()
def kmeans(
    points: Tensor, mask: Tensor, k: Tensor, *, iterations: int = 80, generator: torch.Generator | None = None
) -> Selection:
    """Lloyd's algorithm on every row at once, from k random members; picks the member nearest to each centroid.

    ``points`` (B, N, c), ``mask`` (B, N), ``k`` (B,) the number of clusters. Stops when nothing changes. A cluster that
    loses all its members keeps its centroid and gives no pick.
    """
    batch, n, _ = points.shape
    most = int(k.max()) if batch else 0
    order = torch.rand(batch, n, generator=generator, device=points.device).masked_fill(~mask, 2.0).argsort(-1)
    start = order[:, :most]
    used = torch.arange(most, device=points.device) < k.unsqueeze(-1)  # (B, C)
    centres = points.gather(1, start.unsqueeze(-1).expand(-1, -1, points.shape[-1]))
    for turn in range(iterations + 1):
        distance = torch.cdist(points, centres).masked_fill(~used.unsqueeze(1), torch.inf)  # (B, N, C)
        member = torch.nn.functional.one_hot(distance.argmin(-1), most).bool() & mask.unsqueeze(-1)  # (B, N, C)
        size = member.sum(1)  # (B, C)
        means = member.transpose(1, 2).to(points.dtype) @ points / size.clamp(min=1).unsqueeze(-1)
        moved = torch.where((size > 0).unsqueeze(-1), means, centres)
        if turn == iterations or torch.equal(moved, centres):
            break
        centres = moved
    nearest = distance.masked_fill(~member, torch.inf).argmin(1)  # (B, C), each among its own members
    indices = nearest.masked_fill(~(used & member.any(1)), -1)
    front = (indices < 0).to(torch.int8).argsort(dim=-1, stable=True)  # padding last
    indices = indices.gather(1, front)
    return Selection(indices, (indices >= 0).sum(-1), torch.zeros(batch, device=points.device), n)

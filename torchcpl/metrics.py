"""Metrics of selections: pure functions of tensors, one value per bag or scene, the caller averages.

Everything is vectorised and stays on the device of its inputs: on an accelerator no value is read on the
host.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from torchcpl.checks import check_tensor, validating
from torchcpl.potentials import picked_mask

IMAGE_DIAGONAL = 256 * math.sqrt(2)


def cluster_scores(picks: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """How well a picked set S covers the k clusters of its bag, each once.

    With h the number of clusters that S hits::

        clu_rec = h / k    clu_prec = h / |S|    clu_f1 = 2h / (|S| + k)    card_err = abs(|S| − k)

    An empty S has precision 0, a bag without clusters recall 0. S is a set: an index given twice counts
    once. A pick that falls on padding counts in |S| and hits nothing.

    Args:
        picks: (B, T) long indices into the bag, −1 where there is no pick.
        labels: (B, N) long cluster of each element, −1 for padding.

    Returns:
        ``clu_rec``, ``clu_prec``, ``clu_f1``, ``card_err``, each (B,) float32.

    >>> labels = torch.tensor([[7, 7, 3, 5, 5, -1]])  # clusters {0, 1}, {2}, {3, 4}
    >>> scores = cluster_scores(torch.tensor([[0, 1, 2, 4, -1]]), labels)
    >>> {name: round(value.item(), 3) for name, value in scores.items()}
    {'clu_rec': 1.0, 'clu_prec': 0.75, 'clu_f1': 0.857, 'card_err': 1.0}
    >>> scores = cluster_scores(torch.tensor([[-1, -1]]), labels)
    >>> {name: value.item() for name, value in scores.items()}
    {'clu_rec': 0.0, 'clu_prec': 0.0, 'clu_f1': 0.0, 'card_err': 3.0}
    """
    check_tensor("labels", labels, ("B", "N"), "long")
    check_tensor("picks", picks, (labels.shape[0], "T"), "long", like=labels)
    N = labels.shape[1]
    if validating(picks) and (picks >= N).any():
        raise ValueError(f"picks: expected indices below {N}, got {int(picks.max())}")
    chosen = picked_mask(picks, N)  # (B, N)
    size = chosen.sum(1)
    clusters = _distinct(labels)
    hits = _distinct(torch.where(chosen, labels, -1))
    return {
        "clu_rec": hits / clusters.clamp(min=1),
        "clu_prec": hits / size.clamp(min=1),
        "clu_f1": 2 * hits / (size + clusters).clamp(min=1),
        "card_err": (size - clusters).abs().float(),
    }


def _distinct(values: Tensor) -> Tensor:
    """Number of distinct values ≥ 0 in each row: (B, N) -> (B,)."""
    ordered = values.sort(1).values
    fresh = ordered[:, 1:] != ordered[:, :-1]
    return (fresh & (ordered[:, 1:] >= 0)).sum(1) + (ordered[:, :1] >= 0).sum(1)


def path_scores(
    points: Tensor, lengths: Tensor, paths: Tensor, path_lengths: Tensor, num_paths: Tensor,
    empty: float = IMAGE_DIAGONAL,
) -> dict[str, Tensor]:  # fmt: skip
    """Distance of a predicted point set P to the nearest of the valid paths Q_1 … Q_K, in pixels.

    With d(p, Q) = min_{q∈Q} ‖p − q‖, between points and not between lines::

        min_ade = min_k ½ mean_{p∈P} d(p, Q_k) + ½ mean_{q∈Q_k} d(q, P)
        min_hd  = min_k max(max_{p∈P} d(p, Q_k), max_{q∈Q_k} d(q, P))

    The order of the points does not matter. An empty prediction, or a scene without a path, gets the distance
    ``empty``.

    Args:
        points: (B, T, 2) predicted points; those from ``lengths`` on are padding.
        lengths: (B,) number of predicted points.
        paths: (B, K, M, 2) points of the valid paths.
        path_lengths: (B, K) number of points of each path, 0 where there is none.
        num_paths: (B,) number of valid paths, which come first.
        empty: the distance of an empty prediction, by default the diagonal of a 256 × 256 image.

    Returns:
        ``min_ade``, ``min_hd``, each (B,).

    >>> paths = torch.tensor([[[[0.0, 0.0], [3.0, 0.0]], [[0.0, 50.0], [3.0, 50.0]]]])
    >>> points = torch.tensor([[[0.0, 4.0], [3.0, 4.0], [3.0, 0.0]]])
    >>> two, three = torch.tensor([2]), torch.tensor([3])
    >>> scores = path_scores(points, three, paths, torch.tensor([[2, 2]]), two)
    >>> round(scores["min_ade"].item(), 3), scores["min_hd"].item()
    (2.083, 4.0)
    """
    check_tensor("points", points, ("B", "T", 2), "float")
    B = len(points)
    check_tensor("paths", paths, (B, "K", "M", 2), "float", like=points)
    K = paths.shape[1]
    check_tensor("lengths", lengths, (B,), "long", like=points)
    check_tensor("path_lengths", path_lengths, (B, K), "long", like=points)
    check_tensor("num_paths", num_paths, (B,), "long", like=points)
    dtype = torch.promote_types(points.dtype, torch.promote_types(paths.dtype, torch.float32))
    distances = _distances(points.to(dtype)[:, None], lengths[:, None], paths.to(dtype), path_lengths)  # (B, 1, K) each
    valid = (torch.arange(K, device=points.device) < num_paths[:, None]) & (path_lengths > 0) & (lengths > 0)[:, None]
    # One more, infinitely far, so that there may be none.
    nearest = [F.pad(d[:, 0].masked_fill(~valid, math.inf), (0, 1), value=math.inf).amin(1) for d in distances]
    min_ade, min_hd = (torch.where(valid.any(1), d, empty) for d in nearest)
    return {"min_ade": min_ade, "min_hd": min_hd}


def path_distances(points: Tensor, lengths: Tensor, paths: Tensor, path_lengths: Tensor) -> Tensor:
    """The symmetric mean distance, as in `path_scores`, of every answer to every path; infinite where one is empty.

    Args:
        points: (B, A, T, 2) the points of each answer; those from ``lengths`` (B, A) on are padding.
        paths: (B, K, M, 2) likewise, ``path_lengths`` (B, K).

    Returns:
        (B, A, K).
    """
    return _distances(points, lengths, paths, path_lengths)[0]


def _distances(points: Tensor, lengths: Tensor, paths: Tensor, path_lengths: Tensor) -> tuple[Tensor, Tensor]:
    """`path_distances`, and likewise the Hausdorff distances."""
    there = torch.arange(points.shape[2], device=points.device) < lengths[..., None]  # (B, A, T)
    wanted = torch.arange(paths.shape[2], device=points.device) < path_lengths[..., None]  # (B, K, M)
    if not there.shape[2] or not wanted.shape[2]:
        nothing = points.new_full((*lengths.shape, path_lengths.shape[1]), math.inf)
        return nothing, nothing
    there, wanted = there[:, :, None], wanted[:, None]  # (B, A, 1, T), (B, 1, K, M)
    # By coordinate: cdist's matrix-product form loses half the precision, its other form has a size limit on CUDA.
    gaps = [points[:, :, None, :, None, axis] - paths[:, None, :, None, :, axis] for axis in (0, 1)]
    distance = (gaps[0].square() + gaps[1].square()).sqrt()  # (B, A, K, T, M)
    distance = torch.where(there.unsqueeze(-1) & wanted.unsqueeze(-2), distance, math.inf)
    # Zero for padding: neutral in a sum and in a maximum of distances.
    to_path = torch.where(there, distance.amin(4), 0.0)  # (B, A, K, T)
    to_points = torch.where(wanted, distance.amin(3), 0.0)  # (B, A, K, M)
    ade = 0.5 * to_path.sum(3) / there.sum(3) + 0.5 * to_points.sum(3) / wanted.sum(3)
    hausdorff = torch.maximum(to_path.amax(3), to_points.amax(3))
    empty = (lengths == 0)[:, :, None] | (path_lengths == 0)[:, None]  # (B, A, K)
    return ade.masked_fill(empty, math.inf), hausdorff.masked_fill(empty, math.inf)


def answer_scores(distances: Tensor, probability: Tensor, num_paths: Tensor, near: float = 4.0) -> dict[str, Tensor]:
    """How well several answers with probabilities cover the valid paths of a scene.

    A path is *covered* by the nearest answer where that is within ``near``. With y one of the valid paths, all as
    likely, f_a is the frequency with which answer a covers it, and p_a what was stated::

        min_ade   least distance of an answer to a valid path
        miss      1 where no answer covers a path
        coverage  share of the paths that are covered
        stray     share of the stated probability on answers near no valid path
        brier     E_y [Σ_a (p_a − y_a)²], plus 1 where no answer covers y: 1 + Σ_a p_a² − 2 Σ_a p_a f_a

    Args:
        distances: (B, A, K) of answers to paths, infinite where there is none.
        probability: (B, A), 0 where there is no answer.
        num_paths: (B,) number of valid paths, which come first.

    Returns:
        These, each (B,), and ``frequency``, f (B, A).

    >>> distances = torch.tensor([[[1.0, 30.0], [50.0, 20.0]]])
    >>> scores = answer_scores(distances, torch.tensor([[0.75, 0.25]]), torch.tensor([2]))
    >>> {name: value.tolist() for name, value in scores.items() if name != "min_ade"}
    {'miss': [0.0], 'coverage': [0.5], 'stray': [0.25], 'brier': [0.875], 'frequency': [[0.5, 0.0]]}
    """
    check_tensor("distances", distances, ("B", "A", "K"), "float")
    check_tensor("probability", probability, tuple(distances.shape[:2]), "float", like=distances)
    valid = torch.arange(distances.shape[2], device=distances.device) < num_paths[:, None]  # (B, K)
    distances = distances.masked_fill(~valid.unsqueeze(1), math.inf)
    least, by = distances.min(1)  # (B, K)
    covered = valid & (least <= near)
    frequency = torch.zeros_like(probability).scatter_add(1, by, covered.to(probability.dtype)) / num_paths[:, None]
    stray = (probability * (distances.amin(2) > near)).sum(1) / probability.sum(1).clamp(min=1e-12)
    return {
        "min_ade": least.amin(1),
        "miss": (~covered.any(1)).to(probability.dtype),
        "coverage": covered.sum(1) / num_paths,
        "stray": stray,
        "brier": 1 + (probability * (probability - 2 * frequency)).sum(1),
        "frequency": frequency,
    }


def calibration_error(probability: Tensor, frequency: Tensor, bins: int = 10) -> Tensor:
    """Expected calibration error: Σ_b n_b/n·|mean probability − mean frequency| over ``bins`` of equal width.

    >>> calibration_error(torch.tensor([0.9, 0.95, 0.1]), torch.tensor([1.0, 0.0, 0.1]))
    tensor(0.2833)
    """
    place = (probability * bins).long().clamp(0, bins - 1).flatten()
    gap = torch.zeros(bins, dtype=probability.dtype, device=probability.device)
    return gap.scatter_add(0, place, (probability - frequency).flatten()).abs().sum() / max(probability.numel(), 1)


def off_road(points: Tensor, lengths: Tensor, drivable: Tensor) -> Tensor:
    """Share of predicted points that lie outside the drivable area.

    The point (x, y) lies in pixel (row ⌊y⌋, column ⌊x⌋); one outside the image is off the road. An empty
    prediction counts as 1.

    Args:
        points: (B, T, 2) predicted points (x, y) in pixels; those from ``lengths`` on are padding.
        lengths: (B,) number of predicted points.
        drivable: (B, H, W) bool.

    Returns:
        (B,) float32.

    >>> drivable = torch.tensor([[[True, False], [True, False]]])
    >>> points = torch.tensor([[[0.5, 1.9], [1.5, 0.5], [-0.1, 0.0], [0.0, 0.0]]])
    >>> off_road(points, torch.tensor([4]), drivable)
    tensor([0.5000])
    >>> off_road(points, torch.tensor([0]), drivable)
    tensor([1.])
    """
    check_tensor("points", points, ("B", "T", 2), "float")
    B, T = points.shape[:2]
    check_tensor("lengths", lengths, (B,), "long", like=points)
    check_tensor("drivable", drivable, (B, "H", "W"), "bool", like=points)
    H, W = drivable.shape[1:]
    x, y = points.unbind(2)  # (B, T)
    inside = (x >= 0) & (x < W) & (y >= 0) & (y < H)
    # Padding may be NaN, so it is set to a valid pixel before the lookup.
    column = torch.where(inside, x, 0).long()
    row = torch.where(inside, y, 0).long()
    on = inside & drivable.flatten(1).gather(1, row * W + column)
    real = torch.arange(T, device=points.device) < lengths[:, None]
    share = (real & ~on).sum(1) / lengths.clamp(min=1)
    return torch.where(lengths > 0, share, 1.0)

"""Any pile in, picks out: one representative of every group in vectors of any kind, with the model that ships.

>>> import torch, torchcpl as cpl
>>> x = torch.cat([torch.randn(20, 3) + 9 * i for i in range(4)])
>>> cpl.select(x, size=4).indices.div(20, rounding_mode="floor").sort().values
tensor([0, 1, 2, 3])
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcpl.checks import check_choice, check_count
from torchcpl.constraints import Constraint, Forbid, History
from torchcpl.decoding.greedy import greedy
from torchcpl.encoders.distances import DistanceModel, distances
from torchcpl.potentials import Potentials, Selection

SHIPPED = Path(__file__).parent / "models" / "piles.safetensors"
METRICS = ("euclidean", "cosine", "precomputed")
DIRECT = 512  # the largest pile whose distances the model sees all at once
DTYPES = {"F16": np.float16, "F32": np.float32}


def select(
    x: Any,
    size: int | None = None,
    *,
    metric: str = "euclidean",
    min_size: int = 1,
    max_size: int | None = None,
    require: Any = None,
    forbid: Any = None,
    weights: Any = None,
    num_hypotheses: int = 1,
    seed: int = 0,
    device: torch.device | str | None = None,
) -> Selection:
    """Pick one representative of every group in a pile of vectors; nothing is trained.

    The model sees only the distances inside the pile: the picks are the same when rows are permuted and when the
    vectors are rotated, shifted or scaled, to rounding. Of rows that are equal only one is picked, unless ``size``
    asks for more than there are different ones.

    Args:
        x: (N, D) vectors or (B, N, D) piles of equal size, NumPy or torch; with ``metric="precomputed"`` distances
            (N, N) or (B, N, N).
        size: how many to pick; by default as many as there are groups, between ``min_size`` and ``max_size``.
        metric: ``euclidean | cosine | precomputed``.
        require: rows that must be picked, as indices or as a mask (N,) or (B, N); they come first.
        forbid: rows that must not be picked, given the same way; they still count as part of the pile.
        weights: (N,) or (B, N) added to each row's logit: quality, recency.
        num_hypotheses: give that many different answers, likeliest first.
        seed: of all that is drawn at random.
        device: where to compute; by default where ``x`` is.

    Returns:
        ``indices`` (T,), or (B, T) for piles, with R hypotheses (R, T) or (B, R, T), in order of picking and −1 after
        the end; ``step_log_prob`` has the log-probability of each pick.
    """
    rules = (require, forbid, weights)
    return select_by(None, x, size, metric, (min_size, max_size), rules, num_hypotheses, seed, device)


def select_by(
    model: tuple[DistanceModel, float] | None,
    x: Any,
    size: int | None,
    metric: str,
    between: tuple[int, int | None],
    rules: tuple[Any, Any, Any] = (None, None, None),
    num_hypotheses: int = 1,
    seed: int = 0,
    device: torch.device | str | None = None,
) -> Selection:
    """``select`` by another model than that of the package: the model and the P(stop) at which it stops.

    ``between``: the fewest and the most picks; ``rules``: require, forbid, weights.
    """
    check_choice("metric", metric, METRICS)
    check_count("num_hypotheses", num_hypotheses, 1)
    values = as_vectors(x, metric).to(device)
    single = values.dim() == 2
    values = values.unsqueeze(0) if single else values
    batch, n = values.shape[:2]
    required, forbidden = (
        as_mask(name, given, values) for name, given in zip(("require", "forbid"), rules, strict=False)
    )
    bonus = as_weights(rules[2], values)
    least, most = sizes(size, *between, required, forbidden)
    net, threshold = model or shipped(str(values.device))
    kept = distinct(values, metric, required, forbidden, bonus, least)
    chunk = max(1, 2**22 // n**2)
    found = []
    for i in range(0, batch, chunk):
        rows = slice(i, i + chunk)
        d = values[rows].float() if metric == "precomputed" else distances(values[rows], metric)
        pot = potentials(net, d, kept[rows], bonus[rows])
        constraints: list[Constraint] = [Forbid(forbidden[rows])] if bool(forbidden.any()) else []
        constraints += [_FirstOf(required[rows])] if bool(required.any()) else []
        stop = None if size is not None else threshold
        found.append(greedy(pot, most, min_len=least, stop_threshold=stop, constraints=constraints))
    return _joined(found, single)


def potentials(model: DistanceModel, d: Tensor, mask: Tensor, bonus: Tensor) -> Potentials:
    """The model's potentials for distances (B, N, N), with ``bonus`` (B, N) on the logits."""
    with torch.no_grad():
        pot: Potentials = model(d, mask)
    return Potentials(pot.unary + bonus.to(pot.unary), pot.stop, pot.interaction, pot.mask)


def assign(x: Any, picks: Any, metric: str = "euclidean", chunk: int = 65536) -> Tensor:
    """(N,) for every row of ``x`` (N, D) which of the rows ``picks`` (T,) is nearest, 0 to T − 1."""
    index = np.asarray(picks)
    if metric == "precomputed":
        return torch.as_tensor(x[:, index]).argmin(-1)
    chosen = _unit(torch.from_numpy(np.array(x[index], dtype=np.float32)), metric)
    labels = []
    for i in range(0, len(x), chunk):
        rows = _unit(torch.from_numpy(np.array(x[i : i + chunk], dtype=np.float32)), metric)
        labels.append((chosen.square().sum(-1) - 2 * rows @ chosen.T).argmin(-1))
    found = torch.cat(labels)
    found[torch.as_tensor(index)] = torch.arange(len(index))  # also where rows are equal
    return found


def _unit(rows: Tensor, metric: str) -> Tensor:
    return torch.nn.functional.normalize(rows, dim=-1) if metric == "cosine" else rows


class _FirstOf:
    """Nothing else, the stop included, before all of ``required`` (B, N) are picked."""

    def __init__(self, required: Tensor) -> None:
        self.required = required

    def __call__(self, history: History) -> Tensor:
        missing = self.required.unsqueeze(1) & ~history.selected  # (B, K, N)
        done = ~missing.any(-1, keepdim=True)
        return torch.cat([missing | done, done], -1)


# ---------------------------------------------------------------------------------------------- the model


@cache
def shipped(device: str) -> tuple[DistanceModel, float]:
    """The model of the package and the P(stop) at which it stops."""
    return load_model(SHIPPED, device)[:2]


def load_model(path: str | Path, device: str = "cpu") -> tuple[DistanceModel, float, dict[str, str]]:
    """A model, its stopping probability and what else is said in a safetensors file."""
    weights, said = read_safetensors(path)
    model = DistanceModel(**json.loads(said["model"]))
    model.load_state_dict({name: value.float() for name, value in weights.items()})
    return model.to(device).eval().requires_grad_(False), float(said["stop_threshold"]), said


def save_model(path: str | Path, model: DistanceModel, stop_threshold: float, **said: str) -> None:
    """Write what ``load_model`` reads, in float16, with ``said`` beside it."""
    header: dict[str, Any] = {
        "__metadata__": {**said, "model": json.dumps(model.widths), "stop_threshold": str(stop_threshold)}
    }
    data = b""
    for name, value in model.state_dict().items():
        part = value.detach().cpu().half().numpy().tobytes()
        header[name] = {"dtype": "F16", "shape": list(value.shape), "data_offsets": [len(data), len(data) + len(part)]}
        data += part
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    Path(path).write_bytes(len(text).to_bytes(8, "little") + text + data)


def read_safetensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a file: the length of the header (8 bytes), the header (JSON), the data."""
    try:
        data = Path(path).read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:start])
        said = header.pop("__metadata__", {})
        found = {}
        for name, at in header.items():
            first, last = at["data_offsets"]
            values = np.frombuffer(data[start + first : start + last], DTYPES[at["dtype"]])
            found[name] = torch.from_numpy(values.reshape(at["shape"]).copy())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: expected a safetensors file of float16 or float32: {error}") from None
    return found, said


# ---------------------------------------------------------------------------------------------- the input


def as_vectors(x: Any, metric: str) -> Tensor:
    """``x`` as a tensor of 2 or 3 dimensions, checked; integers become float32."""
    if not isinstance(x, Tensor):
        try:
            array = np.asarray(x)
        except ValueError:
            raise ValueError("x: expected rows of one length, got ragged ones") from None
        if array.dtype.kind not in "fiu":
            raise ValueError(f"x: expected numbers, got an array of dtype {array.dtype}")
        single = array.dtype.kind != "f" or array.dtype.itemsize != 8
        x = torch.from_numpy(np.array(array, dtype=np.float32 if single else np.float64))  # a copy, never written to
    if x.is_complex() or x.dtype == torch.bool:
        raise ValueError(f"x: expected numbers, got a tensor of dtype {x.dtype}")
    x = x.detach() if x.dtype in (torch.float32, torch.float64) else x.detach().float()
    if x.dim() not in (2, 3) or 0 in x.shape:
        what = "(N, N) or (B, N, N) distances" if metric == "precomputed" else "(N, D) vectors or (B, N, D) piles"
        raise ValueError(f"x: expected {what} with at least one row and column, got shape {tuple(x.shape)}")
    bad = ~x.isfinite().all(-1)
    if bool(bad.any()):
        raise ValueError(f"x: expected finite numbers, got NaN or infinity in {named_rows(bad)}")
    if metric == "precomputed":
        check_distances(x)
    if metric == "cosine" and bool((x == 0).all(-1).any()):
        raise ValueError(f"x: expected rows with a direction for cosine, got zeros in {named_rows((x == 0).all(-1))}")
    found: Tensor = x
    return found


def named_rows(bad: Tensor) -> str:
    """Some of the rows where ``bad`` (..., N) is True, in words."""
    rows = bad.nonzero()
    named = [", ".join(map(str, row)) for row in rows[:5].tolist()]
    more = f" and {len(rows) - 5} more" if len(rows) > 5 else ""
    return f"row{'s' if len(rows) > 1 else ''} {'; '.join(named) if bad.dim() > 1 else ', '.join(named)}{more}"


def check_distances(d: Tensor) -> None:
    if d.shape[-1] != d.shape[-2]:
        raise ValueError(f"x: expected square matrices of distances, got shape {tuple(d.shape)}")
    if bool((d < 0).any()):
        raise ValueError(f"x: expected distances of at least 0, got {float(d.min()):g}")
    tolerance = 1e-4 * float(d.max())
    if bool(((d - d.transpose(-1, -2)).abs() > tolerance).any()):
        raise ValueError("x: expected symmetric distances, got d[i, j] other than d[j, i]")
    if bool((d.diagonal(dim1=-2, dim2=-1) > tolerance).any()):
        raise ValueError("x: expected distances of 0 on the diagonal, got more")


def as_mask(name: str, given: Any, values: Tensor) -> Tensor:
    """(B, N) from None, indices of rows, or a mask (N,) or (B, N)."""
    batch, n = values.shape[:2]
    if given is None:
        return torch.zeros(batch, n, dtype=torch.bool, device=values.device)
    rows = torch.as_tensor(given if isinstance(given, Tensor) else np.asarray(given), device=values.device)
    if rows.dtype == torch.bool and tuple(rows.shape) in ((n,), (batch, n)):
        return rows.expand(batch, n)
    if rows.dim() != 1 or (rows.is_floating_point() and rows.numel()) or rows.dtype == torch.bool:
        raise ValueError(
            f"{name}: expected indices of rows or a mask ({n},) or ({batch}, {n}), got {tuple(rows.shape)}"
        )
    wrong = (rows < 0) | (rows >= n)
    if bool(wrong.any()):
        raise ValueError(f"{name}: expected rows from 0 to {n - 1}, got {int(rows[wrong][0])}")
    mask = torch.zeros(n, dtype=torch.bool, device=values.device)
    mask[rows.long()] = True
    return mask.expand(batch, n)


def as_weights(given: Any, values: Tensor) -> Tensor:
    """(B, N) from None, (N,) or (B, N)."""
    batch, n = values.shape[:2]
    if given is None:
        return torch.zeros(batch, n, device=values.device)
    weights = torch.as_tensor(given, dtype=torch.float32, device=values.device)
    if tuple(weights.shape) not in ((n,), (batch, n)):
        raise ValueError(f"weights: expected ({n},) or ({batch}, {n}), got {tuple(weights.shape)}")
    if not bool(weights.isfinite().all()):
        raise ValueError("weights: expected finite numbers, got NaN or infinity")
    return weights.expand(batch, n)


def sizes(size: int | None, least: int, most: int | None, required: Tensor, forbidden: Tensor) -> tuple[int, int]:
    """The fewest and the most picks; ValueError where no selection can have them."""
    both = required & forbidden
    if bool(both.any()):
        raise ValueError(f"forbid: expected none of the required rows, got {named_rows(both.any(0))}")
    room = int((~forbidden).sum(-1).min())
    if not room:
        raise ValueError("forbid: expected some rows left to pick, got all of them")
    wanted = int(required.sum(-1).max())
    if size is not None:
        check_count("size", size, 1)
        least = most = size
    check_count("min_size", least, 0)
    check_count("max_size", most := room if most is None else most, 1)
    name = "size" if size is not None else "max_size"
    if wanted > most:
        raise ValueError(f"{name}: expected at least {wanted}, the required rows, got {most}")
    if least > most:
        raise ValueError(f"min_size: expected at most max_size = {most}, got {least}")
    if least > room:
        raise ValueError(
            f"{name if size else 'min_size'}: expected at most {room}, the rows that may be picked, got {least}"
        )
    return least, min(most, room)


def distinct(values: Tensor, metric: str, required: Tensor, forbidden: Tensor, bonus: Tensor, least: int) -> Tensor:
    """(B, N) one of each group of equal rows: a required one, else the allowed one of most weight, else the first.

    Where fewer than ``least`` would be left to pick, further ones in the order of the rows.
    """
    kept = torch.ones_like(required)
    for b, rows in enumerate(values):
        if metric == "precomputed":
            group = (rows == 0).to(torch.uint8).argmax(-1)  # (N,) the first row at no distance
        else:
            group = torch.unique(rows, dim=0, return_inverse=True)[1]
        n = len(group)
        if bool((torch.bincount(group, minlength=n) > 1).any()):
            worth = bonus[b].double() + 1e30 * required[b].double() - 1e30 * forbidden[b].double()
            order = worth.argsort(descending=True, stable=True)
            first = torch.full((n,), n, device=group.device).scatter_reduce(
                0, group[order], torch.arange(n, device=group.device), "amin"
            )
            kept[b] = required[b]
            kept[b, order[first[first < n]]] = True
            short = least - int((kept[b] & ~forbidden[b]).sum())
            kept[b, (~kept[b] & ~forbidden[b]).nonzero().flatten()[: max(short, 0)]] = True
    return kept


def _joined(parts: Sequence[Selection], single: bool) -> Selection:
    """The batches after each other, without columns of nothing but padding; of one pile its row."""
    longest = max(1, max(int(part.lengths.max()) for part in parts))

    def column(name: str) -> Any:
        tensors = [getattr(part, name) for part in parts]
        if tensors[0] is None:
            return None
        cut = [t[..., :longest] for t in tensors] if name in ("indices", "step_log_prob") else tensors
        whole = torch.cat(cut)
        return whole[0] if single else whole

    names = [name for name in ("indices", "lengths", "log_prob", "weight", "step_log_prob") if hasattr(parts[0], name)]
    return Selection(num_candidates=parts[0].num_candidates, **{name: column(name) for name in names})

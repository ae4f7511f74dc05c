"""One representative of every group in any set of vectors, by the pretrained model of the package.

>>> import torch, torchcpl as cpl
>>> x = torch.cat([torch.randn(20, 3) + 9 * i for i in range(4)])
>>> cpl.select(x, size=4).indices.div(20, rounding_mode="floor").sort().values
tensor([0, 1, 2, 3])
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from torchcpl.checks import check_choice, check_count, describe
from torchcpl.constraints import Constraint, Forbid, Require, Rules
from torchcpl.decoding.greedy import greedy
from torchcpl.decoding.refine import refine
from torchcpl.encoders.distances import DistanceModel, distances
from torchcpl.files import track
from torchcpl.functional import prefix_log_probs, trimmed
from torchcpl.hypotheses import hypotheses
from torchcpl.interactions.base import gather_rows, without_autocast
from torchcpl.potentials import Potentials, Selection, as_device, picked_mask
from torchcpl.reduce import BLOCK, Rows, kmeans, nearest, pivots, precise, reduce, sample, spectral

SHIPPED = Path(__file__).parent / "models" / "piles.safetensors"
LEAST, MOST = 1e-15, 1e15  # bounds of the largest number of a pile: its square must fit into float32
METRICS = ("euclidean", "cosine", "precomputed")
DIRECT = 512  # the largest pile whose full distance matrix the model gets
WHOLE = 400  # micro-clusters of a larger pile that it sees at once
TRAINED = 40  # the most picks that the model was trained on; for more see `_spread`
GRAPH, PART = 50, 128  # of the graph of neighbours: rows for every pick, and the most picks
BEAMS = 128  # sequences drawn for several answers
SAME = 0.1  # hypotheses nearer to each other than this, by `apart`, count as one
MOST_PRECOMPUTED = 4096
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
    """Pick one representative of every group in a pile of vectors, without training.

    The model sees only the distances inside the pile: up to 512 rows the picks are the same when rows are permuted and
    when the vectors are rotated, shifted or scaled, to rounding; in larger piles they may be other rows of the same
    groups. Of equal rows (for cosine: of one direction) only one is picked, unless ``size`` exceeds the number of
    distinct ones.

    Args:
        x: (N, D) vectors or (B, N, D) piles of equal size, NumPy or torch; with ``metric="precomputed"`` distances
            (N, N) or (B, N, N).
        size: how many to pick; by default as many as there are groups, between ``min_size`` and ``max_size``.
        metric: ``euclidean | cosine | precomputed``.
        require: rows that must be picked, as indices or as a mask (N,) or (B, N); they come first.
        forbid: rows that must not be picked, given the same way; they still count as part of the pile.
        weights: (N,) or (B, N) added to each row's logit: quality, recency.
        num_hypotheses: give that many different answers, likeliest first; where there are fewer, the last ones are
            rows of −1 with log-probability −inf.
        seed: random seed.
        device: where to compute; by default where ``x`` is.

    Returns:
        ``indices`` (T,), or (B, T) for piles, with R hypotheses (R, T) or (B, R, T), in order of picking and −1 after
        the end; ``step_log_prob`` has the log-probability of each pick.
    """
    rules = (require, forbid, weights)
    return select_by(None, x, size, metric, (min_size, max_size), rules, num_hypotheses, seed, device)


def select_by(
    model: DistanceModel | None,
    x: Any,
    size: int | None,
    metric: str,
    between: tuple[int, int | None],
    rules: tuple[Any, Any, Any] = (None, None, None),
    num_hypotheses: int = 1,
    seed: int = 0,
    device: torch.device | str | None = None,
) -> Selection:
    """``select`` by another model than that of the package.

    ``between``: the fewest and the most picks; ``rules``: require, forbid, weights.
    """
    check_choice("metric", metric, METRICS)
    check_count("num_hypotheses", num_hypotheses, 1)
    check_count("seed", seed, 0)
    x = x if isinstance(x, np.ndarray | Tensor) else as_array("x", x)
    place = as_device((x.device if isinstance(x, Tensor) else "cpu") if device is None else device)
    many, single = is_large(x, metric), x.ndim == 2
    values: Any = x if many else as_vectors(x, metric).to(place)
    if place.type == "meta":
        raise ValueError("device: expected one that holds numbers, got meta")
    shape = (1, len(x)) if single else tuple(x.shape[:2])
    require, forbid, weights = rules
    required, forbidden = as_mask("require", require, shape, place), as_mask("forbid", forbid, shape, place)
    bonus = as_weights(weights, shape, place)
    least, most = sizes(size, *between, required, forbidden)
    picker = _Picker(model or shipped(str(place)), size is not None, num_hypotheses, seed)
    if num_hypotheses > 1 and least > 2 * TRAINED:
        raise ValueError(f"size: expected at most {2 * TRAINED} with several hypotheses, got {least}")
    reduced = many or (metric != "precomputed" and shape[1] > DIRECT)
    if reduced and num_hypotheses > 1:
        raise ValueError(f"num_hypotheses: expected 1 for a pile of more than {DIRECT} rows, got {num_hypotheses}")
    with without_autocast(required):  # halves would round distances and their ranks
        if reduced:
            piles = zip([values] if single else values, required, forbidden, bonus, strict=True)
            large = [
                _large(picker, Rows(pile, metric, place), must, never, extra, (least, most))
                for pile, must, never, extra in piles
            ]
            return _joined([found.map(lambda part: part.unsqueeze(0)) for found in large], single)
        values = values.view(*shape, -1)
        kept = distinct(values, metric, required, forbidden, bonus, least)
        chunk = max(1, 2**22 // shape[1] ** 2)
        parts = (whole.split(chunk) for whole in (values, kept, required, forbidden, bonus))
        found = [
            picker(distances(pile, metric), real, must, never, extra, (least, most))
            for pile, real, must, never, extra in zip(*parts, strict=True)
        ]
        return _joined(found, single)


@torch.no_grad()
def pile_potentials(
    x: Any, metric: str = "euclidean", weights: Any = None, require: Any = None, forbid: Any = None, least: int = 1
) -> Potentials:
    """The potentials from which ``select`` picks, of a pile (N, D) of at most `DIRECT` rows, masked by `distinct`."""
    check_choice("metric", metric, METRICS)
    if len(x) > DIRECT:
        raise ValueError(f"x: expected at most {DIRECT} rows, got {len(x)}")
    values = as_vectors(x, metric).unsqueeze(0)
    shape, place = (1, len(x)), values.device
    required, forbidden = as_mask("require", require, shape, place), as_mask("forbid", forbid, shape, place)
    bonus = as_weights(weights, shape, place)
    kept = distinct(values, metric, required, forbidden, bonus, least)
    pot: Potentials = shipped("cpu")(distances(values, metric), kept)
    return replace(pot, unary=pot.unary + bonus.to(pot.unary))


@torch.no_grad()
def greedy_to_median(
    pot: Potentials, most: int | None = None, least: int = 0, constraints: Sequence[Constraint] = ()
) -> Selection:
    """Greedy picks, refined, as many as the median of their number says: the first k with P(stopped by k) ≥ ½.

    P(stopped by k) = 1 − Π_{t ≤ k}(1 − P(stop after t picks)).
    """
    found = greedy(pot, most, min_len=least, stop_threshold=0.5, constraints=constraints)  # at the median or later
    rules = Rules(pot, most, least, 0.0, constraints)
    stop = prefix_log_probs(pot, trimmed(found.indices).unsqueeze(1), rules)[1][:, 0]  # (B, T+1)
    ended = torch.arange(found.indices.shape[1], device=stop.device) >= median_length(stop.exp()).unsqueeze(-1)
    found = replace(found, indices=found.indices.masked_fill(ended, -1))
    return refine(pot, found, max_len=most, min_len=least, constraints=constraints)


def median_length(stop: Tensor) -> Tensor:
    """(B,) the median of the number of picks, from P(stop) after each number of them (B, T+1); T where it is beyond."""
    return ((1 - stop[:, :-1]).cumprod(-1) > 0.5).sum(-1)


@dataclass(frozen=True)
class _Picker:
    """Decodes the potentials of a model; where ``exact``, as many picks as are allowed."""

    model: DistanceModel
    exact: bool
    num_hypotheses: int
    seed: int

    @torch.no_grad()
    def __call__(
        self, d: Tensor, mask: Tensor, required: Tensor, forbidden: Tensor, bonus: Tensor, between: tuple[int, int]
    ) -> Selection:
        """The picks from piles with distances ``d`` (B, N, N); the other tensors are (B, N)."""
        pot: Potentials = self.model(d, mask)
        pot = replace(pot, unary=pot.unary + bonus.to(pot.unary))
        constraints: list[Constraint] = [Forbid(forbidden)] if bool(forbidden.any()) else []
        constraints += [Require(required, first=True)] if bool(required.any()) else []
        least, most = between
        if self.num_hypotheses == 1 and not self.exact:
            return greedy_to_median(pot, most, least, constraints)
        if self.num_hypotheses == 1:
            found = greedy(pot, most, min_len=least, constraints=constraints)
            return refine(pot, found, max_len=most, min_len=least, constraints=constraints)

        def apart(picks: Tensor) -> Tensor:
            """(B, K, K) between answers (B, K, T): how far rows' distances to their pick differ, relative to d."""
            far = d.masked_fill(~mask.unsqueeze(1), 0).amax((1, 2)).view(-1, 1, 1, 1)
            to = gather_rows(d, picks).where((picks >= 0).unsqueeze(-1), far).amin(2)  # (B, K, N) to the nearest pick
            to = to.masked_fill(~mask.unsqueeze(1), 0) / mask.sum(-1).view(-1, 1, 1)
            return torch.cdist(to, to, p=1) / d.mean((1, 2)).clamp(min=1e-30).view(-1, 1, 1)

        return hypotheses(
            pot, self.num_hypotheses, same=apart, radius=SAME, num_beams=max(BEAMS, self.num_hypotheses),
            max_len=min(most, 2 * TRAINED), min_len=least, constraints=constraints,
            generator=torch.Generator(d.device).manual_seed(self.seed),
        )  # fmt: skip


def _large(
    picker: _Picker, rows: Rows, required: Tensor, forbidden: Tensor, bonus: Tensor, between: tuple[int, int]
) -> Selection:
    """The model over the means of micro-clusters; of more picks than it was trained on, pivots of a graph."""
    least, most = between
    allowed = rows.one_of_equal(~forbidden, required, bonus) & ~forbidden & ~required
    if int(allowed.sum()) <= DIRECT:  # mostly equal rows
        return _few(picker, rows, allowed | required, required, forbidden, bonus, between)
    if picker.exact and most > TRAINED:
        return _spread(picker.seed, rows, required, forbidden, allowed, bonus, most)
    micro = reduce(rows, WHOLE, picker.seed, allowed, bonus)
    fixed = required.nonzero().flatten()
    member = torch.cat([micro.member, fixed.to(micro.member.device)])
    d = distances(torch.cat([micro.centres, rows.take(fixed.cpu())]).unsqueeze(0))
    needed = (torch.arange(len(member), device=member.device) >= len(micro.member)).unsqueeze(0)
    most = min(most, int((member >= 0).sum()))
    found = picker(
        d, torch.ones_like(needed), needed, (member < 0).unsqueeze(0), bonus[member.clamp(min=0)].unsqueeze(0),
        (min(least, most), most),
    )  # fmt: skip
    length = int(found.lengths[0])
    assert found.step_log_prob is not None
    return _filled(member[found.indices[0, :length]], found.step_log_prob[0, :length], least, allowed, forbidden)


def _spread(
    seed: int, rows: Rows, required: Tensor, forbidden: Tensor, allowed: Tensor, bonus: Tensor, size: int
) -> Selection:
    """Pivots of the graph of neighbours in a sample of the rows, in parts where there are many picks."""
    generator = torch.Generator().manual_seed(seed)
    open_ = allowed | required
    pool = (open_ | forbidden).nonzero().flatten().cpu()
    drawn = [sample(pool, GRAPH * size, generator), required.nonzero().flatten().cpu()]
    if bool(forbidden.any()):  # enough that may be picked
        drawn.append(sample(allowed.nonzero().flatten().cpu(), GRAPH // 4 * size, generator))
    if bool(bonus.any()):
        drawn.append(bonus.masked_fill(~allowed, -torch.inf).topk(min(size, int(allowed.sum()))).indices.cpu())
    index = torch.cat(drawn).unique()
    x = rows.take(index)
    index = index.to(x.device)
    centres = kmeans(x, -(-size // PART), generator)
    of, shares = nearest(x, centres)[1], torch.zeros(len(centres), dtype=torch.long, device=x.device)
    for i in track(range(0, len(rows), BLOCK), "rows", len(rows) > 100 * BLOCK):
        block = slice(i, i + BLOCK)
        mine = nearest(rows.take(block), centres)[1][open_[block]]
        shares += mine.bincount(minlength=len(centres))
    must = of[required[index]].bincount(minlength=len(centres))
    picks, chances = [], []
    for part, wanted in enumerate(apportion(shares, size, must).tolist()):
        mine = (of == part).nonzero().flatten()
        at = index[mine]
        if count := min(wanted, int(open_[at].sum())):
            v = spectral(x[mine], count, generator)
            found, chance = pivots(v, count, bonus[at], allowed[at], required[at])
            picks.append(at[found])
            chances.append(chance)
    # Each part's first picks, then their second ones: the order of picking within a part is kept.
    turn = torch.cat([torch.arange(len(part)) for part in picks])
    order, chance = torch.cat(picks), torch.cat(chances)
    turn = (turn.to(order.device) + size * ~required[order]).argsort(stable=True)
    return _filled(order[turn], chance[turn], size, allowed, forbidden)


def _few(
    picker: _Picker,
    rows: Rows,
    kept: Tensor,
    required: Tensor,
    forbidden: Tensor,
    bonus: Tensor,
    between: tuple[int, int],
) -> Selection:
    """From a few hundred rows of a large pile, those where ``kept``."""
    index = kept.nonzero().flatten()
    least, most = (min(bound, len(index)) for bound in between)
    real, needed, extra = (part[index].unsqueeze(0) for part in (kept, required, bonus))
    d = distances(rows.take(index.cpu()).unsqueeze(0))
    found = picker(d, real, needed, torch.zeros_like(real), extra, (least, most))
    length = int(found.lengths[0])
    assert found.step_log_prob is not None
    return _filled(index[found.indices[0, :length]], found.step_log_prob[0, :length], between[0], kept, forbidden)


def _filled(order: Tensor, chance: Tensor, least: int, distinct: Tensor, forbidden: Tensor) -> Selection:
    """The picks, and where they are fewer than ``least`` further rows, different ones first."""
    n, short = len(forbidden), least - len(order)
    if short > 0:
        left = ~(forbidden | picked_mask(order.unsqueeze(0), n)[0])
        more = torch.cat([(left & distinct).nonzero().flatten(), (left & ~distinct).nonzero().flatten()])[:short]
        order, chance = torch.cat([order, more]), torch.cat([chance, chance.new_zeros(short)])
    return Selection(order, torch.tensor(len(order)), chance.sum(), n, step_log_prob=chance)


def apportion(shares: Tensor, total: int, least: Tensor) -> Tensor:
    """``total`` in proportion to ``shares`` (G,), none above its share or below ``least``, by largest remainders."""
    exact = shares.double() * total / shares.sum()
    found = torch.minimum(torch.maximum(exact.floor().long(), least), shares)
    while int(found.sum()) != total:
        step = 1 if int(found.sum()) < total else -1
        open_ = found < shares if step > 0 else found > least
        if not bool(open_.any()):
            break
        found[(step * (exact - found)).masked_fill(~open_, -torch.inf).argmax()] += step
    return found


def assign(x: Any, picks: Any, metric: str = "euclidean", chunk: int = BLOCK) -> Tensor:
    """(N,) for every row of ``x`` (N, D) which of the rows ``picks`` (T,) is nearest, 0 to T − 1."""
    index = np.asarray(picks)
    if metric == "precomputed":
        found = as_array("x", x[:, index]).argmin(-1)
    else:
        rows = Rows(x, metric, torch.device("cpu"))
        chosen = rows.take(torch.as_tensor(index))
        found = torch.cat([nearest(rows.take(slice(i, i + chunk)), chosen)[1] for i in range(0, len(x), chunk)])
    found[torch.as_tensor(index)] = torch.arange(len(index))  # also where rows are equal
    return found


# ---------------------------------------------------------------------------------------------- the model


@cache
def shipped(device: str) -> DistanceModel:
    """The model of the package."""
    # Once 30 MB are freed, glibc keeps what is freed later: otherwise every call has its memory paged in again.
    torch.empty(7_500_000)
    return load_model(SHIPPED, device)[0]


def load_model(path: str | Path, device: str = "cpu") -> tuple[DistanceModel, dict[str, str]]:
    """The model and the metadata of a safetensors file."""
    weights, said = read_safetensors(path)
    try:
        model = DistanceModel(**json.loads(said["model"]))
        model.load_state_dict({name: value.float() for name, value in weights.items()})
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path}: expected a model of distances, got other weights") from error
    return model.to(device).eval().requires_grad_(False), said


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


def as_array(name: str, given: Any) -> Tensor:
    """Numbers of any kind, or booleans, as a tensor, which may share the caller's memory and is never written to."""
    if isinstance(given, Tensor):
        if given.is_meta or given.is_complex() or given.layout != torch.strided:
            where = " on meta" if given.is_meta else ""
            raise ValueError(f"{name}: expected a dense tensor of numbers, got {describe(given)}{where}")
        return given.detach()
    if isinstance(given, np.ma.MaskedArray):
        raise ValueError(f"{name}: expected an array without a mask, got a masked array")
    try:
        array = np.array(given)
    except (ValueError, TypeError, OverflowError, RuntimeError):  # the last for tensors with gradients
        raise ValueError(f"{name}: expected numbers in rows of one length, got {describe(given)}") from None
    if array.dtype.kind not in "fiub" or array.dtype.itemsize > 8:
        raise ValueError(f"{name}: expected numbers, got an array of dtype {array.dtype}")
    if array.dtype.kind == "u":
        array = array.astype(np.float64 if array.dtype.itemsize > 4 else np.int64)
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))


def is_large(x: Any, metric: str) -> bool:
    """Whether ``x`` is one pile too large to be seen at once; its rows are then checked, in blocks."""
    shape = tuple(x.shape) if isinstance(x, np.ndarray | Tensor) else ()
    if metric == "precomputed" and shape[-1:] > (MOST_PRECOMPUTED,):
        raise ValueError(f"x: expected at most {MOST_PRECOMPUTED} rows with precomputed distances, got {shape[-1]}")
    if metric == "precomputed" or len(shape) != 2 or shape[0] <= DIRECT or not shape[1]:
        return False
    if isinstance(x, Tensor):
        as_array("x", x)  # a sparse one has no slices
    check_scale(max(float(as_rows(x[i : i + BLOCK], metric, i).abs().max()) for i in range(0, shape[0], BLOCK)))
    return True


def as_vectors(given: Any, metric: str) -> Tensor:
    """``given`` as a tensor of 2 or 3 dimensions, checked; float32, or float64 for what has more digits."""
    x = as_rows(given, metric)
    for largest in x.abs().flatten(-2).amax(-1, keepdim=True).flatten().tolist():
        check_scale(largest)
    return as_distances(x) if metric == "precomputed" else x


def check_scale(largest: float) -> None:
    """Raise unless the ``largest`` number of a pile is 0 or has a square in float32."""
    if largest and not LEAST <= largest <= MOST:
        raise ValueError(f"x: expected numbers of {LEAST:g} to {MOST:g} in size, got up to {largest:g}")


def as_rows(given: Any, metric: str, first: int = 0) -> Tensor:
    """``as_vectors`` without the check of the scale, of the rows of a pile from ``first`` on."""
    x = as_array("x", given)
    if x.dtype == torch.bool:
        raise ValueError(f"x: expected numbers, got {describe(x)}")
    x = x.to(precise(x.dtype))
    if x.dim() not in (2, 3) or 0 in x.shape:
        what = "(N, N) or (B, N, N) distances" if metric == "precomputed" else "(N, D) vectors or (B, N, D) piles"
        raise ValueError(f"x: expected {what} with at least one row and column, got shape {tuple(x.shape)}")
    bad = ~x.isfinite().all(-1)
    if bool(bad.any()):
        raise ValueError(f"x: expected finite numbers, got NaN or infinity in {named_rows(bad, first)}")
    zero = (x == 0).all(-1)
    if metric == "cosine" and bool(zero.any()):
        raise ValueError(f"x: expected rows with a direction for cosine, got zeros in {named_rows(zero, first)}")
    return x


def named_rows(bad: Tensor, first: int = 0) -> str:
    """Some of the rows where ``bad`` (..., N) is True, counted from ``first``, as text."""
    rows = bad.nonzero() + first
    named = [", ".join(map(str, row)) for row in rows[:5].tolist()]
    more = f" and {len(rows) - 5} more" if len(rows) > 5 else ""
    return f"row{'s' if len(rows) > 1 else ''} {'; '.join(named) if bad.dim() > 1 else ', '.join(named)}{more}"


def as_distances(d: Tensor) -> Tensor:
    """``d`` (..., N, N), checked; what rounding has put below 0 or on the diagonal becomes 0."""
    if d.shape[-1] != d.shape[-2]:
        raise ValueError(f"x: expected square matrices of distances, got shape {tuple(d.shape)}")
    tolerance = 1e-4 * float(d.abs().max())
    if bool((d < -tolerance).any()):
        raise ValueError(f"x: expected distances of at least 0, got {float(d.min()):g}")
    if bool(((d - d.transpose(-1, -2)).abs() > tolerance).any()):
        raise ValueError("x: expected symmetric distances, got d[i, j] other than d[j, i]")
    if bool((d.diagonal(dim1=-2, dim2=-1) > tolerance).any()):
        raise ValueError("x: expected distances of 0 on the diagonal, got more")
    return d.clamp(min=0).masked_fill(torch.eye(d.shape[-1], dtype=torch.bool, device=d.device), 0)


def as_mask(name: str, given: Any, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """(B, N) = ``shape`` from None, indices of rows, or a mask (N,) or (B, N)."""
    batch, n = shape
    if given is None:
        return torch.zeros(batch, n, dtype=torch.bool, device=device)
    rows = as_array(name, given).to(device)
    if rows.dtype == torch.bool and tuple(rows.shape) in ((n,), (batch, n)):
        return rows.expand(batch, n)
    if rows.dim() != 1 or (rows.is_floating_point() and rows.numel()) or rows.dtype == torch.bool:
        raise ValueError(
            f"{name}: expected indices of rows or a mask ({n},) or ({batch}, {n}), got {tuple(rows.shape)}"
        )
    wrong = (rows < 0) | (rows >= n)
    if bool(wrong.any()):
        raise ValueError(f"{name}: expected rows from 0 to {n - 1}, got {int(rows[wrong][0])}")
    mask = torch.zeros(n, dtype=torch.bool, device=device)
    mask[rows.long()] = True
    return mask.expand(batch, n)


def as_weights(given: Any, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """(B, N) = ``shape`` from None, (N,) or (B, N)."""
    batch, n = shape
    if given is None:
        return torch.zeros(batch, n, device=device)
    weights = as_array("weights", given).to(device)
    if weights.dtype == torch.bool:
        raise ValueError(f"weights: expected numbers, got {describe(given)}")
    weights = weights.float()
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
    check_count("min_size", least, 0)
    if most is not None:
        check_count("max_size", most, 1)
    if size is not None:
        check_count("size", size, 1)
        if size < least:
            raise ValueError(f"size: expected at least min_size = {least}, got {size}")
        if most is not None and size > most:
            raise ValueError(f"size: expected at most max_size = {most}, got {size}")
        least = most = size
    most, lower, upper = most or room, "size" if size else "min_size", "size" if size else "max_size"
    if wanted > most:
        raise ValueError(f"{upper}: expected at least {wanted}, the required rows, got {most}")
    if least > room:
        raise ValueError(f"{lower}: expected at most {room}, the rows that may be picked, got {least}")
    if least > most:
        raise ValueError(f"min_size: expected at most max_size = {most}, got {least}")
    return least, min(most, room)


def distinct(values: Tensor, metric: str, required: Tensor, forbidden: Tensor, bonus: Tensor, least: int) -> Tensor:
    """(B, N) one of each group of equal rows: a required one, else the allowed one of most weight, else the first.

    Where fewer than ``least`` would be left to pick, further ones in the order of the rows.
    """
    kept = torch.ones_like(required)
    for b, rows in enumerate(values):
        if metric == "euclidean":
            group = torch.unique(rows, dim=0, return_inverse=True)[1]
        else:
            d = rows if metric == "precomputed" else distances(rows, metric)
            group = (d == 0).to(torch.uint8).argmax(-1)  # (N,) the first row at no distance
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
    """The batches concatenated, as long as the longest selection; for a single pile its row."""
    longest = max(1, *(int(part.lengths.max()) for part in parts))

    def columns(part: Selection) -> tuple[Tensor, ...]:
        rest = (0, longest - part.indices.shape[-1])
        assert part.step_log_prob is not None
        return part.lengths, part.log_prob, pad(part.indices, rest, value=-1), pad(part.step_log_prob, rest)

    lengths, log_prob, indices, steps = map(torch.cat, zip(*map(columns, parts), strict=True))
    found = Selection(indices, lengths, log_prob, parts[0].num_candidates, step_log_prob=steps)
    return found.map(lambda part: part[0]) if single else found

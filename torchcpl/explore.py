"""An interactive page: potentials, items and the decoder in one HTML file, without server or network.

The page holds the potentials of one row and decodes them itself, in plain JavaScript, by the rules of
:func:`torchcpl.greedy`: one can step through the picks, force and forbid candidates, and see the rest
re-decoded. ``explore.html`` is the template; this module fills it.
"""

from __future__ import annotations

import base64
import html
import json
import mimetypes
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from torchcpl.checks import check_choice, check_count, describe
from torchcpl.constraints import Constraint, Forbid, Require, Rules
from torchcpl.decoding.greedy import greedy
from torchcpl.files import data_url, write_atomic
from torchcpl.hypotheses import hypotheses
from torchcpl.interactions import Contextual, Coverage, Dense, DenseCoverage, LowRank, Recent
from torchcpl.metrics import path_distances
from torchcpl.potentials import Potentials, check_potentials

Array = NDArray[Any]
ACTIVATIONS = (nn.GELU, nn.ReLU, nn.SiLU)
KINDS = (Dense, DenseCoverage, LowRank, Contextual, Coverage, Recent)
ROOM = 400_000  # bytes for the numbers of an interaction; beyond it they are rounded to 16 or 8 bits
PIXELS = 250_000  # pixels for all thumbnails together
SIDE = 96  # of the largest thumbnail
ANSWERS = 6  # as many as the page lists


@dataclass(frozen=True)
class Explorer:
    """A page made by :func:`explore`. A notebook shows it inline."""

    html: str = field(repr=False)

    def save(self, path: str | Path) -> None:
        """Write the page, atomically."""
        write_atomic(path, self.html.encode())

    def _repr_html_(self) -> str:
        page = html.escape(self.html, quote=True)
        return f'<iframe srcdoc="{page}" style="width:100%;height:760px;border:0" title="Explorer"></iframe>'


@torch.no_grad()
def explore(
    pot: Potentials,
    path: str | Path | None = None,
    items: Any = None,
    *,
    row: int = 0,
    labels: Sequence[str] | None = None,
    background: Any = None,
    connect: bool = False,
    title: str = "Contextual Plackett–Luce",
    max_len: int | None = None,
    min_len: int = 0,
    stop_bias: float = 0.0,
    stop_threshold: float | None = None,
    sweeps: int = 0,
    constraints: Sequence[Constraint] = (),
) -> Explorer:
    """One row of ``pot`` as a page to explore; written to ``path`` if one is given.

    ``items`` says what the N candidates look like: strings; images, as arrays (H, W) or (H, W, 3) of uint8 or of
    floats in [0, 1], or as ``pathlib.Path`` of files; or an array (N, 2) of points, drawn on ``background``, an image
    in whose pixels they are given, and with ``connect`` joined in the order picked. ``labels`` are N captions.

    The other options are those of :func:`torchcpl.greedy` and what the page starts with, and how many ``sweeps`` of
    :func:`torchcpl.refine` follow; of the constraints it knows ``Forbid`` and ``Require``.

    >>> pot = Potentials(torch.zeros(1, 2), torch.zeros(1), Dense(torch.zeros(1, 2, 2)))
    >>> page = explore(pot, items=["one", "two"])
    """
    check_potentials(pot)
    check_count("row", row, 0)
    if row >= len(pot):
        raise ValueError(f"row: expected one of the {len(pot)} rows of pot, got {row}")
    check_choice("connect", connect, (True, False))
    check_count("sweeps", sweeps, 0)
    if not isinstance(title, str):
        raise ValueError(f"title: expected a string, got {describe(title)}")
    mask = pot.mask[row].tolist()
    if labels is not None:
        several = isinstance(labels, list | tuple) and len(labels) == len(mask)
        if not several or not all(isinstance(label, str) for label in labels):
            raise ValueError(f"labels: expected {len(mask)} strings, one a candidate, got {describe(labels)}")
    options = {"max_len": max_len, "min_len": min_len, "stop_threshold": stop_threshold}
    shown = _items(items, background, mask)
    data = {
        "title": title,
        **_process(pot, row, stop_bias, constraints, options, shown if connect else None),
        "connect": connect,
        "sweeps": sweeps,
        "items": shown,
        "labels": labels,
    }
    page = page_of(data)
    if path is not None:
        page.save(path)
    return page


def page_of(data: dict[str, Any]) -> Explorer:
    """The page of ``data``, made by `explore` and stored in the element ``data`` of every page."""
    template = Path(__file__).with_name("explore.html").read_text(encoding="utf-8")
    # "<" is escaped: no text of an item can end the element that holds the data.
    text = json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    return Explorer(template.replace("<!--title-->", html.escape(data["title"])).replace("/*data*/", text))


def _process(
    pot: Potentials,
    row: int,
    stop_bias: float,
    constraints: Sequence[Constraint],
    options: dict[str, Any],
    path: dict[str, Any] | None,
) -> dict[str, Any]:
    """The potentials of one row and the rules of its decoding, as the page reads them; the best answers of a path."""
    rules = Rules(pot, options["max_len"], options["min_len"], stop_bias, constraints)
    if not all(isinstance(constraint, Forbid | Require) for constraint in constraints):
        raise ValueError(f"constraints: expected Forbid and Require, which the page knows, got {describe(constraints)}")
    one, rules = pot[[row]], rules.rows(torch.tensor([row], device=pot.unary.device))
    one = replace(one, stop=rules.biased(one.stop))  # the page has no bias
    stored, bits = _rounded(one)
    none = torch.zeros_like(one.mask)
    forced, before = (none if part is None else part for part in (rules.required, rules.first))
    first = rules.first is not None and torch.equal(before, forced)
    if bool(before.any()) and not first:
        raise ValueError("constraints: expected all required candidates first, or none, for the page has one rule")
    marks: list[Constraint] = [Forbid(~rules.available), Require(forced, first)]
    picks, again = (greedy(p, constraints=marks, **options).tolist() for p in (one, stored))
    return {
        **_potentials(stored, bits),
        **options,
        "max_len": rules.max_len,
        "forced": forced[0].nonzero().flatten().tolist(),
        "first": first,
        "forbidden": (one.mask & ~rules.available)[0].nonzero().flatten().tolist(),
        "rounded": bits and {"bits": bits, "same": picks == again},
        "answers": None if path is None else _paths(stored, path, rules, marks),
    }


def _paths(pot: Potentials, items: dict[str, Any], rules: Rules, marks: Sequence[Constraint]) -> dict[str, Any]:
    """The best answers; those within 1/16 of the image's size count as the same."""
    if items["type"] != "point":
        raise ValueError(f"items: expected points ({pot.num_candidates}, 2) to connect, got {items['type']}s")
    points = torch.tensor(items["values"], dtype=torch.float64).view(-1, 2)
    there = points[pot.mask[0].cpu()]
    extent = max(items.get("size", (1.12 * (there.amax(0) - there.amin(0))).tolist() if len(there) else [1]))
    if not rules.max_len:
        return {"radius": extent / 16, "found": [{"picks": [], "mass": 1.0}]}
    found = hypotheses(
        pot, ANSWERS, same=partial(_apart, points.to(pot.unary.device)), radius=extent / 16,
        max_len=rules.max_len, min_len=rules.min_len, constraints=marks,
    )  # fmt: skip
    answers = zip(found.tolist()[0], found.log_prob[0].exp().tolist(), strict=True)
    return {"radius": extent / 16, "found": [{"picks": picks, "mass": mass} for picks, mass in answers if mass > 0]}


def _apart(points: Tensor, indices: Tensor) -> Tensor:
    """(B, K, K) mean distance from the points of one answer (B, K, T) to the nearest of the other, both ways."""
    at, lengths = points[indices.clamp(min=0)], (indices >= 0).sum(-1)  # (B, K, T, 2), (B, K)
    pairs = zip(at.split(1, 1), lengths.split(1, 1), strict=True)  # one answer at a time: (B, K, K, T, T) is large
    return 2 * torch.cat([path_distances(*one, at, lengths) for one in pairs], 1)


def _rounded(pot: Potentials) -> tuple[Potentials, int | None]:
    """The potentials as they will be stored, and to how many bits the interaction is rounded; None for not at all."""
    tables = pot.interaction.tensors
    count = sum(table.numel() for table in tables.values())
    small = count * tables[next(iter(tables))].element_size() <= ROOM
    if small or not all(table.isfinite().all() for table in tables.values()):  # infinities cannot be quantised
        return pot, None
    bits = 16 if 2 * count <= ROOM else 8
    rounded = {name: torch.mul(*_whole(table, bits)).to(table.dtype) for name, table in tables.items()}
    return replace(pot, interaction=replace(pot.interaction, **rounded)), bits  # type: ignore[type-var]


def _whole(table: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """``table`` (..., h) quantised to integers of so many bits, with one scale per row (..., 1)."""
    most = 2 ** (bits - 1) - 1
    table = table.float()
    scale = table.abs().amax(-1, keepdim=True).clamp(min=1e-30) / most
    return (table / scale).round().clamp(-most, most), scale


def _potentials(pot: Potentials, bits: int | None) -> dict[str, Any]:
    """The potentials of one row as the page reads them."""
    interaction = pot.interaction
    if type(interaction) not in KINDS:
        known = ", ".join(cls.__name__ for cls in KINDS)
        raise ValueError(f"pot.interaction: expected one of {known}, got {type(interaction).__name__}")
    return {
        "kind": type(interaction).__name__.lower(),
        "depends_on": interaction.depends_on,
        "n": pot.num_candidates,
        "unary": _packed(pot.unary[0]),
        "stop": _packed(pot.stop),
        "mask": _packed(pot.mask[0].to(torch.uint8)),
        "parts": {name: _packed(table[0], bits) for name, table in interaction.tensors.items()},
        "network": _network(interaction.network, interaction.values) if isinstance(interaction, Contextual) else None,
    }


def _network(network: Any, context: Tensor) -> dict[str, Any]:
    """The weights of ``s + net(norm([s, |S|/10]))``; a last channel of the context may be a bias by number of picks."""
    owner = getattr(network, "__self__", network)  # a module, or a method of one
    norm, net, bias = (getattr(owner, name, None) for name in ("norm", "net", "stop_bias"))
    if isinstance(norm, nn.LayerNorm) and isinstance(net, nn.Sequential) and isinstance(net[1], ACTIVATIONS):
        count = torch.arange(context.shape[1], device=context.device).unsqueeze(0)  # (1, K)
        inside = context if bias is None else context[..., :-1]
        expected = inside + net(norm(torch.cat([inside, count.unsqueeze(-1).to(inside.dtype) / 10], -1)))
        if bias is not None:
            expected = torch.cat([expected, bias[count.clamp(max=len(bias) - 1)].unsqueeze(-1)], -1)
        if torch.allclose(expected, network(context, count.to(context.dtype)), atol=1e-5):
            return {
                "activation": type(net[1]).__name__.lower(),
                "eps": norm.eps,
                "norm": [_packed(norm.weight), _packed(norm.bias)],
                "layers": [[_packed(part) for part in layer.parameters()] for layer in (net[0], net[-1])],
                "stop_bias": None if bias is None else _packed(bias),
            }
    raise ValueError(
        f"pot.interaction.network: expected a head's ContextNetwork, in eval mode, got {describe(network)}"
    )


def _packed(table: Tensor, bits: int | None = None) -> dict[str, Any]:
    """Numbers as the page reads them: little-endian bytes in base64, rows of integers with a scale each."""
    packed: dict[str, Any] = {"shape": list(table.shape)}
    if bits and table.dim():
        table, scale = _whole(table, bits)
        packed["scale"] = _packed(scale)
        table = table.to(torch.int8 if bits == 8 else torch.int16)
    elif table.is_floating_point() and table.dtype != torch.float64:
        table = table.float()
    array = table.detach().cpu().numpy()
    packed["type"] = array.dtype.kind + str(array.dtype.itemsize)
    packed["data"] = base64.b64encode(array.astype(array.dtype.newbyteorder("<")).tobytes()).decode()
    return packed


def _array(name: str, given: Any) -> Any:
    """A tensor as an array; anything else as it came."""
    if not isinstance(given, Tensor):
        return given
    try:
        return given.detach().cpu().numpy()
    except (TypeError, RuntimeError):  # sparse, of a dtype that NumPy has not, without data
        raise ValueError(f"{name}: expected numbers that NumPy can hold, got {describe(given)}") from None


def _items(items: Any, background: Any, mask: list[bool]) -> dict[str, Any]:
    """What the candidates look like: their type and, for each, a text, the address of an image, or a point."""
    count, items = len(mask), _array("items", items)
    points = isinstance(items, np.ndarray) and items.shape == (count, 2)
    if background is not None and not points:
        raise ValueError(f"items: expected points ({count}, 2) to go on the background, got {describe(items)}")
    if items is None:
        return {"type": "text", "values": [f"Candidate {i}" for i in range(count)]}
    several = isinstance(items, list | tuple) or (isinstance(items, np.ndarray) and items.ndim)
    if not several or len(items) != count:
        raise ValueError(f"items: expected {count}, one a candidate, got {describe(items)}")
    if points:
        if items.dtype.kind not in "fiu" or not np.isfinite(items).all():
            raise ValueError(f"items: expected finite points, got {describe(items)}")
        found: dict[str, Any] = {"type": "point", "values": np.round(items.astype(float), 3).tolist()}
        if background is not None:
            picture = _pixels("background", background)
            found |= {"background": _png(picture), "size": [picture.shape[1], picture.shape[0]]}
        return found
    if all(isinstance(item, str) for item in items):
        return {"type": "text", "values": [str(item) for item in items]}
    side = max(16, min(SIDE, int((PIXELS / max(1, sum(mask))) ** 0.5)))
    images = [_thumbnail(item, side) if real else "" for item, real in zip(items, mask, strict=True)]
    return {"type": "image", "values": images}


def _thumbnail(item: Any, side: int) -> str:
    """The address (data:…) of a small image."""
    if isinstance(item, Path):
        mime = mimetypes.guess_type(item.name)[0] or ""
        if not mime.startswith("image/"):
            raise ValueError(f"items: expected the file of an image, got {item}")
        return data_url(mime, item.read_bytes())
    pixels = _pixels("items", item)
    step = -(-max(pixels.shape[:2]) // side)
    pixels = np.pad(pixels, [(0, -extent % step) for extent in pixels.shape[:2]] + [(0, 0)], mode="edge")
    tiles = pixels.reshape(pixels.shape[0] // step, step, pixels.shape[1] // step, step, 3)
    return _png(tiles.mean((1, 3)).astype(np.uint8))


def _pixels(name: str, image: Any) -> Array:
    """(H, W, 3) uint8."""
    image = _array(name, image)
    shape = image.shape if isinstance(image, np.ndarray) else ()
    if len(shape) < 2 or 0 in shape or shape[2:] not in ((), (3,)):
        raise ValueError(f"{name}: expected an image (H, W) or (H, W, 3), got {describe(image)}")
    if image.dtype != np.uint8:
        if image.dtype.kind != "f" or not (np.isfinite(image).all() and image.min() >= 0 and image.max() <= 1):
            raise ValueError(f"{name}: expected uint8, or floats in [0, 1], got {image.dtype} outside of it")
        image = (image * 255).round().astype(np.uint8)
    return image if image.ndim == 3 else np.repeat(image[..., None], 3, axis=2)


def _png(pixels: Array) -> str:
    """(H, W, 3) uint8 as the address of a PNG."""
    height, width, _ = pixels.shape
    lines = np.pad(pixels.reshape(height, -1), ((0, 0), (1, 0)))  # a filter byte, 0, before every line

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(lines.tobytes(), 9)), chunk(b"IEND", b"")
    return data_url("image/png", b"\x89PNG\r\n\x1a\n" + b"".join(parts))

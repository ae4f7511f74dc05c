"""An encoder of the pairwise distances in a bag: for unseen vectors of any width, in any metric.

Groups look alike to such a model, so "the same group" has to be read off the pairs. A pair's features are its distance
(scaled globally, locally, and as a rank), its cosine under soft spectral projectors of the centred Gram matrix, and
where random walks over near neighbours lead: log(Pᵗ_ij/π_j) for several kernels and t. All are unchanged when rows are
permuted and when the vectors are rotated, shifted or scaled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchcpl.interactions import DenseCoverage
from torchcpl.interactions.base import without_autocast
from torchcpl.potentials import Potentials

WALKS = (2, 4, 8, 32)  # lengths t of the random walks
RIDGES = (0.2, 0.05)  # of the spectral projectors, relative to the Gram matrix's norm
NEIGHBOURS = (1, 2, 3, 5, 8, 12, 20, 40)  # whose distances are features of a node
KERNELS = 4
EDGE_FEATURES = 7 + KERNELS * len(WALKS)  # without those of the ridges, one each
NODE_FEATURES = len(NEIGHBOURS) + 2 + KERNELS * (1 + 2 * len(WALKS)) + 1  # without those of the ridges, two each
TINY = 1e-6
CHUNK = 6400  # pairs
SAME = 1e-6  # rows of length one that differ by less have one direction, but for rounding


def distances(x: Tensor, metric: str = "euclidean") -> Tensor:
    """(..., N, D) to (..., N, N) in float32; symmetric, zero on the diagonal.

    ``metric``: ``euclidean | cosine``, or ``precomputed`` where ``x`` is the distances.
    """
    if metric == "precomputed":
        return x.float()
    x = x.double()  # float32 products would cancel
    if metric == "cosine":
        x = F.normalize(x, dim=-1)
    x = x - x.mean(-2, keepdim=True)
    product = x @ x.transpose(-1, -2)
    square = product.diagonal(dim1=-2, dim2=-1)
    d2 = square.unsqueeze(-1) + square.unsqueeze(-2) - product - product.transpose(-1, -2)
    d2.diagonal(dim1=-2, dim2=-1).zero_()
    d2 = d2.masked_fill(d2 < SAME**2, 0) if metric == "cosine" else d2.clamp(min=0)
    return d2.sqrt().float()


@torch.no_grad()
def distance_features(d: Tensor, mask: Tensor, ridges: tuple[float, ...] = RIDGES) -> tuple[Tensor, Tensor]:
    """Distances (B, N, N) and ``mask`` (B, N) to features of nodes (B, N, ·) and of the pairs i < j (B, ·, P).

    Without ``ridges`` there are no spectral projectors, whose matrices are inverted in float64.
    """
    n, pairs = mask.shape[1], Pairs(mask.shape[1], d.device)
    with without_autocast(d):
        both = mask.unsqueeze(1) & mask.unsqueeze(2)  # (B, N, N)
        off = both & ~torch.eye(n, dtype=torch.bool, device=d.device)
        size = mask.sum(-1).clamp(min=1).float().view(-1, 1, 1)  # (B, 1, 1)
        count = (size * (size - 1)).clamp(min=1)
        d = d.float().masked_fill(~off, 0)
        d = d / (d.square().sum((1, 2), keepdim=True) / count).sqrt().clamp(min=1e-30)
        mean = d.sum((1, 2), keepdim=True) / count
        spread = (((d - mean).square() * off).sum((1, 2), keepdim=True) / count).sqrt().clamp(min=1e-3)
        near, rank = _neighbours(d.masked_fill(~off, torch.inf))
        kernels, local, mutual = _kernels(d, near, rank, off, size)
        walks, back, degree, trace = _walks(kernels, mask, pairs)  # (B, K·t, P), (B, K·t, N), (B, K, N), (B, K·t)
        gram = _gram(d, both, size)  # (B, N, N) in float64
        projected = _projections(gram, both, ridges)  # (B, R, N, N)

        edge = [
            (d - mean) / spread,
            (d + 0.01).log(),
            local.log(),
            (mutual + 1).log() - 2,
            torch.minimum(rank, rank.transpose(1, 2)) / size,
            torch.maximum(rank, rank.transpose(1, 2)) / size,
            _cosine(gram.float()),
        ]
        parts = [pairs.upper(torch.stack(edge, 1)), walks, pairs.upper(_cosine(projected))]
        edges = torch.cat(parts, 1).clamp_(-8, 8)  # (B, E, P)

        chosen = torch.stack([near[..., min(k, n) - 1] for k in NEIGHBOURS], -1)  # (B, N, neighbours)
        chosen = (chosen.where(chosen.isfinite(), d.amax(-1, keepdim=True)) + 0.01).log()
        leverage = projected.diagonal(dim1=-2, dim2=-1).transpose(1, 2)  # (B, N, R)
        whole = [trace, (leverage * mask.unsqueeze(-1)).sum(1).add(1).log(), size.flatten(1).log()]
        shared = torch.cat(whole, 1).unsqueeze(1).expand(-1, n, -1) / 2
        nodes = torch.cat(
            [
                chosen,
                (d.sum(-1, keepdim=True) / (size - 1).clamp(min=1)),
                ((d * off).square().sum(-1, keepdim=True) / (size - 1).clamp(min=1)).sqrt(),
                degree.transpose(1, 2),
                back.transpose(1, 2),
                (leverage * size + 0.01).log() / 3,
                shared,
            ],
            -1,
        )
    return nodes.masked_fill(~mask.unsqueeze(-1), 0), edges


def _neighbours(d: Tensor) -> tuple[Tensor, Tensor]:
    """Sorted distances, and ranks: how many items are nearer, 0 at ∞; from (B, N, N), ∞ to itself and to padding."""
    if d.is_cuda or torch.compiler.is_compiling():
        near, order = d.sort(-1)
    else:  # NumPy's takes a quarter of the time
        order = torch.from_numpy(d.numpy().argsort(-1))
        near = d.gather(-1, order)
    place = torch.arange(d.shape[-1], device=d.device).expand_as(order)
    fresh = F.pad(near[..., 1:] != near[..., :-1], (1, 0))
    first = place.where(fresh, 0).cummax(-1).values  # equal distances, equal ranks
    return near, torch.zeros_like(d).scatter_(-1, order, first.to(d.dtype)).masked_fill_(d == torch.inf, 0)


def _kernels(d: Tensor, near: Tensor, rank: Tensor, off: Tensor, size: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Four affinities (B, K, N, N) with contrast at any scale; locally scaled distance and mutual rank (B, N, N)."""

    def radius(k: int) -> Tensor:  # (B, N, 1) distance to the k-th neighbour, or the farthest there is
        found = near[..., : min(k, near.shape[-1])]
        return found.masked_fill(found == torch.inf, 0).amax(-1, keepdim=True).clamp(min=TINY)

    def relative(k: int) -> Tensor:  # exp −(d_ij − d_i1)/(mean of the k nearest − d_i1), the same for i and j
        least = near[..., :1].masked_fill(near[..., :1] == torch.inf, 0)
        found = near[..., : min(k, near.shape[-1])]
        real = found < torch.inf
        scale = found.masked_fill(~real, 0).sum(-1, keepdim=True) / real.sum(-1, keepdim=True).clamp(min=1) - least
        one = torch.exp(-(d - least).clamp(min=0) / (scale + 0.02 * least + TINY))
        return (one + one.transpose(1, 2)) / 2

    five = radius(5)
    local = (d / (five * five.transpose(1, 2)).sqrt()).clamp(1e-3, 1e3)
    mutual = ((rank + 1) * (rank.transpose(1, 2) + 1)).sqrt()
    found = torch.stack([torch.exp(-local.square()), relative(5), relative(15), torch.exp(-mutual / 4)], 1)
    return (found + 1e-7).masked_fill(~off.unsqueeze(1), 0), local, mutual


def _walks(
    kernels: Tensor, mask: Tensor, pairs: Pairs, lengths: tuple[int, ...] = WALKS
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log(Pᵗ_ij/π_j)/3, symmetric, of the pairs (B, K·t, P) and on the diagonal (B, K·t, N); log degree over its mean
    (B, K, N); log trace of Pᵗ (B, K·t).
    """
    degree = kernels.sum(-1)  # (B, K, N)
    safe = degree.clamp(min=1e-12)
    root = safe.rsqrt().masked_fill(~mask.unsqueeze(1), 0)
    power = kernels * root.unsqueeze(-1) * root.unsqueeze(-2)  # D^{−½} K D^{−½}: the powers stay symmetric
    total = degree.sum(-1, keepdim=True).clamp(min=1e-12)
    back = (total / safe).sqrt()  # 1/√π
    scale = pairs.upper(back.unsqueeze(-1) * back.unsqueeze(-2))  # (B, K, P)
    found, t = [], 1
    while t < max(lengths):
        power, t = power @ power, 2 * t
        if t in lengths:
            own = power.diagonal(dim1=-2, dim2=-1)  # (B, K, N)
            found.append((pairs.upper(power) * scale, own * back.square(), own.sum(-1)))
    walks, own, traces = (torch.stack(column, 2).flatten(1, 2) for column in zip(*found, strict=True))
    mean = total / mask.sum(-1).clamp(min=1).view(-1, 1, 1)
    degree = (safe / mean.clamp(min=1e-12)).log().clamp(-6, 6)
    return walks.add_(3e-4).log().div_(3), (own + 3e-4).log() / 3, degree, (traces + 1e-3).log()


def _gram(d: Tensor, both: Tensor, size: Tensor) -> Tensor:
    """The centred Gram matrix (B, N, N) in float64; ``both`` (B, N, N) is True where both items are real."""
    square, size = d.double().square(), size.double()
    row = square.sum(-1, keepdim=True) / size
    gram = -0.5 * (square - row - row.transpose(1, 2) + row.sum(1, keepdim=True) / size)
    return gram * both


def _projections(gram: Tensor, both: Tensor, ridges: tuple[float, ...]) -> Tensor:
    """The soft projectors G²(G² + ρ²I)⁻¹ (B, R, N, N) of the Gram matrix G.

    ρ is ``ridges`` of G's norm: all directions of more variance count alike, those of less not at all. G² has no
    negative eigenvalues, whatever the distances.
    """
    if not ridges:
        return gram.float().unsqueeze(1)[:, :0]
    norm = gram.square().sum((1, 2), keepdim=True).sqrt().clamp(min=1e-12)
    second = (gram / norm) @ (gram / norm)  # (B, N, N)
    # Filled there, not copied there: a CUDA graph cannot copy from the host.
    ridge = torch.stack([torch.full((1, 1), one, device=gram.device) for one in ridges]).double().square().unsqueeze(0)
    identity = torch.eye(gram.shape[-1], device=gram.device, dtype=torch.float64)
    factor, _ = torch.linalg.cholesky_ex(second.unsqueeze(1) + ridge * identity)
    if gram.is_cuda:  # where a CUDA graph may be captured
        half = torch.linalg.solve_triangular(factor, identity.expand_as(factor), upper=False)
        inverse = half.transpose(-1, -2) @ half
    else:
        inverse = torch.cholesky_inverse(factor)
    return (identity - ridge * inverse).float() * both.unsqueeze(1)


def _cosine(gram: Tensor) -> Tensor:
    """Inner products (..., N, N) over the lengths."""
    length = gram.diagonal(dim1=-2, dim2=-1).clamp(min=1e-9).rsqrt()
    return gram * length.unsqueeze(-1) * length.unsqueeze(-2)


class _Layer(nn.Module):
    """Pre-norm attention with a bias from the pairs, and a feed-forward block."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.ffn = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, h: Tensor, bias: Tensor) -> Tensor:
        batch, n, dim = h.shape
        q, k, v = self.qkv(self.norm(h)).view(batch, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)  # (B, H, N, ·)
        mixed = F.scaled_dot_product_attention(q, k, v, bias.to(q.dtype))
        h = h + self.out(mixed.transpose(1, 2).reshape(batch, n, dim))
        return h + self.ffn(self.norm2(h))


class _EdgeUpdate(nn.Module):
    """Updates pairs by their two nodes and by random walks over kernels that are computed from the pairs."""

    lengths = (2, 4, 8)
    kernels = 2

    def __init__(self, dim: int, edge: int) -> None:
        super().__init__()
        self.kernel = nn.Linear(edge, self.kernels)
        self.ends = nn.Linear(dim, edge)
        self.own = nn.Linear(edge, edge, bias=False)
        self.walks = nn.Linear(self.kernels * len(self.lengths), edge, bias=False)
        self.out = nn.Linear(edge, edge)

    def forward(self, h: Tensor, edges: list[Tensor], mask: Tensor, pairs: Pairs) -> list[Tensor]:
        """``edges`` in parts (B, C, part), see `Pairs.parts`."""
        normed = [_normed(part) for part in edges]
        with without_autocast(h):
            walks = self._walked(torch.cat([_mixed(self.kernel, part.float()) for part in normed], 2), mask, pairs)
        ends = self.ends(h).mT
        found = []
        for part, e, one in zip(pairs.parts(h), edges, normed, strict=True):
            hidden = _mixed(self.own, one, pairs.both_ends(ends, part))
            hidden = _mixed(self.walks, walks[..., part], hidden)
            found.append(e + _mixed(self.out, hidden.relu_()))
        return found

    def _walked(self, logits: Tensor, mask: Tensor, pairs: Pairs) -> Tensor:
        """Logits (B, K, P) of the kernels to log-probabilities of walks over them (B, K·t, P)."""
        strength = logits.sigmoid().square() + 1e-7  # so that every walk leads somewhere
        strength = pairs.square(strength).masked_fill(~(mask.unsqueeze(1) & mask.unsqueeze(2)).unsqueeze(1), 0)
        return _walks(strength, mask, pairs, self.lengths)[0]


def _mixed(layer: nn.Module, x: Tensor, beside: Tensor | None = None) -> Tensor:
    """The linear layer over the channels of (B, C, P), added to ``beside`` in place of a bias."""
    assert isinstance(layer, nn.Linear)
    return torch.baddbmm(layer.bias.unsqueeze(-1) if beside is None else beside, layer.weight.expand(len(x), -1, -1), x)


def _normed(x: Tensor) -> Tensor:
    """The channels of (B, C, P) over their root mean square."""
    x = x.float()
    return x * (x.square().mean(1, keepdim=True) + 1e-5).rsqrt()


class Pairs:
    """The P = n(n−1)/2 pairs i < j, between matrices and lists."""

    def __init__(self, n: int, device: torch.device) -> None:
        self.n = n
        self.ends = torch.triu_indices(n, n, 1, device=device)  # (2, P)
        self.flat = self.ends[0] * n + self.ends[1]
        number = torch.arange(1, len(self.flat) + 1, device=device)
        place = torch.zeros(n * n, dtype=torch.long, device=device).index_copy_(0, self.flat, number).view(n, n)
        self.place = (place + place.T).flatten()  # one more than the pair's number, 0: the diagonal

    def upper(self, matrices: Tensor) -> Tensor:
        """(B, C, N, N) to (B, C, P)."""
        return _Linear.apply(matrices, self._to_list, lambda grad: self._to_matrix(grad).triu())

    def square(self, edges: Tensor) -> Tensor:
        """(B, C, P) to symmetric (B, C, N, N), zero on the diagonal."""
        return _Linear.apply(edges, self._to_matrix, lambda grad: self._to_list(grad + grad.mT))

    def both_ends(self, nodes: Tensor, part: slice = slice(None)) -> Tensor:
        """(B, C, N) to (B, C, P), the sum over the two ends; of some of the pairs where no gradient is needed."""
        first, second = self.ends[:, part]
        return _Linear.apply(
            nodes,
            lambda x: x.index_select(2, first).add_(x.index_select(2, second)),
            lambda grad: self._to_matrix(grad).sum(-1),
        )

    def _to_list(self, matrices: Tensor) -> Tensor:
        return matrices.flatten(0, 1).flatten(1).index_select(1, self.flat).unflatten(0, matrices.shape[:2])

    def _to_matrix(self, edges: Tensor) -> Tensor:
        full = F.pad(edges.flatten(0, 1), (1, 0)).index_select(1, self.place)  # (B·C, N·N)
        return full.view(*edges.shape[:2], self.n, self.n)

    def parts(self, like: Tensor) -> list[slice]:
        """Slices of the pairs: all in one with a gradient or on CUDA, else small enough for a CPU's cache."""
        step = len(self.flat) if torch.is_grad_enabled() or like.is_cuda else CHUNK // len(like)
        return [slice(i, i + max(1, step)) for i in range(0, max(1, len(self.flat)), max(1, step))]


class _Linear(torch.autograd.Function):
    """A linear map with a given adjoint: those of `Pairs` are gathers too, where autograd would scatter atomically."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], adjoint: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.adjoint = adjoint
        return there(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.adjoint(grads[0]), None, None


class DistanceBias(nn.Module):
    """Distances as inputs of an encoder over vectors: a term to add to each node, ``outputs`` numbers for each pair.

    Distances (B, N, N) and ``mask`` (B, N) to (B, N, dim) and symmetric (B, outputs, N, N), zero on the diagonal.
    """

    def __init__(self, dim: int, outputs: int, hidden: int = 64) -> None:
        super().__init__()
        self.node = nn.Sequential(nn.Linear(NODE_FEATURES, dim), nn.GELU(), nn.Linear(dim, dim))
        self.edge = nn.Sequential(nn.Linear(EDGE_FEATURES, hidden), nn.ReLU(), nn.Linear(hidden, outputs))

    def forward(self, d: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        nodes, edges = distance_features(d, mask, ridges=())
        return self.node(nodes), Pairs(mask.shape[1], mask.device).square(self.edge(edges.mT).mT)


class DistanceModel(nn.Module):
    """Potentials of bags of which only the distances are known.

    Nodes attend to each other with a bias from their pairs; after every second layer the pairs are updated. θ comes
    from the nodes; how far pick i covers candidate j comes from their pair and a term of each. The logit of the stop
    starts at −slope·k + offset, where k, the number of groups, is predicted from all nodes; every pick adds its slope
    and a term of its own, together at least 0.

    ``calibration`` corrects overconfidence on unseen kinds of data and is fitted on such data after training: a
    temperature and a bias of the stop.
    """

    precise = True  # stays in float32: rounding of scores changes picks

    def __init__(self, dim: int = 128, layers: int = 4, heads: int = 4, edge: int = 32) -> None:
        super().__init__()
        self.widths = {"dim": dim, "layers": layers, "heads": heads, "edge": edge}
        blocks = layers // 2
        self.heads = heads
        self.node = nn.Sequential(nn.Linear(NODE_FEATURES + 2 * len(RIDGES), dim), nn.GELU(), nn.Linear(dim, dim))
        self.edge = nn.Sequential(nn.Linear(EDGE_FEATURES + len(RIDGES), edge), nn.ReLU(), nn.Linear(edge, edge))
        self.bias = nn.ModuleList(nn.Linear(edge, 2 * heads) for _ in range(blocks))
        self.layers = nn.ModuleList(_Layer(dim, heads) for _ in range(2 * blocks))
        self.updates = nn.ModuleList(_EdgeUpdate(dim, edge) for _ in range(blocks))
        self.norm = nn.LayerNorm(dim)
        self.ends = nn.Linear(dim, 4)  # θ, the stop's gain, breadth of a pick, resistance to being covered
        self.same = nn.Linear(edge, 1)  # the logit of being of one group
        self.cover = nn.Parameter(torch.tensor([2.0, 0.0]))  # its scale and offset in c
        self.count = nn.Sequential(nn.Linear(2 * dim, dim), nn.GELU(), nn.Linear(dim, 3))  # log k, slope, offset
        self.calibration = nn.Buffer(torch.tensor([1.0, 0.0]))  # temperature, bias
        nn.init.zeros_(self.ends.weight)
        nn.init.zeros_(self.ends.bias)

    def forward(self, d: Tensor, mask: Tensor | None = None) -> Potentials:
        """Distances ``d`` (B, N, N), ``mask`` (B, N) True = real."""
        if mask is None:
            mask = torch.ones(d.shape[:2], dtype=torch.bool, device=d.device)
        return self.judge(*distance_features(d, mask), mask)[0]

    def judge(self, nodes: Tensor, edges: Tensor, mask: Tensor) -> tuple[Potentials, list[Tensor], Tensor]:
        """Potentials, after every update of the pairs the logits (B, P) of being of one group, and log k (B,)."""
        pairs = Pairs(mask.shape[1], mask.device)
        h, same = self._layers(self.node(nodes).float(), edges, mask, pairs)
        h = self.norm(h)
        with without_autocast(h):
            h = h.float()
            theta, gain, breadth, resistance = self.ends(h).unbind(-1)  # (B, N) each
            theta = theta - mask.sum(-1, keepdim=True).clamp(min=1).log()  # normalised by the size of the pile
            cover = pairs.square((self.cover[0] * same[-1] + self.cover[1]).unsqueeze(1)).squeeze(1)  # (B, N, N)
            cover = cover + breadth.unsqueeze(1) - resistance.unsqueeze(2)  # [j, i]
            real = mask.unsqueeze(-1)
            pooled = [(h * real).sum(1) / real.sum(1).clamp(min=1), h.masked_fill(~real, -9).amax(1)]
            log_k, slope, offset = self.count(torch.cat(pooled, -1)).unbind(-1)  # (B,) each
            log_k = (log_k + 1.5).clamp(-0.5, 6)
            slope = F.softplus(slope)
            temperature, bias = self.calibration
            stop = (offset - slope * log_k.exp()) / temperature + bias
            gain = F.softplus(gain + slope.unsqueeze(-1), beta=10)  # or many picks would rule out the stop
        return Potentials(theta, stop, DenseCoverage(cover, gain / temperature), mask), same, log_k

    def _layers(self, h: Tensor, edges: Tensor, mask: Tensor, pairs: Pairs) -> tuple[Tensor, list[Tensor]]:
        """Nodes (B, N, dim) after all layers, and the logits (B, P) of each update, from pairs ``edges`` (B, E, P)."""
        first, _, second = self.edge
        hidden = torch.zeros_like(mask, dtype=h.dtype).masked_fill_(~mask, -1e4)[:, None, None]
        e = [_mixed(second, _mixed(first, edges[..., part]).relu_()) for part in pairs.parts(h)]
        same = []
        for to_bias, one, two, update in zip(self.bias, self.layers[::2], self.layers[1::2], self.updates, strict=True):
            bias = pairs.square(torch.cat([_mixed(to_bias, part) for part in e], 2)) + hidden  # (B, 2H, N, N)
            h = two(one(h, bias[:, : self.heads]), bias[:, self.heads :])
            e = update(h, e, mask, pairs)
            same.append(torch.cat([_mixed(self.same, _normed(part)) for part in e], 2).squeeze(1).float())
        return h, same

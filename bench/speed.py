"""Speed of losses, decoders and whole predictions, against what one would write first.

    python -m bench.speed                    # results/speed-cpu.json, or on CUDA results/speed-h200.json and the like
    python -m bench.speed --only decode loss --out some.json
    python -m bench.performance              # the page made from the files

Rows whose variant says ``captured`` are replays of a CUDA graph; the others are what a caller sees. ``mib`` is what
the work must at least read and write, ``work_mib`` the peak without the gradients that are returned: while the forward
pass runs and keeps what the backward pass needs there are none yet, and at the end there are all. A part that fails is
named in the file and does not take the others along.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import torchcpl as cpl
from bench import timing
from bench.claims import claims
from bench.timing import CUDA, DEVICE, MACHINE, NEVER, SEED, Row, Work, graphed, peak, row, run_parts, sets_of, timed
from torchcpl.constraints import Rules
from torchcpl.files import read_json, write_json
from torchcpl.kernels import use
from torchcpl.kernels.greedy_plan import plan
from torchcpl.provenance import run_info
from torchcpl.selectors import PointerHead, Stepwise
from torchcpl.tasks.paths.task import PathsConfig, PathsModel
from torchcpl.tasks.subsets.bags import Bags
from torchcpl.tasks.subsets.task import SubsetsConfig, SubsetsModel

DTYPES = (torch.float32, torch.bfloat16) if CUDA else (torch.float32,)
KERNEL = "kernel" if CUDA else "NumPy"


def measure(work: str, variant: str, dtype: torch.dtype, calls: list[Work], **sizes: Any) -> Row:
    return row(work, variant, dtype, timed(calls), peak(calls[0]), **sizes)


def with_capture(work: str, variant: str, dtype: torch.dtype, calls: list[Work], **sizes: Any) -> Iterator[Row]:
    """Calls as they are and, on CUDA, captured."""
    eager = measure(work, variant, dtype, calls, **sizes)
    yield eager
    if CUDA:
        yield row(work, f"{variant}, captured", dtype, graphed(calls), eager["peak_mib"], **sizes)


# A copy, the yardstick of bandwidth


def bench_copy() -> Iterator[Row]:
    source = torch.randn(2**29 if CUDA else 2**26, device=DEVICE)
    target = torch.empty_like(source)
    ms = timed([lambda: target.copy_(source)])
    mib = 2 * source.numel() * 4 / 2**20
    yield row("copy", "torch", torch.float32, ms, 0.0, B=1, N=source.numel(), T=0, mib=mib)


# Decoding


def decode_inputs(batch: int, n: int, hidden: int, dtype: torch.dtype, dense: bool) -> list[cpl.Potentials]:
    """Potentials whose every step is taken."""
    per_set = batch * n * (n if dense else 2 * hidden) * dtype.itemsize
    found = []
    for _ in range(sets_of(per_set)):
        unary = torch.randn(batch, n, device=DEVICE, dtype=dtype)
        stop = torch.full((batch,), NEVER, device=DEVICE, dtype=dtype)
        interaction: cpl.Interaction
        if dense:  # each pick's effects beside each other, as they are when W is built for decoding
            interaction = cpl.Dense(torch.randn(batch, n, n, device=DEVICE, dtype=dtype).transpose(1, 2))
        else:
            keys, values = (torch.randn(batch, n, hidden, device=DEVICE, dtype=dtype) for _ in range(2))
            interaction = cpl.LowRank(keys, values)
        found.append(cpl.Potentials(unary, stop, interaction))
    return found


def dense_of(interaction: cpl.Interaction) -> Tensor:
    """W (B, N, N), built where only its factors are there."""
    if isinstance(interaction, cpl.LowRank):
        keys, values = interaction.keys, interaction.values
        return keys @ values.transpose(1, 2) / math.sqrt(keys.shape[2])
    return interaction.dense()


@torch.no_grad()
def row_loop(pot: cpl.Potentials, max_len: int) -> list[list[int]]:
    """One row after the other, the pick read back by the host at every step, as the paper's code decodes."""
    W = dense_of(pot.interaction)
    found = []
    for b in range(len(pot)):
        logits = torch.cat([pot.unary[b], pot.stop[b : b + 1]]).float()
        selected = torch.zeros(len(logits), dtype=torch.bool, device=DEVICE)
        picks: list[int] = []
        while len(picks) < max_len:
            pick = int(logits.masked_fill(selected, -math.inf).log_softmax(-1).argmax().item())
            if pick == len(logits) - 1:
                break
            picks.append(pick)
            selected[pick] = True
            logits[:-1] += W[b, :, pick]
        found.append(picks)
    return found


def agree(found: list[list[int]], expected: list[list[int]]) -> None:
    """Raise unless nearly all rows are the same: sums in another order may turn a near tie round."""
    same = sum(one == other for one, other in zip(found, expected, strict=True))
    if same < 0.9 * len(expected):
        raise ValueError(f"selections: expected {len(expected)} rows as the plain decoder has them, got {same}")


def greedy(pot: cpl.Potentials, steps: int, mode: str) -> cpl.Selection:
    with use(mode):
        return cpl.greedy(pot, steps)


def draw(pot: cpl.Potentials, steps: int, mode: str) -> cpl.Selection:
    with use(mode):
        return cpl.sample(pot, 16, max_len=steps)


# B, N, T, hidden; the first of every batch size is the paths' own: 30 of 1,024.
DECODE = (
    [(1, 1024, 30, 128), (64, 1024, 30, 128), (1024, 1024, 30, 128), (64, 160, 10, 256), (64, 4096, 30, 64),
     (8, 65_536, 64, 128), (1, 10_000_000, 8, 128)]
    if CUDA else [(1, 1024, 30, 128), (64, 1024, 30, 128), (1, 160, 10, 256), (1, 20_000, 30, 64)]
)  # fmt: skip
LARGEST_W = 2**33 if CUDA else 2**28  # bytes of a dense W that are tried
ON_CHIP = 50 * 2**20  # bytes that stay in cache from step to step


def bench_decode() -> Iterator[Row]:
    for dtype in DTYPES:
        for batch, n, steps, hidden in DECODE:
            for dense in (True, False):
                if not dense or batch * n * n * dtype.itemsize <= LARGEST_W:
                    yield from decode_rows(batch, n, steps, hidden, dtype, dense)


def decode_rows(batch: int, n: int, steps: int, hidden: int, dtype: torch.dtype, dense: bool) -> Iterator[Row]:
    given = "W given" if dense else "factors given"
    sizes: dict[str, Any] = {"B": batch, "N": n, "T": steps}
    if not dense:
        sizes["h"] = hidden
    # A column of W a pick; or all keys, once or where they do not fit on the chip at every step, and a value a pick.
    passes = steps if batch * n * hidden * dtype.itemsize > ON_CHIP else 1
    numbers = batch * (n * steps if dense else (n * passes + steps) * hidden)
    sizes["mib"] = round(numbers * dtype.itemsize / 2**20, 3)
    pots = decode_inputs(batch, n, hidden, dtype, dense)
    fast: list[Work] = [partial(greedy, pot, steps, "auto") for pot in pots]
    if CUDA:
        way = plan(pots[0], Rules(pots[0], steps))
        sizes["way"] = f"{way.kernel} {way.size} × {way.programs}"
    yield from with_capture("greedy", f"{KERNEL}, {given}", dtype, fast, **sizes)
    plain: list[Work] = [partial(greedy, pot, steps, "plain") for pot in pots[:2]]
    yield measure("greedy", f"plain, {given}", dtype, plain, **sizes)
    if dense and batch <= 64 and dtype == torch.float32:
        agree(greedy(pots[0], steps, "auto").tolist(), greedy(pots[0], steps, "plain").tolist())
        agree(row_loop(pots[0], steps), greedy(pots[0], steps, "plain").tolist())
        loops: list[Work] = [partial(row_loop, pot, steps) for pot in pots[:2]]
        yield measure("greedy", f"per-row loop, {given}", dtype, loops, **sizes)
    if CUDA and not dense and n == 65_536:  # one table of items for all rows, which is not copied
        parts = {
            name: part[:1].expand(batch, -1, -1) for name, part in vars(pots[0].interaction).items() if part is not None
        }
        shared: list[Work] = [partial(greedy, replace(pots[0], interaction=cpl.LowRank(**parts)), steps, "auto")]
        yield from with_capture("greedy", f"{KERNEL}, factors shared by all rows", dtype, shared, **sizes)
    if not dense and batch == 64 and n == 1024:
        for variant, mode in ((KERNEL if CUDA else "rollout", "auto"), ("plain", "plain"))[: 2 if CUDA else 1]:
            drawn: list[Work] = [partial(draw, pot, steps, mode) for pot in pots[:2]]
            yield measure("sample 16", f"{variant}, {given}", dtype, drawn, **sizes)


def bench_pointer() -> Iterator[Row]:
    """The autoregressive baseline on encoded candidates, with and without its cache of keys and values."""
    for batch, cache in ((1, True), (1, False), (64, True)):
        sizes = {"B": batch, "N": 1024, "T": 30, "h": 128}
        features = torch.randn(batch, 1024, 128, device=DEVICE)
        torch.manual_seed(SEED)
        head = PointerHead(128, layers=2, heads=8, ffn=512, max_len=30, cache=cache).eval().to(DEVICE)
        with torch.no_grad():
            pot = head(features)
        calls: list[Work] = [partial(cpl.greedy, pot, 30, stop_bias=NEVER)]
        if cache:
            yield from with_capture("greedy", "pointer, cached", torch.float32, calls, **sizes)
        else:
            yield measure("greedy", "pointer, recomputed", torch.float32, calls, **sizes)


# The loss


def loss_inputs(batch: int, n: int, steps: int, hidden: int, dtype: torch.dtype, sets: int) -> list[Any]:
    found = []
    for _ in range(sets):
        shapes = ((batch, n), (batch,), (batch, n, hidden), (batch, n, hidden))
        leaves = [torch.randn(*shape, device=DEVICE, dtype=dtype).requires_grad_() for shape in shapes]
        order = torch.rand(batch, n, device=DEVICE).argsort(-1)[:, :steps].contiguous()
        found.append((leaves, order))
    return found


def loss_of(kind: str, dense: bool, leaves: list[Tensor], order: Tensor) -> Tensor:
    unary, stop, keys, values = leaves
    interaction = cpl.LowRank(keys, values)
    pot = cpl.Potentials(unary, stop, cpl.Dense(dense_of(interaction)) if dense else interaction)
    return cpl.ordered_nll(pot, order) if kind == "ordered" else cpl.subset_nll(pot, order, permutations=10)


def forward(function: Callable[..., Tensor], kind: str, dense: bool, leaves: list[Tensor], order: Tensor) -> Tensor:
    with torch.no_grad():
        return function(kind, dense, leaves, order)


def gradients(
    function: Callable[..., Tensor], kind: str, dense: bool, leaves: list[Tensor], order: Tensor
) -> tuple[Tensor, ...]:
    return torch.autograd.grad(function(kind, dense, leaves, order), leaves)


def same_gradients(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Raise unless the gradients agree but for rounding: a launch that is wrong is not to be timed."""
    limit = 1e-4 if expected[0].dtype == torch.float32 else 3e-2
    for name, have, want in zip(("unary", "stop", "keys", "values"), found, expected, strict=True):
        error = float((have.double() - want.double()).norm() / want.double().norm())
        if not error <= limit:
            raise ValueError(f"gradient of {name}: expected that of the plain loss within {limit}, got {error:.1e} off")


# Kind, B, N, T, hidden, and the variants beside the fused and the plain one.
LOSS = (
    [("ordered", 256, 1024, 32, 128, ("compiled", "dense")), ("ordered", 64, 1024, 32, 64, ()),
     ("ordered", 64, 1024, 32, 256, ()), ("subset", 256, 160, 10, 256, ("dense",)),
     ("ordered", 8, 65_536, 64, 128, ())]
    if CUDA else
    [("ordered", 16, 1024, 32, 128, ("compiled", "dense")), ("ordered", 16, 1024, 32, 256, ()),
     ("subset", 16, 160, 10, 256, ("dense",))]
)  # fmt: skip


def bench_loss() -> Iterator[Row]:
    for dtype in DTYPES:
        for kind, batch, n, steps, hidden, more in LOSS:
            inputs = loss_inputs(batch, n, steps, hidden, dtype, 2)
            returned = sum(leaf.numel() * leaf.element_size() for leaf in inputs[0][0]) / 2**20
            sizes = {"B": batch, "N": n, "T": steps, "h": hidden, "P": 1 if kind == "ordered" else 10}
            keys = batch * n * hidden * dtype.itemsize / 2**20
            # Forward and backward read the keys, and the gradients of both factors are written.
            floors = {"forward": round(keys, 1), "forward+backward": round(4 * keys, 1)}
            if CUDA and kind == "ordered":  # the other's sequences are drawn
                both = []
                for mode in ("triton", "plain"):
                    with use(mode):
                        both.append(gradients(loss_of, kind, False, *inputs[0]))
                same_gradients(*both)
                del both
            for variant in (*(("fused",) if CUDA else ()), "plain", *more):
                torch._dynamo.reset()
                function = torch.compile(loss_of) if variant == "compiled" else loss_of
                with use("triton" if variant == "fused" else "plain"):
                    for part, way in (("forward", forward), ("forward+backward", gradients)):
                        calls: list[Work] = [partial(way, function, kind, variant == "dense", *i) for i in inputs]
                        found = measure(f"{kind}_nll {part}", variant, dtype, calls, **sizes, mib=floors[part])
                        if way is gradients:
                            kept = peak(partial(function, kind, variant == "dense", *inputs[0]))
                            found["work_mib"] = round(max(kept, found["peak_mib"] - returned), 1)
                        yield found
                    if CUDA:
                        again = {**sizes, "mib": found["mib"]}
                        yield row(found["work"], f"{variant}, captured", dtype, graphed(calls), 0.0, **again)
            del inputs, calls
            if CUDA:
                torch.cuda.empty_cache()


# Whole predictions


Select = Callable[[Any], Any]


def predict_rows(
    work: str, ways: dict[str, Select], inputs: list[Any], dtype: torch.dtype, **sizes: int
) -> Iterator[Row]:
    """Every way eagerly and, on CUDA and unless it is a loop, captured: as models ask for it, and all in ``dtype``."""
    for variant, select in ways.items():

        def eager(given: Any, select: Select = select) -> Any:
            with torch.inference_mode(), torch.autocast(DEVICE.type, torch.bfloat16, dtype == torch.bfloat16):
                return select(given)

        calls: list[Work] = [partial(eager, given) for given in inputs]
        yield measure(work, f"{variant}, eager", dtype, calls, **sizes)
        if CUDA and "loop" not in variant:
            for how in ("captured", *(["captured, all halved"] if dtype != torch.float32 else [])):
                run = cpl.compile_for_inference(select, inputs[0], dtype=dtype, precise=how == "captured")
                calls = [partial(run, given) for given in inputs]
                yield measure(work, f"{variant}, {how}", dtype, calls, **sizes)


def subsets_model(**options: Any) -> SubsetsModel:
    """Random weights; ten steps are taken, as many as a bag has classes at most."""
    torch.manual_seed(SEED)
    model = SubsetsModel(SubsetsConfig(max_len=10, **options), torch.randn(2, 512)).eval().to(DEVICE)
    if isinstance(model.method, Stepwise):
        model.method.knob = NEVER
    return model


def paths_model(**options: Any) -> PathsModel:
    """Random weights; as many steps are taken as are allowed."""
    torch.manual_seed(SEED)
    model = PathsModel(PathsConfig(**options)).eval().to(DEVICE)
    if isinstance(model.method, Stepwise):
        model.method.knob = NEVER
    return model


def random_bags(batch: int, items: int, width: int = 512) -> Bags:
    none = torch.zeros(batch, 0, dtype=torch.long, device=DEVICE)
    mask = torch.ones(batch, items, dtype=torch.bool, device=DEVICE)
    return Bags(torch.randn(batch, items, width, device=DEVICE), mask, none, none, none)


def random_images(batch: int) -> Tensor:
    return torch.randint(7, (batch, 256, 256), dtype=torch.uint8, device=DEVICE)


def bench_subsets() -> Iterator[Row]:
    models = {
        "cpl": subsets_model(),
        "cpl (coverage)": subsets_model(kind="coverage"),
        "threshold": subsets_model(method="threshold"),
        "pointer": subsets_model(method="pointer"),
    }
    cpl_model = models["cpl"]

    def loop(bags: Bags) -> list[list[int]]:
        return row_loop(cpl_model.method.potentials(cpl_model.encode(bags), bags.mask), 10)

    for dtype in DTYPES:
        for batch in (1, 64) if CUDA else (1, 8):
            inputs = [random_bags(batch, 160) for _ in range(4)]
            ways: dict[str, Select] = {"encoder": cpl_model.encode}
            ways |= {name: model.select for name, model in models.items()}
            if batch == 1 or dtype == torch.float32:
                ways["per-row loop"] = loop
            yield from predict_rows("predict subsets", ways, inputs, dtype, B=batch, N=160, T=10)


def bench_paths() -> Iterator[Row]:
    """Random weights on random images; thirty steps are taken."""
    models = {
        "cpl": paths_model(max_len=30),
        "cpl (recent)": paths_model(max_len=30, kind="recent"),
        "threshold": paths_model(max_len=30, method="threshold"),
        "pointer": paths_model(max_len=30, method="pointer"),
    }
    ours = models["cpl"]

    class Heads(nn.Module):
        """All that is parallel."""

        def __init__(self) -> None:
            super().__init__()
            self.model = ours

        def forward(self, images: Tensor) -> Any:
            features = self.model.encode(images)
            every = torch.ones(features.shape[:2], dtype=torch.bool, device=DEVICE)
            return self.model.method.potentials(features, every), self.model.points(features)

    heads = Heads().eval()

    def loop(images: Tensor) -> Any:
        pot, points = heads(images)
        return row_loop(pot, 30), points

    for dtype in DTYPES:
        for batch in (1, 64) if CUDA else (1,):
            inputs = [random_images(batch) for _ in range(4)]
            ways: dict[str, Select] = {"encoder": ours.encode, "encoder and heads": heads}
            ways |= {name: model.select for name, model in models.items()}
            if batch == 1:
                ways["per-row loop"] = loop
            yield from predict_rows("predict paths", ways, inputs, dtype, B=batch, N=1024, T=30)


PARTS: dict[str, Callable[[], Iterator[Row]]] = {
    "copy": bench_copy,
    "decode": bench_decode,
    "pointer": bench_pointer,
    "subsets": bench_subsets,
    "paths": bench_paths,
    "loss": bench_loss,
}


def with_kept(rows: list[Row], kept: dict[str, Any]) -> list[Row]:
    """``rows``, and what the file of an earlier run has beside them, each of these with its commit."""

    def place(row: Row) -> tuple[Any, ...]:
        return tuple(row.get(name) for name in ("work", "variant", "dtype", "B", "N", "T", "h"))

    measured = {place(row) for row in rows}
    return rows + [{"commit": kept["commit"], **row} for row in kept["rows"] if place(row) not in measured]


def main() -> int:
    whole = f"results/speed-{MACHINE}.json"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help=f"where to write the rows (default: {whole})")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="some of the parts, with --out")
    parser.add_argument("--budget", type=float, default=timing.BUDGET, help="seconds of work that is timed, for a row")
    parser.add_argument("--keep", help="a file of an earlier run, whose rows are kept where none is measured")
    options = parser.parse_args()
    if options.out is None and set(options.only) != set(PARTS):
        parser.error("--only: some of the parts are no whole, expected a file of their own with --out")
    timing.BUDGET = options.budget
    info = {**run_info(seeds=[SEED], device=DEVICE), "threads": torch.get_num_threads()}
    kept = read_json(options.keep) if options.keep else None
    verdicts: list[dict[str, Any]] = []

    def write(rows: list[Row], failed: dict[str, str]) -> None:
        every = with_kept(rows, kept) if kept else rows
        verdicts[:] = claims(every) if CUDA else []  # they are about a GPU
        write_json(options.out or whole, {**info, "rows": every, "claims": verdicts, "failed": failed})

    status = run_parts({name: PARTS[name] for name in options.only}, write)
    for claim in verdicts:
        print(f"{claim['verdict']:<14} {claim['claim']}: {claim['value']} (asked: {claim['asked']})")
    return status


if __name__ == "__main__":
    sys.exit(main())

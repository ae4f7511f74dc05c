"""What every kernel earns: a whole prediction or training step with it and without it, captured, and the peak memory.

    python -m bench.kernels --source features.npz       # results/kernels-h200.json and the like, on CUDA
    TRITON_INTERPRET=1 python -m bench.kernels --tiny --out kernels.json    # tries the script itself, no numbers

``gain`` is the part of the time without it that a mechanism saves. What gains less than a tenth of every whole, and no
memory to speak of, is not worth its lines.
"""

from __future__ import annotations

import argparse
import ast
import sys
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

import torchcpl as cpl
from bench import timing
from bench.speed import DTYPES, paths_model, random_bags, random_images, subsets_model
from bench.timing import CUDA, DEVICE, NAMES, NEVER, SEED, Change, Row, Work, changed, graphed, peak, timed
from torchcpl import head, inference
from torchcpl.constraints import Rules
from torchcpl.encoders import norm, resnet
from torchcpl.files import write_json
from torchcpl.kernels import dispatch, greedy_triton, nll_triton, use
from torchcpl.kernels.greedy_plan import plan
from torchcpl.kernels.pairs import plain_pairs
from torchcpl.provenance import run_info
from torchcpl.tasks.benchmark import Restored
from torchcpl.tasks.paths import task as paths_task
from torchcpl.tasks.paths.task import PathBatch, PathsConfig, PathsModel
from torchcpl.tasks.subsets.benchmark import SubsetsBenchmark
from torchcpl.tasks.subsets.task import SubsetsConfig, SubsetsModel
from torchcpl.train import fit

ROOT = Path(__file__).resolve().parents[1]
MODE = "auto" if CUDA else "triton"  # in Triton's interpreter the kernels run only where they are asked for


@dataclass(frozen=True)
class Sizes:
    """How large everything is; ``--tiny`` for the interpreter."""

    paths: tuple[int, ...] = (1, 64)
    subsets: tuple[int, ...] = (1, 64)
    items: int = 160
    train_subsets: int = 256
    train_paths: int = 32
    steps: int = 30
    loss: tuple[int, int, int, int] = (256, 1024, 32, 128)
    few: tuple[int, int, int, int] = (4, 1024, 32, 128)
    huge: tuple[int, int, int, int] = (8, 65_536, 64, 128)
    many: tuple[int, int, int] = (1024, 1024, 30)
    wide: tuple[int, int, int] = (1, 16_384, 64)
    training: int = 1500
    bags: int = 1000


TINY = Sizes((1,), (1,), 12, 2, 1, 2, (2, 20, 3, 16), (1, 20, 3, 16), (1, 40, 3, 16), (2, 20, 3), (1, 40, 3), 1, 4)


def cost(work: Work, captured: bool = True) -> tuple[float, float]:
    """Milliseconds, captured where that can be, and MiB at the peak."""
    if not CUDA:
        start = time.perf_counter()
        work()
        return (time.perf_counter() - start) * 1e3, 0.0
    held = peak(work)
    return (graphed([work] * 4, 0.15) if captured else timed([work], 0.15)), held


# How many lines there are


def lines_of(name: str, *functions: str) -> int:
    """Of a file of the package, or of some of its functions and classes."""
    text = (ROOT / "torchcpl" / name).read_text(encoding="utf-8")
    if not functions:
        return len(text.splitlines())
    nodes = {getattr(node, "name", ""): node for node in ast.walk(ast.parse(text))}
    return sum(nodes[one].end_lineno - nodes[one].lineno + 1 for one in functions)  # type: ignore[attr-defined]


GREEDY = "kernels/greedy_triton.py"
LOSS = [f"kernels/{name}_triton.py" for name in ("nll", "nll_forward", "nll_backward", "nll_contexts")]
LINES = {
    "greedy, block": lines_of(GREEDY),
    "greedy, tiles": lines_of(GREEDY, "_decode_tiles", "_launch_tiles"),
    "greedy, factored": lines_of(GREEDY, "_decode_tiles", "_launch_tiles"),
    "greedy, drawn": lines_of(GREEDY, "_gumbel"),
    "loss": sum(map(lines_of, LOSS)),
    "loss: candidates split": lines_of(LOSS[1], "nll_combine", "share_of", "store_result"),
    "streams": lines_of("kernels/streams.py"),
    "batch normalisation": lines_of("encoders/norm_triton.py") + lines_of("encoders/norm.py"),
    # And about twenty elsewhere in `inference`.
    "pairs": lines_of("kernels/pairs_triton.py") + lines_of("inference.py", "_paired_linear") + 20,
}


def compared(
    mechanism: str, whole: str, ours: tuple[float, float], other: tuple[float, float], without: str = "plain torch",
    **more: Any,
) -> Row:  # fmt: skip
    """A row of two costs, with a mechanism and without it."""
    gain = 1 - ours[0] / other[0]
    said = " ".join(f"{name}={value}" for name, value in more.items())
    print(
        f"{mechanism:<30} {whole:<52} {without:<24} {ours[0]:9.4f} {other[0]:9.4f} ms {gain:6.1%}"
        f" {ours[1]:9.1f} {other[1]:9.1f} MiB {said}",
        flush=True,
    )
    return {
        "mechanism": mechanism, "whole": whole, "without": without, "lines": LINES[mechanism], "ms": ours[0],
        "ms_without": other[0], "gain": round(gain, 4), "peak_mib": round(ours[1], 1),
        "peak_mib_without": round(other[1], 1), **more,
    }  # fmt: skip


def compare(mechanism: str, whole: str, make: Callable[[], Work], *changes: Change, **more: Any) -> Row:
    """``make`` builds the work anew, so that what it captures is captured with the changes."""
    with use(MODE):
        ours = cost(make())
    with changed(*changes):
        other = cost(make())
    return compared(mechanism, whole, ours, other, **more)


# Whole predictions


def random_paths(batch: int, steps: int) -> PathBatch:
    cells = torch.rand(batch, 1024, device=DEVICE).argsort(-1)[:, :steps]
    return PathBatch(random_images(batch), torch.stack([cells % 32, cells // 32], -1) * 8.0 + 4.0)


def predicting(select: Callable[[Any], Any], given: Any, dtype: torch.dtype) -> Callable[[], Work]:
    """A prediction without its checks and copies, to be captured with whatever has been changed by then."""

    def make() -> Work:
        run: Any = cpl.compile_for_inference(select, given, dtype=dtype, copy=False)
        return lambda: run._run((given,))

    return make


OFF = "turned off"
NO_GREEDY: Change = (dispatch, "decode_obstacle", lambda *_: OFF)
NO_LOSS: Change = (dispatch, "loss_obstacle", lambda *_, **__: OFF)
CHOSEN = nll_triton.tiles
UNSPLIT: Change = (nll_triton, "tiles", lambda *sizes: replace(CHOSEN(*sizes), split=1))
ONE_BY_ONE: list[Change] = [
    (module, "side_by_side", lambda *works: [work() for work in works]) for module in (head, greedy_triton, paths_task)
]
NO_NORM: Change = (norm.BatchNorm, "_obstacle", lambda *_: OFF)


def cudnn_norm(self: Any, x: Tensor, add: Tensor | None = None, relu: bool = False, pool: bool = False) -> Tensor:
    return norm._followed(nn.BatchNorm2d.forward(self, x), add, relu, pool)


def folded(model: PathsModel) -> PathsModel:
    """Batch normalisation as part of the convolutions before it, which is exact but for rounding."""
    model = deepcopy(model)
    blocks: list[Any] = [model.backbone, *(m for m in model.modules() if isinstance(m, resnet.BasicBlock))]
    for block in blocks:
        for conv, bn in (("conv1", "bn1"), ("conv2", "bn2")):
            if isinstance(getattr(block, bn, None), nn.BatchNorm2d):
                fused = nn.utils.fusion.fuse_conv_bn_eval(getattr(block, conv), getattr(block, bn))
                setattr(block, conv, fused.to(memory_format=torch.channels_last))
                setattr(block, bn, nn.Identity())
        if isinstance(getattr(block, "downsample", None), nn.Sequential):
            fused = nn.utils.fusion.fuse_conv_bn_eval(block.downsample[0], block.downsample[1])
            block.downsample = nn.Sequential(fused.to(memory_format=torch.channels_last), nn.Identity())
    return model


def bench_predictions(sizes: Sizes) -> Iterator[Row]:
    ours, recent = paths_model(max_len=sizes.steps), paths_model(max_len=sizes.steps, kind="recent")
    for dtype in DTYPES:
        for batch in sizes.paths:
            images = random_images(batch)
            whole = f"predict paths, batch {batch}, {NAMES[dtype]}"
            make = predicting(ours.select, images, dtype)
            yield compare("greedy, block", whole, make, NO_GREEDY)
            yield compare("streams", whole, make, *ONE_BY_ONE, without="one after the other")
            yield compare("batch normalisation", whole, make, NO_NORM, without="native_batch_norm")
            cudnn: Change = (norm.BatchNorm, "forward", cudnn_norm)
            yield compare("batch normalisation", whole, make, cudnn, without="nn.BatchNorm2d (cuDNN)")
            with use(MODE):
                apart, within = (cost(predicting(model.select, images, dtype)()) for model in (ours, folded(ours)))
            yield compared("batch normalisation", whole, apart, within, without="folded into convolutions")
            whole = f"predict paths (recent), batch {batch}, {NAMES[dtype]}"
            make = predicting(recent.select, images, dtype)
            yield compare("greedy, block", whole, make, NO_GREEDY)
            yield compare("streams", whole, make, *ONE_BY_ONE, without="one after the other")
        for kind in ("lowrank", "coverage"):
            model = subsets_model(kind=kind)
            for batch in sizes.subsets:
                bags = random_bags(batch, sizes.items)
                whole = f"predict subsets ({kind}), batch {batch}, {NAMES[dtype]}"
                make = predicting(model.select, bags, dtype)
                yield compare("greedy, block", whole, make, NO_GREEDY)
                if dtype == torch.bfloat16:
                    plain: Change = (inference, "pairs", plain_pairs)
                    yield compare("pairs", whole, make, plain, without="pairs by plain torch")


def bench_decoding(sizes: Sizes) -> Iterator[Row]:
    """A head on features and the decoder: what an encoder adds is the same with and without."""
    for name, (batch, n, steps), draw in (
        ("greedy, drawn", (min(64, sizes.many[0]), *sizes.many[1:]), True),
        ("greedy, factored", sizes.many, False),
        ("greedy, factored", (sizes.huge[0], *sizes.huge[1:3]), False),
        ("greedy, tiles", sizes.wide, False),
    ):
        torch.manual_seed(SEED)
        head = cpl.CPLHead(128, 128).eval().to(DEVICE)
        features = torch.randn(batch, n, 128, device=DEVICE)

        def work(head: cpl.CPLHead = head, features: Tensor = features, steps: int = steps, draw: bool = draw) -> Any:
            with torch.inference_mode():
                pot = head(features)
                if draw:
                    return cpl.sample(pot, 16, max_len=steps, stop_bias=NEVER)
                return cpl.greedy(pot, steps, stop_bias=NEVER)

        pot = head(features)
        way = plan(pot, Rules(pot, steps), 16 if draw else 1, draw)
        whole = f"head and {'16 samples' if draw else 'greedy'}, {steps} of {n}, batch {batch}, float32"
        yield compare(name, whole, lambda work=work: work, NO_GREEDY, way=str(way))  # type: ignore[misc]


# Whole training steps


def stepping(model: nn.Module, batch: Any, dtype: torch.dtype) -> Callable[[], Work]:
    leaves = [p for p in model.parameters() if p.requires_grad]

    def work() -> Any:
        with torch.autocast(DEVICE.type, torch.bfloat16, dtype == torch.bfloat16, cache_enabled=False):
            found = model(batch)
        return torch.autograd.grad(found["loss"] if isinstance(found, dict) else found, leaves, allow_unused=True)

    return lambda: work


class HeadAndLoss(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.head = cpl.CPLHead(hidden, hidden)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return cpl.ordered_nll(self.head(batch[0]), batch[1])


def loss_batch(batch: int, n: int, steps: int, hidden: int) -> tuple[Tensor, Tensor]:
    order = torch.rand(batch, n, device=DEVICE).argsort(-1)[:, :steps].contiguous()
    return torch.randn(batch, n, hidden, device=DEVICE), order


def bench_training(sizes: Sizes) -> Iterator[Row]:
    for dtype in DTYPES:
        torch.manual_seed(SEED)
        subsets = SubsetsModel(SubsetsConfig(), torch.randn(2, 512)).train().to(DEVICE)
        bags = random_bags(sizes.train_subsets, sizes.items)
        target = torch.rand(bags.mask.shape, device=DEVICE).argsort(-1)[:, :10].contiguous()
        bags = replace(bags, target=target)
        whole = f"train subsets, batch {len(bags)}, {NAMES[dtype]}"
        yield compare("loss", whole, stepping(subsets, bags, dtype), NO_LOSS)
        torch.manual_seed(SEED)
        paths = PathsModel(PathsConfig()).train().to(DEVICE)
        whole = f"train paths, batch {sizes.train_paths}, {NAMES[dtype]}"
        batch = random_paths(sizes.train_paths, sizes.steps)
        yield compare("loss", whole, stepping(paths, batch, dtype), NO_LOSS)
        for shape in (sizes.loss, sizes.few, sizes.huge):
            size, n, steps, hidden = shape
            model = HeadAndLoss(hidden).to(DEVICE)
            make = stepping(model, loss_batch(*shape), dtype)
            whole = f"train head, {steps} of {n}, batch {size}, {NAMES[dtype]}"
            yield compare("loss", whole, make, NO_LOSS)
            if size < sizes.loss[0]:
                yield compare("loss: candidates split", whole, make, UNSPLIT, without="one share")
            if CUDA:
                torch.cuda.empty_cache()


# Pairs of bfloat16 against TF32


def trained(sizes: Sizes, source: str) -> Restored:
    """The tuned recipe's model, trained for a while."""
    config = SubsetsConfig(
        source=source, kind="coverage", live_stop=True, standardise=True, input_dropout=0.2, stop_rule="threshold",
        early_stop_weight=0.0, validation_bags=sizes.bags, batch_size=sizes.train_subsets, epochs=1,
        bags=sizes.train_subsets * sizes.training, optimizer="adamw", lr=6e-4, weight_decay=0.05, schedule="cosine",
        warmup=0.1, deterministic=False, device=DEVICE.type,
        **({} if CUDA else {"dim": 16, "layers": 1, "ffn": 16, "hidden": 16, "max_items": 60}),  # type: ignore[arg-type]
    )  # fmt: skip
    benchmark = SubsetsBenchmark()
    with TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        state = fit(benchmark.make_task(config), run, progress=False)
        print(f"trained {state['step']} steps in {state['seconds']:.0f} s, {state['metrics']}", flush=True)
        return benchmark.restore(benchmark.read(run))


def bench_pairs(sizes: Sizes, source: str) -> Iterator[Row]:
    """How a prediction in bfloat16 keeps its picks: time, and the share of bags whose picks are those of float32."""
    task, model, _ = trained(sizes, source)
    head = model.method.head
    (everything,) = task.examples(sizes.bags, 1)
    with torch.inference_mode(), use(MODE):
        expected = [set(picks) for picks in model.select(everything).tolist()]
    marks = (
        # what is said; dtype; marks of the whole model and of the head: paired, precise
        ("float32", torch.float32, False, False, True),
        ("bfloat16 in pairs, head too", torch.bfloat16, True, False, False),
        ("bfloat16 in pairs, head in float32", torch.bfloat16, True, False, True),
        ("all in TF32", torch.bfloat16, False, True, True),
        ("bfloat16, head in TF32", torch.bfloat16, False, False, True),
        ("bfloat16", torch.bfloat16, False, False, False),
        ("float16, head in float32", torch.float16, False, False, True),
    )
    for said, dtype, paired, precise, head_precise in marks:
        model.paired, model.precise, head.precise = paired, precise, head_precise
        with use(MODE):
            run = cpl.compile_for_inference(model.select, everything, dtype=dtype)
            found = [set(picks) for picks in run(everything).tolist()]
            same = sum(a == b for a, b in zip(found, expected, strict=True)) / len(expected)
            times = {}
            for batch in sizes.subsets:
                make = predicting(model.select, task.examples(batch, 1)[0], dtype)
                times[f"ms_batch_{batch}"], _ = cost(make())
        row = {"mechanism": "pairs", "whole": "predict subsets, trained", "without": said, "same": same, **times}
        print(row, flush=True)
        yield row


PARTS = ("predictions", "decoding", "training", "pairs")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(f"results/kernels-{timing.MACHINE}.json"))
    parser.add_argument("--source", default="digits", help="features to train the subsets model on: an .npz, or digits")
    parser.add_argument("--tiny", action="store_true", help="sizes for Triton's interpreter")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    options = parser.parse_args()
    sizes = TINY if options.tiny else Sizes()
    parts: dict[str, Callable[[], Iterator[Row]]] = {
        "predictions": partial(bench_predictions, sizes),
        "decoding": partial(bench_decoding, sizes),
        "training": partial(bench_training, sizes),
        "pairs": partial(bench_pairs, sizes, options.source),
    }
    info = run_info(seeds=[SEED], device=DEVICE)
    chosen = {name: parts[name] for name in options.only}
    return timing.run_parts(
        chosen, lambda rows, failed: write_json(options.out, {**info, "rows": rows, "failed": failed})
    )


if __name__ == "__main__":
    sys.exit(main())

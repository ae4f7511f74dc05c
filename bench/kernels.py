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
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import torchcpl as cpl
from bench.timing import CUDA, DEVICE, NAMES, Work, graphed, peak, timed
from torchcpl import head, inference
from torchcpl.constraints import Rules
from torchcpl.encoders import norm, resnet
from torchcpl.files import write_json
from torchcpl.kernels import dispatch, greedy_triton, nll_triton, use
from torchcpl.kernels.greedy_plan import plan
from torchcpl.kernels.pairs import plain_pairs
from torchcpl.provenance import run_info
from torchcpl.tasks.paths import task as paths_task
from torchcpl.tasks.paths.task import PathBatch, PathsConfig, PathsModel
from torchcpl.tasks.subsets.bags import Bags
from torchcpl.tasks.subsets.data import load_source
from torchcpl.tasks.subsets.task import SubsetsConfig, SubsetsModel, SubsetsTask

ROOT = Path(__file__).resolve().parents[1]
SEED = 0
NEVER = -1e4  # a stop so unlikely that every step is taken
MODE = "auto" if CUDA else "triton"  # in Triton's interpreter the kernels run only where they are asked for
Row = dict[str, Any]
Change = tuple[Any, str, Any]  # object, name of its attribute, what to put there


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


@contextmanager
def changed(*changes: Change) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, name, value in changes:
            stack.enter_context(patch.object(owner, name, value))
        yield


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
    """Of a file of the package or the tests, or of some of its functions and classes."""
    text = (ROOT / name).read_text(encoding="utf-8")
    if not functions:
        return len(text.splitlines())
    found = [node for node in ast.walk(ast.parse(text)) if getattr(node, "name", None) in functions]
    return sum((node.end_lineno or 0) - node.lineno + 1 for node in found)  # type: ignore[attr-defined]


def tests_of(name: str) -> int:
    return (ROOT / name).read_text(encoding="utf-8").count("\ndef test_")


KERNELS = "torchcpl/kernels"
GREEDY, GREEDY_TESTS = f"{KERNELS}/greedy_triton.py", "tests/kernels/test_greedy_triton.py"
LOSS = [f"{KERNELS}/{name}_triton.py" for name in ("nll", "nll_forward", "nll_backward", "nll_contexts")]
LOSS_TESTS = "tests/kernels/test_nll_triton.py"
NORM_TESTS, PAIRS_TESTS = "tests/encoders/test_norm_triton.py", "tests/kernels/test_pairs_triton.py"
# Lines of the package, and lines and number of the tests, of every mechanism.
EXTENT: dict[str, Callable[[], tuple[int, int, int]]] = {
    "greedy, block": lambda: (lines_of(GREEDY), lines_of(GREEDY_TESTS), tests_of(GREEDY_TESTS)),
    "greedy, tiles": lambda: (lines_of(GREEDY, "_decode_tiles", "_launch_tiles"), 0, 0),
    "greedy, factored": lambda: (lines_of(GREEDY, "_decode_tiles", "_launch_tiles"), 0, 0),
    "greedy, drawn": lambda: (lines_of(GREEDY, "_gumbel"), 0, 0),
    "loss": lambda: (sum(map(lines_of, LOSS)), lines_of(LOSS_TESTS), tests_of(LOSS_TESTS)),
    "loss: candidates split": lambda: (lines_of(LOSS[1], "nll_combine", "share_of", "hand_in"), 0, 0),
    "streams": lambda: (lines_of(f"{KERNELS}/streams.py"), 0, 2),
    "batch normalisation": lambda: (
        lines_of("torchcpl/encoders/norm_triton.py") + lines_of("torchcpl/encoders/norm.py"),
        lines_of(NORM_TESTS),
        tests_of(NORM_TESTS),
    ),
    "pairs": lambda: (
        lines_of(f"{KERNELS}/pairs_triton.py") + lines_of("torchcpl/inference.py", "_paired_linear") + 20,
        lines_of(PAIRS_TESTS),
        tests_of(PAIRS_TESTS),
    ),
}


class Table:
    """The rows so far, written after every one."""

    def __init__(self, out: Path) -> None:
        self.out, self.rows, self.failed = out, [], {}  # type: ignore[var-annotated]

    def add(
        self, mechanism: str, whole: str, ours: tuple[float, float], other: tuple[float, float], **more: Any
    ) -> None:
        lines, test_lines, tests = EXTENT.get(mechanism, lambda: (0, 0, 0))()
        gain = 1 - ours[0] / other[0]
        row = {
            "mechanism": mechanism, "whole": whole, "without": "plain torch", "lines": lines, "test_lines": test_lines,
            "tests": tests, "ms": ours[0], "ms_without": other[0], "gain": round(gain, 4),
            "peak_mib": round(ours[1], 1), "peak_mib_without": round(other[1], 1), **more,
        }  # fmt: skip
        print(
            f"{mechanism:<30} {whole:<52} {row['without']:<24} {ours[0]:9.4f} {other[0]:9.4f} ms {gain:6.1%}"
            f" {ours[1]:9.1f} {other[1]:9.1f} MiB {' '.join(f'{k}={v}' for k, v in more.items() if k != 'without')}",
            flush=True,
        )
        self.rows.append(row)
        self.write()

    def write(self) -> None:
        write_json(self.out, {**run_info(seeds=[SEED], device=DEVICE), "rows": self.rows, "failed": self.failed})

    def compare(self, mechanism: str, whole: str, make: Callable[[], Work], *changes: Change, **more: Any) -> None:
        """``make`` builds the work anew, so that what it captures is captured with the changes."""
        with use(MODE):
            ours = cost(make())
        with changed(*changes):
            other = cost(make())
        self.add(mechanism, whole, ours, other, **more)


# Whole predictions


def random_bags(batch: int, items: int, width: int = 512) -> Bags:
    none = torch.zeros(batch, 0, dtype=torch.long, device=DEVICE)
    mask = torch.ones(batch, items, dtype=torch.bool, device=DEVICE)
    return Bags(torch.randn(batch, items, width, device=DEVICE), mask, none, none, none)


def random_paths(batch: int, steps: int) -> PathBatch:
    images = torch.randint(7, (batch, 256, 256), dtype=torch.uint8, device=DEVICE)
    cells = torch.rand(batch, 1024, device=DEVICE).argsort(-1)[:, :steps]
    return PathBatch(images, torch.stack([cells % 32, cells // 32], -1) * 8.0 + 4.0)


def paths_model(**options: Any) -> PathsModel:
    torch.manual_seed(SEED)
    model = PathsModel(PathsConfig(**options)).eval().to(DEVICE)
    model.method.knob = NEVER
    return model


def subsets_model(**options: Any) -> SubsetsModel:
    torch.manual_seed(SEED)
    model = SubsetsModel(SubsetsConfig(max_len=10, **options), torch.randn(2, 512)).eval().to(DEVICE)
    if model.method.knob == 0:
        model.method.knob = NEVER
    return model


def predicting(select: Callable[[Any], Any], given: Any, dtype: torch.dtype) -> Callable[[], Work]:
    def make() -> Work:
        run: Any = cpl.compile_for_inference(select, given, dtype=dtype, copy=False)
        return lambda: run._run(given)

    return make


OFF = "turned off"
NO_GREEDY: Change = (dispatch, "decode_obstacle", lambda *_: OFF)
NO_LOSS: Change = (dispatch, "loss_obstacle", lambda *_, **__: OFF)
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


def bench_predictions(table: Table, sizes: Sizes) -> None:
    ours, recent = paths_model(max_len=sizes.steps), paths_model(max_len=sizes.steps, kind="recent")
    for dtype in (torch.float32, torch.bfloat16) if CUDA else (torch.float32,):
        for batch in sizes.paths:
            images = random_paths(batch, sizes.steps).images
            whole = f"predict paths, batch {batch}, {NAMES[dtype]}"
            make = predicting(ours.select, images, dtype)
            table.compare("greedy, block", whole, make, NO_GREEDY)
            table.compare("streams", whole, make, *ONE_BY_ONE, without="one after the other")
            table.compare("batch normalisation", whole, make, NO_NORM, without="native_batch_norm")
            cudnn: Change = (norm.BatchNorm, "forward", cudnn_norm)
            table.compare("batch normalisation", whole, make, cudnn, without="nn.BatchNorm2d (cuDNN)")
            both = [fixed(predicting(model.select, images, dtype)) for model in (ours, folded(ours))]
            table.add("batch normalisation", whole, *both, without="folded into convolutions")
            whole = f"predict paths (recent), batch {batch}, {NAMES[dtype]}"
            make = predicting(recent.select, images, dtype)
            table.compare("greedy, block", whole, make, NO_GREEDY)
            table.compare("streams", whole, make, *ONE_BY_ONE, without="one after the other")
        for kind in ("lowrank", "coverage"):
            model = subsets_model(kind=kind)
            for batch in sizes.subsets:
                bags = random_bags(batch, sizes.items)
                whole = f"predict subsets ({kind}), batch {batch}, {NAMES[dtype]}"
                make = predicting(model.select, bags, dtype)
                table.compare("greedy, block", whole, make, NO_GREEDY)
                if dtype == torch.bfloat16:
                    table.compare(
                        "pairs", whole, make, (inference, "pairs", plain_pairs), without="pairs by plain torch"
                    )


def fixed(make: Callable[[], Work]) -> tuple[float, float]:
    with use(MODE):
        return cost(make())


def bench_decoding(table: Table, sizes: Sizes) -> None:
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
        table.compare(name, whole, lambda work=work: work, NO_GREEDY, way=str(way))  # type: ignore[misc]


# Whole training steps


def stepping(model: nn.Module, batch: Any, dtype: torch.dtype) -> Work:
    leaves = [p for p in model.parameters() if p.requires_grad]

    def work() -> Any:
        with torch.autocast(DEVICE.type, torch.bfloat16, dtype == torch.bfloat16, cache_enabled=False):
            found = model(batch)
        return torch.autograd.grad(found["loss"] if isinstance(found, dict) else found, leaves, allow_unused=True)

    return work


class HeadAndLoss(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.head = cpl.CPLHead(hidden, hidden)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return cpl.ordered_nll(self.head(batch[0]), batch[1])


def loss_batch(batch: int, n: int, steps: int, hidden: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    order = torch.rand(batch, n, device=DEVICE).argsort(-1)[:, :steps].contiguous()
    return torch.randn(batch, n, hidden, device=DEVICE, dtype=dtype), order


def bench_training(table: Table, sizes: Sizes) -> None:
    for dtype in (torch.float32, torch.bfloat16) if CUDA else (torch.float32,):
        torch.manual_seed(SEED)
        subsets = SubsetsModel(SubsetsConfig(), torch.randn(2, 512)).train().to(DEVICE)
        bags = random_bags(sizes.train_subsets, sizes.items)
        target = torch.rand(bags.mask.shape, device=DEVICE).argsort(-1)[:, :10].contiguous()
        bags = replace(bags, target=target)
        whole = f"train subsets, batch {len(bags)}, {NAMES[dtype]}"
        subset_step = stepping(subsets, bags, dtype)
        table.compare("loss", whole, lambda step=subset_step: step, NO_LOSS)  # type: ignore[misc]
        torch.manual_seed(SEED)
        paths = PathsModel(PathsConfig()).train().to(DEVICE)
        path_step = stepping(paths, random_paths(sizes.train_paths, sizes.steps), dtype)
        whole = f"train paths, batch {sizes.train_paths}, {NAMES[dtype]}"
        table.compare("loss", whole, lambda step=path_step: step, NO_LOSS)  # type: ignore[misc]
        for shape in (sizes.loss, sizes.few, sizes.huge):
            batch, n, steps, hidden = shape
            model = HeadAndLoss(hidden).to(DEVICE)
            step = stepping(model, loss_batch(*shape, torch.float32), dtype)
            whole = f"train head, {steps} of {n}, batch {batch}, {NAMES[dtype]}"
            table.compare("loss", whole, lambda step=step: step, NO_LOSS)  # type: ignore[misc]
            if batch < sizes.loss[0]:
                unsplit(table, whole, step)
            if CUDA:
                torch.cuda.empty_cache()


def unsplit(table: Table, whole: str, step: Work) -> None:
    """The loss kernels as they are against those that do not share the candidates of a row."""
    choose = nll_triton.tiles
    with use(MODE):
        ours = cost(step)
        with changed((nll_triton, "tiles", lambda *sizes: replace(choose(*sizes), split=1))):
            other = cost(step)
    table.add("loss: candidates split", whole, ours, other, without="one share")


# Pairs of bfloat16 against TF32


def trained(sizes: Sizes, source: str) -> tuple[SubsetsTask, SubsetsModel]:
    """The tuned recipe's model, trained for a while."""
    config = SubsetsConfig(
        source=source, kind="coverage", live_stop=True, standardise=True, input_dropout=0.2, stop_rule="threshold",
        early_stop_weight=0.0, validation_bags=sizes.bags, batch_size=sizes.train_subsets, device=DEVICE.type,
        **({} if CUDA else {"dim": 16, "layers": 1, "ffn": 16, "hidden": 16, "max_items": 60}),  # type: ignore[arg-type]
    )  # fmt: skip
    task = SubsetsTask(config, load_source(config.source))
    torch.manual_seed(SEED)
    model = task.build().to(DEVICE).train()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4, weight_decay=0.05)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-4, sizes.training + 1, pct_start=0.1)
    start = time.perf_counter()
    for number in range(sizes.training):
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = model(task.batch(number))["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rate.step()
        if time.perf_counter() - start > 60:
            break
    print(
        f"trained {number + 1} steps in {time.perf_counter() - start:.0f} s, {task.validate(model.eval())}", flush=True
    )
    return task, model


def bench_pairs(table: Table, sizes: Sizes, source: str) -> None:
    """How a prediction in bfloat16 keeps its picks: time, and the share of bags whose picks are those of float32."""
    task, model = trained(sizes, source)
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
        model.paired, model.precise, head.precise = paired, precise, head_precise  # type: ignore[assignment, union-attr]
        with use(MODE):
            run = cpl.compile_for_inference(model.select, everything, dtype=dtype)
            found = [set(picks) for picks in run(everything).tolist()]
            same = sum(a == b for a, b in zip(found, expected, strict=True)) / len(expected)
            times = {}
            for batch in sizes.subsets:
                bags = task.examples(batch, 1)[0]
                each = cpl.compile_for_inference(model.select, bags, dtype=dtype, copy=False)
                times[f"ms_batch_{batch}"] = cost(lambda each=each, bags=bags: each._run(bags))[0]  # type: ignore[misc]
        row = {"mechanism": "pairs", "whole": "predict subsets, trained", "without": said, "same": same, **times}
        print(row, flush=True)
        table.rows.append(row)
        table.write()


PARTS: dict[str, Callable[[Table, Sizes], None]] = {
    "predictions": bench_predictions,
    "decoding": bench_decoding,
    "training": bench_training,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kind = torch.cuda.get_device_name().split()[-1].lower() if CUDA else "cpu"
    parser.add_argument("--out", type=Path, default=Path(f"results/kernels-{kind}.json"))
    parser.add_argument("--source", default="digits", help="features to train the subsets model on: an .npz, or digits")
    parser.add_argument("--tiny", action="store_true", help="sizes for Triton's interpreter")
    parser.add_argument("--only", nargs="+", choices=[*PARTS, "pairs"], default=[*PARTS, "pairs"])
    options = parser.parse_args()
    table = Table(options.out)
    sizes = TINY if options.tiny else Sizes()
    works: dict[str, Callable[[Table, Sizes], None]] = {**PARTS, "pairs": partial(bench_pairs, source=options.source)}
    begin = time.perf_counter()
    for name in options.only:
        torch.manual_seed(SEED)
        try:
            works[name](table, sizes)
        except Exception as error:
            traceback.print_exc()
            table.failed[name] = f"{type(error).__name__}: {error}"[:300]
            table.write()
        if CUDA:
            torch.cuda.empty_cache()
        print(f"-- {name}: {time.perf_counter() - begin:.0f} s", flush=True)
    return 1 if table.failed else 0


if __name__ == "__main__":
    sys.exit(main())

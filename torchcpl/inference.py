"""A whole prediction as one CUDA graph: encoder, head and decoding, for fixed shapes or a few sizes padded up to.

At batch 1 kernel launches dominate: hundreds of small kernels, a few microseconds of host time each. A captured graph
replays them in one launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy as shallow
from copy import deepcopy
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from torchcpl.checks import check_choice, check_count, describe
from torchcpl.kernels.pairs import pairs
from torchcpl.potentials import Selection

WARM_UPS = 3  # eager runs before the capture, for compilation and workspaces
AUTOCAST = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)  # layers that autocast computes in the smaller dtype


def compile_for_inference(
    model: Callable[..., Any],
    *example: Any,
    dtype: torch.dtype = torch.float32,
    precise: bool = True,
    copy: bool = True,
    buckets: Sequence[int] | None = None,
) -> Callable[..., Any]:
    """``model(*example)`` for inputs of the example's shapes, on CUDA as one captured graph.

    ``model`` is a module in evaluation mode, a method of one (``model.select``) or a function. Its arguments, one or
    several as in ``head(features, mask)``, are tensors, or tuples, lists, dicts or dataclasses of them, nested,
    and so is its result: ``Potentials``, a ``Selection``. It must not read values back to the host; greedy decoding
    does not.

    In float32 the module's own weights are read, as they are at the time of the call. ``dtype=torch.bfloat16`` or
    ``torch.float16`` runs under autocast, with a copy of the weights made now, once; float16 has three more
    significant bits and ends at 65,504. Rounding that swaps two scores changes a pick, so it matters most
    where scores are computed. Parts of the module can ask for more precision, unless ``precise=False``:

    - ``part.precise = True``, as every ``CPLHead`` says: its layers stay in float32, with TF32 products on CUDA (11
      significant bits; bfloat16 has 8).
    - ``part.paired = True``, for bfloat16: its layers stay in float32 too, but linear ones compute with pairs of
      bfloat16, 16 significant bits at three times the work, and nothing in TF32.

    A function's modules are unknown: it runs under autocast as it is, with its own weights.

    Results are copies; ``copy=False`` returns the graph's own memory, which the next call overwrites.

    ``buckets``, for a ``model(features, mask)`` to a ``Selection``: any number of candidates up to the largest bucket,
    and any batch up to the example's. Inputs are padded up to the next bucket, ``mask`` False, and the selection is cut
    back; each bucket is one graph, captured when it is first needed.

    On the CPU nothing is captured or padded: the model is called with the same checks and without gradients.

    >>> head = torch.nn.Linear(8, 2).eval()
    >>> compile_for_inference(head, torch.zeros(3, 8))(torch.ones(3, 8)).shape
    torch.Size([3, 2])
    """
    compiled = partial(Compiled, model, dtype=dtype, precise=precise, copy=copy)
    return compiled(example) if buckets is None else Bucketed(compiled, example, buckets)


class Bucketed:
    """``model(features, mask)`` for any number of candidates up to the largest of ``buckets``: one graph for each."""

    def __init__(
        self, compile: Callable[[tuple[Any, ...]], Compiled], example: tuple[Any, ...], buckets: Sequence[int]
    ) -> None:
        if not isinstance(buckets, list | tuple) or not buckets:
            raise ValueError(f"buckets: expected numbers of candidates, got {describe(buckets)}")
        for size in buckets:
            check_count("buckets", size, 1)
        _check_bag(example)
        self.buckets: list[int] = sorted(buckets)
        self.batch = len(example[0])
        size = self._bucket(*example[1].shape)
        self.graphs = {size: compile(self._padded(size, *example))}
        # Padding buys graphs that can be replayed; where nothing is captured it would only cost.
        self.pads = example[0].device.type == "cuda"

    def __call__(self, *given: Any) -> Selection:
        _check_bag(given)
        first, size = next(iter(self.graphs.values())), self._bucket(*given[1].shape)
        if not self.pads:
            return first.like(*given)(*given)
        padded = self._padded(size, *given)
        if size not in self.graphs:
            self.graphs[size] = first.like(*padded)
        return _cut(self.graphs[size](*padded), *given[1].shape)

    def _bucket(self, batch: int, n: int) -> int:
        """The bucket of n candidates."""
        if batch > self.batch or n > self.buckets[-1]:
            room = f"at most {self.batch} rows, as the example has, of {self.buckets[-1]} candidates, the last bucket"
            raise ValueError(f"input: expected {room}, got {batch} of {n}")
        return next(bucket for bucket in self.buckets if bucket >= n)

    def _padded(self, size: int, features: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """The arguments padded up to a bucket and to the example's batch."""
        more, rows = size - mask.shape[1], self.batch - len(mask)
        return pad(features, (0, 0, 0, more, 0, rows)), pad(mask, (0, more, 0, rows))


def _check_bag(given: tuple[Any, ...]) -> None:
    features, mask = given if len(given) == 2 else (None, None)
    shaped = isinstance(features, Tensor) and isinstance(mask, Tensor) and mask.dtype == torch.bool
    if not shaped or features.dim() != 3 or mask.shape != features.shape[:2]:  # type: ignore[union-attr]
        raise ValueError(
            "buckets: expected the arguments features (B, N, d) and mask (B, N), True = real, which padding needs, "
            f"got {', '.join(map(describe, given)) or 'none'}"
        )


def _cut(found: Any, batch: int, n: int) -> Selection:
    """The selection of the first ``batch`` rows among ``n`` candidates: padding comes last and is never picked."""
    if not isinstance(found, Selection):
        raise ValueError(f"buckets: expected a model that returns a Selection, got {describe(found)}")
    cut = found.map(lambda part: part[:batch, : min(part.shape[1], n)] if part.dim() > 1 else part[:batch])
    return replace(cut, num_candidates=n)


class Compiled:
    """What :func:`compile_for_inference` returns: call it with inputs like the example."""

    def __init__(
        self, model: Callable[..., Any], given: tuple[Any, ...], dtype: torch.dtype, precise: bool, copy: bool
    ) -> None:
        check_choice("dtype", dtype, (torch.float32, torch.bfloat16, torch.float16))
        check_choice("precise", precise, (True, False))
        check_choice("copy", copy, (True, False))
        if not callable(model):
            raise ValueError(f"model: expected a module or another callable, got {describe(model)}")
        module = _module_of(model)
        if module is not None and module.training:
            raise ValueError("model: expected one in evaluation mode, as after model.eval(), got one in training mode")
        self.copy = copy
        self.dtype = dtype
        devices = {leaf.device for leaf in leaves(given).values() if isinstance(leaf, Tensor)}
        if len(devices) != 1:
            raise ValueError(
                f"example: expected tensors on one device, got {sorted(map(str, devices)) or 'no tensors'}"
            )
        (self.device,) = devices
        self.model = model if dtype == torch.float32 else _cast(model, dtype, precise, self.device.type)
        self.matmul_precision: str | None = None  # precision of float32 products, None for torch's setting
        if dtype == torch.bfloat16 and self.device.type == "cuda":
            paired = precise and module is not None and _inside(module, "paired")
            self.matmul_precision = "highest" if paired else "high"
        self._bind(given)

    def like(self, *example: Any) -> Compiled:
        """The same model, with the same weights, for inputs of another example's shapes."""
        new = shallow(self)
        new._bind(example)
        return new

    def _bind(self, given: tuple[Any, ...]) -> None:
        self.leaves = leaves(given)
        self.captured: Captured | None = None
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                inputs = map_tensors(given, lambda tensor: tensor.detach().clone())  # with the graph's strides
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    for _ in range(WARM_UPS):
                        self._run(inputs)
                torch.cuda.current_stream().wait_stream(side)
                self.captured = Captured(self._run, inputs)

    def __call__(self, *given: Any) -> Any:
        found = leaves(given)
        self._check(found)
        if self.captured is None:
            return self._run(given)
        result = self.captured(found)
        return copied(result) if self.copy else result

    def _run(self, given: tuple[Any, ...]) -> Any:
        half = self.dtype != torch.float32
        # No autocast cache: it would keep weights cast into the graph's memory pool.
        arithmetic = torch.autocast(self.device.type, self.dtype if half else None, enabled=half, cache_enabled=False)
        with torch.inference_mode(), arithmetic, _matmul_precision(self.matmul_precision):
            return self.model(*given)

    def _check(self, found: Mapping[str, Any]) -> None:
        """Raise unless structure, shapes, dtypes, device and constants are those of the example."""
        if found.keys() != self.leaves.keys():
            raise ValueError(
                f"input: expected the example's structure ({', '.join(self.leaves)}), got {', '.join(found)}"
            )
        for place, want in self.leaves.items():
            have = found[place]
            if not isinstance(want, Tensor):
                if type(have) is not type(want) or have != want:
                    raise ValueError(f"{place}: expected {want!r} as in the example, got {describe(have)}")
                continue
            if not isinstance(have, Tensor) or have.shape != want.shape or have.dtype != want.dtype:
                raise ValueError(f"{place}: expected {describe(want)} as in the example, got {describe(have)}")
            if have.device != want.device:
                raise ValueError(f"{place}: expected a tensor on {want.device}, got one on {have.device}")


class Captured:
    """``work`` on inputs like the example as one CUDA graph with static inputs and outputs.

    ``work`` must have run before, so that kernels are compiled and workspaces allocated.
    """

    def __init__(self, work: Callable[[Any], Any], example: Any) -> None:
        inputs = map_tensors(example, lambda tensor: tensor.detach().clone())
        self.leaves = leaves(inputs)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.result = work(inputs)

    def __call__(self, given: Mapping[str, Any]) -> Any:
        """The result for inputs with the leaves ``given``; the next call overwrites it."""
        with torch.no_grad():
            for place, leaf in self.leaves.items():
                if isinstance(leaf, Tensor):
                    leaf.copy_(given[place])
        self.graph.replay()
        return self.result


def _module_of(model: Callable[[Any], Any]) -> nn.Module | None:
    """The module itself or that of a bound method; None for a function."""
    if isinstance(model, partial):
        return _module_of(model.func)
    owner = model if isinstance(model, nn.Module) else getattr(model, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None


def _cast(model: Callable[[Any], Any], dtype: torch.dtype, precise: bool, kind: str) -> Callable[[Any], Any]:
    """The model with a copy of its weights in which those that autocast would cast at every call are ``dtype``.

    Parts that ask for more precision are unchanged and run outside autocast.
    """
    module = _module_of(model)
    if module is None:
        return model
    if isinstance(model, partial):
        return partial(_cast(model.func, dtype, precise, kind), *model.args, **model.keywords)
    twin = deepcopy(module)
    kept = _inside(twin, "precise") if precise else set()
    paired = _inside(twin, "paired") - kept if precise and dtype == torch.bfloat16 else set()
    untouched = {weight for layer in kept | paired for weight in layer.parameters(recurse=False)}
    for layer in twin.modules():
        if layer in kept | paired:
            if type(layer) is nn.Linear and layer in paired:
                high, low, _ = pairs(layer.weight.detach()).chunk(3, -1)
                layer.register_buffer("pairs", torch.cat([high, high, low], -1), persistent=False)  # (out, 3·in)
                layer.forward = partial(_paired_linear, layer)  # type: ignore[method-assign]
            layer.forward = partial(_in_float32, kind, layer.forward)
        elif isinstance(layer, AUTOCAST) and untouched.isdisjoint(layer.parameters()):
            layer.to(dtype)
    if module is model:
        return twin
    call = getattr(twin, model.__name__)
    return partial(_in_float32, kind, call) if twin in kept | paired else call


def _inside(module: nn.Module, mark: str) -> set[nn.Module]:
    """The submodules with that attribute, and all their submodules."""
    marked = [part for part in module.modules() if getattr(part, mark, False) is True]
    return {layer for part in marked for layer in part.modules()}


def _in_float32(kind: str, forward: Callable[..., Any], *given: Any, **named: Any) -> Any:
    given, named = map_tensors((given, named), lambda t: t.float() if t.dtype in (torch.bfloat16, torch.float16) else t)
    with torch.autocast(kind, enabled=False):
        return forward(*given, **named)


def _paired_linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """``layer(x)`` by bfloat16, every x as a pair xₕ + xₗ: 16 significant bits, by one product of triple depth.

    x·w ≈ xₕ·wₕ + xₗ·wₕ + xₕ·wₗ, which is the row [xₕ, xₗ, xₕ] times [wₕ, wₕ, wₗ], summed in float32.
    """
    rows, weight = pairs(x.reshape(-1, layer.in_features)), layer.get_buffer("pairs").t()
    if x.is_cuda and hasattr(torch.ops.aten.mm, "dtype"):  # since torch 2.8
        out = torch.mm(rows, weight, out_dtype=torch.float32)
    else:
        out = rows.float() @ weight.float()
    out = out if layer.bias is None else out + layer.bias
    return out.view(*x.shape[:-1], layer.out_features)


@contextmanager
def _matmul_precision(precision: str | None) -> Iterator[None]:
    """Set the precision of float32 products; unchanged for None, or where torch's newer setting is in use."""
    before = None
    if precision is not None:
        with suppress(RuntimeError):  # where the newer setting is in use
            before = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        if before is not None:
            torch.set_float32_matmul_precision(before)


@torch.no_grad()
def copied(value: Any) -> Any:
    """``value`` with its tensors cloned, those of one dtype by one kernel."""
    found = {place: leaf for place, leaf in leaves(value).items() if isinstance(leaf, Tensor)}
    copies = {place: torch.empty_like(tensor) for place, tensor in found.items()}
    for dtype in {tensor.dtype for tensor in found.values()}:
        alike = [place for place, tensor in found.items() if tensor.dtype == dtype]
        torch._foreach_copy_([copies[place] for place in alike], [found[place] for place in alike])
    return map_leaves(value, lambda place, leaf: copies.get(place, leaf))


def leaves(value: Any) -> dict[str, Any]:
    """The tensors and constants in ``value`` by their path: ``input.features``, ``input[0]``."""
    found: dict[str, Any] = {}
    map_leaves(value, found.setdefault)
    return found


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """``value`` with all its tensors changed."""
    return map_leaves(value, lambda _, leaf: change(leaf) if isinstance(leaf, Tensor) else leaf)


def map_leaves(value: Any, change: Callable[[str, Any], Any], path: str = "input") -> Any:
    """``value`` with ``change(path, leaf)`` for each leaf of its tuples, lists, dicts and dataclasses."""
    if is_dataclass(value) and not isinstance(value, type):
        new = shallow(value)
        for field in fields(value):
            part = map_leaves(getattr(value, field.name), change, f"{path}.{field.name}")
            object.__setattr__(new, field.name, part)
        return new
    if isinstance(value, dict):
        return {key: map_leaves(part, change, f"{path}[{key!r}]") for key, part in value.items()}
    if isinstance(value, tuple | list):
        parts = [map_leaves(part, change, f"{path}[{i}]") for i, part in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts) if isinstance(value, tuple) else parts
    return change(path, value)

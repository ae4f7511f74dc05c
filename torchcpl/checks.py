"""Argument checks with uniform messages, and one switch for those that read tensor values.

Shapes and dtypes are always checked; that costs nothing. Checks of *values* (index range, repeats, NaN) read
the tensors, which on an accelerator makes the host wait for it. They are therefore on for CPU tensors and off
elsewhere, unless :func:`set_validation` says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

DTYPES = {
    "float": (torch.float32, torch.float64, torch.bfloat16, torch.float16),
    "bool": (torch.bool,),
    "long": (torch.int64,),
}

_validation: bool | None = None


def set_validation(on: bool | None) -> None:
    """Turn checks of tensor values on or off everywhere; ``None`` (the default) means on for CPU tensors only."""
    global _validation
    check_choice("on", on, (True, False, None))
    _validation = on


def capturing() -> bool:
    """Whether a CUDA graph is being captured, during which no value may be read back from the device."""
    if torch.compiler.is_compiling() or not torch.cuda.is_initialized():
        return False
    return torch.cuda.is_current_stream_capturing()


def tracing() -> bool:
    """Whether ``torch.compile``, ``export`` or ``jit.trace`` records the operations; sizes may then be symbolic."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined]


def transforming() -> bool:
    """Whether a ``torch.func`` transform (``vmap``, ``grad``, …) is active, inside which tensors may be batched."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def readable() -> bool:
    """Whether tensor values may be read: not while tracing, capturing a CUDA graph or inside ``torch.func``."""
    return not (tracing() or transforming() or capturing())


def validating(tensor: Tensor) -> bool:
    """Whether to check the values of ``tensor``."""
    on = tensor.device.type == "cpu" if _validation is None else _validation
    return on and readable()


def describe(value: Any) -> str:
    """A tensor's dtype and shape, or another value's type and repr, for an error message."""
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    return f"{type(value).__name__} {short(value)}"


def short(value: object) -> str:
    """The repr of a value on one line, at most 60 characters, for an error message."""
    try:
        text = " ".join(repr(value).split())
    except (ValueError, RecursionError):  # an integer of thousands of digits, deeply nested lists
        text = f"a huge {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."


def check_tensor(name: str, value: Any, shape: tuple[int | str, ...], dtype: str, like: Tensor | None = None) -> None:
    """Raise unless ``value`` is a tensor of ``shape`` (names stand for any size) and ``dtype`` (float|bool|long)."""
    if not (
        isinstance(value, Tensor)
        and value.dtype in DTYPES[dtype]
        and value.layout == torch.strided
        and value.dim() == len(shape)
        and all(isinstance(want, str) or have == want for have, want in zip(value.shape, shape, strict=True))
    ):
        wanted = f"a {dtype} tensor of shape ({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"
        raise ValueError(f"{name}: expected {wanted}, got {describe(value)}")
    if like is not None and value.device != like.device:
        raise ValueError(f"{name}: expected a tensor on {like.device}, got one on {value.device}")


def check_finite(name: str, value: Tensor) -> None:
    """Raise if a value is NaN or +inf (−inf is legal: a logit may rule a candidate out)."""
    bad = value.isnan() | (value == torch.inf)
    if bad.any():
        where = tuple(int(i) for i in bad.nonzero()[0])
        what = "NaN" if value[where].isnan() else "+inf"
        raise ValueError(f"{name}: expected no {what}, got {int(bad.sum())} of them, the first at {where}")


def check_order(name: str, order: Tensor, num_candidates: int, mask: Tensor | None = None) -> None:
    """Raise unless every row of ``order`` (B, ..., T) is distinct candidates followed by −1 padding.

    With ``mask`` (B, N), picks of padded candidates are refused too.
    """
    if order.numel() == 0:
        return

    def refuse(bad: Tensor, expected: str) -> None:
        if bad.any():
            where = tuple(int(i) for i in bad.nonzero()[0])
            raise ValueError(f"{name}: expected {expected}, got {int(order[where])} at {where}")

    refuse((order < -1) | (order >= num_candidates), f"indices in [0, {num_candidates}) with −1 padding")
    ended = (order < 0).cummax(-1).values
    refuse(ended & (order >= 0), "no index after the −1 padding")
    ranked, place = order.sort(dim=-1, stable=True)
    repeat = torch.zeros_like(ended)
    repeat.scatter_(-1, place[..., 1:], (ranked[..., 1:] == ranked[..., :-1]) & (ranked[..., 1:] >= 0))
    refuse(repeat, "no repeated index in a row")
    if mask is not None and mask.shape[1]:
        padded = ~mask.gather(1, order.clamp(min=0).flatten(1)).view(order.shape)
        refuse(padded & (order >= 0), "no index of a padded candidate (mask is False there)")


def check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if not isinstance(value, tuple(map(type, choices))) or value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, choices))}, got {short(value)}")


def check_number(name: str, value: Any, expected: str, fits: Callable[[float], bool], optional: bool = False) -> None:
    """Raise unless ``value`` is a real number that ``fits``, which ``expected`` describes, or None if ``optional``."""
    if optional and value is None:
        return
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or (isinstance(value, int) and abs(value) >= 2**63) or not fits(value):
        raise ValueError(f"{name}: expected {expected}, got {describe(value)}")


def check_count(name: str, value: Any, least: int, optional: bool = False) -> None:
    """Raise unless ``value`` is an integer of at least ``least``, or None if ``optional``."""
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not least <= value < 2**63:
        raise ValueError(f"{name}: expected an integer of at least {least}, got {describe(value)}")


def check_generator(generator: Any, device: torch.device) -> None:
    if generator is not None and not (isinstance(generator, torch.Generator) and generator.device.type == device.type):
        raise ValueError(f"generator: expected a torch.Generator on {device} or None, got {describe(generator)}")

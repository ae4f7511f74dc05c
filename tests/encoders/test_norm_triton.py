"""Batch normalisation and what comes after it: the kernel against its plain twin."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from torchcpl.encoders import norm_triton
from torchcpl.encoders.norm import BatchNorm, normalised
from torchcpl.kernels import use

AFTER = [
    pytest.param(False, {}, id="nothing"),
    pytest.param(False, {"relu": True}, id="relu"),
    pytest.param(True, {}, id="add"),
    pytest.param(True, {"relu": True}, id="add-relu"),
    pytest.param(False, {"relu": True, "pool": True}, id="pool"),
]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As long as how often the kernel ran."""
    found: list[int] = []
    kernel = norm_triton.batch_norm
    monkeypatch.setattr(norm_triton, "batch_norm", lambda *given: found.append(1) or kernel(*given))  # type: ignore[func-returns-value]
    return found


def drawn(channels: int, device: torch.device) -> BatchNorm:
    norm = BatchNorm(channels).eval().to(device)
    torch.manual_seed(0)
    with torch.no_grad():
        for moment in (norm.weight, norm.bias, norm.running_mean):
            moment.normal_()  # type: ignore[union-attr]
        norm.running_var.uniform_(0.1, 3)  # type: ignore[union-attr]
    return norm


def images(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=device).to(dtype).to(memory_format=torch.channels_last)


def run(mode: str, norm: BatchNorm, *given: Any, **after: Any) -> Tensor:
    with use(mode), torch.no_grad():
        return normalised(norm, *given, **after)


@pytest.mark.parametrize(("adds", "after"), AFTER)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 5, 8), (1, 64, 9, 6), (3, 128, 4, 4)])
def test_the_kernel_is_its_twin(
    shape: tuple[int, ...], dtype: torch.dtype, adds: bool, after: dict[str, bool], device: torch.device,
    calls: list[int],
) -> None:  # fmt: skip
    norm = drawn(shape[1], device)
    given = [images(*shape, device=device, dtype=dtype) for _ in range(2 if adds else 1)]
    exact = run("plain", drawn(shape[1], device).double(), *(x.double() for x in given), **after)
    plain = run("plain", norm, *given, **after)
    assert not calls
    found = run("triton", norm, *given, **after)
    assert calls
    assert (found.shape, found.dtype) == (plain.shape, dtype)
    assert found.is_contiguous(memory_format=torch.channels_last)
    error, allowed = ((x.double() - exact).abs().max() for x in (found, plain))
    assert error <= 2 * allowed + torch.finfo(dtype).eps * exact.abs().max() * (2 if device.type == "cpu" else 1)
    if device.type == "cuda" and dtype == torch.float32:
        assert found.equal(plain)  # so that it makes no difference whether gradients are wanted


def test_what_is_not_a_number_stays_so(device: torch.device) -> None:
    x = images(1, 2, 6, 6, device=device)
    x[0, 1, 3, 3] = torch.nan
    norm = drawn(2, device)
    for after in ({}, {"relu": True}, {"relu": True, "pool": True}):
        assert run("triton", norm, x, **after).isnan().equal(run("plain", norm, x, **after).isnan())
        assert run("triton", norm, x, **after).isnan().any()


def test_images_laid_out_otherwise_and_gradients_are_left_to_torch(device: torch.device, calls: list[int]) -> None:
    norm, x = drawn(4, device), images(2, 4, 5, 5, device=device)
    expected = run("plain", norm, x, relu=True)
    for other in (x.contiguous(), images(2, 4, 5, 10, device=device)[..., ::2].copy_(x)):
        torch.testing.assert_close(run("triton", norm, other, relu=True), expected)
    with use("triton"):
        normalised(norm, x, relu=True).sum().backward()
    assert norm.weight.grad is not None
    for after in ({"pool": True}, {"relu": True, "pool": True}):  # no case of the kernel's, in the second with ``add``
        given = (x, x) if "relu" in after else (x,)
        torch.testing.assert_close(run("triton", norm, *given, **after), run("plain", norm, *given, **after))
    norm.weight.data = torch.randn(8, device=device)[::2]
    torch.testing.assert_close(run("triton", norm, x), run("plain", norm, x))
    bare = BatchNorm(4, affine=False).eval().to(device)
    torch.testing.assert_close(run("triton", bare, x), run("plain", bare, x))
    assert not calls
    assert run("triton", norm, x[:0], relu=True).shape == (0, 4, 5, 5)


def test_it_runs_where_no_gradients_can_be_wanted(device: torch.device, calls: list[int]) -> None:
    norm = drawn(4, device).requires_grad_(False)
    with use("triton"):
        norm(images(2, 4, 5, 5, device=device))
    assert calls


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_nothing_that_is_recorded_or_has_tangents_goes_to_the_kernel(device: torch.device, calls: list[int]) -> None:
    norm, x = drawn(4, device).requires_grad_(False), images(2, 4, 5, 5, device=device)
    expected = run("plain", norm, x)
    with use("triton"), torch.no_grad():
        traced = torch.jit.trace(norm, x, check_trace=False)
        torch.testing.assert_close(traced(x), expected)
        torch.testing.assert_close(torch.fx.symbolic_trace(nn.Sequential(norm))(x), expected)
        with forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(norm(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
    assert tangent is not None
    slope = (norm.weight / (norm.running_var + norm.eps).sqrt())[None, :, None, None].expand_as(x)  # type: ignore[operator]
    torch.testing.assert_close(tangent, slope)
    assert not calls

"""Numbers as pairs of bfloat16: the kernel against its plain twin."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from torchcpl.kernels import pairs_triton, use
from torchcpl.kernels.pairs import pairs, plain_pairs


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (7, 1024), (40, 33), (0, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "part"])
def test_the_kernel_is_its_twin(
    device: torch.device, shape: tuple[int, int], dtype: torch.dtype, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, width = shape
    x = (torch.randn(rows, 2 * width) * torch.logspace(-6, 3, 2 * width)).to(device, dtype)
    given = {
        "contiguous": x[:, :width].contiguous(),
        "transposed": x[:, :width].t().contiguous().t(),
        "part": x[:, width:],
    }[layout]
    calls: list[int] = []
    kernel = pairs_triton.pairs
    monkeypatch.setattr(pairs_triton, "pairs", lambda x: calls.append(1) or kernel(x))  # type: ignore[func-returns-value]
    with use("triton"):
        found = pairs(given)
    assert calls
    assert found.shape == (rows, 3 * width)
    high, low, again = found.double().chunk(3, -1)
    assert again.equal(high)
    if device.type == "cuda":
        assert found.equal(plain_pairs(given))
    else:  # Triton's interpreter cuts digits off where a GPU rounds: a pair of two such parts holds fourteen
        assert ((high + low - given.double()).abs() <= 2.0**-14 * given.abs()).all()
        assert ((high - given.double()).abs() <= 2.0**-7 * given.abs()).all()


def test_the_switch_turns_the_kernel_off(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs_triton, "pairs", None)
    with use("plain"):
        assert pairs(torch.ones(2, 3, device=device)).shape == (2, 9)


def test_a_pair_holds_sixteen_digits(device: torch.device) -> None:
    x = torch.randn(1000, 1, device=device)
    high, low, again = plain_pairs(x).double().unbind(-1)
    assert again.equal(high)
    assert ((high + low - x[:, 0].double()).abs() <= 2.0**-16 * x[:, 0].abs()).all()
    assert (high - x[:, 0].double()).abs().max() > 2.0**-10  # so that the bound above can fail


def test_what_is_infinite_stays_so(device: torch.device) -> None:
    x = torch.tensor([[torch.inf, -torch.inf, torch.nan, 1.0]], device=device)
    expected = torch.tensor([[torch.inf, -torch.inf, torch.nan, 1.0]])
    for mode in ("plain", "triton"):
        with use(mode), np.errstate(invalid="ignore"):  # the interpreter is NumPy
            high, low, _ = pairs(x).float().cpu().chunk(3, -1)
        torch.testing.assert_close(high, expected, equal_nan=True)
        assert low.tolist() == [[0.0, 0.0, 0.0, 0.0]]

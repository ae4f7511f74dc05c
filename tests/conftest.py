"""Shared fixtures: where the real data lies, if it is there; and one hypothesis profile for all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

# One thread, here and in the processes that tests start: what is tested is small, and threads that wait for a busy core
# take longer than the work.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

# Kernels run on a GPU where there is one, and in Triton's interpreter where there is none.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# The same examples on every machine and every run; no verdict on how long one takes.
settings.register_profile(
    "torchcpl",
    deadline=None,
    derandomize=True,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("torchcpl")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def validated_distributions() -> None:
    """torch.compile turns the checks of all distributions off for the rest of the process; each test has them on."""
    torch.distributions.Distribution.set_default_validate_args(True)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data: ``$TORCHCPL_DATA``, or ``shared/data`` beside the checkout."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    root = Path(os.environ.get("TORCHCPL_DATA", default))
    if not root.is_dir():
        pytest.skip(f"no real data at {root} (set TORCHCPL_DATA)")
    return root

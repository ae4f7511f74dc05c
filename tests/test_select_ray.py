"""The two stages of docs/piles.md on a real Ray."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ray = pytest.importorskip("ray")
pytest.importorskip("pyarrow")
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR",
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}},
    )  # fmt: skip
    yield
    ray.shutdown()


@pytest.mark.filterwarnings("ignore")
def test_two_stages_of_the_page_pick_one_of_every_group(cluster: None) -> None:
    page = (ROOT / "docs" / "piles.md").read_text()
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(block, names)
    rng = np.random.default_rng(0)
    group = rng.permutation(np.arange(1200) % 8)
    x = (rng.normal(size=(1200, 6)) + 12 * rng.normal(size=(8, 6))[group]).astype(np.float32)
    rows = ray.data.from_numpy(x).rename_columns({"data": "vector"})
    rows = rows.zip(ray.data.from_items([{"id": i} for i in range(1200)]))
    found = names["two_stages"](rows, size=8, batch_size=300)
    assert len(found["id"]) == 8
    np.testing.assert_array_equal(found["vector"], x[found["id"]])
    assert sorted(group[found["id"]]) == list(range(8))

"""Many workers: a real Ray on this machine, one of whose workers is killed in the middle."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from test_predict import train_subsets

from torchcpl.cli import main
from torchcpl.predict import Predictor, predict_file

ray = pytest.importorskip("ray")
pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


class Mortal(Predictor):
    """Kills the worker that meets row 20 for the first time."""

    def __call__(self, batch: Mapping[str, NDArray[Any]] | NDArray[Any]) -> dict[str, NDArray[Any]]:
        dead = Path(self.run) / "dead"
        if 20 in np.asarray(batch["id"]) and not dead.exists():  # type: ignore[index, call-overload]
            dead.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(batch)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    here = Path(__file__).parent
    found = {"PYTHONPATH": f"{here}:{here.parent}", "OMP_NUM_THREADS": "1"}
    ray.init(
        num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level="ERROR",
        runtime_env={"env_vars": found},
    )  # fmt: skip
    yield
    ray.shutdown()


@pytest.mark.filterwarnings("ignore")
def test_a_killed_worker_loses_no_row(tmp_path: Path, cluster: None) -> None:
    run = train_subsets(tmp_path / "run")
    rng = np.random.default_rng(0)
    bags = [rng.random((int(n), 64)).tolist() for n in rng.integers(2, 20, 40)]
    (tmp_path / "bags").mkdir()
    for part in range(4):
        rows = range(10 * part, 10 * part + 10)
        table = pa.table({"id": rows, "bag": [bags[i] for i in rows]})
        parquet.write_table(table, tmp_path / "bags" / f"{part}.parquet")
    options: dict[str, Any] = {"batch_size": 5, "workers": 2}
    alone = predict_file(Predictor(run, column="bag"), tmp_path / "bags", None, **options)
    assert [record["id"] for record in alone] == list(range(40))
    together = predict_file(Mortal(run, column="bag"), tmp_path / "bags", None, engine="ray", **options)
    assert int((run / "dead").read_text()) != os.getpid()
    assert together == alone


@pytest.mark.filterwarnings("ignore")
def test_items_of_a_vector_column_are_grouped(tmp_path: Path, cluster: None) -> None:
    run = train_subsets(tmp_path / "run")
    items = np.random.default_rng(0).random((30, 64)).tolist()
    table = pa.table({"bag": [i % 3 for i in range(30)], "vector": items})
    parquet.write_table(table, tmp_path / "items.parquet")
    predictor = Predictor(run, column="vector", group="bag")
    alone = predict_file(predictor, tmp_path / "items.parquet", None)
    together = predict_file(predictor, tmp_path / "items.parquet", None, engine="ray")
    picks = {record["bag"]: record["picks"] for record in alone}
    assert picks == {record["bag"]: record["picks"] for record in together}
    assert sorted(picks) == [0, 1, 2]
    out = tmp_path / "picks.json"
    assert main(["predict", str(run), str(tmp_path / "items.parquet"), "--column", "vector", "--out", str(out)]) == 2
    assert not out.exists()

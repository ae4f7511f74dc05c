"""A real Spark on this machine runs a Predictor as it is."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from test_predict import train_subsets

from torchcpl.predict import Predictor

pytest.importorskip("pyspark")
pytest.importorskip("pandas")


@pytest.mark.filterwarnings("ignore")
def test_spark_makes_the_picks_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyspark.ml.functions import predict_batch_udf
    from pyspark.sql import SparkSession
    from pyspark.sql.functions import col
    from pyspark.sql.types import StructType

    run = str(train_subsets(tmp_path / "run"))
    bags = np.random.default_rng(0).random((12, 7, 64), dtype=np.float32)
    here = Path(__file__).parent
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    monkeypatch.setenv("PYTHONPATH", f"{here}:{here.parent}")
    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    try:
        select = predict_batch_udf(
            lambda: Predictor(run, device="cpu"),
            return_type=StructType.fromDDL(
                "indices array<long>, lengths long, log_prob float, step_log_prob array<float>"
            ),
            batch_size=5,
            input_tensor_shapes=[[7, 64]],
        )
        rows = [(i, bag.ravel().tolist()) for i, bag in enumerate(bags)]
        data = spark.createDataFrame(rows, "id long, bag array<float>").repartition(3)
        found = {row.id: row.picked for row in data.select("id", select(col("bag")).alias("picked")).collect()}
    finally:
        spark.stop()
    alone = Predictor(run, device="cpu")(bags)
    assert sorted(found) == list(range(12))
    for i, row in found.items():
        assert row.indices == alone["indices"][i].tolist()
        assert row.lengths == alone["lengths"][i]
        np.testing.assert_allclose(row.log_prob, alone["log_prob"][i], rtol=1e-5)
        np.testing.assert_allclose(row.step_log_prob, alone["step_log_prob"][i], rtol=1e-4, atol=1e-6)

"""Ablations: variants of a recipe, trained where missing, with their scores and costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from torchcpl.cli import main
from torchcpl.tasks.ablation import plan_variants, read_variants
from torchcpl.tasks.registry import TASKS
from torchcpl.tasks.subsets.task import SubsetsConfig

TINY = [
    "--recipe",
    "demo",
    "--epochs",
    "1",
    "--bags",
    "8",
    "--batch-size",
    "4",
    "--validation-bags",
    "8",
    "--dim",
    "8",
    "--ffn",
    "8",
    "--hidden",
    "4",
    "--max-len",
    "6",
    "--max-items",
    "16",
    "--max-classes",
    "4",
    "--min-per-class",
    "2",
    "--max-per-class",
    "4",
]


def test_variants_are_trained_once_and_compared_with_the_base(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["ablate", "subsets", *TINY, "--runs", str(tmp_path), "--seeds", "0", "1", "--only", "distances too"]
    assert main([*command, "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert [row["method"] for row in first["rows"]] == ["base", "distances too"]
    for row in first["rows"]:
        assert {"clu_f1", "clu_f1_std", "decode_ms", "ms", "step_ms"} <= row.keys()
        assert row["seeds"] == [0, 1]
        runs = [tmp_path / f"{row['method'].replace(' ', '-')}-s{seed}" for seed in (0, 1)]
        best = [json.loads((run / "best" / "state.json").read_text())["best"]["value"] for run in runs]
        assert row["chosen"] == pytest.approx(sum(best) / 2)
    assert first["rows"][1]["changed"] == "kind = coverage, distances = also"
    assert (tmp_path / "ablation.svg").stat().st_size > 1000
    weights = tmp_path / "distances-too-s1" / "best" / "model.safetensors"
    before = weights.stat().st_mtime_ns
    assert main([*command, "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert weights.stat().st_mtime_ns == before
    assert [row["clu_f1"] for row in again["rows"]] == [row["clu_f1"] for row in first["rows"]]


def test_a_file_has_variants(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('["no dropout"]\ndropout = 0.0\n')
    assert read_variants(file) == {"no dropout": {"dropout": 0.0}}
    planned = plan_variants(SubsetsConfig(dropout=0.3), read_variants(file), [0, 3], tmp_path)
    assert {path.name: (config.dropout, config.seed) for path, config in planned.items()} == {  # type: ignore[attr-defined]
        "base-s0": (0.3, 0), "base-s3": (0.3, 3), "no-dropout-s0": (0.0, 0), "no-dropout-s3": (0.0, 3),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [("dropout = 0.0\n", r"expected a \[table\] a variant, got the option dropout"), ("", "got none")],
)
def test_a_file_without_variants_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_variants(tmp_path / "mine.toml")


def test_errors_name_the_variant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="variant wide: SubsetsConfig has no option 'width'"):
        plan_variants(SubsetsConfig(), {"wide": {"width": 3}}, [0], tmp_path)
    alike = {"no dropout": {"dropout": 0.0}, "no-dropout": {"dropout": 0.1}}
    with pytest.raises(ValueError, match="variant no-dropout: expected a run in a folder of its own, got another in"):
        plan_variants(SubsetsConfig(), alike, [0], tmp_path)
    with pytest.raises(ValueError, match="variant base: expected a run in a folder of its own"):
        plan_variants(SubsetsConfig(), {}, [0, 0], tmp_path)
    assert main(["ablate", "subsets", *TINY, "--runs", str(tmp_path / "x"), "--only", "nothing"]) == 2
    assert "only: expected some of" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("name", [name for name, benchmark in TASKS.items() if benchmark.variants])
def test_every_variant_is_a_configuration(name: str, tmp_path: Path) -> None:
    benchmark = TASKS[name]
    planned = plan_variants(benchmark.config(), benchmark.variants, [0], tmp_path)
    assert len(planned) == 1 + len(benchmark.variants)
    assert len({repr(config) for config in planned.values()}) >= len(benchmark.variants)

"""The command line as a user meets it: real runs on tiny settings, and what is said when something is wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torchcpl
from torchcpl import completion
from torchcpl.cli import _parser, main
from torchcpl.tasks.subsets.task import SubsetsConfig, SubsetsTask

TINY = [
    "--epochs",
    "2",
    "--bags",
    "16",
    "--batch-size",
    "8",
    "--validation-bags",
    "12",
    "--dim",
    "16",
    "--layers",
    "1",
    "--heads",
    "2",
    "--ffn",
    "16",
    "--hidden",
    "8",
    "--permutations",
    "2",
    "--max-items",
    "24",
    "--min-per-class",
    "2",
    "--max-per-class",
    "6",
    "--max-classes",
    "5",
    "--device",
    "cpu",
]


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What is said of a command that must fail: with status 2, and without a traceback."""
    try:
        status = main(arguments)
    except SystemExit as stop:  # argparse's own
        status = int(stop.code or 0)
    assert status == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err
    return err


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds of two methods, one of them held out."""
    folder = tmp_path_factory.mktemp("runs")
    for method, seed in (("cpl", 0), ("cpl", 1), ("threshold", 0)):
        arguments = ["train", "subsets", "--method", method, "--seed", str(seed), "--held-out", "0.2"]
        assert main([*arguments, "--run", str(folder / f"{method}-s{seed}"), *TINY]) == 0
    return folder


def test_evaluate_says_what_the_checkpoint_reached(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(runs / "cpl-s0")]) == 0
    assert "CluF1" in capsys.readouterr().out
    (row,) = json.loads((runs / "cpl-s0" / "evaluation.json").read_text())["rows"]
    best = json.loads((runs / "cpl-s0" / "best" / "state.json").read_text())["best"]["metrics"]
    assert row["clu_f1"] == pytest.approx(best["reported_clu_f1"], abs=1e-6)


def test_table_compares_methods_over_seeds(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "table.json"
    paths = [str(runs / name) for name in ("cpl-s0", "cpl-s1", "threshold-s0")]
    assert main(["table", "subsets", *paths, "--rule", "held-out", "--out", str(out)]) == 0
    written = json.loads(out.read_text())
    assert {"command", "commit", "device", "versions", "seeds", "rows"} <= written.keys()
    rows = {row["method"]: row for row in written["rows"]}
    assert list(rows) == ["k-Means (oracle k)", "BCE", "CPL"]
    assert {"clu_rec", "clu_prec", "clu_f1", "card_err", "ms", "clu_f1_std"} <= rows["CPL"].keys()
    expected = []
    for name in ("cpl-s0", "cpl-s1"):
        history = [json.loads(line)["metrics"] for line in (runs / name / "history.jsonl").read_text().splitlines()]
        expected.append(max(history, key=lambda metrics: metrics["clu_f1"])["reported_clu_f1"])
    assert rows["CPL"]["clu_f1"] == pytest.approx(sum(expected) / 2)
    capsys.readouterr()
    assert main(["table", "subsets", str(out), "--markdown"]) == 0  # a written table can be shown again
    assert "| CPL" in capsys.readouterr().out


def test_a_run_without_its_weights_still_has_its_scores(runs: Path, tmp_path: Path) -> None:
    archived = tmp_path / "archived"

    shutil.copytree(runs / "cpl-s0", archived, symlinks=True)
    for weights in archived.rglob("model.safetensors"):
        weights.unlink()
    out = tmp_path / "table.json"
    assert main(["table", "subsets", str(archived), "--out", str(out)]) == 0
    assert json.loads(out.read_text())["rows"][-1]["ms"] is None


def test_bench_times_encoder_and_decoding_apart(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    arguments = ["--batches", "1", "4", "--repeats", "2", "--examples", "4", "--out", str(out)]
    assert main(["bench", "subsets", str(runs / "cpl-s0"), *arguments]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["batch"] for row in rows] == [1, 4]
    assert all(row["encoder_ms"] > 0 and row["decode_ms"] > 0 for row in rows)


def test_a_finished_run_is_not_trained_again(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (runs / "cpl-s0" / "history.jsonl").read_text()
    arguments = ["train", "subsets", "--method", "cpl", "--held-out", "0.2", "--run", str(runs / "cpl-s0"), *TINY]
    assert main(arguments) == 2
    assert "cpl-s0" in capsys.readouterr().err
    assert main([*arguments, "--resume"]) == 0
    assert (runs / "cpl-s0" / "history.jsonl").read_text() == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "subsets", "--source", "nowhere.npz"], "nowhere.npz"),
        (["train", "subsets", "--lr", "-1"], "lr"),
        (["train", "subsets", "--recipe", "paper", "--config", "x.toml"], "not allowed with"),
        (["train", "subsets", "--colour", "red"], "--colour"),
        (["train", "nothing"], "invalid choice"),
        (["evaluate", "nowhere"], "nowhere"),
        (["table", "subsets", "nowhere"], "nowhere"),
        (["train", "subsets", "--config", "missing.toml"], "missing.toml"),
        (["train", "subsets", "--source", "cifar100"], "root"),
    ],
)
def test_errors_are_one_line_and_name_the_culprit(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert said in refused(arguments, capsys)


def test_out_of_memory_says_what_to_lower(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    many = ["--bags", str(10**13), "--batch-size", str(10**13)]
    said = refused(["train", "subsets", "--run", str(tmp_path / "run"), *TINY, *many], capsys)
    assert "out of memory: lower --batch-size" in said
    assert said.count("\n") == 1
    said = refused(["train", "subsets", "--run", str(tmp_path / "wide"), *TINY, "--dim", str(10**9)], capsys)
    assert "--dim" in said
    assert not (tmp_path / "wide").exists()


def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))"
    script = f"{limit}; import sys; from torchcpl.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", script, "train", "subsets", "--run", str(tmp_path / "run"), *TINY]
    environment = os.environ | {"PYTHONPATH": str(Path(torchcpl.__file__).parents[1])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "model.safetensors" in done.stderr
    assert done.stderr.count("\n") == 1


def test_more_classes_or_members_than_there_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option, most in (("--max-classes", 10), ("--max-per-class", 146)):
        said = refused(["train", "subsets", "--run", str(tmp_path / "run"), *TINY, option, "3000"], capsys)
        assert f"{option[2:].replace('-', '_')}: expected at most {most}" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("verb", ["evaluate", "table", "bench", "toy"])
def test_json_is_all_that_is_printed(verb: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "out.json")]
    arguments = {
        "evaluate": ["evaluate", str(runs / "cpl-s0")],
        "table": ["table", "subsets", str(runs / "cpl-s0"), *out],
        "bench": [
            "bench",
            "subsets",
            str(runs / "cpl-s0"),
            "--batches",
            "1",
            "--repeats",
            "1",
            "--examples",
            "1",
            *out,
        ],
        "toy": ["toy"],
    }
    capsys.readouterr()
    assert main([*arguments[verb], "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["rows"]
    if verb in ("table", "bench"):
        assert printed == json.loads((tmp_path / "out.json").read_text())


def test_bench_offers_no_training_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "subsets", "--help"])
    said = capsys.readouterr().out
    assert "--epochs" not in said
    assert "--lr" not in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_cpu_trains_the_small_recipe_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen: list[SubsetsConfig] = []

    def stop(task: SubsetsTask, *_: object, **__: object) -> None:
        chosen.append(task.config)
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torchcpl.cli.fit", stop)
    assert main(["train", "subsets", "--method", "cpl", "--source", "digits"]) == 130
    assert "--recipe demo" in capsys.readouterr().err
    assert main(["train", "subsets", "--epochs", "7"]) == 130
    assert [config.dim for config in chosen] == [64, 512]


def test_a_run_whose_metric_was_never_finite(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    best = {"epoch": 1, "step": 2, "value": None, "metrics": {"clu_f1": None}}
    monkeypatch.setattr("torchcpl.cli.fit", lambda *_, **__: {"metric": "clu_f1", "best": best, "seconds": 3.0})
    assert main(["train", "subsets", "--source", "digits", *TINY]) == 0
    assert "clu_f1 – at epoch 1 of 2" in capsys.readouterr().out


def test_the_module_runs() -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(torchcpl.__file__).parents[1])}
    command = [sys.executable, "-m", "torchcpl.cli", "--version"]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert said.startswith(f"torchcpl {torchcpl.__version__}, torch {torch.__version__}, ")


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--version"], ["--help"], ["train", "--help"], ["train", "subsets", "--help"]):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 0
    out = capsys.readouterr().out
    assert torchcpl.__version__ in out
    assert "--early-stop-weight" in out
    assert "(default: )" not in out


@pytest.mark.parametrize(
    ("verb", "takes_runs"), [("train", False), ("ablate", False), ("table", True), ("bench", True)]
)
def test_usage_names_runs_where_they_are_taken(verb: str, takes_runs: bool, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([verb, "subsets", "--help"])
    assert ("RUN" in capsys.readouterr().out.splitlines()[0]) == takes_runs


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("tr", {"train"}),
        ("train sub", {"subsets"}),
        ("train subsets --res", {"--resume"}),
        ("report paths --exp", {"--explore"}),
    ],
)
def test_completion(typed: str, offered: set[str]) -> None:
    script = completion.script(_parser())
    words = " ".join(f"'{word}'" for word in ["torchcpl", *typed.split()])
    count = len(typed.split())
    line = f'{script}\nCOMP_WORDS=({words}); COMP_CWORD={count}; _torchcpl; echo "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == offered

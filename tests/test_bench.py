"""The page of measurements says what the files say."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench import baskets, core, hypotheses, performance, piles, speed
from bench.claims import claims, find, ratio
from bench.timing import NEVER, Row, resident_peak, run_parts
from torchcpl.config import override
from torchcpl.encoders.distances import DistanceModel
from torchcpl.estimator import save_model
from torchcpl.files import read_json, write_json
from torchcpl.provenance import run_info
from torchcpl.select import load_model
from torchcpl.tables import summarise


def row(work: str, variant: str, ms: float, **more: Any) -> dict[str, Any]:
    sizes = {"B": 64, "N": 1024, "T": 30, "dtype": "float32", "peak_mib": 1.0}
    return {"work": work, "variant": variant, **sizes, "ms": ms, **more}


ROWS = [
    row("copy", "torch", 2.0, B=1, N=2**29, T=0, mib=4096.0),
    row("greedy", "kernel, W given", 0.05, mib=7.5),
    row("greedy", "kernel, W given, captured", 0.025, mib=7.5),
    row("greedy", "kernel, W given", 0.3, B=1024, mib=120.0),
    row("greedy", "per-row loop, W given", 80.0, mib=7.5),
    row("predict subsets", "encoder, eager", 3.0, B=1, N=160, T=10),
    row("predict subsets", "cpl, eager", 4.0, B=1, N=160, T=10),
    row("predict subsets", "threshold, eager", 2.0, B=1, N=160, T=10),
]


def test_a_row_is_found_by_all_that_is_asked() -> None:
    assert find(ROWS, "greedy", "kernel, W given", B=1024) is ROWS[3]
    assert find(ROWS, "greedy", "kernel, W given", B=1024, dtype="bfloat16") is None
    assert ratio(ROWS[4], ROWS[1]) == pytest.approx(1600)
    assert ratio(None, ROWS[1]) is None


def test_claims_are_judged() -> None:
    verdicts = {claim["claim"]: claim for claim in claims(ROWS)}
    met = verdicts["greedy, 30 of 1,024, batch 64: per-row loop over the kernel"]
    assert (met["value"], met["asked"], met["verdict"]) == (1600.0, "≥ 1000", "met")
    missed = verdicts["greedy, 30 of 1,024, batch 1,024, W given: ms"]
    assert (missed["value"], missed["asked"], missed["verdict"]) == (0.3, "≤ 0.2", "not met")
    assert verdicts["subsets, batch 1: cpl over threshold, both captured"]["verdict"] == "not measured"


def test_the_page_is_made_of_the_numbers(tmp_path: Path) -> None:
    info = {**run_info(seeds=[0], device="cpu"), "device": "Some GPU"}
    failed = {"loss": "RuntimeError: too large"}
    write_json(tmp_path / "speed-gpu.json", {**info, "rows": ROWS, "claims": claims(ROWS), "failed": failed})
    text, figures = performance.page(tmp_path)
    assert list(figures) == ["speed-gpu"]
    assert "## Some GPU" in text
    assert "**Failed before its end: loss** (RuntimeError: too large)." in text
    assert "of which the encoder is 75%; threshold takes 0.50×" in text
    assert "eager, it takes 2.0× as long as its captured graph" in text
    assert "| greedy | kernel, W given | batch 64, 30 of 1,024, float32 | 7.5 | 0.00366 | 0.05 | 13.7× |" in text
    assert "0.05 ms by *kernel, W given*; 1,600× for *per-row loop, W given*" in text
    assert "core" not in figures
    assert "<svg" in performance.render(figures["speed-gpu"], "svg").decode()


def test_a_part_that_fails_is_named_and_takes_no_row_along(capsys: pytest.CaptureFixture[str]) -> None:
    def bad() -> Iterator[Row]:
        yield {"ms": 2}
        raise RuntimeError("too large")

    written: list[Any] = []
    status = run_parts({"bad": bad, "good": lambda: [{"ms": 1}]}, lambda *all: written.append(repr(all)))
    assert status == 1
    assert written[-1] == "([{'ms': 2}, {'ms': 1}], {'bad': 'RuntimeError: too large'})"
    assert "bad: RuntimeError: too large" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_is_that_of_the_work_alone() -> None:
    del (before := [torch.ones(2**27)])[0]  # 512 MiB, which are given back
    assert resident_peak(lambda: torch.ones(2**24)) == pytest.approx(64, abs=8)
    assert before == []


def test_a_prediction_is_measured_with_what_is_changed() -> None:
    kernels = pytest.importorskip("bench.kernels", reason="needs triton", exc_type=ImportError)
    model = speed.subsets_model()
    assert model.method.knob == NEVER
    make = kernels.predicting(model.select, speed.random_bags(1, 12), torch.float32)
    assert make()().lengths.tolist() == [10]
    with kernels.changed((type(model), "decode", lambda *_: "changed")):
        assert make()() == "changed"
    assert kernels.lines_of("kernels/streams.py") > 10
    with pytest.raises(KeyError, match="no_such_function"):
        kernels.lines_of("kernels/streams.py", "no_such_function")


def test_loops_are_the_losses_they_are_measured_against() -> None:
    unary, stop, keys, values = core.potentials(3, 6, 4)
    target = core.distinct(3, 6, 2)
    pot = core.cpl.Potentials(unary, stop.fill_(0.5), core.cpl.LowRank(keys, values))
    W = list(core.dense_from_factors(keys, values))
    assert core.loop_ordered_nll(unary, stop, W, target) == pytest.approx(core.cpl.ordered_nll(pot, target).item())
    one = target[:, :1]  # which has one order
    assert core.loop_subset_nll(unary, stop, W, one) == pytest.approx(core.cpl.subset_nll(pot, one).item())


def test_ways_to_find_several_answers_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hypotheses, "REFERENCE", 40)
    hypotheses.main(["--out", str(tmp_path / "ways.json"), "--width", "8", "--steps", "1"])
    found = read_json(tmp_path / "ways.json")
    assert [row["way"] for row in found["sets"]][:2] == ["cpl.hypotheses", "beams, merged"]
    assert all(0 <= row["covered"] <= 1.001 for name in ("sets", "paths") for row in found[name])


def test_baskets_go_on_from_their_file(tmp_path: Path) -> None:
    """Seeds are added one at a time as if they were summarised together; what has other options is measured again."""
    (tmp_path / "toys.train.txt").write_text("0 1\n")
    jobs = [job for job in baskets.plan(tmp_path, 3, []) if job.config.method == "dpp"]
    scores = [{"log_likelihood": value, "auc": None} for value in (-3.0, -1.0, -2.5)]
    for job, found in zip(jobs, scores, strict=True):
        results = baskets.Results(tmp_path / "found.json", jobs)
        assert [results.has(other) for other in jobs] == [other.config.seed < job.config.seed for other in jobs]
        results.add(job, {"scores": found})
        results.write()
    (row,) = read_json(tmp_path / "found.json")["rows"]
    assert (row["seeds"], row["origin"], row["options"]) == ([0, 1, 2], [0, 0, 0], {"method": "dpp"})
    found = summarise(scores)
    assert found.keys() <= row.keys()
    assert {name: row[name] for name in found} == pytest.approx(found)
    changed = [replace(job, config=override(job.config, lr=1.0)) for job in jobs]
    assert not any(map(baskets.Results(tmp_path / "found.json", changed).has, changed))


def test_a_model_that_leaves_sets_out_goes_on_from_one_that_never_saw_them(tmp_path: Path) -> None:
    for name in ("general", "a+b+c", "a+b", "c"):
        (tmp_path / f"{name}.safetensors").touch()
    for name, before in {"general": "general", "a": "a+b", "b+a": "a+b", "c": "c", "b+c": "a+b+c"}.items():
        assert piles.begun(tmp_path, name).stem == before
    with pytest.raises(SystemExit, match="--init: expected a model for d in"):
        piles.begun(tmp_path, "d")


def test_another_model_of_the_package_leaves_the_twins_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the mean of those given, calibrated as the one before, and measured afresh."""
    monkeypatch.setattr(piles, "BAGS", 2)
    monkeypatch.setattr(piles, "CLEAN", ((1, 12), (2, 8)))
    (tmp_path / "sets").mkdir()
    rng = np.random.default_rng(0)
    rows = {"train": rng.normal(size=(600, 3)), "test": rng.normal(size=(600, 3))}
    labels = {f"{part}_labels": np.repeat(np.arange(20), 30) for part in rows}
    np.savez(tmp_path / "sets" / "made.npz", **rows, **labels, class_names=np.arange(20).astype(str))
    nets = [DistanceModel(8, 2, 2, 4) for _ in range(2)]
    training = [dict.fromkeys(("models", "config", "step", "seconds", "info"), i) for i in range(2)]
    for i, net in enumerate(nets):
        save_model(tmp_path / f"{i}/general.safetensors", net, recipe="general")
        write_json(tmp_path / f"{i}/training.json", training[i])
    kept = {
        "calibration": {"temperature": 0.5, "bias": 0.25}, "sets": {"twin": 1, "digits": 2}, "any": {"twin": 3},
        "training": training[:1], "reliability": 4,
    }  # fmt: skip
    write_json(tmp_path / "old.json", kept)
    arguments = "--source sets --out 0 1 --keep old.json --summary new.json --weights w.safetensors"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["piles", *arguments.split()])
    piles.main()
    found = read_json(tmp_path / "new.json")
    assert (found["sets"]["twin"], found["any"]["twin"], found["reliability"]) == (1, 3, 4)
    assert found["sets"].keys() == {"twin", "digits", "made, unseen"}
    assert 0 < found["sets"]["digits"]["clu_f1"] <= 1
    assert found["clean"].keys() == {"1 of 12", "2 of 8"}
    assert found["training"] == training
    made = load_model(tmp_path / "w.safetensors")[0].state_dict()
    torch.testing.assert_close(made["calibration"], torch.tensor([0.5, 0.25]), rtol=1e-3, atol=0)
    first, second = (net.state_dict()["ends.weight"] for net in nets)
    torch.testing.assert_close(made["ends.weight"], (first + second) / 2, rtol=2e-3, atol=2e-4)

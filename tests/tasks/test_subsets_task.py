"""The subsets task: every method trains, validation is brute force's, and choices are made where they should be."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

import torchcpl as cpl
from torchcpl.tasks.subsets.data import load_source, split_classes
from torchcpl.tasks.subsets.task import METHODS, SubsetsConfig, SubsetsModel, SubsetsTask

SMALL: dict[str, Any] = {
    "epochs": 1, "bags": 64, "batch_size": 16, "validation_bags": 20, "dim": 16, "layers": 1, "heads": 2, "ffn": 16,
    "hidden": 8, "permutations": 2, "max_items": 24, "min_per_class": 2, "max_per_class": 6, "max_classes": 5,
    "max_len": 8, "standardise": True, "dropout": 0.0, "device": "cpu",
}  # fmt: skip


def task(**changes: Any) -> SubsetsTask:
    config = SubsetsConfig(**{**SMALL, **changes})
    return SubsetsTask(config, load_source(config.source))


def train(made: SubsetsTask, steps: int) -> tuple[SubsetsModel, list[float]]:
    """A model after so many steps of Adam, and their losses."""
    torch.manual_seed(0)
    model = made.build()
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    losses = []
    for step in range(steps):
        loss = model(made.batch(step))["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return model, losses


@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns(method: str) -> None:
    made = task(method=method)
    model, losses = train(made, 60)
    assert sum(losses[-10:]) < sum(losses[:10])
    scores = made.validate(model.eval())
    assert 0 <= scores["clu_f1"] <= 1
    assert scores["knob"] in made.knobs(model)


def test_validation_is_the_mean_over_bags_of_plain_set_scores() -> None:
    made = task(method="cpl")
    torch.manual_seed(0)
    model = made.build().eval()
    with torch.no_grad():
        picks = model.select(made.reported).tolist()
    f1 = []
    for row, chosen in enumerate(picks):
        labels = made.reported.labels[row].tolist()
        classes = {label for label in labels if label >= 0}
        hit = {labels[i] for i in chosen}
        recall, precision = len(hit) / len(classes), len(hit) / len(chosen) if chosen else 0.0
        f1.append(2 * recall * precision / (recall + precision) if hit else 0.0)
    assert made.validate(model)["clu_f1"] == pytest.approx(sum(f1) / len(f1), abs=1e-6)


def test_batches_are_a_function_of_seed_and_step() -> None:
    a, b, other = task().batch(7), task().batch(7), task(seed=1).batch(7)
    assert torch.equal(a.rows, b.rows)
    assert torch.equal(a.target, b.target)
    assert not torch.equal(a.rows, other.rows)


def test_with_held_out_choices_are_made_on_images_that_are_neither_trained_on_nor_reported() -> None:
    made = task(held_out=0.3)
    model = made.build().eval()
    assert made.chosen_on is not made.reported
    assert {"clu_f1", "reported_clu_f1"} <= made.validate(model).keys()

    def images(features: torch.Tensor) -> set[tuple[float, ...]]:
        return {tuple(row) for row in features.tolist()}

    seen = images(made.sampler.features)
    held = images(made.chosen_on.features[made.chosen_on.mask])
    reported = images(made.reported.features[made.reported.mask])
    assert not held & seen
    assert not held & reported
    assert not reported & seen


@pytest.mark.parametrize("kind", ["lowrank", "contextual", "coverage", "recent"])
@pytest.mark.parametrize("live_stop", [False, True])
def test_all_kinds_of_heads(kind: str, live_stop: bool) -> None:
    made = task(kind=kind, live_stop=live_stop, stop_rule="threshold", calibrate="f1", input_mix=0.3, input_dropout=0.1)
    model = made.build()
    model(made.batch(0))["loss"].backward()
    assert all(p.grad is not None for p in model.parameters())
    assert made.validate(model.eval())["knob"] in model.method.knobs


def test_features_as_wide_as_the_encoder_can_enter_it_unprojected() -> None:
    plain, projected = (task(dim=64, projection=projection).build() for projection in (False, True))
    assert len(list(projected.input.parameters())) == 2
    assert not list(plain.input.parameters())
    assert list(task(projection=False).build().input.parameters())  # the widths differ


def test_kmeans_is_told_how_many() -> None:
    made = task()
    scores = made.evaluate_kmeans(made.reported)
    assert scores["card_err"] < 0.5  # it may pick one member for two centroids, and no more than k


def test_the_defaults_are_the_papers() -> None:
    config = SubsetsConfig()
    paper = {
        "epochs": 300, "batch_size": 256, "optimizer": "adam", "lr": 5e-4, "dim": 512, "layers": 3, "heads": 4,
        "ffn": 1024, "hidden": 256, "dropout": 0.1, "permutations": 10, "early_stop_weight": 5.0, "max_len": 20,
        "bags": 5000, "validation_bags": 1000, "kind": "lowrank", "live_stop": False, "schedule": "constant",
    }  # fmt: skip
    assert paper.items() <= dataclasses.asdict(config).items()


def classes_of(labels: torch.Tensor) -> set[int]:
    return {int(label) for label in labels.unique() if label >= 0}


def test_a_split_by_classes_trains_chooses_and_reports_on_classes_of_their_own() -> None:
    made = task(split="classes", held_out=0.2, min_classes=2, max_classes=4, split_seed=3)
    trained, chosen, reported = (
        classes_of(labels) for labels in (made.sampler.labels, made.chosen_on.labels, made.reported.labels)
    )
    order = np.random.RandomState(3).permutation(10)
    assert reported == set(order[7:].tolist())
    assert trained | chosen == set(order[:7].tolist())
    assert not trained & chosen
    assert len(chosen) == 2
    assert classes_of(task(split="classes", max_classes=4, min_classes=2).reported.labels) != reported


def test_images_of_a_split_by_classes_are_those_of_its_rows() -> None:
    whole = load_source("digits")
    part = split_classes(whole, 0.3)
    assert part.images is not None
    assert part.image_rows is not None
    torch.testing.assert_close(part.images.flatten(1) / 255, part.test[part.image_rows], atol=1 / 255, rtol=0)
    assert part.test_labels.unique().numel() == 3


def test_too_few_classes_to_split_are_refused() -> None:
    with pytest.raises(ValueError, match="split: expected at least 10 classes, 5 to train on and 5 apart"):
        task(split="classes", held_out=0.2, min_classes=5, max_classes=5)


@pytest.mark.parametrize("method", METHODS)
def test_with_distances_only_nothing_else_of_the_features_matters(method: str) -> None:
    made = task(method=method, distances="only", kind="coverage", live_stop=True)
    torch.manual_seed(0)
    model = made.build().eval()
    turn = torch.linalg.qr(torch.randn(64, 64)).Q
    turned = dataclasses.replace(made.reported, features=((made.reported.features - model.shift) / model.scale) @ turn)
    with torch.no_grad():
        expected = model.select(made.reported).indices
        model.shift.zero_()
        model.scale.fill_(1)
        assert model.select(turned).indices.equal(expected)


@pytest.mark.parametrize("distances", ["also", "only"])
def test_cpl_with_distances_learns(distances: str) -> None:
    made = task(distances=distances, kind="coverage", live_stop=True)
    model, losses = train(made, 40)
    assert sum(losses[-10:]) < sum(losses[:10]) - 1
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("stop_rule", ["argmax", "threshold"])
@pytest.mark.parametrize("method", ["cpl", "pointer"])
def test_a_sweep_of_the_stop_is_greedy_at_every_knob(method: str, stop_rule: str) -> None:
    made = task(method=method, stop_rule=stop_rule)
    torch.manual_seed(0)
    model = made.build().eval()
    with torch.no_grad():
        encoded = model.encode(made.reported)
        knobs = model.method.knobs
        for knob, picks in zip(knobs, model.answers(encoded, made.reported, knobs), strict=True):
            assert picks.equal(model.decode(encoded, made.reported, knob).indices)


@pytest.mark.parametrize("goal", ["f1", "count", "likelihood"])
def test_the_stop_is_fitted_for_a_goal(goal: str) -> None:
    made = task(calibrate=goal, stop_rule="threshold", held_out=0.3, early_stop_weight=0.0)
    torch.manual_seed(0)
    model = made.build().eval()
    found = made.validate(model)
    scores = made.evaluate(model, made.chosen_on, model.method.knobs)
    if goal == "f1":
        assert found["clu_f1"] == max(score["clu_f1"] for score in scores.values())
    elif goal == "count":
        assert found["card_err"] == min(score["card_err"] for score in scores.values())
    else:
        # The threshold is where the calibrated probability of the stop is one half.
        odds = math.log(found["knob"] / (1 - found["knob"]))
        assert odds / found["temperature"] + found["stop_bias"] == pytest.approx(0, abs=1e-6)
    assert made.evaluate(model, made.reported, (found["knob"],))[found["knob"]]["clu_f1"] == found["reported_clu_f1"]


def test_likelihood_needs_a_threshold() -> None:
    with pytest.raises(ValueError, match='calibrate = "likelihood": expected stop_rule = "threshold"'):
        task(calibrate="likelihood")


def test_the_probability_of_covering_all_classes_is_the_share_of_samples_that_do() -> None:
    made = task(method="cpl")
    torch.manual_seed(0)
    model = made.build().eval()
    found = made.covering(model, samples=4)
    with torch.no_grad():
        pot = model.method.potentials(model.encode(made.reported), made.reported.mask)
    drawn = cpl.sample(pot, 4, max_len=model.max_len, generator=torch.Generator().manual_seed(0)).tolist()
    covering = [
        {made.reported.labels[row, i].item() for i in picks} == classes_of(made.reported.labels[row])
        for draw in drawn
        for row, picks in enumerate(draw)
    ]
    assert found == pytest.approx(sum(covering) / len(covering))

"""The subsets task: every method trains, validation is brute force's, and choices are made where they should be."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from torchcpl.tasks.subsets.data import load_source
from torchcpl.tasks.subsets.task import METHODS, SubsetsConfig, SubsetsTask

SMALL: dict[str, Any] = {
    "epochs": 1, "bags": 64, "batch_size": 16, "validation_bags": 20, "dim": 16, "layers": 1, "heads": 2, "ffn": 16,
    "hidden": 8, "permutations": 2, "max_items": 24, "min_per_class": 2, "max_per_class": 6, "max_classes": 5,
    "max_len": 8, "standardise": True, "dropout": 0.0, "device": "cpu",
}  # fmt: skip


def task(**changes: Any) -> SubsetsTask:
    config = SubsetsConfig(**{**SMALL, **changes})
    return SubsetsTask(config, load_source(config.source))


@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns(method: str) -> None:
    made = task(method=method)
    torch.manual_seed(0)
    model = made.build()
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    losses = []
    for step in range(60):
        loss = model(made.batch(step))["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
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
    made = task(kind=kind, live_stop=live_stop, stop_rule="threshold", tune_knob=True, input_mix=0.3, input_dropout=0.1)
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

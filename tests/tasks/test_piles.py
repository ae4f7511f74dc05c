"""The piles task: bags, the loss against enumeration, what the encoder must not see, a short training."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from torchcpl.encoders.distances import DistanceModel, Pairs, distance_features, distances
from torchcpl.interactions import DenseCoverage
from torchcpl.potentials import Potentials
from torchcpl.predict import load
from torchcpl.tasks.piles.data import (
    OVERLAP,
    Dice,
    Mixture,
    cloud,
    digits,
    draw_rows,
    fixed_bags,
    load_sets,
    merged,
    protocol_labels,
)
from torchcpl.tasks.piles.task import (
    PilesConfig,
    PilesTask,
    count_classes,
    cover_nll,
    greedy_hazard,
    own_orders,
    pair_loss,
    random_orders,
    shifted_length,
)
from torchcpl.train import fit

TINY = {"dim": 16, "edge": 8, "layers": 2, "heads": 2, "batch_size": 3, "group": 2, "items": 24, "large": 30}


def potentials(n: int = 5, seed: int = 0) -> Potentials:
    g = torch.Generator().manual_seed(seed)
    cover, gain = torch.randn(2, n, n, generator=g), torch.randn(2, n, generator=g)
    unary, stop = torch.randn(2, n, generator=g), torch.randn(2, generator=g)
    return Potentials(unary, stop, DenseCoverage(cover, gain))


def test_the_loss_is_the_probability_of_the_uncovered_by_enumeration() -> None:
    pot, labels = potentials(), torch.tensor([[0, 0, 1, 2, -1], [3, 3, 3, 3, 3]])
    pot = Potentials(pot.unary, pot.stop, pot.interaction, labels >= 0)
    orders = torch.tensor([[[0, 1, 2, 3]], [[4, 2, -1, -1]]])
    expected, contexts = [], 0
    for b in range(2):
        cover, gain = pot.interaction.cover[b], pot.interaction.stop_row[b]  # type: ignore[attr-defined]
        terms, k = [], len({int(c) for c in labels[b] if c >= 0})
        for t in range(k + 1):
            picks = [i for i in orders[b, 0, :t].tolist() if i >= 0]
            hit = {int(labels[b, i]) for i in picks}
            weight = {
                j: math.exp(pot.unary[b, j] - math.log1p(sum(math.exp(cover[j, i]) for i in picks)))
                for j in range(5)
                if labels[b, j] >= 0 and j not in picks
            }
            stop = math.exp(pot.stop[b] + sum(gain[i] for i in picks))
            total = stop + sum(weight.values())
            left = sum(w for j, w in weight.items() if int(labels[b, j]) not in hit)
            terms.append(-math.log((left if t < k else stop) / total))
        expected.append(sum(terms))
        contexts += len(terms)
    torch.testing.assert_close(cover_nll(pot, labels, orders), torch.tensor(expected) / (contexts / 2))


def test_orders_hold_one_member_of_every_class_or_the_models_own_picks() -> None:
    labels = torch.tensor([[4, 4, 0, 39, -1], [7, 7, 7, 7, 7]])
    for row, classes in zip(random_orders(labels, 3), ({0, 4, 39}, {7}), strict=True):
        for order in row.tolist():
            picks = [i for i in order if i >= 0]
            b = 0 if len(classes) > 1 else 1
            assert {int(labels[b, i]) for i in picks} == classes
            assert len(picks) == len(classes)
    pot = potentials()
    own = own_orders(pot, 9, (0.0, 1.0))
    picks, _ = greedy_hazard(pot, 9)
    assert torch.equal(own[:, 0], picks)
    assert all(sorted(row) == [0, 1, 2, 3, 4] for row in own.flatten(0, 1).tolist())


def test_stop_probabilities_count_classes_and_pairs() -> None:
    stop = torch.tensor([[0.1, 0.5, 0.2], [0.1, 0.1, 0.2], [0.3, 0.3, 0.9]]).logit()
    assert shifted_length(stop, 0.0).tolist() == [2, 3, 2]  # 1 − .9·.5 ≥ ½; 1 − .7·.7 ≥ ½
    assert shifted_length(stop, -9.0).tolist() == [3, 3, 3]
    assert count_classes(torch.tensor([[5, 5, 0, -1], [-1, -1, -1, -1]])).tolist() == [2, 0]
    labels = torch.tensor([[1, 1, 2]])
    good = torch.tensor([[9.0, -9.0, -9.0]])  # pairs 01, 02, 12
    assert pair_loss(good, labels)[0] < 1e-3 < pair_loss(-good, labels)[0]


def test_bags_not_seen_leave_no_trace_in_the_loss() -> None:
    torch.manual_seed(0)
    model = PilesTask(PilesConfig(validation_bags=1, **TINY)).build()  # type: ignore[arg-type]
    labels = torch.tensor([[0, 0, 1, 1], [0, 1, 2, 3], [0, 0, 0, 0]])
    nodes, edges = distance_features(distances(torch.randn(3, 4, 2)), labels >= 0)
    batch = {"nodes": nodes, "edges": edges, "labels": labels, "seen": torch.tensor([True, False, True])}
    for other in (labels[1], torch.zeros_like(labels[1])):
        labels[1] = other
        found = {name: model(batch)[name] for name in ("pairs", "count")}
        rows = torch.tensor([0, 2])
        alone = model({name: part[rows] for name, part in batch.items()})
        for name, one in found.items():
            torch.testing.assert_close(one, alone[name])


def test_the_hazard_is_the_probability_of_stopping() -> None:
    pot = potentials()
    picks, hazard = greedy_hazard(pot, 3)
    for b in range(2):
        for t in (1, 2, 3):
            chosen = [int(i) for i in picks[b, :t]]
            cover, gain = pot.interaction.cover[b], pot.interaction.stop_row[b]  # type: ignore[attr-defined]
            stop = float(pot.stop[b] + gain[chosen].sum())
            left = [j for j in range(5) if j not in chosen]
            weight = sum(math.exp(pot.unary[b, j]) / (1 + float(cover[j, chosen].exp().sum())) for j in left)
            assert float(hazard[b, t - 1]) == pytest.approx(stop - math.log(weight), abs=1e-5)


def test_calibration_divides_the_stop_and_adds_to_it() -> None:
    torch.manual_seed(0)
    net, mask = DistanceModel(16, 2, 2, 8), torch.arange(200) < torch.tensor([[40], [200]])
    features = distance_features(distances(torch.randn(2, 200, 3)), mask)
    plain = net.judge(*features, mask)[0]
    net.calibration.copy_(torch.tensor([0.5, 0.3]))
    found = net.judge(*features, mask)[0]
    torch.testing.assert_close(found.stop, 2 * plain.stop + 0.3)
    assert isinstance(found.interaction, DenseCoverage)
    assert isinstance(plain.interaction, DenseCoverage)
    torch.testing.assert_close(found.interaction.stop_row, 2 * plain.interaction.stop_row)
    assert torch.equal(found.unary, plain.unary)


def test_bags_follow_the_protocol_and_hold_no_row_twice() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = protocol_labels(50, 160, 10, generator)
    sizes = torch.stack([(labels == c).sum(1) for c in range(10)], 1)
    present = (sizes > 0).sum(1)
    assert present.min() >= 3
    assert present.max() == 10
    assert sizes.max() <= 40
    x, kept = draw_rows(digits(), labels, generator)
    for rows, label in zip(x, kept, strict=True):
        real = rows[label >= 0]
        assert len(real.unique(dim=0)) == len(real)


def test_components_that_a_chain_of_overlaps_connects_are_one() -> None:
    g = torch.Generator().manual_seed(0)
    centres, size = 12 * torch.rand(6, 40, 2, generator=g), 0.5 + torch.rand(6, 40, 1, generator=g)
    labels = torch.randint(-1, 40, (6, 25), generator=g)  # some components have no row, and connect nothing
    found = merged(labels, centres, size)
    for given, one, at, width in zip(labels.tolist(), found.tolist(), centres, size, strict=True):
        groups = [{label} for label in set(given) - {-1}]
        for a in set(given) - {-1}:
            for b in set(given) - {-1}:
                if math.dist(at[a].tolist(), at[b].tolist()) < OVERLAP * float(width[a] + width[b]) / 2:
                    near = [group for group in groups if {a, b} & group]
                    groups = [group for group in groups if group not in near] + [set().union(*near)]
        assert 1 < len(groups) < len(set(given) - {-1})
        expected = {label: min(group) for group in groups for label in group}
        assert one == [expected.get(label, -1) for label in given]


def test_a_cloud_keeps_mean_and_covariance_of_the_real_items_and_is_one_group() -> None:
    generator = torch.Generator().manual_seed(0)
    scale = torch.tensor([3.0, 1.0, 0.2])
    x = torch.randn(40, 60, 3, generator=generator) * scale + 5
    labels = torch.randint(4, (40, 60), generator=generator)
    labels[:, 50:] = -1
    x[:, 50:] = 1e6  # padding, of which nothing may be seen
    found, one = cloud(x, labels, Dice(generator, np.random.default_rng(0)))
    assert torch.equal(one, torch.where(labels >= 0, 0, -1))
    torch.testing.assert_close(found.mean((0, 1)), torch.full((3,), 5.0), atol=0.2, rtol=0)
    torch.testing.assert_close(found.std(1).mean(0), x[:, :50].std(1).mean(0), atol=0, rtol=0.05)


def test_training_batches_depend_on_seed_and_step_alone() -> None:
    sets = [digits()]
    first, again = (Mixture(sets, 3, torch.device("cpu"), 2, 0.5) for _ in range(2))
    first.bags(0, 4, 20, (0.5, 0.5))
    for wide in ((0.0, 0.0), (1.0, 1.0)):
        a, b = first.bags(5, 4, 20, wide), again.bags(5, 4, 20, wide)
        assert torch.equal(a.d, b.d)
        assert torch.equal(a.labels, b.labels)
        assert a.d.isfinite().all()


@pytest.mark.parametrize("n", [1, 2, 3, 17])
def test_padding_and_permutation_change_nothing(n: int) -> None:
    torch.manual_seed(n)
    model = DistanceModel(16, 2, 2, 8).eval()
    torch.nn.init.normal_(model.ends.weight)
    d = distances(torch.randn(1, n, 4))
    plain = model(d)
    wide = torch.zeros(1, n + 5, n + 5)
    wide[:, :n, :n] = d
    padded = model(wide, torch.arange(n + 5).unsqueeze(0) < n)
    order = torch.randperm(n)
    moved = model(d[:, order][:, :, order])
    for one in ((plain.unary, padded.unary[:, :n]), (plain.unary[:, order], moved.unary), (plain.stop, padded.stop)):
        torch.testing.assert_close(*one, atol=1e-4, rtol=1e-4)
    cover = plain.interaction.cover  # type: ignore[attr-defined]
    torch.testing.assert_close(padded.interaction.cover[:, :n, :n], cover, atol=1e-3, rtol=1e-3)  # type: ignore[attr-defined]


def test_features_do_not_see_scale_and_are_finite_for_equal_rows() -> None:
    x = torch.randn(1, 12, 3)
    mask = torch.ones(1, 12, dtype=torch.bool)
    for a, b in zip(distance_features(distances(x), mask), distance_features(distances(1e4 * x), mask), strict=True):
        torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3)
    for d in (torch.zeros(1, 12, 12), distances(x.round())):
        assert all(part.isfinite().all() for part in distance_features(d, mask))


def test_gradients_between_pairs_and_matrices() -> None:
    pairs, double = Pairs(4, torch.device("cpu")), {"dtype": torch.float64, "requires_grad": True}
    assert torch.autograd.gradcheck(pairs.square, torch.randn(2, 3, 6, **double))
    assert torch.autograd.gradcheck(pairs.upper, torch.randn(2, 3, 4, 4, **double))
    assert torch.autograd.gradcheck(pairs.both_ends, torch.randn(2, 3, 4, **double))


@pytest.mark.parametrize("n", [1, 2, 9, 100])  # up to several parts of pairs
def test_without_a_gradient_the_potentials_are_the_same(n: int) -> None:
    torch.manual_seed(n)
    model = DistanceModel(16, 4, 2, 8).eval()
    torch.nn.init.normal_(model.ends.weight)
    mask = torch.arange(n).expand(3, n) < torch.tensor([[n], [max(1, n - 1)], [max(1, n // 2)]])
    given = (*distance_features(distances(torch.randn(3, n, 4)), mask), mask)
    kept = model.judge(*given)[0]
    with torch.no_grad():
        quick = model.judge(*given)[0]
    real = mask.unsqueeze(1) & mask.unsqueeze(2)
    pairs = (kept.unary[mask], quick.unary[mask]), (kept.stop, quick.stop)
    cover = (kept.interaction.cover[real], quick.interaction.cover[real])  # type: ignore[attr-defined]
    for one in (*pairs, cover):
        torch.testing.assert_close(*one, atol=1e-4, rtol=1e-4)


def test_a_short_training_and_sets_left_out(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        labels = np.repeat(np.arange(6), 30)
        values = (rng.normal(size=(180, 4)) + 5 * labels[:, None]).astype(np.float32)
        np.savez(tmp_path / f"{name}.npz", train=values, train_labels=labels, test=values, test_labels=labels)
    assert sorted(load_sets(tmp_path)) == ["a", "b"]
    config = PilesConfig(source=str(tmp_path), leave_out=("b",), epochs=1, steps=2, validation_bags=2, **TINY)  # type: ignore[arg-type]
    task = PilesTask(config)
    assert len(task.mixture.sets) == 1
    state = fit(task, tmp_path / "run", progress=False)
    assert {"clu_f1", "knob", "reported_clu_f1", "b_clu_f1", "digits_told"} <= state["metrics"].keys()
    # The run picks from new bags of any width and size, whatever lies beside them in the batch.
    bags = [torch.randn(7, 3), torch.randn(5, 3)]
    run = load(tmp_path / "run")
    assert torch.equal(run.select(bags).indices[1, :3], run.select(bags[1]).indices[0, :3])
    np.save(tmp_path / "new.npy", bags[0].numpy())
    assert run.loaded.benchmark.read_examples(run.model, tmp_path / "new.npy", "", None)[0].equal(bags[0])
    with pytest.raises(ValueError, match="bag 1: expected"):
        run.select([bags[0], torch.full((2, 2), torch.nan)])
    with pytest.raises(ValueError, match="leave_out"):
        PilesTask(PilesConfig(source=str(tmp_path), leave_out=("c",)))
    with pytest.raises(ValueError, match="labelled vectors"):
        PilesTask(PilesConfig(source=str(tmp_path / "run")))


@pytest.mark.parametrize(
    "bad",
    [
        {"train_labels": np.zeros(7, int)}, {"test": np.zeros((8, 3), np.float32)}, {"test_labels": -np.ones(8, int)},
        {"train": np.zeros(8)}, {"test_labels": np.array(list("abcdefgh"))},
    ],
)  # fmt: skip
def test_files_that_do_not_fit_are_named(tmp_path: Path, bad: dict[str, np.ndarray]) -> None:
    good = {"train": np.zeros((8, 2), np.float32), "test": np.zeros((8, 2), np.float32)}
    good |= {"train_labels": np.arange(8), "test_labels": np.arange(8)}
    np.savez(tmp_path / "some.npz", **good)
    assert list(load_sets(tmp_path)) == ["some"]
    np.savez(tmp_path / "some.npz", **good | bad)
    with pytest.raises(ValueError, match=r"some.npz: (train|test): expected numbers \(M, D\)"):
        load_sets(tmp_path)
    (tmp_path / "some.npz").write_bytes((tmp_path / "some.npz").read_bytes()[:300])
    with pytest.raises(ValueError, match=r"some.npz: not a readable .npz"):
        load_sets(tmp_path)


def test_digits_are_tested_on_bags_of_the_protocol() -> None:
    bags = fixed_bags(digits(), 5)
    assert bags.d.shape == (5, 160, 160)
    assert torch.equal(bags.d, bags.d.transpose(1, 2))

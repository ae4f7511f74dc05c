"""Sources of labelled features, and the law of the bags drawn from them."""

from __future__ import annotations

import itertools
import os
import pickle
import struct
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from scipy.stats import chisquare  # type: ignore[import-untyped]
from torch import Tensor

from torchcpl.encoders.resnet import ResNet18, load_resnet18, prepare
from torchcpl.tasks.subsets import cifar, data
from torchcpl.tasks.subsets.bags import BagProtocol, Bags, BagSampler, fixed_bags
from torchcpl.tasks.subsets.data import Features, load_source, read_bags, split_rows

# ------------------------------------------------------------------------------------------------- bags


def source(classes: int = 20, each: int = 50, dim: int = 3) -> tuple[Tensor, Tensor]:
    """Features that say which row they are, classes interleaved."""
    labels = torch.arange(classes * each) % classes
    features = torch.arange(classes * each).float()[:, None] + torch.arange(dim) / 8
    return features, labels


def draw(count: int, protocol: BagProtocol, seed: int = 0, **kwargs: int) -> Bags:
    return BagSampler(*source(**kwargs), protocol).sample(count, torch.Generator().manual_seed(seed))


def uniform(observed: list[int]) -> bool:
    return bool(chisquare(observed).pvalue > 1e-4)


def test_every_bag_is_well_formed() -> None:
    features, labels = source()
    assert BagProtocol() == BagProtocol(3, 10, 12, 40, 160)  # the paper's
    bags = draw(400, BagProtocol())
    assert len(bags) == 400
    assert bags.features.shape == (400, 160, 3)
    assert bags.target.shape == (400, 10)
    for b in range(400):
        mask, rows, target = bags.mask[b], bags.rows[b], bags.target[b]
        size = int(mask.sum())
        padding = (~mask[size:], rows[size:] == -1, bags.labels[b, size:] == -1, bags.features[b, size:] == 0)
        assert all(bool(part.all()) for part in padding)
        real = rows[:size]
        assert len(set(real.tolist())) == size  # nobody is drawn twice
        assert torch.equal(bags.labels[b, :size], labels[real])
        assert torch.equal(bags.features[b, :size], features[real])
        members = Counter(bags.labels[b, :size].tolist())
        least = (3, 12) if size < 160 else (1, 1)  # where nothing was cut, and where something may have been
        assert least[0] <= len(members) <= 10
        assert least[1] <= min(members.values()) <= max(members.values()) <= 40
        count = int((target >= 0).sum())
        assert ((target[:count] >= 0) & (target[:count] < size)).all()
        assert sorted(bags.labels[b, target[:count]].tolist()) == sorted(members)


def test_marginal_laws_without_a_cut() -> None:
    bags = draw(6000, BagProtocol(max_items=400), dim=1)
    counts = torch.stack([(bags.labels == c).sum(1) for c in range(20)], 1)  # (B, C)
    present = counts > 0
    assert uniform(present.sum(1).bincount(minlength=11)[3:].tolist())  # k
    assert uniform(counts[present].bincount(minlength=41)[12:].tolist())  # n_c
    assert set(counts[present].tolist()) == set(range(12, 41))
    assert uniform(present.sum(0).tolist())  # which classes
    assert uniform(bags.rows[bags.mask].bincount(minlength=1000).tolist())  # which members
    triples = counts[present.sum(1) == 3]
    sizes = triples[triples > 0].view(-1, 3).float()  # of one bag, and independent
    assert abs(torch.corrcoef(sizes.T)[0, 1].item()) < 0.15


def test_cut_to_max_items() -> None:
    bags = draw(4000, BagProtocol(min_classes=10), dim=1)
    sizes = bags.mask.sum(1)
    assert int(sizes.max()) == 160
    assert float((sizes == 160).float().mean()) > 0.99
    # A cut is a uniform subset, so an element stays with the same chance wherever it came from.
    assert uniform(bags.rows[bags.mask].bincount(minlength=1000).tolist())


def test_classes_emptied_by_the_cut_leave_the_target() -> None:
    bags = draw(500, BagProtocol(min_classes=8, max_classes=10, max_items=6))
    for b in range(500):
        target = bags.target[b][bags.target[b] >= 0]
        assert sorted(bags.labels[b, target].tolist()) == sorted(set(bags.labels[b].tolist()))


def test_position_carries_no_information() -> None:
    bags = draw(6000, BagProtocol(), dim=1)
    full = bags.mask.all(1)
    assert int(full.sum()) > 1000
    places = bags.target[full]
    assert uniform(places[places >= 0].bincount(minlength=160).tolist())
    labels = bags.labels[full]
    same = [(labels[:, i] == labels[:, j]).float().mean().item() for i, j in ((0, 1), (0, 159), (70, 100))]
    assert max(same) - min(same) < 0.04
    first = bags.labels.gather(1, bags.target[:, :1])[:, 0]
    assert uniform(first.bincount(minlength=20).tolist())  # nor does the order of the targets


def exact_law(groups: list[list[int]], p: BagProtocol) -> dict[tuple[Any, ...], Fraction]:
    """Probability of every (rows in order, set of target rows), by enumeration of the protocol."""
    law: dict[tuple[Any, ...], Fraction] = {}
    all_k = range(p.min_classes, min(p.max_classes, len(groups)) + 1)
    all_n = range(p.min_per_class, p.max_per_class + 1)
    for k in all_k:
        chosen_classes = list(itertools.combinations(groups, k))
        for chosen in chosen_classes:
            for numbers in itertools.product(all_n, repeat=k):
                sizes = [min(n, len(group)) for group, n in zip(chosen, numbers, strict=True)]
                options = [itertools.combinations(group, n) for group, n in zip(chosen, sizes, strict=True)]
                drawn = list(itertools.product(*options))
                for parts in drawn:
                    rows = [row for part in parts for row in part]
                    orders = list(itertools.permutations(rows, min(p.max_items, len(rows))))
                    for order in orders:
                        kept = [[row for row in part if row in order] for part in parts]
                        targets = list(itertools.product(*(part for part in kept if part)))
                        for target in targets:
                            chance = Fraction(1, len(all_k) * len(chosen_classes) * len(all_n) ** k)
                            chance /= len(drawn) * len(orders) * len(targets)
                            key = order, tuple(sorted(target))
                            law[key] = law.get(key, Fraction(0)) + chance
    return law


@pytest.mark.parametrize(
    "protocol", [BagProtocol(1, 2, 1, 2, 3), BagProtocol(2, 4, 1, 2, 2), BagProtocol(1, 3, 2, 3, 2)]
)
def test_the_whole_law_of_small_bags(protocol: BagProtocol) -> None:
    groups = [[0, 3], [1, 4], [2]]
    law = exact_law(groups, protocol)
    assert sum(law.values()) == 1
    labels = torch.tensor([0, 1, 2, 0, 1])
    sampler = BagSampler(torch.zeros(5, 1), labels, protocol)
    draws = 40000
    bags = sampler.sample(draws, torch.Generator().manual_seed(3))
    seen: Counter[tuple[Any, ...]] = Counter()
    for rows, target in zip(bags.rows.tolist(), bags.target.tolist(), strict=True):
        order = tuple(row for row in rows if row >= 0)
        seen[order, tuple(sorted(rows[t] for t in target if t >= 0))] += 1
    assert seen.keys() <= law.keys()
    outcomes = list(law)
    expected = [float(law[outcome]) * draws for outcome in outcomes]
    assert chisquare([seen[outcome] for outcome in outcomes], expected).pvalue > 1e-4


def test_small_classes_give_what_they_have() -> None:
    labels = torch.tensor([0] * 2 + [5] * 30 + [9] * 1)
    sampler = BagSampler(torch.zeros(33, 1), labels, BagProtocol(max_items=100))
    bags = sampler.sample(50, torch.Generator().manual_seed(0))
    assert bags.features.shape == (50, 100, 1)
    assert bags.target.shape == (50, 10)
    for b in range(50):
        members = Counter(bags.labels[b][bags.mask[b]].tolist())
        assert set(members) == {0, 5, 9}  # labels keep their values
        assert (members[0], members[9]) == (2, 1)
        assert 12 <= members[5] <= 30
        assert int((bags.target[b] >= 0).sum()) == 3


def same(a: Bags, b: Bags) -> bool:
    names = ("features", "mask", "labels", "target", "rows")
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in names)


def test_a_draw_is_a_function_of_the_generator() -> None:
    features, labels = source()
    sampler = BagSampler(features, labels, BagProtocol())
    g = torch.Generator().manual_seed(5)
    first, second = sampler.sample(4, g), sampler.sample(4, g)
    torch.manual_seed(99)
    again = torch.Generator().manual_seed(5)
    assert same(first, sampler.sample(4, again))
    state = again.get_state()
    assert same(second, sampler.sample(4, again))
    assert same(second, sampler.sample(4, torch.Generator().set_state(state)))
    assert not same(first, second)
    assert torch.equal(torch.cat([features, labels[:, None]], 1), torch.cat([source()[0], source()[1][:, None]], 1))


def test_fixed_bags() -> None:
    sampler = BagSampler(*source(), BagProtocol())
    bags = fixed_bags(sampler, 7, seed=11)
    assert same(bags, fixed_bags(sampler, 7, seed=11))
    assert not same(bags, fixed_bags(sampler, 7, seed=12))
    parts = list(bags.split(3))
    assert [len(part) for part in parts] == [3, 3, 1]
    assert torch.equal(torch.cat([part.rows for part in parts]), bags.rows)
    assert same(bags, bags.to("cpu"))


def test_sampler_rejects() -> None:
    features, labels = source()
    with pytest.raises(ValueError, match="at least min_classes = 3 classes, got 2"):
        BagSampler(features, labels % 2, BagProtocol())
    with pytest.raises(ValueError, match="min_classes: expected at most max_classes = 10, got 11"):
        BagProtocol(min_classes=11)


# ---------------------------------------------------------------------------------------------- sources


def shares_no_row(a: Tensor, b: Tensor) -> bool:
    return not {tuple(row) for row in a.tolist()} & {tuple(row) for row in b.tolist()}


def images_of(features: Features) -> tuple[Tensor, Tensor]:
    assert features.images is not None
    assert features.image_rows is not None
    return features.images, features.image_rows


def test_digits() -> None:
    digits = load_source("digits")
    assert digits.train.shape == (1438, 64)
    assert digits.test.shape == (359, 64)
    assert digits.train.dtype == torch.float32
    assert (digits.train.min().item(), digits.train.max().item()) == (0, 1)
    assert digits.class_names == tuple("0123456789")
    assert shares_no_row(digits.train, digits.test)
    assert int(digits.test_labels.bincount().min()) >= 35
    images, rows = images_of(digits)
    assert (images.flatten(1) / 255 - digits.test[rows]).abs().max() < 0.003
    assert torch.equal(digits.test, load_source("digits").test)


def test_split_rows_divides_the_training_images() -> None:
    digits = load_source("digits")
    dev = split_rows(digits.train, digits.train_labels, digits.class_names, 0.25)
    together = torch.cat([dev.train, dev.test])
    assert sorted(map(tuple, together.tolist())) == sorted(map(tuple, digits.train.tolist()))
    assert shares_no_row(dev.test, digits.test)
    labels = {tuple(row): label for row, label in zip(digits.train.tolist(), digits.train_labels.tolist(), strict=True)}
    assert [labels[tuple(row)] for row in dev.test.tolist()] == dev.test_labels.tolist()
    assert [labels[tuple(row)] for row in dev.train.tolist()] == dev.train_labels.tolist()
    for c in range(10):
        size = int((digits.train_labels == c).sum())
        assert int((dev.test_labels == c).sum()) == round(0.25 * size)
    again = split_rows(digits.train, digits.train_labels, digits.class_names, 0.25)
    assert torch.equal(dev.test, again.test)
    first = torch.cat([digits.train[digits.train_labels == c][: int((dev.test_labels == c).sum())] for c in range(10)])
    assert sorted(map(tuple, dev.test.tolist())) != sorted(map(tuple, first.tolist()))  # by chance, not by order
    assert dev.images is None  # pictures are of the test images, which are not here


def arrays(**changes: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    base: dict[str, Any] = {
        "train": rng.integers(0, 256, (12, 5)).astype(np.uint8),
        "train_labels": np.arange(12, dtype=np.uint8) % 3,
        "test": rng.integers(0, 256, (6, 5)).astype(np.uint8),
        "test_labels": np.arange(6, dtype=np.uint8) % 3,
    }
    return {key: value for key, value in (base | changes).items() if value is not None}


def test_unlabelled_bags_in_a_file(tmp_path: Path) -> None:
    x, scale, shift = np.arange(15.0).reshape(3, 5), np.arange(5.0), 7
    np.savez(tmp_path / "f.npz", bag=x, scale=scale, shift=shift)
    for column in ("bag", "", "features"):  # "features" unless something else is asked for
        (bag,) = read_bags(tmp_path / "f.npz", column)
        np.testing.assert_allclose(bag, x * scale + shift)
    with pytest.raises(ValueError, match="expected an array bags, got bag"):
        read_bags(tmp_path / "f.npz", "bags")


def test_npz_with_scale_and_names(tmp_path: Path) -> None:
    scale, shift = np.linspace(0.5, 1, 5, dtype=np.float32), np.arange(5, dtype=np.float32)
    content = arrays(scale=scale, shift=shift, class_names=np.array(["ant", "bee", "cat", "dog"]))
    np.savez(tmp_path / "f.npz", **content)
    loaded = load_source(tmp_path / "f.npz")
    assert loaded.class_names == ("ant", "bee", "cat", "dog")
    np.testing.assert_allclose(loaded.train.numpy(), content["train"] * scale + shift, rtol=1e-6)
    np.testing.assert_allclose(loaded.test.numpy(), content["test"] * scale + shift, rtol=1e-6)
    assert loaded.train_labels.tolist() == content["train_labels"].tolist()
    assert loaded.images is None
    images = np.zeros((2, 4, 4, 3), np.uint8)
    np.savez(tmp_path / "test_images.npz", images=images, rows=np.array([5, 1], np.int32))
    loaded = load_source(str(tmp_path / "f.npz"))
    assert images_of(loaded)[1].tolist() == [5, 1]
    np.savez(tmp_path / "test_images.npz", images=images, rows=np.array([6, 1]))
    with pytest.raises(ValueError, match="image_rows: expected rows of test, 0 to 5"):
        load_source(tmp_path / "f.npz")


@pytest.mark.parametrize("given", [np.array([7, 40, 7, 9] * 5), np.array(["b", "z", "b", "x"] * 5)])
def test_npz_of_one_matrix_is_split_by_image(tmp_path: Path, given: Any) -> None:
    features = np.arange(40, dtype=np.float64).reshape(20, 2)
    np.savez(tmp_path / "f.npz", features=features, labels=given)
    loaded = load_source(tmp_path / "f.npz")
    assert loaded.class_names == tuple(str(v) for v in sorted(set(given.tolist())))
    assert loaded.train.shape == (16, 2)
    assert loaded.test.shape == (4, 2)
    assert shares_no_row(loaded.train, loaded.test)
    for part, labels in ((loaded.train, loaded.train_labels), (loaded.test, loaded.test_labels)):
        for row, label in zip(part.tolist(), labels.tolist(), strict=True):
            assert loaded.class_names[label] == str(given[int(row[0]) // 2])
    assert torch.equal(loaded.test, load_source(tmp_path / "f.npz").test)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (arrays(test=None), "expected the arrays train, train_labels, test, test_labels, or features"),
        (arrays(features=np.zeros((2, 5)), labels=np.zeros(2, int)), "expected the arrays"),
        (arrays(train=np.zeros((12, 5, 1))), r"train: expected \(M, d\) numbers"),
        (arrays(train=np.full((12, 5), "a")), r"train: expected \(M, d\) numbers"),
        (arrays(test=np.zeros((6, 4))), "test: expected a float tensor"),
        (arrays(test=np.full((6, 5), np.nan)), "test: expected finite features"),
        (arrays(train=np.zeros((0, 5)), train_labels=np.zeros(0, int)), "train: expected at least one row"),
        (arrays(train_labels=np.zeros(11, int)), r"labels of train: expected \(12,\), got \(11,\)"),
        (arrays(train_labels=np.zeros(12)), "labels: expected whole numbers or strings, got float64"),
        (arrays(scale=np.ones(4)), r"scale: expected \(\) or \(5,\) numbers"),
        (arrays(shift=np.array(["a"])), r"shift: expected \(\) or \(5,\) numbers"),
        (arrays(class_names=np.array(["ant", "bee"])), "labels: expected 0 to 1"),
        (arrays(class_names=np.array([1, 2, 3])), r"expected class_names \(C,\) of strings"),
        ({"features": np.zeros((3, 2)), "labels": np.array([0, 0, 1])}, "class 1: a split needs at least 2"),
        (arrays(train_labels=np.array([{}] * 12)), "not a readable .npz of plain arrays"),
    ],
)
def test_npz_rejects(tmp_path: Path, content: dict[str, Any], message: str) -> None:
    path = tmp_path / "f.npz"
    np.savez(path, **content)
    with pytest.raises(ValueError, match=message) as caught:
        load_source(path)
    assert str(path) in str(caught.value)


def test_source_rejects(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected one of digits, cifar100, cifar10 or a path"):
        load_source("mnist")
    with pytest.raises(FileNotFoundError, match="no such file"):
        load_source(tmp_path / "none.npz")
    for content in (b"", b"PK\x03\x04 cut short", b"something else"):
        (tmp_path / "f.npz").write_bytes(content)
        with pytest.raises(ValueError, match=r"not a readable \.npz"):
            load_source(tmp_path / "f.npz")
    with pytest.raises(ValueError, match="cifar100: needs root"):
        load_source("cifar100", root=tmp_path)
    x, y = torch.zeros(2, 3), torch.zeros(2, dtype=torch.long)
    with pytest.raises(ValueError, match="images, image_rows: expected both or neither"):
        Features(x, y, x, y, ("a",), images=torch.zeros(1, 2, 2, dtype=torch.uint8))
    with pytest.raises(ValueError, match="images: expected uint8"):
        Features(x, y, x, y, ("a",), images=torch.zeros(1, 2, 2), image_rows=y[:1])


def test_shared_features(shared_data: Path) -> None:
    loaded = load_source(shared_data / "cifar100-resnet18" / "features.npz")
    assert loaded.train.shape == (50000, 512)
    assert loaded.test.shape == (10000, 512)
    assert len(loaded.class_names) == 100
    assert loaded.train_labels.bincount().tolist() == [500] * 100
    assert images_of(loaded)[0].shape == (2000, 32, 32, 3)


# ------------------------------------------------------------------------------------------------ CIFAR


class Python2Pickle:
    """Writes protocol 2 as Python 2 did, whose str Python 3 cannot pickle: the format CIFAR came in."""

    def dumps(self, value: Any) -> bytes:
        return b"\x80\x02" + self.code(value) + b"."

    def code(self, value: Any) -> bytes:
        if value is None or isinstance(value, bool):
            return {None: b"N", True: b"\x88", False: b"\x89"}[value]
        if isinstance(value, int):
            return b"J" + struct.pack("<i", value)
        if isinstance(value, str):
            value = value.encode("latin1")
        if isinstance(value, bytes):
            return b"T" + struct.pack("<i", len(value)) + value
        if isinstance(value, tuple):
            return b"(" + b"".join(map(self.code, value)) + b"t"
        if isinstance(value, list):
            return b"](" + b"".join(map(self.code, value)) + b"e"
        if isinstance(value, dict):
            return b"}(" + b"".join(self.code(k) + self.code(v) for k, v in value.items()) + b"u"
        assert isinstance(value, np.ndarray)
        kind = b"cnumpy\ndtype\n" + self.code((value.dtype.str[1:], 0, 1)) + b"R"
        kind += self.code((3, "|", None, None, None, -1, -1, 0)) + b"b"
        empty = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n" + self.code((0,)) + self.code("b")
        state = b"(" + self.code(1) + self.code(value.shape) + kind + self.code(False) + self.code(value.tobytes())
        return empty + b"tR" + state + b"tb"


def dumps(content: Any, writer: str) -> bytes:
    return Python2Pickle().dumps(content) if writer == "python2" else pickle.dumps(content, int(writer))


def pictures(count: int, seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, (count, 3072)).astype(np.uint8)


def write_cifar100(root: Path, writer: str = "python2", seed: int = 0) -> dict[str, Any]:
    folder = root / "cifar-100-python"
    folder.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {}
    for name, count in (("train", 5), ("test", 3)):
        content[name] = {
            "filenames": [f"{i}.png" for i in range(count)],
            "batch_label": f"{name} batch",
            "fine_labels": [i % 3 for i in range(count)],
            "coarse_labels": [0] * count,
            "data": pictures(count, seed),
        }
        (folder / name).write_bytes(dumps(content[name], writer))
    meta = {"fine_label_names": ["apple", "bear", "crab"], "coarse_label_names": ["thing"]}
    (folder / "meta").write_bytes(dumps(meta, writer))
    return content


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "resnet18.safetensors"
    save_file({name: value.contiguous() for name, value in ResNet18().state_dict().items()}, path)
    return path


@pytest.mark.filterwarnings("ignore:.*numpy.core:DeprecationWarning")
@pytest.mark.parametrize("writer", ["python2", "2", "4"])
def test_restricted_reader_agrees_with_pickle(tmp_path: Path, writer: str) -> None:
    content = write_cifar100(tmp_path, writer)
    path = tmp_path / "cifar-100-python" / "train"
    with path.open("rb") as file:
        plain = pickle.load(file, encoding="latin1")
    np.testing.assert_array_equal(plain["data"], content["train"]["data"])
    images, labels = cifar._read_images(path, "fine_labels")
    assert labels.tolist() == plain["fine_labels"]
    expected = plain["data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    np.testing.assert_array_equal(images.numpy(), expected)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that features are kept in."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "torchcpl"


@pytest.mark.usefixtures("cache")
def test_cifar100(tmp_path: Path, weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "IMAGES_AT_ONCE", 2)
    content = write_cifar100(tmp_path)
    loaded = load_source("cifar100", root=tmp_path, weights=weights)
    assert loaded.class_names == ("apple", "bear", "crab")
    assert loaded.train_labels.tolist() == [0, 1, 2, 0, 1]
    assert loaded.test_labels.tolist() == [0, 1, 2]
    net = load_resnet18(weights)
    for i in range(5):  # one image at a time, pixel planes put together by hand
        planes = content["train"]["data"][i].reshape(3, 1024)
        image = torch.from_numpy(np.stack(list(planes), -1).reshape(1, 32, 32, 3))
        with torch.no_grad():
            torch.testing.assert_close(loaded.train[i], net.features(prepare(image))[0], rtol=1e-3, atol=1e-3)
    images, rows = images_of(loaded)
    np.testing.assert_array_equal(images[2].permute(2, 0, 1).flatten().numpy(), content["test"]["data"][2])
    assert rows.tolist() == [0, 1, 2]


def test_cifar10_and_its_cache(tmp_path: Path, weights: Path, cache: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    for i, name in enumerate(names):
        batch = {"batch_label": name, "labels": [i, 9], "data": pictures(2, i), "filenames": ["a", "b"]}
        (folder / name).write_bytes(dumps(batch, "python2"))
    classes = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    meta = {"num_cases_per_batch": 2, "label_names": classes, "num_vis": 3072}
    (folder / "batches.meta").write_bytes(dumps(meta, "python2"))
    loaded = load_source("cifar10", root=tmp_path, weights=weights)
    assert len(list(cache.iterdir())) == 1
    assert loaded.train_labels.tolist() == [0, 9, 1, 9, 2, 9, 3, 9, 4, 9]
    assert loaded.test_labels.tolist() == [5, 9]
    assert loaded.class_names == tuple(classes)
    assert loaded.train.shape == (10, 512)


def test_cache_is_keyed_by_content(tmp_path: Path, weights: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def embed(images: Tensor, net: Any, title: str) -> Tensor:
        calls.append(len(images))
        return images[:, 0, 0, :1].float().repeat(1, 512)

    monkeypatch.setattr(data, "_embed", embed)

    def load(root: Path, weights: Path = weights) -> Features:
        calls.clear()
        return load_source("cifar100", root=root, weights=weights)

    write_cifar100(tmp_path / "a")
    first = load(tmp_path / "a")
    assert calls == [5, 3]
    second = load(tmp_path / "a")
    assert calls == []
    assert torch.equal(first.train, second.train)
    assert torch.equal(first.test, second.test)
    write_cifar100(tmp_path / "b")  # the same content elsewhere
    load(tmp_path / "b")
    assert calls == []
    write_cifar100(tmp_path / "b", seed=1)  # other content in the same place
    third = load(tmp_path / "b")
    assert calls == [5, 3]
    assert not torch.equal(first.train, third.train)
    other = tmp_path / "other.safetensors"
    save_file({name: value.contiguous() for name, value in ResNet18().state_dict().items()}, other)
    load(tmp_path / "a", other)
    assert calls == [5, 3]
    assert [path.suffix for path in cache.iterdir()] == [".npz"] * 3

    for path in cache.iterdir():
        np.savez(path, train=np.zeros((1, 512), np.float32), test=np.zeros((3, 512), np.float32))
    with pytest.raises(ValueError, match="not the features of cifar100; delete this file"):
        load(tmp_path / "a")


class Call:
    """Pickles as a call of any function."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_malicious_pickles_are_refused(tmp_path: Path, weights: Path, protocol: int) -> None:
    write_cifar100(tmp_path)
    witness = tmp_path / "witness"
    calls = [
        Call(os.system, f"touch {witness}"),
        Call(eval, f"open({str(witness)!r}, 'w')"),
        Call(open, str(witness), "w"),
        Call(getattr, "text", "encode"),
        Call(np.load, str(witness)),
        Call(bytearray, 8),
    ]
    for file, content in itertools.product(("train", "meta"), calls):
        path = tmp_path / "cifar-100-python" / file
        kept = path.read_bytes()
        path.write_bytes(pickle.dumps({"data": content, "fine_labels": [0]}, protocol))
        with pytest.raises(ValueError, match="not a CIFAR file: it asks for"):
            load_source("cifar100", root=tmp_path, weights=weights)
        path.write_bytes(kept)
    assert not witness.exists()


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "not a CIFAR file: expected an object, got"),
        ({"data": pictures(2, 0), "labels": [0, 1]}, "not a CIFAR file: fine_labels is missing"),
        ({"data": pictures(2, 0), "fine_labels": [0]}, "fine_labels: expected 2 labels, got 1"),
        (
            {"data": pictures(2, 0), "fine_labels": [0, "a"]},
            "fine_labels: 1: expected an integer of at least 0, got 'a'",
        ),
        ({"data": pictures(2, 0), "fine_labels": [0, 3]}, "train_labels: expected 0 to 2"),
        ({"data": [1, 2], "fine_labels": [0, 1]}, r"data: expected an \(n, 3072\) uint8 array"),
        ({"data": pictures(2, 0)[:, :9].copy(), "fine_labels": [0, 1]}, r"data: expected an \(n, 3072\)"),
        ({"data": np.zeros((2, 3072)), "fine_labels": [0, 1]}, r"expected an \(n, 3072\) uint8 array, got float64"),
    ],
)
def test_foreign_pickles_are_refused(tmp_path: Path, weights: Path, content: Any, message: str) -> None:
    write_cifar100(tmp_path)
    path = tmp_path / "cifar-100-python" / "train"
    path.write_bytes(dumps(content, "python2"))
    with pytest.raises(ValueError, match=message):
        load_source("cifar100", root=tmp_path, weights=weights)


@pytest.mark.usefixtures("cache")
def test_damaged_cifar_files(tmp_path: Path, weights: Path) -> None:
    write_cifar100(tmp_path)
    path = tmp_path / "cifar-100-python" / "train"
    content = path.read_bytes()
    for damaged in (b"", content[:100], content[:-200], b"\x80\x02cnumpy\nndarray\n)R."):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="not a CIFAR file"):
            load_source("cifar100", root=tmp_path, weights=weights)
    path.unlink()
    with pytest.raises(FileNotFoundError, match="torchvision's layout"):
        load_source("cifar100", root=tmp_path, weights=weights)

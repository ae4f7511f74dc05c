"""Baskets from files: what is read, and what is refused, by line number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from torchcpl.tasks.baskets import data
from torchcpl.tasks.baskets.benchmark import BasketsBenchmark
from torchcpl.tasks.baskets.data import PARTS, Baskets, read_parts
from torchcpl.tasks.baskets.task import BasketsConfig


def load_baskets(source: str, **options: Any) -> Baskets:
    return data.load_baskets(BasketsConfig(source=source, **options))


def shop(folder: Path, items: str | None = "ball\nbib\ncot\n", **parts: str) -> str:
    """A shop in the format of the registries; parts that are not given have one basket."""
    for part in PARTS:
        (folder / f"toys.{part}.txt").write_text(parts.get(part, "0 1\n2\n"))
    if items is not None:
        (folder / "toys.items.txt").write_text(items)
    return str(folder / "toys")


def test_parts_and_names(tmp_path: Path) -> None:
    found = load_baskets(shop(tmp_path, test="2 0\n1\n0 1 2\n"))
    assert found.name == "toys"
    assert found.names == ["ball", "bib", "cot"]
    assert found.train.tolist() == [[0, 1], [2, -1]]
    assert found.test.tolist() == [[2, 0, -1], [1, -1, -1], [0, 1, 2]]


def test_names_in_the_lines(tmp_path: Path) -> None:
    """With the items' file and without, between commas or tabs, quoted where a name has a comma."""
    lines = '"ball, red", bib\nbib\n'
    with_file = load_baskets(shop(tmp_path, "bib\nball, red\n", train=lines, valid="bib\n", test="bib\n"))
    assert with_file.train.tolist() == [[1, 0], [0, -1]]
    (tmp_path / "toys.items.txt").unlink()
    tabs = "ball, red\tbib\nbib\n"
    without = load_baskets(shop(tmp_path, None, train=tabs, valid="bib\n", test="ball, red\tbib\n"))
    assert without.names == ["ball, red", "bib"]
    assert without.train.tolist() == [[0, 1], [1, -1]]


def test_one_file_is_divided_by_a_seed(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    baskets = [" ".join(map(str, rng.permutation(9)[: rng.integers(1, 5)])) for _ in range(50)]
    path = tmp_path / "orders.txt"
    path.write_text("\n".join(baskets))

    def rows(found: Baskets) -> list[tuple[int, ...]]:
        return [tuple(i for i in row if i >= 0) for part in PARTS for row in getattr(found, part).tolist()]

    one, same, other = (load_baskets(str(path), split_seed=seed) for seed in (0, 0, 1))
    assert [len(one.train), len(one.valid), len(one.test)] == [35, 5, 10]
    assert rows(one) == rows(same) != rows(other)
    assert sorted(rows(one)) == sorted(rows(other)) == sorted(tuple(map(int, b.split())) for b in baskets)
    counted = load_baskets(str(path), valid_baskets=3, test_baskets=20)
    assert [len(counted.train), len(counted.valid), len(counted.test)] == [27, 3, 20]


@pytest.mark.parametrize(
    ("part", "text", "said"),
    [
        ("train", "0 1\n\n2\n", r"toys.train.txt:2: expected a basket, got an empty line"),
        ("test", "", r"toys.test.txt: expected a basket a line, got an empty file"),
        ("valid", "0 1\n2 0 2\n", r"toys.valid.txt:2: expected every item once, got '2' again"),
        ("test", "0\n1\n3\n", r"toys.test.txt:3: expected a number below 3, got '3'"),
        ("train", "0 x\n", r"toys.train.txt:1: expected one of the 3 items, got '0 x'"),
        ("train", "ball, bat\n", r"toys.train.txt:1: expected one of the 3 items, got 'bat'"),
        ("train", "0 1 2\n", r"toys.train.txt:1: expected at most 2 items \(max_items\), got 3"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, part: str, text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        load_baskets(shop(tmp_path, **{part: text}), max_items=2)


def test_an_item_that_only_the_test_part_has(tmp_path: Path) -> None:
    source = shop(tmp_path, train="0 1\n", valid="0\n", test="1\n1 2\n")
    with pytest.warns(UserWarning, match=r"toys.test.txt:2: 'cot' is in no training basket"):
        assert load_baskets(source).test.tolist() == [[1, -1], [1, 2]]
    (tmp_path / "toys.items.txt").unlink()  # then it is in no list at all
    with pytest.raises(ValueError, match=r"toys.test.txt:2: expected a number below 2, got '2'"):
        load_baskets(source)


def test_missing_files_and_wrong_features(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected a file, or FOLDER/NAME with .*toys.train.txt"):
        load_baskets(str(tmp_path / "toys"))
    source = shop(tmp_path)
    np.save(tmp_path / "wrong.npy", np.zeros((2, 4)))
    with pytest.raises(ValueError, match=r"wrong.npy: expected finite numbers \(3, d\), a row an item, got \(2, 4\)"):
        load_baskets(source, features=str(tmp_path / "wrong.npy"))
    np.save(tmp_path / "words.npy", np.array([["a"], ["b"], ["c"]]))
    np.save(tmp_path / "large.npy", np.full((3, 4), 1e300))  # infinite in float32
    with pytest.raises(ValueError, match=r"large.npy: expected finite numbers \(3, d\)"):
        load_baskets(source, features=str(tmp_path / "large.npy"))
    with pytest.raises(ValueError, match=r"words.npy: expected numbers, got an array of dtype <U1"):
        load_baskets(source, features=str(tmp_path / "words.npy"))
    with pytest.raises(FileNotFoundError, match=r"absent.npy: no such file"):
        load_baskets(source, features=str(tmp_path / "absent.npy"))
    with pytest.raises(ValueError, match=r"expected more baskets than 300 \+ 2000 to hold out, got 6"):
        load_baskets(source, split="random", valid_baskets=300, test_baskets=2000)


def test_files_that_changed_under_their_name_are_read_again(tmp_path: Path) -> None:
    config, benchmark = BasketsConfig(source=shop(tmp_path)), BasketsBenchmark()
    first = benchmark.make_task(config).baskets
    assert benchmark.make_task(config).baskets is first
    shop(tmp_path, train="0 1 2\n0\n")
    assert benchmark.make_task(config).baskets.train.tolist() == [[0, 1, 2], [0, -1, -1]]
    alone = BasketsConfig(source=str(tmp_path / "toys.train.txt"), valid_baskets=1, test_baskets=0)
    (tmp_path / "toys.train.txt").write_text("0 1\n1\n0\n2\n")
    assert benchmark.make_task(alone).baskets.names == ["ball", "bib", "cot"]
    (tmp_path / "toys.items.txt").write_text("ball\nbib\nbed\n")
    assert benchmark.make_task(alone).baskets.names == ["ball", "bib", "bed"]


def test_padding() -> None:
    assert data.padded([[2], [0, 1], []]).tolist() == [[2, -1], [0, 1], [-1, -1]]
    assert data.padded([]).shape == (0, 0)


def test_the_names_beside_one_file_are_read_again(tmp_path: Path) -> None:
    (tmp_path / "orders.txt").write_text("0 1\n" * 20)
    (tmp_path / "orders.items.txt").write_text("ball\nbib\n")
    config, benchmark = BasketsConfig(source=str(tmp_path / "orders.txt")), BasketsBenchmark()
    assert benchmark.make_task(config).baskets.names == ["ball", "bib"]
    (tmp_path / "orders.items.txt").write_text("cot\nbibs\n")
    assert benchmark.make_task(config).baskets.names == ["cot", "bibs"]


def test_meals_can_be_split_and_have_features_too(tmp_path: Path) -> None:
    given, drawn = load_baskets("meals"), load_baskets("meals", split="random", test_baskets=500)
    assert (len(given.train), len(given.valid), len(given.test)) == (2000, 300, 600)
    assert (len(drawn.train), len(drawn.valid), len(drawn.test)) == (2110, 290, 500)
    np.save(tmp_path / "rows.npy", np.zeros((3, 4)))
    with pytest.raises(ValueError, match=r"rows.npy: expected finite numbers \(11, d\), a row an item, got \(3, 4\)"):
        load_baskets("meals", features=str(tmp_path / "rows.npy"))


@pytest.mark.filterwarnings("error")
def test_parts_that_are_drawn_again_have_no_unseen_items(tmp_path: Path) -> None:
    source = shop(tmp_path, train="0 1\n", valid="0\n", test="1\n1 2\n")
    assert len(load_baskets(source, split="random").train) == 2


def test_the_registries(shared_data: Path) -> None:
    found = load_baskets(str(shared_data / "baby-registries" / "gifts"))
    assert (found.num_items, len(found.train), len(found.valid), len(found.test)) == (16, 2777, 397, 794)
    assert found.names[2] == "Gift Cards"


def test_parts_of_baskets(tmp_path: Path) -> None:
    path, source = tmp_path / "new.txt", tmp_path / "b.txt"

    def parts(source: object = source) -> list[list[int]]:
        return [part.tolist() for part in read_parts(path, str(source), 3)]

    path.write_text("4 0 2\n")
    assert parts() == [[4, 0, 2]]
    path.write_text("jam\n")
    with pytest.raises(ValueError, match=r"numbers of items, or .*new\.items\.txt or in the run's .*b\.txt"):
        parts()
    source.write_text("jam, bread\ntea\n")
    assert parts() == [[1]]
    assert [part.tolist() for part in read_parts(source, str(source), 3)] == [[1, 0], [2]]
    source.write_text("jam, bread\n")  # its items have other numbers now
    with pytest.raises(ValueError, match=r"b\.txt \(3 items, found 2\), got 'jam'"):
        parts()
    assert parts(shop(tmp_path, "tea\nball\njam\n")) == [[2]]
    path.write_text("0\njam\n")
    with pytest.raises(ValueError, match=r"found 0.*, got 'jam'"):
        parts(tmp_path / "gone")
    (tmp_path / "new.items.txt").write_text("jam\nbread\n")
    assert parts() == [[0], [0]]

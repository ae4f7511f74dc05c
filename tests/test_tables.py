"""Tables: what is averaged, what stands where, what is bold, and that no form of output loses a digit."""

from __future__ import annotations

import dataclasses
import html.parser
import io
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from torchcpl.tables import Column, Table, summarise

COLUMNS = (
    Column("method", "Method"),
    Column("f1", "F1", 3, "max", share=True),
    Column("err", "Error", 2, "min"),
    Column("ms", "ms", 1, "min"),
)
ROWS: list[dict[str, Any]] = [
    {"method": "oracle", "rule": None, "reference": True, "f1": 0.99, "err": 0.0, "ms": 0.1},
    {"method": "ours", "rule": "test", "f1": 0.85309, "f1_std": 0.0042, "err": 1.5, "err_std": 0.25, "ms": None},
    {"method": "theirs", "rule": "test", "f1": 0.8, "err": 0.5, "ms": 12.0},
    {"method": "ours", "rule": "dev", "f1": 0.7, "err": 2.0, "ms": 3.0},
    {"method": "theirs", "rule": "dev", "f1": 0.7, "err": 3.0, "ms": 4.0},
]
PUBLISHED = [{"method": "ours", "f1": 0.9, "err": 0.75, "ms": None}, {"method": "absent", "f1": 1, "err": 1, "ms": 1}]
TABLE = Table("A title", COLUMNS, ROWS, PUBLISHED, ("First note.", "Second."), {"command": "x", "seeds": [0, 1]})


def shown(table: Table, width: int) -> list[str]:
    """The lines that a terminal of so many columns is sent."""
    file = io.StringIO()
    Console(file=file, width=width).print(table.rich(width), crop=False)
    return [line.rstrip() for line in file.getvalue().splitlines()]


class Cells(html.parser.HTMLParser):
    """The texts of an HTML table's cells, row by row; bold ones between asterisks."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.kinds: list[str | None] = []
        self.tags: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
            self.kinds.append(dict(attrs).get("class"))
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag == "b":
            self.rows[-1][-1] += "*"

    def handle_endtag(self, tag: str) -> None:
        if tag == "b":
            self.rows[-1][-1] += "*"

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data


EXPECTED = [
    ["oracle", ".990", "0.00", "0.1"],
    ["chosen on test"],
    ["ours", "*.853±.004*", "1.50±0.25", "–"],
    ["published", ".900", "0.75", "–"],
    ["theirs", ".800", "*0.50*", "*12.0*"],
    ["chosen on dev"],
    ["ours", "*.700*", "*2.00*", "*3.0*"],  # what is published stands once, under the first rule
    ["theirs", "*.700*", "3.00", "4.0"],  # a tie has two best
]


def test_html_has_every_row_in_its_place_and_the_best_bold() -> None:
    cells = Cells(TABLE.html())
    assert cells.rows[0] == ["Method", "F1 ↑", "Error ↓", "ms ↓"]
    assert [[cell.strip() for cell in row] for row in cells.rows[1:]] == EXPECTED
    assert cells.kinds == [None, "ours", "rule", "ours", "published", "ours", "rule", "ours", "ours"]


def test_markdown_says_the_same() -> None:
    lines = TABLE.markdown().splitlines()
    assert lines[:2] == ["| Method | F1 ↑ | Error ↓ | ms ↓ |", "|---|--:|--:|--:|"]
    body = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")][2:]
    plain = [[c.replace("**", "*").replace("<sub>", "").replace("</sub>", "") for c in row] for row in body]
    plain = [[row[0].strip("*")] if not any(row[1:]) else row for row in plain]
    assert plain == EXPECTED
    assert [line for line in lines if line and not line.startswith("|")] == ["First note.", "Second."]


def test_one_rule_needs_no_heading_and_one_rival_is_not_the_best() -> None:
    table = dataclasses.replace(TABLE, rows=ROWS[:2], published=())
    assert [[c.strip() for c in row] for row in Cells(table.html()).rows[1:]] == [
        ["oracle", ".990", "0.00", "0.1"], ["ours", ".853±.004", "1.50±0.25", "–"]
    ]  # fmt: skip


def test_foreign_text_stays_text() -> None:
    rows = [{"method": "<img src=x>|[bold]&", "rule": r, "f1": 0.1, "err": 1.0, "ms": 1.0} for r in ("<i>", "[/]")]
    table = Table("[red]t[/red]", COLUMNS, rows, (), ("a [b]note[/b]",))
    cells = Cells(table.html())
    assert cells.tags <= {"table", "thead", "tbody", "tr", "th", "td", "b"}
    assert cells.rows[2][0] == "<img src=x>|[bold]&"
    assert "<img src=x>\\|[bold]& |" in table.markdown()
    text = "\n".join(shown(table, 80))
    assert all(part in text for part in ("[red]t[/red]", "<img src=x>|[bold]&", "a [b]note[/b]", "chosen on [/]"))


@pytest.mark.parametrize("width", [200, 80, 60, 30])
def test_no_terminal_is_too_narrow_for_a_number(width: int) -> None:
    wide = tuple(Column(f"n{i}", f"Number {i}", 3, "min") for i in range(5))
    names = ("Pointer (AR), recomputing", "CPL")
    rows = [
        {"method": name, "rule": rule, **{c.name: 123.456 for c in wide}, **{f"{c.name}_std": 12.345 for c in wide}}
        for name in names
        for rule in ("a rule in a great many words", "another")
    ]
    lines = shown(Table("Speed", (COLUMNS[0], *wide), rows, rows[:1], ("A note.",)), width)
    text = "\n".join(lines)
    assert "…" not in text
    assert text.count("123.456±12.345") == 5 * (len(rows) + 1)
    assert all(column.heading() in text for column in wide)
    words = " ".join(text.split())
    assert all(word in words for word in ("Pointer", "recomputing", "great", "another", "A note."))
    if width >= 130:
        assert max(map(len, lines)) <= width
        assert any("Pointer (AR), recomputing" in line for line in lines)


def test_a_table_that_fits_is_not_widened() -> None:
    assert max(map(len, shown(TABLE, 60))) <= 60
    assert max(map(len, shown(TABLE, 200))) < 60


def test_the_terminal_shows_every_cell_in_order() -> None:
    lines = [line.split() for line in shown(TABLE, 80)]
    for row in EXPECTED:
        assert [part.strip("*") for cell in row for part in cell.split()] in lines


def test_json_there_and_back(tmp_path: Path) -> None:
    TABLE.write(tmp_path / "t.json")
    assert Table.read(tmp_path / "t.json", COLUMNS) == dataclasses.replace(TABLE, rows=ROWS, published=PUBLISHED)
    written = json.loads((tmp_path / "t.json").read_text())
    assert written["rows"] == ROWS
    assert written["seeds"] == [0, 1]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{oops", "not JSON"),
        ("[1]", "expected an object"),
        ('{"title": "t", "rows": []}', "notes is missing"),
        ('{"title": "t", "notes": [], "published": [], "rows": [3]}', "rows: 0: expected an object, got 3"),
        ('{"title": "t", "notes": [], "published": [{}], "rows": []}', "published: 0: method is missing"),
        ('{"title": "t", "notes": [], "published": [], "rows": [{"method": "x", "f1": 1}]}', "expected err, ms"),
    ],
)
def test_a_file_that_is_no_such_table_is_refused(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "t.json").write_text(content)
    with pytest.raises(ValueError, match=said) as error:
        Table.read(tmp_path / "t.json", COLUMNS)
    assert "t.json" in str(error.value)


def test_nan_is_not_written(tmp_path: Path) -> None:
    table = dataclasses.replace(TABLE, rows=[{"method": "x", "f1": float("nan"), "err": 1, "ms": 1}])
    with pytest.raises(ValueError, match=r"t\.json: cannot be written"):
        table.write(tmp_path / "t.json")
    assert not list(tmp_path.iterdir())


def test_summaries_are_means_and_sample_deviations() -> None:
    values = [0.1, 0.4, 0.35]
    found = summarise([{"a": value, "b": 2 * value} for value in values])
    assert found["a"] == pytest.approx(statistics.mean(values))
    assert found["a_std"] == pytest.approx(statistics.stdev(values))
    assert found["b_std"] == pytest.approx(2 * statistics.stdev(values))
    assert summarise([{"a": 1.0, "b": None}]) == {"a": 1.0, "b": None}
    assert summarise([{"a": 1.0}, {"a": None}]) == {"a": None}
    with pytest.raises(ValueError, match="at least one"):
        summarise([])
    with pytest.raises(ValueError, match=r"expected the names \['a'\] in each, got \['b'\]"):
        summarise([{"a": 1.0}, {"b": 1.0}])


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"f1": 0.9996}, "1.000"),
        ({"f1": 0.0}, ".000"),
        ({"f1": 0.5, "f1_std": 0.0}, ".500±.000"),
        ({"f1": None, "f1_std": None}, "–"),
        ({}, "–"),
    ],
)
def test_shares(row: dict[str, Any], said: str) -> None:
    assert COLUMNS[1].cell(row) == said

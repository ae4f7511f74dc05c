"""Tables of results: mean ± std over seeds; as text, Markdown, HTML and JSON."""

from __future__ import annotations

import html
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torchcpl.files import NUMBER, extra, read_json, write_json

if TYPE_CHECKING:
    from rich.table import Table as RichTable

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """One column: its key in a row, its title, and its number format.

    ``digits`` after the point, None for text. ``share`` values are in [0, 1] and written without the leading zero.
    ``best`` says which value is printed bold: ``max``, ``min`` or none.
    """

    name: str
    title: str
    digits: int | None = None
    best: str = ""
    share: bool = False

    def heading(self) -> str:
        return self.title + {"max": " ↑", "min": " ↓", "": ""}[self.best]

    def cell(self, row: Row) -> str:
        """The formatted value of a row, ± its deviation if there is one, "–" for None.

        >>> Column("f1", "F1", 3, share=True).cell({"f1": 0.8531, "f1_std": 0.0042})
        '.853±.004'
        >>> Column("f1", "F1", 3, share=True).cell({"f1": 1.0}), Column("ms", "ms", 2).cell({"ms": None})
        ('1.000', '–')
        """
        value, deviation = row.get(self.name), row.get(f"{self.name}_std")
        if self.digits is None or value is None:
            return "–" if value is None else str(value)
        return self._number(value) + ("" if deviation is None else f"±{self._number(deviation)}")

    def _number(self, value: float) -> str:
        text = f"{value:.{self.digits}f}"
        return text.removeprefix("0") if self.share and text.startswith("0.") else text


def summarise(records: Sequence[Row]) -> dict[str, float | None]:
    """The mean of every number over the records, and its sample deviation ``<name>_std`` where there are several.

    A name that is None in some record is None.

    >>> summarise([{"f1": 1.0}, {"f1": 2.0}, {"f1": 3.0}])
    {'f1': 2.0, 'f1_std': 1.0}
    """
    if not records:
        raise ValueError("records: expected at least one, got none")
    differing = [sorted(record) for record in records if record.keys() != records[0].keys()]
    if differing:
        raise ValueError(f"records: expected the names {sorted(records[0])} in each, got {differing[0]}")
    summary: dict[str, float | None] = {}
    for name in records[0]:
        values = [record[name] for record in records]
        missing = any(value is None for value in values)
        summary[name] = None if missing else statistics.fmean(values)
        if len(records) > 1 and not missing:
            summary[f"{name}_std"] = statistics.stdev(values)
    return summary


@dataclass(frozen=True)
class Table:
    """Rows under columns; the first column names the row.

    Rows of one ``section`` or, without, of one ``rule`` (how a checkpoint was chosen) stand together. A ``reference``
    row does not compete for the best value.
    """

    title: str
    columns: tuple[Column, ...]
    rows: Sequence[Row]
    published: Sequence[Row] = ()  # shown under ours of the same name
    notes: tuple[str, ...] = ()  # printed below the table
    info: Mapping[str, Any] = field(default_factory=dict)  # provenance (`run_info`), written to the JSON

    def content(self) -> dict[str, Any]:
        """The JSON object of the table."""
        lists = {name: list(getattr(self, name)) for name in ("notes", "rows", "published")}
        return {"title": self.title, **self.info, **lists}

    def json(self) -> str:
        return json.dumps(self.content(), indent=2, ensure_ascii=False, allow_nan=False)

    def write(self, path: str | Path) -> None:
        """As JSON, atomically."""
        write_json(path, self.content())

    @classmethod
    def read(cls, path: str | Path, columns: tuple[Column, ...]) -> Table:
        """A table that was written."""
        numbers = [f"{column.name}{ending}" for column in columns[1:] for ending in ("?", "_std?")]
        row = {
            columns[0].name: str,
            "rule?": (str, type(None)),
            "section?": str,
            **dict.fromkeys(numbers, (*NUMBER, type(None))),
        }
        content = read_json(path, {"title": str, "notes": [str], "rows": [row], "published": [row]})
        parts = {name: content.pop(name) for name in ("title", "rows", "published", "notes")}
        absent = [column.name for column in columns if not any(column.name in row for row in parts["rows"])]
        if absent:
            raise ValueError(f"{path}: a table of other columns, expected {', '.join(absent)} among them")
        return cls(parts["title"], columns, parts["rows"], parts["published"], tuple(parts["notes"]), content)

    def rich(self, width: int = 80) -> RichTable:
        """For a terminal of ``width`` columns: names wrap, numbers never; the table is wider if they need more."""
        with extra():
            from rich import box
            from rich.table import Table as RichTable
            from rich.text import Text

        lines = list(self._lines())
        table = RichTable(
            title=Text(self.title), title_style="bold", title_justify="left", caption=Text("\n".join(self.notes)),
            caption_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0),
        )  # fmt: skip
        least = 2  # the box's edges
        for at, column in enumerate(self.columns):
            text = column.digits is None
            said = [column.heading(), *(line.cells[at][0] for line in lines if at < len(line.cells))]
            least += 2 + max(len(part) for cell in said for part in (cell.split() if text else [cell]))
            table.add_column(Text(column.heading()), justify="left" if text else "right", no_wrap=not text)
        if least > width:
            table.width = least
        for line in lines:
            if line.kind == "rule":
                table.add_section()
            cells = [Text(text, style="bold" if bold else "") for text, bold in line.cells]
            table.add_row(*cells, style={"rule": "italic", "published": "dim", "ours": ""}[line.kind])
        return table

    def markdown(self) -> str:
        """As a Markdown table, its notes below."""
        heads = [column.heading() for column in self.columns]
        lines = ["| " + " | ".join(heads) + " |"]
        lines.append("|" + "|".join("---" if column.digits is None else "--:" for column in self.columns) + "|")
        for line in self._lines():
            mark = {"rule": "*{}*", "published": "<sub>{}</sub>", "ours": "{}"}[line.kind]
            cells = [("**{}**" if bold else mark).format(text.strip().replace("|", "\\|")) for text, bold in line.cells]
            cells += [""] * (len(heads) - len(cells))
            lines.append("| " + " | ".join(cells) + " |")
        return "\n".join([*lines, *(f"\n{note}" for note in self.notes)]) + "\n"

    def html(self) -> str:
        """As an HTML table element."""
        heads = "".join(f"<th>{html.escape(column.heading())}</th>" for column in self.columns)
        body = []
        for line in self._lines():
            start = f'<td colspan="{len(self.columns)}">' if line.kind == "rule" else "<td>"
            texts = [f"<b>{html.escape(text)}</b>" if bold else html.escape(text) for text, bold in line.cells]
            body.append(f'<tr class="{line.kind}">' + "".join(f"{start}{text}</td>" for text in texts) + "</tr>")
        return f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(body)}</tbody></table>"

    def _lines(self) -> Iterator[_Line]:
        sections = list(dict.fromkeys(map(_section, self.rows)))
        headings = len([section for section in sections if section]) > 1
        published = {row[self.columns[0].name]: row for row in self.published}
        for section in sections:
            if section and headings:
                yield _Line("rule", [(section, False)])
            group = [row for row in self.rows if _section(row) == section]
            found = self._best(group)
            for row in group:
                best = {} if row.get("reference") else found
                cells = [(c.cell(row), c.name in best and row.get(c.name) == best[c.name]) for c in self.columns]
                yield _Line("ours", cells)
                theirs = published.pop(row[self.columns[0].name], None)  # once, under the first rule
                if theirs:
                    texts = ["  published", *(column.cell(theirs) for column in self.columns[1:])]
                    yield _Line("published", [(text, False) for text in texts])

    def _best(self, group: Sequence[Row]) -> dict[str, Any]:
        """The best value of every column that has one, where several rows compete for it."""
        rivals = [row for row in group if not row.get("reference")]
        found = {}
        for column in self.columns if len(rivals) > 1 else ():
            values = [row[column.name] for row in rivals if row.get(column.name) is not None]
            if column.best and values:
                found[column.name] = max(values) if column.best == "max" else min(values)
        return found


def _section(row: Row) -> str:
    rule = row.get("rule")
    return str(row.get("section") or (f"chosen on {rule}" if rule else ""))


class _Line(NamedTuple):
    kind: str  # rule, ours, published
    cells: list[tuple[str, bool]]  # the text, and whether it is bold

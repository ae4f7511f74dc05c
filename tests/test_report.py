"""The report is one file that needs nothing else, and says what it was given as text."""

from __future__ import annotations

import base64
import html.parser
from pathlib import Path

import numpy as np
import pytest

from torchcpl import plots
from torchcpl.report import Panel, write_report
from torchcpl.tables import Column, Table

EVIL = '<script>alert("1")</script> & "quoted"'
LOADING = {"script", "link", "iframe", "object", "embed", "video", "audio", "base", "form"}


class Page(html.parser.HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    curve = {"A": plots.Curve(np.array([1, 2]), np.array([[0.5, 0.6]]), (2, 0.6))}
    figures = [plots.convergence(curve, Column("f1", title, 3), {"A": "#112233"}) for title in (EVIL, "F1")]
    panels = [
        Panel("lines", f"Lines {EVIL}", f"Caption {EVIL}", figures[0]),
        Panel("pixels", "Pixels", "Caption", figures[1], wide=True, dense=True),
    ]
    table = Table(
        EVIL,
        (Column("method", "Method"), Column("f1", "F1", 3)),
        [{"method": EVIL, "f1": 0.5}],
        (),
        (f"Note {EVIL}",),
        {"command": f"torchcpl {EVIL}", "commit": "abc", "dirty": True, "versions": {"torch": "2"}, "seeds": [3, 4]},
    )
    path = tmp_path_factory.mktemp("report") / "deep" / "report.html"
    write_report(path, EVIL, [f"Finding {EVIL}"], table, panels, {f"run {EVIL}": f"x = '{EVIL}'"}, [EVIL])
    return Page(path.read_text(encoding="utf-8"))


def test_it_is_well_formed_and_loads_nothing(page: Page) -> None:
    assert page.open == []
    assert not {tag for tag, _ in page.tags} & LOADING
    for tag, attributes in page.tags:
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in ("src", "href", "srcset", "data", "action"):
                assert tag == "img"
                assert value
                assert value.startswith("data:image/")
    style = page.text.split("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style


def test_foreign_text_is_shown_as_it_is(page: Page) -> None:
    for said in (f"Lines {EVIL}", f"Caption {EVIL}", f"Finding {EVIL}", f"Note {EVIL}", f"run {EVIL}", f"x = '{EVIL}'"):
        assert said in page.text
    assert f"torchcpl {EVIL}" in page.text
    assert page.text.count(EVIL) >= 11


def test_images_are_embedded_as_lines_or_pixels(page: Page) -> None:
    lines, pixels = (attributes for tag, attributes in page.tags if tag == "img")
    kind, _, data = str(lines["src"]).partition(",")
    assert kind == "data:image/svg+xml;base64"
    assert b"<svg" in base64.b64decode(data)
    kind, _, data = str(pixels["src"]).partition(",")
    assert kind == "data:image/png;base64"
    assert base64.b64decode(data).startswith(b"\x89PNG")
    assert lines["alt"] == f"Lines {EVIL}"
    shown = [attributes for tag, attributes in page.tags if tag == "figure"]
    assert [figure["id"] for figure in shown] == ["lines", "pixels"]
    assert [figure["class"] for figure in shown] == ["card", "card wide"]


def test_it_says_how_to_get_it_again(page: Page) -> None:
    for said in ("abc with changes", "torch 2", "3, 4"):
        assert said in page.text
    assert "None" not in page.text  # the device is not known


def test_a_table_without_its_origin(tmp_path: Path) -> None:
    table = Table("T", (Column("method", "Method"),), [])
    write_report(tmp_path / "r.html", "", [], table, [], {}, [])
    assert "None" not in Page((tmp_path / "r.html").read_text(encoding="utf-8")).text

"""A self-contained HTML report: table, figures, configurations, and the commands that reproduce them."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, NamedTuple

from torchcpl.files import data_url, write_atomic
from torchcpl.plots import render, save
from torchcpl.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE = Template(Path(__file__).with_name("report.html").read_text(encoding="utf-8"))


class Panel(NamedTuple):
    """A figure of the report, or the bytes of a GIF. A dense figure is embedded as PNG, any other as SVG.

    A wide one takes a whole row.
    """

    name: str
    title: str
    caption: str
    figure: Figure | bytes
    wide: bool = False
    dense: bool = False


def write_report(
    path: str | Path,
    lead: str,
    findings: Sequence[str],
    table: Table,
    panels: Sequence[Panel],
    configs: Mapping[str, str],
    commands: Sequence[str],
) -> None:
    """Write the page, with everything embedded.

    ``findings`` are sentences under the title, ``configs`` TOML texts by name; ``commands`` go below the table's own.
    """
    info = table.info
    facts = {
        "commit": (info.get("commit") or "–") + (" with changes" if info.get("dirty") else ""),
        "device": info.get("device"),
        "versions": ", ".join(f"{name} {version}" for name, version in info.get("versions", {}).items()),
        "seeds": ", ".join(map(str, info.get("seeds", []))),
    }
    page = PAGE.substitute(
        title=html.escape(table.title),
        lead=html.escape(lead),
        findings="".join(f"<li>{html.escape(finding)}</li>" for finding in findings),
        table=table.html(),
        notes=" ".join(map(html.escape, table.notes)),
        figures="".join(map(_figure, panels)),
        commands=html.escape("\n".join([info.get("command") or "–", *commands])),
        facts="".join(f"<dt>{name}</dt><dd>{html.escape(str(value or '–'))}</dd>" for name, value in facts.items()),
        configs="".join(
            f"<details><summary>{html.escape(name)}</summary><pre>{html.escape(text)}</pre></details>"
            for name, text in configs.items()
        ),
    )
    write_atomic(path, page.encode())


def save_panels(panels: Sequence[Panel], folder: str | Path) -> None:
    """Write the figures as PNG and SVG and the animations as GIF, each under the name of its panel."""
    for panel in panels:
        stem = Path(folder) / panel.name
        if isinstance(panel.figure, bytes):
            write_atomic(f"{stem}.gif", panel.figure)
        else:
            save(panel.figure, stem)


def _figure(panel: Panel) -> str:
    if isinstance(panel.figure, bytes):
        mime, content = "image/gif", panel.figure
    else:
        kind, mime = ("png", "image/png") if panel.dense else ("svg", "image/svg+xml")
        content = render(panel.figure, kind)
    return (
        f'<figure class="card{" wide" if panel.wide else ""}" id="{html.escape(panel.name)}">'
        f'<div class="scroll"><img src="{data_url(mime, content)}" alt="{html.escape(panel.title)}"></div>'
        f"<figcaption><b>{html.escape(panel.title)}.</b> {html.escape(panel.caption)}</figcaption></figure>"
    )

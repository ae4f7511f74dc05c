"""One HTML file that holds everything: table, figures, configurations, and how to get them again."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from torchcpl.plots import render, save
from torchcpl.results import write_atomic
from torchcpl.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CSS = r"""
:root { --ink: #1c2127; --soft: #5b6470; --line: #e3e7ec; --paper: #ffffff; --ground: #f5f6f8; --accent: #2f6fb0; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); line-height: 1.55;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 2.5rem 1rem 4rem; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 .4rem; letter-spacing: -.01em; }
h2 { font-size: 1.15rem; margin: 2.6rem 0 .8rem; }
p { margin: .5rem 0; } .lead { color: var(--soft); font-size: 1.05rem; max-width: 46rem; }
ul.findings { padding-left: 1.1rem; margin: 1rem 0 0; max-width: 46rem; } ul.findings li { margin: .3rem 0; }
.card { background: var(--paper); border: 1px solid var(--line); border-radius: 12px; padding: 1.1rem 1.2rem; }
/* What overflows scrolls, with a shadow at the edge where there is more. */
.scroll { overflow-x: auto; background:
  linear-gradient(to right, var(--paper) 30%, transparent) left / 2.5rem 100% no-repeat local,
  linear-gradient(to left, var(--paper) 30%, transparent) right / 2.5rem 100% no-repeat local,
  linear-gradient(to right, #0004, transparent) left / .8rem 100% no-repeat scroll,
  linear-gradient(to left, #0004, transparent) right / .8rem 100% no-repeat scroll; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .95rem; }
th, td { padding: .45rem .7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
th { font-weight: 600; color: var(--soft); font-size: .85rem; }
tr:last-child td { border-bottom: 0; }
tr.published td { color: var(--soft); font-size: .85rem; } tr.published td:first-child { padding-left: 1.6rem; }
tr.rule td { font-style: italic; color: var(--soft); padding-top: 1rem; }
.notes { color: var(--soft); font-size: .85rem; margin: .8rem 0 0; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1rem; }
figure { margin: 0; display: flex; flex-direction: column; } figure.wide { grid-column: 1 / -1; }
figure img { display: block; width: 100%; height: auto; margin: auto; }
figure.wide img { max-width: 52rem; min-width: 36rem; }
figure .scroll { margin: auto 0; }
figcaption { font-size: .88rem; color: var(--soft); margin-top: .8rem; } figcaption b { color: var(--ink); }
pre { background: #1c2127; color: #e8ecf1; border-radius: 10px; padding: .9rem 1rem; overflow-x: auto;
  font: .84rem/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; margin: .6rem 0; }
details { border-top: 1px solid var(--line); padding: .6rem 0; } details:first-of-type { border-top: 0; }
summary { cursor: pointer; font-weight: 600; font-size: .95rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; margin: 0; font-size: .9rem; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 40rem) {
  th, td { padding: .4rem .45rem; } table { font-size: .85rem; } .card { padding: .9rem .8rem; }
  figure.wide::before, .table::before { content: "scroll sideways \2192"; display: block; text-align: right;
    color: var(--soft); font-size: .8rem; margin-bottom: .3rem; }
}
@media print { body { background: none; } .card { break-inside: avoid; } }
"""


class Panel(NamedTuple):
    """A figure of the report, or the bytes of a GIF. A dense figure is set as pixels, any other as lines.

    A wide one has a row to itself.
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
    """Write a page that needs nothing but itself.

    ``findings`` are sentences under the table's title, ``configs`` names TOML texts, ``commands`` reproduce the page.
    """
    said = "".join(f"<li>{html.escape(finding)}</li>" for finding in findings)
    notes = " ".join(map(html.escape, table.notes))
    settings = "".join(
        f"<details><summary>{html.escape(name)}</summary><pre>{html.escape(text)}</pre></details>"
        for name, text in configs.items()
    )
    versions = ", ".join(f"{name} {version}" for name, version in table.info.get("versions", {}).items())
    facts = {
        "command": table.info.get("command"),
        "commit": (table.info.get("commit") or "–") + (" with changes" if table.info.get("dirty") else ""),
        "device": table.info.get("device"),
        "versions": versions,
        "seeds": ", ".join(map(str, table.info.get("seeds", []))),
    }
    known = "".join(f"<dt>{name}</dt><dd>{html.escape(str(value or '–'))}</dd>" for name, value in facts.items())
    lines = html.escape("\n".join(commands))
    page = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(table.title)}</title>
<style>{_CSS}</style>
</head>
<body><main>
<h1>{html.escape(table.title)}</h1>
<p class="lead">{html.escape(lead)}</p>
<ul class="findings">{said}</ul>
<h2>Results</h2>
<div class="card table"><div class="scroll">{table.html()}</div><p class="notes">{notes}</p></div>
<h2>Figures</h2>
<div class="figures">{"".join(map(_figure, panels))}</div>
<h2>Reproduce</h2>
<div class="card"><pre>{lines}</pre><dl>{known}</dl></div>
<h2>Configurations</h2>
<div class="card">{settings}</div>
</main></body>
</html>
"""
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
    data = base64.b64encode(content).decode()
    return (
        f'<figure class="card{" wide" if panel.wide else ""}" id="{html.escape(panel.name)}">'
        f'<div class="scroll"><img src="data:{mime};base64,{data}" alt="{html.escape(panel.title)}"></div>'
        f"<figcaption><b>{html.escape(panel.title)}.</b> {html.escape(panel.caption)}</figcaption></figure>"
    )

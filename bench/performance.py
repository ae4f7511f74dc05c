"""Write docs/performance.md and its figures from the measurements in results/.

python -m bench.performance
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from bench.claims import Row, find, ratio
from torchcpl.files import read_json, write_atomic
from torchcpl.plots.style import INK, PALETTE, WIDTH, new_figure, render, styled

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "performance.md"
FIGURES = ROOT / "docs" / "figures"

# Numbers in words


def number(value: float) -> str:
    """Three digits, or all before the point: 0.0562, 12.3, 1,234."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def size(row: Row) -> Row:
    """What rows that compare have in common."""
    return {key: row[key] for key in ("B", "N", "T", "dtype")}


def setting(row: Row) -> str:
    """``batch 64, 30 of 1,024, float32``."""
    return f"batch {row['B']:,}, {row['T']} of {row['N']:,}, {row['dtype']}"


def table(header: list[str], lines: list[list[str]], right: int) -> str:
    """Markdown; the columns from ``right`` on are numbers."""
    rule = ["---"] * right + ["--:"] * (len(header) - right)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *lines))


def pivot(rows: list[Row], measure: str = "ms") -> str:
    """A line for every size, a column for every variant; the best of a line in bold."""
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    keys = ["B", "N", "T", *(["h"] if all("h" in row for row in rows) else []), "dtype"]
    lines: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        if measure in row:
            lines.setdefault(tuple(row[key] for key in keys), {})[row["variant"]] = row[measure]
    body = []
    for place, found in lines.items():
        best = min(found.values())
        bold = {v: f"**{number(ms)}**" if ms == best else number(ms) for v, ms in found.items()}
        cells = [bold.get(variant, "–") for variant in variants]
        body.append([f"{part:,}" if isinstance(part, int) else part for part in place] + cells)
    return table([*keys, *variants], body, 0)


def compare(rows: list[Row], work: str, fast: str, others: list[str]) -> list[str]:
    """A sentence for every size at which ``fast`` and at least one of the others were measured."""
    said = []
    for row in rows:
        if row["work"] != work or row["variant"] != fast:
            continue
        times = {other: ratio(find(rows, work, other, **size(row)), row) or 0.0 for other in others}
        parts = [f"{number(times[other])}× for *{other}*" for other in others if times[other]]
        if parts:
            said.append(f"- {setting(row)}: {number(row['ms'])} ms by *{fast}*; {', '.join(parts)}.")
    return said


# The parts of the page


WORKS = {
    "greedy": "Greedy decoding, ms",
    "sample 16": "Sixteen samples a row, ms",
    "predict paths": "Whole predictions, paths, ms",
    "predict subsets": "Whole predictions, subsets, ms",
    "ordered_nll forward": "ordered_nll, forward, ms",
    "ordered_nll forward+backward": "ordered_nll, forward and backward, ms",
    "subset_nll forward": "subset_nll, forward, ms",
    "subset_nll forward+backward": "subset_nll, forward and backward, ms",
}


def asked(info: dict[str, Any]) -> list[str]:
    if not info["claims"]:
        return []
    lines = [
        [c["claim"], "–" if c["value"] is None else f"{c['value']:g}", c["asked"], c["verdict"]] for c in info["claims"]
    ]
    met = sum(c["verdict"] == "met" for c in info["claims"])
    head = f"Of {len(lines)} claims, {met} are met."
    return ["### What is claimed", head, table(["", "measured", "asked", ""], lines, 1)]


def times(rows: list[Row]) -> list[str]:
    parts = []
    for work, title in WORKS.items():
        chosen = [row for row in rows if row["work"] == work]
        if chosen:
            parts += [f"### {title}", pivot(chosen)]
            if work.endswith("forward+backward"):
                parts += ["Peak memory, MiB, the returned gradients included:", pivot(chosen, "peak_mib")]
    return parts


def shares(rows: list[Row]) -> list[str]:
    """Where the time of a prediction goes: what the encoder takes, what comes on top of it, and what others add."""
    said = []
    for task in ("paths", "subsets"):
        work = f"predict {task}"
        for whole in [row for row in rows if row["work"] == work and row["variant"].startswith("cpl,")]:
            how = whole["variant"].removeprefix("cpl, ")
            encoder = find(rows, work, f"encoder, {how}", **size(whole))
            if encoder is None:
                continue
            share = encoder["ms"] / whole["ms"]
            text = f"- {task}, {setting(whole)}, {how}: {number(whole['ms'])} ms, of which the encoder is {share:.0%}"
            for row in rows:
                name, _, its = row["variant"].partition(", ")
                if row["work"] == work and its == how and size(row) == size(whole) and name not in ("cpl", "encoder"):
                    text += f"; {name} takes {row['ms'] / whole['ms']:.2f}×"
            said.append(text + ".")
    launched = []
    for row in rows:
        if row["variant"].endswith(", captured"):
            base = row["variant"].removesuffix(", captured")
            eager = [find(rows, row["work"], variant, **size(row)) for variant in (base, f"{base}, eager")]
            gain = ratio(eager[0] or eager[1], row)
            if gain is not None:
                launched.append((gain, row, base))
    if launched:
        gain, row, base = max(launched, key=lambda entry: entry[0])
        said.append(
            f"- Launching costs most in {row['work']} by *{base}* ({setting(row)}): eager, it takes {gain:.1f}× as "
            "long as its captured graph."
        )
    return ["### Where the time goes", "\n".join(said)] if said else []


def limits(rows: list[Row]) -> list[str]:
    """Against the time a copy of the least that must be read and written would take."""
    copy = next((row for row in rows if row["work"] == "copy"), None)
    if copy is None:
        return []
    rate = copy["mib"] / copy["ms"]  # MiB a millisecond
    lines = []
    for row in rows:
        slow = row["variant"].startswith(("plain", "per-row", "dense", "rollout"))
        if row.get("mib") and row is not copy and not slow:
            floor = row["mib"] / rate
            reached = row["mib"] / row["ms"]
            lines.append(
                [row["work"], row["variant"], setting(row), number(row["mib"]), number(floor), number(row["ms"]),
                 f"{row['ms'] / floor:,.1f}×", f"{number(reached * 2**20 / 1e6)} ({reached / rate:.1%})"]
            )  # fmt: skip
    head = (
        f"A copy of {copy['mib'] / 2:,.0f} MiB moves {rate * 2**20 / 1e6:,.0f} GB/s, bytes read and written. That rate "
        "turns the least that a work must move into a time no version can beat. Where the keys of factored decoding do "
        "not fit on the chip, that is all of them at every step."
    )
    columns = ["work", "variant", "", "least, MiB", "floor, ms", "measured, ms", "over the floor", "GB/s (of the copy)"]
    return ["### How far the limit is", head, table(columns, lines, 3)]


def core(info: dict[str, Any]) -> list[str]:
    lines = [
        [row["work"], *(f"{row[key]:,}" for key in ("B", "N", "T")), number(row["loop_ms"]), number(row["ms"]),
         f"**{row['ratio']:.1f}×**"]
        for row in info["rows"] if "ratio" in row
    ]  # fmt: skip
    memory = info["rows"][-1]
    return [
        "## The core against a loop over rows, permutations and steps",
        provenance(info, "core-cpu.json"),
        table(["work", "B", "N", "T", "loop, ms", "torchcpl, ms", "ratio"], lines, 1),
        f"With {memory['N']:,} candidates, batch {memory['B']}, h = {memory['h']}, training and decoding take "
        f"{memory['peak_mib']:,} MiB; W alone would be {memory['dense_W_mib']:,} MiB.",
    ]


# What a run of all mechanisms showed not to be worth its lines; and what gains as little of a whole step, but half of
# the loss itself or what a prediction must not lose at batch 1.
GONE = ("loss: one launch a pass", "loss: float32 in three parts", "loss: checked before use")
KEPT = ("streams", "loss: contexts by a kernel", "loss: one walk over the keys")


def earned(info: dict[str, Any], name: str) -> list[str]:
    """A table of what every kernel saves, and one of what keeps the picks of a prediction in bfloat16."""
    lines = [
        [row["mechanism"], row["whole"], row["without"], number(row["ms"]), number(row["ms_without"]),
         f"{row['gain']:.0%}", number(row["peak_mib"]), number(row["peak_mib_without"]), str(row["lines"])]
        for row in info["rows"] if "gain" in row
    ]  # fmt: skip
    columns = ["kernel", "whole", "without it", "ms", "ms without", "gain", "MiB", "MiB without", "lines"]
    parts = [
        "## What every kernel earns",
        provenance(info, name),
        "A whole prediction or training step, captured, with a mechanism and without it. What gains less than a tenth "
        "everywhere and no memory to speak of is gone since: " + ", ".join(f"*{gone}*" for gone in GONE) + ". The last "
        "of these compared every kernel with its plain twin before its first use and found no fault in 42 kinds; the "
        "tests do that now. " + ", ".join(f"*{kept}*" for kept in KEPT) + " stay, in fewer lines: without them the "
        "loss alone takes twice as long in bfloat16, and a prediction at batch 1 more than its encoder and 15%.",
        table(columns, lines, 3),
    ]
    kept = [row for row in info["rows"] if "same" in row]
    times = sorted({key for row in kept for key in row if key.startswith("ms_batch_")}, key=lambda key: int(key[9:]))
    if kept:
        columns = ["arithmetic", *(f"ms, batch {key[9:]}" for key in times), "the picks of float32"]
        body = [[row["without"], *(number(row[key]) for key in times), f"{row['same']:.1%}"] for row in kept]
        said = (
            "A trained subsets model, 1,000 bags of CIFAR-100. TF32 alone changes the picks of more than one bag in a "
            "hundred, pairs of bfloat16 of none: the pairs stay."
        )
        parts += [said, table(columns, body, 1)]
    return parts


def provenance(info: dict[str, Any], name: str) -> str:
    versions = ", ".join(f"{key} {value}" for key, value in info["versions"].items() if key != "torchcpl")
    commit = (
        f"commit `{info['commit'][:10]}`{' with changes' if info['dirty'] else ''}" if info["commit"] else "no commit"
    )
    return f"{info['device']}; {versions}; {commit}; [`results/{name}`](../results/{name}), `{info['command']}`."


def earlier(rows: list[Row]) -> list[str]:
    """Which rows are of another run than the rest."""
    old = [row for row in rows if "commit" in row]
    commits = sorted({row["commit"] for row in old})
    works = sorted({f"{row['work']}, batch {row['B']}, {row['dtype']}" for row in old})
    if not old:
        return []
    return [f"{len(old)} of {len(rows)} rows are of commit `{'`, `'.join(commits)}`, some of: {'; '.join(works)}."]


# Figures


@styled
def bars(rows: list[Row], title: str) -> Figure:
    """Every panel one work at one size, a bar a variant, what the library runs by itself in blue."""
    panels: list[tuple[str, list[Row]]] = []
    for work, name in WORKS.items():
        chosen = [row for row in rows if row["work"] == work and row["dtype"] == "float32"]
        # The sizes at which most variants were measured, of equals the smaller batch.
        groups: dict[tuple[Any, ...], list[Row]] = {}
        for row in chosen:
            hidden = row.get("h") if work.endswith("backward") else None
            groups.setdefault((row["B"], row["N"], row["T"], hidden), []).append(row)
        if work.endswith("forward") or not groups or work == "sample 16":
            continue
        (batch, n, steps, hidden), best = max(groups.items(), key=lambda group: (len(group[1]), -group[0][0]))
        width = f", h = {hidden}" if hidden else ""
        panels.append((f"{name}: batch {batch:,}, {steps} of {n:,}{width}", best))
    heights = [len(found) for _, found in panels]
    tall = 0.2 * sum(heights) + 0.6 * len(panels) + 0.3
    figure, axes = new_figure(WIDTH, tall, len(panels), height_ratios=heights, squeeze=False)
    for axis, (name, found) in zip(axes[:, 0], panels, strict=True):
        ordered = sorted(found, key=lambda row: -row["ms"])
        slowest, fastest = ordered[0]["ms"], ordered[-1]["ms"]
        wide = slowest > 20 * fastest  # then only a logarithmic scale shows both
        ours = ("kernel", "NumPy", "fused", "cpl", found[0]["variant"] if "nll" in found[0]["work"] else "cpl")
        colors = [PALETTE[0] if row["variant"].startswith(ours) else PALETTE[3] for row in ordered]
        axis.barh([row["variant"] for row in ordered], [row["ms"] for row in ordered], color=colors, height=0.72)
        for place, row in enumerate(ordered):
            axis.annotate(
                f"{number(row['ms'])} ms", (row["ms"], place), (3, 0), textcoords="offset points", va="center",
                fontsize=7, color=INK,
            )  # fmt: skip
        if wide:
            axis.set_xscale("log")
        axis.set_xlim(fastest / 2.5 if wide else 0, slowest * (4 if wide else 1.15))
        axis.set_title(name, loc="left")
        axis.tick_params(axis="y", length=0)
        axis.grid(axis="x")
    figure.suptitle(title, x=0.01, ha="left", fontsize=9)
    return figure


def page(folder: Path) -> tuple[str, dict[str, Figure]]:
    """The page, and the figures it shows by their names."""
    parts = [
        "# Performance",
        "Written by `python -m bench.performance` from the files named below, which `python -m bench.speed` and "
        "`python -m bench.core` write. Times are medians of many calls, warm, over rotating inputs. *captured* rows "
        "are replays of one CUDA graph (`torchcpl.compile_for_inference`; *all halved*, where no part has more digits "
        "than the rest), *eager* and all others what a caller sees. "
        "*plain* is the plain twin of a kernel, *per-row loop* decodes one row after the other and reads every pick "
        "back, as the paper's code does, *dense* builds W, *compiled* is `torch.compile` of the plain twin. Every step "
        "is taken: the stop never wins.",
    ]
    figures = {}
    for path in sorted(folder.glob("speed-*.json"), key=lambda path: (path.stem == "speed-cpu", path.stem)):
        info = read_json(path)
        rows = info["rows"]
        figures[path.stem] = bars(rows, info["device"])
        parts += [f"## {info['device']}", provenance(info, path.name)]
        parts += [f"**Failed before its end: {name}** ({why})." for name, why in info["failed"].items()]
        parts += [*([info["note"]] if "note" in info else []), *earlier(rows)]
        parts += [f"![Times by variant, {info['device']}](figures/{path.stem}.svg)"]
        parts += [*asked(info), *shares(rows), *limits(rows), *times(rows)]
        others = ["plain, W given", "per-row loop, W given", "pointer, cached"]
        saved = [line for ours in ("kernel", "NumPy") for line in compare(rows, "greedy", f"{ours}, W given", others)]
        if saved:
            parts += ["### How much that saves in decoding", "\n".join(saved)]
    for path in sorted(folder.glob("kernels-*.json")):
        parts += earned(read_json(path), path.name)
    if (folder / "core-cpu.json").exists():
        parts += core(read_json(folder / "core-cpu.json"))
    return "\n\n".join(parts) + "\n", figures


def main() -> None:
    text, figures = page(ROOT / "results")
    for name, figure in figures.items():
        write_atomic(FIGURES / f"{name}.svg", render(figure, "svg"))
    write_atomic(PAGE, text.encode())
    print(f"wrote {PAGE.relative_to(ROOT)} and {len(figures)} figures")


if __name__ == "__main__":
    main()

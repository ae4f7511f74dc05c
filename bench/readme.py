"""Write the tables of the README from the JSON files in results/.

python -m bench.readme
"""

from __future__ import annotations

import re
from pathlib import Path

from torchcpl.files import read_json
from torchcpl.tables import Column, Table
from torchcpl.tasks.registry import TASKS

ROOT = Path(__file__).resolve().parents[1]
SUBSETS = {
    "subsets-cifar100-tuned.json": "The best recipe found, CIFAR-100 features",
    "subsets-cifar100-paper.json": "The paper's recipe, CIFAR-100 features",
}
PATHS = {
    "paths-index.json": "Three nuScenes maps, the paper's split by index",
    "paths-geography.json": "The same maps, reported on other areas than trained on",
}


def tables(titles: dict[str, str], columns: tuple[Column, ...]) -> str:
    """The tables among the results, one below the other."""
    parts = []
    for name, title in titles.items():
        path = ROOT / "results" / name
        if path.exists():
            table = Table.read(path, columns)
            source = f"[`results/{name}`](results/{name}), trained on {table.info['trained_on']}"
            parts.append(f"**{title}** ({source}):\n\n{table.markdown()}")
    return "\n\n".join(parts)


def core() -> str:
    info = read_json(ROOT / "results" / "core-cpu.json")
    lines = ["| work | B | N | T | loop, ms | torchcpl, ms | ratio |", "|---|---|---|---|---|---|---|"]
    for row in info["rows"]:
        if "ratio" in row:
            cells = [row[k] for k in ("work", "B", "N", "T", "loop_ms", "ms")]
            lines.append("| " + " | ".join(map(str, cells)) + f" | **{row['ratio']:.1f}×** |")
    memory = info["rows"][-1]
    lines += [
        "",
        f"With {memory['N']:,} candidates (B = {memory['B']}, h = {memory['h']}) training and decoding peak at "
        f"{memory['peak_mib']:,.0f} MiB; W alone would be {memory['dense_W_mib']:,} MiB. "
        f"[`results/core-cpu.json`](results/core-cpu.json), {info['device']}.",
    ]
    return "\n".join(lines)


def fill(text: str, name: str, content: str) -> str:
    start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    if start not in text or end not in text:
        raise ValueError(f"README.md: expected the marks {start} and {end}")
    pattern = re.compile(f"{re.escape(start)}.*?{re.escape(end)}", re.DOTALL)
    return pattern.sub(lambda _: f"{start}\n{content}\n{end}", text)


def main() -> None:
    path = ROOT / "README.md"
    contents = {
        "subsets": tables(SUBSETS, TASKS["subsets"].columns),
        "paths": tables(PATHS, TASKS["paths"].columns),
        "core": core(),
    }
    text = path.read_text(encoding="utf-8")
    for name, content in contents.items():
        text = fill(text, name, content)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

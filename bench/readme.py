"""Write the tables of the README and of docs/benchmarks/ from the JSON files in results/.

python -m bench.readme
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from torchcpl.files import read_json
from torchcpl.tables import Table
from torchcpl.tasks.registry import TASKS

ROOT = Path(__file__).resolve().parents[1]
# The full tables of each task, and of the first the columns that the README shows.
TABLES = {
    "subsets": {
        "subsets-cifar100-tuned.json": "The best recipe found, CIFAR-100 features",
        "subsets-cifar100-paper.json": "The paper's recipe, CIFAR-100 features",
    },
    "paths": {
        "paths-index.json": "Three nuScenes maps, the paper's split by index",
        "paths-geography.json": "The same maps, reported on other areas than trained on",
    },
}
SHORT = {
    "subsets": ("method", "clu_f1", "card_err", "ms"),
    "paths": ("method", "min_ade", "min_hd", "off_road", "ms"),
}


def full(task: str) -> str:
    """The tables of a task among the results, one below the other, for its page in docs/benchmarks/."""
    parts = []
    for name, title in TABLES[task].items():
        path = ROOT / "results" / name
        if path.exists():
            table = Table.read(path, TASKS[task].columns)
            source = f"[`results/{name}`](../../results/{name}), trained on {table.info['trained_on']}"
            parts.append(f"## {title}\n\n{source}\n\n{table.markdown()}")
    return "\n\n".join(parts).rstrip()


def short(task: str) -> str:
    """A few columns of a task's first table."""
    columns = tuple(column for column in TASKS[task].columns if column.name in SHORT[task])
    table = Table.read(ROOT / "results" / next(iter(TABLES[task])), columns)
    return replace(table, published=(), notes=()).markdown().rstrip()


def core() -> str:
    """How much faster than a plain loop the losses and decoders are, in a sentence."""
    info = read_json(ROOT / "results" / "core-cpu.json")
    ratios = {row["work"]: row["ratio"] for row in info["rows"] if "ratio" in row}
    losses = sorted(ratio for work, ratio in ratios.items() if "nll" in work)
    decoders = sorted(row["ratio"] for row in info["rows"] if "ratio" in row and "nll" not in row["work"])
    return (
        f"Against a plain loop over rows, permutations and steps the losses are {losses[0]:.0f} to {losses[-1]:.0f} "
        f"times as fast, greedy decoding {decoders[0]:.0f} to {decoders[-1]:.0f} times ({info['device']}); on CUDA a "
        "whole prediction is one graph. [How fast everything is, and how far the limit](docs/performance.md)."
    )


def fill(path: Path, contents: dict[str, str]) -> None:
    """Put each content between its two marks in a file."""
    text = path.read_text(encoding="utf-8")
    for name, content in contents.items():
        start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        if start not in text or end not in text:
            raise ValueError(f"{path}: expected the marks {start} and {end}")
        pattern = re.compile(f"{re.escape(start)}.*?{re.escape(end)}", re.DOTALL)
        text = pattern.sub(f"{start}\n{content}\n{end}".replace("\\", r"\\"), text)
    path.write_text(text, encoding="utf-8")


def main() -> None:
    fill(ROOT / "README.md", {task: short(task) for task in TABLES} | {"core": core()})
    for task in TABLES:
        fill(ROOT / "docs" / "benchmarks" / f"{task}.md", {task: full(task)})


if __name__ == "__main__":
    main()

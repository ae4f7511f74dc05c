"""Write the tables of the README and of docs/benchmarks/ from the JSON files in results/.

python -m bench.readme
"""

from __future__ import annotations

import re
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.peers import NOT_TOLD
from torchcpl import plots
from torchcpl.files import read_json, write_atomic
from torchcpl.tables import Column, Table
from torchcpl.tasks.ablation import CHOSEN, COSTS
from torchcpl.tasks.baskets.benchmark import PUBLISHED, QUOTED, RUN_AGAIN
from torchcpl.tasks.baskets.figures import short as brief
from torchcpl.tasks.registry import TASKS

ROOT = Path(__file__).resolve().parents[1]
# The full tables of each task, and of the first the columns that the README shows.
TABLES = {
    "subsets": {
        "subsets-cifar100-tuned.json": "The best recipe found that sees the features only, CIFAR-100 features",
        "subsets-cifar100-distances.json": "The same, told the distances between the items too",
        "subsets-cifar100-paper.json": "The paper's recipe, CIFAR-100 features",
        "subsets-classes.json": "Classes never seen: 60 to train on, 10 to choose on, 30 to report on",
        "subsets-classes-trials.json": "Classes never seen, one seed: what the encoder sees",
    },
    "paths": {
        "paths-index.json": "Three nuScenes maps, the paper's split by index",
        "paths-geography.json": "The same maps, other areas than trained on, with further scenes to train on",
        "paths-geography-20.json": "The same by other weights of the losses, further scenes not warped, 20 epochs",
        "paths-geography-24.json": "The same without further scenes, 24 epochs",
        "paths-left-out.json": "Trained on two maps, reported on the third",
        "paths-hypotheses.json": "Six answers with probabilities, areas not trained on",
    },
}
SHORT = {"subsets": ("method", "clu_f1", "card_err", "ms"), "paths": ("method", "min_ade", "min_hd", "off_road", "ms")}
FURTHER = {"subsets": ("subsets-cifar100-distances.json", "CPL + distances")}  # rows of another table on the same bags

# Gartrell et al. (ICLR 2021), table 2: apparel. Quoted as remembered.
GARTRELL = (
    {"method": "Symmetric DPP, quoted", "log_likelihood": -10.02, "mpr": 62.6, "auc_pooled": 0.68},
    {"method": "Nonsymmetric DPP, quoted", "log_likelihood": -9.64, "mpr": 72.2, "mpr_std": 3.1, "auc_pooled": 0.77},
    {"method": "Scalable nonsymmetric DPP, quoted", "log_likelihood": -9.63, "mpr": 69.0, "auc_pooled": 0.74},
)
PAIRS = {"complements": "Complements by the learned W", "substitutes": "Substitutes"}


def full(task: str) -> str:
    """The tables of a task among the results, one below the other, for its page in docs/benchmarks/."""
    parts = []
    for name, title in TABLES[task].items():
        path = ROOT / "results" / name
        if path.exists():
            answers = name.endswith("-hypotheses.json")
            table = Table.read(path, TASKS[task].answer_columns if answers else TASKS[task].columns)
            source = f"[`results/{name}`](../../results/{name}), trained on {table.info['trained_on']}"
            parts.append(f"## {title}\n\n{source}\n\n{table.markdown()}")
    return "\n\n".join(parts).rstrip()


def short(task: str, name: str = "") -> str:
    """A few columns of a task's first table, or of the one named."""
    columns = tuple(column for column in TASKS[task].columns if column.name in SHORT[task])
    table = Table.read(ROOT / "results" / (name or next(iter(TABLES[task]))), columns)
    rows = list(table.rows)
    if not name and task in FURTHER:
        file, method = FURTHER[task]
        rows += [row for row in Table.read(ROOT / "results" / file, columns).rows if row["method"] == method]
    return replace(table, rows=rows, published=(), notes=()).markdown().rstrip()


def baskets() -> dict[str, list[dict[str, Any]]]:
    """The rows of every shop, and beside them SimplePGC as published and run again."""
    shops: dict[str, list[dict[str, Any]]] = {}
    for row in read_json(ROOT / "results" / "baskets.json")["rows"]:
        if row["dataset"] in PUBLISHED:
            shops.setdefault(row["dataset"], []).append(row)
    for name, rows in shops.items():
        for method, value in zip(QUOTED, PUBLISHED[name], strict=True):
            label = method if method == RUN_AGAIN else f"{method} (quoted)"
            rows.append({"method": label, "log_likelihood": value, "reference": True})
    return shops


def baskets_means(names: tuple[str, ...] = ("method", "log_likelihood", "mpr", "auc")) -> str:
    """A method a row: the mean over the shops that it was run on, all of them or it is left out."""
    shops = baskets()
    columns = tuple(column for column in TASKS["baskets"].columns if column.name in names)
    methods = dict.fromkeys(row["method"] for rows in shops.values() for row in rows)
    means = []
    for method in methods:
        found = [row for rows in shops.values() for row in rows if row["method"] == method]
        if len(found) == len(shops) and "quoted" not in method:
            values: dict[str, list[Any]] = {c.name: [row.get(c.name) for row in found] for c in columns[1:]}
            mean = {name: None if None in parts else statistics.fmean(parts) for name, parts in values.items()}
            if any(value is not None for value in mean.values()):
                means.append({"method": method, **mean})
    return Table("", columns, means).markdown().rstrip()


def baskets_full() -> str:
    """A shop a row, a method a column: log-likelihoods."""
    shops = baskets()
    methods = dict.fromkeys(row["method"] for rows in shops.values() for row in rows if row["log_likelihood"])
    columns = (Column("shop", "Shop"), *(Column(method, method, 3) for method in methods))
    lines = []
    for name, rows in shops.items():
        line: dict[str, Any] = {"shop": name}
        for row in rows:
            line[row["method"]] = row["log_likelihood"]
            line[row["method"] + "_std"] = row.get("log_likelihood_std")
        lines.append(line)
    return Table("", columns, lines).markdown().rstrip()


def baskets_random() -> tuple[str, str]:
    """The protocol of the nonsymmetric DPPs as a table, and what its AUC says."""
    found = read_json(ROOT / "results" / "baskets.json")
    runs = {row["method"]: row for row in found["rows"] if row["dataset"] == "apparel-random"}
    names = {"log_likelihood": 2, "mpr": 1, "auc": 3, "auc_pooled": 3, "auc_ratio": 3}
    titles = ("Log-likelihood", "MPR", "AUC, same size", "AUC, pooled", "AUC, pooled, by likelihood ratio")
    columns = [Column(name, title, digits, "max") for (name, digits), title in zip(names.items(), titles, strict=True)]
    ours = [runs[method] for method in ("Symmetric DPP", "Nonsymmetric DPP", "CPL")]
    table = Table("", (Column("method", "Method"), *columns), [*GARTRELL, *ours]).markdown().rstrip()
    cpl, pooled = runs["CPL"], ", ".join(f"{row['auc_pooled']:.3f}" for row in ours)
    said = (
        f"On these sizes what ranks by size first reaches {cpl['auc_limit']:.3f} at most, even if it tells every "
        "basket from every random set of its size; all models that were run are near that limit "
        f"({pooled}). Asked what the question means, whether the basket "
        f"is likelier than a random set of the same size, CPL is right in {cpl['auc']:.3f} of the cases; by the "
        f"likelihood ratio, log P less the log-probability of drawing the set at random, the one curve over all sizes "
        f"has {cpl['auc_ratio']:.3f}."
    )
    return table, said


def baskets_items() -> str:
    """For some shops what CPL expects in a basket, complements and substitutes."""
    found = read_json(ROOT / "results" / "baskets.json")["items"]
    lines = []
    for shop in ("apparel", "feeding", "health"):
        item, parts = found[shop], {key: [brief(name, 60) for name in found[shop][key]] for key in ("given", *PAIRS)}
        follows = ", ".join(f"{brief(name, 60)} {share:.1%}" for name, share in item["next"])
        lines.append(
            f"- **{shop}**: given {' and '.join(parts['given'])}, in no particular order: {follows}. "
            + " ".join(f"{title}: {' and '.join(parts[key])}." for key, title in PAIRS.items())
        )
    return "\n".join(lines)


def baskets_speed() -> str:
    """Training and exact likelihoods, in a sentence each."""
    found, sets = (read_json(ROOT / "results" / name) for name in ("baskets.json", "sets-cpu.json"))
    row = next(row for row in found["rows"] if (row["dataset"], row["method"]) == ("apparel", "CPL"))
    devices = " and ".join(dict.fromkeys(found["origins"][place]["device"] for place in row["origin"]))
    return (
        f"Training apparel ({row['items']:.0f} items, 40 epochs) takes {row['train_seconds']:.0f} s on one core "
        f"({devices}, with others busy). `set_nll`, exact for {sets['batch']} sets of {sets['size']} out of "
        f"{sets['items']} items, is {sets['loop_seconds'] / sets['seconds']:.0f} times as fast as a loop over the "
        f"subsets of each, and {sets['batched_seconds'] / sets['seconds']:.1f} times as fast as that loop batched over "
        "the sets (`python -m bench.sets`, one run, one core)."
    )


def latency() -> str:
    """Milliseconds of one prediction, p50 and p99, a kind and a number of candidates a row."""
    found = read_json(ROOT / "results" / "export-cpu.json")
    ways = list(dict.fromkeys(row["way"] for row in found["rows"]))
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for row in found["rows"]:
        line = rows.setdefault((row["kind"], row["N"]), {"kind": row["kind"], "n": f"{row['N']:,}"})
        line[row["way"]] = f"{row['p50_ms']:.2f} / {row['p99_ms']:.2f}"
    columns = (Column("kind", "Kind"), Column("n", "N"), *(Column(way, way) for way in ways))
    said = (
        f"p50 / p99 in ms of one prediction, batch 1, a head of {found['dim']} wide features and {found['max_len']} "
        f"picks, {found['device']}: [`results/export-cpu.json`](../results/export-cpu.json)."
    )
    return f"{said}\n\n{Table('', columns, list(rows.values())).markdown().rstrip()}"


def same_picks() -> str:
    """On how many inputs all ways pick alike, in a sentence."""
    rows = read_json(ROOT / "results" / "export-parity.json")["rows"]
    graphs, inputs = max(row.get("graphs", 0) for row in rows), rows[0]["inputs"]
    return (
        f"On {inputs} inputs of 22 sizes for each of {len({row['kind'] for row in rows})} kinds, among them one "
        "candidate, candidates that occur twice, a stop that comes first or never and rows that are all padding, the "
        f"picks are greedy by eager's own logits in at least {min(row['same'] for row in rows)} of {inputs}, and "
        f"those of eager itself in at least {inputs - max(row['ties'] for row in rows)}: of candidates that are equal, "
        "each way's rounding prefers another (the pick misses the best by "
        f"{max(row['missed'] for row in rows):.0e} of the logits at most). Log-probabilities are within "
        f"{max(row['apart'] for row in rows):.0e}, {max(row['relative'] for row in rows):.0e} of their size. "
        f"`torch.compile(dynamic=True, fullgraph=True)` makes at most {graphs} graphs for all of them, with "
        "`torch.fx.experimental._config.backed_size_oblivious = True`; without that torch compiles a batch of one, a "
        "single candidate and both at once again, four graphs in all "
        "([`results/export-parity.json`](../results/export-parity.json))."
    )


def piles() -> str:
    """Each set left out of training, and the mean; beside it the best peers, chosen afresh for each set."""
    found, peers = (read_json(ROOT / "results" / f"{name}.json") for name in ("piles", "select-peers"))
    columns = (
        Column("set", "Left out of training"),
        Column("clu_f1", "CluF1 ↑", 3, share=True),
        Column("peer", "best peer ↑", 3, share=True),
        Column("told", "told how many ↑", 3, share=True),
        Column("told_peer", "best peer, told ↑", 3, share=True),
        Column("card_err", "CardErr ↓", 2),
    )
    rows = []
    for name, by_method in peers["bags"].items():
        row, by_name = found["sets"][name], {method: one["clu_f1"] for method, one in by_method.items()}
        free, told = (max(v for m, v in by_name.items() if (m in NOT_TOLD) == is_free) for is_free in (True, False))
        rows.append({"set": name, **row, "peer": free, "told_peer": told})
    mean = {column.name: statistics.fmean(row[column.name] for row in rows) for column in columns[1:]}
    return Table("", columns, [*rows, {"set": "mean", **mean}]).markdown().rstrip()


def any_composition() -> str:
    """Bags whose size does not tell how many classes they hold: those who are not told."""
    found = read_json(ROOT / "results" / "select-any.json")["any"]
    methods = list(next(iter(found.values())))
    columns = [Column("bags", "CluF1 (error of the count)")] + [Column(method, method) for method in methods]
    rows = [
        {"bags": bags, **{method: f"{row['clu_f1']:.2f} ({row['card_err']:.1f})" for method, row in by_method.items()}}
        for bags, by_method in found.items()
    ]
    return Table("", tuple(columns), rows).markdown().rstrip()


def peers() -> dict[str, str]:
    """What others pick: from bags, from a whole test set, and from ever more rows."""
    found = read_json(ROOT / "results" / "select-peers.json")
    sets = list(found["bags"])
    methods = list(found["bags"][sets[0]])
    columns = (Column("method", "CluF1"), *(Column(name, name, 2, "max", share=True) for name in sets))
    bags = [
        {"method": method + ("" if method in NOT_TOLD else ", told")}
        | {name: found["bags"][name][method]["clu_f1"] for name in sets}
        for method in methods
    ]
    whole = (
        Column("method", "100 of 10,000"),
        Column("classes", "classes found", 1, "max"), Column("range", "range, orders"),
        Column("cosine_distance", "cosine distance to the nearest pick", 3, "min"),
        Column("cpu_seconds", "CPU seconds", 1, "min"),
    )  # fmt: skip
    sizes = [str(10**i) for i in range(2, 7)]
    scale = (Column("method", "CPU seconds, GiB"), *(Column(n, f"{int(n):,}") for n in sizes))
    piles = [
        {"method": method, "range": f"{row['fewest']}–{row['most']} of {row['orders']}", **row}
        for method, row in found["whole"].items()
    ]
    rows = []
    for method, by_size in found["scale"].items():
        cells = {
            n: row["failed"] if "failed" in row else f"{row['cpu_seconds']:.1f}, {row['peak_gib']:.1f}"
            for n, row in by_size.items()
        }
        rows.append({"method": method, **cells})
    return {
        "peers": Table("", columns, bags).markdown().rstrip(),
        "whole": Table("", whole, piles).markdown().rstrip(),
        "scale": Table("", scale, rows).markdown().rstrip(),
    }


def stop_reliability() -> bytes:
    """How often P(stop) was right, drawn."""
    found = read_json(ROOT / "results" / "piles.json")["reliability"]
    curves = {
        name: (np.array([row["said"] for row in rows]), np.array([row["right"] for row in rows]))
        for name, rows in found.items()
    }
    figure = plots.reliability({"the stop": curves}, dict(zip(found, plots.PALETTE, strict=False)))
    return plots.render(figure, "svg")


def core() -> str:
    """How much faster than a plain loop the losses and decoders are, in a sentence."""
    info = read_json(ROOT / "results" / "core-cpu.json")
    rows = [row for row in info["rows"] if "ratio" in row]
    losses = sorted(row["ratio"] for row in rows if "nll" in row["work"])
    decoders = sorted(row["ratio"] for row in rows if "nll" not in row["work"])
    return (
        f"Against a plain loop over rows, permutations and steps the losses are {losses[0]:.0f} to {losses[-1]:.0f} "
        f"times as fast, greedy decoding {decoders[0]:.0f} to {decoders[-1]:.0f} times ({info['device']}); on CUDA a "
        "whole prediction is one graph. [How fast everything is, and how far the limit](docs/performance.md)."
    )


def ablation() -> str:
    """The variants of the subsets task: score and costs."""
    columns = tuple(column for column in TASKS["subsets"].columns if column.name == "clu_f1")
    table = Table.read(ROOT / "results" / "subsets-ablation.json", (Column("method", "Variant"), *columns, *COSTS))
    return table.markdown().rstrip()


def targets() -> str:
    """The variants of the loss on roads: scores."""
    columns = [column for column in TASKS["paths"].columns if column.name in ("min_ade", "min_hd", "min_ade_n1")]
    held_out = replace(columns[0], name=CHOSEN, title=f"{columns[0].title}, held out")
    table = Table.read(ROOT / "results" / "paths-loss.json", (Column("method", "Variant"), held_out, *columns))
    table = replace(table, notes=table.notes[1:2])
    return table.markdown().rstrip()


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
    random, auc = baskets_random()
    docs = ROOT / "docs"
    contents = {
        ROOT / "README.md": {
            **{task: short(task) for task in TABLES}, "baskets": baskets_means(), "piles": piles(), "core": core(),
        },
        docs / "deploy.md": {"latency": latency(), "parity": same_picks()},
        docs / "piles.md": {"piles": piles(), "any": any_composition(), **peers()},
        docs / "beyond.md": {
            "classes": short("subsets", "subsets-classes.json"),
            "trials": short("subsets", "subsets-classes-trials.json"),
            "ablation": ablation(),
            "targets": targets(),
        },
        docs / "benchmarks" / "baskets.md": {
            "baskets": baskets_full(),
            "ranks": baskets_means(("method", "mpr", "auc", "hit_1", "hit_5", "hit_10", "mrr")),
            "random": random, "auc": auc, "items": baskets_items(), "speed": baskets_speed(),
        },
        **{docs / "benchmarks" / f"{task}.md": {task: full(task)} for task in TABLES},
    }  # fmt: skip
    for path, parts in contents.items():
        fill(path, parts)
    write_atomic(docs / "figures" / "piles-stop.svg", stop_reliability())


if __name__ == "__main__":
    main()

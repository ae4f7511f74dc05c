"""Outputs of a selection: a record for every pick, an HTML contact sheet of the groups, copies of the images."""

from __future__ import annotations

import html
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from torchcpl.constraints import Forbid, Require
from torchcpl.explore import explore
from torchcpl.files import data_url, extra, write_atomic
from torchcpl.potentials import Selection
from torchcpl.select import as_mask, assign, pile_potentials
from torchcpl.vectors import Vectors, read_image

PAGE = Template(Path(__file__).with_name("sheet.html").read_text(encoding="utf-8"))
SHOWN = 24  # members shown of each group


def describe_picks(vectors: Vectors, found: Selection, metric: str) -> list[tuple[list[dict[str, Any]], list[int]]]:
    """For every answer, a record of each pick (row, id, probability, size of its group) and every row's group."""
    indices = found.indices if found.indices.dim() > 1 else found.indices.unsqueeze(0)  # (R, T)
    assert found.step_log_prob is not None
    chances = found.step_log_prob.view_as(indices).exp()
    answers = []
    for number, (row, chance) in enumerate(zip(indices, chances.tolist(), strict=True), 1):
        rows = row[row >= 0]
        if not len(rows):  # fewer answers than were asked for
            continue
        labels = assign(vectors.values, rows, metric)
        counts = labels.bincount(minlength=len(rows)).tolist()
        which = {"answer": number} if len(indices) > 1 else {}
        picks = [
            {**which, "pick": place, "row": i, "id": vectors.name(i), "probability": round(p, 6), "stands_for": count}
            for place, (i, p, count) in enumerate(zip(rows.tolist(), chance, counts, strict=False), 1)
        ]
        answers.append((picks, labels.tolist()))
    return answers


def copy_picks(folder: Path, files: Sequence[Path], picks: Sequence[Mapping[str, Any]]) -> None:
    """Copy the picked ``files``, keeping their names."""
    for pick in picks:
        target = folder / pick["id"]
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(files[pick["row"]], target)


def write_sheet(path: str | Path, vectors: Vectors, picks: Sequence[Mapping[str, Any]], labels: Sequence[int]) -> None:
    """Write the contact sheet of ``picks``, records of ``describe_picks``; ``labels`` (N,) are the rows' groups."""
    members: list[list[int]] = [[] for _ in picks]
    rows = [pick["row"] for pick in picks]
    for row, label in enumerate(labels):
        if len(members[label]) < SHOWN and row != rows[label]:
            members[label].append(row)
    sections = []
    for pick, group in zip(picks, members, strict=True):
        rest = "".join(_item(vectors, row, 64) for row in group)
        more = pick["stands_for"] - 1 - len(group)
        rest += f"<span>and {more:,} more</span>" if more > 0 else ""
        said = f"<small>{pick['probability']:.0%} · stands for {pick['stands_for']:,}</small>"
        head = f"<div class=pick>{_item(vectors, pick['row'], 128)}<b>{html.escape(pick['id'])}</b>{said}</div>"
        sections.append(f"<section>{head}<div class=rest>{rest}</div></section>")
    page = PAGE.substitute(title=f"{len(picks)} of {len(vectors):,}", sections="\n".join(sections))
    write_atomic(path, page.encode())


def write_explorer(
    path: str | Path, vectors: Vectors, metric: str, between: tuple[int, int],
    required: list[int], forbidden: list[int],
) -> None:  # fmt: skip
    """Write a page to explore the selection, with thumbnails if the items are images, of a few hundred rows.

    ``between``: the fewest picks, and the most that the page starts with.
    """
    least, most = between
    pot = pile_potentials(vectors.values, metric, vectors.weights, required, forbidden, least)
    shape = (1, pot.num_candidates)
    must, never = (as_mask("rows", rows, shape, pot.mask.device) for rows in (required, forbidden))
    names = [vectors.name(row) for row in range(len(vectors))]
    images = None if vectors.files is None else [read_image(file, 96) for file in vectors.files]
    explore(
        pot, path, images or names, labels=names if images else None,
        title=f"{len(vectors)} candidates", min_len=least, max_len=most, stop_threshold=0.5, sweeps=1,
        constraints=[Require(must, first=True), Forbid(never)],
    )  # fmt: skip


def _item(vectors: Vectors, row: int, side: int) -> str:
    """A thumbnail if the item is an image, else its name."""
    name = html.escape(vectors.name(row))
    picture = read_image(vectors.files[row], side) if vectors.files is not None else None
    if picture is None:
        return f"<span>{name}</span>" if side < 100 else ""
    with extra():
        import cv2
    data = data_url("image/jpeg", cv2.imencode(".jpg", picture[..., ::-1])[1].tobytes())
    return f'<img src="{data}" alt="{name}" title="{name}">'

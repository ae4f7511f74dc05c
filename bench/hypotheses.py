"""Ways to find several answers: how much of the model's probability six of them cover, and how far off they state it.

python -m bench.hypotheses --out results/hypotheses.json
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import torchcpl as cpl
from torchcpl.constraints import History, Rules
from torchcpl.files import write_json
from torchcpl.functional import step_log_probs
from torchcpl.hypotheses import cover
from torchcpl.potentials import picked_mask
from torchcpl.provenance import run_info

ANSWERS = 6
REFERENCE = 600  # samples that stand for the distribution of paths
Same = Callable[[Tensor], Tensor]


def diverse_beam(pot: cpl.Potentials, groups: int, penalty: float, max_len: int) -> tuple[Tensor, Tensor]:
    """Groups of one beam, each penalised for what earlier ones picked at the same step (Vijayakumar et al. 2018)."""
    batch, n = pot.unary.shape
    rows, rules = torch.arange(batch), Rules(pot, max_len)
    used = torch.zeros(batch, rules.max_len, n + 1)
    answers, scores = [], []
    for _ in range(groups):
        state, marks = pot.interaction.start(1), torch.zeros(batch, 1, n + 1, dtype=torch.bool)
        picks, last, score = torch.full((batch, rules.max_len), -1), torch.full((batch, 1), -1), torch.zeros(batch)
        for t in range(rules.max_len):
            stopped = marks[:, 0, n]
            history = History(marks[..., :n], last, (picks >= 0).sum(-1, keepdim=True))
            log_probs = step_log_probs(pot, state, history, rules).squeeze(1)
            choice = (log_probs - penalty * used[:, t]).argmax(-1).masked_fill(stopped, n)
            score = score + log_probs[rows, choice].masked_fill(stopped, 0)
            used[rows, t, choice] += (~stopped).float()
            marks = marks.scatter(2, choice.view(-1, 1, 1), True)
            picks[:, t] = choice.masked_fill(choice == n, -1)
            last = last.where(picks[:, t : t + 1] < 0, picks[:, t : t + 1])
            state = pot.interaction.advance(state, picks[:, t : t + 1])
        answers.append(picks)
        scores.append(score)
    return torch.stack(answers, 1), torch.stack(scores, 1).exp()


def pools(pot: cpl.Potentials, width: int, max_len: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Of each way its name, answers (B, K, T) and what each is worth (B, K)."""
    found = cpl.beam(pot, width, width, max_len=max_len)
    yield "beams, merged", found.indices, found.log_prob.exp()
    drawn = cpl.stochastic_beam(pot, width, max_len=max_len)
    assert drawn.weight is not None
    yield "without replacement, merged", drawn.indices.transpose(0, 1), (drawn.weight / drawn.weight.sum(0)).t()
    samples = cpl.sample(pot, width, max_len=max_len).indices.transpose(0, 1)
    yield "samples, merged", samples, torch.full((1,), 1 / width)
    answers, worth = diverse_beam(pot, 4 * ANSWERS, 1.0, max_len)
    first = (answers.unsqueeze(1) == answers.unsqueeze(2)).all(-1).float().argmax(-1) == torch.arange(4 * ANSWERS)
    yield "diverse beams, merged", answers, worth * first


def compare(pot: cpl.Potentials, width: int, max_len: int, same: Same | None) -> list[dict[str, Any]]:
    """Covered probability and the error of what is stated, by each way; None compares sets."""
    alike: Same = same if same is not None else lambda answers: _same_set(answers, pot.num_candidates)
    reference = cpl.sample(pot, REFERENCE, max_len=max_len).indices.transpose(0, 1)  # the law, where it is not computed
    ours = cpl.hypotheses(pot, ANSWERS, same=same or "set", num_beams=width, max_len=max_len)
    found = [("cpl.hypotheses", ours.indices, ours.log_prob.exp())]
    for name, answers, worth in pools(pot, width, max_len):
        chosen, mass = cover(alike(answers), worth.expand(answers.shape[:2]), ANSWERS)
        found.append((name, answers.gather(1, chosen.unsqueeze(-1).expand(-1, -1, answers.shape[2])), mass))
    rows = []
    for name, answers, mass in found:
        if same is None:
            each = [cpl.set_log_prob(pot, one, max_len=max_len)[0].exp() for one in answers.unbind(1)]
            true = torch.stack(each, 1) * (mass > 0)
        else:
            near = alike(torch.cat([answers, reference], 1))[:, :ANSWERS, ANSWERS:] & (mass > 0).unsqueeze(-1)
            true = (near & (near.long().cumsum(1) == 1)).float().mean(-1)  # each to the first that stands for it
        error = (true - mass).abs().sum(1).mean()
        rows.append({"way": name, "width": width, "covered": float(true.sum(1).mean()), "error": float(error)})
    return rows


def _same_set(answers: Tensor, count: int) -> Tensor:
    picked = picked_mask(answers, count)
    return (picked.unsqueeze(1) == picked.unsqueeze(2)).all(-1)


def redundant(rows: int = 12, n: int = 20) -> cpl.Potentials:
    """Subsets as a trained model has them: a few classes, whose members exclude each other."""
    group = torch.randint(0, 4, (rows, n))
    W = -6.0 * (group.unsqueeze(1) == group.unsqueeze(2)) + 0.2 * torch.randn(rows, n, n)
    return cpl.Potentials(3 + 0.7 * torch.randn(rows, n), torch.full((rows,), 2.0), cpl.Dense(W))


GRID = 12
ENDS = [[(0, 6), (6, 11), (11, 8)], [(6, 11), (11, 5)], [(0, 9), (3, 11), (8, 11), (11, 6)], [(2, 2), (6, 11)]]


def routes(ends: list[tuple[int, int]], count: int) -> Tensor:
    """(count, 16) jittered curves over a grid from the bottom to one of ``ends``, the first the likeliest."""
    t = torch.linspace(0, 1, 13).view(-1, 1)
    rows = []
    for pick in torch.multinomial(torch.tensor([0.5, 0.25, 0.15, 0.1])[: len(ends)], count, replacement=True).tolist():
        curve = torch.tensor([6.0, 0.0]) * (1 - t) ** 2 + 12 * t * (1 - t) + torch.tensor(ends[pick]) * t**2
        cells = (curve + 0.6 * torch.randn(1, 2) + 0.18 * torch.randn(13, 2)).round().clamp(0, GRID - 1).long()
        ids = list(dict.fromkeys((cells[:, 0] * GRID + cells[:, 1]).tolist()))
        rows.append(ids + [-1] * (16 - len(ids)))
    return torch.tensor(rows)


def paths(steps: int) -> cpl.Potentials:
    """Potentials fitted to such routes, one row a set of ends."""
    n, h = GRID * GRID, 24
    rows = len(ENDS)
    shapes = [(rows, n), (rows,), *[(rows, n, h)] * 4, (rows, h), (rows, h)]
    leaves = [(0.3 * torch.randn(shape)).requires_grad_() for shape in shapes]
    optimizer = torch.optim.Adam(leaves, 0.03)
    for _ in range(steps):
        orders = torch.stack([routes(ends, 32) for ends in ENDS], 1)  # (32, rows, T)
        pot = cpl.Potentials(leaves[0], leaves[1], cpl.Recent(*leaves[2:]))
        loss = -cpl.ContextualPlackettLuce(pot).log_prob(orders).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return pot.detach()


def near(answers: Tensor) -> Tensor:
    """(B, K, K) whether two paths lie within 1.5 cells of each other on average, both ways."""
    place = torch.stack([answers.clamp(min=0) // GRID, answers.clamp(min=0) % GRID], -1).float()
    real = answers >= 0
    rows = []
    for points, there in zip(place, real, strict=True):  # one row at a time: K² T² distances
        apart = torch.cdist(points.flatten(0, 1), points.flatten(0, 1)).view(*there.shape, *there.shape)
        nearest = apart.masked_fill(~there, 1e3).amin(-1).masked_fill(~there.unsqueeze(-1), 0)  # (K, T, K)
        rows.append(nearest.sum(1) / there.sum(-1).clamp(min=1).unsqueeze(-1))
    distance = torch.stack(rows)
    return torch.maximum(distance, distance.transpose(1, 2)) <= 1.5


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench.hypotheses", description=__doc__)
    parser.add_argument("--out", help="write a JSON file")
    parser.add_argument("--width", type=int, default=128, help="beams, or sequences drawn")
    parser.add_argument("--steps", type=int, default=250, help="steps by which the paths are fitted")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    found = {
        "sets": compare(redundant(), options.width, 6, None),
        "paths": compare(paths(options.steps), options.width, 16, near),
    }
    for name, rows in found.items():
        for row in rows:
            print(f"{name:6} {row['way']:28} covered {row['covered']:.3f}  off by {row['error']:.3f}")
    if options.out:
        write_json(options.out, {**run_info(seeds=[0], device="cpu"), **found})


if __name__ == "__main__":
    main()

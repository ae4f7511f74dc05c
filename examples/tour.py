"""A tour over a graph: each stop next to the last, the sights first, no street walked that is not there.

python examples/tour.py --page tour.html
"""

import argparse
from itertools import pairwise

import torch

import torchcpl as cpl


def town(size: int, streets: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Corners (N, 2) and a symmetric matrix (N, N) of which are joined by a street."""
    at = torch.rand(size, 2, generator=torch.Generator().manual_seed(1)) * 100
    far = torch.cdist(at, at)
    return at, (far < streets) & (far > 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corners", type=int, default=60)
    parser.add_argument("--stops", type=int, default=12)
    parser.add_argument("--page", help="write a page to explore")
    options = parser.parse_args()
    at, joined = town(options.corners, 22.0)
    sights = torch.rand(len(at), generator=torch.Generator().manual_seed(2)) ** 4 * 6  # a few are worth a detour
    far = torch.cdist(at, at)
    W = -torch.exp(-((far / 15) ** 2)) * 2  # having been near, there is less to see
    pot = cpl.Potentials(sights[None], torch.tensor([-4.0]), cpl.Dense(W[None]))

    wish = torch.zeros(len(at), dtype=torch.bool)
    wish[int(sights.argmax())] = True
    rules = [cpl.Adjacent(joined), cpl.Require(wish)]
    # Greedy may walk into a dead end; the best of a beam sees a little further.
    found = cpl.beam(pot, num_beams=64, num_return=3, max_len=options.stops, constraints=rules)
    for tour, log_prob in zip(found.tolist()[0], found.log_prob[0].tolist(), strict=True):
        steps = [bool(joined[i, j]) for i, j in pairwise(tour)]
        length = sum(float(far[i, j]) for i, j in pairwise(tour))
        print(f"{len(tour)} stops, sights {float(sights[tour].sum()):.1f}, length {length:.0f}, log P {log_prob:.1f}")
        assert all(steps)
    print("the greatest sight is on each:", bool(rules[1].met(found.mask()).all()))
    if options.page:
        cpl.explore(pot, options.page, items=at, connect=True, max_len=options.stops, title="A tour")


if __name__ == "__main__":
    main()

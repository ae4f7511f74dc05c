"""Passages for an answer: relevant, not the same thing twice, and short enough for the prompt.

Retrieval gives every passage a weight (relevance) and a vector; picked ones make their like redundant; a `Budget` holds
the number of words; a passage that must be quoted is required.

python examples/passages.py --words 40
"""

import argparse
import math
from collections import Counter

import torch

import torchcpl as cpl

QUESTION = "how do bees find and tell others about flowers"
PASSAGES = [
    "A bee that has found flowers dances in the hive: the angle of its run tells the direction from the sun.",
    "The waggle dance tells other bees the direction and the distance of flowers.",
    "Bees see ultraviolet light, and many flowers have marks in it that lead to the nectar.",
    "Honey is made from nectar by evaporation and enzymes.",
    "Bees remember the smell of flowers that were worth the visit.",
    "The direction of flowers is told by the angle of the dance to the vertical.",
    "A hive has one queen and thousands of workers.",
    "Scent brought back on the body of a dancer helps others to find the flowers once they are near.",
    "Bears like honey.",
]


def vectors(texts: list[str]) -> torch.Tensor:
    """Words weighted by how rare they are, rows of length one; put your own encoder here."""
    words = [Counter(text.lower().replace(":", "").replace(".", "").replace(",", "").split()) for text in texts]
    vocabulary = sorted(set().union(*words))
    rare = {w: math.log(len(texts) / sum(w in bag for bag in words)) for w in vocabulary}
    table = torch.tensor([[bag[w] * rare[w] for w in vocabulary] for bag in words])
    return table / table.norm(dim=1, keepdim=True).clamp(min=1e-9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--words", type=int, default=50, help="that fit into the prompt")
    parser.add_argument("--require", type=int, nargs="*", default=[], help="numbers of passages that must be quoted")
    options = parser.parse_args()
    x = vectors([*PASSAGES, QUESTION])
    relevance, alike = x[:-1] @ x[-1], x[:-1] @ x[:-1].T
    pot = cpl.Potentials(20 * relevance[None], torch.tensor([0.3]), cpl.Dense(-10 * alike[None]))

    words = torch.tensor([len(passage.split()) for passage in PASSAGES])
    must = torch.zeros(len(PASSAGES), dtype=torch.bool)
    must[options.require] = True
    picked = cpl.greedy(pot, constraints=[cpl.Budget(words, options.words), cpl.Require(must)]).tolist()[0]
    for i in picked:
        print(f"{relevance[i]:.2f}  {PASSAGES[i]}")
    print(f"{int(words[picked].sum())} of {options.words} words")


if __name__ == "__main__":
    main()

"""A pile of sentences: one that stands for each group of them, and how many it stands for. Nothing is trained.

python examples/sentences.py            # those below
python examples/sentences.py mine.txt   # your own, one a line
"""

import argparse
from collections import Counter
from pathlib import Path

import numpy as np

import torchcpl as cpl

SENTENCES = """
please book a table for two tonight at eight
can you reserve a table for four at an italian place
i need a table for dinner on friday
make a dinner reservation for six people
what is the weather like in paris today
will it rain in london tomorrow
is it going to be sunny this weekend
tell me the weather forecast for monday
play some jazz music in the kitchen
put on my running playlist
play the new album by that band
turn the music up and play the next song
how much money is in my bank account
transfer fifty dollars to my savings account
what is the balance of my checking account
move money from savings to checking account
""".strip().splitlines()


def vectors(sentences: list[str]) -> np.ndarray:
    """Pieces of four letters, weighted by how rare they are; put your own encoder here."""
    pieces = [Counter(f" {s} "[i : i + 4] for i in range(len(s) - 1)) for s in map(str.lower, sentences)]
    known = {piece: at for at, piece in enumerate(sorted(set().union(*pieces)))}
    table = np.zeros((len(sentences), len(known)))
    for row, counted in enumerate(pieces):
        table[row, [known[piece] for piece in counted]] = 1
    return table * np.log(len(sentences) / table.sum(0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, nargs="?", help="sentences, one a line")
    parser.add_argument("--size", type=int, help="how many (default: as many as needed)")
    options = parser.parse_args()
    sentences = options.file.read_text().splitlines() if options.file else SENTENCES
    x = vectors(sentences)
    selector = cpl.Selector(size=options.size, metric="cosine").fit(x)
    for number, row in enumerate(selector.representatives_):
        print(f"{int((selector.labels_ == number).sum()):3d}  {sentences[row]}")


if __name__ == "__main__":
    main()

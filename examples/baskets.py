"""From a CSV of orders, ``order,item`` a line, to completions: ``python examples/baskets.py orders.csv bread butter``.

Without arguments it invents some breakfasts and dinners.
"""

from __future__ import annotations

import argparse
import csv
import random
from pathlib import Path

import torch

import torchcpl as cpl


def invented() -> list[list[str]]:
    """Nobody takes both coffee and tea, or both kinds of pasta."""
    random.seed(0)
    meals = (["coffee", "tea"], ["bread", "butter", "jam"]), (["spaghetti", "penne"], ["basil", "parmesan", "wine"])
    orders = [(random.choice(one), [i for i in some if random.random() < 0.6]) for one, some in meals * 500]
    return [[str(order), item] for order, (first, rest) in enumerate(orders) for item in [first, *rest]]


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("orders", nargs="?", type=Path)
parser.add_argument("basket", nargs="*", default=["bread", "coffee"])
parser.add_argument("--steps", type=int, default=500)
options = parser.parse_args()

# Orders as sets of item numbers, −1 padded.
baskets: dict[str, set[str]] = {}
for order, item in list(csv.reader(options.orders.open()))[1:] if options.orders else invented():
    baskets.setdefault(order, set()).add(item)
names = sorted(set.union(*baskets.values()))
width = max(map(len, baskets.values()))
sets = torch.tensor([[*map(names.index, b), *[-1] * (width - len(b))] for b in baskets.values()])

# One table of items for all baskets, and the exact −log P(set), whatever the order.
torch.manual_seed(0)
items = torch.nn.Parameter(torch.randn(1, len(names), 16))
head = cpl.CPLHead(16, hidden=16, kind="contextual", live_stop=True)
optimizer = torch.optim.AdamW([items, *head.parameters()], lr=5e-3)
for _ in range(options.steps):
    optimizer.zero_grad()
    loss = cpl.set_nll(head(items), sets[torch.randint(len(sets), (128,))], exact=8)
    loss.backward()
    optimizer.step()

with torch.no_grad():
    pot, part = head(items), torch.tensor([[names.index(name) for name in options.basket]])
    probs = cpl.next_probs(pot, part)[0]
    print(f"{float(loss):.2f} nats a basket. After {', '.join(options.basket)}:")
    for choice in probs.topk(4).indices.tolist():
        print(f"  {probs[choice]:5.1%}  {[*names, '(nothing more)'][choice]}")
    print("complete:", ", ".join(names[i] for i in cpl.complete(pot, part).tolist()[0]))

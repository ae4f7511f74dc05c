"""CPL on your own encoder: learn to pick one of each group, shown one random choice at a time.

python examples/own_encoder.py
"""

import argparse

import torch
from torch import nn

import torchcpl as cpl

GROUPS, MEMBERS, DIM = 5, 8, 16


def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points around random centres (B, N, DIM), and one random member of every group (B, GROUPS)."""
    group = torch.arange(GROUPS * MEMBERS) % GROUPS
    features = torch.randn(size, GROUPS, DIM)[:, group] + 0.3 * torch.randn(size, len(group), DIM)
    return features, torch.randint(MEMBERS, (size, GROUPS)) * GROUPS + torch.arange(GROUPS)


class Picker(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.Sequential(nn.Linear(DIM, width), nn.TransformerEncoder(layer, 1, enable_nested_tensor=False))
        self.head = cpl.CPLHead(width, hidden=64, kind="coverage", live_stop=True)

    def forward(self, features: torch.Tensor) -> cpl.Potentials:
        potentials: cpl.Potentials = self.head(self.encoder(features))
        return potentials


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = Picker()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(options.steps):
        features, target = batch(32)
        loss = cpl.subset_nll(model(features), target, permutations=4, early_stop_weight=0.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0 or step == options.steps - 1:
            print(f"step {step:4d}  loss {loss.item():.3f}")

    features, _ = batch(200)
    with torch.no_grad():
        picked = cpl.greedy(model(features), max_len=10, stop_threshold=0.5).tolist()
    solved = [sorted(i % GROUPS for i in row) == list(range(GROUPS)) for row in picked]
    print(f"each group exactly once in {sum(solved)} of {len(solved)} new examples")


if __name__ == "__main__":
    main()

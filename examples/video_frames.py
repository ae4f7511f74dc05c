"""Frames that summarise a video, within a budget of seconds: potentials by hand, nothing trained.

A frame is worth more the more frames look like it, and having picked one makes those redundant. How long a frame must
stand to be understood depends on its scene; so many seconds are there.

python examples/video_frames.py --page frames.html
"""

import argparse

import numpy as np
import torch

import torchcpl as cpl


def video(scenes: int, frames: int, side: int = 24) -> tuple[np.ndarray, np.ndarray]:
    """A made-up video: in every scene a disc moves over a coloured ground. Frames (N, side, side, 3), their scene."""
    rng = np.random.default_rng(4)
    y, x = np.mgrid[:side, :side]
    shown, number = [], []
    for scene in range(scenes):
        ground, disc, start, speed = rng.random(3), rng.random(3), rng.random(2) * side, rng.normal(0, 1, 2)
        for t in range(rng.integers(frames // 2, frames)):
            centre = (start + t * speed) % side
            inside = (x - centre[0]) ** 2 + (y - centre[1]) ** 2 < 25
            shown.append(np.where(inside[..., None], disc, ground))
            number.append(scene)
    return np.stack(shown), np.array(number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenes", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--page", help="write a page to explore")
    options = parser.parse_args()
    frames, scene = video(options.scenes, frames=20)
    x = torch.tensor(frames.reshape(len(frames), -1)).float()
    near = torch.exp(-(torch.cdist(x, x) ** 2) / 100)  # 1 for the same picture, towards 0 for others
    unary = 2 * near.mean(1).log()  # typical frames first
    W = -30 * near  # W[j, i]: what having picked i does to j; only the budget stops it
    pot = cpl.Potentials(unary[None], torch.tensor([-torch.inf]), cpl.Dense(W[None]))

    seconds = torch.tensor(1.0 + (scene % 3))  # how long a frame of this scene stands
    picked = cpl.greedy(pot, constraints=[cpl.Budget(seconds, options.seconds)])
    rows = picked.tolist()[0]
    print("frames", rows, "of scenes", scene[rows].tolist())
    print(f"{seconds[rows].sum():.0f} of {options.seconds:g} seconds")
    if options.page:
        cpl.explore(pot, options.page, items=frames, labels=[f"scene {s}" for s in scene], max_len=len(rows))


if __name__ == "__main__":
    main()

"""Augmented scenes: image and path are changed alike, and a path keeps what every path promises."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from torchcpl.tasks.paths.augment import LINES, Augmentation, drop_lines, one_a_cell, turn
from torchcpl.tasks.paths.procedural import procedural_map
from torchcpl.tasks.paths.sampling import BACKGROUND, ROAD, SIZE, STEP
from torchcpl.tasks.paths.scenes import Scenes, cells_of, generate


@pytest.fixture(scope="module")
def made() -> Scenes:
    return generate([procedural_map(junctions=40, shares=(1, 1, 1, 1), seed=3)], 32, seed=1, workers=1)


def pair(made: Scenes) -> tuple[Tensor, Tensor]:
    """Scenes and a path of each; not those whose path comes by the same cells again, where points are left out."""
    images, path = torch.from_numpy(made.images), torch.from_numpy(made.paths[:, 0])
    gaps = (path[:, 1:] - path[:, :-1]).norm(dim=-1) * (path[:, 1:, 0] >= 0)
    plain = gaps.amax(-1) < 2 * STEP
    assert int(plain.sum()) > 20
    return images[plain], path[plain]


def check_path(path: Tensor) -> None:
    """Points in the image, then padding; one a cell; neighbours about a step apart, or more where a cell came twice."""
    real = path[..., 0] >= 0
    assert torch.equal(real, real.byte().cummin(-1).values.bool())
    assert bool(real[:, :2].all())
    assert bool(((path >= 0) & (path < SIZE))[real].all())
    cells, _ = cells_of(path)
    for row, there in zip(cells, real, strict=True):
        assert len(set(row[there].tolist())) == int(there.sum())
    gaps = (path[:, 1:] - path[:, :-1]).norm(dim=-1)[real[:, 1:]]
    assert float(gaps.max()) <= 3 * STEP
    assert float(gaps.median()) == pytest.approx(STEP, abs=0.1)


def test_a_turn_by_nothing_changes_nothing(made: Scenes) -> None:
    images, path = pair(made)
    nothing = torch.zeros(len(images))
    turned, again = turn(images, path, nothing, nothing + 1, torch.zeros(len(images), 2))
    assert torch.equal(turned, images)
    for row, before in zip(again, path, strict=True):
        row, before = row[row[:, 0] >= 0], before[before[:, 0] >= 0]
        assert abs(len(row) - len(before)) <= 1  # chords are shorter than the curve
        line = torch.cat([torch.lerp(before[:-1], before[1:], share) for share in torch.linspace(0, 1, 12)])
        assert float(torch.cdist(row, line).amin(-1).max()) < 1.0


def test_a_quarter_turn_turns_pixels_exactly() -> None:
    image = torch.randint(0, 7, (1, SIZE, SIZE), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    path = torch.tensor([[[128.0, 128.0], [139.3, 128.0], [150.6, 128.0], [-1.0, -1.0]]])
    turned, again = turn(image, path, torch.tensor([math.pi / 2]), torch.ones(1), torch.zeros(1, 2))
    assert torch.equal(turned[0], torch.rot90(image[0], -1))  # y points down: right becomes down
    wanted = torch.tensor([[128.0, 128.0], [128.0, 128 + STEP], [128.0, 128 + 2 * STEP], [-1.0, -1.0]])
    torch.testing.assert_close(again[0], wanted, atol=0.1, rtol=0)


@pytest.mark.parametrize(("rotate", "zoom", "shift"), [(30, 0.0, 0), (0, 0.3, 0), (0, 0.0, 16), (45, 0.25, 16)])
def test_a_turned_path_lies_on_the_turned_road(made: Scenes, rotate: float, zoom: float, shift: float) -> None:
    images, path = pair(made)
    augment = Augmentation(True, rotate, zoom, shift)
    turned, again = augment(images, path, torch.Generator().manual_seed(0))
    check_path(again)
    real = again[..., 0] >= 0
    x, y = again.clamp(min=0).long().unbind(-1)
    # The image is rounded to pixels, the path is not, and its chords cut tight corners.
    road = torch.nn.functional.max_pool2d((turned != BACKGROUND).float().unsqueeze(1), 3, 1, 1).flatten(1) > 0
    assert float(road.gather(1, y * SIZE + x)[real].float().mean()) > 0.995
    assert not torch.equal(turned, images)


def test_a_path_is_cut_where_it_leaves_the_image(made: Scenes) -> None:
    images, path = pair(made)
    nothing = torch.zeros(len(images))
    _, again = turn(images, path, nothing, nothing + 1, torch.tensor([120.0, 0.0]).expand(len(images), 2))
    real = again[..., 0] >= 0
    for row, there, before in zip(again, real, path, strict=True):
        moved = before[before[:, 0] >= 0] + torch.tensor([120.0, 0.0])
        outside = ((moved < 0) | (moved >= SIZE)).any(-1).nonzero()
        whole = int(outside[0]) if len(outside) else len(moved)
        assert abs(int(there.sum()) - whole) <= 1
        torch.testing.assert_close(row[0], moved[0])


def test_only_the_first_point_in_a_cell_is_kept() -> None:
    there_and_back = torch.tensor([[[20.0, 20.0], [80.0, 20.0], [20.0, 20.0], [20.0, 90.0]]])
    path = torch.cat([there_and_back, torch.full((1, 16, 2), -1.0)], 1)
    found = one_a_cell(path, path[..., 0] >= 0, (SIZE, SIZE))
    check = cells_of(found)[0][0]
    real = check[check >= 0]
    assert len(set(real.tolist())) == len(real)
    every = torch.arange(0, 190 + STEP / 2, STEP).clamp(max=190)  # by hand
    x = torch.where(every < 60, 20 + every, torch.where(every < 120, 140 - every, 20.0))
    y = torch.where(every < 120, 20.0, every - 100)
    cells = [int(b // 8) * 32 + int(a // 8) for a, b in zip(x, y, strict=True)]
    assert real.tolist() == list(dict.fromkeys(cells))


def test_dropped_lines_become_road_and_nothing_else_changes(made: Scenes) -> None:
    images = torch.from_numpy(made.images)
    which = torch.zeros(len(LINES), len(images), dtype=torch.bool)
    which[0, ::2] = True
    found = drop_lines(images, which).numpy()
    wanted = np.where(which[0].numpy()[:, None, None] & (made.images == LINES[0]), ROAD, made.images)
    np.testing.assert_array_equal(found, wanted)
    assert (found != made.images).any()

"""The methods of the baskets task as distributions, its metrics, and the whole from files to a table."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import torchcpl as cpl
from torchcpl import cli
from torchcpl.config import override
from torchcpl.tasks.baskets.benchmark import PUBLISHED, BasketsBenchmark
from torchcpl.tasks.baskets.data import Baskets, padded
from torchcpl.tasks.baskets.figures import growth, pair_effects
from torchcpl.tasks.baskets.methods import CPLSets, SetModel
from torchcpl.tasks.baskets.task import METHODS, BasketsConfig, BasketsTask, evaluate, hold_out, ranks

SMALL = BasketsConfig(epochs=2, batch_size=64, rank=4, width=8, components=3, dpp_rank=3, max_items=8)


def draw(count: int, seed: int, n: int = 6) -> Tensor:
    """Baskets in which 0 and 1 come together, 2 and 3 never do."""
    rng = np.random.default_rng(seed)
    baskets = []
    for _ in range(count):
        basket = {int(rng.integers(n))}
        if rng.random() < 0.5:
            basket.add(int(rng.integers(n)))
        if basket & {0, 1}:
            basket |= {0, 1}
        if {2, 3} <= basket:
            basket -= {3}
        baskets.append(sorted(basket))
    return padded(baskets)


@pytest.fixture(scope="module")
def baskets() -> Baskets:
    return Baskets("toys", [f"item {i}" for i in range(6)], draw(300, 0), draw(60, 1), draw(80, 2))


def model_of(baskets: Baskets, method: str, **options: object) -> tuple[BasketsTask, SetModel]:
    torch.manual_seed(0)
    task = BasketsTask(override(SMALL, method=method, **options), baskets)
    return task, task.build().eval()


EVERY = padded([list(s) for k in range(7) for s in combinations(range(6), k)])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["lowrank", "contextual"])
def test_every_method_is_a_distribution_over_sets(baskets: Baskets, method: str, kind: str) -> None:
    if kind == "lowrank" and method != "cpl":
        return
    _, model = model_of(baskets, method, kind=kind)
    with torch.no_grad():
        total = float(model.double().log_prob(EVERY)[0].exp().sum())
    assert total == pytest.approx(1, abs=0.02 if method == "pointer" else 1e-9)  # whose sets are estimated


@pytest.mark.parametrize("method", METHODS)
def test_training_raises_the_likelihood(baskets: Baskets, method: str) -> None:
    task, model = model_of(baskets, method)
    before = task.validate(model)["log_likelihood"]
    optimizer = torch.optim.Adam(model.train().parameters(), lr=0.02)
    for step in range(40):
        loss = model(task.batch(step))["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert task.validate(model.eval())["log_likelihood"] > before + 0.05


def test_scores_are_those_of_the_completed_set(baskets: Baskets) -> None:
    _, model = model_of(baskets, "cpl")
    rest = torch.tensor([[2, 4], [0, -1]])
    with torch.no_grad():
        scores = model.scores(rest)
        for b, part in enumerate([[2, 4], [0]]):
            for j in range(6):
                want = -torch.inf if j in part else float(model.log_prob(torch.tensor([[*part, j]]))[0])
                assert float(scores[b, j]) == pytest.approx(want, abs=1e-5)
    shown = model.select(rest)
    assert shown.indices.shape == (2, 6)
    assert [len(row) for row in shown.tolist()] == [4, 5]  # what is in the basket is not shown


class Known(SetModel):
    """Scores that are set by hand."""

    def log_prob(self, sets: Tensor) -> tuple[Tensor, Tensor]:
        value = -10.0 * (sets >= 0).sum(-1) + (sets == 0).any(-1)  # the smaller the likelier, and with item 0
        return value, torch.zeros_like(value)


def test_a_basket_is_completed_alike_whatever_is_in_its_batch(baskets: Baskets) -> None:
    _, model = model_of(baskets, "cpl", exact_items=3)
    parts = [[1], [0, 2, 4], [], [5, 3], [1, 2, 3, 4]]
    with torch.no_grad():
        together = model.scores(padded(parts))
        for part, found in zip(parts, together, strict=True):
            torch.testing.assert_close(found, model.scores(padded([part]))[0])


def test_metrics_by_hand() -> None:
    model = Known(SMALL, torch.full((6,), 0.5))
    rest, held = hold_out(torch.tensor([[0, 1, -1], [3, -1, -1], [2, 0, 4]]))
    assert rest.shape == (2, 2)
    assert [set(r) - {-1} | {h} for r, h in zip(rest.tolist(), held.tolist(), strict=True)] == [{0, 1}, {0, 2, 4}]
    above, among = ranks(model, torch.tensor([[1, -1], [2, 4]]), torch.tensor([0, 3]))
    assert above.tolist() == [0, 1 + 0.5 * 2]  # item 0 wins; of the others one is better and two are as good
    assert among.tolist() == [5, 4]
    sets = torch.tensor([[0, -1]] * 50 + [[0, 1]] * 50)
    scores = evaluate(model, sets)
    assert scores["log_likelihood"] == pytest.approx(-14)
    # Against random sets of the same size: a tie if they hold item 0 too, else won.
    assert scores["auc"] == pytest.approx((1 - 1 / 12 + 1 - 1 / 6) / 2, abs=0.03)
    # Pooled, a pair never beats a single item.
    assert scores["auc_pooled"] == pytest.approx((1 - 1 / 12 + 1 + 0 + 1 - 1 / 6) / 4, abs=0.03)
    assert scores["auc_limit"] == pytest.approx(0.75)  # two sizes, half of the baskets each


class Uniform(SetModel):
    """All sets of one or two of six items alike, but for those with item 0."""

    def log_prob(self, sets: Tensor) -> tuple[Tensor, Tensor]:
        value = (sets == 0).any(-1).float() - torch.tensor([1.0, 6.0, 15.0]).log()[(sets >= 0).sum(-1)]
        return value, torch.zeros_like(value)


def test_by_the_likelihood_ratio_sizes_do_not_matter() -> None:
    scores = evaluate(Uniform(SMALL, torch.full((6,), 0.5)), torch.tensor([[0, -1]] * 200 + [[0, 1]] * 200))
    chance = (1 / 6 + 1 / 3) / 2  # that a random set has item 0 too: a tie
    assert scores["auc_ratio"] == pytest.approx(1 - chance / 2, abs=0.02)


def test_items_known_by_their_features_alone(baskets: Baskets) -> None:
    features = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    task = BasketsTask(SMALL, Baskets("toys", baskets.names, baskets.train, baskets.valid, baskets.test, features))
    model = task.build().eval()
    assert isinstance(model, CPLSets)
    with torch.no_grad():
        pot = model.potentials(new=features[:2] + 0.1)
        assert pot.unary.shape == (1, 8)
        probs = cpl.next_probs(pot, torch.tensor([[6, 1]]))
    assert probs.sum().item() == pytest.approx(1, abs=1e-5)
    assert probs[0, 6] == 0
    assert probs[0, 7] > 0
    _, plain = model_of(baskets, "cpl")
    assert isinstance(plain, CPLSets)
    with pytest.raises(ValueError, match="new: expected None for a model without features"):
        plain.potentials(new=features)


def test_models_and_what_they_are_given_are_on_one_device(baskets: Baskets) -> None:
    task, model = model_of(baskets, "cpl")
    assert BasketsBenchmark().collate(model.to("meta"), [torch.tensor([2, 0])]).is_meta
    for reference in task.untrained().values():
        assert all(tensor.is_meta for tensor in vars(reference.to("meta"))["_buffers"].values())
        assert not any(isinstance(value, Tensor) for value in vars(reference).values())


def test_figures(baskets: Baskets) -> None:
    task, model = model_of(baskets, "cpl")
    assert isinstance(model, CPLSets)
    W = pair_effects(model)
    assert W.shape == (6, 6)
    torch.testing.assert_close(W.sum(0), torch.zeros(6), atol=1e-5, rtol=0)
    added, choices = growth(model, task, baskets.names)
    assert len(added) == len(choices) == 5
    assert added[0] == baskets.names[int(task.frequency.argmax())]
    assert all(1 >= p >= 0 for step in choices for _, p in step)


def test_the_basket_of_a_shop_with_fewer_items_than_are_shown_grows_to_all_of_them() -> None:
    names = ["a", "b", "c"]
    task, model = model_of(Baskets("kiosk", names, *(draw(40, seed, 3) for seed in range(3))), "cpl")
    added, choices = growth(model, task, names)  # type: ignore[arg-type]
    assert sorted(added) == names
    assert [len(step) for step in choices] == [4, 4, 4]  # the three and the stop


def test_from_files_to_a_table(
    baskets: Baskets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for part in ("train", "valid", "test"):
        lines = [" ".join(str(i) for i in row if i >= 0) for row in getattr(baskets, part).tolist()]
        Path(f"gifts.{part}.txt").write_text("\n".join(lines) + "\n")
    Path("gifts.items.txt").write_text("\n".join(baskets.names))
    small = ["--source", "gifts", "--epochs", "2", "--rank", "4", "--width", "8", "--batch-size", "64"]
    methods = ["--methods", "cpl", "dpp", "--seeds", "0", "1"]
    assert cli.main(["table", "baskets", *small, *methods, "--train", "--runs", "runs", "--out", "table.json"]) == 0
    rows = {row["method"]: row for row in json.loads(Path("table.json").read_text())["rows"]}
    assert rows["CPL"]["log_likelihood"] > rows["Independent items"]["log_likelihood"] - 2
    assert rows["CPL"]["log_likelihood_std"] >= 0
    assert rows["Item to item"]["log_likelihood"] is None
    assert rows["Item to item"]["mpr"] > 50
    assert rows["SimplePGC, run again"]["log_likelihood"] == PUBLISHED["gifts"][-1]
    capsys.readouterr()
    assert cli.main(["evaluate", "runs/cpl-s0"]) == 0
    assert "chosen on validation baskets; 80 test baskets" in capsys.readouterr().out
    assert cli.main(["report", "baskets", "runs/cpl-s0", "runs/dpp-s0", "--out", "page"]) == 0
    assert {p.stem for p in Path("page/figures").glob("*.png")} == {"pairs", "growing", "sizes", "convergence"}
    lines = Path("gifts.test.txt").read_text()
    Path("next.txt").write_text(lines)
    assert cli.main(["evaluate", "runs/cpl-s0", "--source", "next.txt"]) == 0
    capsys.readouterr()
    Path("next.txt").write_text("\n".join(", ".join(f"item {i}" for i in row.split()) for row in lines.splitlines()))
    assert cli.main(["evaluate", "runs/cpl-s0", "--source", "next.txt"]) == 0
    capsys.readouterr()
    Path("next.txt").write_text(Path("next.txt").read_text().replace("item 0", "zucchini"))  # others have its number
    assert cli.main(["evaluate", "runs/cpl-s0", "--source", "next.txt"]) == 2
    said = "next.txt: expected the items of gifts, here or in next.items.txt, got others"
    assert said in capsys.readouterr().err
    Path("gifts.parts.txt").write_text("item 0, item 2\nitem 4\n")
    assert cli.main(["predict", "runs/cpl-s0", "gifts.parts.txt", "--out", "picks.json"]) == 0
    picks = json.loads(Path("picks.json").read_text())["picks"]
    assert [set(row["picks"]) & given for row, given in zip(picks, ({0, 2}, {4}), strict=True)] == [set(), set()]
    assert len(picks[1]["picks"]) == 5
    Path("names.txt").write_text("item 0, item 2\nitem 4\n")  # by the names that the run was trained with
    assert cli.main(["predict", "runs/cpl-s0", "names.txt", "--out", "named.json"]) == 0
    assert json.loads(Path("named.json").read_text())["picks"] == picks
    assert cpl.load("runs/dpp-s0").select([[0, 2], [4]]).indices.shape == (2, 6)
    with pytest.raises(ValueError, match="basket 0: expected numbers below 6, got"):
        cpl.load("runs/cpl-s0").select([[7]])
    assert cli.main(["report", "baskets", "runs/cpl-s0", "--out", "page", "--explore", "page/basket.html"]) == 0
    assert "item 3" in Path("page/basket.html").read_text()
    Path("gifts.test.txt").write_text("0\n1 1\n")
    BasketsBenchmark().make_task.__globals__["_baskets"].cache_clear()
    assert cli.main(["train", "baskets", *small, "--run", "runs/bad"]) == 2
    assert "gifts.test.txt:2: expected every item once, got '1' again" in capsys.readouterr().err
    assert not Path("runs/bad").exists()

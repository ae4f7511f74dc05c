"""The explorer's page, in a real browser: it decides as Python does, and can be touched."""

from __future__ import annotations

import html as html_module
import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torchcpl as cpl
from torchcpl.tasks.baskets.methods import CPLSets
from torchcpl.tasks.baskets.task import BasketsConfig

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# fmt: off
ARGUMENTS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]
# fmt: on
KINDS = ("dense", "densecoverage", "lowrank", "contextual", "coverage", "recent")
CASES = 45  # of each kind, with and without a live stop
RULES = """
    const marks = list => { const all = new Uint8Array(d.n); list.forEach(j => { all[j] = 1; }); return all; };
    const [most, least, first] = [d.max_len, d.min_len, d.first];
    const rules = { forced: marks(d.forced), forbidden: marks(d.forbidden), first, most, least };
"""
RUN = f"""cases => cases.map(d => {{ {RULES}
    const m = torchcpl.model(d), greedy = torchcpl.greedy(m, rules, d.stop_threshold);
    const found = d.sweeps ? torchcpl.refine(m, rules, greedy, d.sweeps) : greedy;
    return [found.picks, found.logProb, torchcpl.problem(torchcpl.model(d), rules)];
}})"""


def potentials(
    kind: str, n: int, rng: np.random.Generator, *, live: bool = False, ties: bool = False
) -> cpl.Potentials:
    """One row of random potentials; with ``ties`` few different values, so that the order of equals counts."""
    dtype = torch.float64 if rng.random() < 0.5 else torch.float32

    def fill(*shape: int) -> torch.Tensor:
        values = 1.5 * rng.standard_normal(shape)
        return torch.tensor(values.round().clip(-2, 2) if ties else values, dtype=dtype)

    h = 4  # √h is exact: a tie in Python is one in the page
    stop_key = fill(1, h) if live else None
    interaction: cpl.Interaction
    if kind == "dense":
        interaction = cpl.Dense(fill(1, n, n), fill(1, n) if live else None)
    elif kind == "densecoverage":
        interaction = cpl.DenseCoverage(fill(1, n, n), fill(1, n) if live else None)
    elif kind == "lowrank":
        interaction = cpl.LowRank(fill(1, n, h), fill(1, n, h), stop_key)
    elif kind == "coverage":
        cover = fill(1, n, 9), fill(1, n, 9), fill(1)
        interaction = cpl.Coverage(fill(1, n, h), fill(1, n, h), *cover, stop_key)
    elif kind == "recent":
        last = fill(1, n, 16), fill(1, n, 16)
        interaction = cpl.Recent(fill(1, n, h), fill(1, n, h), *last, stop_key, fill(1, 16) if live else None)
    else:
        activation = ("gelu", "relu", "silu")[rng.integers(3)]
        network = cpl.CPLHead(2, h, kind="contextual", activation=activation).context
        assert isinstance(network, nn.Module)
        for weight in network.parameters():
            weight.requires_grad_(False).copy_(fill(*weight.shape))
        network.to(dtype).eval()
        interaction = cpl.Contextual(fill(1, n, h), fill(1, n, h), network, stop_key)
    mask = torch.tensor(rng.random((1, n)) < (0.8 if rng.random() < 0.5 else 2))
    unary = fill(1, n)
    if n and rng.random() < 0.2:
        unary[0, rng.integers(n)] = -torch.inf
    return cpl.Potentials(unary, fill(1), interaction, mask)


def options(pot: cpl.Potentials, rng: np.random.Generator) -> dict[str, Any]:
    """Forced and forbidden candidates, limits, a stop threshold and bias, such that they can be met."""
    n = pot.num_candidates
    forbid = torch.tensor(rng.random(n) < 0.15)
    force = torch.tensor(rng.random(n) < rng.choice([0, 0.1, 0.3])) & ~forbid & pot.mask[0]
    room = int((pot.mask[0] & ~forbid).sum())
    least = int(rng.integers(0, room + 1)) if rng.random() < 0.3 else 0
    most = int(rng.integers(max(least, int(force.sum())), n + 3)) if rng.random() < 0.6 else None
    return {
        "max_len": most,
        "min_len": least,
        "stop_bias": float(rng.choice([0, 0.7])),
        "stop_threshold": float(rng.choice([0.02, 0.2, 0.9])) if rng.random() < 0.4 else None,
        "constraints": [cpl.Forbid(forbid), cpl.Require(force, first=bool(rng.random() < 0.3))],
    }


def data_of(page: Any) -> dict[str, Any]:
    found = re.search(r'id="data">(.*?)</script>', page.html, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright here: pip install 'torchcpl[dev]'")
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield running
        running.close()


class Opened:
    """A page that is open, and the few things done with it."""

    def __init__(self, browser: Any, explorer: Any, folder: Path, **context: Any) -> None:
        path = folder / "page.html"
        explorer.save(path)
        context.setdefault("viewport", {"width": 1280, "height": 900})
        self.page = browser.new_context(**context).new_page()
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())

    def picks(self) -> list[str]:
        """The names of the answer's chips, in order."""
        names: list[str] = self.page.eval_on_selector_all("#answer .chip", "all => all.map(c => c.ariaLabel)")
        return [re.sub(r"^\d+: |, probability.*$", "", name) for name in names]

    def text(self, selector: str) -> str:
        return str(self.page.inner_text(selector))

    def card(self, name: str) -> Any:
        return self.page.locator(f'#candidates [aria-label^="{name},"]')

    def slide(self, name: str, value: float) -> None:
        self.page.eval_on_selector(
            f"#{name}", "(node, v) => { node.value = v; node.dispatchEvent(new Event('input')); }", value
        )


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Any]:
    pages: list[Opened] = []

    def opens(explorer: Any, **context: Any) -> Opened:
        pages.append(Opened(browser, explorer, tmp_path, **context))
        return pages[-1]

    yield opens
    for one in pages:
        assert one.errors == []
        assert all(url.startswith(("file:", "data:")) for url in one.requests), "the page asked the network"
        one.page.context.close()


NAMES = ["ash", "birch", "cedar", "dogwood", "elm"]


def trees() -> cpl.Potentials:
    """Greedy picks ash, then cedar, which ash lifts, then stops; birch and dogwood are what is left."""
    W = torch.zeros(5, 5)
    W[2, 0] = 4  # ash lifts cedar
    W[1, 0] = -3  # and lowers birch
    return cpl.Potentials(torch.tensor([[3.0, 2.8, 0.0, 1.0, -1.0]]), torch.tensor([1.5]), cpl.Dense(W[None]))


def python_picks(**wishes: Any) -> list[str]:
    """What greedy picks, and the stop unless nothing was left to pick."""
    picks = [NAMES[i] for i in cpl.greedy(trees(), **wishes).tolist()[0]]
    return picks if len(picks) == wishes.get("max_len", 5) else [*picks, "Stop"]


def test_picks_agree_with_greedy(opened: Any) -> None:
    rng = np.random.default_rng(0)
    cases, expected = [], []
    for kind in KINDS:
        for number in range(2 * CASES):
            n = int(rng.integers(0, 4)) if number % 10 == 0 else int(rng.integers(1, 25))
            pot = potentials(kind, n, rng, live=number % 2 == 1, ties=kind == "dense" and number % 3 == 0)
            wishes, sweeps = options(pot, rng), number % 3
            cases.append(data_of(cpl.explore(pot, sweeps=sweeps, **wishes)))
            sel = cpl.greedy(pot, **wishes)
            if sweeps:
                del wishes["stop_threshold"]
                sel = cpl.refine(pot, sel, sweeps, **wishes)
            expected.append((sel.tolist()[0], float(sel.log_prob)))
    assert len(cases) >= 500
    found = opened(cpl.explore(trees())).page.evaluate(RUN, cases)
    wrong = [k for k, (picks, _, why) in enumerate(found) if picks != expected[k][0] or why is not None]
    assert wrong == []
    assert [log_prob for _, log_prob, _ in found] == pytest.approx([e[1] for e in expected], abs=2e-4)
    assert sum(len(picks) > 1 for picks, _ in expected) > 300  # the interaction had a say


def test_baskets_agree_with_greedy(opened: Any) -> None:
    """Their context has a bias of the stop for every number of picks."""
    cases, expected = [], []
    for seed in range(20):
        torch.manual_seed(seed)
        model = CPLSets(BasketsConfig(rank=4, width=8, max_items=3), torch.rand(12)).eval().requires_grad_(False)
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape))
        force = torch.rand(12) < 0.2
        wishes = {"constraints": [cpl.Require(force)], "max_len": 8}
        cases.append(data_of(cpl.explore(model.potentials(), **wishes)))
        expected.append(cpl.greedy(model.potentials(), **wishes).tolist()[0])
    found = opened(cpl.explore(trees())).page.evaluate(RUN, cases)
    assert [picks for picks, _, _ in found] == expected
    assert len(set(map(len, expected))) > 1


def test_rounded_potentials_are_decoded_as_stored(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    monkeypatch.setattr(sys.modules["torchcpl.explore"], "ROOM", 100)
    cases, expected = [], []
    for number in range(40):
        pot = potentials(KINDS[number % len(KINDS)], 12, rng, live=True)
        data = data_of(cpl.explore(pot))
        assert data["rounded"]["bits"] == 8
        cases.append(data)
        expected.append((cpl.greedy(pot).tolist()[0], data["rounded"]["same"]))
    found = opened(cpl.explore(trees())).page.evaluate(RUN, cases)
    # What the page says of itself is so: the answer of all digits, or not.
    assert [picks == want for (picks, _, _), (want, _) in zip(found, expected, strict=True)] == [s for _, s in expected]
    assert sum(same for _, same in expected) > 30


def test_best_answers_are_those_of_hypotheses(opened: Any) -> None:
    """With limits, forced and forbidden candidates, the sets and their probabilities; exact where they are small."""
    js = f"""cases => cases.map(d => {{ {RULES}
        return torchcpl.hypotheses(torchcpl.model(d), rules, 6, 16).map(a => [a.picks, a.mass, a.logProb]);
    }})"""
    rng = np.random.default_rng(3)
    cases, expected = [], []
    for number in range(20 * len(KINDS)):
        pot = potentials(KINDS[number % len(KINDS)], int(rng.integers(1, 14)), rng, live=number % 2 == 1)
        wishes = options(pot, rng) | {"stop_threshold": None}
        cases.append(data_of(cpl.explore(pot, **wishes)))
        del wishes["stop_threshold"]
        expected.append(cpl.hypotheses(pot, 6, num_beams=16, **wishes))
    found = opened(cpl.explore(trees())).page.evaluate(js, cases)
    for have, want in zip(found, expected, strict=True):
        alive = int((want.log_prob[0] > -torch.inf).sum())
        assert [sorted(picks) for picks, _, _ in have] == [sorted(picks) for picks in want.tolist()[0][:alive]]
        assert [mass for _, mass, _ in have] == pytest.approx(want.log_prob[0, :alive].exp().tolist(), abs=1e-4)
    assert sum(len(have) == 6 for have in found) > 60


def test_a_page_of_paths_opens_with_the_answers_of_python(opened: Any) -> None:
    rng = np.random.default_rng(0)
    pot, where = potentials("recent", 12, rng, live=True), rng.random((12, 2)) * 200
    page = cpl.explore(pot, items=where, connect=True, max_len=4)
    data = data_of(page)["answers"]
    points = torch.tensor(where.round(3))

    def apart(indices: torch.Tensor) -> torch.Tensor:
        """By a loop over all pairs."""
        paths = [points[[i for i in row if i >= 0]] for row in indices[0].tolist()]
        there = torch.zeros(len(paths), len(paths))
        for (i, a), (j, b) in product(enumerate(paths), repeat=2):
            there[i, j] = (
                torch.cdist(a, b).amin(1).mean() if len(a) and len(b) else 0.0 if len(a) == len(b) else torch.inf
            )
        return (there + there.T)[None]

    want = cpl.hypotheses(pot, 6, same=apart, radius=data["radius"], max_len=4)
    answers = [(answer["picks"], pytest.approx(answer["mass"])) for answer in data["found"]]
    alive = want.log_prob[0] > -torch.inf
    assert list(zip(want.tolist()[0], want.log_prob[0].exp().tolist(), strict=True))[: int(alive.sum())] == answers
    shown = opened(page)
    shown.page.check("input[value=best]", force=True)
    assert shown.page.locator("#answers button").count() == len(answers)
    assert "Estimated" not in shown.text("#answers-note")
    shown.slide("most", 3)  # other rules: no longer those of Python, and said
    assert "Estimated from 48 samples" in shown.text("#answers-note")


def test_samples_of_nothing_are_one_answer(opened: Any) -> None:
    pot = cpl.Potentials(torch.zeros(1, 3), torch.full((1,), 30.0), cpl.Dense(torch.zeros(1, 3, 3)))
    shown = opened(cpl.explore(pot, items=np.eye(3, 2), connect=True))
    shown.page.check("input[value=best]", force=True)
    shown.slide("most", 2)
    assert "Estimated from 48 samples" in shown.text("#answers-note")
    assert shown.page.locator("#answers button").all_inner_texts() == ["1: 0 picks\n100%"]


def test_a_path_of_nothing() -> None:
    for n, most in ((0, None), (3, 0)):
        pot = cpl.Potentials(torch.zeros(1, n), torch.zeros(1), cpl.Dense(torch.zeros(1, n, n)))
        data = data_of(cpl.explore(pot, items=np.zeros((n, 2)), connect=True, max_len=most))
        assert data["answers"]["found"] == [{"picks": [], "mass": 1.0}]


def test_samples_follow_the_law(opened: Any) -> None:
    page = opened(cpl.explore(trees())).page
    rng = np.random.default_rng(2)
    for kind in KINDS:
        pot = potentials(kind, 6, rng, live=True)
        js = """([d, seeds]) => {
            const rules = { forced: new Uint8Array(d.n), forbidden: new Uint8Array(d.n), most: 3, least: 0 };
            const m = torchcpl.model(d);
            return Array.from({ length: seeds }, (_, seed) => torchcpl.sample(m, rules, 1, seed).picks);
        }"""
        draws = page.evaluate(js, [data_of(cpl.explore(pot, max_len=3)), 4000])
        for order, count in Counter(map(tuple, draws)).items():
            given = torch.tensor([[*order, *[-1] * (3 - len(order))]])
            p = float(cpl.log_prob(pot, given, max_len=3).exp())
            assert count == pytest.approx(4000 * p, abs=5 * (4000 * p * (1 - p)) ** 0.5 + 1)


def test_stepping(opened: Any) -> None:
    shown = opened(cpl.explore(trees(), items=NAMES, title="Trees"))
    assert shown.text("h1") == "Trees"
    assert shown.picks() == python_picks() == ["ash", "cedar", "Stop"]
    shown.page.click("#first")
    assert shown.text("#where") == "0 of 2 picked"
    first = shown.text("#next")
    shown.page.click("#forward")
    assert shown.text("#next") != first
    assert "picking ash changed" in shown.text("#change-title")
    rows = shown.page.eval_on_selector_all("#change li", "all => all.map(li => li.innerText.split(/\\s+/))")
    assert rows == [["cedar", "+4.00"], ["birch", "−3.00"]]
    shown.page.click("#back")
    assert shown.text("#next") == first
    shown.page.click("#last")
    assert shown.page.is_disabled("#forward")
    # The probabilities shown are those of the model, the stop among them.
    shown.page.click("#first")
    probs = torch.cat([trees().unary[0], trees().stop]).softmax(0).tolist()
    rows = shown.page.eval_on_selector_all("#next li", "all => all.map(li => [li.children[0].title, li.innerText])")
    assert {name: re.search(r"[\d.]+%", text)[0] for name, text in rows} == {  # type: ignore[index]
        name: f"{100 * p:.0f}%" if p >= 0.0995 else f"{100 * p:.1f}%"
        for name, p in zip([*NAMES, "Stop"], probs, strict=True)
    }


def test_forcing_and_forbidding(opened: Any) -> None:
    shown = opened(cpl.explore(trees(), items=NAMES))
    mark = torch.tensor([False, False, False, False, True])
    shown.card("elm").click()
    assert shown.picks() == python_picks(constraints=[cpl.Require(mark)])
    assert "elm" in shown.picks()
    shown.card("elm").click()  # and now forbidden
    shown.card("ash").click()
    shown.card("ash").click()
    never = torch.tensor([True, False, False, False, True])
    assert shown.picks() == python_picks(constraints=[cpl.Forbid(never)])
    assert "forbidden" in shown.card("ash").get_attribute("aria-label")
    shown.page.click('#marks [aria-label^="ash"]')
    shown.card("elm").click()
    assert shown.picks() == python_picks()
    assert not shown.page.is_visible("#marks")
    shown.page.click('#next [aria-label="Forbid dogwood"]')  # the same from the list of next choices
    assert "Forbidden: dogwood" in shown.text("#marks").replace("\n", " ")


def test_sliders(opened: Any) -> None:
    shown = opened(cpl.explore(trees(), items=NAMES))
    shown.slide("most", 1)
    assert shown.picks() == python_picks(max_len=1)
    shown.slide("most", 5)
    shown.slide("least", 4)
    assert shown.picks() == python_picks(min_len=4)
    shown.slide("most", 2)
    assert "at least 4 are asked for, but at most 2" in shown.text("#problem")
    shown.slide("least", 0)
    shown.slide("most", 5)
    shown.slide("threshold", 0.9)
    assert shown.picks() == python_picks(stop_threshold=0.9) != python_picks()
    assert not shown.page.is_visible("#problem")


def test_samples_and_best_answers(opened: Any) -> None:
    shown = opened(cpl.explore(trees(), items=NAMES))
    shown.page.check("input[value=sampled]", force=True)
    drawn = {tuple(shown.picks())}
    for _ in range(8):
        shown.page.click("#again")
        drawn.add(tuple(shown.picks()))
    assert len(drawn) > 2
    shown.slide("temperature", 0.1)  # nearly greedy
    assert shown.picks() == python_picks()
    shown.page.check("input[value=best]", force=True)
    answers = shown.page.locator("#answers button")
    sets = [frozenset(re.findall(r"[a-z]+", text)) - {"nothing"} for text in answers.all_inner_texts()]
    assert len(sets) == len(set(sets)) > 2
    want = cpl.hypotheses(trees(), 6, num_beams=16).tolist()[0]
    assert sets == [frozenset(NAMES[i] for i in picks) for picks in want]
    answers.nth(1).click()
    assert set(shown.picks()) - {"Stop"} == sets[1]


def test_keyboard(opened: Any) -> None:
    shown = opened(cpl.explore(trees(), items=NAMES))
    keys = shown.page.keyboard
    keys.press("Home")
    assert shown.text("#where").startswith("0 of")
    keys.press("ArrowRight")
    assert shown.text("#where").startswith("1 of")
    keys.press("End")
    assert shown.page.is_disabled("#forward")
    keys.press("ArrowLeft")
    assert not shown.page.is_disabled("#forward")
    shown.card("ash").focus()
    keys.press("ArrowRight")
    keys.press("f")
    assert "forced" in shown.card("birch").get_attribute("aria-label")
    keys.press("x")
    assert "forbidden" in shown.card("birch").get_attribute("aria-label")
    keys.press("Enter")  # what a click does: from forbidden to free
    assert "forbidden" not in shown.card("birch").get_attribute("aria-label")
    assert shown.page.eval_on_selector_all("#candidates [tabindex='0']", "all => all.length") == 1


def test_screen_readers_are_told(opened: Any) -> None:
    shown = opened(cpl.explore(trees(), items=NAMES))
    assert shown.page.get_attribute("#summary", "aria-live") == "polite"
    before = shown.text("#summary")
    shown.card("elm").click()
    assert shown.text("#summary") != before
    nameless = """all => all.filter(b => !(b.ariaLabel || b.innerText.trim())).length"""
    assert shown.page.eval_on_selector_all("button, [role=button]", nameless) == 0


@pytest.mark.parametrize("look", ["cards", "images", "map"])
def test_phone_width(opened: Any, look: str) -> None:
    rng = np.random.default_rng(0)
    items = {
        "cards": [f"{name} " * 30 for name in NAMES],
        "images": rng.random((5, 40, 30, 3)),
        "map": rng.random((5, 2)),
    }[look]
    shown = opened(cpl.explore(trees(), items=items), viewport={"width": 390, "height": 844}, color_scheme="dark")
    assert shown.page.evaluate("document.documentElement.scrollWidth") == 390
    assert shown.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 22, 26)"
    if look == "images":
        loaded = "all => all.every(i => i.complete && i.naturalWidth === 30 && i.naturalHeight === 40)"
        assert shown.page.eval_on_selector_all("#candidates img", loaded)


def test_a_map_can_be_clicked(opened: Any) -> None:
    where = np.array([[10, 10], [90, 10], [50, 50], [10, 90], [90, 90]])
    ground = np.full((100, 100, 3), 240, dtype=np.uint8)
    shown = opened(cpl.explore(trees(), items=where, background=ground, connect=True, labels=NAMES))
    drawing = shown.page.locator("#candidates svg")
    drawing.scroll_into_view_if_needed()
    box = drawing.bounding_box()
    scale = box["height"] / 100
    left = box["x"] + (box["width"] - box["height"]) / 2
    shown.page.mouse.click(left + 88 * scale, box["y"] + 91 * scale)  # near elm
    assert "forced" in shown.card("elm").get_attribute("aria-label")
    shown.page.click("#last")
    line = shown.page.get_attribute("#candidates polyline >> nth=1", "points")
    assert line.split()[:2] == ["10,10", "50,50"]


def test_hostile_text_stays_text(opened: Any) -> None:
    hostile = [
        "</script><script>window.hacked=1</script>",
        "<img src=x onerror='window.hacked=1'>",
        "a & b",
        '"',
        "<!--",
    ]
    shown = opened(cpl.explore(trees(), items=hostile, title="<b>bold</b></title><script>hacked=1</script>"))
    assert shown.page.evaluate("window.hacked") is None
    assert shown.text("h1") == "<b>bold</b></title><script>hacked=1</script>"
    assert shown.page.title() == "<b>bold</b></title><script>hacked=1</script>"
    assert shown.page.eval_on_selector_all("#candidates .name", "all => all.map(n => n.textContent)") == hostile


def test_two_thousand_candidates_stay_smooth(opened: Any) -> None:
    torch.manual_seed(0)
    pot = cpl.CPLHead(16, 64)(torch.randn(1, 2000, 16))
    page = cpl.explore(pot, items=[f"Item {i}" for i in range(2000)], max_len=20, min_len=10)
    assert len(page.html) < 1_500_000
    shown = opened(page)
    assert shown.page.locator("#candidates .card-item").count() == 2000
    # No timing here, but no work that grows out of hand: what a step and a decision touch is counted.
    changes = """() => new Promise(done => {
        let count = 0;
        const seen = new MutationObserver(list => { count += list.length; });
        seen.observe(document.body, { subtree: true, childList: true });
        document.getElementById("forward").click();
        requestAnimationFrame(() => requestAnimationFrame(() => done(count)));
    })"""
    assert shown.page.evaluate(changes) < 4000
    shown.card("Item 1999").click()
    assert "Item 1999" in shown.picks()


def test_a_notebook_shows_it_inline(opened: Any) -> None:
    page = cpl.explore(trees(), items=NAMES)
    frame = page._repr_html_()
    assert html_module.unescape(frame.split('srcdoc="')[1].split('"')[0]) == page.html
    shown = opened(page)
    shown.page.set_content(frame)
    assert shown.page.frame_locator("iframe").locator("#answer .chip").count() == len(python_picks())


def test_notebooks_show_potentials_and_selections() -> None:
    pot = trees()
    assert "<td>0</td><td>5</td><td>1.50</td><td>0 (3.00), 1 (2.80)" in pot._repr_html_()
    assert "<td>0</td><td>0, 2</td>" in cpl.greedy(pot)._repr_html_()
    many = cpl.sample(pot, num_samples=20, generator=torch.Generator().manual_seed(0))._repr_html_()
    assert many.count("<tr>") == 1 + 8
    assert "and 12 more" in many


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"items": ["one"]}, "items: expected 5"),
        ({"items": "abcde"}, "items: expected 5"),
        ({"items": np.full((5, 2), np.nan)}, "items: expected finite points"),
        ({"items": [np.full((3, 3), 7.0)] * 5}, "items: expected uint8"),
        ({"items": [Path("notes.txt")] * 5}, "items: expected the file of an image"),
        ({"background": np.zeros((2, 2), np.uint8)}, "items: expected points"),
        ({"connect": True}, "items: expected points"),
        ({"labels": ["one"]}, "labels: expected 5 strings"),
        ({"row": 1}, "row: expected one of the 1 rows"),
        ({"constraints": [cpl.Budget([1] * 5, 3)]}, "constraints: expected Forbid and Require"),
        ({"max_len": 1, "min_len": 2}, "min_len: expected at most"),
    ],
)
def test_wrong_arguments(wrong: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says):
        cpl.explore(trees(), tmp_path / "page.html", **wrong)
    assert not list(tmp_path.iterdir())


def test_required_candidates_are_first_or_not() -> None:
    """A row of which none is required first is one without that rule."""
    pot = cpl.Potentials(torch.zeros(2, 3), torch.zeros(2), cpl.Dense(torch.zeros(2, 3, 3)))
    marks = torch.tensor([[True, False, False], [False, False, False]])
    both = [cpl.Require(marks, first=True), cpl.Require([False, True, False])]
    with pytest.raises(ValueError, match="constraints: expected all required candidates first, or none"):
        cpl.explore(pot, constraints=both)
    assert data_of(cpl.explore(pot, constraints=both[:1]))["first"] is True
    other = data_of(cpl.explore(pot, row=1, constraints=both))
    assert (other["forced"], other["first"]) == ([1], False)


def test_interactions_the_page_cannot_run() -> None:
    keys = torch.zeros(1, 2, 3)
    pot = cpl.Potentials(torch.zeros(1, 2), torch.zeros(1), cpl.Contextual(keys, keys, lambda s, count: s))
    with pytest.raises(ValueError, match="network: expected a head's ContextNetwork, in eval mode, got function"):
        cpl.explore(pot)
    odd = cpl.CPLHead(2, 3, kind="contextual").context
    assert odd is not None
    odd.forward = lambda total, count: 2 * total  # type: ignore[method-assign]
    pot = cpl.Potentials(torch.zeros(1, 2), torch.zeros(1), cpl.Contextual(keys + 1, keys + 1, odd))
    with pytest.raises(ValueError, match="network: expected a head's ContextNetwork"):
        cpl.explore(pot)
    with pytest.raises(ValueError, match="pot: expected Potentials"):
        cpl.explore(torch.zeros(1, 2))  # type: ignore[arg-type]

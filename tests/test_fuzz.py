"""Fuzzing: wrong arguments for every public name, and the laws of the process under everything drawn together.

``TORCHCPL_FUZZ`` sets the number of random calls and of examples a property gets:

    TORCHCPL_FUZZ=20000 python -m pytest tests/test_fuzz.py
"""

from __future__ import annotations

import math
import os
import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import Asked, Case, cases, demands, orders
from test_invariants import padded, parts_of, with_parts
from torch import Tensor

import torchcpl as cpl

COUNT = int(os.environ.get("TORCHCPL_FUZZ", "400"))
B, N, H = 2, 4, 3


def tensor(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def factors(*more: str) -> dict[str, Any]:
    """Keys, values and the like, (B, N, h) each."""
    return {name: tensor(B, N, H, seed=i) for i, name in enumerate(("keys", "values", *more))}


def potentials() -> cpl.Potentials:
    return cpl.Potentials(tensor(B, N), tensor(B), cpl.Dense(tensor(B, N, N), tensor(B, N)))


def limits() -> dict[str, Any]:
    return {"max_len": 3, "min_len": 1, "stop_bias": 0.5, "constraints": [cpl.Forbid([False] * N)]}


def method(owner: Callable[[], Any], name: str) -> Callable[..., Any]:
    return lambda **arguments: getattr(owner(), name)(**arguments)


def constrained(kind: Callable[..., Any], **arguments: Any) -> Any:
    """What a constraint says is looked at when it is used."""
    return cpl.greedy(potentials(), constraints=[kind(**arguments)])


def distribution() -> cpl.ContextualPlackettLuce:
    return cpl.ContextualPlackettLuce(potentials(), 3)


def head(**arguments: Any) -> Any:
    made = cpl.CPLHead(**arguments)
    return made(torch.zeros(B, N, made.dim))


def lengths_apart(answers: Tensor) -> Tensor:
    length = (answers >= 0).sum(-1)
    return (length.unsqueeze(1) - length.unsqueeze(2)).abs().float()


ORDER = torch.tensor([[0, 2], [1, -1]])
GENERATOR = torch.Generator()

# Every public name (or one of its methods): how to call it, and arguments that are right.
CALLS: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]]]] = {
    "Potentials": (
        cpl.Potentials,
        lambda: {
            "unary": tensor(B, N),
            "stop": tensor(B),
            "interaction": cpl.Dense(tensor(B, N, N)),
            "mask": torch.ones(B, N, dtype=torch.bool),
        },
    ),
    "Potentials[rows]": (lambda rows: potentials()[rows], lambda: {"rows": [0]}),
    "Potentials.to": (
        method(potentials, "to"),
        lambda: {"device": "cpu", "dtype": torch.float16},
    ),
    "Selection.to": (method(lambda: cpl.greedy(potentials(), 2), "to"), lambda: {"device": "cpu"}),
    "Dense": (cpl.Dense, lambda: {"W": tensor(B, N, N), "stop_row": tensor(B, N)}),
    "DenseCoverage": (cpl.DenseCoverage, lambda: {"cover": tensor(B, N, N), "stop_row": tensor(B, N)}),
    "LowRank": (cpl.LowRank, lambda: factors() | {"stop_key": tensor(B, H)}),
    "Contextual": (cpl.Contextual, lambda: factors() | {"network": lambda s, count: s, "stop_key": tensor(B, H)}),
    "Coverage": (
        cpl.Coverage,
        lambda: factors("cover_keys", "cover_values") | {"cover_offset": tensor(B), "stop_key": tensor(B, H)},
    ),
    "Recent": (
        cpl.Recent,
        lambda: factors("last_keys", "last_values") | {"stop_key": tensor(B, H), "last_stop_key": tensor(B, H)},
    ),
    "Selection.mask": (method(lambda: cpl.greedy(potentials(), 2), "mask"), lambda: {"num_candidates": N}),
    "Forbid": (partial(constrained, cpl.Forbid), lambda: {"mask": [False] * N}),
    "Require": (partial(constrained, cpl.Require), lambda: {"mask": [False] * N, "first": True}),
    "Adjacent": (partial(constrained, cpl.Adjacent), lambda: {"neighbours": [[1], [2], [3], []]}),
    "Budget": (partial(constrained, cpl.Budget), lambda: {"cost": [1.0] * N, "limit": 3.0}),
    "greedy": (cpl.greedy, lambda: {"pot": potentials(), "stop_threshold": 0.5, **limits()}),
    "sample": (
        cpl.sample,
        lambda: {
            "pot": potentials(),
            "num_samples": 2,
            "temperature": 0.5,
            "top_k": 2,
            "top_p": 0.9,
            "generator": GENERATOR,
            **limits(),
        },
    ),
    "beam": (cpl.beam, lambda: {"pot": potentials(), "num_beams": 3, "num_return": 2, **limits()}),
    "stochastic_beam": (
        cpl.stochastic_beam,
        lambda: {"pot": potentials(), "num_samples": 2, "generator": GENERATOR, **limits()},
    ),
    "refine": (
        cpl.refine,
        lambda: {"pot": potentials(), "selection": cpl.greedy(potentials(), 3), "sweeps": 2, **limits()},
    ),
    "hypotheses": (cpl.hypotheses, lambda: {"pot": potentials(), "num_hypotheses": 2, "num_beams": 4, **limits()}),
    "hypotheses(same)": (
        cpl.hypotheses,
        lambda: {"pot": potentials(), "same": lengths_apart, "radius": 1.0, "generator": GENERATOR, **limits()},
    ),
    "log_prob": (cpl.log_prob, lambda: {"pot": potentials(), "order": ORDER, **limits()}),
    "set_log_prob": (
        cpl.set_log_prob,
        lambda: {"pot": potentials(), "subset": ORDER, "num_samples": 3, "generator": GENERATOR, **limits()},
    ),
    "set_nll": (
        cpl.set_nll,
        lambda: {
            "pot": potentials(),
            "target": ORDER,
            "exact": 1,
            "num_samples": 2,
            "proposal": "uniform",
            "reduction": "none",
            "generator": GENERATOR,
        },
    ),
    "next_probs": (
        cpl.next_probs,
        lambda: {"pot": potentials(), "picked": ORDER, "num_samples": 2, "generator": GENERATOR, **limits()},
    ),
    "inclusion_probs": (
        cpl.inclusion_probs,
        lambda: {"pot": potentials(), "picked": ORDER, "num_samples": 2, "generator": GENERATOR, **limits()},
    ),
    "complete": (
        cpl.complete,
        lambda: {
            "pot": potentials(),
            "picked": ORDER,
            "num_samples": 2,
            "num_return": 1,
            "temperature": 0.5,
            "top_k": 2,
            "top_p": 0.9,
            "generator": GENERATOR,
            **limits(),
        },
    ),
    "complete(beams)": (
        cpl.complete,
        lambda: {"pot": potentials(), "picked": ORDER, "num_beams": 3, "num_return": 2, **limits()},
    ),
    "ordered_nll": (
        cpl.ordered_nll,
        lambda: {"pot": potentials(), "order": ORDER, "per_step": True, "reduction": "sum"},
    ),
    "subset_nll": (
        cpl.subset_nll,
        lambda: {
            "pot": potentials(),
            "target": ORDER,
            "permutations": 2,
            "early_stop_weight": 1.0,
            "stop_weight": 1.0,
            "per_step": True,
            "reduction": "none",
            "generator": GENERATOR,
        },
    ),
    "subset_nll(subsets)": (cpl.subset_nll, lambda: {"pot": potentials(), "target": ORDER, "subsets": 2}),
    "subset_nll(exact)": (cpl.subset_nll, lambda: {"pot": potentials(), "target": ORDER, "exact": True}),
    "ContextualPlackettLuce": (
        cpl.ContextualPlackettLuce,
        lambda: {"pot": potentials(), "validate_args": True, **limits()},
    ),
    "ContextualPlackettLuce.log_prob": (method(distribution, "log_prob"), lambda: {"value": ORDER}),
    "ContextualPlackettLuce.sample": (method(distribution, "sample"), lambda: {"sample_shape": (2,)}),
    "ContextualPlackettLuce.draw": (
        method(distribution, "draw"),
        lambda: {"sample_shape": (2,), "generator": GENERATOR},
    ),
    "ContextualPlackettLuce.expand": (method(distribution, "expand"), lambda: {"batch_shape": (3, B)}),
    "ContextualPlackettLuce.set_log_prob": (
        method(distribution, "set_log_prob"),
        lambda: {"subset": ORDER, "num_samples": 3, "return_error": True, "generator": GENERATOR},
    ),
    "ContextualPlackettLuce.entropy": (method(distribution, "entropy"), lambda: {"num_samples": 3}),
    "ContextualPlackettLuce.inclusion_probs": (method(distribution, "inclusion_probs"), lambda: {"num_samples": 3}),
    "CPLHead": (
        head,
        lambda: {
            "dim": 2,
            "hidden": 3,
            "kind": "recent",
            "live_stop": True,
            "activation": "gelu",
            "dropout": 0.0,
        },
    ),
    "CPLHead.forward": (
        method(lambda: cpl.CPLHead(2, 3), "forward"),
        lambda: {"features": tensor(B, N, 2), "mask": torch.ones(B, N, dtype=torch.bool)},
    ),
    "CPLHead.forward(pairs)": (
        method(lambda: cpl.CPLHead(2, 3, kind="coverage"), "forward"),
        lambda: {"features": tensor(B, N, 2), "pairs": tensor(B, N, N)},
    ),
    "explore": (
        cpl.explore,
        lambda: {
            "pot": potentials(),
            "items": np.zeros((N, 2)),
            "row": 1,
            "labels": list("abcd"),
            "background": np.zeros((9, 9), np.uint8),
            "connect": True,
            "title": "x",
            "stop_threshold": 0.5,
            **limits(),
        },
    ),
    "explore(images)": (cpl.explore, lambda: {"pot": potentials(), "items": [np.zeros((3, 2, 3))] * N}),
    "compile_for_inference": (
        lambda model, example, **options: cpl.compile_for_inference(model, example, **options),
        lambda: {
            "model": torch.nn.Linear(2, 3).eval(),
            "example": tensor(B, 2),
            "dtype": torch.bfloat16,
            "precise": True,
            "copy": True,
        },
    ),
    "set_kernels": (cpl.set_kernels, lambda: {"mode": "auto"}),
    "set_validation": (cpl.set_validation, lambda: {"on": None}),
    "select": (
        cpl.select,
        lambda: {
            "x": torch.arange(18.0).view(6, 3) % 7,
            "size": 2,
            "metric": "euclidean",
            "min_size": 1,
            "max_size": 3,
            "require": [0],
            "forbid": [1],
            "weights": [0.5] * 6,
            "num_hypotheses": 1,
            "seed": 0,
            "device": "cpu",
        },
    ),
}
# Records without checks of their own, and what has tests of wrong arguments elsewhere.
ELSEWHERE = {"History", "Interaction", "Selection", "Selector", "load", "Predictor"}

WRONG: list[Callable[[], Any]] = [
    *(lambda value=value: value for value in (None, True, False, -1, 0, 1, 5, 10**30, 1.5, -0.5, math.nan, math.inf)),
    *(lambda value=value: value for value in (-math.inf, 1j, "x", "", b"x", (), [], {}, [1], [[0.5]], [None], ["a"])),
    *(lambda value=value: value for value in (object(), int, cpl.Dense, id, torch.float32, slice(None))),
    lambda: np.zeros((B, N)),
    lambda: np.array("x"),
    lambda: GENERATOR,
    potentials,
    lambda: cpl.Dense(tensor(B, N, N)),
    lambda: cpl.Forbid([True] * N),
    lambda: [cpl.Forbid([True] * N), cpl.Budget([1j] * N, 1)],
    lambda: [lambda history: history.selected[0]],
    lambda: torch.zeros(()),
    lambda: torch.zeros(0),
    lambda: torch.zeros(B, 0, dtype=torch.long),
    lambda: torch.full((B, N), 7),
    lambda: torch.zeros(B, N, dtype=torch.long),
    lambda: torch.zeros(B + 1, N),
    lambda: torch.zeros(B, N, N, 2),
    lambda: torch.tensor([[0, 2], [1, -1]]).float(),
    lambda: torch.zeros(B, N, device="meta"),
    lambda: torch.zeros(B, device="meta"),
    lambda: torch.zeros(B, N).to_sparse(),
    lambda: torch.nn.Parameter(torch.zeros(B, N)),
    *(
        lambda shape=shape, value=value: torch.full(shape, value)
        for shape in ((B,), (B, N), (B, N, N), (B, N, H), (B, H))
        for value in (0.0, math.nan, math.inf, -math.inf, 1j, True, 1, -1, 3.4e38)
    ),
    *(
        lambda shape=shape, dtype=dtype: torch.zeros(shape).to(dtype)
        for shape in ((B,), (B, N), (B, N, N))
        for dtype in (torch.float64, torch.float16, torch.float8_e4m3fn, torch.int8, torch.uint8, torch.complex64)
    ),
]


# What may be wrong with potentials shows when they are used.
POTENTIAL = ("unary", "stop", "interaction", "W", "stop_row", "constraints", "cost", "mask")


def attempt(name: str, changed: dict[str, Any]) -> str | None:
    """Call ``name`` with some arguments replaced: None if all is well, else what is wrong with the answer."""
    call, valid = CALLS[name]
    try:
        result = call(**{**valid(), **changed})
    except ValueError as error:
        message = str(error)
        named = re.match(r"(Forbid\.|Require\.|Budget\.|interaction\.)?(\w+)(, \w+)?: ", message)
        # Two arguments that do not fit each other: either may be named.
        if "\n" in message or not named or named[2] not in (*valid(), *POTENTIAL):
            return f"a message that does not name the argument: {message}"
        return None
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        cpl.set_kernels("auto")
        cpl.set_validation(None)
    for part in result if isinstance(result, tuple) else (result,):
        numbers = part.log_prob if isinstance(part, cpl.Selection) else part
        if isinstance(numbers, Tensor) and numbers.is_floating_point() and bool(numbers.isnan().any()):
            return "a NaN"
    return None


def test_every_public_name_is_called() -> None:
    """A new public name needs an entry in ``CALLS``."""
    assert {name.split("[")[0].split(".")[0].split("(")[0] for name in CALLS} | ELSEWHERE >= set(cpl.__all__)
    for name in CALLS:
        assert attempt(name, {}) is None, name
        call, valid = CALLS[name]
        call(**valid())


@pytest.mark.parametrize("name", CALLS)
def test_one_wrong_argument(name: str) -> None:
    """Each argument in turn is replaced by each of ``WRONG``: it works, or a ValueError names it."""
    failures = []
    for argument in CALLS[name][1]():
        for i, wrong in enumerate(WRONG):
            problem = attempt(name, {argument: (value := wrong())})
            if problem:
                failures.append(f"{name}({argument}={value!r:.60}) [{i}]: {problem:.150}")
    assert not failures, "\n".join(failures)


def random_value(rng: random.Random) -> Any:
    """One of ``WRONG``, or a random tensor, array or nested list."""
    if rng.random() < 0.5:
        return rng.choice(WRONG)()
    shape = [rng.choice([0, 1, B, 3, N]) for _ in range(rng.randint(0, 3))]
    array = np.random.default_rng(rng.getrandbits(32)).integers(-2, 6, shape)
    odd = rng.choice([None, None, math.nan, math.inf, -math.inf])
    dtype = rng.choice(
        [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.int32]
    )
    value = torch.from_numpy(np.asarray(array)).to(dtype)
    if odd is not None and value.is_floating_point() and value.numel():
        value.view(-1)[rng.randrange(value.numel())] = odd
    if rng.random() < 0.3:
        return value.tolist()
    return value.float().numpy() if rng.random() < 0.2 else value


def test_random_wrong_arguments() -> None:
    """One to three arguments at once, of any function."""
    rng = random.Random(0)
    names = list(CALLS)
    failures = []
    for _ in range(COUNT):
        name = rng.choice(names)
        arguments = list(CALLS[name][1]())
        changed = {a: random_value(rng) for a in rng.sample(arguments, min(len(arguments), rng.randint(1, 3)))}
        problem = attempt(name, changed)
        if problem:
            failures.append(f"{name}({changed!r:.300}): {problem:.200}")
    assert not failures, f"{len(failures)} of {COUNT}\n" + "\n".join(failures[:20])


# Properties, with kind, mask, limits, constraints and dtype drawn together.

DTYPES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.02, torch.float16: 0.02}
PROPERTY = settings(max_examples=max(25, COUNT // 16))


@st.composite
def situations(draw: Any, **options: Any) -> tuple[Case, cpl.Potentials, Asked, float]:
    """A case, its potentials in some dtype, a decoder's options and the tolerance of the dtype."""
    case = draw(cases(max_n=4, **options))
    asked = draw(demands(case))
    dtype = draw(st.sampled_from(list(DTYPES)))
    pot = with_parts(
        case.pot,
        case.pot.unary.to(dtype),
        case.pot.stop.to(dtype),
        case.pot.mask,
        {name: part.to(dtype) for name, part in parts_of(case.pot).items()},
    )
    return case, pot, asked, DTYPES[dtype]


def close(got: Tensor, want: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(got.double(), want.double(), atol=tolerance, rtol=tolerance)


@PROPERTY
@given(st.data())
def test_decoders_say_what_log_prob_says(data: Any) -> None:
    case, pot, asked, tolerance = data.draw(situations())
    n = case.size
    threshold = data.draw(st.sampled_from([None, 0.3, 0.5, 1.0]))
    found = cpl.beam(pot, 5, 5, **asked.options)
    drawn = [
        cpl.greedy(pot, stop_threshold=threshold, **asked.options),
        cpl.sample(pot, **asked.options),
        cpl.sample(pot, temperature=0.7, top_k=2, top_p=0.8, **asked.options),
        *(cpl.Selection(found.indices[:, r], found.lengths[:, r], found.log_prob[:, r]) for r in range(5)),
    ]
    for sel in drawn:
        real = sel.log_prob > -math.inf  # beams that do not exist say nothing
        said = cpl.log_prob(pot, sel.indices, **asked.options)
        close(said[real], sel.log_prob[real], tolerance)
        assert (sel.lengths == (sel.indices >= 0).sum(-1)).all()
        assert sel.mask(n).sum(-1).equal(sel.lengths)


@PROPERTY
@given(st.data())
def test_the_mass_is_one(data: Any) -> None:
    _, pot, asked, tolerance = data.draw(situations(max_b=2))
    d = cpl.ContextualPlackettLuce(pot, **asked.options)
    mass = d.log_prob(d.enumerate_support()).double().exp().sum(0)
    close(mass, torch.ones_like(mass), tolerance)


def row_options(asked: Asked, row: int, batch: int) -> dict[str, Any]:
    """The options of one row: what is given per row, that row of it."""

    def own(value: Any, dims: int) -> Any:
        return (
            value[row : row + 1] if isinstance(value, Tensor) and value.dim() == dims and len(value) == batch else value
        )

    options = dict(asked.options)
    if "stop_bias" in options:
        options["stop_bias"] = own(options["stop_bias"], 1)
    each = []
    for constraint in options.get("constraints", ()):
        if isinstance(constraint, cpl.Forbid | cpl.Require):
            constraint = replace(constraint, mask=own(constraint.mask, 2))
        elif isinstance(constraint, cpl.Adjacent):
            constraint = cpl.Adjacent(own(constraint.neighbours, 3))
        elif isinstance(constraint, cpl.Budget):
            constraint = cpl.Budget(own(constraint.cost, 2), own(constraint.limit, 1))
        each.append(constraint)
    return {**options, "constraints": each}


@PROPERTY
@given(st.data())
def test_batched_equals_looped_under_everything(data: Any) -> None:
    case, pot, asked, tolerance = data.draw(situations(manners=("ordinary",)))
    target = data.draw(orders(case))
    together = cpl.log_prob(pot, target, **asked.options), cpl.set_log_prob(pot, target, **asked.options)[0]
    picks = cpl.greedy(pot, **asked.options)
    best = cpl.beam(pot, 65, **asked.options)
    for b in range(len(pot)):
        one, options = pot[b : b + 1], row_options(asked, b, len(pot))
        close(cpl.log_prob(one, target[b : b + 1], **options), together[0][b : b + 1], tolerance)
        close(cpl.set_log_prob(one, target[b : b + 1], **options)[0], together[1][b : b + 1], tolerance)
        close(cpl.greedy(one, **options).log_prob, picks.log_prob[b : b + 1], 10 * tolerance)
        close(cpl.beam(one, 65, **options).log_prob, best.log_prob[b : b + 1], 10 * tolerance)


def widened(asked: Asked, n: int, more: int) -> dict[str, Any]:
    """The options for ``more`` candidates that are padding."""
    options = dict(asked.options)
    # Without a limit T would grow with the padding; with one it must not.
    options.setdefault("max_len", n)
    options["max_len"] = min(options["max_len"], n)
    each = []
    for constraint in options.get("constraints", ()):
        if isinstance(constraint, cpl.Forbid | cpl.Require):
            constraint = replace(constraint, mask=torch.nn.functional.pad(constraint.mask, (0, more)))
        elif isinstance(constraint, cpl.Adjacent):
            constraint = cpl.Adjacent(torch.nn.functional.pad(constraint.neighbours, (0, more, 0, more), value=True))
        elif isinstance(constraint, cpl.Budget):
            constraint = cpl.Budget(torch.nn.functional.pad(constraint.cost, (0, more)), constraint.limit)
        each.append(constraint)
    return {**options, "constraints": each}


@PROPERTY
@given(st.data())
def test_padding_equals_truncation_under_everything(data: Any) -> None:
    case, pot, asked, tolerance = data.draw(situations(manners=("ordinary",)))
    target = data.draw(orders(case))
    more, junk = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([0.0, 100.0, -7.0]))
    wide, options = padded(pot, more, junk), widened(asked, case.size, more)
    close(cpl.log_prob(wide, target, **options), cpl.log_prob(pot, target, **asked.options), tolerance)
    for decode in (cpl.greedy, partial(cpl.beam, num_beams=65)):
        short, long = decode(pot, **asked.options), decode(wide, **options)
        close(long.log_prob, short.log_prob, 10 * tolerance)
        if pot.unary.dtype == torch.float64:  # else rounding may choose between near equals
            assert long.tolist() == short.tolist()
    assert (cpl.sample(wide, 3, **options).indices < case.size).all()

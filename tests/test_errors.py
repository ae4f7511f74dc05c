"""One table: what is malformed raises ValueError that names the argument, what came and what was expected."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import torchcpl as cpl

B, N, H = 2, 4, 3
NAN, INF = math.nan, math.inf


def pot(**parts: Any) -> cpl.Potentials:
    """Good potentials, with some parts replaced."""
    generator = torch.Generator().manual_seed(0)
    W = torch.randn(B, N, N, generator=generator)
    unary, stop = torch.randn(B, N, generator=generator), torch.randn(B, generator=generator)
    return cpl.Potentials(**{"unary": unary, "stop": stop, "interaction": cpl.Dense(W), **parts})


def holding(value: float, *shape: int) -> Tensor:
    """Zeros with one entry, the last, set."""
    tensor = torch.zeros(shape)
    tensor[(-1,) * len(shape)] = value
    return tensor


def dense(value: float, **stop: Any) -> cpl.Potentials:
    return pot(interaction=cpl.Dense(torch.full((B, N, N), value), **stop))


def lowrank(keys: float = 0.0, values: float = 0.0, stop_key: float = 0.0) -> cpl.Potentials:
    parts = [torch.full((B, N, H), keys), torch.full((B, N, H), values), torch.full((B, H), stop_key)]
    return pot(interaction=cpl.LowRank(*parts))


def wide(n: int) -> cpl.Potentials:
    return cpl.Potentials(torch.zeros(B, n), torch.zeros(B), cpl.Dense(torch.zeros(B, n, n)))


MASKED = torch.tensor([[True] * 4, [True, True, False, False]])
NOBODY = torch.tensor([[True] * 4, [False] * 4])
GOOD = torch.tensor([[0, 2], [1, -1]])
LONGS = torch.zeros(B, N, dtype=torch.long)


def decode(**options: Any) -> Any:
    return lambda: cpl.greedy(pot(), **options)


def constrained(*constraints: Any, mask: Tensor | None = None, **options: Any) -> Any:
    return lambda: cpl.greedy(pot(mask=mask), constraints=constraints, **options)


def drawn(**options: Any) -> Any:
    return lambda: cpl.sample(pot(), **options)


@dataclass
class Wrong:
    """A call, the argument it must name, what was expected and what came."""

    name: str
    call: Callable[[], Any]
    argument: str
    expected: str
    got: str


SEQUENCES: dict[str, Callable[[Any], Any]] = {
    "order": lambda order: cpl.log_prob(pot(), order),
    "order (loss)": lambda order: cpl.ordered_nll(pot(), order),
    "target": lambda order: cpl.subset_nll(pot(), order),
    "subset": lambda order: cpl.set_log_prob(pot(), order),
    "subset (method)": lambda order: cpl.ContextualPlackettLuce(pot()).set_log_prob(order),
    "value": lambda order: cpl.ContextualPlackettLuce(pot()).log_prob(order),
}


def sequence_errors(name: str, call: Callable[[Any], Any]) -> list[Wrong]:
    """All that can be wrong with a sequence."""
    cases: list[tuple[str, Any, str, str]] = [
        ("float", GOOD.float(), "a long tensor", "float32"),
        ("list", [[0], [1]], "a long tensor", "list"),
        ("rows", torch.zeros(3, 1, dtype=torch.long), "shape", "(3, 1)"),
        ("too large", torch.tensor([[0, 4], [1, -1]]), "indices in [0, 4)", "4 at (0, 1)"),
        ("too small", torch.tensor([[0, 1], [-2, -1]]), "indices in [0, 4)", "-2 at (1, 0)"),
        ("repeated", torch.tensor([[0, 1, 2], [3, 1, 3]]), "no repeated index", "3 at (1, 2)"),
        ("after padding", torch.tensor([[0, -1, 2], [3, 1, -1]]), "no index after the −1 padding", "2 at (0, 2)"),
    ]
    argument = name.split()[0]
    return [Wrong(f"{name} {what}", partial(call, value), argument, *texts) for what, value, *texts in cases]


BROKEN: dict[str, Callable[[], cpl.Potentials]] = {
    "unary": lambda: pot(unary=holding(NAN, B, N)),
    "stop": lambda: pot(stop=holding(NAN, B)),
    "interaction.W": lambda: dense(NAN),
    "interaction.stop_row": lambda: dense(0.0, stop_row=torch.full((B, N), NAN)),
    "interaction.keys": lambda: lowrank(keys=NAN),
    "interaction.values": lambda: lowrank(values=NAN),
    "interaction.stop_key": lambda: lowrank(stop_key=NAN),
}
PICKS = torch.tensor([[0, 2], [1, 3]])
READERS: dict[str, Callable[[cpl.Potentials], Any]] = {
    "log_prob": lambda p: cpl.log_prob(p, PICKS),
    "ordered_nll": lambda p: cpl.ordered_nll(p, PICKS),
    "subset_nll": lambda p: cpl.subset_nll(p, PICKS),
    "set_log_prob": lambda p: cpl.set_log_prob(p, PICKS),
    "greedy": lambda p: cpl.greedy(p, min_len=2),
    "sample": lambda p: cpl.sample(p, 2, min_len=2),
    "beam": lambda p: cpl.beam(p, 3, min_len=2),
    "stochastic_beam": lambda p: cpl.stochastic_beam(p, 3, min_len=2),
    "distribution": lambda p: cpl.ContextualPlackettLuce(p),
}


def nan_error(
    where: str, broken: Callable[[], cpl.Potentials], who: str, call: Callable[[cpl.Potentials], Any]
) -> Wrong:
    return Wrong(f"NaN in {where}: {who}", lambda: call(broken()), where, "no NaN", "at (")


TABLE = [
    # Shapes and dtypes of potentials.
    Wrong("unary 1-d", lambda: pot(unary=torch.zeros(N)), "unary", "float tensor of shape (B, N)", "shape (4,)"),
    Wrong("unary long", lambda: pot(unary=LONGS), "unary", "a float tensor", "int64"),
    Wrong("unary list", lambda: pot(unary=[[0.0]]), "unary", "a float tensor", "list"),
    Wrong("stop 2-d", lambda: pot(stop=torch.zeros(B, 1)), "stop", "shape (2,)", "shape (2, 1)"),
    Wrong("stop number", lambda: pot(stop=0.0), "stop", "shape (2,)", "float 0.0"),
    Wrong("mask float", lambda: pot(mask=torch.ones(B, N)), "mask", "a bool tensor", "float32"),
    Wrong("mask shape", lambda: pot(mask=MASKED[:, :2]), "mask", "shape (2, 4)", "shape (2, 2)"),
    Wrong(
        "no interaction",
        lambda: pot(interaction=torch.zeros(B, N, N)),
        "interaction",
        "an Interaction",
        "float32 tensor",
    ),
    Wrong("other size", lambda: pot(interaction=cpl.Dense(torch.zeros(B, 3, 3))), "interaction", "(2, 4)", "(2, 3)"),
    Wrong("W flat", lambda: cpl.Dense(torch.zeros(N, N)), "W", "shape (B, N, N)", "shape (4, 4)"),
    Wrong("W not square", lambda: cpl.Dense(torch.zeros(B, N, 3)), "W", "shape (B, 3, 3)", "(2, 4, 3)"),
    Wrong("W long", lambda: cpl.Dense(LONGS.unsqueeze(-1)), "W", "a float tensor", "int64"),
    Wrong(
        "stop_row", lambda: cpl.Dense(torch.zeros(B, N, N), torch.zeros(B)), "stop_row", "shape (2, 4)", "shape (2,)"
    ),
    Wrong("keys", lambda: cpl.LowRank(torch.zeros(B, N), torch.zeros(B, N)), "keys", "shape (B, N, h)", "(2, 4)"),
    Wrong(
        "values",
        lambda: cpl.LowRank(torch.zeros(B, N, H), torch.zeros(B, N, 2)),
        "values",
        "shape (2, 4, 3)",
        "(2, 4, 2)",
    ),
    Wrong(
        "stop_key",
        lambda: cpl.LowRank(torch.zeros(B, N, H), torch.zeros(B, N, H), torch.zeros(H)),
        "stop_key",
        "shape (2, 3)",
        "shape (3,)",
    ),
    Wrong(
        "network",
        lambda: cpl.Contextual(torch.zeros(B, N, H), torch.zeros(B, N, H), "mlp"),  # type: ignore[arg-type]
        "network",
        "a callable",
        "'mlp'",
    ),
    *(
        Wrong(f"pot of {who}", partial(call, torch.zeros(B, N)), "pot", "Potentials", "float32 tensor")  # type: ignore[arg-type]
        for who, call in READERS.items()
    ),
    Wrong("rows out of range", lambda: pot()[[5]], "rows", "indices of 2 rows", "[5]"),
    Wrong("rows below", lambda: pot()[torch.tensor([0, -3])], "rows", "indices of 2 rows", "int64 tensor"),
    Wrong("rows mask", lambda: pot()[[True]], "rows", "a mask of 2 rows", "[True]"),
    Wrong("rows text", lambda: pot()["a"], "rows", "a slice, or indices", "'a'"),
    Wrong("interaction class", lambda: pot(interaction=cpl.Dense), "interaction", "an Interaction", "Dense"),
    Wrong("mask of few", lambda: cpl.greedy(pot(), min_len=3).mask(1), "num_candidates", "expected more than", "1"),
    Wrong("unary float8", lambda: pot(unary=torch.zeros(B, N).to(torch.float8_e4m3fn)), "unary", "a float", "float8"),
    Wrong("unary sparse", lambda: pot(unary=torch.zeros(B, N).to_sparse()), "unary", "a float tensor", "float32"),
    Wrong("single row", lambda: pot()[0], "rows", "a slice, or indices or a mask of 2 rows", "int 0"),
    # Sequences, in every function that takes one.
    *(wrong for name, call in SEQUENCES.items() for wrong in sequence_errors(name, call)),
    Wrong(
        "order padded",
        lambda: cpl.ordered_nll(pot(mask=MASKED), torch.tensor([[3], [2]])),
        "order",
        "no index of a padded candidate",
        "2 at (1, 0)",
    ),
    Wrong(
        "target padded",
        lambda: cpl.subset_nll(pot(mask=MASKED), torch.tensor([[3, 1], [0, 3]])),
        "target",
        "no index of a padded candidate",
        "3 at (1, 1)",
    ),
    # NaN, wherever it hides, and +inf, which has no probability.
    *(nan_error(where, broken, who, call) for where, broken in BROKEN.items() for who, call in READERS.items()),
    Wrong("+inf", lambda: cpl.greedy(pot(unary=holding(INF, B, N))), "unary", "no +inf", "at (1, 3)"),
    Wrong("+inf loss", lambda: cpl.ordered_nll(pot(stop=holding(INF, B)), GOOD), "stop", "no +inf", "at (1,)"),
    # Options of the losses.
    Wrong("reduction", lambda: cpl.ordered_nll(pot(), GOOD, reduction="avg"), "reduction", "'mean'", "'avg'"),
    Wrong("reduction of sets", lambda: cpl.subset_nll(pot(), GOOD, reduction="max"), "reduction", "'sum'", "'max'"),
    Wrong("per_step", lambda: cpl.subset_nll(pot(), GOOD, exact=True, per_step=False), "per_step", "True", "False"),
    Wrong("permutations", lambda: cpl.subset_nll(pot(), GOOD, 0), "permutations", "at least 1", "int 0"),
    Wrong("subsets", lambda: cpl.subset_nll(pot(), GOOD, subsets=0), "subsets", "at least 1", "int 0"),
    Wrong("subsets exact", lambda: cpl.subset_nll(pot(), GOOD, subsets=2, exact=True), "subsets", "None", "2"),
    Wrong(
        "exact too large",
        lambda: cpl.subset_nll(wide(13), torch.arange(13).expand(B, 13), exact=True),
        "target",
        "at most 12",
        "13",
    ),
    *(
        Wrong(
            f"{name} {weight}", partial(cpl.subset_nll, pot(), GOOD, **{name: weight}), name, "at least 0", str(weight)
        )
        for name in ("early_stop_weight", "stop_weight")
        for weight in (NAN, INF, -1.0, 1j, "1", True)
    ),
    Wrong("exact", lambda: cpl.subset_nll(pot(), GOOD, exact=1), "exact", "True, False", "1"),  # type: ignore[arg-type]
    Wrong("loss generator", lambda: cpl.subset_nll(pot(), GOOD, generator=0), "generator", "torch.Generator", "int 0"),  # type: ignore[arg-type]
    # Options of the decoders.
    *(
        Wrong(f"stop_threshold {value!r}", decode(stop_threshold=value), "stop_threshold", "in (0, 1]", str(value))
        for value in ("x", 0, 1.5, NAN, 1j, True)
    ),
    Wrong("stop_bias complex", decode(stop_bias=1j), "stop_bias", "a number", "1j"),
    Wrong("stop_bias complex tensor", decode(stop_bias=torch.zeros(B) * 1j), "stop_bias", "a number", "complex64"),
    Wrong("stop_bias bools", decode(stop_bias=torch.zeros(B) > 1), "stop_bias", "a number", "bool tensor"),
    Wrong("stop_bias elsewhere", decode(stop_bias=torch.zeros(B, device="meta")), "stop_bias", "on cpu", "on meta"),
    Wrong("generator", drawn(generator="g"), "generator", "torch.Generator", "'g'"),
    Wrong("max_len", decode(max_len=-1), "max_len", "at least 0", "int -1"),
    Wrong("max_len float", decode(max_len=2.0), "max_len", "an integer", "float 2.0"),
    Wrong("max_len bool", decode(max_len=True), "max_len", "an integer", "bool True"),
    Wrong("min_len", decode(min_len=-1), "min_len", "at least 0", "int -1"),
    Wrong("min_len > max_len", decode(min_len=3, max_len=2), "min_len", "at most min(max_len, N) = 2", "3"),
    Wrong("min_len > N", decode(min_len=5), "min_len", "at most min(max_len, N) = 4", "5"),
    Wrong("stop_bias shape", decode(stop_bias=torch.zeros(3)), "stop_bias", "(2,)", "shape (3,)"),
    Wrong("stop_bias text", decode(stop_bias="low"), "stop_bias", "a number", "'low'"),
    Wrong("stop_bias None", decode(stop_bias=None), "stop_bias", "a number", "None"),
    Wrong("stop_bias NaN", decode(stop_bias=NAN), "stop_bias", "a number", "nan"),
    Wrong("stop_bias inf", decode(stop_bias=INF), "stop_bias", "below inf", "inf"),
    Wrong("stop_bias NaN tensor", decode(stop_bias=holding(NAN, B)), "stop_bias", "no NaN", "at (1,)"),
    Wrong("temperature 0", drawn(temperature=0), "temperature", "a positive number", "0"),
    Wrong("temperature < 0", drawn(temperature=-1.0), "temperature", "a positive number", "-1.0"),
    Wrong("temperature NaN", drawn(temperature=NAN), "temperature", "a positive number", "nan"),
    Wrong("temperature text", drawn(temperature="hot"), "temperature", "a positive number", "'hot'"),
    Wrong("top_k", drawn(top_k=0), "top_k", "at least 1", "int 0"),
    Wrong("top_k float", drawn(top_k=1.5), "top_k", "an integer", "float 1.5"),
    Wrong("top_p 0", drawn(top_p=0.0), "top_p", "(0, 1]", "0.0"),
    Wrong("top_p > 1", drawn(top_p=1.5), "top_p", "(0, 1]", "1.5"),
    Wrong("top_p NaN", drawn(top_p=NAN), "top_p", "(0, 1]", "nan"),
    Wrong("top_p text", drawn(top_p="most"), "top_p", "(0, 1]", "'most'"),
    Wrong("num_samples", drawn(num_samples=0), "num_samples", "at least 1", "int 0"),
    Wrong("num_beams", lambda: cpl.beam(pot(), 0), "num_beams", "at least 1", "int 0"),
    Wrong("num_return", lambda: cpl.beam(pot(), 2, 0), "num_return", "at least 1", "int 0"),
    Wrong("num_return > num_beams", lambda: cpl.beam(pot(), 2, 3), "num_return", "at most num_beams = 2", "3"),
    Wrong("distinct samples", lambda: cpl.stochastic_beam(pot(), 0), "num_samples", "at least 1", "int 0"),
    Wrong("set samples", lambda: cpl.set_log_prob(pot(), GOOD, num_samples=1), "num_samples", "at least 2", "int 1"),
    Wrong("validation", lambda: cpl.set_validation("yes"), "on", "True, False, None", "'yes'"),  # type: ignore[arg-type]
    # Constraints.
    Wrong("no list", decode(constraints=cpl.Forbid(MASKED)), "constraints", "a list", "Forbid"),
    Wrong("None", decode(constraints=None), "constraints", "a list", "None"),
    Wrong(
        "a function alone", decode(constraints=lambda history: history.selected), "constraints", "a list", "function"
    ),
    Wrong("unknown", constrained("forbid"), "constraints", "Forbid, Require", "'forbid'"),
    Wrong("Forbid shape", constrained(cpl.Forbid(MASKED[:, :3])), "Forbid.mask", "(4,) or (2, 4)", "shape (2, 3)"),
    Wrong("Forbid floats", constrained(cpl.Forbid(torch.zeros(N))), "Forbid.mask", "a bool per candidate", "float32"),
    Wrong("Forbid text", constrained(cpl.Forbid("all")), "Forbid.mask", "booleans", "all"),
    Wrong("Require longs", constrained(cpl.Require(LONGS)), "Require.mask", "a bool per candidate", "int64"),
    Wrong("Budget.cost shape", constrained(cpl.Budget(torch.ones(3), 1)), "Budget.cost", "(4,) or (2, 4)", "(3,)"),
    Wrong("Budget.cost text", constrained(cpl.Budget("free", 1)), "Budget.cost", "numbers", "free"),
    Wrong("Budget.cost < 0", constrained(cpl.Budget([1, 1, -1, 1], 1)), "Budget.cost", "at least 0", "negative"),
    Wrong("Budget.cost NaN", constrained(cpl.Budget(holding(NAN, N), 1)), "Budget.cost", "at least 0", "NaN"),
    Wrong(
        "Budget.cost complex", constrained(cpl.Budget(torch.ones(N) * 1j, 1)), "Budget.cost", "a number", "complex64"
    ),
    Wrong("Budget.limit complex", constrained(cpl.Budget(torch.ones(N), 1j)), "Budget.limit", "a number", "1j"),
    Wrong("Budget.limit shape", constrained(cpl.Budget(torch.ones(N), [1, 1, 1])), "Budget.limit", "(2,)", "[1, 1, 1]"),
    Wrong("Budget.limit NaN", constrained(cpl.Budget(torch.ones(N), NAN)), "Budget.limit", "a number", "nan"),
    Wrong("Budget.limit text", constrained(cpl.Budget(torch.ones(N), "all")), "Budget.limit", "numbers", "all"),
    Wrong("Adjacent shape", constrained(cpl.Adjacent(MASKED)), "neighbours", "bool matrix (4, 4)", "shape (2, 4)"),
    Wrong("Adjacent floats", constrained(cpl.Adjacent(torch.ones(N, N))), "neighbours", "bool matrix", "float32"),
    Wrong(
        "Adjacent lists", constrained(cpl.Adjacent([[1], [2], [3]])), "neighbours", "lists (4, D)", "[[1], [2], [3]]"
    ),
    Wrong("Adjacent far", constrained(cpl.Adjacent([[1], [2], [4], []])), "neighbours", "in [0, 4)", "4"),
    Wrong("Adjacent far below", constrained(cpl.Adjacent([[1], [-2], [3], []])), "neighbours", "in [0, 4)", "-2"),
    Wrong("Adjacent mixed", constrained(cpl.Adjacent([[1], ["b"], [], []])), "neighbours", "expected", "['b']"),
    Wrong(
        "callable shape",
        constrained(lambda history: history.selected[..., :2]),
        "constraints",
        "shape (2, 1, 4), or (2, 1, 5)",
        "shape (2, 1, 2)",
    ),
    Wrong(
        "callable floats",
        constrained(lambda history: history.selected.float()),
        "constraints",
        "a bool tensor",
        "float32",
    ),
    # What no selection can satisfy names the row.
    Wrong(
        "padded and required",
        constrained(cpl.Require(torch.tensor([False, False, True, False])), mask=MASKED),
        "constraints",
        "row 1 cannot be satisfied",
        "candidate 2 is required, but padded or forbidden",
    ),
    Wrong(
        "nobody there",
        constrained(cpl.Require(torch.ones(N, dtype=torch.bool)), mask=NOBODY),
        "constraints",
        "row 1 cannot be satisfied",
        "candidate 0 is required",
    ),
    Wrong(
        "forbidden and required",
        constrained(cpl.Forbid(torch.eye(4, dtype=torch.bool)[0]), cpl.Require(torch.eye(4, dtype=torch.bool)[0])),
        "constraints",
        "row 0 cannot be satisfied",
        "candidate 0 is required, but padded or forbidden",
    ),
    Wrong(
        "required > max_len",
        constrained(cpl.Require(torch.tensor([[False] * 4, [True] * 4])), max_len=3),
        "constraints",
        "row 1 cannot be satisfied",
        "4 candidates are required, but max_len = 3",
    ),
    Wrong(
        "min_len > real",
        constrained(mask=MASKED, min_len=3),
        "constraints",
        "row 1 cannot be satisfied",
        "only 2 candidates",
    ),
    Wrong(
        "too dear",
        constrained(cpl.Require(torch.ones(N, dtype=torch.bool)), cpl.Budget([1, 1, 1, 1], torch.tensor([4, 3]))),
        "constraints",
        "row 1 cannot be satisfied",
        "cost at least 4, the budget is 3",
    ),
    Wrong(
        "no budget",
        constrained(cpl.Budget([1, 1, 1, 1], torch.tensor([0, -1]))),
        "constraints",
        "row 1 cannot be satisfied",
        "the budget is -1",
    ),
    Wrong(
        "out of reach",
        constrained(cpl.Require(torch.tensor([True, False, True, False])), cpl.Adjacent([[1], [0], [3], [2]])),
        "constraints",
        "row 0 cannot be satisfied",
        "to another required one, in either direction",
    ),
    # The head.
    Wrong("dim", lambda: cpl.CPLHead(0), "dim", "at least 1", "int 0"),
    Wrong("hidden", lambda: cpl.CPLHead(4, 1.5), "hidden", "an integer", "float 1.5"),  # type: ignore[arg-type]
    Wrong("kind", lambda: cpl.CPLHead(4, kind="dense"), "kind", "'lowrank', 'contextual'", "'dense'"),
    Wrong("activation", lambda: cpl.CPLHead(4, activation="tanh"), "activation", "'gelu'", "'tanh'"),
    Wrong("dropout", lambda: cpl.CPLHead(4, dropout=1.5), "dropout", "a probability", "1.5"),
    Wrong("no model", lambda: cpl.compile_for_inference(None, torch.zeros(1)), "model", "a module", "None"),  # type: ignore[arg-type]
    Wrong("dropout NaN", lambda: cpl.CPLHead(4, dropout=NAN), "dropout", "a probability", "nan"),
    Wrong("live_stop", lambda: cpl.CPLHead(4, live_stop="no"), "live_stop", "True, False", "'no'"),  # type: ignore[arg-type]
    Wrong("features double", lambda: cpl.CPLHead(4)(torch.zeros(B, N, 4).double()), "features", "float32", "float64"),
    Wrong("features", lambda: cpl.CPLHead(4)(torch.zeros(B, N, 5)), "features", "shape (B, N, 4)", "(2, 4, 5)"),
    Wrong("features flat", lambda: cpl.CPLHead(4)(torch.zeros(N, 4)), "features", "shape (B, N, 4)", "(4, 4)"),
    Wrong("head mask", lambda: cpl.CPLHead(4)(torch.zeros(B, N, 4), torch.ones(B, N)), "mask", "bool", "float32"),
    # The distribution.
    Wrong("no potentials", lambda: cpl.ContextualPlackettLuce(torch.zeros(2)), "pot", "Potentials", "float32"),  # type: ignore[arg-type]
    Wrong("sample_shape", lambda: cpl.ContextualPlackettLuce(pot()).sample((-1,)), "sample_shape", "at least 0", "-1"),
    Wrong(
        "sample_shape text", lambda: cpl.ContextualPlackettLuce(pot()).sample("a"), "sample_shape", "at least", "'a'"
    ),
    Wrong("expand", lambda: cpl.ContextualPlackettLuce(pot()).expand((3,)), "batch_shape", "(2,) expands", "(3,)"),
    Wrong("distribution max_len", lambda: cpl.ContextualPlackettLuce(pot(), -1), "max_len", "at least 0", "int -1"),
    Wrong(
        "entropy", lambda: cpl.ContextualPlackettLuce(pot()).entropy(num_samples=0), "num_samples", "at least 1", "0"
    ),
    Wrong(
        "selection", lambda: cpl.Selection(GOOD, GOOD, GOOD).mask(), "num_candidates", "number of candidates", "None"
    ),
]


@pytest.mark.parametrize("wrong", TABLE, ids=[wrong.name for wrong in TABLE])
def test_malformed_input_is_refused(wrong: Wrong) -> None:
    with pytest.raises(ValueError, match=re.escape(wrong.expected)) as error:
        wrong.call()
    message = str(error.value)
    assert message.startswith(wrong.argument), message
    assert wrong.argument in message
    assert wrong.got in message, message


@pytest.mark.parametrize(
    "options",
    [{"min_len": 5}, {"constraints": [cpl.Require(torch.ones(N, dtype=torch.bool)), cpl.Budget([1] * N, 1)]}],
    ids=["min_len", "budget"],
)
@pytest.mark.parametrize(
    "call",
    [
        lambda p, **o: cpl.greedy(p, **o),
        lambda p, **o: cpl.sample(p, 2, **o),
        lambda p, **o: cpl.beam(p, 2, **o),
        lambda p, **o: cpl.stochastic_beam(p, 2, **o),
        lambda p, **o: cpl.log_prob(p, GOOD, **o),
        lambda p, **o: cpl.set_log_prob(p, GOOD, **o),
        lambda p, **o: cpl.ContextualPlackettLuce(p, **o),
    ],
    ids=["greedy", "sample", "beam", "stochastic_beam", "log_prob", "set_log_prob", "distribution"],
)
def test_the_impossible_is_refused_by_everyone(call: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"min_len: expected|row 0 cannot be satisfied"):
        call(pot(), **options)


@pytest.mark.parametrize(
    "call", [cpl.greedy, cpl.beam, cpl.log_prob, cpl.ordered_nll, cpl.ContextualPlackettLuce], ids=lambda f: f.__name__
)
def test_unknown_options_are_not_swallowed(call: Any) -> None:
    arguments = (pot(), GOOD) if call in (cpl.log_prob, cpl.ordered_nll) else (pot(),)
    with pytest.raises(TypeError, match="lenght"):
        call(*arguments, lenght=3)

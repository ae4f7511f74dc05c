"""Configurations: TOML and command line round trips, and errors that say what was expected."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchcpl.config import TrainConfig, add_arguments, from_args, from_toml, option, override, to_toml


@dataclasses.dataclass(frozen=True, kw_only=True)
class Demo(TrainConfig):
    """One field of every kind beside the common ones."""

    name: str = option("base", "a name, 100% free")
    ratio: float = option(0.5, "a ratio", low=0.0, high=1.0)
    flag: bool = option(False, "a flag")
    widths: tuple[int, ...] = option((64, 32), "widths of the layers", low=1)
    span: tuple[float, ...] = option((0.0, 1.0), "from, to")
    kinds: tuple[str, ...] = option(("a",), "kinds", choices=("a", "b"))


def parse(*words: str, base: Demo | None = None) -> Demo:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_arguments(parser, Demo)
    return from_args(Demo, parser.parse_args(words), base)


def floats() -> st.SearchStrategy[float]:
    return st.floats(allow_nan=False, allow_infinity=False)


@given(
    name=st.text(),
    ratio=st.floats(0, 1),
    flag=st.booleans(),
    widths=st.lists(st.integers(1, 2**62)).map(tuple),
    span=st.tuples(floats(), floats()),
    seed=st.integers(0, 2**32 - 1),
    lr=st.floats(0, 1e300),
)
def test_toml_round_trip(tmp_path_factory: pytest.TempPathFactory, **values: object) -> None:
    config = Demo(**values)  # type: ignore[arg-type]
    path = tmp_path_factory.getbasetemp() / "config.toml"
    path.write_text(to_toml(config), encoding="utf-8")
    assert from_toml(Demo, path) == config


def test_toml_is_what_other_readers_expect() -> None:
    lines = to_toml(Demo(name='say "hi"\n', lr=1e-5, flag=True, span=(-1e300, 2))).splitlines()
    assert {r'name = "say \"hi\"\n"', "lr = 1e-05", "flag = true", "span = [-1e+300, 2.0]", "widths = [64, 32]"} <= set(
        lines
    )


def test_toml_leaves_defaults(tmp_path: Path) -> None:
    path = tmp_path / "some.toml"
    path.write_text("epochs = 7\nlr = 1\n")
    config = from_toml(Demo, path)
    assert config == Demo(epochs=7, lr=1.0)
    assert type(config.lr) is float


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epochs = 'ten'", r"Demo\.epochs = 'ten': expected int"),
        ("epochs = 1.0", r"Demo\.epochs = 1\.0: expected int"),
        ("epochs = true", r"Demo\.epochs = True: expected int"),
        ("epochs = 0", r"Demo\.epochs = 0: expected at least 1"),
        ("lr = nan", r"Demo\.lr = nan: expected a finite number"),
        ("lr = inf", r"Demo\.lr = inf: expected a finite number"),
        ("epochs = 1" + "0" * 30, r"Demo\.epochs = 1000.*: expected a number of at most"),
        ("ema = 1", r"Demo\.ema = 1: expected at most"),
        ("compile = 1", r"Demo\.compile = 1: expected bool"),
        ("optimizer = 'sgd'", r"Demo\.optimizer = 'sgd': expected one of adam, adamw"),
        ("kinds = ['a', 'c']", r"Demo\.kinds = \['a', 'c'\]: expected one of a, b"),
        ("widths = 3", r"Demo\.widths = 3: expected tuple"),
        ("widths = [3, 'x']", r"Demo\.widths = \[3, 'x'\]: expected int"),
        ("span = 1.0", r"Demo\.span = 1\.0: expected tuple"),
        ("weight_decai = 1", r"no option 'weight_decai': did you mean weight_decay"),
        ("zzz = 1", r"no option 'zzz': expected one of seed, epochs"),
        ("[table]\nlr = 1", r"no option 'table'"),
        ("lr = = 1", r"not TOML"),
    ],
)
def test_bad_toml(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        from_toml(Demo, path)
    assert str(path) in str(error.value)


def test_unreadable_toml(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent\.toml: cannot be read"):
        from_toml(Demo, tmp_path / "absent.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"binary\.toml: cannot be read"):
        from_toml(Demo, tmp_path / "binary.toml")


def test_construction_is_checked() -> None:
    with pytest.raises(ValueError, match=r"Demo\.warmup = 2\.0: expected at most 1\.0"):
        Demo(warmup=2.0)
    assert Demo(widths=[1, 2]).widths == (1, 2)  # type: ignore[arg-type]
    with pytest.raises(dataclasses.FrozenInstanceError):
        Demo().seed = 1  # type: ignore[misc]


def test_override() -> None:
    config = Demo(seed=3)
    assert override(config, lr=1, flag=True) == Demo(seed=3, lr=1.0, flag=True)
    assert config == Demo(seed=3)
    with pytest.raises(ValueError, match="did you mean epochs"):
        override(config, epoch=2)


def test_command_line_over_toml_over_default(tmp_path: Path) -> None:
    path = tmp_path / "base.toml"
    path.write_text("epochs = 7\nlr = 0.1\nflag = true\nwidths = [1]\n")
    base = from_toml(Demo, path)
    config = parse("--lr", "0.2", "--no-flag", "--batch-size", "8", base=base)
    assert config == Demo(epochs=7, lr=0.2, flag=False, batch_size=8, widths=(1,))
    # An option given with its default's value still counts as given.
    assert parse("--epochs", "300", base=base).epochs == 300
    assert parse() == Demo()
    assert parse("--widths", "5", "6", "--span", "0", "2", "--kinds") == Demo(widths=(5, 6), span=(0, 2), kinds=())


@pytest.mark.parametrize(
    "words", [["--epochs", "ten"], ["--optimizer", "sgd"], ["--span", "x"], ["--kinds", "c"], ["--nope", "1"]]
)
def test_bad_options(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((argparse.ArgumentError, SystemExit)):
        parse(*words)


def test_bad_option_values_name_the_field() -> None:
    with pytest.raises(ValueError, match=r"Demo\.epochs = 0: expected at least 1"):
        parse("--epochs", "0")


def test_help_has_every_option_with_its_default() -> None:
    parser = argparse.ArgumentParser(prog="demo")
    add_arguments(parser, Demo)
    text = " ".join(parser.format_help().split())
    for field in dataclasses.fields(Demo):
        assert "--" + field.name.replace("_", "-") in text
        assert field.metadata["help"] in text
    assert "a name, 100% free (default: base)" in text
    assert "widths of the layers (default: 64, 32)" in text
    assert "--compile, --no-compile" in text

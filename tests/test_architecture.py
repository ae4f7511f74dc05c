"""The house: every file imports only from rooms above its own, and the core from torch and numpy alone."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchcpl

ROOT = Path(torchcpl.__file__).parent
# Top to bottom. A room is a file, or a folder with all in it.
# fmt: off
ROOMS = [
    "checks", "potentials", "interactions", "constraints", "functional", "kernels", "losses", "decoding", "sets",
    "hypotheses", "distribution", "head", "metrics", "inference", "files", "hub", "explore", "encoders", "reduce",
    "select", "selectors", "config", "provenance", "vectors", "sheet", "estimator", "checkpoints", "train", "tables",
    "plots", "report", "tasks", "predict", "completion", "cli", "__main__",
]
# fmt: on
CORE = [*ROOMS[: ROOMS.index("inference") + 1], "explore"]
PUBLIC = [*CORE, "select"]
FILES = sorted(ROOT.rglob("*.py"))


def name_of(path: Path) -> str:
    """``torchcpl.decoding.beam`` for its file; a package's own name for its ``__init__.py``."""
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path) for path in FILES}


def room_of(module: str) -> str:
    """``decoding`` for ``torchcpl.decoding.beam``; empty for the package itself."""
    return [*module.split("."), ""][1]


def imports(path: Path) -> set[str]:
    """Every module that is imported at run time, at the top or inside functions; not those for type checkers."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            for alias in node.names:  # ``from torchcpl.kernels import dispatch`` imports a file
                whole = f"{node.module}.{alias.name}"
                if whole != "torchcpl.__version__":
                    found.add(whole if whole in MODULES else node.module)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(ROOT)) for path in FILES])
def test_imports_come_from_above(path: Path) -> None:
    room = room_of(name_of(path))
    if not room:  # the public names: may look everywhere in the core
        assert {room_of(m) for m in imports(path) if m.startswith("torchcpl.")} <= set(PUBLIC)
        return
    assert room in ROOMS, f"{path.relative_to(ROOT)} is in no known room: {', '.join(ROOMS)}"
    above = ROOMS[: ROOMS.index(room) + 1]
    for module in imports(path):
        if module == "torchcpl" or module.startswith("torchcpl."):
            assert room_of(module) in above, f"{path.relative_to(ROOT)} imports {module}, which is not above {room}"


def test_no_file_imports_back() -> None:
    """Files of one room too: what a file imports, there or inside a function, does not lead back to it."""
    names = {name_of(path): path for path in FILES}
    onward = {name: {m for m in imports(path) if m in names and m != name} for name, path in names.items()}
    for package in [name for name, path in names.items() if path.name == "__init__.py"]:
        onward[package] = set()  # importing a file imports its package, which gathers names and uses none

    def visit(name: str, trail: tuple[str, ...], done: set[str]) -> None:
        assert name not in trail, " -> ".join((*trail[trail.index(name) :], name))
        if name not in done:
            for other in sorted(onward[name]):
                visit(other, (*trail, name), done)
            done.add(name)

    done: set[str] = set()
    for name in onward:
        visit(name, (), done)


def third_party(path: Path) -> set[str]:
    tops = {module.split(".")[0] for module in imports(path)}
    return tops - set(sys.stdlib_module_names) - {"torchcpl"}


@pytest.mark.parametrize(
    "path", [p for p in FILES if room_of(name_of(p)) in PUBLIC], ids=lambda p: str(p.relative_to(ROOT))
)
def test_the_core_needs_torch_and_numpy_only(path: Path) -> None:
    allowed = {"torch", "numpy"}
    if room_of(name_of(path)) == "kernels":
        allowed.add("triton")
    assert third_party(path) <= allowed


def test_importing_the_package_imports_nothing_heavy() -> None:
    script = (
        "import sys, torchcpl\n"
        "heavy = {'scipy', 'sklearn', 'matplotlib', 'cv2', 'lightning', 'lightning_fabric', 'rich', 'tensorboard', "
        "'safetensors', 'torchvision', 'pandas', 'pyarrow', 'ray', 'huggingface_hub'}\n"
        "print(*sorted(heavy & {name.split('.')[0] for name in sys.modules}))"
    )
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT.parent, capture_output=True, text=True, check=True)
    assert result.stdout.split() == []


def test_public_names_are_all_there() -> None:
    for name in torchcpl.__all__:
        assert getattr(torchcpl, name) is not None
    assert sorted(torchcpl.__all__) == torchcpl.__all__
    assert (ROOT / "py.typed").exists()


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(ROOT)) for path in FILES])
def test_files_stay_readable(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 600
    assert ast.get_docstring(ast.parse(text)), f"{path.relative_to(ROOT)} does not say what it is for"


def functions(path: Path) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Every function with its qualified name, ``Class.method`` for methods; Triton's kernels are left out."""

    def visit(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef):
                if isinstance(child, ast.FunctionDef) and not any(
                    "jit" in ast.unparse(d) for d in child.decorator_list
                ):
                    yield prefix + child.name, child
                yield from visit(child, f"{prefix}{child.name}.")

    return visit(ast.parse(path.read_text()), "")


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(ROOT)) for path in FILES])
def test_functions_stay_readable(path: Path) -> None:
    for name, function in functions(path):
        lines = function.end_lineno - function.lineno + 1  # type: ignore[operator]
        assert lines <= 60, f"{name} has {lines} lines"
        public = name.removesuffix(".__init__") in torchcpl.__all__
        arguments = function.args
        count = len([*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs])
        assert count <= 10 or public, f"{name} has {count} parameters"


def test_the_page_names_every_room() -> None:
    page = (ROOT.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    folders = [path.parent.name for path in (ROOT / "tasks").glob("*/task.py")]
    for name in [*ROOMS[:-1], *folders]:
        assert f"`{name}`" in page or f"`{name}/`" in page, f"docs/architecture.md does not say what {name} is for"

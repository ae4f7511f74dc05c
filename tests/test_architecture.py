"""The house: every file imports only from rooms above its own, and the core from torch and numpy alone."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import torchcpl

ROOT = Path(torchcpl.__file__).parent
# Top to bottom. A room is a file, or a folder with all in it.
# fmt: off
ROOMS = [
    "checks", "potentials", "interactions", "constraints", "functional", "kernels", "losses", "decoding",
    "sets", "distribution", "head", "inference", "files", "encoders", "metrics", "selectors", "config", "provenance",
    "checkpoints", "train", "tables", "plots", "report", "tasks", "cli", "__main__",
]
# fmt: on
CORE = ROOMS[: ROOMS.index("inference") + 1]
FILES = sorted(ROOT.rglob("*.py"))


def name_of(path: Path) -> str:
    """``torchcpl.decoding.beam`` for its file; a package's own name for its ``__init__.py``."""
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


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
            # ``from torchcpl import metrics`` imports a room.
            found.update(
                f"{node.module}.{alias.name}" if node.module == "torchcpl" else node.module
                for alias in node.names
                if alias.name != "__version__"
            )
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(ROOT)) for path in FILES])
def test_imports_come_from_above(path: Path) -> None:
    room = room_of(name_of(path))
    if not room:  # the public names: may look everywhere in the core
        assert {room_of(m) for m in imports(path) if m.startswith("torchcpl.")} <= set(CORE)
        return
    assert room in ROOMS, f"{path.relative_to(ROOT)} is in no known room: {', '.join(ROOMS)}"
    above = ROOMS[: ROOMS.index(room) + 1]
    for module in imports(path):
        if module == "torchcpl" or module.startswith("torchcpl."):
            assert room_of(module) in above, f"{path.relative_to(ROOT)} imports {module}, which is not above {room}"


def third_party(path: Path) -> set[str]:
    tops = {module.split(".")[0] for module in imports(path)}
    return tops - set(sys.stdlib_module_names) - {"torchcpl"}


@pytest.mark.parametrize(
    "path", [p for p in FILES if room_of(name_of(p)) in CORE], ids=lambda p: str(p.relative_to(ROOT))
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
        "'safetensors', 'torchvision', 'pandas'}\n"
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

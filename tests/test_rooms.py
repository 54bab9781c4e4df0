"""The rooms of docs/ARCHITECTURE.md: small modules, small folders, and no two modules that need each other.

Layers are import-linter's (pyproject.toml); C modules have tests/test_c_modules.py.
"""

import ast
import subprocess
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

PACKAGES = ("cachefs", "daemon", "policies")
MOST_LINES = 400
MOST_FILES = 12


def files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", *PACKAGES], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return [path for name in listed.stdout.splitlines() if (path := REPOSITORY / name).exists()]


def module_of(path: Path, root: Path) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def imported(path: Path, modules: set[str]) -> Iterator[str]:
    """The modules that a module imports, in functions and for type checking as well."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for each in node.names:
                submodule = f"{node.module}.{each.name}"
                yield submodule if submodule in modules else node.module


def dependencies(paths: list[Path], root: Path) -> dict[str, set[str]]:
    named = {module_of(path, root): path for path in paths if path.suffix == ".py"}
    return {name: {each for each in imported(path, set(named)) if each in named} for name, path in named.items()}


def test_no_modules_need_each_other() -> None:
    graph = dependencies(files(), REPOSITORY)
    assert len(graph) > 100
    list(TopologicalSorter(graph).static_order())  # raises CycleError, with the cycle


@pytest.mark.parametrize("where", ["from room import b", "def f():\n    from room.b import g\n"])
def test_a_cycle_is_noticed(tmp_path: Path, where: str) -> None:
    room = tmp_path / "room"
    room.mkdir()
    for name, text in (("__init__", ""), ("a", where), ("b", "import room.a\n")):
        (room / f"{name}.py").write_text(text)
    with pytest.raises(CycleError):
        list(TopologicalSorter(dependencies([*room.iterdir()], tmp_path)).static_order())


def test_modules_and_folders_are_small() -> None:
    sources = [path for path in files() if path.suffix in (".py", ".c", ".h")]
    lengths = {str(path.relative_to(REPOSITORY)): path.read_text().count("\n") for path in sources}
    assert {name: lines for name, lines in lengths.items() if lines > MOST_LINES} == {}
    folders = [path.parent for path in files()]
    assert {str(folder) for folder in folders if folders.count(folder) > MOST_FILES} == set()


def test_each_room_says_what_it_is_for() -> None:
    rooms = [path for path in files() if path.name == "__init__.py"]
    said = {path: ast.get_docstring(ast.parse(path.read_text())) for path in rooms}
    assert len(rooms) > 20 and [path for path, text in said.items() if not text] == []

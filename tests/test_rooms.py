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
MOST_LINES = 440
MOST_FILES = 12
MOST_LINES_OF_FUNCTION = 70
MOST_ARGUMENTS = 12
LONG_FUNCTIONS = {
    "daemon/wiring.py __init__": "constructs each object once, in the order in which they need each other"
}


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


def functions(text: str) -> Iterator[tuple[str, int, int]]:
    """(name, lines, arguments) of each function of a Python module."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            assert node.end_lineno is not None
            yield node.name, node.end_lineno - node.lineno + 1, len(arguments)


def functions_in_c(text: str) -> Iterator[tuple[str, int]]:
    """(head, lines) of each function: it starts in the first column, and so does its last brace."""
    head, start = "", 0
    for number, line in enumerate(text.splitlines(), start=1):
        if line[:1].isalpha() and "(" in line and not line.endswith(";"):
            head, start = line, number
        elif line == "}" and head:
            yield head, number - start + 1
            head = ""


def test_functions_are_short() -> None:
    """Where one is long, LONG_FUNCTIONS gives the reason."""
    long, seen = set(), 0
    for path in files():
        name, text = str(path.relative_to(REPOSITORY)), path.read_text()
        if path.suffix == ".py":
            for function, lines, arguments in functions(text):
                seen += 1
                assert arguments <= MOST_ARGUMENTS, f"{name}: {function} has {arguments} arguments"
                if lines > MOST_LINES_OF_FUNCTION:
                    long.add(f"{name} {function}")
        elif path.suffix == ".c":
            for function, lines in functions_in_c(text):
                seen += 1
                assert lines <= MOST_LINES_OF_FUNCTION, f"{name}: {function} has {lines} lines"
    assert seen > 1500
    assert long == set(LONG_FUNCTIONS)


def test_each_room_says_what_it_is_for() -> None:
    rooms = [path for path in files() if path.name == "__init__.py"]
    said = {path: ast.get_docstring(ast.parse(path.read_text())) for path in rooms}
    assert len(rooms) > 20 and [path for path, text in said.items() if not text] == []

"""The tests that docs/FAULTS.md and docs/SECURITY.md name exist, and each row of their tables names one."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

NAMED = re.compile(r"`([a-z_/]+\.py|…)::([a-z0-9_]+)`")
DOCUMENTS = ["FAULTS.md", "SECURITY.md"]


@cache
def functions(path: Path) -> frozenset[str]:
    """Read, not imported: a test that does not run here exists as well."""
    return frozenset(node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))


def named_in(text: str) -> Iterator[tuple[Path, str]]:
    """`…` is the file that was named before. A file without a directory is in tests/mount."""
    path = Path()
    for file, name in NAMED.findall(text):
        if file != "…":
            path = REPOSITORY / (file if "/" in file else f"tests/mount/{file}")
        yield path, name


def rows(text: str) -> Iterator[str]:
    """Of tables that have a column of tests."""
    has_tests = False
    for line in text.splitlines():
        if not line.startswith("|"):
            has_tests = False
        elif line.rstrip(" |").endswith("| test"):
            has_tests = True
        elif has_tests and not line.startswith("|--"):
            yield line


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_tests_that_a_document_names_exist(document: str) -> None:
    text = (REPOSITORY / "docs" / document).read_text()
    named = list(named_in(text))
    assert named and [f"{path.name}::{name}" for path, name in named if name not in functions(path)] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_each_row_names_a_test(document: str) -> None:
    found = list(rows((REPOSITORY / "docs" / document).read_text()))
    assert found and [row for row in found if not NAMED.search(row) and "`make " not in row] == []


def test_a_name_that_is_wrong_is_noticed() -> None:
    (path, name), (same, other) = named_in("`test_clock.py::test_nothing`, `…::test_nothing_else`")
    assert path == same == REPOSITORY / "tests" / "mount" / "test_clock.py" and name not in functions(path)
    assert other == "test_nothing_else"
    assert list(rows("| a | test |\n|---|---|\n| x | none |\n\n| b | c |\n|---|---|\n| y | z |")) == ["| x | none |"]

"""What the documents name exists: files, options, functions, tests and hazards.

Each row of the tables of docs/FAULTS.md and docs/SECURITY.md names a test.
"""

import ast
import importlib.util
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest

from daemon.cli.main import main
from tests.conftest import REPOSITORY

NAMED = re.compile(r"`([a-z_/]+\.py|…)::([a-z0-9_]+)`")
DOCUMENTS = ["FAULTS.md", "SECURITY.md", "ENVIRONMENTS.md"]
FILE = re.compile(r"(?<![\w*{/.-])((?:[\w.-]+/)*[\w.-]+\.(?:py|c|h|md|toml|service|json|yml|yaml|sh|svg))\b")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
WORD = re.compile(r"(?<![\w-])[a-z]\w*_\w+\b(?!\*)")
SPAN = re.compile(r"`([^`\n]+)`")
HAZARDS = re.compile(r"\b[Hh]azards?\s+(?:#\s+)?([0-9]+(?:(?:,| and| to)\s+[0-9]+)*)")
WRITTEN_LATER = {"mount.json", "cache.json", "hits.svg", "policies/KIND/NAME.py", "policies/KIND/__init__.py"}
"""By a daemon, a benchmark or a developer."""
OTHERS_OPTIONS = {"--now", "--upgrade", "--data", "--help"}
"""Of systemctl, pip, a training script and click."""
OTHERS_WORDS = {"zsh_source", "fish_source", "open_tree", "names_lengths"}
"""Of click's completion and the kernel; a column of snapshots, whose name is composed."""


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


# --- files, options, names -------------------------------------------------------------------------------------------


@cache
def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.splitlines() if (REPOSITORY / name).exists()]


def documents() -> list[str]:
    return [name for name in tracked() if name.endswith(".md")]


@cache
def sources() -> str:
    """All that is no document."""
    names = [name for name in tracked() if name not in documents()]
    return "\n".join((REPOSITORY / name).read_text(errors="replace") for name in names)


@cache
def words() -> frozenset[str]:
    return frozenset(re.findall(r"\w+", sources())) | {Path(name).stem for name in tracked()} | OTHERS_WORDS


@cache
def options() -> frozenset[str]:
    found = set(OPTION.findall(sources())) | OTHERS_OPTIONS
    todo: list[click.Command] = [main]
    while todo:
        command = todo.pop()
        found.update(*(parameter.opts + parameter.secondary_opts for parameter in command.params))
        todo += command.commands.values() if isinstance(command, click.Group) else []
    return frozenset(found)


def missing_from(text: str) -> list[str]:
    """What a document names and nothing is called."""
    files = {name.removeprefix("../") for name in FILE.findall(text) if name not in WRITTEN_LATER}
    missing = [name for name in files if not any(f"/{each}".endswith(f"/{name}") for each in tracked())]
    missing += [name for name in OPTION.findall(text) if name not in options()]
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    missing += [word for span in SPAN.findall(prose) for word in WORD.findall(span) if word not in words()]
    return sorted(missing)


@pytest.mark.parametrize("document", documents())
def test_what_a_document_names_exists(document: str) -> None:
    assert missing_from((REPOSITORY / document).read_text()) == []


def test_what_does_not_exist_is_noticed() -> None:
    text = "See fs/{0}.py, `{0}_name()` and `--{0}-option`, but `--read-only` and `missing_from` of conftest.py."
    name = "phantom"
    assert missing_from(text.format(name)) == [f"--{name}-option", f"fs/{name}.py", f"{name}_name"]


def test_hazards_that_are_cited_are_listed() -> None:
    listed = set(re.findall(r"^([0-9]+)\. ", (REPOSITORY / "docs/HAZARDS.md").read_text(), re.MULTILINE))
    cited = {number for numbers in HAZARDS.findall(sources()) for number in re.findall("[0-9]+", numbers)}
    assert len(cited) > 20 and cited <= listed


IMPORTS = re.compile(r"\bfrom ((?:cachefs|daemon|policies)(?:\.\w+)*) import (\w+(?:, \w+)*)")


def test_what_scripts_in_strings_and_documents_import_exists() -> None:
    """Children of tests and of the daemon run them: mypy does not see them."""
    missing = []
    for name in tracked():
        for module, names in IMPORTS.findall((REPOSITORY / name).read_text(errors="replace")):
            for imported in names.split(", "):
                found = importlib.util.find_spec(module)
                assert found is not None, f"{name}: {module}"
                if not hasattr(importlib.import_module(module), imported):
                    missing += [f"{name}: {module}.{imported}"] * (
                        importlib.util.find_spec(f"{module}.{imported}") is None
                    )
    assert missing == []

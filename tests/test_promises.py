"""Each promise of docs/SEMANTICS.md has a test that says so: `@pytest.mark.promise("IM-1")`.

The identifier in the document stands behind the sentences that it covers. Tests are read, not imported, so that this
works without a mount, and the same for a test that does not run here.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

IDENTIFIER = re.compile(r"[A-Z]{2}-[1-9][0-9]*")
BRACKET = re.compile(r"\[([^\]]*)\](?!\()")
BLOCK = re.compile(r"(?:- |[0-9]+\. |#+ )")
MAY_PROMISE_NOTHING = "Not promised"
LINE_LENGTH = 120


def blocks(document: str) -> Iterator[tuple[str, str]]:
    """(`##` section, text) of each heading, list item and paragraph, the text on one line."""
    section, block = "", ""
    for line in [*document.splitlines(), ""]:
        if not line or BLOCK.match(line):
            if block:
                yield section, block
            block = ""
        if line.startswith("## "):
            section = line.removeprefix("## ")
        block = f"{block} {line.strip()}".strip()


def problems_of_document(document: str) -> tuple[list[str], list[str]]:
    """(the identifiers that it has, what is wrong with it)"""
    found: list[str] = []
    problems: list[str] = []
    letters: dict[str, str] = {}
    for section, block in blocks(document):
        here = BRACKET.findall(re.sub(r"`[^`]*`", "", block))
        for bracket in here:
            if not IDENTIFIER.fullmatch(bracket):
                problems.append(f"[{bracket}] is no identifier; tests say themselves which promise they run")
                continue
            found.append(bracket)
            if letters.setdefault(bracket[:2], section) != section:
                problems.append(f"{bracket}: {bracket[:2]} belongs to the section {letters[bracket[:2]]!r}")
        if block.startswith("#") or not section:
            continue
        if not re.search(rf"\[{IDENTIFIER.pattern}\]$", block) and (section != MAY_PROMISE_NOTHING or here):
            problems.append(f"ends without an identifier: …{block[-70:]}")
    problems += [f"{identifier} is used twice" for identifier, count in Counter(found).items() if count > 1]
    problems += [f"longer than {LINE_LENGTH}: {line}" for line in document.splitlines() if len(line) > LINE_LENGTH]
    return found, problems


def is_mark(node: ast.AST) -> bool:
    """Whether it is `pytest.mark.promise`."""
    return isinstance(node, ast.Attribute) and ast.unparse(node) == "pytest.mark.promise"


def places_for_marks(module: ast.Module) -> Iterator[ast.AST]:
    """What pytest takes marks of tests from: decorators, of parametrised cases too, and `pytestmark`."""
    bodies = [module.body]
    for body in bodies:
        for node in body:
            if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
                bodies.append(node.body)
                yield from node.decorator_list
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                yield from node.decorator_list
            elif isinstance(node, ast.Assign) and [ast.unparse(name) for name in node.targets] == ["pytestmark"]:
                yield node.value


def problems_of_tests(source: str, where: str) -> tuple[list[str], list[str]]:
    """(the identifiers that tests in this file name, what is wrong with its marks)"""
    module = ast.parse(source)
    found: list[str] = []
    problems: list[str] = []
    marks = 0
    for place in places_for_marks(module):
        for node in ast.walk(place):
            marks += is_mark(node)
            if isinstance(node, ast.Call) and is_mark(node.func):
                names = [each.value for each in node.args if isinstance(each, ast.Constant)]
                if not names or len(names) != len(node.args) or node.keywords:
                    problems.append(f"{where}:{node.lineno}: name the promises as strings")
                found += [str(name) for name in names]
    if sum(map(is_mark, ast.walk(module))) != marks:
        problems.append(f"{where}: a promise is named by what is no test")
    return found, problems


def problems(document: str, tests: dict[str, str]) -> list[str]:
    promised, wrong = problems_of_document(document)
    run: set[str] = set()
    for where, source in tests.items():
        named, more = problems_of_tests(source, where)
        run.update(named)
        wrong += more
        wrong += [f"{where}: there is no promise {name}" for name in named if name not in promised]
    return wrong + [f"no test runs {identifier}" for identifier in dict.fromkeys(promised) if identifier not in run]


def test_each_promise_has_a_test_and_each_test_a_promise_that_there_is() -> None:
    paths = sorted((REPOSITORY / "tests").rglob("test_*.py"))
    tests = {str(path.relative_to(REPOSITORY)): path.read_text() for path in paths}
    assert problems(Path(REPOSITORY / "docs/SEMANTICS.md").read_text(), tests) == []


DOCUMENT = """# Title

What it is.

## First

- One thing. [FI-1] Another thing,
  which takes longer. [FI-2]

## Second

A paragraph about `a[i]` and [a link](FORMAT.md). [SE-1]

## Not promised

- This. [NP-1]
- That.
"""
TESTS = """
import pytest
pytestmark = [pytest.mark.slow, pytest.mark.promise("SE-1")]
@pytest.mark.promise("FI-1", "NP-1")
def test_a(): pass
class TestB:
    @pytest.mark.parametrize("a", [1, pytest.param(2, marks=pytest.mark.promise("FI-2"))])
    def test_c(self, a): pass
"""


def test_sound_ones_have_no_problem() -> None:
    assert problems(DOCUMENT, {"a": TESTS}) == []


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("One thing. [FI-1]", "One thing. [FI-1] More. [FI-3]", "no test runs FI-3"),
        ("[FI-2]", "[FI-1]", "FI-1 is used twice"),
        ("[FI-2]", "[test_first: a_thing]", "[test_first: a_thing] is no identifier"),
        ("[FI-2]", "[FI-2] And more.", "ends without an identifier"),
        ("## Second\n", "## Second\n\nNothing.\n", "ends without an identifier"),
        ("[SE-1]", "[FI-3]", "FI-3: FI belongs to the section 'First'"),
        ("This. [NP-1]", "[NP-1] This.", "ends without an identifier"),
        ("This.", "This." + 120 * "!", "longer than 120: - This."),
    ],
)
def test_what_is_wrong_with_a_document_is_said(old: str, new: str, problem: str) -> None:
    changed = DOCUMENT.replace(old, new, 1)
    assert changed != DOCUMENT
    assert any(each.startswith(problem) for each in problems(changed, {"a": TESTS}))


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('"FI-1", ', "", "no test runs FI-1"),
        ('"FI-1", ', '"FI-1", "FI-7", ', "a: there is no promise FI-7"),
        ("test_a()", "helper()", "a: a promise is named by what is no test"),
        ('"FI-1", ', "*ALL, ", "a:4: name the promises as strings"),
        ('("SE-1")', "", "no test runs SE-1"),
    ],
)
def test_what_is_wrong_with_tests_is_said(old: str, new: str, problem: str) -> None:
    changed = TESTS.replace(old, new, 1)
    assert changed != TESTS
    assert problem in problems(DOCUMENT, {"a": changed})

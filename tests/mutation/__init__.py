"""Mutation testing: would a test fail if the code were wrong?

    python -m tests.mutation [--seed N] [--number N] [--only PATTERN] [--jobs N] [--quick]
                             [--results FILE]

A mutant is the code with one small mistake: a condition negated or dropped, `<` for `<=`, a call left out, a number
that is one too large (`python_mutants.py`, `c_mutants.py`). Mutants are drawn at random from the modules that decide
what bytes a reader gets, without the functions that only decide when (`targets.py`); the seed is printed. For each the
tests that are most likely to notice run, the quick ones first, until one fails. Unless --quick is given, what survives
them meets a wider selection. A mutant during which tests hang counts as found, and one that does not compile is not
counted. A test that fails runs once more on the code as it is: if it fails there too, that says nothing, and the mutant
is tested again.

Each job works in a copy of the repository of its own, so that the checkout is never changed. Each outcome is a line of
JSON in the results file; a run with the same seed and file goes on where the last one ended.

After: DeMillo, Lipton and Sayward, "Hints on test data selection", 1978; the operators are those of mutmut and of
Offutt's sufficient set, without the ones that mostly make equivalent mutants.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    path: str
    """Of the module, from the repository's root."""
    start: int
    end: int
    """Bytes `start` to `end` of the file are replaced."""
    replacement: bytes
    operator: str

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.replacement + source[self.end :]

    def line(self, source: bytes) -> int:
        return source.count(b"\n", 0, self.start) + 1

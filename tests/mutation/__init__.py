"""Mutation testing: would a test fail if the code were wrong?

    python -m tests.mutation [--seed N] [--number N] [--only PATTERN] [--quick] [--again FILE] [--results FILE] …

A mutant is the code with one small mistake: a condition negated or dropped, `<` for `<=`, a call left out, a number
that is one too large (`python_mutants.py`, `c_mutants.py`). Mutants are drawn at random from the modules that decide
what bytes a reader gets, without the functions that only decide when (`targets.py`); the seed is printed.

Mutants are tested in batches, as blood samples are: the tests run on the code with all mutants of a batch at once,
until one fails. By bisection that test alone then says which of them it finds without the others; they leave the batch,
and the tests go on from there. So one pass through the tests serves the whole batch, each mutant that counts as found
makes a test fail on its own, and what is hidden by another mutant counts as a survivor. A test that hangs fails. A
failure that no single mutant causes, or that happens on the code as it is, says nothing. What does not compile is not
counted.

Each job works in a copy of the repository of its own, so that the checkout is never changed. Each outcome is a line of
JSON in the results file; a run with the same seed and file goes on where the last one ended.

After: DeMillo, Lipton and Sayward, "Hints on test data selection", 1978; the operators are those of mutmut and of
Offutt's sufficient set, without the ones that mostly make equivalent mutants. Batches: Dorfman, "The detection of
defective members of large populations", 1943.
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

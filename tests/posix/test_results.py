"""How results of other projects' suites are read and compared."""

import sys
from pathlib import Path

import pytest

from tests.posix import libfuse, pjdfstest, stress_ng
from tests.posix.__main__ import compared
from tests.posix.differences import DIFFERENCES
from tests.posix.suite import Job, Outcome, by_status, run_job

PASSED, FAILED, SKIPPED = Outcome.PASSED, Outcome.FAILED, Outcome.SKIPPED


def test_a_test_that_only_the_mount_fails_or_leaves_out_is_reported() -> None:
    expected = {"a": PASSED, "b": PASSED, "c": PASSED, "d": FAILED, "e": PASSED}
    found = {"a": PASSED, "b": FAILED, "c": SKIPPED, "d": FAILED}
    assert compared("x", "full", expected, found) == ([], ["x/b: failed", "x/c: skipped", "x/e: not run"])


def test_a_difference_that_is_explained_is_not_reported() -> None:
    assert compared("ltp", "full", {"lseek11": PASSED}, {"lseek11": SKIPPED}) == (["ltp/lseek11: skipped"], [])


def test_docs_explain_every_difference() -> None:
    text = Path(__file__).parents[2].joinpath("docs/TESTING.md").read_text()
    assert not [difference.tests for difference in DIFFERENCES if f"`{difference.tests}`" not in text]


def test_pjdfstest_that_ends_early_has_failed_the_rest() -> None:
    output = "1..4\nok 1\nnot ok 2 - said this\nnot ok 3 # TODO some\n"
    outcomes = {"a/00:1": PASSED, "a/00:2": FAILED, "a/00:3": PASSED, "a/00:4": FAILED}
    assert pjdfstest.reader("a/00")(output, 0) == outcomes


def test_libfuse_that_ends_early_has_failed_what_was_under_way() -> None:
    output = "+   0.0s   1 [create] START\n+   0.0s   1 [create] OK\n+   0.0s   2 [link] START\n"
    assert libfuse.reader("named")(output, 1) == {"named": FAILED, "named/create": PASSED, "named/link": FAILED}
    assert libfuse.reader("named")(output, 0)["named/link"] is SKIPPED


@pytest.mark.parametrize(
    ("output", "status", "outcome"),
    [("", 0, PASSED), ("", 2, FAILED), ("stress-ng: fail: x", 0, FAILED), ("x: not implemented", 3, SKIPPED)],
)
def test_stress_ng(output: str, status: int, outcome: Outcome) -> None:
    assert stress_ng.reader("x")(output, status) == {"x": outcome}


def test_a_job_that_does_not_end_has_failed_and_is_killed(tmp_path: Path) -> None:
    job = Job("x", (sys.executable, "-c", "while True: pass"), by_status("x"), timeout_s=1)
    assert run_job(job, tmp_path, None, tmp_path / "outputs") == {"x": FAILED}
    assert "not done after 1 s" in (tmp_path / "outputs/x.txt").read_text()


def test_what_the_source_does_not_have_afterwards_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "beneath/x").mkdir(parents=True)
    job = Job("x", ("touch", "file"), by_status("x"), same_beneath=True)
    found = run_job(job, tmp_path / "here", tmp_path / "beneath", tmp_path / "outputs")
    assert found == {"x": PASSED, "x/same-beneath": FAILED}

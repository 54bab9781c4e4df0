"""How often a refused request is logged, and how long it is remembered. tests/mount/test_refusals.py has the texts."""

import os

import pytest

from cachefs.fs.refusals import (
    CLEAN_UP_S,
    MOST_PATHS,
    MOST_REPEATED,
    MOST_WRITERS,
    PERIOD_S,
    REPEATED_WITHIN_S,
    Refusals,
    Repetitions,
)
from cachefs.options import Options
from cachefs.source.credentials import Caller
from cachefs.stats.metrics import Metrics
from cachefs.store.index.index import Index
from tests.cachefs.inode_caches import inode_cache


def test_each_path_is_logged_once_in_an_hour_and_no_more_than_a_hundred(
    index: Index, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = 0.0
    metrics = Metrics()
    refusals = Refusals(inode_cache(index, Options()), metrics, lambda: now_s)
    for _ in range(3):
        refusals.immutable(7)
        refusals.changed(7)
    assert [record.getMessage().split(",")[0] for record in caplog.records] == [
        "inode 7: a change was refused with EPERM",
        "inode 7: a read failed with ESTALE",
    ]
    for number in range(1000):
        refusals.immutable(number)
    assert len(caplog.records) == MOST_PATHS and metrics.refused_changes == 1003 and metrics.stale_reads == 3
    now_s += PERIOD_S
    refusals.immutable(7)
    assert len(caplog.records) == MOST_PATHS + 1


def test_a_refused_writer_cannot_unlink_for_ten_seconds(index: Index) -> None:
    now_s = 100.0
    refusals = Refusals(inode_cache(index, Options()), Metrics(), lambda: now_s)
    myself, parent = Caller(0, 0, os.getpid()), Caller(0, 0, os.getppid())
    refusals.immutable(7, myself)
    refusals.immutable(8)
    assert [refusals.protects(number, myself) for number in (7, 8, 9)] == [True, False, False]
    assert not refusals.protects(7, parent)
    now_s += CLEAN_UP_S / 2
    refusals.immutable(8, parent)
    now_s += CLEAN_UP_S / 2
    assert not refusals.protects(7, myself) and refusals.protects(8, parent)


def test_writers_that_proc_does_not_show_count_together_for_each_user(index: Index) -> None:
    refusals = Refusals(inode_cache(index, Options()), Metrics(), lambda: 0.0)
    refusals.immutable(7, Caller(1000, 1000, 0))
    assert refusals.protects(7, Caller(1000, 1, 0))
    assert not refusals.protects(7, Caller(1001, 1000, 0)) and not refusals.protects(7, Caller(1000, 1000, os.getpid()))


def test_refused_writers_are_bounded(index: Index) -> None:
    refusals = Refusals(inode_cache(index, Options()), Metrics(), lambda: 0.0)
    for number in range(MOST_WRITERS + 1):
        refusals.immutable(number, Caller(1000, 1000, 0))
    assert [refusals.protects(number, Caller(1000, 1000, 0)) for number in (0, 1, MOST_WRITERS)] == [False, True, True]


def test_a_call_is_repeated_once_about_the_same_inode_or_one_that_its_thread_has_looked_up() -> None:
    now_s = 0.0
    repetitions = Repetitions(lambda: now_s)
    one, other = Caller(0, 0, 1), Caller(0, 0, 2)
    repetitions.looked_up(7, one)
    assert not repetitions.has(7, one)
    for number, is_repeated in ((6, True), (7, True), (8, False), (9, False)):
        repetitions.answered(6, one, is_stale=True)
        repetitions.looked_up(7, one)
        repetitions.looked_up(9, other)
        assert not repetitions.has(6, other)
        assert repetitions.has(number, one) is is_repeated
        repetitions.answered(number, one, is_stale=is_repeated)
        assert not repetitions.has(number, one)
    repetitions.answered(6, one, is_stale=True)
    now_s += REPEATED_WITHIN_S
    assert not repetitions.has(6, one)


def test_expected_repetitions_are_bounded() -> None:
    repetitions = Repetitions(lambda: 0.0)
    for thread in range(MOST_REPEATED + 1):
        repetitions.answered(6, Caller(0, 0, thread), is_stale=True)
    assert not repetitions.has(6, Caller(0, 0, 1))
    assert repetitions.has(6, Caller(0, 0, MOST_REPEATED))

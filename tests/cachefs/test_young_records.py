"""Which files are young, and until when: metadata/validity.py."""

import pytest

from cachefs.metadata.validity import FOREVER_NS
from cachefs.options import Options
from cachefs.store.index.index import Index
from cachefs.store.index.records import STALE, UNSETTLED
from cachefs.system.clock import NANOSECONDS
from tests.cachefs.test_records import NOW_NS, READ_ONLY, Cache, file

AGES = pytest.mark.parametrize(
    ("ago_s", "has_own_clock", "young"),
    [
        (3, False, False),
        (1, False, True),
        (-1000, False, True),  # in the future
        (3, True, True),  # the clock that set it may be ten minutes late
        (599, True, True),
        (601, True, False),
    ],
)


@AGES
def test_a_version_that_may_be_recent_is_young(index: Index, ago_s: int, has_own_clock: bool, young: bool) -> None:
    cache = Cache(index, has_own_clock=has_own_clock)
    with index.update() as update:
        record = cache.see(update, b"f", file(time_ns=NOW_NS - ago_s * NANOSECONDS + 1))
    assert record.is_young == young == bool(record.flags & UNSETTLED)


@pytest.mark.promise("CH-29")
@pytest.mark.parametrize(("ago_s", "young"), [(3, True), (4, False)])
def test_a_time_in_whole_seconds_counts_from_the_end_of_its_step(index: Index, ago_s: int, young: bool) -> None:
    cache = Cache(index)
    assert NOW_NS % NANOSECONDS == 0
    with index.update() as update:
        assert cache.see(update, b"f", file(time_ns=NOW_NS - ago_s * NANOSECONDS)).is_young == young


@pytest.mark.parametrize("mtime_ago_s", [1, 1000])
@pytest.mark.parametrize("has_change_times", [True, False])
def test_mtime_counts_where_there_are_no_change_times(index: Index, mtime_ago_s: int, has_change_times: bool) -> None:
    cache = Cache(index, has_change_times=has_change_times)
    now = file(time_ns=NOW_NS - 1000 * NANOSECONDS)._replace(mtime_ns=NOW_NS - mtime_ago_s * NANOSECONDS)
    with index.update() as update:
        assert cache.see(update, b"f", now).is_young == (not has_change_times and mtime_ago_s == 1)


@pytest.mark.promise("CH-15")
@pytest.mark.parametrize("sets_no_time_back", [True, False])
def test_a_file_from_the_future_stays_young_where_times_are_never_set_back(
    index: Index, sets_no_time_back: bool
) -> None:
    cache = Cache(index, sets_no_time_back=sets_no_time_back)
    now = file(time_ns=NOW_NS + 1000 * NANOSECONDS)
    with index.update() as update:
        cache.see(update, b"f", now)
        cache.now_ns += 3 * NANOSECONDS
        assert cache.see(update, b"f", now).is_young == sets_no_time_back
        cache.now_ns += 1000 * NANOSECONDS
        assert not cache.see(update, b"f", now).is_young


def test_a_young_file_is_old_enough_at_the_second_comparison_two_seconds_later(index: Index) -> None:
    """Also one that was made in the future, which would be compared every two seconds until that time comes."""
    cache = Cache(index)
    now = file(time_ns=NOW_NS + 1000 * NANOSECONDS)
    with index.update() as update:
        record = cache.see(update, b"f", now)
        assert record.is_young and cache.remaining_ns(record) == READ_ONLY.settle_ns
        cache.now_ns += READ_ONLY.settle_ns
        for too_early in (now._replace(is_fresh=False), now._replace(began_ns=cache.now_ns - 1)):
            record = cache.see(update, b"f", too_early)
            assert record.is_young and not cache.remaining_ns(record)
        record = cache.see(update, b"f", now._replace(began_ns=cache.now_ns))
        assert not record.is_young and cache.remaining_ns(record) == FOREVER_NS
        cache.put_inode(update, record._replace(flags=record.flags | STALE))
        assert not cache.see(update, b"f", now).is_young  # it was seen


def test_another_version_is_young_again(index: Index) -> None:
    cache = Cache(index)
    with index.update() as update:
        cache.see(update, b"f", file(time_ns=NOW_NS))
        cache.now_ns += READ_ONLY.settle_ns
        now = file(time_ns=cache.now_ns)
        assert cache.see(update, b"f", now).is_young
        cache.now_ns += READ_ONLY.settle_ns
        assert not cache.see(update, b"f", now).is_young


def test_a_comparison_of_an_earlier_run_is_no_observation(index: Index) -> None:
    """Its monotonic clock may be another boot's."""
    now = file(time_ns=NOW_NS)
    with index.update() as update:
        assert Cache(index).see(update, b"f", now).is_young
    cache = Cache(index, run=2)
    cache.now_ns += 10 * NANOSECONDS
    with index.update() as update:
        record = cache.see(update, b"f", now._replace(ctime_ns=cache.now_ns, mtime_ns=cache.now_ns))
        assert record.is_young and record.observed_ns == cache.now_ns


@pytest.mark.parametrize("mtime_s", [0, 1])
def test_a_file_to_which_this_mount_has_written_is_young(index: Index, mtime_s: int) -> None:
    """One that it has only renamed or linked stays as old as it was: a write would move its mtime."""
    cache = Cache(index, Options())
    with index.update() as update:
        record = cache.see(update, b"f", file(time_ns=1))
        assert not record.is_young
        now = file(time_ns=1)._replace(mtime_ns=1 + mtime_s * NANOSECONDS, ctime_ns=NOW_NS)
        changed, _ = cache.apply_own_change(update, record.number, now)
    assert changed is not None and changed.is_young == bool(mtime_s)


def test_a_young_file_that_is_pinned_keeps_its_observation(index: Index) -> None:
    cache = Cache(index, Options())
    now = file(time_ns=NOW_NS)
    with index.update() as update:
        record = cache.see(update, b"f", now)
        cache.now_ns += NANOSECONDS // 2
        record = cache.pin_file(update, record)
        assert record.is_young and cache.remaining_ns(record) == READ_ONLY.settle_ns - NANOSECONDS // 2
        cache.now_ns = record.expires_ns
        assert not cache.see(update, b"f", now._replace(began_ns=cache.now_ns)).is_young

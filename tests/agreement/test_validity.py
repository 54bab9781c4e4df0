"""What is valid, and for how long: metadata/validity.py and age.py against fastpath/c/cache/index.c and age.h."""

import math
import stat
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.contract.shared import SETTLE_NS
from cachefs.data.young_files import YoungFiles
from cachefs.metadata.validity import Run, Validity
from cachefs.options import CacheLevel, Options
from cachefs.source import age
from cachefs.store.index.records import (
    IMMUTABLE,
    IMMUTABLE_ON_OPEN,
    PINNED,
    STALE,
    UNLINKED,
    UNSETTLED,
    WRITTEN,
    Dentry,
    Inode,
)
from cachefs.system.clock import Clock
from tests.agreement.library import FastPath, examples

NOW_NS = 10**15
_RUNS = st.integers(0, 4)
_NEAR = st.integers(-3, 3) | st.integers(-(10**10), 10**10)
_TIMES = st.integers(-(1 << 63), (1 << 63) - 1) | _NEAR.map(lambda by: NOW_NS + by)


@st.composite
def inodes(draw: st.DrawFn) -> Inode:
    record = Inode(7, *[0] * 22)._replace(
        flags=draw(st.integers(0, 255) | st.sampled_from([PINNED | IMMUTABLE, PINNED | UNSETTLED | IMMUTABLE])),
        mode=draw(st.sampled_from([stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK])) | 0o644,
        nlink=draw(st.integers(0, 3)),
        device=draw(st.integers(0, 1)),
        validated_run=draw(_RUNS),
        entries_valid_from=draw(_RUNS),
        mtime_ns=draw(_TIMES),
        ctime_ns=draw(_TIMES),
    )
    # It expires at another moment than now: 0 is "never" for some that are pinned, and in the past for the others.
    return record._replace(expires_ns=draw(st.just(0) | _NEAR.map(lambda by: NOW_NS + by)))


dentries = st.builds(Dentry, st.integers(0, 255), st.integers(0, 2), _RUNS, st.integers(0, 5))
mounts = st.builds(
    Options,
    cache=st.sampled_from(CacheLevel),
    read_only=st.booleans(),
    attr_timeout_s=st.sampled_from([1.0, math.inf]),
    settle_ns=st.sampled_from([SETTLE_NS, SETTLE_NS // 20]),
)
floors = st.fixed_dictionaries({"run": _RUNS, "floor": _RUNS, "strict_floor": _RUNS})


class _Kernel:
    """Pages are not dropped in these tests."""

    async def pages(self, inodes: Any) -> None:
        raise AssertionError


@examples(1000)
@given(mount=mounts, floors=floors, record=inodes(), dentry=st.none() | dentries)
def test_both_believe_the_same(
    fast_path: FastPath, mount: Options, floors: dict[str, int], record: Inode, dentry: Dentry | None
) -> None:
    fast_path.set_up(mount, **floors)
    fast_path.set_clocks(monotonic_ns=NOW_NS)
    validity = Validity(mount, Run(floors["run"], floors["floor"], floors["strict_floor"]), lambda: NOW_NS)
    assert fast_path.is_pinned(record) == validity.is_pinned(record)
    assert fast_path.remaining_ns(record) == validity.remaining_ns(record)
    assert fast_path.knows_absent(record, dentry) == validity.knows_absent(record, dentry)
    if dentry is not None:
        assert fast_path.entry_holds(record, dentry) == validity.entry_holds(record, dentry)


@pytest.mark.parametrize("mode", [stat.S_IFREG, stat.S_IFDIR])
@pytest.mark.parametrize("nlink", [0, 1, 2])
@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("validated_run", [1, 2, 3])
def test_both_count_the_same_from_the_strict_floor(
    fast_path: FastPath, mode: int, nlink: int, device: int, validated_run: int
) -> None:
    mount = Options(read_only=True, attr_timeout_s=math.inf)
    fast_path.set_up(mount, run=4, floor=2, strict_floor=3)
    validity = Validity(mount, Run(4, 2, 3))
    record = Inode(7, PINNED, *[0] * 21)._replace(
        mode=mode | 0o644, nlink=nlink, device=device, validated_run=validated_run
    )
    assert fast_path.remaining_ns(record) == validity.remaining_ns(record)


@examples(1000)
@given(mount=mounts, record=inodes())
def test_what_is_immutable_to_the_fast_path(fast_path: FastPath, mount: Options, record: Inode) -> None:
    """Python's rule is that of the flags: see Immutability."""
    fast_path.set_up(mount)
    validity = Validity(mount, Run(1, 0))
    pinned_file = record.is_regular and validity.is_pinned(record)
    assert fast_path.is_immutable(record) == (pinned_file and bool(record.flags & IMMUTABLE or mount.pins_everything))
    others = IMMUTABLE | WRITTEN | STALE | UNLINKED
    assert fast_path.is_immutable_on_open(record) == (
        bool(record.flags & IMMUTABLE_ON_OPEN) and not record.flags & others
    )


@examples(1000)
@given(
    mount=mounts,
    record=inodes(),
    now_ns=_NEAR.map(lambda by: NOW_NS + by),
    clock_is_ahead_by_ns=st.integers(0, 10**12),
)
def test_both_find_a_file_of_the_same_age(
    fast_path: FastPath, mount: Options, record: Inode, now_ns: int, clock_is_ahead_by_ns: int
) -> None:
    """However far the clock was set forward since the daemon was started."""
    boottime_ns = NOW_NS // 2
    fast_path.set_up(mount)
    fast_path.shared["clock_offset_ns"] = now_ns - boottime_ns
    fast_path.set_clocks(monotonic_ns=NOW_NS, realtime_ns=now_ns + clock_is_ahead_by_ns, boottime_ns=boottime_ns)
    left_ns = age.until_old_ns(record, now_ns, mount.settle_ns)
    assert fast_path.until_old_ns(record) == min(left_ns, (1 << 63) - 1)
    noted: list[int] = []
    young = YoungFiles(_Kernel(), settle_ns=mount.settle_ns, clock=Clock(lambda: NOW_NS, lambda: now_ns))
    young.note = lambda number, due_ns, dropped=None: noted.append(due_ns)  # type: ignore[method-assign, assignment]
    young.was_read(record)
    assert [fast_path.note_young(record)] == noted
    fast_path.shared["young_taken"] = fast_path.shared["young_written"]


def test_memory_that_says_nothing_of_an_age_means_the_usual_one(fast_path: FastPath) -> None:
    fast_path.set_up(Options())
    fast_path.set_clocks(realtime_ns=NOW_NS, boottime_ns=NOW_NS)
    record = Inode(7, *[0] * 22)._replace(mtime_ns=NOW_NS - SETTLE_NS // 2)
    usual_ns = fast_path.until_old_ns(record)
    fast_path.shared["settle_ns"] = 0
    assert fast_path.until_old_ns(record) == usual_ns > 0


def test_a_clock_that_was_set_back_is_believed(fast_path: FastPath) -> None:
    fast_path.set_up(Options())
    fast_path.shared["clock_offset_ns"] = NOW_NS
    fast_path.set_clocks(realtime_ns=NOW_NS - 10**12, boottime_ns=5)
    record = Inode(7, *[0] * 22)._replace(mtime_ns=NOW_NS)
    assert fast_path.until_old_ns(record) == age.until_old_ns(record, NOW_NS - 10**12, Options().settle_ns)


def test_without_an_offset_the_clock_is_believed(fast_path: FastPath) -> None:
    """A daemon of an earlier version wrote none down."""
    fast_path.set_up(Options())
    fast_path.shared["clock_offset_ns"] = 0
    fast_path.set_clocks(realtime_ns=NOW_NS, boottime_ns=5)
    record = Inode(7, *[0] * 22)._replace(mtime_ns=NOW_NS)
    assert fast_path.until_old_ns(record) == age.until_old_ns(record, NOW_NS, Options().settle_ns)


def test_no_more_young_files_are_noted_than_there_is_room_for(fast_path: FastPath) -> None:
    fast_path.set_up(Options())
    fast_path.set_clocks(monotonic_ns=NOW_NS, realtime_ns=NOW_NS)
    fast_path.shared["young_taken"] = fast_path.shared["young_written"]
    record = Inode(7, *[0] * 22)._replace(mtime_ns=NOW_NS, flags=UNSETTLED)
    for _ in range(8192):
        assert fast_path.note_young(record)
    assert not fast_path.note_young(record)
    fast_path.shared["young_taken"] += 1
    assert fast_path.note_young(record)
    assert not fast_path.note_young(record)
    fast_path.shared["young_taken"] = fast_path.shared["young_written"]

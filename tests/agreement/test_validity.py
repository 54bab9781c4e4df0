"""What is valid, and how long: metadata/validity.py and young_files.py against fastpath/c/cache/index.c and age.h."""

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
        flags=draw(st.integers(0, 511) | st.sampled_from([PINNED | IMMUTABLE, PINNED | UNSETTLED | IMMUTABLE])),
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
floors = st.fixed_dictionaries({"run": _RUNS, "floor": _RUNS, "strict_floor": _RUNS, "links_floor": st.integers(1, 3)})


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
    fast_path.set_clock(NOW_NS)
    run = Run(floors["run"], floors["floor"], floors["strict_floor"], floors["links_floor"])
    validity = Validity(mount, run, Clock(lambda: NOW_NS))
    assert fast_path.is_pinned(record) == validity.is_pinned(record)
    assert fast_path.remaining_ns(record) == validity.remaining_ns(record)
    if dentry is not None:
        assert fast_path.knows_absent(record, dentry) == validity.knows_absent(record, dentry)
        assert fast_path.entry_holds(record, dentry) == validity.entry_holds(record, dentry)


@pytest.mark.parametrize("mode", [stat.S_IFREG, stat.S_IFDIR])
@pytest.mark.parametrize("nlink", [0, 1, 2])
@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("validated_run", [1, 2, 3])
@pytest.mark.parametrize("links_floor", [2, 3])
def test_both_count_the_same_from_the_strict_floors(
    fast_path: FastPath, mode: int, nlink: int, device: int, validated_run: int, links_floor: int
) -> None:
    mount = Options(read_only=True, attr_timeout_s=math.inf)
    fast_path.set_up(mount, run=4, floor=2, strict_floor=3, links_floor=links_floor)
    validity = Validity(mount, Run(4, 2, 3, links_floor))
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
@given(mount=mounts, record=inodes())
def test_both_drop_the_pages_of_a_young_file_at_the_same_time(
    fast_path: FastPath, mount: Options, record: Inode
) -> None:
    fast_path.set_up(mount)
    fast_path.set_clock(NOW_NS)
    noted: list[int] = []
    young = YoungFiles(_Kernel(), settle_ns=mount.settle_ns, clock=Clock(lambda: NOW_NS))
    young.note = lambda number, due_ns, dropped=None: noted.append(due_ns)  # type: ignore[method-assign, assignment]
    young.was_read(record)
    assert [fast_path.note_young(record)] == noted
    fast_path.shared["young_taken"] = fast_path.shared["young_written"]


def test_memory_that_says_nothing_of_an_age_means_the_usual_one(fast_path: FastPath) -> None:
    """A daemon of an earlier version wrote none down."""
    fast_path.set_up(Options())
    fast_path.set_clock(NOW_NS)
    fast_path.shared["settle_ns"] = 0
    assert fast_path.note_young(Inode(7, *[0] * 22)) == NOW_NS + SETTLE_NS
    fast_path.shared["young_taken"] = fast_path.shared["young_written"]


def test_no_more_young_files_are_noted_than_there_is_room_for(fast_path: FastPath) -> None:
    fast_path.set_up(Options())
    fast_path.set_clock(NOW_NS)
    fast_path.shared["young_taken"] = fast_path.shared["young_written"]
    record = Inode(7, *[0] * 22)._replace(mtime_ns=NOW_NS, flags=UNSETTLED)
    for _ in range(8192):
        assert fast_path.note_young(record)
    assert not fast_path.note_young(record)
    fast_path.shared["young_taken"] += 1
    assert fast_path.note_young(record)
    assert not fast_path.note_young(record)
    fast_path.shared["young_taken"] = fast_path.shared["young_written"]

"""How often a refused request is logged, and how long it is remembered. tests/mount/test_refusals.py has the texts."""

import errno
import os
from contextlib import suppress
from functools import partial

import pytest
import trio
import trio.testing

from cachefs.fs.names import Entry
from cachefs.fs.refusals import (
    CLEAN_UP_S,
    MOST_PATHS,
    MOST_REPEATED,
    MOST_WRITERS,
    PERIOD_S,
    REPEATED_WITHIN_NS,
    Refusals,
    Repetitions,
)
from cachefs.metadata.inode_cache import InodeCache
from cachefs.metadata.validity import ANSWERED_NS
from cachefs.options import Options
from cachefs.source.credentials import Caller
from cachefs.stats.metrics import Metrics
from cachefs.store.index.index import Index
from cachefs.store.index.records import Inode
from cachefs.system.clock import NANOSECONDS, Clock
from cachefs.system.stat import Stat
from tests.cachefs.inode_caches import Kernel, inode_cache


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


class Times:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.ns = 10**12

    def now_ns(self) -> int:
        return self.ns


class Names:
    """The part of `FileSystem` that `Repetitions` needs, without any names."""

    def __init__(self, metadata: InodeCache, kernel: Kernel) -> None:
        self.metadata, self.notifier = metadata, kernel

    async def compare(self, parent: int, name: bytes) -> Inode | None:
        return None

    def overtake(self, parent: int, name: bytes) -> None:
        pass


@pytest.fixture
def times() -> Times:
    return Times()


@pytest.fixture
def kernel(times: Times) -> Kernel:
    return Kernel(times.now_ns)


@pytest.fixture
def metadata(index: Index, times: Times, kernel: Kernel) -> InodeCache:
    return inode_cache(index, Options(), kernel=kernel, clock=Clock(times.now_ns))


@pytest.fixture
def repetitions(metadata: InodeCache, kernel: Kernel, times: Times) -> Repetitions:
    return Repetitions(Names(metadata, kernel), times.now_ns)


ONE, OTHER, UNKNOWN = (Caller(0, 0, thread) for thread in (1, 2, 0))


def expect(repetitions: Repetitions, caller: Caller) -> float:
    """Returns how many seconds the answer waits."""

    async def main() -> float:
        began_s = trio.current_time()
        await repetitions.expect(caller)
        return trio.current_time() - began_s

    return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_the_kernel_drops_lost_names_before_a_call_is_answered_with_estale(
    metadata: InodeCache, repetitions: Repetitions, kernel: Kernel, times: Times
) -> None:
    assert repetitions.is_by_present_name(7, ONE)
    metadata.note_lost_name(7, 1, b"name")
    times.ns += 1
    assert not repetitions.is_by_present_name(7, ONE)
    assert expect(repetitions, ONE) == 0
    assert kernel.names == [(1, b"name")]
    assert repetitions.is_by_present_name(7, ONE) and not repetitions.is_by_present_name(7, OTHER)
    times.ns += 1
    metadata.note_lost_name(7, 1, b"another")
    assert not repetitions.is_by_present_name(7, ONE)


FOUND = Inode(7, *(0,) * 22)
NOW = Stat(0o100600, 1, 0, 0, 0, 4096, 10, 8, 1, 5, 5, 5, 0, 7)


def look_up(
    repetitions: Repetitions, inode: Inode | None, caller: Caller, name: tuple[int, bytes] = (1, b"name")
) -> None:
    async def found() -> Entry:
        return Entry(inode, 0.0)

    trio.run(lambda: repetitions.look_up(found(), caller, name))


LINK = 1, b"link"


def test_a_link_counts_as_repeated_by_what_was_looked_up_since(
    metadata: InodeCache, repetitions: Repetitions, times: Times
) -> None:
    """The kernel has locked the directory, and drops names in it after the answer. What the thread does next may have
    left the kernel before. An append to a former file did, once in 15 times."""
    is_present = partial(repetitions.is_by_present_name, 7, ONE)

    async def main() -> None:
        await repetitions.expect(ONE, link=LINK)
        await trio.testing.wait_all_tasks_blocked()

    metadata.note_lost_name(7, 1, b"name")
    times.ns += 1
    trio.run(main)
    assert not is_present(link=LINK), "it was not looked up"
    look_up(repetitions, FOUND, ONE)
    look_up(repetitions, None, ONE, LINK)
    assert is_present(link=LINK)
    assert not is_present(link=(1, b"other")) and not is_present()
    assert not repetitions.is_by_present_name(7, OTHER, link=LINK)
    times.ns += 1
    metadata.note_lost_name(7, 1, b"another")
    assert not is_present(link=LINK), "it has lost a name since"
    look_up(repetitions, FOUND, ONE)
    assert is_present(link=LINK)
    look_up(repetitions, None, ONE, (1, b"directory"))
    assert not is_present(link=LINK), "the path led nowhere"


def is_reopened(repetitions: Repetitions, caller: Caller, size: int = FOUND.size) -> bool:
    return repetitions.is_reopened(7, caller)(size)


def fail_to_look_up(repetitions: Repetitions, name: bytes) -> None:
    async def entry() -> Entry:
        raise OSError(errno.ESTALE, "")

    async def main() -> None:
        with suppress(OSError):
            await repetitions.look_up(entry(), ONE, (1, name))

    trio.run(main)


def test_an_open_is_repeated_after_a_look_up_that_failed_on_its_path(repetitions: Repetitions) -> None:
    fail_to_look_up(repetitions, b"d")
    look_up(repetitions, FOUND, ONE, (1, b"f"))
    assert not is_reopened(repetitions, ONE), "it is another path"
    fail_to_look_up(repetitions, b"d")
    look_up(repetitions, FOUND._replace(number=3), ONE, (1, b"d"))
    look_up(repetitions, FOUND, ONE, (3, b"f"))
    assert is_reopened(repetitions, ONE)
    fail_to_look_up(repetitions, b"d")
    look_up(repetitions, FOUND, ONE, (1, b"d"))
    look_up(repetitions, FOUND._replace(number=8), ONE, (1, b"f"))
    assert not is_reopened(repetitions, ONE), "the path leads to another inode"


def test_after_attributes_that_failed_an_open_is_repeated_if_the_kernel_has_got_the_present_size(
    repetitions: Repetitions,
) -> None:
    """The request may have come by a descriptor. Before: the next open was not refused, and sendfile cut it off."""
    for size in (FOUND.size, FOUND.size + 1):
        with suppress(OSError), repetitions.on_the_way(ONE, 7):
            raise OSError(errno.ESTALE, "")
        look_up(repetitions, FOUND, ONE)
        assert is_reopened(repetitions, ONE, size) == (size == FOUND.size)
        fail_to_open(repetitions, 7)
        look_up(repetitions, FOUND, ONE)
        assert is_reopened(repetitions, ONE, size), "a file that grows all the time is opened"


def test_an_open_is_repeated_about_the_file_that_has_taken_the_name(repetitions: Repetitions) -> None:
    """By a rename, between the open and its repetition. Before: both files failed one open, so the job got ESTALE."""
    directory, new = FOUND._replace(number=3, mode=0o040755), FOUND._replace(number=8, mode=0o100600)
    for size in (new.size, new.size + 1):
        fail_to_open(repetitions, 7)
        look_up(repetitions, directory, ONE, (1, b"d"))
        assert not repetitions.is_reopened(8, ONE)(size)
        fail_to_open(repetitions, 7)
        look_up(repetitions, directory, ONE, (1, b"d"))
        look_up(repetitions, new, ONE, (3, b"f"))
        assert repetitions.is_reopened(8, ONE)(size) == (size == new.size)


def test_attributes_that_failed_do_not_prove_that_the_kernel_looks_the_name_up(
    metadata: InodeCache, repetitions: Repetitions, times: Times
) -> None:
    """truncate(2) and link(2) ignore the error. Before: they went to the former file."""
    metadata.note_lost_name(7, 1, b"name")
    times.ns += 1
    with suppress(OSError), repetitions.on_the_way(ONE, 7):
        raise OSError(errno.ESTALE, "")
    assert not repetitions.is_by_present_name(7, ONE)


def fail_to_open(repetitions: Repetitions, number: int) -> None:
    async def main() -> None:
        with suppress(OSError):
            async with repetitions.by_path(ONE, opens=number):
                raise OSError(errno.ESTALE, "")

    trio.run(main)


def test_an_open_is_repeated_at_once_by_the_thread_that_has_looked_the_inode_up(
    repetitions: Repetitions, times: Times
) -> None:
    fail_to_open(repetitions, 7)
    look_up(repetitions, FOUND, OTHER)
    assert not is_reopened(repetitions, OTHER), "another thread's open failed"
    fail_to_open(repetitions, 8)
    look_up(repetitions, FOUND, ONE)
    assert not is_reopened(repetitions, ONE), "another inode was opened"
    fail_to_open(repetitions, 7)
    look_up(repetitions, FOUND, ONE)
    look_up(repetitions, None, ONE)
    assert not is_reopened(repetitions, ONE), "the path led nowhere"
    for late_ns in (0, 1):
        fail_to_open(repetitions, 7)
        times.ns += REPEATED_WITHIN_NS - 1
        look_up(repetitions, FOUND, ONE)
        times.ns += REPEATED_WITHIN_NS - 1 + late_ns
        assert is_reopened(repetitions, ONE) == (not late_ns)
        assert not is_reopened(repetitions, ONE), "once"


def test_an_open_by_a_descriptor_is_repeated_without_a_look_up(repetitions: Repetitions) -> None:
    for number, caller, is_repeated in (7, ONE, True), (7, OTHER, False), (8, ONE, False):
        fail_to_open(repetitions, number)
        assert is_reopened(repetitions, caller) == is_repeated
        is_reopened(repetitions, ONE)  # forget it
    with suppress(OSError), repetitions.on_the_way(ONE, 7):
        raise OSError(errno.ESTALE, "")
    assert not is_reopened(repetitions, ONE), "no open has failed"


def test_processes_that_the_daemon_cannot_tell_apart_wait_until_their_calls_have_arrived(
    metadata: InodeCache, repetitions: Repetitions
) -> None:
    assert expect(repetitions, UNKNOWN) == 0
    metadata.note_lost_name(7, 1, b"name")
    assert expect(repetitions, UNKNOWN) == ANSWERED_NS / NANOSECONDS


def test_the_kernel_has_the_present_mode_after_estale_and_after_an_own_change(
    metadata: InodeCache, repetitions: Repetitions, kernel: Kernel, times: Times
) -> None:
    kernel.known.add(7)
    metadata.note_permissions(FOUND, NOW)
    times.ns += 1
    assert not repetitions.has_mode(7, ONE)
    assert require_mode(repetitions, ONE) == (errno.ESTALE, 0)
    assert kernel.attributes_of == [7]
    assert require_mode(repetitions, ONE) == (0, 0) and not repetitions.has_mode(7, OTHER)
    for caller in (OTHER, UNKNOWN):
        repetitions.changed(7, caller)
    assert repetitions.has_mode(7, OTHER) and not repetitions.has_mode(7, UNKNOWN)
    assert require_mode(repetitions, UNKNOWN) == (errno.ESTALE, ANSWERED_NS / NANOSECONDS)
    assert kernel.attributes_of == [7], "once for all: another one would make the kernel ignore answers"


def test_the_kernel_has_the_present_mode_after_a_look_up_unless_it_has_dropped_it_since(
    metadata: InodeCache, repetitions: Repetitions, kernel: Kernel, times: Times
) -> None:
    """It goes on by the former mode if it drops the attributes while it asks for them: it ignores the answer."""
    metadata.note_permissions(FOUND, NOW)
    look_up(repetitions, FOUND, ONE)
    assert not repetitions.has_mode(7, ONE), "it has not dropped the former mode"
    kernel.known.add(7)
    times.ns += 1
    kernel.attributes(7)
    assert not repetitions.has_mode(7, ONE), "it has dropped it after the look-up"
    times.ns += 1
    look_up(repetitions, FOUND, UNKNOWN)
    look_up(repetitions, FOUND, ONE)
    assert [repetitions.has_mode(7, caller) for caller in (ONE, OTHER, UNKNOWN)] == [True, False, False]
    times.ns += 1
    kernel.drop_soon([], [7])
    assert not repetitions.has_mode(7, ONE), "it has dropped it again"
    look_up(repetitions, FOUND, ONE)
    assert repetitions.has_mode(7, ONE)
    times.ns += 1
    metadata.note_permissions(FOUND, NOW)
    assert not repetitions.has_mode(7, ONE), "the mode has changed again"


def require_mode(repetitions: Repetitions, caller: Caller) -> tuple[int, float]:
    """Returns the errno, and how many seconds the answer waits."""

    async def main() -> tuple[int, float]:
        began_s = trio.current_time()
        try:
            await repetitions.require_mode(7, caller)
        except OSError as error:
            return error.errno or 0, trio.current_time() - began_s
        return 0, 0.0

    return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_threads_that_got_estale_are_bounded(metadata: InodeCache, repetitions: Repetitions) -> None:
    metadata.note_lost_name(7, 1, b"name")
    for thread in range(MOST_REPEATED + 1):
        expect(repetitions, Caller(0, 0, 1 + thread))
    assert [repetitions.is_by_present_name(7, each) for each in (ONE, OTHER)] == [False, True]

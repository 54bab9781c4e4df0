"""What becomes of a READ that the index has nothing for."""

import errno
import itertools
import os
import random
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachefs.contract.blob import SLAB_BYTES
from cachefs.contract.index import Table
from cachefs.contract.messages import Message
from cachefs.contract.shared import SharedFlag
from cachefs.fastpath import processes
from cachefs.fs.handles import FAST_HANDLE
from cachefs.options import Options
from cachefs.store.blob.blob import Blob
from cachefs.store.blob.record import record_bytes
from cachefs.store.index.records import IMMUTABLE, IMMUTABLE_ON_OPEN, PINNED, STALE, UNLINKED, YOUNG, pair_key
from cachefs.store.recovery import scan
from cachefs.system.clock import NANOSECONDS
from tests.fastpath.program import GETATTR, INTERRUPT, OPEN, READ, READ_IN, READDIR, SEED, THREADS, Program, running

pytestmark = pytest.mark.skipif(not processes.is_built(), reason="the fast path is not built")

KIB, MIB = 1 << 10, 1 << 20
OLD = Options(settle_ns=1)
"""No file is young."""
RESERVED_FETCHERS, OTHER_THREADS = 28, 4
SIZES = [1, 4096, 100_000, 128 * KIB, 128 * KIB + 1, MIB, MIB + 1, 3 * MIB + 5]


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    with running(tmp_path, OLD) as program:
        yield program


def check_blob(program: Program) -> None:
    """It has just what was reported, and a lost index can be rebuilt from it."""
    blob = Blob(program.blob, SEED)
    try:
        found = {(header.inode, header.file_offset, extent) for header, extent in scan(blob)}
    finally:
        blob.close()
    assert found == {(filled.inode, filled.offset, filled.extent) for filled in program.filled}


def files(program: Program, sizes: list[int]) -> dict[int, bytes]:
    contents = {number: os.urandom(size) for number, size in enumerate(sizes, start=10)}
    for number, data in contents.items():
        program.add(number, data)
    return contents


def test_what_was_fetched_once_is_a_hit_from_then_on(program: Program) -> None:
    contents = files(program, SIZES)
    for number, data in contents.items():
        assert program.read_whole(number, len(data)) == data
    total = sum(SIZES)
    program.until_appended(total)
    before = program.counters()
    assert before.hit_bytes + before.miss_bytes == total
    assert (before.corrupt, before.skipped_admissions, before.source_bytes) == (0, 0, total)
    assert before.source_opens == before.source_fstats == len(program.filled)
    for number in contents:
        (program.source / f"f{number}").unlink()
    for number, data in contents.items():
        assert program.read_whole(number, len(data)) == data
        assert program.read(number, len(data) - 1, 9) == data[-1:]
        assert program.read(number, len(data), 9) == b""
    after = program.counters()
    assert after.misses == before.misses and after.source_opens == before.source_opens
    assert after.hit_bytes - before.hit_bytes == after.disk_bytes - before.disk_bytes == total + len(SIZES)
    assert program.passed == []
    assert program.shared["committed_bytes"] == sum(filled.extent.record_bytes for filled in program.filled)
    check_blob(program)


def test_a_burst_of_readers_is_answered_once_each_and_fetches_once(program: Program) -> None:
    """Large and small files, parts that overlap, and many more readers than threads."""
    contents = files(program, [5000] * 60 + [3 * MIB + 5, 4 * MIB])
    draw = random.Random(1)
    asked = []
    for _ in range(900):
        number = draw.choice(list(contents))
        offset = draw.randrange(len(contents[number]))
        size = draw.choice([1, 4096, 128 * KIB])
        asked.append((number, offset, size, program.ask(number, offset, size, uid=draw.randrange(3))))
    for number, offset, size, unique in asked:
        assert program.answer(unique) == (0, contents[number][offset : offset + size])
    program.until_idle()
    assert program.answered_twice() == []
    counters = program.counters()
    assert counters.hits + counters.misses == len(asked)
    assert counters.source_bytes == sum(filled.extent.length for filled in program.filled), "each byte once"
    assert len({(filled.inode, filled.offset) for filled in program.filled}) == len(program.filled)
    for number, data in contents.items():
        assert program.read_whole(number, len(data)) == data
    program.until_appended(sum(map(len, contents.values())))
    check_blob(program)


def test_records_do_not_cross_the_end_of_a_slab(program: Program) -> None:
    sizes = [MIB] * 70 + [70_001] * 60
    contents = files(program, sizes)
    for number, data in contents.items():
        assert program.read_whole(number, len(data)) == data
        program.wait_until(lambda: program.shared["buffered_bytes"] < 16 * MIB)  # the disk may be slow
    program.until_appended(sum(sizes))
    slabs = {filled.extent.blob_offset // SLAB_BYTES for filled in program.filled}
    assert slabs == {0, 1}
    check_blob(program)
    assert program.blob.stat().st_blocks * 512 < program.shared["committed_bytes"] + 9 * MIB, "what it allocates ahead"


def test_beyond_the_size_of_the_cache_nothing_is_kept(tmp_path: Path) -> None:
    room = 3 * record_bytes(10_000) + record_bytes(1)
    with running(tmp_path, OLD, capacity=room) as program:
        contents = files(program, [10_000] * 8)
        for number, data in contents.items():
            assert program.read(number, 0, 10_000) == data
            program.until_idle()
            assert program.shared["committed_bytes"] <= room
        assert len(program.filled) == 3
        assert program.counters().skipped_admissions == 5
        assert program.read(17, 0, 10_000) == contents[17]
        program.add(50, b"x")
        assert program.read(50, 0, 9) == b"x"
        program.until_appended(30_001)
        assert program.shared["committed_bytes"] == room


def test_of_what_will_not_be_kept_no_more_is_fetched_than_is_asked_for(tmp_path: Path) -> None:
    with running(tmp_path, OLD, capacity=record_bytes(1)) as program:
        contents = files(program, [100_000, 3 * MIB])
        for number, data in contents.items():
            for offset in (0, 50_000):
                assert program.read(number, offset, 100) == data[offset : offset + 100]
        counters = program.counters()
        assert counters.source_bytes == 400 and counters.skipped_admissions == counters.misses == 4
        assert program.filled == []


def test_a_daemon_that_evicts_is_asked_for_room(tmp_path: Path) -> None:
    room = 3 * record_bytes(10_000)
    with running(tmp_path, OLD, capacity=room, flags=SharedFlag.EVICTS) as program:

        def make_room() -> bool:
            program.shared["committed_bytes"] -= record_bytes(10_000)
            return True

        program.make_room = make_room
        contents = files(program, [10_000] * 8)
        for number, data in contents.items():
            assert program.read(number, 0, 10_000) == data
            program.until_appended(10_000 * (number - 9))
            assert program.shared["committed_bytes"] <= room
        assert [kind for kind, _, _, _ in program.told].count(Message.ROOM) == 5
        assert program.counters().skipped_admissions == 0


def test_what_was_written_together_is_kept_where_the_next_one_needs_room(tmp_path: Path) -> None:
    size = record_bytes(10_000)
    with running(tmp_path, OLD, capacity=400 * size, flags=SharedFlag.EVICTS) as program:

        def make_room() -> bool:
            program.shared["committed_bytes"] -= 3 * size
            return True

        program.make_room = make_room
        program.shared["committed_bytes"] = 395 * size  # of other files
        contents = files(program, [10_000] * 100)
        for start in range(10, 110, 10):
            asked = {number: program.ask(number, 0, 10_000) for number in range(start, start + 10)}
            for number, unique in asked.items():
                assert program.answer(unique) == (0, contents[number])
            program.until_idle()
        assert program.counters().skipped_admissions == 0
        assert len(program.filled) == 100
        check_blob(program)


def test_where_nothing_may_go_what_was_read_is_not_kept(tmp_path: Path) -> None:
    room = 3 * record_bytes(10_000)
    with running(tmp_path, OLD, capacity=room, flags=SharedFlag.EVICTS) as program:
        contents = files(program, [10_000] * 4)
        for number, data in contents.items():
            assert program.read(number, 0, 10_000) == data
            program.until_idle()
        assert [kind for kind, _, _, _ in program.told].count(Message.ROOM) == 1
        assert program.counters().skipped_admissions == 1
        assert len(program.filled) == 3
        assert program.shared["committed_bytes"] == room
        check_blob(program)


def test_a_daemon_that_does_not_answer_keeps_nobody_waiting_for_room(tmp_path: Path) -> None:
    with running(tmp_path, OLD, capacity=3 * record_bytes(10_000), flags=SharedFlag.EVICTS) as program:
        program.make_room = lambda: False
        contents = files(program, [10_000] * 4)
        for number, data in contents.items():
            assert program.read(number, 0, 10_000) == data
            program.until_idle()
        assert program.counters().skipped_admissions == 1 and len(program.filled) == 3


def test_a_disk_that_is_full_is_reported_and_readers_do_not_notice(program: Program) -> None:
    contents = files(program, [10_000] * 4)
    assert program.read(10, 0, 10_000) == contents[10]
    program.until_appended(10_000)
    resource.prlimit(program.pid, resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
    assert program.read(11, 0, 10_000) == contents[11]
    program.wait_until(lambda: Message.REFUSED in [kind for kind, _, _, _ in program.told])
    program.until_idle()
    ((_, error, _, _),) = [each for each in program.told if each[0] is Message.REFUSED]
    assert error == errno.EFBIG
    assert [filled.inode for filled in program.filled] == [10] and program.shared["pending_bytes"] == 0
    resource.prlimit(program.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    for number in (10, 11, 12):
        assert program.read(number, 0, 10_000) == contents[number]
    program.until_appended(30_000)
    first, *others = [filled.extent.blob_offset // SLAB_BYTES for filled in program.filled]
    assert len(others) == 2 and first not in others, "not behind half a write"
    check_blob(program)


@pytest.mark.parametrize("kept", [0, 4, 8, 24, 39])
def test_an_extent_that_is_cut_off_is_none(program: Program, kept: int) -> None:
    """What was read before must not stand in for the rest of it."""
    good, cut = files(program, [5000, 5000]).items()
    assert program.read(good[0], 0, 5000) == good[1]
    program.until_appended(5000)
    program.commits = False
    value = program.filled[0].extent.pack()
    program.put(Table.EXTENTS, pair_key(cut[0], 0), value[:kept])
    for _ in range(50):
        assert program.read(good[0], 0, 5000) == good[1]
        assert program.read(cut[0], 0, 5000) == cut[1]


CHANGES = {
    "replaced": lambda path: (path.rename(path.with_name("other")) and None) or path.write_bytes(b"other" * 2000),
    "written": lambda path: path.write_bytes(b"other" * 2000),
    "shorter": lambda path: os.truncate(path, 1),
    "gone": lambda path: path.unlink(),
    "a symbolic link": lambda path: (path.rename(path.with_name("other")) and None) or path.symlink_to("other"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_version_is_left_to_python(program: Program, change: str) -> None:
    program.add(10, b"first" * 2000)
    CHANGES[change](program.source / "f10")
    program.python_says = errno.ESTALE
    asked = [program.ask(10, offset, 100) for offset in (0, 100, 9000)]
    assert [program.answer(unique) for unique in asked] == [(errno.ESTALE, b"")] * 3
    assert [opcode for opcode, _, _ in program.passed] == [READ] * 3
    program.until_idle()
    assert program.filled == [] and program.counters().misses == 0


@pytest.mark.parametrize("change", CHANGES)
def test_another_version_of_a_young_file_is_left_to_python(tmp_path: Path, change: str) -> None:
    with running(tmp_path, Options(settle_ns=2 * NANOSECONDS)) as program:
        program.add(10, b"first" * 2000, PINNED | IMMUTABLE | YOUNG)
        CHANGES[change](program.source / "f10")
        program.python_says = errno.ESTALE
        assert program.answer(program.ask(10, 0, 100)) == (errno.ESTALE, b"")
        assert program.counters().young_reads == program.shared["young_written"] == 0


@pytest.mark.parametrize(
    "flags", [0, IMMUTABLE, PINNED | STALE, PINNED | IMMUTABLE | UNLINKED, PINNED | IMMUTABLE | STALE]
)
def test_what_is_not_immutable_or_has_no_path_is_left_to_python(program: Program, flags: int) -> None:
    program.add(10, b"data", flags)
    unique = program.ask(10, 0, 4)
    program.wait_until(lambda: bool(program.passed))
    program.answer_for_python(program.passed[0][1], 0, b"data")
    assert program.answer(unique) == (0, b"data")
    assert program.counters().source_opens == 0


def test_a_file_becomes_immutable_by_an_open_of_ours_alone(program: Program) -> None:
    """Another handle is Python's: of a writer, or of a file whose data are not to be cached."""
    program.add(10, b"data", IMMUTABLE_ON_OPEN)
    program.python_says = errno.EIO
    assert program.answer(program.ask(10, 0, 4, handle=5)) == (errno.EIO, b"")
    assert program.counters().source_opens == 0
    assert program.answer(program.ask(10, 0, 4, handle=FAST_HANDLE | 10)) == (0, b"data")
    program.until_appended(4)


@pytest.mark.parametrize("excess", [0, 1, 50 * KIB])
def test_an_answer_in_parts_is_no_longer_than_what_was_asked_for(program: Program, excess: int) -> None:
    """Of the last part, which is shorter than the others: what is too much would lie behind the buffer."""
    asked = program.ask(99, 0, 200 * KIB)
    program.wait_until(lambda: len(program.passed) == 2)
    for (_, unique, _), length in zip(program.passed, (128 * KIB, 72 * KIB + excess), strict=True):
        program.answer_for_python(unique, 0, b"x" * length)
    assert program.answer(asked) == ((errno.EIO, b"") if excess else (0, b"x" * 200 * KIB))


@pytest.mark.parametrize(
    "offset", [4096, SLAB_BYTES + 1, (1 << 63) - SLAB_BYTES, (1 << 63) - 1, (1 << 64) - SLAB_BYTES + 8]
)
def test_a_slab_that_cannot_be_one_is_not_used(program: Program, offset: int) -> None:
    """Granted by a daemon that is wrong: the fast path asks for another one, and lives."""
    program.grants = False
    contents = files(program, [5000, 6000])
    program.tell(Message.SLAB, offset)
    assert program.read(10, 0, 9000) == contents[10]
    program.grants = True
    program.grant()
    assert program.read(11, 0, 9000) == contents[11]
    program.until_appended(11_000)
    assert {filled.extent.blob_offset // SLAB_BYTES for filled in program.filled} <= set(range(program._slabs))
    check_blob(program)


@pytest.mark.parametrize(("asked", "passed"), [(4096, 4096), (128 * KIB, 128 * KIB), (MIB, 128 * KIB)])
def test_a_listing_that_is_passed_on_is_no_longer_than_a_message(program: Program, asked: int, passed: int) -> None:
    program.python_says = errno.EIO
    body = READ_IN.pack(0, 0, asked, 0, 0, 0, 0)
    assert program.answer(program.send(READDIR, 99, body)) == (errno.EIO, b"")
    ((opcode, _, got),) = program.passed
    assert opcode == READDIR and READ_IN.unpack(got)[2] == passed


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDWR, os.O_RDONLY | os.O_TRUNC])
def test_python_refuses_to_open_an_immutable_file_for_writing(program: Program, flags: int) -> None:
    """It logs the refusal."""
    program.add(10, b"data", PINNED | IMMUTABLE)
    program.python_says = errno.EPERM
    opened = program.send(OPEN, 10, flags.to_bytes(4, "little") + bytes(4))
    assert program.answer(opened) == (errno.EPERM, b"")
    assert [opcode for opcode, _, _ in program.passed] == [OPEN]


@pytest.mark.parametrize("size", [4096, 128 * KIB, MIB - 1, MIB])
def test_a_hit_of_any_size_up_to_the_largest_message_is_answered_at_once(program: Program, size: int) -> None:
    data = os.urandom(MIB)
    program.add(10, data)
    assert program.read(10, 0, MIB) == data
    program.until_appended(MIB)
    (program.source / "f10").unlink()
    assert program.read(10, 0, size) == data[:size]
    assert program.read(10, MIB - size, size) == data[MIB - size :]
    assert program.passed == []


def test_data_of_a_young_file_are_given_out_and_not_kept(tmp_path: Path) -> None:
    with running(tmp_path, Options(settle_ns=2 * NANOSECONDS)) as program:
        began_ns = time.monotonic_ns()
        record = program.add(10, b"young", PINNED | IMMUTABLE | YOUNG)
        for count in (1, 2):
            assert program.read(10, 0, 9) == b"young"
            assert program.shared["young_written"] == count == program.counters().young_reads
        assert program.shared["buffered_bytes"] == program.shared["pending_bytes"] == 0 == len(program.filled)
        for number, due_ns in program.shared.young(0):
            assert number == record.number and due_ns > began_ns + 1.9 * NANOSECONDS
        program.prefetch((10, 0))
        program.wait_until(lambda: program.shared["prefetch_done"] == 1)
        assert program.counters().prefetched == 0
        assert program.counters().skipped_admissions == 0


def test_prefetch_requests_are_fetched_and_counted(program: Program) -> None:
    contents = files(program, [10_000] * 20 + [3 * MIB + 5])
    large = max(contents)
    program.add(90, b"not immutable", PINNED)
    requests = [(number, 0) for number in contents] + [
        (large, MIB),
        (large, 2 * MIB + 9),
        (large, 99 * MIB),
        (90, 0),
        (91, 0),
    ]
    program.prefetch(*requests)
    program.wait_until(lambda: program.shared["prefetch_done"] == len(requests))
    total = sum(map(len, contents.values()))
    program.until_appended(program.counters().source_bytes)
    before = program.counters()
    assert before.prefetched == len(program.filled)
    for number, data in contents.items():
        assert program.read_whole(number, len(data)) == data
    after = program.counters()
    assert after.source_bytes == total
    assert after.misses <= 2, "of the end of the large file at most"
    program.prefetch((10, 0))
    program.wait_until(lambda: program.shared["prefetch_done"] == len(requests) + 1)
    assert program.counters().prefetched == before.prefetched, "it is there"
    check_blob(program)


def test_large_files_are_read_ahead(tmp_path: Path) -> None:
    with running(tmp_path, OLD, flags=SharedFlag.READS_AHEAD) as program:
        data = os.urandom(24 * MIB)
        program.add(10, data)
        for offset in range(0, 13 * MIB, 128 * KIB):
            assert program.read(10, offset, 128 * KIB) == data[offset : offset + 128 * KIB]
        program.until_idle()
        fetched = sorted((filled.offset, filled.offset + filled.extent.length) for filled in program.filled)
        assert fetched[0][0] == 0 and fetched[-1][1] > 13 * MIB
        assert all(end == start for (_, end), (start, _) in itertools.pairwise(fetched))
        assert program.counters().source_bytes == fetched[-1][1]


def test_who_reads_on_and_on_finds_what_follows(tmp_path: Path) -> None:
    """What was read ahead, and is asked for, has the next range read ahead."""
    with running(tmp_path, OLD, flags=SharedFlag.READS_AHEAD) as program:
        program.commits = False  # what is fetched stays where readers look first
        data = os.urandom(40 * MIB)
        program.add(10, data)
        misses = []
        for offset in range(0, len(data), MIB):
            assert program.read(10, offset, 4096) == data[offset : offset + 4096]
            program.wait_until(lambda: program.shared["buffered_bytes"] == 0)
            misses.append(program.counters().misses)
        assert misses[-1] == misses[10], "a run is one when three chunks have been read"
        counters = program.counters()
        assert counters.source_bytes == len(data)
        assert counters.disk_bytes == counters.hit_bytes > 0


def test_who_reads_here_and_there_has_nothing_read_ahead(tmp_path: Path) -> None:
    with running(tmp_path, OLD, flags=SharedFlag.READS_AHEAD) as program:
        program.add(10, os.urandom(40 * MIB))
        for offset in (20 * MIB, 31 * MIB, 3 * MIB):
            program.read(10, offset, 4096)
            program.until_idle()
        assert program.counters().source_bytes == 3 * 4096


def test_a_reader_who_is_interrupted_and_lives_waits_on(tmp_path: Path) -> None:
    """For those who are being killed see test_fastpath_hazards.py (06)."""
    with running(tmp_path, Options(settle_ns=1, simulate_latency_s=0.3)) as program:
        program.add(10, b"data")
        asked = [program.ask(10, 0, 4) for _ in range(3)]
        program.send(INTERRUPT, 0, asked[1].to_bytes(8, "little"))
        assert [program.answer(unique) for unique in asked] == [(0, b"data")] * 3
        assert program.answered_twice() == [] and program.counters().misses == 3


def test_a_source_that_hangs_times_out_and_what_comes_late_is_dropped(tmp_path: Path) -> None:
    with running(tmp_path, Options(settle_ns=1, source_timeout_s=0.3, simulate_latency_s=0.8)) as program:
        data = os.urandom(5000)
        program.add(10, data)
        asked = [program.ask(10, 0, 5000) for _ in range(3)]
        assert [program.answer(unique) for unique in asked] == [(errno.ETIMEDOUT, b"")] * 3
        assert program.shared["stuck"] == 1 and program.counters().source_timeouts == 3
        program.wait_until(lambda: program.shared["stuck"] == 0)
        program.until_idle()
        assert program.filled == [] and program.counters().misses == 0
        program.shared["source_timeout_ns"] = 10 * NANOSECONDS
        assert program.read(10, 0, 5000) == data
        program.until_appended(5000)
        assert program.answered_twice() == []


def test_where_all_threads_are_stuck_readers_fail_at_once_and_one_a_second_is_python_s(tmp_path: Path) -> None:
    options = Options(settle_ns=1, source_timeout_s=0.3, simulate_latency_s=5.0, fetch_threads=2)
    with running(tmp_path, options) as program:
        program.python_says = errno.EIO
        files(program, [5000] * 100)
        asked = [program.ask(number, 0, 100) for number in range(10, 70)]
        answers = [program.answer(unique) for unique in asked]
        assert answers.count((errno.ETIMEDOUT, b"")) == len(asked) - len(program.passed)
        stuck, before = program.shared["stuck"], len(program.passed)
        began = time.monotonic()
        late = [program.ask(number, 0, 100) for number in range(70, 110)]
        answers = [program.answer(unique) for unique in late]
        taken = time.monotonic() - began
        assert program.shared["stuck"] == stuck, "nobody waits for the source"
        probes = len(program.passed) - before
        assert 1 <= probes <= 1 + taken
        assert (answers.count((errno.EIO, b"")), answers.count((errno.ETIMEDOUT, b""))) == (probes, len(late) - probes)


@pytest.mark.parametrize("fetch_threads", [1, 2, 5, 64])
def test_there_are_as_many_threads_as_are_wanted(tmp_path: Path, fetch_threads: int) -> None:
    """They serve and fetch: four for every three of the daemon, and some in reserve."""
    with running(tmp_path, Options(settle_ns=1, fetch_threads=fetch_threads)) as program:
        program.add(10, b"data")
        assert program.read(10, 0, 4) == b"data"
        wanted = THREADS + (fetch_threads * 4 + 2) // 3 + RESERVED_FETCHERS + OTHER_THREADS
        assert len(list(Path(f"/proc/{program.pid}/task").iterdir())) == wanted


def test_without_threads_that_fetch_it_does_not_start(program: Program) -> None:
    program.end()
    program.shared["fetch_threads"] = 0
    program.start()
    assert program.wait() != 0


def test_the_next_daemon_is_told_again_what_was_not_committed(program: Program) -> None:
    contents = files(program, [5000, 6000, 7000])
    program.commits = False
    for number, data in contents.items():
        assert program.read(number, 0, 9000) == data
    program.wait_until(lambda: len(program.filled) == 3)
    assert program.shared["pending_bytes"] == sum(record_bytes(len(data)) for data in contents.values())
    told, program.filled = program.filled, []
    program.detach()
    assert program.read(10, 0, 9000) == contents[10], "from the blob"
    program.commits = True
    program.attach()
    program.wait_until(lambda: Message.ALL_REPORTED in [kind for kind, _, _, _ in program.told])
    assert program.filled == told
    program.wait_until(lambda: program.shared["pending_bytes"] == 0)
    program.add(50, b"x")
    assert program.read(50, 0, 9) == b"x"
    program.wait_until(lambda: program.filled[-1].inode == 50)
    first, last = told[0].extent.blob_offset, program.filled[-1].extent.blob_offset
    assert first // SLAB_BYTES != last // SLAB_BYTES, "the slab was another daemon's"


def test_the_next_daemon_hears_of_what_came_first_first(tmp_path: Path) -> None:
    """A number is resolved together with all before it. Out of order, the first would be forgotten."""
    with running(tmp_path, Options(settle_ns=1, simulate_latency_s=0.3)) as program:
        contents = files(program, [5000, 6000, 7000])
        program.commits = False
        for number in (10, 11):
            assert program.read(number, 0, 9000) == contents[number]
        program.wait_until(lambda: len(program.filled) == 2)
        program.filled = []
        under_way = program.ask(12, 0, 9000)
        program.wait_until(lambda: program.shared["buffered_bytes"] > 0)
        program.detach()
        assert program.answer(under_way) == (0, contents[12])
        program.attach()
        program.wait_until(lambda: Message.ALL_REPORTED in [kind for kind, _, _, _ in program.told])
        program.wait_until(lambda: len(program.filled) == 3)
        assert [filled.inode for filled in program.filled] == [10, 11, 12]


def test_without_a_daemon_nothing_new_is_kept_and_what_was_begun_waits_for_it(tmp_path: Path) -> None:
    with running(tmp_path, OLD, grants=False) as program:
        contents = files(program, [5000])
        assert program.read(10, 0, 9000) == contents[10]
        program.detach()
        later = itertools.count(11)
        while not program.counters().skipped_admissions:  # it has noticed
            number = next(later)
            program.add(number, b"x")
            assert program.read(number, 0, 9000) == b"x"
        assert program.read(10, 0, 9000) == contents[10] and program.counters().hits == 1
        program.grants = True
        program.attach()
        program.until_idle()
        assert 10 in {each.inode for each in program.filled}  # readers are answered first: the order is open


def test_a_daemon_that_grants_nothing_keeps_nobody_waiting(tmp_path: Path) -> None:
    with running(tmp_path, OLD, grants=False) as program:
        contents = files(program, [5000] * 2)
        for number, data in contents.items():
            assert program.read(number, 0, 9000) == data
        program.wait_until(lambda: program.counters().skipped_admissions == 2)
        program.until_idle()
        assert program.filled == []
        program.grant()
        assert program.read(10, 0, 9000) == contents[10]
        program.until_appended(5000)


def test_many_small_files_that_waited_for_a_slab(tmp_path: Path) -> None:
    """More than one batch has room for, and than one message has for their reports."""
    with running(tmp_path, OLD, grants=False) as program:
        contents = files(program, [10 + number for number in range(700)])
        asked = {number: program.ask(number, 0, 9000) for number in contents}
        program.grants = True
        program.grant()
        for number, unique in asked.items():
            assert program.answer(unique) == (0, contents[number])
        program.until_appended(sum(map(len, contents.values())))
        assert {filled.inode for filled in program.filled} == contents.keys()
        for number, data in contents.items():
            assert program.read(number, 0, 9000) == data
        assert program.counters().misses == 700
        check_blob(program)


def test_what_is_in_its_place_is_reported_before_the_next_slab_comes(tmp_path: Path) -> None:
    with running(tmp_path, OLD, grants=False) as program:
        program.grant()
        first = files(program, [MIB] * 63)
        for number, data in first.items():
            assert program.read_whole(number, len(data)) == data
            program.wait_until(lambda: program.shared["buffered_bytes"] < 16 * MIB)
        program.until_appended(63 * MIB)
        later = {number: os.urandom(100_000) for number in range(100, 120)}
        for number, data in later.items():
            program.add(number, data)
        for unique in [program.ask(number, 0, 100_000) for number in later]:
            assert program.answer(unique)[0] == 0
        program.wait_until(lambda: len(program.filled) > len(first) and program.shared["buffered_bytes"] > 0)
        fit = [filled.inode for filled in program.filled[len(first) :]]
        program.grant()
        program.until_appended(63 * MIB + 20 * 100_000)
        assert 0 < len(fit) < 20
        check_blob(program)


def test_one_that_ends_writes_and_reports_what_it_has_taken(program: Program) -> None:
    contents = files(program, [5000] * 40)
    asked = {number: program.ask(number, 0, 9000) for number in contents}
    for number, unique in asked.items():
        assert program.answer(unique) == (0, contents[number])
    assert program.end() == 0
    program.wait_until(lambda: len(program.filled) == 40)
    check_blob(program)
    assert program.shared["pid"] == program.pid


def test_a_successor_goes_on_with_the_same_memory(program: Program) -> None:
    contents = files(program, [5000, 6000])
    assert program.read(10, 0, 9000) == contents[10]
    program.until_appended(5000)
    waiting = program.send(GETATTR, 999, bytes(16))
    program.wait_until(lambda: bool(program.passed))
    program.end(9)
    program.told.clear()
    program.start()
    program.attach(same=True)
    assert program.read(10, 0, 9000) == contents[10] and program.counters().source_opens == 1
    assert program.read(11, 0, 9000) == contents[11]
    program.answer_for_python(program.passed[-1][1], errno.ESTALE)
    assert program.answer(waiting) == (errno.ESTALE, b"")
    program.until_appended(11_000)


def test_damage_in_a_part_of_a_large_file_is_read_from_the_source(program: Program) -> None:
    data = os.urandom(3 * MIB)
    program.add(10, data)
    assert program.read_whole(10, len(data)) == data
    program.until_appended(len(data))
    for place in (5, MIB + 5, len(data) - 5):
        filled = next(each for each in program.filled if each.offset <= place < each.offset + each.extent.length)
        with program.blob.open("r+b") as blob:
            blob.seek(filled.extent.blob_offset + place - filled.offset)
            blob.write(bytes([data[place] ^ 1]))
        assert program.read(10, place - 5, 10) == data[place - 5 : place + 5]
    assert program.counters().corrupt > 0


def test_damage_in_the_blob_is_reported_and_read_from_the_source(program: Program) -> None:
    data = os.urandom(3 * 128 * KIB)
    program.add(10, data)
    assert program.read_whole(10, len(data)) == data
    program.until_appended(len(data))
    (filled,) = program.filled
    with program.blob.open("r+b") as blob:
        blob.seek(filled.extent.blob_offset + 2 * 128 * KIB + 5)
        blob.write(bytes([data[2 * 128 * KIB + 5] ^ 1]))
    assert program.read(10, 0, 100) == data[:100], "another block is sound"
    before = program.counters()
    assert program.read(10, 2 * 128 * KIB, 128 * KIB) == data[2 * 128 * KIB :]
    after = program.counters()
    assert (after.corrupt - before.corrupt, after.misses - before.misses) == (1, 1)
    program.wait_until(lambda: Message.CORRUPT in [kind for kind, _, _, _ in program.told])
    ((_, number, offset, where),) = [each for each in program.told if each[0] is Message.CORRUPT]
    assert (number, offset, int.from_bytes(where, "little")) == (10, 0, filled.extent.blob_offset)


def test_a_failure_that_repeats_is_logged_once_a_minute(tmp_path: Path) -> None:
    """It is in the daemon's log, whose size has a limit. Here no answer can be sent."""
    with open(tmp_path / "log", "wb") as log, running(tmp_path, OLD, log=log.fileno()) as program:
        program.add(2, b"data")
        assert program.read(2, 0, 4) == b"data"
        program.until_idle()
        program.ignore_answers()
        before = program.counters().answered
        for _ in range(100):
            program.ask(2, 0, 4)
        program.wait_until(lambda: program.counters().answered >= before + 100)
        program.end()
    assert (tmp_path / "log").read_text() == "fast path: cannot answer the kernel: Broken pipe\n"

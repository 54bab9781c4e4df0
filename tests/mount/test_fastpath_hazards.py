"""The hazards that only a fast path has, with their numbers in the names. The others: test_hazards.py."""

import errno
import mmap
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cachefs.contract.index import Table
from cachefs.store.index.environment import Environment
from cachefs.store.index.records import inode_key
from tests.conftest import Mount, cachefs, contents, raises_errno, settle, stuck_threads, wait_for

MakeMount = Callable[..., Mount]
fork = multiprocessing.get_context("fork")
pytestmark = pytest.mark.fastpath
BLOCK = 128 << 10
CHUNK = 4 << 20


def passed(m: Mount, operation: str) -> int:
    return int(m.status()["fastpath"]["passed"].get(operation, 0))


def calls_passed(m: Mount) -> dict[str, int]:
    """Without requests that no caller waits for: they may arrive at any time."""
    passed_on = m.status()["fastpath"]["passed"]
    return {name: count for name, count in passed_on.items() if name not in ("forget", "release", "releasedir")}


def test_02_handles_go_back_to_whoever_gave_them(mount: MakeMount, source: Path) -> None:
    m = mount(source)
    path = m.path / "d0/new"
    writer = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.write(writer, b"first")
    reader = os.open(path, os.O_RDONLY)  # Python's: the file is mutable
    os.write(writer, b" second")
    assert os.read(reader, 100) == b"first second"
    for fd in (writer, reader):
        os.close(fd)
    assert path.read_bytes() == b"first second"
    wait_for(lambda: passed(m, "release"), lambda count: count == 3)  # close() does not wait for them
    settle()
    m.remount()
    path, content = m.path / "d0/f00000", (source / "d0/f00000").read_bytes()
    assert path.read_bytes() == content  # makes it immutable, by a report that Python may see after this
    raises_errno(errno.EPERM, lambda: os.open(path, os.O_WRONLY))  # and before this, which arrives behind it
    assert passed(m, "open") == 2  # the report, and the writer
    for _ in range(50):
        assert path.read_bytes() == content  # the fast path's own handles
    raises_errno(errno.EPERM, lambda: os.open(path, os.O_WRONLY))
    assert (passed(m, "open"), passed(m, "release")) == (3, 0)


def test_05_reads_and_writes_larger_than_a_message(mount: MakeMount, source: Path) -> None:
    """A READ of 1 MiB that Python answers comes in parts of 128 KiB, the last one short; with errors too."""
    content = random.Random(5).randbytes(3 * (1 << 20) + 12_345)
    m = mount(source, "--mutable", "*.log", "--attr-timeout", "0")
    path = m.path / "large.log"
    path.write_bytes(content)
    m.drop_caches()
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    buffer = bytearray(4 << 20)
    assert os.preadv(fd, [memoryview(buffer)[: 1 << 20]], 1 << 20) == 1 << 20
    assert buffer[: 1 << 20] == content[1 << 20 : 2 << 20]
    assert os.preadv(fd, [buffer], 0) == len(content)
    assert buffer[: len(content)] == content
    assert os.preadv(fd, [buffer], len(content) + (1 << 20)) == 0
    os.truncate(source / "large.log", 5000)
    assert os.preadv(fd, [buffer], 0) == 5000
    os.close(fd)
    names = {f"{'long-name-' * 20}{number:05}" for number in range(2000)}  # 400 KB of names
    (source / "wide").mkdir()
    for name in names:
        (source / "wide" / name).touch()
    wait_for(lambda: set(os.listdir(m.path / "wide")), lambda listed: listed == names)


def list_with_a_handler(path: Path, results: Any) -> None:
    """(names, or the error; signals that the handler saw)"""
    signals: list[int] = []
    signal.signal(signal.SIGALRM, lambda number, _: signals.append(number))
    try:
        results.put((sorted(os.listdir(path)), signals))
    except OSError as error:
        results.put((error.errno, signals))


@pytest.mark.promise("LC-1")
@pytest.mark.parametrize("before", [[], [signal.SIGALRM]], ids=["at once", "after another signal"])
def test_06_who_is_killed_dies_though_the_source_hangs(
    mount: MakeMount, faulty: tuple[Path, Path], before: list[int]
) -> None:
    source, faults = faulty
    m = mount(source, "--read-only", "--source-timeout", "20")
    os.stat(m.path / "d1")
    (faults / "hang").touch()
    process = fork.Process(target=list_with_a_handler, args=(m.path / "d1", fork.Queue()))
    process.start()
    wait_for(lambda: passed(m, "readdirplus") + passed(m, "readdir"), bool)
    assert process.pid
    started = time.monotonic()
    for number in [*before, signal.SIGKILL]:
        os.kill(process.pid, number)
        time.sleep(0.3)  # two signals at once would be one interrupt
    process.join(10)
    assert process.exitcode == -signal.SIGKILL and time.monotonic() - started < 5
    assert passed(m, "interrupt") == 0


def read_into_the_page_cache(path: Path) -> None:
    path.read_bytes()


def read_in_a_page_fault(path: Path) -> None:
    """Of one page, for which the kernel waits."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
        pages.madvise(mmap.MADV_RANDOM)
        assert pages[:1]


def read_past_the_page_cache(path: Path) -> None:
    os.preadv(os.open(path, os.O_RDONLY | os.O_DIRECT), [mmap.mmap(-1, 4096)], 0)


@pytest.mark.promise("LC-1")
@pytest.mark.parametrize("read", [read_into_the_page_cache, read_in_a_page_fault, read_past_the_page_cache])
def test_06_who_is_killed_while_he_reads_dies_though_the_source_hangs(
    mount: MakeMount, faulty: tuple[Path, Path], read: Callable[[Path], None]
) -> None:
    """Past the page cache, at the source time-out: the kernel sends no INTERRUPT before. Others get their data."""
    source, faults = faulty
    m = mount(source, "--read-only", "--source-timeout", "3" if read is read_past_the_page_cache else "20")
    file = next(path for path in sorted((source / "d1").iterdir()) if path.stat().st_size > 0)
    path = m.path / "d1" / file.name
    os.stat(path)
    fastpath = int(m.status()["fastpath"]["pid"])
    (faults / "hang").touch()
    readers = [fork.Process(target=read, args=(path,)) for _ in range(2)]
    for each in readers:
        each.start()
    wait_for(lambda: stuck_threads(fastpath), bool)
    started = time.monotonic()
    assert readers[0].pid
    os.kill(readers[0].pid, signal.SIGKILL)
    readers[0].join(10)
    assert readers[0].exitcode == -signal.SIGKILL and time.monotonic() - started < 5
    if read is not read_past_the_page_cache:
        assert readers[1].is_alive()
    (faults / "hang").unlink()
    readers[1].join(20)
    assert read is read_past_the_page_cache or readers[1].exitcode == 0
    wait_for(path.read_bytes, lambda data: data == file.read_bytes())


@pytest.mark.promise("LC-1")
def test_06_who_has_a_handler_waits_on(mount: MakeMount, faulty: tuple[Path, Path]) -> None:
    """A job whose children end (SIGCHLD) is not prepared for EINTR from a file system."""
    source, faults = faulty
    m = mount(source, "--read-only", "--source-timeout", "20")
    os.stat(m.path / "d1")
    (faults / "hang").touch()
    results = fork.Queue()
    process = fork.Process(target=list_with_a_handler, args=(m.path / "d1", results))
    process.start()
    wait_for(lambda: passed(m, "readdirplus") + passed(m, "readdir"), bool)
    assert process.pid
    os.kill(process.pid, signal.SIGALRM)
    process.join(1)
    assert process.is_alive()
    (faults / "hang").unlink()
    assert results.get(timeout=20) == (sorted(os.listdir(source / "d1")), [signal.SIGALRM])
    process.join(10)


@pytest.mark.promise("LC-2", "LC-3", "FA-24")
def test_09_what_a_dead_daemon_was_at_is_not_done_twice(mount: MakeMount, source: Path) -> None:
    """A MKDIR that Python had is answered EIO and compared again; a look-up that it had is made again."""
    m = mount(source, "--simulate-latency", "1500")
    os.stat(m.path / "d0")
    outcomes: dict[str, object] = {}

    def attempt(name: str, call: Callable[[], object]) -> None:
        try:
            outcomes[name] = call()
        except OSError as error:
            outcomes[name] = error.errno

    calls = {
        "mkdir": lambda: os.mkdir(m.path / "made"),
        "lookup": lambda: os.stat(m.path / "d0/f00000").st_size,
    }
    threads = [threading.Thread(target=attempt, args=item) for item in calls.items()]
    looked_up = passed(m, "lookup")
    for thread in threads:
        thread.start()
    wait_for(lambda: passed(m, "mkdir"), lambda count: count == 1)
    wait_for(lambda: passed(m, "lookup"), lambda count: count > looked_up)
    m.kill()
    m.start()
    for thread in threads:
        thread.join(30)
    assert outcomes == {"mkdir": errno.EIO, "lookup": (source / "d0/f00000").stat().st_size}
    assert passed(m, "mkdir") == 1
    assert (m.path / "made").exists() == (source / "made").exists()
    wait_for(m.log, lambda log: "while it changed inodes" in log)


def test_14_no_hole_is_punched_under_a_reader(mount: MakeMount, source: Path) -> None:
    m = mount(source, "--read-only")
    expected = contents(m.path)
    m.flush()
    # After a second without work the appender gives back the space that it has reserved.
    wait_for(lambda: (m.cache / "blob").stat().st_blocks * 512, lambda allocated: allocated < 1 << 20)
    held = Environment(m.cache / "index", sync=True)
    try:
        with held.lmdb.begin():
            cachefs("invalidate", m.path / "d0")
            wait_for(m.status, lambda status: status["cached_files"] == 30)
            before = (m.cache / "blob").stat().st_blocks
            m.drop_caches()
            for path in (path for path in expected if path.parts[0] != "d0"):
                assert (m.path / path).read_bytes() == expected[path]
            assert (m.cache / "blob").stat().st_blocks >= before
        wait_for(lambda: (m.cache / "blob").stat().st_blocks, lambda now: now < before)
    finally:
        held.close()


@pytest.mark.slow
def test_14_readers_and_holes_at_once(mount: MakeMount, source: Path) -> None:
    m = mount(source, "--read-only")
    expected = contents(m.path)
    stop = threading.Event()
    failures: list[object] = []

    def read(directory: str) -> None:
        draw = random.Random(directory)
        mine = [path for path in expected if path.parts[0] == directory]
        while not stop.is_set() and not failures:
            path = draw.choice(mine)
            fd = os.open(m.path / path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            if os.read(fd, 1 << 20) != expected[path]:
                failures.append(path)
            os.close(fd)

    threads = [threading.Thread(target=read, args=(name,)) for name in ("d0", "d1", "d2", "d3")]
    for thread in threads:
        thread.start()
    for number in range(40):
        cachefs("invalidate", m.path / f"d{number % 4}")
    stop.set()
    for thread in threads:
        thread.join()
    status = m.flush()
    assert not failures and status["corrupt_records"] == 0 and status["errors"] == 0


def test_15_whoever_reads_the_blob_verifies_what_it_reads(mount: MakeMount, source: Path) -> None:
    content = random.Random(15).randbytes(CHUNK)
    (source / "large").write_bytes(content)
    settle()
    m = mount(source, "--read-only")
    path = m.path / "large"
    assert path.read_bytes() == content
    m.flush()
    blob = (m.cache / "blob").read_bytes()
    with open(m.cache / "blob", "r+b") as file:
        file.seek(blob.index(content[9 * BLOCK : 9 * BLOCK + 64]))
        file.write(b"damaged")
    m.drop_caches()
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    buffer = bytearray(BLOCK)
    for number in (0, 8, 10):
        assert os.preadv(fd, [buffer], number * BLOCK) == BLOCK and buffer == content[number * BLOCK :][:BLOCK]
    status = m.status()
    assert status["corrupt_records"] == 0 and status["source_ops"]["open"] == 1
    assert os.preadv(fd, [buffer], 9 * BLOCK) == BLOCK and buffer == content[9 * BLOCK :][:BLOCK]
    os.close(fd)
    status = wait_for(m.status, lambda status: status["corrupt_records"] == 1)
    assert status["source_ops"]["open"] == 2
    m.drop_caches()
    assert path.read_bytes() == content


def test_16_a_fast_path_that_was_killed_leaves_no_transaction_behind(mount: MakeMount, source: Path) -> None:
    m = mount(source, "--read-only")
    expected = contents(m.path)
    m.flush()
    for _ in range(5):
        pid = int(m.status()["fastpath"]["pid"])
        os.kill(pid, signal.SIGKILL)
        m.killed_fastpaths += 1
        now = wait_for(lambda: m.status()["fastpath"]["pid"], lambda now, pid=pid: now not in (0, pid))
        m.drop_caches()
        assert contents(m.path) == expected
        index = Environment(m.cache / "index", sync=True)
        try:
            readers = {int(line.split()[0]) for line in index.lmdb.readers().splitlines()[1:]}
        finally:
            index.close()
        assert readers <= {m.pid, now, os.getpid()}


def test_an_index_that_says_more_than_this_version_knows(mount: MakeMount, source: Path) -> None:
    """Flags of a later version: the fast path does not interpret them."""
    m = mount(source, "--read-only")
    expected = contents(m.path)
    m.flush()
    m.drop_caches()
    before = calls_passed(m)
    assert contents(m.path) == expected
    assert calls_passed(m) == before
    m.umount()
    index = Environment(m.cache / "index", sync=True)
    with index.lmdb.begin(write=True) as txn:
        for number in (Table.INODES, Table.DENTRIES):
            table = index.tables[number]
            for key, value in [(bytes(key), bytes(value)) for key, value in txn.cursor(db=table)]:
                if key != inode_key(1):
                    txn.put(key, value[:3] + b"\x80" + value[4:], db=table)
    index.close()
    m.start("--revalidate", "never")
    assert contents(m.path) == expected
    assert passed(m, "readdirplus") + passed(m, "readdir") >= 5 and passed(m, "read") >= 40

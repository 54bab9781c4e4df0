"""Open files without a name when `cachefs restart` replaces the daemon: they cannot be opened again by path."""

import contextlib
import errno
import fcntl
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cachefs.client import locations
from cachefs.client.client import Client
from cachefs.fastpath import processes
from cachefs.system.syscalls import thread_capabilities
from cachefs.system.unix_socket import socket_address
from tests import conftest
from tests.conftest import Mount, cachefs, contents, mounted_on, raises_errno, settle, wait_for
from tests.holder import Holder
from tests.processes import stop
from tests.users import MAY_NOT_RAISE_LIMITS

MakeMount = Callable[..., Mount]
REPOSITORY = Path(__file__).parents[2]
CAP_SYS_RESOURCE = 24
OLD, NEW = b"the old bytes" * 1000, b"new"
MODES = {
    "read-write": ((), os.O_RDWR),
    "write-only": ((), os.O_WRONLY),
    "mutable": (("--mutable", "*"), os.O_RDWR),
    "mutable-reader": (("--mutable", "*"), os.O_RDONLY),
    "uncached-reader": (("--cache", "none"), os.O_RDONLY),
    "metadata": (("--cache", "metadata"), os.O_RDWR),
}
DIES_WHILE_IT_SENDS = """
import os, sys
from cachefs.client import hand_over
def send(connection, opened):
    whole = connection.sendmsg
    class Dying:
        def settimeout(self, timeout_s): connection.settimeout(timeout_s)
        def sendmsg(self, parts, ancillary):
            if Dying.batches:
                whole([parts[0][:20]], ancillary)
                os._exit(1)
            Dying.batches += 1
            return whole(parts, ancillary)
        def sendall(self, data): assert not data
        batches = 0
    return sends(Dying(), opened)
sends, hand_over.send = hand_over.send, send
from daemon.cli.main import main
main(sys.argv[1:], "cachefs")
"""


def restart(m: Mount) -> None:
    before = m.pid
    cachefs("restart", m.path)
    m.pid = int(m.status()["pid"])
    assert m.pid != before


def mount_to_be_killed(mount: MakeMount, source: Path) -> Mount:
    """The process that starts the next daemon closes copies of this process's files: that waits for a daemon."""
    return mount(source, "--reconnect-timeout", "1")


def take_name(m: Mount, source: Path, how: str) -> None:
    root = source if "source" in how else m.path
    if "replaced" in how:
        (root / "new").write_bytes(NEW)
        (root / "new").rename(root / "file")
        wait_for((m.path / "file").stat, lambda found: found.st_size == len(NEW))
    else:
        (root / "file").unlink()
        wait_for((m.path / "file").exists, lambda found: not found)


@contextlib.contextmanager
def opened(path: Path, flags: int, *, is_lost: bool = False) -> Iterator[int]:
    """`is_lost`: by its end, so that close(2) says so as well."""
    fd = os.open(path, flags)
    try:
        yield fd
    finally:
        if is_lost:
            raises_errno(errno.ESTALE, lambda: os.close(fd))
        else:
            os.close(fd)


@pytest.mark.promise("LC-5")
@pytest.mark.fastpath
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["unlinked", "unlinked at the source", "replaced", "replaced at the source"])
def test_an_open_file_without_a_name_goes_on_after_a_restart(
    mount: MakeMount, source: Path, mode: str, how: str
) -> None:
    options, flags = MODES[mode]
    (source / "file").write_bytes(OLD)
    m = mount(source, "--attr-timeout", "0.1", *options)
    with opened(m.path / "file", flags) as fd:
        if flags != os.O_RDONLY:
            assert os.pwrite(fd, b"before", 0) == 6
        take_name(m, source, how)
        for _ in range(2):  # the successor hands on what it was handed
            restart(m)
            m.drop_caches()
            if flags != os.O_WRONLY:
                expected = OLD if flags == os.O_RDONLY else b"before" + OLD[6:]
                assert os.pread(fd, 1 << 20, 0)[: len(OLD)] == expected
            if flags != os.O_RDONLY:
                assert os.pwrite(fd, b"after", len(OLD)) == 5
                os.fsync(fd)
                assert os.fstat(fd).st_size == len(OLD) + 5
            assert os.fstat(fd).st_nlink == 0
        if flags == os.O_RDWR:
            assert os.pread(fd, 1 << 20, len(OLD)) == b"after"
    if "replaced" in how:
        assert (source / "file").read_bytes() == NEW == (m.path / "file").read_bytes()
    assert "cannot be opened" not in m.log()


@pytest.mark.promise("LC-5")
@pytest.mark.fastpath
def test_an_immutable_open_file_without_a_name_goes_on_after_a_restart(mount: MakeMount, source: Path) -> None:
    large = os.urandom(24 << 20)
    (source / "file").write_bytes(large)
    settle()
    m = mount(source)
    with opened(m.path / "file", os.O_RDONLY) as fd:
        assert os.pread(fd, 10, 0) == large[:10]  # the rest is not cached
        (m.path / "file").unlink()
        restart(m)
        m.drop_caches()
        assert b"".join(os.pread(fd, 1 << 20, at << 20) for at in range(24)) == large


@pytest.mark.promise("LC-5")
@pytest.mark.fastpath
def test_an_open_directory_that_was_removed_goes_on_after_a_restart(mount: MakeMount, source: Path) -> None:
    (source / "gone").mkdir()
    m = mount(source)
    with opened(m.path / "gone", os.O_RDONLY | os.O_DIRECTORY) as fd:
        (m.path / "gone").rmdir()
        restart(m)
        assert os.fstat(fd).st_nlink == 0
        assert os.listdir(fd) == []
        raises_errno(errno.ENOENT, lambda: os.open("new", os.O_WRONLY | os.O_CREAT, dir_fd=fd))


@pytest.mark.promise("LC-6")
@pytest.mark.fastpath
def test_after_a_kill_an_open_file_without_a_name_is_lost(mount: MakeMount, source: Path) -> None:
    (source / "file").write_bytes(OLD)
    m = mount_to_be_killed(mount, source)
    with opened(m.path / "file", os.O_RDWR, is_lost=True) as fd:
        (m.path / "file").unlink()
        m.kill()
        m.start()
        raises_errno(errno.ESTALE, lambda: os.pwrite(fd, b"more", 0))


@pytest.mark.promise("LC-6")
@pytest.mark.fastpath
def test_a_successor_that_asks_for_no_descriptors_gets_none(mount: MakeMount, source: Path) -> None:
    """As with an older version: files that have a name are opened again."""
    for name in ("file", "other"):
        (source / name).write_bytes(OLD)
    m = mount_to_be_killed(mount, source)
    with opened(m.path / "file", os.O_RDWR, is_lost=True) as lost, opened(m.path / "other", os.O_RDWR) as kept:
        (m.path / "file").unlink()
        Client(m.path)._ask("leave")
        wait_for(lambda: processes.is_running(m.pid), lambda running: not running)
        m.start()
        raises_errno(errno.ESTALE, lambda: os.pwrite(lost, b"more", 0))
        assert os.pwrite(kept, b"more", 0) == 4
    assert "hand-over" not in m.log()


@pytest.mark.promise("LC-6")
@pytest.mark.fastpath
def test_a_predecessor_that_dies_while_it_sends(mount: MakeMount, source: Path) -> None:
    m = mount(source)
    m.kill()
    arguments = ["mount", source, m.path, "--cache-dir", m.cache, *m.given()]
    subprocess.run([sys.executable, "-c", DIES_WHILE_IT_SENDS, *arguments], cwd=REPOSITORY, check=True)
    m.pid = int(m.status()["pid"])
    with contextlib.ExitStack() as stack:
        fds = []
        for number in range(300):
            (source / f"n{number}").write_bytes(OLD)
            fds.append(stack.enter_context(opened(m.path / f"n{number}", os.O_RDWR, is_lost=number == 299)))
        for number in (0, 299):
            (m.path / f"n{number}").unlink()
        restart(m)
        assert os.pread(fds[0], 1 << 20, 0) == OLD  # of the first batch
        raises_errno(errno.ESTALE, lambda: os.pread(fds[299], 1 << 20, 0))
        for fd in fds[1:299]:
            assert os.pwrite(fd, b"more", 0) == 4
    assert m.log().count("the hand-over of open files broke off after 253 files") == 1


@pytest.mark.fastpath
def test_a_successor_that_goes_before_it_is_answered_changes_nothing(mount: MakeMount, source: Path) -> None:
    m = mount(source)
    stop(m.pid)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as successor:
        with socket_address(locations.mount_directory(str(m.path)) / "control") as address:
            successor.connect(address)
        successor.sendall(b'{"command": "leave", "descriptors": true}\n')
    os.kill(m.pid, signal.SIGCONT)
    for _ in range(3):  # by then the signal has arrived
        assert m.status()["pid"] == m.pid
    os.kill(m.pid, signal.SIGTERM)
    wait_for(lambda: processes.is_running(m.pid), lambda running: not running)
    m.pid = 0
    assert not mounted_on(m.path)


@pytest.mark.promise("LC-9")
@pytest.mark.fastpath
@pytest.mark.usefixtures("interpreters")
@pytest.mark.parametrize("may_raise_it", [True, False])
def test_a_restart_by_a_shell_with_few_descriptors(
    mount: MakeMount, source: Path, monkeypatch: pytest.MonkeyPatch, may_raise_it: bool
) -> None:
    """The daemon is asked to leave only if the successor has room for all open files."""
    if may_raise_it and not thread_capabilities()[0] >> CAP_SYS_RESOURCE & 1:
        pytest.skip("root may not raise limits here")
    m = mount(source)
    with Holder(*(m.path / f"n{number}" for number in range(600))) as holder:
        for number in range(600):
            assert holder.ask("write", number, f"{number}") == f"{number}"
            (m.path / f"n{number}").unlink()
        less = [] if may_raise_it else MAY_NOT_RAISE_LIMITS
        monkeypatch.setattr(conftest, "CLI", ["prlimit", "--nofile=400:400", *less, *conftest.CLI])
        before = m.pid
        done = cachefs("restart", m.path, check=False)
        m.pid = int(m.status()["pid"])
        assert (done.returncode, m.pid != before) == ((0, True) if may_raise_it else (1, False)), done.stderr
        if not may_raise_it:
            assert "ulimit" in done.stderr and done.stderr.count("\n") == 1
        for number in range(600):
            assert holder.ask("read", number, f"{number}") == f"{number}"
        assert contents(m.path) == contents(source)


@pytest.mark.promise("NP-1")
@pytest.mark.fastpath
@pytest.mark.parametrize("ends", ["restart", "killed"])
def test_locks_outlive_the_daemon(mount: MakeMount, source: Path, ends: str) -> None:
    """The kernel keeps locks: they are local to the node and unknown to the daemon."""
    (source / "file").write_bytes(OLD)
    m = mount_to_be_killed(mount, source)
    with opened(m.path / "file", os.O_RDWR) as fd, opened(m.path / "file", os.O_RDWR) as other:
        fcntl.flock(fd, fcntl.LOCK_EX)
        of_the_file = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 100, 0)
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, of_the_file)
        fcntl.lockf(fd, fcntl.LOCK_EX, 10, 500)
        if ends == "restart":
            restart(m)
        else:
            m.kill()
            m.start()
        raises_errno(errno.EAGAIN, lambda: fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB))
        raises_errno(errno.EAGAIN, lambda: fcntl.fcntl(other, fcntl.F_OFD_SETLK, of_the_file))
        script = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+b'), fcntl.LOCK_EX | fcntl.LOCK_NB, 10, 500)"
        tried = subprocess.run(
            [sys.executable, "-c", script, m.path / "file"], capture_output=True, text=True, check=False
        )
        assert tried.returncode == 1 and "BlockingIOError" in tried.stderr
        fcntl.flock(fd, fcntl.LOCK_UN)
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.promise("NP-2")
def test_o_tmpfile_is_not_supported(mount: MakeMount, source: Path) -> None:
    m = mount(source)
    raises_errno(errno.EOPNOTSUPP, lambda: os.open(m.path, os.O_TMPFILE | os.O_RDWR))


@pytest.mark.slow
@pytest.mark.fastpath
def test_two_thousand_open_files_without_names(mount: MakeMount, source: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] < 4_000:
        pytest.skip(f"no process may have more than {limits[1]} descriptors here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))  # the daemon inherits it
    m = mount(source)
    fds: list[int] = []
    try:
        for number in range(2_000):
            fds.append(os.open(m.path / "one", os.O_RDWR | os.O_CREAT | os.O_EXCL))
            os.write(fds[-1], b"%d" % number)
            (m.path / "one").unlink()
        started = time.monotonic()
        restart(m)
        print(f"a restart with {len(fds):,} open files: {time.monotonic() - started:.2f} s")
        for number, fd in enumerate(fds):
            assert os.pread(fd, 100, 0) == b"%d" % number
    finally:
        for fd in fds:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@contextlib.contextmanager
def reader_of_the_index(m: Mount) -> Iterator[None]:
    """A process with a read transaction: evicted data keep their space until it ends."""
    script = "import lmdb, sys; t = lmdb.open(sys.argv[1], max_dbs=20).begin(); print(flush=True); sys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-c", script, m.cache / "index"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None and process.stdout is not None and process.stdout.read(1)
    try:
        yield
    finally:
        process.stdin.close()
        process.wait(20)
        process.stdout.close()


@pytest.mark.fastpath
@pytest.mark.parametrize("command", ["restart", "umount"])
def test_who_reads_the_index_delays_neither_a_restart_nor_an_unmount(
    mount: MakeMount, source: Path, command: str
) -> None:
    """Regression: both waited a minute for space that could not be given back yet, and so did every call to Python."""
    m = mount(source)
    expected = contents(source)
    assert contents(m.path) == expected
    m.flush()
    with reader_of_the_index(m):
        cachefs("evict", m.path / "d0")
        began = time.monotonic()
        if command == "restart":
            restart(m)
        else:
            m.umount()
            m.start()
        taken_s = time.monotonic() - began
    assert "could not write everything" not in m.log()
    assert taken_s < 30
    assert contents(m.path) == expected

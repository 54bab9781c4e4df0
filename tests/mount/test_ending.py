"""The end of a mount, and a restart, while calls to the source hang: neither waits for `--source-timeout`."""

import errno
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from cachefs.fastpath.processes import is_running
from cachefs.system.claims import is_dying
from tests.conftest import Mount, cachefs, contents, mounted_on, stuck_threads, wait_for
from tests.processes import stop

pytestmark = pytest.mark.usefixtures("fusectl")

MakeMount = Callable[..., Mount]
SERVING = {"fast path": [], "Python alone": ["--no-fastpath"]}
MODES = {"read-only": ["--read-only"], "read-write": [], "mutable": ["--mutable", "**"], "none": ["--cache", "none"]}
TIMEOUT_S = 300
"""Of the source."""
BOUND_S = 30
"""A mount ends within 10 s; this allows for busy machines."""
ENDED = {errno.ETIMEDOUT, errno.EIO, errno.ECONNABORTED, errno.ENOTCONN}


class Waiting:
    """A job's call that waits for the source, in a thread."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.error: int | None = None
        """errno; 0 if the call succeeded; None while it waits."""
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._call()
            self.error = 0
        except OSError as error:
            self.error = error.errno

    def end(self) -> int | None:
        self._thread.join(BOUND_S)
        return self.error


def processes(m: Mount) -> list[int]:
    status = m.status()
    return [m.pid] + ([status["fastpath"]["pid"]] if status["fastpath"] else [])


def wait_until_over(m: Mount, pids: list[int], since: float) -> None:
    """Neither mount nor process exists; a zombie with a thread that the kernel cannot kill does not count."""
    left_s = BOUND_S - (time.monotonic() - since)
    wait_for(lambda: [pid for pid in pids if is_running(pid)], lambda left: not left, left_s)
    print(f"it took {time.monotonic() - since:.1f} s")
    m.pid = 0
    assert not mounted_on(m.path)


def hang(m: Mount, faults: Path) -> list[Waiting]:
    """Make a look-up and a read wait for the source."""
    os.stat(m.path / "h1/known")
    os.stat(m.path / "h2")
    (faults / "hang").write_text("known")
    waiting = [Waiting((m.path / name).read_bytes) for name in ("h1/known", "h2/unknown")]
    wait_for(lambda: stuck_threads(*processes(m)), lambda count: count >= len(waiting))
    return waiting


@pytest.fixture
def hanging(faulty: tuple[Path, Path], source: Path) -> tuple[Path, Path]:
    """`faulty`, with files that hang on demand: in two directories, which answer one request at a time each."""
    for name in ("h1/known", "h2/unknown"):
        (source / name).parent.mkdir()
        (source / name).write_bytes(b"x" * 5000)
    return faulty


def unmount_by_command(m: Mount) -> None:
    cachefs("umount", m.path)


def unmount(m: Mount) -> None:
    subprocess.run(["umount", m.path], check=True)


def detach_and_tell(m: Mount) -> None:
    subprocess.run(["umount", "-l", m.path], check=True)
    tell(m)


def tell(m: Mount) -> None:
    os.kill(m.pid, signal.SIGTERM)


@pytest.mark.promise("LC-12", "LC-14")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("serving", SERVING)
@pytest.mark.parametrize("end", [tell, detach_and_tell])
def test_a_mount_that_jobs_wait_for_ends_though_its_source_hangs(
    mount: MakeMount, hanging: tuple[Path, Path], end: Callable[[Mount], None], serving: str, mode: str
) -> None:
    place, faults = hanging
    m = mount(place, "--source-timeout", TIMEOUT_S, *SERVING[serving], *MODES[mode])
    waiting, pids = hang(m, faults), processes(m)
    expected = contents(m.path / "d0")  # it is on its way to the cache when the end comes
    started = time.monotonic()
    end(m)
    wait_until_over(m, pids, started)
    assert {each.end() for each in waiting} <= ENDED
    m.start()
    if mode in ("read-only", "read-write"):
        assert m.status()["cached_files"] >= len(expected)
    assert contents(m.path / "d0") == expected


@pytest.mark.promise("LC-12")
@pytest.mark.parametrize("mode", ["read-only", "read-write"])
@pytest.mark.parametrize("serving", SERVING)
@pytest.mark.parametrize("end", [tell, unmount_by_command, unmount])
def test_a_mount_that_nobody_uses_ends_though_its_source_hangs(
    mount: MakeMount, hanging: tuple[Path, Path], end: Callable[[Mount], None], serving: str, mode: str
) -> None:
    """The mount's own work waits for the source: a warm-up."""
    place, faults = hanging
    m = mount(place, "--source-timeout", TIMEOUT_S, *SERVING[serving], *MODES[mode])
    expected, pids = contents(m.path / "d0"), processes(m)
    (faults / "hang").write_text("known")
    cachefs("warmup", "--background", m.path / "h1", m.path / "h2")
    wait_for(lambda: stuck_threads(*pids), lambda count: count >= 2)
    started = time.monotonic()
    end(m)
    wait_until_over(m, pids, started)
    m.start()
    assert contents(m.path / "d0") == expected


@pytest.mark.promise("LC-12")
@pytest.mark.parametrize("serving", SERVING)
def test_a_mount_ends_though_its_source_is_stopped(mount: MakeMount, hanging: tuple[Path, Path], serving: str) -> None:
    """Calls to this source can be killed: no process stays."""
    place, _ = hanging
    m = mount(place, "--source-timeout", TIMEOUT_S, "--read-only", *SERVING[serving])
    expected, pids = contents(m.path / "d0"), processes(m)
    os.stat(m.path / "h1/known")
    source = next(pid for pid in children() if b"tests.faultfs" in Path(f"/proc/{pid}/cmdline").read_bytes())
    stop(source)
    try:
        waiting = [Waiting((m.path / name).read_bytes) for name in ("h1/known", "h2/unknown")]
        wait_for(lambda: stuck_threads(*pids), lambda count: count >= 2)
        started, pidfd = time.monotonic(), os.pidfd_open(m.pid)
        tell(m)
        assert select.select([pidfd], [], [], BOUND_S)[0], "a thread of it is left"
        wait_until_over(m, pids, started)
        assert {each.end() for each in waiting} <= ENDED
    finally:
        os.kill(source, signal.SIGCONT)
    m.start()
    assert contents(m.path / "d0") == expected


def children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


@pytest.mark.promise("LC-13")
@pytest.mark.parametrize("serving", SERVING)
def test_a_write_that_the_end_cuts_off_fails(mount: MakeMount, hanging: tuple[Path, Path], serving: str) -> None:
    place, faults = hanging
    m = mount(place, "--source-timeout", TIMEOUT_S, *SERVING[serving])
    pids, fd = processes(m), os.open(m.path / "written", os.O_WRONLY | os.O_CREAT)
    try:
        assert os.write(fd, b"before") == 6
        (faults / "hang-write").touch()
        writing = Waiting(lambda: os.write(fd, b"cut off"))
        wait_for(lambda: stuck_threads(*pids), bool)
        started = time.monotonic()
        tell(m)
        assert writing.end() in ENDED
    finally:
        try:
            os.close(fd)  # its FLUSH finds no mount
        except OSError as error:
            assert error.errno in ENDED
    wait_until_over(m, pids, started)
    (faults / "hang-write").unlink()
    assert (place / "written").read_bytes() in (b"before", b"beforecut off")  # the source may still do it


@pytest.mark.promise("LC-18")
@pytest.mark.fastpath
@pytest.mark.parametrize("mode", MODES)
def test_a_restart_does_not_wait_for_a_source_that_hangs(
    mount: MakeMount, hanging: tuple[Path, Path], mode: str
) -> None:
    """The successor makes the calls again: jobs see no error."""
    place, faults = hanging
    m = mount(place, "--source-timeout", TIMEOUT_S, *MODES[mode])
    expected = contents(m.path / "d0")
    waiting, pids = hang(m, faults), processes(m)
    started = time.monotonic()
    cachefs("restart", m.path)
    print(f"it took {time.monotonic() - started:.1f} s")
    assert time.monotonic() - started < BOUND_S
    assert not any(is_running(pid) for pid in pids)
    m.pid = int(m.status()["pid"])
    assert contents(m.path / "d0") == expected
    assert [each.error for each in waiting] == [None, None]
    (faults / "hang").unlink()
    assert [each.end() for each in waiting] == [0, 0]


@pytest.mark.promise("FA-23", "LC-17", "LC-25")
@pytest.mark.fastpath
@pytest.mark.parametrize("where", ["hang-write", "hang-flush"], ids=["in a write", "when it closes files"])
@pytest.mark.parametrize("command", [(), ("umount",), ("umount", "--force")], ids=lambda command: "-".join(command))
def test_jobs_get_an_error_though_the_killed_daemon_still_waits_for_its_source(
    mount: MakeMount, hanging: tuple[Path, Path], command: tuple[str, ...], where: str
) -> None:
    """The kernel cannot end such a process, and its sockets stay open: jobs waited as long as the source hung."""
    place, faults = hanging
    m = mount(place, "--source-timeout", TIMEOUT_S, "--reconnect-timeout", TIMEOUT_S if command else 1)
    cached = m.path / "d0/f00000"
    expected, fd = cached.read_bytes(), os.open(m.path / "written", os.O_WRONLY | os.O_CREAT)
    (faults / where).touch()
    waiting: list[Waiting] = []
    try:
        if where == "hang-write":
            waiting.append(Waiting(lambda: os.write(fd, b"cut off")))
            wait_for((faults / "has-hung").exists, bool)
        os.kill(m.pid, signal.SIGKILL)
        wait_for(lambda: is_dying(m.pid), bool)
        waiting.append(Waiting(lambda: os.stat(m.path / "h1/unknown")))
        wait_for(lambda: stuck_threads(os.getpid()), lambda count: count >= len(waiting))
        if command:
            cachefs(*command, m.path)
        else:
            assert cached.read_bytes() == expected
        assert {each.end() for each in waiting} <= ENDED
        assert Path(f"/proc/{m.pid}").exists()
    finally:
        (faults / where).unlink()
        if command:
            wait_for(lambda: is_running(m.pid), lambda running: not running)
        m.start()  # removes what the killed one has left in its runtime directory
        with suppress(OSError):
            os.close(fd)


_OPENS_AND = """
import os, sys
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
os.write(fd, b"written")
print("open", flush=True)
sys.stdin.readline()
"""


@contextmanager
def closing_files(path: Path, faults: Path, end: str) -> Iterator[int]:
    """The pid of a process that hangs while it closes a file: it has been killed, or `end` makes it so."""
    process = subprocess.Popen(
        [sys.executable, "-c", _OPENS_AND + end, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None and process.stdout.readline() == "open\n"
    (faults / "hang-flush").touch()
    if end:
        process.stdin.write("go on\n")
        process.stdin.flush()
    else:
        process.kill()
    try:
        wait_for((faults / "has-flushed").exists, bool)
        yield process.pid
    finally:
        (faults / "hang-flush").unlink()
        process.kill()
        process.communicate(timeout=20)


@pytest.mark.promise("FA-23")
def test_a_killed_process_that_hangs_when_it_closes_files_counts_as_dying(hanging: tuple[Path, Path]) -> None:
    """Its last thread closes its files one after the other: the first may hang, and the others stay open."""
    place, faults = hanging
    with closing_files(place / "written", faults, "") as pid:
        assert is_dying(pid)
    assert not is_dying(os.getpid())


@pytest.mark.promise("FA-15")
@pytest.mark.parametrize("mode", MODES)
def test_a_process_that_hangs_in_execve_delays_no_mount(
    mount: MakeMount, hanging: tuple[Path, Path], source: Path, mode: str
) -> None:
    """Its links in /proc cannot be read until the source of its files answers. Before: a mount of another source read
    them, and could not even be killed."""
    place, faults = hanging
    with closing_files(place / "written", faults, "os.execv('/bin/sleep', ['sleep', '100'])"):
        began = time.monotonic()
        m = mount(source, *MODES[mode])
        assert (m.path / "d0/f00000").read_bytes()
        cachefs("status", m.path)
        m.umount()
        m.start()
        m.umount()
        assert time.monotonic() - began < BOUND_S


@pytest.mark.promise("LC-17")
@pytest.mark.fastpath
@pytest.mark.parametrize("mode", MODES)
def test_umount_without_a_daemon_lets_no_job_wait_for_the_next_one(mount: MakeMount, source: Path, mode: str) -> None:
    m = mount(source, *MODES[mode])
    (fastpath,) = [pid for pid in processes(m) if pid != m.pid]
    m.kill()
    job = Waiting(lambda: (m.path / "d0/f00000").read_bytes())
    wait_for(lambda: stuck_threads(os.getpid()), bool)
    began = time.monotonic()
    cachefs("umount", m.path)
    assert job.end() in ENDED
    wait_until_over(m, [fastpath], began)
    assert not mounted_on(m.path)

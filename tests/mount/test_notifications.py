"""The notifier, which may have to wait in the kernel, is a process of its own: so a killed daemon always ends."""

import errno
import fcntl
import os
import select
import signal
import struct
import subprocess
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from cachefs.client.client import Client
from cachefs.errors import CacheFsError
from cachefs.fastpath import processes
from cachefs.system.syscalls import pidfd_getfd
from tests.conftest import Mount, cachefs, children, contents, settle, start_fault_fs, wait_for
from tests.processes import connections, device_of, state, stop

MakeMount = Callable[..., Mount]
MODES = [("--read-only",), (), ("--mutable", "**"), ("--cache", "none"), ("--cache", "metadata")]
GONE_S = 20
"""Coarse, because machines are loaded. Before the repair the tested event never happened."""


class Deaf:
    """A source that can be stopped. A process that waits for it can be killed, as with a source in the kernel, because
    its request was never read."""

    def __init__(self, path: Path, process: subprocess.Popen[bytes]) -> None:
        self.path = path
        self._process = process

    def stop(self) -> None:
        stop(self._process.pid)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)


@pytest.fixture
def deaf(tmp_path: Path, source: Path, beneath: ExitStack) -> Iterator[Deaf]:
    path, _, process = start_fault_fs(source, tmp_path, beneath)
    made = Deaf(path, process)
    yield made
    made.go_on()


def notifies(pid: int) -> bool:
    """Whether a thread of this process waits in the kernel for a directory, to drop a name in it."""
    with suppress(OSError):
        return any(
            "fuse_reverse_inval_entry" in path.read_text() for path in Path(f"/proc/{pid}/task").glob("[0-9]*/stack")
        )
    return False


def notifier_of(daemon: int) -> int:
    """The pid of a daemon's notifier; 0: there is none."""
    for child in children(daemon):
        with suppress(OSError):
            command = Path(f"/proc/{child}/cmdline").read_bytes()
            if b"FUSE_DEV_IOC_CLONE" in command and state(child) not in ("Z", ""):
                return child
    return 0


def started_notifier(daemon: int, *, other_than: int = 0) -> int:
    """Waits until it listens: its threads are there."""
    return int(
        wait_for(
            lambda: notifier_of(daemon),
            lambda pid: pid not in (0, other_than) and len(os.listdir(f"/proc/{pid}/task")) > 2,
        )
    )


def has_work(notifier: int) -> bool:
    """Whether the daemon has sent it something that it has not read."""
    lanes = Path(f"/proc/{notifier}/cmdline").read_bytes().split(b"\0")[-3:-1]  # the last two arguments
    pidfd = os.pidfd_open(notifier)
    try:
        for lane in lanes:
            copy = pidfd_getfd(pidfd, int(lane))
            try:
                if struct.unpack("i", fcntl.ioctl(copy, termios.FIONREAD, bytes(4)))[0]:
                    return True
            finally:
                os.close(copy)
    finally:
        os.close(pidfd)
    return False


@contextmanager
def looking_at(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that stats a name, which may never be answered."""
    with subprocess.Popen(["stat", path], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def invalidate_soon(m: Mount, name: str) -> threading.Thread:
    """The daemon is asked, and may never answer."""

    def ask() -> None:
        with suppress(CacheFsError):
            Client(m.path, timeout_s=60).invalidate([m.path / name])

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    return thread


def kill_and_wait(*pids: int) -> None:
    """Raises AssertionError where one of them does not end."""
    pidfds = [os.pidfd_open(pid) for pid in pids]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid, pidfd in zip(pids, pidfds, strict=True):
        assert select.select([pidfd], [], [], GONE_S)[0], f"process {pid} does not end: {state(pid)}"
        os.close(pidfd)


@contextmanager
def freed(m: Mount, tmp_path: Path) -> Iterator[None]:
    """Whatever the test finds, no process waits for this mount for ever."""
    with connections(tmp_path / "connections") as control:
        abort = control / device_of(m.path).rpartition(":")[2] / "abort"
        try:
            yield
        except BaseException:
            with suppress(OSError):
                abort.write_text("1")
            raise


class Stuck:
    """A mount with a waiting notification: it waits for a directory in which a look-up waits for the source."""

    def __init__(self, m: Mount, deaf: Deaf) -> None:
        self.m, self.deaf = m, deaf
        (m.path / "d1/f00001").stat()
        self.daemon = m.pid
        self.notifier = notifier_of(m.pid)

    @contextmanager
    def notifying(self) -> Iterator[subprocess.Popen[bytes]]:
        """The process that looks up."""
        self.deaf.stop()
        with looking_at(self.m.path / "d1/missing") as looking:
            wait_for(lambda: "fuse" in stack(looking.pid) and state(looking.pid) in ("S", "D"), bool)
            asked = invalidate_soon(self.m, "d1/f00001")
            wait_for(lambda: any(map(notifies, (self.daemon, self.notifier))), bool)
            yield looking
        asked.join(GONE_S)


def unless_stale(path: Path) -> bytes | None:
    """What is read while the kernel may still know a former version."""
    try:
        return path.read_bytes()
    except OSError as error:
        assert error.errno == errno.ESTALE
        return None


def stack(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stack").read_text()
    except OSError:
        return ""


def died(m: Mount) -> bool:
    with looking_at(m.path / "d2") as looking:
        _, said = looking.communicate(timeout=GONE_S)
        return looking.returncode != 0 and b"not connected" in said


def fastpath_of(m: Mount) -> int:
    return int(m.status()["fastpath"]["pid"])


# --- a daemon that is killed -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES, ids=" ".join)
def test_a_daemon_without_a_fast_path_ends_when_it_is_killed_while_a_notification_waits(
    mount: MakeMount, deaf: Deaf, tmp_path: Path, mode: tuple[str, ...]
) -> None:
    m = mount(deaf.path, *mode, "--source-timeout", "100", "--no-fastpath")
    stuck = Stuck(m, deaf)
    with stuck.notifying() as looking, freed(m, tmp_path):
        kill_and_wait(m.pid)
        m.pid = 0
        wait_for(lambda: state(stuck.notifier), lambda now: now in ("", "Z"))
        looking.wait(GONE_S)
        assert died(m)
        deaf.go_on()
        m.start()
        assert contents(m.path) == contents(deaf.path)


def test_a_request_that_nobody_has_read_does_not_keep_a_dead_mount(
    mount: MakeMount, deaf: Deaf, tmp_path: Path
) -> None:
    """The daemon is stopped before the look-up is sent, then killed: no process will ever read the request."""
    m = mount(deaf.path, "--source-timeout", "100", "--no-fastpath")
    (m.path / "d1/f00001").stat()
    notifier = started_notifier(m.pid)
    stop(notifier)
    asked = invalidate_soon(m, "d1/f00001")
    wait_for(lambda: has_work(notifier), bool)
    with freed(m, tmp_path):
        stop(m.pid)
        with looking_at(m.path / "d1/missing") as looking:
            wait_for(lambda: "request_wait_answer" in stack(looking.pid), bool)
            os.kill(notifier, signal.SIGCONT)
            wait_for(lambda: notifies(notifier), bool)
            kill_and_wait(m.pid)
            m.pid = 0
            wait_for(lambda: state(notifier), lambda now: now in ("", "Z"))
            looking.wait(GONE_S)
        assert died(m)
        asked.join(GONE_S)
        m.start()
        assert contents(m.path) == contents(deaf.path)


@pytest.mark.fastpath
@pytest.mark.parametrize("mode", MODES, ids=" ".join)
def test_a_daemon_that_is_killed_while_a_notification_waits_has_a_successor(
    mount: MakeMount, deaf: Deaf, tmp_path: Path, mode: tuple[str, ...]
) -> None:
    m = mount(deaf.path, *mode, "--source-timeout", "100")
    stuck = Stuck(m, deaf)
    with stuck.notifying() as looking, freed(m, tmp_path):
        fastpath = fastpath_of(m)
        kill_and_wait(m.pid)
        m.start()
        assert fastpath_of(m) == fastpath
        assert notifies(stuck.notifier) and looking.poll() is None, "it could go on, which proves nothing"
        deaf.go_on()
        assert looking.wait(GONE_S) == 1 and looking.stderr is not None
        assert b"No such file" in looking.stderr.read()
        wait_for(lambda: state(stuck.notifier), lambda now: now in ("", "Z"))
        assert contents(m.path) == contents(deaf.path)


@pytest.mark.fastpath
@pytest.mark.parametrize("mode", MODES, ids=" ".join)
def test_both_processes_end_when_they_are_killed_while_a_notification_waits(
    mount: MakeMount, deaf: Deaf, tmp_path: Path, mode: tuple[str, ...]
) -> None:
    m = mount(deaf.path, *mode, "--source-timeout", "100")
    stuck = Stuck(m, deaf)
    with stuck.notifying() as looking, freed(m, tmp_path):
        kill_and_wait(m.pid, fastpath_of(m))
        m.pid = 0
        wait_for(lambda: state(stuck.notifier), lambda now: now in ("", "Z"))
        looking.wait(GONE_S)
        assert died(m)
        deaf.go_on()
        m.start()
        assert contents(m.path) == contents(deaf.path)


# --- the process itself ----------------------------------------------------------------------------------------------


def test_a_notifier_that_is_killed_is_replaced(mount: MakeMount, source: Path) -> None:
    m = mount(source, "--read-only")
    path = m.path / "d1/f00001"
    path.read_bytes()
    first = started_notifier(m.pid)
    os.kill(first, signal.SIGKILL)
    for content in (b"first", b"the second"):
        (source / "d1/f00001").write_bytes(content)
        cachefs("invalidate", path)
        assert path.read_bytes() == content
    assert started_notifier(m.pid, other_than=first)


def test_what_a_killed_notifier_had_not_confirmed_is_sent_again(mount: MakeMount, source: Path) -> None:
    m = mount(source, "--read-only")
    path = m.path / "d1/f00001"
    path.read_bytes()
    first = started_notifier(m.pid)
    stop(first)
    (source / "d1/f00001").write_bytes(b"another content")
    asked = invalidate_soon(m, "d1/f00001")
    asked.join(1)
    assert asked.is_alive(), "it was told that the kernel has forgotten"
    os.kill(first, signal.SIGKILL)
    asked.join(GONE_S)
    assert not asked.is_alive()
    assert path.read_bytes() == b"another content"


@pytest.mark.fastpath
def test_a_restart_does_not_wait_for_a_notification_and_the_successor_sends_it(mount: MakeMount, source: Path) -> None:
    m = mount(source, "--read-only")
    path = m.path / "d1/f00001"
    path.read_bytes()
    assert m.flush()["cached_files"] == 1
    predecessor, stopped = m.pid, started_notifier(m.pid)
    stop(stopped)
    try:
        (source / "d1/f00001").write_bytes(b"another content")
        settle()
        asked = [invalidate_soon(m, "d1/f00001"), invalidate_soon(m, "d1/f00005")]
        wait_for(lambda: m.status()["cached_files"], lambda count: count == 0)
        cachefs("restart", m.path)
        m.pid = int(m.status()["pid"])
        assert m.pid != predecessor
        wait_for(lambda: unless_stale(path), lambda content: content == b"another content")
        wait_for(lambda: state(stopped), lambda now: now in ("", "Z"))  # what it had not sent is the successor's
    finally:
        with suppress(ProcessLookupError):
            os.kill(stopped, signal.SIGCONT)
    for thread in asked:
        thread.join(GONE_S)
    assert contents(m.path) == contents(source)


@pytest.mark.parametrize("end", ["umount", "umount -l", "kill"])
def test_no_process_stays_behind(mount: MakeMount, source: Path, end: str) -> None:
    m = mount(source)
    notifier = started_notifier(m.pid)
    everything = {m.pid, *children(m.pid)}
    if end == "kill":
        m.killed_fastpaths += 1
        kill_and_wait(m.pid, *(everything - {notifier, m.pid}))
    else:
        subprocess.run([*end.split(), m.path], check=True)
    m.pid = 0
    wait_for(lambda: {pid for pid in everything if processes.is_running(pid)}, lambda left: not left)


def test_a_notifier_is_small_and_holds_nothing_of_others(mount: MakeMount, source: Path) -> None:
    m = mount(source)
    notifier = started_notifier(m.pid)
    there = Path(f"/proc/{notifier}")
    opened = sorted(os.readlink(path).partition(":")[0] for path in (there / "fd").iterdir())
    memory = next(link for link in opened if link.startswith("/memfd"))
    assert opened == sorted(["/dev/null"] * 3 + ["/dev/fuse", memory, "socket", "socket"])
    assert os.readlink(there / "cwd") == "/"
    status: dict[str, Any] = dict(line.split(":", 1) for line in (there / "status").read_text().splitlines())
    kib = int(status["RssAnon"].split()[0])
    print(f"RssAnon of the notifier: {kib} KiB")
    assert kib < 8 << 10

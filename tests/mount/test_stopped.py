"""Processes of a mount that were stopped (SIGSTOP): a restart repairs it, and its end leaves no process."""

import errno
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from cachefs.fastpath.processes import is_running
from tests.conftest import (
    Mount,
    cachefs,
    children,
    contents,
    expire,
    mounted_on,
    raises_errno,
    settle,
    stuck_threads,
    wait_for,
)
from tests.holder import Holder
from tests.mount.test_notifications import kill_and_wait, started_notifier
from tests.processes import device_of, fastpath_pid, left_behind, stop

pytestmark = pytest.mark.promise("LC-8")

MakeMount = Callable[..., Mount]
BOUND_S = 15
"""An end takes 6 s with a stopped fast path. Waiting until it handles a signal would take 20 s."""
SERVING = {"fast path": [], "Python alone": ["--no-fastpath"]}


@contextmanager
def stopped(*pids: int) -> Iterator[None]:
    for pid in pids:
        stop(pid)
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def processes(m: Mount) -> set[int]:
    return {m.pid, started_notifier(m.pid), *children(m.pid)}


def check_over(m: Mount, pids: set[int], since: float) -> None:
    wait_for(lambda: {pid for pid in pids if is_running(pid)}, lambda left: not left)
    took_s = time.monotonic() - since
    m.pid = 0
    assert not mounted_on(m.path) and not left_behind(m.path)
    assert took_s < BOUND_S


@pytest.mark.fastpath
@pytest.mark.parametrize("which", ["daemon", "fast path", "notifier", "all"])
def test_a_restart_repairs_a_mount_of_which_a_process_was_stopped(mount: MakeMount, source: Path, which: str) -> None:
    m = mount(source)
    device, notifier = device_of(m.path), started_notifier(m.pid)
    pids = {"daemon": [m.pid], "fast path": [fastpath_pid(m)], "notifier": [notifier]}
    pids["all"] = [pid for each in pids.values() for pid in each]
    with Holder(m.path / "file") as holder:
        assert holder.ask("write", 0, "kept") == "kept"
        (m.path / "file").unlink()
        with stopped(*pids[which]):
            before = m.pid
            cachefs("restart", m.path)
            m.pid = int(m.status()["pid"])
            assert m.pid != before and device_of(m.path) == device
            assert contents(m.path) == contents(source)
            assert holder.ask("read", 0, "kept") == "kept"
            wait_for(lambda: [pid for pid in pids[which] if is_running(pid)], lambda left: not left)
    everything, since = processes(m), time.monotonic()
    cachefs("umount", m.path)
    check_over(m, everything, since)


@pytest.mark.parametrize("serving", SERVING)
@pytest.mark.parametrize("which", ["daemon", "notifier"])
def test_a_mount_of_which_a_process_was_stopped_is_unmounted(
    mount: MakeMount, source: Path, which: str, serving: str
) -> None:
    m = mount(source, *SERVING[serving])
    expected, everything = contents(m.path), processes(m)
    with stopped(m.pid if which == "daemon" else started_notifier(m.pid)):
        since = time.monotonic()
        cachefs("umount", m.path)
        check_over(m, everything, since)
    m.start()
    assert m.status()["cached_files"] == sum(map(bool, expected.values()))  # nothing that was on its way is lost


@pytest.mark.fastpath
@pytest.mark.parametrize("end", ["umount", "tell"])
def test_a_mount_whose_fast_path_was_stopped_ends(mount: MakeMount, source: Path, end: str) -> None:
    m = mount(source)
    everything = processes(m)
    with stopped(fastpath_pid(m)):
        since = time.monotonic()
        if end == "tell":
            os.kill(m.pid, signal.SIGTERM)
        else:
            cachefs("umount", m.path)
        check_over(m, everything, since)


@pytest.mark.parametrize("serving", SERVING)
@pytest.mark.parametrize("command", ["mount", "umount"])
def test_a_stopped_notifier_keeps_no_dead_mount(mount: MakeMount, source: Path, command: str, serving: str) -> None:
    """It has a /dev/fuse of the mount: the kernel does not know that no process will read from it any more."""
    m = mount(source, *SERVING[serving])
    notifier = started_notifier(m.pid)
    others = processes(m) - {notifier}
    m.killed_fastpaths += 1
    with stopped(notifier):
        kill_and_wait(m.pid, *(others - {m.pid}))  # the daemon would start another fast path
        with subprocess.Popen(["stat", m.path / "d3"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as job:
            try:
                wait_for(lambda: stuck_threads(job.pid), lambda count: count == 1)
                if command == "mount":
                    m.start()
                    assert contents(m.path) == contents(source)
                else:
                    m.pid = 0
                    cachefs("umount", m.path)
                    assert not mounted_on(m.path)
                assert job.wait(BOUND_S) == 1
            finally:
                job.kill()


@pytest.mark.promise("TE-1")
@pytest.mark.parametrize("is_young", [False, True])
def test_an_open_that_the_fast_path_has_answered_makes_the_version_immutable_that_was_read(
    mount: MakeMount, source: Path, is_young: bool
) -> None:
    """The report of the open arrives when the record has expired. Before: a young file was compared, so that the rest
    of it was read of the version that the source had by then."""
    old, new = b"1" * 8_000_000, b"2" * 8_000_000
    m = mount(source)
    (source / "file").write_bytes(old)
    if not is_young:
        settle()
    assert (m.path / "file").stat()
    with stopped(m.pid), open(m.path / "file", "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        assert os.pread(file.fileno(), 4096, 0) == old[:4096]
        with open(source / "file", "r+b") as rewritten:
            rewritten.write(new)
        expire()
        os.kill(m.pid, signal.SIGCONT)
        raises_errno(errno.ESTALE, partial(os.pread, file.fileno(), 4096, 6_000_000))
    assert (m.path / "file").read_bytes() == new

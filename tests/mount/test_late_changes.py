"""A source that hangs, and carries out late what was answered with an error: on ext4, which `fsfreeze` makes hang."""

import errno
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.conftest import Mount, wait_for
from tests.mount.test_ending import Waiting

pytestmark = pytest.mark.usefixtures("fusectl")

MakeMount = Callable[..., Mount]
ATTEMPTS = 6
OLD, NEW = b"old", b"new"


@contextmanager
def frozen(place: Path) -> Iterator[Callable[[], object]]:
    """Changes hang until what this yields is called."""
    is_frozen = True

    def thaw() -> None:
        nonlocal is_frozen
        is_frozen = False
        subprocess.run(["fsfreeze", "-u", place], check=True)

    subprocess.run(["fsfreeze", "-f", place], check=True)
    try:
        yield thaw
    finally:
        if is_frozen:
            thaw()


def threads_that_change(pid: int) -> int:
    """How many threads of a daemon hang in a change."""
    return sum((task / "wchan").read_text() == "percpu_rwsem_wait" for task in Path(f"/proc/{pid}/task").iterdir())


def waits(m: Mount) -> Callable[[], bool]:
    """Does a request wait? Made before the source hangs."""
    number = os.minor(os.stat(m.path).st_dev)
    return lambda: int(Path(f"/sys/fs/fuse/connections/{number}/waiting").read_text()) > 0


def write_new(path: Path) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        os.pwrite(fd, NEW, 0)
        os.fsync(fd)
    finally:
        os.close(fd)


CHANGES: dict[str, Callable[[Path, int], object]] = {
    "write": lambda path, fd: os.pwrite(fd, OLD, 0),
    "truncate": lambda path, fd: os.truncate(path, 0),
    "open": lambda path, fd: os.close(os.open(path, os.O_WRONLY | os.O_TRUNC)),
    "unlink": lambda path, fd: os.unlink(path),
}


@pytest.mark.promise("FA-42")
@pytest.mark.parametrize("mode", [(), ("--no-fastpath",)], ids=["fast path", "python"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_that_was_answered_etimedout_undoes_no_later_one(
    mount: MakeMount, disk: Path, mode: tuple[str, ...], change: str
) -> None:
    m = mount(disk, "--source-timeout", "1", *mode)
    kept = 0
    for number in range(ATTEMPTS):
        path = m.path / f"f{number}"
        path.write_bytes(OLD)
        fd, is_waiting = os.open(path, os.O_RDWR), waits(m)
        with frozen(disk) as thaw:
            late = Waiting(lambda path=path, fd=fd: CHANGES[change](path, fd))
            assert late.end() == errno.ETIMEDOUT
            later = Waiting(lambda path=path: write_new(path))
            wait_for(is_waiting, bool)
            thaw()
            is_made = later.end() == 0
        os.close(fd)
        assert not is_made or (disk / path.name).read_bytes() == NEW
        kept += is_made
    assert kept  # the machine may be too busy for some


@pytest.mark.fastpath
@pytest.mark.promise("FA-42")
def test_a_change_of_a_killed_daemon_undoes_no_later_one(mount: MakeMount, disk: Path) -> None:
    m = mount(disk)
    for number in range(ATTEMPTS):
        path = m.path / f"f{number}"
        path.write_bytes(OLD)
        with frozen(disk) as thaw:
            late = Waiting(lambda path=path: os.unlink(path))
            wait_for(partial(threads_that_change, m.pid), bool)
            os.kill(m.pid, signal.SIGKILL)
            m.start()
            assert late.end() == errno.EIO
            later = Waiting(lambda path=path: write_new(path))
            wait_for(waits(m), bool)
            thaw()
            assert later.end() == 0
        assert (disk / path.name).read_bytes() == NEW

"""Many calls of several users at once: threads with another filesystem uid, which the kernel reports."""

import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cachefs.fastpath.shared_memory import Shared
from cachefs.system.syscalls import set_thread_fs_ids
from tests.conftest import Mount

Waiting = Callable[[Mount | Path], int]
GREEDY, OTHER = 12345, 23456
PROMPT_S = 2.0
"""Coarse, because machines are loaded. The defects tested here took much longer, or for ever."""


class Crowd:
    """Calls of one user, each in a thread of its own, and their results."""

    def __init__(self, uid: int, calls: list[Callable[[], object]]) -> None:
        self.results: list[object] = []
        stack = threading.stack_size(128 << 10)
        self._threads = [threading.Thread(target=self._run, args=(uid, call), daemon=True) for call in calls]
        for thread in self._threads:
            thread.start()
        threading.stack_size(stack)

    def _run(self, uid: int, call: Callable[[], object]) -> None:
        set_thread_fs_ids(uid, uid)
        try:
            self.results.append(call())
        except OSError as error:
            self.results.append(error.errno)

    def join(self, timeout_s: float = 60) -> list[object]:
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        assert not any(thread.is_alive() for thread in self._threads)
        return self.results


@contextmanager
def prompt(limit_s: float = PROMPT_S) -> Iterator[None]:
    started = time.monotonic()
    yield
    assert time.monotonic() - started < limit_s


@contextmanager
def directory(path: Path) -> Iterator[int]:
    """This descriptor leads past the directories above it, which are closed to other users."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def opened(paths: list[Path]) -> Iterator[list[int]]:
    """Descriptors of files, without readahead: each page is a READ of its own."""
    fds = [os.open(path, os.O_RDONLY) for path in paths]
    try:
        for fd in fds:
            if stat.S_ISREG(os.fstat(fd).st_mode):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


@contextmanager
def memory_of(m: Mount) -> Iterator[Shared]:
    """The memory that the daemon and the fast path share."""
    fds = Path(f"/proc/{m.status()['fastpath']['pid']}/fd")
    memory = Shared(os.open(next(fd for fd in fds.iterdir() if os.readlink(fd).startswith("/memfd:")), os.O_RDWR))
    try:
        yield memory
    finally:
        memory.close()


def read_at(fd: int, name: str) -> bytes:
    with open(os.open(name, os.O_RDONLY, dir_fd=fd), "rb") as file:
        return file.read()


def read_all(paths: list[Path]) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in paths}

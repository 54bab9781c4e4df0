"""One user's worst behaviour costs another user nothing: shares by uid (hazards 30, 31 and 33).

The greedy user is threads of this process with another filesystem uid: that is what the kernel tells a filesystem.
"""

import errno
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cachefs import mount_table
from cachefs.syscalls import set_thread_fs_ids
from tests import conftest
from tests.conftest import Mount, settle, wait_for

MakeMount = Callable[..., Mount]
Waiting = Callable[[Mount], int]
GREEDY, OTHER = 12345, 23456
PROMPT_S = 2.0
"""Coarse, because machines are loaded. What is tested took much longer, or for ever."""
THREADS = 2300


class Crowd:
    """Calls of one user, each in a thread of its own; what each of them said."""

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


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[Callable[[Mount], int]]:
    """How many requests of a mount have not been answered."""
    connections = tmp_path / "connections"
    connections.mkdir()
    subprocess.run(["mount", "-t", "fusectl", "none", connections], check=True)

    def count(m: Mount) -> int:
        top = mount_table.top_mount(str(m.path))
        assert top is not None
        return int((connections / top.device.partition(":")[2] / "waiting").read_text())

    yield count
    subprocess.run(["umount", connections], check=True)


@contextmanager
def prompt(limit_s: float = PROMPT_S) -> Iterator[None]:
    started = time.monotonic()
    yield
    assert time.monotonic() - started < limit_s


@contextmanager
def directory(path: Path) -> Iterator[int]:
    """Whoever has this descriptor gets by the directories above it, which are closed to other users."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield fd
    finally:
        os.close(fd)


def read_at(fd: int, name: str) -> bytes:
    with open(os.open(name, os.O_RDONLY, dir_fd=fd), "rb") as file:
        return file.read()


def test_c7_who_opens_very_many_files_leaves_descriptors_for_others(
    mount: MakeMount, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: the daemon ran out of descriptors, and every other user's open failed with EMFILE."""
    limit = 800
    monkeypatch.setattr(conftest, "CLI", ["prlimit", f"--nofile={limit}:{limit}", sys.executable, "-m", "daemon"])
    (source / "open").mkdir()
    (source / "open").chmod(0o777)
    m = mount(source, "--attr-timeout", "0")
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > limit  # of this process
    with directory(m.path / "open") as fd:

        def open_many() -> object:
            opened: list[int] = []
            try:
                for number in range(limit):
                    opened.append(os.open(f"mine-{number}", os.O_WRONLY | os.O_CREAT, dir_fd=fd))
            except OSError as error:
                failure = error.errno
                written = [os.write(each, b"all") for each in opened]
                return len(opened), failure, sum(written), others(), [os.close(each) for each in opened]
            return len(opened)

        def others() -> list[object]:
            calls: list[Callable[[], object]] = [
                lambda n=n: os.close(os.open(f"other-{n}", os.O_WRONLY | os.O_CREAT, dir_fd=fd))  # type: ignore[misc]
                for n in range(20)
            ]
            return [*Crowd(OTHER, calls).join(), *Crowd(OTHER, [lambda: read_at(fd, "../d0/f00000")]).join()]

        count, failure, written, answers, _ = Crowd(GREEDY, [open_many]).join()[0]  # type: ignore[misc]
        assert failure == errno.EMFILE and limit // 4 < count < limit * 3 // 4 and written == 3 * count
        assert answers == [None] * 20 + [(source / "d0/f00000").read_bytes()]

        def opens_again() -> bool:
            """What was closed is given back, a moment later: the kernel releases without waiting."""
            return Crowd(GREEDY, [lambda: os.close(os.open("again", os.O_WRONLY | os.O_CREAT, dir_fd=fd))]).join() == [
                None
            ]

        wait_for(opens_again, bool)


@pytest.mark.parametrize("operation", ["lookup", "read"])
def test_b5_calls_that_hang_block_only_whoever_made_them(
    mount: MakeMount, source: Path, faulty: tuple[Path, Path], waiting: Waiting, operation: str
) -> None:
    """Before: 64 such calls held every slot, and every miss of every user failed."""
    served, faults = faulty
    for number in range(150):  # without a fast path the kernel makes one look-up of a directory at a time
        (source / f"d3/{number}").mkdir()
        (source / f"d3/{number}/hangs").write_bytes(b"1")
    settle()
    m = mount(served, "--read-only", "--source-timeout", "8")
    os.listdir(m.path / "d0")
    for number in range(150):
        os.stat(m.path / f"d3/{number}" / ("hangs" if operation == "read" else ""))
    (faults / "hang").write_text("hangs")
    with directory(m.path / "d3") as fd:
        crowd = Crowd(GREEDY, [lambda n=n: read_at(fd, f"{n}/hangs") for n in range(150)])  # type: ignore[misc]
        wait_for(lambda: waiting(m), lambda count: count >= 60)
        for name in sorted(os.listdir(source / "d0"))[:5]:
            with prompt():
                assert (m.path / "d0" / name).read_bytes() == (source / "d0" / name).read_bytes()
        with prompt():
            assert not (m.path / "d1/missing").exists()
        assert len(crowd.results) < 150
        (faults / "hang").unlink()
        crowd.join()

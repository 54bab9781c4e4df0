"""A machine that refuses threads, forks or descriptors, and an index that refuses a commit: that costs time."""

import errno
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
from trio._core import _thread_cache

from cachefs.contract.messages import Message
from cachefs.data.commit import Pending
from cachefs.errors import IndexUnavailable
from cachefs.fastpath import launcher
from cachefs.fastpath.connection import HEAD
from cachefs.fastpath.launcher import FastPath
from cachefs.source.call_pool import CallPool
from cachefs.store.index.environment import LOCK_BYTES, Environment
from tests.cachefs import test_durability
from tests.cachefs.test_tasks import Clock, run
from tests.conftest import small_disk

PAYLOAD = test_durability.PAYLOAD


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[test_durability.Parts]:
    made = test_durability.Parts(tmp_path, monkeypatch)
    yield made
    made.close()


@contextmanager
def no_threads(refused: list[str] | None = None) -> Iterator[None]:
    """The machine gives no new thread. What waits in a cache of threads is none that a test may count on."""
    start = threading.Thread.start
    idle = _thread_cache.THREAD_CACHE._idle_workers
    before = idle.copy()
    idle.clear()

    def refuse(thread: threading.Thread) -> None:
        if refused is not None:
            refused.append(thread.name)
        raise RuntimeError("can't start new thread")

    threading.Thread.start = refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]
        idle.update(before)


async def until(condition: Callable[[], object]) -> None:
    with trio.fail_after(10):
        while not condition():
            await trio.sleep(0.001)


def test_a_call_to_the_source_waits_for_a_thread_without_a_slot() -> None:
    async def main() -> None:
        call_pool = CallPool(2, 60)
        answers: list[int] = []

        async def ask() -> None:
            answers.append(await call_pool.run(lambda: 1))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(call_pool.watch)
            with no_threads():
                for _ in range(8):
                    nursery.start_soon(ask)
                await trio.testing.wait_all_tasks_blocked(0.01)
                assert not answers and call_pool._shares.taken == 0
            await until(lambda: len(answers) == 8)
            assert call_pool._shares.taken == call_pool.hanging.stuck == 0
            nursery.cancel_scope.cancel()
        call_pool.close()

    run(main)


def test_a_call_that_never_gets_a_thread_ends_in_a_time_out_and_holds_nothing() -> None:
    """Before: the caller got RuntimeError, the slot was held for ever, and the time-out woke a task that had gone."""

    async def main() -> None:
        clock = Clock()
        call_pool = CallPool(1, 5, clock=clock)
        caught: list[int | None] = []

        async def ask() -> None:
            try:
                await call_pool.run(lambda: 1)
            except OSError as error:
                caught.append(error.errno)

        async with trio.open_nursery() as nursery:
            with no_threads():
                nursery.start_soon(ask)
                await trio.testing.wait_all_tasks_blocked()
                clock.now += 6
                call_pool.abandon_overdue()
                await trio.testing.wait_all_tasks_blocked()
            assert caught == [errno.ETIMEDOUT] and call_pool.timeouts == 1
            assert call_pool._shares.taken == call_pool.hanging.stuck == 0
            assert await call_pool.run(lambda: 2) == 2
        call_pool.close()

    run(main)


def test_what_is_cached_is_read_where_there_is_no_thread(parts: test_durability.Parts) -> None:
    """Before: EIO for a file that is cached, and not in the page cache."""
    read = parts.blob.read

    def not_in_memory(*arguments: Any, nowait: bool = False) -> memoryview:
        if nowait:
            raise BlockingIOError(errno.EAGAIN, "")
        return read(*arguments)

    async def main() -> None:
        test_durability.write(parts, "daemon")
        await parts.flush()
        parts.blob.read = not_in_memory  # type: ignore[method-assign, assignment]
        refused: list[str] = []
        with no_threads(refused):
            assert await parts.data.read(test_durability.inode(), 5, 100) == (PAYLOAD[5:105], True)
        assert refused

    run(main)


@test_durability.WRITERS
def test_what_was_fetched_waits_for_a_thread_that_writes_it(parts: test_durability.Parts, writer: str) -> None:
    """Before: it was dropped, its space in the blob was lost, and the log said that it was a bug."""

    async def main() -> None:
        refused: list[str] = []
        async with trio.open_nursery() as nursery:
            with no_threads(refused):
                test_durability.write(parts, writer)
                nursery.start_soon(parts.writes.run)
                await until(lambda: refused)
            assert await parts.writes.flush(10)
            nursery.cancel_scope.cancel()
        assert parts.index.totals.cached_files == 1 and parts.metrics.errors == 0

    run(main)


@test_durability.WRITERS
def test_an_index_that_refused_a_commit_is_tried_again(parts: test_durability.Parts, writer: str) -> None:
    """Before: where nothing but data was to be committed nothing was cached from then on, for want of a commit."""
    commit = parts.index.commit

    def refuse(*arguments: Any) -> Any:
        raise IndexUnavailable("no room")

    async def main() -> None:
        await parts.flush()  # the inode is in the index: no metadata are left to be committed
        parts.index.commit = refuse  # type: ignore[method-assign]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(parts.writes.run)
            test_durability.write(parts, writer)
            await until(lambda: parts.metrics.errors)
            assert not parts.writes.is_writable
            parts.index.commit = commit  # type: ignore[method-assign]
            await until(lambda: parts.writes.is_writable)
            assert parts.writes.queue(Pending(test_durability.inode(), 0, PAYLOAD))
            assert await parts.writes.flush(10)
            nursery.cancel_scope.cancel()
        assert parts.index.totals.cached_files == 1

    run(main)


class Program:
    """A fast path as the daemon sees it: a process that lives, and a socket that it listens on."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(os.fspath(path / "fastpath"))
        self.listener.listen(1)
        self.attached: list[int] = []
        self.connection: socket.socket | None = None
        self.gone = False
        monkeypatch.setattr(launcher, "is_unmounted", lambda device: self.gone)
        fd = self.listener.fileno()
        held = SimpleNamespace(device=fd, shared=SimpleNamespace(fd=fd), source=fd, blob=fd, pid=0)
        held.listener = self.listener
        self.fastpath = FastPath(
            held,  # type: ignore[arg-type]
            path / "fastpath",
            session="",
            durable="",
            log_path=None,
            received=lambda *message: None,
            attached=lambda: self.attached.append(1),
            died=lambda: None,
            unmounted=lambda: None,
        )
        self.fastpath._end_others = lambda: None  # type: ignore[method-assign]

    async def answer(self) -> None:
        self.listener.setblocking(False)
        await trio.lowlevel.wait_readable(self.listener)
        connection, _ = self.listener.accept()
        connection.send(HEAD.pack(Message.ATTACHED, 0, 0, 0))
        await until(lambda: self.attached)
        self.connection = connection

    def end(self) -> None:
        self.gone = True
        if self.connection is not None:
            self.connection.close()
        if self.fastpath._process is not None:
            self.fastpath._process.kill()
            self.fastpath._process.wait()
        self.fastpath._bury()
        self.fastpath.close()
        self.listener.close()


class Sockets:
    """The module, but for what makes one."""

    def __init__(self, make: Callable[..., socket.socket]) -> None:
        self.socket = make

    def __getattr__(self, name: str) -> Any:
        return getattr(socket, name)


def attach(program: Program, mend: Callable[[], None], tried: list[object]) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(program.fastpath.run, new=False))
            await until(lambda: tried)
            mend()
            await program.answer()
            program.gone = True
            nursery.cancel_scope.cancel()

    try:
        run(main)
    finally:
        program.end()
    assert program.attached


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EMFILE])
@pytest.mark.parametrize("call", ["fork", "pidfd_open", "socket", "thread"])
def test_a_fast_path_is_started_when_the_machine_lets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    """Before: a refused fork, thread or pidfd ended the mount; a refused socket left everybody waiting."""
    program = Program(tmp_path, monkeypatch)
    tried: list[object] = []
    monkeypatch.setattr(launcher, "PROGRAM", Path("/bin/sleep"))
    popen, pidfd_open = subprocess.Popen, os.pidfd_open
    refusing = True

    def sleeper(command: object, **options: Any) -> Any:
        refuse("fork")
        options.pop("pass_fds")
        return popen(["/bin/sleep", "60"], **options)

    def refuse(name: str) -> None:
        if refusing and name == call:
            tried.append(name)
            raise RuntimeError("can't start new thread") if call == "thread" else OSError(number, os.strerror(number))

    def make_socket(*arguments: Any) -> socket.socket:
        refuse("socket")
        return socket.socket(*arguments)

    def pidfd(pid: int) -> int:
        refuse("pidfd_open")
        return pidfd_open(pid)

    monkeypatch.setattr(subprocess, "Popen", sleeper)
    monkeypatch.setattr(os, "pidfd_open", pidfd)
    monkeypatch.setattr(program.fastpath, "_end_others", lambda: refuse("thread"))

    def mend() -> None:
        nonlocal refusing
        refusing = False

    monkeypatch.setattr(launcher, "socket", Sockets(make_socket))
    attach(program, mend, tried)
    assert program.fastpath.starts == 1


def test_a_table_of_readers_that_was_allocated_in_part_is_not_mapped(tmp_path: Path) -> None:
    """Before: a write to the rest of it killed the daemon (SIGBUS) on a disk that was almost full."""
    with small_disk(tmp_path / "disk", "64k") as disk:
        (disk / "index").mkdir(mode=0o700)
        with open(disk / "index/lock.mdb", "wb") as lock:
            lock.write(bytes(4096))
            lock.truncate(LOCK_BYTES)
        os.chmod(disk / "index/lock.mdb", 0o600)
        with pytest.raises(IndexUnavailable, match=r"cannot make the index in .*: No space left on device"):
            Environment(disk / "index", sync=True)


class Memory(dict[str, int]):
    fd = 0


@pytest.mark.promise("FA-27")
@pytest.mark.parametrize(("status", "ends"), [(1, True), (127, True), (os.EX_TEMPFAIL, False)])
def test_a_fast_path_that_never_starts_ends_its_mount_unless_the_machine_has_a_shortage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, ends: bool
) -> None:
    """Regression: it was started again for ever, and all requests waited."""
    program = Program(tmp_path, monkeypatch)
    program.fastpath.mount.shared = Memory(reconnect_timeout_ns=100_000_000)  # type: ignore[assignment]
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: popen(["/bin/sh", "-c", f"exit {status}"]))

    ended: list[bool] = []
    program.fastpath.unmounted = lambda: ended.append(not program.gone)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(program.fastpath.run, new=False))
            await until(lambda: ended or program.fastpath.starts > 4)
            program.gone = True

    try:
        run(main)
    finally:
        program.end()
    assert ended == [ends]


def test_a_log_that_cannot_be_opened_does_not_keep_a_fast_path_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: the mount ended when the log was on a disk that had become read-only."""
    program = Program(tmp_path, monkeypatch)
    program.fastpath.log_path = tmp_path / "missing" / "daemon.log"
    popen, given = subprocess.Popen, []

    def sleeper(command: object, **options: Any) -> Any:
        given.append(options["stderr"])
        return popen(["/bin/sleep", "60"])

    monkeypatch.setattr(subprocess, "Popen", sleeper)
    attach(program, lambda: None, given)
    assert given == [None] and program.fastpath.starts == 1
    assert "the fast path has no log" in caplog.text

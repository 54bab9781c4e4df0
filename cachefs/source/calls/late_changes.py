"""Changes of the source that nobody waits for any more, but which may still be made.

A call that hangs cannot be taken back: it is answered with ETIMEDOUT, and the source may carry it out minutes later. If
another change of the same object was acknowledged meanwhile, the late one would undo it. So a change waits until those
that were given up before have returned, as long as its own call might take, and fails with ETIMEDOUT after that. A
change that was given up before it has begun is not made.

A daemon that was killed leaves such calls, too: the kernel ends its threads when they return. Its successor makes no
change before (`follow`).
"""

import errno
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import ParamSpec, TypeVar

import trio

from cachefs.errors import failed

P = ParamSpec("P")
T = TypeVar("T")


class Change:
    """One change, in the threads that make its calls."""

    def __init__(self, ended: Callable[[], object]) -> None:
        """`ended`: called in a thread when a change that was given up has returned."""
        self._ended = ended
        self._lock = threading.Lock()
        self._is_running = False
        self._is_given_up = False
        self.over = trio.Event()

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        """The function, as it may be called in a thread."""

        def make(*args: P.args, **kwargs: P.kwargs) -> T:
            with self._lock:
                if self._is_given_up:
                    raise failed(errno.EINTR)
                self._is_running = True
            try:
                return function(*args, **kwargs)
            finally:
                with self._lock:
                    self._is_running = False
                    is_late = self._is_given_up
                if is_late:
                    self._ended()

        return make

    def give_up(self) -> bool:
        """Nobody waits any more. Returns whether it may still be made."""
        with self._lock:
            self._is_given_up = True
            return self._is_running


class LateChanges:
    def __init__(self, wait: Callable[[trio.Event], Awaitable[None]]) -> None:
        """`wait`: as of `CallPool`."""
        # dependencies
        self._wait = wait
        # state
        self._token = trio.lowlevel.current_trio_token()
        self._late: dict[int, list[trio.Event]] = {}
        """Inode → changes of it that were given up; each is set when it has returned."""
        self._predecessors = trio.Event()
        """Set when no thread of a killed daemon may make a change."""
        self._predecessors.set()

    @asynccontextmanager
    async def changing(self, *numbers: int) -> AsyncIterator[Change]:
        """Around a change of these inodes (0: not known). What it calls in a thread must be wrapped in the result.

        Raises ETIMEDOUT.
        """
        known = set(numbers) - {0}
        for event in (self._predecessors, *(event for number in known for event in self._late.get(number, ()))):
            await self._wait(event)
        change = Change(lambda: self._token.run_sync_soon(self._returned, change, known))
        try:
            yield change
        finally:
            if change.give_up():
                for number in known:
                    self._late.setdefault(number, []).append(change.over)

    def _returned(self, change: Change, numbers: Iterable[int]) -> None:
        change.over.set()
        for number in numbers:
            self._late[number] = [event for event in self._late.get(number, ()) if event is not change.over]
            if not self._late[number]:
                del self._late[number]

    def follow(self, pids: Sequence[int], nursery: trio.Nursery) -> None:
        """Make no change until these processes, which were killed, have ended."""
        if pids:
            self._predecessors = trio.Event()
            nursery.start_soon(self._wait_for, pids)

    async def _wait_for(self, pids: Iterable[int]) -> None:
        for pid in pids:
            try:
                process = os.pidfd_open(pid)
            except OSError:
                continue  # it has
            try:
                await trio.lowlevel.wait_readable(process)
            finally:
                os.close(process)
        self._predecessors.set()

"""Young files whose pages the kernel has, and the task that drops those pages when the files are old enough (age.py).

Each read has an entry of its own, because its data may be half of a write() that had ended when the entry before it was
handled. The fast path keeps its entries in the shared memory, where a successor of ours finds them.
"""

import heapq
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import trio

from cachefs import age
from cachefs.attributes import NANOSECONDS, UNSETTLED, Inode

GATHER_S = 0.05
"""What is due within it is dropped together."""


class Pages(Protocol):
    """The kernel's page cache of this mount."""

    async def pages(self, numbers: Iterable[int]) -> None:
        """Drop the pages of these inodes; returns when they are gone."""


class _Entry(NamedTuple):
    due_ns: int
    """CLOCK_MONOTONIC"""
    inode: int
    order: int
    dropped: Callable[[], None] | None


class YoungFiles:
    def __init__(
        self,
        kernel: Pages,
        *,
        realtime_ns: Callable[[], int] = time.time_ns,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        # dependencies
        self._kernel = kernel
        self._realtime_ns = realtime_ns
        self._monotonic_ns = monotonic_ns
        # state
        self._entries: list[_Entry] = []
        """A heap."""
        self._count = 0
        self._wake = trio.Event()

    def is_young(self, inode: Inode) -> bool:
        return age.is_young(inode, self._realtime_ns())

    def was_read(self, inode: Inode) -> None:
        """Data of a file that was young when the read began go to the kernel now.

        Its pages stay until its record expires: a reader then looks at the file before it misses them.
        """
        due_ns = self._monotonic_ns() + age.until_written_ns(inode, self._realtime_ns())
        self.note(inode.number, max(due_ns, inode.expires_ns if inode.flags & UNSETTLED else 0))

    def note(self, number: int, due_ns: int, dropped: Callable[[], None] | None = None) -> None:
        """Drop the pages of an inode at this moment of CLOCK_MONOTONIC. `dropped`: called when they are gone."""
        self._count += 1
        heapq.heappush(self._entries, _Entry(due_ns, number, self._count, dropped))
        self._wake.set()

    async def run(self) -> None:
        """The task: for ever, until cancelled."""
        while True:
            if not self._entries:
                self._wake = trio.Event()
                await self._wake.wait()
            wait_s = (self._entries[0].due_ns - self._monotonic_ns()) / NANOSECONDS
            await trio.sleep(max(0.0, wait_s) + GATHER_S)
            now_ns = self._monotonic_ns()
            due: list[_Entry] = []
            while self._entries and self._entries[0].due_ns <= now_ns:
                due.append(heapq.heappop(self._entries))
            await self._kernel.pages(dict.fromkeys(entry.inode for entry in due))
            for entry in due:
                if entry.dropped is not None:
                    entry.dropped()

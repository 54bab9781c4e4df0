"""Young files whose pages the kernel caches, and the task that drops these pages after a while (validity.py).

The kernel keeps the listing of a directory and the target of a symlink as pages, too.

Each read has its own entry, because its data may contain half of a write() that began after an earlier entry was made.

A mount with a fast path outlives its daemon, and so do the kernel's pages. Therefore a successor finds every entry:
those of the fast path in the shared memory, those of our own reads in the session. Both are written before the kernel
gets the data, and removed after it has dropped the pages.
"""

import heapq
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple, Protocol

import trio

from cachefs.contract.index import Table
from cachefs.contract.shared import SETTLE_NS
from cachefs.store.index.index import Index
from cachefs.store.index.records import FLAGGED_NUMBER, UNSETTLED, Inode, inode_key, inode_of_key
from cachefs.system.clock import NANOSECONDS, SYSTEM, Clock

GATHER_S = 0.05
"""Pages that are due within this time are dropped together."""
_KEY = b"young:"


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


@dataclass(eq=False)
class YoungFiles:
    # dependencies
    kernel: Pages
    index: Index | None = None
    """Its session outlives this daemon. None: no daemon can take this mount over."""
    _: KW_ONLY
    clock: Clock = SYSTEM
    # constants
    settle_ns: int = SETTLE_NS

    def __post_init__(self) -> None:
        # state
        self._entries: list[_Entry] = []
        """A heap."""
        self._count = 0
        self._wake = trio.Event()

    def was_read(self, inode: Inode) -> None:
        """Call before the kernel gets data of a file, or a directory's listing, that was young when the read began.

        The pages are not dropped before the record expires, so that a reader revalidates it before it misses them.
        """
        due_ns = self.clock.monotonic_ns() + self.settle_ns
        due_ns = max(due_ns, inode.expires_ns if inode.flags & UNSETTLED else 0)
        self.note(inode.number, due_ns)
        if self.index is not None:
            key = _KEY + inode_key(inode.number)
            with self.index.update() as update:
                saved = update.get(Table.META, key)
                if saved is None or _due_ns(saved) < due_ns:
                    update.put(Table.META, key, FLAGGED_NUMBER.pack(0, due_ns))

    def restore(self) -> None:
        """Take over the entries of a predecessor."""
        assert self.index is not None
        with self.index.view() as view:
            for key, value in view.scan(Table.META, _KEY):
                self.note(inode_of_key(key[len(_KEY) :]), _due_ns(value))

    def note(self, number: int, due_ns: int, dropped: Callable[[], None] | None = None) -> None:
        """Drop the pages of an inode at this time (CLOCK_MONOTONIC). `dropped`: called when that is done."""
        self._count += 1
        heapq.heappush(self._entries, _Entry(due_ns, number, self._count, dropped))
        self._wake.set()

    async def run(self) -> None:
        """The task: until cancelled."""
        while True:
            if not self._entries:
                self._wake = trio.Event()
                await self._wake.wait()
            wait_s = (self._entries[0].due_ns - self.clock.monotonic_ns()) / NANOSECONDS
            await trio.sleep(max(0.0, wait_s) + GATHER_S)
            now_ns = self.clock.monotonic_ns()
            due: list[_Entry] = []
            while self._entries and self._entries[0].due_ns <= now_ns:
                due.append(heapq.heappop(self._entries))
            await self.kernel.pages(dict.fromkeys(entry.inode for entry in due))
            for entry in due:
                if entry.dropped is not None:
                    entry.dropped()
            self._forget({entry.inode for entry in due}, now_ns)

    def _forget(self, inodes: Iterable[int], now_ns: int) -> None:
        """Pages that were due at `now_ns` have been dropped: remove their saved entries."""
        if self.index is None:
            return
        with self.index.update() as update:
            for key in (_KEY + inode_key(inode) for inode in inodes):
                saved = update.get(Table.META, key)
                if saved is not None and _due_ns(saved) <= now_ns:
                    update.delete(Table.META, key)


def _due_ns(saved: bytes) -> int:
    return int(FLAGGED_NUMBER.unpack(saved)[1])

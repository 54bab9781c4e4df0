"""An optional limit of pinned inodes: the index takes about 700 bytes of disk for each.

Without replacement nothing new is pinned beyond the limit: such files are served from the source, uncached. Otherwise
the policy names files to drop. They are dropped as by `cachefs invalidate`, with their cached data. At the next use
they are compared with the source, and may be newer. Directories stay: all below them would have to go.

The kernel does not ask again for what it caches, so a policy hears of READs only.
"""

from collections.abc import Iterable

import trio

from cachefs.contract.index import Table
from cachefs.store.index.index import Index
from cachefs.store.index.records import PINNED, Inode, inode_of_key
from policies.retention import PolicyContext, make


class InodeLimit:
    def __init__(self, index: Index, limit: int, retention: str) -> None:
        # constants
        self._limit = limit
        self._evicts = retention != "no-replacement"
        # state
        self._policy = make(retention, PolicyContext(lambda number: None))
        self._pinned: set[int] = set()
        self._exceeded = trio.Event()
        """Set when more is pinned than may be, if the policy may name victims."""
        with index.view() as view:
            for key, value in view.scan(Table.INODES, b""):
                self.changed(Inode.unpack(inode_of_key(key), value))

    def admits(self, number: int) -> bool:
        """May this inode be pinned?"""
        return self._evicts or number in self._pinned or len(self._pinned) < self._limit

    def changed(self, inode: Inode) -> None:
        """The index has this record from now on."""
        if not inode.flags & PINNED:
            self.removed(inode.number)
        elif inode.number not in self._pinned:
            self._pinned.add(inode.number)
            if not inode.is_directory:
                self._policy.inserted(inode.number)
            if self.has_to_go:
                self._exceeded.set()

    def removed(self, number: int) -> None:
        if number in self._pinned:
            self._pinned.discard(number)
            self._policy.removed(number)

    def accessed(self, units: Iterable[tuple[int, int]]) -> None:
        """These were read: (inode, number of the chunk)."""
        for number, _ in units:
            self._policy.accessed(number)

    @property
    def excess(self) -> int:
        """How many are pinned beyond the limit."""
        return len(self._pinned) - self._limit

    @property
    def has_to_go(self) -> bool:
        """Are files pinned beyond the limit that the policy may name?"""
        return self._evicts and self.excess > 0

    def victims(self, most: int) -> list[int]:
        """Inodes to drop. They no longer count as pinned."""
        found: list[int] = []
        while len(found) < most and self.excess > 0 and (number := self._policy.victim()) is not None:
            self.removed(number)
            found.append(number)
        return found

    async def wait_for_excess(self) -> None:
        """Return when something is pinned beyond the limit. Only after `victims` had none to name."""
        self._exceeded = trio.Event()
        await self._exceeded.wait()

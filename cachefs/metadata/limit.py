"""A limit to what is pinned, for those who ask for one: the index takes about 700 bytes of disk for each inode.

Without replacement nothing new is pinned beyond the limit: such files are served from the source, uncached. Else the
policy names files that go, as `cachefs invalidate` would drop them, with what is cached of them; they are compared with
the source when they are looked at again, and may be newer then. Directories stay: all below them would have to go.

What the kernel knows it does not ask for again: of all uses a policy hears of READs only.
"""

from collections.abc import Callable, Iterable

from cachefs.contract.index import Table
from cachefs.store.index.index import Index
from cachefs.store.index.records import PINNED, Inode, inode_of_key
from policies.retention import PolicyContext, make

NAMES = ("no-replacement", "fifo", "lru")


class InodeLimit:
    def __init__(self, index: Index, limit: int, retention: str) -> None:
        # constants
        self._limit = limit
        self._evicts = retention != "no-replacement"
        # state
        self._policy = make(retention, PolicyContext(lambda number: None))
        self._pinned: set[int] = set()
        self.on_excess: Callable[[], None] = lambda: None
        """Called when something has to go."""
        with index.view() as view:
            for key, value in view.scan(Table.INODES, b""):
                inode = Inode.unpack(inode_of_key(key), value)
                self.changed(inode)

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
            if self._evicts and self.excess > 0:
                self.on_excess()

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
        """Files are pinned beyond the limit that the policy will name."""
        return self._evicts and self.excess > 0

    def victims(self, most: int) -> list[int]:
        """Who goes; they count as gone."""
        found: list[int] = []
        while len(found) < most and self.excess > 0 and (number := self._policy.victim()) is not None:
            self.removed(number)
            found.append(number)
        return found

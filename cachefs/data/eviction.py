"""Making room: which cached units are evicted, by the mount's retention policy.

The policy identifies a unit by one integer, so that each of a million units costs at most 200 bytes. The knowledge of
the policy may be out of date (a unit may have been dropped for another reason); the index decides.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from cachefs.contract.index import Table
from cachefs.store.index.index import Index
from cachefs.store.index.records import Extent, inode_of_key
from policies.prefetch.sequential import CHUNK_BYTES
from policies.retention import PolicyContext, make

UNIT_BITS = 24


@dataclass(frozen=True, slots=True)
class Victim:
    inode: int
    offset: int
    extent: Extent


class Eviction:
    def __init__(self, index: Index, retention: str, part_of: Callable[[int], object]) -> None:
        """`part_of`: the directory or partition of an inode, None if it has none."""
        # dependencies
        self._index = index
        # state
        self._policy = make(retention, PolicyContext(lambda key: part_of(key >> UNIT_BITS)))
        with index.view() as view:
            cached = [
                (Extent.unpack(value).blob_offset, self._key(inode_of_key(key), inode_of_key(key[8:])))
                for key, value in view.scan(Table.EXTENTS, b"")
            ]
        for _, unit in sorted(cached):  # in the order in which they were written
            self._policy.inserted(unit)

    def _key(self, inode: int, offset: int) -> int:
        return inode << UNIT_BITS | offset // CHUNK_BYTES

    def accessed(self, units: Iterable[tuple[int, int]]) -> None:
        """Reads: (inode, number of the chunk)."""
        for inode, unit in units:
            self._policy.accessed(inode << UNIT_BITS | unit)

    def expected(self, inode: int, offset: int) -> None:
        """A prefetch request for this unit was made."""
        self._policy.expected(self._key(inode, offset))

    def committed(self, indexed: Iterable[tuple[int, int]]) -> None:
        """(inode, file offset) of new extents in the index."""
        for inode, offset in indexed:
            self._policy.inserted(self._key(inode, offset))

    def victims(self, needed_bytes: int) -> list[Victim]:
        """The extents to evict for `needed_bytes`; fewer if the policy keeps the rest. The policy forgets them."""
        found: list[Victim] = []
        with self._index.view() as view:
            while needed_bytes > 0 and (key := self._policy.victim()) is not None:
                self._policy.removed(key)
                inode, offset = key >> UNIT_BITS, (key & (1 << UNIT_BITS) - 1) * CHUNK_BYTES
                for start, extent in view.extents.between(inode, offset, offset + CHUNK_BYTES):
                    found.append(Victim(inode, start, extent))
                    needed_bytes -= extent.record_bytes
        return found

"""The extents of the durable index: which ranges of which files are in the blob.

A small file is one extent. A large file may have many: chunks of 4 MiB where it is read sequentially, and only the
requested pages where it is read randomly (policies/prefetch/sequential.py).

INVARIANT: no extent of a file lies within another. Two may overlap, because two readers fetched at the same time. So
their starts and their ends are in the same order, and the extent that contains a byte, if there is one, is the last
one that does not start after it: one step in a B+ tree.
"""

from collections.abc import Iterator
from typing import Any

from cachefs.store.index.records import Extent, inode_key, pair_key


class Extents:
    """The table in one transaction, which may be a write transaction."""

    __slots__ = ("_table", "_txn")

    def __init__(self, txn: Any, table: Any) -> None:
        self._txn = txn
        self._table = table

    def at(self, inode: int, offset: int) -> tuple[int, Extent] | None:
        """The extent that contains the byte at `offset`, and its start."""
        key = pair_key(inode, offset)
        value = self._txn.get(key, db=self._table)
        if value is not None:  # the usual case: a small file, or the start of a fetched range
            return offset, Extent.unpack(value)
        cursor = self._txn.cursor(db=self._table)
        cursor.set_range(key)  # after the end of the table prev() moves to the last key
        if not cursor.prev() or not cursor.key().startswith(key[:8]):
            return None
        start, extent = _offset_of(cursor.key()), Extent.unpack(cursor.value())
        return (start, extent) if offset < start + extent.length else None

    def between(self, inode: int, first: int, last: int) -> Iterator[tuple[int, Extent]]:
        """Those that start in [first, last)."""
        cursor = self._txn.cursor(db=self._table)
        end = pair_key(inode, last)
        more = cursor.set_range(pair_key(inode, first))
        while more and cursor.key() < end:
            yield _offset_of(cursor.key()), Extent.unpack(cursor.value())
            more = cursor.next()

    def of(self, inode: int) -> Iterator[tuple[int, Extent]]:
        return self.between(inode, 0, (1 << 64) - 1)

    def add(self, inode: int, offset: int, extent: Extent) -> list[Extent] | None:
        """Returns the extents that it replaces because they lie within it. None: it lies within another, not added."""
        end = offset + extent.length
        other = self.at(inode, offset)
        same = other is not None and other[0] == offset and other[1].length == extent.length
        if other is not None and not same and other[0] + other[1].length >= end:
            return None
        within = [(start, each) for start, each in self.between(inode, offset, end) if start + each.length <= end]
        for start, _ in within:
            self.remove(inode, start)
        self._txn.put(pair_key(inode, offset), extent.pack(), db=self._table)
        return [each for _, each in within]

    def remove(self, inode: int, offset: int) -> None:
        """The one that starts at `offset`."""
        self._txn.delete(pair_key(inode, offset), db=self._table)

    def has_any(self, inode: int) -> bool:
        cursor = self._txn.cursor(db=self._table)
        return bool(cursor.set_range(inode_key(inode)) and cursor.key().startswith(inode_key(inode)))


def _offset_of(key: bytes) -> int:
    return int.from_bytes(key[8:16], "big")

"""The index: two LMDB environments with the same tables, read as one (environment.py).

- The **durable** index lies in the cache directory and is always synced. It holds what is pinned, and the extents.
- The **session** lies in the runtime directory and is never synced (MDB_NOSYNC: 3 µs a commit, 261 µs synced). It
  holds what the kernel was told and the durable index has not got (yet): it survives a crash of the daemon, not of
  the machine. A record is committed here before the reply goes out; where there is no room, to memory (overflow.py).

Reading looks into the session first, then into the durable index. A tombstone (an empty value) in the session hides
what the durable index says. `commit` moves what is pinned from the session to the durable index in batches; a log
structured merge tree with two levels, in other words.

Who may write: the session, the trio thread alone; the durable index, the write-behind thread alone (`commit`).
Because `forget_committed` runs on the trio thread too, a reader there can never miss a record that is on its way.

INVARIANT: an extent counts only if its version is the version of its inode's record.
INVARIANT: a directory that is LISTED in the durable index has all its names there (dirty.py).
INVARIANT: a key is in `dirty` if the session has a pinned value or a tombstone for it, or hides a durable value.
"""

import logging
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import lmdb

from cachefs.contract.index import Table
from cachefs.errors import IndexUnavailable
from cachefs.store.index.dirty import Batch, Dirty
from cachefs.store.index.environment import TOMBSTONE, Environment, Key, Update, View
from cachefs.store.index.extents import Extents
from cachefs.store.index.overflow import MISSING, Missing
from cachefs.store.index.records import LISTED, PINNED, Extent, Inode, inode_key, inode_of_key

log = logging.getLogger(__name__)

_STARTED = b"started:"
_STARTED_CODEC = struct.Struct("<I4xQ")
DRAIN_KEYS = 256
_NUMBERS = 1 << 64
"""Inodes and offsets are below."""


@dataclass(slots=True)
class Totals:
    """What the blob holds, by the durable index."""

    cached_files: int = 0
    cached_bytes: int = 0
    blob_bytes: int = 0

    _CODEC = struct.Struct("<I4x3Q")

    def count(self, extent: Extent, sign: int) -> None:
        """An extent more, or one less."""
        self.cached_bytes += sign * extent.length
        self.blob_bytes += sign * extent.record_bytes

    def pack(self) -> bytes:
        return self._CODEC.pack(PINNED, self.cached_files, self.cached_bytes, self.blob_bytes)

    @classmethod
    def unpack(cls, value: bytes) -> "Totals":
        return cls(*cls._CODEC.unpack(value)[1:])


@dataclass(slots=True)
class Commit:
    """What one commit did, for those who must follow it up."""

    flushed: list[tuple[Key, bytes | None]]
    indexed: dict[tuple[int, int], Extent]
    """By inode and file offset: the extents that were accepted, in the order in which they came."""
    rejected: list[Extent]
    """Of versions that are gone: nothing will ever point at them."""
    freed: list[Extent]
    transaction: int
    totals: Totals
    unclaimed: int = 0
    """How many of the rejected belong to no record: what was fetched is not cached."""


class Index:
    """The two environments as one. Made once; `close` at the end."""

    def __init__(self, durable: Environment, session: Environment) -> None:
        self.durable = durable
        self.session = session
        self.dirty = Dirty()
        self.in_flight: set[Key] = set()
        """Taken off `dirty` by a commit that has not ended."""
        self.available = True
        """False after a failed commit, until one succeeds: nothing new is pinned meanwhile."""
        self.on_dirty: Callable[[], None] = lambda: None
        """Called when there is something to commit."""
        self.on_refused: Callable[[str], None] = lambda reason: None
        """Called when the session could not be written."""
        with self.durable.lmdb.begin() as txn:
            value: Any = txn.get(b"totals", db=self.durable.tables[Table.META])
        self.totals = Totals.unpack(value) if value else Totals()

    def view(self) -> View:
        return View(self.session, self.durable)

    def update(self) -> Update:
        return Update(self.session, self.durable, self.in_flight, self._written, self._refused)

    def _refused(self, error: lmdb.Error) -> None:
        self.on_refused(
            f"{self.session.path} cannot be written, and is kept in memory: requests are slower until there is room "
            f"again ({error})"
        )

    def drain(self) -> bool:
        """Write some of what the session could not take. False: it cannot yet, or there is nothing."""
        overflow = self.session.overflow
        # A directory's record goes behind its names: it says that there are no others.
        waiting = overflow.first(DRAIN_KEYS, last=Table.INODES)
        if not waiting:
            return False
        try:
            with self.session.lmdb.begin(write=True) as txn:
                for table, key, value in waiting:
                    if value is None:
                        txn.delete(key, db=self.session.tables[table])
                    else:
                        txn.put(key, value, db=self.session.tables[table])
        except lmdb.Error as error:
            self._refused(error)
            return False
        for table, key, _ in waiting:
            overflow.put(table, key, MISSING)
        overflow.settle()
        if not overflow:
            log.info("%s can be written again", self.session.path)
        return True

    def _written(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self.dirty.add(key)
        self.on_dirty()

    def run_started_ns(self, run: int) -> int:
        """When a run began, in nanoseconds since 1970; 0 where nobody knows."""
        with self.durable.lmdb.begin() as txn:
            value: Any = txn.get(_STARTED + inode_key(run), db=self.durable.tables[Table.META])
        return int(_STARTED_CODEC.unpack(value)[1]) if value else 0

    def note_run(self, run: int, now_ns: int) -> None:
        """A run begins."""
        key = _STARTED + inode_key(run)
        with self.durable.write() as txn:
            txn.put(key, _STARTED_CODEC.pack(PINNED, now_ns), db=self.durable.tables[Table.META], overwrite=False)

    def pinned_inodes(self) -> int:
        """Inodes that are pinned, on disk or on their way there."""
        count = self.durable.entries(Table.INODES)
        with self.view() as view:
            for table, key in {*self.dirty, *self.in_flight}:
                if table is Table.INODES:
                    value = view.get(table, key)
                    pinned = value is not None and bool(value[0] & PINNED)
                    count += pinned - (view.in_durable(table, key) is not None)
        return count

    def recover_session(self, *, same_mount: bool) -> None:
        """After a crash of the daemon: keep what was on its way to the durable index, drop the rest.

        `same_mount`: the kernel's mount outlived the daemon, so that the rest is still known to it, and kept too.
        """
        listed: list[Key] = []
        """Directories that are marked so: they go behind their names (dirty.py)."""
        with self.session.write() as txn:
            for table in Table:
                database = self.session.tables[table]
                cursor: Any = txn.cursor(db=database)
                cursor.first()
                while key := cursor.key():  # empty behind the last one
                    value = cursor.value()
                    if table is Table.INODES and value and value[0] & PINNED and value[0] & LISTED:
                        listed.append((table, key))
                        cursor.next()
                    elif value == TOMBSTONE or value[0] & PINNED:
                        self.dirty.add((table, key))
                        cursor.next()
                    elif same_mount:
                        if self._durable_get(table, key) is not None:
                            self.dirty.add((table, key))
                        cursor.next()
                    elif self._durable_get(table, key) is not None:
                        # It hid a durable value: that must go, and the value itself was of the old mount's kernel.
                        cursor.put(key, TOMBSTONE)
                        self.dirty.add((table, key))
                        cursor.next()
                    else:
                        cursor.delete()  # and moves on
        for each in listed:
            self.dirty.add(each)

    def _durable_get(self, table: Table, key: bytes) -> bytes | None:
        with self.durable.lmdb.begin() as txn:
            value: bytes | None = txn.get(key, db=self.durable.tables[table])
            return value

    # --- extents: read with a transaction that lives as long as the read of the blob (hazard 14) -------------------

    def extents(self, txn: lmdb.Transaction) -> Extents:
        return Extents(txn, self.durable.tables[Table.EXTENTS])

    def extent_reader(self) -> lmdb.Transaction:
        """A read transaction of the durable index; `abort()` it when the bytes have been read."""
        return self.durable.lmdb.begin()

    # --- commit: in the write-behind thread -----------------------------------------------------------------------

    def take_dirty(self, limit: int, first: Iterable[Key] = ()) -> Batch:
        """About `limit` keys to commit, and those of `first`, taken off the list, with the values that they have now.

        On the trio thread. `restore_dirty` if the commit fails.
        """
        keys = self.dirty.take(limit, first)
        batch = Batch(keys, self.session.lmdb.begin() if keys else None)
        if overflow := self.session.overflow:
            found = ((key, overflow.find(*key)) for key in keys)
            batch.above = {key: value for key, value in found if not isinstance(value, Missing)}
        self.in_flight.update(keys)
        for table, key in keys:
            if table is Table.INODES and self.dirty.has_names_of(key):
                batch.incomplete.add(key)
                value = self._value_in_session(batch, table, key)
                if value and value[0] & LISTED:
                    self.dirty.add((table, key))  # once more, with the last of its names
        return batch

    def restore_dirty(self, batch: Batch) -> None:
        batch.end()
        self.dirty.put_first(batch.keys)
        self.in_flight.difference_update(batch.keys)

    def commit(
        self,
        batch: Batch | None,
        extents: Iterable[tuple[int, int, Extent]],
        dropped: Iterable[tuple[int, int, int]] = (),
    ) -> Commit:
        """Write a batch to the durable index, synced. Raises IndexUnavailable; then nothing was written.

        `batch`: of `take_dirty`; None: extents alone.
        `extents`: (inode, file offset, extent), whose payload is on disk. An extent whose inode the durable index
        does not have in that very version (after this batch) is not indexed but freed.
        `dropped`: (inode, file offset, blob offset) of extents that turned out corrupt.
        """
        try:
            return self._commit(batch, extents, dropped)
        except lmdb.Error as error:
            raise IndexUnavailable(str(error)) from error
        finally:
            if batch is not None:
                batch.end()

    def _commit(
        self,
        batch: Batch | None,
        extents: Iterable[tuple[int, int, Extent]],
        dropped: Iterable[tuple[int, int, int]],
    ) -> Commit:
        totals = Totals(self.totals.cached_files, self.totals.cached_bytes, self.totals.blob_bytes)
        result = Commit([], {}, [], [], 0, totals)
        tables = self.durable.tables
        with self.durable.lmdb.begin(write=True) as txn:
            table_of_extents = self.extents(txn)
            for table, key in sorted(batch.keys if batch is not None else ()):
                value = self._value(batch, table, key)
                if value is None:  # deleted before it ever got here
                    result.flushed.append(((table, key), None))
                    continue
                if table is Table.INODES:
                    self._drop_other_versions(txn, key, value, result)
                if value and value[0] & PINNED:
                    txn.put(key, value, db=tables[table])
                else:
                    txn.delete(key, db=tables[table])
                result.flushed.append(((table, key), value))
            for inode, offset, blob_offset in dropped:
                if not (0 <= inode < _NUMBERS and 0 <= offset < _NUMBERS):
                    continue  # no such place; one bad row must not stop all others
                found = table_of_extents.at(inode, offset)
                if found is not None and found[1].blob_offset == blob_offset:
                    table_of_extents.remove(inode, offset)
                    self._free(txn, inode, [found[1]], result)
            for inode, offset, extent in extents:
                self._add_extent(txn, inode, offset, extent, result)
            txn.put(b"totals", totals.pack(), db=tables[Table.META])
        result.transaction = self.durable.last_transaction()
        self.totals = totals
        return result

    def _value(self, batch: Batch | None, table: Table, key: bytes) -> bytes | None:
        """What a batch writes under a key."""
        assert batch is not None
        value = self._value_in_session(batch, table, key)
        if value and table is Table.INODES and value[0] & LISTED and key in batch.incomplete:
            value = bytes([value[0] & ~LISTED]) + value[1:]
        return value

    def _value_in_session(self, batch: Batch, table: Table, key: bytes) -> bytes | None:
        if (table, key) in batch.above:
            return batch.above[table, key]
        value: bytes | None = batch.moment.get(key, db=self.session.tables[table])
        return value

    def _add_extent(self, txn: lmdb.Transaction, inode: int, offset: int, extent: Extent, result: Commit) -> None:
        value: Any = txn.get(inode_key(inode), db=self.durable.tables[Table.INODES])
        if value is None or Inode.unpack(inode, value).version != extent.version:
            result.rejected.append(extent)
            result.unclaimed += 1
            return
        extents = self.extents(txn)
        if (other := extents.at(inode, offset)) and other[1].blob_offset == extent.blob_offset:
            return  # reported twice: the daemon that committed it died before it said so
        first = not extents.has_any(inode)
        within = extents.add(inode, offset, extent)
        if within is None:
            result.rejected.append(extent)
            return
        result.indexed[inode, offset] = extent
        result.totals.cached_files += first
        result.totals.count(extent, 1)
        self._free(txn, inode, within, result)

    def _drop_other_versions(self, txn: lmdb.Transaction, key: bytes, value: bytes | None, result: Commit) -> None:
        """The inode's record is about to change: extents of a version that it no longer has are freed."""
        old: Any = txn.get(key, db=self.durable.tables[Table.INODES])
        if old is None:
            return
        number = inode_of_key(key)
        if value and value[0] & PINNED and Inode.unpack(number, value).version == Inode.unpack(number, old).version:
            return
        extents = self.extents(txn)
        found = list(extents.of(number))
        for start, _ in found:
            extents.remove(number, start)
        self._free(txn, number, [extent for _, extent in found], result)

    def _free(self, txn: lmdb.Transaction, inode: int, freed: list[Extent], result: Commit) -> None:
        for extent in freed:
            result.freed.append(extent)
            result.totals.count(extent, -1)
        if freed and not self.extents(txn).has_any(inode):
            result.totals.cached_files -= 1

    def forget_committed(self, flushed: Iterable[tuple[Key, bytes | None]]) -> None:
        """Take what was committed out of the session, unless it has changed since. On the trio thread."""
        with self.update() as update:
            for (table, key), value in flushed:
                self.in_flight.discard((table, key))
                if value is None or (value and not value[0] & PINNED):
                    continue  # not pinned: the session is where it lives
                if (table, key) not in self.dirty:  # else it was written again meanwhile
                    update.clear(table, key)

    def close(self) -> None:
        self.session.close()
        self.durable.close()

"""The index: two LMDB environments with the same tables, read as one (environment.py).

- The **durable** index is in the cache directory and always synced. It contains pinned values and the extents.
- The **session** is in the runtime directory and never synced (MDB_NOSYNC: 3 µs a commit, 261 µs synced). It contains
  what the kernel was told and the durable index does not have (yet). It survives a crash of the daemon, not of the
  machine. A record is committed here before the reply is sent; if there is no room, to memory (overflow.py).

Reads look into the session first, then into the durable index. A tombstone (an empty value) in the session hides the
value of the durable index. `commit` moves pinned values from the session to the durable index in batches. Together they
are a log-structured merge tree with two levels.

Only the trio thread writes to the session, and only the write-behind thread to the durable index (`commit`).
`forget_committed` also runs on the trio thread, so that a reader there never misses a record that is being committed.

INVARIANT: an extent counts only if its version is the version of its inode's record.
INVARIANT: a directory that is LISTED in the durable index has all its names there (dirty.py).
INVARIANT: a key is in `dirty` if the session has a pinned value or a tombstone for it, or hides a durable value.
"""

import logging
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import lmdb

from cachefs.contract.index import Table
from cachefs.errors import IndexUnavailable
from cachefs.store.index import damage, pages
from cachefs.store.index.dirty import Batch, Dirty
from cachefs.store.index.environment import DATA, TOMBSTONE, Environment, Key, Update, View
from cachefs.store.index.extents import Extents
from cachefs.store.index.overflow import MISSING, Missing
from cachefs.store.index.records import FLAGGED_NUMBER, LISTED, PINNED, Extent, Inode, inode_key, inode_of_key
from cachefs.system.listeners import Listeners
from cachefs.system.threads import in_thread

log = logging.getLogger(__name__)

TOTALS = b"totals"
_STARTED = b"started:"
DRAIN_KEYS = 256
_NUMBERS = 1 << 64
"""The limit of inode numbers and offsets."""


@dataclass(slots=True)
class Totals:
    """The contents of the blob, according to the durable index."""

    cached_files: int = 0
    cached_bytes: int = 0
    blob_bytes: int = 0

    _CODEC = struct.Struct("<I4x3Q")

    def count(self, extent: Extent, sign: int) -> None:
        """`sign`: 1 for an extent that is added, -1 for one that is removed."""
        self.cached_bytes += sign * extent.length
        self.blob_bytes += sign * extent.record_bytes

    def pack(self) -> bytes:
        return self._CODEC.pack(PINNED, self.cached_files, self.cached_bytes, self.blob_bytes)

    @classmethod
    def unpack(cls, value: bytes) -> "Totals":
        return cls(*cls._CODEC.unpack(value)[1:])


@dataclass(slots=True)
class Commit:
    """The result of one commit."""

    flushed: list[tuple[Key, bytes | None]]
    indexed: dict[tuple[int, int], Extent]
    """By inode and file offset: the extents that were accepted, in the order of the call."""
    rejected: list[Extent]
    """Of versions that the index does not have any more: no record refers to them."""
    freed: list[Extent]
    transaction: int
    totals: Totals
    unclaimed: int = 0
    """The number of rejected extents whose version no inode has: what was fetched is not cached."""


class Index:
    """The two environments as one."""

    def __init__(self, durable: Environment, session: Environment) -> None:
        self.durable = durable
        self.session = session
        self.dirty = Dirty()
        self.in_flight: set[Key] = set()
        """Keys that were removed from `dirty` by a commit that has not ended."""
        self.is_writable = True
        """False after a failed commit, until one succeeds: nothing new is pinned meanwhile."""
        self.on_dirty: Listeners[[]] = Listeners()
        """Called when there is something to commit."""
        self.on_refused: Listeners[[str]] = Listeners()
        """Called with the reason when the session cannot be written."""
        value = durable.get(Table.META, TOTALS)
        with durable.failing("read"):
            self.totals = Totals.unpack(value) if value else Totals()

    @property
    def available(self) -> bool:
        """Can new values be pinned?"""
        return self.is_writable and not self.durable.damage.is_found

    async def lost_names(self, number: int) -> list[tuple[int, bytes]]:
        """Names that lead to an inode whose links a damaged index has lost, as (parent, name)."""
        return await in_thread(partial(damage.names_of, self.durable, number)) if self.durable.damage.is_found else []

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
        """Write some of the overflow to the session. False: it still cannot be written, or there is nothing."""
        overflow = self.session.overflow
        # A directory's record is written after its names, because LISTED says that its listing has no others.
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
        overflow.update_mark()
        if not overflow:
            log.info("%s can be written again", self.session.path)
        return True

    def _written(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self.dirty.add(key)
        self.on_dirty()

    def run_started_ns(self, run: int) -> int:
        """When a run began, in nanoseconds since 1970; 0: not known."""
        value = self.durable.get(Table.META, _STARTED + inode_key(run))
        return int(FLAGGED_NUMBER.unpack(value)[1]) if value else 0

    def note_run(self, run: int, now_ns: int) -> None:
        """Record when a run began."""
        key, value = _STARTED + inode_key(run), FLAGGED_NUMBER.pack(PINNED, now_ns)
        with self.durable.write() as txn:
            txn.put(key, value, db=self.durable.tables[Table.META], overwrite=False)

    def pinned_inodes(self) -> int:
        """The number of pinned inodes, committed or not. 0: not known."""
        try:
            count = self.durable.entries(Table.INODES)
        except IndexUnavailable:
            return 0
        with self.view() as view:
            for table, key in {*self.dirty, *self.in_flight}:
                if table is Table.INODES:
                    value = view.get(table, key)
                    pinned = value is not None and bool(value[0] & PINNED)
                    count += pinned - (view.in_durable(table, key) is not None)
        return count

    def recover_session(self, *, same_mount: bool, lost_records: bool = False) -> None:
        """After a crash of the daemon: keep what the durable index does not have yet, and drop the rest.

        `same_mount`: the kernel's mount outlived the daemon and still knows the rest, which is kept as well.
        `lost_records`: the durable index was rebuilt: no listing is complete any more.
        """
        listed: list[Key] = []
        """LISTED directories, which must be committed after their names (dirty.py)."""
        with self.session.write() as txn:
            for table in Table:
                database = self.session.tables[table]
                cursor: Any = txn.cursor(db=database)
                cursor.first()
                while key := cursor.key():  # empty after the last one
                    value = cursor.value()
                    if lost_records and table is Table.INODES and value and value[0] & LISTED:
                        value = bytes([value[0] & ~LISTED]) + value[1:]
                        cursor.put(key, value)
                    must_be_committed = value == TOMBSTONE or value[0] & PINNED
                    hides = not must_be_committed and self.durable.get(table, key) is not None
                    if hides and not same_mount:
                        # The durable value must be deleted; this value was valid only for the kernel of the old mount.
                        cursor.put(key, TOMBSTONE)
                    if not (must_be_committed or hides or same_mount):
                        cursor.delete()  # moves to the next key
                        continue
                    if table is Table.INODES and value and value[0] & PINNED and value[0] & LISTED:
                        listed.append((table, key))
                    elif must_be_committed or hides:
                        self.dirty.add((table, key))
                    cursor.next()
        for each in listed:
            self.dirty.add(each)

    # --- extents: the transaction stays open until their bytes have been read from the blob (hazard 14) ------------

    def extents(self, txn: Any) -> Extents:
        return Extents(txn, self.durable.tables[Table.EXTENTS])

    def extent_at(self, txn: Any, inode: int, offset: int) -> tuple[int, Extent] | None:
        """The extent that contains the byte at `offset`, and its start. None where the index is damaged, too."""
        try:
            return self.extents(txn).at(inode, offset)
        except (lmdb.Error, struct.error) as error:
            self.durable.failed("read", error)
            return None

    def extent_reader(self) -> Any:
        """A read transaction of the durable index. Call `abort()` when the bytes have been read."""
        return self.durable.reader()

    # --- commit: in the write-behind thread -----------------------------------------------------------------------

    def take_dirty(self, limit: int, first: Iterable[Key] = ()) -> Batch:
        """Remove about `limit` keys and those of `first` from `dirty`, to be committed with their present values.

        On the trio thread. Call `restore_dirty` if the commit fails.
        """
        keys = self.dirty.take(limit, first)
        batch = Batch(keys, self.session.lmdb.begin() if keys else None, self.session.tables)
        if overflow := self.session.overflow:
            found = ((key, overflow.find(*key)) for key in keys)
            batch.above = {key: value for key, value in found if not isinstance(value, Missing)}
        self.in_flight.update(keys)
        for table, key in keys:
            if table is Table.INODES and self.dirty.has_names_of(key):
                value = batch.value(table, key)
                batch.incomplete.add(key)
                if value and value[0] & LISTED:
                    self.dirty.add((table, key))  # once more, with the last of its names
        return batch

    def restore_dirty(self, batch: Batch) -> None:
        batch.end()
        self.dirty.put_first(batch.keys)
        self.in_flight.difference_update(batch.keys)

    def commit(
        self,
        batch: Batch,
        extents: Iterable[tuple[int, int, Extent]],
        dropped: Iterable[tuple[int, int, int]] = (),
    ) -> Commit:
        """Write a batch to the durable index, synced. Raises IndexUnavailable; then nothing was written.

        `batch`: of `take_dirty`.
        `extents`: (inode, file offset, extent), whose payload is on disk. An extent is rejected if the durable index
        (after this batch) does not have its inode in the same version.
        `dropped`: (inode, file offset, blob offset) of corrupt extents.
        """
        try:
            self.durable.check()
            with self.durable.failing("write to"):
                return self._commit(batch, extents, dropped)
        finally:
            batch.end()

    def _commit(
        self, batch: Batch, extents: Iterable[tuple[int, int, Extent]], dropped: Iterable[tuple[int, int, int]]
    ) -> Commit:
        totals = Totals(self.totals.cached_files, self.totals.cached_bytes, self.totals.blob_bytes)
        result = Commit([], {}, [], [], 0, totals)
        tables = self.durable.tables
        with self.durable.lmdb.begin(write=True) as txn:
            table_of_extents = self.extents(txn)
            for table, key in sorted(batch.keys):
                value = batch.value(table, key)
                if value is None:  # deleted before it was committed
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
                    continue  # one invalid row must not stop all others
                found = table_of_extents.at(inode, offset)
                if found is not None and found[1].blob_offset == blob_offset:
                    table_of_extents.remove(inode, offset)
                    self._free(txn, inode, [found[1]], result)
            for inode, offset, extent in extents:
                self._add_extent(txn, inode, offset, extent, result)
            txn.put(TOTALS, totals.pack(), db=tables[Table.META])
        pages.extend(self.durable.path / DATA, self.durable.lmdb)
        result.transaction = int(self.durable.lmdb.info()["last_txnid"])
        self.totals = totals
        return result

    def _add_extent(self, txn: lmdb.Transaction, inode: int, offset: int, extent: Extent, result: Commit) -> None:
        value: Any = txn.get(inode_key(inode), db=self.durable.tables[Table.INODES])
        if value is None or Inode.unpack(inode, value).version != extent.version:
            result.rejected.append(extent)
            result.unclaimed += 1
            return
        extents = self.extents(txn)
        if (other := extents.at(inode, offset)) and other[1].blob_offset == extent.blob_offset:
            return  # reported twice: the daemon that committed it died before it could confirm that
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
        """The record of an inode is about to change: free the extents of its old version."""
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
        """Remove what was committed from the session, unless it has changed since. On the trio thread."""
        with self.update() as update:
            for (table, key), value in flushed:
                self.in_flight.discard((table, key))
                if value is None or (value and not value[0] & PINNED):
                    continue  # not pinned: it stays in the session
                if (table, key) not in self.dirty:  # not written again meanwhile
                    update.clear(table, key)

    def close(self) -> None:
        self.session.close()
        self.durable.close()

"""The data cache: reads of cached ranges, admission of fetched ranges, and room.

A *unit* is kept or evicted as a whole: a small file, or what begins in a chunk of 4 MiB of a larger file. Any *range*
of a file can be fetched, and becomes one record in the blob and one extent in the index.

`read` is the hit path: the queue first, then the index, then the blob. Bytes in the page cache are read and verified at
once (RWF_NOWAIT), others in a thread. The LMDB transaction that found the extent stays open until its bytes have been
read, so that its space is not freed meanwhile (hazard 14).

`admit` queues a range that was just fetched for write_behind.py. Its reader has been answered and never waits: if the
queue or the cache is full, or the disk is broken, the range is not cached.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial

import trio

from cachefs.data.commit import Pending
from cachefs.data.eviction import Eviction, Victim
from cachefs.data.write_behind import WriteBehind
from cachefs.errors import CorruptRecord
from cachefs.options import CacheLevel, Options
from cachefs.stats.metrics import Metrics
from cachefs.store.blob import record
from cachefs.store.blob.blob import Blob
from cachefs.store.index.environment import View
from cachefs.store.index.index import Index
from cachefs.store.index.records import Extent, Inode, inode_of_key
from cachefs.system.listeners import Listeners
from cachefs.system.threads import is_refused
from policies.admission import Capacity
from policies.prefetch.sequential import CHUNK_BYTES

log = logging.getLogger(__name__)

BLOB_THREADS = 16
RESERVE_BYTES = 64 << 20
RESERVE_SHARE = 100
BATCH_OUT = 4096
"""So many extents are evicted at once after the cache has become smaller."""


@dataclass(eq=False)
class DataCache:
    # dependencies
    index: Index
    blob: Blob
    options: Options
    metrics: Metrics
    writes: WriteBehind
    _: KW_ONLY
    eviction: Eviction | None = None
    """None: nothing is replaced."""
    unreported_bytes: Callable[[], int] = lambda: 0
    """What the fast path has fetched and not reported yet."""
    is_left: Callable[[int], bool] = lambda _: False
    """Does the fast path leave the misses of this volume (`Stat.device`) to the daemon, which appends them then?"""
    # constants
    appends: bool = True
    """False: the fast path appends."""

    def __post_init__(self) -> None:
        self.writes.on_commit.add(self.make_room)
        # state
        self.size_bytes = self.options.cache_size_bytes
        """The disk space that the cache may use."""
        self.on_accessed: Listeners[[Sequence[tuple[int, int]]]] = Listeners()
        """Called with what is read: (inode, number of the chunk)."""
        self._threads = trio.CapacityLimiter(BLOB_THREADS)

    # --- units -----------------------------------------------------------------------------------------------------

    def is_small(self, inode: Inode) -> bool:
        return inode.size <= min(self.options.small_file_bytes, CHUNK_BYTES)

    def unit_of(self, inode: Inode, offset: int) -> tuple[int, int]:
        """(offset, length) of the unit that contains the byte at `offset`."""
        if self.is_small(inode):
            return 0, inode.size
        start = offset // CHUNK_BYTES * CHUNK_BYTES
        return start, min(CHUNK_BYTES, inode.size - start)

    def units(self, inode: Inode) -> Iterator[tuple[int, int]]:
        """All units of a file, as `unit_of` gives them."""
        offset = 0
        while offset < inode.size:
            yield (unit := self.unit_of(inode, offset))
            offset = sum(unit)

    def file_bytes(self, inode: Inode) -> int:
        """The size of all units of a file in the cache. They are not listed: a size is only a claim (hazard 42)."""
        if self.is_small(inode):
            return record.record_bytes(inode.size) if inode.size else 0
        chunks, rest = divmod(inode.size, CHUNK_BYTES)
        return chunks * record.record_bytes(CHUNK_BYTES) + (record.record_bytes(rest) if rest else 0)

    # --- hits ------------------------------------------------------------------------------------------------------

    async def read(self, inode: Inode, offset: int, length: int) -> tuple[memoryview, bool] | None:
        """Up to `length` bytes, as many as one range contains, and whether that was a hit. None: not cached."""
        pending = self.writes.pending_at(inode, offset)
        if pending is not None:
            was_read, pending.read = pending.read, True
            start = offset - pending.offset
            return memoryview(pending.payload)[start : start + length], was_read
        transaction = self.index.extent_reader()
        try:
            found = self.index.extent_at(transaction, inode.number, offset)
            if found is None or found[1].version != inode.version:
                return None
            begin, extent = found
            if self.writes.is_dropped(inode.number, begin, extent.blob_offset):
                return None
            try:
                start = offset - begin
                return await self._read_blob(extent, start, min(length, extent.length - start)), True
            except CorruptRecord as error:
                self.corrupt(inode.number, begin, extent.blob_offset, str(error))
            except OSError as error:
                self.writes.failed("read", f"cannot read the blob: {error}")
                self.writes.drop(inode.number, begin, extent.blob_offset)
            return None
        finally:
            transaction.abort()

    def corrupt(self, inode: int, offset: int, blob_offset: int, reason: str) -> None:
        """Count and drop a corrupt record."""
        if not self.writes.is_dropped(inode, offset, blob_offset):
            self.metrics.corrupt_records += 1
            self.writes.failed("corrupt", f"a corrupt record was dropped: {reason}")
            self.writes.drop(inode, offset, blob_offset)

    async def _read_blob(self, extent: Extent, start: int, length: int) -> memoryview:
        try:
            return self.blob.read(extent, start, length, nowait=True)
        except BlockingIOError:
            pass
        except OSError as error:
            log.debug("no RWF_NOWAIT here: %s", error)
        read = partial(self.blob.read, extent, start, length)
        try:
            data = await trio.to_thread.run_sync(read, limiter=self._threads)
        except RuntimeError as error:
            if not is_refused(error):
                raise
            data = read()  # blocks other tasks for one read of the local disk; a thread might not be granted for long
        self.metrics.disk_bytes += len(data)
        return data

    def drop(self, view: View, number: int) -> int:
        """Drop all extents of an inode with the next commit. Returns the size of their payload."""
        size = 0
        for offset, extent in view.extents.of(number):
            self.writes.drop(number, offset, extent.blob_offset)
            size += extent.length
        return size

    def mark_read(self, inode: Inode, offset: int) -> None:
        """The read that a range was fetched for has been answered: later reads of it are hits."""
        pending = self.writes.pending_at(inode, offset)
        if pending is not None:
            pending.read = True

    def range_at(self, view: View, inode: Inode, offset: int) -> tuple[int, int] | None:
        """(start, end) of the range that is cached or queued and contains the byte at `offset`."""
        pending = self.writes.pending_at(inode, offset)
        if pending is not None:
            return pending.offset, pending.end
        found = view.extents.at(inode.number, offset)
        if found is None or found[1].version != inode.version:
            return None
        return found[0], found[0] + found[1].length

    def starts_between(self, view: View, inode: Inode, first: int, last: int) -> list[int]:
        """The starts, in [first, last), of ranges that are cached or queued."""
        in_blob = (start for start, _ in view.extents.between(inode.number, first, last))
        return [*self.writes.pending_starts(inode, first, last), *in_blob]

    def holds(self, view: View, inode: Inode, unit: tuple[int, int]) -> bool:
        """True if all of the unit is cached or queued."""
        offset, end = unit[0], unit[0] + unit[1]
        while offset < end:
            found = self.range_at(view, inode, offset)
            if found is None:
                return False
            offset = found[1]
        return True

    def holds_all(self, view: View, inode: Inode) -> bool:
        """True if all of the file is cached or queued."""
        return self.holds(view, inode, (0, inode.size))

    # --- admission -------------------------------------------------------------------------------------------------

    def _appends(self, inode: Inode) -> bool:
        return self.options.cache is CacheLevel.FULL and (self.appends or self.is_left(inode.device))

    def admits(self, inode: Inode, length: int, *, ahead: bool = False) -> bool:
        """Will a range of `length` bytes be cached? Evicts for it if necessary, but not if it is fetched `ahead`."""
        if not self._appends(inode) or not self.writes.takes(length):
            return False
        record_bytes = record.record_bytes(length)
        if (not ahead or self.options.evicts_ahead) and not self.fits(record_bytes):
            self.make_room(record_bytes)
        return self.fits(record_bytes)

    def fits(self, record_bytes: int) -> bool:
        return Capacity(self.capacity_bytes).admits(record_bytes, self.used_bytes)

    def admit(self, inode: Inode, offset: int, payload: bytes) -> bool:
        """Queue a fetched range. False: it will not be cached."""
        if not self._appends(inode):
            return False
        admitted = (
            bool(payload) and self.admits(inode, len(payload)) and self.writes.queue(Pending(inode, offset, payload))
        )
        self.metrics.skipped_admissions += not admitted
        return admitted

    def skipped(self) -> None:
        """Count a read whose data are not cached: there is no room, or the fast path passed the read on."""
        if self.options.cache is CacheLevel.FULL:
            self.metrics.skipped_admissions += 1

    def resize(self, size_bytes: int) -> None:
        """Change the size of the cache; evicts what does not fit any more."""
        self.size_bytes = size_bytes
        self.writes.resize(size_bytes)
        self.make_room()

    @property
    def capacity_bytes(self) -> int:
        """The space for records: the size of the cache without what other things occupy (space.py)."""
        return max(0, self.size_bytes - self.writes.space.charge_bytes)

    @property
    def lasting_bytes(self) -> int:
        """The space for records that can be filled without any eviction."""
        return self.capacity_bytes - (self._reserve_bytes if self.eviction is not None else 0)

    @property
    def _reserve_bytes(self) -> int:
        """Kept free if data are evicted, so that new records need not wait."""
        return min(RESERVE_BYTES, self.size_bytes // RESERVE_SHARE)

    @property
    def admission_bytes(self) -> int:
        """The present limit for the fast path: 0 while the disk cannot be written."""
        return self.capacity_bytes if self.writes.is_writable else 0

    @property
    def used_bytes(self) -> int:
        """Of records that are stored or will be, without those that are being evicted."""
        return self.writes.used_bytes + self.unreported_bytes()

    @property
    def is_under_way(self) -> bool:
        """Ranges that were fetched or dropped have yet to be added to the index or removed from it."""
        return self.unreported_bytes() > 0 or self.writes.is_under_way

    # --- retention -------------------------------------------------------------------------------------------------

    def accessed(self, units: Sequence[tuple[int, int]]) -> None:
        """These were read: (inode, number of the chunk)."""
        if self.eviction is not None:
            self.eviction.accessed(units)
        self.on_accessed(units)

    def expected(self, inode: int, offset: int) -> None:
        """A prefetch request for this unit was made."""
        if self.eviction is not None:
            self.eviction.expected(inode, offset)

    def make_room(self, wanted_bytes: int = 0, *, urgent: bool = False) -> None:
        """Evict until `wanted_bytes` and the reserve fit, as far as the policy agrees.

        If nothing is replaced, only what does not fit into a cache that has become smaller is evicted. `urgent`: a
        caller waits for the room, so commit now and not with the next batch.
        """
        if self.eviction is None:
            self.writes.evict(self._beyond(self.writes.stored_bytes - self.capacity_bytes))
            return
        needed = self.used_bytes + wanted_bytes + self._reserve_bytes - self.capacity_bytes
        self.writes.evict(self.eviction.victims(needed))
        if urgent:
            self.writes.hurry()

    def _beyond(self, excess_bytes: int) -> list[Victim]:
        """Extents of so many bytes together: those of the highest inode numbers, an arbitrary choice."""
        found: list[Victim] = []
        if excess_bytes <= 0 or not self.blob.punches:  # an eviction would free nothing
            return found
        with self.index.view() as view:
            for key, value in view.last_extents():
                inode, offset, extent = inode_of_key(key), inode_of_key(key[8:]), Extent.unpack(value)
                if excess_bytes <= 0 or len(found) == BATCH_OUT:
                    break
                if not self.writes.is_dropped(inode, offset, extent.blob_offset):
                    found.append(Victim(inode, offset, extent))
                    excess_bytes -= extent.record_bytes
        return found

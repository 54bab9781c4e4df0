"""Data: what is in the blob, and what is let in.

A *unit* is what is kept, or goes, as a whole: a small file, or a chunk of 4 MiB of a larger one (what begins in it).
What is fetched is any *range* of a file, and becomes one record in the blob and one extent in the index.

`read` is the hit path: the queue first, then the index, then the blob. Bytes that are in the page cache are read and
verified at once (RWF_NOWAIT), the rest in a thread. The LMDB transaction that found the extent lives until its bytes
have been read, so that nobody punches a hole under it (hazard 14).

`admit` queues a range that was just fetched, for `write_behind`. Its reader has been answered by then and never waits:
a queue that is full, a cache that is full and a disk that is broken all mean that it is not cached.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
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
from cachefs.system.threads import is_refused
from policies.admission import Capacity
from policies.prefetch.sequential import CHUNK_BYTES

log = logging.getLogger(__name__)

BLOB_THREADS = 16
RESERVE_BYTES = 64 << 20
RESERVE_SHARE = 100
BATCH_OUT = 4096
"""So many extents go at once where the cache has become too small."""


class DataCache:
    def __init__(
        self,
        index: Index,
        blob: Blob,
        options: Options,
        metrics: Metrics,
        writes: WriteBehind,
        *,
        appends: bool = True,
        eviction: Eviction | None = None,
    ) -> None:
        """`appends`: False where the fast path is the one that appends. `eviction`: None where nothing is replaced."""
        # dependencies
        self._index = index
        self._blob = blob
        self._options = options
        self._metrics = metrics
        self._eviction = eviction
        self.writes = writes
        writes.make_room = self.make_room
        # constants
        self._appends = appends and options.cache is CacheLevel.FULL
        # state
        self.size_bytes = options.cache_size_bytes
        """What the cache may take from its disk."""
        self.held_bytes: Callable[[], int] = lambda: 0
        """What the fast path has fetched and not reported yet."""
        self.on_accessed: list[Callable[[Sequence[tuple[int, int]]], None]] = []
        """Told of what is read, too."""
        self._threads = trio.CapacityLimiter(BLOB_THREADS)

    # --- the shape of things ---------------------------------------------------------------------------------------

    def is_small(self, inode: Inode) -> bool:
        return inode.size <= min(self._options.small_file_bytes, CHUNK_BYTES)

    def unit_of(self, inode: Inode, offset: int) -> tuple[int, int]:
        """(offset, length) of the unit that holds the byte at `offset`."""
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

    # --- hits ------------------------------------------------------------------------------------------------------

    async def read(self, inode: Inode, offset: int, length: int) -> tuple[memoryview, bool] | None:
        """Up to `length` bytes, as many as are cached in one piece, and whether that was a hit. None: not cached."""
        pending = self.writes.pending_at(inode, offset)
        if pending is not None:
            was_read, pending.read = pending.read, True
            start = offset - pending.offset
            return memoryview(pending.payload)[start : start + length], was_read
        transaction = self._index.extent_reader()
        try:
            found = self._index.extents(transaction).at(inode.number, offset)
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
        """A record is not what was written: count it, drop it."""
        if not self.writes.is_dropped(inode, offset, blob_offset):
            self._metrics.corrupt_records += 1
            self.writes.failed("corrupt", f"a corrupt record was dropped: {reason}")
            self.writes.drop(inode, offset, blob_offset)

    async def _read_blob(self, extent: Extent, start: int, length: int) -> memoryview:
        try:
            return self._blob.read(extent, start, length, nowait=True)
        except BlockingIOError:
            pass
        except OSError as error:
            log.debug("no RWF_NOWAIT here: %s", error)
        read = partial(self._blob.read, extent, start, length)
        try:
            data = await trio.to_thread.run_sync(read, limiter=self._threads)
        except RuntimeError as error:
            if not is_refused(error):
                raise
            data = read()  # others wait for the disk of the cache as well, but nobody for a thread that may never come
        self._metrics.disk_bytes += len(data)
        return data

    def drop(self, view: View, number: int) -> int:
        """What the blob has of an inode goes with the next commit. How many bytes that is."""
        size = 0
        for offset, extent in view.extents.of(number):
            self.writes.drop(number, offset, extent.blob_offset)
            size += extent.length
        return size

    def mark_read(self, inode: Inode, offset: int) -> None:
        """The read that a range was fetched for has been answered; those that follow are hits."""
        pending = self.writes.pending_at(inode, offset)
        if pending is not None:
            pending.read = True

    def view(self) -> View:
        return self._index.view()

    def range_at(self, view: View, inode: Inode, offset: int) -> tuple[int, int] | None:
        """(start, end) of what is cached, or on its way, and holds the byte at `offset`."""
        pending = self.writes.pending_at(inode, offset)
        if pending is not None:
            return pending.offset, pending.end
        found = view.extents.at(inode.number, offset)
        if found is None or found[1].version != inode.version:
            return None
        return found[0], found[0] + found[1].length

    def starts_between(self, view: View, inode: Inode, first: int, last: int) -> list[int]:
        """Where what is cached, or on its way, begins; from `first` to before `last`."""
        in_blob = (start for start, _ in view.extents.between(inode.number, first, last))
        return [*self.writes.pending_starts(inode, first, last), *in_blob]

    def holds(self, view: View, inode: Inode, unit: tuple[int, int]) -> bool:
        """True if all of the unit is cached or on its way."""
        offset, end = unit[0], unit[0] + unit[1]
        while offset < end:
            found = self.range_at(view, inode, offset)
            if found is None:
                return False
            offset = found[1]
        return True

    def holds_all(self, view: View, inode: Inode) -> bool:
        """True if every unit of the file is cached or on its way."""
        return self.holds(view, inode, (0, inode.size))

    # --- admission -------------------------------------------------------------------------------------------------

    def admits(self, length: int, *, ahead: bool = False) -> bool:
        """Will a range of `length` bytes be cached? What must go for it goes now, unless it is fetched `ahead`."""
        return self._appends and self.writes.takes(length) and self._has_room(record.record_bytes(length), ahead)

    def _has_room(self, record_bytes: int, ahead: bool) -> bool:
        if (not ahead or self._options.evicts_ahead) and not self._fits(record_bytes):
            self.make_room(record_bytes)
        return self._fits(record_bytes)

    def _fits(self, record_bytes: int) -> bool:
        return Capacity(self.capacity_bytes).admits(record_bytes, self.used_bytes)

    def admit(self, inode: Inode, offset: int, payload: bytes) -> bool:
        """Queue a range that was fetched. False if it will not be cached."""
        if not self._appends:
            return False
        admitted = bool(payload) and self.admits(len(payload)) and self.writes.queue(Pending(inode, offset, payload))
        self._metrics.skipped_admissions += not admitted
        return admitted

    def skipped(self) -> None:
        """Count a read that was served without being cached: there is no room, or the fast path has left it to us."""
        if self._options.cache is CacheLevel.FULL:
            self._metrics.skipped_admissions += 1

    def resize(self, size_bytes: int) -> None:
        """More may be cached from now on, or less: what is too much goes."""
        self.size_bytes = size_bytes
        self.writes.resize(size_bytes)
        self.make_room()

    @property
    def capacity_bytes(self) -> int:
        """What there may be of records: all that may be taken but for what is taken otherwise."""
        return max(0, self.size_bytes - self.writes.space.charge_bytes)

    @property
    def lasting_bytes(self) -> int:
        """What there may be of records without any of them having to go."""
        return self.capacity_bytes - (self._reserve_bytes if self._eviction is not None else 0)

    @property
    def _reserve_bytes(self) -> int:
        """This much is kept free where data are evicted, so that what comes need not wait."""
        return min(RESERVE_BYTES, self.size_bytes // RESERVE_SHARE)

    @property
    def admission_bytes(self) -> int:
        """How much the blob may hold at the moment: nothing while the disk refuses to be written."""
        return self.capacity_bytes if self.writes.is_writable else 0

    @property
    def used_bytes(self) -> int:
        """Records in the blob and on their way, but for those that are about to go."""
        return self.writes.used_bytes + self.held_bytes()

    @property
    def is_under_way(self) -> bool:
        """Something has been fetched, or has to go, and the index has not heard of it."""
        return self.held_bytes() > 0 or not self.writes.is_settled

    # --- retention -------------------------------------------------------------------------------------------------

    def accessed(self, units: Sequence[tuple[int, int]]) -> None:
        """These were read: (inode, number of the chunk)."""
        if self._eviction is not None:
            self._eviction.accessed(units)
        for listener in self.on_accessed:
            listener(units)

    def expected(self, inode: int, offset: int) -> None:
        """This is being fetched before anybody has asked for it."""
        if self._eviction is not None:
            self._eviction.expected(inode, offset)

    def make_room(self, wanted_bytes: int = 0, *, urgent: bool = False) -> None:
        """Evict until so much fits, and the reserve besides, if the policy gives so much away.

        Where nothing is replaced only what is beyond the size of a cache that has become smaller goes. `urgent`:
        a caller waits for the room, so evict now; else evict with the next commit.
        """
        if self._eviction is None:
            self.writes.evict(self._beyond(self.writes.stored_bytes - self.capacity_bytes))
            return
        needed = self.used_bytes + wanted_bytes + self._reserve_bytes - self.capacity_bytes
        self.writes.evict(self._eviction.victims(needed))
        if urgent:
            self.writes.hurry()

    def _beyond(self, excess_bytes: int) -> list[Victim]:
        """Extents that take so many bytes together: those of the highest inode numbers, which are as good as any."""
        found: list[Victim] = []
        if excess_bytes <= 0:
            return found
        with self._index.view() as view:
            for key, value in view.last_extents():
                inode, offset, extent = inode_of_key(key[:8]), int.from_bytes(key[8:16], "big"), Extent.unpack(value)
                if excess_bytes <= 0 or len(found) == BATCH_OUT:
                    break
                if not self.writes.is_dropped(inode, offset, extent.blob_offset):
                    found.append(Victim(inode, offset, extent))
                    excess_bytes -= extent.record_bytes
        return found

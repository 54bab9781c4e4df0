"""Data: what is in the blob, what is on its way there, and the task that takes it there.

A *unit* is what is kept, or goes, as a whole: a small file, or a chunk of 4 MiB of a larger one (what begins in it).
What is fetched is any *range* of a file, and becomes one record in the blob and one extent in the index.

`read` is the hit path: the queue first, then the index, then the blob. Bytes that are in the page cache are read and
verified at once (RWF_NOWAIT), the rest in a thread. The LMDB transaction that found the extent lives until its bytes
have been read, so that nobody punches a hole under it (hazard 14).

`admit` queues a range that was just fetched. Its reader has been answered by then and never waits: a queue that is
full, a cache that is full and a disk that is broken all mean that it is not cached.

`run` is write-behind: it appends what is queued, syncs, and commits extents together with pinned metadata to the
durable index, in this order, in one thread. What a crash leaves behind at each step is in docs/FORMAT.md.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import trio

from cachefs import record
from cachefs.attributes import Extent, Inode, inode_key
from cachefs.blob import Blob
from cachefs.errors import CorruptRecord, IndexUnavailable
from cachefs.eviction import Eviction
from cachefs.index import Commit, Index, Key, Table, View
from cachefs.metrics import Metrics
from cachefs.options import MIB, CacheLevel, Options
from policies.admission import Capacity
from policies.prefetch.sequential import CHUNK_BYTES

log = logging.getLogger(__name__)

assert CHUNK_BYTES <= record.MAX_PAYLOAD_BYTES
QUEUE_BYTES = 64 * MIB
BATCH_BYTES = 16 * MIB
BATCH_KEYS = 4096
BATCH_FILLED = 4096
BATCH_FILLED_BYTES = 128 * MIB
BATCH_SHARE = 32
BATCH_DELAY_S = 0.5
"""How long a batch may gather: each costs a few syncs, of the disk that readers wait for."""
PUNCH_RETRY_S = 0.1
FORGET_CHUNK = 64
PAUSE_S = 30.0
"""After the disk has refused a write: how long to leave it alone."""
BLOB_THREADS = 16


@dataclass(slots=True)
class Pending:
    """A fetched range on its way to the blob."""

    inode: Inode
    offset: int
    payload: bytes
    read: bool = False
    """False until the read that it was fetched for: that one was a miss."""

    @property
    def end(self) -> int:
        return self.offset + len(self.payload)

    @property
    def key(self) -> tuple[int, int]:
        return self.offset, self.end

    def header(self) -> record.Header:
        i = self.inode
        return record.Header(
            len(self.payload), i.number, self.offset, i.version, i.size, i.mtime_ns, i.ctime_ns, i.btime_ns, i.mode,
            i.device, i.source_inode,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Filled:
    """A range that the fast path fetched and appended to the blob."""

    report: int
    """Reports are numbered, and settled in order."""
    inode: int
    offset: int
    extent: Extent


class DataCache:
    def __init__(
        self,
        index: Index,
        blob: Blob,
        options: Options,
        metrics: Metrics,
        *,
        appends: bool = True,
        eviction: Eviction | None = None,
        clock: Callable[[], float] = time.monotonic,
        queue_bytes: int = QUEUE_BYTES,
    ) -> None:
        """`appends`: False where the fast path is the one that appends. `eviction`: None where nothing is replaced."""
        # dependencies
        self._index = index
        self._blob = blob
        self._options = options
        self._metrics = metrics
        self._eviction = eviction
        self._clock = clock
        # constants
        self._admission = Capacity(options.cache_size_bytes)
        self._queue_limit = queue_bytes
        # Where data are evicted a batch is a small part of the cache: nothing of it can go before it is committed.
        share = options.cache_size_bytes // BATCH_SHARE
        self._batch_filled_bytes = BATCH_FILLED_BYTES if eviction is None else min(share, BATCH_FILLED_BYTES)
        self._appends = appends and options.cache is CacheLevel.FULL
        # state
        self._pending: dict[int, dict[tuple[int, int], Pending]] = {}
        """By inode, then by (offset, end)."""
        self._queue: deque[Pending] = deque()
        self._queued_bytes = 0  # of payload in `_pending`
        self._queued_record_bytes = 0
        self._filled: deque[Filled] = deque()
        self._filled_bytes = 0
        self.settled: Callable[[int], None] = lambda report: None
        """Called when the reports up to this one are in the index, or never will be."""
        self.undone: Callable[[], None] = lambda: None
        """Called when what was appended could not be put on disk: nothing is to be built upon it."""
        self.committed: Callable[[], None] = lambda: None
        """Called after each commit: there may be more room."""
        self._dropped: dict[tuple[int, int, int], None] = {}
        self._evicting: dict[tuple[int, int, int], int] = {}
        """Those of `_dropped` that make room for others, and how much."""
        self.on_accessed: list[Callable[[Sequence[tuple[int, int]]], None]] = []
        """Told of what is read, too."""
        self._evicting_bytes = 0
        self._hurried = False
        """Somebody waits for those to go."""
        self._stored_bytes = index.totals.blob_bytes
        """As of the last commit that was followed up: the index counts what is in our queue before we hear of it."""
        self._committing_bytes = 0
        self.held_bytes: Callable[[], int] = lambda: 0
        """What the fast path has fetched and not reported yet."""
        self._freed: deque[tuple[int, Extent | int]] = deque()
        """What to give back when no reader is older than a transaction: records, and slabs by their offset."""
        self._paused_until = 0.0
        self._warned: set[str] = set()
        self._wake = trio.Event()
        self._full = trio.Event()
        self._idle = trio.Event()
        self._threads = trio.CapacityLimiter(BLOB_THREADS)
        self._writer = trio.CapacityLimiter(1)
        self._urgent = False
        index.on_dirty = self.wake

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
        pending = self._pending_at(inode, offset)
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
            if (inode.number, begin, extent.blob_offset) in self._dropped:
                return None
            try:
                start = offset - begin
                return await self._read_blob(extent, start, min(length, extent.length - start)), True
            except CorruptRecord as error:
                self.corrupt(inode.number, begin, extent.blob_offset, str(error))
            except OSError as error:
                self._failed("read", f"cannot read the blob: {error}")
                self._drop(inode.number, begin, extent.blob_offset)
            return None
        finally:
            transaction.abort()

    def _pending_at(self, inode: Inode, offset: int) -> Pending | None:
        for pending in self._pending.get(inode.number, {}).values():
            if pending.offset <= offset < pending.end and pending.inode.version == inode.version:
                return pending
        return None

    def corrupt(self, inode: int, offset: int, blob_offset: int, reason: str) -> None:
        """A record is not what was written: count it, drop it."""
        if (inode, offset, blob_offset) not in self._dropped:
            self._metrics.corrupt_records += 1
            self._failed("corrupt", f"a corrupt record was dropped: {reason}")
            self._drop(inode, offset, blob_offset)

    def _drop(self, inode: int, offset: int, blob_offset: int) -> None:
        self._dropped[inode, offset, blob_offset] = None
        self.wake()

    async def _read_blob(self, extent: Extent, start: int, length: int) -> memoryview:
        try:
            return self._blob.read(extent, start, length, nowait=True)
        except BlockingIOError:
            pass
        except OSError as error:
            log.debug("no RWF_NOWAIT here: %s", error)
        return await trio.to_thread.run_sync(partial(self._blob.read, extent, start, length), limiter=self._threads)

    def mark_read(self, inode: Inode, offset: int) -> None:
        """The read that a range was fetched for has been answered; those that follow are hits."""
        pending = self._pending_at(inode, offset)
        if pending is not None:
            pending.read = True

    def view(self) -> View:
        return self._index.view()

    def range_at(self, view: View, inode: Inode, offset: int) -> tuple[int, int] | None:
        """(start, end) of what is cached, or on its way, and holds the byte at `offset`."""
        pending = self._pending_at(inode, offset)
        if pending is not None:
            return pending.offset, pending.end
        found = view.extents.at(inode.number, offset)
        if found is None or found[1].version != inode.version:
            return None
        return found[0], found[0] + found[1].length

    def starts_between(self, view: View, inode: Inode, first: int, last: int) -> list[int]:
        """Where what is cached, or on its way, begins; from `first` to before `last`."""
        pending = (p.offset for p in self._pending.get(inode.number, {}).values() if first <= p.offset < last)
        return [*pending, *(start for start, _ in view.extents.between(inode.number, first, last))]

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
        """Will a unit of `length` bytes be cached? What must go for it goes now, unless it is fetched `ahead`."""
        return (
            self._appends
            and self._queued_bytes + length <= self._queue_limit
            and self._clock() >= self._paused_until
            and self._index.available
            and self._has_room(record.record_bytes(length), ahead)
        )

    def _has_room(self, record_bytes: int, ahead: bool) -> bool:
        if (not ahead or self._options.evicts_ahead) and not self._admission.admits(record_bytes, self.used_bytes):
            self.make_room(record_bytes)
        return self._admission.admits(record_bytes, self.used_bytes)

    @property
    def capacity_bytes(self) -> int:
        return self._admission.capacity_bytes

    @property
    def queued_bytes(self) -> int:
        """Payload that has been read but is not in the index yet."""
        return self._queued_bytes

    @property
    def used_bytes(self) -> int:
        """Records in the blob and on their way, but for those that are about to go."""
        on_their_way = self._queued_record_bytes + self._filled_bytes + self._committing_bytes + self.held_bytes()
        return self._stored_bytes + on_their_way - self._evicting_bytes

    @property
    def is_evicting(self) -> bool:
        """Something has yet to go."""
        return bool(self._evicting)

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

        `urgent`: somebody waits for it; else it goes with the next commit.
        """
        if self._eviction is None:
            return
        needed = self.used_bytes + wanted_bytes + self._eviction.reserve_bytes - self.capacity_bytes
        for victim in self._eviction.victims(needed):
            key = victim.inode, victim.offset, victim.extent.blob_offset
            if key not in self._dropped:
                self._evicting[key] = victim.extent.record_bytes
                self._evicting_bytes += victim.extent.record_bytes
                self._metrics.evictions += 1
                self._drop(*key)
        if urgent:
            self._hurried = True
            self.wake()

    def admit(self, inode: Inode, offset: int, payload: bytes) -> bool:
        """Queue a range that was fetched. False if it will not be cached."""
        if not self._appends:
            return False
        unit = Pending(inode, offset, payload)
        if not payload or unit.key in self._pending.get(inode.number, ()) or not self.admits(len(payload)):
            self._metrics.skipped_admissions += 1
            return False
        self._pending.setdefault(inode.number, {})[unit.key] = unit
        self._queue.append(unit)
        self._queued_bytes += len(payload)
        self._queued_record_bytes += record.record_bytes(len(payload))
        self.wake()
        return True

    def filled(self, units: Iterable[Filled]) -> None:
        """The fast path appended these: sync and commit them."""
        for unit in units:
            self._filled.append(unit)
            self._filled_bytes += unit.extent.record_bytes
        self.wake()

    @property
    def admission_bytes(self) -> int:
        """How much the blob may hold at the moment: nothing while the disk refuses to be written."""
        return self.capacity_bytes if self._index.available and self._clock() >= self._paused_until else 0

    def refused(self, error: OSError) -> None:
        """The disk does not take any more: leave it alone for a while."""
        self._paused_until = self._clock() + PAUSE_S
        self._failed("blob", f"the blob cannot be written, trying again in {PAUSE_S:.0f} s: {error}")

    def skipped(self) -> None:
        """Count a read that was served without being cached because there is no room."""
        if self._appends:
            self._metrics.skipped_admissions += 1

    # --- write-behind ----------------------------------------------------------------------------------------------

    def wake(self) -> None:
        self._wake.set()
        full = self._queued_bytes >= BATCH_BYTES or self._filled_bytes >= self._batch_filled_bytes
        if full or self._urgent or self._hurried or len(self._index.dirty) >= BATCH_KEYS:
            self._full.set()

    async def run(self) -> None:
        """The task: for ever, until cancelled. `flush` first if nothing may be lost."""
        while True:
            await self._wake.wait()
            with trio.move_on_after(BATCH_DELAY_S):
                await self._full.wait()
            self._wake = trio.Event()
            self._full = trio.Event()
            await self._commit()
            if self._queue or self._filled or self._index.dirty or self._dropped:
                self.wake()
            elif self._freed:
                if not self._punchable():  # a reader of the blob is under way; nobody tells when it has gone
                    await trio.sleep(PUNCH_RETRY_S)
                self.wake()
            else:
                self._idle.set()

    async def flush(self, timeout_s: float = 60.0) -> bool:
        """Everything that is queued, on disk and in the index. False if that could not be had."""
        with trio.move_on_after(timeout_s):
            while self._queue or self._filled or self._index.dirty or self._dropped or self._freed:
                if not self._index.available:
                    return False
                self._urgent = True
                self._idle = trio.Event()
                self.wake()
                await self._idle.wait()
            return True
        return False

    async def _commit(self) -> None:
        units: list[Pending] = []
        size = 0
        while self._queue and size < BATCH_BYTES:
            units.append(self._queue.popleft())
            size += len(units[-1].payload)
        filled = [self._filled.popleft() for _ in range(min(len(self._filled), BATCH_FILLED))]
        self._committing_bytes = sum(unit.extent.record_bytes for unit in filled)
        self._filled_bytes -= self._committing_bytes
        first = [(Table.INODES, inode_key(unit.inode.number)) for unit in units]
        first += [(Table.INODES, inode_key(unit.inode)) for unit in filled]
        keys = self._index.take_dirty(BATCH_KEYS, first)
        dropped = list(self._dropped)
        if not (units or filled or keys or dropped):
            await trio.to_thread.run_sync(self._punch, limiter=self._writer)
            self._follow_up()
            return
        try:
            write = partial(self._write, units, filled, keys, dropped)
            commit, refused = await trio.to_thread.run_sync(write, limiter=self._writer)
        except Exception as error:
            if not isinstance(error, IndexUnavailable):
                log.exception("bug in write-behind; the batch is not cached")
            self._index.restore_dirty(keys)
            self._index.available = False
            self._failed("index", f"the index cannot be written, nothing new is cached until it can: {error}")
            self._retire(units)
            self._settle(filled, refused=True)
            self._follow_up()
            self._metrics.skipped_admissions += len(units)
            self._idle.set()
            await trio.sleep(1.0)
            return
        self._index.available = True
        if refused is not None:
            self._metrics.skipped_admissions += len(units) + len(filled)
            self.refused(refused)
        for start in range(0, len(commit.flushed), FORGET_CHUNK):
            self._index.forget_committed(commit.flushed[start : start + FORGET_CHUNK])
            await trio.lowlevel.checkpoint()
        for key in dropped:
            self._dropped.pop(key, None)
            self._evicting_bytes -= self._evicting.pop(key, 0)
        self._retire(units)
        self._settle(filled, refused=refused is not None)
        self._freed.extend((commit.transaction, extent) for extent in (*commit.rejected, *commit.freed))
        self._follow_up()
        if self._eviction is not None:
            self._eviction.committed(commit.indexed, commit.freed)
            slabs = self._eviction.take_empty_slabs(self._blob.is_sealed)
            self._freed.extend((commit.transaction, slab) for slab in slabs)
            self.make_room()

    def _follow_up(self) -> None:
        self._stored_bytes = self._index.totals.blob_bytes
        self._committing_bytes = 0
        self._hurried = self._hurried and bool(self._evicting)
        self.committed()

    def _settle(self, filled: list[Filled], *, refused: bool) -> None:
        if filled:
            self.settled(filled[-1].report)
            if refused:
                self.undone()

    def _retire(self, units: list[Pending]) -> None:
        for unit in units:
            ranges = self._pending[unit.inode.number]
            del ranges[unit.key]
            if not ranges:
                del self._pending[unit.inode.number]
            self._queued_bytes -= len(unit.payload)
            self._queued_record_bytes -= record.record_bytes(len(unit.payload))

    def _punchable(self) -> bool:
        oldest = self._index.durable.oldest_reader()
        return bool(self._freed) and (oldest is None or oldest >= self._freed[0][0])

    def _write(
        self, units: list[Pending], filled: list[Filled], keys: list[Key], dropped: list[tuple[int, int, int]]
    ) -> tuple[Commit, OSError | None]:
        """In the write-behind thread: payload to disk, then the index, then holes for what nobody can see any more."""
        refused: OSError | None = None
        extents: list[Extent] = []
        if units:
            try:
                extents = self._blob.append([(unit.header(), unit.payload) for unit in units])
            except OSError as error:
                refused = error
        rows = [(unit.inode.number, unit.offset, extent) for unit, extent in zip(units, extents, strict=False)]
        if filled:
            try:
                self._blob.sync([unit.extent for unit in filled])
                rows += [(unit.inode, unit.offset, unit.extent) for unit in filled]
                extents += [unit.extent for unit in filled]
            except OSError as error:  # its pages are clean but lost: never tried again (hazard 17)
                refused = error
                for unit in filled:
                    self._give_back(unit.extent)
        try:
            commit = self._index.commit(keys, rows, dropped)
        except IndexUnavailable:
            for extent in extents:  # on disk, but nothing will ever point at them
                self._give_back(extent)
            raise
        self._punch()
        return commit, refused

    def _punch(self) -> None:
        """In the write-behind thread: give back what no reader can see any more."""
        while self._punchable():
            self._give_back(self._freed.popleft()[1])

    def _give_back(self, freed: Extent | int) -> None:
        try:
            if isinstance(freed, int):
                self._blob.punch_slab(freed)
            else:
                self._blob.punch(freed)
        except OSError as error:  # a disk that cannot: the space is lost until the cache is made anew
            self._failed("punch", f"cannot punch a hole into the blob: {error}")

    def _failed(self, kind: str, message: str) -> None:
        """Count a failure of the cache; say so once for each kind."""
        self._metrics.errors += 1
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning("%s (counted in `errors`, not reported again)", message)

"""Write-behind: the queue of fetched ranges, and the task that commits them.

`run` takes a batch from the queue, has it committed (commit.py), and reports the result. Until its commit a range is
found here (`pending_at`). Extents that are dropped or evicted are removed with the next commit.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, InitVar, dataclass
from functools import partial

import trio

from cachefs.contract.index import Table
from cachefs.data.commit import Committer, Filled, Pending, Work
from cachefs.data.eviction import Eviction, Victim
from cachefs.errors import IndexUnavailable
from cachefs.options import MIB
from cachefs.stats.metrics import Metrics
from cachefs.store.blob import record
from cachefs.store.blob.blob import Blob
from cachefs.store.index.index import Index
from cachefs.store.index.records import Inode, inode_key
from cachefs.system.listeners import Listeners

log = logging.getLogger(__name__)

QUEUE_BYTES = 64 * MIB
BATCH_BYTES = 16 * MIB
BATCH_KEYS = 4096
BATCH_FILLED = 4096
BATCH_FILLED_BYTES = 128 * MIB
BATCH_SHARE = 32
BATCH_DELAY_S = 0.5
"""How long a batch is collected: each costs a few syncs of the disk that readers wait for."""
PUNCH_RETRY_S = 0.1
FORGET_CHUNK = 16
REPORT_S = 60.0
PAUSE_S = 30.0
"""After a write error: nothing is written for so long."""


@dataclass(eq=False)
class WriteBehind:
    # dependencies
    index: Index
    blob: InitVar[Blob]
    metrics: Metrics
    capacity_bytes: InitVar[int]
    _: KW_ONLY
    eviction: Eviction | None = None
    """None: nothing is replaced."""
    clock: Callable[[], float] = time.monotonic
    # constants
    beside_fastpath: bool = False
    """Does a fast path append, too?"""
    queue_bytes: int = QUEUE_BYTES

    def __post_init__(self, blob: Blob, capacity_bytes: int) -> None:
        self._committer = Committer(self.index, blob, self.failed, beside_fastpath=self.beside_fastpath)
        self.space = self._committer.space
        self._batch_filled_bytes = BATCH_FILLED_BYTES
        self.resize(capacity_bytes)
        # state
        self._pending: dict[int, dict[tuple[int, int], Pending]] = {}
        """By inode, then by (offset, end)."""
        self._queue: deque[Pending] = deque()
        self.queued_bytes = 0
        """Payload that was fetched by this process and is not in the index yet."""
        self._queued_record_bytes = 0
        self._filled: deque[Filled] = deque()
        self._filled_bytes = 0
        self._dropped: dict[tuple[int, int, int], None] = {}
        """(inode, offset, blob offset) of extents that the next commit removes from the index."""
        self._evicting: dict[tuple[int, int, int], int] = {}
        """Those of `_dropped` that are evicted → bytes of the record."""
        self._evicting_bytes = 0
        self._hurried = False
        """A caller waits for these evictions."""
        self._stored_bytes = self.index.totals.blob_bytes
        """After the last commit that was followed up. Until then the index already counts records of our queue."""
        self._committing_bytes = 0
        self._reported = self._handled = 0
        """How many records the fast path has reported, and how many of those have been committed or refused."""
        self._paused_until = 0.0
        self._warned: dict[str, float] = {}
        """Kind of failure → time of its last log line."""
        self._wake = trio.Event()
        self._full = trio.Event()
        self._round = trio.Event()
        """Set at the end of a round of the task, and replaced by a new event."""
        self._rounds = 0
        self._committing = False
        self._flushing = 0
        """How many callers wait for a flush."""
        self.index.on_dirty.add(self.wake)
        self.index.on_refused.add(partial(self.failed, "session"))
        self.on_handled: Listeners[[int]] = Listeners()
        """Called with the number of the last report that has been committed or refused."""
        self.on_lost_append: Listeners[[]] = Listeners()
        """Called when appended records of the fast path could not be synced: it must go on in a new slab."""
        self.on_commit: Listeners[[]] = Listeners()
        """Called after a commit, when the retention policy knows the new extents."""
        self.on_round: Listeners[[]] = Listeners()
        """Called after each round of the task, with or without a commit, when evictions have been chosen."""

    def resize(self, capacity_bytes: int) -> None:
        """The size of the cache has changed."""
        if self.eviction is not None:  # a small part of the cache: a batch cannot be evicted before it is committed
            self._batch_filled_bytes = min(capacity_bytes // BATCH_SHARE, BATCH_FILLED_BYTES)

    # --- ranges that are not committed yet -------------------------------------------------------------------------

    def pending_at(self, inode: Inode, offset: int) -> Pending | None:
        for pending in self._pending.get(inode.number, {}).values():
            if pending.offset <= offset < pending.end and pending.inode.version == inode.version:
                return pending
        return None

    def pending_starts(self, inode: Inode, first: int, last: int) -> list[int]:
        return [p.offset for p in self._pending.get(inode.number, {}).values() if first <= p.offset < last]

    def takes(self, length: int) -> bool:
        """Is there room in the queue, and can index and blob be written?"""
        return self.queued_bytes + length <= self.queue_bytes and self.is_writable

    @property
    def is_writable(self) -> bool:
        return self.index.available and self.clock() >= self._paused_until

    def queue(self, unit: Pending) -> bool:
        """False: the range is queued already."""
        ranges = self._pending.setdefault(unit.inode.number, {})
        if unit.key in ranges:
            return False
        ranges[unit.key] = unit
        self._queue.append(unit)
        self.queued_bytes += len(unit.payload)
        self._queued_record_bytes += record.record_bytes(len(unit.payload))
        self.wake()
        return True

    def filled(self, units: Iterable[Filled]) -> None:
        """Sync and commit what the fast path has appended."""
        for unit in units:
            self._filled.append(unit)
            self._reported += 1
            self._filled_bytes += unit.extent.record_bytes
        self.wake()

    def writer_has_gone(self, frontier: int) -> None:
        """The fast path will neither write to slabs before this offset nor report records of them any more."""
        self._committer.writer_has_gone(self._reported, frontier)
        self.wake()

    @property
    def used_bytes(self) -> int:
        """Of records that are stored or will be, without those that are being evicted."""
        uncommitted = self._queued_record_bytes + self._filled_bytes + self._committing_bytes
        return self._stored_bytes + uncommitted - self._evicting_bytes

    @property
    def stored_bytes(self) -> int:
        """Of records in the index, without those that are being evicted."""
        return self.index.totals.blob_bytes - self._evicting_bytes

    @property
    def is_under_way(self) -> bool:
        """Extents have yet to be added to the index or removed from it."""
        return bool(self.queued_bytes or self._filled_bytes or self._committing_bytes or self._dropped)

    # --- extents that are to be removed ----------------------------------------------------------------------------

    def drop(self, inode: int, offset: int, blob_offset: int) -> None:
        self._dropped[inode, offset, blob_offset] = None
        self.wake()

    def is_dropped(self, inode: int, offset: int, blob_offset: int) -> bool:
        return (inode, offset, blob_offset) in self._dropped

    def evict(self, victims: Iterable[Victim]) -> None:
        for victim in victims:
            key = victim.inode, victim.offset, victim.extent.blob_offset
            if key not in self._dropped:
                self._evicting[key] = victim.extent.record_bytes
                self._evicting_bytes += victim.extent.record_bytes
                self.metrics.evictions += 1
                self.drop(*key)

    @property
    def is_evicting(self) -> bool:
        """Evictions have yet to be committed."""
        return bool(self._evicting)

    @property
    def may_have_room_soon(self) -> bool:
        """Evictions have yet to be committed, or there are new records that could be evicted."""
        return bool(self._evicting or self._filled)

    # --- failures --------------------------------------------------------------------------------------------------

    def refused(self, error: OSError) -> None:
        """The disk refused a write: pause."""
        self._paused_until = self.clock() + PAUSE_S
        self.failed("blob", f"the blob cannot be written, trying again in {PAUSE_S:.0f} s: {error}")

    def failed(self, kind: str, message: str) -> None:
        """Count a failure of the cache, and log it once a minute at most for each kind."""
        self.metrics.errors += 1
        now_s = self.clock()
        if now_s - self._warned.get(kind, -REPORT_S) >= REPORT_S:
            self._warned[kind] = now_s
            log.warning("%s (counted in `errors`, reported once a minute at most)", message)

    # --- the task --------------------------------------------------------------------------------------------------

    def hurry(self) -> None:
        """A caller waits for the evictions."""
        self._hurried = True
        self.wake()

    def wake(self) -> None:
        self._wake.set()
        full = self.queued_bytes >= BATCH_BYTES or self._filled_bytes >= self._batch_filled_bytes
        if full or self._flushing or self._hurried or len(self.index.dirty) >= BATCH_KEYS:
            self._full.set()

    async def run(self) -> None:
        """The task: until cancelled. Call `flush` first if nothing may be lost."""
        self.wake()  # to free what earlier daemons left
        while True:
            await self._wake.wait()
            with trio.move_on_after(BATCH_DELAY_S):
                await self._full.wait()
            self._wake = trio.Event()
            self._full = trio.Event()
            self._committing = True
            try:
                await self._commit()
            finally:
                self._committing = False
            if self._queue or self._filled or self.index.dirty or self._dropped:
                self.wake()
            elif self._committer.has_freed:
                if not self._committer.is_punchable:  # a reader of the blob prevents it, and no event says when it ends
                    await trio.sleep(PUNCH_RETRY_S)
                self.wake()
            self._end_round()

    def _end_round(self) -> None:
        self._rounds += 1
        self._round.set()
        self._round = trio.Event()

    async def round_ended(self) -> None:
        """Returns when the task has ended a round, with or without a commit."""
        await self._round.wait()

    @property
    def is_idle(self) -> bool:
        """Nothing is to be written or being written.

        Space that a reader of the index still uses may have to be freed later, by this daemon or the next one.
        """
        waiting = self._queue or self._filled or self.index.dirty or self._dropped
        return not (self._committing or waiting or self._committer.is_punchable)

    async def flush(self, timeout_s: float = 60.0) -> bool:
        """Commit everything, if nothing more is queued meanwhile. False: that was not possible in time."""
        return await self._until(lambda: self.is_idle, timeout_s)

    async def flush_queued(self, timeout_s: float = 60.0) -> bool:
        """Commit what is queued now, even if more is queued meanwhile. False: that was not possible in time."""
        queued, filled, keys = self.queued_bytes // BATCH_BYTES, len(self._filled), len(self.index.dirty)
        # One round may be under way without any of it, and space of dropped records is freed one round later.
        last = self._rounds + 3 + max(queued, filled // BATCH_FILLED, keys // BATCH_KEYS)
        return await self._until(lambda: self.is_idle or self._rounds >= last, timeout_s)

    async def _until(self, done: Callable[[], bool], timeout_s: float) -> bool:
        self._flushing += 1
        try:
            with trio.move_on_after(timeout_s):
                while not done():
                    if not self.index.available:
                        return False
                    self.wake()
                    await self.round_ended()
                return True
            return False
        finally:
            self._flushing -= 1

    async def _commit(self) -> None:
        work = self._take()
        if not work:
            self.index.is_writable = True  # the next commit tries
            await self._follow_up()
            return
        try:
            commit, refused = await self._committer.commit(work)
        except Exception as error:
            if not isinstance(error, IndexUnavailable):
                log.exception("bug in write-behind; the batch is not cached")
            self.index.restore_dirty(work.metadata)
            self.index.is_writable = False
            self.failed("index", f"the index cannot be written; nothing new is cached until it can be: {error}")
            self._retire(work.units)
            self._end_reports(work.filled, refused=True)
            await self._follow_up()
            self.metrics.skipped_admissions += len(work.units)
            self._end_round()
            await trio.sleep(1.0)
            self.wake()
            return
        self.index.is_writable = True
        if refused is not None:
            self.metrics.skipped_admissions += len(work.units) + len(work.filled)
            self.refused(refused)
        for start in range(0, len(commit.flushed), FORGET_CHUNK):
            self.index.forget_committed(commit.flushed[start : start + FORGET_CHUNK])
            await trio.lowlevel.checkpoint()
        for key in work.dropped:
            self._dropped.pop(key, None)
            self._evicting_bytes -= self._evicting.pop(key, 0)
        self._retire(work.units)
        self._end_reports(work.filled, refused=refused is not None)
        self.metrics.skipped_admissions += commit.unclaimed
        self._committer.free(commit)
        await self._follow_up(commit.indexed)

    def _take(self) -> Work:
        """Take a batch from the queues, with the metadata of its files."""
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
        return Work(units, filled, self.index.take_dirty(BATCH_KEYS, first), list(self._dropped))

    async def _follow_up(self, indexed: Iterable[tuple[int, int]] | None = None) -> None:
        """`indexed`: (inode, file offset) of extents that a commit added to the index. None: there was no commit."""
        await self._committer.account(self._handled, self._filled_bytes)
        self._stored_bytes = self.index.totals.blob_bytes
        self._committing_bytes = 0
        if indexed is not None:
            if self.eviction is not None:
                self.eviction.committed(indexed)
            self.on_commit()
        self._hurried = self._hurried and bool(self._evicting)
        self.on_round()

    def _end_reports(self, filled: list[Filled], *, refused: bool) -> None:
        self._handled += len(filled)
        if filled:
            self.on_handled(filled[-1].report)
            if refused:
                self.on_lost_append()

    def _retire(self, units: list[Pending]) -> None:
        for unit in units:
            ranges = self._pending[unit.inode.number]
            del ranges[unit.key]
            if not ranges:
                del self._pending[unit.inode.number]
            self.queued_bytes -= len(unit.payload)
            self._queued_record_bytes -= record.record_bytes(len(unit.payload))

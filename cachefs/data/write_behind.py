"""Write-behind: the queue of what was fetched, and the task that commits it.

`run` takes a batch off the queue, has it committed (commit.py), and says what has come of it. Until its commit a range
is found here (`pending_at`). What is to go, dropped or evicted, goes with the next commit.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
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

log = logging.getLogger(__name__)

QUEUE_BYTES = 64 * MIB
BATCH_BYTES = 16 * MIB
BATCH_KEYS = 4096
BATCH_FILLED = 4096
BATCH_FILLED_BYTES = 128 * MIB
BATCH_SHARE = 32
BATCH_DELAY_S = 0.5
"""How long a batch may gather: each costs a few syncs, of the disk that readers wait for."""
PUNCH_RETRY_S = 0.1
FORGET_CHUNK = 16
REPORT_S = 60.0
PAUSE_S = 30.0
"""After the disk has refused a write: how long to leave it alone."""


class WriteBehind:
    def __init__(
        self,
        index: Index,
        blob: Blob,
        metrics: Metrics,
        capacity_bytes: int,
        *,
        eviction: Eviction | None = None,
        clock: Callable[[], float] = time.monotonic,
        queue_bytes: int = QUEUE_BYTES,
    ) -> None:
        """`eviction`: None where nothing is replaced."""
        # dependencies
        self._index = index
        self._metrics = metrics
        self._eviction = eviction
        self._clock = clock
        self._committer = Committer(index, blob, self.failed)
        self.space = self._committer.space
        # constants
        self._queue_limit = queue_bytes
        self._batch_filled_bytes = BATCH_FILLED_BYTES
        self.resize(capacity_bytes)
        # state
        self._pending: dict[int, dict[tuple[int, int], Pending]] = {}
        """By inode, then by (offset, end)."""
        self._queue: deque[Pending] = deque()
        self.queued_bytes = 0
        """Payload that has been read but is not in the index yet."""
        self._queued_record_bytes = 0
        self._filled: deque[Filled] = deque()
        self._filled_bytes = 0
        self._dropped: dict[tuple[int, int, int], None] = {}
        """(inode, offset, blob offset) of what the next commit takes out of the index."""
        self._evicting: dict[tuple[int, int, int], int] = {}
        """Those of `_dropped` that make room for others, and how much."""
        self._evicting_bytes = 0
        self._hurried = False
        """Somebody waits for those to go."""
        self._stored_bytes = index.totals.blob_bytes
        """As of the last commit that was followed up: the index counts what is in our queue before we hear of it."""
        self._committing_bytes = 0
        self._reported = self._handled = 0
        """How many records the fast path has reported, and how many of those have been committed or refused."""
        self._paused_until = 0.0
        self._warned: dict[str, float] = {}
        """Kind of failure → when it was said."""
        self._wake = trio.Event()
        self._full = trio.Event()
        self._round = trio.Event()
        """Set at the end of a round of the task; then there is another."""
        self._rounds = 0
        self._committing = False
        self._urgent = 0
        """How many wait for what there is to be written."""
        index.on_dirty = self.wake
        index.on_refused = partial(self.failed, "session")
        # who wants to know
        self.settled: Callable[[int], None] = lambda report: None
        """Called when the reports up to this one are in the index, or never will be."""
        self.undone: Callable[[], None] = lambda: None
        """Called when what was appended could not be put on disk: nothing is to be built upon it."""
        self.committed: Callable[[], None] = lambda: None
        """Called after each round of the task, when what is to go has been chosen."""
        self.make_room: Callable[[], None] = lambda: None
        """Called where data are evicted, when the policy has heard of a commit."""

    def resize(self, capacity_bytes: int) -> None:
        """The size of the cache has changed."""
        if self._eviction is not None:  # a batch is a small part of the cache: none of it can go before it is committed
            self._batch_filled_bytes = min(capacity_bytes // BATCH_SHARE, BATCH_FILLED_BYTES)

    # --- what is on its way ----------------------------------------------------------------------------------------

    def pending_at(self, inode: Inode, offset: int) -> Pending | None:
        for pending in self._pending.get(inode.number, {}).values():
            if pending.offset <= offset < pending.end and pending.inode.version == inode.version:
                return pending
        return None

    def pending_starts(self, inode: Inode, first: int, last: int) -> list[int]:
        return [p.offset for p in self._pending.get(inode.number, {}).values() if first <= p.offset < last]

    def takes(self, length: int) -> bool:
        """Is there room in the queue, an index to write to, and a disk that lets itself be written?"""
        return self.queued_bytes + length <= self._queue_limit and self.is_writable

    @property
    def is_writable(self) -> bool:
        return self._index.available and self._clock() >= self._paused_until

    def queue(self, unit: Pending) -> bool:
        """False: it is on its way already."""
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
        """The fast path appended these: sync and commit them."""
        for unit in units:
            self._filled.append(unit)
            self._reported += 1
            self._filled_bytes += unit.extent.record_bytes
        self.wake()

    def writer_has_gone(self, frontier: int) -> None:
        """Nothing more will be written to slabs before this offset, nor reported of them."""
        self._committer.writer_has_gone(self._reported, frontier)
        self.wake()

    @property
    def used_bytes(self) -> int:
        """Records in the blob and on their way, but for those that are about to go."""
        on_their_way = self._queued_record_bytes + self._filled_bytes + self._committing_bytes
        return self._stored_bytes + on_their_way - self._evicting_bytes

    @property
    def stored_bytes(self) -> int:
        """Records that the index has, but for those that are about to go."""
        return self._index.totals.blob_bytes - self._evicting_bytes

    @property
    def is_settled(self) -> bool:
        """Nothing is on its way to the index, or out of it."""
        return not (self.queued_bytes or self._filled_bytes or self._committing_bytes or self._dropped)

    # --- what is to go ---------------------------------------------------------------------------------------------

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
                self._metrics.evictions += 1
                self.drop(*key)

    @property
    def is_evicting(self) -> bool:
        """Something has yet to go."""
        return bool(self._evicting)

    @property
    def may_have_room_soon(self) -> bool:
        """Something has yet to go, or the policy has yet to hear of it."""
        return bool(self._evicting or self._filled)

    # --- trouble ---------------------------------------------------------------------------------------------------

    def refused(self, error: OSError) -> None:
        """The disk does not take any more: leave it alone for a while."""
        self._paused_until = self._clock() + PAUSE_S
        self.failed("blob", f"the blob cannot be written, trying again in {PAUSE_S:.0f} s: {error}")

    def failed(self, kind: str, message: str) -> None:
        """Count a failure of the cache; say so once a minute at most for each kind."""
        self._metrics.errors += 1
        now_s = self._clock()
        if now_s - self._warned.get(kind, -REPORT_S) >= REPORT_S:
            self._warned[kind] = now_s
            log.warning("%s (counted in `errors`, reported once a minute at most)", message)

    # --- the task --------------------------------------------------------------------------------------------------

    def hurry(self) -> None:
        """Somebody waits for what is evicted."""
        self._hurried = True
        self.wake()

    def wake(self) -> None:
        self._wake.set()
        full = self.queued_bytes >= BATCH_BYTES or self._filled_bytes >= self._batch_filled_bytes
        if full or self._urgent or self._hurried or len(self._index.dirty) >= BATCH_KEYS:
            self._full.set()

    async def run(self) -> None:
        """The task: for ever, until cancelled. `flush` first if nothing may be lost."""
        self.wake()  # what others left behind is given back
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
            if self._queue or self._filled or self._index.dirty or self._dropped:
                self.wake()
            elif self._committer.has_freed:
                if not self._committer.is_punchable:  # a reader of the blob is under way; nobody tells when it has gone
                    await trio.sleep(PUNCH_RETRY_S)
                self.wake()
            self._end_round()

    def _end_round(self) -> None:
        self._rounds += 1
        self._round.set()
        self._round = trio.Event()

    async def round_ended(self) -> None:
        """Returns when the task has ended a round: with or without a commit, something may have come or gone."""
        await self._round.wait()

    @property
    def is_idle(self) -> bool:
        """There is nothing to be written, and nothing is being written.

        Space that a reader of the index holds may still have to be given back: by this daemon, or by the next one.
        """
        waiting = self._queue or self._filled or self._index.dirty or self._dropped
        return not (self._committing or waiting or self._committer.is_punchable)

    async def flush(self, timeout_s: float = 60.0) -> bool:
        """Everything, on disk and in the index, when nothing more comes. False if that could not be had."""
        return await self._until(lambda: self.is_idle, timeout_s)

    async def settle(self, timeout_s: float = 60.0) -> bool:
        """What there is by now, on disk and in the index, whatever comes meanwhile. False if that could not be had."""
        queued, filled, keys = self.queued_bytes // BATCH_BYTES, len(self._filled), len(self._index.dirty)
        # One round may be under way and knows of none of it, and what one drops the next gives back.
        last = self._rounds + 3 + max(queued, filled // BATCH_FILLED, keys // BATCH_KEYS)
        return await self._until(lambda: self.is_idle or self._rounds >= last, timeout_s)

    async def _until(self, done: Callable[[], bool], timeout_s: float) -> bool:
        self._urgent += 1
        try:
            with trio.move_on_after(timeout_s):
                while not done():
                    if not self._index.available:
                        return False
                    self.wake()
                    await self.round_ended()
                return True
            return False
        finally:
            self._urgent -= 1

    async def _commit(self) -> None:
        work = self._take()
        if not work:
            self._index.available = True  # what comes next tries
            await self._follow_up()
            return
        try:
            commit, refused = await self._committer.commit(work)
        except Exception as error:
            if not isinstance(error, IndexUnavailable):
                log.exception("bug in write-behind; the batch is not cached")
            self._index.restore_dirty(work.metadata)
            self._index.available = False
            self.failed("index", f"the index cannot be written, nothing new is cached until it can: {error}")
            self._retire(work.units)
            self._settle(work.filled, refused=True)
            await self._follow_up()
            self._metrics.skipped_admissions += len(work.units)
            self._end_round()
            await trio.sleep(1.0)
            self.wake()
            return
        self._index.available = True
        if refused is not None:
            self._metrics.skipped_admissions += len(work.units) + len(work.filled)
            self.refused(refused)
        for start in range(0, len(commit.flushed), FORGET_CHUNK):
            self._index.forget_committed(commit.flushed[start : start + FORGET_CHUNK])
            await trio.lowlevel.checkpoint()
        for key in work.dropped:
            self._dropped.pop(key, None)
            self._evicting_bytes -= self._evicting.pop(key, 0)
        self._retire(work.units)
        self._settle(work.filled, refused=refused is not None)
        self._metrics.skipped_admissions += commit.unclaimed
        self._committer.free(commit)
        await self._follow_up(commit.indexed)

    def _take(self) -> Work:
        """A batch off the queues, with the metadata of its files."""
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
        return Work(units, filled, self._index.take_dirty(BATCH_KEYS, first), list(self._dropped))

    async def _follow_up(self, indexed: Iterable[tuple[int, int]] | None = None) -> None:
        """`indexed`: what a commit has put into the index, (inode, file offset). None: there was no commit."""
        await self._committer.account(self._handled, self._filled_bytes)
        self._stored_bytes = self._index.totals.blob_bytes
        self._committing_bytes = 0
        if indexed is not None:
            if self._eviction is not None:
                self._eviction.committed(indexed)
            self.make_room()
        self._hurried = self._hurried and bool(self._evicting)
        self.committed()

    def _settle(self, filled: list[Filled], *, refused: bool) -> None:
        self._handled += len(filled)
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
            self.queued_bytes -= len(unit.payload)
            self._queued_record_bytes -= record.record_bytes(len(unit.payload))

"""One commit: payload to the blob, then extents and pinned metadata to the durable index, in this order.

All of this runs in one thread. docs/FORMAT.md describes what a crash leaves behind after each step. Records that the
fast path has appended are synced and indexed. The space of a record that the index does not refer to any more is freed
when no reader of the index is older than the commit that dropped it (hazard 14), by this daemon or by the next one.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import trio

from cachefs.errors import IndexUnavailable
from cachefs.store.blob import record
from cachefs.store.blob.blob import Blob
from cachefs.store.blob.space import Space
from cachefs.store.index.dirty import Batch
from cachefs.store.index.index import Commit, Index
from cachefs.store.index.records import Extent, Inode
from cachefs.system.threads import in_thread


@dataclass(slots=True)
class Pending:
    """A fetched range that is not committed yet."""

    inode: Inode
    offset: int
    payload: bytes
    read: bool = False
    """False until the read that it was fetched for, which was a miss."""

    @property
    def end(self) -> int:
        return self.offset + len(self.payload)

    @property
    def key(self) -> tuple[int, int]:
        return self.offset, self.end

    def header(self) -> record.Header:
        i = self.inode
        return record.Header(
            len(self.payload), i.number, self.offset, i.version, i.size, i.mtime_ns, i.ctime_ns, i.btime_ns, i.device,
            i.source_inode, i.mode,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Filled:
    """A range that the fast path fetched and appended to the blob."""

    report: int
    """Its number. Reports are committed or refused in this order."""
    inode: int
    offset: int
    extent: Extent


@dataclass(frozen=True, slots=True)
class Work:
    """The contents of one commit."""

    units: list[Pending]
    filled: list[Filled]
    metadata: Batch
    dropped: list[tuple[int, int, int]]
    """(inode, offset, blob offset)"""

    def __bool__(self) -> bool:
        return bool(self.units or self.filled or self.metadata or self.dropped)


class Committer:
    def __init__(
        self, index: Index, blob: Blob, failed: Callable[[str, str], None], *, beside_fastpath: bool = False
    ) -> None:
        """`failed`: called with the kind of a failure of the cache, and a message. `beside_fastpath`: as of
        `WriteBehind`."""
        # dependencies
        self._index = index
        self._blob = blob
        self._failed = failed
        # constants
        self._beside_fastpath = beside_fastpath
        # state
        self.space = Space(index, blob)
        self._freed: deque[tuple[int, Extent]] = deque()
        """(transaction, record): free the record when no reader is older than the transaction."""
        self._gone: deque[tuple[int, int]] = deque()
        """Of writers that have ended: (number of its last report, end of its slabs)."""
        self._thread = trio.CapacityLimiter(1)

    async def commit(self, work: Work) -> tuple[Commit, OSError | None]:
        """The error is that of the blob; then the data are not in the index. Raises IndexUnavailable."""
        return await in_thread(partial(self._write, work), limiter=self._thread)

    def free(self, commit: Commit) -> None:
        """Free what this commit has dropped as soon as no reader can see it any more."""
        self._freed.extend((commit.transaction, extent) for extent in (*commit.rejected, *commit.freed))

    def writer_has_gone(self, reported: int, frontier: int) -> None:
        """After this number of reports there will be none of slabs before this offset."""
        self._gone.append((reported, frontier))

    async def account(self, handled: int, filled_bytes: int) -> None:
        """Free what can be freed, and measure the rest.

        `handled`: the number of reports that were committed or refused. `filled_bytes`: of records that the fast path
        has appended and that are not in the index.
        """
        closed = 0
        while self._gone and self._gone[0][0] <= handled:
            closed = self._gone.popleft()[1]

        def account() -> None:
            if closed:
                self._quietly(partial(self.space.writer_has_gone, closed))
            while self.is_punchable:
                self._give_back(self._freed.popleft()[1])
            written = self._index.totals.blob_bytes + filled_bytes + sum(e.record_bytes for _, e in self._freed)
            self._quietly(partial(self.space.measure, written, [extent for _, extent in self._freed]))

        await in_thread(account, limiter=self._thread)

    @property
    def has_freed(self) -> bool:
        """Space has yet to be freed."""
        return bool(self._freed)

    @property
    def is_punchable(self) -> bool:
        """Some of it can be freed now, because no reader can see it any more."""
        if not self._freed:
            return False
        oldest = self._index.durable.oldest_reader()
        return oldest is None or oldest >= self._freed[0][0]

    # --- in the thread ---------------------------------------------------------------------------------------------

    def _write(self, work: Work) -> tuple[Commit, OSError | None]:
        refused: OSError | None = None
        units, filled = work.units, work.filled
        extents: list[Extent] = []
        if units:
            self._blob.leave_slabs_before(self.space.closed_below)
            try:
                extents = self._blob.append([(unit.header(), unit.payload) for unit in units])
            except OSError as error:
                refused = error
        rows = [(unit.inode.number, unit.offset, extent) for unit, extent in zip(units, extents, strict=False)]
        reported = [unit.extent for unit in filled]
        if self._beside_fastpath:
            self._quietly(partial(self.space.written, reported, extents))
        else:
            self._quietly(partial(self.space.written, [*extents, *reported]))
        if filled:
            try:
                self._blob.sync([unit.extent for unit in filled])
                rows += [(unit.inode, unit.offset, unit.extent) for unit in filled]
                extents += [unit.extent for unit in filled]
            except OSError as error:  # its pages are clean but lost: never retried (hazard 17)
                refused = error
                for unit in filled:
                    self._give_back(unit.extent)
        try:
            commit = self._index.commit(work.metadata, rows, work.dropped)
        except IndexUnavailable:
            for extent in extents:  # on disk, but not in the index
                self._give_back(extent)
            raise
        return commit, refused

    def _give_back(self, freed: Extent) -> None:
        self._quietly(partial(self.space.free, freed))

    def _quietly(self, call: Callable[[], None]) -> None:
        try:
            call()
        except OSError as error:  # the space is lost, and is still accounted for
            self._failed("punch", f"cannot punch a hole into the blob: {error}")

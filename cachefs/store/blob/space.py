"""Accounting of disk space: how much of its disk the cache directory occupies, and which of it can be freed.

Not only records occupy space. Neighbouring records share pages. A writer that was killed leaves records that it never
reported, and up to 4 MiB that it had allocated in advance. The index and the log are on the same disk. `charge_bytes`
is what all of this takes from the room for records, so that the directory never exceeds its size by more than 64 MiB.
FREE_BYTES and OTHER_FREE_BYTES of it are not charged.

A *gap* is a range of the blob, within one slab, that no extent refers to and no writer writes to. Two adjacent gaps are
merged. A gap begins with a header that tells a rebuild its length; all its other pages are holes. A slab that is one
whole gap is a hole from end to end.

A slab is *closed* when no writer will write to it any more, and all of its records have been committed or refused: a
record of a later slab has been committed, or the writer is dead and its last reports have been committed. A daemon that
writes beside a fast path closes none by that, and leaves its own slab when the fast path's records close it.

Gaps that this daemon makes are recorded at once. `_sweep` finds those that earlier daemons left: it reads all extents
and frees what none of them refers to. It runs when more space is allocated than the accounting explains.

All methods are called only from the write-behind thread.
"""

import logging
import os
import struct
import time
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path

from cachefs.contract.blob import RECORD_HEADER_BYTES, SLAB_BYTES
from cachefs.contract.index import Table
from cachefs.store.blob import record
from cachefs.store.blob.blob import PAGE_BYTES, Blob
from cachefs.store.index.index import Index
from cachefs.store.index.records import Extent
from cachefs.store.runs import RUN_BITS, last_run
from policies.prefetch.sequential import CHUNK_BYTES

log = logging.getLogger(__name__)

FREE_BYTES = 16 << 20
"""Not charged: space for records that are being written, and for shared pages."""
OTHER_FREE_BYTES = 32 << 20
"""Not charged: the index, the log and other files of the directory."""
OTHER_S = 1.0
"""How often those are measured."""
SWEEP_SHARE = 100
"""Sweeps take at most 1 / SWEEP_SHARE of the time."""
MIN_SWEEP_PAUSE_S = 10.0

_EXTENT = struct.Struct("<4xIQ8xQ")  # length, blob offset, bytes of the record
_SIZE_BITS = 24
assert record.record_bytes(CHUNK_BYTES) < 1 << _SIZE_BITS


def place_of(extent: Extent) -> tuple[int, int]:
    """(start, end) of a record in the blob, including its header."""
    start = extent.blob_offset - record.payload_start(extent.length)
    return start, start + extent.record_bytes


class Space:
    def __init__(self, index: Index, blob: Blob, *, clock: Callable[[], float] = time.monotonic) -> None:
        # dependencies
        self._index = index
        self._blob = blob
        self._directory: Path = index.durable.path.parent
        self._clock = clock
        # constants
        self._start = blob.frontier
        """Slabs before this one were granted by earlier daemons."""
        run = last_run(index.durable)
        self._version = (run.run if run else 0) << RUN_BITS | (1 << RUN_BITS) - 1
        """Of gaps: not below the version of any record in the blob."""
        # state
        self.charge_bytes = 0
        """What other things take from the room for records."""
        self._tails: dict[int, int] = {}
        """Slab that is not closed → end of its last known record."""
        self.closed_below = 0
        """No writer writes to slabs before this offset."""
        self._adopted = False
        """The slabs of earlier daemons are closed as well."""
        self._ends: dict[int, int] = {}
        self._starts: dict[int, int] = {}
        """Gaps: start → end, and end → start."""
        self._swept = False
        self._next_sweep = 0.0
        self._residue = 0
        """Allocated space that the last sweep could not explain."""
        self._other_bytes = 0
        self._next_look = 0.0

    # --- slabs -----------------------------------------------------------------------------------------------------

    def written(self, extents: Iterable[Extent], beside: Iterable[Extent] = ()) -> None:
        """These were written and reported, and have been committed or refused.

        `beside`: by a second writer. Only the first one closes slabs.
        """
        newest = 0
        for group, closes in ((beside, False), (extents, True)):
            for extent in group:
                start, end = place_of(extent)
                slab = start // SLAB_BYTES * SLAB_BYTES
                if slab >= max(self._start, self.closed_below):
                    self._tails[slab] = max(self._tails.get(slab, 0), end)
                    newest = max(newest, slab) if closes else newest
        if newest > self.closed_below:
            self._close_below(newest)

    def writer_has_gone(self, frontier: int) -> None:
        """All slabs before `frontier` are closed, those of earlier daemons included."""
        self._adopted = True
        self._close_below(frontier)

    def _close_below(self, frontier: int) -> None:
        self.closed_below = max(self.closed_below, frontier)
        for slab in [slab for slab in self._tails if slab < frontier]:
            self._release(self._tails.pop(slab), slab + SLAB_BYTES)

    # --- gaps ------------------------------------------------------------------------------------------------------

    def free(self, extent: Extent) -> None:
        """Free the space of a record that no reader can see any more."""
        self._release(*place_of(extent))

    def _release(self, start: int, end: int) -> None:
        """Add this range to a gap. Raises OSError if its pages cannot be freed."""
        first, last = start, end
        if start % SLAB_BYTES and start in self._starts:
            first = self._starts.pop(start)
            del self._ends[first]
        if end % SLAB_BYTES and end in self._ends:
            last = self._ends.pop(end)
            del self._starts[last]
        if last - first == SLAB_BYTES:
            self._blob.punch(first, last)
        elif last > first:
            self._ends[first], self._starts[last] = last, first
            self._blob.mark_gap(first, last, self._version)
            head = _page_up(first + RECORD_HEADER_BYTES)
            begin = max(head, start // PAGE_BYTES * PAGE_BYTES)
            self._blob.punch(begin, min(last // PAGE_BYTES * PAGE_BYTES, _page_up(end + RECORD_HEADER_BYTES)))

    # --- accounting ------------------------------------------------------------------------------------------------

    def measure(self, written_bytes: int, waiting: Iterable[Extent]) -> None:
        """Compare the allocated space with the known records, and free what can be freed.

        `written_bytes`: of all records on disk, indexed or not. `waiting`: those that will be freed when no reader sees
        them any more.
        """
        excess = self._excess(written_bytes)
        can_sweep = self._adopted and self._blob.punches
        if can_sweep and excess > (self._residue + FREE_BYTES if self._swept else 0):
            began = self._clock()
            if began >= self._next_sweep:
                before = self._blob.allocated_bytes()
                self._sweep(waiting)
                took = self._clock() - began
                self._next_sweep = began + max(MIN_SWEEP_PAUSE_S, SWEEP_SHARE * took)
                excess = self._residue = self._excess(written_bytes)
                self._swept = True
                given_back = before - self._blob.allocated_bytes()
                log.info("freed %d MB that no record needs in %.1f s", given_back // 1_000_000, took)
        self.charge_bytes = (excess if self._swept or not self._blob.punches else 0) + max(
            0, self._other() - OTHER_FREE_BYTES
        )

    def _excess(self, written_bytes: int) -> int:
        return max(0, self._blob.allocated_bytes() - written_bytes - FREE_BYTES)

    def _other(self) -> int:
        """The space that the directory occupies besides the blob."""
        now = self._clock()
        if now >= self._next_look:
            self._next_look = now + OTHER_S
            self._other_bytes = _allocated_below(self._directory, {"blob"})
        return self._other_bytes

    def _sweep(self, waiting: Iterable[Extent]) -> None:
        """Free everything in closed slabs that no record needs, and record all gaps."""
        records: dict[int, array[int]] = {}

        def keep(start: int, size: int) -> None:
            slab, at = divmod(start, SLAB_BYTES)
            if slab not in records:
                records[slab] = array("Q")
            records[slab].append(at << _SIZE_BITS | size)

        durable = self._index.durable
        with durable.lmdb.begin() as txn:
            for value in txn.cursor(db=durable.tables[Table.EXTENTS]).iternext(keys=False, values=True):
                length, offset, size = _EXTENT.unpack_from(value)
                keep(offset - record.payload_start(length), size)
        for extent in waiting:
            start, end = place_of(extent)
            keep(start, end - start)
        self._starts.clear()
        self._ends.clear()
        empty = 0
        """The start of the current row of closed slabs without records."""
        for number in range(-(-self._blob.size() // SLAB_BYTES)):
            slab = number * SLAB_BYTES
            closed = slab < self.closed_below
            if closed and number not in records:
                continue
            if empty < slab:
                self._blob.punch(empty, slab)
            empty = slab + SLAB_BYTES
            at = slab
            for packed in sorted(records.pop(number, ())):
                start = slab + (packed >> _SIZE_BITS)
                if start > at:
                    self._release(at, start)
                at = max(at, start + (packed & (1 << _SIZE_BITS) - 1))
            end = slab + SLAB_BYTES if closed else self._tails.get(slab, 0)
            if end > at:
                self._release(at, end)
        if empty < self.closed_below:
            self._blob.punch(empty, self.closed_below)


def _page_up(offset: int) -> int:
    return -(-offset // PAGE_BYTES) * PAGE_BYTES


def _allocated_below(directory: Path, but: set[str]) -> int:
    size = 0
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.name in but:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    size += _allocated_below(directory / entry.name, set())
                else:
                    size += entry.stat(follow_symlinks=False).st_blocks * 512
    except OSError as error:  # removed meanwhile
        log.debug("cannot measure %s: %s", directory, error)
    return size

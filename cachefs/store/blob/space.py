"""The account of disk space: what the cache directory takes from its disk, and what is given back of it.

Records are not all that takes space. Neighbours share pages; a writer that was killed leaves behind records that it
never reported, and up to 4 MiB that it had allocated in advance; the index and the log lie on the same disk. All of it
counts: `charge_bytes` is what is taken from the room for records, so that the directory never takes more than its size
and 64 MiB, of which FREE_BYTES and OTHER_FREE_BYTES cost nothing.

A *gap* is a range of the blob, within one slab, that no extent refers to and no writer writes to. Two gaps that meet
become one. A gap begins with a header that tells a rebuild how long it is; all its other pages are holes. A slab that
is nothing but a gap is a hole from end to end.

A slab is *closed* when no writer will write to it any more, and what was written to it has been committed or refused:
a record of a later slab has been committed, or the writer is dead and its last reports have been committed.

Gaps of this daemon's time are known as they arise. What earlier daemons left behind is found by `_sweep`: it reads all
extents and gives back what none of them refers to. That is done when more is allocated than the account explains.

All methods but the properties are called from the write-behind thread alone.
"""

import logging
import os
import struct
import time
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path

from cachefs.store.blob import record
from cachefs.store.blob.blob import PAGE_BYTES, SLAB_BYTES, Blob
from cachefs.store.index.environment import Table
from cachefs.store.index.index import Index
from cachefs.store.index.records import Extent
from cachefs.store.runs import RUN_BITS, last_run

log = logging.getLogger(__name__)

FREE_BYTES = 16 << 20
"""So much may be allocated that is no record, for what is being written, and for pages that are shared."""
OTHER_FREE_BYTES = 32 << 20
"""So much may the index, the log and other files of the directory take."""
OTHER_S = 1.0
"""How often those are looked at."""
SWEEP_SHARE = 100
"""A sweep that finds nothing may take such a part of the time."""
MIN_SWEEP_PAUSE_S = 10.0

_EXTENT = struct.Struct("<4xIQ8xQ")  # length, blob offset, bytes of the record
_SIZE_BITS = 24
assert record.record_bytes(record.MAX_PAYLOAD_BYTES) < 1 << _SIZE_BITS


def place_of(extent: Extent) -> tuple[int, int]:
    """(start, end) of a record in the blob, its header included."""
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
        """Not below any that there is."""
        # state
        self.charge_bytes = 0
        """What is taken from the room for records."""
        self._tails: dict[int, int] = {}
        """Of slabs that are not closed: where the last record ends that is known."""
        self._closed_below = 0
        self._adopted = False
        """The slabs of earlier daemons are closed, too."""
        self._ends: dict[int, int] = {}
        self._starts: dict[int, int] = {}
        """Gaps: end by start, and start by end."""
        self._swept = False
        self._next_sweep = 0.0
        self._residue = 0
        """What the last sweep could not explain."""
        self._other_bytes = 0
        self._next_look = 0.0

    # --- slabs -----------------------------------------------------------------------------------------------------

    def written(self, extents: Iterable[Extent]) -> None:
        """These were written and reported, and have been committed or refused by now."""
        newest = 0
        for extent in extents:
            start, end = place_of(extent)
            slab = start // SLAB_BYTES * SLAB_BYTES
            if slab >= max(self._start, self._closed_below):
                self._tails[slab] = max(self._tails.get(slab, 0), end)
                newest = max(newest, slab)
        if newest > self._closed_below:
            self._close_below(newest)

    def writer_has_gone(self, frontier: int) -> None:
        """All slabs before `frontier` are closed, those of earlier daemons included."""
        self._adopted = True
        self._close_below(frontier)

    def _close_below(self, frontier: int) -> None:
        self._closed_below = max(self._closed_below, frontier)
        for slab in [slab for slab in self._tails if slab < frontier]:
            self._release(self._tails.pop(slab), slab + SLAB_BYTES)

    # --- gaps ------------------------------------------------------------------------------------------------------

    def free(self, extent: Extent) -> None:
        """Give the space of a record back that no reader can see any more."""
        self._release(*place_of(extent))

    def _release(self, start: int, end: int) -> None:
        """This belongs to a gap from now on. Raises OSError where its pages cannot be given back."""
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
            head = _page_up(first + record.HEADER_BYTES)
            begin = max(head, start // PAGE_BYTES * PAGE_BYTES)
            self._blob.punch(begin, min(last // PAGE_BYTES * PAGE_BYTES, _page_up(end + record.HEADER_BYTES)))

    # --- the account -----------------------------------------------------------------------------------------------

    def measure(self, written_bytes: int, waiting: Iterable[Extent]) -> None:
        """Compare what is allocated with what is known, and give back what can be.

        `written_bytes`: of records on disk, the index's and others. `waiting`: those of them that will be freed when
        no reader sees them any more.
        """
        excess = self._excess(written_bytes)
        if self._adopted and excess > (self._residue + FREE_BYTES if self._swept else 0):
            began = self._clock()
            if began >= self._next_sweep:
                before = self._blob.allocated_bytes()
                self._sweep(waiting)
                took = self._clock() - began
                self._next_sweep = began + max(MIN_SWEEP_PAUSE_S, SWEEP_SHARE * took)
                excess = self._residue = self._excess(written_bytes)
                self._swept = True
                given_back = before - self._blob.allocated_bytes()
                log.info("%d MB that no record needs were given back in %.1f s", given_back // 1_000_000, took)
        self.charge_bytes = (excess if self._swept else 0) + max(0, self._other() - OTHER_FREE_BYTES)

    def _excess(self, written_bytes: int) -> int:
        return max(0, self._blob.allocated_bytes() - written_bytes - FREE_BYTES)

    def _other(self) -> int:
        """What the directory takes besides the blob."""
        now = self._clock()
        if now >= self._next_look:
            self._next_look = now + OTHER_S
            self._other_bytes = _allocated_below(self._directory, {"blob"})
        return self._other_bytes

    def _sweep(self, waiting: Iterable[Extent]) -> None:
        """Give back everything in closed slabs that no record needs, and know all gaps from now on."""
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
        """Where a row of slabs without records begins, up to the one that is looked at."""
        for number in range(-(-self._blob.size() // SLAB_BYTES)):
            slab = number * SLAB_BYTES
            closed = slab < self._closed_below
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
        if empty < self._closed_below:
            self._blob.punch(empty, self._closed_below)


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
    except OSError as error:  # it goes away while it is looked at
        log.debug("cannot look at %s: %s", directory, error)
    return size

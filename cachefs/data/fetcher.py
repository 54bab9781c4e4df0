"""Misses: fetched once for all readers that wait, and answered before anything is written.

A small file is fetched whole. Of a large file a miss fetches the requested range, in whole pages, or more if the rest
will probably be read as well (policies/prefetch/sequential.py).

A fetch does not belong to one reader: cancelling a reader does not affect it. After the read the file is compared with
its pinned record. If they differ, the readers get ESTALE and `changed` is called, so that the next open sees the new
version as a whole (hazard 11).
"""

import contextlib
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from functools import partial

import trio
from outcome import Outcome

from cachefs.data.data_cache import DataCache
from cachefs.data.young_files import YoungFiles
from cachefs.source.call_pool import CallPool
from cachefs.source.calls.doubt import may_be_lost
from cachefs.source.directories import ROOT
from cachefs.source.identity import Changed
from cachefs.source.single_flight import Flight, SingleFlight
from cachefs.source.source import Object, Source
from cachefs.stats.metrics import Metrics
from cachefs.store.index.environment import View
from cachefs.store.index.records import Inode
from policies.prefetch.sequential import CHUNK_BYTES, MAX_PIECES, window_bytes

PAGE_BYTES = 4096
MAX_AHEAD = 64
MAX_STEPS = 64
"""At most so many pieces of a run are looked up."""
_NOWHERE = Object(ROOT)
"""For a read by an open descriptor."""


@dataclass(slots=True)
class OpenFile:
    """One version of an immutable file, for all its handles."""

    inode: Inode
    fd: int | None = None
    """Of the source: kept for large files until the last handle is closed; for small files only until the fetch."""
    handles: int = 0
    held: bool = False
    """The file has no name: `fd` is the only way to its data, and stays open."""
    generation: int = 0
    """The generation of the source in which `fd` was opened."""
    stale: list[int] = field(default_factory=list)
    """Descriptors of earlier generations, which calls may still use. Closed with the last handle."""
    is_mutable: bool = False
    """It got a mutable name, or a writer: its open handles read from the source."""

    def set_fd(self, fd: int, generation: int) -> None:
        self.fd, self.generation = fd, generation

    def drop_stale(self, generation: int) -> None:
        """The source was mounted anew: its earlier descriptors are dead."""
        if self.fd is not None and self.generation != generation and not self.held:
            self.stale.append(self.fd)
            self.fd = None


@dataclass(eq=False)
class Fetcher:
    """Reads of immutable files: from the cache, else from the source."""

    # dependencies
    source: Source
    call_pool: CallPool
    data: DataCache
    metrics: Metrics
    _: KW_ONLY
    object_of: Callable[[int, View | None], Object]
    """The object of an inode number in the source. Raises ESTALE if it has no name."""
    changed: Callable[[Inode, Changed], None]
    """Called with a file that was changed or replaced, or whose directory was."""
    other_name: Callable[[int, Changed], tuple[int, bytes] | None]
    """After that: another name of an inode number that may lead to it."""
    own_change: Callable[[int], trio.Event | None]
    """An event that is set at the end of the change that this mount is making to an inode. None: it makes none."""
    young: YoungFiles
    record: Callable[[int], Inode | None]
    """The present record of an inode number."""
    # constants
    reads_ahead: bool = False

    def __post_init__(self) -> None:
        self._fetches: SingleFlight[tuple[int, int, int, int], bytes] = SingleFlight()
        self._ranges: dict[tuple[int, int], dict[tuple[int, int], Flight[bytes]]] = {}
        """Ranges that are being fetched: by (inode, version), then by (start, end)."""
        self._ahead: OrderedDict[tuple[int, int], tuple[int, int]] = OrderedDict()
        """(inode, version) → (start, end) of readahead that has not been requested yet."""
        self._opens: SingleFlight[tuple[int, int], None] = SingleFlight()

    async def read(self, file: OpenFile, offset: int, size: int) -> bytes | memoryview:
        """Up to `size` bytes from `offset`; fewer at the end of the file."""
        began_ns = time.monotonic_ns()
        inode = file.inode
        size = min(size, inode.size - offset)
        if size <= 0:
            return b""
        parts: list[bytes | memoryview] = []
        hit = True
        end = offset + size
        while offset < end:
            part, was_hit = await self._read_part(file, offset, end - offset)
            hit = hit and was_hit
            parts.append(part)
            offset += len(part)
        if hit:
            self.metrics.hits += 1
            self.metrics.hit_bytes += size
        else:
            self.metrics.misses += 1
            self.metrics.miss_bytes += size
        self.metrics.latencies.note("read_hit" if hit else "read_miss", time.monotonic_ns() - began_ns)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _read_part(self, file: OpenFile, offset: int, length: int) -> tuple[bytes | memoryview, bool]:
        """Up to `length` bytes, at least one, and whether that was a hit."""
        refused = False
        tried: set[tuple[int, bytes]] = set()
        while True:
            inode, generation = file.inode, self.source.generation
            file.drop_stale(generation)
            try:
                return await self._read_version(file, inode, offset, length)
            except OSError as error:
                if isinstance(error, PermissionError) and not refused:  # as in `SingleFlight.ask`
                    refused = True
                    continue
                if not isinstance(error, Changed):
                    if not await self.is_anew(error, generation):
                        raise
                    continue
                # A rename or unlink by this mount changes the ctime: no external modification.
                own_change = self.own_change(inode.number)
                if own_change is not None:
                    await own_change.wait()
                other = self.other_name(inode.number, error)
                if file.inode is inode and (other is None or other in tried):
                    raise
                if other is not None:
                    tried.add(other)

    async def is_anew(self, error: OSError, generation: int) -> bool:
        """After an error of a call by a descriptor: was the source mounted anew? Waits until that is known."""
        if not may_be_lost(error):
            return False
        await self.call_pool.run(self.source.ask)
        return self.source.generation != generation

    async def _read_version(
        self, file: OpenFile, inode: Inode, offset: int, length: int
    ) -> tuple[bytes | memoryview, bool]:
        self.data.accessed([(inode.number, self.data.unit_of(inode, offset)[0] // CHUNK_BYTES)])
        self._follow(file, inode, offset)
        opened = file.fd is not None or self.data.is_small(inode)
        under_way = self._under_way(inode, offset)
        if under_way is None:
            cached = await self.data.read(inode, offset, length)
            if cached is not None:
                return cached
            if not opened:
                await self.open_source(file)
            under_way = self._under_way(inode, offset)  # another reader may have been faster
        if under_way is None and self._is_young(file):
            self.metrics.young_reads += 1
            return await self._fetch(file, offset, offset + length).wait(), False
        if under_way is None:
            with self.data.index.view() as view:
                start, end, streams = self._range(view, inode, offset, offset + length)
            if not self.data.admits(inode, end - start):
                self.data.skipped()
                return await self._fetch(file, offset, offset + length).wait(), False
            under_way = start, self._fetch_range(file, start, end)
            if streams:
                self._read_ahead(file, end)
        start, flight = under_way
        payload = await flight.wait()
        self.data.mark_read(inode, offset)
        return memoryview(payload)[offset - start : offset - start + length], False

    def _follow(self, file: OpenFile, inode: Inode, offset: int) -> None:
        """The first read of a range that was read ahead: read ahead the next chunk, too."""
        version = inode.number, inode.version
        start, end = self._ahead.get(version, (0, 0))
        if start <= offset < end:
            del self._ahead[version]
            self._read_ahead(file, end)

    def _read_ahead(self, file: OpenFile, start: int) -> None:
        inode = file.inode
        end = min(start + CHUNK_BYTES, inode.size)
        if not self.reads_ahead or start >= end or file.fd is None or self._under_way(inode, start):
            return
        if self._is_young(file):
            return
        with self.data.index.view() as view:
            if self.data.range_at(view, inode, start) is not None:
                return
            end = self._next_known(view, inode, start, end)
        if self.data.admits(inode, end - start, ahead=True):
            self._fetch_range(file, start, end)
            self._ahead[inode.number, inode.version] = start, end
            if len(self._ahead) > MAX_AHEAD:
                self._ahead.popitem(last=False)

    def _is_young(self, file: OpenFile) -> bool:
        """May its data not be cached yet? A handle that stays open learns from the record when they may."""
        if file.inode.is_young:
            record = self.record(file.inode.number)
            if record is not None and record.version == file.inode.version and not record.is_young:
                file.inode = record
        return file.inode.is_young

    def _under_way(self, inode: Inode, offset: int) -> tuple[int, Flight[bytes]] | None:
        """The range that is being fetched and contains the byte at `offset`: its start and its flight."""
        for (start, end), flight in self._ranges.get((inode.number, inode.version), {}).items():
            if start <= offset < end:
                return start, flight
        return None

    def _range(self, view: View, inode: Inode, start: int, end: int) -> tuple[int, int, bool]:
        """The range to fetch for a read of [start, end), whose first byte is neither cached nor being fetched.

        The third value: is the file being read sequentially?
        """
        if self.data.is_small(inode):
            return 0, inode.size, False
        unit, length = self.data.unit_of(inode, start)
        pieces = self.data.starts_between(view, inode, unit, unit + length)
        if len(pieces) >= MAX_PIECES and end <= unit + length:
            return unit, unit + length, False
        start = start // PAGE_BYTES * PAGE_BYTES
        end = -(-end // PAGE_BYTES) * PAGE_BYTES
        end_known = self._known_from(view, inode, inode.size) < inode.size
        wanted = start + window_bytes(self._run_start(view, inode, start), start, end_known=end_known)
        if wanted > end:
            end = self._next_known(view, inode, end, wanted)  # but not what is cached or being fetched already
        return start, min(end, inode.size), start > 0 and wanted - start == CHUNK_BYTES

    def _next_known(self, view: View, inode: Inode, first: int, last: int) -> int:
        """The first start in [first, last] of a range that is cached or being fetched; `last` if there is none."""
        under_way = (start for start, _ in self._ranges.get((inode.number, inode.version), ()))
        known = [*self.data.starts_between(view, inode, first, last), *under_way, last]
        return min(start for start in known if first <= start <= last)

    def _known_from(self, view: View, inode: Inode, offset: int) -> int:
        """The start of a range that is cached or being fetched and contains `offset - 1`; `offset` if there is none."""
        found = self._under_way(inode, offset - 1) or self.data.range_at(view, inode, offset - 1)
        return offset if found is None else found[0]

    def _run_start(self, view: View, inode: Inode, offset: int) -> int:
        """The start of the run of cached or fetched ranges that ends at `offset`; of a long run, some place in it."""
        for _ in range(MAX_STEPS):
            before = self._known_from(view, inode, offset) if offset else 0
            if before == offset:
                break
            offset = before
        return offset

    def begin(self, view: View, file: OpenFile) -> None:
        """A small file was opened and will be read: begin to fetch it before the READ arrives."""
        inode = file.inode
        if not inode.size or not self.data.is_small(inode) or inode.is_young:
            return
        if not self.data.holds_all(view, inode) and self.data.admits(inode, inode.size):
            self._fetch_range(file, 0, inode.size, view)

    async def fetch_ahead(self, file: OpenFile, unit: tuple[int, int]) -> None:
        """Fetch a unit for a prefetch request, if there is room. Errors are ignored: a reader will get them."""
        inode = file.inode
        with self.data.index.view() as view:
            wanted = not self.data.holds(view, inode, unit) and not inode.is_young
        if wanted and self.data.admits(inode, unit[1], ahead=True):
            with contextlib.suppress(OSError, Changed):
                if file.fd is None and not self.data.is_small(inode):
                    await self.open_source(file)
                await self._fetch_range(file, unit[0], sum(unit)).wait()
                self.metrics.prefetched += 1

    def _fetch_range(self, file: OpenFile, start: int, end: int, view: View | None = None) -> Flight[bytes]:
        return self._fetch(file, start, end, lambda payload: self.data.admit(file.inode, start, payload), view)

    def _fetch(
        self,
        file: OpenFile,
        start: int,
        end: int,
        fetched: Callable[[bytes], object] = lambda _: None,
        view: View | None = None,
    ) -> Flight[bytes]:
        """`fetched`: called with the data, unless the file is young: then only its readers get them."""
        inode = file.inode
        version = inode.number, inode.version
        young = self._is_young(file)  # before anything is read

        def finish(answer: Outcome[bytes]) -> bytes:
            ranges = self._ranges[version]
            del ranges[start, end]
            if not ranges:
                del self._ranges[version]
            try:
                payload = answer.unwrap()
            except Changed as error:
                if file.inode is inode and not file.is_mutable and self.own_change(inode.number) is None:
                    self.changed(inode, error)
                raise
            if young:
                self.young.was_read(inode)
            else:
                fetched(payload)
            return payload

        key = (*version, start, end)
        flight = self._fetches.flying(key)
        if flight is not None:
            return flight
        is_needed = file.fd is None or self.source.is_in_snapshot(inode.device)
        at = self.object_of(inode.number, view) if is_needed else _NOWHERE
        keep = file.held or not self.data.is_small(inode)
        call = partial(self.source.read_version, at, inode, start, end - start, file.fd, keep=keep)
        once = file.fd is not None  # a second call would find the descriptor closed or dead
        if not keep:
            file.fd = None  # closed in the thread after the read
        flight = self._fetches.begin(key, partial(self.call_pool.start, call, once=once), finish)
        self._ranges.setdefault(version, {})[start, end] = flight
        return flight

    async def open_source(self, file: OpenFile) -> None:
        """Open the pinned file for as long as it has handles. Raises `Changed` if it is gone."""
        generation = self.source.generation

        def finish(answer: Outcome[int]) -> None:
            try:
                file.set_fd(answer.unwrap(), generation)
            except Changed as error:
                self.changed(file.inode, error)
                raise

        if file.fd is None:
            call = partial(self.source.open_to_keep, self.object_of(file.inode.number, None))
            start = partial(self.call_pool.start, call, discard=close_quietly)
            await self._opens.ask((file.inode.number, file.inode.version), start, finish)


def close_quietly(fd: int) -> None:
    with contextlib.suppress(OSError):
        os.close(fd)

"""Misses: fetched once, however many readers wait, and given to them before anything is written.

A fetch runs in a task of its own: a reader that goes away neither cancels nor poisons it. What is fetched is compared
with what was pinned before and after the read; on a difference the readers get ESTALE and the owner is told, so that
the next open sees the new version whole (hazard 11).
"""

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import trio
from outcome import Outcome

from cachefs.attributes import Inode
from cachefs.data_cache import CHUNK_BYTES, DataCache
from cachefs.index import View
from cachefs.metrics import Metrics
from cachefs.single_flight import Flight, SingleFlight
from cachefs.slots import SourceSlots
from cachefs.source import Changed, Source


@dataclass(slots=True)
class OpenFile:
    """What all handles of one version of an immutable file share."""

    inode: Inode
    fd: int | None = None
    """Of the source: kept for large files, on its way to the fetch for small ones; closed with the last handle."""
    handles: int = 0
    held: bool = False
    """The name has gone: `fd` is the only way to the data, and stays open."""


class Fetcher:
    """Reads of immutable files: from the cache, else from the source."""

    def __init__(
        self,
        source: Source,
        slots: SourceSlots,
        data: DataCache,
        metrics: Metrics,
        *,
        path_of: Callable[[int, View | None], bytes],
        changed: Callable[[Inode], None],
        own_change: Callable[[int], trio.Event | None],
    ) -> None:
        """`path_of`: inode number to path, ESTALE if there is none. `changed`: told of a file that was replaced.

        `own_change`: set when the change that this mount is making to an inode right now is through; None if none is.
        """
        self._source = source
        self._slots = slots
        self._data = data
        self._metrics = metrics
        self._path_of = path_of
        self._changed = changed
        self._own_change = own_change
        self._units: SingleFlight[tuple[int, int, int, int], bytes] = SingleFlight()
        self._opens: SingleFlight[tuple[int, int], None] = SingleFlight()

    async def read(self, file: OpenFile, offset: int, size: int) -> bytes | memoryview:
        """Up to `size` bytes from `offset`; fewer at the end of the file."""
        inode = file.inode
        size = min(size, inode.size - offset)
        if size <= 0:
            return b""
        parts: list[bytes | memoryview] = []
        hit = True
        end = offset + size
        while offset < end:
            unit = self._data.unit_of(inode, offset)
            length = min(end, unit[0] + unit[1]) - offset
            part, was_hit = await self._read_unit(file, unit, offset - unit[0], length)
            hit = hit and was_hit
            parts.append(part)
            offset += length
        if hit:
            self._metrics.hits += 1
            self._metrics.hit_bytes += size
        else:
            self._metrics.misses += 1
            self._metrics.miss_bytes += size
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _read_unit(
        self, file: OpenFile, unit: tuple[int, int], start: int, length: int
    ) -> tuple[bytes | memoryview, bool]:
        while True:
            inode = file.inode
            try:
                return await self._read_version(file, inode, unit, start, length)
            except Changed:
                # A rename or unlink by this mount moves the ctime: not a change behind our back.
                own_change = self._own_change(inode.number)
                if own_change is not None:
                    await own_change.wait()
                if file.inode is inode:
                    raise

    async def _read_version(
        self, file: OpenFile, inode: Inode, unit: tuple[int, int], start: int, length: int
    ) -> tuple[bytes | memoryview, bool]:
        self._data.accessed([(inode.number, unit[0] // CHUNK_BYTES)])
        flight = self._units.flying((inode.number, inode.version, *unit))
        if flight is None:
            cached = await self._data.read(inode, unit, start, length)
            if cached is not None:
                return cached
            if file.fd is None and not self._data.is_small(inode):
                await self.open_source(file)
            if not self._data.admits(unit[1]):
                self._data.skipped()
                return await self._fetch(file, (unit[0] + start, length)).wait(), False
            flight = self._fetch_unit(file, unit)
        payload = await flight.wait()
        self._data.mark_read(inode, unit)
        return memoryview(payload)[start : start + length], False

    def begin(self, view: View, file: OpenFile) -> None:
        """A small file was opened: it will be read. Fetch it while the kernel makes up its mind."""
        inode = file.inode
        if inode.size and self._data.is_small(inode):
            unit = (0, inode.size)
            if not self._data.holds(view, inode, unit) and self._data.admits(inode.size):
                self._fetch_unit(file, unit, view)

    async def fetch_ahead(self, file: OpenFile, unit: tuple[int, int]) -> None:
        """Before anybody asks for it, and only if there is room. Errors are left to whoever reads."""
        inode = file.inode
        with self._data.view() as view:
            wanted = not self._data.holds(view, inode, unit)
        if wanted and self._data.admits(unit[1], ahead=True):
            with contextlib.suppress(OSError, Changed):
                if file.fd is None and not self._data.is_small(inode):
                    await self.open_source(file)
                await self._fetch_unit(file, unit).wait()
                self._metrics.prefetched += 1

    def _fetch_unit(self, file: OpenFile, unit: tuple[int, int], view: View | None = None) -> Flight[bytes]:
        return self._fetch(file, unit, lambda payload: self._data.admit(file.inode, unit[0], payload), view)

    def _fetch(
        self,
        file: OpenFile,
        span: tuple[int, int],
        fetched: Callable[[bytes], object] = lambda _: None,
        view: View | None = None,
    ) -> Flight[bytes]:
        inode = file.inode

        def finish(answer: Outcome[bytes]) -> bytes:
            try:
                payload = answer.unwrap()
            except Changed:
                if file.inode is inode and self._own_change(inode.number) is None:
                    self._metrics.stale_reads += 1
                    self._changed(inode)
                raise
            fetched(payload)
            return payload

        key = (inode.number, inode.version, *span)
        flight = self._units.flying(key)
        if flight is not None:
            return flight
        path = self._path_of(inode.number, view) if file.fd is None else b""
        keep = file.held or not self._data.is_small(inode)
        call = partial(self._source.read_version, path, inode, *span, file.fd, keep=keep)
        if not keep:
            file.fd = None  # read once, closed in the thread that read it
        return self._units.begin(key, partial(self._slots.start, call), finish)

    async def open_source(self, file: OpenFile) -> None:
        """Open the pinned version for as long as the file has handles. Raises `Changed` if it is gone."""

        def finish(answer: Outcome[int]) -> None:
            try:
                file.fd = answer.unwrap()
            except Changed:
                self._metrics.stale_reads += 1
                self._changed(file.inode)
                raise

        if file.fd is None:
            call = partial(self._source.open_version, self._path_of(file.inode.number, None), file.inode)
            start = partial(self._slots.start, call, discard=close_quietly)
            await self._opens.begin((file.inode.number, file.inode.version), start, finish).wait()


def close_quietly(fd: int) -> None:
    with contextlib.suppress(OSError):
        os.close(fd)

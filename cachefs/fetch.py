"""Misses: fetched once, however many readers wait, and given to them before anything is written.

A fetch runs in a task of its own: a reader that goes away neither cancels nor poisons it. What is fetched is compared
with what was pinned before and after the read; on a difference the readers get ESTALE and the owner is told, so that
the next open sees the new version whole (hazard 11).
"""

import contextlib
import copy
import os
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import trio

from cachefs.attributes import Inode
from cachefs.data_cache import DataCache
from cachefs.metrics import Metrics
from cachefs.slots import SourceSlots
from cachefs.source import Changed, Source

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class _Flight(Generic[V]):
    __slots__ = ("done", "error", "result")

    def __init__(self) -> None:
        self.done = trio.Event()
        self.result: V | None = None
        self.error: Exception | None = None


class SingleFlight(Generic[K, V]):
    """One call per key at a time; whoever asks meanwhile gets the same answer, or the same error."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._flights: dict[K, _Flight[V]] = {}

    def begin(self, key: K, function: Callable[[], Awaitable[V]]) -> _Flight[V]:
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight()
            self._nursery.start_soon(self._run, key, flight, function)
        return flight

    async def do(self, key: K, function: Callable[[], Awaitable[V]]) -> V:
        flight = self.begin(key, function)
        await flight.done.wait()
        if flight.error is not None:
            raise copy.copy(flight.error)
        return flight.result  # type: ignore[return-value]

    def flying(self, key: K) -> bool:
        return key in self._flights

    async def _run(self, key: K, flight: _Flight[V], function: Callable[[], Awaitable[V]]) -> None:
        try:
            flight.result = await function()
        except Exception as error:
            flight.error = error
        finally:
            del self._flights[key]
            flight.done.set()


@dataclass(slots=True)
class OpenFile:
    """What all handles of one version of an immutable file share."""

    inode: Inode
    fd: int | None = None
    """Of the source, kept for large files and for files that lost their name; closed with the last handle."""
    handles: int = 0


class Fetcher:
    """Reads of immutable files: from the cache, else from the source."""

    def __init__(
        self,
        source: Source,
        slots: SourceSlots,
        data: DataCache,
        metrics: Metrics,
        nursery: trio.Nursery,
        *,
        path_of: Callable[[int], bytes],
        changed: Callable[[Inode], None],
    ) -> None:
        """`path_of`: inode number to path, ESTALE if there is none. `changed`: told of a file that was replaced."""
        self._source = source
        self._slots = slots
        self._data = data
        self._metrics = metrics
        self._path_of = path_of
        self._changed = changed
        self._units: SingleFlight[tuple[int, int, int, int], bytes] = SingleFlight(nursery)
        self._opens: SingleFlight[tuple[int, int], int] = SingleFlight(nursery)

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
        cached = await self._data.read(file.inode, unit, start, length)
        if cached is not None:
            return cached
        key = (file.inode.number, file.inode.version, *unit)
        if self._units.flying(key) or self._data.admits(unit[1]):
            payload = await self._units.do(key, partial(self._fetch_unit, file, unit))
            self._data.mark_read(file.inode, unit)
            return memoryview(payload)[start : start + length], False
        self._data.skipped()
        key = (file.inode.number, file.inode.version, unit[0] + start, length)
        return await self._units.do(key, partial(self._fetch, file, unit[0] + start, length)), False

    def begin(self, file: OpenFile) -> None:
        """A small file was opened: it will be read. Fetch it while the kernel makes up its mind."""
        inode = file.inode
        if not inode.size or not self._data.is_small(inode) or not self._data.admits(inode.size):
            return
        unit = (0, inode.size)
        if not self._data.holds(inode, unit):
            self._units.begin((inode.number, inode.version, *unit), partial(self._fetch_unit, file, unit))

    async def _fetch_unit(self, file: OpenFile, unit: tuple[int, int]) -> bytes:
        payload = await self._fetch(file, *unit)
        self._data.admit(file.inode, unit[0], payload)
        return payload

    async def _fetch(self, file: OpenFile, offset: int, length: int) -> bytes:
        inode = file.inode
        try:
            if file.fd is None and not self._data.is_small(inode):
                await self.open_source(file)
            path = self._path_of(inode.number) if file.fd is None else b""
            return await self._slots.run(partial(self._source.read_version, path, inode, offset, length, file.fd))
        except Changed:
            self._metrics.stale_reads += 1
            self._changed(inode)
            raise

    async def open_source(self, file: OpenFile) -> None:
        """Open the pinned version for as long as the file has handles. Raises `Changed` if it is gone."""

        async def opened() -> int:
            path = self._path_of(file.inode.number)
            file.fd = await self._slots.run(partial(self._source.open_version, path, file.inode), discard=close_quietly)
            return file.fd

        if file.fd is None:
            await self._opens.do((file.inode.number, file.inode.version), opened)


def close_quietly(fd: int) -> None:
    with contextlib.suppress(OSError):
        os.close(fd)

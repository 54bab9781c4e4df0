"""Open files: when a file becomes immutable, and what its handles read.

A handle is either of an immutable file, and served from the cache, or a descriptor of the source. All handles of one
version of an immutable file share an `OpenFile`. What this mount itself does to a name moves the change time; open
files go on with the new one (`own_change`).
"""

import errno
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import trio

from cachefs.attributes import IMMUTABLE, UNLINKED, WRITTEN, Inode, Stat
from cachefs.data_cache import DataCache
from cachefs.fetch import Fetcher, OpenFile, close_quietly
from cachefs.filesystem import Entry, FileSystem, failed
from cachefs.metrics import Metrics
from cachefs.options import CacheLevel
from cachefs.source import Changed


@dataclass(slots=True)
class Handle:
    """An open file: either an immutable one, served from the cache, or a descriptor of the source."""

    number: int
    file: OpenFile | None = None
    fd: int = -1
    writable: bool = False


class OpenFiles:
    def __init__(self, filesystem: FileSystem, data: DataCache, metrics: Metrics) -> None:
        # dependencies
        self._fs = filesystem
        self._metadata = filesystem.metadata
        self._options = filesystem.options
        self._source = filesystem.source
        self._slots = filesystem.slots
        self._metrics = metrics
        self._fetcher = Fetcher(
            filesystem.source,
            filesystem.slots,
            data,
            metrics,
            path_of=filesystem.path_of,
            changed=filesystem.changed_behind_our_back,
            own_change=lambda number: self._own_changes.get(number),
        )
        # state
        self.handles: dict[int, Handle] = {}
        self._next_handle = 1  # below 2^63: the upper half is the fast path's (hazard 2)
        self._files: dict[tuple[int, int], OpenFile] = {}
        self._own_changes: dict[int, trio.Event] = {}
        self.writers: Counter[int] = Counter()
        """How many writable handles an inode has."""

    async def getattr(self, number: int) -> Entry:
        fd = self.descriptor_of(number)
        if fd is None:
            return await self._fs.getattr(number)
        # The name may be gone, or lead to another file by now; the descriptor cannot.
        now = await self._slots.run(partial(self._source.fstat, fd))
        record = self._fs.record(number).with_stat(now)
        with self._metadata.index.update() as update:
            self._metadata.put_inode(update, record)
        return Entry(record, 0.0 if record.flags & UNLINKED else min(1.0, self._options.unpinned_timeout_s))

    def descriptor_of(self, number: int) -> int | None:
        """A descriptor of the source by which a mutable file is open for writing."""
        if not self.writers[number]:
            return None
        return next((h.fd for h in self.handles.values() if h.number == number and h.writable), None)

    async def open_for_reading(self, number: int) -> tuple[int, bool]:
        """A handle, and whether the kernel may keep the pages it has. Makes the file immutable, unless it may not."""
        fetch_at_once = self._options.cache is CacheLevel.FULL
        with self._metadata.index.view() as view:
            record = self._metadata.inode(view, number)
            if record is None:
                raise failed(errno.ESTALE)
            if self._is_immutable(record) and self._metadata.remaining_ns(record):
                # The usual case, and the critical path of a first epoch: the fetch begins before anything else.
                file = self._shared(record)
                if fetch_at_once:
                    self._fetcher.begin(view, file)
                return self._add_handle(Handle(number, file=file)), True
        if self._metadata.is_pinned(record):
            record = await self._fs.believed(number, record)
        if not self._may_be_immutable(record):
            fd = await self._open_source(number)
            return self._add_handle(Handle(number, fd=fd)), False
        file = self._shared(record) if self._is_immutable(record) else await self._pin(record)
        if fetch_at_once:
            with self._metadata.index.view() as view:
                self._fetcher.begin(view, file)
        return self._add_handle(Handle(number, file=file)), True

    def _is_immutable(self, record: Inode) -> bool:
        """Immutable already; on a mount that pins everything every regular file that is pinned is."""
        return bool(
            record.is_regular
            and self._metadata.is_pinned(record)
            and (record.flags & IMMUTABLE or self._options.pins_everything)
            and not record.flags & UNLINKED
            and not self.writers[record.number]
        )

    def _may_be_immutable(self, record: Inode) -> bool:
        if not self._options.pins_files or not record.is_regular or self.writers[record.number]:
            return False
        if record.flags & IMMUTABLE:
            return True
        if record.flags & (WRITTEN | UNLINKED) or not self._metadata.index.available:
            return False
        return not (self._options.mutable and self._metadata.is_mutable_path(self._fs.path_of(record.number)))

    def _shared(self, record: Inode) -> OpenFile:
        file = self._files.get((record.number, record.version))
        if file is None:
            file = self._files[record.number, record.version] = OpenFile(record)
        file.handles += 1
        return file

    async def _open_source(self, number: int) -> int:
        call = partial(self._source.open_file, self._fs.path_of(number))
        return await self._slots.run(call, discard=close_quietly)

    async def _pin(self, record: Inode) -> OpenFile:
        """First read-only open on a read-write mount: pin what the source says now, not what it said a second ago.

        Where the two differ the kernel's attributes are old as well: ESTALE makes it look the name up and open again.
        """
        number = record.number
        call = partial(self._source.open_and_stat, self._fs.path_of(number))
        fd, now = await self._slots.run(call, discard=lambda opened: close_quietly(opened[0]))
        try:
            with self._metadata.index.update() as update:
                current = self._metadata.inode(update, number)
                if current is None or not current.same_version(now):
                    raise failed(errno.ESTALE)
                if self.writers[number] or current.flags & WRITTEN:  # while we waited
                    raise failed(errno.ESTALE)
                if not current.flags & IMMUTABLE:
                    current = self._metadata.pin_file(update, current)
        except BaseException:
            close_quietly(fd)
            raise
        file = self._shared(current)
        if file.fd is None:
            file.fd = fd
        else:
            close_quietly(fd)
        return file

    def _add_handle(self, handle: Handle) -> int:
        number = self._next_handle
        self._next_handle += 1
        self.handles[number] = handle
        return number

    def add_source_handle(self, number: int, fd: int, *, writable: bool) -> int:
        if writable:
            self.writers[number] += 1
        return self._add_handle(Handle(number, fd=fd, writable=writable))

    async def read(self, handle: int, offset: int, size: int) -> bytes | memoryview:
        opened = self.handles[handle]
        if opened.file is not None:
            return await self._fetcher.read(opened.file, offset, size)
        data = await self._slots.run(partial(self._source.pread, opened.fd, size, offset))
        self._metrics.misses += 1
        self._metrics.miss_bytes += len(data)
        return data

    async def flush(self, handle: int) -> None:
        """close() of a descriptor. NFS and Ceph report write errors here, so a dup of ours is closed (hazard 4)."""
        opened = self.handles[handle]
        if opened.writable:
            self._source.counters.add("close")
            await self._slots.run(lambda: os.close(os.dup(opened.fd)))
            self._fs.expire(opened.number)

    async def release(self, handle: int) -> None:
        opened = self.handles.pop(handle)
        fd: int | None = opened.fd if opened.file is None else None
        if opened.writable:
            self.writers[opened.number] -= 1
            if self.writers[opened.number] == 0:
                del self.writers[opened.number]
                self._fs.expire(opened.number)
        if opened.file is not None:
            opened.file.handles -= 1
            if opened.file.handles == 0:
                self._files.pop((opened.file.inode.number, opened.file.inode.version), None)
                fd, opened.file.fd = opened.file.fd, None
        if fd is not None:
            await self._slots.run(partial(close_quietly, fd))

    # --- our own changes -------------------------------------------------------------------------------------------

    @contextmanager
    def own_change(self, *numbers: int) -> Iterator[None]:
        """While a name of these inodes is being changed by this mount: fetches that see a new ctime wait for it."""
        event = trio.Event()
        for number in numbers:
            self._own_changes[number] = event
        try:
            yield
        finally:
            for number in numbers:
                if self._own_changes.get(number) is event:
                    del self._own_changes[number]
            event.set()

    async def hold_data(self, number: int) -> None:
        """Before a name is unlinked or replaced: open immutable files keep a descriptor of the source (hazard 2)."""
        for (inode, _), file in list(self._files.items()):
            if inode == number:
                try:
                    await self._fetcher.open_source(file)
                    file.held = True
                except Changed:
                    pass  # and the entry was dropped

    def store_own_change(self, number: int, now: Stat) -> None:
        """What an inode looks like after our own change; open files of it go on with that."""
        with self._metadata.index.update() as update:
            before = self._metadata.inode(update, number)
            after = self._metadata.apply_own_change(update, number, now)
        if before is None or after is None:
            return
        file = self._files.get((number, after.version))
        if file is not None and file.inode.size == now.size and file.inode.mtime_ns == now.mtime_ns:
            file.inode = after

    async def compare_own_change(self, number: int) -> None:
        """A name of an inode has gone by our doing: look at what is left, by another name or by a descriptor."""
        with self._metadata.index.view() as view:
            path = self._metadata.path(view, number) if self._metadata.links(view, number) else None
        if path is not None:
            self.store_own_change(number, await self._slots.run(partial(self._source.lstat, path)))
            return
        for (inode, _), file in list(self._files.items()):
            if inode == number and file.fd is not None:
                self.store_own_change(number, await self._slots.run(partial(self._source.fstat, file.fd)))

    async def close(self) -> None:
        """Close every descriptor that is still open."""
        for handle in list(self.handles):
            await self.release(handle)

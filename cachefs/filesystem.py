"""The semantics of reading: look-ups, attributes, opens and reads. No pyfuse3 here; docs/SEMANTICS.md is the promise.

Every method takes and gives inode numbers and records; errors are OSError with the errno the caller shall see.
`directories.py` has the listings, `mutations.py` what changes the source.

Rules for all of it: a record is committed to the index before the kernel is told of it. State is looked up again
after every await. No method waits for a notification of the kernel: the request it serves may be what the
notification waits for (hazard 1).
"""

import errno
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import trio
from outcome import Outcome

from cachefs.attributes import IMMUTABLE, NANOSECONDS, ROOT_INODE, UNLINKED, WRITTEN, Inode, Stat
from cachefs.data_cache import DataCache
from cachefs.fetch import Fetcher, OpenFile, close_quietly
from cachefs.index import Table, View
from cachefs.metadata_cache import FOREVER_NS, MetadataCache
from cachefs.metrics import Metrics
from cachefs.options import CacheLevel, Options
from cachefs.single_flight import SingleFlight
from cachefs.slots import SourceSlots
from cachefs.source import Changed, Source

_KNOWN, _ABSENT, _UNKNOWN = b"\1", b"\0", None


class Notifier(Protocol):
    """Tells the kernel to drop what it caches. `*_soon` returns at once; the others return when it has."""

    def entry_soon(self, parent: int, name: bytes) -> None: ...

    async def entry(self, parent: int, name: bytes) -> None: ...

    async def inode(self, number: int) -> None: ...


class Entry(NamedTuple):
    """What a look-up is answered with. `inode` None: there is no such name."""

    inode: Inode | None
    timeout_s: float
    """How long the kernel may believe the entry and the attributes."""


@dataclass(slots=True)
class Handle:
    """An open file: either an immutable one, served from the cache, or a descriptor of the source."""

    number: int
    file: OpenFile | None = None
    fd: int = -1
    writable: bool = False


def failed(number: int) -> OSError:
    return OSError(number, os.strerror(number))


class FileSystem:
    def __init__(
        self,
        source: Source,
        slots: SourceSlots,
        metadata: MetadataCache,
        data: DataCache,
        options: Options,
        metrics: Metrics,
        notifier: Notifier,
    ) -> None:
        # dependencies
        self.source = source
        self.slots = slots
        self.metadata = metadata
        self.data = data
        self.options = options
        self.metrics = metrics
        self.notifier = notifier
        self._fetcher = Fetcher(
            source,
            slots,
            data,
            metrics,
            path_of=self.path_of,
            changed=self._changed_behind_our_back,
            own_change=lambda number: self._own_changes.get(number),
        )
        # state
        self._lstats: SingleFlight[tuple[int, bytes], Inode | None] = SingleFlight()
        self.handles: dict[int, Handle] = {}
        self._next_handle = 1  # below 2^63: the upper half is the fast path's (hazard 2)
        self._files: dict[tuple[int, int], OpenFile] = {}
        self._own_changes: dict[int, trio.Event] = {}
        self.writers: Counter[int] = Counter()

    # --- names -----------------------------------------------------------------------------------------------------

    def path_of(self, number: int, view: View | None = None) -> bytes:
        """A path from the root of the source; in a `view` that is open already, where there is one."""
        if view is not None:
            return self.metadata.path(view, number)
        with self.metadata.index.view() as view:
            return self.metadata.path(view, number)

    def pins(self, path: bytes) -> bool:
        """Does this mount pin whatever it sees at this path?"""
        return self.options.pins_everything and not self.metadata.is_mutable_path(path)

    def timeout_s(self, record: Inode) -> float:
        remaining = self.metadata.remaining_ns(record)
        return float("inf") if remaining == FOREVER_NS else remaining / NANOSECONDS

    def record(self, number: int) -> Inode:
        """The record of an inode that the kernel was told of. ESTALE if it has gone."""
        with self.metadata.index.view() as view:
            record = self.metadata.inode(view, number)
        if record is None:
            raise failed(errno.ESTALE)
        return record

    async def lookup(self, parent: int, name: bytes) -> Entry:
        directory = self.record(parent)
        if self.metadata.is_pinned(directory):
            directory = await self.believed(parent, directory)
        with self.metadata.index.view() as view:
            dentry = self.metadata.dentry(view, parent, name)
            if self.metadata.knows_absent(view, directory, name, dentry):
                return Entry(None, self.timeout_s(directory))
            if dentry is not None and dentry.inode and self.metadata.entry_holds(directory, dentry):
                record = self.metadata.inode(view, dentry.inode)
                if record is not None and self.metadata.is_pinned(record) and self.metadata.remaining_ns(record):
                    return Entry(record, self.timeout_s(record))
        found = await self.compare(parent, name)
        if found is None:
            pinned = self.pins(self._join(parent, name))
            return Entry(None, float("inf") if pinned else self.options.unpinned_timeout_s)
        return Entry(found, self.timeout_s(found))

    def _join(self, parent: int, name: bytes) -> bytes:
        path = self.path_of(parent)
        return path + b"/" + name if path else name

    async def compare(self, parent: int, name: bytes) -> Inode | None:
        """lstat a name and record what it said. None: there is no such name."""
        path = self._join(parent, name)

        def finish(answer: Outcome[Stat]) -> Inode | None:
            pin = self.pins(path)
            try:
                now = answer.unwrap()
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                    raise
                with self.metadata.index.update() as update:
                    self.metadata.apply_absence(update, parent, name, pin=pin)
                return None
            with self.metadata.index.update() as update:
                return self.metadata.apply_stat(update, parent, name, now, pin=pin)

        start = partial(self.slots.start, partial(self.source.lstat, path))
        return await self._lstats.begin((parent, name), start, finish).wait()

    async def believed(self, number: int, record: Inode | None = None) -> Inode:
        """The record of an inode, compared with the source first if it must be. ESTALE if it is another one now."""
        record = record or self.record(number)
        if self.metadata.remaining_ns(record):
            return record
        if number == ROOT_INODE:
            await self._compare_root()
            return self.record(number)
        with self.metadata.index.view() as view:
            links = self.metadata.links(view, number)
        for parent, name in links:
            found = await self.compare(parent, name)
            if found is not None and found.number == number:
                return found
        raise failed(errno.ESTALE)

    async def _compare_root(self) -> None:
        def finish(answer: Outcome[Stat]) -> Inode:
            with self.metadata.index.update() as update:
                return self.metadata.apply_root(update, answer.unwrap(), pin=self.pins(b""))

        start = partial(self.slots.start, partial(self.source.lstat, b""))
        await self._lstats.begin((0, b""), start, finish).wait()

    async def getattr(self, number: int) -> Entry:
        fd = self.descriptor_of(number)
        if fd is not None:
            # The name may be gone, or lead to another file by now; the descriptor cannot.
            now = await self.slots.run(partial(self.source.fstat, fd))
            record = self.record(number).with_stat(now)
            with self.metadata.index.update() as update:
                self.metadata.put_inode(update, record)
            return Entry(record, 0.0 if record.flags & UNLINKED else min(1.0, self.options.unpinned_timeout_s))
        record = await self.believed(number)
        return Entry(record, self.timeout_s(record))

    def descriptor_of(self, number: int) -> int | None:
        """A descriptor of the source by which a mutable file is open."""
        if not self.writers[number]:
            return None
        return next((h.fd for h in self.handles.values() if h.number == number and h.file is None), None)

    def forget(self, forgotten: Iterable[tuple[int, int]]) -> None:
        with self.metadata.index.update() as update:
            for number, count in forgotten:
                if self.metadata.forget(update, number, count):
                    self.metadata.drop_values(update, number)

    # --- symlinks and extended attributes --------------------------------------------------------------------------

    async def readlink(self, number: int) -> bytes:
        record = await self.believed(number)
        with self.metadata.index.view() as view:
            target = self.metadata.value(view, Table.SYMLINKS, record)
            path = self.metadata.path(view, number) if target is None else b""
        if target is None:
            target = await self.slots.run(partial(self.source.readlink, path))
            self._keep(Table.SYMLINKS, record, b"", target)
        return target

    def _keep(self, table: Table, record: Inode, name: bytes, value: bytes) -> None:
        """Pin a value that was fetched, if it is still that version's."""
        with self.metadata.index.update() as update:
            now = self.metadata.inode(update, record.number)
            if now is not None and now.version == record.version and self.metadata.is_pinned(now):
                self.metadata.put_value(update, table, now, name, value)

    def _value(self, record: Inode, name: bytes) -> tuple[bytes | None, bytes]:
        """The cached xattr and the path to ask for it."""
        with self.metadata.index.view() as view:
            cached = self.metadata.value(view, Table.XATTRS, record, name) if self.metadata.is_pinned(record) else None
            return cached, self.metadata.path(view, record.number) if cached is None else b""

    async def getxattr(self, number: int, name: bytes) -> bytes:
        """ENODATA where there is none: also where the source has no extended attributes at all (hazard 18)."""
        record = await self.believed(number)
        cached, path = self._value(record, name)
        if cached is None:
            try:
                cached = _KNOWN + await self.slots.run(partial(self.source.getxattr, path, name))
            except OSError as error:
                if error.errno not in (errno.ENODATA, errno.EOPNOTSUPP, errno.ENOSYS):
                    raise
                cached = _ABSENT
            self._keep(Table.XATTRS, record, name, cached)
        if cached == _ABSENT:
            raise failed(errno.ENODATA)
        return cached[1:]

    async def listxattr(self, number: int) -> list[bytes]:
        record = await self.believed(number)
        cached, path = self._value(record, b"")
        if cached is None:
            try:
                names = await self.slots.run(partial(self.source.listxattr, path))
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
                    raise
                names = []
            cached = _KNOWN + b"\0".join(names)
            self._keep(Table.XATTRS, record, b"", cached)
        return [name for name in cached[1:].split(b"\0") if name]

    # --- open files ------------------------------------------------------------------------------------------------

    async def open_for_reading(self, number: int) -> tuple[int, bool]:
        """A handle, and whether the kernel may keep the pages it has. Makes the file immutable, unless it may not."""
        fetch_at_once = self.options.cache is CacheLevel.FULL
        with self.metadata.index.view() as view:
            record = self.metadata.inode(view, number)
            if record is None:
                raise failed(errno.ESTALE)
            if self._is_immutable(record) and self.metadata.remaining_ns(record):
                # The usual case, and the critical path of a first epoch: the fetch begins before anything else.
                file = self._shared(record)
                if fetch_at_once:
                    self._fetcher.begin(view, file)
                return self._add_handle(Handle(number, file=file)), True
        if self.metadata.is_pinned(record):
            record = await self.believed(number, record)
        if not self._may_be_immutable(record):
            fd = await self._open_source(number)
            return self._add_handle(Handle(number, fd=fd)), False
        file = self._shared(record) if self._is_immutable(record) else await self._pin(record)
        if fetch_at_once:
            with self.metadata.index.view() as view:
                self._fetcher.begin(view, file)
        return self._add_handle(Handle(number, file=file)), True

    def _is_immutable(self, record: Inode) -> bool:
        """Immutable already; on a mount that pins everything every regular file that is pinned is."""
        return bool(
            record.is_regular
            and self.metadata.is_pinned(record)
            and (record.flags & IMMUTABLE or self.options.pins_everything)
            and not record.flags & UNLINKED
            and not self.writers[record.number]
        )

    def _may_be_immutable(self, record: Inode) -> bool:
        if not self.options.pins_files or not record.is_regular or self.writers[record.number]:
            return False
        if record.flags & IMMUTABLE:
            return True
        if record.flags & (WRITTEN | UNLINKED) or not self.metadata.index.available:
            return False
        return not (self.options.mutable and self.metadata.is_mutable_path(self.path_of(record.number)))

    def _shared(self, record: Inode) -> OpenFile:
        file = self._files.get((record.number, record.version))
        if file is None:
            file = self._files[record.number, record.version] = OpenFile(record)
        file.handles += 1
        return file

    async def _open_source(self, number: int) -> int:
        call = partial(self.source.open_file, self.path_of(number))
        return await self.slots.run(call, discard=close_quietly)

    async def _pin(self, record: Inode) -> OpenFile:
        """First read-only open on a read-write mount: pin what the source says now, not what it said a second ago.

        Where the two differ the kernel's attributes are old as well: ESTALE makes it look the name up and open again.
        """
        number = record.number
        call = partial(self.source.open_and_stat, self.path_of(number))
        fd, now = await self.slots.run(call, discard=lambda opened: close_quietly(opened[0]))
        try:
            with self.metadata.index.update() as update:
                current = self.metadata.inode(update, number)
                if current is None or not current.same_version(now):
                    raise failed(errno.ESTALE)
                if self.writers[number] or current.flags & WRITTEN:  # while we waited
                    raise failed(errno.ESTALE)
                if not current.flags & IMMUTABLE:
                    current = self.metadata.pin_file(update, current)
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
        data = await self.slots.run(partial(self.source.pread, opened.fd, size, offset))
        self.metrics.misses += 1
        self.metrics.miss_bytes += len(data)
        return data

    async def flush(self, handle: int) -> None:
        """close() of a descriptor. NFS and Ceph report write errors here, so a dup of ours is closed (hazard 4)."""
        opened = self.handles[handle]
        if opened.writable:
            self.source.counters.add("close")
            await self.slots.run(lambda: os.close(os.dup(opened.fd)))
            self.expire(opened.number)

    def expire(self, number: int) -> None:
        """This mount changed a mutable file: what is known of it is not believed any more."""
        with self.metadata.index.update() as update:
            record = self.metadata.inode(update, number)
            if record is not None and not self.metadata.is_pinned(record):
                self.metadata.put_inode(update, record._replace(expires_ns=0))

    async def release(self, handle: int) -> None:
        opened = self.handles.pop(handle)
        fd: int | None = opened.fd if opened.file is None else None
        if opened.writable:
            self.writers[opened.number] -= 1
            if self.writers[opened.number] == 0:
                del self.writers[opened.number]
                self.expire(opened.number)
        if opened.file is not None:
            opened.file.handles -= 1
            if opened.file.handles == 0:
                self._files.pop((opened.file.inode.number, opened.file.inode.version), None)
                fd, opened.file.fd = opened.file.fd, None
        if fd is not None:
            await self.slots.run(partial(close_quietly, fd))

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
        with self.metadata.index.update() as update:
            before = self.metadata.inode(update, number)
            after = self.metadata.apply_own_change(update, number, now)
        if before is None or after is None:
            return
        file = self._files.get((number, after.version))
        if file is not None and file.inode.size == now.size and file.inode.mtime_ns == now.mtime_ns:
            file.inode = after

    async def compare_own_change(self, number: int) -> None:
        """A name of an inode has gone by our doing: look at what is left, by another name or by a descriptor."""
        with self.metadata.index.view() as view:
            path = self.metadata.path(view, number) if self.metadata.links(view, number) else None
        if path is not None:
            self.store_own_change(number, await self.slots.run(partial(self.source.lstat, path)))
            return
        for (inode, _), file in list(self._files.items()):
            if inode == number and file.fd is not None:
                self.store_own_change(number, await self.slots.run(partial(self.source.fstat, file.fd)))

    # --- changes behind our back -----------------------------------------------------------------------------------

    def _changed_behind_our_back(self, inode: Inode) -> None:
        with self.metadata.index.update() as update:
            current = self.metadata.inode(update, inode.number)
            if current is None or current.version != inode.version:
                return
            links = self.metadata.drop(update, inode.number)
        for parent, name in links:
            self.notifier.entry_soon(parent, name)

    async def invalidate(self, path: bytes) -> int:
        """Drop a file or a subtree, in the kernel too; returns when it has. The number of inodes dropped."""
        numbers, links = self._dropped_beneath(path)
        for parent, name in links:
            await self.notifier.entry(parent, name)
        for number in numbers:
            await self.notifier.inode(number)
        return len(numbers)

    def _dropped_beneath(self, path: bytes) -> tuple[list[int], list[tuple[int, bytes]]]:
        numbers: list[int] = []
        links: list[tuple[int, bytes]] = []
        with self.metadata.index.update() as update:
            number = self._number_of(update, path)
            waiting = [number]
            while waiting:
                number = waiting.pop()
                record = self.metadata.inode(update, number)
                if record is None:
                    continue
                if record.is_directory:
                    waiting += self.metadata.drop_children(update, number)
                numbers.append(number)
                links += self.metadata.drop(update, number)
        return numbers, links

    def _number_of(self, view: View, path: bytes) -> int:
        number = ROOT_INODE
        for component in path.split(b"/") if path else ():
            dentry = self.metadata.dentry(view, number, component)
            if dentry is None or dentry.inode == 0:
                raise failed(errno.ENOENT)
            number = dentry.inode
        return number

    # --- the whole -------------------------------------------------------------------------------------------------

    async def statfs(self) -> os.statvfs_result:
        return await self.slots.run(self.source.statfs)

    async def close(self) -> None:
        """Close every descriptor that is still open."""
        for handle in list(self.handles):
            await self.release(handle)

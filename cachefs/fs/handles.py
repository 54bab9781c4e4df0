"""Opens and reads: handles of files, and what they read.

A handle is either of an immutable file, and served from the cache, or a descriptor of the source (descriptors.py). What
an open makes of a file is decided in `immutability.py`. All handles of one version of an immutable file share an
`OpenFile` (cachefs/data/shared_files.py). The fast path answers OPENs without us, and reports them later; reads of such
files that it passes on come without a handle of ours.
"""

import errno
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

from cachefs.contract.messages import FAST_HANDLE as FAST_HANDLE
from cachefs.data.data_cache import DataCache
from cachefs.data.fetcher import Fetcher, OpenFile, close_quietly
from cachefs.data.shared_files import SharedFiles
from cachefs.data.young_files import YoungFiles
from cachefs.fs.descriptors import Descriptors, Handle
from cachefs.fs.names import FileSystem, failed
from cachefs.metadata import inode_values
from cachefs.metadata.inode_paths import links_of
from cachefs.options import CacheLevel
from cachefs.source.credentials import Caller
from cachefs.source.identity import Changed
from cachefs.source.shares import UNKNOWN
from cachefs.source.source import as_myself
from cachefs.stats.metrics import Metrics
from cachefs.store.index.records import UNLINKED, WRITTEN, Inode
from cachefs.system.stat import Stat

RECENT_FILES = 64

RequestAt = Callable[[int], tuple[int, int]]
"""(inode, uid) of a request that the fast path passed on, by its handle."""


def no_request(_: int) -> tuple[int, int]:
    """There is no fast path."""
    return 0, UNKNOWN


class OpenFiles:
    def __init__(
        self,
        filesystem: FileSystem,
        descriptors: Descriptors,
        shared: SharedFiles,
        fetcher: Fetcher,
        data: DataCache,
        metrics: Metrics,
        young: YoungFiles,
        *,
        unseen_handles: bool = False,
        request_at: RequestAt = no_request,
    ) -> None:
        """`unseen_handles`: a fast path answers OPEN, so that any file may be open without our knowing (hazard 2)."""
        # dependencies
        self._request_at = request_at
        self._fs = filesystem
        self._metadata = filesystem.metadata
        self._immutability = filesystem.immutability
        self._options = filesystem.options
        self._source = filesystem.source
        self._descriptors = descriptors
        self._shared = shared
        self._fetcher = fetcher
        self._data = data
        self._metrics = metrics
        self._young = young
        # constants
        self._unseen_handles = unseen_handles
        # state
        self._recent: OrderedDict[int, OpenFile] = OrderedDict()
        """Inode → what reads without a handle of ours share, for a while."""

    def owner_of(self, handle: int) -> int:
        """The user who opened it, or reads by it now; UNKNOWN where Python cannot see that."""
        if handle & FAST_HANDLE:
            return self._request_at(handle)[1]
        opened = self._descriptors.handles.get(handle)
        return UNKNOWN if opened is None else opened.owner

    # --- opening ---------------------------------------------------------------------------------------------------

    async def open_for_reading(self, number: int, caller: Caller, *, executes: bool = False) -> tuple[int, bool]:
        """A handle, and whether the kernel may keep the pages it has. Makes the file immutable, unless it may not."""
        fetch_at_once = self._options.cache is CacheLevel.FULL and not self._unseen_handles
        with self._metadata.index.view() as view:
            inode = self._metadata.inode(view, number)
            if inode is None:
                raise failed(errno.ESTALE)
            if self._immutability.is_immutable(inode) and self._metadata.remaining_ns(inode):
                # The usual case, and the critical path of a first epoch: the fetch begins before anything else.
                file = self._shared.share(inode)
                if fetch_at_once:
                    self._fetcher.begin(view, file)
                return self._descriptors.add(Handle(number, file=file)), not self._young.is_young(inode)
        if self._metadata.is_pinned(inode):
            inode = await self._fs.revalidated(number, inode)
        if self._immutability.outlives_its_name(inode):
            # By /proc/PID/fd/N: as the handle that is open already (`OwnChanges.hold_data`).
            file = self._shared.share(inode)
            return self._descriptors.add(Handle(number, file=file)), not self._young.is_young(inode)
        if not self._immutability.may_be_immutable(inode):
            generation = self._source.generation
            fd = await self._open_mutable(number, caller, executes=executes)
            return self._descriptors.add(Handle(number, fd=fd, generation=generation)), False
        immutable = self._immutability.is_immutable(inode)
        file = self._shared.share(inode) if immutable else await self._pin(inode)
        if fetch_at_once:
            with self._metadata.index.view() as view:
                self._fetcher.begin(view, file)
        if not immutable:
            await self._compare_above(number)
        return self._descriptors.add(Handle(number, file=file)), not self._young.is_young(file.inode)

    async def make_immutable(self, number: int) -> bool:
        """A file is about to be read without a handle of ours: make it immutable unless a writer came first. Is it?

        Nothing is awaited before it is decided where the record counts: an open for writing may be next in line.
        """
        inode = self._fs.inode(number)
        if not self._metadata.remaining_ns(inode):
            inode = await self._fs.revalidated(number, inode)
        if self._immutability.is_immutable(inode):
            return True
        if not self._immutability.may_be_immutable(inode):
            return False  # its reads are passed on, and read from the source
        with self._metadata.index.update() as update:
            self._metadata.pin_file(update, inode)
        await self._compare_above(number)
        return True

    def is_young(self, number: int) -> bool:
        """The kernel is not to keep pages of it from one open to the next."""
        return self._young.is_young(self._fs.inode(number))

    def fetched_unseen(self, fetched: Iterable[tuple[int, int]]) -> None:
        """The fast path fetched data of these files: (inode, version). It did so because it had answered an OPEN.

        The report of that OPEN may still be on its way to us. The file becomes immutable here and now, because data of
        a file that is not pinned are not cached. A record that has expired still counts: the fast path has compared the
        source with it. An open for writing that came first has withdrawn IMMUTABLE_ON_OPEN.
        """
        if self._options.read_only:  # nothing is IMMUTABLE_ON_OPEN there
            return
        with self._metadata.index.view() as view:
            found = [(self._metadata.inode(view, number), version) for number, version in fetched]
        immutable_on_open = {
            inode.number: inode
            for inode, version in found
            if inode is not None and inode.version == version and self._immutability.is_immutable_on_open(inode)
        }
        if not immutable_on_open:
            return
        with self._metadata.index.update() as update:
            for inode in immutable_on_open.values():
                links = links_of(update, inode.number)
                self._metadata.pin_file(update, inode, seen_by=links[0] if links else None)

    async def _compare_above(self, number: int) -> None:
        """A file has become immutable. Directories above it that had expired are compared now, not in epoch two."""
        for number_above in self._fs.above(number):
            with suppress(OSError):  # its name leads elsewhere by now
                await self._fs.revalidated(number_above)

    async def pin(self, number: int) -> bool:
        """Make a file immutable even if it was written here. Is it now?"""
        inode = self._fs.inode(number)
        if inode.flags & WRITTEN and not self._immutability.has_writers(number):
            with self._metadata.index.update() as update:
                self._metadata.put_inode(update, inode._replace(flags=inode.flags & ~WRITTEN, expires_ns=0))
            await self._fs.revalidated(number)
        return await self.make_immutable(number)

    async def _open_mutable(self, number: int, caller: Caller, *, executes: bool) -> int:
        """An open of such a file is told the size that it has now, not the one that the kernel still believes.

        The same with permissions: the source is asked as the caller. It cannot be asked whether a file may be
        executed, so that one with other permissions than the kernel knows is not opened for that.
        """
        inode = self._fs.inode(number)
        call = partial(self._source.open_file, run=as_myself if executes else caller.run)
        try:
            fd, now = await self._descriptors.ask_object(number, call, discard=close_opened)
        except PermissionError:
            self._fs.notifier.attributes(number)
            raise
        try:
            await self._fs.learnt(number, now)
            if not self._immutability.has_writers(number) and self._metadata.saw(number, now):
                self._fs.notifier.attributes(number)
            if executes and inode.permissions != now.permissions:
                raise failed(errno.ESTALE)
        except BaseException:
            close_quietly(fd)
            raise
        return fd

    async def _pin(self, inode: Inode) -> OpenFile:
        """First read-only open on a read-write mount: pin what the source says now, not what it said a second ago.

        Where the two differ the kernel's attributes are old as well: ESTALE makes it look the name up and open again.
        """
        number = inode.number
        if self._unseen_handles and self._metadata.remaining_ns(inode):
            # The fast path compares what it fetches; a record that still counts is as good as another look.
            with self._metadata.index.update() as update:
                return self._shared.share(self._metadata.pin_file(update, inode))
        generation = self._source.generation
        at = self._fs.object_of(number)
        call = partial(self._source.open_file, at)
        fd, now = await self._fs.ask(number, call, discard=close_opened)
        try:
            with self._metadata.index.update() as update:
                current = self._metadata.inode(update, number)
                if current is None or not current.same_version(now) or self._immutability.is_written(current):
                    raise failed(errno.ESTALE)
                if not self._immutability.is_immutable(current):
                    seen_by = at.directory.number, at.name
                    current = self._metadata.pin_file(update, current, seen_by=seen_by)
        except BaseException:
            close_quietly(fd)
            raise
        file = self._shared.share(current)
        if file.fd is None:
            file.set_fd(fd, generation)
        else:
            close_quietly(fd)
        return file

    # --- reading ---------------------------------------------------------------------------------------------------

    async def read(self, handle: int, offset: int, size: int) -> bytes | memoryview:
        if handle & FAST_HANDLE:
            return await self._read_inode(self._request_at(handle)[0], offset, size)
        opened = self._descriptors.handle(handle)
        if opened.file is not None and opened.is_cached:
            return await self._fetcher.read(opened.file, offset, size)
        with self._uncached_read(opened.number):
            data = await self._descriptors.use(opened, lambda fd: self._source.pread(fd, size, offset))
        self._metrics.misses += 1
        self._metrics.miss_bytes += len(data)
        return data

    @contextmanager
    def _uncached_read(self, number: int) -> Iterator[None]:
        """A read of a file that is not immutable. Its kernel pages outlive it as long as the file's times stay."""
        with self._metadata.index.view() as view:
            inode = self._metadata.inode(view, number)
        young = inode is not None and self._young.is_young(inode)
        yield
        if inode is not None and young:
            self._young.was_read(inode)

    async def _read_inode(self, number: int, offset: int, size: int) -> bytes | memoryview:
        """A read of a file that the fast path opened, and passed on because it is not in the cache."""
        held = self._shared.held(number)
        if held is not None and not held.is_mutable:
            return await self._fetcher.read(held, offset, size)
        inode = await self._fs.revalidated(number)
        immutable = self._immutability.is_immutable(inode)
        if not immutable and self._immutability.is_immutable_on_open(inode):  # its OPEN may wait behind us
            with self._metadata.index.update() as update:
                inode = self._metadata.pin_file(update, inode)
            immutable = self._immutability.is_immutable(inode)
        if not immutable:
            with self._uncached_read(number):
                data = await self._descriptors.ask_object(number, lambda at: self._source.read_file(at, size, offset))
            self._metrics.misses += 1
            self._metrics.miss_bytes += len(data)
            return data
        file = self._recent.pop(number, None)
        if file is None or file.inode.version != inode.version:
            if file is not None:
                await self._shared.let_go(file)
            file = self._shared.share(inode)
        self._recent[number] = file
        file.handles += 1
        try:
            while len(self._recent) > RECENT_FILES:
                await self._shared.let_go(self._recent.popitem(last=False)[1])
            return await self._fetcher.read(file, offset, size)
        except Changed as error:
            # No OPEN is sent that could be refused: the next open must not find the old inode by the old name.
            await self._fs.invalidation.forget_names(error.directory or number)
            raise
        finally:
            await self._shared.let_go(file)

    async def fetch_ahead(self, number: int, offset: int) -> None:
        """Cache a unit of a file before it is read, if the file is immutable."""
        with self._metadata.index.view() as view:
            inode = self._metadata.inode(view, number)
        if inode is None or not self._immutability.is_immutable(inode) or not self._metadata.remaining_ns(inode):
            return
        file = self._shared.share(inode)
        try:
            await self._fetcher.fetch_ahead(file, self._data.unit_of(inode, offset))
        finally:
            await self._shared.let_go(file)

    async def flush(self, handle: int) -> None:
        """close() of a descriptor. NFS and Ceph report write errors here, so a dup of ours is closed (hazard 4)."""
        opened = self._descriptors.handle(handle)
        if opened.writable:
            self._source.counters.add("close")
            await self._descriptors.use(opened, lambda fd: os.close(os.dup(fd)), tells=True)
            self._fs.expire(opened.number)

    async def release(self, handle: int) -> None:
        opened = self._descriptors.remove(handle)
        if opened is None:
            return
        if opened.writable and self._immutability.remove_writer(opened.number):
            self._fs.expire(opened.number)
        if opened.file is not None:
            await self._shared.let_go(opened.file)
        await self._descriptors.close(opened)

    async def forget(self, forgotten: Sequence[tuple[int, int]]) -> None:
        """The kernel forgot inodes: (number, count).

        Look-ups of a pinned one are not counted, so that the kernel may still know one that has no name any more. So it
        is asked; if it does not, no process can have the file open, and its data are of no use.
        """
        with self._metadata.index.update() as update:
            for number, count in forgotten:
                if self._metadata.forget(update, number, count):
                    inode_values.drop(update, number)
        for number in dict.fromkeys(number for number, _ in forgotten):
            with self._metadata.index.view() as view:
                inode = self._metadata.inode(view, number)
                if inode is not None and (not inode.flags & UNLINKED or self._fs.notifier.attributes(number)):
                    continue
                if inode is not None:
                    self._data.drop(view, number)
            await self._shared.release(number)

    async def close(self) -> None:
        """Close every descriptor that is still open."""
        for handle in list(self._descriptors.handles):
            await self.release(handle)
        for file in self._recent.values():
            await self._shared.let_go(file)
        await self._shared.close()


def close_opened(opened: tuple[int, Stat]) -> None:
    close_quietly(opened[0])

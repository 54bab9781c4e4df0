"""Opens and reads: handles of files, and what they read.

A handle is either of an immutable file, and served from the cache, or a descriptor of the source (descriptors.py).
`immutability.py` decides which. All handles of one version of an immutable file share an `OpenFile`
(cachefs/data/shared_files.py). The fast path answers OPENs itself, and reports them later. When it passes on a READ of
such a file, the daemon has no handle of it.
"""

import errno
import os
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from cachefs.contract.messages import FAST_HANDLE
from cachefs.data.data_cache import DataCache
from cachefs.data.fetcher import OpenFile, close_quietly
from cachefs.data.handle import Handle
from cachefs.data.young_files import YoungFiles
from cachefs.errors import failed
from cachefs.fs.descriptors import Descriptors
from cachefs.fs.names import FileSystem
from cachefs.metadata import inode_values, written_files
from cachefs.metadata.inode_cache import mutable_flags
from cachefs.options import CacheLevel
from cachefs.source.credentials import Caller, as_admitted
from cachefs.source.directories import ROOT, Directory
from cachefs.source.identity import Changed
from cachefs.source.shares import UNKNOWN
from cachefs.stats.metrics import Metrics
from cachefs.store.index.records import READ_MUTABLE, UNLINKED, WRITTEN, Inode
from cachefs.system.stat import Stat

RECENT_FILES = 64
"""How many files stay open after the last READ that had no handle of the daemon."""

RequestAt = Callable[[int], tuple[int, int, Caller | None]]
"""Handle → (inode, uid, caller) of a request that the fast path has passed on."""


def no_request(_: int) -> tuple[int, int, Caller | None]:
    """A `RequestAt` where there is no fast path."""
    return 0, UNKNOWN, None


@dataclass(eq=False)
class OpenFiles:
    # dependencies
    fs: FileSystem
    descriptors: Descriptors
    data: DataCache
    metrics: Metrics
    young: YoungFiles
    request_at: RequestAt

    def __post_init__(self) -> None:
        self._metadata = self.fs.metadata
        self._immutability = self.fs.immutability
        self._shared = self.descriptors.shared
        self._fetcher = self.descriptors.fetcher
        # state
        self._recent: OrderedDict[int, OpenFile] = OrderedDict()
        """Inode → the file that READs without a handle of the daemon share, for a while."""

    def owner_of(self, handle: int) -> tuple[int, Caller | None]:
        """Who opened a handle, or reads by it now: user and process. (UNKNOWN, None) where the daemon cannot know."""
        if handle & FAST_HANDLE:
            return self.request_at(handle)[1:]
        opened = self.descriptors.handles.get(handle)
        return (UNKNOWN, None) if opened is None else (opened.owner, opened.caller)

    # --- opening ---------------------------------------------------------------------------------------------------

    async def open_for_reading(self, number: int, caller: Caller, *, executes: bool = False) -> tuple[int, bool]:
        """A handle, and whether the kernel may keep the pages it has. Makes the file immutable if possible."""
        await self.fs.repetitions.require_mode(number, caller)
        fetch_at_once = self.fs.options.cache is CacheLevel.FULL and not self.descriptors.has_fastpath
        with self._metadata.index.view() as view:
            inode = self._metadata.inode(view, number)
            if inode is None:
                raise failed(errno.ESTALE)
            if self._immutability.is_immutable(inode) and self._metadata.remaining_ns(inode):
                # The usual case, and the critical path of a first epoch: begin the fetch before anything else.
                file = self._shared.share(inode)
                if fetch_at_once:
                    self._fetcher.begin(view, file)
                return self._add(file)
        if self._metadata.is_pinned(inode):
            inode = await self.fs.revalidated(number, inode)
            await self.fs.repetitions.require_mode(number, caller)
        if self._immutability.outlives_its_name(inode):
            # By /proc/PID/fd/N: reads as the handle that is open already (`Descriptors.keep_readable`).
            return self._add(self._shared.share(inode))
        if not self._immutability.may_be_immutable(inode):
            generation = self.fs.source.generation
            fd = await self._open_mutable(number, caller, executes=executes)
            return self.descriptors.add(Handle(number, fd=fd, generation=generation)), False
        immutable = self._immutability.is_immutable(inode)
        file = self._shared.share(inode) if immutable else await self._pin(inode, caller)
        if fetch_at_once:
            with self._metadata.index.view() as view:
                self._fetcher.begin(view, file)
        if not immutable:
            await self._compare_above(number)
        handle, keeps_pages = self._add(file)
        return handle, keeps_pages and immutable  # before, they may have been another version's

    def _add(self, file: OpenFile) -> tuple[int, bool]:
        """A handle of an immutable file, and whether the kernel may keep its pages."""
        return self.descriptors.add(Handle(file.inode.number, file=file)), not file.inode.is_young

    async def make_immutable(self, number: int) -> bool:
        """Make a file immutable that is about to be read without a handle of the daemon. Returns whether it is.

        It is not if a writer came first. While the record is valid nothing is awaited before the decision, because the
        next request may be an open for writing.
        """
        inode = self.fs.inode(number)
        if not self._metadata.remaining_ns(inode):
            inode = await self.fs.revalidated(number, inode)
        if self._immutability.is_immutable(inode):
            return True
        if not self._immutability.may_be_immutable(inode):
            return False  # the fast path passes on its READs, which read from the source
        with self._metadata.index.update() as update:
            self._metadata.pin_file(update, inode)
        await self._compare_above(number)
        return True

    async def opened_unseen(self, number: int, flags: int) -> None:
        """The fast path has answered an OPEN of a file that was IMMUTABLE_ON_OPEN. `flags`: of its report."""
        if not self._immutability.opened_unseen(number, flags):
            self.fs.invalidation.replaced(number)
        await self._compare_above(number)

    async def _compare_above(self, number: int) -> None:
        """A file has become immutable: compare expired directories above it now, rather than in the second epoch."""
        for number_above in self.fs.above(number):
            with suppress(OSError):  # its name leads elsewhere by now
                await self.fs.revalidated(number_above)

    async def pin(self, number: int) -> bool:
        """Make a file immutable even if it was written by this mount. Returns whether it is."""
        inode = self.fs.inode(number)
        if inode.flags & WRITTEN and not self._immutability.has_writers(number):
            with self._metadata.index.update() as update:
                self._metadata.put_inode(update, inode._replace(flags=mutable_flags(inode) & ~WRITTEN, expires_ns=0))
                written_files.unmark(update, inode)
            await self.fs.revalidated(number)
        if not await self.make_immutable(number):
            return False
        with self._metadata.index.update() as update:
            written_files.keep(update, self.fs.inode(number))
        return True

    async def _open_mutable(self, number: int, caller: Caller, *, executes: bool) -> int:
        """A descriptor of a mutable file. The open must see the present size, even if the kernel caches an older one.

        The same is true of permissions: the source is asked as the caller. It cannot be asked whether the caller may
        execute a file; so an open to execute fails if the kernel does not know the present permissions.
        """
        inode = self.fs.inode(number)
        is_repeated = self.fs.repetitions.is_reopened(number, caller)
        call = partial(self.fs.source.open_mutable, run=as_admitted if executes else caller.run)
        try:
            fd, now = await self.descriptors.ask_object(number, call, discard=close_opened)
        except PermissionError:
            self.fs.notifier.attributes(number)
            raise
        with closed_on_error(fd):
            await self.fs.learnt(number, now)
            if not self._immutability.has_writers(number):
                may_be_former = self._metadata.may_have_former_size(number)
                if self._metadata.apply_fstat(number, now):
                    self.fs.notifier.attributes(number)
                    may_be_former = may_be_former or inode.size != now.size
                # sendfile and splice ask for no other size than the kernel has (hazard 64). ESTALE makes it look up the
                # name and open again; not twice, because the file may grow all the time.
                if may_be_former and not is_repeated(now.size):
                    raise failed(errno.ESTALE)
            if executes and inode.permissions != now.permissions:
                raise failed(errno.ESTALE)
        return fd

    async def _pin(self, inode: Inode, caller: Caller) -> OpenFile:
        """First read-only open on a read-write mount: pin the file as it is now, not as it was a second ago.

        If the two differ, the kernel's attributes are outdated as well: ESTALE makes it look up the name and open
        again.
        """
        number = inode.number
        if self.descriptors.has_fastpath and self._metadata.remaining_ns(inode):
            # The fast path compares what it fetches: a valid record needs no other look.
            with self._metadata.index.update() as update:
                return self._shared.share(self._metadata.pin_file(update, inode))
        generation = self.fs.source.generation
        call = self.fs.source.open_file
        (fd, now), at = await self.descriptors.ask_by_name(
            number, lambda at: (call(at), at), discard=lambda made: close_opened(made[0])
        )
        with closed_on_error(fd):
            await self.fs.repetitions.require_mode(number, caller)
            with self._metadata.index.update() as update:
                current = self._metadata.inode(update, number)
                if current is None or not current.same_version(now) or self._immutability.is_written(current):
                    raise failed(errno.ESTALE)
                if not self._immutability.is_immutable(current):
                    current = self._metadata.pin_file(update, current, seen_by=(at.directory.number, at.name))
        file = self._shared.share(current)
        if file.fd is None:
            file.set_fd(fd, generation)
        else:
            close_quietly(fd)
        return file

    # --- reading ---------------------------------------------------------------------------------------------------

    async def read(self, handle: int, offset: int, size: int) -> bytes | memoryview:
        if handle & FAST_HANDLE:
            return await self._read_inode(self.request_at(handle)[0], offset, size)
        opened = self.descriptors.handle(handle)
        while True:
            if opened.is_cached:
                assert opened.file is not None
                cached = await self._read_immutable(opened.file, offset, size)
                if cached is not None:
                    return cached
            inode = self._metadata.current(opened.number)
            if self._shows_pinned_version(opened, inode):
                await self._share(opened)
                continue
            directory = self._directory_in_snapshot(opened.number, inode)
            read = partial(self.fs.source.read_open, length=size, offset=offset, inode=inode, directory=directory)
            data = await self._read_uncached(opened.number, inode, partial(self.descriptors.use, opened, read))
            if not self._shows_pinned_version(opened, self._metadata.current(opened.number)):
                return data

    def _directory_in_snapshot(self, number: int, inode: Inode | None) -> Directory:
        """The directory of a file in a snapshot. ROOT: it is not known, or in none."""
        if inode is None or not self.fs.source.is_in_snapshot(inode.device):
            return ROOT
        try:
            return self.fs.object_of(number).directory
        except OSError:  # no name leads to it
            return ROOT

    async def _read_immutable(self, file: OpenFile, offset: int, size: int) -> bytes | memoryview | None:
        """None: it is mutable by now. What it was before would stay in the kernel, over what is written to it."""
        try:
            data = await self._fetcher.read(file, offset, size)
        except Changed:
            if not file.is_mutable:
                raise
        return None if file.is_mutable else data

    def _shows_pinned_version(self, opened: Handle, inode: Inode | None) -> bool:
        """Has a file become immutable since it was opened? Then all its handles, which share the pages in the kernel,
        read the same version (hazard 80)."""
        return not opened.writable and inode is not None and self._immutability.keeps_version(inode)

    async def _share(self, opened: Handle) -> None:
        """Let a handle read what all handles of the same immutable file read; without a name by its own descriptor."""
        now = None
        with suppress(OSError):
            now = await self.descriptors.use(opened, self.fs.source.fstat)
        inode = self._metadata.current(opened.number)
        if opened.is_cached or inode is None or not self._shows_pinned_version(opened, inode):
            return
        if opened.released:
            raise failed(errno.EBADF)
        before, opened.file = opened.file, self._shared.share(inode)
        fd = opened.file.fd
        if fd is None and now is not None and inode.same_version(now) and opened.is_open(self.fs.source.generation):
            opened.file.set_fd(os.dup(opened.fd), opened.generation)
        if before is not None:
            await self._shared.let_go(before)

    async def _read_uncached(self, number: int, inode: Inode | None, read: Callable[[], Awaitable[bytes]]) -> bytes:
        """A read of a mutable file. The kernel keeps the pages as long as the times of the file stay the same."""
        data = await self._metadata.changes.read(number, read)
        if inode is not None and inode.is_young:
            self.young.was_read(inode)
        if inode is not None and not inode.flags & READ_MUTABLE:
            self._metadata.note_mutable_pages(inode.number)
        self.metrics.misses += 1
        self.metrics.miss_bytes += len(data)
        return data

    async def _read_inode(self, number: int, offset: int, size: int) -> bytes | memoryview:
        """A READ that the fast path has passed on, of a file that it has opened."""
        nameless = self._shared.held(number)
        if nameless is not None and not nameless.is_mutable:
            data = await self._read_immutable(nameless, offset, size)
            if data is not None:
                return data
        inode = await self.fs.revalidated(number)
        rules = self._immutability
        immutable = rules.is_immutable(inode) or rules.outlives_its_name(inode)
        # The report of the OPEN may come later, or the file was dropped since.
        if not immutable and (rules.is_immutable_on_open(inode) or rules.may_have_readers(inode)):
            with self._metadata.index.update() as update:
                inode = self._metadata.pin_file(update, inode)
            immutable = rules.is_immutable(inode)
        if not immutable:
            read = partial(self.fs.source.read_file, length=size, offset=offset, inode=inode)
            return await self._read_uncached(number, inode, partial(self.descriptors.ask_object, number, read))
        file = self._recent.pop(number, None)
        if file is None or file.inode.version != inode.version or file.is_mutable:
            if file is not None:
                await self._shared.let_go(file)
            file = self._shared.share(inode)
        self._recent[number] = file
        file.handles += 1
        try:
            while len(self._recent) > RECENT_FILES:
                await self._shared.let_go(self._recent.popitem(last=False)[1])
            data = await self._read_immutable(file, offset, size)
            if data is not None:
                return data
        except Changed as error:
            # The kernel sends no OPEN that could fail: the next open must not find the old inode by the old name.
            await self.fs.invalidation.forget_names(error.directory or number)
            raise
        finally:
            await self._shared.let_go(file)
        return await self._read_inode(number, offset, size)

    async def let_go(self) -> None:
        """Close what no reader uses and what keeps another filesystem beneath the source from being unmounted."""
        for number in [number for number, file in self._recent.items() if file.inode.device]:
            file = self._recent.get(number)
            if file is not None and file.handles == 1:
                del self._recent[number]
                await self._shared.let_go(file)

    async def fetch_ahead(self, number: int, offset: int) -> None:
        """Cache a unit of a file before it is read, if the file is immutable."""
        inode = self._metadata.current(number)
        if inode is None or not self._immutability.is_immutable(inode) or not self._metadata.remaining_ns(inode):
            return
        file = self._shared.share(inode)
        try:
            await self._fetcher.fetch_ahead(file, self.data.unit_of(inode, offset))
        finally:
            await self._shared.let_go(file)

    async def flush(self, handle: int) -> None:
        """close() of a descriptor. NFS and Ceph report write errors then, so a dup is closed (hazard 4).

        The loss of writes stays to be reported by the next write or fsync: this may be the close of a forked child,
        which ignores errors.
        """
        opened = self.descriptors.handle(handle)
        if opened.writable:
            self.fs.source.counters.add("close")
            await self.descriptors.use(opened, lambda fd: os.close(os.dup(fd)))
            self.fs.expire(opened.number)
            if opened.has_lost(self.fs.source.generation):
                raise failed(errno.EIO)

    async def release(self, handle: int) -> None:
        opened = self.descriptors.remove(handle)
        if opened is None:
            return
        if opened.writable and self._immutability.remove_writer(opened.number):
            self.fs.expire(opened.number)
        if opened.file is not None:
            await self._shared.let_go(opened.file)
        await self.descriptors.close(opened)

    async def forget(self, forgotten: Sequence[tuple[int, int]]) -> None:
        """The kernel has forgotten inodes: (number, count).

        Look-ups of pinned inodes are not counted. So the kernel may still know an inode that has lost its name; it is
        asked. If it does not know the inode, no process has the file open, and its data are useless.
        """
        forgotten = [*((number, 0) for number in self._metadata.forgotten.take()), *forgotten]
        with self._metadata.index.update() as update:
            for number, count in forgotten:
                if self._metadata.forget(update, number, count):
                    inode_values.drop(update, number)
        for number in dict.fromkeys(number for number, _ in forgotten):
            with self._metadata.index.view() as view:
                inode = self._metadata.inode(view, number)
                if inode is not None and (not inode.flags & UNLINKED or self.fs.notifier.attributes(number)):
                    continue
                if inode is not None:
                    self.data.drop(view, number)
            await self._shared.release(number)
            self.fs.invalidation.made_mutable.discard(number)

    async def close(self) -> None:
        """Close every descriptor that is still open."""
        for handle in list(self.descriptors.handles):
            await self.release(handle)
        while self._recent:  # `let_go` may run meanwhile
            await self._shared.let_go(self._recent.popitem()[1])
        await self._shared.close()


def close_opened(opened: tuple[int, Stat] | tuple[int, Stat, Stat]) -> None:
    close_quietly(opened[0])


@contextmanager
def closed_on_error(fd: int) -> Iterator[None]:
    try:
        yield
    except BaseException:
        close_quietly(fd)
        raise

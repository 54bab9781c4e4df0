"""Open files: when a file becomes immutable, and what its handles read.

A handle is either of an immutable file, and served from the cache, or a descriptor of the source. All handles of one
version of an immutable file share an `OpenFile`. What this mount itself does to a name moves the change time; open
files go on with the new one (`own_change`).
"""

import errno
import logging
import os
import resource
import struct
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import trio
from outcome import Outcome

from cachefs import shares, values
from cachefs.attributes import FREEZABLE, IMMUTABLE, STALE, UNLINKED, WRITTEN, Inode, Stat, inode_key, inode_of_key
from cachefs.caller import Caller, Identity
from cachefs.data_cache import DataCache
from cachefs.environment import Table
from cachefs.fetch import Fetcher, OpenFile, close_quietly
from cachefs.filesystem import Entry, FileSystem, Use, failed
from cachefs.hand_over import OpenSource
from cachefs.identity import Changed
from cachefs.metrics import Metrics
from cachefs.options import CacheLevel
from cachefs.paths import links_of
from cachefs.shares import UNKNOWN, Shares
from cachefs.single_flight import SingleFlight
from cachefs.source import as_myself
from cachefs.young_files import YoungFiles

T = TypeVar("T")

FAST_HANDLE = 1 << 63
"""In a handle: the fast path gave it out, or nobody did (hazard 2). The rest is the inode. In a request that was passed
on: where that lies (`Shared.request_at`)."""
RECENT_FILES = 64
RESERVED_DESCRIPTORS = 1536
"""Of the process: for calls to the source, directories, the index and connections. A quarter where there are few."""
_HANDLE = b"handle:"
# Value flags, open(2) flags and those below, inode, owner. The writer's identity follows.
_SAVED = struct.Struct("<2IQq")
_SAVED_BEFORE = struct.Struct("<2IQ")  # of a daemon that knew no owners
_UNSYNCED, _DAMAGED = 1 << 31, 1 << 30

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Handle:
    """An open file: either an immutable one, served from the cache, or a descriptor of the source."""

    number: int
    """Of the inode."""
    file: OpenFile | None = None
    fd: int = -1
    """-1: it is still to be opened by this daemon. Asked for by `OpenFiles.use`."""
    writable: bool = False
    flags: int = os.O_RDONLY
    """O_RDONLY, O_WRONLY or O_RDWR: how to open it again."""
    writer: Identity | None = None
    """Who opened it for writing, and makes its writes. None: not known."""
    handle: int = 0
    """What the kernel knows it by."""
    borrowers: int = 0
    """Who uses `fd` besides requests on this very handle."""
    released: bool = False
    """Closed by its owner; the last borrower closes `fd`."""
    owner: int = field(default_factory=shares.owner)
    """Whose place among the descriptors it takes (shares.py)."""
    generation: int = 0
    """Of the source that `fd` was opened in."""
    writes: int = 0
    unsynced: bool = False
    """Something was written and not synced: it may be lost with the source."""
    damaged: bool = False
    """It may have been lost; the next write, fsync or close says so."""
    stale: list[int] = field(default_factory=list)
    """Descriptors of a source that has gone: calls may still use them."""

    @property
    def is_cached(self) -> bool:
        """Served from the cache, not by `fd`."""
        return self.file is not None and not self.file.is_mutable

    def close(self) -> None:
        """In a thread."""
        close_all([fd for fd in (self.fd, *self.stale) if fd >= 0])


class OpenFiles:
    def __init__(
        self,
        filesystem: FileSystem,
        data: DataCache,
        metrics: Metrics,
        young: YoungFiles,
        *,
        unseen_handles: bool = False,
        first_handle: int = 1,
    ) -> None:
        """`unseen_handles`: a fast path answers OPEN, so that any file may be open without our knowing (hazard 2).

        It outlives us, so that our handles are written down for whoever takes the mount over.
        """
        # dependencies
        self._fs = filesystem
        self._metadata = filesystem.metadata
        self._options = filesystem.options
        self._source = filesystem.source
        self._slots = filesystem.slots
        self._metrics = metrics
        self._young = young
        self._fetcher = Fetcher(
            filesystem.source,
            filesystem.slots,
            data,
            metrics,
            object_of=filesystem.object_of,
            changed=filesystem.changed_behind_our_back,
            own_change=lambda number: self._own_changes.get(number),
            young=young,
            reads_ahead=filesystem.options.prefetch != "none",
        )
        self._data = data
        filesystem.descriptor = self.descriptor
        filesystem.own_change = lambda number: self._own_changes.get(number)
        # constants
        self._unseen_handles = unseen_handles
        # state
        self.handles: dict[int, Handle] = {}
        self._next_handle = first_handle  # below FAST_HANDLE
        self._files: dict[tuple[int, int], OpenFile] = {}
        self._own_changes: dict[int, trio.Event] = {}
        self._recent: OrderedDict[int, OpenFile] = OrderedDict()
        """Inode → what reads without a handle of ours share, for a while."""
        self._held: dict[int, OpenFile] = {}
        """Inode → a file that lost its name and may be open: until the kernel forgets it."""
        self.writers = filesystem.writers
        self.request_at: Callable[[int], tuple[int, int]] = lambda _: (0, UNKNOWN)
        """(inode, uid) of a request that the fast path passed on, by its handle."""
        self._reopens: SingleFlight[int, None] = SingleFlight()
        """By the identity of the handle."""
        self._descriptors = _shares_of_handles()
        """By owner: handles, those that are being opened included. Each may need a descriptor."""

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Around what makes one handle. EMFILE where its owner has too many; what fails gives its place back."""
        owner = shares.owner()
        if self._descriptors.is_full(owner):
            raise failed(errno.EMFILE)
        self._descriptors.take(owner)
        try:
            yield
        except BaseException:
            self._descriptors.give(owner)
            raise

    def owner_of(self, handle: int) -> int:
        """Who opened it, or reads by it now; UNKNOWN where Python cannot see that."""
        if handle & FAST_HANDLE:
            return self.request_at(handle)[1]
        opened = self.handles.get(handle)
        return UNKNOWN if opened is None else opened.owner

    async def getattr(self, number: int) -> Entry:
        async with self.descriptor(number, bool(self._fs.record(number).flags & UNLINKED)) as use:
            if use is not None:
                return await self._getattr_open(number, use)
        try:
            return await self._fs.getattr(number)
        except OSError as error:
            async with self.descriptor(number, True) as use:
                if error.errno != errno.ESTALE or use is None:
                    raise
                return await self._getattr_open(number, use)

    async def _getattr_open(self, number: int, use: Use) -> Entry:
        """The name may be gone, or lead to another file by now; the descriptor cannot."""
        now = await use(self._source.fstat)
        record = self._fs.record(number).with_stat(now)
        with self._metadata.index.update() as update:
            self._metadata.put_inode(update, record)
        return Entry(record, 0.0 if record.flags & UNLINKED else min(1.0, self._options.unpinned_timeout_s))

    # --- descriptors of the source ---------------------------------------------------------------------------------

    async def use(self, opened: Handle, function: Callable[[int], T], *, tells: bool = False) -> T:
        """Call `function` in a thread with a descriptor of the handle, again if the source is mounted anew meanwhile.

        `tells`: the caller must hear of writes that may be lost. EIO, once, as fsync(2) does it.
        """
        while True:
            fd = await self._descriptor(opened)
            if tells and opened.damaged:
                opened.damaged = False
                self._save(opened)
                raise failed(errno.EIO)
            generation = opened.generation
            try:
                return await self._slots.run(partial(function, fd), once=True)
            except OSError as error:
                if not await self._fetcher.is_anew(error, generation):
                    raise

    async def _descriptor(self, opened: Handle) -> int:
        if opened.generation != self._source.generation and opened.unsynced:
            opened.unsynced, opened.damaged = False, True
            self._save(opened)
        if opened.fd < 0 or opened.generation != self._source.generation:
            await self._reopen(opened)
        return opened.fd

    async def _reopen(self, opened: Handle) -> None:
        """Open again what another daemon had open, or what was open in a source that has gone."""
        generation = self._source.generation

        def finish(answer: Outcome[int]) -> None:
            fd = answer.unwrap()
            if opened.fd >= 0:
                opened.stale.append(opened.fd)
            opened.fd, opened.generation = fd, generation
            if opened.released and not opened.borrowers:
                self._slots.start(opened.close, lambda _: None, once=True)

        if opened.released:
            raise failed(errno.EBADF)
        call = partial(self._source.open_again, self._fs.object_of(opened.number), opened.flags)
        start = partial(self._slots.start, call, discard=close_quietly)
        await self._reopens.begin(id(opened), start, finish).wait()

    async def write(self, handle: int, function: Callable[[int], T]) -> T:
        """`function` writes to the descriptor that it is given."""
        opened = self.handle(handle)
        if not opened.writable:
            raise failed(errno.EBADF)
        try:
            result = await self.use(opened, function, tells=True)
        finally:
            self._metadata.changes.note(opened.number)
        opened.writes += 1
        if not opened.unsynced:
            opened.unsynced = True
            self._save(opened)
        return result

    async def fsync(self, handle: int, function: Callable[[int], T]) -> None:
        """`function` syncs the descriptor that it is given."""
        opened = self.handle(handle)
        if opened.writable:
            writes = opened.writes
            await self.use(opened, function, tells=True)
            if opened.unsynced and opened.writes == writes:
                opened.unsynced = False
                self._save(opened)

    @asynccontextmanager
    async def descriptor(self, number: int, every: bool) -> AsyncIterator[Use | None]:
        """How to use a descriptor of the source by which a file is open, while the block runs; None if it is not.

        Of a writer, or, if a name is no way to the file (`every`), of a reader or of what it lost its name with.
        """
        opened = None
        if every or self.writers[number]:
            mine = [h for h in self.handles.values() if h.number == number and not h.is_cached]
            mine = [h for h in mine if h.writable or every]
            opened = max(mine, key=lambda h: h.writable, default=None)
        if opened is not None:
            opened.borrowers += 1
            try:
                yield partial(self.use, opened)
            finally:
                opened.borrowers -= 1
                if opened.released and not opened.borrowers:
                    await self._slots.run(opened.close, once=True)
            return
        fd = self._duplicate(number) if every else None
        if fd is None:
            yield None
            return

        async def use(function: Callable[[int], T], /) -> T:
            return await self._slots.run(partial(function, fd), once=True)

        try:
            yield use
        finally:
            await self._slots.run(partial(close_quietly, fd), once=True)

    def _duplicate(self, number: int) -> int | None:
        """A descriptor of an immutable file, where one is kept."""
        for (inode, _), file in self._files.items():
            if inode == number and file.fd is not None and file.generation == self._source.generation:
                return os.dup(file.fd)
        return None

    # --- opening ---------------------------------------------------------------------------------------------------

    async def open_for_reading(self, number: int, caller: Caller, *, executes: bool = False) -> tuple[int, bool]:
        """A handle, and whether the kernel may keep the pages it has. Makes the file immutable, unless it may not."""
        fetch_at_once = self._options.cache is CacheLevel.FULL and not self._unseen_handles
        with self._metadata.index.view() as view:
            record = self._metadata.inode(view, number)
            if record is None:
                raise failed(errno.ESTALE)
            if self._is_immutable(record) and self._metadata.remaining_ns(record):
                # The usual case, and the critical path of a first epoch: the fetch begins before anything else.
                file = self._shared(record)
                if fetch_at_once:
                    self._fetcher.begin(view, file)
                return self._add_handle(Handle(number, file=file)), not self._young.is_young(record)
        if self._metadata.is_pinned(record):
            record = await self._fs.believed(number, record)
        if record.flags & UNLINKED and record.flags & IMMUTABLE:
            # By /proc/PID/fd/N: as the handle that is open already (`hold_data`).
            return self._add_handle(Handle(number, file=self._shared(record))), not self._young.is_young(record)
        if not self._may_be_immutable(record):
            generation = self._source.generation
            fd = await self._open_mutable(number, caller, executes=executes)
            return self._add_handle(Handle(number, fd=fd, generation=generation)), False
        immutable = self._is_immutable(record)
        file = self._shared(record) if immutable else await self._pin(record)
        if fetch_at_once:
            with self._metadata.index.view() as view:
                self._fetcher.begin(view, file)
        if not immutable:
            await self._compare_above(number)
        return self._add_handle(Handle(number, file=file)), not self._young.is_young(file.inode)

    async def opened_unseen(self, number: int) -> bool:
        """A file was opened for reading, or as good as: immutable from now on, unless somebody was faster. Is it?

        Nothing is awaited before it is decided where the record counts: an open for writing may be next in line.
        """
        record = self._fs.record(number)
        if not self._metadata.remaining_ns(record):
            record = await self._fs.believed(number, record)
        if self._is_immutable(record):
            return True
        if not self._may_be_immutable(record):
            return False  # its reads are passed on, and read from the source
        with self._metadata.index.update() as update:
            self._metadata.pin_file(update, record)
        await self._compare_above(number)
        return True

    def is_young(self, number: int) -> bool:
        """The kernel is not to keep pages of it from one open to the next."""
        return self._young.is_young(self._fs.record(number))

    def fetched_unseen(self, fetched: Iterable[tuple[int, int]]) -> None:
        """The fast path fetched data of these files: (inode, version). It did so because it had answered an OPEN.

        The report of that OPEN may still be on its way to us. The file becomes immutable here and now, because data of
        a file that is not pinned are not cached. A record that has expired still counts: the fast path has compared the
        source with it. An open for writing that came first has withdrawn FREEZABLE.
        """
        if self._options.read_only:  # nothing is FREEZABLE there
            return
        with self._metadata.index.view() as view:
            found = [(self._metadata.inode(view, number), version) for number, version in fetched]
        freezable = {
            record.number: record
            for record, version in found
            if record is not None and record.version == version and self._is_freezable(record)
        }
        if not freezable:
            return
        with self._metadata.index.update() as update:
            for record in freezable.values():
                links = links_of(update, record.number)
                self._metadata.pin_file(update, record, seen_by=links[0] if links else None)

    def _is_freezable(self, record: Inode) -> bool:
        """Does a file become immutable because the fast path has opened it for reading?"""
        return record.flags & (FREEZABLE | STALE) == FREEZABLE and self._may_be_immutable(record)

    async def _compare_above(self, number: int) -> None:
        """A file has become immutable. Directories above it that had expired are compared now, not in epoch two."""
        for number_above in self._fs.above(number):
            with suppress(OSError):  # its name leads elsewhere by now
                await self._fs.believed(number_above)

    async def pin(self, number: int) -> bool:
        """Make a file immutable even if it was written here. Is it now?"""
        record = self._fs.record(number)
        if record.flags & WRITTEN and not self.writers[number]:
            with self._metadata.index.update() as update:
                self._metadata.put_inode(update, record._replace(flags=record.flags & ~WRITTEN, expires_ns=0))
            await self._fs.believed(number)
        return await self.opened_unseen(number)

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
        """Is it, or would it be if it were opened for reading now?"""
        if not self._options.pins_files or not record.is_regular or self.writers[record.number]:
            return False
        if record.flags & IMMUTABLE:
            return True
        if record.flags & UNLINKED or not self._metadata.may_pin(record.number):
            return False
        return not self.is_mutable(record)

    def is_mutable(self, record: Inode) -> bool:
        """Is it never to be immutable in this run: open for writing, written here, or named by --mutable?"""
        if record.flags & WRITTEN or self.writers[record.number]:
            return True
        with self._metadata.index.view() as view:
            return self._metadata.mutable_names.any(view, record.number)

    def _shared(self, record: Inode) -> OpenFile:
        file = self._files.get((record.number, record.version))
        if file is None:
            file = self._files[record.number, record.version] = OpenFile(record)
        file.handles += 1
        return file

    async def _open_mutable(self, number: int, caller: Caller, *, executes: bool) -> int:
        """Who opens such a file gets the size that it has now, not the one that the kernel still believes.

        The same with permissions: the source is asked as the caller. It cannot be asked whether a file may be
        executed, so that one with other permissions than the kernel knows is not opened for that.
        """
        record = self._fs.record(number)
        call = partial(self._source.open_file, run=as_myself if executes else caller.run)
        try:
            fd, now = await self._fs.ask_object(number, call, discard=close_opened)
        except PermissionError:
            self._fs.notifier.attributes(number)
            raise
        try:
            await self._fs.learnt(number, now)
            if not self.writers[number] and self._metadata.saw(number, now):
                self._fs.notifier.attributes(number)
            if executes and record.permissions != now.permissions:
                raise failed(errno.ESTALE)
        except BaseException:
            close_quietly(fd)
            raise
        return fd

    async def _pin(self, record: Inode) -> OpenFile:
        """First read-only open on a read-write mount: pin what the source says now, not what it said a second ago.

        Where the two differ the kernel's attributes are old as well: ESTALE makes it look the name up and open again.
        """
        number = record.number
        if self._unseen_handles and self._metadata.remaining_ns(record):
            # The fast path compares what it fetches; a record that still counts is as good as another look.
            with self._metadata.index.update() as update:
                return self._shared(self._metadata.pin_file(update, record))
        generation = self._source.generation
        at = self._fs.object_of(number)
        call = partial(self._source.open_file, at)
        fd, now = await self._fs.ask(number, call, discard=close_opened)
        try:
            with self._metadata.index.update() as update:
                current = self._metadata.inode(update, number)
                if current is None or not current.same_version(now):
                    raise failed(errno.ESTALE)
                if self.writers[number] or current.flags & WRITTEN:  # while we waited
                    raise failed(errno.ESTALE)
                if not self._is_immutable(current):
                    seen_by = at.directory.number, at.name
                    current = self._metadata.pin_file(update, current, seen_by=seen_by)
        except BaseException:
            close_quietly(fd)
            raise
        file = self._shared(current)
        if file.fd is None:
            file.set_fd(fd, generation)
        else:
            close_quietly(fd)
        return file

    def _add_handle(self, handle: Handle) -> int:
        handle.handle = self._next_handle
        self._next_handle += 1
        self.handles[handle.handle] = handle
        self._save(handle)
        return handle.handle

    def _save(self, opened: Handle) -> None:
        """Write a handle down for the next daemon."""
        if self._unseen_handles and not opened.released:
            flags = opened.flags | _UNSYNCED * opened.unsynced | _DAMAGED * opened.damaged
            value = _SAVED.pack(0, flags, opened.number, opened.owner)
            value += opened.writer.pack() if opened.writer else b""
            with self._metadata.index.update() as update:
                update.put(Table.META, _HANDLE + inode_key(opened.handle), value)

    def add_source_handle(self, number: int, fd: int, flags: int, writer: Identity, generation: int) -> int:
        """`flags`: of open(2). `generation`: of the source, before `fd` was opened. Within `opening`."""
        writable = flags & os.O_ACCMODE != os.O_RDONLY
        if writable:
            self.writers[number] += 1
        flags &= os.O_ACCMODE
        opened = Handle(number, fd=fd, writable=writable, flags=flags, writer=writer, generation=generation)
        return self._add_handle(opened)

    def opened_at_source(self) -> Iterator[OpenSource]:
        """For the next daemon: the descriptors by which files are open, but those of a source that has gone."""
        generation = self._source.generation
        for handle, opened in self.handles.items():
            if not opened.is_cached and opened.fd >= 0 and opened.generation == generation:
                yield OpenSource(handle, opened.number, 0, opened.fd)
        for (number, version), file in self._files.items():
            if not file.is_mutable and file.fd is not None and file.generation == generation:
                yield OpenSource(0, number, version, file.fd)

    def restore(self, handed: Iterable[OpenSource] = ()) -> list[Handle]:
        """Take over what a daemon that died had open: the kernel still has those handles.

        `handed`: descriptors that it has sent before (hand_over.py). The source is not asked for anything: see
        `reopen`. What it is to open again.
        """
        files = {each.handle: each for each in handed if each.handle}
        data = [each for each in handed if not each.handle]
        with self._metadata.index.view() as view:
            saved = [(inode_of_key(key[len(_HANDLE) :]), value) for key, value in view.scan(Table.META, _HANDLE)]
        found = []
        for handle, value in saved:
            known = len(value) >= _SAVED.size
            _, flags, number, owner = _SAVED.unpack_from(value) if known else (*_SAVED_BEFORE.unpack(value), UNKNOWN)
            writer = Identity.unpack(value[_SAVED.size :]) if len(value) > _SAVED.size else None
            mode = flags & os.O_ACCMODE
            writable = mode != os.O_RDONLY
            opened = Handle(number, writable=writable, flags=mode, handle=handle, owner=owner, writer=writer)
            opened.unsynced, opened.damaged = bool(flags & _UNSYNCED), bool(flags & _DAMAGED)
            with self._metadata.index.view() as view:
                record = self._metadata.inode(view, number)
            if record is None:
                log.warning("a handle of inode %d is lost with the daemon that had it", number)
                continue
            lost_name = record.flags & UNLINKED and record.flags & IMMUTABLE
            if not writable and (self._is_immutable(record) or lost_name):
                opened.file = self._shared(record)
            elif handle in files and files[handle].number == number:
                opened.fd, opened.generation = files.pop(handle).fd, self._source.generation
            else:
                found.append(opened)
            self.handles[handle] = opened
            self._descriptors.take(owner)
            self.writers[number] += writable
        close_all([each.fd for each in files.values()])
        self._adopt(data)
        return found

    def _adopt(self, data: Iterable[OpenSource]) -> None:
        """How immutable files that are open are read: the only way where the name has gone."""
        for each in data:
            with self._metadata.index.view() as view:
                record = self._metadata.inode(view, each.number)
            lost_name = record is not None and record.version == each.version and bool(record.flags & UNLINKED)
            if record is not None and lost_name and each.number not in self._held:
                self._held[each.number] = self._shared(record)
            file = self._files.get((each.number, each.version))
            if file is None or file.fd is not None:
                close_quietly(each.fd)
                continue
            file.set_fd(each.fd, self._source.generation)
            file.held = lost_name

    async def reopen(self, restored: Iterable[Handle]) -> None:
        """Before the names of these files go. A source that does not answer now is asked again when they are used."""

        async def one(opened: Handle) -> None:
            try:
                await self._descriptor(opened)
            except OSError as error:
                if not opened.released:
                    log.warning("inode %d, which is open, cannot be opened now: %s", opened.number, error.strerror)

        async with trio.open_nursery() as nursery:
            for opened in restored:
                nursery.start_soon(one, opened)

    def handle(self, number: int) -> Handle:
        try:
            return self.handles[number]
        except KeyError:
            raise failed(errno.EBADF) from None  # it was lost with another daemon

    async def read(self, handle: int, offset: int, size: int) -> bytes | memoryview:
        if handle & FAST_HANDLE:
            return await self._read_inode(self.request_at(handle)[0], offset, size)
        opened = self.handle(handle)
        if opened.file is not None and opened.is_cached:
            return await self._fetcher.read(opened.file, offset, size)
        with self._uncached_read(opened.number):
            data = await self.use(opened, lambda fd: self._source.pread(fd, size, offset))
        self._metrics.misses += 1
        self._metrics.miss_bytes += len(data)
        return data

    @contextmanager
    def _uncached_read(self, number: int) -> Iterator[None]:
        """A read of a file that is not immutable. Its kernel pages outlive it as long as the file's times stay."""
        with self._metadata.index.view() as view:
            record = self._metadata.inode(view, number)
        young = record is not None and self._young.is_young(record)
        yield
        if record is not None and young:
            self._young.was_read(record)

    async def _read_inode(self, number: int, offset: int, size: int) -> bytes | memoryview:
        """A read of a file that the fast path opened, and passed on because it is not in the cache."""
        held = self._held.get(number)
        if held is not None and not held.is_mutable:
            return await self._fetcher.read(held, offset, size)
        record = await self._fs.believed(number)
        if not self._is_immutable(record) and self._is_freezable(record):  # its OPEN may wait behind us
            with self._metadata.index.update() as update:
                record = self._metadata.pin_file(update, record)
        if not self._is_immutable(record):
            with self._uncached_read(number):
                data = await self._fs.ask_object(number, lambda at: self._source.read_file(at, size, offset))
            self._metrics.misses += 1
            self._metrics.miss_bytes += len(data)
            return data
        file = self._recent.pop(number, None)
        if file is None or file.inode.version != record.version:
            if file is not None:
                await self._let_go(file)
            file = self._shared(record)
        self._recent[number] = file
        file.handles += 1
        try:
            while len(self._recent) > RECENT_FILES:
                await self._let_go(self._recent.popitem(last=False)[1])
            return await self._fetcher.read(file, offset, size)
        except Changed as error:
            # No OPEN is sent that could be refused: the next open must not find the old inode by the old name.
            await self._fs.forget_names(error.directory or number)
            raise
        finally:
            await self._let_go(file)

    async def fetch_ahead(self, number: int, offset: int) -> None:
        """Cache a unit of a file that nobody has asked for yet, if it is immutable."""
        with self._metadata.index.view() as view:
            record = self._metadata.inode(view, number)
        if record is None or not self._is_immutable(record) or not self._metadata.remaining_ns(record):
            return
        file = self._shared(record)
        try:
            await self._fetcher.fetch_ahead(file, self._data.unit_of(record, offset))
        finally:
            await self._let_go(file)

    async def flush(self, handle: int) -> None:
        """close() of a descriptor. NFS and Ceph report write errors here, so a dup of ours is closed (hazard 4)."""
        opened = self.handle(handle)
        if opened.writable:
            self._source.counters.add("close")
            await self.use(opened, lambda fd: os.close(os.dup(fd)), tells=True)
            self._fs.expire(opened.number)

    async def release(self, handle: int) -> None:
        opened = self.handles.pop(handle, None)
        if opened is None:
            return
        if self._unseen_handles:
            with self._metadata.index.update() as update:
                update.delete(Table.META, _HANDLE + inode_key(handle))
        self._descriptors.give(opened.owner)
        opened.released = True
        if opened.writable:
            self.writers[opened.number] -= 1
            if self.writers[opened.number] == 0:
                del self.writers[opened.number]
                self._fs.expire(opened.number)
        if opened.file is not None:
            await self._let_go(opened.file)
        if not opened.borrowers and opened.fd >= 0:
            await self._slots.run(opened.close, once=True)

    async def _let_go(self, file: OpenFile) -> None:
        file.handles -= 1
        if file.handles == 0:
            self._files.pop((file.inode.number, file.inode.version), None)
            fds, file.fd, file.stale = [fd for fd in (file.fd, *file.stale) if fd is not None], None, []
            if fds:
                await self._slots.run(partial(close_all, fds), once=True)

    async def forget(self, forgotten: Sequence[tuple[int, int]]) -> None:
        """The kernel forgot inodes: (number, count).

        Of a pinned one that has no name any more nobody has counted the look-ups, and the kernel may know it still. So
        it is asked; if it does not, nobody can have the file open, and its data are of no use.
        """
        self._fs.forget(forgotten)
        for number in dict.fromkeys(number for number, _ in forgotten):
            with self._metadata.index.view() as view:
                record = self._metadata.inode(view, number)
                if record is not None and (not record.flags & UNLINKED or self._fs.notifier.attributes(number)):
                    continue
                if record is not None:
                    self._data.drop(view, number)
            if number in self._held:
                await self._let_go(self._held.pop(number))

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
        """Before a name is unlinked or replaced: an immutable file that may be open gets a descriptor of the source.

        By it what the cache does not have, or loses, is read until the kernel forgets the inode (hazard 2).
        """
        with self._metadata.index.view() as view:
            record = self._metadata.inode(view, number)
            immutable = record is not None and self._is_immutable(record)
            cached = record is not None and self._data.holds_all(view, record)
        if self._unseen_handles and record is not None and immutable and number not in self._held:
            self._held[number] = self._shared(record)
        mine = [h for h in self.handles.values() if h.number == number and not h.is_cached and h.fd < 0]
        await self.reopen(mine)
        for (inode, _), file in list(self._files.items()):
            if inode == number and not file.is_mutable:
                try:
                    file.drop_stale(self._source.generation)
                    await self._fetcher.open_source(file)
                    file.held = True
                except Changed:
                    pass  # and the entry was dropped
                except OSError:
                    if not cached:  # else the cache is enough, as long as it lasts
                        raise

    async def names_changed(self, *numbers: int) -> None:
        """This mount gave these inodes other names, and has stored what they look like now (mutable_names.py)."""
        unpinned = set(await self._fs.follow_names(numbers))
        if unpinned:
            for (number, _), file in self._files.items():
                file.is_mutable |= number in unpinned

    def store_own_change(self, number: int, now: Stat, *, written: bool = False) -> None:
        """What an inode looks like after our own change; open files of it go on with that, if they are unchanged.

        `written`: the file stays mutable in this run.
        """
        with self._metadata.index.update() as update:
            before = self._metadata.inode(update, number)
            after, dropped = self._metadata.apply_own_change(update, number, now)
            if before is not None and before.permissions != now.permissions:
                values.drop(update, number)  # a chmod changes the ACL as well
            if after is not None and written:
                self._metadata.put_inode(update, after.written())
        for parent, name in dropped:
            self._fs.notifier.entry_soon(parent, name)
        if after is None:
            return
        file = self._files.get((number, after.version))
        if file is not None:
            file.inode = after

    async def compare_own_change(self, number: int) -> None:
        """A name of an inode has gone by our doing: look at what is left, by another name or by a descriptor."""
        with self._metadata.index.view() as view:
            link = self._metadata.paths.name(view, number)
            directory = self._metadata.paths.directory(view, link[0]) if link is not None else None
        if link is not None and directory is not None:
            try:
                self.store_own_change(number, await self._slots.run(partial(self._source.lstat, directory, link[1])))
            except OSError:
                self._fs.replaced(number)  # our own change has been made, whatever became of the other name
            return
        async with self.descriptor(number, True) as use:
            if use is not None:
                self.store_own_change(number, await use(self._source.fstat))
                return
        with self._metadata.index.update() as update:
            self._metadata.lost_name(update, number)

    async def close(self) -> None:
        """Close every descriptor that is still open."""
        for handle in list(self.handles):
            await self.release(handle)
        for file in (*self._recent.values(), *self._held.values()):
            await self._let_go(file)


def _shares_of_handles() -> Shares:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    total = limit - min(RESERVED_DESCRIPTORS, limit // 4)
    return Shares(total - total // 16, total // 16)


def close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        close_quietly(fd)


def close_opened(opened: tuple[int, Stat]) -> None:
    close_quietly(opened[0])

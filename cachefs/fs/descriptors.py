"""Descriptors of the source by which files are open: opened, used, opened again, and handed to the next daemon.

The kernel keeps a handle longer than a descriptor lasts. So a handle's descriptor may be missing (another daemon had
it) or dead (the source was mounted anew), and `Descriptors.use` opens it again. Handles are written down in the
session where a fast path keeps the mount alive, and `restore` finds them after a crash; a daemon that leaves in peace
also sends its descriptors (`opened_at_source`). Writes that may be lost with a source that has gone are reported once,
as fsync(2) does it.

A path is no way to a file that has lost its name: `ask_object` calls the source by a descriptor instead.
"""

import errno
import logging
import os
import resource
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

import trio
from outcome import Outcome

from cachefs.client.hand_over import OpenSource
from cachefs.contract.index import Table
from cachefs.data.fetcher import Fetcher, OpenFile, close_quietly
from cachefs.data.shared_files import SharedFiles, close_all
from cachefs.fs.names import FileSystem, failed
from cachefs.source import shares
from cachefs.source.credentials import Identity
from cachefs.source.identity import Renamed
from cachefs.source.shares import UNKNOWN, Shares
from cachefs.source.single_flight import SingleFlight
from cachefs.source.source import Object, by_descriptor
from cachefs.store.index.records import UNLINKED, inode_key, inode_of_key

T = TypeVar("T")

RESERVED_DESCRIPTORS = 1536
"""Of the process: for calls to the source, directories, the index and connections. A quarter where there are few."""
_HANDLE = b"handle:"
# Value flags, open(2) flags and those below, inode, owner. The writer's identity follows.
_SAVED = struct.Struct("<2IQq")
_SAVED_BEFORE = struct.Struct("<2IQ")  # of a daemon that knew no owners
_UNSYNCED, _DAMAGED = 1 << 31, 1 << 30

log = logging.getLogger(__name__)


class Use(Protocol):
    """Calls a function in a thread, with a descriptor of a file that is open."""

    def __call__(self, function: Callable[[int], T], /) -> Awaitable[T]: ...


@dataclass(slots=True)
class Handle:
    """An open file: either an immutable one, served from the cache, or a descriptor of the source."""

    number: int
    """Of the inode."""
    file: OpenFile | None = None
    fd: int = -1
    """-1: it is still to be opened by this daemon. Asked for by `Descriptors.use`."""
    writable: bool = False
    flags: int = os.O_RDONLY
    """O_RDONLY, O_WRONLY or O_RDWR: how to open it again."""
    writer: Identity | None = None
    """The identity that opened it for writing, and makes its writes. None: not known."""
    handle: int = 0
    """What the kernel knows it by."""
    borrowers: int = 0
    """How many calls use `fd` besides requests on this very handle."""
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


class Descriptors:
    def __init__(
        self,
        filesystem: FileSystem,
        fetcher: Fetcher,
        shared: SharedFiles,
        *,
        outlived: bool = False,
        first_handle: int = 1,
    ) -> None:
        """`outlived`: a fast path keeps the mount when this daemon ends, so that the next one must know our handles.

        `first_handle`: below FAST_HANDLE (handles.py).
        """
        # dependencies
        self._fs = filesystem
        self._metadata = filesystem.metadata
        self._immutability = filesystem.immutability
        self._source = filesystem.source
        self._call_pool = filesystem.call_pool
        self._fetcher = fetcher
        self._shared = shared
        # constants
        self._outlived = outlived
        # state
        self.handles: dict[int, Handle] = {}
        self._next_handle = first_handle
        self._reopens: SingleFlight[int, None] = SingleFlight()
        """By the identity of the handle."""
        self._places = _shares_of_handles()
        """By owner: handles, those that are being opened included. Each may need a descriptor."""

    # --- handles ---------------------------------------------------------------------------------------------------

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Around what makes one handle. EMFILE where its owner has too many; what fails gives its place back."""
        owner = shares.owner()
        if self._places.is_full(owner):
            raise failed(errno.EMFILE)
        self._places.take(owner)
        try:
            yield
        except BaseException:
            self._places.give(owner)
            raise

    def handle(self, number: int) -> Handle:
        try:
            return self.handles[number]
        except KeyError:
            raise failed(errno.EBADF) from None  # it was lost with another daemon

    def add(self, handle: Handle) -> int:
        handle.handle = self._next_handle
        self._next_handle += 1
        self.handles[handle.handle] = handle
        self.save(handle)
        return handle.handle

    def save(self, opened: Handle) -> None:
        """Write a handle down for the next daemon."""
        if self._outlived and not opened.released:
            flags = opened.flags | _UNSYNCED * opened.unsynced | _DAMAGED * opened.damaged
            value = _SAVED.pack(0, flags, opened.number, opened.owner)
            value += opened.writer.pack() if opened.writer else b""
            with self._metadata.index.update() as update:
                update.put(Table.META, _HANDLE + inode_key(opened.handle), value)

    def add_source_handle(self, number: int, fd: int, flags: int, writer: Identity, generation: int) -> int:
        """`flags`: of open(2). `generation`: of the source, before `fd` was opened. Within `opening`."""
        writable = flags & os.O_ACCMODE != os.O_RDONLY
        if writable:
            self._immutability.add_writer(number)
        flags &= os.O_ACCMODE
        opened = Handle(number, fd=fd, writable=writable, flags=flags, writer=writer, generation=generation)
        return self.add(opened)

    def remove(self, handle: int) -> Handle | None:
        """The kernel has closed a handle. None: it was lost with another daemon."""
        opened = self.handles.pop(handle, None)
        if opened is not None:
            if self._outlived:
                with self._metadata.index.update() as update:
                    update.delete(Table.META, _HANDLE + inode_key(handle))
            self._places.give(opened.owner)
            opened.released = True
        return opened

    async def close(self, opened: Handle) -> None:
        """A handle that was removed. Calls that borrow its descriptor end first."""
        if not opened.borrowers and opened.fd >= 0:
            await self._call_pool.run(opened.close, once=True)

    # --- descriptors of the source ---------------------------------------------------------------------------------

    async def use(self, opened: Handle, function: Callable[[int], T], *, tells: bool = False) -> T:
        """Call `function` in a thread with a descriptor of the handle, again if the source is mounted anew meanwhile.

        `tells`: the caller must be told of writes that may be lost: EIO, once, as by fsync(2).
        """
        while True:
            fd = await self._descriptor(opened)
            if tells and opened.damaged:
                opened.damaged = False
                self.save(opened)
                raise failed(errno.EIO)
            generation = opened.generation
            try:
                return await self._call_pool.run(partial(function, fd), once=True)
            except OSError as error:
                if not await self._fetcher.is_anew(error, generation):
                    raise

    async def _descriptor(self, opened: Handle) -> int:
        if opened.generation != self._source.generation and opened.unsynced:
            opened.unsynced, opened.damaged = False, True
            self.save(opened)
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
                self._call_pool.start(opened.close, lambda _: None, once=True)

        if opened.released:
            raise failed(errno.EBADF)
        call = partial(self._source.open_to_keep, self._fs.object_of(opened.number), opened.flags)
        start = partial(self._call_pool.start, call, discard=close_quietly)
        await self._reopens.begin(id(opened), start, finish).wait()

    @asynccontextmanager
    async def descriptor(self, number: int, every: bool) -> AsyncIterator[Use | None]:
        """How to use a descriptor of the source by which a file is open, while the block runs; None if it is not.

        Of a writer, or, if a name is no way to the file (`every`), of a reader or of what it lost its name with.
        """
        opened = None
        if every or self._immutability.has_writers(number):
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
                    await self._call_pool.run(opened.close, once=True)
            return
        fd = self._duplicate(number) if every else None
        if fd is None:
            yield None
            return

        async def use(function: Callable[[int], T], /) -> T:
            return await self._call_pool.run(partial(function, fd), once=True)

        try:
            yield use
        finally:
            await self._call_pool.run(partial(close_quietly, fd), once=True)

    def _duplicate(self, number: int) -> int | None:
        """A descriptor of an immutable file, where one is kept."""
        for file in self._shared.of(number):
            if file.fd is not None and file.generation == self._source.generation:
                return os.dup(file.fd)
        return None

    async def ask_object(
        self,
        number: int,
        call: Callable[[Object], T],
        *,
        discard: Callable[[T], object] | None = None,
        once: bool = False,
    ) -> T:
        """Call the source, for an object that may be open: then it is reached even if its name is gone.

        By the descriptor of a writer; else by a name that leads to it; else by any descriptor.
        """
        async with self.descriptor(number, False) as use:
            if use is not None:
                return await use(lambda fd: call(by_descriptor(fd)))
        try:
            return await self._fs.ask(number, partial(call, self._fs.object_of(number)), discard=discard, once=once)
        except Renamed:
            raise  # it is changed by a path that may lead elsewhere
        except OSError as error:
            async with self.descriptor(number, True) as use:
                if error.errno != errno.ESTALE or use is None:
                    raise
                return await use(lambda fd: call(by_descriptor(fd)))

    # --- handing over ----------------------------------------------------------------------------------------------

    def opened_at_source(self) -> Iterator[OpenSource]:
        """For the next daemon: the descriptors by which files are open, but those of a source that has gone."""
        generation = self._source.generation
        for handle, opened in self.handles.items():
            if not opened.is_cached and opened.fd >= 0 and opened.generation == generation:
                yield OpenSource(handle, opened.number, 0, opened.fd)
        for file in self._shared:
            if not file.is_mutable and file.fd is not None and file.generation == generation:
                yield OpenSource(0, file.inode.number, file.inode.version, file.fd)

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
                inode = self._metadata.inode(view, number)
            if inode is None:
                log.warning("a handle of inode %d is lost with the daemon that had it", number)
                continue
            immutable = self._immutability.is_immutable(inode) or self._immutability.outlives_its_name(inode)
            if immutable and not writable:
                opened.file = self._shared.share(inode)
            elif handle in files and files[handle].number == number:
                opened.fd, opened.generation = files.pop(handle).fd, self._source.generation
            else:
                found.append(opened)
            self.handles[handle] = opened
            self._places.take(owner)
            if writable:
                self._immutability.add_writer(number)
        close_all([each.fd for each in files.values()])
        self._adopt(data)
        return found

    def _adopt(self, data: Iterable[OpenSource]) -> None:
        """How immutable files that are open are read: the only way where the name has gone."""
        for each in data:
            with self._metadata.index.view() as view:
                inode = self._metadata.inode(view, each.number)
            lost_name = inode is not None and inode.version == each.version and bool(inode.flags & UNLINKED)
            if inode is not None and lost_name:
                self._shared.hold(inode)
            file = self._shared.get(each.number, each.version)
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


def _shares_of_handles() -> Shares:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    total = limit - min(RESERVED_DESCRIPTORS, limit // 4)
    return Shares(total - total // 16, total // 16)

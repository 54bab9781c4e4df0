"""Handles of files, and their descriptors of the source: opened, used, reopened, and handed over to a successor.

The kernel keeps a handle longer than a descriptor lasts. A handle's descriptor may be missing (a predecessor had it) or
dead (the source was remounted); then `Descriptors.use` reopens it. Where a fast path keeps the mount alive, handles are
recorded in the session, and `restore` finds them after a crash. A daemon that is replaced also sends its descriptors to
the successor (`opened_at_source`).

Writes and truncations that were not synced may be lost when the source is remounted. `Handle.has_lost` finds that out.
The next write, truncation or fsync reports it, once (`change`, `sync`); each close until then reports it, too.

No path leads to a file that has lost its name: `ask_object` calls the source by a descriptor instead.
"""

import errno
import logging
import os
import resource
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Protocol, TypeVar

import trio
from outcome import Outcome

from cachefs.client.hand_over import OpenSource
from cachefs.contract.index import Table
from cachefs.data.data_cache import DataCache
from cachefs.data.fetcher import Fetcher, close_quietly
from cachefs.data.handle import Handle
from cachefs.data.shared_files import SharedFiles, close_all
from cachefs.errors import failed
from cachefs.fs.names import FileSystem
from cachefs.source import shares
from cachefs.source.credentials import Caller, Identity
from cachefs.source.identity import Changed, Renamed
from cachefs.source.single_flight import SingleFlight
from cachefs.source.source import FIRST_GENERATION, Object, by_descriptor
from cachefs.store.index.records import UNLINKED, inode_key, inode_of_key

T = TypeVar("T")

RESERVED_DESCRIPTORS = 1536
"""Descriptors that handles do not get: calls, directories, the index and connections need them. At most a quarter."""
_HANDLE = b"handle:"

log = logging.getLogger(__name__)


class Use(Protocol):
    """Calls a function in a thread, with the descriptor of an open file."""

    def __call__(self, function: Callable[[int], T], /) -> Awaitable[T]: ...


@dataclass(eq=False)
class Descriptors:
    # dependencies
    fs: FileSystem
    fetcher: Fetcher
    shared: SharedFiles
    data: DataCache
    _: KW_ONLY
    # constants
    has_fastpath: bool
    """A fast path keeps the mount when this daemon ends, so that a successor must know the handles. It answers OPENs,
    so that any file may be open without a handle of the daemon (hazard 2)."""
    # state
    next_handle: int
    """Below FAST_HANDLE."""

    def __post_init__(self) -> None:
        self._metadata = self.fs.metadata
        # state
        self.handles: dict[int, Handle] = {}
        self._reopens: SingleFlight[int, None] = SingleFlight()
        """By id() of the `Handle`."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        total = limit - min(RESERVED_DESCRIPTORS, limit // 4)
        self._places = shares.Shares(total - total // 16, total // 16)
        """Handles of each owner, including those that are being opened. Each may need a descriptor."""

    # --- handles ---------------------------------------------------------------------------------------------------

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Around the opening of one handle: counts it for its owner. Raises EMFILE if the owner has too many."""
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
        if number not in self.handles:
            raise failed(errno.EBADF)  # it was lost with a predecessor
        return self.handles[number]

    def add(self, handle: Handle) -> int:
        handle.handle = self.next_handle
        self.next_handle += 1
        self.handles[handle.handle] = handle
        if handle.file is None:
            self._metadata.note_mutable_pages(handle.number)
        self.save(handle)
        return handle.handle

    def save(self, opened: Handle) -> None:
        """Record a handle for a successor."""
        if self.has_fastpath and not opened.released:
            with self._metadata.index.update() as update:
                value = opened.pack(self.fs.source.generation)
                update.put(Table.META, _HANDLE + inode_key(opened.handle), value)

    def add_source_handle(self, number: int, fd: int, flags: int, writer: Identity, generation: int) -> int:
        """`flags`: of open(2). `generation`: of the source, before `fd` was opened. Within `opening`."""
        mode = flags & os.O_ACCMODE
        opened = Handle(number, fd=fd, writable=mode != os.O_RDONLY, flags=mode, writer=writer, generation=generation)
        opened.is_direct = bool(flags & os.O_DIRECT)
        if opened.writable:
            self.fs.immutability.add_writer(number)
            opened.unsynced_since = generation if flags & os.O_TRUNC else None
        return self.add(opened)

    def remove(self, handle: int) -> Handle | None:
        """The kernel has closed a handle. None: it was lost with a predecessor."""
        opened = self.handles.pop(handle, None)
        if opened is not None:
            if self.has_fastpath:
                with self._metadata.index.update() as update:
                    update.delete(Table.META, _HANDLE + inode_key(handle))
            self._places.give(opened.owner)
            opened.released = True
        return opened

    async def close(self, opened: Handle) -> None:
        """Close a removed handle, unless calls borrow its descriptor: the last of them closes it."""
        if not opened.borrowers and opened.fd >= 0:
            await self.fs.call_pool.run(partial(close_all, opened.take_descriptors()), once=True)

    # --- descriptors of the source ---------------------------------------------------------------------------------

    async def use(self, opened: Handle, function: Callable[[int], T]) -> T:
        """Call `function` in a thread with a descriptor of the handle; again, if the source is remounted meanwhile."""
        return (await self._use(opened, function))[0]

    async def _use(self, opened: Handle, function: Callable[[int], T], *, reports_loss: bool = False) -> tuple[T, int]:
        """Returns also the generation of the source that was used."""
        while True:
            fd = await self._descriptor(opened)
            if reports_loss and opened.has_lost(self.fs.source.generation):
                self._set_unsynced(opened, None)
                raise failed(errno.EIO)
            generation = opened.generation
            try:
                return await self.fs.call_pool.run(partial(function, fd), once=True), generation
            except OSError as error:
                if not await self.fetcher.is_anew(error, generation):
                    raise

    async def change(self, opened: Handle, function: Callable[[int], T]) -> T:
        """`use`, for a write or a truncation. Raises EIO, once, if earlier ones may have been lost."""
        result, generation = await self._use(opened, function, reports_loss=True)
        opened.changes += 1
        if opened.unsynced_since is None or opened.unsynced_since > generation:
            self._set_unsynced(opened, generation)
        return result

    async def sync(self, opened: Handle, function: Callable[[int], None]) -> None:
        """`use`, for an fsync. Raises EIO, once, if changes may have been lost."""
        changes = opened.changes
        await self._use(opened, function, reports_loss=True)
        if opened.changes == changes and opened.unsynced_since is not None:
            self._set_unsynced(opened, None)

    def has_readers(self, number: int) -> bool:
        """Has a process a file open by which it may read, or map, what the kernel caches of it?"""
        return any(each.number == number and each.flags != os.O_WRONLY for each in self.handles.values())

    def save_losses(self) -> None:
        """The source was remounted: record the losses for a successor, which has the new source from the beginning."""
        for opened in self.handles.values():
            if opened.has_lost(self.fs.source.generation):
                self.save(opened)

    def _set_unsynced(self, opened: Handle, since: int | None) -> None:
        opened.unsynced_since = since
        self.save(opened)

    async def _descriptor(self, opened: Handle) -> int:
        if not opened.is_open(self.fs.source.generation):
            await self._reopen(opened)
        return opened.fd

    async def _reopen(self, opened: Handle) -> None:
        """Reopen what a predecessor had open, or what was open before the source was remounted."""
        generation = self.fs.source.generation

        def finish(answer: Outcome[int]) -> None:
            fd = answer.unwrap()
            if opened.fd >= 0:
                opened.stale.append(opened.fd)
            opened.fd, opened.generation = fd, generation
            if opened.released and not opened.borrowers:
                self.fs.call_pool.start(partial(close_all, opened.take_descriptors()), lambda _: None, once=True)

        if opened.released:  # a lent duplicate has no handle of the kernel, and cannot be opened again
            raise failed(errno.EBADF if opened.handle else errno.ESTALE)

        async def reopen(at: Object) -> None:
            def call() -> int:
                return self.fs.source.open_mutable(at, opened.flags)[0]

            start = partial(self.fs.call_pool.start, call, discard=close_quietly)
            try:
                await self._reopens.begin(id(opened), start, finish).wait()
            except Changed as error:
                if error.directory:
                    self.fs.invalidation.replaced(error.directory)
                raise

        await self._by_names(opened.number, reopen)

    @asynccontextmanager
    async def descriptor(self, number: int, every: bool) -> AsyncIterator[Use | None]:
        """How to use a descriptor of the source by which a file is open, while the block runs. None: there is none.

        The descriptor of a writer; if `every`, because no name leads to the file, also that of a reader or of the
        cache.
        """
        opened = self._lend(number, every) if every or self.fs.immutability.has_writers(number) else None
        if opened is None:
            yield None
            return
        opened.borrowers += 1
        try:
            yield partial(self.use, opened)
        finally:
            opened.borrowers -= 1
            if opened.released:
                await self.close(opened)

    def _lend(self, number: int, every: bool) -> Handle | None:
        mine = [h for h in self.handles.values() if h.number == number and not h.is_cached and (h.writable or every)]
        if mine or not every:
            return max(mine, key=lambda h: h.writable, default=None)
        generation = self.fs.source.generation
        for file in self.shared.of(number):
            if file.fd is not None and file.generation == generation:
                return Handle(number, fd=os.dup(file.fd), released=True, generation=generation)
        return None

    @asynccontextmanager
    async def without_name(self, number: int, error: OSError) -> AsyncIterator[Use]:
        """A call by name has failed with `error`. ESTALE: use the descriptor of a file that is open instead. Otherwise,
        and if there is no descriptor, raises `error`."""
        async with self.descriptor(number, True) as use:
            if error.errno != errno.ESTALE or use is None:
                raise error
            yield use

    async def ask_object(
        self,
        number: int,
        call: Callable[[Object], T],
        *,
        discard: Callable[[T], object] | None = None,
        once: bool = False,
        changer: Caller | None = None,
    ) -> T:
        """Call the source for an object: by the descriptor of a writer; else by a name; else by any descriptor, because
        an open object may have no name. `changer`: of its contents, by a path, which may lead elsewhere."""
        async with self.descriptor(number, False) as use:
            if use is not None:
                return await use(lambda fd: call(by_descriptor(fd)))
        try:
            return await self.ask_by_name(number, call, discard=discard, once=once)
        except Renamed:
            raise  # the path may lead elsewhere: the change must not be made by a descriptor either
        except OSError as error:
            if changer is not None and not self.fs.repetitions.is_by_present_name(number, changer):
                raise
            async with self.without_name(number, error) as use:
                return await use(lambda fd: call(by_descriptor(fd)))

    async def ask_by_name(
        self,
        number: int,
        call: Callable[[Object], T],
        *,
        discard: Callable[[T], object] | None = None,
        once: bool = False,
    ) -> T:
        """Call the source for an object by a name; by its other names, too, if a directory is not where it was, or
        may not be entered by the caller."""
        ask = self.fs.ask
        return await self._by_names(number, lambda at: ask(number, partial(call, at), discard=discard, once=once))

    async def _by_names(self, number: int, ask: Callable[[Object], Awaitable[T]]) -> T:
        tried, link = set[tuple[int, bytes]](), None
        while True:
            at = self.fs.object_of(number, link=link)
            tried.add((at.directory.number, at.name))
            try:
                return await ask(at)
            except (Changed, PermissionError) as error:
                link = self.fs.invalidation.other_name(number, error, tried)
                if link is None:
                    raise

    async def keep_readable(self, number: int) -> None:
        """Before a name is unlinked or replaced: open a descriptor of a file that may be open, because it is immutable,
        or was so when the fast path answered an open.

        Until the kernel forgets the inode, data that are not cached are read by this descriptor (hazard 2).
        """
        with self._metadata.index.view() as view:
            inode = self._metadata.inode(view, number)
            immutable = inode is not None and self.fs.immutability.may_have_readers(inode)
            cached = inode is not None and self.data.holds_all(view, inode)
        made_mutable = self.has_fastpath and not immutable and number in self.fs.invalidation.made_mutable
        if inode is not None and (made_mutable or (immutable and self.has_fastpath)):
            self.shared.hold(inode)
        if made_mutable:
            self.shared.make_mutable(number)
        await self.reopen([h for h in self.handles.values() if h.number == number and not h.is_cached and h.fd < 0])
        for file in self.shared.of(number):
            if not file.is_mutable or made_mutable:
                try:
                    file.drop_stale(self.fs.source.generation)
                    await self.fetcher.open_source(file)
                    file.held = True
                except Changed:
                    pass  # the entry was dropped
                except OSError:
                    if not cached:  # otherwise the cache is enough, as long as it keeps the data
                        raise

    # --- handing over ----------------------------------------------------------------------------------------------

    def opened_at_source(self) -> Iterator[OpenSource]:
        """For a successor: the descriptors by which files are open, except those of before the source was remounted."""
        generation = self.fs.source.generation
        for handle, opened in self.handles.items():
            if not opened.is_cached and opened.is_open(generation):
                yield OpenSource(handle, opened.number, 0, opened.fd)
        for file in self.shared:
            if not file.is_mutable and file.fd is not None and file.generation == generation:
                yield OpenSource(0, file.inode.number, file.inode.version, file.fd)

    def restore(self) -> None:
        """Take over the handles of a predecessor: the kernel still has them. Does not ask the source."""
        with self._metadata.index.view() as view:
            saved = [(inode_of_key(key[len(_HANDLE) :]), value) for key, value in view.scan(Table.META, _HANDLE)]
        for handle, value in saved:
            opened = Handle.unpack(handle, value, self.fs.source.generation)
            inode = self._metadata.current(opened.number)
            if inode is None:
                log.warning("the last daemon left no record of inode %d: calls on its open handle fail", opened.number)
                continue
            if not opened.writable and self.fs.immutability.keeps_version(inode):
                opened.file = self.shared.share(inode)
            self.handles[handle] = opened
            self._places.take(opened.owner)
            if opened.writable:
                self.fs.immutability.add_writer(opened.number)

    def adopt(self, handed: Iterable[OpenSource]) -> list[Handle]:
        """Take over descriptors that the predecessor has sent (hand_over.py), before requests are answered.

        They are of the source as it was when this daemon began. Returns the handles to `reopen`.
        """
        files = {each.handle: each for each in handed if each.handle}
        data = [each for each in handed if not each.handle]
        left = [opened for opened in self.handles.values() if not opened.is_cached and opened.fd < 0]
        for opened in left:
            if opened.handle in files and files[opened.handle].number == opened.number:
                opened.fd, opened.generation = files.pop(opened.handle).fd, FIRST_GENERATION
        close_all([each.fd for each in files.values()])
        self._adopt(data)
        return [opened for opened in left if opened.fd < 0]

    def _adopt(self, data: Iterable[OpenSource]) -> None:
        """Take over descriptors of immutable files: the only way to read a file that has lost its name."""
        for each in data:
            inode = self._metadata.current(each.number)
            lost_name = inode is not None and inode.version == each.version and bool(inode.flags & UNLINKED)
            if inode is not None and lost_name:
                self.shared.hold(inode)
            file = self.shared.get(each.number, each.version)
            if file is None or file.fd is not None:
                close_quietly(each.fd)
            else:
                file.set_fd(each.fd, FIRST_GENERATION)
                file.held = lost_name

    async def reopen(self, restored: Iterable[Handle]) -> None:
        """Reopen restored handles while their files have names. Those that fail are reopened at their next use."""

        async def one(opened: Handle) -> None:
            try:
                await self._descriptor(opened)
            except OSError as error:
                if not opened.released:
                    log.warning("inode %d, which is open, cannot be opened now: %s", opened.number, error.strerror)

        async with trio.open_nursery() as nursery:
            for opened in restored:
                nursery.start_soon(one, opened)

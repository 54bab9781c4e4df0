"""The semantics of writing: everything passes through to the source at once, as the caller, and shows at once.

An immutable file is like one with `chattr +i`: opening it for writing, truncating it, chmod, chown, utimens and
setxattr fail with EPERM. Its names may change: unlink and rename are changes of the directory.
"""

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from cachefs.data.fetcher import close_quietly
from cachefs.fs.descriptors import Descriptors
from cachefs.fs.listing_comparison import ListingComparisons
from cachefs.fs.names import FileSystem, failed
from cachefs.fs.own_changes import OwnChanges
from cachefs.metadata import inode_values
from cachefs.source.credentials import CAP_SETFCAP, Caller, unknown_writer
from cachefs.source.directories import Directory
from cachefs.source.identity import Changed, Renamed
from cachefs.source.writes import SourceWriter
from cachefs.store.index.records import PINNED, WRITTEN, Inode
from cachefs.system import syscalls
from cachefs.system.clock import NANOSECONDS
from cachefs.system.stat import Stat
from cachefs.system.syscalls import UTIME_NOW, UTIME_OMIT

T = TypeVar("T")
RENAME_EXCHANGE = 2
_CAPABILITY = b"security.capability"


@dataclass(frozen=True, slots=True)
class Changes:
    """The attributes that a setattr wants; None: leave it. Times in nanoseconds.

    `now`: which of atime and mtime are to be the time of the source. None: that is not known.
    """

    size: int | None = None
    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    atime_ns: int | None = None
    mtime_ns: int | None = None
    now: tuple[bool, bool] | None = None


class Mutations:
    def __init__(
        self, filesystem: FileSystem, descriptors: Descriptors, listings: ListingComparisons, own_changes: OwnChanges
    ) -> None:
        # dependencies
        self._fs = filesystem
        self._metadata = filesystem.metadata
        self._descriptors = descriptors
        self._listings = listings
        self._own_changes = own_changes
        self._source = SourceWriter(filesystem.source)

    def _check_writable(self, number: int | None = None) -> None:
        if self._fs.options.read_only:
            raise failed(errno.EROFS)
        if number is not None and self._fs.immutability.refuses_changes(self._fs.inode(number)):
            raise failed(errno.EPERM)

    async def _run(
        self,
        caller: Caller,
        number: int,
        function: Callable[[], T],
        *,
        names_in: tuple[int, ...],
        discard: Callable[[T], object] | None = None,
    ) -> T:
        """Change names in directories of the source, for an inode."""
        await self._fs.before_change(caller, names_in=names_in)
        return await self._fs.ask(number, function, discard=discard, once=True)

    def _own_change(self, *changed: tuple[int, Stat]) -> None:
        """Store the new attributes of directories and inodes that this mount has just changed."""
        for number, now in changed:
            self._own_changes.store(number, now)
            self._listings.changed(number)

    def _names_changed(self, *names: tuple[int, bytes]) -> None:
        """What was asked about them before this mount changed what they lead to is of before or after."""
        for parent, name in names:
            self._fs.overtake(parent, name)
            self._listings.overtake(parent, name)

    def _added(self, parent: int, name: bytes, now: Stat, directory: Stat, *, written: bool) -> Inode:
        with self._metadata.index.update() as update:
            inode = self._metadata.apply_stat(update, parent, name, now, pin=False)
            if written:
                # A new inode, whatever the number: nothing of it is cached yet, so nothing is lost.
                inode = inode._replace(flags=inode.flags | WRITTEN, lookups=inode.lookups + 1)
                self._metadata.put_inode(update, inode)
        self._own_change((parent, directory))
        self._names_changed((parent, name))
        return inode

    # --- files -----------------------------------------------------------------------------------------------------

    async def create(self, parent: int, name: bytes, mode: int, flags: int, caller: Caller) -> tuple[int, Inode]:
        """A handle of the new file and its record."""
        self._check_writable()
        generation = self._fs.source.generation
        call = partial(self._source.create, self._fs.directory(parent), name, flags, stat.S_IMODE(mode), caller)
        try:
            fd, now, directory = await self._run(
                caller, parent, call, names_in=(parent,), discard=lambda made: close_quietly(made[0])
            )
        except Changed as error:
            if not error.directory and not isinstance(error, Renamed):
                self._fs.invalidation.lose_name(parent, name)
            raise
        inode = self._added(parent, name, now, directory, written=True)
        return self._descriptors.add_source_handle(inode.number, fd, flags, caller.identity(), generation), inode

    async def open_for_writing(self, number: int, flags: int, caller: Caller) -> int:
        self._check_writable(number)
        call = partial(self._source.open_file, flags=flags, caller=caller)
        generation = self._fs.source.generation
        with self._fs.immutability.opening_for_writing(number):
            await self._fs.before_change(caller, objects=(number,))
            fd = await self._descriptors.ask_object(number, call, discard=close_quietly)
        try:
            self._check_writable(number)
        except OSError:
            close_quietly(fd)
            raise
        self._mark_written(number)
        return self._descriptors.add_source_handle(number, fd, flags, caller.identity(), generation)

    def _mark_written(self, number: int) -> None:
        with self._metadata.index.update() as update:
            inode = self._metadata.inode(update, number)
            if inode is not None:
                self._metadata.put_inode(update, inode.written()._replace(expires_ns=0))

    async def write(self, handle: int, offset: int, data: bytes) -> int:
        opened = self._descriptors.handle(handle)
        if not opened.writable:
            raise failed(errno.EBADF)
        writer = opened.writer or unknown_writer()
        try:
            written = await self._descriptors.use(
                opened, lambda fd: self._source.pwrite(fd, data, offset, writer), tells=True
            )
        finally:
            self._metadata.changes.note(opened.number)
        opened.writes += 1
        if not opened.unsynced:
            opened.unsynced = True
            self._descriptors.save(opened)
        return written

    async def fsync(self, handle: int, data_only: bool) -> None:
        opened = self._descriptors.handle(handle)
        if opened.writable:
            writes = opened.writes
            await self._descriptors.use(opened, lambda fd: self._source.fsync(fd, data_only=data_only), tells=True)
            if opened.unsynced and opened.writes == writes:
                opened.unsynced = False
                self._descriptors.save(opened)

    async def fsync_directory(self, number: int) -> None:
        if not self._fs.options.read_only:
            await self._fs.ask(number, partial(self._source.fsync_directory, self._fs.directory(number)))

    # --- attributes ------------------------------------------------------------------------------------------------

    async def setattr(self, number: int, changes: Changes, handle: int | None, caller: Caller) -> Inode:
        self._check_writable(number)
        opened = self._descriptors.handles.get(handle) if handle is not None else None
        if opened is None:
            await self._fs.before_change(caller, objects=(number,))
        if changes.size is not None:
            size = changes.size
            if opened is not None and opened.writable:
                now = await self._descriptors.use(opened, lambda fd: self._source.ftruncate(fd, size, caller))
            else:
                truncate = partial(self._source.truncate, size=changes.size, caller=caller)
                now = await self._descriptors.ask_object(number, truncate, once=True)
            self._own_changes.store(number, now, written=True)
        if changes.mode is not None and not self._comes_with_a_write(number, changes.mode, caller):
            mode = stat.S_IMODE(changes.mode)
            await self._change(caller, "chmod", number, lambda name: os.chmod(name, mode))
        if changes.uid is not None or changes.gid is not None:
            uid = -1 if changes.uid is None else changes.uid
            gid = -1 if changes.gid is None else changes.gid
            await self._change(caller, "chown", number, lambda name: os.chown(name, uid, gid))
        if changes.atime_ns is not None or changes.mtime_ns is not None:
            atime, mtime = self._times(number, changes, caller)
            await self._change(caller, "utimens", number, lambda name: syscalls.utimensat(name.encode(), atime, mtime))
        return self._fs.inode(number)

    def _owns(self, caller: Caller, inode: Inode) -> bool:
        """May it do what only owners may?"""
        identity = caller.identity()
        return identity.uid == inode.uid or identity.overrides_owner

    def _comes_with_a_write(self, number: int, mode: int, caller: Caller) -> bool:
        """Without the fast path the kernel clears set-user-ID bits itself before a write or truncation, as the writer.

        The kernel lets nobody but the owner ask for a chmod. The source clears the bits with the write itself, which is
        made without CAP_FSETID.
        """
        inode = self._fs.inode(number)
        before, after = stat.S_IMODE(inode.mode), stat.S_IMODE(mode)
        only_clears = after & ~before == 0 and before & ~after & ~(stat.S_ISUID | stat.S_ISGID) == 0
        return only_clears and not self._owns(caller, inode)

    def _times(self, number: int, changes: Changes, caller: Caller) -> tuple[tuple[int, int], tuple[int, int]]:
        """What utimensat is to be told for atime and mtime.

        pyfuse3 does not pass on whether a time is "now"; the fast path does. Without it a caller that neither owns the
        file nor has CAP_FOWNER means "now": the kernel allows it nothing else.
        """
        now = changes.now
        if now is None:
            now = (not self._owns(caller, self._fs.inode(number)),) * 2
        atime, mtime = (
            (0, UTIME_OMIT) if time_ns is None else (0, UTIME_NOW) if is_now else divmod(time_ns, NANOSECONDS)
            for time_ns, is_now in zip((changes.atime_ns, changes.mtime_ns), now, strict=True)
        )
        return atime, mtime

    async def _change(self, caller: Caller, operation: str, number: int, make: Callable[[str], None]) -> None:
        change = partial(self._source.change, operation, make=make, caller=caller)
        now = await self._descriptors.ask_object(number, change, once=True)
        self._own_changes.store(number, now)

    async def setxattr(self, number: int, name: bytes, value: bytes, caller: Caller) -> None:
        self._check_writable(number)
        await self._fs.before_change(caller, objects=(number,))
        await self._change(caller, "setxattr", number, lambda target: os.setxattr(target, name, value))
        self._drop_values(number)

    async def removexattr(self, number: int, name: bytes, caller: Caller) -> None:
        self._check_writable(number)
        if name == _CAPABILITY and not caller.identity().capabilities & CAP_SETFCAP:
            # The kernel, before a write, truncation or chown that the caller may make. A removexattr by such a caller
            # it refuses itself. The source drops the capabilities with the change that follows.
            return
        await self._fs.before_change(caller, objects=(number,))
        await self._change(caller, "removexattr", number, lambda target: os.removexattr(target, name))
        self._drop_values(number)

    def _drop_values(self, number: int) -> None:
        with self._metadata.index.update() as update:
            inode_values.drop(update, number)

    # --- names -----------------------------------------------------------------------------------------------------

    async def _add(
        self, caller: Caller, operation: str, parent: int, name: bytes, make: Callable[[int], None], *, written: bool
    ) -> Inode:
        self._check_writable()
        call = partial(self._source.add, operation, self._fs.directory(parent), name, make, caller)
        now, directory = await self._run(caller, parent, call, names_in=(parent,))
        return self._added(parent, name, now, directory, written=written)

    async def mkdir(self, parent: int, name: bytes, mode: int, caller: Caller) -> Inode:
        bits = stat.S_IMODE(mode)
        return await self._add(caller, "mkdir", parent, name, lambda fd: os.mkdir(name, bits, dir_fd=fd), written=False)

    async def mknod(self, parent: int, name: bytes, mode: int, rdev: int, caller: Caller) -> Inode:
        return await self._add(
            caller, "mknod", parent, name, lambda fd: os.mknod(name, mode, rdev, dir_fd=fd), written=stat.S_ISREG(mode)
        )

    async def symlink(self, parent: int, name: bytes, target: bytes, caller: Caller) -> Inode:
        return await self._add(
            caller, "symlink", parent, name, lambda fd: os.symlink(target, name, dir_fd=fd), written=False
        )

    async def link(self, number: int, parent: int, name: bytes, caller: Caller) -> Inode:
        self._check_writable()
        with self._fs.own_change(number):
            call = partial(self._source.link, self._fs.object_of(number), self._fs.directory(parent), name, caller)
            now, directory = await self._run(caller, number, call, names_in=(parent,))
            self._own_change((number, now), (parent, directory))
        with self._metadata.index.update() as update:
            inode = self._metadata.apply_stat(update, parent, name, now, pin=False)
        self._names_changed((parent, name))
        await self._own_changes.names_changed(number)
        return inode

    async def remove(self, parent: int, name: bytes, caller: Caller, *, is_directory: bool) -> None:
        """unlink or rmdir. An open immutable file goes on being readable (hazard 2)."""
        self._check_writable()
        number = self._number(parent, name)
        if number:
            await self._own_changes.hold_data(number)
        with self._fs.own_change(number):
            call = partial(self._source.remove, self._fs.directory(parent), name, caller, is_directory=is_directory)
            with self._losing(parent, name):
                directory = await self._run(caller, parent, call, names_in=(parent,))
            with self._metadata.index.update() as update:
                self._metadata.remove_name(update, parent, name)
            self._own_change((parent, directory))
            self._names_changed((parent, name))
            if number:
                await self._own_changes.compare(number)
                await self._own_changes.names_changed(number)

    @contextmanager
    def _losing(self, parent: int, name: bytes) -> Iterator[None]:
        """A pinned name that the source turns out not to have is not shown any more."""
        try:
            yield
        except FileNotFoundError:
            if self._number(parent, name):
                self._fs.invalidation.lose_name(parent, name)
            raise

    def _pinned_name(self, parent: int, name: bytes, directory: Directory) -> list[tuple[Directory, bytes, Inode]]:
        """The directory, the name, and what it leads to; nothing if it is not pinned."""
        with self._metadata.index.view() as view:
            dentry = self._metadata.dentry(view, parent, name)
            inode = self._metadata.inode(view, dentry.inode) if dentry and dentry.flags & PINNED else None
        return [(directory, name, inode)] if inode is not None else []

    def _number(self, parent: int, name: bytes) -> int:
        """The inode that a name leads to; 0 if that is not known."""
        with self._metadata.index.view() as view:
            dentry = self._metadata.dentry(view, parent, name)
        return dentry.inode if dentry is not None else 0

    async def rename(
        self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int, caller: Caller
    ) -> None:
        self._check_writable()
        moved, replaced = self._number(parent, name), self._number(new_parent, new_name)
        if not moved or (flags & RENAME_EXCHANGE and not replaced):
            raise failed(
                errno.ESTALE
            )  # a name was lost just now: the kernel looks it up again, and finds where it leads
        if replaced:
            await self._own_changes.hold_data(replaced)
        with self._fs.own_change(moved, replaced):
            old, new = self._fs.directory(parent), self._fs.directory(new_parent)
            expected = self._pinned_name(parent, name, old)
            if flags & RENAME_EXCHANGE:
                expected += self._pinned_name(new_parent, new_name, new)
            call = partial(self._source.rename, old, name, new, new_name, flags, caller, expected)
            with self._losing(parent, name):
                now, old_directory, new_directory = await self._run(caller, parent, call, names_in=(parent, new_parent))
            with self._metadata.index.update() as update:
                if flags & RENAME_EXCHANGE:
                    self._metadata.swap_names(update, parent, name, new_parent, new_name)
                else:
                    self._metadata.move_name(update, parent, name, new_parent, new_name)
            self._own_change((parent, old_directory), (new_parent, new_directory))
            self._names_changed((parent, name), (new_parent, new_name))
            if moved:
                self._own_change((moved, now))
            if replaced:
                await self._own_changes.compare(replaced)
            await self._own_changes.names_changed(moved, replaced)

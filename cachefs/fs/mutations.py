"""The semantics of writing: each change is made at the source at once, as the caller, and is visible at once.

An immutable file is like one with `chattr +i`: open for writing, truncate, chmod, chown, utimens and setxattr fail with
EPERM. Its names may change: unlink and rename change the directory. (`Refusals.protects` has one exception.)

A change of a name by this mount moves the ctime, as a change by another node would. Open files continue with the new
ctime, and fetches that see it wait until the change has been made (`LastChanges.under_way`). It would hide an earlier
change by another node, so immutable files are compared just before. Open handles read a file that has lost its name.
"""

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TypeVar

from cachefs.errors import failed
from cachefs.fs.attributes import Changes
from cachefs.fs.descriptors import Descriptors
from cachefs.fs.handles import close_opened, closed_on_error
from cachefs.fs.listing_comparison import ListingComparisons
from cachefs.fs.names import FileSystem
from cachefs.fs.refusals import Refusals
from cachefs.metadata import inode_values
from cachefs.metadata.inode_paths import MOST_NAMES, links_if
from cachefs.source.credentials import CAP_SETFCAP, Caller, unknown_writer
from cachefs.source.directories import Directory
from cachefs.source.identity import Changed, Renamed
from cachefs.source.writes import SourceWriter
from cachefs.store.index.records import PINNED, WRITTEN, Inode
from cachefs.system import syscalls
from cachefs.system.stat import Stat

T = TypeVar("T")
RENAME_EXCHANGE = 2
_CAPABILITY = b"security.capability"


class Mutations:
    def __init__(
        self, filesystem: FileSystem, descriptors: Descriptors, listings: ListingComparisons, refusals: Refusals
    ) -> None:
        # dependencies
        self._fs = filesystem
        self._metadata = filesystem.metadata
        self._descriptors = descriptors
        self._listings = listings
        self._refusals = refusals
        self._source = SourceWriter(filesystem.source)
        self._changing = filesystem.late_changes.changing
        self._version = filesystem.immutability.version

    def _check_writable(self, number: int | None = None, *, writer: Caller | None = None) -> bool:
        """`writer`: of a change of the contents. Then an immutable result becomes mutable. Returns whether it did: what
        the kernel knows of it may be outdated."""
        if self._fs.options.read_only:
            raise failed(errno.EROFS)
        if number is None or not self._fs.immutability.refuses_changes(self._fs.inode(number)):
            return False
        if writer is not None and self._fs.invalidation.release_result(number):
            return True
        self._refusals.immutable(number, writer)
        raise failed(errno.EPERM)

    async def _run(
        self,
        caller: Caller,
        number: int,
        function: Callable[[], T],
        *,
        names_in: tuple[int, ...],
        objects: tuple[int, ...] = (),
        discard: Callable[[T], object] | None = None,
    ) -> T:
        """Change names in the directories `names_in` of the source, for an inode. `objects`: what the names lead to."""
        await self._fs.before_names_change(caller, *names_in)
        async with self._changing(number, *names_in, *objects) as change:
            return await self._fs.ask(number, change(function), discard=discard, once=True)

    def _own_change(self, *changed: tuple[int, Stat]) -> None:
        """Record the new attributes of directories and inodes that this mount has just changed."""
        for number, now in changed:
            self._store(number, now)
            self._listings.changed(number)

    def _store(self, number: int, now: Stat, *, written: bool = False, is_told: bool = False) -> None:
        """Record the attributes of an inode after a change by this mount. If its data are the same, open files continue
        with the new attributes. `written`: the file stays mutable. `is_told`: the kernel gets them in the answer."""
        with self._metadata.index.update() as update:
            before = self._metadata.inode(update, number)
            after, dropped = self._metadata.apply_own_change(update, number, now)
            if before is not None and before.permissions != now.permissions:
                inode_values.drop(update, number)  # a chmod changes the ACL, too
            if before is not None and after is not None and not is_told:
                self._fs.permissions.changed_here(update, before, after, now)
            if after is not None and written:
                self._metadata.put_inode(update, after.written())
        self._fs.notifier.drop_soon(dropped)
        if after is not None and (file := self._descriptors.shared.get(number, after.version)) is not None:
            file.inode = after

    async def _compare(self, number: int) -> None:
        """This mount has removed a name of an inode: compare the inode by another name, or by a descriptor."""
        with self._metadata.index.view() as view:
            link = self._metadata.paths.name(view, number)
            directory = self._metadata.paths.directory(view, link[0]) if link is not None else None
        if link is not None and directory is not None:
            try:
                self._store(number, await self._fs.call_pool.run(partial(self._fs.source.lstat, directory, link[1])))
            except OSError:  # the change of this mount has been made, whatever has become of the other name
                self._fs.invalidation.replaced(number)
            return
        async with self._descriptors.descriptor(number, True) as use:
            if use is not None:
                with suppress(OSError):  # bindfs -o hard_remove does not know an open file without a name
                    self._store(number, await use(self._fs.source.fstat))
                    return
        with self._metadata.index.update() as update:
            self._metadata.lost_name(update, number)

    async def _follow_names(self, *numbers: int) -> None:
        """This mount has given these inodes other names, and recorded their new attributes (mutable_names.py)."""
        for number in await self._fs.invalidation.follow_names(numbers):
            self._descriptors.shared.make_mutable(number)

    def _names_changed(self, *names: tuple[int, bytes]) -> None:
        """This mount has changed what these names lead to: answers to calls that are under way are outdated."""
        for parent, name in names:
            self._fs.overtake(parent, name)
            self._listings.overtake(parent, name)

    def _added(self, parent: int, name: bytes, now: Stat, directory: Stat) -> Inode:
        with self._metadata.index.update() as update:
            inode = self._metadata.apply_stat(update, parent, name, now, pin=False)
            if inode.is_regular:
                # A new inode, even if its number is not new: nothing of it is cached yet.
                inode = inode._replace(flags=inode.flags | WRITTEN, lookups=inode.lookups + 1)
                self._metadata.put_inode(update, inode)
        self._own_change((parent, directory))
        self._names_changed((parent, name))
        return inode

    # --- files -----------------------------------------------------------------------------------------------------

    async def create(self, parent: int, name: bytes, mode: int, flags: int, caller: Caller) -> tuple[int, Inode]:
        """A handle of the new file, and its inode."""
        self._check_writable()
        generation = self._fs.source.generation
        call = partial(self._source.create, self._fs.directory(parent), name, flags, stat.S_IMODE(mode), caller)
        try:
            fd, now, directory = await self._run(caller, parent, call, names_in=(parent,), discard=close_opened)
        except Changed as error:
            if not error.directory and not isinstance(error, Renamed):
                self._fs.invalidation.drop_name(parent, name)
            raise
        inode = self._added(parent, name, now, directory)
        return self._descriptors.add_source_handle(inode.number, fd, flags, caller.identity(), generation), inode

    async def open_for_writing(self, number: int, flags: int, caller: Caller) -> int:
        if self._check_writable(number, writer=caller):
            await self._fs.notifier.drop((), [number])  # the size: the writer may append
        call = partial(self._source.open_file, flags=flags, caller=caller)
        generation = self._fs.source.generation
        if flags & os.O_TRUNC and self._fs.immutability.has_writers(number):
            # For O_TRUNC, unlike for truncate(2), the kernel does not wait for writeback of a shared mapping: late
            # pages would give the file a size again.
            await self._fs.notifier.drop((), [number])
        async with self._changing(number) as change:  # a late one may remove a name
            with self._opening_for_writing(number):
                await self._compare_names(number, caller, most=None)
                await self._fs.before_object_changes(caller, number)
                opening = change(call) if flags & os.O_TRUNC else call
                fd, now = await self._descriptors.ask_object(number, opening, discard=close_opened, changer=caller)
        with closed_on_error(fd):
            self._check_writable(number, writer=caller)
        with self._metadata.index.update() as update:
            if (inode := self._metadata.inode(update, number)) is not None:
                self._metadata.put_inode(update, inode.written()._replace(expires_ns=0))
        if inode is not None and inode.size != now.size:
            self._fs.notifier.attributes(number)  # read and lseek ask for the size then
        await self._fs.invalidation.overwritten(number)
        return self._descriptors.add_source_handle(number, fd, flags, caller.identity(), generation)

    @contextmanager
    def _opening_for_writing(self, number: int) -> Iterator[None]:
        """Around a change of the contents by a path. A process may have the file open since it was immutable, and
        shares its pages in the kernel with the writer: what it reads from now on is what the source has."""
        with self._fs.immutability.opening_for_writing(number):
            self._descriptors.shared.make_mutable(number)
            yield

    async def _compare_names(
        self, number: int, caller: Caller, most: int | None = MOST_NAMES, link: tuple[int, bytes] | None = None
    ) -> None:
        """Before a file is changed or linked: the kernel does not say by which name. Raises ESTALE if one leads
        elsewhere, or was lost a moment ago, so that the kernel looks up the one that it has, and repeats the call."""
        least = 1 if self._fs.immutability.has_writers(number) else 2  # the call by the only name compares it
        names = islice(links_if(self._metadata.index, number, least=least), most)
        found = [await self._fs.compare(*name) for name in names]
        is_lost = any(each is None or each.number != number for each in found)
        if is_lost or not self._fs.repetitions.is_by_present_name(number, caller, link=link):
            raise failed(errno.ESTALE)

    async def write(self, handle: int, offset: int, data: bytes) -> int:
        opened = self._descriptors.handle(handle)
        if not opened.writable:
            raise failed(errno.EBADF)
        writer = opened.writer or unknown_writer()
        with self._metadata.changes.writing(opened.number):
            async with self._changing(opened.number) as change:
                write = change(lambda fd: self._source.pwrite(fd, data, offset, writer, whole=opened.is_direct))
                return await self._descriptors.change(opened, write)

    async def fsync(self, handle: int, data_only: bool) -> None:
        if self._fs.options.read_only:
            return  # nothing is written, and where OPEN is never sent there is no handle
        opened = self._descriptors.handle(handle)
        if opened.writable:
            await self._descriptors.sync(opened, partial(self._source.fsync, data_only=data_only))

    async def fsync_directory(self, number: int) -> None:
        if not self._fs.options.read_only:
            await self._fs.ask(number, partial(self._source.fsync_directory, self._fs.directory(number)))

    # --- attributes ------------------------------------------------------------------------------------------------

    async def setattr(self, number: int, changes: Changes, handle: int | None, caller: Caller) -> Inode:
        """The kernel takes over the size that is in the answer. So the source is asked even if nothing changes, by
        chown(-1, -1) and before a write that will clear set-user-ID bits."""
        self._check_writable(number, writer=None if changes.size is None else caller)
        opened = self._descriptors.handles.get(handle) if handle is not None else None
        if opened is None:
            await self._fs.before_object_changes(caller, number)
        mode = None if changes.mode is None else stat.S_IMODE(changes.mode)
        if mode is not None and self._comes_with_a_write(number, mode, caller):  # asked before the bits are cleared
            mode = None
        if changes.size is not None:
            size = changes.size
            if opened is not None and opened.writable:
                async with self._changing(number) as change:
                    truncate = change(lambda fd: self._source.ftruncate(fd, size, caller))
                    now = await self._descriptors.change(opened, truncate)
            else:
                call = partial(self._source.truncate, size=changes.size, caller=caller)
                async with self._changing(number) as change:
                    await self._compare_names(number, caller, most=None)
                    with self._opening_for_writing(number):
                        self._check_writable(number, writer=caller)  # it may have become immutable since
                        now = await self._descriptors.ask_object(number, change(call), once=True, changer=caller)
            self._store(number, now, written=True, is_told=True)
            await self._fs.invalidation.overwritten(number)
        if mode is not None:
            await self._change(caller, "chmod", number, lambda name: os.chmod(name, mode))
        if changes.uid is not None or changes.gid is not None:
            uid, gid = (-1 if each is None else each for each in (changes.uid, changes.gid))
            await self._change(caller, "chown", number, lambda name: os.chown(name, uid, gid))
        if changes.atime_ns is not None or changes.mtime_ns is not None:
            atime, mtime = changes.times(owns=self._owns(caller, self._fs.inode(number)))
            await self._change(caller, "utimens", number, lambda name: syscalls.utimensat(name.encode(), atime, mtime))
        if replace(changes, mode=mode, now=None) == Changes():
            await self._change(caller, "lstat", number, lambda name: None)
        if self._descriptors.has_readers(number):  # hazard 99
            if changes.size is None:
                await self._fs.notifier.drop((), [number])
            else:  # until the answer the kernel writes no dirty page, and so drops none
                self._fs.notifier.drop_soon((), [number])
        return self._fs.inode(number)

    def _owns(self, caller: Caller, inode: Inode) -> bool:
        """May the caller do what only the owner may?"""
        identity = caller.identity()
        return identity.uid == inode.uid or identity.overrides_owner

    def _comes_with_a_write(self, number: int, mode: int, caller: Caller) -> bool:
        """Is this chmod the one by which the kernel clears set-user-ID bits before a write or truncation?

        Without the fast path the kernel sends it, as the writer. It refuses a chmod by a user who is not the owner. The
        source clears the bits with the write itself, which is made without CAP_FSETID.
        """
        inode = self._fs.inode(number)
        before = stat.S_IMODE(inode.mode)
        only_clears = mode & ~before == 0 and before & ~mode & ~(stat.S_ISUID | stat.S_ISGID) == 0
        return only_clears and not self._owns(caller, inode)

    async def _change(
        self, caller: Caller, operation: str, number: int, make: Callable[[str], None], *, is_told: bool = True
    ) -> None:
        is_open = any(opened.number == number for opened in self._descriptors.handles.values())  # it may be an fchmod
        call = partial(self._source.change, operation, make=make, caller=caller)
        async with self._changing(number) as change:
            if not is_open and not self._fs.inode(number).is_directory:
                await self._compare_names(number, caller)
            with self._fs.immutability.opening_for_writing(number):  # a reader would have the file as it was before
                self._check_writable(number)  # it may have become immutable since
                now = await self._descriptors.ask_object(number, change(call), once=True)
        self._store(number, now, is_told=is_told)

    async def setxattr(self, number: int, name: bytes, value: bytes, caller: Caller) -> None:
        self._check_writable(number)
        await self._change_xattr(caller, "setxattr", number, name, value)

    async def removexattr(self, number: int, name: bytes, caller: Caller) -> None:
        self._check_writable(number)
        if name == _CAPABILITY and not caller.identity().capabilities & CAP_SETFCAP:
            # This comes from the kernel, before a write, truncation or chown that the caller may make; it refuses a
            # removexattr by such a caller itself. The source drops the capabilities with the change that follows.
            return
        await self._change_xattr(caller, "removexattr", number, name)

    async def _change_xattr(self, caller: Caller, operation: str, number: int, name: bytes, *value: bytes) -> None:
        await self._fs.before_object_changes(caller, number)
        is_acl = name == inode_values.ACL  # the kernel has dropped its attributes, because this may change the mode
        change = getattr(os, operation)
        await self._change(caller, operation, number, lambda target: change(target, name, *value), is_told=is_acl)
        if is_acl:
            self._metadata.note_permissions(self._fs.inode(number))
        with self._metadata.index.update() as update:
            inode_values.drop(update, number)

    # --- names -----------------------------------------------------------------------------------------------------

    async def _add(
        self, caller: Caller, operation: str, parent: int, name: bytes, make: Callable[[int], None]
    ) -> Inode:
        self._check_writable()
        call = partial(self._source.add, operation, self._fs.directory(parent), name, make, caller)
        now, directory = await self._run(caller, parent, call, names_in=(parent,))
        return self._added(parent, name, now, directory)

    async def mkdir(self, parent: int, name: bytes, mode: int, caller: Caller) -> Inode:
        return await self._add(caller, "mkdir", parent, name, lambda fd: os.mkdir(name, stat.S_IMODE(mode), dir_fd=fd))

    async def mknod(self, parent: int, name: bytes, mode: int, rdev: int, caller: Caller) -> Inode:
        return await self._add(caller, "mknod", parent, name, lambda fd: os.mknod(name, mode, rdev, dir_fd=fd))

    async def symlink(self, parent: int, name: bytes, target: bytes, caller: Caller) -> Inode:
        return await self._add(caller, "symlink", parent, name, lambda fd: os.symlink(target, name, dir_fd=fd))

    async def link(self, number: int, parent: int, name: bytes, caller: Caller) -> Inode:
        self._check_writable()
        await self._compare_names(number, caller, link=(parent, name))
        async with self._metadata.changes.under_way(number):
            at, version, new = self._fs.object_of(number), self._version(number), self._fs.directory(parent)
            call = partial(self._source.link, at, version, new, name, caller)
            now, directory = await self._run(caller, number, call, names_in=(parent,))
            self._own_change((number, now), (parent, directory))
        with self._metadata.index.update() as update:
            inode = self._metadata.apply_stat(update, parent, name, now, pin=False)
        self._names_changed((parent, name))
        await self._follow_names(number)
        return inode

    async def remove(self, parent: int, name: bytes, caller: Caller, *, is_directory: bool) -> None:
        """unlink or rmdir. An open immutable file stays readable (hazard 2)."""
        self._check_writable()
        number = self._number(parent, name)
        if number:
            inode = self._metadata.current(number)
            if inode and self._fs.immutability.refuses_changes(inode) and self._refusals.protects(number, caller):
                raise failed(errno.EPERM)
            await self._descriptors.keep_readable(number)
        async with self._metadata.changes.under_way(number):
            at, version = self._fs.directory(parent), self._version(number)
            call = partial(self._source.remove, at, name, version, caller, is_directory=is_directory)
            with self._losing(parent, name):
                directory = await self._run(caller, parent, call, names_in=(parent,), objects=(number,))
            with self._metadata.index.update() as update:
                self._metadata.remove_name(update, parent, name)
            self._own_change((parent, directory))
            self._names_changed((parent, name))
            if number:
                await self._compare(number)
                await self._follow_names(number)

    @contextmanager
    def _losing(self, parent: int, name: bytes) -> Iterator[None]:
        """Drop a recorded name if the change fails because the source does not have it."""
        try:
            yield
        except FileNotFoundError:
            if self._number(parent, name):
                self._fs.invalidation.drop_name(parent, name)
            raise

    def _pinned_name(self, parent: int, name: bytes, directory: Directory) -> list[tuple[Directory, bytes, Inode]]:
        """The directory, the name and its inode; nothing if the name is not pinned."""
        with self._metadata.index.view() as view:
            dentry = self._metadata.dentry(view, parent, name)
            inode = self._metadata.inode(view, dentry.inode) if dentry and dentry.flags & PINNED else None
        return [(directory, name, inode)] if inode is not None else []

    def _number(self, parent: int, name: bytes) -> int:
        """The number of the inode that a name leads to; 0 if not known."""
        with self._metadata.index.view() as view:
            dentry = self._metadata.dentry(view, parent, name)
        return dentry.inode if dentry is not None else 0

    async def rename(
        self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int, caller: Caller
    ) -> None:
        self._check_writable()
        moved, replaced = self._number(parent, name), self._number(new_parent, new_name)
        if not moved or (flags & RENAME_EXCHANGE and not replaced):
            raise failed(errno.ESTALE)  # a name was just dropped: the kernel looks it up again
        if replaced:
            await self._descriptors.keep_readable(replaced)
        if replaced and not flags & RENAME_EXCHANGE:
            await self._fs.invalidation.overwritten(replaced)
        async with self._metadata.changes.under_way(moved, replaced):
            old, new = self._fs.directory(parent), self._fs.directory(new_parent)
            expected = self._pinned_name(parent, name, old)
            expected += self._pinned_name(new_parent, new_name, new) if flags & RENAME_EXCHANGE else []
            versions = self._version(moved), self._version(replaced)
            call = partial(self._source.rename, old, name, new, new_name, flags, caller, expected, versions)
            with self._losing(parent, name):
                now, old_directory, new_directory = await self._run(
                    caller, parent, call, names_in=(parent, new_parent), objects=(moved, replaced)
                )
            with self._metadata.index.update() as update:
                if flags & RENAME_EXCHANGE:
                    self._metadata.swap_names(update, parent, name, new_parent, new_name)
                else:
                    self._metadata.move_name(update, parent, name, new_parent, new_name)
            self._own_change((parent, old_directory), (new_parent, new_directory), (moved, now))
            self._names_changed((parent, name), (new_parent, new_name))
            self._fs.invalidation.moved_by_kernel(
                (parent, name), (new_parent, new_name), both=bool(flags & RENAME_EXCHANGE)
            )
            if replaced:
                await self._compare(replaced)
            await self._follow_names(moved, replaced)
        if parent != new_parent:
            for number in (moved, replaced):
                inode = self._metadata.current(number)
                if inode is not None and inode.is_directory:
                    self._fs.invalidation.doubt_beneath(number)

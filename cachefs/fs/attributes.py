"""Attributes: stat(2) of files that may be open, symlink targets, extended attributes, and the attributes of cachefs.

The value of a symlink or an extended attribute is fetched together with a stat. The stat is compared with the record,
as for data, and the value is kept if the inode is pinned. A file that is open is reached by its descriptor if its name
is gone, or leads to another file.

The source does not have the attributes `user.cachefs.*`. They and `info` show what is known and cached of an inode.
"""

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from cachefs.contract.index import Table
from cachefs.data.data_cache import DataCache
from cachefs.data.young_files import YoungFiles
from cachefs.errors import failed
from cachefs.fs.descriptors import Descriptors, Use
from cachefs.fs.names import Entry, FileSystem
from cachefs.metadata import inode_values
from cachefs.source.credentials import Caller
from cachefs.source.identity import Changed
from cachefs.source.source import Object
from cachefs.store.index.records import LISTED, STALE, UNLINKED, Inode
from cachefs.system.clock import NANOSECONDS
from cachefs.system.stat import Stat
from cachefs.system.syscalls import UTIME_NOW, UTIME_OMIT
from cachefs.system.user_namespace import acl_of_nobody

MAX_EXTENTS = 256
"""How many extents `info` lists of one file."""
VIRTUAL = b"user.cachefs."
"""The prefix of extended attributes that the source does not have."""
_USUAL_NAMESPACES = (b"security.", b"system.", b"trusted.", b"user.")


@dataclass(frozen=True, slots=True)
class Changes:
    """The attributes to set. None: leave as it is.

    `now`: whether atime, and mtime, shall become the present time of the source. None: not known.
    """

    size: int | None = None
    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    atime_ns: int | None = None
    mtime_ns: int | None = None
    now: tuple[bool, bool] | None = None

    def times(self, *, owns: bool) -> tuple[tuple[int, int], tuple[int, int]]:
        """The arguments of utimensat for atime and mtime. `owns`: may the caller do what only the owner may?

        pyfuse3 does not pass on whether a time is "now"; the fast path does. Without it, a caller that neither owns the
        file nor has CAP_FOWNER means "now": the kernel allows nothing else.
        """
        now = self.now or (not owns,) * 2
        atime, mtime = (
            (0, UTIME_OMIT) if time_ns is None else (0, UTIME_NOW) if is_now else divmod(time_ns, NANOSECONDS)
            for time_ns, is_now in zip((self.atime_ns, self.mtime_ns), now, strict=True)
        )
        return atime, mtime


@dataclass(eq=False)
class Attributes:
    # dependencies
    fs: FileSystem
    descriptors: Descriptors
    data: DataCache
    young: YoungFiles
    # state
    known_statfs: os.statvfs_result | None
    """Of the source. None: not known. Only a mount that pins everything uses it."""

    def __post_init__(self) -> None:
        self._metadata = self.fs.metadata

    async def getattr(self, number: int) -> Entry:
        async with self.descriptors.descriptor(number, bool(self.fs.inode(number).flags & UNLINKED)) as use:
            if use is not None:
                return await self._getattr_open(number, use)
        try:
            inode = await self.fs.revalidated(number, is_getattr=True)
        except OSError as error:
            async with self.descriptors.without_name(number, error) as use:
                return await self._getattr_open(number, use)
        return Entry(inode, self.fs.timeout_s(inode))

    async def _getattr_open(self, number: int, use: Use) -> Entry:
        """By a descriptor: the name may be gone, or lead to another file by now."""
        now = await use(self.fs.source.fstat)
        inode = self.fs.inode(number)
        if not self.descriptors.shared.keeps_version(inode):
            self._metadata.note_change(inode, now)
            inode = inode.with_stat(now)
            with self._metadata.index.update() as update:
                self._metadata.put_inode(update, inode)
        elif inode.same_data(now):
            self._metadata.note_change(inode, now)
            inode = inode.with_stat(now)  # shown, and not recorded: data are compared with the recorded ctime
        elif inode.flags & STALE:
            raise failed(errno.ESTALE)
        return Entry(inode, 0.0 if inode.flags & UNLINKED else min(1.0, self.fs.options.unpinned_timeout_s))

    async def statfs(self) -> os.statvfs_result:
        """Pinned on mounts that pin everything: they are read-only, and each `find` begins with a statfs."""
        if self.known_statfs is None or not self.fs.options.pins_everything:
            self.known_statfs = await self.fs.call_pool.run(self.fs.source.statfs)
        return self.known_statfs

    # --- symlinks and extended attributes --------------------------------------------------------------------------

    async def readlink(self, number: int) -> bytes:
        inode = await self.fs.revalidated(number)
        if inode.is_young:  # the kernel keeps the target as a page
            self.young.was_read(inode)
        return await self._value(Table.SYMLINKS, inode, b"", self.fs.source.readlink)

    async def _value(self, table: Table, inode: Inode, name: bytes, read: Callable[[Object], bytes]) -> bytes:
        """A value of an inode: the cached one, or else fetched. Extended attributes are cached if it is pinned."""
        value = None
        if table is Table.SYMLINKS or self._metadata.is_pinned(inode):
            with self._metadata.index.view() as view:
                value = inode_values.get(view, table, inode, name)
        return await self._fetch_value(table, inode.number, name, read) if value is None else value

    async def _fetch_value(self, table: Table, number: int, name: bytes, read: Callable[[Object], bytes]) -> bytes:
        """Fetch a value that is not cached, compare it with the record as for data, and keep it if the inode is pinned.

        The comparison matters: the mode of one version and the ACL of another could together admit users whom neither
        version admits. An open file that has lost its name is asked by a descriptor, whatever has changed (ON-1). But
        if it is pinned and was moved at the source, the request may have come by the path: the kernel must look it up.
        """

        def fetch(at: Object) -> tuple[bytes, Stat, bool]:
            return *self.fs.source.with_stat(at, read), at.fd >= 0

        while True:
            before = self.fs.inode(number)
            value, now, is_lent = await self.descriptors.ask_object(number, fetch)
            inode = self.fs.inode(number)
            if now.ctime_ns == inode.ctime_ns:
                break
            if is_lent:
                if now.nlink and (self._metadata.is_pinned(inode) or self.descriptors.shared.keeps_version(inode)):
                    raise Changed
                return value
            own_change = self.fs.metadata.changes.end_of(number)
            if own_change is not None:
                await own_change.wait()
            elif before.ctime_ns == inode.ctime_ns:
                await self._other_version(inode, now, is_acl=name == inode_values.ACL)
                if now.ctime_ns < self.fs.inode(number).ctime_ns:
                    return value  # it is of before a change by this mount: later requests must not get it
                break
        with self._metadata.index.update() as update:
            current = self._metadata.inode(update, number)
            if (
                current is None
                or current.version != inode.version
                or self._metadata.hides_changes(current.ctime_ns, current.device)
            ):
                return value
            if name == inode_values.ACL and self._metadata.last_permissions_ns(number):
                return value  # the fast path would give it to a thread whose kernel has a former mode
            if self._metadata.is_pinned(current) and (
                value == inode_values.ABSENT or not self._is_for_some(current, name)
            ):
                inode_values.put(update, table, current, name, value)
        return value

    async def _other_version(self, inode: Inode, now: Stat, *, is_acl: bool) -> None:
        """A value belongs to another version than the record. Raises ESTALE if it must not be used.

        `is_acl`: the kernel combines it with the mode.
        """
        if inode.is_directory and self._metadata.is_pinned(inode):  # its times move with each name in it
            await self.fs.learnt_in(self.fs.directory(inode.number), now.ctime_ns)
        elif self._metadata.is_pinned(inode) or self.descriptors.shared.keeps_version(inode):
            error = Changed()
            self.fs.invalidation.modified_externally(inode, error)
            raise error
        else:
            await self.fs.learnt(inode.number, now)
            if inode.permissions != now.permissions:
                self._metadata.apply_fstat(inode.number, now)
                self.fs.notifier.attributes(inode.number)
                if is_acl:
                    raise failed(errno.ESTALE)

    async def _revalidated_or_open(self, number: int) -> Inode:
        """A valid inode; the last known one, if its name is gone and the file is open."""
        try:
            return await self.fs.revalidated(number)
        except OSError as error:
            async with self.descriptors.without_name(number, error):
                return self.fs.inode(number)

    async def getxattr(self, number: int, name: bytes, caller: Caller) -> bytes:
        """Raises ENODATA where there is no value: also if the source has no extended attributes at all (hazard 18).

        Raises EOPNOTSUPP for a namespace that only some filesystems have, and the source does not. The kernel lets
        everyone read what is in `security.`; a FUSE source may not: there each caller is asked for.

        The kernel keeps an ACL, and combines it with the mode and the owners that it has, or had a moment ago, also for
        other processes. So if that may be another mode than that of this version, a mode without an ACL is given as an
        ACL. Raises ESTALE if the owners may be other ones, too.
        """
        inode = await self._revalidated_or_open(number)
        value = await self._value(Table.XATTRS, inode, name, partial(self._read_xattr, name))
        if name == inode_values.ACL and self._metadata.last_permissions_ns(number):
            if not self.fs.repetitions.has_owners(number, caller):
                await self.fs.repetitions.refuse_former_mode(number, caller)
            if value == inode_values.ABSENT:
                return inode_values.acl_of(self.fs.inode(number).mode)
        if value == inode_values.ABSENT:
            raise failed(errno.ENODATA)
        is_by_former_mode = name.startswith(b"user.") and not self.fs.repetitions.has_mode(number, caller)
        if is_by_former_mode or self._is_for_some(inode, name):
            read = partial(self.fs.source.getxattr, name=name, run=caller.run)
            return await self.descriptors.ask_object(number, read)
        return value[1:]

    def _is_for_some(self, inode: Inode, name: bytes) -> bool:
        """May the source refuse this extended attribute to users whom the kernel lets read it?"""
        return name.startswith(b"security.") and (self.fs.source.checks_attributes or inode.device != 0)

    def _read_xattr(self, name: bytes, at: Object) -> bytes:
        """As `inode_values` keeps it. In a thread."""
        try:
            value = self.fs.source.getxattr(at, name)
            if name.startswith(b"system.posix_acl_") and self.fs.source.connection.volumes.with_nobody:
                value = acl_of_nobody(value, self.fs.source.fstat(at.fd))
            return inode_values.KNOWN + value
        except OSError as error:
            is_unusual = error.errno == errno.EOPNOTSUPP and not name.startswith(_USUAL_NAMESPACES)
            if is_unusual or error.errno not in inode_values.NO_VALUE:
                raise
            return inode_values.ABSENT

    def _list_xattrs(self, at: Object) -> bytes:
        """As `inode_values` keeps them. In a thread."""
        try:
            return inode_values.KNOWN + b"\0".join(self.fs.source.listxattr(at))
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            return inode_values.KNOWN

    async def listxattr(self, number: int) -> list[bytes]:
        value = await self._value(Table.XATTRS, await self._revalidated_or_open(number), b"", self._list_xattrs)
        return [name for name in value[1:].split(b"\0") if name]

    # --- what is known and cached ----------------------------------------------------------------------------------

    async def info(self, path: bytes) -> dict[str, Any]:
        """docs/CONTROL.md has the fields."""
        inode = await self.fs.resolve(path)
        answer: dict[str, Any] = {
            "path": path.decode(errors="surrogateescape"),
            "inode": inode.number,
            "type": "directory" if inode.is_directory else "file" if inode.is_regular else "other",
            "size": inode.size,
            "mtime_ns": inode.mtime_ns,
            "state": self.fs.immutability.state(inode),
            "validated_run": inode.validated_run,
            "validated_ns": self._metadata.index.run_started_ns(inode.validated_run),
            "is_valid": bool(self._metadata.remaining_ns(inode)),
        }
        if inode.is_directory:
            answer["is_listed"] = bool(inode.flags & LISTED)
        if inode.is_regular:
            with self._metadata.index.view() as view:
                found = [(o, e) for o, e in view.extents.of(inode.number) if e.version == inode.version]
            answer["cached_bytes"] = self.cached_bytes(inode)
            answer["extents"] = [
                {"offset": offset, "length": extent.length, "blob_offset": extent.blob_offset}
                for offset, extent in found[:MAX_EXTENTS]
            ]
            answer["extent_count"] = len(found)
        return answer

    def cached_bytes(self, inode: Inode) -> int:
        """How many bytes of a file are in the blob, or wait to be written there."""
        cached, offset = 0, 0
        with self._metadata.index.view() as view:
            starts = sorted({0, *self.data.starts_between(view, inode, 0, inode.size)})
            for start in starts:
                found = self.data.range_at(view, inode, max(start, offset)) if start < inode.size else None
                if found is not None and found[1] > offset:
                    cached += found[1] - max(found[0], offset)
                    offset = found[1]
        return cached

    def virtual(self, number: int, name: bytes) -> bytes:
        """An extended attribute of cachefs itself. Raises ENODATA if there is none of that name."""
        inode = self.fs.inode(number)
        if name == VIRTUAL + b"state":
            return self.fs.immutability.state(inode).encode()
        if name == VIRTUAL + b"cached_bytes" and inode.is_regular:
            return str(self.cached_bytes(inode)).encode()
        if name == VIRTUAL + b"validated_run":
            return str(inode.validated_run).encode()
        if name == VIRTUAL + b"validated_ns":
            return str(self._metadata.index.run_started_ns(inode.validated_run)).encode()
        raise OSError(errno.ENODATA, "no such attribute")

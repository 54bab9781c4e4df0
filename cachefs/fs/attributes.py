"""Attributes: stat(2) of files that may be open, symlink targets, extended attributes, and the attributes of cachefs.

The value of a symlink or an extended attribute is fetched together with a stat. The stat is compared with the record,
as for data, and the value is kept if the inode is pinned. A file that is open is reached by its descriptor if its name
is gone, or leads to another file.

The source does not have the attributes `user.cachefs.*`. They and `info` show what is known and cached of an inode.
"""

import errno
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from cachefs.contract.index import Table
from cachefs.data.data_cache import DataCache
from cachefs.fs import permissions
from cachefs.fs.descriptors import Descriptors, Use
from cachefs.fs.names import Entry, FileSystem, failed
from cachefs.metadata import inode_values
from cachefs.source.identity import Changed
from cachefs.source.source import Object
from cachefs.store.index.records import LISTED, UNLINKED, Inode
from cachefs.system.stat import Stat

MAX_EXTENTS = 256
"""How many extents `info` lists of one file."""
VIRTUAL = b"user.cachefs."
"""The prefix of extended attributes that the source does not have."""
_USUAL_NAMESPACES = (b"security.", b"system.", b"trusted.", b"user.")


class Attributes:
    def __init__(
        self,
        filesystem: FileSystem,
        descriptors: Descriptors,
        data: DataCache,
        statfs: os.statvfs_result | None = None,
    ) -> None:
        """`statfs`: of the source, if it is known already. A mount that pins everything keeps it."""
        # dependencies
        self._fs = filesystem
        self._metadata = filesystem.metadata
        self._descriptors = descriptors
        self._data = data
        # state
        self._pinned_statfs = statfs if filesystem.options.pins_everything else None

    async def getattr(self, number: int) -> Entry:
        async with self._descriptors.descriptor(number, bool(self._fs.inode(number).flags & UNLINKED)) as use:
            if use is not None:
                return await self._getattr_open(number, use)
        try:
            inode = await self._fs.revalidated(number)
        except OSError as error:
            async with self._descriptors.without_name(number, error) as use:
                return await self._getattr_open(number, use)
        return Entry(inode, self._fs.timeout_s(inode))

    async def _getattr_open(self, number: int, use: Use) -> Entry:
        """By a descriptor: the name may be gone, or lead to another file by now."""
        now = await use(self._fs.source.fstat)
        inode = self._fs.inode(number).with_stat(now)
        with self._metadata.index.update() as update:
            self._metadata.put_inode(update, inode)
        return Entry(inode, 0.0 if inode.flags & UNLINKED else min(1.0, self._fs.options.unpinned_timeout_s))

    async def statfs(self) -> os.statvfs_result:
        """Pinned on mounts that pin everything: they are read-only, and each `find` begins with a statfs."""
        found = self._pinned_statfs
        if found is None:
            found = await self._fs.call_pool.run(self._fs.source.statfs)
            self._pinned_statfs = found if self._fs.options.pins_everything else None
        return found

    # --- symlinks and extended attributes --------------------------------------------------------------------------

    async def readlink(self, number: int) -> bytes:
        return await self._value(Table.SYMLINKS, await self._fs.revalidated(number), b"", self._fs.source.readlink)

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
        version admits.
        """
        while True:
            before = self._fs.inode(number)
            value, now = await self._descriptors.ask_object(number, lambda at: self._fs.source.with_stat(at, read))
            inode = self._fs.inode(number)
            if now is None or now.ctime_ns == inode.ctime_ns:
                break
            own_change = self._fs.own_change_of(number)
            if own_change is not None:
                await own_change.wait()
            elif before.ctime_ns == inode.ctime_ns:
                await self._other_version(inode, now, whole=name != permissions.ACL)
                if now.ctime_ns < self._fs.inode(number).ctime_ns:
                    return value  # it is of before a change by this mount: later requests must not get it
                break
        with self._metadata.index.update() as update:
            current = self._metadata.inode(update, number)
            if current is not None and current.version == inode.version and self._metadata.is_pinned(current):
                inode_values.put(update, table, current, name, value)
        return value

    async def _other_version(self, inode: Inode, now: Stat, *, whole: bool) -> None:
        """A value belongs to another version than the record. Raises ESTALE if it must not be used.

        `whole`: the value does not depend on others. Otherwise the kernel combines it with the mode.
        """
        if inode.is_directory and self._metadata.is_pinned(inode):  # its times move with each name in it
            await self._fs.learnt_in(self._fs.directory(inode.number), now.ctime_ns)
        elif self._metadata.is_pinned(inode):
            error = Changed()
            self._fs.invalidation.modified_externally(inode, error)
            raise error
        elif not whole and inode.permissions != now.permissions:
            self._metadata.apply_fstat(inode.number, now)
            self._fs.notifier.attributes(inode.number)
            raise failed(errno.ESTALE)

    async def _revalidated_or_open(self, number: int) -> Inode:
        """A valid inode; the last known one, if its name is gone and the file is open."""
        try:
            return await self._fs.revalidated(number)
        except OSError as error:
            async with self._descriptors.without_name(number, error):
                return self._fs.inode(number)

    async def getxattr(self, number: int, name: bytes) -> bytes:
        """Raises ENODATA where there is no value: also if the source has no extended attributes at all (hazard 18).

        Raises EOPNOTSUPP for a namespace that only some filesystems have, and the source does not.
        """
        inode = await self._revalidated_or_open(number)
        value = await self._value(Table.XATTRS, inode, name, partial(self._read_xattr, name))
        if value == inode_values.ABSENT:
            raise failed(errno.ENODATA)
        return value[1:]

    def _read_xattr(self, name: bytes, at: Object) -> bytes:
        """As `inode_values` keeps it. In a thread."""
        try:
            return inode_values.KNOWN + self._fs.source.getxattr(at, name)
        except OSError as error:
            is_unusual = error.errno == errno.EOPNOTSUPP and not name.startswith(_USUAL_NAMESPACES)
            if is_unusual or error.errno not in inode_values.NO_VALUE:
                raise
            return inode_values.ABSENT

    def _list_xattrs(self, at: Object) -> bytes:
        """As `inode_values` keeps them. In a thread."""
        try:
            return inode_values.KNOWN + b"\0".join(self._fs.source.listxattr(at))
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
        inode = await self._fs.resolve(path)
        answer: dict[str, Any] = {
            "path": path.decode(errors="surrogateescape"),
            "inode": inode.number,
            "type": "directory" if inode.is_directory else "file" if inode.is_regular else "other",
            "size": inode.size,
            "mtime_ns": inode.mtime_ns,
            "state": self._fs.immutability.state(inode),
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
            starts = sorted({0, *self._data.starts_between(view, inode, 0, inode.size)})
            for start in starts:
                found = self._data.range_at(view, inode, max(start, offset)) if start < inode.size else None
                if found is not None and found[1] > offset:
                    cached += found[1] - max(found[0], offset)
                    offset = found[1]
        return cached

    def virtual(self, number: int, name: bytes) -> bytes:
        """An extended attribute of cachefs itself. Raises ENODATA if there is none of that name."""
        inode = self._fs.inode(number)
        if name == VIRTUAL + b"state":
            return self._fs.immutability.state(inode).encode()
        if name == VIRTUAL + b"cached_bytes" and inode.is_regular:
            return str(self.cached_bytes(inode)).encode()
        if name == VIRTUAL + b"validated_run":
            return str(inode.validated_run).encode()
        if name == VIRTUAL + b"validated_ns":
            return str(self._metadata.index.run_started_ns(inode.validated_run)).encode()
        raise OSError(errno.ENODATA, "no such attribute")

"""Attributes: stat(2) of files that may be open, symlink targets, extended attributes, and what cachefs adds to them.

The value of a symlink or an extended attribute is fetched with a stat of the same moment, compared with the record as
data are, and kept with it if the record is pinned. A name that is gone, or leads to another file by now, says nothing
of a file that is open: its descriptor does.

`user.cachefs.*` are not the source's: they and `info` tell what is known and cached of an inode.
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
"""So many are told of one file."""
VIRTUAL = b"user.cachefs."
"""Extended attributes with this prefix are not the source's."""
_USUAL_NAMESPACES = (b"security.", b"system.", b"trusted.", b"user.")


class Attributes:
    def __init__(
        self,
        filesystem: FileSystem,
        descriptors: Descriptors,
        data: DataCache,
        statfs: os.statvfs_result | None = None,
    ) -> None:
        """`statfs`: of the source, where it is known already. A mount that pins everything keeps it."""
        # dependencies
        self._fs = filesystem
        self._metadata = filesystem.metadata
        self._source = filesystem.source
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
            return Entry(inode, self._fs.timeout_s(inode))
        except OSError as error:
            async with self._descriptors.descriptor(number, True) as use:
                if error.errno != errno.ESTALE or use is None:
                    raise
                return await self._getattr_open(number, use)

    async def _getattr_open(self, number: int, use: Use) -> Entry:
        """The name may be gone, or lead to another file by now; the descriptor cannot."""
        now = await use(self._source.fstat)
        inode = self._fs.inode(number).with_stat(now)
        with self._metadata.index.update() as update:
            self._metadata.put_inode(update, inode)
        return Entry(inode, 0.0 if inode.flags & UNLINKED else min(1.0, self._fs.options.unpinned_timeout_s))

    async def statfs(self) -> os.statvfs_result:
        """Pinned on mounts that pin whatever they see: nobody writes there, and `find` asks for it first thing."""
        found = self._pinned_statfs
        if found is None:
            found = await self._fs.call_pool.run(self._source.statfs)
            self._pinned_statfs = found if self._fs.options.pins_everything else None
        return found

    # --- symlinks and extended attributes --------------------------------------------------------------------------

    async def readlink(self, number: int) -> bytes:
        inode = await self._fs.revalidated(number)
        with self._metadata.index.view() as view:
            target = inode_values.get(view, Table.SYMLINKS, inode)
        if target is None:
            target = await self._fetch_value(Table.SYMLINKS, number, b"", self._source.readlink)
        return target

    async def _fetch_value(self, table: Table, number: int, name: bytes, read: Callable[[Object], bytes]) -> bytes:
        """A value that is not known yet: it is compared with the record, as data are, and kept if that is pinned.

        With the mode of one version the ACL of another would let in whom neither of them lets in.
        """
        while True:
            before = self._fs.inode(number)
            value, now = await self._descriptors.ask_object(number, lambda at: self._source.with_stat(at, read))
            inode = self._fs.inode(number)
            if now is None or now.ctime_ns == inode.ctime_ns:
                break
            own_change = self._fs.own_change_of(number)
            if own_change is not None:
                await own_change.wait()
            elif before.ctime_ns == inode.ctime_ns:
                await self._other_version(inode, now, whole=name != permissions.ACL)
                if now.ctime_ns < self._fs.inode(number).ctime_ns:
                    return value  # of before a change by this mount: not for those who come later
                break
        self._keep(table, inode, name, value)
        return value

    async def _other_version(self, inode: Inode, now: Stat, *, whole: bool) -> None:
        """Raises ESTALE where an object has changed so that a value of it does not belong to its record.

        `whole`: the value stands for itself; else the kernel combines it with the mode.
        """
        if inode.is_directory and self._metadata.is_pinned(inode):  # its times move with each name in it
            await self._fs.learnt_in(self._fs.directory(inode.number), now.ctime_ns)
        elif self._metadata.is_pinned(inode):
            error = Changed()
            self._fs.invalidation.changed_behind_our_back(inode, error)
            raise error
        elif not whole and inode.permissions != now.permissions:
            self._metadata.saw(inode.number, now)
            self._fs.notifier.attributes(inode.number)
            raise failed(errno.ESTALE)

    def _keep(self, table: Table, inode: Inode, name: bytes, value: bytes) -> None:
        """Pin a value that was fetched, if it is still that version's."""
        with self._metadata.index.update() as update:
            now = self._metadata.inode(update, inode.number)
            if now is not None and now.version == inode.version and self._metadata.is_pinned(now):
                inode_values.put(update, table, now, name, value)

    async def _revalidated_or_open(self, number: int) -> Inode:
        """The record of an inode; as it was, where the name is gone and the file open."""
        try:
            return await self._fs.revalidated(number)
        except OSError as error:
            async with self._descriptors.descriptor(number, True) as use:
                if error.errno != errno.ESTALE or use is None:
                    raise
            return self._fs.inode(number)

    def _value(self, inode: Inode, name: bytes) -> bytes | None:
        """The cached xattr."""
        if not self._metadata.is_pinned(inode):
            return None
        with self._metadata.index.view() as view:
            return inode_values.get(view, Table.XATTRS, inode, name)

    async def getxattr(self, number: int, name: bytes) -> bytes:
        """ENODATA where there is none: also where the source has no extended attributes at all (hazard 18).

        EOPNOTSUPP for a name whose namespace only some filesystems have, and the source does not.
        """
        inode = await self._revalidated_or_open(number)
        cached = self._value(inode, name)
        if cached is None:
            cached = await self._fetch_value(Table.XATTRS, number, name, partial(self._read_xattr, name))
        if cached == inode_values.ABSENT:
            raise failed(errno.ENODATA)
        return cached[1:]

    def _read_xattr(self, name: bytes, at: Object) -> bytes:
        """As `values` keeps it. In a thread."""
        try:
            return inode_values.KNOWN + self._source.getxattr(at, name)
        except OSError as error:
            if error.errno not in inode_values.NO_VALUE:
                raise
            if error.errno == errno.EOPNOTSUPP and not name.startswith(_USUAL_NAMESPACES):
                raise
            return inode_values.ABSENT

    def _list_xattrs(self, at: Object) -> bytes:
        """As `values` keeps them. In a thread."""
        try:
            return inode_values.KNOWN + b"\0".join(self._source.listxattr(at))
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            return inode_values.KNOWN

    async def listxattr(self, number: int) -> list[bytes]:
        inode = await self._revalidated_or_open(number)
        cached = self._value(inode, b"")
        if cached is None:
            cached = await self._fetch_value(Table.XATTRS, number, b"", self._list_xattrs)
        return [name for name in cached[1:].split(b"\0") if name]

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
        """In the blob, or on their way there."""
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
        """One of cachefs's own extended attributes. ENODATA where there is none of that name."""
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

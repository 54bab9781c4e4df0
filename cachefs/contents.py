"""What is known of a path, and commands that change it: evict, pin, unpin, info."""

import errno
from collections.abc import Iterator, Sequence
from typing import Any

import trio

from cachefs.attributes import IMMUTABLE, LISTED, WRITTEN, Inode
from cachefs.data_cache import DataCache
from cachefs.errors import CacheFsError
from cachefs.filesystem import FileSystem

CHUNK = 256
"""How many inodes are looked at without letting other tasks run."""
FLUSH_TIMEOUT_S = 60.0
MAX_EXTENTS = 256
"""So many are told of one file."""
VIRTUAL = b"user.cachefs."
"""Extended attributes with this prefix are not the source's."""


class Contents:
    def __init__(self, filesystem: FileSystem, data: DataCache) -> None:
        self._fs = filesystem
        self._metadata = filesystem.metadata
        self._index = filesystem.metadata.index
        self._data = data

    # --- commands --------------------------------------------------------------------------------------------------

    async def evict(self, paths: Sequence[bytes]) -> tuple[int, int]:
        """Take the data beneath these paths out of the cache: (files, bytes). Returns when the room is free again."""
        await self._data.writes.settle(FLUSH_TIMEOUT_S)  # what is on its way is known by its extent afterwards
        files = size = 0
        for path in paths:
            for part in self._beneath(path):
                with self._index.view() as view:
                    for number in part:
                        dropped = self._data.drop(view, number)
                        size += dropped
                        files += dropped > 0
                await trio.lowlevel.checkpoint()
        await self._data.writes.settle(FLUSH_TIMEOUT_S)
        return files, size

    async def unpin(self, paths: Sequence[bytes]) -> int:
        """Let files be written to: the opposite of what their first opening did. How many there were."""
        if self._fs.options.read_only:
            raise CacheFsError("a read-only mount pins whatever it sees: evict, or invalidate")
        count = 0
        for path in paths:
            for part in self._beneath(path):
                count += await self._fs.make_mutable(part)
        return count

    def _beneath(self, path: bytes) -> Iterator[list[int]]:
        """Inodes that are known at a path and beneath it, in parts. The source is not asked."""
        waiting = [self._fs.known(path)]
        seen: set[int] = set()
        while waiting:
            part, waiting = waiting[-CHUNK:], waiting[:-CHUNK]
            with self._index.view() as view:
                for number in part:
                    inode = self._metadata.inode(view, number)
                    if inode is not None and inode.is_directory and number not in seen:
                        seen.add(number)
                        waiting += self._metadata.children(view, number)
            yield part

    # --- what is known ---------------------------------------------------------------------------------------------

    async def info(self, path: bytes) -> dict[str, Any]:
        """docs/CONTROL.md has the fields."""
        inode = await self._fs.resolve(path)
        answer: dict[str, Any] = {
            "path": path.decode(errors="surrogateescape"),
            "inode": inode.number,
            "type": "directory" if inode.is_directory else "file" if inode.is_regular else "other",
            "size": inode.size,
            "mtime_ns": inode.mtime_ns,
            "state": self.state(inode),
            "validated_run": inode.stamp,
            "validated_ns": self._index.run_started_ns(inode.stamp),
            "is_valid": bool(self._metadata.remaining_ns(inode)),
        }
        if inode.is_directory:
            answer["is_listed"] = bool(inode.flags & LISTED)
        if inode.is_regular:
            with self._index.view() as view:
                found = [(o, e) for o, e in view.extents.of(inode.number) if e.version == inode.version]
            answer["cached_bytes"] = self.cached_bytes(inode)
            answer["extents"] = [
                {"offset": offset, "length": extent.length, "blob_offset": extent.blob_offset}
                for offset, extent in found[:MAX_EXTENTS]
            ]
            answer["extent_count"] = len(found)
        return answer

    def state(self, inode: Inode) -> str:
        if inode.flags & WRITTEN:
            return "written"
        if self._metadata.is_pinned(inode):
            immutable = inode.is_regular and (inode.flags & IMMUTABLE or self._fs.options.pins_everything)
            return "immutable" if immutable else "pinned"
        with self._index.view() as view:
            return "mutable" if self._metadata.mutable_names.any(view, inode.number) else "unpinned"

    def cached_bytes(self, inode: Inode) -> int:
        """In the blob, or on their way there."""
        cached, offset = 0, 0
        with self._index.view() as view:
            starts = sorted({0, *self._data.starts_between(view, inode, 0, inode.size)})
            for start in starts:
                found = self._data.range_at(view, inode, max(start, offset)) if start < inode.size else None
                if found is not None and found[1] > offset:
                    cached += found[1] - max(found[0], offset)
                    offset = found[1]
        return cached

    async def attribute(self, number: int, name: bytes) -> bytes:
        """One of the virtual extended attributes. ENODATA where there is none of that name."""
        inode = self._fs.record(number)
        if name == VIRTUAL + b"state":
            return self.state(inode).encode()
        if name == VIRTUAL + b"cached_bytes" and inode.is_regular:
            return str(self.cached_bytes(inode)).encode()
        if name == VIRTUAL + b"validated_run":
            return str(inode.stamp).encode()
        if name == VIRTUAL + b"validated_ns":
            return str(self._index.run_started_ns(inode.stamp)).encode()
        raise OSError(errno.ENODATA, "no such attribute")

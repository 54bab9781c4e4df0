"""What the index keeps of an object: `Inode`, `Dentry` and `Extent`.

They are the fixed-size structs of the index, little-endian and naturally aligned, which C reads as
they are: docs/FORMAT.md has the byte offsets. `flags` is the first field of every value in every table.
"""

import stat
import struct
from typing import NamedTuple

from cachefs.contract.index import DENTRY_RECORD, EXTENT_RECORD, INODE_RECORD, Flag
from cachefs.system.stat import Stat

# Plain ints of the flags: IntFlag arithmetic costs a microsecond a time, and the hit path does it for each request.
PINNED, IMMUTABLE, WRITTEN, LISTED, UNSETTLED, STALE, UNLINKED, IMMUTABLE_ON_OPEN = (int(flag) for flag in Flag)
FLAGS_PINNED = PINNED.to_bytes(4, "little")
FLAGS_NONE = bytes(4)


class Inode(NamedTuple):
    """A record of the `inodes` table. `number` is its key; the rest is the value."""

    number: int
    flags: int
    mode: int
    nlink: int
    uid: int
    gid: int
    rdev: int
    blksize: int
    size: int
    blocks: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    btime_ns: int
    device: int
    source_inode: int
    version: int
    """Distinguishes what was fetched of this number; extents, xattrs and symlinks of another version do not count."""
    validated_run: int
    """The run that last compared it with the source."""
    entries_valid_from: int
    """Directories: entries confirmed in an earlier run than this one must be compared again."""
    next_position: int
    """Directories: the next listing position (d_off) to give out; never used twice."""
    expires_ns: int
    """CLOCK_MONOTONIC until which it is believed; 0: for ever."""
    lookups: int
    """How often the kernel was told of it; counted only while it is not pinned."""

    @property
    def permissions(self) -> tuple[int, int, int]:
        """As in `Stat`."""
        return self.mode, self.uid, self.gid

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_regular(self) -> bool:
        return stat.S_ISREG(self.mode)

    @property
    def is_symlink(self) -> bool:
        return stat.S_ISLNK(self.mode)

    def written(self) -> "Inode":
        """Written through this mount: what it was once it was read, and dropped, is of no account any more."""
        return self._replace(flags=self.flags & ~IMMUTABLE | WRITTEN)

    def pack(self) -> bytes:
        return _INODE.pack(*self[1:])

    @classmethod
    def unpack(cls, number: int, value: bytes) -> "Inode":
        return cls(number, *_INODE.unpack(value))

    def same_identity(self, other: Stat) -> bool:
        """The same object of the source: device, inode number and birth time, or change time where there is none.

        Without birth times (a source that is a FUSE mount) the change time speaks for pinned files alone: that of a
        directory or of a growing log moves all the time, and they would be given a new number with every change.
        And for symlinks: the kernel keeps the target of an inode for ever.
        """
        if self.source_inode != other.inode or self.device != other.device or (self.mode ^ other.mode) & 0o170000:
            return False
        if self.btime_ns and other.btime_ns:
            return self.btime_ns == other.btime_ns
        return self.ctime_ns == other.ctime_ns or not (self.is_symlink or (self.is_regular and self.flags & PINNED))

    def same_version(self, other: Stat) -> bool:
        """The same object, and unchanged: what was pinned or fetched of it still holds.

        A directory's size says nothing of its names: on CephFS it is that of the whole subtree, and lags behind.
        """
        return (
            self.mtime_ns == other.mtime_ns
            and self.ctime_ns == other.ctime_ns
            and (self.size == other.size or self.is_directory)
            and self.same_identity(other)
        )

    def with_stat(self, now: Stat) -> "Inode":
        return self._replace(
            mode=now.mode,
            nlink=now.nlink,
            uid=now.uid,
            gid=now.gid,
            rdev=now.rdev & 0xFFFFFFFF,
            blksize=now.blksize,
            size=now.size,
            blocks=now.blocks,
            atime_ns=now.atime_ns,
            mtime_ns=now.mtime_ns,
            ctime_ns=now.ctime_ns,
            btime_ns=now.btime_ns,
            device=now.device,
            source_inode=now.inode,
        )


_INODE = INODE_RECORD.codec()


class Dentry(NamedTuple):
    """A value of the `dentries` table, keyed by parent and name. `inode` 0 is an absence."""

    flags: int
    inode: int
    validated_run: int
    position: int
    """Its d_off in the listing of the parent; 0: not listed yet."""

    def pack(self) -> bytes:
        return _DENTRY.pack(*self)

    @classmethod
    def unpack(cls, value: bytes) -> "Dentry":
        return cls._make(_DENTRY.unpack(value))


_DENTRY = DENTRY_RECORD.codec()


class Extent(NamedTuple):
    """A value of the `extents` table, keyed by inode and file offset. The checksums follow, one per 128 KiB."""

    flags: int
    length: int
    """Bytes of payload."""
    blob_offset: int
    """Of the payload, not of the record's header."""
    version: int
    record_bytes: int
    """What the whole record takes in the blob."""
    checksums: tuple[int, ...]

    def pack(self) -> bytes:
        return _EXTENT.pack(*self[:5]) + struct.pack(f"<{len(self.checksums)}Q", *self.checksums)

    @classmethod
    def unpack(cls, value: bytes) -> "Extent":
        checksums = struct.unpack_from(f"<{(len(value) - _EXTENT.size) // 8}Q", value, _EXTENT.size)
        flags, length, blob_offset, version, size = _EXTENT.unpack_from(value)
        return cls(flags, length, blob_offset, version, size, checksums)


_EXTENT = EXTENT_RECORD.codec()

_KEY = struct.Struct(">Q")
_KEY_PAIR = struct.Struct(">QQ")


def inode_key(number: int) -> bytes:
    return _KEY.pack(number)


def inode_of_key(key: bytes) -> int:
    number: int = _KEY.unpack_from(key)[0]
    return number


def pair_key(first: int, second: int) -> bytes:
    """Big-endian, so that LMDB's order is the numbers' order: (inode, file offset), (directory, position)."""
    return _KEY_PAIR.pack(first, second)

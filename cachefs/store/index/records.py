"""The records of the index: `Inode`, `Dentry` and `Extent`.

They are fixed-size structs, little-endian and naturally aligned, which C reads without conversion (docs/FORMAT.md has
the byte offsets). `flags` is the first field of every value in every table.
"""

import stat
import struct
from typing import NamedTuple

from cachefs.contract.index import DENTRY_RECORD, EXTENT_RECORD, INODE_RECORD, Flag
from cachefs.system.clock import NANOSECONDS
from cachefs.system.stat import NO_CONNECTION, NO_NUMBER, USED_ONCE, Stat, may_be_one_birth

# Plain ints: arithmetic with IntFlag takes a microsecond, and the hit path does it for each request.
PINNED, IMMUTABLE, WRITTEN, LISTED, UNSETTLED, STALE, UNLINKED, IMMUTABLE_ON_OPEN, YOUNG, RESTLESS, READ_MUTABLE = map(
    int, Flag
)
FLAGS_PINNED = PINNED.to_bytes(4, "little")
FLAGS_NONE = bytes(4)
FLAGGED_NUMBER = struct.Struct("<I4xQ")
"""Several values of the table META: flags, and one number."""


def same_number(inode: int, now: Stat) -> bool:
    """May an object with this number be the one that `now` is of? NO_NUMBER on either side says nothing. The fast path
    has the same rule (misses/source.c)."""
    return inode == now.inode or NO_NUMBER in (inode, now.inode)


class Identity(NamedTuple):
    """Which object of the source."""

    inode: int
    """Its number, or NO_NUMBER."""
    kind: int
    """The type bits of its mode."""
    device: int
    """As in `Stat`."""
    btime_ns: int
    """0: not known."""
    ctime_ns: int
    connection: int
    """In which it was last compared."""

    def is_of(self, now: Stat, *, by_name: bool) -> bool:
        """Does it identify the object that `now` is of?

        A FUSE filesystem that is mounted anew may give the numbers of its objects to others. So without birth times a
        number counts in one connection to the source only. Objects of two connections are the same if number and name
        are; of a directory, whose names are recorded, the change time must be the same, too. (Number and change time
        are not enough: many objects may be made within one tick of the source's clock.)

        Where numbers do not stay (NO_NUMBER), name and type alone say which object it is (hazard 56).

        `by_name`: it has a recorded name of the object, in a directory that was compared.
        """
        if self.kind != stat.S_IFMT(now.mode) or self.device != now.device or not same_number(self.inode, now):
            return False
        if self.btime_ns and now.btime_ns:
            return may_be_one_birth(self.btime_ns, now.btime_ns)
        if self.connection == now.connection:
            return True
        return by_name and (self.ctime_ns == now.ctime_ns or not stat.S_ISDIR(self.kind))


class Inode(NamedTuple):
    """A record of the `inodes` table. `number` is its key; the rest is the value.

    The fields from `mode` to `source_inode`, except `connection`, are the first ones of `Stat`, in the same order.
    """

    number: int
    flags: int
    mode: int
    nlink: int
    uid: int
    gid: int
    rdev: int
    connection: int
    """The connection to the source in which it was last compared (`Stat.connection`)."""
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
    """Of the content; extents, xattrs and symlinks of another version are not valid."""
    validated_run: int
    """The run that last compared it with the source."""
    entries_valid_from: int
    """Directories: entries that were last compared in an earlier run than this one must be compared again."""
    next_position: int
    """Directories: the next listing position (d_off); none is used twice. Young files: `observed_ns`."""
    expires_ns: int
    """CLOCK_MONOTONIC until which it is valid; 0: for ever."""
    lookups: int
    """The kernel's lookup count; counted only while the inode is not pinned."""

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

    @property
    def is_young(self) -> bool:
        return bool(self.flags & YOUNG)

    @property
    def observed_ns(self) -> int:
        """When a comparison first showed the version of a young regular file. CLOCK_MONOTONIC, in that run."""
        return self.next_position

    @property
    def allocated_blocks(self) -> int:
        """As the kernel gets it. A source may report none for a file that it has not allocated yet (hazard 43)."""
        return self.blocks or int(self.is_regular and self.size > 0)

    def written(self) -> "Inode":
        """The record after a write through this mount: the inode is not immutable any more."""
        return self._replace(flags=self.flags & ~IMMUTABLE | WRITTEN)

    def pack(self) -> bytes:
        return _INODE.pack(*self[1:])

    @classmethod
    def unpack(cls, number: int, value: bytes) -> "Inode":
        return cls(number, *_INODE.unpack(value))

    @property
    def identity(self) -> Identity:
        kind = stat.S_IFMT(self.mode)
        return Identity(self.source_inode, kind, self.device, self.btime_ns, self.ctime_ns, self.connection)

    def same_identity(self, other: Stat, *, by_name: bool = True) -> bool:
        """Is it the same object of the source? Compares `Identity`.

        Without birth times (a source that is a FUSE mount) the change time of pinned files is compared, too: they do
        not change. That of a directory or of a growing log moves all the time, and they would get a new number with
        every change. Of symlinks, too: the kernel caches the target of an inode for ever.

        `by_name`: as in `Identity.is_of`.
        """
        if not self.identity.is_of(other, by_name=by_name):
            return False
        has_births = self.btime_ns and other.btime_ns
        is_fixed = not has_births and (self.is_symlink or (self.is_regular and self.flags & PINNED))
        return not is_fixed or self.ctime_ns == other.ctime_ns

    def may_have_moved(self, now: Stat) -> bool:
        """May this object have got a name that did not lead to it before? `now`: of an object with its number.

        Without birth times a file or directory may also be a new one, which got the number of one that was removed. The
        kernel may know the number by a name of that one. So the number counts only if the times prove that nothing
        changed. Another hard link moves ctime, and may be looked up while the file is young. Where another object may
        have the number, the times prove nothing either: a snapshot has those of its origin.
        """
        if (self.btime_ns and now.btime_ns) or now.btime_ns == USED_ONCE:
            return True
        if not self.is_directory and not self.is_symlink and now.nlink > 1:
            return self.mtime_ns == now.mtime_ns and self.size == now.size
        if now.may_have_twins:
            return False
        return not (self.is_regular or self.is_directory) or (self.same_version(now) and not self.flags & UNSETTLED)

    def same_version(self, other: Stat) -> bool:
        """Is it the same object, and unchanged, so that what was pinned or fetched of it is still valid?

        The size of a directory is not compared: on CephFS it is that of the whole subtree, and lags behind.
        """
        return (
            self.mtime_ns == other.mtime_ns
            and self.ctime_ns == other.ctime_ns
            and (self.is_directory or (self.size == other.size and self.same_access(other)))
            and self.same_identity(other)
        )

    def same_access(self, now: Stat) -> bool:
        """May the same users read it? Times in whole seconds do not say so, finer ones do (`same_version`)."""
        return bool(self.ctime_ns % NANOSECONDS) or self.permissions == now.permissions

    def same_data(self, now: Stat) -> bool:
        """Does a file have the recorded contents, as far as size and mtime tell? A change of its names moves ctime."""
        return self.size == now.size and self.mtime_ns == now.mtime_ns

    def with_stat(self, now: Stat) -> "Inode":
        """`now`: of this object."""
        connection = now.connection % NO_CONNECTION
        first, others = now[:_BEFORE_CONNECTION], now[_BEFORE_CONNECTION:_STAT_FIELDS]
        return Inode._make((self.number, self.flags, *first, connection, *others, *self[3 + _STAT_FIELDS :]))


_INODE = INODE_RECORD.codec()
_STAT_FIELDS = Stat._fields.index("inode") + 1
_BEFORE_CONNECTION = Inode._fields.index("connection") - 2


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
    """A value of the `extents` table, keyed by inode and file offset. One checksum for each 128 KiB follows."""

    flags: int
    length: int
    """Bytes of payload."""
    blob_offset: int
    """Of the payload, not of the record's header."""
    version: int
    record_bytes: int
    """The size of the whole record in the blob."""
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
    """(inode, file offset) or (directory, position). Big-endian, so that LMDB sorts keys by these numbers."""
    return _KEY_PAIR.pack(first, second)

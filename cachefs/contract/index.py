"""The index on disk: tables, flags, and records, which C and Python both read. docs/FORMAT.md describes them.

LMDB aligns values to two bytes only, so C copies them into these structs and never reads them in place.
"""

import enum

from cachefs.contract.structs import Struct

ROOT_INODE = 1
FIRST_POSITION = 3
"""The position of the first name in a listing: 1 and 2 are "." and ".."."""
MAX_NAME_BYTES = 511 - 8
"""The longest key of LMDB holds an inode number and a name. Only a FUSE filesystem has longer names (up to 1,024)."""
MAP_BYTES = 1 << 40
"""Address space, not disk: growing a map under live readers is unsafe (hazard 16)."""


class Table(enum.IntEnum):
    """The tables of both environments, in the order in which a batch writes them."""

    META = 0
    ALIASES = 1
    INODES = 2
    DENTRIES = 3
    LINKS = 4
    LISTING = 5
    SYMLINKS = 6
    XATTRS = 7
    EXTENTS = 8


class Flag(enum.IntFlag):
    """Flags of an inode. Bit 0 has the same meaning in every table."""

    PINNED = 1
    """The value belongs in the durable index."""
    IMMUTABLE = 2
    """A regular file that was opened read-only: its attributes and data never change again on this mount."""
    WRITTEN = 4
    """Created or written through this mount: it stays mutable until it is pinned (written_files.py)."""
    LISTED = 8
    """A directory whose listing is complete: a name that is not in it does not exist."""
    UNSETTLED = 16
    """It had changed shortly before it was compared: it must be compared once more (hazard 11)."""
    STALE = 32
    """Dropped: the next look-up compares it with the source; a different object gets another number."""
    UNLINKED = 64
    """It has no name any more, and is kept until the kernel forgets it."""
    IMMUTABLE_ON_OPEN = 128
    """The first read-only open makes this regular file immutable: the fast path may answer it, and reports it."""
    YOUNG = 256
    """Its version may be recent (validity.py). The data of such a regular file, and the listing of such a directory,
    are not kept, because a change may be under way. UNSETTLED, too."""
    RESTLESS = 512
    """A directory whose permissions have changed in this run: valid for two seconds at a time. UNSETTLED, too."""
    READ_MUTABLE = 1024
    """The kernel may have pages of a regular file's mutable time: it drops them when the file becomes immutable."""


KNOWN_FLAGS = sum(Flag)
"""A record with another flag is of a later version: C passes its requests on to Python."""

INODE_RECORD = Struct(
    "inode_record",
    ("u32", "flags mode nlink uid gid rdev connection blksize"),
    ("u64", "size blocks"),
    ("i64", "atime_ns mtime_ns ctime_ns btime_ns"),
    ("u64", "device source_inode version validated_run entries_valid_from next_position expires_ns lookups"),
    size=144,
)
DENTRY_RECORD = Struct("dentry_record", ("u32", "flags reserved"), ("u64", "inode validated_run position"), size=32)
EXTENT_RECORD = Struct(  # the checksums follow, one for each BLOCK_BYTES of payload
    "extent_record", ("u32", "flags length"), ("u64", "blob_offset version record_bytes"), size=32
)

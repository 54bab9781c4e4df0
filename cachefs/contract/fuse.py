"""The shape of each FUSE request. The fast path checks requests by it; the daemon finds the names in them.

The build compares numbers and sizes with linux/fuse.h (fastpath/c/kernel/protocol.c).
"""

import enum
from typing import NamedTuple

from cachefs.contract.structs import Struct

IN_HEADER = Struct("fuse_in_header", ("u32", "length opcode"), ("u64", "unique inode"), ("u32", "uid gid pid reserved"))


class RequestKind(enum.IntFlag):
    """What may be done with a request of which it is not known whether it was executed."""

    REPEATABLE = 1
    """Repeating it has no other effect than doing it once. OPEN with O_TRUNC is an exception."""
    OVERWRITES = 2
    """The same, unless another request came in between."""
    FORGETS = 4
    """It has no answer, and Python counts it: no request that may have arrived is sent again."""
    INTERRUPTIBLE = 8
    """Nothing must be undone if its caller stops waiting."""


REPEATABLE, OVERWRITES, FORGETS, INTERRUPTIBLE = RequestKind
CHANGES = RequestKind(0)


class Operation(NamedTuple):
    number: int
    """The opcode."""
    name: str
    """FUSE_… in linux/fuse.h."""
    counted_as: str = "other"
    """In `passed` of the status."""
    struct: str = ""
    """In linux/fuse.h: follows the header. Empty: none does, or only a part of it."""
    body_bytes: int = 0
    """Bytes between the header and the names."""
    names: int = 0
    """Zero-terminated names at the end."""
    kind: RequestKind = REPEATABLE


FUSE_OPERATIONS = (
    Operation(1, "LOOKUP", "lookup", names=1),
    Operation(2, "FORGET", "forget", "fuse_forget_in", 8, kind=REPEATABLE | FORGETS),
    Operation(3, "GETATTR", "getattr", "fuse_getattr_in", 16),
    Operation(4, "SETATTR", "setattr", "fuse_setattr_in", 88, kind=REPEATABLE | OVERWRITES),
    Operation(5, "READLINK", "readlink", kind=REPEATABLE | INTERRUPTIBLE),
    Operation(6, "SYMLINK", "symlink", names=2, kind=CHANGES),
    Operation(8, "MKNOD", "mknod", "fuse_mknod_in", 16, names=1, kind=CHANGES),
    Operation(9, "MKDIR", "mkdir", "fuse_mkdir_in", 8, names=1, kind=CHANGES),
    Operation(10, "UNLINK", "unlink", names=1, kind=CHANGES),
    Operation(11, "RMDIR", "rmdir", names=1, kind=CHANGES),
    Operation(12, "RENAME", "rename", "fuse_rename_in", 8, names=2, kind=CHANGES),
    Operation(13, "LINK", "link", "fuse_link_in", 8, names=1, kind=CHANGES),
    Operation(14, "OPEN", "open", "fuse_open_in", 8),  # with O_TRUNC it changes; the handle dies with its Python
    Operation(15, "READ", "read", "fuse_read_in", 40, kind=REPEATABLE | INTERRUPTIBLE),
    Operation(16, "WRITE", "write", "fuse_write_in", 40, kind=REPEATABLE | OVERWRITES),  # at a given offset
    Operation(17, "STATFS", "statfs", kind=REPEATABLE | INTERRUPTIBLE),
    Operation(18, "RELEASE", "release", "fuse_release_in", 24),
    Operation(20, "FSYNC", "fsync", "fuse_fsync_in", 16),
    # Without what FUSE_SETXATTR_EXT, which we do not negotiate, adds to the struct.
    Operation(21, "SETXATTR", "setxattr", "", 8, names=1, kind=CHANGES),
    Operation(22, "GETXATTR", "getxattr", "fuse_getxattr_in", 8, names=1, kind=REPEATABLE | INTERRUPTIBLE),
    Operation(23, "LISTXATTR", "listxattr", "fuse_getxattr_in", 8, kind=REPEATABLE | INTERRUPTIBLE),
    Operation(24, "REMOVEXATTR", "removexattr", names=1, kind=CHANGES),
    Operation(25, "FLUSH", "flush", "fuse_flush_in", 24),
    Operation(26, "INIT", "other", "", 16),  # the struct of old kernels: newer ones append to it
    Operation(27, "OPENDIR", "other", "fuse_open_in", 8),
    Operation(28, "READDIR", "readdir", "fuse_read_in", 40, kind=REPEATABLE | INTERRUPTIBLE),
    Operation(29, "RELEASEDIR", "other", "fuse_release_in", 24),
    Operation(30, "FSYNCDIR", "fsyncdir", "fuse_fsync_in", 16),
    Operation(34, "ACCESS", "other", "fuse_access_in", 8),
    Operation(35, "CREATE", "create", "fuse_create_in", 16, names=1, kind=CHANGES),
    Operation(36, "INTERRUPT", "other", "fuse_interrupt_in", 8),
    Operation(38, "DESTROY"),
    Operation(39, "IOCTL"),
    Operation(40, "POLL"),
    Operation(42, "BATCH_FORGET", "forget", "fuse_batch_forget_in", 8, kind=REPEATABLE | FORGETS),
    Operation(43, "FALLOCATE", "other", "fuse_fallocate_in", 32, kind=CHANGES),
    Operation(44, "READDIRPLUS", "readdir", "fuse_read_in", 40, kind=REPEATABLE | INTERRUPTIBLE),
    Operation(45, "RENAME2", "rename", "fuse_rename2_in", 16, names=2, kind=CHANGES),
    Operation(46, "LSEEK"),
    Operation(47, "COPY_FILE_RANGE", "other", "fuse_copy_file_range_in", 56, kind=CHANGES),
)

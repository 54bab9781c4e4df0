"""What happens to a request when a process dies: kernel/protocol.c against a table, one line for each operation."""

import os
import struct

import pytest

from tests.agreement.library import FastPath, request

CHANGES, OVERWRITES, FORGETS, INTERRUPTIBLE = 1, 2, 4, 8
NAME = b"name\0"
# Operation → (opcode, its struct, names, what it is)
OPERATIONS: dict[str, tuple[int, int, bytes, int]] = {
    "LOOKUP": (1, 0, NAME, 0),
    "FORGET": (2, 8, b"", FORGETS),
    "GETATTR": (3, 16, b"", 0),
    "SETATTR": (4, 88, b"", OVERWRITES),
    "READLINK": (5, 0, b"", INTERRUPTIBLE),
    "SYMLINK": (6, 0, 2 * NAME, CHANGES),
    "MKNOD": (8, 16, NAME, CHANGES),
    "MKDIR": (9, 8, NAME, CHANGES),
    "UNLINK": (10, 0, NAME, CHANGES),
    "RMDIR": (11, 0, NAME, CHANGES),
    "RENAME": (12, 8, 2 * NAME, CHANGES),
    "LINK": (13, 8, NAME, CHANGES),
    "OPEN": (14, 8, b"", 0),
    "READ": (15, 40, b"", INTERRUPTIBLE),
    "WRITE": (16, 40, b"", OVERWRITES),
    "STATFS": (17, 0, b"", INTERRUPTIBLE),
    "RELEASE": (18, 24, b"", 0),
    "FSYNC": (20, 16, b"", 0),
    "SETXATTR": (21, 8, NAME, CHANGES),
    "GETXATTR": (22, 8, NAME, INTERRUPTIBLE),
    "LISTXATTR": (23, 8, b"", INTERRUPTIBLE),
    "REMOVEXATTR": (24, 0, NAME, CHANGES),
    "FLUSH": (25, 24, b"", 0),
    "OPENDIR": (27, 8, b"", 0),
    "READDIR": (28, 40, b"", INTERRUPTIBLE),
    "RELEASEDIR": (29, 24, b"", 0),
    "FSYNCDIR": (30, 16, b"", 0),
    "ACCESS": (34, 8, b"", 0),
    "CREATE": (35, 16, NAME, CHANGES),
    "INTERRUPT": (36, 8, b"", 0),
    "DESTROY": (38, 0, b"", 0),
    "IOCTL": (39, 0, b"", 0),
    "POLL": (40, 0, b"", 0),
    "BATCH_FORGET": (42, 8, b"", FORGETS),
    "FALLOCATE": (43, 32, b"", CHANGES),
    "READDIRPLUS": (44, 40, b"", INTERRUPTIBLE),
    "RENAME2": (45, 16, 2 * NAME, CHANGES),
    "LSEEK": (46, 0, b"", 0),
    "COPY_FILE_RANGE": (47, 56, b"", CHANGES),
    "TMPFILE": (51, 0, b"", CHANGES),
    "of a later kernel": (4000, 0, b"", CHANGES),
}


@pytest.mark.promise("LC-3")
@pytest.mark.parametrize("name", OPERATIONS)
def test_what_is_never_done_twice(fast_path: FastPath, name: str) -> None:
    opcode, body, names, kind = OPERATIONS[name]
    assert fast_path.kind_of_request(request(opcode, 7, bytes(body) + names)) == kind


@pytest.mark.promise("LC-3")
def test_an_open_that_truncates_is_not_done_twice(fast_path: FastPath) -> None:
    for flags, kind in ((os.O_WRONLY, 0), (os.O_RDWR | os.O_TRUNC, CHANGES), (os.O_TRUNC, CHANGES)):
        assert fast_path.kind_of_request(request(14, 7, struct.pack("<2I", flags, 0))) == kind


@pytest.mark.parametrize("name", [name for name, (_, body, names, _) in OPERATIONS.items() if body or names])
def test_what_is_too_short_is_no_request(fast_path: FastPath, name: str) -> None:
    opcode, body, names, _ = OPERATIONS[name]
    whole = bytes(body) + names
    assert fast_path.kind_of_request(request(opcode, 7, whole[:-1])) == -1
    assert fast_path.kind_of_request(request(opcode, 7, b"")) == -1
    assert fast_path.kind_of_request(request(opcode, 7, whole)[:-1]) == -1, "it is not as long as it says"
    assert fast_path.kind_of_request(request(opcode, 7, whole) + b"\0") == -1


def test_what_follows_is_no_longer_than_it_says(fast_path: FastPath) -> None:
    """Data of a WRITE, and the inodes of a BATCH_FORGET."""
    for size, length, kind in ((5, 5, OVERWRITES), (6, 5, -1), (1 << 31, 5, -1)):
        write = struct.pack("<2Q2IQ2I", 0, 0, size, 0, 0, 0, 0) + bytes(length)
        assert fast_path.kind_of_request(request(16, 7, write)) == kind
    for count, entries, kind in ((2, 2, FORGETS), (3, 2, -1), (1 << 31, 2, -1)):
        batch = struct.pack("<2I", count, 0) + bytes(16 * entries)
        assert fast_path.kind_of_request(request(42, 0, batch)) == kind

"""Writes inputs to start from: requests of each FUSE operation, or an index and what is asked of it.

Usage: seeds.py request|answer DIRECTORY
"""

import struct
import sys
from pathlib import Path

_INODES, _DENTRIES, _LINKS, _LISTING, _SYMLINKS, _XATTRS, _EXTENTS = range(2, 9)  # as in index.h
_DURABLE = 1
_LOOKUP, _GETATTR, _READ, _, _READDIR, _READDIRPLUS, _READLINK, _GETXATTR, _LISTXATTR = range(9)  # as in fuzz_answer.c


def requests(directory: Path) -> None:
    for opcode in range(1, 53):
        for names in (b"", b"name\0", b"name\0other\0"):
            body = bytes(64) + names if opcode % 2 else names
            header = struct.pack("<2I2Q4I", 40 + len(body), opcode, 2, 1, 0, 0, 0, 0)
            Path(directory, f"{opcode}-{len(names)}").write_bytes(header + body)


def answers(directory: Path) -> None:
    """A directory (inode 1) with two names, of which one is a file of 5,000 bytes and one of 300,000."""

    def record(table: int, number: int, *content: int) -> bytes:
        return bytes([table << 1 | _DURABLE, 0, number, *content])

    large = (1, *(300_000).to_bytes(3, "big"))
    records = [
        record(_INODES, 1, 0, 1, 0, 0, 0),
        record(_INODES, 2, 0, 0, 0, 0, 0),
        record(_INODES, 3, 0, 0, *large, 0, 0),
        record(_DENTRIES, 1, 0, 1, 2, 0),
        record(_DENTRIES, 1, 1, 1, 3, 1),
        record(_LINKS, 2, 1, 0),
        record(_LINKS, 3, 1, 1),
        record(_LISTING, 1, 0, 0),
        record(_LISTING, 1, 1, 1),
        record(_SYMLINKS, 2, 0, 1, ord("x")),
        record(_XATTRS, 2, 0, 0, 3, 1, ord("a"), ord("b")),
        record(_EXTENTS, 2, 0, 0, 0, 0, 0, 0, 0, 100, 0),
        record(_EXTENTS, 3, 0, 0, 0, *large, 0, 1, 0, 0, 0),
    ]
    asked = [
        bytes([_LOOKUP, 1, 0]),
        bytes([_GETATTR, 2]),
        bytes([_READ, 2, 1, 0, 0, 0, 0]),
        bytes([_READ, 3, 1, 1, 0, 0, *large]),
        bytes([_READ, 3, 1, 2, 0, 0, 0]),
        bytes([_READDIR, 1, 1, 0, 0]),
        bytes([_READDIRPLUS, 1, 1, 0, 0]),
        bytes([_READLINK, 2]),
        bytes([_GETXATTR, 2, 4, 0, 0]),
        bytes([_LISTXATTR, 2, 4, 0]),
    ]
    for left_out in range(-1, len(records)):
        kept = [each for at, each in enumerate(records) if at != left_out]
        for at, ask in enumerate([*asked, b"".join(asked)]):
            Path(directory, f"{left_out}-{at}").write_bytes(bytes([0, 0, len(kept)]) + b"".join(kept) + ask)


{"request": requests, "answer": answers}[sys.argv[1]](Path(sys.argv[2]))

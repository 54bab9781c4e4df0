"""Traces of what a job reads, for the simulator.

A file has 8 bytes `CFTRACE1`, then blocks. A block has two little-endian u32 (length, number of accesses), then that
many bytes of zlib. Unpacked, an access has 28 bytes: inode u64, directory u64, bytes u64, unit u32. The directory is
any number that identifies it. The unit numbers the pieces of a file that are read separately, and bytes is the size of
the piece. A writer that is killed leaves whole blocks, and perhaps part of one.
"""

import os
import struct
import zlib
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

from cachefs.errors import CacheFsError
from cachefs.system.private_files import opener
from policies.simulator import Trace

MAGIC = b"CFTRACE1"
BLOCK_ACCESSES = 32_768
MAX_ACCESSES = 1 << 27
"""They need a GB unpacked, and more for each file."""
_BLOCK = struct.Struct("<2I")
_ACCESS = struct.Struct("<3QI")


class Access(NamedTuple):
    inode: int
    directory: int
    size_bytes: int
    unit: int = 0


class TraceWriter:
    """Writes accesses to two files of at most `max_bytes` in all: the newest, and the previous one (`.1`)."""

    def __init__(self, path: Path, *, max_bytes: int = 1 << 30) -> None:
        self._path = path
        self._max_bytes = max_bytes // 2
        self._waiting: list[bytes] = []
        Path(f"{path}.1").unlink(missing_ok=True)  # of an older recording
        self._file = self._begin()
        self.accesses = 0

    def _begin(self) -> BinaryIO:
        file = open(self._path, "wb", opener=opener)  # noqa: SIM115 - closed by `close`, or when it is full
        file.write(MAGIC)
        return file

    def write(self, access: Access) -> None:
        self._waiting.append(_ACCESS.pack(*access))
        self.accesses += 1
        if len(self._waiting) >= BLOCK_ACCESSES:
            self.flush()

    def flush(self) -> None:
        if not self._waiting:
            return
        packed = zlib.compress(b"".join(self._waiting), 1)
        if self._file.tell() + len(packed) > self._max_bytes and self._file.tell() > len(MAGIC):
            self._file.close()
            self._path.replace(f"{self._path}.1")
            self._file = self._begin()
        self._file.write(_BLOCK.pack(len(packed), len(self._waiting)) + packed)
        self._file.flush()
        self._waiting.clear()

    def close(self) -> None:
        self.flush()
        self._file.close()


def read_trace(path: Path) -> tuple[Trace, bool]:
    """The trace, beginning with the previous file, and whether it is whole. Raises CacheFsError if there is none."""
    numbers: dict[tuple[int, int], int] = {}
    accesses = array("q")
    sizes: list[int] = []
    parts: list[int] = []
    older = Path(f"{path}.1")
    whole = True
    files = (older, path) if older.exists() else (path,)
    if sum(map(_count, files)) > MAX_ACCESSES:
        raise CacheFsError(f"{path} holds more than {MAX_ACCESSES:,} accesses: too many to load")
    for file in files:
        for block in _blocks(file):
            if block is None:
                whole = False
                break
            for inode, directory, size, unit in _ACCESS.iter_unpack(block):
                number = numbers.setdefault((inode, unit), len(sizes))
                if number == len(sizes):
                    sizes.append(size)
                    parts.append(directory)
                accesses.append(number)
    if not accesses:
        raise CacheFsError(f"{path} holds no accesses")
    return Trace(accesses, sizes, parts), whole


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """A file behind its magic. Raises CacheFsError if it cannot be read, or is not a trace."""
    try:
        with open(path, "rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise CacheFsError(f"{path} is not a cachefs trace")
            yield file
    except OSError as error:
        raise CacheFsError(f"cannot read {path}: {error.strerror}") from error


def _count(path: Path) -> int:
    """The number of accesses according to the heads of the blocks."""
    total = 0
    with _opened(path) as file:
        while len(head := file.read(_BLOCK.size)) == _BLOCK.size:
            length, count = _BLOCK.unpack(head)
            if count > BLOCK_ACCESSES:  # damaged
                break
            total += count
            file.seek(length, os.SEEK_CUR)
    return total


def _blocks(path: Path) -> Iterator[bytes | None]:
    """The unpacked blocks, with a final None if the file is truncated or damaged."""
    with _opened(path) as file:
        while head := file.read(_BLOCK.size):
            yield (block := _unpacked(head, file))
            if block is None:
                return


def _unpacked(head: bytes, file: BinaryIO) -> bytes | None:
    if len(head) < _BLOCK.size:
        return None
    length, count = _BLOCK.unpack(head)
    size = count * _ACCESS.size
    if count > BLOCK_ACCESSES or length > size + 1024:  # no writer makes such a block
        return None
    unpacking = zlib.decompressobj()
    try:
        block = unpacking.decompress(file.read(length), size + 1)
    except zlib.error:
        return None
    return block if len(block) == size and unpacking.eof else None

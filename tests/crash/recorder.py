"""What processes wrote beneath a cache directory, in order: recorder.c is loaded into them and notes it in a log."""

import enum
import os
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_ENTRY = struct.Struct("<2I2Q2q2I")
NOT_KEPT = {"lock", "lock.mdb", "daemon.log"}
"""Of no meaning after a power cut: LMDB makes its lock file anew."""


class Operation(enum.IntEnum):
    WRITE = 1
    SYNC_BEGIN = 2
    SYNC_END = 3
    ALLOCATE = 4
    TRUNCATE = 5
    CREATE = 6
    RENAME = 7
    UNLINK = 8
    MKDIR = 9
    RMDIR = 10


OF_NAMES = {Operation.CREATE, Operation.RENAME, Operation.UNLINK, Operation.MKDIR, Operation.RMDIR}


@dataclass(frozen=True, slots=True)
class Entry:
    operation: Operation
    mode: int
    """Of fallocate. Of a write: 1 if it was on disk when it returned."""
    inode: int
    ticket: int
    """The same for the beginning and the end of a sync."""
    offset: int
    length: int
    path: str
    """Relative to the directory that is recorded."""
    data: bytes
    """What was written; of a rename: the new path."""

    @property
    def new_path(self) -> str:
        return self.data.decode()


def build(place: Path) -> Path:
    """The library that records."""
    library = place / "recorder.so"
    source = Path(__file__).with_name("recorder.c")
    flags = ["-std=gnu11", "-O1", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run(["cc", *flags, source, "-o", library, "-ldl"], check=True)
    return library


@contextmanager
def recording(library: Path, directory: Path, log: Path) -> Iterator[None]:
    """Processes that start meanwhile note in `log` what they write beneath `directory`."""
    given = {"LD_PRELOAD": str(library), "CRASH_ROOT": str(directory), "CRASH_LOG": str(log)}
    os.environ.update(given)
    try:
        yield
    finally:
        for name in given:
            del os.environ[name]


def entries(log: Path, directory: Path) -> list[Entry]:
    """The log. Inode numbers are never used twice in it, though the disk may do so."""
    found: list[Entry] = []
    generations: dict[int, int] = {}
    by_path: dict[str, int] = {}
    raw = memoryview(log.read_bytes())
    at, prefix = 0, f"{directory}/"
    while at < len(raw):
        operation, mode, inode, ticket, offset, length, path_bytes, data_bytes = _ENTRY.unpack_from(raw, at)
        at += _ENTRY.size
        path = bytes(raw[at : at + path_bytes]).decode().removesuffix(" (deleted)").removeprefix(prefix)
        at += path_bytes
        data = bytes(raw[at : at + data_bytes])
        at += data_bytes
        if Path(path).name in NOT_KEPT:
            continue
        kind = Operation(operation)
        if kind is Operation.RENAME:
            data = data.decode().removeprefix(prefix).encode()
        if kind is Operation.CREATE:
            by_path[path] = inode
        elif kind is Operation.UNLINK and path in by_path:
            gone = by_path.pop(path)
            generations[gone] = generations.get(gone, 0) + 1
        elif kind is Operation.RENAME:
            new = data.decode()
            for known in [k for k in by_path if k == path or k.startswith(f"{path}/")]:
                by_path[new + known[len(path) :]] = by_path.pop(known)
        unique = inode << 16 | generations.get(inode, 0)
        found.append(Entry(kind, mode, unique, ticket, offset, length, path, data))
    return found

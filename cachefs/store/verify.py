"""Verifying a cache: read every record of the index from the blob, and compare it with its checksums.

Runs in another process than the daemon, at the same time. Each part of the index is read in one transaction, which
keeps the space of its records from being freed (hazard 14); therefore parts are small.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from cachefs.contract.index import Table
from cachefs.errors import CacheFsError, CorruptRecord
from cachefs.store.blob.blob import Blob
from cachefs.store.index.environment import Environment
from cachefs.store.index.records import Extent, Inode, inode_key, inode_of_key
from cachefs.store.secret import read_seed

BATCH_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record whose bytes are not those that were written."""

    inode: int
    offset: int
    """In the file."""
    blob_offset: int
    reason: str


@dataclass(slots=True)
class Verified:
    records: int = 0
    bytes: int = 0
    orphans: int = 0
    """Records whose inode or version is not in the index: never served, and their space is lost."""


def verify(directory: Path, done: Verified, on_progress: Callable[[], None] = lambda: None) -> Iterator[BadRecord]:
    """Yields each bad record when it is found. `done` is updated, and `on_progress` called after each part.

    Raises CacheFsError if there is no cache.
    """
    seed = read_seed(directory)
    if seed is None or not (directory / "blob").exists():
        raise CacheFsError(f"{directory} is no cache directory, or cannot be read")
    start: bytes | None = b""
    with (
        closing(Environment(directory / "index", sync=True)) as environment,
        closing(Blob(directory / "blob", seed)) as blob,
    ):
        while start is not None:
            start, bad = _part(environment, blob, start, done)
            yield from bad
            on_progress()


def _part(environment: Environment, blob: Blob, start: bytes, done: Verified) -> tuple[bytes | None, list[BadRecord]]:
    """Verify from the key `start` on. Returns the start of the next part, or None at the end."""
    bad: list[BadRecord] = []
    size = 0
    with environment.lmdb.begin() as txn:
        cursor = txn.cursor(db=environment.tables[Table.EXTENTS])
        if not cursor.set_range(start):
            return None, bad
        for key, value in cursor:
            if size >= BATCH_BYTES:
                return bytes(key), bad
            inode, offset = inode_of_key(key), inode_of_key(key[8:])
            extent = Extent.unpack(value)
            record = txn.get(inode_key(inode), db=environment.tables[Table.INODES])
            if record is None or Inode.unpack(inode, record).version != extent.version:
                done.orphans += 1
            try:
                blob.read(extent, 0, extent.length)
            except CorruptRecord as error:
                bad.append(BadRecord(inode, offset, extent.blob_offset, str(error)))
            except OSError as error:
                bad.append(BadRecord(inode, offset, extent.blob_offset, error.strerror or str(error)))
            os.posix_fadvise(blob.fd, extent.blob_offset, extent.length, os.POSIX_FADV_DONTNEED)
            size += extent.length
            done.records += 1
            done.bytes += extent.length
    return None, bad

"""The record of the blob: a pure codec, bytes in and bytes out. docs/FORMAT.md has the offsets.

A record is a header of 128 bytes, one checksum of 8 bytes for each 128 KiB of payload, the payload, and zeros up to
a multiple of 8. All checksums are XXH3-64, seeded with a secret of the cache directory, so that the bytes of a
dataset file can never pass for a record (hazard 17). Each reader of payload verifies the blocks that it uses.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

import xxhash

from cachefs.contract.blob import (
    BLOCK_BYTES,
    RECORD_DATA,
    RECORD_FORMAT,
    RECORD_HEADER,
    RECORD_HEADER_BYTES,
    RECORD_MAGIC,
)
from cachefs.errors import CorruptRecord
from policies.prefetch.sequential import CHUNK_BYTES

RECORD_DEAD = 2  # dropped: its length leads to the next record, its payload is a hole
RECORD_GAP = 3  # no record: its length, header included, leads to the next one
ALIGNMENT = 8
_HEADER = RECORD_HEADER.codec()
_CHECKED_BYTES = RECORD_HEADER.offset("checksum")


class Header(NamedTuple):
    """What a record says of itself: enough to rebuild the index from the blob alone, except for names.

    The fields are those of RECORD_HEADER from `length` to `mode`, in the same order.
    """

    length: int
    inode: int
    file_offset: int
    version: int
    """A sequence number: of two records of one inode and offset, the one with the higher number counts."""
    size: int
    mtime_ns: int
    ctime_ns: int
    btime_ns: int
    device: int
    source_inode: int
    mode: int

    @property
    def blocks(self) -> int:
        return block_count(self.length)

    @property
    def record_bytes(self) -> int:
        return record_bytes(self.length)


def block_count(length: int) -> int:
    return -(-length // BLOCK_BYTES)


def record_bytes(length: int) -> int:
    """The size in the blob of a record with `length` bytes of payload."""
    return -(-(payload_start(length) + length) // ALIGNMENT) * ALIGNMENT


def payload_start(length: int) -> int:
    """Where the payload begins within its record."""
    return RECORD_HEADER_BYTES + 8 * block_count(length)


def checksums_of(payload: bytes | memoryview, seed: int) -> tuple[int, ...]:
    view = memoryview(payload)
    return tuple(
        xxhash.xxh3_64_intdigest(view[start : start + BLOCK_BYTES], seed) for start in range(0, len(view), BLOCK_BYTES)
    )


def encode_prefix(header: Header, checksums: Sequence[int], seed: int) -> bytes:
    """Header and checksum table; the unchanged payload follows."""
    table = struct.pack(f"<{len(checksums)}Q", *checksums)
    return _encode_header(header, RECORD_DATA, xxhash.xxh3_64_intdigest(table, seed), seed) + table


def encode_gap(length: int, version: int, seed: int) -> bytes:
    """The header of a range without valid records, so that a rebuild does not restore dropped records in it.

    `version`: not below that of any of those. Numbers are never used twice (runs.py).
    """
    return _encode_header(Header(length, 0, 0, version, *(0,) * 7), RECORD_GAP, 0, seed)


def bytes_to_next(header: Header, kind: int) -> int:
    """The distance from the beginning of this header to the next one."""
    return header.length if kind == RECORD_GAP else header.record_bytes


def _encode_header(header: Header, kind: int, table_checksum: int, seed: int) -> bytes:
    whole = _HEADER.pack(RECORD_MAGIC, RECORD_FORMAT, kind, *header, header.blocks, table_checksum, 0)
    front = whole[:_CHECKED_BYTES]
    return front + struct.pack("<Q", xxhash.xxh3_64_intdigest(front, seed))


def decode_header(data: bytes, seed: int) -> tuple[Header, int, int] | None:
    """The header, its type and the checksum of its table; None where nothing was ever written. Raises CorruptRecord."""
    if len(data) < RECORD_HEADER_BYTES:
        raise CorruptRecord("the blob ends within a header")
    magic, version, kind, *fields, blocks, table_checksum, checksum = _HEADER.unpack_from(data)
    if kind == 0 and magic == 0:
        return None
    if checksum != xxhash.xxh3_64_intdigest(data[:_CHECKED_BYTES], seed):
        raise CorruptRecord("header checksum")
    if magic != RECORD_MAGIC or version != RECORD_FORMAT or kind not in (RECORD_DATA, RECORD_DEAD, RECORD_GAP):
        raise CorruptRecord(f"not a record of this format: magic {magic:#x}, version {version}, type {kind}")
    header = Header._make(fields)
    possible = header.length >= RECORD_HEADER_BYTES if kind == RECORD_GAP else header.length <= CHUNK_BYTES
    if not possible or blocks != header.blocks:
        raise CorruptRecord("impossible length")
    return header, kind, table_checksum


def decode_checksums(table: bytes, checksum: int, seed: int) -> tuple[int, ...]:
    if xxhash.xxh3_64_intdigest(table, seed) != checksum:
        raise CorruptRecord("checksum table")
    return struct.unpack(f"<{len(table) // 8}Q", table)


def verify_block(block: memoryview, checksum: int, seed: int) -> None:
    if xxhash.xxh3_64_intdigest(block, seed) != checksum:
        raise CorruptRecord("payload checksum")

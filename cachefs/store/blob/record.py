"""The record of the blob: a pure codec, bytes in and bytes out. docs/FORMAT.md has the offsets.

A record is a header of 128 bytes, one checksum of 8 bytes for each 128 KiB of payload, the payload, and zeros up to
a multiple of 8. All checksums are XXH3-64, seeded with a secret of the cache directory, so that the bytes of a
dataset file can never pass for a record (hazard 17). Whoever reads payload verifies the blocks that he touches.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from cachefs.contract.blob import BLOCK_BYTES as BLOCK_BYTES
from cachefs.contract.blob import (
    CHUNK_BYTES,
    RECORD_DATA,
    RECORD_FORMAT,
    RECORD_HEADER,
    RECORD_HEADER_BYTES,
    RECORD_MAGIC,
)
from cachefs.errors import CorruptRecord

TYPE_DATA = RECORD_DATA
TYPE_DEAD = 2  # dropped: its length leads to the next record, its payload is a hole
TYPE_GAP = 3  # no record: its length, header included, leads to the next one
ALIGNMENT = 8
MAX_PAYLOAD_BYTES = CHUNK_BYTES
HEADER_BYTES = RECORD_HEADER_BYTES
_HEADER = RECORD_HEADER.codec()
_CHECKED_BYTES = RECORD_HEADER.offset("checksum")


@dataclass(frozen=True, slots=True)
class Header:
    """What a record says of itself: enough to rebuild the index from the blob alone, names excepted."""

    length: int
    inode: int
    file_offset: int
    version: int
    """A sequence number: of two records of one inode and offset, the higher one counts."""
    size: int
    mtime_ns: int
    ctime_ns: int
    btime_ns: int
    mode: int
    device: int
    source_inode: int

    @property
    def blocks(self) -> int:
        return block_count(self.length)

    @property
    def record_bytes(self) -> int:
        return record_bytes(self.length)


def block_count(length: int) -> int:
    return -(-length // BLOCK_BYTES)


def record_bytes(length: int) -> int:
    """What a payload of `length` bytes takes in the blob."""
    return -(-(HEADER_BYTES + 8 * block_count(length) + length) // ALIGNMENT) * ALIGNMENT


def payload_start(length: int) -> int:
    """Where the payload begins within its record."""
    return HEADER_BYTES + 8 * block_count(length)


def checksums_of(payload: bytes | memoryview, seed: int) -> tuple[int, ...]:
    view = memoryview(payload)
    return tuple(
        xxhash.xxh3_64_intdigest(view[start : start + BLOCK_BYTES], seed) for start in range(0, len(view), BLOCK_BYTES)
    )


def encode_prefix(header: Header, checksums: Sequence[int], seed: int) -> bytes:
    """Header and checksum table; the payload follows as it is."""
    table = struct.pack(f"<{len(checksums)}Q", *checksums)
    return _encode_header(header, TYPE_DATA, xxhash.xxh3_64_intdigest(table, seed), seed) + table


def encode_gap(length: int, version: int, seed: int) -> bytes:
    """The header of a range that holds no record that counts: no rebuild brings back to life what was there.

    `version`: not below that of any of those. Numbers are never used twice (runs.py).
    """
    return _encode_header(Header(length, 0, 0, version, *(0,) * 7), TYPE_GAP, 0, seed)


def bytes_to_next(header: Header, kind: int) -> int:
    """How far the next header is from the beginning of this one."""
    return header.length if kind == TYPE_GAP else header.record_bytes


def _encode_header(header: Header, kind: int, table_checksum: int, seed: int) -> bytes:
    front = _HEADER.pack(
        RECORD_MAGIC,
        RECORD_FORMAT,
        kind,
        header.length,
        header.inode,
        header.file_offset,
        header.version,
        header.size,
        header.mtime_ns,
        header.ctime_ns,
        header.btime_ns,
        header.device,
        header.source_inode,
        header.mode,
        header.blocks,
        table_checksum,
        0,
    )[:_CHECKED_BYTES]
    return front + struct.pack("<Q", xxhash.xxh3_64_intdigest(front, seed))


def decode_header(data: bytes, seed: int) -> tuple[Header, int, int] | None:
    """The header, its type and the checksum of its table; None where nothing was ever written. Raises CorruptRecord."""
    if len(data) < HEADER_BYTES:
        raise CorruptRecord("the blob ends within a header")
    (magic, version, kind, length, inode, file_offset, sequence, size, mtime_ns, ctime_ns, btime_ns,
     device, source_inode, mode, blocks, table_checksum, checksum) = _HEADER.unpack_from(data)  # fmt: skip
    if kind == 0 and magic == 0:
        return None
    if checksum != xxhash.xxh3_64_intdigest(data[:_CHECKED_BYTES], seed):
        raise CorruptRecord("header checksum")
    if magic != RECORD_MAGIC or version != RECORD_FORMAT or kind not in (TYPE_DATA, TYPE_DEAD, TYPE_GAP):
        raise CorruptRecord(f"not a record of this format: magic {magic:#x}, version {version}, type {kind}")
    possible = length >= HEADER_BYTES if kind == TYPE_GAP else length <= MAX_PAYLOAD_BYTES
    if not possible or blocks != block_count(length):
        raise CorruptRecord("impossible length")
    header = Header(
        length, inode, file_offset, sequence, size, mtime_ns, ctime_ns, btime_ns, mode, device, source_inode
    )
    return header, kind, table_checksum


def decode_checksums(table: bytes, checksum: int, seed: int) -> tuple[int, ...]:
    if xxhash.xxh3_64_intdigest(table, seed) != checksum:
        raise CorruptRecord("checksum table")
    return struct.unpack(f"<{len(table) // 8}Q", table)


def verify_block(block: memoryview, checksum: int, seed: int) -> None:
    if xxhash.xxh3_64_intdigest(block, seed) != checksum:
        raise CorruptRecord("payload checksum")

"""The blob on disk: the header of a record, and the units that the file is divided into (docs/FORMAT.md)."""

from cachefs.contract.structs import Struct

RECORD_MAGIC = 0x53464843  # "CHFS"
RECORD_FORMAT = 1
RECORD_DATA = 1  # a type of record; 0 is reserved, because space that was never written reads as zeros
RECORD_HEADER_BYTES = 128
BLOCK_BYTES = 128 << 10
"""Payload that one checksum covers. A record has at most CHUNK_BYTES of it (policies/prefetch/sequential.py)."""
SLAB_BYTES = 64 << 20
"""The unit of space that is granted to one writer."""

RECORD_HEADER = Struct(
    "record_header",
    ("u32", "magic"),
    ("u16", "format type"),
    ("u64", "length inode file_offset version size"),
    ("i64", "mtime_ns ctime_ns btime_ns reserved"),
    ("u64", "device source_inode"),
    ("u32", "mode blocks"),
    ("u64", "table_checksum reserved2 checksum"),
    size=RECORD_HEADER_BYTES,
)

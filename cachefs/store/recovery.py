"""Rebuilding a lost index from the blob alone.

A scan starts at the beginning of each slab, follows the lengths of the records, and stops at the first invalid header.
It never searches for a magic number, which the payload of a dataset file could forge. Of several records of one inode
the highest sequence number is valid. Names are not in the blob: a rebuilt inode has no dentry and validated_run 0, and
is valid again when a look-up finds the same version (docs/FORMAT.md, recovery). Data of objects without a number
(NO_NUMBER) are dropped, because only their names would find them. The next run has a higher number than
the run of any record, including dead records (runs.py).
"""

import logging
import os
from collections.abc import Iterator

from cachefs.contract.blob import RECORD_DATA, RECORD_HEADER_BYTES, SLAB_BYTES
from cachefs.contract.index import Table
from cachefs.errors import CorruptRecord
from cachefs.store import runs
from cachefs.store.aliases import Given
from cachefs.store.blob import record
from cachefs.store.blob.blob import Blob
from cachefs.store.blob.space import place_of
from cachefs.store.index.environment import Environment
from cachefs.store.index.extents import Extents
from cachefs.store.index.index import Totals
from cachefs.store.index.records import PINNED, STALE, Extent, Inode, inode_key, pair_key
from cachefs.store.runs import run_of, run_of_inode
from cachefs.system.stat import NO_NUMBER

log = logging.getLogger(__name__)

BATCH = 10_000


def scan(blob: Blob) -> Iterator[tuple[record.Header, Extent]]:
    """Every valid record that is not dead, in the order of the blob. Payload is not read: readers verify it."""
    return ((header, extent) for header, extent in _headers(blob) if extent is not None)


def _headers(blob: Blob) -> Iterator[tuple[record.Header, Extent | None]]:
    """Every valid header. Dead records and gaps have no extent; a gap's version is not below those of its records."""
    size = blob.size()
    for slab in range(0, size, SLAB_BYTES):
        offset = slab
        while offset + RECORD_HEADER_BYTES <= min(slab + SLAB_BYTES, size):
            try:
                decoded = record.decode_header(os.pread(blob.fd, RECORD_HEADER_BYTES, offset), blob.seed)
                if decoded is None:
                    break
                header, kind, table_checksum = decoded
                if kind != RECORD_DATA:
                    yield header, None
                else:
                    table = os.pread(blob.fd, 8 * header.blocks, offset + RECORD_HEADER_BYTES)
                    checksums = record.decode_checksums(table, table_checksum, blob.seed)
                    start = offset + record.payload_start(header.length)
                    if start + header.length > size:
                        raise CorruptRecord("the blob ends within a record")
                    yield header, Extent(PINNED, header.length, start, header.version, header.record_bytes, checksums)
            except CorruptRecord as error:
                log.warning("rebuilding the index: rest of the slab at %d skipped: %s", slab, error)
                break
            offset += record.bytes_to_next(header, kind)


def rebuild(blob: Blob, durable: Environment) -> Totals:
    """Fill an empty durable index with what the blob holds."""
    tables = durable.tables
    newest: dict[int, int] = {}
    """Inode → its valid version."""
    owners: dict[tuple[int, int], tuple[int, int]] = {}
    """Object of the source (device, inode number) → its last (version, number) in the cache."""
    highest, given = 0, Given()
    for header, live in _headers(blob):
        highest = max(highest, run_of(header.version), run_of_inode(header.inode))
        if _has_alias(header):
            given = given.and_numbers([header.inode])
        if live is not None:
            newest[header.inode] = max(header.version, newest.get(header.inode, 0))
            place, owner = (header.device, header.source_inode), (header.version, header.inode)
            owners[place] = max(owner, owners.get(place, owner))
    # Before any record: an interrupted rebuild must not give their numbers out again.
    runs.ended(highest).store(durable)
    given.store(durable)
    totals = Totals()
    rows: list[tuple[record.Header, Extent]] = []

    def forget(extent: Extent) -> None:
        start, end = place_of(extent)
        blob.mark_gap(start, end, highest << runs.RUN_BITS)
        blob.punch(start + RECORD_HEADER_BYTES, end)

    def write() -> None:
        unneeded: list[Extent] = []
        with durable.write() as txn:
            extents = Extents(txn, tables[Table.EXTENTS])
            for header, extent in rows:
                key = inode_key(header.inode)
                if txn.put(key, _inode(header).pack(), overwrite=False, db=tables[Table.INODES]):
                    totals.cached_files += 1
                place = header.device, header.source_inode
                if _has_alias(header) and owners[place][1] == header.inode:
                    alias = PINNED.to_bytes(8, "little") + key
                    txn.put(pair_key(*place), alias, db=tables[Table.ALIASES])
                within = extents.add(header.inode, header.file_offset, extent)
                if within is None:
                    unneeded.append(extent)
                    continue
                totals.count(extent, 1)
                for each in within:
                    totals.count(each, -1)
                unneeded.extend(within)
            txn.put(b"totals", totals.pack(), db=tables[Table.META])
        for extent in unneeded:
            forget(extent)
        rows.clear()

    for header, extent in scan(blob):
        if header.version != newest[header.inode] or header.source_inode == NO_NUMBER:  # only a name would find it
            forget(extent)
            continue
        rows.append((header, extent))
        if len(rows) >= BATCH:
            write()
    write()
    return totals


def _has_alias(header: record.Header) -> bool:
    return header.inode != header.source_inode or header.device != 0


def _inode(header: record.Header) -> Inode:
    """The inode as far as a record of its data describes it; the first look-up completes it."""
    return Inode(
        number=header.inode, flags=PINNED | STALE, mode=header.mode, nlink=1, uid=0, gid=0, rdev=0, connection=0,
        blksize=4096, size=header.size, blocks=0, atime_ns=0, mtime_ns=header.mtime_ns, ctime_ns=header.ctime_ns,
        btime_ns=header.btime_ns, device=header.device, source_inode=header.source_inode, version=header.version,
        validated_run=0, entries_valid_from=0, next_position=0, expires_ns=0, lookups=0,
    )  # fmt: skip

"""Record, blob and rebuild: the bytes on disk."""

import errno
import os
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachefs.contract.blob import BLOCK_BYTES, RECORD_DATA, RECORD_HEADER_BYTES, SLAB_BYTES
from cachefs.contract.index import DENTRY_RECORD, EXTENT_RECORD, INODE_RECORD, Table
from cachefs.errors import CorruptRecord
from cachefs.store import recovery
from cachefs.store.blob import record
from cachefs.store.blob.blob import Blob, BlobFull
from cachefs.store.blob.space import place_of
from cachefs.store.index import records
from cachefs.store.index.environment import Environment
from cachefs.system.unix_socket import socket_address
from policies.prefetch.sequential import CHUNK_BYTES
from tests.conftest import REPOSITORY

SEED = 0x1234567890ABCDEF
u64 = st.integers(0, 2**64 - 1)
i64 = st.integers(-(2**63), 2**63 - 1)


def header(length: int, inode: int = 7, offset: int = 0, version: int = 1) -> record.Header:
    return record.Header(length, inode, offset, version, length, 1, 2, 3, 0, inode, 0o100644)


@given(st.binary(max_size=300_000), u64, u64, u64, i64, i64, i64, st.integers(0, 2**32 - 1))
@settings(max_examples=50, deadline=None)
def test_records_come_back_as_they_were(payload, inode, offset, version, mtime, ctime, btime, mode) -> None:
    written = record.Header(len(payload), inode, offset, version, 5, mtime, ctime, btime, 3, inode, mode)
    checksums = record.checksums_of(payload, SEED)
    prefix = record.encode_prefix(written, checksums, SEED)
    assert len(prefix) == record.payload_start(len(payload))
    decoded = record.decode_header(prefix, SEED)
    assert decoded is not None and decoded[:2] == (written, RECORD_DATA)
    assert record.decode_checksums(prefix[RECORD_HEADER_BYTES:], decoded[2], SEED) == checksums


@given(st.integers(0, RECORD_HEADER_BYTES - 1), st.integers(1, 255))
@settings(deadline=None)
def test_any_changed_byte_of_a_header_is_noticed(position: int, flip: int) -> None:
    prefix = bytearray(record.encode_prefix(header(10), record.checksums_of(b"x" * 10, SEED), SEED))
    prefix[position] ^= flip
    with pytest.raises(CorruptRecord):
        record.decode_header(bytes(prefix), SEED)


def test_a_header_that_the_end_of_the_blob_cuts_off_is_corrupt() -> None:
    prefix = record.encode_prefix(header(10), record.checksums_of(b"x" * 10, SEED), SEED)
    with pytest.raises(CorruptRecord):
        record.decode_header(prefix[: RECORD_HEADER_BYTES - 1], SEED)


def test_a_record_of_another_cache_is_no_record() -> None:
    prefix = record.encode_prefix(header(10), record.checksums_of(b"x" * 10, SEED), SEED)
    with pytest.raises(CorruptRecord):
        record.decode_header(prefix, SEED + 1)
    assert record.decode_header(bytes(RECORD_HEADER_BYTES), SEED) is None


def test_the_structs_are_what_format_md_says() -> None:
    """The tables of docs/FORMAT.md against the codec: a C header will be written from them."""
    text = (REPOSITORY / "docs/FORMAT.md").read_text()
    assert (INODE_RECORD.size, DENTRY_RECORD.size, EXTENT_RECORD.size) == (144, 32, 32)
    section = text[text.index("**Inode record**") : text.index("**Dentry**")]
    places = {name: int(offset) for offset, name in re.findall(r"\| (\d+) \| (\w+)", section)}
    names = {
        "flags": "flags", "mode": "mode", "nlink": "nlink", "uid": "uid", "gid": "gid", "rdev": "rdev",
            "connection": "connection",
        "blksize": "blksize", "size": "size", "blocks": "blocks", "atime": "atime_ns", "mtime": "mtime_ns",
        "ctime": "ctime_ns", "btime": "btime_ns", "device": "device", "source": "source_inode", "version": "version",
        "validated_run": "validated_run", "entries_valid_from": "entries_valid_from", "next_position": "next_position",
        "expires": "expires_ns", "lookups": "lookups",
    }  # fmt: skip
    assert set(places) == set(names)
    blank = records.Inode(1, *(0,) * 22)
    for documented, field in names.items():
        packed = blank._replace(**{field: 1}).pack()
        assert packed[places[documented]] == 1 and sum(packed) == 1, documented
    assert records.Inode.unpack(1, blank._replace(size=9, lookups=4).pack()) == blank._replace(size=9, lookups=4)
    assert records.Dentry(1, 2, 3, 4).pack() == bytes([1, *bytes(7), 2, *bytes(7), 3, *bytes(7), 4, *bytes(7)])


@pytest.fixture
def blob(tmp_path: Path) -> Any:
    made = Blob(tmp_path / "blob", SEED)
    yield made
    made.close()


def test_a_blob_gives_back_any_part(blob: Blob) -> None:
    payload = os.urandom(500_000)
    (extent,) = blob.append([(header(len(payload)), payload)])
    for start, length in ((0, 500_000), (0, 1), (131_071, 2), (131_072, 131_072), (499_999, 1), (200_000, 250_000)):
        assert blob.read(extent, start, length) == payload[start : start + length]
    with pytest.raises(CorruptRecord):
        blob.read(extent, 499_999, 2)


def test_a_read_verifies_just_the_blocks_it_touches(blob: Blob, tmp_path: Path) -> None:
    payload = os.urandom(4 * BLOCK_BYTES)
    (extent,) = blob.append([(header(len(payload)), payload)])
    with open(tmp_path / "blob", "r+b") as file:
        file.seek(extent.blob_offset + 2 * BLOCK_BYTES + 5)
        file.write(bytes([payload[2 * BLOCK_BYTES + 5] ^ 1]))
    assert blob.read(extent, 0, 2 * BLOCK_BYTES) == payload[: 2 * BLOCK_BYTES]
    with pytest.raises(CorruptRecord):
        blob.read(extent, 3 * BLOCK_BYTES - 1, 1)


def test_records_never_cross_a_slab_and_a_new_run_begins_a_new_one(tmp_path: Path) -> None:
    blob = Blob(tmp_path / "blob", SEED)
    payload = bytes(CHUNK_BYTES)
    extents = blob.append([(header(len(payload), inode), payload) for inode in range(1, 40)])
    for extent in extents:
        start = extent.blob_offset - record.payload_start(extent.length)
        assert start // SLAB_BYTES == (start + extent.record_bytes - 1) // SLAB_BYTES
    blob.close()
    blob = Blob(tmp_path / "blob", SEED)
    (after,) = blob.append([(header(3), b"abc")])
    assert after.blob_offset - record.payload_start(3) == 3 * SLAB_BYTES
    blob.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG, errno.EIO])
def test_after_a_failed_sync_the_batch_is_dropped_and_a_new_slab_begun(
    blob: Blob, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def failing(fd: int) -> None:
        raise OSError(number, "injected")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", failing)
        with pytest.raises(OSError) as caught:
            blob.append([(header(3), b"abc")])
    assert isinstance(caught.value, BlobFull) == (number != errno.EIO)
    (extent,) = blob.append([(header(3), b"def")])
    assert extent.blob_offset >= SLAB_BYTES
    assert blob.read(extent, 0, 3) == b"def"


def test_a_punched_record_is_dead_and_its_neighbours_live(blob: Blob) -> None:
    payloads = [os.urandom(50_000) for _ in range(3)]
    extents = blob.append([(header(50_000, inode), p) for inode, p in enumerate(payloads, 1)])
    start, end = place_of(extents[1])
    blob.mark_gap(start, end, 1)
    blob.punch(start + RECORD_HEADER_BYTES, end)
    assert blob.read(extents[0], 0, 50_000) == payloads[0]
    assert blob.read(extents[2], 0, 50_000) == payloads[2]
    with pytest.raises(CorruptRecord):
        blob.read(extents[1], 0, 50_000)
    assert [h.inode for h, _ in recovery.scan(blob)] == [1, 3]


def rebuilt(blob: Blob, path: Path) -> dict[tuple[int, int], int]:
    """(inode, offset) → version of what a rebuild finds."""
    durable = Environment(path, sync=True)
    totals = recovery.rebuild(blob, durable)
    found = {}
    with durable.lmdb.begin() as txn:
        for key, value in txn.cursor(db=durable.tables[Table.EXTENTS]):
            extent = records.Extent.unpack(value)
            found[int.from_bytes(key[:8]), int.from_bytes(key[8:])] = extent.version
    durable.close()
    assert totals.cached_files == len({inode for inode, _ in found})
    return found


def test_of_two_versions_the_newer_counts_and_the_older_is_punched(blob: Blob, tmp_path: Path) -> None:
    blob.append([(header(9, 1, 0, 5), b"version 5"), (header(9, 1, 0, 3), b"version 3")])
    blob.append([(header(9, 1, 4 << 20, 3), b"a chunk 3"), (header(3, 2, 0, 1), b"two")])
    assert rebuilt(blob, tmp_path / "one") == {(1, 0): 5, (2, 0): 1}
    assert rebuilt(blob, tmp_path / "two") == {(1, 0): 5, (2, 0): 1}


def test_a_scan_stops_at_the_first_unsound_header_and_goes_on_in_the_next_slab(blob: Blob, tmp_path: Path) -> None:
    forged = record.encode_prefix(header(3, 666), record.checksums_of(b"bad", SEED + 1), SEED + 1) + b"bad"
    extents = blob.append(
        [(header(1000, 1), bytes(1000)), (header(len(forged), 2), forged), (header(1000, 3), bytes(1000))]
    )
    blob._new_slab()
    blob.append([(header(1000, 4), bytes(1000))])
    start = extents[1].blob_offset - record.payload_start(extents[1].length)
    with open(tmp_path / "blob", "r+b") as file:
        file.seek(start)
        file.write(b"\xff")
    # Not 3: it would have to be searched for. Not 666: payload is never taken for a record.
    assert rebuilt(blob, tmp_path / "index") == {(1, 0): 1, (4, 0): 1}


def test_a_socket_at_a_path_that_no_address_can_hold(tmp_path: Path) -> None:
    path = tmp_path / ("long" * 40) / "control"
    path.parent.mkdir()
    with (
        socket.socket(socket.AF_UNIX) as listener,
        socket.socket(socket.AF_UNIX) as client,
    ):
        with socket_address(path) as address:
            listener.bind(address)
        listener.listen()
        with socket_address(path) as address:
            client.connect(address)
        assert path.is_socket()


def test_two_threads_are_granted_different_slabs(tmp_path: Path) -> None:
    """Regression: both could read the frontier before either moved it."""
    both = threading.Barrier(2)

    class Slow(Blob):
        @property
        def frontier(self) -> int:
            found = super().frontier
            with suppress(threading.BrokenBarrierError):
                both.wait(0.3)  # for the other thread, which a lock keeps away
            return found

    blob = Slow(tmp_path / "blob", SEED)
    with ThreadPoolExecutor(2) as threads:
        assert {each.result() for each in [threads.submit(blob.grant), threads.submit(blob.grant)]} == {0, SLAB_BYTES}
    blob.close()

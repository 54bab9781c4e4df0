"""The record of the blob: store/blob/record.py and blob.py against record.c, blob_writer.c and blob.c of fastpath/c.

What one side writes the other reads, and what is damaged neither gives out.
"""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachefs.contract.blob import BLOCK_BYTES, RECORD_DATA, RECORD_HEADER_BYTES
from cachefs.errors import CorruptRecord
from cachefs.options import Options
from cachefs.store.blob import record
from cachefs.store.blob.blob import Blob
from cachefs.store.index.records import PINNED, Extent, Inode
from policies.prefetch.sequential import CHUNK_BYTES
from tests.agreement.library import FastPath, examples

SEED = 4711
BLOCK, PAGE, MOST = BLOCK_BYTES, 4096, CHUNK_BYTES
_EDGES = [
    1,
    2,
    7,
    8,
    9,
    PAGE - 137,
    PAGE - 136,
    PAGE - 135,
    PAGE,
    BLOCK - 1,
    BLOCK,
    BLOCK + 1,
    3 * BLOCK - 1,
    3 * BLOCK,
]
lengths = st.sampled_from(_EDGES) | st.integers(1, 3 * BLOCK)
_U64, _I64 = st.integers(0, (1 << 64) - 1), st.integers(-(1 << 63), (1 << 63) - 1)
records = st.builds(
    lambda u, i, mode: Inode(7, *[0] * 22)._replace(
        size=u[0], version=u[1], device=u[2], source_inode=u[3], mtime_ns=i[0], ctime_ns=i[1], btime_ns=i[2], mode=mode
    ),
    st.tuples(_U64, _U64, _U64, _U64),
    st.tuples(_I64, _I64, _I64),
    st.integers(0, (1 << 32) - 1),
)


class Place:
    def __init__(self, directory: Path) -> None:
        self.blob = Blob(directory / "blob", SEED)
        self.fd = os.open(directory / "blob", os.O_RDWR)

    def close(self) -> None:
        os.close(self.fd)
        self.blob.close()


@pytest.fixture(scope="module")
def place(fast_path: FastPath, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    made = Place(tmp_path_factory.mktemp("blob"))
    yield made
    made.close()


def bytes_of(length: int) -> bytes:
    return bytes(i * 31 % 251 for i in range(4099)) * (length // 4099 + 1)


def header_of(file: Inode, offset: int, length: int) -> record.Header:
    return record.Header(
        length, file.number, offset, file.version, file.size, file.mtime_ns, file.ctime_ns, file.btime_ns, file.device,
        file.source_inode, file.mode,
    )  # fmt: skip


@examples(100)
@given(length=st.integers(0, (1 << 32) - 1) | lengths)
def test_both_take_the_same_space(fast_path: FastPath, length: int) -> None:
    assert fast_path.record_bytes(length) == record.record_bytes(length)


@examples(100)
@given(file=records, offset=_U64, length=lengths, page=st.integers(0, 3))
def test_both_write_the_same_bytes(
    fast_path: FastPath, place: Place, file: Inode, offset: int, length: int, page: int
) -> None:
    fast_path.set_up(Options(), seed=SEED)
    payload, at = bytes_of(length)[:length], page * PAGE
    value = fast_path.write_record(place.fd, file, offset, payload, at)
    checksums = record.checksums_of(payload, SEED)
    prefix = record.encode_prefix(header_of(file, offset, length), checksums, SEED)
    size = record.record_bytes(length)
    whole = prefix + payload + bytes(size - len(prefix) - length)
    assert os.pread(place.fd, size, at) == whole
    assert value == Extent(PINNED, length, at + len(prefix), file.version, size, checksums).pack()


@examples(100)
@given(data=st.data(), length=lengths, before=st.integers(0, PAGE) | st.sampled_from([0, 1, PAGE - 136]))
def test_both_read_the_same_bytes(
    fast_path: FastPath, place: Place, data: st.DataObject, length: int, before: int
) -> None:
    """Any part of a record that lies anywhere, or neither reads it because a byte of one of its blocks is damaged."""
    fast_path.set_up(Options(), seed=SEED)
    payload = bytes_of(length)[:length]
    extent = Extent(PINNED, length, before, 1, length, record.checksums_of(payload, SEED))
    os.ftruncate(place.fd, 0)
    os.pwrite(place.fd, payload, before)
    # At the end of the blob, or with something behind it.
    os.pwrite(place.fd, b"behind" * data.draw(st.integers(0, 1)), before + length)
    start = data.draw(st.integers(0, length - 1))
    count = data.draw(st.integers(1, length - start))
    assert fast_path.read_blob(place.fd, extent.pack(), start, count) == payload[start : start + count]
    assert place.blob.read(extent, start, count) == payload[start : start + count]
    spoilt = data.draw(st.integers(0, length - 1))
    os.pwrite(place.fd, bytes([payload[spoilt] ^ 1]), before + spoilt)
    concerned = start // BLOCK <= spoilt // BLOCK <= (start + count - 1) // BLOCK
    found = fast_path.read_blob(place.fd, extent.pack(), start, count)
    if concerned:
        assert found is None
        with pytest.raises(CorruptRecord):
            place.blob.read(extent, start, count)
    else:
        assert found == payload[start : start + count] == place.blob.read(extent, start, count)


@settings(max_examples=30)
@given(length=lengths, missing=st.integers(1, PAGE))
def test_neither_reads_what_the_blob_does_not_reach(
    fast_path: FastPath, place: Place, length: int, missing: int
) -> None:
    fast_path.set_up(Options(), seed=SEED)
    payload = bytes_of(length)[:length]
    extent = Extent(PINNED, length, 100, 1, length, record.checksums_of(payload, SEED))
    os.ftruncate(place.fd, 0)
    os.pwrite(place.fd, payload, 100)
    os.ftruncate(place.fd, max(0, 100 + length - missing))
    assert fast_path.read_blob(place.fd, extent.pack(), 0, length) is None
    with pytest.raises((CorruptRecord, OSError)):
        place.blob.read(extent, 0, length)


@pytest.mark.parametrize("start", [0, 5, 200_000])
def test_a_record_that_the_disk_gives_in_parts(fast_path: FastPath, place: Place, start: int) -> None:
    fast_path.set_up(Options(), seed=SEED)
    payload = bytes_of(MOST)[: 1 << 20]
    value = fast_path.write_record(place.fd, Inode(7, *[0] * 22)._replace(size=len(payload), version=2), 0, payload, 0)
    length = len(payload) - start
    for fault in ({"most": PAGE}, {"most": 3 * PAGE}, {"error": errno.EINTR, "times": 2}):
        with fast_path.disk(**fault):
            assert fast_path.read_blob(place.fd, value, start, length) == payload[start:]
    with fast_path.disk(error=errno.EIO, times=9):
        assert fast_path.read_blob(place.fd, value, start, length) is None


@pytest.mark.parametrize("seed", [SEED, SEED + 1])
def test_the_largest_record_and_another_seed(fast_path: FastPath, place: Place, seed: int) -> None:
    """A record that was written with another secret is none (hazard 17)."""
    fast_path.set_up(Options(), seed=seed)
    payload = bytes_of(MOST)[:MOST]
    file = Inode(7, *[0] * 22)._replace(size=MOST, version=2)
    value = fast_path.write_record(place.fd, file, 0, payload, 0)
    found, kind, _ = record.decode_header(os.pread(place.fd, RECORD_HEADER_BYTES, 0), seed) or (None, 0, 0)
    assert (found, kind) == (header_of(file, 0, MOST), RECORD_DATA)
    fast_path.set_up(Options(), seed=SEED)
    part = fast_path.read_blob(place.fd, value, 5, 1 << 20)
    assert part == (payload[5 : 5 + (1 << 20)] if seed == SEED else None)

"""What of a file is kept together, what is read while it waits to be written, and what counts as under way."""

import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from cachefs.contract.index import Table
from cachefs.data import write_behind
from cachefs.data.commit import Pending
from cachefs.data.data_cache import DataCache
from cachefs.data.write_behind import WriteBehind
from cachefs.options import Options
from cachefs.stats.metrics import Metrics
from cachefs.store.blob.blob import Blob
from cachefs.store.index.index import Index
from cachefs.store.index.records import PINNED, Inode, inode_key
from policies.prefetch.sequential import CHUNK_BYTES


def inode(size: int) -> Inode:
    return Inode(7, PINNED, *(0,) * 21)._replace(mode=0o100644, size=size, version=1, validated_run=1, source_inode=7)


class Cache:
    def __init__(self, index: Index, path: Path) -> None:
        self.index, self.metrics = index, Metrics()
        self.now_s = 1000.0
        self.blob = Blob(path, 5)
        self.writes = WriteBehind(index, self.blob, self.metrics, 1 << 30, clock=lambda: self.now_s)
        self.unreported_bytes = 0
        self.data = DataCache(
            index, self.blob, Options(), self.metrics, self.writes, unreported_bytes=lambda: self.unreported_bytes
        )

    async def flush(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.writes.run)
            assert await self.writes.flush(20)
            nursery.cancel_scope.cancel()


@pytest.fixture
def cache(index: Index, tmp_path: Path) -> Iterator[Cache]:
    made = Cache(index, tmp_path / "blob")
    yield made
    made.blob.close()


@pytest.mark.parametrize("size", [0, 1, Options().small_file_bytes, CHUNK_BYTES + 1, 2 * CHUNK_BYTES])
def test_the_units_of_a_file_cover_it_once(cache: Cache, size: int) -> None:
    position = 0
    for start, length in cache.data.units(inode(size)):
        assert start == position and length > 0
        position += length
    assert position == size


def test_a_range_that_waits_to_be_written_is_read_where_it_lies(cache: Cache) -> None:
    payload = bytes(range(200))
    assert cache.data.admit(inode(2 * CHUNK_BYTES), CHUNK_BYTES, payload)
    found = trio.run(cache.data.read, inode(2 * CHUNK_BYTES), CHUNK_BYTES + 50, 10)
    assert found is not None and bytes(found[0]) == payload[50:60]


def test_what_is_read_off_the_disk_is_counted(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    read = cache.blob.read

    def from_disk(*arguments, nowait: bool = False) -> memoryview:  # type: ignore[no-untyped-def]
        if nowait:
            raise BlockingIOError(errno.EAGAIN, "")
        return read(*arguments)

    async def main() -> None:
        with cache.index.update() as update:
            update.put(Table.INODES, inode_key(7), inode(200).pack())
        cache.data.admit(inode(200), 0, bytes(200))
        await cache.flush()
        monkeypatch.setattr(cache.blob, "read", from_disk)
        assert await cache.data.read(inode(200), 20, 100) == (bytes(100), True)

    trio.run(main)
    assert cache.metrics.disk_bytes == 100


def test_who_does_not_append_admits_nothing(cache: Cache) -> None:
    data = DataCache(cache.index, cache.blob, Options(), cache.metrics, cache.writes, appends=False)
    assert not data.admit(inode(200), 0, bytes(200))
    assert cache.writes.queued_bytes == 0


def test_what_is_under_way_is_what_the_index_has_not_heard_of(cache: Cache) -> None:
    async def main() -> None:
        assert not cache.data.is_under_way
        cache.unreported_bytes = 1
        assert cache.data.is_under_way
        cache.unreported_bytes = 0
        cache.data.admit(inode(200), 0, bytes(200))
        assert cache.data.is_under_way
        await cache.flush()
        assert not cache.data.is_under_way

    trio.run(main)


@pytest.mark.parametrize("most", [1, 7, 4096])
def test_a_write_that_the_disk_takes_in_parts_is_written_whole(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    payloads = [os.urandom(length) for length in (1, 300, 5000)]

    def write_part(fd: int, buffers: list[memoryview], offset: int) -> int:
        return os.pwrite(fd, b"".join(buffers)[:most], offset)

    monkeypatch.setattr(os, "pwritev", write_part)
    extents = cache.blob.append([(Pending(inode(len(p)), 0, p).header(), p) for p in payloads])
    assert [bytes(cache.blob.read(each, 0, each.length)) for each in extents] == payloads


def test_each_kind_of_failure_is_said_once_a_minute(cache: Cache, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)

    def said(after_s: float, kind: str) -> int:
        caplog.clear()
        cache.now_s += after_s
        cache.writes.failed(kind, "a reason")
        return len(caplog.records)

    assert [said(0, "read"), said(59, "read"), said(0, "blob"), said(2, "read"), said(1, "read")] == [1, 0, 1, 1, 0]
    assert cache.metrics.errors == 5


def test_others_have_their_turn_while_much_is_committed(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_behind, "FORGET_CHUNK", 1)
    forget, turns, seen = cache.index.forget_committed, 0, []

    def watched(flushed: object) -> None:
        seen.append(turns)
        forget(flushed)  # type: ignore[arg-type]

    async def take_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    async def main() -> None:
        with cache.index.update() as update:
            for number in range(7, 27):
                update.put(Table.INODES, inode_key(number), inode(200).pack())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(take_turns)
            await cache.flush()
            nursery.cancel_scope.cancel()

    monkeypatch.setattr(cache.index, "forget_committed", watched)
    trio.run(main)
    assert len(seen) == 20 and len(set(seen)) > 5  # whose turn it is is drawn

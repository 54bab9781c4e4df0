"""What a crash of the machine, a disk that refuses and a damaged blob leave: the index never points at bytes that are
not on disk, and a rebuild counts what there is."""

import errno
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from cachefs.contract.blob import RECORD_HEADER_BYTES, SLAB_BYTES
from cachefs.contract.index import Table
from cachefs.data.commit import Filled, Pending
from cachefs.data.data_cache import DataCache
from cachefs.data.write_behind import WriteBehind
from cachefs.errors import CorruptRecord
from cachefs.options import Options
from cachefs.stats.metrics import Metrics
from cachefs.store import recovery, snapshot
from cachefs.store.blob import record
from cachefs.store.blob.blob import Blob
from cachefs.store.blob.space import place_of
from cachefs.store.index.environment import Environment
from cachefs.store.index.index import Commit, Index, Totals
from cachefs.store.index.records import (
    IMMUTABLE,
    LISTED,
    PINNED,
    STALE,
    UNLINKED,
    UNSETTLED,
    Dentry,
    Extent,
    Inode,
    inode_key,
    inode_of_key,
    pair_key,
)
from cachefs.store.runs import RunState

SEED = 5
SIZE = 200_000
PAYLOAD = bytes(range(250)) * 800


def inode(number: int = 7, version: int = 1) -> Inode:
    return Inode(number, PINNED, *(0,) * 21)._replace(
        mode=0o100644, size=SIZE, version=version, validated_run=1, source_inode=number
    )


class Disk:
    """A disk with a cache of its own: what was there at the last sync survives a crash of the machine."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._survives = path.with_name("survives")
        self._survives.touch()

    def synced(self, sync: Callable[[int], None], fd: int) -> None:
        sync(fd)
        shutil.copyfile(self._path, self._survives)

    def has(self, extent: Extent) -> bool:
        blob = Blob(self._survives, SEED)
        try:
            return blob.read(extent, 0, extent.length) == PAYLOAD[: extent.length]
        except CorruptRecord:
            return False
        finally:
            blob.close()


class Parts:
    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.index = Index(Environment(path / "durable", sync=False), Environment(path / "session", sync=False))
        self.blob = Blob(path / "blob", SEED)
        self.metrics = Metrics()
        self.writes = WriteBehind(self.index, self.blob, self.metrics, 1 << 30)
        self.data = DataCache(self.index, self.blob, Options(), self.metrics, self.writes)
        self.lost: list[Extent] = []
        """Committed before they were on disk."""
        disk = Disk(path / "blob")
        monkeypatch.setattr(os, "fdatasync", partial(disk.synced, os.fdatasync))
        commit = self.index.commit

        def checked(batch: Any, extents: Any, dropped: Any = ()) -> Commit:
            rows = list(extents)
            self.lost += [extent for _, _, extent in rows if not disk.has(extent)]
            return commit(batch, rows, dropped)

        self.index.commit = checked  # type: ignore[method-assign, assignment]
        with self.index.update() as update:
            update.put(Table.INODES, inode_key(7), inode().pack())

    def append_as_the_fast_path_does(self) -> Filled:
        """A record in a slab of another writer: written, not synced."""
        slab = self.blob.grant()
        pending = Pending(inode(), 0, PAYLOAD)
        checksums = record.checksums_of(PAYLOAD, SEED)
        prefix = record.encode_prefix(pending.header(), checksums, SEED)
        os.pwrite(self.blob.fd, prefix + PAYLOAD, slab)
        size = record.record_bytes(SIZE)
        return Filled(1, 7, 0, Extent(PINNED, SIZE, slab + len(prefix), 1, size, checksums))

    async def flush(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.writes.run)
            assert await self.writes.flush(20)
            nursery.cancel_scope.cancel()

    def close(self) -> None:
        self.index.close()
        self.blob.close()


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Parts]:
    made = Parts(tmp_path, monkeypatch)
    yield made
    made.close()


WRITERS = pytest.mark.parametrize("writer", ["daemon", "fast path"])


def write(parts: Parts, writer: str) -> None:
    if writer == "daemon":
        parts.writes.queue(Pending(inode(), 0, PAYLOAD))
    else:
        parts.writes.filled([parts.append_as_the_fast_path_does()])


@WRITERS
def test_payload_is_on_disk_before_the_index_points_at_it(parts: Parts, writer: str) -> None:
    write(parts, writer)
    trio.run(parts.flush)
    assert parts.index.totals.cached_files == 1
    assert parts.lost == []


@WRITERS
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_what_the_disk_refused_is_never_indexed(
    parts: Parts, writer: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fdatasync", refuse)
    settled: list[int] = []
    undone: list[bool] = []
    parts.writes.on_handled.add(settled.append)
    parts.writes.on_lost_append.add(lambda: undone.append(True))
    write(parts, writer)
    trio.run(parts.flush)
    assert parts.index.totals == Totals()
    with parts.index.view() as view:
        assert not view.extents.has_any(7)
    assert (settled, undone) == (([], []) if writer == "daemon" else ([1], [True]))
    assert not parts.writes.is_writable


def test_what_was_dropped_is_not_served_while_it_waits_to_go(parts: Parts) -> None:
    async def main() -> None:
        write(parts, "daemon")
        await parts.flush()
        assert await parts.data.read(inode(), 0, 100) == (PAYLOAD[:100], True)
        with parts.index.view() as view:
            found = view.extents.at(7, 0)
        assert found is not None
        parts.writes.drop(7, 0, found[1].blob_offset)
        assert await parts.data.read(inode(), 0, 100) is None
        await parts.flush()
        assert await parts.data.read(inode(), 0, 100) is None

    trio.run(main)


@pytest.mark.parametrize("in_memory", [True, False], ids=["page cache", "disk"])
def test_14_a_read_keeps_its_transaction_until_it_has_its_bytes(parts: Parts, in_memory: bool) -> None:
    """Nothing is given back that a reader of the index can see."""
    kept: list[bool] = []
    read = parts.blob.read

    def watched(extent: Extent, start: int, length: int, *, nowait: bool = False) -> memoryview:
        kept.append(parts.index.durable.oldest_reader() is not None)
        if nowait and not in_memory:
            raise BlockingIOError(errno.EAGAIN, "")
        return read(extent, start, length)

    async def main() -> None:
        write(parts, "daemon")
        await parts.flush()
        parts.blob.read = watched  # type: ignore[method-assign, assignment]
        assert await parts.data.read(inode(), 5, 100) == (PAYLOAD[5:105], True)
        assert kept == [True] * (1 if in_memory else 2)
        assert parts.index.durable.oldest_reader() is None

    trio.run(main)


NUMBERS_THAT_ARE_NONE = [(1 << 64, 0, 0), (7, 1 << 64, 0), (7, 0, 1 << 64), (-1, 0, 0), (7, -1, 0), (7, 0, -1)]


@pytest.mark.parametrize("row", NUMBERS_THAT_ARE_NONE)
def test_a_drop_of_a_place_that_cannot_be_stops_no_commit(parts: Parts, row: tuple[int, int, int]) -> None:
    parts.writes.drop(*row)
    write(parts, "daemon")
    trio.run(parts.flush)
    assert parts.index.available and parts.index.totals.cached_files == 1


# --- rebuilding ------------------------------------------------------------------------------------------------------


def header(number: int, length: int, offset: int = 0, version: int = 1) -> record.Header:
    return record.Header(length, number, offset, version, length, 1, 2, 3, 0, number, 0o100644)


@pytest.fixture
def blob(tmp_path: Path) -> Iterator[Blob]:
    made = Blob(tmp_path / "blob", SEED)
    yield made
    made.close()


def rebuilt(blob: Blob, path: Path) -> tuple[Totals, dict[tuple[int, int], Extent]]:
    """The totals that a rebuild returned, which are those that it stored, and the extents."""
    index = Environment(path, sync=False)
    totals = recovery.rebuild(blob, index)
    with index.lmdb.begin() as txn:
        rows = txn.cursor(db=index.tables[Table.EXTENTS])
        extents = {struct.unpack(">2Q", key): Extent.unpack(value) for key, value in rows}
        assert Totals.unpack(txn.get(b"totals", db=index.tables[Table.META])) == totals
    index.close()
    return totals, extents


def counted(extents: dict[tuple[int, int], Extent]) -> Totals:
    """What the totals must be, by the extents."""
    return Totals(
        len({number for number, _ in extents}),
        sum(extent.length for extent in extents.values()),
        sum(extent.record_bytes for extent in extents.values()),
    )


def test_the_totals_of_a_rebuild_are_those_of_its_extents(blob: Blob, tmp_path: Path) -> None:
    blob.append(
        [
            (header(1, 1000), bytes(1000)),
            (header(1, 3000), bytes(3000)),  # the first lies within it
            (header(1, 500, 100), bytes(500)),  # within the second
            (header(2, 1000, version=1), bytes(1000)),
            (header(2, 700, version=2), bytes(700)),
            (header(3, 1000), bytes(1000)),
            (header(3, 1000, 900), bytes(1000)),  # they overlap
        ]
    )
    dead = blob.append([(header(4, 1000), bytes(1000))])[0]
    start, end = place_of(dead)
    blob.mark_gap(start, end, 1)
    totals, extents = rebuilt(blob, tmp_path / "index")
    assert totals == counted(extents)
    assert totals == Totals(3, 3000 + 700 + 2000, sum(map(record.record_bytes, (3000, 700, 1000, 1000))))


def test_what_a_rebuild_does_not_need_is_given_back(blob: Blob, tmp_path: Path) -> None:
    """Records of older versions, and those that lie within others: the next rebuild finds gaps in their places."""
    older, within, whole, newer = blob.append(
        [
            (header(1, 100_000, version=1), bytes(100_000)),
            (header(2, 70_000, 100), bytes(70_000)),
            (header(2, 100_000), bytes(100_000)),
            (header(1, 1000, version=2), bytes(1000)),
        ]
    )
    _, extents = rebuilt(blob, tmp_path / "index")
    assert extents == {(1, 0): newer, (2, 0): whole}
    assert {extent.blob_offset for _, extent in recovery.scan(blob)} == {newer.blob_offset, whole.blob_offset}
    for each in (older, within):
        assert not any(os.pread(blob.fd, 4096, each.blob_offset))


def test_a_rebuild_has_aliases_of_inodes_that_have_other_numbers_here(blob: Blob, tmp_path: Path) -> None:
    renumbered = header(2, 1000)._replace(source_inode=99)
    elsewhere = header(3, 1000)._replace(device=5, source_inode=3)
    blob.append([(each, bytes(1000)) for each in (header(1, 1000), renumbered, elsewhere)])
    durable = Environment(tmp_path / "index", sync=False)
    recovery.rebuild(blob, durable)
    with durable.lmdb.begin() as txn:
        aliases = {key: inode_of_key(value[8:16]) for key, value in txn.cursor(db=durable.tables[Table.ALIASES])}
    durable.close()
    assert aliases == {pair_key(0, 99): 2, pair_key(5, 3): 3}


def test_what_a_rebuild_does_not_know_of_an_inode_is_zero(blob: Blob, tmp_path: Path) -> None:
    blob.append([(header(1, 1000), bytes(1000))])
    durable = Environment(tmp_path / "index", sync=False)
    recovery.rebuild(blob, durable)
    with durable.lmdb.begin() as txn:
        found = Inode.unpack(1, txn.get(inode_key(1), db=durable.tables[Table.INODES]))
    durable.close()
    assert found.flags == PINNED | STALE and found.nlink == 1
    for field in (
        "uid",
        "gid",
        "rdev",
        "blocks",
        "atime_ns",
        "validated_run",
        "entries_valid_from",
        "next_position",
        "lookups",
    ):
        assert getattr(found, field) == 0, field


def test_the_totals_of_a_rebuild_in_many_parts(blob: Blob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "BATCH", 3)
    blob.append([(header(1 + n % 4, 1000 + n, 700 * n), bytes(1000 + n)) for n in range(20)])
    totals, extents = rebuilt(blob, tmp_path / "index")
    assert totals == counted(extents) and totals.cached_files == 4 and len(extents) == 20


@pytest.mark.parametrize("keep", ["half of the payload", "all but one byte", "half of the table", "the header"])
def test_a_record_that_the_blob_ends_in_is_not_rebuilt(blob: Blob, tmp_path: Path, keep: str) -> None:
    first, last = blob.append([(header(1, 1000), bytes(1000)), (header(2, SIZE), PAYLOAD)])
    start = last.blob_offset - record.payload_start(SIZE)
    os.truncate(
        tmp_path / "blob",
        {
            "half of the payload": last.blob_offset + SIZE // 2,
            "all but one byte": last.blob_offset + SIZE - 1,
            "half of the table": start + RECORD_HEADER_BYTES + 8,
            "the header": start + RECORD_HEADER_BYTES,
        }[keep],
    )
    totals, extents = rebuilt(blob, tmp_path / "index")
    assert extents == {(1, 0): first}
    assert totals == counted(extents)


def test_a_record_whose_table_of_checksums_is_damaged_is_not_rebuilt(blob: Blob, tmp_path: Path) -> None:
    """With a forged table the payload would verify, whatever it is."""
    damaged = blob.append([(header(1, SIZE), PAYLOAD)])[0]
    blob._new_slab()
    sound = blob.append([(header(2, SIZE), PAYLOAD)])[0]
    table = damaged.blob_offset - 8 * len(damaged.checksums)
    byte = os.pread(blob.fd, 1, table)[0]
    os.pwrite(blob.fd, bytes([byte ^ 1]), table)
    assert table < SLAB_BYTES < sound.blob_offset
    totals, extents = rebuilt(blob, tmp_path / "index")
    assert extents == {(2, 0): sound}
    assert totals == counted(extents)


# --- snapshots -------------------------------------------------------------------------------------------------------


@pytest.mark.promise("PI-14", "PI-16")
def test_a_snapshot_leaves_out_what_has_to_be_compared_again(tmp_path: Path) -> None:
    index = Environment(tmp_path / "exported", sync=False)
    doubtful = {
        b"stale": {"flags": PINNED | STALE},
        b"unlinked": {"flags": PINNED | UNLINKED},
        b"unsettled": {"flags": PINNED | UNSETTLED},
        b"not pinned": {"flags": IMMUTABLE},
        b"of an earlier run": {"validated_run": 4},
        b"of another device": {"device": 9},
    }
    good = {b"good": {}, b"immutable": {"flags": PINNED | IMMUTABLE}}
    names = {**doubtful, **good, b"doubtful name": {}, b"name not pinned": {}}
    numbers = {name: number for number, name in enumerate(names, 10)}
    with index.lmdb.begin(write=True) as txn:

        def put(table: Table, key: bytes, value: bytes) -> None:
            txn.put(key, value, db=index.tables[table])

        put(Table.META, b"run", RunState(5, 5).pack())
        root = Inode(1, PINNED | LISTED, *(0,) * 21)
        root = root._replace(mode=0o040755, validated_run=5, entries_valid_from=5, version=1, source_inode=1)
        put(Table.INODES, inode_key(1), root.pack())
        for name, fields in names.items():
            made = inode(numbers[name])._replace(**{"validated_run": 5, **fields})
            put(Table.INODES, inode_key(made.number), made.pack())
            validated_run = 4 if name == b"doubtful name" else 5
            flags = 0 if name == b"name not pinned" else PINNED
            put(Table.DENTRIES, inode_key(1) + name, Dentry(flags, made.number, validated_run, made.number).pack())
            put(Table.LISTING, pair_key(1, made.number), PINNED.to_bytes(4, "little") + name)
        for name, version in ((b"user.now", inode(0).version), (b"user.before", inode(0).version + 1)):
            value = PINNED.to_bytes(4, "little") + bytes(4) + version.to_bytes(8, "little") + b"\1value"
            put(Table.XATTRS, inode_key(numbers[b"good"]) + name, value)
    index.close()
    assert snapshot.export(tmp_path / "exported", tmp_path / "file", "/source") == len(good)
    assert snapshot.load(tmp_path / "file", tmp_path / "index", snapshot.RootIdentity(1, 0), ()) == len(good)
    index = Environment(tmp_path / "index", sync=False)
    with index.lmdb.begin() as txn:
        found = {key[8:] for key, _ in txn.cursor(db=index.tables[Table.DENTRIES])}
        inodes = {struct.unpack(">Q", key)[0] for key, _ in txn.cursor(db=index.tables[Table.INODES])}
        root = Inode.unpack(1, txn.get(inode_key(1), db=index.tables[Table.INODES]))
        xattrs = [key[8:] for key, _ in txn.cursor(db=index.tables[Table.XATTRS])]
    index.close()
    assert found == set(good)
    assert inodes == {1, *(numbers[name] for name in good)}
    assert not root.flags & LISTED  # something of it is left out
    assert xattrs == [b"user.now"]

"""Aliases lie below 2^32 or 2^53, never meet a number of the source, and none is given out twice."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachefs.contract.index import ROOT_INODE, Table
from cachefs.options import Options, Revalidate
from cachefs.store import aliases, recovery, snapshot
from cachefs.store.aliases import HIGH, LEFT_OUT, LOW, Given
from cachefs.store.blob import record
from cachefs.store.blob.blob import Blob
from cachefs.store.cache_directory import OpenedIndex
from cachefs.store.index.environment import Environment
from cachefs.store.index.index import Index
from cachefs.store.index.records import FLAGS_PINNED, PINNED, Dentry, Inode, inode_key, pair_key
from cachefs.store.runs import FIRST_OLD_ALIAS, RunState
from cachefs.system.stat import Stat
from tests.cachefs.inode_caches import inode_cache

READ_ONLY = Options(read_only=True, attr_timeout_s=float("inf"))
DEVICE = 3
"""The device number of a filesystem beneath the source."""


def stat(number: int, *, device: int = 0, btime_ns: int = 1) -> Stat:
    return Stat(0o100644, 1, 0, 0, 0, 4096, 10, 8, 1, btime_ns, btime_ns, btime_ns, device, number)


def number_of(index: Index, now: Stat, name: bytes = b"name") -> int:
    """The number that a mount shows."""
    with index.update() as update:
        return inode_cache(index, READ_ONLY).apply_stat(update, ROOT_INODE, name, now, pin=True).number


def use_up(index: Index, low: int, high: int = HIGH.stop) -> None:
    with index.update() as update:
        aliases.record(update, Given(low, high))


class Cache:
    """A cache directory and a runtime directory, through several daemons."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.opened = self.open()

    def open(self, *, same_mount: bool = False) -> OpenedIndex:
        durable = Environment(self.place / "index", sync=False)
        self.opened = OpenedIndex(
            durable, self.place / "session", Revalidate.LAZY, b"", mutable=(), same_mount=same_mount
        )
        return self.opened

    def give(self, source_number: int) -> int:
        with self.opened.index.update() as update:
            return aliases.give(update, stat(source_number, device=DEVICE))

    def commit(self) -> None:
        index = self.opened.index
        batch = index.take_dirty(1000)
        assert batch
        index.commit(batch, [])

    def end(self, *, killed: bool) -> None:
        self.opened.close(flushed=not killed)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    made = Cache(tmp_path)
    yield made
    made.end(killed=True)


# --- ranges ----------------------------------------------------------------------------------------------------------


@pytest.mark.promise("CH-34")
@pytest.mark.parametrize(
    ("source_number", "numbers"),
    [(0, LOW), (ROOT_INODE, LOW), (99, LOW), ((1 << 32) - 1, LOW), (1 << 32, HIGH), (1 << 40, HIGH), (1 << 63, HIGH)],
)
def test_the_range_of_an_alias_is_that_of_the_number_in_the_source(
    index: Index, source_number: int, numbers: range
) -> None:
    first = number_of(index, stat(source_number, device=DEVICE))
    assert first in numbers
    assert number_of(index, stat(source_number, device=DEVICE)) == first
    assert number_of(index, stat(source_number, device=DEVICE, btime_ns=2), b"other") == first - 1


@pytest.mark.promise("CH-34")
def test_when_the_lower_range_is_used_up_aliases_are_of_the_upper_one(index: Index) -> None:
    use_up(index, LOW.start + 2)
    found = [number_of(index, stat(number, device=DEVICE), b"%d" % number) for number in range(10, 14)]
    assert found == [LOW.start + 1, LOW.start, HIGH[-1], HIGH[-2]]


def test_the_ranges_are_below_2_to_the_32_and_below_2_to_the_53() -> None:
    assert LOW.stop < 1 << 32 and HIGH.stop == 1 << 53
    assert len({float(number) for number in (*LOW[-9:], *HIGH[-9:])}) == 18


@pytest.mark.promise("CH-35")
@pytest.mark.parametrize("numbers", [LOW, HIGH], ids=["low", "high"])
@pytest.mark.parametrize("forgotten", [False, True], ids=["known", "forgotten"])
def test_an_object_of_the_source_never_gets_a_number_that_is_an_alias(
    index: Index, numbers: range, forgotten: bool
) -> None:
    """The kernel may hold an alias whose record is gone (--metadata-limit)."""
    alias = number_of(index, stat(numbers.start - 1, device=DEVICE), b"alias")
    assert alias == numbers[-1]
    if forgotten:
        with index.update() as update:
            update.delete(Table.INODES, inode_key(alias))
            update.delete(Table.LINKS, inode_key(alias) + inode_key(ROOT_INODE) + b"alias")
    newcomers = [alias, alias - 1, alias - 2, numbers.start]
    found = [number_of(index, stat(each), b"%d" % each) for each in newcomers]
    assert len({alias, *found}) == 5
    assert all(each in numbers for each in found)
    assert [number_of(index, stat(each), b"%d" % each) for each in newcomers] == found


def test_numbers_beside_the_ranges_are_the_sources(index: Index) -> None:
    for number in (2, LOW.start - 1, LOW.stop, HIGH.start - 1, HIGH.stop, FIRST_OLD_ALIAS - 1):
        assert number_of(index, stat(number), b"%d" % number) == number


# --- caches of earlier versions --------------------------------------------------------------------------------------


@pytest.mark.promise("CH-34")
def test_an_object_that_an_earlier_version_gave_its_number_in_the_source_keeps_it(index: Index) -> None:
    number = LOW[-1]
    with index.update() as update:
        row = Inode(number, PINNED, *(0,) * 21).with_stat(stat(number))
        update.put(Table.INODES, inode_key(number), row.pack())
    assert number_of(index, stat(number)) == number
    assert number_of(index, stat(50, device=DEVICE), b"other") == number - 1


@pytest.mark.promise("CH-34")
def test_an_alias_of_an_earlier_version_stays(index: Index) -> None:
    old = FIRST_OLD_ALIAS | (1 << 40) + 7
    with index.update() as update:
        update.put(Table.ALIASES, pair_key(DEVICE, 50), FLAGS_PINNED + bytes(4) + inode_key(old))
    assert number_of(index, stat(50, device=DEVICE)) == old
    assert number_of(index, stat(51, device=DEVICE), b"other") == LOW[-1]
    assert number_of(index, stat(old), b"of the source") in HIGH


# --- no number twice -------------------------------------------------------------------------------------------------


@pytest.mark.promise("CH-22")
def test_an_update_that_fails_leaves_no_trace(index: Index) -> None:
    with pytest.raises(ZeroDivisionError), index.update() as update:
        aliases.give(update, stat(50, device=DEVICE))
        raise ZeroDivisionError
    assert number_of(index, stat(51, device=DEVICE)) == LOW[-1]


@pytest.mark.promise("CH-22")
@pytest.mark.parametrize("committed", [False, True])
@pytest.mark.parametrize("same_mount", [True, False], ids=["take-over", "new mount"])
def test_after_a_kill_aliases_go_on_below_the_last_one(cache: Cache, same_mount: bool, committed: bool) -> None:
    assert [cache.give(50), cache.give(1 << 40)] == [LOW[-1], HIGH[-1]]
    if committed:
        cache.commit()
    for time in (2, 3):
        cache.end(killed=True)
        cache.open(same_mount=same_mount)
        assert [cache.give(50), cache.give(1 << 40)] == [LOW[-time], HIGH[-time]]


@pytest.mark.promise("CH-22")
def test_after_an_unmount_aliases_go_on_below_the_last_one(cache: Cache) -> None:
    assert cache.give(50) == LOW[-1]
    cache.commit()
    cache.end(killed=False)
    cache.open()
    assert cache.give(50) == LOW[-2]


@pytest.mark.promise("CH-22")
@pytest.mark.parametrize("lost", ["session", "part of the session"])
def test_aliases_that_may_be_lost_are_left_out(cache: Cache, lost: str) -> None:
    """The machine has crashed, or the runtime directory was full."""
    given = cache.give(50)
    for _ in range(2):  # each time before anything is committed
        cache.opened.index.session.overflow.put(Table.META, b"more", b"than fits")
        cache.opened.index.session.overflow.update_mark()
        cache.end(killed=True)
        if lost == "session":
            shutil.rmtree(cache.place / "session")
        cache.open(same_mount=lost != "session")
        assert cache.give(50) < given - LEFT_OUT // 2
        given = cache.give(50)
    assert given in LOW


@pytest.mark.promise("CH-22")
def test_a_mount_that_lost_its_index_knows_its_aliases(cache: Cache) -> None:
    """Aliases of directories are in the index only, and the kernel knows them."""
    given = [cache.give(50) for _ in range(5)]
    cache.commit()
    cache.end(killed=True)
    shutil.rmtree(cache.place / "index")
    cache.open(same_mount=True)
    assert cache.give(50) < min(given)


@pytest.mark.promise("CH-22")
def test_a_rebuilt_index_begins_below_the_aliases_of_the_blob(tmp_path: Path) -> None:
    blob, durable = Blob(tmp_path / "blob", 7), Environment(tmp_path / "index", sync=False)
    numbers = [(LOW[-9], 50), (LOW[-500], LOW[-500]), (HIGH[-7], 1 << 40)]  # the second one is the source's
    blob.append(
        [(record.Header(4, number, 0, 5, 4, 1, 2, 3, 0, source, 0o100644), b"abcd") for number, source in numbers]
    )
    recovery.rebuild(blob, durable)
    assert aliases.recorded_at_start(durable) == (LOW[-9], HIGH[-7])
    durable.close()
    blob.close()


@pytest.mark.promise("CH-22")
def test_an_index_that_lost_its_state_is_searched_for_aliases(tmp_path: Path) -> None:
    durable = Environment(tmp_path / "index", sync=False)
    row = Inode(0, PINNED, *(0,) * 21)
    with durable.write() as txn:
        for number, source in ((LOW[-3], 50), (LOW[-500], LOW[-500])):  # the second one is the source's
            txn.put(inode_key(number), row._replace(source_inode=source).pack(), db=durable.tables[Table.INODES])
        alias = FLAGS_PINNED + bytes(4) + inode_key(HIGH[-4])
        txn.put(pair_key(0, 77), alias, db=durable.tables[Table.ALIASES])
    assert aliases.recorded_at_start(durable) == (LOW[-3], HIGH[-4])
    durable.close()


@pytest.mark.promise("CH-22")
def test_an_imported_snapshot_begins_below_the_aliases_of_the_exporter(tmp_path: Path) -> None:
    exported = Environment(tmp_path / "exported", sync=False)
    blank = Inode(0, PINNED, *(0,) * 21)._replace(validated_run=5, version=1)
    numbers = {ROOT_INODE: 40, 10: 10, LOW[-20]: 11, LOW[-500]: LOW[-500]}  # the last one is the source's
    with exported.write() as txn:
        txn.put(b"run", RunState(5, 5).pack(), db=exported.tables[Table.META])
        for number, source in numbers.items():
            mode = 0o040755 if number == ROOT_INODE else 0o100644
            row = blank._replace(mode=mode, nlink=1, source_inode=source)
            txn.put(inode_key(number), row.pack(), db=exported.tables[Table.INODES])
            dentry = Dentry(PINNED, number, 5, 0)
            if number != ROOT_INODE:
                name = inode_key(ROOT_INODE) + b"%d" % number
                txn.put(name, dentry.pack(), db=exported.tables[Table.DENTRIES])
    exported.close()
    snapshot.export(tmp_path / "exported", tmp_path / "file", "/source")
    assert snapshot.load(tmp_path / "file", tmp_path / "index", snapshot.RootIdentity(40, 0), ()) == 3
    imported = Environment(tmp_path / "index", sync=False)
    assert aliases.recorded_at_start(imported) == (LOW[-20], HIGH.stop)
    imported.close()

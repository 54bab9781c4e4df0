"""Positions of listings: never used twice, also by a record of the directory that is made anew (hazard 27)."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from cachefs.contract.index import Table
from cachefs.data.young_files import YoungFiles
from cachefs.fs.directories import Directories
from cachefs.fs.handles import no_request
from cachefs.metadata.inode_cache import InodeCache
from cachefs.metadata.listings import Listings
from cachefs.options import Options
from cachefs.store.index.environment import Environment
from cachefs.store.index.index import Index
from cachefs.store.index.records import Inode, pair_key
from cachefs.system.stat import Stat
from tests.cachefs.inode_caches import inode_cache

ROOT, DIRECTORY = 1, 50
OLD = [b"old%d" % number for number in range(5)]
NEW = [b"new%d" % number for number in range(3)]


def stat(number: int, mode: int = 0o100644) -> Stat:
    return Stat(mode, 1, 0, 0, 0, 4096, 10, 8, 1, 2, 3, 4, 0, number)


def look_up(metadata: InodeCache, names: list[bytes], *, pin: bool) -> Inode:
    """The directory's record, and one of each of its names."""
    with metadata.index.update() as update:
        directory = metadata.apply_stat(update, ROOT, b"directory", stat(DIRECTORY, 0o040755), pin=pin)
        for number, name in enumerate([*OLD, *NEW], 100):
            if name in names:
                metadata.apply_stat(update, DIRECTORY, name, stat(number), pin=pin)
    return directory


def pinned_listing(index: Index) -> tuple[Listings, Inode]:
    """A listing of OLD on a read-only mount, and the directory's record."""
    metadata = inode_cache(index, Options(read_only=True, attr_timeout_s=float("inf")))
    listings = Listings(metadata)
    directory = look_up(metadata, OLD, pin=True)
    with index.update() as update:
        directory, _ = listings.add_rows(update, directory, OLD, pin=True)
    return listings, directory


def rows(listings: Listings, index: Index) -> list[bytes]:
    with index.view() as view:
        return [name for _, name in listings.rows(view, DIRECTORY, 0)]


@pytest.mark.parametrize("names", [OLD + NEW, NEW + OLD, OLD[:2] + NEW + OLD[2:]], ids=["behind", "before", "between"])
@pytest.mark.parametrize("pin", [True, False], ids=["read-only", "read-write"])
@pytest.mark.parametrize("durable", [True, False], ids=["durable", "session"])
def test_a_record_that_is_made_anew_continues_behind_all_rows(
    index: Index, names: list[bytes], pin: bool, durable: bool
) -> None:
    metadata = inode_cache(index, Options(read_only=pin, attr_timeout_s=float("inf")))
    listings = Listings(metadata)
    directory = look_up(metadata, OLD, pin=pin)
    with index.update() as update:
        listings.add_rows(update, directory, OLD, pin=pin)
    if durable:
        index.forget_committed(index.commit(index.take_dirty(100), []).flushed)
    with index.update() as update:
        metadata.put_inode(update, directory._replace(next_position=3))
    directory = look_up(metadata, names, pin=pin)
    assert directory.next_position == 3
    with index.update() as update:
        _, wanting = listings.add_rows(update, directory, names, pin=pin)
    assert sorted(rows(listings, index)) == sorted(names)
    assert wanting == []


def test_a_place_that_another_name_took_meanwhile_is_given_up(index: Index) -> None:
    """The rows of a read-write mount go with a FORGET; the entry of a pinned file stays, and remembers its place."""
    metadata = inode_cache(index, Options())
    listings = Listings(metadata)
    directory = look_up(metadata, OLD, pin=False)
    with index.update() as update:
        listings.add_rows(update, directory, OLD, pin=False)
        for position, _ in list(listings.rows(update, DIRECTORY, 0)):
            update.delete(Table.LISTING, pair_key(DIRECTORY, position))
        metadata.put_inode(update, directory._replace(next_position=3))
    directory = look_up(metadata, NEW, pin=False)
    with index.update() as update:
        listings.add_rows(update, directory, NEW + OLD[:1], pin=False)
    assert sorted(rows(listings, index)) == sorted(NEW + OLD[:1])


def test_names_that_are_not_pinned_are_told(index: Index) -> None:
    metadata = inode_cache(index, Options(read_only=True, attr_timeout_s=float("inf")))
    listings = Listings(metadata)
    directory = look_up(metadata, OLD, pin=True)
    look_up(metadata, NEW[:1], pin=False)
    with index.update() as update:
        _, wanting = listings.add_rows(update, directory, OLD + NEW, pin=True)
    assert wanting == NEW  # one is not pinned, and two are not there


def test_a_row_that_is_left_over_goes_with_the_next_listing(index: Index) -> None:
    listings, _ = pinned_listing(index)
    with index.update() as update:
        update.put(Table.LISTING, pair_key(DIRECTORY, 90), bytes(4) + b"gone")
        update.put(Table.LISTING, pair_key(DIRECTORY, 91), bytes(4) + OLD[1])
        listings.remove_rows(update, DIRECTORY, {OLD[0]})
    assert rows(listings, index) == OLD[:1]


def test_a_row_that_is_left_over_shows_background_work_no_file_twice(index: Index) -> None:
    """Regression: after commits that a full disk refused, a warm-up of 60 files reported 84."""
    metadata: Any = inode_cache(index, Options(read_only=True, attr_timeout_s=float("inf")))
    listings = Listings(metadata)
    directory = look_up(metadata, OLD, pin=True)
    with index.update() as update:
        listings.add_rows(update, directory, OLD, pin=True)
        update.put(Table.LISTING, pair_key(DIRECTORY, 91), bytes(4) + OLD[1])

    async def revalidated(_: int) -> Inode:
        return directory

    filesystem: Any = SimpleNamespace(metadata=metadata, revalidated=revalidated)
    comparisons: Any = SimpleNamespace(is_valid=lambda _: True, bare=lambda _: {})
    kernel: Any = None
    directories = Directories(filesystem, comparisons, YoungFiles(kernel), no_request)
    assert trio.run(directories.entries, DIRECTORY) == [100, 101, 102, 103, 104]


@pytest.mark.promise("PI-8")
def test_a_name_that_must_be_compared_stays_listed_when_its_directory_is_invalidated(index: Index) -> None:
    """A listing that is under way may not have shown it yet."""
    listings, _ = pinned_listing(index)
    metadata = inode_cache(index, Options(read_only=True, attr_timeout_s=float("inf")))
    with index.update() as update:
        metadata.cut_name(update, DIRECTORY, OLD[1])
        metadata.apply_absence(update, DIRECTORY, b"absent", pin=True)
        metadata.drop_children(update, DIRECTORY)
        assert metadata.dentry(update, DIRECTORY, b"absent") is None
    assert rows(listings, index) == OLD


def test_a_pinned_file_that_is_listed_again_gets_a_place_behind_all_others(index: Index) -> None:
    """Its row went when it was not listed; it is served all the same."""
    metadata = inode_cache(index, Options())
    listings = Listings(metadata)
    directory = look_up(metadata, OLD, pin=False)
    with index.update() as update:
        kept = metadata.inode(update, 100)
        assert kept is not None
        metadata.pin_file(update, kept)
        directory, _ = listings.add_rows(update, directory, OLD, pin=False)
        before = [position for position, _ in listings.rows(update, DIRECTORY, 0)]
        listings.remove_rows(update, DIRECTORY, set(OLD[1:]))
        assert [name for _, name in listings.rows(update, DIRECTORY, 0)] == OLD[1:]
        dentry = metadata.dentry(update, DIRECTORY, OLD[0])
        assert dentry is not None and dentry.inode == 100
        listings.add_rows(update, directory, OLD, pin=False)
        after = {name: position for position, name in listings.rows(update, DIRECTORY, 0)}
    assert sorted(after) == sorted(OLD)
    assert after[OLD[0]] > max(before)


KEYS = st.binary(min_size=2, max_size=3)


@given(st.sets(KEYS), st.sets(KEYS), st.binary(min_size=2, max_size=2))
@settings(max_examples=100, deadline=None)
def test_the_last_key_with_a_prefix(
    tmp_path_factory: pytest.TempPathFactory, durable: set[bytes], session: set[bytes], prefix: bytes
) -> None:
    path = tmp_path_factory.mktemp("index")
    index = Index(Environment(path / "durable", sync=False), Environment(path / "session", sync=False))
    pinned = (1).to_bytes(4, "little")
    with index.update() as update:
        for key in durable:
            update.put(Table.XATTRS, key, pinned)
    index.forget_committed(index.commit(index.take_dirty(1000), []).flushed)
    with index.update() as update:
        for key in session:
            update.put(Table.XATTRS, key, bytes(4))
    with index.view() as view:
        found = view.last_key(Table.XATTRS, prefix)
    assert found == max((key for key in durable | session if key.startswith(prefix)), default=None)
    index.close()


@pytest.mark.promise("FA-34")
def test_no_request_sees_a_damaged_index_before_its_listings_are_doubted(index: Index) -> None:
    """Found by tests/damage: the thread that commits met the damage, and a complete listing had no names."""
    listings, _ = pinned_listing(index)
    index.forget_committed(index.commit(index.take_dirty(100), []).flushed)
    waiting: list[Callable[[], None]] = []
    index.durable.damage.run = waiting.append
    index.durable.damage.found(ValueError("a page is no page"))
    assert rows(listings, index) == OLD
    waiting[0]()
    assert rows(listings, index) == []


@pytest.mark.promise("FA-34")
def test_rows_of_a_damaged_index_do_not_count(index: Index) -> None:
    """Before: the next listing used such rows, and stayed valid when more of them were lost."""
    listings, directory = pinned_listing(index)
    index.forget_committed(index.commit(index.take_dirty(100), []).flushed)
    index.durable.damage.found(ValueError("a page is no page"))
    assert rows(listings, index) == []
    with index.update() as update:
        listings.add_rows(update, directory, OLD, pin=True)
    with index.durable.lmdb.begin(write=True) as txn:
        txn.drop(index.durable.tables[Table.LISTING], delete=False)  # the rest is lost as well
    assert rows(listings, index) == OLD

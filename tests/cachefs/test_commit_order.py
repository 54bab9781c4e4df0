"""A crash of the machine: what was not committed to the durable index is lost. No name may be believed missing then.

The rows of a directory that is LISTED are its whole listing.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachefs.contract.index import Table
from cachefs.store.index.dirty import Dirty
from cachefs.store.index.environment import Environment
from cachefs.store.index.index import Index
from cachefs.store.index.records import LISTED, PINNED, Dentry, Inode, inode_key, pair_key

ROOT = 1
NAMES = [b"name%d" % number for number in range(6)]
FLAGS = PINNED.to_bytes(4, "little")


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    made = make_index(tmp_path)
    yield made
    made.close()


def make_index(path: Path) -> Index:
    return Index(Environment(path / "durable", sync=False), Environment(path / "session", sync=False))


def put_directory(index: Index, *, listed: bool) -> None:
    record = Inode(ROOT, PINNED | (LISTED if listed else 0), *(0,) * 21)._replace(mode=0o040755)
    with index.update() as update:
        update.put(Table.INODES, inode_key(ROOT), record.pack())


def put_names(index: Index, *names: bytes) -> None:
    for name in names:
        position = 3 + NAMES.index(name)
        with index.update() as update:
            update.put(Table.LISTING, pair_key(ROOT, position), FLAGS + name)
            update.put(Table.DENTRIES, inode_key(ROOT) + name, Dentry(PINNED, 100 + position, 1, position).pack())


def remove_names(index: Index, *names: bytes) -> None:
    for name in names:
        with index.update() as update:
            update.delete(Table.LISTING, pair_key(ROOT, 3 + NAMES.index(name)))
            update.delete(Table.DENTRIES, inode_key(ROOT) + name)


def commit(index: Index, limit: int) -> None:
    index.forget_committed(index.commit(index.take_dirty(limit), []).flushed)


def after_a_crash(index: Index) -> tuple[bool, set[bytes]]:
    """What the durable index says alone: is the directory LISTED, and which names have an entry and a row?"""
    with index.durable.lmdb.begin() as txn:
        record = txn.get(inode_key(ROOT), db=index.durable.tables[Table.INODES])
        listed = record is not None and bool(Inode.unpack(ROOT, record).flags & LISTED)
        names = {key[8:] for key, _ in txn.cursor(db=index.durable.tables[Table.DENTRIES])}
        rows = {value[4:] for _, value in txn.cursor(db=index.durable.tables[Table.LISTING])}
    return listed, names & rows


def commit_all(index: Index, limit: int) -> None:
    """In batches; a crash after any of them leaves nothing that is believed missing."""
    for _ in range(100):
        if not index.dirty:
            return
        commit(index, limit)
        listed, names = after_a_crash(index)
        assert not listed or names == set(NAMES)
    raise AssertionError("never ends")


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_a_directory_is_listed_only_with_all_its_names(index: Index, limit: int) -> None:
    put_directory(index, listed=False)
    put_names(index, *NAMES)
    put_directory(index, listed=True)
    commit_all(index, limit)
    assert after_a_crash(index) == (True, set(NAMES))


def test_a_directory_that_is_not_listed_is_written_once_and_waits_for_nobody(index: Index) -> None:
    put_directory(index, listed=False)
    put_names(index, *NAMES)
    index.recover_session(same_mount=False)
    directory = Table.INODES, inode_key(ROOT)
    assert directory in list(index.dirty)[: -len(NAMES)]
    written = 0
    while index.dirty:
        batch = index.take_dirty(1)
        written += directory in batch.keys
        index.forget_committed(index.commit(batch, []).flushed)
    assert written == 1


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_a_name_that_is_written_again_after_the_mark_comes_no_later(index: Index, limit: int) -> None:
    put_names(index, *NAMES)
    put_directory(index, listed=True)
    put_names(index, *NAMES[::-1])
    commit_all(index, limit)
    assert after_a_crash(index) == (True, set(NAMES))


def test_what_is_written_after_a_batch_was_taken_belongs_to_the_next(index: Index) -> None:
    put_directory(index, listed=False)
    batch = index.take_dirty(10)
    put_names(index, *NAMES)
    put_directory(index, listed=True)
    index.forget_committed(index.commit(batch, []).flushed)
    assert after_a_crash(index) == (False, set())
    commit_all(index, 4)
    assert after_a_crash(index) == (True, set(NAMES))


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_the_mark_goes_before_the_names(index: Index, limit: int) -> None:
    """An invalidation: the directory is not LISTED any more, then its names go."""
    put_names(index, *NAMES)
    put_directory(index, listed=True)
    commit_all(index, 100)
    put_names(index, *NAMES)
    put_directory(index, listed=False)
    remove_names(index, *NAMES[:3])
    commit_all(index, limit)
    assert after_a_crash(index) == (False, set(NAMES[3:]))


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_the_mark_goes_with_the_first_name_though_the_directory_was_written_again(index: Index, limit: int) -> None:
    put_names(index, *NAMES)
    put_directory(index, listed=True)
    commit_all(index, 100)
    remove_names(index, NAMES[0])
    put_directory(index, listed=False)
    remove_names(index, *NAMES[1:3])
    put_directory(index, listed=False)
    commit_all(index, limit)
    assert after_a_crash(index) == (False, set(NAMES[3:]))


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_what_a_crash_of_the_daemon_left_is_committed_in_the_same_order(tmp_path: Path, limit: int) -> None:
    index = make_index(tmp_path)
    put_directory(index, listed=False)
    put_names(index, *NAMES)
    put_directory(index, listed=True)
    index.close()
    index = make_index(tmp_path)
    index.recover_session(same_mount=False)
    assert list(index.dirty)[-1] == (Table.INODES, inode_key(ROOT))
    commit_all(index, limit)
    assert after_a_crash(index) == (True, set(NAMES))
    index.close()


def test_a_batch_that_failed_goes_first(index: Index) -> None:
    put_names(index, *NAMES[:3])
    batch = index.take_dirty(4)
    put_directory(index, listed=True)
    put_names(index, *NAMES[3:])
    index.restore_dirty(batch)
    assert not index.in_flight
    assert list(index.dirty)[: len(batch.keys)] == batch.keys
    commit_all(index, 2)
    assert after_a_crash(index) == (True, set(NAMES))


def test_a_value_that_changed_during_its_commit_is_not_lost(index: Index, tmp_path: Path) -> None:
    put_names(index, NAMES[0])
    batch = index.take_dirty(10)
    newer = Dentry(PINNED, 777, 1, 3).pack()
    with index.update() as update:
        update.put(Table.DENTRIES, inode_key(ROOT) + NAMES[0], newer)
    index.forget_committed(index.commit(batch, []).flushed)
    with index.view() as view:
        assert view.get(Table.DENTRIES, inode_key(ROOT) + NAMES[0]) == newer
    commit(index, 10)
    with index.durable.lmdb.begin() as txn:
        assert txn.get(inode_key(ROOT) + NAMES[0], db=index.durable.tables[Table.DENTRIES]) == newer


def test_a_value_that_changed_and_was_not_pinned_any_more_is_not_lost(index: Index) -> None:
    """It lives in the session alone: taking it out there would bring the old one back."""
    key = inode_key(ROOT) + NAMES[0]
    put_names(index, NAMES[0])
    batch = index.take_dirty(10)
    newer = Dentry(0, 777, 1, 3).pack()
    with index.update() as update:
        update.put(Table.DENTRIES, key, newer)
    index.forget_committed(index.commit(batch, []).flushed)
    commit_all(index, 10)
    with index.view() as view:
        assert view.get(Table.DENTRIES, key) == newer
        assert view.in_durable(Table.DENTRIES, key) is None


OPERATIONS = st.one_of(
    st.tuples(st.just("write"), st.sampled_from(NAMES)),
    st.tuples(st.just("list"), st.none()),
    st.tuples(st.just("unlist and remove"), st.sampled_from(NAMES)),
    st.tuples(st.just("commit"), st.integers(1, 5)),
    st.tuples(st.just("fail"), st.integers(1, 5)),
    st.tuples(st.just("commit while written"), st.integers(1, 5)),
)


@given(st.lists(OPERATIONS, max_size=25))
@settings(max_examples=40, deadline=None)
def test_whatever_happens_listed_means_complete(tmp_path_factory: pytest.TempPathFactory, steps: list) -> None:  # type: ignore[type-arg]
    path = tmp_path_factory.mktemp("index")
    index = make_index(path)
    put_directory(index, listed=False)
    for what, argument in steps:
        if what == "write":
            put_names(index, argument)
        elif what == "list":
            put_names(index, *NAMES)
            put_directory(index, listed=True)
        elif what == "unlist and remove":
            put_directory(index, listed=False)
            remove_names(index, argument)
        elif what == "commit":
            commit(index, argument)
        elif what == "fail":
            index.restore_dirty(index.take_dirty(argument))
        else:
            batch = index.take_dirty(argument)
            put_names(index, *NAMES)
            put_directory(index, listed=True)
            index.forget_committed(index.commit(batch, []).flushed)
        listed, names = after_a_crash(index)
        assert not listed or names == set(NAMES)
    with index.view() as view:
        before = {table: dict(view.scan(table, b"")) for table in (Table.INODES, Table.DENTRIES, Table.LISTING)}
    while index.dirty:
        commit(index, 3)
    with index.durable.lmdb.begin() as txn:
        for table, rows in before.items():
            assert dict(txn.cursor(db=index.durable.tables[table])) == rows
    index.close()
    shutil.rmtree(path)


def test_keys_are_in_the_order_of_their_last_writing() -> None:
    dirty = Dirty()
    a, b, c = ((Table.XATTRS, name) for name in (b"a", b"b", b"c"))
    for key in (a, b, c, a):
        dirty.add(key)
    assert list(dirty) == [b, c, a]
    assert dirty.take(2, [a]) == [a, b, c]
    assert not dirty

"""Extents of any range of a file, against a plain list of bytes."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.contract.index import Table
from cachefs.store.blob import record
from cachefs.store.index.environment import Environment
from cachefs.store.index.index import Index
from cachefs.store.index.records import PINNED, Extent, Inode, inode_key

RANGES = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), max_size=30)


def extent(length: int, blob_offset: int) -> Extent:
    return Extent(PINNED, length, blob_offset, 1, record.record_bytes(length), ())


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Index]:
    base = tmp_path_factory.mktemp("index")
    index = Index(Environment(base / "durable", sync=False), Environment(base / "session", sync=False))
    yield index
    index.close()


FILES = iter(range(2, 1 << 30))


def pinned(index: Index) -> int:
    number = next(FILES)
    inode = Inode(number, PINNED, *(0,) * 21)._replace(version=1)
    with index.update() as update:
        update.put(Table.INODES, inode_key(number), inode.pack())
    index.commit(index.take_dirty(100), [])
    return number


@given(RANGES)
def test_every_byte_that_was_added_is_found_and_no_extent_lies_within_another(
    index: Index, ranges: list[tuple[int, int]]
) -> None:
    number = pinned(index)
    index.commit(
        index.take_dirty(0), [(number - 1, 0, extent(60, 1)), (number + 1, 0, extent(60, 1))]
    )  # neighbours without an inode
    before = index.totals
    added: list[tuple[int, int]] = []
    left: set[int] = set()
    for blob_offset, (start, length) in enumerate(ranges):
        commit = index.commit(index.take_dirty(0), [(number, start, extent(length, blob_offset))])
        added.append((start, length))
        left.add(blob_offset)
        left -= {each.blob_offset for each in (*commit.freed, *commit.rejected)}
        with index.view() as view:
            table = list(view.extents.of(number))
            assert {each.blob_offset for _, each in table} == left
            starts = [start for start, _ in table]
            ends = [start + each.length for start, each in table]
            assert starts == sorted(set(starts)) and ends == sorted(set(ends))
            for byte in range(60):
                found = view.extents.at(number, byte)
                known = any(start <= byte < start + length for start, length in added)
                assert (found is not None) == known
                assert found is None or found[0] <= byte < found[0] + found[1].length
            first = [start for start, _ in view.extents.between(number, 10, 20)]
            assert first == [start for start in starts if 10 <= start < 20]
        assert index.totals.cached_bytes - before.cached_bytes == sum(each.length for _, each in table)
        assert index.totals.blob_bytes - before.blob_bytes == sum(each.record_bytes for _, each in table)
        assert index.totals.cached_files - before.cached_files == 1
    for start, each in table if ranges else ():
        index.commit(index.take_dirty(0), [], [(number, start, each.blob_offset)])
    assert index.totals == before


def test_what_is_reported_again_is_left_alone(index: Index) -> None:
    """A daemon that committed it died before it said so."""
    number = pinned(index)
    index.commit(index.take_dirty(0), [(number, 4, extent(8, 77))])
    commit = index.commit(index.take_dirty(0), [(number, 4, extent(8, 77))])
    assert not commit.freed and not commit.rejected and not commit.indexed


def test_of_the_same_range_the_later_one_counts(index: Index) -> None:
    number = pinned(index)
    index.commit(index.take_dirty(0), [(number, 4, extent(8, 77))])
    assert index.commit(index.take_dirty(0), [(number, 4, extent(8, 78))]).freed == [extent(8, 77)]

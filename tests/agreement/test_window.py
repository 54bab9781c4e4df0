"""How much a READ fetches: data/fetcher.py with prefetch/sequential.py against fastpath/c/misses/window.c."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from cachefs.contract.index import Table
from cachefs.data.data_cache import DataCache
from cachefs.data.fetcher import Fetcher
from cachefs.options import Options
from cachefs.store.blob.record import block_count
from cachefs.store.index.environment import Environment, View
from cachefs.store.index.records import PINNED, Extent, Inode, pair_key
from policies.prefetch.sequential import CHUNK_BYTES
from tests.agreement.library import FastPath, examples

KIB, MIB = 1 << 10, 1 << 20
NUMBER, VERSION = 7, 3
Piece = tuple[int, int]
"""(start, length)"""


class Sides:
    """One file, as both sides know it."""

    def __init__(self, fast_path: FastPath, session: Environment, durable: Environment) -> None:
        self._fast_path, self._session, self._durable = fast_path, session, durable
        writes = SimpleNamespace(pending_at=lambda *_: None, pending_starts=lambda *_: [])
        options, nothing = Options(), SimpleNamespace()
        data: Any = DataCache.__new__(DataCache)
        data.options, data.writes = options, writes
        self._fetcher = Fetcher(
            *(nothing, nothing, data, nothing),  # type: ignore[arg-type]
            object_of=None, changed=None, other_name=None, own_change=None, young=None, record=None, reads_ahead=True,  # type: ignore[arg-type]
        )  # fmt: skip

    def know(self, record: Inode, cached: list[Piece], others: list[Piece], under_way: list[Piece]) -> None:
        """`others`: cached of another version of the file."""
        with self._durable.write() as txn:
            txn.drop(self._durable.tables[Table.EXTENTS], delete=False)
            for version, pieces in ((record.version + 1, others), (record.version, cached)):
                for start, length in pieces:
                    checksums = (0,) * block_count(length)
                    extent = Extent(PINNED, length, 0, version, length, checksums)
                    txn.put(pair_key(record.number, start), extent.pack(), db=self._durable.tables[Table.EXTENTS])
            # Of other files, before and behind it in the table.
            for number in (record.number - 1, record.number + 1):
                extent = Extent(PINNED, CHUNK_BYTES, 0, record.version, CHUNK_BYTES, (0,) * 32)
                txn.put(pair_key(number, 0), extent.pack(), db=self._durable.tables[Table.EXTENTS])
        self._fast_path.clear_fetches()
        ranges = {(start, start + length): None for start, length in under_way}
        self._fetcher._ranges = {(record.number, record.version): ranges}  # type: ignore[dict-item]
        for start, length in under_way:
            self._fast_path.add_fetch(record, start, length, cached=True)
        # Neither counts: of another version, and what will not be cached.
        self._fast_path.add_fetch(record._replace(version=record.version + 1), 0, CHUNK_BYTES, cached=True)
        self._fast_path.add_fetch(record, 0, CHUNK_BYTES, cached=False)

    def windows(self, record: Inode, start: int, end: int) -> list[tuple[int, int, bool]]:
        """Of both sides."""
        with View(self._session, self._durable) as view:
            expected = self._fetcher._range(view, record, start, end)
        with self._fast_path.reading():
            return [expected, self._fast_path.window(record, start, end)]

    def next_windows(self, record: Inode, end: int) -> list[tuple[int, int]]:
        """What is read ahead behind a window that ends there; nothing is (end, end)."""
        with View(self._session, self._durable) as view:
            to = min(end + CHUNK_BYTES, record.size)
            known = end >= to or self._fetcher._known_from(view, record, end + 1) <= end
            expected = end if known else self._fetcher._next_known(view, record, end, to)
        with self._fast_path.reading():
            return [(end, expected), self._fast_path.next_window(record, end)]

    def is_known(self, record: Inode, offset: int) -> bool:
        with View(self._session, self._durable) as view:
            return self._fetcher._known_from(view, record, offset + 1) <= offset


@pytest.fixture(scope="module")
def sides(fast_path: FastPath, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sides]:
    place = tmp_path_factory.mktemp("index")
    with environments(place) as (session, durable), fast_path.over(session, durable):
        fast_path.set_up(Options())
        yield Sides(fast_path, session, durable)


@contextmanager
def environments(place: Path) -> Iterator[tuple[Environment, Environment]]:
    session, durable = Environment(place / "session", sync=False), Environment(place / "durable", sync=False)
    yield session, durable
    session.close()
    durable.close()


_BOUNDARIES = [KIB, 4 * KIB, 128 * KIB, MIB, CHUNK_BYTES, 16 * MIB, 32 * MIB]
_places = st.builds(
    lambda boundary, times, by: max(0, boundary * times + by),
    st.sampled_from(_BOUNDARIES),
    st.integers(0, 9),
    st.integers(-2, 2),
)


@st.composite
def pieces(draw: st.DrawFn, size: int, most: int) -> list[Piece]:
    """Within the file, in order and not within one another; some follow each other directly."""
    found: list[Piece] = []
    at = 0
    for _ in range(draw(st.integers(0, most))):
        at += draw(st.just(0) | _places)
        length = min(draw(_places.filter(bool)), CHUNK_BYTES, size - at)
        if length <= 0:
            break
        found.append((at, length))
        at += length
    return found


@st.composite
def files(draw: st.DrawFn) -> tuple[Inode, list[Piece], list[Piece], list[Piece], int, int]:
    size = max(draw(_places) * draw(st.integers(1, 3)), MIB + 1)
    record = Inode(NUMBER, *[0] * 22)._replace(size=size, version=VERSION)
    if draw(st.booleans()):
        cached, under_way = draw(pieces(size, 12)), []
    else:  # each is one or the other
        everything = draw(pieces(size, 12))
        chosen = [draw(st.booleans()) for _ in everything]
        cached = [piece for piece, is_cached in zip(everything, chosen, strict=True) if is_cached]
        under_way = [piece for piece in everything if piece not in cached]
    taken = {start for start, _ in cached}
    others = [piece for piece in draw(pieces(size, 3)) if piece[0] not in taken]
    edges = [
        edge for start, length in [*cached, *under_way] for edge in (start - 1, start + length, start + length + 1)
    ]
    start = draw(_places | st.sampled_from(edges) if edges else _places)
    start = min(max(0, start), size - 1)
    end = min(start + draw(st.integers(1, MIB) | st.sampled_from([1, 4096, 128 * KIB, MIB])), size)
    return record, cached, others, under_way, start, end


@examples(500)
@given(file=files())
def test_both_fetch_the_same(sides: Sides, file: tuple[Inode, list[Piece], list[Piece], list[Piece], int, int]) -> None:
    record, cached, others, under_way, start, end = file
    sides.know(record, cached, others, under_way)
    assume(not sides.is_known(record, start))
    python, c = sides.windows(record, start, end)
    assert c == python
    assert c[0] <= start < c[1] <= record.size
    python_next, c_next = sides.next_windows(record, end)
    assert c_next == python_next


@given(count=st.integers(28, 36), gap=st.sampled_from([4096, 8192]), at=st.integers(0, 60), length=st.integers(1, 40))
@example(count=32, gap=4096, at=40, length=1)
@example(count=31, gap=4096, at=40, length=1)
@example(count=32, gap=4096, at=60, length=903)  # to the end of the chunk
@example(count=32, gap=4096, at=60, length=904)
def test_a_chunk_in_many_pieces(sides: Sides, count: int, gap: int, at: int, length: int) -> None:
    """From some number on it is fetched whole."""
    record = Inode(NUMBER, *[0] * 22)._replace(size=2 * CHUNK_BYTES + 5000, version=VERSION)
    for chunk in (0, CHUNK_BYTES):
        sides.know(record, [(chunk + 2 * gap * number, gap) for number in range(count)], [], [])
        start = chunk + 2 * gap * at + gap
        python, c = sides.windows(record, start, min(start + gap * length, record.size))
        assert c == python


@given(steps=st.integers(60, 70), first=st.sampled_from([0, CHUNK_BYTES]))
def test_a_long_run(sides: Sides, steps: int, first: int) -> None:
    """No more than so many of its pieces are looked at."""
    piece = 64 * KIB
    record = Inode(NUMBER, *[0] * 22)._replace(size=1 << 30, version=VERSION)
    sides.know(record, [(first + piece * number, piece) for number in range(steps)], [], [])
    start = first + piece * steps
    python, c = sides.windows(record, start, start + 4096)
    assert c == python


@examples(100)
@given(size=_places, offset=_places, small=st.sampled_from([0, 1, MIB, CHUNK_BYTES, CHUNK_BYTES + 1, 1 << 40]))
def test_both_have_the_same_units(fast_path: FastPath, size: int, offset: int, small: int) -> None:
    assume(offset < size)
    options = Options(small_file_bytes=small)
    fast_path.set_up(options)
    data: Any = DataCache.__new__(DataCache)
    data.options = options
    assert fast_path.unit_of(size, offset) == data.unit_of(Inode(NUMBER, *[0] * 22)._replace(size=size), offset)

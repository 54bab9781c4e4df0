"""The account of disk space, on a real index and a real blob."""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachefs.contract.blob import RECORD_HEADER_BYTES, SLAB_BYTES
from cachefs.contract.index import Table
from cachefs.store import recovery
from cachefs.store.blob import record
from cachefs.store.blob.blob import Blob
from cachefs.store.blob.space import FREE_BYTES, OTHER_FREE_BYTES, Space, place_of
from cachefs.store.index.environment import Environment
from cachefs.store.index.index import Index
from cachefs.store.index.records import Extent, inode_key, pair_key
from policies.prefetch.sequential import CHUNK_BYTES

SEED = 77
MIB = 1 << 20


class Cache:
    """Files are records of the blob, each of one inode; what the index has of them is in `live`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.index = Index(Environment(path / "index", sync=False), Environment(path.parent / "session", sync=False))
        self.blob = Blob(path / "blob", SEED)
        self.now = 0.0
        self.space = Space(self.index, self.blob, clock=lambda: self.now)
        self.live: dict[int, Extent] = {}
        self.payloads: dict[int, bytes] = {}

    def append(
        self, sizes: list[int], *, indexed: bool = True, writer: Blob | None = None, closes: bool = True
    ) -> list[int]:
        """Numbers of the files. `writer`: of another process."""
        draw = random.Random(len(self.payloads))
        numbers = list(range(len(self.payloads) + 1, len(self.payloads) + 1 + len(sizes)))
        payloads = [draw.randbytes(size) for size in sizes]
        headers = [
            record.Header(size, number, 0, 1, size, *(0,) * 6) for number, size in zip(numbers, sizes, strict=True)
        ]
        extents = (writer or self.blob).append(list(zip(headers, payloads, strict=True)))
        self.payloads.update(zip(numbers, payloads, strict=True))
        if indexed:
            self.live.update(zip(numbers, extents, strict=True))
            with self.index.durable.lmdb.begin(write=True) as txn:
                for number, extent in zip(numbers, extents, strict=True):
                    txn.put(pair_key(number, 0), extent.pack(), db=self.index.durable.tables[Table.EXTENTS])
            self.space.written(*((extents,) if closes else ((), extents)))
        return numbers

    def free(self, number: int) -> None:
        with self.index.durable.lmdb.begin(write=True) as txn:
            txn.delete(pair_key(number, 0), db=self.index.durable.tables[Table.EXTENTS])
        self.space.free(self.live.pop(number))

    def measure(self) -> None:
        self.space.measure(sum(extent.record_bytes for extent in self.live.values()), ())

    def successor(self) -> "Cache":
        """The next daemon, after this one was killed."""
        after = Cache.__new__(Cache)
        after.path, after.index, after.live, after.payloads = self.path, self.index, self.live, self.payloads
        self.blob.close()
        after.blob = Blob(self.path / "blob", SEED)
        after.now = 0.0
        after.space = Space(after.index, after.blob, clock=lambda: after.now)
        return after

    def check(self) -> None:
        """What is cached can be read, a rebuild finds exactly that, and nothing else takes more than its pages."""
        for number, extent in self.live.items():
            assert self.blob.read(extent, 0, extent.length) == self.payloads[number]
        assert {header.inode for header, _ in recovery.scan(self.blob)} == set(self.live)
        pages = {
            at // 4096
            for extent in self.live.values()
            for at in range(place_of(extent)[0], sum(place_of(extent)) - place_of(extent)[0], 4096)
        }
        pages |= {(place_of(extent)[1] - 1) // 4096 for extent in self.live.values()}
        slabs = {page * 4096 // SLAB_BYTES for page in pages}
        assert self.blob.allocated_bytes() <= 4096 * (len(pages) + 2 * len(self.live) + 2 * len(slabs))


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    (tmp_path / "cache").mkdir()
    yield Cache(tmp_path / "cache")


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_freeing_leaves_only_what_is_cached(cache: Cache, seed: int) -> None:
    draw = random.Random(seed)
    cache.space.writer_has_gone(cache.blob.frontier)
    numbers = []
    for _ in range(3):
        numbers += cache.append([draw.choice([1, 200, 3000, 4096 - 136, 60_000, 700_000]) for _ in range(60)])
        cache.blob._new_slab()
    cache.append([10])  # the slabs before this one are closed
    draw.shuffle(numbers)
    for number in numbers[:150]:
        cache.free(number)
    cache.check()
    for number in numbers[150:]:
        cache.free(number)
    cache.check()
    assert cache.blob.allocated_bytes() <= 8192


def test_small_neighbours_that_go_give_their_pages_back(cache: Cache) -> None:
    """Each is smaller than a page: none of them alone has one to give."""
    numbers = cache.append([500] * 2000)
    for number in numbers[:-1]:
        cache.free(number)
    assert cache.blob.allocated_bytes() <= 4 * 4096
    cache.check()


@pytest.mark.parametrize("seed", range(4))
def test_what_a_killed_daemon_left_is_given_back(cache: Cache, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(4):
        cache.append([draw.randint(1, 400_000) for _ in range(40)])
        cache.append([draw.randint(1, 400_000) for _ in range(60)], indexed=False)
        cache = cache.successor()
    os.posix_fallocate(cache.blob.fd, cache.blob.size(), 4 * MIB)  # in advance
    cache = cache.successor()
    for number in draw.sample(sorted(cache.live), 60):
        cache.free(number)
    cache.measure()
    assert cache.blob.allocated_bytes() > 40 * MIB and cache.space.charge_bytes == 0, "a writer may yet report them"
    cache.space.writer_has_gone(cache.blob.frontier)
    cache.measure()
    cache.check()
    assert cache.space.charge_bytes == 0


def test_what_is_yet_to_be_freed_is_kept(cache: Cache) -> None:
    """A reader still sees a record that the index has no more."""
    cache.append([100_000] * 300, indexed=False)
    (number,) = cache.append([300_000])
    waiting = cache.live.pop(number)
    with cache.index.durable.lmdb.begin(write=True) as txn:
        txn.delete(pair_key(number, 0), db=cache.index.durable.tables[Table.EXTENTS])
    cache = cache.successor()
    cache.space.writer_has_gone(cache.blob.frontier)
    cache.space.measure(waiting.record_bytes, [waiting])
    assert cache.blob.read(waiting, 0, waiting.length) == cache.payloads[number]
    assert cache.blob.allocated_bytes() < MIB
    cache.space.free(waiting)
    assert cache.blob.allocated_bytes() == 0


def test_an_open_slab_is_left_alone(cache: Cache) -> None:
    """Its writer may have written what it has not reported yet."""
    cache.space.writer_has_gone(cache.blob.frontier)
    cache.append([50_000])
    cache.append([400_000] * 60, indexed=False)
    cache.measure()
    assert cache.blob.allocated_bytes() > 24_000_000 and cache.space.charge_bytes > 0
    cache.blob._new_slab()
    cache.append([50_000])  # reported: the last one is closed
    assert cache.blob.allocated_bytes() < MIB
    cache.measure()
    cache.check()
    assert cache.space.charge_bytes == 0


def test_the_rest_of_the_directory_counts(cache: Cache) -> None:
    cache.space.writer_has_gone(cache.blob.frontier)
    cache.measure()
    assert cache.space.charge_bytes == 0
    before = sum(path.stat().st_blocks * 512 for path in cache.path.rglob("*"))
    (cache.path / "index.broken").mkdir()
    (cache.path / "index.broken" / "data.mdb").write_bytes(bytes(OTHER_FREE_BYTES + 9 * MIB))
    cache.now = 2.0
    cache.measure()
    assert 9 * MIB <= cache.space.charge_bytes <= 9 * MIB + before + 8192


def test_pages_that_cannot_be_given_back_are_charged(cache: Cache) -> None:
    """One small record in each page, with gaps between them."""
    cache.space.writer_has_gone(cache.blob.frontier)
    numbers = cache.append([6000] * 9000)
    for number in numbers[::2]:
        cache.free(number)
    cache.measure()
    live = sum(extent.record_bytes for extent in cache.live.values())
    allocated = cache.blob.allocated_bytes()
    assert cache.space.charge_bytes == max(0, allocated - live - FREE_BYTES)


def test_the_header_of_a_gap_never_crosses_the_end_of_a_slab(cache: Cache) -> None:
    (first,) = cache.append([1])
    size = record.record_bytes(1)
    fill = SLAB_BYTES - size - 64
    part = CHUNK_BYTES
    sizes = []
    while fill > record.record_bytes(part) + 4096:
        sizes.append(part)
        fill -= record.record_bytes(part)
    last = fill - RECORD_HEADER_BYTES - 8 * record.block_count(fill)
    cache.append([*sizes, last // 8 * 8])
    (second,) = cache.append([1])
    assert place_of(cache.live[second])[0] == SLAB_BYTES
    assert 0 < SLAB_BYTES - max(end for _, end in map(place_of, cache.live.values()) if end <= SLAB_BYTES) < 128
    cache.check()
    assert first in cache.live and inode_key(second)


@pytest.mark.promise("CL-6")
@pytest.mark.parametrize("seed", range(6))
def test_a_daemon_that_writes_beside_a_fast_path_frees_nothing_that_is_in_use(cache: Cache, seed: int) -> None:
    draw = random.Random(seed)
    cache.space.writer_has_gone(cache.blob.frontier)
    fastpath = Blob(cache.path / "blob", SEED)
    for _ in range(150):
        sizes = [draw.choice([1, 200, 3000, 60_000, 700_000]) for _ in range(draw.randint(1, 5))]
        if draw.random() < 0.1 or not fastpath._next:
            fastpath._next = cache.blob.grant()
            fastpath._slab_end = fastpath._next + SLAB_BYTES
        if draw.random() < 0.5:
            cache.append(sizes, writer=fastpath)
        else:
            cache.blob.leave_slabs_before(cache.space.closed_below)
            cache.append(sizes, closes=False)
        while cache.live and draw.random() < 0.6:
            cache.free(draw.choice(list(cache.live)))
        if draw.random() < 0.1:
            cache.measure()
    cache.check()
    fastpath.close()

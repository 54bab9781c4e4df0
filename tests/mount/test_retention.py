"""Retention on real mounts: the simulator's figures, the capacity, restarts."""

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cachefs.contract.blob import SLAB_BYTES
from cachefs.store.blob.record import record_bytes
from cachefs.store.blob.space import FREE_BYTES
from policies.simulator import Trace, simulate
from tests.conftest import Mount, cachefs, contents, expire, make_files, settle, wait_for

MakeMount = Callable[..., Mount]
FILES = 4000
EPOCHS = 3
SLOWLY = ("--simulate-latency", 0.2)
"""Without this, a source on the local disk refills these small caches ten times a second, and part is not cached."""


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path], list[int]]:
    """4,000 files in 10 directories, and the size of each; no test changes it."""
    root = tmp_path_factory.mktemp("dataset") / "source"
    paths = make_files(root, FILES, (25_000, 75_000), 10)
    settle()
    return root, paths, [(root / path).stat().st_size for path in paths]


def read_past_the_page_cache(path: Path) -> bytes:
    """Reads that no page cache answers: the mount sees each of them."""
    fd = os.open(path, os.O_RDONLY)
    try:
        content = os.read(fd, 1 << 20)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return content
    finally:
        os.close(fd)


def misses(m: Mount, paths: list[Path]) -> int:
    """How many of these files are not read from the cache, as they are read now.

    A cache this small has no room at times, and then a read is not cached: read again until it is.
    """
    before = m.status()["hits"]
    for path in paths:
        read_past_the_page_cache(m.path / path)
    return len(paths) - (m.flush()["hits"] - before)


def epochs(seed: int) -> Iterator[list[int]]:
    draw = random.Random(seed)
    for _ in range(EPOCHS):
        order = list(range(FILES))
        draw.shuffle(order)
        yield order


@pytest.mark.promise("CL-5")
@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("retention", ["no-replacement", "lru", "fifo"])
def test_a_mount_hits_what_the_simulator_says(
    mount: MakeMount, dataset: tuple[Path, list[Path], list[int]], retention: str
) -> None:
    source, paths, sizes = dataset
    records = [record_bytes(size) for size in sizes]
    capacity = sum(records) // 2
    m = mount(source, "--read-only", "--retention", retention, "--cache-size", capacity, *SLOWLY)
    hit_bytes = 0
    order: list[int] = []
    for number, epoch in enumerate(epochs(seed=7)):
        before = m.status()
        for index in epoch:
            assert len(read_past_the_page_cache(m.path / paths[index])) == sizes[index]
            order.append(index)
        after = m.status()
        assert after["blob_bytes"] <= capacity
        read = {name: after[name] - before[name] for name in ("hit_bytes", "miss_bytes")}
        assert sum(read.values()) == sum(sizes)
        hit_bytes += read["hit_bytes"] if number else 0
    expected = simulate(Trace(order, records), retention, capacity, counted_from=FILES).byte_hit_ratio
    assert hit_bytes / sum(sizes) / (EPOCHS - 1) == pytest.approx(expected, abs=0.01)
    status = m.flush()
    assert status["errors"] == 0 and (status["evictions"] > 0) == (retention != "no-replacement")


@pytest.mark.promise("CL-5")
def test_what_is_evicted_leaves_the_disk_and_is_fetched_again(
    mount: MakeMount, dataset: tuple[Path, list[Path], list[int]]
) -> None:
    source, paths, sizes = dataset
    capacity = sum(sizes) // 8
    arguments = ["--retention", "lru", "--cache-size", capacity, *SLOWLY]
    m = mount(source, *arguments)
    contents = [read_past_the_page_cache(m.path / path) for path in paths]
    assert [read_past_the_page_cache(m.path / path) for path in paths] == contents  # six slabs in all
    status = m.flush()
    assert status["blob_bytes"] <= capacity and status["evictions"] > FILES
    # The first slab is empty by now.
    fd = os.open(m.cache / "blob", os.O_RDONLY)
    wait_for(lambda: os.lseek(fd, 0, os.SEEK_DATA), lambda offset: offset >= SLAB_BYTES)
    os.close(fd)
    # Except space allocated in advance, and pages that remaining records share with evicted ones.
    wait_for(lambda: (m.cache / "blob").stat().st_blocks * 512, lambda taken: taken <= capacity + FREE_BYTES)
    last = paths[-FILES // 40 :]
    wait_for(lambda: misses(m, last), lambda count: count == 0)
    m.remount(*arguments)
    assert m.status()["blob_bytes"] <= capacity
    assert misses(m, last) == 0
    assert [read_past_the_page_cache(m.path / path) for path in reversed(paths)] == contents[::-1]
    assert m.flush()["blob_bytes"] <= capacity


@pytest.mark.promise("CL-5")
def test_directories_that_are_done_make_room(mount: MakeMount, dataset: tuple[Path, list[Path], list[int]]) -> None:
    """A cache of two and a half directories: the directory that is read and the one before it are never evicted."""
    source, paths, sizes = dataset
    m = mount(source, "--read-only", "--retention", "retire", "--cache-size", int(sum(sizes) * 0.25))
    directories = [[path for path in paths if path.parts[0] == f"d{number}"] for number in range(10)]
    for directory in directories:
        for path in directory:
            read_past_the_page_cache(m.path / path)
        m.flush()
    wait_for(lambda: misses(m, directories[-1]), lambda count: count == 0)
    before = m.ops()
    assert misses(m, directories[-1]) == 0 and m.ops() == before


@pytest.mark.promise("CL-5")
def test_what_no_room_is_made_for_does_not_wait_for_it(
    mount: MakeMount, dataset: tuple[Path, list[Path], list[int]]
) -> None:
    """A cache of half a directory, which is in use: the policy evicts nothing. Regression: each record waited 2 s."""
    source, paths, sizes = dataset
    m = mount(source, "--read-only", "--retention", "retire", "--cache-size", sum(sizes) // 20)
    for path in paths:
        if path.parts[0] == "d0":
            read_past_the_page_cache(m.path / path)
    assert m.flush()["evictions"] == 0 and m.status()["skipped_admissions"] > 0


def test_an_unknown_policy_is_one_clear_line(source: Path, tmp_path: Path) -> None:
    done = cachefs("mount", source, tmp_path / "mnt", "--retention", "opt", check=False)
    assert done.returncode == 2 and "'opt' is not one of 'no-replacement', 'lru', 'fifo', 'retire'" in done.stderr


LIMIT = 30


@pytest.mark.promise("PI-10")
@pytest.mark.parametrize("mode", [["--read-only"], []])
@pytest.mark.parametrize("retention", ["fifo", "lru"])
def test_metadata_beyond_the_limit_make_room_for_others(
    mount: MakeMount, source: Path, retention: str, mode: list[str]
) -> None:
    """Of 41 files and 5 directories."""
    m = mount(source, *mode, "--metadata-limit", LIMIT, "--metadata-retention", retention)
    expected = contents(source)
    for _ in range(3):
        assert contents(m.path) == expected
        status = wait_for(m.flush, lambda s: s["pinned_inodes"] <= LIMIT)
        assert status["cached_files"] < LIMIT
        assert status["errors"] == 0
    assert status["metadata_evictions"] >= 3 * (46 - LIMIT)
    m.remount(*mode, "--metadata-limit", 20, "--metadata-retention", retention)
    wait_for(m.flush, lambda s: s["pinned_inodes"] <= 20)
    assert contents(m.path) == expected
    m.remount(*mode)
    assert contents(m.path) == expected
    assert m.flush()["metadata_evictions"] == 0


@pytest.mark.promise("PI-10")
def test_what_is_read_again_and_again_stays_pinned(mount: MakeMount, source: Path) -> None:
    m = mount(source, "--read-only", "--metadata-limit", LIMIT, "--metadata-retention", "lru")
    expected = contents(source)
    kept, *others = [m.path / path for path in sorted(expected) if expected[path]]
    kept.read_bytes()
    for path in others:
        path.read_bytes()
        before = m.ops()["open"]
        assert read_past_the_page_cache(kept) == expected[kept.relative_to(m.path)]
        assert m.flush()["source_ops"]["open"] == before
    assert m.status()["metadata_evictions"] > 0


@pytest.mark.promise("PI-11")
@pytest.mark.parametrize("mode", [["--read-only"], []])
def test_without_replacement_nothing_is_pinned_beyond_the_limit(
    mount: MakeMount, source: Path, mode: list[str]
) -> None:
    m = mount(source, *mode, "--metadata-limit", LIMIT)
    expected = contents(source)
    assert contents(m.path) == expected
    status = m.flush()
    assert LIMIT <= status["pinned_inodes"] <= LIMIT + 5  # a file that was read is pinned with its directories
    assert contents(m.path) == expected
    again = m.flush()
    assert (again["pinned_inodes"], again["metadata_evictions"]) == (status["pinned_inodes"], 0)
    # What is not pinned may change, and shows it.
    for path in sorted(expected):
        (source / path).write_bytes(b"changed " + expected[path])
    expire()
    now = contents(m.path)
    kept = [path for path in expected if now[path] == expected[path]]
    assert LIMIT - 6 <= len(kept) <= LIMIT  # the others are directories, and a link
    assert all(now[path] == b"changed " + expected[path] for path in expected if path not in kept)

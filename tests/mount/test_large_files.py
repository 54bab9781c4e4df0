"""Large files: what a read fetches, with sequential and with random access."""

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy
import pyarrow
import pyarrow.dataset
import pyarrow.parquet
import pytest

from tests.conftest import Mount, settle, wait_for

MakeMount = Callable[..., Mount]
MIB = 1 << 20
SIZE = 40 * MIB + 1000
SHARDS, GROUPS, ROWS, COLUMNS = 8, 4, 100_000, 10


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("large")
    (source / "large").write_bytes(random.Random(1).randbytes(SIZE))
    settle()
    return source


def committed(m: Mount) -> dict[str, object]:
    """The status when all that was fetched is cached."""
    return dict(wait_for(m.flush, lambda s: s["cached_bytes"] == s["source_bytes"]))


@pytest.mark.promise("CL-9")
@pytest.mark.parametrize("prefetch", ["sequential", "none"])
def test_what_is_read_from_end_to_end_is_fetched_once_in_large_pieces(
    mount: MakeMount, large: Path, prefetch: str
) -> None:
    m = mount(large, "--read-only", "--prefetch", prefetch, "--simulate-latency", 5)
    with open(m.path / "large", "rb", buffering=0) as file:
        parts = iter(lambda: file.read(MIB), b"")
        assert b"".join(parts) == (large / "large").read_bytes()
    status = committed(m)
    assert status["source_bytes"] == SIZE
    # The kernel asks for a quarter of a MiB, twice as much, then one MiB after the other: about 42 times.
    assert m.ops()["read"] <= 20
    before = m.ops()
    m.drop_caches()
    assert (m.path / "large").read_bytes() == (large / "large").read_bytes()
    assert m.ops() == before


@pytest.mark.promise("CL-9")
@pytest.mark.parametrize(("prefetch", "mib"), [("sequential", 21), ("none", 17)])
def test_who_reads_on_finds_the_next_chunk_fetched(mount: MakeMount, large: Path, prefetch: str, mib: int) -> None:
    m = mount(large, "--read-only", "--prefetch", prefetch)
    with open(m.path / "large", "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # the kernel does not read ahead
        for number in range(16):  # fetched: from 0 to 4, 4 to 6, 6 to 9, 9 to 13, 13 to 17
            assert len(os.pread(file.fileno(), MIB, number * MIB)) == MIB
        assert committed(m)["source_bytes"] == mib * MIB


@pytest.mark.promise("CL-9")
def test_of_a_file_in_which_somebody_jumps_about_only_what_he_reads_is_fetched(mount: MakeMount, large: Path) -> None:
    m = mount(large, "--read-only")
    expected = (large / "large").read_bytes()
    draw = random.Random(2)
    asked: set[int] = set()
    with open(m.path / "large", "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        for _ in range(200):
            offset, length = draw.randrange(SIZE), draw.randrange(1, 60_000)
            assert os.pread(file.fileno(), length, offset) == expected[offset : offset + length]
            asked.update(range(offset // 4096, -(-min(offset + length, SIZE) // 4096)))
    status = m.flush()
    assert len(asked) * 4096 - 4096 <= status["source_bytes"] <= len(asked) * 4096 * 1.1
    before = m.ops()
    for _ in range(2):  # and it is not fetched again
        m.drop_caches()
        with open(m.path / "large", "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            for page in sorted(asked):
                assert os.pread(file.fileno(), 4096, page * 4096) == expected[page * 4096 : page * 4096 + 4096]
    assert m.ops() == before


def test_a_chunk_in_many_pieces_is_fetched_whole(mount: MakeMount, large: Path) -> None:
    """Each piece costs a request to the source and an entry in the index."""
    m = mount(large, "--read-only")
    expected = (large / "large").read_bytes()
    with open(m.path / "large", "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        for page in random.Random(3).sample(range(0, 1024, 2), 100):
            offset = 4 * MIB + page * 4096
            assert os.pread(file.fileno(), 100, offset) == expected[offset : offset + 100]
            m.flush()  # the index is where pieces are counted
    status = m.flush()
    assert status["source_ops"]["read"] == 33
    assert (status["cached_bytes"], status["source_bytes"]) == (4 * MIB, 4 * MIB + 32 * 4096)


def test_readers_of_all_kinds_at_once_read_what_is_there_whoever_dies(mount: MakeMount, large: Path) -> None:
    m = mount(large, "--read-only", "--simulate-latency", 1)
    expected = (large / "large").read_bytes()
    wrong: list[object] = []

    def read(seed: int) -> None:
        draw = random.Random(seed)
        with open(m.path / "large", "rb", buffering=0) as file:
            for _ in range(40):
                offset, length = draw.randrange(SIZE), draw.choice((10, 5000, 300_000, 3 * MIB))
                if os.pread(file.fileno(), length, offset) != expected[offset : offset + length]:
                    wrong.append((seed, offset, length))

    for _ in range(3):
        m.drop_caches()
        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        if not m.no_fastpath:  # the first time with much that is under way
            os.kill(m.status()["fastpath"]["pid"], signal.SIGKILL)
            m.killed_fastpaths += 1
        assert (m.path / "large").read_bytes() == expected
        for thread in threads:
            thread.join()
        assert not wrong
        m.flush()
    assert m.status()["errors"] == 0


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Parquet: 8 shards of 4 row groups of 10 columns of 0.8 MB."""
    source = tmp_path_factory.mktemp("parquet")
    draw = numpy.random.default_rng(1)
    for shard in range(SHARDS):
        table = pyarrow.table({f"c{n}": draw.random(GROUPS * ROWS) for n in range(COLUMNS)})
        pyarrow.parquet.write_table(table, source / f"{shard}.parquet", row_group_size=ROWS, use_dictionary=False)
    settle()
    return source


def column_bytes(shards: Path, names: list[str]) -> int:
    total = 0
    for path in shards.iterdir():
        metadata = pyarrow.parquet.read_metadata(path)
        for group in range(metadata.num_row_groups):
            columns = [metadata.row_group(group).column(n) for n in range(metadata.num_columns)]
            total += sum(c.total_compressed_size for c in columns if c.path_in_schema in names)
    return total


READ = """
import sys, pyarrow.dataset
table = pyarrow.dataset.dataset(sys.argv[1]).to_table(columns=sys.argv[2:], use_threads=False)
print(table.num_rows, *(table[name].to_numpy().sum() for name in sys.argv[2:]))
"""


@pytest.mark.parametrize("names", [["c3", "c7"], ["c0", "c9"]])
def test_of_a_parquet_dataset_two_columns_are_fetched_and_not_ten(
    mount: MakeMount, shards: Path, names: list[str]
) -> None:
    m = mount(shards, "--read-only", "--simulate-latency", 5)

    def read(root: Path) -> str:
        return subprocess.run(
            [sys.executable, "-c", READ, root, *names], stdout=subprocess.PIPE, text=True, check=True
        ).stdout

    expected = read(shards)
    assert expected.startswith(f"{SHARDS * GROUPS * ROWS} ")
    m.drop_caches()
    assert read(m.path) == expected
    status = committed(m)
    assert column_bytes(shards, names) <= status["source_bytes"] <= 1.3 * column_bytes(shards, names)  # type: ignore[operator]
    m.drop_caches()
    before = m.ops()
    assert read(m.path) == expected
    assert m.ops() == before

"""A cache directory on a filesystem that cannot punch holes: here bindfs, as on NFSv3 and eCryptfs."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.bindfs import Bindfs
from tests.conftest import Mount, contents, settle

SIZE, FILES, FILE_BYTES = 4_000_000, 12, 1_000_000
FREE = 20 << 20  # space.py: what is being written, shared pages, and a chunk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Bindfs]:
    (tmp_path / "disk").mkdir()
    made = Bindfs(tmp_path / "disk", tmp_path / "without-holes")
    yield made
    made.close()


def write_files(source: Path) -> None:
    source.mkdir(exist_ok=True)
    for number in range(FILES):
        (source / f"f{number}").write_bytes(os.urandom(FILE_BYTES))
    settle()


def read(m: Mount) -> None:
    m.drop_caches()
    assert contents(m.path) == contents(m.source)
    m.flush()


@pytest.mark.promise("CL-6", "CL-16", "CL-17")
def test_a_cache_without_holes_keeps_its_size(mount: Callable[..., Mount], tmp_path: Path, disk: Bindfs) -> None:
    """Before: with eviction it took space without end."""
    source = tmp_path / "large"
    write_files(source)
    m = mount(source, "--read-only", "--retention", "lru", "--cache-size", SIZE, cache=disk.path / "cache")
    for round_number in range(3):
        if round_number:
            write_files(source)
            m.start()
        for _ in range(2):
            read(m)
        status = m.status()
        assert status["evictions"] == 0 and status["cached_files"] >= 2, round_number
        m.umount()
        allocated = (disk.root / "cache/blob").stat().st_blocks * 512
        assert allocated <= SIZE + FREE, round_number
    assert m.log().count("cannot punch holes") == 3
    assert "are cached again" in m.log()

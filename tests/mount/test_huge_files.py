"""A sparse file may be larger than every disk: nothing that the daemon does grows with the size that a file claims."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cachefs.client.client import Client
from tests.conftest import Mount, cachefs, contents, make_files, settle, small_disk, wait_for

MakeMount = Callable[..., Mount]
Disk = tuple[Path, dict[Path, bytes]]
LARGEST = (1 << 63) - 4096


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """A disk with a sparse file of almost 8 EiB, and its other files."""
    with small_disk(tmp_path / "disk", "16M") as place:
        make_files(place, 8)
        files = contents(place)
        (place / "d0/0-huge").touch()
        os.truncate(place / "d0/0-huge", LARGEST)
        settle()
        yield place, files


def check(m: Mount, files: dict[Path, bytes]) -> None:
    """The others are cached, and what is read of the large one is right."""
    wait_for(m.flush, lambda status: status["cached_files"] == len(files))
    fetched = m.ops()["open"]
    assert {path: (m.path / path).read_bytes() for path in files} == files
    assert m.ops()["open"] == fetched
    with open(m.path / "d0/0-huge", "rb", buffering=0) as huge:
        assert os.pread(huge.fileno(), 10, LARGEST - 5) == bytes(5)
    m.umount()


@pytest.mark.promise("CL-19")
def test_prefetching_passes_over_a_huge_file(mount: MakeMount, disk: Disk) -> None:
    m = mount(disk[0], "--read-only", "--prefetch", "all", "--cache-size", "100M")
    wait_for(m.status, lambda status: status["prefetch"] == "full")
    check(m, disk[1])


@pytest.mark.promise("CL-19")
def test_a_hint_passes_over_a_huge_file(mount: MakeMount, disk: Disk) -> None:
    m = mount(disk[0], "--cache-size", "100M")
    Client(m.path).will_read([m.path / "d0/0-huge", *(m.path / path for path in disk[1])])
    check(m, disk[1])


@pytest.mark.promise("CL-19")
@pytest.mark.parametrize("retention", ["lru", "no-replacement"])
def test_a_warm_up_reports_a_huge_file(mount: MakeMount, disk: Disk, retention: str) -> None:
    m = mount(disk[0], "--cache-size", "100M", "--retention", retention)
    done = cachefs("warmup", m.path, check=False)
    assert done.returncode == 1 and "0-huge: no room in the cache" in done.stderr
    assert "0-huge: not cached" in cachefs("warmup", "--check", m.path, check=False).stderr
    check(m, disk[1])

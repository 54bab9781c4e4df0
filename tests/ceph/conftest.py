"""A real CephFS on this machine, whose MDS recalls caps all the time: cluster.py."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ceph.cluster import CephFs
from tests.conftest import Mount, contents, make_files, wait_for

MODES = {"read-only": ["--read-only"], "read-write": [], "mutable": ["--mutable", "**"]}
CACHED = ["read-only", "read-write"]
BACK_WITHIN_S = 5.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = str(Path(__file__).parent)
    usable = os.geteuid() == 0 and all(map(shutil.which, ("ceph-mon", "ceph-osd", "ceph-mds", "ceph-fuse", "faketime")))
    for item in items:
        if str(item.path).startswith(here):
            for marker in (pytest.mark.mount, pytest.mark.slow, pytest.mark.ceph, pytest.mark.timeout(300)):
                item.add_marker(marker)
            if not usable:
                item.add_marker(pytest.mark.skip(reason="needs root and Ceph: scripts/system-packages --ceph"))


def drop_caches() -> None:
    """Of the whole machine: also of what lies beneath the mount."""
    Path("/proc/sys/vm/drop_caches").write_text("3")


@pytest.fixture(scope="session")
def cephfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CephFs]:
    made = CephFs(tmp_path_factory.mktemp("ceph"))
    yield made
    made.close()


Dataset = tuple[Path, dict[Path, bytes]]
"""A directory of the CephFS, and what is in it."""


def flush(root: Path) -> None:
    """Of what was written, to the cluster: sync does not."""
    for path in root.rglob("f*"):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


@pytest.fixture
def dataset(cephfs: CephFs, tmp_path: Path) -> Dataset:
    local = tmp_path / "local"
    make_files(local, 40)
    root = cephfs.path / tmp_path.name
    subprocess.run(["cp", "-r", local, root], check=True)
    flush(root)
    wait_for(time.time, lambda now: now - cephfs.rctime(root) > Mount.minimum_age_s)
    return root, contents(local)


def check(m: Mount, expected: dict[Path, bytes]) -> None:
    for path, data in expected.items():
        assert (m.path / path).read_bytes() == data


def check_back(m: Mount, expected: dict[Path, bytes]) -> None:
    """The source has just returned: the first of these misses must work soon, and the others with it."""
    returned = time.monotonic()
    path, data = next(iter(expected.items()))
    assert (m.path / path).read_bytes() == data
    elapsed = time.monotonic() - returned
    print(f"the first miss worked {elapsed:.2f} s after the source's return")
    assert elapsed < BACK_WITHIN_S
    check(m, expected)


def halves(files: dict[Path, bytes]) -> tuple[dict[Path, bytes], dict[Path, bytes]]:
    """What is cached when something happens, and what is not."""
    items = list(files.items())
    return dict(items[::2]), dict(items[1::2])

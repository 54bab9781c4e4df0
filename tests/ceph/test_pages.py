"""What the kernel keeps of a CephFS: its pages may be older than the times that it shows (hazard 62)."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ceph.cluster import CephFs
from tests.ceph.conftest import drop_caches
from tests.conftest import Mount, settle

MakeMount = Callable[..., Mount]
MODES = {"read-only": ["--read-only"], "read-write": [], "Python alone": ["--read-only", "--no-fastpath"]}


def cached_pages(path: Path) -> int:
    command = ["fincore", "--noheadings", "--output", "PAGES", path]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.promise("CH-27")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [20_000, 3 << 20])
def test_a_fetch_bypasses_the_pages_of_the_source(
    cephfs: CephFs, tmp_path: Path, mount: MakeMount, mode: str, size: int
) -> None:
    """Before: old pages with new times were cached, while several processes read a file that another node rewrote."""
    root = cephfs.path / tmp_path.name
    root.mkdir()
    (root / "file").write_bytes(b"content " * (size // 8))
    settle()
    drop_caches()
    m = mount(root, *MODES[mode])
    assert (m.path / "file").read_bytes() == b"content " * (size // 8)
    assert cached_pages(root / "file") == 0
    (root / "file").read_bytes()
    assert cached_pages(root / "file") > 0, "pages cannot be counted here"

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


@pytest.mark.promise("EX-8")
@pytest.mark.parametrize("arguments", [[], ["--no-fastpath"]], ids=["fastpath", "no-fastpath"])
def test_a_read_of_a_mutable_file_bypasses_the_pages_of_the_source(
    cephfs: CephFs, tmp_path: Path, mount: MakeMount, arguments: list[str]
) -> None:
    """Before: processes that opened it later got old pages, while others read it and another node had rewritten it."""
    root = cephfs.path / tmp_path.name
    root.mkdir()
    (root / "file").write_bytes(b"content " * 2500)
    settle()
    drop_caches()
    m = mount(root, "--profile", "changing", *arguments)
    assert (m.path / "file").read_bytes() == b"content " * 2500
    assert cached_pages(root / "file") == 0
    with open(m.path / "file", "r+b") as file:  # the same descriptor reads and writes
        file.write(b"changed ")
        assert file.read(8) == b"content "
        file.seek(3)
        file.write(b"NGED")
    assert (root / "file").read_bytes() == (m.path / "file").read_bytes() == b"chaNGED " + b"content " * 2499

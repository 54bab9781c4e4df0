"""A file whose ctime is in the future on CephFS, which never sets times back (hazard 59)."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ceph.cluster import CephFs
from tests.conftest import Mount, expire, settle

MakeMount = Callable[..., Mount]
MODES = {"read-only": ["--read-only"], "read-write": [], "Python alone": ["--read-only", "--no-fastpath"]}


@pytest.mark.promise("CH-15")
@pytest.mark.parametrize("mode", MODES)
def test_a_rewrite_that_leaves_no_trace_is_seen(cephfs: CephFs, tmp_path: Path, mount: MakeMount, mode: str) -> None:
    """A node whose clock is ahead has written the file. Before: old bytes, for good, and two versions in one file."""
    root = cephfs.path / tmp_path.name
    with cephfs.another_client(tmp_path / "ahead", clock_s=600):
        path = tmp_path / "ahead" / tmp_path.name
        path.mkdir()
        (path / "file").write_bytes(b"old." * 1000)
    before = (root / "file").stat()
    m = mount(root, *MODES[mode])
    for _ in range(3):
        assert (m.path / "file").read_bytes() == b"old." * 1000
        settle()
    with cephfs.another_client(tmp_path / "right"), open(tmp_path / "right" / tmp_path.name / "file", "r+b") as file:
        file.write(b"new." * 1000)
        file.flush()
        os.fsync(file.fileno())
    now = (root / "file").stat()
    assert (now.st_size, now.st_mtime_ns, now.st_ctime_ns) == (before.st_size, before.st_mtime_ns, before.st_ctime_ns)
    expire()
    assert (m.path / "file").read_bytes() == b"new." * 1000
    assert m.flush()["cached_files"] == 0


@pytest.mark.promise("CH-17")
@pytest.mark.parametrize("mode", MODES)
def test_an_attribute_that_changes_while_mtime_is_in_the_future_is_seen_by_a_new_mount(
    cephfs: CephFs, tmp_path: Path, mount: MakeMount, mode: str
) -> None:
    """ceph-fuse shows the later of ctime and mtime as ctime. Before: the old attribute for good, and so the old ACL."""
    root = cephfs.path / tmp_path.name
    root.mkdir()
    path = root / "file"
    path.write_bytes(b"content")
    os.setxattr(path, "user.name", b"old")
    os.utime(path, (1e9, time.time() + 3600))
    before = path.stat()
    m = mount(root, *MODES[mode])
    assert (m.path / "file").read_bytes() == b"content"
    settle()
    for _ in range(2):
        assert os.getxattr(m.path / "file", "user.name") == b"old"
    m.umount()
    os.setxattr(path, "user.name", b"new")
    assert path.stat().st_ctime_ns == before.st_ctime_ns
    m.start()
    assert os.getxattr(m.path / "file", "user.name") == b"new"

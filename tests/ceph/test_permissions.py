"""Permissions that another node changes. ceph-fuse checks them itself, where a name is looked up (hazard 69)."""

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ceph.cluster import CephFs
from tests.conftest import Mount, expire
from tests.mount.test_permissions import (
    FEW_FILES,
    SOME,
    a_tree,
    alice,
    bob,
    close_and_read_at_once,
    modes,
    mounted,
    put,
)

MakeMount = Callable[..., Mount]


@pytest.mark.promise("PE-6")
@modes(FEW_FILES)
def test_who_has_lost_access_does_not_share_the_answer_to_another_user(
    cephfs: CephFs, tmp_path: Path, mount: MakeMount, arguments: tuple[str, ...]
) -> None:
    """Before: "may the caller search this directory?" was asked by a stat of ".", which ceph-fuse does not check."""
    with cephfs.another_client(tmp_path / "node"):
        other = tmp_path / "node" / tmp_path.name
        other.mkdir()
        root = cephfs.path / tmp_path.name
        close_and_read_at_once(other, lambda: mounted(mount, root, arguments))


@pytest.mark.promise("PE-6")
@modes(SOME)
def test_a_closed_directory_whose_time_lies_ahead_is_not_shown(
    cephfs: CephFs, tmp_path: Path, mount: MakeMount, arguments: tuple[str, ...]
) -> None:
    """ceph-fuse shows the later of ctime and mtime as ctime. Before: it vouched for all until that time (hazard 59)."""
    with cephfs.another_client(tmp_path / "node"):
        other = tmp_path / "node" / tmp_path.name
        inner = a_tree(other, "outer")
        os.utime(inner, (time.time() + 3600,) * 2)
        m = mounted(mount, cephfs.path / tmp_path.name, arguments)
        inside = m.path / "outer/inner"
        for _ in range(2):
            assert bob((inside / "old").read_bytes) == b"old"
            expire()
        inner.chmod(0o700)
        put(inner / "new", b"secret")
        expire()
        for _ in range(2):
            assert bob((inside / "new").read_bytes) in (errno.EACCES, errno.ESTALE)
        assert alice((inside / "new").read_bytes) == b"secret"
        assert bob((inside / "new").read_bytes) == errno.EACCES


@pytest.mark.promise("PE-1")
@modes(SOME)
def test_an_extended_attribute_is_shown_to_those_whom_ceph_fuse_lets_read_it(
    cephfs: CephFs, tmp_path: Path, mount: MakeMount, arguments: tuple[str, ...]
) -> None:
    """The kernel lets everyone read `security.*`. ceph-fuse refuses users who may not read the file."""
    root = cephfs.path / tmp_path.name
    inner = a_tree(root, "outer")
    for name in ("old", "open"):
        put(inner / name, b"content")
        os.setxattr(inner / name, "security.x", b"value")
    (inner / "old").chmod(0o600)
    m = mounted(mount, root, arguments)
    for path in (root, m.path):
        for _ in range(2):
            assert os.getxattr(path / "outer/inner/old", "security.x") == b"value"
            assert bob(lambda path=path: os.getxattr(path / "outer/inner/old", "security.x")) == errno.EACCES
            assert bob(lambda path=path: os.getxattr(path / "outer/inner/open", "security.x")) == b"value"
            assert bob(lambda path=path: os.getxattr(path / "outer/inner/open", "security.y")) == errno.ENODATA

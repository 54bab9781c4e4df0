"""Permissions that another node changes. ceph-fuse checks them itself, where a name is looked up (hazard 69)."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ceph.cluster import CephFs
from tests.conftest import Mount
from tests.mount.test_permissions import FEW_FILES, close_and_read_at_once, modes, mounted

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

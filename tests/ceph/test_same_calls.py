"""Each call of df, stat -f, find, cp -a, rsync -a, tar and git, on a mount and on the CephFS underneath.

The size of a directory is what is beneath it, and the MDS counts that late.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ceph.cluster import CephFs
from tests.ceph.conftest import MODES
from tests.conftest import Mount, settle
from tests.same_calls import changes, differences, make_tree, programs, reads

MakeMount = Callable[..., Mount]


@pytest.mark.promise("FA-38")
@pytest.mark.parametrize("fastpath", [[], ["--no-fastpath"]], ids=["", "no-fastpath"])
@pytest.mark.parametrize("mode", MODES)
def test_calls_have_the_same_results_as_on_cephfs(
    cephfs: CephFs, mount: MakeMount, tmp_path: Path, mode: str, fastpath: list[str]
) -> None:
    root = cephfs.path / tmp_path.name
    root.mkdir()
    make_tree(root)
    settle()
    m = mount(root, *MODES[mode], *fastpath)
    assert os.statvfs(m.path).f_ffree == os.statvfs(root).f_ffree == -1  # "not known"
    for _ in range(2):  # the second time from the cache
        assert differences(reads(m.path, directory_sizes=False), reads(root, directory_sizes=False)) == {}
    compared = programs(m.path, tmp_path / "mounted", counts=False), programs(root, tmp_path / "source", counts=False)
    assert differences(*compared) == {}
    if mode != "read-only":
        (root / "beside").mkdir()
        assert differences(changes(m.path), changes(root / "beside")) == {}

"""CephFS uses no inode number again (hazard 75)."""

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from cachefs.system.descriptors import closing
from tests.ceph.cluster import CephFs
from tests.conftest import Mount

MODES = {"read-write": [], "killed daemon": [], "mutable": ["--mutable", "**"], "Python alone": ["--no-fastpath"]}


@pytest.mark.promise("CH-46")
@pytest.mark.parametrize("mode", MODES)
def test_a_log_that_another_node_renames_is_appended_to_by_both_names(
    cephfs: CephFs, tmp_path: Path, mount: Callable[..., Mount], mode: str
) -> None:
    """Before: by the new name it had another inode number, so that two writers appended at sizes of their own."""
    root = cephfs.path / tmp_path.name
    root.mkdir()
    m = mount(root, *MODES[mode])
    flags = os.O_WRONLY | os.O_APPEND
    with ExitStack() as stack:
        first = stack.enter_context(closing(os.open(m.path / "log", flags | os.O_CREAT)))
        os.link(m.path / "log", m.path / "another")
        os.write(first, b"1")
        if mode == "killed daemon":
            m.kill()
            m.start()
        (root / "log").rename(root / "log.1")
        second = stack.enter_context(closing(os.open(m.path / "log.1", flags)))
        third = stack.enter_context(closing(os.open(m.path / "another", flags)))
        fds = first, second, third
        assert len({os.fstat(fd).st_ino for fd in fds}) == 1
        for data in (b"2", b"3", b"4"):
            for fd in fds:
                os.write(fd, data)
        assert (m.path / "log.1").read_bytes() == b"1222333444"
    assert (root / "log.1").read_bytes() == b"1222333444"


@pytest.mark.promise("CH-46")
def test_no_inode_number_is_used_again(cephfs: CephFs, tmp_path: Path) -> None:
    """What `Kind.uses_numbers_once` says of CephFS, with a client that is mounted again in between."""
    root = cephfs.path / tmp_path.name
    root.mkdir()
    numbers = []
    for _ in range(2):
        for _ in range(500):
            with closing(os.open(root / "f", os.O_CREAT | os.O_WRONLY)) as fd:
                numbers.append(os.fstat(fd).st_ino)
            (root / "f").unlink()
        cephfs.kill()
        cephfs.again()
    assert len(set(numbers)) == len(numbers)

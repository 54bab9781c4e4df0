"""A source whose ctime is a copy of mtime, in whole seconds: sshfs, here with an SFTP server on a pipe."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import Mount, settle
from tests.sources.kinds import start_sshfs

LONG_AGO = 1577836800
SIZE = 50_000


@pytest.fixture
def sshfs(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """(the directory of the server, where it is mounted)."""
    root, path = tmp_path / "root", tmp_path / "source"
    root.mkdir()
    path.mkdir()
    (root / "file").write_bytes(b"a" * SIZE)
    os.utime(root / "file", (LONG_AGO, LONG_AGO))
    settle()
    start_sshfs(root, path)
    yield root, path
    subprocess.run(["umount", "-l", path], check=True)


@pytest.mark.promise("CH-28")
@pytest.mark.parametrize("mode", [("--read-only",), ()], ids=["read-only", "read-write"])
def test_a_file_that_was_replaced_with_its_times_is_read_again_by_the_next_mount(
    mount: Callable[..., Mount], sshfs: tuple[Path, Path], mode: tuple[str, ...]
) -> None:
    """As `rsync -a` does. Before: the old contents for ever, or a mix of both."""
    root, path = sshfs
    m = mount(path, *mode)
    assert (m.path / "file").read_bytes() == b"a" * SIZE
    assert m.flush()["cached_files"] == 1
    m.drop_caches()
    assert (m.path / "file").read_bytes() == b"a" * SIZE
    before = os.stat(path / "file")
    assert before.st_ctime_ns == before.st_mtime_ns == LONG_AGO * 10**9
    m.umount()
    (root / "new").write_bytes(b"b" * SIZE)
    os.utime(root / "new", (LONG_AGO, LONG_AGO))
    (root / "new").rename(root / "file")
    m.start()
    assert (m.path / "file").read_bytes() == b"b" * SIZE
    assert m.flush()["cached_files"] == 1
    m.drop_caches()
    assert (m.path / "file").read_bytes() == b"b" * SIZE
    assert m.log().count("may have no change times of their own") == 2

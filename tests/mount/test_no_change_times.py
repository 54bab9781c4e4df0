"""Sources whose ctime is a copy of mtime (sshfs, and bindfs over such a filesystem), or 0."""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.bindfs import Bindfs
from tests.conftest import Mount, settle, start_fault_fs
from tests.sshfs import sshfs as mounted_by_sshfs

LONG_AGO = 1577836800
SIZE = 50_000


@pytest.fixture
def sshfs(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """(the directory of the server, where it is mounted)."""
    root, path = tmp_path / "root", tmp_path / "source"
    root.mkdir()
    (root / "file").write_bytes(b"a" * SIZE)
    os.utime(root / "file", (LONG_AGO, LONG_AGO))
    settle()
    with mounted_by_sshfs(root, path, "-o", "dir_cache=no"):
        yield root, path


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


@pytest.mark.promise("CH-28")
@pytest.mark.parametrize("mode", [("--read-only",), (), ("--read-only", "--no-fastpath")], ids=" ".join)
def test_a_replaced_file_of_a_filesystem_beneath_the_source_is_read_again_by_the_next_mount(
    mount: Callable[..., Mount], tmp_path: Path, beneath: ExitStack, mode: tuple[str, ...]
) -> None:
    """Before: only the filesystem of the source itself was asked whether it has change times."""
    root, source = tmp_path / "server", tmp_path / "source"
    for directory in (root, source / "sub"):
        directory.mkdir(parents=True)
    for name in ("file", "new"):
        (root / name).write_bytes(name[:1].encode() * SIZE)
        os.utime(root / name, (LONG_AGO, LONG_AGO))
    beneath.enter_context(mounted_by_sshfs(root, source / "sub", "-o", "allow_other"))
    m = mount(source, *mode)
    assert (m.path / "sub/file").read_bytes() == b"f" * SIZE
    m.flush()
    m.umount()
    (root / "new").rename(root / "file")
    m.start()
    assert (m.path / "sub/file").read_bytes() == b"n" * SIZE


@pytest.mark.promise("CH-28")
@pytest.mark.parametrize("mode", [("--read-only",), (), ("--read-only", "--no-fastpath")], ids=" ".join)
def test_a_replaced_file_is_read_again_from_bindfs_whose_type_is_known(
    mount: Callable[..., Mount], tmp_path: Path, beneath: ExitStack, mode: tuple[str, ...]
) -> None:
    """Before: a file had bytes of two releases of a SquashFS beneath bindfs or mergerfs."""
    root, source = tmp_path / "root", tmp_path / "source"
    root.mkdir()
    (root / "file").write_bytes(b"f" * SIZE)
    os.utime(root / "file", (LONG_AGO, LONG_AGO))
    beneath.callback(Bindfs(root, source, "rw,subtype=bindfs,ctime-from-mtime").close)
    m = mount(source, *mode)
    assert (m.path / "file").read_bytes() == b"f" * SIZE
    m.flush()
    m.umount()
    (root / "file").write_bytes(b"n" * SIZE)  # the inode number stays
    os.utime(root / "file", (LONG_AGO, LONG_AGO))
    m.start()
    assert (m.path / "file").read_bytes() == b"n" * SIZE


@pytest.mark.promise("CH-28")
@pytest.mark.parametrize("mode", [("--read-only",), (), ("--read-only", "--no-fastpath")], ids=" ".join)
def test_the_next_mount_reads_replaced_files_and_symlinks_again_if_each_ctime_is_0(
    mount: Callable[..., Mount], source: Path, tmp_path: Path, beneath: ExitStack, mode: tuple[str, ...]
) -> None:
    """As a release of an archive is by the next one, beneath archivemount. Before: a file had bytes of both."""

    def make(content: str) -> None:
        (source / "file").write_text(content * SIZE)
        (source / "link").unlink(missing_ok=True)
        (source / "link").symlink_to(content)
        for name in ("file", "link"):
            os.utime(source / name, (LONG_AGO, LONG_AGO), follow_symlinks=False)

    make("a")
    faulty, faults, _ = start_fault_fs(source, tmp_path, beneath)
    (faults / "no-ctime").touch()
    m = mount(faulty, *mode)
    for _ in range(2):
        assert (m.path / "file").read_text() == "a" * SIZE and os.readlink(m.path / "link") == "a"
        m.flush()
    m.umount()
    make("b")
    m.start()
    assert (m.path / "file").read_text() == "b" * SIZE and os.readlink(m.path / "link") == "b"


@pytest.mark.promise("CH-28")
@pytest.mark.parametrize("mode", [("--read-only",), ()], ids=["read-only", "read-write"])
def test_a_directory_whose_time_was_set_back_is_listed_again_by_the_next_mount(
    mount: Callable[..., Mount], sshfs: tuple[Path, Path], mode: tuple[str, ...]
) -> None:
    """As `rsync -a` does. Before: the new name was missing for ever."""
    root, path = sshfs
    (root / "directory").mkdir()
    os.utime(root / "directory", (LONG_AGO, LONG_AGO))
    m = mount(path, *mode)
    assert list((m.path / "directory").iterdir()) == []
    assert not (m.path / "directory/new").exists()
    m.flush()
    m.umount()
    (root / "directory/new").write_bytes(b"new")
    os.utime(root / "directory", (LONG_AGO, LONG_AGO))
    m.start()
    assert (m.path / "directory/new").read_bytes() == b"new"
    assert os.listdir(m.path / "directory") == ["new"]


@pytest.mark.promise("CH-28")
@pytest.mark.parametrize("mode", [("--read-only",), ()], ids=["read-only", "read-write"])
def test_a_new_name_on_the_second_branch_of_mergerfs_is_shown_by_the_next_mount(
    mount: Callable[..., Mount], tmp_path: Path, beneath: ExitStack, mode: tuple[str, ...]
) -> None:
    """mergerfs shows the times that a directory has on the first branch."""
    first, second, source = (tmp_path / name for name in ("first", "second", "source"))
    for directory in (first / "directory", second / "directory", source):
        directory.mkdir(parents=True)
    settle()
    subprocess.run(["mergerfs", "-o", "use_ino,minfreespace=0", f"{first}:{second}", source], check=True)
    beneath.callback(subprocess.run, ["umount", "-l", source], check=True)
    m = mount(source, *mode)
    assert list((m.path / "directory").iterdir()) == []
    assert not (m.path / "directory/new").exists()
    m.flush()
    m.umount()
    (second / "directory/new").write_bytes(b"new")
    m.start()
    assert (m.path / "directory/new").read_bytes() == b"new"
    assert os.listdir(m.path / "directory") == ["new"]

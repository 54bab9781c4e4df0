"""Several filesystems beneath a source that passes their inode numbers on under one device number."""

import os
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.bindfs import Bindfs
from tests.conftest import Mount, expire, raises_errno
from tests.sources.images import make_image, mount_image

pytestmark = pytest.mark.promise("CH-45")
MODES = [("--read-only",), (), ("--read-only", "--no-fastpath"), ("--no-fastpath",)]
KINDS = ["bindfs", "bindfs with a type", "mergerfs"]


def shown_by(kind: str, tmp_path: Path, beneath: ExitStack) -> tuple[Path, Path]:
    """(a directory, where such a FUSE filesystem shows it)."""
    root, source = tmp_path / "root", tmp_path / "source"
    root.mkdir()
    if kind == "mergerfs":
        source.mkdir()
        options = "use_ino,minfreespace=0,allow_other,inodecalc=passthrough"
        subprocess.run(["mergerfs", "-o", options, root, source], check=True)
        beneath.callback(subprocess.run, ["umount", "-l", source], check=True)
    else:
        beneath.callback(Bindfs(root, source, "rw" if kind == "bindfs" else "rw,subtype=bindfs").close)
    return root, source


@pytest.mark.parametrize("mode", MODES, ids=" ".join)
@pytest.mark.parametrize("kind", KINDS)
def test_two_releases_of_an_image_are_two_trees(
    mount: Callable[..., Mount], tmp_path: Path, beneath: ExitStack, mode: tuple[str, ...], kind: str
) -> None:
    """Inode numbers, sizes and times are the same. Before: the second one showed all that was known of the first."""
    root, source = shown_by(kind, tmp_path, beneath)
    for release in ("first", "second"):
        tree = tmp_path / f"tree-of-{release}"
        (tree / "directory/inner").mkdir(parents=True)
        (tree / "directory/inner/file").write_bytes(release.encode().ljust(5000))
        (tree / f"directory/only-{release}").touch()
        (tree / "link").symlink_to(f"to-{release}")
        make_image("squashfs", tree, tmp_path / release)
        (root / release).mkdir()
        mount_image("squashfs", tmp_path / release, root / release)
        beneath.callback(subprocess.run, ["umount", "-l", root / release], check=True)
    m = mount(source, *mode)
    for _ in range(2):
        for release in ("first", "second"):
            shown = m.path / release
            assert (shown / "directory/inner/file").read_bytes() == release.encode().ljust(5000)
            assert sorted(os.listdir(shown / "directory")) == ["inner", f"only-{release}"]
            assert os.readlink(shown / "link") == f"to-{release}"
        m.flush()
        m.drop_caches()
        expire()


@pytest.mark.parametrize("mode", [(), ("--no-fastpath",)], ids=" ".join)
@pytest.mark.parametrize("kind", KINDS)
def test_a_btrfs_snapshot_is_not_its_origin(
    mount: Callable[..., Mount], tmp_path: Path, beneath: ExitStack, mode: tuple[str, ...], kind: str
) -> None:
    """Before: a file that was created in the snapshot came into its origin."""
    with open(tmp_path / "image", "wb") as file:
        file.truncate(120 << 20)
    subprocess.run(["mkfs.btrfs", "-q", tmp_path / "image"], check=True)
    root, source = shown_by(kind, tmp_path, beneath)
    root /= "disk"
    root.mkdir()
    mount_image("btrfs", tmp_path / "image", root)
    beneath.callback(subprocess.run, ["umount", "-l", root], check=True)
    subprocess.run(["btrfs", "-q", "subvolume", "create", root / "live"], check=True)
    (root / "live/directory").mkdir()
    (root / "live/directory/file").write_bytes(b"old")
    subprocess.run(["btrfs", "-q", "subvolume", "snapshot", "-r", root / "live", root / "snapshot"], check=True)
    (root / "live/directory/file").write_bytes(b"new")
    m = mount(source, *mode)
    shown = m.path / "disk"
    for _ in range(2):
        assert (shown / "live/directory/file").read_bytes() == b"new"
        assert (shown / "snapshot/directory/file").read_bytes() == b"old"
        expire()
    raises_errno(30, lambda: (shown / "snapshot/directory/created").touch())
    (shown / "live/directory/created").touch()
    assert sorted(os.listdir(shown / "live/directory")) == ["created", "file"]
    assert os.listdir(shown / "snapshot/directory") == ["file"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_hard_link_of_a_fifo_is_that_fifo(
    mount: Callable[..., Mount], tmp_path: Path, beneath: ExitStack, kind: str
) -> None:
    """Before: only the names of a regular file had one inode number."""
    _, source = shown_by(kind, tmp_path, beneath)
    m = mount(source, "--profile", "changing")
    os.mkfifo(m.path / "fifo")
    os.link(m.path / "fifo", m.path / "another")
    for _ in range(2):
        assert os.path.samefile(m.path / "fifo", m.path / "another")
        expire()

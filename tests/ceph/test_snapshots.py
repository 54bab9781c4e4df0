"""Snapshots of a CephFS: ceph-fuse numbers them in the order in which it meets them, and a recursive ctime does not
cover them (hazard 58)."""

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest

from tests.ceph.cluster import CephFs
from tests.ceph.conftest import BACK_WITHIN_S, drop_caches
from tests.ceph.test_restart import SOON_OLD, wait_until_believed, wait_until_old
from tests.conftest import Mount, contents, raises_errno, settle, wait_for

T = TypeVar("T")
MakeMount = Callable[..., Mount]
MODES = {"read-only": ["--read-only"], "read-write": [], "Python alone": ["--read-only", "--no-fastpath"]}
UNCACHED = {"mutable": ["--mutable", "**"], "none": ["--cache", "none"]}


def write(root: Path, version: str) -> None:
    """Another file in D, and the same file with other contents of the same size."""
    (root / "D").mkdir(exist_ok=True)
    for path in (root / "D").iterdir():
        path.unlink()
    (root / f"D/{version}").write_text(f"D of {version}")
    (root / "f").write_text(f"f of {version}")


@pytest.fixture
def two(cephfs: CephFs, tmp_path: Path) -> Iterator[Path]:
    """A directory with the snapshots s1 and s2."""
    root = cephfs.path / tmp_path.name
    root.mkdir()
    for name in ("s1", "s2"):
        write(root, name)
        (root / ".snap" / name).mkdir()
    yield root
    for snapshot in list((root / ".snap").iterdir()):
        snapshot.rmdir()


def check(m: Mount, root: Path, *names: str) -> None:
    for name in names:
        assert contents(m.path / ".snap" / name) == contents(root / ".snap" / name), name


def mount_client_anew(cephfs: CephFs, root: Path) -> None:
    """With s2 as the first snapshot that it meets."""
    number = (root / ".snap/s1/f").stat().st_ino
    cephfs.kill()
    drop_caches()
    cephfs.again()
    assert (root / ".snap/s2/f").stat().st_ino == number, "snapshots have numbers that last"
    assert (root / ".snap/s1/f").stat().st_ino != number


def until_back(read: Callable[[], T]) -> T:
    """Read again as long as that fails: what was open, or known to the kernel, is looked up again."""
    deadline = time.monotonic() + BACK_WITHIN_S
    while True:
        try:
            return read()
        except OSError:
            assert time.monotonic() < deadline


@pytest.mark.promise("CH-25")
@pytest.mark.parametrize("mode", MODES)
def test_snapshots_exchange_their_numbers_while_cachefs_is_mounted(
    cephfs: CephFs, two: Path, mount: MakeMount, mode: str
) -> None:
    """Before: s2 had the files of s1, for good."""
    m = mount(two, *MODES[mode])
    settle()
    for _ in range(2):
        check(m, two, "s1")
        m.drop_caches()
    mount_client_anew(cephfs, two)
    m.drop_caches()
    until_back(partial(check, m, two, "s2", "s1"))
    m.drop_caches()
    check(m, two, "s1", "s2")


@pytest.mark.promise("CH-25")
@pytest.mark.parametrize("revalidate", ["auto", "never"])
@pytest.mark.parametrize("mode", MODES)
def test_snapshots_exchange_their_numbers_between_two_mounts(
    cephfs: CephFs, two: Path, mount: MakeMount, mode: str, revalidate: str
) -> None:
    m = mount(two, *MODES[mode], "--revalidate", revalidate)
    settle()
    for _ in range(2):
        check(m, two, "s1")
        m.drop_caches()
    m.flush()
    m.umount()
    mount_client_anew(cephfs, two)
    m.start()
    check(m, two, "s2", "s1")
    m.drop_caches()
    check(m, two, "s1", "s2")


@pytest.mark.promise("CH-18")
def test_a_snapshot_that_is_made_again_is_compared(cephfs: CephFs, tmp_path: Path, mount: MakeMount) -> None:
    """A snapshot of a directory above the source is shown in the source as _NAME_NUMBER. Before: what was cached of the
    former one was believed, because no change of it moves the recursive ctime of the source."""
    above = cephfs.path / tmp_path.name
    root = above / "source"
    root.mkdir(parents=True)
    write(root, "s1")
    (above / ".snap/nightly").mkdir()
    write(root, "s2")
    (name,) = os.listdir(root / ".snap")
    wait_until_old(cephfs, root)
    m = mount(root, "--read-only", *SOON_OLD)
    check(m, root, name)
    m.flush()
    m.umount()
    (above / ".snap/nightly").rmdir()
    (above / ".snap/nightly").mkdir()
    drop_caches()
    m.start()
    wait_until_believed(m)
    seen = root / ".snap" / name / "f"
    wait_for(seen.read_text, lambda text: text == "f of s2", timeout_s=90)  # ceph-fuse remembers the former one
    check(m, root, name)
    m.umount()
    (above / ".snap/nightly").rmdir()


@pytest.mark.promise("FA-10")
@pytest.mark.parametrize("mode", MODES)
def test_a_source_in_a_snapshot_comes_back(cephfs: CephFs, two: Path, mount: MakeMount, mode: str) -> None:
    """Before: it was lost for good, because its root had another number."""
    m = mount(two / ".snap/s1", *MODES[mode])
    expected = contents(two / ".snap/s1")
    settle()
    assert (m.path / "D/s1").read_text() == expected[Path("D/s1")].decode()
    m.flush()
    mount_client_anew(cephfs, two)
    m.drop_caches()
    assert until_back(partial(contents, m.path)) == expected
    m.umount()
    m.start()
    assert contents(m.path) == expected


@pytest.mark.promise("CH-10")
@pytest.mark.parametrize("source", [".", ".snap/s"])
@pytest.mark.parametrize("mode", [*MODES, *UNCACHED])
def test_nothing_is_read_of_a_snapshot_that_was_removed(
    cephfs: CephFs, tmp_path: Path, mount: MakeMount, mode: str, source: str
) -> None:
    """ceph-fuse gives zeros by descriptors of a removed snapshot once it is trimmed (hazard 71). Before: they were
    cached, of a file that was open and of those in a directory that had been listed; and shown by a descriptor, when
    the mount knew that the name of the snapshot is gone, or the file was mutable."""
    root = cephfs.path / tmp_path.name
    (root / "D").mkdir(parents=True)
    names = [f"D/{number}" for number in range(60)]
    for name in ("large", *names):
        (root / name).write_bytes(b"x" * (16 << 20 if name == "large" else 50_000))
    (root / ".snap/s").mkdir()
    for name in ("large", *names):
        (root / name).write_bytes(b"")  # only the snapshot has the objects now
    m = mount(root / source, *(MODES | UNCACHED)[mode], "--source-timeout", "1")
    inside = m.path / os.path.relpath(".snap/s", source)
    assert all((inside / name).stat().st_size == 50_000 for name in names)
    assert (inside / names[0]).read_bytes() == b"x" * 50_000
    with ExitStack() as opened:
        large = opened.enter_context(open(inside / "large", "rb", buffering=0))
        assert os.pread(large.fileno(), 1, 0) == b"x"
        plain = [opened.enter_context(open(root / ".snap/s" / name, "rb")) for name in names]
        with cephfs.another_client(tmp_path / "node"):
            (tmp_path / "node" / tmp_path.name / ".snap/s").rmdir()
        for file in plain:  # what was read once stays in a cache
            if file.read() == bytes(50_000):
                break
            time.sleep(0.5)
        else:
            raise AssertionError("the snapshot is not trimmed")
        for read in (
            lambda: os.pread(large.fileno(), 1, 12 << 20),
            *((inside / name).read_bytes for name in names[1 : None if source == "." else 4]),
        ):
            with pytest.raises(OSError) as failed:
                read()
            assert failed.value.errno in ((errno.ESTALE, errno.ENOENT) if source == "." else (errno.ETIMEDOUT,))
        if source == ".":
            wait_for(inside.exists, lambda exists: not exists)
            for offset in range(8 << 20, 16 << 20, 2 << 20):  # not fetched before
                raises_errno(errno.ESTALE, partial(os.pread, large.fileno(), 1 << 20, offset))
        else:
            assert m.status()["source_lost"]

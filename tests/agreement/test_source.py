"""Reading the source: cachefs/source/source.py and identity.py against fastpath/c/misses/source.c."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from cachefs.options import Options
from cachefs.source.directories import ROOT
from cachefs.source.identity import Changed
from cachefs.source.source import Object, Source
from cachefs.store.index.records import Inode
from cachefs.system.stat import NO_NUMBER, clamped_ns
from tests.agreement.library import FastPath

MIB = 1 << 20


class Sides:
    def __init__(self, fast_path: FastPath, root: Path) -> None:
        self.root = root
        self._fast_path = fast_path
        self._root_fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        self._source = Source(self._root_fd)
        self._source.connection.volumes.tell(lambda place, number: fast_path.shared.set_volume(*place, number))

    def record_of(self, path: str) -> Inode:
        return Inode(7, *[0] * 22).with_stat(self._source.stat(self._root_fd, path.encode()))

    def read(self, path: str, expected: Inode, offset: int, length: int) -> bytes | None:
        """What both say; None: it is not the version that is expected, or not there."""
        c = self._fast_path.read_source(self._root_fd, os.fsencode(path), expected, offset, length)
        python = None
        with suppress(Changed):
            python = self._source.read_version(Object(ROOT, path.encode()), expected, offset, length)
        assert c == python
        return c

    def read_deep(self, path: bytes, expected: Inode, length: int) -> bytes | None:
        """By the fast path alone: it goes by whole paths."""
        return self._fast_path.read_source(self._root_fd, path, expected, 0, length)

    def close(self) -> None:
        self._source.directories.clear()
        os.close(self._root_fd)


@pytest.fixture
def sides(fast_path: FastPath, tmp_path: Path) -> Iterator[Sides]:
    fast_path.set_up(Options())
    root = tmp_path / "source"
    root.mkdir()
    made = Sides(fast_path, root)
    yield made
    made.close()


@pytest.mark.parametrize("size", [1, 4096, 100_000, 2 * MIB, 3 * MIB + 5, 5 * MIB])
def test_both_read_any_part(sides: Sides, size: int) -> None:
    data = os.urandom(size)
    (sides.root / "file").write_bytes(data)
    expected = sides.record_of("file")
    largest = 4 * MIB
    for offset in {0, 1, 4096, size // 2, size - 1}:
        length = min(size - offset, largest)
        if 0 <= offset < size:
            assert sides.read("file", expected, offset, length) == data[offset : offset + length]
            assert sides.read("file", expected, offset, 1) == data[offset : offset + 1]
    assert sides.read("file", expected, size, 1) is None, "there is nothing behind the end"
    assert sides.read("file", expected, size - 1, 2) is None


PARTS = [4096, 5000, 8192, 100_001, 1 << 30]


@pytest.mark.parametrize("most", PARTS)
@pytest.mark.parametrize("length", [8192, 2 * MIB, 3 * MIB + 5])
def test_what_comes_in_parts_is_read_whole(fast_path: FastPath, sides: Sides, most: int, length: int) -> None:
    data = os.urandom(4 * MIB)
    (sides.root / "file").write_bytes(data)
    expected = sides.record_of("file")
    for offset in (0, 4096, 5000):
        with fast_path.disk(most=most):
            assert sides.read("file", expected, offset, length) == data[offset : offset + length]


@pytest.mark.parametrize("length", [1, 8192, 2 * MIB])
def test_a_read_that_a_signal_interrupts_is_made_again(fast_path: FastPath, sides: Sides, length: int) -> None:
    data = os.urandom(length)
    (sides.root / "file").write_bytes(data)
    expected = sides.record_of("file")
    with fast_path.disk(error=errno.EINTR, times=3):
        assert sides.read("file", expected, 0, length) == data
    with fast_path.disk(error=errno.EINTR, times=1):  # and then the end
        assert sides.read("file", expected, 0, length + 1) is None


@pytest.mark.parametrize("length", [8192, 2 * MIB])
def test_a_read_that_fails_gives_nothing(fast_path: FastPath, sides: Sides, length: int) -> None:
    (sides.root / "file").write_bytes(bytes(length))
    expected = sides.record_of("file")
    with fast_path.disk(error=errno.EIO, times=9):
        assert sides.read_deep(b"file", expected, length) is None


@pytest.mark.parametrize("size", [2 * MIB, 3 * MIB + 5])
def test_large_parts_are_read_past_the_page_cache_where_that_can_be(
    fast_path: FastPath, sides: Sides, size: int
) -> None:
    data = os.urandom(size)
    (sides.root / "file").write_bytes(data)
    expected = sides.record_of("file")
    with fast_path.disk():
        assert sides.read_deep(b"file", expected, size) == data
        assert fast_path.direct_reads() == 1
    with fast_path.disk():
        assert sides.read_deep(b"file", expected, 2 * MIB - 1) == data[: 2 * MIB - 1]
        assert fast_path.direct_reads() == 0
    with fast_path.disk(error=errno.EINVAL, times=1):  # a filesystem without
        assert sides.read_deep(b"file", expected, size) == data
        assert fast_path.direct_reads() == 1
    with fast_path.disk(error=errno.EINVAL, times=1, stays_direct=True):
        assert sides.read_deep(b"file", expected, size) is None


@pytest.mark.promise("CH-36")
def test_both_read_a_file_whose_number_does_not_stay(sides: Sides) -> None:
    (sides.root / "file").write_bytes(b"data")
    expected = sides.record_of("file")._replace(source_inode=NO_NUMBER)
    assert sides.read("file", expected, 0, 4) == b"data"
    assert sides.read("file", expected._replace(mtime_ns=expected.mtime_ns + 1), 0, 4) is None


CHANGES = {
    "size": lambda inode: inode._replace(size=inode.size + 1),
    "mtime": lambda inode: inode._replace(mtime_ns=inode.mtime_ns + 1),
    "ctime": lambda inode: inode._replace(ctime_ns=inode.ctime_ns - 1),
    "inode number": lambda inode: inode._replace(source_inode=inode.source_inode + 1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_neither_reads_another_version(sides: Sides, name: str) -> None:
    (sides.root / "file").write_bytes(b"data")
    expected = sides.record_of("file")
    assert sides.read("file", expected, 0, 4) == b"data"
    assert sides.read("file", CHANGES[name](expected), 0, 4) is None


def test_neither_reads_a_file_of_another_volume(sides: Sides) -> None:
    (sides.root / "file").write_bytes(b"data")
    expected = sides.record_of("file")
    assert expected.device == 0
    assert sides.read("file", expected._replace(device=1 << 63), 0, 4) is None


@pytest.mark.parametrize("kind", ["fifo", "directory", "symlink", "socket"])
def test_neither_reads_what_is_no_regular_file(sides: Sides, kind: str) -> None:
    """Nor waits for it."""
    path = sides.root / "file"
    (sides.root / "other").write_bytes(b"data")
    {
        "fifo": lambda: os.mkfifo(path),
        "directory": path.mkdir,
        "symlink": lambda: path.symlink_to("other"),
        "socket": lambda: os.mknod(path, stat.S_IFSOCK | 0o644),
    }[kind]()
    now = path.lstat()
    expected = Inode(7, *[0] * 22)._replace(
        mode=stat.S_IFREG | 0o644, size=now.st_size, source_inode=now.st_ino,
        mtime_ns=clamped_ns(now.st_mtime_ns), ctime_ns=clamped_ns(now.st_ctime_ns),
    )  # fmt: skip
    assert sides.read("file", expected, 0, 4) is None


def test_neither_reads_a_name_that_is_gone(sides: Sides) -> None:
    (sides.root / "file").write_bytes(b"data")
    expected = sides.record_of("file")
    (sides.root / "file").unlink()
    assert sides.read("file", expected, 0, 4) is None


@pytest.mark.parametrize("outside", ["../file", "/etc/hostname", "link/file", "d/../../file", "up"])
def test_no_path_leads_out(sides: Sides, outside: str) -> None:
    (sides.root.parent / "file").write_bytes(b"data")
    (sides.root / "d").mkdir()
    (sides.root / "link").symlink_to("..")
    (sides.root / "up").symlink_to("../file")
    expected = sides.record_of("../file")
    assert sides.read_deep(outside.encode(), expected, 4) is None


@pytest.mark.parametrize("length", [4095, 4096, 4097, 8191, 8192, 12_300, 32_000])
def test_a_path_that_is_longer_than_a_system_call_takes(sides: Sides, length: int) -> None:
    """It is walked in pieces, and nothing on it may be a link."""
    names = []
    left = length - len("/file")
    while left > 0:
        take = min(200, left) if left != 201 else 100
        names.append(b"%d" % (len(names) % 10) * (take - bool(names)) if take > 1 else b"x")
        left -= take
    path = b"/".join([*names, b"file"])
    fd = os.open(sides.root, os.O_RDONLY)
    for name in names:
        os.mkdir(name, dir_fd=fd)
        below = os.open(name, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    with open(os.open("file", os.O_WRONLY | os.O_CREAT, dir_fd=fd), "wb") as file:
        file.write(b"data")
    now = os.stat("file", dir_fd=fd)
    expected = Inode(7, *[0] * 22)._replace(
        mode=now.st_mode, size=4, source_inode=now.st_ino, mtime_ns=now.st_mtime_ns, ctime_ns=now.st_ctime_ns
    )
    assert sides.read_deep(path, expected, 4) == b"data"
    before = len(os.listdir("/proc/self/fd"))
    assert sides.read_deep(path + b"x", expected, 4) is None
    assert sides.read_deep(path, expected, 4) == b"data"
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(fd)

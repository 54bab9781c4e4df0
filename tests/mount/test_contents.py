"""Every byte that comes through the mount is the source's, however it is read."""

import concurrent.futures
import hashlib
import mmap
import os
import random
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Mount, make_files, settle

MakeMount = Callable[..., Mount]
GIB = 1 << 30


@pytest.fixture(scope="module")
def awkward(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Names, kinds and sizes that a filesystem may get wrong."""
    root = tmp_path_factory.mktemp("awkward") / "source"
    make_files(root, 200, (1, 90_000), 5)
    draw = random.Random(7)
    for size in (0, 1, 4095, 4096, 4097, 131_071, 131_072, 131_073, 1 << 20, (1 << 20) + 1, (4 << 20) + 5, 9_000_001):
        (root / f"size-{size}").write_bytes(draw.randbytes(size))
    raw = os.fsencode(root)
    for name in (b"not-utf8-\xff\xfe", "ümläut-☃".encode(), b"new\nline", b"back\\slash", b" space ", b"x" * 255):
        with open(raw + b"/" + name, "wb") as file:
            file.write(name)
    descriptor = os.open(root, os.O_RDONLY)
    for level in range(40):  # its path is longer than PATH_MAX
        name = f"level-{level:02}-{'n' * 120}"
        os.mkdir(name, dir_fd=descriptor)
        following = os.open(name, os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = following
    fd = os.open("bottom", os.O_WRONLY | os.O_CREAT, dir_fd=descriptor)
    os.write(fd, b"deep down")
    os.close(fd)
    os.close(descriptor)
    os.link(root / "size-4097", root / "hard link")
    (root / "symlink").symlink_to("d0")
    (root / "dangling").symlink_to("/nowhere/at/all")
    with open(root / "sparse", "wb") as file:
        file.seek(3 << 20)
        file.write(b"middle")
        file.truncate(20 << 20)
    (root / "empty-dir").mkdir()
    settle()
    return root


def digests(root: Path) -> dict[bytes, str]:
    """Path to sha256 of each regular file, readlink of each symlink; walked by descriptors, so that no path is long."""
    found: dict[bytes, str] = {}
    for directory, _, files, fd in os.fwalk(os.fsencode(root)):
        for name in files:
            path = os.path.relpath(os.path.join(directory, name), os.fsencode(root))
            if stat.S_ISLNK(os.lstat(name, dir_fd=fd).st_mode):
                found[path] = "-> " + os.fsdecode(os.readlink(name, dir_fd=fd))
                continue
            with open(os.open(name, os.O_RDONLY, dir_fd=fd), "rb") as file:
                found[path] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


@pytest.mark.promise("TE-1")
@pytest.mark.parametrize("mode", [["--read-only"], []], ids=["read-only", "read-write"])
@pytest.mark.parametrize("level", ["none", "metadata", "full"])
def test_every_file_equals_the_source_with_eight_readers_cold_and_warm(
    mount: MakeMount, awkward: Path, level: str, mode: list[str]
) -> None:
    expected = digests(awkward)
    assert len(expected) > 220
    m = mount(awkward, "--cache", level, *mode)
    for _ in range(2):
        with concurrent.futures.ProcessPoolExecutor(8) as pool:
            assert all(found == expected for found in pool.map(digests, [m.path] * 8))
        m.drop_caches()
    assert (m.path / "hard link").stat().st_ino == (m.path / "size-4097").stat().st_ino
    status = m.flush()
    assert status["errors"] == status["stale_reads"] == 0
    assert (status["cached_files"] > 200) == (level == "full")


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_every_way_to_read(mount: MakeMount, awkward: Path, warm: bool) -> None:
    m = mount(awkward, "--read-only")
    for name in ("size-131073", "size-9000001", "d0/f00000"):
        path, expected = m.path / name, (awkward / name).read_bytes()
        if warm:
            assert path.read_bytes() == expected
            m.flush()
            m.drop_caches()
        fd = os.open(path, os.O_RDONLY)
        try:
            size = len(expected)
            assert os.pread(fd, 100, size // 2) == expected[size // 2 : size // 2 + 100]
            buffers = [bytearray(1000), bytearray(70_000), bytearray(3)]
            count = os.preadv(fd, buffers, 5)
            assert b"".join(buffers)[:count] == expected[5 : 5 + count]
            with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as mapped:
                assert mapped[:] == expected
            assert os.lseek(fd, size + 10_000, os.SEEK_SET) == size + 10_000
            assert os.read(fd, 10) == b""
            ours, theirs = socket.socketpair()
            with ours, theirs, concurrent.futures.ThreadPoolExecutor(1) as pool:
                received = pool.submit(lambda: b"".join(iter(lambda: theirs.recv(65536), b"")))  # noqa: B023
                offset = 0
                while offset < size:
                    offset += os.sendfile(ours.fileno(), fd, offset, size - offset)
                ours.shutdown(socket.SHUT_WR)
                assert received.result() == expected
        finally:
            os.close(fd)
        direct = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            with mmap.mmap(-1, 1 << 20) as aligned:
                count = os.preadv(direct, [aligned], 4096)
                assert aligned[:count] == expected[4096 : 4096 + count]
        finally:
            os.close(direct)


@pytest.mark.slow
def test_a_file_of_five_gigabytes(mount: MakeMount, tmp_path: Path) -> None:
    source = tmp_path / "large"
    source.mkdir()
    marks = {0: b"start", 4 * GIB - 3: b"across", 4 * GIB + 12_345: b"beyond", 5 * GIB - 4: b"last"}
    with open(source / "file", "wb") as file:
        for offset, mark in marks.items():
            file.seek(offset)
            file.write(mark)
    assert (source / "file").stat().st_size == 5 * GIB
    settle()
    m = mount(source, "--read-only", "--cache-size", "1G")
    expected = hashlib.sha256()
    for block in range(5 * 64):
        piece = bytearray(GIB // 64)
        for offset, mark in marks.items():
            for index, byte in enumerate(mark):
                if (offset + index) // len(piece) == block:
                    piece[(offset + index) % len(piece)] = byte
        expected.update(piece)
    with open(m.path / "file", "rb", buffering=0) as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == expected.hexdigest()
        for offset, mark in marks.items():
            assert os.pread(file.fileno(), len(mark), offset) == mark
    status = m.flush()
    assert status["cached_files"] == 1 and 0 < status["blob_bytes"] <= GIB
    assert status["errors"] == 0


@pytest.mark.slow
def test_a_directory_of_a_hundred_thousand_entries(mount: MakeMount, tmp_path: Path) -> None:
    source = tmp_path / "wide"
    (source / "d").mkdir(parents=True)
    for index in range(100_000):
        os.close(os.open(source / "d" / f"entry-{index:06}", os.O_WRONLY | os.O_CREAT))
    settle()
    expected = {f"entry-{index:06}" for index in range(100_000)}
    m = mount(source, "--read-only")
    for _ in range(2):
        names = os.listdir(m.path / "d")
        assert len(names) == 100_000 and set(names) == expected
        m.drop_caches()
    assert m.ops()["readdir"] == 1
    m.remount()
    names = os.listdir(m.path / "d")
    assert len(names) == 100_000 and set(names) == expected

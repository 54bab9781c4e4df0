"""A change by this mount moves the ctime of a file, and so may a rewrite by another node at the same time (hazard 24):
a file keeps its version only if size and mtime are still the recorded ones."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from tests.bindfs import Bindfs
from tests.conftest import Mount, cachefs, expire, settle

pytestmark = pytest.mark.promise("CH-11")

MakeMount = Callable[..., Mount]
SIZE, PART = 8 << 20, 1 << 20


def rename(m: Mount) -> str:
    os.rename(m.path / "file", m.path / "renamed")
    return "renamed"


def rename_over(m: Mount) -> str:
    os.rename(m.path / "file", m.path / "victim")
    return "victim"


def link(m: Mount) -> str:
    os.link(m.path / "file", m.path / "linked")
    return "linked"


def link_and_old_name(m: Mount) -> str:
    os.link(m.path / "file", m.path / "linked")
    return "file"


def unlink(m: Mount) -> str:
    os.unlink(m.path / "other")
    return "file"


CHANGES = pytest.mark.parametrize("change", [rename, rename_over, link, link_and_old_name, unlink])


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    root.mkdir()
    (root / "file").write_bytes(b"o" * SIZE)
    (root / "victim").write_bytes(b"v")
    os.link(root / "file", root / "other")
    settle()
    return root


def rewrite(root: Path, content: bytes) -> None:
    """In place, as another node does."""
    with open(root / "file", "r+b") as file:
        file.write(content)


def read_again(path: Path) -> bytes:
    """What a job reads when it opens the file again after ESTALE."""
    for _ in range(5):
        try:
            return path.read_bytes()
        except OSError as error:
            assert error.errno == errno.ESTALE
    raise AssertionError("ESTALE five times")


@contextmanager
def a_partial_reader(m: Mount) -> Iterator[IO[bytes]]:
    """A process that has read the first part of the file, which is cached."""
    os.stat(m.path / "other")
    with open(m.path / "file", "rb", buffering=0) as reader:
        assert reader.read(PART) == b"o" * PART
        m.flush()
        yield reader


@CHANGES
def test_a_file_that_was_rewritten_before_our_own_change_is_read_whole(
    mount: MakeMount, tree: Path, change: Callable[[Mount], str]
) -> None:
    m = mount(tree)
    with a_partial_reader(m) as before:
        rewrite(tree, b"n" * SIZE)
        name = change(m)
        assert read_again(m.path / name) == b"n" * SIZE
        # An open handle sees the old version, or an error.
        seen = b""
        try:
            while data := before.read(PART):
                seen += data
        except OSError as error:
            assert error.errno == errno.ESTALE
        assert set(seen) <= {ord("o")}
    m.umount()
    m.start("--revalidate", "never")
    assert (m.path / name).read_bytes() == b"n" * SIZE


@CHANGES
def test_a_file_that_was_rewritten_with_size_and_mtime_kept_is_read_whole(
    mount: MakeMount, tree: Path, change: Callable[[Mount], str]
) -> None:
    """Before: our own change was taken for the only one that had moved the ctime, and the file became a mix."""
    m = mount(tree)
    with a_partial_reader(m) as before:
        times = os.stat(tree / "file")
        rewrite(tree, b"n" * SIZE)
        os.utime(tree / "file", ns=(times.st_atime_ns, times.st_mtime_ns))
        name = change(m)
        assert read_again(m.path / name) == b"n" * SIZE
        with pytest.raises(OSError) as failed:
            os.pread(before.fileno(), PART, SIZE - PART)
        assert failed.value.errno == errno.ESTALE
    assert read_again(m.path / name) == b"n" * SIZE


@CHANGES
def test_a_file_whose_content_is_the_same_keeps_its_data(
    mount: MakeMount, tree: Path, change: Callable[[Mount], str]
) -> None:
    m = mount(tree)
    os.stat(m.path / "other")
    with open(m.path / "file", "rb") as before:
        assert before.read() == b"o" * SIZE
        source_bytes = m.flush()["source_bytes"]
        name = change(m)
        assert os.stat(m.path / name).st_ino == os.fstat(before.fileno()).st_ino
        os.posix_fadvise(before.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        before.seek(0)
        assert before.read() == b"o" * SIZE
        assert (m.path / name).read_bytes() == b"o" * SIZE
    assert m.status()["source_bytes"] == source_bytes


def test_a_file_that_grew_before_our_own_change_is_read_whole(mount: MakeMount, tree: Path) -> None:
    m = mount(tree)
    assert (m.path / "file").read_bytes() == b"o" * SIZE
    with open(tree / "file", "ab") as file:
        file.write(b"more")
    os.rename(m.path / "file", m.path / "renamed")
    assert read_again(m.path / "renamed") == b"o" * SIZE + b"more"
    assert os.stat(m.path / "renamed").st_size == SIZE + 4


@pytest.mark.promise("TE-4")
@pytest.mark.parametrize("arguments", [(), ("--mutable", "**"), ("--cache", "none")], ids=["", "mutable", "none"])
@pytest.mark.parametrize("append", [0, os.O_APPEND], ids=["", "append"])
@pytest.mark.parametrize("reopen", [False, True], ids=["", "reopen"])
def test_what_is_written_is_there_after_a_listing(
    mount: MakeMount, tree: Path, arguments: tuple[str, ...], append: int, reopen: bool
) -> None:
    """Regression: for a second, listings gave the kernel the old size of the file: the writer could not read its own
    bytes, and its next append replaced them."""
    m = mount(tree, *arguments)
    flags = os.O_RDWR | os.O_CREAT | append
    fd = os.open(m.path / "new", flags)
    reader = os.open(m.path / "new", os.O_RDONLY)
    written = b""
    for number in range(5):
        list(os.scandir(m.path))
        os.write(fd, b"%d" % number)
        written += b"%d" % number
        list(os.scandir(m.path))
        assert os.pread(fd, 100, 0) == os.pread(reader, 100, 0) == written
        assert os.fstat(fd).st_size == os.stat(m.path / "new").st_size == len(written)
        if reopen:
            os.close(fd)
            list(os.scandir(m.path))
            assert os.pread(reader, 100, 0) == written
            fd = os.open(m.path / "new", flags)
            os.lseek(fd, 0, os.SEEK_END)
    os.close(fd)
    os.close(reader)
    assert (tree / "new").read_bytes() == written


@pytest.mark.promise("TE-4")
@pytest.mark.parametrize("arguments", [(), ("--mutable", "**"), ("--cache", "none")], ids=["", "mutable", "none"])
@pytest.mark.parametrize("path", [".", "directory", "directory/log"])
def test_writers_of_a_file_see_each_other_after_an_invalidation(
    mount: MakeMount, tree: Path, arguments: tuple[str, ...], path: str
) -> None:
    """Before: the file got another inode number, and each of two writers appended at a size of its own."""
    (tree / "directory").mkdir()
    m = mount(tree, *arguments)
    log = m.path / "directory/log"
    with open(log, "ab", buffering=0) as first:
        first.write(b"AAAAA")
        cachefs("invalidate", m.path / path)
        with open(log, "ab", buffering=0) as second:
            for file, line in ((second, b"BBB"), (first, b"CC"), (second, b"D"), (first, b"EEEE")):
                file.write(line)
            assert os.fstat(first.fileno()).st_ino == os.fstat(second.fileno()).st_ino
            assert os.fstat(first.fileno()).st_size == os.fstat(second.fileno()).st_size
    assert (tree / "directory/log").read_bytes() == log.read_bytes() == b"AAAAABBBCCDEEEE"


def rename(root: Path) -> Path:
    return (root / "old/log").rename(root / "new/log")


def link(root: Path) -> Path:
    os.link(root / "old/log", root / "new/log")
    return root / "new/log"


def rename_and_back(root: Path) -> Path:
    return rename(root).rename(root / "old/log")


def rename_directory(root: Path) -> Path:
    return (root / "old").rename(root / "new/old") / "log"


@pytest.mark.promise("CH-43")
@pytest.mark.parametrize("arguments", [(), ("--no-fastpath",)], ids="".join)
@pytest.mark.parametrize("change", [rename, link, rename_and_back, rename_directory])
def test_writers_of_a_file_that_another_node_renames_see_each_other(
    mount: MakeMount, old_ext4: Path, arguments: tuple[str, ...], change: Callable[[Path], Path]
) -> None:
    """Without birth times. Before: by the new name it had another inode number, and a size of its own."""
    for name in ("old", "new"):
        (old_ext4 / name).mkdir()
    m = mount(old_ext4, *arguments)
    with open(m.path / "old/log", "ab", buffering=0) as first:
        first.write(b"AAAAA")
        log = change(old_ext4)
        expire()
        with open(m.path / log.relative_to(old_ext4), "ab", buffering=0) as second:
            for file, line in ((second, b"BBB"), (first, b"CC"), (second, b"D"), (first, b"EEEE")):
                file.write(line)
    assert log.read_bytes() == b"AAAAABBBCCDEEEE"


@pytest.mark.promise("CH-43")
@pytest.mark.parametrize("arguments", [(), ("--no-fastpath",)], ids="".join)
def test_a_reader_of_a_file_that_another_node_renames_sees_what_is_written(
    mount: MakeMount, old_ext4: Path, arguments: tuple[str, ...]
) -> None:
    """Without birth times. Before: by the new name it had another inode number, so the reader kept its page."""
    (old_ext4 / "old").write_bytes(b"A" * 100)
    m = mount(old_ext4, "--mutable", "*", *arguments)
    with open(m.path / "old", "rb", buffering=0) as reader:
        assert reader.read(1) == b"A"
        (old_ext4 / "old").rename(old_ext4 / "new")
        expire()
        with open(m.path / "new", "r+b", buffering=0) as writer:
            writer.write(b"B")
            assert os.pread(reader.fileno(), 1, 0) == b"B"
            assert os.fstat(reader.fileno()).st_ino == os.fstat(writer.fileno()).st_ino


@pytest.mark.promise("TE-4", "WR-8")
@pytest.mark.parametrize("arguments", [(), ("--no-fastpath",), ("--mutable", "**"), ("--cache", "none")], ids="".join)
@pytest.mark.parametrize("way", ["by path", "by descriptor"])
def test_an_append_after_a_change_of_attributes_begins_at_the_end(
    mount: MakeMount, tree: Path, arguments: tuple[str, ...], way: str
) -> None:
    """The kernel takes over the size that is in the answer. chown(-1, -1) was answered with a former one: what was
    appended next was written over the beginning of the file."""
    m = mount(tree, *arguments)
    mode = (m.path / "file").stat().st_mode & 0o7777
    changes: dict[str, Callable[[int | Path], None]] = {
        "chown-nothing": lambda at: os.chown(at, -1, -1),
        "chown": lambda at: os.chown(at, os.geteuid(), -1),
        "chmod": lambda at: os.chmod(at, mode),
        "utime": lambda at: os.utime(at),
        "utime-set": lambda at: os.utime(at, ns=(1, 2)),
        "setxattr": lambda at: os.setxattr(at, "user.name", b"value"),
    }
    for name, change in changes.items():
        path = m.path / name
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            os.write(fd, b"a" * 50_000)
            change(path if way == "by path" else fd)
            assert os.fstat(fd).st_size == path.stat().st_size == 50_000, name
            with open(path, "ab") as file:
                file.write(b"b" * 1000)
        finally:
            os.close(fd)
        assert (tree / name).read_bytes() == b"a" * 50_000 + b"b" * 1000, name
        assert path.read_bytes() == (tree / name).read_bytes(), name


@pytest.mark.promise("EX-27")
@pytest.mark.parametrize("arguments", [(), ("--no-fastpath",), ("--mutable", "**")], ids=" ".join)
def test_an_invalidated_file_that_was_written_here_keeps_its_inode(
    mount: MakeMount, source: Path, arguments: tuple[str, ...]
) -> None:
    """Before: the path got another inode. So sendfile of a descriptor gave the bytes and the size of before a later
    write by the path."""
    m = mount(source, *arguments)
    (m.path / "file").write_bytes(b"a" * PART)
    reader = os.open(m.path / "file", os.O_RDONLY)
    assert os.pread(reader, PART, 0) == b"a" * PART
    with open(m.path / "file", "ab") as file:
        file.write(b"b" * PART)
    cachefs("invalidate", m.path)
    assert (m.path / "file").stat().st_ino == os.fstat(reader).st_ino
    with open(m.path / "file", "ab") as file:
        file.write(b"c" * PART)
    into, out = os.memfd_create("out"), b""
    while os.sendfile(into, reader, len(out), SIZE):
        out = os.pread(into, SIZE, 0)
    assert out == b"a" * PART + b"b" * PART + b"c" * PART == (source / "file").read_bytes()
    os.close(reader)
    os.close(into)


@pytest.mark.promise("WR-8")
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR], ids=["read", "written"])
@pytest.mark.parametrize("arguments", [(), ("--mutable", "**"), ("--cache", "none")], ids=" ".join)
def test_an_open_file_loses_its_name_where_the_source_then_knows_it_no_longer(
    mount: MakeMount, source: Path, tmp_path: Path, arguments: tuple[str, ...], flags: int
) -> None:
    """`bindfs -o hard_remove` answers an fstat of a file without a name with ENOENT. Before: unlink and rename failed
    with that error, after the source had made the change."""
    bindfs = Bindfs(source, tmp_path / "bindfs", "rw,hard_remove")
    try:
        m = mount(bindfs.path, *arguments)
        for name in ("removed", "replaced", "new"):
            (m.path / name).write_bytes(name.encode())
        opened = [os.open(m.path / name, flags) for name in ("removed", "replaced")]
        os.unlink(m.path / "removed")
        os.rename(m.path / "new", m.path / "replaced")
        for fd in opened:
            os.close(fd)
        for place in (m.path, source):
            assert {path.name for path in place.iterdir()} & {"removed", "replaced", "new"} == {"replaced"}
            assert (place / "replaced").read_bytes() == b"new"
        m.umount()
    finally:
        bindfs.close()

"""Fetched data are compared with the pinned version, also with equal size and mtime, and while the file changes."""

import errno
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from cachefs.system.descriptors import closing
from tests.bindfs import Bindfs
from tests.conftest import Mount, cachefs, raises_errno, settle, wait_for

MakeMount = Callable[..., Mount]
MIB = 1 << 20
MODES = pytest.mark.parametrize("mode", [("--read-only",), ()], ids=["read-only", "read-write"])


def rewrite(path: Path, content: bytes) -> None:
    """In place, with equal size and mtime: only ctime shows the change."""
    times = path.stat()
    with open(path, "r+b") as file:
        file.write(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def sent(fd: int, copy: Path) -> bytes:
    """What sendfile gets of a file, from its beginning."""
    with copy.open("wb") as file:
        while os.sendfile(file.fileno(), fd, None, 1 << 20):
            pass
    return copy.read_bytes()


def read_until_noticed(path: Path) -> bytes:
    """What a reader gets that retries after ESTALE."""

    def attempt() -> bytes | None:
        try:
            return path.read_bytes()
        except OSError as error:
            assert error.errno == errno.ESTALE
            return None

    found: bytes = wait_for(attempt, lambda content: content is not None)
    return found


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("comparisons")
    for name in ("read-only", "read-write"):
        (root / name).write_bytes(b"a" * 12 * MIB)
    settle()
    return root


@pytest.mark.promise("CH-10")
@MODES
def test_a_file_that_is_rewritten_with_its_mtime_kept_is_never_mixed(
    mount: MakeMount, large: Path, mode: tuple[str, ...]
) -> None:
    name = "read-only" if mode else "read-write"
    m = mount(large, *mode, "--prefetch", "none")
    with open(m.path / name, "rb", buffering=0) as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no readahead
        assert os.pread(opened.fileno(), MIB, 0) == b"a" * MIB
        rewrite(large / name, b"b" * 12 * MIB)
        raises_errno(errno.ESTALE, lambda: os.pread(opened.fileno(), MIB, 10 * MIB))
    assert m.status()["stale_reads"] >= 1
    assert read_until_noticed(m.path / name) == b"b" * 12 * MIB


@MODES
def test_a_cached_file_that_was_rewritten_with_its_mtime_kept_is_noticed_after_a_restart(
    mount: MakeMount, source: Path, mode: tuple[str, ...]
) -> None:
    m = mount(source, *mode)
    path = m.path / "d0/f00000"
    old = path.read_bytes()
    m.flush()
    new = bytes(byte ^ 0xFF for byte in old)
    m.umount()
    rewrite(source / "d0/f00000", new)
    m.start()
    assert read_until_noticed(path) == new


@pytest.mark.promise("IM-2", "CH-10")
@MODES
def test_a_file_that_is_rewritten_while_it_is_read_is_stale(
    mount: MakeMount, source: Path, mode: tuple[str, ...]
) -> None:
    """The source is slow: the file changes after it was opened and before it is read."""
    m = mount(source, *mode, "--attr-timeout", "60", "--simulate-latency", "400")
    path = m.path / "d0/f00000"
    old = (source / "d0/f00000").read_bytes()
    path.stat()
    opens = m.ops().get("open", 0)
    results: list[bytes | int] = []

    def read() -> None:
        try:
            results.append(path.read_bytes())
        except OSError as error:
            results.append(error.errno or 0)

    thread = threading.Thread(target=read)
    thread.start()
    wait_for(m.ops, lambda ops: ops.get("open", 0) > opens)  # counted when it begins
    time.sleep(0.6)  # opened; 0.2 s until it is read
    new = bytes(byte ^ 0xFF for byte in old)
    rewrite(source / "d0/f00000", new)
    thread.join(60)
    # Where open() itself compares, a file that had changed by then is looked up and opened again.
    compared_by_open = m.no_fastpath and not mode
    assert results in ([old], [errno.ESTALE]) or (compared_by_open and results == [new])
    if results == [errno.ESTALE]:
        assert read_until_noticed(path) == new
        m.drop_caches()
        assert path.read_bytes() == new


@pytest.mark.promise("EX-8")
@pytest.mark.parametrize("mode", [("--mutable", "**"), ("--cache", "none"), ()], ids=["mutable", "none", "unpinned"])
@pytest.mark.parametrize("pieces", [1, 300], ids=["shorter", "longer"])
def test_who_opens_a_mutable_file_gets_the_size_that_it_has_now(
    mount: MakeMount, tmp_path: Path, mode: tuple[str, ...], pieces: int
) -> None:
    """Also while the kernel caches the old size: it would pad the truncated part with zeros."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "file").write_bytes(b"a" * 100 * 512)
    settle()
    m = mount(source, *mode, "--attr-timeout", "60")
    path = m.path / "file"
    if not mode:
        path.read_bytes()
        cachefs("unpin", path)
    assert path.stat().st_size == 100 * 512
    (source / "file").write_bytes(b"b" * pieces * 512)
    with open(path, "rb", buffering=0) as opened:
        assert os.fstat(opened.fileno()).st_size == pieces * 512
        assert opened.read() == b"b" * pieces * 512
    assert path.stat().st_size == pieces * 512


def rewritten_by_another_node(mount: MakeMount, tmp_path: Path, pieces: int) -> Iterator[tuple[Path, bytes]]:
    """A mutable file that the kernel knows with another size, and its contents; three times, for the same thread."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "file").write_bytes(b"a" * 100 * 512)
    m = mount(source, "--mutable", "**", "--attr-timeout", "60")
    path = m.path / "file"
    assert path.read_bytes() == b"a" * 100 * 512
    for number in range(1, 4):
        expected = b"%d" % number * pieces * number * 512
        (source / "file").write_bytes(expected)
        yield path, expected


@pytest.mark.promise("EX-8")
@pytest.mark.parametrize("pieces", [1, 300], ids=["shorter", "longer"])
def test_an_open_for_writing_sees_the_present_size_of_a_mutable_file(
    mount: MakeMount, tmp_path: Path, pieces: int
) -> None:
    for path, expected in rewritten_by_another_node(mount, tmp_path, pieces):
        with open(path, "r+b", buffering=0) as opened:
            assert opened.seek(0, os.SEEK_END) == len(expected)
            opened.seek(0)
            assert opened.read() == expected
            assert opened.read() == b""


@pytest.mark.promise("EX-8")
@pytest.mark.parametrize("pieces", [1, 300], ids=["shorter", "longer"])
def test_sendfile_of_a_mutable_file_that_another_node_rewrote_gets_all_of_it(
    mount: MakeMount, tmp_path: Path, pieces: int
) -> None:
    """The kernel asks for no new size there (hazard 64)."""
    for path, expected in rewritten_by_another_node(mount, tmp_path, pieces):
        with open(path, "rb") as opened:
            assert sent(opened.fileno(), tmp_path / "copy") == expected


@pytest.mark.promise("ON-1")
@pytest.mark.parametrize("mode", [(), ("--no-fastpath",), ("--mutable", "**")], ids=lambda mode: "-".join(mode))
def test_a_file_that_was_just_written_is_opened_again_by_its_descriptor(
    mount: MakeMount, source: Path, mode: tuple[str, ...]
) -> None:
    """`command /dev/stdin < FILE`. Before: ESTALE for two seconds. The kernel has no name to look up there."""
    m = mount(source, *mode)
    for content in (b"written", b"written again, and longer", b"short"):
        (m.path / "file").write_bytes(content)
        with open(m.path / "file", "rb") as opened, open(f"/proc/self/fd/{opened.fileno()}", "rb") as again:
            assert again.read() == content


@pytest.mark.promise("EX-8")
def test_sendfile_gets_all_of_a_mutable_file_that_others_look_at(mount: MakeMount, tmp_path: Path) -> None:
    """The kernel drops an answer if another one has overtaken it: the daemon had the new size, the kernel the old one.

    Before: about one in a hundred got nothing.
    """
    source = tmp_path / "source"
    source.mkdir()
    (source / "file").touch()
    m = mount(source, "--mutable", "**")
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            with suppress(OSError), open(m.path / "file", "rb", buffering=0) as opened:
                for _ in range(20):
                    os.fstat(opened.fileno())
                    os.pread(opened.fileno(), 4096, 0)
                    time.sleep(random.random() / 500)

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for size in [0, 100, 0, 50_000] * 150:
            (source / "file").write_bytes(bytes(size))
            with open(m.path / "file", "rb") as opened:
                assert len(sent(opened.fileno(), tmp_path / "copy")) == size
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@pytest.mark.full_age
@pytest.mark.promise("EX-8")
def test_sendfile_gets_all_of_a_mutable_file_that_another_node_rewrote_just_after_this_one(
    mount: MakeMount, tmp_path: Path
) -> None:
    """Before: in most cases the kernel had dropped the answer with the new size, because of a notification."""
    source = tmp_path / "source"
    source.mkdir()
    m = mount(source, "--mutable", "**")
    for at in range(24):
        path = m.path / f"file{at % 4}"
        path.write_bytes(bytes((0, 10, 300)[at % 3]))
        time.sleep((0, 0.02, 0.3)[at % 3])
        size = 50_000 + at
        with open(source / path.name, "r+b") as rewritten:
            rewritten.truncate(0)
            rewritten.write(bytes(size))
        # Not by open(), which asks for the attributes.
        with closing(os.open(path, os.O_RDONLY)) as fd:
            assert len(sent(fd, tmp_path / "copy")) == size


@pytest.mark.promise("EX-8")
@pytest.mark.parametrize("arguments", [("--mutable", "**"), ("--cache", "none")], ids=" ".join)
@pytest.mark.parametrize("more", [(), ("--no-fastpath",)], ids=["fast path", "python"])
def test_a_mutable_file_is_read_past_the_pages_that_the_kernel_keeps_of_a_fuse_source(
    mount: MakeMount, tmp_path: Path, beneath: ExitStack, arguments: tuple[str, ...], more: tuple[str, ...]
) -> None:
    """The kernel compares them by size and mtime. Before: a new open got old pages and new ones."""
    root = tmp_path / "root"
    root.mkdir()
    (root / "file").write_bytes(b"a" * MIB)
    bindfs = Bindfs(root, tmp_path / "bindfs", "kernel_cache")
    beneath.callback(bindfs.close)
    m = mount(bindfs.path, *arguments, *more)
    for flags, content in ((os.O_RDONLY, b"b" * MIB), (os.O_RDWR, b"c" * MIB)):
        with open(m.path / "file", "rb", buffering=0) as file:
            file.read(64 << 10)
        rewrite(root / "file", content)
        with closing(os.open(m.path / "file", flags)) as fd:
            assert os.pread(fd, MIB, 0) == content


@pytest.mark.promise("EX-8")
def test_a_mutable_file_that_grows_all_the_time_can_be_opened(mount: MakeMount, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "log").write_bytes(b"line\n")
    m = mount(source, "--mutable", "**", "--attr-timeout", "60")
    stop = threading.Event()

    def write() -> None:
        with open(source / "log", "ab", buffering=0) as file:
            while not stop.is_set():
                file.write(b"line\n")

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(300):
            assert (m.path / "log").read_bytes().startswith(b"line\n")
    finally:
        stop.set()
        thread.join()


@pytest.mark.promise("IM-2")
def test_what_is_pinned_is_what_the_source_says_when_it_is_opened(mount: MakeMount, source: Path) -> None:
    """Not what it said at the look-up. (With a fast path it may be that; then the read fails.)"""
    m = mount(source, "--attr-timeout", "60", "--no-fastpath")
    path = m.path / "d0/f00000"
    path.stat()
    (source / "d0/f00000").write_bytes(b"the new one")
    settle()
    assert path.read_bytes() == b"the new one" and path.stat().st_size == 11


@pytest.mark.promise("IM-3")
@pytest.mark.parametrize("mode", [[], ["--no-fastpath"]], ids=["", "no-fastpath"])
def test_directories_above_that_had_expired_are_compared_when_they_are_pinned(
    mount: MakeMount, source: Path, mode: list[str]
) -> None:
    """The file is opened through a descriptor of its directory: the directories are not looked up."""
    (source / "a/b").mkdir(parents=True)
    (source / "a/b/file").write_bytes(b"content")
    settle()
    m = mount(source, "--attr-timeout", "0.3", *mode)
    directory = os.open(m.path / "a/b", os.O_RDONLY | os.O_DIRECTORY)
    time.sleep(0.5)
    for name in ("a", "a/b"):
        (source / name).chmod(0o711)
    file = os.open("file", os.O_RDONLY, dir_fd=directory)
    assert os.read(file, 100) == b"content"
    for fd in (file, directory):
        os.close(fd)
    m.flush()
    m.drop_caches()
    for name in ("a", "a/b"):
        assert (m.path / name).stat().st_mode & 0o777 == 0o711


@pytest.mark.promise("PE-4")
@pytest.mark.parametrize("mode", [["--read-only"], [], ["--read-only", "--no-fastpath"]], ids="-".join)
def test_an_attribute_of_a_pinned_file_comes_with_what_else_has_changed(
    mount: MakeMount, source: Path, mode: list[str]
) -> None:
    file = source / "d0/f00000"
    os.setxattr(file, "user.colour", b"old")
    settle()
    m = mount(source, *mode)
    path = m.path / "d0/f00000"
    path.read_bytes()
    changed_ns = path.stat().st_ctime_ns
    m.flush()
    os.setxattr(file, "user.colour", b"new")
    settle()
    assert os.getxattr(path, "user.colour") == b"new"
    assert path.stat().st_ctime_ns == file.stat().st_ctime_ns != changed_ns


@pytest.mark.promise("CH-17")
@pytest.mark.parametrize("mode", [[], ["--no-fastpath"]], ids=["", "no-fastpath"])
def test_a_name_of_a_changed_directory_is_compared_though_what_it_led_to_has_been(
    mount: MakeMount, source: Path, mode: list[str]
) -> None:
    (source / "d0/x").write_bytes(b"old")
    os.link(source / "d0/x", source / "d1/x")
    settle()
    m = mount(source, "--read-only", *mode)
    for name in ("d0", "d1"):
        assert (m.path / name / "x").read_bytes() == b"old"
    m.flush()
    m.umount()
    (source / "new").write_bytes(b"the new one")
    (source / "new").rename(source / "d0/x")
    settle()
    m.start()
    for _ in range(2):
        assert (m.path / "d1/x").read_bytes() == b"old"
        (m.path / "d0/f00000").stat()
        m.flush()
        m.drop_caches()
    assert (m.path / "d0/x").read_bytes() == b"the new one"


@pytest.mark.promise("PE-4")
@pytest.mark.parametrize("mode", [[], ["--no-fastpath"]], ids=["", "no-fastpath"])
def test_an_attribute_of_a_directory_that_has_changed_is_not_that_of_before(
    mount: MakeMount, source: Path, mode: list[str]
) -> None:
    """It keeps its number, and the index entries of its old version."""
    os.setxattr(source / "d0", "user.colour", b"old")
    settle()
    m = mount(source, "--read-only", *mode)
    path = m.path / "d0"
    assert os.getxattr(path, "user.colour") == b"old"
    for number in range(3):
        m.flush()
        os.setxattr(source / "d0", "user.colour", b"%d" % number)
        settle()
        cachefs("invalidate", path)
        path.stat()
        m.flush()
        m.drop_caches()
        path.stat()
        assert os.getxattr(path, "user.colour") == b"%d" % number

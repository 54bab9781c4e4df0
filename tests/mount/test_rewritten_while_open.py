"""A file is open and immutable. Another node writes a version of another size to it, and then this mount changes the
names of the file. The open file keeps its old bytes and its old size, or calls fail with ESTALE: it never shows a part
of the old version, or bytes of both versions."""

import errno
import mmap
import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from cachefs.client import Client
from tests.conftest import Mount, cachefs, settle, wait_for

pytestmark = pytest.mark.promise("CH-11", "CH-10", "EX-10")

MakeMount = Callable[..., Mount]
PAGE = 4096
SMALL, LARGE = 16 * PAGE, 3 << 20
"""A small file is fetched whole. For a large one the daemon may keep a descriptor of the source."""
FILES = {"small-shrunk": (SMALL, 20_000), "small-grown": (SMALL, 100_000), "large-shrunk": (LARGE, 1 << 20)}
FILES["large-grown"] = LARGE, LARGE + 100_000
"""By directory: the sizes of version 1 and version 2."""


def unlink(at: Path) -> None:
    os.unlink(at / "file")


def unlink_other_name(at: Path) -> None:
    os.unlink(at / "other")


def unlink_all_names(at: Path) -> None:
    os.unlink(at / "other")
    os.unlink(at / "file")


def rename(at: Path) -> None:
    os.rename(at / "file", at / "renamed")


def replace(at: Path) -> None:
    os.rename(at / "victim", at / "file")


def link(at: Path) -> None:
    os.link(at / "file", at / "linked")


def version(number: int, size: int) -> bytes:
    """Each page of each version has other bytes."""
    return b"".join((b"%d,%04d;" % (number, page)) * (PAGE // 7 + 1) for page in range(-(-size // PAGE)))[:size]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    for name, (size, _) in FILES.items():
        (root / name).mkdir(parents=True)
        (root / name / "file").write_bytes(version(1, size))
        (root / name / "victim").write_bytes(b"v")
    settle()
    return root


def add_other_names(root: Path) -> None:
    for name in FILES:
        os.link(root / name / "file", root / name / "other")
    settle()


def rewrite(root: Path) -> None:
    """In place, as another node does."""
    for name, (_, size) in FILES.items():
        with open(root / name / "file", "r+b") as file:
            file.truncate(0)
            file.write(version(2, size))


def check(fd: int, size: int) -> None:
    """Each size and each page that an open file shows is of version 1, or the call fails with ESTALE."""
    old = version(1, size)
    try:
        assert os.fstat(fd).st_size == size
    except OSError as error:
        assert error.errno == errno.ESTALE
    pages = range(0, size, max(PAGE, size // 20 // PAGE * PAGE))
    for offset in [*pages, size // PAGE * PAGE, size, size + PAGE, 2 * size]:
        try:
            assert os.pread(fd, PAGE, offset) == old[offset : offset + PAGE], offset
        except OSError as error:
            assert error.errno == errno.ESTALE


def check_mapping(mapping: mmap.mmap, size: int) -> None:
    """As `check`, in a child, because a page that cannot be read kills the reader with SIGBUS."""
    child = os.fork()
    if not child:
        signal.signal(signal.SIGBUS, signal.SIG_DFL)
        os._exit(0 if mapping[:size] == version(1, size) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) in (0, -signal.SIGBUS)


@pytest.mark.parametrize("change", [unlink, unlink_other_name, unlink_all_names, rename, replace, link])
@pytest.mark.parametrize(
    ("share", "arguments"),
    [(0.0, ()), (0.1, ()), (1.0, ()), (0.1, ("--cache", "metadata"))],
    ids=["unread", "part", "whole", "metadata"],
)
def test_open_file_keeps_its_version_when_its_names_change(
    mount: MakeMount, tree: Path, change: Callable[[Path], None], share: float, arguments: tuple[str, ...]
) -> None:
    """Also when the kernel has dropped pages and attributes, and when a new daemon serves the mount."""
    if change in (unlink_other_name, unlink_all_names):
        add_other_names(tree)
    m = mount(tree, *arguments)
    with ExitStack() as stack:
        opened = []
        for name, (size, _) in FILES.items():
            fd = stack.enter_context(open(m.path / name / "file", "rb", buffering=0)).fileno()
            mapping = stack.enter_context(mmap.mmap(fd, size, prot=mmap.PROT_READ))
            assert os.pread(fd, int(size * share), 0) == version(1, size)[: int(size * share)]
            if (m.path / name / "other").exists():
                os.stat(m.path / name / "other")
            opened.append((fd, size, mapping))
        m.flush()
        rewrite(tree)
        for name in FILES:
            change(m.path / name)
        for fd, size, mapping in opened:
            check(fd, size)
            check_mapping(mapping, size)
            mapping.close()
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            check(fd, size)
        m.drop_caches()
        for fd, size, _ in opened:
            check(fd, size)
        if not m.no_fastpath:
            cachefs("restart", m.path)
        for fd, size, _ in opened:
            check(fd, size)


def open_files(m: Mount, stack: ExitStack) -> list[tuple[int, str]]:
    """Open each file and read its first page. Returns (descriptor, name in FILES)."""
    opened = []
    for name in FILES:
        fd = stack.enter_context(open(m.path / name / "file", "rb", buffering=0)).fileno()
        assert os.pread(fd, PAGE, 0) == version(1, PAGE)
        opened.append((fd, name))
    return opened


def open_and_rewrite(m: Mount, tree: Path, stack: ExitStack) -> list[tuple[int, int]]:
    """Open each file and read its first page; then another node rewrites them. Returns (descriptor, size)."""
    opened = [(fd, FILES[name][0]) for fd, name in open_files(m, stack)]
    m.flush()
    rewrite(tree)
    return opened


def open_for_writing(fd: int) -> None:
    os.close(os.open(f"/proc/self/fd/{fd}", os.O_RDWR))


def truncate(fd: int) -> None:
    os.truncate(f"/proc/self/fd/{fd}", 10)


@pytest.mark.parametrize(
    "change",
    [
        open_for_writing,
        truncate,
        lambda fd: os.chmod(fd, 0o600),
        lambda fd: os.utime(fd),
        lambda fd: os.setxattr(fd, "user.a", b"b"),
    ],
    ids=["open", "truncate", "chmod", "utimens", "setxattr"],
)
@pytest.mark.parametrize("dropped", [False, True], ids=["", "dropped"])
def test_open_file_keeps_its_version_when_it_is_changed_by_a_descriptor(
    mount: MakeMount, tree: Path, change: Callable[[int], None], dropped: bool
) -> None:
    """Such a change reaches the file by its inode number, without a look-up of its name."""
    m = mount(tree)
    with ExitStack() as stack:
        opened = open_and_rewrite(m, tree, stack)
        for name in FILES if dropped else ():
            rename(m.path / name)
        for fd, size in opened:
            try:
                change(fd)
            except OSError as error:
                assert error.errno in (errno.EPERM, errno.ESTALE)
            check(fd, size)
        m.drop_caches()
        for fd, size in opened:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            check(fd, size)


@pytest.mark.parametrize("arguments", [(), ("--read-only",)], ids=["", "read-only"])
def test_open_file_keeps_its_version_after_invalidate(mount: MakeMount, tree: Path, arguments: tuple[str, ...]) -> None:
    m = mount(tree, *arguments)
    with ExitStack() as stack:
        opened = open_and_rewrite(m, tree, stack)
        cachefs("invalidate", m.path)
        for fd, size in opened:
            check(fd, size)


LIMITED = ("--metadata-limit", "1", "--metadata-retention", "fifo")


@pytest.mark.parametrize("mode", [(), ("--read-only",)], ids=["", "read-only"])
@pytest.mark.parametrize("limit", [(), LIMITED], ids=["invalidate", "limit"])
def test_open_file_keeps_its_version_when_it_is_rewritten_after_it_was_dropped(
    mount: MakeMount, tree: Path, mode: tuple[str, ...], limit: tuple[str, ...]
) -> None:
    """It is read between the two, so that it is compared while it is still the same."""
    m = mount(tree, *mode, *limit)
    with ExitStack() as stack:
        files = open_files(m, stack)
        if not limit:
            cachefs("invalidate", m.path)
        for fd, _ in files:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            assert os.pread(fd, PAGE, 2 * PAGE) == version(1, 3 * PAGE)[2 * PAGE :]
        rewrite(tree)
        for fd, name in files:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            check(fd, FILES[name][0])


@pytest.mark.fastpath
@pytest.mark.parametrize("limit", [(), LIMITED], ids=["invalidate", "limit"])
@pytest.mark.parametrize("again", [True, False], ids=["opened by the daemon", "opened by the fast path"])
@pytest.mark.parametrize("late", [False, True], ids=["", "rewritten after the restart"])
def test_open_file_keeps_its_version_when_the_daemon_is_replaced_after_it_was_dropped(
    mount: MakeMount, tree: Path, limit: tuple[str, ...], again: bool, late: bool
) -> None:
    """Before: the next daemon took the handle of a file that is not pinned for one of a mutable file."""
    m = mount(tree, *limit)
    if again:  # the fast path leaves to the daemon an open of a file that was immutable and is not pinned
        for name in FILES:
            (m.path / name / "file").read_bytes()
            if not limit:
                wait_for(lambda name=name: Client(m.path).info(m.path / name / "file")["state"], "immutable".__eq__)
        cachefs("invalidate", m.path)
    with ExitStack() as stack:
        opened = [(fd, FILES[name][0]) for fd, name in open_files(m, stack)]
        if not limit:
            cachefs("invalidate", m.path)
        if not late:
            rewrite(tree)
        cachefs("restart", m.path)
        if late:
            rewrite(tree)
        for fd, size in opened:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            assert read_or_stale(fd, 2 * PAGE) in (b"1", None)  # before fstat, which compares the name
            check(fd, size)


@pytest.mark.parametrize("change", [unlink, replace])
def test_open_file_is_read_on_after_it_was_dropped_and_removed(
    mount: MakeMount, tree: Path, change: Callable[[Path], None]
) -> None:
    """As on a local disk. Before: ESTALE, where the fast path had opened it."""
    m = mount(tree)
    with ExitStack() as stack:
        files = open_files(m, stack)
        cachefs("invalidate", m.path)
        for fd, name in files:
            change(m.path / name)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            assert os.pread(fd, FILES[name][0], 0) == version(1, FILES[name][0])


def test_file_that_another_node_rewrote_can_be_opened_for_writing_by_its_name(mount: MakeMount, tree: Path) -> None:
    """The open reaches the new version, also while the kernel may still have the dropped name."""
    m = mount(tree)
    for name, (size, new_size) in FILES.items():
        with open(m.path / name / "file", "rb", buffering=0) as opened:
            assert opened.read(PAGE) == version(1, size)[:PAGE]
            (tree / name / "file").write_bytes(version(2, new_size))
            link(m.path / name)
            with open(m.path / name / "file", "r+b") as again:
                assert again.read() == version(2, new_size)
            check(opened.fileno(), size)


@pytest.mark.parametrize(
    "arguments", [(), ("--read-only",), ("--read-only", "--no-fastpath"), ("--read-only", "--cache", "metadata")]
)
@pytest.mark.parametrize("dropped", [False, True], ids=["", "dropped"])
def test_open_file_whose_name_was_found_missing_keeps_its_version(
    mount: MakeMount, tmp_path: Path, arguments: tuple[str, ...], dropped: bool
) -> None:
    """The daemon reads by a descriptor, because the directory was moved before the first read."""
    source, size = tmp_path / "source", 16 << 20
    (source / "a").mkdir(parents=True)
    m = mount(source, *arguments, "--minimum-age", "1.5")
    (source / "a/file").write_bytes(b"1" * size)
    with open(m.path / "a/file", "rb", buffering=0) as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        (source / "a").rename(source / "b")
        (source / "a").mkdir()
        assert os.pread(opened.fileno(), 1, 0) == b"1"
        if dropped:
            write_twos(source / "b/file", size)
            assert read_or_stale(opened.fileno(), 1 << 20) in (b"1", None)
        while (m.path / "a/file").exists():  # for as long as the record is valid
            time.sleep(0.05)
        if not dropped:
            write_twos(source / "b/file", size)
        for offset in range(5 << 20, size, 4 << 20):
            assert read_or_stale(opened.fileno(), offset) in (b"1", None)


def write_twos(path: Path, size: int) -> None:
    with open(path, "r+b") as file:
        file.write(b"2" * size)


def read_or_stale(fd: int, offset: int) -> bytes | None:
    """One byte; None for ESTALE."""
    try:
        return os.pread(fd, 1, offset)
    except OSError as error:
        assert error.errno == errno.ESTALE
        return None

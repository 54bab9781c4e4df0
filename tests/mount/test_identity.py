"""A path is a hint: the opened object is the one that was looked up, or the caller gets an error (hazard 23)."""

import errno
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from cachefs.source.directories import MAX_KEPT
from tests.conftest import Mount, cachefs, raises_errno, settle, wait_for

MakeMount = Callable[..., Mount]

OLD, NEW = b"old " * 3000, b"the new one " * 5
EVERY_MODE = pytest.mark.parametrize("mode", ["pinned", "mutable", "unpinned", "written"])


def swap(first: Path, second: Path) -> None:
    """Exchange two names at the source."""
    between = first.with_name("between")
    first.rename(between)
    second.rename(first)
    between.rename(second)


@pytest.mark.promise("CH-2")
@pytest.mark.parametrize("cache", ["none", "metadata", "full"])
def test_a1_a_directory_that_was_renamed_and_a_new_one_of_its_name(mount: MakeMount, source: Path, cache: str) -> None:
    (source / "current").mkdir()
    (source / "current/data").write_bytes(OLD)
    m = mount(source, "--cache", cache)
    assert (m.path / "current/data").stat().st_size == len(OLD)
    m.drop_caches()
    (source / "current").rename(source / "previous")
    (source / "current").mkdir()
    (source / "current/data").write_bytes(NEW)
    assert (m.path / "previous/data").read_bytes() == OLD
    wait_for((m.path / "current/data").read_bytes, lambda content: content == NEW)
    (m.path / "previous/made").write_bytes(b"made")
    assert (source / "previous/made").read_bytes() == b"made"
    assert not (source / "current/made").exists()
    (m.path / "previous/data").unlink()
    assert not (source / "previous/data").exists() and (source / "current/data").exists()


@pytest.mark.promise("CH-2")
def test_a1_a_directory_that_reuses_an_inode_number(mount: MakeMount, disk: Path) -> None:
    (disk / "first").mkdir()
    number = (disk / "first").stat().st_ino
    m = mount(disk)
    assert (m.path / "first").is_dir()
    m.drop_caches()
    (disk / "first").rmdir()
    second = m.path / "second"
    (disk / "second").mkdir()
    assert (disk / "second").stat().st_ino == number
    (disk / "first").mkdir()
    (second / "made").write_bytes(b"made")
    assert os.listdir(disk / "second") == ["made"] and not os.listdir(disk / "first")
    (second / "below").mkdir()
    (second / "below").rmdir()
    (second / "made").unlink()
    second.rmdir()
    assert not (disk / "second").exists() and (disk / "first").exists()


def test_a_directory_that_is_open_while_it_is_renamed_keeps_its_children(mount: MakeMount, source: Path) -> None:
    for name in ("first", "other"):
        (source / name).mkdir()
        (source / name / "data").write_bytes(name.encode())
    m = mount(source)
    fd = os.open(m.path / "first", os.O_RDONLY | os.O_DIRECTORY)
    try:
        assert os.stat("data", dir_fd=fd).st_size == 5
        swap(source / "first", source / "other")
        data = os.open("data", os.O_RDONLY, dir_fd=fd)
        assert os.read(data, 10) == b"first"
        os.close(data)
        os.close(os.open("made", os.O_WRONLY | os.O_CREAT, dir_fd=fd))
        assert (source / "other/made").exists()
    finally:
        os.close(fd)


@pytest.mark.promise("CH-2")
@pytest.mark.parametrize("restart", [False, True])
def test_a_pinned_directory_that_was_swapped_is_never_mistaken(mount: MakeMount, source: Path, restart: bool) -> None:
    for directory in ("first", "other"):
        (source / directory).mkdir()
        for name in ("read", "unread"):
            (source / directory / name).write_bytes(f"{directory}/{name}".encode() * len(directory))
    settle()
    m = mount(source, "--read-only")
    sizes = {name: (m.path / "first" / name).stat().st_size for name in ("read", "unread")}
    expected = (m.path / "first/read").read_bytes()
    m.flush()
    swap(source / "first", source / "other")
    if restart:
        m.remount("--read-only", "--revalidate", "never")
        try:
            content = (m.path / "first/unread").read_bytes()
        except OSError as error:
            assert error.errno == errno.ESTALE
        else:
            assert content in (b"first/unread" * 5, b"other/unread" * 5)
            assert (m.path / "first/unread").stat().st_size == len(content)
    else:
        assert (m.path / "first/unread").read_bytes() == b"first/unread" * 5
        assert {name: (m.path / "first" / name).stat().st_size for name in sizes} == sizes
        assert (m.path / "first/read").read_bytes() == expected


def mount_in(mode: str, mount: MakeMount, source: Path, attr_timeout: str = "30") -> Mount:
    """A mount on which `file` is known, in one of the ways in which a file may be treated, with OLD in it."""
    if mode != "written":
        (source / "file").write_bytes(OLD)
        settle()
    options = {"mutable": ["--mutable", "file"], "unpinned": ["--cache", "none"]}.get(mode, [])
    m = mount(source, "--attr-timeout", attr_timeout, *options)
    if mode == "written":
        (m.path / "file").write_bytes(OLD)
    assert (m.path / "file").stat().st_size == len(OLD)
    return m


def replace(source: Path, content: bytes) -> None:
    (source / "new").write_bytes(content)
    (source / "new").rename(source / "file")


@pytest.mark.promise("CH-1")
@EVERY_MODE
@pytest.mark.parametrize("content", [NEW, OLD + NEW], ids=["shorter", "longer"])
def test_a4_a_file_replaced_between_look_up_and_open(mount: MakeMount, source: Path, mode: str, content: bytes) -> None:
    m = mount_in(mode, mount, source)
    replace(source, content)
    try:
        found = (m.path / "file").read_bytes()
    except OSError as error:
        # A pinned file is opened without a look at the source; its first read finds out.
        assert (mode, error.errno) == ("pinned", errno.ESTALE)
        found = (m.path / "file").read_bytes()
    assert found == content
    assert (m.path / "file").stat().st_size == len(content)


@pytest.mark.promise("CH-1")
@EVERY_MODE
def test_a4_a_file_replaced_while_it_is_open(mount: MakeMount, source: Path, mode: str) -> None:
    m = mount_in(mode, mount, source)
    with open(m.path / "file", "rb", buffering=0) as opened:
        assert os.pread(opened.fileno(), 4096, 0) == OLD[:4096]
        replace(source, NEW)
        m.drop_caches()
        try:
            found = os.pread(opened.fileno(), 1 << 20, 0)
        except OSError as error:
            assert error.errno == errno.ESTALE and mode == "pinned"
        else:
            assert found == OLD
    wait_for((m.path / "file").stat, lambda found: found.st_size in (len(OLD), len(NEW)))
    with open(m.path / "file", "rb", buffering=0) as opened:
        size = os.fstat(opened.fileno()).st_size
        found = opened.read(1 << 20)
        assert (size, found) in ((len(OLD), OLD), (len(NEW), NEW))
    if mode != "pinned":
        assert found == NEW


@pytest.mark.promise("CH-1")
@pytest.mark.parametrize("arguments", [("--attr-timeout", "0.5"), ("--read-only",), ("--cache-size", "1M")])
def test_a_large_file_replaced_while_it_is_read_is_not_taken_for_the_new_one(
    mount: MakeMount, source: Path, arguments: tuple[str, ...]
) -> None:
    """Its data come through a descriptor that is opened at the first miss. It must not be the new file's:
    attributes are read and changed through it, and the kernel would truncate its pages to the other file's size."""
    (source / "file").write_bytes(os.urandom(8 << 20))
    settle()
    m = mount(source, *arguments)
    with open(m.path / "file", "rb", buffering=0) as opened:
        before = os.fstat(opened.fileno())
        assert len(os.pread(opened.fileno(), 4096, 0)) == 4096
        replace(source, NEW)
        (source / "file").chmod(0o604)
        m.drop_caches()
        with suppress(OSError):
            assert len(os.pread(opened.fileno(), 4096, 4 << 20)) == 4096
        time.sleep(0.6)  # what the kernel knows of it has expired
        with suppress(OSError):
            now = os.fstat(opened.fileno())
            assert (now.st_size, now.st_mode) == (before.st_size, before.st_mode)
        with suppress(OSError):
            os.fchmod(opened.fileno(), 0o640)
        assert (source / "file").stat().st_mode & 0o777 == 0o604
        with suppress(OSError):
            assert len(os.pread(opened.fileno(), 4096, 4 << 20)) == 4096


@pytest.mark.promise("CH-1")
@pytest.mark.parametrize("mode", ["mutable", "unpinned", "written"])
def test_a4_a_file_replaced_before_it_is_opened_for_writing(mount: MakeMount, source: Path, mode: str) -> None:
    m = mount_in(mode, mount, source)
    os.link(source / "file", source / "kept")
    replace(source, NEW)
    with open(m.path / "file", "r+b", buffering=0) as opened:
        opened.write(b"THE")
        assert os.fstat(opened.fileno()).st_size == len(NEW)
    assert (source / "file").read_bytes() == b"THE" + NEW[3:]
    replace(source, NEW)
    (m.path / "file").write_bytes(b"truncated")  # O_TRUNC
    assert (source / "file").read_bytes() == b"truncated"
    replace(source, NEW)
    os.truncate(m.path / "file", 3)
    assert (source / "file").read_bytes() == NEW[:3]
    assert (source / "kept").read_bytes() == OLD


@pytest.mark.promise("CH-1")
@pytest.mark.parametrize("mode", ["mutable", "unpinned", "written"])
def test_a4_attributes_of_a_file_that_was_replaced(mount: MakeMount, source: Path, mode: str) -> None:
    m = mount_in(mode, mount, source)
    os.link(source / "file", source / "kept")
    os.setxattr(source / "kept", "user.colour", b"old")
    replace(source, NEW)
    os.setxattr(source / "file", "user.colour", b"new")
    assert os.getxattr(m.path / "file", "user.colour") == b"new"
    replace(source, NEW)
    (m.path / "file").chmod(0o600)
    assert (source / "file").stat().st_mode & 0o777 == 0o600
    replace(source, NEW)
    os.setxattr(m.path / "file", "user.colour", b"set")
    assert os.getxattr(source / "file", "user.colour") == b"set"
    replace(source, NEW)
    os.link(m.path / "file", m.path / "linked")
    assert (source / "linked").read_bytes() == NEW
    assert (source / "kept").stat().st_mode & 0o777 != 0o600
    assert os.getxattr(source / "kept", "user.colour") == b"old"


def test_b5_a_fifo_under_a_name_that_is_believed_absent_blocks_nobody(mount: MakeMount, source: Path) -> None:
    m = mount(source, "--attr-timeout", "30", "--source-timeout", "5")
    names = [f"fifo{index}" for index in range(70)]  # more than there are slots
    for name in names:
        assert not (m.path / name).exists()
    for name in names:
        os.mkfifo(source / name)
    sent: list[str] = []

    def write(name: str) -> None:
        with open(os.open(m.path / name, os.O_WRONLY | os.O_CREAT), "wb", buffering=0) as fifo:
            fifo.write(name.encode())
        sent.append(name)

    threads = [threading.Thread(target=write, args=(name,), daemon=True) for name in names]
    for thread in threads:
        thread.start()
    for name in names:
        wait_for((m.path / name).exists, bool)  # the writer has made the kernel look again
    readers = {name: os.open(m.path / name, os.O_RDONLY | os.O_NONBLOCK) for name in names}
    (m.path / "d0/f00000").read_bytes()
    wait_for(lambda: len(sent), lambda count: count == len(names))
    for name, fd in readers.items():
        assert os.read(fd, 100) == name.encode()
        os.close(fd)
    assert "timeouts" not in m.status() or not m.status()["timeouts"]


@pytest.mark.promise("PE-2")
def test_a_symlink_under_a_name_that_is_believed_absent(mount: MakeMount, source: Path) -> None:
    m = mount(source, "--attr-timeout", "30")
    assert not (m.path / "new").exists()
    (source / "new").symlink_to("d0/f00000")
    (m.path / "new").write_bytes(b"through")
    assert (source / "d0/f00000").read_bytes() == b"through"


def test_a_fetch_is_one_open_one_read_and_one_fstat(mount: MakeMount, source: Path) -> None:
    m = mount(source, "--read-only")
    (m.path / "d0/f00000").read_bytes()
    (m.path / "d0/f00004").stat()
    before = m.flush()["source_ops"]
    (m.path / "d0/f00004").read_bytes()
    after = m.ops()
    assert {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)} == {
        "open": 1,
        "read": 1,
        "fstat": 1,
    }


def test_a_look_up_is_one_lstat(mount: MakeMount, source: Path) -> None:
    m = mount(source)
    (m.path / "d0/f00000").stat()
    before = m.ops()
    (m.path / "d0/f00004").stat()
    after = m.ops()
    assert {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)} == {
        "lstat": 1
    }


READER, WRITER = os.O_RDONLY, os.O_RDWR


@pytest.mark.promise("ON-1")
@pytest.mark.parametrize(
    ("mode", "removed", "access"),
    [
        ("mutable", "here", READER),
        ("mutable", "at the source", WRITER),
        ("unpinned", "here", WRITER),
        ("unpinned", "at the source", READER),
        ("written", "here", READER),
        ("written", "replaced here", WRITER),
        ("written", "replaced at the source", READER),
    ],
)
def test_d_an_open_file_without_a_name(mount: MakeMount, source: Path, mode: str, removed: str, access: int) -> None:
    m = mount_in(mode, mount, source, attr_timeout="1")
    fd = os.open(m.path / "file", access)
    os.setxattr(m.path / "file", "user.colour", b"blue")
    root = source if "source" in removed else m.path
    if "replaced" in removed:
        (root / "new").write_bytes(NEW)
        (root / "new").rename(root / "file")
        wait_for((m.path / "file").stat, lambda found: found.st_size == len(NEW))
    else:
        (root / "file").unlink()
        wait_for((m.path / "file").exists, lambda found: not found)
    os.fchmod(fd, 0o640)
    os.fchown(fd, 1234, 4321)
    os.utime(fd, ns=(5_000_000_000, 7_000_000_000))
    found = os.fstat(fd)
    assert (found.st_nlink, found.st_mode & 0o777, found.st_uid, found.st_gid) == (0, 0o640, 1234, 4321)
    assert (found.st_size, found.st_mtime_ns) == (len(OLD), 7_000_000_000)
    assert os.getxattr(fd, "user.colour") == b"blue"
    os.setxattr(fd, "user.colour", b"green")
    assert os.getxattr(fd, "user.colour") == b"green" and os.listxattr(fd) == ["user.colour"]
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    assert os.pread(again, 1 << 20, 0) == OLD == os.pread(fd, 1 << 20, 0)
    assert os.pwrite(again, b"more", len(OLD)) == 4
    os.truncate(f"/proc/self/fd/{fd}", 8)
    assert os.fstat(fd).st_size == 8
    os.close(again)
    os.close(fd)
    if "replaced" in removed:
        assert (source / "file").read_bytes() == NEW and (source / "file").stat().st_uid != 1234


@pytest.mark.promise("ON-1")
@pytest.mark.parametrize("replaced", [False, True])
def test_d_an_immutable_open_file_without_a_name(mount: MakeMount, source: Path, replaced: bool) -> None:
    m = mount_in("pinned", mount, source)
    with open(m.path / "file", "rb", buffering=0) as opened:
        assert opened.read(10) == OLD[:10]
        assert os.fstat(opened.fileno()).st_nlink == 1
        if replaced:
            (m.path / "d0/f00000").rename(m.path / "file")
        else:
            (m.path / "file").unlink()
        assert os.fstat(opened.fileno()).st_nlink == 0
        raises_errno(errno.EPERM, lambda: os.fchmod(opened.fileno(), 0o600))
        with open(f"/proc/self/fd/{opened.fileno()}", "rb") as again:
            assert again.read() == OLD
        m.drop_caches()
        assert os.pread(opened.fileno(), 1 << 20, 0) == OLD


@pytest.mark.promise("ON-1")
def test_d_links_that_remain_are_counted(mount: MakeMount, source: Path) -> None:
    (source / "one").write_bytes(OLD)
    os.link(source / "one", source / "two")
    m = mount(source, "--mutable", "*")
    with open(m.path / "one", "rb", buffering=0) as opened:
        (m.path / "one").unlink()
        assert os.fstat(opened.fileno()).st_nlink == 1
        os.fchmod(opened.fileno(), 0o640)
        assert (source / "two").stat().st_mode & 0o777 == 0o640
        (source / "two").unlink()
        wait_for(lambda: os.fstat(opened.fileno()).st_nlink, lambda count: count == 0)


@pytest.mark.promise("ON-1")
def test_d_an_open_directory_that_was_removed(mount: MakeMount, source: Path) -> None:
    (source / "gone").mkdir()
    m = mount(source)
    fd = os.open(m.path / "gone", os.O_RDONLY | os.O_DIRECTORY)
    try:
        assert os.fstat(fd).st_nlink == 2
        (m.path / "gone").rmdir()
        assert os.fstat(fd).st_nlink == 0
        assert os.listdir(fd) == []
        raises_errno(errno.ENOENT, lambda: os.open("new", os.O_WRONLY | os.O_CREAT, dir_fd=fd))
    finally:
        os.close(fd)


def test_a_removal_is_not_refused_for_the_sake_of_another_name(mount: MakeMount, source: Path) -> None:
    (source / "one").write_bytes(OLD)
    os.link(source / "one", source / "two")
    m = mount(source, "--attr-timeout", "30")
    assert (m.path / "one").stat().st_nlink == (m.path / "two").stat().st_nlink == 2
    (source / "two").unlink()
    (m.path / "one").unlink()
    assert not (source / "one").exists()


@pytest.mark.promise("ON-1")
def test_an_open_file_whose_name_is_gone_keeps_the_links_that_nobody_looked_up(mount: MakeMount, source: Path) -> None:
    (source / "one").write_bytes(OLD)
    os.link(source / "one", source / "two")
    os.link(source / "one", source / "three")
    m = mount(source)
    assert (m.path / "one").read_bytes() == OLD
    m.flush()
    with (m.path / "one").open("rb") as file:  # which the source does not know of
        (m.path / "one").unlink()
        assert os.fstat(file.fileno()).st_nlink == 2
        assert file.read() == OLD


@pytest.mark.promise("CH-2")
def test_a_pinned_directory_that_was_removed_and_made_again(mount: MakeMount, source: Path) -> None:
    (source / "runs").mkdir()
    (source / "runs/first").write_bytes(OLD)
    settle()
    m = mount(source, "--attr-timeout", "0.1")
    assert (m.path / "runs/first").read_bytes() == OLD  # it is pinned, and what leads to it
    assert not (m.path / "runs/second").exists()
    (source / "runs/first").unlink()
    (source / "runs").rmdir()
    (source / "runs").mkdir()
    (source / "runs/second").write_bytes(NEW)
    wait_for((m.path / "runs/second").exists, bool)
    assert (m.path / "runs/second").read_bytes() == NEW
    (m.path / "runs/made").write_bytes(b"made")
    assert (source / "runs/made").read_bytes() == b"made"
    assert sorted(os.listdir(m.path / "runs")) == ["made", "second"]


# --- several names of one file ---------------------------------------------------------------------------------------

KINDS = pytest.mark.parametrize(
    "mode",
    [["--read-only"], [], ["--mutable", "**"], ["--cache", "metadata"], ["--cache", "none"]],
    ids=["read-only", "read-write", "mutable", "metadata", "none"],
)


@pytest.mark.promise("PI-9")
@KINDS
def test_links_in_directories_that_were_exchanged(mount: MakeMount, source: Path, mode: list[str]) -> None:
    """A file is reached by a name whose path is known up to the root, not through a directory without a known name."""
    for number in range(3):
        (source / f"d0/linked{number}").write_bytes(OLD)
        (source / f"d1/linked{number}").hardlink_to(source / f"d0/linked{number}")
    for number in range(MAX_KEPT + 100):
        (source / f"others/{number}").mkdir(parents=True)
        (source / f"others/{number}/file").touch()
    settle()
    m = mount(source, *mode)
    paths = [m.path / f"d{directory}/linked{number}" for directory in range(2) for number in range(3)]
    for _ in range(3):
        for path in paths:
            assert path.read_bytes() == OLD
        swap(source / "d0", source / "d1")
        cachefs("invalidate", m.path)
        for number in range(MAX_KEPT + 100):  # no descriptor of the two is held any more
            (m.path / f"others/{number}/file").stat()


@pytest.mark.promise("PI-9")
@KINDS
def test_one_of_three_links_was_replaced(mount: MakeMount, source: Path, mode: list[str]) -> None:
    """After an invalidation, the look-up of one name proves nothing for the other names."""
    names = [f"d{directory}/linked" for directory in range(3)]
    (source / names[0]).write_bytes(OLD)
    for name in names[1:]:
        (source / name).hardlink_to(source / names[0])
    settle()
    m = mount(source, *mode)
    for replaced in names:
        for name in names:
            assert (m.path / name).read_bytes() == (source / name).read_bytes()
        (source / "new").write_bytes(NEW)
        (source / "new").replace(source / replaced)
        settle()
        cachefs("invalidate", m.path)
        for name in reversed(names) if replaced == names[0] else names:
            assert (m.path / name).read_bytes() == (source / name).read_bytes()
        (source / replaced).unlink()
        (source / replaced).hardlink_to(next(source / name for name in names if name != replaced))
        settle()
        cachefs("invalidate", m.path)

"""A disk of the cache that cannot read pages of the index: a mapping of them is a SIGBUS, not an error (hazard 63)."""

import fcntl
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.conftest import Mount, cachefs, contents, contents_of_damaged, make_files, settle, wait_for
from tests.sources.images import make_image, mount_image

MakeMount = Callable[..., Mount]
SHUTDOWN = 0x8004587D
"""XFS: from now on each access to the disk fails, and each page that is not in memory."""
FILES = 2500
"""Their index has several hundred kilobytes: a fault maps 16 pages at once, and what is mapped stays in memory."""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tree")
    make_files(root, FILES, sizes=(1, 100), directories=8)
    settle()
    return root


@pytest.fixture
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """An XFS of its own, or a filesystem of another kind."""
    kind = getattr(request, "param", "xfs")
    image, place, empty = tmp_path / "image", tmp_path / "disk", tmp_path / "empty"
    place.mkdir()
    empty.mkdir()
    make_image(kind, empty, image)
    mount_image(kind, image, place)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def make_unreadable(disk: Path, m: Mount) -> None:
    os.sync()  # the next write to a page that is mapped asks the disk
    fd = os.open(disk, os.O_RDONLY)
    fcntl.ioctl(fd, SHUTDOWN, b"\2\0\0\0")
    os.close(fd)
    m.drop_caches()


def processes(m: Mount) -> tuple[int, int | None]:
    status = m.status()
    return status["pid"], status["fastpath"] and status["fastpath"]["pid"]


@pytest.mark.promise("FA-16", "FA-25", "FA-34", "TE-2")
@pytest.mark.parametrize(
    "arguments",
    [[], ["--read-only"], ["--no-fastpath"], ["--no-fastpath", "--read-only"]],
    ids=["read-write", "read-only", "no-fastpath", "no-fastpath-read-only"],
)
def test_a_disk_that_cannot_read_the_index_kills_no_process(
    mount: MakeMount, tree: Path, disk: Path, tmp_path: Path, arguments: list[str]
) -> None:
    """What the index says of a file that it cannot read is read from the source."""
    m = mount(tree, *arguments, cache=disk / "cache")
    expected = contents(tree)
    assert contents(m.path) == expected
    m.flush()
    m.umount()
    m = mount(tree, *arguments, cache=disk / "cache")
    before = processes(m)
    make_unreadable(disk, m)
    assert contents(m.path) == expected
    status = wait_for(m.status, lambda status: status["index_problem"])
    assert processes(m) == before
    assert "restart" in status["index_problem"]
    if "--read-only" not in arguments:
        new = Path("d0") / tmp_path.name
        (m.path / new).write_bytes(b"new")
        assert (tree / new).read_bytes() == b"new"
    if not (m.no_fastpath or "--no-fastpath" in arguments):  # otherwise a mount cannot be restarted
        done = cachefs("restart", m.path, check=False)
        assert done.returncode == 1 and "Input/output error" in done.stderr and processes(m) == before
    m.umount()
    m.cache = tmp_path / "no log"  # it was on that disk


@pytest.mark.promise("FA-34", "FA-35", "FA-36", "TE-2")
@pytest.mark.parametrize(
    "arguments", [[], ["--read-only"], ["--no-fastpath"]], ids=["read-write", "read-only", "no-fastpath"]
)
def test_a_table_of_readers_that_is_cut_off_kills_no_process(
    mount: MakeMount, source: Path, arguments: list[str]
) -> None:
    """LMDB writes to it whenever it reads, through a mapping that ends early now: SIGBUS."""
    m = mount(source, *arguments)
    expected = contents(source)
    assert contents(m.path) == expected
    m.flush()
    before = processes(m)
    os.truncate(m.cache / "index/lock.mdb", 0)
    for _ in range(2):
        assert contents_of_damaged(m.path) == expected
        m.drop_caches()
    assert processes(m) == before
    assert "restart" in wait_for(m.status, lambda status: status["index_problem"])["index_problem"]
    if m.no_fastpath or "--no-fastpath" in arguments:  # such a mount cannot be restarted
        m.umount()
        m.start()
    else:
        cachefs("restart", m.path)
    assert contents(m.path) == expected and not m.status()["index_problem"]


def fill(disk: Path) -> None:
    for block_bytes in (1 << 20, 4096, 4096):
        with suppress(OSError), open(disk / f"junk{block_bytes}", "ab", buffering=0) as file:
            while file.write(bytes(block_bytes)):
                pass
        os.sync()


@pytest.mark.promise("FA-16", "FA-36", "TE-2")
@pytest.mark.parametrize("disk", ["btrfs"], indirect=True)
@pytest.mark.parametrize("arguments", [[], ["--read-only"], ["--no-fastpath"]], ids=lambda a: a[0] if a else "default")
def test_a_copy_on_write_disk_that_fills_up_kills_no_process(
    mount: MakeMount, source: Path, disk: Path, arguments: list[str]
) -> None:
    """A write to the mapping of lock.mdb needs a new block there: SIGBUS. A restart uses the cache again."""
    m = mount(source, *arguments, "--cache-size", "50M", cache=disk / "cache")
    expected = contents(source)
    assert contents(m.path) == expected
    m.flush()
    before = processes(m)
    fill(disk)
    for _ in range(2):
        assert contents(m.path) == expected
        m.drop_caches()
    assert processes(m) == before
    wait_for(m.status, lambda status: status["index_problem"])
    for junk in disk.glob("junk*"):
        junk.unlink()
    if m.no_fastpath or "--no-fastpath" in arguments:  # such a mount cannot be restarted
        m.umount()
        return
    os.sync()
    cachefs("restart", m.path)
    hits = m.status()["hits"]
    assert contents(m.path) == expected and not m.status()["index_problem"]
    m.drop_caches()
    assert contents(m.path) == expected and m.status()["hits"] >= hits + len(expected)


@pytest.mark.fastpath
@pytest.mark.promise("FA-25", "TE-2")
@pytest.mark.parametrize("disk", ["btrfs"], indirect=True)
@pytest.mark.parametrize("arguments", [[], ["--read-only"]], ids=["read-write", "read-only"])
def test_a_fast_path_can_be_started_on_a_full_copy_on_write_disk(
    mount: MakeMount, source: Path, disk: Path, arguments: list[str]
) -> None:
    """It registers in the table of readers while it opens the index: SIGBUS."""
    m = mount(source, *arguments, "--cache-size", "50M", cache=disk / "cache")
    expected = contents(source)
    assert contents(m.path) == expected
    m.flush()
    fill(disk)
    daemon = m.pid
    for _ in range(2):
        _, killed = processes(m)
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        assert contents(m.path) == expected
        wait_for(lambda: processes(m)[1], lambda pid, killed=killed: pid not in (None, killed))
        m.drop_caches()
        assert contents(m.path) == expected
    assert processes(m)[0] == daemon

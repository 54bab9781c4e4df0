"""Faults of the source, of the cache disk and of the machine: what readers see, and that the effect ends.

docs/FAULTS.md has them all in a table.
"""

import errno
import fcntl
import os
import resource
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.conftest import Mount, contents, make_files, settle, wait_for

MakeMount = Callable[..., Mount]
MIB = 1 << 20
FAST = pytest.mark.parametrize("arguments", [[], ["--no-fastpath"]], ids=["fastpath", "no-fastpath"])


def read(path: Path, offset: int, length: int) -> bytes:
    """Past the page cache of the mount."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # the kernel reads nothing ahead
        return os.pread(fd, length, offset)
    finally:
        os.close(fd)


# --- the source -------------------------------------------------------------------------------------------------------


@pytest.mark.promise("FA-1")
@FAST
@pytest.mark.parametrize(
    ("fault", "seen", "counted"),
    [
        ("read EIO", errno.EIO, True),
        ("read ESTALE", errno.ESTALE, True),
        ("read ENOTCONN", errno.ENOTCONN, True),
        ("open EIO", errno.EIO, True),
        ("open EMFILE", errno.EMFILE, False),  # the machine's
        ("open ENOENT", errno.ESTALE, False),  # the file is gone, and so are its cached data
    ],
)
def test_a_source_that_fails_in_the_middle_of_a_file(
    mount: MakeMount,
    source: Path,
    faulty: tuple[Path, Path],
    arguments: list[str],
    fault: str,
    seen: int,
    counted: bool,
) -> None:
    place, faults = faulty
    content = os.urandom(16 * MIB)
    (source / "large").write_bytes(content)
    settle()
    m = mount(place, "--read-only", "--reconnect-timeout", "1", *arguments)
    path = m.path / "large"
    assert read(path, 0, 4096) == content[:4096]
    m.flush()
    (faults / "fails").write_text(f"{fault} large")
    with pytest.raises(OSError) as caught:
        read(path, 12 * MIB, 4096)
    assert caught.value.errno == seen
    assert (m.status()["source_errors"] > 0) == counted
    if fault != "open ENOENT":
        assert read(path, 0, 4096) == content[:4096]  # what is cached
    assert (m.path / "d0" / "f00000").read_bytes() == (source / "d0" / "f00000").read_bytes()
    (faults / "fails").unlink()
    assert path.read_bytes() == content


@pytest.mark.promise("TE-1")
@FAST
def test_a_source_that_reads_short(
    mount: MakeMount, source: Path, faulty: tuple[Path, Path], arguments: list[str]
) -> None:
    place, faults = faulty
    content = os.urandom(16 * MIB)
    (source / "large").write_bytes(content)
    settle()
    m = mount(place, "--read-only", *arguments)
    path = m.path / "large"
    assert read(path, 0, 4096) == content[:4096]
    (faults / "short").write_text("large")
    with suppress(OSError):  # an error is acceptable, wrong bytes are not
        assert read(path, 12 * MIB, MIB) == content[12 * MIB : 13 * MIB]
    (faults / "short").unlink()
    m.drop_caches()
    assert path.read_bytes() == content


@pytest.mark.promise("FA-1")
@FAST
def test_a_write_that_the_source_refuses(
    mount: MakeMount, source: Path, faulty: tuple[Path, Path], arguments: list[str]
) -> None:
    place, faults = faulty
    m = mount(place, *arguments)
    fd = os.open(m.path / "written", os.O_RDWR | os.O_CREAT)
    os.write(fd, b"old")
    for name in ("EIO", "ENOSPC", "EDQUOT"):
        (faults / "fails").write_text(f"write {name} written")
        with pytest.raises(OSError) as caught:
            os.pwrite(fd, b"new", 0)
        assert caught.value.errno == getattr(errno, name)
    (faults / "fails").unlink()
    assert os.pwrite(fd, b"now", 0) == 3
    os.close(fd)
    assert (source / "written").read_bytes() == (m.path / "written").read_bytes() == b"now"


# --- the disk of the cache --------------------------------------------------------------------------------------------

SHUTDOWN = 0x8004587D
"""ext4: from now on each access to the disk fails (EIO)."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """An ext4 of its own."""
    image, place = tmp_path / "image", tmp_path / "disk"
    with image.open("wb") as file:
        file.truncate(192 * MIB)
    place.mkdir()
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    done = subprocess.run(["mount", "-o", "loop,errors=remount-ro", image, place], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"no loop devices: {done.stderr!r}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def shut_down(disk: Path) -> None:
    """Nothing more reaches the disk, not even dirty pages."""
    fd = os.open(disk, os.O_RDONLY)
    fcntl.ioctl(fd, SHUTDOWN, b"\2\0\0\0")
    os.close(fd)


def make_read_only(disk: Path) -> None:
    """As the kernel does when ext4 finds an error."""
    device = os.stat(disk).st_dev
    name = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve().name
    (Path("/sys/fs/ext4") / name / "trigger_fs_error").write_text("test")


@pytest.mark.promise("FA-16")
@FAST
def test_a_cache_disk_that_dies(
    mount: MakeMount, source: Path, disk: Path, tmp_path: Path, arguments: list[str]
) -> None:
    """Cached data are read from the source, and nothing is cached any more; no process dies."""
    m = mount(source, *arguments, cache=disk / "cache")
    half = [path for path in contents(source) if path.parts[0] in ("d0", "d1")]
    for path in half:
        assert (m.path / path).read_bytes() == (source / path).read_bytes()
    m.flush()
    pids = processes(m)
    shut_down(disk)
    for _ in range(3):
        m.drop_caches()
        assert contents(m.path) == contents(source)
    (m.path / "written").write_bytes(b"x")
    assert (source / "written").read_bytes() == b"x"
    wait_for(m.status, lambda status: status["errors"] > 0)
    assert processes(m) == pids
    m.umount()
    m.cache = tmp_path / "no log"  # it was on that disk


@pytest.mark.fastpath
@pytest.mark.promise("FA-16", "FA-25", "LC-2", "TE-2")
@pytest.mark.parametrize("fault", [make_read_only, shut_down])
@pytest.mark.parametrize("arguments", [[], ["--read-only"]], ids=["read-write", "read-only"])
def test_a_fast_path_that_is_killed_after_the_cache_disk_has_failed(
    mount: MakeMount, source: Path, disk: Path, tmp_path: Path, arguments: list[str], fault: Callable[[Path], None]
) -> None:
    """Another one starts, without a log and with a blob that it cannot write. Open files stay open."""
    m = mount(source, *arguments, cache=disk / "cache")
    cached, other = sorted(contents(source))[:2]
    assert (m.path / cached).read_bytes() == (source / cached).read_bytes()
    m.flush()
    with open(m.path / cached, "rb") as opened:
        fault(disk)
        before = processes(m)
        os.kill(before[1], signal.SIGKILL)
        m.drop_caches()
        assert (m.path / other).read_bytes() == (source / other).read_bytes()
        assert opened.read() == (source / cached).read_bytes()
        after = processes(m)
        assert after[0] == before[0] and after[1] not in (0, before[1])
        for _ in range(2):
            m.drop_caches()
            assert contents(m.path) == contents(source)
        hits = m.status()["hits"]
        m.drop_caches()
        assert (m.path / cached).read_bytes() == (source / cached).read_bytes()
        if fault is make_read_only:
            assert m.status()["hits"] > hits
        else:
            wait_for(m.status, lambda status: status["errors"] > 0)
        assert processes(m) == after
    m.umount()
    m.cache = tmp_path / "no log"  # it was on that disk


# --- the machine ------------------------------------------------------------------------------------------------------


def processes(m: Mount) -> list[int]:
    status = m.status()
    return [status["pid"], *([status["fastpath"]["pid"]] if status["fastpath"] else [])]


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.promise("TE-2")
@FAST
def test_a_process_that_gets_no_descriptors(mount: MakeMount, source: Path, arguments: list[str]) -> None:
    """Hits go on; calls that need a descriptor fail, and work again later. A killed fast path comes back."""
    m = mount(source, "--read-only", *arguments)
    cached = [path for path in contents(source) if path.parts[0] == "d0"]
    for path in cached:
        (m.path / path).read_bytes()
    m.flush()
    pids = processes(m)
    limits = [resource.prlimit(pid, resource.RLIMIT_NOFILE) for pid in pids]
    for pid, (_, most) in zip(pids, limits, strict=True):
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (descriptors(pid), most))
    m.drop_caches()
    for path in cached:
        assert (m.path / path).read_bytes() == (source / path).read_bytes()
    refused = 0
    for path in contents(source):
        try:
            assert (m.path / path).read_bytes() == (source / path).read_bytes()
        except OSError as error:
            assert error.errno in (errno.EMFILE, errno.ENFILE)
            refused += 1
    if len(pids) == 2:
        m.killed_fastpaths += 1
        os.kill(pids[1], signal.SIGKILL)
    for pid, limit in zip(pids, limits, strict=True):
        with suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, limit)
    m.drop_caches()
    assert contents(m.path) == contents(source)
    assert m.status()["pid"] == pids[0]


class Group:
    """A control group (version 1) of this test."""

    def __init__(self, kind: str, place: Path) -> None:
        self.path = Path("/sys/fs/cgroup") / kind / f"cachefs-{os.getpid()}-{place.name}"
        try:
            self.path.mkdir()
        except OSError as error:
            pytest.skip(f"no control group of {kind}: {error}")

    def __getitem__(self, name: str) -> int:
        return int((self.path / name).read_text())

    def __setitem__(self, name: str, value: int) -> None:
        (self.path / name).write_text(str(value))

    def take(self, pids: list[int]) -> None:
        for pid in pids:
            self["cgroup.procs"] = pid

    def end(self) -> None:
        """Remove the group. The kernel keeps one busy for a moment after its last process has left the list."""
        wait_for(self._removed, lambda removed: removed)

    def _removed(self) -> bool:
        above = self.path.parent / "cgroup.procs"
        for pid in (self.path / "cgroup.procs").read_text().split():
            with suppress(OSError):
                above.write_text(pid)
        try:
            self.path.rmdir()
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            return False
        return True


@contextmanager
def group(kind: str, place: Path) -> Iterator[Group]:
    made = Group(kind, place)
    try:
        yield made
    finally:
        made.end()


@pytest.mark.promise("TE-2")
@FAST
def test_a_machine_that_gives_no_threads_and_no_processes(
    mount: MakeMount, source: Path, tmp_path: Path, arguments: list[str]
) -> None:
    """Hits go on; misses wait, and are answered when there are threads. A killed fast path comes back."""
    m = mount(source, "--read-only", *arguments)
    paths = sorted(contents(source))
    (m.path / paths[0]).read_bytes()
    m.flush()
    pids = processes(m)
    with group("pids", tmp_path) as tasks:
        tasks.take(pids)
        tasks["pids.max"] = tasks["pids.current"]
        m.drop_caches()
        assert (m.path / paths[0]).read_bytes() == (source / paths[0]).read_bytes()
        if len(pids) == 2:
            m.killed_fastpaths += 1
            tasks["pids.max"] = 1
            os.kill(pids[1], signal.SIGKILL)
            wait_for(m.log, lambda log: "the fast path cannot be started" in log)
        (tasks.path / "pids.max").write_text("max")
        assert contents(m.path) == contents(source)
        assert m.status()["pid"] == pids[0]
        m.umount()


@pytest.mark.promise("TE-2")
@FAST
def test_a_limit_on_memory(mount: MakeMount, tmp_path: Path, arguments: list[str]) -> None:
    """A limit below the size of the data, page cache included: no process is killed."""
    source = tmp_path / "source"
    make_files(source, 60, (2 * MIB, 3 * MIB))
    settle()
    m = mount(source, "--read-only", *arguments)
    pids = processes(m)
    with group("memory", tmp_path) as memory:
        memory.take(pids)
        memory["memory.limit_in_bytes"] = 100 * MIB
        for _ in range(2):
            for path in sorted(source.rglob("f*")):
                there = m.path / path.relative_to(source)
                assert there.read_bytes() == path.read_bytes()
                fd = os.open(there, os.O_RDONLY)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)
        assert processes(m) == pids
        m.umount()

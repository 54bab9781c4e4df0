"""Changes are made with the caller's identity and capabilities, as on a local disk (B3, B4, D; hazards 19, 29, 36)."""

import errno
import mmap
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cachefs.system.syscalls import UTIME_NOW, UTIME_OMIT, utimensat
from tests.conftest import Mount, raises_errno
from tests.load import fork
from tests.users import IDS, as_user, open_to_all

MakeMount = Callable[..., Mount]
USER, OTHER = 1234, 4321
MODES = pytest.mark.parametrize("arguments", [(), ("--mutable", "**"), ("--cache", "none")], ids=lambda a: "-".join(a))


def a_file(path: Path, mode: int, owner: int = 0, content: bytes = b"content") -> Path:
    path.write_bytes(content)
    os.chown(path, owner, owner)
    path.chmod(mode)  # after chown, which clears set-user-ID bits
    return path


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def mounted(mount: MakeMount, source: Path, *arguments: object) -> Mount:
    m = mount(source, "--allow-other", *arguments)
    open_to_all(source)
    open_to_all(m.path)
    return m


# --- set-user-ID bits (B3) -------------------------------------------------------------------------------------------


def _write(path: Path) -> int:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, b"x")
        return os.fstat(fd).st_mode & 0o7777
    finally:
        os.close(fd)


@pytest.mark.promise("WR-2")
@MODES
def test_set_user_id_bits_clear_when_another_user_writes(
    mount: MakeMount, source: Path, arguments: tuple[str, ...]
) -> None:
    m = mounted(mount, source, *arguments)
    for before in (0o4777, 0o2777, 0o6777):
        name = f"d0/{before:o}"
        a_file(source / name, before)
        assert mode_of(m.path / name) == before
        assert as_user(USER, USER, [], lambda path=m.path / name: _write(path)) == 0o777
        assert mode_of(source / name) == 0o777
        assert mode_of(m.path / name) == 0o777


@pytest.mark.promise("WR-2")
def test_set_user_id_bits_clear_when_another_user_truncates(mount: MakeMount, source: Path) -> None:
    m = mounted(mount, source)

    def truncate(path: Path, by: str) -> None:
        if by == "truncate":
            os.truncate(path, 3)
            return
        fd = os.open(path, os.O_WRONLY | (os.O_TRUNC if by == "open" else 0))
        if by == "ftruncate":
            os.ftruncate(fd, 3)
        os.close(fd)

    for by in ("truncate", "ftruncate", "open"):
        a_file(source / by, 0o6777)
        assert as_user(USER, USER, [], lambda by=by: truncate(m.path / by, by)) is None
        assert mode_of(source / by) == 0o777
        assert mode_of(m.path / by) == 0o777


@pytest.mark.promise("WR-2")
def test_set_user_id_bits_stay_when_root_writes(mount: MakeMount, source: Path) -> None:
    m = mounted(mount, source)
    a_file(source / "d0/program", 0o4755, owner=USER)
    (m.path / "d0/program").write_bytes(b"new content")
    assert mode_of(source / "d0/program") == 0o4755


@pytest.mark.promise("PE-1")
def test_a_chmod_by_another_user_is_refused(mount: MakeMount, source: Path) -> None:
    m = mounted(mount, source)
    a_file(source / "d0/program", 0o4777)
    for mode in (0o777, 0o666):
        assert as_user(USER, USER, [], lambda mode=mode: (m.path / "d0/program").chmod(mode)) == errno.EPERM
    assert mode_of(source / "d0/program") == 0o4777


@pytest.mark.promise("WR-3")
@pytest.mark.fastpath
def test_a_file_that_was_open_when_the_daemon_died_is_written_by_its_opener(mount: MakeMount, source: Path) -> None:
    m = mounted(mount, source)
    a_file(source / "d0/program", 0o4777)
    opened, go_on = fork.Event(), fork.Event()

    def write() -> int:
        fd = os.open(m.path / "d0/program", os.O_WRONLY)
        opened.set()
        assert go_on.wait(60)
        written = os.write(fd, b"x")
        os.close(fd)
        return written

    def write_as_user() -> None:
        assert as_user(USER, USER, [], write) == 1

    # Another process: the commands that this one starts would close copies of the file, and wait for the next daemon.
    writer = fork.Process(target=write_as_user)
    writer.start()
    assert opened.wait(20)
    m.kill()
    m.start()
    go_on.set()
    writer.join(20)
    assert writer.exitcode == 0
    assert mode_of(source / "d0/program") == 0o777


# --- reserved blocks (B4) --------------------------------------------------------------------------------------------


@pytest.fixture
def reserved_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 16 MiB, 40 % of which is reserved for root."""
    image, place = tmp_path / "image", tmp_path / "disk"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(16 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-O", "^has_journal", "-m", "40", image], check=True)
    done = subprocess.run(["mount", "-o", "loop", image, place], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"no loop devices: {done.stderr!r}")
    place.chmod(0o777)
    yield place
    subprocess.run(["umount", "-l", place], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """It has room for 1 MiB, and writes what fits of a larger piece."""
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1M", "tmpfs", place], check=True)
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def fill(path: Path) -> int:
    """Write until there is no room; how many bytes that took."""
    piece, written = b"x" * (128 << 10), 0
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        while True:
            written += os.write(fd, piece)
    except OSError as error:
        assert error.errno == errno.ENOSPC, error
        return written
    finally:
        os.close(fd)


@pytest.mark.promise("WR-2")
def test_blocks_reserved_for_root_are_not_for_users(mount: MakeMount, reserved_disk: Path) -> None:
    m = mounted(mount, reserved_disk)
    directly = as_user(USER, USER, [], lambda: fill(reserved_disk / "direct"))
    (reserved_disk / "direct").unlink()
    os.sync()
    through = as_user(USER, USER, [], lambda: fill(m.path / "through"))
    assert isinstance(directly, int)
    assert isinstance(through, int)
    assert 4 << 20 < directly < 9 << 20, "the reservation does not work"
    assert abs(through - directly) <= 1 << 20
    assert (m.path / "through").stat().st_uid == USER


# --- O_DIRECT and times (D) ------------------------------------------------------------------------------------------


@pytest.mark.promise("WR-11")
@MODES
def test_direct_writes_and_reads_work(mount: MakeMount, source: Path, arguments: tuple[str, ...]) -> None:
    m = mounted(mount, source, *arguments)
    memory = mmap.mmap(-1, 8192)
    memory.write(os.urandom(8192))
    fd = os.open(m.path / "d0/direct", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    try:
        assert os.pwritev(fd, [memory], 0) == 8192
        assert os.pwritev(fd, [memory[:512]], 8192) == 512
    finally:
        os.close(fd)
    expected = memory[:] + memory[:512]
    assert (source / "d0/direct").read_bytes() == expected
    fd = os.open(m.path / "d0/direct", os.O_RDWR | os.O_DIRECT)  # an existing file
    try:
        again = mmap.mmap(-1, 8192)
        assert os.preadv(fd, [again], 0) == 8192
        assert again[:] == memory[:]
        assert os.pwrite(fd, b"unaligned", 3) == 9
    finally:
        os.close(fd)
    assert (source / "d0/direct").read_bytes() == expected[:3] + b"unaligned" + expected[12:]


@pytest.mark.promise("WR-11")
@pytest.mark.parametrize("taken_over", [False, True])
@MODES
def test_a_direct_write_that_fits_only_in_part_says_that_the_disk_is_full(
    mount: MakeMount, small_disk: Path, arguments: tuple[str, ...], taken_over: bool
) -> None:
    """Before: EIO, which says that the disk is broken. The kernel makes that of a smaller count than was asked for."""
    (small_disk / "filler").write_bytes(bytes((1 << 20) - (64 << 10)))
    m = mounted(mount, small_disk, *arguments)
    if taken_over and m.no_fastpath:
        pytest.skip("the mount ends with its daemon")
    memory = mmap.mmap(-1, 128 << 10)  # one request
    fd = os.open(m.path / "direct", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    try:
        if taken_over:
            m.kill()
            m.start()
        with pytest.raises(OSError, match="No space left"):
            os.pwritev(fd, [memory], 0)
        assert os.fstat(fd).st_size == (small_disk / "direct").stat().st_size
    finally:
        os.close(fd)
    (m.path / "direct").unlink()
    with (m.path / "buffered").open("wb", buffering=0) as file:
        written = file.write(memory)  # a smaller count, as on the disk
        assert 0 < written < len(memory)
    assert (small_disk / "buffered").stat().st_size == written


@pytest.mark.promise("WR-10")
@MODES
def test_touch_by_a_user_who_may_write_but_does_not_own(
    mount: MakeMount, source: Path, arguments: tuple[str, ...]
) -> None:
    m = mounted(mount, source, *arguments)
    path = m.path / "d0/shared"
    a_file(source / "d0/shared", 0o666)
    a_file(source / "d0/private", 0o644)
    os.utime(source / "d0/shared", (1, 1))
    assert as_user(USER, USER, [], lambda: os.utime(path)) is None
    found = (source / "d0/shared").stat()
    assert found.st_mtime > 1_000_000_000
    assert found.st_atime > 1_000_000_000
    assert path.stat().st_mtime_ns == found.st_mtime_ns
    assert as_user(USER, USER, [], lambda: os.utime(path, (1, 1))) == errno.EPERM
    assert as_user(USER, USER, [], lambda: os.utime(m.path / "d0/private")) == errno.EACCES
    assert (source / "d0/shared").stat().st_mtime_ns == found.st_mtime_ns


@pytest.mark.promise("WR-10")
@MODES
def test_a_time_that_is_left_out_is_left_alone(mount: MakeMount, source: Path, arguments: tuple[str, ...]) -> None:
    m = mounted(mount, source, *arguments)
    path = m.path / "d0/log"
    a_file(source / "d0/log", 0o644)
    path.stat()
    os.utime(source / "d0/log", (1_000, 2_000))  # another writer
    utimensat(os.fsencode(path), (3_000, 5), (0, UTIME_OMIT))
    found = (source / "d0/log").stat()
    assert (found.st_atime_ns, found.st_mtime_ns) == (3_000_000_000_005, 2_000 * 10**9)
    os.utime(source / "d0/log", (1_000, 2_000))
    utimensat(os.fsencode(path), (0, UTIME_OMIT), (4_000, 7))
    found = (source / "d0/log").stat()
    assert (found.st_atime_ns, found.st_mtime_ns) == (1_000 * 10**9, 4_000_000_000_007)
    utimensat(os.fsencode(path), (0, UTIME_OMIT), (0, UTIME_NOW))
    found = (source / "d0/log").stat()
    assert found.st_atime_ns == 1_000 * 10**9
    assert found.st_mtime > 1_000_000_000
    os.utime(path, ns=(-1_500_000_000, -1))  # before 1970
    found = (source / "d0/log").stat()
    assert (found.st_atime_ns, found.st_mtime_ns) == (-1_500_000_000, -1)


# --- everything else is made as the caller (hazard 19) ---------------------------------------------------------------


def test_a_directory_that_is_open_can_be_changed_although_its_parents_are_closed(
    mount: MakeMount, source: Path
) -> None:
    """As on a local disk: the path was checked when the directory was opened."""
    (source / "closed/mine").mkdir(parents=True)
    os.chown(source / "closed/mine", USER, USER)
    m = mounted(mount, source)
    directory = as_user(USER, USER, [], lambda: os.open(m.path / "closed/mine", os.O_RDONLY))
    assert isinstance(directory, int)
    (m.path / "closed").chmod(0o700)
    try:

        def change() -> None:
            os.close(os.open("file", os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=directory))
            os.mkdir("directory", 0o700, dir_fd=directory)
            os.rename("file", "renamed", src_dir_fd=directory, dst_dir_fd=directory)
            os.chmod("renamed", 0o640, dir_fd=directory)
            os.truncate(f"/proc/self/fd/{directory}/renamed", 5)

        assert as_user(USER, USER, [], change) is None
    finally:
        os.close(directory)
    found = (source / "closed/mine/renamed").stat()
    assert (found.st_uid, found.st_gid, found.st_mode & 0o777, found.st_size) == (USER, USER, 0o640, 5)
    assert (source / "closed/mine/directory").stat().st_uid == USER


@pytest.mark.promise("WR-1")
@MODES
def test_a_file_is_written_although_it_has_a_name_in_a_closed_directory(
    mount: MakeMount, source: Path, arguments: tuple[str, ...]
) -> None:
    """As in trees of hard links (`cp -al`). Before: EACCES since root had looked at that name."""
    changes: list[Callable[[Path], object]] = [
        lambda path: os.truncate(path, 3),
        lambda path: path.write_bytes(b"new"),
        lambda path: os.close(os.open(path, os.O_RDWR)),
        lambda path: path.open("ab").close(),
        lambda path: os.utime(path, ns=(1, 1)),
    ]
    for directory, mode in (("open", 0o755), ("closed", 0o700)):
        (source / directory).mkdir()
        (source / directory).chmod(mode)
    for number in range(len(changes)):
        a_file(source / f"open/{number}", 0o644, USER)
        os.link(source / f"open/{number}", source / f"closed/{number}")
    m = mounted(mount, source, *arguments)
    for number, change in enumerate(changes):
        for directory in ("open", "closed"):
            os.lstat(m.path / directory / str(number))
        result = as_user(USER, USER, [], lambda: change(m.path / f"open/{number}"))  # noqa: B023
        assert result not in (errno.EACCES, errno.EPERM, errno.ESTALE), number
    assert as_user(OTHER, OTHER, [], lambda: os.truncate(m.path / "open/0", 1)) == errno.EACCES
    assert (source / "open/0").read_bytes() == b"con"
    assert (source / "closed/1").read_bytes() == b"new"


@pytest.mark.promise("PE-3")
def test_a_file_made_read_only_at_the_source_is_not_written(mount: MakeMount, source: Path) -> None:
    """The source checks as well: attributes that the mount caches for a second grant nothing."""
    m = mounted(mount, source, "--attr-timeout", "60")
    a_file(source / "d0/open", 0o666)
    assert mode_of(m.path / "d0/open") == 0o666
    (source / "d0/open").chmod(0o600)
    assert as_user(USER, USER, [], lambda: os.truncate(m.path / "d0/open", 0)) == errno.EACCES
    raises_errno(errno.ENOENT, lambda: (m.path / "d0/absent").stat())
    assert (source / "d0/open").read_bytes() == b"content"


# --- user and group ids are unsigned ---------------------------------------------------------------------------------


@pytest.mark.promise("PE-25")
@pytest.mark.parametrize(
    "arguments", [(), ("--mutable", "**"), ("--no-fastpath",), ("--no-fastpath", "--mutable", "**")]
)
def test_every_id_may_read_and_change(mount: MakeMount, source: Path, arguments: tuple[str, ...]) -> None:
    m = mounted(mount, source, *arguments)
    (source / "d0").chmod(0o777)
    for number in IDS:
        a_file(source / f"d0/own{number}", 0o600, owner=number)

        def work(name: str, own: bool, number: int = number) -> object:
            made = m.path / "d0" / name
            made.write_bytes(b"made")
            made.chmod(0o640)
            made.with_name(f"{name}-directory").mkdir()
            made = made.rename(made.with_name(f"{name}-renamed"))
            content = (m.path / f"d0/own{number}").read_bytes() if own else b"content"
            return content, made.stat().st_uid, made.stat().st_gid

        for uid, gid in {(number, number), (number, 1), (1, number)}:
            name, own = f"n{number}-{uid}-{gid}", uid == number
            assert as_user(uid, gid, [], lambda name=name, own=own: work(name, own)) == (b"content", uid, gid)
        changed = f"d0/n{number}-1-{number}-renamed"
        os.chown(m.path / changed, number, 1)
        assert [((where / changed).stat().st_uid, (where / changed).stat().st_gid) for where in (source, m.path)] == [
            (number, 1)
        ] * 2

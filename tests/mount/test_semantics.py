"""docs/SEMANTICS.md, sentence by sentence, on a real mount."""

import ctypes
import errno
import mmap
import os
import random
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.conftest import Mount, cachefs, raises_errno, settle, small_disk, wait_for

MakeMount = Callable[..., Mount]


def read(path: Path) -> bytes:
    return path.read_bytes()


def fallocate(fd: int, length: int) -> None:
    """Without the fallback of posix_fallocate(3), which writes zeros."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(length)) != 0:
        raise OSError(ctypes.get_errno(), "fallocate")


# --- immutable once read ---------------------------------------------------------------------------------------------


@pytest.mark.promise("EX-10")
def test_a_file_is_mutable_until_it_is_read(mount: MakeMount, source: Path) -> None:
    m = mount(source)
    (m.path / "d0/f00000").write_bytes(b"new")
    assert (source / "d0/f00000").read_bytes() == b"new"


@pytest.mark.promise("IM-4")
@pytest.mark.parametrize(
    "change",
    [
        lambda p: os.open(p, os.O_WRONLY),
        lambda p: os.open(p, os.O_RDWR),
        lambda p: os.open(p, os.O_WRONLY | os.O_APPEND),
        lambda p: os.open(p, os.O_RDONLY | os.O_TRUNC),
        lambda p: os.truncate(p, 1),
        lambda p: os.chmod(p, 0o600),
        lambda p: os.chown(p, 1, 1),
        lambda p: os.utime(p, (1, 1)),
        lambda p: os.setxattr(p, "user.a", b"b"),
    ],
    ids=["open", "open-rdwr", "append", "o_trunc", "truncate", "chmod", "chown", "utimens", "setxattr"],
)
def test_once_read_it_is_like_chattr_i(mount: MakeMount, source: Path, change: Callable[[Path], object]) -> None:
    m = mount(source)
    path = m.path / "d0/f00000"
    before = read(path)
    raises_errno(errno.EPERM, lambda: change(path))
    assert read(path) == before == (source / "d0/f00000").read_bytes()


@pytest.mark.promise("IM-1")
def test_a_file_that_a_writer_has_open_stays_mutable(mount: MakeMount, source: Path) -> None:
    m = mount(source)
    path = m.path / "d0/f00000"
    with open(path, "r+b") as writer:
        read(path)
        writer.write(b"more")
    os.chmod(path, 0o640)
    assert read(path).startswith(b"more")


@pytest.mark.promise("IM-1", "EX-10")
def test_attributes_and_data_come_from_the_cache_from_then_on(mount: MakeMount, source: Path) -> None:
    m = mount(source)
    path = m.path / "d0/f00000"
    content, attributes = read(path), path.stat()
    (source / "d0/f00000").write_bytes(b"changed behind our back")
    assert read(path) == content
    assert path.stat().st_mtime_ns == attributes.st_mtime_ns


@pytest.mark.promise("IM-5")
def test_unlink_of_an_immutable_file_drops_the_entry_and_open_handles_keep_the_data(
    mount: MakeMount, source: Path
) -> None:
    m = mount(source)
    path = m.path / "d0/f00000"
    content = read(path)
    with open(path, "rb") as opened:
        path.unlink()
        assert not path.exists() and not (source / "d0/f00000").exists()
        assert opened.read() == content
        assert os.fstat(opened.fileno()).st_size == len(content)


@pytest.mark.promise("IM-5")
@pytest.mark.parametrize("level", ["metadata", "full"])
def test_an_unlinked_file_that_was_never_read_through_its_handle_keeps_its_data(
    mount: MakeMount, source: Path, level: str
) -> None:
    (source / "big").write_bytes(os.urandom(9 << 20))
    settle()
    content = (source / "big").read_bytes()
    m = mount(source, "--cache", level)
    with open(m.path / "big", "rb", buffering=0) as opened:
        (m.path / "big").unlink()
        assert b"".join(iter(lambda: opened.read(1 << 20), b"")) == content


@pytest.mark.promise("IM-5")
def test_rename_over_an_immutable_file(mount: MakeMount, source: Path) -> None:
    m = mount(source)
    path = m.path / "d0/f00000"
    old = read(path)
    (m.path / "new").write_bytes(b"the new one")
    with open(path, "rb") as opened:
        (m.path / "new").rename(path)
        assert read(path) == b"the new one" == (source / "d0/f00000").read_bytes()
        assert opened.read() == old


@pytest.mark.promise("IM-5")
def test_rename_of_an_immutable_file_keeps_what_is_cached(mount: MakeMount, source: Path) -> None:
    m = mount(source)
    content = read(m.path / "d0/f00000")
    m.flush()
    (m.path / "d0/f00000").rename(m.path / "d1/moved")
    before = m.ops()
    assert read(m.path / "d1/moved") == content
    assert not (m.path / "d0/f00000").exists()
    after = m.ops()
    assert (after["open"], after["read"]) == (before["open"], before["read"])
    raises_errno(errno.EPERM, lambda: os.truncate(m.path / "d1/moved", 0))


# --- exceptions ------------------------------------------------------------------------------------------------------


@pytest.mark.promise("EX-1")
def test_mutable_globs_are_never_immutable_and_never_cached(mount: MakeMount, source: Path) -> None:
    (source / "runs/1").mkdir(parents=True)
    (source / "runs/1/state").write_bytes(b"one")
    (source / "job.log").write_bytes(b"line 1\n")
    settle()
    m = mount(source, "--mutable", "*.log", "--mutable", "runs/**")
    assert read(m.path / "job.log") == b"line 1\n"
    assert read(m.path / "runs/1/state") == b"one"
    with open(m.path / "job.log", "ab") as log:
        log.write(b"line 2\n")
    (m.path / "runs/1/state").write_bytes(b"two")
    assert read(m.path / "job.log") == b"line 1\nline 2\n"
    assert read(m.path / "runs/1/state") == b"two"
    assert m.flush()["cached_files"] == 0


@pytest.mark.promise("PI-4")
def test_what_other_nodes_write_to_a_mutable_file_shows_up(mount: MakeMount, source: Path) -> None:
    (source / "job.log").write_bytes(b"line 1\n")
    m = mount(source, "--read-only", "--mutable", "*.log")
    assert read(m.path / "job.log") == b"line 1\n"
    with open(source / "job.log", "ab") as log:
        log.write(b"line 2\n")
    wait_for(lambda: read(m.path / "job.log"), lambda content: content == b"line 1\nline 2\n")


@pytest.mark.promise("EX-9", "EX-13")
def test_a_file_written_through_this_mount_stays_mutable_until_it_is_pinned(mount: MakeMount, source: Path) -> None:
    m = mount(source)
    path = m.path / "checkpoint"
    for generation in range(3):
        path.write_bytes(b"weights %d" % generation)
        assert read(path) == b"weights %d" % generation
    settle()
    m.remount()
    assert read(path) == b"weights 2"
    path.write_bytes(b"weights 3")
    m.remount()
    cachefs("pin", path)
    assert read(path) == b"weights 3"
    raises_errno(errno.EPERM, lambda: path.write_bytes(b"x"))
    m.remount()
    assert read(path) == b"weights 3"
    raises_errno(errno.EPERM, lambda: path.write_bytes(b"x"))


@pytest.mark.promise("EX-13")
@pytest.mark.parametrize("how", ["renamed", "truncated", "unpinned", "killed"])
def test_what_was_written_is_mutable_in_the_next_run(mount: MakeMount, source: Path, how: str) -> None:
    m = mount(source)
    path = m.path / "d0/f00000"
    if how == "renamed":  # as editors and torch.save wrappers do
        (m.path / "d0/new").write_bytes(b"new")
        (m.path / "d0/new").rename(path)
    elif how == "truncated":
        os.truncate(path, 3)
    elif how == "unpinned":
        read(path)
        raises_errno(errno.EPERM, lambda: path.write_bytes(b"x"))
        cachefs("unpin", path)
    else:
        path.write_bytes(b"new")
        m.flush()
        m.kill()
        m.start()  # takes over
    settle()
    m.remount()
    old = read(path)
    path.write_bytes(b"once more")
    assert read(path) == b"once more" != old
    assert os.getxattr(path, "user.cachefs.state") == b"written"


@pytest.mark.promise("EX-13")
@pytest.mark.parametrize("where", ["here", "at the source"])
def test_a_new_file_with_the_number_of_a_written_one_is_another_file(mount: MakeMount, disk: Path, where: str) -> None:
    """ext4 gives the inode numbers of removed files to the next ones, here of this test alone."""
    m = mount(disk)
    written = [f"checkpoint{each}" for each in range(50)]
    for name in written:
        (m.path / name).write_bytes(b"weights")
    numbers = {(disk / name).stat().st_ino for name in written}
    m.flush()
    for name in written:
        ((m.path if where == "here" else disk) / name).unlink()
    made = [f"made{each}" for each in range(200)]
    for name in made:
        (disk / name).write_bytes(b"data")
    settle()
    m.remount()
    for name in made:
        read(m.path / name)
        raises_errno(errno.EPERM, lambda name=name: (m.path / name).write_bytes(b"x"))
    assert numbers & {(disk / name).stat().st_ino for name in made}


@pytest.mark.promise("EX-13")
def test_on_a_read_only_mount_a_written_file_is_immutable(mount: MakeMount, source: Path) -> None:
    m = mount(source)
    (m.path / "d0/checkpoint").write_bytes(b"weights")
    settle()
    m.remount("--read-only")
    path = m.path / "d0/checkpoint"
    assert read(path) == b"weights" and os.getxattr(path, "user.cachefs.state") == b"immutable"
    m.flush()
    m.drop_caches()
    before = m.ops()
    assert read(path) == b"weights" and m.ops() == before


# --- what is pinned --------------------------------------------------------------------------------------------------


@pytest.mark.promise("PI-1")
def test_read_write_mounts_see_new_names_of_other_nodes(mount: MakeMount, source: Path) -> None:
    m = mount(source, "--attr-timeout", "0.2")
    read(m.path / "d0/f00000")
    flag = m.path / "d0/flag"
    assert not flag.exists() and "flag" not in os.listdir(m.path / "d0")
    (source / "d0/flag").write_bytes(b"go")
    wait_for(flag.exists, bool, 5)
    wait_for(lambda: os.listdir(m.path / "d0"), lambda names: "flag" in names, 5)
    (source / "d0/flag").unlink()
    wait_for(flag.exists, lambda found: not found, 5)


@pytest.mark.promise("PI-2")
def test_read_only_mounts_pin_names_listings_and_absences(mount: MakeMount, source: Path) -> None:
    m = mount(source, "--read-only")
    names = sorted(os.listdir(m.path / "d0"))
    assert not (m.path / "d0/late").exists()
    (source / "d0/late").write_bytes(b"x")
    (source / "d0/f00000").unlink()
    before = m.ops()
    assert sorted(os.listdir(m.path / "d0")) == names
    assert not (m.path / "d0/late").exists()
    assert (m.path / "d0/f00000").stat().st_size > 0
    assert m.ops() == before


@pytest.mark.promise("PI-2")
def test_read_only_mounts_pin_symlinks_and_xattrs(mount: MakeMount, source: Path) -> None:
    os.setxattr(source / "d0/f00000", "user.label", b"cat")
    settle()
    m = mount(source, "--read-only")
    path = m.path / "d0/f00000"

    def look() -> tuple[object, ...]:
        return os.readlink(m.path / "link"), os.getxattr(path, "user.label"), os.listxattr(path)

    first = look()
    raises_errno(errno.ENODATA, lambda: os.getxattr(path, "user.none"))
    before = m.ops()
    m.drop_caches()
    assert look() == first == ("d0/f00000", b"cat", ["user.label"])
    raises_errno(errno.ENODATA, lambda: os.getxattr(path, "user.none"))
    assert m.ops() == before


@pytest.mark.promise("PI-3")
def test_read_only_mounts_refuse_writes(mount: MakeMount, source: Path) -> None:
    m = mount(source, "--read-only")
    for change in (
        lambda: (m.path / "new").write_bytes(b""),
        lambda: (m.path / "d0/f00000").unlink(),
        lambda: (m.path / "new").mkdir(),
        lambda: os.chmod(m.path / "d0/f00000", 0o600),
        lambda: (m.path / "d0/f00000").rename(m.path / "x"),
        lambda: os.truncate(m.path / "d0/f00000", 0),
    ):
        raises_errno(errno.EROFS, change)


@pytest.mark.promise("PI-18")
def test_the_size_of_a_read_only_mount_is_what_it_was_when_it_was_mounted(mount: MakeMount, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "16M") as disk:
        m = mount(disk, "--read-only")
        before = os.statvfs(disk).f_bfree
        (disk / "new").write_bytes(bytes(8 << 20))
        assert os.statvfs(disk).f_bfree < before
        assert os.statvfs(m.path).f_bfree == before
        m.umount()
        m.start()
        assert os.statvfs(m.path).f_bfree == os.statvfs(disk).f_bfree
        m.umount()


@pytest.mark.promise("NP-3")
@pytest.mark.parametrize("mode", [["--read-only"], []], ids=["read-only", "read-write"])
def test_the_time_of_access_is_that_of_the_look_up(mount: MakeMount, source: Path, mode: list[str]) -> None:
    m = mount(source, *mode)
    path = m.path / "d0/f00000"
    read(path)
    before = path.stat().st_atime_ns
    os.utime(source / "d0/f00000", ns=(10**18, (source / "d0/f00000").stat().st_mtime_ns))
    m.drop_caches()
    read(path)
    assert path.stat().st_atime_ns == before


# --- external modifications -----------------------------------------------------------------------------------------


@pytest.mark.promise("IM-2", "CH-10")
@pytest.mark.parametrize("mode", [["--read-only"], []], ids=["read-only", "read-write"])
def test_a_change_before_the_fetch_is_estale_and_the_next_open_sees_the_new_version_whole(
    mount: MakeMount, source: Path, mode: list[str]
) -> None:
    (source / "big").write_bytes(b"a" * (9 << 20))
    settle()
    m = mount(source, *mode)
    with open(m.path / "big", "rb", buffering=0) as opened:
        assert os.pread(opened.fileno(), 10, 0) == b"a" * 10
        (source / "big").write_bytes(b"b" * (9 << 20))
        raises_errno(errno.ESTALE, lambda: os.pread(opened.fileno(), 10, 8 << 20))
        assert read(m.path / "big") == b"b" * (9 << 20)
        raises_errno(errno.ESTALE, lambda: os.pread(opened.fileno(), 10, 6 << 20))
    assert m.status()["stale_reads"] >= 1


def test_a_file_that_was_replaced_before_a_restart_stays_listed(mount: MakeMount, source: Path) -> None:
    m = mount(source, "--read-only")
    names = sorted(os.listdir(m.path / "d0"))
    before = (m.path / "d0/f00000").stat().st_mtime_ns
    m.umount()
    # In place: the directory does not change, so its pinned listing still counts; the inode is another one.
    parent = (source / "d0").stat()
    (source / "other").write_bytes(b"new")
    os.rename(source / "other", source / "d0/f00000")
    os.utime(source / "d0", ns=(parent.st_atime_ns, parent.st_mtime_ns))
    settle()
    m.start()
    assert sorted(os.listdir(m.path / "d0")) == names
    assert (m.path / "d0/f00000").stat().st_mtime_ns != before
    assert read(m.path / "d0/f00000") == b"new"
    assert sorted(os.listdir(m.path / "d0")) == names


@pytest.mark.promise("CH-9")
def test_renames_by_other_nodes_lead_nobody_astray(mount: MakeMount, source: Path) -> None:
    m = mount(source, "--attr-timeout", "0.1")
    content = (source / "d3/f00003").read_bytes()
    assert (m.path / "d3/f00003").stat().st_size == len(content)
    (source / "d3").rename(source / "a-new-name")
    (source / "a-new-name/f00003").rename(source / "a-new-name/z")
    wait_for((m.path / "a-new-name/z").exists, bool, 5)
    assert read(m.path / "a-new-name/z") == content
    wait_for((m.path / "d3").exists, lambda found: not found, 5)
    assert m.status()["stale_reads"] == 0


@pytest.mark.promise("CH-17")
def test_a_changed_small_file_is_seen_whole_after_a_restart(mount: MakeMount, source: Path) -> None:
    m = mount(source, "--read-only")
    old = read(m.path / "d0/f00000")
    (source / "d0/f00000").write_bytes(b"x" * len(old))
    settle()
    m.remount("--read-only")
    assert read(m.path / "d0/f00000") == b"x" * len(old)


# --- cache levels ----------------------------------------------------------------------------------------------------


@pytest.mark.promise("CL-3")
def test_cache_none_passes_everything_through(mount: MakeMount, source: Path) -> None:
    m = mount(source, "--cache", "none", "--attr-timeout", "0")
    path = m.path / "d0/f00000"
    read(path)
    (source / "d0/f00000").write_bytes(b"changed")
    assert read(path) == b"changed"
    path.write_bytes(b"back")
    assert (source / "d0/f00000").read_bytes() == b"back"
    assert m.flush()["cached_files"] == 0


def test_a_directory_that_the_kernel_forgot_is_listed_anew(mount: MakeMount, source: Path) -> None:
    """Its names are dropped with its record; the mark of a recent listing must not outlive them."""
    m = mount(source, "--cache", "none", "--attr-timeout", "60")
    expected = {name: sorted(os.listdir(source / name)) for name in sorted(os.listdir(source)) if name[0] == "d"}
    for _ in range(5):
        assert {name: sorted(os.listdir(m.path / name)) for name in expected} == expected
        m.drop_caches()


@pytest.mark.promise("CL-2")
def test_cache_metadata_pins_metadata_and_keeps_no_data(mount: MakeMount, source: Path) -> None:
    m = mount(source, "--cache", "metadata", "--read-only")
    names = [p for p in m.path.rglob("*") if p.is_file()]
    for path in names:
        read(path)
    before = m.ops()
    for path in names:
        path.stat()
    status = m.flush()
    assert status["source_ops"] == before
    assert status["cached_files"] == status["blob_bytes"] == 0


# --- writes ----------------------------------------------------------------------------------------------------------


@pytest.mark.promise("TE-4", "WR-8")
def test_writes_pass_through_at_once_and_show_at_once(mount: MakeMount, source: Path) -> None:
    m = mount(source)
    a, b = m.path, source
    (a / "dir").mkdir(0o750)
    (a / "dir/file").write_bytes(b"hello")
    assert (b / "dir/file").read_bytes() == b"hello"
    assert (a / "dir/file").stat().st_size == 5
    with open(a / "dir/file", "ab") as file:
        file.write(b" world")
        file.flush()
        os.fsync(file.fileno())
        assert os.fstat(file.fileno()).st_size == 11
    assert read(a / "dir/file") == b"hello world"
    os.symlink("file", a / "dir/sym")
    assert os.readlink(a / "dir/sym") == "file" == os.readlink(b / "dir/sym")
    os.link(a / "dir/file", a / "dir/hard")
    assert (a / "dir/hard").stat().st_ino == (a / "dir/file").stat().st_ino
    assert (a / "dir/hard").stat().st_nlink == 2
    os.mkfifo(a / "dir/fifo")
    assert (b / "dir/fifo").is_fifo()
    os.chmod(a / "dir/file", 0o604)
    os.utime(a / "dir/file", ns=(10**18, 10**18 + 5))
    os.truncate(a / "dir/file", 4)
    os.utime(a / "dir/hard", ns=(10**18, 10**18 + 7))
    found = (b / "dir/file").stat()
    assert (found.st_mode & 0o777, found.st_size, found.st_mtime_ns) == (0o604, 4, 10**18 + 7)
    os.setxattr(a / "dir/file", "user.k", b"v")
    assert os.getxattr(b / "dir/file", "user.k") == b"v" == os.getxattr(a / "dir/file", "user.k")
    raises_errno(errno.EEXIST, lambda: os.setxattr(a / "dir/file", "user.k", b"w", os.XATTR_CREATE))
    os.removexattr(a / "dir/file", "user.k")
    assert os.listxattr(a / "dir/file") == []
    os.rename(a / "dir/file", a / "dir/renamed")
    assert sorted(os.listdir(a / "dir")) == sorted(os.listdir(b / "dir")) == ["fifo", "hard", "renamed", "sym"]
    raises_errno(errno.ENOTEMPTY, lambda: os.rmdir(a / "dir"))
    for name in os.listdir(a / "dir"):
        os.unlink(a / "dir" / name)
    os.rmdir(a / "dir")
    assert not (a / "dir").exists() and not (b / "dir").exists()
    assert os.statvfs(a).f_blocks == os.statvfs(b).f_blocks


@pytest.mark.promise("WR-8")
def test_rename_flags(mount: MakeMount, source: Path) -> None:
    from cachefs.system.syscalls import renameat2

    m = mount(source)
    (m.path / "a").write_bytes(b"a")
    (m.path / "b").write_bytes(b"b")
    root = os.open(m.path, os.O_RDONLY)
    try:
        raises_errno(errno.EEXIST, lambda: renameat2(root, b"a", root, b"b", 1))
        renameat2(root, b"a", root, b"b", 2)
    finally:
        os.close(root)
    assert (read(m.path / "a"), read(m.path / "b")) == (b"b", b"a") == (read(source / "a"), read(source / "b"))


@pytest.mark.promise("WR-8")
def test_appends_and_sparse_writes(mount: MakeMount, source: Path) -> None:
    m = mount(source)
    with open(m.path / "sparse", "wb") as file:
        file.seek(5_000_000)
        file.write(b"end")
    assert read(m.path / "sparse") == bytes(5_000_000) + b"end" == (source / "sparse").read_bytes()
    fds = [os.open(m.path / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT) for _ in range(2)]
    for index in range(10):
        os.write(fds[index % 2], b"%d" % index)
    for fd in fds:
        os.close(fd)
    assert read(m.path / "log") == b"0123456789"


@pytest.mark.promise("NP-4")
@pytest.mark.parametrize("mode", [[], ["--mutable", "**"]], ids=["", "mutable"])
def test_holes_are_not_seen_and_room_is_not_reserved(mount: MakeMount, source: Path, mode: list[str]) -> None:
    with open(source / "sparse", "wb") as file:
        file.truncate(4 << 20)
    m = mount(source, *mode)
    with open(m.path / "sparse", "rb") as file:
        assert os.lseek(file.fileno(), 0, os.SEEK_HOLE) == 4 << 20
        assert os.lseek(file.fileno(), 100, os.SEEK_DATA) == 100
    with open(m.path / "new", "wb") as file:
        raises_errno(errno.EOPNOTSUPP, lambda: fallocate(file.fileno(), 1 << 20))
        assert os.fstat(file.fileno()).st_size == 0


@pytest.mark.promise("ON-1")
def test_an_open_file_without_a_name_goes_on(mount: MakeMount, source: Path) -> None:
    """The usual temporary file: create, unlink, write, stat, read."""
    m = mount(source, "--attr-timeout", "0")
    fd = os.open(m.path / "tmp", os.O_RDWR | os.O_CREAT)
    os.unlink(m.path / "tmp")
    os.write(fd, b"12345")
    time.sleep(0.05)
    assert os.fstat(fd).st_size == 5
    os.fchmod(fd, 0o600)
    os.ftruncate(fd, 3)
    assert os.pread(fd, 10, 0) == b"123"
    os.close(fd)


@pytest.mark.promise("NP-1")
def test_locks_are_local_and_work(mount: MakeMount, source: Path) -> None:
    m = mount(source)
    (m.path / "lock").write_bytes(b"")
    script = "import fcntl,sys; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    with open(m.path / "lock") as held:
        import fcntl

        fcntl.flock(held, fcntl.LOCK_EX)
        assert subprocess.run(["python3", "-c", script, m.path / "lock"], capture_output=True).returncode != 0
    assert subprocess.run(["python3", "-c", script, m.path / "lock"], capture_output=True).returncode == 0


@pytest.mark.promise("IM-4")
def test_an_attribute_of_an_immutable_file_is_not_removed(mount: MakeMount, source: Path) -> None:
    os.setxattr(source / "d0/f00000", "user.a", b"b")
    settle()
    m = mount(source)
    path = m.path / "d0/f00000"
    path.read_bytes()
    raises_errno(errno.EPERM, lambda: os.removexattr(path, "user.a"))
    assert os.getxattr(source / "d0/f00000", "user.a") == b"b"


@pytest.mark.promise("EX-9")
@pytest.mark.parametrize("how", ["opened for writing", "mknod"])
def test_what_was_written_here_is_mutable_though_it_was_read_since(mount: MakeMount, source: Path, how: str) -> None:
    m = mount(source)
    path = m.path / "d0" / ("made" if how == "mknod" else "f00000")
    if how == "mknod":
        os.mknod(path, 0o100644)
        assert path.read_bytes() == b""
    else:
        with open(path, "r+b") as file:
            file.write(b"one")
        assert path.read_bytes().startswith(b"one")
    with open(path, "r+b") as file:
        file.write(b"two")
    assert path.read_bytes().startswith(b"two")
    assert (source / path.relative_to(m.path)).read_bytes() == path.read_bytes()


@pytest.mark.promise("TE-4")
def test_extended_attributes_that_were_changed_here_show_at_once(mount: MakeMount, source: Path) -> None:
    os.setxattr(source / "d0", "user.k", b"old")
    settle()
    m = mount(source, "--attr-timeout", "60")
    (m.path / "d0/f00000").read_bytes()
    m.drop_caches()
    directory = m.path / "d0"
    for _ in range(2):
        assert os.getxattr(directory, "user.k") == b"old" and os.listxattr(directory) == ["user.k"]
    for name in ("user.k", "user.l"):
        os.setxattr(directory, name, b"new")
    assert os.getxattr(directory, "user.k") == b"new" and sorted(os.listxattr(directory)) == ["user.k", "user.l"]


@pytest.mark.promise("TE-4")
def test_names_that_were_made_and_removed_here_show_at_once_in_a_listing(mount: MakeMount, source: Path) -> None:
    m = mount(source, "--attr-timeout", "60")
    before = sorted(os.listdir(m.path / "d0"))
    (m.path / "d0/new").write_bytes(b"x")
    (m.path / "d0/f00000").unlink()
    assert sorted(os.listdir(m.path / "d0")) == sorted(os.listdir(source / "d0")) != before


@pytest.mark.promise("PI-2")
@pytest.mark.parametrize("mode", [[], ["--no-fastpath"]], ids=["", "no-fastpath"])
def test_absences_are_pinned_beyond_the_memory_of_the_kernel(mount: MakeMount, source: Path, mode: list[str]) -> None:
    m = mount(source, "--read-only", *mode)
    assert not (m.path / "d0/late").exists()
    (source / "d0/late").write_bytes(b"x")
    before = m.ops()
    m.drop_caches()
    assert not (m.path / "d0/late").exists()
    assert m.ops() == before


@pytest.mark.slow
@pytest.mark.promise("WR-8")
@pytest.mark.parametrize("mode", [(), ("--no-fastpath",)], ids=["fastpath", "python"])
def test_writeback_of_a_mapping_does_not_undo_a_truncation(
    mount: MakeMount, source: Path, mode: tuple[str, ...]
) -> None:
    """Before: 1 in 7 files got a size again, and parts of its former contents."""
    m = mount(source, *mode)
    size, draw, left = 2_500_000, random.Random(1), {}
    with ThreadPoolExecutor() as pool:
        for number in range(60):
            path = m.path / f"mapped{number}"
            path.write_bytes(b"A" * size)
            with open(path, "r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
                for _ in range(30):
                    at = draw.randrange(size - 100)
                    mapped[at : at + 100] = b"B" * 100
                written = pool.submit(os.fsync, file.fileno())
                time.sleep(draw.choice((0, 0.001, 0.003, 0.01)))
                os.close(os.open(path, os.O_WRONLY | os.O_TRUNC))
                written.result()
                os.fsync(file.fileno())
                if length := (source / path.name).stat().st_size:
                    left[path.name] = length
            path.unlink()
    assert not left


@pytest.mark.promise("WR-8")
@pytest.mark.parametrize("mode", [(), ("--no-fastpath",)], ids=["fastpath", "python"])
def test_a_read_that_comes_after_a_write_waits_for_it(
    mount: MakeMount, faulty: tuple[Path, Path], mode: tuple[str, ...]
) -> None:
    """The kernel may drop a page while it writes a part of it. Before: it read the page again without that part, kept
    it, and wrote it back where a process had mapped it: 1 in 1,000 writes beside a mapping was lost."""
    source, faults = faulty
    m = mount(source, *mode)
    path = m.path / "file"
    path.write_bytes(b"." * 4096)
    with open(path, "r+b", buffering=0) as file, ThreadPoolExecutor() as pool:
        assert os.pread(file.fileno(), 4096, 0) == b"." * 4096
        (faults / "hang-write").touch()
        try:
            writing = pool.submit(os.pwrite, file.fileno(), b"new", 100)
            wait_for(lambda: (faults / "has-hung").exists(), bool)
            reading = pool.submit(path.read_bytes)  # an open drops the page
            with pytest.raises(TimeoutError):
                reading.result(0.5)
        finally:
            (faults / "hang-write").unlink()
        assert writing.result() == 3
        assert reading.result()[99:104] == b".new."

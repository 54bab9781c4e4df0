"""A directory above was closed at the source, and no look-up happens between that and the call.

The attribute time-out is a minute, so the kernel lets every call through: the mount itself must notice.
"""

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Mount, settle, wait_for
from tests.users import as_user, open_to_all

MakeMount = Callable[..., Mount]
BOB = 1234
REFUSED = (errno.EACCES, errno.ESTALE)
BOTH_WAYS = pytest.mark.parametrize("mode", [[], ["--no-fastpath"]], ids=["", "no-fastpath"])


def bob(function: Callable[[], object]) -> object:
    return as_user(BOB, BOB, [], function)


def rooms(source: Path, *names: str) -> None:
    """NAME/room for each name, with a world-readable file."""
    for name in names:
        room = source / name / "room"
        room.mkdir(parents=True)
        (room / "old").write_bytes(b"old")
        (room / "old").chmod(0o644)
        for directory in (room, room.parent):
            directory.chmod(0o777)


def mounted(mount: MakeMount, source: Path, *arguments: str) -> Mount:
    """A mount on which the rooms are pinned and known to the kernel."""
    settle()
    m = mount(source, "--allow-other", "--attr-timeout", "60", *arguments)
    open_to_all(source)
    open_to_all(m.path)
    olds = sorted(path.relative_to(source) for path in source.glob("*/room/old"))
    for _ in range(2):
        for old in olds:
            assert bob((m.path / old).read_bytes) == b"old"
        m.drop_caches()
    for old in olds:
        assert bob((m.path / old).stat)
    return m


CHANGES: dict[str, Callable[[Path], object]] = {
    "chmod": lambda path: path.chmod(0o600),
    "chown": lambda path: os.chown(path, -1, BOB),
    "utimens": lambda path: os.utime(path, (1, 1)),
    "setxattr": lambda path: os.setxattr(path, "user.new", b"x"),
    "removexattr": lambda path: os.removexattr(path, "user.there"),
    "open": lambda path: os.close(os.open(path, os.O_WRONLY)),
    "truncate": lambda path: os.truncate(path, 0),
}


@pytest.mark.promise("PE-12")
@BOTH_WAYS
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("before", ["never", "more than a second ago"])
def test_a_file_is_not_changed(mount: MakeMount, source: Path, change: str, before: str, mode: list[str]) -> None:
    """`before`: when the directories were compared last."""
    rooms(source, "outer")
    file = source / "outer/room/mine"
    file.write_bytes(b"content")
    os.setxattr(file, "user.there", b"x")
    os.chown(file, BOB, BOB)
    m = mounted(mount, source, *mode)
    path = m.path / "outer/room/mine"
    assert bob(path.stat)
    if before != "never":
        assert bob(lambda: os.setxattr(path, "user.first", b"x")) is None
        assert bob(path.stat)
        time.sleep(1.3)
    (source / "outer").chmod(0o700)
    changed_ns = file.stat().st_ctime_ns
    assert bob(lambda: CHANGES[change](path)) in REFUSED
    assert file.stat().st_ctime_ns == changed_ns


@pytest.mark.promise("PE-12")
@BOTH_WAYS
@pytest.mark.parametrize("closed", ["from", "to"])
def test_a_file_is_neither_moved_in_nor_out(mount: MakeMount, source: Path, closed: str, mode: list[str]) -> None:
    rooms(source, "from", "to")
    (source / "from/room/mine").write_bytes(b"content")
    os.chown(source / "from/room/mine", BOB, BOB)
    m = mounted(mount, source, *mode)
    old, new = m.path / "from/room/mine", m.path / "to/room/mine"
    assert bob(old.stat)
    assert bob(new.exists) is False
    (source / closed).chmod(0o700)
    assert bob(lambda: old.rename(new)) in REFUSED
    assert (source / "from/room/mine").exists() and not (source / "to/room/mine").exists()


@pytest.mark.promise("PE-6")
@BOTH_WAYS
def test_what_was_written_since_into_a_mutable_file_is_not_read(
    mount: MakeMount, source: Path, mode: list[str]
) -> None:
    """Its own directory is open: the source would allow the caller to open it."""
    rooms(source, "outer")
    log = source / "outer/room/job.log"
    log.write_bytes(b"public")
    log.chmod(0o644)
    m = mounted(mount, source, "--mutable", "*.log", *mode)
    path = m.path / "outer/room/job.log"
    assert bob(path.read_bytes) == b"public"
    (source / "outer").chmod(0o700)
    log.write_bytes(b"secret")
    wait_for(lambda: time.time() - log.stat().st_mtime, lambda age: age > 2.1)  # from here on nothing may be old data
    assert bob(path.read_bytes) in REFUSED


@pytest.mark.promise("PE-3")
@BOTH_WAYS
@pytest.mark.parametrize("how", ["open", "truncate"])
def test_the_source_itself_refuses_who_may_not_write(mount: MakeMount, source: Path, how: str, mode: list[str]) -> None:
    """The file was closed, not a directory; the kernel still caches its old mode and ACL."""
    rooms(source, "outer")
    file = source / "outer/room/open"
    file.write_bytes(b"content")
    file.chmod(0o666)
    m = mounted(mount, source, *mode)
    path = m.path / "outer/room/open"
    assert bob(lambda: os.close(os.open(path, os.O_RDWR))) is None
    file.chmod(0o600)
    assert bob(lambda: CHANGES[how](path)) in REFUSED
    assert file.read_bytes() == b"content"

"""Set-user-ID bits and capabilities of files: what changes through a mount leave of them, and changes at the source."""

import errno
import mmap
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Mount, raises_errno, wait_for
from tests.users import CAPABILITY, as_user, open_to_all

MakeMount = Callable[..., Mount]
OWNER, OTHER, GROUP = 1234, 4321, 5555
BITS = (0o777, 0o6777, 0o2767, 0o4666, 0o6666)


def _by_descriptor(change: Callable[[int], object], flags: int = os.O_RDWR) -> Callable[[Path], None]:
    def run(path: Path) -> None:
        fd = os.open(path, flags)
        try:
            change(fd)
        finally:
            os.close(fd)

    return run


def _send(fd: int) -> None:
    memory = os.memfd_create("memory")
    try:
        os.write(memory, b"sent")
        os.sendfile(fd, memory, 0, 4)
    finally:
        os.close(memory)


def _write_directly(fd: int) -> None:
    with mmap.mmap(-1, 4096) as block:
        os.pwritev(fd, [block], 0)


CHANGES: dict[str, Callable[[Path], object]] = {
    "write": _by_descriptor(lambda fd: os.write(fd, b"x")),
    "write of nothing": _by_descriptor(lambda fd: os.write(fd, b"")),
    "append": _by_descriptor(lambda fd: os.write(fd, b"x"), os.O_RDWR | os.O_APPEND),
    "direct write": _by_descriptor(_write_directly, os.O_RDWR | os.O_DIRECT),
    "sendfile": _by_descriptor(_send),
    "fallocate": _by_descriptor(lambda fd: os.posix_fallocate(fd, 0, 8192)),
    "ftruncate": _by_descriptor(lambda fd: os.ftruncate(fd, 3)),
    "ftruncate to its size": _by_descriptor(lambda fd: os.ftruncate(fd, 7)),
    "truncate": lambda path: os.truncate(path, 3),
    "open, which truncates": _by_descriptor(lambda fd: None, os.O_RDWR | os.O_TRUNC),
    "creat": _by_descriptor(lambda fd: None, os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
    "open": _by_descriptor(lambda fd: None),
    "chgrp": lambda path: os.chown(path, -1, GROUP),
    "chown to its owner": lambda path: os.chown(path, OWNER, -1),
    "utime": os.utime,
    "setxattr": lambda path: os.setxattr(path, "user.name", b"value"),
}


def _privileges(path: Path) -> tuple[int, bool, int]:
    """(mode, whether it has a capability, gid)"""
    now = os.stat(path)
    return now.st_mode & 0o7777, "security.capability" in os.listxattr(path), now.st_gid


def _outcome(change: Callable[[Path], object], path: Path, uid: int) -> object:
    """None, or the errno."""
    return as_user(uid, uid, [GROUP], lambda: change(path))


@pytest.mark.promise("WR-2", "WR-6")
@pytest.mark.parametrize("arguments", [(), ("--no-fastpath",)], ids=["fast path", "Python alone"])
@pytest.mark.parametrize("uid", [0, OWNER, OTHER], ids=["root", "owner", "other"])
def test_a_change_leaves_the_same_privileges_as_at_the_source(
    mount: MakeMount, tmp_path: Path, uid: int, arguments: tuple[str, ...]
) -> None:
    source = tmp_path / "source"
    cases = [(name, bits, able) for name in CHANGES for bits in BITS for able in (False, True)]
    for side in ("direct", "mounted"):
        for number, (_, bits, able) in enumerate(cases):
            path = source / side / str(number)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"content")
            os.chown(path, OWNER, OWNER)
            path.chmod(bits)
            if able:
                os.setxattr(path, "security.capability", CAPABILITY)
    m = mount(source, "--allow-other", *arguments)
    open_to_all(source)
    open_to_all(m.path)
    cleared = 0
    for number, case in enumerate(cases):
        direct, at_source, mounted = (
            source / f"direct/{number}",
            source / f"mounted/{number}",
            m.path / f"mounted/{number}",
        )
        before = _privileges(mounted)
        assert before == _privileges(at_source)
        assert _outcome(CHANGES[case[0]], mounted, uid) == _outcome(CHANGES[case[0]], direct, uid), case
        assert _privileges(mounted) == _privileges(at_source) == _privileges(direct), case
        cleared += _privileges(direct) != before
    assert cleared >= (20 if uid == 0 else 40)


def _write_to_mapping(path: Path) -> None:
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        mapping[0] = 0
        mapping.flush()


def _refused_chown(path: Path) -> None:
    command = ["setpriv", "--bounding-set", "-fowner", "--inh-caps", "-fowner", "chown", str(OTHER), path]
    assert subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 1


def _open_while_it_runs(path: Path) -> None:
    shutil.copyfile("/bin/sleep", path)
    running = subprocess.Popen([path, "60"])
    try:
        wait_for(lambda: os.readlink(f"/proc/{running.pid}/exe"), lambda program: program == str(path))
        # A program that still starts may read its file after the truncation, and die before it is found to be running.
        wait_for(Path(f"/proc/{running.pid}/wchan").read_text, lambda waits_in: "nanosleep" in waits_in)
        raises_errno(errno.ETXTBSY, lambda: os.open(path, os.O_RDONLY | os.O_TRUNC))
    finally:
        running.kill()
        running.wait()


@pytest.mark.promise("WR-12")
@pytest.mark.fastpath
def test_changes_that_differ_from_a_local_disk(mount: MakeMount, tmp_path: Path) -> None:
    """Because the kernel sends a write, nothing, the removal before the chown, and the truncation with the open."""
    bits, without = (0o6755, True, OWNER), (0o755, False, OWNER)
    changes = {
        _write_to_mapping: (bits, without),
        lambda path: os.chown(path, -1, -1): (without, bits),
        _refused_chown: (bits, (0o6755, False, OWNER)),
    }
    source = tmp_path / "source"
    source.mkdir()
    m = mount(source, "--allow-other", "--mutable", "*")
    open_to_all(m.path)
    for change, expected in changes.items():
        for place, left in zip((source, m.path), expected, strict=True):
            path = place / f"{len(os.listdir(place))}"
            path.write_bytes(b"content")
            os.chown(path, OWNER, OWNER)
            path.chmod(0o6755)
            os.setxattr(path, "security.capability", CAPABILITY)
            uid = 0 if change is _refused_chown else OWNER
            assert _outcome(change, path, uid) is None
            assert _privileges(path) == _privileges(source / path.name) == left
    for place, is_emptied in ((source, False), (m.path, True)):
        path = place / f"program{is_emptied}"
        path.touch(0o755)
        _open_while_it_runs(path)
        assert (path.stat().st_size == 0) is is_emptied

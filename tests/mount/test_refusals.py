"""A refused request explains itself: counted, and logged once for each path, with the reason and the remedy."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Mount, cachefs, raises_errno, settle

MakeMount = Callable[..., Mount]
CHANGES = {
    "open": lambda path: os.open(path, os.O_WRONLY),
    "open and truncate": lambda path: os.open(path, os.O_WRONLY | os.O_TRUNC),
    "truncate": lambda path: os.truncate(path, 0),
    "chmod": lambda path: os.chmod(path, 0o600),
    "chown": lambda path: os.chown(path, 1, 1),
    "utime": lambda path: os.utime(path, (1, 1)),
    "setxattr": lambda path: os.setxattr(path, "user.a", b"b"),
}


@pytest.mark.promise("IM-6")
@pytest.mark.parametrize("name", CHANGES)
def test_a_refused_change_is_counted_and_logged_once_for_each_path(mount: MakeMount, source: Path, name: str) -> None:
    m = mount(source)
    paths = [m.path / "d0/f00000", m.path / "d1/f00001"]
    for path in paths * 3:
        path.read_bytes()
        raises_errno(errno.EPERM, lambda path=path: CHANGES[name](path))
    assert m.status()["refused_changes"] == 6
    assert "6 changes of immutable files" in cachefs("status", m.path).stdout
    lines = [line for line in m.log().splitlines() if "EPERM" in line]
    assert len(lines) == 2, lines
    for line, path in zip(lines, paths, strict=True):
        assert f"{path.relative_to(m.path)}: a change was refused" in line
        assert "--mutable" in line and "cachefs unpin" in line


@pytest.mark.promise("IM-6")
def test_what_the_log_advises_works(mount: MakeMount, source: Path) -> None:
    m = mount(source)
    path = m.path / "d0/f00000"
    path.read_bytes()
    raises_errno(errno.EPERM, lambda: path.write_bytes(b"new"))
    cachefs("unpin", path)
    path.write_bytes(b"new")
    assert (source / "d0/f00000").read_bytes() == b"new"
    m.remount("--mutable", "d1/**")
    other = m.path / "d1/f00001"
    other.read_bytes()
    other.write_bytes(b"new")
    assert m.status()["refused_changes"] == 0


def test_doctor_names_refused_changes(mount: MakeMount, source: Path) -> None:
    m = mount(source)
    (m.path / "d0/f00000").read_bytes()
    raises_errno(errno.EPERM, lambda: (m.path / "d0/f00000").write_bytes(b"new"))
    done = cachefs("doctor", m.path, check=False)
    assert "! refused changes: 1" in done.stdout and "--mutable" in done.stdout


@pytest.mark.promise("CH-10")
@pytest.mark.parametrize("mode", [["--read-only"], []], ids=["read-only", "read-write"])
def test_a_stale_read_is_logged_once_for_each_path(mount: MakeMount, source: Path, mode: list[str]) -> None:
    (source / "big").write_bytes(b"a" * (9 << 20))
    settle()
    m = mount(source, *mode, "--prefetch", "none")
    with open(m.path / "big", "rb", buffering=0) as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        assert os.pread(opened.fileno(), 10, 0) == b"a" * 10
        (source / "big").write_bytes(b"b" * (9 << 20))
        for offset in (8 << 20, 6 << 20):
            raises_errno(errno.ESTALE, lambda offset=offset: os.pread(opened.fileno(), 10, offset))
    (line,) = [line for line in m.log().splitlines() if "ESTALE" in line]
    assert "big: a read failed with ESTALE" in line and "has changed at the source" in line

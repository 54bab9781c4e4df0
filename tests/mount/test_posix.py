"""Every sub-test of pjdfstest that ever failed, rewritten (tests/posix runs the originals)."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cachefs.system.syscalls import UTIME_NOW, UTIME_OMIT, utimensat
from tests.conftest import Mount
from tests.users import as_user, open_to_all

MakeMount = Callable[..., Mount]
NOBODY = 65534
MODES = pytest.mark.parametrize(
    "arguments", [("--cache", "none"), (), ("--mutable", "**")], ids=["none", "full", "mutable"]
)


@pytest.fixture
def directory(mount: MakeMount, source: Path, arguments: tuple[str, ...]) -> Path:
    """A new directory on a mount that all users may use."""
    m = mount(source, "--allow-other", *arguments)
    open_to_all(source)
    open_to_all(m.path)
    (m.path / "work").mkdir(mode=0o755)
    return m.path / "work"


def create(path: Path, mode: int) -> Path:
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
    path.chmod(mode)
    return path


@pytest.mark.promise("WR-2")
@MODES
def test_chmod_12_3_4_7_8_11_12_writing_clears_set_user_id_bits(directory: Path) -> None:
    def write(path: Path, flags: int) -> int:
        fd = os.open(path, flags)
        try:
            assert os.write(fd, b"x") == 1
            return os.fstat(fd).st_mode & 0o7777
        finally:
            os.close(fd)

    for mode, flags in ((0o4777, os.O_WRONLY), (0o2777, os.O_RDWR), (0o6777, os.O_RDWR)):
        path = create(directory / f"{mode:o}", mode)
        assert as_user(NOBODY, NOBODY, [], lambda path=path, flags=flags: write(path, flags)) == 0o777
        assert path.stat().st_mode & 0o7777 == 0o777


@pytest.mark.promise("WR-10")
@MODES
def test_utimensat_06_11_now_needs_write_permission_only(directory: Path) -> None:
    path = create(directory / "file", 0o644)
    now = (0, UTIME_NOW)

    def touch() -> None:
        utimensat(os.fsencode(path), now, now)

    assert as_user(NOBODY, NOBODY, [], touch) == errno.EACCES
    os.chown(path, NOBODY, NOBODY)
    path.chmod(0o444)
    assert as_user(NOBODY, NOBODY, [], touch) is None  # the owner
    utimensat(os.fsencode(path), (0, UTIME_OMIT), (0, UTIME_OMIT))
    os.chown(path, 0, 0)
    path.chmod(0o666)
    os.utime(path, (1, 1))
    assert as_user(NOBODY, NOBODY, [], touch) is None
    assert path.stat().st_mtime > 1


@pytest.mark.promise("ON-1")
@MODES
def test_unlink_14_4_an_open_file_whose_name_is_gone_has_no_links(directory: Path) -> None:
    path = create(directory / "file", 0o644)
    path.write_bytes(b"Hello, World!")
    fd = os.open(path, os.O_RDONLY)
    try:
        path.unlink()
        assert os.fstat(fd).st_nlink == 0
        assert os.pread(fd, 13, 0) == b"Hello, World!"
    finally:
        os.close(fd)

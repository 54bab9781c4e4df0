"""Data that fsync reported as stored are on the source's disk; malformed control requests stop no commit."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cachefs.client.client import Client
from cachefs.errors import CacheFsError
from tests.conftest import Mount, contents, raises_errno

MakeMount = Callable[..., Mount]


@pytest.mark.promise("WR-8")
@pytest.mark.parametrize("sync", [os.fsync, os.fdatasync])
def test_fsync_is_the_fsync_of_the_source(
    mount: MakeMount, faulty: tuple[Path, Path], sync: Callable[[int], None]
) -> None:
    source, faults = faulty
    m = mount(source)
    fd = os.open(m.path / "new", os.O_WRONLY | os.O_CREAT)
    os.write(fd, b"data")
    sync(fd)
    (faults / "fsync").touch()
    raises_errno(errno.EIO, lambda: sync(fd))
    (faults / "fsync").unlink()
    sync(fd)
    os.close(fd)


@pytest.mark.promise("WR-8")
def test_fsync_of_a_directory_is_that_of_the_source(mount: MakeMount, faulty: tuple[Path, Path]) -> None:
    source, faults = faulty
    m = mount(source)
    fd = os.open(m.path, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(fd)
    (faults / "fsync").touch()
    raises_errno(errno.EIO, lambda: os.fsync(fd))
    (faults / "fsync").unlink()
    os.close(fd)


def test_numbers_that_are_none_in_a_drop_are_refused_and_stop_no_commit(mount: MakeMount, source: Path) -> None:
    m = mount(source, "--read-only")
    for row in ((1 << 64, 0, 0), (7, 1 << 70, 0), (7, 0, 1 << 64), (-1, 0, 0), (7, -5, 0)):
        with pytest.raises(CacheFsError, match="numbers from 0"):
            Client(m.path).drop([(7, 0, 0), row])
    assert contents(m.path) == contents(source)
    status = m.flush()
    assert (status["cached_files"], status["corrupt_records"], status["errors"]) == (40, 0, 0)

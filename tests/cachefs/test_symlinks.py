"""No symlink of the source is followed, also where the kernel has no openat2."""

import errno
import os
import stat
from collections import Counter
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from cachefs.source.directories import ROOT
from cachefs.source.identity import Changed
from cachefs.source.source import Source
from tests.cachefs.test_identity import below
from tests.conftest import raises_errno
from tests.load import fork


@pytest.fixture(params=[True, False], ids=["openat2", "openat"])
def source(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Source]:
    if not request.param:
        monkeypatch.setattr("cachefs.source.opening._has_openat2", lambda: False)
    (tmp_path / "root").mkdir()
    fd = os.open(tmp_path / "root", os.O_RDONLY | os.O_DIRECTORY)
    made = Source(fd)
    yield made
    made.directories.clear()
    os.close(fd)


def test_a_symlink_to_a_file_is_not_opened(source: Source, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "root/link").symlink_to(tmp_path / "secret")
    raises_errno(errno.ELOOP, lambda: os.close(source.opener.open_at(source.root_fd, b"link", os.O_RDONLY)))
    with pytest.raises(Changed):
        os.close(source.opener.create_at(source.root_fd, b"link", os.O_WRONLY | os.O_TRUNC, 0o600))
    assert (tmp_path / "secret").read_bytes() == b"secret"
    assert stat.S_ISLNK(source.lstat(ROOT, b"link").mode)


def test_a_symlink_to_a_directory_is_not_walked(source: Source, tmp_path: Path) -> None:
    (tmp_path / "root/directory").mkdir()
    directory = below(ROOT, tmp_path / "root/directory")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/secret").touch()
    (tmp_path / "root/directory").rmdir()
    (tmp_path / "root/directory").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Changed):
        source.readdir(directory)
    with pytest.raises(Changed):
        source.lstat(directory, b"secret")


OPENS = 50_000


def test_what_is_moved_away_while_it_is_opened_is_looked_for_again(source: Source, tmp_path: Path) -> None:
    """openat2 says EXDEV of a file that left the directory between its look-up and the end of the walk."""
    (tmp_path / "away").mkdir()
    (tmp_path / "root/file").touch()

    def move(stop: Event) -> None:
        while not stop.is_set():
            os.rename(tmp_path / "root/file", tmp_path / "away/file")
            os.rename(tmp_path / "away/file", tmp_path / "root/file")

    stop = fork.Event()
    mover = fork.Process(target=move, args=(stop,))
    mover.start()
    answers: Counter[str] = Counter()
    try:
        for _ in range(OPENS):
            try:
                os.close(source.opener.open_at(source.root_fd, b"file", os.O_RDONLY))
                answers["opened"] += 1
            except OSError as error:
                answers[errno.errorcode[error.errno or 0]] += 1
    finally:
        stop.set()
        mover.join(30)
    assert answers["opened"] and answers["ENOENT"]
    assert answers.keys() <= {"opened", "ENOENT", "EAGAIN"}  # EAGAIN: `Busy`, which is asked again after a pause

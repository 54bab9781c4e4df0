"""Directories of the source that are held by descriptors: what several threads do at the same time."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cachefs.errors import Busy
from cachefs.source import directories as source_directories
from cachefs.source.directories import ROOT, Directory, SourceDirectories
from cachefs.source.identity import Changed
from cachefs.source.source import Source
from cachefs.store.index.records import Identity

THREADS, DIRECTORIES = 8, 20


class Counted:
    """Opens directories as a source does; a slow one."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.opened: list[bytes] = []
        self.hangs = threading.Event()
        self.hangs.set()

    def open_at(self, fd: int, name: bytes, flags: int) -> int:
        self.opened.append(name)
        first = len(self.opened) == 1
        time.sleep(0.005)
        if first:
            assert self.hangs.wait(30)
        return os.open(name, flags, dir_fd=fd)


@pytest.fixture
def counted(tmp_path: Path) -> Iterator[Counted]:
    root = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield Counted(Source(root))
    os.close(root)


@pytest.fixture
def directories(counted: Counted) -> SourceDirectories:
    return SourceDirectories(
        counted.source.root_fd,
        counted.open_at,
        counted.source.fstat,
        counted.source.stat,
        lambda *_: None,
        lambda _: False,
        lambda: None,
    )


def make(source: Source, path: Path, number: int) -> Directory:
    path.mkdir(exist_ok=True)
    found = source.stat(source.root_fd, os.fsencode(path.name))
    return Directory(
        number, Identity(found.inode, 0o040000, 0, found.btime_ns, found.ctime_ns, 0), ROOT, os.fsencode(path.name)
    )


def in_threads(count: int, function: Callable[[], object]) -> list[Any]:
    """What each thread returns, or raises."""
    results: list[object] = []
    barrier = threading.Barrier(count)

    def run() -> None:
        barrier.wait(20)
        try:
            results.append(function())
        except OSError as error:
            results.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(results) == count
    return results


def test_threads_that_want_the_same_directories_at_the_same_time_open_each_once(
    counted: Counted, directories: SourceDirectories, tmp_path: Path
) -> None:
    """Before: each thread opened and compared each directory that no thread had yet."""
    made = [make(counted.source, tmp_path / f"d{number}", number) for number in range(100, 100 + DIRECTORIES)]

    def hold_all() -> list[int]:
        inodes = []
        for directory in made:
            with directories.hold(directory) as fd:
                inodes.append(os.fstat(fd).st_ino)
        return inodes

    expected = [(tmp_path / f"d{number}").stat().st_ino for number in range(100, 100 + DIRECTORIES)]
    assert in_threads(THREADS, hold_all) == [expected] * THREADS
    assert len(counted.opened) == DIRECTORIES
    assert counted.source.counters.snapshot()["fstat"] == DIRECTORIES


def test_a_directory_that_is_not_there_is_an_error_for_each_thread_that_wants_it(
    counted: Counted, directories: SourceDirectories, tmp_path: Path
) -> None:
    directory = make(counted.source, tmp_path / "d", 100)
    (tmp_path / "d").rmdir()

    def hold() -> None:
        with directories.hold(directory):
            pass

    assert all(isinstance(result, Changed) for result in in_threads(THREADS, hold))
    with directories.hold(make(counted.source, tmp_path / "d", 101)) as fd:
        assert os.fstat(fd).st_ino == (tmp_path / "d").stat().st_ino


def test_an_open_that_hangs_keeps_no_other_thread_from_the_directory(
    counted: Counted, directories: SourceDirectories, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_directories, "PATIENCE_S", 0.01)
    directory = make(counted.source, tmp_path / "d", 100)
    counted.hangs.clear()
    inodes: list[int] = []

    def hold() -> None:
        with directories.hold(directory) as fd:
            inodes.append(os.fstat(fd).st_ino)

    first = threading.Thread(target=hold)
    first.start()
    while not counted.opened:
        time.sleep(0.001)
    in_threads(2, hold)
    assert len(inodes) == 2
    counted.hangs.set()
    first.join(20)
    assert inodes == [(tmp_path / "d").stat().st_ino] * 3


@pytest.mark.parametrize("change", ["names", "moved away and back"])
def test_a_use_of_a_directory_is_repeated_only_if_the_directory_has_moved(
    counted: Counted, tmp_path: Path, change: str
) -> None:
    """Where a descriptor follows its path, it led to another directory meanwhile (hazard 57)."""
    source = counted.source
    directories = SourceDirectories(
        source.root_fd,
        counted.open_at,
        source.fstat,
        source.stat,
        lambda fd, *_: source.stat(fd),
        lambda _: False,
        lambda: None,
    )
    directory = make(source, tmp_path / "d", 100)

    def use(*, repeats: bool) -> None:
        with directories.hold(directory, repeats=repeats):
            if change == "names":
                (tmp_path / "d/file").touch()
            else:
                (tmp_path / "d").rename(tmp_path / "away").rename(tmp_path / "d")

    if change == "names":
        use(repeats=True)
    else:
        with pytest.raises(Busy):
            use(repeats=True)
    use(repeats=False)

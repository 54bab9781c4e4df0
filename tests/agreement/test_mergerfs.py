"""Reading a source whose descriptors and inode numbers of directories go by paths (hazard 57)."""

import os
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from cachefs.errors import Busy
from cachefs.options import Options
from cachefs.source.directories import ROOT, Directory
from cachefs.source.identity import Changed
from cachefs.source.source import Object, Source
from cachefs.store.index.records import Inode
from cachefs.system.descriptors import closing
from cachefs.system.syscalls import renameat2
from tests.agreement.library import FastPath

DURATION_S = 6.0
LENGTH = 4096
NAMES = ("A", "B")
Read = Callable[[str, Inode], bytes | None]
"""(directory, record of a file in it): its contents, or None if it is not there."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Beneath the mergerfs: two directories, with a file each that contains the letter of its directory."""
    for name in NAMES:
        (tmp_path / "root" / name).mkdir(parents=True)
        (tmp_path / "root" / name / "file").write_bytes(name.encode() * LENGTH)
    return tmp_path / "root"


@pytest.fixture
def source(root: Path, tmp_path: Path, beneath: ExitStack) -> Iterator[Source]:
    path = tmp_path / "source"
    path.mkdir()
    subprocess.run(["mergerfs", "-o", "use_ino", root, path], check=True)
    beneath.callback(subprocess.run, ["umount", "-l", path], check=True)
    root_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    made = Source(root_fd, fstype="fuse.mergerfs")
    yield made
    made.directories.clear()
    os.close(root_fd)


def record_of(source: Source, directory_fd: int, name: str) -> Inode:
    return Inode(7, *[0] * 22).with_stat(source.stat(directory_fd, name.encode(), ask=True))


def by_python(source: Source) -> Read:
    directories = {}
    for number, name in enumerate(NAMES, 2):
        identity = record_of(source, source.root_fd, name).identity
        directories[name] = Directory(number, identity, ROOT, name.encode())

    def read(name: str, expected: Inode) -> bytes | None:
        try:
            return source.read_version(Object(directories[name], b"file", expected.identity), expected, 0, LENGTH)
        except (Changed, Busy):
            return None

    return read


def by_c(source: Source, fast_path: FastPath) -> Read:
    fast_path.set_up(Options())
    fast_path.shared.set_source("fuse.mergerfs", 1)
    source.connection.volumes.tell(lambda place, number: fast_path.shared.set_volume(*place, number))

    def read(name: str, expected: Inode) -> bytes | None:
        return fast_path.read_source(source.root_fd, f"{name}/file".encode(), expected, 0, LENGTH)

    return read


@pytest.mark.mount
@pytest.mark.slow
@pytest.mark.promise("TE-1")
@pytest.mark.parametrize("side", ["C", "Python"])
def test_no_read_gives_what_is_in_the_directory_that_has_the_path_for_a_moment(
    fast_path: FastPath, source: Source, root: Path, side: str
) -> None:
    """Before: 1 in 500 reads was wrong. After two exchanges within one tick of the kernel's clock the path may lead to
    the other directory with the same ctime: the kernel uses a finer clock only for an inode whose ctime was queried."""
    read = by_c(source, fast_path) if side == "C" else by_python(source)
    files = []
    for name in NAMES:
        with closing(os.open(name, os.O_PATH, dir_fd=source.root_fd)) as directory:
            files.append((name, record_of(source, directory, "file")))
    for name, expected in files:
        assert read(name, expected) == name.encode() * LENGTH
    until = time.monotonic() + DURATION_S

    def exchange() -> None:
        while time.monotonic() < until:
            renameat2(-1, os.fsencode(root / "A"), -1, os.fsencode(root / "B"), 2)
            time.sleep(random.choice((0, 0.0003, 0.001, 0.01)))

    found, wrong = 0, 0
    with ThreadPoolExecutor() as pool:
        exchanging = pool.submit(exchange)
        while not exchanging.done():
            name, expected = random.choice(files)
            contents = read(random.choice(NAMES), expected)
            found += contents is not None
            wrong += contents is not None and contents != name.encode() * LENGTH
        exchanging.result()
    assert found > 100
    assert not wrong, f"{wrong} of {found}"

"""Two directories are exchanged and exchanged back, again and again, on a source whose descriptors follow their paths:
each comparison may see the right directory, and what it compares may be of the other one (hazard 57)."""

import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.bindfs import Bindfs
from tests.conftest import REPOSITORY, Mount, cachefs, contents, expire, settle

MakeMount = Callable[..., Mount]
FILES = 60
DURATION_S = 4.0
EXCHANGES = """
import os, random, sys, time
from cachefs.system.syscalls import renameat2
one, other, stop = (path.encode() for path in sys.argv[1:])
while not os.path.exists(stop):
    renameat2(-1, one, -1, other, 2)
    until = time.perf_counter() + random.choice([0, 0.0001, 0.0003, 0.001])
    while time.perf_counter() < until:
        pass
    renameat2(-1, one, -1, other, 2)
    time.sleep(random.choice([0.0002, 0.001, 0.003]))
"""


@pytest.fixture
def bindfs(tmp_path: Path) -> Iterator[Bindfs]:
    root = tmp_path / "root"
    for directory in ("A", "B"):
        (root / directory).mkdir(parents=True)
        for number in range(FILES):
            (root / directory / f"f{number:02}").write_bytes(b"%s%02d " % (directory.encode(), number) * 1500)
    settle()
    made = Bindfs(root, tmp_path / "bindfs")
    yield made
    made.close()


@contextmanager
def exchanges(root: Path, stop: Path) -> Iterator[None]:
    command = [sys.executable, "-c", EXCHANGES, root / "A", root / "B", stop]
    with subprocess.Popen(command, cwd=REPOSITORY) as process:
        try:
            yield
        finally:
            stop.touch()
    assert process.returncode == 0


def read(path: Path) -> tuple[int, bytes]:
    """The inode number, and the bytes until the end or an error."""
    with open(path, "rb", buffering=0) as file:
        number, content = os.fstat(file.fileno()).st_ino, b""
        with suppress(OSError):
            while part := file.read():
                content += part
        return number, content


@pytest.mark.promise("CH-1", "TE-1")
@pytest.mark.parametrize("mode", [("--read-only",), (), ("--read-only", "--no-fastpath")], ids=" ".join)
def test_no_file_shows_the_bytes_of_the_other_directory(
    mount: MakeMount, bindfs: Bindfs, tmp_path: Path, mode: tuple[str, ...]
) -> None:
    """Before: 2 of 100 reads did, and what had been cached stayed wrong."""
    expected = {path.stat().st_ino: path.read_bytes() for path in bindfs.root.glob("?/*")}
    m = mount(bindfs.path, *mode)
    paths = sorted(path.relative_to(bindfs.root) for path in bindfs.root.glob("?/*"))
    wrong, count = [], 0
    with exchanges(bindfs.root, tmp_path / "stop"):
        until = time.monotonic() + DURATION_S
        while time.monotonic() < until:
            for path in paths:
                try:
                    number, content = read(m.path / path)
                except OSError as error:
                    assert error.errno in (errno.ESTALE, errno.ENOENT)
                    continue
                count += 1
                if not expected.get(number, content).startswith(content):
                    wrong.append((path, number, content[:4]))
            cachefs("invalidate", m.path)
        for path in paths:
            with suppress(OSError):
                read(m.path / path)
    for directory in ("A", "B"):
        try:  # the first listing of a directory that was replaced fails, the next one shows the new entries
            os.listdir(m.path / directory)
        except OSError as error:
            assert error.errno == errno.ESTALE
    expire()
    m.drop_caches()
    assert contents(m.path) == contents(bindfs.root)
    assert not wrong, (count, wrong[:5])

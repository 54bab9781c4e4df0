"""A fast path that starts while the disk of the cache is read-only or dead."""

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cachefs.fastpath import processes
from cachefs.options import Options
from tests.fastpath.program import GETATTR, Program, running

pytestmark = pytest.mark.skipif(not processes.is_built(), reason="the fast path is not built")

OLD = Options(settle_ns=1)
"""No file is young."""
FILE, OTHER = 10, 11
CONTENT = b"content"


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    """One file is in its blob."""
    with running(tmp_path, OLD) as program:
        for number in (FILE, OTHER):
            program.add(number, CONTENT)
        assert program.read(FILE, 0, 100) == CONTENT
        program.until_appended(len(CONTENT))
        yield program


def start_again(program: Program, index: Path) -> None:
    program.end()
    program.wait_until(lambda: program._daemon is None)
    program.told.clear()
    program.durable.place = program.durable.place.replace(str(program.durable.path), str(index))
    program.start()
    program.attach(same=True)


@contextmanager
def read_only(directory: Path, place: Path) -> Iterator[Path]:
    place.mkdir()
    subprocess.run(["mount", "--bind", directory, place], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", place], check=True)
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts")
def test_it_serves_hits_from_a_read_only_disk_until_that_can_be_written_again(program: Program, tmp_path: Path) -> None:
    """LMDB cannot register its readers there, so no commit may follow as long as it runs."""
    with read_only(program.durable.path, tmp_path / "read-only") as index:
        start_again(program, index)
        hits = program.counters().hits
        assert program.read(FILE, 0, 100) == CONTENT
        assert program.counters().hits == hits + 1
        subprocess.run(["mount", "-o", "remount,bind,rw", index], check=True)
        assert program.wait() == 0


def test_it_passes_everything_on_if_the_index_cannot_be_opened(program: Program, tmp_path: Path) -> None:
    program.python_says = errno.EIO
    start_again(program, tmp_path / "nothing")
    for unique in (program.send(GETATTR, FILE, bytes(16)), program.ask(FILE, 0, 100)):
        assert program.answer(unique)[0] == errno.EIO
    done = program.shared["prefetch_done"]
    program.prefetch((FILE, 0), (OTHER, 0))
    program.wait_until(lambda: program.shared["prefetch_done"] == done + 2)


def test_a_shortage_of_memory_has_a_status_of_its_own(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon waits for its end, however long it lasts."""
    program.end()
    wrapper = tmp_path / "wrapper"
    wrapper.write_text(f'#!/bin/sh\nulimit -v 1000000\nexec {processes.PROGRAM} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setattr(processes, "PROGRAM", wrapper)
    program.start()
    assert program.wait() == os.EX_TEMPFAIL

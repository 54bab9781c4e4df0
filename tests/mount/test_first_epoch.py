"""A first epoch of many readers: what was fetched is cached, or counted as not cached."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Mount, make_files, settle
from tests.load import fork
from tests.processes import stop

MakeMount = Callable[..., Mount]
FILES = 1500
READERS = 32


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    root = tmp_path_factory.mktemp("many") / "source"
    paths = make_files(root, FILES, (500, 4000), 20)
    settle()
    return root, paths


def read_all(root: Path, paths: list[Path]) -> None:
    """Each file by one of the reader processes, which start together."""
    barrier = fork.Barrier(READERS)

    def read(part: list[Path]) -> None:
        barrier.wait(60)
        for path in part:
            fd = os.open(root / path, os.O_RDONLY)
            os.read(fd, 1 << 20)
            os.close(fd)

    processes = [fork.Process(target=read, args=(paths[number::READERS],)) for number in range(READERS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * READERS


@pytest.mark.promise("TE-3")
def test_after_a_first_epoch_of_many_readers_the_source_is_left_alone(
    mount: MakeMount, many: tuple[Path, list[Path]]
) -> None:
    source, paths = many
    m = mount(source)
    read_all(m.path, paths)
    first = m.flush()
    assert first["cached_files"] == FILES, first
    m.drop_caches()
    read_all(m.path, paths)
    second = m.flush()
    assert (second["source_ops"], second["skipped_admissions"]) == (first["source_ops"], 0)


@pytest.mark.fastpath
def test_data_that_arrive_before_the_daemon_has_handled_the_first_open_are_cached(
    mount: MakeMount, many: tuple[Path, list[Path]]
) -> None:
    """The fast path answers first opens by itself. A busy daemon receives the reports of data before those OPENs."""
    source, paths = many
    part = paths[:900]
    m = mount(source, "--attr-timeout", "60")
    for path in part:
        os.stat(m.path / path)
    stop(m.pid)
    # In any case after a while: the kernel may have dropped a name, which only the daemon can look up.
    going_on = threading.Timer(4, os.kill, (m.pid, signal.SIGCONT))
    going_on.start()
    try:
        for path in part:
            assert (m.path / path).read_bytes() == (source / path).read_bytes()
    finally:
        going_on.cancel()
        os.kill(m.pid, signal.SIGCONT)
    status = m.flush()
    assert (status["cached_files"], status["skipped_admissions"]) == (len(part), 0)

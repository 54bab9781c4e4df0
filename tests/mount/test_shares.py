"""Two users who ask for one thing: whose share pays (hazard 31)."""

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from daemon.wiring import SOURCE_SLOTS
from tests.conftest import Mount, settle, wait_for
from tests.crowds import (
    GREEDY,
    OTHER,
    PROMPT_S,
    Crowd,
    Waiting,
    directory,
    memory_of,
    opened,
    prompt,
)
from tests.processes import stop

MakeMount = Callable[..., Mount]
pytestmark = pytest.mark.alone


@pytest.mark.promise("FA-2")
@pytest.mark.fastpath  # without it the kernel asks for one listing of a directory at a time
@pytest.mark.parametrize("arguments", [["--read-only"], ["--attr-timeout", "60"]], ids=["read-only", "read-write"])
def test_a_listing_that_another_user_asked_for_first_does_not_wait_for_that_users_share(
    mount: MakeMount, source: Path, faulty: tuple[Path, Path], waiting: Waiting, arguments: list[str]
) -> None:
    """Regression: a user who joined a listing waited in the queue of the user who had begun it."""
    served, faults = faulty
    for number in range(100):
        (source / f"d3/{number}").mkdir()
        (source / f"d3/{number}/hangs").write_bytes(b"1")
    settle()
    m = mount(served, *arguments, "--source-timeout", "25")
    for number in range(100):
        os.stat(m.path / f"d3/{number}")
    # A listing by an open descriptor needs no check of permissions before.
    with directory(m.path / "d3") as fd, opened([m.path / "d1"] * 2) as listed:

        def names(number: int) -> list[str]:
            return sorted(os.listdir(listed[number]))

        (faults / "hang").write_text("hangs")
        crowd = Crowd(GREEDY, [lambda n=n: os.stat(f"{n}/hangs", dir_fd=fd) for n in range(100)])  # type: ignore[misc]
        wait_for(lambda: waiting(served), lambda count: count >= SOURCE_SLOTS)  # all that GREEDY may have
        wait_for(lambda: waiting(m), lambda count: count >= 100)
        first = Crowd(GREEDY, [partial(names, 0)])
        wait_for(lambda: waiting(m), lambda count: count >= 101)
        with prompt(2 * PROMPT_S):
            assert Crowd(OTHER, [partial(names, 1)]).join() == [sorted(os.listdir(source / "d1"))]
        assert first.join() == [sorted(os.listdir(source / "d1"))]
        assert not crowd.results
        (faults / "hang").unlink()
        crowd.join()


@pytest.mark.promise("FA-2")
@pytest.mark.fastpath
@pytest.mark.parametrize("arguments", [["--read-only"], ["--attr-timeout", "60"]], ids=["read-only", "read-write"])
@pytest.mark.parametrize("operation", ["readdir", "read"])
def test_two_users_who_ask_for_one_thing_at_once_each_count_for_themselves(
    mount: MakeMount, source: Path, faulty: tuple[Path, Path], waiting: Waiting, operation: str, arguments: list[str]
) -> None:
    """Regression: a table by inode held the owner of a passed request, and the last owner counted for both."""
    served, faults = faulty
    for number in range(100):
        (source / f"d3/{number}").mkdir()
        (source / f"d3/{number}/hangs").write_bytes(b"1")
    large = source / "d1/large"
    large.write_bytes(bytes(8 << 20) + b"end")
    settle()
    m = mount(served, *arguments, "--cache", "metadata", "--source-timeout", "25")
    for number in range(100):
        os.stat(m.path / f"d3/{number}")
    path, expected = (m.path / "d1", sorted(os.listdir(large.parent)))  # type: tuple[Path, object]
    if operation == "read":
        path, expected = m.path / "d1/large", b"end"
    with directory(m.path / "d3") as fd, opened([path, path]) as fds, memory_of(m) as memory:

        def ask(number: int) -> object:
            return sorted(os.listdir(fds[number])) if operation == "readdir" else os.pread(fds[number], 9, number << 23)

        def passed_on() -> int:
            return memory.passed().get(operation, 0)

        (faults / "hang").write_text("hangs")
        crowd = Crowd(GREEDY, [lambda n=n: os.stat(f"{n}/hangs", dir_fd=fd) for n in range(100)])  # type: ignore[misc]
        wait_for(lambda: waiting(served), lambda count: count >= SOURCE_SLOTS)  # all that GREEDY may have
        before = passed_on()
        stop(m.pid)  # it finds both requests when it goes on
        try:
            other = Crowd(OTHER, [partial(ask, 1)])
            wait_for(passed_on, lambda count: count == before + 1)
            greedy = Crowd(GREEDY, [partial(ask, 0)])
            wait_for(passed_on, lambda count: count == before + 2)
        finally:
            os.kill(m.pid, signal.SIGCONT)
        with prompt(2 * PROMPT_S):
            assert other.join() == [expected]
        assert not crowd.results
        (faults / "hang").unlink()
        assert greedy.join() == [expected if operation == "readdir" else bytes(9)]
        crowd.join()


@pytest.mark.promise("FA-2")
@pytest.mark.fastpath
def test_a_fetch_that_two_users_wait_for_takes_the_first_share_that_has_room(
    mount: MakeMount, source: Path, faulty: tuple[Path, Path], waiting: Waiting
) -> None:
    """Regression: a fetch waited for the share of the user who had begun it, unless another's had room at once."""
    served, faults = faulty
    both = os.urandom(128 << 10)  # fetched whole
    (source / "d0/both").write_bytes(both)
    for number in range(60):
        (source / f"d1/hangs-{number}").write_bytes(b"1")
        (source / f"d2/stalls-{number}").write_bytes(b"1")
    settle()
    m = mount(served, "--read-only", "--fetch-threads", "8", "--source-timeout", "40")
    names = [f"d1/hangs-{n}" for n in range(60)] + [f"d2/stalls-{n}" for n in range(60)]
    with opened([m.path / name for name in names]) as fds, opened([m.path / "d0/both"] * 2) as shared:
        (faults / "hang").write_text("hangs\nstalls")
        crowd = Crowd(GREEDY, [partial(os.pread, fd, 9, 0) for fd in fds[:60]])
        wait_for(lambda: waiting(m), lambda count: count == 60)
        first = Crowd(GREEDY, [partial(os.pread, shared[0], 9, 0)])
        wait_for(lambda: waiting(m), lambda count: count == 61)
        others = Crowd(OTHER, [partial(os.pread, fd, 9, 0) for fd in fds[60:]])
        wait_for(lambda: waiting(m), lambda count: count == 121)
        second = Crowd(OTHER, [partial(os.pread, shared[1], 9, 64 << 10)])
        wait_for(lambda: waiting(m), lambda count: count == 122)
        assert not second.results and not others.results
        (faults / "hang").write_text("hangs")
        with prompt(2 * PROMPT_S):
            assert second.join() == [both[64 << 10 :][:9]]
            assert first.join() == [both[:9]]
        assert others.join() == [b"1"] * 60
        assert not crowd.results
        (faults / "hang").unlink()
        assert crowd.join() == [b"1"] * 60

"""Processes that a daemon starts."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import trio

from cachefs.system import children, syscalls
from cachefs.system.descriptors import closing

LIST = "import os, sys; os.write(int(sys.argv[1]), ' '.join(sorted(os.listdir('/proc/self/fd'))).encode())"


def descriptors_of_child(*others: int) -> tuple[list[int], set[int]]:
    """(the numbers that it got these by, all that it has)"""
    got: list[int] = []
    read, write = os.pipe()
    with closing(read):
        with closing(write):

            def command(numbers: object) -> list[str]:
                got[:] = numbers  # type: ignore[assignment, misc]
                return [sys.executable, "-c", LIST, str(got[0])]

            process = children.start(command, [write, *others], stderr=subprocess.DEVNULL)
        trio.run(children.wait, process)
        assert process.returncode == 0
        found = set(map(int, os.read(read, 4096).split()))
    return got, found


@pytest.fixture(params=["a daemon", "an old kernel", "no daemon"])
def kept(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The numbers that are kept."""

    def refused(_: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    with ExitStack() as stack:
        places = [stack.enter_context(closing(os.open(os.devnull, os.O_RDONLY))) for _ in range(5)]
        monkeypatch.setattr(children, "_kept", [] if request.param == "no daemon" else places)
        if request.param == "an old kernel":
            monkeypatch.setattr(syscalls, "unshare_descriptors_from", refused)
        yield places
        assert {os.readlink(f"/proc/self/fd/{place}") for place in places} == {os.devnull}


def test_a_process_has_the_descriptors_that_it_was_given(tmp_path: Path, kept: list[int]) -> None:
    with open(tmp_path / "file", "w") as given, open(tmp_path / "other", "w") as other:
        numbers, found = descriptors_of_child(given.fileno())
        assert len(found - {0, 1, 2, *numbers}) == 1, "other than that of the list itself"
        assert found >= set(numbers)
        for file in (given, other):
            os.fstat(file.fileno())  # still open here


def test_stderr_is_the_descriptor_that_was_given(tmp_path: Path, kept: list[int]) -> None:
    with open(tmp_path / "log", "w") as log:
        process = children.start(lambda _: ["/bin/sh", "-c", "echo word >&2"], [], stderr=log.fileno())
    trio.run(children.wait, process)
    assert (tmp_path / "log").read_text() == "word\n"


def test_no_signal_is_handled_by_the_thread_that_starts_a_process(
    kept: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handler would write to a descriptor that the thread does not have: the event loop would not wake up."""
    masks: list[set[int]] = []
    popen = subprocess.Popen

    def noted(*arguments: Any, **options: Any) -> Any:
        masks.append({int(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, ())})
        return popen(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", noted)
    process = children.start(lambda _: ["/bin/true"], [], stderr=None)
    trio.run(children.wait, process)
    assert masks == [{*signal.valid_signals()} - {signal.SIGKILL, signal.SIGSTOP} if children._kept else set()]
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_program_that_does_not_exist_is_an_error(kept: list[int]) -> None:
    with pytest.raises(FileNotFoundError):
        children.start(lambda _: ["/nothing"], [], stderr=None)


def test_descriptors_that_are_opened_later_have_high_numbers() -> None:
    """The kernel copies the lowest 64 for a moment, and closes these copies."""
    script = "from cachefs.system import children; import os; children.keep_numbers(); print(os.dup(0))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) == 64

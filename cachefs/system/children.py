"""Starting a process from a daemon that has files of a FUSE filesystem open for writing.

A process begins with copies of all descriptors of its parent, and closes them before its program runs. For each file on
FUSE that is open for writing this sends a FLUSH, and the parent waits in vfork until all are answered (hazard 92): a
source that hangs would stop the daemon. So the process is started by a thread with a table of descriptors of its own,
which close_range(2) with CLOSE_RANGE_UNSHARE makes without copies of those from some number on. It rounds that number
up to 64. So a daemon keeps the numbers below 64, and what a process needs gets the first of them for that time.
"""

import errno
import gc
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import trio
from outcome import Outcome, capture

from cachefs.system import syscalls
from cachefs.system.descriptors import closing
from cachefs.system.threads import refusal_is_shortage

_LEAST = 64
_TOO_OLD = frozenset({errno.ENOSYS, errno.EINVAL, errno.EPERM})
"""Errors of a kernel before Linux 5.9, or of a filter of system calls."""

_kept: list[int] = []
"""Numbers that lead to /dev/null, and to what a process needs while it is started."""


def keep_numbers() -> None:
    """At the start of a daemon: let each descriptor that is opened from now on have a number of at least 64."""
    while (fd := os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)) < _LEAST:
        _kept.append(fd)
    os.close(fd)


def start(
    command: Callable[[Sequence[int]], Sequence[str]],
    fds: Sequence[int],
    *,
    stderr: int | None,
    executable: str | None = None,
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own. Raises OSError. Not from two threads at a time.

    `command`: makes the command line from the numbers that `fds` have in the process. `stderr`: a descriptor, or
    `subprocess.DEVNULL`; None: that of the daemon. The program begins with all signals blocked.
    """
    run = partial(_start, command, executable)
    needed = [*fds, *([stderr] if stderr is not None and stderr >= 0 else [])]
    if not _kept or len(needed) > len(_kept):  # this is no daemon
        return run(fds, stderr, None)
    places = _kept[: len(needed)]
    results: list[Outcome[subprocess.Popen[bytes]]] = []
    above = (places or _kept)[-1] + 1
    in_places = partial(run, places[: len(fds)], places[len(fds)] if len(needed) > len(fds) else stderr, above)
    thread = threading.Thread(target=lambda: results.append(capture(in_places)))
    with _no_finalizers(), _held(needed, places):
        with refusal_is_shortage():
            thread.start()
        thread.join()
    return results[0].unwrap()


def _start(
    command: Callable[[Sequence[int]], Sequence[str]],
    executable: str | None,
    fds: Sequence[int],
    stderr: int | None,
    above: int | None,
) -> subprocess.Popen[bytes]:
    """`above`: the first number that the process does not need. None: that is not known."""
    if above is not None:
        # A handler of a signal writes to a descriptor of the main thread (`signal.set_wakeup_fd`). The process begins
        # with this mask, and must reset it.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            syscalls.unshare_descriptors_from(above)
        except OSError as error:
            if error.errno not in _TOO_OLD:
                raise
    return subprocess.Popen(
        command(fds),
        executable=executable,
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        cwd="/",
        start_new_session=True,
    )


@contextmanager
def _held(fds: Sequence[int], places: Sequence[int]) -> Iterator[None]:
    """These descriptors have these numbers, too, while the block runs."""
    with closing(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)) as nothing:
        try:
            for fd, place in zip(fds, places, strict=True):
                os.dup2(fd, place, inheritable=False)
            yield
        finally:
            for place in places:
                os.dup2(nothing, place, inheritable=False)


async def wait(process: subprocess.Popen[bytes]) -> None:
    """Return when it has ended."""
    if process.poll() is not None:
        return
    with closing(os.pidfd_open(process.pid)) as pidfd:
        await trio.lowlevel.wait_readable(pidfd)
    process.wait()


@contextmanager
def _no_finalizers() -> Iterator[None]:
    """The finalizer of an object of another thread would close a descriptor in the wrong table."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

"""Starting a process from a daemon that has files of a FUSE filesystem open for writing.

A process begins with copies of all descriptors of its parent, and closes them before its program runs. For each file on
FUSE that is open for writing this sends a FLUSH, and the parent waits in vfork until all are answered (hazard 92): a
source that hangs would stop the daemon. So the process is started by a thread with a table of descriptors of its own.
close_range(2) with CLOSE_RANGE_UNSHARE makes that table without copies of the others, and pidfd_getfd(2) gets those
into it that the process needs. The kernel rounds the size of the table up to 64, so no file may have a lower number.
"""

import errno
import gc
import os
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import trio
from outcome import Outcome, capture

from cachefs.system import syscalls
from cachefs.system.descriptors import closing
from cachefs.system.threads import is_refused

_FIRST = 3
"""After stdin, stdout and stderr."""
_LEAST = 64
_TOO_OLD = frozenset({errno.ENOSYS, errno.EINVAL, errno.EPERM})
"""Errors of a kernel before Linux 5.9, or of a filter of system calls."""


def reserve_numbers() -> None:
    """At the start of a daemon: let each descriptor that is opened from now on have a number of at least 64."""
    fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    while fd < _LEAST:
        fd = os.dup(fd)
    os.close(fd)


def start(
    command: Callable[[Sequence[int]], Sequence[str]],
    fds: Sequence[int],
    *,
    stderr: int | None,
    executable: str | None = None,
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own. Raises OSError.

    `command`: makes the command line from the numbers that `fds` have in the process. `stderr`: a descriptor, or
    `subprocess.DEVNULL`; None: that of the daemon.
    """
    results: list[Outcome[subprocess.Popen[bytes]]] = []
    run = partial(_start, command, fds, stderr=stderr, executable=executable)
    thread = threading.Thread(target=lambda: results.append(capture(run)))
    with _no_finalizers():
        try:
            thread.start()
        except RuntimeError as error:
            if not is_refused(error):
                raise
            raise OSError(errno.EAGAIN, str(error)) from error
        thread.join()
    return results[0].unwrap()


def _start(
    command: Callable[[Sequence[int]], Sequence[str]],
    fds: Sequence[int],
    *,
    stderr: int | None,
    executable: str | None,
) -> subprocess.Popen[bytes]:
    try:
        syscalls.unshare_descriptors_from(_FIRST)
    except OSError as error:
        if error.errno not in _TOO_OLD:
            raise
    else:
        process = os.pidfd_open(os.getpid())
        fds = [syscalls.pidfd_getfd(process, fd) for fd in fds]
        if stderr is not None and stderr >= 0:
            stderr = syscalls.pidfd_getfd(process, stderr)
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

"""Settings of the daemon's process."""

import contextlib
import ctypes
import os
import resource
import signal
import sys
from collections.abc import Sequence

import setproctitle

from cachefs.printable import one_line
from daemon.service import limits

SWITCH_INTERVAL_S = 0.0005
"""How long the trio thread waits for the interpreter lock of write-behind. Python's 5 ms would make look-ups slow."""

_FIRST_PASSED = 3
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def prepare() -> list[str]:
    """Called before anything else in the daemon. Returns warnings. Raises CacheFsError if it cannot work."""
    # Keep freed memory: file contents are allocated and freed by the megabyte, and a page fault costs more than the
    # copy. One arena besides the main one: the trio thread frees the payload that a fetch thread allocates.
    libc = ctypes.CDLL(None)
    for parameter, value in ((_M_ARENA_MAX, 2), (_M_MMAP_THRESHOLD, 2 << 20), (_M_TRIM_THRESHOLD, 64 << 20)):
        libc.mallopt(parameter, value)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    return limits.reset()


def leave_starter() -> None:
    """Undo inherited settings that do not suit a daemon. `mount` and `restart` begin with this."""
    _open_standard_streams()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if ignored, the exit status of a child is lost
    _close_inherited()


def _open_standard_streams() -> None:
    """Open those that are closed: otherwise the next file to be opened would be used as a standard stream."""
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(fd)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
            os.set_inheritable(null, True)
            setattr(sys, name, os.fdopen(null, mode, closefd=False))


def _close_inherited() -> None:
    """Close files that the starter left open: a lock on one would last as long as the mount.

    Keeps the standard streams and what the service manager passes (LISTEN_FDS). Files that this process has opened are
    close-on-exec, and so cannot be inherited ones.
    """
    passed = 0
    if os.environ.get("LISTEN_PID") == str(os.getpid()):
        passed = int(os.environ.get("LISTEN_FDS", "0"))
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd < _FIRST_PASSED + passed:
            continue
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            if os.get_inheritable(fd):
                os.close(fd)


def command_line() -> tuple[str, ...]:
    """Of this process, as ps shows it."""
    with open("/proc/self/cmdline", "rb") as file:
        return tuple(map(os.fsdecode, file.read().rstrip(b"\0").split(b"\0")))


def show_command(command: Sequence[str]) -> None:
    """Make ps show another command for this process."""
    if command:  # there is none in the configuration of an older version
        setproctitle.setproctitle(one_line(" ".join(command)))  # it accepts UTF-8 only


def has_descriptors_of(pid: int) -> bool:
    """Raise the limit of open files to that of a daemon, which a child of this process will replace.

    False: the limit is too low for the files that are open there, and cannot be raised.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        theirs = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    except OSError:  # not visible to this process
        return True
    if hard >= theirs[1]:
        return True
    with contextlib.suppress(OSError, ValueError):  # needs CAP_SYS_RESOURCE
        resource.setrlimit(resource.RLIMIT_NOFILE, theirs)
        return True
    return len(os.listdir(f"/proc/{pid}/fd")) < hard // 2

"""What the daemon asks of its own process."""

import contextlib
import ctypes
import os
import resource
import signal
import sys

SWITCH_INTERVAL_S = 0.0005
"""How long the trio thread waits for the interpreter that write-behind has; Python's own 5 ms are a slow look-up."""

_FIRST_PASSED = 3


def prepare() -> None:
    """Before anything runs that needs it."""
    tune_malloc()
    raise_limits()
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def leave_starter() -> None:
    """Undo inherited settings that do not suit a daemon. `mount` and `restart` begin with it."""
    _open_standard_streams()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if ignored, nobody hears how a child has ended
    _close_inherited()


def _open_standard_streams() -> None:
    """Where one is closed, the next file to be opened would be taken for it."""
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(fd)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
            os.set_inheritable(null, True)
            setattr(sys, name, os.fdopen(null, mode, closefd=False))


def _close_inherited() -> None:
    """Close what the starter left open: a lock that it holds would be held as long as the mount lasts.

    Kept are the standard streams and what the service manager passes (LISTEN_FDS). What this process has opened
    itself is close-on-exec, and so cannot have been inherited.
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


def raise_limits() -> None:
    """Of open files, and of the size of files: the kernel ends a process whose files grow beyond that."""
    for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE):
        _, hard = resource.getrlimit(limit)
        resource.setrlimit(limit, (hard, hard))


def has_descriptors_of(pid: int) -> bool:
    """May this process have as many descriptors as that one, which it is to follow? If not, and if it can, it may then.

    False: it could not, and that one needs more than it may have.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        theirs = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    except OSError:  # it cannot be seen from here
        return True
    if hard >= theirs[1]:
        return True
    with contextlib.suppress(OSError, ValueError):  # not without CAP_SYS_RESOURCE
        resource.setrlimit(resource.RLIMIT_NOFILE, theirs)
        return True
    return len(os.listdir(f"/proc/{pid}/fd")) < hard // 2


def tune_malloc() -> None:
    """Keep freed memory. File contents come and go by the megabyte, and touching new pages costs more than the copy.

    One arena more than the main one: the payload that a fetch thread allocates is freed by the trio thread.
    """
    libc = ctypes.CDLL(None)
    for parameter, value in ((_M_ARENA_MAX, 2), (_M_MMAP_THRESHOLD, 2 << 20), (_M_TRIM_THRESHOLD, 64 << 20)):
        libc.mallopt(parameter, value)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8

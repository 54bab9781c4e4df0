"""What the daemon asks of its own process."""

import contextlib
import ctypes
import os
import resource
import sys

SWITCH_INTERVAL_S = 0.0005
"""How long the trio thread waits for the interpreter that write-behind has; Python's own 5 ms are a slow look-up."""

_FIRST_PASSED = 3


def prepare() -> None:
    """Before anything runs that needs it."""
    tune_malloc()
    raise_descriptor_limit()
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def close_inherited() -> None:
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


def raise_descriptor_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def tune_malloc() -> None:
    """Keep freed memory. File contents come and go by the megabyte, and touching new pages costs more than the copy.

    One arena more than the main one: the payload that a fetch thread allocates is freed by the trio thread.
    """
    libc = ctypes.CDLL(None)
    for parameter, value in ((_M_ARENA_MAX, 2), (_M_MMAP_THRESHOLD, 2 << 20), (_M_TRIM_THRESHOLD, 64 << 20)):
        libc.mallopt(parameter, value)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8

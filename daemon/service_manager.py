"""The service manager, as far as a mount talks to it: sd_notify(3), sd_watchdog_enabled(3). Silent without one."""

import array
import contextlib
import os
import socket
import time
from collections.abc import Sequence


def is_there() -> bool:
    return bool(os.environ.get("NOTIFY_SOCKET"))


def notify(*assignments: str, fds: Sequence[int] = ()) -> None:
    """Send VARIABLE=value lines, with descriptors for the store."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager, contextlib.suppress(OSError):
        manager.connect(address)
        manager.sendmsg(["\n".join(assignments).encode()], ancillary)


def reloading() -> None:
    notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")


def watchdog_s() -> float | None:
    """How often WATCHDOG=1 must be said at least. None: nobody waits for it."""
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    microseconds = os.environ.get("WATCHDOG_USEC", "")
    return int(microseconds) / 1e6 if microseconds.isdigit() and int(microseconds) else None

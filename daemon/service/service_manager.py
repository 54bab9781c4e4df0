"""The protocol of the service manager: sd_notify(3), sd_watchdog_enabled(3). Without one, nothing is sent."""

import array
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Sequence

import trio

from cachefs.printable import one_line
from daemon.service.watchdog import Probe

log = logging.getLogger(__name__)

STATUS_LINE_S = 10.0
ANSWER_TIMEOUT_S = 10.0


def is_there() -> bool:
    return bool(os.environ.get("NOTIFY_SOCKET"))


def notify(*assignments: str, fds: Sequence[int] = ()) -> None:
    """Send lines VARIABLE=value, and descriptors for the store."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager, contextlib.suppress(OSError):
        manager.connect(address)
        manager.sendmsg(["\n".join(map(one_line, assignments)).encode()], ancillary)


def watchdog_s() -> float | None:
    """The longest interval between two WATCHDOG=1. None: there is no watchdog."""
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    microseconds = os.environ.get("WATCHDOG_USEC", "")
    return int(microseconds) / 1e6 if microseconds.isdigit() and int(microseconds) else None


async def announce(probe: Probe, status_line: Callable[[], str], ready: Callable[[], None]) -> None:
    """Report that the mount is ready when it answers, then that it still does, until cancelled."""
    while not await probe.answers(ANSWER_TIMEOUT_S):
        log.warning("the mount does not answer yet")
        await trio.sleep(1)
    ready()
    notify("READY=1", f"STATUS={status_line()}")
    limit_s = watchdog_s()
    while True:
        await trio.sleep(min(STATUS_LINE_S, limit_s / 3) if limit_s else STATUS_LINE_S)
        if limit_s is None:
            notify(f"STATUS={status_line()}")
        elif await probe.answers(limit_s):
            notify("WATCHDOG=1", f"STATUS={status_line()}")
        else:
            log.error("the mount does not answer: the service manager will replace this process")
            notify(f"STATUS={status_line()}, which does not answer")

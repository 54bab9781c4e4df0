"""The service manager's descriptor store: what a mount is made of survives even the death of both processes.

sd_notify(3): FDSTORE=1 hands descriptors over, with FDPOLL=0: they are not to be dropped when they poll as hung up.
They come back to the next start as LISTEN_FDS, with their names.
"""

import array
import contextlib
import os
import socket

from cachefs.fastpath.launcher import Inheritance
from cachefs.fastpath.shared import Shared

_FIRST = 3
_NAMES = ("device", "shared", "source", "listener")


def _notify(message: str, fds: tuple[int, ...] = ()) -> None:
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager, contextlib.suppress(OSError):
        manager.connect(address)
        manager.sendmsg([message.encode()], ancillary)


def put(held: Inheritance) -> None:
    """Store everything but the blob, which is a file."""
    for name, fd in zip(_NAMES, (held.device, held.shared.fd, held.source, held.listener.fileno()), strict=True):
        _notify(f"FDSTORE=1\nFDPOLL=0\nFDNAME=cachefs-{name}", (fd,))


def remove() -> None:
    """The mount is gone."""
    for name in _NAMES:
        _notify(f"FDSTOREREMOVE=1\nFDNAME=cachefs-{name}")


def take(blob: int = -1) -> Inheritance | None:
    """What a predecessor stored. None if there is nothing, or not all of it."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return None
    names = os.environ.get("LISTEN_FDNAMES", "").split(":")
    fds = {name.removeprefix("cachefs-"): _FIRST + index for index, name in enumerate(names)}
    if not fds.keys() >= set(_NAMES):
        return None
    for fd in fds.values():
        os.set_inheritable(fd, False)
    try:
        shared = Shared(fds["shared"])
    except ValueError:
        return None
    return Inheritance(fds["device"], shared, fds["source"], blob, socket.socket(fileno=fds["listener"]))

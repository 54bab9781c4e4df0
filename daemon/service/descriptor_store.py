"""The service manager's descriptor store: what a mount is made of survives even the death of both processes.

sd_notify(3): FDSTORE=1 hands descriptors over, with FDPOLL=0: they are not to be dropped when they poll as hung up.
They come back to the next start as LISTEN_FDS, with their names.
"""

import os
import socket

from cachefs.fastpath.mount_descriptors import MountDescriptors
from cachefs.fastpath.shared_memory import Shared
from daemon.service.service_manager import notify

_FIRST = 3
_NAMES = ("device", "shared", "source", "listener")


def put(held: MountDescriptors) -> None:
    """Store everything but the blob, which is a file."""
    for name, fd in zip(_NAMES, (held.device, held.shared.fd, held.source, held.listener.fileno()), strict=True):
        notify("FDSTORE=1", "FDPOLL=0", f"FDNAME=cachefs-{name}", fds=(fd,))


def put_source(held: MountDescriptors) -> None:
    """It is another one now."""
    notify("FDSTOREREMOVE=1", "FDNAME=cachefs-source")
    notify("FDSTORE=1", "FDPOLL=0", "FDNAME=cachefs-source", fds=(held.source,))


def remove() -> None:
    """The mount is gone."""
    for name in _NAMES:
        notify("FDSTOREREMOVE=1", f"FDNAME=cachefs-{name}")


def take(blob: int = -1) -> MountDescriptors | None:
    """What a predecessor stored. None if there is nothing, or not all of it. Raises OtherVersion."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return None
    names = os.environ.get("LISTEN_FDNAMES", "").split(":")
    fds = {name.removeprefix("cachefs-"): _FIRST + index for index, name in enumerate(names)}
    if not fds.keys() >= set(_NAMES):
        return None
    for fd in fds.values():
        os.set_inheritable(fd, False)
    shared = Shared(fds["shared"])
    return MountDescriptors(fds["device"], shared, fds["source"], blob, socket.socket(fileno=fds["listener"]))

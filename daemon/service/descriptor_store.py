"""The descriptor store of the service manager: the descriptors of a mount survive even the death of both processes.

sd_notify(3): FDSTORE=1 stores descriptors; FDPOLL=0 keeps them when they poll as hung up. The next start receives them
as LISTEN_FDS, with their names.
"""

import os
import socket

from cachefs.fastpath.mount_descriptors import MountDescriptors
from cachefs.fastpath.shared_memory import Shared
from daemon.service.service_manager import notify

_FIRST = 3
_NAMES = ("device", "shared", "source", "listener")


def put(descriptors: MountDescriptors) -> None:
    """Store all descriptors except the blob, which is a file."""
    fds = (descriptors.device, descriptors.shared.fd, descriptors.source, descriptors.listener.fileno())
    for name, fd in zip(_NAMES, fds, strict=True):
        notify("FDSTORE=1", "FDPOLL=0", f"FDNAME=cachefs-{name}", fds=(fd,))


def put_source(descriptors: MountDescriptors) -> None:
    """Replace the stored source."""
    notify("FDSTOREREMOVE=1", "FDNAME=cachefs-source")
    notify("FDSTORE=1", "FDPOLL=0", "FDNAME=cachefs-source", fds=(descriptors.source,))


def remove() -> None:
    """Remove the descriptors of a mount that is gone."""
    for name in _NAMES:
        notify("FDSTOREREMOVE=1", f"FDNAME=cachefs-{name}")


def is_filled() -> bool:
    """Has the service manager passed descriptors of a predecessor to this process?"""
    return os.environ.get("LISTEN_PID") == str(os.getpid()) and os.environ.get("LISTEN_FDS", "0") != "0"


def take() -> MountDescriptors | None:
    """The descriptors of a predecessor, without the blob. None if any is missing. Raises OtherVersion."""
    if not is_filled():
        return None
    names = os.environ.get("LISTEN_FDNAMES", "").split(":")
    fds = {name.removeprefix("cachefs-"): _FIRST + index for index, name in enumerate(names)}
    if not fds.keys() >= set(_NAMES):
        return None
    for fd in fds.values():
        os.set_inheritable(fd, False)
    shared, listener = Shared(fds["shared"]), socket.socket(fileno=fds["listener"])
    return MountDescriptors(fds["device"], shared, fds["source"], -1, listener)

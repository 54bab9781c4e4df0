"""The descriptors of a mount, which outlive each daemon and each fast path.

Daemon and fast path have the same ones open, and so does the descriptor store of a service manager. When the daemon is
killed, its successor asks the fast path for them (`MountDescriptors.ask`).
"""

import os
import select
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cachefs.contract.messages import Message
from cachefs.fastpath.connection import HEAD, send
from cachefs.fastpath.shared_memory import OtherVersion, Shared
from cachefs.system.unix_socket import socket_address

_HANDOVER_TIMEOUT_S = 2.0  # a socket that only the descriptor store has open accepts connections and never answers


@dataclass(slots=True)
class MountDescriptors:
    """Open in the daemon and in the fast path."""

    device: int
    shared: Shared
    source: int
    blob: int
    listener: socket.socket
    pid: int = 0
    """Of the running fast path; 0: none is running."""

    @classmethod
    def ask(cls, path: Path) -> "MountDescriptors | None":
        """Ask the fast path that outlived its daemon. None: none answers. Raises OtherVersion."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(_HANDOVER_TIMEOUT_S)
            try:
                with socket_address(path) as address:
                    connection.connect(address)
                send(connection, Message.HANDOVER)
                data, fds, _, _ = socket.recv_fds(connection, HEAD.size, 8)
            except OSError:
                return None
        if len(fds) != 5:
            return None
        kind, _, pid, _ = HEAD.unpack(data)
        assert kind == Message.HANDED_OVER
        return cls.of(fds, pid)

    @classmethod
    def of(cls, fds: Sequence[int], pid: int = 0) -> "MountDescriptors":
        """`fds`: /dev/fuse, shared memory, source, blob, listener, which belong to it now. Raises OtherVersion."""
        try:
            shared = Shared(fds[1])
        except OtherVersion:
            for fd in fds:
                os.close(fd)
            raise
        return cls(fds[0], shared, fds[2], fds[3], socket.socket(fileno=fds[4]), pid)

    def close(self) -> None:
        self.shared.close()
        self.listener.close()
        os.close(self.device)


def is_unmounted(device: int) -> bool:
    """Has the kernel closed this /dev/fuse connection?"""
    poll = select.poll()
    poll.register(device, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))

"""The hand-over of open source files from a daemon to its successor, as descriptors.

An open file that has lost its name cannot be opened again by its path. So a daemon that receives `leave` sends the
descriptors over the connection of that request, after its last call has been answered. Files whose descriptors do not
arrive are opened again by path.

The successor receives them when it has started its other processes, which would have copies of them and close those.
For a file that is open for writing that asks a source on FUSE (FLUSH), and waits as long as the source hangs (hazard
92). Until then they lie in the connection.

The receiver uses recvmsg(2) for every byte: a buffered reader would lose descriptors that come with data that it reads
ahead. The kernel never lets one recvmsg(2) read beyond a message with descriptors, so they arrive in the order of the
lines.
"""

import array
import json
import logging
import os
import select
import socket
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

log = logging.getLogger(__name__)

BATCH = 253
"""SCM_MAX_FD, the limit of the kernel for one message."""
SEND_TIMEOUT_S = 10.0
_INTS = array.array("i")


class OpenSource(NamedTuple):
    """A descriptor of the source, and what it is open for."""

    handle: int
    """The handle of the kernel's open file. 0: the descriptor is for reading the data of an immutable file."""
    number: int
    """The inode number."""
    version: int
    """Of the immutable file; 0 if there is a handle."""
    fd: int


class Received(NamedTuple):
    """The open files that a successor has received."""

    opened: Sequence[OpenSource] = ()
    broke_off: bool = False
    """Not all files have arrived."""


class Handed:
    """The open files that a predecessor sends. None: it sends none."""

    def __init__(self, connection: socket.socket | None = None) -> None:
        """`connection`: after the answer to the request, which `read_line` has read. It is closed by `receive`."""
        self._connection = connection
        self._received = Received()
        self._has_come = False

    def make_room(self) -> None:
        """To be called each second until the predecessor has ended: it may send more than the connection holds."""
        if self._has_come:
            self.receive()
        self._has_come = self._connection is not None and bool(select.select([self._connection], [], [], 0)[0])

    def receive(self) -> Received:
        """If the sender dies, or this process reaches its limit of descriptors, the complete entries are returned. May
        be called again."""
        if self._connection is not None:
            with self._connection as connection:
                self._connection, self._received = None, _receive(connection)
        return self._received


def send(connection: socket.socket, opened: Iterable[OpenSource]) -> int:
    """Returns the number of descriptors sent. Raises OSError if the successor does not take them."""
    connection.settimeout(SEND_TIMEOUT_S)
    sent = 0
    waiting = iter(opened)
    while batch := list(islice(waiting, BATCH)):
        line = _line({"descriptors": [each[:-1] for each in batch]})
        fds = array.array("i", [each.fd for each in batch])
        done = connection.sendmsg([line], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        connection.sendall(line[done:])
        sent += len(batch)
    connection.sendall(_line({"sent": sent}))
    return sent


def read_line(connection: socket.socket, most: int) -> bytes:
    """The answer to the request, at most `most` bytes, and nothing of what follows."""
    line = b""
    while not line.endswith(b"\n") and len(line) < most and (data := connection.recv(1)):
        line += data
    return line


def _receive(connection: socket.socket) -> Received:
    fds: list[int] = []
    opened: list[OpenSource] = []
    try:
        for line in _lines(connection, fds):
            message = json.loads(line)
            if "sent" in message:
                return Received(opened)
            entries = message["descriptors"]
            if len(entries) > len(fds):
                break
            for (handle, number, version), fd in zip(entries, fds, strict=False):
                opened.append(OpenSource(handle, number, version, fd))
            del fds[: len(entries)]
    except OSError as error:
        log.debug("the connection to the predecessor failed: %s", error)
    finally:
        for fd in fds:
            os.close(fd)
    return Received(opened, broke_off=True)


def _lines(connection: socket.socket, fds: list[int]) -> Iterator[bytes]:
    """The lines until the connection is closed. Descriptors that come with them are appended to `fds`."""
    waiting = b""
    while True:
        data, ancillary, flags, _ = connection.recvmsg(1 << 16, socket.CMSG_SPACE(BATCH * _INTS.itemsize))
        for level, kind, payload in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds += array.array("i", payload[: len(payload) - len(payload) % _INTS.itemsize])
        if not data or flags & socket.MSG_CTRUNC:
            return
        *whole, waiting = (waiting + data).split(b"\n")
        yield from whole


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"

"""Descriptors of open source files, on their way from a daemon to its successor.

A path does not lead back to a file that is open and has lost its name; only its descriptor does. A daemon that is told
to `leave` sends the descriptors over the connection of that request when its last call has been answered. What does not
arrive is opened again by its path.

The receiver uses recvmsg(2) for every byte: a buffered reader would lose descriptors that come with what it reads
ahead. The kernel never lets one recvmsg(2) read beyond a message with descriptors, so their order is that of the lines.
"""

import array
import json
import logging
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

log = logging.getLogger(__name__)

BATCH = 253
"""SCM_MAX_FD: more the kernel does not take in one message."""
SEND_TIMEOUT_S = 10.0
_INTS = array.array("i")


class OpenSource(NamedTuple):
    """A descriptor of the source, and what is open by it."""

    handle: int
    """What the kernel knows the open file by. 0: this is how the data of an immutable file are read."""
    number: int
    """Of the inode."""
    version: int
    """Of the immutable file; 0 with a handle."""
    fd: int


class Handed(NamedTuple):
    """What a successor has received."""

    opened: Sequence[OpenSource] = ()
    broke_off: bool = False
    """There was more."""


def send(connection: socket.socket, opened: Iterable[OpenSource]) -> int:
    """Returns how many were sent. Raises OSError where the successor does not take them."""
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


def receive(connection: socket.socket, answer: dict[str, Any]) -> Handed:
    """Read the answer to a request, which goes into `answer`, and the descriptors behind it until all have come.

    What has come whole is returned where the sender dies in between, or this process may have no more descriptors.
    Raises OSError, ValueError where there is no answer.
    """
    fds: list[int] = []
    opened: list[OpenSource] = []
    lines = _lines(connection, fds)
    answer.update(json.loads(next(lines, b"")))
    if not answer.get("ok") or not answer.get("descriptors"):
        return Handed()  # a daemon of an older version sends none
    try:
        for line in lines:
            message = json.loads(line)
            if "sent" in message:
                return Handed(opened)
            entries = message["descriptors"]
            if len(entries) > len(fds):
                break
            for (handle, number, version), fd in zip(entries, fds, strict=False):
                opened.append(OpenSource(handle, number, version, fd))
            del fds[: len(entries)]
    except OSError as error:
        log.debug("the connection to the predecessor failed: %s", error)
    finally:
        close_all(fds)
    return Handed(opened, broke_off=True)


def _lines(connection: socket.socket, fds: list[int]) -> Iterator[bytes]:
    """Lines until the other end hangs up. Descriptors that come with them are appended to `fds`."""
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


def close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)

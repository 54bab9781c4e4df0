"""The connection between a daemon and its fast path, and the format of its messages (cachefs/contract/messages.py).

The fast path listens on a socket of type SOCK_SEQPACKET, one packet for each message. A message is a head (type, length
of the data, two numbers a and b), its data, and perhaps descriptors (SCM_RIGHTS). `control.h` has the other end.
"""

import array
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from cachefs.contract.messages import CONTROL, FILLED, Message
from cachefs.data.commit import Filled
from cachefs.store.index.records import PINNED, Extent
from cachefs.system.private_files import bind_socket

MESSAGE_BYTES = 256 << 10
HEAD = CONTROL.codec()
_FILLED = FILLED.codec()


def listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    bind_socket(listener, path)
    listener.listen(4)
    return listener


def send(
    connection: socket.socket, kind: Message, a: int = 0, b: int = 0, fds: tuple[int, ...] = (), data: bytes = b""
) -> None:
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    connection.sendmsg([HEAD.pack(kind, len(data), a, b), data], ancillary)


def parse(data: bytes) -> tuple[Message, int, int, bytes]:
    kind, _, a, b = HEAD.unpack_from(data)
    return Message(kind), a, b, data[HEAD.size :]


def parse_filled(data: bytes) -> Iterator[Filled]:
    """The units that a FILLED message reports."""
    at = 0
    while at < len(data):
        report, inode, offset, version, blob_offset, size, length, count = _FILLED.unpack_from(data, at)
        checksums = struct.unpack_from(f"<{count}Q", data, at + _FILLED.size)
        at += _FILLED.size + 8 * count
        yield Filled(report, inode, offset, Extent(PINNED, length, blob_offset, version, size, checksums))

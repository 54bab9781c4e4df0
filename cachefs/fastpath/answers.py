"""Answers on their way to the kernel: how to wait until it has those that were given so far.

The daemon's answers go through a socket, from which the fast path passes them on; its own threads give answers, too. A
notification takes another way (cachefs/fuse/notifier.py). If it overtook an answer with a former name, the kernel would
take that name over afterwards, and keep it.
"""

import fcntl
import socket
import sys
import termios
import time

import trio

from cachefs.fastpath.shared_memory import Shared

_LOOK_S = 50e-6
_LOOKS = 20
"""In a row, while the daemon gives no other answer: under load there is always one on its way."""


class Answers:
    def __init__(self, shared: Shared, given: socket.socket) -> None:
        """`given`: the end of the socket to which the daemon's answers are written."""
        self._shared = shared
        self._given = given

    async def delivered(self) -> None:
        """Return when the kernel has each answer that was given before this call."""
        by_fastpath = self._shared.served_now()
        while not self._are_taken():  # noqa: ASYNC110  another process takes them, and says nothing
            await trio.sleep(_LOOK_S)
        while by_fastpath:
            await trio.sleep(_LOOK_S)
            by_fastpath &= self._shared.served_now()

    def _are_taken(self) -> bool:
        """Has the fast path taken all answers out of the socket? It takes one when the kernel has it."""
        if self._given.fileno() < 0:  # closed: the mount has ended
            return True
        for _ in range(_LOOKS):
            # SIOCOUTQ, which has the number of TIOCOUTQ: the bytes that were sent and not taken
            if not int.from_bytes(fcntl.ioctl(self._given, termios.TIOCOUTQ, bytes(4)), sys.byteorder):
                return True
            time.sleep(_LOOK_S)
        return False

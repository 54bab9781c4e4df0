"""A daemon that leaves its mount to a successor: with pyfuse3, and a socket in place of the fast path."""

import errno
import multiprocessing
import os
import socket
import struct

import pyfuse3
import trio

from cachefs.fuse.loop import all_read

ROUNDS = 20
"""Where pyfuse3 is terminated at once, about one in four loses a request."""
LOOKUP, INIT, READDIRPLUS = 1, 26, 1 << 13
HEADER, ANSWER = struct.Struct("<IIQQIIIHH"), struct.Struct("<IiQ")


def request(opcode: int, unique: int, body: bytes) -> bytes:
    return HEADER.pack(HEADER.size + len(body), opcode, unique, pyfuse3.ROOT_INODE, 0, 0, 0, 0, 0) + body


def uniques(end: socket.socket) -> list[int]:
    """Of the messages that can be read now."""
    found = []
    end.setblocking(False)
    while True:
        try:
            found.append(ANSWER.unpack_from(end.recv(4096))[2])
        except BlockingIOError:
            return found


class Leaving(pyfuse3.Operations):  # type: ignore[misc]
    """Leaves in the moment in which another request arrives."""

    def __init__(self, kernel: socket.socket) -> None:
        super().__init__()
        self.kernel = kernel
        self.leaves = trio.Event()

    async def lookup(
        self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext | None = None
    ) -> pyfuse3.EntryAttributes:
        if name == b"first":
            self.kernel.send(request(LOOKUP, 6, b"second\0"))
            await trio.lowlevel.checkpoint()  # another task waits for the socket, and is woken by the next one
            self.leaves.set()
        raise pyfuse3.FUSEError(errno.ENOENT)


async def leave() -> tuple[list[int], list[int]]:
    """(what was answered, what is left to a successor)"""
    kernel, daemon = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    served = os.dup(daemon.fileno())
    with kernel, daemon:
        operations = Leaving(kernel)
        pyfuse3.init(operations, f"/dev/fd/{served}", {"fsname=test"})
        kernel.send(request(INIT, 2, struct.pack("<IIII", 7, 31, 0, READDIRPLUS)))
        kernel.send(request(LOOKUP, 4, b"first\0"))

        async def stop_reading() -> None:
            await operations.leaves.wait()
            await all_read(served)
            pyfuse3.terminate()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(stop_reading)
            await pyfuse3.main(min_tasks=4, max_tasks=16)
        pyfuse3.close(unmount=False)
        return sorted(uniques(kernel)), uniques(daemon)


def test_no_request_is_lost_when_a_mount_changes_hands() -> None:
    """Each is answered, or left in the socket."""
    with multiprocessing.get_context("spawn").Pool(1) as process:  # pyfuse3 has one session in a process
        assert process.apply(in_rounds) == [([2, 4, 6], [])] * ROUNDS


def in_rounds() -> list[tuple[list[int], list[int]]]:
    return [trio.run(leave) for _ in range(ROUNDS)]

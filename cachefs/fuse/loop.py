"""pyfuse3's loop, and its end without the loss of a request.

libfuse drops a request that it reads after it was told to end (fuse_session_receive_buf), and a task of pyfuse3 that
was woken reads one. Nobody would know whether that was made: a successor would answer EIO to a change of names. A task
may have been woken while there is something to read; so a loop that leaves its mount to a successor is ended when there
is nothing.
"""

import select

import pyfuse3
import trio

from cachefs.fuse.operations import MAX_REQUESTS, Operations

MIN_IDLE_REQUESTS = 16
PATIENCE_S = 1.0
"""Requests that arrive one after the other are read for so long."""
_OPTIONS = {"fsname=cachefs"}
"""libfuse is given a descriptor (`/dev/fd/N`) that serves a mount already; how that was mounted does not concern it."""


class RequestLoop:
    """Serves one descriptor. There is one in a process, because pyfuse3 is global."""

    def __init__(self, operations: Operations, descriptor: int) -> None:
        """`descriptor`: closed by `close`."""
        self._descriptor = descriptor
        pyfuse3.init(operations, f"/dev/fd/{descriptor}", _OPTIONS)
        self.is_open = True

    async def run(self) -> None:
        """Until it is ended, or the mount is. Raises OSError where the kernel closes the connection."""
        await pyfuse3.main(min_tasks=MIN_IDLE_REQUESTS, max_tasks=MAX_REQUESTS)

    def end(self) -> None:
        if self.is_open:
            pyfuse3.terminate()

    async def end_when_read(self) -> None:
        """What arrives later stays in the descriptor, for a successor."""
        await all_read(self._descriptor)
        self.end()

    def close(self) -> None:
        self.is_open = False
        pyfuse3.close(unmount=False)


async def all_read(descriptor: int) -> None:
    """Returns when there is nothing to read. What arrives later stays there, if pyfuse3 is terminated at once.

    `descriptor`: from which pyfuse3 reads.
    """
    readable = select.poll()
    readable.register(descriptor, select.POLLIN)
    with trio.move_on_after(PATIENCE_S):
        while readable.poll(0):
            await trio.lowlevel.checkpoint()

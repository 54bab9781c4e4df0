"""pyfuse3's loop, and how to end it without losing a request.

After the end was requested, libfuse drops a request that it reads (fuse_session_receive_buf), and a task of pyfuse3
that was woken reads one more. A successor could not know whether that request was carried out, and would answer EIO to
a change of names. A task is woken only while there is something to read. So a loop that leaves its mount to a successor
is ended when there is nothing to read.
"""

import select

import pyfuse3
import trio

from cachefs.fuse.operations import MAX_REQUESTS, Operations

MIN_IDLE_REQUESTS = 16
PATIENCE_S = 1.0
"""How long requests are read that arrive one after the other."""
_OPTIONS = {"fsname=cachefs"}
"""No mount options: libfuse gets a descriptor (`/dev/fd/N`) of an existing mount."""


class RequestLoop:
    """Serves one descriptor. There is one in a process, because pyfuse3 is global."""

    def __init__(self, operations: Operations, descriptor: int) -> None:
        """`descriptor`: closed by `close`."""
        self._descriptor = descriptor
        pyfuse3.init(operations, f"/dev/fd/{descriptor}", _OPTIONS)
        self.is_open = True

    async def run(self) -> None:
        """Returns when the loop is ended, or unmounted. Raises OSError if the kernel closes the connection."""
        await pyfuse3.main(min_tasks=MIN_IDLE_REQUESTS, max_tasks=MAX_REQUESTS)

    def end(self) -> None:
        if self.is_open:
            pyfuse3.terminate()

    async def end_when_read(self) -> None:
        """Requests that arrive later stay in the descriptor, for a successor."""
        await all_read(self._descriptor)
        self.end()

    def close(self) -> None:
        self.is_open = False
        pyfuse3.close(unmount=False)


async def all_read(descriptor: int) -> None:
    """Returns when pyfuse3 has read all requests from `descriptor`. Later ones stay if it is terminated at once."""
    readable = select.poll()
    readable.register(descriptor, select.POLLIN)
    with trio.move_on_after(PATIENCE_S):
        while readable.poll(0):
            await trio.lowlevel.checkpoint()

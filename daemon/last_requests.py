"""The end of pyfuse3's loop, without the loss of a request.

libfuse drops a request that it reads after it was told to end (fuse_session_receive_buf), and a task of pyfuse3 that
was woken reads one. Nobody would know whether that was made: a successor would answer EIO to a change of names. A task
may have been woken while there is something to read; so the loop is ended when there is nothing.
"""

import select

import trio

PATIENCE_S = 1.0
"""Requests that arrive one after the other are read for so long."""


async def all_read(descriptor: int) -> None:
    """Returns when there is nothing to read. What arrives later stays there, if pyfuse3 is terminated at once.

    `descriptor`: from which pyfuse3 reads.
    """
    readable = select.poll()
    readable.register(descriptor, select.POLLIN)
    with trio.move_on_after(PATIENCE_S):
        while readable.poll(0):
            await trio.lowlevel.checkpoint()

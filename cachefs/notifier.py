"""Telling the kernel to forget (FUSE_NOTIFY_INVAL_INODE, FUSE_NOTIFY_INVAL_ENTRY)."""

import errno
import logging
import os
import struct
from collections.abc import Callable, Iterable, Sequence

import trio

from cachefs.environment import Table
from cachefs.index import Index

log = logging.getLogger(__name__)

# struct fuse_out_header, fuse_notify_inval_inode_out, fuse_notify_inval_entry_out
_NOTIFY_HEAD = struct.Struct("<IiQ")
_NOTIFY_INODE = struct.Struct("<Qqq")
_NOTIFY_ENTRY = struct.Struct("<QII")
_NOTIFY_INVAL_INODE, _NOTIFY_INVAL_ENTRY = 2, 3


_KEY = b"notify:"
_FLAGS = bytes(4)  # of a value that ends with the mount
HOLD_BACK_S = 10.0
"""How long the end waits for what is under way."""


class KernelNotifier:
    """Invalidations, sent from a thread of their own and one at a time (hazard 1).

    A notification blocks in the kernel until requests on the same directory have been answered; the trio thread,
    which answers them, never waits for one. They are written to /dev/fuse itself, not through a fast path, which too is
    needed for what they wait for.

    A thread that waits in the kernel cannot be killed. A daemon that left while one waits for a request that came
    after it had stopped to serve would not end before its successor answers that request, which waits for its end.
    So a daemon that leaves sends nothing more, serves until nothing is under way, and leaves the rest to its successor.
    """

    def __init__(self, nursery: trio.Nursery, device: int) -> None:
        """`device`: the mount's /dev/fuse."""
        self._nursery = nursery
        self._device = device
        self._thread = trio.CapacityLimiter(1)
        self._pages_thread = trio.CapacityLimiter(1)
        self._held_back: list[bytes] | None = None

    def entry_soon(self, parent: int, name: bytes) -> None:
        self._nursery.start_soon(self.entry, parent, name)

    def all_soon(self, entries: Sequence[tuple[int, bytes]], numbers: Sequence[int]) -> None:
        """Names, then inodes, in one task."""
        self._nursery.start_soon(self._all, entries, numbers)

    async def _all(self, entries: Sequence[tuple[int, bytes]], numbers: Sequence[int]) -> None:
        for parent, name in entries:
            await self.entry(parent, name)
        for number in numbers:
            await self.inode(number)

    async def entry(self, parent: int, name: bytes) -> None:
        body = _NOTIFY_ENTRY.pack(parent, len(name), 0) + name + b"\0"
        await self._send([_message(_NOTIFY_INVAL_ENTRY, body)], self._thread)

    async def inode(self, number: int) -> None:
        await self._send([_inode_message(number)], self._thread)

    def attributes(self, number: int) -> None:
        """Have the kernel ask for them. It waits for nothing and drops no page, so that a request may do it."""
        self._write([_message(_NOTIFY_INVAL_INODE, _NOTIFY_INODE.pack(number, -1, 0))])

    async def pages(self, numbers: Iterable[int]) -> None:
        """Drop the pages of these inodes, and their attributes.

        In a thread of its own: the kernel waits for READs of the same pages, which may wait for the source.
        """
        await self._send([_inode_message(number) for number in numbers], self._pages_thread)

    def hold_back(self, then: Callable[[], None]) -> None:
        """Send nothing from now on; call `then` when nothing is under way any more, or takes too long."""
        if self._held_back is None:
            self._held_back = []
            self._nursery.start_soon(self._when_idle, then)

    async def _when_idle(self, then: Callable[[], None]) -> None:
        with trio.move_on_after(HOLD_BACK_S):
            async with self._thread, self._pages_thread:
                pass
        then()

    def save(self, index: Index) -> None:
        """Leave what was held back to a successor."""
        with index.update() as update:
            for number, message in enumerate(self._held_back or ()):
                update.put(Table.META, _KEY + number.to_bytes(4, "big"), _FLAGS + message)

    def restore(self, index: Index) -> None:
        """Send what a predecessor has left."""
        with index.update() as update:
            saved = list(update.scan(Table.META, _KEY))
            for key, _ in saved:
                update.delete(Table.META, key)
        messages = [value[len(_FLAGS) :] for _, value in saved]
        self._nursery.start_soon(self._send, messages, self._thread)

    async def _send(self, messages: list[bytes], limiter: trio.CapacityLimiter) -> None:
        if self._held_back is not None:
            self._held_back += messages
            return
        await trio.to_thread.run_sync(self._write, messages, limiter=limiter, abandon_on_cancel=True)

    def _write(self, messages: list[bytes]) -> None:
        for message in messages:
            try:
                os.write(self._device, message)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENOTDIR):  # the kernel does not have it: fine
                    log.warning("cannot invalidate in the kernel: %s", error)


def _message(code: int, body: bytes) -> bytes:
    return _NOTIFY_HEAD.pack(_NOTIFY_HEAD.size + len(body), code, 0) + body


def _inode_message(number: int) -> bytes:
    return _message(_NOTIFY_INVAL_INODE, _NOTIFY_INODE.pack(number, 0, 0))

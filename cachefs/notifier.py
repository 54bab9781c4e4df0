"""Telling the kernel to forget (FUSE_NOTIFY_INVAL_INODE, FUSE_NOTIFY_INVAL_ENTRY)."""

import errno
import functools
import logging
import os
import struct
from collections.abc import Iterable, Sequence

import trio

log = logging.getLogger(__name__)

# struct fuse_out_header, fuse_notify_inval_inode_out, fuse_notify_inval_entry_out
_NOTIFY_HEAD = struct.Struct("<IiQ")
_NOTIFY_INODE = struct.Struct("<Qqq")
_NOTIFY_ENTRY = struct.Struct("<QII")
_NOTIFY_INVAL_INODE, _NOTIFY_INVAL_ENTRY = 2, 3


class KernelNotifier:
    """Invalidations, sent from a thread of their own and one at a time (hazard 1).

    A notification blocks in the kernel until requests on the same directory have been answered; the trio thread,
    which answers them, never waits for one. They are written to /dev/fuse itself, not through a fast path, which too is
    needed for what they wait for.
    """

    def __init__(self, nursery: trio.Nursery, device: int) -> None:
        """`device`: the mount's /dev/fuse."""
        self._nursery = nursery
        self._device = device
        self._thread = trio.CapacityLimiter(1)
        self._pages_thread = trio.CapacityLimiter(1)

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
        await self._send(_NOTIFY_INVAL_ENTRY, _NOTIFY_ENTRY.pack(parent, len(name), 0) + name + b"\0")

    async def inode(self, number: int) -> None:
        await self._send(_NOTIFY_INVAL_INODE, _NOTIFY_INODE.pack(number, 0, 0))

    async def pages(self, numbers: Iterable[int]) -> None:
        """Drop the pages of these inodes, and their attributes.

        In a thread of its own: the kernel waits for READs of the same pages, which may wait for the source.
        """
        bodies = [_NOTIFY_INODE.pack(number, 0, 0) for number in numbers]
        await trio.to_thread.run_sync(self._write_pages, bodies, limiter=self._pages_thread, abandon_on_cancel=True)

    def _write_pages(self, bodies: list[bytes]) -> None:
        for body in bodies:
            self._write(_NOTIFY_INVAL_INODE, body)

    async def _send(self, code: int, body: bytes) -> None:
        write = functools.partial(self._write, code, body)
        await trio.to_thread.run_sync(write, limiter=self._thread, abandon_on_cancel=True)

    def _write(self, code: int, body: bytes) -> None:
        try:
            os.write(self._device, _NOTIFY_HEAD.pack(_NOTIFY_HEAD.size + len(body), code, 0) + body)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):  # the kernel does not have it: fine
                log.warning("cannot invalidate in the kernel: %s", error)

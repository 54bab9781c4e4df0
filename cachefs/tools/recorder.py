"""Records which files a job opens on a mount, with fanotify(7) in the kernel.

The daemon cannot record opens: it does not see those that the kernel's page cache answers. Each event has an open
descriptor of the file, because FUSE has no file handles that fanotify could report. The descriptor is examined and
closed. This costs the job about a microsecond per open, and needs root (CAP_SYS_ADMIN).

An open counts as a read of the whole file. That is right for datasets of small files, and too much for shards that are
read in part. If one process opens a file several times within a few milliseconds, it may be recorded once.
"""

import ctypes
import errno
import os
import select
import stat
import struct
from collections.abc import Callable
from contextlib import suppress

import xxhash

from cachefs.errors import CacheFsError
from cachefs.system.descriptors import closing
from cachefs.tools.trace import Access, TraceWriter

_CLOEXEC, _NONBLOCK = 1, 2
_ADD, _MOUNT = 1, 0x10
_OPEN, _OVERFLOW = 0x20, 0x4000
_AT_FDCWD = -100
_LARGEFILE = 0o100000  # of the kernel's headers: os.O_LARGEFILE is 0 where libc adds it itself
_EVENT = struct.Struct("<IBBHQii")
_BUFFER_BYTES = 256 << 10


class TraceRecorder:
    def __init__(self, mountpoint: str, writer: TraceWriter) -> None:
        """Raises CacheFsError if the kernel refuses."""
        libc = ctypes.CDLL(None, use_errno=True)
        self._writer = writer
        self._fd: int = libc.fanotify_init(_CLOEXEC | _NONBLOCK, os.O_RDONLY | os.O_CLOEXEC | _LARGEFILE)
        if self._fd < 0:
            raise CacheFsError(f"cannot listen to file opens: {_reason()}")
        path = os.fsencode(mountpoint)
        if libc.fanotify_mark(self._fd, _ADD | _MOUNT, ctypes.c_uint64(_OPEN), _AT_FDCWD, path) < 0:
            reason = _reason()
            os.close(self._fd)
            raise CacheFsError(f"cannot listen to file opens on {mountpoint}: {reason}")
        self.lost = 0
        """How often the kernel dropped events: its queue holds 16,384 opens."""

    def close(self) -> None:
        os.close(self._fd)

    def run(self, wanted: Callable[[], bool], *, poll_s: float = 0.5) -> None:
        """Record while `wanted` returns true. It is called at least every `poll_s` seconds."""
        while wanted():
            if select.select([self._fd], [], [], poll_s)[0]:
                self.record_waiting()

    def record_waiting(self) -> None:
        """Record all events up to now."""
        while True:
            try:
                events = os.read(self._fd, _BUFFER_BYTES)
            except BlockingIOError:
                return
            at = 0
            while at < len(events):
                length, _, _, _, mask, fd, _ = _EVENT.unpack_from(events, at)
                at += length
                if mask & _OVERFLOW:
                    self.lost += 1
                elif fd >= 0:
                    self._record(fd)

    def _record(self, fd: int) -> None:
        with closing(fd), suppress(OSError):  # the file is gone
            found = os.fstat(fd)
            if stat.S_ISREG(found.st_mode):
                directory = os.path.dirname(os.readlink(b"/proc/self/fd/%d" % fd))
                self._writer.write(Access(found.st_ino, xxhash.xxh3_64_intdigest(directory), found.st_size))


def _reason() -> str:
    number = ctypes.get_errno()
    return "root is required" if number == errno.EPERM else os.strerror(number)

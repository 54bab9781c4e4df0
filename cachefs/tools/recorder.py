"""Records which files a job opens on a mount, whoever answers: fanotify(7) hears of it in the kernel.

The mount itself would not do: what the kernel's page cache answers never gets there. An event brings an open descriptor
of the file (FUSE has no file handles that fanotify could report), which is looked at and closed. Costs the job about a
microsecond for each open. Needs root (CAP_SYS_ADMIN).

What is recorded is an open, and counts as a read of the whole file: right for datasets of small files, too much for
shards that are read in part. What one process opens several times within a few milliseconds may be recorded once.
"""

import ctypes
import errno
import os
import select
import stat
import struct
from collections.abc import Callable
from types import TracebackType

import xxhash

from cachefs.errors import CacheFsError
from cachefs.tools.trace import Access, TraceWriter

_CLOEXEC, _NONBLOCK = 1, 2
_ADD, _MOUNT = 1, 0x10
_OPEN, _OVERFLOW = 0x20, 0x4000
_AT_FDCWD = -100
_LARGEFILE = 0o100000  # of the kernel's headers: os.O_LARGEFILE is 0 where libc adds it itself
_EVENT = struct.Struct("<IBBHQii")
_BUFFER_BYTES = 256 << 10


class TraceRecorder:
    """A context manager; `run` records until told to stop."""

    def __init__(self, mountpoint: str, writer: TraceWriter) -> None:
        """Raises CacheFsError where the kernel refuses."""
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
        """How often the kernel had more to say than it keeps (16,384 opens)."""

    def __enter__(self) -> "TraceRecorder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)

    def run(self, wanted: Callable[[], bool], *, poll_s: float = 0.5) -> None:
        """Record as long as `wanted` says so; it is asked every `poll_s` seconds at least."""
        while wanted():
            if select.select([self._fd], [], [], poll_s)[0]:
                self.record_waiting()

    def record_waiting(self) -> None:
        """Everything that has happened by now."""
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
        try:
            found = os.fstat(fd)
            if stat.S_ISREG(found.st_mode):
                directory = os.path.dirname(os.readlink(b"/proc/self/fd/%d" % fd))
                self._writer.write(Access(found.st_ino, xxhash.xxh3_64_intdigest(directory), found.st_size))
        except OSError:
            pass  # it has gone
        finally:
            os.close(fd)


def _reason() -> str:
    number = ctypes.get_errno()
    return "it needs root" if number == errno.EPERM else os.strerror(number)

"""The errors of the filesystem, and the only translation of errors to errno."""

import errno
import os


class CacheFsError(Exception):
    """Something the user must hear about: the command line prints the message as its one line."""


class CorruptRecord(Exception):
    """Bytes of the blob that are not what was written. Dropped, counted and fetched again; no reader sees it."""


class IndexUnavailable(Exception):
    """The index cannot take a commit (disk full, I/O error). New metadata is then not pinned; nothing else fails."""


class Busy(BlockingIOError):
    """A file cannot be opened at the moment: another process holds a lease on it, or renames on its way.

    Raised by whatever opens at the source; `CallPool` pauses and calls again, and gives up at the call's deadline.
    """

    def __init__(self, *_: object) -> None:  # a copy is made with the arguments of the original
        super().__init__(errno.EAGAIN, os.strerror(errno.EAGAIN))


def errno_of(error: BaseException) -> int:
    """The errno that a system call on the mount fails with."""
    if isinstance(error, OSError) and error.errno:
        return error.errno
    return errno.EIO

"""The errors of the filesystem, and the only translation of errors to errno."""

import errno


class CacheFsError(Exception):
    """Something the user must hear about: the command line prints the message as its one line."""


class CorruptRecord(Exception):
    """Bytes of the blob that are not what was written. Dropped, counted and fetched again; no reader sees it."""


class IndexUnavailable(Exception):
    """The index cannot take a commit (disk full, I/O error). New metadata is then not pinned; nothing else fails."""


def errno_of(error: BaseException) -> int:
    """The errno that a system call on the mount fails with."""
    if isinstance(error, OSError) and error.errno:
        return error.errno
    return errno.EIO

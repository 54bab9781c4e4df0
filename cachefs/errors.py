"""Errors, and their translation to errno."""

import errno
import os


class CacheFsError(Exception):
    """An error for the user: the command line prints the message on one line, and exits."""


class CorruptRecord(Exception):
    """Bytes of the blob are not what was written. The record is dropped and counted, and its data are fetched again: no
    job gets this error."""


class IndexUnavailable(Exception):
    """The index cannot be written (disk full, I/O error). New metadata are not pinned then; nothing else fails."""


class IndexDamaged(IndexUnavailable):
    """The index contradicts itself. Raised once: from then on what cannot be read counts as unknown (damage.py)."""


def met_damage(error: BaseException) -> bool:
    """Is it an IndexDamaged, or a group of a nursery with one?"""
    if isinstance(error, BaseExceptionGroup):
        return error.subgroup(IndexDamaged) is not None
    return isinstance(error, IndexDamaged)


class Busy(BlockingIOError):
    """A file cannot be opened now: another process has a lease on it, or renames a directory of its path.

    Raised by opens at the source. `CallPool` calls again after a pause, until the deadline of the call.
    """

    def __init__(self, *_: object) -> None:  # a copy gets the arguments of the original
        super().__init__(errno.EAGAIN, os.strerror(errno.EAGAIN))


def failed(number: int) -> OSError:
    """The error of a system call that fails with this errno."""
    return OSError(number, os.strerror(number))


def errno_of(error: BaseException) -> int:
    """The errno that a system call on the mount fails with."""
    if isinstance(error, OSError) and error.errno:
        return error.errno
    return errno.EIO

"""Errors, and their translation to errno."""

import errno
import os
from collections.abc import Sequence


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


class PermissionsChanged(OSError):
    """Directories above an object have other permissions than recorded (errno ESTALE): the kernel walks the path again,
    the daemon repeats a call of its own."""

    def __init__(self, numbers: Sequence[int] = (), public: bool = False, owner: int | None = None) -> None:
        super().__init__(errno.ESTALE, os.strerror(errno.ESTALE))
        self.numbers = numbers
        self.public = public
        """May everyone list and enter all of them now?"""
        self.owner = owner
        """The user who owns all of them, and may list and enter them."""

    def __reduce__(self) -> tuple[object, ...]:  # each waiter of a single flight gets a copy
        return type(self), (self.numbers, self.public, self.owner)

    def admits(self, uid: int) -> bool:
        """May this user go on without another check? False also where that is not known."""
        return self.public or uid in (0, self.owner)

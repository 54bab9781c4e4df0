"""Is an opened object the expected one? (hazard 23)

A path is only a hint. Between a look-up and an open another node may rename anything over any name. Therefore every
object of the source is compared with its record after the open, before its bytes or attributes are used:

- `check`: is it the same object? `Identity` has the rule.
- `check_version`: is it the same object, and unchanged? Called after a read, this proves that the bytes belong to the
  record: if nothing differs afterwards, nothing changed before. The fast path has the same rule (misses/source.c).
"""

import errno
import os
import stat
import unicodedata

from cachefs.store.index.records import Identity, Inode, same_number
from cachefs.system.stat import Stat

GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO)
"""Errors of an open by a name that does not lead to the expected object any more.

ENXIO: a FIFO without a reader, or a socket, has taken its place."""


class Changed(OSError):
    """An object of the source differs from its record (errno ESTALE).

    The entry is dropped, and the caller gets ESTALE: for calls such as open(2) the kernel looks the name up again.
    """

    directory = 0
    """The inode number of the directory that is not where it was; 0: the requested object itself has changed."""

    def __init__(self, *_: object) -> None:  # a copy is made with the arguments of the original
        super().__init__(errno.ESTALE, os.strerror(errno.ESTALE))

    @classmethod
    def at(cls, directory: int) -> "Changed":
        error = cls()
        error.directory = directory
        return error


class Renamed(Changed):
    """A name that a change depends on leads elsewhere; its former object may be unchanged (errno ESTALE).

    The name is dropped. For a call with a path the kernel looks it up again. For a caller that has the directory open
    the kernel repeats the request with the directory, which has no name any more, and the change is made there.
    """

    parent = 0
    name = b""
    number = 0
    """Of the inode that the name led to."""

    @classmethod
    def away(cls, parent: int, name: bytes, number: int) -> "Renamed":
        error = cls()
        error.parent, error.name, error.number = parent, name, number
        return error


def is_same(expected: Identity, now: Stat) -> bool:
    """Is it the expected object, which is opened by a name in a directory that was compared?"""
    return expected.is_of(now, by_name=True)


def is_one(now: Stat, name: bytes, there: Stat, also: bytes) -> bool:
    """Do two names in a directory lead to one object? Two spellings of a name, or names of a moment ago and now."""
    if (there.device, there.inode, there.ctime_ns) != (now.device, now.inode, now.ctime_ns):
        return False
    return not now.may_have_twins or _folded(name) == _folded(also)


def _folded(name: bytes) -> str:
    return unicodedata.normalize("NFKD", os.fsdecode(name)).casefold()


def check(expected: Identity, now: Stat) -> None:
    """Raises `Changed` unless `now` is of the expected object."""
    if not is_same(expected, now):
        raise Changed


def check_version(expected: Inode, now: Stat) -> None:
    """Raises `Changed` unless `now` is of the expected version of a regular file.

    Birth times are not compared: if inode number and change time are the same, the birth time is the same, too. Without
    inode numbers the times and the size decide.
    """
    if (
        now.ctime_ns != expected.ctime_ns
        or now.mtime_ns != expected.mtime_ns
        or now.size != expected.size
        or not same_number(expected.source_inode, now)
        or now.device != expected.device
        or not expected.same_access(now)
        or not stat.S_ISREG(now.mode)
    ):
        raise Changed

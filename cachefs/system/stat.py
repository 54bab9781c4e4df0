"""The result of one lstat."""

from stat import S_IMODE
from typing import NamedTuple

_MIN_TIME_NS, _MAX_TIME_NS = -(1 << 63), (1 << 63) - 1

NO_NUMBER = 0
"""In the place of an inode number: the source has none that stays. The name of an object says which one it is."""
USED_ONCE = -1
"""In the place of a birth time: the filesystem has none, and uses no inode number again."""
NO_CONNECTION = 1 << 32
"""More than a record can hold: a connection of which no record is."""


def may_be_one_birth(one_ns: int, other_ns: int) -> bool:
    """May two birth times be of one object? A client of CephFS that shows none says USED_ONCE, another one a time."""
    return one_ns == other_ns or bool({one_ns, other_ns} & {0, USED_ONCE})


def may_admit_others(before: tuple[int, int, int], now: tuple[int, int, int]) -> bool:
    """May these permissions (mode, owner, group) give access to someone who had none by those before?"""
    return before[1:] != now[1:] or bool(S_IMODE(now[0]) & ~before[0])


def clamped_ns(time_ns: int) -> int:
    """A time of the source as the index holds it: signed 64-bit nanoseconds, from 1677-09-21 to 2262-04-11.

    Filesystems have times beyond that (ext4: until 2446), which become the nearest time in this range. Every time from
    the source passes through here or through `nanoseconds` of fastpath/c/misses/source.c, so that only clamped times
    are compared.
    """
    return min(max(time_ns, _MIN_TIME_NS), _MAX_TIME_NS)


class Stat(NamedTuple):
    """One lstat (in truth statx, for the birth time). Times in nanoseconds since 1970, clamped."""

    mode: int
    nlink: int
    uid: int
    gid: int
    rdev: int  # 32 bits
    blksize: int
    size: int
    blocks: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    btime_ns: int  # 0: not known; where there are none, the generation may stand for it, or USED_ONCE
    device: int  # its volume (source/volumes.py); 0: that of the source's root
    inode: int  # or NO_NUMBER
    began_ns: int = 0
    """CLOCK_MONOTONIC at the start of the call. 0: not known, and treated as later than everything."""
    connection: int = 0
    """The connection to the source in which it was asked (`Connection`). 0: inode numbers last."""
    is_fresh: bool = True
    """False: the kernel may have answered from a cache that is not coherent with the source (hazard 50)."""
    may_have_twins: bool = False
    """Other objects of its volume may have its number (hazard 74)."""
    is_encrypted: bool = False
    """By fscrypt: names and link targets depend on whether the kernel has the key."""

    @property
    def permissions(self) -> tuple[int, int, int]:
        """What access depends on, except for ACLs."""
        return self.mode, self.uid, self.gid

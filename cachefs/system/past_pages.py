"""Reading past the pages that the kernel keeps of a source.

The kernel keeps pages of FUSE filesystems and of NFS for some time after the file has changed elsewhere. Fresh
attributes do not make them fresh (hazard 50). Such filesystems take O_DIRECT with any offset, length and memory. Where
one does not, its pages are dropped before the read; those that another process has mapped stay. The fast path has the
same rule (misses/source.c).
"""

import errno
import fcntl
import os

from cachefs.system import syscalls


def pread(fd: int, length: int, offset: int) -> bytes:
    """As os.pread. The descriptor keeps O_DIRECT where that works."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        if not flags & os.O_DIRECT:
            fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        return os.pread(fd, length, offset)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return os.pread(fd, length, offset)


def beyond_known_end(fd: int, length: int, offset: int) -> bytes:
    """Bytes behind what the kernel takes for the end of a file. bindfs takes each name of a file for a file of its own,
    and the kernel keeps the size of each for a second, whatever is written by another one."""
    return os.pread(fd, length, offset) if syscalls.statx(fd, b"", ask=True).size > offset else b""

"""Opening one name in one directory, and nothing outside of it.

No path is walked. A name is looked up in the descriptor of its directory (directories.py), one component at a time:
with openat2, RESOLVE_BENEATH and RESOLVE_NO_SYMLINKS, or with openat and O_NOFOLLOW if openat2 is missing. So users who
can write to the source cannot lead the daemon out of it. The caller compares what was opened.
"""

import errno
import os

from cachefs.contract.index import MAX_NAME_BYTES
from cachefs.errors import Busy, failed
from cachefs.source.identity import Changed
from cachefs.system import syscalls
from cachefs.system.descriptors import closing


class Opener:
    """Its calls are not counted: the caller knows what they are for."""

    def __init__(self) -> None:
        self._has_openat2 = _has_openat2()

    def open_at(self, directory_fd: int, name: bytes, flags: int, mode: int = 0) -> int:
        """Open a name in a directory, following no symlink.

        Raises `Busy` if another process has a lease on the file; the kernel has asked it to give the lease up.
        """
        component(name)
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC | (0 if flags & os.O_PATH else os.O_NOCTTY)
        if self._has_openat2:
            return syscalls.openat2(directory_fd, name, flags, mode)
        try:
            return os.open(name, flags, mode, dir_fd=directory_fd)
        except BlockingIOError as error:
            raise Busy from error

    def create_at(self, directory_fd: int, name: bytes, flags: int, mode: int) -> int:
        """Create a file, or open it if another node was faster. Raises `Changed` for a FIFO or socket."""
        try:
            return self.open_at(directory_fd, name, flags | os.O_CREAT | os.O_NONBLOCK, mode)
        except OSError as error:
            if error.errno in (errno.ENXIO, errno.ELOOP):
                raise Changed from error
            raise


def _has_openat2() -> bool:
    """Tries it on the root directory of this machine, not on the source, which may hang."""
    with closing(os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as root:
        try:
            os.close(syscalls.openat2(root, b".", os.O_PATH | os.O_DIRECTORY))
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EPERM):  # EPERM: an old seccomp profile
                raise
            return False
    return True


def component(name: bytes) -> bytes:
    """Check that a name leads to an entry of the directory that it is looked up in, and that the index can hold it.

    Raises ENOENT or ENAMETOOLONG for other names.
    """
    if name in (b"", b".", b"..") or b"/" in name:
        raise failed(errno.ENOENT)
    if len(name) > MAX_NAME_BYTES:
        raise failed(errno.ENAMETOOLONG)
    return name


def reopen_directory(fd: int) -> int:
    """A readable descriptor, with its own position, of the directory of an O_PATH descriptor."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

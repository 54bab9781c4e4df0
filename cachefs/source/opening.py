"""Opens one name in one directory, and nothing that lies elsewhere.

No path is walked. A name is looked up in the descriptor of its directory (directories.py), one component at a
time: openat2 with RESOLVE_BENEATH and RESOLVE_NO_SYMLINKS, or openat with O_NOFOLLOW where openat2 is missing, so
that nobody who can write to the source can lead the daemon out of it. What was opened is for the caller to compare.
"""

import errno
import os

from cachefs.errors import Busy
from cachefs.source.identity import Changed
from cachefs.system import syscalls


class Opener:
    """Its calls are not counted: the caller knows what they are for."""

    def __init__(self) -> None:
        self._has_openat2 = _has_openat2()

    def open_at(self, directory_fd: int, name: bytes, flags: int, mode: int = 0) -> int:
        """Open a name in a directory, no symlink followed.

        `Busy`: another process holds a lease of the file, and has been asked to give it up.
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
        """Create a file, or open it where another node was faster. `Changed` for a FIFO without a reader, a socket."""
        try:
            return self.open_at(directory_fd, name, flags | os.O_CREAT | os.O_NONBLOCK, mode)
        except OSError as error:
            if error.errno in (errno.ENXIO, errno.ELOOP):
                raise Changed from error
            raise


def _has_openat2() -> bool:
    """Asked of the root directory of this machine, not of the source, which may hang."""
    root = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.close(syscalls.openat2(root, b".", os.O_PATH | os.O_DIRECTORY))
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EPERM):  # EPERM: an old seccomp profile
            raise
        return False
    finally:
        os.close(root)
    return True


def component(name: bytes) -> bytes:
    """A name that leads to an entry of the directory it is looked up in, nowhere else. Raises ENOENT for others."""
    if name in (b"", b".", b"..") or b"/" in name:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    return name


def reopen_directory(fd: int) -> int:
    """A descriptor to read from, with a position of its own, of the directory that an O_PATH descriptor holds."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

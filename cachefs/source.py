"""The directory underneath. Every system call that goes to it is made here, counted, and delayed when simulating.

All functions are synchronous and may hang as long as the source hangs: they run in threads, behind `slots.py`.
Paths are bytes relative to the root of the source, b"" for the root itself.

Nothing is reached but beneath the directory handle that was opened at start: openat2 with RESOLVE_BENEATH and
RESOLVE_NO_SYMLINKS, so that nobody who can write to the source can lead the daemon out of it. Where openat2 is
missing, or a path is longer than PATH_MAX, the walk goes component by component with O_NOFOLLOW.

Rejected: caching O_PATH handles of directories. A handle follows the directory when somebody renames it, the path
does not; two answers to one question. The walk is in the kernel's dentry cache and costs no round trip.
"""

import errno
import os
import stat
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from cachefs import syscalls
from cachefs.attributes import Inode, Stat

_PATH_MAX = 4000  # a little less than the kernel's 4096, which counts the final zero
_READ_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY  # hazard 21
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class SourceCounters:
    """How many of each system call went to the source. Incremented from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self.bytes_read = 0
        """Of files, not of directories."""

    def add(self, operation: str, count: int = 1) -> None:
        with self._lock:
            self._counts[operation] += count

    def add_bytes(self, count: int) -> None:
        with self._lock:
            self.bytes_read += count

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)


class Changed(OSError):
    """What was fetched is not what was pinned (errno ESTALE). The caller drops the entry; the reader gets ESTALE."""

    def __init__(self, *_: object) -> None:  # a copy is made with the arguments of the original
        super().__init__(errno.ESTALE, os.strerror(errno.ESTALE))


LOST_ERRORS = frozenset({errno.ENOTCONN, errno.ESTALE, errno.ESHUTDOWN, errno.ECONNABORTED})
"""What the kernel says when the mount behind a descriptor has gone; ECONNABORTED to calls that were under way."""


def may_be_lost(error: BaseException) -> bool:
    """Does this error of a call mean that the source may have gone? Its root knows (daemon/source_connection.py)."""
    return isinstance(error, OSError) and error.errno in LOST_ERRORS and not isinstance(error, Changed)


class Source:
    """The source behind `root_fd`, a descriptor opened O_RDONLY | O_DIRECTORY before anything is mounted.

    The number of the descriptor stays the same when the source is mounted anew (`reconnect`). To make a `Source` asks
    the source for nothing: a successor does so while the source hangs.
    """

    def __init__(self, root_fd: int, *, root_device: int | None = None, simulate_latency_s: float = 0.0) -> None:
        """`root_device`: st_dev of `root_fd`, which is asked for where it is not given."""
        self.root_fd = root_fd
        self.root_devices: tuple[int, ...] = (os.fstat(root_fd).st_dev if root_device is None else root_device,)
        """The one of now, and the one before, by which calls that are under way may have been answered."""
        self.generation = 0
        """How often the source was mounted anew. Descriptors of an earlier generation are dead."""
        self.counters = SourceCounters()
        self._latency_s = simulate_latency_s
        self._has_openat2 = _has_openat2()

    @property
    def root_device(self) -> int:
        return self.root_devices[0]

    def reconnect(self, fd: int) -> None:
        """Go on with another root, which was compared with the one of before. Closes `fd`. From any thread."""
        self.root_devices = (os.fstat(fd).st_dev, self.root_devices[0])
        os.dup2(fd, self.root_fd, inheritable=False)
        os.close(fd)
        self.generation += 1

    def ask(self) -> None:
        """Does the root answer? Raises what it says; the kernel's memory of it does not count. Not counted."""
        syscalls.statx(self.root_fd, b"", ask=True)

    def stat(self, fd: int, name: bytes = b"") -> Stat:
        """lstat of a name in a directory, or of `fd` itself. Not counted."""
        return syscalls.statx(fd, name, self.root_devices)

    def round_trip(self, operation: str) -> None:
        """Count one system call that asks the source; wait as long as a parallel filesystem would take."""
        self.counters.add(operation)
        if self._latency_s:
            time.sleep(self._latency_s)

    # --- walking ---------------------------------------------------------------------------------------------------

    def _open(self, path: bytes, flags: int) -> int:
        """Open beneath the root, no symlink followed. Not counted: the caller knows what it is for."""
        if not path:
            # A reopened "." has its own file position; O_PATH descriptors would do for walking, not for reading.
            return os.open(b".", flags | os.O_CLOEXEC, dir_fd=self.root_fd)
        if self._has_openat2 and len(path) < _PATH_MAX:
            return syscalls.openat2(self.root_fd, path, flags)
        return self._walk(path, flags)

    def _walk(self, path: bytes, flags: int) -> int:
        *parents, name = path.split(b"/")
        directory = os.dup(self.root_fd)
        try:
            for component in parents:
                following = os.open(component, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)
                os.close(directory)
                directory = following
            return os.open(name, flags | os.O_NOFOLLOW, dir_fd=directory)
        finally:
            os.close(directory)

    @contextmanager
    def directory(self, path: bytes) -> Iterator[int]:
        """An O_PATH descriptor of a directory, for calls that take a directory and a name."""
        if not path:
            yield self.root_fd
            return
        fd = self._open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            yield fd
        finally:
            os.close(fd)

    # --- metadata --------------------------------------------------------------------------------------------------

    def lstat(self, path: bytes) -> Stat:
        self.round_trip("lstat")
        if not path:
            return self.stat(self.root_fd)
        fd = self._open(path, os.O_PATH | os.O_NOFOLLOW)
        try:
            return self.stat(fd)
        finally:
            os.close(fd)

    def lstat_names(self, directory: bytes, names: Sequence[bytes]) -> list[Stat | None]:
        """lstat of several names of one directory. None for a name that is gone; other errors are raised."""
        results: list[Stat | None] = []
        with self.directory(directory) as fd:
            for name in names:
                self.round_trip("lstat")
                try:
                    results.append(self.stat(fd, name))
                except FileNotFoundError:
                    results.append(None)
        return results

    def readdir(self, path: bytes) -> list[bytes]:
        """All names of a directory, without "." and ".."."""
        self.round_trip("readdir")
        fd = self._open(path, _DIRECTORY_FLAGS)
        try:
            return [os.fsencode(name) for name in os.listdir(fd)]
        finally:
            os.close(fd)

    def readlink(self, path: bytes) -> bytes:
        self.round_trip("readlink")
        fd = self._open(path, os.O_PATH | os.O_NOFOLLOW)
        try:
            return os.readlink(b"", dir_fd=fd)
        finally:
            os.close(fd)

    def _named(self, path: bytes) -> tuple[str, int]:
        """A /proc path that leads to the object without walking its name again, and the descriptor to close."""
        fd = self._open(path, os.O_PATH | os.O_NOFOLLOW)
        return f"/proc/self/fd/{fd}", fd

    def getxattr(self, path: bytes, name: bytes) -> bytes:
        self.round_trip("getxattr")
        target, fd = self._named(path)
        try:
            return os.getxattr(target, name)
        finally:
            os.close(fd)

    def listxattr(self, path: bytes) -> list[bytes]:
        self.round_trip("listxattr")
        target, fd = self._named(path)
        try:
            return [os.fsencode(name) for name in os.listxattr(target)]
        finally:
            os.close(fd)

    def statfs(self) -> os.statvfs_result:
        self.round_trip("statfs")
        return os.fstatvfs(self.root_fd)

    # --- data ------------------------------------------------------------------------------------------------------

    def open_file(self, path: bytes, flags: int = _READ_FLAGS) -> int:
        self.round_trip("open")
        return self._open(path, flags | os.O_NOFOLLOW | os.O_NOCTTY)

    def fstat(self, fd: int) -> Stat:
        self.counters.add("fstat")
        return self.stat(fd)

    def open_version(self, path: bytes, expected: Inode) -> int:
        """Open a regular file that must be the version that was pinned. Raises `Changed` if it is not."""
        try:
            fd = self.open_file(path)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO):
                raise Changed from error
            raise
        try:
            self.check_version(fd, expected)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def check_version(self, fd: int, expected: Inode) -> None:
        """Raises `Changed` unless `fd` is the pinned version.

        A plain fstat: where inode number and change time are the same the birth time is, too.
        """
        self.counters.add("fstat")
        now = os.fstat(fd)
        if (
            now.st_ctime_ns != expected.ctime_ns
            or now.st_mtime_ns != expected.mtime_ns
            or now.st_size != expected.size
            or now.st_ino != expected.source_inode
            or (expected.device and now.st_dev != expected.device)
            or not stat.S_ISREG(now.st_mode)
        ):
            raise Changed

    def open_and_stat(self, path: bytes) -> tuple[int, Stat]:
        """Open for reading, and what was opened."""
        fd = self.open_file(path)
        try:
            return fd, self.fstat(fd)
        except BaseException:
            os.close(fd)
            raise

    def open_again(self, path: bytes, flags: int, expected: Inode) -> int:
        """Open what had been open. Raises `Changed` where its name leads to another file."""
        fd = self.open_file(path, flags | os.O_NONBLOCK)
        try:
            if self.fstat(fd).inode != expected.source_inode:
                raise Changed
        except BaseException:
            os.close(fd)
            raise
        return fd

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        """`length` bytes, fewer only at the end of the file."""
        self.round_trip("read")
        data = os.pread(fd, length, offset)
        self.counters.add_bytes(len(data))
        if len(data) == length or not data:
            return data
        parts = [data]
        missing = length - len(data)
        while missing and (data := os.pread(fd, missing, offset + length - missing)):
            self.counters.add("read")
            self.counters.add_bytes(len(data))
            parts.append(data)
            missing -= len(data)
        return b"".join(parts)

    def read_path(self, path: bytes, length: int, offset: int) -> bytes:
        """Open, read, close: for a file that nothing is kept of."""
        fd = self.open_file(path)
        try:
            return self.pread(fd, length, offset)
        finally:
            os.close(fd)

    def read_version(
        self, path: bytes, expected: Inode, offset: int, length: int, fd: int | None = None, *, keep: bool = False
    ) -> bytes:
        """Bytes of the pinned version, compared before and after. Raises `Changed` on any difference.

        `fd`: a descriptor of the file, which is closed unless the caller wants to `keep` it; without one the file is
        opened here.
        """
        if fd is None:
            fd = self.open_version(path, expected)
        try:
            data = self.pread(fd, length, offset)
            if len(data) != length:
                raise Changed
            self.check_version(fd, expected)
            return data
        finally:
            if not keep:
                os.close(fd)


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

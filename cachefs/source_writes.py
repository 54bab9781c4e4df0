"""Changes to the source: what passes through a read-write mount. Synchronous; see `source.py` for the rules.

Each function returns what the changed objects look like afterwards, so that one trip to a thread does all.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cachefs import syscalls
from cachefs.attributes import Stat
from cachefs.source import Source


class SourceWriter:
    def __init__(self, source: Source) -> None:
        self._source = source

    def _stat(self, fd: int, name: bytes = b"") -> Stat:
        self._source.counters.add("lstat")
        return syscalls.statx(fd, name, self._source.root_device)

    def create(self, directory: bytes, name: bytes, flags: int, mode: int) -> tuple[int, Stat, Stat]:
        """(descriptor, the file, its directory)"""
        self._source.round_trip("create")
        with self._source.directory(directory) as parent:
            fd = os.open(name, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=parent)
            try:
                return fd, self._stat(fd), self._stat(parent)
            except BaseException:
                os.close(fd)
                raise

    def add(self, operation: str, directory: bytes, name: bytes, make: Callable[[int], None]) -> tuple[Stat, Stat]:
        """mkdir, mknod, symlink: `make` is given the directory's descriptor. (the new object, its directory)"""
        self._source.round_trip(operation)
        with self._source.directory(directory) as parent:
            make(parent)
            return self._stat(parent, name), self._stat(parent)

    def remove(self, directory: bytes, name: bytes, *, is_directory: bool) -> Stat:
        """unlink or rmdir. The directory afterwards."""
        self._source.round_trip("rmdir" if is_directory else "unlink")
        with self._source.directory(directory) as parent:
            if is_directory:
                os.rmdir(name, dir_fd=parent)
            else:
                os.unlink(name, dir_fd=parent)
            return self._stat(parent)

    def link(self, path: bytes, directory: bytes, name: bytes) -> tuple[Stat, Stat]:
        self._source.round_trip("link")
        old_directory, _, old_name = path.rpartition(b"/")
        with self._source.directory(old_directory) as old, self._source.directory(directory) as new:
            os.link(old_name, name, src_dir_fd=old, dst_dir_fd=new, follow_symlinks=False)
            return self._stat(new, name), self._stat(new)

    def rename(
        self, directory: bytes, name: bytes, new_directory: bytes, new_name: bytes, flags: int
    ) -> tuple[Stat, Stat, Stat]:
        """(the renamed object, its old directory, its new one)"""
        self._source.round_trip("rename")
        with self._source.directory(directory) as old, self._source.directory(new_directory) as new:
            syscalls.renameat2(old, name, new, new_name, flags)
            return self._stat(new, new_name), self._stat(old), self._stat(new)

    @contextmanager
    def _named(self, path: bytes) -> Iterator[str]:
        """A name in /proc for exactly this object, a symlink included."""
        if not path:
            yield f"/proc/self/fd/{self._source.root_fd}"
            return
        directory, _, name = path.rpartition(b"/")
        with self._source.directory(directory) as parent:
            fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        try:
            yield f"/proc/self/fd/{fd}"
        finally:
            os.close(fd)

    def change(self, operation: str, path: bytes, make: Callable[[str], None]) -> Stat:
        """chmod, chown, utimens, setxattr, removexattr: `make` is given a name of the object. The object afterwards."""
        self._source.round_trip(operation)
        with self._named(path) as name:
            make(name)
            return self._stat(int(name.rpartition("/")[2]))

    def change_open(self, operation: str, fd: int, make: Callable[[str], None]) -> Stat:
        """The same by a descriptor: for a file that may have lost its name."""
        self._source.round_trip(operation)
        make(f"/proc/self/fd/{fd}")
        return self._stat(fd)

    def truncate(self, path: bytes, size: int) -> Stat:
        fd = self._source.open_file(path, os.O_WRONLY | os.O_NONBLOCK)
        try:
            return self.ftruncate(fd, size)
        finally:
            os.close(fd)

    def ftruncate(self, fd: int, size: int) -> Stat:
        self._source.round_trip("truncate")
        os.ftruncate(fd, size)
        return self._stat(fd)

    def pwrite(self, fd: int, data: bytes, offset: int) -> int:
        self._source.round_trip("write")
        view = memoryview(data)
        while view:
            written = os.pwrite(fd, view, offset)
            view, offset = view[written:], offset + written
        return len(data)

    def fsync(self, fd: int, *, data_only: bool) -> None:
        self._source.round_trip("fsync")
        (os.fdatasync if data_only else os.fsync)(fd)

    def fsync_directory(self, path: bytes) -> None:
        fd = self._source.open_file(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self.fsync(fd, data_only=False)
        finally:
            os.close(fd)

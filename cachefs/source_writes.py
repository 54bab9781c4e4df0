"""Changes to the source: what passes through a read-write mount. Synchronous; see `source.py` for the rules.

Each function returns what the changed objects look like afterwards, so that one trip to a thread does all. The daemon
opens directories and looks at results; only the change itself is made as the caller (`caller.py`).
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from cachefs import syscalls
from cachefs.attributes import Stat
from cachefs.caller import Caller, Identity
from cachefs.errors import Busy
from cachefs.source import Source

_NOT_PASSED_ON = os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_DIRECT
"""Of a caller's open flags. The kernel computes the offsets of appends itself; O_APPEND on our descriptor would
override them. O_DIRECT needs aligned memory, which a request does not have (hazard 36)."""


class SourceWriter:
    def __init__(self, source: Source) -> None:
        self._source = source

    def _stat(self, fd: int, name: bytes = b"") -> Stat:
        self._source.counters.add("lstat")
        return self._source.stat(fd, name)

    def create(self, directory: bytes, name: bytes, flags: int, mode: int, caller: Caller) -> tuple[int, Stat, Stat]:
        """(descriptor, the file, its directory)"""
        self._source.round_trip("create")
        flags = flags & ~_NOT_PASSED_ON | flags & os.O_EXCL | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with self._source.directory(directory) as parent:
            fd = caller.run(lambda: os.open(name, flags, mode, dir_fd=parent))
            try:
                return fd, self._stat(fd), self._stat(parent)
            except BaseException:
                os.close(fd)
                raise

    def open_file(self, path: bytes, flags: int, caller: Caller) -> int:
        """Open an existing file for writing."""
        self._source.round_trip("open")
        flags = flags & ~_NOT_PASSED_ON | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC
        directory, _, name = path.rpartition(b"/")
        with self._source.directory(directory) as parent:
            try:
                return caller.run(lambda: os.open(name, flags, dir_fd=parent))
            except BlockingIOError as error:
                raise Busy from error  # another process holds a lease on it

    def add(
        self, operation: str, directory: bytes, name: bytes, make: Callable[[int], None], caller: Caller
    ) -> tuple[Stat, Stat]:
        """mkdir, mknod, symlink: `make` is given the directory's descriptor. (the new object, its directory)"""
        self._source.round_trip(operation)
        with self._source.directory(directory) as parent:
            caller.run(partial(make, parent))
            return self._stat(parent, name), self._stat(parent)

    def remove(self, directory: bytes, name: bytes, caller: Caller, *, is_directory: bool) -> Stat:
        """unlink or rmdir. The directory afterwards."""
        self._source.round_trip("rmdir" if is_directory else "unlink")
        call = os.rmdir if is_directory else os.unlink
        with self._source.directory(directory) as parent:
            caller.run(lambda: call(name, dir_fd=parent))
            return self._stat(parent)

    def link(self, path: bytes, directory: bytes, name: bytes, caller: Caller) -> tuple[Stat, Stat]:
        self._source.round_trip("link")
        old_directory, _, old_name = path.rpartition(b"/")
        with self._source.directory(old_directory) as old, self._source.directory(directory) as new:
            caller.run(lambda: os.link(old_name, name, src_dir_fd=old, dst_dir_fd=new, follow_symlinks=False))
            return self._stat(new, name), self._stat(new)

    def rename(
        self, directory: bytes, name: bytes, new_directory: bytes, new_name: bytes, flags: int, caller: Caller
    ) -> tuple[Stat, Stat, Stat]:
        """(the renamed object, its old directory, its new one)"""
        self._source.round_trip("rename")
        with self._source.directory(directory) as old, self._source.directory(new_directory) as new:
            caller.run(lambda: syscalls.renameat2(old, name, new, new_name, flags))
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

    def change(self, operation: str, path: bytes, make: Callable[[str], None], caller: Caller) -> Stat:
        """chmod, chown, utimens, setxattr, removexattr: `make` is given a name of the object. The object afterwards."""
        self._source.round_trip(operation)
        with self._named(path) as name:
            caller.run(partial(make, name))
            return self._stat(int(name.rpartition("/")[2]))

    def change_open(self, operation: str, fd: int, make: Callable[[str], None], caller: Caller) -> Stat:
        """The same by a descriptor: for a file that may have lost its name."""
        self._source.round_trip(operation)
        caller.run(partial(make, f"/proc/self/fd/{fd}"))
        return self._stat(fd)

    def truncate(self, path: bytes, size: int, caller: Caller) -> Stat:
        fd = self.open_file(path, os.O_WRONLY, caller)
        try:
            return self.ftruncate(fd, size, caller)
        finally:
            os.close(fd)

    def ftruncate(self, fd: int, size: int, caller: Caller) -> Stat:
        self._source.round_trip("truncate")
        caller.run(lambda: os.ftruncate(fd, size))
        return self._stat(fd)

    def pwrite(self, fd: int, data: bytes, offset: int, writer: Identity) -> int:
        """`writer`: who opened the file."""
        self._source.round_trip("write")

        def write() -> int:
            done = 0
            view = memoryview(data)
            while done < len(data):
                try:
                    done += os.pwrite(fd, view[done:], offset + done)
                except OSError:
                    if not done:
                        raise
                    break  # a short write: the caller sees how far it came, as on a full disk
            return done

        return writer.run(write)

    def fsync(self, fd: int, *, data_only: bool) -> None:
        self._source.round_trip("fsync")
        (os.fdatasync if data_only else os.fsync)(fd)

    def fsync_directory(self, path: bytes) -> None:
        fd = self._source.open_file(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self.fsync(fd, data_only=False)
        finally:
            os.close(fd)

"""Changes to the source, by read-write mounts. Synchronous, with the rules of `source.py`.

Each function returns the attributes of the changed objects, so that one call in a thread is enough. The daemon opens
directories and reads attributes; only the change itself is made with the identity of the caller (`credentials.py`).
"""

import os
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from cachefs.source.credentials import Caller, Identity
from cachefs.source.directories import Directory
from cachefs.source.identity import Changed, Renamed, is_same
from cachefs.source.opening import component, reopen_directory
from cachefs.source.source import Object, Source
from cachefs.store.index.records import Inode
from cachefs.system import syscalls
from cachefs.system.descriptors import closing, closing_on_error
from cachefs.system.stat import Stat

_NOT_PASSED_ON = os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_DIRECT
"""Of a caller's open flags. The kernel computes the offsets of appends itself; O_APPEND on our descriptor would
override them. O_DIRECT needs aligned memory, which a request does not have (hazard 36)."""


class SourceWriter:
    def __init__(self, source: Source) -> None:
        self._source = source
        self._hold = partial(source.directories.hold, to_change=True)

    def _stat(self, fd: int, name: bytes = b"") -> Stat:
        self._source.counters.add("lstat")
        return self._source.stat(fd, name)

    def _check_version(self, expected: Inode | None, fd: int, name: bytes = b"") -> None:
        """Raises `Changed` if this object is the expected one and of another version. The change that follows moves its
        ctime, which does not show it any more then (hazard 24)."""
        if expected is None:
            return
        self._source.counters.add("lstat")
        with suppress(FileNotFoundError):  # the change says so, if it matters
            now = self._source.stat(fd, name, ask=True)
            if is_same(expected.identity, now) and not expected.same_version(now):
                raise Changed.at(expected.number)

    def create(
        self, directory: Directory, name: bytes, flags: int, mode: int, caller: Caller
    ) -> tuple[int, Stat, Stat]:
        """(descriptor, the file, its directory). Raises `Changed` if the name leads to something else than a file."""
        self._source.round_trip("create")
        flags = flags & ~_NOT_PASSED_ON | flags & os.O_EXCL
        with (
            self._hold(directory) as parent,
            closing_on_error(caller.run(lambda: self._source.opener.create_at(parent, name, flags, mode))) as fd,
        ):
            now = self._stat(fd)
            if not stat.S_ISREG(now.mode):
                raise Changed
            os.set_blocking(fd, True)
            return fd, now, self._stat(parent)

    def open_file(self, at: Object, flags: int, caller: Caller) -> tuple[int, Stat]:
        """Open an existing file for writing. Returns (descriptor, attributes before the file is truncated).

        It is truncated after the check that it is the right one.
        """
        flags_at_source = flags & ~(_NOT_PASSED_ON | os.O_TRUNC)
        if flags & os.O_TRUNC and flags & os.O_ACCMODE == os.O_RDONLY:
            flags_at_source |= os.O_RDWR  # the kernel has checked for this; the handle can only read
        fd, now = self._source.open_file(at, flags_at_source, run=caller.run, to_change=True)
        with closing_on_error(fd):
            if flags & os.O_TRUNC:
                caller.run(lambda: os.ftruncate(fd, 0))
            return fd, now

    def add(
        self, operation: str, directory: Directory, name: bytes, make: Callable[[int], None], caller: Caller
    ) -> tuple[Stat, Stat]:
        """mkdir, mknod, symlink: `make` gets the descriptor of the directory. Returns (new object, its directory)."""
        self._source.round_trip(operation)
        with self._hold(directory) as parent:
            caller.run(partial(make, parent))
            return self._stat(parent, name), self._stat(parent)

    def remove(
        self, directory: Directory, name: bytes, version: Inode | None, caller: Caller, *, is_directory: bool
    ) -> Stat:
        """unlink or rmdir. Returns the directory. `version`: as of `_check_version`."""
        self._source.round_trip("rmdir" if is_directory else "unlink")
        call = os.rmdir if is_directory else os.unlink
        with self._hold(directory) as parent:
            self._check_version(version, parent, name)
            caller.run(lambda: call(name, dir_fd=parent))
            return self._stat(parent)

    def link(
        self, at: Object, version: Inode | None, directory: Directory, name: bytes, caller: Caller
    ) -> tuple[Stat, Stat]:
        """Returns (the object, the directory of its new name). `version`: as of `_check_version`."""
        self._source.round_trip("link")
        with self._source.hold(at) as fd, self._hold(directory) as new:
            self._check_version(version, fd)
            path = f"/proc/self/fd/{fd}"
            caller.run(lambda: os.link(path, component(name), dst_dir_fd=new, follow_symlinks=True))
            return self._stat(new, name), self._stat(new)

    def rename(
        self,
        directory: Directory,
        name: bytes,
        new_directory: Directory,
        new_name: bytes,
        flags: int,
        caller: Caller,
        expected: Sequence[tuple[Directory, bytes, Inode]] = (),
        versions: tuple[Inode | None, Inode | None] = (None, None),
    ) -> tuple[Stat, Stat, Stat]:
        """Returns (the renamed object, its old directory, its new one).

        `expected`: pinned names and their inodes. The kernel moves its dentry, which must be that of the renamed
        object: raises `Renamed` if it is not. `versions`: of the old and the new name, as of `_check_version`.
        """
        self._source.round_trip("rename")
        with self._hold(directory) as old, self._hold(new_directory) as new:
            for place, each, inode in expected:
                if not is_same(inode.identity, self._stat(old if place is directory else new, each)):
                    raise Renamed.away(place.number, each, inode.number)
            self._check_version(versions[0], old, name)
            self._check_version(versions[1], new, new_name)
            caller.run(lambda: syscalls.renameat2(old, name, new, new_name, flags))
            return self._stat(new, new_name), self._stat(old), self._stat(new)

    def change(self, operation: str, at: Object, make: Callable[[str], None], caller: Caller) -> Stat:
        """chmod, chown, utimens, setxattr, removexattr: `make` gets a path of the object. Returns the object."""
        self._source.round_trip(operation)
        with self._source.hold(at, to_change=True) as fd:
            caller.run(partial(make, f"/proc/self/fd/{fd}"))
            return self._stat(fd)

    def truncate(self, at: Object, size: int, caller: Caller) -> Stat:
        with closing(self.open_file(at, os.O_WRONLY, caller)[0]) as fd:
            return self.ftruncate(fd, size, caller)

    def ftruncate(self, fd: int, size: int, caller: Caller) -> Stat:
        self._source.round_trip("truncate")
        caller.run(lambda: os.ftruncate(fd, size))
        return self._stat(fd)

    def pwrite(self, fd: int, data: bytes, offset: int, writer: Identity, *, whole: bool = False) -> int:
        """How much was written. `writer`: the identity that opened the file.

        `whole`: raise the error of what cannot be written, also if a part was. For O_DIRECT: the kernel, which may have
        divided the write, makes EIO of a short one.
        """
        self._source.round_trip("write")

        def write() -> int:
            done = 0
            view = memoryview(data)
            while done < len(data):
                try:
                    done += os.pwrite(fd, view[done:], offset + done)
                except OSError:
                    if whole or not done:
                        raise
                    break  # a short write, as on a full disk
            return done

        return writer.run(write)

    def fsync(self, fd: int, *, data_only: bool) -> None:
        self._source.round_trip("fsync")
        (os.fdatasync if data_only else os.fsync)(fd)

    def fsync_directory(self, directory: Directory) -> None:
        self._source.round_trip("open")
        with self._source.directories.hold(directory) as path_fd:
            fd = reopen_directory(path_fd)
        with closing(fd):
            self.fsync(fd, data_only=False)

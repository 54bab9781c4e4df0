"""The directory underneath: its objects, and all system calls that read its metadata and data.

All functions are synchronous and may hang as long as the source hangs: they run in threads of `call_pool.py`. Names are
opened one component at a time (opening.py), and an opened object is compared with its record (identity.py). Each system
call is counted, and delayed if a latency is simulated.
"""

import errno
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeVar

from cachefs.contract.shared import LATE_NS
from cachefs.errors import Busy
from cachefs.source.credentials import as_admitted
from cachefs.source.directories import ROOT, Directory, SourceDirectories
from cachefs.source.identity import GONE, Changed, check, check_version
from cachefs.source.opening import Opener, component, reopen_directory
from cachefs.source.volumes import Connection, Place, Volumes
from cachefs.stats.source_counters import SourceCounters
from cachefs.store import filesystem
from cachefs.store.index.records import Identity, Inode
from cachefs.system import syscalls
from cachefs.system.clock import SYSTEM, Clock
from cachefs.system.descriptors import closing, closing_on_error
from cachefs.system.stat import Stat

T = TypeVar("T")
FIRST_GENERATION = 0
"""`Source.generation` when a daemon begins."""
_READ_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY  # hazard 21


class Object(NamedTuple):
    """An object of the source, and how to reach it."""

    directory: Directory
    name: bytes = b""
    """Its name in the directory; empty: the directory itself."""
    identity: Identity | None = None
    """The expected identity. None: of the directory itself, which is compared when it is opened."""
    fd: int = -1
    """An open descriptor, which may be the only way to reach it. Then name and identity are not used."""


Run = Callable[[Callable[[], int]], int]


def by_descriptor(fd: int) -> Object:
    return Object(ROOT, fd=fd)


@dataclass(slots=True, eq=False)
class Look:
    """lstat of several names of one directory. Called in a thread; the trio thread reads its progress.

    A result is None for a name that does not exist any more. It is an OSError if lstat fails for one name but not for
    the directory, as for the mountpoint of a user's own FUSE filesystem: that must not break the listing for all users.
    Errors of the directory itself are raised.
    """

    source: "Source"
    directory: Directory
    names: Sequence[bytes]
    results: list[Stat | OSError | None] = field(default_factory=list)
    asked_at: float | None = None
    """When lstat of the name after the last result was called."""
    given_up_at: int | None = None
    """The index of the name that hangs; later names are not looked at."""

    def __call__(self) -> list[Stat | OSError | None]:
        self.results.clear()
        with self.source.directories.hold(self.directory) as fd:
            for name in self.names:
                if self.given_up_at is not None:
                    break
                self.asked_at = time.monotonic()
                self.results.append(self.source.lstat_or_error(fd, name))
        return self.results

    def waits_s(self) -> float:
        """How long lstat of the present name has taken so far."""
        return 0.0 if self.asked_at is None else time.monotonic() - self.asked_at


class Source:
    """The source behind `root_fd`, a descriptor opened O_RDONLY | O_DIRECTORY before anything is mounted.

    The number of the descriptor stays the same when the source is mounted anew (`reconnect`). If `root_device` is
    given, creating a `Source` makes no call to the source: a successor does so while the source hangs.
    """

    def __init__(
        self,
        root_fd: int,
        *,
        root_device: int | None = None,
        fstype: str = "ext4",
        simulate_latency_s: float = 0.0,
        clock: Clock = SYSTEM,
    ) -> None:
        """`root_device`: st_dev of `root_fd`; None: read it here. `fstype`: as in the mount table; empty: not known.
        `clock`: compared with times of the source."""
        self.root_fd = root_fd
        self._is_coherent = filesystem.is_coherent(fstype)
        self._has_late_pages = filesystem.has_late_pages(fstype)
        self.has_change_times = filesystem.has_change_times(fstype)
        self.hides_mounts = filesystem.hides_mounts(fstype)
        self.checks_attributes = filesystem.checks_attributes(fstype)
        self.has_own_clock = filesystem.has_own_clock(fstype)
        self.sets_no_time_back = filesystem.sets_no_time_back(fstype)
        roots = [Place(*syscalls.place_of(root_fd))] if root_device is None else []
        device = roots[0].device if root_device is None else root_device
        self.connection = Connection(Volumes(root_fd, roots), device)
        self.connection.volumes.describe(0, fstype)
        self._follows_paths = self.connection.volumes.kind(0).follows_paths
        """Then the kernel may keep attributes of what had the path a moment ago: it always asks."""
        self.generation = FIRST_GENERATION
        """How many times the source was mounted anew. Descriptors of an earlier generation are dead."""
        self.counters = SourceCounters(simulate_latency_s)
        self.round_trip = self.counters.round_trip
        self.clock = clock
        self.opener = Opener()
        check = lambda: self.connection.volumes.check_source()  # noqa: E731
        self.directories = SourceDirectories(
            root_fd, self.opener.open_at, self.fstat, self._lstat_at, self._compare, self.is_in_snapshot, check, clock
        )

    @property
    def root_device(self) -> int:
        return self.connection.root_device

    def reconnect(self, fd: int, root: Place) -> None:
        """Replace the root by another one, which was compared with the old one. Closes `fd`. From any thread.

        Makes no call to the source, because the caller has a lock.
        """
        self.connection = self.connection.following(root)
        os.dup2(fd, self.root_fd, inheritable=False)
        os.close(fd)
        self.generation += 1
        self.directories.clear()

    def ask(self) -> None:
        """Check that the root answers, bypassing the kernel's attribute cache. Raises OSError. Not counted."""
        self.directories.check_root()
        self.connection.volumes.check_source()

    def stat(self, fd: int, name: bytes = b"", *, ask: bool = False) -> Stat:
        """lstat of a name in a directory, or of `fd` itself. Not counted. `ask`: the result must be fresh."""
        asks = (ask or self._follows_paths) and not self._is_coherent
        try:
            now = self.connection.stat(fd, name, ask=asks)
        except FileNotFoundError:
            if not name:
                self.directories.check_root()
            raise
        except PermissionError:
            # A filesystem beneath the source, which a user may have mounted, may be closed to all others.
            now = as_admitted(partial(self.connection.stat, fd, name, ask=asks), lambda now: not now.device)
        volumes = self.connection.volumes
        if not asks and now.device not in volumes.trusted and (ask or volumes.kind(now.device).follows_paths):
            return self.connection.stat(fd, name, ask=True)
        return now if self._is_coherent and now.device in volumes.trusted else now._replace(is_fresh=asks)

    def _follows_path(self, identity: Identity) -> bool:
        """May a descriptor of the object lead elsewhere, and does its number show that?"""
        volumes = self.connection.volumes
        return volumes.kind(identity.device).follows_paths and identity.device not in volumes.without_numbers

    def _compare(self, fd: int, identity: Identity, ask: bool) -> Stat | None:
        """As `SourceDirectories.compare`."""
        if not self._follows_path(identity):
            return None
        self.counters.add("fstat")
        now = self.connection.stat(fd, b"", ask=ask)
        check(identity, now)
        return now

    def _lstat_at(self, directory_fd: int, name: bytes) -> Stat:
        self.round_trip("lstat")
        return self.stat(directory_fd, component(name))

    # --- names -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _opening(self, at: Object, flags: int, run: Run = as_admitted, *, to_change: bool = False) -> Iterator[int]:
        """Open an object, and compare it in the block. The descriptor stays open, unless that fails.

        Raises `Changed` if the name does not lead to such an object. Where a descriptor follows its path, only a
        comparison in the block shows what was opened, and only if the name led there before (misses/source.c).
        """
        if at.fd >= 0:
            path = f"/proc/self/fd/{at.fd}"
            try:
                fd = run(lambda: os.open(path, flags & ~os.O_NOFOLLOW | os.O_CLOEXEC))
            except BlockingIOError as error:
                raise Busy from error
            with closing_on_error(fd):
                yield fd
            return
        with ExitStack() as opened:
            with self.directories.hold(at.directory, to_change=to_change) as directory:
                try:
                    if at.identity is not None and not flags & os.O_PATH and self._follows_path(at.identity):
                        check(at.identity, self._lstat_at(directory, at.name))
                    fd = run(lambda: self.opener.open_at(directory, at.name, flags))
                except OSError as error:
                    if error.errno in GONE:
                        raise Changed from error
                    raise
                opened.callback(os.close, fd)
                yield fd
            opened.pop_all()

    @contextmanager
    def hold(self, at: Object, *, to_change: bool = False) -> Iterator[int]:
        """A descriptor of an object of any type, compared with its identity. `to_change`: for a change of the object,
        which is not repeated."""
        if at.fd >= 0:
            yield at.fd
        elif not at.name:
            with self.directories.hold(at.directory, repeats=not to_change) as fd:
                yield fd
        else:
            with self._opening(at, os.O_PATH) as fd:
                if at.identity is not None:
                    check(at.identity, self.fstat(fd))
            with closing(fd):
                yield fd

    # --- metadata --------------------------------------------------------------------------------------------------

    def lstat(self, directory: Directory, name: bytes = b"", *, ask: bool = False) -> Stat:
        """Of a name in a directory; without one, of the directory itself. `ask`: as of `stat`."""
        self.round_trip("lstat")
        with self.directories.hold(directory) as fd:
            return self.stat(fd, component(name) if name else b"", ask=ask)

    def lstat_or_error(self, directory_fd: int, name: bytes) -> Stat | OSError | None:
        """As in `Look`."""
        try:
            return self._lstat_at(directory_fd, name)
        except FileNotFoundError:
            return None
        except OSError as error:
            syscalls.statx(directory_fd, b"", ask=True)
            return error

    def lstat_directory(self, directory: Directory) -> Stat:
        """lstat by its name in the directory above it. Raises `Changed` if that leads to another directory.

        A directory without a name is looked at by its descriptor.
        """
        self.round_trip("lstat")
        if directory.identity is None:
            return self.stat(self.root_fd)
        with self.directories.hold(directory.parent or directory) as fd:
            try:
                now = self.stat(fd, directory.name if directory.parent is not None else b"")
                check(directory.identity, now)
            except OSError as error:
                if error.errno in GONE or isinstance(error, Changed):
                    raise Changed.at(directory.number) from error
                raise
            return now

    def ask_directory(self, directory: Directory) -> None:
        """Check that the directory itself answers, bypassing the kernel's attribute cache. Raises OSError."""
        self.round_trip("lstat")
        with self.directories.hold(directory) as fd:
            syscalls.statx(fd, b"", ask=True)

    def readdir(self, directory: Directory) -> list[bytes]:
        """All names of a directory, without "." and ".."."""
        return self.listing(directory)[0]

    def listing(self, directory: Directory) -> tuple[list[bytes], Stat]:
        """The same, and the attributes of the directory, which are not newer than the names."""
        self.round_trip("readdir")
        with self.directories.hold(directory) as path_fd:
            names, now = as_admitted(partial(self._listing, path_fd))
            if not names and self.directories.is_gone(directory, path_fd):
                raise Changed.at(directory.number)
            return names, now

    def _listing(self, path_fd: int) -> tuple[list[bytes], Stat]:
        with closing(reopen_directory(path_fd)) as fd:
            now = self.fstat(fd, ask=True)
            return [os.fsencode(name) for name in os.listdir(fd)], now

    def readlink(self, at: Object) -> bytes:
        self.round_trip("readlink")
        with self.hold(at) as fd:
            return os.readlink(b"", dir_fd=fd)

    def getxattr(self, at: Object, name: bytes, run: Callable[[Callable[[], bytes]], bytes] = as_admitted) -> bytes:
        self.round_trip("getxattr")
        with self.hold(at) as fd, self._without_attributes(fd):
            return run(partial(os.getxattr, f"/proc/self/fd/{fd}", name))

    def getxattr_of_directory(self, directory: Directory, name: bytes) -> bytes:
        return self.getxattr(Object(directory), name)

    def listxattr(self, at: Object) -> list[bytes]:
        self.round_trip("listxattr")
        with self.hold(at) as fd, self._without_attributes(fd):
            return [os.fsencode(name) for name in as_admitted(partial(os.listxattr, f"/proc/self/fd/{fd}"))]

    @contextmanager
    def _without_attributes(self, fd: int) -> Iterator[None]:
        """Raises EOPNOTSUPP where EIO says that the filesystem has no extended attributes."""
        try:
            yield
        except OSError as error:
            if error.errno != errno.EIO or not self.connection.volumes.kind(self.fstat(fd).device).fails_for_attributes:
                raise
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP)) from error

    def with_stat(self, at: Object, read: Callable[[Object], T]) -> tuple[T, Stat]:
        """The result of `read`, and the attributes of the object afterwards."""
        with self.hold(at) as fd:
            return read(by_descriptor(fd)), self.stat(fd)

    def statfs(self) -> os.statvfs_result:
        self.round_trip("statfs")
        return syscalls.statvfs(self.root_fd)

    # --- data ------------------------------------------------------------------------------------------------------

    def fstat(self, fd: int, *, ask: bool = False) -> Stat:
        self.counters.add("fstat")
        return self.stat(fd, ask=ask)

    def open_file(
        self, at: Object, flags: int = _READ_FLAGS, run: Run = as_admitted, *, to_change: bool = False
    ) -> tuple[int, Stat]:
        """Open a regular file. Returns (descriptor, attributes). O_NONBLOCK: a FIFO in its place must not block
        (hazard 30).

        `run`: opens it with another identity. `to_change`: also compare the names on the path.
        """
        self.round_trip("open")
        with self._opening(at, flags | os.O_NONBLOCK, run, to_change=to_change) as fd:
            now = self.fstat(fd, ask=True)
            if at.identity is not None:
                check(at.identity, now)
            self.directories.check_snapshot(at.directory, now.device)
            os.set_blocking(fd, True)
            if not (self.has_change_times and now.device in self.connection.volumes.trusted):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # the kernel compares its pages by mtime and size
        return fd, now

    def open_mutable(self, at: Object, flags: int = _READ_FLAGS, run: Run = as_admitted) -> tuple[int, Stat]:
        """`open_file` of one that others may write to. ceph-fuse must know at the open that it is read past pages: of a
        file that grows it gives other bytes than those that were asked for, or none for a long time (hazard 97)."""
        is_read = flags & os.O_ACCMODE == os.O_RDONLY
        return self.open_file(at, flags | os.O_DIRECT if is_read and self._has_late_pages else flags, run)

    def check_version(self, fd: int, expected: Inode) -> None:
        try:
            check_version(expected, self.fstat(fd, ask=True))
        except (FileNotFoundError, NotADirectoryError):  # the descriptor follows its path (hazard 57)
            raise Changed from None

    def open_to_keep(self, at: Object) -> int:
        """Open a file for several reads, and its attributes. Raises `Changed` if its name leads to another file."""
        return self.open_file(at)[0]

    def pread(self, fd: int, length: int, offset: int, inode: Inode | None, *, past: bool = False) -> bytes:
        """`length` bytes, fewer only at the end of the file. `past`: the kernel's pages of a file, whatever its age."""
        if self._has_late_pages:
            past = past or inode is None or inode.ctime_ns + LATE_NS > self.clock.realtime_ns()
        read = syscalls.pread_past_pages if past else os.pread
        more = syscalls.pread_beyond_known_end if self._follows_paths else lambda *_: b""
        self.round_trip("read")
        parts: list[bytes] = []
        at, end = offset, offset + length
        while at < end and (data := read(fd, end - at, at) or more(fd, end - at, at)):
            if parts:  # `round_trip` has counted the first one
                self.counters.add("read")
            self.counters.add_bytes(len(data))
            parts.append(data)
            at += len(data)
        return b"".join(parts)  # no copy of a single part

    def read_open(self, fd: int, length: int, offset: int, inode: Inode | None, directory: Directory) -> bytes:
        """`pread` of a file that may have changed since it was opened. Raises `Changed` if its snapshot was removed.
        `inode`: None if there is no record. `directory`: as of `SourceDirectories.check_snapshot`."""
        data = self.pread(fd, length, offset, inode)
        self.directories.check_snapshot(directory, self.fstat(fd).device if inode is None else inode.device)
        return data

    def read_file(self, at: Object, length: int, offset: int, inode: Inode | None = None) -> bytes:  # not cached
        with closing(self.open_file(at)[0]) as fd:
            return self.pread(fd, length, offset, inode)

    def read_version(
        self, at: Object, expected: Inode, offset: int, length: int, fd: int | None = None, *, keep: bool = False
    ) -> bytes:
        """Bytes of the pinned version, compared after the read. Raises `Changed` on any difference.

        `fd`: a descriptor of the file; None: open it here. It is closed afterwards, unless `keep` is set. `at`: with a
        descriptor, needed in a snapshot only.
        """
        if fd is None:
            self.round_trip("open")
            with self._opening(at, _READ_FLAGS) as fd:
                data = self._read_compared(fd, at, expected, offset, length)
            if not keep:
                os.close(fd)
            return data
        try:
            return self._read_compared(fd, at, expected, offset, length)
        finally:
            if not keep:
                os.close(fd)

    def _read_compared(self, fd: int, at: Object, expected: Inode, offset: int, length: int) -> bytes:
        try:
            is_coherent = self._is_coherent and expected.device in self.connection.volumes.trusted
            data = self.pread(fd, length, offset, expected, past=not is_coherent)
        except OSError:
            self.check_version(fd, expected)  # a FIFO, for example
            raise
        self.check_version(fd, expected)
        self.directories.check_snapshot(at.directory, expected.device)
        if len(data) != length:
            raise Changed
        return data

    def is_in_snapshot(self, device: int) -> bool:
        return self.connection.volumes.holds_snapshots(device)

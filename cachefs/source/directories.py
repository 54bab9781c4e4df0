"""Descriptors of directories of the source: names are looked up in a directory, not along a path (hazard 23).

A descriptor leads to the directory that the kernel knows by a number, even after a rename: a renamed directory keeps
its children, and another directory that has got its name is never mistaken for it. It also saves the walk: a path of
six components costs one look-up at the source instead of six.

On FUSE sources other than ceph-fuse a descriptor may follow its path instead (hazard 57). There the directory is
compared with its record before and after each use of its descriptor, and before each change. A use during which it has
moved away and back is repeated: a rename changes its ctime, and not its mtime (`has_moved`). Where only the name says
which directory it is (NO_NUMBER), it is opened again after a second: the descriptor may not follow the path.

About a thousand descriptors are kept; the least recently used are closed. Each directory is compared with its record
once, when it is opened by its name in the directory above it; the inode of a descriptor never changes. A directory
whose name leads elsewhere, and whose descriptor was closed, cannot be reached any more: `Changed`.

If several threads of `call_pool.py` need the same directory at the same time, one opens it and the others wait for that
one. An open that hangs delays the others by only one second; then each of them opens the directory itself.

For changes, the pinned names on the path are compared as well, once a second. The kernel caches them for ever, and a
change that was meant for the directory of that name must not be made in another one: `Renamed`.
"""

import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from cachefs.contract.index import ROOT_INODE
from cachefs.errors import Busy
from cachefs.source.credentials import as_admitted
from cachefs.source.identity import GONE, Changed, Renamed, check, is_same
from cachefs.store.index.records import Identity
from cachefs.system import syscalls
from cachefs.system.clock import SYSTEM, Clock
from cachefs.system.descriptors import closing_on_error
from cachefs.system.stat import NO_NUMBER, Stat

MAX_KEPT = 1000
PATIENCE_S = 1.0
"""How long a thread waits for another thread that opens the same directory."""
IDLE_S = 2.0
"""How long a directory of another volume than the source's own is kept without use: it keeps a filesystem mounted."""
NAME_HOLDS_S = 1.0
"""For how long after a comparison a change relies on the name of a directory."""
NOT_KNOWN_NS = 1 << 63
"""Instead of a time: later than all."""
NEVER_NS = -1 << 64
"""Instead of a time: earlier than all."""
_REMOVED = (errno.ENOENT, errno.ESTALE)
"""Errors of a call by the descriptor of a directory that was removed; also of one whose source is gone."""


@dataclass(frozen=True, slots=True, eq=False)
class Directory:
    """A directory, and how to reach it: by its own name in the directory above it."""

    number: int
    identity: Identity | None = None
    """None: the root, whose descriptor is always open."""
    parent: "Directory | None" = None
    """None: the root, or a directory that has no name any more."""
    name: bytes = b""
    has_pinned_name: bool = False
    """The kernel caches its name for ever."""

    @property
    def path(self) -> bytes | None:
        """From the root. None: no name leads there any more.

        It is built each time: stored in every directory, paths would need memory quadratic in the depth.
        """
        names = []
        at = self
        while at.parent is not None:
            names.append(at.name)
            at = at.parent
        return None if at.identity is not None else b"/".join(reversed(names))

    def changed_ns(self, now: Stat) -> int:
        """When an object in this directory was changed last, or came here: its ctime. Where another filesystem or a
        snapshot begins that is not known, because an older one may have been mounted, or made, just now."""
        device = 0 if self.identity is None else self.identity.device
        return now.ctime_ns if now.device == device else NOT_KNOWN_NS


ROOT = Directory(ROOT_INODE)


@dataclass(slots=True, eq=False)
class _Descriptor:
    fd: int
    identity: Identity | None
    named_until: float
    used_s: float = 0.0
    """When it was last released."""
    users: int = 1
    """The thread that has opened it is the first."""
    is_dropped: bool = False


@dataclass(slots=True, eq=False)
class SourceDirectories:
    # dependencies
    root_fd: int
    open_at: Callable[[int, bytes, int], int]
    """`open_at(directory descriptor, name, flags)` opens one component, following no symlink."""
    stat: Callable[[int], Stat]
    lstat: Callable[[int, bytes], Stat]
    """`lstat(directory descriptor, name)`."""
    compare: Callable[[int, Identity, bool], Stat | None]
    """`compare(descriptor, identity, ask)`: the attributes of a directory, if its descriptor may lead elsewhere. Raises
    `Changed` if it does. `ask`: as of `Source.stat`."""
    is_in_snapshot: Callable[[int], bool]
    """Is an object with this `Stat.device` in a snapshot?"""
    check_source: Callable[[], object]
    """Raises OSError if the source lies in a snapshot that was removed."""
    clock: Clock = SYSTEM
    # constants
    limit: int = MAX_KEPT
    # state, behind the lock
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _kept: OrderedDict[int, _Descriptor] = field(default_factory=OrderedDict)
    _openings: dict[int, threading.Event] = field(default_factory=dict)
    """Directories that a thread is opening; set when it has succeeded or failed."""
    _generation: int = 0
    """Of the source: a directory that is opened while the source is mounted anew is not kept."""

    @contextmanager
    def hold(self, directory: Directory, *, to_change: bool = False, repeats: bool = True) -> Iterator[int]:
        """An O_PATH descriptor of the directory, open while the block runs. Raises `Changed` if it is gone.

        `to_change`: for a change in it. Raises `Renamed` if pinned names do not lead there any more.

        If the block does not find something, the directory may have been removed: then this raises `Changed`, too.
        Raises `Busy` if the block has to be repeated, because the directory has moved meanwhile. `repeats`: False: the
        block changes the directory itself.
        """
        if directory.identity is None:
            yield self.root_fd
            return
        kept = self._take_checked(directory, ask=to_change) or self._open(directory)
        try:
            if to_change:
                self._compare_names(directory)
                yield kept.fd
                return
            before = self._check(directory, kept.fd)
            try:
                yield kept.fd
            finally:
                after = self._check(directory, kept.fd)
                if repeats and before is not None and after is not None and has_moved(before, after):
                    raise Busy
        except OSError as error:
            is_known = isinstance(error, Changed) and bool(error.directory)
            if error.errno in _REMOVED and not is_known and self.is_gone(directory, kept.fd):
                raise Changed.at(directory.number) from error
            raise
        finally:
            self._release(kept)

    def _take_checked(self, directory: Directory, *, ask: bool = False) -> _Descriptor | None:
        """`_take`, unless the descriptor leads elsewhere: then the directory is opened by its name."""
        kept = self._take(directory)
        if kept is None:
            return None
        try:
            self._check(directory, kept.fd, ask=ask)
        except OSError:
            self._give_up(directory.number, kept.fd)
            self._release(kept)
            return None
        return kept

    def _check(self, directory: Directory, fd: int, *, ask: bool = True) -> Stat | None:
        """Raises `Changed` if what was found, or not found, by this descriptor is that of another directory."""
        assert directory.identity is not None
        try:
            return self.compare(fd, directory.identity, ask)
        except Changed:
            raise Changed.at(directory.number) from None

    def _compare_names(self, directory: Directory) -> None:
        """Of the directory and of all above it. A loop, because paths may be of any depth."""
        below = directory
        while below.parent is not None:
            if below.has_pinned_name:
                kept = self._take(below) or self._open(below)
                try:
                    if self.clock.monotonic_s() >= kept.named_until:
                        self._compare_name(below, below.parent)
                        kept.named_until = self.clock.monotonic_s() + NAME_HOLDS_S
                finally:
                    self._release(kept)
            below = below.parent

    def _compare_name(self, directory: Directory, parent: Directory) -> None:
        assert directory.identity is not None
        with self.hold(parent) as fd:
            try:
                leads_here = is_same(directory.identity, self.lstat(fd, directory.name))
            except OSError as error:
                if error.errno not in GONE:
                    raise
                leads_here = False
        if not leads_here:
            raise Renamed.away(parent.number, directory.name, directory.number)

    def check_root(self) -> None:
        """Raises OSError if the root does not answer, bypassing the kernel's attribute cache. A root that does not
        exist any more is lost: ceph-fuse answers so when its client was evicted (hazard 94)."""
        try:
            syscalls.statx(self.root_fd, b"", ask=True)
        except FileNotFoundError:
            raise OSError(errno.ESHUTDOWN, os.strerror(errno.ESHUTDOWN)) from None

    def check_snapshot(self, directory: Directory, device: int) -> None:
        """Raises `Changed` if the snapshot that a file is in was removed, or took another name.

        ceph-fuse goes on answering by the descriptors of a snapshot that was removed, and gives zeros (hazard 71).
        `directory`: that has the file; ROOT if that is not known. `device`: the file's. A snapshot to which no name is
        known counts as removed.
        """
        below = directory
        if self.is_in_snapshot(device) and not self._is_in_snapshot(below):
            raise Changed
        while self._is_in_snapshot(below):
            if below.parent is None:
                raise Changed.at(below.number)
            try:
                self._compare_name(below, below.parent)
            except Changed:
                raise Changed.at(below.number) from None
            below = below.parent
        self.check_source()

    def _is_in_snapshot(self, directory: Directory) -> bool:
        return directory.identity is not None and self.is_in_snapshot(directory.identity.device)

    def is_gone(self, directory: Directory, fd: int) -> bool:
        """Was it removed, or the filesystem that it is on?

        A Btrfs subvolume that was deleted, and a filesystem that was unmounted, do not show it themselves, nor does a
        directory that a FUSE filesystem keeps as long as it is open (MooseFS). So where another volume begins on the
        path, and on such a filesystem, the name must still lead there: raises `Changed`.
        """
        try:
            if self.stat(fd).nlink == 0 and not self._is_named_without_links(directory):
                return True
        except OSError as error:
            if error.errno not in _REMOVED:
                raise
            self.check_root()
            self._give_up(directory.number, fd)
            return True
        below, may_be_kept = directory, directory.identity is not None and self._check(directory, fd) is not None
        while below.parent is not None and below.identity is not None:
            above = below.parent.identity
            if may_be_kept or below.identity.device != (0 if above is None else above.device):
                try:
                    self._compare_name(below, below.parent)
                except Changed:
                    raise Changed.at(below.number) from None  # its name must be looked up again, not the directory's
            below, may_be_kept = below.parent, False
        return False

    def _is_named_without_links(self, directory: Directory) -> bool:
        """Does its name lead to it although it has no links?

        So does the place where a directory is mounted that was removed, and some FUSE filesystems count no links.
        """
        if directory.parent is None or directory.identity is None:
            return False
        with self.hold(directory.parent) as above:
            try:
                now = self.lstat(above, directory.name)
            except OSError as error:
                if error.errno not in GONE:
                    raise
                return False
        return is_same(directory.identity, now) and now.nlink == 0

    def _give_up(self, number: int, fd: int) -> None:
        """The source knows no object of this descriptor any more: the directory is opened by its name again.

        A FUSE filesystem does not keep a directory that was removed, and may give its number to the next one.
        """
        with self._lock:
            kept = self._kept.get(number)
            if kept is not None and kept.fd == fd:
                self._drop(self._kept.pop(number))

    def let_go(self) -> None:
        """Close idle descriptors that keep a filesystem beneath the source from being unmounted (hazard 55)."""
        with self._lock:
            for number, kept in list(self._kept.items()):
                is_idle = not kept.users and self.clock.monotonic_s() - kept.used_s > IDLE_S
                if is_idle and kept.identity is not None and kept.identity.device:
                    self._drop(self._kept.pop(number))

    def clear(self) -> None:
        """The source was mounted anew: descriptors of the old mount are useless."""
        with self._lock:
            self._generation += 1
            while self._kept:
                self._drop(self._kept.popitem()[1])

    def _take(self, directory: Directory) -> _Descriptor | None:
        with self._lock:
            return self._take_locked(directory)

    def _take_locked(self, directory: Directory) -> _Descriptor | None:
        kept = self._kept.get(directory.number)
        if kept is None:
            return None
        is_late = self.clock.monotonic_s() >= kept.named_until and directory.parent is not None
        is_by_name = kept.identity is not None and kept.identity.inode == NO_NUMBER
        is_other = not _are_alike(kept.identity, directory.identity)  # the number is another directory's now
        if is_other or (is_late and is_by_name):
            self._drop(self._kept.pop(directory.number))
            return None
        self._kept.move_to_end(directory.number)
        kept.users += 1
        return kept

    def _open(self, directory: Directory) -> _Descriptor:
        """Open it, and all above it without a descriptor."""
        generation = self._generation
        missing = []
        above: Directory | None = directory
        start = None
        while above is not None and above.identity is not None and (start := self._take_checked(above)) is None:
            missing.append(above)
            above = above.parent
        if above is None:
            raise Changed.at(missing[-1].number)  # it has no name
        for below in reversed(missing):
            fd = self.root_fd if start is None else start.fd
            try:
                following = self._open_once(fd, below, generation)
            finally:
                if start is not None:
                    self._release(start)
            start = following
        assert start is not None
        return start

    def _open_once(self, parent_fd: int, directory: Directory, generation: int) -> _Descriptor:
        """Open a directory, or wait for the thread that is opening it."""
        with self._lock:
            if (kept := self._take_locked(directory)) is not None:
                return kept
            others = self._openings.get(directory.number)
            if others is None:
                ours = self._openings[directory.number] = threading.Event()
        if others is not None:
            others.wait(PATIENCE_S)
            return self._take(directory) or self._open_one(parent_fd, directory, generation)
        try:
            return self._open_one(parent_fd, directory, generation)
        finally:
            with self._lock:
                del self._openings[directory.number]
            ours.set()

    def _open_one(self, parent_fd: int, directory: Directory, generation: int) -> _Descriptor:
        assert directory.identity is not None
        try:
            flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW
            fd = as_admitted(partial(self.open_at, parent_fd, directory.name, flags))
        except OSError as error:
            if error.errno in GONE:
                raise Changed.at(directory.number) from error
            raise
        with closing_on_error(fd):
            try:
                check(directory.identity, self.stat(fd))
            except Changed:
                raise Changed.at(directory.number) from None
        made = _Descriptor(fd, directory.identity, self.clock.monotonic_s() + NAME_HOLDS_S)
        with self._lock:
            if directory.number in self._kept or generation != self._generation:  # another thread was faster
                made.is_dropped = True
                return made
            self._kept[directory.number] = made
            while len(self._kept) > self.limit:
                self._drop(self._kept.popitem(last=False)[1])
        return made

    def _drop(self, kept: _Descriptor) -> None:
        """With the lock. If it is in use, its last user closes it."""
        kept.is_dropped = True
        if not kept.users:
            os.close(kept.fd)

    def _release(self, kept: _Descriptor) -> None:
        with self._lock:
            kept.users -= 1
            kept.used_s = self.clock.monotonic_s()
            if kept.is_dropped and not kept.users:
                os.close(kept.fd)


def has_moved(before: Stat, after: Stat) -> bool:
    """Was a directory renamed between these? That changes its ctime. A change of its names sets ctime and mtime to the
    same time."""
    if after.ctime_ns == before.ctime_ns:
        return False
    return after.mtime_ns == before.mtime_ns or after.mtime_ns != after.ctime_ns


def _are_alike(one: Identity | None, other: Identity | None) -> bool:
    """In the same connection. Change times are not compared: they move."""
    return one is not None and other is not None and one[:4] == other[:4]

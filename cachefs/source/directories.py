"""Directories of the source, held by descriptors: names are looked up in a directory, not along a path (hazard 23).

A descriptor leads to the directory that the kernel knows by a number, whatever its name is by now: one that was
renamed keeps its children, and one that was swapped in under its name is never mistaken for it. It saves the walk,
too: a path of six components costs one look-up at the source instead of six.

About a thousand are kept, the least recently used are closed. Each is compared with its record once, when it is
opened by its name in the directory above it; the inode behind a descriptor never changes. A directory whose name
leads elsewhere, and whose descriptor is gone, cannot be reached any more: `Changed`.

Several threads that want the same directory at the same time open it once: one opens it, the others wait for that one.
An open that hangs delays the others by one second only; then each of them opens the directory itself.

Where something is changed, the pinned names on the path are compared as well, once a second: the kernel believes them
for ever, and a change that was meant for the directory of that name must not be made in another one: `Renamed`.

Used from the threads of `call_pool.py`, all at once.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cachefs.contract.index import ROOT_INODE
from cachefs.source.identity import GONE, Changed, Identity, Renamed, check, is_same
from cachefs.system.clock import SYSTEM, Clock
from cachefs.system.stat import Stat

MAX_HELD = 1000
PATIENCE_S = 1.0
"""How long a thread waits for another thread that opens the same directory."""
NAME_HOLDS_S = 1.0
"""For how long after a comparison a change relies on the name of a directory."""


@dataclass(frozen=True, slots=True, eq=False)
class Directory:
    """A directory, and how to reach it: by its own name in the directory above it."""

    number: int
    identity: Identity | None = None
    """None: the root, which is held for ever."""
    parent: "Directory | None" = None
    """None: the root, or a directory that has no name any more."""
    name: bytes = b""
    has_pinned_name: bool = False
    """The kernel believes its name for ever."""

    @property
    def path(self) -> bytes | None:
        """From the root. None: no names lead there any more.

        It is made anew each time: kept in every directory, paths would take memory by the square of the depth.
        """
        names = []
        at = self
        while at.parent is not None:
            names.append(at.name)
            at = at.parent
        return None if at.identity is not None else b"/".join(reversed(names))


ROOT = Directory(ROOT_INODE)


class _Held:
    __slots__ = ("fd", "identity", "is_dropped", "named_until", "users")

    def __init__(self, fd: int, identity: Identity | None, named_until: float) -> None:
        self.fd = fd
        self.identity = identity
        self.users = 1  # who has opened it
        self.is_dropped = False
        self.named_until = named_until


class SourceDirectories:
    def __init__(
        self,
        root_fd: int,
        open_at: Callable[[int, bytes, int], int],
        stat: Callable[[int], Stat],
        lstat: Callable[[int, bytes], Stat],
        *,
        limit: int = MAX_HELD,
        clock: Clock = SYSTEM,
    ) -> None:
        """`open_at(directory descriptor, name, flags)` opens one component, following no symlink.

        `lstat(directory descriptor, name)`.
        """
        # dependencies
        self._root_fd = root_fd
        self._open_at = open_at
        self._stat = stat
        self._lstat = lstat
        self._clock = clock
        # constants
        self._limit = limit
        # state, behind the lock
        self._lock = threading.Lock()
        self._held: OrderedDict[int, _Held] = OrderedDict()
        self._openings: dict[int, threading.Event] = {}
        """Directories that a thread is opening right now; set when it has them, or has failed."""
        self._generation = 0
        """Of the source: what is opened while it is mounted anew is not kept."""

    @contextmanager
    def hold(self, directory: Directory, *, to_change: bool = False) -> Iterator[int]:
        """An O_PATH descriptor of the directory, open while the block runs. Raises `Changed` if it is not there.

        `to_change`: for a change in it. Raises `Renamed` if pinned names do not lead there any more.

        Nothing is found in a directory that was removed: then its name may lead to another one by now.
        """
        if directory.identity is None:
            yield self._root_fd
            return
        held = self._take(directory) or self._open(directory)
        try:
            if to_change:
                self._compare_names(directory)
            yield held.fd
        except (FileNotFoundError, Changed) as error:
            is_known = isinstance(error, Changed) and bool(error.directory)
            if not is_known and self.is_removed(held.fd):
                raise Changed.at(directory.number) from error
            raise
        finally:
            self._release(held)

    def _compare_names(self, directory: Directory) -> None:
        """Of the directory, and of all above it: paths may be as deep as they like."""
        below = directory
        while below.parent is not None:
            if below.has_pinned_name:
                held = self._take(below) or self._open(below)
                try:
                    if self._clock.monotonic_s() >= held.named_until:
                        self._compare_name(below, below.parent)
                        held.named_until = self._clock.monotonic_s() + NAME_HOLDS_S
                finally:
                    self._release(held)
            below = below.parent

    def _compare_name(self, directory: Directory, parent: Directory) -> None:
        assert directory.identity is not None
        with self.hold(parent) as fd:
            try:
                leads_here = is_same(directory.identity, self._lstat(fd, directory.name))
            except OSError as error:
                if error.errno not in GONE:
                    raise
                leads_here = False
        if not leads_here:
            raise Renamed.away(parent.number, directory.name, directory.number)

    def is_removed(self, fd: int) -> bool:
        return self._stat(fd).nlink == 0

    def clear(self) -> None:
        """The source was mounted anew: no descriptor of the old mount is of use."""
        with self._lock:
            self._generation += 1
            while self._held:
                self._drop(self._held.popitem()[1])

    def _take(self, directory: Directory) -> _Held | None:
        with self._lock:
            return self._take_locked(directory)

    def _take_locked(self, directory: Directory) -> _Held | None:
        held = self._held.get(directory.number)
        if held is None:
            return None
        if held.identity != directory.identity:  # the number is another directory's now
            self._drop(self._held.pop(directory.number))
            return None
        self._held.move_to_end(directory.number)
        held.users += 1
        return held

    def _open(self, directory: Directory) -> _Held:
        """Open it, and all above it that are not held."""
        generation = self._generation
        missing = []
        above: Directory | None = directory
        start = None
        while above is not None and above.identity is not None and (start := self._take(above)) is None:
            missing.append(above)
            above = above.parent
        if above is None:
            raise Changed.at(missing[-1].number)  # it has no name
        for below in reversed(missing):
            fd = self._root_fd if start is None else start.fd
            try:
                following = self._open_once(fd, below, generation)
            finally:
                if start is not None:
                    self._release(start)
            start = following
        assert start is not None
        return start

    def _open_once(self, parent_fd: int, directory: Directory, generation: int) -> _Held:
        """Open a directory, or wait for the thread that is opening it."""
        with self._lock:
            if (held := self._take_locked(directory)) is not None:
                return held
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

    def _open_one(self, parent_fd: int, directory: Directory, generation: int) -> _Held:
        assert directory.identity is not None
        try:
            fd = self._open_at(parent_fd, directory.name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError as error:
            if error.errno in GONE:
                raise Changed.at(directory.number) from error
            raise
        try:
            check(directory.identity, self._stat(fd))
        except Changed:
            os.close(fd)
            raise Changed.at(directory.number) from None
        except BaseException:
            os.close(fd)
            raise
        made = _Held(fd, directory.identity, self._clock.monotonic_s() + NAME_HOLDS_S)
        with self._lock:
            if directory.number in self._held or generation != self._generation:  # another thread was faster
                made.is_dropped = True
                return made
            self._held[directory.number] = made
            while len(self._held) > self._limit:
                self._drop(self._held.popitem(last=False)[1])
        return made

    def _drop(self, held: _Held) -> None:
        """With the lock. Whoever uses it last closes it."""
        held.is_dropped = True
        if not held.users:
            os.close(held.fd)

    def _release(self, held: _Held) -> None:
        with self._lock:
            held.users -= 1
            if held.is_dropped and not held.users:
                os.close(held.fd)

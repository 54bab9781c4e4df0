"""Detects that the source was lost, and opens it again when it is mounted again. The old root descriptor stays dead.

A call that fails with ENOTCONN, ESTALE or ESHUTDOWN raises a doubt, and the root descriptor decides. If it fails in the
same way, the source is lost: calls wait for at most `--source-timeout`, hits are served, and the path is opened once a
second. What is found there must be the directory that was mounted (inode number, birth time if there is one, type of
the filesystem). It gets the number of the old descriptor, so that all users of that number have it. The fast path and
the descriptor store get it as well.

Every access to the source runs in a thread with a time-out: it may hang instead of failing. A lost source is back only
when its root has answered, or was opened again; a time-out is not an answer. A thread that hangs, hangs in one mount;
the next mount at the same path is asked by other threads. If SOURCE is MOUNTPOINT, the path leads to this mount, which
must not be accessed. Then only the user can help, and the error says how.

A filesystem that was detached (`umount -l`), or that another one covers, is not lost: it lives as long as it is used,
and all open files are in it. cachefs goes on using it, and says that its path leads elsewhere.
"""

import errno
import logging
import os
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import trio

from cachefs.client import mount_table
from cachefs.contract.index import Table
from cachefs.errors import CacheFsError
from cachefs.source.call_pool import CallPool
from cachefs.source.calls.doubt import may_be_lost
from cachefs.source.source import Source
from cachefs.source.volumes import Place
from cachefs.store.filesystem import FIRST_OF_SNAPSHOTS, numbers_last, numbers_snapshots
from cachefs.store.index.index import Index
from cachefs.system import syscalls
from cachefs.system.descriptors import closing_on_error
from cachefs.system.threads import in_thread

log = logging.getLogger(__name__)
T = TypeVar("T")

RETRY_S = 1.0
WATCH_S = 60.0
"""How often the path of the source is looked up in the mount table."""
TIMEOUT_S = 5.0
"""Or `--source-timeout`, if that is less."""
MAX_THREADS = 4
"""How many threads may wait for one mount."""
_KEY = b"source root"
_SAVED = struct.Struct("<I2Q")  # flags of the value, inode number, birth time; the type of the filesystem follows


@dataclass(frozen=True, slots=True)
class Root:
    """What identifies the root of a source, also after it is mounted again."""

    inode: int
    birth_ns: int
    """0: unknown."""
    fstype: str
    """As in the mount table; empty if it is not there."""

    @classmethod
    def of(cls, fd: int) -> "Root":
        """The root of an open source. Accesses the source."""
        now = syscalls.statx(fd, b"", ask=True)
        return cls(now.inode, now.btime_ns, mount_table.fstype_of(fd))

    @property
    def numbers_last(self) -> bool:
        """Do objects have the same inode numbers when it is mounted again? With birth times that does not matter.

        libfuse gives numbers by the order of look-ups, unless a filesystem has its own.
        """
        return bool(self.birth_ns) or numbers_last(self.fstype)

    @property
    def _lasting_inode(self) -> int:
        """The part of the inode number that is the same when the filesystem is mounted again."""
        return self.inode % FIRST_OF_SNAPSHOTS if numbers_snapshots(self.fstype) else self.inode

    def is_same(self, other: "Root") -> bool:
        births = {self.birth_ns, other.birth_ns}
        types = {self.fstype, other.fstype}
        return (
            self._lasting_inode == other._lasting_inode
            and (len(births) == 1 or 0 in births)
            and (len(types) == 1 or "" in types)
        )

    def save(self, index: Index) -> None:
        """Store it for a successor, which may find the source lost."""
        with index.update() as update:
            update.put(Table.META, _KEY, _SAVED.pack(0, self.inode, self.birth_ns) + self.fstype.encode())

    @classmethod
    def load(cls, index: Index) -> "Root | None":
        with index.view() as view:
            value = view.get(Table.META, _KEY)
        if value is None:
            return None
        _, inode, birth_ns = _SAVED.unpack_from(value)
        return cls(inode, birth_ns, bytes(value[_SAVED.size :]).decode())


class SourceConnection:
    def __init__(self, path: str, root: Root, source: Source, call_pool: CallPool, changed: Callable[[], None]) -> None:
        """`changed`: called when the root descriptor of the source refers to a new mount."""
        # dependencies
        self._path = path
        self._root = root
        self._source = source
        self._call_pool = call_pool
        self._changed = changed
        # state
        self._limiters: dict[int, trio.CapacityLimiter] = {}
        """By mount number."""
        self._switching = threading.Lock()
        self._generation = source.generation
        """The last one that was announced."""
        self._doubt = trio.Event()
        self._doubted = 0
        """errno of the call that failed."""
        self.lost: str | None = None
        """Why the source is lost. None: it is not."""
        self._opened = self._place()
        """The directory that the root descriptor was opened in. None: not known to this daemon."""
        self._logged: str | None = None
        """The last problem that was logged and is no loss."""
        self.reconnects = 0
        call_pool.on_doubt.add(self.doubt)

    def doubt(self, error: OSError | None = None) -> None:
        """Check the root soon. `error`: the reason; None: the source may have been lost before this daemon."""
        self._doubted = 0 if error is None else error.errno or 0
        self._doubt.set()

    @property
    def problem(self) -> str | None:
        """Why the source is lost, or that its path leads elsewhere. Accesses the mount table only."""
        return self.lost or self._elsewhere()

    def _place(self) -> tuple[str, str] | None:
        """The directory of the open root. None: its path leads to another mount, so that this is not known."""
        top = mount_table.covering(self._path)
        if top is None or top.number != mount_table.number_of(self._source.root_fd):
            return None
        return mount_table.directory_of(top, self._path)

    def _elsewhere(self) -> str | None:
        top = mount_table.covering(self._path)
        if top is None or (top.fstype == mount_table.FSTYPE and top.source == self._path):  # SOURCE may be MOUNTPOINT
            return None
        if top.number == mount_table.number_of(self._source.root_fd):
            return None
        found = mount_table.directory_of(top, self._path)
        device = self._source.root_device
        if found == self._opened or (self._opened is None and found[0] == f"{os.major(device)}:{os.minor(device)}"):
            return None
        return (
            f"{self._path} was unmounted or covered, and leads to another directory now (on {top.fstype}). cachefs "
            "still uses the old one; to use the new one, unmount cachefs and mount it again"
        )

    async def run(self) -> None:
        """A task: check the root after each doubt, and the path from time to time, for ever."""
        while True:
            if (problem := self._elsewhere()) != self._logged:
                self._logged = problem
                if problem is not None:
                    log.warning("%s", problem)
            with trio.move_on_after(WATCH_S):
                await self._doubt.wait()
            if self._doubt.is_set():
                self._doubt = trio.Event()
                await self._check()

    async def _check(self) -> None:
        error = await self._ask()
        if error is not None and may_be_lost(error):
            self._call_pool.suspend()
            self.lost = f"{self._path}: {error.strerror}; waiting until it is mounted again"
            log.error("the source is lost: %s. Cached data are still served", self.lost)
            await self._until_it_is_back()
        elif self._doubted == errno.ESHUTDOWN:
            # An evicted client may still have its root, and nothing else.
            await self._reopen(only_if_moved=True)
        anew = self._source.generation != self._generation
        if anew:
            self._generation = self._source.generation
            self._opened = self._place()
            self.reconnects += 1
            self._changed()
            log.warning("the source is back: %s was opened again", self._path)
        elif self.lost is not None:
            log.warning("the source is back: %s answers again", self._path)
        self.lost = None
        self._call_pool.resume(anew=anew)

    async def _until_it_is_back(self) -> None:
        logged = ""
        while True:
            reason = await self._reopen()
            if self._source.generation != self._generation:
                return
            if reason != logged:
                log.warning("the source is still lost: %s", reason)
            self.lost = logged = reason
            await trio.sleep(RETRY_S)
            if await self._ask() is None:
                return

    async def _ask(self) -> OSError | None:
        """An error that means that the root is lost, or TimeoutError. None: it answers, or fails in another way."""

        def ask() -> OSError | None:
            try:
                self._source.ask()
            except OSError as error:
                return error if may_be_lost(error) or error.errno == errno.ETIMEDOUT else None
            return None

        try:
            return await self._in_thread(ask, mount_table.number_of(self._source.root_fd))
        except TimeoutError as error:
            return error

    async def _reopen(self, *, only_if_moved: bool = False) -> str:
        """Open the path, and use what is there. The reason if that fails, else an empty string."""
        generation = self._generation

        def reopen() -> str:
            try:
                fd, place = self._open()
            except (OSError, CacheFsError) as error:
                return str(error) if isinstance(error, CacheFsError) else f"{self._path}: {error.strerror}"
            with self._switching:  # an abandoned thread may return late
                unmoved = only_if_moved and place.device == self._source.root_device
                if self._source.generation != generation or unmoved:
                    os.close(fd)
                else:
                    self._source.reconnect(fd, place)
            return ""

        top = mount_table.covering(self._path)
        try:
            return await self._in_thread(reopen, top.number if top is not None else 0)
        except TimeoutError:
            return f"{self._path} does not answer"

    def _open(self) -> tuple[int, Place]:
        """A descriptor of the root, and its place; nothing else is asked of the source. Runs in a thread.

        Raises CacheFsError with the reason if it is not the source.
        """
        top = mount_table.covering(self._path)
        if top is not None and top.fstype == mount_table.FSTYPE:
            raise CacheFsError(
                f"{self._path} leads to the cachefs mount on {top.mountpoint}, which covers its own source: unmount it "
                f"(cachefs umount {top.mountpoint}), mount the source again, then mount cachefs again"
            )
        fd = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with closing_on_error(fd):
            found = Root.of(fd)
            if not found.is_same(self._root):
                raise CacheFsError(
                    f"{self._path} is another directory now: inode {found.inode} ({found.fstype}), "
                    f"not {self._root.inode} ({self._root.fstype})"
                )
            mount = mount_table.mount_of(fd)
            if self._source.connection.volumes.refuses_private and mount is not None and mount.is_private:
                raise CacheFsError(f"{self._path} was mounted without allow_other, but all users may enter this mount")
            return fd, Place(*syscalls.place_of(fd))

    async def _in_thread(self, function: Callable[[], T], mount: int) -> T:
        """Access a mount, by its number. Raises TimeoutError; the result of a late thread is ignored."""
        self._limiters = {number: limiter for number, limiter in self._limiters.items() if limiter.borrowed_tokens}
        limiter = self._limiters.setdefault(mount, trio.CapacityLimiter(MAX_THREADS))
        with trio.move_on_after(min(TIMEOUT_S, self._call_pool.timeout_s)):
            return await in_thread(function, abandon_on_cancel=True, limiter=limiter)
        raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

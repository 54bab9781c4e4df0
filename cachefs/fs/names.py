"""The semantics of names: look-ups, and comparing what they lead to with the source. docs/SEMANTICS.md is the promise.

Every method takes and gives inode numbers and records; errors are OSError with the errno the caller shall see. All the
rest of `fs/` builds on this: `attributes.py`, `handles.py` (opens and reads), `directories.py` (listings) and
`mutations.py` (what changes the source). What names forget is in `invalidation.py`.

Rules: a record is committed to the index before the kernel is told of it. State is looked up again after every await.
No method waits for a notification of the kernel, which may wait for the request that the method serves (hazard 1).
"""

import errno
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import NamedTuple, TypeVar

import trio
from outcome import Outcome

from cachefs.contract.index import ROOT_INODE
from cachefs.fs import permissions
from cachefs.fs.immutability import Immutability
from cachefs.fs.invalidation import Invalidation, Notifier
from cachefs.fs.permissions import Permissions, PermissionsChanged
from cachefs.metadata.inode_cache import InodeCache
from cachefs.metadata.validity import FOREVER_NS
from cachefs.options import Options
from cachefs.source import age
from cachefs.source.call_pool import CallPool
from cachefs.source.credentials import Caller
from cachefs.source.directories import ROOT, Directory
from cachefs.source.identity import Changed, Renamed, identity_of
from cachefs.source.single_flight import Overtaken, SingleFlight
from cachefs.source.source import Object, Source
from cachefs.store.index.environment import View
from cachefs.store.index.records import UNLINKED, UNSETTLED, Inode
from cachefs.system.clock import NANOSECONDS
from cachefs.system.stat import Stat

T = TypeVar("T")


class Entry(NamedTuple):
    """What a look-up is answered with. `inode` None: there is no such name."""

    inode: Inode | None
    timeout_s: float
    """How long the kernel may believe the entry and the attributes."""


def failed(number: int) -> OSError:
    return OSError(number, os.strerror(number))


class FileSystem:
    def __init__(
        self,
        source: Source,
        call_pool: CallPool,
        metadata: InodeCache,
        options: Options,
        notifier: Notifier,
        invalidation: Invalidation,
        immutability: Immutability,
    ) -> None:
        # dependencies
        self.source = source
        self.call_pool = call_pool
        self.metadata = metadata
        self.options = options
        self.notifier = notifier
        self.invalidation = invalidation
        self.immutability = immutability
        self.permissions = Permissions(metadata, source, call_pool, notifier, options)
        # state
        self.lookups = 0
        """How many there were: background work sees by it that requests wait."""
        self._own_changes: dict[int, trio.Event] = {}
        """Inode → set when the change of its names by this mount that is under way has been made."""
        self._lstats: SingleFlight[tuple[int, bytes, int], Inode | None] = SingleFlight()
        """By parent, name, and how many changes this mount had made: later requests do not join earlier calls."""

    # --- names -----------------------------------------------------------------------------------------------------

    def path_of(self, number: int, view: View | None = None) -> bytes:
        """A path from the root of the source; in a `view` that is open already, where there is one."""
        if view is None:
            with self.metadata.index.view() as view:
                return self.path_of(number, view)
        return self.metadata.paths.path(view, number)

    def directory(self, number: int) -> Directory:
        """A directory of the source."""
        with self.metadata.index.view() as view:
            return self.metadata.paths.directory(view, number)

    def object_of(self, number: int, view: View | None = None) -> Object:
        """An object of the source, by a name that leads to it. ESTALE where none does, but for directories."""
        if view is None:
            with self.metadata.index.view() as view:
                return self.object_of(number, view)
        inode = self.metadata.inode(view, number)
        if inode is None:
            raise failed(errno.ESTALE)
        if inode.is_directory:
            return Object(self.metadata.paths.directory(view, number))
        link = self.metadata.paths.name(view, number)
        if link is None:
            raise failed(errno.ESTALE)
        return Object(self.metadata.paths.directory(view, link[0]), link[1], identity_of(inode))

    async def ask(
        self,
        number: int,
        function: Callable[[], T],
        *,
        discard: Callable[[T], object] | None = None,
        once: bool = False,
    ) -> T:
        """Call the source, for an object. Where that is another one by now its entry is dropped: ESTALE."""
        try:
            return await self.call_pool.run(function, discard=discard, once=once)
        except Renamed as error:
            self.invalidation.lose_name(error.parent, error.name, error.number)
            raise
        except Changed as error:
            self.invalidation.replaced(error.directory or number)
            raise

    async def learnt(self, number: int, now: Stat) -> None:
        """An object is about to be shown as it is now, not as its record says."""
        for directory in self._directories_of([number]):
            await self.learnt_in(directory, now.ctime_ns)

    async def learnt_in(self, directory: Directory, ctime_ns: int) -> None:
        """An object in this directory that changed at `ctime_ns` is about to be shown."""
        try:
            await self.permissions.learnt(directory, ctime_ns)
        except Changed as error:
            self.invalidation.replaced(error.directory)
            raise

    async def before_change(self, caller: Caller, *, names_in: Iterable[int] = (), objects: Iterable[int] = ()) -> None:
        """Names in these directories, or these objects, are about to be changed for a caller."""
        directories = [self.directory(number) for number in names_in]
        with suppress(Changed):  # not where it was: the change itself compares the names (directories.py)
            await self.permissions.before_change(caller, *directories, *self._directories_of(objects))

    def _directories_of(self, numbers: Iterable[int]) -> list[Directory]:
        """A directory of each of these objects. None for what no name leads to: it is open."""
        found: list[Directory] = []
        with self.metadata.index.view() as view:
            for number in numbers:
                link = self.metadata.paths.name(view, number)
                if link is not None:
                    with suppress(OSError):
                        found.append(self.metadata.paths.directory(view, link[0]))
        return found

    def above(self, number: int) -> list[int]:
        """The directories above an object, the nearest one first."""
        found = []
        for directory in self._directories_of([number]):
            above: Directory | None = directory
            while above is not None:
                found.append(above.number)
                above = above.parent
        return found

    def pins(self, path: bytes) -> bool:
        """Does this mount pin whatever it sees at this path?"""
        return self.options.pins_everything and not self.metadata.mutable_names.matches_path(path)

    def timeout_s(self, inode: Inode, remaining_ns: int | None = None) -> float:
        """`remaining_ns`: of the record, where that is known."""
        if inode.flags & UNLINKED and not self.immutability.outlives_its_name(inode):
            return self.options.unpinned_timeout_s  # it may have names that we do not know
        if remaining_ns is None:
            remaining_ns = self.metadata.remaining_ns(inode)
        return math.inf if remaining_ns == FOREVER_NS else remaining_ns / NANOSECONDS

    def mutable_name_timeout_s(self, inode: Inode) -> float:
        """A name that --mutable matches is not pinned, whatever it leads to."""
        return min(self.timeout_s(inode), self.options.unpinned_timeout_s)

    def inode(self, number: int) -> Inode:
        """The record of an inode that the kernel was told of. ESTALE if it has gone."""
        with self.metadata.index.view() as view:
            inode = self.metadata.inode(view, number)
        if inode is None:
            raise failed(errno.ESTALE)
        return inode

    async def lookup(self, parent: int, name: bytes, caller: Caller | None = None) -> Entry:
        """`caller`: None for the daemon itself."""
        self.lookups += 1
        directory = self.inode(parent)
        if self.metadata.is_pinned(directory):
            directory = await self.revalidated(parent, directory)
        with self.metadata.index.view() as view:
            dentry = self.metadata.dentry(view, parent, name)
            absent = self.metadata.knows_absent(directory, dentry)
            if absent and not (dentry is None and parent == ROOT_INODE):
                return Entry(None, self.timeout_s(directory))
            if dentry is not None and dentry.inode and self.metadata.entry_holds(directory, dentry):
                inode = self.metadata.inode(view, dentry.inode)
                if inode is not None and self.metadata.is_pinned(inode) and self.metadata.remaining_ns(inode):
                    return Entry(inode, self.timeout_s(inode))
        if absent:
            # What the kernel believes missing in the root is written down: `invalidate` must tell it each name.
            with self.metadata.index.update() as update:
                self.metadata.apply_absence(update, parent, name, pin=True)
            return Entry(None, self.timeout_s(directory))
        found = await self.compare(parent, name, caller)
        if found is None:
            return Entry(None, self._absence_timeout_s(parent, name))
        with self.metadata.index.view() as view:
            mutable_name = self.metadata.mutable_names.matches(view, parent, name)
        return Entry(found, self.mutable_name_timeout_s(found) if mutable_name else self.timeout_s(found))

    def _absence_timeout_s(self, parent: int, name: bytes) -> float:
        """How long the kernel may believe that there is no such name: as long as `invalidate` can tell it otherwise.

        Of other directories it drops the directory, and all names with it.
        """
        if self.pins(self._beneath(parent, name)):
            return math.inf
        timeout_s = self.options.unpinned_timeout_s
        if parent != ROOT_INODE:
            return timeout_s
        return self.invalidation.note_absence(name, self.source.clock.monotonic_s(), timeout_s)

    def _beneath(self, parent: int, name: bytes) -> bytes:
        with self.metadata.index.view() as view:
            return self.metadata.paths.beneath(view, parent, name)

    async def compare(self, parent: int, name: bytes, caller: Caller | None = None) -> Inode | None:
        """lstat a name and record what it said. None: there is no such name.

        `caller`: None for the daemon itself. Raises `PermissionsChanged`.
        """
        with self.metadata.index.view() as view:
            directory = self.metadata.paths.directory(view, parent)
            # The path may be long: it is made only where a pattern asks for it.
            pin = self.options.pins_everything and not self.metadata.mutable_names.matches(view, parent, name)
            guards = self.permissions.guards(view, directory)

        def finish(answer: Outcome[tuple[Stat, int, list[permissions.Look]]]) -> Inode | None:
            try:
                now, began_ns, looks = answer.unwrap()
            except Changed as error:
                self.invalidation.replaced(error.directory or parent)
                raise
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                    raise
                with self.metadata.index.update() as update:
                    self.metadata.apply_absence(update, parent, name, pin=pin)
                return None
            self.permissions.judge(guards, looks)
            with self.metadata.index.update() as update:
                inode = self.metadata.apply_stat(update, parent, name, now, pin=pin)
            self.permissions.recorded(inode, now, began_ns)
            return inode

        start = partial(
            self.call_pool.start,
            partial(permissions.lstat, self.source, directory, name, guards),
            question=(parent, name),
        )
        try:
            found = await self._lstats.begin((parent, name, self.metadata.changes.count), start, finish).wait()
        except Overtaken:
            return await self.compare(parent, name, caller)
        except PermissionsChanged as error:
            await self.permissions.tell(error)
            raise
        await self.permissions.let_in(guards, caller)
        return found

    def overtake(self, parent: int, name: bytes) -> None:
        """This mount changed what a name leads to."""
        for key in self._lstats.joinable():
            if key[:2] == (parent, name):
                self._lstats.overtake(key)

    async def resolve(self, path: bytes) -> Inode:
        """What lies at a path. Symlinks on the way are not followed. ENOENT where there is nothing."""
        inode = await self.revalidated(ROOT_INODE)
        for name in path.split(b"/") if path else ():
            try:
                found = (await self.lookup(inode.number, name)).inode
            except PermissionsChanged:  # which is written down by now
                found = (await self.lookup(inode.number, name)).inode
            if found is None:
                raise failed(errno.ENOENT)
            inode = found
        return inode

    async def revalidated(self, number: int, inode: Inode | None = None) -> Inode:
        """The record of an inode, compared with the source first if it must be. ESTALE if it is another one now."""
        inode = inode or self.inode(number)
        if self.metadata.remaining_ns(inode):
            return inode
        if number == ROOT_INODE:
            await self._compare_root()
            return self.inode(number)
        with self.metadata.index.view() as view:
            links = self.metadata.paths.links(view, number)
        for parent, name in links:
            try:
                found = await self.compare(parent, name)
            except PermissionsChanged:  # which is written down by now; this is no look-up
                found = await self.compare(parent, name)
            if found is not None and found.number == number:
                return found
        raise failed(errno.ESTALE)

    async def come_of_age(self, numbers: Sequence[int]) -> list[int]:
        """Wait until data of these files may be cached (age.py), and compare them with the source once more.

        Returns their inodes, or those to which their names lead now where a file has changed. Times far in the future
        are not waited for.
        """
        wait_ns = 0
        paths: dict[int, bytes] = {}
        with self.metadata.index.view() as view:
            for number in numbers:
                inode = self.metadata.inode(view, number)
                if inode is None or not inode.is_regular or inode.flags & UNLINKED:
                    continue
                record_wait_ns = self._unsettled_ns(inode)
                if record_wait_ns or not self.metadata.remaining_ns(inode):
                    with suppress(OSError):  # it has no name any more
                        paths[number] = self.metadata.paths.path(view, number)
                        wait_ns = max(wait_ns, record_wait_ns)
        if not paths:
            return list(numbers)
        await trio.sleep(wait_ns / NANOSECONDS)
        now: dict[int, int] = {}

        async def compare(number: int, path: bytes) -> None:
            with suppress(OSError):  # it has gone
                try:
                    now[number] = (await self.revalidated(number)).number
                except OSError:
                    now[number] = (await self.resolve(path)).number

        async with trio.open_nursery() as nursery:
            for number, path in paths.items():
                nursery.start_soon(compare, number, path)
        return [now.get(number, number) for number in numbers]

    def _unsettled_ns(self, inode: Inode) -> int:
        """How long until a file is old enough, and until its record is compared for the last time."""
        wait_ns = age.worth_waiting_ns(inode, self.source.clock.realtime_ns(), self.options.settle_ns)
        if inode.flags & UNSETTLED and self.metadata.is_pinned(inode):
            wait_ns = max(wait_ns, self.metadata.remaining_ns(inode))
        return wait_ns

    async def _compare_root(self) -> None:
        def finish(answer: Outcome[tuple[Stat, int, list[permissions.Look]]]) -> Inode:
            now, began_ns, _ = answer.unwrap()
            with self.metadata.index.update() as update:
                inode = self.metadata.apply_root(update, now, pin=self.pins(b""))
            self.permissions.recorded(inode, now, began_ns)
            return inode

        start = partial(self.call_pool.start, partial(permissions.lstat, self.source, ROOT, b"", ()), question=(0, b""))
        await self._lstats.begin((0, b"", 0), start, finish).wait()

    # --- changes by this mount -------------------------------------------------------------------------------------

    @contextmanager
    def own_change(self, *numbers: int) -> Iterator[None]:
        """While a name of these inodes is being changed by this mount: fetches that see a new ctime wait for it."""
        event = trio.Event()
        for number in numbers:
            self._own_changes[number] = event
        try:
            yield
        finally:
            for number in numbers:
                if self._own_changes.get(number) is event:
                    del self._own_changes[number]
            event.set()

    def own_change_of(self, number: int) -> trio.Event | None:
        """Set when the change that this mount is making to an inode's names is through. None: there is none."""
        return self._own_changes.get(number)

    def expire(self, number: int) -> None:
        """This mount changed a mutable file: what is known of it is not believed any more."""
        self.metadata.changes.note(number)
        with self.metadata.index.update() as update:
            inode = self.metadata.inode(update, number)
            if inode is not None and not self.metadata.is_pinned(inode):
                self.metadata.put_inode(update, inode._replace(expires_ns=0))

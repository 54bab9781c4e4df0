"""The semantics of names: look-ups, and comparisons with the source. docs/SEMANTICS.md is the promise.

Methods take and return inode numbers and inodes; errors are OSError with the errno for the caller. The other modules of
`fs/` build on this one: `attributes.py`, `handles.py` (opens and reads), `directories.py` (listings) and `mutations.py`
(changes of the source). Names are dropped in `invalidation.py`.

Rules for all of them: a record is in the index before the kernel gets the answer. State is read again after each await.
No method that serves a request waits for a notification of the kernel: the notification may wait for that very request
(hazard 1).
"""

import errno
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import trio
from outcome import Outcome

from cachefs.contract.index import ROOT_INODE
from cachefs.contract.shared import Words
from cachefs.errors import PermissionsChanged, failed
from cachefs.fs import permissions
from cachefs.fs.immutability import Immutability
from cachefs.fs.invalidation import Invalidation
from cachefs.fs.permissions import Permissions, Step
from cachefs.fs.refusals import Repetitions
from cachefs.metadata.inode_cache import InodeCache
from cachefs.metadata.inode_paths import SecondName, check_only_name
from cachefs.metadata.notifier import Notifier
from cachefs.metadata.validity import FOREVER_NS
from cachefs.options import Options
from cachefs.source.call_pool import CallPool
from cachefs.source.calls.late_changes import LateChanges
from cachefs.source.credentials import Caller
from cachefs.source.directories import ROOT, Directory
from cachefs.source.identity import Changed, Renamed
from cachefs.source.opening import component
from cachefs.source.single_flight import Overtaken, SingleFlight
from cachefs.source.source import Object, Source
from cachefs.store.index.environment import View
from cachefs.store.index.records import PINNED, UNLINKED, UNSETTLED, Inode
from cachefs.system.clock import NANOSECONDS
from cachefs.system.stat import Stat

COMPARED_WITHIN_S = 2.0
T = TypeVar("T")


class Entry(NamedTuple):
    """The answer to a look-up. `inode` None: the name does not exist."""

    inode: Inode | None
    timeout_s: float
    """How long the kernel may cache the entry and the attributes."""


@dataclass(eq=False)
class FileSystem:
    # dependencies
    source: Source
    call_pool: CallPool
    metadata: InodeCache
    options: Options
    notifier: Notifier
    invalidation: Invalidation
    words: Words
    """As of `Permissions`."""

    def __post_init__(self) -> None:
        self.immutability = Immutability(self.metadata, self.options)
        self.permissions = Permissions(
            self.metadata,
            self.source,
            self.call_pool,
            self.notifier,
            self.options,
            self.words,
            self.invalidation.doubt_beneath,
        )
        self.repetitions = Repetitions(self, self.source.clock.monotonic_ns)
        self.late_changes = LateChanges(self.call_pool.wait)
        # state
        self.lookups = 0
        """How many there were: shows background work that requests wait."""
        self._lstats: SingleFlight[tuple[int, bytes, int, bytes, bool], Inode | None] = SingleFlight()
        """By parent, name, number of changes by this mount, and the arguments of `compare`: later requests do not join
        earlier calls."""

    # --- names -----------------------------------------------------------------------------------------------------

    def path_of(self, number: int) -> bytes:
        """A path from the root of the source. Raises ESTALE where no name leads to the inode."""
        with self.metadata.index.view() as view:
            return self.metadata.paths.path(view, number)

    def directory(self, number: int) -> Directory:
        """A directory of the source."""
        with self.metadata.index.view() as view:
            return self.metadata.paths.directory(view, number)

    def object_of(self, number: int, view: View | None = None, link: tuple[int, bytes] | None = None) -> Object:
        """An object of the source, by a name that leads to it. Raises ESTALE where none does: a directory needs none.

        `view`: one that is open already. `link`: by this name, (parent, name). A directory needs none.
        """
        if view is None:
            with self.metadata.index.view() as view:
                return self.object_of(number, view, link)
        inode = self.metadata.inode(view, number)
        if inode is not None and inode.is_directory:
            return Object(self.metadata.paths.directory(view, number))
        link = link or self.metadata.paths.name(view, number)
        if inode is None or link is None:
            raise failed(errno.ESTALE)
        return Object(self.metadata.paths.directory(view, link[0]), link[1], inode.identity)

    async def ask(
        self,
        number: int,
        function: Callable[[], T],
        *,
        discard: Callable[[T], object] | None = None,
        once: bool = False,
    ) -> T:
        """Call the source for an object. If another object is in its place, drop its entry and raise ESTALE."""
        try:
            return await self.call_pool.run(function, discard=discard, once=once)
        except Renamed as error:
            self.invalidation.drop_name(error.parent, error.name, error.number)
            raise
        except Changed as error:
            self.invalidation.replaced(error.directory or number)
            raise

    async def learnt(self, number: int, now: Stat) -> None:
        """Newer attributes of an object than its record has are about to be shown."""
        directory = self._directory_of(number)
        if directory is not None:
            await self.learnt_in(directory, directory.changed_ns(now))

    async def learnt_in(self, directory: Directory, ctime_ns: int) -> None:
        """An object in this directory that changed at `ctime_ns` is about to be shown."""
        try:
            await self.permissions.learnt(directory, ctime_ns)
        except Changed as error:
            self.invalidation.replaced(error.directory)
            raise

    async def before_names_change(self, caller: Caller, *numbers: int) -> None:
        """Names in these directories are about to be changed for a caller."""
        directories = [self.directory(number) for number in numbers]
        with suppress(Changed):  # a directory has moved: the change itself compares the names (directories.py)
            await self.permissions.before_change(caller, *directories)

    async def before_object_changes(self, caller: Caller, number: int) -> None:
        directory = self._directory_of(number)
        if directory is not None:
            with suppress(Changed):
                await self.permissions.before_change(caller, directory)

    def _directory_of(self, number: int) -> Directory | None:
        """A directory of an object. None where no name leads to the object, because it was removed while open."""
        with self.metadata.index.view() as view, suppress(OSError):
            link = self.metadata.paths.name(view, number)
            return self.metadata.paths.directory(view, link[0]) if link is not None else None
        return None

    def above(self, number: int) -> list[int]:
        """The directories above an object, the nearest one first."""
        found = []
        directory = self._directory_of(number)
        while directory is not None:
            found.append(directory.number)
            directory = directory.parent
        return found

    def pins(self, path: bytes) -> bool:
        """Does this mount pin what it sees at this path?"""
        return self.options.pins_everything and not self.metadata.mutable_names.matches_path(path)

    def timeout_s(self, inode: Inode) -> float:
        """How long the kernel may cache an inode."""
        if inode.flags & UNLINKED and not self.immutability.outlives_its_name(inode):
            return self.options.unpinned_timeout_s  # it may have names that are not known
        remaining_ns = self.metadata.remaining_ns(inode)
        return math.inf if remaining_ns == FOREVER_NS else remaining_ns / NANOSECONDS

    def mutable_name_timeout_s(self, inode: Inode) -> float:
        """The same for a name that --mutable matches: the name is not pinned, whatever it leads to."""
        return min(self.timeout_s(inode), self.options.unpinned_timeout_s)

    def inode(self, number: int) -> Inode:
        """An inode that the kernel knows. Raises ESTALE if its record is gone."""
        inode = self.metadata.current(number)
        if inode is None:
            raise failed(errno.ESTALE)
        return inode

    def closed_lately(self, number: int, name: bytes, arrival_s: float) -> list[Step]:
        """As of `Permissions`, for a name in the directory with this number."""
        if not self.permissions.expects_admitted(arrival_s):
            return []
        return self.permissions.closed_lately(self.directory(number), name, arrival_s)

    async def let_list(self, number: int, caller: Caller | None, arrival_s: float) -> None:
        """Raises `PermissionsChanged` if the kernel may have let the caller open a directory by former permissions, and
        the source does not allow it."""
        closed = self.closed_lately(number, b".", arrival_s)
        await self.permissions.let_in(closed, caller, arrival_s, lists=True)

    async def lookup(self, parent: int, name: bytes, caller: Caller | None = None) -> Entry:
        """`caller`: None for the daemon itself."""
        self.lookups += 1
        arrival_s = self.source.clock.monotonic_s()
        entry = await self._lookup(parent, name)
        closed = self.closed_lately(parent, name, arrival_s)
        await self.permissions.let_in(closed, caller, arrival_s)
        return entry._replace(timeout_s=0.0) if closed else entry

    async def _lookup(self, parent: int, name: bytes) -> Entry:
        component(name)
        directory = self.inode(parent)
        if self.metadata.is_pinned(directory):
            directory = await self.revalidated(parent, directory)
        with self.metadata.index.view() as view:
            dentry = self.metadata.dentry(view, parent, name)
            if self.metadata.knows_absent(directory, dentry):
                return Entry(None, self.timeout_s(directory))
            inode = self.metadata.valid_entry(view, directory, dentry)
            if inode is not None:
                return Entry(inode, self.timeout_s(inode))
        found = await self.compare(parent, name)
        if found is None:
            return Entry(None, self._absence_timeout_s(parent, name))
        with self.metadata.index.view() as view:
            mutable_name = self.metadata.mutable_names.matches(view, parent, name)
        return Entry(found, self.mutable_name_timeout_s(found) if mutable_name else self.timeout_s(found))

    def _absence_timeout_s(self, parent: int, name: bytes) -> float:
        """How long the kernel may cache the absence of a name. `invalidate` must be able to end that.

        In the root it notifies the kernel of each such name. It drops other directories, and all names with them.
        """
        with self.metadata.index.view() as view:
            dentry = self.metadata.dentry(view, parent, name)
        if dentry is not None and not dentry.inode and dentry.flags & PINNED:
            return math.inf
        timeout_s = self.options.unpinned_timeout_s
        if parent != ROOT_INODE:
            return timeout_s
        return self.invalidation.note_absence(name, self.source.clock.monotonic_s(), timeout_s)

    def _pins_name(self, view: View, parent: int, name: bytes) -> bool:
        """As `pins`. The path may be long: it is made only if there are patterns to match."""
        return self.options.pins_everything and not self.metadata.mutable_names.matches(view, parent, name)

    async def compare(self, parent: int, name: bytes, also: bytes = b"", *, is_getattr: bool = False) -> Inode | None:
        """lstat a name, and record the answer. None: the name does not exist.

        `also`: of `SecondName`. `is_getattr`: as of `apply_stat`. Raises `PermissionsChanged`.
        """
        with self.metadata.index.view() as view:
            directory = self.metadata.paths.directory(view, parent)
            pin, before = self._pins_name(view, parent, name), self.metadata.inode(view, parent)
            guards = self.permissions.guards(view, directory)
            dentry = self.metadata.dentry(view, parent, name)
            known = self.metadata.inode(view, dentry.inode) if dentry is not None else None
        ask = known is not None and bool(known.flags & UNSETTLED)

        def finish(answer: Outcome[permissions.Answer]) -> Inode | None:
            try:
                now, began_ns, looks, is_folded = answer.unwrap()
            except Changed as error:
                self.invalidation.replaced(error.directory or parent)
                raise
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                    raise
                with self.metadata.index.update() as update:
                    lasts = self.metadata.shows_changes(before, self.metadata.inode(update, parent))
                    self.metadata.apply_absence(update, parent, name, pin=pin and lasts)
                return None
            self.permissions.judge(guards, looks)
            if (pin or now.may_have_twins) and not also:
                with self.metadata.index.view() as view:
                    check_only_name(view, parent, name, now)
            with self.metadata.index.update() as update:
                also_known = also if is_folded else b""
                inode = self.metadata.apply_stat(
                    update, parent, name, now, pin=pin, also=also_known, is_getattr=is_getattr
                )
                return self.permissions.recorded(update, inode, now, began_ns)

        start = partial(
            self.call_pool.start,
            partial(permissions.lstat, self.source, directory, name, guards, ask=ask, also=also),
            question=(parent, name),
        )
        try:
            key = parent, name, self.metadata.changes.count, also, is_getattr
            return await self._lstats.ask(key, start, finish)
        except Overtaken:
            return await self.compare(parent, name, is_getattr=is_getattr)
        except SecondName as error:
            return await self.compare(parent, name, also=error.name, is_getattr=is_getattr)
        except PermissionsChanged as error:
            self.permissions.tell(error)
            raise

    def overtake(self, parent: int, name: bytes) -> None:
        """This mount has changed what a name leads to: answers to calls that are under way are outdated."""
        for key in self._lstats.joinable():
            if key[:2] == (parent, name):
                self._lstats.overtake(key)

    async def resolve(self, path: bytes) -> Inode:
        """The inode at a path. Symlinks on the way are not followed. Raises ENOENT where there is none."""
        inode = await self.revalidated(ROOT_INODE)
        for name in path.split(b"/") if path else ():
            try:
                found = (await self.lookup(inode.number, name)).inode
            except PermissionsChanged:  # the new permissions are recorded by now
                found = (await self.lookup(inode.number, name)).inode
            if found is None:
                raise failed(errno.ENOENT)
            inode = found
        return inode

    async def revalidated(self, number: int, inode: Inode | None = None, *, is_getattr: bool = False) -> Inode:
        """An inode, compared with the source first unless valid. Raises ESTALE if another object has its names.

        `is_getattr`: as of `apply_stat`.
        """
        inode = inode or self.metadata.current(number)
        if inode is not None and self.metadata.remaining_ns(inode):
            return inode
        if number == ROOT_INODE:
            await self.compare_root()
            return self.inode(number)
        with self.metadata.index.view() as view:
            links = self.metadata.paths.links(view, number)
        if not links:
            links = await self.metadata.index.lost_names(number)
            for parent, _ in links:
                await self.revalidated(parent)  # its names may be lost, too
        for parent, name in links:
            try:
                found = await self.compare(parent, name, is_getattr=is_getattr)
            except PermissionsChanged:  # recorded by now; for a request without a path that is enough
                found = await self.compare(parent, name, is_getattr=is_getattr)
            except Changed:  # the directory is not where it was: another name may lead to the inode
                continue
            if found is not None and found.number == number:
                return found
        raise failed(errno.ESTALE)

    async def come_of_age(self, numbers: Sequence[int]) -> list[int]:
        """Wait until the data of these files may be cached (validity.py), and compare the files once more.

        Returns their inode numbers; where a file has changed, the number that its path leads to now.
        """
        # A file that this run has not compared before is young after the first time.
        return await self._compared_in_time(await self._compared_in_time(numbers))

    async def _compared_in_time(self, numbers: Sequence[int]) -> list[int]:
        """As `come_of_age`; files that had not been compared in this run may be young still."""
        wait_ns = 0
        paths: dict[int, bytes] = {}
        with self.metadata.index.view() as view:
            for number in numbers:
                inode = self.metadata.inode(view, number)
                if inode is None or not inode.is_regular or inode.flags & UNLINKED:
                    continue
                remaining_ns = self.metadata.remaining_ns(inode)
                if inode.is_young or not remaining_ns:
                    with suppress(OSError):  # it has lost its name
                        paths[number] = self.metadata.paths.path(view, number)
                        wait_ns = max(wait_ns, min(remaining_ns, self.options.settle_ns) if inode.is_young else 0)
        if not paths:
            return list(numbers)
        await trio.sleep(wait_ns / NANOSECONDS)
        now: dict[int, int] = {}

        async def compare(number: int, path: bytes) -> None:
            with suppress(OSError):  # it is gone
                try:
                    now[number] = (await self.revalidated(number)).number
                except OSError:
                    now[number] = (await self.resolve(path)).number

        async with trio.open_nursery() as nursery:
            for number, path in paths.items():
                nursery.start_soon(compare, number, path)
        return [now.get(number, number) for number in numbers]

    async def compare_root(self) -> None:
        def finish(answer: Outcome[permissions.Answer]) -> Inode:
            now, began_ns, _, _ = answer.unwrap()
            with self.metadata.index.update() as update:
                inode = self.metadata.apply_root(update, now, pin=self.pins(b""))
                return self.permissions.recorded(update, inode, now, began_ns)

        root = self.metadata.current(ROOT_INODE)
        ask = root is not None and bool(root.flags & UNSETTLED)
        call = partial(permissions.lstat, self.source, ROOT, b"", (), ask=ask)
        start = partial(self.call_pool.start, call, question=(0, b""))
        await self._lstats.ask((0, b"", 0, b"", False), start, finish)

    async def invalidate(self, path: bytes) -> int:
        """`Invalidation.invalidate`. Then look at directories that were dropped, for at most COMPARED_WITHIN_S.

        Each one with other permissions would fail a request (`PermissionsChanged`), and the kernel repeats an open by a
        path with several of them only once. They stay dropped: what another node changes later is seen, too.
        """
        dropped = await self.invalidation.invalidate(path, directories := set[int]())
        with trio.move_on_after(COMPARED_WITHIN_S):
            for number in directories:
                with suppress(OSError):
                    now = await self.call_pool.run(partial(self.source.lstat_directory, self.directory(number)))
                    if now.permissions != self.inode(number).permissions:
                        await self.revalidated(number)
                        with self.metadata.index.update() as update:
                            self.metadata.drop(update, number)
        self.permissions.tell()
        return dropped

    # --- changes by this mount -------------------------------------------------------------------------------------

    def expire(self, number: int) -> None:
        """This mount has changed a mutable file: its record is no longer valid."""
        self.metadata.changes.note(number)
        with self.metadata.index.update() as update:
            inode = self.metadata.inode(update, number)
            if inode is not None and not self.metadata.is_pinned(inode):
                self.metadata.put_inode(update, inode._replace(expires_ns=0))

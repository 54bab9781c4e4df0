"""Are the permissions that the mount has recorded of a directory still those of the source?

The kernel checks the attributes that it was told of, and keeps those of pinned directories for ever. Names are looked
up in held directories, as the daemon, so that the source checks nothing. What was learnt while the recorded permissions
held may be shown for ever: it is old data. What is learnt later may not be shown under them.

So each pinned directory has a time of the source until which its recorded permissions (mode, owner, group, POSIX ACL)
are known to have held; at first that is its recorded ctime. An object that changed before that time was there for
whoever was let in then. An object that changed after it is recorded when the pinned directories above it, up to the
root, have been looked at again, in the same trip to the source. As they are looked up by their names, a directory that
was moved elsewhere is noticed as well. Then they vouch for all that is older than the look (less two seconds, because
the clocks of node and source differ): scanning a dataset that nobody changes costs one look at each directory at
most, and none where directories are newer than their files.

Where permissions have changed the record is doubtful, the kernel drops the attributes, and the request gets
`PermissionsChanged` (ESTALE): the kernel walks the path again and meets the new permissions. For the next seconds
callers must be let in by the source, because the kernel may have let requests in before that wait in a queue. Such a
directory is compared every two seconds from then on, so that one that is opened again is noticed by those who may not
look into it.

Changes are made with the caller's identity, but in a held directory: the source checks the last directory only. Before
a change the pinned directories above it are looked at, unless that was done within the last second.
"""

import errno
import math
import os
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

from cachefs.contract.index import Table
from cachefs.fs.invalidation import Notifier
from cachefs.metadata import inode_values
from cachefs.metadata.inode_cache import InodeCache
from cachefs.options import Options
from cachefs.source.call_pool import CallPool
from cachefs.source.credentials import Caller
from cachefs.source.directories import Directory
from cachefs.source.source import Source
from cachefs.store.index.environment import View
from cachefs.store.index.records import Inode
from cachefs.system.stat import Stat

ACL = b"system.posix_acl_access"
QUEUED_S = 5.0
"""How long requests that the kernel let in before may still arrive."""
VALID_S = 1.0
"""How long a look at a directory counts for changes beneath it."""
MAX_REMEMBERED = 1 << 17
_UNTOLD = math.inf


class PermissionsChanged(OSError):
    """Permissions of directories above an object are not the recorded ones (errno ESTALE).

    The kernel walks the path again. Calls of the daemon itself, which have no path, are made once more.
    """

    def __init__(self, numbers: Sequence[int] = (), public: bool = False, owner: int | None = None) -> None:
        super().__init__(errno.ESTALE, os.strerror(errno.ESTALE))
        self.numbers = numbers
        self.public = public
        """May everyone list and enter them now?"""
        self.owner = owner
        """Who owns all of them, and may list and enter them."""

    def __reduce__(self) -> tuple[object, ...]:  # each waiter of a flight gets a copy
        return type(self), (self.numbers, self.public, self.owner)

    def admits(self, uid: int) -> bool:
        """May this user go on as if nothing had happened? False also where that is not known."""
        return self.public or uid in (0, self.owner)


class Guard(NamedTuple):
    """A pinned directory above what is asked for."""

    directory: Directory
    held_ns: int
    """Until when the recorded permissions are known to have held."""
    ctime_ns: int
    """When the directory was last compared. Where it differs the ACL may."""


class Look(NamedTuple):
    """What the source says of a directory."""

    number: int
    now: Stat
    acl: bytes | None
    """As `values` keeps it. None: it was not asked for, because nothing of the directory has changed."""
    asked_ns: int
    """When the object changed for whose sake it was looked at."""
    began_ns: int
    """When it was looked at."""


def look(source: Source, guards: Iterable[Guard], ctime_ns: int) -> list[Look]:
    """Look at the directories that do not vouch for an object that changed at `ctime_ns`. In a thread.

    Raises `Changed` for a directory that is not where it was.
    """
    looks = []
    for guard in guards:
        if guard.held_ns >= ctime_ns:
            continue
        began_ns = source.clock.realtime_ns()
        now = source.lstat_directory(guard.directory)
        acl = _acl(source, guard.directory) if now.ctime_ns != guard.ctime_ns else None
        looks.append(Look(guard.directory.number, now, acl, ctime_ns, began_ns))
    return looks


def _acl(source: Source, directory: Directory) -> bytes:
    try:
        return inode_values.KNOWN + source.getxattr_of_directory(directory, ACL)
    except OSError as error:
        if error.errno not in inode_values.NO_VALUE:
            raise
        return inode_values.ABSENT


def _enter(source: Source, guards: Iterable[Guard], caller: Caller) -> None:
    """Look up "." in each of these directories as the caller: PermissionError where it may not search one."""
    for guard in guards:
        source.round_trip("lstat")
        with source.directories.hold(guard.directory) as fd:
            caller.run(partial(source.stat, fd, b"."))


def lstat(source: Source, directory: Directory, name: bytes, guards: Sequence[Guard]) -> tuple[Stat, int, list[Look]]:
    """lstat of a name, when it was made, and what the directories above look like if that counts. In a thread."""
    began_ns = source.clock.realtime_ns()
    now = source.lstat(directory, name)
    return now, began_ns, look(source, guards, now.ctime_ns)


class Permissions:
    def __init__(
        self, metadata: InodeCache, source: Source, call_pool: CallPool, notifier: Notifier, options: Options
    ) -> None:
        # dependencies
        self._metadata = metadata
        self._source = source
        self._call_pool = call_pool
        self._notifier = notifier
        # constants
        self._settle_ns = options.settle_ns
        self._valid_s = min(VALID_S, options.unpinned_timeout_s)
        # state
        self._held: dict[int, tuple[int, int]] = {}
        """Directory → (until when its recorded permissions are known to have held, its ctime then)."""
        self._looked_at: dict[int, float] = {}
        """Directory → when it was last looked at for a change."""
        self._count = 0
        """How often the kernel has dropped attributes."""
        self._told: dict[int, tuple[float, float]] = {}
        """Directory whose permissions have changed → (`_count` when the kernel had dropped them, until when requests
        may be under way that it had let in before)."""

    def guards(self, view: View, directory: Directory) -> tuple[Guard, ...]:
        """The pinned directories from this one to the root. The others are not believed long enough to matter."""
        found = []
        above: Directory | None = directory
        while above is not None:
            inode = self._metadata.inode(view, above.number)
            if inode is not None and self._metadata.is_pinned(inode):
                held_ns, ctime_ns = self._held.get(above.number, (inode.ctime_ns, inode.ctime_ns))
                found.append(Guard(above, held_ns, ctime_ns))
            above = above.parent
        return tuple(found)

    def judge(self, guards: Iterable[Guard], looks: Sequence[Look]) -> None:
        """Raises `PermissionsChanged` unless the permissions are the recorded ones, and the kernel knows them.

        Whoever it is for catches the error, and awaits `tell`.
        """
        changed = [each.number for each in looks if self._has_changed(each)]
        changed += [each.directory.number for each in guards if self._told_of(each.directory.number) == _UNTOLD]
        if changed:
            raise self._error(tuple(dict.fromkeys(changed)))

    async def let_in(self, guards: Iterable[Guard], caller: Caller | None) -> None:
        """Raises `PermissionsChanged` where the kernel may have let a request in by permissions of before.

        A request may wait in a queue while the kernel drops them. So for a while the caller of each request must have
        search permission by the new ones, which the source decides. `caller`: None for the daemon itself.
        """
        if caller is None or not self._told:
            return
        recent = [each for each in guards if self._told_of(each.directory.number)]
        error = self._error(tuple(each.directory.number for each in recent))
        if recent and not error.admits(caller.uid):
            try:
                await self._call_pool.run(partial(_enter, self._source, recent, caller))
            except PermissionError:
                await self.tell(error)
                raise error from None

    def _told_of(self, number: int) -> float:
        told, until_s = self._told.get(number, (0, 0.0))
        if told and until_s < self._source.clock.monotonic_s():
            del self._told[number]
            return 0
        return told

    def _error(self, numbers: tuple[int, ...]) -> "PermissionsChanged":
        with self._metadata.index.view() as view:
            records = [self._metadata.inode(view, number) for number in numbers]
        found = [inode for inode in records if inode is not None]
        public = len(found) == len(numbers) and all(inode.mode & 0o005 == 0o005 for inode in found)
        owners = {inode.uid if inode.mode & 0o500 == 0o500 else None for inode in found}
        return PermissionsChanged(numbers, public, owners.pop() if len(owners) == 1 else None)

    def _has_changed(self, seen: Look) -> bool:
        number, now = seen.number, seen.now
        with self._metadata.index.view() as view:
            inode = self._metadata.inode(view, number)
            if inode is None or not self._metadata.is_pinned(inode):
                return False
            same = inode.permissions == now.permissions
            if same and seen.acl is not None:
                # What is not known was never asked for, or there was none.
                same = seen.acl == (inode_values.get(view, Table.XATTRS, inode, ACL) or inode_values.ABSENT)
        if not same:
            with self._metadata.index.update() as update:
                self._metadata.permissions_changed(update, inode, now)
                if seen.acl is not None:
                    inode_values.put(update, Table.XATTRS, inode, ACL, seen.acl)
            self._told[number] = _UNTOLD, math.inf
            return True
        self._have_held(number, max(seen.asked_ns, seen.began_ns - self._settle_ns), now.ctime_ns)
        return False

    def recorded(self, inode: Inode, now: Stat, began_ns: int) -> None:
        """An lstat that began at `began_ns` said this of an object, and this is its record now."""
        if inode.is_directory and inode.ctime_ns == now.ctime_ns:
            self._have_held(inode.number, began_ns - self._settle_ns, now.ctime_ns)

    def _have_held(self, number: int, until_ns: int, ctime_ns: int) -> None:
        if self._told_of(number) == _UNTOLD:
            return
        if len(self._held) >= MAX_REMEMBERED:
            self._held.clear()
        self._held[number] = max(until_ns, ctime_ns, self._held.get(number, (0, 0))[0]), ctime_ns

    async def tell(self, error: PermissionsChanged) -> None:
        """Have the kernel drop what it knows of these directories, once for each change.

        It ignores attributes that are on their way to it meanwhile.
        """
        untold = [number for number in error.numbers if self._told_of(number) == _UNTOLD]
        for number in untold:
            self._notifier.attributes(number)
        if untold:
            self._count += 1
            self._told.update(dict.fromkeys(untold, (self._count, self._source.clock.monotonic_s() + QUEUED_S)))

    async def learnt(self, directory: Directory, ctime_ns: int) -> None:
        """An object in this directory that changed at `ctime_ns` is about to be shown."""
        with self._metadata.index.view() as view:
            guards = [guard for guard in self.guards(view, directory) if guard.held_ns < ctime_ns]
        await self._look(guards, ctime_ns)

    async def before_change(self, caller: Caller, *directories: Directory) -> None:
        """Something in these directories is about to be changed for a thread."""
        now_s = self._source.clock.monotonic_s()
        with self._metadata.index.view() as view:
            guards = {guard.directory.number: guard for each in directories for guard in self.guards(view, each)}
        due = [
            guard._replace(held_ns=-1)
            for number, guard in guards.items()
            if now_s - self._looked_at.get(number, -math.inf) > self._valid_s
        ]
        await self._look(due, 0)
        await self.let_in(guards.values(), caller)
        if len(self._looked_at) >= MAX_REMEMBERED:
            self._looked_at.clear()
        self._looked_at.update((guard.directory.number, now_s) for guard in due)

    async def _look(self, guards: Sequence[Guard], ctime_ns: int) -> None:
        if guards:
            looks = await self._call_pool.run(partial(look, self._source, guards, ctime_ns))
            try:
                self.judge(guards, looks)
            except PermissionsChanged as error:
                await self.tell(error)
                raise

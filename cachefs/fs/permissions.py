"""Are the recorded permissions of a directory still those of the source?

The kernel checks permissions by the attributes that it caches, and caches those of pinned directories for ever. The
daemon looks up names relative to descriptors of directories, as itself, so that the source checks nothing. What was
read from the source while the recorded permissions were in force may be shown for ever: it is old data. What is read
later must not be shown under them.

So each pinned directory has a time of the source until which its recorded permissions (mode, owner, group, POSIX ACL)
are known to have been in force (`vouched_ns`). At first that is its recorded ctime. An object that changed before that
time was visible to everyone whom these permissions admit. Before an object that changed later is recorded, the same
trip to the source looks at the pinned directories above it again, up to the root. It finds them by their names, so that
a directory that was moved is noticed as well. From then on they vouch for all that is older than this look, less two
seconds, because the clocks of node and source differ. Where times prove nothing (store/filesystem.py), a look counts
for a second.

If permissions have changed, the record is doubtful, the kernel drops the attributes, and the request fails with
`PermissionsChanged` (ESTALE): the kernel walks the path again and applies the new permissions. Requests that the kernel
admitted before may still wait in a queue. So for the next seconds, and for as long as the queue lasts, the source
decides for each caller, also of what the index could answer: the fast path passes every LOOKUP and READDIR to the
daemon (`pass_names_until_ns`). Names beneath the directory expire at once: several callers may wait in the kernel for
one LOOKUP, and all get its answer (hazard 68). The same holds for a request that was in this daemon when that time
began, and where a comparison of the directory itself has shown other permissions. From then on the directory is
compared every two seconds: so permissions that are loosened again take effect for users without access.

Changes are made with the caller's identity, but relative to a descriptor of the directory: the source checks only that
directory. So the pinned directories above it are looked at before a change, unless that was done within the last
second.

A directory that admits users whom it did not admit before, or that was moved, would show them what is recorded beneath
it under permissions that may be older than its own, so that at no moment the source admitted these users. So all that
is beneath it is compared before its next use (`Invalidation.doubt_beneath`).
"""

import errno
import math
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from cachefs.contract.index import Table
from cachefs.contract.shared import Words
from cachefs.errors import PermissionsChanged
from cachefs.metadata import inode_values
from cachefs.metadata.inode_cache import InodeCache
from cachefs.metadata.notifier import Notifier
from cachefs.metadata.validity import FOREVER_NS
from cachefs.options import Options
from cachefs.source.call_pool import CallPool
from cachefs.source.credentials import Caller
from cachefs.source.directories import NEVER_NS, NOT_KNOWN_NS, Directory
from cachefs.source.identity import is_one
from cachefs.source.opening import reopen_directory
from cachefs.source.source import Source
from cachefs.store.index.environment import Update, View
from cachefs.store.index.records import Inode
from cachefs.system.clock import NANOSECONDS
from cachefs.system.stat import Stat, may_admit_others

QUEUED_S = 5.0
"""How long requests may still arrive that the kernel has admitted by the former permissions."""
QUEUED_MOST_S = 60.0
"""The same while requests are refused that have waited for each other. Others may go on in an open directory (PE-9)."""
AT_ONCE_S = 0.1
"""A request that arrives within this time after a refusal may have waited for it."""
VALID_S = 1.0
"""How long a look at a directory is valid for changes beneath it."""
MAX_REMEMBERED = 1 << 17
UNREADABLE = b""
"""An ACL that the source fails to show. The kernel, which gets the same error, admits nobody but the owner."""


class Guard(NamedTuple):
    """A pinned directory above an object that is asked for."""

    directory: Directory
    vouched_ns: int
    """Until when the recorded permissions are known to have been in force."""
    ctime_ns: int
    """The directory's, at the last comparison. If it differs, the ACL may have changed."""

    def vouches_for(self, ctime_ns: int) -> bool:
        """Were the recorded permissions in force when an object changed? Times in whole seconds do not say when in the
        second it did."""
        return self.vouched_ns >= ctime_ns + (0 if ctime_ns % NANOSECONDS else NANOSECONDS - 1)


class Look(NamedTuple):
    """What the source says of a directory."""

    number: int
    now: Stat
    acl: bytes | None
    """As `inode_values` keeps it. None: not asked for, because the directory has not changed. UNREADABLE."""
    asked_ns: int
    """When the object changed that the directory shall vouch for."""
    began_ns: int
    """When the look began."""


Step = tuple[Directory, bytes]
"""A directory, and a name in it that a request was led to, or that it asks for."""
Answer = tuple[Stat, int, list[Look], bool]
"""What `lstat` returns: attributes, when the call began, looks, and whether the other name leads there, too."""


def look(source: Source, guards: Iterable[Guard], ctime_ns: int) -> list[Look]:
    """Look at the directories that do not vouch yet for an object that changed at `ctime_ns`. In a thread.

    Raises `Changed` for a directory that has moved.
    """
    looks = []
    for guard in guards:
        if guard.vouches_for(ctime_ns):
            continue
        began_ns = source.clock.realtime_ns()
        now = source.lstat_directory(guard.directory)
        may_differ = now.ctime_ns != guard.ctime_ns or now.ctime_ns > began_ns or not now.ctime_ns % NANOSECONDS
        acl = _acl(source, guard.directory) if may_differ else None
        asked_ns = 0 if ctime_ns == NOT_KNOWN_NS else ctime_ns
        looks.append(Look(guard.directory.number, now, acl, asked_ns, began_ns))
    return looks


def _acl(source: Source, directory: Directory) -> bytes:
    try:
        return inode_values.KNOWN + source.getxattr_of_directory(directory, inode_values.ACL)
    except OSError as error:
        if error.errno in inode_values.NO_VALUE:
            return inode_values.ABSENT
        if error.errno in (errno.EIO, errno.EACCES, errno.EPERM):
            return UNREADABLE
        raise


def _walk(source: Source, steps: Iterable[Step], caller: Caller, lists: bool) -> None:
    """Look up these names as the caller, the only check of some FUSE sources (hazard 69). May raise PermissionError.
    `lists`: open a directory instead whose name is ".". It may be listed without the right to search it for "."."""
    for directory, name in steps:
        opens = lists and name == b"."
        source.round_trip("open" if opens else "lstat")
        with source.directories.hold(directory) as fd, suppress(FileNotFoundError):
            if opens:
                os.close(caller.run(partial(reopen_directory, fd)))
            else:
                caller.run(partial(source.stat, fd, name))


def lstat(
    source: Source, directory: Directory, name: bytes, guards: Sequence[Guard], *, ask: bool, also: bytes = b""
) -> Answer:
    """lstat of a name, when it began, and looks at those directories above that do not vouch yet. In a thread.

    `ask`: as of `Source.stat`. `also`: another name in this directory. The last result is whether it leads there, too.
    """
    began_ns = source.clock.realtime_ns()
    now = source.lstat(directory, name, ask=ask)
    same = False
    if also:
        with suppress(FileNotFoundError):
            same = is_one(now, name, source.lstat(directory, also, ask=ask), also)
    return now, began_ns, look(source, guards, directory.changed_ns(now)), same


class Permissions:
    def __init__(
        self,
        metadata: InodeCache,
        source: Source,
        call_pool: CallPool,
        notifier: Notifier,
        options: Options,
        words: Words,
        doubt_beneath: Callable[[int], None],
    ) -> None:
        # dependencies
        self._doubt_beneath = doubt_beneath
        self._words = words
        """What the fast path is told, and a successor of this daemon."""
        self._metadata = metadata
        self._source = source
        self._call_pool = call_pool
        self._notifier = notifier
        # constants
        self._valid_s = min(VALID_S, options.unpinned_timeout_s)
        self._pins_everything = options.pins_everything
        self._ctimes_prove_nothing = source.hides_mounts or not metadata.has_change_times
        # state
        self._vouched: dict[int, tuple[int, int]] = {}
        """Directory → (`Guard.vouched_ns`, `Guard.ctime_ns`), where they are not those of its record."""
        self._looked_at: dict[int, float] = {}
        """Directory → when it was last looked at."""
        self._not_notified: set[int] = set()
        """Directories whose permissions have changed, and whose attributes the kernel has not dropped yet."""
        self._queued_until_s: dict[int, float] = {}
        """Directory with other permissions → until when requests may arrive that the kernel had admitted before."""
        self._changed_s: dict[int, float] = {}
        """Directory → when other permissions were last noticed."""
        self._last_refusal: tuple[int, float] = 0, -math.inf  # thread, time
        self._admitted_until_s = words["pass_names_until_ns"] / NANOSECONDS
        """The latest of these times."""
        self._any_until_s = self._admitted_until_s
        """Until then any directory may be one of them: another daemon knew which."""
        self._asked_ns: dict[int, int] = {}
        """Directory → when the call began that has shown its latest attributes (`Stat.began_ns`)."""

    def guards(self, view: View, directory: Directory) -> tuple[Guard, ...]:
        """The pinned directories from this one up to the root. Others are not valid long enough to matter."""
        found = []
        above: Directory | None = directory
        while above is not None:
            inode = self._metadata.inode(view, above.number)
            if inode is not None and self._metadata.is_pinned(inode):
                # A ctime that lay ahead when it was recorded says nothing (hazard 59).
                recorded = NEVER_NS if self._source.sets_no_time_back else inode.ctime_ns, inode.ctime_ns
                guard = Guard(above, *self._vouched.get(above.number, recorded))
                if self._ctimes_prove_nothing or inode.device not in self._source.connection.volumes.trusted:
                    looked_s = self._looked_at.get(above.number, -math.inf)
                    is_recent = self._source.clock.monotonic_s() - looked_s < self._valid_s
                    guard = guard._replace(vouched_ns=FOREVER_NS if is_recent else NEVER_NS)
                found.append(guard)
            above = above.parent
        return tuple(found)

    def judge(self, guards: Iterable[Guard], looks: Sequence[Look]) -> None:
        """Raises `PermissionsChanged` unless the permissions are the recorded ones, and the kernel knows them.

        Each request that gets this error calls `tell`.
        """
        changed = [each.number for each in looks if self._has_changed(each)]
        changed += [each.directory.number for each in guards if each.directory.number in self._not_notified]
        if changed:
            raise self._error(tuple(dict.fromkeys(changed)))

    def expects_admitted(self, arrival_s: float) -> bool:
        """May the kernel have admitted a request that arrived then by former permissions?"""
        return self._admitted_until_s > arrival_s

    def closed_lately(self, directory: Directory, name: bytes, arrival_s: float) -> list[Step]:
        """The steps to a name that the kernel may have allowed by former permissions."""
        found = []
        above: Directory | None = directory
        while above is not None:
            if max(self._any_until_s, self._queued_until_s.get(above.number, 0.0)) > arrival_s:
                found.append((above, name))
            name, above = above.name, above.parent
        return found

    async def let_in(
        self, steps: Sequence[Step], caller: Caller | None, arrival_s: float, *, lists: bool = False
    ) -> None:
        """Raises `PermissionsChanged` where the source does not allow the caller (None: the daemon) these steps.
        `lists`: a directory whose name is "." is listed."""
        if caller is None or not steps:
            return
        error = self._error(tuple(directory.number for directory, _ in steps))
        if error.admits(caller.uid):
            return
        try:
            await self._call_pool.run(partial(_walk, self._source, steps, caller, lists))
        except PermissionError:
            self._refused(error.numbers, caller.pid, arrival_s)
            self.tell(error)
            raise error from None

    def _refused(self, numbers: Sequence[int], pid: int, arrival_s: float) -> None:
        """A request that comes at once after another thread's may have waited for it, and the next one for this one."""
        (last_pid, last_s), now_s = self._last_refusal, self._source.clock.monotonic_s()
        self._last_refusal = pid, now_s
        if pid != last_pid and arrival_s < last_s + AT_ONCE_S:
            for number in numbers:
                most_s = self._changed_s.get(number, -math.inf) + QUEUED_MOST_S
                self._expect_admitted(number, min(now_s + QUEUED_S, most_s))

    def _error(self, numbers: tuple[int, ...]) -> PermissionsChanged:
        with self._metadata.index.view() as view:
            records = [self._metadata.inode(view, number) for number in numbers]
            found = [inode for inode in records if inode is not None]
            public = len(found) == len(numbers) and all(inode_values.is_public(view, inode) for inode in found)
        owners = {inode.uid if inode.mode & 0o500 == 0o500 else None for inode in found}
        return PermissionsChanged(numbers, public, owners.pop() if len(owners) == 1 else None)

    def _has_changed(self, seen: Look) -> bool:
        number, now = seen.number, seen.now
        with self._metadata.index.view() as view:
            inode = self._metadata.inode(view, number)
            if inode is None or not self._metadata.is_pinned(inode):
                return False
            # An ACL that is not known was never asked for, did not exist, or could not be read.
            acl = inode_values.get(view, Table.XATTRS, inode, inode_values.ACL)
            has_same_acl = acl is None if seen.acl == UNREADABLE else seen.acl in (None, acl or inode_values.ABSENT)
        if inode.permissions != now.permissions or not has_same_acl:
            with self._metadata.index.update() as update:
                admits = not has_same_acl or may_admit_others(inode.permissions, now.permissions)
                self._found(update, inode, now, admits=admits)
                if seen.acl == UNREADABLE:
                    inode_values.drop(update, number)
                elif seen.acl is not None:
                    inode_values.put(update, Table.XATTRS, inode, inode_values.ACL, seen.acl)
            return True
        with self._metadata.index.update() as update:
            self.adopt(update, self._metadata.recognized(update, inode, now), now)
        self._remember_look(number)
        self._vouch(number, seen.began_ns, now.ctime_ns, asked_ns=seen.asked_ns)
        return False

    def _found(self, update: Update, inode: Inode, now: Stat, *, admits: bool) -> None:
        """`now` shows other permissions of a directory than the kernel knows. `admits`: they may admit others."""
        self._metadata.permissions_changed(update, inode, now)
        if admits:
            update.afterwards(partial(self._doubt_beneath, inode.number))
        self._not_notified.add(inode.number)
        self._changed(inode.number)

    def changed_here(self, update: Update, before: Inode, inode: Inode, now: Stat) -> None:
        """`now` is after a change by this mount whose answer does not show it. Another node may have changed the
        permissions before. If that was the ACL alone, the next look finds it."""
        if inode.is_directory:
            self._vouched.setdefault(inode.number, (NEVER_NS, before.ctime_ns))
        if before.permissions != now.permissions and inode.is_directory:
            self._found(update, inode, now, admits=may_admit_others(before.permissions, now.permissions))
            update.afterwards(self.tell)
        elif before.permissions != now.permissions:
            self._metadata.note_permissions(before, now)
            update.afterwards(partial(self._notifier.attributes, inode.number))

    def recorded(self, update: Update, inode: Inode, now: Stat, began_ns: int) -> Inode:
        """`now`, the answer of an lstat that began at `began_ns`, has been recorded as `inode`. Returns the result."""
        if not inode.is_directory:
            return inode
        number = inode.number
        if number in self._metadata.other_permissions:
            self._metadata.other_permissions.discard(number)
            self._not_notified.add(number)  # not notified now: the kernel would ignore the answer to this request
            self._changed(number)
        if number in self._metadata.admitting:
            self._metadata.admitting.discard(number)
            update.afterwards(partial(self._doubt_beneath, number))
        if inode.ctime_ns == now.ctime_ns:
            self._vouch(number, began_ns, now.ctime_ns)
        return self.adopt(update, inode, now)

    def adopt(self, update: Update, inode: Inode, now: Stat, *, has_listed: bool = False) -> Inode:
        """Record mtime, link count and size of a directory, which belong to its names. Returns the inode as it is then.

        They stay if a later call has shown other ones, if this mount has changed the directory since, and if it pins
        the listing: the old attributes belong to the old names. `has_listed`: the names have just been read.
        """
        number = inode.number
        if now.began_ns < self._asked_ns.get(number, 0) or self._metadata.changes.happened_since(number, now.began_ns):
            return inode
        if len(self._asked_ns) >= MAX_REMEMBERED:
            self._asked_ns.clear()
        self._asked_ns[number] = now.began_ns
        # If only mtime moves at this source, nothing else tells that the names have not been compared.
        mtime_ns = inode.mtime_ns if inode.ctime_ns == now.ctime_ns else now.mtime_ns
        newer = inode._replace(nlink=now.nlink, size=now.size, blocks=now.blocks, mtime_ns=mtime_ns)
        if newer == inode or (not has_listed and self._pins_names(update, number)):
            return inode
        self._metadata.put_inode(update, newer)
        update.afterwards(partial(self._notifier.attributes, number))
        return newer

    def _pins_names(self, view: View, number: int) -> bool:
        """Does this mount pin the listing of a directory?"""
        if not self._pins_everything:
            return False
        return not self._metadata.mutable_names.may_come(self._metadata.paths.directory(view, number).path)

    def _vouch(self, number: int, began_ns: int, ctime_ns: int, asked_ns: int = 0) -> None:
        """A look that began at `began_ns` has shown the recorded permissions. `asked_ns`: as in `Look`."""
        if number in self._not_notified:
            return
        if len(self._vouched) >= MAX_REMEMBERED:
            self._vouched.clear()
        known = [each for each in (ctime_ns, asked_ns) if not self._metadata.lies_ahead(each)]
        known += [began_ns - self._metadata.recent_ns, self._vouched.get(number, (0, 0))[0]]
        self._vouched[number] = max(known), ctime_ns

    def tell(self, error: PermissionsChanged | None = None) -> None:
        """Make the kernel drop the attributes of these directories, once for each change. None: of all that are left.

        The kernel also ignores older attributes that are in an answer on their way to it.
        """
        numbers = self._not_notified if error is None else self._not_notified.intersection(error.numbers)
        for number in tuple(numbers):
            self._notifier.attributes(number)
            self._not_notified.discard(number)
            self._changed(number)

    def _changed(self, number: int) -> None:
        """A directory has other permissions: for a while, requests may arrive that the former ones admitted."""
        if len(self._changed_s) >= MAX_REMEMBERED:
            self._any_until_s = self._admitted_until_s
            self._changed_s.clear()
            self._queued_until_s.clear()
        self._changed_s[number] = self._source.clock.monotonic_s()
        self._expect_admitted(number, self._changed_s[number] + QUEUED_S)

    def _expect_admitted(self, number: int, until_s: float) -> None:
        self._queued_until_s[number] = max(until_s, self._queued_until_s.get(number, 0.0))
        self._admitted_until_s = max(until_s, self._admitted_until_s)
        self._words["pass_names_until_ns"] = int(self._admitted_until_s * NANOSECONDS)

    async def learnt(self, directory: Directory, ctime_ns: int) -> None:
        """An object in this directory that changed at `ctime_ns` is about to be shown."""
        with self._metadata.index.view() as view:
            guards = [guard for guard in self.guards(view, directory) if not guard.vouches_for(ctime_ns)]
        await self._look(guards, ctime_ns)

    async def before_change(self, caller: Caller, *directories: Directory) -> None:
        """Something in these directories is about to be changed for a caller."""
        now_s = self._source.clock.monotonic_s()
        with self._metadata.index.view() as view:
            guards = {guard.directory.number: guard for each in directories for guard in self.guards(view, each)}
        due = [
            guard._replace(vouched_ns=NEVER_NS)
            for number, guard in guards.items()
            if now_s - self._looked_at.get(number, -math.inf) > self._valid_s
        ]
        await self._look(due, 0)
        for directory in directories:
            closed = self.closed_lately(directory, b".", now_s)  # the change itself asks for the name
            await self.let_in(closed, caller, now_s)

    def _remember_look(self, number: int) -> None:
        if len(self._looked_at) >= MAX_REMEMBERED:
            self._looked_at.clear()
        self._looked_at[number] = self._source.clock.monotonic_s()

    async def _look(self, guards: Sequence[Guard], ctime_ns: int) -> None:
        if guards:
            looks = await self._call_pool.run(partial(look, self._source, guards, ctime_ns))
            try:
                self.judge(guards, looks)
            except PermissionsChanged as error:
                self.tell(error)
                raise

"""The semantics of names and attributes: look-ups, xattrs, invalidation. No pyfuse3; docs/SEMANTICS.md is the promise.

Every method takes and gives inode numbers and records; errors are OSError with the errno the caller shall see.
`open_files.py` has opens and reads, `directories.py` the listings, `mutations.py` what changes the source.

Rules for all of it: a record is committed to the index before the kernel is told of it. State is looked up again
after every await. No method waits for a notification of the kernel: the request it serves may be what the
notification waits for (hazard 1).
"""

import errno
import math
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import trio
from outcome import Outcome

from cachefs import age, permissions, values
from cachefs.attributes import IMMUTABLE, NANOSECONDS, ROOT_INODE, UNLINKED, UNSETTLED, WRITTEN, Inode, Stat
from cachefs.belief import FOREVER_NS
from cachefs.caller import Caller
from cachefs.environment import Table, View
from cachefs.identity import Changed, Renamed, identity_of
from cachefs.metadata_cache import MetadataCache
from cachefs.metadata_retention import MetadataRetention
from cachefs.metrics import Metrics
from cachefs.options import Options
from cachefs.paths import links_of
from cachefs.permissions import NOTIFY_TIMEOUT_S, Permissions, PermissionsChanged
from cachefs.single_flight import Overtaken, SingleFlight
from cachefs.slots import SourceSlots
from cachefs.source import Object, Source, by_descriptor
from cachefs.source_directories import ROOT, Directory

DROP_CHUNK = 256
"""How many inodes are dropped without letting other tasks run."""
MOST_ABSENT = 1 << 14
"""Names that are missing in the root and not pinned: so many are believed at a time."""
_USUAL_NAMESPACES = (b"security.", b"system.", b"trusted.", b"user.")
T = TypeVar("T")


class Notifier(Protocol):
    """Tells the kernel to drop what it caches. `*_soon` returns at once; the others return when it has."""

    def entry_soon(self, parent: int, name: bytes) -> None: ...

    def all_soon(self, entries: Sequence[tuple[int, bytes]], numbers: Sequence[int]) -> None: ...

    async def all(self, entries: Sequence[tuple[int, bytes]], numbers: Sequence[int]) -> None: ...

    def attributes(self, number: int) -> bool: ...


class Use(Protocol):
    """Calls a function in a thread, with a descriptor of a file that is open."""

    def __call__(self, function: Callable[[int], T], /) -> Awaitable[T]: ...


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
        slots: SourceSlots,
        metadata: MetadataCache,
        options: Options,
        notifier: Notifier,
    ) -> None:
        # dependencies
        self.source = source
        self.slots = slots
        self.metadata = metadata
        self.options = options
        self.notifier = notifier
        metadata.on_lost_name = notifier.entry_soon
        metadata.on_changed = notifier.attributes
        # state
        self._absent_in_root: dict[bytes, float] = {}
        """Names that the kernel believes missing in the root, and until when; none that are pinned."""
        self.lookups = 0
        """How many there were: whoever works in the background sees that others wait."""
        self.pinned_statfs: os.statvfs_result | None = None
        self.descriptor: Callable[[int, bool], AbstractAsyncContextManager[Use | None]] = lambda *_: nullcontext()
        """How to use a descriptor of an open inode: a writer's, or any. None: there is none. `OpenFiles` knows them."""
        self.own_change: Callable[[int], trio.Event | None] = lambda _: None
        """Set when this mount has made the change of an inode's names that is under way. None: there is none."""
        self.writers: Counter[int] = Counter()
        """How many writable handles an inode has. While there are any, its record says nothing of its size."""
        self.permissions = Permissions(metadata, source, slots, notifier, options)
        self._lstats: SingleFlight[tuple[int, bytes, int], Inode | None] = SingleFlight()
        """By parent, name, and how many changes this mount had made: later requests do not join earlier calls."""

    # --- names -----------------------------------------------------------------------------------------------------

    def path_of(self, number: int, view: View | None = None) -> bytes:
        """A path from the root of the source; in a `view` that is open already, where there is one."""
        if view is not None:
            return self.metadata.paths.path(view, number)
        with self.metadata.index.view() as view:
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
        record = self.metadata.inode(view, number)
        if record is None:
            raise failed(errno.ESTALE)
        if record.is_directory:
            return Object(self.metadata.paths.directory(view, number))
        link = self.metadata.paths.name(view, number)
        if link is None:
            raise failed(errno.ESTALE)
        return Object(self.metadata.paths.directory(view, link[0]), link[1], identity_of(record))

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
            return await self.slots.run(function, discard=discard, once=once)
        except Renamed as error:
            self.lose_name(error.parent, error.name, error.number)
            raise
        except Changed as error:
            self.replaced(error.directory or number)
            raise

    async def ask_object(
        self,
        number: int,
        call: Callable[[Object], T],
        *,
        discard: Callable[[T], object] | None = None,
        once: bool = False,
    ) -> T:
        """Call the source, for an object that may be open: then it is reached even if its name is gone.

        By the descriptor of a writer; else by a name that leads to it; else by any descriptor.
        """
        async with self.descriptor(number, False) as use:
            if use is not None:
                return await use(lambda fd: call(by_descriptor(fd)))
        try:
            return await self.ask(number, partial(call, self.object_of(number)), discard=discard, once=once)
        except Renamed:
            raise  # it is changed by a path that may lead elsewhere
        except OSError as error:
            async with self.descriptor(number, True) as use:
                if error.errno != errno.ESTALE or use is None:
                    raise
                return await use(lambda fd: call(by_descriptor(fd)))

    async def learnt(self, number: int, now: Stat) -> None:
        """An object is about to be shown as it is now, not as its record says."""
        for directory in self._directories_of([number]):
            await self.learnt_in(directory, now.ctime_ns)

    async def learnt_in(self, directory: Directory, ctime_ns: int) -> None:
        """An object in this directory that changed at `ctime_ns` is about to be shown."""
        try:
            await self.permissions.learnt(directory, ctime_ns)
        except Changed as error:
            self.replaced(error.directory)
            raise

    async def before_change(self, caller: Caller, *, names_in: Iterable[int] = (), objects: Iterable[int] = ()) -> None:
        """Names in these directories, or these objects, are about to be changed for a caller."""
        directories = [self.directory(number) for number in names_in]
        with suppress(Changed):  # not where it was: the change itself compares the names (source_directories.py)
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

    def timeout_s(self, record: Inode, remaining_ns: int | None = None) -> float:
        """`remaining_ns`: of the record, where that is known."""
        if record.flags & UNLINKED and not record.flags & IMMUTABLE:
            return self.options.unpinned_timeout_s  # it may have names that we do not know
        if remaining_ns is None:
            remaining_ns = self.metadata.remaining_ns(record)
        return math.inf if remaining_ns == FOREVER_NS else remaining_ns / NANOSECONDS

    def mutable_name_timeout_s(self, record: Inode) -> float:
        """A name that --mutable matches is not pinned, whatever it leads to."""
        return min(self.timeout_s(record), self.options.unpinned_timeout_s)

    def is_changing(self, record: Inode) -> bool:
        """Has this mount changed it, or may be about to, since the record was made? The kernel, which knows, would take
        over an older size, and append there."""
        return not record.is_directory and (bool(self.writers[record.number]) or not record.expires_ns)

    def record(self, number: int) -> Inode:
        """The record of an inode that the kernel was told of. ESTALE if it has gone."""
        with self.metadata.index.view() as view:
            record = self.metadata.inode(view, number)
        if record is None:
            raise failed(errno.ESTALE)
        return record

    async def lookup(self, parent: int, name: bytes, caller: Caller | None = None) -> Entry:
        """`caller`: None for the daemon itself."""
        self.lookups += 1
        directory = self.record(parent)
        if self.metadata.is_pinned(directory):
            directory = await self.believed(parent, directory)
        with self.metadata.index.view() as view:
            dentry = self.metadata.dentry(view, parent, name)
            absent = self.metadata.knows_absent(directory, dentry)
            if absent and not (dentry is None and parent == ROOT_INODE):
                return Entry(None, self.timeout_s(directory))
            if dentry is not None and dentry.inode and self.metadata.entry_holds(directory, dentry):
                record = self.metadata.inode(view, dentry.inode)
                if record is not None and self.metadata.is_pinned(record) and self.metadata.remaining_ns(record):
                    return Entry(record, self.timeout_s(record))
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
        now_s = self.source.clock.monotonic_s()
        if len(self._absent_in_root) >= MOST_ABSENT:
            self._absent_in_root = {each: until for each, until in self._absent_in_root.items() if until > now_s}
        if len(self._absent_in_root) >= MOST_ABSENT:
            return 0.0
        self._absent_in_root[name] = now_s + timeout_s
        return timeout_s

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
                self.replaced(error.directory or parent)
                raise
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                    raise
                with self.metadata.index.update() as update:
                    self.metadata.apply_absence(update, parent, name, pin=pin)
                return None
            self.permissions.judge(guards, looks)
            with self.metadata.index.update() as update:
                record = self.metadata.apply_stat(update, parent, name, now, pin=pin)
            self.permissions.recorded(record, now, began_ns)
            return record

        start = partial(
            self.slots.start, partial(permissions.lstat, self.source, directory, name, guards), question=(parent, name)
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
        inode = await self.believed(ROOT_INODE)
        for name in path.split(b"/") if path else ():
            try:
                found = (await self.lookup(inode.number, name)).inode
            except PermissionsChanged:  # which is written down by now
                found = (await self.lookup(inode.number, name)).inode
            if found is None:
                raise failed(errno.ENOENT)
            inode = found
        return inode

    async def believed(self, number: int, record: Inode | None = None) -> Inode:
        """The record of an inode, compared with the source first if it must be. ESTALE if it is another one now."""
        record = record or self.record(number)
        if self.metadata.remaining_ns(record):
            return record
        if number == ROOT_INODE:
            await self._compare_root()
            return self.record(number)
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
                record = self.metadata.inode(view, number)
                if record is None or not record.is_regular or record.flags & UNLINKED:
                    continue
                record_wait_ns = self._unsettled_ns(record)
                if record_wait_ns or not self.metadata.remaining_ns(record):
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
                    now[number] = (await self.believed(number)).number
                except OSError:
                    now[number] = (await self.resolve(path)).number

        async with trio.open_nursery() as nursery:
            for number, path in paths.items():
                nursery.start_soon(compare, number, path)
        return [now.get(number, number) for number in numbers]

    def _unsettled_ns(self, record: Inode) -> int:
        """How long until a file is old enough, and until its record is compared for the last time."""
        wait_ns = age.worth_waiting_ns(record, self.source.clock.realtime_ns(), self.options.settle_ns)
        if record.flags & UNSETTLED and self.metadata.is_pinned(record):
            wait_ns = max(wait_ns, self.metadata.remaining_ns(record))
        return wait_ns

    async def _compare_root(self) -> None:
        def finish(answer: Outcome[tuple[Stat, int, list[permissions.Look]]]) -> Inode:
            now, began_ns, _ = answer.unwrap()
            with self.metadata.index.update() as update:
                record = self.metadata.apply_root(update, now, pin=self.pins(b""))
            self.permissions.recorded(record, now, began_ns)
            return record

        start = partial(self.slots.start, partial(permissions.lstat, self.source, ROOT, b"", ()), question=(0, b""))
        await self._lstats.begin((0, b"", 0), start, finish).wait()

    async def getattr(self, number: int) -> Entry:
        record = await self.believed(number)
        return Entry(record, self.timeout_s(record))

    def expire(self, number: int) -> None:
        """This mount changed a mutable file: what is known of it is not believed any more."""
        self.metadata.changes.note(number)
        with self.metadata.index.update() as update:
            record = self.metadata.inode(update, number)
            if record is not None and not self.metadata.is_pinned(record):
                self.metadata.put_inode(update, record._replace(expires_ns=0))

    def forget(self, forgotten: Iterable[tuple[int, int]]) -> None:
        with self.metadata.index.update() as update:
            for number, count in forgotten:
                if self.metadata.forget(update, number, count):
                    values.drop(update, number)

    # --- symlinks and extended attributes --------------------------------------------------------------------------

    async def readlink(self, number: int) -> bytes:
        record = await self.believed(number)
        with self.metadata.index.view() as view:
            target = values.get(view, Table.SYMLINKS, record)
        if target is None:
            target = await self._fetch_value(Table.SYMLINKS, number, b"", self.source.readlink)
        return target

    async def _fetch_value(self, table: Table, number: int, name: bytes, read: Callable[[Object], bytes]) -> bytes:
        """A value that is not known yet: it is compared with the record, as data are, and kept if that is pinned.

        With the mode of one version the ACL of another would let in whom neither of them lets in.
        """
        while True:
            before = self.record(number)
            value, now = await self.ask_object(number, lambda at: self.source.with_stat(at, read))
            record = self.record(number)
            if now is None or now.ctime_ns == record.ctime_ns:
                break
            own_change = self.own_change(number)
            if own_change is not None:
                await own_change.wait()
            elif before.ctime_ns == record.ctime_ns:
                await self._other_version(record, now, whole=name != permissions.ACL)
                if now.ctime_ns < self.record(number).ctime_ns:
                    return value  # of before a change by this mount: not for those who come later
                break
        self._keep(table, record, name, value)
        return value

    async def _other_version(self, record: Inode, now: Stat, *, whole: bool) -> None:
        """Raises ESTALE where an object has changed so that a value of it does not belong to its record.

        `whole`: the value stands for itself; else the kernel combines it with the mode.
        """
        if record.is_directory and self.metadata.is_pinned(record):  # its times move with each name in it
            await self.learnt_in(self.directory(record.number), now.ctime_ns)
        elif self.metadata.is_pinned(record):
            error = Changed()
            self.changed_behind_our_back(record, error)
            raise error
        elif not whole and record.permissions != now.permissions:
            self.metadata.saw(record.number, now)
            self.notifier.attributes(record.number)
            raise failed(errno.ESTALE)

    def _keep(self, table: Table, record: Inode, name: bytes, value: bytes) -> None:
        """Pin a value that was fetched, if it is still that version's."""
        with self.metadata.index.update() as update:
            now = self.metadata.inode(update, record.number)
            if now is not None and now.version == record.version and self.metadata.is_pinned(now):
                values.put(update, table, now, name, value)

    async def _believed_or_open(self, number: int) -> Inode:
        """The record of an inode; as it was, where the name is gone and the file open."""
        try:
            return await self.believed(number)
        except OSError as error:
            async with self.descriptor(number, True) as use:
                if error.errno != errno.ESTALE or use is None:
                    raise
            return self.record(number)

    def _value(self, record: Inode, name: bytes) -> bytes | None:
        """The cached xattr."""
        if not self.metadata.is_pinned(record):
            return None
        with self.metadata.index.view() as view:
            return values.get(view, Table.XATTRS, record, name)

    async def getxattr(self, number: int, name: bytes) -> bytes:
        """ENODATA where there is none: also where the source has no extended attributes at all (hazard 18).

        EOPNOTSUPP for a name whose namespace only some filesystems have, and the source does not.
        """
        record = await self._believed_or_open(number)
        cached = self._value(record, name)
        if cached is None:
            cached = await self._fetch_value(Table.XATTRS, number, name, partial(self._read_xattr, name))
        if cached == values.ABSENT:
            raise failed(errno.ENODATA)
        return cached[1:]

    def _read_xattr(self, name: bytes, at: Object) -> bytes:
        """As `values` keeps it. In a thread."""
        try:
            return values.KNOWN + self.source.getxattr(at, name)
        except OSError as error:
            if error.errno not in values.NO_VALUE:
                raise
            if error.errno == errno.EOPNOTSUPP and not name.startswith(_USUAL_NAMESPACES):
                raise
            return values.ABSENT

    def _list_xattrs(self, at: Object) -> bytes:
        """As `values` keeps them. In a thread."""
        try:
            return values.KNOWN + b"\0".join(self.source.listxattr(at))
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            return values.KNOWN

    async def listxattr(self, number: int) -> list[bytes]:
        record = await self._believed_or_open(number)
        cached = self._value(record, b"")
        if cached is None:
            cached = await self._fetch_value(Table.XATTRS, number, b"", self._list_xattrs)
        return [name for name in cached[1:].split(b"\0") if name]

    # --- changes behind our back -----------------------------------------------------------------------------------

    def changed_behind_our_back(self, inode: Inode, error: Changed) -> None:
        if error.directory:
            self.replaced(error.directory)  # the file may be as it was, under another name
            return
        with self.metadata.index.update() as update:
            current = self.metadata.inode(update, inode.number)
            if current is None or current.version != inode.version:
                return
            links = self.metadata.drop(update, inode.number)
        for parent, name in links:
            self.notifier.entry_soon(parent, name)

    def replaced(self, number: int) -> None:
        """The name of an inode leads to another object of the source, or to none."""
        if number == ROOT_INODE:
            return
        with self.metadata.index.update() as update:
            links = self.metadata.drop(update, number)
        for parent, name in links:
            self.notifier.entry_soon(parent, name)

    def lose_name(self, parent: int, name: bytes, number: int = 0) -> None:
        """A change has shown that a name does not lead where we believed (to inode `number`), or leads somewhere."""
        with self.metadata.index.update() as update:
            dentry = self.metadata.dentry(update, parent, name)
            if number and (dentry is None or dentry.inode != number):
                return  # another request has learned more
            self.metadata.remove_name(update, parent, name)
        self.notifier.entry_soon(parent, name)

    async def forget_names(self, number: int) -> None:
        """Return when the kernel has dropped the names of an inode, or does not get round to it.

        For a READ, which holds no directory, so that the notification cannot wait for it (hazard 1), and for a READDIR,
        which holds another one than the names are in.
        """
        with self.metadata.index.view() as view:
            links = links_of(view, number)
        with trio.move_on_after(NOTIFY_TIMEOUT_S):
            await self.notifier.all(links, ())

    async def doubt(self, numbers: Sequence[int], entries: Sequence[tuple[int, bytes]]) -> None:
        """A daemon died in the middle of a change to these: whatever is known of them is compared with the source."""
        with self.metadata.index.update() as update:
            for number in numbers:
                record = self.metadata.inode(update, number)
                if record is not None and self.metadata.is_pinned(record):
                    self.metadata.drop(update, number)
                elif record is not None:
                    self.metadata.put_inode(update, record._replace(expires_ns=0))
        await self.notifier.all(entries, numbers)

    async def invalidate(self, path: bytes) -> int:
        """Drop a file or a subtree, in the kernel too; returns when it has. The number of inodes dropped.

        A name that is missing, or not known, is forgotten to be missing: the next look-up asks the source.
        """
        number, missing = self._known(path)
        if missing is not None:
            with self.metadata.index.update() as update:
                self.metadata.drop_absence(update, number, missing)
            await self.notifier.all([(number, missing)], [number])
            return 0
        waiting = [number]
        dropped = 0
        while waiting:
            part, waiting = waiting[-DROP_CHUNK:], waiting[:-DROP_CHUNK]
            count, children = await self._drop(part)
            waiting += children
            dropped += count
        return dropped

    def known(self, path: bytes) -> int:
        """The inode at a path, as far as the index knows. ENOENT where it knows none."""
        number, missing = self._known(path)
        if missing is not None:
            raise failed(errno.ENOENT)
        return number

    async def make_mutable(self, numbers: Iterable[int]) -> int:
        """Those of these files that are immutable may be written to. How many there were."""
        immutable = []
        with self.metadata.index.update() as update:
            for number in numbers:
                record = self.metadata.inode(update, number)
                if record is not None and record.flags & IMMUTABLE:
                    immutable.append(number)
                    self.metadata.put_inode(update, record._replace(flags=record.flags & ~IMMUTABLE | WRITTEN))
        return (await self._drop(immutable))[0]

    async def follow_names(self, numbers: Iterable[int]) -> list[int]:
        """This mount gave these inodes other names. Which of them, and of those beneath, are not pinned any more.

        The kernel is told and not waited for: it holds the directories of the request that this is done for (hazard 1).
        """
        waiting = [number for number in numbers if number] if self.metadata.mutable_names else []
        all_names: list[tuple[int, bytes]] = []
        unpinned: list[int] = []
        while waiting:
            part, waiting = waiting[-DROP_CHUNK:], waiting[:-DROP_CHUNK]
            with self.metadata.index.update() as update:
                for number in part:
                    record = self.metadata.inode(update, number)
                    if record is None:
                        continue
                    if record.is_directory and self.metadata.mutable_names.reach_beneath(update, number):
                        waiting += self.metadata.children(update, number)
                    names, ends = self.metadata.follow_names(update, number)
                    all_names += names
                    unpinned += [number] * ends
            await trio.lowlevel.checkpoint()
        if all_names:
            self.notifier.all_soon(all_names, unpinned)
        return unpinned

    async def limit_metadata(self, retention: MetadataRetention, metrics: Metrics) -> None:
        """A task, for ever: drop what is pinned beyond the limit."""
        excess = trio.Event()
        retention.on_excess = lambda: excess.set()
        while True:
            excess = trio.Event()
            while numbers := retention.victims(DROP_CHUNK):
                metrics.metadata_evictions += (await self._drop(numbers))[0]
            await excess.wait()

    async def _drop(self, numbers: list[int]) -> tuple[int, list[int]]:
        """Drop inodes, in the kernel too: how many there were, and what is beneath them."""
        dropped, links, children = self._drop_records(numbers)
        await self.notifier.all(links, dropped)
        return len(dropped), children

    def _drop_records(self, numbers: list[int]) -> tuple[list[int], list[tuple[int, bytes]], list[int]]:
        """(what was dropped, its names, its children)"""
        dropped: list[int] = []
        links: list[tuple[int, bytes]] = []
        children: list[int] = []
        with self.metadata.index.update() as update:
            for number in numbers:
                record = self.metadata.inode(update, number)
                if record is None:
                    continue
                if record.is_directory:
                    beneath, absent = self.metadata.drop_children(update, number)
                    children += beneath
                    if number == ROOT_INODE:  # other directories lose them with their own entry
                        links += [(number, name) for name in {*absent, *self._absent_in_root}]
                        self._absent_in_root.clear()
                dropped.append(number)
                links += self.metadata.drop(update, number)
        return dropped, links, children

    def _known(self, path: bytes) -> tuple[int, bytes | None]:
        """The inode at a path, as far as the index knows; or the last one on the way, and the name that is unknown."""
        number = ROOT_INODE
        with self.metadata.index.view() as view:
            for component in path.split(b"/") if path else ():
                dentry = self.metadata.dentry(view, number, component)
                if dentry is None or dentry.inode == 0:
                    return number, component
                number = dentry.inode
        return number, None

    # --- the whole -------------------------------------------------------------------------------------------------

    async def statfs(self) -> os.statvfs_result:
        """Pinned on mounts that pin whatever they see: nobody writes there, and `find` asks for it first thing."""
        found = self.pinned_statfs
        if found is None:
            found = await self.slots.run(self.source.statfs)
            self.pinned_statfs = found if self.options.pins_everything else None
        return found

"""Invalidation: what this mount drops, and what the kernel must drop with it.

There are three reasons: a command (`invalidate`, `evict`, `unpin`), an object of the source that is not the recorded
one, and this mount itself (a new name that `--mutable` matches, more pinned inodes than the limit). The index is
changed first, and the kernel is notified afterwards, so that its next request gets the new answer.

A request notifies the kernel by `drop_soon` and does not wait: the notification may need a lock that the kernel holds
for this request (hazard 1). Commands and tasks wait until the kernel has dropped what it had. So do the few requests
for which it locks no directory (`forget_names`, `Repetitions.expect`), for a limited time.
"""

import errno
import logging
import os
from collections.abc import Awaitable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice

import trio

from cachefs.contract.index import ROOT_INODE
from cachefs.data.data_cache import DataCache
from cachefs.errors import CacheFsError
from cachefs.fs.refusals import Refusals
from cachefs.metadata import written_files
from cachefs.metadata.inode_cache import InodeCache
from cachefs.metadata.inode_paths import links_of
from cachefs.metadata.limit import InodeLimit
from cachefs.metadata.notifier import Notifier
from cachefs.options import Options
from cachefs.source.identity import Changed
from cachefs.stats.metrics import Metrics
from cachefs.store.index.records import IMMUTABLE, STALE, Inode

log = logging.getLogger(__name__)

CHUNK = 256
"""How many inodes are dropped, or looked at, before other tasks may run."""
DOUBTED_AT_ONCE = 4096
"""How many before the present answer: about a tenth of a second."""
FLUSH_TIMEOUT_S = 60.0
NOTIFY_TIMEOUT_S = 5.0
MOST_ABSENT = 1 << 14
"""How many unpinned absences in the root the kernel may cache at a time."""


class Invalidation:
    def __init__(
        self, metadata: InodeCache, data: DataCache, notifier: Notifier, refusals: Refusals, options: Options
    ) -> None:
        # dependencies
        self._metadata = metadata
        self._data = data
        self._notifier = notifier
        self._refusals = refusals
        self._options = options
        # state
        self._absent_in_root: dict[bytes, float] = {}
        """Unpinned absences in the root that the kernel caches: name → until when."""
        self.made_mutable: set[int] = set()
        """Files that were immutable: the fast path may have opened them for processes that have them open."""

    def note_absence(self, name: bytes, now_s: float, timeout_s: float) -> float:
        """The kernel is about to cache that the root does not have this name. Returns for how long it may.

        The names are remembered, because `invalidate` must notify the kernel of each.
        """
        if len(self._absent_in_root) >= MOST_ABSENT:
            self._absent_in_root = {each: until for each, until in self._absent_in_root.items() if until > now_s}
        if len(self._absent_in_root) >= MOST_ABSENT:
            return 0.0
        self._absent_in_root[name] = now_s + timeout_s
        return timeout_s

    # --- external modifications ------------------------------------------------------------------------------------

    def modified_externally(self, inode: Inode, error: Changed) -> None:
        """A read of an immutable file fails, because the source has another version of it."""
        if error.directory:
            self.replaced(error.directory)  # the file may be unchanged, under another name
        if self.other_name(inode.number, error) is not None:
            return  # the read is repeated
        self._refusals.changed(inode.number)
        if error.directory:
            return
        current = self._metadata.current(inode.number)
        if current is not None and current.version == inode.version:
            self.replaced(inode.number)

    def other_name(
        self, number: int, error: Changed | PermissionError, tried: Collection[tuple[int, bytes]] = ()
    ) -> tuple[int, bytes] | None:
        """A call by the last of these names of an object has failed with `error`, and what is not where it was has been
        dropped. Returns another name by which it may succeed: after `Renamed` none, because the change must not be made
        by one; after a refusal one in another directory, which the caller may be allowed to enter.
        """
        paths = self._metadata.paths
        with self._metadata.index.view() as view:
            if isinstance(error, Changed):
                link = paths.known_name(view, number) if error.directory else None
            else:
                link = paths.name(view, number, {parent for parent, _ in tried})
        return None if link in tried or (number, b"") in tried else link

    def replaced(self, number: int) -> None:
        """The names of an inode lead to another object of the source, or to none."""
        if number == ROOT_INODE:
            return
        with self._metadata.index.update() as update:
            before = self._metadata.inode(update, number)
            links = self._metadata.drop(update, number)
        if before is not None and not before.flags & STALE:
            for link in links:
                self._metadata.note_lost_name(number, *link)
        self._notifier.drop_soon(links)

    def drop_name(self, parent: int, name: bytes, number: int = 0) -> None:
        """The source has shown that a name does not lead to inode `number` (0: to what is recorded).

        The source may have the name all the time, so listings compare it.
        """
        with self._metadata.index.update() as update:
            dentry = self._metadata.dentry(update, parent, name)
            if number and (dentry is None or dentry.inode != number):
                return  # another request has recorded something newer
            if dentry is not None and dentry.inode:
                self._metadata.note_lost_name(dentry.inode, parent, name)
            self._metadata.cut_name(update, parent, name)
        self._notifier.drop_soon([(parent, name)])

    def moved_by_kernel(self, old: tuple[int, bytes], new: tuple[int, bytes], *, both: bool) -> None:
        """A rename by this mount has moved a name (or exchanged `both`), which the kernel may have for a former
        object's: the kernel has the new name for that one now."""
        if self._metadata.follow_lost_names((old, new), *([(new, old)] if both else ())):
            self._notifier.drop_soon([old, new])

    async def forget_names(self, number: int) -> None:
        """Return when the kernel has dropped the names of an inode, or after NOTIFY_TIMEOUT_S.

        Only for a READ, for which the kernel locks no directory, so that the notification cannot wait for it
        (hazard 1), and for a READDIR, for which it locks another directory than the one that has the names.
        """
        with self._metadata.index.view() as view:
            links = links_of(view, number)
        with trio.move_on_after(NOTIFY_TIMEOUT_S):
            await self._notifier.drop(links, ())

    def doubt_beneath(self, directory: int) -> None:
        """A directory may admit users whom it did not admit before (permissions.py): compare all that is recorded
        beneath it before its next use. The first DOUBTED_AT_ONCE inodes at once, the others by a task."""
        with self._metadata.index.view() as view:
            parts = self._parts(self._metadata.children(view, directory))
        for part in islice(parts, DOUBTED_AT_ONCE // CHUNK):
            self._doubt(part)
        trio.lowlevel.spawn_system_task(self._doubt_rest, parts)

    async def _doubt_rest(self, parts: Iterator[list[int]]) -> None:
        for part in parts:
            self._doubt(part)
            await trio.lowlevel.checkpoint()

    def _doubt(self, numbers: Iterable[int]) -> None:
        with self._metadata.index.update() as update:
            known = [number for number in numbers if self._metadata.doubt(update, number)]
        for number in known:
            self._notifier.attributes(number)

    async def records_lost(self, names: Awaitable[Sequence[bytes]]) -> None:
        """Some records are gone, of inodes that the kernel may know: have it drop all names that are not in use.

        The next requests look their paths up, and make new records. `names`: those of the root.
        """
        with suppress(OSError):  # the source is gone
            await self._notifier.drop([(ROOT_INODE, name) for name in await names], ())

    async def doubt(self, numbers: Sequence[int], entries: Sequence[tuple[int, bytes]]) -> None:
        """A daemon died while it changed these: compare all of them with the source before their next use."""
        with self._metadata.index.update() as update:
            for number in numbers:
                inode = self._metadata.inode(update, number)
                if inode is not None and self._metadata.is_pinned(inode):
                    self._metadata.drop(update, number)
                elif inode is not None:
                    self._metadata.put_inode(update, inode._replace(expires_ns=0))
        await self._notifier.drop(entries, numbers)

    def doubt_mountpoints(self, paths: Iterable[bytes]) -> None:
        """Something is mounted at these paths: what is recorded there may be of what lies beneath (validity.py).

        For a new mount, of which the kernel knows nothing.
        """
        for path in paths:
            number, missing = self._known(path)
            if missing is not None:
                continue
            with self._metadata.index.update() as update:
                inode = self._metadata.inode(update, number)
                if inode is not None and not inode.device:
                    self._metadata.drop(update, number)

    # --- commands --------------------------------------------------------------------------------------------------

    async def invalidate(self, path: bytes, directories: set[int] | None = None) -> int:
        """Drop a file or a subtree, and return when the kernel has dropped it. Returns the number of inodes.

        `directories`: gets those that were dropped.

        If a name on the path is absent or unknown, its absence is dropped: the next look-up asks the source.

        Directories without a known name are dropped with everything beneath them: another node may have moved them to
        this path.
        """
        number, missing = self._known(path)
        if missing is not None:
            with self._metadata.index.update() as update:
                self._metadata.drop_absence(update, number, missing)
            await self._notifier.drop([(number, missing)], [number])
        waiting = [number] if missing is None else []
        dropped = 0
        directories = set() if directories is None else directories
        while waiting or (waiting := self._without_name(directories)):
            part, waiting = waiting[-CHUNK:], waiting[:-CHUNK]
            count, children = await self._drop(part, directories)
            waiting += children
            dropped += count
        return dropped

    def _without_name(self, others: Collection[int]) -> list[int]:
        """Directories other than these. The kernel may have forgotten the ones above since these were dropped."""
        with self._metadata.index.view() as view:
            return [each for each in self._metadata.directories_without_name(view) if each not in others]

    async def evict(self, paths: Sequence[bytes]) -> tuple[int, int]:
        """Drop the data beneath these paths from the cache: (files, bytes). Returns when their space is free."""
        await self._data.writes.flush_queued(FLUSH_TIMEOUT_S)  # afterwards all data have an extent
        files = size = 0
        for path in paths:
            for part in self._beneath(path):
                with self._metadata.index.view() as view:
                    sizes = [self._data.drop(view, number) for number in part]
                files += sum(dropped > 0 for dropped in sizes)
                size += sum(sizes)
                await trio.lowlevel.checkpoint()
        await self._data.writes.flush_queued(FLUSH_TIMEOUT_S)
        return files, size

    async def unpin(self, paths: Sequence[bytes]) -> int:
        """Make the immutable files beneath these paths mutable. Returns how many there were."""
        if self._options.read_only:
            raise CacheFsError(
                "unpin is for read-write mounts: use cachefs evict to free space, cachefs invalidate to see changes"
            )
        count = 0
        for path in paths:
            for part in self._beneath(path):
                count += await self._make_mutable(part)
        return count

    async def _make_mutable(self, numbers: Iterable[int]) -> int:
        """Make those of these files mutable that are immutable. Returns how many there were."""
        immutable = []
        with self._metadata.index.update() as update:
            for number in numbers:
                inode = self._metadata.inode(update, number)
                if inode is not None and inode.flags & IMMUTABLE:
                    immutable.append(number)
                    self._metadata.put_inode(update, inode.written())
                    written_files.keep(update, inode, kept=False)
        self.made_mutable.update(immutable)
        return (await self._drop(immutable))[0]

    def _beneath(self, path: bytes) -> Iterator[list[int]]:
        """The known inodes at a path and beneath it, in parts. Raises ENOENT if the path is not known."""
        number, missing = self._known(path)
        if missing is not None:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), os.fsdecode(path))
        yield from self._parts([number])

    def _parts(self, waiting: list[int]) -> Iterator[list[int]]:
        """These inodes, and what is known beneath them, in parts."""
        seen: set[int] = set()
        while waiting:
            part, waiting = waiting[-CHUNK:], waiting[:-CHUNK]
            with self._metadata.index.view() as view:
                for number in part:
                    inode = self._metadata.inode(view, number)
                    if inode is not None and inode.is_directory and number not in seen:
                        seen.add(number)
                        waiting += self._metadata.children(view, number)
            yield part

    def _known(self, path: bytes) -> tuple[int, bytes | None]:
        """The known inode at a path, and None; or the last known one on the way, and the name that is unknown there."""
        number = ROOT_INODE
        with self._metadata.index.view() as view:
            for component in path.split(b"/") if path else ():
                dentry = self._metadata.dentry(view, number, component)
                if dentry is None or dentry.inode == 0:
                    return number, component
                number = dentry.inode
        return number, None

    # --- changes by this mount -------------------------------------------------------------------------------------

    async def follow_names(self, numbers: Iterable[int]) -> list[int]:
        """This mount has given these inodes other names. Returns which of them, and of those beneath, it unpinned.

        The kernel is notified, but not waited for: it locks directories for the present request (hazard 1).
        """
        waiting = [number for number in numbers if number] if self._metadata.mutable_names else []
        all_names: list[tuple[int, bytes]] = []
        unpinned: list[int] = []
        directories: set[int] = set()
        while waiting:
            part, waiting = waiting[-CHUNK:], waiting[:-CHUNK]
            with self._metadata.index.update() as update:
                for number in part:
                    inode = self._metadata.inode(update, number)
                    if inode is None:
                        continue
                    if inode.is_directory and number in directories:  # as in `_drop`
                        continue
                    if inode.is_directory and self._metadata.mutable_names.reach_beneath(update, number):
                        directories.add(number)
                        waiting += self._metadata.children(update, number)
                    names, ends = self._metadata.follow_names(update, number)
                    all_names += names
                    unpinned += [number] * ends
            await trio.lowlevel.checkpoint()
        self.made_mutable.update(unpinned)
        if all_names:
            self._notifier.drop_soon(all_names, unpinned)
        return unpinned

    # --- results ---------------------------------------------------------------------------------------------------

    async def overwritten(self, number: int) -> None:
        """This mount has opened a file for writing, truncated or replaced it: the directories of its names hold
        results from now on (`InodeCache.holds_results`). Their immutable files are compared at their next use."""
        with self._metadata.index.update() as update:
            marked = self._metadata.mark_results(update, number)
        for directory in marked:
            await self._doubt_results(directory)

    async def _doubt_results(self, directory: int) -> None:
        with self._metadata.index.view() as view:
            path = self._metadata.paths.logged(view, directory)
            waiting = self._metadata.children(view, directory)
        log.info(
            "%s/: this mount has overwritten a file here, so other nodes may do so, too. From now on its files are "
            "compared with the source when they are opened, at most once in %g s. --immutable GLOB prevents that",
            path,
            self._options.unpinned_timeout_s,
        )
        while waiting:
            part, waiting = waiting[-CHUNK:], waiting[:-CHUNK]
            names: list[tuple[int, bytes]] = []
            doubted = []
            with self._metadata.index.update() as update:
                for number in part:
                    if self._metadata.doubt_result(update, number):
                        doubted.append(number)
                        names += links_of(update, number)
            if doubted:
                self._notifier.drop_soon(names, doubted)
            await trio.lowlevel.checkpoint()

    def release_result(self, number: int) -> bool:
        """Let an immutable file be written to if it is a result. Returns whether it is."""
        with self._metadata.index.update() as update:
            inode = self._metadata.inode(update, number)
            if inode is None or not self._metadata.is_result(update, number) or written_files.is_kept(update, inode):
                return False
            self._metadata.put_inode(update, inode.written())
            links = self._metadata.drop(update, number)
        self.made_mutable.add(number)
        self._notifier.drop_soon(links, [number])
        return True

    # --- the limit -------------------------------------------------------------------------------------------------

    async def limit_metadata(self, retention: InodeLimit, metrics: Metrics) -> None:
        """A task, for ever: drop what is pinned beyond the limit."""
        while True:
            while numbers := retention.victims(CHUNK):
                metrics.metadata_evictions += (await self._drop(numbers))[0]
            await retention.wait_for_excess()

    async def _drop(self, numbers: list[int], directories: set[int] | None = None) -> tuple[int, list[int]]:
        """Drop inodes, in the kernel too. Returns how many there were, and the inodes beneath them.

        `directories`: those that were dropped before, which are passed over. Doubtful names may form a circle.
        """
        dropped: list[int] = []
        links: list[tuple[int, bytes]] = []
        children: list[int] = []
        with self._metadata.index.update() as update:
            for number in numbers:
                inode = self._metadata.inode(update, number)
                if inode is None or (directories is not None and number in directories):
                    continue
                if inode.is_directory:
                    if directories is not None:
                        directories.add(number)
                    beneath, absent = self._metadata.drop_children(update, number)
                    children += beneath
                    if number == ROOT_INODE:  # the kernel drops other absences with the directory that they are in
                        links += [(number, name) for name in {*absent, *self._absent_in_root}]
                        self._absent_in_root.clear()
                dropped.append(number)
                links += self._metadata.drop(update, number)
        await self._notifier.drop(links, dropped)
        return len(dropped), children

"""Invalidation: what this mount forgets, and what the kernel has to forget with it.

Three things lead to it: a command (`invalidate`, `evict`, `unpin`), an object of the source that turns out to be
another one than the index says, and a change by this mount (a new name that `--mutable` matches, more pinned than may
be). The index is changed first, and the kernel is told afterwards: it must not ask before the answer is the new one.

What serves a request tells the kernel by `*_soon` and does not wait: the request may hold what the notification needs
(hazard 1). Commands and tasks wait until the kernel has dropped what it had.
"""

import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import trio

from cachefs.contract.index import ROOT_INODE
from cachefs.data.data_cache import DataCache
from cachefs.errors import CacheFsError
from cachefs.metadata.inode_cache import InodeCache
from cachefs.metadata.inode_paths import links_of
from cachefs.metadata.limit import InodeLimit
from cachefs.options import Options
from cachefs.source.identity import Changed
from cachefs.stats.metrics import Metrics
from cachefs.store.index.records import IMMUTABLE, Inode

CHUNK = 256
"""How many inodes are dropped, or looked at, without letting other tasks run."""
FLUSH_TIMEOUT_S = 60.0
NOTIFY_TIMEOUT_S = 5.0
MOST_ABSENT = 1 << 14
"""Names that are missing in the root and not pinned: so many are believed at a time."""


class Notifier(Protocol):
    """Tells the kernel to drop what it caches. `*_soon` returns at once; the others return when it has."""

    def entry_soon(self, parent: int, name: bytes) -> None: ...

    def all_soon(self, entries: Sequence[tuple[int, bytes]], numbers: Sequence[int]) -> None: ...

    async def all(self, entries: Sequence[tuple[int, bytes]], numbers: Sequence[int]) -> None: ...

    def attributes(self, number: int) -> bool:
        """Attributes and ACLs of an inode. That waits for no request. Whether the kernel knows the inode."""


class Invalidation:
    def __init__(self, metadata: InodeCache, data: DataCache, notifier: Notifier, options: Options) -> None:
        # dependencies
        self._metadata = metadata
        self._data = data
        self._notifier = notifier
        self._options = options
        metadata.on_lost_name = notifier.entry_soon
        metadata.on_changed = notifier.attributes
        # state
        self._absent_in_root: dict[bytes, float] = {}
        """Names that the kernel believes missing in the root, and until when; none that are pinned."""

    def note_absence(self, name: bytes, now_s: float, timeout_s: float) -> float:
        """The kernel is about to believe that the root has no such name. For how long it may: `invalidate` must tell it
        each of them."""
        if len(self._absent_in_root) >= MOST_ABSENT:
            self._absent_in_root = {each: until for each, until in self._absent_in_root.items() if until > now_s}
        if len(self._absent_in_root) >= MOST_ABSENT:
            return 0.0
        self._absent_in_root[name] = now_s + timeout_s
        return timeout_s

    # --- external modifications ------------------------------------------------------------------------------------

    def changed_behind_our_back(self, inode: Inode, error: Changed) -> None:
        if error.directory:
            self.replaced(error.directory)  # the file may be as it was, under another name
            return
        with self._metadata.index.view() as view:
            current = self._metadata.inode(view, inode.number)
        if current is not None and current.version == inode.version:
            self.replaced(inode.number)

    def replaced(self, number: int) -> None:
        """The name of an inode leads to another object of the source, or to none."""
        if number == ROOT_INODE:
            return
        with self._metadata.index.update() as update:
            links = self._metadata.drop(update, number)
        for parent, name in links:
            self._notifier.entry_soon(parent, name)

    def lose_name(self, parent: int, name: bytes, number: int = 0) -> None:
        """A change has shown that a name does not lead where we believed (to inode `number`), or leads somewhere."""
        with self._metadata.index.update() as update:
            dentry = self._metadata.dentry(update, parent, name)
            if number and (dentry is None or dentry.inode != number):
                return  # another request has learned more
            self._metadata.remove_name(update, parent, name)
        self._notifier.entry_soon(parent, name)

    async def forget_names(self, number: int) -> None:
        """Return when the kernel has dropped the names of an inode, or does not get round to it.

        For a READ, which holds no directory, so that the notification cannot wait for it (hazard 1), and for a READDIR,
        which holds another one than the names are in.
        """
        with self._metadata.index.view() as view:
            links = links_of(view, number)
        with trio.move_on_after(NOTIFY_TIMEOUT_S):
            await self._notifier.all(links, ())

    async def doubt(self, numbers: Sequence[int], entries: Sequence[tuple[int, bytes]]) -> None:
        """A daemon died in the middle of a change to these: whatever is known of them is compared with the source."""
        with self._metadata.index.update() as update:
            for number in numbers:
                inode = self._metadata.inode(update, number)
                if inode is not None and self._metadata.is_pinned(inode):
                    self._metadata.drop(update, number)
                elif inode is not None:
                    self._metadata.put_inode(update, inode._replace(expires_ns=0))
        await self._notifier.all(entries, numbers)

    # --- commands --------------------------------------------------------------------------------------------------

    async def invalidate(self, path: bytes) -> int:
        """Drop a file or a subtree, in the kernel too; returns when it has. The number of inodes dropped.

        A name that is missing, or not known, is forgotten to be missing: the next look-up asks the source.
        """
        number, missing = self._known(path)
        if missing is not None:
            with self._metadata.index.update() as update:
                self._metadata.drop_absence(update, number, missing)
            await self._notifier.all([(number, missing)], [number])
            return 0
        waiting = [number]
        dropped = 0
        while waiting:
            part, waiting = waiting[-CHUNK:], waiting[:-CHUNK]
            count, children = await self._drop(part)
            waiting += children
            dropped += count
        return dropped

    async def evict(self, paths: Sequence[bytes]) -> tuple[int, int]:
        """Take the data beneath these paths out of the cache: (files, bytes). Returns when the room is free again."""
        await self._data.writes.flush_queued(FLUSH_TIMEOUT_S)  # what is on its way is known by its extent afterwards
        files = size = 0
        for path in paths:
            for part in self._beneath(path):
                with self._metadata.index.view() as view:
                    for number in part:
                        dropped = self._data.drop(view, number)
                        size += dropped
                        files += dropped > 0
                await trio.lowlevel.checkpoint()
        await self._data.writes.flush_queued(FLUSH_TIMEOUT_S)
        return files, size

    async def unpin(self, paths: Sequence[bytes]) -> int:
        """Let files be written to: the opposite of what their first opening did. How many there were."""
        if self._options.read_only:
            raise CacheFsError("a read-only mount pins whatever it sees: evict, or invalidate")
        count = 0
        for path in paths:
            for part in self._beneath(path):
                count += await self._make_mutable(part)
        return count

    async def _make_mutable(self, numbers: Iterable[int]) -> int:
        """Those of these files that are immutable may be written to. How many there were."""
        immutable = []
        with self._metadata.index.update() as update:
            for number in numbers:
                inode = self._metadata.inode(update, number)
                if inode is not None and inode.flags & IMMUTABLE:
                    immutable.append(number)
                    self._metadata.put_inode(update, inode.written())
        return (await self._drop(immutable))[0]

    def _beneath(self, path: bytes) -> Iterator[list[int]]:
        """Inodes that are known at a path and beneath it, in parts. The source is not asked. ENOENT: none is known."""
        number, missing = self._known(path)
        if missing is not None:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        waiting = [number]
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
        """The inode at a path, as far as the index knows; or the last one on the way, and the name that is unknown."""
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
        """This mount gave these inodes other names. Which of them, and of those beneath, are not pinned any more.

        The kernel is told and not waited for: it holds the directories of the request that this is done for (hazard 1).
        """
        waiting = [number for number in numbers if number] if self._metadata.mutable_names else []
        all_names: list[tuple[int, bytes]] = []
        unpinned: list[int] = []
        while waiting:
            part, waiting = waiting[-CHUNK:], waiting[:-CHUNK]
            with self._metadata.index.update() as update:
                for number in part:
                    inode = self._metadata.inode(update, number)
                    if inode is None:
                        continue
                    if inode.is_directory and self._metadata.mutable_names.reach_beneath(update, number):
                        waiting += self._metadata.children(update, number)
                    names, ends = self._metadata.follow_names(update, number)
                    all_names += names
                    unpinned += [number] * ends
            await trio.lowlevel.checkpoint()
        if all_names:
            self._notifier.all_soon(all_names, unpinned)
        return unpinned

    async def limit_metadata(self, retention: InodeLimit, metrics: Metrics) -> None:
        """A task, for ever: drop what is pinned beyond the limit."""
        excess = trio.Event()
        retention.on_excess = lambda: excess.set()
        while True:
            excess = trio.Event()
            while numbers := retention.victims(CHUNK):
                metrics.metadata_evictions += (await self._drop(numbers))[0]
            await excess.wait()

    async def _drop(self, numbers: list[int]) -> tuple[int, list[int]]:
        """Drop inodes, in the kernel too: how many there were, and what is beneath them."""
        dropped, links, children = self._drop_records(numbers)
        await self._notifier.all(links, dropped)
        return len(dropped), children

    def _drop_records(self, numbers: list[int]) -> tuple[list[int], list[tuple[int, bytes]], list[int]]:
        """(what was dropped, its names, its children)"""
        dropped: list[int] = []
        links: list[tuple[int, bytes]] = []
        children: list[int] = []
        with self._metadata.index.update() as update:
            for number in numbers:
                inode = self._metadata.inode(update, number)
                if inode is None:
                    continue
                if inode.is_directory:
                    beneath, absent = self._metadata.drop_children(update, number)
                    children += beneath
                    if number == ROOT_INODE:  # other directories lose them with their own entry
                        links += [(number, name) for name in {*absent, *self._absent_in_root}]
                        self._absent_in_root.clear()
                dropped.append(number)
                links += self._metadata.drop(update, number)
        return dropped, links, children

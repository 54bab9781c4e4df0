"""Prefetching: lists what the policy names, and wishes for what is not cached yet (wishes.py)."""

import itertools
from collections import deque
from collections.abc import Iterable, Sequence

import trio

from cachefs import record
from cachefs.data_cache import DataCache
from cachefs.directories import Directories
from cachefs.environment import View
from cachefs.filesystem import FileSystem
from cachefs.wishes import Wish, Wishes, lacking
from policies.prefetch.base import Prefetch, Target

RETRY_S = 0.05
ROOM_POLL_S = 1.0
MAX_REFUSALS = 256
"""So many files that find no room, one after the other: the cache is full, and the rest is not looked at."""
MAX_TARGETS = 1 << 16
"""So many wait; the cache is full then, and what comes is forgotten."""
CHUNK_NAMES = 16
"""How many files are looked at without letting other tasks run."""


class Prefetcher:
    def __init__(
        self,
        policy: Prefetch,
        filesystem: FileSystem,
        directories: Directories,
        data: DataCache,
        wishes: Wishes,
        *,
        evicts: bool = False,
    ) -> None:
        """`evicts`: what is fetched ahead may take the place of what training is through with."""
        # dependencies
        self._policy = policy
        self._fs = filesystem
        self._directories = directories
        self._data = data
        self._wishes = wishes
        self._evicts = evicts
        # state
        self._targets: deque[Target] = deque(policy.started())
        self._wake = trio.Event()
        self._last: int | None = -1
        self._refused: dict[bytes, Target] = {}
        """Where files lie that found no room, by path."""
        self._refused_bytes = 0
        """What the smallest of them needs."""
        self._refusals = 0
        self.state = "running" if self._targets else "idle"
        """"full": there are files that do not fit; it goes on when one of them does."""

    def read(self, units: Iterable[tuple[int, int]]) -> None:
        """These were read: (inode, number of the chunk)."""
        for number, _ in units:
            place = number if self._policy.per_file else self._fs.metadata.directory_of(number)
            if place == self._last:
                continue
            self._last = place
            try:
                path = self._fs.path_of(number)
            except OSError:  # unlinked
                continue
            if len(self._targets) < MAX_TARGETS:
                self._targets.extend(self._policy.read(path))
                self._wake.set()

    async def run(self) -> None:
        """The task: for ever, until cancelled."""
        while True:
            while self._targets and self._refusals < MAX_REFUSALS:
                self.state = "running"
                await self._fetch(self._targets.popleft())
            if not self._refused:
                self.state = "idle"
                self._wake = trio.Event()
                await self._wake.wait()
                continue
            self.state = "full"
            if self._refusals < MAX_REFUSALS:
                self._wake = trio.Event()
            with trio.move_on_after(ROOM_POLL_S):
                await self._wake.wait()
            if self._fits(self._refused_bytes):  # the cache has become larger, or something has gone
                self._targets.extendleft(reversed(self._refused.values()))
                self._refused.clear()
                self._refusals = 0

    async def _fetch(self, target: Target) -> None:
        try:
            inode = await self._fs.resolve(target.path)
            if not inode.is_directory:
                await self._wish([inode.number], target)
                return
            waiting = [inode.number]
            while waiting:
                entries = await self._directories.entries(waiting.pop())
                found: list[int] = []
                for start in range(0, len(entries), CHUNK_NAMES):
                    if not await self._wish(entries[start : start + CHUNK_NAMES], target, found):
                        return
                if target.recursive:
                    waiting += reversed(found)
        except OSError:
            pass  # it has gone, or the source has: whoever reads will hear of it

    async def _wish(self, numbers: Sequence[int], target: Target, directories: list[int] | None = None) -> bool:
        """Wish for the files among these, and tell the directories. False: there is no room for any more."""
        files: list[list[Wish]] = []
        numbers = await self._fs.come_of_age(numbers)
        with self._fs.metadata.index.view() as view:
            for number in numbers:
                inode = self._fs.metadata.inode(view, number)
                if inode is None:
                    continue
                if inode.is_directory and directories is not None:
                    directories.append(number)
                elif inode.is_regular and self._fs.metadata.is_pinned(inode) and self._matches(number, target, view):
                    files.append(lacking(self._data, view, inode))
        for wish in itertools.chain(*files):  # before room is made: they must not go for each other
            self._data.expected(wish.inode, wish.offset)
        wishes: list[Wish] = []
        size = 0
        for missing in filter(None, files):
            needed = sum(record.record_bytes(wish.length) for wish in missing)
            if await self._has_room(size + needed):
                wishes += missing
                size += needed
                self._refusals = 0
            else:
                self._refuse(target, needed)
        await self._wishes.send(wishes)
        await trio.lowlevel.checkpoint()
        return self._refusals < MAX_REFUSALS

    def _refuse(self, target: Target, needed: int) -> None:
        """There is no room for a file. The next ones may be smaller."""
        if not self._evicts:  # else the policy says again what it wants
            self._refused_bytes = min(needed, self._refused_bytes) if self._refused else needed
            self._refused[target.path] = target
            self._refusals += 1

    def _fits(self, needed: int) -> bool:
        return self._data.used_bytes + needed <= self._data.capacity_bytes

    async def _has_room(self, needed: int) -> bool:
        while True:
            if self._evicts:
                self._data.make_room(needed)
            if self._fits(needed):
                return True
            if not self._data.is_under_way:
                return False
            # What is on its way to the blob may count twice for a moment, and be there before it can be evicted.
            await trio.sleep(RETRY_S)

    def _matches(self, number: int, target: Target, view: View) -> bool:
        return target.globs is None or target.globs.matches(self._fs.path_of(number, view))

"""Prefetching: lists what the policy names, and requests what is not cached yet (queue.py)."""

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress

import trio

from cachefs.fs.directories import Directories
from cachefs.fs.names import FileSystem
from cachefs.prefetch.engine import PrefetchEngine, record_bytes, walk
from cachefs.prefetch.queue import PrefetchRequest
from cachefs.store.index.environment import View
from policies.prefetch.base import Prefetch, Target

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
        engine: PrefetchEngine,
        *,
        evicts: bool = False,
    ) -> None:
        """`evicts`: what is fetched ahead may take the place of what training is through with."""
        # dependencies
        self._policy = policy
        self._fs = filesystem
        self._directories = directories
        self._engine = engine
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
            if self._engine.fits(self._refused_bytes):  # the cache has become larger, or something has gone
                self._targets.extendleft(reversed(self._refused.values()))
                self._refused.clear()
                self._refusals = 0

    async def _fetch(self, target: Target) -> None:
        async def take(number: int) -> list[int] | None:
            with suppress(OSError):
                entries = await self._directories.entries(number)
                found: list[int] = []
                for start in range(0, len(entries), CHUNK_NAMES):
                    if not await self._request(entries[start : start + CHUNK_NAMES], target, found):
                        return None
                return found if target.recursive else []
            return None

        with suppress(OSError):  # it has gone, or the source has: a reader will hear of it
            inode = await self._fs.resolve(target.path)
            if inode.is_directory:
                await walk([inode.number], take)
            else:
                await self._request([inode.number], target)

    async def _request(self, numbers: Sequence[int], target: Target, directories: list[int] | None = None) -> bool:
        """Request the files among these, and tell the directories. False: there is no room for any more."""
        files: list[list[PrefetchRequest]] = []
        numbers = await self._fs.come_of_age(numbers)
        with self._fs.metadata.index.view() as view:
            for number in numbers:
                inode = self._fs.metadata.inode(view, number)
                if inode is None:
                    continue
                if inode.is_directory and directories is not None:
                    directories.append(number)
                elif inode.is_regular and self._fs.metadata.is_pinned(inode) and self._matches(number, target, view):
                    files.append(self._engine.lacking(view, inode))
        self._engine.expect(itertools.chain(*files))
        requests: list[PrefetchRequest] = []
        size = 0
        for missing in filter(None, files):
            needed = record_bytes(missing)
            if await self._engine.has_room(size + needed, evicts=self._evicts):
                requests += missing
                size += needed
                self._refusals = 0
            else:
                self._refuse(target, needed)
        await self._engine.queue.send(requests)
        await trio.lowlevel.checkpoint()
        return self._refusals < MAX_REFUSALS

    def _refuse(self, target: Target, needed: int) -> None:
        """There is no room for a file. The next ones may be smaller."""
        if not self._evicts:  # else the policy says again what it wants
            self._refused_bytes = min(needed, self._refused_bytes) if self._refused else needed
            self._refused[target.path] = target
            self._refusals += 1

    def _matches(self, number: int, target: Target, view: View) -> bool:
        return target.globs is None or target.globs.matches(self._fs.metadata.paths.path(view, number))

"""Prefetching: lists the directories that the policy names, and sends prefetch requests for uncached files."""

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress

import trio

from cachefs.prefetch.engine import PrefetchEngine, record_bytes, walk
from cachefs.prefetch.partition_check import PartitionCheck
from cachefs.prefetch.queue import PrefetchRequest
from cachefs.store.index.environment import View
from policies.prefetch.base import Prefetch, Target

ROOM_POLL_S = 1.0
MAX_REFUSALS = 256
"""After so many files in a row without room the cache counts as full, and no more files are looked at."""
MAX_TARGETS = 1 << 16
"""More waiting targets are ignored: the cache is full then."""
CHUNK_NAMES = 16
"""How many files are looked at without letting other tasks run."""


class Prefetcher:
    def __init__(
        self, policy: Prefetch, engine: PrefetchEngine, *, evicts: bool = False, check: PartitionCheck | None = None
    ) -> None:
        """`evicts`: prefetched data may replace data that training does not need any more."""
        # dependencies
        self._policy = policy
        self.check = check
        self._engine = engine
        self._fs = engine.filesystem
        # constants
        self._evicts = evicts
        # state
        self._targets: deque[Target] = deque(policy.started())
        self._wake = trio.Event()
        self._last: int | None = -1
        self._refused: dict[bytes, Target] = {}
        """By path: targets with files that do not fit."""
        self._refused_bytes = 0
        """The size of the smallest of these files."""
        self._refusals = 0
        self.state = "running" if self._targets else "idle"
        """"full": there are files that do not fit; the task continues when one of them does."""

    @property
    def problem(self) -> str | None:
        return None if self.check is None else self.check.problem

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
        """The task: until cancelled."""
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
            if self._engine.data.fits(self._refused_bytes):  # the cache was enlarged, or data were evicted
                self._targets.extendleft(reversed(self._refused.values()))
                self._refused.clear()
                self._refusals = 0

    async def _fetch(self, target: Target) -> None:
        async def take(number: int) -> list[int] | None:
            found: list[int] = []
            with suppress(OSError):  # as below; the other directories may be readable
                entries = await self._engine.directories.entries(number)
                for start in range(0, len(entries), CHUNK_NAMES):
                    if not await self._request(entries[start : start + CHUNK_NAMES], target, found):
                        return None
            return found if target.recursive else []

        with suppress(OSError):  # it was removed, or the source is gone: a reader gets the error
            inode = await self._fs.resolve(target.path)
            if inode.is_directory:
                await walk([inode.number], take)
            else:
                await self._request([inode.number], target)

    async def _request(self, numbers: Sequence[int], target: Target, directories: list[int] | None = None) -> bool:
        """Request the files among `numbers`; append subdirectories to `directories`. False: the cache is full."""
        wanted: list[int] = []
        numbers = await self._fs.come_of_age(numbers)
        with self._fs.metadata.index.view() as view:
            for number in numbers:
                inode = self._fs.metadata.inode(view, number)
                if inode is None:
                    continue
                if inode.is_directory and directories is not None:
                    directories.append(number)
                elif inode.is_regular and self._fs.metadata.is_pinned(inode) and self._matches(number, target, view):
                    wanted.append(number)
        files = await self._engine.lacking(wanted)
        self._engine.expect(itertools.chain(*(missing or () for _, missing in files)))
        requests: list[PrefetchRequest] = []
        size = 0
        for inode, missing in files:
            if missing is None:
                self._refuse(target, self._engine.data.file_bytes(inode))
                continue
            if not missing:
                continue
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
        if not self._evicts:  # otherwise the policy names its targets again
            self._refused_bytes = min(needed, self._refused_bytes) if self._refused else needed
            self._refused[target.path] = target
            self._refusals += 1

    def _matches(self, number: int, target: Target, view: View) -> bool:
        return target.globs is None or target.globs.matches(self._fs.metadata.paths.path(view, number))

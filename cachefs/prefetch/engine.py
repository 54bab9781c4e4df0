"""What prefetcher, hints and warm-up share: the units of a file that are not cached, room for them, and the queue.

Room: a fetched range is *under way* until it is in the index. It may be counted twice for a moment, and can be evicted
only afterwards. So a file that does not fit now may fit soon: `has_room` returns False only when nothing is under way.
It checks again after each round of write-behind (`progress`).
"""

import itertools
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

import trio

from cachefs.data.data_cache import DataCache
from cachefs.fs.attributes import Attributes
from cachefs.fs.directories import Directories
from cachefs.fs.handles import OpenFiles
from cachefs.fs.names import FileSystem
from cachefs.prefetch.queue import PrefetchQueue, PrefetchRequest
from cachefs.store.blob import record
from cachefs.store.index.environment import View
from cachefs.store.index.records import Inode
from policies.prefetch.sequential import CHUNK_BYTES

CHUNK_UNITS = 256
"""How many units of a file are looked at without letting other tasks run."""
PROGRESS_S = 0.05
"""The fast path has fetched data that it has not reported yet, and no event says when they change."""


@dataclass(frozen=True, slots=True)
class PrefetchEngine:
    data: DataCache
    queue: PrefetchQueue
    filesystem: FileSystem
    directories: Directories
    files: OpenFiles
    attributes: Attributes

    async def lacking(self, numbers: Iterable[int]) -> list[tuple[Inode, list[PrefetchRequest] | None]]:
        """The units of each of these files that are neither cached nor queued; removed files are left out.

        None: the file is larger than the cache, and its units are not listed, because there may be any number of them
        (hazard 42). No view is held while many units are listed.
        """
        found: list[tuple[Inode, list[PrefetchRequest] | None]] = []
        with self.filesystem.metadata.index.view() as view:
            for inode in filter(None, (self.filesystem.metadata.inode(view, number) for number in numbers)):
                if self.data.file_bytes(inode) > self.data.capacity_bytes:
                    found.append((inode, None))
                elif inode.size > CHUNK_UNITS * CHUNK_BYTES:
                    found.append((inode, []))
                else:
                    found.append((inode, self._lacking(view, inode, self.data.units(inode))))
        for inode, requests in found:
            if requests is None or inode.size <= CHUNK_UNITS * CHUNK_BYTES:
                continue
            units = self.data.units(inode)
            while part := list(itertools.islice(units, CHUNK_UNITS)):
                with self.filesystem.metadata.index.view() as view:
                    requests += self._lacking(view, inode, part)
                await trio.lowlevel.checkpoint()
        await trio.lowlevel.checkpoint()
        return found

    def _lacking(self, view: View, inode: Inode, units: Iterable[tuple[int, int]]) -> list[PrefetchRequest]:
        return [PrefetchRequest(inode.number, *unit) for unit in units if not self.data.holds(view, inode, unit)]

    def expect(self, requests: Iterable[PrefetchRequest]) -> None:
        """Announce these to the retention policy before room is made, so that they do not replace each other."""
        for request in requests:
            self.data.expected(request.inode, request.offset)

    async def has_room(self, needed_bytes: int, *, evicts: bool) -> bool:
        """Waits as long as there may be room soon. `evicts`: cached data may be evicted for it."""
        while True:
            if evicts:
                self.data.make_room(needed_bytes)
            if self.data.fits(needed_bytes):
                return True
            if not self.data.is_under_way:
                return False
            await self.progress()

    async def progress(self) -> None:
        """Returns after a round of write-behind, or after PROGRESS_S."""
        with trio.move_on_after(PROGRESS_S):
            await self.data.writes.round_ended()


def record_bytes(requests: Iterable[PrefetchRequest]) -> int:
    """Their size in the cache."""
    return sum(record.record_bytes(request.length) for request in requests)


async def first_of(*waits: Callable[[], Awaitable[object]]) -> None:
    """Returns when one of these has returned."""

    async def run(wait: Callable[[], Awaitable[object]]) -> None:
        await wait()
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for wait in waits:
            nursery.start_soon(run, wait)


async def walk(
    directories: Iterable[int], take: Callable[[int], Awaitable[list[int] | None]], *, at_once: int = 1
) -> None:
    """Process these directories and all beneath them, depth first. Returns when all have been processed.

    `take`: processes the entries of one directory and returns its subdirectories, in order; None ends the walk. It
    raises nothing.
    """
    waiting = list(directories)[::-1]
    running = 0
    returned = trio.Event()

    async def run(number: int) -> None:
        nonlocal running
        below = await take(number)
        if below is None:
            waiting.clear()
        else:
            waiting.extend(reversed(below))
        running -= 1
        returned.set()

    async with trio.open_nursery() as nursery:
        while waiting or running:
            while waiting and running < at_once:
                running += 1
                nursery.start_soon(run, waiting.pop())
            returned = trio.Event()
            await returned.wait()

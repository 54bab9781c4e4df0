"""What prefetcher, hints and warm-up share: what is missing of a file, room for it, and the queue that fetches it.

Room: what was fetched is *under way* until the index has it, may count twice for a moment, and can be evicted only
afterwards. So a file that does not fit now may fit soon, and `has_room` says no only when nothing is under way. It
looks again at the end of each round of write-behind (`progress`).
"""

from collections.abc import Awaitable, Callable, Iterable

import trio

from cachefs.data.data_cache import DataCache
from cachefs.prefetch.queue import PrefetchQueue, PrefetchRequest
from cachefs.store.blob import record
from cachefs.store.index.environment import View
from cachefs.store.index.records import Inode

PROGRESS_S = 0.05
"""The fast path changes what it holds, and does not say so."""


class PrefetchEngine:
    def __init__(self, data: DataCache, queue: PrefetchQueue) -> None:
        self.data = data
        self.queue = queue

    def lacking(
        self, view: View, inode: Inode, units: Iterable[tuple[int, int]] | None = None
    ) -> list[PrefetchRequest]:
        """What is neither cached nor on its way of a file, or of these units of it."""
        wanted = self.data.units(inode) if units is None else units
        return [PrefetchRequest(inode.number, *unit) for unit in wanted if not self.data.holds(view, inode, unit)]

    def expect(self, requests: Iterable[PrefetchRequest]) -> None:
        """Tell the retention policy of these before room is made: they must not go for each other."""
        for request in requests:
            self.data.expected(request.inode, request.offset)

    def fits(self, needed_bytes: int) -> bool:
        return self.data.used_bytes + needed_bytes <= self.data.capacity_bytes

    async def has_room(self, needed_bytes: int, *, evicts: bool) -> bool:
        """Waits as long as there may be room soon. `evicts`: something may go for it."""
        while True:
            if evicts:
                self.data.make_room(needed_bytes)
            if self.fits(needed_bytes):
                return True
            if not self.data.is_under_way:
                return False
            await self.progress()

    async def progress(self) -> None:
        """Returns when something has been written, and after a moment at the latest."""
        with trio.move_on_after(PROGRESS_S):
            await self.data.writes.round_ended()


def record_bytes(requests: Iterable[PrefetchRequest]) -> int:
    """What they take of the cache."""
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
    """Take these directories and all beneath them, depth first. Returns when all have been taken.

    `take`: lists one directory, deals with what is in it, and returns the directories among that, in order; None ends
    the walk. It raises nothing.
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

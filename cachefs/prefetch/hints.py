"""Hints: files that a client will read, in this order. They are prefetched as long as there is room."""

from collections import deque
from collections.abc import Sequence
from contextlib import suppress

import trio

from cachefs.errors import CacheFsError
from cachefs.prefetch.engine import PrefetchEngine, first_of, record_bytes
from cachefs.prefetch.queue import PrefetchRequest

JOBS = 16
"""How many are fetched at once: readers wait for these very files."""
CHUNK_NAMES = 32
"""How many names are looked up at once."""
MAX_WAITING = 1 << 20


class Hints:
    def __init__(self, engine: PrefetchEngine) -> None:
        # dependencies
        self._engine = engine
        self._fs = engine.filesystem
        # state
        self._waiting: deque[bytes] = deque()
        self._wake = trio.Event()

    @property
    def waiting(self) -> int:
        """The number of files that have not been looked up yet."""
        return len(self._waiting)

    def note(self, paths: Sequence[bytes], *, anew: bool) -> int:
        """Add files, and return their number. `anew`: forget the earlier ones. Raises CacheFsError."""
        if anew:
            self._waiting.clear()
        if self.waiting + len(paths) > MAX_WAITING:
            raise CacheFsError(
                f"too many hints: {self.waiting:,} files are waiting, and the limit is {MAX_WAITING:,}: announce fewer"
            )
        self._waiting.extend(paths)
        self._wake.set()
        return len(paths)

    async def run(self) -> None:
        """The task: until cancelled."""
        while True:
            await self._wake.wait()
            with self._engine.queue.at_once(JOBS):
                while self._waiting:
                    await self._fetch([self._waiting.popleft() for _ in range(min(CHUNK_NAMES, len(self._waiting)))])
                self._wake = trio.Event()
                await first_of(self._engine.queue.until_idle, self._wake.wait)

    async def _fetch(self, paths: list[bytes]) -> None:
        numbers = [0] * len(paths)

        async def look_up(place: int) -> None:
            with suppress(OSError):  # its reader gets the error
                inode = await self._fs.resolve(paths[place])
                if inode.is_regular and await self._engine.files.make_immutable(inode.number):
                    numbers[place] = inode.number

        async with trio.open_nursery() as nursery:
            for place in range(len(paths)):
                nursery.start_soon(look_up, place)
        requests: list[PrefetchRequest] = []
        found = await self._fs.come_of_age([number for number in numbers if number])
        room = self._engine.data.capacity_bytes - self._engine.data.used_bytes
        for _, missing in await self._engine.lacking(found):
            if missing is not None and (needed := record_bytes(missing)) <= room:  # the next one may be smaller
                room -= needed
                requests += missing
        self._engine.expect(requests)
        await self._engine.queue.send(requests)

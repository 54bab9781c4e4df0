"""Prefetch requests: units of files that are to be cached before they are read.

The threads of the fast path fetch them, or a few tasks of this process if there is no fast path. The queue limits how
many are fetched at once, so that readers are not delayed. It never waits for a reader, and no reader waits for it.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import trio

from cachefs.fs.handles import OpenFiles

PARALLEL = 8


class PrefetchRequest(NamedTuple):
    inode: int
    offset: int
    length: int


class PrefetchQueue(ABC):
    def __init__(self) -> None:
        self.sent = 0
        """The number of requests so far."""
        self._limits: list[int] = []

    @property
    @abstractmethod
    def done(self) -> int:
        """The number of requests that were fetched or have failed; roughly the first ones."""

    @abstractmethod
    async def send(self, requests: Sequence[PrefetchRequest]) -> None:
        """Add requests to the queue; returns when there is room for more."""

    @abstractmethod
    async def until_idle(self) -> None:
        """Returns when all requests are done."""

    @contextmanager
    def at_once(self, jobs: int) -> Iterator[None]:
        """While the block runs, fetch `jobs` requests at once, even if that delays readers. 0: adaptive limit."""
        self._limits.append(jobs)
        self._limit(max(self._limits))
        try:
            yield
        finally:
            self._limits.remove(jobs)
            self._limit(max(self._limits, default=0))

    @abstractmethod
    def _limit(self, jobs: int) -> None: ...


class OwnPrefetchQueue(PrefetchQueue):
    """Fetched by this process."""

    def __init__(self, files: OpenFiles, nursery: trio.Nursery) -> None:
        super().__init__()
        self._files = files
        self._nursery = nursery
        self._free = trio.CapacityLimiter(PARALLEL)
        self._done = 0
        self._idle = trio.lowlevel.ParkingLot()

    @property
    def done(self) -> int:
        return self._done

    async def send(self, requests: Sequence[PrefetchRequest]) -> None:
        for request in requests:
            borrower = object()  # one for each request: several tasks may call send
            await self._free.acquire_on_behalf_of(borrower)
            self.sent += 1
            self._nursery.start_soon(self._fetch, request, borrower)

    async def _fetch(self, request: PrefetchRequest, borrower: object) -> None:
        try:
            await self._files.fetch_ahead(request.inode, request.offset)
        finally:
            self._done += 1
            self._free.release_on_behalf_of(borrower)
            if self._done == self.sent:
                self._idle.unpark_all()

    async def until_idle(self) -> None:
        while self._done < self.sent:
            await self._idle.park()

    def _limit(self, jobs: int) -> None:
        self._free.total_tokens = jobs or PARALLEL

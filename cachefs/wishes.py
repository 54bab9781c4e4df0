"""Wishes: units of files that somebody would like to have cached before anybody reads them.

Who fetches them, and when that does not disturb readers, is the business of `Wishes`: with a fast path its threads,
else a few tasks of this process. Nothing here waits for a reader, and no reader for this.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import trio

from cachefs.attributes import Inode
from cachefs.data_cache import DataCache
from cachefs.environment import View
from cachefs.open_files import OpenFiles

PARALLEL = 8


class Wish(NamedTuple):
    inode: int
    offset: int
    length: int


def lacking(data: DataCache, view: View, inode: Inode, units: Iterable[tuple[int, int]] | None = None) -> list[Wish]:
    """What is neither cached nor on its way of a file, or of these units of it."""
    wanted = data.units(inode) if units is None else units
    return [Wish(inode.number, *unit) for unit in wanted if not data.holds(view, inode, unit)]


class Wishes(ABC):
    def __init__(self) -> None:
        self.sent = 0
        """How many there were."""
        self._asked: list[int] = []

    @property
    @abstractmethod
    def done(self) -> int:
        """How many of those that were sent have been fetched, or are not to be had. Roughly in order."""

    @abstractmethod
    async def send(self, wishes: Sequence[Wish]) -> None:
        """Have these fetched, some time; returns when there may be more."""

    @contextmanager
    def at_once(self, jobs: int) -> Iterator[None]:
        """While the block runs so many are fetched at once, whatever that costs readers. 0: as many as do not mind."""
        self._asked.append(jobs)
        self._limit(max(self._asked))
        try:
            yield
        finally:
            self._asked.remove(jobs)
            self._limit(max(self._asked, default=0))

    @abstractmethod
    def _limit(self, jobs: int) -> None: ...


class OwnWishes(Wishes):
    """Fetched by this process."""

    def __init__(self, files: OpenFiles, nursery: trio.Nursery) -> None:
        super().__init__()
        self._files = files
        self._nursery = nursery
        self._free = trio.CapacityLimiter(PARALLEL)
        self._done = 0

    @property
    def done(self) -> int:
        return self._done

    async def send(self, wishes: Sequence[Wish]) -> None:
        for wish in wishes:
            borrower = object()  # of its own: several may be sending
            await self._free.acquire_on_behalf_of(borrower)
            self.sent += 1
            self._nursery.start_soon(self._fetch, wish, borrower)

    async def _fetch(self, wish: Wish, borrower: object) -> None:
        try:
            await self._files.fetch_ahead(wish.inode, wish.offset)
        finally:
            self._done += 1
            self._free.release_on_behalf_of(borrower)

    def _limit(self, jobs: int) -> None:
        self._free.total_tokens = jobs or PARALLEL

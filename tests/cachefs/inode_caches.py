"""Inode caches as a mount has them, with a kernel that only notes what it was to drop."""

from collections.abc import Callable, Sequence
from functools import partial

from cachefs.fs.immutability import may_become_immutable_on_open
from cachefs.metadata.inode_cache import InodeCache
from cachefs.metadata.limit import InodeLimit
from cachefs.metadata.validity import Run
from cachefs.options import Options
from cachefs.store.index.index import Index
from cachefs.store.runs import Numbers
from cachefs.system.clock import SYSTEM, Clock


class Kernel:
    """A notifier."""

    def __init__(self, monotonic_ns: Callable[[], int] = SYSTEM.monotonic_ns) -> None:
        self._monotonic_ns = monotonic_ns
        self._dropped_ns: dict[int, int] = {}
        self.names: list[tuple[int, bytes]] = []
        self.numbers: list[int] = []
        self.attributes_of: list[int] = []
        self.known: set[int] = set()
        """The inodes that it has not forgotten."""

    def drop_soon(self, entries: Sequence[tuple[int, bytes]], numbers: Sequence[int] = ()) -> None:
        self.names += entries
        self.numbers += numbers
        self._dropped_ns.update(dict.fromkeys(numbers, self._monotonic_ns()))

    async def drop(self, entries: Sequence[tuple[int, bytes]], numbers: Sequence[int]) -> None:
        self.drop_soon(entries, numbers)

    def attributes(self, number: int) -> bool:
        self.attributes_of.append(number)
        if number in self.known:
            self._dropped_ns[number] = self._monotonic_ns()
        return number in self.known

    def dropped_between(self, number: int, since_ns: int, until_ns: int) -> bool:
        return since_ns <= self._dropped_ns.get(number, 0) <= until_ns


def inode_cache(
    index: Index,
    options: Options,
    *,
    run: int = 1,
    forgot: bool = False,
    kernel: Kernel | None = None,
    retention: InodeLimit | None = None,
    clock: Clock = SYSTEM,
) -> InodeCache:
    """Nothing of an earlier run counts."""
    return InodeCache(
        index,
        options,
        Run(run, run, forgot=forgot),
        Numbers(run),
        kernel or Kernel(),
        partial(may_become_immutable_on_open, options),
        retention=retention,
        clock=clock,
    )

"""The last change of each object by this mount: answers of the source to calls that began earlier are outdated.

An lstat that began before a write and is answered after it brings an older size. The kernel knows the newer size. If it
took over the older one, the next append would go there. So such an answer is valid for no time (`happened_since`), and
requests that come after the write do not share it (`count`).

A READ waits for the WRITEs of the file that have arrived before it (`read`).

A change of a name moves the ctime before its answer is here: fetches that see it wait for its end (`end_of`), and so
does the next change of a name.
"""

from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar

import trio

MOST = 4096
MOST_LOST = 1 << 14
MOST_FORGOTTEN = 1 << 16
MOST_READS = 4
T = TypeVar("T")


class LastChanges:
    def __init__(self, monotonic_ns: Callable[[], int]) -> None:
        # dependencies
        self._monotonic_ns = monotonic_ns
        # state
        self.count = 0
        """How many changes there were."""
        self._when_ns: OrderedDict[int, int] = OrderedDict()
        """Inode number → time of its last change, the latest at the end."""
        self._forgotten_ns = 0
        """Time of the last change that is no longer in `_when_ns`."""
        self._under_way: dict[int, trio.Event] = {}
        """Inode → set when the change that this mount is making to its names has been made."""
        self._writes: dict[int, set[trio.Event]] = {}
        """Inode → its WRITEs that are being made; each is set when it has been made."""

    def note(self, number: int) -> None:
        """A change has just been made."""
        self.count += 1
        self._when_ns[number] = self._monotonic_ns()
        self._when_ns.move_to_end(number)
        if len(self._when_ns) > MOST:
            self._forgotten_ns = self._when_ns.popitem(last=False)[1]

    def happened_since(self, number: int, began_ns: int) -> bool:
        """Was the object changed after a call that began at `began_ns`? False where that is 0 (not known)."""
        return 0 < began_ns <= self.last_ns(number)

    def last_ns(self, number: int) -> int:
        """When the object was changed last, or later; 0: never."""
        return self._when_ns.get(number, self._forgotten_ns)

    @asynccontextmanager
    async def under_way(self, *numbers: int) -> AsyncIterator[None]:
        """Around a change of a name of these inodes by this mount (0: not known). One after another: the next one
        compares the inode with what this one has recorded."""
        known = set(numbers) - {0}
        while others := [self._under_way[number] for number in known & self._under_way.keys()]:
            await others[0].wait()
        event = trio.Event()
        self._under_way.update(dict.fromkeys(known, event))
        try:
            yield
        finally:
            for number in known:
                del self._under_way[number]
            event.set()

    @contextmanager
    def writing(self, number: int) -> Iterator[None]:
        """Around a WRITE of an inode."""
        event = trio.Event()
        others = self._writes.setdefault(number, set())
        others.add(event)
        try:
            yield
        finally:
            event.set()
            others.remove(event)
            if not others:
                del self._writes[number]
            self.note(number)

    async def read(self, number: int, read: Callable[[], Awaitable[T]]) -> T:
        """What a READ of an inode gets, which sees all WRITEs that have arrived.

        The kernel may drop a page while it writes a part of it, and read it again at once. Without this it would keep a
        page that lacks what was written, and write that page if a process has mapped it. Where one WRITE follows the
        other all the time, `read` is called `MOST_READS` times.
        """
        for _ in range(MOST_READS):
            for event in tuple(self._writes.get(number, ())):
                await event.wait()
            began_ns = self._monotonic_ns()
            result = await read()
            if number not in self._writes and not self.happened_since(number, began_ns):
                break
        return result

    def end_of(self, number: int) -> trio.Event | None:
        """Set when the change that this mount is making to an inode's names has been made. None: there is none."""
        return self._under_way.get(number)


class LostNames:
    """Names that the source has removed, or given to other objects. The kernel may still know the former by them."""

    def __init__(self, monotonic_ns: Callable[[], int]) -> None:
        self._losses = LastChanges(monotonic_ns)
        self._monotonic_ns = monotonic_ns
        self._names: OrderedDict[tuple[int, bytes, int], int] = OrderedDict()
        """(parent, name, inode) → when it was seen to be lost, the latest at the end."""
        self._forgotten_ns = 0
        """When the last name that is no longer in `_names` was lost."""

    def note(self, number: int, parent: int, name: bytes) -> None:
        self._losses.note(number)
        self._names[parent, name, number] = self._monotonic_ns()
        self._names.move_to_end((parent, name, number))
        if len(self._names) > MOST_LOST:
            self._forgotten_ns = self._names.popitem(last=False)[1]

    def last_ns(self, number: int) -> int:
        """When the inode lost a name last, or later; 0: never."""
        return self._losses.last_ns(number)

    def since(self, began_ns: int) -> list[tuple[int, bytes]] | None:
        """What was lost from then on. None: not all of it is known any more."""
        self._forget_before(began_ns)
        names = dict.fromkeys((parent, name) for parent, name, _ in self._names)
        return None if self._forgotten_ns >= began_ns else list(names)

    def losers(self, name: tuple[int, bytes], began_ns: int) -> list[int]:
        """The inodes that lost a name from then on."""
        self._forget_before(began_ns)
        return [number for *lost, number in self._names if tuple(lost) == name]

    def _forget_before(self, began_ns: int) -> None:
        while self._names and next(iter(self._names.values())) < began_ns:
            self._names.popitem(last=False)


class ForgottenInodes:
    """Inodes that the kernel has forgotten, as far as it says. At the moment of a FORGET another look-up may have been
    answered, of which the kernel knows nothing before it has received the answer: it is asked when that has come."""

    def __init__(self, monotonic_ns: Callable[[], int], answered_ns: int) -> None:
        self._monotonic_ns = monotonic_ns
        self._answered_ns = answered_ns
        self._when_ns: OrderedDict[int, int] = OrderedDict()
        """Inode number → time of its last FORGET, the latest at the end."""

    def note(self, number: int) -> None:
        self._when_ns[number] = self._monotonic_ns()
        self._when_ns.move_to_end(number)

    def take(self) -> list[int]:
        """Those of which the kernel has received all answers by now. Where there are very many, some more."""
        before_ns, taken = self._monotonic_ns() - self._answered_ns, list[int]()
        while self._when_ns and (
            next(iter(self._when_ns.values())) <= before_ns or len(self._when_ns) > MOST_FORGOTTEN
        ):
            taken.append(self._when_ns.popitem(last=False)[0])
        return taken

"""Refusals: requests that fail because a file is immutable, or is not what was pinned or looked up.

A job gets EPERM or ESTALE, and no reason. So the daemon counts each refusal and logs the first one of each path, with
the reason and the remedy.

A library whose open for writing was refused removes the file in its error handling, because it takes the file for its
own unfinished output (hazard 37). So a process that was refused to write to a file cannot unlink it for `CLEAN_UP_S`.
The kernel names the calling thread; `Caller.process` finds its process. A successor daemon does not know what its
predecessor refused: error handling follows the refusal within milliseconds.

The kernel repeats a call by a path that was answered with ESTALE, once, after it has looked up the path again. A second
ESTALE would reach the job. So a call that fails only to have the path looked up (because the kernel may take a name for
that of a former file, or have a former size) does not when it is repeated. And a call that follows a look-up of an
object with another mode need not be repeated for it.
"""

import errno
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from itertools import islice
from typing import NamedTuple, NoReturn, Protocol, TypeVar

import trio

from cachefs.errors import failed
from cachefs.metadata.inode_cache import InodeCache
from cachefs.metadata.inode_paths import MOST_NAMES, links_if
from cachefs.metadata.notifier import Notifier
from cachefs.metadata.validity import ANSWERED_NS
from cachefs.source.credentials import Caller, Process
from cachefs.stats.metrics import Metrics
from cachefs.store.index.records import Inode
from cachefs.system.clock import NANOSECONDS, SYSTEM

T = TypeVar("T")
log = logging.getLogger(__name__)

PERIOD_S = 3600.0
MOST_PATHS = 100
"""How many paths are logged in one period. Each is logged once."""
CLEAN_UP_S = 10.0
"""How long a process that was refused to write to a file cannot unlink it."""
MOST_WRITERS = 10_000
"""How many refused writers are remembered; the oldest ones are forgotten first."""
REPEATED_WITHIN_NS = 2 * NANOSECONDS
"""How soon after an answer the kernel goes on with the look-ups for a repeated call, or with the call."""
MOST_REPEATED = 4096
"""How many threads are remembered that have got ESTALE; the oldest ones are forgotten first."""
TOLD_WITHIN_S = 2.0
"""How long a call waits until the kernel has dropped names. It may have locked their directory for another call."""


class Refusals:
    def __init__(
        self, metadata: InodeCache, metrics: Metrics, monotonic_s: Callable[[], float] = SYSTEM.monotonic_s
    ) -> None:
        # dependencies
        self._metadata = metadata
        self._metrics = metrics
        self._monotonic_s = monotonic_s
        # state
        self._logged: set[tuple[int, str]] = set()
        """(inode, what was refused)"""
        self._ends_s = 0.0
        self._writers: OrderedDict[tuple[int, Process], float] = OrderedDict()
        """(inode, process) → until when the process cannot unlink the file; in this order."""

    def immutable(self, number: int, writer: Caller | None = None) -> None:
        """A change of an immutable file is about to fail with EPERM. `writer`: of a change of its contents."""
        self._metrics.refused_changes += 1
        if writer is not None:
            key = number, writer.process()
            self._writers.pop(key, None)
            self._writers[key] = self._monotonic_s() + CLEAN_UP_S
            if len(self._writers) > MOST_WRITERS:
                self._writers.popitem(last=False)
        self._say_once(
            number,
            "change",
            "%(path)s: a change was refused with EPERM, because the file is immutable: it was read, warmed up or "
            "pinned. To keep such files mutable, mount with --mutable GLOB. For this file alone, run: "
            "cachefs unpin MOUNTPOINT/%(path)s",
        )

    def protects(self, number: int, caller: Caller) -> bool:
        """Must this process not unlink this immutable file, because it was refused to write to it just now?"""
        now_s = self._monotonic_s()
        while self._writers and next(iter(self._writers.values())) <= now_s:
            self._writers.popitem(last=False)
        if not self._writers or (number, caller.process()) not in self._writers:
            return False
        self._metrics.refused_changes += 1
        self._say_once(
            number,
            "unlink",
            "%(path)s: an unlink was refused with EPERM, because the same process had failed to open the immutable "
            "file for writing: its clean-up would have removed the old contents. To let jobs overwrite such files, "
            f"mount with --mutable GLOB. To remove the file, use another process, or wait {CLEAN_UP_S:.0f} s",
        )
        return True

    def changed(self, number: int) -> None:
        """A read of an immutable file is about to fail with ESTALE."""
        self._metrics.stale_reads += 1
        self._say_once(
            number,
            "read",
            "%(path)s: a read failed with ESTALE, because the file has changed at the source since it became "
            "immutable. Open it again to read the new version. If files change while jobs read them, mount with "
            "--mutable GLOB or --profile changing",
        )

    def _say_once(self, number: int, refused: str, message: str) -> None:
        """Log it, if it is the first refusal of this kind for this file. `message`: contains %(path)s."""
        if self._is_first(number, refused):
            log.warning(message, {"path": self._path(number)})

    def _is_first(self, number: int, refused: str) -> bool:
        now_s = self._monotonic_s()
        if now_s >= self._ends_s:
            self._logged.clear()
            self._ends_s = now_s + PERIOD_S
        if (number, refused) in self._logged or len(self._logged) >= MOST_PATHS:
            return False
        self._logged.add((number, refused))
        return True

    def _path(self, number: int) -> str:
        with self._metadata.index.view() as view:
            return self._metadata.paths.logged(view, number)


class Names(Protocol):
    """`FileSystem`, as far as `Repetitions` need it."""

    metadata: InodeCache
    notifier: Notifier

    async def compare(self, parent: int, name: bytes) -> Inode | None: ...
    def overtake(self, parent: int, name: bytes) -> None: ...


class Found(Protocol):
    """An `Entry`."""

    @property
    def inode(self) -> Inode | None: ...


F = TypeVar("F", bound=Found)


class _Reopening(NamedTuple):
    """An open that the kernel is expected to repeat, because a request for it has got ESTALE."""

    until_ns: int
    """When its next request must have come."""
    number: int = 0
    """The inode of the file. If a look-up has failed, it is what the thread has looked up last."""
    name: bytes = b""
    """What the failed look-up was for: the kernel looks it up again. Empty if another request has failed."""
    was_open: bool = False
    """The open itself has failed. Else the request may have been for another call, or by a descriptor."""
    is_looked_up: bool = False


class _Relinking(NamedTuple):
    """A link that the kernel is expected to repeat."""

    link: tuple[int, bytes]
    """The (directory, name) of the new link. The kernel has locked the directory."""
    found_ns: dict[int, int]
    """The inodes that were looked up since, and when."""


class Repetitions:
    """Calls by a path that are answered with ESTALE: the kernel looks up the path again, and repeats each one, once.

    Before the answer the kernel drops the names that the source has given to other files. So what the same thread does
    next, repeated or not, is by a name that the kernel has looked up since then. The kernel cannot drop names in the
    directory that it has locked for a link. It does as soon as the link is answered; what the thread does next may come
    before. So a link counts as repeated if it has the same new name, and the thread has looked up its inode since, and
    no other name in vain: else the path led nowhere, and nothing is repeated.
    """

    def __init__(self, names: Names, monotonic_ns: Callable[[], int]) -> None:
        # dependencies
        self._names = names
        self._metadata = names.metadata
        self._notifier = names.notifier
        self._monotonic_ns = monotonic_ns
        # state
        self._told_ns: OrderedDict[int, int] = OrderedDict()
        """Thread → the time of which the kernel has dropped former names, while the thread was waiting for an answer.
        Then the kernel has looked up the path again. For some requests it does not (see `on_the_way`)."""
        self._relinking: OrderedDict[int, _Relinking] = OrderedDict()
        """By thread."""
        self._reopening: OrderedDict[int, _Reopening] = OrderedDict()
        """By thread."""
        self._answered: OrderedDict[int, tuple[int, int]] = OrderedDict()
        """Thread → the inode of which the kernel got attributes for it last, and the size."""
        self._told_mode_ns: OrderedDict[int, int] = OrderedDict()
        """Thread → the time of which the kernel has dropped former modes, before it got ESTALE."""
        self._changed: OrderedDict[int, tuple[int, int]] = OrderedDict()
        """Thread → the inode of which it has changed attributes last, and when. The kernel takes that answer over."""
        self._found: OrderedDict[int, tuple[int, int]] = OrderedDict()
        """Thread → the inode that it has looked up last, and when it was answered, if the mode had just changed."""

    @asynccontextmanager
    async def by_path(
        self, caller: Caller, *, link: tuple[int, bytes] | None = None, opens: int = 0
    ) -> AsyncIterator[None]:
        """Around a call about the inode to which a path led. `link`: the (directory, name) of a new link to it.
        `opens`: its number, if it is opened for reading."""
        with self.on_the_way(caller, opens, was_open=True):
            try:
                yield
            except OSError as error:
                if error.errno == errno.ESTALE:
                    await self.expect(caller, link=link)
                raise

    @contextmanager
    def on_the_way(self, caller: Caller, number: int, name: bytes = b"", *, was_open: bool = False) -> Iterator[None]:
        """Around a request that the kernel may make on the way of an open of `number`. 0: of what is looked up after
        another look-up of `name`.

        It repeats the open if it gets ESTALE. But there are callers of getattr and getxattr in the kernel that ignore
        the error, and go on without another look-up: truncate(2) and link(2). So nothing follows for names.
        """
        try:
            yield
        except OSError as error:
            if error.errno == errno.ESTALE:
                now_ns = self._monotonic_ns()
                if caller.pid:
                    _put(self._told_mode_ns, caller.pid, now_ns)
                number, name = self._step(number, name)
                if number or name:
                    _put(self._reopening, caller.pid, _Reopening(now_ns + REPEATED_WITHIN_NS, number, name, was_open))
            raise

    def _step(self, number: int, name: bytes) -> tuple[int, bytes]:
        """What shows that a call is repeated, for `_Reopening`. If a request for a directory on the way has failed, it
        is a look-up of its name, because another inode is opened."""
        with self._metadata.index.view() as view:
            inode = self._metadata.inode(view, number) if number else None
            link = self._metadata.paths.name(view, number) if inode is not None and inode.is_directory else None
            return (number, name) if link is None else (0, link[1])

    async def expect(self, caller: Caller, *, link: tuple[int, bytes] | None = None) -> None:
        """A call is about to be answered with ESTALE. `link`: as of `by_path`."""
        await self._compare_successors((self._metadata.lost_names() or [])[-MOST_NAMES:])
        began_ns, names = self._monotonic_ns(), self._metadata.lost_names()
        for name in names or ():
            self._names.overtake(*name)  # a look-up that is under way must not bring the former file
        if names is None:
            return
        if link is None or all(parent != link[0] for parent, _ in names):
            await self._drop(names, caller, began_ns)
            return
        _put(self._relinking, caller.pid, _Relinking(link, {}))
        trio.lowlevel.spawn_system_task(self._notifier.drop, names, ())

    async def _drop(self, names: Sequence[tuple[int, bytes]], caller: Caller, began_ns: int) -> None:
        with trio.move_on_after(TOLD_WITHIN_S) as limit:
            await self._notifier.drop(names, ())
        if names and not caller.pid:  # other callers without a number, whose calls are under way, may know the names
            await trio.sleep(ANSWERED_NS / NANOSECONDS)
        if not limit.cancelled_caught:
            _put(self._told_ns, caller.pid, began_ns)

    async def _compare_successors(self, names: Sequence[tuple[int, bytes]]) -> None:
        """The call may be repeated about a file that has got one of these names, and may have lost another one."""
        numbers = set[int]()
        for name in names:
            with suppress(OSError):
                found = await self._names.compare(*name)
                numbers |= {found.number} if found is not None else set()
        for number in numbers:
            for link in islice(links_if(self._metadata.index, number, least=2), MOST_NAMES):
                with suppress(OSError):
                    await self._names.compare(*link)

    async def look_up(self, entry: Awaitable[F], caller: Caller, name: tuple[int, bytes]) -> F:
        """A look-up of (directory, name) for the kernel."""
        arrival_ns, inode = self._monotonic_ns(), None
        with self.on_the_way(caller, 0, name[1]):
            try:
                found = await entry
                inode = found.inode
            finally:
                self._looked_up(inode, caller, name, arrival_ns)
            return found

    def _looked_up(self, inode: Inode | None, caller: Caller, name: tuple[int, bytes], arrival_ns: int) -> None:
        """`inode`: None where there is nothing, or no answer."""
        relinking = self._relinking.get(caller.pid)
        if inode is not None:
            self.answered(inode, caller)
            if caller.pid and self._metadata.last_permissions_ns(inode.number):
                _put(self._found, caller.pid, (inode.number, self._monotonic_ns()))
        if relinking is not None and inode is not None:
            relinking.found_ns[inode.number] = arrival_ns
        elif relinking is not None and name != relinking.link:
            del self._relinking[caller.pid]
        known = self._reopening.pop(caller.pid, None)
        if known is not None and inode is not None and arrival_ns < known.until_ns:
            is_looked_up = known.is_looked_up or inode.number == known.number or name[1] == known.name
            number = inode.number if known.name else known.number
            until_ns = self._monotonic_ns() + REPEATED_WITHIN_NS
            known = known._replace(until_ns=until_ns, number=number, is_looked_up=is_looked_up)
            if known.was_open and inode.is_regular and inode.number != number:  # the file has been replaced meanwhile
                known = known._replace(number=inode.number, was_open=False, is_looked_up=True)
            _put(self._reopening, caller.pid, known)

    def is_reopened(self, number: int, caller: Caller) -> Callable[[int], bool]:
        """Is this open of an inode for reading a repeated one, so that the kernel has just learnt its size? The result
        says whether that may be another one than the present size, its argument."""
        known = self._reopening.pop(caller.pid, None)
        if known is None or known.number != number or self._monotonic_ns() >= known.until_ns:
            return lambda size: False
        if not known.is_looked_up:
            # The kernel repeats an open by /proc/PID/fd/N, too, but has no name to look up: nothing tells it the size.
            is_by_descriptor = known.was_open and bool(caller.pid)  # 0: of all processes that cannot be told apart
            return lambda size: is_by_descriptor
        answered = self._answered.get(caller.pid)
        return lambda size: known.was_open or answered == (number, size)

    def answered(self, inode: Inode, caller: Caller) -> None:
        """The kernel is about to get the attributes of an inode."""
        _put(self._answered, caller.pid, (inode.number, inode.size))

    def changed(self, number: int, caller: Caller) -> None:
        """The thread has changed attributes of an inode, and is about to be answered."""
        if caller.pid:  # 0: of all processes that the daemon cannot tell apart
            _put(self._changed, caller.pid, (number, self._monotonic_ns()))

    def has_mode(self, number: int, caller: Caller) -> bool:
        """False: the kernel may check the permissions of this call by a mode that another node has changed since."""
        return self._is_known(self._metadata.last_permissions_ns(number, elsewhere=True), number, caller)

    async def require_mode(self, number: int, caller: Caller) -> None:
        """Raises ESTALE if the kernel may have admitted this open by a former mode. If it returns, it has not awaited
        anything."""
        if not self.has_mode(number, caller):
            await self.refuse_former_mode(number, caller)

    async def refuse_former_mode(self, number: int, caller: Caller) -> NoReturn:
        """Have a call repeated by the present mode and owners. Raises ESTALE."""
        changed_ns = max(self._metadata.last_permissions_ns(number), self._metadata.last_owner_ns(number))
        if not self._notifier.dropped_between(number, changed_ns, self._monotonic_ns()):
            self._notifier.attributes(number)  # not more often: it would make the kernel ignore answers (hazard 98)
        told_ns = self._monotonic_ns()
        if not caller.pid:  # other callers without a number, whose calls are under way, may know the former ones
            await trio.sleep(ANSWERED_NS / NANOSECONDS)
        _put(self._told_mode_ns, caller.pid, told_ns)
        raise failed(errno.ESTALE)

    def has_owners(self, number: int, caller: Caller) -> bool:
        """False: the kernel may check the permissions of this call by a former owner or group."""
        return self._is_known(self._metadata.last_owner_ns(number), number, caller)

    def _is_known(self, last_ns: int, number: int, caller: Caller) -> bool:
        """Does the kernel check this call by what it learnt of an inode after a change at `last_ns`? 0: no change.

        Since the kernel dropped the attributes, it takes no answer to a request that began before. It goes on by older
        attributes where its request was under way when it dropped them, again or for the first time. So it must have
        dropped them after the change, and not since the thread was answered last.
        """
        changed, when_ns = self._changed.get(caller.pid, (0, 0))
        if not last_ns or (changed == number and last_ns <= when_ns):
            return True
        looked_up, when_ns = self._found.get(caller.pid, (0, 0))
        told_ns = max(self._told_ns.get(caller.pid, 0), self._told_mode_ns.get(caller.pid, 0))
        answered_ns = max(told_ns, when_ns if looked_up == number else 0)
        return self._notifier.dropped_between(number, last_ns, answered_ns)

    def is_by_present_name(self, number: int, caller: Caller, *, link: tuple[int, bytes] | None = None) -> bool:
        """False: the name by which the kernel has come to this inode may lead to another one at the source. `link`: as
        of `by_path`."""
        known_ns = self._told_ns.get(caller.pid, 0)
        relinking = self._relinking.get(caller.pid)
        if relinking is not None and link == relinking.link:
            known_ns = max(known_ns, relinking.found_ns.get(number, 0))
        return self._metadata.last_loss_ns(number) <= known_ns


def _put(kept: OrderedDict[int, T], key: int, value: T) -> None:
    """As the latest; drop the oldest if there are too many."""
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > MOST_REPEATED:
        kept.popitem(last=False)

"""The daemon's side of the fast path: grants it room in the blob, commits what it reports, and shares the state of the
index and the disk with it.
"""

import logging
import os
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import trio

from cachefs.contract.messages import PREFETCH_REQUEST, Message
from cachefs.contract.shared import ACCESS_LOGS, SHARED_VERSION
from cachefs.errors import IndexDamaged
from cachefs.fastpath.connection import parse_filled
from cachefs.fastpath.in_doubt import touched
from cachefs.fastpath.launcher import FastPath
from cachefs.fastpath.mount_descriptors import MountDescriptors
from cachefs.fastpath.processes import is_installed
from cachefs.fastpath.shared_memory import Shared
from cachefs.options import Options
from cachefs.prefetch.queue import PrefetchQueue, PrefetchRequest
from cachefs.store.index.index import Index
from cachefs.system.clock import TIME_OF_DAY
from daemon.kernel.instance import FASTPATH_SOCKET
from daemon.service import descriptor_store
from daemon.wiring import Components

log = logging.getLogger(__name__)

MAX_REQUESTS = 1024
"""How many prefetch requests may wait in the fast path."""
REQUESTS_A_MESSAGE = 256
ROOM_POLL_S = 0.005
IDLE_POLL_S = 0.05
_REQUEST = PREFETCH_REQUEST.codec()


class FastPathPrefetchQueue(PrefetchQueue):
    """Threads of the fast path fetch, and count in the shared memory what is done. They send no message."""

    def __init__(self, shared: Shared, fastpath: FastPath) -> None:
        super().__init__()
        self._shared = shared
        self._fastpath = fastpath
        self._unfinished: deque[PrefetchRequest] = deque(maxlen=MAX_REQUESTS)
        """The last requests that were sent."""
        self._done_when = shared["prefetch_done"]
        """The counter of the fast path when all are done."""
        self._limit(0)

    @property
    def done(self) -> int:
        return self.sent - (self._done_when - self._shared["prefetch_done"])

    async def until_idle(self) -> None:
        await self._until_left(0, IDLE_POLL_S)

    async def _until_left(self, most: int, poll_s: float) -> None:
        while self.sent - self.done > most:  # noqa: ASYNC110
            await trio.sleep(poll_s)

    async def send(self, requests: Sequence[PrefetchRequest]) -> None:
        for start in range(0, len(requests), REQUESTS_A_MESSAGE):
            part = requests[start : start + REQUESTS_A_MESSAGE]
            await self._until_left(MAX_REQUESTS - len(part), ROOM_POLL_S)
            self.sent += len(part)
            self._unfinished.extend(part)
            self._send(part)

    def _send(self, requests: Sequence[PrefetchRequest]) -> None:
        data = b"".join(_REQUEST.pack(request.inode, request.offset) for request in requests)
        self._done_when += len(requests)
        self._fastpath.send(Message.PREFETCH, data=data)

    def send_again(self) -> None:
        """A new fast path is attached, which has no requests."""
        lost = list(self._unfinished)
        self._done_when = self._shared["prefetch_done"]
        for start in range(0, len(lost), REQUESTS_A_MESSAGE):
            self._send(lost[start : start + REQUESTS_A_MESSAGE])

    def _limit(self, jobs: int) -> None:
        self._shared["prefetch_jobs"] = jobs


def drop_dead_readers(index: Index) -> None:
    """A reader that was killed inside a transaction would keep old pages for ever (hazard 16)."""
    index.durable.lmdb.reader_check()
    index.session.lmdb.reader_check()


class FastPathHost:
    def __init__(
        self,
        descriptors: MountDescriptors,
        runtime: Path,
        components: Components,
        nursery: trio.Nursery,
        *,
        log_path: Path | None,
        unmounted: Callable[[], None],
    ) -> None:
        index, writes = components.opened.index, components.writes
        # dependencies
        self._descriptors = descriptors
        self.shared = descriptors.shared
        self._components = components
        self._nursery = nursery
        # state
        self._room_wanted: int | None = None
        """The number of the request for room that has not been answered."""
        self._young_seen = self.shared["young_taken"]
        """The next entry of the table of young files."""
        self._young_dropped: set[int] = set()
        """Entries that are finished, behind one that is not."""
        self._first_slab = components.blob.frontier
        """Slabs before it were granted by earlier daemons."""
        self._source_has_changed = False

        def has_died() -> None:
            writes.writer_has_gone(components.blob.frontier)
            drop_dead_readers(index)

        self.fastpath = FastPath(
            descriptors,
            runtime / FASTPATH_SOCKET,
            session=index.session.place,
            durable=index.durable.place,
            log_path=log_path,
            received=self._received,
            attached=self._attached,
            died=has_died,
            unmounted=unmounted,
        )
        components.notifier.answers_delivered = self.fastpath.answers().delivered
        self.prefetch_queue = FastPathPrefetchQueue(self.shared, self.fastpath)
        writes.on_handled.add(self._handled)
        writes.on_lost_append.add(self._grant)
        writes.on_round.add(self._round_ended)
        self._seen = [0] * ACCESS_LOGS
        self.shared.accesses(self._seen)  # skip what was read before this daemon
        self._components.source.connection.volumes.tell(lambda place, number: self.shared.set_volume(*place, number))
        self.refresh()

    def configure(self, options: Options) -> None:
        """Apply the options that may change while mounted."""
        self.shared.set_timeouts(options)
        self.refresh()

    async def start(self, *, new: bool, replace: bool) -> None:
        """Return when a fast path is attached. Raises CacheFsError if that fails on a new mount.

        `replace`: replace the running fast path by the installed one. A running one whose program is not installed any
        more, after an upgrade, is always replaced.
        """
        if replace or (self.fastpath.pid and not is_installed(self.fastpath.pid)):
            await self.fastpath.replace()
        await self._nursery.start(partial(self.fastpath.run, new=new))

    def source_changed(self, root_device: int) -> None:
        """The root descriptor of the source refers to another mount now."""
        self._source_has_changed = True
        self.shared["root_device"] = root_device
        self._send_source()
        descriptor_store.put_source(self._descriptors)

    def _send_source(self) -> None:
        self.fastpath.send(Message.SOURCE, fds=(self._descriptors.source,))

    def _attached(self) -> None:
        if self._source_has_changed:  # the fast path may have been started before the change
            self._send_source()
        self.prefetch_queue.send_again()

    def collect_young(self) -> None:
        """Take up what the fast path has read of young files."""
        for number, due_ns in self.shared.young(self._young_seen):
            self._components.young.note(number, due_ns, partial(self._young_gone, self._young_seen))
            self._young_seen += 1

    def _young_gone(self, place: int) -> None:
        """The kernel has dropped those pages. The entry stays until then, so that a successor finds it."""
        self._young_dropped.add(place)
        taken = self.shared["young_taken"]
        while taken in self._young_dropped:
            self._young_dropped.discard(taken)
            taken += 1
        self.shared["young_taken"] = taken

    def collect_accesses(self) -> None:
        """Take up what the fast path has read from the cache."""
        self._components.data.accessed(self.shared.accesses(self._seen))

    async def stop(self) -> None:
        await self.fastpath.stop()
        self.fastpath.close()

    def add_to(self, status: dict[str, Any]) -> None:
        """Add the counters of the fast path to the status of the daemon."""
        shared = self.shared
        counters = shared.counters()
        for name in counters.keys() & status.keys():
            status[name] += counters[name]
        operations = Counter(status["source_ops"])
        operations.update({name: counters["source_" + name + "s"] for name in ("open", "read", "fstat")})
        status["source_ops"] = {name: count for name, count in operations.items() if count}
        status["source_stuck_calls"] += shared["stuck"]
        status["write_behind_bytes"] += shared["buffered_bytes"] + shared["pending_bytes"]
        status["fastpath"] = {
            "pid": self.fastpath.pid,
            "shared_version": SHARED_VERSION,
            "starts": self.fastpath.starts,
            "answered": counters["answered"],
            "guesses": counters["guesses"],
            "guessed": counters["guessed"],
            "passed": shared.passed(),
        }

    def _received(self, message: Message, a: int, b: int, data: bytes) -> None:
        if message is Message.SLAB:
            self._grant()
        elif message is Message.FILLED:
            filled = list(parse_filled(data))
            immutability = self._components.filesystem.immutability
            with suppress(IndexDamaged):  # it takes nothing new from now on, and requests have a new run
                immutability.fetched_unseen((unit.inode, unit.extent.version) for unit in filled)
            self._components.writes.filled(filled)
        elif message is Message.ALL_REPORTED:
            self._components.writes.writer_has_gone(self._first_slab)
        elif message is Message.CORRUPT:
            self._components.data.corrupt(a, b, int.from_bytes(data, "little"), "payload checksum")
        elif message is Message.REFUSED:
            self._components.writes.refused(OSError(a, os.strerror(a)))
            self.refresh()
        elif message is Message.ROOM:
            self._room_wanted = a
            self.collect_accesses()
            self._components.data.make_room(urgent=True)
        elif message is Message.IN_DOUBT:
            numbers, entries = touched(data)
            log.warning("a daemon died while it changed inodes %s: they are compared with the source again", numbers)
            self._nursery.start_soon(self._components.invalidation.doubt, numbers, entries)

    def _grant(self) -> None:
        self.fastpath.send(Message.SLAB, self._components.blob.grant())

    def refresh(self) -> None:
        """Share the size and the limit of the cache, and the time of day, with the fast path.

        A fast path that has lost the index (unreadable.py) has set `serving` to 0.
        """
        index = self._components.opened.index
        if not (self.shared["serving"] or index.session.overflow or index.durable.damage.is_found):
            index.durable.damage.found_by_fastpath()
        self.shared["committed_bytes"] = self._components.opened.index.totals.blob_bytes
        self.shared["capacity_bytes"] = self._components.data.admission_bytes
        self.shared["clock_offset_ns"] = TIME_OF_DAY.offset_ns

    def _round_ended(self) -> None:
        self.refresh()
        if self._room_wanted is not None and not self._components.writes.may_have_room_soon:
            self.fastpath.send(Message.ROOM, self._room_wanted)
            self._room_wanted = None

    def _handled(self, report: int) -> None:
        """Reports up to this one have been committed or refused: the fast path may forget them."""
        self.refresh()  # before the number: what was committed must be counted by then
        self.shared["resolved"] = report

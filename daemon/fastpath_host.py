"""What the daemon does for the fast path: grants it room in the blob, commits what it reports, and tells it what the
index and the disk say.
"""

import logging
import os
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import trio

from cachefs.contract.messages import PREFETCH_REQUEST, Message
from cachefs.contract.shared import ACCESS_LOGS, SHARED_VERSION
from cachefs.fastpath.connection import parse_filled
from cachefs.fastpath.in_doubt import touched
from cachefs.fastpath.launcher import FastPath
from cachefs.fastpath.mount_descriptors import MountDescriptors
from cachefs.fastpath.processes import is_installed
from cachefs.fastpath.shared_memory import Shared
from cachefs.options import Options
from cachefs.prefetch.queue import PrefetchQueue, PrefetchRequest
from cachefs.stats.latency import Histogram
from cachefs.system.clock import TIME_OF_DAY
from daemon.kernel.instance import FASTPATH_SOCKET
from daemon.service import descriptor_store
from daemon.wiring import Components

log = logging.getLogger(__name__)

FOLLOW_S = 1.0
COLLECT_S = 0.1
MAX_REQUESTS = 1024
"""So many prefetch requests may wait in the fast path."""
REQUESTS_A_MESSAGE = 256
ROOM_POLL_S = 0.005
IDLE_POLL_S = 0.05
_REQUEST = PREFETCH_REQUEST.codec()


class FastPathPrefetchQueue(PrefetchQueue):
    """Fetched by the threads of the fast path, which count what is done in the shared memory, and send no message."""

    def __init__(self, shared: Shared, fastpath: FastPath) -> None:
        super().__init__()
        self._shared = shared
        self._fastpath = fastpath
        self._unfinished: deque[PrefetchRequest] = deque(maxlen=MAX_REQUESTS)
        """The last that were sent."""
        self._done_when = shared["prefetch_done"]
        """What the fast path will have counted when all are done."""
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

    def again(self) -> None:
        """Another fast path is there, and knows of none."""
        lost = list(self._unfinished)
        self._done_when = self._shared["prefetch_done"]
        for start in range(0, len(lost), REQUESTS_A_MESSAGE):
            self._send(lost[start : start + REQUESTS_A_MESSAGE])

    def _limit(self, jobs: int) -> None:
        self._shared["prefetch_jobs"] = jobs


class FastPathHost:
    def __init__(
        self,
        held: MountDescriptors,
        runtime: Path,
        components: Components,
        nursery: trio.Nursery,
        *,
        log_path: Path | None,
        died: Callable[[], None],
        unmounted: Callable[[], None],
    ) -> None:
        opened, blob, data = components.opened, components.blob, components.data
        # dependencies
        self._held = held
        self._fetched_unseen = components.files.fetched_unseen
        self._index = opened.index
        self._blob = blob
        self._data = data
        self._invalidation = components.invalidation
        self._nursery = nursery
        self._young = components.young
        # state
        self._room_wanted: int | None = None
        """The number of the request for room that waits for an answer."""
        self._young_dropped: set[int] = set()
        """Places of entries that are done with, behind one that is not."""
        self._first_slab = blob.frontier
        """Those before it were granted by earlier daemons."""

        def has_died() -> None:
            data.writes.writer_has_gone(blob.frontier)
            died()

        self._source_is_anew = False
        self._fastpath = FastPath(
            held,
            runtime / FASTPATH_SOCKET,
            session=opened.index.session.path,
            durable=opened.index.durable.path,
            log_path=log_path,
            received=self._received,
            attached=self._attached,
            died=has_died,
            unmounted=unmounted,
        )
        self.prefetch_queue = FastPathPrefetchQueue(held.shared, self._fastpath)
        data.writes.on_handled.add(self._handled)
        data.writes.on_lost_append.add(self._grant)
        data.writes.on_round.add(self._round_ended)
        self._seen = [0] * ACCESS_LOGS
        held.shared.accesses(self._seen)  # what was read before our time
        self.refresh()

    def descriptor_for_pyfuse3(self) -> int:
        return self._fastpath.descriptor_for_pyfuse3()

    def configure(self, options: Options) -> None:
        """Tell the fast path what may change while mounted."""
        self._held.shared.set_timeouts(options)
        self.refresh()

    async def start(self, *, new: bool, replace: bool) -> None:
        """Returns when a fast path is attached. Raises CacheFsError if none can be, on a mount that is new.

        `replace`: not the one that runs, but the one that is installed.

        One that is not installed any more, after an upgrade, is replaced as well.
        """
        if replace or (self._fastpath.pid and not is_installed(self._fastpath.pid)):
            await self._fastpath.replace()
        await self._nursery.start(partial(self._fastpath.run, new=new))

    def source_changed(self, root_device: int) -> None:
        """The source's root descriptor leads to another mount now."""
        self._source_is_anew = True
        self._held.shared["root_device"] = root_device
        self._send_source()
        descriptor_store.put_source(self._held)

    def _send_source(self) -> None:
        self._fastpath.send(Message.SOURCE, fds=(self._held.source,))

    def _attached(self) -> None:
        if self._source_is_anew:  # it may have been started before that
            self._send_source()
        self.prefetch_queue.again()

    async def follow(self) -> None:
        """A task, for ever."""
        while True:
            self.refresh()
            await trio.sleep(FOLLOW_S)

    async def watch_young(self) -> None:
        """A task, for ever: hear of what the fast path reads of young files."""
        shared = self._held.shared
        seen = shared["young_taken"]
        while True:
            for number, due_ns in shared.young(seen):
                self._young.note(number, due_ns, partial(self._young_gone, seen))
                seen += 1
            await trio.sleep(COLLECT_S)

    def _young_gone(self, place: int) -> None:
        """The kernel has dropped those pages. An entry stays until then: a successor finds it."""
        self._young_dropped.add(place)
        taken = self._held.shared["young_taken"]
        while taken in self._young_dropped:
            self._young_dropped.discard(taken)
            taken += 1
        self._held.shared["young_taken"] = taken

    async def collect(self) -> None:
        """A task, for ever: hear of what the fast path reads from the cache."""
        while True:
            self._data.accessed(self._held.shared.accesses(self._seen))
            await trio.sleep(COLLECT_S)

    async def stop(self) -> None:
        await self._fastpath.stop()
        self._fastpath.close()

    def latencies(self) -> dict[str, Histogram]:
        return self._held.shared.latencies()

    def add_to(self, status: dict[str, Any]) -> None:
        """Complete the daemon's own counts with those of the fast path."""
        shared = self._held.shared
        counters = shared.counters()
        for name in counters.keys() & status.keys():
            status[name] += counters[name]
        operations = Counter(status["source_ops"])
        operations.update({name: counters["source_" + name + "s"] for name in ("open", "read", "fstat")})
        status["source_ops"] = {name: count for name, count in operations.items() if count}
        status["source_stuck_calls"] += shared["stuck"]
        status["write_behind_bytes"] += shared["buffered_bytes"] + shared["pending_bytes"]
        status["fastpath"] = {
            "pid": self._fastpath.pid,
            "shared_version": SHARED_VERSION,
            "starts": self._fastpath.starts,
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
            self._fetched_unseen((unit.inode, unit.extent.version) for unit in filled)
            self._data.writes.filled(filled)
        elif message is Message.ALL_REPORTED:
            self._data.writes.writer_has_gone(self._first_slab)
        elif message is Message.CORRUPT:
            self._data.corrupt(a, b, int.from_bytes(data, "little"), "payload checksum")
        elif message is Message.REFUSED:
            self._data.writes.refused(OSError(a, os.strerror(a)))
            self.refresh()
        elif message is Message.ROOM:
            self._room_wanted = a
            self._data.accessed(self._held.shared.accesses(self._seen))
            self._data.make_room(urgent=True)
        elif message is Message.IN_DOUBT:
            numbers, entries = touched(data)
            log.warning("a daemon died in the middle of a change to inodes %s: they are compared again", numbers)
            self._nursery.start_soon(self._invalidation.doubt, numbers, entries)

    def _grant(self) -> None:
        self._fastpath.send(Message.SLAB, self._blob.grant())

    def refresh(self) -> None:
        """Tell the fast path how much is cached, how much may be, and what time it is."""
        self._held.shared["committed_bytes"] = self._index.totals.blob_bytes
        self._held.shared["capacity_bytes"] = self._data.admission_bytes
        self._held.shared["clock_offset_ns"] = TIME_OF_DAY.offset_ns

    def _round_ended(self) -> None:
        self.refresh()
        if self._room_wanted is not None and not self._data.writes.may_have_room_soon:
            self._fastpath.send(Message.ROOM, self._room_wanted)
            self._room_wanted = None

    def _handled(self, report: int) -> None:
        self.refresh()  # before the number: records of these reports must be counted by then
        self._held.shared["resolved"] = report

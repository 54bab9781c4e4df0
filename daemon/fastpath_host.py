"""What the daemon does for the fast path: grants it room in the blob, commits what it reports, and tells it what the
index and the disk say.
"""

import logging
import os
import struct
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import trio

from cachefs.blob import Blob
from cachefs.cache_directory import OpenedIndex
from cachefs.clock import TIME_OF_DAY
from cachefs.data_cache import DataCache
from cachefs.fastpath import launcher
from cachefs.fastpath.in_doubt import touched
from cachefs.fastpath.launcher import FastPath, Inheritance, Message
from cachefs.fastpath.shared import ACCESS_LOGS, VERSION, Shared
from cachefs.filesystem import FileSystem
from cachefs.latency import Histogram
from cachefs.options import Options
from cachefs.wishes import Wish, Wishes
from cachefs.young_files import YoungFiles
from daemon import descriptor_store
from daemon.instance import FASTPATH_SOCKET, MountInstance
from daemon.predecessor import memory_name_of

log = logging.getLogger(__name__)

SERVING_THREADS = 16
"""Of the fast path: how many requests it answers at once, those that wait for the local disk included."""
FOLLOW_S = 1.0
COLLECT_S = 0.1
MAX_WISHES = 1024
"""So many may wait in the fast path."""
WISHES_A_MESSAGE = 256
WISH_POLL_S = 0.005
_WISH = struct.Struct("<2Q")


def set_up(
    device: int,
    source_fd: int,
    root_device: int,
    blob: Blob,
    opened: OpenedIndex,
    options: Options,
    instance: MountInstance,
) -> Inheritance:
    """What a new mount's fast path needs, and every successor of ours. It belongs to them from here on."""
    shared = Shared.create(memory_name_of(instance))
    shared.configure(options, seed=blob.seed, root_device=root_device, threads=SERVING_THREADS)
    follow_index(shared, opened)
    held = Inheritance(device, shared, source_fd, blob.fd, launcher.listen(instance.directory / FASTPATH_SOCKET))
    descriptor_store.put(held)
    return held


def follow_index(shared: Shared, opened: OpenedIndex) -> None:
    """Tell the fast path which records count; and, from now on, whether all of them are where it can see them."""

    def serve(overflows: bool) -> None:
        shared["serving"] = not overflows

    shared["strict_floor"] = opened.strict_floor
    shared["run"], shared["floor"] = opened.state.run, opened.state.floor
    overflow = opened.index.session.overflow
    overflow.on_change = serve
    serve(bool(overflow))


class FastWishes(Wishes):
    """Fetched by the threads of the fast path."""

    def __init__(self, shared: Shared, fastpath: FastPath) -> None:
        super().__init__()
        self._shared = shared
        self._fastpath = fastpath
        self._unfinished: deque[Wish] = deque(maxlen=MAX_WISHES)
        """The last that were sent."""
        self._done_when = shared["wishes_done"]
        """What the fast path will have counted when all are done."""
        self._limit(0)

    @property
    def done(self) -> int:
        return self.sent - (self._done_when - self._shared["wishes_done"])

    async def send(self, wishes: Sequence[Wish]) -> None:
        for start in range(0, len(wishes), WISHES_A_MESSAGE):
            part = wishes[start : start + WISHES_A_MESSAGE]
            while self.sent - self.done > MAX_WISHES - len(part):  # noqa: ASYNC110
                await trio.sleep(WISH_POLL_S)
            self.sent += len(part)
            self._unfinished.extend(part)
            self._send(part)

    def _send(self, wishes: Sequence[Wish]) -> None:
        data = b"".join(_WISH.pack(wish.inode, wish.offset) for wish in wishes)
        self._done_when += len(wishes)
        self._fastpath.send(Message.WISH, data=data)

    def again(self) -> None:
        """Another fast path is there, and knows of none."""
        lost = list(self._unfinished)
        self._done_when = self._shared["wishes_done"]
        for start in range(0, len(lost), WISHES_A_MESSAGE):
            self._send(lost[start : start + WISHES_A_MESSAGE])

    def _limit(self, jobs: int) -> None:
        self._shared["wish_jobs"] = jobs


class FastPathHost:
    def __init__(
        self,
        held: Inheritance,
        runtime: Path,
        opened: OpenedIndex,
        blob: Blob,
        data: DataCache,
        filesystem: FileSystem,
        nursery: trio.Nursery,
        *,
        log_path: Path | None,
        young: YoungFiles,
        fetched_unseen: Callable[[Iterable[tuple[int, int]]], None],
        died: Callable[[], None],
        unmounted: Callable[[], None],
    ) -> None:
        """`fetched_unseen`: told of files, (inode, version), of which the fast path reports data."""
        # dependencies
        self._held = held
        self._fetched_unseen = fetched_unseen
        self._index = opened.index
        self._blob = blob
        self._data = data
        self._filesystem = filesystem
        self._nursery = nursery
        self._young = young
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
            session=opened.session_path,
            durable=opened.durable_path,
            log_path=log_path,
            received=self._received,
            attached=self._attached,
            died=has_died,
            unmounted=unmounted,
        )
        self.wishes = FastWishes(held.shared, self._fastpath)
        data.writes.settled, data.writes.undone, data.writes.committed = self._settled, self._grant, self._committed
        data.held_bytes = lambda: held.shared["held_bytes"]
        self._seen = [0] * ACCESS_LOGS
        held.shared.accesses(self._seen)  # what was read before our time
        self.refresh()

    def descriptor_for_pyfuse3(self) -> int:
        return self._fastpath.descriptor_for_pyfuse3()

    async def start(self, *, new: bool, replace: bool) -> None:
        """Returns when a fast path is attached. Raises CacheFsError if none can be, on a mount that is new.

        `replace`: not the one that runs, but the one that is installed.

        One that is not installed any more, after an upgrade, is replaced as well.
        """
        if replace or (self._fastpath.pid and not launcher.is_installed(self._fastpath.pid)):
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
        self.wishes.again()

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

    def close(self) -> None:
        self._fastpath.close()

    def latencies(self) -> dict[str, Histogram]:
        return self._held.shared.latencies()

    def add_to(self, status: dict[str, Any]) -> None:
        """Complete the daemon's own counts with those of the fast path."""
        shared = self._held.shared
        counters = asdict(shared.counters())
        for name in counters.keys() & status.keys():
            status[name] += counters[name]
        operations = Counter(status["source_ops"])
        operations.update({name: counters["source_" + name + "s"] for name in ("open", "read", "fstat")})
        status["source_ops"] = {name: count for name, count in operations.items() if count}
        status["source_stuck_calls"] += shared["stuck"]
        status["write_behind_bytes"] += shared["held_bytes"] + shared["pending_bytes"]
        status["fastpath"] = {
            "pid": self._fastpath.pid,
            "shared_version": VERSION,
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
            filled = list(launcher.parse_filled(data))
            self._fetched_unseen((unit.inode, unit.extent.version) for unit in filled)
            self._data.writes.filled(filled)
        elif message is Message.TOLD:
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
            self._nursery.start_soon(self._filesystem.doubt, numbers, entries)

    def _grant(self) -> None:
        self._fastpath.send(Message.SLAB, self._blob.grant())

    def refresh(self) -> None:
        """Tell the fast path how much is cached, how much may be, and what time it is."""
        self._held.shared["committed_bytes"] = self._index.totals.blob_bytes
        self._held.shared["capacity_bytes"] = self._data.admission_bytes
        self._held.shared["clock_offset_ns"] = TIME_OF_DAY.offset_ns

    def _committed(self) -> None:
        self.refresh()
        if self._room_wanted is not None and not self._data.writes.may_have_room_soon:
            self._fastpath.send(Message.ROOM, self._room_wanted)
            self._room_wanted = None

    def _settled(self, report: int) -> None:
        self.refresh()  # before the number: what is settled must be counted by then
        self._held.shared["settled"] = report

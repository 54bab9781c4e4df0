"""Warm-up: pin and fetch the files beneath some paths; or only report how much of them is cached.

Each warm-up has three tasks. One finds files (scan.py). One sends prefetch requests for what is not cached, as far as
there is room. One checks in the index, some time after the requests are done, that the files are really cached. Cached
data are never fetched again, so that an interrupted warm-up continues where it stopped.
"""

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import partial

import trio

from cachefs.client.client import Progress, Report
from cachefs.options import CacheLevel
from cachefs.prefetch.engine import CHUNK_UNITS, PrefetchEngine, record_bytes
from cachefs.prefetch.queue import PrefetchRequest
from cachefs.prefetch.scan import CHUNK_NAMES, MAX_PROBLEMS, Scan, Tally
from cachefs.store.blob import record
from cachefs.store.index.records import STALE

ROUNDS = 3
"""How many times a file is requested that is not cached when it should be."""
CONFIRM_S = 0.25
CONFIRM_LATER = 6
"""A file should be in the index CONFIRM_LATER * CONFIRM_S after its requests are done."""
PATIENCE_S = 5.0
"""How long to wait while requests are under way without any progress."""
FLUSH_TIMEOUT_S = 30.0
EVICTING_TIMEOUT_S = 5.0


class WarmUp:
    def __init__(
        self,
        engine: PrefetchEngine,
        *,
        jobs: int = 0,
        metadata_only: bool = False,
        fetches: bool = True,
        pins_written: bool = False,
        mountpoint: bytes = b"",
    ) -> None:
        """`jobs`: how many units are fetched at once; 0: adaptive limit. `fetches`: False: only report.

        `pins_written`: also pin files that stay mutable because they were written through this mount.
        `mountpoint`: for the paths of problems.
        """
        # dependencies
        self._fs = engine.filesystem
        self._engine = engine
        self._data = engine.data
        self._queue = engine.queue
        # constants
        self._jobs = jobs
        self._wants_data = self._fs.options.cache is CacheLevel.FULL and not metadata_only
        self._fetches = fetches
        # state
        self._scan = Scan(engine, wants_data=self._wants_data, fetches=fetches, pins_written=pins_written)
        self._scan.problems.mountpoint = mountpoint
        self._found, self._cached, self._problems = self._scan.found, self._scan.cached, self._scan.problems
        self._fetched = Tally()
        self._expected: deque[tuple[int, int]] = deque()
        """Requested files: (number of requests that must be done before it is cached, inode number)."""
        self._all_requested = trio.Event()
        self._late = array("Q")
        """Files that are not in the index when they should be."""
        self._claimed_bytes = 0
        """Of the records of all files that are cached or requested."""
        self._refused = array("Q")
        """Files that do not fit."""

    def progress(self) -> Progress:
        files, size = self._cached.files + self._fetched.files, self._cached.bytes + self._fetched.bytes
        return Progress(self._found.files, self._found.bytes, files, size, self._scan.is_done)

    async def run(self, paths: Sequence[bytes]) -> Report:
        """`paths`: files or directories, relative to the mountpoint. Called once."""
        with self._queue.at_once(self._jobs) if self._fetches else nullcontext():
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._scan.run, paths)
                    nursery.start_soon(self._request_all)
                    nursery.start_soon(self._confirm)
            finally:
                self._scan.release()
            await self._chase()
        if self._fetches:
            await self._data.writes.flush_queued(FLUSH_TIMEOUT_S)
        cached = await self._finally_cached()
        return Report(
            files=self._found.files,
            bytes=self._found.bytes,
            cached_files=cached.files,
            cached_bytes=cached.bytes,
            fetched_files=self._fetched.files,
            fetched_bytes=self._fetched.bytes,
            mutable_files=self._scan.mutable,
            errors=self._problems.errors,
            problems=tuple(self._problems.lines),
        )

    # --- requesting files ------------------------------------------------------------------------------------------

    async def _request_all(self) -> None:
        at = 0
        while part := await self._scan.files_from(at):
            at += len(part)
            missing_of: list[tuple[int, list[PrefetchRequest] | None]] = []
            for inode, missing in await self._engine.lacking(await self._scan.old_enough(part)):
                if missing or missing is None:
                    missing_of.append((inode.number, missing))
                else:
                    self._cached.add(inode.size)
                    self._claimed_bytes += record.record_bytes(inode.size)
            if self._fetches:
                numbers = await self._send(missing_of)
                self._expected.extend((self._queue.sent, number) for number in numbers)
            else:
                self._late.extend(number for number, _ in missing_of)
        self._all_requested.set()

    async def _send(
        self, missing_of: Iterable[tuple[int, list[PrefetchRequest] | None]], *, again: bool = False
    ) -> list[int]:
        """Request the missing units of the files that fit, and return the numbers of these files.

        `again`: their size is in `_claimed_bytes` already.
        """
        sent: list[int] = []
        batch: list[PrefetchRequest] = []
        size = 0
        for number, missing in missing_of:
            needed = record_bytes(missing or ())
            lasts = again or self._claimed_bytes + needed <= self._data.lasting_bytes
            if missing is None or not lasts or not await self._engine.has_room(needed + size, evicts=True):
                if not again:
                    self._refused.append(number)
                continue
            if not again:
                self._claimed_bytes += needed
            sent.append(number)
            for request in missing:
                size += record.record_bytes(request.length)
                self._data.expected(request.inode, request.offset)
                batch.append(request)
                if len(batch) == CHUNK_UNITS:
                    await self._queue.send(batch)
                    batch, size = [], 0
        await self._queue.send(batch)
        return sent

    # --- checking that they are cached -----------------------------------------------------------------------------

    async def _confirm(self) -> None:
        """Check files whose requests were done a while ago, as long as more are being requested."""
        marks: deque[int] = deque(maxlen=CONFIRM_LATER)
        while not self._all_requested.is_set():
            with trio.move_on_after(CONFIRM_S):
                await self._all_requested.wait()
            marks.append(self._queue.done)
            due = []
            while self._expected and len(marks) == CONFIRM_LATER and self._expected[0][0] <= marks[0]:
                due.append(self._expected.popleft()[1])
            self._late.extend(await self._sort_out(due))
        self._late.extend(number for _, number in self._expected)

    async def _sort_out(self, numbers: Sequence[int]) -> "array[int]":
        """Count the files that are cached, and return the others."""
        late = array("Q")
        for start in range(0, len(numbers), CHUNK_NAMES):
            for inode, missing in await self._engine.lacking(numbers[start : start + CHUNK_NAMES]):
                if missing or missing is None:
                    late.append(inode.number)
                else:
                    self._fetched.add(inode.size)
        return late

    async def _chase(self) -> None:
        """Wait for late files, request them again, and report those that are still missing."""
        for again in range(ROUNDS if self._fetches else 0):
            if not self._late:
                break
            if again:
                self._late = array("Q", await self._scan.old_enough(self._late))
                await self._send(
                    ((inode.number, missing) for inode, missing in await self._engine.lacking(self._late)), again=True
                )
            await self._await_late()
        known = self._cached.files + self._fetched.files + self._scan.unpinned + len(self._late) + len(self._refused)
        gone = self._found.files - known
        for numbers, is_refused in ((self._late, False), (self._refused, True)):
            for number in numbers[:MAX_PROBLEMS]:
                try:
                    path = self._fs.path_of(number)
                except OSError:
                    gone += 1
                    continue
                reason = "no room in the cache (--cache-size)" if is_refused else await self._reason(number)
                self._problems.add(path, reason)
        if gone and self._fetches:
            self._problems.add_last(f"{gone:,} files were removed or replaced while they were fetched")

    async def _finally_cached(self) -> Tally:
        """The files that are cached at the end; others may have been evicted again for later files."""
        before = Tally(self._cached.files + self._fetched.files, self._cached.bytes + self._fetched.bytes)
        options = self._fs.options
        if not self._fetches or not (options.evicts or options.metadata_limit is not None):
            return before
        with trio.move_on_after(EVICTING_TIMEOUT_S):
            while self._data.writes.is_evicting or self._fs.metadata.is_beyond_limit:
                await self._engine.progress()
        cached = Tally()
        for numbers in (self._scan.data_files, self._scan.metadata_files):
            for start in range(0, len(numbers), CHUNK_NAMES):
                for inode, missing in await self._engine.lacking(numbers[start : start + CHUNK_NAMES]):
                    if self._fs.metadata.is_pinned(inode) and not (self._wants_data and missing != []):
                        cached.add(inode.size)
        lost = before.files - cached.files
        if lost > 0:
            self._problems.add_last(f"{lost:,} files were evicted for others: raise --cache-size or --metadata-limit")
        return cached

    async def _await_late(self) -> None:
        """Returns when nothing is under way any more, or nothing has changed for PATIENCE_S."""
        last, quiet_since, before = self._queue.sent, trio.current_time(), (-1, -1)
        while self._late:
            is_idle = self._queue.done >= last and not self._data.is_under_way
            self._late = await self._sort_out(self._late)
            now = len(self._late), self._queue.done
            if now != before:
                before, quiet_since = now, trio.current_time()
            if is_idle or trio.current_time() - quiet_since > PATIENCE_S:
                return
            await self._engine.progress()

    async def _reason(self, number: int) -> str:
        if not self._fetches:
            return "not cached"
        try:
            await self._fs.call_pool.run(partial(self._fs.source.read_file, self._fs.object_of(number), 1, 0))
        except OSError as error:
            return error.strerror or str(error)
        inode = self._fs.metadata.current(number)
        if inode is None or inode.is_young or inode.flags & STALE:
            return "it changes again and again, or changed a moment ago"
        return "could not be cached"

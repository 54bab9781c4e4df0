"""Warm-up: what somebody asks for is looked at, pinned and fetched; or only looked at, to say how much of it is cached.

Three tasks for each: one finds files, one wishes for what is not cached of them, as far as there is room, and one looks
into the index some time after they were fetched: what is not there in the end is missing, whatever was said meanwhile.
What has been cached is never fetched again, so that a warm-up that was interrupted goes on where it was.
"""

import errno
import itertools
import os
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial

import trio

from cachefs import age, record
from cachefs.attributes import NANOSECONDS, Inode
from cachefs.client import Progress, Report
from cachefs.data_cache import DataCache
from cachefs.directories import Directories
from cachefs.filesystem import FileSystem
from cachefs.open_files import OpenFiles
from cachefs.options import CacheLevel
from cachefs.wishes import Wish, Wishes, lacking
from policies.prefetch.sequential import CHUNK_BYTES

WALKERS = 8
"""Directories that are listed at once."""
ATTEMPTS = 10
"""How often in a row a directory is looked at in which no file can be."""
CHUNK_NAMES = 32
"""How many files are looked at without letting other tasks run."""
CHUNK_UNITS = 256
ROUNDS = 3
"""How often a file is wished for that is not cached when it should be."""
POLL_S = 0.05
CONFIRM_S = 0.25
CONFIRM_LATER = 6
"""What was fetched so many times CONFIRM_S ago should be in the index."""
PATIENCE_S = 5.0
"""Something is said to be under way and nothing arrives: so long."""
MAX_PROBLEMS = 20
FLUSH_TIMEOUT_S = 30.0
EVICTING_TIMEOUT_S = 5.0


@dataclass(slots=True)
class _Tally:
    files: int = 0
    bytes: int = 0

    def add(self, size: int) -> None:
        self.files += 1
        self.bytes += size


class WarmUp:
    def __init__(
        self,
        filesystem: FileSystem,
        directories: Directories,
        files: OpenFiles,
        data: DataCache,
        wishes: Wishes,
        *,
        jobs: int = 0,
        metadata_only: bool = False,
        fetches: bool = True,
        pins_written: bool = False,
    ) -> None:
        """`jobs`: how many units are fetched at once; 0: as many as readers do not mind. `fetches`: else only look.

        `pins_written`: files too that stay mutable because they were written through this mount.
        """
        # dependencies
        self._fs = filesystem
        self._directories = directories
        self._files = files
        self._data = data
        self._wishes = wishes
        # constants
        self._jobs = jobs
        self._wants_data = filesystem.options.cache is CacheLevel.FULL and not metadata_only
        self._fetches = fetches
        self._pin = files.pin if pins_written else files.opened_unseen
        # state
        self._files_of_interest = array("Q")
        self._linked: set[int] = set()
        """Of those: the ones with several names, which are met several times."""
        self._waiting: list[int] = []
        """Directories that are yet to be listed."""
        self._kept: list[int] = []
        """Directories whose records must not go before this has ended, and those above them."""
        self._walking = 0
        self._wake = trio.Event()
        self._scanned = False
        self._expected: deque[tuple[int, int]] = deque()
        """Files that were wished for: (so many wishes are done when it is there, its number)."""
        self._all_wished = False
        self._late = array("Q")
        """Files that are not in the index when they should be."""
        self._claimed_bytes = 0
        """Records of all that is to be cached in the end."""
        self._refused = array("Q")
        """Files that there is no room for."""
        self._metadata_of_interest = array("Q")
        """Files whose metadata alone are to be cached."""
        self._found, self._held, self._fetched = _Tally(), _Tally(), _Tally()
        self._mutable = self._errors = self._unpinned_files = 0
        self._problems: list[str] = []

    def progress(self) -> Progress:
        files, size = self._held.files + self._fetched.files, self._held.bytes + self._fetched.bytes
        return Progress(self._found.files, self._found.bytes, files, size, self._scanned)

    async def run(self, paths: Sequence[bytes]) -> Report:
        """Relative to the mountpoint, files or directories. Once."""
        with self._wishes.at_once(self._jobs) if self._fetches else nullcontext():
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._scan, paths)
                    nursery.start_soon(self._wish_for_all)
                    nursery.start_soon(self._confirm)
            finally:
                self._fs.metadata.release(self._kept)
            await self._chase()
        if self._fetches:
            await self._data.writes.settle(FLUSH_TIMEOUT_S)
        cached = await self._in_the_end()
        return Report(
            files=self._found.files,
            bytes=self._found.bytes,
            cached_files=cached.files,
            cached_bytes=cached.bytes,
            fetched_files=self._fetched.files,
            fetched_bytes=self._fetched.bytes,
            mutable_files=self._mutable,
            errors=self._errors,
            problems=tuple(self._problems),
        )

    def _problem(self, path: bytes, reason: str) -> None:
        if len(self._problems) < MAX_PROBLEMS:
            self._problems.append(f"{path.decode(errors='surrogateescape') or '/'}: {reason}")

    def _failed(self, path: bytes, error: OSError) -> None:
        self._errors += 1
        self._problem(path, error.strerror or str(error))

    # --- finding files ---------------------------------------------------------------------------------------------

    async def _scan(self, paths: Sequence[bytes]) -> None:
        for start in range(0, len(paths), CHUNK_NAMES):
            async with trio.open_nursery() as nursery:
                for path in paths[start : start + CHUNK_NAMES]:
                    nursery.start_soon(self._look_up, path)
            await self._walk()
        self._scanned = True

    async def _look_up(self, path: bytes) -> None:
        try:
            for _ in range(ATTEMPTS):
                if not await self._take([(await self._fs.resolve(path)).number]):
                    return
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        except OSError as error:
            self._failed(path, error)

    async def _walk(self) -> None:
        async with trio.open_nursery() as nursery:
            while self._waiting or self._walking:
                while self._waiting and self._walking < WALKERS:
                    self._walking += 1
                    nursery.start_soon(self._list, self._waiting.pop())
                self._wake = trio.Event()
                await self._wake.wait()

    async def _list(self, number: int) -> None:
        try:
            await self._take_all(number)
            for name, error in self._directories.without_attributes(number).items():
                with suppress(OSError):  # the directory has gone
                    self._failed(self._fs.path_of(number) + b"/" + name, error)
        except OSError as error:
            with suppress(OSError):  # the directory has gone
                self._failed(self._fs.path_of(number), error)
        finally:
            self._walking -= 1
            self._wake.set()

    async def _take_all(self, number: int) -> None:
        """What is in a directory. The kernel may forget files of a read-write mount before they are pinned, and their
        records go. Another listing tells them from those that were removed."""
        taken: set[int] = set()
        fruitless = 0
        found = await self._directories.believed_entries(number)
        while (missing := await self._take(found)) and fruitless < ATTEMPTS:
            before = len(taken)
            taken.update(found)
            taken -= missing
            fruitless = fruitless + 1 if len(taken) == before else 0
            found = [inode for inode in await self._directories.believed_entries(number) if inode not in taken]
        if missing:
            self._errors += 1
            self._problem(self._fs.path_of(number), "files in it go faster than they can be looked at")

    async def _take(self, numbers: Sequence[int]) -> set[int]:
        """Files are pinned and noted, directories are noted, symlinks are read. Returns those without a record."""
        missing: set[int] = set()
        for start in range(0, len(numbers), CHUNK_NAMES):
            with self._fs.metadata.index.view() as view:
                found = [self._fs.metadata.inode(view, number) for number in numbers[start : start + CHUNK_NAMES]]
                for inode in found:
                    if inode is not None and inode.is_directory:
                        self._kept += self._fs.metadata.hold(view, inode.number)
            for number, inode in zip(numbers[start : start + CHUNK_NAMES], found, strict=True):
                if inode is None:
                    missing.add(number)
                    continue
                if inode.is_directory:
                    self._waiting.append(number)
                    continue
                try:
                    if inode.is_regular:
                        await self._note(inode)
                    elif inode.is_symlink and self._fetches:
                        await self._fs.readlink(number)
                except OSError as error:
                    self._linked.discard(number)
                    try:
                        path = self._fs.path_of(number)
                    except OSError:
                        missing.add(number)
                    else:
                        self._failed(path, error)
            await trio.lowlevel.checkpoint()
        return missing

    async def _note(self, inode: Inode) -> None:
        if inode.nlink > 1:
            if inode.number in self._linked:
                return
            self._linked.add(inode.number)
        pinned = await self._pin(inode.number) if self._fetches else self._fs.metadata.is_pinned(inode)
        if not pinned and self._files.is_mutable(self._fs.record(inode.number)):
            self._mutable += 1
            return
        self._found.add(inode.size)
        if not pinned:
            self._unpinned(inode.number)
        elif self._wants_data:
            self._files_of_interest.append(inode.number)
        else:
            self._held.add(inode.size)
            self._metadata_of_interest.append(inode.number)

    def _unpinned(self, number: int) -> None:
        """It may not be cached either."""
        self._unpinned_files += 1
        with suppress(OSError):  # it has gone
            reason = "not pinned: beyond --metadata-limit, or the index cannot be written"
            self._problem(self._fs.path_of(number), reason if self._fetches else "not cached")

    # --- fetching them ---------------------------------------------------------------------------------------------

    async def _wish_for_all(self) -> None:
        at = 0
        while at < len(self._files_of_interest) or not self._scanned:
            if at == len(self._files_of_interest):
                await trio.sleep(POLL_S)
                continue
            part = await self._old_enough(self._files_of_interest[at : at + CHUNK_NAMES])
            at += len(part)
            missing_of: list[tuple[int, list[Wish]]] = []
            for inode, missing in await self._look(part):
                if missing:
                    missing_of.append((inode.number, missing))
                else:
                    self._held.add(inode.size)
                    self._claimed_bytes += record.record_bytes(inode.size)
            if self._fetches:
                numbers = await self._send(missing_of)
                self._expected.extend((self._wishes.sent, number) for number in numbers)
            else:
                self._late.extend(number for number, _ in missing_of)
        self._all_wished = True

    async def _old_enough(self, numbers: Sequence[int]) -> Sequence[int]:
        """These files when their data may be cached. What has changed meanwhile is pinned as it is now."""
        if not self._fetches:
            return numbers
        found = await self._fs.come_of_age(numbers)
        for before, now in zip(numbers, found, strict=True):
            if now != before:
                with suppress(OSError):  # it has gone
                    await self._pin(now)
        return found

    async def _look(self, numbers: Sequence[int]) -> list[tuple[Inode, list[Wish]]]:
        """What is not cached of each of these files; those that have gone are left out."""
        found = []
        large = []
        with self._fs.metadata.index.view() as view:
            for inode in filter(None, (self._fs.metadata.inode(view, number) for number in numbers)):
                if inode.size > CHUNK_UNITS * CHUNK_BYTES:
                    large.append(inode)
                else:
                    found.append((inode, lacking(self._data, view, inode)))
        for inode in large:
            units = self._data.units(inode)
            wishes: list[Wish] = []
            while part := list(itertools.islice(units, CHUNK_UNITS)):
                with self._fs.metadata.index.view() as view:
                    wishes += lacking(self._data, view, inode, part)
                await trio.lowlevel.checkpoint()
            found.append((inode, wishes))
        await trio.lowlevel.checkpoint()
        return found

    async def _send(self, missing_of: Iterable[tuple[int, list[Wish]]], *, again: bool = False) -> list[int]:
        """Wish for what is missing of these files, where there is room for it: their numbers.

        `again`: their room has been claimed.
        """
        sent: list[int] = []
        batch: list[Wish] = []
        size = 0
        for number, missing in missing_of:
            needed = sum(record.record_bytes(wish.length) for wish in missing)
            if not await self._has_room(needed, size, again=again):
                if not again:
                    self._refused.append(number)
                continue
            if not again:
                self._claimed_bytes += needed
            sent.append(number)
            for wish in missing:
                size += record.record_bytes(wish.length)
                self._data.expected(wish.inode, wish.offset)
                batch.append(wish)
                if len(batch) == CHUNK_UNITS:
                    await self._wishes.send(batch)
                    batch, size = [], 0
        await self._wishes.send(batch)
        return sent

    async def _has_room(self, needed: int, unsent: int, *, again: bool) -> bool:
        """For a file, besides `unsent` bytes of others. False: it does not fit, or nothing may go for it."""
        if not again and self._claimed_bytes + needed > self._data.lasting_bytes:
            return False
        while True:
            self._data.make_room(needed + unsent)
            if self._data.used_bytes + needed + unsent <= self._data.capacity_bytes:
                return True
            if not self._data.is_under_way:
                return False
            await trio.sleep(POLL_S)

    # --- what has come of it ---------------------------------------------------------------------------------------

    async def _confirm(self) -> None:
        """Look at what was fetched a while ago, as long as more is being fetched."""
        marks: deque[int] = deque(maxlen=CONFIRM_LATER)
        while not self._all_wished:
            await trio.sleep(CONFIRM_S)
            marks.append(self._wishes.done)
            due = []
            while self._expected and len(marks) == CONFIRM_LATER and self._expected[0][0] <= marks[0]:
                due.append(self._expected.popleft()[1])
            self._late.extend(await self._sort_out(due))
        self._late.extend(number for _, number in self._expected)

    async def _sort_out(self, numbers: Sequence[int]) -> "array[int]":
        """Count those that are cached. The others."""
        late = array("Q")
        for start in range(0, len(numbers), CHUNK_NAMES):
            for inode, missing in await self._look(numbers[start : start + CHUNK_NAMES]):
                if missing:
                    late.append(inode.number)
                else:
                    self._fetched.add(inode.size)
        return late

    async def _chase(self) -> None:
        """Wait for what is late, wish for it again, and say what is missing in the end."""
        for again in range(ROUNDS if self._fetches else 0):
            if not self._late:
                break
            if again:
                self._late = array("Q", await self._old_enough(self._late))
                await self._send(
                    ((inode.number, missing) for inode, missing in await self._look(self._late)), again=True
                )
            await self._await_late()
        known = self._held.files + self._fetched.files + self._unpinned_files + len(self._late) + len(self._refused)
        gone = self._found.files - known
        for numbers, is_refused in ((self._late, False), (self._refused, True)):
            for number in numbers[:MAX_PROBLEMS]:
                try:
                    path = self._fs.path_of(number)
                except OSError:
                    gone += 1
                    continue
                self._problem(path, "no room in the cache (--cache-size)" if is_refused else await self._reason(number))
        if gone and self._fetches:
            self._problems[MAX_PROBLEMS - 1 :] = []
            self._problems.append(f"{gone:,} files were removed or replaced while they were fetched")

    async def _in_the_end(self) -> _Tally:
        """What is cached. Where something has to go for what comes, what was cached may have gone again."""
        before = _Tally(self._held.files + self._fetched.files, self._held.bytes + self._fetched.bytes)
        options = self._fs.options
        if not self._fetches or not (options.evicts or options.metadata_limit is not None):
            return before
        with trio.move_on_after(EVICTING_TIMEOUT_S):
            while self._data.writes.is_evicting or self._fs.metadata.is_beyond_limit:  # noqa: ASYNC110
                await trio.sleep(POLL_S)
        cached = _Tally()
        for numbers in (self._files_of_interest, self._metadata_of_interest):
            for start in range(0, len(numbers), CHUNK_NAMES):
                for inode, missing in await self._look(numbers[start : start + CHUNK_NAMES]):
                    if self._fs.metadata.is_pinned(inode) and not (self._wants_data and missing):
                        cached.add(inode.size)
        lost = before.files - cached.files
        if lost > 0:
            self._problems[MAX_PROBLEMS - 1 :] = []
            self._problems.append(f"{lost:,} files had to go again for others (--cache-size, --metadata-limit)")
        return cached

    async def _await_late(self) -> None:
        """Returns when nothing is under way any more."""
        last, quiet_since, before = self._wishes.sent, trio.current_time(), (-1, -1)
        while self._late:
            settled = self._wishes.done >= last and not self._data.is_under_way
            self._late = await self._sort_out(self._late)
            now = len(self._late), self._wishes.done
            if now != before:
                before, quiet_since = now, trio.current_time()
            if settled or trio.current_time() - quiet_since > PATIENCE_S:
                return
            await trio.sleep(POLL_S)

    async def _reason(self, number: int) -> str:
        if not self._fetches:
            return "not cached"
        try:
            await self._fs.slots.run(partial(self._fs.source.read_file, self._fs.object_of(number), 1, 0))
        except OSError as error:
            return error.strerror or str(error)
        with suppress(OSError):
            settle_ns = self._fs.options.settle_ns
            if age.is_young(self._fs.record(number), self._fs.source.clock.realtime_ns(), settle_ns):
                return f"changed less than {settle_ns / NANOSECONDS:g} s ago, or has a time in the future"
        return "could not be cached"

"""Warm-up: what somebody asks for is looked at, pinned and fetched; or only looked at, to say how much of it is cached.

Three tasks for each: one finds files, one wishes for what is not cached of them, as far as there is room, and one looks
into the index some time after they were fetched: what is not there in the end is missing, whatever was said meanwhile.
What has been cached is never fetched again, so that a warm-up that was interrupted goes on where it was.
"""

import itertools
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial

import trio

from cachefs import record
from cachefs.attributes import Inode
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
        self._full = False
        self._found, self._held, self._fetched = _Tally(), _Tally(), _Tally()
        self._mutable = self._errors = 0
        self._problems: list[str] = []

    def progress(self) -> Progress:
        files, size = self._held.files + self._fetched.files, self._held.bytes + self._fetched.bytes
        return Progress(self._found.files, self._found.bytes, files, size, self._scanned)

    async def run(self, paths: Sequence[bytes]) -> Report:
        """Relative to the mountpoint, files or directories. Once."""
        with self._wishes.at_once(self._jobs) if self._fetches else nullcontext():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._scan, paths)
                nursery.start_soon(self._wish_for_all)
                nursery.start_soon(self._confirm)
            await self._chase()
        if self._fetches:
            await self._data.writes.settle(FLUSH_TIMEOUT_S)
        return Report(
            files=self._found.files,
            bytes=self._found.bytes,
            cached_files=self._held.files + self._fetched.files,
            cached_bytes=self._held.bytes + self._fetched.bytes,
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
            await self._take([(await self._fs.resolve(path)).number])
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
            await self._take(await self._directories.believed_entries(number))
        except OSError as error:
            with suppress(OSError):  # the directory has gone
                self._failed(self._fs.path_of(number), error)
        finally:
            self._walking -= 1
            self._wake.set()

    async def _take(self, numbers: Sequence[int]) -> None:
        """Files are pinned and noted, directories are noted, symlinks are read."""
        for start in range(0, len(numbers), CHUNK_NAMES):
            with self._fs.metadata.index.view() as view:
                found = [self._fs.metadata.inode(view, number) for number in numbers[start : start + CHUNK_NAMES]]
            for inode in found:
                if inode is None:  # it has gone
                    continue
                if inode.is_directory:
                    self._waiting.append(inode.number)
                elif inode.is_regular:
                    await self._note(inode)
                elif inode.is_symlink and self._fetches:
                    await self._read_link(inode.number)
            await trio.lowlevel.checkpoint()

    async def _read_link(self, number: int) -> None:
        try:
            await self._fs.readlink(number)
        except OSError as error:
            with suppress(OSError):  # it has gone
                self._failed(self._fs.path_of(number), error)

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

    def _unpinned(self, number: int) -> None:
        """It may not be cached either."""
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
            part = self._files_of_interest[at : at + CHUNK_NAMES]
            at += len(part)
            wishes: list[Wish] = []
            numbers = []
            for inode, missing in await self._look(part):
                if missing:
                    numbers.append(inode.number)
                    wishes += missing
                else:
                    self._held.add(inode.size)
                    self._claimed_bytes += record.record_bytes(inode.size)
            if self._fetches:
                await self._send(wishes)
                self._expected.extend((self._wishes.sent, number) for number in numbers)
            else:
                self._late.extend(numbers)
        self._all_wished = True

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

    async def _send(self, wishes: Iterable[Wish]) -> None:
        """Wish for these, or for as many as there is room for."""
        batch: list[Wish] = []
        size = 0
        for wish in wishes:
            size += record.record_bytes(wish.length)
            if not await self._has_room(size):
                break
            self._data.expected(wish.inode, wish.offset)
            batch.append(wish)
            if len(batch) == CHUNK_UNITS:
                await self._claim(batch, size)
                batch, size = [], 0
        await self._claim(batch, size)

    async def _claim(self, batch: list[Wish], size: int) -> None:
        self._claimed_bytes += size
        await self._wishes.send(batch)

    async def _has_room(self, needed: int) -> bool:
        """False, from now on: what is to be cached does not fit, or nothing may go for it."""
        self._full = self._full or self._claimed_bytes + needed > self._data.capacity_bytes
        while not self._full:
            self._data.make_room(needed)
            if self._data.used_bytes + needed <= self._data.capacity_bytes:
                return True
            self._full = not self._data.is_under_way
            await trio.sleep(POLL_S)
        return False

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
            if not self._late or self._full:
                break
            if again:
                for _, missing in await self._look(self._late):
                    await self._send(missing)
            await self._await_late()
        for number in self._late[:MAX_PROBLEMS]:
            try:
                path = self._fs.path_of(number)
            except OSError:
                continue  # it has gone
            self._problem(path, await self._reason(number))

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
        if self._full:
            return "no room in the cache (--cache-size)"
        try:
            await self._fs.slots.run(partial(self._fs.source.read_file, self._fs.object_of(number), 1, 0))
        except OSError as error:
            return error.strerror or str(error)
        return "could not be cached"

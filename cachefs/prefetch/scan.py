"""The first part of a warm-up: find the files beneath some paths, pin them, and decide which data must be fetched.

Eight directories are listed at once. `data_files` grows while the scan goes on; `files_from` waits for the next files.
"""

import errno
import os
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import trio

from cachefs.errors import failed
from cachefs.prefetch.engine import PrefetchEngine, walk
from cachefs.store.index.records import Inode

WALKERS = 8
"""Directories that are listed at once."""
ATTEMPTS = 10
"""How many times in a row a directory is listed again without finding a new file."""
CHUNK_NAMES = 32
"""How many files are looked at without letting other tasks run."""
MAX_PROBLEMS = 20


@dataclass(slots=True)
class Tally:
    files: int = 0
    bytes: int = 0

    def add(self, size: int) -> None:
        self.files += 1
        self.bytes += size


class Problems:
    """One line for each file that is missing, with the reason; only the first few."""

    def __init__(self) -> None:
        self.mountpoint = b""
        self.lines: list[str] = []
        self.errors = 0
        """The number of names and directories that could not be read."""

    def add(self, path: bytes, reason: str) -> None:
        if len(self.lines) < MAX_PROBLEMS:
            whole = os.fsdecode(b"/".join(filter(None, (self.mountpoint, path)))) or "/"
            self.lines.append(f"{whole}: {reason}")

    def failed(self, path: bytes, error: OSError) -> None:
        self.errors += 1
        self.add(path, error.strerror or str(error))

    def add_last(self, line: str) -> None:
        """A line about many files together; replaces the last line if there are too many."""
        self.lines[MAX_PROBLEMS - 1 :] = []
        self.lines.append(line)


class Scan:
    def __init__(self, engine: PrefetchEngine, *, wants_data: bool, fetches: bool, pins_written: bool) -> None:
        """As of `WarmUp`. `wants_data`: not only metadata."""
        # dependencies
        self._fs = engine.filesystem
        self._directories = engine.directories
        self._attributes = engine.attributes
        self._pin = engine.files.pin if pins_written else engine.files.make_immutable
        # constants
        self._wants_data = wants_data
        self._fetches = fetches
        # state
        self.data_files = array("Q")
        """Files whose data are to be cached."""
        self.metadata_files = array("Q")
        """Files of which only metadata are to be cached."""
        self.found, self.cached = Tally(), Tally()
        """`cached`: files of which nothing must be fetched."""
        self.mutable = self.unpinned = 0
        self.problems = Problems()
        self.is_done = False
        self._linked: set[int] = set()
        """Files with several names, each of which is found."""
        self._kept: list[int] = []
        """Directories whose records must stay until the scan has ended, and those above them."""
        self._more = trio.Event()

    async def run(self, paths: Sequence[bytes]) -> None:
        for start in range(0, len(paths), CHUNK_NAMES):
            directories: list[int] = []
            async with trio.open_nursery() as nursery:
                for path in paths[start : start + CHUNK_NAMES]:
                    nursery.start_soon(self._look_up, path, directories)
            await walk(directories, self._list, at_once=WALKERS)
        self.is_done = True
        self._more.set()

    def release(self) -> None:
        """Allow the records of the directories to be dropped again."""
        self._fs.metadata.release(self._kept)

    async def files_from(self, start: int) -> Sequence[int]:
        """The next few of `data_files`, as soon as there are any. Empty: the scan has ended."""
        while start == len(self.data_files) and not self.is_done:
            self._more = trio.Event()
            await self._more.wait()
        return self.data_files[start : start + CHUNK_NAMES]

    async def old_enough(self, numbers: Sequence[int]) -> Sequence[int]:
        """Waits until the data of these files may be cached. Files that changed meanwhile are pinned again."""
        if not self._fetches:
            return numbers
        found = await self._fs.come_of_age(numbers)
        for before, now in zip(numbers, found, strict=True):
            if now != before:
                with suppress(OSError):  # removed
                    await self._pin(now)
        return found

    async def _look_up(self, path: bytes, directories: list[int]) -> None:
        try:
            for _ in range(ATTEMPTS):
                if not await self._take([(await self._fs.resolve(path)).number], directories):
                    return
            raise failed(errno.ESTALE)
        except OSError as error:
            self.problems.failed(path, error)

    async def _list(self, number: int) -> list[int]:
        directories: list[int] = []
        try:
            await self._take_all(number, directories)
            for name, error in self._directories.without_attributes(number).items():
                with suppress(OSError):  # the directory was removed
                    self.problems.failed(self._fs.path_of(number) + b"/" + name, error)
        except OSError as error:
            with suppress(OSError):  # the directory was removed
                self.problems.failed(self._fs.path_of(number), error)
        return directories

    async def _take_all(self, number: int, directories: list[int]) -> None:
        """Process the entries of a directory.

        The kernel may forget files of a read-write mount before they are pinned, and their records are dropped then.
        Another listing distinguishes them from files that were removed.
        """
        taken: set[int] = set()
        fruitless = 0
        found = await self._directories.revalidated_entries(number)
        while (missing := await self._take(found, directories)) and fruitless < ATTEMPTS:
            before = len(taken)
            taken.update(found)
            taken -= missing
            fruitless = fruitless + 1 if len(taken) == before else 0
            found = [inode for inode in await self._directories.revalidated_entries(number) if inode not in taken]
        if missing:
            reason = OSError("its files are removed faster than they can be looked up: run the warm-up again later")
            self.problems.failed(self._fs.path_of(number), reason)

    async def _take(self, numbers: Sequence[int], directories: list[int]) -> set[int]:
        """Pin files, collect directories, read symlinks. Returns inodes without a record."""
        missing: set[int] = set()
        for start in range(0, len(numbers), CHUNK_NAMES):
            with self._fs.metadata.index.view() as view:
                found = [self._fs.metadata.inode(view, number) for number in numbers[start : start + CHUNK_NAMES]]
                for inode in found:
                    if inode is not None and inode.is_directory:
                        self._kept += self._fs.metadata.keep(view, inode.number)
            for number, inode in zip(numbers[start : start + CHUNK_NAMES], found, strict=True):
                if inode is None:
                    missing.add(number)
                    continue
                if inode.is_directory:
                    directories.append(number)
                    continue
                try:
                    if inode.is_regular:
                        await self._note(inode)
                    elif inode.is_symlink and self._fetches:
                        await self._attributes.readlink(number)
                except OSError as error:
                    self._linked.discard(number)
                    try:
                        path = self._fs.path_of(number)
                    except OSError:
                        missing.add(number)
                    else:
                        self.problems.failed(path, error)
            self._more.set()
            await trio.lowlevel.checkpoint()
        return missing

    async def _note(self, inode: Inode) -> None:
        if inode.nlink > 1:
            if inode.number in self._linked:
                return
            self._linked.add(inode.number)
        pinned = await self._pin(inode.number) if self._fetches else self._fs.metadata.is_pinned(inode)
        if not pinned and self._fs.immutability.is_mutable(self._fs.inode(inode.number)):
            self.mutable += 1
            return
        self.found.add(inode.size)
        if not pinned:
            self._unpinned(inode.number)
        elif self._wants_data:
            self.data_files.append(inode.number)
        else:
            self.cached.add(inode.size)
            self.metadata_files.append(inode.number)

    def _unpinned(self, number: int) -> None:
        """The data of such a file may not be cached either."""
        self.unpinned += 1
        with suppress(OSError):  # removed
            reason = "not pinned: beyond --metadata-limit, or the index cannot be written"
            self.problems.add(self._fs.path_of(number), reason if self._fetches else "not cached")

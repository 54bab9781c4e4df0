"""What a power cut may leave of what was written, as a disk beneath a journaling filesystem does.

- What was written before a sync began is there when the sync has ended. Of what came later each sector of 512 bytes may
  be there or not, in any order; a file's size may have come without its data, or not at all.
- Changes of names keep their order, and each sync of a file keeps the names that were changed before it.
- A hole that was punched since the last sync may be there or not.
"""

import os
import random
from bisect import bisect_left
from collections import defaultdict
from pathlib import Path

from cachefs.system import syscalls
from tests.crash.recorder import OF_NAMES, Entry, Operation

SECTOR, PAGE = 512, 4096
NEAR = 4
"""Entries around a sync: most power cuts are drawn there."""
PUNCH = 2
"""FALLOC_FL_PUNCH_HOLE"""


class Log:
    """A log, and what each moment of it may leave."""

    def __init__(self, entries: list[Entry]) -> None:
        self._entries = entries
        begins: dict[int, int] = {}
        self._synced: dict[int, list[tuple[int, int]]] = defaultdict(list)
        """Inode → (end of a sync, its beginning), ascending."""
        self._journal: list[tuple[int, int]] = []
        """(end of a sync of any file, its beginning)"""
        self._moments: list[int] = []
        for at, entry in enumerate(entries):
            if entry.operation is Operation.SYNC_BEGIN:
                begins[entry.ticket] = at
            if entry.operation is Operation.SYNC_END:
                pair = at, begins[entry.ticket]
                self._synced[entry.inode].append(pair)
                self._journal.append(pair)
            if entry.operation in (Operation.SYNC_BEGIN, Operation.SYNC_END) or entry.mode == 1:
                self._moments.append(at)

    def __len__(self) -> int:
        return len(self._entries)

    def draw_moment(self, draw: random.Random) -> int:
        """How much of the log has happened when the power is cut."""
        if draw.random() < 0.3:
            return draw.randint(0, len(self))
        return min(max(draw.choice(self._moments) + draw.randint(-NEAR, NEAR), 0), len(self))

    def leave(self, moment: int, draw: random.Random, place: Path) -> None:
        """Put into the new directory `place` what a power cut at `moment` may have left."""
        place.mkdir(mode=0o700)
        names = self._names(moment, draw)
        kept = _Kept(draw)
        files: dict[int, list[int]] = defaultdict(list)
        for at in range(moment):
            if self._entries[at].operation in (Operation.WRITE, Operation.ALLOCATE, Operation.TRUNCATE):
                files[self._entries[at].inode].append(at)
        for path, inode in sorted(names.items()):
            if inode is None:
                (place / path).mkdir(mode=0o700)
                continue
            fd = os.open(place / path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                self._leave_file(fd, files[inode], _last(self._synced[inode], moment), kept)
            finally:
                os.close(fd)

    def _names(self, moment: int, draw: random.Random) -> dict[str, int | None]:
        """Path → inode, None: a directory."""
        first = _last(self._journal, moment)
        end = draw.choice([first, moment, draw.randint(first, moment)])
        names: dict[str, int | None] = {}
        for entry in self._entries[:end]:
            if entry.operation not in OF_NAMES:
                continue
            if entry.operation is Operation.CREATE:
                names[entry.path] = entry.inode
            elif entry.operation is Operation.MKDIR:
                names[entry.path] = None
            elif entry.operation is Operation.RENAME:
                moved = {p: i for p, i in names.items() if p == entry.path or p.startswith(f"{entry.path}/")}
                for path, inode in moved.items():
                    del names[path]
                    names[entry.new_path + path[len(entry.path) :]] = inode
            else:
                names.pop(entry.path, None)
        return names

    def _leave_file(self, fd: int, wanted: list[int], synced: int, kept: "_Kept") -> None:
        size = size_now = 0
        """As the disk has it, and as the system had it in memory."""
        sizes = []
        for at in wanted:
            entry, is_safe = self._entries[at], at < synced
            if entry.operation is Operation.WRITE:
                is_safe = is_safe or bool(entry.mode)
                self._write(fd, entry, kept, is_safe=is_safe)
                size_now = max(size_now, entry.offset + entry.length)
            elif entry.operation is Operation.TRUNCATE:
                size_now = entry.length
            elif entry.mode & PUNCH:
                if is_safe or kept.whole():
                    _zero(fd, entry.offset, entry.length)
            else:
                size_now = max(size_now, entry.offset + entry.length)
            if is_safe:
                size, sizes = size_now, []
            sizes.append(size_now)
        os.ftruncate(fd, kept.size([size, *sizes]))

    @staticmethod
    def _write(fd: int, entry: Entry, kept: "_Kept", *, is_safe: bool) -> None:
        if is_safe:
            os.pwrite(fd, entry.data, entry.offset)
            return
        unit, start = kept.unit, entry.offset
        end = entry.offset + entry.length
        while start < end:
            stop = min(start // unit * unit + unit, end)
            if kept.part():
                os.pwrite(fd, entry.data[start - entry.offset : stop - entry.offset], start)
            start = stop


class _Kept:
    """Draws what is kept of what no sync covers."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self.unit = draw.choice([SECTOR, PAGE])
        self._share = draw.choice([0.0, 1.0, 0.5, 0.9, 0.99])
        self._sizes = draw.choice(["least", "most", "any"])

    def part(self) -> bool:
        return self._draw.random() < self._share

    def whole(self) -> bool:
        return self._draw.random() < self._share

    def size(self, possible: list[int]) -> int:
        if self._sizes == "any":
            return self._draw.choice(possible)
        return possible[0] if self._sizes == "least" else possible[-1]


def _last(syncs: list[tuple[int, int]], moment: int) -> int:
    """What was logged before this is covered by syncs that have ended before `moment`."""
    return max((begin for end, begin in syncs[: bisect_left(syncs, (moment,))]), default=0)


def _zero(fd: int, offset: int, length: int) -> None:
    syscalls.punch_hole(fd, offset, length)

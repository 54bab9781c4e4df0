"""Damages of the files of a cache directory, drawn from a seed.

Not drawn: `cache.json`, which says whose cache it is; and other bytes in the files of a live index, which LMDB maps and
believes: what they leave consistent goes unnoticed (docs/SEMANTICS.md, "Not promised").
"""

import os
import random
from dataclasses import dataclass
from pathlib import Path

PAGE = 4096
FILES = ("index/data.mdb", "index/data.mdb", "blob", "blob", "secret", "index/lock.mdb", "index/checksum")
MAPPED = {"index/data.mdb": ["zero"], "index/lock.mdb": []}
"""Files that LMDB maps, and which of the other damages of them it notices."""


@dataclass(frozen=True)
class Damage:
    file: str
    kind: str
    draw: random.Random

    def __str__(self) -> str:
        return f"{self.kind} {self.file}"

    def do(self, cache: Path) -> None:
        path = cache / self.file
        if self.kind == "delete":
            path.unlink(missing_ok=True)
            return
        if not path.exists():
            return
        with open(path, "r+b") as file:
            getattr(self, f"_{self.kind}")(file.fileno(), os.fstat(file.fileno()).st_size)

    def _truncate(self, fd: int, size: int) -> None:
        os.truncate(fd, self.draw.randrange(size + 1))

    def _append(self, fd: int, size: int) -> None:
        os.pwrite(fd, self.draw.randbytes(self.draw.choice([1, PAGE, 3 * PAGE])), size)

    def _zero(self, fd: int, size: int) -> None:
        at = self._page(size)
        os.pwrite(fd, bytes(min(PAGE, size - at)), at)

    def _flip(self, fd: int, size: int) -> None:
        for _ in range(self.draw.choice([1, 8, 64])):
            at = self.draw.randrange(max(1, size))
            if byte := os.pread(fd, 1, at):
                os.pwrite(fd, bytes([byte[0] ^ 1 << self.draw.randrange(8)]), at)

    def _exchange(self, fd: int, size: int) -> None:
        one, other = self._page(size), self._page(size)
        first, second = os.pread(fd, PAGE, one), os.pread(fd, PAGE, other)
        if len(first) == len(second):
            os.pwrite(fd, second, one)
            os.pwrite(fd, first, other)

    def _page(self, size: int) -> int:
        """The blob is sparse: most of its data are at its beginning."""
        end = min(size, 100 * PAGE) if self.file == "blob" else size
        return self.draw.randrange(max(1, -(-end // PAGE))) * PAGE


def drawn(draw: random.Random, *, live: bool) -> Damage:
    file = draw.choice(FILES)
    kinds = ["truncate", "zero", "flip", "delete", "append", "exchange"]
    if live and file in MAPPED:
        kinds = ["truncate", "delete", "append", *MAPPED[file]]
    return Damage(file, draw.choice(kinds), random.Random(draw.randrange(1 << 32)))

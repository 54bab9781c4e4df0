"""Updates that could not be written to the session: kept in memory, above the session, until they can be written.

The runtime directory may be full. What the kernel is told must be recorded nevertheless: otherwise its next request
would refer to an unknown inode, and the index would keep the old answer after a change. Therefore an update whose
commit failed is kept here, and so is every later one until `Index.drain` has written all of them. As with every store
of ours that cannot be written, this is counted in `errors` and logged once a minute at most, and has no other effect.

Meanwhile

- `View` reads the overflow first, then the session, then the durable index;
- the fast path, which does not see the overflow, answers nothing from the index, and Python does (`on_change`);
- the session on disk is marked as incomplete. A daemon that finds this mark does not know everything that its
  predecessor knew, and compares everything with the source (cache_directory.py). The mark is a permission bit, because
  setting one needs no disk space.
"""

import os
import stat
from bisect import bisect_left, insort
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from cachefs.system.listeners import Listeners

_MODE, _MODE_INCOMPLETE = 0o600, 0o700


class Missing:
    """The overflow has nothing for a key."""


MISSING: Final = Missing()
Value = bytes | None
"""None: the key was removed from the session."""


def is_complete(path: Path) -> bool:
    """Does this file of an environment contain everything that its last daemon recorded?"""
    return not path.stat().st_mode & stat.S_IXUSR


class Overflow:
    def __init__(self, path: Path, tables: int) -> None:
        """`path`: the file of the session."""
        # dependencies
        self._path = path
        # state
        self._values: list[dict[bytes, Value]] = [{} for _ in range(tables)]
        self._keys: list[list[bytes]] = [[] for _ in range(tables)]
        """The keys of `_values`, sorted."""
        self._count = 0
        self._is_marked = False
        self.on_change: Listeners[[bool]] = Listeners()
        """Called with True when there is a first key, and with False when the last one has been written."""

    def __len__(self) -> int:
        return self._count  # called for each request

    def find(self, table: int, key: bytes) -> Value | Missing:
        return self._values[table].get(key, MISSING)

    def put(self, table: int, key: bytes, value: Value | Missing) -> None:
        """MISSING removes the key. Call `update_mark` after a number of these."""
        values, keys = self._values[table], self._keys[table]
        if isinstance(value, Missing):
            if key in values:
                del values[key]
                del keys[bisect_left(keys, key)]
                self._count -= 1
            return
        if key not in values:
            insort(keys, key)
            self._count += 1
        values[key] = value

    def update_mark(self) -> None:
        """Mark the file as incomplete, or remove the mark."""
        if self._is_marked == bool(self):
            return
        self._is_marked = bool(self)
        if self._is_marked:
            self.on_change(True)
        os.chmod(self._path, _MODE_INCOMPLETE if self._is_marked else _MODE)
        if not self._is_marked:
            self.on_change(False)

    def begin(self) -> None:
        """A new run begins, and does not depend on what a predecessor could not write: remove its mark."""
        self._is_marked = True
        self.update_mark()

    def scan(self, table: int, prefix: bytes, start: bytes | None) -> Iterator[tuple[bytes, Value]]:
        """A copy of the present state: later calls of `put` do not change it."""
        keys, values = self._keys[table], self._values[table]
        found = []
        for at in range(bisect_left(keys, prefix if start is None else start), len(keys)):
            if not keys[at].startswith(prefix):
                break
            found.append((keys[at], values[keys[at]]))
        return iter(found)

    def last_key(self, table: int, prefix: bytes) -> bytes | None:
        keys = self._keys[table]
        behind = bisect_left(keys, prefix + b"\xff" * 512)  # longer than any key of LMDB
        return keys[behind - 1] if behind and keys[behind - 1].startswith(prefix) else None

    def first(self, most: int, last: int) -> list[tuple[int, bytes, Value]]:
        """At most `most` values; those of the table `last` only after all others."""
        found: list[tuple[int, bytes, Value]] = []
        for table in sorted(range(len(self._keys)), key=last.__eq__):
            keys = self._keys[table]
            found += [(table, key, self._values[table][key]) for key in keys[: most - len(found)]]
        return found

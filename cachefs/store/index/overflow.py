"""What the session index could not take: kept in memory, above it, until it can.

The runtime directory may be full. What the kernel is told must be written down all the same, or its next request leads
nowhere; and a change that is not written down would leave the old answer in the index. So an update whose commit
failed goes here, and so does every later one until `Index.drain` has written all of it. The one rule of a store of
ours that cannot be written: counted in `errors`, said in the log once a minute at most, and nobody notices otherwise.

Meanwhile

- `View` reads this first, then the session, then the durable index;
- the fast path, which does not see this, answers nothing from the index (`on_change`): Python does;
- the session on disk is marked as not complete. A daemon that finds that mark does not know all that its predecessor
  knew, and compares everything with the source (cache_directory.py). The mark is a permission bit, because setting that
  needs no room.
"""

import os
import stat
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

_MODE, _MODE_INCOMPLETE = 0o600, 0o700


class Missing:
    """Nothing is known of a key here."""


MISSING: Final = Missing()
Value = bytes | None
"""None: the session does not have the key any more."""


def is_complete(path: Path) -> bool:
    """Does this file of an environment hold all that its last daemon had to write?"""
    return not path.stat().st_mode & stat.S_IXUSR


class Overflow:
    def __init__(self, path: Path, tables: int) -> None:
        """`path`: the file that these belong into."""
        # dependencies
        self._path = path
        # state
        self._values: list[dict[bytes, Value]] = [{} for _ in range(tables)]
        self._keys: list[list[bytes]] = [[] for _ in range(tables)]
        """Of `_values`, in order."""
        self._count = 0
        self._is_marked = False
        # who wants to know
        self.on_change: Callable[[bool], None] = lambda begins: None
        """Called when the first key has come, and when the last one has gone."""

    def __len__(self) -> int:
        return self._count  # each request asks

    def find(self, table: int, key: bytes) -> Value | Missing:
        return self._values[table].get(key, MISSING)

    def put(self, table: int, key: bytes, value: Value | Missing) -> None:
        """MISSING takes the key out. Follow a number of these up by `settle`."""
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

    def settle(self) -> None:
        """Mark the file, or take the mark away."""
        if self._is_marked == bool(self):
            return
        self._is_marked = bool(self)
        if self._is_marked:
            self.on_change(True)
        os.chmod(self._path, _MODE_INCOMPLETE if self._is_marked else _MODE)
        if not self._is_marked:
            self.on_change(False)

    def begin(self) -> None:
        """What a predecessor's mark says has been dealt with."""
        self._is_marked = True
        self.settle()

    def scan(self, table: int, prefix: bytes, start: bytes | None) -> Iterator[tuple[bytes, Value]]:
        """As it is now, whatever is put meanwhile."""
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
        """Up to so many; those of the table `last` when there are no others any more."""
        found: list[tuple[int, bytes, Value]] = []
        for table in sorted(range(len(self._keys)), key=last.__eq__):
            keys = self._keys[table]
            found += [(table, key, self._values[table][key]) for key in keys[: most - len(found)]]
        return found

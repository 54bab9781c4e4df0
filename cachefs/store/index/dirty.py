"""The keys that must be committed to the durable index, and their order.

The flag LISTED of a directory means that its rows are the whole listing. So the durable index may have this flag only
together with all rows: otherwise, after a crash of the machine, a listing would lack the files whose names were not
committed. Two rules ensure that:

- Keys are committed in the order in which they were last written, and so the flag after the names of its directory. A
  batch whose commit failed is committed first.
- A batch with a name of a directory also contains the directory's record, if that was written. The flag is left out as
  long as other names of the directory are still to be committed (`Batch.incomplete`).
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from cachefs.contract.index import Table
from cachefs.store.index.environment import Key
from cachefs.store.index.records import LISTED

_NAMES = (Table.DENTRIES, Table.LISTING)


@dataclass(slots=True)
class Batch:
    """The metadata of one commit. True if there are any."""

    keys: list[Key]
    moment: Any
    """A read transaction of the session, begun when the batch was taken: later values belong to later batches."""
    tables: Sequence[Any]
    """Of the session."""
    above: dict[Key, bytes | None] = field(default_factory=dict)
    """The values of the session's overflow at that moment."""
    incomplete: set[bytes] = field(default_factory=set)
    """Keys of directories with names that are still to be committed: their records are written without LISTED."""

    def __bool__(self) -> bool:
        return bool(self.keys)

    def value(self, table: Table, key: bytes) -> bytes | None:
        """What is to be written under a key."""
        value: bytes | None
        value = self.above[table, key] if (table, key) in self.above else self.moment.get(key, db=self.tables[table])
        if value and table is Table.INODES and value[0] & LISTED and key in self.incomplete:
            value = bytes([value[0] & ~LISTED]) + value[1:]
        return value

    def end(self) -> None:
        """The values are not needed any more. LMDB frees a reader when its transaction object is deleted."""
        if self.moment is not None:
            self.moment.abort()
            self.moment = None


class Dirty:
    """Keys in the order in which they were last written."""

    def __init__(self) -> None:
        self._keys: dict[Key, None] = {}
        self._names: Counter[bytes] = Counter()
        """Directory → the number of its names in `_keys`."""

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._keys)

    def __contains__(self, key: Key) -> bool:
        return key in self._keys

    def add(self, key: Key) -> None:
        if key in self._keys:
            del self._keys[key]  # it moves to the end
        elif key[0] in _NAMES:
            self._names[key[1][:8]] += 1
        self._keys[key] = None

    def put_first(self, keys: Iterable[Key]) -> None:
        """A batch whose commit failed: put its keys before those that were written since."""
        waiting = self._keys
        self._keys = {}
        self._names.clear()
        for key in (*keys, *waiting):
            if key not in self._keys:
                self.add(key)

    def take(self, limit: int, first: Iterable[Key]) -> list[Key]:
        """Remove up to `limit` keys, those of `first`, and the records of directories with names among these."""
        wanted = dict.fromkeys(key for key in first if key in self._keys)
        wanted.update(dict.fromkeys(itertools.islice(self._keys, limit)))
        directories = {(Table.INODES, key[:8]) for table, key in wanted if table in _NAMES}
        wanted.update(dict.fromkeys(key for key in directories if key in self._keys))
        for table, key in wanted:
            del self._keys[table, key]
            if table in _NAMES:
                self._names[key[:8]] -= 1
                if not self._names[key[:8]]:
                    del self._names[key[:8]]
        return list(wanted)

    def has_names_of(self, directory: bytes) -> bool:
        """`directory`: its key."""
        return directory in self._names

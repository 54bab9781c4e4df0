"""What the durable index has to hear of, and in which order.

A directory that is marked LISTED says of every name without an entry that it does not exist. So the durable index may
have that mark only together with all names: a crash of the machine would make of a name that is not there yet a file
that does not exist. Two rules see to that:

- Keys are committed in the order in which they were written last, a directory's mark therefore after its names. A
  batch that could not be committed goes first again.
- A batch that has a name of a directory has its record too, if that was written; and the mark is left out as long as
  other names of that directory are still to come (`Batch.incomplete`).
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from cachefs.contract.index import Table
from cachefs.store.index.environment import Key

_NAMES = (Table.DENTRIES, Table.LISTING)


@dataclass(slots=True)
class Batch:
    """What one commit writes. True if there is anything."""

    keys: list[Key]
    moment: Any
    """A read transaction of the session, begun when the batch was taken: later values belong to later batches."""
    above: dict[Key, bytes | None] = field(default_factory=dict)
    """What the session's overflow had at that moment."""
    incomplete: set[bytes] = field(default_factory=set)
    """Keys of directories of which names are still to come: their records are written without LISTED."""

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[Key]:
        return iter(self.keys)

    def end(self) -> None:
        """The values are not needed any more. LMDB frees a reader when its transaction object goes."""
        if self.moment is not None:
            self.moment.abort()
            self.moment = None


class Dirty:
    """Keys in the order of their last writing."""

    def __init__(self) -> None:
        self._keys: dict[Key, None] = {}
        self._names: Counter[bytes] = Counter()
        """Directory → how many of its names are among them."""

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
        """A batch that was not committed: before all that was written since."""
        waiting = self._keys
        self._keys = {}
        self._names.clear()
        for key in (*keys, *waiting):
            if key not in self._keys:
                self.add(key)

    def take(self, limit: int, first: Iterable[Key]) -> list[Key]:
        """Up to `limit` keys, those of `first`, and the records of the directories whose names are among them."""
        wanted = dict.fromkeys(key for key in first if key in self._keys)
        wanted.update(dict.fromkeys(itertools.islice(self._keys, limit)))
        directories = {(Table.INODES, key[:8]) for table, key in wanted if table in _NAMES}
        wanted.update(dict.fromkeys(key for key in directories if key in self._keys))
        for key in wanted:
            self._remove(key)
        return list(wanted)

    def _remove(self, key: Key) -> None:
        del self._keys[key]
        if key[0] in _NAMES:
            directory = key[1][:8]
            self._names[directory] -= 1
            if not self._names[directory]:
                del self._names[directory]

    def has_names_of(self, directory: bytes) -> bool:
        """`directory`: its key."""
        return directory in self._names

"""Retire when done: only parts that training has finished with are evicted when room is needed.

For datasets that are read part by part: the partitions of a graph, or directories. A part is *done* as soon as another
part is opened after its last access. Parts that are read in turn all stay in use. A part that was prefetched and is not
read yet is not done. Of the parts that are done, the one with the oldest last access is evicted first.

A part is *opened* by its first access, and by an access after as many accesses to other parts as it has objects. So
several readers in turn do not open parts again and again.

The idea comes from partition preloading for graph training, which deletes partitions that were trained on when the
local disk is full. Its authors measured 2.28 times shorter training than from the parallel filesystem.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic

from policies.retention.base import Key, Retention


@dataclass(slots=True, eq=False)
class _Part(Generic[Key]):
    keys: OrderedDict[Key, None] = field(default_factory=OrderedDict)
    last_access: int = 0
    """In accesses. 0: not accessed since it was fetched."""
    size: int = 0
    """The largest number of its objects that were cached at once."""


class RetireWhenDone(Retention[Key]):
    def __init__(self, part_of: Callable[[Key], object]) -> None:
        """`part_of`: the partition or directory of an object; None: it has none, and is never evicted."""
        self._part_of = part_of
        self._parts: OrderedDict[object, _Part[Key]] = OrderedDict()  # in the order of the last access
        self._part_by_key: dict[Key, object] = {}
        self._clock = 0
        self._last_opening = 0

    def inserted(self, key: Key) -> None:
        """Fetched, perhaps ahead of the read, which `accessed` reports."""
        name = self._part_of(key)
        if name is not None:
            self._part_by_key[key] = name
            part = self._parts.setdefault(name, _Part())
            part.keys[key] = None
            part.size = max(part.size, len(part.keys))

    def accessed(self, key: Key) -> None:
        name = self._part_by_key.get(key)
        if name is None:  # not cached, but the access opens its part
            name = self._part_of(key)
            if name is None:
                return
        self._clock += 1
        part = self._parts.pop(name, None) or _Part()
        self._parts[name] = part
        if not part.last_access or self._clock - part.last_access > part.size:
            self._last_opening = self._clock
        part.last_access = self._clock

    def expected(self, key: Key) -> None:
        name = self._part_of(key)
        part = self._parts.get(name)
        if part is not None and self._is_done(part):
            part.last_access = 0

    def _is_done(self, part: _Part[Key]) -> bool:
        return 0 < part.last_access < self._last_opening

    def removed(self, key: Key) -> None:
        name = self._part_by_key.pop(key, None)
        if name is not None:
            del self._parts[name].keys[key]

    def victim(self) -> Key | None:
        for part in self._parts.values():
            if part.keys and self._is_done(part):
                return next(iter(part.keys))
        return None

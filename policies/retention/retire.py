"""Retire when done: what training is through with goes when room is needed; nothing else does.

For datasets that are read part by part: the partitions of a graph, or directories. A part is *done* as soon as another
one is opened after its last access. Who reads several parts at once keeps them all in use. What was fetched ahead and
not read yet is not done. Among those that are done the one whose last access is longest ago goes first.

A part is *opened* by its first access, and by one that comes after so many accesses to others as it has objects: what
several readers do in turns is not an opening.

Source of the idea: partition preloading for graph training, where partitions that were trained on are deleted when the
local disk is full. Its authors measured 2.28 times shorter training than from the parallel filesystem.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic

from policies.retention.base import Key, Retention


class _Part(Generic[Key]):
    __slots__ = ("keys", "last_access", "size")

    def __init__(self) -> None:
        self.keys: OrderedDict[Key, None] = OrderedDict()
        self.last_access = 0
        """Counted in accesses. 0: not since it was fetched."""
        self.size = 0
        """The most objects of it that were cached at once."""


class RetireWhenDone(Retention[Key]):
    def __init__(self, part_of: Callable[[Key], object]) -> None:
        """`part_of`: the partition or directory of an object; None: it belongs to none, and stays."""
        self._part_of = part_of
        self._parts: OrderedDict[object, _Part[Key]] = OrderedDict()  # those whose last access is longest ago first
        self._part_by_key: dict[Key, object] = {}
        self._clock = 0
        self._last_opening = 0

    def inserted(self, key: Key) -> None:
        """Fetched, perhaps ahead: whoever reads it says so by `accessed`."""
        name = self._part_of(key)
        if name is not None:
            self._part_by_key[key] = name
            part = self._parts.setdefault(name, _Part())
            part.keys[key] = None
            part.size = max(part.size, len(part.keys))

    def accessed(self, key: Key) -> None:
        name = self._part_by_key.get(key)
        if name is None:  # it is not cached, but it opens its part
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

"""First in, first out: for comparison. On random permutations it hits about as often as LRU, with less work a hit."""

from collections import OrderedDict

from policies.retention.base import Key, Retention


class FIFO(Retention[Key]):
    def __init__(self) -> None:
        # Not a dict: that is slow to find its first key when many before it have gone.
        self._order: OrderedDict[Key, None] = OrderedDict()

    def inserted(self, key: Key) -> None:
        self._order.setdefault(key)

    def removed(self, key: Key) -> None:
        self._order.pop(key, None)

    def victim(self) -> Key | None:
        return next(iter(self._order), None)

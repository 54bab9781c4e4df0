"""First in, first out, for comparison. On random permutations it hits about as often as LRU, with less work per hit."""

from collections import OrderedDict

from policies.retention.base import Key, Retention


class FIFO(Retention[Key]):
    def __init__(self) -> None:
        # Not a dict, which is slow to find its first key after many removals at the front.
        self._order: OrderedDict[Key, None] = OrderedDict()

    def inserted(self, key: Key) -> None:
        self._order.setdefault(key)

    def removed(self, key: Key) -> None:
        self._order.pop(key, None)

    def victim(self) -> Key | None:
        return next(iter(self._order), None)

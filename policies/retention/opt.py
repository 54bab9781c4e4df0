"""Belady's OPT: evicts the object whose next use is furthest in the future, which may be the new one.

It must know the future: an upper bound for the simulator, not a policy for a mount. Optimal for objects of one size
(L. A. Belady, A study of replacement algorithms for a virtual-storage computer, 1966). With different sizes the optimum
is NP-hard, and this is the usual approximation.
"""

from collections.abc import Sequence
from heapq import heappop, heappush

from policies.retention.base import Key, Retention


class OPT(Retention[Key]):
    def __init__(self, next_uses: Sequence[int]) -> None:
        """`next_uses[i]`: the position of the next access to the object of access i; large if there is none."""
        self.now = 0
        """The position of the current access, which the simulator sets."""
        self._next_uses = next_uses
        self._next_use: dict[Key, int] = {}
        self._furthest: list[tuple[int, Key]] = []  # a heap, largest first; outdated entries are skipped

    def inserted(self, key: Key) -> None:
        self._next_use[key] = self._next_uses[self.now]
        heappush(self._furthest, (-self._next_use[key], key))

    def accessed(self, key: Key) -> None:
        if key in self._next_use:
            self.inserted(key)

    def removed(self, key: Key) -> None:
        self._next_use.pop(key, None)

    def victim(self) -> Key | None:
        while self._furthest:
            use, key = self._furthest[0]
            if self._next_use.get(key) == -use:
                return key if -use > self._next_uses[self.now] else None
            heappop(self._furthest)
        return None

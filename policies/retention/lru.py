"""Least recently used goes first. The right thing for data with favourites; an epoch has none.

On random permutations it hits x + (1-x)·ln(1-x) of the reads with a fraction x of the data: what is read at a fraction
u of one epoch and v of the next has 1 - u + u·v others read in between, and is still there if those are fewer than x.
With `BundleRandom` and alternation each epoch starts with what the last one ended with, which is what LRU still has.
"""

from policies.retention.base import Key
from policies.retention.fifo import FIFO


class LRU(FIFO[Key]):
    """The order of insertion, and whoever is used goes to the end."""

    def inserted(self, key: Key) -> None:
        self._order[key] = None
        self._order.move_to_end(key)

    def accessed(self, key: Key) -> None:
        if key in self._order:
            self._order.move_to_end(key)

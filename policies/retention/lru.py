"""Evicts the least recently used object first. Good for skewed accesses; the accesses of an epoch are uniform.

On random permutations it hits x + (1-x)·ln(1-x) of the reads, if a fraction x of the data fits: between a read at a
fraction u of one epoch and one at v of the next, 1 - u + u·v of the others are read, and it hits if those are fewer
than x. With `BundleRandom` and alternation each epoch starts with what the last one ended with, which LRU still has.
"""

from policies.retention.base import Key
from policies.retention.fifo import FIFO


class LRU(FIFO[Key]):
    """In the order of insertion, but an access moves an object to the end."""

    def inserted(self, key: Key) -> None:
        self._order[key] = None
        self._order.move_to_end(key)

    def accessed(self, key: Key) -> None:
        if key in self._order:
            self._order.move_to_end(key)

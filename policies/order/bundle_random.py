"""Bundle-random reading: shuffled within bundles, bundles in a fixed order, reversed every other epoch.

With alternation each epoch begins with what the last one ended with, which an LRU cache, such as the page cache, still
has. The authors report 16 % fewer LRU misses on average over cache sizes, 33 % at most, and unchanged accuracy for
bundles of at least 0.1 of the dataset; bundles of 0.01 reduce it. docs/POLICIES.md has our curves.
"""

from collections.abc import Iterator
from math import ceil
from random import Random

from policies.order.epoch import Order


class BundleRandom(Order[int]):
    """Indices 0 to `size` - 1, each once per epoch; rank r gets every `world_size`-th one. For `sampler=`."""

    def __init__(
        self,
        size: int,
        *,
        bundle_ratio: float = 0.1,
        alternate: bool = True,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
    ) -> None:
        """`bundle_ratio`: of the dataset, 0 (exclusive) to 1. `drop_last`: omit what would make ranks unequal."""
        super().__init__(seed=seed, rank=rank, world_size=world_size)
        if size < 0 or not 0 < bundle_ratio <= 1:
            raise ValueError(
                f"the size ({size}) must not be negative, and the bundle ratio ({bundle_ratio}) must be within (0, 1]"
            )
        self._size = size // world_size * world_size if drop_last else size
        self._total = size
        self._bundle = max(1, ceil(size * bundle_ratio))
        self._alternate = alternate

    def __len__(self) -> int:
        return len(range(self.rank, self._size, self.world_size))

    def _items(self, random: Random) -> Iterator[int]:
        starts = range(0, self._total, self._bundle)
        position = 0
        for start in reversed(starts) if self._alternate and self.epoch % 2 else starts:
            bundle = list(range(start, min(start + self._bundle, self._total)))
            random.shuffle(bundle)
            for index in bundle:
                if position < self._size and position % self.world_size == self.rank:
                    yield index
                position += 1

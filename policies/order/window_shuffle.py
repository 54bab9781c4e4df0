"""Windowed shuffle: a few groups (row groups, shards) are open at a time, and samples are drawn from them at random.

A group is read as a whole, and stays in memory while it is in the window. So a shuffled epoch needs no more reads than
a sequential one. Petastorm does the same, but its workers draw with replacement: several workers saw 63 % of the data
in one epoch. Here groups are dealt to ranks and workers, and each sample occurs exactly once.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from random import Random

from policies.order.epoch import Order


class WindowShuffle(Order[int]):
    """Indices of samples, numbered through all groups: sample j of group i is `sum(groups[:i]) + j`.

    A share belongs to a rank, or to a worker of a rank (`rank * workers + worker` of `world_size * workers`). A
    DataLoader with this as `sampler=` divides it among its workers itself. Shares differ by whole groups.
    """

    def __init__(
        self, groups: Sequence[int], *, window: int = 4, seed: int = 0, rank: int = 0, world_size: int = 1
    ) -> None:
        """`groups`: the number of samples of each. `window`: the number of groups that are open at once."""
        super().__init__(seed=seed, rank=rank, world_size=world_size)
        if window < 1 or any(size < 0 for size in groups):
            raise ValueError(f"the window ({window}) must be at least 1, and no group may have less than 0 samples")
        self._groups = list(groups)
        self._starts = [0, *accumulate(self._groups)]
        self._window = window

    def __len__(self) -> int:
        return sum(self._groups[group] for group in self._share(self._random()))

    def _share(self, random: Random) -> list[int]:
        order = list(range(len(self._groups)))
        random.shuffle(order)  # the same on all ranks
        return order[self.rank :: self.world_size]

    def _items(self, random: Random) -> Iterator[int]:
        waiting = iter(self._share(random))
        window: list[list[int]] = []
        while True:
            while len(window) < self._window and (group := next(waiting, None)) is not None:
                if self._groups[group]:
                    samples = list(range(self._starts[group], self._starts[group + 1]))
                    random.shuffle(samples)
                    window.append(samples)
            if not window:
                return
            # All samples in the window are equally likely.
            number = random.randrange(sum(map(len, window)))
            at = 0
            while number >= len(window[at]):
                number -= len(window[at])
                at += 1
            yield window[at].pop()
            if not window[at]:
                del window[at]

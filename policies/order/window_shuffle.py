"""Windowed shuffle: a few groups (row groups, shards) open at a time, samples drawn at random among them.

A group is read as a whole and stays in memory for as long as it is in the window, so that a shuffled epoch costs no
more reads than a sequential one. Petastorm does it, but its workers draw with replacement: several of them saw 63 % of
the data in one epoch. Here groups are dealt to ranks and workers, and each sample comes exactly once.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from random import Random

from policies.order.epoch import Order


class WindowShuffle(Order[int]):
    """Indices of samples, numbered through all groups: sample j of group i is `sum(groups[:i]) + j`.

    A share is a rank, or a worker of a rank (`rank * workers + worker` of `world_size * workers`); a DataLoader that
    takes this as `sampler=` shares it out among its workers itself. Shares differ by whole groups.
    """

    def __init__(
        self, groups: Sequence[int], *, window: int = 4, seed: int = 0, rank: int = 0, world_size: int = 1
    ) -> None:
        """`groups`: how many samples each has. `window`: how many are open at once."""
        super().__init__(seed=seed, rank=rank, world_size=world_size)
        if window < 1 or any(size < 0 for size in groups):
            raise ValueError(f"a window of {window} groups: at least 1, and no group has less than 0 samples")
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
            # Each sample in the window is as likely as any other.
            number = random.randrange(sum(map(len, window)))
            at = 0
            while number >= len(window[at]):
                number -= len(window[at])
                at += 1
            yield window[at].pop()
            if not window[at]:
                del window[at]

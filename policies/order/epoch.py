"""The base of all orders: epochs, seeds, and resuming. Does not need torch: any iterable is a sampler.

An order is made once, with the same arguments on all ranks, and iterated once per epoch. Call `set_epoch(n)` before
each epoch, as for torch's DistributedSampler; without it every epoch is the same. The same seed and epoch give the same
order everywhere.

`state_dict` counts the items drawn from the iterator. A DataLoader with workers draws ahead of training: to resume
exactly, use a loader that keeps the states of its samplers, such as torchdata's StatefulDataLoader.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from random import Random
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")


class Order(ABC, Generic[Item]):
    def __init__(self, *, seed: int = 0, rank: int = 0, world_size: int = 1) -> None:
        """Raises ValueError for a rank outside the world."""
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not between 0 and {world_size - 1}")
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0
        self._drawn = 0
        self._resumes = False

    def set_epoch(self, epoch: int) -> None:
        """Begin another epoch, with another order, from its first item."""
        if epoch != self.epoch or not self._resumes:
            self.epoch, self._drawn, self._resumes = epoch, 0, False

    def state_dict(self) -> dict[str, Any]:
        """The epoch and the position of the last iterator."""
        return {"seed": self.seed, "epoch": self.epoch, "drawn": self._drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iterator continues at that position."""
        self.seed, self.epoch, self._drawn = state["seed"], state["epoch"], state["drawn"]
        self._resumes = True

    def __iter__(self) -> Iterator[Item]:
        skipped = self._drawn if self._resumes else 0
        self._drawn, self._resumes = skipped, False
        items = self._items(self._random())
        for _ in range(skipped):
            next(items, None)
        for item in items:
            self._drawn += 1
            yield item

    def _random(self) -> Random:
        """The same on all ranks."""
        return Random(f"{self.seed} {self.epoch}")

    @abstractmethod
    def __len__(self) -> int:
        """The number of items of this rank in a whole epoch."""

    @abstractmethod
    def _items(self, random: Random) -> Iterator[Item]:
        """The items of this rank in a whole epoch."""

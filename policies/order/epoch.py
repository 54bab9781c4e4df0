"""What all orders share: epochs, seeds, and where one was interrupted. No torch: any iterable is a sampler.

An order is made once, with the same arguments on all ranks, and iterated once an epoch. `set_epoch(n)` before each
epoch, as with torch's DistributedSampler; without it every epoch is the same. The same seed and epoch give the same
order everywhere.

`state_dict` counts what was drawn from the iterator. A DataLoader with workers draws ahead of training: whoever must
resume exactly uses a loader that keeps its samplers' states itself (torchdata's StatefulDataLoader does).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from random import Random
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")


class Order(ABC, Generic[Item]):
    def __init__(self, *, seed: int = 0, rank: int = 0, world_size: int = 1) -> None:
        """Raises ValueError for a rank that the world has not got."""
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} of a world of {world_size}: ranks count from 0")
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0
        self._drawn = 0
        self._resumes = False

    def set_epoch(self, epoch: int) -> None:
        """Begin another epoch: its order is another one, and it begins at its beginning."""
        if epoch != self.epoch or not self._resumes:
            self.epoch, self._drawn, self._resumes = epoch, 0, False

    def state_dict(self) -> dict[str, Any]:
        """Where in which epoch the last iterator is."""
        return {"seed": self.seed, "epoch": self.epoch, "drawn": self._drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iterator goes on where that state was taken."""
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
        """Items of a whole epoch, of this rank."""

    @abstractmethod
    def _items(self, random: Random) -> Iterator[Item]:
        """A whole epoch, of this rank."""

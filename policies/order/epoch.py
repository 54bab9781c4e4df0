"""The base of all orders: epochs, seeds, ranks, and resuming. Does not need torch: any iterable is a sampler.

An order is made once, with the same arguments on all ranks, and iterated once per epoch. Call `set_epoch(n)` before
each epoch, as for torch's DistributedSampler; without it every epoch is the same. The same seed and epoch give the same
order everywhere.

All ranks get equally many items, because ranks that train together wait for each other. As in DistributedSampler, the
first items of the epoch are repeated until the ranks are equal; `drop_last` omits the last ones instead. With
`pad=False` each item occurs exactly once and ranks may differ by one item: for evaluation.

`state_dict` counts the items drawn from the iterator. A DataLoader with workers draws ahead of training: to resume
exactly, use a loader that keeps the states of its samplers, such as torchdata's StatefulDataLoader.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from random import Random
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")


class Order(ABC, Generic[Item]):
    def __init__(
        self,
        size: int,
        *,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
        pad: bool = True,
        **parameters: Any,
    ) -> None:
        """`size`: of the dataset. `parameters`: what else decides the order. Raises ValueError if these make no sense.

        `drop_last` omits what would make ranks unequal, and `pad` has no effect then.
        """
        if size < 0:
            raise ValueError(f"the size ({size}) must not be negative")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not between 0 and {world_size - 1}")
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.drop_last = drop_last
        self.pad = pad and not drop_last
        self.epoch = 0
        self._size = size
        self._same = {
            "order": type(self).__name__,
            "size": size,
            "world_size": world_size,
            "drop_last": drop_last,
            "pad": self.pad,
            **parameters,
        }
        self._drawn = 0
        self._resumes = False

    def set_epoch(self, epoch: int) -> None:
        """Begin another epoch, with another order, from its first item."""
        if epoch != self.epoch or not self._resumes:
            self.epoch, self._drawn, self._resumes = epoch, 0, False

    def state_dict(self) -> dict[str, Any]:
        """The epoch and the position of the last iterator, the same on all ranks, and what decides the order."""
        return {**self._same, "seed": self.seed, "epoch": self.epoch, "drawn": self._drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iterator continues at that position. Raises ValueError for a state of a different order."""
        check_same(self._same, state)
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

    def _total(self, size: int) -> int:
        """How many of `size` items all ranks get together, repeated ones included."""
        if self.drop_last:
            return size // self.world_size * self.world_size
        return -(-size // self.world_size) * self.world_size if self.pad else size

    @abstractmethod
    def __len__(self) -> int:
        """The number of items of this rank in a whole epoch."""

    @abstractmethod
    def _items(self, random: Random) -> Iterator[Item]:
        """The items of this rank in a whole epoch."""


def check_same(expected: dict[str, Any], state: dict[str, Any]) -> None:
    """Raises ValueError, with all differences, if a state is of something different."""
    different = [
        f"{name} is {state[name]!r} there and {value!r} here" if name in state else f"it has no {name}"
        for name, value in expected.items()
        if name not in state or state[name] != value
    ]
    if different:
        raise ValueError(f"the state does not fit: {', '.join(different)}")

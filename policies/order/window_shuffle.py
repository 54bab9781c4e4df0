"""Windowed shuffle: a few groups (row groups, shards) are open at a time, and samples are drawn from them at random.

A group is read as a whole, and stays in memory while it is in the window. When its last sample is drawn, the next group
takes its place. So a shuffled epoch needs no more reads than a sequential one, and samples mix across the whole epoch.
Petastorm does the same, but its workers draw with replacement: several workers saw 63 % of the data in one epoch. Here
the groups are dealt to ranks and workers, and each sample occurs exactly once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import accumulate
from random import Random

from policies.order.epoch import Order


@dataclass(frozen=True, slots=True)
class Piece:
    """Samples `start` to `stop` of a group: a whole group, or the part that one share has of it."""

    group: int
    start: int
    stop: int


class WindowShuffle(Order[int]):
    """Indices of samples, numbered through all groups: sample j of group i is `sum(groups[:i]) + j`.

    The groups of an epoch are shuffled, laid end to end, and cut into one share for each rank. A group that lies across
    a cut is read by both ranks. A DataLoader with this as `sampler=` divides the share among its workers itself. In an
    IterableDataset each worker makes one, with `worker` and `workers`: the share is cut once more, into whole batches
    of `batch_size`. When a DataLoader takes one batch from each worker in turn, the last batch is the incomplete one.
    """

    def __init__(
        self,
        groups: Sequence[int],
        *,
        window: int = 4,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
        pad: bool = True,
        worker: int = 0,
        workers: int = 1,
        batch_size: int = 1,
    ) -> None:
        """`groups`: the number of samples of each. `window`: the number of groups that are open at once."""
        if window < 1 or any(size < 0 for size in groups):
            raise ValueError(f"the window ({window}) must be at least 1, and no group may have less than 0 samples")
        if not 0 <= worker < workers or batch_size < 1:
            raise ValueError(
                f"worker {worker} must be between 0 and {workers - 1}, and the batch size ({batch_size}) at least 1"
            )
        super().__init__(
            sum(groups),
            seed=seed,
            rank=rank,
            world_size=world_size,
            drop_last=drop_last,
            pad=pad,
            groups=digest(groups),
            window=window,
            workers=workers,
            batch_size=batch_size,
        )
        self._groups = list(groups)
        self._starts = [0, *accumulate(self._groups)]
        self._window = window
        self._worker = worker
        self._workers = workers
        self._batch_size = batch_size

    def __len__(self) -> int:
        start, stop = self._range()
        return stop - start

    def pieces(self) -> list[Piece]:
        """The share of this epoch, in the order in which pieces enter the window."""
        return self._pieces(self._random())

    def draws(self) -> Iterator[tuple[int, int]]:
        """The whole epoch as (number of the piece in `pieces()`, sample of its group)."""
        random = self._random()
        return self._draws(self._pieces(random), random)

    def _items(self, random: Random) -> Iterator[int]:
        pieces = self._pieces(random)
        return (self._starts[pieces[number].group] + sample for number, sample in self._draws(pieces, random))

    def _range(self) -> tuple[int, int]:
        """The samples of this share, as positions in the epoch of all ranks. Those beyond the size are repeated."""
        total, rank = self._total(self._size), self.rank
        start, stop = rank * total // self.world_size, (rank + 1) * total // self.world_size
        batches = -(-(stop - start) // self._batch_size)
        parts = [len(range(worker, batches, self._workers)) * self._batch_size for worker in range(self._workers)]
        parts[(batches - 1) % self._workers] -= batches * self._batch_size - (stop - start)
        start += sum(parts[: self._worker])
        return start, start + parts[self._worker]

    def _pieces(self, random: Random) -> list[Piece]:
        order = list(range(len(self._groups)))
        random.shuffle(order)  # the same on all ranks
        start, stop = self._range()
        found = []
        size = max(1, self._size)
        for first in range(start // size * size, stop, size):  # beyond the end are the first samples once more
            for group in order:
                last = first + self._groups[group]
                piece = Piece(group, max(start, first) - first, min(stop, last) - first)
                if piece.start < piece.stop:
                    found.append(piece)
                first = last
        return found

    def _draws(self, pieces: Sequence[Piece], random: Random) -> Iterator[tuple[int, int]]:
        waiting = iter(enumerate(pieces))
        left: dict[int, int] = {}  # of each piece in the window
        samples: list[int] = []  # of all of them: one integer for piece and sample, which takes less memory than two
        stride = max(self._groups, default=0)
        while True:
            while len(left) < self._window and (entering := next(waiting, None)) is not None:
                number, piece = entering
                left[number] = piece.stop - piece.start
                samples.extend(range(number * stride + piece.start, number * stride + piece.stop))
            if not samples:
                return
            # All samples in the window are equally likely. The last one takes the place of the one that is drawn.
            at = int(random.random() * len(samples))
            last = samples.pop()
            if at < len(samples):
                last, samples[at] = samples[at], last
            number, sample = divmod(last, stride)
            yield number, sample
            left[number] -= 1
            if not left[number]:
                del left[number]


def digest(numbers: Sequence[int]) -> str:
    """A short name for a sequence of numbers."""
    return sha256(",".join(map(str, numbers)).encode()).hexdigest()[:16]

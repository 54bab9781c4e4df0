"""Length buckets: batches by tokens, not by samples, of sequences of similar length.

Padding wastes work: each sequence of a batch is padded to the longest. Sequences whose lengths are in the same interval
(1 to 8, 9 to 16, …: bucket number (length - 1) // interval) share a bucket. A bucket becomes a batch when one more
sequence would exceed the budget of tokens: of 512 tokens, 8 sequences fit a budget of 4,096. Sequences that exceed the
budget alone are skipped. The authors report a tenth of the time of sequential batches, with the file size as the
length, which costs no I/O. With cachefs the index has the sizes: `os.stat` on the mount does not access the source.
"""

from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from random import Random

from policies.order.epoch import Order
from policies.order.window_shuffle import digest


class LengthBucket(Order[list[int]]):
    """Batches of indices, for `batch_sampler=`.

    All ranks fill the same buckets. When a bucket is full for all ranks, each takes every `world_size`-th item: at each
    step the ranks work on batches of similar length. The remaining items of an epoch are dealt in turns, in smaller
    batches. These leave ranks unequal only where a bucket has fewer items than there are ranks: batches of one item.
    At most `world_size` - 1 of those are repeated, so that all ranks get equally many batches.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        budget: int,
        interval: int = 8,
        skip_long: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
        pad: bool = True,
    ) -> None:
        """`budget`: the most tokens of a batch, with padding. `drop_last` omits the batches that are not full.

        A sample that exceeds the budget alone raises ValueError; `skip_long` leaves such samples out instead, and
        `skipped` is their number.
        """
        super().__init__(
            len(lengths),
            seed=seed,
            rank=rank,
            world_size=world_size,
            drop_last=drop_last,
            pad=pad,
            lengths=digest(lengths),
            budget=budget,
            interval=interval,
            skip_long=skip_long,
        )
        if interval < 1:
            raise ValueError(f"the interval ({interval}) must be at least 1")
        for index, length in enumerate(lengths):
            if length < 0 or (length > budget and not skip_long):
                raise ValueError(
                    f"sample {index} has length {length}, which is not between 0 and {budget}: shorten it, or skip "
                    "such samples with skip_long=True"
                )
        self._lengths = list(lengths)
        self._fitting = [index for index, length in enumerate(lengths) if length <= budget]
        self.skipped = len(lengths) - len(self._fitting)
        self._budget = budget
        self._interval = interval
        self._counted: tuple[tuple[int, int], int] | None = None

    def __len__(self) -> int:
        """Iterates through the epoch once to count."""
        key = (self.seed, self.epoch)
        if self._counted is None or self._counted[0] != key:
            self._counted = key, sum(1 for _ in self._items(self._random()))
        return self._counted[1]

    def _capacity(self, bucket: int) -> int:
        """How many sequences of a bucket fit into a batch, for any lengths within the interval."""
        longest = min((bucket + 1) * self._interval, self._budget)
        return max(1, self._budget // max(1, longest))

    def _items(self, random: Random) -> Iterator[list[int]]:
        order = list(self._fitting)
        random.shuffle(order)
        buckets: dict[int, list[int]] = {}
        for index in order:
            bucket = max(0, self._lengths[index] - 1) // self._interval
            items = buckets.setdefault(bucket, [])
            items.append(index)
            if len(items) == self._capacity(bucket) * self.world_size:
                yield items[self.rank :: self.world_size]
                del buckets[bucket]
        if not self.drop_last:
            rest = list(self._rest(buckets))
            singles = cycle(batch for batch in rest if len(batch) == 1)
            repeated = islice(singles, self._total(len(rest)) - len(rest))
            yield from [*rest, *repeated][self.rank :: self.world_size]

    def _rest(self, buckets: dict[int, list[int]]) -> Iterator[list[int]]:
        """Batches of what has not filled a bucket, one for each rank where there are enough items."""
        for bucket, items in sorted(buckets.items()):
            shares = min(self.world_size, len(items))
            for share in range(shares):
                batch = items[share::shares]
                assert len(batch) <= self._capacity(bucket)
                yield batch

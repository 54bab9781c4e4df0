"""Length buckets: batches by tokens, not by samples, of sequences that are about as long as each other.

Padding is what a batch wastes: each of its sequences is padded to the longest. Sequences whose lengths lie in the same
interval (8, say) share a bucket, and a bucket becomes a batch when one more would exceed the budget of tokens. Its
authors report a tenth of the time of sequential batches, with the stored file size as the length: that costs no I/O.
Here the index of cachefs has the sizes: `os.stat` on the mount reads nothing.
"""

from collections.abc import Iterator, Sequence
from random import Random

from policies.order.epoch import Order


class LengthBucket(Order[list[int]]):
    """Batches of indices, for `batch_sampler=`; each index comes once an epoch, over all ranks.

    All ranks fill the same buckets, and take every `world_size`-th item of a bucket that is full for all of them: at
    each step they work on batches of like length. What is left at the end of an epoch is dealt out as it is, in
    smaller batches, in turns; ranks may then differ by a batch, unless `drop_last` leaves it out.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        budget: int,
        interval: int = 8,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
    ) -> None:
        """`budget`: tokens of a batch at most, padding included. Raises ValueError for a sample that exceeds it."""
        super().__init__(seed=seed, rank=rank, world_size=world_size)
        if interval < 1:
            raise ValueError(f"an interval of {interval}: at least 1")
        for index, length in enumerate(lengths):
            if not 0 <= length <= budget:
                raise ValueError(f"sample {index} has a length of {length}: a batch holds 0 to {budget}")
        self._lengths = list(lengths)
        self._budget = budget
        self._interval = interval
        self._drop_last = drop_last
        self._counted: tuple[tuple[int, int], int] | None = None

    def __len__(self) -> int:
        """Counted by running through the epoch once."""
        key = (self.seed, self.epoch)
        if self._counted is None or self._counted[0] != key:
            self._counted = key, sum(1 for _ in self._items(self._random()))
        return self._counted[1]

    def _capacity(self, bucket: int) -> int:
        """How many sequences of a bucket fit into a batch, whatever their lengths within the interval."""
        longest = min((bucket + 1) * self._interval - 1, self._budget)
        return max(1, self._budget // max(1, longest))

    def _items(self, random: Random) -> Iterator[list[int]]:
        order = list(range(len(self._lengths)))
        random.shuffle(order)
        buckets: dict[int, list[int]] = {}
        for index in order:
            bucket = self._lengths[index] // self._interval
            items = buckets.setdefault(bucket, [])
            items.append(index)
            if len(items) == self._capacity(bucket) * self.world_size:
                yield items[self.rank :: self.world_size]
                del buckets[bucket]
        if self._drop_last:
            return
        turn = 0
        for bucket, items in sorted(buckets.items()):
            capacity = self._capacity(bucket)
            shares = min(self.world_size, len(items))
            for share in range(shares):
                batch = items[share::shares]
                assert len(batch) <= capacity
                if (turn + share) % self.world_size == self.rank:
                    yield batch
            turn += shares

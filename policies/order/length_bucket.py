"""Length buckets: batches by tokens, not by samples, of sequences of similar length.

Padding wastes work: each sequence of a batch is padded to the longest. Sequences whose lengths are in the same interval
(of 8, for example) share a bucket. A bucket becomes a batch when one more sequence would exceed the budget of tokens.
The authors report a tenth of the time of sequential batches, with the file size as the length, which costs no I/O. With
cachefs the index has the sizes: `os.stat` on the mount does not access the source.
"""

from collections.abc import Iterator, Sequence
from random import Random

from policies.order.epoch import Order


class LengthBucket(Order[list[int]]):
    """Batches of indices, for `batch_sampler=`. Each index occurs once per epoch, over all ranks.

    All ranks fill the same buckets. When a bucket is full for all ranks, each takes every `world_size`-th item: at each
    step the ranks work on batches of similar length. The remaining items of an epoch are dealt in turns, in smaller
    batches. Ranks may then differ by a batch; `drop_last` omits these.
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
        """`budget`: the most tokens of a batch, with padding. Raises ValueError for a sample that exceeds it."""
        super().__init__(seed=seed, rank=rank, world_size=world_size)
        if interval < 1:
            raise ValueError(f"the interval ({interval}) must be at least 1")
        for index, length in enumerate(lengths):
            if not 0 <= length <= budget:
                raise ValueError(f"sample {index} has length {length}, which is not between 0 and {budget}")
        self._lengths = list(lengths)
        self._budget = budget
        self._interval = interval
        self._drop_last = drop_last
        self._counted: tuple[tuple[int, int], int] | None = None

    def __len__(self) -> int:
        """Iterates through the epoch once to count."""
        key = (self.seed, self.epoch)
        if self._counted is None or self._counted[0] != key:
            self._counted = key, sum(1 for _ in self._items(self._random()))
        return self._counted[1]

    def _capacity(self, bucket: int) -> int:
        """How many sequences of a bucket fit into a batch, for any lengths within the interval."""
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

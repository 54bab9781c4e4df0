"""The orders in a real DataLoader, with workers: each sample once, in the order that the sampler gives."""

from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from policies.order import BundleRandom, LengthBucket, WindowShuffle

SIZE = 300
WORKERS = [0, 3]
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")  # on two cores


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> int:
        return index


class Rows(IterableDataset[int]):
    """As a dataset of parquet shards would be: each worker reads the row groups that are its share."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        number, count = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        share, shares = self._rank * count + number, self._ranks * count
        return iter(WindowShuffle([10] * (SIZE // 10), window=3, rank=share, world_size=shares))


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("order", [BundleRandom(SIZE, seed=2), WindowShuffle([25] * 12, seed=2)])
def test_as_a_sampler(order: BundleRandom | WindowShuffle, workers: int) -> None:
    loader = DataLoader(Numbers(), batch_size=16, sampler=order, num_workers=workers)
    for epoch in range(2):
        order.set_epoch(epoch)
        expected = list(order)
        order.set_epoch(epoch)
        assert torch.cat(list(loader)).tolist() == expected
        assert len(loader) == -(-SIZE // 16)


@pytest.mark.parametrize("workers", WORKERS)
def test_as_a_batch_sampler(workers: int) -> None:
    order = LengthBucket([1 + index % 60 for index in range(SIZE)], budget=240, seed=2)
    loader = DataLoader(Numbers(), batch_sampler=order, num_workers=workers)
    batches = [batch.tolist() for batch in loader]
    assert batches == list(order) and len(loader) == len(batches)
    assert sorted(index for batch in batches for index in batch) == list(range(SIZE))


@pytest.mark.parametrize("workers", WORKERS)
def test_shared_out_among_ranks_and_workers(workers: int) -> None:
    rows = [
        row
        for rank in range(2)
        for batch in DataLoader(Rows(rank, 2), batch_size=7, num_workers=workers)
        for row in batch
    ]
    assert sorted(int(row) for row in rows) == list(range(SIZE))

"""The orders with torch: in a DataLoader, beside DistributedSampler, and on ranks that wait for each other."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, get_worker_info

from policies.order import BundleRandom, LengthBucket, WindowShuffle
from tests.conftest import REPOSITORY

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
        return iter(
            WindowShuffle(
                [10] * (SIZE // 10), window=3, rank=self._rank, world_size=self._ranks, worker=number, workers=count
            )
        )


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


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("size", [0, 1, 2, 5, 8, 100, 103])
def test_ranks_get_what_distributed_sampler_would_give_them(size: int, world: int, drop_last: bool) -> None:
    dataset = range(size)
    alone = list(BundleRandom(size, seed=4))
    for rank in range(world):
        theirs = DistributedSampler(dataset, world, rank, shuffle=False, drop_last=drop_last)  # type: ignore[arg-type, var-annotated]
        ours = BundleRandom(size, seed=4, rank=rank, world_size=world, drop_last=drop_last)
        assert list(ours) == [alone[position] for position in theirs]
        assert len(ours) == len(theirs)
        window = WindowShuffle([size // 2, size - size // 2], rank=rank, world_size=world, drop_last=drop_last)
        assert len(window) == len(list(window)) == len(theirs)


RANK = """
import sys
from datetime import timedelta
import torch
from torch import distributed
from policies.order import BundleRandom, LengthBucket, WindowShuffle

rank, place = int(sys.argv[1]), dict(rank=int(sys.argv[1]), world_size=2)
distributed.init_process_group("gloo", f"file://{sys.argv[2]}", timeout=timedelta(seconds=60), **place)
order = eval(sys.argv[3])
for step, item in enumerate(order):
    gradient = torch.ones(1)
    distributed.all_reduce(gradient)
    assert gradient.item() == 2
print(step + 1)
distributed.destroy_process_group()
"""


def train_two_ranks(tmp_path: Path, order: str) -> list[tuple[int | None, str, str]]:
    """(exit status, output, errors) of each. As DDP does, the ranks wait for each other at each step."""
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "rendezvous"), order],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, *each) for rank, each in zip(ranks, said, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "order",
    [
        "BundleRandom(31, **place)",
        "WindowShuffle([10, 7, 14], window=2, **place)",
        "LengthBucket([1 + index % 7 for index in range(33)], budget=20, interval=2, **place)",
    ],
)
def test_two_ranks_that_wait_for_each_other_end_together(tmp_path: Path, order: str) -> None:
    (first, steps, errors), (second, others, more) = train_two_ranks(tmp_path, order)
    assert (first, second) == (0, 0), errors + more
    assert steps == others and int(steps) > 1


@pytest.mark.slow
def test_ranks_of_different_lengths_do_not_end_together(tmp_path: Path) -> None:
    """What the test above would notice."""
    assert any(status != 0 for status, _, _ in train_two_ranks(tmp_path, "BundleRandom(31, pad=False, **place)"))

"""The orders: each sample exactly once, whoever takes part; the same seed, the same order."""

import json
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.order import BundleRandom, LengthBucket, WindowShuffle
from policies.order.epoch import Order

worlds = st.integers(1, 8)
epochs = st.integers(0, 3)
seeds = st.integers(0, 2**32)
group_sizes = st.lists(st.integers(0, 40), max_size=30)
length_lists = st.lists(st.integers(0, 200), max_size=300)


def joined(lists: Iterable[list[Any]]) -> list[Any]:
    return list(chain.from_iterable(lists))


def draw(make: Callable[..., Order[Any]], world: int, epoch: int) -> list[list[Any]]:
    """What each rank draws in an epoch; its length is what it says."""
    drawn = []
    for rank in range(world):
        order = make(rank=rank, world_size=world)
        order.set_epoch(epoch)
        drawn.append(list(order))
        assert len(order) == len(drawn[-1])
    return drawn


@given(st.integers(0, 500), st.floats(0.01, 1), st.booleans(), worlds, epochs, seeds)
def test_bundle_random_covers_everything_once(
    size: int, ratio: float, alternate: bool, world: int, epoch: int, seed: int
) -> None:
    def make(**place: int) -> BundleRandom:
        return BundleRandom(size, bundle_ratio=ratio, alternate=alternate, seed=seed, **place)

    drawn = draw(make, world, epoch)
    assert sorted(joined(drawn)) == list(range(size))
    assert drawn == draw(make, world, epoch)


def test_bundles_keep_their_order_and_turn_it_every_other_epoch() -> None:
    order = BundleRandom(100, bundle_ratio=0.1, seed=3)
    first = list(order)
    order.set_epoch(1)
    second = list(order)
    assert [index // 10 for index in first] == [i // 10 for i in range(100)]
    assert [index // 10 for index in second] == [9 - i // 10 for i in range(100)]
    assert first[:10] != sorted(first[:10])


def test_ranks_are_equal_where_that_is_asked_for() -> None:
    shares = [list(BundleRandom(103, rank=rank, world_size=4, drop_last=True)) for rank in range(4)]
    assert [len(share) for share in shares] == [25] * 4
    assert len(set(joined(shares))) == 100


@given(group_sizes, st.integers(1, 6), worlds, epochs, seeds)
def test_window_shuffle_covers_everything_once(
    groups: list[int], window: int, world: int, epoch: int, seed: int
) -> None:
    def make(**place: int) -> WindowShuffle:
        return WindowShuffle(groups, window=window, seed=seed, **place)

    drawn = draw(make, world, epoch)
    assert sorted(joined(drawn)) == list(range(sum(groups)))
    assert drawn == draw(make, world, epoch)


@given(group_sizes, st.integers(1, 6), seeds)
def test_window_shuffle_has_no_more_groups_open_than_it_may(groups: list[int], window: int, seed: int) -> None:
    group_of = [number for number, size in enumerate(groups) for _ in range(size)]
    left = list(groups)
    open_groups: set[int] = set()
    for index in WindowShuffle(groups, window=window, seed=seed):
        group = group_of[index]
        open_groups.add(group)
        assert len(open_groups) <= window
        left[group] -= 1
        if not left[group]:
            open_groups.remove(group)


def test_window_shuffle_shuffles_groups_and_samples() -> None:
    groups = [20] * 30
    alone = list(WindowShuffle(groups, window=1, seed=5))  # one group after the other
    order = list(dict.fromkeys(index // 20 for index in alone))
    assert order != sorted(order)
    runs = [alone[start : start + 20] for start in range(0, 600, 20)]
    assert all(len({index // 20 for index in run}) == 1 for run in runs)
    assert sum(run == sorted(run) or run == sorted(run, reverse=True) for run in runs) == 0
    # A wider window mixes the samples of several groups, from its first samples on.
    assert len({index // 20 for index in list(WindowShuffle(groups, window=4, seed=5))[:20]}) == 4


@given(length_lists, st.integers(200, 1000), st.integers(1, 64), worlds, epochs, seeds)
def test_length_bucket_covers_everything_once_within_the_budget(
    lengths: list[int], budget: int, interval: int, world: int, epoch: int, seed: int
) -> None:
    def make(**place: int) -> LengthBucket:
        return LengthBucket(lengths, budget=budget, interval=interval, seed=seed, **place)

    drawn = draw(make, world, epoch)
    batches = joined(drawn)
    assert sorted(joined(batches)) == list(range(len(lengths)))
    assert drawn == draw(make, world, epoch)
    for batch in batches:
        of_batch = [lengths[index] for index in batch]
        assert max(of_batch) * len(batch) <= budget
        assert max(of_batch) - min(of_batch) < interval


@given(length_lists, st.integers(200, 1000), worlds, seeds)
def test_length_bucket_gives_all_ranks_the_same_buckets(lengths: list[int], budget: int, world: int, seed: int) -> None:
    drawn = draw(lambda **place: LengthBucket(lengths, budget=budget, seed=seed, drop_last=True, **place), world, 0)
    assert len({len(batches) for batches in drawn}) == 1
    for step in zip(*drawn, strict=True):
        assert len({lengths[index] // 8 for batch in step for index in batch}) == 1
        assert len({len(batch) for batch in step}) == 1


ORDERS = {
    "bundle-random": lambda: BundleRandom(100),
    "window-shuffle": lambda: WindowShuffle([10] * 10),
    "length-bucket": lambda: LengthBucket([i % 50 for i in range(100)], budget=200),
}


@pytest.mark.parametrize("name", ORDERS)
def test_it_goes_on_where_it_was_interrupted(name: str) -> None:
    make = ORDERS[name]
    order = make()
    order.set_epoch(2)
    whole = list(order)
    order.set_epoch(2)
    drawn = iter(order)
    before = [next(drawn) for _ in range(7)]
    state = json.loads(json.dumps(order.state_dict()))
    other = make()
    other.load_state_dict(state)
    other.set_epoch(2)  # as a training loop does before each epoch, this one included
    assert before + list(other) == whole
    assert list(other) == whole  # an epoch that is iterated again begins at its beginning
    other.set_epoch(3)
    assert len(list(other)) == len(other)


def test_a_state_brings_its_seed_along() -> None:
    order = BundleRandom(100, seed=7)
    drawn = iter(order)
    before = [next(drawn) for _ in range(30)]
    other = BundleRandom(100, seed=8)
    other.load_state_dict(order.state_dict())
    assert before + list(other) == list(BundleRandom(100, seed=7))


@pytest.mark.parametrize("name", ORDERS)
def test_another_seed_or_epoch_is_another_order(name: str) -> None:
    order = ORDERS[name]()
    first = list(order)
    order.set_epoch(1)
    assert list(order) != first


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: BundleRandom(10, bundle_ratio=0), "bundle ratio"),
        (lambda: BundleRandom(10, rank=2, world_size=2), "rank 2"),
        (lambda: WindowShuffle([1], window=0), "window \\(0\\)"),
        (lambda: LengthBucket([5, 99], budget=50), "sample 1 has length 99"),
    ],
)
def test_what_makes_no_sense_is_refused(make: Callable[[], object], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        make()

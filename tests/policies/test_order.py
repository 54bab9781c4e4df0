"""The orders: each sample exactly once, however many take part; equal ranks; the same seed, the same order."""

import json
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import chain, zip_longest
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


def draw(make: Callable[..., Order[Any]], world: int, epoch: int, **remainder: bool) -> list[list[Any]]:
    """What each rank draws in an epoch; its length is what it says."""
    drawn = []
    for rank in range(world):
        order = make(rank=rank, world_size=world, **remainder)
        order.set_epoch(epoch)
        drawn.append(list(order))
        assert len(order) == len(drawn[-1])
    return drawn


def check_ranks(make: Callable[..., Order[int]], size: int, world: int, epoch: int) -> None:
    """Padded, cut and left as they are: the ranks of one epoch."""
    alone = draw(make, 1, epoch)[0]
    assert sorted(alone) == list(range(size))
    padded = draw(make, world, epoch)
    assert padded == draw(make, world, epoch)
    counted = Counter(joined(padded))
    assert {len(share) for share in padded} == {-(-size // world)} and set(counted) == set(range(size))
    assert max(counted.values(), default=1) - min(counted.values(), default=1) <= 1
    cut = draw(make, world, epoch, drop_last=True)
    assert {len(share) for share in cut} == {size // world}
    assert len(set(joined(cut))) == len(joined(cut))
    exact = draw(make, world, epoch, pad=False)
    assert sorted(joined(exact)) == list(range(size))
    assert max(map(len, exact)) - min(map(len, exact)) <= 1


@given(st.integers(0, 500), st.floats(0.01, 1), st.booleans(), worlds, epochs, seeds)
def test_bundle_random_covers_everything_and_ranks_are_equal(
    size: int, ratio: float, alternate: bool, world: int, epoch: int, seed: int
) -> None:
    def make(**place: Any) -> BundleRandom:
        return BundleRandom(size, bundle_ratio=ratio, alternate=alternate, seed=seed, **place)

    check_ranks(make, size, world, epoch)


def test_bundles_keep_their_order_and_turn_it_every_other_epoch() -> None:
    order = BundleRandom(100, bundle_ratio=0.1, seed=3)
    first = list(order)
    order.set_epoch(1)
    second = list(order)
    assert [index // 10 for index in first] == [i // 10 for i in range(100)]
    assert [index // 10 for index in second] == [9 - i // 10 for i in range(100)]
    assert first[:10] != sorted(first[:10])


@given(group_sizes, st.integers(1, 6), worlds, epochs, seeds)
def test_window_shuffle_covers_everything_and_ranks_are_equal(
    groups: list[int], window: int, world: int, epoch: int, seed: int
) -> None:
    def make(**place: Any) -> WindowShuffle:
        return WindowShuffle(groups, window=window, seed=seed, **place)

    check_ranks(make, sum(groups), world, epoch)


@given(group_sizes, st.integers(1, 6), worlds, st.integers(1, 5), st.integers(1, 9), seeds, st.booleans())
def test_workers_of_a_rank_divide_its_share_into_whole_batches(
    groups: list[int], window: int, world: int, workers: int, batch_size: int, seed: int, drop_last: bool
) -> None:
    for rank in range(world):

        def make(rank: int = rank, **place: int) -> WindowShuffle:
            return WindowShuffle(
                groups, window=window, seed=seed, rank=rank, world_size=world, drop_last=drop_last, **place
            )

        parts = [list(make(worker=worker, workers=workers, batch_size=batch_size)) for worker in range(workers)]
        assert sorted(joined(parts)) == sorted(make())
        batches = [[part[at : at + batch_size] for at in range(0, len(part), batch_size)] for part in parts]
        in_turn = [batch for turn in zip_longest(*batches) for batch in turn if batch]
        assert all(len(batch) == batch_size for batch in in_turn[:-1])
        taken = [None if batch is None else 1 for turn in zip_longest(*batches) for batch in turn]
        assert taken == sorted(taken, key=lambda one: one is None)  # no worker ends before its turn


@given(group_sizes, st.integers(1, 6), worlds, seeds)
def test_few_groups_lie_across_cuts(groups: list[int], window: int, world: int, seed: int) -> None:
    pieces = joined(
        WindowShuffle(groups, window=window, seed=seed, rank=rank, world_size=world, drop_last=True).pieces()
        for rank in range(world)
    )
    assert len(pieces) <= len(groups) + world - 1


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


@pytest.mark.parametrize("window", [2, 4])
def test_samples_cross_their_window(window: int) -> None:
    """A group enters the window when another one is used up, not when the whole window is."""
    size, number = 50, 12
    drawn = [index // size for index in WindowShuffle([size] * number, window=window, seed=1)]
    order = list(dict.fromkeys(drawn))
    last_of_first_window = max(at for at, group in enumerate(drawn) if group in order[:window])
    later = {group for group in drawn[:last_of_first_window] if group not in order[:window]}
    assert later, "the first window was used up before another group came"
    # Nowhere in the epoch are all groups either used up or not begun.
    assert all(set(drawn[:cut]) & set(drawn[cut:]) for cut in range(1, len(drawn)))


@given(length_lists, st.integers(200, 1000), st.integers(1, 64), worlds, epochs, seeds)
def test_length_bucket_covers_everything_within_the_budget_and_ranks_are_equal(
    lengths: list[int], budget: int, interval: int, world: int, epoch: int, seed: int
) -> None:
    def make(**place: Any) -> LengthBucket:
        return LengthBucket(lengths, budget=budget, interval=interval, seed=seed, **place)

    drawn = draw(make, world, epoch)
    assert drawn == draw(make, world, epoch)
    assert len({len(batches) for batches in drawn}) == 1
    counted = Counter(joined(joined(drawn)))
    assert set(counted) == set(range(len(lengths))) and counted.total() <= len(lengths) + world - 1
    exact = draw(make, world, epoch, pad=False)
    assert sorted(joined(joined(exact))) == list(range(len(lengths)))
    for batch in joined(drawn) + joined(exact):
        of_batch = [lengths[index] for index in batch]
        assert max(of_batch) * len(batch) <= budget
        assert len({(max(1, length) - 1) // interval for length in of_batch}) == 1


@given(length_lists, st.integers(200, 1000), worlds, seeds)
def test_length_bucket_gives_all_ranks_the_same_buckets(lengths: list[int], budget: int, world: int, seed: int) -> None:
    drawn = draw(lambda **place: LengthBucket(lengths, budget=budget, seed=seed, **place), world, 0, drop_last=True)
    assert len({len(batches) for batches in drawn}) == 1
    for step in zip(*drawn, strict=True):
        assert len({(max(1, lengths[index]) - 1) // 8 for batch in step for index in batch}) == 1
        assert len({len(batch) for batch in step}) == 1


@pytest.mark.parametrize(("length", "number"), [(512, 8), (505, 8), (513, 7), (8, 512), (1, 512), (4096, 1)])
def test_a_batch_is_as_large_as_in_the_paper(length: int, number: int) -> None:
    batches = list(LengthBucket([length] * number * 2, budget=4096))
    assert [len(batch) for batch in batches] == [number] * 2


def test_samples_that_are_too_long_are_skipped_if_that_is_asked_for() -> None:
    lengths = [10, 99, 20, 51, 50]
    order = LengthBucket(lengths, budget=50, skip_long=True)
    assert sorted(joined(order)) == [0, 2, 4] and order.skipped == 2
    with pytest.raises(ValueError, match="sample 1 has length 99, which is not between 0 and 50"):
        LengthBucket(lengths, budget=50)
    with pytest.raises(ValueError, match="sample 0 has length -1"):
        LengthBucket([-1], budget=50, skip_long=True)


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


@pytest.mark.parametrize(
    ("saved", "other", "words"),
    [
        (BundleRandom(100), BundleRandom(101), "size is 100 there and 101 here"),
        (BundleRandom(100), BundleRandom(100, world_size=2), "world_size is 1 there and 2 here"),
        (BundleRandom(100), BundleRandom(100, bundle_ratio=0.5), "bundle_ratio is 0.1 there and 0.5 here"),
        (BundleRandom(100), BundleRandom(100, alternate=False), "alternate is True there and False here"),
        (BundleRandom(100), BundleRandom(100, drop_last=True), "drop_last is False there and True here"),
        (BundleRandom(100), BundleRandom(100, pad=False), "pad is True there and False here"),
        (BundleRandom(100), WindowShuffle([100]), "order is 'BundleRandom' there and 'WindowShuffle' here"),
        (WindowShuffle([10, 20]), WindowShuffle([20, 10]), "groups is"),
        (WindowShuffle([10]), WindowShuffle([10], window=5), "window is 4 there and 5 here"),
        (WindowShuffle([10]), WindowShuffle([10], workers=2), "workers is 1 there and 2 here"),
        (LengthBucket([5, 6], budget=9), LengthBucket([6, 5], budget=9), "lengths is"),
        (LengthBucket([5, 6], budget=9), LengthBucket([5, 6], budget=8), "budget is 9 there and 8 here"),
        (LengthBucket([5], budget=9), LengthBucket([5], budget=9, interval=4), "interval is 8 there and 4 here"),
        (LengthBucket([5], budget=9), LengthBucket([5], budget=9, skip_long=True), "skip_long is False there"),
    ],
)
def test_a_state_of_a_different_order_is_refused(saved: Order[Any], other: Order[Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"the state does not fit: .*{words}"):
        other.load_state_dict(saved.state_dict())
    assert other.state_dict()["drawn"] == 0
    with pytest.raises(ValueError, match="it has no size"):
        other.load_state_dict({"seed": 0, "epoch": 0, "drawn": 3})


def test_a_state_of_one_rank_serves_all() -> None:
    orders = [BundleRandom(103, rank=rank, world_size=4) for rank in range(4)]
    whole = [list(order) for order in orders]
    drawn = [iter(order) for order in orders]
    before = [[next(each) for _ in range(9)] for each in drawn]
    state = orders[0].state_dict()
    for rank, order in enumerate(orders):
        order.load_state_dict(state)
        assert before[rank] + list(order) == whole[rank]


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
        (lambda: BundleRandom(-1), "size \\(-1\\)"),
        (lambda: BundleRandom(10, rank=2, world_size=2), "rank 2"),
        (lambda: WindowShuffle([1], worker=2, workers=2), "worker 2"),
        (lambda: WindowShuffle([1], batch_size=0), "batch size \\(0\\)"),
        (lambda: WindowShuffle([1], window=0), "window \\(0\\)"),
        (lambda: LengthBucket([5, 99], budget=50), "sample 1 has length 99"),
    ],
)
def test_what_makes_no_sense_is_refused(make: Callable[[], object], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        make()

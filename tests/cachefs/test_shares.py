"""Shares by owner: nobody has more than three quarters of what all need."""

import errno
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import outcome
import pytest
import trio
import trio.testing

from cachefs.errors import Busy
from cachefs.source import shares
from cachefs.source.call_pool import CallPool
from cachefs.source.shares import DAEMON, LEAST, Shares
from cachefs.source.single_flight import SingleFlight, in_task, unwrap
from tests.cachefs.test_tasks import Clock, run

SLOTS = 4
"""Of one owner. There are six, and another owner may have one of those that are left."""


@pytest.mark.promise("FA-2")
def test_nobody_has_more_than_three_quarters() -> None:
    places = Shares(100)
    counts = []
    for owner in range(4):  # each takes what it gets
        while not places.is_full(owner):
            places.take(owner)
        counts.append(places.taken_by(owner))
    assert counts == [75, 18, 5, 1] and places.taken == 99
    for _ in range(10):
        places.give(0)
    assert places.is_full(0) and not places.is_full(1) and not places.is_full(4)
    with pytest.raises(AssertionError):
        places.give(5)


def test_the_reserve_is_for_owners_that_have_next_to_nothing() -> None:
    """Before: four owners left nothing to the fifth."""
    places = Shares(100, 20)
    counts = []
    for owner in range(20):
        while not places.is_full(owner):
            places.take(owner)
        counts.append(places.taken_by(owner))
    assert counts == [75, 18, 5] + [LEAST] * 10 + [1] + [0] * 6 and places.taken == 119
    places.give(1)
    assert places.is_full(0) and not places.is_full(19)


def test_shares_for_each_leave_a_quarter() -> None:
    for most in (1, 2, 3, 12, 64):
        places = Shares.for_each(most)
        while not places.is_full(7):
            places.take(7)
        assert places.taken == most < places.total


def test_tasks_inherit_their_owner() -> None:
    async def main() -> None:
        seen: dict[int, int] = {}

        async def child(uid: int) -> None:
            seen[uid] = shares.owner()

        async def request(uid: int, nursery: trio.Nursery) -> None:
            shares.act_for(uid)
            await trio.lowlevel.checkpoint()
            nursery.start_soon(child, uid)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(request, 1000, nursery)
            nursery.start_soon(request, 2000, nursery)
        assert seen == {1000: 1000, 2000: 2000} and shares.owner() == DAEMON

    run(main)


def started(
    call_pool: CallPool, uid: int, function: Callable[[], Any], done: Callable[[outcome.Outcome[Any]], None]
) -> None:
    before = shares.owner()
    shares.act_for(uid)
    call_pool.start(function, done)
    shares.act_for(before)


@pytest.mark.parametrize("abandoned", [False, True])
def test_b5_calls_of_one_user_that_block_do_not_block_another(abandoned: bool) -> None:
    """Before: 64 calls that hang held all slots, and every other call waited, or failed at once."""

    async def main() -> None:
        clock = Clock()
        call_pool = CallPool(64, 5, clock=clock)
        gate = threading.Event()
        answers: list[outcome.Outcome[Any]] = []
        for _ in range(200):
            started(call_pool, 1, lambda: gate.wait(15), answers.append)
        if abandoned:
            clock.now += 6
            call_pool.abandon_overdue()
            assert call_pool.hanging.stuck == 64 and len(answers) == 200
        shares.act_for(2)
        for number in range(40):
            assert await call_pool.run(lambda number=number: number) == number
        shares.act_for(DAEMON)
        assert await call_pool.run(lambda: "of the daemon") == "of the daemon"
        gate.set()
        with trio.fail_after(10):
            while call_pool.hanging.stuck or len(answers) < 200:
                await trio.sleep(0.001)
        call_pool.close()

    run(main)


def test_who_wants_what_another_user_waits_for_does_not_wait_for_that_users_share() -> None:
    async def main() -> None:
        call_pool = CallPool(SLOTS, 60)
        flights: SingleFlight[str, str] = SingleFlight()
        gate = threading.Event()
        for _ in range(SLOTS):
            started(call_pool, 1, lambda: gate.wait(15), lambda _: None)
        shares.act_for(1)
        flight = flights.begin("name", partial(call_pool.start, lambda: "found"), unwrap)
        shares.act_for(2)
        with trio.fail_after(10):
            assert await flights.begin("name", partial(call_pool.start, lambda: "again"), unwrap).wait() == "found"
            assert await flight.wait() == "found" and not gate.is_set()
        gate.set()
        call_pool.close()

    run(main)


def test_every_call_of_work_that_several_users_wait_for_takes_a_slot_of_any_of_them() -> None:
    """Before: the calls of a listing, of which there are many, waited for the share of whoever had asked first."""

    async def main() -> None:
        call_pool = CallPool(SLOTS, 60)
        listings: SingleFlight[str, list[int]] = SingleFlight()
        inner: SingleFlight[int, int] = SingleFlight()
        gate = threading.Event()
        for _ in range(SLOTS):
            started(call_pool, 1, lambda: gate.wait(15), lambda _: None)

        async def listing() -> list[int]:
            found = [await call_pool.run(lambda number=number: number) for number in range(3)]
            return [*found, await inner.begin(7, partial(call_pool.start, lambda: 7), unwrap).wait()]

        async with trio.open_nursery() as nursery:
            shares.act_for(1)
            first = listings.begin("directory", in_task(nursery, listing), unwrap)
            await trio.testing.wait_all_tasks_blocked()
            shares.act_for(2)
            with trio.fail_after(10):
                assert await listings.begin("directory", in_task(nursery, listing), unwrap).wait() == [0, 1, 2, 7]
                assert await first.wait() == [0, 1, 2, 7] and not gate.is_set()
            gate.set()
        call_pool.close()

    run(main)


def test_a_call_that_waits_takes_the_first_slot_that_one_of_its_users_gets() -> None:
    async def main() -> None:
        call_pool = CallPool(SLOTS, 60)
        flights: SingleFlight[str, str] = SingleFlight()
        gates = [threading.Event(), threading.Event()]
        for number in range(SLOTS + 1):  # one user has all that it may have, the other what that leaves
            uid = 1 if number < SLOTS else 2
            started(call_pool, uid, partial(gates[uid - 1].wait, 15), lambda _: None)
        shares.act_for(1)
        flight = flights.begin("name", partial(call_pool.start, lambda: "found"), unwrap)
        async with trio.open_nursery() as nursery:

            async def second() -> None:
                shares.act_for(2)
                assert await flight.wait() == "found"

            nursery.start_soon(second)
            await trio.testing.wait_all_tasks_blocked()
            gates[1].set()
            with trio.fail_after(10):
                assert await flight.wait() == "found" and not gates[0].is_set()
        gates[0].set()
        with trio.fail_after(10):
            assert await call_pool.run(lambda: "again") == "again"  # nothing is left in a queue
        call_pool.close()

    run(main)


def test_work_that_joins_other_work_brings_all_who_wait_for_it() -> None:
    async def main() -> None:
        call_pool = CallPool(SLOTS, 60)
        listings: SingleFlight[str, str] = SingleFlight()
        names: SingleFlight[str, str] = SingleFlight()
        gate = threading.Event()
        for _ in range(SLOTS):
            started(call_pool, 1, lambda: gate.wait(15), lambda _: None)

        async def listing() -> str:
            return await names.begin("name", partial(call_pool.start, lambda: "found"), unwrap).wait()

        async with trio.open_nursery() as nursery:
            shares.act_for(1)
            names.begin("name", partial(call_pool.start, lambda: "found"), unwrap)
            listings.begin("directory", in_task(nursery, listing), unwrap)
            await trio.testing.wait_all_tasks_blocked()
            shares.act_for(2)
            with trio.fail_after(10):
                assert await listings.begin("directory", in_task(nursery, listing), unwrap).wait() == "found"
            assert not gate.is_set()
            gate.set()
        call_pool.close()

    run(main)


def test_owners_that_wait_take_turns() -> None:
    async def main() -> None:
        call_pool = CallPool(1, 60)  # two slots in all
        gate = threading.Event()
        order: list[int] = []
        for uid in (1, 2):
            started(call_pool, uid, lambda: gate.wait(15), lambda _: None)
        for uid in (1, 1, 1, 2, 2, 3):
            started(call_pool, uid, lambda: None, lambda _, uid=uid: order.append(uid))
        gate.set()
        while len(order) < 6:
            await trio.sleep(0.001)
        assert Counter(order[:3]) == {1: 1, 2: 1, 3: 1}
        call_pool.close()

    run(main)


def test_b7_a_file_that_is_leased_is_tried_again_with_pauses_and_without_a_slot() -> None:
    """Before: each call looked at the file again and again, as fast as it could, in its slot."""

    async def main() -> None:
        call_pool = CallPool(1, 5)
        free = threading.Event()
        tries = 0

        def leased() -> str:
            nonlocal tries
            tries += 1
            if not free.is_set():
                raise Busy
            return "opened"

        answers: list[outcome.Outcome[str]] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(call_pool.watch)
            call_pool.start(leased, answers.append)
            for number in range(20):  # they would wait for a slot for ever
                assert await call_pool.run(lambda number=number: number) == number
            while tries < 5:
                await trio.sleep(0.001)
            assert not answers and tries < 1000
            free.set()
            while not answers:
                await trio.sleep(0.001)
            assert answers[0].unwrap() == "opened"
            nursery.cancel_scope.cancel()
        call_pool.close()

    run(main)


def test_b7_calls_that_wait_for_leases_try_the_less_often_the_more_there_are() -> None:
    """Before: each was made ten times a second, so that a few users with leases kept the processor busy."""

    async def main() -> None:
        clock = Clock()
        call_pool = CallPool(64, 1000, clock=clock)
        tries: Counter[int] = Counter()

        def leased(uid: int) -> None:
            tries[uid] += 1
            raise Busy

        for _ in range(300):
            started(call_pool, 1, partial(leased, 1), lambda _: None)
        started(call_pool, 2, partial(leased, 2), lambda _: None)
        for _ in range(400):  # twenty seconds
            await trio.testing.wait_all_tasks_blocked(0.001)
            clock.now += 0.05
            call_pool.retry_due()
        assert 300 < tries[1] < 6000 and tries[2] > 100
        call_pool.close()

    run(main)


@pytest.mark.promise("FA-6")
def test_b7_a_lease_that_is_never_given_up_ends_in_a_time_out() -> None:
    async def main() -> None:
        call_pool = CallPool(1, 0.3)

        def leased() -> None:
            raise Busy

        async with trio.open_nursery() as nursery:
            nursery.start_soon(call_pool.watch)
            with pytest.raises(OSError, match="timed out") as caught:
                await call_pool.run(leased)
            assert caught.value.errno == errno.ETIMEDOUT
            assert await call_pool.run(lambda: 1) == 1 and call_pool.hanging.stuck == 0
            nursery.cancel_scope.cancel()
        call_pool.close()

    run(main)


async def until(condition: Callable[[], object]) -> None:
    with trio.fail_after(10):
        while not condition():
            await trio.sleep(0.001)


def test_a_question_that_hangs_is_asked_once_and_again_when_its_call_has_returned() -> None:
    async def main() -> None:
        clock = Clock()
        call_pool = CallPool(4, 5, clock=clock)
        gate, asked, answers = threading.Event(), [], []

        def ask() -> None:
            asked.append(1)
            gate.wait(15)

        call_pool.start(ask, answers.append, question="name")
        await until(lambda: asked)
        clock.now += 6
        call_pool.abandon_overdue()
        assert call_pool.hanging.stuck == 1 and len(answers) == 1
        for _ in range(20):
            call_pool.start(ask, answers.append, question="name")
        assert await call_pool.run(lambda: "another", question="other") == "another"
        assert len(asked) == 1 and len(answers) == 1
        clock.now += 3
        call_pool.start(ask, answers.append, question="name")
        clock.now += 2.5
        call_pool.abandon_overdue()  # 20 of them, each at its own deadline; the last one waits on
        assert len(answers) == 21 and call_pool.hanging.stuck == 1 and len(asked) == 1
        gate.set()
        await until(lambda: len(answers) == 22)
        assert call_pool.hanging.stuck == 0 and len(asked) == 2
        assert answers[-1].unwrap() is None
        call_pool.close()

    run(main)


def test_a_question_that_hangs_is_asked_again_when_it_has_hung_twice_as_long() -> None:
    """Its call may never return, although the source answers again."""

    async def main() -> None:
        clock = Clock()
        call_pool = CallPool(64, 5, clock=clock)
        gate, asked, answers = threading.Event(), [], []

        def ask() -> None:
            asked.append(1)
            gate.wait(15)

        for _ in range(1000):
            call_pool.start(ask, answers.append, question="name")
            clock.now += 1
            call_pool.abandon_overdue()
        await until(lambda: len(asked) == call_pool.hanging.stuck)
        assert 5 <= len(asked) <= 11
        gate.set()
        await until(lambda: not call_pool.hanging.stuck)
        call_pool.close()

    run(main)


def test_a_source_that_is_mounted_anew_is_asked_at_once_what_hung() -> None:
    async def main() -> None:
        clock = Clock()
        call_pool = CallPool(4, 5, clock=clock)
        gate, answers = threading.Event(), []
        call_pool.start(lambda: gate.wait(15), answers.append, question="name")
        clock.now += 6
        call_pool.abandon_overdue()
        call_pool.start(lambda: "anew", answers.append, question="name")
        call_pool.suspend()
        call_pool.resume(anew=True)
        await until(lambda: len(answers) == 2)
        assert answers[-1].unwrap() == "anew" and call_pool.hanging.stuck == 1
        gate.set()
        await until(lambda: not call_pool.hanging.stuck)
        call_pool.close()

    run(main)


def test_calls_that_can_be_left_out_are_not_made_when_a_quarter_of_a_users_slots_hangs() -> None:
    async def main() -> None:
        clock = Clock()
        call_pool = CallPool(16, 5, clock=clock)
        gate = threading.Event()
        shares.act_for(1)
        for number in range(4):
            assert call_pool.hanging.may_risk()
            call = partial(gate.wait, 15)
            call_pool.start(call, lambda _: None)
            assert call_pool.give_up(call, number) and not call_pool.give_up(call, number)
        assert not call_pool.hanging.may_risk() and call_pool.hanging.stuck == 4
        shares.act_for(2)
        assert call_pool.hanging.may_risk()
        gate.set()
        await until(lambda: not call_pool.hanging.stuck)
        call_pool.close()

    run(main)

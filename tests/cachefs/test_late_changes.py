"""A change that was given up, and is made later, does not undo one that was acknowledged meanwhile."""

import errno
import subprocess
import threading
from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing

from cachefs.source.call_pool import CallPool
from cachefs.source.calls.late_changes import Change, LateChanges

pytestmark = pytest.mark.promise("FA-42")
Scenario = Callable[[CallPool, LateChanges, trio.Nursery], Awaitable[None]]


def run(scenario: Scenario, timeout_s: float = 1.0) -> None:
    async def main() -> None:
        pool = CallPool(4, timeout_s)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pool.watch)
            await scenario(pool, LateChanges(pool.wait), nursery)
            nursery.cancel_scope.cancel()
        pool.close()

    trio.run(main)


async def make(pool: CallPool, late: LateChanges, numbers: tuple[int, ...], function: Callable[[], object]) -> int:
    """The errno; 0: it was made."""
    try:
        async with late.changing(*numbers) as change:
            await pool.run(change(function), once=True)
    except OSError as error:
        return error.errno or 0
    return 0


def test_a_change_waits_for_a_late_one_of_the_same_object() -> None:
    made, gate = list[str](), threading.Event()

    async def scenario(pool: CallPool, late: LateChanges, nursery: trio.Nursery) -> None:
        assert await make(pool, late, (7,), lambda: gate.wait() and made.append("late")) == errno.ETIMEDOUT
        assert await make(pool, late, (8,), lambda: made.append("of another object")) == 0
        assert await make(pool, late, (9, 7), lambda: made.append("given up")) == errno.ETIMEDOUT
        async with trio.open_nursery() as both:
            both.start_soon(make, pool, late, (7, 9), lambda: made.append("after it"))
            both.start_soon(make, pool, late, (7,), lambda: made.append("last"))
            await trio.testing.wait_all_tasks_blocked()
            gate.set()

    run(scenario)
    assert sorted(made) == sorted(["of another object", "late", "after it", "last"])
    assert made.index("late") < min(made.index("after it"), made.index("last"))


def test_changes_of_unknown_objects_do_not_wait_for_each_other() -> None:
    gate = threading.Event()

    async def scenario(pool: CallPool, late: LateChanges, nursery: trio.Nursery) -> None:
        assert await make(pool, late, (7, 0), gate.wait) == errno.ETIMEDOUT
        assert await make(pool, late, (8, 0), lambda: None) == 0
        gate.set()

    run(scenario)


def test_a_change_that_was_given_up_before_it_began_is_not_made() -> None:
    made = list[int]()
    change = Change(lambda: None)
    call = change(lambda: made.append(1))
    assert not change.give_up()
    with pytest.raises(InterruptedError):
        call()
    assert not made


def test_no_change_is_made_before_killed_daemons_have_ended() -> None:
    async def scenario(pool: CallPool, late: LateChanges, nursery: trio.Nursery) -> None:
        late.follow([process.pid], nursery)
        assert await make(pool, late, (7,), lambda: None) == errno.ETIMEDOUT
        process.kill()
        assert await make(pool, late, (7,), lambda: None) == 0

    with subprocess.Popen(["sleep", "600"]) as process:
        run(scenario)


def test_the_end_of_a_mount_does_not_wait_for_late_changes() -> None:
    gate = threading.Event()

    async def scenario(pool: CallPool, late: LateChanges, nursery: trio.Nursery) -> None:
        with trio.move_on_after(0.1):
            await make(pool, late, (7,), gate.wait)
        pool.hurry(0.1)
        assert await make(pool, late, (7,), lambda: None) == errno.ETIMEDOUT
        gate.set()

    run(scenario, timeout_s=600)

"""One call per key at a time; whoever asks meanwhile gets the same answer, or the same error.

A flight belongs to nobody: a waiter that goes away neither cancels nor poisons it.
"""

import copy
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, Generic, TypeVar

import outcome
import trio

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
V = TypeVar("V")

Done = Callable[[outcome.Outcome[T]], None]
Join = Callable[[], None] | None
Start = Callable[[Done[T]], Join]
"""Starts something that will call its argument, on the trio thread and not before this has returned.

It returns what is called by each who waits, if that makes a difference (SourceSlots.start).
"""


class Flight(Generic[V]):
    __slots__ = ("_done", "_outcome", "join")

    def __init__(self) -> None:
        self._done = trio.Event()
        self._outcome: outcome.Outcome[V] | None = None
        self.join: Join = None

    def land(self, result: outcome.Outcome[V]) -> None:
        self._outcome = result
        self._done.set()

    async def wait(self) -> V:
        if self.join is not None and self._outcome is None:
            self.join()
        await self._done.wait()
        if isinstance(self._outcome, outcome.Value):  # not unwrap(): that may be called once only
            value: V = self._outcome.value
            return value
        assert isinstance(self._outcome, outcome.Error)
        raise copy.copy(self._outcome.error)  # each waiter gets a traceback of its own


class SingleFlight(Generic[K, V]):
    def __init__(self) -> None:
        self._flights: dict[K, Flight[V]] = {}

    def flying(self, key: K) -> Flight[V] | None:
        return self._flights.get(key)

    def begin(self, key: K, start: Start[Any], finish: Callable[[outcome.Outcome[Any]], V]) -> Flight[V]:
        """Join the flight of `key`, or start it. `finish` makes the answer of what `start` reports, or raises."""
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = Flight()

            def done(answer: outcome.Outcome[Any]) -> None:
                del self._flights[key]
                flight.land(outcome.capture(finish, answer))

            flight.join = start(done)
        return flight


def unwrap(answer: outcome.Outcome[T]) -> T:
    return answer.unwrap()


def in_task(nursery: trio.Nursery, function: Callable[[], Awaitable[T]]) -> Start[T]:
    """Start an async function in a task of its own."""

    async def run(done: Done[T]) -> None:
        done(await outcome.acapture(function))

    def start(done: Done[T]) -> None:
        nursery.start_soon(run, done)

    return start

"""One call per key at a time; later requests for the key get the same answer, or the same error.

A flight does not belong to one request: a waiter that is cancelled does not affect it. Its calls to the source use the
shares of all users that wait for it (shares.Party).

A change by this mount overtakes the flights that began before it: their answers may be from before or after the change.
Such an answer is not recorded, and the waiters ask again.
"""

import copy
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, Generic, TypeVar

import outcome
import trio

from cachefs.source import shares
from cachefs.source.shares import Party

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
V = TypeVar("V")

Done = Callable[[outcome.Outcome[T]], None]
Start = Callable[[Done[T]], None]
"""Starts work that calls the argument with its outcome, on the trio thread and not before `Start` has returned."""


class Overtaken(Exception):
    """A flight was overtaken by a change. Raised by `Flight.wait`; the caller asks again."""


class Flight(Generic[V]):
    __slots__ = ("_done", "_outcome", "_party", "is_overtaken")

    def __init__(self, party: Party) -> None:
        self.is_overtaken = False
        self._party = party
        self._done = trio.Event()
        self._outcome: outcome.Outcome[V] | None = None

    def land(self, result: outcome.Outcome[V]) -> None:
        self._outcome = result
        self._done.set()

    async def wait(self) -> V:
        """What `finish` returns or raises; raises Overtaken."""
        if self._outcome is None:
            with shares.party().waits_for(self._party):
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

    def joinable(self) -> list[K]:
        """Keys of the flights that are under way."""
        return list(self._flights)

    def begin(self, key: K, start: Start[Any], finish: Callable[[outcome.Outcome[Any]], V]) -> Flight[V]:
        """Join the flight of `key`, or start one. `finish` converts the outcome of `start` to the answer, or raises."""
        flight = self._flights.get(key)
        if flight is None:

            def done(answer: outcome.Outcome[Any]) -> None:
                if new.is_overtaken:
                    new.land(outcome.Error(Overtaken()))
                else:
                    del self._flights[key]
                    new.land(outcome.capture(finish, answer))

            with shares.new_party() as party:
                flight = new = self._flights[key] = Flight(party)
                start(done)
        return flight

    async def ask(self, key: K, start: Start[Any], finish: Callable[[outcome.Outcome[Any]], V]) -> V:
        """Begin or join, and wait. Ask again where the source may have refused root before this request joined."""
        try:
            return await self.begin(key, start, finish).wait()
        except PermissionError:
            return await self.begin(key, start, finish).wait()

    def overtake(self, key: K) -> None:
        flight = self._flights.pop(key, None)
        if flight is not None:
            flight.is_overtaken = True


def unwrap(answer: outcome.Outcome[T]) -> T:
    return answer.unwrap()


def in_task(nursery: trio.Nursery, function: Callable[[], Awaitable[T]]) -> Start[T]:
    """Start an async function in a task of its own."""

    async def run(done: Done[T]) -> None:
        done(await outcome.acapture(function))

    def start(done: Done[T]) -> None:
        nursery.start_soon(run, done)

    return start

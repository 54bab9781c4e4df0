"""Fairness: which call gets the next slot.

Slots are shared by owner (shares.py), so that calls of one user that block do not block other users. A call that
several users wait for is in the queue of each of them, and takes the first slot that one of them gets. Owners take
turns.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any

from cachefs.source.calls.call import Call
from cachefs.source.shares import Shares


class FairQueue:
    def __init__(self, slots: Shares, begin: Callable[[Call[Any]], None], deadline: Callable[[], float]) -> None:
        """`begin`: begins a call, which takes a slot of its owner. `deadline`: of a call that begins now."""
        # dependencies
        self._slots = slots
        self._begin = begin
        self._deadline = deadline
        # state
        self._waiting: dict[int, OrderedDict[Call[Any], None]] = {}
        """Owner → calls that wait for a slot. The owner that is next comes first."""

    def __iter__(self) -> Iterator[Call[Any]]:
        """Waiting calls, once for each of their owners."""
        return chain.from_iterable(self._waiting.values())

    def begin_or_wait(self, call: Call[Any]) -> None:
        """A probe needs no slot."""
        if call.probe:
            self._begin(call)
            return
        for owner in call.party.owners:
            if not self._slots.is_full(owner):
                call.owner = owner
                self._begin(call)
                return
        for owner in call.party.owners:
            self._wait(call, owner)
        call.party.waiting[call] = partial(self._joined, call)

    def _wait(self, call: Call[Any], owner: int) -> None:
        self._waiting.setdefault(owner, OrderedDict())[call] = None

    def _joined(self, call: Call[Any], owner: int) -> None:
        """Another owner has joined a waiting call, and has perhaps a free slot for it."""
        call.deadline = self._deadline()
        if self._slots.is_full(owner):
            self._wait(call, owner)
        else:
            self._leave_and_begin(call, owner)

    def _leave_and_begin(self, call: Call[Any], owner: int) -> None:
        self.leave(call)
        call.owner = owner
        self._begin(call)

    def leave(self, call: Call[Any]) -> bool:
        """False: it is not in the queue."""
        if call.party.waiting.pop(call, None) is None:
            return False
        for owner in call.party.owners:
            calls = self._waiting.get(owner)
            if calls is not None:
                calls.pop(call, None)
                if not calls:
                    del self._waiting[owner]
        return True

    def begin_waiting(self) -> None:
        """Give free slots to calls that wait, one owner after the other."""
        found = True
        while found:
            found = False
            for owner in list(self._waiting):
                calls = self._waiting.get(owner)
                if calls is None or self._slots.is_full(owner):
                    continue
                self._leave_and_begin(next(iter(calls)), owner)
                found = True
                if calls:
                    self._waiting[owner] = self._waiting.pop(owner)  # behind the others

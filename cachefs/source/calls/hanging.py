"""Calls that hang: what becomes of an owner whose calls hang, and of a question that hangs.

A call that was abandoned keeps its slot until it returns. When all slots of an owner are held by such calls, its new
ones fail at once, but for one probe a second, so that the mount notices when the source is back.

A question that hangs is asked once. `question` says what a call asks, such as the attributes of one name. While a call
that was abandoned has not returned, others that ask the same wait for its return, without a slot, and are made then. So
a name that hangs holds one slot however often it is looked at. It is asked again when it has hung twice as long,
because the call may never return, although the name answers again.
"""

import math
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

from cachefs.source.calls.call import Call
from cachefs.source.shares import Party, Shares

RISK_SHARE = 4
"""A call that can be left out is not made for users of whose slots one in so many hangs."""
PROBE_INTERVAL_S = 1.0
MAX_PROBES = 4


@dataclass(slots=True)
class _Hang:
    """A question that has not been answered in time, and whose call has not returned."""

    since: float
    again_at: float = 0.0
    """When a call may ask again."""
    waiting: dict[Call[Any], None] = field(default_factory=dict)
    """Calls that ask the same."""

    def ask_later(self, now: float, timeout_s: float) -> None:
        self.again_at = now + max(timeout_s, now - self.since)


class Hanging:
    """Times are those of the pool's clock."""

    def __init__(self, slots: Shares, most: int) -> None:
        """`most`: how many of the slots one owner alone may have."""
        # dependencies
        self._slots = slots
        # constants
        self._most_at_risk = max(1, most // RISK_SHARE)
        # state
        self.stuck = 0
        """How many calls were abandoned and have not returned."""
        self._stuck: Counter[int] = Counter()
        self._questions: dict[Hashable, _Hang] = {}
        self._probes: Counter[int] = Counter()
        self._next_probe: dict[int, float] = {}

    def __iter__(self) -> Iterator[Call[Any]]:
        """Calls that wait for one that asks the same."""
        return (call for hang in self._questions.values() for call in hang.waiting)

    # --- questions -------------------------------------------------------------------------------------------------

    def may_ask(self, question: Hashable, now: float, timeout_s: float) -> bool:
        """False while a call that asks this hangs. True now and then, for a caller that is going to ask now."""
        hang = self._questions.get(question)
        if hang is None:
            return True
        if now < hang.again_at:
            return False
        hang.ask_later(now, timeout_s)
        return True

    def wait(self, call: Call[Any]) -> None:
        """A call that asks what hangs."""
        self._questions[call.question].waiting[call] = None

    def leave(self, call: Call[Any]) -> None:
        del self._questions[call.question].waiting[call]

    def forget_questions(self) -> list[Call[Any]]:
        """All of them may be asked. The calls that waited."""
        waiting = list(self)
        self._questions = {}
        return waiting

    # --- owners ----------------------------------------------------------------------------------------------------

    def abandoned(self, call: Call[Any], now: float, timeout_s: float) -> None:
        call.abandoned = True
        self.stuck += 1
        self._stuck[call.owner] += 1
        if call.question is not None:
            self._questions.setdefault(call.question, _Hang(call.began)).ask_later(now, timeout_s)

    def returned(self, call: Call[Any]) -> list[Call[Any]]:
        """A call that was abandoned. The calls that waited for it."""
        self.stuck -= 1
        self._stuck[call.owner] -= 1
        hang = self._questions.pop(call.question, None) if call.question is not None else None
        return [] if hang is None else list(hang.waiting)

    def is_stuck(self, owner: int) -> bool:
        """May this owner make no more calls, and is all that it has stuck?"""
        full = self._slots.is_full(owner)
        return full and self.stuck > 0 and self._stuck[owner] == self._slots.held_by(owner)

    def may_risk(self, party: Party) -> bool:
        """Not when many slots hang of all who wait for it."""
        return any(self._stuck[owner] < self._most_at_risk for owner in party.owners)

    def begin_probe(self, call: Call[Any], now: float) -> bool:
        """False: its owner has probes enough."""
        if now < self._next_probe.get(call.owner, -math.inf) or self._probes[call.owner] >= MAX_PROBES:
            return False
        self._next_probe[call.owner] = now + PROBE_INTERVAL_S
        self._probes[call.owner] += 1
        call.probe = True
        return True

    def end_probe(self, call: Call[Any]) -> None:
        if call.probe:
            self._probes[call.owner] -= 1
            call.probe = False

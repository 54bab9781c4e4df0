"""Calls that hang: the limits for owners whose calls hang, and for questions that hang.

An abandoned call keeps its slot until it returns. When such calls have all slots of an owner, its new calls fail at
once, except for one probe a second, by which the mount notices that the source is back.

A question that hangs is asked once. `question` identifies what a call asks, such as the attributes of one name. Until
an abandoned call returns, others with the same question wait without a slot, and are made afterwards. So a name that
hangs occupies one slot however often it is looked up. The question is asked again when it has hung twice as long,
because the call may never return although the name answers again.
"""

import math
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

from cachefs.source import shares
from cachefs.source.calls.call import Call
from cachefs.source.shares import Shares

RISK_SHARE = 4
"""A call that can be omitted is not made for users with more than 1 / RISK_SHARE of their slots hanging."""
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
        """`most`: how many of the slots one owner may have if it is alone."""
        # dependencies
        self._slots = slots
        # constants
        self._most_at_risk = max(1, most // RISK_SHARE)
        # state
        self.stuck = 0
        """The number of calls that were abandoned and have not returned."""
        self._stuck: Counter[int] = Counter()
        self._questions: dict[Hashable, _Hang] = {}
        self._probes: Counter[int] = Counter()
        self._next_probe: dict[int, float] = {}

    def __iter__(self) -> Iterator[Call[Any]]:
        """Calls that wait for one that asks the same."""
        return (call for hang in self._questions.values() for call in hang.waiting)

    # --- questions -------------------------------------------------------------------------------------------------

    def may_ask(self, question: Hashable, now: float, timeout_s: float) -> bool:
        """As in CallPool."""
        hang = self._questions.get(question)
        if hang is None:
            return True
        if now < hang.again_at:
            return False
        hang.ask_later(now, timeout_s)
        return True

    def wait(self, call: Call[Any]) -> None:
        """Add a call whose question hangs."""
        self._questions[call.question].waiting[call] = None

    def leave(self, call: Call[Any]) -> None:
        del self._questions[call.question].waiting[call]

    def forget_questions(self) -> list[Call[Any]]:
        """Allow all questions again, and return the calls that waited."""
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
        """An abandoned call has returned. Returns the calls that waited for it."""
        self.stuck -= 1
        self._stuck[call.owner] -= 1
        hang = self._questions.pop(call.question, None) if call.question is not None else None
        return [] if hang is None else list(hang.waiting)

    def is_stuck(self, owner: int) -> bool:
        """Has this owner no free slot, and are all calls in its slots stuck?"""
        full = self._slots.is_full(owner)
        return full and self.stuck > 0 and self._stuck[owner] == self._slots.taken_by(owner)

    def may_risk(self) -> bool:
        """May a call be made that can be omitted? Not if many slots of all its owners hang."""
        return any(self._stuck[owner] < self._most_at_risk for owner in shares.party().owners)

    def begin_probe(self, call: Call[Any], now: float) -> bool:
        """False: its owner has enough probes."""
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

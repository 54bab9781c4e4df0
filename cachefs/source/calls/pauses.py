"""Calls that pause without a slot, and are repeated until their deadline.

A file cannot be opened as long as another process has a lease on it (`Busy`), and the machine may refuse a thread. Each
pause of a call is twice as long as the one before.
"""

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from cachefs.source.calls.call import Call

MAX_PAUSE_S = 0.1
MAX_RETRIES_PER_S = 100
"""Of one owner. The more of its calls pause, the longer they pause, so that they do not load the processor."""


class Pauses:
    def __init__(self) -> None:
        self._pausing: dict[Call[Any], None] = {}
        self._pausing_of: Counter[int] = Counter()
        self._retries: list[tuple[float, int, Call[Any]]] = []
        """A heap: when calls are repeated. Some of them may have been abandoned meanwhile."""
        self._numbers = itertools.count()

    def __iter__(self) -> Iterator[Call[Any]]:
        return iter(self._pausing)

    @property
    def next_s(self) -> float:
        """When the next pause is over."""
        return self._retries[0][0] if self._retries else math.inf

    def add(self, call: Call[Any], now: float) -> None:
        self._pausing[call] = None
        self._pausing_of[call.owner] += 1
        pause_s = max(call.pause_s, self._pausing_of[call.owner] / MAX_RETRIES_PER_S)
        heapq.heappush(self._retries, (now + pause_s, next(self._numbers), call))
        call.pause_s = min(2 * call.pause_s, MAX_PAUSE_S)

    def end(self, call: Call[Any]) -> bool:
        """False: it does not pause."""
        if call not in self._pausing:
            return False
        del self._pausing[call]
        self._pausing_of[call.owner] -= 1
        if not self._pausing_of[call.owner]:
            del self._pausing_of[call.owner]
        return True

    def take_due(self, now: float) -> Iterator[Call[Any]]:
        """Calls whose pause is over."""
        while self._retries and self._retries[0][0] <= now:
            call = heapq.heappop(self._retries)[2]
            if self.end(call):
                yield call

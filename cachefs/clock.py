"""The two clocks that decide what is believed, and for how long. Whoever tests what time does brings others."""

import time
from collections.abc import Callable
from typing import NamedTuple

from cachefs.attributes import NANOSECONDS


class Clock(NamedTuple):
    monotonic_ns: Callable[[], int] = time.monotonic_ns
    realtime_ns: Callable[[], int] = time.time_ns
    """Compared with the times of the source's files."""

    def monotonic_s(self) -> float:
        return self.monotonic_ns() / NANOSECONDS


SYSTEM = Clock()

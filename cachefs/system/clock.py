"""The two clocks that decide what is believed, and for how long. Whoever tests what time does brings others.

The time of day says how old a file is (age.py), and until when permissions are known to have held (permissions.py).
Where it runs ahead of the source's, data that are being written seem old enough to be cached, and permissions of before
seem to be those of now. A machine's clock may be set forward, rightly or by mistake; a source's cannot be asked. So
`TimeOfDay` is never later than the time at which the daemon was started and what has passed since then. What that
costs, where the new time is right: files that changed less than so long ago count as young, and are not cached. A new
daemon (`cachefs restart`) begins with what the clock says.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

NANOSECONDS = 1_000_000_000


def boot_time_ns() -> int:
    """Since the machine was started, the time in which it was suspended included. Nobody can set it."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class TimeOfDay:
    def __init__(self) -> None:
        self.offset_ns = time.time_ns() - boot_time_ns()
        """The time of day, less the time since the machine was started: as it was at the start."""

    def now_ns(self) -> int:
        return min(time.time_ns(), boot_time_ns() + self.offset_ns)

    def ahead_ns(self) -> int:
        """How far the clock is ahead of what is believed."""
        return time.time_ns() - self.now_ns()


TIME_OF_DAY = TimeOfDay()
"""Of this process."""


class Clock(NamedTuple):
    monotonic_ns: Callable[[], int] = time.monotonic_ns
    realtime_ns: Callable[[], int] = TIME_OF_DAY.now_ns
    """Compared with the times of the source's files."""

    def monotonic_s(self) -> float:
        return self.monotonic_ns() / NANOSECONDS


SYSTEM = Clock()

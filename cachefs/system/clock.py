"""The two clocks that validity depends on. Tests replace them.

The time of day determines how old a file is (validity.py), and until when permissions are known to be valid
(permissions.py). If it is ahead of the source's clock, data that are being written seem old enough to be cached, and
old permissions seem to be the present ones. The clock of a machine may be set forward, correctly or by mistake, and the
clock of the source cannot be read. Therefore `TimeOfDay` is never later than the time at which the daemon started plus
the time that has passed since then. If the new time is correct, this has a cost: files that changed less than the
difference ago count as young, and are not cached. A new daemon (`cachefs restart`) begins with the clock's time.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

NANOSECONDS = 1_000_000_000


def boot_time_ns() -> int:
    """Time since the machine was started, including suspension. This clock cannot be set."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class TimeOfDay:
    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Begin with the clock's time."""
        self.offset_ns = time.time_ns() - boot_time_ns()
        """The time of day at the start, minus the time since the machine was started."""

    def now_ns(self) -> int:
        return min(time.time_ns(), boot_time_ns() + self.offset_ns)

    def ahead_ns(self) -> int:
        """How far the clock is ahead of `now_ns`."""
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

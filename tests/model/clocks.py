"""Clocks that a test moves, and a source whose files live by them."""

import time
from bisect import bisect_right

import trio.testing

from cachefs.source.source import Source
from cachefs.system.clock import NANOSECONDS, Clock
from cachefs.system.stat import Stat


class Clocks:
    """Time passes as on the real clocks, and in jumps besides. What the kernel stamps on files it stamps by the real
    clock: `shown_ns` says what time that was here, so that a file grows older with each jump."""

    def __init__(self) -> None:
        self.trio = trio.testing.MockClock(rate=1.0)
        self._jumps: list[tuple[int, int]] = [(0, 0)]
        """(real time of a jump, what is added since then)"""
        self.clock = Clock(self.monotonic_ns, self.realtime_ns)

    def jump(self, seconds: float) -> None:
        self._jumps.append((time.time_ns(), self._jumps[-1][1] + int(seconds * NANOSECONDS)))
        self.trio.jump(seconds)

    def monotonic_ns(self) -> int:
        return time.monotonic_ns() + self._jumps[-1][1]

    def realtime_ns(self) -> int:
        return self.shown_ns(time.time_ns())

    def shown_ns(self, real_ns: int) -> int:
        """Monotonic: what was changed earlier has an earlier time here, too."""
        return real_ns + self._jumps[bisect_right(self._jumps, real_ns, key=lambda jump: jump[0]) - 1][1]


class AgeingSource(Source):
    """A directory whose times are those of `Clocks`."""

    def __init__(self, root_fd: int, clocks: Clocks) -> None:
        self._clocks = clocks
        super().__init__(root_fd, clock=clocks.clock)

    def stat(self, fd: int, name: bytes = b"", *, ask: bool = False) -> Stat:
        began_ns = self._clocks.monotonic_ns()
        return self._shown(super().stat(fd, name, ask=ask))._replace(began_ns=began_ns)

    def _shown(self, now: Stat) -> Stat:
        shown = self._clocks.shown_ns
        return now._replace(mtime_ns=shown(now.mtime_ns), ctime_ns=shown(now.ctime_ns), btime_ns=shown(now.btime_ns))

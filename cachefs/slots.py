"""Calls to the source run in threads, in a bounded number of slots, each with a deadline.

A parallel filesystem that hangs must not take the mount with it (hazard 20). A call that outlives its deadline is
abandoned: its request is answered ETIMEDOUT, its thread goes on and keeps its slot until the call returns. When all
slots are held by such calls new ones fail at once, but for one probe a second, so that the mount notices when the
source is back. A hit never comes here.
"""

import errno
import os
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import trio

T = TypeVar("T")

PROBE_INTERVAL_S = 1.0
MAX_PROBES = 4


class _Call(Generic[T]):
    """One call. Decides, between its thread and its waiter, who cleans up."""

    def __init__(self, function: Callable[[], T], discard: Callable[[T], object] | None, slots: "SourceSlots") -> None:
        self._function = function
        self._discard = discard
        self._slots = slots
        self._lock = threading.Lock()
        self._started = False
        self._finished = False
        self._abandoned = False

    def __call__(self) -> T:
        with self._lock:
            if self._abandoned:  # given up before a thread had taken it
                raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
            self._started = True
        failed = True
        try:
            result = self._function()
            failed = False
        finally:
            with self._lock:
                self._finished = True
                abandoned = self._abandoned
            if abandoned:
                self._slots.returned()
        if abandoned and not failed and self._discard is not None:
            self._discard(result)
        return result

    def abandon(self) -> None:
        with self._lock:
            if self._finished:
                return
            self._abandoned = True
            if self._started:
                self._slots.stuck_in_thread()


class SourceSlots:
    """`await slots.run(function)`: the result, the function's error, or OSError ETIMEDOUT."""

    def __init__(self, slots: int, timeout_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._limiter = trio.CapacityLimiter(slots)
        self._probes = trio.CapacityLimiter(MAX_PROBES)
        self._lock = threading.Lock()
        self._stuck = 0
        self._next_probe = 0.0
        self.timeouts = 0

    @property
    def stuck(self) -> int:
        """How many calls were abandoned and have not returned."""
        return self._stuck

    def stuck_in_thread(self) -> None:
        with self._lock:
            self._stuck += 1

    def returned(self) -> None:
        with self._lock:
            self._stuck -= 1

    async def run(self, function: Callable[[], T], *, discard: Callable[[T], object] | None = None) -> T:
        """`discard` is given the result of an abandoned call, such as a descriptor to close."""
        limiter = self._limiter
        if self._stuck >= limiter.total_tokens:
            now = self._clock()
            if now < self._next_probe or self._probes.available_tokens == 0:
                raise OSError(errno.ETIMEDOUT, "the source does not answer")
            self._next_probe = now + PROBE_INTERVAL_S
            limiter = self._probes
        call = _Call(function, discard, self)
        with trio.move_on_after(self._timeout_s) as scope:
            try:
                return await trio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=limiter)
            except trio.Cancelled:
                call.abandon()
                raise
        assert scope.cancelled_caught
        self.timeouts += 1
        raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

"""Calls to the source run in threads of their own, a bounded number at a time, each with a deadline.

A parallel filesystem that hangs must not take the mount with it (hazard 20). A call that outlives its deadline is
abandoned: its request is answered ETIMEDOUT, its thread goes on and keeps its slot until the call returns. When all
slots are held by such calls new ones fail at once, but for one probe a second, so that the mount notices when the
source is back. A hit never comes here.

Why not `trio.to_thread`: a fetch begins in the middle of the OPEN that announces it, before that is answered, and a
first epoch is made of such fetches. `start` costs a queue and a wake-up where a nursery task, a limiter, a cancel
scope and a worker of trio's cost five times as much. One task looks after all deadlines.
"""

import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import outcome
import trio

T = TypeVar("T")

PROBE_INTERVAL_S = 1.0
MAX_PROBES = 4
_WATCH_SHARE = 20  # deadlines are looked at this often within a timeout


class Call(Generic[T]):
    """One call. Its state changes on the trio thread only, but for `returned`, which its own thread sets."""

    __slots__ = ("abandoned", "deadline", "discard", "done", "function", "probe", "running")

    def __init__(
        self,
        function: Callable[[], T],
        done: Callable[[outcome.Outcome[T]], None],
        discard: Callable[[T], object] | None,
    ) -> None:
        self.function = function
        self.done = done
        self.discard = discard
        self.deadline = 0.0
        self.running = False
        self.abandoned = False
        self.probe = False


class SourceSlots:
    """`await slots.run(function)`: the result, the function's error, or OSError ETIMEDOUT."""

    def __init__(self, slots: int, timeout_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        # constants
        self._slots = slots
        self.timeout_s = timeout_s
        self._clock = clock
        # state, of the trio thread
        self._token = trio.lowlevel.current_trio_token()
        self._idle: list[_Worker] = []
        self._running: dict[Call[Any], None] = {}  # in the order of their deadlines
        self._waiting: deque[Call[Any]] = deque()
        self._probes = 0
        self._next_probe = 0.0
        self.stuck = 0
        """How many calls were abandoned and have not returned."""
        self.timeouts = 0

    def start(
        self,
        function: Callable[[], T],
        done: Callable[[outcome.Outcome[T]], None],
        *,
        discard: Callable[[T], object] | None = None,
    ) -> None:
        """Call `function` in a thread, later `done` with its outcome on the trio thread. Never blocks.

        `discard` is given the result of an abandoned call, such as a descriptor to close.
        """
        call = Call(function, done, discard)
        call.deadline = self._clock() + self.timeout_s
        if self.stuck >= self._slots:
            if call.deadline - self.timeout_s < self._next_probe or self._probes >= MAX_PROBES:
                refusal = OSError(errno.ETIMEDOUT, "the source does not answer")
                self._token.run_sync_soon(done, outcome.Error(refusal))
                return
            self._next_probe = call.deadline - self.timeout_s + PROBE_INTERVAL_S
            self._probes += 1
            call.probe = True
            self._begin(call)
        elif self._occupied() < self._slots:
            self._begin(call)
        else:
            self._waiting.append(call)

    def _occupied(self) -> int:
        return len(self._running) + self.stuck - self._probes

    def _begin(self, call: Call[Any]) -> None:
        call.running = True
        self._running[call] = None
        # The one that was idle last: its stack and its memory are still in the processor's caches.
        worker = self._idle.pop() if self._idle else _Worker(self._token, self._returned)
        worker.begin(call)

    def _returned(self, worker: "_Worker", call: Call[Any], answer: outcome.Outcome[Any]) -> None:
        self._idle.append(worker)
        if call.probe:
            self._probes -= 1
        if call.abandoned:
            self.stuck -= 1
            if call.discard is not None and isinstance(answer, outcome.Value):
                call.discard(answer.value)
        else:
            del self._running[call]
            call.done(answer)
        while self._waiting and self._occupied() < self._slots:
            self._begin(self._waiting.popleft())

    async def watch(self) -> None:
        """The task that abandons calls that are overdue. For ever, until cancelled."""
        while True:
            await trio.sleep(self.timeout_s / _WATCH_SHARE)
            self.abandon_overdue()

    def abandon_overdue(self) -> None:
        now = self._clock()
        overdue = [call for call in (*self._running, *self._waiting) if call.deadline <= now]
        for call in overdue:
            if call.running:
                del self._running[call]
                call.abandoned = True
                self.stuck += 1
            else:
                self._waiting.remove(call)
            self.timeouts += 1
            call.done(outcome.Error(OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))))

    async def run(self, function: Callable[[], T], *, discard: Callable[[T], object] | None = None) -> T:
        task = trio.lowlevel.current_task()
        gone = False

        def done(answer: outcome.Outcome[T]) -> None:
            if not gone:
                trio.lowlevel.reschedule(task, answer)
            elif discard is not None and isinstance(answer, outcome.Value):
                discard(answer.value)

        def cancelled(_: Any) -> trio.lowlevel.Abort:
            nonlocal gone
            gone = True
            return trio.lowlevel.Abort.SUCCEEDED

        self.start(function, done, discard=discard)
        result: T = await trio.lowlevel.wait_task_rescheduled(cancelled)
        return result

    def close(self) -> None:
        """Let idle threads end. Those that are stuck end with the process."""
        for worker in self._idle:
            worker.begin(None)
        self._idle.clear()


class _Worker:
    """A thread that waits for one call after the other."""

    def __init__(
        self,
        token: trio.lowlevel.TrioToken,
        returned: Callable[["_Worker", Call[Any], outcome.Outcome[Any]], None],
    ) -> None:
        self._token = token
        self._returned = returned
        self._call: Call[Any] | None = None
        self._wake = threading.Lock()
        self._wake.acquire()
        threading.Thread(target=self._work, name="source", daemon=True).start()

    def begin(self, call: Call[Any] | None) -> None:
        """None ends the thread."""
        self._call = call
        self._wake.release()

    def _work(self) -> None:
        while True:
            self._wake.acquire()
            call = self._call
            if call is None:
                return
            answer = outcome.capture(call.function)
            try:
                self._token.run_sync_soon(self._returned, self, call, answer)
            except trio.RunFinishedError:
                return
            del call, answer

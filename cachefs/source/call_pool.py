"""Calls to the source run in threads of their own, in limited number, each with a deadline.

A parallel filesystem that hangs must not block the mount (hazard 20). A call that exceeds its deadline is abandoned:
its request is answered ETIMEDOUT, and its thread keeps its slot until the call returns. One task checks all deadlines.
Hits make no calls.

A call that cannot be made at once waits in one of these places:

- `calls/fair_queue.py`: for a slot of its user.
- `calls/hanging.py`: for another call that asks the same and hangs. If all slots of a user hang, its calls fail.
- `calls/pauses.py`: a file has a lease, or the machine refuses a thread. The call gives its slot back meanwhile.
- `calls/doubt.py`: it is not known whether the source is gone. A call that fails as if it were is kept, and `on_doubt`
  called, until `resume` is called with the state of the root. Between `suspend` and `resume` new calls are kept as
  well. A kept call runs again with the rest of its time. Calls that cannot be repeated, or that use a descriptor of
  their own, are made `once`: they fail with their error.
"""

import errno
import math
import time
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import outcome
import trio

from cachefs.errors import Busy, failed
from cachefs.source.calls.call import Call
from cachefs.source.calls.doubt import FAILURES, KeptCalls, may_be_lost
from cachefs.source.calls.fair_queue import FairQueue
from cachefs.source.calls.hanging import Hanging
from cachefs.source.calls.pauses import Pauses
from cachefs.source.calls.threads import Threads
from cachefs.source.shares import Shares
from cachefs.system.listeners import Listeners

T = TypeVar("T")

_WATCH_SHARE = 20  # deadlines are checked so often within a timeout
LOOK_S = 1.0
HURRIED_WATCH_S = 0.1
"""The interval of these checks while the mount ends."""


class CallPool:
    """`await call_pool.run(function)` returns the result, or raises the function's error or OSError ETIMEDOUT."""

    def __init__(
        self, slots: int, timeout_s: float, *, reserve: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`slots`: of one owner. There are a third more in all, and a reserve (shares.py)."""
        # constants
        self.timeout_s = timeout_s
        self._clock = clock
        # state, of the trio thread
        self._token = trio.lowlevel.current_trio_token()
        self._threads = Threads(self._token, self._returned)
        self._shares = Shares.for_each(slots, reserve)
        self._running: dict[Call[Any], None] = {}
        self._queue = FairQueue(self._shares, self._begin, self._deadline)
        self.hanging = Hanging(self._shares, slots)
        self._pauses = Pauses()
        self._kept = KeptCalls(reserve)
        self._suspended = False
        self._last_deadline = math.inf
        """No call has a later deadline."""
        self._look_again = trio.Event()
        self.timeouts = 0
        self.failures = 0
        """The number of calls that failed because of the source itself."""
        self.on_doubt: Listeners[[OSError]] = Listeners()
        """Called with errors that mean that the source may be gone. Without listeners no call is kept."""

    def start(
        self,
        function: Callable[[], T],
        done: Callable[[outcome.Outcome[T]], None],
        *,
        discard: Callable[[T], object] | None = None,
        once: bool = False,
        question: Hashable = None,
    ) -> None:
        """Call `function` in a thread, and later `done` with its outcome on the trio thread. Never blocks.

        `discard` is called with the result of an abandoned call, such as a descriptor to close.
        """
        now = self._clock()
        call = Call(function, done, discard, once, question, now, self._deadline())
        call.owner = next((owner for owner in call.party.owners if not self.hanging.is_stuck(owner)), call.owner)
        if self._suspended:
            self._keep(call)
        elif question is not None and not self.may_ask(question):
            self.hanging.wait(call)
        elif not self.hanging.is_stuck(call.owner):
            self._queue.begin_or_wait(call)
        elif self.hanging.begin_probe(call, now):
            self._begin(call)
        else:
            self._refuse(call, "the source does not answer")

    async def run(
        self,
        function: Callable[[], T],
        *,
        discard: Callable[[T], object] | None = None,
        once: bool = False,
        question: Hashable = None,
    ) -> T:
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

        self.start(function, done, discard=discard, once=once, question=question)
        result: T = await trio.lowlevel.wait_task_rescheduled(cancelled)
        return result

    async def wait(self, event: trio.Event) -> None:
        """Wait for something else than a call, as long as a call might take. Raises ETIMEDOUT."""
        deadline = self._deadline()
        while not event.is_set():
            left_s = min(deadline, self._last_deadline) - self._clock()
            if left_s <= 0:
                self.timeouts += 1
                raise failed(errno.ETIMEDOUT)
            with trio.move_on_after(min(left_s, LOOK_S)):  # `hurry` may come meanwhile
                await event.wait()

    def _refuse(self, call: Call[Any], reason: str) -> None:
        self._token.run_sync_soon(call.done, outcome.Error(OSError(errno.ETIMEDOUT, reason)))

    def may_ask(self, question: Hashable) -> bool:
        """False while a call with this question hangs. From time to time True, for a caller that asks now."""
        return self.hanging.may_ask(question, self._clock(), self.timeout_s)

    def close(self) -> None:
        """End idle threads. Those that are stuck end with the process."""
        self._threads.close()

    # --- one call --------------------------------------------------------------------------------------------------

    def _begin(self, call: Call[Any]) -> None:
        if not self._threads.begin(call):
            self._pause(call)
            return
        if not call.probe:
            self._shares.take(call.owner)
        call.running = True
        self._running[call] = None

    def _returned(self, call: Call[Any], answer: outcome.Outcome[Any]) -> None:
        if not call.probe:
            self._shares.give(call.owner)
        if call.abandoned:
            self.hanging.end_probe(call)
            for waiting in self.hanging.returned(call):
                self._queue.begin_or_wait(waiting)
            if call.discard is not None and isinstance(answer, outcome.Value):
                call.discard(answer.value)
        elif isinstance(answer, outcome.Error) and isinstance(answer.error, Busy):
            del self._running[call]
            self._pause(call)
        else:
            self.hanging.end_probe(call)
            del self._running[call]
            if isinstance(answer, outcome.Error) and isinstance(answer.error, OSError):
                self._failed(call, answer, answer.error)
            else:
                call.done(answer)
        self._queue.begin_waiting()

    def _pause(self, call: Call[Any]) -> None:
        call.running = False
        self._pauses.add(call, self._clock())
        self._look_again.set()

    def retry_due(self) -> None:
        """Repeat the calls whose pause is over."""
        for call in self._pauses.take_due(self._clock()):
            self._queue.begin_or_wait(call)

    # --- a source that may be gone ---------------------------------------------------------------------------------

    def _failed(self, call: Call[Any], answer: outcome.Error, error: OSError) -> None:
        doubtful = may_be_lost(error)
        self.failures += error.errno in FAILURES or doubtful
        if not doubtful or call.checked or not self.on_doubt:
            call.done(answer)
            return
        if call.once:
            call.done(answer)
        else:
            call.running = False
            self._keep(call)
        self.on_doubt(error)

    def _keep(self, call: Call[Any]) -> None:
        if not self._kept.keep(call):
            self.timeouts += 1
            self._refuse(call, "the source is gone")

    def suspend(self) -> None:
        """The source is gone: keep all calls until `resume`."""
        self._suspended = True

    def resume(self, *, anew: bool) -> None:
        """Make the kept calls. `anew`: the source was mounted anew; False: it was never gone."""
        self._suspended = False
        for call in self.hanging.forget_questions() if anew else ():
            self._queue.begin_or_wait(call)
        for call in self._kept.take_all():
            call.checked = not anew
            self._queue.begin_or_wait(call)

    # --- deadlines -------------------------------------------------------------------------------------------------

    def _deadline(self) -> float:
        """The deadline of a call that begins now."""
        return min(self._clock() + self.timeout_s, self._last_deadline)

    def hurry(self, within_s: float) -> None:
        """The mount ends: abandon all calls, including later ones, that are not answered within this time.

        Only the first call has an effect.
        """
        if self._last_deadline == math.inf:
            self._last_deadline = self._clock() + within_s
            for call in self._unanswered():
                call.deadline = min(call.deadline, self._last_deadline)
            self._look_again.set()

    async def watch(self) -> None:
        """The task that abandons overdue calls and repeats those that pause. Until cancelled."""
        next_look = -math.inf
        while True:
            self.retry_due()
            now = self._clock()
            if now >= next_look:
                self.abandon_overdue()
                next_look = now + self.timeout_s / _WATCH_SHARE
            if self._last_deadline < math.inf:
                next_look = min(next_look, now + HURRIED_WATCH_S)
            self._look_again = trio.Event()
            with trio.move_on_after(max(0.0, min(next_look, self._pauses.next_s) - now)):
                await self._look_again.wait()

    def _unanswered(self) -> dict[Call[Any], None]:
        """All calls whose callers wait."""
        return dict.fromkeys((*self._running, *self._queue, *self._pauses, *self._kept, *self.hanging))

    def abandon_overdue(self) -> None:
        now = self._clock()
        overdue = [call for call in self._unanswered() if call.deadline <= now]
        for call in overdue:
            self.timeouts += 1
            if call.running:
                self._abandon(call)
            elif self._pauses.end(call):
                self.hanging.end_probe(call)
            elif not (self._kept.drop(call) or self._queue.leave(call)):
                self.hanging.leave(call)
            _time_out(call)

    def give_up(self, function: Callable[[], object], question: Hashable) -> bool:
        """Abandon the running call of this function before its deadline, because `question` hangs.

        False: it is not running any more.
        """
        call = next((call for call in self._running if call.function is function), None)
        if call is None:
            return False
        call.question = question
        self._abandon(call)
        _time_out(call)
        return True

    def _abandon(self, call: Call[Any]) -> None:
        del self._running[call]
        self.hanging.abandoned(call, self._clock(), self.timeout_s)


def _time_out(call: Call[Any]) -> None:
    call.done(outcome.Error(failed(errno.ETIMEDOUT)))

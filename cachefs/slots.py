"""Calls to the source run in threads of their own, a bounded number at a time, each with a deadline.

A parallel filesystem that hangs must not take the mount with it (hazard 20). A call that outlives its deadline is
abandoned: its request is answered ETIMEDOUT, its thread goes on and keeps its slot until the call returns. When all
slots of an owner are held by such calls, its new ones fail at once, but for one probe a second, so that the mount
notices when the source is back. A hit never comes here.

Slots are shared by owner (shares.py): what one user is blocked in blocks no other. A call that several users wait for
waits in the queue of each of them, and takes the first slot that one of them gets. A file that another process holds a
lease on cannot be opened yet (`Busy`): the call gives its slot back, pauses, and is made again until its deadline.
A call for which the machine refuses a thread does the same.

A question that hangs is asked once. `question` says what a call asks, such as the attributes of one name. While a call
that was abandoned has not returned, others that ask the same wait for its return, without a slot, and are made then. So
a name that hangs holds one slot however often it is looked at. It is asked again when it has hung twice as long,
because the call may never return, although the name answers again.

A source that was mounted anew answers ENOTCONN to whoever has its old root. A call that fails like that is kept, and
`on_doubt` is told, until `resume` says what is true of the root; between `suspend` and `resume` new calls are kept as
well. A kept call runs again with what is left of its time. Calls that cannot be made twice, or that use a descriptor of
their own, are made `once`: they fail with the error that they got.

Why not `trio.to_thread`: a fetch begins in the middle of the OPEN that announces it, before that is answered, and a
first epoch is made of such fetches. `start` costs a queue and a wake-up where a nursery task, a limiter, a cancel
scope and a worker of trio's cost five times as much. One task looks after all deadlines.
"""

import errno
import heapq
import itertools
import math
import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, Generic, TypeVar

import outcome
import trio

from cachefs import shares
from cachefs.errors import Busy
from cachefs.shares import Shares
from cachefs.source import may_be_lost
from cachefs.threads import is_refused

T = TypeVar("T")

RISK_SHARE = 4
"""A call that can be left out is not made for users of whose slots one in so many hangs."""
MAX_KEPT = 512
"""Calls that wait for a source that has gone; more fail at once."""
FAILURES = frozenset(
    {
        errno.ECONNABORTED,
        errno.ECONNRESET,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.EIO,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.ENOTCONN,
        errno.EREMOTEIO,
        errno.ESHUTDOWN,
        errno.ETIMEDOUT,
    }
)
"""Errors of the source itself, not of what was asked for. ESTALE counts where no comparison said so."""
PROBE_INTERVAL_S = 1.0
MAX_PROBES = 4
FIRST_PAUSE_S = 0.001
MAX_PAUSE_S = 0.1
MAX_RETRIES_PER_S = 100
"""Of one owner: calls that pause longer the more there are, so that they leave the processor to others."""
_WATCH_SHARE = 20  # deadlines are looked at this often within a timeout
HURRIED_WATCH_S = 0.1
"""Deadlines are looked at so often while the mount ends."""


class Call(Generic[T]):
    """One call. Its state changes on the trio thread only, but for `returned`, which its own thread sets."""

    __slots__ = (
        "abandoned",
        "began",
        "checked",
        "deadline",
        "discard",
        "done",
        "function",
        "once",
        "owner",
        "party",
        "pause_s",
        "probe",
        "question",
        "running",
    )

    def __init__(
        self,
        function: Callable[[], T],
        done: Callable[[outcome.Outcome[T]], None],
        discard: Callable[[T], object] | None,
        once: bool,
        question: Hashable = None,
    ) -> None:
        self.function = function
        self.done = done
        self.discard = discard
        self.once = once
        self.question = question
        """What it asks. None: what no other call asks."""
        self.checked = False
        """It failed as if the source were lost, and the source was not."""
        self.party = shares.party()
        self.owner = self.party.owners[0]
        """Whose slot it has or had, or will be counted for first."""
        self.began = 0.0
        self.deadline = 0.0
        self.pause_s = FIRST_PAUSE_S
        self.running = False
        self.abandoned = False
        self.probe = False


class _Hang:
    """A question that has not been answered in time, and whose call has not returned."""

    __slots__ = ("again_at", "since", "waiting")

    def __init__(self, since: float) -> None:
        self.since = since
        self.again_at = 0.0
        """When a call may ask again."""
        self.waiting: dict[Call[Any], None] = {}
        """Calls that ask the same."""


class SourceSlots:
    """`await slots.run(function)`: the result, the function's error, or OSError ETIMEDOUT."""

    def __init__(
        self, slots: int, timeout_s: float, *, reserve: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`slots`: of one owner. There are a third more, and a reserve (shares.py)."""
        # constants
        self.timeout_s = timeout_s
        self._most_at_risk = max(1, slots // RISK_SHARE)
        self._clock = clock
        # state, of the trio thread
        self._token = trio.lowlevel.current_trio_token()
        self._shares = Shares.for_each(slots, reserve)
        self._idle: list[_Worker] = []
        self._running: dict[Call[Any], None] = {}
        self._waiting: dict[int, OrderedDict[Call[Any], None]] = {}
        """Owner → calls that wait for a slot. The owner whose turn it is comes first."""
        self._pausing: dict[Call[Any], None] = {}
        self._pausing_of: Counter[int] = Counter()
        self._retries: list[tuple[float, int, Call[Any]]] = []
        """A heap: when calls that pause are made again."""
        self._hangs: dict[Hashable, _Hang] = {}
        self._kept: dict[Call[Any], None] = {}
        """Until `resume`."""
        self._places = Shares(MAX_KEPT, reserve)
        """Of calls that are kept."""
        self._suspended = False
        self._last_deadline = math.inf
        """No call is waited for beyond this."""
        self._numbers = itertools.count()
        self._look_again = trio.Event()
        self._probes: Counter[int] = Counter()
        self._next_probe: dict[int, float] = {}
        self._stuck: Counter[int] = Counter()
        self.stuck = 0
        """How many calls were abandoned and have not returned."""
        self.timeouts = 0
        self.failures = 0
        """Calls that failed for want of the source."""
        self.on_doubt: Callable[[OSError], None] | None = None
        """Told of errors that a source gives which has gone. None: no call is kept for that."""

    def start(
        self,
        function: Callable[[], T],
        done: Callable[[outcome.Outcome[T]], None],
        *,
        discard: Callable[[T], object] | None = None,
        once: bool = False,
        question: Hashable = None,
    ) -> None:
        """Call `function` in a thread, later `done` with its outcome on the trio thread. Never blocks.

        `discard` is given the result of an abandoned call, such as a descriptor to close.
        """
        call = Call(function, done, discard, once, question)
        now = self._clock()
        call.began = now
        call.deadline = self._deadline()
        call.owner = next((owner for owner in call.party.owners if not self._is_stuck(owner)), call.owner)
        if self._suspended:
            self._keep(call)
        elif question is not None and not self.may_ask(question):
            self._hangs[question].waiting[call] = None
        elif not self._is_stuck(call.owner):
            self._begin_or_wait(call)
        elif now < self._next_probe.get(call.owner, -math.inf) or self._probes[call.owner] >= MAX_PROBES:
            refusal = OSError(errno.ETIMEDOUT, "the source does not answer")
            self._token.run_sync_soon(done, outcome.Error(refusal))
        else:
            self._next_probe[call.owner] = now + PROBE_INTERVAL_S
            self._probes[call.owner] += 1
            call.probe = True
            self._begin(call)

    def _deadline(self) -> float:
        """Of a call that begins now."""
        return min(self._clock() + self.timeout_s, self._last_deadline)

    def hurry(self, within_s: float) -> None:
        """The mount ends: abandon whatever the source has not answered within this time, later calls as well.

        Only the first time counts.
        """
        if self._last_deadline == math.inf:
            self._last_deadline = self._clock() + within_s
            for call in self._unanswered():
                call.deadline = min(call.deadline, self._last_deadline)
            self._look_again.set()

    def may_ask(self, question: Hashable) -> bool:
        """False while a call that asks this hangs. True now and then, for whoever is going to ask now."""
        hang = self._hangs.get(question)
        if hang is None:
            return True
        now = self._clock()
        if now < hang.again_at:
            return False
        self._ask_later(hang, now)
        return True

    def _ask_later(self, hang: _Hang, now: float) -> None:
        hang.again_at = now + max(self.timeout_s, now - hang.since)

    def may_risk(self) -> bool:
        """May a call be made that can be left out? Not when many slots hang of all who wait for it."""
        return any(self._stuck[owner] < self._most_at_risk for owner in shares.party().owners)

    def give_up(self, function: Callable[[], object], question: Hashable) -> bool:
        """Abandon the running call of this function before its deadline: it hangs, and this is what it asks.

        False: it is not running any more.
        """
        call = next((call for call in self._running if call.function is function), None)
        if call is None:
            return False
        call.question = question
        self._abandon(call)
        call.done(outcome.Error(OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))))
        return True

    def _abandon(self, call: Call[Any]) -> None:
        del self._running[call]
        call.abandoned = True
        self.stuck += 1
        self._stuck[call.owner] += 1
        if call.question is not None:
            hang = self._hangs.setdefault(call.question, _Hang(call.began))
            self._ask_later(hang, self._clock())

    def _answers_again(self, hang: _Hang) -> None:
        for call in hang.waiting:
            self._begin_or_wait(call)

    def _is_stuck(self, owner: int) -> bool:
        """May this owner make no more calls, and is all that it has stuck?"""
        full = self._shares.is_full(owner)
        return full and self.stuck > 0 and self._stuck[owner] == self._shares.held_by(owner)

    def _begin_or_wait(self, call: Call[Any]) -> None:
        if call.probe:
            self._begin(call)
            return
        for owner in call.party.owners:
            if not self._shares.is_full(owner):
                call.owner = owner
                self._begin(call)
                return
        for owner in call.party.owners:
            self._wait(call, owner)
        call.party.waiting[call] = partial(self._joined, call)

    def _wait(self, call: Call[Any], owner: int) -> None:
        self._waiting.setdefault(owner, OrderedDict())[call] = None

    def _joined(self, call: Call[Any], owner: int) -> None:
        """Another owner wants what waits: it need not wait for the shares of those who were first."""
        call.deadline = self._deadline()
        if self._shares.is_full(owner):
            self._wait(call, owner)
        else:
            self._leave_queues(call)
            call.owner = owner
            self._begin(call)

    def _leave_queues(self, call: Call[Any]) -> None:
        del call.party.waiting[call]
        for owner in call.party.owners:
            calls = self._waiting.get(owner)
            if calls is not None:
                calls.pop(call, None)
                if not calls:
                    del self._waiting[owner]

    def _begin(self, call: Call[Any]) -> None:
        # The one that was idle last: its stack and its memory are still in the processor's caches.
        worker = self._idle.pop() if self._idle else self._new_worker()
        if worker is None:
            self._pause(call)
            return
        if not call.probe:
            self._shares.take(call.owner)
        call.running = True
        self._running[call] = None
        worker.begin(call)

    def _new_worker(self) -> "_Worker | None":
        """None: the machine refuses a thread."""
        try:
            return _Worker(self._token, self._returned)
        except RuntimeError as error:
            if not is_refused(error):
                raise
            return None

    def _returned(self, worker: "_Worker", call: Call[Any], answer: outcome.Outcome[Any]) -> None:
        self._idle.append(worker)
        if not call.probe:
            self._shares.give(call.owner)
        if call.abandoned:
            self._end_probe(call)
            self.stuck -= 1
            self._stuck[call.owner] -= 1
            hang = self._hangs.pop(call.question, None) if call.question is not None else None
            if hang is not None:
                self._answers_again(hang)
            if call.discard is not None and isinstance(answer, outcome.Value):
                call.discard(answer.value)
        elif isinstance(answer, outcome.Error) and isinstance(answer.error, Busy):
            del self._running[call]
            self._pause(call)
        else:
            self._end_probe(call)
            del self._running[call]
            if isinstance(answer, outcome.Error) and isinstance(answer.error, OSError):
                self._failed(call, answer, answer.error)
            else:
                call.done(answer)
        self._begin_waiting()

    def _end_probe(self, call: Call[Any]) -> None:
        if call.probe:
            self._probes[call.owner] -= 1
            call.probe = False

    def _begin_waiting(self) -> None:
        """Give free slots to calls that wait, one owner after the other."""
        found = True
        while found:
            found = False
            for owner in list(self._waiting):
                calls = self._waiting.get(owner)
                if calls is None or self._shares.is_full(owner):
                    continue
                call = next(iter(calls))
                self._leave_queues(call)
                call.owner = owner
                self._begin(call)
                found = True
                if calls:
                    self._waiting[owner] = self._waiting.pop(owner)  # behind the others

    def _pause(self, call: Call[Any]) -> None:
        call.running = False
        self._pausing[call] = None
        self._pausing_of[call.owner] += 1
        pause_s = max(call.pause_s, self._pausing_of[call.owner] / MAX_RETRIES_PER_S)
        heapq.heappush(self._retries, (self._clock() + pause_s, next(self._numbers), call))
        call.pause_s = min(2 * call.pause_s, MAX_PAUSE_S)
        self._look_again.set()

    def _end_pause(self, call: Call[Any]) -> None:
        del self._pausing[call]
        self._pausing_of[call.owner] -= 1
        if not self._pausing_of[call.owner]:
            del self._pausing_of[call.owner]

    def retry_due(self) -> None:
        """Make the calls again whose pause is over."""
        now = self._clock()
        while self._retries and self._retries[0][0] <= now:
            call = heapq.heappop(self._retries)[2]
            if call in self._pausing:  # not abandoned meanwhile
                self._end_pause(call)
                self._begin_or_wait(call)

    def _failed(self, call: Call[Any], answer: outcome.Error, error: OSError) -> None:
        doubtful = may_be_lost(error)
        self.failures += error.errno in FAILURES or doubtful
        if not doubtful or call.checked or self.on_doubt is None:
            call.done(answer)
            return
        if call.once:
            call.done(answer)
        else:
            call.running = False
            self._keep(call)
        self.on_doubt(error)

    def _keep(self, call: Call[Any]) -> None:
        if self._places.is_full(call.owner):
            self.timeouts += 1
            self._token.run_sync_soon(call.done, outcome.Error(OSError(errno.ETIMEDOUT, "the source has gone")))
        else:
            self._places.take(call.owner)
            self._kept[call] = None

    def suspend(self) -> None:
        """The source has gone: keep all calls until `resume`."""
        self._suspended = True

    def resume(self, *, anew: bool) -> None:
        """Make the calls that were kept. `anew`: the source was mounted anew; else nothing was wrong with it."""
        self._suspended = False
        if anew:
            hangs, self._hangs = self._hangs, {}
            for hang in hangs.values():
                self._answers_again(hang)
        kept, self._kept = self._kept, {}
        for call in kept:
            self._places.give(call.owner)
            call.checked = not anew
            self._begin_or_wait(call)

    async def watch(self) -> None:
        """The task that abandons overdue calls and repeats those that pause. For ever, until cancelled."""
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
            until = min(next_look, self._retries[0][0]) if self._retries else next_look
            with trio.move_on_after(max(0.0, until - now)):
                await self._look_again.wait()

    def _unanswered(self) -> dict[Call[Any], None]:
        """All calls whose callers wait."""
        waiting = itertools.chain.from_iterable(self._waiting.values())
        asking = itertools.chain.from_iterable(hang.waiting for hang in self._hangs.values())
        return dict.fromkeys((*self._running, *waiting, *self._pausing, *self._kept, *asking))

    def abandon_overdue(self) -> None:
        now = self._clock()
        overdue = [call for call in self._unanswered() if call.deadline <= now]
        for call in overdue:
            if call.running:
                self._abandon(call)
            elif call in self._pausing:
                self._end_pause(call)
                self._end_probe(call)
            elif call in self._kept:
                del self._kept[call]
                self._places.give(call.owner)
            elif call in call.party.waiting:
                self._leave_queues(call)
            else:
                del self._hangs[call.question].waiting[call]
            self.timeouts += 1
            call.done(outcome.Error(OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))))

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

"""The threads that make calls to the source: each one call at a time, and a new thread if none is idle.

Why not `trio.to_thread`: a fetch begins during the OPEN that precedes its READ, before the OPEN is answered, and a
first epoch consists of such fetches. `begin` only sets a variable and wakes a thread. A nursery task, a limiter, a
cancel scope and a worker thread of trio cost five times as much.

A lock is the wake-up of an idle thread: the thread waits to acquire it; `begin` stores the call and releases it. A
thread whose call hangs stays in that call, and ends at the latest with the process.
"""

import threading
from collections.abc import Callable
from typing import Any

import outcome
import trio

from cachefs.source.calls.call import Call
from cachefs.source.credentials import call_for
from cachefs.system.threads import is_refused


class Threads:
    def __init__(
        self, token: trio.lowlevel.TrioToken, returned: Callable[[Call[Any], outcome.Outcome[Any]], None]
    ) -> None:
        """`returned`: called on the trio thread when a call has returned and its thread is idle again."""
        self._token = token
        self._returned = returned
        self._idle: list[_Worker] = []

    def begin(self, call: Call[Any]) -> bool:
        """Begin this call. False: the machine refuses a thread."""
        # The thread that became idle last: its memory is still in the processor's caches.
        try:
            worker = self._idle.pop() if self._idle else _Worker(self._token, self._is_idle)
        except RuntimeError as error:
            if not is_refused(error):
                raise
            return False
        worker.begin(call)
        return True

    def _is_idle(self, worker: "_Worker", call: Call[Any], answer: outcome.Outcome[Any]) -> None:
        self._idle.append(worker)
        self._returned(call, answer)

    def close(self) -> None:
        """End idle threads. Those that are stuck end with the process."""
        while self._idle:
            self._idle.pop().begin(None)


class _Worker:
    """A thread that makes one call after the other."""

    def __init__(self, token: trio.lowlevel.TrioToken, is_idle: Callable[..., None]) -> None:
        self._token = token
        self._is_idle = is_idle
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
            answer = outcome.capture(call_for, call.party.callers, call.function)
            try:
                self._token.run_sync_soon(self._is_idle, self, call, answer)
            except trio.RunFinishedError:
                return
            del call, answer

"""Drain and exit: how a daemon stops to serve, in one of two ways.

The mount ends: unmount → requests under way are answered, those that wait for the source with ETIMEDOUT after
LAST_CALLS_S → end the fast path → write what is queued → close files.

The mount is left to a successor: read what the kernel has sent → write what is queued for HAND_OVER_S → save the
notifications that are not confirmed, and drain the session → hand over what is open at the source → exit as a daemon
that dies does. A request that is not answered is the successor's, which makes the calls again that can be repeated.
"""

import logging
import os

import trio

from cachefs.client import hand_over
from cachefs.fuse.loop import RequestLoop
from daemon.fastpath_host import FastPathHost
from daemon.mount.mount import Mount
from daemon.signals import Lifecycle
from daemon.wiring import Components

log = logging.getLogger(__name__)

FLUSH_TIMEOUT_S = 60.0
HAND_OVER_S = 10.0
"""So long, at most, calls wait while a daemon that is replaced writes what it has. The rest is lost, as in a crash."""
LAST_CALLS_S = 3.0
"""Calls to the source that are under way when a mount ends, or changes hands, are waited for so long."""
LAST_ANSWERS_S = 2.0
"""Requests are waited for so much longer when a mount ends: those whose calls were abandoned are answered."""
CLOSE_S = 5.0
UNMOUNT_POLL_S = 0.5
_ANSWER_POLL_S = 0.05


class Ending:
    def __init__(self, lifecycle: Lifecycle, mount: Mount, components: Components) -> None:
        # dependencies
        self._lifecycle = lifecycle
        self._mount = mount
        self._components = components
        # state
        self.serving = trio.CancelScope()
        """Requests under way. Cancelled when they outlast what a mount that ends, or changes hands, waits for."""
        self._told = trio.Event()
        self._is_over = False

    # --- no more requests are read ---------------------------------------------------------------------------------

    def stop(self) -> None:
        if self._is_over:
            return
        if self._lifecycle.leaving:
            self._components.notifier.leave_to_successor()
            self._shorten(LAST_CALLS_S)
        else:
            self._hurry()
        self._told.set()

    async def end_loop(self, loop: RequestLoop) -> None:
        """A task: pyfuse3 leaves what it has not read to a successor."""
        await self._told.wait()
        if self._lifecycle.leaving:
            await loop.end_when_read()
        else:
            loop.end()

    async def watch_for_unmount(self) -> None:
        """A task: pyfuse3 notices an unmount, and then waits for the requests that are under way."""
        while not self._mount.is_unmounted():  # noqa: ASYNC110
            await trio.sleep(UNMOUNT_POLL_S)
        self._hurry()

    def _hurry(self) -> None:
        """The mount ends: requests that wait for the source are answered soon, with ETIMEDOUT."""
        self._components.call_pool.hurry(LAST_CALLS_S)
        if self._mount.descriptors is not None:
            self._mount.descriptors.shared.hurry(LAST_CALLS_S)
        self._shorten(LAST_CALLS_S + LAST_ANSWERS_S)

    def _shorten(self, left_s: float) -> None:
        self.serving.deadline = min(self.serving.deadline, trio.current_time() + left_s)

    # --- drain and exit --------------------------------------------------------------------------------------------

    async def leave_if_told(self) -> None:
        """No request is read any more. Does not return where the mount is left to a successor."""
        self._lifecycle.has_ended = not self._lifecycle.leaving
        if not self._lifecycle.leaving or self._mount.is_unmounted():
            return
        await self._components.writes.flush_queued(HAND_OVER_S)  # the fast path may be fetching all the time
        self._components.notifier.save(self._components.opened.index)
        while self._components.opened.index.drain():
            pass
        self._components.notifier.kill()
        self._hand_over()
        log.info("leaving the mount to the next daemon")
        os._exit(0)  # the way of a daemon that dies; what the source has not answered the successor asks again

    def _hand_over(self) -> None:
        """Nothing is served any more: what is open stays as it is."""
        if self._lifecycle.successor is None:
            return
        try:
            hand_over.send(self._lifecycle.successor, self._components.descriptors.opened_at_source())
        except OSError as error:
            log.warning("the next daemon does not take the open files (%s), and opens them by path", error)

    async def end_mount(self, loop: RequestLoop, host: FastPathHost | None) -> None:
        """In whatever way serving has ended. A mount that is there for another daemon stays."""
        self._is_over = True
        loop.close()
        if not self._lifecycle.ends(self._mount):
            return
        self._mount.unmount()
        self._components.notifier.end()
        if host is not None:
            with trio.CancelScope(shield=True):
                await self._let_fastpath_answer()
                await host.stop()

    async def _let_fastpath_answer(self) -> None:
        """A mount that is detached lives as long as jobs use it: the kernel has not ended what they wait for."""
        assert self._mount.descriptors is not None
        self._mount.descriptors.shared.hurry(_ANSWER_POLL_S)  # a READ that failed is tried again by the kernel
        with trio.move_on_at(min(self.serving.deadline, trio.current_time() + LAST_CALLS_S)):
            while not self._mount.is_unmounted():  # noqa: ASYNC110
                await trio.sleep(_ANSWER_POLL_S)
            return
        self._mount.instance.abort()  # a thread that hangs in the source would keep it, and no request be answered

    async def flush(self) -> bool:
        """True if everything was written."""
        flushed = await self._components.writes.flush(FLUSH_TIMEOUT_S)
        if not flushed:
            log.warning("not everything could be written to the index; the next mount compares with the source")
        with trio.CancelScope(shield=True, deadline=trio.current_time() + CLOSE_S):
            await self._components.files.close()
        self._components.call_pool.close()
        return flushed

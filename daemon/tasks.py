"""Background tasks of a mount, which serving.py starts. A task that fails is restarted: it must not end the mount."""

import logging
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

import trio

from cachefs.contract.shared import SETTLE_NS
from cachefs.errors import IndexUnavailable, met_damage
from cachefs.source import rctime
from cachefs.source.directories import IDLE_S, ROOT
from cachefs.source.source import Object
from cachefs.store.index.index import Index
from cachefs.system.clock import NANOSECONDS, TIME_OF_DAY
from cachefs.system.threads import in_thread
from daemon.mount.mount import Mount
from daemon.wiring import Components

log = logging.getLogger(__name__)

Task = Callable[[], Awaitable[None]]

CLOCK_CHECK_S = 1.0
DRAIN_S = 1.0


def start(nursery: trio.Nursery, tasks: Iterable[Task]) -> None:
    for task in tasks:
        nursery.start_soon(_shielded, task)


async def _shielded(task: Task) -> None:
    while True:
        try:
            return await task()
        except Exception as error:
            if not met_damage(error):  # which was logged
                log.exception("bug in %s; continuing", task)
            await trio.sleep(1)


async def every(period_s: float, function: Callable[[], None]) -> None:
    while True:
        function()
        await trio.sleep(period_s)


async def drain(index: Index) -> None:
    """For ever: write what the session had no room for."""
    while True:
        await trio.sleep(DRAIN_S)
        while index.drain():
            await trio.lowlevel.checkpoint()


async def let_go_of_volumes(components: Components) -> None:
    """For ever: let other filesystems beneath the source be unmounted when nobody uses them."""
    while True:
        await trio.sleep(IDLE_S)
        components.source.directories.let_go()
        await components.files.let_go()


async def revalidate_earlier_runs(mount: Mount, components: Components) -> None:
    """Make the records of earlier runs valid as soon as it is certain that nothing has changed (rctime.py)."""
    opened = components.opened
    while opened.may_be_unmoved:
        await trio.sleep(components.options.rctime_grace_s)
        try:
            getxattr = partial(components.source.getxattr, Object(ROOT))
            now = await components.call_pool.run(partial(rctime.ask, getxattr))
            confirmed = await in_thread(partial(opened.revalidate_earlier_runs, now))
        except OSError as error:
            log.info("cannot read the rctime of the source, trying again: %s", error.strerror)
            continue
        except IndexUnavailable as error:
            log.warning("%s: each cached object is compared with the source at its first use", error)
            return
        if not confirmed:
            log.info("the source has changed: each cached object is compared with it at its first use")
            return
        components.metadata.floor = opened.state.floor
        if mount.descriptors is not None:
            mount.descriptors.shared["floor"] = opened.state.floor
        log.info("the source has not changed: cached objects are valid without comparison")


async def watch_clock() -> None:
    """Warn if the clock was set forward: files then count as young for so much longer."""
    warned_ns = 0
    while True:
        ahead_ns = TIME_OF_DAY.ahead_ns()
        if abs(ahead_ns - warned_ns) > SETTLE_NS:
            warned_ns = ahead_ns
            if ahead_ns > SETTLE_NS:
                log.warning(
                    "the clock was set forward by %.0f s: until `cachefs restart`, files that change are cached later "
                    "by that time",
                    ahead_ns / NANOSECONDS,
                )
        await trio.sleep(CLOCK_CHECK_S)

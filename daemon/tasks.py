"""The background tasks of a mount, all started here. A task that fails is restarted: it must not end the mount.

serving.py starts the notifier and the deadlines of calls before the others, which need them.
"""

import logging
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

import trio

from cachefs.errors import IndexUnavailable
from cachefs.options import SETTLE_NS, Revalidate
from cachefs.prefetch.hints import Hints
from cachefs.prefetch.prefetcher import Prefetcher
from cachefs.source import rctime
from cachefs.source.directories import ROOT
from cachefs.source.source import Object
from cachefs.store.index.index import Index
from cachefs.system.clock import NANOSECONDS, TIME_OF_DAY
from daemon.fastpath_host import FastPathHost
from daemon.kernel.source_connection import SourceConnection
from daemon.mount.mount import Mount
from daemon.wiring import Components

log = logging.getLogger(__name__)

Task = Callable[[], Awaitable[None]]

CLOCK_CHECK_S = 1.0
READER_CHECK_S = 60.0
DRAIN_S = 1.0
FOLLOW_S = 1.0
COLLECT_S = 0.1


def start_all(
    nursery: trio.Nursery,
    mount: Mount,
    components: Components,
    host: FastPathHost | None,
    connection: SourceConnection,
    hints: Hints,
    prefetcher: Prefetcher | None,
) -> None:
    """May be called before the fast path is attached: what is sent to it then is sent again."""
    options, index, limit = components.options, components.opened.index, components.limit
    tasks: list[Task] = [
        connection.run,
        components.writes.run,
        hints.run,
        components.young.run,
        # A reader that was killed inside a transaction would keep old pages for ever (hazard 16).
        partial(_every, READER_CHECK_S, partial(drop_dead_readers, index)),
        partial(_drain, index),
        _watch_clock,
    ]
    if host is not None:
        tasks += [partial(_every, FOLLOW_S, host.refresh), partial(_every, COLLECT_S, host.collect_young)]
        if options.logs_accesses:
            tasks.append(partial(_every, COLLECT_S, host.collect_accesses))
    if limit is not None:
        components.data.on_accessed.append(limit.accessed)
        tasks.append(partial(components.invalidation.limit_metadata, limit, components.metrics))
    if prefetcher is not None:
        tasks.append(prefetcher.run)
    if options.revalidate in (Revalidate.AUTO, Revalidate.RCTIME):
        tasks.append(partial(_revalidate_earlier_runs, mount, components))
    start(nursery, tasks)


def start(nursery: trio.Nursery, tasks: Iterable[Task]) -> None:
    for task in tasks:
        nursery.start_soon(_shielded, task)


async def _shielded(task: Task) -> None:
    while True:
        try:
            return await task()
        except Exception:
            log.exception("bug in %s; continuing", task)
            await trio.sleep(1)


async def _every(period_s: float, function: Callable[[], None]) -> None:
    while True:
        function()
        await trio.sleep(period_s)


async def _drain(index: Index) -> None:
    """For ever: write what the session had no room for."""
    while True:
        await trio.sleep(DRAIN_S)
        while index.drain():
            await trio.lowlevel.checkpoint()


def drop_dead_readers(index: Index) -> None:
    index.durable.lmdb.reader_check()
    index.session.lmdb.reader_check()


async def _revalidate_earlier_runs(mount: Mount, components: Components) -> None:
    """Make the records of earlier runs valid as soon as it is certain that nothing has changed (rctime.py)."""
    opened = components.opened
    while opened.may_be_unmoved:
        await trio.sleep(components.options.rctime_grace_s)
        try:
            getxattr = partial(components.source.getxattr, Object(ROOT))
            now = await components.call_pool.run(partial(rctime.ask, getxattr))
            confirmed = opened.revalidate_earlier_runs(now)
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


async def _watch_clock() -> None:
    """Warn if the clock was set forward: files then count as young for so much longer."""
    warned_ns = 0
    while True:
        ahead_ns = TIME_OF_DAY.ahead_ns()
        if abs(ahead_ns - warned_ns) > SETTLE_NS:
            warned_ns = ahead_ns
            if ahead_ns > SETTLE_NS:
                log.warning(
                    "the clock was set forward by %.0f s: until `cachefs restart` files count as so much younger, "
                    "and are cached later",
                    ahead_ns / NANOSECONDS,
                )
        await trio.sleep(CLOCK_CHECK_S)

"""The background tasks of a mount, all started here. A task that fails begins again: it must not end the mount.

The notifier and the deadlines of calls are started before the others (serving.py): those need them.
"""

import logging
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

import trio

from cachefs.contract.shared import SETTLE_NS
from cachefs.errors import IndexUnavailable
from cachefs.options import Revalidate
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


def start_all(
    nursery: trio.Nursery,
    mount: Mount,
    components: Components,
    host: FastPathHost | None,
    connection: SourceConnection,
    hints: Hints,
    prefetcher: Prefetcher | None,
) -> None:
    """They may begin before the fast path is attached: what they send it then is sent again."""
    options, index, limit = components.options, components.opened.index, components.limit
    tasks: list[Task] = [
        connection.run,
        components.writes.run,
        hints.run,
        components.young.run,
        partial(_check_readers, index),
        partial(_drain, index),
        _watch_clock,
    ]
    if host is not None:
        tasks += [host.follow, host.watch_young]
        if options.logs_accesses:
            tasks.append(host.collect)
    if limit is not None:
        components.data.on_accessed.add(limit.accessed)
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
            log.exception("bug in %s; going on", task)
            await trio.sleep(1)


async def _drain(index: Index) -> None:
    """For ever: write what the session could not take before."""
    while True:
        await trio.sleep(DRAIN_S)
        while index.drain():
            await trio.lowlevel.checkpoint()


async def _check_readers(index: Index) -> None:
    """A reader that was killed inside a transaction would keep old pages for ever (hazard 16)."""
    while True:
        await trio.sleep(READER_CHECK_S)
        drop_dead_readers(index)


def drop_dead_readers(index: Index) -> None:
    index.durable.lmdb.reader_check()
    index.session.lmdb.reader_check()


async def _revalidate_earlier_runs(mount: Mount, components: Components) -> None:
    """What earlier runs recorded is confirmed once it is certain that nothing has changed (rctime.py)."""
    opened = components.opened
    while opened.may_be_unmoved:
        await trio.sleep(components.options.rctime_grace_s)
        try:
            getxattr = partial(components.source.getxattr, Object(ROOT))
            now = await components.call_pool.run(partial(rctime.ask, getxattr))
            confirmed = opened.revalidate_earlier_runs(now)
        except OSError as error:
            log.info("the source does not say when it was changed last, asking again: %s", error.strerror)
            continue
        except IndexUnavailable as error:
            log.warning("%s: everything is compared with the source", error)
            return
        if not confirmed:
            log.info("the source has changed: what is cached is compared with it, each object at its first use")
            return
        components.metadata.floor = opened.state.floor
        if mount.descriptors is not None:
            mount.descriptors.shared["floor"] = opened.state.floor
        log.info("the source has not changed: what is cached is not compared with it any more")


async def _watch_clock() -> None:
    """Say so where the clock was set forward: files count as young for so much longer."""
    said_ns = 0
    while True:
        ahead_ns = TIME_OF_DAY.ahead_ns()
        if abs(ahead_ns - said_ns) > SETTLE_NS:
            said_ns = ahead_ns
            if ahead_ns > SETTLE_NS:
                log.warning(
                    "the clock was set forward by %.0f s: until `cachefs restart` files count as so much younger, "
                    "and are not cached before they are old enough",
                    ahead_ns / NANOSECONDS,
                )
        await trio.sleep(CLOCK_CHECK_S)

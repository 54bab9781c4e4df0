"""The commands of the control socket. docs/CONTROL.md defines requests and answers."""

import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import psutil
import trio

from cachefs.client.client import Report
from cachefs.errors import CacheFsError
from cachefs.options import CacheLevel
from cachefs.prefetch.engine import PrefetchEngine
from cachefs.prefetch.hints import Hints
from cachefs.prefetch.prefetcher import Prefetcher
from cachefs.prefetch.warm_up import WarmUp
from cachefs.stats.latency import Histogram, added, quantile_s
from daemon.config.config import MountConfig, format_size
from daemon.control import server
from daemon.control.reasons import reason
from daemon.control.server import Answer, BadRequest, Request, Tell, argument
from daemon.control.warm_ups import BackgroundWarmUps
from daemon.fastpath_host import FastPathHost
from daemon.kernel.source_connection import SourceConnection
from daemon.wiring import Components

log = logging.getLogger(__name__)

DEFAULT_JOBS = 16
MAX_JOBS = 1024
PROGRESS_S = 0.5
FLUSH_TIMEOUT_S = 60.0


@dataclass(eq=False)
class Commands:
    configuration: Callable[[], MountConfig]
    """The configuration as it is now."""
    components: Components
    host: FastPathHost | None
    prefetcher: Prefetcher | None
    engine: PrefetchEngine
    hints: Hints
    connection: SourceConnection
    nursery: trio.Nursery
    started: float
    """time.monotonic() at the start of the daemon."""
    is_detached: Callable[[], bool]
    """Does the mount live without a mountpoint?"""

    def __post_init__(self) -> None:
        self.warm_ups = BackgroundWarmUps(self.nursery)

    def by_name(self) -> server.Commands:
        return {
            "status": self.status,
            "config": self.config,
            "invalidate": self.invalidate,
            "warmup": self.warm_up,
            "wait": self.wait,
            "cancel": self.cancel,
            "check": self.check,
            "will_read": self.will_read,
            "evict": self.evict,
            "pin": self.pin,
            "unpin": self.unpin,
            "info": self.info,
            "drop": self.drop,
            "flush": self.flush,
            "leave": self.leave,
        }

    async def status(self, _: Request, tell: Tell) -> Answer:
        return {**self.status_now(), "detached": self.is_detached()}

    def status_now(self) -> Answer:
        components, config = self.components, self.configuration()
        index, counters = components.opened.index, components.source.counters
        latencies = components.metrics.latencies.by_kind
        if self.host is not None:
            latencies = added([latencies, self.host.shared.latencies()])
        status: Answer = {
            "source": config.source,
            "mountpoint": config.mountpoint,
            "cache_dir": str(config.cache_place),
            "cache": config.options.cache.value,
            "read_only": config.options.read_only,
            "pid": os.getpid(),
            "uptime_s": round(time.monotonic() - self.started, 3),
            "pinned_inodes": index.pinned_inodes(),
            "cached_files": index.totals.cached_files,
            "cached_bytes": index.totals.cached_bytes,
            "blob_bytes": index.totals.blob_bytes,
            "cache_size_bytes": components.data.size_bytes,
            "write_behind_bytes": components.writes.queued_bytes,
            "uncommitted": len(index.dirty) + len(index.in_flight),
            **components.metrics.as_dict(),
            "source_ops": {name: count for name, count in counters.snapshot().items() if count},
            "source_bytes": counters.bytes_read,
            "source_timeouts": components.call_pool.timeouts,
            "source_failures": components.call_pool.failures,
            "source_lost": self.connection.lost is not None,
            "source_problem": self.connection.problem,
            "index_problem": index.durable.damage.problem,
            "source_reconnects": self.connection.reconnects,
            "source_stuck_calls": components.call_pool.hanging.stuck,
            "warm_ups": self.warm_ups.running(),
            "ended_warm_ups": self.warm_ups.ended(),
            "hints_waiting": self.hints.waiting,
            "latencies": {kind: _latency(histogram) for kind, histogram in latencies.items()},
            "prefetch": self.prefetcher.state if self.prefetcher is not None else None,
            "prefetch_problem": self.prefetcher.problem if self.prefetcher is not None else None,
            "fastpath": None,
            "run": components.opened.state.run,
            "memory_bytes": {"daemon": _memory_bytes(os.getpid())},
        }
        if self.host is not None:
            self.host.add_to(status)
            status["memory_bytes"]["fast path"] = _memory_bytes(status["fastpath"]["pid"])
        status["source_errors"] = status.pop("source_failures") + status["source_timeouts"]
        return status

    async def config(self, _: Request, tell: Tell) -> Answer:
        settings = {name: asdict(setting) for name, setting in self.configuration().settings.items()}
        if settings["cache-size"]["value"] is None:
            settings["cache-size"]["value"] = format_size(self.components.data.size_bytes)
        return {"settings": settings}

    async def drop(self, request: Request, tell: Tell) -> Answer:
        records = argument(request, "records", list)
        for record in records:
            if not isinstance(record, list) or [type(each) for each in record] != [int, int, int]:
                raise BadRequest("drop: a record must be [inode, offset, blob offset]")
            if any(not 0 <= each < 1 << 64 for each in record):
                raise BadRequest("drop: inodes and offsets must be numbers from 0 to 2^64 - 1")
        for inode, offset, blob_offset in records:
            self.components.data.corrupt(inode, offset, blob_offset, "found by cachefs verify")
        return {}

    async def flush(self, _: Request, tell: Tell) -> Answer:
        if not await self.components.writes.flush_queued(FLUSH_TIMEOUT_S):
            if not self.components.writes.index.available:
                raise CacheFsError("the index cannot be written (a full disk, or one that is read-only): see the log")
            raise CacheFsError(f"could not write everything within {FLUSH_TIMEOUT_S:.0f} s")
        return {}

    async def leave(self, request: Request, tell: Tell) -> Answer:
        """Check whether the daemon can end and leave the mount. It does so after the answer (`Lifecycle.dismissed`).

        `descriptors`: the daemon sends its open source files over this connection before it ends.
        """
        if self.host is None:
            raise OSError("a mount without the fast path ends with its daemon: unmount it, and mount it again")
        if self.configuration().foreground:
            raise OSError("the daemon runs in the foreground: restart it where it was started")
        index = self.components.opened.index
        while index.drain():
            await trio.lowlevel.checkpoint()
        if index.session.overflow:
            place = index.session.path
            raise CacheFsError(
                f"{place} has no room for the state that the next daemon needs: free some space, and restart again"
            )
        return {"descriptors": True} if request.get("descriptors") is True else {}

    async def invalidate(self, request: Request, tell: Tell) -> Answer:
        path = server.path(request)
        with naming(path):
            return {"dropped": await self.components.filesystem.invalidate(path)}

    async def warm_up(self, request: Request, tell: Tell) -> Answer:
        jobs = request.get("jobs")
        if jobs is None:
            jobs = DEFAULT_JOBS
        if not isinstance(jobs, int) or not 0 < jobs <= MAX_JOBS:
            raise BadRequest(f"warmup: 'jobs' must be a number from 1 to {MAX_JOBS}")
        metadata_only = argument(request, "metadata_only", bool)
        self._check_level(metadata_only)
        warm_up = self._make(jobs=jobs, metadata_only=metadata_only)
        paths = server.paths(request)
        if request.get("background"):
            return {"id": self.warm_ups.start(warm_up, paths)}
        return await self._report(warm_up, partial(warm_up.run, paths), tell)

    async def wait(self, request: Request, tell: Tell) -> Answer:
        """Until a warm-up in the background has ended. It goes on if the client closes the connection."""
        found = self.warm_ups.get(argument(request, "id", int))

        async def ended() -> Report:
            await found.ended.wait()
            return found.report or Report()

        answer = await self._report(found.work, ended, tell)
        found.is_awaited = True
        if found.report is None:
            raise CacheFsError(f"warm-up {found.number} was cancelled, or failed: see the daemon's log")
        return answer

    async def cancel(self, request: Request, tell: Tell) -> Answer:
        self.warm_ups.cancel(argument(request, "id", int))
        return {}

    async def check(self, request: Request, tell: Tell) -> Answer:
        metadata_only = argument(request, "metadata_only", bool)
        self._check_level(metadata_only)
        warm_up = self._make(fetches=False, metadata_only=metadata_only)
        return await self._report(warm_up, partial(warm_up.run, server.paths(request)), tell)

    def _make(self, **arguments: Any) -> WarmUp:
        return WarmUp(self.engine, mountpoint=os.fsencode(self.configuration().mountpoint), **arguments)

    def _check_level(self, metadata_only: bool) -> None:
        level = self.components.options.cache
        if level is CacheLevel.NONE or (level is CacheLevel.METADATA and not metadata_only):
            hint = "nothing" if level is CacheLevel.NONE else "no data: use --metadata-only"
            raise CacheFsError(f"the mount has --cache {level.value}, which caches {hint}")

    async def evict(self, request: Request, tell: Tell) -> Answer:
        files, size = await self.components.invalidation.evict(server.paths(request))
        return {"files": files, "bytes": size}

    async def pin(self, request: Request, tell: Tell) -> Answer:
        self._check_level(metadata_only=True)
        warm_up = self._make(metadata_only=True, pins_written=True)
        return await self._report(warm_up, partial(warm_up.run, server.paths(request)), tell)

    async def unpin(self, request: Request, tell: Tell) -> Answer:
        return {"files": await self.components.invalidation.unpin(server.paths(request))}

    async def info(self, request: Request, tell: Tell) -> Answer:
        path = server.path(request)
        with naming(path):
            answer = await self.components.attributes.info(path)
        return {**answer, "reason": reason(answer, self.components.options)}

    async def _report(self, warm_up: WarmUp, work: Callable[[], Awaitable[Report]], tell: Tell) -> Answer:
        """Do some work, and report the progress of a warm-up. Ends when the client closes the connection."""
        answer: Answer = {}

        async def run() -> None:
            answer.update(asdict(await work()))
            nursery.cancel_scope.cancel()

        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(run)
                while True:
                    await trio.sleep(PROGRESS_S)
                    await tell(asdict(warm_up.progress()))
        except* (trio.BrokenResourceError, trio.TooSlowError):
            answer.clear()
        if not answer:  # raised here: raised there, it would become a group again
            raise trio.BrokenResourceError
        return answer

    async def will_read(self, request: Request, tell: Tell) -> Answer:
        self._check_level(metadata_only=False)
        return {"noted": self.hints.note(server.paths(request), anew=argument(request, "anew", bool))}


@contextmanager
def naming(path: bytes) -> Iterator[None]:
    """Name the path of a request in errors."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), os.fsdecode(path)) from error


def _memory_bytes(pid: int) -> int:
    """Memory of a process except page cache; 0 if there is no such process."""
    try:
        found = psutil.Process(pid).memory_info()
    except psutil.Error:
        return 0
    return int(found.rss - found.shared)


def _latency(histogram: Histogram) -> Answer:
    """`buckets`: the number of requests in each bucket (latency.py) that is not empty."""
    return {
        "count": sum(histogram[1:]),
        "sum_s": histogram[0] / 1e9,
        "p50_s": quantile_s(histogram, 0.5),
        "p99_s": quantile_s(histogram, 0.99),
        "buckets": {number: count for number, count in enumerate(histogram[1:]) if count},
    }

"""What the daemon answers on its control socket. docs/CONTROL.md has the requests and the answers."""

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

import psutil
import trio

from cachefs.errors import CacheFsError
from cachefs.options import CacheLevel
from cachefs.prefetch.engine import PrefetchEngine
from cachefs.prefetch.hints import Hints
from cachefs.prefetch.prefetcher import Prefetcher
from cachefs.prefetch.warm_up import WarmUp
from cachefs.stats.latency import Histogram, added, quantile_s
from daemon.config.config import MountConfig, format_size
from daemon.control import server
from daemon.control.server import Answer, BadRequest, Request, Tell, argument
from daemon.fastpath_host import FastPathHost
from daemon.kernel.source_connection import SourceConnection
from daemon.wiring import Components

log = logging.getLogger(__name__)

DEFAULT_JOBS = 16
MAX_JOBS = 1024
PROGRESS_S = 0.5
FLUSH_TIMEOUT_S = 60.0


class Commands:
    def __init__(
        self,
        configuration: Callable[[], MountConfig],
        parts: Components,
        host: FastPathHost | None,
        prefetcher: Prefetcher | None,
        engine: PrefetchEngine,
        hints: Hints,
        connection: SourceConnection,
        nursery: trio.Nursery,
        *,
        started: float,
    ) -> None:
        """`configuration`: as it is now. `started`: time.monotonic() then."""
        self._configuration = configuration
        self._parts = parts
        self._host = host
        self._prefetcher = prefetcher
        self._engine = engine
        self._hints = hints
        self._connection = connection
        self._nursery = nursery
        self._started = started
        self._warm_ups: list[WarmUp] = []
        """In the background."""

    def by_name(self) -> server.Commands:
        return {
            "status": self.status,
            "config": self.config,
            "invalidate": self.invalidate,
            "warmup": self.warm_up,
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
        return self.status_now()

    def status_now(self) -> Answer:
        parts, config = self._parts, self._configuration()
        index = parts.opened.index
        status: Answer = {
            "source": config.source,
            "mountpoint": config.mountpoint,
            "cache": config.options.cache.value,
            "read_only": config.options.read_only,
            "pid": os.getpid(),
            "uptime_s": round(time.monotonic() - self._started, 3),
            "pinned_inodes": index.pinned_inodes(),
            "cached_files": index.totals.cached_files,
            "cached_bytes": index.totals.cached_bytes,
            "blob_bytes": index.totals.blob_bytes,
            "cache_size_bytes": parts.data.size_bytes,
            "write_behind_bytes": parts.writes.queued_bytes,
            "uncommitted": len(index.dirty) + len(index.in_flight),
            **parts.metrics.as_dict(),
            "source_ops": {name: count for name, count in parts.source.counters.snapshot().items() if count},
            "source_bytes": parts.source.counters.bytes_read,
            "source_timeouts": parts.call_pool.timeouts,
            "source_failures": parts.call_pool.failures,
            "source_lost": self._connection.lost is not None,
            "source_problem": self._connection.lost,
            "source_reconnects": self._connection.reconnects,
            "source_stuck_calls": parts.call_pool.hanging.stuck,
            "warm_ups": [asdict(warm_up.progress()) for warm_up in self._warm_ups],
            "hints_waiting": self._hints.waiting,
            "latencies": {kind: _latency(histogram) for kind, histogram in self._latencies().items()},
            "prefetch": self._prefetcher.state if self._prefetcher is not None else None,
            "fastpath": None,
            "run": parts.opened.state.run,
            "memory_bytes": {"daemon": _memory_bytes(os.getpid())},
        }
        if self._host is not None:
            self._host.add_to(status)
            status["memory_bytes"]["fast path"] = _memory_bytes(status["fastpath"]["pid"])
        status["source_errors"] = status.pop("source_failures") + status["source_timeouts"]
        return status

    def _latencies(self) -> dict[str, Histogram]:
        own = self._parts.metrics.latencies.by_kind
        return added([own, self._host.latencies()]) if self._host is not None else own

    async def config(self, _: Request, tell: Tell) -> Answer:
        settings = {name: asdict(setting) for name, setting in self._configuration().settings.items()}
        if settings["cache-size"]["value"] is None:
            settings["cache-size"]["value"] = format_size(self._parts.data.size_bytes)
        return {"settings": settings}

    async def drop(self, request: Request, tell: Tell) -> Answer:
        records = argument(request, "records", list)
        for record in records:
            if not isinstance(record, list) or [type(each) for each in record] != [int, int, int]:
                raise BadRequest("drop: a record is [inode, offset, blob offset]")
            if any(not 0 <= each < 1 << 64 for each in record):
                raise BadRequest("drop: inodes and offsets are numbers from 0 to 2^64 - 1")
        for record in records:
            inode, offset, blob_offset = record
            self._parts.data.corrupt(inode, offset, blob_offset, "found by cachefs verify")
        return {}

    async def flush(self, _: Request, tell: Tell) -> Answer:
        if not await self._parts.writes.flush_queued(FLUSH_TIMEOUT_S):
            raise CacheFsError(f"not everything could be written within {FLUSH_TIMEOUT_S:.0f} s")
        return {}

    async def leave(self, request: Request, tell: Tell) -> Answer:
        """May it end, and leave the mount? It does so when the answer is out (`Lifecycle.leave`).

        `descriptors`: this connection gets what is open at the source before that.
        """
        if self._host is None:
            raise OSError("without a fast path a mount ends with its daemon: umount it, and mount it again")
        if self._configuration().foreground:
            raise OSError("it runs in the foreground: whoever started it may start it again")
        index = self._parts.opened.index
        while index.drain():
            await trio.lowlevel.checkpoint()
        if index.session.overflow:
            place = index.session.path
            raise CacheFsError(f"{place} has no room for what the next daemon must know: free some, and restart again")
        return {"descriptors": True} if request.get("descriptors") is True else {}

    async def invalidate(self, request: Request, tell: Tell) -> Answer:
        return {"dropped": await self._parts.invalidation.invalidate(server.path(request))}

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
        if not request.get("background"):
            return await self._report(warm_up, paths, tell)
        self._nursery.start_soon(self._in_background, warm_up, paths)
        return {}

    async def check(self, request: Request, tell: Tell) -> Answer:
        metadata_only = argument(request, "metadata_only", bool)
        self._check_level(metadata_only)
        return await self._report(self._make(fetches=False, metadata_only=metadata_only), server.paths(request), tell)

    def _check_level(self, metadata_only: bool) -> None:
        level = self._parts.options.cache
        if level is CacheLevel.NONE or (level is CacheLevel.METADATA and not metadata_only):
            hint = "" if level is CacheLevel.NONE else " but metadata (--metadata-only)"
            raise CacheFsError(f"mounted with --cache {level.value}: nothing is kept{hint}")

    async def evict(self, request: Request, tell: Tell) -> Answer:
        files, size = await self._parts.invalidation.evict(server.paths(request))
        return {"files": files, "bytes": size}

    async def pin(self, request: Request, tell: Tell) -> Answer:
        self._check_level(metadata_only=True)
        warm_up = self._make(metadata_only=True, pins_written=True)
        return await self._report(warm_up, server.paths(request), tell)

    async def unpin(self, request: Request, tell: Tell) -> Answer:
        return {"files": await self._parts.invalidation.unpin(server.paths(request))}

    async def info(self, request: Request, tell: Tell) -> Answer:
        return await self._parts.attributes.info(server.path(request))

    def _make(self, *, jobs: int = 0, fetches: bool = True, metadata_only: bool, pins_written: bool = False) -> WarmUp:
        return WarmUp(self._engine, jobs=jobs, fetches=fetches, metadata_only=metadata_only, pins_written=pins_written)

    async def _report(self, warm_up: WarmUp, paths: Sequence[bytes], tell: Tell) -> Answer:
        """Ended when the client hangs up."""
        answer: Answer = {}

        async def run() -> None:
            answer.update(asdict(await warm_up.run(paths)))
            nursery.cancel_scope.cancel()

        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(run)
                while True:
                    await trio.sleep(PROGRESS_S)
                    await tell(asdict(warm_up.progress()))
        except* (trio.BrokenResourceError, trio.TooSlowError):
            answer.clear()
        if not answer:  # raised here, and not there: that would make a group of it again
            raise trio.BrokenResourceError
        return answer

    async def _in_background(self, warm_up: WarmUp, paths: Sequence[bytes]) -> None:
        self._warm_ups.append(warm_up)
        try:
            report = await warm_up.run(paths)
        except Exception:  # a mount does not end for that
            log.exception("bug in a warm-up")
            return
        finally:
            self._warm_ups.remove(warm_up)
        log.info("warmed up: %d of %d files are cached", report.cached_files, report.files)
        for problem in report.problems:
            log.warning("warm-up: %s", problem)

    async def will_read(self, request: Request, tell: Tell) -> Answer:
        self._check_level(metadata_only=False)
        return {"noted": self._hints.note(server.paths(request), anew=argument(request, "anew", bool))}


def _memory_bytes(pid: int) -> int:
    """What a process has that is not page cache; 0 where there is none."""
    try:
        found = psutil.Process(pid).memory_info()
    except psutil.Error:
        return 0
    return int(found.rss - found.shared)


def _latency(histogram: Histogram) -> Answer:
    """`buckets`: how many requests there were in each (latency.py), but for the empty ones."""
    return {
        "count": sum(histogram[1:]),
        "sum_s": histogram[0] / 1e9,
        "p50_s": quantile_s(histogram, 0.5),
        "p99_s": quantile_s(histogram, 0.99),
        "buckets": {number: count for number, count in enumerate(histogram[1:]) if count},
    }

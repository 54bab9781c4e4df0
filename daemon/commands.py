"""What the daemon answers on its control socket. docs/CONTROL.md has the requests and the answers."""

import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from cachefs.prefetcher import Prefetcher
from daemon import control
from daemon.config import MountConfig, format_size
from daemon.fastpath_host import FastPathHost
from daemon.wiring import Parts

Request = dict[str, Any]
Answer = dict[str, Any]


class Commands:
    def __init__(
        self,
        configuration: Callable[[], MountConfig],
        parts: Parts,
        host: FastPathHost | None,
        prefetcher: Prefetcher | None,
        *,
        started: float,
        leave: Callable[[], None],
    ) -> None:
        """`configuration`: as it is now. `started`: time.monotonic() then. `leave`: end, and let the mount be."""
        self._configuration = configuration
        self._parts = parts
        self._host = host
        self._prefetcher = prefetcher
        self._started = started
        self._leave = leave

    def by_name(self) -> control.Commands:
        return {"status": self.status, "config": self.config, "invalidate": self.invalidate, "leave": self.leave}

    async def status(self, _: Request) -> Answer:
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
            "cache_size_bytes": parts.data.capacity_bytes,
            "write_behind_bytes": parts.writes.queued_bytes,
            "uncommitted": len(index.dirty) + len(index.in_flight),
            **parts.metrics.as_dict(),
            "source_ops": {name: count for name, count in parts.source.counters.snapshot().items() if count},
            "source_bytes": parts.source.counters.bytes_read,
            "source_timeouts": parts.slots.timeouts,
            "source_stuck_calls": parts.slots.stuck,
            "prefetch": self._prefetcher.state if self._prefetcher is not None else None,
            "fastpath": None,
            "run": parts.opened.state.run,
        }
        if self._host is not None:
            self._host.add_to(status)
        return status

    async def config(self, _: Request) -> Answer:
        settings = {name: asdict(setting) for name, setting in self._configuration().settings.items()}
        if settings["cache-size"]["value"] is None:
            settings["cache-size"]["value"] = format_size(self._parts.data.capacity_bytes)
        return {"settings": settings}

    async def leave(self, _: Request) -> Answer:
        """No more requests are taken; those that were are answered, and then the process ends."""
        if self._host is None:
            raise OSError("without a fast path a mount ends with its daemon: umount it, and mount it again")
        if self._configuration().foreground:
            raise OSError("it runs in the foreground: whoever started it may start it again")
        self._leave()
        return {}

    async def invalidate(self, request: Request) -> Answer:
        path = os.fsencode(str(request["path"])).strip(b"/")
        return {"dropped": await self._parts.filesystem.invalidate(path)}


Command = Callable[[Request], Awaitable[Answer]]

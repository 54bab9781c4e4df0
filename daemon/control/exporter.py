"""Metrics for Prometheus: on a Unix socket, or on a TCP port. docs/SECURITY.md says what they disclose.

A scrape exports the status that `cachefs status` prints. METRICS defines names, units and meanings; docs/ has a
dashboard and alerts.
"""

import logging
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from cachefs.errors import CacheFsError
from cachefs.printable import one_line
from cachefs.stats.latency import BUCKETS, bound_s
from cachefs.system import private_files

log = logging.getLogger(__name__)

MAX_REQUEST = 1 << 16
TIMEOUT_S = 10.0
MAX_CONNECTIONS = 16
"""At once. Further ones are closed: a port may be reached from other nodes."""
EVERY = 4
"""Latencies are exported per power of two: every fourth bucket."""

Status = dict[str, Any]


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """A value of the status as a metric."""

    key: str
    name: str
    help: str
    counter: bool = True
    label: str = ""
    """The value is a dict, and this label has its keys. Empty: the value is a number."""


METRICS = (
    MetricSpec("hits", "cachefs_read_hits", "READ requests answered without the source"),
    MetricSpec("misses", "cachefs_read_misses", "READ requests that waited for the source"),
    MetricSpec("hit_bytes", "cachefs_read_hit_bytes", "Bytes of hit replies"),
    MetricSpec("disk_bytes", "cachefs_read_disk_bytes", "Bytes of hit replies from the local disk, not from memory"),
    MetricSpec("miss_bytes", "cachefs_read_miss_bytes", "Bytes of miss replies"),
    MetricSpec("source_bytes", "cachefs_source_read_bytes", "Bytes of files read from the source"),
    MetricSpec("source_timeouts", "cachefs_source_timeouts", "Calls to the source that timed out"),
    MetricSpec("source_errors", "cachefs_source_errors", "Calls that failed because the source was unavailable"),
    MetricSpec("source_reconnects", "cachefs_source_reconnects", "Times the source was opened again after a loss"),
    MetricSpec("source_lost", "cachefs_source_lost", "1 while the source is lost", counter=False),
    MetricSpec("prefetched", "cachefs_prefetched_units", "Files, or chunks of large files, fetched before a read"),
    MetricSpec("skipped_admissions", "cachefs_skipped_admissions", "Fetched units not cached: no room, or a slow disk"),
    MetricSpec("young_reads", "cachefs_young_reads", "Reads not cached: the file had changed shortly before"),
    MetricSpec("evictions", "cachefs_evicted_units", "Files, or chunks of large files, evicted to make room"),
    MetricSpec("metadata_evictions", "cachefs_evicted_inodes", "Inodes unpinned to pin others"),
    MetricSpec("errors", "cachefs_cache_errors", "Failures of the cache; the source was used instead"),
    MetricSpec("corrupt_records", "cachefs_corrupt_records", "Corrupt records found on the local disk"),
    MetricSpec("refused_changes", "cachefs_refused_changes", "Changes refused with EPERM because a file is immutable"),
    MetricSpec("stale_reads", "cachefs_stale_reads", "Reads answered ESTALE because the source had changed"),
    MetricSpec("uptime_s", "cachefs_uptime_seconds", "Time since the daemon started", counter=False),
    MetricSpec("pinned_inodes", "cachefs_pinned_inodes", "Inodes with pinned metadata", counter=False),
    MetricSpec("cached_files", "cachefs_cached_files", "Files with cached data", counter=False),
    MetricSpec("cached_bytes", "cachefs_cached_bytes", "Bytes of cached data", counter=False),
    MetricSpec("blob_bytes", "cachefs_cache_used_bytes", "Local disk space used by cached data", counter=False),
    MetricSpec("cache_size_bytes", "cachefs_cache_size_bytes", "Limit of the local disk space", counter=False),
    MetricSpec("write_behind_bytes", "cachefs_write_behind_bytes", "Fetched data not in the index yet", counter=False),
    MetricSpec("uncommitted", "cachefs_uncommitted_records", "Metadata records not in the index yet", counter=False),
    MetricSpec("source_stuck_calls", "cachefs_source_stuck_calls", "Timed-out calls still running", counter=False),
    MetricSpec("hints_waiting", "cachefs_waiting_hints", "Announced files not processed yet", counter=False),
    MetricSpec("source_ops", "cachefs_source_operations", "Calls to the source, by system call", label="operation"),
    MetricSpec("memory_bytes", "cachefs_memory_bytes", "Memory except page cache", counter=False, label="process"),
)


class StatusCollector(Collector):
    """One status as metrics, each with the mountpoint as a label."""

    def __init__(self, status: Status) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        mountpoint = one_line(self._status["mountpoint"])
        for spec in METRICS:
            kind = CounterMetricFamily if spec.counter else GaugeMetricFamily
            value = self._status[spec.key]
            if spec.label:
                family = kind(spec.name, spec.help, labels=["mountpoint", spec.label])
                for name, part in value.items():
                    family.add_metric([mountpoint, name], part)
            else:
                family = kind(spec.name, spec.help, labels=["mountpoint"])
                family.add_metric([mountpoint], value)
            yield family
        latency = HistogramMetricFamily(
            "cachefs_request_duration_seconds",
            "Time from reading a request to its answer",
            labels=["mountpoint", "request"],
        )
        for name, found in self._status["latencies"].items():
            latency.add_metric([mountpoint, name], list(_buckets(found["buckets"])), found["sum_s"])
        yield latency


def _buckets(counts: dict[int, int]) -> Iterator[tuple[str, float]]:
    """(upper bound, number of requests up to it)."""
    seen = 0
    for number in range(BUCKETS):
        seen += counts.get(number, 0)
        if number % EVERY == EVERY - 1:
            yield f"{bound_s(number):.9g}", seen
    yield "+Inf", seen


async def listen(address: Path | tuple[str, int]) -> trio.SocketListener:
    """Raises CacheFsError."""
    family = socket.AF_UNIX if isinstance(address, Path) else socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if isinstance(address, Path):
            private_files.bind_socket(listener, address, mode=0o660)
        else:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except CacheFsError as error:
        listener.close()
        raise CacheFsError(f"cannot serve metrics: {error}") from None
    except OSError as error:
        listener.close()
        where = address if isinstance(address, Path) else ":".join(map(str, address))
        raise CacheFsError(f"cannot serve metrics on {where}: {error.strerror or error}") from error
    listener.listen(MAX_CONNECTIONS)
    return trio.SocketListener(trio.socket.from_stdlib_socket(listener))


async def serve(listener: trio.SocketListener, status: Callable[[], Status]) -> None:
    """Answer scrapes until cancelled."""

    open_connections = 0

    async def answer(stream: trio.SocketStream) -> None:
        nonlocal open_connections
        if open_connections == MAX_CONNECTIONS:
            await trio.aclose_forcefully(stream)
            return
        open_connections += 1
        try:
            await answer_scrape(stream)
        finally:
            open_connections -= 1

    async def answer_scrape(stream: trio.SocketStream) -> None:
        with trio.move_on_after(TIMEOUT_S):
            async with stream:
                try:
                    request = bytearray()
                    while b"\r\n\r\n" not in request and len(request) < MAX_REQUEST:
                        data = await stream.receive_some(4096)
                        if not data:
                            return
                        request += data
                    await stream.send_all(_reply(bytes(request), status))
                except trio.BrokenResourceError:
                    pass  # the client is gone
                except Exception:  # later scrapes are still answered
                    log.exception("bug in the metrics server")

    await trio.serve_listeners(answer, [listener])


def _reply(request: bytes, status: Callable[[], Status]) -> bytes:
    words = request.split(b"\r\n", 1)[0].split()
    code, kind, body = "404 Not Found", "text/plain", b"only /metrics exists\n"
    if len(words) == 3 and words[0] == b"GET" and words[1].split(b"?")[0] == b"/metrics":
        code, kind, body = "200 OK", CONTENT_TYPE_LATEST, generate_latest(StatusCollector(status()))
    head = f"HTTP/1.1 {code}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body

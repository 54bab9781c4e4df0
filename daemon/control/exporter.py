"""Metrics for Prometheus: on a Unix socket, or on a port of the loopback interface.

A scrape asks for the same status that `cachefs status` prints. The names, units and meanings are in METRICS; docs/ has
a dashboard and alerts made of them.
"""

import logging
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from cachefs.errors import CacheFsError
from cachefs.printable import one_line
from cachefs.stats.latency import BUCKETS, bound_s
from cachefs.system import private_files
from daemon.config.parameters import LOOPBACK

log = logging.getLogger(__name__)

MAX_REQUEST = 1 << 16
TIMEOUT_S = 10.0
EVERY = 4
"""Buckets of latencies are told by the doubling: a quarter of what is counted."""

Status = dict[str, Any]


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """A figure of the status as a metric."""

    key: str
    name: str
    help: str
    counter: bool = True


METRICS = (
    MetricSpec("hits", "cachefs_read_hits", "READ requests answered without the source"),
    MetricSpec("misses", "cachefs_read_misses", "READ requests that waited for the source"),
    MetricSpec("hit_bytes", "cachefs_read_hit_bytes", "Bytes of the replies that were hits"),
    MetricSpec("disk_bytes", "cachefs_read_disk_bytes", "Of those, from the local disk; the others were in memory"),
    MetricSpec("miss_bytes", "cachefs_read_miss_bytes", "Bytes of the replies that were misses"),
    MetricSpec("source_bytes", "cachefs_source_read_bytes", "Bytes of files read from the source"),
    MetricSpec("source_timeouts", "cachefs_source_timeouts", "Calls that the source did not answer in time"),
    MetricSpec(
        "source_errors", "cachefs_source_errors", "Calls to the source that failed, or were not answered in time"
    ),
    MetricSpec("source_reconnects", "cachefs_source_reconnects", "How often the source was mounted anew"),
    MetricSpec("source_lost", "cachefs_source_lost", "1 while the source is not mounted any more", counter=False),
    MetricSpec("prefetched", "cachefs_prefetched_units", "Files, or chunks of large ones, fetched before a read"),
    MetricSpec("skipped_admissions", "cachefs_skipped_admissions", "Fetched, but not cached for want of room or time"),
    MetricSpec(
        "young_reads", "cachefs_young_reads", "Reads not cached because the file had changed less than 2 s before"
    ),
    MetricSpec("evictions", "cachefs_evicted_units", "Files, or chunks of large ones, that made room for others"),
    MetricSpec("metadata_evictions", "cachefs_evicted_inodes", "Inodes no longer pinned, because others are"),
    MetricSpec("errors", "cachefs_cache_errors", "Failures of the cache itself, made good from the source"),
    MetricSpec(
        "corrupt_records", "cachefs_corrupt_records", "Records on the local disk that differ from what was written"
    ),
    MetricSpec("stale_reads", "cachefs_stale_reads", "Reads answered ESTALE because the source had changed"),
    MetricSpec("uptime_s", "cachefs_uptime_seconds", "Since the daemon started", counter=False),
    MetricSpec("pinned_inodes", "cachefs_pinned_inodes", "Inodes whose metadata are pinned", counter=False),
    MetricSpec("cached_files", "cachefs_cached_files", "Files with data in the cache", counter=False),
    MetricSpec("cached_bytes", "cachefs_cached_bytes", "Data in the cache", counter=False),
    MetricSpec("blob_bytes", "cachefs_cache_used_bytes", "What they take on the local disk", counter=False),
    MetricSpec("cache_size_bytes", "cachefs_cache_size_bytes", "What they may take", counter=False),
    MetricSpec("write_behind_bytes", "cachefs_write_behind_bytes", "Fetched and not in the index yet", counter=False),
    MetricSpec("uncommitted", "cachefs_uncommitted_records", "Metadata not in the index yet", counter=False),
    MetricSpec("source_stuck_calls", "cachefs_source_stuck_calls", "Calls that never came back", counter=False),
    MetricSpec("hints_waiting", "cachefs_waiting_hints", "Files that will be read, not looked at yet", counter=False),
)


class StatusCollector(Collector):
    """One status as metrics, all of them with the mountpoint as a label."""

    def __init__(self, status: Status) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status
        labels, values = ["mountpoint"], [one_line(status["mountpoint"])]
        for described in METRICS:
            kind = CounterMetricFamily if described.counter else GaugeMetricFamily
            family = kind(described.name, described.help, labels=labels)
            family.add_metric(values, status[described.key])
            yield family
        operations = CounterMetricFamily(
            "cachefs_source_operations", "Calls to the source, by system call", labels=[*labels, "operation"]
        )
        for name, count in status["source_ops"].items():
            operations.add_metric([*values, name], count)
        yield operations
        memory = GaugeMetricFamily(
            "cachefs_memory_bytes", "Memory of each process that is not page cache", labels=[*labels, "process"]
        )
        for name, size in status["memory_bytes"].items():
            memory.add_metric([*values, name], size)
        yield memory
        latency = HistogramMetricFamily(
            "cachefs_request_duration_seconds", "From reading a request to its answer", labels=[*labels, "request"]
        )
        for name, found in status["latencies"].items():
            latency.add_metric([*values, name], list(_buckets(found["buckets"])), found["sum_s"])
        yield latency


def _buckets(counts: dict[int, int]) -> Iterator[tuple[str, float]]:
    """(upper bound, how many up to it)."""
    seen = 0
    for number in range(BUCKETS):
        seen += counts.get(number, 0)
        if number % EVERY == EVERY - 1:
            yield f"{bound_s(number):.9g}", seen
    yield "+Inf", seen


def render(status: Status) -> bytes:
    """In the text format of Prometheus."""
    registry = CollectorRegistry()
    registry.register(StatusCollector(status))
    return generate_latest(registry)


def parse_address(text: str) -> Path | tuple[str, int]:
    """Of `--metrics`."""
    if text.startswith("/"):
        return Path(text)
    match = LOOPBACK.fullmatch(text)
    assert match is not None
    host = (match[1] or "localhost").strip("[]")
    return ("127.0.0.1" if host == "localhost" else host), int(match[2])


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
    except OSError as error:
        listener.close()
        raise CacheFsError(f"cannot serve metrics on {address}: {error.strerror or error}") from error
    listener.listen(16)
    return trio.SocketListener(trio.socket.from_stdlib_socket(listener))


async def serve(listener: trio.SocketListener, status: Callable[[], Status]) -> None:
    """Answer scrapes until cancelled."""

    async def answer(stream: trio.SocketStream) -> None:
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
                    pass  # the client has gone
                except Exception:  # of one scrape; the next ones are answered all the same
                    log.exception("bug in the metrics")

    await trio.serve_listeners(answer, [listener])


def _reply(request: bytes, status: Callable[[], Status]) -> bytes:
    words = request.split(b"\r\n", 1)[0].split()
    code, kind, body = "404 Not Found", "text/plain", b"there is only /metrics\n"
    if len(words) == 3 and words[0] == b"GET" and words[1].split(b"?")[0] == b"/metrics":
        code, kind, body = "200 OK", CONTENT_TYPE_LATEST, render(status())
    head = f"HTTP/1.1 {code}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body

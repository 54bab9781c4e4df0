"""`cachefs status --watch`: what a mount does now, and what it has done since the start. Fits 80 columns, 24 lines."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.filesize import decimal
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cachefs.client.client import Client
from cachefs.errors import CacheFsError
from cachefs.stats.latency import BUCKETS, KINDS, quantile_s
from daemon.cli.display import duration, memory

STEADY_MISS_SHARE = 0.01
"""Fewer misses than this among the reads of the moment: the first epoch is over."""


@dataclass(frozen=True, slots=True)
class Moment:
    """One status, and when it was had."""

    status: dict[str, Any]
    at_s: float


class Rates:
    """What happened between two moments."""

    def __init__(self, before: Moment, now: Moment) -> None:
        self._before, self._now = before.status, now.status
        self._seconds = max(now.at_s - before.at_s, 1e-6)
        self._anew = self._before["pid"] != self._now["pid"]
        """Another daemon has begun to count."""

    def since(self, name: str) -> int:
        return int(self._now[name]) - (0 if self._anew else int(self._before[name]))

    def a_second(self, name: str) -> float:
        return max(0.0, self.since(name) / self._seconds)

    def reads_a_second(self) -> float:
        """READ requests: one for a small file. What the kernel's page cache answers nobody sees."""
        return max(0.0, (self.since("hits") + self.since("misses")) / self._seconds)

    def operations(self) -> dict[str, float]:
        before = {} if self._anew else self._before["source_ops"]
        counts = {name: count - before.get(name, 0) for name, count in self._now["source_ops"].items()}
        return {name: count / self._seconds for name, count in counts.items() if count > 0}

    def quantiles_s(self, kind: str) -> tuple[int, float, float]:
        """(how many, p50, p99) of requests of a kind."""
        now = self._now["latencies"][kind]["buckets"]
        before = {} if self._anew else self._before["latencies"][kind]["buckets"]
        counts = [now.get(str(n), 0) - before.get(str(n), 0) for n in range(BUCKETS)]
        histogram = [0, *(max(0, count) for count in counts)]
        return sum(histogram), quantile_s(histogram, 0.5), quantile_s(histogram, 0.99)


def share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def phase(rates: Rates, status: dict[str, Any]) -> str:
    reads, misses = rates.since("hits") + rates.since("misses"), rates.since("misses")
    if status["warm_ups"]:
        return "warming up"
    if not reads:
        return "idle, or all in the page cache"
    return "first epoch" if misses > STEADY_MISS_SHARE * reads else "steady state"


def screen(before: Moment, now: Moment) -> RenderableType:
    status, rates = now.status, Rates(before, now)
    head = Text.assemble((phase(rates, status), "bold green"), " · ", (status["mountpoint"], "bold"))
    head.append(f" ← {status['source']}")
    head.truncate(80, overflow="ellipsis")
    used, size = status["blob_bytes"], status["cache_size_bytes"]
    asked = status["hits"] + status["misses"]
    now_asked = rates.since("hits") + rates.since("misses")

    figures = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("", "now", "since the start"):
        figures.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    figures.add_row("hit ratio", share(rates.since("hits"), now_asked), share(status["hits"], asked))
    figures.add_row("reads", f"{rates.reads_a_second():,.0f}/s", f"{asked:,}")
    in_memory = max(0.0, rates.a_second("hit_bytes") - rates.a_second("disk_bytes"))
    figures.add_row("from memory", f"{decimal(int(in_memory))}/s", decimal(status["hit_bytes"] - status["disk_bytes"]))
    figures.add_row("from SSD", f"{decimal(int(rates.a_second('disk_bytes')))}/s", decimal(status["disk_bytes"]))
    figures.add_row("from source", f"{decimal(int(rates.a_second('source_bytes')))}/s", decimal(status["source_bytes"]))
    figures.add_row("fetched ahead", f"{rates.a_second('prefetched'):,.0f}/s", f"{status['prefetched']:,}")
    figures.add_row("evicted", f"{rates.a_second('evictions'):,.0f}/s", f"{status['evictions']:,}")

    cache = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    cache.add_row(
        "cache", f"{decimal(used)} of {decimal(size)} ({share(used, size)}), {status['cached_files']:,} files"
    )
    on_their_way = f"{decimal(status['write_behind_bytes'])} and {status['uncommitted']:,} records on their way"
    cache.add_row("pinned", f"{status['pinned_inodes']:,} inodes; {on_their_way}")
    cache.add_row("memory", memory(status))
    if status["errors"] or status["stale_reads"] or status["source_stuck_calls"]:
        trouble = (
            f"{status['errors']:,} errors in the cache, {status['stale_reads']:,} stale reads, "
            f"{status['source_stuck_calls']} stuck calls"
        )
        cache.add_row("trouble", Text(trouble, "bold red"))

    latencies = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("requests", "a second", "p50", "p99", "since the start", "p50", "p99"):
        latencies.add_column(heading, justify="left" if heading == "requests" else "right", no_wrap=True)
    for row in latency_rows(rates, status, now.at_s - before.at_s):
        latencies.add_row(*row)

    operations = rates.operations()
    calls = ", ".join(f"{name} {rate:,.0f}" for name, rate in sorted(operations.items())) or "none"
    # 23 lines at most, and one of trouble: that is a terminal.
    return Group(head, figures, cache, latencies, Text(f"calls to the source, a second: {calls}"))


def latency_rows(rates: Rates, status: dict[str, Any], interval_s: float) -> Iterator[tuple[str, ...]]:
    for kind in KINDS:
        total = status["latencies"][kind]
        if total["count"]:
            count, p50, p99 = rates.quantiles_s(kind)
            yield (
                kind.replace("_", " "),
                f"{count / max(interval_s, 1e-6):,.0f}",
                duration(p50),
                duration(p99),
                f"{total['count']:,}",
                duration(total["p50_s"]),
                duration(total["p99_s"]),
            )


def watch(client: Client, interval_s: float) -> None:
    """Until Ctrl-C. A daemon that is being replaced is waited for. Raises CacheFsError if none is there at first."""
    before = now = Moment(client.status(), time.monotonic())
    with Live(screen(before, now), console=Console(highlight=False), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            try:
                before, now = now, Moment(client.status(), time.monotonic())
            except CacheFsError as error:
                live.update(Text(f"{error}\n\nwaiting; Ctrl-C ends this"), refresh=True)
                continue
            live.update(screen(before, now), refresh=True)

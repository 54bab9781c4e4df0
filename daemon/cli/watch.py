"""`cachefs status --watch`: the activity of a mount, now and since its start, on 80 columns and 24 lines."""

import time
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cachefs.client.client import Client
from cachefs.errors import CacheFsError
from cachefs.stats.latency import BUCKETS, KINDS, quantile_s
from daemon.cli.display import duration, hit_ratio, memory, share
from daemon.output import readable_size

STEADY_MISS_SHARE = 0.01
"""With a smaller share of misses among the latest reads the first epoch is over."""


class Rates:
    """What happened between two statuses."""

    def __init__(self, before: dict[str, Any], now: dict[str, Any]) -> None:
        self._before, self._now = before, now
        self._anew = before["pid"] != now["pid"]
        """Another daemon has begun to count from 0."""
        self._seconds = max(float(now["uptime_s"]) - (0.0 if self._anew else float(before["uptime_s"])), 1e-6)

    def since(self, name: str) -> int:
        return int(self._now[name]) - (0 if self._anew else int(self._before[name]))

    def reads(self) -> int:
        """READ requests: one for a small file. Reads that the kernel's page cache answers are not among them."""
        return self.since("hits") + self.since("misses")

    def a_second(self, count: int) -> float:
        return max(0.0, count / self._seconds)

    def in_bytes(self, count: int) -> str:
        return f"{readable_size(int(self.a_second(count)))}/s"

    def operations(self) -> dict[str, float]:
        before = {} if self._anew else self._before["source_ops"]
        counts = {name: count - before.get(name, 0) for name, count in self._now["source_ops"].items()}
        return {name: count / self._seconds for name, count in counts.items() if count > 0}

    def quantiles_s(self, kind: str) -> tuple[int, float, float]:
        """(count, p50, p99) of the requests of a kind."""
        now = self._now["latencies"][kind]["buckets"]
        before = {} if self._anew else self._before["latencies"][kind]["buckets"]
        counts = [now.get(str(n), 0) - before.get(str(n), 0) for n in range(BUCKETS)]
        histogram = [0, *(max(0, count) for count in counts)]
        return sum(histogram), quantile_s(histogram, 0.5), quantile_s(histogram, 0.99)


def phase(rates: Rates, status: dict[str, Any]) -> str:
    if status["warm_ups"]:
        return "warming up"
    if not rates.reads():
        return "idle, or served from the page cache"
    return "first epoch" if rates.since("misses") > STEADY_MISS_SHARE * rates.reads() else "steady state"


def screen(before: dict[str, Any], status: dict[str, Any]) -> RenderableType:
    """At most 23 lines and one of errors, which is the height of a terminal."""
    rates = Rates(before, status)
    head = Text.assemble((phase(rates, status), "bold green"), " · ", (status["mountpoint"], "bold"))
    head.append(f" ← {status['source']}")
    head.truncate(80, overflow="ellipsis")
    used, size = status["blob_bytes"], status["cache_size_bytes"]

    figures = _table("", "now", "since the start")
    figures.add_row("hit ratio", share(rates.since("hits"), rates.reads()), hit_ratio(status))
    figures.add_row("reads", f"{rates.a_second(rates.reads()):,.0f}/s", f"{status['hits'] + status['misses']:,}")
    from_memory = rates.since("hit_bytes") - rates.since("disk_bytes")
    figures.add_row(
        "from memory", rates.in_bytes(from_memory), readable_size(status["hit_bytes"] - status["disk_bytes"])
    )
    figures.add_row("from SSD", rates.in_bytes(rates.since("disk_bytes")), readable_size(status["disk_bytes"]))
    figures.add_row("from source", rates.in_bytes(rates.since("source_bytes")), readable_size(status["source_bytes"]))
    for name, key in (("prefetched", "prefetched"), ("evicted", "evictions")):
        figures.add_row(name, f"{rates.a_second(rates.since(key)):,.0f}/s", f"{status[key]:,}")

    cache = _table("", "")
    cache.show_header = False
    cache.add_row(
        "cache",
        f"{readable_size(used)} of {readable_size(size)} ({share(used, size)}), {status['cached_files']:,} files",
    )
    uncommitted = (
        f"{readable_size(status['write_behind_bytes'])} and {status['uncommitted']:,} records not committed yet"
    )
    cache.add_row("pinned", f"{status['pinned_inodes']:,} inodes; {uncommitted}")
    cache.add_row("memory", memory(status))
    if status["errors"] or status["stale_reads"] or status["source_stuck_calls"]:
        errors = (
            f"{status['errors']:,} in the cache, {status['stale_reads']:,} stale reads, "
            f"{status['source_stuck_calls']} stuck calls"
        )
        cache.add_row("errors", Text(errors, "bold red"))

    latencies = _table("requests", "per second", "p50", "p99", "since the start", "p50", "p99")
    for kind in KINDS:
        total = status["latencies"][kind]
        if total["count"]:
            count, p50, p99 = rates.quantiles_s(kind)
            latencies.add_row(
                kind.replace("_", " "),
                f"{rates.a_second(count):,.0f}",
                *map(duration, (p50, p99)),
                f"{total['count']:,}",
                *map(duration, (total["p50_s"], total["p99_s"])),
            )
    calls = ", ".join(f"{name} {rate:,.0f}" for name, rate in sorted(rates.operations().items())) or "none"
    return Group(head, figures, cache, latencies, Text(f"source calls per second: {calls}"))


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(first, no_wrap=True)
    for heading in others:
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    return table


def watch(client: Client, interval_s: float) -> None:
    """Until Ctrl-C. Waits for a daemon that is being replaced. Raises CacheFsError if there is no daemon at first."""
    before = now = client.status()
    with Live(screen(before, now), console=Console(highlight=False), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            try:
                before, now = now, client.status()
            except CacheFsError as error:
                live.update(Text(f"{error}\n\nwaiting; press Ctrl-C to stop"), refresh=True)
                continue
            live.update(screen(before, now), refresh=True)

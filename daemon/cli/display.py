"""Tables for terminals of 80 columns."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from cachefs.printable import one_line
from policies.simulator import Outcome


def print_status(status: dict[str, Any]) -> None:
    asked = status["hits"] + status["misses"]
    ratio = f"{100 * status['hits'] / asked:.1f} %" if asked else "no reads yet"
    rows = [
        ("source", status["source"]),
        ("mountpoint", status["mountpoint"]),
        ("cache", status["cache"] + (", read-only" if status["read_only"] else "")),
        ("daemon", f"pid {status['pid']}, up {status['uptime_s']:.0f} s"),
        ("pinned", f"{status['pinned_inodes']:,} inodes"),
        ("cached", f"{status['cached_files']:,} files, {decimal(status['cached_bytes'])}"),
        ("blob", f"{decimal(status['blob_bytes'])} of {decimal(status['cache_size_bytes'])}"),
        ("hits", f"{status['hits']:,} ({ratio}), {decimal(status['hit_bytes'])}"),
        ("misses", f"{status['misses']:,}, {decimal(status['miss_bytes'])}"),
        ("not cached", f"{status['skipped_admissions']:,} (no room, or no time)"),
        ("errors", f"{status['errors']:,} in the cache, {status['stale_reads']:,} stale reads"),
        ("source calls", ", ".join(f"{k} {v:,}" for k, v in sorted(status["source_ops"].items())) or "none"),
    ]
    if status["source_lost"]:
        rows.append(("source lost", status["source_problem"]))
    if status["source_errors"] or status["source_reconnects"]:
        times = status["source_reconnects"]
        rows.append(("source errors", f"{status['source_errors']:,} calls; reconnected {times:,} times"))
    if status["refused_changes"]:
        rows.append(("refused", f"{status['refused_changes']:,} changes of immutable files (EPERM): see the log"))
    rows.append(("memory", f"{memory(status)}, excluding page cache"))
    for kind in ("read_hit", "read_miss"):
        found = status["latencies"][kind]
        if found["count"]:
            rows.append((kind.replace("_", " "), f"p50 {duration(found['p50_s'])}, p99 {duration(found['p99_s'])}"))
    for warm_up in status["warm_ups"]:
        of = f"{warm_up['files']:,}" + ("" if warm_up["scanned"] else " found so far")
        rows.append(("warm-up", f"{warm_up['cached_files']:,} of {of} files, {decimal(warm_up['cached_bytes'])}"))
    print_rows(rows)


def memory(status: dict[str, Any]) -> str:
    """The memory of each process."""
    return ", ".join(f"{name} {decimal(size)}" for name, size in status["memory_bytes"].items())


def duration(value_s: float) -> str:
    if not value_s:
        return "-"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value_s >= size:
            return f"{value_s / size:.3g} {unit}"
    return f"{value_s / 1e-6:.3g} µs"


def print_rows(rows: Iterable[tuple[str, str]]) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(name), Text(one_line(value)))  # names are not markup
    Console(highlight=False).print(table)


def print_simulation(rows: list[tuple[str, str, int, int, Outcome]]) -> None:
    """Rows are (order or trace, retention, bytes of the cache, bytes of the dataset, outcome)."""
    table = Table()
    table.add_column("accesses")
    table.add_column("retention")
    for name in ("cache", "of all", "hits", "bytes hit"):
        table.add_column(name, justify="right")
    for name, policy, size, total, outcome in rows:
        table.add_row(
            name,
            policy,
            decimal(size),
            f"{100 * size / total:.0f} %" if total else "",
            f"{100 * outcome.hit_ratio:.1f} %",
            f"{100 * outcome.byte_hit_ratio:.1f} %",
        )
    Console(highlight=False).print(table)

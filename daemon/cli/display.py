"""Tables for terminals of 80 columns."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import click
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from cachefs.printable import one_line
from daemon.output import readable_size
from policies.simulator import Outcome

MAX_WIDTH = 10_000


def print_status(status: dict[str, Any]) -> None:
    ratio = hit_ratio(status) if status["hits"] + status["misses"] else "no reads yet"
    rows = [
        ("source", status["source"]),
        ("mountpoint", status["mountpoint"]),
        ("cache", status["cache"] + (", read-only" if status["read_only"] else "")),
        ("daemon", f"pid {status['pid']}, up {status['uptime_s']:.0f} s"),
        ("pinned", f"{status['pinned_inodes']:,} inodes"),
        ("cached", f"{status['cached_files']:,} files, {readable_size(status['cached_bytes'])}"),
        ("blob", f"{readable_size(status['blob_bytes'])} of {readable_size(status['cache_size_bytes'])}"),
        ("hits", f"{status['hits']:,} ({ratio}), {readable_size(status['hit_bytes'])}"),
        ("misses", f"{status['misses']:,}, {readable_size(status['miss_bytes'])}"),
        ("not cached", f"{status['skipped_admissions']:,} units (no room, disk too slow, or a failure)"),
        ("errors", f"{status['errors']:,} in the cache, {status['stale_reads']:,} stale reads"),
        ("source calls", ", ".join(f"{k} {v:,}" for k, v in sorted(status["source_ops"].items())) or "none"),
    ]
    if status["source_problem"]:
        rows.append(("source lost" if status["source_lost"] else "source moved", status["source_problem"]))
    if status.get("index_problem"):  # not from an older daemon
        rows.append(("index damaged", status["index_problem"]))
    if status["source_errors"] or status["source_reconnects"]:
        times = status["source_reconnects"]
        rows.append(("source errors", f"{status['source_errors']:,} calls; reconnected {times:,} times"))
    if problem := status.get("prefetch_problem"):  # a daemon of an older version does not say
        rows.append(("prefetch", problem))
    if status["refused_changes"]:
        rows.append(("refused", f"{status['refused_changes']:,} changes of immutable files (EPERM): see the log"))
    rows.append(("memory", f"{memory(status)}, excluding page cache"))
    for kind in ("read_hit", "read_miss"):
        found = status["latencies"][kind]
        if found["count"]:
            rows.append((kind.replace("_", " "), f"p50 {duration(found['p50_s'])}, p99 {duration(found['p99_s'])}"))
    for warm_up in status["warm_ups"]:
        of = f"{warm_up['files']:,}" + ("" if warm_up["scanned"] else " found so far")
        rows.append(("warm-up", f"{warm_up['cached_files']:,} of {of} files, {readable_size(warm_up['cached_bytes'])}"))
    print_rows(rows)


def hit_ratio(status: dict[str, Any]) -> str:
    return share(status["hits"], status["hits"] + status["misses"])


def share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def memory(status: dict[str, Any]) -> str:
    """The memory of each process."""
    return ", ".join(f"{name} {readable_size(size)}" for name, size in status["memory_bytes"].items())


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
    print_table(table)


def print_table(table: RenderableType, *, folds: bool = True) -> None:
    """`folds`: False: a program that reads it gets each row as one line."""
    console = Console(highlight=False, width=None if folds or sys.stdout.isatty() else MAX_WIDTH)
    with console.capture() as captured:
        console.print(table)
    click.echo(captured.get(), nl=False)


def info_rows(answer: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "path", answer["path"] or "/"
    yield "inode", f"{answer['inode']} ({answer['type']})"
    yield "state", STATES.get(answer["state"], answer["state"])
    if "reason" in answer:  # not from an older daemon
        yield "why", answer["reason"]
    if "is_listed" in answer:
        yield "listing", "complete" if answer["is_listed"] else "not pinned"
    if "extents" in answer:
        cached, size = answer["cached_bytes"], answer["size"]
        share = "all" if cached == size else "nothing" if not cached else f"{100 * cached / size:.1f} %"
        yield "cached", f"{share}: {readable_size(cached)} of {readable_size(size)}"
        for extent in answer["extents"]:
            yield "", f"bytes {extent['offset']:,} + {extent['length']:,} at {extent['blob_offset']:,} of the blob"
        if answer["extent_count"] > len(answer["extents"]):
            yield "", f"and {answer['extent_count'] - len(answer['extents']):,} more"
    when = answer["validated_ns"]
    since = time.strftime(", which began at %Y-%m-%d %H:%M:%S", time.localtime(when / 1e9)) if when else ""
    valid = "" if answer["is_valid"] else "; will be compared again at the next use"
    yield "compared", f"with the source in run {answer['validated_run']}{since}{valid}"


STATES = {
    "immutable": "immutable: served from the cache, not writable",
    "pinned": "pinned: valid without asking the source",
    "unpinned": "not pinned: valid for --attr-timeout",
    "written": "written through this mount, or unpinned: mutable and not cached until it is pinned",
    "mutable": "mutable, never cached",
}


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
            readable_size(size),
            f"{100 * size / total:.0f} %" if total else "",
            f"{100 * outcome.hit_ratio:.1f} %",
            f"{100 * outcome.byte_hit_ratio:.1f} %",
        )
    print_table(table)

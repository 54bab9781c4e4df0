"""`cachefs warmup`, evict, invalidate, pin, unpin and info: commands that take paths."""

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from typing import Any, BinaryIO

import click
from rich.filesize import decimal

from cachefs.client import mount_table
from cachefs.client.client import Client, OnProgress, Progress, Report, is_served
from cachefs.errors import CacheFsError
from daemon.config.parameters import PLACE, json_option
from daemon.output import say

PLAIN_LINE_S = 5.0
"""Between lines of progress if stderr is not a terminal."""
paths_argument = click.argument("paths", nargs=-1, required=True, type=PLACE)


def by_mount(paths: Iterable[str]) -> dict[str, list[str]]:
    """Mountpoints, and the paths on each, with symlinks resolved. Raises CacheFsError."""
    found: dict[str, list[str]] = {}
    for path in paths:
        plain = os.path.abspath(path)
        try:
            place = mount_table.split(plain)[0]
        except CacheFsError:
            place = mount_table.split(os.path.realpath(plain))[0]
        if is_served(place):  # else an access beneath it would hang
            plain = os.path.realpath(plain)
            place = mount_table.split(plain)[0]
        found.setdefault(place, []).append(plain)
    return found


@click.command("warmup")
@click.argument("paths", nargs=-1, type=PLACE)
@click.option("--metadata-only", is_flag=True, help="Cache names and attributes, but no data.")
@click.option("--from-list", type=click.File("rb"), metavar="FILE", help="Read more paths, one a line; - is stdin.")
@click.option("--jobs", type=click.IntRange(1, 1024), metavar="N", help="Fetch N files at once. [default: 16]")
@click.option("--check", is_flag=True, help="Print how much is cached, and fetch nothing.")
@click.option("--background", is_flag=True, help="Return at once. `cachefs status` shows the progress.")
@json_option
def warm_up(
    paths: tuple[str, ...],
    metadata_only: bool,
    from_list: BinaryIO | None,
    jobs: int | None,
    check: bool,
    background: bool,
    as_json: bool,
) -> None:
    """Fetch and pin files before a job reads them. Directories include all files beneath them.

    Cached files are not fetched again, so an interrupted warm-up resumes where it stopped. The exit status is 1 if any
    file is missing at the end.

    \b
    Examples:
      cachefs warmup /data/imagenet/train --jobs 32
      cachefs warmup /data/imagenet --check --json
      cachefs warmup --from-list epoch0.txt --background
    """
    if not paths and from_list is None:
        raise click.UsageError("give PATHS or --from-list FILE")
    if check and (background or jobs):
        raise click.UsageError("--check excludes --background and --jobs: it fetches nothing")
    wanted = by_mount(paths)
    if from_list is not None:
        for line in from_list:
            path = os.fsdecode(line.rstrip(b"\n"))  # all other bytes may be part of a name
            if not path:
                continue
            wanted.setdefault(mount_table.split(os.path.abspath(path))[0], []).append(path)
    total = Report()
    started = time.monotonic()
    silent: AbstractContextManager[OnProgress] = nullcontext(lambda progress: None)
    with silent if as_json or background else shown("checking" if check else "warming up") as on_progress:
        for place, inside in wanted.items():
            client = Client(place)
            if background:
                client.start_warm_up(inside, jobs=jobs, metadata_only=metadata_only)
            elif check:
                total += client.check(inside, metadata_only=metadata_only, on_progress=on_progress)
            else:
                total += client.warm_up(inside, jobs=jobs, metadata_only=metadata_only, on_progress=on_progress)
    if background:
        for place in wanted:
            say(f"warming up in the background; progress: cachefs status {place}")
        return
    finish(total, time.monotonic() - started, as_json=as_json, metadata_only=metadata_only)


def finish(report: Report, seconds: float, *, as_json: bool, metadata_only: bool) -> None:
    """Print the result; exit with 1 if anything is missing."""
    if as_json:
        click.echo(json.dumps({**asdict(report), "is_complete": report.is_complete, "seconds": round(seconds, 3)}))
    else:
        for problem in report.problems:
            say(f"cachefs: {problem}", err=True)
        say(_summary(report, seconds, metadata_only=metadata_only))
    if not report.is_complete:
        sys.exit(1)


def _summary(report: Report, seconds: float, *, metadata_only: bool) -> str:
    share = 100.0
    if report.cached_files < report.files:
        share = min(100 * report.cached_files / report.files, 99.9)  # never 100 % if something is missing
    parts = [
        f"{report.cached_files:,} of {report.files:,} files {'pinned' if metadata_only else 'cached'} ({share:.1f} %)"
    ]
    if not metadata_only:
        parts[0] += f", {decimal(report.cached_bytes)} of {decimal(report.bytes)}"
    if report.fetched_files:
        parts.append(f"{report.fetched_files:,} fetched in {seconds:.1f} s")
    if report.mutable_files:
        parts.append(f"{report.mutable_files:,} mutable files skipped")
    if report.errors:
        parts.append(f"{report.errors:,} errors")
    return "; ".join(parts)


@contextmanager
def shown(what: str) -> Iterator[OnProgress]:
    """Show progress on stderr: a bar on a terminal, else a line every few seconds."""
    if not sys.stderr.isatty():
        yield _plain_lines(what)
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("{task.completed:,}/{task.total:,} files"),
        TextColumn("{task.fields[bytes]}"),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(compact=True),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=0, bytes="", rate="")
        started = time.monotonic()
        first: int | None = None

        def update(progress: Progress) -> None:
            nonlocal first
            first = progress.cached_files if first is None else first
            rate = (progress.cached_files - first) / max(0.001, time.monotonic() - started)
            bar.update(
                task,
                description=what if progress.scanned else f"{what}, still searching",
                completed=progress.cached_files,
                total=progress.files,
                bytes=decimal(progress.cached_bytes),
                rate=f"{rate:,.0f}/s",
            )

        yield update


def _plain_lines(what: str) -> OnProgress:
    last = time.monotonic()

    def update(progress: Progress) -> None:
        nonlocal last
        if time.monotonic() - last < PLAIN_LINE_S:
            return
        last = time.monotonic()
        more = "" if progress.scanned else " found so far"
        say(
            f"{what}: {progress.cached_files:,} of {progress.files:,} files{more}, "
            f"{decimal(progress.cached_bytes)} of {decimal(progress.bytes)}",
            err=True,
        )

    return update


@click.command()
@paths_argument
def evict(paths: tuple[str, ...]) -> None:
    """Remove data from the cache. Frees space on the local disk; metadata stay pinned.

    \b
    Example:
      cachefs evict /data/imagenet/val
    """
    for place, inside in by_mount(paths).items():
        dropped = Client(place).evict(inside)
        say(f"{place}: {dropped.files:,} files evicted, {decimal(dropped.bytes)}")


@click.command()
@paths_argument
def invalidate(paths: tuple[str, ...]) -> None:
    """Drop cached data and metadata. The kernel drops them too, and the next use asks the source.

    \b
    Example:
      cachefs invalidate /data/imagenet/train/n01440764
    """
    for path in paths:
        for place, inside in by_mount([path]).items():
            say(f"{path}: {Client(place).invalidate(inside)} dropped")


@click.command()
@paths_argument
def pin(paths: tuple[str, ...]) -> None:
    """Make files immutable without reading them. Includes files written through the mount; fetches no data.

    \b
    Example:
      cachefs pin /data/project/preprocessed
    """
    for place, inside in by_mount(paths).items():
        with shown("pinning") as on_progress:
            report = Client(place).pin(inside, on_progress=on_progress)
        for problem in report.problems:
            say(f"cachefs: {problem}", err=True)
        skipped = f"; {report.mutable_files:,} skipped: open for writing, or --mutable" if report.mutable_files else ""
        say(f"{place}: {report.cached_files:,} files are immutable{skipped}")
        if not report.is_complete:
            sys.exit(1)


@click.command()
@paths_argument
def unpin(paths: tuple[str, ...]) -> None:
    """Make immutable files writable again. They are not cached until they are pinned, or until the next restart.

    \b
    Example:
      cachefs unpin /data/project/config.json
    """
    for place, inside in by_mount(paths).items():
        say(f"{place}: {Client(place).unpin(inside):,} files are writable")


@click.command()
@click.argument("path", type=PLACE)
@json_option
def info(path: str, as_json: bool) -> None:
    """Show the cache state of a file or directory. Includes its extents, and the last comparison with the source.

    The same is available as extended attributes: user.cachefs.state, .cached_bytes, .validated_run, .validated_ns.

    \b
    Example:
      cachefs info /data/imagenet/train/n01440764/n01440764_18.JPEG
      getfattr -n user.cachefs.state /data/imagenet/train
    """
    ((place, (inside,)),) = by_mount([path]).items()
    answer = Client(place).info(inside)
    if as_json:
        click.echo(json.dumps(answer, indent=2))
        return
    from daemon.cli.display import print_rows

    print_rows(info_rows(answer))


def info_rows(answer: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "path", answer["path"] or "/"
    yield "inode", f"{answer['inode']} ({answer['type']})"
    yield "state", STATES.get(answer["state"], answer["state"])
    if "is_listed" in answer:
        yield "listing", "complete" if answer["is_listed"] else "not pinned"
    if "extents" in answer:
        cached, size = answer["cached_bytes"], answer["size"]
        share = "all" if cached == size else "nothing" if not cached else f"{100 * cached / size:.1f} %"
        yield "cached", f"{share}: {decimal(cached)} of {decimal(size)}"
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
    "written": "written through this mount: mutable and not cached in this run",
    "mutable": "matched by --mutable: mutable, never cached",
}

"""`cachefs warmup`, and the other commands about what is cached of paths: evict, invalidate, pin, unpin, info."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, BinaryIO

import click

from cachefs.client import mount_table
from cachefs.client.client import Client, Progress, Report, is_served
from cachefs.errors import CacheFsError
from daemon.config.parameters import Place, one_line_errors
from daemon.output import say

PLAIN_LINE_S = 5.0
"""Between lines of progress that do not go to a terminal."""
paths_argument = click.argument("paths", nargs=-1, required=True, type=Place())


def by_mount(paths: Iterable[str]) -> list[tuple[Client, list[str]]]:
    """Paths as users write them, symlinks followed, with the client of the mount they lie on. Raises CacheFsError."""
    found: dict[str, list[str]] = {}
    for path in paths:
        plain = os.path.abspath(path)
        try:
            place = mount_table.split(plain)[0]
        except CacheFsError:
            place = mount_table.split(os.path.realpath(plain))[0]
        if is_served(place):  # else nothing beneath it may be touched: it would not answer
            plain = os.path.realpath(plain)
            place = mount_table.split(plain)[0]
        found.setdefault(place, []).append(plain)
    return [(Client(place), inside) for place, inside in found.items()]


def listed(file: BinaryIO) -> Iterator[str]:
    """Paths, one a line. A line ends with a newline: all other bytes may be part of a name."""
    return (os.fsdecode(line) for raw in file if (line := raw.rstrip(b"\n")))


@click.command("warmup")
@click.argument("paths", nargs=-1, type=Place())
@click.option("--metadata-only", is_flag=True, help="Names and attributes, no data.")
@click.option(
    "--from-list",
    type=click.File("rb"),
    metavar="FILE",
    help="More paths, one a line; - is standard input.",
)
@click.option(
    "--jobs", type=click.IntRange(1, 1024), metavar="N", help="How many files are fetched at once. [default: 16]"
)
@click.option("--check", is_flag=True, help="Fetch nothing: say how much is cached.")
@click.option("--background", is_flag=True, help="Return at once; `cachefs status` says how far it is.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object at the end.")
@one_line_errors
def warm_up(
    paths: tuple[str, ...],
    metadata_only: bool,
    from_list: BinaryIO | None,
    jobs: int | None,
    check: bool,
    background: bool,
    as_json: bool,
) -> None:
    """Fetch files, and all that is beneath directories, before a job reads them, and pin them.

    What is cached already is not fetched again: an interrupted warm-up goes on where it was. The exit status is 1 if
    anything is missing at the end.

    \b
    Examples:
      cachefs warmup /data/imagenet/train --jobs 32
      cachefs warmup /data/imagenet --check --json
      cachefs warmup --from-list epoch0.txt --background
    """
    if not paths and from_list is None:
        raise click.UsageError("which PATHs? Or --from-list FILE.")
    if check and (background or jobs):
        raise click.UsageError("--check fetches nothing: leave out --background and --jobs")
    wanted = by_mount(paths)
    if from_list is not None:
        for path in listed(from_list):
            place = mount_table.split(os.path.abspath(path))[0]
            known = next((inside for client, inside in wanted if client.mountpoint == place), None)
            if known is None:
                wanted.append((Client(place), known := []))
            known.append(path)
    total = Report()
    started = time.monotonic()
    with silent() if as_json or background else shown("checking" if check else "warming up") as on_progress:
        for client, inside in wanted:
            if background:
                client.start_warm_up(inside, jobs=jobs, metadata_only=metadata_only)
            elif check:
                total += client.check(inside, metadata_only=metadata_only, on_progress=on_progress)
            else:
                total += client.warm_up(inside, jobs=jobs, metadata_only=metadata_only, on_progress=on_progress)
    if background:
        for client, _ in wanted:
            say(f"in the background: cachefs status {client.mountpoint}")
        return
    finish(total, time.monotonic() - started, as_json=as_json, metadata_only=metadata_only)


def finish(report: Report, seconds: float, *, as_json: bool, metadata_only: bool) -> None:
    """Say what came of it; exit status 1 if anything is missing."""
    if as_json:
        click.echo(json.dumps({**asdict(report), "is_complete": report.is_complete, "seconds": round(seconds, 3)}))
    else:
        for problem in report.problems:
            say(f"cachefs: {problem}", err=True)
        say(summary(report, seconds, metadata_only=metadata_only))
    if not report.is_complete:
        sys.exit(1)


def summary(report: Report, seconds: float, *, metadata_only: bool) -> str:
    from rich.filesize import decimal

    share = 100 * report.cached_files / report.files if report.files else 100.0
    # Never 100 % when something is missing.
    share = min(share, 99.9) if report.cached_files < report.files else share
    parts = [
        f"{report.cached_files:,} of {report.files:,} files {'pinned' if metadata_only else 'cached'} ({share:.1f} %)"
    ]
    if not metadata_only:
        parts[0] += f", {decimal(report.cached_bytes)} of {decimal(report.bytes)}"
    if report.fetched_files:
        parts.append(f"{report.fetched_files:,} fetched in {seconds:.1f} s")
    if report.mutable_files:
        parts.append(f"{report.mutable_files:,} mutable ones left out")
    if report.errors:
        parts.append(f"{report.errors:,} errors")
    return "; ".join(parts)


@contextmanager
def silent() -> Iterator[Callable[[Progress], None]]:
    yield lambda progress: None


@contextmanager
def shown(what: str) -> Iterator[Callable[[Progress], None]]:
    """A bar on a terminal, else a line now and then; on stderr."""
    if not sys.stderr.isatty():
        yield _plain_lines(what)
        return
    from rich.console import Console
    from rich.filesize import decimal
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
        first: list[int] = []

        def update(progress: Progress) -> None:
            first.append(progress.cached_files) if not first else None
            rate = (progress.cached_files - first[0]) / max(0.001, time.monotonic() - started)
            bar.update(
                task,
                description=what if progress.scanned else f"{what}, still finding files",
                completed=progress.cached_files,
                total=progress.files,
                bytes=decimal(progress.cached_bytes),
                rate=f"{rate:,.0f}/s",
            )

        yield update


def _plain_lines(what: str) -> Callable[[Progress], None]:
    from rich.filesize import decimal

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
@one_line_errors
def evict(paths: tuple[str, ...]) -> None:
    """Take data out of the cache; the room on the local disk is free again. Metadata stay pinned.

    \b
    Example:
      cachefs evict /data/imagenet/val
    """
    from rich.filesize import decimal

    for client, inside in by_mount(paths):
        dropped = client.evict(inside)
        say(f"{client.mountpoint}: {dropped.files:,} files evicted, {decimal(dropped.bytes)}")


@click.command()
@paths_argument
@one_line_errors
def invalidate(paths: tuple[str, ...]) -> None:
    """Forget what is cached of files or directories, in the kernel too; the next use asks the source.

    \b
    Example:
      cachefs invalidate /data/imagenet/train/n01440764
    """
    for path in paths:
        for client, inside in by_mount([path]):
            say(f"{path}: {client.invalidate(inside)} dropped")


@click.command()
@paths_argument
@one_line_errors
def pin(paths: tuple[str, ...]) -> None:
    """Make files immutable as if they had been read, also those that were written through the mount. Fetches no data.

    \b
    Example:
      cachefs pin /data/project/preprocessed
    """
    for client, inside in by_mount(paths):
        with shown("pinning") as on_progress:
            report = client.pin(inside, on_progress=on_progress)
        for problem in report.problems:
            say(f"cachefs: {problem}", err=True)
        left_out = (
            f"; {report.mutable_files:,} left out: open for writing, or --mutable" if report.mutable_files else ""
        )
        say(f"{client.mountpoint}: {report.cached_files:,} files are immutable{left_out}")
        if not report.is_complete:
            sys.exit(1)


@click.command()
@paths_argument
@one_line_errors
def unpin(paths: tuple[str, ...]) -> None:
    """Let immutable files be written to again. They are not cached any more, until pinned or the next restart.

    \b
    Example:
      cachefs unpin /data/project/config.json
    """
    for client, inside in by_mount(paths):
        say(f"{client.mountpoint}: {client.unpin(inside):,} files may be written to")


@click.command()
@click.argument("path", type=Place())
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@one_line_errors
def info(path: str, as_json: bool) -> None:
    """What cachefs knows of a file or directory: its state, where its bytes are, when it was compared with the source.

    The same is to be had as extended attributes, by name: user.cachefs.state, .cached_bytes, .validated_run,
    .validated_ns.

    \b
    Example:
      cachefs info /data/imagenet/train/n01440764/n01440764_18.JPEG
      getfattr -n user.cachefs.state /data/imagenet/train
    """
    ((client, (inside,)),) = by_mount([path])
    answer = client.info(inside)
    if as_json:
        click.echo(json.dumps(answer, indent=2))
        return
    from daemon.cli.display import print_rows

    print_rows(info_rows(answer))


def info_rows(answer: dict[str, Any]) -> Iterator[tuple[str, str]]:
    from rich.filesize import decimal

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
    since = time.strftime(", which began %Y-%m-%d %H:%M:%S", time.localtime(when / 1e9)) if when else ""
    valid = "" if answer["is_valid"] else "; is compared again at its next use"
    yield "compared", f"with the source in run {answer['validated_run']}{since}{valid}"


STATES = {
    "immutable": "immutable: served from the cache, never written to",
    "pinned": "pinned: believed without asking the source",
    "unpinned": "not pinned: believed for --attr-timeout",
    "written": "written through this mount: stays mutable in this run, not cached",
    "mutable": "mutable by --mutable: never cached",
}

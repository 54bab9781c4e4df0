"""`cachefs warmup`, evict, invalidate, pin, unpin and info: commands that take paths."""

import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from typing import Any, BinaryIO

import click

from cachefs.client import mount_table
from cachefs.client.client import Client, Dropped, OnProgress, Progress, Report, is_served
from cachefs.client.locations import user
from cachefs.errors import CacheFsError
from daemon.config.parameters import PLACE, json_option
from daemon.output import print_json, readable_size, say

TIMEOUT_S = 5.0  # how long a daemon may take to list its warm-ups
PLAIN_LINE_S = 5.0  # between lines of progress if stderr is not a terminal
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
@click.option("--background", is_flag=True, help="Return at once, and print the number of the warm-up.")
@click.option("--list", "action", flag_value="list", help="List the warm-ups in the background.")
@click.option("--wait", "action", flag_value="wait", help="Wait for warm-ups in the background; print their results.")
@click.option("--cancel", "action", flag_value="cancel", help="End warm-ups in the background; keep what they fetched.")
@click.option("--id", "number", type=int, metavar="N", help="List, wait for, or cancel only warm-up N. [default: all]")
@json_option
def warm_up(
    paths: tuple[str, ...],
    metadata_only: bool,
    from_list: BinaryIO | None,
    jobs: int | None,
    check: bool,
    background: bool,
    action: str | None,
    number: int | None,
    as_json: bool,
) -> None:
    """Fetch and pin files before a job reads them. Directories include all files beneath them.

    Cached files are not fetched again, so an interrupted warm-up resumes where it stopped. The exit status is 1 if any
    file is missing at the end.

    --list, --wait and --cancel: of background warm-ups on the mounts of PATHS, or on all. A restart ends them.

    \b
    Examples:
      cachefs warmup /data/imagenet/train --jobs 32
      cachefs warmup /data/imagenet --check --json
      cachefs warmup --from-list epoch0.txt --background
      cachefs warmup --wait /data/imagenet
    """
    if action is not None:
        if from_list is not None or jobs or check or background or metadata_only:
            raise click.UsageError(f"--{action} takes no other options than --id and --json")
        of_background(action, paths, number, as_json=as_json)
        return
    if number is not None:
        raise click.UsageError("--id needs --list, --wait or --cancel")
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
    if background:
        _start(paths, wanted, jobs, metadata_only=metadata_only, as_json=as_json)
        return
    total = Report()
    started = time.monotonic()
    with nullcontext(_silent) if as_json else shown("checking" if check else "warming up") as on_progress:
        for place, inside in wanted.items():
            client = Client(place)
            if check:
                total += client.check(inside, metadata_only=metadata_only, on_progress=on_progress)
            else:
                total += client.warm_up(inside, jobs=jobs, metadata_only=metadata_only, on_progress=on_progress)
    finish(total, time.monotonic() - started, as_json=as_json, metadata_only=metadata_only)


def _start(
    paths: Iterable[str], wanted: dict[str, list[str]], jobs: int | None, *, metadata_only: bool, as_json: bool
) -> None:
    for path in paths:
        os.lstat(path)  # a missing one is an error now: later only the log would have it
    started = [
        {"mountpoint": place, "id": number}
        for place, inside in wanted.items()
        for number in Client(place).start_warm_up(inside, jobs=jobs, metadata_only=metadata_only)
    ]
    if as_json:
        print_json(started)
    else:
        for each in started:
            say(f"{each['mountpoint']}: warm-up {each['id']} runs in the background (--list, --wait, --cancel)")


def of_background(action: str, paths: Iterable[str], number: int | None, *, as_json: bool) -> None:
    """List, await or cancel warm-ups in the background."""
    places = list(dict.fromkeys(map(mount_table.containing, paths)))
    running = [each for each in _running(places, ended=action == "wait") if number in (None, each["id"])]
    if number is not None and not running and action != "list":
        if len(places) != 1:
            raise CacheFsError(f"no warm-up {number} is running; if it has ended, add its mountpoint to the command")
        running = [{"mountpoint": places[0], "id": number}]
    if action == "list":
        _print_list(running, as_json=as_json)
    elif action == "cancel":
        _cancel(running, as_json=as_json)
    elif not running and not as_json:
        say(_NONE)
    else:
        started, total = time.monotonic(), Report()
        with nullcontext(_silent) if as_json else shown("warming up") as on_progress:
            for each in running:
                total += Client(each["mountpoint"]).wait_for_warm_up(each["id"], on_progress=on_progress)
        finish(total, time.monotonic() - started, as_json=as_json, metadata_only=False)


def _running(places: list[str], *, ended: bool) -> Iterator[dict[str, Any]]:
    """The warm-ups in the background on these mounts, by default on all mounts of this user that answer.

    `ended`: also those that have ended and that nobody has awaited.
    """
    for place in places or _own_mounts():
        try:
            status = Client(place, timeout_s=TIMEOUT_S).status()
            for each in status["warm_ups"] + (status.get("ended_warm_ups", []) if ended else []):
                if "id" not in each:
                    raise CacheFsError(f"the daemon of {place} is an older version, whose warm-ups have no numbers")
                yield {"mountpoint": place, **each}
        except CacheFsError as error:
            if places:
                raise
            say(f"cachefs: {error}", err=True)


def _cancel(running: list[dict[str, Any]], *, as_json: bool) -> None:
    for each in running:
        Client(each["mountpoint"]).cancel_warm_up(each["id"])
        if not as_json:
            say(f"{each['mountpoint']}: warm-up {each['id']} cancelled")
    if as_json:
        print_json([{"mountpoint": each["mountpoint"], "id": each["id"]} for each in running])
    elif not running:
        say(_NONE)


_NONE = "no warm-up runs in the background"


def _own_mounts() -> list[str]:
    mounts = [mount for mount in mount_table.mounts() if mount.fstype == mount_table.FSTYPE]
    return [mount.mountpoint for mount in mounts if mount.user == user() and is_served(mount.mountpoint)]


def _print_list(running: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        print_json(running)
        return
    for each in running:
        of = f"{each['files']:,}" + ("" if each["scanned"] else " found so far")
        named = ", ".join(path or "." for path in each["paths"])
        others = each["path_count"] - len(each["paths"])
        more = f" and {others:,} more" if others else ""
        say(f"{each['mountpoint']}: warm-up {each['id']}: {each['cached_files']:,} of {of} files: {named}{more}")
    if not running:
        say(_NONE)


def finish(report: Report, seconds: float, *, as_json: bool, metadata_only: bool) -> None:
    """Print the result; exit with 1 if anything is missing."""
    if as_json:
        print_json({**asdict(report), "is_complete": report.is_complete, "seconds": round(seconds, 3)}, indent=None)
    else:
        for problem in report.problems:
            say(f"cachefs: {problem}", err=True)
        if report.files or report.is_complete:
            say(_summary(report, seconds, metadata_only=metadata_only))
    if not report.is_complete:
        sys.exit(1)


def _summary(report: Report, seconds: float, *, metadata_only: bool) -> str:
    share = " (100.0 %)" if report.is_complete else ""
    if report.cached_files < report.files:
        share = f" ({min(100 * report.cached_files / report.files, 99.9):.1f} %)"  # never 100 % if something is missing
    parts = [f"{report.cached_files:,} of {report.files:,} files {'pinned' if metadata_only else 'cached'}{share}"]
    if not metadata_only:
        parts[0] += f", {readable_size(report.cached_bytes)} of {readable_size(report.bytes)}"
    if report.fetched_files:
        parts.append(f"{report.fetched_files:,} fetched in {seconds:.1f} s")
    if report.mutable_files:
        parts.append(f"{report.mutable_files:,} mutable files skipped")
    if report.errors:
        parts.append(f"{report.errors:,} error{'' if report.errors == 1 else 's'}")
    return "; ".join(parts)


def _silent(_: Progress) -> None: ...


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
                bytes=readable_size(progress.cached_bytes),
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
            f"{readable_size(progress.cached_bytes)} of {readable_size(progress.bytes)}",
            err=True,
        )

    return update


@click.command()
@paths_argument
@json_option
def evict(paths: tuple[str, ...], as_json: bool) -> None:
    """Remove data from the cache. Frees space on the local disk; metadata stay pinned.

    \b
    Example:
      cachefs evict /data/imagenet/val
    """
    total = Dropped()
    for place, inside in by_mount(paths).items():
        dropped = Client(place).evict(inside)
        total = Dropped(total.files + dropped.files, total.bytes + dropped.bytes)
        if not as_json:
            say(f"{place}: {dropped.files:,} files evicted, {readable_size(dropped.bytes)}")
    if as_json:
        print_json(asdict(total))


@click.command()
@paths_argument
@json_option
def invalidate(paths: tuple[str, ...], as_json: bool) -> None:
    """Drop cached data and metadata. The kernel drops them too, and the next use asks the source.

    \b
    Example:
      cachefs invalidate /data/imagenet/train/n01440764
    """
    total = 0
    for path in paths:
        for place, inside in by_mount([path]).items():
            dropped = Client(place).invalidate(inside)
            total += dropped
            if not as_json:
                said = f"{dropped:,} files and directories dropped" if dropped else "nothing of it was cached"
                say(f"{path}: {said}; the next use asks the source")
    if as_json:
        print_json({"dropped": total})


@click.command()
@paths_argument
@json_option
def pin(paths: tuple[str, ...], as_json: bool) -> None:
    """Make files immutable without reading them. Includes files written through the mount; fetches no data.

    \b
    Example:
      cachefs pin /data/project/preprocessed
    """
    total = Report()
    for place, inside in by_mount(paths).items():
        with nullcontext(_silent) if as_json else shown("pinning") as on_progress:
            report = Client(place).pin(inside, on_progress=on_progress)
        total += report
        if as_json:
            continue
        for problem in report.problems:
            say(f"cachefs: {problem}", err=True)
        skipped = f"; {report.mutable_files:,} skipped: they stay mutable" if report.mutable_files else ""
        if report.files or report.is_complete:
            say(f"{place}: {report.cached_files:,} files are immutable{skipped}")
    if as_json:
        print_json({**asdict(total), "is_complete": total.is_complete})
    if not total.is_complete:
        sys.exit(1)


@click.command()
@paths_argument
@json_option
def unpin(paths: tuple[str, ...], as_json: bool) -> None:
    """Make immutable files writable again. They are not cached until they are pinned.

    \b
    Example:
      cachefs unpin /data/project/config.json
    """
    total = 0
    for place, inside in by_mount(paths).items():
        count = Client(place).unpin(inside)
        total += count
        if not as_json:
            say(f"{place}: {count:,} immutable files made writable")
    if as_json:
        print_json({"files": total})


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
        print_json(answer)
        return
    from daemon.cli.display import info_rows, print_rows

    print_rows(info_rows(answer))

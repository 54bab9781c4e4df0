"""`cachefs mount`: its options, what they mean together, and the daemon that they start."""

import math
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import click

from cachefs import mount_table, places
from cachefs.age import SETTLE_NS
from cachefs.attributes import NANOSECONDS
from cachefs.errors import CacheFsError
from cachefs.metadata_retention import NAMES as METADATA_RETENTION
from cachefs.options import CacheLevel, Options, Revalidate
from daemon import background, config, config_file, probe, process, settings
from daemon.conflict import check_daemon_package
from daemon.output import say
from daemon.parameters import MetricsAddress, MinimumAge, Place, Seconds, Size, one_line_errors
from policies import prefetch as prefetch_policies
from policies import retention as retention_policies
from policies.globs import Globs, InvalidGlob
from policies.prefetch.dependency_graph import DependencyGraph, InvalidGraph, parse_graph


def make_mount_config(
    *,
    source: str,
    mountpoint: str,
    cache_dir: Path | None,
    cache_size: int | None,
    metadata_snapshot: Path | None,
    cache: str,
    retention: str | None,
    metadata_limit: int | None,
    metadata_retention: str | None,
    prefetch: str | None,
    prefetch_graph: TextIO | None,
    read_only: bool,
    mutable: tuple[str, ...],
    small_file: int,
    attr_timeout: float | None,
    revalidate: str,
    source_timeout: float,
    allow_other: bool | None,
    simulate_latency: float,
    fastpath: bool,
    fetch_threads: int,
    reconnect_timeout: float,
    foreground: bool,
    profile: str,
    log_level: str,
    metrics: str | None,
    minimum_age: float,
) -> config.MountConfig:
    """In the context of the command, which knows where the values come from.

    Raises click.UsageError where options contradict each other.
    """
    context = click.get_current_context()
    if math.isinf(attr_timeout or 0.0) and not read_only:
        raise click.UsageError("--attr-timeout inf needs --read-only: other nodes' changes would never show up")
    lines: tuple[str, ...] = ()
    if prefetch_graph is not None:
        if prefetch is not None:
            raise click.UsageError("--prefetch-graph says what is fetched: leave out --prefetch")
        prefetch, retention = prefetch_policies.GRAPH, retention or "retire"
        try:
            lines = tuple(prefetch_graph)
            DependencyGraph(parse_graph(lines))
        except (InvalidGraph, UnicodeDecodeError) as error:
            raise click.UsageError(f"--prefetch-graph: {error}") from None
    if metadata_snapshot is not None and (not read_only or cache == "none"):
        raise click.UsageError("--metadata-snapshot needs --read-only: elsewhere names and listings are not pinned")
    if metadata_snapshot is not None and metadata_limit is not None:
        raise click.UsageError("--metadata-snapshot pins what is in it: leave out --metadata-limit")
    if metadata_retention is not None and metadata_limit is None:
        raise click.UsageError("--metadata-retention needs --metadata-limit")
    prefetch = prefetch or "sequential"
    if prefetch in prefetch_policies.BEYOND_FILES and not (read_only and cache == "full"):
        name = "--prefetch-graph" if lines else f"--prefetch {prefetch}"
        raise click.UsageError(f"{name} needs --read-only: elsewhere only what is read is immutable")
    try:
        globs = Globs(mutable)
    except InvalidGlob as error:
        raise click.UsageError(f"--mutable: {error}") from None
    options = Options(
        cache=CacheLevel(cache),
        retention=retention or "no-replacement",
        metadata_limit=metadata_limit,
        metadata_retention=metadata_retention or "no-replacement",
        prefetch=prefetch,
        graph=lines,
        read_only=read_only,
        mutable=globs,
        small_file_bytes=small_file,
        attr_timeout_s=attr_timeout if attr_timeout is not None else (math.inf if read_only else 1.0),
        revalidate=Revalidate(revalidate),
        source_timeout_s=source_timeout,
        simulate_latency_s=simulate_latency / 1000,
        fastpath=fastpath,
        fetch_threads=fetch_threads,
        reconnect_timeout_s=reconnect_timeout,
        settle_ns=round(minimum_age * NANOSECONDS),
    )
    allow_other = places.is_root() if allow_other is None else allow_other
    realpath = partial(probe.realpath, timeout_s=source_timeout)
    source = mount_table.absolute(source, realpath)
    computed = {
        "cache_dir": places.default_cache_dir(source),
        "retention": options.retention,
        "metadata_retention": options.metadata_retention if metadata_limit is not None else None,
        "prefetch": options.prefetch if prefetch_graph is None else None,
        "attr_timeout": options.attr_timeout_s,
        "allow_other": allow_other,
    }
    return config.MountConfig(
        source=source,
        mountpoint=mount_table.absolute(mountpoint, realpath),
        options=options,
        cache_dir=cache_dir.absolute() if cache_dir is not None else None,
        cache_size_bytes=cache_size,
        metadata_snapshot=metadata_snapshot.absolute() if metadata_snapshot is not None else None,
        allow_other=allow_other,
        foreground=foreground,
        log_level=log_level,
        metrics=metrics,
        config_file=config_file.place(context),
        settings=settings.settings(context, computed),
    )


@click.command()
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    is_eager=True,
    expose_value=False,
    callback=config_file.use,
    help="Read options from a TOML file, by their names; those on the command line win.",
)
@click.argument("source", type=Place())
@click.argument("mountpoint", type=Place())
@click.option(
    "--profile",
    type=click.Choice(list(settings.PROFILES)),
    default="training",
    show_default=True,
    is_eager=True,
    callback=settings.use_profile,
    help="training: files are immutable once read. inference: opened once, read for ever (--read-only --revalidate "
    "never). changing: the dataset changes, nothing is pinned (--cache none --attr-timeout 1 --prefetch none).",
)
@click.option(
    "--cache-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where blob and index lie, on a local SSD. [default: /var/cache/cachefs/ID of the source, "
    "for users $XDG_CACHE_HOME/cachefs/ID]",
)
@click.option("--cache-size", type=Size(), help="How much may be cached, such as 500G. [default: 90 % of what is free]")
@click.option(
    "--metadata-snapshot",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="What a new cache starts from instead of walking the tree: a file that `cachefs snapshot export` made on "
    "another node. Needs --read-only.",
)
@click.option(
    "--cache",
    type=click.Choice([level.value for level in CacheLevel]),
    default="full",
    show_default=True,
    help="none: pass everything through; metadata: pin metadata; full: data on the local disk as well.",
)
@click.option(
    "--retention",
    type=click.Choice(retention_policies.MOUNTABLE),
    help="Which data go when the cache is full. retire: directories, or partitions of --prefetch-graph, that training "
    "is through with. [default: no-replacement; with --prefetch-graph: retire]",
)
@click.option(
    "--metadata-limit",
    type=click.IntRange(min=1),
    metavar="N",
    help="How many inodes may be pinned; each takes about 700 bytes of disk. [default: no limit]",
)
@click.option(
    "--metadata-retention",
    type=click.Choice(METADATA_RETENTION),
    help="Which files' metadata go beyond the limit, and their data with them. no-replacement: what comes later is "
    "served from the source. [default: no-replacement]",
)
@click.option(
    "--prefetch",
    type=click.Choice([name for name in prefetch_policies.NAMES if name != prefetch_policies.GRAPH]),
    help="What is fetched before it is read. sequential: the next chunk of a large file; directory: the rest of a "
    "directory; all: everything, in directory order. The last two need --read-only. [default: sequential]",
)
@click.option(
    "--prefetch-graph",
    type=click.File(),
    metavar="FILE",
    help="Partitions and what they depend on, in lines of JSON: when one is opened, what depends on it is fetched. "
    "Needs --read-only. `cachefs graph build` makes them.",
)
@click.option(
    "--read-only/--no-read-only",
    default=False,
    help="The dataset is complete: pin whatever was seen, absent names included. Writes fail with EROFS.",
)
@click.option(
    "--mutable",
    multiple=True,
    metavar="GLOB",
    help="Paths that are never immutable and never cached, such as '*.log' or 'runs/**'. Repeatable.",
)
@click.option(
    "--small-file",
    type=Size(),
    default="1M",
    show_default=True,
    help="Up to this size files are fetched whole (at most 4M); of larger ones what is read, more for who reads on.",
)
@click.option(
    "--attr-timeout",
    type=Seconds(allow_infinity=True),
    metavar="S",
    help="How long what is not pinned is believed. [default: 1; with --read-only: inf]",
)
@click.option(
    "--revalidate",
    type=click.Choice([kind.value for kind in Revalidate]),
    default="auto",
    show_default=True,
    help="After a restart: compare each object with the source at its first use (lazy), never, or until it is certain "
    "that the recursive ctime of a CephFS has not moved, which takes a minute (rctime). auto: rctime where there is "
    "one, else lazy.",
)
@click.option(
    "--source-timeout",
    type=Seconds(allow_infinity=False, allow_zero=False),
    default=30.0,
    show_default=True,
    metavar="S",
    help="A call that the source does not answer for so long fails.",
)
@click.option(
    "--allow-other/--no-allow-other",
    default=None,
    help="May other users see the mount? [default: yes for root, no for users]",
)
@click.option(
    "--simulate-latency",
    type=Seconds(allow_infinity=False),
    default=0.0,
    metavar="MS",
    help="Delay every call to the source, as a parallel filesystem would. For demonstrations and benchmarks.",
)
@click.option(
    "--fastpath/--no-fastpath",
    default=True,
    help="Answer hits without Python. --no-fastpath: the same behaviour, slower. [default: if it was built]",
)
@click.option(
    "--fetch-threads",
    type=click.IntRange(1, 128),
    default=64,
    show_default=True,
    help="How many files the fast path fetches from the source at once.",
)
@click.option(
    "--reconnect-timeout",
    type=Seconds(allow_infinity=False),
    default=60.0,
    show_default=True,
    metavar="S",
    help="How long requests that need the daemon wait for the next one when it has died.",
)
@click.option("--foreground", is_flag=True, help="Stay in the foreground and log to stderr.")
@click.option(
    "--log-level",
    type=click.Choice(background.LOG_LEVELS),
    default="info",
    show_default=True,
    help="What is worth a line in the log: DIR/daemon.log of the cache, stderr or the journal.",
)
@click.option(
    "--metrics",
    type=MetricsAddress(),
    help="Serve metrics for Prometheus there: a Unix socket (/run/imagenet.sock) or a loopback port (9123). "
    "[default: no]",
)
@click.option("--minimum-age", type=MinimumAge(), default=SETTLE_NS / NANOSECONDS, hidden=True)  # for tests
@one_line_errors
def mount(**parameters: Any) -> None:
    """Mount SOURCE on MOUNTPOINT, which may be SOURCE itself.

    \b
    Examples:
      cachefs mount /ceph/imagenet /data/imagenet --read-only --cache-size 500G
      cachefs mount /ceph/project /ceph/project --mutable 'runs/**' --mutable '*.log'
      cachefs mount --config /etc/cachefs/imagenet.toml
    """
    process.leave_starter()
    mount_config = make_mount_config(**parameters)
    check_daemon_package()
    # Imported here: pyfuse3 and trio take a third of a second that `cachefs status` need not wait for.
    from cachefs.fastpath import launcher
    from daemon.session import Session

    background.log_to_stderr(mount_config.log_level)
    if mount_config.options.fastpath and not launcher.is_built():
        say("cachefs: the fast path is not built (compiler, liblmdb, xxhash): Python serves alone", err=True)
        mount_config = replace(mount_config, options=replace(mount_config.options, fastpath=False))
    session = Session(mount_config)
    if mount_config.foreground:
        session.serve(lambda: None, lambda _: None)
        return
    was_mounted = mount_table.is_mounted(mount_config.mountpoint)
    background.run_in_background(session.serve, mount_config.log_level, ends_with_command=True)
    if was_mounted:  # it was answering before, and its source may not
        return
    try:
        os.stat(mount_config.mountpoint)
    except OSError as error:
        raise CacheFsError(f"mounted, but {mount_config.mountpoint} does not answer: {error.strerror}") from error

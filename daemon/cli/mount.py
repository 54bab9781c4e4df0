"""`cachefs mount`: its options, what they mean together, and the daemon that they start."""

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import click

from cachefs.client import locations, mount_table
from cachefs.contract.shared import SETTLE_NS
from cachefs.errors import CacheFsError
from cachefs.metadata.limit import NAMES as METADATA_RETENTION
from cachefs.options import CacheLevel, Options, Revalidate
from cachefs.system.clock import NANOSECONDS
from daemon.cli.conflict import check_daemon_package
from daemon.config import config, config_file, settings
from daemon.config.parameters import MetricsAddress, MinimumAge, Place, Seconds, Size, one_line_errors
from daemon.kernel import probe
from daemon.output import say
from daemon.service import background, process
from policies import prefetch as prefetch_policies
from policies import retention as retention_policies
from policies.globs import Globs, InvalidGlob
from policies.prefetch.dependency_graph import DependencyGraph, InvalidGraph, parse_graph


def make_mount_config(given: Mapping[str, Any]) -> config.MountConfig:
    """In the context of the command, which knows where the values come from.

    `given`: the command's parameters by their names. Raises click.UsageError where they contradict each other.
    """
    context = click.get_current_context()
    _check_combination(given)
    options = _options(given)
    allow_other = locations.is_root() if given["allow_other"] is None else given["allow_other"]
    realpath = partial(probe.realpath, timeout_s=options.source_timeout_s)
    source = mount_table.absolute(given["source"], realpath)
    computed = {
        "cache_dir": locations.default_cache_dir(source),
        "retention": options.retention,
        "metadata_retention": options.metadata_retention if options.metadata_limit is not None else None,
        "prefetch": options.prefetch if given["prefetch_graph"] is None else None,
        "attr_timeout": options.attr_timeout_s,
        "allow_other": allow_other,
    }
    return config.MountConfig(
        source=source,
        mountpoint=mount_table.absolute(given["mountpoint"], realpath),
        options=options,
        cache_dir=_absolute(given["cache_dir"]),
        cache_size_bytes=given["cache_size"],
        metadata_snapshot=_absolute(given["metadata_snapshot"]),
        allow_other=allow_other,
        foreground=given["foreground"],
        log_level=given["log_level"],
        metrics=given["metrics"],
        config_file=config_file.place(context),
        settings=settings.settings(context, computed),
    )


def _check_combination(given: Mapping[str, Any]) -> None:
    read_only, cache, limit = given["read_only"], given["cache"], given["metadata_limit"]
    if math.isinf(given["attr_timeout"] or 0.0) and not read_only:
        raise click.UsageError("--attr-timeout inf needs --read-only: other nodes' changes would never show up")
    if given["prefetch_graph"] is not None and given["prefetch"] is not None:
        raise click.UsageError("--prefetch-graph says what is fetched: leave out --prefetch")
    if given["metadata_snapshot"] is not None and (not read_only or cache == "none"):
        raise click.UsageError("--metadata-snapshot needs --read-only: elsewhere names and listings are not pinned")
    if given["metadata_snapshot"] is not None and limit is not None:
        raise click.UsageError("--metadata-snapshot pins what is in it: leave out --metadata-limit")
    if given["metadata_retention"] is not None and limit is None:
        raise click.UsageError("--metadata-retention needs --metadata-limit")
    prefetch = prefetch_policies.GRAPH if given["prefetch_graph"] is not None else given["prefetch"]
    if prefetch in prefetch_policies.BEYOND_FILES and not (read_only and cache == "full"):
        name = "--prefetch-graph" if prefetch == prefetch_policies.GRAPH else f"--prefetch {prefetch}"
        raise click.UsageError(f"{name} needs --read-only: elsewhere only what is read is immutable")


def _options(given: Mapping[str, Any]) -> Options:
    retention, prefetch, graph = given["retention"], given["prefetch"], _graph(given["prefetch_graph"])
    if given["prefetch_graph"] is not None:
        prefetch, retention = prefetch_policies.GRAPH, retention or "retire"
    try:
        globs = Globs(given["mutable"])
    except InvalidGlob as error:
        raise click.UsageError(f"--mutable: {error}") from None
    attr_timeout = given["attr_timeout"]
    return Options(
        cache=CacheLevel(given["cache"]),
        retention=retention or "no-replacement",
        metadata_limit=given["metadata_limit"],
        metadata_retention=given["metadata_retention"] or "no-replacement",
        prefetch=prefetch or "sequential",
        graph=graph,
        read_only=given["read_only"],
        mutable=globs,
        small_file_bytes=given["small_file"],
        attr_timeout_s=attr_timeout if attr_timeout is not None else (math.inf if given["read_only"] else 1.0),
        revalidate=Revalidate(given["revalidate"]),
        source_timeout_s=given["source_timeout"],
        simulate_latency_s=given["simulate_latency"] / 1000,
        fastpath=given["fastpath"],
        fetch_threads=given["fetch_threads"],
        reconnect_timeout_s=given["reconnect_timeout"],
        settle_ns=round(given["minimum_age"] * NANOSECONDS),
    )


def _graph(file: TextIO | None) -> tuple[str, ...]:
    try:
        lines = tuple(file or ())
        if file is not None:
            DependencyGraph(parse_graph(lines))
    except (InvalidGraph, UnicodeDecodeError) as error:
        raise click.UsageError(f"--prefetch-graph: {error}") from None
    return lines


def _absolute(path: Path | None) -> Path | None:
    return path.absolute() if path is not None else None


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
    mount_config = make_mount_config(parameters)
    check_daemon_package()
    # Imported here: pyfuse3 and trio take a third of a second that `cachefs status` need not wait for.
    from cachefs.fastpath import processes
    from daemon.session import Session

    background.log_to_stderr(mount_config.log_level)
    if mount_config.options.fastpath and not processes.is_built():
        say("cachefs: the fast path is not built (compiler, liblmdb, xxhash): Python serves alone", err=True)
        mount_config = replace(mount_config, options=replace(mount_config.options, fastpath=False))
    session = Session(mount_config, reread=reread)
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


def reread(running: config.MountConfig) -> tuple[config.MountConfig, list[str]]:
    """As `settings.reread`, with this command's options."""
    return settings.reread(mount, running)

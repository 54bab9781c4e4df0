"""`cachefs mount`: its options, their valid combinations, and the daemon that it starts."""

import importlib.metadata
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import click

import daemon
from cachefs.client import locations, mount_table
from cachefs.contract.shared import SETTLE_NS
from cachefs.errors import CacheFsError
from cachefs.options import METADATA_RETENTION, MUTABLE_NAMES, CacheLevel, Options, Revalidate
from cachefs.system.clock import NANOSECONDS
from daemon.config import config, config_file, mount_options, parameters, settings
from daemon.kernel import probe
from daemon.kernel.instance import remove_unfinished
from daemon.output import say
from daemon.service import background, process
from policies import prefetch as prefetch_policies
from policies import retention as retention_policies
from policies.globs import Globs, InvalidGlob
from policies.prefetch.dependency_graph import DependencyGraph, InvalidGraph, parse_graph

_DISTRIBUTION = "cachefs-ml"
_FORMER_DISTRIBUTION = "cachefs"
"""Until version 0.1.0. `pip install` of a newer version leaves its metadata behind."""


def make_mount_config(given: Mapping[str, Any]) -> config.MountConfig:
    """The configuration of a mount. Runs in the context of the command, which knows where the values come from.

    `given`: the command's parameters by name. Raises click.UsageError if they contradict each other.
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
        cache_dir=given["cache_dir"] and given["cache_dir"].absolute(),
        cache_size_bytes=given["cache_size"],
        metadata_snapshot=given["metadata_snapshot"] and given["metadata_snapshot"].absolute(),
        allow_other=allow_other,
        noexec=given["noexec"],
        nosymfollow=given["nosymfollow"],
        foreground=given["foreground"],
        log_level=given["log_level"],
        metrics=given["metrics"],
        config_file=config_file.place(context),
        settings=settings.settings(context, computed),
        command=process.command_line(),
    )


def _check_combination(given: Mapping[str, Any]) -> None:
    read_only, cache, limit = given["read_only"], given["cache"], given["metadata_limit"]
    if math.isinf(given["attr_timeout"] or 0.0) and not read_only:
        raise click.UsageError("--attr-timeout inf needs --read-only: changes by other nodes would never be seen")
    if given["prefetch_graph"] is not None and given["prefetch"] is not None:
        raise click.UsageError("--prefetch-graph and --prefetch exclude each other")
    if given["metadata_snapshot"] is not None and (not read_only or cache == "none"):
        raise click.UsageError(
            "--metadata-snapshot needs --read-only, and excludes --cache none: other mounts pin no names and listings"
        )
    if given["metadata_snapshot"] is not None and limit is not None:
        raise click.UsageError("--metadata-snapshot and --metadata-limit exclude each other")
    if given["profile"] == settings.WORKSPACE and not given["immutable"]:
        raise click.UsageError("--profile workspace needs --immutable GLOB for the files that jobs only read")
    if given["metadata_retention"] is not None and limit is None:
        raise click.UsageError("--metadata-retention needs --metadata-limit")
    prefetch = prefetch_policies.GRAPH if given["prefetch_graph"] is not None else given["prefetch"]
    if prefetch in prefetch_policies.BEYOND_FILES and not (read_only and cache == "full"):
        name = "--prefetch-graph" if prefetch == prefetch_policies.GRAPH else f"--prefetch {prefetch}"
        raise click.UsageError(f"{name} needs --read-only and --cache full: other mounts only cache what is read")


def _options(given: Mapping[str, Any]) -> Options:
    retention, prefetch, graph = given["retention"], given["prefetch"], _graph(given["prefetch_graph"])
    if given["prefetch_graph"] is not None:
        prefetch, retention = prefetch_policies.GRAPH, retention or "retire"
    attr_timeout = given["attr_timeout"]
    return Options(
        cache=CacheLevel(given["cache"]),
        retention=retention or "no-replacement",
        metadata_limit=given["metadata_limit"],
        metadata_retention=given["metadata_retention"] or "no-replacement",
        prefetch=prefetch or "sequential",
        graph=graph,
        read_only=given["read_only"],
        mutable=_globs("mutable", given),
        immutable=_globs("immutable", given),
        mutable_defaults=given["mutable_defaults"],
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


def _globs(option: str, given: Mapping[str, Any]) -> Globs:
    try:
        return Globs(given[option])
    except InvalidGlob as error:
        raise click.UsageError(f"--{option}: {error}") from None


def _graph(file: TextIO | None) -> tuple[str, ...]:
    """The lines of a graph that is valid."""
    if file is None:
        return ()
    try:
        lines = tuple(file)
        DependencyGraph(parse_graph(lines))
    except (InvalidGraph, UnicodeDecodeError) as error:
        raise click.UsageError(f"--prefetch-graph: {file.name}: {error}") from None
    return lines


def _check_package() -> None:
    """Raises CacheFsError if another distribution has installed a package `daemon`, as python-daemon does.

    One has then overwritten files of the other, and errors would be obscure.
    """
    owners = {found.name for found in importlib.metadata.distributions() if _contains_daemon(found)}
    others = sorted(owners - {_DISTRIBUTION, _FORMER_DISTRIBUTION})
    if others or getattr(daemon, "DISTRIBUTION", None) != _DISTRIBUTION:
        names = ", ".join(others) or "another distribution"
        raise CacheFsError(
            f"the import package 'daemon' of cachefs is shared with {names}: "
            "install cachefs in a virtual environment of its own"
        )
    both = (_DISTRIBUTION, f"{_DISTRIBUTION}-client")
    versions = {found.version for name in both for found in importlib.metadata.distributions(name=name)}
    if len(versions) > 1:
        raise CacheFsError(
            f"{both[0]} and {both[1]} have different versions here: uninstall both, then install {both[0]}, which "
            "contains the client"
        )


def _contains_daemon(distribution: importlib.metadata.Distribution) -> bool:
    """Has it a package `daemon`? packages_distributions() would parse the path of each installed file to say so."""
    packages = distribution.read_text("top_level.txt")
    if packages is not None:
        return "daemon" in packages.split()
    return any(line.startswith("daemon/") for line in (distribution.read_text("RECORD") or "").splitlines())


@click.command(cls=mount_options.MountCommand)
@mount_options.option
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    is_eager=True,
    expose_value=False,
    callback=config_file.use,
    help="Read options from a TOML file, by name. The command line overrides the file.",
)
@click.argument("source", type=parameters.DIRECTORY)
@click.argument("mountpoint", type=parameters.DIRECTORY)
@click.option(
    "--profile",
    type=click.Choice(list(settings.PROFILES)),
    default="training",
    is_eager=True,
    callback=settings.use_profile,
    help="Set defaults for a use. training: files are immutable once read. workspace: only files that --immutable "
    "matches are, beside results that change. inference: files never change (--read-only --revalidate never). "
    "changing: the dataset changes, nothing is pinned (--cache none --attr-timeout 1 --prefetch none).",
)
@click.option(
    "--cache-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Store the cache in DIR, on a local SSD. [default: /var/cache/cachefs/ID or $XDG_CACHE_HOME/cachefs/ID]",
)
@click.option(
    "--cache-size",
    type=parameters.CACHE_SIZE,
    help="Limit the size of the cache, e.g. 500G. [default: 90 % of free space]",
)
@click.option(
    "--metadata-snapshot",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Fill a new cache from a file that `cachefs snapshot export` wrote, without a scan. Needs --read-only.",
)
@click.option(
    "--cache",
    type=click.Choice([level.value for level in CacheLevel]),
    default="full",
    help="Choose what to cache: none, metadata (names and attributes), or full (metadata, and data on disk).",
)
@click.option(
    "--retention",
    type=click.Choice(retention_policies.MOUNTABLE),
    help="Choose which data to evict when the cache is full. retire: directories, or partitions of --prefetch-graph, "
    "that training has finished with. [default: no-replacement; with --prefetch-graph: retire]",
)
@click.option(
    "--metadata-limit",
    type=click.IntRange(min=1),
    metavar="N",
    help="Limit the number of pinned inodes. Each takes about 700 bytes of disk. [default: no limit]",
)
@click.option(
    "--metadata-retention",
    type=click.Choice(METADATA_RETENTION),
    help="Choose which files lose their pinned metadata, and with it their data, beyond --metadata-limit. "
    "no-replacement: later files are not pinned. [default: no-replacement]",
)
@click.option(
    "--prefetch",
    type=click.Choice([name for name in prefetch_policies.NAMES if name != prefetch_policies.GRAPH]),
    help="Choose what to fetch before it is read. sequential: the next chunk of a large file; directory: the other "
    "files of a directory; all: everything, in directory order. The last two need --read-only and --cache full. "
    "[default: sequential]",
)
@click.option(
    "--prefetch-graph",
    type=click.File(),
    metavar="FILE",
    help="Fetch the dependents of a partition when it is opened. `cachefs graph build` makes FILE. Needs --read-only.",
)
@click.option(
    "--read-only/--no-read-only",
    default=False,
    help="Treat the dataset as complete: pin all that is looked up, absent names too. Writes fail with EROFS.",
)
@click.option(
    "--mutable",
    multiple=True,
    metavar="GLOB",
    help="Never make these paths immutable, and never cache them, e.g. '*.log' or 'runs/**'. Repeatable.",
)
@click.option(
    "--mutable-defaults/--no-mutable-defaults",
    default=True,
    help=f"On read-write mounts, also keep files with these names mutable: {', '.join(MUTABLE_NAMES)}.",
)
@click.option(
    "--immutable",
    multiple=True,
    metavar="GLOB",
    help="Make only these paths immutable once read, e.g. 'data/**'; all others are as with --mutable. Repeatable.",
)
@click.option(
    "--small-file",
    type=parameters.SIZE,
    default="1M",
    help="Fetch files up to this size whole, and larger files in windows that grow with sequential reads. Values above "
    "4M count as 4M.",
)
@click.option(
    "--attr-timeout",
    type=parameters.SECONDS_OR_INFINITY,
    help="Use unpinned metadata for S seconds without asking the source. With --read-only, a finite value also makes "
    "the mount pin only files that are read. [default: 1; with --read-only: inf]",
)
@click.option(
    "--revalidate",
    type=click.Choice([kind.value for kind in Revalidate]),
    default="auto",
    help="Compare cached objects with the source after a remount. lazy: at the first use of each; rctime: only until "
    "the recursive ctime of CephFS proves that nothing has changed; auto: rctime if there is one, else lazy.",
)
@click.option(
    "--source-timeout",
    type=parameters.POSITIVE_SECONDS,
    default=30.0,
    help="Fail a call that the source does not answer in this time.",
)
@click.option(
    "--allow-other/--no-allow-other",
    default=None,
    help="Let other users access the mount. [default: yes for root, no for users]",
)
@click.option("--noexec/--exec", default=False, help="Let no program be executed from the mount.")
@click.option("--nosymfollow/--symfollow", default=False, help="Let the kernel follow no symbolic link on the mount.")
@click.option(
    "--simulate-latency",
    type=parameters.MILLISECONDS,
    default=0.0,
    help="Delay every call to the source, for demonstrations and benchmarks.",
)
@click.option(
    "--fastpath/--no-fastpath",
    default=True,
    help="Answer hits in C, if the fast path was built. --no-fastpath behaves the same, but is slower.",
)
@click.option(
    "--fetch-threads",
    type=click.IntRange(1, 128),
    default=64,
    help="Set how many files the fast path fetches at once.",
)
@click.option(
    "--reconnect-timeout",
    type=parameters.SECONDS,
    default=60.0,
    help="If the daemon dies, let requests that need it wait S seconds for a new daemon; then they fail with EIO. "
    "If no fast path can be started for S seconds, the mount ends.",
)
@click.option("--foreground", is_flag=True, help="Stay in the foreground and log to stderr.")
@click.option(
    "--log-level",
    type=click.Choice(background.LOG_LEVELS),
    default="info",
    help="Set the lowest severity to log. The log is daemon.log in the cache directory, or stderr with --foreground.",
)
@click.option(
    "--metrics",
    type=parameters.METRICS_ADDRESS,
    help="Serve Prometheus metrics on a Unix socket (/run/imagenet.sock), a loopback port (9123), or an address that "
    "other nodes reach (0.0.0.0:9123; without authentication). [default: no]",
)
@click.option("--minimum-age", type=parameters.MINIMUM_AGE, default=SETTLE_NS / NANOSECONDS, hidden=True)  # for tests
def mount(**given: Any) -> None:
    """Mount SOURCE on MOUNTPOINT. Both may be the same directory. MOUNTPOINT is created if its parent exists.

    Times are numbers of seconds, or have a unit: 500ms, 5s, 2m, 1h.

    \b
    Examples:
      cachefs mount /ceph/imagenet /data/imagenet --read-only --cache-size 500G
      cachefs mount /ceph/project /ceph/project --mutable 'runs/**' --mutable '*.log'
      cachefs mount --config /etc/cachefs/imagenet.toml
    """
    process.leave_starter()
    mount_config = make_mount_config(given)
    _check_package()
    # Imported here: pyfuse3 and trio take a third of a second, which `cachefs status` need not wait for.
    from cachefs.fastpath import processes
    from daemon.session import Session

    background.log_to_stderr(mount_config.log_level)
    if mount_config.options.fastpath and not processes.is_built():
        say(
            "cachefs: the fast path is not built (it needs a C compiler, liblmdb and xxhash): running without", err=True
        )
        mount_config = replace(mount_config, options=replace(mount_config.options, fastpath=False))
    session = Session(mount_config, reread=reread)
    if mount_config.foreground:
        session.serve(lambda: None, lambda _: None)
        return
    was_mounted = mount_table.is_mounted(mount_config.mountpoint)
    try:
        background.run_in_background(session.serve, mount_config.log_level, ends_with_command=True)
    except Exception:
        if not was_mounted:
            remove_unfinished(mount_config.mountpoint)
        raise
    if was_mounted:  # a take-over: the mount answered before, and its source may not answer now
        return
    try:
        os.stat(mount_config.mountpoint)
    except OSError as error:
        raise CacheFsError(f"mounted, but {mount_config.mountpoint} does not answer: {error.strerror}") from error


reread = partial(settings.reread, mount)
"""`settings.reread` with the options of this command."""

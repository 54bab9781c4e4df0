"""The command line. Errors are one line on stderr and exit status 1; usage errors exit with 2."""

import json
import os
import select
import signal
import time
from contextlib import suppress
from pathlib import Path

import click

import cachefs
from cachefs.client import mount_table
from cachefs.client.client import Client, is_served, is_served_by, server
from cachefs.client.hand_over import Handed
from cachefs.errors import CacheFsError
from cachefs.system.claims import is_dying
from daemon.cli.doctor import doctor
from daemon.cli.maintenance import gc, verify
from daemon.cli.mount import make_mount_config, mount, reread
from daemon.cli.snapshot import snapshot
from daemon.cli.tools.graph import graph
from daemon.cli.tools.simulate import simulate
from daemon.cli.tools.trace import trace
from daemon.cli.warm_up import evict, info, invalidate, pin, unpin, warm_up
from daemon.config import config
from daemon.config.parameters import Place, one_line_errors
from daemon.config.settings import as_toml
from daemon.kernel import mounts
from daemon.kernel.instance import MountInstance, detach_dead, remove_remains
from daemon.output import say
from daemon.service import background, process

UMOUNT_TIMEOUT_S = 90.0
END_POLL_S = 0.1
_VERSION_THAT_DID_NOT_SAY = 3
"""Of the memory that daemon and fast path share."""


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(cachefs.__version__, prog_name="cachefs")
def main() -> None:
    """A filesystem cache for machine-learning training.

    Mounts a dataset directory that lives on CephFS, Lustre or another parallel filesystem. Files that were read once
    are immutable and are served from the local disk; from the second epoch on the source is left alone.

    \b
    Example:
      cachefs mount /ceph/imagenet /data/imagenet --read-only
      cachefs warmup /data/imagenet
      python train.py --data /data/imagenet
      cachefs status /data/imagenet --watch
      cachefs umount /data/imagenet

    \b
    Completion (zsh and fish alike):
      eval "$(_CACHEFS_COMPLETE=bash_source cachefs)"
    """


@main.command()
@click.argument("mountpoint", type=Place())
@one_line_errors
def umount(mountpoint: str) -> None:
    """Unmount, and wait until everything is on disk.

    \b
    Example:
      cachefs umount /data/imagenet
    """
    unmount_and_wait(mount_table.absolute(mountpoint))


def unmount_and_wait(place: str) -> None:
    """Raises CacheFsError with the reason."""
    mounts.check_mounted(place)
    _wake_daemon(place)
    try:
        pid = Client(place).status()["pid"]
        daemon = os.pidfd_open(pid)
    except (CacheFsError, OSError):
        # Its fast path would have its jobs wait for a daemon that cannot come any more.
        if not detach_dead(place, MountInstance.has_lost_daemon):
            mounts.unmount(place, lazy=True)  # its daemon does not answer: nothing to wait for
        remove_remains(place)
        return
    top = mount_table.top_mount(place)
    try:
        mounts.unmount(place)
        others = [m.mountpoint for m in mount_table.mounts() if top is not None and m.device == top.device]
        if others:
            raise CacheFsError(
                f"unmounted, but the mount lives on at {', '.join(others)} (mount --bind): umount that, too"
            )
        if not _has_ended(pid, daemon, UMOUNT_TIMEOUT_S):
            raise CacheFsError(f"unmounted, but the daemon is still writing after {UMOUNT_TIMEOUT_S:.0f} s")
    finally:
        os.close(daemon)


def _has_ended(pid: int, pidfd: int, timeout_s: float) -> bool:
    """Wait for the end of a daemon. One of its threads may remain, in the kernel, for a source that hangs."""
    deadline = time.monotonic() + timeout_s
    while not select.select([pidfd], [], [], END_POLL_S)[0]:
        if is_dying(pid):
            return True
        if time.monotonic() > deadline:
            return False
    return True


@main.command()
@click.argument("mountpoint", type=Place())
@one_line_errors
def restart(mountpoint: str) -> None:
    """Replace the processes of a mount by those of the installed version. Jobs go on: nothing is unmounted.

    \b
    Example (an upgrade):
      pip install --upgrade cachefs
      cachefs restart /data/imagenet
    """
    from cachefs.store import cache_directory

    process.leave_starter()
    place = mount_table.absolute(mountpoint)
    try:
        mounted = MountInstance.on_top(place)
    except FileNotFoundError:
        raise CacheFsError(f"{place} was mounted by another user: only they may restart it") from None
    if mounted is None:
        raise CacheFsError(f"nothing is mounted on {place} by cachefs")
    mount_config = config.load(mounted.directory / config.CONFIG_NAME)
    if is_served(place):
        _wake_daemon(place)
        _check_replaceable(place)
        cache_directory.check_inheritable(mount_config.cache_place, mount_config.source)
    from daemon.session import Session

    background.log_to_stderr(mount_config.log_level)
    # From the fork on all depends on the successor alone: this command may be killed.
    session = Session(mount_config, reread=reread, dismiss=_dismiss)
    background.run_in_background(session.serve, mount_config.log_level, ends_with_command=False)
    if not mounted.is_mounted():
        raise CacheFsError(f"{place} was unmounted as soon as the mount was ready")


def _check_replaceable(place: str) -> None:
    """Raises CacheFsError where the daemon cannot have a successor, before it is sent away for one."""
    from cachefs.contract.shared import SHARED_VERSION
    from cachefs.fastpath import processes

    status = Client(place).status()
    fastpath = status["fastpath"]
    if fastpath is None:
        return  # it says so itself
    if not process.has_descriptors_of(status["pid"]):
        raise CacheFsError(
            f"more files are open on {place} than this shell lets its processes have: raise ulimit -n, or "
            "restart it as its service does"
        )
    if not processes.is_built():
        raise CacheFsError("the fast path of this version is not built: nothing could take the mount over")
    if fastpath.get("shared_version", _VERSION_THAT_DID_NOT_SAY) != SHARED_VERSION:
        raise CacheFsError(
            f"{place} is served by another version, whose processes share memory of another layout: "
            "umount it, and mount it again"
        )


def _wake_daemon(place: str) -> None:
    """A daemon that was stopped (SIGSTOP) answers nobody, and hears no signal but these."""
    pid = server(place)
    with suppress(OSError):
        if pid:
            os.kill(pid, signal.SIGCONT)


def _dismiss(mounted: MountInstance) -> Handed:
    """Have the daemon end, and leave the mount; what it had open. Raises CacheFsError where it does not."""
    if not is_served_by(mounted.directory):
        return Handed()
    client = Client(mounted.mountpoint, directory=mounted.directory)
    pid = client.status()["pid"]
    daemon = os.pidfd_open(pid)
    opened = client.leave()
    if not _has_ended(pid, daemon, UMOUNT_TIMEOUT_S):
        raise CacheFsError(f"the daemon is still busy after {UMOUNT_TIMEOUT_S:.0f} s; try again")
    return opened


@main.command()
@click.argument("mountpoint", type=Place())
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("--watch", "watched", is_flag=True, help="A live screen, until Ctrl-C.")
@click.option("--interval", type=click.FloatRange(0.1), default=2.0, show_default=True, metavar="S", help="Of --watch.")
@one_line_errors
def status(mountpoint: str, as_json: bool, watched: bool, interval: float) -> None:
    """What a mount is doing: hits, misses, what is cached, what went to the source.

    \b
    Examples:
      cachefs status /data/imagenet --watch
      cachefs status /data/imagenet --json
    """
    client = Client(mountpoint)
    answer = client.status()
    if "latencies" not in answer:
        raise CacheFsError(f"the daemon of {mountpoint} is of an older version: cachefs restart {mountpoint}")
    if watched:
        from daemon.cli.watch import watch

        with suppress(KeyboardInterrupt):
            watch(client, interval)
        return
    if as_json:
        click.echo(json.dumps(answer, indent=2))
        return
    from daemon.cli.display import print_status

    print_status(answer)


@main.group("config")
def configuration() -> None:
    """Configuration files, as `cachefs mount --config` reads them.

    \b
    Example:
      cachefs config check /etc/cachefs/imagenet.toml
      cachefs config show /data/imagenet
    """


@configuration.command()
@click.argument("file", type=click.Path(path_type=Path))
def check(file: Path) -> None:
    """Say whether a file makes sense. Nothing is mounted.

    \b
    Example:
      cachefs config check /etc/cachefs/imagenet.toml
    """
    with mount.make_context("mount", ["--config", str(file)]) as context:
        make_mount_config(context.params)
    say(f"{file}: good")


@configuration.command()
@click.argument("mountpoint", type=Place())
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@one_line_errors
def show(mountpoint: str, as_json: bool) -> None:
    """Every option of a mount, and where its value comes from: as a configuration file, defaults commented out.

    \b
    Example:
      cachefs config show /data/imagenet
      cachefs config show /data/imagenet > /etc/cachefs/imagenet.toml
    """
    answer = Client(mountpoint).settings()
    if as_json:
        click.echo(json.dumps(answer, indent=2))
        return
    for line in as_toml({name: config.Setting(**setting) for name, setting in answer.items()}):
        say(line)


for command in (
    mount,
    warm_up,
    evict,
    invalidate,
    pin,
    unpin,
    info,
    snapshot,
    verify,
    gc,
    doctor,
    simulate,
    graph,
    trace,
):
    main.add_command(command)

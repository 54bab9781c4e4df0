"""The command line. Errors are one line on stderr with exit status 1; usage errors exit with 2."""

import os
import select
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

import cachefs
from cachefs.client import locations, mount_table
from cachefs.client.client import Client, OtherUser, is_served, server
from cachefs.client.hand_over import Handed
from cachefs.errors import CacheFsError
from cachefs.system.claims import is_dying
from cachefs.system.descriptors import closing
from daemon.cli.configuration import configuration
from daemon.cli.doctor import doctor
from daemon.cli.maintenance import gc, verify
from daemon.cli.mount import mount, reread
from daemon.cli.snapshot import snapshot
from daemon.cli.status import status
from daemon.cli.tools.graph import graph
from daemon.cli.tools.simulate import simulate
from daemon.cli.tools.trace import trace
from daemon.cli.warm_up import evict, info, invalidate, pin, unpin, warm_up
from daemon.config import config
from daemon.config.parameters import mountpoint_argument
from daemon.kernel import detached, mounts
from daemon.kernel.instance import MountInstance, detach_dead, remove_remains
from daemon.output import name_output_in_errors, one_line_errors, say
from daemon.service import background, memory, process

UMOUNT_TIMEOUT_S = 90.0
END_POLL_S = 0.1
_BRIEF_S = 1.0
"""A daemon that has not ended after this time is asked whether something still holds its mount."""
_FIRST_SHARED_VERSION = 3
"""Version of the shared memory of daemons whose status does not have it."""


class Cachefs(click.Group):
    def main(self, *args: Any, **kwargs: Any) -> Any:
        name_output_in_errors()
        with one_line_errors():  # in the help of the group itself
            return super().main(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with one_line_errors():
            return super().invoke(ctx)


@click.group(
    cls=Cachefs,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True},
    commands=[
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
        status,
        configuration,
        simulate,
        graph,
        trace,
    ],
)
@click.version_option(cachefs.__version__, prog_name="cachefs")
def main() -> None:
    """A filesystem cache for machine-learning training.

    Mounts a dataset directory that lies on CephFS, Lustre or another parallel filesystem. A file becomes immutable when
    it is first read, and is then served from the local disk. From the second epoch on the source is idle.

    \b
    Example:
      cachefs mount /ceph/imagenet /data/imagenet --read-only
      cachefs warmup /data/imagenet
      python train.py --data /data/imagenet
      cachefs status /data/imagenet --watch
      cachefs umount /data/imagenet

    \b
    Shell completion (replace bash by zsh or fish):
      eval "$(_CACHEFS_COMPLETE=bash_source cachefs)"
    """


@main.command()
@mountpoint_argument
@click.option("--lazy", is_flag=True, help="Detach the mount at once. Jobs keep the files that they have open.")
@click.option("--force", is_flag=True, help="End a mount that is in use. Calls of jobs on their open files fail.")
def umount(mountpoint: str, lazy: bool, force: bool) -> None:
    """Unmount, and wait until all data are on disk.

    With --lazy the daemon ends, and all data are on disk, when jobs have closed their last file. cachefs does not wait
    for that. It does not wait either if a container has a copy of the mount, or an overlayfs lies on it: one line says
    what holds the mount, and `cachefs status` lists it until its daemon ends. --force ends it at once.

    \b
    Example:
      cachefs umount /data/imagenet
      cachefs umount /data/imagenet --force
    """
    place = mount_table.absolute(mountpoint)
    if lazy and force:
        raise click.UsageError("--lazy and --force exclude each other: --lazy keeps open files, --force does not")
    if lazy:
        mounts.check_mounted(place)
        if is_served(place):
            mounts.unmount(place, lazy=True)
            return
    unmount_and_wait(place, force=force)


def unmount_and_wait(place: str, *, force: bool = False) -> None:
    """`force`: also if it is in use. Raises CacheFsError with the reason."""
    if force and not mount_table.is_mounted(place) and (held := detached.find(place)):
        for each in held:
            _end_detached(each)
        return
    mounts.check_mounted(place)
    _wake_daemon(place)
    try:
        pid = _pid_of_daemon(place, force=force)
        daemon = os.pidfd_open(pid)
    except (CacheFsError, OSError):
        # Without a daemon nothing has to be written. A dead mount is also aborted: its fast path would let jobs wait
        # for a daemon that cannot come.
        if not detach_dead(place, MountInstance.has_lost_daemon):
            mounts.unmount(place, lazy=True)
        remove_remains(place)
        return
    copies = _copies(place)
    with closing(daemon):
        there = MountInstance.on_top(place) if force else None
        if there is not None:
            there.unmount(None)
            if there.is_on_top():
                raise CacheFsError(f"cannot unmount {place}: another process is mounting there; try again")
        else:
            mounts.unmount(place)
        # Its device number is free now, and another mount may have it already.
        if others := [m.mountpoint for m in mount_table.mounts() if m in copies]:
            raise CacheFsError(
                f"unmounted, but still mounted on {', '.join(others)} (mount --bind): unmount that as well"
            )
        if _has_ended(pid, daemon, _BRIEF_S):
            return
        if held := [each for each in detached.find(place) if each.pid == pid]:
            say(f"cachefs: {held[0]}", err=True)
        elif not _has_ended(pid, daemon, UMOUNT_TIMEOUT_S):
            raise CacheFsError(
                f"unmounted, but the daemon has not ended after {UMOUNT_TIMEOUT_S:.0f} s: it is still writing"
            )


def _end_detached(held: detached.Detached) -> None:
    with closing(os.pidfd_open(held.pid)) as daemon:
        signal.pidfd_send_signal(daemon, signal.SIGTERM)
        if not _has_ended(held.pid, daemon, UMOUNT_TIMEOUT_S):
            raise CacheFsError(f"the daemon (pid {held.pid}) has not ended after {UMOUNT_TIMEOUT_S:.0f} s")


def _copies(place: str) -> list[mount_table.Mount]:
    """Other mounts of the filesystem that is mounted at `place` (mount --bind)."""
    top = mount_table.top_mount(place)
    return [m for m in mount_table.mounts() if top is not None and m.device == top.device and m != top]


def _pid_of_daemon(place: str, *, force: bool) -> int:
    """Raises CacheFsError, OSError if it has none. `force`: also that of a daemon which does not answer."""
    if not force:
        return int(Client(place).status()["pid"])
    pid = server(place)
    if pid is None or is_dying(pid):
        raise CacheFsError(f"{place} has no daemon")
    return pid


def _has_ended(pid: int, pidfd: int, timeout_s: float) -> bool:
    """Wait for the end of a daemon. One of its threads may remain in the kernel, waiting for a source that hangs."""
    deadline = time.monotonic() + timeout_s
    while not select.select([pidfd], [], [], END_POLL_S)[0]:
        if is_dying(pid):
            return True
        if time.monotonic() > deadline:
            return False
    return True


@main.command()
@mountpoint_argument
@click.option(
    "--check",
    "only_check",
    is_flag=True,
    help="Change nothing. Exit with 1, and say why, if the installed version cannot take over.",
)
def restart(mountpoint: str, only_check: bool) -> None:
    """Replace the processes of a mount. The installed version takes over; nothing is unmounted, and jobs continue.

    \b
    Examples (an upgrade; the same for a service):
      pip install --upgrade . && cachefs restart /data/imagenet
      cachefs restart /data/imagenet --check && systemctl restart cachefs@imagenet
    """
    from cachefs.store import cache_directory

    process.leave_starter()
    place = mount_table.absolute(mountpoint)
    top = mounts.check_mounted(place)
    try:
        mounted = MountInstance(place, top.device)
    except FileNotFoundError:
        raise OtherUser(top) from None
    if not mounted.directory.exists():
        raise OtherUser(top)
    mount_config = config.load(mounted.directory / config.CONFIG_NAME)
    if is_served(place, mounted.directory):
        _wake_daemon(place)
        _check_replaceable(place)
        cache = mount_config.cache_place
        cache_directory.check_inheritable(cache, mount_config.source, locations.session_directory(cache))
    if only_check:
        return
    from daemon.session import Session

    background.log_to_stderr(mount_config.log_level)
    session = Session(mount_config, reread=reread, dismiss=_dismiss)

    def serve(ready: Callable[[], None], claimed: Callable[[Path], None]) -> None:
        with suppress(OSError):
            process.show_command(mount_config.command)
        session.serve(ready, claimed)

    # After the fork the successor needs this command no more: it may be killed.
    background.run_in_background(serve, mount_config.log_level, ends_with_command=False)
    if not mounted.is_mounted():
        raise CacheFsError(f"{place} was unmounted immediately after the restart: mount it again")


def _check_replaceable(place: str) -> None:
    """Raises CacheFsError if the daemon cannot have a successor. Called before the daemon is told to leave."""
    from cachefs.contract.shared import SHARED_VERSION
    from cachefs.fastpath import processes

    if short := memory.shortage():
        raise CacheFsError(short)
    status = Client(place).status()
    fastpath = status["fastpath"]
    if fastpath is None:
        raise CacheFsError(
            f"{place} is mounted without the fast path, and ends with its daemon: unmount it, and mount it again"
        )
    if not process.has_descriptors_of(status["pid"]):
        raise CacheFsError(
            f"more files are open on {place} than the limit of this shell allows: raise ulimit -n, or restart with "
            "the limit of the service"
        )
    if not processes.is_built():
        raise CacheFsError("the fast path of this version is not built: it could not take over the mount")
    if fastpath.get("shared_version", _FIRST_SHARED_VERSION) != SHARED_VERSION:
        raise CacheFsError(
            f"{place} is served by another version, whose shared memory has another layout: unmount it, and mount it "
            "again"
        )


def _wake_daemon(place: str) -> None:
    """Continue a daemon that was stopped (SIGSTOP): it answers no request, and receives no other signal but SIGKILL."""
    pid = server(place)
    with suppress(OSError):
        if pid:
            os.kill(pid, signal.SIGCONT)


def _dismiss(mounted: MountInstance) -> Handed | None:
    """Make the daemon leave the mount and end; return what it had open. Raises CacheFsError if it does not end.

    None: there is no daemon.
    """
    if not is_served(mounted.mountpoint, mounted.directory):
        return None
    client = Client(mounted.mountpoint, directory=mounted.directory)
    pid = client.status()["pid"]
    daemon = os.pidfd_open(pid)
    handed = client.leave()
    deadline = time.monotonic() + UMOUNT_TIMEOUT_S
    while not _has_ended(pid, daemon, _BRIEF_S):
        if time.monotonic() > deadline:
            raise CacheFsError(f"the daemon is still busy after {UMOUNT_TIMEOUT_S:.0f} s; try again")
        handed.make_room()
    return handed

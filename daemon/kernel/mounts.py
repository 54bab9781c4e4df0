"""Mounts of this machine: what is mounted where, and what may be mounted where.

SOURCE may be MOUNTPOINT (hazard 22): the handle on the source is opened before anything is mounted over it.
Nothing here touches a mount of ours but by the mount table: that could hang.
"""

import errno
import logging
import os
import shutil
import stat
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from cachefs.client.client import server
from cachefs.client.locations import is_root
from cachefs.client.mount_table import FSTYPE, beneath, is_mounted, mounts, top_mount
from cachefs.errors import CacheFsError
from cachefs.system import syscalls
from cachefs.system.claims import is_dying
from daemon.kernel import probe

log = logging.getLogger(__name__)

READ_AHEAD_KIB = 1024
MAX_BACKGROUND = 1024
"""READs of one user that wait for the source must not keep those of others in the kernel."""
CONGESTION = 48
_IN_USE = "it is in use (a shell's directory, an open file)"
_BUSY_PATIENCE_S = 1.0
_BUSY_POLL_S = 0.02


def check_mounted(place: str) -> None:
    """Raises CacheFsError where none of ours is mounted."""
    if not is_mounted(place):
        raise CacheFsError(f"nothing is mounted on {place} by cachefs")


def unmount(path: str, *, lazy: bool = False) -> None:
    """Wait for what uses it for a moment only, as a recorder's queue does. Raises CacheFsError with the reason."""
    ends_s = time.monotonic() + _BUSY_PATIENCE_S
    while (reason := _try_to_unmount(path, lazy=lazy)) is not None:
        if reason != _IN_USE or time.monotonic() > ends_s:
            raise CacheFsError(f"cannot unmount {path}: {reason}")
        time.sleep(_BUSY_POLL_S)


def _try_to_unmount(path: str, *, lazy: bool) -> str | None:
    """Why not."""
    if is_root():
        try:
            syscalls.umount2(path, syscalls.MNT_DETACH if lazy else 0)
        except OSError as error:
            return _IN_USE if error.errno == errno.EBUSY else error.strerror
        return None
    command = ["fusermount3", "-u", *(["-z"] if lazy else []), "--", path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    return _IN_USE if os.strerror(errno.EBUSY) in done.stderr else done.stderr.strip() or "fusermount3 failed"


def check_fuse() -> None:
    if not os.path.exists("/dev/fuse"):
        raise CacheFsError("/dev/fuse does not exist: load the fuse module (modprobe fuse)")
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        raise CacheFsError("no permission to open /dev/fuse")
    if not is_root() and shutil.which("fusermount3") is None:
        raise CacheFsError("fusermount3 is needed to mount without root: install the package fuse3")


def make_room(source: str, mountpoint: str) -> None:
    """Detach dead cachefs mounts. Refuse what else is mounted there."""
    while (top := top_mount(mountpoint)) is not None and top.fstype == FSTYPE:
        pid = server(mountpoint)
        if not (pid is not None and is_dying(pid)) and not probe.has_died(mountpoint):
            raise CacheFsError(f"{mountpoint} is in use: {top.source} is mounted there by cachefs")
        unmount(mountpoint, lazy=True)
        log.warning("detached the mount of a cachefs that has died from %s", mountpoint)
    if top is not None and source != mountpoint:
        raise CacheFsError(f"{mountpoint} is in use: {top.source} ({top.fstype}) is mounted there")


def check_places(source: str, mountpoint: str, own: Mapping[str, Path], *, timeout_s: float) -> None:
    """Refuse one strictly inside the other, what is no directory, and what does not answer.

    `own`: what the daemon writes, by what it is called. None of it may lie in the source, where it would be data, or
    beneath the mountpoint: the daemon would wait for itself.

    Nothing of this process ever waits for a source that hangs from the start: it could not even end.
    """
    for path, what in ((source, "source"), (mountpoint, "mountpoint")):
        try:
            mode = probe.mode_of(path, timeout_s=timeout_s)
        except TimeoutError as error:
            raise CacheFsError(f"the {what} {path} does not answer") from error
        except OSError as error:
            raise CacheFsError(f"the {what} {path} cannot be used: {error.strerror}") from error
        if not stat.S_ISDIR(mode):
            raise CacheFsError(f"the {what} {path} is not a directory")
    if source != mountpoint:
        for inner, outer, what in ((source, mountpoint, "source"), (mountpoint, source, "mountpoint")):
            if beneath(outer, inner) is not None:
                other = "mountpoint" if what == "source" else "source"
                raise CacheFsError(
                    f"the {what} {inner} lies inside the {other} {outer}: a job would find the mount in itself; "
                    "mount elsewhere, or over the source itself"
                )

    for what, place in own.items():
        path = probe.realpath(str(place), timeout_s=timeout_s)
        for outer, where in ((mountpoint, "mountpoint"), (source, "source")):
            if beneath(outer, path) is not None:
                raise CacheFsError(f"the {what} {place} lies in the {where} {outer}: choose another place for it")


def open_source(source: str) -> int:
    """The handle by which everything is reached. Refuses what is a cachefs mount itself."""
    try:
        fd = os.open(source, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise CacheFsError(f"cannot open the source {source}: {error.strerror}") from error
    device = os.fstat(fd).st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    if any(m.device == name and m.fstype == FSTYPE for m in mounts()):
        os.close(fd)
        raise CacheFsError(f"the source {source} is on a cachefs mount: a cache of a cache helps nobody")
    return fd


def tune_kernel(device: str) -> None:
    """Read-ahead of 1 MiB, so that requests are that large (hazard 7), and more requests at once. Root only.

    `device`: of the mount, major:minor.
    """
    if not is_root():
        return
    connection = f"/sys/fs/fuse/connections/{device.partition(':')[2]}"
    for path, value in (
        (f"/sys/class/bdi/{device}/read_ahead_kb", READ_AHEAD_KIB),
        (f"{connection}/max_background", MAX_BACKGROUND),
        (f"{connection}/congestion_threshold", CONGESTION),
    ):
        try:
            Path(path).write_text(str(value))
        except OSError as error:
            log.info("cannot set %s: %s", path, error.strerror)

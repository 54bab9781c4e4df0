"""Mounts of this machine: what is mounted, and what may be mounted.

SOURCE may be MOUNTPOINT (hazard 22): the source is opened before the mount covers it. cachefs mounts are only looked up
in the mount table: an access could hang.
"""

import errno
import logging
import os
import shutil
import stat
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from cachefs.client.client import server
from cachefs.client.locations import is_root
from cachefs.client.mount_table import FSTYPE, Mount, beneath, is_mounted, mounts, top_mount
from cachefs.errors import CacheFsError
from cachefs.system import syscalls, user_namespace
from cachefs.system.claims import is_dying
from daemon.kernel import detached, probe
from daemon.output import readable_size

log = logging.getLogger(__name__)

READ_AHEAD_KIB = 1024
MAX_BACKGROUND = 1024
"""READs of one user that wait for the source must not hold back those of others in the kernel."""
CONGESTION = 48
_IN_USE = "in use (an open file, or the directory of a shell); close it, or use --lazy or --force"
_BUSY_PATIENCE_S = 1.0
_BUSY_POLL_S = 0.02


def check_mounted(place: str) -> Mount:
    """The cachefs on top there. Raises CacheFsError if there is none: with the holders if one was, and is detached."""
    top = top_mount(place)
    if top is not None and top.fstype == FSTYPE:
        return top
    for held in detached.find(place):
        raise CacheFsError(f"{held}. Run cachefs umount --force {place} to end it now")
    raise CacheFsError(f"no cachefs is mounted on {place}")


def unmount(path: str, *, lazy: bool = False) -> None:
    """Wait a moment for brief users, such as the queue of a recorder. Raises CacheFsError with the reason.

    It is no error if another process has unmounted it meanwhile.
    """
    ends_s = time.monotonic() + _BUSY_PATIENCE_S
    while (reason := _try_to_unmount(path, lazy=lazy)) == _IN_USE and time.monotonic() <= ends_s:
        time.sleep(_BUSY_POLL_S)
    if reason is not None and (reason == _IN_USE or is_mounted(path)):
        raise CacheFsError(f"cannot unmount {path}: {reason}")


def _try_to_unmount(path: str, *, lazy: bool) -> str | None:
    """The reason if that fails."""
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
    if not user_namespace.maps_all_users() and (
        not user_namespace.owns_mounts() or user_namespace.is_unmapped(os.stat("/").st_uid)
    ):
        raise CacheFsError(
            "this user namespace (unshare --user, a rootless container) has no right to the mounts of the machine: run "
            "cachefs mount outside of it, before it is made; its processes can read that mount"
        )
    if not os.path.exists("/dev/fuse"):
        raise CacheFsError("/dev/fuse does not exist: run modprobe fuse")
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        raise CacheFsError("no permission to open /dev/fuse: check its mode; a container needs --device /dev/fuse")
    if not is_root() and shutil.which("fusermount3") is None:
        raise CacheFsError("mounting without root needs fusermount3: install the package fuse3")


def make_room(source: str, mountpoint: str) -> None:
    """Detach dead cachefs mounts. Refuse other mounts."""
    while (top := top_mount(mountpoint)) is not None and top.fstype == FSTYPE:
        pid = server(mountpoint)
        if not (pid is not None and is_dying(pid)) and not probe.has_died(mountpoint):
            raise CacheFsError(
                f"{mountpoint} is in use: {top.source} is mounted there by cachefs; run cachefs umount {mountpoint}"
            )
        unmount(mountpoint, lazy=True)
        log.warning("detached a dead cachefs mount from %s", mountpoint)
    if top is not None and source != mountpoint:
        raise CacheFsError(f"{mountpoint} is in use: {top.source} ({top.fstype}) is mounted there")


def check_places(
    source: str, mountpoint: str, own: Mapping[str, Path], *, timeout_s: float, is_mounted: bool = False
) -> None:
    """Refuse places that are nested, are not directories, or do not answer. A mountpoint may be missing.

    `own`: what the daemon writes, by name. It must not lie in the source, where it would be data, or beneath the
    mountpoint, where the daemon would wait for itself. It must not contain the mountpoint or the source: cachefs
    deletes files there.

    `is_mounted`: there is a mount on the mountpoint, which is not accessed.

    This process never waits for a source that hangs from the start: it could not even end.
    """
    for path, what in ((source, "source"), (mountpoint, "mountpoint")):
        if is_mounted and path == mountpoint:
            continue
        try:
            mode = probe.mode_of(path, timeout_s=timeout_s)
        except TimeoutError as error:
            raise CacheFsError(f"the {what} {path} does not answer") from error
        except FileNotFoundError as error:
            if path != mountpoint or path == source:
                raise CacheFsError(f"the {what} {path} cannot be used: {error.strerror}") from error
            if not _is_directory(os.path.dirname(path), timeout_s):
                raise CacheFsError(f"the mountpoint {path} cannot be made: its parent is no directory") from error
            continue
        except OSError as error:
            raise CacheFsError(f"the {what} {path} cannot be used: {error.strerror}") from error
        if not stat.S_ISDIR(mode):
            raise CacheFsError(f"the {what} {path} is not a directory")
    if source != mountpoint:
        for inner, outer, what in ((source, mountpoint, "source"), (mountpoint, source, "mountpoint")):
            if beneath(outer, inner) is not None:
                other = "mountpoint" if what == "source" else "source"
                raise CacheFsError(
                    f"the {what} {inner} is inside the {other} {outer}, so that the mount would contain itself: "
                    "mount elsewhere, or on the source itself"
                )

    for what, place in own.items():
        path = probe.realpath(str(place), timeout_s=timeout_s)
        for outer, where in ((mountpoint, "mountpoint"), (source, "source")):
            if beneath(outer, path) is not None:
                raise CacheFsError(f"the {what} {place} is inside the {where} {outer}: choose another place")
            if beneath(path, outer) is not None:
                raise CacheFsError(f"the {where} {outer} is inside the {what} {place}: choose another place")


def _is_directory(path: str, timeout_s: float) -> bool:
    with suppress(OSError):
        return stat.S_ISDIR(probe.mode_of(path, timeout_s=timeout_s))
    return False


def make_mountpoint(path: str, *, timeout_s: float) -> None:
    """Make it if it is missing, and its parent is not."""
    with suppress(FileNotFoundError):
        probe.mode_of(path, timeout_s=timeout_s)
        return
    try:
        probe.make_directory(path, timeout_s=timeout_s)
    except OSError as error:
        raise CacheFsError(f"cannot make the mountpoint {path}: {error.strerror}") from error


def size_warning(cache_place: Path, size_bytes: int | None) -> str | None:
    """A warning if a cache would be larger than its disk."""
    disk = os.statvfs(next(each for each in (cache_place, *cache_place.parents) if each.exists()))
    total_bytes = disk.f_blocks * disk.f_frsize
    if size_bytes is None or size_bytes <= total_bytes:
        return None
    return (
        f"the cache size, {readable_size(size_bytes)}, is more than the whole disk of {cache_place}, "
        f"{readable_size(total_bytes)}: reduce it, or caching stops when the disk is full"
    )


def open_source(source: str) -> int:
    """The descriptor through which the source is accessed. Refuses a cachefs mount."""
    try:
        fd = os.open(source, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise CacheFsError(f"cannot open the source {source}: {error.strerror}") from error
    device = os.fstat(fd).st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    if any(m.device == name and m.fstype == FSTYPE for m in mounts()):
        os.close(fd)
        raise CacheFsError(f"the source {source} is on a cachefs mount: use the source of that mount instead")
    return fd


def tune_kernel(device: str) -> None:
    """Set a readahead of 1 MiB, for requests of that size (hazard 7), and allow more requests at once. Root only.

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

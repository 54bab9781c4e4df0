"""Mounts without a mountpoint that live on, and what holds them.

A job with an open file holds a mount that `umount -l` detached. A copy of the mount in another mount namespace (a
container, `unshare -m`, a service with PrivateMounts), or an overlayfs above it, also holds it after a plain umount.
The daemon serves the mount until the last of these ends.
"""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cachefs.client import locations, mount_table
from cachefs.client.client import Client
from cachefs.errors import CacheFsError

_TIMEOUT_S = 2.0
_NAMED_PROCESSES = 4
_ESCAPED = re.compile(r"\\(.)")


@dataclass(frozen=True, slots=True)
class Detached:
    mountpoint: str
    """The directory on which it was mounted."""
    source: str
    pid: int
    """Of its daemon."""
    directory: Path
    """Its runtime directory."""
    holders: str
    """What holds it, in words."""

    def __str__(self) -> str:
        return (
            f"the mount on {self.mountpoint} is detached, still held by {self.holders}; its daemon (pid {self.pid}) "
            "ends with the last of them"
        )


def find(mountpoint: str | None = None) -> list[Detached]:
    """The detached mounts of this user that were mounted there. None: anywhere."""
    try:
        root = locations.runtime_root()
    except (FileNotFoundError, CacheFsError):
        return []
    prefix = "mount-" if mountpoint is None else locations.instance_prefix(mountpoint)
    here = {mount.device.rpartition(":")[2] for mount in mount_table.mounts()}
    found = []
    for directory in sorted(root.glob(f"{prefix}*")):
        minor = directory.name.rpartition("-")[2]
        if minor in here or not (directory / "control").exists():
            continue
        with suppress(CacheFsError, KeyError):
            status = Client("/", directory=directory, timeout_s=_TIMEOUT_S).status()
            if status.get("detached"):  # a daemon of an older version does not say
                found.append(_described(directory, minor, status))
    return found


def _described(directory: Path, minor: str, status: dict[str, Any]) -> Detached:
    mountpoint = status["mountpoint"]
    holders = ", ".join(_holders(f"0:{minor}", mountpoint)) or "open files, or by processes that this user cannot see"
    return Detached(mountpoint, status["source"], status["pid"], directory, holders)


def _holders(device: str, mountpoint: str) -> Iterator[str]:
    """Mount namespaces with a copy of the mount, and overlayfs mounts of this namespace that lie on it."""
    own = _namespace("self")
    processes: dict[bytes, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it has ended, or belongs to another user
            processes.setdefault(_namespace(name), []).append(int(name))
    for namespace, pids in processes.items():
        if namespace != own and any(mount.device == device for mount in _table(pids)):
            yield f"{_named(pids)} in another mount namespace (a container)"
    for mount in mount_table.mounts():
        if mount.fstype == "overlay" and any(mount_table.beneath(mountpoint, d) is not None for d in _layers(mount)):
            yield f"an overlayfs on {mount.mountpoint}"


def _namespace(process: str) -> bytes:
    """What tells the mount namespace of a process from others: the line of its first mount, which has a number that no
    other mount has. (ns/mnt cannot be read while the process is in execve(2) and closes files, which may hang.)"""
    with open(f"/proc/{process}/mountinfo", "rb") as table:
        return table.readline()


def _table(pids: list[int]) -> list[mount_table.Mount]:
    for pid in pids:
        with suppress(OSError):  # it has ended
            return mount_table.mounts(pid)
    return []


def _named(pids: list[int]) -> str:
    named = []
    for pid in sorted(pids)[:_NAMED_PROCESSES]:
        with suppress(OSError):
            named.append(f"{pid} ({Path(f'/proc/{pid}/comm').read_text(errors='replace').strip()})")
    more = len(pids) - len(named)
    return f"process {', '.join(named)}" + (f" and {more} more" if more else "")


def _layers(mount: mount_table.Mount) -> Iterator[str]:
    """The lower directories of an overlayfs. Colons and commas in their names are escaped."""
    for option in re.split(r"(?<!\\),", mount_table.unescaped(mount.options)):
        name, _, value = option.partition("=")
        if name in ("lowerdir", "lowerdir+"):
            yield from (_ESCAPED.sub(r"\1", layer) for layer in re.split(r"(?<!\\):", value))

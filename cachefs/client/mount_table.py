"""What is mounted where on this machine. Read from the mount table alone: to touch a mount could hang."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass

from cachefs.errors import CacheFsError

FSTYPE = "fuse.cachefs"


@dataclass(frozen=True, slots=True)
class Mount:
    number: int
    """Of this place in the tree, as in /proc/PID/fdinfo (mnt_id)."""
    device: str
    """major:minor; no two filesystems that exist at the same time have the same."""
    mountpoint: str
    fstype: str
    source: str


def _unescape(field: str) -> str:
    raw = re.sub(rb"\\([0-7]{3})", lambda m: bytes([int(m[1], 8)]), os.fsencode(field))
    return os.fsdecode(raw)


def mounts() -> list[Mount]:
    """The mount table of this namespace, in the order of mounting."""
    found = []
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as table:
        for line in table:
            fields = line.split(" ")
            separator = fields.index("-")
            found.append(
                Mount(
                    int(fields[0]),
                    fields[2],
                    _unescape(fields[4]),
                    fields[separator + 1],
                    _unescape(fields[separator + 2]),
                )
            )
    return found


def top_mount(path: str) -> Mount | None:
    """What is mounted at exactly this path, the uppermost."""
    return next((m for m in reversed(mounts()) if m.mountpoint == path), None)


def covering(path: str) -> Mount | None:
    """The mount that an absolute path leads to; None where it cannot be told."""
    found = None
    for mount in mounts():
        if beneath(mount.mountpoint, path) is not None and (
            found is None or len(mount.mountpoint) >= len(found.mountpoint)
        ):
            found = mount
    return found


def number_of(fd: int) -> int:
    """Of the mount that a descriptor belongs to, without asking it; it may not be mounted anywhere any more."""
    with open(f"/proc/self/fdinfo/{fd}") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("mnt_id:"))


def fstype_of(fd: int) -> str:
    """Of the mount that a descriptor belongs to, without asking it. Empty where that is not mounted anywhere."""
    number = number_of(fd)
    return next((mount.fstype for mount in mounts() if mount.number == number), "")


def absolute(path: str, realpath: Callable[[str], str] = os.path.realpath) -> str:
    """A canonical path, without touching what is mounted at the path itself, which may be dead or hung.

    Nor is the source of a mount of ours touched: its path in the mount table is canonical. `realpath` touches the rest.
    """
    plain = os.path.abspath(path)
    if top_mount(plain) is not None or any(mount.fstype == FSTYPE and mount.source == plain for mount in mounts()):
        return plain
    parent, name = os.path.split(plain)
    joined = os.path.join(realpath(parent), name)
    return joined if top_mount(joined) is not None else realpath(joined)


def is_mounted(place: str) -> bool:
    """Is it one of ours that is mounted there?"""
    top = top_mount(place)
    return top is not None and top.fstype == FSTYPE


def split(path: str) -> tuple[str, str]:
    """The cachefs mount that an absolute path lies on, and the path within it. Raises CacheFsError if there is none."""
    places = [m.mountpoint for m in mounts() if m.fstype == FSTYPE]
    for place in sorted(places, key=len, reverse=True):
        if (inside := beneath(place, path)) is not None:
            return place, inside
    raise CacheFsError(f"{path} is not on a cachefs mount")


def beneath(place: str, path: str) -> str | None:
    """The path relative to `place`; "" for that itself, None for what lies elsewhere."""
    if path == place:
        return ""
    return path[len(place) :].strip("/") if path.startswith(place.rstrip("/") + "/") else None

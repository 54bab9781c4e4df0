"""The mounts of this machine. Reads only the mount table: an access to a mount could hang."""

import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from cachefs.errors import CacheFsError

FSTYPE = "fuse.cachefs"


@dataclass(frozen=True, slots=True)
class Mount:
    number: int
    """The mount ID, as in /proc/PID/fdinfo (mnt_id)."""
    parent: int
    """The mount ID of the mount that its mountpoint is on."""
    device: str
    """major:minor, unique among the filesystems that exist."""
    root: str
    """The directory of the filesystem that is mounted."""
    mountpoint: str
    fstype: str
    source: str
    options: str
    """The options of the filesystem, not those of the mountpoint."""
    user: int
    """The uid of the user who mounted; 0 where the filesystem does not say."""
    is_idmapped: bool = False
    """Does the mount show other owners than the filesystem has?"""

    @property
    def is_private(self) -> bool:
        """Is it a FUSE filesystem, mounted without allow_other? Only processes of its user may enter it."""
        return self.fstype.split(".")[0] in ("fuse", "fuseblk") and "allow_other" not in self.options.split(",")


def unescaped(field: str) -> str:
    """A field of the mount table without its octal escapes."""
    raw = re.sub(rb"\\([0-7]{3})", lambda m: bytes([int(m[1], 8)]), os.fsencode(field))
    return os.fsdecode(raw)


def mounts(process: int | str = "self") -> list[Mount]:
    """The mount table of the namespace of a process, in the order of mounting."""
    found = []
    with open(f"/proc/{process}/mountinfo", encoding="utf-8", errors="surrogateescape") as table:
        for line in table:
            fields = line.split(" ")
            number, parent, device, root, mountpoint = fields[:5]
            _, fstype, source, options = fields[fields.index("-") :][:4]
            user = re.search(r"\buser_id=(\d+)", options)
            found.append(
                Mount(
                    int(number),
                    int(parent),
                    device,
                    unescaped(root),
                    unescaped(mountpoint),
                    fstype,
                    unescaped(source),
                    options.rstrip("\n"),
                    int(user[1]) if user is not None else 0,
                    "idmapped" in fields[5].split(","),
                )
            )
    return found


def top_mount(path: str) -> Mount | None:
    """The uppermost mount at exactly this path."""
    return next((m for m in reversed(mounts()) if m.mountpoint == path), None)


def covering(path: str) -> Mount | None:
    """The mount that an absolute path leads to, as the kernel finds it; None if that is not in the table.

    Neither the order of the table nor the length of a mountpoint decides: a mount that was moved keeps its line, and a
    mount over a directory hides those beneath it.
    """
    table = mounts()
    numbers = {mount.number for mount in table}
    on_top = {(mount.parent if mount.parent in numbers else 0, mount.mountpoint): mount for mount in table}
    found = None
    place = "/"
    for name in ["", *filter(None, path.split("/"))]:
        place = os.path.join(place, name)
        while (mount := on_top.pop((found.number if found else 0, place), None)) is not None:
            found = mount
    return found


def mountpoints_beneath(place: str) -> list[str]:
    """The paths, relative to `place`, at which something is mounted beneath it."""
    return [path for mount in mounts() if (path := beneath(place, mount.mountpoint))]


def directory_of(mount: Mount, path: str) -> tuple[str, str]:
    """The filesystem of a path on a mount, and the path in it: the same on each mount of that filesystem."""
    return mount.device, os.path.normpath(os.path.join(mount.root, beneath(mount.mountpoint, path) or ""))


def number_of(fd: int) -> int:
    """The ID of a descriptor's mount, without accessing it. The mount may be detached."""
    with open(f"/proc/self/fdinfo/{fd}") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("mnt_id:"))


def mount_of(fd: int) -> Mount | None:
    """The mount of a descriptor, without accessing it. None if the mount is detached."""
    number = number_of(fd)
    return next((mount for mount in mounts() if mount.number == number), None)


def fstype_of(fd: int) -> str:
    """The filesystem type of a descriptor's mount, without accessing it. Empty if the mount is detached."""
    mount = mount_of(fd)
    return "" if mount is None else mount.fstype


def absolute(path: str, realpath: Callable[[str], str] = os.path.realpath) -> str:
    """A canonical path, without access to a mount at the path itself, which may be dead or hang.

    The source of a cachefs mount is not accessed either: its path in the mount table is canonical. `realpath` accesses
    all other paths.
    """
    plain = os.path.abspath(path)
    if top_mount(plain) is not None or any(mount.fstype == FSTYPE and mount.source == plain for mount in mounts()):
        return plain
    parent, name = os.path.split(plain)
    joined = os.path.join(realpath(parent), name)
    return joined if top_mount(joined) is not None else realpath(joined)


def is_mounted(place: str) -> bool:
    """Is a cachefs mounted there?"""
    top = top_mount(place)
    return top is not None and top.fstype == FSTYPE


def split(path: str) -> tuple[str, str]:
    """The cachefs mount that an absolute path lies on, and the path within it. Raises CacheFsError if there is none."""
    places = [m.mountpoint for m in mounts() if m.fstype == FSTYPE]
    for place in sorted(places, key=len, reverse=True):
        if (inside := beneath(place, path)) is not None:
            return place, inside
    raise CacheFsError(f"{path} is not on a cachefs mount")


def containing(path: str) -> str:
    """The mountpoint of the cachefs mount that a path lies on; accesses a path only if no mount covers it as written.

    Raises CacheFsError if it is on none.
    """
    for place in (os.path.abspath(path), absolute(path)):
        with suppress(CacheFsError):
            return split(place)[0]
    raise CacheFsError(f"no cachefs is mounted on {path}")


def beneath(place: str, path: str) -> str | None:
    """The path relative to `place`: "" for `place` itself, None for a path elsewhere."""
    if path == place:
        return ""
    return path[len(place) :].strip("/") if path.startswith(place.rstrip("/") + "/") else None

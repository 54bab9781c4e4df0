"""The memory limit of the control groups (cgroups(7)) that this process is in: a service, a job, a container.

The kernel kills processes of a group that reaches its limit. The daemon is usually the largest of them, and its mount
then stays without a daemon. So a limit that is certainly too low is found before anything is mounted.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from cachefs.client import mount_table

LEAST_BYTES = 128 << 20
"""Daemon, fast path, notifier and the memory that they share have 70 MiB after the start, and 86 MiB after 8 readers
have read 6,000 small files. With a limit of 96 MiB the kernel killed the daemon then, with 128 MiB it did not. 64
readers of files of 10 MB, which is what --fetch-threads allows, have 150 MiB."""
_OWN_GROUPS = Path("/proc/self/cgroup")


def shortage() -> str | None:
    """One line if the lowest limit is too low. It names the limit and the least."""
    limits = list(_limits())
    if not limits or min(limits)[0] >= LEAST_BYTES:
        return None
    lowest, path = min(limits)
    return (
        f"the memory limit of this service, job or container is {lowest >> 20} MiB ({path}), and a mount needs "
        f"{LEAST_BYTES >> 20} MiB: raise the limit"
    )


def _limits() -> Iterator[tuple[int, Path]]:
    """(bytes, file) of each group that this process is in, and of its parents. Groups without a limit are left out."""
    for name, place, group in _groups():
        for directory in (group, *group.parents):
            with suppress(OSError, ValueError):  # the root group has no limit, others may be "max"
                yield int((directory / name).read_text()), directory / name
            if directory == place:
                break


def _groups() -> Iterator[tuple[str, Path, Path]]:
    """(name of the limit's file, mountpoint of the hierarchy, directory of this process's group in it)."""
    groups = {}
    for line in _OWN_GROUPS.read_text(errors="surrogateescape").splitlines():
        _, controllers, path = line.split(":", 2)
        groups.update(dict.fromkeys(controllers.split(","), path))
    for mount in mount_table.mounts():
        if mount.fstype == "cgroup2" and "" in groups:
            name, path = "memory.max", groups[""]
        elif mount.fstype == "cgroup" and "memory" in mount.options.split(",") and "memory" in groups:
            name, path = "memory.limit_in_bytes", groups["memory"]
        else:
            continue
        # In a container the mounted directory may be the group itself, under a path of its own.
        inside = mount_table.beneath(mount.root, path)
        yield name, Path(mount.mountpoint), Path(os.path.join(mount.mountpoint, inside or ""))

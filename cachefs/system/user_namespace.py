"""The user namespace of this process (user_namespaces(7)): `unshare --user`, or a rootless container.

Users that it does not map all look the same there: stat(2) shows the overflow uid, usually 65534.
"""

import fcntl
import os
from pathlib import Path

from cachefs.system.descriptors import closing

_ALL_USERS = 0xFFFFFFFF
_NS_GET_USERNS = 0xB701
"""ioctl_ns(2): the user namespace that owns another namespace."""


def maps_all_users() -> bool:
    """True in the initial namespace."""
    lines = Path("/proc/self/uid_map").read_text().splitlines()
    return sum(int(line.split()[2]) for line in lines) >= _ALL_USERS


def is_unmapped(uid: int) -> bool:
    """May this be the uid that is shown for users outside the namespace?"""
    return uid == int(Path("/proc/sys/kernel/overflowuid").read_text()) and not maps_all_users()


def owns_mounts() -> bool:
    """May root of this user namespace mount in its mount namespace?"""
    with closing(os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)) as mounts:
        try:
            owner = fcntl.ioctl(mounts, _NS_GET_USERNS)
        except PermissionError:  # the owner is outside this user namespace
            return False
    with closing(owner):
        return os.path.samestat(os.fstat(owner), os.stat("/proc/self/ns/user"))
